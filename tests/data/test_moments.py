"""Merged moments equal those of all values at once."""

import numpy as np
import pytest
import torch

from sigmasolver.data.moments import merge


def moments(values):
    mean = values.mean(0)
    return len(values), mean, ((values - mean) ** 2).sum(0)


@pytest.mark.parametrize("wrap", [np.asarray, torch.from_numpy])
@pytest.mark.parametrize("cut", [1, 40, 99])
def test_merge_equals_moments_of_all_values(wrap, cut):
    values = np.random.default_rng(cut).normal(loc=(0.0, 1e3, -5.0), size=(100, 3))
    n, m, S = merge(moments(wrap(values[:cut])), moments(wrap(values[cut:])))
    assert n == 100
    np.testing.assert_allclose(m, values.mean(0), rtol=1e-14, atol=1e-15)
    np.testing.assert_allclose(S, 100 * values.var(0), rtol=1e-12)


def test_merge_with_an_empty_set():
    n, m, S = np.array([0.0, 4.0, 0.0]), np.array([0.0, 1.5, 0.0]), np.array([0.0, 2.0, 0.0])
    other = np.array([3.0, 0.0, 0.0]), np.array([0.25, 0.0, 0.0]), np.array([1.0, 0.0, 0.0])
    merged = merge((n, m, S), other)
    np.testing.assert_array_equal(merged, [[3.0, 4.0, 0.0], [0.25, 1.5, 0.0], [1.0, 2.0, 0.0]])
