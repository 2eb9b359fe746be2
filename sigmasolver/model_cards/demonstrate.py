"""Run a pretrained model on its unseen windows on this machine, next to the solver."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sigmasolver import pretrained
from sigmasolver.data.domain import Domain
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows
from sigmasolver.experiments.records import dimensions_in
from sigmasolver.forecast import Forecaster
from sigmasolver.forecast.checkpoint import load, load_recipe
from sigmasolver.forecast.files import spread_message, write_forecast
from sigmasolver.forecast.replay import Replay
from sigmasolver.forecast.symmetric import symmetric_rollout
from sigmasolver.model_cards.score import SolverRow, card_errors, score, seconds_of_model, shipped_windows, time_solver
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.recipes import Recipe
from sigmasolver.report.animation import animate
from sigmasolver.report.study import AnimatedPng, Dimensions, Maps, Table
from sigmasolver.runs import Run, provenance, read_facts
from sigmasolver.symmetries import symmetries_of

__all__ = ["ERRORS", "Demonstration", "demonstrate"]

ERRORS = {"relative_l2": "relative L2", "relative_l2_final": "relative L2, final frame"}


@dataclass(frozen=True)
class Average:
    """Forecasts of the unseen windows averaged over symmetries."""

    symmetries: int
    frames: torch.Tensor
    """(windows, horizon, *grid, q)"""
    errors: list[float]
    """In the order of the card."""
    seconds: float
    """Time for one case."""
    message: str
    """A line about how much the forecasts differ."""


@dataclass(frozen=True)
class Demonstration:
    """Results of a pretrained model on this machine."""

    card: dict[str, Any]
    scores: list[dict[str, Any]]
    seconds: float
    """Time of the model for one case."""
    solver: list[SolverRow]
    machine: str
    first: Maps
    """Truth and forecast of the first window, in its first field."""
    dimensions: Dimensions
    message: str | None
    """A line about the file that was written."""
    average: Average | None = None

    def table(self) -> Table:
        """The model, the trivial baseline and the solver: errors, and seconds for one case."""
        card, count = self.card, len(self.scores)
        errors = tuple(f"{row['field']}, {ERRORS[row['metric']]}" for row in self.scores)
        model_errors, baseline_errors = (
            [_percent(row[name]) for row in self.scores] for name in ("value", "yardstick")
        )
        rows = [
            (f"{card['model']}, {_grid(card['test']['grid'])}", *model_errors, _time(self.seconds)),
            (card["test"]["yardstick"], *baseline_errors, "–"),
        ]
        if self.average is not None:
            label = f"{card['model']}, mean over {self.average.symmetries} symmetries"
            rows.insert(1, (label, *map(_percent, self.average.errors), _time(self.average.seconds)))
        for solver in self.solver:
            solver_errors = (
                ["the truth"] * count if solver.errors is None else [_percent(error) for error in solver.errors]
            )
            rows.append((f"solver, {_grid(solver.grid)}", *solver_errors, _time(solver.seconds)))
        cases = f"{card['windows']['count']} unseen case{'s' * (card['windows']['count'] > 1)}"
        return Table(
            ("", *errors, "time per case"),
            tuple(rows),
            caption=f"Mean over {cases}; times on {self.machine}, one case at a time. {self._solver_note()}",
        )

    def animation(self) -> AnimatedPng:
        """An animation of the first window, next to the numerical solution."""
        return animate(self.first, self.card["model"], self.dimensions, "numerical solver", enlarged=3)

    def _solver_note(self) -> str:
        if not self.solver:
            return ""
        flow = ": it continues from the last input frame at full resolution" if self.card["test"]["horizon"] > 1 else ""
        return f"The errors of the solver are taken from the model card{flow}."


def demonstrate(
    name: str,
    device: torch.device,
    precision: str = "float32",
    out: Path | None = None,
    tick: Callable[[int, int], None] | None = None,
    symmetries: int = 1,
) -> Demonstration:
    """Forecast the unseen windows of a pretrained model and time the solver; writes the forecasts to `out` if given.
    With several `symmetries` their mean is scored too, and is what is written."""
    if symmetries < 1:
        raise ValueError(f"The number of symmetries must be at least 1, got {symmetries}.")
    folder, card = pretrained.folder(name), pretrained.card(name)
    recipe, forecaster = load_recipe(Run(folder)), Replay(load(folder, device), precision)
    with open_store(folder / "windows.h5") as store:
        windows = shipped_windows(store, recipe)
        scores = score(forecaster, windows, recipe, device, tick)
        average = _average(forecaster, windows, recipe, device, symmetries) if symmetries > 1 else None
        seconds = seconds_of_model(windows, recipe, forecaster, device)
        solver = time_solver(windows, recipe, card["solver"]["rows"], device)
        layout = store.header.layout
        dimensions = dimensions_in(Domain.of(layout, windows.fields, windows.times))
        count = len(windows) if out is not None else 1
        frames = _forecasts(forecaster, windows, recipe, device, count) if average is None else average.frames
        message = None
        if out is not None:
            units = dict(zip(layout.fields, layout.units, strict=True))
            layout = replace(
                layout,
                fields=recipe.task.targets,
                units=tuple(units[field] for field in recipe.task.targets),
                times=layout.times[-recipe.task.horizon :],
            )
            facts: dict[str, Any] = {} if average is None else {"symmetries": symmetries}
            facts |= {"run": name, "step": read_facts(Run(folder).weights)["step"], "start": "windows of the package"}
            message = write_forecast(out, frames.numpy(), layout, facts)
        first = _first_maps(windows, frames[0], recipe, dimensions)
    machine = provenance(device)["machine"]
    return Demonstration(card, scores, seconds, solver, machine, first, dimensions, message, average)


def _average(
    forecaster: Forecaster, windows: Windows, recipe: Recipe, device: torch.device, symmetries: int
) -> Average:
    group, horizon = symmetries_of(recipe.task), recipe.task.horizon
    histories, future = windows.batch(range(len(windows)))
    start = time.perf_counter()
    with matmul_precision("float32"):
        averages = [
            symmetric_rollout(forecaster, history[None].to(device), horizon, group, symmetries) for history in histories
        ]
    frames = torch.cat([average.mean.frames.cpu() for average in averages])
    seconds = (time.perf_counter() - start) / len(histories)
    ratios = torch.cat([average.relative_spread().cpu() for average in averages])
    errors = card_errors(frames, future, recipe)
    return Average(symmetries, frames, errors, seconds, spread_message(ratios, symmetries))


def _forecasts(
    forecaster: Forecaster, windows: Windows, recipe: Recipe, device: torch.device, count: int
) -> torch.Tensor:
    """Forecasts of the first `count` windows."""
    with torch.no_grad(), matmul_precision("float32"):
        return torch.cat(
            [
                forecaster.rollout(windows.batch([index])[0].to(device), recipe.task.horizon).frames.cpu()
                for index in range(count)
            ]
        )


def _first_maps(windows: Windows, frames: torch.Tensor, recipe: Recipe, dimensions: Dimensions) -> Maps:
    _, future = windows.batch([0])
    field = recipe.task.targets[0]
    return Maps(
        field,
        tuple(range(1, len(frames) + 1)),
        future[0, ..., 0].numpy(),
        {recipe.model.name: frames[..., 0].numpy()},
        unit=dimensions.unit(field),
        axes=(dimensions.axis(0, frames.shape[1]), dimensions.axis(1, frames.shape[2])),
    )


def _grid(points: list[int] | tuple[int, ...]) -> str:
    return " × ".join(map(str, points))


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
