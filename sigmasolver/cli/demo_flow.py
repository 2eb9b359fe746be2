"""The first thing a newcomer runs: a pretrained model at work, then three small models trained here, and a page.

    forecast a flow of 128 × 128 points with the pretrained model, beside the solver
    simulate 64 small flows -> train on 56 (6 of them validate) -> forecast the 8 that no model has seen
    table, page.html

Everything is the ordinary path of the package with small numbers: the same simulator, trainer, evaluation and page.
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
"""Unseen flows that the page plays."""


@dataclass(frozen=True)
class Size:
    """Which pretrained model is shown, and how much is simulated and learned; the rest of the demo does not change."""

    pretrained: str = "kf2d"
    flows: int = 64
    test: int = 8
    updates: int = 600


def run(screen: Console, out: Path, size: Size | None = None) -> None:
    """Do it all below `out`; existing results are reused."""
    size = Size() if size is None else size
    data = out / "flow.h5"
    screen.print("1  a pretrained model forecasts an unseen case\n")
    with progress(f"forecasting {size.pretrained}", None) as move:
        shown = demonstrate(size.pretrained, torch.device("cpu"), tick=move)
    print_demonstration(screen, shown)
    screen.print(f"\n2  {size.flows} turbulent flows on the periodic square, Reynolds number 250, {DEMO.frames} frames")
    with progress("simulating", size.flows) as move:
        batch = DEMO.batch_size("cpu")
        generate(DEMO, size.flows, 0, data, "cpu", "float32", lambda d, n, part: move(d + part * min(batch, n - d)))
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
        with progress(f"evaluating {name}", None) as move:
            rows += evaluate_run(Run(out / name), tick=move)
    print_scores(screen, rows)
    write_page(out / "page.html", replace(_study(out, data, recipes, rows), opening=_opening(shown)))
    screen.print(f"\npage with both forecasts: {out / 'page.html'}", soft_wrap=True)


def _opening(shown: Demonstration) -> Opening:
    """The flow of the pretrained model, played."""
    card, leads = shown.card, shown.first.leads
    points = " × ".join(map(str, card["test"]["grid"]))
    error, plain = (100 * shown.scores[0][name] for name in ("value", "yardstick"))
    length = shown.dimensions.time(leads[-1])
    return Opening(
        title=TITLES.get(card["task"], f"{card['task']}, forecast by a pretrained model"),
        summary=f"This case was not in the training data of the model. On {points} points it forecasts {len(leads)} "
        f"frame{'s' * (len(leads) > 1)}{f', up to {length}' if length else ''}, with a relative L2 error of "
        f"{error:.3g} %; {card['test']['yardstick']}, an untrained baseline, has {plain:.3g} %. "
        f"{card['parameters']:,} parameters, trained for {card['training']['updates']:,} updates.",
        animation=shown.animation(),
        table=shown.table(),
    )


def _recipes(size: Size) -> Iterator[Recipe]:
    """Transolver-σ and its single-domain counterparts, each at the width that comes nearest to its size."""
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
    known, drawn = dimensions_of([out / name for name in recipes], rows), curves(rows)
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
        summary=" ".join((summary, *headline(drawn, known))),
        curves=drawn,
        table=comparison(rows, known),
        facts=facts,
        films=_films(out, data, recipes, known),
        sample=sample_of(rows),
        dimensions=known,
        records=[row for row in rows if row["metric"] in ("relative_l2", "relative_l2_lead", "parameters")],
    )


def _films(out: Path, data: Path, recipes: dict[str, Recipe], known: Dimensions) -> tuple[Maps, ...]:
    """The first starts of the first unseen flows."""
    task, windows_of = (recipe := next(iter(recipes.values()))).task, recipe.evaluation_windows()
    with open_store(data) as store:
        unseen = range(len(store) - task.test, len(store))[:CASES]
        starts = [Windows(store, [flow], windows_of).batch([0]) for flow in unseen]
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
            unit=known.unit("vorticity"),
            axes=(known.axis(0, task.grid[0]), known.axis(1, task.grid[1])),
        )
        for case in range(len(history))
    )
