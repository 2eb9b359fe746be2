"""The readout: from the residual stream to the fields at every point (app:encoding-recomposition).

u = LN(H) W^T + b
"""

from __future__ import annotations

import torch
from torch import nn

from sigmasolver.ops.dispatch import choose
from sigmasolver.ops.fused.tuning import MAX_CHANNELS, MAX_READOUT_FIELDS
from sigmasolver.ops.modules import affine_of
from sigmasolver.ops.stream import Residual, merged, split

__all__ = ["readout"]


def readout(H: Residual, norm: nn.LayerNorm, out: nn.Linear) -> torch.Tensor:
    """H (..., C) -> (..., q) in the dtype of the weights, even under autocast: bf16 has only eight significant bits."""
    H = H.to(norm.weight.dtype) if isinstance(H, torch.Tensor) else H
    main, _ = split(H)
    with torch.autocast(main.device.type, enabled=False):
        fused = choose(
            "readout",
            main,
            limits=(
                ("number of fields", out.out_features, MAX_READOUT_FIELDS),
                ("width", main.shape[-1], MAX_CHANNELS),
            ),
            parts={"the norm": norm, "the readout": out},
        )
        if fused:
            return fused.readout(H, affine_of(norm), affine_of(out), norm.eps)
        return out(norm(merged(H)))
