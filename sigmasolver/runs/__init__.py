"""Run folders and the files in them; every file is written to a temporary name and renamed."""

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
