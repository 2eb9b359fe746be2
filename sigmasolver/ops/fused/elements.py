"""Neighbourhoods of spectral elements, and their queries, keys and values: one pass each, forward and backward.

    windows:  out[e, s] = x[e + s - 1 mod E],  s = 0, 1, 2          dx[e] = sum_s dout[e - s + 1 mod E, s]
    heads:    h = (x + b - mean) r,  (f, g) = w h + (1, 0),  out = (f cos - g sin, f sin + g cos)
              d(f, g) = (df cos + dg sin, dg cos - df sin),  dw = sum d(f, g) h,  dh = w d(f, g)
              dx = r (dh - mean(dh) - h mean(dh h)),  db = sum dx

A program handles all nodes of one element and one head. Sums over elements are accumulated in chunks, then over the
chunks in a fixed order.

Letters: B batch, H heads, E elements, P nodes of an element, m nodes along an axis of it, D head width, C channels.
Elements have three axes here, x, y and z; on missing leading axes there is one element with one node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import product_dtype, tuning
from sigmasolver.ops.fused.jit import jit
from sigmasolver.ops.fused.reductions import sum_partials

__all__ = ["heads_of_elements", "windows"]


@jit
def _windows(
    x: tl.tensor, out: tl.tensor,
    total: tl.tensor, elements: tl.tensor, nodes_along: tl.tensor, after: tl.tensor, channels: tl.tensor,
    TILE_NUMBERS: tl.constexpr,
) -> None:  # fmt: skip
    """out (A, Q, E, 3, m, C), `total` values, of x (A, E, m, Q, C); A nodes before the axis, Q after it:

        out[a, q, e, s, j] = x[a, e + s - 1 mod E, j, q]

    A program writes TILE_NUMBERS values of out."""
    offsets = tl.program_id(0).to(tl.int64) * TILE_NUMBERS + tl.arange(0, TILE_NUMBERS)
    c, remainder = offsets % channels, offsets // channels
    j, remainder = remainder % nodes_along, remainder // nodes_along
    s, remainder = remainder % 3, remainder // 3
    e, remainder = remainder % elements, remainder // elements
    q, a = remainder % after, remainder // after
    source = (((a * elements + (e + s - 1 + elements) % elements) * nodes_along + j) * after + q) * channels + c
    v = tl.load(x + source, mask=offsets < total, other=0.0)
    tl.store(out + offsets, v.to(out.dtype.element_ty), mask=offsets < total)


@jit
def _windows_backward(
    dout: tl.tensor, dx: tl.tensor,
    total: tl.tensor, elements: tl.tensor, nodes_along: tl.tensor, after: tl.tensor, channels: tl.tensor,
    TILE_NUMBERS: tl.constexpr,
) -> None:  # fmt: skip
    """dx (A, E, m, Q, C), `total` values, of dout (A, Q, E, 3, m, C):

        dx[a, e, j, q] = sum_s dout[a, q, e - s + 1 mod E, s, j]

    A program writes TILE_NUMBERS values of dx."""
    offsets = tl.program_id(0).to(tl.int64) * TILE_NUMBERS + tl.arange(0, TILE_NUMBERS)
    c, remainder = offsets % channels, offsets // channels
    q, remainder = remainder % after, remainder // after
    j, remainder = remainder % nodes_along, remainder // nodes_along
    e, a = remainder % elements, remainder // elements
    v = tl.zeros((TILE_NUMBERS,), tl.float32)
    for s in tl.static_range(3):
        window = ((a * after + q) * elements + (e + 1 - s + elements) % elements) * 3 + s
        source = (window * nodes_along + j) * channels + c
        v += tl.load(dout + source, mask=offsets < total, other=0.0).to(tl.float32)
    tl.store(dx + offsets, v.to(dx.dtype.element_ty), mask=offsets < total)


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axis: int, m: int, dtype: torch.dtype) -> torch.Tensor:
        nodes, channels = x.shape[1:-1], x.shape[-1]
        ctx.sizes = elements, m, after, channels = nodes[axis] // m, m, math.prod(nodes[axis + 1 :]), channels
        out = torch.empty(
            x.shape[0], *nodes[:axis], *nodes[axis + 1 :], elements, 3 * m * channels, device=x.device, dtype=dtype
        )  # fmt: skip
        _windows[_tiles(out)](
            x, out, out.numel(), elements, m, after, channels, TILE_NUMBERS=tuning.WINDOW_TILE,
            num_warps=tuning.WINDOW_WARPS,
        )  # fmt: skip
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> Any:
        dx = torch.empty(ctx.shape, device=dout.device, dtype=ctx.dtype)
        _windows_backward[_tiles(dx)](
            dout.contiguous(), dx, dx.numel(), *ctx.sizes, TILE_NUMBERS=tuning.WINDOW_TILE,
            num_warps=tuning.WINDOW_WARPS,
        )  # fmt: skip
        return dx, None, None, None


def _tiles(x: torch.Tensor) -> tuple[int]:
    return (triton.cdiv(x.numel(), tuning.WINDOW_TILE),)


def windows(x: torch.Tensor, axis: int, m: int) -> torch.Tensor:
    """`ops.elements.windows`, in the dtype of the matrix product that follows."""
    return _Windows.apply(x.contiguous(), axis, m, product_dtype(x, x.dtype))


@jit
def _node_offsets(
    e: tl.tensor, p: tl.tensor,
    elements_y: tl.tensor, elements_z: tl.tensor, nodes_x: tl.tensor, nodes_y: tl.tensor, nodes_z: tl.tensor,
    stride_x: tl.tensor, stride_y: tl.tensor, stride_z: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Offsets of the nodes p of element e in a sample whose axes have these strides."""
    ex, ey, ez = e // elements_z // elements_y, e // elements_z % elements_y, e % elements_z
    px, py, pz = p // nodes_z // nodes_y, p // nodes_z % nodes_y, p % nodes_z
    return (ex * nodes_x + px) * stride_x + (ey * nodes_y + py) * stride_y + (ez * nodes_z + pz) * stride_z


