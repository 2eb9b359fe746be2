"""EddyFormer (Du et al., NeurIPS 2025): spectral elements in two resolutions, attention between the elements.

    grid --- interpolate --> fine nodes S --- resample --> coarse nodes L --- layer x depth ---> u on the nodes --> grid

Every axis is cut into M equal elements, each with m Chebyshev-Gauss-Lobatto nodes x_j = (1 - cos(pi j / (m - 1))) / 2,
on which a field is a polynomial of degree m - 1; neighbours hold a node each where they meet. S has m nodes per element
and axis for the small eddies, L fewer for the large ones. With FFN = Linear, GELU (tanh), Linear of inner width 4 C:

    S_0 = W [fields, x in its element] + b,  S_0 <- S_0 + FFN(sum over axes a of conv_a(S_0)),  L_0 = resampled S_0
    every layer:    L <- L + attention(L)
                    L <- L + FFN(sum_a conv_a(L))
                    S <- S + eps * resampled L,  S <- S + FFN(sum_a conv_a(S))
    u = resampled FFN(L) + eps' * FFN(S)

conv_a at node x_i of an element is the integral of g(x_i - y) f(y) over a window of two elements around it, element by
element with the interpolatory weights of the nodes; g is a matrix of real Fourier series of period two elements with
2 (m - 1) coefficients. It wraps around, whatever the ends of the axis are. Weights and series are constants that make
one matrix of the coefficients, so that a convolution is one product with the three elements around each. The attention
has queries, keys and values from one convolution per axis; queries and keys are normalised over the nodes of an element
and a head's channels, get a one on the first half and are turned by the angles k x_a, k = 0, 1, ..., of the position in
a box of 2 pi; then each node looks at the same node of all elements.

From the paper and the released code: the layer, the elements, the kernels, all starting values (convolutions 1e-7,
eps 1e-7, LeCun-normal maps). The code's two settings are rows; the number of elements follows from the grid:

    row            m   nodes of L  node intervals per point  attention reaches
    eddyformer      9  5           1                         all elements             (our choice)
    eddyformer-2d  25  5           1.5: 16 elements for 256  8 elements on each axis
    eddyformer-3d  13  6           1: 8 elements for 96      all elements

In both settings of the code the heads are together four times as wide as the stream and a kernel has m - 1 modes per
element; so here always. The code predicts a correction to a coarse numerical solution of its turbulence tasks; here, as
in its runs on public data sets, the network predicts the fields. Inferred: periodic axes have points i / n, without the
code's second copy of the first; an odd number of points has no unpaired frequency. The sizes of a task do not tell how
its axes end: they are periodic (trigonometric interpolation) unless `options.padding` says "zeros", which here means
linear interpolation between points that include both ends.

Letters: B batch, H heads, C width, D head width, d axes, E elements, P nodes of an element, m nodes per axis of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import Linear, TimeEmbedding
from sigmasolver.models.solver import GridModel
from sigmasolver.ops.attention import attention
from sigmasolver.ops.constants import grid_constant
from sigmasolver.ops.elements import SHIFTS, heads_of_elements, nodes_of_elements, windows

__all__ = ["EddyFormer", "ElementAttention", "ElementConvolution", "Elements", "eddyformer"]

WINDOW = 2
"""Elements that a kernel spans; also the fewest of an axis."""


@dataclass(frozen=True)
class Elements:
    """How a field lies on elements."""

    nodes: int = 9
    coarse: int = 5
    """Nodes per element and axis of the fine and of the coarse field."""
    density: float = 1.0
    """Intervals between fine nodes for each point of the grid that the model is made for."""
    reach: int | None = None
    """Attention sees elements nearer than this on every axis; None: all."""

    def mesh(self, grid: tuple[int, ...]) -> tuple[int, ...]:
        """Elements of every axis."""
        return tuple(max(WINDOW, round(self.density * points / (self.nodes - 1))) for points in grid)


# --- constants of the elements, in float64 until the end


def _count(number: int, device: torch.device) -> torch.Tensor:
    return torch.arange(number, dtype=torch.float64, device=device)


def _where(chosen: torch.Tensor, value: float, other: float) -> torch.Tensor:
    """In float64: of two plain numbers torch would make its default type."""
    return torch.full(chosen.shape, other, dtype=torch.float64, device=chosen.device).masked_fill(chosen, value)


def _nodes(m: int, device: torch.device) -> torch.Tensor:
    return (1 - torch.cos(math.pi * _count(m, device) / (m - 1))) / 2


def _chebyshev(x: torch.Tensor, count: int) -> torch.Tensor:
    """(..., count): the first Chebyshev polynomials of [0, 1]."""
    return torch.cos(_count(count, x.device) * torch.arccos(2 * x - 1)[..., None])


def _coefficients(m: int, device: torch.device) -> torch.Tensor:
    """(m, m): Chebyshev coefficients of the polynomial through values at the nodes."""
    k = _count(m, device)
    half = _where((k == 0) | (k == m - 1), 0.5, 1.0)
    return 2 / (m - 1) * half[:, None] * half * torch.cos(math.pi / (m - 1) * k[:, None] * (m - 1 - k))


def _integrals(x: torch.Tensor, count: int) -> torch.Tensor:
    """(..., count): antiderivatives of the first Chebyshev polynomials of [0, 1]."""
    k, angle = _count(count, x.device), torch.arccos(2 * x - 1)[..., None]
    below = torch.where(k == 1, 0.0, torch.cos((k - 1) * angle) / torch.where(k == 1, 1.0, k - 1))
    return (torch.cos((k + 1) * angle) / (k + 1) - below) / 4


@grid_constant
def element_points(mesh: int, m: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(mesh m,): all nodes of an axis from 0 to 1."""
    return ((_count(mesh, device)[:, None] + _nodes(m, device)) / mesh).flatten().to(dtype)


