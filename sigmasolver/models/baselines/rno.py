"""RNO, the Radon neural operator (Lu et al., 2025): a Transolver, then blocks that reweight a sinogram by angle.

    H --> Transolver block x depth --> Radon block x radon_blocks --> LN --> Linear

    Radon block     y = x + FBP(P S),    S = R x,    P = Conv(GELU(Conv(S)))

    R x (theta, s)  = integral of x over the line  p . (cos theta, sin theta) = s
    FBP S' (p)      = pi / A  sum over theta of (q * S'(theta, .)) (p . (cos theta, sin theta)),   q^(k) = |k|

for A angles theta = pi a / A. Every channel of every plane has its own sinogram; both convolutions are circular along
theta and shared by channels and detector positions: with so few angles each is one product with a circulant matrix
(`over_angles`). R and FBP have no parameters: they are constant matrices per plane size, cached (`radon`,
`back_projection`). Matrix products have exact derivatives of any order, are deterministic and, measured on a CPU with
85^2 points, take two fifths of the time of rotating images; the cost is two matrices of A sqrt(2) n^3 entries, 0.4 GB
each in float32 at 128^2.

R is a rotation by bilinear sampling, summed along lines: samples are one grid spacing apart and zero outside the plane,
so a plane that is not square is zero-padded. FBP filters with the band-limited ramp of Ramachandran and
Lakshminarayanan, 1/4 and -1/(pi m)^2 at odd m, and interpolates linearly between detectors. Lengths are in units of the
longer side of the plane, so that the magnitude of S does not depend on the grid.

From the paper: the equations, S' = P S and the skip connection, A = 32, four Radon blocks for Darcy and two for
Navier-Stokes, a Transolver of MLP ratio 1 and 64 slices, and sizes that leave fewer than 1,400 parameters for all Radon
blocks together. Its code was not available.
Inferred: eight hidden channels, kernels of three angles, GELU, no final activation of P; Radon blocks after those of
the Transolver; the second convolution is initialised to zero, so that a new model equals the Transolver bit for bit.
S(theta + pi, s) is S(theta, -s), so the last angle and the first are neighbours up to a reflection, which the paper's
circular convolution ignores. On volumes, which the paper does not treat, the planes of each pair of axes in turn, with
separate weights.

Letters: B batch, A angles, D detector positions, N points per plane, C channels.
"""

from __future__ import annotations

import math
from itertools import combinations

import torch
from torch import nn

from sigmasolver.models.baselines.attention_solver import attention_solver
from sigmasolver.models.baselines.physics_attention import PhysicsAttention
from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import full_precision
from sigmasolver.models.solver import Solver
from sigmasolver.ops.constants import grid_constant

__all__ = ["ANGLES", "RadonBlock", "back_projection", "detectors", "over_angles", "radon", "rno"]

ANGLES = 32


def detectors(plane: tuple[int, int]) -> int:
    """The number of detectors that covers the diagonal, of the parity of the longer side, so that rows hit points."""
    count = math.ceil(math.hypot(*plane))
    return count + (count - max(plane)) % 2


def _hat(distance: torch.Tensor) -> torch.Tensor:
    """The linear interpolation weight of a neighbour at this distance."""
    return (1 - distance.abs()).clamp(min=0)


def _views(plane: tuple[int, int], angles: int, device: torch.device) -> tuple[torch.Tensor, ...]:
    """cos and sin (A, 1), and the positions of the points across and along the lines (A, N), in float64.

    Positions are in grid spacings from the first detector; the first sample of a line is as far from the centre.
    """
    first = (detectors(plane) - 1) / 2
    sides = (torch.arange(n, dtype=torch.float64, device=device) - (n - 1) / 2 for n in plane)
    u, v = (axis.flatten() for axis in torch.meshgrid(*sides, indexing="ij"))
    theta = torch.arange(angles, dtype=torch.float64, device=device)[:, None] * (math.pi / angles)
    cos, sin = theta.cos(), theta.sin()
    return cos, sin, u * cos + v * sin + first, v * cos - u * sin + first


