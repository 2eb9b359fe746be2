"""Models that are larger than the grids of these tests are made small."""

import pytest
import torch


@pytest.fixture(autouse=True)
def small_hpm(few_frequencies: None) -> None:
    """In all tests of this folder."""


@pytest.fixture(autouse=True)
def compiler_starts_anew() -> None:
    """The compiler refuses a function that it has traced eight times, and all models of a frame share one."""
    torch._dynamo.reset()
