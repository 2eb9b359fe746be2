"""PyTorch files of tensors: a tensor, or a dict of tensors. Anything else in them is refused, and nothing is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.formats.fields import UNNAMED
from sigmasolver.data.formats.source import Array, Ranges
from sigmasolver.data.isolated import check_file

__all__ = ["open_tensors"]


def open_tensors(path: Path) -> dict[str, Array]:
    """The tensors of a .pt by name, memory-mapped; a lone one is unnamed."""
    import torch

    check_file(path)
    try:
        held: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except PermissionError:
        raise ValueError(f"Permission denied: {path}.") from None
    except Exception as error:  # the library answers damage, and objects of other classes, with all kinds of exceptions
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise ValueError(
                f"{path} contains objects other than tensors, which are never loaded; save a dict of tensors."
            ) from None
        raise ValueError(f"{path} is truncated or corrupt; copy or download it again.") from None
    tensors = held if isinstance(held, dict) else {UNNAMED: held}
    if not tensors or not all(isinstance(name, str) and isinstance(one, torch.Tensor) for name, one in tensors.items()):
        raise ValueError(f"{path} is not a tensor or a dict of named tensors; save it as one.")
    return {name: _array(path, name, one) for name, one in tensors.items()}


def _is_zip(path: Path) -> bool:
    """Files written before PyTorch 1.6 are none, and cannot be mapped."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _array(path: Path, name: str, tensor: Any) -> Array:
    import torch

    where = f"{name!r} in {path}" if name else str(path)
    if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
        return Array(where, tuple(tensor.shape), np.dtype("V1"), lambda start, stop: np.empty(0))
    kind = {torch.bool: torch.uint8, torch.bfloat16: torch.float32}.get(tensor.dtype, tensor.dtype)

    def rows(start: int, stop: int) -> np.ndarray:
        part = tensor[start:stop] if tensor.ndim else tensor
        return part.detach().to(kind).numpy()

    def box(ranges: Ranges) -> np.ndarray:
        return tensor[tuple(slice(*one) for one in ranges)].detach().to(kind).numpy()

    return Array(where, tuple(tensor.shape), np.dtype(str(kind).removeprefix("torch.")), rows, box=box)
