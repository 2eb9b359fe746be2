"""From a run to a file: trace, write under another name, compare with the run on real windows, then keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.export import Dim, ExportedProgram

from sigmasolver.data.domain import Domain
from sigmasolver.data.store import Reader, open_store
from sigmasolver.data.windows import Windows
from sigmasolver.export.formats import FORMATS, Compute, quiet
from sigmasolver.export.step import RolloutStep
from sigmasolver.forecast.checkpoint import data_of, load, recipe_in
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
    grid: tuple[int, ...]
    open_grid: bool
    """The file takes other grids, too."""
    windows: int
    difference: float
    """The largest relative L2 between the file and the run, over windows and outputs."""


def export_run(
    run: str | Path, kind: str, out: Path, data: Path | None = None, say: Callable[[str], None] = lambda text: None
) -> Exported:
    """Write one step of a run's rollout, on a CPU and in float32, as `kind`; `say` is told what is being done.

    `data` is a store with windows to check the file on; None: the run's own test split, or the windows that come with a
    pretrained model.
    """
    form = lookup(FORMATS, kind, "format")
    if out.suffix != form.suffix:
        raise ValueError(f"A file for {kind} ends in {form.suffix}; {out.name} does not.")
    if out.exists():
        raise ValueError(f"{out} already exists; choose another name or remove it.")
    form.need()
    path = resolve(run)
    recipe = recipe_in(Run(path))
    step = RolloutStep(load(path)).eval()
    with open_store(_source(path, data)) as store:
        windows = _windows(path, recipe, store, data)
        batches = _batches(windows, step)
        domain = Domain.of(store.header.layout, windows.fields, windows.times)
    with torch.no_grad(), plain(), quiet(), TemporaryDirectory() as scratch:
        say("tracing")
        program, open_grid = _traced(step, batches[0])
        facts = _facts(Run(path), recipe, domain, step, open_grid)
        written = Path(scratch) / f"step{form.suffix}"
        say("writing")
        try:
            form.write(program, written, facts, step.inputs, step.outputs)
        except Exception as error:
            if not open_grid or isinstance(error, ValueError):
                raise
            # The format cannot leave the grid open, though torch can.
            program, open_grid = _fixed(step, batches[0]), False
            facts = _facts(Run(path), recipe, domain, step, open_grid)
            form.write(program, written, facts, step.inputs, step.outputs)
        say("comparing with the run")
        difference = _difference(step, form.read(written), [*batches, *(_thinned(batches[:1]) if open_grid else ())])
        if not difference <= LIMIT:
            raise ValueError(
                f"The file differs from {path} by {difference:.2g} in relative L2, more than {LIMIT:g}, and is not "
                f"kept; try another format of {', '.join(FORMATS)}."
            )
        with plain_errors(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            with replacing(out) as file:
                file.write(written.read_bytes())
    return Exported(out, facts, recipe.task.grid, open_grid, sum(len(one[0]) for one in batches), difference)


Inputs = tuple[torch.Tensor, ...]


def _source(path: Path, data: Path | None) -> Path:
    if data is not None:
        return data
    return path / "windows.h5" if is_pretrained(path) else data_of(Run(path))


def _windows(path: Path, recipe: Recipe, store: Reader, data: Path | None) -> Windows:
    spec = recipe.evaluation_windows()
    if data is None and is_pretrained(path):  # thinned already
        return Windows(store, range(len(store)), replace(spec, starts=1, time_stride=1, space_stride=1))
    return Windows(store, range(len(store)) if data is not None else recipe.split(len(store)).test, spec)


def _batches(windows: Windows, step: RolloutStep) -> list[Inputs]:
    """One batch of several windows and one of a single window, so that the batch is known to be open."""
    count = min(CHECKED, len(windows))
    batches: list[Inputs] = []
    for chosen in (torch.arange(count), torch.arange(1)):
        history = windows.batch(chosen)[0].float()
        times = windows.frame_times(chosen)[:, 0].double()
        batches.append((history, times) if "time" in step.inputs else (history,))
    return batches


def _traced(step: RolloutStep, inputs: Inputs) -> tuple[ExportedProgram, bool]:
    """The program, and whether it takes other grids: not if a model or a normaliser stands on one grid."""
    grid = inputs[0].shape[2:-1]
    if step.forecaster.inputs.mean.ndim == 1 and step.forecaster.targets.mean.ndim == 1:
        # Sizes that differ, lest two axes be taken for one.
        shape = (*inputs[0].shape[:2], *(n + 2 * axis for axis, n in enumerate(grid)), inputs[0].shape[-1])
        axes = {axis: Dim.DYNAMIC for axis in range(2, 2 + len(grid))}
        try:
            return _export(step, inputs, inputs[0].new_ones(shape), axes), True
        except Exception:  # the exporter has many ways to say that a size became a constant
            pass
    return _fixed(step, inputs), False


def _fixed(step: RolloutStep, inputs: Inputs) -> ExportedProgram:
    return _export(step, inputs, inputs[0], {})


def _export(step: RolloutStep, inputs: Inputs, history: torch.Tensor, axes: dict[int, object]) -> ExportedProgram:
    # A batch of one would be taken for a constant.
    given = tuple(torch.cat((one[:1], one[:1])) for one in (history, *inputs[1:]))
    shapes = ({0: Dim.DYNAMIC, **axes}, *({0: Dim.DYNAMIC} for _ in inputs[1:]))
    return torch.export.export(step, given, dynamic_shapes=dict(zip(step.inputs, shapes, strict=True)))


def _thinned(batches: list[Inputs]) -> list[Inputs]:
    """Every second point of the last axis, where enough are left: another grid for a file that takes any."""
    return [(one[0][..., ::2, :], *one[1:]) for one in batches if one[0].shape[-2] >= 16]


def _difference(step: RolloutStep, compute: Compute, batches: list[Inputs]) -> float:
    largest = 0.0
    for inputs in batches:
        given = tuple(one.contiguous() for one in inputs)
        for mine, theirs in zip(step(*given), compute(*given), strict=True):
            error, size = ((one.double()).flatten(1).norm(dim=1) for one in (mine - theirs, mine))
            relative = (error / size).where(error != 0, 0.0)  # also of frames that are zero
            largest = max(largest, float(relative.nan_to_num(torch.inf).max()))
    return largest


def _facts(run: Run, recipe: Recipe, domain: Domain, step: RolloutStep, open_grid: bool) -> dict[str, str]:
    """What a consumer needs to know, each as JSON."""
    task = recipe.task
    units = dict(zip(domain.fields, domain.units, strict=True))
    values = {
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
        "any_grid": open_grid,
        "boundary": list(domain.boundary),
        "lengths": list(domain.lengths),
    }
    return {name: json.dumps(value) for name, value in values.items()}
