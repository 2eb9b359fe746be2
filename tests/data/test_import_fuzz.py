"""Fuzzed files: an import succeeds or fails with a one-line ValueError; it neither crashes nor hangs.

MATLAB files of version 5 are only truncated: scipy, which reads them, can crash on corrupt types inside the file.
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

from sigmasolver.data.formats import FORMATS, import_data, read_history
from sigmasolver.data.store import open_store

U = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
QUICK = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def hdf5_writer(**options: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        with h5py.File(folder / "a.h5", "w", **options) as file:
            file.create_dataset("u", data=U, chunks=True, compression="gzip")
            file["deep/v"] = U
            file["times"] = np.arange(3.0)
            file["boundary"] = ["open", "wall"]
            file["units"] = np.array([b"m", b"s"])
        return folder / "a.h5"

    return write


def write_hdf5_fields(folder: Path) -> Path:
    with h5py.File(folder / "a.hdf5", "w") as file:
        file["fields"], file["names"] = U, list("abcde")
    return folder / "a.hdf5"


def write_matlab_73(folder: Path) -> Path:
    with h5py.File(folder / "a.mat", "w", userblock_size=512) as file:
        file.create_dataset("u", data=U.T, chunks=True, compression="gzip")
        file["t"] = np.arange(5.0)[:, None]
    return folder / "a.mat"


def write_matlab_5(folder: Path) -> Path:
    scipy.io.savemat(folder / "a.mat", {"u": U, "t": np.arange(5.0)[None]})
    return folder / "a.mat"


def write_npy(folder: Path) -> Path:
    np.save(folder / "a.npy", U)
    return folder / "a.npy"


def write_npz(folder: Path) -> Path:
    np.savez_compressed(folder / "a.npz", u=U, v=U, times=np.arange(3.0))
    return folder / "a.npz"


def write_runs(folder: Path) -> Path:
    """Write a folder of trajectories; its second file is the one to damage."""
    (folder / "runs").mkdir()
    for number in range(3):
        np.savez(folder / "runs" / f"run{number}.npz", fields=U, names=np.array(list("abcde")))
    return folder / "runs" / "run1.npz"


def write_smoke(folder: Path) -> Path:
    (folder / "smoke").mkdir()
    np.savez(folder / "smoke" / "smoke_0.npz", fluid_field=np.ones((2, 2, 2, 2, 1)), velocity=np.ones((2, 2, 2, 2, 3)))
    return folder / "smoke" / "smoke_0.npz"


def write_turbulence(folder: Path) -> Path:
    for name in ("prs", "vx", "vy", "vz"):
        (folder / "iso" / "1").mkdir(parents=True, exist_ok=True)
        np.save(folder / "iso" / "1" / f"{name}.npy", np.ones((2, 2, 2, 2)))
    return folder / "iso" / "1" / "vx.npy"


WRITERS: dict[str, Callable[[Path], Path]] = {
    "hdf5": hdf5_writer(),
    "hdf5-latest": hdf5_writer(libver="latest"),
    "hdf5-fields": write_hdf5_fields,
    "matlab-7.3": write_matlab_73,
    "npy": write_npy,
    "npz": write_npz,
    "folder": write_runs,
    "smoke": write_smoke,
    "turbulence": write_turbulence,
}


def try_import(source: Path, out: Path, kind: str | None = None, names: Any = None) -> bool:
    """Return whether the import succeeds; assert that an error has one line."""
    try:
        imported = import_data(source, out, kind=kind, names=names)
    except ValueError as error:
        assert "\n" not in str(error) and str(error).endswith((".", "?")), repr(str(error))
        return False
    with open_store(out) as reader:
        assert reader.finished and reader.shape == (imported.count, *imported.shape)
    return True


def corrupt(original: bytes, seed: int) -> bytes:
    """Overwrite, insert or delete random bytes, or truncate; half of the positions are near the beginning."""
    rng, content = random.Random(seed), bytearray(original)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        offset = rng.randrange(min(len(content), rng.choice((1200, len(original)))) + 1)
        action = rng.random()
        if action < 0.6:
            content[offset : offset + 1] = bytes([rng.randrange(256)])
        elif action < 0.75:
            content[offset:offset] = rng.randbytes(rng.randrange(1, 9))
        elif action < 0.9:
            del content[offset : offset + rng.randrange(1, 30)]
        else:
            del content[offset:]
    return bytes(content)


@pytest.mark.parametrize("kind", WRITERS)
@settings(QUICK, max_examples=80)
@given(seed=st.integers(0, 2**32))
def test_import_corrupt_files(tmp_path_factory: pytest.TempPathFactory, kind: str, seed: int) -> None:
    folder = tmp_path_factory.mktemp("damage")
    file = WRITERS[kind](folder)
    original = file.read_bytes()
    file.write_bytes(corrupt(original, seed))
    source = next(entry for entry in folder.iterdir())
    succeeded = try_import(source, folder / "out")
    if succeeded and kind == "npz":  # checksums protect the arrays, but not the directory of their names
        with open_store(folder / "out") as reader:
            np.testing.assert_array_equal(reader[:], np.broadcast_to(U[..., None], reader.shape))
    try:
        assert np.isfinite(read_history(file, ["u"], 2)).all()
    except ValueError as error:
        assert "\n" not in str(error) and str(error).endswith((".", "?")), repr(str(error))
    shutil.rmtree(folder)


@settings(QUICK, max_examples=40)
@given(cut=st.integers(0, 767))
def test_import_truncated_matlab_5(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    file = write_matlab_5(tmp_path_factory.mktemp("cut"))
    content = file.read_bytes()
    file.write_bytes(content[: cut % len(content)])
    try_import(file, file.with_suffix(".h5"))


DTYPES = st.sampled_from(["f2", "f4", "f8", ">f8", "i1", "i8", "u8", "?", "c8", "U3", "S2", "M8[s]", "O", "g"])
SHAPES = hn.array_shapes(min_dims=0, max_dims=7, min_side=0, max_side=3)
ARRAY_NAMES = st.sampled_from(
    ["u", "v", "fields", "names", "units", "boundary", "x", "times", "t", "a/b", "arr_0", "é", "\n", ""]
)
FIELD_NAMES = st.none() | st.lists(ARRAY_NAMES | st.text(max_size=3), max_size=4)
ARRAYS = st.lists(st.tuples(ARRAY_NAMES, DTYPES, SHAPES), max_size=4, unique_by=lambda array: array[0])


def make_array(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(int(np.prod(shape)), dtype="i8").reshape(shape).astype(dtype)


def save(path: Path, arrays: list[tuple[str, np.ndarray]]) -> None:
    """Write arrays in the format of the suffix, as far as it supports them."""
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
                    file[name] = make_array("U3", values.shape).astype(h5py.string_dtype()) if text else values


@settings(QUICK, max_examples=250)
@given(
    arrays=ARRAYS,
    suffix=st.sampled_from([".npy", ".npz", ".h5"]),
    folder=st.booleans(),
    names=FIELD_NAMES,
    data=st.data(),
)
def test_import_arbitrary_arrays(
    tmp_path_factory: pytest.TempPathFactory,
    arrays: list[tuple[str, str, tuple[int, ...]]],
    suffix: str,
    folder: bool,
    names: list[str] | None,
    data: st.DataObject,
) -> None:
    root = tmp_path_factory.mktemp("any")
    named_arrays = [(name, make_array(dtype, shape)) for name, dtype, shape in arrays]
    source = root / "runs" if folder else root / f"a{suffix}"
    if folder:
        source.mkdir()
        for number in range(2):
            save(source / f"{number}{suffix}", named_arrays if data.draw(st.integers(0, 3)) else named_arrays[1:])
    else:
        save(source, named_arrays)
    kind = data.draw(st.none() | st.sampled_from([row.name for row in FORMATS]))
    try_import(source, root / "out", kind, names)
    if not folder:
        try:
            history = read_history(source, names or ["u"], data.draw(st.integers(1, 3)))
            assert history.dtype == np.float32 and history.shape[-1] == len(names or "u")
        except ValueError as error:
            assert "\n" not in str(error) and str(error).endswith((".", "?")), repr(str(error))
    shutil.rmtree(root)


@settings(QUICK, max_examples=80)
@given(data=st.data(), suffix=st.sampled_from([".npy", ".npz", ".h5"]), folder=st.booleans())
def test_import_accepts_valid_arrays(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, suffix: str, folder: bool
) -> None:
    root = tmp_path_factory.mktemp("fit")
    dtype = data.draw(st.sampled_from(["f2", "f4", "f8", ">f8", "i2", "u1"]))
    shape = data.draw(hn.array_shapes(min_dims=3, max_dims=5, min_side=2, max_side=4))
    values = make_array(dtype, shape)
    source = root / "runs" if folder else root / f"a{suffix}"
    if folder:
        source.mkdir()
        for number, trajectory in enumerate(values):
            save(source / f"{number}{suffix}", [("u", trajectory)])
    else:
        save(source, [("u", values)])
    import_data(source, root / "out", names=["u"], steady=False)
    with open_store(root / "out") as reader:
        np.testing.assert_array_equal(reader[:], values[..., None].astype(np.float32))
    shutil.rmtree(root)
