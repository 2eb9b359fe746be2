"""Effect of slice updates on the differences between slices (app:srpa-theory).

Letters as in the paper: P routing, K slice-deslice kernel, Z slice states, A slice attention, W value matrix,
ΔZ = A Z W, η Dobrushin coefficient, c = η‖W‖₂, κ = ‖ΠAΠ‖₂‖W‖₂, V centred variation.
"""

import pytest
import torch
from torch import Tensor

from sigmasolver.diagnose.geometry import (
    centred_gain,
    centred_variation,
    diameter,
    dobrushin,
    pairwise_dobrushin,
)
from sigmasolver.models.slices import PhysicalOperator, SliceUpdate
from sigmasolver.ops.slices import EPSILON, deslice, routing, slice_states

SEEDS = range(4)
GATES = (-1.5, -0.1, 0.0, 0.3, 1.0)
SLACK, ROUND_OFF = 1 + 1e-12, 1e-13


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draw(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def spectral_norm(W: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(W, ord=2)


def slice_update(kind: str, seed: int, width: int = 5, gate: float = 0.0) -> SliceUpdate:
    """A `SliceUpdate` module with attention that is far from uniform."""
    torch.manual_seed(seed)
    update = SliceUpdate(kind, width).double()
    with torch.no_grad():
        for projection, scale in (("query", 4), ("key", 4), ("value", 1)):
            update.attention.get_submodule(projection).weight.uniform_(-1, 1).mul_(scale / width**0.5)
        if kind == "residual":
            update.gamma.fill_(gate)
    return update


def attention_and_value(update: SliceUpdate, Z: Tensor) -> tuple[Tensor, Tensor]:
    return update.attention.weights(Z), update.attention.value.weight.mT


# Slice-deslice kernel (prop:noattention-kernel)


def real_routing(seed: int, points: int = 30, slices: int = 4) -> Tensor:
    g = generator(seed)
    R, weight, bias = draw(g, 1, 1, points, 3), draw(g, 3, slices), draw(g, slices)
    return routing(R, weight, bias, torch.full((1,), 0.5, dtype=torch.float64))


@pytest.mark.parametrize("seed", SEEDS)
def test_slice_deslice_kernel_of_the_ops(seed):
    """eq:appendix-noattention-kernel: K = P D⁻¹ Pᵀ, symmetric, PSD, rank M, yet no projection."""
    P = real_routing(seed)
    N, M = P.shape[-2:]
    eye = torch.eye(N, dtype=torch.float64)
    K = deslice(P, slice_states(P, eye[None, None]))[0, 0]
    p = P[0, 0]
    torch.testing.assert_close(K, p @ torch.diag(1 / (p.sum(0) + 1e-5)) @ p.T, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(K, K.T, rtol=0, atol=1e-16)
    eigenvalues = torch.linalg.eigvalsh(K)
    assert eigenvalues.min() > -1e-14
    assert (eigenvalues > 1e-10).sum() == M < N
    assert eigenvalues.max() < 1
    assert (K @ K - K).norm() > 0.01


@pytest.mark.parametrize("seed", SEEDS)
def test_kernel_shrinks_constants_by_the_stabiliser(seed):
    """K 1 = P (s / (s + ε)): below one at every point, by about ε over the mass."""
    P = real_routing(seed)
    ones = torch.ones(1, 1, P.shape[-2], 1, dtype=torch.float64)
    constant = deslice(P, slice_states(P, ones))[..., 0]
    mass = P.sum(-2)
    torch.testing.assert_close(constant, (P * (mass / (mass + EPSILON))[..., None, :]).sum(-1), rtol=1e-14, atol=0)
    loss = 1 - constant
    assert (loss > 0).all()
    assert (loss < EPSILON / mass.min()).all()


# One update on random draws and on the real module (prop:srpa-mixing, prop:srpa-centered)


def assert_update_bounds(Z: Tensor, A: Tensor, W: Tensor, gate: float, response: Tensor, updated: Tensor) -> None:
    """eq:srpa-pairwise-control, eq:srpa-diameter-bounds, eq:srpa-centered-bounds for every leading index."""

    def pairs(X: Tensor) -> Tensor:
        return X[..., :, None, :] - X[..., None, :, :]

    d, V, g = diameter(Z), centred_variation(Z), abs(gate)
    per_pair = pairwise_dobrushin(A) * (spectral_norm(W) * d)[..., None, None]
    assert (pairs(response).norm(dim=-1) <= per_pair * SLACK + ROUND_OFF).all()
    assert ((pairs(updated) - pairs(Z)).norm(dim=-1) <= g * per_pair * SLACK + ROUND_OFF).all()

    c, kappa = dobrushin(A) * spectral_norm(W), centred_gain(A, W)
    for measure, before, factor in ((diameter, d, c), (centred_variation, V, kappa)):
        assert (measure(response) <= factor * before * SLACK + ROUND_OFF).all()
        assert ((1 - g * factor).clamp(min=0) * before <= measure(updated) * SLACK + ROUND_OFF).all()
        assert (measure(updated) <= (1 + g * factor) * before * SLACK + ROUND_OFF).all()


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_on_random_row_stochastic_matrices(seed, gate):
    g = generator(seed)
    Z, W = draw(g, 6, 7, 4) + 3.0, draw(g, 4, 4)
    sharpness = torch.tensor([0.0, 0.3, 1.0, 3.0, 10.0, 100.0], dtype=torch.float64)
    A = (sharpness[:, None, None] * draw(g, 6, 7, 7)).softmax(-1)
    response = A @ Z @ W
    assert_update_bounds(Z, A, W, gate, response, Z + gate * response)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("seed", SEEDS)
def test_bounds_on_the_slice_update_module(seed, gate):
    Z = draw(generator(seed), 2, 3, 6, 5)
    update = slice_update("residual", seed, gate=gate)
    with torch.no_grad():
        A, W = attention_and_value(update, Z)
        assert dobrushin(A).min() > 0.3 and dobrushin(A).max() < 1
        assert_update_bounds(Z, A, W, gate, update.attention(Z), update(Z))


@pytest.mark.parametrize("grid", [(12,), (5, 6), (3, 4, 3)])
def test_bounds_inside_the_physical_operator(grid):
    """With the slice states of an actual field, recorded by hooks."""
    torch.manual_seed(0)
    operator = PhysicalOperator(width=8, heads=2, slices=4, padding=("zeros",) * len(grid)).double()
    seen = {}
    operator.update.register_forward_hook(lambda _, inputs, out: seen.update(Z=inputs[0], updated=out))
    operator.update.attention.register_forward_hook(lambda _, __, out: seen.update(response=out))
    with torch.no_grad():
        for parameter in operator.parameters():
            parameter.normal_(std=0.5)
        operator.update.gamma.fill_(0.7)
        operator(draw(generator(1), 2, *grid, 8))
        A, W = attention_and_value(operator.update, seen["Z"])
    assert_update_bounds(seen["Z"], A, W, 0.7, seen["response"], seen["updated"])


def test_bounds_are_attained():
    """A = I, W = wI: the diameter scales by w, by 1 + γw, and for negative gates by 1 − |γ|w."""
    Z, eye, w = draw(generator(0), 4, 3), torch.eye(4, dtype=torch.float64), 0.6
    W = w * torch.eye(3, dtype=torch.float64)
    response = eye @ Z @ W
    for measure, factor in ((diameter, dobrushin(eye) * w), (centred_variation, centred_gain(eye, W))):
        torch.testing.assert_close(factor, torch.tensor(w, dtype=torch.float64))
        for gate in (0.5, -0.5):
            torch.testing.assert_close(measure(Z + gate * response), (1 + gate * factor) * measure(Z))


def test_row_stochasticity_alone_does_not_bound_the_centred_gain():
    """κ > 1 with W = I although η < 1: half of the slices attend to one slice, half to another."""
    M = 8
    logits = torch.zeros(M, M, dtype=torch.float64)
    logits[: M // 2, 0] = logits[M // 2 :, 1] = 8.0
    A, eye = logits.softmax(-1), torch.eye(M, dtype=torch.float64)
    assert dobrushin(A) < 1
    assert centred_gain(A, eye) > 1.9
    Z = (eye[0] - eye[1])[:, None]
    assert centred_variation(A @ Z) > 1.9 * centred_variation(Z)
    assert diameter(A @ Z) < diameter(Z)


def test_softmax_alone_does_not_bound_the_diameter_factor():
    """η < 1 but η‖W‖₂ > 1, and the diameter does grow."""
    A = (4 * torch.eye(3, dtype=torch.float64)).softmax(-1)
    Z = draw(generator(0), 3, 3)
    assert dobrushin(A) < 1 < 2 * dobrushin(A)
    assert diameter(2 * A @ Z) > diameter(Z)


# Identical attention rows; the gate at zero and one


@pytest.mark.parametrize("seed", SEEDS)
def test_identical_attention_rows_collapse_a_replacement_but_not_a_residual(seed):
    """Zero queries make all attention rows equal; ΔZ then destroys or preserves every difference."""
    Z = draw(generator(seed), 2, 3, 6, 5)
    replace, residual = slice_update("replace", seed), slice_update("residual", seed, gate=1.7)
    with torch.no_grad():
        for update in (replace, residual):
            update.attention.query.weight.zero_()
        assert dobrushin(replace.attention.weights(Z)).max() == 0
        collapsed, preserved = replace(Z), residual(Z)
    assert diameter(collapsed).max() < 1e-14
    differences = [X[..., :, None, :] - X[..., None, :, :] for X in (preserved, Z)]
    torch.testing.assert_close(*differences, rtol=0, atol=1e-13)
    assert (preserved - Z).norm() > 0.1


@pytest.mark.parametrize("seed", SEEDS)
def test_gate_zero_keeps_the_state_and_gate_one_is_not_vanilla(seed):
    """eq:appendix-identity-interaction: T_SRPA(γ = 1) − T_van = Z, never zero."""
    Z = draw(generator(seed), 1, 2, 6, 5)
    residual, replace = slice_update("residual", seed), slice_update("replace", seed)
    with torch.no_grad():
        assert torch.equal(residual(Z), Z)
        assert torch.equal(SliceUpdate("keep", 5)(Z), Z)
        residual.gamma.fill_(1.0)
        torch.testing.assert_close(residual(Z) - replace(Z), Z, rtol=0, atol=1e-14)


# Successive updates (eq:appendix-depth-bound, eq:appendix-centered-depth-bound)


@pytest.mark.parametrize("kind", ["replace", "residual"])
@pytest.mark.parametrize("seed", SEEDS)
def test_depth_bounds_on_stacked_slice_updates(seed, kind):
    """Each trajectory with its own coefficients: replacement from above, residual from below."""
    Z = start = 3 * draw(generator(seed), 2, 1, 6, 5)
    measures = (diameter, centred_variation)
    products = [torch.ones(2, 1, dtype=torch.float64) for _ in measures]
    # Collapsed states make the next attention uniform: replacement reaches round-off after a few layers.
    for layer, gate in enumerate((0.1, -0.2, 0.05, 0.3, -0.1, 0.15)[: 3 if kind == "replace" else 6]):
        update = slice_update(kind, 100 * seed + layer, gate=gate)
        with torch.no_grad():
            update.attention.value.weight.mul_(1.5)
            A, W = attention_and_value(update, Z)
            Z = update(Z)
            gains = (dobrushin(A) * spectral_norm(W), centred_gain(A, W))
        for i, (measure, gain) in enumerate(zip(measures, gains, strict=True)):
            products[i] = products[i] * (gain if kind == "replace" else 1 - abs(gate) * gain)
            bound = products[i] * measure(start)
            if kind == "replace":
                assert (measure(Z) <= bound * SLACK + ROUND_OFF).all()
            else:
                assert (bound > 0).all()
                assert (bound <= measure(Z) * SLACK).all()
    assert kind == "residual" or (centred_variation(Z) > 10 * ROUND_OFF).any()


def test_contracting_replacements_collapse_geometrically_while_the_residual_does_not():
    """κ ≤ 0.8 at every layer gives V ≤ 0.8^L V₀; gates with |γ|κ ≤ 0.08 keep V ≥ 0.92^L V₀."""
    start, depth, ceiling = draw(generator(0), 1, 1, 6, 5), 12, 0.8
    final = {}
    for kind in ("replace", "residual"):
        Z = start
        for layer in range(depth):
            update = slice_update(kind, layer, gate=0.1)
            with torch.no_grad():
                A, W = attention_and_value(update, Z)
                update.attention.value.weight.mul_(float(ceiling / centred_gain(A, W).clamp(min=ceiling)))
                Z = update(Z)
        final[kind] = float(centred_variation(Z) / centred_variation(start))
    assert final["replace"] <= ceiling**depth
    assert final["residual"] >= (1 - 0.1 * ceiling) ** depth


def test_small_steps_alone_do_not_keep_a_depth_independent_bound():
    """W = −I, A = I attain ∏(1 − γ_ℓ): positive for summable steps, zero in the limit for 1/ℓ steps."""

    def remaining(gates: Tensor) -> float:
        Z = start = draw(generator(0), 5, 3)
        for gate in gates:
            Z = Z - gate * Z
        return float(diameter(Z) / diameter(start))

    layers = torch.arange(1, 2001, dtype=torch.float64)
    summable, harmonic = 0.5 / layers**2, 0.5 / layers
    assert remaining(harmonic) == pytest.approx(float((1 - harmonic).prod()))
    assert remaining(harmonic) < 0.02
    assert remaining(harmonic) < 0.6 * remaining(harmonic[:500])
    assert remaining(summable) > 0.35
    assert remaining(summable) == pytest.approx(remaining(summable[:500]), rel=2e-3)
