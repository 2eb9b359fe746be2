"""Errors of a report against the metrics of an evaluation, which have the same definitions."""

import numpy as np
import pytest
import torch

from sigmasolver.evaluate.metrics import blow_up, relative_l2_per_lead
from sigmasolver.report.errors import blown_up, percent_text, relative_l2


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_relative_l2_agrees_with_the_metric(dtype):
    """Parity with `metrics.relative_l2_per_lead`, also of a zero or non-finite frame."""
    generator = np.random.default_rng(0)
    truth, forecast = (generator.standard_normal((5, 6, 7)).astype(dtype) for _ in range(2))
    truth[1], forecast[2], forecast[3, 0, 0], truth[4], forecast[4] = 0, truth[2], np.nan, 0, 0
    metric = relative_l2_per_lead(*(torch.from_numpy(frames)[None, ..., None] for frames in (forecast, truth)))
    difference = forecast.astype(np.float64) - truth
    ours = [relative_l2(*pair) for pair in zip(difference, truth, strict=True)]
    np.testing.assert_allclose(ours, metric[0, :, 0], rtol=1e-14)
    assert ours[1] == np.inf and ours[2] == 0 and np.isnan(ours[3:]).all()
    assert [relative_l2(abs(frame), true) for frame, true in zip(difference[:3], truth, strict=False)] == ours[:3]
    assert [percent_text(error) for error in (0.0314, np.inf)] == ["3.14 %", "not finite"]


def test_blown_up_agrees_with_the_blow_up_metric():
    """Parity with `metrics.blow_up` for each lead."""
    rng = np.random.default_rng(0)
    truth = rng.standard_normal((6, 4, 4)) * np.array([1, 2, 1, 1, 1, 1])[:, None, None]
    size = 10 * np.linalg.norm(truth[1])
    forecast = truth / np.linalg.norm(truth, axis=(1, 2), keepdims=True) * size
    forecast *= np.array([0.1, 0.99, 1.01, 1, 1, 1])[:, None, None]
    forecast[3], forecast[4, 0, 0], forecast[5] = truth[3], np.nan, np.inf
    assert blown_up(forecast, truth).tolist() == [False, False, True, False, True, True]
    for lead in range(6):
        mixed = truth.copy()  # the truth except at one lead
        mixed[lead] = forecast[lead]
        (flagged,), (valid_leads,) = blow_up(*(torch.from_numpy(frames)[None, ..., None] for frames in (mixed, truth)))
        assert bool(flagged) == blown_up(mixed, truth).any() == blown_up(forecast, truth)[lead]
        assert int(valid_leads) == (lead if flagged else 6)
    assert blown_up(np.full((1, 2), 9.0), np.zeros((1, 2))).tolist() == [False]  # no reference norm
    partly = np.array([[1.0, np.nan]])
    assert blown_up(np.array([[1.0, 2.0]]), partly).tolist() == [False]
