"""The block of Transolver-sigma, with exchangeable parts (eq:transolver-sigma-block).

    H --- + CPE(H) ---+--- first half:  h + spectral(LN h) ---+--- concat --- + SwiGLU(LN(.)) ---> H
      (shared context) +--- second half: h + physical(LN h) --+                (recomposition)

A block consists of a context, one or more stages in sequence, and a mixing. A stage splits the channels evenly among
its operators; "pass" is the identity on its share. The first norms are computed together with the context and the last
responses are added together with the mixing, so that each line of `Block.forward` is one (fusible) operation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import nn

from sigmasolver.models.config import SolverConfig
from sigmasolver.models.layers import DepthwiseConvolution, LayerNorm, linear
from sigmasolver.models.slices import UPDATES, PhysicalOperator
from sigmasolver.models.spectral import SpectralOperator
from sigmasolver.ops.context import add_context
from sigmasolver.ops.mixing import add_mixing, joined
from sigmasolver.ops.modules import Affine, affine_of
from sigmasolver.ops.side_streams import run_concurrently
from sigmasolver.ops.stream import Residual, StreamBlock
from sigmasolver.ops.swiglu import swiglu

__all__ = ["Block", "BlockSpec", "Branch", "Mixing", "Stage", "SwiGLU"]

OPERATORS = ("spectral", "physical", "pass")
MIXINGS = ("joint", "grouped")


@dataclass(frozen=True)
class BlockSpec:
    """The parts of a block; one row of `variants.VARIANTS`."""

    stages: tuple[tuple[str, ...], ...] = (("spectral", "physical"),)
    context: bool = True
    mixing: str = "joint"
    update: str = "residual"

    def __post_init__(self) -> None:
        if not self.stages or any(not stage or len(stage) > 2 for stage in self.stages):
            raise ValueError(f"stages is {self.stages}; give at least one stage of one or two operators.")
        for operator in (name for stage in self.stages for name in stage):
            if operator not in OPERATORS:
                raise ValueError(f'Unknown operator "{operator}"; choose from {", ".join(OPERATORS)}.')
        for name, value, choices in (("mixing", self.mixing, MIXINGS), ("update", self.update, UPDATES)):
            if value not in choices:
                raise ValueError(f'{name} is "{value}"; choose from {", ".join(choices)}.')
        if self.mixing == "grouped" and len(self.stages[-1]) < 2:
            raise ValueError('mixing "grouped" needs two channel groups, but the last stage has one operator.')


class Branch(nn.Module):
    """h + Phi(LN(h)): a pre-norm residual operator on its share of the channels (eq:block-private)."""

    def __init__(self, width: int, operator: nn.Module) -> None:
        super().__init__()
        self.norm = LayerNorm(width)
        self.operator = operator

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = h + self.operator(self.norm(h))
        return out


def _branch(kind: str, width: int, spec: BlockSpec, config: SolverConfig) -> nn.Module:
    if kind == "pass":
        return nn.Identity()
    if kind == "spectral":
        config.check_modes()
        return Branch(width, SpectralOperator(width, config.modes_per_axis, config.domain_padding))
    dropout = config.options.dropout
    return Branch(width, PhysicalOperator(width, config.heads, config.slices, config.padding, spec.update, dropout))


class Stage(nn.Module):
    """Operators on equal shares of the channels; a branch may be the identity."""

    def __init__(self, branches: list[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    @property
    def norms(self) -> list[nn.Module]:
        """LN of each share; the identity has none and stands for itself."""
        return [branch.norm if isinstance(branch, Branch) else branch for branch in self.branches]

    def forward(self, shares: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """LN(h) of each share -> Phi(LN(h)); None for the identity."""

        def respond(index: int) -> torch.Tensor | None:
            branch = self.branches[index]
            if not isinstance(branch, Branch):
                return None
            response: torch.Tensor = branch.operator(shares[index])
            return response

        if len(shares) == 1:
            return [respond(0)]
        return list(run_concurrently(partial(respond, 0), partial(respond, 1), shares[0]))


class SwiGLU(nn.Module):
    """eq:swiglu-implementation with inner width floor(2 expansion width / 3)."""

    def __init__(self, width: int, expansion: int) -> None:
        super().__init__()
        inner = 2 * expansion * width // 3
        self.gate_up = linear(width, 2 * inner)
        self.down = linear(inner, width)

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        return swiglu(H, self.gate_up.weight, self.gate_up.bias, self.down.weight, self.down.bias)


class Mixing(nn.Module):
    """SwiGLU on each of `groups` equal channel groups; a single group mixes all channels."""

    def __init__(self, width: int, expansion: int, groups: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(SwiGLU(width // groups, expansion) for _ in range(groups))

    @property
    def maps(self) -> tuple[Affine, Affine] | None:
        """Gate/up projection and down projection of the only SwiGLU; None with several groups."""
        if len(self.parts) > 1:
            return None
        joint = cast(SwiGLU, self.parts[0])
        return affine_of(joint.gate_up), affine_of(joint.down)

    def forward(self, H: torch.Tensor) -> torch.Tensor:
        groups = H.chunk(len(self.parts), dim=-1)
        responses = [part(group) for part, group in zip(self.parts, groups, strict=True)]
        return responses[0] if len(responses) == 1 else torch.cat(responses, dim=-1)


class Block(StreamBlock):
    """`(B, *grid, width)` -> the same shape; the residual stream in either form of `ops.stream`.

    Forward hooks fire on all submodules but the branches: `Branch.forward` is bypassed, since its norm is computed with
    the context and its residual added with the mixing.
    """

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

    def forward(self, H: Residual) -> Residual:
        first, *others = (cast(Stage, stage) for stage in self.stages)
        H, shares = add_context(H, self.context, first.norms)  # eq:block-context
        responses = first(shares)  # eq:block-private
        for stage in others:  # sequential hybrids
            H, shares = add_context(joined(H, responses), None, stage.norms)
            responses = stage(shares)
        return add_mixing(H, responses, self.norm, self.mixing)  # eq:block-recompose
