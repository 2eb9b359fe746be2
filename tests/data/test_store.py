"""The store: exact round trips, fingerprints, resuming, and errors."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.store import Key, StoreError, Writer, open_store

LAYOUT = Layout(
    ("u", "p"),
    ("m/s", "1"),
    ("periodic", "wall"),
    (np.arange(4) / 4, np.array([0.0, 0.5, 2.0])),
    np.arange(1.0, 6.0),
)
HEADER = Header(LAYOUT, "test", {"viscosity": 1e-5, "drift": [1, 2.5], "box": None}, seed=7)


def values(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, *HEADER.shape)).astype(np.float32)


def store(path: Path, data: np.ndarray, header: Header = HEADER, count: int | None = None) -> Path:
    with Writer(path, header, count or len(data)) as writer:
        writer.append(data)
    return path


def test_store_round_trip_is_exact(tmp_path: Path) -> None:
    data = values(6)
    data[1, 2, 3, 1, 0], data[2, 0, 0, 0, 1] = np.nan, -np.inf
    with open_store(store(tmp_path / "a.h5", data)) as reader:
        assert reader.finished and len(reader) == 6 and reader.shape == data.shape
        np.testing.assert_array_equal(reader[:], data)
        np.testing.assert_array_equal(np.stack(list(reader)), data)
        assert all(reader.verify(index) for index in range(6))
        assert reader.header.difference(HEADER) is None
        assert reader.header.facts() == HEADER.facts()
        assert reader.header.parameters == HEADER.parameters and reader.header.seed == 7
        np.testing.assert_array_equal(reader.header.layout.coordinates[1], LAYOUT.coordinates[1])


KEYS: list[Key] = [
    3,
    -1,
    slice(2, 5),
    slice(None, None, 2),
    slice(5, 1, -2),
    slice(4, 4),
    (2, 3),
    (slice(1, 4), slice(None, None, 3), -1),
    (0, slice(1, None, 2), slice(None, None, 2), slice(0, 2), 1),
    (slice(None), slice(None), slice(3, None, -3)),
]


@pytest.mark.parametrize("key", KEYS)
def test_store_reader_slices_like_an_array(tmp_path: Path, key: Key) -> None:
    data = values(6)
    with open_store(store(tmp_path / "a.h5", data)) as reader:
        np.testing.assert_array_equal(reader[key], data[key])


def test_store_chunks_long_trajectories_by_frame(tmp_path: Path) -> None:
    points = np.arange(512.0)
    header = Header(Layout(("u",), ("1",), ("open",) * 2, (points, points), np.arange(5.0)), "test", {})
    data = np.random.default_rng(1).random((2, *header.shape), dtype=np.float32)
    with open_store(store(tmp_path / "a.h5", data, header)) as reader:
        np.testing.assert_array_equal(reader[1, 1:3, ::7], data[1, 1:3, ::7])
        np.testing.assert_array_equal(reader[:], data)
    with h5py.File(tmp_path / "a.h5") as file:
        assert file["fields"].chunks == (1, 1, 512, 512, 1)


def test_store_float16_rounds_like_numpy_and_refuses_overflow(tmp_path: Path) -> None:
    data, half = values(2), replace(HEADER, dtype="float16")
    with open_store(store(tmp_path / "a.h5", data, half)) as reader:
        assert reader[:].dtype == np.float16
        np.testing.assert_array_equal(reader[:], data.astype(np.float16))
    with Writer(tmp_path / "b.h5", half, 1) as writer, pytest.raises(StoreError, match="overflow float16"):
        writer.append(data[:1] + 1e6)


def test_fingerprint_is_the_documented_hash(tmp_path: Path) -> None:
    data = values(3)
    path = store(tmp_path / "a.h5", data)
    facts = {
        "boundary": ["periodic", "wall"],
        "dtype": "float32",
        "fields": ["u", "p"],
        "parameters": {"viscosity": 1e-5, "drift": [1, 2.5], "box": None},
        "seed": 7,
        "shape": [5, 4, 3, 2],
        "source": "test",
        "units": ["m/s", "1"],
        "version": 1,
    }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()
    axes = b"".join(axis.astype("<f8").tobytes() for axis in (*LAYOUT.coordinates, LAYOUT.times))
    digests = b"".join(hashlib.sha256(trajectory.tobytes()).digest() for trajectory in data)
    expected = hashlib.sha256(text + axes + digests).hexdigest()
    assert open_store(path).fingerprint == expected
    with h5py.File(path) as file:
        assert file["fingerprint"][()].decode() == expected


def test_fingerprint_is_independent_of_batches_and_count(tmp_path: Path) -> None:
    data = values(5)
    expected = open_store(store(tmp_path / "a.h5", data)).fingerprint
    with Writer(tmp_path / "b.h5", HEADER, 5) as writer:
        for batch in (data[:2], data[2:3], data[3:]):
            writer.append(batch)
        assert writer.fingerprint == expected
    assert (tmp_path / "a.h5").read_bytes() == (tmp_path / "b.h5").read_bytes()
    unfinished = open_store(store(tmp_path / "c.h5", data, count=9))
    assert not unfinished.finished and unfinished.fingerprint == expected


def other_headers() -> list[Header]:
    shifted = replace(LAYOUT, coordinates=(LAYOUT.coordinates[0], LAYOUT.coordinates[1] + 1e-12))
    return [
        replace(HEADER, parameters={**HEADER.parameters, "viscosity": 1.0000000000000002e-5}),
        replace(HEADER, parameters={**HEADER.parameters, "new": 1}),
        replace(HEADER, seed=8),
        replace(HEADER, seed=None),
        replace(HEADER, source="other"),
        replace(HEADER, layout=replace(LAYOUT, fields=("u", "q"))),
        replace(HEADER, layout=replace(LAYOUT, units=("m/s", "Pa"))),
        replace(HEADER, layout=replace(LAYOUT, boundary=("periodic", "open"))),
        replace(HEADER, layout=shifted),
        replace(HEADER, layout=replace(LAYOUT, times=LAYOUT.times * (1 + 1e-15))),
    ]


def test_fingerprint_changes_with_any_value_or_header_entry(tmp_path: Path) -> None:
    data = values(2)
    nudged = data.copy()
    nudged[1, 4, 3, 2, 1] = np.nextafter(nudged[1, 4, 3, 2, 1], np.float32(9))
    fingerprints = {open_store(store(tmp_path / "0.h5", data)).fingerprint}
    fingerprints.add(open_store(store(tmp_path / "1.h5", nudged)).fingerprint)
    fingerprints.add(open_store(store(tmp_path / "2.h5", data[::-1])).fingerprint)
    fingerprints.add(open_store(store(tmp_path / "3.h5", data[:1])).fingerprint)
    for number, header in enumerate(other_headers(), 4):
        fingerprints.add(open_store(store(tmp_path / f"{number}.h5", data, header)).fingerprint)
    assert len(fingerprints) == 4 + len(other_headers())


def test_unfinished_store_is_read_and_resumed(tmp_path: Path) -> None:
    data = values(5)
    path = store(tmp_path / "a.h5", data[:2], count=5)
    with open_store(path) as reader:
        assert len(reader) == 2 and reader.count == 5
        np.testing.assert_array_equal(reader[:], data[:2])
        with pytest.raises(IndexError):
            reader[2]
    with Writer(path, HEADER, 5) as writer:
        assert writer.whole == 2
        writer.append(data[2:])
    assert path.read_bytes() == store(tmp_path / "b.h5", data).read_bytes()


@pytest.mark.parametrize("room", [3, 5, 9])
def test_writer_resizes_a_store(tmp_path: Path, room: int) -> None:
    data = values(5)
    path = store(tmp_path / "a.h5", data[:3], count=room)
    with Writer(path, HEADER, 5) as writer:
        assert writer.whole == 3
        writer.append(data[3:])
    assert path.read_bytes() == store(tmp_path / "b.h5", data).read_bytes()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.h5", "b.h5"]


def test_writer_refuses_to_resume_with_a_smaller_count_or_other_header(tmp_path: Path) -> None:
    path = store(tmp_path / "a.h5", values(3))
    before = path.read_bytes()
    with pytest.raises(StoreError, match="has 3 trajectories, more than 2; choose another"):
        Writer(path, HEADER, 2)
    changed = replace(HEADER, parameters={**HEADER.parameters, "viscosity": 1e-4})
    with pytest.raises(StoreError, match=r"parameter viscosity is 1e-05, expected 0\.0001"):
        Writer(path, changed, 3)
    for header in other_headers():
        with pytest.raises(StoreError, match="cannot be resumed: its"):
            Writer(path, header, 3)
    assert path.read_bytes() == before


def test_writer_append_errors(tmp_path: Path) -> None:
    with Writer(tmp_path / "a.h5", HEADER, 2) as writer:
        with pytest.raises(StoreError, match="Got a trajectory of shape"):
            writer.append(values(1)[:, :4])
        with pytest.raises(StoreError, match="room for 2"):
            writer.append(values(3))
        writer.append(values(2))
    with pytest.raises(StoreError, match="closed"):
        writer.append(values(1))
    with pytest.raises(StoreError, match="at least 1"):
        Writer(tmp_path / "b.h5", HEADER, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, "float32 or float16"),
        ({"seed": -1}, "seed is -1"),
        ({"layout": replace(LAYOUT, units=("1",))}, "one unit per field"),
        ({"layout": replace(LAYOUT, boundary=("wall",))}, "one boundary per axis"),
        ({"layout": replace(LAYOUT, boundary=("wall", "soft"))}, "Unknown boundary 'soft'"),
        ({"layout": replace(LAYOUT, times=np.array([0.0, 0.0]))}, "values of t must be"),
        (
            {"layout": replace(LAYOUT, coordinates=(np.array([0, np.nan]), np.arange(3)))},
            "values of x must be",
        ),
    ],
)
def test_header_validation_errors(change: dict, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        replace(HEADER, **change)


def test_verify_detects_changed_values(tmp_path: Path) -> None:
    path = store(tmp_path / "a.h5", values(3))
    with h5py.File(path, "r+") as file:
        file["fields"][1, 0, 0, 0, 0] += 1e-3
    with open_store(path) as reader:
        assert [reader.verify(index) for index in range(3)] == [True, False, True]
    with pytest.raises(StoreError, match="corrupt in trajectory 1"):
        Writer(path, HEADER, 4)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.h5"]


def test_open_store_detects_a_changed_header(tmp_path: Path) -> None:
    path = store(tmp_path / "a.h5", values(3))
    with h5py.File(path, "r+") as file:
        file.attrs["seed"] = 8
    with pytest.raises(StoreError, match="modified after it was written"):
        open_store(path)


def test_repacked_store_is_readable_but_not_resumable(tmp_path: Path) -> None:
    data = values(3)
    path, packed = store(tmp_path / "a.h5", data, count=5), tmp_path / "b.h5"
    with h5py.File(path) as old, h5py.File(packed, "w") as new:
        new.attrs.update(old.attrs)
        for name in ("coordinates", "times", "whole", "digests", "fingerprint"):
            old.copy(name, new)
        new.create_dataset("fields", data=old["fields"][:], compression="gzip")
    np.testing.assert_array_equal(open_store(packed)[:], data)
    with pytest.raises(StoreError, match="repacked"):
        Writer(packed, HEADER, 5)
