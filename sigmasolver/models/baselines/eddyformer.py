"""EddyFormer (Du et al., NeurIPS 2025): spectral elements at two resolutions, attention between elements.

    grid --- interpolate --> fine nodes S --- resample --> coarse nodes L --- layer x depth ---> u on the nodes --> grid

Every axis is cut into M equal elements, each with m Chebyshev-Gauss-Lobatto nodes x_j = (1 - cos(pi j / (m - 1))) / 2,
on which a field is a polynomial of degree m - 1; both neighbours have a node on their shared face. S has m nodes per
element and axis for the small eddies, L fewer for the large ones. FFN = Linear, GELU (tanh), Linear, inner width 4 C:

    S_0 = W [fields, x within the element] + b,  S_0 <- S_0 + FFN(sum over axes a of conv_a(S_0)),  L_0 = resampled S_0
    every layer:    L <- L + attention(L)
                    L <- L + FFN(sum_a conv_a(L))
                    S <- S + eps * resampled L,  S <- S + FFN(sum_a conv_a(S))
    u = resampled FFN(L) + eps' * FFN(S)

conv_a at node x_i of an element is the integral of g(x_i - y) f(y) over a window of two elements around it, element by
element with the interpolatory weights of the nodes; g is a matrix of real Fourier series of period two elements with
2 (m - 1) coefficients. It wraps around, whatever the boundaries of the axis. Quadrature weights and Fourier series are
constants that turn the coefficients into one matrix, so that a convolution is one product with each element and its two
neighbours. The attention computes queries, keys and values by one convolution per axis; queries and keys are normalised
over the nodes of an element and the channels of a head, one is added to their first half, and they are rotated by the
angles k x_a, k = 0, 1, ..., of the position in a box of 2 pi; each node then attends to the same node of all elements.

From the paper and the released code: the layer, the elements, the kernels, the initialisation (convolutions 1e-7,
eps 1e-7, LeCun-normal maps). The two released settings are models of their own; the grid sets the number of elements:

    model          m   nodes of L  node intervals per point  attention reaches
    eddyformer      9  5           1                         all elements             (our choice)
    eddyformer-2d  25  5           1.5: 16 elements for 256  8 elements on each axis
    eddyformer-3d  13  6           1: 8 elements for 96      all elements

As in both released settings, all heads together are four times as wide as the residual stream and a kernel has m - 1
modes per element. For turbulence the code predicts a correction to a coarse numerical solution; here, as in its runs on
public data sets, the network predicts the fields. Inferred: periodic axes have points i / n, without the code's
duplicate of the first; an odd number of points has no Nyquist frequency. Boundary conditions are not part of a task's
sizes: axes are periodic (trigonometric interpolation) unless `options.padding` is "zeros", which here means linear
interpolation between points that include both ends.

Letters: B batch, H heads, C width, D head width, d axes, E elements, P nodes per element, m nodes per element and axis.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import Linear, TimeEmbedding, full_precision
from sigmasolver.models.solver import GridModel
from sigmasolver.ops.attention import attention
from sigmasolver.ops.constants import grid_constant
from sigmasolver.ops.elements import SHIFTS, heads_of_elements, nodes_of_elements, windows

__all__ = ["EddyFormer", "ElementAttention", "ElementConvolution", "Elements", "eddyformer"]

WINDOW = 2
"""Number of elements that a kernel spans; also the minimum per axis."""


@dataclass(frozen=True)
class Elements:
    """Discretisation of a field by spectral elements."""

    nodes: int = 9
    coarse: int = 5
    """Nodes per element and axis of the fine and of the coarse field."""
    density: float = 1.0
    """Intervals between fine nodes per grid point, on the grid of the config."""
    reach: int | None = None
    """Attention is limited to elements closer than this on every axis; None: all."""

    def mesh(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Number of elements per axis."""
        return tuple(max(WINDOW, round(self.density * points / (self.nodes - 1))) for points in grid)


# --- constants of the elements, computed in float64 and cast at the end


def _arange(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float64, device=device)


