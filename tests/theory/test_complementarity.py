"""Structure of the two operator cores and the ranking-reversal model (app:spectral-physical-complementarity).

Letters: W_a(k) channel matrix of mode k on axis a; P routing, Z slice states, 𝒢 token response and 𝒪 output
projection of the physical operator; T exact map, χ contraction, λ_i and v_i eigensystem of L, as in
`linear_model`; E(k)² expected squared error after k calls.
"""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from torch import Tensor
from torch.autograd.functional import jacobian

from sigmasolver.models.slices import PhysicalOperator
from sigmasolver.ops.fourier import axis_fourier
from tests.theory.linear_model import (
    LinearDynamics,
    geometric_sum,
    printed_example,
    random_reversal,
    real_fourier_basis,
    risk,
)

Array = NDArray[np.float64]
INSTANCES = [(seed, n, r) for seed in range(3) for n, r in ((4, 1), (5, 1), (7, 2), (8, 3))]


# Spectral gain (eq:complement-spectral-gain)


def spectral_weights(seed: int, modes: tuple[int, ...], channels: int = 2) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(K, channels, channels, 2, generator=g, dtype=torch.float64) for K in modes]


def dense_norm(weights: list[Tensor], grid: tuple[int, ...]) -> float:
    """Operator norm of the real operation, from its dense matrix."""
    channels = weights[0].shape[1]
    size = int(np.prod(grid)) * channels
    basis = torch.eye(size, dtype=torch.float64).reshape(size, *grid, channels)
    return float(torch.linalg.matrix_norm(axis_fourier(basis, weights).reshape(size, size), ord=2))


def gain_bound(weights: list[Tensor]) -> float:
    """Σ_a max_k ‖W_a(k)‖₂ over complex channel matrices."""
    return float(sum(torch.linalg.matrix_norm(torch.view_as_complex(W), ord=2).max() for W in weights))


def symbol(W: Tensor, k: int, n: int) -> Tensor:
    """Multiplier of full-spectrum mode k on one axis: conjugate if negative, real if k ≡ −k, zero if cut."""
    k = k - n if 2 * k > n else k
    if abs(k) >= len(W):
        return torch.zeros(W.shape[1:3], dtype=torch.complex128)
    value = torch.view_as_complex(W[abs(k)])
    if 2 * k % n == 0:
        return value.real.to(torch.complex128)
    return value if k > 0 else value.conj()


GRIDS = [((7,), (4,)), ((8,), (5,)), ((8,), (3,)), ((2,), (2,)), ((1,), (1,))]
GRIDS += [((5, 6), (2, 4)), ((4, 7), (3, 4)), ((3, 4, 5), (2, 3, 2)), ((4, 2, 3), (3, 2, 1))]


@pytest.mark.parametrize(("grid", "modes"), GRIDS)
def test_spectral_gain_bound(grid, modes):
    """The true norm is that of the largest summed symbol, never above the bound; odd and even sizes, with Nyquist."""
    for seed in range(3):
        weights = spectral_weights(seed, modes)
        true = dense_norm(weights, grid)
        symbols = (
            sum(symbol(W, k, n) for W, k, n in zip(weights, index, grid, strict=True))
            for index in itertools.product(*(range(n) for n in grid))
        )
        largest = max(float(torch.linalg.matrix_norm(s, ord=2)) for s in symbols)
        assert true == pytest.approx(largest, rel=1e-12)
        assert true <= gain_bound(weights) * (1 + 1e-12)


@pytest.mark.parametrize("grid", [(7,), (5, 6), (3, 4, 3)])
def test_spectral_gain_bound_is_attained(grid):
    """Real positive matrices that agree on a direction add up over the axes."""
    weights = [torch.zeros(2, 2, 2, 2, dtype=torch.float64) for _ in grid]
    for a, W in enumerate(weights):
        W[0, 0, 0, 0], W[1, 0, 0, 0] = 0.3, 1.0 + a
    assert dense_norm(weights, grid) == pytest.approx(gain_bound(weights), rel=1e-12)
    assert gain_bound(weights) >= 1


