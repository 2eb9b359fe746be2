"""Silenced forecasts, alignment and gains as rows, each against a rollout or a sum written out."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sigmasolver import metrics
from sigmasolver.diagnose import gains
from sigmasolver.diagnose import interventions as module
from sigmasolver.diagnose.bands import Bands
from sigmasolver.diagnose.gains import MeanJacobian, history_update
from sigmasolver.diagnose.interventions import _histories, alignment, interventions, propagation
from sigmasolver.forecast import feed_back, rollout
from tests.diagnose.looking import FIELDS, STEADY, TASK, hooks_in, number, rows_named, subject_in_a_volume, subject_of
from tests.diagnose.test_watch import really_zero


def everything(subject):
    """History and truth of all windows in one batch."""
    _, history, truth = next(replace(subject, batch=len(subject.indices)).batches())
    return history, truth


def quick(subject):
    """Two calls are enough to see the rows."""
    return replace(subject, horizon=2)


@pytest.fixture
def loose(monkeypatch):
    """Where gains are not looked at they need no digits."""
    monkeypatch.setattr(gains, "MOST", 1)


@pytest.mark.parametrize("name", ["transolver-sigma", "spectral-then-physical"])
def test_errors_are_those_of_a_model_whose_branch_is_really_zero(name, loose):
    subject = quick(subject_of(name, dtype=torch.float64))
    findings, (history, truth) = interventions(subject), everything(subject)
    models = {"intact": subject.forecaster} | {
        f"zero_{kind}": really_zero(subject, kind) for kind in ("physical", "spectral")
    }
    for metric, forecaster in models.items():
        with torch.no_grad():
            frames = rollout(forecaster, history, 2).frames
        for lead in (1, 2):
            error = metrics.relative_l2_per_lead(frames, truth)[:, lead - 1]
            for place, field in enumerate(FIELDS):
                (row,) = rows_named(findings, metric, lead=lead, field=field)
                assert row["value"] == pytest.approx(error[:, place].mean().item(), rel=1e-10)
                assert row["deviation"] == pytest.approx(error[:, place].std().item(), rel=1e-8)
            at = [one[:, lead - 1].flatten(1) for one in (frames, truth)]
            joint = (at[0] - at[1]).norm(dim=1) / at[1].norm(dim=1)
            assert number(findings, metric, lead=lead) == pytest.approx(joint.mean().item(), rel=1e-10)
    assert hooks_in(subject.forecaster) == 0


def test_alignment_is_exactly_the_squared_error_that_is_saved():
    """eq:complement-marginal-alignment."""
    whole, silent, true = torch.randn(3, 4, 2, 5, 5, 2).double()
    found = alignment(whole, silent, true)
    error = (whole - true).square().sum((2, 3))
    torch.testing.assert_close(error, found.left - found.gained)
    for b in range(4):
        for h in range(2):
            r, c = (one[b, h, ..., 1] - silent[b, h, ..., 1] for one in (true, whole))
            assert found.gained[b, h, 1] == pytest.approx(float(2 * (r * c).sum() - c.norm() ** 2), rel=1e-12)
            assert found.left[b, h, 1] == pytest.approx(float(r.norm() ** 2), rel=1e-12)


def test_alignment_counts_windows_that_the_operator_brings_nearer_to_the_truth(loose):
    subject = quick(subject_of(dtype=torch.float64, windows=None))
    findings, (history, truth) = interventions(subject), everything(subject)
    shares = []
    for metric, kind in (("alignment", "physical"), ("alignment_spectral", "spectral")):
        without = really_zero(subject, kind)
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
    assert len(set(shares)) > 1  # the cases really differ


def test_gains_stand_at_the_first_lead_of_their_call():
    subject = subject_of(task=replace(TASK, block=2), dtype=torch.float64)
    findings = interventions(subject)
    assert findings.arrays["leads"].tolist() == [1, 3]
    assert findings.arrays["cases"].tolist() == subject.indices[[0, 4]].tolist()
    history, truth = (one[[0, 4]] for one in everything(subject))
    with torch.no_grad():
        histories = (
            (history, history),
            (feed_back(history, truth[:, :2]), feed_back(history, subject.forecaster(history))),
        )
    for call, (true, visited) in enumerate(histories):
        J = MeanJacobian(history_update(subject.forecaster, true[..., 2:]), true, visited)
        for metric, values in propagation(J, Bands((3, 3)), true).items():
            np.testing.assert_allclose(findings.arrays[metric][:, call], values.numpy(), rtol=1e-5)
            (row,) = rows_named(findings, metric, lead=2 * call + 1)
            assert row["value"] == pytest.approx(values.mean().item(), rel=1e-10)
            assert row["deviation"] == pytest.approx(values.std().item(), rel=1e-6)


def test_gains_of_a_long_forecast_are_those_of_a_few_calls_and_the_rows_say_so(monkeypatch):
    subject = subject_of(task=replace(TASK, horizon=6), dtype=torch.float64)
    sparse = interventions(subject)
    monkeypatch.setattr(module, "GAIN_CALLS", 6)
    whole = interventions(subject)
    assert sparse.arrays["leads"].tolist() == [1, 3, 4, 6] and whole.arrays["leads"].tolist() == [1, 2, 3, 4, 5, 6]
    for metric in module.NORMS:
        assert np.array_equal(sparse.arrays[metric], whole.arrays[metric][:, [0, 2, 3, 5]])
        assert len(set(whole.arrays[metric][0].tolist())) == 6  # the calls really differ
        for lead in (1, 3, 4, 6):
            assert number(sparse, metric, lead=lead) == number(whole, metric, lead=lead)
    assert (number(sparse, "gain_calls"), number(sparse, "gain_cases")) == (4, 2)
    assert number(sparse, "gain_tolerance") == gains.TOLERANCE


@pytest.mark.parametrize("task", [TASK, replace(TASK, block=3), STEADY], ids=["calls", "blocks", "steady"])
def test_the_bar_moves_with_every_call_and_every_product_and_ends_full(task, monkeypatch):
    monkeypatch.setattr(gains, "MOST", 9)
    told = []
    subject = subject_of(task=task)
    plain = interventions(subject)
    again = interventions(replace(subject, tick=lambda *now: told.append(now)))
    assert [row["value"] for row in again.rows] == [row["value"] for row in plain.rows]  # to look on changes nothing
    done, totals = zip(*told, strict=True)
    calls = -(-task.horizon // task.block)
    windows, forecasts = 3, 6  # batches of 2, 2 and 1; free and from true histories: intact, and two kinds silenced
    expected = 5 * calls * forecasts + (0 if task.steady else calls * 3 * 9)
    assert set(totals) == {expected} and done[-1] == expected
    assert list(done) == sorted(done) and done[0] > 0
    assert sum(now <= 5 * calls * forecasts for now in set(done)) == windows * calls * forecasts
    if not task.steady:  # eight products at least for every norm, of which the last one ends it
        assert len(set(done)) - windows * calls * forecasts >= calls * 3 * 7
    assert hooks_in(subject.forecaster) == 0


@pytest.mark.parametrize("block", [1, 2])
def test_histories_are_those_of_the_truth_and_of_the_free_forecast(block):
    subject = subject_of(task=replace(TASK, block=block, horizon=6), dtype=torch.float64)
    history, truth = everything(subject)
    with torch.no_grad():
        frames = rollout(subject.forecaster, history, 6).frames
    times = subject.times(subject.indices)
    met = list(_histories(subject.forecaster, history, truth, times))
    assert len(met) == 6 // block
    for call, (*histories, time) in enumerate(met):
        assert torch.equal(time, times[:, call * block])
        for found, following in zip(histories, (truth, frames), strict=True):
            whole = torch.cat((history, following), dim=1)
            assert torch.equal(found, whole[:, call * block : call * block + 2])


@pytest.mark.parametrize(
    "name, silent",
    [("physolver", {"physical"}), ("transolver", {"physical"}), ("ffno", {"spectral"}), ("linearno", set())],
)
def test_any_model_has_gains_and_the_interventions_that_it_has_operators_for(name, silent, loose):
    found = {row["metric"] for row in interventions(replace(subject_of(name), horizon=1)).rows}
    assert {"intact", "gain", "cross_propagation_low_high", "cross_propagation_high_low"} <= found
    assert {metric for metric in found if metric.startswith("zero_")} == {f"zero_{kind}" for kind in silent}


def test_in_a_volume_gains_are_those_of_one_case(loose):
    findings = interventions(subject_in_a_volume())
    assert findings.arrays["gain"].shape == (1, 2) and findings.arrays["gain"].min() > 0
    assert rows_named(findings, "gain", lead=2)[0]["deviation"] is None


def test_a_steady_task_has_no_gains():
    subject = subject_of(task=STEADY)
    findings = interventions(subject)
    assert not findings.arrays and not rows_named(findings, "gain", lead=1)
    assert number(findings, "zero_physical", lead=1) != number(findings, "intact", lead=1)


def test_forecasts_that_blow_up_leave_numbers_that_say_so():
    subject = quick(subject_of())
    with torch.no_grad():
        subject.forecaster.model.readout.weight.fill_(1e30)
    findings = interventions(subject)
    assert not np.isfinite(number(findings, "intact", lead=2))
    assert not np.isfinite(findings.arrays["gain"][:, 1]).any()
