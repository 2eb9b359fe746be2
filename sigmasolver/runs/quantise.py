"""Weights as 16-bit integers with a scale per row: half the size of float32, and closer to it than float16.

    q = round(w / s),    s just above max |w| / 32767 over the row,    so |w - s q| <= s / 2

A row is what the first axis of a tensor indexes: an output channel of a linear layer, a mode of spectral weights; a
vector is one row. Relative to the largest weight of its row the error is at most 1.01 x 2^-16 (float16: up to 2^-12).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["dequantise", "quantise"]

LARGEST = 32767
SCALES = "__scales"
"""Suffix of the name under which the scales of a tensor are stored, in bfloat16: their range matters, not their digits,
since q is computed with the scale that is stored."""
MARGIN = 1 + 2**-7
"""More than rounding to bfloat16 takes away, so that no weight exceeds 32767 scales."""


def quantise(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every floating-point tensor as int16, followed by its scales (rows,); other tensors unchanged."""
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            stored[name] = tensor
            continue
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} has non-finite weights, which int16 cannot represent; store it as float32.")
        rows = tensor.detach().double().reshape(_rows(tensor), -1)
        scales = (rows.abs().amax(1) * MARGIN / LARGEST).to(torch.bfloat16)
        scales[scales == 0] = 1.0  # a row of zeros
        stored[name] = (rows / scales.double()[:, None]).round().to(torch.int16).reshape(tensor.shape)
        stored[name + SCALES] = scales
    return stored


def dequantise(stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of `quantise` in float32; an unquantised checkpoint unchanged."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        if name.endswith(SCALES):
            continue
        scales = stored.get(name + SCALES)
        if scales is None:
            tensors[name] = tensor
        elif tensor.dtype == torch.int16 and scales.shape == (_rows(tensor),):
            rows = tensor.reshape(len(scales), -1).float() * scales.float()[:, None]
            tensors[name] = rows.reshape(tensor.shape)
        else:
            raise ValueError(f"The scales of {name} do not match its int16 weights; copy the checkpoint again.")
    return tensors


def _rows(tensor: torch.Tensor) -> int:
    return tensor.shape[0] if tensor.ndim > 1 else 1
