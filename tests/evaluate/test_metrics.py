"""Metrics against hand-computed cases, travelling waves, plain loops and published reference values."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmasolver.evaluate import metrics as m

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
EXACT = {"rtol": 1e-12, "atol": 1e-14}
GROUPED = ("grouped_squared_error", "realm_error", "realm_error_per_call")
OF_CONCATENATED = {
    "frmse_from": lambda predicted, true: m.fourier_energy(predicted - true),
    "frmse_bands_from": lambda predicted, true: m.fourier_energy(predicted - true),
    "realm_error_from": partial(m.grouped_squared_error, group_sizes=(1, 1)),
    "realm_error_per_call_from": partial(m.grouped_squared_error, group_sizes=(1, 1)),
}
"""The per-sample input of each metric of concatenated samples."""
NOT_OF_PAIRS = (
    "component_mean", "correlation_time", "energy_spectrum", "fourier_energy", "is_constant", "mean_correlation",
    "mean_except", "r2_from", "ratio_of_norms", "relative_l2_final_from", "variance_from", *OF_CONCATENATED,
)  # fmt: skip
PAIRWISE = {name: getattr(m, name) for name in m.__all__ if name not in (*GROUPED, *NOT_OF_PAIRS)}
PAIRWISE |= {name: partial(getattr(m, name), group_sizes=(1, 1)) for name in GROUPED}
# Output of the benchmark's own evaluator (float32 bins) on these closed-form frames, to the printed digits.
GOLDEN = {
    (3, 10, 16, 32, 2): (
        (0.0353552529, 0.0318291189, 0.0499987464, 0.00716635),
        ((0.01100929, 0.00661300, 0.00360009), (0.02883840, 0.04395479, 0.04221734)),
        (0.957383034, 0.0265925726, 0.370122816),
    ),
    (2, 20, 16, 16, 1): (
        (0.0353501667, 0.0318230204, 0.0499819304, 0.00575546),
        ((0.00984096, 0.00447904, 0.00252091), (0.03910830, 0.04358049, 0.04455776)),
        (0.888034102, 0.0, 4.62172763),
    ),
}
BAD_SIDES = ((1.0,), (1.0, 0.0), (1.0, -2.0), (1.0, math.inf), (1.0, math.nan))
SINGLE_WAVES = (
    ((16,), (5,), None, 5),
    ((12, 9), (-3, 4), None, 5),
    ((9, 20), (2, 1), None, 2),
    ((9, 20), (2, 1), (1.0, 2.0), 4),  # two waves on the short side are four on the long one
    ((7, 8, 9), (3, 3, 4), None, 6),  # a corner beyond every axis
)
every_pairwise = pytest.mark.parametrize("metric", PAIRWISE.values(), ids=PAIRWISE)


def frames(*nested) -> torch.Tensor:
    """One sample per argument, each a list of leads, each a list of point values; one spatial axis, one field."""
    return torch.tensor(nested, dtype=torch.float64)[..., None]


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def flat(result) -> torch.Tensor:
    return torch.cat([part.flatten().double() for part in (result if isinstance(result, tuple) else (result,))])


def travelling_wave(leads: int, phase: float, points: int = 15, waves: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Persistence of frame 0 and the truth at leads 1..H of sin(kx − φ h): two samples half a radian apart."""
    x = torch.arange(points, dtype=torch.float64) * (2 * math.pi * waves / points)
    start = torch.tensor([0.0, 0.5], dtype=torch.float64)[:, None, None]
    lead = torch.arange(1, leads + 1, dtype=torch.float64)[:, None]
    true = (x - phase * lead + start).sin()[..., None]
    return (x + start).sin()[..., None].expand_as(true), true


