"""From a run to a file: trace, write under another name, compare with the run on real windows, then keep."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.export import Dim, ExportedProgram

from sigmasolver.data.domain import Domain
from sigmasolver.data.formats import Reading, opened
from sigmasolver.data.layout import shape_text
from sigmasolver.data.reader import Reader
from sigmasolver.data.windows import Windows, spread_evenly
from sigmasolver.export.formats import FORMATS, Compute, Format, quiet
from sigmasolver.export.step import RolloutStep
from sigmasolver.forecast.checkpoint import evaluation_data_of, load, reading_in, recipe_in
from sigmasolver.ops.dispatch import plain
from sigmasolver.pretrained import is_pretrained, resolve
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run
from sigmasolver.runs.files import plain_errors, replacing
from sigmasolver.settings import lookup
from sigmasolver.version import __version__

__all__ = ["CHECKED", "LIMIT", "Exported", "export_run"]

CHECKED = 3
"""Windows that are compared."""
LIMIT = 1e-5
"""The largest difference in relative L2, of any window, with which a file is kept."""


@dataclass(frozen=True)
class Exported:
    """What was written and how near it comes to the run."""

    path: Path
    metadata: dict[str, str]
    fixed: str | None
    """Why it takes the grid of the run alone; None: it takes any."""
    windows: int
    difference: float
    """The largest relative L2 between the file and the run, over windows and outputs."""


def export_run(
    run: str | Path, kind: str, out: Path, data: Path | None = None, say: Callable[[str], None] = lambda text: None
) -> Exported:
    """Write one step of a run's rollout, on a CPU and in float32, as `kind`; `say` is told what is being done.

    `data` has windows to check the file on, in any form that can be trained on; None: the run's test data (its training
    data where it has none), or the windows that come with a pretrained model.
    """
    form = lookup(FORMATS, kind, "format")
    if out.suffix != form.suffix:
        raise ValueError(f"The file name for {kind} must end in {form.suffix}, got {out.name}.")
    if out.exists():
        raise ValueError(f"{out} already exists; choose another name or remove it.")
    form.need()
    path = resolve(run)
    recipe = recipe_in(Run(path))
    step = RolloutStep(load(path)).eval()
    reading = (Reading(), None) if is_pretrained(path) else reading_in(Run(path), recipe)
    with opened(_source(path, data), *reading) as store:
        windows = _windows(path, recipe, store, data)
        batches = _batches(windows, step)
        domain = Domain.of(store.header.layout, windows.fields, windows.times)
    facts = _facts(Run(path), recipe, domain, step)
    with torch.no_grad(), plain(), quiet(), TemporaryDirectory() as scratch:
        written = Path(scratch) / f"step{form.suffix}"
        fixed = _stands_on_grid(step)
        if fixed is None:
            say("for any grid")
            try:
                metadata, difference = _attempt(form, step, batches, facts, written, any_grid=True)
                fixed = None if difference <= LIMIT else "results on other grids differ from the run"
            except Exception as error:  # a size that became a constant, an operation that the format does not have
                fixed = f"{kind} does not support a dynamic grid here ({type(error).__name__})"
        if fixed is not None:
            say(f"for {shape_text(recipe.task.grid)}")
            try:
                metadata, difference = _attempt(form, step, batches, facts, written, any_grid=False)
            except Exception as error:
                first = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise ValueError(f"The model {recipe.model.name} cannot be exported to {kind}: {first}") from error
        if not difference <= LIMIT:
            raise ValueError(
                f"The exported file differs from {path} by {difference:.2g} in relative L2, more than {LIMIT:g}, and "
                f"was discarded; try another format: {', '.join(FORMATS)}."
            )
        with plain_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            with replacing(out) as file:
                file.write(written.read_bytes())
    return Exported(out, metadata, fixed, len(batches[0][0]), difference)


Inputs = tuple[torch.Tensor, ...]


def _source(path: Path, data: Path | None) -> Path:
    if data is not None:
        return data
    return path / "windows.h5" if is_pretrained(path) else evaluation_data_of(Run(path))


def _windows(path: Path, recipe: Recipe, store: Reader, data: Path | None) -> Windows:
    spec = recipe.evaluation_windows()
    if data is None and is_pretrained(path):  # thinned already
        return Windows(store, range(len(store)), replace(spec, starts=1, time_stride=1, space_stride=1))
    facts = {} if is_pretrained(path) else Run(path).read_json("data.json")
    if facts.get("fingerprint") == store.fingerprint:
        parts = facts["parts"]
        return Windows(store, parts["test"] or parts["train"], spec)
    if store.header.grid == recipe.task.grid:
        spec = replace(spec, space_stride=1)  # thinned already
    return Windows(store, range(len(store)), spec)


def _batches(windows: Windows, step: RolloutStep) -> list[Inputs]:
    """One batch of several windows and one of a single window, so that the batch is known to be open."""
    batches: list[Inputs] = []
    for chosen in (spread_evenly(len(windows), CHECKED), torch.arange(1)):
        history = windows.batch(chosen)[0].float()
        times = windows.frame_times(chosen)[:, 0].double()
        batches.append((history, times) if "time" in step.inputs else (history,))
    return batches


def _stands_on_grid(step: RolloutStep) -> str | None:
    by_point = any(one.mean.ndim > 1 for one in (step.forecaster.inputs, step.forecaster.targets))
    return "the normaliser has one mean per point" if by_point else None


def _attempt(
    form: Format, step: RolloutStep, batches: list[Inputs], facts: Mapping[str, object], path: Path, any_grid: bool
) -> tuple[dict[str, str], float]:
    """Trace, write, read and compare; the metadata, and the largest difference."""
    history, axes = batches[0][0], {}
    if any_grid:
        # Sizes that differ, lest two axes be taken for one.
        grid = [n + 2 * axis for axis, n in enumerate(history.shape[2:-1])]
        history = history.new_ones(*history.shape[:2], *grid, history.shape[-1])
        axes = {axis: Dim.DYNAMIC for axis in range(2, 2 + len(grid))}
    metadata = {name: json.dumps(value) for name, value in {**facts, "any_grid": any_grid}.items()}
    form.write(_export(step, (history, *batches[0][1:]), axes), path, metadata, step.inputs, step.outputs)
    more = [_cropped(batches[0])] if any_grid else []
    return metadata, _difference(step, form.read(path), [*batches, *more])


def _export(step: RolloutStep, inputs: Inputs, axes: Mapping[int, object]) -> ExportedProgram:
    # A batch of one would be taken for a constant.
    given = tuple(torch.cat((one[:1], one[:1])) for one in inputs)
    shapes = ({0: Dim.DYNAMIC, **axes}, *({0: Dim.DYNAMIC} for _ in inputs[1:]))
    return torch.export.export(step, given, dynamic_shapes=dict(zip(step.inputs, shapes, strict=True)))


def _cropped(inputs: Inputs) -> Inputs:
    """Without the last points of every axis: another grid for a file that takes any."""
    history = inputs[0]
    for axis, points in enumerate(history.shape[2:-1], start=2):
        history = history.narrow(axis, 0, max(2, points - axis))
    return history, *inputs[1:]


def _difference(step: RolloutStep, compute: Compute, batches: list[Inputs]) -> float:
    largest = 0.0
    for inputs in batches:
        given = tuple(one.contiguous() for one in inputs)
        for mine, theirs in zip(step(*given), compute(*given), strict=True):
            error, size = ((one.double()).flatten(1).norm(dim=1) for one in (mine - theirs, mine))
            relative = (error / size).where(error != 0, 0.0)  # also of frames that are zero
            largest = max(largest, float(relative.nan_to_num(torch.inf).max()))
    return largest


def _facts(run: Run, recipe: Recipe, domain: Domain, step: RolloutStep) -> dict[str, object]:
    """What a consumer needs to know."""
    task = recipe.task
    units = dict(zip(domain.fields, domain.units, strict=True))
    return {
        "sigmasolver": __version__,
        "task": task.name,
        "model": recipe.model.name,
        "weights": run.digest,
        "inputs": list(step.inputs),
        "outputs": list(step.outputs),
        "input_fields": list(task.inputs),
        "output_fields": list(task.targets),
        "units": [units.get(name, "") for name in task.inputs],
        "output_units": [units.get(name, "") for name in task.targets],
        "history": task.history,
        "block": task.block,
        "dt": domain.time_steps[0] if domain.time_steps else None,
        "grid": list(task.grid),
        "boundary": list(domain.boundary),
        "lengths": list(domain.lengths),
    }
