"""The Well, PDEBench, PDEArena and PyTorch files: a small file of each schema is read with correct axes and values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from sigmasolver.data.formats import guess_format, import_data, open_data, read_history
from sigmasolver.data.formats.the_well import read_stats
from sigmasolver.data.layout import Layout
from sigmasolver.data.normalise import fit
from sigmasolver.data.split import Split
from sigmasolver.data.store import open_store
from sigmasolver.simulate.fixtures.hdf5_sets import write_pdearena, write_pdebench
from sigmasolver.simulate.fixtures.the_well import write_well, write_well_file
from sigmasolver.train.infer_recipe import UserChoices, infer_recipe
from tests.data.test_own_data import one_sentence

RANDOM = np.random.default_rng(7)
FLOW = RANDOM.normal(size=(20, 5, 6, 4, 3)).astype(np.float32)
LAYOUT = Layout(
    ("density", "velocity_x", "velocity_y"), ("1",) * 3, ("periodic", "wall"), (np.arange(6.0) / 4, np.arange(4.0)),
    np.arange(5.0) / 2,
)  # fmt: skip


def assert_reads_as(source: Path, out: Path, kind: str, expected: np.ndarray) -> None:
    """Reading in place and importing both give the expected values."""
    assert guess_format(source).name == kind
    import_data(source, out)
    with open_data(source) as in_place, open_store(out) as imported:
        assert in_place.header.difference(imported.header) is None
        assert in_place.shape == expected.shape
        assert in_place[:].tobytes() == imported[:].tobytes() == expected.astype(np.float32).tobytes()
        np.testing.assert_array_equal(in_place[1, 2:4], expected[1, 2:4].astype(np.float32))


def test_the_well(tmp_path: Path) -> None:
    splits = {"train": FLOW[:6], "valid": FLOW[6:8], "test": FLOW[8:11]}
    write_well(tmp_path / "shear", splits, LAYOUT, {"Reynolds": 1e3})
    with_reynolds = np.concatenate([FLOW[:11], np.full((11, 5, 6, 4, 1), 1e3)], -1)
    assert_reads_as(tmp_path / "shear", tmp_path / "a.h5", "the-well", with_reynolds)
    with open_data(tmp_path / "shear") as reader:
        layout, parameters = reader.header.layout, reader.header.parameters
        assert layout.fields == ("density", "velocity_x", "velocity_y", "Reynolds")
        assert layout.boundary == ("periodic", "wall") and parameters["constant"] == ["Reynolds"]
        assert reader.published_split == Split(tuple(range(6)), (6, 7), (8, 9, 10))
        np.testing.assert_array_equal(layout.times, LAYOUT.times)
        stats = parameters["attributes"]["stats"]
        np.testing.assert_allclose(stats["mean"]["density"], FLOW[:6, ..., 0].mean(dtype=np.float64))
        np.testing.assert_allclose(stats["std"]["velocity"], FLOW[:6, ..., 1:].astype(np.float64).std((0, 1, 2, 3)))
        assert parameters["attributes"]["data set"]["grid_type"] == "cartesian"
    assert guess_format(tmp_path / "shear" / "data" / "test" / "shear_test.hdf5").name == "the-well"


def test_the_well_broadcasts_constant_fields(tmp_path: Path) -> None:
    """A tensor, a field of one axis, a field constant in time, and an open boundary next to a wall."""
    path = tmp_path / "a.hdf5"
    write_well_file(path, FLOW[:2], LAYOUT, {})
    tensor = RANDOM.normal(size=(2, 5, 6, 4, 2, 2)).astype("f4")
    with h5py.File(path, "r+") as file:
        file["t2_fields"].create_dataset("stress", data=tensor).attrs.update(
            dim_varying=[True, True], sample_varying=True, time_varying=True
        )
        file["t0_fields"].create_dataset("slope", data=np.arange(4.0)).attrs.update(
            dim_varying=[False, True], sample_varying=False, time_varying=False
        )
        file["t0_fields"].create_dataset("load", data=np.arange(12.0).reshape(2, 6)).attrs.update(
            dim_varying=[True, False], sample_varying=True, time_varying=False
        )
        boundary = file.create_group("boundary_conditions/y_open")
        boundary.attrs.update(associated_dims=["y"], bc_type="OPEN")
        file["scalars"].create_dataset("inflow", data=np.zeros((2, 5))).attrs.update(
            sample_varying=True, time_varying=True
        )
    imported = import_data(path, tmp_path / "a.h5")
    with open_store(tmp_path / "a.h5") as store:
        fields = store.header.layout.fields
        assert fields == (
            "density", "velocity_x", "velocity_y", "stress_xx", "stress_xy", "stress_yx", "stress_yy", "load", "slope",
        )  # fmt: skip
        values = dict(zip(fields, np.moveaxis(store[:], -1, 0), strict=True))
    np.testing.assert_array_equal(values["stress_yx"], tensor[..., 1, 0])
    np.testing.assert_array_equal(values["slope"], np.broadcast_to(np.arange(4.0), (2, 5, 6, 4)))
    np.testing.assert_array_equal(values["load"][1, 3, :, 2], np.arange(6.0, 12))
    (tmp_path / "set" / "data").mkdir(parents=True)
    path.rename(tmp_path / "set" / "data" / "a.hdf5")
    (tmp_path / "set" / "stats.yaml").write_text(
        "mean:\n  stress: [[1, 2], [3, 4]]\nstd:\n  stress: [[5, 6], [7, 8]]\n"
    )
    with open_data(tmp_path / "set") as reader:
        assert reader.published_statistics["inputs"]["stress_yx"] == [3.0, 7.0]
    assert any("open and wall: taken as wall" in note for note in imported.notes)
    assert any("inflow" in note for note in imported.notes)


def test_fit_uses_the_well_statistics(tmp_path: Path) -> None:
    """Statistics of stats.yaml, by component, in place and imported; a parameter, which has none there, is fitted."""
    flow = FLOW.copy()
    flow[..., 2] *= 1e-6  # The Well divides by at least 1e-4
    write_well(tmp_path / "shear", {"train": flow[:6], "valid": flow[6:8], "test": flow[8:11]}, LAYOUT, {"Re": 1e3})
    import_data(tmp_path / "shear", tmp_path / "a.h5")
    fields = flow[:6, ..., :3].astype(np.float64)
    for path in (tmp_path / "shear", tmp_path / "a.h5"):
        with open_data(path) as reader:
            recipe = infer_recipe(reader.header, len(reader), UserChoices("shear", history=1, horizon=1), False)[0]
            training = recipe.windows_of(reader, "train")
            inputs, targets = fit("the-well", training)
            assert (
                inputs.fields == ("density", "velocity_x", "velocity_y", "Re") and targets.fields == inputs.fields[:3]
            )
            np.testing.assert_allclose(targets.mean, fields.mean((0, 1, 2, 3)), rtol=1e-9)
            np.testing.assert_allclose(targets.scale[:2], fields.std((0, 1, 2, 3))[:2], rtol=1e-9)
            assert targets.scale[2] == 1e-4 and (inputs.mean[3], inputs.scale[3]) == (1e3, 1)
            np.testing.assert_array_equal(fit("published", training)[1].mean, targets.mean)
            with pytest.raises(ValueError, match=r"has no statistics of numerical training data"):
                fit("numerical", training)
    stats = tmp_path / "shear" / "stats.yaml"
    stats.write_text(stats.read_text().replace("density", "mass"))
    for remove, message in (
        (lambda: None, "have no field density"),
        (stats.unlink, "has no statistics of The Well"),
    ):
        remove()
        with open_data(tmp_path / "shear") as reader, pytest.raises(ValueError, match=message) as caught:
            fit("the-well", recipe.windows_of(reader, "train"))
        assert one_sentence(caught.value)
    stats.write_text("mean:\n  velocity: [1, 2, 3]\nstd:\n  velocity: [1, 2, 3]\n")
    with pytest.raises(ValueError, match=r"mean of shape \(3,\) .* on 2 axes"):
        open_data(tmp_path / "shear")


def test_read_stats_tensors_and_inline_lists(tmp_path: Path) -> None:
    (tmp_path / "stats.yaml").write_text(
        "mean:\n  D:\n  - - 0.5\n    - -1.0e-3\n  - - 2\n    - 3\n  u: [1.0, 2]\nstd:\n  c: 4\n"
    )
    assert read_stats(tmp_path / "stats.yaml") == {
        "mean": {"D": [[0.5, -1e-3], [2.0, 3.0]], "u": [1.0, 2]}, "std": {"c": 4.0},
    }  # fmt: skip
    (tmp_path / "stats.yaml").write_text("mean: !!python/object:os.system\n")
    with pytest.raises(ValueError, match="not a statistics file"):
        read_stats(tmp_path / "stats.yaml")


@pytest.mark.parametrize(
    ("name", "kind", "fields", "boundary"),
    [
        ("1D_a.hdf5", "scalar", ("tensor",), ("open", "open")),
        ("2D_CFD_Rand_periodic_Train.hdf5", "cfd", ("density", "Vx", "Vy"), ("periodic", "periodic")),
        ("2D_CFD_Turb_trans_Train.hdf5", "cfd", ("density", "Vx", "Vy"), ("open", "open")),
        ("2D_rdb_NA_NA.h5", "grouped", ("data_0", "data_1", "data_2"), ("open", "open")),
    ],
)
def test_pdebench(tmp_path: Path, name: str, kind: str, fields: tuple[str, ...], boundary: tuple[str, ...]) -> None:
    values = FLOW[..., : len(fields)]
    if kind == "cfd":
        fields, values = ("density", "pressure", *fields[1:]), np.insert(FLOW, 1, FLOW[..., 0] + 1, axis=-1)
        layout = replace(LAYOUT, fields=("density", "pressure", "velocity_x", "velocity_y"))
        write_pdebench(tmp_path / name, kind, values, layout)
    else:
        write_pdebench(tmp_path / name, kind, values, LAYOUT)
    assert_reads_as(tmp_path / name, tmp_path / "store.h5", "pdebench", values)
    with open_data(tmp_path / name) as reader:
        layout = reader.header.layout
        assert (layout.fields, layout.boundary) == (fields, boundary)
        np.testing.assert_array_equal(layout.times, LAYOUT.times)
        np.testing.assert_array_equal(layout.coordinates[0], LAYOUT.coordinates[0])
        split = reader.published_split
        assert split is not None and split.test == ((18, 19) if kind == "grouped" else (0, 1))
        assert len(split.validation) == 1 and len(split.train) == 17


def test_pdebench_incompressible_and_darcy(tmp_path: Path) -> None:
    write_pdebench(tmp_path / "ns.h5", "incompressible", FLOW[:4], LAYOUT)
    force = np.broadcast_to(FLOW[:4, :, ..., :2].mean(1, keepdims=True), (4, 5, 6, 4, 2))
    assert_reads_as(tmp_path / "ns.h5", tmp_path / "a.h5", "pdebench", np.concatenate([FLOW[:4], force], -1))
    with open_data(tmp_path / "ns.h5") as reader:
        assert reader.header.layout.fields == ("velocity_x", "velocity_y", "particles", "force_x", "force_y")
        assert reader.header.parameters["constant"] == ["force_x", "force_y"] and reader.published_split is None
    with h5py.File(tmp_path / "2D_DarcyFlow.hdf5", "w") as file:
        file["tensor"], file["nu"] = FLOW[:3, :1, ..., 0], FLOW[:3, 0, ..., 1]
        file["x-coordinate"], file["y-coordinate"] = np.arange(7.0), np.arange(4.0)  # one x more: cell edges
    with open_data(tmp_path / "2D_DarcyFlow.hdf5") as reader:
        assert reader.header.layout.fields == ("tensor", "nu") and reader.shape == (3, 1, 6, 4, 2)
        np.testing.assert_array_equal(reader[:], FLOW[:3, :1, ..., :2])
        np.testing.assert_array_equal(reader.header.layout.coordinates[0], np.arange(6) + 0.5)


def test_pdearena(tmp_path: Path) -> None:
    write_pdearena(tmp_path / "ns", {"test": FLOW[5:8], "train": FLOW[:4], "valid": FLOW[4:5]}, LAYOUT)
    buoyancy = np.concatenate([np.linspace(0.2, 0.5, n) for n in (4, 1, 3)])
    constant = np.broadcast_to(buoyancy[:, None, None, None, None], (8, 5, 6, 4, 1))
    assert_reads_as(tmp_path / "ns", tmp_path / "a.h5", "pdearena", np.concatenate([FLOW[:8], constant], -1))
    with open_data(tmp_path / "ns") as reader:
        assert reader.header.layout.fields == ("u", "vx", "vy", "buo_y")
        assert reader.published_split == Split((0, 1, 2, 3), (4,), (5, 6, 7))
        np.testing.assert_array_equal(reader.header.layout.coordinates[0], LAYOUT.coordinates[0])
    with h5py.File(tmp_path / "KS_train.h5", "w") as file:
        file["train/pde_5-6"], file["train/dt"], file["train/dx"] = FLOW[:2, ..., 0, 0], np.full(2, 0.2), [0.5, 0.7]
        file["train/v"] = np.array([1.0, 2.0])
    with open_data(tmp_path / "KS_train.h5") as reader:
        assert reader.header.layout.fields == ("u", "v") and reader.shape == (2, 5, 6, 2)
        np.testing.assert_allclose(reader.header.layout.times, 0.2 * np.arange(5))
        np.testing.assert_array_equal(reader[1, 4][:, 1], np.full(6, 2.0))


def test_infer_recipe_uses_constant_fields_as_inputs_only(tmp_path: Path) -> None:
    write_pdearena(tmp_path / "ns", {"test": FLOW[5:8], "train": FLOW[:4], "valid": FLOW[4:5]}, LAYOUT)
    with open_data(tmp_path / "ns") as reader:
        recipe, _ = infer_recipe(reader.header, len(reader), UserChoices("ns"), gpu=False)
        assert recipe.task.targets == ("u", "vx", "vy") and recipe.task.inputs == ("u", "vx", "vy", "buo_y")
        one_target, _ = infer_recipe(reader.header, len(reader), UserChoices("ns", targets=("u",)), gpu=False)
        assert one_target.task.inputs == ("u", "vx", "vy", "buo_y") and one_target.task.targets == ("u",)


def test_import_pt_files(tmp_path: Path) -> None:
    torch.save({"u": torch.tensor(FLOW[..., 0]), "v": torch.tensor(FLOW[..., 1])}, tmp_path / "a.pt")
    import_data(tmp_path / "a.pt", tmp_path / "a.h5")
    torch.save(torch.tensor(FLOW).to(torch.float64), tmp_path / "b.pt", _use_new_zipfile_serialization=False)
    import_data(tmp_path / "b.pt", tmp_path / "b.h5", names=["d", "u", "v"])
    with open_store(tmp_path / "a.h5") as a, open_store(tmp_path / "b.h5") as b:
        np.testing.assert_array_equal(a[:], FLOW[..., :2])
        np.testing.assert_array_equal(b[:], FLOW)
        assert a.header.layout.fields == ("u", "v")
    np.testing.assert_array_equal(read_history(tmp_path / "b.pt", ["d", "u", "v"], 2), FLOW)


class Bomb:
    """Runs code when unpickled."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return (exec, ("raise SystemExit('this ran')",))


