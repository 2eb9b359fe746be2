"""Spread of slice states, and bounds on how an attention step changes it.

    ΔZ = A Z W_v,    Z⁺ = Z + γ ΔZ                        (eq:appendix-identity-interaction)

Z (..., M, D) slice states, rows z_i; A (..., M, M) slice attention, rows a_i that sum to one; W_v (..., D, D)
value matrix acting from the right (the transpose of an `nn.Linear` weight); Π = I − 11ᵀ/M removes the mean
over slices. Leading axes (batch, heads) are kept; every function works in the precision of its input
(float32 or float64).
"""

import torch
from torch import Tensor

__all__ = ["centre", "centred_gain", "centred_variation", "diameter", "dobrushin", "pairwise_dobrushin"]


def centre(Z: Tensor) -> Tensor:
    """Π Z (..., M, D): the states without their mean over slices."""
    return Z - Z.mean(dim=-2, keepdim=True)


def diameter(Z: Tensor) -> Tensor:
    """diam(Z) = max_ij ‖z_i − z_j‖₂, shape (...) (prop:srpa-mixing)."""
    # The matrix-product form of the distance cancels catastrophically for nearly collapsed slices.
    return torch.cdist(Z, Z, compute_mode="donot_use_mm_for_euclid_dist").amax(dim=(-2, -1))


def centred_variation(Z: Tensor) -> Tensor:
    """V(Z) = ‖Π Z‖_F, shape (...): over all pairs (eq:centered-pairwise-energy)."""
    return torch.linalg.matrix_norm(centre(Z))


def pairwise_dobrushin(A: Tensor) -> Tensor:
    """η_ij = ½ ‖a_i − a_j‖₁, shape (..., M, M) (eq:srpa-pairwise-control)."""
    return 0.5 * torch.cdist(_square(A), A, p=1.0)


def dobrushin(A: Tensor) -> Tensor:
    """η(A) = max_ij η_ij, shape (...): 1 − the smallest overlap of two rows (eq:appendix-dobrushin-overlap)."""
    return pairwise_dobrushin(A).amax(dim=(-2, -1))


def centred_gain(A: Tensor, W: Tensor) -> Tensor:
    """κ = ‖Π A Π‖₂ ‖W_v‖₂, shape (...): the largest factor by which ΔZ can scale V (prop:srpa-centered).

    Row stochasticity alone does not keep κ below one.
    """
    centred = centre(centre(_square(A)).mT).mT
    return torch.linalg.matrix_norm(centred, ord=2) * torch.linalg.matrix_norm(W, ord=2)


def _square(A: Tensor) -> Tensor:
    if A.ndim < 2 or A.shape[-2] != A.shape[-1]:
        raise ValueError(
            f"Expected slice attention of shape (..., slices, slices) after the softmax, got {tuple(A.shape)}."
        )
    return A
