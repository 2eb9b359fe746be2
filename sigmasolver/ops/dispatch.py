"""Plain or fused, and every other choice by device and type: the one decision, and its reason in a sentence.

Fused kernels (`ops.fused`, in Triton) serve float32 and bf16 tensors on a GPU. The plain definition runs wherever they
do not: on a CPU, while a tracer (`torch.compile`, `torch.export`), forward-mode differentiation or a transform of
`torch.func` is at work, for sizes that no kernel holds, and where a hook is registered on a module whose tensors a
kernel would not store. SIGMASOLVER_FUSED=0 in the environment, or `plain()` around a piece of code, switches fused
kernels off. Some operations have two forms of another kind, such as torch's attention and the same written out; which
one is taken is decided here too.

    for operation, decision in explain(lambda: model(x)): print(operation, decision)
    mixing plain: a forward hook is registered on the norm
    inner width padded
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from sigmasolver.ops.modules import Part
from sigmasolver.ops.stream import LOW_PRECISION, StreamBlock

__all__ = [
    "TRACED",
    "Limit",
    "choose",
    "exceeded",
    "explain",
    "first_hook",
    "is_traced",
    "plain",
    "splits_stream",
    "takes",
    "why_plain",
]

Limit = tuple[str, int, int]
"""A size by name, its value, and the largest that a kernel takes."""
TRACED = "a tracer, forward-mode differentiation or a function transform is active"
interpreted = False
"""Set by tests: Triton's interpreter serves tensors on a CPU too."""
_switched_off = 0
_recorded: list[tuple[str, str]] | None = None


@contextmanager
def plain() -> Iterator[None]:
    """Inside, every operation takes its plain definition."""
    global _switched_off
    _switched_off += 1
    try:
        yield
    finally:
        _switched_off -= 1


def choose(
    operation: str,
    x: torch.Tensor,
    *,
    limits: Iterable[Limit] = (),
    unless: Mapping[str, bool] | None = None,
    parts: Mapping[str, Part] | None = None,
    products: bool = False,
) -> Any:
    """The module `ops.fused.<operation>` where its kernels serve `x`, else None: take the plain definition.

    `unless` has further reasons for the plain definition by sentence; `parts` the modules whose tensors are not stored,
    by name; `products` says that the kernels multiply matrices, which is slower than cuBLAS in float32 without TF32.
    """
    reason = why_plain(x, limits=limits, unless=unless, parts=parts, products=products)
    _record(operation, "fused" if reason is None else f"plain: {reason}")
    return None if reason is not None else importlib.import_module(f"sigmasolver.ops.fused.{operation}")


def explain(call: Callable[[], object]) -> list[tuple[str, str]]:
    """Run `call` and list its operations, in order, with the decision: "fused", or "plain: " and the reason.

    Other choices are listed in the same way: the form that was preferred, or another one and the reason for it, as in
    ("attention", "torch's fused call") and ("inner width", "as it is: the tensor is not on a GPU").
    """
    global _recorded
    before, _recorded = _recorded, []
    try:
        call()
        return _recorded
    finally:
        _recorded = before


def why_plain(
    x: torch.Tensor,
    *,
    limits: Iterable[Limit] = (),
    unless: Mapping[str, bool] | None = None,
    parts: Mapping[str, Part] | None = None,
    products: bool = False,
) -> str | None:
    """Why `choose` takes the plain definition; None: it does not."""
    if is_traced(x):  # first: a tracer would break its graph at what follows
        return TRACED
    if not (x.is_cuda or interpreted):
        return "the tensor is not on a GPU"
    if _switched_off or not _enabled():
        return "fused kernels are disabled"
    if not _installed():
        return "Triton is not installed"
    if x.dtype not in (torch.float32, torch.bfloat16):
        return f"the tensor is {x.dtype}"
    if x.numel() == 0:
        return "the tensor is empty"
    if x.shape[1:].numel() >= 2**31:  # offsets inside a sample are 32 bits wide
        return "a sample has 2^31 or more numbers"
    for reason, holds in (unless or {}).items():
        if holds:
            return reason
    too_large = exceeded(limits)
    if too_large is not None:
        return too_large
    if products and not _matrix_units(x):
        return "float32 products without TF32 are left to cuBLAS"
    return first_hook(parts or {})


def exceeded(limits: Iterable[Limit]) -> str | None:
    """A sentence on the first limit that is exceeded; None: there is none."""
    for name, size, most in limits:
        if size > most:
            return f"{name} {size} is above {most}"
    return None


def takes(operation: str, form: str, otherwise: str, reason: str | None) -> bool:
    """Whether `operation` takes `form`: unless there is a reason for the other one."""
    _record(operation, form if reason is None else f"{otherwise}: {reason}")
    return reason is None


def splits_stream(x: torch.Tensor, blocks: Iterable[nn.Module]) -> bool:
    """Whether the residual stream passes through `blocks` in two parts (`ops.stream`)."""
    return takes("stream", "two parts", "one tensor", _why_one_tensor(x, blocks))


def is_traced(x: torch.Tensor) -> bool:
    """Whether a tracer, forward-mode differentiation or a function transform sees this tensor."""
    if torch.compiler.is_compiling() or torch.autograd.forward_ad._current_level >= 0:
        return True
    ordinary = isinstance(x, nn.Parameter) or type(x) is torch.Tensor
    return not ordinary or torch._C._functorch.is_functorch_wrapped_tensor(x)


def _why_one_tensor(x: torch.Tensor, blocks: Iterable[nn.Module]) -> str | None:
    device = x.device.type
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != LOW_PRECISION:
        return "autocast to bf16 is off"
    for place, block in enumerate(blocks):
        if not isinstance(block, StreamBlock):
            return f"{type(block).__name__} takes one tensor"
        hooked = first_hook({f"block {place}": block})
        if hooked is not None:
            return hooked
    return None


def _matrix_units(x: torch.Tensor) -> bool:
    """Whether they take products of this tensor under autocast and TF32 as they are set."""
    low = torch.is_autocast_enabled(x.device.type) or x.dtype == torch.bfloat16
    return low or interpreted or torch.backends.cuda.matmul.allow_tf32


def first_hook(parts: Mapping[str, Part]) -> str | None:
    """A sentence on the first hook on one of these modules or on a part of one; None: there is none."""
    for name, part in parts.items():
        for module in part.modules():
            if module._forward_hooks or module._forward_pre_hooks:
                return f"a forward hook is registered on {name}"
            if module._backward_hooks or module._backward_pre_hooks:
                return f"a backward hook is registered on {name}"
    return None


def _record(operation: str, decision: str) -> None:
    if _recorded is not None:
        _recorded.append((operation, decision))


@cache
def _enabled() -> bool:
    return os.environ.get("SIGMASOLVER_FUSED", "1") != "0"


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
