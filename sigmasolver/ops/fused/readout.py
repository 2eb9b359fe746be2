"""The readout of a solver in one pass forward and one backward, for a few fields.

    hat = (H - mean) r      u_o = sum_c W_oc y_c + b_o,   y = w hat + v

Only hat enters the sums over points; the gradients of both maps follow from them:

    K_oc = sum_n du_no hat_nc,   db_o = sum_n du_no         dW = K w + db v^T      dw = sum_o W_o K_o      dv = W^T db

Letters: N points, C channels, o of FIELDS fields; w, v weight and bias of the norm, W, b of the map.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from sigmasolver.ops.fused import tuning
from sigmasolver.ops.fused.jit import jit
from sigmasolver.ops.fused.layer_norm import centre_rows, load_channels, norm_gradient
from sigmasolver.ops.fused.reductions import add_at, sum_partials
from sigmasolver.ops.fused.stream import load_stream
from sigmasolver.ops.modules import Affine
from sigmasolver.ops.side_streams import on_side_stream
from sigmasolver.ops.stream import Residual, split

__all__ = ["readout"]


@jit
def _load_normalised(
    H: tl.tensor, H_low: tl.tensor,
    n: tl.tensor, c: tl.tensor, points: tl.tensor, EPS: tl.constexpr, CHANNELS: tl.constexpr, TWO_PARTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Normalised rows n of H (N, C), and r."""
    keep = (n[:, None] < points) & (c[None, :] < CHANNELS)
    x = load_stream(H, H_low, n.to(tl.int64)[:, None] * CHANNELS + c[None, :], keep, TWO_PARTS)
    x, _, r = centre_rows(x, keep, EPS, CHANNELS)
    return x * r[:, None], r


@jit
def _read(
    H: tl.tensor, H_low: tl.tensor, w: tl.tensor, v: tl.tensor, W: tl.tensor, b: tl.tensor, u: tl.tensor,
    points: tl.tensor, EPS: tl.constexpr,
    CHANNELS: tl.constexpr, TWO_PARTS: tl.constexpr, FIELDS: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_CHANNELS: tl.constexpr,
) -> None:  # fmt: skip
    """u (N, FIELDS) for a tile of points: u_o = sum_c W_oc (w hat + v)_c + b_o."""
    n, c = tl.program_id(0) * TILE_POINTS + tl.arange(0, TILE_POINTS), tl.arange(0, TILE_CHANNELS)
    y = _load_normalised(H, H_low, n, c, points, EPS, CHANNELS, TWO_PARTS)[0] * load_channels(w, c, CHANNELS)[None, :]
    y += load_channels(v, c, CHANNELS)[None, :]
    for o in tl.static_range(FIELDS):
        out = tl.sum(y * load_channels(W + o * CHANNELS, c, CHANNELS)[None, :], axis=1) + tl.load(b + o).to(tl.float32)
        tl.store(u + n.to(tl.int64) * FIELDS + o, out.to(u.dtype.element_ty), mask=n < points)


