"""Forecast files: the output equals the rollout of the run for every input format."""

import resource
import shutil
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from sigmasolver.data import slots
from sigmasolver.data.formats import ReadOptions, netcdf_zarr, open_data
from sigmasolver.data.formats.netcdf_zarr_write import write_netcdf, write_zarr
from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.store import Writer, open_store, write_store
from sigmasolver.evaluate import evaluate_run
from sigmasolver.forecast.checkpoint import load
from sigmasolver.forecast.files import forecast_file
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.runs import Run
from sigmasolver.simulate.generate import generate
from sigmasolver.tasks import Task
from sigmasolver.train.job import train_run
from tests.data.waves import Waves

WAVES = Waves(frames=7)  # height and slope, periodic, a quarter of a second apart
CPU = torch.device("cpu")
MODEL = ModelRecipe(width=16, depth=1, heads=2, slices=4, modes=3)
PLAN = TrainRecipe(updates=5, batch=4, checks=0, validation=0.0)
FULL = Task("full", ("slope", "height"), ("slope",), (12, 12), 2, 2, 3, 3, 1, "channel")
BOTH = ("height", "slope")
THIN = Task("thin", BOTH, BOTH, (6, 6), 2, 1, 2, 3, 1, "channel", time_stride=2, space_stride=2)


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A store and two runs briefly trained on it: with all frames and points, and with strides of two."""
    folder = tmp_path_factory.mktemp("workdir")
    generate(WAVES, 4, 0, folder / "moving.h5")
    with open_store(folder / "moving.h5") as store, Writer(folder / "waves.h5", store.header, 4) as writer:
        values = store[:]
        values[..., 0] = values[:, :1, ..., 0]  # a given field must not change in time
        writer.append(values)
    for task in (FULL, THIN):
        train_run(Recipe(task, MODEL, PLAN), folder / "waves.h5", Run(folder / task.name))
    return folder


@pytest.fixture(scope="module")
def raw(workdir):
    with open_store(workdir / "waves.h5") as store:
        return store[:]


def rollout_each(run, history, steps):
    """Roll out each history separately with the Python API."""
    forecaster = load(run)
    return np.concatenate(
        [forecaster.rollout(torch.from_numpy(sample[None]), steps).frames.numpy() for sample in history]
    )


def slope_first(values):
    """Reverse height and slope to the order of the run's inputs."""
    return np.ascontiguousarray(values[..., ::-1])


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_forecast_from_npy_equals_the_rollout(workdir, raw, tmp_path, steps):
    history = slope_first(raw[1, :2])
    np.save(tmp_path / "start.npy", history)
    messages = forecast_file(workdir / "full", tmp_path / "start.npy", steps, tmp_path / "deep" / "out.npy", CPU)
    out = np.load(tmp_path / "deep" / "out.npy")
    assert out.dtype == np.float32 and out.shape == (1, steps, 12, 12, 1)
    np.testing.assert_array_equal(out, rollout_each(workdir / "full", history[None], steps))
    assert len(messages) == 1 and "fields slope" in messages[0]


def test_forecast_from_npz_of_several_trajectories(workdir, raw, tmp_path):
    np.savez(tmp_path / "start.npz", slope=raw[:, :2, ..., 1], height=raw[:, :2, ..., 0])
    ticks = []
    forecast_file(
        workdir / "full", tmp_path / "start.npz", 3, tmp_path / "out.npz", CPU, lambda *progress: ticks.append(progress)
    )
    with np.load(tmp_path / "out.npz") as out:
        np.testing.assert_array_equal(out["fields"], rollout_each(workdir / "full", slope_first(raw[:, :2]), 3))
        assert out["names"].tolist() == ["slope"]
    assert ticks == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_forecast_from_a_store_continues_its_times(workdir, raw, tmp_path):
    messages = forecast_file(workdir / "full", workdir / "waves.h5", 3, tmp_path / "out.h5", CPU)
    with open_store(workdir / "waves.h5") as given, open_store(tmp_path / "out.h5") as out:
        before, after = given.header.layout, out.header.layout
        np.testing.assert_array_equal(out[:], rollout_each(workdir / "full", slope_first(raw[:, -2:]), 3))
        np.testing.assert_allclose(after.times, before.times[-1] + 0.25 * np.arange(1, 4))
        for actual, expected in zip(after.coordinates, before.coordinates, strict=True):
            np.testing.assert_array_equal(actual, expected)
        assert (after.fields, after.units, after.boundary) == (("slope",), ("1",), before.boundary)
        assert out.finished and out.header.source == "forecast"
        assert out.header.parameters == {"run": "full", "step": 5, "start": "waves.h5"}
    assert messages[0] == f"{workdir / 'waves.h5'} has 7 frames; the last 2 were used"


def test_forecast_store_from_bare_arrays_has_the_metadata_of_training(workdir, raw, tmp_path):
    """Units, boundary, box and time step; another run on the same data accepts it."""
    for run, frames, points, note in (
        ("full", slope_first(raw[0, :2]), slice(None), ""),
        ("thin", raw[0, :2, ::2, ::2], slice(None, None, 2), ""),
        ("old", slope_first(raw[0, :2]), slice(None), " (evenly spaced from 0)"),
    ):
        if run == "old":  # written before coordinates were recorded
            shutil.copytree(workdir / "full", workdir / "old")
            facts = Run(workdir / "old").read_json("data.json")
            del facts["domain"]["coordinates"]
            Run(workdir / "old").write_json("data.json", facts)
        np.save(tmp_path / f"{run}.npy", frames)
        messages = forecast_file(workdir / run, tmp_path / f"{run}.npy", 4, tmp_path / f"{run}.h5", CPU)
        step = 0.5 if run == "thin" else 0.25
        with open_store(tmp_path / f"{run}.h5") as out:
            layout = out.header.layout
            assert layout.boundary == ("periodic", "periodic")
            np.testing.assert_allclose(layout.times, step * np.arange(2, 6))
            np.testing.assert_allclose(layout.coordinates[0], WAVES.layout.coordinates[0][points], rtol=1e-12)
        assert messages[-2] == (
            f"{tmp_path / run}.npy has no units, boundary, coordinates{note}, time step: taken from the training data"
        )
    shutil.copytree(workdir / "thin", workdir / "twin")
    forecast_file(workdir / "twin", tmp_path / "thin.h5", 1, tmp_path / "twin.h5", CPU)


