"""Suites of training runs by name: the paper's tables and figures, a comparison, the ledger."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache, partial

from sigmasolver.models import matched_width
from sigmasolver.recipes.recipe import Recipe, changed
from sigmasolver.recipes.rows import PAPER, RELEASED, recipe_of
from sigmasolver.settings import lookup
from sigmasolver.tasks import CANONICAL, REALM, REALPDEBENCH

__all__ = ["SUITES", "factor_settings", "suite_of"]

SEEDS = (42, 43, 44)
ABLATIONS = (
    "transolver-sigma", "no-physical", "no-spectral", "physical-then-spectral", "spectral-then-physical", "no-context",
    "grouped-mixing", "slice-replace",
)  # fmt: skip
COUNTERPARTS = ("physolver", "specsolver")
DYNAMIC = ("ns2d", "kf2d", "it3d", "smoke3d")
SLICE_UPDATES = ("transolver", "transolver-keep", "linearno", "transolver-srpa")
COMPARED = (
    "unet", "vit", "fno", "ffno", "rno", "hpm", "drift-net", "factformer", "transolver", "transolver-plus",
    "eddyformer", "linearno", "transolver-sigma",
)  # fmt: skip
"""The models of tab:pde-main-results, in its order."""
CALIBRATION = ("fno", "vit")
"""Published baselines with the cheapest updates: at the paper's budget they show how difficult the simulated data are
compared with those of the paper."""
EFFICIENCY = ("hpm-frozen", "drift-net", "factformer", "transolver", "transolver-sigma")
"""The models of tab:efficiency-settings; HPM stores its bases, as measured there."""
SUITES: dict[str, Callable[[], dict[str, Recipe]]] = {
    "main": lambda: (
        _runs((task.name for task in CANONICAL), COMPARED)
        | _runs((task.name for task in (*REALPDEBENCH, *REALM)), ("transolver-sigma",))
    ),
    "counterparts": lambda: _runs(DYNAMIC, ("transolver-sigma", *COUNTERPARTS)),
    "counterparts-matched": lambda: (
        _runs(DYNAMIC, ("transolver-sigma",)) | _runs(DYNAMIC, COUNTERPARTS, "matched", _at_matched_width)
    ),
    "ablations": lambda: _runs(("darcy", "ns2d", "smoke3d"), ABLATIONS),
    "slice-updates": lambda: _runs(("darcy", "ns2d"), SLICE_UPDATES),
    "scaling": lambda: _scaling(),
    "efficiency": lambda: _efficiency(),
    "comparison": lambda: _runs(["kf2d"], COMPARED, "1000-updates", _short, SEEDS[:2]),
    "cost": lambda: _cost(),
    "ledger": lambda: _ledger(),
    "factors": lambda: _factors(),
}
"""The paper's tables and figures as sets of trainings, by name of the run: tab:pde-main-results with
tab:realpdebench-results and tab:realm-results, fig:rollout-comparison (counterparts at full width, and at the width
nearest to the parameters of Transolver-σ), tab:ablation-components, tab:slice-attention-analysis, fig:darcy-scaling,
app:efficiency-measurements. "comparison" trains all models of the main table on KF2D for a thousand updates, "cost"
four of them for three numbers of updates, to plot the error over the training time, "ledger" contains trainings at the
paper's budgets in the order in which they are run, and "factors" changes one setting of KF2D or Darcy at a time, at a
quarter of the budget."""


def suite_of(name: str) -> dict[str, Recipe]:
    """Return the recipes of a suite by run name, in training order."""
    return lookup(SUITES, name, "suite")()


def _runs(
    tasks: Iterable[str],
    models: Iterable[str],
    label: str = "",
    change: Callable[[Recipe], Recipe] = lambda recipe: recipe,
    seeds: Sequence[int] = SEEDS,
) -> dict[str, Recipe]:
    """Return every task with every model and seed; `label` marks the runs of a changed recipe."""
    return {
        "-".join(filter(None, (task, model, label, str(seed)))): change(recipe_of(task, model, seed))
        for task, model, seed in itertools.product(tasks, tuple(models), seeds)
    }


def _at_matched_width(recipe: Recipe) -> Recipe:
    """Set the width whose parameter count is nearest to that of Transolver-σ at the recipe's width."""
    width = _matched_width(recipe.model.name, recipe.model.config(recipe.task))
    return replace(recipe, model=replace(recipe.model, width=width))


