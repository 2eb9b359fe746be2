"""xarray in and out: names, units, coordinates and times survive, and a forecast comes back labelled."""

import numpy as np
import pytest
import torch

import sigmasolver
from sigmasolver.data.layout import Layout
from sigmasolver.forecast import Rollout

xarray = pytest.importorskip("xarray")
RANDOM = np.random.default_rng(0)


def dataset(**more):
    values = RANDOM.normal(size=(3, 5, 8, 6)).astype(np.float32)
    dims = ("trajectory", "time", "x", "y")
    coordinates = {
        "time": 0.5 * np.arange(5),
        "x": ("x", np.arange(8.0) / 8, {"boundary": "periodic"}),
        "y": np.arange(6.0),
    }
    made = {"u": (dims, values, {"units": "m/s"}), "v": (dims, 2 * values, {"units": "Pa"})}
    return xarray.Dataset({**made, **more}, coordinates)


def test_a_dataset_becomes_a_store_and_comes_back(tmp_path):
    given = dataset()
    with sigmasolver.open(given, tmp_path / "flow.h5") as store:
        layout = store.header.layout
        assert (layout.fields, layout.units, layout.boundary) == (("u", "v"), ("m/s", "Pa"), ("periodic", "open"))
        np.testing.assert_array_equal(layout.times, given.time)
        values = store[:]
    np.testing.assert_array_equal(values[..., 1], given.v)
    back = Rollout(torch.from_numpy(values), None, layout.fields).to_xarray(layout)
    xarray.testing.assert_equal(back, given)
    assert back.u.attrs["units"] == "m/s" and back.x.attrs["boundary"] == "periodic"


def test_the_order_of_dimensions_does_not_matter(tmp_path):
    given = dataset()
    with sigmasolver.open_dataset(given, tmp_path / "a.h5") as store:
        plain = store[:]
    turned = given.transpose("y", "time", "x", "trajectory").rename(time="t", trajectory="sample")
    with sigmasolver.open_dataset(turned, tmp_path / "b.h5") as store:
        np.testing.assert_array_equal(store[:], plain)


def test_a_dataset_is_read_as_its_netcdf_file(tmp_path):
    """Also an axis that runs downwards, attributes, and dimensions with names of the CF conventions."""
    given = dataset(depth=(("x", "y"), np.arange(48.0).reshape(8, 6))).rename(x="lon", y="lat").assign_attrs(title="a")
    given = given.isel(lat=slice(None, None, -1))
    given.to_netcdf(tmp_path / "flow.nc", engine="h5netcdf")
    with sigmasolver.open(given, tmp_path / "a.h5") as mine, sigmasolver.open(tmp_path / "flow.nc") as theirs:
        one, other = mine.header.layout, theirs.header.layout
        assert (one.fields, one.units, one.boundary) == (other.fields, other.units, other.boundary)
        for ours, its in zip((one.times, *one.coordinates), (other.times, *other.coordinates), strict=True):
            np.testing.assert_array_equal(ours, its)
        np.testing.assert_array_equal(mine[:], theirs[:])
        kept, expected = mine.header.parameters, theirs.header.parameters
        assert kept["constant"] == expected["constant"] == ["depth"]
        assert kept["attributes"]["data set"] == {"title": "a"} == expected["attributes"]["data set"]


def test_a_constant_field_is_repeated_and_fields_are_chosen(tmp_path):
    given = dataset(depth=(("x", "y"), np.arange(48.0).reshape(8, 6)))
    with sigmasolver.open_dataset(given, tmp_path / "a.h5", fields=["depth", "u"]) as store:
        values = store[:]
    assert values.shape == (3, 5, 8, 6, 2)
    np.testing.assert_array_equal(values[..., 0], np.broadcast_to(given.depth, (3, 5, 8, 6)))
    np.testing.assert_array_equal(values[..., 1], given.u)


def test_one_steady_field_and_dates(tmp_path):
    steady = xarray.Dataset({"p": (("x",), np.arange(9.0))})
    with sigmasolver.open_dataset(steady, tmp_path / "a.h5", steady=True) as store:
        assert store.shape == (1, 1, 9, 1)
    dated = dataset().assign_coords(time=np.datetime64("2020-01-01") + np.arange(5) * np.timedelta64(6, "h"))
    with sigmasolver.open_dataset(dated, tmp_path / "b.h5") as store:
        assert store.header.layout.times.tolist() == [21600.0 * k for k in range(5)]


def test_a_forecast_is_labelled_by_lead():
    forecast = sigmasolver.load("darcy").rollout(torch.full((2, 1, 16, 16, 1), 7.5), 1).to_xarray()
    assert dict(forecast.sizes) == {"trajectory": 2, "lead": 1, "x": 16, "y": 16} and forecast.lead.values.tolist() == [
        1
    ]
    assert list(forecast.data_vars) == ["pressure"]


@pytest.mark.parametrize(
    ("change", "more", "says"),
    [
        (lambda one: one, {"out": None}, "with out="),
        (lambda one: one, {"fields": ["w"]}, "The data set has no field 'w'"),
        (lambda one: one, {"steady": True}, "has 5 frames, so it is not steady"),
        (lambda one: one.isel(x=0, y=0), {}, "has no real-valued variable on axes x, y or z"),
        (lambda one: one.astype("U5"), {}, "has no real-valued variable"),
        (lambda one: one.assign_coords(y=list("abcdef")), {}, "coordinate y has dtype"),
        (lambda one: one.assign_coords(y=("y", np.arange(6.0), {"boundary": "sticky"})), {}, "'sticky' for y; choose"),
    ],
)
def test_mistakes_are_one_sentence_and_leave_nothing(change, more, says, tmp_path):
    with pytest.raises(ValueError, match=says) as caught:
        sigmasolver.open_dataset(change(dataset()), **{"out": tmp_path / "a.h5", **more})
    assert "\n" not in str(caught.value) and not list(tmp_path.iterdir())


def test_a_layout_of_another_grid_is_refused():
    layout = Layout(("u",), ("1",), ("open",), (np.arange(4.0),), np.arange(2.0))
    with pytest.raises(ValueError, match=r"layout has \(4,\) points, but the values have \(5,\)"):
        Rollout(torch.zeros(1, 2, 5, 1), None, ("u",)).to_xarray(layout)
