"""Reports: turn rows of records into tables (`tables`, `paper_tables`), figures (`figures`) and one HTML page (`page`).

Input is plain numbers and text; nothing here imports torch, a model or a data set.
"""
