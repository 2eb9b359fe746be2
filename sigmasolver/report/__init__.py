"""Results as people read them: rows of records become tables and curves (`tables`), and a study of them one HTML page
(`page`). Only numbers and words come in; nothing here imports torch, a model or a data set.
"""
