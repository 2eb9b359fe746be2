"""Foreign files read in place: the same values as after an import, for any slice."""

from __future__ import annotations

import pickle
import shutil
from dataclasses import replace

import h5py
import numpy as np
import pytest
import scipy.io
import torch

from sigmasolver.data import formats
from sigmasolver.data.formats import ReadOptions, import_data, open_data, opened
from sigmasolver.data.formats.finite import without_bad
from sigmasolver.data.split import Split
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows, WindowSpec
from sigmasolver.recipes import recipe_of

VALUES = np.random.default_rng(3).normal(size=(5, 7, 6, 4)).astype(np.float32)
BOTH = np.stack([VALUES, 2 * VALUES], axis=-1)


@pytest.fixture(params=["frames", "whole trajectories"])
def source(tmp_path, monkeypatch, request):
    """A temporary kind: a user's own arrays with a published split."""
    np.savez(tmp_path / "waves.npz", u=VALUES, v=2 * VALUES)

    def read(path):
        foreign = formats._read_user_arrays(path)
        frames = (lambda index, start, stop: foreign.read(index, index + 1)[0, start:stop]) if by_frame else None
        return replace(foreign, frames=frames, split=Split((0, 3), (4,), (1, 2)))

    by_frame = request.param == "frames"
    kind = formats.Format("here", "a test", lambda path: path.suffix == ".npz", read, identified_by_values=False)
    monkeypatch.setattr(formats, "FORMATS", (kind, *formats.FORMATS))
    return tmp_path / "waves.npz"


@pytest.mark.parametrize(
    "key",
    [
        2,
        -1,
        slice(1, 4),
        (1, 3),
        (1, slice(0, 5, 2)),
        (2, slice(None), slice(None, None, 3), 1, 0),
        slice(4, 1, -2),
        (-1, slice(None, None, 2), ..., 0),
        (..., 1),
        ...,
        (slice(1, 3), ..., slice(None), 1),
        (np.int64(3), 1, 2, 3, 0, ...),
    ],
)
def test_open_data_slices_like_an_array(source, tmp_path, key):
    import_data(source, tmp_path / "store.h5")
    for path in (source, tmp_path / "store.h5"):
        with open_data(path) as data:
            assert data.shape == (5, 7, 6, 4, 2)
            np.testing.assert_array_equal(data[key], BOTH[key])


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ([0, 2], "not with list; take a slice, and select from the array"),
        ((0, np.array([0, 2])), "not with ndarray"),
        (True, "not with bool"),
        ((0, 1.0), "not with float"),
        (None, "not with NoneType"),
        ((..., 0, ...), "only one ellipsis"),
        ((0, 0, 0, 0, 0, 0, ...), "6 indices for 5 axes"),
    ],
)
def test_invalid_indices_are_refused_in_one_sentence(source, key, message):
    with open_data(source) as data, pytest.raises(IndexError, match=message) as caught:
        data[key]
    assert "\n" not in str(caught.value)


def test_published_split_in_place_and_imported(source, tmp_path):
    import_data(source, tmp_path / "store.h5")
    for path in (source, tmp_path / "store.h5"):
        with open_data(path) as data:
            assert recipe_of("ns2d").split_of(data) == Split((0, 3), (4,), (1, 2))


def test_fingerprint_changes_with_file(source):
    with open_data(source) as data:
        before, digests = data.fingerprint, data.digests
        assert len(set(digests)) == 5
    np.savez(source, u=VALUES, v=3 * VALUES)
    with open_data(source) as data:
        assert data.fingerprint != before and not set(data.digests) & set(digests)


def test_foreign_reader_reopens_after_close(source):
    data = open_data(source)
    data.close()
    np.testing.assert_array_equal(data[1, 2, :, :, 0], VALUES[1, 2])
    with pytest.raises(IndexError):
        data[1, 2, 3, 4, 0, 0]