def test_forecast_of_another_grid_without_coordinates_has_no_box(workdir, raw, tmp_path):
    np.save(tmp_path / "start.npy", slope_first(raw[0, :2, :10]))
    forecast_file(workdir / "full", tmp_path / "start.npy", 1, tmp_path / "out.h5", CPU)
    with open_store(tmp_path / "out.h5") as out:
        assert out.header.layout.boundary == ("periodic", "periodic")
        assert out.header.layout.coordinates[0].tolist() == list(range(10))


def test_forecast_uses_the_last_frames_and_warns_of_another_grid(workdir, tmp_path):
    finer = np.random.default_rng(0).normal(size=(5, 16, 20, 2)).astype(np.float32)
    np.save(tmp_path / "start.npy", finer)
    messages = forecast_file(workdir / "full", tmp_path / "start.npy", 2, tmp_path / "out.npy", CPU)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), rollout_each(workdir / "full", finer[None, -2:], 2))
    assert "has 5 frames; the last 2 were used" in messages[0]
    assert "a grid of 16 × 20, but the model was trained on 12 × 12: the forecast is less reliable" in messages[1]


def test_forecast_in_bf16_is_close_and_recorded(workdir, tmp_path):
    for name in ("float32", "bf16"):
        forecast_file(workdir / "full", workdir / "waves.h5", 3, tmp_path / f"{name}.h5", CPU, precision=name)
    with open_store(tmp_path / "float32.h5") as plain, open_store(tmp_path / "bf16.h5") as bf16:
        assert 0 < np.linalg.norm(bf16[:] - plain[:]) < 0.02 * np.linalg.norm(plain[:])
        assert bf16.header.parameters == {**plain.header.parameters, "precision": "bf16"}


# --- a run trained on strided data


def test_forecast_applies_the_strides_of_training_to_a_store(workdir, raw, tmp_path):
    messages = forecast_file(workdir / "thin", workdir / "waves.h5", 3, tmp_path / "out.h5", CPU)
    history = np.ascontiguousarray(raw[:, [4, 6], ::2, ::2])
    with open_store(tmp_path / "out.h5") as out:
        np.testing.assert_array_equal(out[:], rollout_each(workdir / "thin", history, 3))
        np.testing.assert_allclose(out.header.layout.times, WAVES.layout.times[-1] + 0.5 * np.arange(1, 4))
        np.testing.assert_array_equal(out.header.layout.coordinates[1], WAVES.layout.coordinates[1][::2])
        assert out.header.layout.units == ("m", "1")
    assert "has 7 frames; the last 3 were used" in messages[0]
    assert messages[1:3] == [
        "1 of 2 frames was used, as in training",
        "1 of 2 points along each axis was used, as in training",
    ]


def test_forecast_continues_from_a_forecast(workdir, tmp_path):
    """Two steps and then three equal five: a forecast is not strided again."""
    forecast_file(workdir / "thin", workdir / "waves.h5", 5, tmp_path / "five.h5", CPU)
    forecast_file(workdir / "thin", workdir / "waves.h5", 2, tmp_path / "two.h5", CPU)
    messages = forecast_file(workdir / "thin", tmp_path / "two.h5", 3, tmp_path / "three.h5", CPU)
    with open_store(tmp_path / "five.h5") as full, open_store(tmp_path / "three.h5") as continued:
        np.testing.assert_array_equal(continued[:], full[:][:, 2:])
        np.testing.assert_allclose(continued.header.layout.times, full.header.layout.times[2:])
    assert len(messages) == 1


def test_forecast_from_arrays_assumes_the_time_stride_of_training(workdir, raw, tmp_path):
    for name, history in (("stored", raw[0, :2]), ("strided", np.ascontiguousarray(raw[0, :2, ::2, ::2]))):
        np.save(tmp_path / f"{name}.npy", history)
        messages = forecast_file(workdir / "thin", tmp_path / f"{name}.npy", 2, tmp_path / f"{name}-out.npy", CPU)
        assert messages[0] == "assuming consecutive frames are 2 frames of the training data apart"
        assert ("1 of 2 points" in messages[1]) == (name == "stored") and len(messages) == 2 + (name == "stored")
    outputs = [np.load(tmp_path / f"{name}-out.npy") for name in ("stored", "strided")]
    np.testing.assert_array_equal(*outputs)


def containers(folder, values, layout):
    """The same trajectories `(count, frames, *grid, fields)` in every container, with the metadata of `layout`."""
    facts = {"units": layout.units, "boundary": layout.boundary, "x": layout.coordinates[0],
             "y": layout.coordinates[1], "times": layout.times}  # fmt: skip
    facts = {name: np.array(entry) for name, entry in facts.items()}
    fields = dict(zip(layout.fields, np.moveaxis(values, -1, 0), strict=True))
    header = Header(layout, "test", {})
    np.savez(folder / "a.npz", **fields, **facts)
    with h5py.File(folder / "a.hdf5", "w") as file:
        for name, entry in (fields | facts).items():
            file[name] = entry.tolist() if entry.dtype.kind == "U" else entry
    write_store(folder / "a.h5", header, values)
    write_netcdf(folder / "a.nc", values, header)
    write_zarr(folder / "a.zarr", values, header)
    (folder / "files").mkdir()
    for number in range(len(values)):
        np.savez(folder / "files" / f"{number}.npz", **{name: field[number] for name, field in fields.items()}, **facts)
    return [folder / name for name in ("a.npz", "a.hdf5", "a.h5", "a.nc", "a.zarr", "files")]


