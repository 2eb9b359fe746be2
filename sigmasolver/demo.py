"""The first thing a newcomer runs: the model at the size of the Darcy task, two grids, and the whole family."""

from __future__ import annotations

import time

import torch
from rich.console import Console
from rich.table import Table

from sigmasolver.models import SolverConfig, build_model, count_parameters, list_models, matched_width

__all__ = ["run"]

SEED = 0
FINE = 421
STRIDES = (5, 3)
"""Every fifth and every third point of a 421-point axis: the 85- and 141-point grids of the Darcy task."""


def smooth_field(points: int) -> torch.Tensor:
    """A random field of the lowest sine waves on the closed unit square, (1, points, points, 1)."""
    x = torch.linspace(0, torch.pi, points)
    waves = torch.sin(torch.outer(torch.arange(1, 7), x))
    amplitudes = torch.randn(6, 6) / torch.arange(1, 7).square()[:, None] / torch.arange(1, 7).square()
    return (waves.T @ amplitudes @ waves)[None, ..., None]


def run(console: Console) -> None:
    torch.manual_seed(SEED)
    model = build_model("transolver-sigma", grid=(85, 85), in_channels=1, out_channels=1).eval()
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"[bold]Transolver-σ[/bold] at the size of the Darcy task: {parameters:,} parameters, "
        f"{4 * parameters / 1e6:.2f} MB in float32, untrained, seed {SEED}."
    )
    field, outputs = smooth_field(FINE), []
    for stride in STRIDES:
        x = field[:, ::stride, ::stride]
        with torch.inference_mode():
            start = time.perf_counter()
            outputs.append(model(x))
        seconds = time.perf_counter() - start
        console.print(f"  one model on a {x.shape[1]} × {x.shape[2]} field: {seconds:.2f} s on this machine")
    coarse, fine = (
        y[:, ::other, ::other] for y, other in zip(outputs, reversed(STRIDES), strict=True)
    )  # every 15th point of the 421: the points that both grids have
    console.print(
        f"  where the two grids share a point, the outputs differ by {(coarse - fine).norm() / fine.norm():.1%} "
        f"(kernels reach a fixed number of points)\n"
    )
    console.print(family_table(SolverConfig((85, 85), 1, 1)))


def family_table(config: SolverConfig) -> Table:
    """All variants at one size, and the width at which each comes nearest to Transolver-σ in parameters."""
    table = Table(
        title=f"The family at width {config.width}, depth {config.depth}, {config.heads} heads, "
        f"{config.slices} slices, {config.modes} modes",
        title_justify="left",
    )
    table.add_column("model")
    table.add_column("parameters", justify="right")
    table.add_column("MB", justify="right")
    table.add_column("width for equal size", justify="right")
    for name in list_models():
        parameters = count_parameters(name, config)
        width = matched_width(name, config)
        table.add_row(name, f"{parameters:,}", f"{4 * parameters / 1e6:.2f}", str(width))
    return table
