"""Metrics of routings with known values, and maps against the routing weights."""

import numpy as np
import pytest
import torch

from sigmasolver.diagnose.routing import effective_slices, effective_slices_per_point, key_concentration, routing
from sigmasolver.diagnose.watch import record_slices, slice_operators
from tests.diagnose.subjects import hooks_in, number, rows_named, subject_in_3d, subject_of


def one_hot(slices, numbers):
    return torch.nn.functional.one_hot(torch.tensor(numbers), slices).float()[None, None]


def test_effective_slices_of_uniform_and_one_hot_routing():
    uniform = torch.full((1, 1, 12, 6), 1 / 6)
    for measure in (effective_slices, effective_slices_per_point):
        torch.testing.assert_close(measure(uniform), torch.full((1, 1), 6.0).double())
        assert measure(one_hot(6, [2] * 12)).item() == 1
    # Two slices with half of the points each: two slices in total, one per point.
    halves = one_hot(6, [1] * 6 + [4] * 6)
    assert effective_slices(halves).item() == pytest.approx(2, rel=1e-12)
    assert effective_slices_per_point(halves).item() == 1


def test_effective_slices_per_point_are_at_most_effective_slices():
    """The entropy of the mean is at least the mean of the entropies (Jensen)."""
    P = (3 * torch.randn(4, 3, 50, 7)).softmax(-1)
    assert (effective_slices_per_point(P) <= effective_slices(P)).all()
    assert (effective_slices_per_point(P) >= 1).all() and (effective_slices(P) <= 7).all()


def test_key_concentration_of_known_attention():
    M = 5
    assert key_concentration(torch.full((1, 1, M, M), 1 / M)).item() == pytest.approx(0, abs=1e-7)
    assert key_concentration(torch.eye(M)[None, None]).item() == pytest.approx(0, abs=1e-7)  # every key read once
    assert key_concentration(one_hot(M, [3] * M)).item() == 1
    two_keys = one_hot(M, [0] * M) / 2 + one_hot(M, [1] * M) / 2
    assert key_concentration(two_keys).item() == pytest.approx((M / 2 - 1) / (M - 1), rel=1e-12)
    assert key_concentration(torch.ones(1, 1, 1, 1)).item() == 1


@pytest.mark.parametrize("name", ["transolver-sigma", "transolver", "slice-keep"])
def test_routing_maps_are_head_averages_on_the_grid(name):
    subject = subject_of(name, dtype=torch.float64)
    findings = routing(subject)
    cases = findings.arrays["cases"].tolist()
    assert cases == subject.indices[[0, 2, 4]].tolist()
    for position, case in enumerate(cases):
        with torch.no_grad(), record_slices(subject.forecaster.model) as views:
            subject.forecaster(subject.windows.batch([case])[0].double())
        for view in views:
            maps = findings.arrays[f"routing_L{view.layer}"]
            assert maps.shape == (3, 5, 8, 8) and maps.dtype == np.float16
            for i in range(8):
                for j in range(8):
                    expected = view.P_BHNM[0, :, 8 * i + j].mean(0).numpy()
                    np.testing.assert_allclose(maps[position, :, i, j], expected, atol=5e-4)
            attention = findings.arrays.get(f"attention_L{view.layer}")
            if view.operator.update.kind == "keep":
                assert attention is None
                continue
            weights = view.operator.update.attention.weights(view.Z_BHMD)[0]
            np.testing.assert_allclose(attention[position], weights.mean(0).detach().numpy(), rtol=1e-12)
            np.testing.assert_allclose(attention.sum(-1), 1, rtol=1e-6)
            heads = key_concentration(weights[None])[0]
            concentration = number(findings, "key_concentration", layer=view.layer, case=case)
            assert concentration == pytest.approx(heads.mean().item(), rel=1e-12)
    assert hooks_in(subject.forecaster) == 0


def test_routing_rows_per_case_and_mean():
    subject = subject_of()
    findings = routing(subject)
    for metric in ("effective_slices", "effective_slices_point", "key_concentration"):
        for layer in (1, 2):
            per_case = [number(findings, metric, layer=layer, case=case) for case in findings.arrays["cases"].tolist()]
            (row,) = rows_named(findings, metric, layer=layer)
            assert row["value"] == pytest.approx(np.mean(per_case)) and row["deviation"] == pytest.approx(
                np.std(per_case, ddof=1)
            )
    assert 1 < number(findings, "effective_slices", layer=1) < 5


def test_routing_reports_clipped_temperatures():
    subject = subject_of()
    operator = slice_operators(subject)[1].routing
    operator.temperature.data = torch.tensor([0.01, 0.7])
    findings = routing(subject)
    assert number(findings, "temperature_head1", layer=2) == pytest.approx(operator.COLDEST)
    assert number(findings, "temperature_head2", layer=2) == pytest.approx(0.7)
    assert number(findings, "temperature", layer=2) == pytest.approx(0.4)


def test_routing_in_3d_stores_one_case_and_the_last_layer():
    subject = subject_in_3d()
    findings = routing(subject)
    assert "routing_L1" not in findings.arrays and findings.arrays["routing_L2"].shape == (1, 5, 4, 5, 6)
    with torch.no_grad(), record_slices(subject.forecaster.model) as views:
        subject.forecaster(subject.windows.batch([int(findings.arrays["cases"][0])])[0])
    point = (1 * 5 + 2) * 6 + 3  # of index (1, 2, 3), the last axis running fastest
    expected = views[1].P_BHNM[0, :, point].mean(0).numpy()
    np.testing.assert_allclose(findings.arrays["routing_L2"][0, :, 1, 2, 3], expected, atol=5e-4)
    assert findings.arrays["attention_L1"].shape == (3, 5, 5)
    assert len(rows_named(findings, "effective_slices", layer=1)) == 1
