"""Whatever is done to a file, an import works or says in one line why not; it neither breaks nor hangs.

Random bytes do not reach MATLAB files of version 5: scipy, which reads them, can crash on wrong types in their middle.
"""

from __future__ import annotations

import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import scipy.io
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

from sigmasolver.data.formats import KINDS, import_data, read_history
from sigmasolver.data.store import open_store

U = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def hdf5(**options: Any) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        with h5py.File(folder / "a.h5", "w", **options) as file:
            file.create_dataset("u", data=U, chunks=True, compression="gzip")
            file["deep/v"] = U
            file["times"] = np.arange(3.0)
            file["boundary"] = ["open", "wall"]
            file["units"] = np.array([b"m", b"s"])
        return folder / "a.h5"

    return save


def hdf5_fields(folder: Path) -> Path:
    with h5py.File(folder / "a.hdf5", "w") as file:
        file["fields"], file["names"] = U, list("abcde")
    return folder / "a.hdf5"


def matlab(folder: Path) -> Path:
    with h5py.File(folder / "a.mat", "w", userblock_size=512) as file:
        file.create_dataset("u", data=U.T, chunks=True, compression="gzip")
        file["t"] = np.arange(5.0)[:, None]
    return folder / "a.mat"


def matlab_5(folder: Path) -> Path:
    scipy.io.savemat(folder / "a.mat", {"u": U, "t": np.arange(5.0)[None]})
    return folder / "a.mat"


def npy(folder: Path) -> Path:
    np.save(folder / "a.npy", U)
    return folder / "a.npy"


def npz(folder: Path) -> Path:
    np.savez_compressed(folder / "a.npz", u=U, v=U, times=np.arange(3.0))
    return folder / "a.npz"


def runs(folder: Path) -> Path:
    """The second file of a folder is the one that suffers."""
    (folder / "runs").mkdir()
    for number in range(3):
        np.savez(folder / "runs" / f"run{number}.npz", fields=U, names=np.array(list("abcde")))
    return folder / "runs" / "run1.npz"


def smoke(folder: Path) -> Path:
    (folder / "smoke").mkdir()
    np.savez(folder / "smoke" / "smoke_0.npz", fluid_field=np.ones((2, 2, 2, 2, 1)), velocity=np.ones((2, 2, 2, 2, 3)))
    return folder / "smoke" / "smoke_0.npz"


def turbulence(folder: Path) -> Path:
    for name in ("prs", "vx", "vy", "vz"):
        (folder / "iso" / "1").mkdir(parents=True, exist_ok=True)
        np.save(folder / "iso" / "1" / f"{name}.npy", np.ones((2, 2, 2, 2)))
    return folder / "iso" / "1" / "vx.npy"


SOURCES: dict[str, Callable[[Path], Path]] = {
    "hdf5": hdf5(),
    "hdf5-latest": hdf5(libver="latest"),
    "hdf5-fields": hdf5_fields,
    "matlab-7.3": matlab,
    "npy": npy,
    "npz": npz,
    "folder": runs,
    "smoke": smoke,
    "turbulence": turbulence,
}


def try_import(source: Path, out: Path, kind: str | None = None, names: Any = None) -> bool:
    """Whether the import works; if not, it has to say why in one line."""
    try:
        done = import_data(source, out, kind=kind, names=names)
    except ValueError as error:
        assert "\n" not in str(error) and str(error).endswith((".", "?")), repr(str(error))
        return False
    with open_store(out) as reader:
        assert reader.finished and reader.shape == (done.count, *done.shape)
    return True


def damaged(whole: bytes, seed: int) -> bytes:
    """Some bytes flipped, inserted, taken out, or the end cut off; half of it near the beginning."""
    chance, content = random.Random(seed), bytearray(whole)
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        place = chance.randrange(min(len(content), chance.choice((1200, len(whole)))) + 1)
        how = chance.random()
        if how < 0.6:
            content[place : place + 1] = bytes([chance.randrange(256)])
        elif how < 0.75:
            content[place:place] = chance.randbytes(chance.randrange(1, 9))
        elif how < 0.9:
            del content[place : place + chance.randrange(1, 30)]
        else:
            del content[place:]
    return bytes(content)


@pytest.mark.parametrize("kind", SOURCES)
@settings(QUICK, max_examples=80)
@given(seed=st.integers(0, 2**32))
def test_damaged_files(tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int) -> None:
    folder = tmp_path_factory.mktemp("damage")
    file = SOURCES[kind](folder)
    whole = file.read_bytes()
    file.write_bytes(damaged(whole, seed))
    source = next(one for one in folder.iterdir())
    worked = try_import(source, folder / "out")
    if worked and kind == "npz":  # checksums guard its arrays, though not the list of their names
        with open_store(folder / "out") as reader:
            np.testing.assert_array_equal(reader[:], np.broadcast_to(U[..., None], reader.shape))
    try:
        assert np.isfinite(read_history(file, ["u"], 2)).all()
    except ValueError as error:
        assert "\n" not in str(error) and str(error).endswith((".", "?")), repr(str(error))
    shutil.rmtree(folder)


