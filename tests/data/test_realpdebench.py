"""Reading RealPDEBench in both forms: values, windows, groups, statistics and error messages."""

import json
import pickle
import shutil
import sys
from dataclasses import replace

import h5py
import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sigmasolver.data import formats
from sigmasolver.data.formats import guess_format, hdf5, import_data, open_data, realpdebench
from sigmasolver.data.normalise import fit
from sigmasolver.data.split import PARTS, WindowLists
from sigmasolver.data.windows import Windows, WindowSpec
from sigmasolver.evaluate import in_cohort
from sigmasolver.recipes import changed, recipe_of
from sigmasolver.simulate.fixtures.realpdebench import write_realpdebench
from sigmasolver.tasks import TEST_MODES
from sigmasolver.train.infer_recipe import describe_recipe

TASKS = ("cylinder", "controlled-cylinder", "fsi", "foil", "combustion")
NAMES = {"train": "train", "validation": "val", "test": "test"}
FIELDS = {
    "cylinder": ("velocity_x", "velocity_y", "reynolds"),
    "controlled-cylinder": ("velocity_x", "velocity_y", "reynolds", "frequency"),
    "fsi": ("velocity_x", "velocity_y", "reynolds", "mass_ratio", "damping"),
    "foil": ("velocity_x", "velocity_y", "reynolds", "angle"),
    "combustion": ("intensity", "ammonia", "equivalence_ratio"),
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("realpdebench")
    for task in TASKS:
        write_realpdebench(task, folder)
    return folder


@pytest.fixture
def fsi(root, tmp_path):
    """A copy that a test may modify."""
    shutil.copytree(root / "fsi", tmp_path / "fsi")
    shutil.copy(root / "version.json", tmp_path)
    return tmp_path / "fsi"


def scenario_folder(root, task):
    return root / task.replace("-", "_")


def small_recipe(task, *more):
    """The recipe of a task on the grid of the fixture, with a quarter of the points per axis."""
    recipe = recipe_of(task)
    return changed(recipe, [f"task.grid={tuple(points // 4 for points in recipe.task.grid)}", *more])


def read_row(folder, sim_id):
    """A trajectory, read by plain access to its row."""
    for path in sorted(folder.glob("*.arrow")):
        for row in pyarrow.ipc.open_stream(path.read_bytes()).read_all().to_pylist():
            if row["sim_id"] == sim_id:
                shape = [row[f"shape_{axis}"] for axis in "thw"]
                columns = [name for name in ("u", "v", "observed") if name in row]
                return np.stack([np.frombuffer(row[name], "<f4").reshape(shape) for name in columns], axis=-1)
    raise KeyError(sim_id)


@pytest.mark.parametrize("task", TASKS)
def test_arrow_and_hdf5_have_same_trajectories_and_parameters(root, task):
    folder = scenario_folder(root, task)
    with open_data(folder) as shards, open_data(folder / "real") as files:
        assert shards.header.layout.fields == files.header.layout.fields == FIELDS[task]
        np.testing.assert_array_equal(shards[:], files[:])
        for name in ("trajectories", "groups", "windows", "statistics", "data_version", "branch"):
            assert shards.header.parameters[name] == files.header.parameters[name]
        assert shards.header.parameters["data_version"] == "2.0.1"
        measured = 1 if task == "combustion" else 2
        for index, sim_id in enumerate(shards.header.parameters["trajectories"]):
            values = shards[index]
            np.testing.assert_array_equal(values[..., :measured], read_row(folder / "hf_dataset" / "real", sim_id))
            parameters = [float(number) for number in sim_id.removesuffix(".h5").replace("NH3", "").split("_")]
            for channel, name in enumerate(FIELDS[task][measured:]):
                assert np.unique(values[..., measured + channel]).tolist() == [np.float32(parameters[channel])], name


def test_guess_format_of_parent_folder_lists_scenarios(root, fsi):
    with pytest.raises(ValueError, match=r"is not a data set but contains some; choose one of them: ") as error:
        guess_format(root)
    for task in TASKS:
        assert f"{scenario_folder(root, task)} (realpdebench)" in str(error.value)
    with pytest.raises(ValueError) as error:
        guess_format(fsi.parent)
    assert str(error.value) == (
        f"{fsi.parent} is not a data set but contains some; choose one of them: {fsi} (realpdebench)."
    )


def test_write_realpdebench_is_reproducible_from_seed(root, tmp_path):
    for folder, seed in (("same", 0), ("other", 1)):
        write_realpdebench("fsi", tmp_path / folder, seed)
    reference, same, other = (open_data(path / "fsi")[:] for path in (root, tmp_path / "same", tmp_path / "other"))
    np.testing.assert_array_equal(reference, same)
    assert not np.array_equal(reference, other)
    with pytest.raises(ValueError, match="ns2d is not a RealPDEBench task; choose from cylinder, controlled-cylinder"):
        write_realpdebench("ns2d", tmp_path)


@pytest.mark.parametrize("task", TASKS[:4])
def test_fixture_unseen_parameters_are_extreme_or_in_between(root, task):
    with open_data(scenario_folder(root, task)) as data:
        reynolds = data[:, 0, 0, 0, 2]
        seen, outer = (reynolds[list(data.groups[group])] for group in ("seen", "out_dist"))
        assert {outer.min(), outer.max()} == {reynolds.min(), reynolds.max()}
        for inner in reynolds[list(data.groups["in_dist"])]:
            assert seen.min() < inner < seen.max()


@pytest.mark.parametrize("task", TASKS)
def test_numerical_branch_is_read_by_its_folder(root, task):
    folder = scenario_folder(root, task)
    assert guess_format(folder).name == "realpdebench"
    with open_data(folder / "hf_dataset" / "numerical") as shards, open_data(folder / "numerical") as files:
        np.testing.assert_array_equal(shards[:], files[:])
        assert shards.header.parameters["branch"] == "numerical" and "pressure" in shards.header.layout.fields
        assert recipe_of(task).windows_of(shards, "test") is None  # all windows are for training


@pytest.mark.parametrize("task", TASKS)
def test_windows_equal_published_lists(root, task):
    folder, recipe = scenario_folder(root, task), small_recipe(task)
    with open_data(folder) as data:
        sim_ids, span = data.header.parameters["trajectories"], recipe.task.history + recipe.task.horizon
        for part in PARTS:
            rows = json.loads((folder / "hf_dataset" / f"{NAMES[part]}_index_real.json").read_text())
            windows = recipe.windows_of(data, part)
            starts = [(sim_ids[row.trajectory], row.history) for row in windows.rows()]
            assert sorted(starts) == sorted((row["sim_id"], row["time_id"]) for row in rows)
            assert len(windows) == len(rows) and windows.grid == recipe.task.grid
            stride, channels = recipe.task.space_stride, len(recipe.task.targets)
            for index in (0, len(windows) // 2, -1):
                row, (history, future) = windows.rows()[index], windows[index]
                frames = data[row.trajectory, row.history : row.history + span, ::stride, ::stride, :channels]
                np.testing.assert_array_equal(np.concatenate([history, future]), frames)
                last = row.history + recipe.task.history - 1
                np.testing.assert_array_equal(
                    windows.frame_times([index])[0], data.header.layout.times[last : last + recipe.task.horizon + 1]
                )
        resident = recipe.windows_of(data, "test").resident("cpu")
        windows_on_disk = recipe.windows_of(data, "test")
        indices = [0, len(windows_on_disk) - 1, 1, -2]
        for batch, expected in zip(resident.batch(indices), windows_on_disk.batch(indices), strict=True):
            assert torch.equal(batch, expected)


def test_import_keeps_windows_groups_and_statistics(root, tmp_path):
    import_data(root / "fsi", tmp_path / "fsi.h5")
    with open_data(root / "fsi") as in_place, open_data(tmp_path / "fsi.h5") as store:
        np.testing.assert_array_equal(in_place[:], store[:])
        assert in_place.published_windows == store.published_windows and in_place.groups == store.groups
        assert in_place.published_statistics == store.published_statistics


def test_window_lists_too_long_for_header_are_read_in_place(fsi, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "_LONGEST", 1_000)
    starts = [0, 1, 3, 7, 12, 20]
    rows = [{"sim_id": path.name, "time_id": first} for path in (fsi / "real").glob("*.h5") for first in starts]
    (fsi / "hf_dataset" / "train_index_real.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match="do not fit in the header of a store"):
        import_data(fsi, tmp_path / "store.h5")
    with open_data(fsi) as data:
        assert len(data.published_windows.windows("train")) == len(rows)


def test_published_windows_with_longer_horizon_keep_starts_that_fit(root):
    with open_data(root / "fsi") as data:
        recipe = small_recipe("fsi")
        starts = [row.history for row in recipe.windows_of(data, "test").rows()]
        longer = recipe.windows_of(data, "test", recipe.evaluation_window_spec(60))
        assert [row.history for row in longer.rows()] == [start for start in starts if start + 80 <= 100]
        with pytest.raises(ValueError, match="A window needs 120 frames, but all"):
            recipe.windows_of(data, "test", recipe.evaluation_window_spec(100))
        with pytest.raises(ValueError, match="lists its windows explicitly"):
            recipe.windows_of(data, "train", replace(recipe.training_window_spec(), windows_per_trajectory=2))


@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.sampled_from(PARTS), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)))))
def test_window_lists_keep_every_window_once(windows):
    lists = WindowLists.of(windows)
    restored = WindowLists.from_plain(json.loads(json.dumps(lists.__dict__)))
    for part in PARTS:
        assert lists.windows(part) == sorted(set(windows.get(part, ()))) == restored.windows(part)
    common = {trajectory for trajectory, _ in windows.get("train", ())}
    assert set(lists.shared()) == common & {trajectory for part in PARTS[1:] for trajectory, _ in windows.get(part, ())}


