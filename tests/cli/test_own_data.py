"""A user's own files on the command line: axes, boundaries, time step, units, vectors, masks, test data, errors."""

import json
import re
import shutil

import h5py
import numpy as np
import pytest

from sigmasolver.data.formats import opened
from sigmasolver.data.store import open_store
from sigmasolver.forecast.checkpoint import load_read_options, load_recipe
from sigmasolver.runs import Run, read_rows

TINY = [
    word
    for setting in ("width=16", "depth=1", "heads=2", "slices=4", "modes=2")
    for word in ("--set", f"model.{setting}")
]  # fmt: skip
QUICK = [*TINY, "--set", "train.updates=2", "--history", 2, "--block", 1, "--horizon", 2, "--device", "cpu"]
STILL = [*TINY, "--set", "train.updates=2", "--device", "cpu"]


def flow(count=6, frames=6, grid=(8, 6), fields=2) -> np.ndarray:
    """(count, time, x, y, field)."""
    return np.random.default_rng(0).normal(size=(count, frames, *grid, fields)).astype(np.float32)


def stored(path) -> np.ndarray:
    with open_store(path) as store:
        return store[:]


def layout(path):
    with open_store(path) as store:
        return store.header.layout


def values(run, metric="relative_l2"):
    rows = [
        row
        for row in read_rows(run / "records.jsonl")
        if row["metric"] == metric and row["model"] == "transolver-sigma"
    ]
    return {row["field"]: row["value"] for row in rows}


# --- axes


@pytest.mark.parametrize(
    ("axes", "order"),
    [
        ("count,time,x,y,field", (0, 1, 2, 3, 4)),
        ("field,y,x,time,count", (4, 3, 2, 1, 0)),
        ("x,y,count,field,time", (2, 3, 0, 4, 1)),
        ("count,field,time,y,x", (0, 4, 1, 3, 2)),
    ],
)
@pytest.mark.parametrize("suffix", [".npy", ".npz", ".h5"])
def test_axes_option_in_any_order_gives_the_same_store(tmp_path, call, axes, order, suffix):
    file, array = tmp_path / f"a{suffix}", flow().transpose(order)
    if suffix == ".npy":
        np.save(file, array)
    elif suffix == ".npz":
        np.savez(file, flow=array)
    else:
        with h5py.File(file, "w") as handle:
            handle["flow"] = array
    code, _, err = call("import-data", file, "--out", tmp_path / "s.h5", "--fields", "u,v", "--axes", axes)
    assert code == 0, err
    np.testing.assert_array_equal(stored(tmp_path / "s.h5"), flow())
    assert layout(tmp_path / "s.h5").fields == ("u", "v")


def test_axes_option_without_count_field_or_time(tmp_path, call):
    field = flow()[0, ..., 0]
    np.save(tmp_path / "one.npy", field.transpose(1, 2, 0))
    assert call("import-data", tmp_path / "one.npy", "--out", tmp_path / "one.h5", "--axes", "x,y,time")[0] == 0
    np.testing.assert_array_equal(stored(tmp_path / "one.h5"), field[None, ..., None])
    np.savez(tmp_path / "pair.npz", a=flow()[:, 0, ..., 0].T, p=flow()[:, 0, ..., 1].T)
    assert call("import-data", tmp_path / "pair.npz", "--out", tmp_path / "pair.h5", "--axes", "y,x,count")[0] == 0
    np.testing.assert_array_equal(stored(tmp_path / "pair.h5"), flow()[:, :1])


def test_axes_option_for_the_files_of_a_folder(tmp_path, call):
    folder = tmp_path / "runs"
    folder.mkdir()
    for number, trajectory in enumerate(flow()):
        np.save(folder / f"run{number}.npy", trajectory.transpose(3, 1, 2, 0))
    code, _, err = call(
        "import-data", folder, "--out", tmp_path / "s.h5", "--axes", "field,x,y,time", "--fields", "u,v"
    )
    assert code == 0, err
    np.testing.assert_array_equal(stored(tmp_path / "s.h5"), flow())
    code, _, err = call("import-data", folder, "--out", tmp_path / "t.h5", "--axes", "count,field,x,y,time")
    assert code == 2 and "omit count from the axes" in err


