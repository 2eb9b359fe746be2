"""Atomic writes, locks and temporary files: user files survive, as do files after a kill or on a full disk."""

from __future__ import annotations

import os
import re
import resource
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BytesIO
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from sigmasolver.data import slots
from sigmasolver.data.inspect import draw
from sigmasolver.data.store import StoreError, Writer, open_store, write_store
from sigmasolver.diagnose.records import write_findings
from sigmasolver.diagnose.subject import Findings
from sigmasolver.report.figures.style import save
from sigmasolver.report.page import write_page
from sigmasolver.report.study import Curve, Study, Table
from sigmasolver.runs import Run, read_facts, read_rows, read_tensors, replace_rows, write_tensors
from sigmasolver.runs.files import open_lock, os_errors_as_value_errors, read_bytes, replacing
from tests.data.test_store import HEADER, store, values
from tests.forked import Forked, check_output

STUDY = Study("title", "summary", (Curve("model", (1, 2), (0.1, 0.2)),), Table(("model",), (("model",),)), ())


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def put(path: Path, data: bytes) -> None:
    with replacing(path) as file:
        file.write(data)


# --- user files


@pytest.mark.parametrize("name", ["records", "training", "diagnose"])
def test_run_lock_refuses_a_symlink(tmp_path: Path, name: str) -> None:
    user_file, run = tmp_path / "thesis.tex", Run(tmp_path / "run")
    user_file.write_text("years of work")
    run.path.mkdir()
    (run.path / f"{name}.lock").symlink_to(user_file)
    with pytest.raises(ValueError, match=r"\.lock is a link .*; remove it\.$"), run.locked(name):
        pass
    assert user_file.read_text() == "years of work"


def test_lock_does_not_truncate_its_file(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "records.lock").write_text("mine")
    with run.locked("records"):
        assert (tmp_path / "records.lock").read_text() == "mine"
    (tmp_path / "a.h5.lock").write_text("mine")
    store(tmp_path / "a.h5", values(1))
    write_store(tmp_path / "b.h5", HEADER, values(1))
    assert (tmp_path / "a.h5.lock").read_text() == "mine" and not (tmp_path / "b.h5.lock").exists()


def test_store_lock_refuses_a_symlink(tmp_path: Path) -> None:
    (tmp_path / "a.h5.lock").symlink_to(tmp_path / "made by a link")
    with pytest.raises(ValueError, match="link"):
        Writer(tmp_path / "a.h5", HEADER, 1)
    assert names(tmp_path) == {"a.h5.lock"}


def test_pipe_is_refused_as_lock_and_run_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        open_lock(tmp_path / "pipe")
    for read in (read_bytes, read_rows, read_tensors):
        with pytest.raises(ValueError, match="not a regular file"):
            read(tmp_path / "pipe")


def write_all(folder: Path) -> list[str]:
    """Write a file with every function that replaces files; returns their names."""
    run = Run(folder)
    run.write_json("data.json", {"a": 1})
    write_tensors(run.weights, {"a": torch.zeros(3)}, {"step": 1})
    replace_rows(run.records, [{"a": 1}])
    write_findings(run, "x", Findings([{"metric": "m", "value": 1.0}], {"a": values(1)}), {})
    write_page(folder / "page.html", STUDY)
    save(Figure(), folder, "figure")
    store(folder / "a.h5", values(2))
    with Writer(folder / "a.h5", HEADER, 3):  # a larger count, so the store is copied
        pass
    write_store(folder / "b.h5", HEADER, values(1))
    draw(folder / "a.h5", folder / "picture.png")
    run_files = ["data.json", "weights.safetensors", "records.jsonl", "diagnose/x.jsonl", "diagnose/x.npz", "page.html"]
    return [*run_files, "figure.png", "figure.pdf", "a.h5", "b.h5", "picture.png"]


def test_temporary_files_do_not_overwrite_user_files(tmp_path: Path) -> None:
    (tmp_path / "work" / "diagnose").mkdir(parents=True)
    precious, written = tmp_path / "precious", write_all(tmp_path / "first")
    precious.write_text("precious")
    for number, name in enumerate(written):
        user_file = tmp_path / "work" / f"{name}.new"
        user_file.symlink_to(precious) if number % 2 else user_file.write_text("mine")
    assert write_all(tmp_path / "work") == written
    for number, name in enumerate(written):
        user_file = tmp_path / "work" / f"{name}.new"
        assert user_file.read_text() == ("precious" if number % 2 else "mine") and (tmp_path / "work" / name).exists()


def test_temporary_files_are_removed(tmp_path: Path) -> None:
    written = write_all(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()} == set(written)


def test_replacing_keeps_the_file_on_an_error(tmp_path: Path) -> None:
    put(tmp_path / "a", b"before")
    with pytest.raises(KeyError), replacing(tmp_path / "a") as file:
        file.write(b"after")
        raise KeyError
    assert (tmp_path / "a").read_bytes() == b"before" and names(tmp_path) == {"a"}


def test_temporary_files_of_killed_processes_are_removed(tmp_path: Path) -> None:
    code = """
import os, sys
from pathlib import Path
from sigmasolver.runs.files import replacing
for path in sys.argv[1:]:
    if os.fork() == 0:
        with replacing(Path(path)) as file:
            file.write(b"torn")
            file.flush()
            os.kill(os.getpid(), 9)
    os.wait()
"""
    check_output(code, *(tmp_path / name for name in ("a", "ab")))
    assert len(names(tmp_path)) == 2 and not (tmp_path / "a").exists()
    with replacing(tmp_path / "a") as file:
        file.write(b"first")
        put(tmp_path / "a", b"second")
        assert len(names(tmp_path)) == 3, "the leftover of `ab`, `a`, and the file being written"
    assert (tmp_path / "a").read_bytes() == b"first"
    put(tmp_path / "ab", b"")
    assert names(tmp_path) == {"a", "ab"}


