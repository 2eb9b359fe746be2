"""Files with external values, files that hang or crash the reading library, and values that change on import."""

from __future__ import annotations

import os
import signal
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from sigmasolver.data import isolated
from sigmasolver.data.formats import import_data, read_history
from sigmasolver.data.store import StoreError, is_store, open_store
from tests.data.test_own_data import one_sentence
from tests.data.test_store import store
from tests.data.test_store import values as stored_values
from tests.forked import check_output

U = np.random.default_rng(5).standard_normal((4, 3, 6, 5)).astype(np.float32)


def assert_rejected(source: Path, out: Path, message: str, names: list[str] | None = None) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        import_data(source, out, names=names)
    assert one_sentence(caught.value) and not out.exists()


# --- values stored in other files


def write_virtual(folder: Path) -> Path:
    """Write a virtual dataset of two parts with two trajectories each; the second part is missing."""
    layout = h5py.VirtualLayout(U.shape, "f4")
    for number in range(2):
        layout[2 * number : 2 * number + 2] = h5py.VirtualSource(f"part{number}.h5", "u", (2, 3, 6, 5))
    with h5py.File(folder / "virtual.h5", "w") as file:
        file.create_virtual_dataset("u", layout)
    with h5py.File(folder / "part0.h5", "w") as file:
        file["u"] = U[:2]
    return folder / "virtual.h5"


def write_external(folder: Path) -> Path:
    (folder / "secret").write_bytes(U.tobytes())
    with h5py.File(folder / "external.h5", "w") as file:
        file.create_dataset("u", U.shape, "f4", external=[(str(folder / "secret"), 0, U.nbytes)])
    return folder / "external.h5"


def write_linked(folder: Path, name: str = "linked.h5") -> Path:
    with h5py.File(folder / "other.h5", "w") as file:
        file["u"] = U
    with h5py.File(folder / name, "w") as file:
        file["v"], file["u"] = U, h5py.ExternalLink(str(folder / "other.h5"), "/u")
    return folder / name


def test_import_rejects_virtual_external_and_linked_datasets(tmp_path: Path) -> None:
    assert_rejected(write_virtual(tmp_path), tmp_path / "out", "'u' in .* is a virtual dataset")
    assert_rejected(
        write_external(tmp_path),
        tmp_path / "out",
        "'u' in .* stores its values in an external file, which is not read",
    )
    assert_rejected(
        write_linked(tmp_path), tmp_path / "out", "'u' in .* is a link to another file, which is not followed"
    )
    assert_rejected(write_linked(tmp_path), tmp_path / "out", "'u' in .* is a link to another file", ["v", "u"])
    assert_rejected(write_linked(tmp_path, "linked.mat"), tmp_path / "out", "'u' in .* is a link to another file")
    for source in (write_virtual(tmp_path), write_external(tmp_path), write_linked(tmp_path)):
        with pytest.raises(ValueError, match=r"'u' in .*"):
            read_history(source, ["u"], 2)
    import_data(write_linked(tmp_path), tmp_path / "v.out", names=["v"])  # the linked array is not selected
    np.testing.assert_array_equal(open_store(tmp_path / "v.out")[:][..., 0], U)


@pytest.mark.parametrize("storage", ["virtual", "external", "link", "axis"])
def test_open_store_rejects_values_in_other_files(tmp_path: Path, storage: str) -> None:
    path = store(tmp_path / "a.h5", stored_values(2))
    with h5py.File(path, "r+") as file:
        name = "coordinates/x" if storage == "axis" else "fields"
        values = file[name][:]
        del file[name]
        if storage == "virtual":
            layout = h5py.VirtualLayout(values.shape, "f4")
            layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "fields", values.shape)
            file.create_virtual_dataset(name, layout)
        elif storage == "external":
            (tmp_path / "raw").write_bytes(values.tobytes())
            file.create_dataset(name, values.shape, "f4", external=[(str(tmp_path / "raw"), 0, values.nbytes)])
        else:
            file[name] = h5py.ExternalLink(str(tmp_path / "other.h5"), name)
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file[name] = values
    with pytest.raises(StoreError, match=f"stores its {name} in an external file, which is not read"):
        open_store(path)


# --- files that hang