def test_window_lists_compress_regular_starts():
    starts = [(0, 250 * block + 20 * k) for block in range(15) for k in range(13)]
    assert len(WindowLists.of({"train": starts}).train) <= 30


@pytest.mark.parametrize("task", TASKS[:4])
def test_split_by_trajectories_tests_on_unseen(root, task):
    recipe = small_recipe(f"{task}-whole-trajectories")
    with open_data(scenario_folder(root, task)) as data:
        parts = {part: recipe.windows_of(data, part) for part in PARTS}
        train, test = (set(parts[part].trajectories) for part in ("train", "test"))
        assert not train & test and parts["validation"] is None
        assert test == {*data.groups["in_dist"], *data.groups["out_dist"]} and train == set(data.groups["seen"])
        published = small_recipe(task).windows_of(data, "train")
        assert set(published.trajectories) & set(small_recipe(task).windows_of(data, "test").trajectories)
        assert any("as the publisher intends; task.split=trajectories separates them" in note for note in data.notes)


def test_split_without_unseen_trajectories_tests_on_last(root):
    recipe = small_recipe("combustion-whole-trajectories", "task.train=3", "task.test=2")
    with open_data(root / "combustion") as data:
        assert data.published_split is None
        assert recipe.windows_of(data, "test").trajectories == (3, 4)


