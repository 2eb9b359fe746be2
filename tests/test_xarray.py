"""Conversion from and to xarray: names, units, coordinates and times, and labelled forecasts."""

import numpy as np
import pytest
import torch

import sigmasolver
from sigmasolver.data.layout import Layout
from sigmasolver.forecast import Rollout

xarray = pytest.importorskip("xarray")
RANDOM = np.random.default_rng(0)


def dataset(**extra):
    values = RANDOM.normal(size=(3, 5, 8, 6)).astype(np.float32)
    dims = ("trajectory", "time", "x", "y")
    coordinates = {
        "time": 0.5 * np.arange(5),
        "x": ("x", np.arange(8.0) / 8, {"boundary": "periodic"}),
        "y": np.arange(6.0),
    }
    fields = {"u": (dims, values, {"units": "m/s"}), "v": (dims, 2 * values, {"units": "Pa"})}
    return xarray.Dataset({**fields, **extra}, coordinates)


def test_dataset_round_trip_through_store(tmp_path):
    original = dataset()
    with sigmasolver.open(original, tmp_path / "flow.h5") as store:
        layout = store.header.layout
        assert (layout.fields, layout.units, layout.boundary) == (("u", "v"), ("m/s", "Pa"), ("periodic", "open"))
        np.testing.assert_array_equal(layout.times, original.time)
        values = store[:]
    np.testing.assert_array_equal(values[..., 1], original.v)
    converted = Rollout(torch.from_numpy(values), None, layout.fields).to_xarray(layout)
    xarray.testing.assert_equal(converted, original)
    assert converted.u.attrs["units"] == "m/s" and converted.x.attrs["boundary"] == "periodic"


def test_open_dataset_in_any_order_of_dimensions(tmp_path):
    original = dataset()
    with sigmasolver.open_dataset(original, tmp_path / "a.h5") as store:
        expected = store[:]
    transposed = original.transpose("y", "time", "x", "trajectory").rename(time="t", trajectory="sample")
    with sigmasolver.open_dataset(transposed, tmp_path / "b.h5") as store:
        np.testing.assert_array_equal(store[:], expected)


def test_dataset_equals_its_netcdf_file(tmp_path):
    """With a decreasing axis, attributes, and dimension names of the CF conventions."""
    data = dataset(depth=(("x", "y"), np.arange(48.0).reshape(8, 6))).rename(x="lon", y="lat").assign_attrs(title="a")
    data = data.isel(lat=slice(None, None, -1))
    data.to_netcdf(tmp_path / "flow.nc", engine="h5netcdf")
    with sigmasolver.open(data, tmp_path / "a.h5") as memory, sigmasolver.open(tmp_path / "flow.nc") as file:
        layout, expected = memory.header.layout, file.header.layout
        assert (layout.fields, layout.units, layout.boundary) == (expected.fields, expected.units, expected.boundary)
        for axis, expected_axis in zip(
            (layout.times, *layout.coordinates), (expected.times, *expected.coordinates), strict=True
        ):
            np.testing.assert_array_equal(axis, expected_axis)
        np.testing.assert_array_equal(memory[:], file[:])
        parameters, expected_parameters = memory.header.parameters, file.header.parameters
        assert parameters["constant"] == expected_parameters["constant"] == ["depth"]
        assert parameters["attributes"]["data set"] == {"title": "a"} == expected_parameters["attributes"]["data set"]


def test_open_dataset_broadcasts_constant_field_and_selects_fields(tmp_path):
    data = dataset(depth=(("x", "y"), np.arange(48.0).reshape(8, 6)))
    with sigmasolver.open_dataset(data, tmp_path / "a.h5", fields=["depth", "u"]) as store:
        values = store[:]
    assert values.shape == (3, 5, 8, 6, 2)
    np.testing.assert_array_equal(values[..., 0], np.broadcast_to(data.depth, (3, 5, 8, 6)))
    np.testing.assert_array_equal(values[..., 1], data.u)


def test_open_dataset_steady_field_and_dates(tmp_path):
    steady = xarray.Dataset({"p": (("x",), np.arange(9.0))})
    with sigmasolver.open_dataset(steady, tmp_path / "a.h5", steady=True) as store:
        assert store.shape == (1, 1, 9, 1)
    dated = dataset().assign_coords(time=np.datetime64("2020-01-01") + np.arange(5) * np.timedelta64(6, "h"))
    with sigmasolver.open_dataset(dated, tmp_path / "b.h5") as store:
        assert store.header.layout.times.tolist() == [21600.0 * k for k in range(5)]


def test_rollout_to_xarray_labels_lead():
    forecast = sigmasolver.load("darcy").rollout(torch.full((2, 1, 16, 16, 1), 7.5), 1).to_xarray()
    assert dict(forecast.sizes) == {"trajectory": 2, "lead": 1, "x": 16, "y": 16} and forecast.lead.values.tolist() == [
        1
    ]
    assert list(forecast.data_vars) == ["pressure"]


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda data: data, {"out": None}, "with out="),
        (lambda data: data, {"fields": ["w"]}, "The data set has no field 'w'"),
        (lambda data: data, {"steady": True}, "has 5 frames, so it is not steady"),
        (lambda data: data.isel(x=0, y=0), {}, "has no real-valued variable on axes x, y or z"),
        (lambda data: data.astype("U5"), {}, "has no real-valued variable"),
        (lambda data: data.assign_coords(y=list("abcdef")), {}, "coordinate y has dtype"),
        (
            lambda data: data.assign_coords(y=("y", np.arange(6.0), {"boundary": "sticky"})),
            {},
            "'sticky' for y; choose",
        ),
    ],
)
def test_open_dataset_errors_are_one_sentence_and_write_nothing(change, options, message, tmp_path):
    with pytest.raises(ValueError, match=message) as caught:
        sigmasolver.open_dataset(change(dataset()), **{"out": tmp_path / "a.h5", **options})
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_to_xarray_rejects_layout_of_another_grid():
    layout = Layout(("u",), ("1",), ("open",), (np.arange(4.0),), np.arange(2.0))
    with pytest.raises(ValueError, match=r"layout has \(4,\) points, but the values have \(5,\)"):
        Rollout(torch.zeros(1, 2, 5, 1), None, ("u",)).to_xarray(layout)
