"""What is known of a pretrained model, and how anyone measures it again.

`make_folder` turns a finished run into a folder of `pretrained`; every number on the card comes from the run's records
or is measured there. `score` repeats the measurement on the windows of the folder, `compare_with_solver` sets the
solver beside the model on the machine at hand.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sigmasolver import metrics, pretrained
from sigmasolver.data.header import Header, header_of
from sigmasolver.data.store import Reader, Writer, open_store
from sigmasolver.data.windows import Windows
from sigmasolver.deliver import write_forecast
from sigmasolver.evaluate import Request, measure, records_of_test_part, rows_of, yardstick
from sigmasolver.forecast import Forecaster
from sigmasolver.ledger import budget_of
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.parallel import World
from sigmasolver.recipes import Recipe
from sigmasolver.replay import Replay
from sigmasolver.report.digits import significant, spread
from sigmasolver.report.published import Column, seed_tables, tables
from sigmasolver.runs import Run, provenance, read_facts, read_tensors
from sigmasolver.simulate import simulator_of
from sigmasolver.simulate.coarse import Work, coarse_work, full_work
from sigmasolver.trained import load, recipe_in, save

__all__ = [
    "LIMIT",
    "Demonstration",
    "SolverRow",
    "card_text",
    "compare_with_solver",
    "demonstrate",
    "make_folder",
    "score",
    "shipped_windows",
    "unseen_windows",
]

LIMIT = 1_000_000
"""Bytes of the windows of one model."""
HALF = {"float16": torch.float16, "bfloat16": torch.bfloat16}
TOLERANCE_FACTOR = 10.0
"""Another machine adds in another order: its rounding differs from ours by a few times our own rounding error."""


@dataclass(frozen=True)
class SolverRow:
    """The solver on one grid: seconds for one case, and its errors in the order of the card (None: it is the truth)."""

    grid: tuple[int, ...]
    seconds: float
    errors: list[float] | None = None


@dataclass(frozen=True)
class Demonstration:
    """A pretrained model at work on this machine."""

    card: dict[str, Any]
    scores: list[dict]
    seconds: float
    """Of the model, for one case."""
    solver: list[SolverRow]
    machine: str
    said: str | None
    """Of the file that was written."""


def demonstrate(
    name: str,
    device: torch.device,
    precision: str = "float32",
    out: Path | None = None,
    tick: Callable[[int, int], None] | None = None,
) -> Demonstration:
    """Forecast the unseen windows of a pretrained model, with the solver beside it; writes the forecasts to `out`."""
    folder = pretrained.folder(name)
    recipe, forecaster = recipe_in(Run(folder)), Replay(load(folder, device), precision)
    with open_store(folder / "windows.h5") as store:
        windows = shipped_windows(store, recipe)
        scores = score(forecaster, windows, recipe, device, tick)
        seconds, solver = compare_with_solver(windows, recipe, forecaster, scores, device)
        said = None if out is None else _write_frames(out, name, forecaster, windows, recipe, device)
    return Demonstration(pretrained.card(name), scores, seconds, solver, provenance(device)["machine"], said)


def _write_frames(
    out: Path, name: str, forecaster: Forecaster, windows: Windows, recipe: Recipe, device: torch.device
) -> str:
    task, old = recipe.task, windows.source.header.layout
    units = dict(zip(old.fields, old.units, strict=True))
    layout = replace(
        old, fields=task.targets, units=tuple(units[name] for name in task.targets), times=old.times[-task.horizon :]
    )
    frames = []
    with torch.no_grad(), matmul_precision("float32"):
        for number in range(len(windows)):
            history, _ = windows.batch([number])
            frames.append(forecaster.rollout(history.to(device), task.horizon).frames.cpu())
    step = read_facts(Run(pretrained.folder(name)).weights)["step"]
    return write_forecast(
        out, torch.cat(frames).numpy(), layout, {"run": name, "step": step, "start": "windows of the package"}
    )


def shipped_windows(store: Reader, recipe: Recipe) -> Windows:
    """The windows of a folder's store, one of each trajectory; thinned already."""
    spec = replace(recipe.evaluation_windows(), starts=1, time_stride=1, space_stride=1)
    return Windows(store, range(len(store)), spec)


def unseen_windows(store: Reader, recipe: Recipe) -> Windows:
    """The first window of every trajectory of a simulated file."""
    return Windows(store, range(len(store)), replace(recipe.evaluation_windows(), starts=1))