# --- ambiguous axes: time and space, or both of space


@pytest.fixture(params=["npz", "folder", "npy"])
def pair(tmp_path, request):
    """A coefficient and a pressure on 16 x 16 points, in three forms."""
    a, p = np.random.default_rng(1).normal(size=(2, 6, 16, 16)).astype(np.float32)
    path = tmp_path / ("pair" if request.param == "folder" else f"pair.{request.param}")
    if request.param == "npz":
        np.savez(path, a=a, p=p)
    elif request.param == "npy":
        np.save(path, np.stack([a, p], axis=-1))
    else:
        path.mkdir()
        for number in range(6):
            np.savez(path / f"case{number}.npz", a=a[number], p=p[number])
    return path, np.stack([a, p], axis=-1)[:, None]


def test_train_rejects_data_that_may_be_steady_or_unsteady(tmp_path, call, pair):
    code, _, err = call("train", "--data", pair[0], "--out", tmp_path / "run", *STILL)
    assert code == 2 and "--steady" in err and "--unsteady" in err and err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("options", [["--steady"], ["--boundary", "wall,wall"]])
def test_train_on_a_steady_pair_with_steady_or_boundary_option(tmp_path, call, pair, options):
    args = [
        "train",
        "--data",
        pair[0],
        "--out",
        tmp_path / "run",
        "--fields",
        "a,p",
        "--targets",
        "p",
        *STILL,
        *options,
    ]
    code, _, err = call(*args)
    assert code == 0, err
    task = load_recipe(Run(tmp_path / "run")).task
    assert task.steady and (task.inputs, task.targets, task.grid) == (("a",), ("p",), (16, 16))
    assert not (tmp_path / "run" / "data.h5").exists()
    assert call("import-data", pair[0], "--out", tmp_path / "s.h5", "--fields", "a,p", *options)[0] == 0
    np.testing.assert_array_equal(stored(tmp_path / "s.h5"), pair[1])
    assert call("evaluate", tmp_path / "run", "--device", "cpu")[0] == 0


def test_coordinates_determine_the_number_of_spatial_axes(tmp_path, call):
    u, x = np.random.default_rng(1).normal(size=(4, 16, 12)), np.arange(16.0)
    np.savez(tmp_path / "plane.npz", u=u, x=x, y=np.arange(12.0))
    np.savez(tmp_path / "line.npz", u=u, x=np.arange(12.0))
    for name, shape in (("plane", (4, 1, 16, 12, 1)), ("line", (4, 16, 12, 1))):
        code, _, err = call("import-data", tmp_path / f"{name}.npz", "--out", tmp_path / f"{name}.h5")
        assert code == 0 and stored(tmp_path / f"{name}.h5").shape == shape, err


# --- boundary, time step, units


def test_boundary_dt_and_units_options_are_recorded_in_the_run(tmp_path, call):
    np.save(tmp_path / "a.npy", flow())
    options = ["--fields", "u,v", "--boundary", "periodic,wall", "--dt", 0.25, "--units", "m/s,m/s"]
    code, out, err = call("train", "--data", tmp_path / "a.npy", "--out", tmp_path / "run", *options, *QUICK)
    assert code == 0, err
    with opened(
        tmp_path / "a.npy", *load_read_options(Run(tmp_path / "run"), load_recipe(Run(tmp_path / "run")))
    ) as data:
        layout = data.header.layout
        np.testing.assert_array_equal(data[:], flow())
    assert (layout.boundary, layout.units) == (("periodic", "wall"), ("m/s", "m/s"))
    np.testing.assert_allclose(layout.times, 0.25 * np.arange(6))
    assert "axes: x periodic, y wall; frames 0.25 apart" in out and "It has no boundary" not in out
    recipe = load_recipe(Run(tmp_path / "run"))
    assert recipe.model.options.padding == ("circular", "zeros")
    facts = json.loads((tmp_path / "run" / "data.json").read_text())
    assert facts["reading"] == {"boundary": ["periodic", "wall"], "dt": 0.25, "units": ["m/s", "m/s"]}
    assert call("import-data", tmp_path / "a.npy", "--out", tmp_path / "a.h5")[0] == 0
    code, _, err = call("train", "--data", tmp_path / "a.h5", "--out", tmp_path / "new", "--dt", 1, *QUICK)
    assert code == 2 and "is a store" in err and not (tmp_path / "new").exists()


