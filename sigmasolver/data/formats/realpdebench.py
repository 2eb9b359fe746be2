"""RealPDEBench as it is downloaded, read in place: docs/realpdebench.md shows the files.

A folder {scenario} holds the trajectories in Arrow shards (hf_dataset/real) or HDF5 files (real), with lists of the
windows that train, validate and test, the parameters of each trajectory, and perhaps the statistics of the benchmark's
normaliser. Its numerical data are read by naming their folder. The parameters of a trajectory (a Reynolds number, ...)
become fields that are constant in space and time.
"""

from __future__ import annotations

import io
import json
import math
import operator
import pickle
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data.formats.realpdebench_arrays import CHANNELS, ArrowFiles, Hdf5Files, Trajectories
from sigmasolver.data.formats.source import Foreign
from sigmasolver.data.layout import Layout
from sigmasolver.data.split import PARTS, Split, WindowLists

__all__ = ["SCENARIOS", "missing_files", "numerical_branch", "read_realpdebench", "scenario_folder"]

SCENARIOS: dict[str, tuple[str, ...]] = {
    "cylinder": ("reynolds",),
    "controlled_cylinder": ("reynolds", "frequency"),
    "fsi": ("reynolds", "mass_ratio", "damping"),
    "foil": ("reynolds", "angle"),
    "combustion": ("ammonia", "equivalence_ratio"),
}
"""The parameters of a trajectory, in the order of its sim_id."""
MAJOR = 2
"""Data versions 2.x are known."""
_BRANCHES = ("real", "numerical")
_GROUPS = {"seen": "remain", "in_dist": "in_dist_test", "out_dist": "out_dist_test"}
"""By our name, how the file of a group of trajectories begins."""
_SPLITS = dict(zip(PARTS, ("train", "val", "test"), strict=True))
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class _Place:
    """Where one branch of a scenario lies."""

    scenario: Path
    branch: str
    arrow: bool

    @property
    def trajectories(self) -> Path:
        return self.scenario / "hf_dataset" / self.branch if self.arrow else self.scenario / self.branch

    @property
    def exists(self) -> bool:
        """Files by sim_id are those of the benchmark only in a folder of its own name."""
        if not self.arrow and self.scenario.name not in SCENARIOS:
            return False
        return any(self.trajectories.glob("*.arrow" if self.arrow else "*.h5"))


def scenario_folder(path: Path) -> bool:
    """Whether this is a scenario of RealPDEBench, or one of its branches."""
    return path.is_dir() and _place(path) is not None


def missing_files(task: str, folder: Path) -> str:
    """What a task of RealPDEBench needs and where, in sentences."""
    home = folder / task.replace("-", "_")
    return (
        f"No RealPDEBench data at {home}; put the download there: hf_dataset/real/data-*.arrow with "
        "hf_dataset/{train,val,test}_index_real.json, or real/*.h5 with {sim_id,time_id}_mapping_real.pt, and "
        "{remain,in_dist_test,out_dist_test}_params_real.json (.pt), mean_std.pt and, one folder up, version.json; "
        f"or make stand-ins with: sigmasolver make-fixture {task} --out {folder}"
    )


