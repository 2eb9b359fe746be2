"""Forecasts as NetCDF and Zarr: the values of the .npz with times, coordinates, units and attributes; round-trip."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sigmasolver.data.formats import ReadOptions, open_data
from sigmasolver.data.formats.netcdf_zarr_write import write_netcdf
from sigmasolver.data.header import Header
from sigmasolver.forecast import files
from sigmasolver.forecast.checkpoint import load_recipe
from sigmasolver.forecast.files import forecast_file
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.runs import Run
from sigmasolver.tasks import Task
from sigmasolver.train.job import train_run
from tests.data.waves import Waves

xarray = pytest.importorskip("xarray")

WAVES = Waves(frames=9)
CPU = torch.device("cpu")
BOTH = ("height", "slope")
THIN = Task("thin", BOTH, BOTH, (6, 6), 2, 1, 2, 3, 1, "channel", time_stride=2, space_stride=2)
ATTRIBUTES = {
    "data set": {"title": "waves on a pond"},
    "fields": {"height": {"long_name": "surface height", "units": "m"}},
    "axes": {
        "x": {"name": "east", "units": "km", "axis": "X"},
        "t": {"name": "time", "units": "hours since 2001-01-01"},
    },
}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NetCDF with attributes, and a run trained on it directly."""
    folder = tmp_path_factory.mktemp("workdir")
    header = Header(WAVES.layout, "waves", {"attributes": ATTRIBUTES})
    write_netcdf(folder / "waves.nc", WAVES.simulate(0, range(4)).numpy(), header)
    recipe = Recipe(
        THIN,
        ModelRecipe(width=16, depth=1, heads=2, slices=4, modes=3),
        TrainRecipe(updates=3, batch=4, checks=0, validation=0.0),
    )
    train_run(recipe, folder / "waves.nc", Run(folder / "run"))
    return folder


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_netcdf_and_zarr_forecast_equals_npz_and_keeps_metadata(workdir: Path, tmp_path: Path, suffix: str) -> None:
    messages = {}
    for name in (f"out{suffix}", "out.npz"):
        messages[name] = forecast_file(workdir / "run", workdir / "waves.nc", 3, tmp_path / name, CPU)
    with np.load(tmp_path / "out.npz") as plain:
        expected = plain["fields"]
    with xarray.open_dataset(tmp_path / f"out{suffix}", decode_times=False) as out:
        for channel, name in enumerate(BOTH):
            assert out[name].dims == ("trajectory", "time", "east", "y")
            np.testing.assert_array_equal(out[name].values, expected[..., channel])
        np.testing.assert_allclose(out.time.values, WAVES.layout.times[-1] + 0.5 * np.arange(1, 4))
        np.testing.assert_array_equal(out.east.values, WAVES.layout.coordinates[0][::2])
        assert out.time.units == "hours since 2001-01-01" and out.east.units == "km"
        assert out.height.attrs == {"units": "m", "long_name": "surface height"}
        assert out.title == "waves on a pond" and out.east.boundary == "periodic"
        assert json.loads(out.attrs["sigmasolver"])["parameters"] == {"run": "run", "step": 3, "start": "waves.nc"}
    assert messages[f"out{suffix}"][:-1] == messages["out.npz"][:-1]
    with xarray.open_dataset(tmp_path / f"out{suffix}") as out:  # times as dates
        assert str(out.time.values[0]).startswith("2001-01-01T02:45")


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_netcdf_and_zarr_forecast_can_be_continued(workdir: Path, tmp_path: Path, suffix: str) -> None:
    """It is not strided again: its frames and points are already those of the model."""
    for name in (f"a{suffix}", "a.h5"):
        forecast_file(workdir / "run", workdir / "waves.nc", 3, tmp_path / name, CPU)
        messages = forecast_file(workdir / "run", tmp_path / name, 2, tmp_path / f"b_{name}", CPU)
        assert not any("as in training" in line for line in messages)
    with open_data(tmp_path / f"b_a{suffix}") as continued, open_data(tmp_path / "b_a.h5") as store:
        np.testing.assert_array_equal(continued[:], store[:])
        for actual, expected in zip(continued.header.axes().values(), store.header.axes().values(), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-15)


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_forecast_of_a_run_with_a_given_time_step_can_be_continued(workdir: Path, tmp_path: Path, suffix: str) -> None:
    """The step was given for the frames of the training data, of which the model uses every second one."""
    data = open_data(workdir / "waves.nc", ReadOptions(dt=0.5))
    train_run(load_recipe(Run(workdir / "run")), data, Run(tmp_path / "run"))
    for start, steps, out in ((workdir / "waves.nc", 5, "all"), (workdir / "waves.nc", 3, "first"),
                              (tmp_path / f"first{suffix}", 2, "rest")):  # fmt: skip
        forecast_file(tmp_path / "run", start, steps, tmp_path / f"{out}{suffix}", CPU)
    with open_data(tmp_path / f"all{suffix}") as whole, open_data(tmp_path / f"rest{suffix}") as rest:
        np.testing.assert_array_equal(rest[:], whole[:, 3:])
        np.testing.assert_allclose(np.diff(whole.header.layout.times), 1.0)
        np.testing.assert_allclose(rest.header.layout.times, whole.header.layout.times[3:])


