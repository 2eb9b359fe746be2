"""The Well: HDF5 files of one schema in the folders data/train, data/valid and data/test, with a stats.yaml.

    dimensions            time and the spatial axes that its attribute spatial_dims names
    boundary_conditions   per condition the axes it applies to, and WALL, OPEN or PERIODIC
    t0_, t1_, t2_fields   scalars, vectors and tensors: [trajectory] [time] space [component] [component]
    scalars               parameters of a trajectory

A dataset lacks the axes along which it does not vary; it is broadcast along them. What is constant in time (a
conductivity, a Reynolds number) becomes an input field, which is not forecast.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.formats.dimensions import CHANNEL, COUNT, SPACE, TIME
from sigmasolver.data.formats.hdf5 import SUFFIXES, attributes_of, open_variables, paths_in
from sigmasolver.data.formats.labelled import Labelled, Variable, as_trajectories, coordinate
from sigmasolver.data.formats.parts import concatenate, find_sources
from sigmasolver.data.formats.source import ForeignData, listed

__all__ = ["is_well", "read_stats", "read_well"]

GROUPS = ("t0_fields", "t1_fields", "t2_fields")
MIN_STD = 1e-4
"""The smallest standard deviation that the loader of The Well divides by."""


def is_well(path: Path) -> bool:
    files = _files(path)
    if not files:
        return False
    names = paths_in(files[0][1])
    return "dimensions/time" in names and any(name.startswith(GROUPS) for name in names)


def _files(path: Path) -> list[tuple[str | None, Path]]:
    if path.is_file():
        return [(None, path)] if path.suffix.lower() in SUFFIXES else []
    inner = path / "data" if (path / "data").is_dir() else path
    return find_sources(inner, lambda file: file.is_file() and file.suffix.lower() in SUFFIXES)


def read_well(path: Path, names: Sequence[str] | None = None, steady: bool | None = None) -> ForeignData:
    """Read a file, or a full data set with its split and statistics."""
    files = _files(path)
    if not files:
        raise ValueError(f"{path} contains no files of The Well (data/train/*.hdf5, ...).")
    foreign = concatenate(files, lambda file: as_trajectories(_open_labelled(file), names, steady))
    stats = path / "stats.yaml"
    if path.is_dir() and stats.is_file():
        values = read_stats(stats)
        attributes = {**foreign.parameters["attributes"], "stats": values}
        axes = _strings(attributes_of(files[0][1]).get("dimensions", {}).get("spatial_dims"))
        statistics = _statistics(stats, values, axes)
        # The loader of The Well does not normalise parameters; a network would hardly notice a viscosity of 1e-5.
        statistics["fitted"] = list(foreign.parameters.get("constant", ()))
        note = "stats.yaml contains field statistics; use them with task.normaliser=the-well."
        parameters = {**foreign.parameters, "attributes": attributes, "statistics": statistics}
        foreign = replace(foreign, parameters=parameters, notes=(*foreign.notes, note))
    return foreign


def _statistics(path: Path, stats: Mapping[str, Mapping[str, Any]], axes: Sequence[str]) -> dict[str, Any]:
    """Mean and standard deviation by our field names, as the loader of The Well uses them."""
    by_field: dict[str, list[float]] = {}
    for name, mean in stats.get("mean", {}).items():
        if name not in stats.get("std", {}):
            continue  # the normaliser reports it if needed
        means, stds = (np.asarray(values, dtype=np.float64) for values in (mean, stats["std"][name]))
        order = means.ndim
        if means.shape != stds.shape or means.shape != (len(axes),) * order:
            raise ValueError(
                f"{path} has mean of shape {means.shape} and std of shape {stds.shape} for {name!r} on {len(axes)} "
                "axes; download it again."
            )
        labels = ["_" + "".join(letters) for letters in product(axes, repeat=order)] if order else [""]
        for label, component_mean, std in zip(labels, means.ravel().tolist(), stds.ravel().tolist(), strict=True):
            by_field[f"{name}{label}"] = [component_mean, max(std, MIN_STD)]
    return {"inputs": by_field, "targets": by_field}


def _open_labelled(file: Path) -> Labelled:
    entries, attributes = open_variables(file), attributes_of(file)
    axes = _strings(attributes.get("dimensions", {}).get("spatial_dims"))
    if not axes or len(axes) > 3:
        raise ValueError(f"{file} has no axis names in dimensions (spatial_dims), so it is not a file of The Well.")
    variables, notes = _coordinates(file, entries, attributes, axes)
    boundaries = _boundaries(attributes, axes, notes)
    for letter, kind in boundaries.items():
        variables[letter] = replace(variables[letter], attributes={**variables[letter].attributes, "boundary": kind})
    skipped = []
    for path, entry in entries.items():
        group, _, name = path.partition("/")
        entry_attributes = attributes.get(path, {})
        if group in GROUPS:
            order = GROUPS.index(group)
            labels = tuple("".join(letters) for letters in product(axes, repeat=order)) if order else ()
            variables[name] = _field(file, name, entry, entry_attributes, len(axes), order, labels)
        elif group == "scalars" and not entry_attributes.get("time_varying"):
            variables[name if name not in variables else f"{name}_scalar"] = replace(
                entry, dims=(COUNT,) * len(entry.shape), repeat=True
            )
        elif group == "scalars":
            skipped.append(name)
    if skipped:
        notes.append(f"Skipped, as they vary in time but not in space: {listed(skipped)}.")
    metadata = {key: value for key, value in attributes[""].items() if not isinstance(value, list) or len(value) <= 16}
    return Labelled(file, variables, metadata, tuple(notes))


def _field(
    file: Path, name: str, entry: Variable, attrs: Mapping[str, Any], spatial: int, order: int, labels: tuple[str, ...]
) -> Variable:
    varies = [bool(varying) for varying in attrs.get("dim_varying", [True] * spatial)]
    dims = [COUNT] * bool(attrs.get("sample_varying", True)) + [TIME] * bool(attrs.get("time_varying", True))
    dims += [letter for letter, varying in zip(SPACE, varies, strict=False) if varying] + [CHANNEL] * order
    if len(dims) != len(entry.shape):
        raise ValueError(
            f"{name!r} in {file} has shape {entry.shape}, but its attributes give axes ({', '.join(dims)})."
        )
    return replace(entry, dims=tuple(dims), labels=labels, repeat=True)


def _coordinates(
    file: Path, entries: Mapping[str, Variable], file_attributes: Mapping[str, Mapping[str, Any]], axes: Sequence[str]
) -> tuple[dict[str, Variable], list[str]]:
    variables, notes = dict[str, Variable](), list[str]()
    for letter, name in ((TIME, "time"), *zip(SPACE, axes, strict=False)):
        entry = entries.get(f"dimensions/{name}")
        if entry is None:
            raise ValueError(f"{file} has no dimensions/{name}; copy or download it again.")
        values = entry.whole().astype(np.float64)
        if values.ndim > 1:  # one list per trajectory or time
            rows = values.reshape(-1, values.shape[-1])
            if not np.allclose(rows, rows[0], rtol=1e-6, atol=0):
                notes.append(f"{name} differs between trajectories; the values of the first are used for all.")
            values = rows[0]
        attributes = {} if letter == TIME else {"name": name}
        variables[letter] = coordinate(letter, values, attributes)
    return variables, notes


def _boundaries(attributes: Mapping[str, Mapping[str, Any]], axes: Sequence[str], notes: list[str]) -> dict[str, str]:
    """Boundary by axis letter. Where an axis has two kinds, a wall takes precedence over an open end."""
    kinds_by_axis: dict[str, set[str]] = {}
    for path, attrs in attributes.items():
        if re.fullmatch(r"boundary_conditions/[^/]+", path):
            for name in _strings(attrs.get("associated_dims")):
                kinds_by_axis.setdefault(name, set()).add(str(attrs.get("bc_type", "")).lower())
    boundaries = dict[str, str]()
    for letter, name in zip(SPACE, axes, strict=False):
        kinds = kinds_by_axis.get(name, set()) & {"periodic", "wall", "open"}
        if kinds:
            boundaries[letter] = next(kind for kind in ("periodic", "wall", "open") if kind in kinds)
        if len(kinds) > 1:
            notes.append(f"{name} has the boundaries {' and '.join(sorted(kinds))}: taken as {boundaries[letter]}.")
    return boundaries


def _strings(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(item) for item in value or ()]


def read_stats(path: Path) -> dict[str, dict[str, Any]]:
    """mean, std, ... by statistic and field: numbers, lists for vectors, lists of lists for tensors.

    Parses the subset of YAML that such a file uses: two levels of names, then numbers or lists.
    """
    stats: dict[str, dict[str, Any]] = {}
    values: list[Any] = []
    column = 0
    try:
        for line in path.read_text().splitlines():
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            if (entry := re.fullmatch(r"(\w+):\s*", line)) is not None:
                stats[entry[1]] = {}
            elif (entry := re.fullmatch(r"\s+([\w.-]+):\s*(.*?)\s*", line)) is not None:
                values = []
                stats[list(stats)[-1]][entry[1]] = _parse_numbers(entry[2]) if entry[2] else values
            elif (entry := re.fullmatch(r"\s*(-\s+)?-\s+(\S+)\s*", line)) is not None:
                column = column if values else line.index("-")
                if entry[1] is not None:
                    values.append([float(entry[2])])
                else:
                    (values[-1] if line.index("-") > column else values).append(float(entry[2]))
            else:
                raise ValueError
    except (ValueError, IndexError, AttributeError, UnicodeDecodeError):
        raise ValueError(f"{path} is not a statistics file of The Well; download it again.") from None
    return stats


def _parse_numbers(text: str) -> Any:
    """A number, or a list of numbers or lists in brackets."""
    return json.loads(text) if text.startswith("[") else float(text)
