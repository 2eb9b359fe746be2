"""Shared fixtures: one thread per worker (the tests run in parallel workers), fixed seeds, small models."""

import gc
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import pytest

# Set before NumPy and torch are loaded, and inherited by child processes: threads that spin on busy cores cost minutes.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

from sigmasolver.cli import main
from sigmasolver.models import Options, build_model, variants
from sigmasolver.models.baselines.hpm import hpm
from sigmasolver.models.solver import Solver

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A background process ignores Ctrl-C, and so would the commands whose Ctrl-C is tested.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = ("ops/test_compiled", "test_tutorials", "experiments/test_jobs", "golden/test_training", "export/test_export")
"""Files with the longest tests, which run first so that all workers finish at the same time."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((rank for rank, file in enumerate(LONG) if file in item.nodeid), len(LONG)))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish() -> None:
    """Freeze the imported modules and raise the threshold of the garbage collector: a traced model creates millions of
    objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def small_model() -> Callable[..., Solver]:
    """A small 2-D float64 solver with every parameter perturbed (gamma is initialised to zero)."""

    def build(
        name: str = "transolver-sigma",
        grid: tuple[int, ...] = (12, 9),
        depth: int = 2,
        options: Options | None = None,
    ) -> Solver:
        model = build_model(
            name,
            grid=grid,
            in_channels=2,
            out_channels=3,
            width=16,
            depth=depth,
            heads=2,
            slices=5,
            modes=3,
            options=options,
        ).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        return model.eval()

    return build


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """Run the command line in this process; returns exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sigmasolver", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as exited:
            code = exited.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def few_frequencies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the 128 frequencies of HPM, which needs at least as many points (see `variants.BASELINES`)."""
    for name, stored in (("hpm", False), ("hpm-frozen", True)):
        monkeypatch.setitem(variants.MODELS, name, partial(hpm, frequencies=5, stored=stored))