def test_single_boundary_applies_to_all_axes(tmp_path, call):
    np.save(tmp_path / "a.npy", flow())
    args = ["import-data", tmp_path / "a.npy", "--out", tmp_path / "a.h5", "--fields", "u,v", "--boundary", "periodic"]
    assert call(*args)[0] == 0 and layout(tmp_path / "a.h5").boundary == ("periodic", "periodic")


# --- the printed plan


def test_train_prints_the_plan_once_with_all_settings(tmp_path, call):
    np.save(tmp_path / "a.npy", flow())
    options = ["--fields", "u,v", "--set", "task.horizon=3", "--set", "train.batch=4", "--set", "train.lr=0.01"]
    code, out, err = call("train", "--data", tmp_path / "a.npy", "--out", tmp_path / "run", *QUICK, *options)
    assert code == 0, err
    for line in (
        "fields: u, v forecast, other inputs: none; u, v count as one vector (velocity)",
        "frames: 2 given, 1 predicted per call, 3 evaluated (of 6)",
        "training: 2 steps of 4 windows in float32, adamw, learning rate 0.01",
        "model: transolver-sigma, width 16, depth 1",
        "split: the first 5 trajectories for training, the last 1 for testing",
    ):
        assert out.count(line) == 1, out
    assert out.count("frames: ") == out.count("training: ") == 1 and out.index("training: ") < out.index(
        "trained, 2 steps"
    )


# --- vectors


def test_vector_option_groups_velocity_components(tmp_path, call):
    cases = {
        "u,v": (None, {"velocity": (0, 1)}),
        "a,b": ("a,b", {"(a, b)": (0, 1)}),
        "v,w": (None, {"v": (0,), "w": (1,)}),
    }
    np.save(tmp_path / "a.npy", flow())
    for fields, (vector, groups) in cases.items():
        run = tmp_path / fields.replace(",", "")
        args = ["train", "--data", tmp_path / "a.npy", "--out", run, "--fields", fields, *QUICK]
        assert call(*args, *(["--vector", vector] if vector else []))[0] == 0
        assert load_recipe(Run(run)).task.groups == groups
    assert call("evaluate", tmp_path / "uv", "--device", "cpu")[0] == 0
    errors = values(tmp_path / "uv")
    assert errors["velocity"] == pytest.approx((errors["u"] + errors["v"]) / 2)
    separate = [
        "train",
        "--data",
        tmp_path / "a.npy",
        "--out",
        tmp_path / "separate",
        "--fields",
        "u,v",
        "--vector",
        "none",
    ]
    assert call(*separate, *QUICK)[0] == 0
    assert load_recipe(Run(tmp_path / "separate")).task.vectors == ()
    first, second = (Run(tmp_path / name).read_log()[0]["loss"] for name in ("uv", "separate"))
    assert first == pytest.approx(second / 2, rel=1e-2), "the mean of two fields, not their sum"


# --- test data