@pytest.mark.parametrize("task", ["cylinder", "fsi"])
def test_test_modes_partition_test_windows(root, task):
    recipe = small_recipe(task)
    with open_data(scenario_folder(root, task)) as data:
        windows = recipe.windows_of(data, "test")
        modes = [mode for mode in TEST_MODES if mode != "in_dist" or task == "cylinder"]
        rows = {mode: in_cohort(windows, task, mode).rows() for mode in modes}
        assert sorted(rows["seen"] + rows["unseen"]) == sorted(windows.rows())
        assert sorted(rows.get("in_dist", []) + rows["out_dist"]) == sorted(rows["unseen"])
        assert {row.trajectory for row in rows["seen"]} <= set(data.groups["seen"])
        if task == "fsi":
            with pytest.raises(
                ValueError, match=r"No test window .* is in the test mode in_dist; choose from seen, out_dist, unseen"
            ):
                in_cohort(windows, task, "in_dist")


def test_published_normaliser_equals_mean_std_file(root):
    mean_in, mean_out, std_in, std_out = torch.load(root / "controlled_cylinder" / "mean_std.pt", weights_only=True)
    with open_data(root / "controlled_cylinder") as data:
        recipe = small_recipe("controlled-cylinder-conditions")
        inputs, targets = fit("published", recipe.windows_of(data, "train"))
        channels = [0, 1, 3, 4]  # without the pressure, which is not measured
        torch.testing.assert_close(inputs.mean, mean_in.double()[channels])
        torch.testing.assert_close(inputs.scale, std_in.double()[channels])
        torch.testing.assert_close(targets.mean, mean_out.double()[:2])
        torch.testing.assert_close(targets.scale, std_out.double()[:2])
    with open_data(root / "fsi") as data:
        recipe = small_recipe("fsi", "task.inputs=('velocity_x','velocity_y','mass_ratio')")
        with pytest.raises(ValueError, match="have no field mass_ratio"):
            fit("published", recipe.windows_of(data, "train"))


