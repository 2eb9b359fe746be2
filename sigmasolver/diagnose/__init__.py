"""Why forecasts drift and what a model costs: `run` lists the diagnostics and makes them, each is a file.

A diagnostic is a function of a `Subject` (a forecaster and test windows) that returns `Findings`, rows and arrays
(`subject`); `records` keeps them in the run folder. `watch` looks into a model by hooks, `gains` and `linearise` are
products with its Jacobian, `cases` and `states` choose what is looked at.
"""