def run_with_timeout(seconds: float, action: Callable[[], None]) -> None:
    """Run in a thread, so that a hang fails the test instead of blocking the test run."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "timed out"
    if errors:
        raise errors[0]


def test_import_rejects_pipes(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "smoke").mkdir()
    names = ["a.npy", "a.npz", "a.h5", "a.mat", "1/prs.npy", "smoke/smoke_0.npz"]
    for name in names:
        os.mkfifo(tmp_path / name)

    def check_all() -> None:
        for name in names[:4]:
            assert_rejected(tmp_path / name, tmp_path / "out", "is neither a regular file nor a folder")
            with pytest.raises(ValueError, match=r"is not a regular file|not an array file"):
                read_history(tmp_path / name, ["u"], 2)
            with pytest.raises(StoreError, match="is not a file"):
                open_store(tmp_path / name)
            assert not is_store(tmp_path / name)
        with pytest.raises(ValueError, match="is not a regular file"):
            import_data(tmp_path, tmp_path.with_suffix(".out"), kind="factformer-it3d")
        assert_rejected(tmp_path / "smoke", tmp_path / "out", "is not a regular file")

    run_with_timeout(30, check_all)


def test_import_rejects_deeply_nested_groups(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "deep.h5", "w") as file:
        group = file.create_group("g")
        for _ in range(3000):
            group = group.create_group("g")
        group["u"] = U
    assert_rejected(tmp_path / "deep.h5", tmp_path / "out", "has groups nested more than 64 deep; flatten them")
    with h5py.File(tmp_path / "cycle.h5", "w") as file:
        file["a/b/u"] = U
        file["a/b/parent"] = file["a"]
    assert import_data(tmp_path / "cycle.h5", tmp_path / "cycle.out").count == 4


def test_isolated_ask_enforces_cpu_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_many_datasets(tmp_path, 30_000)
    monkeypatch.setattr(isolated, "SECONDS", 0.1)
    with pytest.raises(ValueError, match="did not finish within 0 s of CPU time") as caught:
        isolated.ask(source, "entries")
    assert one_sentence(caught.value)


# --- files that crash the library


def write_corrupt_gzip(folder: Path) -> Path:
    """Write a gzip chunk and corrupt its bytes, like a failing disk."""
    path = folder / "gzip.h5"
    with h5py.File(path, "w") as file:
        data = file.create_dataset("u", data=np.tile(U, (1, 1, 20, 20)), chunks=(1, 3, 120, 100), compression="gzip")
        info = data.id.get_chunk_info(1)
    content = bytearray(path.read_bytes())
    for offset in range(info.byte_offset + 20, info.byte_offset + info.size, 7):
        content[offset] ^= 0x5A
    path.write_bytes(content)
    return path


def test_import_rejects_corrupt_gzip_chunk_and_reads_next_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="corrupt") as caught:
        import_data(write_corrupt_gzip(tmp_path), tmp_path / "out")
    assert one_sentence(caught.value)
    np.savez(tmp_path / "good.npz", u=U)
    assert import_data(tmp_path / "good.npz", tmp_path / "good.out").count == 4


@pytest.mark.parametrize("points", [20, 4_000_000])
@pytest.mark.parametrize("suffix", [".h5", ".mat"])
def test_import_rejects_short_gzip_chunk(tmp_path: Path, points: int, suffix: str) -> None:
    """The library reads past the end of the buffer: a small chunk returns garbage, a large one crashes."""
    path = tmp_path / f"short{suffix}"
    with h5py.File(path, "w") as file:
        u = file.create_dataset("u", (2, 2, 1, points), "f4", chunks=(1, 1, 1, points), compression="gzip")
        for corner in np.ndindex(2, 2, 1):
            size = 3 if corner == (1, 0, 0) else points
            u.id.write_direct_chunk((*corner, 0), zlib.compress(np.ones(size, "f4").tobytes(), 1))
    with pytest.raises(ValueError, match=r"is truncated or corrupt|is not a MATLAB file") as caught:
        import_data(path, tmp_path / "out")
    assert one_sentence(caught.value)


@pytest.mark.parametrize("options", [{}, {"compression": 4}, {"compression": 4, "shuffle": True, "fletcher32": True}])
def test_import_compressed_chunks(tmp_path: Path, options: dict[str, Any]) -> None:
    """Chunks that do not divide the grid, and one that is stored uncompressed."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        u = file.create_dataset("u", data=U, chunks=(3, 2, 4, 5), **options)
        if set(options) == {"compression"}:
            chunk = np.zeros((3, 2, 4, 5), np.float32)
            chunk[:, :, :, :] = U[:3, :2, :4]
            u.id.write_direct_chunk((0, 0, 0, 0), chunk.tobytes(), filter_mask=1)
    import_data(tmp_path / "a.h5", tmp_path / "out")
    np.testing.assert_array_equal(open_store(tmp_path / "out")[:][..., 0], U)