def test_train_on_all_data_with_separate_test_data(tmp_path, call):
    np.save(tmp_path / "a.npy", flow())
    other = np.random.default_rng(9).normal(size=(2, 6, 8, 6, 2)).astype(np.float32)
    np.save(tmp_path / "b.npy", other)
    args = ["train", "--data", tmp_path / "a.npy", "--fields", "u,v", "--boundary", "periodic", *QUICK]
    code, out, err = call(*args, "--out", tmp_path / "all", "--test", 0)
    assert code == 0 and "the first 6 trajectories for training, none for testing" in out, err
    assert out.endswith(f"next: sigmasolver evaluate {tmp_path / 'all'} --data FILE\n")
    code, _, err = call("evaluate", tmp_path / "all", "--device", "cpu")
    assert code == 2 and "pass other data with --data" in err
    code, out, err = call(*args, "--out", tmp_path / "two", "--test-data", tmp_path / "b.npy")
    assert (
        code == 0 and f"none for testing; 1 of the training trajectories for validation; tested on {tmp_path}" in out
    ), err
    assert call("evaluate", tmp_path / "two", "--device", "cpu")[0] == 0
    assert call("evaluate", tmp_path / "all", "--data", tmp_path / "b.npy", "--device", "cpu")[0] == 0
    assert values(tmp_path / "all") == values(tmp_path / "two") and values(tmp_path / "all")
    assert {row["windows"] for row in read_rows(tmp_path / "two" / "records.jsonl")} == {6}
    code, out, err = call("diagnose", tmp_path / "two", "--only", "maps,trust", "--device", "cpu")
    assert code == 0 and "of the test split" in out, err
    with np.load(tmp_path / "two" / "diagnose" / "maps.npz") as maps:
        np.testing.assert_allclose(maps["truth"][0], other[0, 2:4], rtol=1e-2, atol=1e-2)  # stored in half precision
    assert call("report", tmp_path / "two", "--out", tmp_path / "page.html")[0] == 0
    code, _, err = call(*args, "--out", tmp_path / "three", "--test-data", tmp_path / "a.npy")
    assert code == 2 and "is also in the training data" in err
    code, _, err = call(*args, "--out", tmp_path / "four", "--test-data", tmp_path / "b.npy", "--test", 2)
    assert code == 2 and "omit --test" in err and not (tmp_path / "four").exists()
    assert call("train", "--resume", tmp_path / "two", "--device", "cpu")[0] == 0
    assert "test" in json.loads((tmp_path / "two" / "data.json").read_text())


# --- evaluate and forecast with the files of the training


def test_evaluate_and_forecast_read_files_like_the_training(tmp_path, call):
    training, test = tmp_path / "training", tmp_path / "test"
    for folder, seed in ((training, 0), (test, 5)):
        folder.mkdir()
        for number, trajectory in enumerate(
            np.random.default_rng(seed).normal(size=(4, 6, 8, 6, 2)).astype(np.float32)
        ):
            np.save(folder / f"run{number}.npy", trajectory.transpose(3, 1, 2, 0))
    options = ["--fields", "u,v", "--axes", "field,x,y,time", "--boundary", "periodic,wall", "--dt", 0.5]
    assert call("train", "--data", training, "--out", tmp_path / "run", *options, *QUICK)[0] == 0
    assert call("import-data", test, "--out", tmp_path / "test.h5", *options)[0] == 0
    for out, data in (
        (tmp_path / "p.npy", test),
        (tmp_path / "q.npy", tmp_path / "test.h5"),
        (tmp_path / "r.npy", test / "run0.npy"),
    ):
        code, _, err = call(
            "forecast", tmp_path / "run", "--input", data, "--steps", 3, "--out", out, "--device", "cpu"
        )
        assert code == 0, err
    np.testing.assert_array_equal(np.load(tmp_path / "p.npy"), np.load(tmp_path / "q.npy"))
    np.testing.assert_array_equal(np.load(tmp_path / "p.npy")[:1], np.load(tmp_path / "r.npy"))
    code, _, err = call("evaluate", tmp_path / "run", "--data", test, "--device", "cpu")
    assert code == 0, err
    expected = values(tmp_path / "run")
    (tmp_path / "run" / "records.jsonl").unlink()
    assert call("evaluate", tmp_path / "run", "--data", tmp_path / "test.h5", "--device", "cpu")[0] == 0
    assert values(tmp_path / "run") == expected
    (tmp_path / "run" / "records.jsonl").unlink()
    assert call("evaluate", tmp_path / "run", "--data", training, "--device", "cpu")[0] == 0
    own = values(tmp_path / "run")
    assert {row["windows"] for row in read_rows(tmp_path / "run" / "records.jsonl")} == {3}, "only the test split"
    assert call("evaluate", tmp_path / "run", "--device", "cpu")[0] == 0 and values(tmp_path / "run") == own
    shutil.copy(training / "run1.npy", test / "run9.npy")
    code, _, err = call("evaluate", tmp_path / "run", "--data", test, "--device", "cpu")
    assert code == 2 and "Trajectory 4 of" in err and "is in the training data of" in err


