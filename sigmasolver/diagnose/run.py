"""The list of diagnostics, and running them on a run folder; existing results are reused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sigmasolver.data.domain import Domain
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
from sigmasolver.diagnose.symmetry import symmetry
from sigmasolver.diagnose.trust import trust
from sigmasolver.evaluate import Request, source_of, windows_of
from sigmasolver.forecast.checkpoint import (
    is_data_of,
    load,
    load_recipe,
    open_as_recorded,
    open_data_of,
    refuse_other_domain,
)
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run, provenance
from sigmasolver.settings import lookup

__all__ = ["DIAGNOSTICS", "diagnose_run", "peers_of"]

DIAGNOSTICS: dict[str, Callable[[Subject], Findings]] = {
    "decomposition": decomposition,
    "trust": trust,
    "symmetry": symmetry,
    "maps": maps,
    "corrections": corrections,
    "routing": routing,
    "geometry": geometry,
    "efficiency": efficiency,
    "interventions": interventions,
    "components": components,
}
COMPARE_SEEDS = ("trust",)
"""Diagnostics that also use runs of the same model with other seeds."""
MEASURE_MACHINE = ("efficiency",)
"""Diagnostics whose results depend on the machine."""
USE_TRAINING_DATA = ("trust", "efficiency")
"""Diagnostics that leave out a part if the training data are not at hand."""
_WITHOUT_TRAINING_DATA = "without_training_data"


def diagnose_run(
    run: Run,
    names: Sequence[str] | None = None,
    request: Request | None = None,
    device: torch.device | str = "cpu",
    tick: Callable[[str, int, int], None] | None = None,
    peers: Sequence[Run] = (),
    path: str | Path | Reader | None = None,
) -> dict[str, Findings]:
    """Run diagnostics (`names`; default: all) and write the results into the run folder; existing results are reused.

    A diagnostic that is not defined for the model is `skipped`, with the reason. `peers`: runs of the same model with
    other seeds. `path`: the current location of the run's data, or other data, which are all test data; or a reader of
    either. `tick` gets the diagnostic, the amount done (windows; calls for interventions, calls and derivatives for
    components) and the total.
    """
    request, target_device = request or Request(), torch.device(device)
    _check_request(request)
    selected = tuple(DIAGNOSTICS) if names is None else tuple(dict.fromkeys(names))
    diagnostics = {name: lookup(DIAGNOSTICS, name, "diagnostic") for name in selected}
    recipe = load_recipe(run)
    results: dict[str, Findings] = {}
    other = Path(path) if isinstance(path, str) else path
    with _open(run, recipe, request, other) as (training, evaluated), run.locked("diagnose"):
        windows = windows_of(run, recipe, evaluated, request)
        if other is not None and training is None:
            domain = Domain.of(evaluated.header.layout, windows.fields, windows.times)
            refuse_other_domain(run, recipe, evaluated.path, domain, anyway=None)
        facts = source_of(run, recipe, windows, request, evaluated.fingerprint)
        del facts["symmetries"]  # an option of evaluations
        facts |= {"model": recipe.model.name, "seed": recipe.train.seed}
        environment = provenance(target_device)
        subject: Subject | None = None
        for name, diagnostic in diagnostics.items():
            source = {**facts, **_extra_facts(name, environment, peers)}
            findings, missing = read_findings(run, name, source), training is None and name in USE_TRAINING_DATA
            if findings is None or (findings.rows[0].get(_WITHOUT_TRAINING_DATA) and not missing):
                subject = subject or _load_subject(run, recipe, windows, training, request, target_device)
                findings = _run_diagnostic(diagnostic, _subject_for(name, subject, peers, tick))
                if findings.skipped is None:
                    incomplete = {_WITHOUT_TRAINING_DATA: True} if missing else {}
                    write_findings(run, name, findings, {**source, **environment, **incomplete})
                    findings = read_findings(run, name, source) or findings
            results[name] = findings
    return results


def peers_of(run: Run, runs: Sequence[Run]) -> tuple[Run, ...]:
    """Those of `runs` that differ from `run` only in their seed, if `run` has the lowest seed of them; else none.

    So an ensemble of seeds is diagnosed once, in the folder of one member.
    """
    recipe, data = load_recipe(run), run.read_json("data.json").get("fingerprint")
    peers: dict[int, Run] = {}
    for candidate in runs:
        other = load_recipe(candidate)
        alike = replace(other, train=replace(other.train, seed=recipe.train.seed)) == recipe
        if (
            alike
            and other.train.seed != recipe.train.seed
            and candidate.read_json("data.json").get("fingerprint") == data
        ):
            peers.setdefault(other.train.seed, candidate)
    if any(seed < recipe.train.seed for seed in peers):
        return ()
    return tuple(peers[seed] for seed in sorted(peers))


def _check_request(request: Request) -> None:
    if request.protocol != "free":
        raise ValueError("Diagnostics use free forecasts; omit the protocol.")
    if request.precision != "float32":
        raise ValueError("Diagnostics run in float32; omit the precision.")
    if request.grid is not None:
        raise ValueError("Diagnostics use the training grid; omit the grid.")


@contextmanager
def _open(
    run: Run, recipe: Recipe, request: Request, other: Path | Reader | None
) -> Iterator[tuple[Reader | None, Reader]]:
    """The training data of a run (None: not at hand), and the data with the requested split: the same, the separate
    test data of the run, or other data."""
    facts = run.read_json("data.json")
    separate = request.split == "test" and isinstance(facts.get("test"), dict)
    with ExitStack() as stack:
        training: Reader | None = None
        if other is not None:
            training = stack.enter_context(open_as_recorded(run, recipe, other))
            if not is_data_of(run, training):
                yield None, training
                return
            separate = separate and not facts["parts"]["test"]
        elif "path" in facts or not separate:
            training = stack.enter_context(open_data_of(run, recipe))
        if separate:
            yield training, stack.enter_context(open_data_of(run, recipe, "test"))
        elif training is not None:
            yield training, training


def _extra_facts(name: str, environment: Mapping[str, str], peers: Sequence[Run]) -> dict[str, Any]:
    """Additional facts that identify a diagnosis of this name."""
    extra: dict[str, Any] = {}
    if name in COMPARE_SEEDS:
        extra[MEMBERS] = [f"{peer.path.resolve().name} {peer.digest}" for peer in peers]
    if name in MEASURE_MACHINE:
        extra["machine"] = environment["machine"]
    return extra


def _load_subject(
    run: Run, recipe: Recipe, windows: Windows, store: Reader | None, request: Request, device: torch.device
) -> Subject:
    """Load the forecaster and select its windows; `store` holds the training data, if they are at hand."""
    forecaster = load(run.path, device)
    indices = spread_evenly(len(windows), request.windows)
    training: Windows | None = None
    if store is not None and windows.windows_per_trajectory is None:  # windows are listed individually
        training = recipe.windows_of(store, "train")
    elif store is not None:
        trajectories = run.read_json("data.json")["parts"]["train"]
        training = Windows(store, trajectories, recipe.training_window_spec())
    return Subject(run, recipe, forecaster, windows, indices, windows.spec.horizon, request.batch, training)


def _subject_for(
    name: str, subject: Subject, peers: Sequence[Run], tick: Callable[[str, int, int], None] | None
) -> Subject:
    """The subject with the peers and the progress callback of this diagnostic."""
    members = peers if name in COMPARE_SEEDS else ()
    forecasters = tuple(load(member.path, subject.device) for member in members)
    return replace(subject, peers=forecasters, tick=None if tick is None else partial(tick, name))


def _run_diagnostic(diagnostic: Callable[[Subject], Findings], subject: Subject) -> Findings:
    try:
        with matmul_precision("float32"):
            return diagnostic(subject)
    except NotApplicable as error:
        return Findings(skipped=str(error))