def write_many_datasets(folder: Path, count: int = 10_000) -> Path:
    """Write a file that takes a while to list."""
    with h5py.File(folder / "many.h5", "w") as file:
        for number in range(count):
            file[f"{number}"] = 0.0
    return folder / "many.h5"


def test_isolated_ask_reports_library_crash_and_restarts(tmp_path: Path) -> None:
    """The reading process is killed with SIGSEGV, as by a crash of the library; the next request starts a new one."""
    source = write_many_datasets(tmp_path)
    isolated.ask(source, "names")
    assert isolated._process is not None
    killer = threading.Timer(0.2, isolated._process.child.send_signal, [signal.SIGSEGV])
    killer.start()
    with pytest.raises(ValueError, match="is corrupt and crashed the library that reads it") as caught:
        isolated.ask(source, "entries")
    assert one_sentence(caught.value)
    assert isolated.ask(source, "names") == sorted(map(str, range(10_000)))
    isolated._process.child.kill()  # while idle, so no file is blamed
    isolated._process.child.wait()
    assert len(isolated.ask(source, "names")) == 10_000


def test_isolated_process_exits_with_parent(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["u"] = U
    code = (
        "import os, sys; from pathlib import Path; from sigmasolver.data import isolated\n"
        "isolated.ask(Path(sys.argv[1]), 'entries'); print(isolated._process.child.pid, flush=True)\n"
        "os._exit(0)"
    )
    pid = int(check_output(code, tmp_path / "a.h5"))
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")")[1].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        threading.Event().wait(0.1)
    pytest.fail("the process is still running")


# --- non-finite values, underflow and overflow


def test_import_notes_nonfinite_values(tmp_path: Path) -> None:
    v = U.copy()
    v[2, 1, 3, 3], v[2, 2, 0, 0], v[3, 0, 0, 0] = np.nan, -np.inf, np.inf
    np.savez(tmp_path / "a.npz", u=U, v=v)
    imported = import_data(tmp_path / "a.npz", tmp_path / "out")
    start = "v has 3 values that are not finite (NaN or infinity), the first in trajectory 2, frame 1; "
    assert [note for note in imported.notes if "finite" in note] == [
        start + "such trajectories cannot be used for training or evaluation; skip them with --skip-bad."
    ]
    again = import_data(tmp_path / "a.npz", tmp_path / "out")  # also if the import is already complete
    assert again.present == 4 and again.notes == imported.notes
    np.savez(tmp_path / "b.npz", u=U)
    assert not [note for note in import_data(tmp_path / "b.npz", tmp_path / "b.out").notes if "finite" in note]


def test_import_notes_underflow_and_rejects_overflow(tmp_path: Path) -> None:
    u = np.where(U == 0, 1, U).astype(np.float64)
    u[1, 2, 0, :2] = 1e-60
    np.savez(tmp_path / "a.npz", u=u)
    imported = import_data(tmp_path / "a.npz", tmp_path / "out")
    (note,) = [note for note in imported.notes if "zero" in note]
    assert note.startswith("u has 2 values that are too small for float32 (stored as zero)") and "1, frame 2" in note
    u[0], u[3, 1, 0, 0] = 0, -1e300  # zeros in the source are not underflow
    np.savez(tmp_path / "b.npz", u=u)
    with pytest.raises(
        ValueError, match=r"u has values up to 1e\+300, which overflow float32, .* 3, frame 1"
    ) as caught:
        import_data(tmp_path / "b.npz", tmp_path / "b.out")
    assert one_sentence(caught.value)
    np.savez(tmp_path / "c.npz", u=U * 1e5)
    with pytest.raises(
        ValueError, match=r"overflow float16, .*; store them as float32, or convert them to other units"
    ):
        import_data(tmp_path / "c.npz", tmp_path / "c.out", dtype="float16")


