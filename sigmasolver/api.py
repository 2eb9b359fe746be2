"""The stages as functions: data, training, forecasts, errors, diagnoses, a page; `import sigmasolver` exports them.

Each accepts files or the return values of the others, and finished work in a run folder is not repeated. The examples
build on each other in the order of this file, in one folder. Imports are inside the functions, so that each loads only
what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    import xarray

    from sigmasolver.data.reader import Reader
    from sigmasolver.data.windows import Windows
    from sigmasolver.diagnose.subject import Findings
    from sigmasolver.forecast import Forecaster, Rollout
    from sigmasolver.recipes import Recipe
    from sigmasolver.runs import Run
    from sigmasolver.train.loop import Progress

__all__ = [
    "diagnose_run",
    "evaluate_run",
    "infer_recipe",
    "open_dataset",
    "open_windows",
    "recipe_of",
    "rollout",
    "simulate_dataset",
    "train_model",
    "write_report",
]


def simulate_dataset(
    task: str, count: int, out: str | Path, seed: int = 0, settings: str | Sequence[str] = (), device: str = "cpu"
) -> Path:
    """Simulate the data of a task into a store; an unfinished store is resumed.

    Args:
        task: darcy, ns2d, kf2d, it3d, smoke3d or demo.
        count: total number of trajectories in the store.
        out: the store, an HDF5 file.
        seed: trajectory i depends only on the seed and i.
        settings: changes of the simulator's parameters, such as "grid=64".
        device: "cpu", "cuda", "cuda:1", or "auto" (a GPU if available), here and below.

    Returns:
        The path of the store, whose trajectories are `(frames, *grid, fields)`.

    Example:
        >>> import sigmasolver
        >>> sigmasolver.simulate_dataset("darcy", 8, "darcy.h5", settings=["grid=16"]).name
        'darcy.h5'
    """
    from sigmasolver.runtime.parallel import device_of
    from sigmasolver.settings import override
    from sigmasolver.simulate import simulator_of
    from sigmasolver.simulate.generate import generate

    return generate(override(simulator_of(task), settings), count, seed, out, device_of(device)).path


def open_dataset(
    source: str | Path | xarray.Dataset,
    out: str | Path | None = None,
    fields: str | Sequence[str] | None = None,
    steady: bool | None = None,
    axes: str | Sequence[str] | None = None,
    boundary: str | Sequence[str] | None = None,
    dt: float | None = None,
    units: str | Sequence[str] | None = None,
    mask: str | None = None,
    skip_bad: bool = False,
) -> Reader:
    """Open a store, or other files in place; with `out` they are first converted into a store.

    Args:
        source: a store, a file or folder of any format that `sigmasolver inspect` recognises, or an `xarray.Dataset`
            in memory.
        out: the store that the import writes or resumes; None: the files are read in place.
        fields: names of the fields to read, in the order of the last axis if the file does not name them; here and
            below, a list of names may also be one string such as "u,v".
        steady: whether your own arrays have no time axis; None: inferred from the file.
        axes: axes of your own arrays in order, such as ("count", "time", "x", "y", "field").
        boundary: the boundary of each axis, such as ("periodic", "wall"); a single one for all axes.
        dt: time between two frames.
        units: the unit of each field, such as ("m/s", "m/s", "Pa").
        mask: the field that is 1 in a solid and 0 in the fluid.
        skip_bad: skip trajectories with NaN or infinite values, and record which; requires `out`.

    Returns:
        A reader, sliced like an array `(count, frames, *grid, fields)` with integers, slices and an ellipsis, and read
        only when sliced; it is a context manager, and `header.layout` has names, units, coordinates and times. The
        other functions accept it as `data`.

    Example:
        >>> with sigmasolver.open_dataset("darcy.h5") as dataset:
        ...     dataset.shape, dataset.header.layout.fields, dataset[0, 0, :, :, 1].shape
        ((8, 1, 16, 16, 2), ('coefficient', 'pressure'), (16, 16))
        >>> import numpy as np
        >>> np.save("waves.npy", np.random.default_rng(0).normal(size=(8, 6, 16, 16, 1)))
        >>> with sigmasolver.open_dataset("waves.npy", fields=["u"], boundary="periodic", dt=0.1) as dataset:
        ...     dataset.shape, dataset.header.layout.boundary
        ((8, 6, 16, 16, 1), ('periodic', 'periodic'))
        >>> with sigmasolver.open_dataset("waves.npy", "waves.h5", fields=["u"]) as dataset:
        ...     dataset.shape
        (8, 6, 16, 16, 1)
    """
    from sigmasolver.data.formats import ReadOptions, import_data, open_data
    from sigmasolver.data.formats.xarray_dataset import is_dataset
    from sigmasolver.data.store import is_store, open_store

    names, boundaries = _names(fields), _names(boundary)
    options = ReadOptions(names, steady, _names(axes), boundaries, dt, _names(units), mask, skip_bad)
    if is_dataset(source):
        if options != ReadOptions(options.fields, options.steady):
            raise ValueError(
                "An in-memory dataset defines its own axes, boundaries, times and units; set its attributes and "
                "omit axes, boundary, dt, units, mask and skip_bad."
            )
        return _from_xarray(source, out, names, steady)
    source = Path(source)
    if is_store(source):
        if out is not None or options != ReadOptions():
            raise ValueError(
                f"{source} is a store and needs no import; omit out= and the options that describe arrays."
            )
        return open_store(source)
    if not source.exists():
        raise ValueError(f"File or folder not found: {source}.")
    if out is not None:
        return open_store(import_data(source, out, options=options).path)
    if skip_bad:
        raise ValueError(f"To skip trajectories of {source}, pass the store to write with out=.")
    return open_data(source, options)


def recipe_of(name: str, model: str | None = None, seed: int = 42, settings: str | Sequence[str] = ()) -> Recipe:
    """A published recipe: the task, the model and how it is trained.

    Args:
        name: a task such as darcy or kf2d (the paper's settings), or another recipe such as kf2d-released.
        model: one of `list_models()`; None: the recipe's model.
        seed: random seed of the initial weights and the window order.
        settings: changes such as "train.epochs=2" or "model.width=64".

    Returns:
        A frozen dataclass with the attributes `task`, `model` and `train`.

    Example:
        >>> size = ["model.width=16", "model.depth=1", "model.heads=2", "model.slices=4"]
        >>> data = ["task.grid=(16,16)", "task.space_stride=1", "task.train=6", "task.test=2"]
        >>> recipe = sigmasolver.recipe_of("darcy", settings=[*size, *data, "train.batch=2", "train.updates=4"])
        >>> recipe.task.inputs, recipe.task.targets, recipe.train.updates
        (('coefficient',), ('pressure',), 4)
    """
    from sigmasolver.recipes import changed
    from sigmasolver.recipes import recipe_of as published

    return changed(published(name, model, seed), settings)


def infer_recipe(
    data: str | Path | Reader,
    model: str = "transolver-sigma",
    seed: int = 42,
    settings: str | Sequence[str] = (),
    device: str = "cpu",
) -> Recipe:
    """A recipe for your own data: fields, grid, split, frames and model size are inferred from the data.

    Args:
        data: a dataset from `open_dataset`, or the path of a store or of files that need no further options.
        model: one of `list_models()`.
        seed: random seed of the initial weights and the window order.
        settings: changes to the inferred recipe, such as "task.horizon=10" or "train.updates=500".
        device: the training device; on a GPU, the model is larger and trained for more steps.

    Returns:
        A frozen dataclass; print its attributes `task`, `model` and `train` to see what was inferred.

    Example:
        >>> sigmasolver.infer_recipe("waves.h5", settings=["task.history=2", "task.horizon=3"]).task.targets
        ('u',)
    """
    from sigmasolver.data.formats import open_data
    from sigmasolver.recipes import changed
    from sigmasolver.runtime.parallel import device_of
    from sigmasolver.train.infer_recipe import UserChoices, infer_from_data

    gpu = device_of(device).type == "cuda"
    with open_data(data) as store:
        recipe = infer_from_data(store, UserChoices(store.path.stem, model=model, seed=seed), gpu)
    return changed(recipe, settings)


def open_windows(data: str | Path | Reader, recipe: Recipe | str, split: str = "train") -> Windows:
    """The windows of a store that a recipe uses for training, validation or testing.

    Args:
        data: a dataset from `open_dataset`, or the path of a store or of files that need no further options.
        recipe: a recipe, or the name of one.
        split: train, validation or test.

    Returns:
        A sequence of pairs: history `(T_in, *grid, q_in)` and future `(H, *grid, q_out)`, float32 in physical units;
        `batch([0, 1])` returns several at once. It works as the dataset of a `torch.utils.data.DataLoader`.

    Example:
        >>> windows = sigmasolver.open_windows("darcy.h5", recipe, "test")
        >>> history, future = windows[0]
        >>> len(windows), history.shape, future.shape
        (2, torch.Size([1, 16, 16, 1]), torch.Size([1, 16, 16, 1]))
    """
    from sigmasolver.data.formats import open_data

    if split not in ("train", "validation", "test"):
        raise ValueError(f'Unknown split "{split}"; choose from train, validation, test.')
    recipe = recipe_of(recipe) if isinstance(recipe, str) else recipe
    store = open_data(data)
    windows = recipe.windows_of(store, split)
    if windows is None:
        raise ValueError(f"The {split} split of {store.path} is empty; change the split sizes of the recipe.")
    return windows


def train_model(
    recipe: Recipe | str,
    data: str | Path | Reader,
    out: str | Path,
    device: str = "cpu",
    watch: Callable[[Progress], None] | None = None,
) -> Run:
    """Train a model; a stopped run is resumed, a finished one is left unchanged.

    Args:
        recipe: a recipe, or the name of one.
        data: a dataset from `open_dataset`, or the path of a store or of files that need no further options.
        out: the run folder.
        device: the training device; on a GPU, steps are replayed as CUDA graphs.
        watch: called periodically with step, loss, validation error and learning rate; see docs/tracking.md.

    Returns:
        The run folder as a `Run`: `path`, `finished`, `read_log()`.

    Example:
        >>> run = sigmasolver.train_model(recipe, "darcy.h5", "runs/darcy")
        >>> run.finished, run.read_log()[-1]["step"]
        (True, 4)
    """
    from sigmasolver.runs import Run
    from sigmasolver.runtime.parallel import World, device_of
    from sigmasolver.train.engine import Execution
    from sigmasolver.train.job import train_run

    recipe = recipe_of(recipe) if isinstance(recipe, str) else recipe
    world = World(device=device_of(device))
    run = Run(out)
    engine = "graph" if world.device.type == "cuda" else "eager"
    train_run(recipe, data, run, Execution(world, engine), watch)
    return run


def rollout(
    model: Forecaster | Run | str | Path,
    history: torch.Tensor | np.ndarray,
    steps: int,
    time: torch.Tensor | np.ndarray | float | None = None,
    conditions: Mapping[str, torch.Tensor] | None = None,
) -> Rollout:
    """Forecast autoregressively from given frames: each block of frames is fed back as input for the next.

    Args:
        model: a forecaster from `load`, a run, its folder, or the name of a pretrained model.
        history: `(B, T_in, *grid, q_in)` in physical units; if the history is longer, its last frames are used.
        steps: number of frames to forecast.
        time: physical time of the last input frame, for a model with a time embedding.
        conditions: by name, one number per sample `(B,)`, for a forecaster with conditions.

    Returns:
        A `Rollout`: `frames` `(B, steps, *grid, q_out)` in physical units, NaN once a forecast is no longer
        finite, and `stopped`, the first lead at which that happens, or None.

    Example:
        >>> result = sigmasolver.rollout(run, history[None], steps=1)
        >>> result.frames.shape, result.stopped
        (torch.Size([1, 1, 16, 16, 1]), None)
    """
    from sigmasolver.forecast import Forecaster
    from sigmasolver.forecast.checkpoint import load
    from sigmasolver.runs import Run

    if not isinstance(model, Forecaster):
        model = load(model.path if isinstance(model, Run) else model)
    return model.rollout(history, steps, conditions, time)


def evaluate_run(
    run: Run | str | Path,
    data: str | Path | Reader | None = None,
    horizon: int | None = None,
    windows: int | None = None,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Evaluate a run on unseen data, next to a trivial baseline.

    The records are stored in the run folder; existing ones are reused.

    Args:
        run: a run, its folder, or the name of a pretrained model, which is copied to `runs/` first.
        data: other data, all of it used for testing: a path, read with the options of the run, or a dataset from
            `open_dataset`, used as it was opened; None: the test split of the run's own data, or the windows that come
            with a pretrained model.
        horizon: number of frames to forecast; None: the task's.
        windows: number of evenly spaced windows; None: all.
        device: where the forecasts are computed.

    Returns:
        Records: dictionaries with `model`, `metric`, `field`, `lead` (from 1; None: all leads), `value` and their
        provenance. `sigmasolver.metrics` defines the metrics.

    Example:
        >>> records = sigmasolver.evaluate_run(run)
        >>> sorted({record["model"] for record in records})
        ['training-mean', 'transolver-sigma']
        >>> [record["value"] > 0 for record in records if record["metric"] == "relative_l2"]
        [True, True]
    """
    from sigmasolver.evaluate import Request
    from sigmasolver.evaluate import evaluate_run as measure
    from sigmasolver.runtime.parallel import World, device_of

    world = World(device=device_of(device))
    return measure(_run(run), Request(horizon, windows=windows), data, world)


def diagnose_run(
    run: Run | str | Path,
    names: str | Sequence[str] | None = None,
    windows: int | None = None,
    device: str = "cpu",
    data: str | Path | Reader | None = None,
) -> dict[str, Findings]:
    """Diagnose why the forecasts of a run drift; the findings are stored in the run folder.

    Args:
        run: a run, its folder, or the name of a pretrained model, which is copied to `runs/` first.
        names: any of decomposition, trust, maps, corrections, routing, geometry, efficiency, interventions and
            components; None: all.
        windows: number of evenly spaced test windows; None: all.
        device: where it is computed.
        data: other data as in `evaluate_run`, all of it used for testing; None: the test split of the run's own data.

    Returns:
        By name, findings with `rows` (records like those of `evaluate_run`), `arrays`, and `skipped`, the reason
        why a diagnostic does not apply to this model, or None.

    Example:
        >>> routing = sigmasolver.diagnose_run(run, ["routing"])["routing"]
        >>> routing.skipped, all(1 <= row["value"] <= 4 for row in routing.rows if row["metric"] == "effective_slices")
        (None, True)
    """
    from sigmasolver.diagnose.run import diagnose_run as diagnose
    from sigmasolver.evaluate import Request
    from sigmasolver.runtime.parallel import device_of

    return diagnose(_run(run), _names(names), Request(windows=windows), device_of(device), path=data)


def write_report(
    runs: Run | str | Path | Sequence[Run | str | Path], out: str | Path, title: str | None = None
) -> Path:
    """Write the evaluations and diagnoses of runs of one task as an HTML page.

    Args:
        runs: evaluated runs or their folders, or a single one; diagnoses are shown if there are any.
        out: the HTML file, which is self-contained.
        title: its title; None: the task's name.

    Returns:
        The path of the page.

    Example:
        >>> page = sigmasolver.write_report([run], "page.html")
        >>> "Darcy" in page.read_text()
        True
    """
    from sigmasolver.diagnose.run import DIAGNOSTICS
    from sigmasolver.experiments.records import dimensions_of, join_records, label_runs
    from sigmasolver.report.assemble import study_of
    from sigmasolver.report.page import write_page
    from sigmasolver.runs import Run

    if not runs:
        raise ValueError("A page requires at least one run.")
    paths = [_run(run).path for run in ([runs] if isinstance(runs, Run | str | Path) else runs)]
    rows, arrays = join_records(label_runs(paths), tuple(DIAGNOSTICS))
    write_page(Path(out), study_of(rows, arrays, title, dimensions_of(paths, rows)))
    return Path(out)


def _from_xarray(source: Any, out: str | Path | None, fields: Sequence[str] | None, steady: bool | None) -> Reader:
    from sigmasolver.data.formats.xarray_dataset import read_dataset
    from sigmasolver.data.header import Header
    from sigmasolver.data.store import open_store, write_store

    if out is None:
        raise ValueError("Pass the store to import the dataset into with out=.")
    if Path(out).exists():
        raise ValueError(f"{out} already exists; choose another name or remove it.")
    contents = read_dataset(source, fields, steady)
    write_store(
        Path(out), Header(contents.layout, "xarray", dict(contents.parameters)), contents.read(0, contents.count)
    )
    return open_store(out)


def _names(values: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """A list of names, or a string of them as on the command line."""
    from sigmasolver.settings import split_names

    return split_names(values) if isinstance(values, str) else None if values is None else tuple(values)


def _run(run: Run | str | Path) -> Run:
    from sigmasolver.model_cards.share import as_run

    return as_run(run) if isinstance(run, str | Path) else run
