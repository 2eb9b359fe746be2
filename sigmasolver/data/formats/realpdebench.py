"""RealPDEBench as downloaded, read in place: docs/realpdebench.md shows the files.

A folder {scenario} contains the trajectories in Arrow shards (hf_dataset/real) or HDF5 files (real), with lists of the
windows for training, validation and testing, the parameters of each trajectory, and optionally the statistics of the
benchmark's normaliser. To read its numerical data, give the path of their folder. The parameters of a trajectory (a
Reynolds number, ...) become fields that are constant in space and time.
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
from sigmasolver.data.formats.source import ForeignData
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
MAJOR_VERSION = 2
"""Data versions 2.x are supported."""
_BRANCHES = ("real", "numerical")
_GROUPS = {"seen": "remain", "in_dist": "in_dist_test", "out_dist": "out_dist_test"}
"""The file prefix of each group of trajectories, by our name of the group."""
_SPLITS = dict(zip(PARTS, ("train", "val", "test"), strict=True))
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class _Location:
    """The location of one branch of a scenario."""

    scenario: Path
    branch: str
    arrow: bool

    @property
    def trajectories(self) -> Path:
        return self.scenario / "hf_dataset" / self.branch if self.arrow else self.scenario / self.branch

    @property
    def exists(self) -> bool:
        """Whether there are trajectories; HDF5 files count only in a folder named after a scenario."""
        if not self.arrow and self.scenario.name not in SCENARIOS:
            return False
        return any(self.trajectories.glob("*.arrow" if self.arrow else "*.h5"))


def scenario_folder(path: Path) -> bool:
    """Whether this is the folder of a RealPDEBench scenario or of one of its branches."""
    return path.is_dir() and _locate(path) is not None


def missing_files(task: str, folder: Path) -> str:
    """A message about the files that a task of RealPDEBench needs, and where."""
    home = folder / task.replace("-", "_")
    return (
        f"No RealPDEBench data at {home}; put the download there: hf_dataset/real/data-*.arrow with "
        "hf_dataset/{train,val,test}_index_real.json, or real/*.h5 with {sim_id,time_id}_mapping_real.pt, and "
        "{remain,in_dist_test,out_dist_test}_params_real.json (.pt), mean_std.pt and, one folder up, version.json; "
        f"or make stand-ins with: sigmasolver make-fixture {task} --out {folder}"
    )


def read_realpdebench(path: Path) -> ForeignData:
    """Read the trajectories of a scenario: the measured ones, or those of the branch whose folder is given."""
    location = _locate(path)
    if location is None:
        raise ValueError(f"{path} contains no RealPDEBench trajectories (hf_dataset/real/*.arrow or real/*.h5).")
    version = _version(location.scenario.parent / "version.json")
    trajectories: Trajectories = (ArrowFiles if location.arrow else Hdf5Files)(location.trajectories)
    groups, parameters = _groups(location)
    order = _seen_first(trajectories.sim_ids, groups)
    index_of = {sim_id: index for index, sim_id in enumerate(order)}
    members = {
        group: [index_of[sim_id] for sim_id in sim_ids if sim_id in index_of] for group, sim_ids in groups.items()
    }
    conditions = _conditions(location, order, parameters)
    windows = _windows(location, index_of, trajectories.shape[0])
    statistics = _statistics(location.scenario / "mean_std.pt", trajectories.fields, tuple(conditions))
    layout, axis_notes = _layout(trajectories, tuple(conditions))

    def fields(index: int, start: int, stop: int, channels: Sequence[int]) -> list[np.ndarray]:
        names = [layout.fields[channel] for channel in channels]
        measured = trajectories.read(order[index], start, stop, [name for name in names if name not in conditions])
        shape = (stop - start, *trajectories.shape[1:])
        return [
            np.broadcast_to(np.float32(conditions[name][index]), shape) if name in conditions else measured[name]
            for name in names
        ]

    def frames(index: int, start: int, stop: int) -> np.ndarray:
        values = np.empty((len(layout.fields), stop - start, *trajectories.shape[1:]), np.float32)
        for channel, field in zip(values, fields(index, start, stop, range(len(values))), strict=True):
            channel[:] = field
        return np.moveaxis(values, 0, -1)  # a view: only the entries that are used get copied

    def read(start: int, stop: int) -> np.ndarray:
        return np.stack([frames(index, 0, trajectories.shape[0]) for index in range(start, stop)])

    entries = {
        "trajectories": list(order),
        "branch": location.branch,
        "data_version": version,
        "groups": members,
        "windows": None if windows is None else asdict(windows),
        "statistics": statistics,
    }
    return ForeignData(
        layout=layout,
        count=len(order),
        read=read,
        notes=(*axis_notes, *_notes(location, version, windows, statistics)),
        files=_files(location),
        frames=frames,
        fields=fields,
        split=_split(members, len(order)),
        parameters={name: value for name, value in entries.items() if value is not None},
    )


def _locate(path: Path) -> _Location | None:
    """Locate a branch: the measured data for the folder of a scenario, Arrow shards first; None if there is none."""
    path = path.resolve()
    candidates = [_Location(path, "real", True), _Location(path, "real", False)]
    if path.name in _BRANCHES:
        arrow = path.parent.name == "hf_dataset"
        candidates.append(_Location(path.parent.parent if arrow else path.parent, path.name, arrow))
    return next((location for location in candidates if location.exists), None)


def numerical_branch(path: Path) -> Path | None:
    """The folder of the numerical trajectories of a scenario, preferably in the format at `path`; None without."""
    location = _locate(path) if path.is_dir() else None
    if location is None:
        return None
    forms = (location.arrow, not location.arrow)
    candidates = (_Location(location.scenario, "numerical", arrow) for arrow in forms)
    return next((candidate.trajectories for candidate in candidates if candidate.exists), None)


def _files(location: _Location) -> tuple[Path, ...]:
    """The trajectories and their metadata files."""
    metadata = [location.scenario.parent / "version.json", location.scenario / "mean_std.pt"]
    for folder in (location.scenario, location.scenario / "hf_dataset"):
        metadata += [path for suffix in ("json", "pt") for path in sorted(folder.glob(f"*_{location.branch}.{suffix}"))]
    return (location.trajectories, *(path for path in metadata if path.is_file()))


def _version(path: Path) -> str | None:
    if not path.is_file():
        return None
    content = _load_json(path)
    version = str(content.get("data_version", "")) if isinstance(content, dict) else ""
    if version.partition(".")[0] != str(MAJOR_VERSION):
        raise ValueError(
            f"{path} has data version {version or 'unknown'}, but only versions {MAJOR_VERSION}.x are "
            "supported; download one of "
            "these, or update sigmasolver."
        )
    return version


def _load_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON; download it again.") from error


def _load_pt(path: Path) -> Any:
    """Load tensors, numbers and strings in tuples, lists and dicts; other pickled objects are rejected."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about pickles that it rejects
            return torch.load(io.BytesIO(path.read_bytes()), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, IndexError) as error:
        raise ValueError(
            f"{path} is corrupt, or contains objects other than tensors, numbers and strings, which "
            "are never loaded; save it again."
        ) from error