_matched_width = cache(matched_width)
"""Cached, because it builds a dozen models, and recipes that differ only in their seed have the same width."""


def _bf16(recipe: Recipe) -> Recipe:
    return replace(recipe, train=replace(recipe.train, precision="bf16"))


def _short(recipe: Recipe, updates: int = 1000) -> Recipe:
    return replace(recipe, train=replace(recipe.train, updates=updates, precision="bf16"))


def _cost() -> dict[str, Recipe]:
    """Trainings of different lengths, each with its own schedule."""
    models = ("transolver-sigma", "transolver", "ffno", "fno")
    return {
        name: recipe
        for updates in (500, 1500, 4500)
        for name, recipe in _runs(
            ["kf2d"], models, f"{updates}-updates", partial(_short, updates=updates), SEEDS[:1]
        ).items()
    }


def _ledger() -> dict[str, Recipe]:
    """Trainings at the paper's budget unless the label says otherwise: `quarter` is a quarter of its updates, `matched`
    a width with the parameter count of Transolver-σ."""

    def runs(
        task: str,
        models: Sequence[str],
        label: str = "",
        settings: Sequence[str] = (),
        seeds: Sequence[int] = SEEDS[:1],
        resize: Callable[[Recipe], Recipe] = lambda recipe: recipe,
    ) -> dict[str, Recipe]:
        label = "-".join(filter(None, ("bf16", label)))
        return _runs([task], models, label, lambda recipe: changed(resize(_bf16(recipe)), settings), seeds)

    with_counterparts = ("transolver-sigma", *COUNTERPARTS)
    label, improved = "-".join(IMPROVED), sum((FACTORS["kf2d"][name] for name in IMPROVED), start=())
    quarter = (f"train.updates={QUARTER['kf2d']}",)
    muon, faster, augment = (FACTORS["kf2d"][name] for name in ("muon", "peak-2e-3", "augment"))
    candidates = {"peak-2e-3": faster, "peak-4e-3": ("train.lr=4e-3",), "muon-peak-2e-3": (*muon, *faster)}
    # A fifth or a twentieth of the cases, which fit on a disk of 64 GB, and a few per cent of the updates.
    reduced = ("task.train=100", "task.test=20", "train.updates=2500")
    return {
        **runs("darcy", ["transolver-sigma"], seeds=SEEDS),
        **runs("darcy", ["transolver-sigma"], "augment", augment),
        **runs("darcy", ["transolver-sigma"], "muon-augment", (*muon, *augment)),
        **runs("darcy", [*COUNTERPARTS, *CALIBRATION, "transolver", "linearno", "ffno"]),
        **runs("kf2d", CALIBRATION),
        **{
            name: recipe
            for change, settings in candidates.items()
            for name, recipe in runs(
                "kf2d", ["transolver-sigma"], f"{label}-{change}-quarter", (*improved, *settings, *quarter)
            ).items()
        },
        **runs("kf2d", ["transolver-sigma"], label, improved, SEEDS),
        **runs("kf2d", with_counterparts, f"{label}-quarter", (*improved, *quarter)),
        **runs("kf2d", COUNTERPARTS, f"{label}-quarter-matched", (*improved, *quarter), resize=_at_matched_width),
        **runs(
            "kf2d", ["eddyformer", "drift-net", "factformer"], "clip-1-quarter", (*FACTORS["kf2d"]["clip-1"], *quarter)
        ),
        **runs("kf2d", ["transolver-sigma"]),
        **runs("ns2d", with_counterparts, "25-epochs", ("train.epochs=25",)),
        **runs("ns2d", ["transolver-sigma"], "augment-25-epochs", ("train.epochs=25", *augment)),
        **runs("ns2d", [*ABLATIONS, *SLICE_UPDATES], "10-epochs", ("train.epochs=10",)),
        **runs("ns2d", ["transolver-sigma"], "200-epochs", ("train.epochs=200",)),
        **runs("ns2d", ["transolver-sigma"]),
        **runs("it3d", with_counterparts, "100-cases-2500-updates", reduced),
        **runs("smoke3d", with_counterparts, "100-cases-2500-updates", reduced),
    }