def test_data_of_a_run_may_be_moved_and_renamed(tmp_path, call):
    np.save(tmp_path / "a.npy", flow())
    options = ["--fields", "u,v", "--boundary", "periodic", "--dt", 0.5]
    code, _, err = call("train", "--data", tmp_path / "a.npy", "--out", tmp_path / "run", *options, *QUICK)
    assert code == 0, err
    (tmp_path / "a.npy").rename(tmp_path / "b.npy")
    code, _, err = call("evaluate", tmp_path / "run", "--device", "cpu")
    assert code == 2 and "pass its new path with --data" in err
    assert call("evaluate", tmp_path / "run", "--data", tmp_path / "b.npy", "--device", "cpu")[0] == 0
    assert {row["windows"] for row in read_rows(tmp_path / "run" / "records.jsonl")} == {3}, "only the test split"
    code, _, err = call("train", "--resume", tmp_path / "run", "--data", tmp_path / "b.npy", "--device", "cpu")
    assert code == 0, err
    code, _, err = call("diagnose", tmp_path / "run", "--only", "decomposition", "--device", "cpu")
    assert code == 0, err
    other = flow()
    other[0, 0, 0, 0, 0] += 1
    np.save(tmp_path / "b.npy", other)
    code, _, err = call("train", "--resume", tmp_path / "run", "--device", "cpu")
    assert code == 2 and "started with other data" in err


def test_train_rejects_a_trajectory_in_two_splits(tmp_path, call):
    data = flow()
    data[5] = data[1]
    np.save(tmp_path / "a.npy", data)
    code, _, err = call("train", "--data", tmp_path / "a.npy", "--out", tmp_path / "run", "--fields", "u,v", *QUICK)
    assert code == 2 and "is identical to" in err and not (tmp_path / "run").exists()


# --- non-finite values


@pytest.fixture
def non_finite(tmp_path):
    folder = tmp_path / "runs"
    folder.mkdir()
    data = flow()
    data[2, 3, 4, 5, 1] = np.nan
    data[4, 0, 0, 0, 0] = np.inf
    for number, trajectory in enumerate(data):
        np.save(folder / f"run{number}.npy", trajectory)
    return folder, data


def test_skip_bad_skips_non_finite_trajectories_of_a_folder(tmp_path, call, non_finite):
    folder, data = non_finite
    args = ["train", "--data", folder, "--fields", "u,v", "--out", tmp_path / "run", *QUICK]
    code, _, err = call(*args)
    assert code == 2 and "trajectory 2 (run2.npy), trajectory 4 (run4.npy)" in err and "--skip-bad" in err, err
    assert err.count("\n") == 1
    code, out, err = call(*args, "--skip-bad")
    assert code == 0, err
    good = np.delete(data, [2, 4], axis=0)
    np.testing.assert_array_equal(stored(tmp_path / "run" / "data.h5"), good)
    skipped = ["trajectory 2 (run2.npy)", "trajectory 4 (run4.npy)"]
    assert json.loads((tmp_path / "run" / "data.json").read_text())["skipped"] == skipped
    with open_store(tmp_path / "run" / "data.h5") as store:
        assert store.header.parameters["skipped"] == skipped
    assert "Skipped because of non-finite values: trajectory 2 (run2.npy)" in out
    assert call(*args, "--skip-bad")[0] == 0, "the same command finds its finished run"


def test_skip_bad_skips_non_finite_trajectories_of_a_store(tmp_path, call, non_finite):
    folder, data = non_finite
    assert call("import-data", folder, "--fields", "u,v", "--out", tmp_path / "all.h5")[0] == 0
    args = ["train", "--data", tmp_path / "all.h5", "--out", tmp_path / "run", *QUICK]
    code, _, err = call(*args)
    assert code == 2 and "trajectory 4 of" in err and "--skip-bad" in err, err
    assert call(*args, "--skip-bad")[0] == 0
    np.testing.assert_array_equal(stored(tmp_path / "run" / "data.h5"), np.delete(data, [2, 4], axis=0))


# --- masks


