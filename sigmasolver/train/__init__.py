"""Training: loss (`objectives`), optimiser and learning rate (`optimisers`), a step (`engine`), the loop, the way from
a data file to a finished run (`job`, `infer_recipe`), and an estimate of time and memory (`plan`)."""
