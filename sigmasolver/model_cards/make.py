"""Write the folder of a pretrained model from a finished run: weights, unseen windows, card.

Every number on the card comes from the records of the run or is measured here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sigmasolver.data.header import Header
from sigmasolver.data.reader import Reader
from sigmasolver.data.store import Writer, open_store
from sigmasolver.data.windows import Windows
from sigmasolver.evaluate import metrics, records_of_test_part, trivial_baseline
from sigmasolver.experiments.ledger import budget_of
from sigmasolver.forecast import Forecaster
from sigmasolver.forecast.checkpoint import load, load_recipe, save
from sigmasolver.model_cards.score import (
    card_columns,
    compare_with_solver,
    score,
    seconds_of_model,
    shipped_windows,
    unseen_windows,
    value_of,
)
from sigmasolver.model_cards.text import card_text
from sigmasolver.recipes import Recipe, changed_settings
from sigmasolver.report.published import seed_tables, tables
from sigmasolver.runs import Run, provenance, read_facts, read_tensors
from sigmasolver.runs.quantise import dequantise, quantise
from sigmasolver.simulate import simulator_of
from sigmasolver.simulate.generate import header_of

__all__ = ["LIMIT", "data_facts", "make_folder", "tolerance_of"]

LIMIT = 1_000_000
"""Maximum size of the windows of one model in bytes."""
Tensors = Mapping[str, torch.Tensor]


def _rounded(dtype: torch.dtype, tensors: Tensors) -> Tensors:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


ENCODINGS: dict[str, Callable[[Tensors], Tensors]] = {
    "float16": partial(_rounded, torch.float16),
    "bfloat16": partial(_rounded, torch.bfloat16),
    "int16": quantise,
}
"""Two bytes per weight, by name; `dequantise` reads all of them."""
TOLERANCE_FACTOR, MIN_TOLERANCE = 10.0, 5e-5
"""Summation order differs across machines, so scores differ by a few times the round-off measured here, which may be
underestimated from few windows."""


def make_folder(
    run: Run, out: Path, simulated: Path, count: int, training_seed: int, others: Sequence[Run] = (), note: str = ""
) -> dict[str, Any]:
    """Write the folder of a pretrained model from a finished run; return the facts of its card.

    simulated        a store of unseen trajectories: the first `count` are shipped, all of them are measured
    training_seed    simulation seed of the training data; that of the unseen ones must differ
    others           runs of the same recipe with other seeds, from which `run` was selected
    note             a sentence for the card, for instance how settings were chosen
    """
    recipe, facts = load_recipe(run), read_facts(run.weights)
    if out.exists():
        raise ValueError(f"{out} already exists; remove it first.")
    if not run.finished:
        raise ValueError(f"{run.path} is not finished; only finished runs are shipped.")
    with open_store(simulated) as store:
        _check_unseen(store, recipe, training_seed, count)
        unseen = unseen_windows(store, recipe)
        forecaster = load(run.path)
        unseen_scores = score(forecaster, unseen, recipe)
        errors = _window_errors(forecaster, unseen)
        changes = {name: _encoding_change(run, encode, unseen, errors) for name, encode in ENCODINGS.items()}
        encoding = _choose_encoding(changes, errors)
        tensors = dequantise(read_tensors(run.weights)[0])
        folder = Run(out)
        folder.write_json("recipe.json", recipe.to_plain())
        folder.write_json("normaliser.json", run.read_json("normaliser.json"))
        stored = ENCODINGS[encoding](tensors) if encoding in ENCODINGS else tensors
        save(folder, stored, facts["step"], facts["steps"], facts["data"])
        _write_windows(store, unseen, count, out / "windows.h5")
        start = _last_input_frames(store, unseen, count)
        source = {"count": len(store), "seed": store.header.seed, "fingerprint": store.fingerprint}
    with open_store(out / "windows.h5") as kept:
        folder.write_json("data.json", data_facts(run.read_json("data.json"), kept))
        windows = shipped_windows(kept, recipe)
        shipped = load(out)
        shipped_scores = score(shipped, windows, recipe)
        seconds = seconds_of_model(windows, recipe, shipped, torch.device("cpu"))
        solver = compare_with_solver(windows, start, recipe, shipped_scores)
        float32_errors = _window_errors(shipped, windows)
        rounding = float(((_window_errors(shipped.double(), windows) - float32_errors) / float32_errors).abs().max())
        window_facts = {"count": len(kept), "seed": kept.header.seed, "fingerprint": kept.fingerprint,
                        "scores": shipped_scores, "bytes": (out / "windows.h5").stat().st_size, "rounding": rounding,
                        "tolerance": tolerance_of(rounding)}  # fmt: skip
    card = {
        "name": out.name,
        "task": recipe.task.name,
        "model": recipe.model.name,
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "training": _training_facts(run, recipe, training_seed),
        "note": note,
        "test": _test_facts(run, recipe, others),
        "weights": {"dtype": encoding, "bytes": folder.weights.stat().st_size, "digest": folder.digest,
                    "of_run": run.digest, "changes": changes},
        "unseen": {**source, "scores": unseen_scores},
        "windows": window_facts,
        "simulator": {"name": store.header.source, "parameters": dict(store.header.parameters)},
        "solver": {"model_seconds": seconds, "rows": [asdict(row) for row in solver]},
        "measured": provenance(torch.device("cpu")),
        "licence": "MIT",
    }  # fmt: skip
    folder.write_json("card.json", card)
    card = folder.read_json("card.json")  # as a reader will see it
    (out / "card.md").write_text(card_text(card))
    return card


def data_facts(facts: Mapping[str, Any], windows: Reader) -> dict[str, Any]:
    """The `data.json` of a pretrained model from that of its run: without the path of the training data, and with the
    shipped windows as separate test data."""
    test = {"path": windows.path.name, "fingerprint": windows.fingerprint, "count": len(windows),
            "frames": len(windows.header.layout.times), "windows": len(windows)}  # fmt: skip
    return {**{name: value for name, value in facts.items() if name != "path"}, "test": test}


def tolerance_of(rounding: float) -> float:
    """Relative tolerance of a score with respect to the card."""
    return max(MIN_TOLERANCE, float(f"{TOLERANCE_FACTOR * rounding:.1e}"))


def _check_unseen(store: Reader, recipe: Recipe, training_seed: int, count: int) -> None:
    header = store.header
    if header.seed is None or header.seed == training_seed:
        raise ValueError(
            f"{store.path} must be simulated with a seed that was not used for training; its seed is {header.seed}, "
            f"that of the training data is {training_seed}."
        )
    difference = header.difference(header_of(simulator_of(recipe.task.name), header.seed, header.dtype))
    if difference is not None:
        raise ValueError(f"{store.path} is not the output of simulate {recipe.task.name}: {difference}.")
    if len(store) < 2:
        raise ValueError(f"{store.path} has one trajectory; a card reports the spread over cases, so simulate several.")
    if not 1 <= count <= len(store):
        raise ValueError(f"{count} windows were requested, but {store.path} has {len(store)} trajectories.")


def _window_errors(forecaster: Forecaster, windows: Windows) -> torch.Tensor:
    """Relative L2 error of every window, mean over fields, in the forecaster's own precision."""
    dtype, errors = next(forecaster.model.parameters()).dtype, []
    for index in range(len(windows)):
        history, future = (tensor.to(dtype) for tensor in windows.batch([index]))
        with torch.no_grad():
            frames = forecaster.rollout(history, future.shape[1]).frames
        errors.append(metrics.relative_l2(frames, future).mean())
    return torch.stack(errors)