def test_mask_option_is_recorded_and_excludes_the_solid(tmp_path, call):
    solid = np.zeros((6, 1, 8, 6), np.float32)
    solid[:, :, 2:4, 2:5] = 1
    data = flow()
    data[np.broadcast_to(solid == 1, data.shape[:-1])] = np.nan  # as many solvers write it
    np.savez(tmp_path / "a.npz", u=data[..., 0], v=data[..., 1], solid=np.broadcast_to(solid, data.shape[:-1]))
    code, out, err = call("import-data", tmp_path / "a.npz", "--out", tmp_path / "a.h5", "--mask", "solid")
    assert code == 0 and "solid is 1 in the solid" in out, err
    for name, args in (
        ("npz", ["--data", tmp_path / "a.npz", "--mask", "solid"]),
        ("store", ["--data", tmp_path / "a.h5"]),
    ):
        code, out, err = call("train", *args, "--out", tmp_path / name, *QUICK)
        assert code == 0 and "only points where solid is 0 count" in out, err
        task = load_recipe(Run(tmp_path / name)).task
        assert (task.mask, task.inputs, task.targets) == ("solid", ("u", "v", "solid"), ("u", "v"))
        assert call("evaluate", tmp_path / name, "--device", "cpu")[0] == 0
    assert values(tmp_path / "npz") == values(tmp_path / "store")
    code, out, err = call("diagnose", tmp_path / "npz", "--only", "decomposition", "--device", "cpu")
    assert code == 0 and "The data contain a solid." in out, err
    args = ["forecast", tmp_path / "npz", "--input", tmp_path / "a.h5", "--steps", 2, "--out", tmp_path / "p.npy"]
    code, out, err = call(*args, "--device", "cpu")
    assert code == 0 and "where solid is 1, the forecast is copied from the last input frame" in out, err
    frames = np.load(tmp_path / "p.npy")
    inside = np.broadcast_to(solid == 1, frames.shape[:-1])
    assert not frames[inside].any() and frames[~inside].all()


@pytest.mark.parametrize("layout", ["npz", "h5", "axes", "folder"])
def test_boolean_mask_trains_like_a_numeric_one(tmp_path, call, layout):
    solid, data = np.zeros(flow().shape[:-1], bool), flow()
    solid[:, :, 2:4, 2:5] = True
    results = []
    for kind in (bool, np.float32):
        fields = {"u": data[..., 0], "v": data[..., 1], "solid": solid.astype(kind)}
        path, options = tmp_path / f"{kind.__name__}.npz", ()
        if layout == "h5":
            path = path.with_suffix(".h5")
            with h5py.File(path, "w") as file:
                for name, values_of in fields.items():
                    file[name] = values_of
        elif layout == "folder":
            path = tmp_path / kind.__name__
            path.mkdir()
            for index in range(len(data)):
                np.savez(path / f"{index}.npz", **{name: values_of[index] for name, values_of in fields.items()})
        elif layout == "axes":
            options = ("--axes", "time,count,x,y")
            np.savez(path, **{name: values_of.swapaxes(0, 1) for name, values_of in fields.items()})
        else:
            np.savez(path, **fields)
        run = tmp_path / f"run-{kind.__name__}"
        code, out, err = call("train", "--data", path, "--mask", "solid", *options, "--out", run, *QUICK)
        assert code == 0 and "only points where solid is 0 count" in out, err
        assert call("evaluate", run, "--device", "cpu")[0] == 0
        results.append(values(run))
    assert results[0] == results[1]


@pytest.mark.parametrize("keep", [(slice(None), 0), (0, 0)])
def test_mask_of_another_shape_states_the_required_one(tmp_path, call, keep):
    solid, data = np.zeros(flow().shape[:-1], bool)[keep], flow()
    np.savez(tmp_path / "a.npz", u=data[..., 0], v=data[..., 1], solid=solid, nu=np.ones(len(data)))
    for fields in ((), ("--fields", "u,v")):
        args = ("--data", tmp_path / "a.npz", "--mask", "solid", *fields, "--out", tmp_path / "run")
        code, _, err = call("train", *args, *QUICK)
        assert code == 2 and err.count("\n") == 1
        assert f"solid has shape {solid.shape}, but the fields have {data.shape[:-1]}; save it with that shape" in err


