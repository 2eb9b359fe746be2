"""When the same attention response hurts as a replacement and helps as a residual (app:srpa-utility).

Cohort tensors are (S inputs, H heads, M slices, D channels) with ⟨X, Y⟩ = (1/S) Σ_s Σ_heads ⟨X, Y⟩_F.
Letters: Z states, ΔZ = A Z W response, T = Z + E ideal target, s_Z = ‖ΠZ‖, q bound on ‖ΠΔZ‖/s_Z, e = ‖E‖,
α alignment of E and ΔZ, γ shared gate, G downstream network, Y its target, ε₀ = ‖G(Z) − Y‖,
φ(γ) = ‖G(Z + γΔZ) − Y‖², g = φ'(0), β Lipschitz constant of φ'.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.functional import jvp
from torch.func import grad

from sigmasolver.diagnose.geometry import centre, centred_gain
from sigmasolver.models.slices import PhysicalOperator

SEEDS = range(4)
SLACK = 1 + 1e-12
Readout = Callable[[Tensor], Tensor]


def inner(X: Tensor, Y: Tensor) -> Tensor:
    """Cohort inner product: mean over inputs, sum over everything else."""
    return (X * Y).sum() / len(X)


def norm(X: Tensor) -> Tensor:
    return inner(X, X).sqrt()


def identity(X: Tensor) -> Tensor:
    return X


def double(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def printed_example(inputs: int = 1, heads: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Z, ΔZ and T of the nonempty example, repeated over inputs and heads."""
    Z = double([-1, 0], [1, 0])
    A = double([0.75, 0.25], [0.25, 0.75])
    T = double([-1.1, -0.1], [1.1, 0.1])
    return tuple(X.expand(inputs, heads, 2, 2).clone() for X in (Z, A @ Z, T))


def random_cohort(seed: int, q: float) -> tuple[Tensor, Tensor]:
    """Z and ΔZ of 3 inputs and 2 heads; the value matrices are scaled so that every κ is at most q."""
    g = torch.Generator().manual_seed(seed)
    Z = torch.randn(3, 2, 5, 4, generator=g, dtype=torch.float64) + 0.5
    A = (2 * torch.randn(3, 2, 5, 5, generator=g, dtype=torch.float64)).softmax(-1)
    W = torch.randn(2, 4, 4, generator=g, dtype=torch.float64)
    W = W * (q / centred_gain(A, W).amax(0))[:, None, None]
    assert centred_gain(A, W).max() <= q * SLACK
    return Z, A @ Z @ W


def target_error(seed: int, response: Tensor, size: float, alignment: float) -> Tensor:
    """E with ‖E‖ = size and ⟨E, ΔZ⟩ = alignment · size · ‖ΔZ‖."""
    g = torch.Generator().manual_seed(seed + 1000)
    along = response / norm(response)
    other = torch.randn(response.shape, generator=g, dtype=torch.float64)
    other = other - inner(other, along) * along
    return size * (alignment * along + (1 - alignment**2) ** 0.5 * other / norm(other))


# Slice target (thm:latent-refinement)


@pytest.mark.parametrize("theta", [0.2, 1.0])
@pytest.mark.parametrize("alignment", [-0.9, 0.05, 1.0])
@pytest.mark.parametrize("q", [0.2, 0.9])
@pytest.mark.parametrize("seed", SEEDS)
def test_shared_gate_orders_the_three_updates(seed, q, alignment, theta):
    """eq:latent-loss-order on random cohorts that satisfy the assumptions."""
    Z, response = random_cohort(seed, q)
    s_Z = norm(centre(Z))
    assert norm(centre(response)) <= q * s_Z * SLACK
    e = 0.95 * (1 - q) / 2 * s_Z
    E = target_error(seed, response, float(e), alignment)
    T, alpha = Z + E, abs(alignment)

    gate = theta * inner(E, response) / inner(response, response)
    updated = Z + gate * response
    no, van, srpa = (norm(X - T) ** 2 for X in (Z, response, updated))
    assert srpa <= (1 - theta * (2 - theta) * alpha**2) * e**2 * SLACK + 1e-28
    assert srpa < no < van
    torch.testing.assert_close(no, e**2)
    assert norm(gate * response) <= theta * e * SLACK
    retained, replaced = norm(centre(updated)), norm(centre(response))
    assert retained * SLACK >= s_Z - theta * e > q * s_Z
    assert q * s_Z * SLACK >= replaced