def write_invalid_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Write invalid files; return each with its error message."""
    folder.mkdir()
    torch.save({"u": Bomb()}, folder / "bomb.pt")
    torch.save({"u": torch.ones(3), "epoch": 3}, folder / "more.pt")
    torch.save({"u": torch.tensor(FLOW)}, folder / "cut.pt")
    (folder / "cut.pt").write_bytes((folder / "cut.pt").read_bytes()[:3000])
    well = folder / "well.hdf5"
    write_well_file(well, FLOW[:2], LAYOUT, {})
    with h5py.File(well, "r+") as file:
        file["t0_fields/density"].attrs["time_varying"] = False
    axisless = folder / "axisless.hdf5"
    write_well_file(axisless, FLOW[:2], LAYOUT, {})
    with h5py.File(axisless, "r+") as file:
        del file["dimensions/y"]
    cut = folder / "scalar.hdf5"
    write_pdebench(cut, "scalar", FLOW[:2], LAYOUT)
    with h5py.File(cut, "r+") as file:
        del file["x-coordinate"]
        file["x-coordinate"] = np.arange(3.0)
    groups = folder / "groups.h5"
    write_pdebench(groups, "grouped", FLOW[:2], LAYOUT)
    with h5py.File(groups, "r+") as file:
        del file["0001/data"]
        file["0001/data"] = FLOW[0, :3]
    gas = folder / "gas.hdf5"
    write_pdebench(gas, "scalar", FLOW[:2], LAYOUT)
    with h5py.File(gas, "r+") as file:
        del file["tensor"]
        file["density"], file["pressure"], file["Vx"] = FLOW[:2, ..., 0], FLOW[:2, :4, ..., 1], FLOW[:2, 0, ..., 2]
    long = folder / "long.hdf5"
    write_well_file(long, FLOW[:2], LAYOUT, {})
    with h5py.File(long, "r+") as file:
        del file["dimensions/x"]
        file["dimensions/x"] = np.arange(9.0)
    return {
        "gas": (gas, r"'pressure' in .* has 4 entries along time, but 'density' has 5"),
        "long": (long, r"entries along x, but .* all must agree"),
        "bomb": (folder / "bomb.pt", "contains objects other than tensors, which are never loaded"),
        "more": (folder / "more.pt", "not a tensor or a dict of named tensors"),
        "cut": (folder / "cut.pt", "truncated or corrupt"),
        "well": (well, "its attributes give axes"),
        "axisless": (axisless, "has no dimensions/y"),
        "scalar": (cut, "has 3 entries of x-coordinate, expected 6"),
        "groups": (groups, "0001/data in .* has shape"),
    }


def test_import_rejects_invalid_hdf5_and_pt_files(tmp_path: Path) -> None:
    for name, (path, message) in write_invalid_files(tmp_path / "bad").items():
        with pytest.raises(ValueError, match=message) as caught:
            import_data(path, tmp_path / f"{name}.h5")
        assert one_sentence(caught.value) and str(path) in str(caught.value), name


def test_import_rejects_truncated_pdebench_file(tmp_path: Path) -> None:
    write_pdebench(tmp_path / "a.hdf5", "scalar", FLOW, LAYOUT)
    (tmp_path / "a.hdf5").write_bytes((tmp_path / "a.hdf5").read_bytes()[:-2000])
    with pytest.raises(ValueError, match="truncated or corrupt"):
        import_data(tmp_path / "a.hdf5", tmp_path / "store.h5")
