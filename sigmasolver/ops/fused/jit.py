"""`jit`, the decorator of the kernels in this package: `triton.jit` with fused multiply-add and reproducible keys.

Triton up to 3.9 fuses by default, later versions only on request. Without it the kernels would be slower and round
differently, so every launch requests it.

A kernel's key in the cache contains the global constants of the functions it calls. Triton 3.6 leaves out those of a
function that it has not hashed before, so the key would differ between processes that compile in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from triton.runtime.jit import JITFunction

__all__ = ["jit"]


class _Kernel(JITFunction):  # type: ignore[misc]
    hash: str | None

    @property
    def cache_key(self) -> str:
        with self._hash_lock:
            if self.hash is None:
                super().cache_key  # noqa: B018  (hashes the functions that it calls)
                self.hash = None
            key: str = super().cache_key
            return key

    def run(self, *args: Any, **options: Any) -> Any:
        options.setdefault("enable_fp_fusion", True)
        return super().run(*args, **options)


def jit(function: Callable[..., Any]) -> Any:
    """Compile this function as a kernel, or as a part of one; in Triton's interpreter, which has no such option, it is
    `triton.jit`."""
    return triton.jit(function) if triton.knobs.runtime.interpret else _Kernel(function)
