"""Why forecasts drift and what a model costs: one module per diagnostic; `run` lists and runs them.

A diagnostic is a function that maps a `Subject` (a forecaster and test windows) to `Findings`, rows and arrays
(`subject`); `records` stores them in the run folder. `watch` inspects a model with forward hooks, `gains` and
`linearise` compute products with its Jacobian, `cases` and `states` select test windows and training states.
"""
