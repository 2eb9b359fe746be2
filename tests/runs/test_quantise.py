"""Weights stored as int16 with a scale per row."""

import shutil

import pytest
import torch

from sigmasolver.forecast.checkpoint import load
from sigmasolver.pretrained import resolve
from sigmasolver.runs import Run, read_facts, read_tensors, write_tensors
from sigmasolver.runs.quantise import LARGEST, SCALES, dequantise, quantise


def rows_of_different_size():
    torch.manual_seed(3)
    return torch.randn(6, 5, 4) * torch.logspace(-6, 3, 6)[:, None, None]


def test_quantise_error_is_at_most_half_a_step_of_each_row():
    weight = rows_of_different_size()
    step = weight.flatten(1).abs().amax(1).double() / LARGEST
    error = (dequantise(quantise({"w": weight}))["w"].double() - weight.double()).flatten(1).abs().amax(1)
    assert (error <= 0.5 * step * 1.02).all()  # the scale is up to 1.2 % above the step
    assert (error > 0.25 * step).all(), "the bound is nearly attained, so a coarser scale would fail"


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_quantise_never_overflows_int16(magnitude):
    """The largest weight of a row is the critical one, for every rounding of the scale to bfloat16."""
    weight = magnitude * torch.linspace(1, 4, 2001)[:, None] * torch.tensor([1.0, -1.0])
    stored = quantise({"w": weight})
    assert stored["w"].abs().min() > 32000 and stored["w"].abs().max() <= LARGEST
    torch.testing.assert_close(dequantise(stored)["w"], weight, rtol=2e-5, atol=0)


def test_quantise_is_more_accurate_than_float16_at_the_same_size():
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))

    def error(other):
        return ((other - weight).norm() / weight.norm()).item()

    stored = quantise({"w": weight})
    assert stored["w"].dtype == torch.int16 and stored["w" + SCALES].shape == (64,)
    assert error(dequantise(stored)["w"]) < error(weight.half().float()) / 5


def test_quantise_keeps_integers_and_zeros():
    tensors = {"count": torch.tensor([[3, 4]]), "zeros": torch.zeros(2, 3), "none": torch.zeros(3)}
    restored = dequantise(quantise(tensors))
    assert list(restored) == list(tensors)
    for name, tensor in tensors.items():
        assert restored[name].dtype == tensor.dtype and torch.equal(restored[name], tensor), name


def test_quantise_takes_a_vector_as_one_row():
    bias = torch.tensor([1e-4, -2.0, 0.3])
    stored = quantise({"bias": bias, "gamma": torch.tensor([0.125])})
    assert stored["bias" + SCALES].shape == stored["gamma" + SCALES].shape == (1,)
    torch.testing.assert_close(dequantise(stored)["bias"], bias, rtol=0, atol=2 / 65000)


def test_dequantise_leaves_an_ordinary_checkpoint_unchanged(tmp_path):
    tensors = {"w": torch.randn(3, 2), "b": torch.randn(3).half()}
    write_tensors(tmp_path / "w.safetensors", tensors, {})
    restored = dequantise(read_tensors(tmp_path / "w.safetensors")[0])
    assert all(
        restored[name].dtype == tensors[name].dtype and torch.equal(restored[name], tensors[name]) for name in tensors
    )


def test_quantised_weights_survive_a_file(tmp_path):
    stored = quantise({"w": rows_of_different_size(), "b": torch.randn(3)})
    write_tensors(tmp_path / "w.safetensors", stored, {})
    read = read_tensors(tmp_path / "w.safetensors")[0]
    assert all(torch.equal(dequantise(read)[name], tensor) for name, tensor in dequantise(stored).items())


def test_quantise_refuses_non_finite_weights():
    with pytest.raises(ValueError, match="w has non-finite weights"):
        quantise({"w": torch.tensor([[1.0, float("inf")]])})


@pytest.mark.parametrize("scales", [torch.ones(2), torch.ones(3, 1), torch.ones(1)])
def test_dequantise_refuses_scales_of_another_shape(scales):
    with pytest.raises(ValueError, match="scales of w do not match"):
        dequantise({"w": torch.zeros(3, 2, dtype=torch.int16), "w" + SCALES: scales})


@pytest.fixture
def int16_run(tmp_path):
    """The pretrained Darcy model with its weights stored as int16."""
    run = Run(shutil.copytree(resolve("darcy"), tmp_path / "int16"))
    facts = dict(read_facts(run.weights))
    write_tensors(run.weights, quantise({name: w.float() for name, w in read_tensors(run.weights)[0].items()}), facts)
    return run


def test_load_reads_int16_weights(int16_run):
    original, restored = load("darcy"), load(int16_run.path)
    assert int16_run.weights.stat().st_size < 1.025 * Run(resolve("darcy")).weights.stat().st_size
    for (name, expected), parameter in zip(original.model.named_parameters(), restored.model.parameters(), strict=True):
        assert parameter.dtype == torch.float32
        torch.testing.assert_close(
            parameter, expected, rtol=0, atol=float(expected.detach().abs().max()) / 64000, msg=name
        )
    permeability = torch.where(torch.rand(1, 1, 32, 32, 1) < 0.5, 3.0, 12.0)
    with torch.no_grad():
        first, second = original(permeability), restored(permeability)
    assert 0 < (first - second).norm() / first.norm() < 1e-3


def test_load_refuses_int16_weights_without_scales(int16_run):
    tensors, facts = read_tensors(int16_run.weights)
    write_tensors(int16_run.weights, {name: w for name, w in tensors.items() if not name.endswith(SCALES)}, dict(facts))
    with pytest.raises(ValueError, match="do not match the model of its recipe"):
        load(int16_run.path)
