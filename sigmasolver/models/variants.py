"""The family as rows: the model, its single-domain counterparts, and every ablation of tab:ablation-components."""

from __future__ import annotations

import bisect
from dataclasses import replace

import torch

from sigmasolver.models.block import BlockSpec
from sigmasolver.models.config import Options, SolverConfig
from sigmasolver.models.solver import Solver
from sigmasolver.settings import row

__all__ = ["VARIANTS", "build_model", "build_solver", "count_parameters", "list_models", "matched_width"]

SIGMA = BlockSpec()
VARIANTS: dict[str, BlockSpec] = {
    "transolver-sigma": SIGMA,
    "physolver": replace(SIGMA, stages=(("physical",),)),
    "specsolver": replace(SIGMA, stages=(("spectral",),)),
    "no-physical": replace(SIGMA, stages=(("spectral", "pass"),)),
    "no-spectral": replace(SIGMA, stages=(("pass", "physical"),)),
    "physical-then-spectral": replace(SIGMA, stages=(("physical",), ("spectral",))),
    "spectral-then-physical": replace(SIGMA, stages=(("spectral",), ("physical",))),
    "no-context": replace(SIGMA, context=False),
    "grouped-mixing": replace(SIGMA, mixing="grouped"),
    "slice-replace": replace(SIGMA, update="replace"),
    "slice-keep": replace(SIGMA, update="keep"),
}


def list_models() -> tuple[str, ...]:
    """The names that `build_model` knows."""
    return tuple(VARIANTS)


def build_model(
    name: str,
    *,
    grid: tuple[int, ...],
    in_channels: int,
    out_channels: int,
    width: int = 128,
    depth: int = 8,
    heads: int = 8,
    slices: int = 32,
    modes: int | tuple[int, ...] = 4,
    options: Options | None = None,
) -> Solver:
    """A freshly initialised solver; `torch.manual_seed` before the call fixes its weights."""
    row(VARIANTS, name, "model")  # an unknown name is the first thing to say
    config = SolverConfig(
        grid, in_channels, out_channels, width, depth, heads, slices, modes, Options() if options is None else options
    )
    return build_solver(name, config)


def build_solver(name: str, config: SolverConfig) -> Solver:
    """`build_model` for sizes that are already one value."""
    return Solver(row(VARIANTS, name, "model"), config)


def count_parameters(name: str, config: SolverConfig) -> int:
    """Real numbers to be learned; built without memory, so that any size can be asked for."""
    with torch.device("meta"):
        return sum(p.numel() for p in build_solver(name, config).parameters())


def matched_width(name: str, config: SolverConfig, target: int | None = None) -> int:
    """The width at which variant `name` comes nearest to `target` parameters (None: those of transolver-sigma).

    At equal width the variants differ in size (a full-width spectral stage has four times the weights of a half one);
    comparing them at an equal budget needs another width for each.
    """
    target = count_parameters("transolver-sigma", config) if target is None else target
    unit = 2 * config.heads
    widths = range(unit, 4 * config.width + unit, unit)

    def count(width: int) -> int:
        return count_parameters(name, replace(config, width=width))

    if not count(widths[0]) <= target <= count(widths[-1]):
        raise ValueError(
            f"{name} has {count(widths[0]):,} to {count(widths[-1]):,} parameters at widths {widths[0]} to "
            f"{widths[-1]}; {target:,} is outside."
        )
    first_above = bisect.bisect_left(widths, target, key=count)
    return min(widths[max(first_above - 1, 0) : first_above + 1], key=lambda width: abs(count(width) - target))
