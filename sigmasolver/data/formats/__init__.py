"""Foreign files into the store. One row per kind of data set: how to recognise it and how to read it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sigmasolver.data.formats import arrays, factformer, mat
from sigmasolver.data.formats.foreign import Foreign
from sigmasolver.data.header import Header
from sigmasolver.data.store import Writer

__all__ = ["KINDS", "Imported", "Kind", "guess_kind", "import_data"]

_BLOCK = 256 * 2**20


@dataclass(frozen=True)
class Kind:
    """A kind of foreign data set."""

    name: str
    description: str
    fits: Callable[[Path], bool]
    read: Callable[[Path], Foreign]


def _mat(*names: str) -> Callable[[Path], bool]:
    return lambda path: path.suffix == ".mat" and set(names) <= set(mat.variables(path))


def _npy(axes: set[int], square: bool = False) -> Callable[[Path], bool]:
    def fits(path: Path) -> bool:
        if path.suffix != ".npy":
            return False
        shape = arrays.open_npy(path).shape
        return len(shape) in axes and (not square or shape[-1] == shape[-2])

    return fits


KINDS: tuple[Kind, ...] = (
    Kind("fno-darcy", "a .mat with coeff and sol", _mat("coeff", "sol"), mat.read_darcy),
    Kind("fno-ns", "a .mat with u", _mat("u"), mat.read_navier_stokes),
    Kind("factformer-kf2d", "a square .npy (count, frames, x, y)", _npy({4}, square=True), factformer.read_kolmogorov),
    Kind(
        "factformer-it3d",
        "a folder of folders with prs.npy, vx.npy, vy.npy and vz.npy",
        lambda path: bool(factformer.turbulence_folders(path)),
        factformer.read_turbulence,
    ),
    Kind(
        "factformer-smoke",
        "a folder of smoke_<number>.npz",
        lambda path: bool(factformer.smoke_files(path)),
        factformer.read_smoke,
    ),
    Kind(
        "arrays",
        "an .npz with fields (count, frames, *grid, channels), or such an .npy",
        lambda path: (path.suffix == ".npz" and "fields" in arrays.members(path)) or _npy({4, 5, 6})(path),
        arrays.read_arrays,
    ),
)


@dataclass(frozen=True)
class Imported:
    """What an import did."""

    kind: str
    path: Path
    count: int
    present: int
    """How many of the trajectories were there before."""
    shape: tuple[int, ...]
    fingerprint: str
    notes: tuple[str, ...]
    """What the file does not say and was taken as known, one sentence each."""


def guess_kind(source: Path) -> Kind:
    """The kind of data set that lies there."""
    for kind in KINDS:
        if kind.fits(source):
            return kind
    known = "; ".join(f"{kind.name}: {kind.description}" for kind in KINDS)
    raise ValueError(f"{source} is of no kind that can be imported ({known}).")


def import_data(
    source: str | Path,
    out: str | Path,
    kind: str | None = None,
    dtype: str = "float32",
    progress: Callable[[int, int], None] | None = None,
) -> Imported:
    """Convert a foreign data set into a store at `out`, continuing an import that was interrupted.

    The kind is found from what is there unless given. `progress` gets the trajectories done and their number.
    """
    source = Path(source)
    if not source.exists():
        raise ValueError(f"There is no file or folder {source}.")
    rows = {row.name: row for row in KINDS}
    if kind is not None and kind not in rows:
        raise ValueError(f"The kind {kind!r} is unknown; choose among {', '.join(rows)}.")
    row = guess_kind(source) if kind is None else rows[kind]
    foreign = row.read(source)
    header = Header(foreign.layout, row.name, _identity(source), None, dtype)
    step = max(1, _BLOCK // header.nbytes)
    with Writer(out, header, foreign.count) as writer:
        present = writer.whole
        for start in range(present, foreign.count, step):
            writer.append(foreign.read(start, min(start + step, foreign.count)))
            if progress is not None:
                progress(writer.whole, foreign.count)
        return Imported(row.name, Path(out), foreign.count, present, header.shape, writer.fingerprint, foreign.notes)


def _identity(source: Path) -> dict[str, str | int]:
    """What tells this source from another, so that an import is not continued from the wrong one."""
    files = [source] if source.is_file() else [one for one in source.rglob("*") if one.is_file()]
    return {"file": source.resolve().name, "bytes": sum(one.stat().st_size for one in files)}