class TestRelativeL2:
    def test_relative_l2_by_hand(self):
        true = frames([[3.0, 4.0], [0.0, 12.0]])
        predicted = frames([[3.0, 9.0], [12.0, 12.0]])
        assert m.relative_l2(predicted, true).tolist() == [[1.0]]  # √(5² + 12²) / √(3² + 4² + 12²)
        assert m.relative_l2_per_lead(predicted, true).tolist() == [[[1.0], [1.0]]]
        assert m.relative_l2_final(predicted * 2, true).item() == pytest.approx(math.hypot(24, 12) / 12)

    def test_relative_l2_of_persistence_of_a_travelling_wave(self):
        predicted, true = travelling_wave(leads=9, phase=0.3)
        per_lead = [2 * abs(math.sin(0.3 * lead / 2)) for lead in range(1, 10)]
        assert per_lead[0] > 0.2  # if the input frame were counted, the first entry would be zero
        np.testing.assert_allclose(m.relative_l2_per_lead(predicted, true)[..., 0], [per_lead] * 2, rtol=1e-12)
        full = math.sqrt(sum(error**2 for error in per_lead) / 9)  # every frame has the same norm
        np.testing.assert_allclose(m.relative_l2(predicted, true)[:, 0], [full] * 2, rtol=1e-12)
        np.testing.assert_allclose(m.relative_l2_final(predicted, true)[:, 0], [per_lead[-1]] * 2, rtol=1e-12)
        assert abs(full - sum(per_lead) / 9) > 1e-2  # the norm over all leads is not the mean over leads

    def test_mean_of_ratios_is_not_the_ratio_of_means(self):
        true = frames([[1.0, 0.0]], [[100.0, 0.0]])
        predicted = frames([[2.0, 0.0]], [[100.0, 0.0]])
        assert m.relative_l2(predicted, true).mean(dim=0).item() == 0.5
        assert m.relative_l2_joint(predicted, true).mean().item() == 0.5
        ratio_of_means = (predicted - true).norm(dim=2).mean() / true.norm(dim=2).mean()
        assert ratio_of_means.item() == pytest.approx(1 / 101)

    def test_fields_separate_joint_and_component_mean(self):
        true = torch.tensor([[[[1.0, 10.0, 7.0]]]], dtype=torch.float64)
        predicted = torch.tensor([[[[2.0, 10.0, 7.0]]]], dtype=torch.float64)
        errors = m.relative_l2(predicted, true)
        assert errors.tolist() == [[1.0, 0.0, 0.0]]
        assert m.component_mean(errors, (0, 1)).tolist() == [0.5]
        assert m.component_mean(errors, (1, 2)).tolist() == [0.0]
        assert m.relative_l2_joint(predicted, true).item() == pytest.approx(1 / math.sqrt(150))

    def test_relative_l2_of_zero_truth_is_inf_or_nan(self):
        true = frames([[0.0, 0.0], [3.0, 4.0]], [[0.0, 0.0], [3.0, 4.0]])
        predicted = frames([[0.0, 1.0], [3.0, 4.0]], [[0.0, 0.0], [3.0, 4.0]])
        per_lead = m.relative_l2_per_lead(predicted, true)[..., 0]
        assert per_lead[0, 0] == math.inf and per_lead[1, 0].isnan() and per_lead[:, 1].eq(0).all()
        assert m.relative_l2(predicted, true)[:, 0].tolist() == [1 / 5, 0.0]


class TestSquaredAndAbsoluteErrors:
    def test_rmse_and_mae_by_hand(self):
        def root(value):
            return pytest.approx(math.sqrt(value), rel=1e-15, abs=0)  # torch's square root is not correctly rounded

        true = torch.zeros(2, 2, 2, 1)
        predicted = frames([[1.0, 7.0], [0.0, 0.0]], [[5.0, 5.0], [2.0, 2.0]])
        assert m.squared_error(predicted, true)[..., 0].tolist() == [[25.0, 0.0], [25.0, 4.0]]
        assert m.absolute_error(predicted, true)[..., 0].tolist() == [[4.0, 0.0], [5.0, 2.0]]
        assert m.rmse(predicted, true).item() == root(54 / 4)
        assert m.rmse(predicted, true, "lead").tolist() == [5.0, root(2)]
        assert m.rmse(predicted, true, "sample").tolist() == [root(12.5), root(14.5)]
        assert m.rmse(predicted, true, "field", "lead").tolist() == [[5.0], [root(2)]]
        assert m.rmse(predicted, true, "sample", "lead", "field")[..., 0].tolist() == [[5.0, 0.0], [5.0, 2.0]]
        assert m.mae(predicted, true).item() == 11 / 4
        assert m.mae(predicted, true, "lead").tolist() == [4.5, 1.0]
        assert m.mae(predicted, true, "sample").tolist() == [2.0, 3.5]