@grid_constant
def local_points(mesh: tuple[int, ...], m: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(*nodes, axes): where every node lies in its element."""
    axes = [_nodes(m, device).repeat(elements) for elements in mesh]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).to(dtype)


@grid_constant
def to_nodes(points: int, mesh: int, m: int, periodic: bool, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(mesh m, points): interpolation, trigonometric or linear, from an axis of the grid."""
    x, i = element_points(mesh, m, torch.float64, device), _count(points, device)
    if not periodic:
        return (1 - (x[:, None] * (points - 1) - i).abs()).clamp(min=0).to(dtype)
    k = _count(points // 2 + 1, device)
    weight = _where((k == 0) | (2 * k == points), 1.0, 2.0) / points
    there, here = 2 * math.pi * x[:, None] * k, 2 * math.pi / points * i[:, None] * k
    return ((weight * there.cos()) @ here.cos().T + (weight * there.sin()) @ here.sin().T).to(dtype)


@grid_constant
def to_grid(points: int, mesh: int, m: int, periodic: bool, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(points, mesh m): the polynomials of the elements at an axis of the grid."""
    last = points if periodic else points - 1
    scaled = torch.arange(points, device=device) * mesh  # whole numbers: no point falls into the wrong element
    element = (scaled // last).clamp(max=mesh - 1)
    values = _chebyshev((scaled - element * last).double() / last, m) @ _coefficients(m, device)
    place = F.one_hot(element, mesh).double()
    return (place[:, :, None] * values[:, None]).flatten(1).to(dtype)


@grid_constant
def resampling(m: int, wanted: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(wanted, m): from `m` nodes of an element to `wanted`, with the values at both ends kept.

    What remains without the line between the ends is x (1 - x) q(x); q is found at the Gauss points of the smaller
    number of nodes and keeps two coefficients fewer.
    """
    n, identity = min(m, wanted), torch.eye(m, dtype=torch.float64, device=device)

    def line(x: torch.Tensor) -> torch.Tensor:
        return (1 - x)[:, None] * identity[0] + x[:, None] * identity[-1]

    rest = identity - line(_nodes(m, device))
    gauss = (1 - torch.cos(math.pi * (_count(n, device) + 0.5) / n)) / 2
    T = _chebyshev(gauss, n)
    quotient = T @ (_coefficients(m, device) @ rest)[:n] / (gauss * (1 - gauss))[:, None]
    twice = _where(_count(n, device) == 0, 1.0, 2.0)[:, None]
    q = (twice / n * T.T @ quotient)[: n - 2]
    x = _nodes(wanted, device)
    return (line(x) + (x * (1 - x))[:, None] * (_chebyshev(x, n - 2) @ q)).to(dtype)


@grid_constant
def convolution_basis(m: int, modes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """(shifts, m, m, modes): what coefficient n does from node j of the shifted element to node i of this one.

    The first modes // 2 + 1 coefficients are real parts by frequency, the others imaginary parts from the highest
    frequency down; all frequencies but the first and the last count twice.
    """
    x, shift = _nodes(m, device), torch.tensor(SHIFTS, dtype=torch.float64, device=device)[:, None]
    low, high = ((x + side * WINDOW / 2 - shift).clamp(0, 1) for side in (-1, 1))
    weights = (_integrals(high, m) - _integrals(low, m)) @ _coefficients(m, device)
    distance = x[:, None] - x - shift[..., None]
    reals = modes // 2 + 1
    k = torch.cat((_count(reals, device), _count(modes - reals, device).flip(0) + 1))
    twice = _where((k == 0) | (k == reals - 1), 1.0, 2.0)
    angle = 2 * math.pi / WINDOW * distance[..., None] * k
    series = twice * torch.cat((angle[..., :reals].cos(), -angle[..., reals:].sin()), dim=-1)
    return (weights[..., None] * series).to(dtype)


@grid_constant
def turns(
    mesh: tuple[int, ...], m: int, axis: int, count: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """(2, E, P, count): cosines and sines of k x for the coordinate of one axis, 2 pi around."""
    shape = [1] * (2 * len(mesh))
    shape[axis], shape[len(mesh) + axis] = mesh[axis], m
    x = element_points(mesh[axis], m, torch.float64, device).reshape(shape).expand(*mesh, *(m,) * len(mesh))
    angles = 2 * math.pi * x.reshape(math.prod(mesh), -1, 1) * _count(count, device)
    return torch.stack((angles.cos(), angles.sin())).to(dtype)


@grid_constant
def neighbours(mesh: tuple[int, ...], reach: int, device: torch.device) -> torch.Tensor:
    """(E, E): which elements are nearer than `reach` on every axis of the periodic mesh."""
    places = torch.stack(torch.meshgrid(*(torch.arange(n, device=device) for n in mesh), indexing="ij"), dim=-1)
    apart = (places.flatten(0, -2)[:, None] - places.flatten(0, -2)).abs()
    around = torch.tensor(mesh, device=device) - apart
    return (torch.minimum(apart, around) < reach).all(-1)


class Constants(NamedTuple):
    """What all layers need of the elements; made once a call, so that a traced model has it once."""

    down: torch.Tensor
    up: torch.Tensor
    """From the nodes of the fine field to those of the coarse one, and back."""
    fine: torch.Tensor
    coarse: torch.Tensor
    """Bases of the convolutions."""
    turns: tuple[torch.Tensor, ...]
    """Of every axis."""
    mask: torch.Tensor | None


def constants(config: SolverConfig, elements: Elements, dtype: torch.dtype, device: torch.device) -> Constants:
    mesh, m, few = elements.mesh(config.grid), elements.nodes, elements.coarse
    pairs, reach = head_width(config) // 2, elements.reach
    return Constants(
        resampling(m, few, dtype, device),
        resampling(few, m, dtype, device),
        convolution_basis(m, WINDOW * (m - 1), dtype, device),
        convolution_basis(few, WINDOW * (few - 1), dtype, device),
        tuple(turns(mesh, few, axis, pairs, dtype, device) for axis in range(config.axes)),
        None if reach is None else neighbours(mesh, reach, device),
    )


# --- the model


def head_width(config: SolverConfig) -> int:
    return 4 * config.width // config.heads


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Geometry is float32 at least, under autocast too."""
    return torch.promote_types(dtype, torch.float32)


def _along(matrix: torch.Tensor, x: torch.Tensor, axis: int) -> torch.Tensor:
    """The matrix on one axis of x, in the type of the matrix; the result has the type of x."""
    with torch.autocast(x.device.type, enabled=False):
        return (x.to(matrix.dtype).movedim(axis, -1) @ matrix.T).movedim(-1, axis).to(x.dtype)


def resample(x: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """(B, *nodes, C) with other nodes in every element, by a matrix of `resampling` along each axis."""
    for axis in range(1, x.ndim - 1):
        x = _along(matrix, x.unflatten(axis, (-1, matrix.shape[1])), axis + 1).flatten(axis, axis + 1)
    return x


def dense(inputs: int, outputs: int) -> nn.Linear:
    """A map as Flax starts it: normal within two deviations, of variance 1 / inputs; bias zero."""
    layer, deviation = Linear(inputs, outputs), inputs**-0.5 / 0.87962566103423978
    nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
    nn.init.zeros_(layer.bias)
    return layer


def feed_forward(width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(dense(width, 4 * width), nn.GELU(approximate="tanh"), dense(4 * width, outputs))


class ElementConvolution(nn.Module):
    """`(B, *nodes, inputs)` -> `(B, *nodes, outputs)`: the sum of the convolutions along all axes.

    `basis` is that of `convolution_basis` for as many nodes per element.
    """

    START = 1e-7

    def __init__(self, axes: int, m: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.m, modes = m, WINDOW * (m - 1)
        self.weights = nn.ParameterList(self.START * torch.randn(modes, inputs, outputs) for _ in range(axes))

    def along(self, x: torch.Tensor, axis: int, basis: torch.Tensor) -> torch.Tensor:
        """The convolution along one axis, counted from 0."""
        weight = self.weights[axis]
        outputs = weight.shape[-1]
        with torch.autocast(x.device.type, enabled=False):
            matrix = torch.einsum("sijn,nco->sjcio", basis, weight.to(basis.dtype))
            matrix = matrix.reshape(-1, self.m * outputs).to(weight.dtype)
        out = (windows(x, axis, self.m) @ matrix).unflatten(-1, (self.m, outputs))
        return out.flatten(-3, -2).movedim(-2, axis + 1)

    def forward(self, x: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
        first, *rest = reversed(range(len(self.weights)))  # the last axis first: its result and the sum are contiguous
        total = self.along(x, first, basis)
        for axis in rest:
            total = total + self.along(x, axis, basis)
        return total


class ElementAttention(nn.Module):
    """`(B, *nodes, C)` -> the same shape: every node looks at the same node of the other elements."""

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
        return self.project(nodes_of_elements(out_BPHED, self.mesh, self.m))


State = tuple[torch.Tensor, torch.Tensor, Constants]
"""Coarse and fine field, (B, *nodes, C) each, and the constants of their elements."""


class Layer(nn.Module):
    """Both fields -> the same shapes."""

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

    def forward(self, given: State) -> State:
        L, S, constants = given
        L = L + self.attention(L, constants)
        L = L + self.coarse_map(self.coarse_convolution(L, constants.coarse))
        S = S + resample(L, constants.up) * self.eps
        return L, S + self.map(self.convolution(S, constants.fine)), constants


class EddyFormer(GridModel):
    """`(B, *grid, in_channels)` -> `(B, *grid, out_channels)` for one, two or three axes and any grid.

    The mesh is that of the grid the model is made for: another grid of the same box is interpolated to it.
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
        """`time` is for solvers with an embedding: (B,), or (B, n) where conditions follow the time."""
        self.check(x, time)
        dtype = self.dtype
        common = constants(self.config, self.elements, _wide(dtype), x.device)
        S = self.with_time(self._lifted(x), time)
        S = S + self.map(self.convolution(S, common.fine))
        L = resample(S, common.down)
        for block in self.blocks:
            L, S, _ = block((L, S, common))
        u = resample(self.coarse_answer(L).to(dtype), common.up) + self.answer(S) * self.eps
        for axis, (points, mesh, periodic) in enumerate(self._axes(x), start=1):
            u = _along(to_grid(points, mesh, self.elements.nodes, periodic, _wide(dtype), u.device), u, axis)
        return u

    def _lifted(self, x: torch.Tensor) -> torch.Tensor:
        """(B, *nodes, C) in the type of the weights, which the residual sums keep."""
        m, values = self.elements.nodes, x
        for axis, (points, mesh, periodic) in enumerate(self._axes(x), start=1):
            values = _along(to_nodes(points, mesh, m, periodic, _wide(x.dtype), x.device), values, axis)
        local = local_points(self.mesh, m, values.dtype, x.device)
        S = self.lift(torch.cat((values, local.expand(x.shape[0], *local.shape)), dim=-1))
        return S.to(self.dtype)

    def _axes(self, x: torch.Tensor) -> zip[tuple[int, int, bool]]:
        return zip(x.shape[1:-1], self.mesh, self.periodic, strict=True)


def eddyformer(config: SolverConfig, elements: Elements | None = None) -> EddyFormer:
    """EddyFormer on one kind of mesh; `slices`, `modes` and all options but `padding` and the embedding of the time are
    not used."""
    return EddyFormer(config, elements or Elements())
