"""Trained weights that come with the package: a folder for each model, found by its name.

    recipe.json, normaliser.json, weights.safetensors   a run folder as `sigmasolver.load` reads it
    data.json                                           what is recorded of the training data, which are not included
    windows.h5                                          a few unseen windows with the truth, a float16 store
    card.json, card.md                                  what is known of the model, as facts and as text

A new model is a new folder; `benchmarks/ship.py` makes one from a run.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sigmasolver.settings import suggest

__all__ = ["card", "folder", "is_pretrained", "names", "resolve"]

_HERE = Path(__file__).parent


def names() -> list[str]:
    """The models that come with the package."""
    return sorted(path.parent.name for path in _HERE.glob("*/card.json"))


def folder(name: str) -> Path:
    """The folder of the model of this name."""
    if name not in names():
        raise ValueError(f'There is no pretrained model "{name}"; {suggest(name, names())}')
    return _HERE / name


def card(name: str) -> dict[str, Any]:
    """The facts of the card of this model."""
    facts: dict[str, Any] = json.loads((folder(name) / "card.json").read_text())
    return facts


def is_pretrained(path: str | Path) -> bool:
    """Whether this is the folder of a pretrained model."""
    return Path(path).resolve().parent == _HERE.resolve() and Path(path).name in names()


def resolve(model: str | Path) -> Path:
    """The run folder that is meant: a string without a slash may name a pretrained model, all else is a path."""
    path = Path(model)
    if isinstance(model, Path) or os.sep in model or "/" in model:
        return path
    if model in names():
        if (path / "recipe.json").exists():
            raise ValueError(
                f'"{model}" is a pretrained model and also a run folder here; write ./{model} for the folder, or call '
                "from another directory for the pretrained model."
            )
        return folder(model)
    if not path.exists():
        raise ValueError(
            f'There is no run folder "{model}" here, and no pretrained model of that name; pretrained models: '
            f"{', '.join(names())}."
        )
    return path
