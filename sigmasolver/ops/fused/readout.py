"""The readout of a solver in one pass each way, for a few fields.

    hat = (H - mean) r      u_o = sum_c W_oc y_c + b_o,   y = w hat + v

Sums over points are made of hat alone; the gradients of both maps follow from them:

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
from sigmasolver.ops.fused.layer_norm import centred, load_channels, norm_gradient
from sigmasolver.ops.fused.reductions import added, sum_partials
from sigmasolver.ops.fused.stream import load_stream
from sigmasolver.ops.modules import Affine
from sigmasolver.ops.side_streams import on_side_stream
from sigmasolver.ops.stream import Residual, split

__all__ = ["readout"]


@triton.jit
def _hat(
    H: tl.tensor, H_low: tl.tensor,
    n: tl.tensor, c: tl.tensor, N: tl.tensor, eps: tl.constexpr, C: tl.constexpr, TWO_PARTS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Normalised rows n of H (N, C), and r."""
    keep = (n[:, None] < N) & (c[None, :] < C)
    x = load_stream(H, H_low, n.to(tl.int64)[:, None] * C + c[None, :], keep, TWO_PARTS)
    x, _, r = centred(x, keep, eps, C)
    return x * r[:, None], r


@triton.jit
def _read(
    H: tl.tensor, H_low: tl.tensor, w: tl.tensor, v: tl.tensor, W: tl.tensor, b: tl.tensor, u: tl.tensor,
    N: tl.tensor, eps: tl.constexpr,
    C: tl.constexpr, TWO_PARTS: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """u (N, FIELDS) of a tile of points: u_o = sum_c W_oc (w hat + v)_c + b_o."""
    n, c = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    y = _hat(H, H_low, n, c, N, eps, C, TWO_PARTS)[0] * load_channels(w, c, C)[None, :]
    y += load_channels(v, c, C)[None, :]
    for o in tl.static_range(FIELDS):
        out = tl.sum(y * load_channels(W + o * C, c, C)[None, :], axis=1) + tl.load(b + o).to(tl.float32)
        tl.store(u + n.to(tl.int64) * FIELDS + o, out.to(u.dtype.element_ty), mask=n < N)


@triton.jit
def _read_backward(
    H: tl.tensor, w: tl.tensor, W: tl.tensor, du: tl.tensor, dH: tl.tensor, sums: tl.tensor,
    N: tl.tensor, eps: tl.constexpr,
    C: tl.constexpr, FIELDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """dH (N, C) of a chunk of points from du (N, FIELDS). A row of `sums`: K (FIELDS, C), db (FIELDS)."""
    chunk, c = tl.program_id(0), tl.arange(0, COLUMNS)
    weight = load_channels(w, c, C)
    K = (tl.zeros((ROWS, COLUMNS), tl.float32),) * FIELDS
    db = (tl.zeros((ROWS,), tl.float32),) * FIELDS
    for start in range(0, CHUNK, ROWS):
        n = chunk * CHUNK + start + tl.arange(0, ROWS)
        hat, r = _hat(H, H, n, c, N, eps, C, False)
        g = tl.zeros((ROWS, COLUMNS), tl.float32)
        for o in tl.static_range(FIELDS):
            d = tl.load(du + n.to(tl.int64) * FIELDS + o, mask=n < N, other=0.0).to(tl.float32)
            g += d[:, None] * load_channels(W + o * C, c, C)[None, :]
            K, db = added(K, o, d[:, None] * hat), added(db, o, d)
        g *= weight[None, :]
        dx = norm_gradient(g, hat, r, C)
        keep = (n[:, None] < N) & (c[None, :] < C)
        tl.store(dH + n.to(tl.int64)[:, None] * C + c[None, :], dx.to(dH.dtype.element_ty), mask=keep)
    sums += chunk.to(tl.int64) * FIELDS * (C + 1)
    for o in tl.static_range(FIELDS):
        tl.store(sums + o * C + c, tl.sum(K[o], axis=0), mask=c < C)
        tl.store(sums + FIELDS * C + o, tl.sum(db[o], axis=0))


class _Readout(torch.autograd.Function):
    """H (N, C) and its low part, weight and bias of the norm, weight and bias of the map, eps."""

    @staticmethod
    def forward(
        ctx: Any, H: torch.Tensor, H_low: torch.Tensor | None, w: torch.Tensor, v: torch.Tensor, W: torch.Tensor,
        b: torch.Tensor, eps: float,
    ) -> torch.Tensor:  # fmt: skip
        u, tile = W.new_empty(len(H), len(W)), _tile(W)
        _read[(triton.cdiv(len(H), tile["ROWS"]),)](
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
        (N, C), fields, tile = H.shape, len(W), _tile(W)
        tiles = N // (tile["ROWS"] * tuning.READOUT_PROGRAMS)
        chunk = tile["ROWS"] * max(1, min(tuning.READOUT_LONGEST, tiles))
        chunks, dH = triton.cdiv(N, chunk), torch.empty_like(H)
        sums = torch.empty(chunks, fields * (C + 1), device=H.device, dtype=torch.float32)
        _read_backward[(chunks,)](
            H, w, W, du.contiguous(), dH, sums, N, ctx.eps, CHUNK=chunk, **tile, num_warps=tuning.READOUT_WARPS
        )

        def weight_gradients() -> list[torch.Tensor]:
            K, db = sum_partials(sums).split((fields * C, fields))
            K, each = K.view(fields, C), db[:, None]
            found = (W * K).sum(0), (W * each).sum(0), torch.addcmul(K * w, each, v), db.contiguous()
            return [one.to(W.dtype) for one in found]

        return dH, None, *on_side_stream(weight_gradients, sums), None


def _tile(W: torch.Tensor) -> dict[str, int]:
    fields, C = W.shape
    columns = tuning.tile_size(C)
    return {"C": C, "FIELDS": fields, "ROWS": max(1, tuning.READOUT_TILE // columns), "COLUMNS": columns}


def readout(H: Residual, norm: Affine, out: Affine, eps: float) -> torch.Tensor:
    """`ops.readout.readout`."""
    rows = [one if one is None else one.reshape(-1, one.shape[-1]).contiguous() for one in split(H)]
    return _Readout.apply(*rows, *norm, *out, eps).view(*split(H)[0].shape[:-1], -1)
