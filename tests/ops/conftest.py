"""Patch Triton's interpreter, which runs the kernels where there is no GPU."""

import pytest
import torch

try:
    from tests.ops.interpreter import patch_interpreter
except ImportError:
    patch_interpreter = None
if patch_interpreter is not None and not torch.cuda.is_available():
    patch_interpreter()


@pytest.fixture
def short_loops(monkeypatch):
    """Compute weight gradients of a convolution in one iteration with a wider tile; no change on a GPU.

    An iteration costs the interpreter as much for four runs of points as for sixteen, and small grids have no more. The
    loop itself is tested without this fixture: `test_depthwise_parity` on two axes, and over several chunks.
    """
    if not torch.cuda.is_available():
        from sigmasolver.ops.fused import tuning

        monkeypatch.setattr(tuning, "WEIGHT_GRADIENT_RUNS", 16)
        monkeypatch.setattr(tuning, "MIN_WEIGHT_GRADIENT_CHUNK", 16)