class TestFourierError:
    @pytest.mark.parametrize("shape", GOLDEN)
    def test_metrics_match_the_realpdebench_evaluator(self, shape):
        b, t, h, w, c = (torch.from_numpy(axis).double() for axis in np.ogrid[tuple(map(slice, shape))])
        true = torch.sin(0.3 * (b + 1) + 0.5 * t + 0.2 * h + 0.1 * w + 0.7 * c)
        predicted = true + 0.05 * torch.cos(0.9 * b + 0.4 * t + 0.3 * h + 0.2 * w + 1.1 * c)
        errors, bands, other_values = GOLDEN[shape]
        ours = [metric(predicted, true).mean() for metric in (m.rmse, m.mae, m.relative_l2_joint, m.frmse)]
        np.testing.assert_allclose(ours, errors, rtol=0, atol=6e-9)
        for relative in (False, True):
            np.testing.assert_allclose(m.frmse_bands(predicted, true, relative), bands[relative], rtol=0, atol=6e-9)
        other_metrics = (
            m.r2(predicted, true),
            m.kinetic_energy(predicted, true).mean(),
            m.frequency_error(predicted, true).mean(),
        )
        np.testing.assert_allclose(other_metrics, other_values, rtol=0, atol=1e-6)

    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.integers(2, 7), min_size=2, max_size=4), st.integers(0, 9))
    def test_fourier_energy_matches_a_loop_over_the_octant(self, lengths, seed):
        signal = draw(seed, 2, *lengths, 2).numpy()
        transform = np.fft.fftn(signal, axes=range(1, len(lengths) + 1))
        bins = np.zeros((2, min(lengths) // 2, 2))
        for index in itertools.product(*(range(length // 2) for length in lengths)):
            radius = math.isqrt(sum(i * i for i in index))
            if radius < bins.shape[1]:
                bins[:, radius] += abs(transform[:, *index]) ** 2
        ours = m.fourier_energy(torch.from_numpy(signal))
        np.testing.assert_allclose(ours, bins / math.prod(lengths) ** 2, **EXACT)

    def test_frmse_of_a_constant_offset_and_empty_bands(self):
        true = draw(0, 2, 6, 8, 9, 1)
        np.testing.assert_allclose(m.frmse_per_bin(true - 0.25, true).flatten(), [0.25, 0, 0], atol=1e-15)
        low, middle, high = m.frmse_bands(true[:, :2] - 0.25, true[:, :2])
        assert low.isnan() and high.isnan() and middle.item() == pytest.approx(0.25)


class TestCorrelation:
    @pytest.mark.parametrize("shape", [(2, 3, 2, 1), (1, 2, 7, 5, 2), (1, 1, 3, 4, 5, 1)])
    def test_pearson_of_a_field_with_itself_and_its_negative(self, shape):
        true = draw(0, *shape)
        ones = torch.ones(*shape[:2], shape[-1], dtype=torch.float64)
        torch.testing.assert_close(m.pearson(true, true), ones, rtol=4e-16, atol=0)
        torch.testing.assert_close(m.pearson(3 - 2 * true, true), -ones, rtol=1e-14, atol=0)

    @pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 300.7])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_pearson_of_a_constant_is_nan(self, value, dtype):
        constant, field = torch.full((1, 1, 7, 11, 1), value, dtype=dtype), draw(0, 1, 1, 7, 11, 1).to(dtype)
        assert m.is_constant(constant).all() and not m.is_constant(field).any()
        for pair in ((constant, field), (field, constant), (constant, constant)):
            assert m.pearson(*pair).isnan().all()
        assert m.relative_spectrum_error(field, constant).isinf().all()
        assert m.relative_spectrum_error(constant, constant).isnan().all()

    def test_correlation_time_of_persistence_of_a_travelling_wave(self):
        predicted, true = travelling_wave(leads=9, phase=0.2)
        curve = m.pearson(predicted, true).mean(dim=0)
        np.testing.assert_allclose(curve[:, 0], np.cos(0.2 * np.arange(1, 10)), rtol=1e-12)
        lead_times = 0.5 * torch.arange(1, 10)
        # cos(0.6) = 0.825 and cos(0.8) = 0.697: the fourth lead is the first below 0.8.
        assert m.correlation_time(curve, lead_times).tolist() == [2.0]
        assert m.correlation_time(curve, lead_times, threshold=0.9).tolist() == [1.5]
        assert m.correlation_time(curve, 2 * lead_times).tolist() == [4.0]
        assert m.correlation_time(curve, lead_times, threshold=-0.5).tolist() == [math.inf]
        # Curves that recover, touch the threshold, end in NaN, start with NaN.
        curves = ([0.9, 0.7, 0.9], [0.8, 0.8, 0.8], [0.9, 0.8, math.nan], [math.nan, 1.0, 1.0])
        times = m.correlation_time(torch.tensor(curves, dtype=torch.float64).T, torch.tensor([1.0, 2.0, 4.0]))
        assert times.tolist() == [2.0, math.inf, 4.0, 1.0]

    def test_realm_correlation_excludes_constant_truth_but_not_failed_predictions(self):
        true, predicted = draw(0, 2, 3, 8, 2), draw(1, 2, 3, 8, 2)
        true[0, :2, :, 1] = 0.1
        per_entry = m.pearson(predicted, true)
        score, excluded = m.realm_correlation(predicted, true)
        assert excluded == 2 and per_entry.isnan().sum() == 2
        torch.testing.assert_close(score, per_entry.nanmean(), **EXACT)
        for failure in (0.1, math.inf, math.nan):
            predicted[1, 2, :, 0] = failure
            score, excluded = m.realm_correlation(predicted, true)
            assert score.isnan() and excluded == 2


class TestSpectrum:
    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(0, 9), st.booleans())
    def test_energy_spectrum_matches_a_loop_over_modes_and_parseval(self, grid, seed, stretched):
        field = draw(seed, 1, 2, *grid, 2)
        sides = [1.0 + axis for axis in range(len(grid))] if stretched else [1.0] * len(grid)
        spectrum = m.energy_spectrum(field, sides if stretched else None)
        points = tuple(range(2, field.ndim - 1))
        torch.testing.assert_close(spectrum.sum(dim=2), field.square().mean(dim=points) / 2, **EXACT)
        torch.testing.assert_close(spectrum[:, :, 0], field.mean(dim=points).square() / 2, **EXACT)

        transform = np.fft.fftn(field.numpy(), axes=points) / math.prod(grid)
        expected = np.zeros(spectrum.shape)
        for index in itertools.product(*map(range, grid)):
            waves = [min(i, n - i) * max(sides) / side for i, n, side in zip(index, grid, sides, strict=True)]
            expected[:, :, math.floor(math.hypot(*waves) + 0.5)] += abs(transform[:, :, *index]) ** 2 / 2
        torch.testing.assert_close(spectrum, torch.from_numpy(expected), **EXACT)

    @pytest.mark.parametrize(("grid", "waves", "sides", "shell"), SINGLE_WAVES)
    def test_energy_spectrum_of_one_wave(self, grid, waves, sides, shell):
        phase = torch.tensor(0.4, dtype=torch.float64)
        for n, k in zip(grid, waves, strict=True):
            phase = phase[..., None] + 2 * math.pi * k / n * torch.arange(n, dtype=torch.float64)
        spectrum = m.energy_spectrum(3 * phase.cos()[None, None, ..., None], sides)[0, 0, :, 0]
        assert spectrum[shell].item() == pytest.approx(9 / 4)
        assert spectrum.sum().item() == pytest.approx(9 / 4)

    def test_relative_spectrum_error_ignores_phase_and_mean(self):
        predicted, true = travelling_wave(leads=3, phase=0.7)
        assert m.relative_spectrum_error(predicted + 300, true).max() < 1e-12
        np.testing.assert_allclose(m.relative_spectrum_error(1.1 * predicted, true), 0.21, rtol=1e-10)
        # All energy in another shell: missing and excess energy both count.
        other, _ = travelling_wave(leads=3, phase=0.7, waves=5)
        np.testing.assert_allclose(m.relative_spectrum_error(other, true), 2.0, rtol=1e-12)

    def test_relative_spectrum_error_depends_on_side_lengths(self):
        predicted, true = draw(0, 1, 2, 6, 12, 1), draw(1, 1, 2, 6, 12, 1)
        square, long = (m.relative_spectrum_error(predicted, true, sides) for sides in (None, (1.0, 2.0)))
        assert (square - long).abs().min() > 1e-3
        torch.testing.assert_close(m.relative_spectrum_error(predicted, true, (3.0, 6.0)), long, **EXACT)


class TestBlowUp:
    def test_blow_up_reports_the_first_lead_per_sample(self):
        true = torch.ones(6, 4, 5, 2)
        predicted = true.clone()
        predicted[1, 2, 3, 1] = math.nan
        predicted[2, 0, 0, 0] = -math.inf
        predicted[3, 3, :, 1] = 10.5
        predicted[4, 1:3, :, 0] = -11.0
        predicted[5, :, :, :] = 10.0  # at the bound, not above
        flag, survived = m.blow_up(predicted, true)
        assert flag.tolist() == [False, True, True, True, True, False]
        assert survived.tolist() == [4, 2, 0, 3, 1, 4]
        predicted, true = true[:1] * torch.tensor([1.0, 2.5, 6.0, 6.0])[:, None, None], true[:1]
        assert [m.blow_up(predicted, true, multiple)[1].item() for multiple in (0.5, 2.0, 5.0, 7.0)] == [0, 1, 2, 4]

    def test_blow_up_judges_each_field_by_its_largest_norm(self):
        true = torch.stack((torch.full((1, 2, 3), 1e-3), torch.full((1, 2, 3), 1e3)), dim=-1)
        predicted = true.clone()
        predicted[:, 1, :, 0] = 1.0
        assert m.blow_up(predicted, true)[1].item() == 1
        true = frames([[1.0, 1.0], [1e-9, 0.0]])
        assert not m.blow_up(frames([[1.0, 1.0], [1e-3, 0.0]]), true)[0].item()

    def test_blow_up_ignores_growing_truth(self):
        """The bound uses the maximum over all leads, not only the first or the last."""
        for norms in ([1.0, 50.0, 900.0], [900.0, 50.0, 1.0], [1.0, 900.0, 1.0]):
            true = frames([[norm, 0.0] for norm in norms])
            assert not m.blow_up(true, true)[0].item()
            assert m.blow_up(torch.full_like(true, 8000 / math.sqrt(2)), true)[1].item() == 3
            assert m.blow_up(torch.full_like(true, 9100 / math.sqrt(2)), true)[1].item() == 0

    def test_blow_up_of_zero_truth_is_judged_by_finiteness(self):
        true = torch.zeros(3, 2, 4, 1)
        predicted = torch.full_like(true, 1e-6)
        predicted[1, 1] = math.inf
        predicted[2, 0, 0] = math.nan
        assert m.blow_up(predicted, true)[1].tolist() == [2, 1, 0]


class TestRealm:
    def test_realm_error_by_hand(self):
        true = torch.zeros(2, 2, 2, 3)
        predicted = true.clone()
        predicted[0, 0, 0] = torch.tensor([2.0, 4.0, 6.0])
        predicted[1, 1] = torch.tensor([0.0, 0.0, 1.0])
        grouped = m.grouped_squared_error(predicted, true, (2, 1))
        assert grouped.tolist() == [[[5.0, 18.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]]
        assert m.realm_error(predicted, true, (2, 1)).item() == (5 + 18 + 1) / 2
        assert m.realm_error_per_call(predicted, true, (2, 1)).item() == (5 + 18 + 1) / 4
        assert m.realm_error(predicted, true, (1, 2)).item() == (2 + 13 + 0.5) / 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 4), min_size=4, max_size=6), st.integers(0, 99), st.sampled_from(DTYPES))
