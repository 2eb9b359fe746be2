"""Results as people read them: rows of records become tables (`tables`, `paper_tables`), figures (`figures`) and one
HTML page (`page`). Only numbers and words come in; nothing here imports torch, a model or a data set.
"""