@jit
def _read_backward(
    H: tl.tensor, w: tl.tensor, W: tl.tensor, du: tl.tensor, dH: tl.tensor, sums: tl.tensor,
    points: tl.tensor, EPS: tl.constexpr,
    CHANNELS: tl.constexpr, FIELDS: tl.constexpr,
    TILE_POINTS: tl.constexpr, TILE_CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """dH (N, C) for a chunk of points from du (N, FIELDS). A row of `sums`: K (FIELDS, C), db (FIELDS)."""
    chunk, c = tl.program_id(0), tl.arange(0, TILE_CHANNELS)
    weight = load_channels(w, c, CHANNELS)
    K = (tl.zeros((TILE_POINTS, TILE_CHANNELS), tl.float32),) * FIELDS
    db = (tl.zeros((TILE_POINTS,), tl.float32),) * FIELDS
    for start in range(0, CHUNK, TILE_POINTS):
        n = chunk * CHUNK + start + tl.arange(0, TILE_POINTS)
        hat, r = _load_normalised(H, H, n, c, points, EPS, CHANNELS, False)
        g = tl.zeros((TILE_POINTS, TILE_CHANNELS), tl.float32)
        for o in tl.static_range(FIELDS):
            d = tl.load(du + n.to(tl.int64) * FIELDS + o, mask=n < points, other=0.0).to(tl.float32)
            g += d[:, None] * load_channels(W + o * CHANNELS, c, CHANNELS)[None, :]
            K, db = add_at(K, o, d[:, None] * hat), add_at(db, o, d)
        g *= weight[None, :]
        dx = norm_gradient(g, hat, r, CHANNELS)
        keep = (n[:, None] < points) & (c[None, :] < CHANNELS)
        tl.store(dH + n.to(tl.int64)[:, None] * CHANNELS + c[None, :], dx.to(dH.dtype.element_ty), mask=keep)
    sums += chunk.to(tl.int64) * FIELDS * (CHANNELS + 1)
    for o in tl.static_range(FIELDS):
        tl.store(sums + o * CHANNELS + c, tl.sum(K[o], axis=0), mask=c < CHANNELS)
        tl.store(sums + FIELDS * CHANNELS + o, tl.sum(db[o], axis=0))


class _Readout(torch.autograd.Function):
    """H (N, C) and its low part, weight and bias of the norm, weight and bias of the map, eps."""

    @staticmethod
    def forward(
        ctx: Any, H: torch.Tensor, H_low: torch.Tensor | None, w: torch.Tensor, v: torch.Tensor, W: torch.Tensor,
        b: torch.Tensor, eps: float,
    ) -> torch.Tensor:  # fmt: skip
        u, tile = W.new_empty(len(H), len(W)), _tile(W)
        _read[(triton.cdiv(len(H), tile["TILE_POINTS"]),)](
            H, H if H_low is None else H_low, w, v, W, b, u, len(H), eps, TWO_PARTS=H_low is not None, **tile,
            num_warps=tuning.READOUT_WARPS,
        )  # fmt: skip
        ctx.save_for_backward(H, w, v, W)
        ctx.eps = eps
        return u

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, du: torch.Tensor) -> Any:
        H, w, v, W = ctx.saved_tensors
        (points, channels), fields, tile = H.shape, len(W), _tile(W)
        tiles = points // (tile["TILE_POINTS"] * tuning.READOUT_PROGRAMS)
        chunk = tile["TILE_POINTS"] * max(1, min(tuning.MAX_READOUT_TILES, tiles))
        chunks, dH = triton.cdiv(points, chunk), torch.empty_like(H)
        sums = torch.empty(chunks, fields * (channels + 1), device=H.device, dtype=torch.float32)
        _read_backward[(chunks,)](
            H, w, W, du.contiguous(), dH, sums, points, ctx.eps, CHUNK=chunk, **tile, num_warps=tuning.READOUT_WARPS
        )

        def weight_gradients() -> list[torch.Tensor]:
            K, db = sum_partials(sums).split((fields * channels, fields))
            K, db_column = K.view(fields, channels), db[:, None]
            gradients = (W * K).sum(0), (W * db_column).sum(0), torch.addcmul(K * w, db_column, v), db.contiguous()
            return [gradient.to(W.dtype) for gradient in gradients]

        return dH, None, *on_side_stream(weight_gradients, sums), None


def _tile(W: torch.Tensor) -> dict[str, int]:
    fields, channels = W.shape
    tile_channels = tuning.tile_size(channels)
    tile_points = max(1, tuning.READOUT_TILE // tile_channels)
    return {"CHANNELS": channels, "FIELDS": fields, "TILE_POINTS": tile_points, "TILE_CHANNELS": tile_channels}


def readout(H: Residual, norm: Affine, out: Affine, eps: float) -> torch.Tensor:
    """`ops.readout.readout`."""
    rows = [part if part is None else part.reshape(-1, part.shape[-1]).contiguous() for part in split(H)]
    return _Readout.apply(*rows, *norm, *out, eps).view(*split(H)[0].shape[:-1], -1)
