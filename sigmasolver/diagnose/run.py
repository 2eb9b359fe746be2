"""Diagnoses of a run folder: which there are, how one is made, and that none is made twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sigmasolver.data.formats import Reading, opened
from sigmasolver.data.reader import Reader
from sigmasolver.data.windows import Windows, spread_evenly
from sigmasolver.diagnose.components import components
from sigmasolver.diagnose.corrections import corrections
from sigmasolver.diagnose.decomposition import decomposition
from sigmasolver.diagnose.efficiency import efficiency
from sigmasolver.diagnose.interventions import interventions
from sigmasolver.diagnose.maps import maps
from sigmasolver.diagnose.profiles import geometry
from sigmasolver.diagnose.records import MEMBERS, read_findings, write_findings
from sigmasolver.diagnose.routing import routing
from sigmasolver.diagnose.subject import Findings, NotApplicable, Subject
from sigmasolver.diagnose.trust import trust
from sigmasolver.evaluate import Request, source_of, windows_of
from sigmasolver.forecast.checkpoint import data_of, evaluation_data_of, load, reading_in, recipe_in
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run, provenance
from sigmasolver.settings import lookup

__all__ = ["DIAGNOSTICS", "diagnose_run", "peers_of"]

DIAGNOSTICS: dict[str, Callable[[Subject], Findings]] = {
    "decomposition": decomposition,
    "trust": trust,
    "maps": maps,
    "corrections": corrections,
    "routing": routing,
    "geometry": geometry,
    "efficiency": efficiency,
    "interventions": interventions,
    "components": components,
}
COMPARE_SEEDS = ("trust",)
"""Diagnostics that also look at runs of the same model with other seeds."""
MEASURE_MACHINE = ("efficiency",)
"""Diagnostics whose numbers are those of the machine."""


def diagnose_run(
    run: Run,
    names: Sequence[str] | None = None,
    request: Request | None = None,
    device: torch.device | str = "cpu",
    tick: Callable[[str, int, int], None] | None = None,
    peers: Sequence[Run] = (),
    path: str | Path | None = None,
) -> dict[str, Findings]:
    """Make these diagnoses of a run and write them into its folder; what is there already is not done again.

    Without `names` all. What means nothing for its model is `skipped` and says why. `peers`: runs of that model with
    other seeds. `path`: where the run's data lie now. `tick` is told the diagnostic, how much is done
    (windows; calls for interventions, calls and derivatives for components), and of how much.
    """
    request, place = request or Request(), torch.device(device)
    _check(request)
    wanted = tuple(DIAGNOSTICS) if names is None else tuple(dict.fromkeys(names))
    makers = {name: lookup(DIAGNOSTICS, name, "diagnostic") for name in wanted}
    recipe = recipe_in(run)
    found: dict[str, Findings] = {}
    file, how = data_of(run) if path is None else Path(path), reading_in(run, recipe)
    with opened(file, *how) as store, _tested(run, store, request, how) as tested, run.held("diagnose"):
        _check_data(run, store)
        windows = windows_of(run, recipe, tested, request)
        facts = source_of(run, recipe, windows, request, tested.fingerprint)
        facts |= {"model": recipe.model.name, "seed": recipe.train.seed}
        where = provenance(place)
        subject: Subject | None = None
        for name, maker in makers.items():
            source = {**facts, **_more(name, where, peers)}
            kept = read_findings(run, name, source)
            if kept is None:
                subject = subject or _subject(run, recipe, windows, store, request, place)
                kept = _made(maker, _for(name, subject, peers, tick))
                if kept.skipped is None:
                    write_findings(run, name, kept, {**source, **where})
                    kept = read_findings(run, name, source) or kept
            found[name] = kept
    return found


def peers_of(run: Run, runs: Sequence[Run]) -> tuple[Run, ...]:
    """Those of `runs` that differ from `run` in their seed alone, if `run` has the lowest seed of them; else none.

    So a set of seeds is looked at together once, beside one of its members.
    """
    recipe, data = recipe_in(run), run.read_json("data.json").get("fingerprint")
    others: dict[int, Run] = {}
    for one in runs:
        theirs = recipe_in(one)
        alike = replace(theirs, train=replace(theirs.train, seed=recipe.train.seed)) == recipe
        if alike and theirs.train.seed != recipe.train.seed and one.read_json("data.json").get("fingerprint") == data:
            others.setdefault(theirs.train.seed, one)
    if any(seed < recipe.train.seed for seed in others):
        return ()
    return tuple(others[seed] for seed in sorted(others))


def _check(request: Request) -> None:
    if request.protocol != "free":
        raise ValueError("Diagnostics use free forecasts; omit the protocol.")
    if request.precision != "float32":
        raise ValueError("Diagnostics run in float32; omit the precision.")
    if request.grid is not None:
        raise ValueError("Diagnostics use the training grid; omit the grid.")


def _tested(
    run: Run, store: Reader, request: Request, how: tuple[Reading, str | None]
) -> AbstractContextManager[Reader]:
    """The data to look at: the run's own test data where they have a file, else those that it was trained with."""
    apart = request.part == "test" and isinstance(run.read_json("data.json").get("test"), dict)
    return opened(evaluation_data_of(run), *how) if apart else nullcontext(store)


def _check_data(run: Run, store: Reader) -> None:
    held = run.read_json("data.json").get("fingerprint")
    if held != store.fingerprint:
        raise ValueError(f"{store.path} is not the training data of {run.path}; pass its location with --data.")


def _more(name: str, where: Mapping[str, str], peers: Sequence[Run]) -> dict[str, Any]:
    """What else tells two diagnoses of this name apart."""
    more: dict[str, Any] = {}
    if name in COMPARE_SEEDS:
        more[MEMBERS] = [f"{one.path.resolve().name} {one.digest}" for one in peers]
    if name in MEASURE_MACHINE:
        more["machine"] = where["machine"]
    return more


def _subject(
    run: Run, recipe: Recipe, windows: Windows, store: Reader, request: Request, device: torch.device
) -> Subject:
    """`store`: the data that the run was trained with."""
    forecaster = load(run.path, device)
    indices = spread_evenly(len(windows), request.windows)
    training: Windows | None
    if windows.starts is None:  # listed one by one
        training = recipe.windows_of(store, "train")
    else:
        trained = run.read_json("data.json")["parts"]["train"]
        training = Windows(store, trained, recipe.training_windows())
    return Subject(run, recipe, forecaster, windows, indices, windows.spec.horizon, request.batch, training)


def _for(name: str, subject: Subject, peers: Sequence[Run], tick: Callable[[str, int, int], None] | None) -> Subject:
    """The subject as this diagnostic is to see it."""
    members = peers if name in COMPARE_SEEDS else ()
    forecasters = tuple(load(one.path, subject.device) for one in members)
    return replace(subject, peers=forecasters, tick=None if tick is None else partial(tick, name))


def _made(maker: Callable[[Subject], Findings], subject: Subject) -> Findings:
    try:
        with matmul_precision("float32"):
            return maker(subject)
    except NotApplicable as error:
        return Findings(skipped=str(error))