@pytest.mark.parametrize("spacing", [1, 2])
def test_forecast_of_a_strided_run_does_not_depend_on_the_container(workdir, raw, tmp_path, spacing):
    """The stride follows from the times: frames of the simulator, or those that are used."""
    layout = replace(WAVES.layout, times=WAVES.layout.times[::spacing])
    expected = rollout_each(workdir / "thin", np.ascontiguousarray(raw[:, [4, 6], ::2, ::2]), 3)
    for start in containers(tmp_path, raw[:, ::spacing], layout):
        out = tmp_path / f"{start.name}.out.h5"
        forecast_file(workdir / "thin", start, 3, out, CPU)
        with open_store(out) as store:
            np.testing.assert_array_equal(store[:], expected, err_msg=start.name)
            given = store.header.layout
        np.testing.assert_allclose(given.times, WAVES.layout.times[-1] + 0.5 * np.arange(1, 4), err_msg=start.name)
        np.testing.assert_allclose(given.coordinates[1], WAVES.layout.coordinates[1][::2], err_msg=start.name)
        assert (given.units, given.boundary) == (("m", "1"), ("periodic", "periodic")), start.name


def test_forecast_of_a_strided_run_from_data_without_times(workdir, raw, tmp_path):
    """The stride of training applies to trajectories like those of training, not to a history of the exact length."""
    run = workdir / "thin"
    (tmp_path / "files").mkdir()
    for number in range(4):
        np.save(tmp_path / "files" / f"{number}.npy", raw[number])
    np.savez(tmp_path / "all.npz", height=raw[..., 0], slope=raw[..., 1])
    np.save(tmp_path / "all.npy", raw)
    np.savez(tmp_path / "part.npz", height=raw[:, 2:, ..., 0], slope=raw[:, 2:, ..., 1])
    np.savez(tmp_path / "timed.npz", height=raw[:, 2:, ..., 0], slope=raw[:, 2:, ..., 1], times=WAVES.layout.times[2:])
    strided = np.ascontiguousarray(raw[:, [4, 6], ::2, ::2])
    np.save(tmp_path / "history.npy", strided)
    expected = rollout_each(workdir / "thin", strided, 2)
    for name in ("files", "all.npz", "all.npy", "timed.npz", "files/3.npy", "history.npy"):
        out = tmp_path / f"{Path(name).name}-out.npy"
        messages = forecast_file(run, tmp_path / name, 2, out, CPU)
        np.testing.assert_array_equal(np.load(out), expected[3:] if name == "files/3.npy" else expected, err_msg=name)
        assert ("1 of 2 frames was used, as in training" in messages) == (name != "history.npy")
    np.save(tmp_path / "one.npy", raw[0, :5])
    forecast_file(run, tmp_path / "all.npy", 5, tmp_path / "forecast.npy", CPU)  # its frames have the stride already
    for name in ("part.npz", "one.npy", "forecast.npy"):
        with pytest.raises(ValueError, match=f"{name} has 5 frames without times, .* exactly the last 2 frames"):
            forecast_file(run, tmp_path / name, 2, tmp_path / "out.npy", CPU)
    np.save(tmp_path / "last.npy", np.load(tmp_path / "forecast.npy")[:, -2:])
    forecast_file(run, tmp_path / "last.npy", 2, tmp_path / "more.npy", CPU)
    np.testing.assert_array_equal(np.load(tmp_path / "more.npy"), rollout_each(run, strided, 7)[:, 5:])
    np.save(tmp_path / "short.npy", raw[:, :1])
    with pytest.raises(ValueError, match=r"short\.npy has 1 frames, but a forecast needs 2"):
        forecast_file(run, tmp_path / "short.npy", 2, tmp_path / "out.npy", CPU)


def test_forecast_of_a_strided_run_with_other_times_keeps_the_stride_with_anyway(workdir, raw, tmp_path):
    np.savez(tmp_path / "a.npz", height=raw[..., 0], slope=raw[..., 1], times=0.3 * np.arange(7))
    with pytest.raises(ValueError, match=r"its frames are 0\.6 apart, not 0\.5"):
        forecast_file(workdir / "thin", tmp_path / "a.npz", 2, tmp_path / "out.npy", CPU)
    forecast_file(workdir / "thin", tmp_path / "a.npz", 2, tmp_path / "out.npy", CPU, anyway=True)
    history = np.ascontiguousarray(raw[:, [4, 6], ::2, ::2])
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), rollout_each(workdir / "thin", history, 2))


# --- runs trained on arrays


SOLID = Task("solid", ("v", "u", "solid"), ("v", "u"), (12, 12), 2, 1, 2, 3, 1, "channel", mask="solid")


@pytest.fixture(scope="module")
def masked(workdir, raw):
    """A run on arrays with NaN in a solid, whose inputs have another order than the channels of the file."""
    folder = workdir / "masked"
    folder.mkdir()
    values = np.concatenate((raw, np.zeros_like(raw[..., :1])), axis=-1)
    values[:, :, 3:6, 4:8] = (np.nan, np.nan, 1.0)
    np.save(folder / "all.npy", values)
    data = open_data(folder / "all.npy", ReadOptions(fields=("u", "v", "solid"), mask="solid", steady=False))
    train_run(Recipe(SOLID, MODEL, PLAN), data, Run(folder / "run"))
    return folder, values