def _table(folder: Path, name: str) -> Any:
    """The content of the .json or .pt file of this name; None without."""
    for suffix, read in ((".json", _load_json), (".pt", _load_pt)):
        if (folder / (name + suffix)).is_file():
            return read(folder / (name + suffix))
    return None


def _groups(location: _Location) -> tuple[dict[str, tuple[str, ...]], dict[str, Sequence[float]]]:
    """The sim_ids of each group, and the parameters of each trajectory."""
    groups: dict[str, tuple[str, ...]] = {}
    parameters: dict[str, Sequence[float]] = {}
    for group, file in _GROUPS.items():
        table = _table(location.scenario, f"{file}_params_{location.branch}")
        if table is not None:
            if not isinstance(table, dict):
                raise ValueError(
                    f"{file}_params_{location.branch} of {location.scenario} is not a table; download it again."
                )
            groups[group] = tuple(sorted(table, key=_sort_key))
            parameters |= {sim_id: np.ravel(values).tolist() for sim_id, values in table.items()}
    return groups, parameters


def _sort_key(sim_id: str) -> tuple[list[float], str]:
    return _parse_sim_id(sim_id), sim_id


def _parse_sim_id(sim_id: str) -> list[float]:
    """The numbers in a simulation id, without the 3 of NH3: 3272_18.2_0.8_1.h5 has 3272, 18.2, 0.8, 1."""
    stem = sim_id.removesuffix(".h5").replace("NH3", "")
    return [float(number) for number in _NUMBER.findall(stem)]


