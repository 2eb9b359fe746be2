"""The baselines of the paper: one module per method, independent of each other; `models.variants` registers them."""
