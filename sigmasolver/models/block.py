"""One block, parts swapped (eq:transolver-sigma-block).

    H --- + CPE(H) ---+--- first half:  h + spectral(LN h) ---+--- concat --- + SwiGLU(LN(.)) ---> H
      (shared context) +--- second half: h + physical(LN h) --+                (recomposition)

A block is its context, its stages in order, and its mixing. A stage splits the channels evenly between its
operators; "pass" leaves its share as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import nn

from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import DepthwiseConvolution, LayerNorm, Mixing, SwiGLU, watched
from sigmasolver.models.slices import UPDATES, PhysicalOperator
from sigmasolver.models.spectral import SpectralOperator
from sigmasolver.ops.context import context_norms
from sigmasolver.ops.convolution import depthwise_residual
from sigmasolver.ops.fused.lanes import together
from sigmasolver.ops.mixing import joined, mixing_residual
from sigmasolver.ops.stream import whole

__all__ = ["Block", "BlockSpec", "Branch", "Stage"]

OPERATORS = ("spectral", "physical", "pass")
MIXINGS = ("joint", "grouped")


@dataclass(frozen=True)
class BlockSpec:
    """A row of the table of variants."""

    stages: tuple[tuple[str, ...], ...] = (("spectral", "physical"),)
    context: bool = True
    mixing: str = "joint"
    update: str = "residual"

    def __post_init__(self) -> None:
        if not self.stages or any(not stage or len(stage) > 2 for stage in self.stages):
            raise ValueError(f"stages is {self.stages}; give at least one stage of one or two operators.")
        for operator in (name for stage in self.stages for name in stage):
            if operator not in OPERATORS:
                raise ValueError(f'A stage names "{operator}"; choose from {", ".join(OPERATORS)}.')
        for name, choices in (("mixing", MIXINGS), ("update", UPDATES)):
            if getattr(self, name) not in choices:
                raise ValueError(f'{name} is "{getattr(self, name)}"; choose from {", ".join(choices)}.')
        if self.mixing == "grouped" and len(self.stages[-1]) < 2:
            raise ValueError('mixing "grouped" keeps two channel groups apart, but the last stage has one operator.')


class Branch(nn.Module):
    """h + Phi(LN(h)): one operator on its own share of the channels (eq:block-private)."""

    def __init__(self, width: int, operator: nn.Module) -> None:
        super().__init__()
        self.norm = LayerNorm(width)
        self.operator = operator

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h + self.operator(self.norm(h))


def _branch(kind: str, width: int, spec: BlockSpec, config: SolverConfig) -> nn.Module:
    if kind == "pass":
        return nn.Identity()
    if kind == "spectral":
        config.check_modes()
        return Branch(width, SpectralOperator(width, config.modes_per_axis))
    dropout = config.options.dropout
    return Branch(width, PhysicalOperator(width, config.heads, config.slices, config.padding, spec.update, dropout))


class Stage(nn.Module):
    """Operators on equal shares of the channels; a branch that is the identity passes its share on."""

    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    @property
    def norms(self) -> list[LayerNorm] | None:
        """One for each share, or None where a share is passed on."""
        found = [branch.norm for branch in self.branches if isinstance(branch, Branch)]
        return found if len(found) == len(self.branches) else None

    def forward(self, H: torch.Tensor, normed: list[torch.Tensor] | None = None) -> torch.Tensor:
        return joined(H, self.parts(H, normed))

    def parts(self, H: torch.Tensor, normed: list[torch.Tensor] | None = None) -> list[torch.Tensor | None]:
        """What each operator adds to its share of `H`, given the normed shares where they exist already."""
        shares = H.chunk(len(self.branches), dim=-1)

        def part(place: int) -> torch.Tensor | None:
            branch = self.branches[place]
            if not isinstance(branch, Branch):
                return None
            return branch.operator(branch.norm(shares[place]) if normed is None else normed[place])

        if len(shares) == 1:
            return [part(0)]
        return list(together(partial(part, 0), partial(part, 1), H if normed is None else normed[0]))


class Block(nn.Module):
    """`(B, *grid, width)` -> the same shape; given the rest of a stream (`ops.stream`), the stream and its rest.

    Forward hooks work on the context, the norms, the operators and the mixing, and on their parts. Stages and branches
    are not called as wholes: their additions belong to the passes that join them.
    """

    CONTEXT_KERNEL = 3
    takes_rest = True

    def __init__(self, spec: BlockSpec, config: SolverConfig) -> None:
        super().__init__()
        width = config.width
        self.context = DepthwiseConvolution(width, self.CONTEXT_KERNEL, config.padding) if spec.context else None
        self.stages = nn.ModuleList(
            Stage([_branch(kind, width // len(stage), spec, config) for kind in stage]) for stage in spec.stages
        )
        self.norm = LayerNorm(width)
        groups = len(spec.stages[-1]) if spec.mixing == "grouped" else 1
        self.mixing = Mixing(width, config.options.expansion, groups)

    def forward(
        self, H: torch.Tensor, rest: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]:
        split = rest is not None
        H, rest, normed = self._enter(H, rest)
        *others, last = (cast(Stage, stage) for stage in self.stages)
        for stage in others:
            H, rest, normed = stage(whole(H, rest), normed), None, None
        H, rest = self._leave(H, rest, last.parts(H, normed))
        return (H, rest) if split else H

    def _enter(
        self, H: torch.Tensor, rest: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, list[torch.Tensor] | None]:
        """Context, and the norms of the first stage where they can be had in the same pass."""
        if self.context is None:
            return whole(H, rest), None, None
        norms = cast(Stage, self.stages[0]).norms
        convolution = self.context.weight, self.context.bias
        if watched(self.context):
            H = whole(H, rest)
            return H + self.context(H), None, None
        if norms is None or watched(*norms):
            return depthwise_residual(whole(H, rest), *convolution, self.context.padding), None, None
        affines = [norm.affine for norm in norms]
        return context_norms(H, rest, convolution, self.context.padding, affines, self.norm.eps)

    def _leave(
        self, H: torch.Tensor, rest: torch.Tensor | None, parts: list[torch.Tensor | None]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The branches joined, the channels mixed."""
        joint = cast(SwiGLU, self.mixing.parts[0]) if len(self.mixing.parts) == 1 else None
        if joint is None or watched(self.norm, self.mixing):
            H = joined(whole(H, rest), parts)
            return H + self.mixing(self.norm(H)), None
        gate_up, down = ((layer.weight, layer.bias) for layer in (joint.gate_up, joint.down))
        return mixing_residual(H, rest, parts, self.norm.affine, gate_up, down, self.norm.eps)
