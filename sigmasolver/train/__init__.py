"""Training: losses (`objectives`), optimisers and learning rate schedule (`optimisers`), one training step (`engine`),
the training loop (`loop`), the path from a data file to a finished run (`job`, `infer_recipe`), and estimates of time
and memory (`plan`)."""