def test_forecast_file_validates_the_output_before_computing(
    workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there.zarr").mkdir()
    with pytest.raises(ValueError, match=r"there\.zarr already exists"):
        forecast_file(workdir / "run", workdir / "waves.nc", 2, tmp_path / "there.zarr", CPU)
    monkeypatch.setitem(sys.modules, "h5netcdf", None)
    monkeypatch.setattr(files, "load", lambda *_: pytest.fail("it computed"))
    with pytest.raises(ValueError, match=r"out\.nc requires xarray, .* pip install 'sigmasolver\[data\]'"):
        forecast_file(workdir / "run", workdir / "waves.nc", 2, tmp_path / "out.nc", CPU)
    assert [path.name for path in tmp_path.iterdir()] == ["there.zarr"]


def test_forecast_rejects_netcdf_with_other_units(workdir: Path, tmp_path: Path) -> None:
    wrong = Header(replace(WAVES.layout, units=("km", "1")), "waves", {})
    write_netcdf(tmp_path / "wrong.nc", WAVES.simulate(1, range(1)).numpy(), wrong)
    with pytest.raises(ValueError, match="the unit of height is km, not m"):
        forecast_file(workdir / "run", tmp_path / "wrong.nc", 2, tmp_path / "out.nc", CPU)


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_forecast_takes_missing_metadata_of_netcdf_and_zarr_from_the_run(
    workdir: Path, tmp_path: Path, suffix: str
) -> None:
    """Without coordinates, times, units and boundaries, the frames are those of the training data."""
    with xarray.open_dataset(workdir / "waves.nc", decode_times=False) as complete:
        names = [str(name) for name in complete.coords if name != "trajectory"]
        bare = complete.load().drop_vars(names).drop_attrs()
    if suffix == ".nc":
        bare.rename(east="x").to_netcdf(tmp_path / "bare.nc", engine="h5netcdf")
    else:
        bare.rename(east="x").to_zarr(tmp_path / "bare.zarr", consolidated=False)
    messages = forecast_file(workdir / "run", tmp_path / f"bare{suffix}", 3, tmp_path / "bare.h5", CPU)
    forecast_file(workdir / "run", workdir / "waves.nc", 3, tmp_path / "full.h5", CPU)
    assert messages[-2] == (
        f"{tmp_path / 'bare'}{suffix} has no units, boundary, coordinates, time step: taken from the training data"
    )
    with open_data(tmp_path / "bare.h5") as actual, open_data(tmp_path / "full.h5") as expected:
        np.testing.assert_array_equal(actual[:], expected[:])
        np.testing.assert_array_equal(actual.header.layout.coordinates, expected.header.layout.coordinates)
        assert (actual.header.layout.units, actual.header.layout.boundary) == (("m", "1"), ("periodic", "periodic"))
        np.testing.assert_allclose(np.diff(actual.header.layout.times), 0.5)