def test_skip_bad_keeps_published_split(source, tmp_path):
    with_nan = VALUES.copy()
    with_nan[3, 2, 1, 1] = np.nan
    np.savez(source, u=with_nan, v=VALUES)
    imported = import_data(source, tmp_path / "store.h5", options=ReadOptions(skip_bad=True))
    with open_data(tmp_path / "store.h5") as data:
        assert len(data) == imported.count == 4 and data.published_split == Split((0,), (3,), (1, 2))
        np.testing.assert_array_equal(data[3][..., 1], VALUES[4])
        assert data.header.parameters["skipped"] == ["trajectory 3"]
    finite, _ = without_bad(formats._read_user_arrays(source), 2)
    (field,) = finite.fields(3, 1, 5, [1])
    np.testing.assert_array_equal(field, VALUES[4, 1:5])


# --- every array format, in place


def _write_h5(path, **options):
    with h5py.File(path, "w") as file:
        for name, values in (("u", VALUES), ("v", 2 * VALUES)):
            file.create_dataset(name, data=values, **options)


def _write_folder(path, write):
    path.mkdir()
    for number in range(len(VALUES)):
        write(path / f"run{number}", VALUES[number], 2 * VALUES[number])


ARRAYS = {
    "a.npy": lambda path: np.save(path, BOTH.astype(np.float64)),
    "a.npz": lambda path: np.savez_compressed(path, u=VALUES, v=2 * VALUES),
    "a.pt": lambda path: torch.save({"u": torch.from_numpy(VALUES), "v": torch.from_numpy(2 * VALUES)}, path),
    "whole.h5": lambda path: _write_h5(path),
    "frames.h5": lambda path: _write_h5(path, chunks=(1, 2, 6, 4), compression="gzip"),
    "mixed.h5": lambda path: _write_h5(path, chunks=(5, 1, 3, 4), compression="gzip", shuffle=True),
    "npy": lambda path: _write_folder(path, lambda stem, u, v: np.save(f"{stem}.npy", np.stack([u, v], -1))),
    "npz": lambda path: _write_folder(path, lambda stem, u, v: np.savez_compressed(f"{stem}.npz", u=u, v=v)),
}
CACHED = {"a.npz": "an .npz can only be read whole", "mixed.h5": "its chunks span many trajectories"}


@pytest.mark.parametrize("name", ARRAYS)
def test_open_data_reads_arrays_in_place(tmp_path, name):
    path = tmp_path / name
    ARRAYS[name](path)
    names = {"a.npy", "npy"} & {name} and ("u", "v")
    with open_data(path, ReadOptions(fields=names or None)) as data:
        assert data.path == path and data.header.layout.fields == ("u", "v")
        np.testing.assert_array_equal(data[:], BOTH)
        for key in ((1, slice(2, 5)), (4, slice(0, 7, 3), slice(None, None, 2)), (0, 6)):
            np.testing.assert_array_equal(data[key], BOTH[key])
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(data))[3, 1:3], BOTH[3, 1:3])
        for fields, channels in ((("u", "v"), [0, 1]), (("v",), [1]), (("v", "u"), [1, 0])):
            windows = Windows(data, (4, 1), WindowSpec(fields, fields[:1], 2, 1, time_stride=2, space_stride=2))
            history, future = windows.batch([0, -1])
            expected = np.stack([BOTH[4, 0:5:2, ::2, ::2], BOTH[1, 2:7:2, ::2, ::2]])[..., channels]
            np.testing.assert_array_equal(history, expected[:, :2])
            np.testing.assert_array_equal(future, expected[:, 2:, ..., :1])
        cached = [note for note in data.notes if "in memory" in note]
        assert [CACHED[name] in note for note in cached] == [True] if name in CACHED else not cached
        assert any("read whole" in note for note in data.notes) == (name in ("a.npz", "npz"))
        imported = import_data(path, tmp_path / "store.h5", options=ReadOptions(fields=names or None))
        assert not any("In-place" in note for note in imported.notes), "irrelevant for a store"
        with open_store(imported.path) as store:
            assert list(data.digests) == store.digests, "digests depend on the values alone"