def _where(chosen: torch.Tensor, value: float, other: float) -> torch.Tensor:
    """torch.where of two Python scalars in float64; torch would return its default dtype."""
    return torch.full(chosen.shape, other, dtype=torch.float64, device=chosen.device).masked_fill(chosen, value)


def _nodes(m: int, device: torch.device) -> torch.Tensor:
    return (1 - torch.cos(math.pi * _arange(m, device) / (m - 1))) / 2


def _chebyshev(x: torch.Tensor, count: int) -> torch.Tensor:
    """(..., count): the first Chebyshev polynomials on [0, 1]."""
    return torch.cos(_arange(count, x.device) * torch.arccos(2 * x - 1)[..., None])


def _coefficients(m: int, device: torch.device) -> torch.Tensor:
    """(m, m): Chebyshev coefficients of the polynomial that interpolates values at the nodes."""
    k = _arange(m, device)
    half = _where((k == 0) | (k == m - 1), 0.5, 1.0)
    return 2 / (m - 1) * half[:, None] * half * torch.cos(math.pi / (m - 1) * k[:, None] * (m - 1 - k))


def _integrals(x: torch.Tensor, count: int) -> torch.Tensor:
    """(..., count): antiderivatives of the first Chebyshev polynomials on [0, 1]."""
    k, angle = _arange(count, x.device), torch.arccos(2 * x - 1)[..., None]
    below = torch.where(k == 1, 0.0, torch.cos((k - 1) * angle) / torch.where(k == 1, 1.0, k - 1))
    return (torch.cos((k + 1) * angle) / (k + 1) - below) / 4


@grid_constant
def element_points(mesh: int, m: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(mesh m,): all nodes of an axis, in [0, 1]."""
    return ((_arange(mesh, device)[:, None] + _nodes(m, device)) / mesh).flatten().to(dtype)


@grid_constant
def local_points(mesh: tuple[int, ...], m: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(*nodes, axes): the position of every node within its element, in [0, 1]."""
    axes = [_nodes(m, device).repeat(elements) for elements in mesh]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).to(dtype)