@pytest.mark.parametrize("count", [1, 4])
def test_forecast_fills_the_solid_of_every_container(masked, tmp_path, count):
    folder, values = masked
    values = values[:count]
    names = ("u", "v", "solid")
    layout = Layout(names, ("1",) * 3, ("open",) * 2, (np.arange(12.0),) * 2, np.arange(7.0))
    starts = [*containers(tmp_path, values, layout)[:2], tmp_path / "files"]
    np.save(tmp_path / "all.npy", values)
    write_netcdf(tmp_path / "b.nc", values, Header(layout, "test", {}))
    write_zarr(tmp_path / "b.zarr", values, Header(layout, "test", {}))
    np.savez(tmp_path / "history.npz", fields=values[:, -2:], names=np.array(names))
    np.save(tmp_path / "history.npy", values[:, -2:])
    starts += [tmp_path / name for name in ("all.npy", "b.nc", "b.zarr", "history.npz", "history.npy")]
    if count == 1:
        np.save(tmp_path / "one.npy", values[0])
        starts += [tmp_path / "files" / "0.npz", tmp_path / "one.npy"]
    history = np.nan_to_num(values[:, -2:], nan=0.0)[..., [1, 0, 2]]
    expected = rollout_each(folder / "run", np.ascontiguousarray(history), 3)
    assert np.isfinite(expected).all()
    for number, start in enumerate(starts):
        forecast_file(folder / "run", start, 3, tmp_path / f"{number}.out.npy", CPU)
        np.testing.assert_array_equal(np.load(tmp_path / f"{number}.out.npy"), expected, err_msg=start.name)
    values = values.copy()
    values[0, -1, 0, 0, 1] = np.nan
    np.save(tmp_path / "fluid.npy", values)
    with pytest.raises(ValueError, match=r"has 1 values that are not finite .* point \(0, 0\) of 'v'"):
        forecast_file(folder / "run", tmp_path / "fluid.npy", 3, tmp_path / "out.npy", CPU)
    np.save(tmp_path / "half.npy", np.nan_to_num(values) * (1.0, 1.0, 0.5))
    with pytest.raises(ValueError, match="The mask solid of trajectory 0 must contain only 0"):
        forecast_file(folder / "run", tmp_path / "half.npy", 3, tmp_path / "out.npy", CPU)


def test_forecast_accepts_the_boolean_mask_of_a_single_file(masked, tmp_path):
    folder, values = masked
    u, v, solid = (values[0, ..., channel] for channel in range(3))
    np.savez(tmp_path / "numbers.npz", u=u, v=v, solid=solid)
    np.savez(tmp_path / "booleans.npz", u=u, v=v, solid=solid.astype(bool))
    for name in ("numbers", "booleans"):
        forecast_file(folder / "run", tmp_path / f"{name}.npz", 2, tmp_path / f"{name}.npy", CPU)
    np.testing.assert_array_equal(np.load(tmp_path / "booleans.npy"), np.load(tmp_path / "numbers.npy"))


@pytest.mark.parametrize(
    ("strides", "dt"),
    [({"space_stride": 1, "grid": (12, 12)}, 0.25), ({"time_stride": 1}, None)],
    ids=["time step given", "without coordinates"],
)
def test_forecast_of_a_strided_run_can_be_continued(workdir, raw, tmp_path, strides, dt):
    """A forecast has the time step and the points that the model uses, not those of the training data."""
    np.save(tmp_path / "a.npy", raw)
    recipe = Recipe(replace(THIN, **strides), MODEL, PLAN)
    train_run(recipe, open_data(tmp_path / "a.npy", ReadOptions(fields=BOTH, dt=dt)), Run(tmp_path / "run"))
    for start, steps, out in (("a.npy", 5, "all"), ("a.npy", 3, "first"), ("first.npz", 2, "rest")):
        forecast_file(tmp_path / "run", tmp_path / start, steps, tmp_path / f"{out}.npz", CPU)
    with np.load(tmp_path / "all.npz") as whole, np.load(tmp_path / "rest.npz") as rest:
        np.testing.assert_array_equal(rest["fields"], whole["fields"][:, 3:])
        np.testing.assert_allclose(rest["times"], whole["times"][3:])


