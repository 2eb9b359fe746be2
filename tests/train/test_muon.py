"""Muon against its definition by singular values in float64, and what surrounds it: AdamW for the other parameters."""

from dataclasses import replace
from math import sqrt

import numpy as np
import pytest
import torch

from sigmasolver.forecast.checkpoint import skeleton
from sigmasolver.recipes import changed, recipe_of
from sigmasolver.runs import Run, read_tensors
from sigmasolver.runtime.parallel import World
from sigmasolver.simulate.generate import generate
from sigmasolver.train.adamw import AdamW
from sigmasolver.train.capture import WARM_UP
from sigmasolver.train.dry_run import DryRun
from sigmasolver.train.engine import Execution
from sigmasolver.train.job import resume_run, train_run
from sigmasolver.train.muon import COEFFICIENTS, ITERATIONS, MOMENTUM, Muon, is_complex, is_matrix, orthogonalised
from tests.train.test_engine import FLOW, RECIPE

RATE, DECAY = 0.02, 0.3


def by_singular_values(matrix, multiplicity=1):
    """The plain definition: the scalar iteration of every singular value, relative to the norm of the matrix in which
    each value occurs `multiplicity` times."""
    U, S, V = np.linalg.svd(matrix, full_matrices=False)
    S = S / (sqrt(multiplicity) * np.linalg.norm(S))
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        S = a * S + b * S**3 + c * S**5
    return U * S @ V


