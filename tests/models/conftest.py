"""Fixtures for all tests of the models."""

import pytest
import torch


@pytest.fixture(autouse=True)
def small_hpm(few_frequencies: None) -> None:
    """Limit the frequencies of HPM to the small grids of these tests."""


@pytest.fixture(autouse=True)
def reset_dynamo() -> None:
    """Dynamo stops recompiling a function after eight times, and many models share their `forward`."""
    torch._dynamo.reset()