@pytest.mark.parametrize(
    ("given", "fields", "inputs", "targets", "accepted"),
    [
        ("uv", ("u", "v"), ("u", "v"), ("u", "v"), {"uv"}),  # one order
        ("uv", ("u", "v"), ("v", "u"), ("v", "u"), set()),
        ("uvp", ("u", "v", "p"), ("u", "v"), ("u", "v"), {"uv", "uvp"}),
        ("uvp", ("u", "v", "p"), ("v", "u"), ("v", "u"), {"uvp"}),  # two channels may be a forecast
        ("uvp", ("u", "v", "p"), ("v", "u", "p"), ("v", "u"), {"uvp"}),  # three are none
    ],
)
def test_channels_without_names_are_never_swapped(workdir, raw, tmp_path, given, fields, inputs, targets, accepted):
    """They have the order of the training file, a forecast that of the targets: it is refused unless they agree."""
    channels = {"u": raw[..., 0], "v": raw[..., 1], "p": np.ones_like(raw[..., 0])}

    def stacked(names):
        return np.stack([channels[name] for name in names], axis=-1)

    np.save(tmp_path / "train.npy", stacked(given))
    task = replace(THIN, grid=(12, 12), time_stride=1, space_stride=1, inputs=inputs, targets=targets)
    data = open_data(tmp_path / "train.npy", ReadOptions(fields=fields, steady=False))
    train_run(Recipe(task, MODEL, PLAN), data, Run(tmp_path / "run"))
    expected = rollout_each(tmp_path / "run", stacked(inputs)[:, -2:], 2)
    np.savez(tmp_path / "named.npz", fields=stacked(given[::-1]), names=np.array(list(given[::-1])))
    forecast_file(tmp_path / "run", tmp_path / "named.npz", 2, tmp_path / "named.npy", CPU)
    np.testing.assert_array_equal(np.load(tmp_path / "named.npy"), expected)
    np.save(tmp_path / "number.npy", np.float32(1))
    with pytest.raises(ValueError, match=r"number\.npy has"):
        forecast_file(tmp_path / "run", tmp_path / "number.npy", 2, tmp_path / "out.npy", CPU)
    for names in ("uv", "uvp"):
        np.save(tmp_path / f"{names}.npy", stacked(names)[:, -2:])
        out = tmp_path / f"{names}-out.npy"
        if names in accepted:
            forecast_file(tmp_path / "run", tmp_path / f"{names}.npy", 2, out, CPU)
            np.testing.assert_array_equal(np.load(out), expected)
        else:
            with pytest.raises(ValueError, match="channels") as caught:
                forecast_file(tmp_path / "run", tmp_path / f"{names}.npy", 2, out, CPU)
            assert "\n" not in str(caught.value) and "in the order v, u" not in str(caught.value)
    if "uv" in accepted:
        forecast_file(tmp_path / "run", tmp_path / "named.npy", 1, tmp_path / "more.npy", CPU)
    elif inputs == targets:
        with pytest.raises(ValueError, match=r"2 channels without names, .* \(u, v\) or .* \(v, u\); save it as an"):
            forecast_file(tmp_path / "run", tmp_path / "named.npy", 1, tmp_path / "more.npy", CPU)
        forecast_file(tmp_path / "run", tmp_path / "named.npz", 2, tmp_path / "first.npz", CPU)
        forecast_file(tmp_path / "run", tmp_path / "first.npz", 1, tmp_path / "more.npz", CPU)
        with np.load(tmp_path / "more.npz") as more:
            whole = rollout_each(tmp_path / "run", stacked(inputs)[:, -2:], 3)
            np.testing.assert_array_equal(more["fields"], whole[:, 2:])


@pytest.mark.parametrize("dt", [None, 0.25])
def test_forecast_reads_the_fields_of_the_run_only(workdir, raw, tmp_path, monkeypatch, dt):
    """Another variable may be unreadable, and files are opened once. A forecast keeps its own metadata."""
    xarray = pytest.importorskip("xarray")
    source = tmp_path / "a.nc"
    write_netcdf(source, raw, Header(WAVES.layout, "test", {}))
    with xarray.open_dataset(source) as dataset:
        dims = (*dataset["height"].dims, "bin")
        dataset.assign(spectrum=(dims, np.zeros((*raw.shape[:-1], 3)))).to_netcdf(tmp_path / "b.nc")
        dataset[["height"]].to_netcdf(tmp_path / "height.nc")
    with pytest.raises(ValueError, match="of which bin cannot be identified"):
        open_data(tmp_path / "b.nc")
    task = replace(THIN, grid=(12, 12), time_stride=1, space_stride=1)
    train_run(Recipe(task, MODEL, PLAN), open_data(source, ReadOptions(fields=BOTH, dt=dt)), Run(tmp_path / "run"))
    reads, read = [], netcdf_zarr.as_trajectories
    monkeypatch.setattr(netcdf_zarr, "as_trajectories", lambda *args: reads.append(args) or read(*args))
    forecast_file(tmp_path / "run", tmp_path / "b.nc", 4, tmp_path / "all.nc", CPU)
    assert len(reads) == 1
    forecast_file(tmp_path / "run", tmp_path / "b.nc", 2, tmp_path / "first.nc", CPU)
    forecast_file(tmp_path / "run", tmp_path / "first.nc", 2, tmp_path / "rest.nc", CPU)
    with open_data(tmp_path / "all.nc") as whole, open_data(tmp_path / "rest.nc") as rest:
        np.testing.assert_array_equal(whole[:], rollout_each(tmp_path / "run", raw[:, -2:], 4))
        np.testing.assert_array_equal(rest[:], whole[:, 2:])
        np.testing.assert_array_equal(rest.header.layout.times, whole.header.layout.times[2:])
    with pytest.raises(ValueError, match="has no field 'slope'"):
        forecast_file(tmp_path / "run", tmp_path / "height.nc", 2, tmp_path / "out.nc", CPU)


def test_axes_of_the_run_apply_to_files_that_name_their_spatial_axes(workdir, raw, tmp_path):
    """`axes` in a file of the user, unlike in a forecast, does not say that count comes before time."""
    fields = {"height": raw[..., 0].swapaxes(0, 1), "slope": raw[..., 1].swapaxes(0, 1)}
    np.savez(tmp_path / "a.npz", **fields, axes=np.array(["x", "y"]))
    task = replace(THIN, grid=(12, 12), time_stride=1, space_stride=1)
    options = ReadOptions(axes=("time", "count", "x", "y"), dt=0.25)
    train_run(Recipe(task, MODEL, PLAN), open_data(tmp_path / "a.npz", options), Run(tmp_path / "run"))
    for start, steps, out in (("a.npz", 5, "all"), ("a.npz", 3, "first"), ("first.npz", 2, "rest")):
        forecast_file(tmp_path / "run", tmp_path / start, steps, tmp_path / f"{out}.npz", CPU)
    with np.load(tmp_path / "all.npz") as whole, np.load(tmp_path / "rest.npz") as rest:
        np.testing.assert_array_equal(whole["fields"], rollout_each(tmp_path / "run", raw[:, -2:], 5))
        np.testing.assert_array_equal(rest["fields"], whole["fields"][:, 3:])
        np.testing.assert_allclose(rest["times"], whole["times"][3:])
    notes = " ".join(open_data(tmp_path / "all.npz").notes)
    assert "Skipped" not in notes