@pytest.mark.parametrize(("n", "k"), [(6, 0), (6, 3), (7, 0)])
def test_self_conjugate_modes_see_only_the_real_part(n, k):
    """An imaginary W at the constant or Nyquist mode does nothing: the bound is loose there."""
    W = torch.zeros(k + 1, 2, 2, 2, dtype=torch.float64)
    W[k, :, :, 1] = torch.eye(2)
    assert dense_norm([W], (n,)) < 1e-14 < gain_bound([W])
    W[k, :, :, 0] = 0.5 * torch.eye(2)
    assert dense_norm([W], (n,)) == pytest.approx(0.5, rel=1e-12)


# Routing derivative (eq:complement-routing-derivative)


@pytest.mark.parametrize(("heads", "slices"), [(1, 2), (1, 3), (2, 3)])
def test_physical_derivative_is_local_plus_low_rank(heads, slices):
    """Routing term: zero beyond the reach of its convolution. Token term: rank M d_h per head, M C for all heads."""
    points, width, reach = 20, 4, 2
    torch.manual_seed(0)
    operator = PhysicalOperator(width, heads, slices, padding=("zeros",)).double()
    with torch.no_grad():
        operator.update.gamma.fill_(0.8)
        operator.routing.project.weight.mul_(4)
    Y = torch.randn(points, width, dtype=torch.float64)
    seen = {}
    record_routing = operator.routing.register_forward_hook(lambda _, __, P: seen.update(P=P[0].detach()))
    full = jacobian(lambda y: operator(y[None])[0], Y)  # (points, channels, points, channels)
    record_routing.remove()

    # With detached tokens only P(Y) varies, which gives the first term; the remainder is the second.
    detach = operator.update.register_forward_hook(lambda _, __, tokens: tokens.detach())
    routing_term = jacobian(lambda y: operator(y[None])[0], Y)
    detach.remove()
    token_term = full - routing_term

    distance = (torch.arange(points)[:, None] - torch.arange(points)).abs()
    strength = routing_term.abs().amax((1, 3))
    assert (strength[distance > reach] == 0).all()
    assert (strength[distance <= reach] > 0).all()

    flat = {name: J.reshape(points * width, -1) for name, J in (("full", full), ("token", token_term))}
    rank = {name: int(torch.linalg.matrix_rank(J, rtol=1e-10)) for name, J in flat.items()}
    assert rank["token"] == slices * width < rank["full"]
    assert token_term.abs().amax((1, 3))[distance > reach].max() > 1e-4

    # The same term as the factorisation 𝒪 P · D(𝒢∘Z): the rank is bounded by its inner size M C.
    record = operator.update.register_forward_hook(lambda _, __, out: seen.update(tokens=out[0]))

    def token_response(y: Tensor) -> Tensor:
        operator(y[None])
        return seen["tokens"]

    D_tokens = jacobian(token_response, Y)  # (H, M, D, points, channels)
    record.remove()
    output = operator.project.weight.detach().reshape(width, heads, width // heads)
    factored = torch.einsum("chd,hnm,hmdqe->ncqe", output, seen["P"], D_tokens)
    torch.testing.assert_close(token_term, factored, rtol=0, atol=1e-13)


# Minimisers and risks (thm:complement-ranking-reversal)


def fit(model: LinearDynamics, low_rank: bool, diagonal: bool, seed: int) -> Array:
    """Minimise ‖T̂ − T‖_F² over (diagonal or I) + low rank, from a random start."""
    n, r, B = model.size, model.rank if low_rank else 0, model.fourier
    base = np.zeros((n, n)) if diagonal else np.eye(n)

    def unpack(x: Array) -> tuple[Array, Array, Array]:
        a, X, Y = np.split(x, [n, n + n * r])
        return a * diagonal, X.reshape(n, r), Y.reshape(n, r)

    def estimate(x: Array) -> Array:
        a, X, Y = unpack(x)
        return base + B.T @ np.diag(a) @ B + X @ Y.T

    def loss(x: Array) -> tuple[float, Array]:
        _, X, Y = unpack(x)
        residual = estimate(x) - model.exact
        slope_a = np.diag(B @ residual @ B.T) * diagonal
        slope = np.concatenate([slope_a, (residual @ Y).ravel(), (residual.T @ X).ravel()])
        return float(np.sum(residual**2)), 2 * slope

    start = 0.5 * np.random.default_rng(seed).standard_normal(n + 2 * n * r)
    options = {"maxiter": 5000, "maxfun": 20000, "ftol": 0.0, "gtol": 1e-11}
    return estimate(minimize(loss, start, jac=True, method="L-BFGS-B", options=options).x)


MODELS = {f"seed{s}-n{n}-r{r}": random_reversal(s, n, r) for s, n, r in INSTANCES}
MODELS["printed"] = printed_example()
ALL = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


@ALL
def test_fitted_classes_reach_the_stated_minimisers(model):
    """eq:complement-optimal-cores, by gradient descent over the parameters of each class."""
    for seed in range(2):
        physical = fit(model, low_rank=True, diagonal=False, seed=seed)
        spectral = fit(model, low_rank=False, diagonal=True, seed=seed)
        np.testing.assert_allclose(physical, model.physical, atol=1e-7)
        np.testing.assert_allclose(spectral, model.spectral, atol=1e-8)


@ALL
def test_joint_class_contains_the_exact_map(model):
    """T = (I − h L₀) − h R is Fourier-diagonal plus rank r."""
    in_modes = model.fourier @ (model.exact + model.step * model.interaction) @ model.fourier.T
    assert np.abs(in_modes - np.diag(np.diag(in_modes))).max() < 1e-14
    assert np.linalg.matrix_rank(model.interaction) <= model.rank


@pytest.mark.parametrize("seed", range(3))
def test_joint_class_is_fitted_exactly_on_the_printed_instance(seed):
    """Descent over diagonal + rank one recovers T (larger instances have local minima)."""
    model = printed_example()
    np.testing.assert_allclose(fit(model, low_rank=True, diagonal=True, seed=seed), model.exact, atol=1e-5)


@ALL
def test_risks(model):
    """eq:complement-risks: closed forms, bounds and limits."""
    n, r, h, chi = model.size, model.rank, model.step, model.contraction
    lam = model.eigenvalues
    assert risk(model.physical, model.exact, 1) == pytest.approx(h**2 * np.sum(lam[r:] ** 2), rel=1e-11)
    assert risk(model.spectral, model.exact, 1) == pytest.approx(h**2 * model.coupling_energy(), rel=1e-11)
    assert np.linalg.norm(model.spectral, 2) <= chi * (1 + 1e-12)
    assert np.linalg.eigvalsh(model.exact).min() > -1e-12
    assert np.linalg.norm(model.exact, 2) == pytest.approx(chi, rel=1e-12)
    for k in (1, 2, 5, 20, 100):
        assert risk(model.physical, model.exact, k) == pytest.approx(model.physical_risk(k), rel=1e-10)
        assert model.physical_risk(k) >= (n - r) * (1 - chi**k) ** 2 * (1 - 1e-12)
        assert risk(model.spectral, model.exact, k) <= 4 * n * chi ** (2 * k)
    assert model.physical_risk(5000) == pytest.approx(n - r, rel=1e-12)
    assert risk(model.spectral, model.exact, 5000) < 1e-20


@pytest.mark.parametrize("k", [1, 3, 10])
def test_expected_error_is_a_frobenius_norm(k):
    """The 2^n sign vectors have mean zero and covariance I exactly, so their average is the expectation."""
    model = random_reversal(0, 5, 1)
    u = np.array(list(itertools.product([-1.0, 1.0], repeat=5)))
    power = np.linalg.matrix_power
    for estimate in (model.physical, model.spectral):
        difference = u @ (power(estimate, k) - power(model.exact, k)).T
        expected = np.mean(np.sum(difference**2, axis=1))
        assert expected == pytest.approx(risk(estimate, model.exact, k), rel=1e-12)


def test_physical_minimiser_is_not_unique_when_eigenvalues_tie():
    """λ_r = λ_{r+1}: any eigenvector of the tied pair is optimal; hence "one physical minimiser"."""
    model = LinearDynamics(np.eye(3), np.array([0.5, 0.5, 0.1]), np.zeros((3, 1)), np.eye(1), rank=1, step=1.0)
    for v in ([1.0, 0, 0], [0, 1.0, 0], [0.6, 0.8, 0]):
        tied = np.eye(3) - 0.5 * np.outer(v, v)
        assert risk(tied, model.exact, 1) == pytest.approx(model.physical_risk(1), rel=1e-13)


# Reversal and horizons


@ALL
def test_ranking_reverses_by_the_sufficient_horizon(model):
    """Physical wins at call one, spectral at all calls from the sufficient horizon on, which is not tight."""
    assert np.sum(model.eigenvalues[model.rank :] ** 2) < model.coupling_energy()
    spectral_wins = [risk(model.spectral, model.exact, k) < model.physical_risk(k) for k in range(1, 301)]
    horizon, first = model.sufficient_horizon(model.contraction), spectral_wins.index(True) + 1
    assert not spectral_wins[0]
    assert all(spectral_wins[horizon - 1 :])
    assert 1 < first < horizon
    omitted, chi = np.sqrt(model.size - model.rank), model.contraction
    assert chi**horizon < omitted / (2 * np.sqrt(model.size) + omitted) <= chi ** (horizon - 1)


PRINTED = [
    (1, "0.0370", "0.1200", "1.00e-04"),
    (5, "0.5853", "0.2701", "9.93e-06"),
    (10, "1.4030", "0.1611", "4.51e-07"),
]


@pytest.mark.parametrize("fourier", [None, real_fourier_basis(4)], ids=["modes", "points"])
class TestPrintedInstance:
    """The four-mode instance, given in Fourier coordinates and again in point values."""

    def test_constants(self, fourier):
        model = printed_example(fourier)
        joint = self.joint(model)
        mu, Lambda, eps = 0.08, 0.54, np.linalg.norm(joint - model.exact, 2)
        assert mu <= model.eigenvalues[-1] and model.eigenvalues[0] <= Lambda
        assert eps == pytest.approx(0.01, rel=1e-12)
        assert np.linalg.norm(joint, 2) <= 1 - model.step * mu + eps < 1
        commutator = model.spectral @ model.exact - model.exact @ model.spectral
        assert np.linalg.norm(commutator) > 0.01

    @pytest.mark.parametrize(("k", "physical", "spectral", "joint"), PRINTED)
    def test_table(self, fourier, k, physical, spectral, joint):
        model = printed_example(fourier)
        assert f"{risk(model.physical, model.exact, k):.4f}" == physical
        assert f"{risk(model.spectral, model.exact, k):.4f}" == spectral
        assert f"{risk(self.joint(model), model.exact, k):.2e}" == joint

    def test_first_crossing(self, fourier):
        model = printed_example(fourier)
        wins = [risk(model.spectral, model.exact, k) < model.physical_risk(k) for k in range(1, 200)]
        assert wins == [False] * 3 + [True] * 196
        four = [f"{risk(estimate, model.exact, 4):.4f}" for estimate in (model.physical, model.spectral)]
        assert four == ["0.4183", "0.2818"]
        # χ from the printed μ = 0.08 guarantees the reversal from call 15 on, the sharpest μ from 14 on.
        assert model.sufficient_horizon(1 - 0.08) == 15
        assert model.sufficient_horizon(model.contraction) == 14

    @staticmethod
    def joint(model: LinearDynamics) -> Array:
        """T̂_joint = I − L₀ − 0.39 U Uᵀ."""
        return model.exact + 0.01 * model.directions @ model.directions.T


@ALL
def test_scalar_decay_removes_the_persistent_identity(model):
    """With (1 − hμ)I as local path the omitted multiplier is χ < 1 and the physical error vanishes too."""
    r, h, chi, relaxed = model.rank, model.step, model.contraction, model.physical_with_decay
    V = model.eigenvectors
    np.testing.assert_allclose(relaxed @ V[:, r:], chi * V[:, r:], atol=1e-13)
    np.testing.assert_allclose(relaxed @ V[:, :r], model.exact @ V[:, :r], atol=1e-13)
    assert np.linalg.matrix_rank(relaxed - chi * np.eye(model.size), tol=1e-12) <= r
    for k in (1, 5, 30):
        closed = np.sum((chi**k - (1 - h * model.eigenvalues[r:]) ** k) ** 2)
        assert risk(relaxed, model.exact, k) == pytest.approx(closed, rel=1e-9, abs=1e-28)
    assert risk(relaxed, model.exact, 1) < model.physical_risk(1)
    assert risk(relaxed, model.exact, 3000) < 1e-20


# Forcing and the approximate joint map


def forced(T: Array, forcing: Array, calls: int) -> Array:
    """States u_0 = 0, u_{k+1} = T u_k + f_k."""
    states = [np.zeros(len(T))]
    for k in range(calls):
        states.append(T @ states[-1] + forcing[k])
    return np.stack(states)


@ALL
@pytest.mark.parametrize("sigma", [1.0, 0.2])
def test_omitted_damping_under_forcing(model, sigma):
    """eq:complement-forced-omission for every omitted direction."""
    calls, h, chi = 600, model.step, model.contraction
    k = np.arange(calls + 1)
    for i in range(model.rank, model.size):
        forcing = np.broadcast_to(sigma * model.eigenvectors[:, i], (calls, model.size))
        exact = forced(model.exact, forcing, calls)
        physical = np.linalg.norm(forced(model.physical, forcing, calls) - exact, axis=1)
        spectral = np.linalg.norm(forced(model.spectral, forcing, calls) - exact, axis=1)
        decay = h * model.eigenvalues[i]
        np.testing.assert_allclose(physical, sigma * (k - (1 - (1 - decay) ** k) / decay), rtol=1e-9, atol=1e-11)
        ceiling = 2 * sigma / (1 - chi)
        assert (spectral <= ceiling).all()
        assert physical[1] < 1e-12 and spectral[1] < 1e-12
        beyond = physical > ceiling
        assert beyond[-1] and (spectral < physical)[beyond].all()


@ALL
@pytest.mark.parametrize("share", [0.05, 0.9])
def test_approximate_joint_envelope(model, share):
    """eq:complement-approximate-joint with a common forcing, and the uniform envelope."""
    rng = np.random.default_rng(7)
    n, chi, calls = model.size, model.contraction, 300
    error = rng.standard_normal((n, n))
    eps = share * (1 - chi)
    estimate = model.exact + eps * error / np.linalg.norm(error, 2)
    assert np.linalg.norm(estimate, 2) <= chi + eps < 1
    forcing = 0.3 * rng.standard_normal((calls, n))
    forcing[0] += 5.0
    exact = forced(model.exact, forcing, calls)
    distance = np.linalg.norm(forced(estimate, forcing, calls) - exact, axis=1)
    R0 = np.linalg.norm(exact, axis=1).max()
    for k in range(calls + 1):
        assert distance[k] <= eps * R0 * geometric_sum(chi + eps, k) * (1 + 1e-12)
    assert distance.max() <= eps * R0 / (1 - chi - eps)


def test_approximate_joint_envelope_is_attained():
    """One direction, forced to its fixed point: T̂ = χ + ε reaches ε R₀ / (1 − χ − ε)."""
    chi, eps, R0 = 0.9, 0.04, 2.0
    u, u_hat = R0, R0
    for _ in range(600):
        u, u_hat = chi * u + (1 - chi) * R0, (chi + eps) * u_hat + (1 - chi) * R0
    assert u == pytest.approx(R0)
    assert u_hat - u == pytest.approx(eps * R0 / (1 - chi - eps), rel=1e-10)


EXCLUDED = {
    "orthogonal": {"fourier": 2 * np.eye(4)},
    "negative": {"damping": np.array([-0.1, 0.1, 0.1, 0.1])},
    "rank budget": {"rank": 4},
    "step": {"step": 3.0},
}


@pytest.mark.parametrize(("message", "change"), EXCLUDED.items(), ids=EXCLUDED)
def test_linear_dynamics_rejects_what_the_theorem_excludes(message, change):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(printed_example(), **change)
