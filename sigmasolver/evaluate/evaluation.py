"""Evaluation of forecasts: roll out every test window, compute its errors, and record them as tidy rows.

Measures are kept per window in float64 before averaging, so the result does not depend on the batch size or the number
of processes. Only predicted frames are measured, never the input frames.

    relative_l2            leads and points in one norm; _lead: per lead; _final: the last lead; _joint: fields too;
                           means over fields exclude those that are zero in truth
    rmse, mae              over everything; _lead: per lead
    frmse                  RealPDEBench's error in Fourier space
    frmse_low, _mid, _high, r2, kinetic_energy, frequency_error    its other metrics, for its tasks only
    correlation_lead       over points, mean over windows;   correlation_time: first lead time below 0.8, if the lead
                           times are the same in all windows;
                           correlation_masked: number of frames of fields that are constant in truth and were
                           excluded, if any
    spectrum_error_lead    energy at wrong scales (periodic grids only)
    realm_error            REALM's error of normalised fields, summed over groups and leads; _per_call: mean over leads;
                           per group: its term of the sum
    blow_up, survived      fraction of forecasts that blew up, mean number of leads before that

If the task has a mask, only the fluid points of each window count; Fourier metrics set the solid to zero in both.

Every run is measured against a trivial baseline: persistence (repeat the last input frame), or for a
steady task the mean of the training targets (with the normalisers none and box-cox: their decoded zero).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sigmasolver.data.domain import Domain
from sigmasolver.data.header import Header
from sigmasolver.data.layout import shape_text
from sigmasolver.data.mask import in_fluid, zero_in_solid
from sigmasolver.data.normalise import Normaliser
from sigmasolver.data.reader import Reader
from sigmasolver.data.windows import Windows, WindowSpec, spread_evenly
from sigmasolver.evaluate import metrics
from sigmasolver.forecast import Forecaster, rollout
from sigmasolver.forecast.checkpoint import (
    domain_of,
    is_data_of,
    load,
    load_recipe,
    open_as_recorded,
    open_data_of,
    recorded_fields,
    refuse_changed_data,
    refuse_other_domain,
    symmetries_of_run,
)
from sigmasolver.forecast.replay import Replay, check_precision
from sigmasolver.forecast.symmetric import symmetric_rollout
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.recipes import Recipe
from sigmasolver.runs import Run, provenance, read_facts, read_records, replace_rows
from sigmasolver.runtime.parallel import World
from sigmasolver.settings import lookup
from sigmasolver.symmetries import SymmetryGroup, refuse_unsuitable
from sigmasolver.tasks import COHORTS, CYLINDER, REALPDEBENCH, TEST_MODES, cohort_of, field_groups
from sigmasolver.version import __version__

__all__ = [
    "LEGACY_DEFAULTS",
    "PROTOCOLS",
    "Request",
    "count_test_windows",
    "evaluate_run",
    "in_cohort",
    "measure",
    "predict",
    "records_of_test_part",
    "rows_of",
    "same_source",
    "source_of",
    "trivial_baseline",
    "windows_of",
]

PROTOCOLS = ("free", "teacher-forced")
LEGACY_DEFAULTS: dict[str, Any] = {"forecast_precision": "float32", "cohort": None, "symmetries": 1}
"""Values of options that older records, written before the option existed, do not contain."""
_REALPDEBENCH_TASKS = frozenset(task.name for task in (*REALPDEBENCH, CYLINDER))
Measures = dict[str, torch.Tensor]
"""By name, each with one entry per window: (n, ...)."""
Vectors = Sequence[Sequence[str]]
"""Names of the fields that are components of one vector."""


@dataclass(frozen=True)
class Request:
    """Options of an evaluation."""

    horizon: int | None = None
    """Frames to forecast; None: the task's."""
    grid: tuple[int, ...] | None = None
    """Points per axis, by striding the stored grid; None: the task's."""
    windows: int | None = None
    """Number of evenly spaced windows; None: all."""
    protocol: str = "free"
    split: str = "test"
    batch: int = 8
    precision: str = "float32"
    """Precision of the forecasts; metrics are always computed in float64."""
    cohort: str | None = None
    """A fixed set of test windows by name, see `tasks.COHORTS` and `tasks.TEST_MODES`; None: use `windows`."""
    symmetries: int = 1
    """Number of symmetries over which forecasts are averaged; 1: the usual forecast."""

    def __post_init__(self) -> None:
        check_precision(self.precision)
        if self.protocol not in PROTOCOLS:
            raise ValueError(f'Unknown protocol "{self.protocol}"; choose from {", ".join(PROTOCOLS)}.')
        if self.split not in ("train", "validation", "test"):
            raise ValueError(f'Unknown split "{self.split}"; choose from train, validation, test.')
        for name in ("horizon", "windows", "batch", "symmetries"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1.")
        if self.symmetries > 1 and self.protocol != "free":
            raise ValueError("Free forecasts are averaged over symmetries; omit the protocol, or set symmetries to 1.")
        if self.cohort is not None:
            lookup({**COHORTS, **TEST_MODES}, self.cohort, "cohort")
            if self.windows is not None:
                raise ValueError("--cohort already selects the windows; use either --windows or --cohort.")
            if self.split != "test":
                raise ValueError(
                    f"Cohorts are defined on the test split, not on the {self.split} split; omit one of them."
                )


def evaluate_run(
    run: Run,
    request: Request | None = None,
    path: str | Path | Reader | None = None,
    world: World | None = None,
    tick: Callable[[int, int], None] | None = None,
    anyway: bool = False,
) -> list[dict[str, Any]]:
    """Evaluate a run and its trivial baseline, and add the rows to its records; existing rows are reused.

    `path`: data other than those of the run, read with its options, or a reader of them; all trajectories are then test
    data. Data that differ in units, box, boundaries or time step are rejected; with `anyway` they are evaluated, and
    the rows state the difference. None: the data of the run, which must not have changed.
    """
    request, world = request or Request(), world or World()
    recipe = load_recipe(run)
    with _open(run, recipe, path, request) as store:
        windows = windows_of(run, recipe, store, request)
        differs = None
        if run.read_json("data.json").get("fingerprint") != store.fingerprint:
            domain = Domain.of(store.header.layout, windows.fields, windows.times)
            differs = refuse_other_domain(run, recipe, store.path, domain, anyway)
        source = source_of(run, recipe, windows, request, store.fingerprint)
        existing = _existing_rows(run, source)
        if existing:
            return existing
        group = symmetries_of_run(run, recipe) if request.symmetries > 1 else None
        if group is not None:
            refuse_unsuitable(group, recipe.task, store.header, windows.spec.space_stride)
        forecaster = Replay(load(run.path, world.device), request.precision)
        with matmul_precision("float32"):
            measured = measure(
                forecaster,
                windows,
                request,
                world,
                tick,
                recipe.task.vectors,
                recipe.task.name in _REALPDEBENCH_TASKS,
                group,
            )
        parameters = sum(p.numel() for p in forecaster.model.parameters() if p.requires_grad)
    task, lead_times = recipe.task, windows.lead_times(spread_evenly(len(windows), request.windows))
    facts = {**source, **provenance(world.device)}
    if differs is not None:
        facts["anyway"] = differs
    identity: dict[str, Any] = {"model": recipe.model.name, "seed": recipe.train.seed}
    rows: list[dict[str, Any]] = [
        {**facts, **identity, "metric": "parameters", "field": None, "lead": None, "value": parameters}
    ]
    for label, measures in zip((identity, {"model": trivial_baseline(recipe), "seed": None}), measured, strict=True):
        rows += [{**facts, **label, **row} for row in rows_of(measures, task.targets, lead_times, task.vectors)]
    if world.first:
        with run.locked("records", wait=True):
            if not _existing_rows(run, source):  # another process may have evaluated it in the meantime
                replace_rows(run.records, [*read_records(run.records), *rows])
    world.wait()  # the next evaluation reads the file
    return rows


def _open(run: Run, recipe: Recipe, path: str | Path | Reader | None, request: Request) -> Reader:
    if path is None:
        return open_data_of(run, recipe, request.split)
    return open_as_recorded(run, recipe, Path(path) if isinstance(path, str) else path)


def records_of_test_part(run: Run, recipe: Recipe, windows: int | None = None) -> list[dict[str, Any]]:
    """Records of free float32 forecasts on the full test split, or on `windows` of its windows, for the current weights
    of the run (for any, if it has none); empty if not evaluated, or only with other options."""
    if not run.records.exists():
        return []
    data = run.read_json("data.json")
    test = data.get("test")  # separate test data
    required: dict[str, Any] = {
        "data": (test or data).get("fingerprint"),
        "part": "test",
        "protocol": "free",
        "horizon": recipe.task.horizon,
        "grid": list(recipe.task.grid),
        "forecast_precision": "float32",
        "cohort": None,
        "symmetries": 1,
    }
    if run.weights.exists():
        required["weights"] = run.digest
    every = count_test_windows(run, recipe)
    if (windows, every) != (None, None):
        required["windows"] = min(count for count in (windows, every) if count is not None)
    return [row for row in read_records(run.records) if required.items() <= {**LEGACY_DEFAULTS, **row}.items()]


def count_test_windows(run: Run, recipe: Recipe) -> int | None:
    """Number of windows of the full test split; None for older runs, which do not record the length of their
    trajectories."""
    data = run.read_json("data.json")
    test = data.get("test")  # separate test data
    if test is None and "listed" in data:
        return int(data["listed"])
    if test is not None and "windows" in test:  # those that come with a pretrained model
        return int(test["windows"])
    if "frames" not in data:
        return None
    starts = recipe.evaluation_window_spec().count_in((test or data)["frames"])
    return starts * (test["count"] if test else len(data["parts"]["test"]))


def trivial_baseline(recipe: Recipe) -> str:
    """Name of the trivial baseline."""
    return "training-mean" if recipe.task.steady else "persistence"


def _existing_rows(run: Run, source: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Existing rows of this evaluation, without duplicates and with the current run name; empty if there are none."""
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in read_records(run.records):
        if same_source(source, row):
            key = tuple(row.get(name) for name in ("model", "seed", "metric", "field", "lead"))
            rows[key] = {**row, "run": source["run"]}
    if rows and not _is_complete(rows):
        raise ValueError(f"{run.records} contains only part of this evaluation; remove the file and evaluate again.")
    return list(rows.values())


def _is_complete(keys: Iterable[tuple[Any, ...]]) -> bool:
    """Whether these (model, seed, metric, field, lead) are a complete evaluation: model and baseline have the same
    metrics, and the model also has its number of parameters."""
    measured: dict[Any, set[tuple[Any, ...]]] = {}
    for model, _, *entry in keys:
        measured.setdefault(model, set()).add(tuple(entry))
    with_size = [entries for entries in measured.values() if ("parameters", None, None) in entries]
    metric_sets = {frozenset(entries - {("parameters", None, None)}) for entries in measured.values()}
    return (
        len(measured) == 2
        and len(with_size) == 1
        and len(metric_sets) == 1
        and ("survived", None, None) in next(iter(metric_sets))
    )


def same_source(source: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    """Whether a row matches `source`. The run is identified by the digest of its weights; its folder may have been
    renamed since the row was written."""
    return {key: value for key, value in source.items() if key != "run"}.items() <= {**LEGACY_DEFAULTS, **row}.items()


def source_of(run: Run, recipe: Recipe, windows: Windows, request: Request, fingerprint: str) -> dict[str, Any]:
    """Facts that identify an evaluation; `run`, the folder name, is only a label."""
    return {
        "task": recipe.task.name,
        "run": run.path.resolve().name,
        "step": read_facts(run.weights)["step"],
        "weights": run.digest,
        "package": __version__,
        "precision": recipe.train.precision,
        "forecast_precision": request.precision,
        "data": fingerprint,
        "part": request.split,
        "protocol": request.protocol,
        "horizon": windows.spec.horizon,
        "grid": list(windows.grid),
        "cohort": request.cohort,
        "symmetries": request.symmetries,
        "windows": len(spread_evenly(len(windows), request.windows)),
    }


def windows_of(run: Run, recipe: Recipe, store: Reader, request: Request) -> Windows:
    """The windows that `request` selects; raise ValueError if data other than the run's own contain one of its training
    trajectories."""
    windows = _windows_of_part(run, recipe, store, request)
    return windows if request.cohort is None else in_cohort(windows, recipe.task.name, request.cohort)


def _windows_of_part(run: Run, recipe: Recipe, store: Reader, request: Request) -> Windows:
    spec = recipe.evaluation_window_spec(request.horizon)
    if request.grid is not None:
        spec = replace(spec, space_stride=_stride(store.header, request.grid))
    facts = run.read_json("data.json")
    listed = recipe.task.split == "published" and store.published_windows is not None
    if is_data_of(run, store):
        trajectories = facts.get("parts", {}).get(request.split)
        windows = recipe.windows_of(store, request.split, spec) if listed else None
        if not trajectories or (listed and windows is None):
            hint = ", or pass other data with --data" if request.split == "test" else ""
            raise ValueError(f"The run {run.path} has no {request.split} split; choose another{hint}.")
        return Windows(store, trajectories, spec) if windows is None else windows
    if request.split != "test":
        raise ValueError(f"All trajectories of {store.path} are test data for {run.path}; omit --split.")
    if "path" in facts and (run.path / facts["path"]).resolve() == store.path.resolve():
        refuse_changed_data(run, store, given=True)  # the file of the training data, with other values
    spec = _spec_for_other_data(run, recipe, store.header, spec, request)
    test = recipe.windows_of(store, "test", spec) if listed else None
    if test is not None:
        return test  # the data set defines its own test windows
    trained, samples = set(facts.get("digests", ())), set(facts.get("samples", ()))
    fields = recorded_fields(store, facts)
    for number in range(len(store)):
        if store.sample(number, fields) in samples if samples else store.digest(number, fields) in trained:
            raise ValueError(
                f"Trajectory {number} of {store.path} is in the training data of {run.path}; remove it from the test "
                "data."
            )
    return Windows(store, range(len(store)), spec)


def _spec_for_other_data(run: Run, recipe: Recipe, header: Header, spec: WindowSpec, request: Request) -> WindowSpec:
    """The windows of a task in data that may already have its grid and frame spacing, and shorter trajectories."""
    known, times = domain_of(run), header.layout.times
    if request.grid is None and header.grid == recipe.task.grid:
        spec = replace(spec, space_stride=1)
    if known is not None and known.is_spaced_like(times):
        spec = replace(spec, time_stride=1)
    return spec.limited_to(len(times))


def in_cohort(windows: Windows, task: str, name: str) -> Windows:
    """The windows of a test split that belong to this cohort."""
    if name in TEST_MODES:
        return _in_test_mode(windows, name)
    cohort = cohort_of(name, task)
    needed, available = max(cohort.trajectories) + 1, len(windows.trajectories)
    if needed > available:
        raise ValueError(
            f"The cohort {name} of {task} needs {needed} test trajectories, but there are {available}; use more test "
            "data, or omit the cohort."
        )
    trajectories = [windows.trajectories[position] for position in cohort.trajectories]
    spec = replace(windows.spec, windows_per_trajectory=cohort.windows_per_trajectory, stride=cohort.stride)
    return Windows(windows.source, trajectories, spec)


def _in_test_mode(windows: Windows, name: str) -> Windows:
    groups = windows.source.groups if isinstance(windows.source, Reader) else {}
    selected = {trajectory for group in TEST_MODES[name] for trajectory in groups.get(group, ())}
    if not selected & set(windows.trajectories):
        available = {group for group, members in groups.items() if set(members) & set(windows.trajectories)}
        modes = [mode for mode, needed in TEST_MODES.items() if available & set(needed)]
        raise ValueError(
            f"No test window of these data is in the test mode {name}; "
            + (f"choose from {', '.join(modes)}." if modes else "the data do not define test modes; omit --cohort.")
        )
    return windows.of_trajectories(selected)


def _stride(header: Header, grid: tuple[int, ...]) -> int:
    """The stride that reduces the stored grid to this one."""
    if len(grid) == 1:
        grid = grid * len(header.grid)
    for stride in range(1, min(header.grid) + 1):
        if tuple(-(-points // stride) for points in header.grid) == grid:
            return stride
    raise ValueError(
        f"The stored grid of {shape_text(header.grid)} cannot be strided to {shape_text(grid)}; choose another grid, "
        "or pass a file on that grid with --data."
    )


def predict(
    forecaster: Forecaster,
    history: torch.Tensor,
    future: torch.Tensor,
    protocol: str,
    times: torch.Tensor | None = None,
    symmetric: tuple[SymmetryGroup, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Forecasts of the model and of the trivial baseline for the frames of `future`; `times` as in `rollout`.
    `symmetric`: average the forecasts over symmetries, given as a group and their number."""
    truth = future if protocol == "teacher-forced" else None
    if symmetric is None:
        frames = rollout(forecaster, history, future.shape[1], truth, times=times).frames
    else:
        frames = symmetric_rollout(forecaster, history, future.shape[1], *symmetric, time=times).mean.frames
    if forecaster.inputs.fields[: future.shape[-1]] != forecaster.targets.fields:  # steady
        return frames, forecaster.targets.decode(torch.zeros_like(future))
    if truth is None:
        return frames, history[:, -1:, ..., : future.shape[-1]].expand_as(future)
    block, length = forecaster.block, history.shape[1]
    all_frames = torch.cat((history[..., : future.shape[-1]], future), dim=1)
    last_known = [length - 1 + lead // block * block for lead in range(future.shape[1])]
    return frames, all_frames[:, last_known]


def measure(
    forecaster: Forecaster,
    windows: Windows,
    request: Request,
    world: World,
    tick: Callable[[int, int], None] | None = None,
    vectors: Vectors = (),
    real: bool = False,
    group: SymmetryGroup | None = None,
) -> tuple[Measures, Measures]:
    """Measures of every window, for the forecaster and the trivial baseline; `vectors` as in `tasks.field_groups`;
    `real` adds all RealPDEBench metrics; `group` are the symmetries that the request averages over."""
    symmetric = None
    if request.symmetries > 1:
        if group is None:
            raise ValueError(f"An average over {request.symmetries} symmetries needs their group.")
        group.on(windows.grid).first(request.symmetries)
        symmetric = (group, request.symmetries)
    selected = spread_evenly(len(windows), request.windows)
    if len(selected) < world.size:
        raise ValueError(f"{len(selected)} windows are too few for {world.size} processes; start fewer processes.")
    local = world.share(selected)
    parts: tuple[list[Measures], list[Measures]] = ([], [])
    sum_of_truth = torch.zeros((), dtype=torch.float64)
    encodings = (
        forecaster.targets.encode_forecast,
        forecaster.targets.encode,
    )  # persistence returns data, not a forecast
    for batch_number, indices in enumerate(local.split(request.batch)):
        history, future = (frames.to(world.device) for frames in windows.batch(indices))
        windows.refuse_non_finite(indices, history, future)
        times = windows.frame_times(indices)
        fluid = forecaster.fluid_points(history)
        with torch.no_grad():
            forecasts = predict(forecaster, history, future, request.protocol, times, symmetric)
            for part, frames, encode in zip(parts, forecasts, encodings, strict=True):
                measures = _measure_at_points(frames, future, forecaster.targets, encode, vectors, fluid)
                measures |= _measure_in_fourier(frames, future, windows.sides, fluid)
                measures |= _measure_realpdebench(frames, future) if real else {}
                part.append({name: values.cpu() for name, values in measures.items()})
        if real:
            sum_of_truth = sum_of_truth + future.double().sum(0).cpu()
        if tick is not None:
            tick(min((batch_number + 1) * request.batch, len(local)) * world.size, len(selected))
    gathered = [
        {name: world.gather(torch.cat([batch[name] for batch in part]), len(selected)) for name in part[0]}
        for part in parts
    ]
    if real:
        mean_truth = world.gather(sum_of_truth[None], world.size).sum(0) / len(selected)
        for measures in gathered:
            measures["variance"] = metrics.variance_from(measures["true_squared"].mean(0), mean_truth)
    return gathered[0], gathered[1]


def _measure_at_points(
    predicted: torch.Tensor,
    true: torch.Tensor,
    normaliser: Normaliser,
    encode: Callable[[torch.Tensor], torch.Tensor],
    vectors: Vectors,
    fluid: torch.Tensor | None,
) -> Measures:
    """Measures that are defined on any set of points: all points, or the `fluid` ones (B, 1, *grid, 1) of each sample.

    `encode` maps the predicted frames to normalised units.
    """
    if fluid is not None:
        points = fluid[:, 0, ..., 0]
        samples = [
            _measure_at_points(
                in_fluid(forecast, where)[None], in_fluid(truth, where)[None], normaliser, encode, vectors, None
            )
            for forecast, truth, where in zip(predicted, true, points, strict=True)
        ]
        return {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    blown, survived = metrics.blow_up(predicted, true)
    groups = list(field_groups(normaliser.fields, vectors).values())
    channels = [channel for group in groups for channel in group]  # fields of a group need not be adjacent
    encoded_forecast, encoded_truth = (frames[..., channels] for frames in (encode(predicted), normaliser.encode(true)))
    return {
        "relative_l2": metrics.relative_l2(predicted, true),
        "relative_l2_lead": metrics.relative_l2_per_lead(predicted, true),
        "relative_l2_joint": metrics.relative_l2_joint(predicted, true),
        "squared": metrics.squared_error(predicted, true),
        "absolute": metrics.absolute_error(predicted, true),
        "correlation_lead": metrics.pearson(predicted, true),
        "constant_lead": metrics.is_constant(true).double(),
        "blow_up": blown.double(),
        "survived": survived.double(),
        "grouped": metrics.grouped_squared_error(encoded_forecast, encoded_truth, [len(group) for group in groups]),
    }


def _measure_in_fourier(
    predicted: torch.Tensor, true: torch.Tensor, sides: tuple[float, ...] | None, fluid: torch.Tensor | None
) -> Measures:
    measures = {}
    if fluid is not None:
        predicted, true = zero_in_solid(predicted, fluid), zero_in_solid(true, fluid)
    if true.shape[1] > 1:
        measures["fourier"] = metrics.fourier_energy(predicted - true)
    if sides is not None:
        measures["spectrum_error_lead"] = metrics.relative_spectrum_error(predicted, true, sides)
    return measures


def _measure_realpdebench(predicted: torch.Tensor, true: torch.Tensor) -> Measures:
    return {
        "kinetic_energy": metrics.kinetic_energy(predicted, true),
        "frequency_error": metrics.frequency_error(predicted, true),
        "true_squared": true.double().square().flatten(1, -2).mean(1),
    }


def rows_of(
    measures: Mapping[str, torch.Tensor],
    fields: tuple[str, ...],
    lead_times: torch.Tensor | None,
    vectors: Vectors = (),
) -> list[dict[str, Any]]:
    """Tidy rows: metric, field, lead (counted from 1), value, deviation over windows. Non-finite values become None.
    `lead_times` as in `Windows.lead_times`.

    Groups of fields, such as the components of `vectors`, also have rows of their mean.
    """
    rows, named = [], _channels_by_name(fields, vectors)

    def add(metric: str, field: str | None, lead: int | None, value: float, deviation: float | None = None) -> None:
        finite = math.isfinite(value)
        rows.append({"metric": metric, "field": field, "lead": lead, "value": value if finite else None})
        if deviation is not None:
            rows[-1]["deviation"] = deviation if math.isfinite(deviation) else None

    def add_ratio(metric: str, values: torch.Tensor, lead: int | None) -> None:
        """Add means over windows of values (n, q) per field and group, without the fields that are zero in truth."""
        for name, members in named:
            means = metrics.component_mean(values, [q for q in members if q not in zero_fields] or members)
            add(metric, name, lead, float(means.mean()), float(means.std()) if len(means) > 1 else None)

    zero_fields = _zero_fields(measures)
    add_ratio("relative_l2", measures["relative_l2"], None)
    add_ratio("relative_l2_final", metrics.relative_l2_final_from(measures["relative_l2_lead"]), None)
    joint = measures["relative_l2_joint"]
    add("relative_l2_joint", None, None, float(joint.mean()), float(joint.std()) if len(joint) > 1 else None)
    for metric in ("relative_l2_lead", "spectrum_error_lead"):
        if metric in measures:
            for lead, values in enumerate(measures[metric].unbind(1), start=1):
                add_ratio(metric, values, lead)
    for name, members in named:
        squared, absolute = (measures[key][..., list(members)] for key in ("squared", "absolute"))
        add("rmse", name, None, _root_mean(squared))
        add("mae", name, None, float(metrics.mean_except(absolute)))
        for lead, values in enumerate(squared.split(1, dim=1), start=1):
            add("rmse_lead", name, lead, _root_mean(values))
        for lead, values in enumerate(absolute.split(1, dim=1), start=1):
            add("mae_lead", name, lead, float(metrics.mean_except(values)))
        if "fourier" in measures:
            add("frmse", name, None, float(metrics.frmse_from(measures["fourier"][..., list(members)])))
            if "variance" in measures:
                bands = metrics.frmse_bands_from(measures["fourier"][..., list(members)])
                for band, value in zip(("low", "mid", "high"), bands.tolist(), strict=True):
                    add(f"frmse_{band}", name, None, value)
        if "variance" in measures:
            variance = measures["variance"][list(members)].mean()
            add("r2", name, None, float(metrics.r2_from(squared.mean(), variance)))
        _add_correlation(add, name, members, measures, lead_times)
    for metric in ("kinetic_energy", "frequency_error"):
        if metric in measures:
            add(metric, None, None, float(measures[metric].mean()))
    groups = list(field_groups(fields, vectors))
    for position, group in [(None, None), *enumerate(groups)] if len(groups) > 1 else [(None, None)]:
        grouped = measures["grouped"] if position is None else measures["grouped"][..., [position]]
        add("realm_error", group, None, float(metrics.realm_error_from(grouped)))
        add("realm_error_per_call", group, None, float(metrics.realm_error_per_call_from(grouped)))
    add("blow_up", None, None, float(measures["blow_up"].mean()))
    add("survived", None, None, float(measures["survived"].mean()))
    return rows


def _zero_fields(measures: Mapping[str, torch.Tensor]) -> list[int]:
    """Fields that are zero in all true frames and so have no relative error."""
    constant = (measures["constant_lead"] > 0).flatten(0, 1).all(0)
    undefined = ~measures["relative_l2"].isfinite().any(0)
    return (constant & undefined).nonzero().flatten().tolist()


def _root_mean(squared: torch.Tensor) -> float:
    """`metrics.rmse` of all windows; torch's float64 square root is not always correctly rounded, Python's is."""
    return math.sqrt(float(metrics.mean_except(squared)))


def _add_correlation(
    add: Callable[..., None],
    name: str,
    members: tuple[int, ...],
    measures: Mapping[str, torch.Tensor],
    lead_times: torch.Tensor | None,
) -> None:
    """Add the mean over windows and fields; a constant truth has no correlation and is excluded."""
    values, constant = (measures[key][..., list(members)] for key in ("correlation_lead", "constant_lead"))
    mean = metrics.mean_correlation(values, constant > 0, "lead")
    for lead, value in enumerate(mean.tolist(), start=1):
        add("correlation_lead", name, lead, value)
    add("correlation", name, None, float(mean.mean()))
    if bool((constant > 0).any()):
        add("correlation_masked", name, None, float(constant.sum()))
    if lead_times is not None:
        add("correlation_time", name, None, float(metrics.correlation_time(mean, lead_times)))


def _channels_by_name(fields: tuple[str, ...], vectors: Vectors) -> list[tuple[str, tuple[int, ...]]]:
    """Channels of every field, of every group of several fields, and of all fields."""
    names = {name: (channel,) for channel, name in enumerate(fields)}
    groups = {name: group for name, group in field_groups(fields, vectors).items() if len(group) > 1}
    everything = {"all": tuple(range(len(fields)))} if len(fields) > 1 else {}
    return list((names | groups | everything).items())