def test_open_data_reads_only_requested_frames(tmp_path, monkeypatch):
    """From a chunked file, the worker reads only the frames of the window, never the full array."""
    from sigmasolver.data.formats import hdf5

    requests = []
    monkeypatch.setattr(hdf5, "ask", lambda *args, ask=hdf5.ask: requests.append(args[1:]) or ask(*args))
    _write_h5(tmp_path / "a.h5", chunks=(1, 2, 6, 4), compression="gzip")
    with open_data(tmp_path / "a.h5") as data:
        requests.clear()
        np.testing.assert_array_equal(data[2, 3:5], BOTH[2, 3:5])
    assert [request[:2] for request in requests] == [
        ("box", [name, [(2, 3), (3, 5), (0, 6), (0, 4)]]) for name in ("u", "v")
    ]  # fmt: skip


@pytest.mark.parametrize("axes", ["count,time,x,y,field", "field,y,x,time,count", "x,y,count,field,time"])
@pytest.mark.parametrize("suffix", [".npy", ".h5"])
def test_reading_axes_in_any_order(tmp_path, axes, suffix):
    order = [("count", "time", "x", "y", "field").index(name) for name in axes.split(",")]
    path, transposed = tmp_path / f"a{suffix}", BOTH.transpose(order)
    if suffix == ".npy":
        np.save(path, transposed)
    else:
        with h5py.File(path, "w") as file:
            file["flow"] = transposed
    with open_data(path, ReadOptions(("u", "v"), axes=tuple(axes.split(",")))) as data:
        np.testing.assert_array_equal(data[1, 2:6], BOTH[1, 2:6])
        np.testing.assert_array_equal(data[:], BOTH)
        history, future = Windows(data, (1,), WindowSpec(("u", "v"), ("v",), 2, 1))[3]
        np.testing.assert_array_equal(history, BOTH[1, 3:5])
        np.testing.assert_array_equal(future, BOTH[1, 5:6, ..., 1:])


def test_open_data_single_and_steady_trajectories(tmp_path):
    np.save(tmp_path / "one.npy", VALUES[0])
    with open_data(tmp_path / "one.npy", ReadOptions(axes=("time", "x", "y"))) as data:
        np.testing.assert_array_equal(data[0, 2:4][..., 0], VALUES[0, 2:4])
    np.savez(tmp_path / "pair.npz", a=VALUES[:, 0], p=VALUES[:, 1])
    with open_data(tmp_path / "pair.npz", ReadOptions(steady=True)) as data:
        assert data.shape == (5, 1, 6, 4, 2)
        np.testing.assert_array_equal(data[3, 0][..., 1], VALUES[3, 1])


def test_reading_options_apply_in_place(tmp_path):
    solid = np.zeros_like(VALUES)
    solid[:, :, 2:4, 1:3] = 1
    np.savez(tmp_path / "a.npz", u=np.where(solid == 1, np.nan, VALUES), solid=solid)
    options = ReadOptions(boundary=("periodic", "wall"), dt=0.5, units=("m/s", "1"), mask="solid")
    with open_data(tmp_path / "a.npz", options) as data:
        assert data.header.layout.boundary == ("periodic", "wall") and data.header.layout.times[1] == 0.5
        assert data.header.layout.units == ("m/s", "1") and data.header.parameters["mask"] == "solid"
        np.testing.assert_array_equal(data[1, 3][..., 0], np.where(solid[1, 3] == 1, 0, VALUES[1, 3]))
        history, _ = Windows(data, (1,), WindowSpec(("u",), ("u",), 1, 1))[3]
        np.testing.assert_array_equal(history[..., 0], np.where(solid[1, 3:4] == 1, 0, VALUES[1, 3:4]))
        assert data.header.parameters["reading"]["boundary"] == ["periodic", "wall"]
        explicit = replace(options, fields=("u", "solid"), steady=False)
        assert opened(tmp_path / "a.npz", explicit, "arrays").fingerprint == data.fingerprint


