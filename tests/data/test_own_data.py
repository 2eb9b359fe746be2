"""Import of a user's own arrays: every supported file is stored with identical values."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path

import h5py
import numpy as np
import pytest

from sigmasolver.data.formats import Imported, import_data
from sigmasolver.data.store import open_store
from tests.data.test_store import store
from tests.data.test_store import values as stored_values

RANDOM = np.random.default_rng(3)
U, V, W = (RANDOM.standard_normal((4, 3, 6, 5)).astype(np.float32) for _ in range(3))


def save_npz(path: Path, arrays: Mapping[str, object]) -> Path:
    np.savez(path, **{name: np.asarray(values) for name, values in arrays.items()})  # type: ignore[arg-type]
    return path


def save_hdf5(path: Path, arrays: Mapping[str, object]) -> Path:
    """Write HDF5; lists of strings become variable-length strings, the default of h5py."""
    with h5py.File(path, "w") as file:
        for name, values in arrays.items():
            file[name] = values
    return path


Save = Callable[[Path, Mapping[str, object]], Path]
CONTAINERS = pytest.mark.parametrize(("save", "suffix"), [(save_npz, ".npz"), (save_hdf5, ".h5"), (save_hdf5, ".hdf5")])


def assert_stored(imported: Imported, expected: np.ndarray, fields: tuple[str, ...]) -> None:
    """The store holds the expected values, bit for bit, under these names."""
    with open_store(imported.path) as reader:
        assert reader.header.layout.fields == fields and imported.kind == "arrays" and reader.header.source == "arrays"
        np.testing.assert_array_equal(reader[:].view(np.uint32), np.ascontiguousarray(expected).view(np.uint32))


# --- one array per field


@CONTAINERS
def test_import_one_array_per_field(tmp_path: Path, save: Save, suffix: str) -> None:
    own = save(tmp_path / f"own{suffix}", {"u": U, "v": V, "times": [0.5, 1.0, 4.0], "x": np.arange(6) / 6})
    imported = import_data(own, tmp_path / "all.out")
    assert_stored(imported, np.stack([U, V], -1), ("u", "v"))
    layout = open_store(imported.path).header.layout
    np.testing.assert_array_equal(layout.times, [0.5, 1, 4])
    np.testing.assert_array_equal(layout.coordinates[0], np.arange(6) / 6)
    assert [note.split()[1] for note in imported.notes[1:]] == ["units:", "boundary:", "y:", "frames"]
    assert "axes (count, frames, x, y)" in imported.notes[0]
    assert_stored(import_data(own, tmp_path / "two.out", names=["v", "u"]), np.stack([V, U], -1), ("v", "u"))
    assert_stored(import_data(own, tmp_path / "one.out", names=("v",)), V[..., None], ("v",))


@CONTAINERS
def test_import_reads_units_boundary_and_t(tmp_path: Path, save: Save, suffix: str) -> None:
    metadata = {"t": [[1.0, 2.0, 3.0]], "units": ["m/s", "K"], "boundary": ["periodic", "wall"]}
    own = save(tmp_path / f"own{suffix}", {"a": U, "b": V, **metadata})
    imported = import_data(own, tmp_path / "out", names=["b", "a"])
    layout = open_store(imported.path).header.layout
    assert (layout.units, layout.boundary) == (("K", "m/s"), ("periodic", "wall"))
    np.testing.assert_array_equal(layout.times, [1, 2, 3])
    assert import_data(own, tmp_path / "b", names=["b"]).shape == (3, 6, 5, 1)
    assert open_store(tmp_path / "b").header.layout.units == ("K",)


def test_import_field_order_npz_and_hdf5(tmp_path: Path) -> None:
    arrays = {"v": V, "u": U}
    assert_stored(import_data(save_npz(tmp_path / "a.npz", arrays), tmp_path / "1"), np.stack([V, U], -1), ("v", "u"))
    assert_stored(import_data(save_hdf5(tmp_path / "a.h5", arrays), tmp_path / "2"), np.stack([U, V], -1), ("u", "v"))


def test_import_hdf5_groups_named_by_path(tmp_path: Path) -> None:
    own = save_hdf5(tmp_path / "own.h5", {"flow/u": U, "flow/deep/v": V, "w": W})
    imported = import_data(own, tmp_path / "out")
    assert_stored(imported, np.stack([V, U, W], -1), ("flow/deep/v", "flow/u", "w"))
    assert_stored(import_data(own, tmp_path / "w", names=["w", "flow/u"]), np.stack([W, U], -1), ("w", "flow/u"))


def test_import_notes_skipped_arrays(tmp_path: Path) -> None:
    arrays = {"u": U, "mask": U > 0, "mesh": np.zeros((6, 5)), "x": np.zeros((6, 5)), "note": "hello", "t": 0.5}
    for own in (save_npz(tmp_path / "own.npz", arrays), save_hdf5(tmp_path / "own.h5", arrays)):
        imported = import_data(own, tmp_path / f"{own.suffix}.out")
        assert_stored(imported, U[..., None], ("u",))
        (note,) = [note for note in imported.notes if note.startswith("Skipped")]
        assert all(f"{name} (" in note for name in ("mask", "mesh", "x", "note", "t"))


def test_import_field_named_like_an_axis(tmp_path: Path) -> None:
    own = save_npz(tmp_path / "own.npz", {"t": U, "x": V})
    assert_stored(import_data(own, tmp_path / "out"), np.stack([U, V], -1), ("t", "x"))


@pytest.mark.parametrize("dtype", ["float64", ">f4", "float16", "int16", "uint8"])
def test_import_every_real_dtype(tmp_path: Path, dtype: str) -> None:
    values = (100 * np.abs(U)).astype(dtype)
    for own in (save_npz(tmp_path / "a.npz", {"u": values}), save_hdf5(tmp_path / "a.h5", {"u": values})):
        assert_stored(import_data(own, tmp_path / f"{own.suffix}.out"), values[..., None].astype(np.float32), ("u",))


def test_import_keeps_nonfinite_values(tmp_path: Path) -> None:
    values = U.copy()
    values[1, 2, 3, 4], values[0, 0, 0, 0] = np.nan, -np.inf
    assert_stored(import_data(save_npz(tmp_path / "a.npz", {"u": values}), tmp_path / "out"), values[..., None], ("u",))


# --- one array with channels


@CONTAINERS
def test_import_fields_with_channels(tmp_path: Path, save: Save, suffix: str) -> None:
    fields = np.stack([U, V, W], -1)
    own = save(tmp_path / f"own{suffix}", {"fields": fields, "names": ["u", "v", "w"], "units": ["a", "b", "c"]})
    assert_stored(import_data(own, tmp_path / "all.out"), fields, ("u", "v", "w"))
    imported = import_data(own, tmp_path / "two.out", names=["w", "u"])
    assert_stored(imported, np.stack([W, U], -1), ("w", "u"))
    assert open_store(imported.path).header.layout.units == ("c", "a")
    bare = save(tmp_path / f"bare{suffix}", {"fields": fields})
    assert_stored(import_data(bare, tmp_path / "bare.out"), fields, ("field_0", "field_1", "field_2"))
    assert_stored(import_data(bare, tmp_path / "named.out", names=["p", "q", "r"]), fields, ("p", "q", "r"))


@pytest.mark.parametrize(
    ("shape", "names", "trajectory", "note"),
    [
        ((2, 3, 6, 5, 2), None, (3, 6, 5, 2), "(count, frames, x, y, channels), as the last has at most 16"),
        ((2, 3, 6, 17), None, (3, 6, 17, 1), "(count, frames, x, y), as the last has more than 16"),
        ((2, 3, 6, 16), None, (3, 6, 16), "(count, frames, x, channels), as the last"),
        ((2, 3, 6), None, (3, 6, 1), "(count, frames, x)."),
        ((2, 3, 4, 4, 4, 17), None, (3, 4, 4, 4, 17), "(count, frames, x, y, z, channels)."),
        ((2, 3, 4, 5), ("u",), (3, 4, 5, 1), "(count, frames, x, y)."),
        ((2, 3, 4, 1), ("u",), (3, 4, 1), "(count, frames, x, channels)."),
        ((2, 3, 1), ("u",), (3, 1, 1), "(count, frames, x)."),
        ((2, 3, 4, 5), tuple("abcde"), (3, 4, 5), "(count, frames, x, channels)."),
        ((2, 3, 4, 17), tuple("abcdefghijklmnopq"), (3, 4, 17), "(count, frames, x, channels)."),
    ],
)
def test_import_infers_axes_of_unnamed_array(
    tmp_path: Path, shape: tuple[int, ...], names: tuple[str, ...] | None, trajectory: tuple[int, ...], note: str
) -> None:
    values = RANDOM.standard_normal(shape).astype(np.float32)
    np.save(tmp_path / "a.npy", values)
    np.savez(tmp_path / "a.npz", values)
    for suffix in (".npy", ".npz"):
        imported = import_data(tmp_path / f"a{suffix}", tmp_path / f"{suffix}.out", names=names, steady=False)
        assert imported.shape == trajectory and note in imported.notes[0]
        expected = names or tuple(f"field_{channel}" for channel in range(trajectory[-1]))
        assert_stored(imported, values.reshape(2, *trajectory), expected)


def test_import_fortran_order(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.asfortranarray(U))
    assert_stored(import_data(tmp_path / "a.npy", tmp_path / "out", names=["u"]), U[..., None], ("u",))


# --- folders


def test_import_folder_in_natural_order(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    names = ["run1.npy", "run2.npy", "run10.npy", "run11.npy"]
    for name, values in zip(names, U, strict=True):
        np.save(folder / name, values)
    (folder / "readme.txt").write_text("not a trajectory")
    (folder / "._run1.npy").write_text("hidden file of another program")
    imported = import_data(folder, tmp_path / "out", names=["u"])
    assert_stored(imported, U[..., None], ("u",))
    assert "from run1.npy to run11.npy" in imported.notes[0] and "(frames, x, y)" in imported.notes[1]
    again = import_data(folder, tmp_path / "out", names=["u"])
    assert (again.present, again.fingerprint) == (4, imported.fingerprint)


@CONTAINERS
def test_import_folder_of_multi_array_files(tmp_path: Path, save: Save, suffix: str) -> None:
    separate, combined = tmp_path / "separate", tmp_path / "combined"
    for folder in (separate, combined):
        folder.mkdir()
    for number, (u, v) in enumerate(zip(U, V, strict=True)):
        save(separate / f"{number}{suffix}", {"u": u, "v": v, "times": [1.0, 2.0, 5.0]})
        save(combined / f"{number}{suffix}", {"fields": np.stack([u, v], -1), "names": ["u", "v"]})
    imported = import_data(separate, tmp_path / "separate.out")
    assert_stored(imported, np.stack([U, V], -1), ("u", "v"))
    np.testing.assert_array_equal(open_store(imported.path).header.layout.times, [1, 2, 5])
    assert_stored(import_data(separate, tmp_path / "v.out", names=["v"]), V[..., None], ("v",))
    assert_stored(import_data(combined, tmp_path / "t.out"), np.stack([U, V], -1), ("u", "v"))
    assert_stored(import_data(combined, tmp_path / "tv.out", names=["v"]), V[..., None], ("v",))


def test_import_folder_with_channels(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    for number, values in enumerate(np.stack([U, V], -1)):
        np.save(tmp_path / "runs" / f"{number}.npy", values)
    assert_stored(import_data(tmp_path / "runs", tmp_path / "a", names=["u", "v"]), np.stack([U, V], -1), ("u", "v"))
    assert_stored(import_data(tmp_path / "runs", tmp_path / "b"), np.stack([U, V], -1), ("field_0", "field_1"))


@pytest.mark.parametrize("kind", ["folder", "npy", "h5"])
def test_import_streams_large_sources(tmp_path: Path, kind: str) -> None:
    count, shape = 48, (4, 512, 512)
    source = tmp_path / f"source.{kind}"
    if kind == "folder":
        source.mkdir()
        for number in range(count):
            np.lib.format.open_memmap(source / f"{number}.npy", "w+", np.float32, shape).flush()
    elif kind == "npy":
        np.lib.format.open_memmap(source, "w+", np.float32, (count, *shape)).flush()
    else:
        with h5py.File(source, "w") as file:
            fields = file.create_dataset("fields", (count, *shape, 1), "f4")
            for number in range(count):
                fields[number] = np.zeros((*shape, 1), np.float32)
    tracemalloc.start()
    try:
        assert import_data(source, tmp_path / "out").count == count
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 0.75 * count * 4 * 2**20


# --- invalid files


def write_invalid_files(folder: Path) -> None:
    save_npz(folder / "shapes.npz", {"u": U, "v": V, "w": W[:, :, :4], "z": [1.0]})
    save_npz(folder / "uv.npz", {"u": U, "v": V, "flat": U[0, 0]})
    save_hdf5(folder / "uv.h5", {"flow/u": U, "flow/v": V})
    save_npz(folder / "none.npz", {"a": U[0, 0], "b": U * 1j, "c": U[:0]})
    save_hdf5(folder / "empty.h5", {})
    save_hdf5(folder / "odd.h5", {"u": U, "v\n": V})
    save_npz(folder / "many.npz", {f"a{number}": U for number in range(17)})
    save_npz(folder / "units.npz", {"u": U, "units": ["a", "b"]})
    save_npz(folder / "x.npz", {"u": U, "x": np.arange(5.0)})
    save_npz(folder / "fields.npz", {"fields": U, "names": list("abcde")})
    save_npz(folder / "bare.npz", {"fields": U})
    save_npz(folder / "twice.npz", {"fields": U, "names": list("abcdd")})
    save_hdf5(folder / "fields.h5", {"fields": U[0, 0]})
    save_hdf5(folder / "strange.h5", {"fields": U.astype("S4")})
    store(folder / "store.h5", stored_values(2))
    (folder / "text.h5").write_text("time, u")
    with h5py.File(folder / "partly.h5", "w") as file:
        file.create_dataset("u", U.shape, "f4", chunks=(1, 3, 6, 5))[:2] = U[:2]
    with h5py.File(folder / "unwritten.h5", "w") as file:
        file.create_dataset("u", U.shape, "f4")
    with h5py.File(folder / "packed.h5", "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk(U.shape)
        properties.set_filter(32100, h5py.h5z.FLAG_OPTIONAL)
        space = h5py.h5s.create_simple(U.shape)
        h5py.h5d.create(file.id, b"u", h5py.h5t.IEEE_F32LE, space, properties).write_direct_chunk((0,) * 4, b"abc", 0)
    content = save_hdf5(folder / "cut.h5", {"u": U, "v": V}).read_bytes()
    (folder / "cut.h5").write_bytes(content[: len(content) * 2 // 3])
    np.save(folder / "a.npy", U)
    np.save(folder / "deep.npy", np.zeros((1, 1, 2, 2, 2, 2, 2)))
    np.save(folder / "hollow.npy", np.zeros((2, 0, 3)))
    np.save(folder / "words.npy", np.full((2, 3, 4), "a"))
    np.save(folder / "kolmogorov.npy", np.zeros((1, 1, 256, 256), "f2"))
    (folder / "notes.txt").write_text("hello")


REJECTED: dict[str, tuple[str, list[str] | None, str]] = {
    "shapes.npz": (
        "shapes.npz",
        None,
        r"several shapes: u, v \(4, 3, 6, 5\); w \(4, 3, 4, 5\); select some",
    ),
    "shapes.npz uw": ("shapes.npz", ["u", "w"], r"'w' in .* has shape .*, but 'u' has \(4, 3, 6, 5\)"),
    "near": ("uv.npz", ["U1"], r"has no field 'U1'; did you mean u\?"),
    "near path": ("uv.h5", ["u", "flow/v"], "has no field 'u'; choose from flow/"),
    "flat": ("uv.npz", ["flat"], r"'flat' in .* shape \(6, 5\); expected axes \(count, frames, x\)"),
    "none.npz": ("none.npz", None, r"no real-valued array with .*; available arrays: a \(6, 5\), b "),
    "empty.h5": ("empty.h5", None, "available arrays: none"),
    "empty named": ("empty.h5", ["u"], "has no field 'u'; it has none"),
    "complex": ("none.npz", ["b"], "'b' in .* contains complex"),
    "odd.h5": ("odd.h5", None, r"include the name 'v\\n', which is empty or not printable"),
    "many.npz": ("many.npz", None, "has 17 arrays that could be fields .*; select some with --fields"),
    "units.npz": ("units.npz", None, r"has units of shape \(2,\); expected 1 words"),
    "x.npz": ("x.npz", None, r"has x of shape \(5,\); expected 6 numbers"),
    "fields.npz": ("fields.npz", ["f"], "has no field 'f'; choose from a, b, c, d, e"),
    "bare.npz": ("bare.npz", ["u"], "has 5 unnamed channels, but 1 names were given"),
    "twice.npz": ("twice.npz", None, "contain the name 'd' twice"),
    "fields.h5": ("fields.h5", None, r"has fields of shape \(6, 5\); expected \(count, frames, \*grid, channels\)"),
    "strange.h5": ("strange.h5", None, "contains text; expected real numbers"),
    "store.h5": ("store.h5", None, "store.h5 is already a sigmasolver store; use it directly"),
    "text.h5": ("text.h5", None, "is not an HDF5 file"),
    "partly.h5": ("partly.h5", None, "'u' in .* is incomplete"),
    "unwritten.h5": ("unwritten.h5", None, "'u' in .* is incomplete"),
    "packed.h5": ("packed.h5", None, "compression filter that this HDF5 does not support"),
    "cut.h5": ("cut.h5", None, "truncated or corrupt"),
    "not five": ("a.npy", ["u", "v"], r"\(4, 3, 6, 5\); its last axis must hold the 2 named fields"),
    "deep.npy": ("deep.npy", None, r"has shape .* where y, z and channels are optional"),
    "hollow.npy": ("hollow.npy", None, r"is empty \(shape \(2, 0, 3\)\)"),
    "words.npy": ("words.npy", None, "contains text; expected real numbers"),
    "fixed": ("kolmogorov.npy", ["u"], "read as factformer-kf2d, which defines its fields; .*--kind arrays"),
    "no names": ("a.npy", [], "not a list of field names"),
    "same names": ("uv.npz", ["u", "u"], "contain the name 'u' twice"),
    "no line": ("a.npy", ["u\nv"], "is empty or not printable"),
    "notes.txt": ("notes.txt", None, "is not in a supported format"),
}
"""File, requested fields and error message."""


def one_sentence(error: BaseException) -> bool:
    return "\n" not in str(error) and str(error).endswith((".", "?"))


def test_import_rejects_invalid_arrays(tmp_path: Path) -> None:
    write_invalid_files(tmp_path)
    for name, (source, names, message) in REJECTED.items():
        with pytest.raises(ValueError, match=message) as caught:
            import_data(tmp_path / source, tmp_path / "out" / name, names=names)
        assert one_sentence(caught.value), name
        assert not (tmp_path / "out" / name).exists(), name
    with pytest.raises(ValueError, match=r"notes.txt is not an array file \(.npy, .npz, .h5"):
        import_data(tmp_path / "notes.txt", tmp_path / "out.h5", kind="arrays")
    with pytest.raises(ValueError, match="'u' is not a list of field names"):
        import_data(tmp_path / "a.npy", tmp_path / "out.h5", names="u")
    assert import_data(tmp_path / "kolmogorov.npy", tmp_path / "k", kind="arrays", names=["u"]).shape[-1] == 1


def make_folder(path: Path, count: int = 3) -> Path:
    path.mkdir()
    for number in range(count):
        np.savez(path / f"{number}.npz", u=U[number], v=V[number], times=np.arange(3.0), x=np.arange(6.0))
    return path


def test_import_folder_rejects_file_that_differs_from_first(tmp_path: Path) -> None:
    changes: dict[str, tuple[dict[str, object], str]] = {
        "shape": ({"u": U[0, :, :4], "v": V[0]}, r"2.npz has shape \(3, 4, 5\), but the first file has \(3, 6, 5\)"),
        "missing": ({"v": V[0]}, "2.npz has no array 'u', but 0.npz does"),
        "type": ({"u": U[0] > 0, "v": V[0]}, "'u' in .*2.npz contains bool values"),
        "times": ({"u": U[0], "v": V[0], "times": np.arange(3.0) + 1}, "2.npz and 0.npz differ in times"),
        "x": ({"u": U[0], "v": V[0], "x": np.arange(6.0) * 2}, "2.npz and 0.npz differ in x"),
        "units": ({"u": U[0], "v": V[0], "units": ["m", "s"]}, "2.npz and 0.npz differ in units"),
    }
    for name, (arrays, message) in changes.items():
        folder = make_folder(tmp_path / name)
        save_npz(folder / "2.npz", arrays)
        with pytest.raises(ValueError, match=message) as caught:
            import_data(folder, tmp_path / "out.h5")
        assert one_sentence(caught.value) and not (tmp_path / "out.h5").exists()


def test_import_rejects_invalid_folders(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    for number in range(3):
        np.save(folder / f"{number}.npy", U[number])
    content = (folder / "2.npy").read_bytes()
    (folder / "2.npy").write_bytes(content[:-1])
    with pytest.raises(ValueError, match=r"2.npy is truncated or corrupt"):
        import_data(folder, tmp_path / "out.h5", names=["u"])
    (folder / "2.npy").write_bytes(content)
    with pytest.raises(ValueError, match="is inside the source folder; write the store outside"):
        import_data(folder, folder / "out.h5")
    np.savez(folder / "3.npz", u=U[0])
    with pytest.raises(ValueError, match=r"contains .npy and .npz files; keep only"):
        import_data(folder, tmp_path / "out.h5")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="contains no array files"):
        import_data(tmp_path / "empty", tmp_path / "out.h5", kind="arrays")
    swapped = tmp_path / "names"
    swapped.mkdir()
    for number, names in enumerate((["u", "v"], ["v", "u"])):
        np.savez(swapped / f"{number}.npz", fields=np.stack([U[0], V[0]], -1), names=np.array(names))
    with pytest.raises(ValueError, match=r"1.npz and 0.npz differ in names"):
        import_data(swapped, tmp_path / "out.h5")
    assert not (tmp_path / "out.h5").exists()


def test_import_with_other_fields_does_not_resume(tmp_path: Path) -> None:
    own = save_npz(tmp_path / "own.npz", {"u": U, "v": V})
    import_data(own, tmp_path / "out.h5", names=["u"])
    with pytest.raises(ValueError, match="cannot be resumed: its fields"):
        import_data(own, tmp_path / "out.h5", names=["v"])