def test_metrics_match_plain_loops_for_any_shape_and_dtype(shape, seed, dtype):
    predicted, true = draw(seed, *shape).to(dtype), (draw(seed + 1, *shape) + 1).to(dtype)
    P, Y, B, H, q = predicted.double().numpy(), true.double().numpy(), shape[0], shape[1], shape[-1]

    def ratio(p: np.ndarray, y: np.ndarray) -> float:
        return math.sqrt(math.fsum((p - y).ravel() ** 2)) / math.sqrt(math.fsum(y.ravel() ** 2))

    def correlate(p: np.ndarray, y: np.ndarray) -> float:
        p, y = p - math.fsum(p) / p.size, y - math.fsum(y) / y.size
        denominator = math.sqrt(math.fsum(p * p)) * math.sqrt(math.fsum(y * y))
        return math.fsum(p * y) / denominator if denominator else math.nan

    def per_lead(plain) -> np.ndarray:
        cases = itertools.product(range(B), range(H), range(q))
        values = [plain(P[b, h, ..., f].ravel(), Y[b, h, ..., f].ravel()) for b, h, f in cases]
        return np.array(values).reshape(B, H, q)

    plain = (
        (m.relative_l2, [[ratio(P[b, ..., f], Y[b, ..., f]) for f in range(q)] for b in range(B)]),
        (m.relative_l2_final, per_lead(ratio)[:, -1]),
        (m.relative_l2_joint, [ratio(P[b], Y[b]) for b in range(B)]),
        (m.relative_l2_per_lead, per_lead(ratio)),
        (m.squared_error, per_lead(lambda p, y: math.fsum((p - y) ** 2) / p.size)),
        (m.absolute_error, per_lead(lambda p, y: math.fsum(abs(p - y)) / p.size)),
        (m.rmse, math.sqrt(math.fsum((P - Y).ravel() ** 2) / P.size)),
        (m.mae, math.fsum(abs(P - Y).ravel()) / P.size),
        (m.pearson, per_lead(correlate)),
    )
    for metric, expected in plain:
        result = metric(predicted, true)
        assert result.dtype == torch.float64
        np.testing.assert_allclose(result, expected, rtol=1e-11, atol=1e-12)