@grid_constant
def to_nodes(points: int, mesh: int, m: int, periodic: bool, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(mesh m, points): interpolation from a grid axis to the nodes, trigonometric or linear."""
    x, i = element_points(mesh, m, torch.float64, device), _arange(points, device)
    if not periodic:
        return (1 - (x[:, None] * (points - 1) - i).abs()).clamp(min=0).to(dtype)
    k = _arange(points // 2 + 1, device)
    weight = _where((k == 0) | (2 * k == points), 1.0, 2.0) / points
    target, source = 2 * math.pi * x[:, None] * k, 2 * math.pi / points * i[:, None] * k
    return ((weight * target.cos()) @ source.cos().T + (weight * target.sin()) @ source.sin().T).to(dtype)


@grid_constant
def to_grid(points: int, mesh: int, m: int, periodic: bool, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(points, mesh m): evaluation of the element polynomials on a grid axis."""
    last = points if periodic else points - 1
    scaled = torch.arange(points, device=device) * mesh  # integers: no round-off at element boundaries
    element = (scaled // last).clamp(max=mesh - 1)
    values = _chebyshev((scaled - element * last).double() / last, m) @ _coefficients(m, device)
    membership = F.one_hot(element, mesh).double()
    return (membership[:, :, None] * values[:, None]).flatten(1).to(dtype)


@grid_constant
def resampling(m: int, target: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(target, m): from `m` nodes of an element to `target` nodes; preserves the values at both ends.

    After subtracting the line between the ends, the remainder is x (1 - x) q(x); q is computed at the Gauss points of
    the smaller number of nodes and has two coefficients fewer.
    """
    n, identity = min(m, target), torch.eye(m, dtype=torch.float64, device=device)

    def line(x: torch.Tensor) -> torch.Tensor:
        return (1 - x)[:, None] * identity[0] + x[:, None] * identity[-1]

    remainder = identity - line(_nodes(m, device))
    gauss = (1 - torch.cos(math.pi * (_arange(n, device) + 0.5) / n)) / 2
    T = _chebyshev(gauss, n)
    quotient = T @ (_coefficients(m, device) @ remainder)[:n] / (gauss * (1 - gauss))[:, None]
    twice = _where(_arange(n, device) == 0, 1.0, 2.0)[:, None]
    q = (twice / n * T.T @ quotient)[: n - 2]
    x = _nodes(target, device)
    return (line(x) + (x * (1 - x))[:, None] * (_chebyshev(x, n - 2) @ q)).to(dtype)


@grid_constant
def convolution_basis(m: int, modes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(shifts, m, m, modes): the weight of coefficient n from node j of the shifted element to node i of this one.

    The first modes // 2 + 1 coefficients are real parts by increasing frequency, the others imaginary parts by
    decreasing frequency; all frequencies but the first and the last have weight two.
    """
    x, shift = _nodes(m, device), torch.tensor(SHIFTS, dtype=torch.float64, device=device)[:, None]
    low, high = ((x + side * WINDOW / 2 - shift).clamp(0, 1) for side in (-1, 1))
    weights = (_integrals(high, m) - _integrals(low, m)) @ _coefficients(m, device)
    distance = x[:, None] - x - shift[..., None]
    reals = modes // 2 + 1
    k = torch.cat((_arange(reals, device), _arange(modes - reals, device).flip(0) + 1))
    twice = _where((k == 0) | (k == reals - 1), 1.0, 2.0)
    angle = 2 * math.pi / WINDOW * distance[..., None] * k
    series = twice * torch.cat((angle[..., :reals].cos(), -angle[..., reals:].sin()), dim=-1)
    return (weights[..., None] * series).to(dtype)


@grid_constant
def turns(
    mesh: tuple[int, ...], m: int, axis: int, count: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """(2, E, P, count): cos(k x) and sin(k x) for the coordinate x of one axis, of period 2 pi."""
    shape = [1] * (2 * len(mesh))
    shape[axis], shape[len(mesh) + axis] = mesh[axis], m
    x = element_points(mesh[axis], m, torch.float64, device).reshape(shape).expand(*mesh, *(m,) * len(mesh))
    angles = 2 * math.pi * x.reshape(math.prod(mesh), -1, 1) * _arange(count, device)
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


@grid_constant
def neighbours(mesh: tuple[int, ...], reach: int, device: torch.device) -> torch.Tensor:
    """(E, E): mask of element pairs closer than `reach` on every axis of the periodic mesh."""
    positions = torch.stack(torch.meshgrid(*(torch.arange(n, device=device) for n in mesh), indexing="ij"), dim=-1)
    distance = (positions.flatten(0, -2)[:, None] - positions.flatten(0, -2)).abs()
    wrapped = torch.tensor(mesh, device=device) - distance
    return (torch.minimum(distance, wrapped) < reach).all(-1)


class Constants(NamedTuple):
    """Constant tensors shared by all layers; built once per forward, so that a traced graph has one copy."""

    down: torch.Tensor
    up: torch.Tensor
    """Resampling from the fine to the coarse nodes, and back."""
    fine: torch.Tensor
    coarse: torch.Tensor
    """Convolution bases."""
    turns: tuple[torch.Tensor, ...]
    """Rotary tables, one per axis."""
    mask: torch.Tensor | None


def constants(config: SolverConfig, elements: Elements, dtype: torch.dtype, device: torch.device) -> Constants:
    mesh, m, coarse = elements.mesh(config.grid), elements.nodes, elements.coarse
    pairs, reach = head_width(config) // 2, elements.reach
    return Constants(
        resampling(m, coarse, dtype, device),
        resampling(coarse, m, dtype, device),
        convolution_basis(m, WINDOW * (m - 1), dtype, device),
        convolution_basis(coarse, WINDOW * (coarse - 1), dtype, device),
        tuple(turns(mesh, coarse, axis, pairs, dtype, device) for axis in range(config.axes)),
        None if reach is None else neighbours(mesh, reach, device),
    )


# --- the model


def head_width(config: SolverConfig) -> int:
    return 4 * config.width // config.heads


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of geometry: float32 at least, also under autocast."""
    return torch.promote_types(dtype, torch.float32)


def _along(matrix: torch.Tensor, x: torch.Tensor, axis: int) -> torch.Tensor:
    """Apply the matrix along one axis of x, in the dtype of the matrix; the result has the dtype of x."""
    with full_precision(x):
        return (x.to(matrix.dtype).movedim(axis, -1) @ matrix.T).movedim(-1, axis).to(x.dtype)


def resample(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Apply a matrix of `resampling` along each axis of every element of (B, *nodes, C)."""
    for axis in range(1, x.ndim - 1):
        x = _along(matrix, x.unflatten(axis, (-1, matrix.shape[1])), axis + 1).flatten(axis, axis + 1)
    return x


def dense(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer with Flax's initialisation: LeCun normal, truncated at two standard deviations; zero bias."""
    layer, std = Linear(inputs, outputs), inputs**-0.5 / 0.87962566103423978
    nn.init.trunc_normal_(layer.weight, std=std, a=-2 * std, b=2 * std)
    nn.init.zeros_(layer.bias)
    return layer


def feed_forward(width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(dense(width, 4 * width), nn.GELU(approximate="tanh"), dense(4 * width, outputs))


class ElementConvolution(nn.Module):
    """`(B, *nodes, inputs)` -> `(B, *nodes, outputs)`: the sum of the convolutions along all axes.

    `basis` is `convolution_basis` for the same number of nodes per element.
    """

    START = 1e-7

    def __init__(self, axes: int, m: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.m, modes = m, WINDOW * (m - 1)
        self.weights = nn.ParameterList(self.START * torch.randn(modes, inputs, outputs) for _ in range(axes))

    def along(self, x: torch.Tensor, axis: int, basis: torch.Tensor) -> torch.Tensor:
        """The convolution along one axis; `axis` starts at 0."""
        weight = self.weights[axis]
        outputs = weight.shape[-1]
        with full_precision(x):
            matrix = torch.einsum("sijn,nco->sjcio", basis, weight.to(basis.dtype))
            matrix = matrix.reshape(-1, self.m * outputs).to(weight.dtype)
        out: torch.Tensor = (windows(x, axis, self.m) @ matrix).unflatten(-1, (self.m, outputs))
        return out.flatten(-3, -2).movedim(-2, axis + 1)

    def forward(self, x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
        first, *remaining = reversed(range(len(self.weights)))  # the last axis first: the sum is then contiguous
        total = self.along(x, first, basis)
        for axis in remaining:
            total = total + self.along(x, axis, basis)
        return total


class ElementAttention(nn.Module):
    """`(B, *nodes, C)` -> the same shape: every node attends to the same node of all elements."""

    EPS = 1e-6

    def __init__(self, config: SolverConfig, elements: Elements) -> None:
        super().__init__()
        axes, m, width = config.axes, elements.coarse, config.width
        self.mesh, self.m = elements.mesh(config.grid), m
        self.heads, self.head_width = config.heads, head_width(config)
        inner = self.heads * self.head_width
        self.convolution = ElementConvolution(axes, m, width, 3 * inner)
        self.bias = nn.Parameter(torch.zeros(axes, 2, self.heads, self.head_width))
        self.scale = nn.Parameter(torch.ones(axes, 2, *(m,) * axes, self.head_width))
        self.project = dense(axes * inner, width)

    def forward(self, L: torch.Tensor, constants: Constants) -> torch.Tensor:
        fields = [self.convolution.along(L, axis, constants.coarse) for axis in range(len(self.mesh))]
        Q, K, V = heads_of_elements(fields, self.bias, self.scale, constants.turns, self.mesh, self.m, self.EPS)
        out_BPHED = attention(Q, K, V, mask_NN=constants.mask)
        out: torch.Tensor = self.project(nodes_of_elements(out_BPHED, self.mesh, self.m))
        return out


State = tuple[torch.Tensor, torch.Tensor, Constants]
"""Coarse and fine field, (B, *nodes, C) each, and the constants."""


class Layer(nn.Module):
    """Coarse and fine field -> the same shapes."""

    START = 1e-7

    def __init__(self, config: SolverConfig, elements: Elements) -> None:
        super().__init__()
        width = config.width
        self.attention = ElementAttention(config, elements)
        self.coarse_convolution = ElementConvolution(config.axes, elements.coarse, width, width)
        self.coarse_map = feed_forward(width, width)
        self.eps = nn.Parameter(torch.full((width,), self.START))
        self.convolution = ElementConvolution(config.axes, elements.nodes, width, width)
        self.map = feed_forward(width, width)

    def forward(self, state: State) -> State:
        L, S, constants = state
        L = L + self.attention(L, constants)
        L = L + self.coarse_map(self.coarse_convolution(L, constants.coarse))
        S = S + resample(L, constants.up) * self.eps
        return L, S + self.map(self.convolution(S, constants.fine)), constants


class EddyFormer(GridModel):
    """`(B, *grid, in_channels)` -> `(B, *grid, out_channels)` for one, two or three axes and any grid.

    The mesh is fixed by `config.grid`; inputs on other grids of the same box are interpolated to it.
    """

    START = 1e-7

    def __init__(self, config: SolverConfig, elements: Elements) -> None:
        super().__init__(config)
        self.elements = elements
        self.mesh = elements.mesh(config.grid)
        ends = config.padding if config.options.padding else ("circular",) * config.axes
        self.periodic = tuple(end == "circular" for end in ends)
        width = config.width
        self.lift = dense(config.in_channels + config.axes, width)
        self.time = TimeEmbedding(width, config.scalars) if config.scalars else None
        self.convolution = ElementConvolution(config.axes, elements.nodes, width, width)
        self.map = feed_forward(width, width)
        self.blocks = nn.ModuleList(Layer(config, elements) for _ in range(config.depth))
        self.coarse_answer = feed_forward(width, config.out_channels)
        self.answer = feed_forward(width, config.out_channels)
        self.eps = nn.Parameter(torch.full((config.out_channels,), self.START))

    def forward(self, x: torch.Tensor, time: torch.Tensor | None = None) -> torch.Tensor:
        """`time`, for models with a time embedding: (B,), or (B, n) with conditions after the time."""
        self.check(x, time)
        dtype = self.dtype
        common = constants(self.config, self.elements, _wide(dtype), x.device)
        S = self.with_time(self._lifted(x), time)
        S = S + self.map(self.convolution(S, common.fine))
        L = resample(S, common.down)
        for block in self.blocks:
            L, S, _ = block((L, S, common))
        u: torch.Tensor = resample(self.coarse_answer(L).to(dtype), common.up) + self.answer(S) * self.eps
        for axis, (points, mesh, periodic) in enumerate(self._axes(x), start=1):
            u = _along(to_grid(points, mesh, self.elements.nodes, periodic, _wide(dtype), u.device), u, axis)
        return u

    def _lifted(self, x: torch.Tensor) -> torch.Tensor:
        """The lifted input on the nodes, (B, *nodes, C), in the dtype of the weights and of the residual stream."""
        m, values = self.elements.nodes, x
        for axis, (points, mesh, periodic) in enumerate(self._axes(x), start=1):
            values = _along(to_nodes(points, mesh, m, periodic, _wide(x.dtype), x.device), values, axis)
        local = local_points(self.mesh, m, values.dtype, x.device)
        S: torch.Tensor = self.lift(torch.cat((values, local.expand(x.shape[0], *local.shape)), dim=-1))
        return S.to(self.dtype)

    def _axes(self, x: torch.Tensor) -> zip[tuple[int, int, bool]]:
        return zip(x.shape[1:-1], self.mesh, self.periodic, strict=True)


def eddyformer(config: SolverConfig, elements: Elements | None = None) -> EddyFormer:
    """EddyFormer with the given elements; `slices`, `modes` and all options but `padding` and `time_embedding` are
    ignored."""
    return EddyFormer(config, elements or Elements())
