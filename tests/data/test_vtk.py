"""VTK image data in every encoding arrive as written, as series of numbered files and as collections."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sigmasolver.data.formats import guess_kind, import_data, open_data
from sigmasolver.data.formats.vtk_image import open_image
from sigmasolver.data.split import Split
from sigmasolver.data.store import open_store
from sigmasolver.simulate.fixtures.vtk import ENCODINGS, write_pvd, write_series, write_vti, write_vtk
from tests.data.test_own_data import one_sentence
from tests.data.waves import Waves

RANDOM = np.random.default_rng(5)
SCALAR = RANDOM.normal(size=(50, 40, 9)).astype(np.float32)  # more than one block of 32 KiB
VECTOR = RANDOM.normal(size=(50, 40, 9, 3))
ORIGIN, SPACING = (-1.0, 0.5, 2.0), (0.1, 0.2, 0.5)


def arrives(path: Path) -> None:
    image = open_image(path)
    np.testing.assert_array_equal(image.arrays["p"].read(), SCALAR.transpose(2, 1, 0))
    np.testing.assert_array_equal(image.arrays["v"].read(), VECTOR.transpose(2, 1, 0, 3))
    for axis, n, o, s in zip(image.axes, SCALAR.shape, ORIGIN, SPACING, strict=True):
        np.testing.assert_array_equal(axis, o + np.arange(n) * s)
    assert image.field_data["TimeValue"] == 0.25


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("compress", [False, True])
def test_every_encoding_of_a_vti(tmp_path: Path, encoding: str, compress: bool) -> None:
    write_vti(tmp_path / "a.vti", {"p": SCALAR, "v": VECTOR}, ORIGIN, SPACING, 0.25, encoding, compress, {"p": "Pa"})
    arrives(tmp_path / "a.vti")
    assert open_image(tmp_path / "a.vti").arrays["p"].unit == "Pa"


@pytest.mark.parametrize("binary", [False, True])
def test_the_legacy_form(tmp_path: Path, binary: bool) -> None:
    write_vtk(tmp_path / "a.vtk", {"p": SCALAR, "v": VECTOR}, ORIGIN, SPACING, 0.25, binary)
    arrives(tmp_path / "a.vtk")


def test_a_legacy_file_as_other_programs_write_it(tmp_path: Path) -> None:
    (tmp_path / "a.vtk").write_text(
        "# vtk DataFile Version 5.1\n\nASCII\nDATASET STRUCTURED_POINTS\nDIMENSIONS 3 2 1\nSPACING 1 1 1\n"
        "ORIGIN 0 0 0\nCELL_DATA 2\nFIELD FieldData 1\nu 1 2 float\n1.5 2.5\nMETADATA\nINFORMATION 0\n\nPOINT_DATA 6\n"
        "SCALARS p double\nLOOKUP_TABLE default\n1 2 3\n4 5 6\nVECTORS v float\n" + "1 2 3 " * 6 + "\n"
    )
    image = open_image(tmp_path / "a.vtk")
    np.testing.assert_array_equal(image.arrays["p"].read()[0], [[1, 2, 3], [4, 5, 6]])
    assert image.skipped == ("u",) and image.arrays["v"].shape == (1, 2, 3, 3)


def test_a_vti_by_hand_with_sizes_of_four_bytes(tmp_path: Path) -> None:
    """As the file-format description gives it: big-endian, UInt32, an inline array whose size is encoded apart."""
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


def test_cells_lie_between_the_points(tmp_path: Path) -> None:
    write_vti(tmp_path / "a.vti", {"u": SCALAR[..., :1]}, (0, 0, 0), (2, 1, 1), cells=True)
    image = open_image(tmp_path / "a.vti")
    np.testing.assert_array_equal(image.axes[0], 1 + 2 * np.arange(50))
    np.testing.assert_array_equal(image.arrays["u"].read()[0].T, SCALAR[..., 0])


WAVES = Waves()
VALUES = WAVES.simulate(0, range(3)).numpy()


def test_series_in_place_are_what_an_import_gives(tmp_path: Path) -> None:
    write_series(tmp_path / "runs", VALUES, WAVES.layout)
    assert guess_kind(tmp_path / "runs").name == "vtk"
    import_data(tmp_path / "runs", tmp_path / "store.h5")
    with open_data(tmp_path / "runs") as here, open_store(tmp_path / "store.h5") as imported:
        assert here.header.difference(imported.header) is None
        assert here[:].tobytes() == imported[:].tobytes() == VALUES.tobytes()
        layout = here.header.layout
        assert (layout.fields, layout.units, layout.boundary) == (("height", "slope"), ("m", "1"), ("periodic",) * 2)
        np.testing.assert_array_equal(layout.times, WAVES.layout.times)
        for mine, theirs in zip(layout.coordinates, WAVES.layout.coordinates, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12)


def test_a_window_opens_its_own_files_only(tmp_path: Path) -> None:
    write_series(tmp_path / "runs", VALUES, WAVES.layout)
    with open_data(tmp_path / "runs") as reader:
        for frame in (0, 1, 4):
            (tmp_path / "runs" / "run_1" / f"frame_{frame:04d}.vti").unlink()
        np.testing.assert_array_equal(reader[1, 2:4], VALUES[1, 2:4])


def test_collections_give_times_and_folders_a_split(tmp_path: Path) -> None:
    for part, index in {"train": 0, "val": 1, "test": 2}.items():
        folder = tmp_path / "set" / part
        write_series(folder, VALUES[index : index + 1], WAVES.layout)
        names = {f"run_0/frame_{number:04d}.vti": 0.5 * number for number in (4, 2)}
        write_pvd(folder / "flow.pvd", dict(reversed(names.items())))
    with open_data(tmp_path / "set") as reader:
        assert reader.published_split == Split((0,), (1,), (2,))
        np.testing.assert_array_equal(reader.header.layout.times, [1, 2])
        np.testing.assert_array_equal(reader[:], VALUES[:, [2, 4]])


def test_numbers_in_names_are_times_where_nothing_else_is(tmp_path: Path) -> None:
    for run in ("a", "b"):
        for number in (10, 9, 100):
            write_vtk(tmp_path / f"{run}_{number}.vtk", {"u": np.full((4, 3, 1), number, np.float32)}, ORIGIN, SPACING)
    made = import_data(tmp_path, tmp_path.parent / f"{tmp_path.name}.h5")
    with open_store(made.path) as store:
        assert len(store) == 2
        np.testing.assert_array_equal(store.header.layout.times, [9, 10, 100])
        np.testing.assert_array_equal(store[1, :, 0, 0, 0], [9, 10, 100])
    assert any("numbers in the file names" in note for note in made.notes)
    assert any("unevenly spaced" in note for note in made.notes)


def test_vectors_are_fields_with_the_names_of_their_components(tmp_path: Path) -> None:
    write_vti(tmp_path / "a.vti", {"p": SCALAR, "v": VECTOR}, ORIGIN, SPACING, strings={"case": "cavity"})
    with open_data(tmp_path / "a.vti") as reader:
        assert reader.header.layout.fields == ("p", "v_x", "v_y", "v_z") and reader.shape == (1, 1, 50, 40, 9, 4)
        np.testing.assert_array_equal(reader[0, 0][..., 2], VECTOR[..., 1].astype(np.float32))
        assert reader.header.parameters["attributes"]["data set"] == {"case": "cavity"}


def bad(folder: Path) -> dict[str, tuple[Path, str]]:
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


def test_what_is_wrong_is_said_in_one_sentence(tmp_path: Path) -> None:
    for name, (path, sentence) in bad(tmp_path / "bad").items():
        with pytest.raises(ValueError, match=sentence) as caught:
            import_data(path, tmp_path / f"{name}.h5")
        assert one_sentence(caught.value) and str(path) in str(caught.value), name


@pytest.mark.parametrize("seed", range(40))
def test_scribbled_files_give_a_sentence_or_values(tmp_path: Path, seed: int) -> None:
    chance = np.random.default_rng(seed)
    path = tmp_path / ("a.vti" if seed % 2 else "a.vtk")
    small = {"p": SCALAR[:6, :5, :2], "v": VECTOR[:6, :5, :2]}
    if seed % 2:
        write_vti(path, small, ORIGIN, SPACING, 0.5, ENCODINGS[seed % 4], bool(seed % 3))
    else:
        write_vtk(path, small, ORIGIN, SPACING, 0.5, bool(seed % 4))
    data = bytearray(path.read_bytes())
    for place in chance.integers(0, len(data), 6):
        data[place] = chance.integers(0, 256)
    path.write_bytes(data[: chance.integers(len(data) // 2, len(data) + 1)])
    try:
        import_data(path, tmp_path / "a.h5")
    except ValueError as error:
        assert one_sentence(error)
