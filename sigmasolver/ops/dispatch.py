"""Choose between plain and fused operations, and make every other choice by device and dtype; record the reason.

Fused kernels (`ops.fused`, in Triton) handle float32 and bf16 tensors on a GPU. The plain definition runs everywhere
else: on a CPU, under a tracer (`torch.compile`, `torch.export`), forward-mode differentiation or a `torch.func`
transform, for sizes beyond the limits of a kernel, and where a hook is registered on a module whose intermediate
tensors a kernel would not store. SIGMASOLVER_FUSED=0 in the environment, or a `with plain()` block, disables fused
kernels. Some operations have two implementations of another kind, such as `scaled_dot_product_attention` and explicit
products; that choice is made here too.

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
    "TRANSFORMED",
    "Limit",
    "choose",
    "exceeded",
    "explain",
    "first_hook",
    "is_traced",
    "is_transformed",
    "plain",
    "prefers",
    "splits_stream",
    "why_plain",
]

Limit = tuple[str, int, int]
"""Name of a size, its value, and the largest value that a kernel supports."""
TRANSFORMED = "forward-mode differentiation or a function transform is active"
TRACED = f"a tracer, {TRANSFORMED}"
interpreted = False
"""Set by tests: Triton's interpreter runs the kernels on CPU tensors too."""
_plain_depth = 0
_decisions: list[tuple[str, str]] | None = None


@contextmanager
def plain() -> Iterator[None]:
    """Use the plain definition of every operation inside the block."""
    global _plain_depth
    _plain_depth += 1
    try:
        yield
    finally:
        _plain_depth -= 1


def choose(
    operation: str,
    x: torch.Tensor,
    *,
    limits: Iterable[Limit] = (),
    unless: Mapping[str, bool] | None = None,
    parts: Mapping[str, Part] | None = None,
    products: bool = False,
) -> Any:
    """Return the module `ops.fused.<operation>` if its kernels support `x`, else None: use the plain definition.

    `unless` maps further reasons for the plain definition to whether they apply; `parts` maps names to modules whose
    intermediate tensors the kernels do not store; `products` says that the kernels multiply matrices, which is slower
    than cuBLAS in float32 without TF32.
    """
    reason = why_plain(x, limits=limits, unless=unless, parts=parts, products=products)
    _record(operation, "fused" if reason is None else f"plain: {reason}")
    return None if reason is not None else importlib.import_module(f"sigmasolver.ops.fused.{operation}")


def explain(call: Callable[[], object]) -> list[tuple[str, str]]:
    """Run `call` and list its operations, in order, with the decision: "fused", or "plain: " and the reason.

    Other choices are listed in the same way: the preferred form, or the alternative and the reason for it, as in
    ("attention", "scaled_dot_product_attention") and ("inner width", "unpadded: the tensor is not on a GPU").
    """
    global _decisions
    before, _decisions = _decisions, []
    try:
        call()
        return _decisions
    finally:
        _decisions = before


def why_plain(
    x: torch.Tensor,
    *,
    limits: Iterable[Limit] = (),
    unless: Mapping[str, bool] | None = None,
    parts: Mapping[str, Part] | None = None,
    products: bool = False,
) -> str | None:
    """Return the reason why `choose` uses the plain definition, or None if it does not."""
    if is_traced(x):  # first: the checks below would cause graph breaks
        return TRACED
    if not (x.is_cuda or interpreted):
        return "the tensor is not on a GPU"
    if _plain_depth or not _enabled():
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
    """Describe the first limit that is exceeded; None if there is none."""
    for name, size, maximum in limits:
        if size > maximum:
            return f"{name} {size} is above {maximum}"
    return None


def prefers(operation: str, form: str, otherwise: str, reason: str | None) -> bool:
    """Whether `operation` uses `form`: it does unless there is a reason for the alternative. Record the decision."""
    _record(operation, form if reason is None else f"{otherwise}: {reason}")
    return reason is None


def splits_stream(x: torch.Tensor, blocks: Iterable[nn.Module]) -> bool:
    """Whether the residual stream passes through `blocks` as two bf16 parts (`ops.stream`)."""
    return prefers("stream", "two parts", "one tensor", _why_one_tensor(x, blocks))


def is_traced(x: torch.Tensor) -> bool:
    """Whether this tensor is seen by a tracer, forward-mode differentiation or a function transform."""
    if torch.compiler.is_compiling():
        return True
    ordinary = isinstance(x, nn.Parameter) or type(x) is torch.Tensor
    return not ordinary or is_transformed(x)


def is_transformed(x: torch.Tensor) -> bool:
    """Whether forward-mode differentiation or a function transform is active, outside of a tracer."""
    if torch.compiler.is_compiling():
        return False
    return torch.autograd.forward_ad._current_level >= 0 or torch._C._functorch.is_functorch_wrapped_tensor(x)


def _why_one_tensor(x: torch.Tensor, blocks: Iterable[nn.Module]) -> str | None:
    device = x.device.type
    if not torch.is_autocast_enabled(device) or torch.get_autocast_dtype(device) != LOW_PRECISION:
        return "autocast to bf16 is off"
    for index, block in enumerate(blocks):
        if not isinstance(block, StreamBlock):
            return f"{type(block).__name__} takes one tensor"
        hooked = first_hook({f"block {index}": block})
        if hooked is not None:
            return hooked
    return None


def _matrix_units(x: torch.Tensor) -> bool:
    """Whether matrix units multiply this tensor under the current autocast and TF32 settings."""
    low = torch.is_autocast_enabled(x.device.type) or x.dtype == torch.bfloat16
    return low or interpreted or torch.backends.cuda.matmul.allow_tf32


def first_hook(parts: Mapping[str, Part]) -> str | None:
    """Describe the first hook on one of these modules or its submodules; None if there is none."""
    for name, part in parts.items():
        for module in part.modules():
            if module._forward_hooks or module._forward_pre_hooks:
                return f"a forward hook is registered on {name}"
            if module._backward_hooks or module._backward_pre_hooks:
                return f"a backward hook is registered on {name}"
    return None


def _record(operation: str, decision: str) -> None:
    if _decisions is not None:
        _decisions.append((operation, decision))


@cache
def _enabled() -> bool:
    return os.environ.get("SIGMASOLVER_FUSED", "1") != "0"


@cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None
