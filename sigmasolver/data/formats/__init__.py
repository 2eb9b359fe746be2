"""Foreign files, read in place or imported into a store. One row per kind of data set: how to recognise it and how to
read it.

Each reader returns a `Foreign` (`source`); `reading` is what the user says about files. Readers share `labelled` and
`dimensions` (arrays whose dimensions have names), `parts` (several files as one data set), `arrays`, `hdf5` and
`torch_file` (containers), `fields` and `metadata` (a user's own arrays), `finite` and `checks` (values).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sigmasolver.data.domain import time_steps, unevenly_spaced
from sigmasolver.data.formats import (
    arrays,
    factformer,
    mat,
    netcdf_zarr,
    pdearena,
    pdebench,
    realm,
    realpdebench,
    the_well,
    user_arrays,
    user_folder,
    vtk,
)
from sigmasolver.data.formats.checks import Values
from sigmasolver.data.formats.finite import fill_solid, without_bad
from sigmasolver.data.formats.history import read_history
from sigmasolver.data.formats.in_place import ForeignReader
from sigmasolver.data.formats.metadata import check_names
from sigmasolver.data.formats.reading import Reading
from sigmasolver.data.formats.source import Foreign
from sigmasolver.data.header import Header
from sigmasolver.data.reader import Reader
from sigmasolver.data.store import Writer, is_store, open_store

__all__ = [
    "KINDS",
    "Imported",
    "Kind",
    "Reading",
    "describes_itself",
    "find_download",
    "guess_kind",
    "import_data",
    "is_read_in_place",
    "open_data",
    "opened",
    "read_history",
    "skip_bad",
    "where_to_put",
]

_BLOCK = 64 * 2**20
_LONGEST = 60_000
"""Characters of a header; an attribute of an HDF5 file ends at 64 kB."""
_LOOKED_AT, _SHOWN = 50, 5
"""Entries of a folder that are tried, and those that are named, where it is no data set itself."""


@dataclass(frozen=True)
class Kind:
    """A kind of foreign data set."""

    name: str
    description: str
    fits: Callable[[Path], bool]
    read: Callable[[Path], Foreign]
    select: Callable[[Path, Reading], Foreign] | None = None
    """Like `read`, of the fields that the user names, with the axes that the user says; None where both are fixed."""
    describes_itself: bool = False
    """Whether the files say themselves what their axes, fields and times are."""
    by_values: bool = True
    """Whether trajectories are told apart by their values; else by the state of their files, which may be huge."""
    read_several: Callable[[Sequence[Path]], Foreign] | None = None
    """Several files as one data set; None where it is one file or folder."""


def _mat(*names: str) -> Callable[[Path], bool]:
    return lambda path: path.suffix == ".mat" and set(names) <= set(mat.variables(path))


def _kolmogorov(path: Path) -> bool:
    """Only the published grid: any other square of numbers may be anything."""
    return path.is_file() and path.suffix == ".npy" and arrays.open_npy(path).shape[2:] == (256, 256)


def _own(path: Path) -> bool:
    if path.is_dir():
        return bool(user_folder.trajectory_files(path))
    return path.is_file() and path.suffix.lower() in user_arrays.SUFFIXES


def _read_own(path: Path, reading: Reading | None = None) -> Foreign:
    read = user_folder.read_folder if path.is_dir() else user_arrays.read_file
    return read(path, reading or Reading())


def _of_reading(
    read: Callable[[Path, Sequence[str] | None, bool | None], Foreign],
) -> Callable[[Path, Reading], Foreign]:
    """For files that name their axes: of a reading the fields count here, and what it says of the layout later."""
    return lambda path, reading: read(path, reading.fields, reading.steady)


# The order matters: the first kind that fits a file reads it. Some fit what others do, too (a Darcy file may also hold
# u, and any .npy or HDF5 file may be a user's arrays), so the specific kinds come before the general ones.
KINDS: tuple[Kind, ...] = (
    Kind(
        "fno-darcy",
        "a .mat with coeff and sol",
        _mat("coeff", "sol"),
        mat.read_darcy,
        read_several=mat.read_darcy_pair,
    ),
    Kind("fno-ns", "a .mat with u", _mat("u"), mat.read_navier_stokes),
    Kind("factformer-kf2d", "an .npy (count, frames, 256, 256)", _kolmogorov, factformer.read_kolmogorov),
    Kind(
        "factformer-it3d",
        "a folder of folders with prs.npy, vx.npy, vy.npy and vz.npy",
        lambda path: bool(factformer.turbulence_folders(path)),
        factformer.read_turbulence,
    ),
    Kind(
        "factformer-smoke",
        "a folder of smoke_<number>.npz",
        factformer.is_smoke,
        factformer.read_smoke,
    ),
    Kind(
        "realm",
        "a folder with data/data.npz and data/{train,val,test}/<group>.npz",
        realm.holds_case,
        realm.read_case,
        describes_itself=True,
        by_values=False,
    ),
    Kind(
        "realpdebench",
        "a folder cylinder, controlled_cylinder, fsi, foil or combustion with hf_dataset/real or real in it",
        realpdebench.scenario_folder,
        realpdebench.read_realpdebench,
        describes_itself=True,
        by_values=False,
    ),
    Kind(
        "netcdf",
        "a NetCDF file with named dimensions (time, x, y, ...), or a folder of such files",
        lambda path: bool(netcdf_zarr.netcdf_files(path)),
        netcdf_zarr.read_netcdf,
        _of_reading(netcdf_zarr.read_netcdf),
        describes_itself=True,
        by_values=False,
    ),
    Kind(
        "zarr",
        "a Zarr group with named dimensions, or a folder of such groups",
        lambda path: bool(netcdf_zarr.zarr_groups(path)),
        netcdf_zarr.read_zarr,
        _of_reading(netcdf_zarr.read_zarr),
        describes_itself=True,
        by_values=False,
    ),
    Kind(
        "vtk",
        "VTK image data: a .vti, .vtk or .pvd, a folder of numbered .vti or .vtk files, or a folder of such folders",
        vtk.is_vtk,
        vtk.read_vtk,
        _of_reading(vtk.read_vtk),
        describes_itself=True,
        by_values=False,
    ),
    Kind(
        "the-well",
        "files of The Well: its folder with data/train, data/valid and data/test, or one file",
        the_well.is_well,
        the_well.read_well,
        _of_reading(the_well.read_well),
        describes_itself=True,
        by_values=False,
    ),
    Kind(
        "pdebench",
        "an HDF5 file of PDEBench (tensor; density, pressure, Vx; 0000/data; velocity, particles)",
        pdebench.is_pdebench,
        pdebench.read_pdebench,
        _of_reading(pdebench.read_pdebench),
        describes_itself=True,
        by_values=False,
    ),
    Kind(
        "pdearena",
        "HDF5 files of PDEArena with a group train, valid or test, or a folder of them",
        pdearena.is_pdearena,
        pdearena.read_pdearena,
        _of_reading(pdearena.read_pdearena),
        describes_itself=True,
        by_values=False,
    ),
    Kind(
        "arrays",
        "an .npy, .npz, .pt or HDF5 file of arrays (count, frames, *grid), or a folder of such files without count",
        _own,
        _read_own,
        _read_own,
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
    """What the file does not say and was taken as known, and what is odd in its values, one sentence each."""
    bad: tuple[str, ...] = ()
    """The trajectories with values that are not finite, in words."""


def guess_kind(source: Path) -> Kind:
    """The kind of data set that lies there."""
    for kind in KINDS:
        if kind.fits(source):
            return kind
    inside = _inside(source)
    if inside:
        found = ", ".join(f"{path} ({kind})" for path, kind in inside[:_SHOWN])
        more = f" and {len(inside) - _SHOWN} more" if len(inside) > _SHOWN else ""
        raise ValueError(f"{source} is not a data set but contains some; choose one of them: {found}{more}.")
    known = "; ".join(f"{kind.name}: {kind.description}" for kind in KINDS)
    raise ValueError(f"{source} is not in a supported format ({known}).")


def _inside(folder: Path) -> list[tuple[Path, str]]:
    """What lies in a folder and can be read by itself, with its kind."""
    found = []
    for path in sorted(folder.iterdir())[:_LOOKED_AT] if folder.is_dir() else ():
        with suppress(ValueError, OSError):  # what is damaged is told when it is named
            kind = "store" if is_store(path) else next((kind.name for kind in KINDS if kind.fits(path)), None)
            if kind is not None:
                found.append((path, kind))
    return found


def import_data(
    source: str | Path | Sequence[str | Path],
    out: str | Path,
    kind: str | None = None,
    dtype: str = "float32",
    progress: Callable[[int, int], None] | None = None,
    names: Sequence[str] | None = None,
    steady: bool | None = None,
    reading: Reading | None = None,
) -> Imported:
    """Convert a foreign data set into a store at `out`, continuing an import that was interrupted.

    The kind is found from what is there unless given; the files of some kinds can be given together. `progress` gets
    the trajectories done and their number.
    `names` are the fields to take of a user's own arrays, in order; where the file does not name them, their names.
    `steady`: the user's own arrays have no axis of time; None: the file must make plain that they have one.
    `reading`: these two, and whatever else the user says about the files.
    """
    sources, out = [Path(one) for one in ([source] if isinstance(source, str | Path) else source)], Path(out)
    if reading is None:
        reading = Reading(None if names is None else check_names(names), steady)
    elif (names, steady) != (None, None):
        raise ValueError("names and steady are set by reading; omit them.")
    with _plain_reading(sources):
        row, foreign = _open(sources, out, kind, reading)
        header = _header(row, foreign, sources, dtype, reading.recorded)
        step = max(1, _BLOCK // header.nbytes)
        if reading.skip_bad:
            foreign, skipped = without_bad(foreign, step)
            header = _header(row, foreign, sources, dtype, reading.recorded | ({"skipped": skipped} if skipped else {}))
    if len(json.dumps(header.facts())) > _LONGEST:
        raise ValueError(
            f"The metadata of {sources[0]} do not fit in the header of a store; train on it in place, "
            "without an import."
        )
    files = [file.name for file in foreign.trajectory_files]
    found = Values(header, files)
    with Writer(out, header, foreign.count) as writer:
        present = writer.whole
        if present:
            with open_store(out) as before:
                for index in range(present):
                    found.take_in(index, before[index : index + 1], before[index : index + 1])
        for start in range(present, foreign.count, step):
            # Nothing here keeps a block while the next one is read.
            writer.append(found.stored(start, foreign.read(start, min(start + step, foreign.count))))
            if progress is not None:
                progress(writer.whole, foreign.count)
        uneven = unevenly_spaced(time_steps(header.layout.times))
        said = (
            ()
            if uneven is None
            else (f"The frames are {uneven}; resample them to train a model without a time input.",)
        )
        notes = (*foreign.notes, *said, *found.notes())
        bad = tuple(found.bad_in_words())
        return Imported(row.name, out, foreign.count, present, header.shape, writer.fingerprint, notes, bad)


def skip_bad(source: Path, out: Path) -> Imported:
    """A copy of a store without the trajectories that have values that are not finite."""
    with open_store(source) as store:
        header = store.header
        whole = Foreign(header.layout, len(store), lambda start, stop: store[start:stop], split=store.published_split)
        step = max(1, _BLOCK // header.nbytes)
        kept, skipped = without_bad(whole, step)
        more: dict[str, Any] = {"skipped": skipped} if skipped else {}
        if kept.split is not None:
            more["split"] = asdict(kept.split)
        header = replace(header, parameters={**header.parameters, **more})
        with Writer(out, header, kept.count) as writer:
            present = writer.whole
            for start in range(present, kept.count, step):
                writer.append(kept.read(start, min(start + step, kept.count)))
            return Imported(header.source, out, kept.count, present, header.shape, writer.fingerprint, kept.notes)


def opened(source: Path, reading: Reading, kind: str | None = None) -> Reader:
    """Data of any form, to be read like those of a run.

    `reading` is how the user said to read such files, and `kind` is theirs where they are the user's own arrays. What
    these files say themselves goes before what was said of others.
    """
    if not source.exists():
        raise ValueError(f"{source} not found.")
    if is_store(source):
        return open_store(source)
    kind = kind if kind is None or _own(source) else None
    row = guess_kind(source) if kind is None else None
    if row is not None and row.select is not _read_own:  # its axes are known, and perhaps its fields
        reading = replace(reading, axes=None) if reading.recorded else Reading()
        reading = reading if row.select is not None else replace(reading, fields=None, steady=None)
    return open_data(source, reading, kind)


def open_data(source: str | Path | Reader, reading: Reading | None = None, kind: str | None = None) -> Reader:
    """A store or foreign files as trajectories; a reader is given back.

    `reading`: what the user says of foreign files; `kind`: which they are, if not the first that fits.
    """
    if isinstance(source, Reader):
        return source
    source, reading = Path(source), reading or Reading()
    if kind is None and not source.is_dir() and not is_read_in_place(source):
        return open_store(source)
    with _plain_reading([source]):
        row = guess_kind(source) if kind is None else _kind_of(kind)
        _refuse_reading(row, source, reading)
        read = partial(_as_said, row.name, source, reading)  # a name can be sent to other processes
        foreign = read()
        header = _header(row, foreign, [] if row.by_values else [source], "float32", reading.recorded)
        return ForeignReader(source, header, foreign, read, row.by_values)


def _as_said(kind: str, source: Path, reading: Reading) -> Foreign:
    """A foreign data set with what the user says in place of what its files say."""
    row = _kind_of(kind)
    foreign = row.read(source) if row.select is None else row.select(source, reading)
    foreign = replace(foreign, layout=reading.applied(foreign.layout))
    return foreign if reading.mask is None else fill_solid(foreign, reading.mask)


def where_to_put(task: str, folder: Path) -> str | None:
    """Which files of a task belong where, and how to do without them, as a sentence; None: its data are simulated."""
    if task in realm.CASES:
        return realm.how_to_get(task, folder)
    return realpdebench.missing_files(task, folder) if task.replace("-", "_") in realpdebench.SCENARIOS else None


def find_download(task: str, folder: Path) -> Path | None:
    """The download of a benchmark's task in a folder of downloads, where it is and is read in place."""
    found = realm.find_case(task, folder) or folder / task.replace("-", "_")
    return found if describes_itself(found) else None