@pytest.fixture(scope="module")
def specified(workdir, raw):
    """Runs whose time step, boundary and units are given by the user: the files `own` have other ones, `bare` none."""
    folder, options = workdir / "specified", {"boundary": ("periodic",), "dt": 0.25, "units": ("m", "1")}
    folder.mkdir()
    names, other = {"fields": raw, "names": np.array(BOTH)}, {"times": np.arange(7.0), "units": np.array(["km", "2"])}
    np.savez(folder / "bare.npz", **names)
    np.savez(folder / "own.npz", **names, **other, boundary=np.array(["wall", "wall"]))
    for name in ("bare", "own"):
        data = open_data(folder / f"{name}.npz", ReadOptions(fields=BOTH, **options))
        train_run(Recipe(replace(THIN, space_stride=1, grid=(12, 12)), MODEL, PLAN), data, Run(folder / name))
    return folder


def test_given_metadata_override_only_files_like_those_of_the_training(specified, raw, tmp_path):
    """Where the training files had none, those of other files are used and compared."""
    for name in ("bare", "own"):
        forecast_file(specified / name, specified / f"{name}.npz", 2, tmp_path / f"{name}.npz", CPU)
        with np.load(tmp_path / f"{name}.npz") as out:
            np.testing.assert_allclose(out["times"], [2.0, 2.5])
            assert (list(out["units"]), list(out["boundary"])) == (["m", "1"], ["periodic"] * 2)
    np.savez(tmp_path / "strided.npz", fields=raw[:, ::2], names=np.array(BOTH), times=3 + 0.5 * np.arange(4))
    forecast_file(specified / "bare", tmp_path / "strided.npz", 2, tmp_path / "out.npz", CPU)
    with np.load(tmp_path / "out.npz") as out, np.load(tmp_path / "bare.npz") as expected:
        np.testing.assert_array_equal(out["fields"], expected["fields"])
        np.testing.assert_allclose(out["times"], [5.0, 5.5])
    changes = {"times": 0.7 * np.arange(7), "boundary": np.array(["wall", "periodic"]), "units": np.array(["km", "1"])}
    messages = ("its frames are 1.4 apart, not 0.5", "axis x is wall, not periodic", "the unit of height is km, not m")
    for (name, values), message in zip(changes.items(), messages, strict=True):
        np.savez(tmp_path / f"{name}.npz", fields=raw + 1, names=np.array(BOTH), **{name: values})
        with pytest.raises(ValueError, match=message):
            forecast_file(specified / "bare", tmp_path / f"{name}.npz", 2, tmp_path / "refused.npz", CPU)
        with pytest.raises(ValueError, match=message):
            evaluate_run(Run(specified / "bare"), path=tmp_path / f"{name}.npz")


@pytest.mark.parametrize("suffix", [".npz", ".h5"])
def test_forecast_of_a_run_with_permuted_axes_can_be_continued(workdir, raw, tmp_path, suffix):
    """Files of the run have the axes (y, x), a forecast (x, y)."""
    np.save(tmp_path / "a.npy", raw.swapaxes(2, 3))
    options = ReadOptions(fields=BOTH, axes=("count", "time", "y", "x", "field"))
    recipe = Recipe(replace(FULL, inputs=BOTH, targets=BOTH), MODEL, PLAN)
    train_run(recipe, open_data(tmp_path / "a.npy", options), Run(tmp_path / "run"))
    for start, steps, out in (("a.npy", 5, "all"), ("a.npy", 2, "first"), (f"first{suffix}", 3, "rest")):
        forecast_file(tmp_path / "run", tmp_path / start, steps, tmp_path / f"{out}{suffix}", CPU)
    with open_data(tmp_path / f"all{suffix}") as whole, open_data(tmp_path / f"rest{suffix}") as rest:
        np.testing.assert_array_equal(whole[:], rollout_each(tmp_path / "run", raw[:, -2:], 5))
        np.testing.assert_array_equal(rest[:], whole[:, 2:])


# --- a steady run: every case is one frame


STILL = Task("still", ("height",), ("slope",), (12, 12), 1, 1, 1, 3, 1, "channel", steady=True)
PAIR = Task("pair", ("height", "depth"), ("slope",), (12, 12), 1, 1, 1, 3, 1, "channel", steady=True)


@pytest.fixture(scope="module")
def steady_runs(workdir, raw):
    """Steady runs that map one and two input fields to a third."""
    folder = workdir / "steady"
    axis = np.arange(12.0)
    layout = Layout(("height", "slope", "depth"), ("m", "1", "m"), ("open",) * 2, (axis, axis), np.zeros(1))
    values = np.concatenate((raw[:, :1], raw[:, 1:2, ..., :1]), axis=-1)
    write_store(folder / "cases.h5", Header(layout, "test", {}), values)
    for task in (STILL, PAIR):
        train_run(Recipe(task, MODEL, replace(PLAN, batch=2)), folder / "cases.h5", Run(folder / task.name))
    return folder