# --- steady and unsteady arrays

STEADY = np.random.default_rng(6).standard_normal((5, 16, 16, 2)).astype(np.float32)


def write_steady_pair(folder: Path) -> Path:
    np.savez(folder / "pair.npz", a=STEADY[..., 0], p=STEADY[..., 1])
    return folder / "pair.npz"


def test_import_requires_steady_option_for_two_axes_without_times(tmp_path: Path) -> None:
    message = r"shape \(5, 16, 16\) and no times, .*--steady if its axes are \(count, x, y\), --unsteady .*frames, x\)"
    assert_rejected(write_steady_pair(tmp_path), tmp_path / "out", message)
    np.save(tmp_path / "pair.npy", STEADY)
    assert_rejected(
        tmp_path / "pair.npy", tmp_path / "out", r"--steady if its axes are \(count, x, y, channels\)", ["a", "p"]
    )
    np.savez(tmp_path / "fields.npz", fields=STEADY, names=["a", "p"])
    assert_rejected(tmp_path / "fields.npz", tmp_path / "out", r"--steady if its axes are \(count, x, y, channels\)")
    (tmp_path / "cases").mkdir()
    for number, values in enumerate(STEADY):
        np.savez(tmp_path / "cases" / f"{number}.npz", a=values[..., 0], p=values[..., 1])
    assert_rejected(
        tmp_path / "cases", tmp_path / "out", r"--steady if its axes are \(x, y\), --unsteady .* \(frames, x\)"
    )
    for name in ("pair.npz", "pair.npy", "fields.npz", "cases"):
        imported = import_data(tmp_path / name, tmp_path / f"{name}.out", names=["a", "p"], steady=True)
        assert imported.shape == (1, 16, 16, 2) and not any("times" in note for note in imported.notes)
        with open_store(imported.path) as reader:
            np.testing.assert_array_equal(reader[:][:, 0], STEADY)
        unsteady = import_data(tmp_path / name, tmp_path / f"{name}.t.out", names=["a", "p"], steady=False)
        assert unsteady.shape == (16, 16, 2)
    np.savez(tmp_path / "times.npz", u=STEADY[..., 0], times=np.arange(16.0))  # the times resolve the ambiguity
    assert import_data(tmp_path / "times.npz", tmp_path / "times.out").shape == (16, 16, 1)
    with pytest.raises(ValueError, match=r"has times of shape \(16,\); expected 1 numbers"):
        import_data(tmp_path / "times.npz", tmp_path / "no.out", steady=True)


def test_train_command_on_steady_arrays(tmp_path: Path, call: Callable[..., tuple[int, str, str]]) -> None:
    own, small = write_steady_pair(tmp_path), ["--set", "train.updates=2", "--set", "model.width=16", "--device", "cpu"]
    code, _, err = call("train", "--data", own, "--out", tmp_path / "run", "--targets", "p", *small)
    assert code and "--steady if its axes are (count, x, y)" in err and not (tmp_path / "run" / "recipe.json").exists()
    code, _, err = call("train", "--data", own, "--out", tmp_path / "time", "--targets", "p", "--unsteady", *small)
    assert code and "a is not predicted but changes in time" in err and "--steady" in err
    code, out, err = call("train", "--data", own, "--out", tmp_path / "run", "--targets", "p", "--steady", *small)
    assert code == 0, err
    assert "p from a" in out and "grid: 16 × 16" in out


def test_read_history_rejects_empty_and_text_arrays(tmp_path: Path) -> None:
    np.save(tmp_path / "none.npy", np.zeros((0, 3, 4, 5)))
    np.save(tmp_path / "text.npy", np.full((2, 3, 4, 5), "a"))
    for name, message in (
        ("none", r"is empty \(shape \(0, 3, 4, 5\)\)"),
        ("text", "contains text; expected real numbers"),
    ):
        with pytest.raises(ValueError, match=message):
            read_history(tmp_path / f"{name}.npy", ["u"], 2)
