"""Which settings matter for the error: one factor at a time, at a size for a CPU.

    python benchmarks/screening.py kolmogorov --work SCRATCH --out results/screening.jsonl
    python benchmarks/screening.py darcy --work SCRATCH --out results/screening_darcy.jsonl
    python benchmarks/screening.py kolmogorov --table results/screening.jsonl

Transolver-σ is trained with the protocol and the settings of the paper, on small flows (Reynolds number 250 on 32²; ten
frames in, blocks of four, sixteen forecast) or on few Darcy cases (29²). Each factor changes one setting: those of
`suite factors` that make sense here, and others that would be expensive to screen at full size: initialisation,
normaliser, pushforward, augmentation by symmetries, and the data themselves (integrator, resolution, spin-up, frame
spacing), where training and test flows change together. Rows are relative L2 errors on the test split: all frames and,
of flows, the first and the last lead; of Darcy also on the training split. Finished trainings are not repeated.
`--updates` trains longer, since a setting that helps a short training may not help a long one.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from measure import append_rows
from torch import nn

from sigmasolver.evaluate import Request, evaluate_run
from sigmasolver.models import SolverConfig, list_models, register_model
from sigmasolver.models.spectral import SpectralOperator
from sigmasolver.models.variants import build_solver
from sigmasolver.recipes import ModelRecipe, Recipe, changed, recipe_of
from sigmasolver.recipes.suites import FACTORS as SUITE_FACTORS
from sigmasolver.report.study import TRIVIAL_BASELINES
from sigmasolver.runs import Run
from sigmasolver.settings import lookup
from sigmasolver.simulate.darcy import Darcy
from sigmasolver.simulate.generate import generate
from sigmasolver.simulate.simulator import Simulator
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.tasks import Task
from sigmasolver.train.job import train_run

LARGE, CASES = SUITE_FACTORS["kf2d"], SUITE_FACTORS["darcy"]


@dataclass(frozen=True)
class Factor:
    """One change: settings of the recipe, of the flow, or the initial weights of linear maps and spectral operators."""

    settings: tuple[str, ...] = ()
    flow: dict[str, object] = field(default_factory=dict)
    linear: Callable[[int], float] | None = None
    """Standard deviation of the initial weights by the number of inputs; none: 0.02."""
    spectral: float | None = None


PUSHFORWARD = ("train.objective=pushforward", "train.calls=2", "train.push_every=2")  # in the second half
IMPROVED = LARGE["circular"] + LARGE["clip-1"]
FLOW_FACTORS = {
    **{name: Factor(settings) for name, settings in LARGE.items() if name not in ("tf32", "float32", "ema")},
    "circular-clip-1": Factor(IMPROVED),
    "circular-clip-1-peak-2e-3": Factor(IMPROVED + LARGE["peak-2e-3"]),
    "circular-clip-1-peak-4e-3": Factor((*IMPROVED, "train.lr=4e-3")),
    "circular-clip-1-peak-8e-3": Factor((*IMPROVED, "train.lr=8e-3")),
    "circular-clip-1-muon": Factor(IMPROVED + LARGE["muon"]),
    "circular-clip-1-muon-peak-2e-3": Factor(IMPROVED + LARGE["muon"] + LARGE["peak-2e-3"]),
    "circular-clip-1-muon-peak-4e-3": Factor((*IMPROVED, *LARGE["muon"], "train.lr=4e-3")),
    "channel-normaliser": Factor(("task.normaliser=channel",)),
    "pushforward": Factor(PUSHFORWARD),
    "linear-xavier": Factor(linear=lambda inputs: 1 / math.sqrt(inputs)),
    "spectral-0.1": Factor(spectral=0.1),
    "spectral-0.004": Factor(spectral=0.004),
    "euler": Factor(flow={"scheme": "euler", "step": 1 / 1920}),
    "finer-grid": Factor(flow={"grid": 256, "step": 1 / 384}),
    "long-spin-up": Factor(flow={"burn_in": 6.0}),
    "half-spacing": Factor(flow={"interval": 1 / 16}),
    "circular-clip-1-peak-4e-3-augment": Factor((*IMPROVED, "train.lr=4e-3", *LARGE["augment"])),
}
DARCY_FACTORS = {
    **{name: Factor(settings) for name, settings in CASES.items() if name != "tf32"},
    "peak-2e-3-augment": Factor(CASES["peak-2e-3"] + CASES["augment"]),
    "muon-augment": Factor(CASES["muon"] + CASES["augment"]),
    "dropout-0.1": Factor(("model.options.dropout=0.1",)),
    "decay-1e-2": Factor(("train.weight_decay=1e-2",)),
    "twice-the-cases": Factor(("task.train=400",)),
    "four-times-the-cases": Factor(("task.train=800",)),
}


@dataclass(frozen=True)
class System:
    """A small version of a task of the paper."""

    paper: str
    """Task whose training settings are used."""
    task: Task
    flow: Simulator
    trajectories: int
    model: ModelRecipe
    updates: int
    factors: dict[str, Factor]
    errors: dict[str, tuple[str, int | None]]
    """Columns of the table: split and lead (None: all frames); the last one is compared."""


FLOWS = System(
    "kf2d",
    Task(
        "kolmogorov", ("vorticity",), ("vorticity",), (32, 32), 10, 4, 16, 50, 10, "temporal", space_stride=2,
        symmetries="kolmogorov-4",
    ),
    replace(DEMO, frames=60),
    60,
    ModelRecipe("transolver-sigma", width=32, depth=4, heads=4, slices=16, modes=8),
    3000,
    FLOW_FACTORS,
    {"lead 1": ("test", 1), "lead 16": ("test", 16), "whole horizon": ("test", None)},
)  # fmt: skip
DARCY = System(
    "darcy",
    Task(
        "darcy-29", ("coefficient",), ("pressure",), (29, 29), 1, 1, 1, 200, 200, "scalar", space_stride=3, steady=True,
        symmetries="square",
    ),
    Darcy(grid=85),
    1000,
    ModelRecipe("transolver-sigma", width=32, depth=4, heads=4, slices=16, modes=4),
    6000,
    DARCY_FACTORS,
    {"training split": ("train", None), "test split": ("test", None)},
)  # fmt: skip
SYSTEMS = {"kolmogorov": FLOWS, "darcy": DARCY}


def with_initial_weights(name: str, factor: Factor, usual: ModelRecipe) -> ModelRecipe:
    """Transolver-σ with other initial weights, as a model of its own."""

    def build(config: SolverConfig) -> nn.Module:
        model = build_solver("transolver-sigma", config)
        for module in model.modules():
            if isinstance(module, nn.Linear) and factor.linear is not None:
                nn.init.trunc_normal_(module.weight, std=factor.linear(module.in_features))
            if isinstance(module, SpectralOperator) and factor.spectral is not None:
                for weight in module.weights:
                    nn.init.trunc_normal_(weight, std=factor.spectral)
        return model

    if name not in list_models():  # by an earlier seed
        register_model(name, build)
    return replace(usual, name=name)


def train(system: System, name: str, seed: int, updates: int, work: Path) -> list[dict[str, object]]:
    """Train and evaluate one factor with one seed; return its rows."""
    factor = system.factors[name]
    flow = replace(system.flow, **factor.flow)  # type: ignore[type-var]
    data = work / f"{name if factor.flow else system.task.name}.h5"
    generate(flow, system.trajectories, 0, data)
    same = factor.linear is None and factor.spectral is None
    model = system.model if same else with_initial_weights(name, factor, system.model)
    usual = replace(recipe_of(system.paper).train, updates=updates, checks=0, seed=seed)
    recipe = changed(Recipe(system.task, model, usual), factor.settings)
    if recipe.train.objective == "pushforward":
        recipe = changed(recipe, f"train.push_after={updates // 2}")
    run = Run(work / f"{system.task.name}-{name}-{updates}-{seed}")
    train_run(recipe, data, run)
    rows = [row for split in ("train", "test") for row in measure(system, run, split)]
    return [{"benchmark": "screening", "factor": name, **{key: row[key] for key in KEYS}} for row in rows]


def measure(system: System, run: Run, split: str) -> list[dict[str, object]]:
    """The errors of this split that the table shows."""
    leads = {lead for part, lead in system.errors.values() if part == split}
    if not leads:
        return []
    rows = evaluate_run(run, Request(split=split))
    return [
        row
        for row in rows
        if row["metric"] in ("relative_l2", "relative_l2_lead")
        and row["lead"] in leads
        and (row["lead"] is None) == (row["metric"] == "relative_l2")
    ]


KEYS = (
    "model", "seed", "metric", "lead", "value", "part", "windows", "step", "data", "weights", "precision", "commit",
    "package", "machine", "torch", "date",
)  # fmt: skip


def table(system: System, path: Path) -> str:
    """Markdown table of the mean errors in per cent, and of the change of each seed against the first
    factor, by number of updates."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [
        f"| updates | factor | seeds | {' | '.join(system.errors)} | change |",
        f"|--:|---|--:|{'--:|' * len(system.errors)}--:|",
    ]
    errors = {
        (row["step"], row["factor"], row.get("part", "test"), row["lead"], row["seed"]): row["value"]
        for row in rows
        if row["model"] not in TRIVIAL_BASELINES
    }
    *_, compared = system.errors.values()
    for updates in sorted({key[0] for key in errors}):
        present = [name for name in system.factors if any(key[:2] == (updates, name) for key in errors)]
        base, *others = present
        for name in (base, *others):
            seeds = sorted({key[-1] for key in errors if key[:2] == (updates, name)})
            means = [
                100 * statistics.fmean(errors[(updates, name, *column, seed)] for seed in seeds)
                for column in system.errors.values()
            ]
            changes = [
                100 * (errors[(updates, name, *compared, seed)] / errors[(updates, base, *compared, seed)] - 1)
                for seed in seeds
                if (updates, base, *compared, seed) in errors
            ]
            change = "–" if name == base else ", ".join(f"{change:+.1f} %" for change in changes)
            cells = (f"{updates:,}", name, str(len(seeds)), *(f"{mean:.3g}" for mean in means), change)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=list(SYSTEMS))
    parser.add_argument("--work", type=Path, default=Path("."), help="folder for data and runs")
    parser.add_argument("--seeds", type=int, nargs="*", default=[42, 43])
    parser.add_argument("--updates", type=int, help="default: 3,000 for flows, 6,000 for Darcy")
    parser.add_argument("--only", nargs="*", metavar="FACTOR")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of a file of results, and do nothing else")
    args = parser.parse_args()
    system = SYSTEMS[args.system]
    if args.table:
        print(table(system, args.table))
        return
    for name in args.only or ():
        lookup(system.factors, name, "factor")
    torch.set_num_threads(1)
    for seed in args.seeds:
        for name in args.only or system.factors:
            rows = train(system, name, seed, args.updates or system.updates, args.work)
            print(
                name,
                seed,
                *(
                    f"{row['part']}, {row['lead'] or 'all'}: {100 * float(str(row['value'])):.3g} %"
                    for row in rows
                    if row["model"] not in TRIVIAL_BASELINES
                ),
                flush=True,
            )
            if args.out:
                append_rows(args.out, rows)


if __name__ == "__main__":
    main()
