"""Looking into a model without touching it, and silencing parts of it, by forward hooks that never stay.

    routing --> P          update --> Z, Z⁺          update.attention --> ΔZ = A Z W_v

The hooks only read, so forecasts keep every bit; on a GPU an operator with hooks leaves its fused kernels for the
plain definition, which agrees with them to rounding. An intervention sets the responses of one kind of operator to zero
and leaves parameters and all other paths as they are (app:spectral-physical-complementarity: 𝒮_k from f_joint).

Letters: B batch, H heads, N points, M slices, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from sigmasolver.diagnose.subject import NotApplicable, Subject
from sigmasolver.models.slices import SliceOperator
from sigmasolver.models.spectral import SpectralOperator

__all__ = ["KINDS", "SliceView", "operators", "silenced", "slice_operators", "watching"]

KINDS: dict[str, type[nn.Module]] = {"physical": SliceOperator, "spectral": SpectralOperator}
"""The operators whose responses can be silenced."""


@dataclass(frozen=True)
class SliceView:
    """What one slice operator did in one call."""

    layer: int
    """The number of the operator in the model, counted from 1: in the family, of its block."""
    operator: SliceOperator
    P_BHNM: torch.Tensor
    Z_BHMD: torch.Tensor
    delta_BHMD: torch.Tensor | None
    """ΔZ; None where the slices are kept as they are."""
    updated_BHMD: torch.Tensor


def operators(model: nn.Module, kind: str) -> list[nn.Module]:
    """All operators of this kind, a row of `KINDS`, in the order of the layers."""
    return [module for module in model.modules() if isinstance(module, KINDS[kind])]


def slice_operators(subject: Subject) -> list[SliceOperator]:
    """Those of the subject's model; one sentence where it has none."""
    found = [module for module in subject.forecaster.model.modules() if isinstance(module, SliceOperator)]
    if not found:
        raise NotApplicable(
            f"{subject.recipe.model.name} has no slice operator, so this diagnostic is not defined for it; choose a "
            "model with one, such as transolver-sigma."
        )
    return found


@contextmanager
def watching(model: nn.Module) -> Iterator[list[SliceView]]:
    """Yield a list to which every call of a slice operator adds its view, in the order of the calls."""
    views: list[SliceView] = []
    with ExitStack() as hooks:
        for layer, operator in enumerate(operators(model, "physical"), start=1):
            assert isinstance(operator, SliceOperator)
            _watch(operator, layer, views, hooks)
        yield views


def _watch(operator: SliceOperator, layer: int, views: list[SliceView], hooks: ExitStack) -> None:
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def hook(_: nn.Module, __: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            seen[name] = out.detach()

        return hook

    def finish(_: nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        views.append(SliceView(layer, operator, seen["P"], inputs[0].detach(), seen.pop("delta", None), out.detach()))

    hooks.enter_context(operator.routing.register_forward_hook(keep("P")))
    if operator.update.kind != "keep":
        hooks.enter_context(operator.update.attention.register_forward_hook(keep("delta")))
    hooks.enter_context(operator.update.register_forward_hook(finish))


@contextmanager
def silenced(model: nn.Module, kind: str) -> Iterator[None]:
    """Inside, the response of every operator of this kind is zero; every residual path stays."""

    def hook(_: nn.Module, __: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(out)

    with ExitStack() as hooks:
        for operator in operators(model, kind):
            hooks.enter_context(operator.register_forward_hook(hook))
        yield