@every_pairwise
def test_metrics_sum_low_precision_input_in_float64(metric):
    true, predicted = draw(0, 2, 6, 6, 7, 2), draw(1, 2, 6, 6, 7, 2)
    for dtype in DTYPES:
        stored = predicted.to(dtype), true.to(dtype)
        assert torch.equal(flat(metric(*stored)), flat(metric(*(part.double() for part in stored))))


def test_metrics_under_scaling_and_offsets():
    true, predicted = draw(0, 2, 4, 5, 6, 2), draw(1, 2, 4, 5, 6, 2)
    for metric in (m.relative_l2, m.relative_l2_per_lead, m.relative_l2_final, m.relative_l2_joint):
        for scale in (1e-30, -7.0, 1e30):
            torch.testing.assert_close(metric(scale * predicted, scale * true), metric(predicted, true), **EXACT)
    for metric in (m.rmse, m.mae, m.frmse):
        torch.testing.assert_close(metric(5 - 3 * predicted, 5 - 3 * true), 3 * metric(predicted, true), **EXACT)
    torch.testing.assert_close(m.pearson(0.1 * predicted - 3, 7 * true + 2), m.pearson(predicted, true), **EXACT)


@pytest.mark.parametrize("metric", [PAIRWISE[name] for name in PAIRWISE if name.startswith("relative")])
def test_relative_metrics_treat_samples_independently(metric):
    true, predicted = draw(0, 3, 2, 6, 7, 2), draw(1, 3, 2, 6, 7, 2)
    joined = torch.cat([metric(predicted[:1], true[:1]), metric(predicted[1:], true[1:])])
    torch.testing.assert_close(joined, metric(predicted, true), **EXACT)