@jit
def _normalised(
    f: tl.tensor, g: tl.tensor, b: tl.tensor, k: tl.tensor, keep: tl.tensor,
    EPS: tl.constexpr, HALF: tl.constexpr, COUNT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Both halves of h, and r, from the two halves of x (nodes, D / 2), COUNT values in total; b (D,)."""
    f = tl.where(keep, f + tl.load(b + k, mask=k < HALF, other=0.0).to(tl.float32)[None, :], 0.0)
    g = tl.where(keep, g + tl.load(b + HALF + k, mask=k < HALF, other=0.0).to(tl.float32)[None, :], 0.0)
    mean = (tl.sum(tl.sum(f, axis=1), axis=0) + tl.sum(tl.sum(g, axis=1), axis=0)) / COUNT
    f, g = tl.where(keep, f - mean, 0.0), tl.where(keep, g - mean, 0.0)
    r = tl.rsqrt((tl.sum(tl.sum(f * f, axis=1), axis=0) + tl.sum(tl.sum(g * g, axis=1), axis=0)) / COUNT + EPS)
    return f * r, g * r, r


@jit
def _heads(
    x: tl.tensor, b: tl.tensor, w: tl.tensor, table: tl.tensor, out: tl.tensor,
    elements: tl.tensor, elements_y: tl.tensor, elements_z: tl.tensor,
    nodes_x: tl.tensor, nodes_y: tl.tensor, nodes_z: tl.tensor,
    stride_batch: tl.tensor, stride_x: tl.tensor, stride_y: tl.tensor, stride_z: tl.tensor,
    axis: tl.tensor, axes: tl.tensor, EPS: tl.constexpr,
    HEADS: tl.constexpr, NODES: tl.constexpr, HEAD_WIDTH: tl.constexpr, PART: tl.constexpr,
    TILE_NODES: tl.constexpr, TILE_HALF: tl.constexpr,
) -> None:  # fmt: skip
    """Channels of one axis of out (B, P, H, E, axes D), from x (B, *nodes, 3 H D): PART 0 queries, 1 keys, 2 values.

    Queries and keys, with the halves x = (x_f, x_g) of a head, each (P, D / 2), and mean and r over the whole head:

        h = (x + b - mean) r      (f, g) = w h + (1, 0)      out = (f cos - g sin, f sin + g cos)

    Values are copied. b (2, H, D), w (2, P, D), table (2, E, P, D / 2) of cosines, then sines."""
    e, h, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    p, k = tl.arange(0, TILE_NODES), tl.arange(0, TILE_HALF)
    HALF: tl.constexpr = HEAD_WIDTH // 2
    keep = (p[:, None] < NODES) & (k[None, :] < HALF)
    x += batch * stride_batch + (PART * HEADS + h) * HEAD_WIDTH
    nodes = _node_offsets(e, p, elements_y, elements_z, nodes_x, nodes_y, nodes_z, stride_x, stride_y, stride_z)
    source = nodes[:, None] + k[None, :]
    f = tl.load(x + source, mask=keep, other=0.0).to(tl.float32)
    g = tl.load(x + source + HALF, mask=keep, other=0.0).to(tl.float32)
    if PART < 2:
        f, g, _ = _normalised(f, g, b + (PART * HEADS + h) * HEAD_WIDTH, k, keep, EPS, HALF, NODES * HEAD_WIDTH)
        scale_offsets = (PART * NODES + p)[:, None] * HEAD_WIDTH + k[None, :]
        f = f * tl.load(w + scale_offsets, mask=keep, other=0.0).to(tl.float32) + 1
        g = g * tl.load(w + scale_offsets + HALF, mask=keep, other=0.0).to(tl.float32)
        angle = (e * NODES + p)[:, None] * HALF + k[None, :]
        cosine = tl.load(table + angle, mask=keep, other=0.0)
        sine = tl.load(table + elements * NODES * HALF + angle, mask=keep, other=0.0)
        rotated = f * cosine - g * sine
        g = f * sine + g * cosine
        f = rotated
    row = (((batch * NODES + p) * HEADS + h) * elements + e)[:, None]
    offsets = row * (axes * HEAD_WIDTH) + axis * HEAD_WIDTH + k[None, :]
    tl.store(out + offsets, f.to(out.dtype.element_ty), mask=keep)
    tl.store(out + offsets + HALF, g.to(out.dtype.element_ty), mask=keep)


@jit
def _heads_backward(
    x: tl.tensor, b: tl.tensor, w: tl.tensor, table: tl.tensor, dout: tl.tensor, dx: tl.tensor, sums: tl.tensor,
    batch_size: tl.tensor, elements: tl.tensor, elements_y: tl.tensor, elements_z: tl.tensor,
    nodes_x: tl.tensor, nodes_y: tl.tensor, nodes_z: tl.tensor,
    stride_batch: tl.tensor, stride_x: tl.tensor, stride_y: tl.tensor, stride_z: tl.tensor,
    axis: tl.tensor, axes: tl.tensor, EPS: tl.constexpr,
    HEADS: tl.constexpr, NODES: tl.constexpr, HEAD_WIDTH: tl.constexpr, PART: tl.constexpr,
    TILE_NODES: tl.constexpr, TILE_HALF: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """dx, laid out as x, from dout (B, P, H, E, axes D) with the halves df and dg. Queries and keys:

        d(f, g) = (df cos + dg sin, dg cos - df sin)      dw = sum d(f, g) h      dh = w d(f, g)
        dx = r (dh - mean(dh) - h mean(dh h))             db = sum dx

    Values are copied. A row of `sums` (chunks, 2, H): dw (P, D), db (D)."""
    chunk, h = tl.program_id(0), tl.program_id(1)
    p, k = tl.arange(0, TILE_NODES), tl.arange(0, TILE_HALF)
    HALF: tl.constexpr = HEAD_WIDTH // 2
    keep = (p[:, None] < NODES) & (k[None, :] < HALF)
    scale_offsets = (PART * NODES + p)[:, None] * HEAD_WIDTH + k[None, :]
    COUNT: tl.constexpr = NODES * HEAD_WIDTH
    if PART < 2:
        wf = tl.load(w + scale_offsets, mask=keep, other=0.0).to(tl.float32)
        wg = tl.load(w + scale_offsets + HALF, mask=keep, other=0.0).to(tl.float32)
    dwf, dwg = tl.zeros((TILE_NODES, TILE_HALF), tl.float32), tl.zeros((TILE_NODES, TILE_HALF), tl.float32)
    dbf, dbg = tl.zeros((TILE_NODES, TILE_HALF), tl.float32), tl.zeros((TILE_NODES, TILE_HALF), tl.float32)
    for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, batch_size * elements)):
        e, batch = i % elements, (i // elements).to(tl.int64)
        source = batch * stride_batch + (PART * HEADS + h) * HEAD_WIDTH
        nodes = _node_offsets(e, p, elements_y, elements_z, nodes_x, nodes_y, nodes_z, stride_x, stride_y, stride_z)
        source += nodes[:, None] + k[None, :]
        row = (((batch * NODES + p) * HEADS + h) * elements + e)[:, None]
        offsets = row * (axes * HEAD_WIDTH) + axis * HEAD_WIDTH + k[None, :]
        df = tl.load(dout + offsets, mask=keep, other=0.0).to(tl.float32)
        dg = tl.load(dout + offsets + HALF, mask=keep, other=0.0).to(tl.float32)
        if PART < 2:
            f = tl.load(x + source, mask=keep, other=0.0).to(tl.float32)
            g = tl.load(x + source + HALF, mask=keep, other=0.0).to(tl.float32)
            f, g, r = _normalised(f, g, b + (PART * HEADS + h) * HEAD_WIDTH, k, keep, EPS, HALF, COUNT)
            angle = (e * NODES + p)[:, None] * HALF + k[None, :]
            cosine = tl.load(table + angle, mask=keep, other=0.0)
            sine = tl.load(table + elements * NODES * HALF + angle, mask=keep, other=0.0)
            rotated = df * cosine + dg * sine
            dg = dg * cosine - df * sine
            df = rotated
            dwf += df * f
            dwg += dg * g
            df, dg = df * wf, dg * wg
            mean = (tl.sum(tl.sum(df, axis=1), axis=0) + tl.sum(tl.sum(dg, axis=1), axis=0)) / COUNT
            projection = (tl.sum(tl.sum(df * f, axis=1), axis=0) + tl.sum(tl.sum(dg * g, axis=1), axis=0)) / COUNT
            df = tl.where(keep, (df - mean - f * projection) * r, 0.0)
            dg = tl.where(keep, (dg - mean - g * projection) * r, 0.0)
            dbf += df
            dbg += dg
        tl.store(dx + source, df.to(dx.dtype.element_ty), mask=keep)
        tl.store(dx + source + HALF, dg.to(dx.dtype.element_ty), mask=keep)
    if PART < 2:
        sums += ((chunk * 2 + PART) * HEADS + h).to(tl.int64) * (NODES * HEAD_WIDTH + HEAD_WIDTH)
        sum_offsets = p[:, None] * HEAD_WIDTH + k[None, :]
        tl.store(sums + sum_offsets, dwf, mask=keep)
        tl.store(sums + sum_offsets + HALF, dwg, mask=keep)
        tl.store(sums + NODES * HEAD_WIDTH + k, tl.sum(dbf, axis=0), mask=k < HALF)
        tl.store(sums + NODES * HEAD_WIDTH + HALF + k, tl.sum(dbg, axis=0), mask=k < HALF)


class _Heads(torch.autograd.Function):
    """bias (d, 2, H, D), scale (d, 2, P, D), the rotation table of each axis, then its field (B, *nodes, 3 H D)."""

    @staticmethod
    def forward(
        ctx: Any, mesh: tuple[int, ...], m: int, eps: float, bias: torch.Tensor, scale: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        axes = len(mesh)
        turns, fields = tensors[:axes], tensors[axes:]
        (heads, head_width), elements, nodes = bias.shape[2:], math.prod(mesh), m**axes
        batch_size = len(fields[0])
        outs = tuple(fields[0].new_empty(batch_size, nodes, heads, elements, axes * head_width) for _ in range(3))
        for axis, (field, table) in enumerate(zip(fields, turns, strict=True)):
            for part, out in enumerate(outs):
                _heads[(elements, heads, batch_size)](
                    field, bias[axis], scale[axis], table, out, elements, *_geometry(field, mesh, m), axis, axes, eps,
                    PART=part, **_tile(heads, nodes, head_width),
                )  # fmt: skip
        ctx.save_for_backward(bias, scale, *tensors)
        ctx.mesh, ctx.m, ctx.eps = mesh, m, eps
        return outs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        bias, scale, *tensors = ctx.saved_tensors
        mesh, m, axes = ctx.mesh, ctx.m, len(ctx.mesh)
        turns, fields = tensors[:axes], tensors[axes:]
        (heads, head_width), elements, nodes = bias.shape[2:], math.prod(mesh), m**axes
        batch_size = len(fields[0])
        chunk = max(1, triton.cdiv(batch_size * elements * heads, tuning.HEADS_PROGRAMS))
        chunks = triton.cdiv(batch_size * elements, chunk)
        dfields, dbias, dscale = [], [], []
        douts = [gradient.contiguous() for gradient in gradients]
        for axis, (field, table) in enumerate(zip(fields, turns, strict=True)):
            dfield = torch.empty_like(field)  # preserves the strides of the field, which is dense
            row = nodes * head_width + head_width
            sums = torch.empty(chunks, 2, heads, row, device=field.device, dtype=torch.float32)
            for part, dout in enumerate(douts):
                _heads_backward[(chunks, heads)](
                    field, bias[axis], scale[axis], table, dout, dfield, sums, batch_size, elements,
                    *_geometry(field, mesh, m), axis, axes, ctx.eps, PART=part, CHUNK=chunk,
                    **_tile(heads, nodes, head_width),
                )  # fmt: skip
            dw, db = sum_partials(sums).split((nodes * head_width, head_width), dim=-1)
            dfields.append(dfield)
            dbias.append(db)
            dscale.append(dw.sum(1).view(2, nodes, head_width))
        dparameters = torch.stack(dbias).to(bias.dtype), torch.stack(dscale).to(scale.dtype)
        return None, None, None, *dparameters, *(None,) * axes, *dfields


def _geometry(field: torch.Tensor, mesh: tuple[int, ...], m: int) -> list[int]:
    """Elements on the last two of three axes, nodes of an element along each axis, strides of samples and axes."""
    missing_axes = 3 - len(mesh)
    elements, nodes = [*(1,) * missing_axes, *mesh], [*(1,) * missing_axes, *(m,) * len(mesh)]
    return [*elements[1:], *nodes, field.stride(0), *(0,) * missing_axes, *field.stride()[1:-1]]


def _tile(heads: int, nodes: int, head_width: int) -> dict[str, int]:
    tile_nodes, tile_half = triton.next_power_of_2(nodes), triton.next_power_of_2(head_width // 2)
    warps = max(1, min(tuning.MAX_WARPS, tile_nodes * tile_half // tuning.HEADS_VALUES_PER_WARP))
    sizes = {"HEADS": heads, "NODES": nodes, "HEAD_WIDTH": head_width}
    return {**sizes, "TILE_NODES": tile_nodes, "TILE_HALF": tile_half, "num_warps": warps}


def _dense(x: torch.Tensor) -> torch.Tensor:
    """`x` itself if it is dense with the channels innermost, its other axes in any order; else a contiguous copy."""
    axes = sorted(zip(x.stride(), x.shape, strict=True))
    expected = 1
    for stride, size in axes:
        if size > 1 and stride != expected:
            return x.contiguous()
        expected *= size
    return x if x.stride(-1) == 1 else x.contiguous()


def heads_of_elements(
    fields: Sequence[torch.Tensor],
    bias: torch.Tensor,
    scale: torch.Tensor,
    turns: Sequence[torch.Tensor],
    mesh: tuple[int, ...],
    m: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`ops.elements.heads_of_elements`."""
    inputs = [table.contiguous() for table in turns], [_dense(field) for field in fields]
    return _Heads.apply(mesh, m, eps, bias.contiguous(), scale.flatten(2, -2).contiguous(), *inputs[0], *inputs[1])
