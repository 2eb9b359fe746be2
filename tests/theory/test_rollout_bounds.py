"""Errors under feedback (app:error-propagation and the end of app:spectral-physical-complementarity).

Letters: u exact state, û prediction, e = û − u error, δ defect of one call on the exact input, J̄ Jacobian
averaged over the segment from u to û, a bound on ‖J̄‖, G_k(a) = 1 + a + … + a^{k−1}.
The maps are u ↦ V tanh(W u + b), whose Lipschitz constants are known.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.theory.linear_model import geometric_sum, real_fourier_basis

Array = NDArray[np.float64]
SEEDS = range(4)
NODES, WEIGHTS = np.polynomial.legendre.leggauss(40)


@dataclass(frozen=True, eq=False)
class TanhMap:
    """u ↦ V tanh(W u + b) on the last axis."""

    V: Array
    W: Array
    b: Array

    def __call__(self, u: Array) -> Array:
        return np.tanh(u @ self.W.T + self.b) @ self.V.T

    def jacobian(self, u: Array) -> Array:
        return self.V @ np.diag(1 - np.tanh(self.W @ u + self.b) ** 2) @ self.W

    @property
    def gain(self) -> float:
        """Lipschitz constant: |tanh'| ≤ 1."""
        return float(np.linalg.norm(self.V, 2) * np.linalg.norm(self.W, 2))

    @property
    def curvature(self) -> float:
        """Lipschitz constant of the Jacobian: |tanh''| ≤ 4 / (3√3)."""
        return float(4 / (3 * np.sqrt(3)) * self.gain * np.linalg.norm(self.W, 2))

    def near(self, rng: np.random.Generator, distance: float) -> "TanhMap":
        """Another such map with slightly different coefficients."""
        return TanhMap(
            self.V + distance * rng.standard_normal(self.V.shape),
            self.W + distance * rng.standard_normal(self.W.shape),
            self.b + distance * rng.standard_normal(self.b.shape),
        )


def draw_map(rng: np.random.Generator, n: int, out: int, gain: float) -> TanhMap:
    """A map from n to `out` numbers with exactly this Lipschitz bound."""
    V, W = rng.standard_normal((out, n)), rng.standard_normal((n, n))
    return TanhMap(gain * V / np.linalg.norm(V, 2), W / np.linalg.norm(W, 2), 0.3 * rng.standard_normal(n))


def mean_jacobian(f: TanhMap, u: Array, e: Array) -> Array:
    """J̄ = ∫₀¹ Df(u + t e) dt by Gauss-Legendre."""
    return sum(w / 2 * f.jacobian(u + (t + 1) / 2 * e) for t, w in zip(NODES, WEIGHTS, strict=True))


def rollout(f: Callable[[Array], Array], u: Array, calls: int) -> Array:
    states = [u]
    for _ in range(calls):
        states.append(f(states[-1]))
    return np.stack(states)


@dataclass(frozen=True, eq=False)
class Deployment:
    """A model rolled out along the truth: states, errors, defects and averaged Jacobians of every call."""

    model: TanhMap
    exact: Array
    errors: Array
    defects: Array
    jacobians: Array


def deploy(seed: int, gain: float, calls: int = 8, n: int = 5, start_error: float = 0.0) -> Deployment:
    rng = np.random.default_rng(seed)
    truth = draw_map(rng, n, n, gain)
    model = truth.near(rng, 0.03)
    u = rng.standard_normal(n)
    exact = rollout(truth, u, calls)
    predicted = rollout(model, u + start_error * rng.standard_normal(n), calls)
    errors = predicted - exact
    defects = model(exact[:-1]) - exact[1:]
    jacobians = np.stack([mean_jacobian(model, u, e) for u, e in zip(exact[:-1], errors[:-1], strict=True)])
    return Deployment(model, exact, errors, defects, jacobians)


def finite_bound(amplification: list[float], start: float, defects: list[float]) -> float:
    """Right-hand side of eq:rollout-finite-bound, written as printed."""
    H = len(amplification)
    total = np.prod(amplification) * start
    return float(total + sum(np.prod(amplification[k + 1 :]) * defects[k] for k in range(H)))


