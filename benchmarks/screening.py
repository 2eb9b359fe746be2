"""Which settings matter for the error on Kolmogorov flow: one factor at a time, at a size for a CPU.

    python benchmarks/screening.py --work SCRATCH --out results/screening.jsonl
    python benchmarks/screening.py --work SCRATCH --table results/screening.jsonl

Transolver-σ is trained on small flows (Reynolds number 250 on 32²) with the protocol and the settings of `kf2d`: ten
frames in, blocks of four, sixteen forecast. Each factor changes one setting: those of `suite factors` that make sense
here, and others that would be expensive to screen at full size: initialisation, normaliser, pushforward, and the
data themselves (integrator, resolution, spin-up, frame spacing), where training and test flows change together. Rows
are relative L2 errors on the test flows: all frames, first lead, last lead. Finished trainings are not repeated.
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

from sigmasolver.evaluate import evaluate_run
from sigmasolver.models import SolverConfig, list_models, register_model
from sigmasolver.models.spectral import SpectralOperator
from sigmasolver.models.variants import build_solver
from sigmasolver.recipes import ModelRecipe, Recipe, changed, recipe_of
from sigmasolver.recipes.suites import FACTORS as SUITE_FACTORS
from sigmasolver.runs import Run
from sigmasolver.simulate.generate import generate
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.tasks import Task
from sigmasolver.train.job import train_run

LARGE = SUITE_FACTORS["kf2d"]
UPDATES, FLOWS, TEST = 3000, 60, 10
FLOW = replace(DEMO, frames=60)
TASK = Task(
    "kolmogorov", ("vorticity",), ("vorticity",), (32, 32), 10, 4, 16, FLOWS - TEST, TEST, "temporal", space_stride=2
)
MODEL = ModelRecipe("transolver-sigma", width=32, depth=4, heads=4, slices=16, modes=8)


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
FACTORS = {
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
}


def with_initial_weights(name: str, factor: Factor) -> ModelRecipe:
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
    return replace(MODEL, name=name)


def train(name: str, factor: Factor, seed: int, updates: int, work: Path) -> list[dict[str, object]]:
    """Train and evaluate one factor with one seed; return its rows."""
    flow = replace(FLOW, **factor.flow)  # type: ignore[arg-type]
    data = work / f"{name if factor.flow else 'flow'}.h5"
    generate(flow, FLOWS, 0, data)
    usual = recipe_of("kf2d").train
    same = factor.linear is None and factor.spectral is None
    model = MODEL if same else with_initial_weights(name, factor)
    recipe = changed(Recipe(TASK, model, replace(usual, updates=updates, checks=0, seed=seed)), factor.settings)
    if recipe.train.objective == "pushforward":
        recipe = changed(recipe, f"train.push_after={updates // 2}")
    run = Run(work / f"{name}-{updates}-{seed}")
    train_run(recipe, data, run)
    return [
        {"benchmark": "screening", "factor": name, **{key: row[key] for key in KEYS}}
        for row in evaluate_run(run)
        if row["metric"] == "relative_l2" or (row["metric"] == "relative_l2_lead" and row["lead"] in (1, TASK.horizon))
    ]


KEYS = (
    "model", "seed", "metric", "lead", "value", "windows", "step", "data", "weights", "precision", "commit", "package",
    "machine", "torch", "date",
)  # fmt: skip


def table(path: Path) -> str:
    """Markdown table of the mean errors in per cent, and of the change of each seed against the first
    factor, by number of updates."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    lines = [
        "| updates | factor | seeds | lead 1 | lead 16 | whole horizon | change |",
        "|--:|---|--:|--:|--:|--:|--:|",
    ]
    errors = {
        (row["step"], row["factor"], row["lead"], row["seed"]): row["value"]
        for row in rows
        if row["model"] != "persistence"
    }
    for updates in sorted({key[0] for key in errors}):
        present = [name for name in FACTORS if any(key[:2] == (updates, name) for key in errors)]
        base, *others = present
        for name in (base, *others):
            seeds = sorted({key[3] for key in errors if key[:2] == (updates, name)})
            means = [
                100 * statistics.fmean(errors[updates, name, lead, seed] for seed in seeds) for lead in (1, 16, None)
            ]
            changes = [
                100 * (errors[updates, name, None, seed] / errors[updates, base, None, seed] - 1)
                for seed in seeds
                if (updates, base, None, seed) in errors
            ]
            change = "–" if name == base else ", ".join(f"{change:+.1f} %" for change in changes)
            cells = (f"{updates:,}", name, str(len(seeds)), *(f"{mean:.3g}" for mean in means), change)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("."), help="folder for flows and runs")
    parser.add_argument("--seeds", type=int, nargs="*", default=[42, 43])
    parser.add_argument("--updates", type=int, default=UPDATES)
    parser.add_argument("--only", nargs="*", default=list(FACTORS), choices=list(FACTORS), metavar="FACTOR")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="print the table of a file of results, and do nothing else")
    args = parser.parse_args()
    if args.table:
        print(table(args.table))
        return
    torch.set_num_threads(1)
    for seed in args.seeds:
        for name in args.only:
            rows = train(name, FACTORS[name], seed, args.updates, args.work)
            print(
                name,
                seed,
                *(
                    f"{row['lead'] or 'all'}: {100 * float(str(row['value'])):.3g} %"
                    for row in rows
                    if row["model"] != "persistence"
                ),
                flush=True,
            )
            if args.out:
                append_rows(args.out, rows)


if __name__ == "__main__":
    main()
