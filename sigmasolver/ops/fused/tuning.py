"""Sizes that the kernels take, and how their work is cut up."""

from __future__ import annotations

__all__ = [
    "ALIGNED",
    "LONGEST_KERNEL",
    "MOST_CHANNELS",
    "MOST_HEAD_WIDTH",
    "MOST_LIFTED_FIELDS",
    "MOST_READ_FIELDS",
    "MOST_SLICES",
    "MOST_STATES",
    "PIECE",
    "slice_shared_bytes",
    "tile_size",
]

MOST_CHANNELS = 256
"""Channels that one program holds at once."""
LONGEST_KERNEL = 5
"""Points of a convolution along one axis that the kernels are written for."""
MOST_LIFTED_FIELDS = 64
"""Fields that one program of the lift holds at once."""
MOST_READ_FIELDS = 8
"""Fields that the readout sums one by one; more are left to a matrix product."""
MOST_SLICES, MOST_HEAD_WIDTH, MOST_STATES = 128, 64, 4096
"""Slices, head width, and their product, both padded to tiles: beyond, the update of the states takes minutes to
compile."""
ALIGNED = 16
"""Matrix units read rows of whole multiples; an inner width of 170 or 341 sends the product to kernels that load
single values."""

PIECE = 1024
"""Numbers of a parameter that one program of `parameter_kernels` takes."""
WIDE_HEAD = 1024
"""Slices times channels of the tiles of a program beyond which float32 fills the shared memory."""
SLICE_BYTES = {"bf16": (96, 48), "tf32": (72, 36), "tf32x3": (96, 54)}
"""Bytes of shared memory at most for each slice and channel of a tile, up to WIDE_HEAD and beyond."""


def tile_size(size: int) -> int:
    """Rows or columns of a tile that holds so many: matrix units multiply powers of 2 from 16 on, padding is masked."""
    return max(16, 1 << (size - 1).bit_length())


def slice_shared_bytes(kind: str, slices: int, head_width: int) -> int:
    """Of a head, what no program needs more than: for tiles of points and slices, or for the matrices of the update."""
    M, D = tile_size(slices), tile_size(head_width)
    return max(SLICE_BYTES[kind][M * D > WIDE_HEAD] * M * D, 8 * M * M + 16 * M * D + 4 * D * D)