def test_forecast_of_a_steady_run_reads_arrays_as_cases(steady_runs, raw, tmp_path):
    u = raw[:, 0, ..., 0]
    expected = rollout_each(steady_runs / "still", u[:, None, ..., None], 1)
    assert np.abs(expected[0] - expected[1]).max() > 1e-3, "the cases differ"
    for name, values, count in (
        ("many", u, 4), ("one", u[0], 1), ("last", u[..., None], 4), ("lone", u[0][..., None], 1),
        ("frame", u[:, None], 4), ("whole", u[:, None, ..., None], 4),
    ):  # fmt: skip
        np.save(tmp_path / f"{name}.npy", values)
        messages = forecast_file(steady_runs / "still", tmp_path / f"{name}.npy", 1, tmp_path / f"{name}-out.npy", CPU)
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}-out.npy"), expected[:count], err_msg=name)
        assert len(messages) == 1, messages
    for name, values, count in (("named", u, 4), ("name", u[0], 1)):
        np.savez(tmp_path / f"{name}.npz", height=values, times=np.zeros(1))
        forecast_file(steady_runs / "still", tmp_path / f"{name}.npz", 1, tmp_path / f"{name}-out.npy", CPU)
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}-out.npy"), expected[:count], err_msg=name)
    forecast_file(steady_runs / "still", steady_runs / "cases.h5", 1, tmp_path / "store-out.npy", CPU)
    np.testing.assert_array_equal(np.load(tmp_path / "store-out.npy"), expected)


def test_forecast_of_a_steady_run_with_several_input_fields(steady_runs, raw, tmp_path):
    both = np.stack([raw[:, 0, ..., 0], raw[:, 1, ..., 0]], axis=-1)
    expected = rollout_each(steady_runs / "pair", both[:, None], 1)
    for name, values, count in (("many", both, 4), ("one", both[0], 1), ("frame", both[:, None], 4)):
        np.save(tmp_path / f"{name}.npy", values)
        forecast_file(steady_runs / "pair", tmp_path / f"{name}.npy", 1, tmp_path / f"{name}-out.npy", CPU)
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}-out.npy"), expected[:count], err_msg=name)
    np.savez(tmp_path / "apart.npz", depth=both[..., 1], height=both[..., 0])
    forecast_file(steady_runs / "pair", tmp_path / "apart.npz", 1, tmp_path / "apart-out.npy", CPU)
    np.testing.assert_array_equal(np.load(tmp_path / "apart-out.npy"), expected)
    np.save(tmp_path / "flat.npy", both[0, 0])
    with pytest.raises(ValueError, match=r"has shape \(12, 2\); expected axes \(x, y, channels\)"):
        forecast_file(steady_runs / "pair", tmp_path / "flat.npy", 1, tmp_path / "x.npy", CPU)


# --- frames from a different domain


def write_variant(path, workdir, **change):
    with open_store(workdir / "waves.h5") as store:
        header = replace(store.header, layout=replace(store.header.layout, **change))
        with Writer(path, header, 1) as writer:
            writer.append(store[:1])
    return path


OTHER_DOMAINS = pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": ("km", "1")}, "the unit of height is km, not m"),
        ({"boundary": ("open", "periodic")}, "axis x is open, not periodic"),
        ({"coordinates": (np.arange(12) / 2, np.arange(12) / 2)}, "axis y is 6 long, not 6.28319"),
        ({"times": 4.0 * np.arange(7)}, "its frames are 4 apart, not 0.25"),
    ],
)


@OTHER_DOMAINS
def test_forecast_rejects_a_different_domain_in_every_container(workdir, raw, tmp_path, change, message):
    layout = replace(WAVES.layout, **change)
    for start in containers(tmp_path, raw, layout):
        with pytest.raises(ValueError, match=message):
            forecast_file(workdir / "full", start, 2, tmp_path / "out.h5", CPU)
        forecast_file(workdir / "full", start, 2, tmp_path / f"{start.name}.out.h5", CPU, anyway=True)
        with open_store(tmp_path / f"{start.name}.out.h5") as out:
            given = out.header.layout
            assert message in out.header.parameters["anyway"] and given.boundary == layout.boundary
            np.testing.assert_allclose(given.coordinates[0], layout.coordinates[0])
            np.testing.assert_allclose(np.diff(given.times), layout.times[-1] - layout.times[-2])


@OTHER_DOMAINS
def test_forecast_rejects_a_different_domain_without_anyway(workdir, tmp_path, change, message):
    start, out = write_variant(tmp_path / "start.h5", workdir, **change), tmp_path / "out.h5"
    with pytest.raises(ValueError, match=message):
        forecast_file(workdir / "full", start, 2, out, CPU)
    assert not out.exists()
    forecast_file(workdir / "full", start, 2, out, CPU, anyway=True)
    with open_store(start) as given, open_store(out) as forecast:
        before, after = given.header.layout, forecast.header.layout
        assert message in forecast.header.parameters["anyway"] and after.boundary == before.boundary
        np.testing.assert_allclose(np.diff(after.times), before.times[-1] - before.times[-2])
    forecast_file(
        workdir / "thin", write_variant(tmp_path / "both.h5", workdir, **change), 2, tmp_path / "b.h5", CPU, anyway=True
    )
    forecast_file(workdir / "thin", tmp_path / "b.h5", 2, tmp_path / "c.h5", CPU)  # its own forecast can be continued
    with open_store(tmp_path / "c.h5") as forecast:
        assert message.split(" not ")[0].split()[0] in forecast.header.parameters["anyway"]


def test_forecast_checks_and_continues_times_of_arrays(workdir, raw, tmp_path):
    for name, step in (("right", 0.25), ("wrong", 0.5)):
        np.savez(tmp_path / f"{name}.npz", fields=slope_first(raw[0, :2]), names=np.array(["slope", "height"]),
                 times=3 + step * np.arange(2))  # fmt: skip
    forecast_file(workdir / "full", tmp_path / "right.npz", 2, tmp_path / "right.h5", CPU)
    with open_store(tmp_path / "right.h5") as out:
        np.testing.assert_allclose(out.header.layout.times, [3.5, 3.75])
    with pytest.raises(ValueError, match=r"its frames are 0\.5 apart"):
        forecast_file(workdir / "full", tmp_path / "wrong.npz", 2, tmp_path / "wrong.h5", CPU)
    forecast_file(workdir / "full", tmp_path / "wrong.npz", 2, tmp_path / "wrong.h5", CPU, anyway=True)
    with open_store(tmp_path / "wrong.h5") as out:
        np.testing.assert_allclose(out.header.layout.times, [4.0, 4.5])


