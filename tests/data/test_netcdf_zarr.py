"""Reading NetCDF and Zarr: axes, units and values, in place and imported, window by window."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sigmasolver.data import formats, isolated
from sigmasolver.data.formats import ReadOptions, guess_format, import_data, in_place, open_data
from sigmasolver.data.formats.netcdf_zarr_write import write_netcdf, write_zarr
from sigmasolver.data.header import Header
from sigmasolver.data.inspect import summarise
from sigmasolver.data.split import Split
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows, WindowSpec
from tests.data.test_own_data import one_sentence
from tests.data.waves import Waves

xarray = pytest.importorskip("xarray")

WAVES = Waves()
VALUES = WAVES.simulate(0, range(4)).numpy()
HEADER = Header(replace(WAVES.layout, boundary=("periodic", "wall")), "waves", {"viscosity": 0.05}, 0)

Save = Callable[[Path, "xarray.Dataset"], Path]


def save_nc4(folder: Path, data: xarray.Dataset) -> Path:
    compression = {"zlib": True, "shuffle": True}
    data.to_netcdf(folder / "a.nc", engine="h5netcdf", encoding={name: compression for name in data.data_vars})
    return folder / "a.nc"


def save_nc3(folder: Path, data: xarray.Dataset) -> Path:
    data.to_netcdf(folder / "a3.nc", engine="scipy")
    return folder / "a3.nc"


def save_zarr2(folder: Path, data: xarray.Dataset) -> Path:
    data.to_zarr(folder / "a2.zarr", zarr_format=2)
    return folder / "a2.zarr"


def save_zarr3(folder: Path, data: xarray.Dataset) -> Path:
    data.to_zarr(folder / "a3.zarr", zarr_format=3, consolidated=False)
    return folder / "a3.zarr"


SAVE = pytest.mark.parametrize("save", [save_nc4, save_nc3, save_zarr2, save_zarr3])


def weather() -> xarray.Dataset:
    """(member, time, lat, lon) with decreasing latitudes, one field and a mask that is constant in time."""
    u = np.random.default_rng(1).normal(size=(3, 7, 5, 8)).astype(np.float32)
    return xarray.Dataset(
        {
            "wind": (("member", "time", "lat", "lon"), u, {"units": "m s-1", "long_name": "eastward wind"}),
            "land": (("lat", "lon"), np.arange(40.0).reshape(5, 8), {"units": "1"}),
        },
        {
            "time": ("time", 0.5 * np.arange(7), {"units": "days since 2000-01-01"}),
            "lat": ("lat", np.linspace(60, 20, 5), {"units": "degrees_north", "boundary": "wall"}),
            "lon": ("lon", 45.0 * np.arange(8), {"units": "degrees_east"}),
        },
        {"title": "made up", "version": 3},
    )


@SAVE
def test_axes_identified_by_names_and_attributes(tmp_path: Path, save: Save) -> None:
    data = weather()
    source = save(tmp_path, data)
    wind = data.wind.values.transpose(0, 1, 3, 2)[..., ::-1]
    land = np.broadcast_to(data.land.values.T[:, ::-1], wind.shape)
    with open_data(source) as reader:
        np.testing.assert_array_equal(reader[:], np.stack([wind, land], -1).astype(np.float32))
        layout, parameters = reader.header.layout, reader.header.parameters
        assert (layout.fields, layout.units) == (("wind", "land"), ("m s-1", "1"))
        assert layout.boundary == ("periodic", "wall") and parameters["constant"] == ["land"]
        np.testing.assert_array_equal(layout.coordinates[1], [20, 30, 40, 50, 60])
        np.testing.assert_array_equal(layout.times, 0.5 * np.arange(7))
        attributes = parameters["attributes"]
        assert attributes["data set"] == {"title": "made up", "version": 3}
        assert attributes["axes"]["t"] == {"name": "time", "units": "days since 2000-01-01"}
        assert attributes["axes"]["x"] == {"name": "lon", "units": "degrees_east"}
        assert attributes["fields"]["wind"] == {"units": "m s-1", "long_name": "eastward wind"}
        unpickled = pickle.loads(pickle.dumps(reader))  # as data loader workers receive it
        np.testing.assert_array_equal(unpickled[2, 3], reader[2, 3])


@pytest.mark.parametrize(
    ("name", "attributes", "values", "boundary"),
    [
        ("lon", {}, 18.0 * np.arange(20), "periodic"),
        ("longitude", {"units": "degrees"}, 18.0 * np.arange(20) - 180, "periodic"),
        ("x", {"standard_name": "longitude"}, 18.0 * np.arange(20), "periodic"),
        ("x", {"units": "degrees east"}, 18.0 * np.arange(20), "periodic"),
        ("x", {}, 18.0 * np.arange(20), "open"),
        ("lon", {"units": "km"}, 18.0 * np.arange(20), "open"),
        ("lon", {}, 17.0 * np.arange(20), "open"),
        ("lon", {}, None, "open"),
    ],
)
def test_longitudes_of_the_full_circle_are_periodic(
    tmp_path: Path, name: str, attributes: dict[str, str], values: np.ndarray | None, boundary: str
) -> None:
    points = 360 if values is None else len(values)
    coordinates = {} if values is None else {name: (name, values, attributes)}
    u = np.random.default_rng(0).normal(size=(2, 3, points)).astype(np.float32)
    xarray.Dataset({"u": (("member", "time", name), u)}, coordinates).to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    with open_data(tmp_path / "a.nc") as reader:
        assert reader.header.layout.boundary == (boundary,)
        assert any("covers the full circle: taken as periodic" in note for note in reader.notes) == (
            boundary == "periodic"
        )


@SAVE
def test_reading_in_place_equals_import_bitwise(tmp_path: Path, save: Save) -> None:
    data = weather()
    data["wind"] = data.wind.astype(np.float64) / 3  # rounding to float32 must agree
    source = save(tmp_path, data)
    imported = import_data(source, tmp_path / "store.h5")
    assert any("taken as periodic" in note for note in imported.notes)
    with open_data(source) as reader, open_store(tmp_path / "store.h5") as store:
        assert reader.shape == store.shape and list(reader.digests) == list(store.digests)
        assert reader.as_recorded([former_fingerprint(source)]).header.difference(store.header) is None
        assert reader[:].tobytes() == store[:].tobytes()
        assert reader[1, 2:6:2, ::3].tobytes() == store[1, 2:6:2, ::3].tobytes()


def former_fingerprint(source: Path) -> str:
    """The fingerprint of files that are identified by name, size and modification time."""
    row = replace(guess_format(source), identified_by_values=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "FORMATS", (row, *formats.FORMATS))
        return open_data(source).fingerprint


@SAVE
def test_files_are_identified_by_values(tmp_path: Path, save: Save) -> None:
    source = save(tmp_path, weather())
    former, before = former_fingerprint(source), open_data(source)
    assert before.as_recorded([former]).fingerprint == former != before.fingerprint
    assert before.as_recorded([former]).digests != before.digests and not {"file", "state"} & set(
        before.header.parameters
    )
    assert before.as_recorded([before.fingerprint]) is before.as_recorded(["other"]) is before
    copy = tmp_path / f"copy{source.suffix}"
    (shutil.copytree if source.is_dir() else shutil.copy)(source, copy)
    for file in (copy, *copy.rglob("*")):
        os.utime(file, (0, 0))
    moved = open_data(copy)
    assert moved.fingerprint == before.fingerprint and moved.digests == before.digests
    assert moved.digests == [hashlib.sha256(np.ascontiguousarray(values).data).digest() for values in before]
    assert moved.as_recorded([former]) is moved
    shutil.rmtree(source) if source.is_dir() else source.unlink()
    data = weather()
    data.wind[1, 6, 4, 7] += 1
    changed = open_data(save(tmp_path, data))
    assert changed.fingerprint != before.fingerprint
    assert [new == old for new, old in zip(changed.digests, before.digests, strict=True)] == [True, False, True]


def test_fields_that_a_recipe_may_not_use_are_not_checked(tmp_path: Path) -> None:
    data = weather()
    data["land"] = data.land.where(data.land != 3).astype(np.float64) * 1e300  # NaN, and beyond float32
    reader = open_data(save_nc4(tmp_path, data))
    assert isinstance(reader, in_place.ForeignReader) and reader.examine().bad_labels() == []
    windows = Windows(reader, range(3), WindowSpec(("wind",), ("wind",), 2, 2))
    windows.check_finite("training")
    with pytest.raises(ValueError, match="contains non-finite values, the first in frame 0 of land"):
        Windows(reader, range(3), WindowSpec(("wind", "land"), ("wind",), 2, 2)).check_finite("training")


@SAVE
def test_boolean_mask_is_read_as_0_and_1(tmp_path: Path, save: Save) -> None:
    data = weather()
    inside = (data.land > 0).values
    results = []
    for kind in (bool, np.uint8):
        source = save(tmp_path, data.assign(land=(data.land.dims, inside.astype(kind))))
        with open_data(source, ReadOptions(mask="land")) as reader:
            channel = reader.header.layout.fields.index("land")
            np.testing.assert_array_equal(reader[1, 2, ..., channel], inside[::-1].T)
            results.append((reader[:], reader.fingerprint))
        shutil.rmtree(source) if source.is_dir() else source.unlink()
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_ranges_of_all_fields_are_noted(tmp_path: Path) -> None:
    data = weather()
    data["land"] = 1e5 + 1e-2 * data.land.astype(np.float64)
    reader = open_data(save_nc4(tmp_path, data))
    assert isinstance(reader, in_place.ForeignReader)
    (note,) = reader.examine().notes()
    assert note.startswith("land varies by only") and summarise(reader.path).problems() == [note]


@SAVE
def test_inspect_reads_the_values_once(tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save(tmp_path, weather())
    expected = open_data(source).fingerprint
    monkeypatch.setattr(in_place.ForeignReader, "examine", lambda *_: pytest.fail("read again"))
    assert summarise(source).fingerprint == expected and summarise(source, first=2).fingerprint is None


@SAVE
def test_values_are_hashed_once_per_process(tmp_path: Path, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several runs may be evaluated on the same files; changed files are hashed again."""
    source = save(tmp_path, weather())
    digests = open_data(source).digests
    with monkeypatch.context() as patch:
        patch.setattr(in_place.ForeignReader, "examine", lambda *_: pytest.fail("read again"))
        assert open_data(source).digests == digests
    for file in (source, *source.rglob("*")):
        os.utime(file, (0, 0))
    in_place._hashed.update({key: [] for key in in_place._hashed})
    assert open_data(source).digests == digests