@settings(QUICK, max_examples=40)
@given(cut=st.integers(0, 767))
def test_cut_matlab_files_of_version_5(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    file = matlab_5(tmp_path_factory.mktemp("cut"))
    whole = file.read_bytes()
    file.write_bytes(whole[: cut % len(whole)])
    try_import(file, file.with_suffix(".h5"))


DTYPES = st.sampled_from(["f2", "f4", "f8", ">f8", "i1", "i8", "u8", "?", "c8", "U3", "S2", "M8[s]", "O", "g"])
SHAPES = hn.array_shapes(min_dims=0, max_dims=7, min_side=0, max_side=3)
WORDS = st.sampled_from(
    ["u", "v", "fields", "names", "units", "boundary", "x", "times", "t", "a/b", "arr_0", "é", "\n", ""]
)
NAMES = st.none() | st.lists(WORDS | st.text(max_size=3), max_size=4)
LAID = st.lists(st.tuples(WORDS, DTYPES, SHAPES), max_size=4, unique_by=lambda one: one[0])


def filled(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(int(np.prod(shape)), dtype="i8").reshape(shape).astype(dtype)


def save(path: Path, arrays: list[tuple[str, np.ndarray]]) -> None:
    """Write them as what the suffix says, as far as that can hold them."""
    if path.suffix == ".npy":
        assume(arrays)
        np.save(path, arrays[0][1], allow_pickle=True)
    elif path.suffix == ".npz":
        with zipfile.ZipFile(path, "w") as bundle:
            for name, values in arrays:
                with bundle.open(f"{name}.npy", "w") as stream:
                    np.lib.format.write_array(stream, values, allow_pickle=True)
    else:
        with h5py.File(path, "w") as file:
            for name, values in arrays:
                text = values.dtype.kind in "UOM"
                if name:
                    file[name] = filled("U3", values.shape).astype(h5py.string_dtype()) if text else values


@settings(QUICK, max_examples=250)
@given(arrays=LAID, suffix=st.sampled_from([".npy", ".npz", ".h5"]), folder=st.booleans(), names=NAMES, data=st.data())
def test_any_arrays_under_any_names(
    tmp_path_factory: pytest.TempPathFactory,
    arrays: list[tuple[str, str, tuple[int, ...]]],
    suffix: str,
    folder: bool,
    names: list[str] | None,
    data: st.DataObject,
) -> None:
    place = tmp_path_factory.mktemp("any")
    made = [(name, filled(dtype, shape)) for name, dtype, shape in arrays]
    source = place / "runs" if folder else place / f"a{suffix}"
    if folder:
        source.mkdir()
        for number in range(2):
            save(source / f"{number}{suffix}", made if data.draw(st.integers(0, 3)) else made[1:])
    else:
        save(source, made)
    kind = data.draw(st.none() | st.sampled_from([row.name for row in KINDS]))
    try_import(source, place / "out", kind, names)
    if not folder:
        try:
            history = read_history(source, names or ["u"], data.draw(st.integers(1, 3)))
            assert history.dtype == np.float32 and history.shape[-1] == len(names or "u")
        except ValueError as error:
            assert "\n" not in str(error) and str(error).endswith((".", "?")), repr(str(error))
    shutil.rmtree(place)


@settings(QUICK, max_examples=80)
@given(data=st.data(), suffix=st.sampled_from([".npy", ".npz", ".h5"]), folder=st.booleans())
def test_any_sensible_array_arrives(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, suffix: str, folder: bool
) -> None:
    """The other half of robustness: what fits is not refused."""
    place = tmp_path_factory.mktemp("fit")
    dtype = data.draw(st.sampled_from(["f2", "f4", "f8", ">f8", "i2", "u1"]))
    shape = data.draw(hn.array_shapes(min_dims=3, max_dims=5, min_side=2, max_side=4))
    values = filled(dtype, shape)
    source = place / "runs" if folder else place / f"a{suffix}"
    if folder:
        source.mkdir()
        for number, one in enumerate(values):
            save(source / f"{number}{suffix}", [("u", one)])
    else:
        save(source, [("u", values)])
    import_data(source, place / "out", names=["u"], steady=False)
    with open_store(place / "out") as reader:
        np.testing.assert_array_equal(reader[:], values[..., None].astype(np.float32))
    shutil.rmtree(place)