@pytest.mark.parametrize("name", OF_CONCATENATED)
def test_metrics_from_concatenated_batches(name):
    """The metric of all frames from batches of different size."""
    predicted, true = draw(1, 7, 6, 6, 7, 2), draw(2, 7, 6, 6, 7, 2)
    full = PAIRWISE[name.removesuffix("_from")](predicted, true)
    pairs = zip(predicted.split((4, 1, 2)), true.split((4, 1, 2)), strict=True)
    batches = [OF_CONCATENATED[name](*pair) for pair in pairs]
    torch.testing.assert_close(getattr(m, name)(torch.cat(batches)), full, **EXACT)
    means = torch.stack([getattr(m, name)(batch) for batch in batches]).mean(0)
    assert bool(((full - means).abs() > 1e-6).all())  # averaging batches would give another result


def test_mean_correlation_excludes_constant_truth():
    correlation, constant = draw(3, 3, 2, 2).tanh(), torch.zeros(3, 2, 2, dtype=torch.bool)
    constant[0, 1, 0] = constant[2, 1, 1] = True
    included = [
        [correlation[b, h, q].item() for b in range(3) for q in range(2) if not constant[b, h, q]] for h in (0, 1)
    ]
    with_nan = torch.where(constant, torch.nan, correlation)
    expected = torch.tensor([np.mean(lead) for lead in included], dtype=torch.float64)
    torch.testing.assert_close(m.mean_correlation(with_nan, constant, "lead"), expected, **EXACT)
    assert m.mean_correlation(with_nan, constant).item() == pytest.approx(np.mean(included[0] + included[1]), rel=1e-12)


