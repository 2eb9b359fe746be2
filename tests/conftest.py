"""Shared by all tests: one thread per worker (the workers are the parallelism), fixed seeds, small models."""

import gc
import os
import signal
import sys
from collections.abc import Callable
from functools import partial

import pytest

# Before NumPy and torch are loaded, and for the processes that tests start: threads that wait for each other on busy
# cores burn minutes.
os.environ["OMP_NUM_THREADS"] = "1"

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before anything reads Triton

from sigmasolver.cli import main
from sigmasolver.models import Options, build_model, variants
from sigmasolver.models.baselines.hpm import hpm
from sigmasolver.models.solver import Solver

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # In the background Ctrl-C is ignored, and so it would be in the commands whose Ctrl-C is tested.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = ("ops/test_compiled", "test_tutorials", "experiments/test_jobs", "golden/test_training", "export/test_export")
"""The files with the longest tests. They come first, so that workers end together."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: next((place for place, file in enumerate(LONG) if file in item.nodeid), len(LONG)))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))


def pytest_collection_finish() -> None:
    """Modules stay: the garbage collector need not look through them again and again. Nor need it look after every
    700 objects; a traced model makes millions."""
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
    """A small float64 solver on two axes, every parameter moved off its starting value (gamma starts at zero)."""

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
    """The command as `sigmasolver` runs it, in this process: exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["sigmasolver", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = leaving.code or 0
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def few_frequencies(monkeypatch: pytest.MonkeyPatch) -> None:
    """HPM needs as many points as it has frequencies; its rows with their 128 are in `variants.BASELINES`."""
    for name, stored in (("hpm", False), ("hpm-frozen", True)):
        monkeypatch.setitem(variants.MODELS, name, partial(hpm, frequencies=5, stored=stored))