# --- errors


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--axes", "count,time,x,y,z"], "its last axis must hold the 2 named fields"),
        (["--axes", "count,time,x,x,field"], "Duplicate axis x"),
        (["--axes", "count,time,y,field,z"], "must include x"),
        (["--axes", "count,frames,x,y,field"], 'Unknown axis "frames"'),
        (["--axes", "count,x,y"], "no array with axes count, x, y"),
        (["--axes", "count,time,x,y,field", "--steady"], "omit --steady"),
        (["--boundary", "periodic,wall,open", "--unsteady"], "3 boundary values for 2 spatial axes"),
        (["--boundary", "free"], "choose from periodic, wall, open"),
        (["--units", "m/s"], "give one for each"),
        (["--dt", "-1"], "must be positive"),
        (["--mask", "solid"], "its last axis must hold the 3 named fields"),
        (["--vector", "u,q"], "vector component q must be a target"),
        (["--vector", "u"], "at least two"),
        (["--test", "6"], "leave one for training"),
        (["--test", "-1"], "leave one for training"),
        (["--test-data", "nothing.npy"], "File or folder not found"),
    ],
)
def test_own_data_errors_are_one_sentence(tmp_path, call, args, message):
    np.save(tmp_path / "a.npy", flow())
    code, _, err = call(
        "train", "--data", tmp_path / "a.npy", "--fields", "u,v", "--out", tmp_path / "run", *QUICK, *args
    )
    assert code == 2 and re.search(message, err), err
    assert err.count("\n") == 1 and err.rstrip("\n").endswith((".", "?")), err
    assert not (tmp_path / "run" / "recipe.json").exists()


def test_invalid_setting_is_reported_before_the_import(tmp_path, call):
    np.save(tmp_path / "flow.npy", flow())
    args = ("train", "--data", tmp_path / "flow.npy", "--fields", "u,v", "--out", tmp_path / "run")
    for setting, message in (
        ("model.widht=8", 'Unknown setting "model.widht"; did you mean width'),
        ("model.width=wide", 'model.width must be an integer, not "wide".'),
        ("model.width.x=8", "model.width is a single value without nested settings"),
        ("width=8", 'Unknown setting "width"; did you mean model.width?'),
    ):
        code, out, err = call(*args, "--set", setting)
        assert code == 2 and message in err and "trajectories" not in out
    assert not (tmp_path / "run").exists()


def test_print_config_creates_no_run_folder(tmp_path, call, monkeypatch):
    np.save(tmp_path / "flow.npy", flow())
    monkeypatch.chdir(tmp_path)
    args = ("train", "--data", "flow.npy", "--fields", "u,v", "--history", 2, "--set", "model.width=16")
    code, printed, err = call(*args, "--print-config")
    assert code == 0 and "width = 16" in printed and [path.name for path in tmp_path.iterdir()] == ["flow.npy"], err


def test_own_data_options_are_rejected_for_a_task(tmp_path, call):
    for options in (["--vector", "u,v"], ["--mask", "solid"], ["--test", "0"]):
        code, _, err = call("train", "ns2d", "--data", tmp_path, "--out", tmp_path / "run", *options, "--device", "cpu")
        assert code == 2 and "only to your own data" in err


def test_steady_plane_in_one_file_requires_axes(tmp_path, call):
    a, p = np.random.default_rng(2).normal(size=(2, 16, 12)).astype(np.float32)
    np.savez(tmp_path / "one.npz", a=a, p=p)
    args = ["import-data", tmp_path / "one.npz", "--out"]
    code, _, err = call(*args, tmp_path / "s.h5", "--steady")
    assert code == 2 and "--axes count,x " in err and "--axes x,y " in err and err.count("\n") == 1
    for axes, shape in (("x,y", (1, 1, 16, 12, 2)), ("count,x", (16, 1, 12, 2))):
        assert call(*args, tmp_path / f"{axes}.h5", "--axes", axes)[0] == 0
        assert stored(tmp_path / f"{axes}.h5").shape == shape
