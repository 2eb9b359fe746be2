"""Foreign files into the store. One row per kind of data set: how to recognise it and how to read it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sigmasolver.data.domain import time_steps, unevenly_spaced
from sigmasolver.data.formats import arrays, factformer, mat, user_arrays, user_folder
from sigmasolver.data.formats.checks import Values
from sigmasolver.data.formats.finite import fill_solid, label, without_bad
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
    "guess_kind",
    "import_data",
    "is_read_in_place",
    "open_data",
    "opened",
    "read_history",
    "skip_bad",
]

_BLOCK = 64 * 2**20


@dataclass(frozen=True)
class Kind:
    """A kind of foreign data set."""

    name: str
    description: str
    fits: Callable[[Path], bool]
    read: Callable[[Path], Foreign]
    select: Callable[[Path, Sequence[str] | None, bool | None], Foreign] | None = None
    """Like `read`, of the fields that the user names, steady or not as the user says; None where both are fixed."""
    in_place: bool = False
    """Whether training reads the files where they lie; others are imported first."""
    together: Callable[[Sequence[Path]], Foreign] | None = None
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


def _read_own(path: Path, names: Sequence[str] | None = None, steady: bool | None = None) -> Foreign:
    return _read_as_said(path, Reading(None if names is None else check_names(names), steady))


def _read_as_said(path: Path, reading: Reading) -> Foreign:
    return user_folder.read_folder(path, reading) if path.is_dir() else user_arrays.read_file(path, reading)


KINDS: tuple[Kind, ...] = (
    Kind(
        "fno-darcy",
        "a .mat with coeff and sol",
        _mat("coeff", "sol"),
        mat.read_darcy,
        together=mat.read_darcy_pair,
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
        lambda path: bool(factformer.smoke_files(path)),
        factformer.read_smoke,
    ),
    Kind(
        "arrays",
        "an .npy, .npz or HDF5 file of arrays (count, frames, *grid), or a folder of such files without count",
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
    known = "; ".join(f"{kind.name}: {kind.description}" for kind in KINDS)
    raise ValueError(f"{source} is of no kind that can be imported ({known}).")


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
        raise ValueError("The names and steady are part of the reading; give them there alone.")
    with _plain_reading(sources):
        row, foreign = _open(sources, out, kind, reading)
        foreign = replace(foreign, layout=reading.applied(foreign.layout))
        if reading.mask is not None:
            foreign = fill_solid(foreign, reading.mask)
        header = _header(row, foreign, sources, dtype, reading.recorded)
        step = max(1, _BLOCK // header.nbytes)
        if reading.skip_bad:
            foreign, skipped = without_bad(foreign, step)
            header = _header(row, foreign, sources, dtype, reading.recorded | ({"skipped": skipped} if skipped else {}))
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
        said = () if uneven is None else (f"The frames are {uneven}; resample them to train a model without time.",)
        notes = (*foreign.notes, *said, *found.notes())
        bad = tuple(label(files, index) for index in sorted(found.bad))
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


@contextmanager
def opened(source: Path, reading: Reading, kind: str | None = None) -> Iterator[Reader]:
    """Data of any form as a reader: as they lie where that is possible, else through a temporary store.

    `reading` is how the user said to read such files, and `kind` is theirs where they are the user's own arrays.
    """
    if not source.exists():
        raise ValueError(f"There is no file or folder {source}.")
    if is_store(source) or (is_read_in_place(source) and not reading.recorded):
        with open_data(source) as reader:
            yield reader
        return
    kind = kind if kind is None or _own(source) else None
    row = guess_kind(source) if kind is None else None
    if row is not None and row.select is not _read_own:  # its axes are known, and perhaps its fields
        reading = replace(reading, axes=None)
        reading = reading if row.select is not None else replace(reading, fields=None, steady=None)
    with TemporaryDirectory(prefix="sigmasolver-") as folder:
        store = Path(folder) / f"{source.resolve().stem}.h5"
        import_data(source, store, kind, reading=reading)
        with open_store(store) as reader:
            yield reader


def open_data(source: str | Path) -> Reader:
    """A store, or foreign files of a kind that is read in place, as trajectories."""
    source = Path(source)
    if not is_read_in_place(source):
        return open_store(source)
    with _plain_reading([source]):
        row = guess_kind(source)
        return ForeignReader(source, _header(row, row.read(source), [source], "float32"), partial(row.read, source))


def is_read_in_place(source: Path) -> bool:
    """Whether these are foreign files that `open_data` reads where they lie."""
    rows = [kind for kind in KINDS if kind.in_place]
    return source.exists() and not is_store(source) and any(kind.fits(source) for kind in rows)


def _header(
    row: Kind, foreign: Foreign, sources: Sequence[Path], dtype: str, said: Mapping[str, Any] | None = None
) -> Header:
    """`said`: what else its parameters record."""
    parameters: dict[str, Any] = {**_identity(foreign.files or sources), **(said or {})}
    if foreign.split is not None:
        parameters["split"] = asdict(foreign.split)
    return Header(foreign.layout, row.name, parameters, None, dtype)


def _open(sources: Sequence[Path], out: Path, kind: str | None, reading: Reading) -> tuple[Kind, Foreign]:
    """What lies there, once it is certain that the wish makes sense."""
    if not sources:
        raise ValueError("There is nothing to import; name a file or folder.")
    for source in sources:
        if not source.exists():
            raise ValueError(f"There is no file or folder {source}.")
        if not source.is_file() and not source.is_dir():
            raise ValueError(f"{source} is neither a regular file nor a folder; save its contents as one.")
        if source.resolve() in (out.resolve(), *out.resolve().parents):
            raise ValueError(f"{out} would lie where it is read from; write the store outside {source}.")
    rows = {row.name: row for row in KINDS}
    if kind is not None and kind not in rows:
        raise ValueError(f"The kind {kind!r} is unknown; choose among {', '.join(rows)}.")
    found = [guess_kind(source) if kind is None else rows[kind] for source in sources]
    row, source = found[0], sources[0]
    own, names, steady = row.select is _read_own, reading.fields, reading.steady
    if not own and reading.axes is not None:
        raise ValueError(
            f"{source} is taken as {row.name}, whose axes are known; leave out the axes, or give the kind arrays."
        )
    if row.select is None and (names is not None or steady is not None):
        fixed, out_with = ("fields are fixed", "the names") if names is not None else ("axes are known", "steady")
        raise ValueError(
            f"{source} is taken as {row.name}, whose {fixed}; leave out {out_with}, or give the kind arrays."
        )
    if len(sources) > 1:
        if row.together is None or any(other is not row for other in found):
            what = ", ".join(dict.fromkeys(one.name for one in found))
            known = ", ".join(one.name for one in KINDS if one.together is not None)
            raise ValueError(
                f"Only files of {known} can be imported together, not {what}; give one file or folder at a time."
            )
        return row, row.together(sources)
    if row.select is None:
        return row, row.read(source)
    return row, _read_as_said(source, reading) if own else row.select(source, names, steady)


@contextmanager
def _plain_reading(sources: Sequence[Path]) -> Iterator[None]:
    """What the system says against looking at the sources, in one sentence."""
    try:
        yield
    except OSError as error:
        what = ", ".join(map(str, sources))
        raise ValueError(f"{what} cannot be read: the system says {error.strerror or str(error)!r}.") from error


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
