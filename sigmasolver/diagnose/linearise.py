"""A map linearised at a point: repeated products with its Jacobian J and with Jᵀ.

    Jᵀ u   by reverse mode through the graph of f
    J v    by reverse mode through the graph of u -> Jᵀ u, a linear map whose transpose is J

Both graphs are built once, so a product is one backward pass; forward mode would call f again for every product. Two
torch operations have a slow double backward: a convolution also computes the gradient of its weight, channel by
channel, and a layer norm is decomposed. They are replaced by versions whose derivative is again a single kernel. All
derivatives with respect to u are exact; the replacements have no second derivative with respect to x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

__all__ = ["Linearised", "StateMap"]

StateMap = Callable[[torch.Tensor], torch.Tensor]
"""A map between states."""


class Linearised:
    """The Jacobian of `function` at `point`. No graph is built for parameters; memory use is about that of a training
    step."""

    def __init__(self, function: StateMap, point: torch.Tensor) -> None:
        with torch.no_grad():
            with _ReplaceFunctions():
                image, pull = torch.func.vjp(function, point)[:2]
            self._vjp = pull
            self._jvp = torch.func.vjp(lambda u: pull(u)[0], torch.zeros_like(image))[1]

    def __matmul__(self, v: torch.Tensor) -> torch.Tensor:
        """J v."""
        with torch.no_grad():
            return self._jvp(v)[0]

    def transposed(self, u: torch.Tensor) -> torch.Tensor:
        """Jᵀ u."""
        with torch.no_grad():
            return self._vjp(u)[0]


class _ReplaceFunctions(TorchFunctionMode):
    """Replaces the operations in `REPLACEMENTS` while active."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return REPLACEMENTS.get(func, func)(*args, **(kwargs or {}))


class _Convolution(torch.autograd.Function):
    """g -> w * g or, given the output shape, its transpose; each is the derivative of the other."""

    @staticmethod
    def forward(
        g: torch.Tensor, weight: torch.Tensor, options: tuple[Any, ...], shape: torch.Size | None
    ) -> torch.Tensor:
        if shape is None:
            return torch.ops.aten.convolution(g, weight, None, *options)
        # Only its shape and layout are read: channels last in memory, as in all models here.
        like = g.new_empty(shape[0], *shape[2:], shape[1]).movedim(-1, 1)
        return torch.ops.aten.convolution_backward(g, like, weight, None, *options, [True, False, False])[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        g, weight, ctx.options, shape = inputs
        ctx.save_for_backward(weight)
        ctx.input_shape = g.shape if shape is None else None

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return _Convolution.apply(g, *ctx.saved_tensors, ctx.options, ctx.input_shape), None, None, None


class _Norm(torch.autograd.Function):
    """x -> x̂ = (x - mean)/deviation over the last axes; also returns mean and 1/deviation."""

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
    """g -> (g - mean(g) - x̂ mean(x̂ g))/deviation, which is self-adjoint."""

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
    """Convolution with a fast double backward; weights that depend on the input are left to torch."""
    axes = weight.ndim - 2
    weight_varies = torch._C._functorch.is_gradtrackingtensor(weight) and weight.requires_grad
    if weight_varies or isinstance(padding, str) or input.ndim != weight.ndim:
        return original(input, weight, bias, stride, padding, dilation, groups)
    strides, paddings, dilations = (
        [size] * axes if isinstance(size, int) else list(size) for size in (stride, padding, dilation)
    )
    options = (strides, paddings, dilations, False, [0] * axes, groups)
    out = _Convolution.apply(input, weight, options, None)
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


REPLACEMENTS: dict[Any, Callable[..., torch.Tensor]] = {
    **{conv: partial(_convolution, conv) for conv in (F.conv1d, F.conv2d, F.conv3d)},
    F.layer_norm: _layer_norm,
}
"""By torch function, with the same signatures."""