def read_realpdebench(path: Path) -> Foreign:
    """The trajectories of a scenario: measured ones, or those of the branch whose folder is given."""
    place = _place(path)
    if place is None:
        raise ValueError(f"{path} contains no RealPDEBench trajectories (hf_dataset/real/*.arrow or real/*.h5).")
    version = _version(place.scenario.parent / "version.json")
    held: Trajectories = (ArrowFiles if place.arrow else Hdf5Files)(place.trajectories)
    groups, parameters = _groups(place)
    order = _ordered(held.sim_ids, groups)
    number = {sim_id: index for index, sim_id in enumerate(order)}
    members = {group: [number[one] for one in sim_ids if one in number] for group, sim_ids in groups.items()}
    conditions = _conditions(place, order, parameters)
    windows = _windows(place, number, held.shape[0])
    statistics = _statistics(place.scenario / "mean_std.pt", held.fields, tuple(conditions))
    layout, odd = _layout(held, tuple(conditions))

    def fields(index: int, start: int, stop: int, channels: Sequence[int]) -> list[np.ndarray]:
        names = [layout.fields[channel] for channel in channels]
        measured = held.read(order[index], start, stop, [name for name in names if name not in conditions])
        shape = (stop - start, *held.shape[1:])
        return [
            np.broadcast_to(np.float32(conditions[name][index]), shape) if name in conditions else measured[name]
            for name in names
        ]

    def frames(index: int, start: int, stop: int) -> np.ndarray:
        values = np.empty((len(layout.fields), stop - start, *held.shape[1:]), np.float32)
        for place, field in zip(values, fields(index, start, stop, range(len(values))), strict=True):
            place[:] = field
        return np.moveaxis(values, 0, -1)  # a view: only what is taken from it is put in order

    def read(start: int, stop: int) -> np.ndarray:
        return np.stack([frames(index, 0, held.shape[0]) for index in range(start, stop)])

    facts = {
        "trajectories": list(order),
        "branch": place.branch,
        "data_version": version,
        "groups": members,
        "windows": None if windows is None else asdict(windows),
        "statistics": statistics,
    }
    return Foreign(
        layout=layout,
        count=len(order),
        read=read,
        notes=(*odd, *_notes(place, version, windows, statistics)),
        files=_files(place),
        frames=frames,
        fields=fields,
        split=_split(members, len(order)),
        parameters={name: value for name, value in facts.items() if value is not None},
    )


def _place(path: Path) -> _Place | None:
    """A scenario is its measured data, shards first; the folder of a branch is that branch."""
    path = path.resolve()
    places = [_Place(path, "real", True), _Place(path, "real", False)]
    if path.name in _BRANCHES:
        arrow = path.parent.name == "hf_dataset"
        places.append(_Place(path.parent.parent if arrow else path.parent, path.name, arrow))
    return next((place for place in places if place.exists), None)


def numerical_branch(path: Path) -> Path | None:
    """The folder of the numerical trajectories of a scenario, in the form of those at `path`; None where it lacks."""
    place = _place(path) if path.is_dir() else None
    if place is None:
        return None
    forms = (place.arrow, not place.arrow)
    places = (_Place(place.scenario, "numerical", arrow) for arrow in forms)
    return next((one.trajectories for one in places if one.exists), None)


def _files(place: _Place) -> tuple[Path, ...]:
    """The trajectories, and whatever is said about them."""
    beside = [place.scenario.parent / "version.json", place.scenario / "mean_std.pt"]
    for folder in (place.scenario, place.scenario / "hf_dataset"):
        beside += [path for suffix in ("json", "pt") for path in sorted(folder.glob(f"*_{place.branch}.{suffix}"))]
    return (place.trajectories, *(path for path in beside if path.is_file()))


def _version(path: Path) -> str | None:
    if not path.is_file():
        return None
    held = _json(path)
    version = str(held.get("data_version", "")) if isinstance(held, dict) else ""
    if version.partition(".")[0] != str(MAJOR):
        raise ValueError(
            f"{path} has data version {version or 'unknown'}, but only versions {MAJOR}.x are "
            "supported; download one of "
            "these, or update sigmasolver."
        )
    return version


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON; download it again.") from error


