"""Sizes that the kernels take, and how their work is cut up: the one table of tile sizes and program counts.

Rows that differ between classes of GPUs (`Gpu`) have an entry for each, any other holds for all of them. Rows that
differ between types have an entry for each number of bytes: 2 for bf16, 4 for float32.

Every group says where its numbers were measured. "H200, version 4" is an entry of docs/speed.md, which has what was
predicted, what came out, and what else was tried: whole training steps of Darcy, NS2D, KF2D and Smoke3D in bf16 on an
H200 (132 multiprocessors), some versions only together with others; "the baselines" is the section there. "Other tiles
not timed": no other value is on record, as for all tiles of float32, which are smaller, so that they fit. "Not timed":
on no GPU of that class.
`tests/ops/test_compiled.py` checks that the kernels compile and fit into the shared memory of a GPU of each class.

Programs are counted in multiples of the multiprocessors of the device where they walk over points, and as a fixed
number where more of them only hide latency. A chunk is what one program sums up: one row of partial sums for each.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Gpu", "Tile", "slice_shared_bytes", "tile_size"]


class Gpu(Enum):
    """Classes of GPUs, by the bytes of shared memory that a program may have at least: what tiles must fit into."""

    HOPPER = 232_448
    """H100 and H200, and B200, which has as much."""
    AMPERE = 166_912
    """A100."""
    SMALL = 0
    """All others: RTX 3090, 4090 and 5090 have 101,376. Also where the driver does not say, and a CPU."""

    @classmethod
    def with_shared_memory(cls, size: int) -> Gpu:
        return next(gpu for gpu in cls if size >= gpu.value)


class Tile(NamedTuple):
    """How one program of a kernel with products inside is cut."""

    points: int
    inner: int
    """Inner channels that are in flight at a time."""
    warps: int
    stages: int
    """Of the software pipeline that loads ahead."""


# --- What a kernel takes at all; beyond, `ops.dispatch` chooses the plain definition. Limits of design, not timed.
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
MOST_IN_ELEMENT = 8192
"""Numbers of one head in one spectral element, all of which a program holds at once."""
MOST_WARPS = 8
"""Of a program whose warps grow with its tile."""

# --- Alignment. H200, versions 3 and 15, each timed only with others.
ALIGNED = 16
"""Matrix units read rows of whole multiples; an inner width of 170 or 341 sends the product to kernels that load
single values."""
EXTRA_CHANNELS = 8
"""Appended to the normed rows of the SwiGLU, the first of them 1. One is needed; rows of whole multiples of 16 bytes
are read at full speed."""

# --- parameter_kernels. H200, version 12: AdamW from 174 to 13 us on Darcy.
PIECE = 1024
"""Numbers of a parameter that one program takes."""

# --- layer_norm. H200, version 4; other tiles gave no gain: bound by memory traffic.
NORM_TILE, NORM_POINTS, NORM_WARPS = 512, 32, 1
"""Numbers of a tile, its points at most, and warps of its program."""
NORM_CHUNK, NORM_PROGRAMS = 512, 4096
"""Backward: points of a chunk at most; programs there should be at least."""

# --- reductions. H200, version 4; other tiles not timed: small launches between large ones.
PARTIALS_TILE, FEW_PARTIALS, PARTIALS_COLUMNS = 2048, 1024, (8, 32)
"""Numbers of a tile; its columns up to so many sums, so that there are programs enough, and beyond."""
COLUMNS_CHUNK, COLUMNS_ROWS, COLUMNS_TILE = 128, 32, 128
"""Rows of a chunk, rows of a tile, columns of a tile at most."""

# --- convolution. H200, versions 8 and 14; other tiles gave no gain. A run is four neighbours on the last axis.
CONVOLUTION_CHANNELS = 64
"""Channels of a tile at most."""
SINGLE_RUNS, PAIR_RUNS, CONVOLUTION_WARPS = 8, 32, 4
"""Runs of a tile for one kernel and for two."""
RUNS_ALONG = 4
"""Runs of a tile along the last axis at most."""
WEIGHT_GRADIENT_RUNS, WEIGHT_GRADIENT_WARPS = 4, 2
"""Few channels a lane, so that more warps hide the loads."""
SHORTEST_CHUNK, LONGEST_CHUNK, WEIGHT_GRADIENT_PROGRAMS = 32, 256, 2560
"""Weight gradients: runs of a chunk, and programs there should be at least."""
MOST_TAPS_IN_ONE_PASS, FEW_TAPS = 27, 9
"""Taps up to which a single kernel has all its gradients from one pass, as the registers hold their sums; up to the
second number with half the warps. H200, version 15."""
WALK_RUNS, WALK_PROGRAMS, WALK_WARPS = 4, 512, {True: 2, False: 4}
"""All gradients in one pass: runs of a tile, programs there should be at least, warps by whether taps are few."""

# --- context. H200, version 15; other tiles gave no gain.
CONTEXT_TILE, CONTEXT_WARPS = 512, 4
"""Numbers of a tile, each of which stands for a run of points."""

# --- swiglu and mixing. H200, versions 9, 15 and 18.
PRODUCTS_INSIDE = 128
"""Channels up to which products inside a kernel are quicker than cuBLAS with passes over memory between them."""
MIXING_TILES = {2: Tile(64, 32, 4, 2), 4: Tile(32, 32, 4, 2)}
"""Forward pass, by the bytes of a number."""
MIXING_TILE, MIXING_BACKWARD_TILE, MIXING_BACKWARD_WARPS = 2048, 512, 1
"""Numbers of a tile of the passes without products, which have four warps, and of the backward pass; its warps."""
MIXING_PROGRAMS, MIXING_LONGEST = 2048, 16
"""Backward: programs there should be at least; tiles of a program at most."""
SAVED_BYTES = 10**8
"""Bytes of a stream from which on its normed rows are recomputed rather than saved: memory then costs more than
another pass. H200, version 14."""
SWIGLU_BACKWARD_TILES = {
    Gpu.HOPPER: {2: Tile(128, 64, 8, 2), 4: Tile(32, 32, 4, 2)},  # H200
    Gpu.AMPERE: {2: Tile(64, 64, 4, 1), 4: Tile(32, 32, 4, 2)},  # not timed
    Gpu.SMALL: {2: Tile(64, 64, 4, 1), 4: Tile(32, 32, 4, 2)},  # not timed
}
"""Backward pass of the inner channels, by class and the bytes of a number."""
GATE_POINTS, GATE_CHANNELS = 32, 64
"""Tiles between products of cuBLAS. H200, version 5; other tiles not timed."""
SILU_POINTS, SILU_CHANNELS = 16, 128
"""Tiles of SiLU(gate) * up alone. H200, version 4; other tiles not timed."""

# --- lift. H200, version 13.
LIFT_TILES = {2: Tile(64, 32, 4, 2), 4: Tile(32, 32, 4, 2)}
"""Forward pass, by the bytes of a number."""
WIDE_LIFT = 128
"""Channels beyond which the backward pass may have other tiles."""
LIFT_BACKWARD_TILES = {
    Gpu.HOPPER: {2: (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)), 4: (Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))},  # H200
    Gpu.AMPERE: {2: (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)), 4: (Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))},  # not timed
    Gpu.SMALL: {2: (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)), 4: (Tile(32, 32, 4, 2), Tile(32, 16, 4, 2))},  # not timed
}
"""Backward pass, by class and the bytes of a number, up to WIDE_LIFT and beyond."""
LIFT_PROGRAMS = 3
"""For each multiprocessor, backward, where there are points enough."""

# --- linear. H200, version 18.
LINEAR_CHANNELS, LINEAR_BYTES = 128, 2
"""Up to which a program holds the sums of a whole map, and bytes of a number up to which it is quicker so."""
LINEAR_POINTS, LINEAR_PROGRAMS = 64, 2
"""Points of a tile; programs for each multiprocessor at most."""
SMALL_MAP, SMALL_MAP_STAGES, LARGE_MAP_STAGES = 64 * 64, (4, 4), (8, 3)
"""Numbers of a weight up to which a program has the first warps and stages, and beyond the second."""

# --- readout. H200, version 15: bound by memory traffic.
READOUT_TILE, READOUT_WARPS = 512, 1
"""Numbers of a tile, and warps of its program."""
READOUT_PROGRAMS, READOUT_LONGEST = 2048, 64
"""Backward: programs there should be at least, tiles of a program at most."""

# --- fourier. H200, version 5; other tiles not timed: small launches.
FOURIER_WARPS = 4
THIN_TILES = {2: (64, 64, 128), 4: (64, 32, 64)}
"""Of a product with a basis: rows out, rows in, columns at most, by the bytes of a number."""
MODE_LINES, MODE_CHANNELS, MODE_CHUNK = 32, 64, 128
"""Of the products of modes: lines and channels of a tile, lines of a chunk of the weight gradient."""

# --- wrap. H200, the baselines; other tiles not timed: one pass each way, bound by memory traffic.
WRAP_TILE, WRAP_WARPS = 4096, 4
"""Numbers of a tile, and warps of its program."""

# --- elements. H200, the baselines; other tiles not timed: one pass each way, bound by memory traffic.
WINDOW_TILE, WINDOW_WARPS = 1024, 4
"""Numbers of a tile, and warps of its program."""
HEADS_NUMBERS, HEADS_PROGRAMS = 512, 4096
"""Numbers of half a head of an element for each warp; backward: programs there should be at least."""

# --- gumbel. H200, the baselines; other tiles not timed: one pass each way, bound by memory traffic.
GUMBEL_TILE, GUMBEL_WARPS = 2048, 4
"""Numbers of a tile, and warps of its program."""

# --- slices. H200, versions 7, 17 and 20.
SLICE_LONGEST, SLICE_PROGRAMS = 2048, 2048
"""Points of a chunk at most; programs that a pass is cut into at least, where there are points enough."""
SHARED_ROW = 16
"""Channels up to which two heads share a tile: it has so many at least."""
SLICE_POINTS = 64
"""Points of the largest tile; chunks are whole multiples of it."""
WIDE_HEAD = 1024
"""Slices times channels of the tiles of a program beyond which float32 fills the shared memory. A program of several
times as many has as many times the warps."""
SLICE_TILE = (16, 1, 3)
"""Points of a tile, warps of a program and stages of its pipeline, where slices are made. Few warps hardly wait for
each other at barriers."""
SLICE_TILES = {2: ((64, 4, 3), (64, 4, 3)), 4: ((32, 2, 3), (16, 8, 1))}
"""The same elsewhere, by the bytes of a number, up to WIDE_HEAD and beyond. From 64 points on the matrix units read
what stays the same from shared memory."""
GATED_TILES = {2: ((64, 4, 2), (64, 4, 2)), 4: ((32, 2, 3), (16, 8, 1))}
"""The same for gates on a basis, whose tile is loaded too. H200, the baselines; other tiles not timed."""
UPDATE_WARPS = (4, 8)
"""Of the update of the states, up to WIDE_HEAD and beyond."""
SLICE_BYTES = {"bf16": (96, 48), "tf32": (72, 36), "tf32x3": (96, 54)}
"""Bytes of shared memory at most for each slice and channel of a tile, up to WIDE_HEAD and beyond, as compiled; what a
device has of it is the limit, whatever its class."""


def tile_size(size: int) -> int:
    """Rows or columns of a tile that holds so many: matrix units multiply powers of 2 from 16 on, padding is masked."""
    return max(16, 1 << (size - 1).bit_length())


def slice_shared_bytes(kind: str, slices: int, head_width: int) -> int:
    """Of a head, what no program needs more than: for tiles of points and slices, or for the matrices of the update."""
    M, D = tile_size(slices), tile_size(head_width)
    return max(SLICE_BYTES[kind][M * D > WIDE_HEAD] * M * D, 8 * M * M + 16 * M * D + 4 * D * D)