QUARTER = {"kf2d": 20_938, "darcy": 31_250}
"""A quarter of the paper's updates."""
FACTORS: dict[str, dict[str, tuple[str, ...]]] = {
    "kf2d": {
        "base": (),
        "tf32": ("train.precision=tf32",),
        "circular": ("model.options.padding=('circular', 'circular')",),
        "warmup-0.2": ("train.warmup=0.2",),
        "clip-1": ("train.clip=1.0",),
        "decay-1e-5": ("train.weight_decay=1e-5",),
        "peak-5e-4": ("train.lr=5e-4",),
        "peak-2e-3": ("train.lr=2e-3",),
        "ema": ("train.ema=0.999",),
        "float32": ("train.precision=float32",),
        "muon": ("train.optimiser=muon",),
        "augment": ("train.augment=true",),
    },
    "darcy": {
        "base": (),
        "tf32": ("train.precision=tf32",),
        "peak-2e-3": ("train.lr=2e-3",),
        "clip-0.1": ("train.clip=0.1",),
        "domain-padding": ("model.options.domain_padding=0.125",),
        "derivative-0": ("train.derivative=0.0",),
        "ema": ("train.ema=0.999",),
        "muon": ("train.optimiser=muon",),
        "augment": ("train.augment=true",),
    },
}
"""Settings that may affect the error, one factor each; "base" is the row of the ledger. On KF2D, "released" has the
schedule and clipping of the public code; on Darcy that is "clip-0.1"."""
IMPROVED = ("circular", "clip-1")
"""The settings of `FACTORS` with which the ledger trains KF2D: each of them alone lowered the test error, with one
seed."""


def factor_settings() -> dict[str, dict[str, str]]:
    """Return the settings that each run of the suite "factors" changes, by task and run name."""
    settings = {
        task: {name: ", ".join(changes) or "nothing" for name, changes in factors.items()}
        for task, factors in FACTORS.items()
    }
    settings["kf2d"]["released"] = "schedule and clipping of the public code"
    return {
        task: {_factor_run_name(task, name): setting for name, setting in own.items()} for task, own in settings.items()
    }


def _factor_run_name(task: str, name: str) -> str:
    return f"{task}-quarter-{name}-42"


def _factors() -> dict[str, Recipe]:
    """Trainings with a quarter of the paper's updates, and a schedule of that length."""
    rows: dict[str, Recipe] = {}
    for task, factors in FACTORS.items():
        base = _bf16(recipe_of(task))
        quarter = replace(base, train=replace(base.train, updates=QUARTER[task]))
        rows |= {_factor_run_name(task, name): changed(quarter, settings) for name, settings in factors.items()}
        if task == "kf2d":
            rows[_factor_run_name(task, "released")] = RELEASED["kf2d-released"].applied(quarter)
    return rows


def _scaling() -> dict[str, Recipe]:
    """Three sweeps on Darcy flow, each with its own fixed settings."""
    base = recipe_of("darcy")
    longer, shorter = replace(base.train, epochs=200), replace(base.train, epochs=100)
    wide_task = replace(base.task, space_stride=2, grid=(211, 211), train=3000)
    return {
        **{
            f"darcy-data-{cases}": replace(base, task=replace(base.task, train=cases), train=longer)
            for cases in (1000, 2000, 3000, 4000, 5000)
        },
        **{
            f"darcy-grid-{points}": replace(
                base, task=replace(base.task, space_stride=stride, grid=(points, points)), train=longer
            )
            for stride, points in ((5, 85), (4, 106), (3, 141), (2, 211), (1, 421))
        },
        **{
            f"darcy-width-{width}": replace(
                base, task=wide_task, model=replace(base.model, width=width, slices=128, modes=8), train=shorter
            )
            for width in (32, 64, 128, 192, 256)
        },
    }


def _efficiency() -> dict[str, Recipe]:
    """One epoch of the workloads whose training costs are measured; they are not those of the accuracy tables."""
    workloads = {
        "ns2d": replace(PAPER, epochs=1, batch=2, objective="teacher_forced", accumulate=True),
        "kf2d": replace(PAPER, epochs=1, batch=2, lr=5e-4, weight_decay=1e-4),
    }
    return {
        f"{task}-efficiency-{model}": replace(recipe_of(task, model), train=train)
        for task, train in workloads.items()
        for model in EFFICIENCY
    }