def is_read_in_place(source: Path) -> bool:
    """Whether these are foreign files that `open_data` reads where they lie."""
    return source.exists() and not is_store(source) and any(kind.fits(source) for kind in KINDS)


def describes_itself(source: Path) -> bool:
    """Whether these are foreign files that say what their axes, fields and times are."""
    rows = [kind for kind in KINDS if kind.describes_itself]
    return source.exists() and not is_store(source) and any(kind.fits(source) for kind in rows)


def _header(
    row: Kind, foreign: Foreign, sources: Sequence[Path], dtype: str, said: Mapping[str, Any] | None = None
) -> Header:
    """`said`: what else its parameters record. Without `sources`, nothing of the files: their values stand for them."""
    identity = _identity(foreign.files or sources) if sources else {}
    parameters: dict[str, Any] = {**identity, **foreign.parameters, **(said or {})}
    if foreign.split is not None:
        parameters["split"] = asdict(foreign.split)
    return Header(foreign.layout, row.name, parameters, None, dtype)


def _open(sources: Sequence[Path], out: Path, kind: str | None, reading: Reading) -> tuple[Kind, Foreign]:
    """What lies there, once it is certain that the wish makes sense."""
    if not sources:
        raise ValueError("Nothing to import; give a file or folder.")
    for source in sources:
        if not source.exists():
            raise ValueError(f"{source} not found.")
        if not source.is_file() and not source.is_dir():
            raise ValueError(f"{source} is neither a regular file nor a folder; save its contents as one.")
        if source.resolve() in (out.resolve(), *out.resolve().parents):
            raise ValueError(f"{out} is inside the source folder; write the store outside {source}.")
    found = [guess_kind(source) if kind is None else _kind_of(kind) for source in sources]
    row, source = found[0], sources[0]
    _refuse_reading(row, source, reading)
    if len(sources) > 1:
        if row.read_several is None or any(other is not row for other in found):
            what = ", ".join(dict.fromkeys(one.name for one in found))
            known = ", ".join(one.name for one in KINDS if one.read_several is not None)
            raise ValueError(
                f"Only {known} files can be imported together, not {what}; give one file or folder at a time."
            )
        return row, replace(foreign := row.read_several(sources), layout=reading.applied(foreign.layout))
    return row, _as_said(row.name, source, reading)


