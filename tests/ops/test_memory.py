"""Freed memory that stays in the process is reused: the system maps no new pages."""

import sys

import pytest

from tests.forked import check_output

CODE = """
import resource
from sigmasolver.ops.memory import keep_freed_memory
import torch

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(2**24)  # more than glibc ever learns to keep by itself
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
system = faults()
assert keep_freed_memory()
faults()
print(system, min(faults() for _ in range(4)))  # a small block may come to lie in the way once, and stays where it is
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_keep_freed_memory_reuses_blocks():
    default_faults, faults = map(int, check_output(CODE).split())
    assert default_faults > 1000 and faults < default_faults / 20
