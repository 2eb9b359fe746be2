"""Foreign files, read in place or imported into a store. `FORMATS` has one row per format: how to recognise it and
how to read it.

Each reader returns a `ForeignData` (`source`); `read_options` holds the user's description of the files. Readers share
`labelled` and `dimensions` (arrays with named dimensions), `parts` (several files as one data set), `arrays`, `hdf5`
and `torch_file` (containers), `fields` and `metadata` (a user's own arrays), `finite` and `checks` (values).
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
from sigmasolver.data.formats.checks import ValueChecks
from sigmasolver.data.formats.finite import fill_solid, without_bad
from sigmasolver.data.formats.history import read_history
from sigmasolver.data.formats.in_place import ForeignReader
from sigmasolver.data.formats.metadata import check_names
from sigmasolver.data.formats.read_options import ReadOptions
from sigmasolver.data.formats.source import ForeignData
from sigmasolver.data.header import Header
from sigmasolver.data.reader import Reader
from sigmasolver.data.store import Writer, is_store, open_store

__all__ = [
    "FORMATS",
    "Format",
    "Imported",
    "ReadOptions",
    "describes_itself",
    "download_instructions",
    "find_download",
    "guess_format",
    "import_data",
    "is_identified_by_state",
    "is_read_in_place",
    "open_data",
    "opened",
    "read_history",
    "skip_bad",
]

_BLOCK_BYTES = 64 * 2**20
_LONGEST = 60_000
"""Maximum characters of a header; an HDF5 attribute is limited to 64 kB."""
_MAX_TRIED, _MAX_LISTED = 50, 5
"""Entries of a folder to try, and to list in the error, where the folder itself is not a data set."""


@dataclass(frozen=True)
class Format:
    """A format of foreign files."""

    name: str
    description: str
    matches: Callable[[Path], bool]
    read: Callable[[Path], ForeignData]
    select: Callable[[Path, ReadOptions], ForeignData] | None = None
    """Like `read`, with the fields and axes that the user specifies; None if the format defines both."""
    describes_itself: bool = False
    """Whether the files specify their axes, fields and times."""
    identified_by_values: bool = True
    """Whether trajectories are identified by their values, as in the files of users, which get copied and renamed;
    otherwise by the state of their files, as in public data sets, which may be huge."""
    read_several: Callable[[Sequence[Path]], ForeignData] | None = None
    """Read several files as one data set; None if a data set is a single file or folder."""


def _is_mat_with(*names: str) -> Callable[[Path], bool]:
    return lambda path: path.suffix == ".mat" and set(names) <= set(mat.variables(path))


def _is_kolmogorov(path: Path) -> bool:
    """Whether the array has the published grid; other square grids are ambiguous."""
    return path.is_file() and path.suffix == ".npy" and arrays.open_npy(path).shape[2:] == (256, 256)


def _is_user_arrays(path: Path) -> bool:
    if path.is_dir():
        return bool(user_folder.trajectory_files(path))
    return path.is_file() and path.suffix.lower() in user_arrays.SUFFIXES


def _read_user_arrays(path: Path, options: ReadOptions | None = None) -> ForeignData:
    read = user_folder.read_folder if path.is_dir() else user_arrays.read_file
    return read(path, options or ReadOptions())


def _self_describing(
    name: str,
    description: str,
    matches: Callable[[Path], bool],
    read: Callable[[Path, Sequence[str] | None, bool | None], ForeignData],
    public: bool = False,
) -> Format:
    """A format with named axes and fields; `read` takes the path, the fields and `steady`. `public`: of data sets that
    are published."""
    return Format(
        name,
        description,
        matches,
        lambda path: read(path, None, None),
        lambda path, options: read(path, options.fields, options.steady),
        describes_itself=True,
        identified_by_values=not public,
    )


# The order matters: the first format that matches a file reads it. Several may match (a Darcy file may also hold u, and
# any .npy or HDF5 file may be a user's arrays), so specific formats come before general ones.
FORMATS: tuple[Format, ...] = (
    Format(
        "fno-darcy",
        "a .mat with coeff and sol",
        _is_mat_with("coeff", "sol"),
        mat.read_darcy,
        read_several=mat.read_darcy_pair,
    ),
    Format("fno-ns", "a .mat with u", _is_mat_with("u"), mat.read_navier_stokes),
    Format("factformer-kf2d", "an .npy (count, frames, 256, 256)", _is_kolmogorov, factformer.read_kolmogorov),
    Format(
        "factformer-it3d",
        "a folder of folders with prs.npy, vx.npy, vy.npy and vz.npy",
        lambda path: bool(factformer.turbulence_folders(path)),
        factformer.read_turbulence,
    ),
    Format(
        "factformer-smoke",
        "a folder of smoke_<number>.npz",
        factformer.is_smoke,
        factformer.read_smoke,
    ),
    Format(
        "realm",
        "a folder with data/data.npz and data/{train,val,test}/<group>.npz",
        realm.holds_case,
        realm.read_case,
        describes_itself=True,
        identified_by_values=False,
    ),
    Format(
        "realpdebench",
        "a folder cylinder, controlled_cylinder, fsi, foil or combustion with hf_dataset/real or real in it",
        realpdebench.scenario_folder,
        realpdebench.read_realpdebench,
        describes_itself=True,
        identified_by_values=False,
    ),
    _self_describing(
        "netcdf",
        "a NetCDF file with named dimensions (time, x, y, ...), or a folder of such files",
        lambda path: bool(netcdf_zarr.netcdf_files(path)),
        netcdf_zarr.read_netcdf,
    ),
    _self_describing(
        "zarr",
        "a Zarr group with named dimensions, or a folder of such groups",
        lambda path: bool(netcdf_zarr.zarr_groups(path)),
        netcdf_zarr.read_zarr,
    ),
    _self_describing(
        "vtk",
        "VTK image data: a .vti, .vtk or .pvd, a folder of numbered .vti or .vtk files, or a folder of such folders",
        vtk.is_vtk,
        vtk.read_vtk,
    ),
    _self_describing(
        "the-well",
        "files of The Well: its folder with data/train, data/valid and data/test, or one file",
        the_well.is_well,
        the_well.read_well,
        public=True,
    ),
    _self_describing(
        "pdebench",
        "an HDF5 file of PDEBench (tensor; density, pressure, Vx; 0000/data; velocity, particles)",
        pdebench.is_pdebench,
        pdebench.read_pdebench,
        public=True,
    ),
    _self_describing(
        "pdearena",
        "HDF5 files of PDEArena with a group train, valid or test, or a folder of them",
        pdearena.is_pdearena,
        pdearena.read_pdearena,
        public=True,
    ),
    Format(
        "arrays",
        "an .npy, .npz, .pt or HDF5 file of arrays (count, frames, *grid), or a folder of such files without count",
        _is_user_arrays,
        _read_user_arrays,
        _read_user_arrays,
    ),
)


@dataclass(frozen=True)
class Imported:
    """Result of an import."""

    kind: str
    path: Path
    count: int
    present: int
    """Number of trajectories that the store already held."""
    shape: tuple[int, ...]
    fingerprint: str
    notes: tuple[str, ...]
    """Assumptions where the file lacks metadata, and problems with its values, one sentence each."""
    bad: tuple[str, ...] = ()
    """Labels of the trajectories with non-finite values."""


def guess_format(source: Path) -> Format:
    """Return the first format that matches a file or folder."""
    for candidate in FORMATS:
        if candidate.matches(source):
            return candidate
    inside = _data_sets_in(source)
    if inside:
        choices = ", ".join(f"{path} ({name})" for path, name in inside[:_MAX_LISTED])
        more = f" and {len(inside) - _MAX_LISTED} more" if len(inside) > _MAX_LISTED else ""
        raise ValueError(f"{source} is not a data set but contains some; choose one of them: {choices}{more}.")
    supported = "; ".join(f"{row.name}: {row.description}" for row in FORMATS)
    raise ValueError(f"{source} is not in a supported format ({supported}).")


def _data_sets_in(folder: Path) -> list[tuple[Path, str]]:
    """Return the readable data sets directly inside a folder, each with the name of its format."""
    data_sets = []
    for path in sorted(folder.iterdir())[:_MAX_TRIED] if folder.is_dir() else ():
        with suppress(ValueError, OSError):  # a damaged file is reported once the user selects it
            name = "store" if is_store(path) else next((row.name for row in FORMATS if row.matches(path)), None)
            if name is not None:
                data_sets.append((path, name))
    return data_sets


def import_data(
    source: str | Path | Sequence[str | Path],
    out: str | Path,
    kind: str | None = None,
    dtype: str = "float32",
    progress: Callable[[int, int], None] | None = None,
    names: Sequence[str] | None = None,
    steady: bool | None = None,
    options: ReadOptions | None = None,
) -> Imported:
    """Convert a foreign data set into a store at `out`, or resume an interrupted import.

    `kind`: the name of the format, inferred from the files unless specified; some formats accept several files at once.
    `progress` is called with the number of trajectories done and their total.
    `names`: the fields to read from a user's own arrays, in order; if the file does not name its fields, their names.
    `steady`: whether the user's own arrays have no time axis; None: inferred from the file, or an error if ambiguous.
    `options`: both of these and the other options for reading the files.
    """
    sources, out = [Path(item) for item in ([source] if isinstance(source, str | Path) else source)], Path(out)
    if options is None:
        options = ReadOptions(None if names is None else check_names(names), steady)
    elif (names, steady) != (None, None):
        raise ValueError("names and steady are set by options; omit them.")
    with _os_errors_as_value_errors(sources):
        row, foreign = _open_sources(sources, out, kind, options)
        header = _header(row, foreign, sources, dtype, options.recorded)
        step = max(1, _BLOCK_BYTES // header.nbytes)
        if options.skip_bad:
            foreign, skipped = without_bad(foreign, step)
            header = _header(row, foreign, sources, dtype, options.recorded | ({"skipped": skipped} if skipped else {}))
    if len(json.dumps(header.facts())) > _LONGEST:
        raise ValueError(
            f"The metadata of {sources[0]} do not fit in the header of a store; train on it in place, "
            "without an import."
        )
    files = [file.name for file in foreign.trajectory_files]
    checks = ValueChecks(header, files)
    with Writer(out, header, foreign.count) as writer:
        present = writer.whole
        if present:
            with open_store(out) as store:
                for index in range(present):
                    checks.check(index, store[index : index + 1], store[index : index + 1])
        for start in range(present, foreign.count, step):
            # No variable refers to a block while the next one is read: only one is in memory.
            writer.append(checks.convert(start, foreign.read(start, min(start + step, foreign.count))))
            if progress is not None:
                progress(writer.whole, foreign.count)
        uneven = unevenly_spaced(time_steps(header.layout.times))
        spacing_notes = (
            ()
            if uneven is None
            else (f"The frames are {uneven}; resample them to train a model without a time input.",)
        )
        notes = (*foreign.notes, *spacing_notes, *checks.notes())
        bad = tuple(checks.bad_labels())
        return Imported(row.name, out, foreign.count, present, header.shape, writer.fingerprint, notes, bad)


def skip_bad(source: Path, out: Path) -> Imported:
    """Copy a store without the trajectories that have non-finite values."""
    with open_store(source) as store:
        header = store.header
        full = ForeignData(
            header.layout, len(store), lambda start, stop: store[start:stop], split=store.published_split
        )
        step = max(1, _BLOCK_BYTES // header.nbytes)
        finite, skipped = without_bad(full, step)
        extra: dict[str, Any] = {"skipped": skipped} if skipped else {}
        if finite.split is not None:
            extra["split"] = asdict(finite.split)
        header = replace(header, parameters={**header.parameters, **extra})
        with Writer(out, header, finite.count) as writer:
            present = writer.whole
            for start in range(present, finite.count, step):
                writer.append(finite.read(start, min(start + step, finite.count)))
            return Imported(header.source, out, finite.count, present, header.shape, writer.fingerprint, finite.notes)


def opened(source: Path, options: ReadOptions, kind: str | None = None) -> Reader:
    """Open a store or foreign files the way the data of a run were opened.

    `options` and `kind` come from the run; `kind` applies only to a user's own arrays.
    """
    if not source.exists():
        raise ValueError(f"{source} not found.")
    if is_store(source):
        return open_store(source)
    kind = kind if kind is None or _is_user_arrays(source) else None
    row = guess_format(source) if kind is None else None
    if row is not None and row.select is not _read_user_arrays:  # the format defines the axes, perhaps the fields too
        options = replace(options, axes=None, steady=None)
        if row.select is not None and options.fields is not None:
            return _open_fields(source, options, options.fields)
        options = replace(options, fields=None)
    return open_data(source, options, kind)


def _open_fields(source: Path, options: ReadOptions, fields: tuple[str, ...]) -> Reader:
    """Open files with those of these fields that they have: other files may lack one that the run does not use."""
    try:
        return open_data(source, options)
    except ValueError:
        present: tuple[str, ...] = ()
        with suppress(ValueError), open_data(source) as reader:
            present = reader.header.layout.fields
        available = tuple(name for name in fields if name in present)
        if available in ((), fields):
            raise
    return open_data(source, options.only(available))


def open_data(source: str | Path | Reader, options: ReadOptions | None = None, kind: str | None = None) -> Reader:
    """Open a store or foreign files as trajectories; a reader is returned unchanged.

    `options`: how to read foreign files; `kind`: the name of their format, if not the first that matches.
    """
    if isinstance(source, Reader):
        return source
    source, options = Path(source), options or ReadOptions()
    if kind is None and not source.is_dir() and not is_read_in_place(source):
        return open_store(source)
    with _os_errors_as_value_errors([source]):
        row = guess_format(source) if kind is None else _format_by_name(kind)
        _check_options(row, source, options)
        read = partial(_open_foreign, row.name, source, options)  # by name, so that it can be pickled
        foreign = read()
        header_with = partial(_header, row, foreign, dtype="float32", extra=options.recorded)
        if not row.identified_by_values:
            return ForeignReader(source, header_with([source]), foreign, read, identified_by_values=False)
        # Formerly, only files that do not describe themselves were identified by their values.
        by_state = header_with([source]) if row.describes_itself else None
        return ForeignReader(source, header_with([]), foreign, read, True, not row.describes_itself, by_state)


def _open_foreign(kind: str, source: Path, options: ReadOptions) -> ForeignData:
    """Open a foreign data set; `options` override the metadata of its files."""
    row = _format_by_name(kind)
    foreign = row.read(source) if row.select is None else row.select(source, options)
    foreign = replace(foreign, layout=options.applied(foreign.layout, foreign.missing))
    return foreign if options.mask is None else fill_solid(foreign, options.mask)


def download_instructions(task: str, folder: Path) -> str | None:
    """Explain which files a task needs, where to put them and what to use instead; None if its data are simulated."""
    if task in realm.CASES:
        return realm.how_to_get(task, folder)
    return realpdebench.missing_files(task, folder) if task.replace("-", "_") in realpdebench.SCENARIOS else None


def find_download(task: str, folder: Path) -> Path | None:
    """Return the download of a benchmark task in a folder of downloads, or None if it cannot be read in place."""
    path = realm.find_case(task, folder) or folder / task.replace("-", "_")
    return path if describes_itself(path) else None


def is_read_in_place(source: Path) -> bool:
    """Whether these are foreign files that `open_data` reads in place."""
    return source.exists() and not is_store(source) and any(row.matches(source) for row in FORMATS)


def is_identified_by_state(kind: str) -> bool:
    """Whether this is the name of a format whose files are identified by their state."""
    return any(row.name == kind and not row.identified_by_values for row in FORMATS)


def describes_itself(source: Path) -> bool:
    """Whether these are foreign files that specify their axes, fields and times."""
    rows = [row for row in FORMATS if row.describes_itself]
    return source.exists() and not is_store(source) and any(row.matches(source) for row in rows)


def _header(
    row: Format, foreign: ForeignData, sources: Sequence[Path], dtype: str, extra: Mapping[str, Any] | None = None
) -> Header:
    """Build the header; `extra` is added to its parameters. Without `sources`, the data are identified by values."""
    identity = _file_identity(foreign.files or sources) if sources else {}
    parameters: dict[str, Any] = {**identity, **foreign.parameters, **(extra or {})}
    if foreign.split is not None:
        parameters["split"] = asdict(foreign.split)
    return Header(foreign.layout, row.name, parameters, None, dtype)


def _open_sources(
    sources: Sequence[Path], out: Path, kind: str | None, options: ReadOptions
) -> tuple[Format, ForeignData]:
    """Validate the arguments of an import and open its sources."""
    if not sources:
        raise ValueError("Nothing to import; give a file or folder.")
    for source in sources:
        if not source.exists():
            raise ValueError(f"{source} not found.")
        if not source.is_file() and not source.is_dir():
            raise ValueError(f"{source} is neither a regular file nor a folder; save its contents as one.")
        if source.resolve() in (out.resolve(), *out.resolve().parents):
            raise ValueError(f"{out} is inside the source folder; write the store outside {source}.")
    rows = [guess_format(source) if kind is None else _format_by_name(kind) for source in sources]
    row, source = rows[0], sources[0]
    _check_options(row, source, options)
    if len(sources) > 1:
        if row.read_several is None or any(other is not row for other in rows):
            requested = ", ".join(dict.fromkeys(other.name for other in rows))
            supported = ", ".join(other.name for other in FORMATS if other.read_several is not None)
            raise ValueError(
                f"Only {supported} files can be imported together, not {requested}; give one file or folder at a time."
            )
        return row, replace(foreign := row.read_several(sources), layout=options.applied(foreign.layout))
    return row, _open_foreign(row.name, source, options)


def _format_by_name(name: str) -> Format:
    rows = {row.name: row for row in FORMATS}
    if name not in rows:
        raise ValueError(f"Unknown format {name!r}; choose from {', '.join(rows)}.")
    return rows[name]


def _check_options(row: Format, source: Path, options: ReadOptions) -> None:
    """Raise ValueError if `options` set axes or fields that the format itself defines."""
    if row.select is not _read_user_arrays and options.axes is not None:
        raise ValueError(
            f"{source} is read as {row.name}, which defines its axes; omit the axes, or import it with --kind arrays."
        )
    if row.select is None and (options.fields is not None or options.steady is not None):
        has_fields = options.fields is not None
        fixed, option = ("fields", "the names") if has_fields else ("axes", "steady")
        raise ValueError(
            f"{source} is read as {row.name}, which defines its {fixed}; omit {option}, or import "
            "it with --kind arrays."
        )


@contextmanager
def _os_errors_as_value_errors(sources: Sequence[Path]) -> Iterator[None]:
    """Convert an OSError while reading the sources into a ValueError that names them."""
    try:
        yield
    except OSError as error:
        paths = ", ".join(map(str, sources))
        raise ValueError(f"Cannot read {paths}: {error.strerror or str(error)}.") from error


def _file_identity(sources: Sequence[Path]) -> dict[str, str | int]:
    """Return the name, size and state hash of the sources, so that an import does not resume from other files."""
    states = []
    for source in sources:
        files = [source] if source.is_file() else sorted(file for file in source.rglob("*") if file.is_file())
        states += [(str(file.relative_to(source)), file.stat()) for file in files]
    # Hash the modification times, not the contents: reading those would take as long as the import.
    listing = json.dumps([(name, state.st_size, state.st_mtime_ns) for name, state in states])
    return {
        "file": ", ".join(source.resolve().name for source in sources),
        "bytes": sum(state.st_size for _, state in states),
        "state": hashlib.sha256(listing.encode()).hexdigest()[:16],
    }
