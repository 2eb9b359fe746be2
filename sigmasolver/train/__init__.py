"""Training: what a batch costs (`objectives`), how fast it learns (`schedule`), how a step runs (`engine`), the loop,
and the way from a data file to a finished run (`job`, `infer_recipe`), and what it will cost (`plan`)."""
