"""Export a run: trace, write to a temporary file, compare with the run on real windows, then move into place."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.export import Dim, ExportedProgram

from sigmasolver.data.domain import Domain
from sigmasolver.data.formats import ReadOptions, opened
from sigmasolver.data.layout import shape_text
from sigmasolver.data.reader import Reader
from sigmasolver.data.windows import Windows, spread_evenly
from sigmasolver.export.formats import FORMATS, Compute, Format, quiet
from sigmasolver.export.step import RolloutStep
from sigmasolver.forecast.checkpoint import evaluation_data_of, load, load_read_options, load_recipe
from sigmasolver.ops.dispatch import plain
from sigmasolver.pretrained import is_pretrained, resolve
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run
from sigmasolver.runs.files import os_errors_as_value_errors, replacing
from sigmasolver.settings import lookup
from sigmasolver.version import __version__

__all__ = ["CHECKED_WINDOWS", "LIMIT", "Exported", "export_run"]

CHECKED_WINDOWS = 3
"""Number of windows to compare."""
LIMIT = 1e-5
"""Maximum relative L2 difference of any window; a file that exceeds it is discarded."""


@dataclass(frozen=True)
class Exported:
    """The exported file and its difference from the run."""

    path: Path
    metadata: dict[str, str]
    fixed: str | None
    """Why it accepts only the grid of the run; None: it accepts any grid."""
    windows: int
    difference: float
    """Largest relative L2 difference between the file and the run, over windows and outputs."""


def export_run(
    run: str | Path, kind: str, out: Path, data: Path | None = None, say: Callable[[str], None] = lambda text: None
) -> Exported:
    """Export one rollout step of a run, on the CPU in float32, to the format `kind`; `say` is called with progress
    messages.

    `data` has the windows to check the file on, in any format that `train` accepts; None: the run's test data (its
    training data if there are none), or the windows shipped with a pretrained model.
    """
    format_ = lookup(FORMATS, kind, "format")
    if out.suffix != format_.suffix:
        raise ValueError(f"The file name for {kind} must end in {format_.suffix}, got {out.name}.")
    if out.exists():
        raise ValueError(f"{out} already exists; choose another name or remove it.")
    format_.need()
    path = resolve(run)
    recipe = load_recipe(Run(path))
    step = RolloutStep(load(path)).eval()
    options_and_kind = (ReadOptions(), None) if is_pretrained(path) else load_read_options(Run(path), recipe)
    with opened(_source(path, data), *options_and_kind) as store:
        windows = _windows(path, recipe, store, data)
        batches = _batches(windows, step)
        domain = Domain.of(store.header.layout, windows.fields, windows.times)
    facts = _metadata(Run(path), recipe, domain, step)
    with torch.no_grad(), plain(), quiet(), TemporaryDirectory() as scratch:
        written = Path(scratch) / f"step{format_.suffix}"
        fixed = _fixed_grid_reason(step)
        if fixed is None:
            say("for any grid")
            try:
                metadata, difference = _try_export(format_, step, batches, facts, written, any_grid=True)
                fixed = None if difference <= LIMIT else "results on other grids differ from the run"
            except Exception as error:  # a size became a constant, or the format lacks an operation
                fixed = f"{kind} does not support a dynamic grid here ({type(error).__name__})"
        if fixed is not None:
            say(f"for {shape_text(recipe.task.grid)}")
            try:
                metadata, difference = _try_export(format_, step, batches, facts, written, any_grid=False)
            except Exception as error:
                first = next(iter(str(error).strip().splitlines()), type(error).__name__)
                raise ValueError(f"The model {recipe.model.name} cannot be exported to {kind}: {first}") from error
        if not difference <= LIMIT:
            raise ValueError(
                f"The exported file differs from {path} by {difference:.2g} in relative L2, more than {LIMIT:g}, and "
                f"was discarded; try another format: {', '.join(FORMATS)}."
            )
        with os_errors_as_value_errors(out):
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
    spec = recipe.evaluation_window_spec()
    if data is None and is_pretrained(path):  # strides already applied
        return Windows(store, range(len(store)), replace(spec, windows_per_trajectory=1, time_stride=1, space_stride=1))
    facts = {} if is_pretrained(path) else Run(path).read_json("data.json")
    if facts.get("fingerprint") == store.fingerprint:
        parts = facts["parts"]
        return Windows(store, parts["test"] or parts["train"], spec)
    if store.header.grid == recipe.task.grid:
        spec = replace(spec, space_stride=1)  # already applied
    return Windows(store, range(len(store)), spec)


def _batches(windows: Windows, step: RolloutStep) -> list[Inputs]:
    """A batch of several windows and one of a single window, to check that the batch size is dynamic."""
    batches: list[Inputs] = []
    for indices in (spread_evenly(len(windows), CHECKED_WINDOWS), torch.arange(1)):
        history = windows.batch(indices)[0].float()
        times = windows.frame_times(indices)[:, 0].double()
        batches.append((history, times) if "time" in step.inputs else (history,))
    return batches


def _fixed_grid_reason(step: RolloutStep) -> str | None:
    pointwise = any(normaliser.mean.ndim > 1 for normaliser in (step.forecaster.inputs, step.forecaster.targets))
    return "the normaliser has one mean per point" if pointwise else None


def _try_export(
    format_: Format, step: RolloutStep, batches: list[Inputs], facts: Mapping[str, object], path: Path, any_grid: bool
) -> tuple[dict[str, str], float]:
    """Trace, write, load and compare; return the metadata and the largest difference."""
    history, axes = batches[0][0], {}
    if any_grid:
        # Distinct sizes, so that two axes do not become one symbolic dimension.
        grid = [n + 2 * axis for axis, n in enumerate(history.shape[2:-1])]
        history = history.new_ones(*history.shape[:2], *grid, history.shape[-1])
        axes = {axis: Dim.DYNAMIC for axis in range(2, 2 + len(grid))}
    metadata = {name: json.dumps(value) for name, value in {**facts, "any_grid": any_grid}.items()}
    format_.write(_export(step, (history, *batches[0][1:]), axes), path, metadata, step.inputs, step.outputs)
    other_grid = [_crop(batches[0])] if any_grid else []
    return metadata, _max_difference(step, format_.read(path), [*batches, *other_grid])


def _export(step: RolloutStep, inputs: Inputs, axes: Mapping[int, object]) -> ExportedProgram:
    # A batch size of one would be specialised to a constant.
    example = tuple(torch.cat((tensor[:1], tensor[:1])) for tensor in inputs)
    shapes = ({0: Dim.DYNAMIC, **axes}, *({0: Dim.DYNAMIC} for _ in inputs[1:]))
    return torch.export.export(step, example, dynamic_shapes=dict(zip(step.inputs, shapes, strict=True)))


def _crop(inputs: Inputs) -> Inputs:
    """Crop the last points of every axis: another grid for a file that accepts any."""
    history = inputs[0]
    for axis, points in enumerate(history.shape[2:-1], start=2):
        history = history.narrow(axis, 0, max(2, points - axis))
    return history, *inputs[1:]


def _max_difference(step: RolloutStep, compute: Compute, batches: list[Inputs]) -> float:
    largest = 0.0
    for inputs in batches:
        arguments = tuple(tensor.contiguous() for tensor in inputs)
        for expected, actual in zip(step(*arguments), compute(*arguments), strict=True):
            error, norm = ((tensor.double()).flatten(1).norm(dim=1) for tensor in (expected - actual, expected))
            relative = (error / norm).where(error != 0, 0.0)  # 0 / 0 counts as 0
            largest = max(largest, float(relative.nan_to_num(torch.inf).max()))
    return largest


def _metadata(run: Run, recipe: Recipe, domain: Domain, step: RolloutStep) -> dict[str, object]:
    """Metadata for the user of the file."""
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