@pytest.mark.parametrize("gain", [0.8, 2.5])
@pytest.mark.parametrize("seed", SEEDS)
def test_error_splits_exactly_into_defect_and_propagation(seed, gain):
    """eq:rollout-exact-identity, and its integrated-Jacobian form."""
    d = deploy(seed, gain, start_error=0.5)
    propagated = d.model(d.exact[:-1] + d.errors[:-1]) - d.model(d.exact[:-1])
    np.testing.assert_allclose(d.errors[1:], d.defects + propagated, rtol=0, atol=1e-14)
    through_mean = np.einsum("kij,kj->ki", d.jacobians, d.errors[:-1])
    np.testing.assert_allclose(propagated, through_mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seed", SEEDS)
def test_linearised_propagation_has_a_quadratic_remainder(seed):
    """eq:error-propagation: ‖r‖ ≤ L‖e‖²/2, and halving e quarters r."""
    rng = np.random.default_rng(seed)
    f = draw_map(rng, 5, 5, 2.0)
    u, direction = rng.standard_normal(5), rng.standard_normal(5)
    sizes = 0.5 ** np.arange(0, 10)
    remainders = []
    for size in sizes:
        e = size * direction
        r = np.linalg.norm(f(u + e) - f(u) - f.jacobian(u) @ e)
        assert r <= 0.5 * f.curvature * np.linalg.norm(e) ** 2
        remainders.append(r)
    order = np.diff(np.log(remainders[-4:])) / np.diff(np.log(sizes[-4:]))
    np.testing.assert_allclose(order, 2.0, atol=0.06)


@pytest.mark.parametrize("start_error", [0.0, 0.3])
@pytest.mark.parametrize("gain", [0.8, 1.0, 1.7])
@pytest.mark.parametrize("seed", SEEDS)
def test_finite_horizon_bound(seed, gain, start_error):
    """eq:rollout-finite-bound with the measured ‖J̄‖ and with the a-priori Lipschitz constant."""
    d = deploy(seed, gain, start_error=start_error)
    measured = [float(np.linalg.norm(J, 2)) for J in d.jacobians]
    defects = [float(np.linalg.norm(delta)) for delta in d.defects]
    start = float(np.linalg.norm(d.errors[0]))
    for H in range(1, len(defects) + 1):
        error = np.linalg.norm(d.errors[H])
        sharp = finite_bound(measured[:H], start, defects[:H])
        coarse = finite_bound([d.model.gain] * H, start, defects[:H])
        assert error <= sharp * (1 + 1e-12) <= coarse * (1 + 2e-12)


@pytest.mark.parametrize("a", [0.5, 1.0, 1.5])
def test_finite_horizon_bound_is_attained(a):
    """Aligned defects of u ↦ a u attain the bound: small defects give large errors once a > 1."""
    direction = np.array([0.6, 0.8])
    defects = [0.01, 0.03, 0.02, 0.05, 0.01]
    e = 0.1 * direction
    for h, delta in enumerate(defects):
        e = delta * direction + a * e
        np.testing.assert_allclose(np.linalg.norm(e), finite_bound([a] * (h + 1), 0.1, defects[: h + 1]), rtol=1e-13)


@pytest.mark.parametrize("seed", SEEDS)
def test_unrolled_error_is_a_chronological_sum_of_defects(seed):
    """e_k = Σ_j J̄_{k−1} … J̄_{j+1} δ_j; the reversed product order gives a different result."""
    d = deploy(seed, 1.5)
    k = len(d.defects)

    def unrolled(order: int) -> Array:
        total = np.zeros(d.defects.shape[1])
        for j in range(k):
            factors = list(d.jacobians[j + 1 : k])[::order]
            term = d.defects[j]
            for J in factors:
                term = J @ term
            total += term
        return total

    np.testing.assert_allclose(unrolled(1), d.errors[k], rtol=0, atol=1e-11)
    assert np.linalg.norm(unrolled(-1) - d.errors[k]) > 1e-6


@pytest.mark.parametrize(("history", "block"), [(1, 1), (2, 1), (1, 3), (2, 3), (3, 2)])
@pytest.mark.parametrize("seed", SEEDS[:2])
def test_block_output_bound_covers_discarded_frames(seed, history, block):
    """eq:rollout-block-output-bound on top of eq:rollout-finite-bound for the complete history map."""
    q, calls = 2, 6
    rng = np.random.default_rng(seed)
    truth = draw_map(rng, history * q, block * q, 1.3)
    model = truth.near(rng, 0.02)

    def advance(output: TanhMap) -> Callable[[Array], Array]:
        return lambda s: np.concatenate([s, output(s)])[-history * q :]

    s = rng.standard_normal(history * q)
    exact, predicted = rollout(advance(truth), s, calls), rollout(advance(model), s, calls)
    # Old frames that stay in the history are copied (gain one); if the block covers the history there are none.
    a = model.gain if block >= history else np.hypot(1.0, model.gain)
    defects = [float(np.linalg.norm(advance(model)(s) - advance(truth)(s))) for s in exact]
    for k in range(calls + 1):
        y = truth(exact[k])
        local = np.linalg.norm(model(exact[k]) - y)
        history_error = np.linalg.norm(predicted[k] - exact[k])
        assert history_error <= finite_bound([a] * k, 0.0, defects[:k]) * (1 + 1e-12)
        block_error = np.linalg.norm(model(predicted[k]) - y)
        assert block_error <= (local + model.gain * history_error) * (1 + 1e-12)
        if k < calls:
            history_part = np.linalg.norm((model(predicted[k]) - y)[-history * q :])
            assert history_part <= block_error
            assert block <= history or history_part < block_error


def component_quantities(d: Deployment, low: int) -> tuple[Array, Array, Array]:
    """x_k, A and ε of eq:complement-component-bound for the `low` lowest Fourier modes."""
    B = real_fourier_basis(d.errors.shape[1])
    Q1 = B[:low].T @ B[:low]
    parts = (Q1, np.eye(len(Q1)) - Q1)
    x = np.stack([np.linalg.norm(d.errors @ Q, axis=1) for Q in parts], axis=1)
    A = np.array([[max(np.linalg.norm(Qi @ J @ Qj, 2) for J in d.jacobians) for Qj in parts] for Qi in parts])
    eps = np.array([np.linalg.norm(d.defects @ Q, axis=1).max() for Q in parts])
    return x, A, eps


@pytest.mark.parametrize("gain", [0.45, 2.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_two_component_bound(seed, gain):
    """eq:complement-component-bound, with transfer between components and with amplification."""
    d = deploy(seed, gain, calls=10, n=6)
    x, A, eps = component_quantities(d, low=3)
    assert A[0, 1] > 0.01 and A[1, 0] > 0.01
    envelope, power = np.zeros(2), np.eye(2)
    for k in range(1, len(x)):
        envelope, power = envelope + power @ eps, power @ A
        assert (x[k] <= envelope * (1 + 1e-12)).all()
    if gain < 1:
        assert A[0, 1] * A[1, 0] < (1 - A[0, 0]) * (1 - A[1, 1])
        limit = np.linalg.solve(np.eye(2) - A, eps)
        assert (x <= limit).all()
        for _ in range(200):
            envelope, power = envelope + power @ eps, power @ A
        np.testing.assert_allclose(envelope, limit, rtol=1e-12)


entry = st.floats(0, 1.5, allow_subnormal=False)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(entry, entry, entry, entry)
def test_two_component_spectral_radius(a11, a12, a21, a22):
    """The printed eigenvalue; the printed conditions are sufficient for radius < 1, and also necessary."""
    A = np.array([[a11, a12], [a21, a22]])
    radius = 0.5 * (a11 + a22 + np.sqrt((a11 - a22) ** 2 + 4 * a12 * a21))
    # Eigenvalues of a nearly defective matrix are accurate only to the square root of round-off.
    np.testing.assert_allclose(radius, np.abs(np.linalg.eigvals(A)).max(), rtol=1e-7, atol=1e-7)
    assume(abs(radius - 1) > 1e-9)
    small_gain = a11 < 1 and a22 < 1 and a12 * a21 < (1 - a11) * (1 - a22)
    assert small_gain == (radius < 1)


@pytest.mark.parametrize("seed", range(8))
def test_correction_helps_exactly_when_it_is_aligned(seed):
    """eq:complement-marginal-alignment: f = S + C against S alone at a true input."""
    rng = np.random.default_rng(seed)
    S, C, truth = (draw_map(rng, 4, 4, g) for g in (1.0, 0.6, 1.0))
    u = rng.standard_normal((50, 4))
    r, c = truth(u) - S(u), C(u)
    defect = np.sum((S(u) + C(u) - truth(u)) ** 2, axis=1)
    alignment, energy, alone = np.sum(r * c, axis=1), np.sum(c * c, axis=1), np.sum(r * r, axis=1)
    np.testing.assert_allclose(defect, alone - 2 * alignment + energy, rtol=1e-12)
    helps = 2 * alignment > energy
    assert (helps == (defect < alone)).all()
    assert 0 < helps.sum() < len(u)


@pytest.mark.parametrize("seed", SEEDS)
def test_two_branch_gain_bounds_the_rollout(seed):
    """E_joint(k) ≤ δ G_k(a₀ + a_c) with ‖DS‖ ≤ a₀, ‖DC‖ ≤ a_c and δ the largest defect on true inputs."""
    rng = np.random.default_rng(seed)
    S, C = draw_map(rng, 4, 4, 0.7), draw_map(rng, 4, 4, 0.5)
    u, calls = rng.standard_normal(4), 10
    S_true, C_true = S.near(rng, 0.02), C.near(rng, 0.02)
    exact = rollout(lambda u: S_true(u) + C_true(u), u, calls)
    joint = rollout(lambda u: S(u) + C(u), u, calls)
    delta = np.linalg.norm(S(exact[:-1]) + C(exact[:-1]) - exact[1:], axis=1).max()
    for k, error in enumerate(np.linalg.norm(joint - exact, axis=1)):
        assert error <= delta * geometric_sum(S.gain + C.gain, k) * (1 + 1e-12)


@pytest.mark.parametrize("a", [0.7, 1.0, 1.2])
@pytest.mark.parametrize("seed", SEEDS)
def test_joint_advantage_survives_a_small_realisation_error(seed, a):
    """prop:complement-realization with a nonlinear ideal map that is itself inexact; per state and RMS."""
    rng = np.random.default_rng(seed)
    n, calls, eta = 4, 8, 0.004
    ideal = draw_map(rng, n, n, a)
    truth = ideal.near(rng, 0.002)
    field = draw_map(rng, n, n, 1.0)
    offset_phy, offset_spec = 0.15 * rng.standard_normal((2, n))

    def joint(u: Array) -> Array:
        wiggle = np.sin(40 * field(u))  # steep on purpose: only its size matters, not its derivative
        return ideal(u) + eta * wiggle / np.linalg.norm(wiggle, axis=-1, keepdims=True)

    u = rng.standard_normal((20, n))
    maps = {
        "phy": lambda u: ideal(u) + offset_phy,
        "spec": lambda u: 0.9 * ideal(u) + offset_spec,
        "ideal": ideal,
        "joint": joint,
    }
    exact = rollout(truth, u, calls)
    paths = {name: rollout(f, u, calls) for name, f in maps.items()}
    per_state = {name: np.linalg.norm(path - exact, axis=-1) for name, path in paths.items()}
    drift = np.linalg.norm(paths["joint"] - paths["ideal"], axis=-1)
    envelope = eta * np.array([geometric_sum(a, k) for k in range(calls + 1)])
    assert (drift <= envelope[:, None] + 1e-14).all()

    mean_square = {name: np.sqrt((e**2).mean(axis=1, keepdims=True)) for name, e in per_state.items()}
    for E in (per_state, mean_square):
        single = np.minimum(E["phy"], E["spec"])
        margin = single - E["ideal"]
        qualified = margin > envelope[:, None]
        assert qualified[1:].mean() > 0.5
        assert (E["joint"] < single)[qualified].all()


@pytest.mark.parametrize("seed", SEEDS)
def test_projection_mix_selects_the_defects_of_its_branches(seed):
    """Q f_spec + (I − Q) f_phy has the defect Q δ_spec + (I − Q) δ_phy on a true input."""
    rng = np.random.default_rng(seed)
    spec, phy, truth = (draw_map(rng, 6, 6, 1.0) for _ in range(3))
    B = real_fourier_basis(6)
    Q = B[:3].T @ B[:3]
    u = rng.standard_normal(6)
    defect = Q @ spec(u) + (np.eye(6) - Q) @ phy(u) - truth(u)
    squared = np.sum((Q @ (spec(u) - truth(u))) ** 2) + np.sum((phy(u) - truth(u) - Q @ (phy(u) - truth(u))) ** 2)
    np.testing.assert_allclose(defect @ defect, squared, rtol=1e-12)
