"""PyTorch files with a tensor or a dict of tensors. Anything else is rejected, and no code is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.formats.fields import UNNAMED
from sigmasolver.data.formats.source import Array, Ranges
from sigmasolver.data.isolated import check_file

__all__ = ["open_tensors"]


def open_tensors(path: Path) -> dict[str, Array]:
    """The tensors of a .pt file by name, memory-mapped; a single tensor is unnamed."""
    import torch

    check_file(path)
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=_is_zip(path))
    except PermissionError:
        raise ValueError(f"Permission denied: {path}.") from None
    except Exception as error:  # torch raises many kinds of exceptions for corrupt files and other objects
        if "weights_only" in str(error) or "Unsupported" in str(error):
            raise ValueError(
                f"{path} contains objects other than tensors, which are never loaded; save a dict of tensors."
            ) from None
        raise ValueError(f"{path} is truncated or corrupt; copy or download it again.") from None
    tensors = content if isinstance(content, dict) else {UNNAMED: content}
    if not tensors or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
    ):
        raise ValueError(f"{path} is not a tensor or a dict of named tensors; save it as one.")
    return {name: _array(path, name, tensor) for name, tensor in tensors.items()}


def _is_zip(path: Path) -> bool:
    """Whether the file is a zip archive; those written before PyTorch 1.6 are not, and cannot be memory-mapped."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _array(path: Path, name: str, tensor: Any) -> Array:
    import torch

    where = f"{name!r} in {path}" if name else str(path)
    if tensor.layout != torch.strided or tensor.is_complex() or tensor.is_quantized:
        return Array(where, tuple(tensor.shape), np.dtype("V1"), lambda start, stop: np.empty(0))
    dtype = {torch.bool: torch.uint8, torch.bfloat16: torch.float32}.get(tensor.dtype, tensor.dtype)

    def rows(start: int, stop: int) -> np.ndarray:
        part = tensor[start:stop] if tensor.ndim else tensor
        return part.detach().to(dtype).numpy()

    def box(ranges: Ranges) -> np.ndarray:
        return tensor[tuple(slice(*bounds) for bounds in ranges)].detach().to(dtype).numpy()

    return Array(where, tuple(tensor.shape), np.dtype(str(dtype).removeprefix("torch.")), rows, box=box)
