"""Kernels in Triton's interpreter, where there is no GPU."""

import pytest
import torch

try:
    from tests.ops.interpreter import make_faster
except ImportError:
    make_faster = None
if make_faster is not None and not torch.cuda.is_available():
    make_faster()


@pytest.fixture
def short_loops(monkeypatch):
    """Weight gradients of a convolution in one turn of their loop, of a wider tile; on a GPU as ever.

    A turn costs the interpreter as much for four runs of points as for sixteen, and small grids have no more. That the
    loop itself is right shows where this is not used: `test_convolutions` in two axes, and over several chunks.
    """
    if not torch.cuda.is_available():
        from sigmasolver.ops.fused import tuning

        monkeypatch.setattr(tuning, "WEIGHT_GRADIENT_RUNS", 16)
        monkeypatch.setattr(tuning, "MIN_WEIGHT_GRADIENT_CHUNK", 16)
