"""A map linearised at a point: products with its Jacobian J and with Jᵀ, as many as are wanted.

    Jᵀ u   by reverse mode through the graph of f
    J v    by reverse mode through the graph of u -> Jᵀ u, a linear map whose transpose is J

Both graphs are made once, so a product is one backward pass; forward mode would call f again for every product. Two
operations of torch are slow to differentiate twice: a convolution also makes the derivative of its kernel, channel by
channel, and a layer norm is taken apart. They are replaced by twins whose derivative is again one kernel. All
derivatives are exact, for u alone: twins know no second derivative in x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["Linear", "Linearised"]

Linear = Callable[[torch.Tensor], torch.Tensor]
"""A map between states."""


class Linearised:
    """The Jacobian of `function` at `point`. No graph for parameters is made; what is held is about that of a training
    step."""

    def __init__(self, function: Linear, point: torch.Tensor) -> None:
        with torch.no_grad():
            with _Twins():
                image, pull = torch.func.vjp(function, point)[:2]
            self._pull = pull
            self._push = torch.func.vjp(lambda u: pull(u)[0], torch.zeros_like(image))[1]

    def __matmul__(self, v: torch.Tensor) -> torch.Tensor:
        """J v."""
        with torch.no_grad():
            return self._push(v)[0]

    def transposed(self, u: torch.Tensor) -> torch.Tensor:
        """Jᵀ u."""
        with torch.no_grad():
            return self._pull(u)[0]


class _Twins(TorchFunctionMode):
    """Inside, the operations in `TWINS` are replaced."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return TWINS.get(func, func)(*args, **(kwargs or {}))


class _Convolution(torch.autograd.Function):
    """g -> w * g or, given the shape of what comes out, the transpose of that; each is the derivative of the other."""

    @staticmethod
    def forward(g: torch.Tensor, weight: torch.Tensor, how: tuple[Any, ...], shape: torch.Size | None) -> torch.Tensor:
        if shape is None:
            return torch.ops.aten.convolution(g, weight, None, *how)
        # Only its shape and layout are read: channels last in memory, as everywhere here.
        like = g.new_empty(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
        return torch.ops.aten.convolution_backward(g, like, weight, None, *how, [True, False, False])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        g, weight, ctx.how, shape = inputs
        ctx.save_for_backward(weight)
        ctx.other = g.shape if shape is None else None

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return _Convolution.apply(g, *ctx.saved_tensors, ctx.how, ctx.other), None, None, None


class _Norm(torch.autograd.Function):
    """x -> x̂ = (x - mean)/deviation over the last axes; mean and 1/deviation come with it."""

    @staticmethod
    def forward(x: torch.Tensor, shape: Sequence[int], eps: float) -> tuple[torch.Tensor, ...]:
        return torch.native_layer_norm(x, shape, None, None, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        x, ctx.shape, _ = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(x, *output[1:])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, *_: torch.Tensor) -> Any:
        return _NormDerivative.apply(g, *ctx.saved_tensors, ctx.shape), None, None


class _NormDerivative(torch.autograd.Function):
    """g -> (g - mean(g) - x̂ mean(x̂ g))/deviation, which is its own transpose."""

    @staticmethod
    def forward(
        g: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, shape: Sequence[int]
    ) -> torch.Tensor:
        only_x = [True, False, False]
        return torch.ops.aten.native_layer_norm_backward(g, x, shape, mean, scale, None, None, only_x)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs[1:4])
        ctx.shape = inputs[4]

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return _NormDerivative.apply(g, *ctx.saved_tensors, ctx.shape), None, None, None, None


def _convolution(
    original: Callable[..., torch.Tensor],
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Kernels that depend on the point have a derivative of their own: those are left to torch."""
    axes = weight.ndim - 2
    moving = torch._C._functorch.is_gradtrackingtensor(weight) and weight.requires_grad
    if moving or isinstance(padding, str) or input.ndim != weight.ndim:
        return original(input, weight, bias, stride, padding, dilation, groups)
    steps, zeros, holes = ([one] * axes if isinstance(one, int) else list(one) for one in (stride, padding, dilation))
    how = (steps, zeros, holes, False, [0] * axes, groups)
    out = _Convolution.apply(input, weight, how, None)
    return out if bias is None else out + bias.view(-1, *(1,) * axes)


def _layer_norm(
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    out = _Norm.apply(input, tuple(normalized_shape), eps)[0]
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


TWINS: dict[Any, Callable[..., torch.Tensor]] = {
    **{one: partial(_convolution, one) for one in (F.conv1d, F.conv2d, F.conv3d)},
    F.layer_norm: _layer_norm,
}
"""Same signatures as in torch."""
