"""Reading VTK image data: every encoding, series of numbered files, and collections."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sigmasolver.data.formats import guess_format, import_data, open_data
from sigmasolver.data.formats.vtk_image import open_image
from sigmasolver.data.split import Split
from sigmasolver.data.store import open_store
from sigmasolver.simulate.fixtures.vtk import ENCODINGS, write_series, write_vti
from tests.data.test_own_data import one_sentence
from tests.data.vtk import write_pvd, write_vtk
from tests.data.waves import Waves

RANDOM = np.random.default_rng(5)
SCALAR = RANDOM.normal(size=(50, 40, 9)).astype(np.float32)  # more than one block of 32 KiB
VECTOR = RANDOM.normal(size=(50, 40, 9, 3))
ORIGIN, SPACING = (-1.0, 0.5, 2.0), (0.1, 0.2, 0.5)


def check_image(path: Path) -> None:
    image = open_image(path)
    np.testing.assert_array_equal(image.arrays["p"].read(), SCALAR.transpose(2, 1, 0))
    np.testing.assert_array_equal(image.arrays["v"].read(), VECTOR.transpose(2, 1, 0, 3))
    for axis, n, o, s in zip(image.axes, SCALAR.shape, ORIGIN, SPACING, strict=True):
        np.testing.assert_array_equal(axis, o + np.arange(n) * s)
    assert image.field_data["TimeValue"] == 0.25


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("compress", [False, True])
def test_vti_round_trip_in_every_encoding(tmp_path: Path, encoding: str, compress: bool) -> None:
    write_vti(tmp_path / "a.vti", {"p": SCALAR, "v": VECTOR}, ORIGIN, SPACING, 0.25, encoding, compress, {"p": "Pa"})
    check_image(tmp_path / "a.vti")
    assert open_image(tmp_path / "a.vti").arrays["p"].unit == "Pa"


@pytest.mark.parametrize("binary", [False, True])
def test_legacy_vtk_round_trip(tmp_path: Path, binary: bool) -> None:
    write_vtk(tmp_path / "a.vtk", {"p": SCALAR, "v": VECTOR}, ORIGIN, SPACING, 0.25, binary)
    check_image(tmp_path / "a.vtk")


def test_legacy_vtk_with_cell_data_and_metadata(tmp_path: Path) -> None:
    (tmp_path / "a.vtk").write_text(
        "# vtk DataFile Version 5.1\n\nASCII\nDATASET STRUCTURED_POINTS\nDIMENSIONS 3 2 1\nSPACING 1 1 1\n"
        "ORIGIN 0 0 0\nCELL_DATA 2\nFIELD FieldData 1\nu 1 2 float\n1.5 2.5\nMETADATA\nINFORMATION 0\n\nPOINT_DATA 6\n"
        "SCALARS p double\nLOOKUP_TABLE default\n1 2 3\n4 5 6\nVECTORS v float\n" + "1 2 3 " * 6 + "\n"
    )
    image = open_image(tmp_path / "a.vtk")
    np.testing.assert_array_equal(image.arrays["p"].read()[0], [[1, 2, 3], [4, 5, 6]])
    assert image.skipped == ("u",) and image.arrays["v"].shape == (1, 2, 3, 3)


def test_vti_big_endian_with_uint32_header(tmp_path: Path) -> None:
    """As in the description of the format: big-endian, UInt32, an inline array whose size is encoded separately."""
    import base64

    data = np.array([1.0, 2.0, 3.0, 4.0], ">f4").tobytes()
    text = base64.b64encode(np.array([16], ">u4").tobytes()) + base64.b64encode(data)
    (tmp_path / "a.vti").write_text(
        '<VTKFile type="ImageData" version="0.1" byte_order="BigEndian"><ImageData WholeExtent="2 3 5 6 0 0" '
        'Origin="0 0 0" Spacing="1 2 1"><Piece Extent="2 3 5 6 0 0"><PointData><DataArray type="Float32" Name="u" '
        f'format="binary">\n  {text.decode()}\n</DataArray></PointData></Piece></ImageData></VTKFile>'
    )
    image = open_image(tmp_path / "a.vti")
    np.testing.assert_array_equal(image.arrays["u"].read()[0], [[1, 2], [3, 4]])
    np.testing.assert_array_equal(image.axes[1], [10, 12])


def test_cell_data_coordinates_are_cell_centres(tmp_path: Path) -> None:
    write_vti(tmp_path / "a.vti", {"u": SCALAR[..., :1]}, (0, 0, 0), (2, 1, 1), cells=True)
    image = open_image(tmp_path / "a.vti")
    np.testing.assert_array_equal(image.axes[0], 1 + 2 * np.arange(50))
    np.testing.assert_array_equal(image.arrays["u"].read()[0].T, SCALAR[..., 0])


WAVES = Waves()
VALUES = WAVES.simulate(0, range(3)).numpy()


def test_series_in_place_equals_import(tmp_path: Path) -> None:
    write_series(tmp_path / "runs", VALUES, WAVES.layout)
    assert guess_format(tmp_path / "runs").name == "vtk"
    import_data(tmp_path / "runs", tmp_path / "store.h5")
    with open_data(tmp_path / "runs") as in_place, open_store(tmp_path / "store.h5") as store:
        assert (in_place.header.layout.axis_names, list(in_place.digests)) == (("x", "y"), list(store.digests))
        assert in_place[:].tobytes() == store[:].tobytes() == VALUES.tobytes()
        layout = in_place.header.layout
        assert (layout.fields, layout.units, layout.boundary) == (("height", "slope"), ("m", "1"), ("periodic",) * 2)
        np.testing.assert_array_equal(layout.times, WAVES.layout.times)
        for axis, expected in zip(layout.coordinates, WAVES.layout.coordinates, strict=True):
            np.testing.assert_allclose(axis, expected, rtol=1e-12)


def test_window_opens_only_its_files(tmp_path: Path) -> None:
    write_series(tmp_path / "runs", VALUES, WAVES.layout)
    with open_data(tmp_path / "runs") as reader:
        for frame in (0, 1, 4):
            (tmp_path / "runs" / "run_1" / f"frame_{frame:04d}.vti").unlink()
        np.testing.assert_array_equal(reader[1, 2:4], VALUES[1, 2:4])


def test_pvd_gives_times_and_folders_give_split(tmp_path: Path) -> None:
    for part, index in {"train": 0, "val": 1, "test": 2}.items():
        folder = tmp_path / "set" / part
        write_series(folder, VALUES[index : index + 1], WAVES.layout)
        names = {f"run_0/frame_{number:04d}.vti": 0.5 * number for number in (4, 2)}
        write_pvd(folder / "flow.pvd", dict(reversed(names.items())))
    with open_data(tmp_path / "set") as reader:
        assert reader.published_split == Split((0,), (1,), (2,))
        np.testing.assert_array_equal(reader.header.layout.times, [1, 2])
        np.testing.assert_array_equal(reader[:], VALUES[:, [2, 4]])


def test_numbers_in_file_names_are_fallback_times(tmp_path: Path) -> None:
    for run in ("a", "b"):
        for number in (10, 9, 100):
            write_vtk(tmp_path / f"{run}_{number}.vtk", {"u": np.full((4, 3, 1), number, np.float32)}, ORIGIN, SPACING)
    imported = import_data(tmp_path, tmp_path.parent / f"{tmp_path.name}.h5")
    with open_store(imported.path) as store:
        assert len(store) == 2
        np.testing.assert_array_equal(store.header.layout.times, [9, 10, 100])
        np.testing.assert_array_equal(store[1, :, 0, 0, 0], [9, 10, 100])
    assert any("numbers in the file names" in note for note in imported.notes)
    assert any("unevenly spaced" in note for note in imported.notes)


def test_vector_components_become_named_fields(tmp_path: Path) -> None:
    write_vti(tmp_path / "a.vti", {"p": SCALAR, "v": VECTOR}, ORIGIN, SPACING, strings={"case": "cavity"})
    with open_data(tmp_path / "a.vti") as reader:
        assert reader.header.layout.fields == ("p", "v_x", "v_y", "v_z") and reader.shape == (1, 1, 50, 40, 9, 4)
        np.testing.assert_array_equal(reader[0, 0][..., 2], VECTOR[..., 1].astype(np.float32))
        assert reader.header.parameters["attributes"]["data set"] == {"case": "cavity"}


def invalid_files(folder: Path) -> dict[str, tuple[Path, str]]:
    folder.mkdir()
    paths = {name: folder / name / "a.vti" for name in ("cut", "short", "packed", "grid", "bomb", "none", "odd")}
    for path in paths.values():
        write_vti(path, {"p": SCALAR}, ORIGIN, SPACING, compress=True)
    paths["cut"].write_bytes(paths["cut"].read_bytes()[:400])
    paths["short"].write_bytes(paths["short"].read_bytes()[:-3000])
    for name, old, new in [
        ("packed", b"vtkZLibDataCompressor", b"vtkLZ4DataCompressor"),
        ("grid", b'type="ImageData"', b'type="RectilinearGrid"'),
        ("bomb", b"?>", b'?><!DOCTYPE a [<!ENTITY b "c">]>'),
        ("none", b"PointData", b"FieldData"),
        ("odd", b"Float32", b"Bit"),
    ]:
        paths[name].write_bytes(paths[name].read_bytes().replace(old, new))
    legacy = folder / "legacy.vtk"
    write_vtk(legacy, {"p": SCALAR}, ORIGIN, SPACING)
    legacy.write_bytes(legacy.read_bytes()[:-100])
    mesh = folder / "mesh.vtk"
    mesh.write_text("# vtk DataFile Version 3.0\n\nASCII\nDATASET UNSTRUCTURED_GRID\nPOINTS 0 float\n")
    pvd = folder / "a.pvd"
    write_pvd(pvd, {"gone.vti": 0.0})
    uneven = folder / "uneven"
    write_vti(uneven / "f_0.vti", {"p": SCALAR}, ORIGIN, SPACING)
    write_vti(uneven / "f_1.vti", {"p": SCALAR[:-1]}, ORIGIN, SPACING)
    return {
        "cut": (paths["cut"], "truncated or corrupt"),
        "short": (paths["short"], "truncated or corrupt"),
        "packed": (paths["packed"], "compressed with vtkLZ4DataCompressor"),
        "grid": (paths["grid"], "only ImageData is supported"),
        "bomb": (paths["bomb"], "document type"),
        "none": (paths["none"], "no point or cell arrays"),
        "odd": (paths["odd"], "has type Bit; expected real numbers"),
        "legacy": (legacy, "truncated or corrupt"),
        "mesh": (mesh, "only STRUCTURED_POINTS is supported"),
        "pvd": (pvd, "lists files that do not exist: gone.vti"),
        "uneven": (uneven, "f_1.vti has 'p' of shape"),
    }


def test_invalid_vtk_files_raise_one_sentence(tmp_path: Path) -> None:
    for name, (path, message) in invalid_files(tmp_path / "bad").items():
        with pytest.raises(ValueError, match=message) as caught:
            import_data(path, tmp_path / f"{name}.h5")
        assert one_sentence(caught.value) and str(path) in str(caught.value), name


@pytest.mark.parametrize("seed", range(40))
def test_corrupt_vtk_files_raise_one_sentence_or_read(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    path = tmp_path / ("a.vti" if seed % 2 else "a.vtk")
    fields = {"p": SCALAR[:6, :5, :2], "v": VECTOR[:6, :5, :2]}
    if seed % 2:
        write_vti(path, fields, ORIGIN, SPACING, 0.5, ENCODINGS[seed % 4], bool(seed % 3))
    else:
        write_vtk(path, fields, ORIGIN, SPACING, 0.5, bool(seed % 4))
    data = bytearray(path.read_bytes())
    for offset in rng.integers(0, len(data), 6):
        data[offset] = rng.integers(0, 256)
    path.write_bytes(data[: rng.integers(len(data) // 2, len(data) + 1)])
    try:
        import_data(path, tmp_path / "a.h5")
    except ValueError as error:
        assert one_sentence(error)
