"""Rows of silenced forecasts and of alignment against a rollout or an explicit sum."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sigmasolver.diagnose.interventions import alignment, interventions
from sigmasolver.evaluate import metrics
from sigmasolver.forecast import feed_back, rollout
from tests.diagnose.subjects import FIELDS, STEADY, TASK, hooks_in, number, rows_named, subject_of
from tests.diagnose.test_watch import zeroed_copy


def full_batch(subject):
    """History and truth of all windows in one batch."""
    _, history, truth = next(replace(subject, batch=len(subject.indices)).batches())
    return history, truth


def short(subject):
    """Restrict the horizon to two calls."""
    return replace(subject, horizon=2)


@pytest.mark.parametrize("name", ["transolver-sigma", "spectral-then-physical"])
def test_intervention_errors_match_zeroed_weights(name):
    subject = short(subject_of(name, dtype=torch.float64))
    findings, (history, truth) = interventions(subject), full_batch(subject)
    models = {"intact": subject.forecaster} | {
        f"zero_{kind}": zeroed_copy(subject, kind) for kind in ("physical", "spectral")
    }
    for metric, forecaster in models.items():
        with torch.no_grad():
            frames = rollout(forecaster, history, 2).frames
        for lead in (1, 2):
            error = metrics.relative_l2_per_lead(frames, truth)[:, lead - 1]
            for channel, field in enumerate(FIELDS):
                (row,) = rows_named(findings, metric, lead=lead, field=field)
                assert row["value"] == pytest.approx(error[:, channel].mean().item(), rel=1e-10)
                assert row["deviation"] == pytest.approx(error[:, channel].std().item(), rel=1e-8)
            at = [values[:, lead - 1].flatten(1) for values in (frames, truth)]
            joint = (at[0] - at[1]).norm(dim=1) / at[1].norm(dim=1)
            assert number(findings, metric, lead=lead) == pytest.approx(joint.mean().item(), rel=1e-10)
    assert hooks_in(subject.forecaster) == 0


def test_alignment_equals_the_reduction_of_squared_error():
    """eq:complement-marginal-alignment."""
    full, silent, true = torch.randn(3, 4, 2, 5, 5, 2).double()
    result = alignment(full, silent, true)
    error = (full - true).square().sum((2, 3))
    torch.testing.assert_close(error, result.left - result.gained)
    for b in range(4):
        for h in range(2):
            r, c = (values[b, h, ..., 1] - silent[b, h, ..., 1] for values in (true, full))
            assert result.gained[b, h, 1] == pytest.approx(float(2 * (r * c).sum() - c.norm() ** 2), rel=1e-12)
            assert result.left[b, h, 1] == pytest.approx(float(r.norm() ** 2), rel=1e-12)


def test_alignment_rows_count_windows_improved_by_the_operator():
    subject = short(subject_of(dtype=torch.float64, windows=None))
    findings, (history, truth) = interventions(subject), full_batch(subject)
    shares = []
    for metric, kind in (("alignment", "physical"), ("alignment_spectral", "spectral")):
        without = zeroed_copy(subject, kind)
        for lead, given in ((1, history), (2, feed_back(history, truth[:, :1]))):  # true histories
            y = truth[:, lead - 1 : lead]
            with torch.no_grad():
                r, c = y - without(given), subject.forecaster(given) - without(given)
            r, c = r.flatten(1), c.flatten(1)
            better = 2 * (r * c).sum(1) > c.norm(dim=1) ** 2
            shares.append(better.double().mean().item())
            assert number(findings, metric, lead=lead) == shares[-1]
            removed = (2 * (r * c).sum(1) - c.norm(dim=1) ** 2) / r.norm(dim=1) ** 2
            name = metric.replace("alignment", "defect_reduction")
            assert number(findings, name, lead=lead) == pytest.approx(removed.mean().item(), rel=1e-9)
    assert len(set(shares)) > 1  # the cases differ


@pytest.mark.parametrize("task", [TASK, replace(TASK, block=3), STEADY], ids=["calls", "blocks", "steady"])
def test_interventions_progress_counts_calls(task):
    ticks = []
    subject = subject_of(task=task)
    plain = interventions(subject)
    with_ticks = interventions(replace(subject, tick=lambda *progress: ticks.append(progress)))
    assert [row["value"] for row in with_ticks.rows] == [row["value"] for row in plain.rows]  # unaffected by the ticks
    done, totals = zip(*ticks, strict=True)
    calls = -(-task.horizon // task.block)
    batches, forecasts = 3, 6  # batches of 2, 2 and 1; free and teacher-forced: intact, and two kinds silenced
    expected = 5 * calls * forecasts
    assert set(totals) == {expected} and done[-1] == expected
    assert list(done) == sorted(done) and done[0] > 0
    assert len(set(done)) == batches * calls * forecasts
    assert hooks_in(subject.forecaster) == 0


@pytest.mark.parametrize(
    "name, silent",
    [("physolver", {"physical"}), ("transolver", {"physical"}), ("ffno", {"spectral"}), ("linearno", set())],
)
def test_interventions_depend_on_the_operators_of_the_model(name, silent):
    metric_names = {row["metric"] for row in interventions(replace(subject_of(name), horizon=1)).rows}
    assert "intact" in metric_names
    assert {metric for metric in metric_names if metric.startswith("zero_")} == {f"zero_{kind}" for kind in silent}


def test_interventions_of_a_steady_task():
    findings = interventions(subject_of(task=STEADY))
    assert number(findings, "zero_physical", lead=1) != number(findings, "intact", lead=1)


def test_interventions_of_a_blown_up_forecast_are_not_finite():
    subject = short(subject_of())
    with torch.no_grad():
        subject.forecaster.model.readout.weight.fill_(1e30)
    ticks = []
    findings = interventions(replace(subject, tick=lambda *progress: ticks.append(progress)))
    assert not np.isfinite(number(findings, "intact", lead=2))
    assert ticks[-1][0] == ticks[-1][1]  # the progress still ends at the total
