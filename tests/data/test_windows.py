"""Windows are slices of the stored data, in the numbers of the paper; splits are disjoint."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from sigmasolver.data.formats import open_data
from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.reader import Reader
from sigmasolver.data.split import Split, split
from sigmasolver.data.store import Writer, open_store
from sigmasolver.data.windows import Row, Windows, WindowSpec
from sigmasolver.simulate.fixtures import FIXTURES
from sigmasolver.simulate.generate import Stream
from sigmasolver.tasks import TASKS
from tests.data.memory import Memory
from tests.data.waves import Waves

FIELDS = ("u", "v", "p")


def header(frames: int, grid: tuple[int, ...], fields=FIELDS, boundary="periodic", dtype="float32") -> Header:
    coordinates = tuple(np.arange(n) / n for n in grid)
    times = 0.5 * np.arange(1.0, frames + 1)
    layout = Layout(fields, ("1",) * len(fields), (boundary,) * len(grid), coordinates, times)
    return Header(layout, "test", {}, dtype=dtype)


def values(count: int, head: Header, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, *head.shape)).astype(head.dtype)


def store(path: Path, data: np.ndarray, head: Header) -> Reader:
    with Writer(path, head, len(data)) as writer:
        writer.append(data)
    return open_store(path)


def plain(data: np.ndarray, spec: WindowSpec, trajectory: int, start: int) -> tuple[np.ndarray, np.ndarray]:
    """A window by its definition: subsample, slice, select fields."""
    space = (slice(None, None, spec.space_stride),) * (data.ndim - 3)
    subsampled = data[(trajectory, slice(None, None, spec.time_stride), *space)].astype(np.float32)
    channels = [[FIELDS.index(name) for name in names] for names in (spec.inputs, spec.targets)]
    if spec.steady:
        return subsampled[start : start + 1][..., channels[0]], subsampled[start : start + 1][..., channels[1]]
    middle = start + spec.history
    return subsampled[start:middle][..., channels[0]], subsampled[middle : middle + spec.horizon][..., channels[1]]


# --- the box


@pytest.mark.parametrize("stride", [1, 2, 4])
def test_windows_sides_are_independent_of_the_grid(stride):
    """n points with spacing h have a period of n h: the first point follows the last."""
    axes = (2 * np.pi * np.arange(8) / 8, 5.0 + 3 * np.arange(12) / 12)
    layout = Layout(("u",), ("1",), ("periodic",) * 2, axes, np.arange(3.0))
    windows = Windows(Memory(Header(layout, "test", {}), np.zeros((1, 3, 8, 12, 1), np.float32)), [0],
                      WindowSpec(("u",), ("u",), 1, 1, space_stride=stride))  # fmt: skip
    assert windows.sides == pytest.approx((2 * np.pi, 3.0), rel=1e-14)


# --- the paper's counts


@pytest.mark.parametrize(
    ("task", "frames", "subsampled", "per_trajectory"),
    [("kf2d", 320, 160, 134), ("ns2d", 20, 20, 1), ("it3d", 20, 20, 1), ("smoke3d", 20, 20, 1), ("darcy", 1, 1, 1)],
)
def test_windows_per_trajectory_match_the_paper(task: str, frames: int, subsampled: int, per_trajectory: int):
    row = TASKS[task]
    fields = tuple(dict.fromkeys((*row.inputs, *row.targets)))
    grid = (row.space_stride * 2,) * len(row.grid)
    strides = {"time_stride": row.time_stride, "space_stride": row.space_stride}
    spec = WindowSpec(row.inputs, row.targets, row.history, row.horizon, row.starts, steady=row.steady, **strides)
    head = header(frames, grid, fields)
    windows = Windows(Memory(head, values(3, head)), (0, 2), spec)
    assert windows.windows_per_trajectory == per_trajectory and len(windows) == 2 * per_trajectory
    assert len(windows.times) == subsampled
    history, future = windows[0]
    assert history.shape == (row.history, *windows.grid, len(row.inputs))
    assert future.shape == (row.horizon, *windows.grid, len(row.targets))


def test_kolmogorov_has_13400_training_windows_and_400_in_the_figure(tmp_path: Path):
    head = header(320, (2, 2), ("vorticity",))
    reader = store(tmp_path / "kf.h5", values(120, head), head)
    names = ("vorticity",)
    spec = WindowSpec(names, names, 10, 16, windows_per_trajectory=134, time_stride=2, space_stride=2)
    parts = split(len(reader), 100, 20, validation=0, digests=reader.digests)
    train = Windows(reader, parts.train, spec)
    rows = train.rows()
    assert len(train) == len(rows) == 13_400 and len(Windows(reader, parts.test, spec)) == 2_680
    # One more would fit: the public loader drops it, so the last two stored frames stay unused.
    assert rows[133] == Row(0, 266, 286, 316) and rows[134] == Row(1, 0, 20, 50) and rows[-1] == Row(99, 266, 286, 316)
    every = WindowSpec(names, names, 10, 16, time_stride=2, space_stride=2)
    assert Windows(reader, (0,), every).rows()[-1] == Row(0, 268, 288, 318)
    sparse = WindowSpec(names, names, 10, 16, windows_per_trajectory=20, stride=7, time_stride=2, space_stride=2)
    assert len(Windows(reader, parts.test, sparse)) == 400


def test_darcy_windows_are_subsampled_from_421_to_85_points(tmp_path: Path):
    head = header(1, (421, 421), ("coefficient", "pressure"), boundary="wall")
    data = values(1, head)
    spec = WindowSpec(("coefficient",), ("pressure",), 1, 1, space_stride=5, steady=True)
    windows = Windows(store(tmp_path / "darcy.h5", data, head), (0,), spec)
    assert windows.grid == (85, 85) and windows.rows() == [Row(0, 0, 0, 0)]
    coefficient, pressure = windows[0]
    np.testing.assert_array_equal(coefficient.numpy(), data[0, :, ::5, ::5, :1])
    np.testing.assert_array_equal(pressure.numpy(), data[0, :, ::5, ::5, 1:])
    np.testing.assert_array_equal(windows.coordinates[1], head.layout.coordinates[1][::5])


# --- windows are slices


@st.composite
def cases(draw: st.DrawFn) -> tuple[WindowSpec, Header, tuple[int, ...]]:
    number = st.integers(1, 3)
    names = st.lists(st.sampled_from(FIELDS), min_size=1, unique=True).map(tuple)
    steady = draw(st.booleans())
    inputs, targets = draw(names), draw(names)
    assume(not (steady and set(inputs) & set(targets)))
    history, horizon = (1, 1) if steady else (draw(number), draw(number))
    space, time, stride = draw(number), draw(number), draw(number)
    grid = tuple(space * n for n in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    frames = time * (history + horizon) + draw(st.integers(0, 6))
    spec = WindowSpec(inputs, targets, history, horizon, None, stride, time, space, steady)
    spec = replace(spec, windows_per_trajectory=draw(st.none() | st.integers(1, spec.count_in(frames))))
    trajectories = draw(st.lists(st.integers(0, 3), min_size=1, unique=True).map(tuple))
    return spec, header(frames, grid, dtype=draw(st.sampled_from(["float32", "float16"]))), trajectories


@settings(deadline=None, max_examples=60)
@given(case=cases())
def test_windows_equal_slices_of_a_store_and_resident_windows(case, tmp_path_factory):
    spec, head, trajectories = case
    data = values(4, head)
    with store(tmp_path_factory.mktemp("w") / "w.h5", data, head) as reader:
        windows = Windows(reader, trajectories, spec)
        resident = windows.resident("cpu")
        memory = Windows(Memory(head, data), trajectories, spec)
        expected = [
            plain(data, spec, trajectory, start * spec.stride)
            for trajectory in trajectories
            for start in range(windows.windows_per_trajectory)
        ]
        assert len(windows) == len(resident) == len(windows.rows()) == len(expected)
        order = [*reversed(range(len(windows))), -1, 0]
        for view in (windows, resident, memory):
            batches = view.batch(order)
            assert all(part.dtype == torch.float32 for part in batches)
            for row, index in enumerate(order):
                for batch, target, single in zip(batches, expected[index], view[index], strict=True):
                    np.testing.assert_array_equal(batch[row].numpy(), target)
                    np.testing.assert_array_equal(single.numpy(), target)
        assert resident.values_on_device.element_size() == np.dtype(head.dtype).itemsize
        assert windows.nbytes() == resident.values_on_device.nbytes
        for full, resident_full, trajectory in zip(windows.each(), resident.each(), trajectories, strict=True):
            assert torch.equal(full, resident_full) and full.shape == (
                len(windows.times),
                *windows.grid,
                len(windows.fields),
            )
            space = (slice(None, None, spec.space_stride),) * len(head.grid)
            subsampled = data[(trajectory, slice(None, None, spec.time_stride), *space)]
            np.testing.assert_array_equal(
                full.numpy(), subsampled[..., [FIELDS.index(name) for name in windows.fields]]
            )


class SeparateFields(Reader):
    """A reader whose fields are separate read-only arrays of any dtype."""

    def __init__(self, head: Header, fields: list[np.ndarray]) -> None:
        self.path, self.header, self.arrays = Path("apart"), head, fields
        for array in fields:
            array.flags.writeable = False
        self.requested: set[int] = set()
        """The channels that were read."""

    digests, fingerprint = (), ""

    def __len__(self) -> int:
        return len(self.arrays[0])

    def __getitem__(self, key):
        raise AssertionError("The fields should be read separately.")

    def fields(self, index, start, stop, channels):
        self.requested.update(channels)
        return [self.arrays[channel][index, start:stop] for channel in channels]


TYPES = ["<f4", ">f4", "<f8", ">f8", "<f2", "<i2", "|u1"]


@settings(deadline=None, max_examples=60)
@given(case=cases(), types=st.lists(st.sampled_from(TYPES), min_size=3, max_size=3), every=st.integers(1, 2))
def test_windows_equal_slices_of_separately_stored_fields(case, types, every):
    """Each field has its own dtype and strides; fields that are not needed are not read."""
    spec, head, trajectories = case
    head = replace(head, dtype="float32")
    shape = (4, *head.shape[:-1], every)
    fields = [(100 * np.random.default_rng(seed).random(shape)).astype(kind)[..., 0] for seed, kind in enumerate(types)]
    data = np.stack([array.astype(np.float32) for array in fields], axis=-1)
    source = SeparateFields(head, fields)
    windows = Windows(source, trajectories, spec)
    order = [*reversed(range(len(windows))), 0]
    batches = windows.batch(order)
    for position, index in enumerate(order):
        row = windows.rows()[index]
        expected = plain(data, spec, row.trajectory, row.history // spec.time_stride)
        for part, target in zip(batches, expected, strict=True):
            assert part.dtype == torch.float32 and part.is_contiguous()
            np.testing.assert_array_equal(part[position].numpy(), target)
    assert source.requested == {FIELDS.index(name) for name in (*spec.inputs, *spec.targets)}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_windows_preserve_every_bit(tmp_path: Path, dtype: str, count: int):
    """Random bits, including NaN payloads, infinities, subnormals and negative zero."""
    names = tuple(f"f{channel}" for channel in range(count))
    head = header(4, (32, 32), names, dtype=dtype)
    bits = np.random.default_rng(count).integers(0, 2 ** (16 if dtype == "float16" else 32), (1, *head.shape))
    data = bits.astype(np.uint16 if dtype == "float16" else np.uint32).view(dtype)
    if dtype == "float16":  # widening quiets a signalling NaN
        data = np.where(np.isnan(data), np.float16(np.nan), data)
    with store(tmp_path / "bits.h5", data, head) as reader:
        for selected in {names, names[1:] or names, names[::2], names[::-1]}:
            channels = [names.index(name) for name in selected]
            history, future = Windows(reader, (0,), WindowSpec(selected, selected, 1, 3))[0]
            expected = torch.from_numpy(data[0][..., channels]).to(torch.float32)
            assert torch.cat([history, future]).numpy().tobytes() == expected.numpy().tobytes()


READ_IN_PLACE = (
    "cylinder", "fsi", "combustion", "ignit-hit", "netcdf", "zarr", "vtk", "the-well", "pdebench", "pdearena",
    "fno-mat", "factformer", "arrays",
)  # fmt: skip


@pytest.mark.parametrize("name", READ_IN_PLACE)
def test_windows_equal_slices_of_every_format(name: str, tmp_path: Path):
    """With fields stored separately or not, in any order, with and without subsampling."""
    with open_data(FIXTURES[name].write(tmp_path / name, 0)) as data:
        fields, last = data.header.layout.fields, len(data) - 1
        for inputs, targets in ((fields, fields[:1]), (fields[::-1], fields[-1:]), (fields[:1], fields[::2])):
            for time, space in ((1, 1), (2, 1), (1, 2)):
                windows = Windows(data, (last,), WindowSpec(inputs, targets, 1, 1, None, 1, time, space))
                subsampled = data[last][
                    (slice(None, None, time), *(slice(None, None, space) for _ in data.header.grid))
                ]
                before, after = (
                    subsampled[..., [fields.index(field) for field in names]] for names in (inputs, targets)
                )
                for start in {0, len(windows) - 1}:
                    history, future = windows[start]
                    np.testing.assert_array_equal(history, before[start : start + 1])
                    np.testing.assert_array_equal(future, after[start + 1 : start + 2])


def test_rows_give_the_stored_frames_of_windows(tmp_path: Path):
    """Every value is its frame number, so that a window shows its stored frames."""
    head = header(23, (2,))
    data = np.broadcast_to(np.arange(23, dtype=np.float32)[:, None, None], (2, *head.shape))
    spec = WindowSpec(("u",), ("p",), 3, 2, stride=2, time_stride=2)
    windows = Windows(store(tmp_path / "frames.h5", data, head), (1, 0), spec)
    assert [row.trajectory for row in windows.rows()] == [1] * 4 + [0] * 4
    for row, (history, future) in zip(windows.rows(), windows, strict=True):
        assert row.history == history[0, 0, 0] and history[-1, 0, 0] + 2 == future[0, 0, 0]
        assert (row.future, row.last) == (future[0, 0, 0], future[-1, 0, 0])
    np.testing.assert_array_equal(windows.times, head.layout.times[::2])


def test_windows_of_a_stream_equal_those_of_its_store(tmp_path: Path):
    waves = Waves(grid=6, frames=7)
    stream = Stream(waves, seed=5, count=4)
    data = torch.stack(list(stream)).numpy()
    spec = WindowSpec(("height", "slope"), ("slope",), 2, 3, space_stride=2)
    stored = Windows(store(tmp_path / "waves.h5", data, stream.header), (3, 1), spec)
    for source in (stream, Stream(waves, seed=5)):
        streamed = Windows(source, (3, 1), spec)
        for view in (streamed, streamed.resident("cpu")):
            for actual, expected in zip(view.batch(range(len(stored))), stored.batch(range(len(stored))), strict=True):
                assert torch.equal(actual, expected)


def test_windows_work_in_data_loader_workers_and_after_pickle(tmp_path: Path):
    head = header(6, (4, 3))
    windows = Windows(store(tmp_path / "a.h5", values(3, head), head), (0, 1, 2), WindowSpec(("u",), ("u", "p"), 2, 2))
    windows[0]
    copy = pickle.loads(pickle.dumps(windows))
    loader = DataLoader(windows, batch_size=4, num_workers=2)
    for start, batch in zip(range(0, 9, 4), loader, strict=True):
        indices = range(start, min(start + 4, 9))
        for loaded, expected, unpickled in zip(batch, windows.batch(indices), copy.batch(indices), strict=True):
            assert torch.equal(loaded, expected) and torch.equal(unpickled, expected)


def test_resident_float16_rounds_and_halves_the_memory():
    head = header(5, (4,))
    data = values(2, head)
    windows = Windows(Memory(head, data), (0, 1), WindowSpec(FIELDS, FIELDS, 2, 2))
    half = windows.resident("cpu", "float16")
    assert windows.nbytes("float16") * 2 == windows.nbytes() and half.values_on_device.nbytes == windows.nbytes(
        "float16"
    )
    assert windows.fits(windows.nbytes()) and not windows.fits(windows.nbytes() - 1)
    rounded = Windows(Memory(head, data.astype(np.float16).astype(np.float32)), (0, 1), windows.spec)
    for actual, expected in zip(half.batch([3, 0]), rounded.batch([3, 0]), strict=True):
        assert torch.equal(actual, expected)
    data[1, 0, 0, 0] = 1e5
    with pytest.raises(ValueError, match=r"^Trajectory 1 contains values too large for float16; .*float32\.$"):
        windows.resident("cpu", "float16")


@pytest.mark.gpu
def test_resident_on_a_gpu_does_not_sync_the_host():
    head = header(9, (8, 8))
    windows = Windows(Memory(head, values(5, head)), range(5), WindowSpec(("v", "u"), ("p",), 3, 2))
    resident = windows.resident("cuda")
    indices = torch.tensor([7, -1, 0, -len(windows), 12], device="cuda")
    resident.batch(indices)
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = [resident.batch(indices), resident.batch([4, -1, 0])]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for batch, positions in zip(batches, (indices.tolist(), [4, -1, 0]), strict=True):
        for part, expected in zip(batch, windows.batch(positions), strict=True):
            assert torch.equal(part.cpu(), expected)


# --- splits


def test_split_positions():
    assert split(1200, 1000, 200, validation=0) == Split(tuple(range(1000)), (), tuple(range(1000, 1200)))
    parts = split(30, 12, 5)
    assert parts == Split(tuple(range(11)), (11,), tuple(range(25, 30)))
    assert split(30, 12, 5, validation=3).validation == (9, 10, 11)
    assert split(30, 12, 5, validation=0.25).validation == (9, 10, 11)
    assert split(30, 12, 5, validation=0.001).validation == (11,)


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 40), st.integers(1, 40), st.integers(0, 9), st.floats(0, 0.5) | st.integers(1, 40))
def test_split_parts_are_disjoint(train, test, unused, validation):
    assume(validation < train)
    parts = split(train + test + unused, train, test, validation)
    assert (*parts.train, *parts.validation) == tuple(range(train))
    assert parts.test == tuple(range(train + unused, train + unused + test))
    assert parts.train and bool(parts.validation) == (validation > 0)


def test_split_detects_duplicates_across_parts(tmp_path: Path):
    head = header(3, (4,))
    data = values(6, head)
    data[1] = data[0]
    digests = store(tmp_path / "twins.h5", data, head).digests
    split(6, 4, 2, digests=digests)  # duplicates within one part leak nothing
    data[5] = data[2]
    digests = store(tmp_path / "leak.h5", data, head).digests
    split(5, 4, 1, digests=digests)
    message = r"^Trajectory 5 of the test split is identical to 2 of the train split; remove one of them\.$"
    with pytest.raises(ValueError, match=message):
        split(6, 4, 2, digests=digests)
    with pytest.raises(ValueError, match=message):
        Split((2, 0), (), (5,)).check(digests)


APPEARS_TWICE = "Trajectory {} appears twice, in the train and the {} split; list each trajectory once."


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (((), (1,), (2,)), "The training split is empty; give it at least one trajectory."),
        (((0, 1), (2,), (3, 1)), APPEARS_TWICE.format(1, "test")),
        (((0, 0), (), (3,)), APPEARS_TWICE.format(0, "train")),
        (((0,), (), (-1,)), "Trajectory -1 of the test split is negative; indices start at 0."),
    ],
)
def test_split_class_errors(parts, message):
    with pytest.raises(ValueError) as error:
        Split(*parts)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 0, 2), "Got 0 training and 2 test trajectories; they must be at least 1 and 0."),
        ((10, 3, -1), "Got 3 training and -1 test trajectories; they must be at least 1 and 0."),
        ((10, 8, 3), "8 training and 3 test trajectories are 11, but there are only 10."),
        ((10, 8, 2, 2.5), "validation is 2.5; it must be a fraction below 1 or a number of trajectories."),
        ((10, 8, 2, -1), "validation is -1; it must be a fraction below 1 or a number of trajectories."),
        ((10, 8, 2, 8), "Validating on 8 of 8 training trajectories leaves none for training; use fewer."),
        ((10, 1, 2), "Validating on 1 of 1 training trajectories leaves none for training; use fewer."),
    ],
)
def test_split_errors(arguments, message):
    with pytest.raises(ValueError) as error:
        split(*arguments)
    assert str(error.value) == message


def test_split_check_detects_a_missing_trajectory():
    with pytest.raises(
        ValueError, match=r"^The test split includes trajectory 7, but there are only 4 \(indices start at 0\)\.$"
    ):
        Split((0,), (1,), (7,)).check([bytes([n]) for n in range(4)])


# --- errors

STEADY = (None, 1, 1, 1, True)
OVERLAP = "v is both an input and a target, which a steady task does not allow."


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (((), ("u",), 1, 1), "The inputs are (); give at least one field, and each only once."),
        ((("u",), ("p", "p"), 1, 1), "The targets are (p, p); give at least one field, and each only once."),
        ((("u",), ("u",), 0, 1), "history is 0; it must be at least 1."),
        ((("u",), ("u",), 1, 1, 0), "starts is 0; it must be at least 1."),
        ((("u",), ("u",), 1, 1, None, 1, -2), "time_stride is -2; it must be at least 1."),
        ((("u",), ("p",), 2, 1, *STEADY), "A steady task has one input and one output frame, not 2 and 1."),
        ((("u", "v"), ("v",), 1, 1, *STEADY), OVERLAP),
    ],
)
def test_window_spec_errors(spec, message):
    with pytest.raises(ValueError) as error:
        WindowSpec(*spec)
    assert str(error.value) == message


SPEC = WindowSpec(("u",), ("u",), 1, 1)
TOO_LONG = "A window needs {} frames, but 10 stored frames with time_stride {} leave {}; shorten history or horizon."
TOO_MANY = "starts is 6 windows per trajectory, but only 5 fit into 10 frames."
NOT_PERIODIC = (
    "space_stride 4 does not divide the 6 points of the periodic axis x, so the subsampled grid would not be periodic; "
    "choose a divisor."
)
LISTED_TWICE = "A trajectory to take windows from is listed twice; list each only once."


@pytest.mark.parametrize(
    ("trajectories", "spec", "message"),
    [
        ((0,), replace(SPEC, history=6, horizon=5), TOO_LONG.format(11, 1, 10)),
        ((0,), replace(SPEC, history=2, horizon=2, time_stride=4), TOO_LONG.format(4, 4, 3)),
        ((0,), replace(SPEC, windows_per_trajectory=6, stride=2), TOO_MANY),
        ((0,), replace(SPEC, targets=("pp",)), 'Unknown field "pp"; did you mean p?'),
        ((0,), replace(SPEC, space_stride=4), NOT_PERIODIC),
        ((0,), replace(SPEC, space_stride=7), "space_stride 7 exceeds the 6 points of axis x."),
        ((), SPEC, "No trajectories to take windows from; give at least one."),
        ((0, 3), SPEC, "Trajectory 3 is out of range: there are 3 (indices start at 0)."),
        ((-1,), SPEC, "Trajectory -1 is out of range: there are 3 (indices start at 0)."),
        ((1, 1), SPEC, LISTED_TWICE),
    ],
)
def test_windows_errors(trajectories, spec, message):
    head = header(10, (6, 8))
    with pytest.raises(ValueError) as error:
        Windows(Memory(head, values(3, head)), trajectories, spec)
    assert str(error.value) == message


def test_windows_of_an_endless_stream_refuse_only_negative_trajectories():
    stream = Stream(Waves(grid=4), seed=0)
    spec = WindowSpec(("height",), ("height",), 1, 1)
    assert torch.equal(Windows(stream, (10**6,), spec)[0][0][0], stream[10**6][0, ..., :1])
    with pytest.raises(ValueError, match=r"^Trajectory -1 is out of range: indices start at 0\.$"):
        Windows(stream, (-1,), spec)


def test_windows_batch_and_resident_errors():
    head = header(4, (3,))
    windows = Windows(Memory(head, values(2, head)), (0, 1), WindowSpec(("u",), ("u",), 2, 1))
    for view in (windows, windows.resident("cpu")):
        for index in (4, -5):
            with pytest.raises(
                IndexError, match=rf"^Window {index} is out of range: there are 4 \(indices start at 0\)\.$"
            ):
                view.batch([0, index])
        with pytest.raises(ValueError, match=r"^A batch must contain at least one window\.$"):
            view.batch([])
    with pytest.raises(ValueError, match=r"^Trajectories are held in memory as float32 or float16, not 'float8'\.$"):
        windows.resident("cpu", "float8")
    other = Windows(Memory(head, values(2, header(5, (3,)))), (1,), windows.spec)
    with pytest.raises(ValueError, match=r"^Trajectory 1 has shape \(5, 3, 3\), but its header has \(4, 3, 3\)\.$"):
        other.batch([0])


def test_lead_times_of_uneven_frames_are_those_of_the_windows():
    def windows_at(times, **change):
        head = Header(replace(Waves(frames=len(times)).layout, times=np.array(times, float)), "test", {})
        spec = WindowSpec(("height",), ("slope",), **{"history": 2, "horizon": 2, **change})
        return Windows(Memory(head, np.zeros((2, *head.shape), np.float32)), (0, 1), spec)

    irregular = windows_at([0, 1, 10, 20, 30])  # leads 9, 19 and 10, 20
    assert irregular.lead_times([0, 2]).tolist() == [9, 19] and irregular.lead_times([1]).tolist() == [10, 20]
    assert irregular.lead_times(range(4)) is None
    assert windows_at([0, 1, 10, 20, 30], time_stride=2, history=1, horizon=1).lead_times([0, 1]) is None
    periodic = windows_at([0, 1, 4, 5, 8, 9, 12, 13], stride=2)
    assert periodic.lead_times(range(len(periodic))).tolist() == [3, 4]
    even = windows_at(0.1 * np.arange(7))
    assert even.lead_times(range(len(even))).tolist() == [0.1 * 1, 0.1 * 2]
    steady = windows_at([0, 1, 10], history=1, horizon=1, steady=True)
    assert steady.lead_times(range(len(steady))).tolist() == [1]


@pytest.mark.parametrize("steady", [False, True])
def test_frame_times_of_last_input_and_future_frames(steady):
    times = np.array([0.0, 1.0, 1.5, 4.0, 4.5, 7.0, 8.0, 9.5, 11.0, 12.0, 12.5])
    head = Header(replace(Waves(frames=11).layout, times=times), "test", {})
    frames = (1, 1) if steady else (2, 2)
    spec = WindowSpec(("height",), ("slope",), *frames, stride=1, time_stride=2, steady=steady)
    windows = Windows(Memory(head, np.zeros((3, *head.shape), np.float32)), (0, 2), spec)
    for index, (row, frame_times) in enumerate(
        zip(windows.rows(), windows.frame_times(range(len(windows))), strict=True)
    ):
        last_input = row.history + 2 * (spec.history - 1)
        future = () if steady else range(row.future, row.last + 1, 2)
        assert frame_times.tolist() == [times[frame] for frame in (last_input, *future)]
        assert torch.equal(frame_times, windows.resident("cpu").frame_times(torch.tensor([index - len(windows)]))[0])
