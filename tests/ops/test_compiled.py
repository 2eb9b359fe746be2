"""Kernels compiled for GPUs that are not there: they compile, and fit into shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from sigmasolver.ops import dispatch
from sigmasolver.ops.fused import tuning
from sigmasolver.ops.fused.tuning import Gpu, slice_shared_bytes
from sigmasolver.ops.slices import slice_limits
from tests.ops.compiled import DEVICES

slow = pytest.mark.slow
HEADS = [
    ("bf16", ((16, 64), (32, 64), (128, 16))),
    ("tf32", ((16, 64), (32, 64))),
    ("float32", ((16, 64), (32, 64))),
    *(
        pytest.param(precision, ((32, 16), (64, 16), (32, 32), (128, 16), (64, 32), (128, 32), (64, 64)), marks=slow)
        for precision in ("bf16", "tf32", "float32")
    ),
]
"""Slices and head width. For each term of the bound, one head comes within a tenth of it: tiles of points for a head up
to `WIDE_HEAD` and for a wider one, and the matrices of the update, whose kernels are the same in every precision."""
WIDE = {"width": 256}  # the widest of the paper's sweep over widths
SOLVERS = [
    ("H200", [("bf16", (8, 8, 8), {}), ("tf32", (32, 32), {})]),
    ("RTX 4090", [("bf16", (32, 32), {}), ("float32", (32, 32), WIDE)]),
    pytest.param("H200", [("bf16", (32, 32), {}), ("float32", (32, 32), {**WIDE, "slices": 128})], marks=slow),
    pytest.param("A100", [("bf16", (32, 32), {}), ("tf32", (8, 8, 8), {}), ("float32", (32, 32), WIDE)], marks=slow),
    pytest.param("RTX 4090", [("tf32", (8, 8, 8), {})], marks=slow),
]


@pytest.fixture(scope="module")
def compiled():
    """A function that returns the maximum shared memory by kernel for each workload; one process compiles them all."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command, root = [sys.executable, "-m", "tests.ops.compiled"], Path(__file__).parents[2]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, cwd=root, **pipes) as process:

        def ask(device, kind, *workloads):
            process.stdin.write(json.dumps([device, kind, workloads]) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline() or '"The process died."')
            assert isinstance(answer, list), answer[-2000:]
            return answer

        yield ask


@pytest.mark.parametrize(("precision", "sizes"), HEADS)
def test_slice_kernels_fit_in_shared_memory(compiled, precision, sizes):
    kind = {"float32": "tf32x3"}.get(precision, precision)
    workloads = [(precision, heads, {}) for heads in sizes]
    for (slices, width), shared in zip(sizes, compiled("H200", "slices", *workloads), strict=True):
        assert {"_slice", "update", "_deslice", "update_backward", "_backward"} <= set(shared)
        assert max(shared.values()) <= slice_shared_bytes(kind, slices, width) <= DEVICES["H200"][1], (slices, width)


@pytest.mark.parametrize(("device", "solvers"), SOLVERS)
def test_solver_kernels_fit_in_shared_memory(compiled, device, solvers):
    workloads = [(precision, ("transolver-sigma", grid), sizes) for precision, grid, sizes in solvers]
    for workload, shared in zip(workloads, compiled(device, "step", *workloads), strict=True):
        assert {"_context", "_slice", "_backward", "_lift_forward", "_read", "_join_backward"} <= set(shared)
        assert max(shared.values()) <= DEVICES[device][1], workload


BASELINES = {
    "hpm": {"_wrap", "_wrap_backward", "_through", "_through_backward"},
    "transolver-plus": {"_gumbel_forward", "_gumbel_backward"},
    "eddyformer": {"_windows", "_windows_backward", "_heads", "_heads_backward"},
}


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_baseline_kernels_fit_in_shared_memory(compiled, device):
    workloads = [("bf16", (name, (32, 32)), {"width": 32, "heads": 2}) for name in BASELINES]
    for workload, shared in zip(workloads, compiled(device, "step", *workloads), strict=True):
        assert BASELINES[workload[1][0]] <= set(shared)
        assert max(shared.values()) <= DEVICES[device][1], workload


@pytest.mark.slow
@pytest.mark.parametrize("precision", ("bf16", "tf32", "float32"))
def test_gated_basis_kernels_fit_in_shared_memory(compiled, precision):
    """They stay within the limit of shared memory that they have in common with slices."""
    kind = {"float32": "tf32x3"}.get(precision, precision)
    (shared,) = compiled("H200", "step", (precision, ("hpm", (64, 64)), {"width": 256}))
    assert max(shared["_through"], shared["_through_backward"]) <= slice_shared_bytes(kind, 128, 32)


def test_gpu_class_by_shared_memory():
    classes = {name: Gpu.with_shared_memory(shared) for name, (_, shared) in DEVICES.items()}
    assert classes == {"H200": Gpu.HOPPER, "A100": Gpu.AMPERE, "RTX 4090": Gpu.SMALL}
    assert Gpu.with_shared_memory(0) == Gpu.SMALL  # not reported by the driver
    for table in (tuning.SWIGLU_BACKWARD_TILES, tuning.LIFT_BACKWARD_TILES):
        assert set(table) == set(Gpu) and all(set(rows) == {2, 4} for rows in table.values())


def test_slice_limits_reject_many_slices_and_wide_heads(monkeypatch):
    """Slices, head width, and their product have limits on every device."""
    monkeypatch.setattr(dispatch, "interpreted", True)

    def reason(heads, width, slices):
        R = torch.zeros(1, 9, heads * width)
        return dispatch.why_plain(R, limits=slice_limits(R, heads, slices))

    assert reason(1, 16, 129) == "number of slices 129 is above 128"
    assert reason(1, 65, 16) == "head width 65 is above 64"
    for width, slices in ((64, 65), (33, 128)):
        assert reason(1, width, slices) == "padded slices times padded head width 8192 is above 4096"
    for heads, width, slices in ((3, 16, 128), (2, 64, 64), (1, 32, 128)):
        assert reason(heads, width, slices) is None
