"""Write a finished run as a folder to publish, in the layout of Hugging Face's `save_pretrained`.

    model.safetensors                        the weights, byte-identical to those of the run
    config.json                              description of the model, for people and search
    README.md                                the model card, with the measured errors
    recipe.json, normaliser.json, data.json  further files for `sigmasolver.load` and `sigmasolver forecast`
    origins.json                             where a custom model comes from; its code is not included

Neither the training and test data nor the paths of their folders are included.

`as_run` copies a pretrained model of the package to a run folder, where the results of `evaluate` and `diagnose` are
stored.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sigmasolver import pretrained
from sigmasolver.forecast.checkpoint import ORIGINS, load, load_recipe
from sigmasolver.plugins import origin_of
from sigmasolver.recipes import Recipe
from sigmasolver.report.digits import significant
from sigmasolver.report.study import TRIVIAL_BASELINES
from sigmasolver.runs import Run, read_facts, read_records
from sigmasolver.runs.files import os_errors_as_value_errors, read_bytes, replacing, replacing_folder
from sigmasolver.version import __version__

__all__ = ["as_run", "save_pretrained"]

RUN_FILES = ("recipe.json", "normaliser.json", "data.json", "windows.h5", "weights.safetensors")


def save_pretrained(run: Run | str | Path, out: str | Path) -> Path:
    """Write a finished run as a folder to publish: safetensors, config.json and a model card.

    Args:
        run: a run, or its folder; measured errors appear on the card.
        out: the folder, new or empty, in the layout of Hugging Face's `save_pretrained`.

    Returns:
        The folder, which `load` takes like that of a run.

    Example:
        >>> from sigmasolver.model_cards.share import save_pretrained
        >>> folder = save_pretrained("runs/darcy", "published")
        >>> sorted(path.name for path in folder.iterdir())[:2], sigmasolver.load("./published").block
        (['README.md', 'config.json'], 1)
    """
    run, folder = run if isinstance(run, Run) else Run(run), Path(out)
    recipe = load_recipe(run)
    if not run.finished:
        raise ValueError(f"{run.path} is not finished; resume it first: sigmasolver train --resume {run.path}")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} already exists and is not empty; choose another folder.")
    parameters = sum(p.numel() for p in load(run.path).model.parameters())  # also checks that it loads
    rows = [row for row in read_records(run.records) if row.get("weights") == run.digest]
    with os_errors_as_value_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(folder) as temporary:
            _write_files(temporary, run, recipe, parameters, rows)
    return folder


def as_run(model: str | Path, folder: str | Path = "runs") -> Run:
    """The run that is meant: a run folder, or the name of a pretrained model.

    A pretrained model is copied to a run of its name in `folder`, unless it is already there: the package may be
    read-only, and is shared.
    """
    path = Path(model)
    if (path / "recipe.json").exists() or str(model) not in pretrained.names():
        return Run(path)
    source, copy = Run(pretrained.folder(str(model))), Run(Path(folder) / str(model))
    if copy.path.is_dir() and any(copy.path.iterdir()):
        if not copy.weights.exists() or copy.digest != source.digest:
            raise ValueError(
                f"{copy.path} is not a copy of the pretrained model {model}, whose results are stored there; rename it."
            )
        return copy
    with os_errors_as_value_errors(copy.path):
        copy.path.parent.mkdir(parents=True, exist_ok=True)
        with replacing_folder(copy.path) as temporary:
            for name in RUN_FILES:
                shutil.copyfile(source.path / name, temporary / name)
    return copy


def _write_files(folder: Path, run: Run, recipe: Recipe, parameters: int, rows: Sequence[dict[str, Any]]) -> None:
    target = Run(folder)
    target.write_json("recipe.json", run.recipe())
    target.write_json("normaliser.json", run.read_json("normaliser.json"))
    if (run.path / "data.json").exists():
        facts = _without_folder(run.read_json("data.json"))
        target.write_json("data.json", facts | ({"test": _without_folder(facts["test"])} if "test" in facts else {}))
    if (run.path / ORIGINS).exists():
        target.write_json(ORIGINS, run.read_json(ORIGINS))
    target.write_json("config.json", _config(recipe, parameters))
    _write_file(folder / "README.md", _card(run, recipe, parameters, rows).encode())
    _write_file(folder / "model.safetensors", read_bytes(run.weights))


def _without_folder(data: dict[str, Any]) -> dict[str, Any]:
    """Facts of a data set with the name of its file, but not its folder."""
    return {**data, "path": Path(str(data["path"])).name} if "path" in data else data


def _write_file(path: Path, content: bytes) -> None:
    with os_errors_as_value_errors(path), replacing(path) as file:
        file.write(content)


def _config(recipe: Recipe, parameters: int) -> dict[str, Any]:
    task, model = recipe.task, recipe.model
    return {
        "library_name": "sigmasolver",
        "library_version": __version__,
        "model_type": model.name,
        "parameters": parameters,
        "torch_dtype": "float32",
        "task": task.name,
        "inputs": list(task.inputs),
        "targets": list(task.targets),
        "grid": list(task.grid),
        "history": task.history,
        "block": task.block,
        **{name: value for name, value in recipe.to_plain()["model"].items() if name not in ("name", "options")},
    }


def _card(run: Run, recipe: Recipe, parameters: int, rows: Sequence[dict[str, Any]]) -> str:
    task, train, facts = recipe.task, recipe.train, read_facts(run.weights)
    shape = " × ".join(map(str, task.grid))
    tags = ["sigmasolver", "pde", "neural-operator", "surrogate-model", recipe.model.name]
    history_shape = " × ".join(map(str, ("batch", task.history, *task.grid, len(task.inputs))))
    output = "one frame" if task.block == 1 else f"{task.block} frames"
    name = recipe.model.name
    custom = [
        f"The model `{name}` is custom: register it with `sigmasolver.register_model` before loading, or pass its file "
        "with `--plugin`. Its code is not in this folder; `origins.json` says where it comes from.",
        "",
    ]
    lines = [
        "---",
        "library_name: sigmasolver",
        f"tags: {json.dumps(tags)}",
        "---",
        "",
        f"# {recipe.model.name} for {task.name}",
        "",
        f"{parameters:,} parameters. From {task.history} frame{'s' * (task.history > 1)} of {', '.join(task.inputs)} "
        f"on {shape} points it predicts {output} of {', '.join(task.targets)} per call, in physical units.",
        "",
        "## Use",
        "",
        "```python",
        "import sigmasolver",
        "",
        'forecaster = sigmasolver.load("./this-folder")',
        f"prediction = forecaster.rollout(history, steps={task.horizon})  # history: {history_shape}",
        "```",
        "",
        "On the command line: `sigmasolver forecast ./this-folder --input frames.npy --steps "
        f"{task.horizon} --out prediction.h5`.",
        "",
        *(custom if origin_of("model", name) else ()),
        "## Training",
        "",
        f"{facts['step']:,} updates of batch {train.batch}, {train.precision}, seed {train.seed}, sigmasolver "
        f"{__version__}; data fingerprint `{str(facts.get('data', 'unknown'))[:16]}`. `recipe.json` contains all "
        "settings.",
        "",
        "## Errors",
        "",
        *(
            _error_table(rows)
            or ["Not measured yet: run `sigmasolver evaluate` on the run, then write this folder again."]
        ),
        "",
        "## Limits",
        "",
        "- The errors are valid for data like the training data; other parameters, boundaries and grids were not "
        "measured unless a row above lists them.",
        "- They are means over windows; a single forecast can be worse and has no error bar.",
    ]
    return "\n".join(lines) + "\n"


def _error_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Relative L2 over the horizon next to that of the trivial baseline, for each evaluation."""
    names = ("part", "protocol", "horizon", "windows", "cohort", "forecast_precision", "data", "field")
    evaluations: dict[tuple[Any, ...], dict[bool, dict[str, Any]]] = {}
    for row in rows:
        if row["metric"] == "relative_l2" and row["lead"] is None and row.get("symmetries", 1) == 1:
            key = tuple(row.get(name) for name in names)
            evaluations.setdefault(key, {})[row["model"] in TRIVIAL_BASELINES] = row
    lines = []
    for pair in evaluations.values():
        if set(pair) == {True, False}:
            own, baseline = pair[False], pair[True]
            field = own["field"] or "mean over fields"
            sample = f"{own['windows']} windows of the {own['part']} split, horizon {own['horizon']}, {own['protocol']}"
            values = " | ".join(_percent(row["value"]) for row in (own, baseline))
            lines.append(f"| {field} | {sample} | {values} ({baseline['model']}) |")
    head = ["| relative L2 (%) | measured on | this model | trivial baseline |", "|---|---|--:|--:|"]
    return [*head, *lines] if lines else []


def _percent(value: float | None) -> str:
    return "not finite" if value is None else significant(100 * value)
