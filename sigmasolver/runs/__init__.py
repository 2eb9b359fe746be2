"""Run folders and their files, which are written to a temporary name and renamed atomically."""

from sigmasolver.runs.folder import (
    Run,
    append_row,
    provenance,
    read_facts,
    read_records,
    read_rows,
    read_tensors,
    replace_rows,
    write_tensors,
)

__all__ = [
    "Run",
    "append_row",
    "provenance",
    "read_facts",
    "read_records",
    "read_rows",
    "read_tensors",
    "replace_rows",
    "write_tensors",
]