def _kind_of(name: str) -> Kind:
    rows = {row.name: row for row in KINDS}
    if name not in rows:
        raise ValueError(f"Unknown format {name!r}; choose from {', '.join(rows)}.")
    return rows[name]


def _refuse_reading(row: Kind, source: Path, reading: Reading) -> None:
    """What the user may not say of files whose axes or fields are known."""
    if row.select is not _read_own and reading.axes is not None:
        raise ValueError(
            f"{source} is read as {row.name}, which defines its axes; omit the axes, or import it with --kind arrays."
        )
    if row.select is None and (reading.fields is not None or reading.steady is not None):
        named = reading.fields is not None
        fixed, out_with = ("fields", "the names") if named else ("axes", "steady")
        raise ValueError(
            f"{source} is read as {row.name}, which defines its {fixed}; omit {out_with}, or import "
            "it with --kind arrays."
        )


@contextmanager
def _plain_reading(sources: Sequence[Path]) -> Iterator[None]:
    """What the system says against looking at the sources, in one sentence."""
    try:
        yield
    except OSError as error:
        what = ", ".join(map(str, sources))
        raise ValueError(f"Cannot read {what}: {error.strerror or str(error)}.") from error


def _identity(sources: Sequence[Path]) -> dict[str, str | int]:
    """What tells these sources from others, so that an import is not continued from the wrong ones."""
    states = []
    for source in sources:
        files = [source] if source.is_file() else sorted(one for one in source.rglob("*") if one.is_file())
        states += [(str(one.relative_to(source)), one.stat()) for one in files]
    # The time of the last change stands for the contents, which would take as long to read as the import.
    seen = json.dumps([(name, state.st_size, state.st_mtime_ns) for name, state in states])
    return {
        "file": ", ".join(source.resolve().name for source in sources),
        "bytes": sum(state.st_size for _, state in states),
        "state": hashlib.sha256(seen.encode()).hexdigest()[:16],
    }