@grid_constant
def radon(plane: tuple[int, int], angles: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """R (A D, N): from the values on a plane to line integrals."""
    cos, sin, across, along = _views(plane, angles, device)
    count, spacing, reach = detectors(plane), 1 / (max(plane) - 1), math.sqrt(2)
    # A sample within sqrt(2) of a point can contribute: three lines, three samples each. Near a corner some lines lie
    # beyond the last detector; they are computed and cropped.
    margin = 2
    R = torch.zeros(angles, count + 2 * margin, across.shape[1], dtype=dtype, device=device)
    line, sample = (across - reach).ceil(), (along - reach).ceil()
    for i in range(3):
        ds, total = line + i - across, torch.zeros_like(across)
        for j in range(3):
            dt = sample + j - along
            total = total + _hat(ds * cos - dt * sin) * _hat(ds * sin + dt * cos)
        indices = (line + i).long() + margin
        R = R.scatter(1, indices[:, None], (spacing * total).to(dtype)[:, None])
    return R[:, margin:-margin].flatten(0, 1)


@grid_constant
def back_projection(plane: tuple[int, int], angles: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """FBP (N, A D): from line integrals back to the plane."""
    across, count = _views(plane, angles, device)[2], detectors(plane)
    position = torch.arange(count, dtype=torch.float64, device=device)
    offset = position[:, None] - position
    odd = torch.where(offset % 2 == 1, -1 / (math.pi * offset).square(), 0.0)
    ramp = torch.where(offset == 0, 0.25, odd) * (math.pi / angles * (max(plane) - 1))
    before, ramp = across.floor(), ramp.to(dtype)  # only small tensors are float64
    # Contiguous, so that a compiled lerp has the strides that tracing predicted.
    line, fraction = before.long().mT.contiguous(), (across - before).mT.contiguous()[..., None].to(dtype)
    return torch.lerp(ramp[line], ramp[line + 1], fraction).flatten(1)


@grid_constant
def turns(angles: int, kernel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(kernel, A, A): the k-th matrix is a circular shift by k - kernel // 2 angles."""
    identity = torch.eye(angles, dtype=dtype, device=device)
    return torch.stack([identity.roll(k - kernel // 2, dims=1) for k in range(kernel)])


def over_angles(layer: nn.Conv2d, S: torch.Tensor) -> torch.Tensor:
    """(inputs, A, any) -> (outputs, A, any): the circular convolution along the angles."""
    outputs, inputs, kernel, _ = layer.weight.shape
    angles = S.shape[1]
    shifts = turns(angles, kernel, layer.weight.dtype, layer.weight.device)
    circulant = torch.einsum("oik,kab->oaib", layer.weight[..., 0], shifts).reshape(outputs * angles, inputs * angles)
    assert layer.bias is not None
    out: torch.Tensor = (circulant @ S.flatten(0, 1)).unflatten(0, (outputs, angles)) + layer.bias[:, None, None]
    return out


class RadonBlock(nn.Module):
    """`(B, *grid, C)` -> the same shape, for two or three axes."""

    HIDDEN, KERNEL = 8, 3

    def __init__(self, axes: int, angles: int = ANGLES) -> None:
        super().__init__()
        self.angles, self.pairs = angles, tuple(combinations(range(axes), 2))
        self.weights = nn.ModuleList(self._convolutions() for _ in self.pairs)

    def _convolutions(self) -> nn.Sequential:
        """P as a function of S, from neighbouring angles: (B, 1, A, any) -> the same shape."""

        def along_theta(inputs: int, outputs: int) -> nn.Conv2d:
            padding = self.KERNEL // 2
            return nn.Conv2d(inputs, outputs, (self.KERNEL, 1), padding=(padding, 0), padding_mode="circular")

        first, last = along_theta(1, self.HIDDEN), along_theta(self.HIDDEN, 1)
        for parameter in last.parameters():
            nn.init.zeros_(parameter)
        return nn.Sequential(first, nn.GELU(), last)

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        for pair, weights in zip(self.pairs, self.weights, strict=True):
            H = H + self._reweighted(H, pair, weights)
        return H

    def _reweighted(self, H: torch.Tensor, pair: tuple[int, int], weights: nn.Module) -> torch.Tensor:
        """FBP(P S) on the planes of this pair of axes; other axes are batched."""
        planes = H.movedim([1 + axis for axis in pair], [-3, -2])
        plane = (planes.shape[-3], planes.shape[-2])
        wide = torch.promote_types(H.dtype, torch.float32)
        # The ramp takes differences of neighbouring lines, which cancel in bf16.
        with full_precision(H):
            # Points first, so that R and FBP are plain matrix products.
            points_first = planes.movedim([-3, -2], [0, 1])
            x = points_first.to(wide).reshape(math.prod(plane), math.prod(points_first.shape[2:]))
            S = radon(plane, self.angles, wide, H.device) @ x
            y = back_projection(plane, self.angles, wide, H.device) @ (self._weights(S, weights) * S)
        return y.to(H.dtype).reshape(points_first.shape).movedim([0, 1], [1 + axis for axis in pair])

    def _weights(self, S: torch.Tensor, weights: nn.Module) -> torch.Tensor:
        """P of S, (A D, any) each."""
        first, activation, last = weights.children()
        assert isinstance(first, nn.Conv2d) and isinstance(last, nn.Conv2d)
        hidden = activation(over_angles(first, S.to(first.weight.dtype).unflatten(0, (1, self.angles, -1)).flatten(2)))
        return over_angles(last, hidden).to(S.dtype).reshape(S.shape)


def rno(config: SolverConfig, radon_blocks: int = 4, angles: int = ANGLES) -> Solver:
    """RNO: a Transolver of `depth` blocks, then `radon_blocks` Radon blocks; `modes` is ignored."""
    if config.axes == 1:
        raise ValueError(f"Grid {config.grid} has one axis, but RNO needs at least two; choose another model.")
    if radon_blocks < 1 or angles < RadonBlock.KERNEL:
        raise ValueError(
            f"RNO got {radon_blocks} Radon blocks of {angles} angles; expected at least 1 block and "
            f"{RadonBlock.KERNEL} angles."
        )
    model = attention_solver(PhysicsAttention, config)
    model.blocks.extend(RadonBlock(config.axes, angles) for _ in range(radon_blocks))
    return model