def test_published_normaliser_without_file_is_fitted_on_training_windows(fsi):
    (fsi / "mean_std.pt").unlink()
    with open_data(fsi) as data:
        training = small_recipe("fsi").windows_of(data, "train")
        seen = {(row.trajectory, frame) for row in training.rows() for frame in range(row.history, row.last + 1)}
        assert len(seen) < 100 * len(training.trajectories)
        frames = np.stack([data[index, frame, ::2, ::2, :2] for index, frame in sorted(seen)]).astype(np.float64)
        inputs, targets = fit("published", training)
        resident, _ = fit("published", training.resident("cpu"))
        for normaliser in (inputs, targets, resident):
            np.testing.assert_allclose(normaliser.mean, frames.mean((0, 1, 2)), rtol=1e-12)
            np.testing.assert_allclose(normaliser.scale, frames.std((0, 1, 2)), rtol=1e-12)
        assert any("fitted on the real training windows" in note for note in data.notes)
        shutil.rmtree(fsi / "hf_dataset" / "numerical")
        shutil.rmtree(fsi / "numerical")
        with pytest.raises(ValueError, match=r"has no statistics .* \(mean_std.pt\); add the file"):
            fit("numerical", training)


@pytest.mark.parametrize("task", ["controlled-cylinder", "fsi", "combustion"])
@pytest.mark.parametrize("form", ["", "real"])
def test_numerical_normaliser_without_file_is_fitted_on_numerical_windows(root, tmp_path, task, form):
    folder = tmp_path / scenario_folder(root, task).name
    shutil.copytree(scenario_folder(root, task), folder)
    (folder / "mean_std.pt").unlink()
    with open_data(folder / form) as data, open_data(folder / "numerical") as numerical:
        training = small_recipe(f"{task}-numerical-normaliser").windows_of(data, "train")
        lists, span = numerical.published_windows.windows("train"), training.spec.history + training.spec.horizon
        seen = {(index, frame) for index, first in lists for frame in range(first, first + span)}
        stride = numerical.header.grid[0] // training.grid[0]  # cylinders are stored with twice the points
        count = len(training.spec.targets)
        channels = [numerical.header.layout.fields.index(name) for name in training.spec.targets]
        frames = np.stack([numerical[index, frame, ::stride, ::stride] for index, frame in sorted(seen)])[..., channels]
        assert frames.shape[1:] == (*training.grid, count)
        for normaliser in fit("numerical", training):
            assert normaliser.kind == "numerical"
            np.testing.assert_allclose(normaliser.mean, frames.astype(np.float64).mean((0, 1, 2)), rtol=1e-9)
            np.testing.assert_allclose(normaliser.scale, frames.astype(np.float64).std((0, 1, 2)), rtol=1e-9)
    with open_data(folder / "numerical") as numerical:  # the numerical branch itself
        training = small_recipe(task, "task.space_stride=" + str(stride)).windows_of(numerical, "train")
        np.testing.assert_array_equal(fit("numerical", training)[1].scale, normaliser.scale)


@pytest.mark.parametrize(
    ("name", "with_file", "phrase"),
    [
        ("fsi", True, "normaliser published,"),
        ("fsi", False, "normaliser fitted on the training windows (mean_std.pt not found),"),
        ("fsi-numerical-normaliser", True, "normaliser numerical,"),
        (
            "fsi-numerical-normaliser",
            False,
            "normaliser fitted on the numerical training windows (mean_std.pt not found",
        ),
        ("fsi-real-normaliser", False, "normaliser channel,"),
    ],
)
def test_describe_recipe_names_source_of_normaliser(fsi, name, with_file, phrase):
    if not with_file:
        (fsi / "mean_std.pt").unlink()
    with open_data(fsi) as data:
        recipe = small_recipe(name)
        *_, line = describe_recipe(recipe, data.header, data.published_windows)
        assert phrase in line