@pytest.mark.parametrize(("inputs", "heads"), [(1, 1), (4, 1), (1, 3), (4, 3)])
def test_printed_example(inputs, heads):
    """Losses 0.04, 0.74, 0.02 per head (the cohort norm sums over heads), one gate for all of them."""
    Z, response, T = printed_example(inputs, heads)
    E, root = T - Z, heads**0.5

    def close(value: Tensor, printed: float) -> None:
        assert float(value) == pytest.approx(printed, rel=1e-13)

    torch.testing.assert_close(response, Z / 2)
    close(norm(centre(Z)), root * 2**0.5)
    close(norm(centre(response)) / norm(centre(Z)), 0.5)
    close(norm(E), root * 0.2)
    close(inner(E, response) / (norm(E) * norm(response)), 0.5**0.5)
    gate = inner(E, response) / inner(response, response)
    close(gate, 0.2)
    losses = [norm(X - T) ** 2 / heads for X in (Z, response, Z + gate * response)]
    for loss, printed in zip(losses, (0.04, 0.74, 0.02), strict=True):
        close(loss, printed)
    close(norm(centre(Z + gate * response)), root * 1.1 * 2**0.5)
    close(norm(centre(response)), root * 0.5 * 2**0.5)
    # The residual is the second channel, orthogonal to the response; e < (1 − q) s_Z / 2 holds with a margin.
    residual = T - Z - gate * response
    assert residual[..., 0].abs().max() < 1e-15
    close(residual[..., 1].abs().max(), 0.1)
    assert norm(E) < 0.25 * norm(centre(Z))


@pytest.mark.parametrize(("fraction", "replacement_loses"), [(0.98, True), (1.02, False)])
def test_target_error_limit_is_sharp(fraction, replacement_loses):
    """e < (1 − q) s_Z / 2 cannot be widened: a target just beyond it towards ΔZ prefers the replacement."""
    Z, response, _ = printed_example()
    limit = 0.25 * norm(centre(Z))
    E = fraction * limit * (response - Z) / norm(response - Z)
    assert inner(E, response).abs() > 0.99 * norm(E) * norm(response)
    assert bool(norm(response - Z - E) > norm(E)) == replacement_loses


def test_cohort_gain_may_cost_one_input():
    """The shared gate follows the cohort: with opposite errors the second input gets worse."""
    _, response, _ = printed_example(inputs=2)
    E = response * torch.tensor([0.3, -0.1], dtype=torch.float64)[:, None, None, None]
    gate = inner(E, response) / inner(response, response)
    before, after = E.pow(2).sum((1, 2, 3)), (E - gate * response).pow(2).sum((1, 2, 3))
    assert float(gate) == pytest.approx(0.1)
    assert after.mean() < before.mean()
    assert after[0] < before[0] and after[1] > before[1]


# Output target (thm:output-refinement)


def gate_loss(G: Readout, Z: Tensor, response: Tensor, Y: Tensor) -> Readout:
    return lambda gate: norm(G(Z + gate * response) - Y) ** 2


def slope_formula(G: Readout, Z: Tensor, response: Tensor, Y: Tensor) -> Tensor:
    """g = 2 ⟨G(Z) − Y, DG(Z)[ΔZ]⟩."""
    value, derivative = jvp(G, Z, response)
    return 2 * inner(value - Y, derivative)


