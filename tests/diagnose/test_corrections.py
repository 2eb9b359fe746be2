"""Correction ratios against the paper's sums written out, and the rows of a profile."""

import math

import pytest
import torch

from sigmasolver.diagnose.corrections import correction_ratio, corrections
from sigmasolver.diagnose.subject import NotApplicable
from sigmasolver.diagnose.watch import record_slices, slice_operators
from tests.diagnose.subjects import hooks_in, number, rows_named, subject_of


def ratio_by_loops(gamma, Z, delta):
    """eq:srpa-joint-ratio for one case, loops over heads, slices and channels."""
    heads, slices, channels = Z.shape
    top = bottom = 0.0
    for r in range(heads):
        for m in range(slices):
            for j in range(channels):
                top += float(delta[r, m, j]) ** 2
                bottom += float(Z[r, m, j]) ** 2
    return abs(gamma) * math.sqrt(top) / math.sqrt(bottom)


def test_correction_ratio_is_a_joint_norm_not_a_mean_over_heads():
    Z, delta, gamma = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 4, 5), torch.tensor([-0.7])
    Z[:, 1] *= 10
    expected = torch.tensor([ratio_by_loops(-0.7, *case) for case in zip(Z, delta, strict=True)], dtype=torch.float64)
    torch.testing.assert_close(correction_ratio(gamma, Z, delta), expected, rtol=1e-6, atol=0)
    per_head = 0.7 * (delta.flatten(2).norm(dim=2) / Z.flatten(2).norm(dim=2)).mean(1)
    assert ((per_head - expected).abs() > 0.1 * expected).all()


def test_corrections_rows_match_the_definition():
    subject = subject_of(dtype=torch.float64)
    findings = corrections(subject)
    cases = [int(index) for index in subject.indices[[0, 2, 4]]]  # three of five, evenly spread
    ratios = torch.zeros(3, 2, dtype=torch.float64)
    for position, case in enumerate(cases):
        history = subject.windows.batch([case])[0].double()
        with torch.no_grad(), record_slices(subject.forecaster.model) as views:
            subject.forecaster(history)
        for view in views:
            update = view.operator.update
            with torch.no_grad():
                delta = update.attention.weights(view.Z_BHMD) @ view.Z_BHMD @ update.attention.value.weight.mT
            ratios[position, view.layer - 1] = ratio_by_loops(update.gamma.item(), view.Z_BHMD[0], delta[0])
    for layer, operator in enumerate(slice_operators(subject), start=1):
        assert number(findings, "gamma", layer=layer) == operator.update.gamma.item() != 0
        (row,) = rows_named(findings, "correction_ratio", layer=layer)
        assert row["value"] == pytest.approx(ratios[:, layer - 1].mean().item(), rel=1e-12)
        assert row["deviation"] == pytest.approx(ratios[:, layer - 1].std().item(), rel=1e-9)
        for position, case in enumerate(cases):
            ratio = number(findings, "correction_ratio", layer=layer, case=case)
            assert ratio == pytest.approx(ratios[position, layer - 1].item(), rel=1e-12)
    assert number(findings, "correction_ratio") == pytest.approx(ratios.mean().item(), rel=1e-12)
    assert hooks_in(subject.forecaster) == 0


def test_correction_ratio_is_linear_in_gamma_and_zero_for_zero_gamma():
    subject = subject_of(windows=1)
    operator = slice_operators(subject)[1]
    ratios = {}
    for gamma in (0.0, 0.25, -0.5):
        operator.update.gamma.data.fill_(gamma)
        findings = corrections(subject)
        assert number(findings, "gamma", layer=2) == gamma
        ratios[gamma] = number(findings, "correction_ratio", layer=2)
    assert ratios[0.0] == 0.0 and ratios[0.25] > 0
    assert ratios[-0.5] == 2 * ratios[0.25]
    assert rows_named(findings, "correction_ratio", layer=2)[0]["deviation"] is None  # a single case has no deviation


@pytest.mark.parametrize("name", ["transolver", "slice-keep"])
def test_corrections_require_a_residual_update(name):
    with pytest.raises(NotApplicable, match=f"^{name} has no residual slice update .*; choose [^.]*\\.$"):
        corrections(subject_of(name))