def _pt(path: Path) -> Any:
    """Tensors, numbers and texts in tuples, lists and dicts; whatever else a pickle may hold is never loaded."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch has something to say about pickles that it refuses
            return torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, IndexError) as error:
        raise ValueError(
            f"{path} is corrupt, or contains objects other than tensors, numbers and strings, which "
            "are never loaded; save it again."
        ) from error


def _table(folder: Path, name: str) -> Any:
    """The .json or .pt of this name; None without."""
    for suffix, read in ((".json", _json), (".pt", _pt)):
        if (folder / (name + suffix)).is_file():
            return read(folder / (name + suffix))
    return None


def _groups(place: _Place) -> tuple[dict[str, tuple[str, ...]], dict[str, Sequence[float]]]:
    """The sim_ids of each group, and the parameters of each trajectory."""
    groups: dict[str, tuple[str, ...]] = {}
    parameters: dict[str, Sequence[float]] = {}
    for group, file in _GROUPS.items():
        held = _table(place.scenario, f"{file}_params_{place.branch}")
        if held is not None:
            if not isinstance(held, dict):
                raise ValueError(f"{file}_params_{place.branch} of {place.scenario} is not a table; download it again.")
            groups[group] = tuple(sorted(held, key=_sort_key))
            parameters |= {sim_id: np.ravel(values).tolist() for sim_id, values in held.items()}
    return groups, parameters


def _sort_key(sim_id: str) -> tuple[list[float], str]:
    return _numbers(sim_id), sim_id


def _numbers(sim_id: str) -> list[float]:
    """3272_18.2_0.8_1.h5: 3272, 18.2, 0.8, 1; 40NH3_1.1.h5: 40, 1.1."""
    plain = sim_id.removesuffix(".h5").replace("NH3", "")
    return [float(one) for one in _NUMBER.findall(plain)]


def _ordered(sim_ids: Sequence[str], groups: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Seen trajectories first, unseen ones last: where they are split by number, the last ones are the test."""
    unseen = [one for group in ("in_dist", "out_dist") for one in groups.get(group, ()) if one in sim_ids]
    return (*(one for one in sorted(sim_ids, key=_sort_key) if one not in unseen), *unseen)


def _conditions(
    place: _Place, order: Sequence[str], parameters: Mapping[str, Sequence[float]]
) -> dict[str, list[float]]:
    """One number for every trajectory by name, from its sim_id, or from the list of parameters where it says more."""
    names = SCENARIOS.get(place.scenario.name, ())
    each = []
    for sim_id in order:
        found = max(_numbers(sim_id), parameters.get(sim_id, ()), key=len)
        if len(found) < len(names):
            raise ValueError(
                f"The name of trajectory {sim_id} in {place.trajectories} does not contain "
                f"{', '.join(names)}; name it as the "
                "benchmark does."
            )
        each.append(found)
    return {name: [numbers[place] for numbers in each] for place, name in enumerate(names)}


def _windows(place: _Place, number: Mapping[str, int], frames: int) -> WindowLists | None:
    try:
        lists = _listed(place)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"The lists of {place.branch} windows in {place.scenario} must have sim_id and time_id for each window; "
            "download them again."
        ) from error
    if "train" not in lists:
        return None
    for part, windows in lists.items():
        _check(part, windows, number, frames, place)
    return WindowLists.of({part: [(number[one], first) for one, first in held] for part, held in lists.items()})


def _listed(place: _Place) -> dict[str, list[tuple[str, int]]]:
    """(sim_id, first frame) of every window by part, as far as there are lists."""
    if place.arrow:
        home = place.scenario / "hf_dataset"
        found = {part: _table(home, f"{split}_index_{place.branch}") for part, split in _SPLITS.items()}
        return {
            part: [(one["sim_id"], operator.index(one["time_id"])) for one in rows]
            for part, rows in found.items()
            if rows is not None
        }
    sims, times = (_table(place.scenario, f"{what}_mapping_{place.branch}") for what in ("sim_id", "time_id"))
    if sims is None or times is None:
        return {}
    if any(len(sims[split]) != len(times[split]) for split in sims):
        raise KeyError("time_id")
    there = {part: split for part, split in _SPLITS.items() if split in sims}
    return {
        part: list(zip(sims[split], map(operator.index, times[split]), strict=True)) for part, split in there.items()
    }