def drawn(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def weight(values):
    return torch.nn.Parameter(values.clone())


def muon(*parameters, rate=RATE, decay=DECAY):
    return Muon(parameters, lr=torch.tensor(rate, dtype=torch.float64), weight_decay=decay, fused=True)


@pytest.mark.parametrize("shape", [(4, 4), (3, 8), (8, 3), (1, 5), (6, 1)])
def test_orthogonalised_transforms_the_singular_values_alone(shape):
    batch = drawn(5, *shape)
    expected = np.stack([by_singular_values(matrix) for matrix in batch.numpy()])
    torch.testing.assert_close(orthogonalised(batch).numpy(), expected, rtol=1e-10, atol=1e-12)


def test_singular_values_end_near_one():
    """For condition numbers up to 100: the smallest value is then 1 % of a norm of about one."""
    U, _ = torch.linalg.qr(drawn(12, 12, seed=1))
    V, _ = torch.linalg.qr(drawn(12, 12, seed=2))
    matrix = U @ torch.diag(torch.logspace(-2, 0, 12, dtype=torch.float64)) @ V
    values = torch.linalg.svdvals(orthogonalised(matrix[None])[0])
    assert values.min() > 0.65 and values.max() < 1.25


def test_update_does_not_depend_on_the_scale_of_the_gradient():
    gradient = drawn(2, 5, 7)
    torch.testing.assert_close(orthogonalised(1e4 * gradient), orthogonalised(gradient), rtol=1e-10, atol=1e-12)
    assert not orthogonalised(torch.zeros(1, 3, 3)).any()


@pytest.mark.parametrize("shape", [(6, 6), (3, 9), (9, 3)])
def test_steps_follow_the_definition_on_matrices(shape):
    start, parameter = drawn(*shape), weight(drawn(*shape))
    optimiser, momentum, expected = muon(parameter), np.zeros(shape), start.numpy().copy()
    for step in range(3):
        gradient = drawn(*shape, seed=10 + step).numpy()
        momentum = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        nesterov = MOMENTUM * momentum + (1 - MOMENTUM) * gradient
        update = 0.2 * sqrt(max(shape)) * by_singular_values(nesterov)
        expected = (1 - RATE * DECAY) * expected - RATE * update
        parameter.grad = torch.from_numpy(gradient)
        optimiser.step()
    torch.testing.assert_close(parameter.detach().numpy(), expected, rtol=1e-10, atol=1e-12)


def test_spectral_weights_are_one_complex_matrix_per_mode():
    """A real matrix [[Re, -Im], [Im, Re]] has every singular value of the complex one twice."""
    start, gradient = drawn(4, 5, 5, 2), drawn(4, 5, 5, 2, seed=1)
    parameter = weight(start)
    parameter.grad = gradient
    muon(parameter).step()
    matrices = torch.view_as_complex(gradient).numpy() * (1 - MOMENTUM**2)
    updates = np.stack([by_singular_values(matrix, multiplicity=2) for matrix in matrices])
    expected = (1 - RATE * DECAY) * start - RATE * 0.2 * sqrt(10) * torch.view_as_real(torch.from_numpy(updates))
    torch.testing.assert_close(parameter.detach(), expected, rtol=1e-10, atol=1e-12)


def test_update_has_the_stated_root_mean_square():
    """The root mean square of the update of square matrices, real and complex, is about 0.2 times the rate."""
    for shape in ((64, 64), (3, 48, 48, 2)):
        parameter = weight(torch.zeros(shape, dtype=torch.float64))
        parameter.grad = drawn(*shape)
        muon(parameter, rate=1.0).step()
        assert parameter.detach().square().mean().sqrt().item() == pytest.approx(0.2, rel=0.15)


def test_one_step_of_many_parameters_is_that_of_each_alone():
    """Matrices of one shape go through the iterations together."""
    shapes = ((4, 6), (3, 6, 6, 2), (4, 6), (6, 4), (12, 12), (2, 6, 6, 2))
    together, alone = ([weight(drawn(*shape)) for shape in shapes] for _ in range(2))
    for parameters in (together, alone):
        for seed, parameter in enumerate(parameters):
            parameter.grad = drawn(*parameter.shape, seed=seed)
    muon(*together).step()
    for parameter in alone:
        muon(parameter).step()
    for first, second in zip(together, alone, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-12, atol=1e-14)


def test_other_parameters_are_updated_by_adamw():
    shapes = ((7,), (6, 1, 5, 5), (1,), (2, 3, 4))
    mixed, others = ([weight(drawn(*shape)) for shape in shapes] for _ in range(2))
    matrix, idle = weight(drawn(3, 3)), weight(drawn(4, 4))
    optimiser = muon(*mixed[:2], matrix, idle, *mixed[2:])
    adamw = AdamW(others, lr=torch.tensor(RATE, dtype=torch.float64), weight_decay=DECAY, fused=True)
    for step in range(3):
        for parameter in (*mixed, *others, matrix):
            parameter.grad = drawn(*parameter.shape, seed=step)
        optimiser.step()
        adamw.step()
    for first, second in zip(mixed, others, strict=True):
        assert torch.equal(first, second)
    assert not torch.equal(matrix, drawn(3, 3)) and torch.equal(idle, drawn(4, 4))  # idle has no gradient


def test_matrices_of_the_model():
    """Every linear map and spectral operator, but no depthwise kernel, norm or bias."""
    model = skeleton(recipe_of("kf2d"))
    spectral = [name for name, parameter in model.named_parameters() if is_complex(parameter)]
    assert len(spectral) == 8 * 2 and all(".weights." in name for name in spectral)
    modules = dict(model.named_modules())
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        linear = isinstance(modules[owner], torch.nn.Linear) and leaf == "weight"
        assert is_matrix(parameter) == (linear or name in spectral), name


def test_kernels_are_not_taken_for_spectral_weights():
    shapes = [(8, 8, 2), (16, 16, 2, 2), (8, 1, 5, 5), (8, 8, 3, 2)]
    assert not any(is_complex(torch.empty(shape)) for shape in shapes)
    assert is_complex(torch.empty(4, 8, 8, 2)) and is_complex(torch.empty(2, 4, 8, 8, 2))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "flow.h5"
    generate(FLOW, 8, 0, path)
    return path


def test_training_resumes_exactly(data, tmp_path):
    recipe = changed(RECIPE, ["train.optimiser=muon"])
    uninterrupted, stopped, adamw = (Run(tmp_path / name) for name in ("whole", "stopped", "adamw"))
    train_run(recipe, data, uninterrupted)
    stops = iter((False, False, True))
    train_run(recipe, data, stopped, stop=lambda: next(stops, True))
    assert not stopped.weights.exists()
    resume_run(stopped)
    train_run(RECIPE, data, adamw)
    expected, weights, others = (read_tensors(run.weights)[0] for run in (uninterrupted, stopped, adamw))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert not all(torch.equal(others[name], expected[name]) for name in expected)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_captured_update_matches_eager(precision):
    train = replace(RECIPE.train, optimiser="muon", precision=precision, updates=2 * WARM_UP + 3)
    world = World(device=torch.device("cuda", 0))
    eager, graph = (DryRun(replace(RECIPE, train=train), Execution(world, name)) for name in ("eager", "graph"))
    for _ in range(train.updates):
        eager()
        graph()
        torch.testing.assert_close(graph.loss, eager.loss, rtol=1e-3 if precision == "float32" else 2e-2, atol=0)
