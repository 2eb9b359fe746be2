"""Normalisers: statistics equal NumPy in float64 and use only training trajectories; `decode` inverts `encode`."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.normalise import NORMALISERS, Normaliser, TimeScale, fit, fit_trajectories
from sigmasolver.data.split import split
from sigmasolver.data.windows import Windows, WindowSpec
from sigmasolver.forecast import Forecaster
from tests.data.memory import Memory

FIELDS = ("pressure", "velocity_x", "velocity_y", "velocity_z")


def memory(data: np.ndarray, fields: tuple[str, ...] = FIELDS) -> Memory:
    grid = data.shape[2:-1]
    layout = Layout(
        fields,
        ("1",) * len(fields),
        ("periodic",) * len(grid),
        tuple(np.arange(float(n)) for n in grid),
        np.arange(float(data.shape[1])),
    )
    return Memory(Header(layout, "test", {}), data)


def flow(count: int, frames: int = 6, grid: tuple[int, ...] = (4, 6), seed: int = 0) -> np.ndarray:
    """Fields of very different scale and offset, and trajectories of different amplitude."""
    random = np.random.default_rng(seed)
    noise = random.standard_normal((count, frames, *grid, len(FIELDS)))
    strength = random.uniform(0.5, 2, (count,) + (1,) * (noise.ndim - 1))
    return (noise * strength * np.array([1e3, 0.3, 2.0, 1e-4]) + np.array([1e5, 0.1, -7.0, 0.0])).astype(np.float32)


def tensors(data: np.ndarray) -> list[torch.Tensor]:
    return [torch.from_numpy(trajectory) for trajectory in data]


# --- each kind by its definition, on all data at once, in NumPy float64

Definition = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def by_trajectory(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean, std = np.zeros(len(FIELDS)), np.ones(len(FIELDS))
    for trajectory in data:
        mean[0] += trajectory[..., 0].mean()
        std[0] += trajectory[..., 0].std()
        mean[1:] += trajectory[..., 1:].mean()
        std[1:] += trajectory[..., 1:].std()
    return mean / len(data), std / len(data) + 1e-6


def sample_axes(data: np.ndarray) -> tuple[int, ...]:
    return tuple(range(data.ndim - 1))


DEFINITIONS: dict[str, Definition] = {
    "none": lambda x: (np.zeros(4), np.ones(4)),
    "channel": lambda x: (x.mean(sample_axes(x)), x.std(sample_axes(x))),
    "scalar": lambda x: (x.mean(sample_axes(x)), x.std(sample_axes(x), ddof=1) + 1e-8),
    "pixel": lambda x: (x.mean((0, 1)), x.std((0, 1), ddof=1) + 1e-5),
    "temporal": lambda x: (x.mean(sample_axes(x)), x.std(1).mean(sample_axes(x)[:-1])),
    "trajectory": by_trajectory,
    # no field is a species
    **dict.fromkeys(
        ("box-cox", "box-cox-released"), lambda x: (x.mean(sample_axes(x)), x.std(sample_axes(x), ddof=1) + 1e-10)
    ),
}
DEFINITIONS |= dict.fromkeys(
    ("published", "numerical", "the-well"), DEFINITIONS["channel"]
)  # of data without statistics


@pytest.mark.parametrize("grid", [(7,), (4, 6), (2, 4, 2)])
@pytest.mark.parametrize("kind", NORMALISERS)
def test_fit_statistics_equal_their_definition(kind: str, grid: tuple[int, ...]):
    data = flow(5, grid=grid)
    normaliser = fit_trajectories(kind, FIELDS, tensors(data))
    mean, scale = DEFINITIONS[kind](data.astype(np.float64))
    assert normaliser.mean.dtype == normaliser.scale.dtype == torch.float64 and normaliser.constant == ()
    np.testing.assert_allclose(normaliser.mean.numpy(), mean, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(normaliser.scale.numpy(), scale, rtol=1e-12)


@settings(deadline=None, max_examples=40)
@given(offset=st.floats(-1e6, 1e6), size=st.floats(1e-3, 1e3), count=st.integers(2, 6), seed=st.integers(0, 99))
def test_fit_in_one_pass_is_accurate_for_large_offsets(offset: float, size: float, count: int, seed: int):
    """Even if the mean is 1e9 times the standard deviation, where sums of squares lose all digits."""
    data = offset + size * np.random.default_rng(seed).standard_normal((count, 3, 5, 1))
    normaliser = fit_trajectories("channel", ("u",), tensors(data))
    np.testing.assert_allclose(normaliser.scale.numpy(), [data.std()], rtol=1e-6 if abs(offset) > 1e5 * size else 1e-9)
    np.testing.assert_allclose(normaliser.mean.numpy(), [data.mean()], rtol=1e-12, atol=1e-12)


# --- each kind on a small example: two trajectories, two frames, two points

SMALL = np.array([[[0.0, 2.0], [4.0, 2.0]], [[10.0, 10.0], [10.0, 14.0]]])[..., None]


@pytest.mark.parametrize(
    ("kind", "mean", "scale"),
    [
        ("none", 0, 1),
        ("channel", 6.5, np.sqrt((42.25 + 20.25 + 6.25 + 20.25 + 3 * 12.25 + 56.25) / 8)),
        ("scalar", 6.5, np.sqrt((42.25 + 20.25 + 6.25 + 20.25 + 3 * 12.25 + 56.25) / 7) + 1e-8),
        # in time: 0, 4 deviate by 2; 2, 2 by 0; 10, 10 by 0; 10, 14 by 2
        ("temporal", 6.5, 1.0),
        # means 2 and 11; deviations √2 and √3; the sum starts at 1
        ("trajectory", 6.5, (1 + np.sqrt(2) + np.sqrt(3)) / 2 + 1e-6),
    ],
)
def test_fit_statistics_of_a_small_example(kind: str, mean: float, scale: float):
    normaliser = fit_trajectories(kind, ("u",), tensors(SMALL))
    np.testing.assert_allclose(normaliser.mean.numpy(), [mean], rtol=1e-15)
    np.testing.assert_allclose(normaliser.scale.numpy(), [scale], rtol=1e-15)


def test_fit_pixel_statistics_of_a_small_example():
    normaliser = fit_trajectories("pixel", ("u",), tensors(SMALL))
    np.testing.assert_allclose(normaliser.mean.numpy(), [[6.0], [7.0]])
    # 0, 4, 10, 10 about 6 and 2, 2, 10, 14 about 7, over three
    np.testing.assert_allclose(normaliser.scale.numpy(), np.sqrt([[72 / 3], [108 / 3]]) + 1e-5, rtol=1e-15)


def test_fit_trajectory_shares_statistics_between_velocities():
    normaliser = fit_trajectories("trajectory", FIELDS, tensors(flow(3)))
    assert len(set(normaliser.scale.tolist())) == len(set(normaliser.mean.tolist())) == 2
    assert normaliser.scale[1] == normaliser.scale[3] != normaliser.scale[0]
    per_channel = fit_trajectories("channel", FIELDS, tensors(flow(3)))
    assert len(set(per_channel.scale.tolist())) == 4


# --- training trajectories only


@pytest.mark.parametrize("kind", NORMALISERS)
def test_fit_ignores_validation_and_test_trajectories(kind: str):
    data = flow(10)
    parts = split(10, 8, 2, validation=2)
    spec = WindowSpec(FIELDS, FIELDS, 2, 1, time_stride=2)
    before = [normaliser.to_dict() for normaliser in fit(kind, Windows(memory(data), parts.train, spec))]
    changed = data.copy()
    changed[list((*parts.validation, *parts.test))] = np.nan
    assert [normaliser.to_dict() for normaliser in fit(kind, Windows(memory(changed), parts.train, spec))] == before
    if kind != "none":
        changed = data.copy()
        changed[parts.train[-1]] *= 1.5
        assert [normaliser.to_dict() for normaliser in fit(kind, Windows(memory(changed), parts.train, spec))] != before


@pytest.mark.parametrize("kind", ["channel", "scalar", "pixel", "temporal", "trajectory"])
def test_fit_of_inputs_and_targets_on_the_subsampled_grid(kind: str):
    data = flow(4)
    spec = WindowSpec(FIELDS[2:], (FIELDS[0], FIELDS[2]), 1, 1, time_stride=2, space_stride=2)
    windows = Windows(memory(data), (0, 2, 3), spec)
    fields = (*FIELDS[2:], FIELDS[0])
    subsampled = torch.from_numpy(data[[0, 2, 3], ::2, ::2, ::2][..., [2, 3, 0]])
    together = fit_trajectories(kind, fields, subsampled)
    for source in (windows, windows.resident("cpu")):
        inputs, targets = fit(kind, source)
        assert inputs.fields == spec.inputs and targets.fields == spec.targets
        for normaliser, channels in ((inputs, [0, 1]), (targets, [2, 0])):
            assert torch.equal(normaliser.mean, together.mean[..., channels])
            assert torch.equal(normaliser.scale, together.scale[..., channels])


# --- constant fields


@pytest.mark.parametrize("kind", ["channel", "scalar", "pixel", "temporal", "trajectory"])
def test_fit_constant_field_has_scale_one_and_is_reported(kind: str):
    data = flow(3)
    data[..., 0] = 0.1
    normaliser = fit_trajectories(kind, FIELDS, tensors(data))
    assert normaliser.constant == ("pressure",) and torch.all(normaliser.scale[..., 0] == 1)
    assert torch.all(normaliser.encode(torch.from_numpy(data))[..., 0] == 0)
    assert normaliser.select(FIELDS[1:]).constant == () and normaliser.select(FIELDS[:1]).constant == ("pressure",)
    varying = fit_trajectories(kind, FIELDS, tensors(flow(3)))
    assert torch.equal(normaliser.scale[..., 1:], varying.scale[..., 1:])


@pytest.mark.parametrize("kind", ["scalar", "pixel", "trajectory"])
def test_fit_refuses_a_range_below_the_added_constant(kind: str):
    """Values near 1e-20 divided by a scale of at least 1e-8 vanish; "channel" adds no constant."""
    data = 1e-20 * flow(3)
    with pytest.raises(
        ValueError, match=r"has a range of only .* negligible against the constant .* task.normaliser=channel"
    ):
        fit_trajectories(kind, FIELDS, tensors(data))
    normaliser = fit_trajectories("channel", FIELDS, tensors(data))
    expected = fit_trajectories("channel", FIELDS, tensors(flow(3)))
    torch.testing.assert_close(normaliser.scale, 1e-20 * expected.scale, rtol=1e-5, atol=0)


def test_fit_constant_velocity_component_keeps_the_shared_statistic():
    data = flow(3)
    data[..., 3] = 0
    normaliser = fit_trajectories("trajectory", FIELDS, tensors(data))
    assert normaliser.constant == ("velocity_z",) and normaliser.scale[3] == normaliser.scale[1] != 1


def test_fit_field_constant_per_trajectory_is_not_constant():
    data = np.zeros((4, 3, 5, 1)) + np.arange(4.0)[:, None, None, None]
    normaliser = fit_trajectories("channel", ("viscosity",), tensors(data))
    assert normaliser.constant == () and normaliser.scale.item() == pytest.approx(np.arange(4.0).std())


# --- the map


@settings(deadline=None, max_examples=40)
@given(kind=st.sampled_from(list(NORMALISERS)), seed=st.integers(0, 99), dtype=st.sampled_from(["float32", "float64"]))
def test_decode_inverts_encode_to_round_off(kind: str, seed: int, dtype: str):
    data = flow(3, seed=seed)
    normaliser = fit_trajectories(kind, FIELDS, tensors(data))
    x = torch.from_numpy(data).to(getattr(torch, dtype))
    encoded = normaliser.encode(x)
    decoded = normaliser.decode(encoded)
    assert decoded.dtype == encoded.dtype == x.dtype and decoded.shape == x.shape
    # Round-off of a sum is relative to its larger term.
    size = torch.maximum(x.abs(), normaliser.mean.abs().expand_as(x)).to(torch.float64)
    assert bool(((decoded - x).abs() <= 4 * torch.finfo(x.dtype).eps * size).all())


def test_encoded_training_data_have_zero_mean_and_unit_std():
    data = torch.from_numpy(flow(4)).double()
    encoded = fit_trajectories("channel", FIELDS, data).encode(data).flatten(0, -2)
    torch.testing.assert_close(encoded.mean(0), torch.zeros(4).double(), rtol=0, atol=1e-10)
    torch.testing.assert_close(encoded.std(0, correction=0), torch.ones(4).double(), rtol=1e-12, atol=0)


def test_half_precision_is_computed_in_single_precision():
    """300.1 rounds to 300 in bfloat16: such a mean would be wrong by 0.4 of the scale."""
    mean, scale = torch.tensor([300.1]).double(), torch.tensor([0.25]).double()
    normaliser = Normaliser("channel", ("u",), mean, scale)
    for dtype in (torch.bfloat16, torch.float16):
        x, y = torch.tensor([[302.0], [298.0]], dtype=dtype), torch.tensor([[0.3337], [-5.0]], dtype=dtype)
        assert torch.equal(normaliser.encode(x), ((x.double() - mean) / scale).to(dtype))
        assert torch.equal(normaliser.decode(y), (y.double() * scale + mean).to(dtype))


def test_encode_uses_the_precision_of_its_input():
    third = torch.tensor([1 / 3], dtype=torch.float64)
    normaliser = Normaliser("channel", ("u",), third, 3 * third)
    x = torch.zeros(1)
    assert normaliser.encode(x).item() == -np.float32(1 / 3)
    assert normaliser.encode(x.double()).item() == -1 / 3
    assert normaliser.encode(x).item() == -np.float32(1 / 3)


@pytest.mark.parametrize("kind", ["channel", "pixel"])
def test_normaliser_compiles_as_a_full_graph_without_recompiling(kind: str):
    normaliser = fit_trajectories(kind, FIELDS, tensors(flow(3)))
    x = torch.from_numpy(flow(2, seed=1))

    def both(x: torch.Tensor) -> torch.Tensor:
        return normaliser.decode(torch.tanh(normaliser.encode(x)))

    torch._dynamo.reset()
    cold = torch.compile(both, fullgraph=True, backend="aot_eager")(x)
    assert not normaliser._casts  # tensors created in a graph must not be cached
    normaliser.prepare("cpu")
    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        warm = [compiled(x) for _ in range(3)]
    for result in (cold, *warm):
        torch.testing.assert_close(result, both(x))


def test_gradients_after_encode_in_inference_mode():
    normaliser = fit_trajectories("channel", FIELDS, tensors(flow(2)))
    with torch.inference_mode():
        normaliser.encode(torch.from_numpy(flow(1)))
    x = torch.from_numpy(flow(1)).requires_grad_()
    normaliser.decode(normaliser.encode(x) ** 2).sum().backward()
    torch.testing.assert_close(x.grad, 2 * normaliser.encode(x).detach())


# --- saved and loaded


@pytest.mark.parametrize("kind", NORMALISERS)
def test_normaliser_json_round_trip_is_exact(kind: str):
    data = flow(3)
    data[..., 2] = 1
    normaliser = fit_trajectories(kind, FIELDS, tensors(data))
    restored = Normaliser.from_dict(json.loads(json.dumps(normaliser.to_dict())))
    assert torch.equal(restored.mean, normaliser.mean) and torch.equal(restored.scale, normaliser.scale)
    assert (restored.kind, restored.fields, restored.constant) == (
        normaliser.kind,
        normaliser.fields,
        normaliser.constant,
    )
    assert restored.mean.dtype == torch.float64 and restored.to_dict() == normaliser.to_dict()


def test_normaliser_copies_do_not_share_cached_statistics():
    normaliser = fit_trajectories("channel", FIELDS, tensors(flow(2))).prepare("cpu")
    x = torch.from_numpy(flow(1))
    for other in (pickle.loads(pickle.dumps(normaliser)), copy.deepcopy(normaliser)):
        assert not other._casts and torch.equal(other.encode(x), normaliser.encode(x))


# --- errors


def valid_entries() -> dict:
    return fit_trajectories("channel", ("u", "v"), [torch.arange(12.0).reshape(2, 3, 2)]).to_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"means": 1}, 'Unknown normaliser entry "means"; did you mean mean?'),
        ({"kind": "chanel"}, 'Unknown normaliser "chanel"; did you mean channel, scalar or the-well?'),
        (
            {"mean": [1.0]},
            "The mean has dtype torch.float64 and shape (1,); expected float64 with a last axis of 2 fields.",
        ),
        ({"scale": [[1.0, 1.0]]}, "The mean has shape (2,) and the scale (1, 2); they must agree."),
        (
            {"scale": [1.0, 0.0]},
            "A mean or scale is not finite, or a scale is not positive; fit the normaliser again.",
        ),
        (
            {"mean": [1.0, float("nan")]},
            "A mean or scale is not finite, or a scale is not positive; fit the normaliser again.",
        ),
    ],
)
def test_from_dict_errors(change: dict, message: str):
    with pytest.raises(ValueError) as error:
        Normaliser.from_dict({**valid_entries(), **change})
    assert str(error.value) == message


def test_from_dict_reports_a_missing_entry():
    entries = valid_entries()
    del entries["scale"]
    with pytest.raises(ValueError, match=r'^Normaliser entry "scale" is missing; save the normaliser with to_dict\.$'):
        Normaliser.from_dict(entries)


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("quux", SMALL, r'^Unknown normaliser "quux"; choose from .*channel.*\.$'),
        ("channel", SMALL[:0], "^No trajectories to fit a normaliser on; give at least one.$"),
        (
            "channel",
            np.where(SMALL == 14, np.nan, SMALL),
            r"^Training trajectory 1 \(indices start at 0\) contains non-finite values; remove it\.$",
        ),
        (
            "pixel",
            SMALL[:1, :1],
            "^The standard deviation needs more than one value; give more training trajectories.$",
        ),
        (
            "temporal",
            np.repeat(SMALL[:, :1] + 0.1, 7, axis=1),
            "^The field u is constant in time; set task.normaliser=channel.$",
        ),
    ],
)
def test_fit_errors(kind: str, data: np.ndarray, message: str):
    with pytest.raises(ValueError, match=message):
        fit_trajectories(kind, ("u",), tensors(data))


def test_encode_and_select_errors():
    normaliser = fit_trajectories("pixel", ("u",), tensors(SMALL))
    message = r"^Got values of shape \(5, 3, 1\); the last axes must be \(2, 1\) for \(u\)\.$"
    for use in (normaliser.encode, normaliser.decode):
        with pytest.raises(ValueError, match=message):
            use(torch.zeros(5, 3, 1))
    with pytest.raises(ValueError, match=r'^The normaliser has no field "uu"; did you mean u\?$'):
        normaliser.select(("uu",))


REACTING = ("species_OH", "temperature", "species_AR")


def flame(count: int = 4) -> torch.Tensor:
    """Mass fractions over twenty orders of magnitude, a temperature, and an absent species: (count, 3, 5, 4, 3)."""
    species = 10.0 ** (-20 * torch.rand(count, 3, 5, 4, dtype=torch.float64))
    return torch.stack((species, 300 + 2000 * torch.rand_like(species), torch.zeros_like(species)), dim=-1)


def test_box_cox_statistics_of_mass_fractions():
    data = flame()
    normaliser = fit_trajectories("box-cox", REACTING, data)
    z = (data[..., 0].clamp(min=1e-8) ** 0.1 - 1) / 0.1
    torch.testing.assert_close(normaliser.mean[0], z.mean(), rtol=1e-12, atol=0)
    torch.testing.assert_close(normaliser.scale[0], z.std() + 1e-10, rtol=1e-12, atol=0)
    torch.testing.assert_close(normaliser.mean[1], data[..., 1].mean(), rtol=1e-12, atol=0)
    assert normaliser.scale[2] == 1, "an absent species has zero variance"
    encoded = normaliser.encode(data)
    torch.testing.assert_close(encoded[..., 0].std(), torch.tensor(1.0, dtype=torch.float64), rtol=1e-8, atol=0)
    assert encoded[..., 2].abs().max() < 1e-12


@pytest.mark.parametrize(
    ("fraction", "z"), [(1e-8, -8.4151068), (1e-4, -6.0189283), (0.02, -3.2375666), (0.2, -1.4866008), (1.0, 0.0)]
)
def test_box_cox_known_values(fraction: float, z: float):
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    normaliser = Normaliser("box-cox", ("species_H2",), zero, one)
    assert normaliser.encode(torch.tensor([fraction], dtype=torch.float64)).item() == pytest.approx(z, abs=1e-7)


@pytest.mark.parametrize(("fraction", "z"), [(1e-12, -9.3690424), (0.0, -9.99900), (1e-8, -8.4151068)])
def test_box_cox_released_fit_has_a_lower_floor_than_its_encoding(fraction: float, z: float):
    """A constant field, whose mean is its transformed value."""
    data = torch.full((2, 3, 4, 1), fraction, dtype=torch.float64)
    released = fit_trajectories("box-cox-released", ("species_AR",), data)
    assert released.mean.item() == pytest.approx(z, abs=1e-6) and released.scale.item() == 1
    assert released.constant == ("species_AR",)
    floored = -8.4151068  # what both kinds encode a fraction of at most 1e-8 to
    assert released.encode(data).flatten()[0].item() == pytest.approx(floored - z, abs=1e-6)
    consistent = fit_trajectories("box-cox", ("species_AR",), data)
    assert consistent.mean.item() == pytest.approx(floored, abs=1e-6)
    assert consistent.encode(data).abs().max() < 1e-12


def test_box_cox_released_offset_of_an_absent_species():
    """1.584 in float32 too, where 1e-40 is subnormal."""
    fields = ("species_AR", "species_OH")
    data = torch.stack((torch.zeros(3, 4, 5), torch.rand(3, 4, 5)), dim=-1)
    released = fit_trajectories("box-cox-released", fields, [data])
    torch.testing.assert_close(released.encode(data)[..., 0], torch.full((3, 4, 5), 1.5838893), rtol=0, atol=1e-5)
    assert (released.decode(released.encode(data))[..., 0] - 1e-8).abs().max() < 1e-12


@pytest.mark.parametrize("kind", ["box-cox", "box-cox-released"])
def test_encode_forecast_recovers_output_and_gradient_below_the_floor(kind: str):
    normaliser = fit_trajectories(kind, REACTING, flame())
    z = torch.linspace(-9.9, 3, 40)[:, None].expand(-1, 3)  # transformed values; the floor of the data is at -8.4
    output = ((z - normaliser.mean) / normaliser.scale).float().requires_grad_()
    encoded = normaliser.encode_forecast(normaliser.decode(output))
    torch.testing.assert_close(encoded[:, :2], output[:, :2], rtol=1e-4, atol=1e-4)
    (gradient,) = torch.autograd.grad(encoded.sum(), output)
    torch.testing.assert_close(gradient, torch.ones_like(gradient), rtol=1e-3, atol=0)
    assert normaliser.encode(normaliser.decode(output))[0, 0] > encoded[0, 0] + 0.1  # `encode` applies the floor


@pytest.mark.parametrize("kind", ["none", "channel", "temporal"])
def test_encode_forecast_equals_encode_without_a_transform(kind: str):
    normaliser, x = fit_trajectories(kind, FIELDS, tensors(flow(3))), torch.from_numpy(flow(1))
    assert torch.equal(normaliser.encode_forecast(x), normaliser.encode(x)) and not normaliser.transforms


def test_box_cox_overflow_in_decode_stops_the_rollout():
    """(0.1 z + 1)^10 of z = 1e5 is beyond float32; z = -1e5 would be positive without the clamp, and is zero."""
    zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    normaliser = Normaliser("box-cox", ("species_H2",), zero, one)
    for z, expected in ((1e5, torch.inf), (-1e5, 0.0)):
        model = torch.nn.Linear(1, 1, bias=True)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.constant_(model.bias, z)
        forecaster = Forecaster(model, normaliser, normaliser, 1, history=1)
        result = forecaster.rollout(torch.full((1, 1, 4, 4, 1), 0.5), 3)
        assert bool((result.frames[:, 0] == expected).all()) and result.stopped == (1 if z > 0 else None)
    assert str(forecaster.rollout(torch.full((1, 1, 4, 4, 1), 0.5), 3)) == "all 3 frames are finite"


def test_box_cox_decode_inverts_encode_and_is_never_negative():
    data = flame()
    normaliser = fit_trajectories("box-cox", REACTING, data)
    decoded = normaliser.decode(normaliser.encode(data))
    torch.testing.assert_close(decoded[..., 1], data[..., 1], rtol=1e-12, atol=0)
    torch.testing.assert_close(decoded[..., 0], data[..., 0].clamp(min=1e-8), rtol=1e-10, atol=0)
    assert normaliser.decode(torch.full((3,), -1e3, dtype=torch.float64))[0] == 0


def test_box_cox_gradients_are_finite_for_large_values_of_other_fields():
    normaliser = fit_trajectories("box-cox", REACTING, flame())
    x = torch.tensor([-5.0, 1e8, 3.0], requires_grad=True)
    normaliser.decode(normaliser.encode(x)).sum().backward()
    assert torch.isfinite(x.grad).all() and x.grad[1] == pytest.approx(1)


def test_time_scale_counts_frames():
    """Uneven frames count in units of their mean spacing. A single frame is the origin."""
    even = TimeScale.of(np.array([2.0, 2.5, 3.0, 3.5]))
    assert even == TimeScale(2.0, 0.5)
    assert even.encode(torch.tensor([2.0, 3.5, 5.0])).tolist() == [0, 3, 6]
    uneven = np.array([1.0, 2.0, 4.0, 10.0])
    ends = TimeScale.of(uneven).encode(torch.from_numpy(uneven))[[0, -1]]
    assert ends.tolist() == [0, 3] and ends.dtype == torch.float64
    assert TimeScale.of(np.array([7.0])) == TimeScale(7.0, 1.0)