def test_fingerprint_equal_for_copies_and_changes_with_values(tmp_path):
    np.save(tmp_path / "a.npy", BOTH)
    shutil.copy(tmp_path / "a.npy", tmp_path / "b.npy")
    first, copy = open_data(tmp_path / "a.npy"), open_data(tmp_path / "b.npy")
    assert copy.fingerprint == first.fingerprint
    changed = BOTH.copy()
    changed[2, 6, 5, 3, 1] += 1
    np.save(tmp_path / "b.npy", changed)
    second = open_data(tmp_path / "b.npy")
    assert second.fingerprint != first.fingerprint
    assert [new == old for new, old in zip(second.digests, first.digests, strict=True)] == [
        True,
        True,
        False,
        True,
        True,
    ]


# --- MATLAB and FactFormer


@pytest.mark.parametrize("version", ["5", "7.3"])
def test_open_data_reads_mat_in_place(tmp_path, version):
    path, u = tmp_path / "ns.mat", np.moveaxis(VALUES, 1, -1)  # (count, x, y, frames)
    a, p = VALUES[:, 0], VALUES[:, 1]
    if version == "5":
        scipy.io.savemat(path, {"u": u, "t": np.arange(1.0, 8)})
        scipy.io.savemat(tmp_path / "darcy.mat", {"coeff": a, "sol": p})
    else:
        with h5py.File(path, "w") as file:
            file["u"], file["t"] = u.T, np.arange(1.0, 8)[None].T
        with h5py.File(tmp_path / "darcy.mat", "w") as file:
            for name, values in (("coeff", a), ("sol", p)):
                file.create_dataset(name, data=values.T, chunks=(4, 6, 1))
    with open_data(path) as data:
        np.testing.assert_array_equal(data[1, 2:5][..., 0], VALUES[1, 2:5])
        np.testing.assert_array_equal(data[:][..., 0], VALUES)
        assert any("in memory" in note for note in data.notes)
    with open_data(tmp_path / "darcy.mat") as data:
        np.testing.assert_array_equal(data[:], np.stack([a, p], -1)[:, None])
        cached = any("in memory" in note for note in data.notes)
        assert cached == (version == "5"), "one chunk per case can be read separately"


def test_open_data_reads_factformer_in_place(tmp_path):
    flow = np.random.default_rng(0).normal(size=(2, 3, 256, 256)).astype(np.float32)
    np.save(tmp_path / "kf.npy", flow)
    with open_data(tmp_path / "kf.npy") as data:
        assert data.header.source == "factformer-kf2d"
        np.testing.assert_array_equal(data[1, 1:3][..., 0], flow[1, 1:3])
    box = np.random.default_rng(0).normal(size=(2, 4, 5, 5, 5, 4)).astype(np.float32)
    for number in range(2):
        (tmp_path / "it" / str(number)).mkdir(parents=True)
        for channel, name in enumerate(("prs", "vx", "vy", "vz")):
            np.save(tmp_path / "it" / str(number) / f"{name}.npy", box[number, ..., channel])
        (tmp_path / "smoke").mkdir(exist_ok=True)
        arrays = {"fluid_field": box[number, ..., :1], "velocity": box[number, ..., 1:]}
        np.savez(tmp_path / "smoke" / f"smoke_{number}.npz", **arrays)
    for folder in ("it", "smoke"):
        with open_data(tmp_path / folder) as data:
            assert data.header.source == {"it": "factformer-it3d", "smoke": "factformer-smoke"}[folder]
            np.testing.assert_array_equal(data[1, 1:3], box[1, 1:3])


def test_guess_format_smoke_requires_its_arrays(tmp_path):
    _write_folder(
        tmp_path / "own", lambda stem, u, v: np.savez(stem.with_name(stem.name.replace("run", "smoke_")), u=u, v=v)
    )
    with open_data(tmp_path / "own") as data:
        assert data.header.source == "arrays" and data.shape == (5, 7, 6, 4, 2)