def _check(part: str, windows: Iterable[tuple[str, int]], number: Mapping[str, int], frames: int, at: _Place) -> None:
    for sim_id, first in windows:
        if sim_id not in number:
            raise ValueError(
                f"The list of {part} windows includes trajectory {sim_id}, which is not in {at.trajectories}; "
                "download the missing files, or the matching list."
            )
        if not 0 <= first < frames:
            raise ValueError(
                f"The list of {part} windows includes one at frame {first} of {sim_id}, which has "
                f"{frames} frames; download the "
                "matching list."
            )


def _statistics(path: Path, fields: Sequence[str], conditions: Sequence[str]) -> dict[str, Any] | None:
    """Mean and standard deviation of each field, of inputs and of targets; None without the file."""
    if not path.is_file():
        return None
    import torch

    held = _pt(path)
    if not isinstance(held, tuple | list) or len(held) != 4 or not all(isinstance(one, torch.Tensor) for one in held):
        raise ValueError(
            f"{path} must contain four tensors (means of inputs and targets, then standard deviations); save it again."
        )
    mean_in, mean_out, std_in, std_out = (part.double().flatten().tolist() for part in held)
    measured = ("intensity", *CHANNELS) if "intensity" in fields else ("velocity_x", "velocity_y", "pressure")
    inputs, targets = (
        {
            name: [mean, std or 1.0]
            for name, mean, std in zip((*measured, *conditions), means, stds, strict=False)
            if math.isfinite(mean) and math.isfinite(std)
        }
        for means, stds in ((mean_in, std_in), (mean_out, std_out))
    )
    return {"inputs": inputs, "targets": targets}


def _layout(held: Trajectories, conditions: tuple[str, ...]) -> tuple[Layout, list[str]]:
    """Axes are (height, width), that is (y, x): turned, every window would be copied against its order in the file.

    What the files say of them is taken where it is increasing.
    """
    frames, height, width = held.shape
    axes, odd = [], []
    for name, count in (("y", height), ("x", width), ("t", frames)):
        values = held.axes.get(name)
        one = None if values is None else np.array(values, dtype=np.float64)
        if one is not None and name != "t" and one.ndim > 1:
            one = one[(0,) * (one.ndim - 2)]
            one = one[:, 0] if name == "y" else one[0]
        if one is None or one.shape != (count,) or not np.all(np.isfinite(one)) or np.any(np.diff(one) <= 0):
            odd.append(name)
            one = np.arange(float(count))
        axes.append(one)
    fields = (*held.fields, *conditions)
    notes = [f"The values of {', '.join(odd)} are missing or not increasing; indices are used instead."] if odd else []
    return Layout(fields, ("1",) * len(fields), ("open", "open"), tuple(axes[:2]), axes[2], ("y", "x")), notes


def _split(members: Mapping[str, Sequence[int]], count: int) -> Split | None:
    """Whole trajectories apart: those with unseen parameters are the test. None where there are none."""
    unseen = sorted({*members.get("in_dist", ()), *members.get("out_dist", ())})
    seen = [number for number in range(count) if number not in unseen]
    return Split(tuple(seen), (), tuple(unseen)) if unseen and seen else None


def _notes(
    place: _Place, version: str | None, windows: WindowLists | None, statistics: Mapping[str, Any] | None
) -> list[str]:
    notes = [f"These are {place.branch} data of version {version}." if version else "version.json not found."]
    if windows is None:
        notes.append("No published lists of windows, so the split is by whole trajectories.")
    elif windows.shared():
        notes.append(
            f"In the published lists of windows, {len(windows.shared())} training trajectories are also in "
            "validation or test, as the publisher intends; task.split=trajectories separates them."
        )
    if statistics is None:
        notes.append(
            f"mean_std.pt not found, so the normaliser is fitted on the {place.branch} training windows; the "
            "benchmark fits it on numerical ones, as task.normaliser=numerical does."
        )
    return notes