def _seen_first(sim_ids: Sequence[str], groups: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Seen trajectories first, unseen ones last: a split by count tests on the last ones."""
    unseen = [sim_id for group in ("in_dist", "out_dist") for sim_id in groups.get(group, ()) if sim_id in sim_ids]
    return (*(sim_id for sim_id in sorted(sim_ids, key=_sort_key) if sim_id not in unseen), *unseen)


def _conditions(
    location: _Location, order: Sequence[str], parameters: Mapping[str, Sequence[float]]
) -> dict[str, list[float]]:
    """The parameters of all trajectories by name, from their sim_ids, or from the table if it has more of them."""
    names = SCENARIOS.get(location.scenario.name, ())
    rows = []
    for sim_id in order:
        numbers = max(_parse_sim_id(sim_id), parameters.get(sim_id, ()), key=len)
        if len(numbers) < len(names):
            raise ValueError(
                f"The name of trajectory {sim_id} in {location.trajectories} does not contain "
                f"{', '.join(names)}; name it as the "
                "benchmark does."
            )
        rows.append(numbers)
    return {name: [numbers[index] for numbers in rows] for index, name in enumerate(names)}


def _windows(location: _Location, index_of: Mapping[str, int], frames: int) -> WindowLists | None:
    try:
        lists = _listed_windows(location)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"The lists of {location.branch} windows in {location.scenario} must have sim_id and time_id for each "
            "window; download them again."
        ) from error
    if "train" not in lists:
        return None
    for part, windows in lists.items():
        _check_windows(part, windows, index_of, frames, location)
    return WindowLists.of(
        {part: [(index_of[sim_id], first) for sim_id, first in windows] for part, windows in lists.items()}
    )


def _listed_windows(location: _Location) -> dict[str, list[tuple[str, int]]]:
    """(sim_id, first frame) of every window, by part; parts without a list are missing."""
    if location.arrow:
        home = location.scenario / "hf_dataset"
        tables = {part: _table(home, f"{split}_index_{location.branch}") for part, split in _SPLITS.items()}
        return {
            part: [(row["sim_id"], operator.index(row["time_id"])) for row in rows]
            for part, rows in tables.items()
            if rows is not None
        }
    sims, times = (_table(location.scenario, f"{what}_mapping_{location.branch}") for what in ("sim_id", "time_id"))
    if sims is None or times is None:
        return {}
    if any(len(sims[split]) != len(times[split]) for split in sims):
        raise KeyError("time_id")
    available = {part: split for part, split in _SPLITS.items() if split in sims}
    return {
        part: list(zip(sims[split], map(operator.index, times[split]), strict=True))
        for part, split in available.items()
    }


def _check_windows(
    part: str, windows: Iterable[tuple[str, int]], index_of: Mapping[str, int], frames: int, location: _Location
) -> None:
    for sim_id, first in windows:
        if sim_id not in index_of:
            raise ValueError(
                f"The list of {part} windows includes trajectory {sim_id}, which is not in {location.trajectories}; "
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

    tensors = _load_pt(path)
    if (
        not isinstance(tensors, tuple | list)
        or len(tensors) != 4
        or not all(isinstance(tensor, torch.Tensor) for tensor in tensors)
    ):
        raise ValueError(
            f"{path} must contain four tensors (means of inputs and targets, then standard deviations); save it again."
        )
    mean_in, mean_out, std_in, std_out = (tensor.double().flatten().tolist() for tensor in tensors)
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


def _layout(trajectories: Trajectories, conditions: tuple[str, ...]) -> tuple[Layout, list[str]]:
    """Axes are (height, width), that is (y, x): transposed, every window would be a strided copy.

    The coordinates of the files are used if they are increasing, else indices.
    """
    frames, height, width = trajectories.shape
    axes, bad = [], []
    for name, count in (("y", height), ("x", width), ("t", frames)):
        values = trajectories.axes.get(name)
        axis = None if values is None else np.array(values, dtype=np.float64)
        if axis is not None and name != "t" and axis.ndim > 1:
            axis = axis[(0,) * (axis.ndim - 2)]
            axis = axis[:, 0] if name == "y" else axis[0]
        if axis is None or axis.shape != (count,) or not np.all(np.isfinite(axis)) or np.any(np.diff(axis) <= 0):
            bad.append(name)
            axis = np.arange(float(count))
        axes.append(axis)
    fields = (*trajectories.fields, *conditions)
    notes = [f"The values of {', '.join(bad)} are missing or not increasing; indices are used instead."] if bad else []
    return Layout(fields, ("1",) * len(fields), ("open", "open"), tuple(axes[:2]), axes[2], ("y", "x")), notes


def _split(members: Mapping[str, Sequence[int]], count: int) -> Split | None:
    """A split by trajectories that tests on those with unseen parameters; None without any."""
    unseen = sorted({*members.get("in_dist", ()), *members.get("out_dist", ())})
    seen = [index for index in range(count) if index not in unseen]
    return Split(tuple(seen), (), tuple(unseen)) if unseen and seen else None


def _notes(
    location: _Location, version: str | None, windows: WindowLists | None, statistics: Mapping[str, Any] | None
) -> list[str]:
    notes = [f"These are {location.branch} data of version {version}." if version else "version.json not found."]
    if windows is None:
        notes.append("No published lists of windows, so the split is by whole trajectories.")
    elif windows.shared():
        notes.append(
            f"In the published lists of windows, {len(windows.shared())} training trajectories are also in "
            "validation or test, as the publisher intends; task.split=trajectories separates them."
        )
    if statistics is None:
        notes.append(
            f"mean_std.pt not found, so the normaliser is fitted on the {location.branch} training windows; the "
            "benchmark fits it on numerical ones, as task.normaliser=numerical does."
        )
    return notes
