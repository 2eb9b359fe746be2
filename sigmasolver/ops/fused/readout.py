"""The readout of a solver in one pass each way, for a few fields.

    hat = (H - mean) r      u_o = sum_c W_oc y_c + b_o,   y = w hat + v

Sums over points are made of hat alone; the gradients of both maps follow from them:

    K_oc = sum_n du_no hat_nc,   db_o = sum_n du_no         dW = K w + db v^T      dw = sum_o W_o K_o      dv = W^T db

Letters: N points, C channels, q fields; BN, BC tile sizes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused.reductions import added, sum_partials
from sigmasolver.ops.fused.stream import load_stream
from sigmasolver.ops.fused.tuning import tile_size
from sigmasolver.ops.modules import Affine
from sigmasolver.ops.side_streams import on_side_stream
from sigmasolver.ops.stream import Residual, split

__all__ = ["readout"]

TILE, PROGRAMS, LONGEST = 512, 2048, 64
"""Elements of a tile, of one warp; programs there should be at least; tiles of a program at most."""


@triton.jit
def _hat(H, rest, n, c, N, eps: tl.constexpr, C: tl.constexpr, SPLIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Normalised rows and their scale."""
    keep = (n[:, None] < N) & (c[None, :] < C)
    x = load_stream(H, rest, n.to(tl.int64)[:, None] * C + c[None, :], keep, SPLIT)
    centred = tl.where(keep, x - (tl.sum(x, axis=1) / C)[:, None], 0.0)
    r = tl.rsqrt(tl.sum(centred * centred, axis=1) / C + eps)
    return centred * r[:, None], r


@triton.jit
def _channels(x, c, C: tl.constexpr):  # type: ignore[no-untyped-def]
    """(1, BC) in float32."""
    return tl.load(x + c, mask=c < C, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _read(  # type: ignore[no-untyped-def]
    H, rest, w, v, W, b, u, N, eps: tl.constexpr,
    C: tl.constexpr, SPLIT: tl.constexpr, FIELDS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    n, c = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, BC)
    y = _hat(H, rest, n, c, N, eps, C, SPLIT)[0] * _channels(w, c, C) + _channels(v, c, C)
    for o in tl.static_range(FIELDS):
        out = tl.sum(y * _channels(W + o * C, c, C), axis=1) + tl.load(b + o).to(tl.float32)
        tl.store(u + n.to(tl.int64) * FIELDS + o, out.to(u.dtype.element_ty), mask=n < N)


@triton.jit
def _read_backward(  # type: ignore[no-untyped-def]
    H, w, W, du, dH, sums, N, eps: tl.constexpr,
    C: tl.constexpr, FIELDS: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """dH of a chunk of points. A row of `sums`: K (fields, C), db (fields)."""
    chunk, c = tl.program_id(0), tl.arange(0, BC)
    weight = _channels(w, c, C)
    K = (tl.zeros((BN, BC), tl.float32),) * FIELDS
    db = (tl.zeros((BN,), tl.float32),) * FIELDS
    for start in range(0, SPAN, BN):
        n = chunk * SPAN + start + tl.arange(0, BN)
        hat, r = _hat(H, H, n, c, N, eps, C, False)
        g = tl.zeros((BN, BC), tl.float32)
        for o in tl.static_range(FIELDS):
            d = tl.load(du + n.to(tl.int64) * FIELDS + o, mask=n < N, other=0.0).to(tl.float32)
            g += d[:, None] * _channels(W + o * C, c, C)
            K, db = added(K, o, d[:, None] * hat), added(db, o, d)
        g *= weight
        mean, slope = tl.sum(g, axis=1) / C, tl.sum(g * hat, axis=1) / C
        dx = (g - mean[:, None] - hat * slope[:, None]) * r[:, None]
        keep = (n[:, None] < N) & (c[None, :] < C)
        tl.store(dH + n.to(tl.int64)[:, None] * C + c[None, :], dx.to(dH.dtype.element_ty), mask=keep)
    sums += chunk.to(tl.int64) * FIELDS * (C + 1)
    for o in tl.static_range(FIELDS):
        tl.store(sums + o * C + c, tl.sum(K[o], axis=0), mask=c < C)
        tl.store(sums + FIELDS * C + o, tl.sum(db[o], axis=0))


class _Readout(torch.autograd.Function):
    """H (N, C), its rest, weight and bias of the norm, weight and bias of the map, eps."""

    @staticmethod
    def forward(
        ctx: Any, H: torch.Tensor, rest: torch.Tensor | None, w: torch.Tensor, v: torch.Tensor, W: torch.Tensor,
        b: torch.Tensor, eps: float,
    ) -> torch.Tensor:  # fmt: skip
        u, tile = W.new_empty(len(H), len(W)), _tile(W)
        _read[(triton.cdiv(len(H), tile["BN"]),)](
            H, H if rest is None else rest, w, v, W, b, u, len(H), eps, SPLIT=rest is not None, **tile, num_warps=1
        )
        ctx.save_for_backward(H, w, v, W)
        ctx.eps = eps
        return u

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, du: torch.Tensor) -> Any:
        H, w, v, W = ctx.saved_tensors
        (N, C), fields, tile = H.shape, len(W), _tile(W)
        span = tile["BN"] * max(1, min(LONGEST, N // (tile["BN"] * PROGRAMS)))
        chunks, dH = triton.cdiv(N, span), torch.empty_like(H)
        sums = torch.empty(chunks, fields * (C + 1), device=H.device, dtype=torch.float32)
        _read_backward[(chunks,)](H, w, W, du.contiguous(), dH, sums, N, ctx.eps, SPAN=span, **tile, num_warps=1)

        def maps() -> list[torch.Tensor]:
            K, db = sum_partials(sums).split((fields * C, fields))
            K, each = K.view(fields, C), db[:, None]
            found = (W * K).sum(0), (W * each).sum(0), torch.addcmul(K * w, each, v), db.contiguous()
            return [one.to(W.dtype) for one in found]

        return dH, None, *on_side_stream(maps, sums), None


def _tile(W: torch.Tensor) -> dict[str, int]:
    fields, C = W.shape
    block = tile_size(C)
    return {"C": C, "FIELDS": fields, "BN": max(1, TILE // block), "BC": block}


def readout(H: Residual, norm: Affine, out: Affine, eps: float) -> torch.Tensor:
    """`ops.readout.readout`."""
    rows = [one if one is None else one.reshape(-1, one.shape[-1]).contiguous() for one in split(H)]
    return _Readout.apply(*rows, *norm, *out, eps).view(*split(H)[0].shape[:-1], -1)