def score(
    forecaster: Forecaster,
    windows: Windows,
    recipe: Recipe,
    device: torch.device | str = "cpu",
    tick: Callable[[int, int], None] | None = None,
) -> list[dict]:
    """One row for each column that the paper has for the task: mean and deviation over windows, and the yardstick's."""
    with matmul_precision("float32"):
        measured = measure(forecaster, windows, Request(), World(device=torch.device(device)), tick)
    ours, plain = (rows_of(one, recipe.task.targets, 1.0) for one in measured)
    rows = []
    for column in _columns(recipe):
        value, deviation = _pick(ours, column)
        rows.append({"metric": column.metric, "field": column.field, "value": value, "deviation": deviation,
                     "yardstick": _pick(plain, column)[0]})  # fmt: skip
    return rows


def _columns(recipe: Recipe) -> list[Column]:
    found = [column for column in tables()["main"].columns if column.task == recipe.task.name]
    if not found:
        raise ValueError(f"The paper's main table has no column for {recipe.task.name}; such a model has no card.")
    return found


def _pick(rows: Sequence[dict], column: Column) -> tuple[float, float | None]:
    """The value and the deviation of this column's metric and field."""
    found = [r for r in rows if (r["metric"], r["field"], r["lead"]) == (column.metric, column.field, None)]
    if len(found) != 1 or found[0]["value"] is None:
        raise ValueError(
            f"There is no finite {column.metric} of {column.field}; evaluate the run on its test part first."
        )
    return found[0]["value"], found[0].get("deviation")


def compare_with_solver(
    windows: Windows,
    recipe: Recipe,
    forecaster: Forecaster,
    scores: Sequence[dict],
    device: torch.device,
    repeats: int = 3,
) -> tuple[float, list[SolverRow]]:
    """Seconds of the model for one case; the solver on its own grid, on the model's, and where it is as good.

    One case at a time, each warmed up once; the median of `repeats`, except for the long solve on the fine grid. The
    last row is the coarsest grid, in steps of a fifth, on which the solver's errors are not above those in `scores`.
    """
    task, seed = recipe.task, windows.source.header.seed
    history, future = (part.to(device) for part in windows.batch(range(len(windows))))
    with torch.no_grad(), matmul_precision("float32"):
        seconds = _seconds(lambda: forecaster.rollout(history[:1], task.horizon).frames, device, repeats)
    if seed is None:
        raise ValueError("The windows do not say which seed they were simulated with; make them with simulate.")
    simulator, apart, rows = simulator_of(task.name), task.time_stride, []
    full = full_work(simulator, seed, 0, task.horizon, apart, device)
    if full is None:
        return seconds, []
    rows.append(SolverRow(full.grid, _seconds(full.call, device, 1) / full.share))
    points = windows.coordinates[0]

    def coarse(count: int, grid: int) -> Work | None:
        return coarse_work(simulator, seed, range(count), history[:count], points, task.horizon, apart, grid)

    grid, first, adequate = len(points), True, False
    while not adequate and grid < max(full.grid):
        one, every = coarse(1, grid), coarse(len(windows), grid)
        if one is None or every is None:
            break
        errors = _errors(every.call()[..., None].float(), future, recipe)
        adequate = all(error <= row["value"] for error, row in zip(errors, scores, strict=True))
        if first or adequate:
            rows.append(SolverRow(one.grid, _seconds(one.call, device, repeats) / one.share, errors))
        grid, first = math.ceil(1.2 * grid), False
    return seconds, rows


def _errors(frames: torch.Tensor, true: torch.Tensor, recipe: Recipe) -> list[float]:
    """The columns of the card for frames that are there already."""
    whole, leads = metrics.relative_l2(frames, true), metrics.relative_l2_per_lead(frames, true)
    named = {"relative_l2": whole, "relative_l2_final": leads[:, -1]}
    places = [recipe.task.targets.index(column.field or "") for column in _columns(recipe)]
    return [
        float(named[column.metric][:, place].mean()) for column, place in zip(_columns(recipe), places, strict=True)
    ]


