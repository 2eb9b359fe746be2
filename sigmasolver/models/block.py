"""One block, parts swapped (eq:transolver-sigma-block).

    H --- + CPE(H) ---+--- first half:  h + spectral(LN h) ---+--- concat --- + SwiGLU(LN(.)) ---> H
      (shared context) +--- second half: h + physical(LN h) --+                (recomposition)

A block is its context, its stages in order, and its mixing. A stage splits the channels evenly between its
operators; "pass" leaves its share as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import DepthwiseConvolution, LayerNorm, Mixing
from sigmasolver.models.slices import UPDATES, PhysicalOperator
from sigmasolver.models.spectral import SpectralOperator

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
    """Split evenly, update each share, concatenate."""

    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        if len(self.branches) == 1:
            return self.branches[0](H)
        shares = H.chunk(len(self.branches), dim=-1)
        return torch.cat([branch(share) for branch, share in zip(self.branches, shares, strict=True)], dim=-1)


class Block(nn.Module):
    """`(B, *grid, width)` -> the same shape."""

    CONTEXT_KERNEL = 3

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

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        if self.context is not None:
            H = self.context.residual(H)
        for stage in self.stages:
            H = stage(H)
        return H + self.mixing(self.norm(H))