def _encoding_change(
    run: Run, encode: Callable[[Tensors], Tensors], windows: Windows, before: torch.Tensor
) -> dict[str, float]:
    """Change of the error when the weights are encoded: mean and standard deviation over windows."""
    forecaster = load(run.path)
    forecaster.model.load_state_dict(dequantise(encode(forecaster.model.state_dict())))
    change = _window_errors(forecaster, windows) - before
    return {"mean": float(change.mean()), "deviation": float(change.std())}


def _choose_encoding(changes: dict[str, dict[str, float]], errors: torch.Tensor) -> str:
    """A two-byte dtype if it changes the mean error by less than a tenth of its standard error, else float32."""
    best = min(changes, key=lambda name: changes[name]["mean"] ** 2 + changes[name]["deviation"] ** 2)
    standard_error = float(errors.std()) / math.sqrt(len(errors))
    return best if abs(changes[best]["mean"]) < 0.1 * standard_error else "float32"


def _write_windows(store: Reader, windows: Windows, count: int, path: Path) -> None:
    """Write the first window of the first trajectories, with the strides of the model, in float16."""
    spec, source = windows.spec, store.header
    indices = [source.layout.fields.index(name) for name in windows.fields]
    layout = replace(
        source.layout,
        fields=windows.fields,
        units=tuple(source.layout.units[index] for index in indices),
        coordinates=windows.coordinates,
        times=windows.times[: spec.span],
    )
    strides = {"time_stride": spec.time_stride, "space_stride": spec.space_stride}
    header = Header(layout, source.source, {**source.parameters, **strides}, source.seed, "float16")
    if header.nbytes * count > LIMIT:
        raise ValueError(f"{count} windows need {header.nbytes * count:,} bytes; use at most {LIMIT // header.nbytes}.")
    frames = slice(0, spec.time_stride * (spec.span - 1) + 1, spec.time_stride)
    space = (slice(None, None, spec.space_stride),) * len(layout.coordinates)
    with Writer(path, header, count) as writer:
        for trajectory in range(count):
            writer.append(store[(trajectory, frames, *space)][..., indices][None])