def _seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin)
    return sorted(times[1:])[repeats // 2]


def make_folder(
    run: Run, out: Path, simulated: Path, count: int, training_seed: int, others: Sequence[Run] = ()
) -> dict[str, Any]:
    """The folder of a pretrained model from a finished run; returns the facts of its card.

    simulated        a store of unseen trajectories: the first `count` are shipped, all of them are measured
    training_seed    what the training data were simulated with; the unseen ones must have another
    others           the same recipe with other seeds: `run` was chosen among them
    """
    recipe, facts = recipe_in(run), read_facts(run.weights)
    if out.exists():
        raise ValueError(f"{out} is there already; remove it first.")
    if not run.finished:
        raise ValueError(f"{run.path} is not finished; only finished runs are shipped.")
    with open_store(simulated) as store:
        _check_unseen(store, recipe, training_seed, count)
        unseen = unseen_windows(store, recipe)
        forecaster = load(run.path)
        fresh = score(forecaster, unseen, recipe)
        each = _each_error(forecaster, unseen)
        changes = {name: _change(run, dtype, unseen, each) for name, dtype in HALF.items()}
        chosen = _chosen(changes, each)
        tensors, _ = read_tensors(run.weights)
        folder = Run(out)
        folder.write_json("recipe.json", recipe.to_plain())
        folder.write_json("normaliser.json", run.read_json("normaliser.json"))
        stored = {name: tensor.to(HALF.get(chosen, torch.float32)) for name, tensor in tensors.items()}
        save(folder, stored, facts["step"], facts["steps"], facts["data"])
        _write_windows(store, unseen, count, out / "windows.h5")
        source = {"count": len(store), "seed": store.header.seed, "fingerprint": store.fingerprint}
    with open_store(out / "windows.h5") as kept:
        windows = shipped_windows(kept, recipe)
        shipped = load(out)
        plain = score(shipped, windows, recipe)
        seconds, solver = compare_with_solver(windows, recipe, shipped, plain, torch.device("cpu"))
        in_float32 = _each_error(shipped, windows)
        rounding = float(((_each_error(shipped.double(), windows) - in_float32) / in_float32).abs().max())
        of_windows = {"count": len(kept), "seed": kept.header.seed, "fingerprint": kept.fingerprint, "scores": plain,
                      "bytes": (out / "windows.h5").stat().st_size, "rounding": rounding,
                      "tolerance": float(f"{TOLERANCE_FACTOR * rounding:.1e}")}  # fmt: skip
    card = {
        "name": out.name,
        "task": recipe.task.name,
        "model": recipe.model.name,
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "training": _training(run, recipe, training_seed),
        "test": _tested(run, recipe, others),
        "weights": {"dtype": chosen, "bytes": folder.weights.stat().st_size, "digest": folder.digest,
                    "of_run": run.digest, "changes": changes},
        "unseen": {**source, "scores": fresh},
        "windows": of_windows,
        "simulator": {"name": store.header.source, "parameters": dict(store.header.parameters)},
        "solver": {"model_seconds": seconds, "rows": [asdict(row) for row in solver]},
        "measured": provenance(torch.device("cpu")),
        "licence": "MIT",
    }  # fmt: skip
    folder.write_json("card.json", card)
    card = folder.read_json("card.json")  # as everyone will read it
    (out / "card.md").write_text(card_text(card))
    return card


def _check_unseen(store: Reader, recipe: Recipe, training_seed: int, count: int) -> None:
    header = store.header
    if header.seed is None or header.seed == training_seed:
        raise ValueError(
            f"{store.path} must be simulated with a seed that the training did not use; its seed is {header.seed} "
            f"and that of the training data {training_seed}."
        )
    difference = header.difference(header_of(simulator_of(recipe.task.name), header.seed, header.dtype))
    if difference is not None:
        raise ValueError(f"{store.path} is not what simulate {recipe.task.name} makes: {difference}.")
    if not 1 <= count <= len(store):
        raise ValueError(f"{count} windows were asked for, and {store.path} holds {len(store)} trajectories.")


def _each_error(forecaster: Forecaster, windows: Windows) -> torch.Tensor:
    """Relative L2 error of every window, mean over fields, in the forecaster's own precision."""
    kind, found = next(forecaster.model.parameters()).dtype, []
    for number in range(len(windows)):
        history, future = (part.to(kind) for part in windows.batch([number]))
        with torch.no_grad():
            frames = forecaster.rollout(history, future.shape[1]).frames
        found.append(metrics.relative_l2(frames, future).mean())
    return torch.stack(found)


def _change(run: Run, dtype: torch.dtype, windows: Windows, before: torch.Tensor) -> dict[str, float]:
    """What rounding the weights to this type changes of the error: the mean over windows, and the deviation."""
    forecaster = load(run.path)
    with torch.no_grad():
        for parameter in forecaster.model.parameters():
            parameter.copy_(parameter.to(dtype))
    change = _each_error(forecaster, windows) - before
    return {"mean": float(change.mean()), "deviation": float(change.std())}


def _chosen(changes: dict[str, dict[str, float]], errors: torch.Tensor) -> str:
    """Two bytes a weight where that changes the mean by less than a tenth of its standard error, else four."""
    best = min(changes, key=lambda name: changes[name]["mean"] ** 2 + changes[name]["deviation"] ** 2)
    unsure = float(errors.std()) / math.sqrt(len(errors))
    return best if abs(changes[best]["mean"]) < 0.1 * unsure else "float32"


def _write_windows(store: Reader, windows: Windows, count: int, path: Path) -> None:
    """The first window of the first trajectories, thinned as the model sees them, in float16."""
    spec, old = windows.spec, store.header
    places = [old.layout.fields.index(name) for name in windows.fields]
    layout = replace(
        old.layout,
        fields=windows.fields,
        units=tuple(old.layout.units[place] for place in places),
        coordinates=windows.coordinates,
        times=windows.times[: spec.span],
    )
    thinned = {"time_stride": spec.time_stride, "space_stride": spec.space_stride}
    header = Header(layout, old.source, {**old.parameters, **thinned}, old.seed, "float16")
    if header.nbytes * count > LIMIT:
        raise ValueError(
            f"{count} windows need {header.nbytes * count:,} bytes; take {LIMIT // header.nbytes} at most."
        )
    frames = slice(0, spec.time_stride * (spec.span - 1) + 1, spec.time_stride)
    space = (slice(None, None, spec.space_stride),) * len(layout.coordinates)
    with Writer(path, header, count) as writer:
        for number in range(count):
            writer.append(store[(number, frames, *space)][..., places][None])


def _training(run: Run, recipe: Recipe, seed: int) -> dict[str, Any]:
    facts, train = read_facts(run.weights), recipe.train
    parts = run.read_json("data.json")["parts"]
    count = sum(len(part) for part in parts.values())
    return {
        "data": f"sigmasolver simulate {recipe.task.name} --count {count} --seed {seed}",
        "data_seed": seed,
        "fingerprint": facts["data"],
        "train": len(parts["train"]),
        "test": len(parts["test"]),
        "epochs": train.epochs,
        "updates": facts["step"],
        "batch": train.batch,
        "budget_share": budget_of(run, recipe),
        "precision": train.precision,
        "seed": train.seed,
    }


def _tested(run: Run, recipe: Recipe, others: Sequence[Run]) -> dict[str, Any]:
    """The errors on the test part from the records, with those of the other seeds and of the paper."""
    paper = [
        None if number is None else number.text
        for column, number in zip(tables()["main"].columns, seed_tables()["canonical-seeds"].ours, strict=True)
        if column.task == recipe.task.name
    ]
    rows, first = [], _test_rows(run, recipe)
    for column, printed in zip(_columns(recipe), paper, strict=True):
        value, deviation = _pick([row for row in first if row["model"] == recipe.model.name], column)
        plain, _ = _pick([row for row in first if row["model"] == yardstick(recipe)], column)
        seeds = {recipe.train.seed: value}
        for other in others:
            same = recipe_in(other)
            if replace(same, train=replace(same.train, seed=recipe.train.seed)) != recipe:
                raise ValueError(f"{other.path} differs from {run.path} in more than its seed.")
            found = [row for row in _test_rows(other, same) if row["model"] == recipe.model.name]
            seeds[same.train.seed] = _pick(found, column)[0]
        rows.append({"metric": column.metric, "field": column.field, "value": value, "deviation": deviation,
                     "yardstick": plain, "seeds": seeds, "paper": printed, "paper_scale": column.scale})  # fmt: skip
    kept = ("windows", "horizon", "grid", "machine", "torch", "commit", "date", "forecast_precision")
    return {"scores": rows, "yardstick": yardstick(recipe), **{name: first[0][name] for name in kept}}


def _test_rows(run: Run, recipe: Recipe) -> list[dict]:
    rows = records_of_test_part(run, recipe)
    if not rows:
        raise ValueError(f"{run.path} has no records of its whole test part; evaluate it first.")
    return rows


def _solver_lines(solver: dict[str, Any]) -> list[str]:
    lines = []
    for row in solver["rows"]:
        errors = "–" if row["errors"] is None else " / ".join(significant(100 * error) for error in row["errors"])
        ratio = significant(row["seconds"] / solver["model_seconds"])
        lines.append(f"| {' × '.join(map(str, row['grid']))} | {ratio} | {errors} |")
    return lines


def card_text(card: dict[str, Any]) -> str:
    """The card as people read it; every number is one of `card.json`."""
    training, test, windows, unseen = (card[name] for name in ("training", "test", "windows", "unseen"))
    weights, measured, simulator = card["weights"], card["measured"], card["simulator"]
    grid = " × ".join(map(str, test["grid"]))
    lines = [
        f"# {card['name']}",
        "",
        f"{card['model']} for the task {card['task']} on {grid}: {card['parameters']:,} parameters, stored as "
        f"{weights['dtype']} ({weights['bytes'] / 1e6:.1f} MB).",
        f'`sigmasolver.load("{card["name"]}")`, `sigmasolver forecast {card["name"]}`.',
        "",
        "## Training",
        "",
        f"- Data: `{training['data']}`, {training['train']} trajectories for the training and "
        f"{training['test']} for the test, fingerprint `{training['fingerprint'][:16]}`.",
        f"- Budget: {training['epochs']} epochs, {training['updates']:,} updates of batch {training['batch']}, "
        f"{100 * training['budget_share']:.3g} % of the paper's; {training['precision']}, seed {training['seed']}, "
        f"on one {test['machine']}.",
        "",
        "## Errors",
        "",
        f"Relative L2 in per cent, mean ± standard deviation over cases; {test['yardstick']} has learned nothing.",
        "",
        f"| | {card['model']} | {test['yardstick']} | all seeds | paper |",
        "|---|--:|--:|--:|--:|",
    ]
    for row, more, again in zip(test["scores"], unseen["scores"], windows["scores"], strict=True):
        label, seeds = f"{row['field']}, {row['metric']}", list(row["seeds"].values())
        mean = sum(seeds) / len(seeds)
        apart = math.sqrt(sum((one - mean) ** 2 for one in seeds) / (len(seeds) - 1)) if len(seeds) > 1 else None
        every = significant(100 * mean) if apart is None else spread(100 * mean, 100 * apart)
        printed = "–" if row["paper"] is None else row["paper"].replace("±", " ± ")
        for where, one, last in (
            (f"{label}, test part, {test['windows']} windows", row, f"{every} | {printed}"),
            (f"{label}, simulated again with seed {unseen['seed']}, {unseen['count']} cases", more, "– | –"),
            (f"{label}, the windows of this folder, {windows['count']}", again, "– | –"),
        ):
            own = 100 * one["value"]
            both = significant(own) if one["deviation"] is None else spread(own, 100 * one["deviation"])
            lines.append(f"| {where} | {both} | {significant(100 * one['yardstick'])} | {last} |")
    seeds = test["scores"][0]["seeds"]
    chosen = "The only seed that was trained."
    if len(seeds) > 1:
        chosen = (
            f"The best of {len(seeds)} seeds ({', '.join(map(str, seeds))}) by this very test error, so that error is "
        )
        chosen += "biased low; the mean over the seeds is not."
    changes = "; ".join(
        f"{name} {100 * change['mean']:+.1e} ± {100 * change['deviation']:.1e}"
        for name, change in weights["changes"].items()
    )
    parameters = ", ".join(f"{name} {value}" for name, value in simulator["parameters"].items())
    lines += [
        "",
        chosen,
        "",
        f"Stored as {weights['dtype']}: rounding the weights changes the error by (percentage points, mean ± deviation "
        f"over {unseen['count']} cases) {changes}.",
        "",
        "## Windows",
        "",
        f"{windows['count']} windows, trajectories 0 to {windows['count'] - 1} of "
        f"`sigmasolver simulate {card['task']} --seed {windows['seed']}`, thinned as the model sees them, float16, "
        f"{windows['bytes'] / 1e6:.2f} MB, fingerprint `{windows['fingerprint'][:16]}`. No training used this seed.",
        f"float32 differs from float64 by up to {windows['rounding']:.1e} of a window's error here; a score that is "
        f"more than {windows['tolerance']:.1e} of itself away from this card is a fault.",
        "",
        "## Beside the solver",
        "",
        "One case at a time, the model in float32. The first row is the truth, the next the solver on the model's "
        "grid, a third the coarsest grid on which the solver is as good as the model.",
        "",
        "| | seconds of the solver / seconds of the model | relative L2 of the solver in per cent |",
        "|---|--:|--:|",
        *_solver_lines(card["solver"]),
        "",
        f"Measured with torch {measured['torch']} on {measured['machine']}, {measured['date']}.",
        "",
        "## Limits",
        "",
        f"- Trained on one simulator with one set of parameters ({simulator['name']}: {parameters}). Other parameters, "
        "boundary conditions, geometries and data of other origin were not measured.",
        f"- Trained and measured on {grid} only, for {test['horizon']} frame{'s' * (test['horizon'] > 1)}; on "
        "other grids it runs, and was not measured.",
        "- The error is a mean over cases; a single case can be worse, and there is no error bar with a forecast.",
        "",
        f"Licence: {card['licence']}, as the package. Trained on data that the package simulates; nothing of others "
        "is in it.",
    ]
    return "\n".join(lines) + "\n"
