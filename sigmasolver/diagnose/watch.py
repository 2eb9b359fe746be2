"""Inspect a model, or silence some of its operators, with temporary forward hooks.

    routing --> P          update --> Z, Z⁺          update.attention --> ΔZ = A Z W_v

The inspection hooks only read, so forecasts stay bit-identical; on a GPU an operator with hooks falls back from its
fused kernels to the plain definition, which agrees to round-off. An intervention zeroes the output of one kind of
operator and leaves all parameters and other paths unchanged (app:spectral-physical-complementarity: 𝒮_k from f_joint).

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

__all__ = ["OPERATOR_CLASSES", "SliceView", "operators", "record_slices", "silenced", "slice_operators"]

OPERATOR_CLASSES: dict[str, type[nn.Module]] = {"physical": SliceOperator, "spectral": SpectralOperator}
"""The operators whose output can be silenced."""


@dataclass(frozen=True)
class SliceView:
    """Tensors of one slice operator in one call."""

    layer: int
    """Index of the operator in the model, counted from 1; in models of the family, that of its block."""
    operator: SliceOperator
    P_BHNM: torch.Tensor
    Z_BHMD: torch.Tensor
    delta_BHMD: torch.Tensor | None
    """ΔZ; None if the update keeps the slices."""
    updated_BHMD: torch.Tensor


def operators(model: nn.Module, kind: str) -> list[nn.Module]:
    """All operators of this kind (a key of `OPERATOR_CLASSES`), in layer order."""
    return [module for module in model.modules() if isinstance(module, OPERATOR_CLASSES[kind])]


def slice_operators(subject: Subject) -> list[SliceOperator]:
    """The slice operators of the subject's model; raise `NotApplicable` if it has none."""
    matches = [module for module in subject.forecaster.model.modules() if isinstance(module, SliceOperator)]
    if not matches:
        raise NotApplicable(
            f"{subject.recipe.model.name} has no slice operator of Transolver's form, so this diagnostic is not "
            "defined for it; choose a model with one, such as transolver-sigma."
        )
    return matches


@contextmanager
def record_slices(model: nn.Module) -> Iterator[list[SliceView]]:
    """Yield a list to which every call of a slice operator appends its view, in call order."""
    views: list[SliceView] = []
    with ExitStack() as hooks:
        for layer, operator in enumerate(operators(model, "physical"), start=1):
            assert isinstance(operator, SliceOperator)
            _watch(operator, layer, views, hooks)
        yield views


def _watch(operator: SliceOperator, layer: int, views: list[SliceView], hooks: ExitStack) -> None:
    seen: dict[str, torch.Tensor] = {}

    def store(name: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...], torch.Tensor], None]:
        def hook(_: nn.Module, __: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
            seen[name] = out.detach()

        return hook

    def append_view(_: nn.Module, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        views.append(SliceView(layer, operator, seen["P"], inputs[0].detach(), seen.pop("delta", None), out.detach()))

    hooks.enter_context(operator.routing.register_forward_hook(store("P")))
    if operator.update.kind != "keep":
        hooks.enter_context(operator.update.attention.register_forward_hook(store("delta")))
    hooks.enter_context(operator.update.register_forward_hook(append_view))


@contextmanager
def silenced(model: nn.Module, kind: str) -> Iterator[None]:
    """Zero the output of every operator of this kind inside the context; residual paths stay."""

    def hook(_: nn.Module, __: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(out)

    with ExitStack() as hooks:
        for operator in operators(model, kind):
            hooks.enter_context(operator.register_forward_hook(hook))
        yield
