"""The demo: a pretrained model forecasts a flow, three small models are trained, and a page shows both.

    forecast a flow of 128 × 128 points with the pretrained model, next to the solver
    simulate 64 small flows -> train on 56 (6 of them validate) -> forecast the 8 that no model has seen
    table, page.html

It runs the regular simulator, trainer, evaluation and page at small sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from sigmasolver.cli.forecast import print_demonstration
from sigmasolver.cli.terminal import print_scores, progress, training
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows
from sigmasolver.evaluate import evaluate_run
from sigmasolver.experiments.records import dimensions_of
from sigmasolver.forecast import rollout
from sigmasolver.forecast.checkpoint import load
from sigmasolver.model_cards.demonstrate import Demonstration, demonstrate
from sigmasolver.models import Options, matched_width
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.report.assemble import headline
from sigmasolver.report.page import write_page
from sigmasolver.report.sample import sample_of
from sigmasolver.report.study import Dimensions, Maps, Opening, Study
from sigmasolver.report.tables import comparison, curves
from sigmasolver.runs import Run
from sigmasolver.runtime.parallel import World
from sigmasolver.simulate.generate import generate
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.tasks import Task
from sigmasolver.train.job import train_run

__all__ = ["MODELS", "Size", "run"]

MODELS = ("transolver-sigma", "physolver", "specsolver")
TITLES = {"kf2d": "Turbulence at Reynolds number 1000, forecast by a pretrained model"}
SEED = 42
CASES = 3
"""Number of unseen flows animated on the page."""


@dataclass(frozen=True)
class Size:
    """The pretrained model to show, and the amount of simulation and training."""

    pretrained: str = "kf2d"
    flows: int = 64
    test: int = 8
    updates: int = 600


def run(screen: Console, out: Path, size: Size | None = None) -> None:
    """Run the demo in `out`; existing results are reused."""
    size = Size() if size is None else size
    data = out / "flow.h5"
    screen.print("1  a pretrained model forecasts an unseen case\n")
    with progress(f"forecasting {size.pretrained}", None) as update:
        demonstration = demonstrate(size.pretrained, torch.device("cpu"), tick=update)
    print_demonstration(screen, demonstration)
    screen.print(f"\n2  {size.flows} turbulent flows on the periodic square, Reynolds number 250, {DEMO.frames} frames")
    with progress("simulating", size.flows) as update:
        batch = DEMO.batch_size("cpu")
        generate(DEMO, size.flows, 0, data, "cpu", "float32", lambda d, n, part: update(d + part * min(batch, n - d)))
    screen.print(f"3  {len(MODELS)} models of equal size, {size.updates} steps each, on {size.flows - size.test} flows")
    recipes = {recipe.model.name: recipe for recipe in _recipes(size)}
    for name, recipe in recipes.items():
        screen.print(f"   {name}, width {recipe.model.width}")
        with training(World()) as watch:
            train_run(recipe, data, Run(out / name), watch=watch)
    task = next(iter(recipes.values())).task
    screen.print(f"4  free rollouts of {task.horizon} frames on {size.test} unseen flows\n")
    rows: list[dict[str, Any]] = []
    for name in recipes:
        with progress(f"evaluating {name}", None) as update:
            rows += evaluate_run(Run(out / name), tick=update)
    print_scores(screen, rows)
    write_page(out / "page.html", replace(_study(out, data, recipes, rows), opening=_opening(demonstration)))
    screen.print(f"\npage with both forecasts: {out / 'page.html'}", soft_wrap=True)


def _opening(demonstration: Demonstration) -> Opening:
    """The animated forecast of the pretrained model."""
    card, leads = demonstration.card, demonstration.first.leads
    points = " × ".join(map(str, card["test"]["grid"]))
    error, baseline_error = (100 * demonstration.scores[0][name] for name in ("value", "yardstick"))
    duration = demonstration.dimensions.time(leads[-1])
    return Opening(
        title=TITLES.get(card["task"], f"{card['task']}, forecast by a pretrained model"),
        summary=f"This case was not in the training data of the model. On {points} points it forecasts {len(leads)} "
        f"frame{'s' * (len(leads) > 1)}{f', up to {duration}' if duration else ''}, with a relative L2 error of "
        f"{error:.3g} %; {card['test']['yardstick']}, a trivial baseline, has {baseline_error:.3g} %. "
        f"{card['parameters']:,} parameters, trained for {card['training']['updates']:,} updates.",
        animation=demonstration.animation(),
        table=demonstration.table(),
    )


def _recipes(size: Size) -> Iterator[Recipe]:
    """Transolver-σ and its single-domain counterparts, each at the width whose parameter count is closest to it."""
    fields = ("vorticity",)
    task = Task(
        "demo", fields, fields, (32, 32), 2, 1, 10, size.flows - size.test, size.test, "channel", space_stride=2
    )
    options = Options(padding=("circular", "circular"))
    model = ModelRecipe("transolver-sigma", width=32, depth=3, heads=2, slices=16, modes=8, options=options)
    train = TrainRecipe(updates=size.updates, batch=4, lr=5e-3, clip=1.0, checks=4, seed=SEED)
    for name in MODELS:
        width = matched_width(name, model.config(task))
        yield Recipe(task, replace(model, name=name, width=width), train)


def _study(out: Path, data: Path, recipes: dict[str, Recipe], rows: list[dict[str, Any]]) -> Study:
    first, recipe = rows[0], next(iter(recipes.values()))
    dimensions, error_curves = dimensions_of([out / name for name in recipes], rows), curves(rows)
    facts = (
        ("machine", first["machine"]),
        ("commit", first["commit"]),
        ("package", f"sigmasolver {first['package']}, torch {first['torch']}"),
        ("precision", first["precision"]),
        ("seed", f"{recipe.train.seed} for training, 0 for the flows"),
        ("budget", f"{recipe.train.updates} steps of {recipe.train.batch} windows for each model"),
        ("data", first["data"]),
        ("date", first["date"]),
    )
    summary = (
        "Three models of nearly equal size were trained to predict the next frame of a two-dimensional turbulent "
        f"flow from the previous {recipe.task.history}, on a grid of {' × '.join(map(str, recipe.task.grid))}. Here "
        f"they run freely for {recipe.task.horizon} frames on their own forecasts, from {first['windows']} windows "
        f"of {recipe.task.test} unseen flows. The training is short: the numbers demonstrate the workflow from "
        "simulation to forecast, not what the models can achieve."
    )
    return Study(
        title="A small flow, forecast by three models trained here",
        summary=" ".join((summary, *headline(error_curves, dimensions))),
        curves=error_curves,
        table=comparison(rows, dimensions),
        facts=facts,
        animations=_animations(out, data, recipes, dimensions),
        sample=sample_of(rows),
        dimensions=dimensions,
        records=[row for row in rows if row["metric"] in ("relative_l2", "relative_l2_lead", "parameters")],
    )


def _animations(out: Path, data: Path, recipes: dict[str, Recipe], dimensions: Dimensions) -> tuple[Maps, ...]:
    """Forecasts from the first window of each of the first unseen flows."""
    task, spec = (recipe := next(iter(recipes.values()))).task, recipe.evaluation_window_spec()
    with open_store(data) as store:
        unseen = range(len(store) - task.test, len(store))[:CASES]
        starts = [Windows(store, [flow], spec).batch([0]) for flow in unseen]
    history, future = (torch.cat(parts) for parts in zip(*starts, strict=True))
    with torch.no_grad():
        forecasts = {name: rollout(load(out / name), history, task.horizon).frames.numpy() for name in recipes}
    leads = tuple(range(1, task.horizon + 1))
    return tuple(
        Maps(
            "vorticity",
            leads,
            future[case, ..., 0].numpy(),
            {name: frames[case, ..., 0] for name, frames in forecasts.items()},
            case=str(case + 1),
            unit=dimensions.unit("vorticity"),
            axes=(dimensions.axis(0, task.grid[0]), dimensions.axis(1, task.grid[1])),
        )
        for case in range(len(history))
    )