def scalar(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def assert_output_order(G: Readout, Z: Tensor, response: Tensor, Y: Tensor, q: float, xi: float, gate: float) -> None:
    """eq:output-loss-order."""
    phi, s_Z = gate_loss(G, Z, response, Y), norm(centre(Z))
    assert phi(scalar(gate)) < phi(scalar(0.0)) < norm(G(response) - Y) ** 2
    assert norm(gate * centre(response)) <= norm(gate * response) * SLACK
    assert norm(gate * response) < xi * s_Z <= xi * norm(Z)
    assert norm(centre(Z + gate * response)) > q * s_Z
    assert q * s_Z * SLACK >= norm(centre(response))


def test_printed_output_conditions():
    """Identity readout: m = 1, ε₀ = 0.2, g = −0.2, β = 1 (all sharp), r₀ = 1, ξ = 0.2, t = 0.2."""
    Z, response, T = printed_example()
    phi = gate_loss(identity, Z, response, T)
    s_Z, d, q = float(norm(centre(Z))), float(norm(response)), 0.5
    m, eps0 = float(norm(response - Z) / norm(centre(response - Z))), float(norm(Z - T))
    g = float(grad(phi)(scalar(0.0)))
    curvature = {float(grad(grad(phi))(scalar(x))) for x in (-1.0, 0.0, 0.4, 1.0)}
    assert m == pytest.approx(1, rel=1e-14)
    assert eps0 == pytest.approx(0.2, rel=1e-14)
    assert g == pytest.approx(-0.2, rel=1e-14)
    assert [pytest.approx(1.0, rel=1e-14)] * len(curvature) == sorted(curvature)
    assert 2 * eps0 < m * (1 - q) * s_Z

    r0, beta, xi, t = 1.0, 1.0, 0.2, 0.2
    limits = (r0, 2 * abs(g) / beta, xi * s_Z / d)
    assert limits == pytest.approx((1.0, 0.4, 0.4), rel=1e-13)
    assert t < min(limits) and t * q < 1 - q
    assert_output_order(identity, Z, response, T, q, xi, gate=t)
    # β is the smallest constant, so the gain vanishes exactly at the step limit 2|g|/β.
    assert float(phi(scalar(0.4))) == pytest.approx(float(phi(scalar(0.0))), rel=1e-13)


def nonlinear_readout(seed: int, Z: Tensor) -> Readout:
    """One fixed smooth network for every input, acting on all heads together."""
    g = torch.Generator().manual_seed(seed + 2000)
    n = Z[0].numel()
    B, C, D = (torch.randn(n, n, generator=g, dtype=torch.float64) / n**0.5 for _ in range(3))
    return lambda X: X.flatten(1) @ B + torch.tanh(X.flatten(1) @ C) @ D


@pytest.mark.parametrize("readout", ["linear", "nonlinear"])
@pytest.mark.parametrize("q", [0.3, 0.8])
@pytest.mark.parametrize("seed", SEEDS)
def test_output_order_on_random_readouts(seed, q, readout):
    """Every admissible step of sign −g reduces the loss, and replacement is worst."""
    Z, response = random_cohort(seed, q)
    G = nonlinear_readout(seed, Z) if readout == "nonlinear" else lambda X: 1.3 * X.roll(1, -1).flatten(1)
    s_Z, d, r0, xi = norm(centre(Z)), norm(response), 1.0, 0.3
    m = norm(G(response) - G(Z)) / norm(centre(response - Z))
    off = target_error(seed, G(response) - G(Z), 0.45 * float(m * (1 - q) * s_Z), 0.2)
    Y = G(Z) + off
    assert 2 * norm(G(Z) - Y) < m * (1 - q) * s_Z

    phi = gate_loss(G, Z, response, Y)
    g = grad(phi)(scalar(0.0))
    gates = torch.linspace(-r0, r0, 41, dtype=torch.float64)
    beta = 1.1 * max(float(grad(grad(phi))(x).abs()) for x in gates)
    longest = min(r0, float(2 * g.abs() / beta), float(xi * s_Z / d), (1 - q) / q)
    for fraction in (0.05, 0.5, 0.999):
        gate = -fraction * longest * float(g.sign())
        assert_output_order(G, Z, response, Y, q, xi, gate)


@pytest.mark.parametrize("seed", SEEDS)
def test_gate_slope_by_autograd_equals_the_formula(seed):
    Z, response = random_cohort(seed, 0.7)
    G = nonlinear_readout(seed, Z)
    Y = torch.randn(G(Z).shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    by_autograd = grad(gate_loss(G, Z, response, Y))(scalar(0.0))
    torch.testing.assert_close(by_autograd, slope_formula(G, Z, response, Y), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradient_of_gamma_equals_the_slope_formula(seed):
    """The gradient of γ at zero is g, where G is everything after the slice update; one step reduces the loss."""
    torch.manual_seed(seed)
    operator = PhysicalOperator(width=6, heads=2, slices=4, padding=("zeros", "zeros")).double()
    field, Y = torch.randn(2, 3, 4, 5, 6, dtype=torch.float64)
    seen = {}
    record = operator.update.register_forward_hook(lambda _, inputs, __: seen.update(Z=inputs[0].detach()))
    loss = norm(operator(field) - Y) ** 2
    (slope,) = torch.autograd.grad(loss, operator.update.gamma)
    record.remove()
    Z = seen["Z"]

    def downstream(X: Tensor) -> Tensor:
        override = operator.update.register_forward_hook(lambda *_: X)
        out = operator(field)
        override.remove()
        return out

    formula = slope_formula(downstream, Z, operator.update.attention(Z).detach(), Y)
    with torch.no_grad():
        torch.testing.assert_close(slope.sum(), formula, rtol=1e-10, atol=1e-13)
        operator.update.gamma.fill_(-1e-3 * float(formula.sign()))
        assert norm(operator(field) - Y) ** 2 < loss


# Differences of slices alone (eq:centered-output-sufficient-condition)


def with_replaced_differences(Z: Tensor, response: Tensor) -> Tensor:
    """Z_c = Z + Π(ΔZ − Z)."""
    return Z + centre(response - Z)


def centred_constants(G: Readout, Z: Tensor, response: Tensor) -> tuple[Tensor, Tensor]:
    """The largest m_c and the smallest b_cm that the first two conditions allow."""
    Z_c = with_replaced_differences(Z, response)
    return norm(G(Z_c) - G(Z)) / norm(centre(response - Z)), norm(G(response) - G(Z_c))


def test_centred_condition_on_the_printed_example():
    Z, response, T = printed_example()
    torch.testing.assert_close(with_replaced_differences(Z, response), response, rtol=0, atol=1e-16)
    m_c, b_cm = centred_constants(identity, Z, response)
    assert float(m_c) == pytest.approx(1, rel=1e-14)
    assert float(b_cm) < 1e-15
    assert m_c * (1 - 0.5) * norm(centre(Z)) > 2 * norm(Z - T) + b_cm


@pytest.mark.parametrize("q", [0.3, 0.8])
@pytest.mark.parametrize("seed", SEEDS)
def test_centred_condition_implies_the_plain_one(seed, q):
    """With b_cm > 0, m = m_c − b_cm/‖Π(ΔZ − Z)‖ satisfies eq:output-observability."""
    Z, response = random_cohort(seed, q)

    def G(X: Tensor) -> Tensor:
        return centre(X) + 0.02 * (X - centre(X))

    s_Z, moved = norm(centre(Z)), norm(centre(response - Z))
    m_c, b_cm = centred_constants(G, Z, response)
    eps0 = 0.99 * (m_c * (1 - q) * s_Z - b_cm) / 2
    assert b_cm > 1e-3 and eps0 > 0
    m = m_c - b_cm / moved
    assert norm(G(response) - G(Z)) * SLACK >= m * moved
    assert 2 * eps0 < m * (1 - q) * s_Z
    # The worst target at distance ε₀ lies towards the replacement.
    Y = G(Z) + eps0 * (G(response) - G(Z)) / norm(G(response) - G(Z))
    assert norm(G(response) - Y) > norm(G(Z) - Y)


@pytest.mark.parametrize("seed", SEEDS)
def test_mean_readout_cannot_satisfy_the_centred_condition(seed):
    """G(Z_c) = G(Z) leaves only m_c = 0, although the plain condition can hold for the same readout."""
    Z, response = random_cohort(seed, 0.5)

    def mean(X: Tensor) -> Tensor:
        return X.mean(-2)

    m_c, _ = centred_constants(mean, Z, response)
    assert m_c < 1e-14
    assert norm(centre(response - Z)) >= 0.5 * norm(centre(Z)) > 0
    assert norm(mean(response) - mean(Z)) > 0.1 * norm(centre(response - Z))
