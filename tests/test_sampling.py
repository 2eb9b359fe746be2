"""Seeds by hash and evenly spaced indices, which determine runs, simulated data and the windows of recorded results."""

import hashlib
from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sigmasolver.data.windows import spread_evenly
from sigmasolver.sampling import evenly_spaced, hashed_seed


@given(st.integers(2, 10**6), st.integers(2, 2000))
def test_evenly_spaced_ends_gaps_and_positions(count, limit):
    indices = evenly_spaced(count, limit)
    assert len(indices) == min(count, limit) and indices[0] == 0 and indices[-1] == count - 1
    gaps = {after - before for before, after in pairwise(indices)}
    assert min(gaps) >= 1 and max(gaps) - min(gaps) <= 1
    step = Fraction(count - 1, len(indices) - 1)
    assert all(abs(index - step * number) <= Fraction(1, 2) for number, index in enumerate(indices))


@pytest.mark.parametrize("count", [1, 2, 7])
def test_evenly_spaced_returns_all_if_the_limit_allows(count):
    assert evenly_spaced(count, count) == evenly_spaced(count, 10) == list(range(count))
    assert evenly_spaced(count, 1) == [0] and evenly_spaced(0, 3) == []
    assert spread_evenly(count, None).tolist() == list(range(count))


def test_evenly_spaced_equals_a_rounded_linspace():
    for count in range(1, 130):
        for limit in range(1, count + 1):
            rounded = torch.linspace(0, count - 1, limit, dtype=torch.float64).round().long()
            assert evenly_spaced(count, limit) == rounded.tolist()
            assert torch.equal(spread_evenly(count, limit), rounded)


def test_hashed_seed_is_63_bits_of_the_hash():
    for text in ("order/42/0", "order/42/1", "step/42/0/0", "darcy/0/0", ""):
        digest = hashlib.sha256(text.encode()).digest()
        assert hashed_seed(text) == sum(byte * 256**position for position, byte in enumerate(digest[:8])) // 2


def test_hashed_seed_recorded_value():
    """Data and runs of earlier versions must stay reproducible."""
    assert hashed_seed("darcy/0/0") == 4692949075405215600
