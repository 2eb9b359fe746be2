"""How the C library treats freed memory on a CPU.

glibc asks the system anew for every block above 32 MB and hands it back at once. The tensors of a batch in two
dimensions or of one sample in three are such blocks, and every operation makes one, so a large share of the time goes
into pages being mapped and cleared. Kept in the process instead, the next tensor takes what the last one left.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_freed_memory"]

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
"""Parameters of mallopt, as malloc.h numbers them."""


def keep_freed_memory() -> bool:
    """From now on this process keeps large blocks that are freed; False where the C library has no such choice.

    The command line does this for itself. The process grows to its largest need and stays there.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    choices = ((MMAP_MAX, 0), (TRIM_THRESHOLD, -1), (TOP_PAD, 2**26))
    return all(mallopt(name, value) == 1 for name, value in choices)
