"""Data stored as (y, x): every output names its axes correctly, so a derivative along x is along x."""

import json
from dataclasses import replace

import h5py
import numpy as np
import pytest
import torch
import xarray
from typer.testing import CliRunner

from sigmasolver.cli import app
from sigmasolver.data.domain import Domain
from sigmasolver.data.formats import import_data, open_data
from sigmasolver.data.header import Header, StoreError
from sigmasolver.data.layout import Layout, transpose_axes
from sigmasolver.data.store import Writer, open_store
from sigmasolver.diagnose.records import write_findings
from sigmasolver.diagnose.subject import Findings
from sigmasolver.experiments.records import dimensions_in, join_records, label_runs
from sigmasolver.forecast.checkpoint import domain_of
from sigmasolver.forecast.files import forecast_file, write_forecast
from sigmasolver.recipes import changed, recipe_of
from sigmasolver.runs import Run
from sigmasolver.train.job import train_run

HEIGHT, WIDTH, FRAMES = 12, 20, 24
X, Y, T = 0.5 + 0.25 * np.arange(WIDTH), 3 + 2.0 * np.arange(HEIGHT), 0.01 * np.arange(FRAMES)
TINY = (
    f"task.grid={(HEIGHT, WIDTH)}", "task.history=4", "task.block=2", "task.horizon=4", "model.width=16",
    "model.depth=1", "model.heads=2", "model.slices=4", "model.modes=3", "train.updates=2", "train.batch=2",
    "train.checks=0",
)  # fmt: skip
CPU = torch.device("cpu")


def linear(reynolds):
    """velocity_x = 3 x + 5 y + t and velocity_y = 7 x - 2 y, with the axes (time, height, width) of the files."""
    t, y, x = np.meshgrid(T, Y, X, indexing="ij")
    return {"u": 3 * x + 5 * y + t + reynolds, "v": 7 * x - 2 * y + 0 * t}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("axes") / "cylinder"
    (home / "real").mkdir(parents=True)
    for reynolds in range(100, 130):
        with h5py.File(home / "real" / f"{reynolds}.h5", "w") as file:
            for name, values in linear(reynolds / 100).items():
                file[f"measured_data/{name}"] = values.astype(np.float32)
            file["x"], file["y"] = np.meshgrid(X, Y)
            file["measured_data/t"] = T
    return home


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "cylinder"
    train_run(changed(recipe_of("cylinder"), (*TINY, "task.train=20", "task.test=10")), folder, Run(path))
    return Run(path)


def slopes(dataset):
    """Derivatives of both components along x and y, which are constant."""
    derivatives = {}
    for name in ("velocity_x", "velocity_y"):
        for axis in ("x", "y"):
            derivative = dataset[name].astype(float).differentiate(axis).values
            np.testing.assert_allclose(derivative, derivative.mean(), rtol=1e-3)
            derivatives[name[-1] + axis] = round(float(derivative.mean()), 3)
    return derivatives


def test_inspect_names_the_axes_of_the_file(folder, tmp_path):
    output = CliRunner().invoke(app, ["inspect", str(folder)]).stdout
    assert "grid 12 × 20: y 12 points from 3 to 25 (open), x 20 points from 0.5 to 5.25 (open)" in output
    with open_data(folder) as data:
        assert data.header.layout.axis_names == ("y", "x") and data.header.grid == (HEIGHT, WIDTH)
        assert list(data.header.axes()) == ["y", "x", "t"]


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_forecast_files_name_axes_correctly(folder, tmp_path, suffix):
    with open_data(folder) as data:
        layout = replace(data.header.layout, fields=("velocity_x", "velocity_y"), units=("1", "1"))
        write_forecast(tmp_path / f"true{suffix}", data[:2][..., :2], layout, {})
    dataset = xarray.open_dataset(tmp_path / "true.nc") if suffix == ".nc" else xarray.open_zarr(tmp_path / "true.zarr")
    assert dataset.velocity_x.dims == ("trajectory", "time", "y", "x")
    np.testing.assert_array_equal(dataset.x, X)
    np.testing.assert_array_equal(dataset.y, Y)
    assert (dataset.x.attrs["axis"], dataset.y.attrs["axis"]) == ("X", "Y")
    assert slopes(dataset) == {"xx": 3, "xy": 5, "yx": 7, "yy": -2}
    dataset.close()
    with open_data(tmp_path / f"true{suffix}") as again:  # NetCDF and Zarr are always read as x, y
        assert again.header.layout.axis_names == ("x", "y") and again.header.grid == (WIDTH, HEIGHT)
        np.testing.assert_array_equal(again[0, 0, :, 0, 0], linear(1.0)["u"][0, 0].astype(np.float32))


def test_import_keeps_axis_names(folder, tmp_path):
    import_data(folder, tmp_path / "flow.h5")
    with open_data(folder) as files, open_store(tmp_path / "flow.h5") as store:
        assert store.header.layout.axis_names == ("y", "x")
        np.testing.assert_array_equal(store[:], files[:])
        np.testing.assert_array_equal(store.header.layout.coordinates[1], X)
    with h5py.File(tmp_path / "flow.h5") as file:
        np.testing.assert_array_equal(file["coordinates/x"], X)
        np.testing.assert_array_equal(file["coordinates/y"], Y)


def write_legacy(path, header, values):
    """Write a store from before axes had names: the first is called x."""
    with Writer(path, replace(header, layout=replace(header.layout, axes=())), len(values)) as writer:
        writer.append(values)