def test_r2_from_moments_of_batches_equals_r2():
    """Σ (y − ȳ)² = Σ y² − n ȳ², where both moments are sums over batches."""
    predicted, true = draw(0, 7, 3, 4, 5, 2), draw(1, 7, 3, 4, 5, 2) + 0.5
    squared = torch.cat([m.squared_error(p, t) for p, t in zip(predicted.split(3), true.split(3), strict=True)])
    mean = sum(batch.sum(0) for batch in true.split(3)) / len(true)
    variance = m.variance_from(true.square().flatten(1, -2).mean(1).mean(0), mean)
    torch.testing.assert_close(variance, true.var(dim=0, correction=0).flatten(0, -2).mean(0), **EXACT)
    torch.testing.assert_close(m.r2_from(squared.mean(), variance.mean()), m.r2(predicted, true), **EXACT)


@every_pairwise
def test_metrics_depend_on_both_arguments(metric):
    true, predicted = draw(0, 2, 6, 6, 7, 2), draw(1, 2, 6, 6, 7, 2)
    result = flat(metric(predicted, true))
    assert not torch.equal(flat(metric(100 * predicted + draw(2, 2, 6, 6, 7, 2), true)), result)
    assert not torch.equal(flat(metric(predicted, 0.01 * true + 0.01 * draw(3, 2, 6, 6, 7, 2))), result)


