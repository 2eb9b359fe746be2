"""Models that are larger than the grids of these tests are made small."""

from functools import partial

import pytest
import torch

from sigmasolver.models import variants
from sigmasolver.models.baselines.hpm import hpm


@pytest.fixture(autouse=True)
def few_frequencies(monkeypatch: pytest.MonkeyPatch) -> None:
    """HPM needs as many points as it has frequencies; its rows with their 128 are in `variants.BASELINES`."""
    for name, stored in (("hpm", False), ("hpm-frozen", True)):
        monkeypatch.setitem(variants.MODELS, name, partial(hpm, frequencies=5, stored=stored))


@pytest.fixture(autouse=True)
def compiler_starts_anew() -> None:
    """The compiler refuses a function that it has traced eight times, and all models of a frame share one."""
    torch._dynamo.reset()