def test_forecast_takes_missing_units_from_the_training_data(workdir, raw, tmp_path):
    """Units of plain arrays, and of fields missing in a file."""
    np.save(tmp_path / "start.npy", raw[0, :2, ::2, ::2])
    forecast_file(workdir / "thin", tmp_path / "start.npy", 2, tmp_path / "out.h5", CPU)
    with open_store(tmp_path / "out.h5") as out:
        assert out.header.layout.units == ("m", "1")


def test_forecast_without_a_recorded_domain(workdir, tmp_path):
    shutil.copytree(workdir / "full", tmp_path / "old")
    start = write_variant(tmp_path / "start.h5", workdir, units=("km", "1"))
    for step in ("domain", "all"):
        facts = Run(tmp_path / "old").read_json("data.json")
        facts.pop("domain", None)
        Run(tmp_path / "old").write_json("data.json", facts)
        if step == "all":  # weights, recipe and normalisers are enough
            (tmp_path / "old" / "data.json").unlink()
        messages = forecast_file(tmp_path / "old", start, 2, tmp_path / f"{step}.npy", CPU)
        assert sum("no record of units, domain size and time step" in line for line in messages) == 1


# --- errors


def test_forecast_reports_non_finite_trajectories(workdir, raw, tmp_path):
    history = np.stack([slope_first(raw[0, :2]), np.full((2, 12, 12, 2), 3e38, np.float32)])
    np.save(tmp_path / "start.npy", history)
    messages = forecast_file(workdir / "full", tmp_path / "start.npy", 3, tmp_path / "out.npy", CPU)
    out = np.load(tmp_path / "out.npy")
    assert np.isfinite(out[0]).all() and np.isnan(out[1]).all()
    assert [line for line in messages if line.startswith("trajectory")] == [
        "trajectory 1: 1 of 1 forecasts became non-finite, the first at lead 1 of 3"
    ]


def bad(raw, which):
    good = slope_first(raw[0, :2])
    if which == "nan":
        good[1, 3, 4, 0] = np.nan
    return {"short": good[:1], "channels": good[..., :1].repeat(3, -1), "axes": good[:, 0, 0]}.get(which, good)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": "out.txt"}, r'Unknown output format "out.txt"; the file name must end in .h5, .npy, .npz'),
        ({"out": "there.npy"}, "already exists; choose another name"),
        ({"out": "."}, r"is a folder; pass a file name ending in .h5, .npy, .npz"),
        ({"steps": 10**10}, r"forecast of 10000000000 frames for 1 trajectories needs 1.15e\+04 GB of memory"),
        ({"steps": 10**30}, "use fewer steps"),
        ({"out": "start.npy/out.npy"}, "cannot be written"),
        ({"steps": 0}, "must be at least 1, got 0"),
        ({"precision": "half"}, 'Unknown precision "half"'),
        ({"start": "short"}, "has 1 frames, but a forecast needs 2"),
        ({"start": "nan"}, r"not finite in float32, the first in trajectory 0, frame 1, point \(3, 4\) of 'slope'"),
        ({"start": "channels"}, "3 channels; expected 2, in the order slope, height"),
        ({"start": "axes"}, "shape"),
        ({"start": None}, "not found"),
        ({"run": "start.npy"}, "cannot be read|is not a run"),
        ({"run": "nowhere"}, "is not a run"),
    ],
)
def test_forecast_errors_are_one_line_and_leave_no_files(workdir, raw, tmp_path, change, message):
    start = change.get("start", "good")
    if start is not None:
        np.save(tmp_path / "start.npy", bad(raw, start))
    (tmp_path / "there.npy").write_bytes(b"mine")
    run = tmp_path / change["run"] if "run" in change else workdir / "full"
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError, match=message) as caught:
        forecast_file(
            run,
            tmp_path / "start.npy",
            change.get("steps", 3),
            tmp_path / change.get("out", "o.h5"),
            CPU,
            precision=change.get("precision", "float32"),
        )
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_forecast_requires_enough_stored_frames_for_the_stride(workdir, tmp_path):
    generate(replace(WAVES, frames=2), 1, 0, tmp_path / "two.h5")
    with pytest.raises(ValueError, match="has 2 frames, but a forecast needs 3"):
        forecast_file(workdir / "thin", tmp_path / "two.h5", 3, tmp_path / "out.npy", CPU)


@pytest.mark.parametrize("kind", [".npy", ".npz", ".h5"])
def test_forecast_on_a_full_disk_leaves_no_files(workdir, tmp_path, kind):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))  # larger writes fail
    try:
        with pytest.raises(ValueError, match="cannot be written") as caught:
            forecast_file(workdir / "full", workdir / "waves.h5", 40, tmp_path / f"out{kind}", CPU)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_forecast_file_is_locked_while_writing(workdir, tmp_path):
    out = tmp_path / "out.h5"
    lock = slots.lock(out)
    with pytest.raises(ValueError, match="Another process is writing"):
        forecast_file(workdir / "full", workdir / "waves.h5", 2, out, CPU)
    slots.unlock(out, lock)
    assert not list(tmp_path.iterdir())
    forecast_file(workdir / "full", workdir / "waves.h5", 2, out, CPU)
    assert list(tmp_path.iterdir()) == [out]
