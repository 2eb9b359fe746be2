"""Damaged or foreign files in place of a store raise an error of one sentence."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmasolver.data.formats import read_history
from sigmasolver.data.store import StoreError, StoreReader, Writer, open_store
from sigmasolver.data.windows import Windows, WindowSpec
from tests.data.test_store import HEADER, store, values


def set_version(path: Path, version: int) -> None:
    with h5py.File(path, "r+") as file:
        file.attrs["version"] = version


def test_open_store_errors_for_other_versions_and_formats(tmp_path: Path) -> None:
    path = store(tmp_path / "a.h5", values(2))
    set_version(path, 2)
    with pytest.raises(StoreError, match="format version 2, but this version supports up to 1; update sigmasolver"):
        open_store(path)
    set_version(path, 0)
    with pytest.raises(StoreError, match="old format version 0"):
        open_store(path)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["fields"] = np.zeros(3)
    with pytest.raises(StoreError, match="not a sigmasolver store; convert it with import-data"):
        open_store(tmp_path / "b.h5")
    (tmp_path / "c.h5").write_text("time,u\n0,1\n")
    with pytest.raises(StoreError, match="not an HDF5 file"):
        open_store(tmp_path / "c.h5")
    with pytest.raises(StoreError, match="not found"):
        open_store(tmp_path / "d.h5")
    with pytest.raises(StoreError, match="not a file"):
        open_store(tmp_path)
    for name in "bc":
        with pytest.raises(StoreError):
            Writer(tmp_path / f"{name}.h5", HEADER, 2)
    assert (tmp_path / "c.h5").read_text().startswith("time")


def one_sentence(error: Exception) -> bool:
    text = str(error)
    return "\n" not in text and text.rstrip().endswith((".", ")")) and "Traceback" not in text


@settings(max_examples=60, deadline=None)
@given(cut=st.floats(0, 1, exclude_max=True))
def test_open_store_refuses_truncated_files(tmp_path_factory: pytest.TempPathFactory, cut: float) -> None:
    folder = tmp_path_factory.mktemp("cut")
    path = store(folder / "a.h5", values(3))
    content = path.read_bytes()
    path.write_bytes(content[: int(cut * len(content))])
    with pytest.raises(StoreError) as caught:
        open_store(path)
    assert one_sentence(caught.value)


@settings(max_examples=60, deadline=None)
@given(noise=st.binary(max_size=400), signed=st.booleans())
def test_open_store_refuses_random_bytes(tmp_path_factory: pytest.TempPathFactory, noise: bytes, signed: bool) -> None:
    path = tmp_path_factory.mktemp("noise") / "a.h5"
    path.write_bytes(b"\x89HDF\r\n\x1a\n" * signed + noise)
    with pytest.raises(StoreError) as caught:
        open_store(path)
    assert one_sentence(caught.value)


@settings(max_examples=150, deadline=None)
@given(where=st.floats(0, 1, exclude_max=True), flip=st.integers(1, 255))
def test_flipped_byte_is_detected_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, where: float, flip: int
) -> None:
    """With any single byte changed, the file is refused, a digest mismatches, or the values read are unchanged."""
    data = values(2)
    path = store(tmp_path_factory.mktemp("flip") / "a.h5", data)
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= flip
    path.write_bytes(content)
    try:
        with open_store(path) as reader:
            if len(reader) == 2 and all(reader.verify(index) for index in range(2)):
                np.testing.assert_array_equal(reader[:], data)
                assert reader.header.difference(HEADER) is None
            elif len(reader) < 2:  # the mark of a complete trajectory was cleared: it would be generated again
                np.testing.assert_array_equal(reader[:], data[: len(reader)])
    except StoreError as error:
        assert one_sentence(error)


def flip_value(path: Path, trajectory: int) -> None:
    """Flip the last bit of a value, which statistics would not reveal."""
    with h5py.File(path, "r+") as file:
        row = file["fields"][trajectory]
        row.reshape(-1).view(np.uint32)[7] ^= 1
        file["fields"][trajectory] = row


SPEC = WindowSpec(HEADER.layout.fields, HEADER.layout.fields, 1, 1)


def test_damaged_values_are_refused_by_every_reader(tmp_path: Path) -> None:
    path = store(tmp_path / "a.h5", values(3))
    flip_value(path, 1)
    axes = len(HEADER.grid)
    with open_store(path) as reader:
        intact, damaged = Windows(reader, [0, 2], SPEC), Windows(reader, [0, 1], SPEC)
        assert len(intact.batch(range(len(intact)))[0]) == len(intact) and intact.resident("cpu") is not None
        for read in (
            lambda: damaged[damaged.windows_per_trajectory],
            lambda: damaged.resident("cpu"),
            lambda: list(damaged.each()),
        ):
            with pytest.raises(StoreError, match=r"a\.h5 is corrupt in trajectory 1: ") as caught:
                read()
            assert one_sentence(caught.value)
        np.testing.assert_array_equal(damaged[0][0], intact[0][0])  # other trajectories remain readable
    with pytest.raises(StoreError, match="corrupt in trajectory 1"):
        read_history(path, HEADER.layout.fields, axes)


def test_store_reader_verifies_a_trajectory_once(tmp_path: Path) -> None:
    class Counting(StoreReader):
        def verify(self, index: int) -> bool:
            compared.append(index)
            return super().verify(index)

    compared: list[int] = []
    with Counting(store(tmp_path / "a.h5", values(3))) as reader:
        windows = Windows(reader, range(3), SPEC)
        for _ in range(2):
            windows.batch([*range(windows.windows_per_trajectory), 2 * windows.windows_per_trajectory])
        assert compared == [0, 2]
        list(windows.each())  # full reads verify on the way
        windows.batch(range(len(windows)))
        assert compared == [0, 2]