class Trap:
    def __reduce__(self):
        return (print, ("this would run",))


def truncate(fsi):
    path = fsi / "hf_dataset" / "real" / "data-00001-of-00002.arrow"
    path.write_bytes(path.read_bytes()[:-100_000])


def shorten(fsi):
    """Truncate the bytes of a trajectory, so that they do not match its shape."""
    path = fsi / "hf_dataset" / "real" / "data-00000-of-00002.arrow"
    table = pyarrow.ipc.open_stream(path.read_bytes()).read_all()
    rows = table.to_pylist()
    rows[0]["u"] = rows[0]["u"][:-4]
    with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(pyarrow.Table.from_pylist(rows, schema=table.schema))


def precut(fsi):
    path = fsi / "hf_dataset" / "real" / "data-00000-of-00002.arrow"
    table = pyarrow.ipc.open_stream(path.read_bytes()).read_all()
    table = table.append_column("time_id", pyarrow.array([0] * len(table)))
    with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)


def rewrite(name, change):
    def apply(fsi):
        path = fsi / name
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    return apply


def rename(rows):
    rows[0]["sim_id"] = "9999_1.0_1.0_1.h5"


DAMAGES = {
    "truncated shard": (truncate, "data-00001-of-00002.arrow is truncated or corrupt; download it again"),
    "missing shard": (
        lambda fsi: (fsi / "hf_dataset/real/data-00000-of-00002.arrow").unlink(),
        "is incomplete: data-00000-of-00002.arrow is missing",
    ),
    "short row": (shorten, "u of 3272_18.2_0.8_1.h5 in .* bytes, which does not match 100 × 32 × 32 numbers"),
    "old layout": (precut, r"precut windows \(data version 1\)"),
    "missing trajectory": (
        rewrite("hf_dataset/test_index_real.json", rename),
        "list of test windows includes trajectory 9999_1.0_1.0_1.h5, which is not in",
    ),
    "late window": (
        rewrite("hf_dataset/val_index_real.json", lambda rows: rows[0].update(time_id=100)),
        "list of validation windows includes one at frame 100 of .*, which has 100",
    ),
    "unknown version": (
        rewrite("../version.json", lambda value: value.update(data_version="3.0.0")),
        "has data version 3.0.0, but only versions 2.x are supported",
    ),
    "no version": (rewrite("../version.json", lambda value: value.clear()), "has data version unknown"),
    "not JSON": (
        lambda fsi: (fsi / "remain_params_real.json").write_text("{"),
        "remain_params_real.json is not valid JSON",
    ),
    "code": (
        lambda fsi: (fsi / "mean_std.pt").write_bytes(pickle.dumps(Trap())),
        "mean_std.pt is corrupt, or contains objects other than tensors, numbers and strings, which are never loaded",
    ),
    "no windows": (
        rewrite("hf_dataset/train_index_real.json", lambda rows: rows[0].pop("time_id")),
        "lists of real windows in .* must have sim_id and time_id for each window",
    ),
    "other statistics": (lambda fsi: torch.save(torch.zeros(3), fsi / "mean_std.pt"), "must contain four tensors"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_invalid_realpdebench_files_raise_one_sentence(fsi, name, capsys):
    damage, message = DAMAGES[name]
    damage(fsi)
    with pytest.raises(ValueError, match=message) as error:
        open_data(fsi)
    assert "\n" not in str(error.value) and "this would run" not in capsys.readouterr().out


def test_invalid_files_of_hdf5_form(fsi):
    torch.save(Trap, fsi / "sim_id_mapping_real.pt")
    with pytest.raises(ValueError, match=r"sim_id_mapping_real.pt is corrupt, or contains objects other than tensors"):
        open_data(fsi / "real")
    (fsi / "sim_id_mapping_real.pt").unlink()
    with open_data(fsi / "real") as data:
        assert data.published_windows is None
        assert any(
            "No published lists of windows, so the split is by whole trajectories" in note for note in data.notes
        )
    path = fsi / "real" / "3272_18.2_0.8_1.h5"
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"3272_18.2_0.8_1.h5 is truncated or corrupt; copy or download it again"):
        open_data(fsi / "real")


@pytest.mark.parametrize("form", ["hf_dataset/real", "real"])
@pytest.mark.parametrize("task", TASKS)
def test_windows_are_slices_with_parameters_as_constant_fields(root, task, form):
    """Compare with full rows, strided, sliced and reordered, followed by the parameters."""
    folder = scenario_folder(root, task)
    with open_data(folder / form) as data:
        fields, sim_ids = data.header.layout.fields, data.header.parameters["trajectories"]
        measured = len(FIELDS[task]) - len(realpdebench.SCENARIOS[folder.name])
        for names in (fields, fields[::-1], fields[measured:] + fields[:1], fields[:measured]):
            spec = WindowSpec(names, names[:1], 3, 2, stride=7, time_stride=2, space_stride=2)
            windows = Windows(data, (1, 3), spec)
            for index in (0, len(windows) - 1):
                row = windows.rows()[index]
                sim_id = sim_ids[row.trajectory]
                rows = read_row(folder / "hf_dataset" / "real", sim_id)[row.history : row.last + 1 : 2, ::2, ::2]
                numbers = realpdebench._parse_sim_id(sim_id)[: len(fields) - measured]
                constant = np.broadcast_to(np.float32(numbers), (*rows.shape[:-1], len(numbers)))
                values = np.concatenate([rows, constant], axis=-1)[..., [fields.index(name) for name in names]]
                history, future = windows[index]
                np.testing.assert_array_equal(history, values[:3])
                np.testing.assert_array_equal(future, values[3:, ..., :1])


def test_numerical_combustion_is_read_by_channel(root):
    """Fifteen channels are interleaved in one column; any selection, in any order, equals the full trajectory."""
    for form in ("hf_dataset/numerical", "numerical"):
        with open_data(root / "combustion" / form) as data:
            fields = data.header.layout.fields
            assert len(fields) > 15
            trajectory = data[0]
            for names in (fields, fields[:0:-3], ("temperature", "intensity", "velocity_z")):
                history, future = Windows(data, (0,), WindowSpec(names, names, 2, 1))[4]
                channels = [fields.index(name) for name in names]
                np.testing.assert_array_equal(np.concatenate([history, future]), trajectory[4:7][..., channels])


def test_compressed_hdf5_reads_only_requested_fields(fsi, monkeypatch):
    with open_data(fsi / "real") as data:
        expected = data[:]
    for path in (fsi / "real").glob("*.h5"):
        with h5py.File(path, "r+") as file:
            for name in ("measured_data/u", "measured_data/v"):
                values = file[name][:]
                del file[name]
                file.create_dataset(name, data=values, chunks=(10, 8, 8), compression="gzip")
    with open_data(fsi / "real") as data:
        np.testing.assert_array_equal(data[:], expected)
        windows = Windows(data, (2,), WindowSpec(("reynolds", "velocity_y"), ("velocity_y",), 2, 1))
        requests = []
        monkeypatch.setattr(hdf5, "ask", lambda *args, ask=hdf5.ask: requests.append(args[2]) or ask(*args))
        history, future = windows[5]
        np.testing.assert_array_equal(history, expected[2, 5:7][..., [2, 1]])
        np.testing.assert_array_equal(future, expected[2, 7:8][..., 1:2])
    assert [request[:3] for request in requests] == [["measured_data/v", 5, 8]], "velocity_x was not requested"


def test_missing_pyarrow_names_the_extra(fsi, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r'install pyarrow with: pip install "sigmasolver\[arrow\]"'):
        open_data(fsi)


def test_pickled_windows_are_equal(root):
    with open_data(root / "fsi") as data:
        windows = small_recipe("fsi").windows_of(data, "train")
        unpickled = pickle.loads(pickle.dumps(windows))
        assert isinstance(unpickled, Windows) and len(unpickled) == len(windows)
        for values, expected in zip(windows[3], unpickled[3], strict=True):
            assert torch.equal(values, expected)
