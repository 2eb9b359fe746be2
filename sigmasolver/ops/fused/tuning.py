"""Size limits, tile sizes and program counts of all kernels, in one table.

Values that differ between classes of GPUs (`Gpu`) have an entry for each class; all others hold for every class. Values
that differ between dtypes are keyed by element size in bytes: 2 for bf16, 4 for float32.

Each group says where its values were measured. "H200, version 4" is an entry of docs/speed.md with the prediction, the
result and the alternatives tried: full training steps of Darcy, NS2D, KF2D and Smoke3D in bf16 on an H200 (132
multiprocessors), some versions only together with others; "the baselines" is the section there. "Other tiles not
timed": no other value is on record, as for all float32 tiles, which are smaller so that they fit. "Not timed": not on
any GPU of that class.
`tests/ops/test_compiled.py` checks that the kernels compile and fit into the shared memory of a GPU of each class.

Where programs loop over points, their number is a multiple of the multiprocessors of the device; where more programs
only hide latency, it is fixed. A chunk is the work of one program, which writes one row of partial sums.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Gpu", "Tile", "slice_shared_bytes", "tile_size"]


class Gpu(Enum):
    """Classes of GPUs by their minimum shared memory per program in bytes, which tiles must fit into."""

    HOPPER = 232_448
    """H100, H200 and B200."""
    AMPERE = 166_912
    """A100."""
    SMALL = 0
    """All others: RTX 3090, 4090 and 5090 have 101,376. Also a CPU, and where the driver does not report it."""

    @classmethod
    def with_shared_memory(cls, size: int) -> Gpu:
        return next(gpu for gpu in cls if size >= gpu.value)


class Tile(NamedTuple):
    """Tile and launch parameters of a kernel with matrix products."""

    points: int
    inner: int
    """Inner channels processed at a time."""
    warps: int
    stages: int
    """Stages of the software pipeline, which prefetches loads."""


# --- Limits, beyond which `ops.dispatch` chooses the plain definition. By design, not timed.
MAX_CHANNELS = 256
"""Channels that one program holds at once."""
MAX_KERNEL_SIZE = 5
"""Points of a convolution kernel along one axis."""
MAX_LIFTED_FIELDS = 64
"""Fields that one program of the lift holds at once."""
MAX_READOUT_FIELDS = 8
"""Fields that the readout reduces one by one; more are left to a matrix product."""
MAX_SLICES, MAX_HEAD_WIDTH, MAX_STATE_SIZE = 128, 64, 4096
"""Slices, head width, and their product after padding to tiles, beyond which the update of the states takes minutes to
compile."""
MAX_ELEMENT_SIZE = 8192
"""Values of one head in one spectral element, all of which a program holds at once."""
MAX_WARPS = 8
"""Warps of a program whose number of warps grows with its tile."""

# --- Alignment. H200, versions 3 and 15, each timed only with others.
ALIGNMENT = 16
"""Matrix units read rows whose length is a multiple of this; for an inner width of 170 or 341, cuBLAS would fall back
to kernels with scalar loads."""
EXTRA_CHANNELS = 8
"""Channels appended to the normalised rows of the SwiGLU, the first of them 1. One would do, but rows are read at full
speed only if their length is a multiple of 16 bytes."""

# --- parameter_kernels. H200, version 12: AdamW from 174 to 13 us on Darcy.
PIECE = 1024
"""Elements of a parameter per program."""

# --- layer_norm. H200, version 4; other tiles gave no gain: memory-bound.
NORM_TILE, NORM_POINTS, NORM_WARPS = 512, 32, 1
"""Elements per tile, maximum points per tile, warps per program."""
NORM_CHUNK, NORM_PROGRAMS = 512, 4096
"""Backward: maximum points per chunk, desired minimum of programs."""

# --- reductions. H200, version 4; other tiles not timed: small launches between large ones.
PARTIALS_TILE, FEW_PARTIALS, PARTIALS_COLUMNS = 2048, 1024, (8, 32)
"""Elements per tile; number of sums up to which tiles have the first number of columns, to give enough programs, and
beyond which they have the second."""
COLUMNS_CHUNK, COLUMNS_ROWS, COLUMNS_TILE = 128, 32, 128
"""Rows per chunk, rows per tile, maximum columns per tile."""

# --- convolution. H200, versions 8 and 14; other tiles gave no gain. A run is four neighbours on the last axis.
CONVOLUTION_CHANNELS = 64
"""Maximum channels per tile."""
SINGLE_RUNS, PAIR_RUNS, CONVOLUTION_WARPS = 8, 32, 4
"""Runs per tile for one kernel and for two; warps per program."""
MAX_RUNS_PER_LINE = 4
"""Maximum runs per tile along the last axis."""
WEIGHT_GRADIENT_RUNS, WEIGHT_GRADIENT_WARPS = 4, 2
"""Runs per tile, warps per program. Few channels per lane, so that more warps hide the latency of the loads."""
MIN_WEIGHT_GRADIENT_CHUNK, MAX_WEIGHT_GRADIENT_CHUNK, WEIGHT_GRADIENT_PROGRAMS = 32, 256, 2560
"""Weight gradients: minimum and maximum runs per chunk, desired minimum of programs."""
MAX_SINGLE_PASS_TAPS, FEW_TAPS = 27, 9
"""Taps up to which one pass computes all gradients of a single kernel, as registers can hold the accumulators; taps up
to which half the warps suffice. H200, version 15."""
SINGLE_PASS_RUNS, SINGLE_PASS_PROGRAMS, SINGLE_PASS_WARPS = 4, 512, {True: 2, False: 4}
"""All gradients in one pass: runs per tile, desired minimum of programs, warps by whether taps are few."""

# --- context. H200, version 15; other tiles gave no gain.
CONTEXT_TILE, CONTEXT_WARPS = 512, 4
"""Elements per tile, each for a run of points; warps per program."""

# --- swiglu and mixing. H200, versions 9, 15 and 18.
MAX_FUSED_MATMUL_CHANNELS = 128
"""Channels up to which fused products are faster than cuBLAS with passes over memory in between."""
MIXING_TILES = {2: Tile(64, 32, 4, 2), 4: Tile(32, 32, 4, 2)}
"""Forward pass, by element size."""
MIXING_TILE, MIXING_BACKWARD_TILE, MIXING_BACKWARD_WARPS = 2048, 512, 1
"""Elements per tile of the passes without products (four warps) and of the backward pass; warps of the latter."""
MIXING_PROGRAMS, MAX_MIXING_TILES = 2048, 16
"""Backward: desired minimum of programs, maximum tiles per program."""
MAX_SAVED_BYTES = 10**8
"""Bytes of a stream from which its normalised rows are recomputed rather than saved, as memory then costs more than
another pass. H200, version 14."""
SWIGLU_BACKWARD_TILES = {
    Gpu.HOPPER: {2: Tile(128, 64, 8, 2), 4: Tile(32, 32, 4, 2)},  # H200
    Gpu.AMPERE: {2: Tile(64, 64, 4, 1), 4: Tile(32, 32, 4, 2)},  # not timed
    Gpu.SMALL: {2: Tile(64, 64, 4, 1), 4: Tile(32, 32, 4, 2)},  # not timed
}
"""Backward pass of the inner channels, by class and element size."""
GATE_POINTS, GATE_CHANNELS = 32, 64
"""Tile of the kernel between cuBLAS products. H200, version 5; other tiles not timed."""
SILU_POINTS, SILU_CHANNELS = 16, 128
"""Tile of SiLU(gate) * up alone. H200, version 4; other tiles not timed."""

# --- lift. H200, version 13.
LIFT_TILES = {2: Tile(64, 32, 4, 2), 4: Tile(32, 32, 4, 2)}
"""Forward pass, by element size."""
WIDE_LIFT = 128
"""Channels beyond which the backward pass uses the second tile."""
LIFT_BACKWARD_TILES = {
    Gpu.HOPPER: {2: (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)), 4: (Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))},  # H200
    Gpu.AMPERE: {2: (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)), 4: (Tile(32, 32, 4, 2), Tile(32, 32, 4, 2))},  # not timed
    Gpu.SMALL: {2: (Tile(64, 64, 8, 2), Tile(64, 64, 8, 2)), 4: (Tile(32, 32, 4, 2), Tile(32, 16, 4, 2))},  # not timed
}
"""Backward pass, by class and element size: up to WIDE_LIFT, and beyond."""
LIFT_PROGRAMS = 3
"""Backward: programs per multiprocessor, if there are enough points."""

# --- linear. H200, version 18.
MAX_LINEAR_CHANNELS, MAX_LINEAR_BYTES = 128, 2
"""Channels up to which a program accumulates the full weight gradient, and element size up to which that is faster."""
LINEAR_POINTS, LINEAR_PROGRAMS = 64, 2
"""Points per tile, maximum programs per multiprocessor."""
SMALL_MAP, SMALL_MAP_LAUNCH, LARGE_MAP_LAUNCH = 64 * 64, (4, 4), (8, 3)
"""Elements of a weight up to which the first pair of warps and stages is used, and beyond which the second."""

# --- readout. H200, version 15: memory-bound.
READOUT_TILE, READOUT_WARPS = 512, 1
"""Elements per tile, warps per program."""
READOUT_PROGRAMS, MAX_READOUT_TILES = 2048, 64
"""Backward: desired minimum of programs, maximum tiles per program."""

# --- fourier. H200, version 5; other tiles not timed: small launches.
FOURIER_WARPS = 4
THIN_TILES = {2: (64, 64, 128), 4: (64, 32, 64)}
"""Products with a basis: maximum rows out, rows in and columns, by element size."""
MODE_LINES, MODE_CHANNELS, MODE_CHUNK = 32, 64, 128
"""Products of modes: lines and channels per tile, lines per chunk of the weight gradient."""

# --- wrap. H200, the baselines; other tiles not timed: one pass forward and one backward, memory-bound.
WRAP_TILE, WRAP_WARPS = 4096, 4
"""Elements per tile, warps per program."""

# --- elements. H200, the baselines; other tiles not timed: one pass forward and one backward, memory-bound.
WINDOW_TILE, WINDOW_WARPS = 1024, 4
"""Elements per tile, warps per program."""
HEADS_VALUES_PER_WARP, HEADS_PROGRAMS = 512, 4096
"""Values of half a head of an element per warp; backward: desired minimum of programs."""

# --- gumbel. H200, the baselines; other tiles not timed: one pass forward and one backward, memory-bound.
GUMBEL_TILE, GUMBEL_WARPS = 2048, 4
"""Elements per tile, warps per program."""

# --- slices. H200, versions 7, 17 and 20.
MAX_SLICE_CHUNK, SLICE_PROGRAMS = 2048, 2048
"""Maximum points per chunk; minimum programs of a pass, if there are enough points."""
SHARED_TILE_CHANNELS = 16
"""Channels up to which two heads share a tile: the minimum width of a tile."""
SLICE_POINTS = 64
"""Points of the largest tile, of which chunks are multiples."""
WIDE_HEAD = 1024
"""Slices times channels of a tile beyond which float32 fills the shared memory. Programs with larger tiles have
proportionally more warps."""
SLICE_TILE = (16, 1, 3)
"""Slicing: points per tile, warps per program, pipeline stages. Few warps spend little time at barriers."""
SLICE_TILES = {2: ((64, 4, 3), (64, 4, 3)), 4: ((32, 2, 3), (16, 8, 1))}
"""The same for the other passes, by element size: up to WIDE_HEAD, and beyond. From 64 points on, matrix units read the
loop-invariant operand from shared memory."""
GATED_TILES = {2: ((64, 4, 2), (64, 4, 2)), 4: ((32, 2, 3), (16, 8, 1))}
"""The same for gates on a basis, which also load a tile of the basis. H200, the baselines; other tiles not timed."""
UPDATE_WARPS = (4, 8)
"""Warps of the update of the states: up to WIDE_HEAD, and beyond."""
SLICE_BYTES = {"bf16": (96, 48), "tf32": (72, 36), "tf32x3": (96, 54)}
"""Upper bound of the shared memory in bytes per slice and channel of a tile, as compiled: up to WIDE_HEAD, and beyond.
The limit is the shared memory of the device, whatever its class."""


def tile_size(size: int) -> int:
    """Padded rows or columns of a tile: matrix units multiply powers of 2 from 16 on; the padding is masked."""
    return max(16, 1 << (size - 1).bit_length())


def slice_shared_bytes(kind: str, slices: int, head_width: int) -> int:
    """Upper bound of the shared memory of a program: for tiles of points and slices, or the matrices of the update."""
    M, D = tile_size(slices), tile_size(head_width)
    return max(SLICE_BYTES[kind][M * D > WIDE_HEAD] * M * D, 8 * M * M + 16 * M * D + 4 * D * D)
