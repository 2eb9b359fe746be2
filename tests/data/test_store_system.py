"""The store with several processes, full disks and read-only folders."""

from __future__ import annotations

import multiprocessing
import os
import pickle
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from sigmasolver.data.store import StoreError, StoreReader, Writer, open_store
from tests.data.test_store import HEADER, store, values
from tests.forked import check_output


def read_mean(reader: StoreReader) -> float:
    return float(reader[1].mean())


def send_mean(reader: StoreReader, pipe: Connection) -> None:
    pipe.send(read_mean(reader))


def test_store_reader_pickles_to_other_processes(tmp_path: Path) -> None:
    data = values(2)
    with open_store(store(tmp_path / "a.h5", data)) as reader:
        reader[0]
        with multiprocessing.get_context("forkserver").Pool(1) as pool:  # not a copy of this process
            assert pool.apply(read_mean, (reader,)) == float(data[1].mean())
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(reader))[0], data[0])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_open_store_reader_survives_fork(tmp_path: Path) -> None:
    data, fork = values(2), multiprocessing.get_context("fork")
    with open_store(store(tmp_path / "a.h5", data)) as reader:
        reader[0]
        receiver, sender = fork.Pipe()
        children = [fork.Process(target=send_mean, args=(reader, sender)) for _ in range(3)]
        for child in children:
            child.start()
        assert [receiver.recv() for _ in children] == [float(data[1].mean())] * 3
        for child in children:
            child.join()
        np.testing.assert_array_equal(reader[1], data[1])


def test_store_is_readable_while_written(tmp_path: Path) -> None:
    data = values(4)
    with Writer(tmp_path / "a.h5", HEADER, 4) as writer:
        writer.append(data[:1])
        with open_store(tmp_path / "a.h5") as reader:
            writer.append(data[1:])
            np.testing.assert_array_equal(reader[:], data[:1])
        np.testing.assert_array_equal(open_store(tmp_path / "a.h5")[:], data)


def test_writer_locks_the_store(tmp_path: Path) -> None:
    with Writer(tmp_path / "a.h5", HEADER, 4), pytest.raises(StoreError, match="Another process is writing"):
        Writer(tmp_path / "a.h5", HEADER, 4)
    Writer(tmp_path / "a.h5", HEADER, 4).close()
    assert not (tmp_path / "a.h5.lock").exists()


FULL = """
import os, resource, sys
import numpy as np
from tests.data.test_store import HEADER, values
from sigmasolver.data.store import StoreError, Writer
with Writer(sys.argv[1], HEADER, 6) as writer:
    data = values(6)
    writer.append(data[:2])
    size = os.path.getsize(sys.argv[1]) - 2 * HEADER.nbytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    try:
        for trajectory in data[2:]:
            writer.append(trajectory[None])
    except StoreError as error:
        print(writer.whole, error)
"""


def test_writer_full_disk_keeps_complete_trajectories(tmp_path: Path) -> None:
    """A file size limit acts like a full disk; without the limit the store is resumed."""
    path, data = tmp_path / "a.h5", values(6)
    output = check_output(FULL, path)
    complete = int(output.split()[0])
    assert 2 <= complete < 6 and "is full" in output and f"its {complete} complete trajectories are kept" in output
    with open_store(path) as reader:
        np.testing.assert_array_equal(reader[:], data[:complete])
    with Writer(path, HEADER, 6) as writer:
        writer.append(data[complete:])
    np.testing.assert_array_equal(open_store(path)[:], data)


def test_writer_refuses_a_store_larger_than_the_disk(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"needs [1-9][\d,.]* MB, but .* MB free; use fewer"):
        Writer(tmp_path / "a.h5", HEADER, 2**50)
    assert not list(tmp_path.iterdir())


def test_writer_read_only_folder(tmp_path: Path) -> None:
    folder = tmp_path / "closed"
    folder.mkdir()
    for path in (folder, *list(tmp_path.parents)[:3]):
        os.chmod(path, 0o555 if path == folder else path.stat().st_mode | 0o055)
    root = os.geteuid() == 0
    try:
        if root:  # root can write anywhere
            os.seteuid(65534)
        with pytest.raises(StoreError, match="permission denied; choose another folder"):
            Writer(folder / "a.h5", HEADER, 2)
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o755)


def test_writer_creates_folders(tmp_path: Path) -> None:
    data = values(1)
    np.testing.assert_array_equal(open_store(store(tmp_path / "new" / "er" / "a.h5", data))[:], data)
