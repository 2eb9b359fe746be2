"""Configuration files of recipes: TOML with a comment on every setting, or JSON as in a run folder."""

from __future__ import annotations

import json
import tomllib
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from sigmasolver.recipes.recipe import Recipe
from sigmasolver.runs.files import read_bytes
from sigmasolver.settings import list_settings, to_plain

__all__ = ["config_text", "read_config"]


def read_config(path: Path) -> Recipe:
    """Read a recipe from a .toml or .json file; missing settings have their defaults."""
    try:
        text = read_bytes(path).decode()
    except FileNotFoundError:
        raise ValueError(f"{path} not found; `sigmasolver train TASK --print-config` writes one.") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8; write it as TOML or JSON.") from None
    read = json.loads if path.suffix == ".json" else tomllib.loads
    try:
        return Recipe.from_plain(read(text))
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ValueError(f"{path} is not valid {kind}: {' '.join(str(error).split())}.") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply to be a recipe.") from None
    except ValueError as error:
        raise ValueError(f"{path} cannot be used: {error}") from None


def config_text(recipe: Recipe) -> str:
    """Return the recipe as TOML, which `read_config` reads back exactly. TOML has no null, so a setting that is none is
    written as a comment; its default is none."""
    meanings = {setting.name: setting.meaning for setting in list_settings(recipe)}
    return "\n".join(_table(recipe, "", meanings)).lstrip() + "\n"


def _table(section: Any, prefix: str, meanings: dict[str, str]) -> list[str]:
    lines = [f"\n[{prefix[:-1]}]"] if prefix else []
    values = {field.name: getattr(section, field.name) for field in fields(section)}
    for name, value in values.items():
        if not is_dataclass(value):
            line = (
                f"# {name} is none" if value is None else f"{name} = {json.dumps(to_plain(value), ensure_ascii=False)}"
            )
            lines.append(f"{line}  # {meanings[prefix + name]}")
    for name, value in values.items():
        if is_dataclass(value):
            lines += _table(value, f"{prefix}{name}.", meanings)
    return lines
