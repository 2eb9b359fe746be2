"""Watching keeps forecasts bit-identical, silencing equals zeroed weights, and all hooks are removed."""

import copy

import pytest
import torch

from sigmasolver.diagnose.subject import NotApplicable
from sigmasolver.diagnose.watch import operators, record_slices, silenced, slice_operators
from sigmasolver.forecast import rollout
from sigmasolver.models.slices import SliceOperator
from sigmasolver.ops.slices import routing, slice_states
from tests.diagnose.subjects import hooks_in, subject_of

WITH_SLICES = ("transolver-sigma", "physolver", "spectral-then-physical", "slice-replace", "slice-keep", "transolver")


def free_rollout(subject):
    _, history, _ = next(subject.batches())
    with torch.no_grad():
        return rollout(subject.forecaster, history, subject.horizon).frames


@pytest.mark.parametrize("name", WITH_SLICES)
def test_watching_keeps_forecasts_bit_identical(name):
    subject = subject_of(name)
    before = free_rollout(subject)
    with record_slices(subject.forecaster.model) as views:
        during = free_rollout(subject)
    after = free_rollout(subject)
    assert torch.equal(before, during) and torch.equal(before, after)
    assert [view.layer for view in views] == [1, 2] * subject.horizon
    assert hooks_in(subject.forecaster) == 0


@pytest.mark.parametrize("name", WITH_SLICES)
def test_slice_views_match_the_operators(name):
    subject = subject_of(name, dtype=torch.float64)
    _, history, _ = next(subject.batches())
    paths = []
    first = slice_operators(subject)[0]
    real = first.attend
    first.attend = lambda R, F: paths.append((R, F)) or real(R, F)  # the inputs of routing and of the slice states
    with torch.no_grad(), record_slices(subject.forecaster.model) as views:
        subject.forecaster(history)
    view, update = views[0], first.update
    R, F = (path.flatten(1, -2).unflatten(-1, (first.heads, -1)).transpose(1, 2) for path in paths[0])
    P = routing(R, first.routing.project.weight.mT, first.routing.project.bias, first.routing.clipped())
    torch.testing.assert_close(view.P_BHNM, P)
    torch.testing.assert_close(view.Z_BHMD, slice_states(P, F))
    if update.kind == "keep":
        assert view.delta_BHMD is None and torch.equal(view.updated_BHMD, view.Z_BHMD)
        return
    delta = update.attention.weights(view.Z_BHMD) @ view.Z_BHMD @ update.attention.value.weight.mT
    torch.testing.assert_close(view.delta_BHMD, delta)
    expected = delta if update.kind == "replace" else view.Z_BHMD + update.gamma * delta
    torch.testing.assert_close(view.updated_BHMD, expected)


def zeroed_copy(subject, kind):
    """A copy of the forecaster with zeroed output weights in all operators of this kind."""
    forecaster = copy.deepcopy(subject.forecaster)
    with torch.no_grad():
        for operator in operators(forecaster.model, kind):
            module = operator.project if isinstance(operator, SliceOperator) else operator
            for parameter in module.parameters():
                parameter.zero_()
    return forecaster


@pytest.mark.parametrize(
    "name, kind",
    [
        ("transolver-sigma", "physical"),
        ("transolver-sigma", "spectral"),
        ("physical-then-spectral", "physical"),
        ("physical-then-spectral", "spectral"),
        ("transolver", "physical"),
        ("ffno", "spectral"),
    ],
)
def test_silenced_equals_zeroed_weights_and_restores_the_model(name, kind):
    subject = subject_of(name)
    weights = {key: value.clone() for key, value in subject.forecaster.state_dict().items()}
    before = free_rollout(subject)
    with silenced(subject.forecaster.model, kind):
        without = free_rollout(subject)
    after = free_rollout(subject)
    _, history, _ = next(subject.batches())
    with torch.no_grad():
        expected = rollout(zeroed_copy(subject, kind), history, subject.horizon).frames
    assert torch.equal(without, expected)
    assert torch.equal(before, after) and not torch.equal(before, without)
    assert all(torch.equal(weights[key], value) for key, value in subject.forecaster.state_dict().items())
    assert hooks_in(subject.forecaster) == 0


@pytest.mark.parametrize("context", [record_slices, lambda model: silenced(model, "physical")])
def test_hooks_are_removed_on_exceptions(context):
    subject = subject_of()
    before = free_rollout(subject)
    with pytest.raises(RuntimeError, match="in the middle"), context(subject.forecaster.model):
        assert hooks_in(subject.forecaster) > 0
        raise RuntimeError("in the middle")
    assert hooks_in(subject.forecaster) == 0
    assert torch.equal(before, free_rollout(subject))


def test_slice_operators_not_applicable_without_slices():
    for name in ("specsolver", "ffno", "linearno", "transolver-plus"):
        message = f"^{name} has no slice operator of Transolver's form, .* not defined for it; choose [^.]*\\.$"
        with pytest.raises(NotApplicable, match=message):
            slice_operators(subject_of(name))
