"""The matrix model of thm:complement-ranking-reversal (eq:complement-dynamics).

    u_{k+1} = T u_k,   T = I − h L,   L = L₀ + R,   L₀ = Bᵀ diag(d) B,   R = U C Uᵀ

B orthogonal real Fourier matrix; d ≥ 0 damping of each Fourier mode; U C Uᵀ ⪰ 0 coupling of rank at most r;
h step; μ and Λ smallest and largest eigenvalue of L; χ = 1 − h μ. The model classes that fit T are
I + (rank r), Fourier-diagonal, and Fourier-diagonal + (rank r) (eq:complement-model-classes).
All arrays are float64.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "LinearDynamics",
    "geometric_sum",
    "printed_example",
    "random_reversal",
    "real_fourier_basis",
    "risk",
]

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LinearDynamics:
    """The exact one-call map and the one-step minimisers of the three classes."""

    fourier: Array  # B (n, n)
    damping: Array  # d (n,)
    directions: Array  # U (n, p)
    coupling: Array  # C (p, p)
    rank: int  # r, the budget of the classes
    step: float  # h

    def __post_init__(self) -> None:
        n = len(self.damping)
        if not np.allclose(self.fourier @ self.fourier.T, np.eye(n), atol=1e-12):
            raise ValueError("The Fourier matrix must be orthogonal.")
        if self.damping.min() < 0 or np.linalg.eigvalsh(self.coupling).min() < -1e-12:
            raise ValueError("Damping and coupling must not be negative.")
        if not (np.linalg.matrix_rank(self.interaction) <= self.rank < n):
            raise ValueError("The rank budget must cover the coupling and stay below the dimension.")
        if self.eigenvalues[-1] <= 0 or not 0 < self.step <= 1 / self.eigenvalues[0]:
            raise ValueError("L must be positive definite and the step at most 1/Λ.")

    @property
    def size(self) -> int:
        return len(self.damping)

    @cached_property
    def interaction(self) -> Array:
        """R = U C Uᵀ."""
        return self.directions @ self.coupling @ self.directions.T

    @cached_property
    def generator(self) -> Array:
        """L = L₀ + R."""
        return self.fourier.T @ np.diag(self.damping) @ self.fourier + self.interaction

    @cached_property
    def _eigensystem(self) -> tuple[Array, Array]:
        values, vectors = np.linalg.eigh(self.generator)
        return values[::-1], vectors[:, ::-1]

    @property
    def eigenvalues(self) -> Array:
        """λ₁ ≥ … ≥ λ_n of L."""
        return self._eigensystem[0]

    @property
    def eigenvectors(self) -> Array:
        """v_i as columns, in the order of the eigenvalues."""
        return self._eigensystem[1]

    @property
    def contraction(self) -> float:
        """χ = 1 − h μ with the sharpest μ = λ_n."""
        return float(1 - self.step * self.eigenvalues[-1])

    @cached_property
    def exact(self) -> Array:
        """T."""
        return np.eye(self.size) - self.step * self.generator

    @cached_property
    def physical(self) -> Array:
        """T_phy = I − h Σ_{i≤r} λ_i v_i v_iᵀ (eq:complement-optimal-cores)."""
        return np.eye(self.size) - self.step * self._strongest(self.eigenvalues)

    @cached_property
    def spectral(self) -> Array:
        """T_spec: the Fourier diagonal of T (eq:complement-optimal-cores)."""
        return self.fourier.T @ np.diag(np.diag(self.fourier @ self.exact @ self.fourier.T)) @ self.fourier

    @cached_property
    def physical_with_decay(self) -> Array:
        """(1 − h μ) I − h Σ_{i≤r} (λ_i − μ) v_i v_iᵀ: the physical class once its local path may decay."""
        mu = self.eigenvalues[-1]
        return self.contraction * np.eye(self.size) - self.step * self._strongest(self.eigenvalues - mu)

    def _strongest(self, weights: Array) -> Array:
        """Σ_{i≤r} w_i v_i v_iᵀ."""
        V = self.eigenvectors[:, : self.rank]
        return V @ np.diag(weights[: self.rank]) @ V.T

    def physical_risk(self, k: int) -> float:
        """E_phy(k)² in closed form (eq:complement-risks)."""
        return float(np.sum((1 - (1 - self.step * self.eigenvalues[self.rank :]) ** k) ** 2))

    def coupling_energy(self) -> float:
        """‖offdiag(B R Bᵀ)‖_F², the one-step omission of the spectral class over h² (eq:complement-risks)."""
        in_modes = self.fourier @ self.interaction @ self.fourier.T
        return float(np.sum((in_modes - np.diag(np.diag(in_modes))) ** 2))

    def sufficient_horizon(self, contraction: float) -> int:
        """Least k with χ^k < √(n−r) / (2√n + √(n−r)); `contraction` is χ for any admissible μ."""
        omitted = np.sqrt(self.size - self.rank)
        k = np.log(omitted / (2 * np.sqrt(self.size) + omitted)) / np.log(contraction)
        return int(np.floor(k)) + 1


def risk(estimate: Array, exact: Array, k: int) -> float:
    """E‖T̂^k u₀ − T^k u₀‖² = ‖T̂^k − T^k‖_F² for a zero-mean u₀ with identity covariance."""
    power = np.linalg.matrix_power
    return float(np.sum((power(estimate, k) - power(exact, k)) ** 2))


def geometric_sum(a: float, k: int) -> float:
    """G_k(a) = Σ_{j<k} a^j (eq:complement-approximate-joint)."""
    return float(np.sum(a ** np.arange(k)))


def real_fourier_basis(n: int) -> Array:
    """Rows: the constant, cosine and sine of each frequency, and for even n the Nyquist mode."""
    j = np.arange(n)
    rows = [np.full(n, 1 / np.sqrt(n))]
    for k in range(1, (n - 1) // 2 + 1):
        rows += [
            np.sqrt(2 / n) * np.cos(2 * np.pi * k * j / n),
            np.sqrt(2 / n) * np.sin(2 * np.pi * k * j / n),
        ]
    if n % 2 == 0:
        rows.append((-1.0) ** j / np.sqrt(n))
    return np.stack(rows)


def printed_example(fourier: Array | None = None) -> LinearDynamics:
    """The four-mode instance printed in the paper; its arrays are given in Fourier coordinates (B = I)."""
    B = np.eye(4) if fourier is None else fourier
    return LinearDynamics(
        fourier=B,
        damping=np.array([0.08, 0.10, 0.12, 0.14]),
        directions=B.T @ np.full((4, 1), 0.5),
        coupling=np.array([[0.4]]),
        rank=1,
        step=1.0,
    )


def random_reversal(seed: int, n: int, rank: int) -> LinearDynamics:
    """Random instance with weak damping and a few strong couplings over all modes, for which the ranking reverses."""
    rng = np.random.default_rng(seed)
    B = real_fourier_basis(n)
    # Random signs of equal size keep every direction spread over all Fourier modes.
    modes = np.linalg.qr(rng.choice([-1.0, 1.0], size=(n, rank)) + 0.1 * rng.standard_normal((n, rank)))[0]
    damping = rng.uniform(0.02, 0.1, n)
    coupling = np.diag(rng.uniform(0.5, 0.8, rank))
    return LinearDynamics(B, damping, B.T @ modes, coupling, rank, step=float(rng.uniform(0.6, 1.0)))