def test_digests_are_independent_of_the_block_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = save_nc4(tmp_path, weather())
    whole = open_data(source).digests
    in_place._hashed.clear()
    monkeypatch.setattr(in_place, "_BLOCK", 2 * 5 * 8 * 2 * 4)  # two of seven frames
    assert open_data(source).digests == whole


@pytest.mark.parametrize("name", ["w.nc", "packed.nc", "w.zarr", "w2.zarr"])
def test_write_netcdf_and_zarr_round_trip(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if path.suffix == ".nc":
        write_netcdf(path, VALUES, HEADER, compress=name == "packed.nc")
    else:
        write_zarr(path, VALUES, HEADER, version=2 if name == "w2.zarr" else 3)
    with open_data(path) as reader:
        np.testing.assert_array_equal(reader[:], VALUES)
        assert reader.header.layout.boundary == ("periodic", "wall") and reader.header.layout.units == ("m", "1")
        for axis, expected in zip(reader.header.axes().values(), HEADER.axes().values(), strict=True):
            np.testing.assert_array_equal(axis, expected)
    with (xarray.open_dataset if path.suffix == ".nc" else xarray.open_zarr)(path) as data:
        np.testing.assert_array_equal(data.slope.values, VALUES[..., 1])
        assert data.height.dims == ("trajectory", "time", "x", "y") and data.height.units == "m"
    assert [file.name for file in tmp_path.iterdir()] == [name]


def bytes_read() -> int:
    """The number of bytes requested by the reading process so far."""
    assert isolated._process is not None
    text = Path(f"/proc/{isolated._process.child.pid}/io").read_text()
    return int(text.split("rchar:")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="counts bytes as Linux does")
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
@pytest.mark.parametrize("compress", [False, True])
def test_window_reads_only_its_chunks(tmp_path: Path, suffix: str, compress: bool) -> None:
    layout = replace(WAVES, grid=128, frames=64).layout
    values = np.random.default_rng(0).normal(size=(2, 64, 128, 128, 2)).astype(np.float32)
    path = tmp_path / f"a{suffix}"
    if suffix == ".nc":
        write_netcdf(path, values, Header(layout, "noise", {}), compress)
    else:
        write_zarr(path, values, Header(layout, "noise", {}), version=2 + compress)
    with open_data(path) as reader:
        before = bytes_read()
        window = reader[1, 30:34]
        count = bytes_read() - before
        np.testing.assert_array_equal(window, values[1, 30:34])
        # A compressed chunk is decompressed twice: once to verify it, once to read it.
        assert window.nbytes * 0.8 < count < 3 * window.nbytes < values.nbytes / 10
        before = bytes_read()
        reader[1, 30:34]
        assert bytes_read() - before < 2 * window.nbytes


def test_packed_values_are_decoded_and_fill_values_are_nan(tmp_path: Path) -> None:
    data = weather()[["wind"]]
    data.wind[0, 0, 0, 0] = np.nan
    packing = {"dtype": "i2", "scale_factor": 0.001, "add_offset": 1.0, "_FillValue": -32768}
    data.to_netcdf(tmp_path / "a.nc", engine="h5netcdf", encoding={"wind": packing})
    with open_data(tmp_path / "a.nc") as reader:
        expected = data.wind.values.transpose(0, 1, 3, 2)[..., ::-1, None]
        np.testing.assert_allclose(reader[:], expected, atol=6e-4)
        assert np.isnan(reader[0, 0, 0, -1, 0]) and np.isnan(reader[:]).sum() == 1


def test_component_axes_size_one_dimensions_and_skipped_variables(tmp_path: Path) -> None:
    flow = np.random.default_rng(2).normal(size=(4, 1, 6, 5, 2))
    data = xarray.Dataset(
        {
            "flow": (("time", "level", "y", "x", "component"), flow),
            "drag": (("time",), np.arange(4.0)),
            "profile": (("time", "y"), np.ones((4, 6))),
        },
        attrs={"boundary": "periodic, wall"},
    )
    data.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    imported = import_data(tmp_path / "a.nc", tmp_path / "a.h5")
    with open_store(tmp_path / "a.h5") as store:
        assert store.header.layout.fields == ("flow_0", "flow_1")
        assert store.header.layout.boundary == ("periodic", "wall") and store.shape == (1, 4, 5, 6, 2)
        np.testing.assert_array_equal(store[0], flow[:, 0].transpose(0, 2, 1, 3).astype(np.float32))
    notes = " ".join(imported.notes)
    assert "Skipped: drag (time), profile (time, y)." in notes and "dimensions of size 1: level" in notes
    assert "No x coordinates" in notes and "No times" in notes and "No units given for flow" in notes


@SAVE
@pytest.mark.filterwarnings("ignore:.*does not have a Zarr V3 specification")
def test_component_labels_and_skipped_staggered_fields(tmp_path: Path, save: Save) -> None:
    flow = np.random.default_rng(2).normal(size=(4, 6, 5, 2)).astype(np.float32)
    data = xarray.Dataset(
        {
            "flow": (("time", "x", "y", "variable"), flow),
            "face": (("time", "x_face", "y"), np.ones((4, 7, 5), np.float32)),
        },
        {"variable": ["u", "v"], "x_face": ("x_face", np.arange(7.0), {"axis": "X"})},
    )
    with open_data(save(tmp_path, data)) as reader:
        assert reader.header.layout.fields == ("flow_u", "flow_v")
        np.testing.assert_array_equal(reader[0], flow)
        assert any("Skipped: face (time, x_face, y)" in note for note in reader.notes)


def test_folder_with_parts_has_split(tmp_path: Path) -> None:
    for part, bounds in {"train": (0, 2), "valid": (2, 3), "test": (3, 4)}.items():
        write_netcdf(tmp_path / "set" / part / "a.nc", VALUES[slice(*bounds)], HEADER)
    with open_data(tmp_path / "set") as reader:
        assert reader.published_split == Split((0, 1), (2,), (3,))
        np.testing.assert_array_equal(reader[:], VALUES)
    flat = tmp_path / "flat"
    for index in (10, 9, 1):
        write_netcdf(flat / f"run{index}.nc", VALUES[index % 4 : index % 4 + 1], HEADER)
    with open_data(flat) as reader:
        assert reader.published_split is None
        np.testing.assert_array_equal(reader[:, -1], VALUES[[1, 1, 2], -1])
    coarse = replace(WAVES, grid=6)
    write_netcdf(flat / "run11.nc", coarse.simulate(0, [0]).numpy(), Header(coarse.layout, "waves", {}))
    with pytest.raises(ValueError, match=r"run11.nc and run1.nc differ in boundary; all must agree"):
        open_data(flat)


def invalid_files(folder: Path) -> dict[str, tuple[Path, str]]:
    folder.mkdir(exist_ok=True)
    data = weather()
    truncated = save_nc4(folder, data).rename(folder / "cut.nc")
    truncated.write_bytes(truncated.read_bytes()[:9000])
    truncated3 = save_nc3(folder, data).rename(folder / "cut3.nc")
    truncated3.write_bytes(truncated3.read_bytes()[:1500])
    text = folder / "text.nc"
    text.write_text("no such thing")
    empty = folder / "bare.nc"
    data.drop_vars(["wind", "land"]).to_netcdf(empty, engine="h5netcdf")
    unknown_dimension = folder / "odd.nc"
    data.rename(lon="ring").drop_vars("ring").to_netcdf(unknown_dimension, engine="h5netcdf")
    duplicate_axis = folder / "twice.nc"
    xarray.Dataset({"u": (("x", "lon"), np.ones((3, 4)))}).to_netcdf(duplicate_axis, engine="h5netcdf")
    unknown_boundary = folder / "ends.nc"
    data.assign_attrs(boundary="round").to_netcdf(unknown_boundary, engine="h5netcdf")
    corrupt_chunks = save_zarr2(folder, data).rename(folder / "torn.zarr")
    for chunk in (corrupt_chunks / "wind").rglob("0*"):
        if chunk.is_file():
            chunk.write_bytes(chunk.read_bytes()[:40])
    import zarr

    unnamed = folder / "nameless.zarr"
    zarr.open_group(unnamed, mode="w").create_array("u", data=np.ones((2, 3, 4)))
    return {
        "cut": (truncated, "truncated or corrupt"),
        "cut3": (truncated3, "truncated or corrupt"),
        "text": (text, "is not a NetCDF file"),
        "bare": (empty, "has no real-valued variable on axes x, y or z"),
        "odd": (unknown_dimension, "ring cannot be identified; rename"),
        "twice": (duplicate_axis, "several x dimensions"),
        "ends": (unknown_boundary, "choose from periodic, wall, open"),
        "torn": (corrupt_chunks, "truncated or corrupt"),
        "nameless": (unnamed, "have no dimension names"),
    }


def test_invalid_netcdf_zarr_files_raise_one_sentence(tmp_path: Path) -> None:
    for name, (path, message) in invalid_files(tmp_path / "bad").items():
        with pytest.raises(ValueError, match=message) as caught:
            import_data(path, tmp_path / f"{name}.h5")
        assert one_sentence(caught.value) and str(path) in str(caught.value), name


def test_corrupt_chunk_is_rejected(tmp_path: Path) -> None:
    path = save_nc4(tmp_path, weather())
    data = bytearray(path.read_bytes())
    offset = data.rindex(b"\x78\x5e") if b"\x78\x5e" in data else data.rindex(b"\x78\x9c")
    data[offset + 20 : offset + 60] = bytes(40)
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"corrupt"):
        import_data(path, tmp_path / "a.h5")


