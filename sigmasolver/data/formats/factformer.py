"""Files of FactFormer: Kolmogorov flow, isotropic turbulence and smoke.

    KF2D     one .npy (count, frames, s, s): vorticity, torus of side 2π, frames 1/32 apart after time 2
    IT3D     a folder per trajectory with prs, vx, vy, vz.npy, each (frames, s, s, s): torus of side 2π,
             frames 0.05 apart
    Smoke3D  smoke_<number>.npz with fluid_field (frames, s, s, s, 1) and velocity (…, 3): side 8, frames 0.75
             apart after eight steps; velocity on the lower faces of the cells

None of them contains coordinates or times; those used here come from the scripts that generated the files.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from pathlib import Path

import numpy as np

from sigmasolver.data.formats.arrays import members, open_members, open_npy
from sigmasolver.data.formats.source import WHOLE_TRAJECTORIES, ForeignData, check_numbers, periodic
from sigmasolver.data.layout import Layout

__all__ = [
    "SMOKE",
    "TURBULENCE",
    "is_smoke",
    "read_kolmogorov",
    "read_smoke",
    "read_turbulence",
    "smoke_files",
    "turbulence_folders",
]

TURBULENCE = ("prs", "vx", "vy", "vz")
SMOKE = ("fluid_field", "velocity")
_VELOCITY = ("velocity_x", "velocity_y", "velocity_z")
_CACHE_BYTES = 512 * 2**20
"""Size of the cache of smoke trajectories; it holds at least one."""


def read_kolmogorov(path: Path) -> ForeignData:
    """Vorticity of Kolmogorov flow, memory-mapped."""
    values = open_npy(path)
    check_numbers(str(path), values, ("count", "frames", "x", "y"))
    count, frames, *grid = values.shape
    layout = Layout(
        fields=("vorticity",),
        units=("1/time",),
        boundary=("periodic", "periodic"),
        coordinates=tuple(periodic(points, 2 * np.pi) for points in grid),
        times=2 + np.arange(1, frames + 1) / 32,
    )
    notes = ("Assumed: a periodic box of side 2π, frames 1/32 apart, the first at 2 + 1/32.",)
    return ForeignData(
        layout,
        count,
        lambda start, stop: values[start:stop, ..., None],
        notes,
        frames=lambda index, start, stop: np.array(values[index, start:stop, ..., None]),
    )


def turbulence_folders(path: Path) -> list[Path]:
    """Return the folders of the trajectories, sorted by name as in the published loader."""
    if not path.is_dir():
        return []
    return sorted(folder for folder in path.iterdir() if any((folder / f"{name}.npy").exists() for name in TURBULENCE))


def read_turbulence(path: Path) -> ForeignData:
    """Pressure and velocity of isotropic turbulence."""
    folders = turbulence_folders(path)
    if not folders:
        raise ValueError(f"No folder in {path} contains prs.npy, vx.npy, vy.npy and vz.npy.")
    shape = open_npy(folders[0] / "prs.npy").shape
    for folder in folders:
        for name in TURBULENCE:
            file = folder / f"{name}.npy"
            values = open_npy(file)
            check_numbers(str(file), values, ("frames", "x", "y", "z"))
            if values.shape != shape:
                raise ValueError(f"{file} has shape {values.shape}, but the first file has {shape}; all must agree.")
    frames, *grid = shape
    # The published loader expects 21 frames, the generator writes 20: the extra frame is at time zero.
    first = 0 if frames == 21 else 1
    layout = Layout(
        fields=("pressure", *_VELOCITY),
        units=("1",) * 4,
        boundary=("periodic",) * 3,
        coordinates=tuple(periodic(points, 2 * np.pi) for points in grid),
        times=0.05 * np.arange(first, first + frames),
    )

    def read_frames(index: int, start: int, stop: int) -> np.ndarray:
        return np.stack([open_npy(folders[index] / f"{name}.npy")[start:stop] for name in TURBULENCE], -1)

    def read(start: int, stop: int) -> np.ndarray:
        return np.stack([read_frames(index, 0, frames) for index in range(start, stop)])

    notes = (f"Assumed: a periodic box of side 2π, frames 0.05 apart, the first at {0.05 * first:g}.",)
    return ForeignData(layout, len(folders), read, notes, frames=read_frames)


def smoke_files(path: Path) -> list[Path]:
    """Return the files of the trajectories, sorted by number."""
    if not path.is_dir():
        return []
    matches = [(re.fullmatch(r"smoke_(\d+)\.npz", file.name), file) for file in path.iterdir()]
    return [file for _, file in sorted((int(match[1]), file) for match, file in matches if match)]


def is_smoke(path: Path) -> bool:
    """Whether the first file named smoke_<number>.npz has one of the expected arrays; the name alone is ambiguous."""
    files = smoke_files(path)
    return bool(files) and bool(set(SMOKE) & set(members(files[0])))


def read_smoke(path: Path) -> ForeignData:
    """Density and velocity of buoyant smoke in a closed box."""
    files = smoke_files(path)
    if not files:
        raise ValueError(f"{path} contains no smoke_<number>.npz.")
    shape = _load_smoke(files[0]).shape
    frames, *grid, _ = shape
    layout = Layout(
        fields=("density", *_VELOCITY),
        units=("1",) * 4,
        boundary=("wall",) * 3,
        coordinates=tuple((np.arange(points) + 0.5) * (8 / points) for points in grid),
        times=0.75 * np.arange(9, 9 + frames),
    )

    @lru_cache(maxsize=max(1, _CACHE_BYTES // (4 * math.prod(shape))))
    def load(index: int) -> np.ndarray:
        values = _load_smoke(files[index])
        if values.shape != shape:
            raise ValueError(
                f"{files[index]} has shape {values.shape}, but the first file has {shape}; all must agree."
            )
        return values

    def read(start: int, stop: int) -> np.ndarray:
        return np.stack([load(index) for index in range(start, stop)])

    notes = ["Assumed: cell centres of a box of side 8, frames 0.75 apart, the first at 6.75."]
    last = int(files[-1].stem.removeprefix("smoke_"))
    if last - int(files[0].stem.removeprefix("smoke_")) + 1 > len(files):
        notes.append(f"Some file numbers up to {last} are missing; the others are stored consecutively.")
    return ForeignData(
        layout,
        len(files),
        read,
        tuple(notes),
        (WHOLE_TRAJECTORIES,),
        frames=lambda index, start, stop: np.array(load(index)[start:stop]),
        trajectory_files=tuple(files),
    )


def _load_smoke(file: Path) -> np.ndarray:
    """Load one trajectory `(frames, s, s, s, 4)`."""
    density, velocity = open_members(file, SMOKE)
    for name, values, channels in zip(SMOKE, (density, velocity), (1, 3), strict=True):
        check_numbers(f"{name!r} in {file}", values, ("frames", "x", "y", "z", "channels"))
        if values.shape != (*density.shape[:4], channels):
            raise ValueError(f"{name!r} in {file} has shape {values.shape}; expected {channels} channels.")
    return np.concatenate([density, velocity], axis=-1)