def _last_input_frames(store: Reader, windows: Windows, count: int) -> torch.Tensor:
    """(count, *grid): the first field of the last input frame of each window, at full stored resolution."""
    last = windows.spec.time_stride * (windows.spec.history - 1)
    return torch.stack([torch.from_numpy(store[(trajectory, last)][..., 0]) for trajectory in range(count)])


def _training_facts(run: Run, recipe: Recipe, seed: int) -> dict[str, Any]:
    facts, train = read_facts(run.weights), recipe.train
    splits = run.read_json("data.json")["parts"]
    count = sum(len(indices) for indices in splits.values())
    return {
        "data": f"sigmasolver simulate {recipe.task.name} --count {count} --seed {seed}",
        "data_seed": seed,
        "fingerprint": facts["data"],
        "train": len(splits["train"]),
        "test": len(splits["test"]),
        "epochs": train.epochs,
        "updates": facts["step"],
        "batch": train.batch,
        "budget_share": budget_of(facts["step"], recipe.task.name),
        "precision": train.precision,
        "seed": train.seed,
        "changed": changed_settings(recipe),
    }


def _test_facts(run: Run, recipe: Recipe, others: Sequence[Run]) -> dict[str, Any]:
    """The errors on the test split from the records, with those of the other seeds and of the paper."""
    paper = [
        None if number is None else number.text
        for column, number in zip(tables()["main"].columns, seed_tables()["canonical-seeds"].ours, strict=True)
        if column.task == recipe.task.name
    ]
    rows, records = [], _test_rows(run, recipe)
    for column, paper_value in zip(card_columns(recipe), paper, strict=True):
        value, deviation = value_of([row for row in records if row["model"] == recipe.model.name], column)
        baseline, _ = value_of([row for row in records if row["model"] == trivial_baseline(recipe)], column)
        seeds = {recipe.train.seed: value}
        for other in others:
            other_recipe = load_recipe(other)
            if replace(other_recipe, train=replace(other_recipe.train, seed=recipe.train.seed)) != recipe:
                raise ValueError(f"{other.path} differs from {run.path} in more than its seed.")
            matches = [row for row in _test_rows(other, other_recipe) if row["model"] == recipe.model.name]
            seeds[other_recipe.train.seed] = value_of(matches, column)[0]
        rows.append({"metric": column.metric, "field": column.field, "value": value, "deviation": deviation,
                     "yardstick": baseline, "seeds": seeds, "paper": paper_value,
                     "paper_scale": column.scale})  # fmt: skip
    keys = ("windows", "horizon", "grid", "machine", "torch", "commit", "date", "forecast_precision")
    return {"scores": rows, "yardstick": trivial_baseline(recipe), **{name: records[0][name] for name in keys}}


def _test_rows(run: Run, recipe: Recipe) -> list[dict[str, Any]]:
    rows = records_of_test_part(run, recipe)
    if not rows:
        raise ValueError(f"{run.path} has no records of its whole test split; evaluate it first.")
    return rows