def test_import_selects_fields_and_checks_steady(tmp_path: Path) -> None:
    path = save_nc4(tmp_path, weather())
    import_data(path, tmp_path / "one.h5", names=["land"])
    with open_store(tmp_path / "one.h5") as store:
        assert store.shape == (1, 1, 8, 5, 1)
    with pytest.raises(ValueError, match=r"has no field 'wnd'; .*wind"):
        import_data(path, tmp_path / "two.h5", names=["wnd"])
    with pytest.raises(ValueError, match="has 7 frames, so it is not steady"):
        import_data(path, tmp_path / "two.h5", steady=True)


def test_missing_xarray_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_nc4(tmp_path, weather())
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    (shadow / "xarray.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(shadow), prepend=":")
    monkeypatch.setattr(isolated, "_process", None)
    with pytest.raises(ValueError, match=r"requires xarray, h5netcdf and zarr.* pip install 'sigmasolver\[data\]'"):
        open_data(path)
    assert isolated._process is not None
    isolated._process.end()
    monkeypatch.setattr(isolated, "_process", None)


def test_guess_format_netcdf_and_zarr(tmp_path: Path) -> None:
    write_zarr(tmp_path / "some.folder", VALUES, HEADER)
    assert guess_format(tmp_path / "some.folder").name == "zarr"
    write_netcdf(tmp_path / "a.nc", VALUES, HEADER)
    assert guess_format(tmp_path / "a.nc").name == "netcdf"
    shutil.rmtree(tmp_path / "some.folder")


@SAVE
def test_corrupt_netcdf_zarr_files_raise_one_sentence_or_read(tmp_path: Path, save: Save) -> None:
    source = save(tmp_path, weather())
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    for seed in range(5):
        rng = np.random.default_rng(seed)
        file = files[rng.integers(len(files))]
        original = file.read_bytes()
        data = bytearray(original[: rng.integers(len(original) + 1)] if seed == 0 else original)
        for offset in rng.integers(0, len(data), 4) if data else ():
            data[offset] = rng.integers(256)
        file.write_bytes(data)
        try:
            import_data(source, tmp_path / f"{seed}.h5")
        except ValueError as error:
            assert one_sentence(error)
        file.write_bytes(original)


def test_components_of_a_variable_are_selected_by_name(tmp_path: Path) -> None:
    """As `inspect` and a run list them: the variable w has the fields w_0 and w_1."""
    w, p = np.random.default_rng(0).normal(size=(2, 3, 4, 6, 5, 2)).astype(np.float32)
    dims = ("count", "time", "x", "y")
    data = xarray.Dataset({"w": ((*dims, "channel"), w), "p": (dims, p[..., 0])})
    data.to_netcdf(tmp_path / "a.nc", engine="h5netcdf")
    every = np.concatenate((w, p[..., :1]), axis=-1)
    for names, channels in (
        (("w_0", "w_1", "p"), [0, 1, 2]),
        (("w", "p"), [0, 1, 2]),
        (("p", "w_1"), [2, 1]),
        (("w_1",), [1]),
    ):
        with open_data(tmp_path / "a.nc", ReadOptions(fields=names)) as reader:
            assert reader.header.layout.fields == tuple(("w_0", "w_1", "p")[channel] for channel in channels)
            np.testing.assert_array_equal(reader[:], every[..., channels])
            np.testing.assert_array_equal(reader[1, 1:3], every[1, 1:3][..., channels])
    for name in ("w_2", "q"):
        with pytest.raises(ValueError, match=f"has no field '{name}'"):
            open_data(tmp_path / "a.nc", ReadOptions(fields=(name,)))