@every_pairwise
def test_metrics_have_no_host_sync(metric):
    """Tensors on the meta device have no values: any read, branch or boolean mask would raise."""
    real = metric(draw(0, 2, 6, 6, 7, 2), draw(1, 2, 6, 6, 7, 2))
    meta = metric(torch.empty(2, 6, 6, 7, 2, device="meta"), torch.empty(2, 6, 6, 7, 2, device="meta"))
    for actual, on_meta in zip(*(r if isinstance(r, tuple) else (r,) for r in (real, meta)), strict=True):
        assert actual.shape == on_meta.shape
        assert actual.dtype == on_meta.dtype and actual.dtype in (torch.float64, torch.int64, torch.bool)


RATIOS = ("relative_l2", "relative_l2_per_lead", "relative_l2_final", "relative_l2_joint", "pearson",
          "realm_correlation", "relative_spectrum_error", "blow_up")  # fmt: skip


@pytest.mark.parametrize("name", RATIOS)
@pytest.mark.parametrize("exponent", [-110, 63, 120])
def test_ratio_metrics_are_independent_of_units(name, exponent):
    """Scaling float32 frames by a power of two changes no bit, even if their squares would overflow or underflow."""
    predicted, true = (draw(seed, 2, 3, 6, 7, 2).float() for seed in (0, 1))
    factor = 2.0**exponent
    assert torch.equal(flat(PAIRWISE[name](factor * predicted, factor * true)), flat(PAIRWISE[name](predicted, true)))


@every_pairwise
def test_metrics_reject_mismatched_shapes(metric):
    true = draw(0, 2, 6, 6, 7, 2)
    for other in (true[:, :3], true[:, :1], true[..., :6, :], true[..., :1], true[:1]):
        with pytest.raises(ValueError, match=r"^Predicted frames have shape .*, without the history\.$"):
            metric(other, true)


@pytest.mark.parametrize("wrong", [draw(0, 2, 3, 4), draw(0, 1, 1, 1, 1, 1, 1, 1), draw(0, 0, 2, 3, 1)])
def test_metrics_reject_invalid_frames(wrong):
    for metric in (*PAIRWISE.values(), lambda p, t: m.energy_spectrum(p), lambda p, t: m.is_constant(p)):
        with pytest.raises(
            ValueError, match=r"^Expected real, non-empty frames of shape \(batch, leads, .* got float64"
        ):
            metric(wrong, wrong)
    with pytest.raises(ValueError, match="got complex128"):
        m.relative_l2(draw(0, 1, 1, 2, 1) * 1j, draw(0, 1, 1, 2, 1) * 1j)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: m.rmse(x, x, "field", "time"), "Unknown error axes time; choose from sample, lead, field."),
        (lambda x: m.frmse(x[:, :1], x[:, :1]), "at least two leads .* got 1 leads on a grid of 4 × 5."),
        (lambda x: m.correlation_time(x, torch.ones(3)), "Expected one lead time for each .* of shape \\(3,\\)."),
        (lambda x: m.correlation_time(x.sum(), torch.ones(1)), "Expected one lead time .* of shape \\(\\), .*"),
        (lambda x: m.blow_up(x, x, 0.0), "The multiple of the true norm must be positive, got 0.0."),
        *((lambda x, s=s: m.energy_spectrum(x, s), "do not match a grid of 4 × 5; pass one .*") for s in BAD_SIDES),
        *(
            (lambda x, g=g: m.realm_error(x, x, g), "sum to the number of fields, 3; .*")
            for g in ((), (2, 2), (3, 0), (4, -1))
        ),
        *((lambda x, c=c: m.component_mean(x, c), "at least one index from 0 to 2.") for c in ((), (3,), (-1, 0))),
    ],
)
def test_metrics_reject_invalid_arguments(call, message):
    with pytest.raises(ValueError, match=f"{message}$"):
        call(draw(0, 1, 2, 4, 5, 3))