def test_replacing_with_the_longest_file_name(tmp_path: Path) -> None:
    name = "ü" * 127
    put(tmp_path / name, b"long")
    assert names(tmp_path) == {name}


# --- permissions


def test_file_modes_follow_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        written = write_all(tmp_path)
    finally:
        os.umask(previous)
    assert {name: oct(stat.S_IMODE((tmp_path / name).stat().st_mode)) for name in written} == dict.fromkeys(
        written, "0o640"
    )


@contextmanager
def another_user(folder: Path) -> Iterator[None]:
    """Run the block as an unprivileged user, because root can read everything."""
    for path in (folder, *list(folder.parents)[:3]):
        path.chmod(path.stat().st_mode | 0o055)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_unreadable_files_raise_permission_denied(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for name in write_all(tmp_path):
        (tmp_path / name).chmod(0)
    readers = [
        lambda: run.read_json("data.json"),
        lambda: read_tensors(run.weights),
        lambda: read_facts(run.weights),
        lambda: run.digest,
        lambda: read_rows(run.records),
        lambda: open_store(tmp_path / "a.h5"),
    ]
    with another_user(tmp_path):
        for read in readers:
            with pytest.raises(ValueError, match="Permission denied: "):
                read()


# --- full disks


WRITES = {
    "a.h5": lambda folder: Writer(folder / "a.h5", HEADER, 6),
    "b.h5": lambda folder: write_store(folder / "b.h5", HEADER, values(3)),
    "figure.png": lambda folder: save(Figure(), folder, "figure"),
    "picture.png": lambda folder: draw(folder / "c.h5", folder / "picture.png"),
}
SIZES = (0, 2000)


def write_with_limits(folder: str) -> None:
    """Run each write in a fork with a file size limit, which acts like a full disk."""
    Figure().savefig(BytesIO())  # loads the fonts before forking
    for name, write in WRITES.items():
        for size in SIZES:
            if os.fork() == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
                with suppress(BaseException):
                    try:
                        write(Path(folder) / f"{name}-{size}")
                    except ValueError as error:
                        sys.__stdout__.write(f"{name} {size} {error}\n")
                        sys.__stdout__.flush()
                os._exit(0)  # skips the slow shutdown of torch
            os.wait()


def test_full_disk_is_one_sentence_and_keeps_existing_files(tmp_path: Path) -> None:
    before = {}
    for folder in (tmp_path / f"{name}-{size}" for name in WRITES for size in SIZES):
        folder.mkdir()
        store(folder / "c.h5", values(2))
        if not folder.name.startswith("b.h5"):  # files to be replaced must survive
            store(folder / "a.h5", values(3))
            (folder / "figure.png").write_text("before")
            (folder / "picture.png").write_text("before")
        before[folder] = {entry.name: entry.read_bytes() for entry in folder.iterdir()}
    code = "import sys; from tests.runs.test_files import write_with_limits; write_with_limits(sys.argv[1])"
    read_end, write_end = os.pipe()  # the limits apply to a file of its output too
    process = Forked(code, tmp_path, stdout=write_end)
    os.close(write_end)
    _, err = process.communicate()
    assert process.returncode == 0 and err == "", err
    with open(read_end) as output:
        messages = output.read().splitlines()
    for line, (name, size) in zip(messages, ((name, size) for name in WRITES for size in SIZES), strict=True):
        path = tmp_path / f"{name}-{size}" / name
        assert line.startswith(f"{name} {size} {path} cannot be written: the disk or the user's quota is full")
    assert {folder: {entry.name: entry.read_bytes() for entry in folder.iterdir()} for folder in before} == before


def test_store_layout_is_sparse(tmp_path: Path) -> None:
    """HDF5 lays out the file in memory: even a store far larger than the memory takes only the size of its header."""
    import numpy as np

    from sigmasolver.data.header import Header
    from sigmasolver.data.layout import Layout

    axis = np.arange(1000.0)
    header = Header(Layout(("u",), ("1",), ("open",) * 2, (axis, axis), np.arange(50.0)), "test", {})
    with open(tmp_path / "a.h5", "x+b") as file:
        slots.create(file, header, 10_000)
    assert (tmp_path / "a.h5").stat().st_size > 2e12 and 512 * (tmp_path / "a.h5").stat().st_blocks < 2e6
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 8e6
    assert open_store(tmp_path / "a.h5").count == 10_000


@pytest.mark.parametrize("name", [".", "..", "folder"])
def test_writing_a_file_where_a_folder_is_raises_one_sentence(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    message = rf"^{re.escape(name)} is a folder; pass a file name\.$"
    with pytest.raises(ValueError, match=message), os_errors_as_value_errors(Path(name)), replacing(Path(name)):
        pass
    with pytest.raises(StoreError, match=message):
        write_store(Path(name), HEADER, values(1))
    assert [path.name for path in tmp_path.rglob("*")] == ["here", "folder"]


def test_write_store_raises_store_error(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(StoreError, match="cannot be written"):
        write_store(tmp_path / "folder" / "a.h5", HEADER, values(1))