def test_legacy_store_gets_axis_names_and_keeps_its_fingerprint(folder, tmp_path):
    import_data(folder, tmp_path / "new.h5")
    with open_store(tmp_path / "new.h5") as new:
        write_legacy(tmp_path / "old.h5", new.header, new[:])
        with open_store(tmp_path / "old.h5") as old:
            assert old.fingerprint == new.fingerprint and old.header.layout.axis_names == ("y", "x")
            assert new.header.difference(old.header) is None
            np.testing.assert_array_equal(old.header.layout.coordinates[0], Y)


def test_forecast_continues_from_files_of_any_axis_order(folder, run, tmp_path):
    outs = {suffix: tmp_path / f"first{suffix}" for suffix in (".nc", ".zarr", ".h5", ".npz")}
    for out in outs.values():
        forecast_file(run.path, folder, 4, out, CPU)
    with open_store(outs[".h5"]) as store:
        first = store[:]
        assert store.header.layout.axis_names == ("y", "x")
        write_legacy(tmp_path / "before.h5", store.header, first)
    dataset = xarray.open_dataset(outs[".nc"])
    np.testing.assert_array_equal(dataset.velocity_y, first[..., 1])
    np.testing.assert_array_equal(dataset.x, X)
    dataset.close()
    for name, start in {**outs, "before": tmp_path / "before.h5"}.items():
        forecast_file(run.path, start, 4, tmp_path / f"{name}.npy", CPU)
    expected = np.load(tmp_path / ".h5.npy")
    for name in (".nc", ".zarr", ".npz", "before"):
        np.testing.assert_array_equal(np.load(tmp_path / f"{name}.npy"), expected)
    with np.load(outs[".npz"]) as arrays, open_data(outs[".npz"]) as again:
        assert arrays["axes"].tolist() == ["y", "x"] and again.header.layout.axis_names == ("y", "x")
        np.testing.assert_array_equal(arrays["x"], X)
        np.testing.assert_array_equal(again.header.layout.coordinates[0], Y)
    other = {"fields": first.swapaxes(2, 3), "names": np.array(["velocity_x", "velocity_y"]), "x": X, "y": Y}
    np.savez(tmp_path / "upright.npz", **other, times=0.01 * np.arange(4))  # named coordinates: x is the first axis
    forecast_file(run.path, tmp_path / "upright.npz", 4, tmp_path / "upright.npy", CPU, anyway=True)
    np.testing.assert_array_equal(np.load(tmp_path / "upright.npy"), expected)
    np.savez(tmp_path / "wrong.npz", **other, axes=np.array(["x", "t"]))
    with pytest.raises(ValueError, match=r"The axes in .*wrong\.npz are x, t; expected x, y in any order"):
        forecast_file(run.path, tmp_path / "wrong.npz", 4, tmp_path / "never.npy", CPU)
    np.savez(tmp_path / "bare.npz", fields=first[:1], names=np.array(["velocity_x", "velocity_y"]))
    forecast_file(run.path, tmp_path / "bare.npz", 4, tmp_path / "bare.nc", CPU)
    bare = xarray.open_dataset(tmp_path / "bare.nc")
    assert bare.velocity_x.dims == (
        "trajectory",
        "time",
        "y",
        "x",
    )  # arrays without names have the axes of the run's data
    np.testing.assert_array_equal(bare.velocity_x, expected[:1, ..., 0])


def test_domain_differs_by_axis_order(run):
    known = domain_of(run)
    assert known.axes == ("y", "x")
    swapped = Domain(known.fields, known.units, known.boundary, known.lengths[::-1], known.points[::-1],
                    known.time_steps)  # fmt: skip
    assert known.differences(swapped) == ["its axes are x, y, not y, x"]
    facts = run.read_json("data.json")
    del facts["domain"]["axes"]
    run.write_json("data.json", facts)  # as written before axes had names
    assert domain_of(run) == known


def test_join_records_transposes_maps_to_x_first(run):
    truth = np.arange(2 * 3 * HEIGHT * WIDTH * 2.0).reshape(2, 3, HEIGHT, WIDTH, 2)
    routing = truth[..., 0]
    findings = Findings(arrays={"truth": truth, "forecast": truth, "routing_L1": routing, "leads": np.arange(3)})
    findings.add("relative_l2", 1.0, field="velocity_x", lead=1, case=0)
    write_findings(run, "maps", findings, {"run": "cylinder", "task": "cylinder", "model": "m", "seed": 0})
    _, arrays = join_records(label_runs([run.path]), ("maps",))
    (joined,) = arrays["maps"].values()
    np.testing.assert_array_equal(joined["truth"], truth.swapaxes(2, 3))
    np.testing.assert_array_equal(joined["routing_L1"], routing.swapaxes(2, 3))
    np.testing.assert_array_equal(joined["leads"], np.arange(3))
    assert dimensions_in(domain_of(run)).lengths == pytest.approx((4.75, 22.0))


def test_header_rejects_invalid_axis_names():
    layout = Layout(("u",), ("1",), ("open",) * 2, (X, Y), np.zeros(1), ("x", "lat"))
    with pytest.raises(StoreError, match="The axis names are x, lat; expected x, y in any order"):
        Header(layout, "test", {})
    three = replace(layout, boundary=("open", "wall", "open"), coordinates=(Y, X, T), axes=("z", "x", "y"))
    assert three.upright == (1, 2, 0) and three.transposed(three.upright).boundary == ("wall", "open", "open")
    assert transpose_axes(np.zeros((1, 2, 3, 4, 5)), 1, three.upright).shape == (1, 3, 4, 2, 5)
    assert json.dumps(Header(replace(layout, axes=()), "test", {}).facts()) == json.dumps(
        Header(replace(layout, axes=("y", "x")), "test", {}).facts()
    )
