"""The two-dimensional cases of REALM: ignition in turbulence (IgnitHIT) and a reacting jet (EvolveJet).

    data/data.npz                 coords (2, H, W): x, then y; times, as text; variables, such as "H2O.npy";
                                  train_groups, val_groups, test_groups; num_chemical, num_temperature, num_density,
                                  num_velocity, num_pressure
    data/{train,val,test}/G.npz   "data" (frames, variables, H, W); "/" in the name of a group is "_" here

The folder of a trajectory is its part of the split. The array axis of x is inferred from the coordinates; the result
has x first and both axes increasing. Every variable of the file becomes a field, including N2 and p if present: a task
selects the fields that it names.

An .npz cannot be read partially, because its members are compressed: trajectories are read whole, and the most recent
ones are cached. That suits training with all trajectories in memory, which reads each of them once or twice; otherwise
import the files first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.arrays import members, open_members, open_npz
from sigmasolver.data.formats.source import ForeignData, check_numbers, listed
from sigmasolver.data.layout import Layout, shape_text
from sigmasolver.data.split import Split

__all__ = ["CASES", "FIELDS", "find_case", "holds_case", "how_to_get", "read_case"]

CASES = {"ignit-hit": "IgnitHIT", "evolve-jet": "EvolveJet"}
"""The name of each task in the benchmark."""
FIELDS = {
    "T": "temperature",
    "rho": "density",
    "Ux": "velocity_x",
    "Uy": "velocity_y",
    "p": "pressure",
    "pMax": "pressure_max",
}
"""Our name for each variable other than the species."""
PARTS = ("train", "val", "test")
_COUNTS = ("num_chemical", "num_temperature", "num_density", "num_velocity", "num_pressure")
_MEMBERS = ("coords", "times", "variables", *(f"{part}_groups" for part in PARTS), *_COUNTS)
_CACHE_BYTES = 512 * 2**20
"""Size of the cache of trajectories; it holds at least one."""


def holds_case(path: Path) -> bool:
    """Whether this folder contains a case."""
    index = _index_file(path)
    return index is not None and {"coords", "variables", "train_groups"} <= set(members(index))


def find_case(task: str, folder: Path) -> Path | None:
    """The download of this task: the folder itself or one in it, named IgnitHIT, realm-bench-IgnitHIT or ignit-hit."""
    if task not in CASES or not folder.is_dir():
        return None
    expected = _alphanumeric(CASES[task])
    for candidate in (folder.resolve(), *sorted(folder.iterdir())):
        if _alphanumeric(candidate.name).removeprefix("realmbench") == expected and _index_file(candidate) is not None:
            return candidate
    return None


def how_to_get(task: str, folder: Path) -> str:
    """Which files of this task are missing in the folder, and where they come from."""
    case = CASES[task]
    return (
        f"No data for {task} in {folder}: put the download of REALM's {case} (data set "
        f"realm-bench/realm-bench-{case}) there as {folder / case}, with data/data.npz and one data/PART/GROUP.npz for "
        f"each group of the splits train, val and test, or make small stand-ins with: sigmasolver make-fixture {task} "
        f"--out {folder / task}"
    )


def read_case(path: Path) -> ForeignData:
    """Read a case: first the trajectories for training, then those for validation, then those for testing."""
    index = _index_file(path)
    if index is None:
        raise ValueError(f"{path} contains no REALM data.npz, neither directly nor in its folder data.")
    coords, times, variables, *groups_and_counts = open_members(index, _MEMBERS)
    groups = [_strings(index, f"{part}_groups", names) for part, names in zip(PARTS, groups_and_counts, strict=False)]
    counts = [
        _count(index, name, number) for name, number in zip(_COUNTS, groups_and_counts[len(PARTS) :], strict=True)
    ]
    fields = _fields(index, _strings(index, "variables", variables), counts)
    order, (x, y) = _orient(index, coords)
    layout = Layout(fields, ("1",) * len(fields), ("open",) * 2, (np.sort(x), np.sort(y)), _parse_times(index, times))
    files = [_file(index, part, group) for part, names in zip(PARTS, groups, strict=True) for group in names]
    shape = (len(layout.times), len(fields), *np.shape(coords)[1:])
    for file in files:
        _check_trajectory(file, shape)

    def load(number: int) -> np.ndarray:
        """(frames, x, y, fields)."""
        (values,) = open_members(files[number], ["data"])
        if values.shape != shape:
            raise ValueError(f"{files[number]} changed while it was open; open the data set again.")
        return np.ascontiguousarray(values.transpose(0, 2 + order[0], 2 + order[1], 1)[:, _ascending(x), _ascending(y)])

    cached = lru_cache(maxsize=max(1, _CACHE_BYTES // (4 * int(np.prod(shape)))))(load)
    ends = accumulate(map(len, groups), initial=0)
    parts = [tuple(range(start, stop)) for start, stop in pairwise(ends)]
    return ForeignData(
        layout,
        len(files),
        lambda start, stop: np.stack([cached(number) for number in range(start, stop)]),
        notes=(
            "No units or boundaries: assumed dimensionless and open.",
            "Its files are compressed and can only be read whole; import them if the training data "
            "do not fit in memory.",
        ),
        files=(index, *files),
        frames=lambda number, start, stop: cached(number)[start:stop],
        split=Split(*parts),
    )


def _index_file(path: Path) -> Path | None:
    """The data.npz of the case in this folder."""
    candidates = (path / "data.npz", path / "data" / "data.npz") if path.is_dir() else ()
    return next((file for file in candidates if file.is_file()), None)


def _alphanumeric(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _strings(index: Path, name: str, values: np.ndarray) -> list[str]:
    if values.size and (values.dtype.kind != "U" or values.ndim != 1):
        raise ValueError(f"{name!r} in {index} must be a list of strings, not {values.dtype} of shape {values.shape}.")
    return [str(text) for text in values]


def _count(index: Path, name: str, values: np.ndarray) -> int:
    if values.size != 1 or values.dtype.kind not in "iu" or values.item() < 0:
        raise ValueError(f"{name!r} in {index} must be a single integer.")
    return int(values.item())


def _fields(index: Path, variables: Sequence[str], counts: Sequence[int]) -> tuple[str, ...]:
    """Our names of the variables, species first."""
    names = [name.removesuffix(".npy") for name in variables]
    if sum(counts) != len(names):
        raise ValueError(
            f"{index} names {len(names)} variables but counts {sum(counts)} ({', '.join(map(str, counts))} species, "
            "temperatures, densities, velocities, pressures); download it again."
        )
    species = names[: counts[0]]
    for name in (*(n for n in species if n in FIELDS), *(n for n in names[counts[0] :] if n not in FIELDS)):
        raise ValueError(
            f"The variable {name!r} in {index} is unexpected at this position: after {counts[0]} species come "
            f"{', '.join(FIELDS)}."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"{index} contains a duplicate variable: {listed(names)}.")
    return (*(f"species_{name}" for name in species), *(FIELDS[name] for name in names[counts[0] :]))


def _parse_times(index: Path, values: np.ndarray) -> np.ndarray:
    texts = _strings(index, "times", values)
    try:
        return np.array([float(text) for text in texts])
    except ValueError as error:
        raise ValueError(f"'times' in {index} must be numeric strings; got {error.args[0].split(': ')[-1]}.") from None


def _orient(index: Path, coords: np.ndarray) -> tuple[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
    """The array axes of x and y, and the values along them."""
    check_numbers(f"'coords' in {index}", coords, ("x and y", "height", "width"))
    if len(coords) != 2:
        raise ValueError(f"'coords' in {index} has {len(coords)} coordinates; expected x and y.")
    for order in ((0, 1), (1, 0)):
        x, y = (_axis_values(values, axis) for values, axis in zip(coords.astype(np.float64), order, strict=True))
        if x is not None and y is not None:
            return order, (x, y)
    raise ValueError(
        f"'coords' in {index} are not a rectangular grid: x must vary along one axis only, y along the other, and both "
        "must be monotonic."
    )


def _axis_values(values: np.ndarray, axis: int) -> np.ndarray | None:
    """The values along this axis, or None if they vary along the other one (beyond round-off) or are not monotonic."""
    line = values.take(0, axis=1 - axis)
    steps = np.diff(line)
    if not steps.size or not (np.all(steps > 0) or np.all(steps < 0)):
        return None
    deviation = np.abs(values - np.expand_dims(line, 1 - axis)).max()
    return line if deviation < 1e-3 * np.abs(steps).min() else None


def _ascending(line: np.ndarray) -> slice:
    """The slice that puts the values along an axis in increasing order."""
    return slice(None, None, 1 if line[0] < line[-1] else -1)


def _file(index: Path, part: str, group: str) -> Path:
    file = index.parent / part / f"{group.replace('/', '_')}.npz"
    if not file.is_file():
        raise ValueError(
            f"{file} not found, but {index} lists the group {group!r} in the {part} split; download it again."
        )
    return file


def _check_trajectory(file: Path, shape: tuple[int, ...]) -> None:
    """Raise ValueError if a trajectory does not match data.npz, without reading its values."""
    arrays = open_npz(file)
    if "data" not in arrays:
        raise ValueError(f"{file} has no array 'data'; available arrays: {listed(arrays) or 'none'}.")
    array = arrays["data"]
    check_numbers(f"'data' in {file}", array, ("frames", "variables", "height", "width"))
    for what, size, expected in zip(("frames", "variables"), array.shape, shape, strict=False):
        if size != expected:
            raise ValueError(
                f"'data' in {file} has {size} {what}, but data.npz lists {expected}; download the folder again."
            )
    if array.shape[2:] != shape[2:]:
        raise ValueError(
            f"'data' in {file} has grid {shape_text(array.shape[2:])}, but data.npz has "
            f"{shape_text(shape[2:])}; download the folder again."
        )
