"""Reading REALM: orientation of the axes, split, caching and error messages; layout of the fixtures."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest

from sigmasolver.data.formats import guess_format, import_data, open_data, realm
from sigmasolver.data.split import Split
from sigmasolver.recipes import recipe_of
from sigmasolver.simulate.fixtures.realm import GROUPS, write_realm
from sigmasolver.tasks import TASKS

GRID = (5, 4)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("realm") / "case"
    write_realm("ignit-hit", folder, grid=GRID)
    return folder


@pytest.fixture
def case(original: Path, tmp_path: Path) -> Path:
    """A copy that a test may modify."""
    return Path(shutil.copytree(original, tmp_path / "case"))


def rewrite(index: Path, **arrays: np.ndarray | None) -> None:
    """Replace arrays in an .npz; None removes one."""
    with np.load(index) as npz:
        content = {name: npz[name] for name in npz.files} | arrays
    np.savez(index, **{name: values for name, values in content.items() if values is not None})


def group_file(folder: Path, part: str, group: str) -> Path:
    return folder / "data" / part / f"{group.replace('/', '_')}.npz"


@pytest.mark.parametrize(
    ("task", "frames", "sizes"), [("ignit-hit", 30, (8, 1, 1, 2)), ("evolve-jet", 40, (35, 1, 1, 2))]
)
def test_write_realm_has_layout_of_benchmark(task, frames, sizes, tmp_path):
    write_realm(task, tmp_path, grid=GRID)
    with np.load(tmp_path / "data" / "data.npz") as index:
        assert index["coords"].shape == (2, *GRID) and index["coords"].dtype == np.float32
        assert tuple(index["spatial_size"]) == GRID and index["times"].dtype.kind == "U"
        assert [float(text) for text in index["times"][:2]] == [TIME_STEP[task], 2 * TIME_STEP[task]]
        assert tuple(int(index[f"num_{name}"]) for name in ("chemical", "temperature", "density", "velocity")) == sizes
        variables = index["variables"].tolist()
        assert variables[-4:] == ["T.npy", "rho.npy", "Ux.npy", "Uy.npy"]
        assert variables[:-4] == sorted(variables[:-4])  # sorted by file name, as in the benchmark
        groups_by_part = {part: tuple(index[f"{part}_groups"]) for part in ("train", "val", "test")}
    assert groups_by_part == GROUPS[task]
    for part, groups in groups_by_part.items():
        assert {file.name for file in (tmp_path / "data" / part).iterdir()} == {
            f"{group.replace('/', '_')}.npz" for group in groups
        }
        for group in groups:
            with np.load(group_file(tmp_path, part, group)) as npz:
                values = npz["data"]
            assert values.shape == (frames, sum(sizes), *GRID) and values.dtype == np.float32
            species, temperature, density = values[:, : sizes[0]], values[:, -4], values[:, -3]
            assert np.isfinite(values).all() and species.min() >= 0
            np.testing.assert_allclose(species.sum(1), 1, atol=1e-6)
            np.testing.assert_allclose(temperature * density, 300, rtol=1e-5)
            assert 300 <= temperature.min() < temperature.max() <= 2800 and np.ptp(temperature, axis=0).max() > 100
    if task == "evolve-jet":
        assert not species[:, 0].any()


TIME_STEP = {"ignit-hit": 1e-5, "evolve-jet": 5e-6}


def test_write_realm_is_reproducible_from_seed(original, tmp_path):
    for seed, same in ((0, True), (1, False)):
        write_realm("ignit-hit", tmp_path / str(seed), seed, GRID)
        with open_data(original) as reference, open_data(tmp_path / str(seed)) as written:
            assert np.array_equal(reference[:], written[:]) == same


def test_open_data_fields_split_and_times(original):
    assert guess_format(original).name == guess_format(original / "data").name == "realm"
    with open_data(original) as data:
        layout = data.header.layout
        assert layout.fields == TASKS["ignit-hit"].targets and data.shape == (7, 30, *GRID, 12)
        np.testing.assert_allclose(layout.times, 1e-5 * np.arange(1, 31), rtol=1e-12)
        assert recipe_of("ignit-hit").split_of(data) == Split((0, 1, 2, 3), (4,), (5, 6))
        order = [(part, group) for part, groups in GROUPS["ignit-hit"].items() for group in groups]
        for index, (part, group) in enumerate(order):
            with np.load(group_file(original, part, group)) as npz:
                expected = npz["data"].transpose(0, 2, 3, 1)[:, ::-1, ::-1]
            np.testing.assert_array_equal(data[index], expected)
            np.testing.assert_array_equal(data[index, 3:9:2], expected[3:9:2])


@pytest.mark.parametrize("first", ["x", "y"])
@pytest.mark.parametrize("decreasing", [(), (0,), (1,), (0, 1)])
def test_axes_oriented_from_coordinates(case, original, first, decreasing):
    """For any array layout, x comes first and both axes are increasing, with the same value at every point."""
    index = case / "data" / "data.npz"

    def rearrange(values):
        """Rearrange the axes of the fixture, x first and both decreasing."""
        values = np.flip(values, tuple(axis - 2 for axis in (0, 1) if axis not in decreasing))
        return values if first == "x" else values.swapaxes(-1, -2)

    with np.load(index) as npz:
        coords = npz["coords"]
    rewrite(index, coords=rearrange(coords))
    for file in (case / "data").glob("*/*.npz"):
        with np.load(file) as npz:
            values = npz["data"]
        np.savez_compressed(file, data=rearrange(values))
    with open_data(case) as data, open_data(original) as expected:
        np.testing.assert_array_equal(data[:], expected[:])
        for axis, values in zip((0, 1), data.header.layout.coordinates, strict=True):
            np.testing.assert_allclose(values, 3.927e-4 * (np.arange(GRID[axis]) + 0.5), rtol=1e-6)


def test_variables_that_no_task_names_are_read(case):
    """Nitrogen and pressure are in the raw files of the benchmark, but in neither task."""
    index = case / "data" / "data.npz"
    with np.load(index) as npz:
        names = npz["variables"].tolist()
    rewrite(index, variables=np.array([*names[:4], "N2.npy", *names[4:], "p.npy"]), num_chemical=np.array(9),
           num_pressure=np.array(1))  # fmt: skip
    for file in (case / "data").glob("*/*.npz"):
        with np.load(file) as npz:
            values = npz["data"]
        extended = np.concatenate([values[:, :4], 7 + 0 * values[:, :1], values[:, 4:], 9 + 0 * values[:, :1]], axis=1)
        np.savez_compressed(file, data=extended)
    with open_data(case) as data:
        assert data.header.layout.fields[4] == "species_N2" and data.header.layout.fields[-1] == "pressure"
        assert set(TASKS["ignit-hit"].targets) < set(data.header.layout.fields)
        assert bool((data[0, 0][..., 4] == 7).all()) and bool((data[0, 0][..., -1] == 9).all())


def test_import_keeps_values_and_split(original, tmp_path):
    imported = import_data(original, tmp_path / "store.h5")
    assert imported.kind == "realm" and any("No units" in note for note in imported.notes)
    with open_data(original) as in_place, open_data(tmp_path / "store.h5") as store:
        np.testing.assert_array_equal(in_place[:], store[:])
        assert in_place.published_split == store.published_split


def test_trajectories_are_cached_and_reader_pickles(original, monkeypatch):
    opened: list[Path] = []

    def counting(path, names):
        opened.append(path)
        return open_members(path, names)

    open_members = realm.open_members
    monkeypatch.setattr(realm, "open_members", counting)
    with open_data(original) as data:
        opened.clear()
        for frame in (0, 5, 20):
            first, second = data[0, frame], data[6, frame]
        assert len(opened) == 2
        worker = pickle.loads(pickle.dumps(data))
        np.testing.assert_array_equal(worker[6, 20], second)
        np.testing.assert_array_equal(worker[0, 20], first)
    monkeypatch.setattr(realm, "_CACHE_BYTES", 0)  # still caches one trajectory
    with open_data(original) as data:
        opened.clear()
        for index in (0, 0, 1, 0):
            data[index, 0]
        assert len(opened) == 3


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


GROUP = ("test", "s_5_3")
DAMAGES = {
    "a group is missing": (
        lambda case: group_file(case, *GROUP).unlink(),
        "s_5_3.npz not found, but .* lists the group 's_5_3' in the test split; download it again",
    ),
    "a group is cut off": (lambda case: truncate(group_file(case, *GROUP)), "s_5_3.npz is truncated or corrupt; copy"),
    "the index is cut off": (lambda case: truncate(case / "data" / "data.npz"), "data.npz is truncated or corrupt"),
    "too few channels": (
        lambda case: np.savez_compressed(group_file(case, *GROUP), data=np.zeros((30, 11, *GRID), np.float32)),
        "has 11 variables, but data.npz lists 12",
    ),
    "too few frames": (
        lambda case: np.savez_compressed(group_file(case, *GROUP), data=np.zeros((29, 12, *GRID), np.float32)),
        "has 29 frames, but data.npz lists 30",
    ),
    "another grid": (
        lambda case: np.savez_compressed(group_file(case, *GROUP), data=np.zeros((30, 12, 4, 4), np.float32)),
        "has grid 4 × 4, but data.npz has 5 × 4",
    ),
    "another array": (
        lambda case: np.savez_compressed(group_file(case, *GROUP), fields=np.zeros(3)),
        "has no array 'data'; available arrays: fields",
    ),
    "pickled values": (
        lambda case: np.savez(group_file(case, *GROUP), data=np.array([{}], dtype=object)),
        r"(pickled Python objects|object values)",
    ),
    "an unknown variable": (
        lambda case: rewrite(case / "data" / "data.npz", variables=np.array([*"abcdefgh", "T", "rho", "Ux", "Uq"])),
        "The variable 'Uq' in .* is unexpected at this position",
    ),
    "a temperature among the species": (
        lambda case: rewrite(case / "data" / "data.npz", variables=np.array([*"abcdefg", "T", "T", "rho", "Ux", "Uy"])),
        "The variable 'T' in .* is unexpected at this position",
    ),
    "a variable twice": (
        lambda case: rewrite(case / "data" / "data.npz", variables=np.array([*"aacdefgh", "T", "rho", "Ux", "Uy"])),
        "contains a duplicate variable",
    ),
    "a wrong count": (
        lambda case: rewrite(case / "data" / "data.npz", num_chemical=np.array(9)),
        "names 12 variables but counts 13 ",
    ),
    "a count that is none": (
        lambda case: rewrite(case / "data" / "data.npz", num_density=np.array(0.5)),
        "'num_density' in .* must be a single integer",
    ),
    "a missing entry": (lambda case: rewrite(case / "data" / "data.npz", times=None), "has no array 'times'"),
    "times that are no numbers": (
        lambda case: rewrite(case / "data" / "data.npz", times=np.array(["soon"] * 30)),
        "'times' in .* must be numeric strings; got 'soon'",
    ),
    "names that are numbers": (
        lambda case: rewrite(case / "data" / "data.npz", test_groups=np.arange(2)),
        "'test_groups' in .* must be a list of strings",
    ),
    "no rectangular grid": (
        lambda case: rewrite(case / "data" / "data.npz", coords=np.random.default_rng(0).random((2, *GRID))),
        "are not a rectangular grid",
    ),
    "three coordinates": (
        lambda case: rewrite(case / "data" / "data.npz", coords=np.zeros((3, *GRID))),
        "has 3 coordinates; expected x and y",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_invalid_realm_files_raise_one_sentence(case, damage):
    apply, message = DAMAGES[damage]
    apply(case)
    with pytest.raises(ValueError, match=message) as error:
        open_data(case)
    assert "\n" not in str(error.value)


def test_find_case_by_folder_name(original, tmp_path):
    assert realm.find_case("ignit-hit", tmp_path) is None and realm.find_case("ns2d", tmp_path) is None
    for name in ("IgnitHIT", "realm-bench-IgnitHIT", "ignit-hit"):
        folder = tmp_path / name / "downloads"
        shutil.copytree(original, folder / name)
        (folder / "EvolveJet").mkdir()  # empty: not a download
        assert realm.find_case("ignit-hit", folder) == realm.find_case("ignit-hit", folder / name) == folder / name
        assert realm.find_case("evolve-jet", folder) is None
    message = realm.how_to_get("evolve-jet", tmp_path)
    for phrase in (
        "realm-bench/realm-bench-EvolveJet",
        "data/data.npz",
        "data/PART/GROUP.npz",
        "make-fixture evolve-jet",
    ):
        assert phrase in message
