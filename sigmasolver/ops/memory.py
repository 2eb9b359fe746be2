"""How the C library treats freed memory on a CPU.

glibc maps every block above 32 MB anew and returns it to the system as soon as it is freed. The tensors of a 2-D batch
or of one 3-D sample are such blocks, and every operation allocates one, so a large share of the time is spent mapping
and clearing pages. If freed blocks stay in the process, the next tensor reuses them.
"""

from __future__ import annotations

import ctypes
import sys

__all__ = ["keep_freed_memory"]

TRIM_THRESHOLD, TOP_PAD, MMAP_MAX = -1, -2, -4
"""Parameters of mallopt, as malloc.h numbers them."""


def keep_freed_memory() -> bool:
    """Make this process keep large freed blocks from now on; return False where the C library has no such setting.

    The command line calls this itself. The memory of the process grows to its peak and stays there.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((MMAP_MAX, 0), (TRIM_THRESHOLD, -1), (TOP_PAD, 2**26))
    return all(mallopt(name, value) == 1 for name, value in settings)
