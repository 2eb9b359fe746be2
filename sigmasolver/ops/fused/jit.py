"""`jit`, the decorator of the kernels in this package: `triton.jit` with fused multiply-add.

Triton up to 3.9 fuses by default, later versions only on request. Without it the kernels would be slower and round
differently, so every launch requests it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from triton.runtime.jit import JITFunction

__all__ = ["jit"]


class _Kernel(JITFunction):  # type: ignore[misc]
    def run(self, *args: Any, **options: Any) -> Any:
        options.setdefault("enable_fp_fusion", True)
        return super().run(*args, **options)


def jit(function: Callable[..., Any]) -> Any:
    """Compile this function as a kernel, or as a part of one; in Triton's interpreter, which has no such option, it is
    `triton.jit`."""
    return triton.jit(function) if triton.knobs.runtime.interpret else _Kernel(function)
