"""Evaluations of a trained run against NumPy on the raw file: windows, rows, and reuse of records."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from sigmasolver.data import formats
from sigmasolver.data.formats import ReadOptions, import_data, open_data
from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.store import Writer, open_store
from sigmasolver.diagnose.run import diagnose_run
from sigmasolver.evaluate import Request, evaluate_run, metrics, records_of_test_part
from sigmasolver.forecast.checkpoint import load, not_compared
from sigmasolver.forecast.symmetric import symmetric_rollout
from sigmasolver.models import Options, count_parameters
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.report.rows import with_unique_names
from sigmasolver.report.sample import sample_of
from sigmasolver.report.tables import comparison
from sigmasolver.runs import Run, read_rows, replace_rows
from sigmasolver.simulate.fixtures.hdf5_sets import write_pdebench
from sigmasolver.simulate.generate import generate
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.symmetries import SYMMETRIES
from sigmasolver.tasks import Task
from sigmasolver.train.infer_recipe import UserChoices, infer_recipe
from sigmasolver.train.job import resume_run, train_run

FLOW = replace(DEMO, grid=32, stored=16, step=1 / 64, burn_in=1.0, frames=8)
TASK = Task("tiny", ("vorticity",), ("vorticity",), (16, 16), 2, 1, 3, 6, 2, "channel", symmetries="kolmogorov-4")
MODEL = ModelRecipe(width=16, depth=1, heads=2, slices=4, modes=3, options=Options(dropout=0.1))
RECIPE = Recipe(TASK, MODEL, TrainRecipe(updates=12, batch=4, seed=3, checks=1))
TIDY = {"task", "run", "model", "seed", "metric", "field", "lead", "value", "commit", "machine", "precision", "data",
        "step"}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A data file and a run briefly trained on it."""
    folder = tmp_path_factory.mktemp("trained")
    generate(FLOW, 8, 0, folder / "flow.h5")
    train_run(RECIPE, folder / "flow.h5", Run(folder / "run"))
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """The run without records."""
    shutil.copytree(trained / "run", tmp_path / "run", ignore=shutil.ignore_patterns("records.jsonl"))
    return Run(tmp_path / "run")


@pytest.fixture(scope="module")
def raw(trained):
    with open_store(trained / "flow.h5") as store:
        return np.asarray(store[:], np.float64)


def value(rows, metric, model="persistence", field="vorticity", lead=None):
    matches = [
        row for row in rows if (row["metric"], row["model"], row["field"], row["lead"]) == (metric, model, field, lead)
    ]
    assert len(matches) == 1, (metric, model, field, lead)
    return matches[0]["value"]


def cut(raw, history, horizon):
    """Last input frame and future frames of every window of trajectories (n, frames, ...)."""
    starts = range(raw.shape[1] - history - horizon + 1)
    last = np.stack([trajectory[start + history - 1] for trajectory in raw for start in starts])
    future = np.stack(
        [trajectory[start + history : start + history + horizon] for trajectory in raw for start in starts]
    )
    return last, future


def norm(values, *axes):
    return np.sqrt((values**2).sum(axes))


def by_hand(predicted, true):
    """The measures of one field, (n, H, x, y, 1), by their definitions."""
    error, leads = predicted - true, range(true.shape[1])
    corr = [
        [np.corrcoef(p.ravel(), t.ravel())[0, 1] for p, t in zip(*pair, strict=True)]
        for pair in zip(predicted, true, strict=True)
    ]
    measures = {
        ("relative_l2", None): (norm(error, 1, 2, 3, 4) / norm(true, 1, 2, 3, 4)).mean(),
        ("relative_l2_final", None): (norm(error[:, -1], 1, 2, 3) / norm(true[:, -1], 1, 2, 3)).mean(),
        ("rmse", None): np.sqrt((error**2).mean()),
        ("mae", None): np.abs(error).mean(),
        ("correlation", None): np.mean(corr),
    }
    for lead in leads:
        e, t = error[:, lead], true[:, lead]
        measures["relative_l2_lead", lead + 1] = (norm(e, 1, 2, 3) / norm(t, 1, 2, 3)).mean()
        measures["rmse_lead", lead + 1] = np.sqrt((e**2).mean())
        measures["mae_lead", lead + 1] = np.abs(e).mean()
        measures["correlation_lead", lead + 1] = np.mean([by_lead[lead] for by_lead in corr])
    return measures


def check_rows(rows, expected, model="persistence"):
    for (metric, lead), number in expected.items():
        assert value(rows, metric, model, lead=lead) == pytest.approx(number, rel=1e-9), (metric, lead)


# --- persistence by hand


def test_persistence_rows_match_numpy(run, raw):
    rows = evaluate_run(run)
    last, future = cut(raw[6:], 2, 3)  # the last two trajectories are the test split
    still = np.broadcast_to(last[:, None], future.shape)
    check_rows(rows, by_hand(still, future))
    assert {row["windows"] for row in rows} == {len(future)} == {8}
    ratios = norm(still - future, 1, 2, 3, 4) / norm(future, 1, 2, 3, 4)
    row = next(row for row in rows if row["model"] == "persistence" and row["metric"] == "relative_l2")
    assert row["deviation"] == pytest.approx(ratios.std(ddof=1))
    # REALM's error: fields standardised by mean and deviation of the training trajectories, summed over leads.
    training = raw[:5]
    squared = (((still - future) / training.std()) ** 2).mean((0, 2, 3, 4))
    assert value(rows, "realm_error", field=None) == pytest.approx(squared.sum(), rel=1e-5)
    assert value(rows, "realm_error_per_call", field=None) == pytest.approx(squared.mean(), rel=1e-5)
    corr = [value(rows, "correlation_lead", lead=lead) for lead in (1, 2, 3)]
    dropped = [lead for lead, correlation in enumerate(corr, 1) if correlation < 0.8]
    assert value(rows, "correlation_time") == (pytest.approx(FLOW.interval * dropped[0]) if dropped else None)
    assert value(rows, "blow_up", field=None) == 0 and value(rows, "survived", field=None) == 3


def test_model_rows_match_its_rollout(run, raw):
    rows = evaluate_run(run)
    _, future = cut(raw[6:], 2, 3)
    history = np.stack([trajectory[start : start + 2] for trajectory in raw[6:] for start in range(4)])
    frames = load(run.path).rollout(torch.from_numpy(history).float(), 3).frames.double().numpy()
    for (metric, lead), number in by_hand(frames, future).items():
        assert value(rows, metric, "transolver-sigma", lead=lead) == pytest.approx(number, rel=1e-4), (metric, lead)
    assert value(rows, "parameters", "transolver-sigma", None) == sum(
        p.numel() for p in load(run.path).model.parameters()
    )


def test_parameters_row_counts_trainable_parameters(trained, tmp_path):
    recipe = replace(RECIPE, model=replace(MODEL, name="hpm-frozen", options=Options()))
    train_run(replace(recipe, train=replace(recipe.train, updates=1)), trained / "flow.h5", Run(tmp_path / "frozen"))
    trainable = count_parameters("hpm", recipe.model.config(recipe.task))
    assert value(evaluate_run(Run(tmp_path / "frozen")), "parameters", "hpm-frozen", None) == trainable


def test_evaluate_run_on_other_splits(run, raw):
    for part, trajectories in (("train", raw[:5]), ("validation", raw[5:6])):
        last, future = cut(trajectories, 2, 3)
        check_rows(
            evaluate_run(run, Request(split=part)), by_hand(np.broadcast_to(last[:, None], future.shape), future)
        )


def test_evaluate_run_with_a_longer_horizon_uses_all_windows_that_fit(run, raw):
    last, future = cut(raw[6:], 2, 6)
    rows = evaluate_run(run, Request(horizon=6))
    check_rows(rows, by_hand(np.broadcast_to(last[:, None], future.shape), future))
    assert {row["horizon"] for row in rows} == {6} and {row["windows"] for row in rows} == {2}


def test_evaluate_run_on_a_strided_grid(run, raw):
    last, future = cut(raw[6:, :, ::2, ::2], 2, 3)
    for grid in ((8,), (8, 8)):
        rows = evaluate_run(run, Request(grid=grid))
        check_rows(rows, by_hand(np.broadcast_to(last[:, None], future.shape), future))
        assert {tuple(row["grid"]) for row in rows} == {(8, 8)}


@pytest.mark.parametrize("count", [1, 3, 5, 8, 100])
def test_selected_windows_are_spread_evenly(run, raw, count):
    last, future = cut(raw[6:], 2, 3)
    errors = norm(last[:, None] - future, 1, 2, 3, 4) / norm(future, 1, 2, 3, 4)
    selected = {1: [0], 3: [0, 4, 7], 5: [0, 2, 4, 5, 7]}.get(count, range(8))
    rows = evaluate_run(run, Request(windows=count))
    assert value(rows, "relative_l2") == pytest.approx(errors[list(selected)].mean(), rel=1e-12)
    assert {row["windows"] for row in rows} == {len(selected)}


@pytest.mark.parametrize("batch", [1, 3])
def test_evaluate_run_is_independent_of_the_batch_size(run, batch):
    rows = evaluate_run(run, Request(batch=batch))
    run.records.unlink()
    for first, second in zip(rows, evaluate_run(run), strict=True):
        exact = first["model"] == "persistence"
        assert first["value"] == (second["value"] if exact else pytest.approx(second["value"], rel=1e-5))


def test_protocols_agree_only_at_the_first_call(run, raw):
    free, forced = (evaluate_run(run, Request(protocol=name)) for name in ("free", "teacher-forced"))
    for lead in (1, 2, 3):
        pair = [value(rows, "relative_l2_lead", "transolver-sigma", lead=lead) for rows in (free, forced)]
        assert (pair[0] == pair[1]) == (lead == 1)
    _, future = cut(raw[6:], 2, 3)
    before = np.stack([trajectory[start + 1 : start + 4] for trajectory in raw[6:] for start in range(4)])
    check_rows(forced, by_hand(before, future))


# --- other data


def test_evaluate_run_uses_all_trajectories_of_other_data(run, tmp_path):
    generate(FLOW, 3, 1, tmp_path / "other.h5")
    with open_store(tmp_path / "other.h5") as store:
        last, future = cut(np.asarray(store[:], np.float64), 2, 3)
        name = store.fingerprint
    rows = evaluate_run(run, path=tmp_path / "other.h5")
    check_rows(rows, by_hand(np.broadcast_to(last[:, None], future.shape), future))
    assert {row["data"] for row in rows} == {name} and {row["windows"] for row in rows} == {12}
    with pytest.raises(ValueError, match="omit --split"):
        evaluate_run(run, Request(split="train"), tmp_path / "other.h5")


def test_evaluate_run_rejects_training_data(run, trained, tmp_path):
    """Whatever file they are in, unless it is the whole simulation: then its test split is used."""
    for name, trajectories in (("mixed", slice(5, 8)), ("fair", slice(6, 8))):
        with open_store(trained / "flow.h5") as store:
            header = replace(store.header, source="selection")
            with Writer(tmp_path / f"{name}.h5", header, len(range(8)[trajectories])) as writer:
                writer.append(store[trajectories])
    with pytest.raises(ValueError, match=r"Trajectory 0 of .*mixed.h5 is in the training data of ") as caught:
        evaluate_run(run, path=tmp_path / "mixed.h5")
    assert "\n" not in str(caught.value) and not run.records.exists()
    generate(FLOW, 9, 0, tmp_path / "more.h5")
    original = evaluate_run(run)
    for name in ("fair", "more"):
        rows = evaluate_run(run, path=tmp_path / f"{name}.h5")
        assert [row["value"] for row in rows] == [row["value"] for row in original]


def test_evaluate_run_recognises_a_repeated_simulation(run, trained, raw, tmp_path):
    """On another machine its values differ by rounding, so neither fingerprint nor digests match: the trajectories that
    were trained on must not become test data."""
    rng = np.random.default_rng(0)
    elsewhere = (raw * (1 + 1e-7 * rng.standard_normal(raw.shape))).astype(np.float32)
    with open_store(trained / "flow.h5") as store:
        header = store.header
    for name, count, seed in (("again", 8, 0), ("short", 6, 0), ("unseen", 8, 1)):
        with Writer(tmp_path / f"{name}.h5", replace(header, seed=seed), count) as writer:
            writer.append(elsewhere[:count])
    original, rows = evaluate_run(run), evaluate_run(run, path=tmp_path / "again.h5")
    assert {row["windows"] for row in rows} == {row["windows"] for row in original} == {8}
    assert {row["data"] for row in rows}.isdisjoint(row["data"] for row in original)
    for metric in ("relative_l2", "rmse"):
        expected = value(original, metric, "transolver-sigma")
        assert value(rows, metric, "transolver-sigma") == pytest.approx(expected, rel=1e-4)
    evaluate_run(run, Request(split="train"), tmp_path / "again.h5")
    with pytest.raises(ValueError, match=r"has 6 of its 8 trajectories; simulate all of them \(--count 8\)") as caught:
        evaluate_run(run, path=tmp_path / "short.h5")
    assert "\n" not in str(caught.value)
    assert {row["windows"] for row in evaluate_run(run, path=tmp_path / "unseen.h5")} == {32}


def test_evaluate_run_refuses_a_reordered_simulation(run, trained, raw, tmp_path):
    with open_store(trained / "flow.h5") as store:
        header = store.header
    for name, order in (("reversed", range(7, -1, -1)), ("swapped", (0, 1, 2, 3, 4, 5, 7, 6))):
        with Writer(tmp_path / f"{name}.h5", header, 8) as writer:
            writer.append(raw[list(order)].astype(np.float32))
    message = "Trajectory 6 of .*reversed.h5 is a test trajectory of .* by its place, but one of its training"
    refused(run, message, tmp_path / "reversed.h5")
    assert {row["windows"] for row in evaluate_run(run, path=tmp_path / "swapped.h5")} == {8}  # both are unseen


def test_evaluate_run_refuses_a_simulation_with_the_same_seed_and_other_settings(run, tmp_path):
    """More frames or another precision change the fingerprint and the digests, but not the flows."""
    generate(replace(FLOW, frames=9), 8, 0, tmp_path / "longer.h5")
    generate(FLOW, 8, 0, tmp_path / "half.h5", dtype="float16")
    for name in ("longer", "half"):
        message = f"{name}.h5 is simulated with seed 0, like the training data of .*; simulate with another seed"
        refused(run, message, tmp_path / f"{name}.h5")


def test_evaluate_run_on_data_that_are_already_strided_or_shorter(trained, raw, tmp_path):
    task = replace(TASK, time_stride=2, space_stride=2, grid=(8, 8), history=1, horizon=2, starts=2)
    run = Run(tmp_path / "run")
    train_run(replace(SHORT, task=task), trained / "flow.h5", run)
    with open_store(trained / "flow.h5") as store:
        layout, source = store.header.layout, replace(store.header, source="strided")
    strided = replace(layout, times=layout.times[::2], coordinates=tuple(axis[::2] for axis in layout.coordinates))
    shorter = replace(layout, times=layout.times[:5])
    for name, new, frames in (("strided", strided, raw[6:, ::2, ::2, ::2]), ("shorter", shorter, raw[6:, :5])):
        with Writer(tmp_path / f"{name}.h5", replace(source, layout=new), 2) as writer:
            writer.append(frames.astype(np.float32))
    original = evaluate_run(run)
    rows = evaluate_run(run, path=tmp_path / "strided.h5")
    assert [row["value"] for row in rows] == [row["value"] for row in original]
    assert {row["windows"] for row in original} == {4}
    assert {row["windows"] for row in evaluate_run(run, path=tmp_path / "shorter.h5")} == {2}


def write_variant(path, trained, **change):
    """Valid test data with another layout."""
    with open_store(trained / "flow.h5") as store:
        header = replace(store.header, source="selection", layout=replace(store.header.layout, **change))
        with Writer(path, header, 2) as writer:
            writer.append(store[6:8])
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"units": ("1/hour",)}, "the unit of vorticity is 1/hour, not 1/time"),
        ({"boundary": ("periodic", "wall")}, "axis y is wall, not periodic"),
        ({"coordinates": (np.arange(16.0) / 4, np.arange(16.0) / 4)}, "axis x is 4 long, not 6.28319 long"),
        ({"times": 3.0 * np.arange(8)}, "its frames are 3 apart, not"),
        ({"times": np.cumsum([1.0, 2, 1, 2, 1, 2, 1, 2])}, "its frames are unevenly spaced in time, 1 to 2 apart"),
    ],
)
def test_evaluate_run_rejects_a_different_domain_without_anyway(run, trained, tmp_path, change, message):
    path = write_variant(tmp_path / "other.h5", trained, **change)
    with pytest.raises(ValueError, match=message) as caught:
        evaluate_run(run, path=path)
    assert "\n" not in str(caught.value) and str(caught.value).endswith("or pass --anyway.")
    assert not run.records.exists()
    rows = evaluate_run(run, path=path, anyway=True)
    assert all(message in row["anyway"] for row in rows) and evaluate_run(run, path=path, anyway=True) == rows
    with pytest.raises(ValueError, match=message):
        evaluate_run(run, path=path)
    assert not any("anyway" in row for row in evaluate_run(run))


def test_evaluate_run_refuses_another_number_of_axes(run, raw, tmp_path):
    np.savez(tmp_path / "line.npz", vorticity=raw[6:, :, 0, :, 0], times=np.arange(8.0))
    message = "The axes of .*line.npz are x, but those of the training data of .* are x, y;"
    refused(run, message, tmp_path / "line.npz")


def test_evaluate_run_without_a_recorded_domain(run, trained, tmp_path):
    facts = run.read_json("data.json")
    assert facts.pop("domain")["units"] == ["1/time"]
    run.write_json("data.json", facts)
    path = write_variant(tmp_path / "other.h5", trained, units=("1/hour",))
    assert "no record of units" in not_compared(run, path)
    assert not any("anyway" in row for row in evaluate_run(run, path=path))


def test_evaluate_run_accepts_moved_data(run, trained, tmp_path):
    shutil.copy(trained / "flow.h5", tmp_path / "moved.h5")
    assert evaluate_run(run, path=tmp_path / "moved.h5") == evaluate_run(run)


VORTICITY = ReadOptions(fields=("vorticity",), boundary=("periodic",), dt=0.5)
SHORT = replace(RECIPE, train=replace(RECIPE.train, updates=1, checks=0))


def refused(run, message, path=None):
    """The evaluation is refused in one sentence that contains this message, and nothing is recorded."""
    before = run.records.read_bytes() if run.records.exists() else None
    with pytest.raises(ValueError, match=message) as caught:
        evaluate_run(run, path=path)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")
    assert (run.records.read_bytes() if run.records.exists() else None) == before


def test_evaluate_run_refuses_changed_data(raw, tmp_path):
    source, run = tmp_path / "flow.npy", Run(tmp_path / "run")
    np.save(source, raw)
    train_run(SHORT, open_data(source, VORTICITY), run)
    rows = evaluate_run(run)
    assert {row["windows"] for row in rows} == {8}
    np.save(tmp_path / "moved.npy", raw)
    np.save(source, 1.001 * raw)  # perturbed training trajectories must not become test data
    refused(run, "flow.npy is not the training data of .*run, has changed since")
    refused(run, "flow.npy is not the training data of .*run, has changed since", source)
    assert evaluate_run(run, path=tmp_path / "moved.npy") == rows
    source.unlink()
    refused(run, "was not found")


def test_evaluate_run_refuses_changed_test_data(raw, tmp_path):
    np.save(tmp_path / "train.npy", raw[:6])
    np.save(tmp_path / "test.npy", raw[6:])
    run, recipe = Run(tmp_path / "run"), replace(SHORT, task=replace(TASK, test=0))
    train_run(recipe, open_data(tmp_path / "train.npy", VORTICITY), run,
              test=open_data(tmp_path / "test.npy", VORTICITY))  # fmt: skip
    assert {row["windows"] for row in evaluate_run(run)} == {8}
    np.save(tmp_path / "test.npy", 2 * raw[6:])
    refused(run, "test.npy is not the test data of .*run, has changed since")


def write_flow(path, values):
    pytest.importorskip("xarray")
    from sigmasolver.data.formats.netcdf_zarr_write import write_netcdf

    path.unlink(missing_ok=True)
    axis = 2 * np.pi * np.arange(16) / 16
    layout = Layout(("vorticity",), ("1/s",), ("periodic",) * 2, (axis, axis), 0.5 * np.arange(8))
    write_netcdf(path, np.asarray(values, np.float32), Header(layout, "test", {}))
    return path


def test_netcdf_data_are_recognised_by_their_values(raw, tmp_path):
    source, run = write_flow(tmp_path / "flow.nc", raw), Run(tmp_path / "run")
    with pytest.raises(ValueError, match=r"Trajectory 0 of the test data .*copy.nc is also in the training data"):
        train_run(replace(SHORT, task=replace(TASK, test=0)), source, run, test=write_flow(tmp_path / "copy.nc", raw))
    train_run(SHORT, source, run)
    rows = evaluate_run(run)
    assert {row["windows"] for row in rows} == {8}
    os.utime(source, (0, 0))
    shutil.copy(source, tmp_path / "copy.nc")
    assert evaluate_run(run) == evaluate_run(run, path=tmp_path / "copy.nc") == rows
    mixed = write_flow(tmp_path / "mixed.nc", np.concatenate((2 * raw[6:], raw[2:3])))
    refused(run, "Trajectory 2 of .*mixed.nc is in the training data of", mixed)
    write_flow(source, 1.001 * raw)
    refused(run, "flow.nc is not the training data of .*run, has changed since")
    duplicated = write_flow(tmp_path / "duplicated.nc", np.concatenate((raw[:7], raw[:1])))
    with pytest.raises(ValueError, match="Trajectory 7 of the test split is identical to 0 of the train split"):
        train_run(SHORT, duplicated, Run(tmp_path / "other"))


def write_fields(path, raw, names):
    """A NetCDF file with the given fields: multiples of the vorticity."""
    pytest.importorskip("xarray")
    from sigmasolver.data.formats.netcdf_zarr_write import write_netcdf

    layout = Layout(names, ("1",) * len(names), ("periodic",) * 2, (np.arange(16.0) / 16,) * 2, 0.5 * np.arange(8))
    values = np.stack([raw * (1 + len(name)) for name in names], axis=-1)[..., 0, :].astype(np.float32)
    write_netcdf(path, values, Header(layout, "test", {}))
    return path


@pytest.fixture(params=[None, 0.5], ids=["as stored", "time step given"])
def selected(request, raw, tmp_path):
    """A file with two fields, and a run trained on one of them."""
    source, run = write_fields(tmp_path / "flow.nc", raw, ("vorticity", "other")), Run(tmp_path / "run")
    train_run(SHORT, open_data(source, ReadOptions(fields=("vorticity",), dt=request.param)), run)
    return source, run


def test_run_on_some_fields_of_a_file_finds_its_own_data(selected, raw, tmp_path):
    source, run = selected
    rows = evaluate_run(run)
    assert {row["windows"] for row in rows} == {8}
    shutil.copy(source, tmp_path / "copy.nc")
    with pytest.importorskip("xarray").open_dataset(source) as dataset:
        dataset.assign(derived=2 * dataset["vorticity"]).to_netcdf(tmp_path / "more.nc")
    for path in (source, tmp_path / "copy.nc", tmp_path / "more.nc"):
        assert evaluate_run(run, path=path) == rows  # only the test split
    resume_run(run)
    assert diagnose_run(run, ["trust"])["trust"].rows


def test_training_data_with_more_fields_do_not_become_test_data(selected, raw, tmp_path):
    source, run = selected
    message = "Trajectory 0 of .* is in the training data of .*; remove it from the test data"
    copy = shutil.copy(source, tmp_path / "copy.nc")
    imported = import_data(source, tmp_path / "all.h5").path
    options = ReadOptions(fields=("other", "vorticity"), dt=0.5)
    for path in (open_data(copy), open_data(copy, options), imported, open_data(imported)):
        refused(run, message, path)
    for data in (open_data(source), open_data(source, options)):
        refused(run, "is not the training data of .*, has changed since, or is read with other options", data)
    unseen = write_fields(tmp_path / "unseen.nc", 2 * raw, ("vorticity", "other"))
    assert {row["windows"] for row in evaluate_run(run, path=open_data(unseen))} == {32}
    with pytest.raises(ValueError, match=r"Trajectory 0 of the test data .* is also in the training data"):
        train_run(replace(SHORT, task=replace(TASK, test=0)), open_data(source, ReadOptions(fields=("vorticity",))),
                  Run(tmp_path / "other"), test=copy)  # fmt: skip


def test_test_data_may_lack_a_field_that_the_run_does_not_use(raw, tmp_path):
    source = write_fields(tmp_path / "flow.nc", raw, ("vorticity", "other"))
    unseen = write_fields(tmp_path / "unseen.nc", 2 * raw, ("vorticity",))
    options = ReadOptions(dt=0.5, units=("1", "2"))
    for name, data in (("plain", open_data(source)), ("given", open_data(source, options))):
        run = Run(tmp_path / name)
        train_run(SHORT, data, run)
        assert {row["windows"] for row in evaluate_run(run, path=unseen)} == {32}
        refused(run, "field \"?'?vorticity", write_fields(tmp_path / f"{name}.nc", raw, ("other",)))


@pytest.mark.parametrize("recorded", [True, False])
def test_separate_test_data_keep_their_fields(raw, tmp_path, recorded):
    """They may have more fields than the training data; older runs do not record which."""
    source = open_data(write_fields(tmp_path / "flow.nc", raw, ("vorticity", "other")), ReadOptions(("vorticity",)))
    test = write_fields(tmp_path / "test.nc", 2 * raw, ("vorticity", "other"))
    run = Run(tmp_path / "run")
    train_run(replace(SHORT, task=replace(TASK, test=0)), source, run, test=test)
    facts = run.read_json("data.json")
    assert facts["test"].pop("fields") == ["vorticity", "other"]
    if not recorded:
        run.write_json("data.json", facts)
    assert {row["windows"] for row in evaluate_run(run)} == {32}


def test_public_data_of_some_fields_are_recognised(raw, tmp_path):
    source, moved, run = tmp_path / "flow.h5", tmp_path / "moved.h5", Run(tmp_path / "run")
    layout = Layout(("vx", "vy", "p"), ("1",) * 3, ("open",) * 2, (np.arange(16.0),) * 2, 0.5 * np.arange(8))
    write_pdebench(source, "incompressible", np.concatenate((raw, 2 * raw, 3 * raw), axis=-1), layout)
    fields = ReadOptions(fields=("velocity_x", "velocity_y"))
    recipe = replace(SHORT, task=replace(TASK, inputs=fields.fields, targets=fields.fields))
    train_run(recipe, open_data(source, fields), run)
    rows = evaluate_run(run)
    shutil.copy(source, moved)
    os.utime(moved, (0, 0))
    for data in (moved, open_data(moved, fields), open_data(moved)):
        again = evaluate_run(run, path=data)
        assert {row["windows"] for row in again} == {8}
        assert [row["value"] for row in again] == [row["value"] for row in rows]


def test_public_data_are_recognised_where_their_files_were_moved(raw, tmp_path):
    """Their digests depend on the names and dates of the files."""
    axis = 2 * np.pi * np.arange(16) / 16
    layout = Layout(("vorticity",), ("1",), ("periodic",) * 2, (axis, axis), 0.5 * np.arange(8))

    def write(name, values):
        write_pdebench(tmp_path / name, "scalar", values.astype(np.float32), layout)
        return tmp_path / name

    run, task = Run(tmp_path / "run"), replace(TASK, inputs=("tensor",), targets=("tensor",))
    source = write("flow.hdf5", raw)
    train_run(replace(SHORT, task=task), source, run)
    recorded, rows = run.read_json("data.json"), evaluate_run(run)
    moved = shutil.copy(source, tmp_path / "moved.hdf5")
    os.utime(moved, (0, 0))
    import_data(moved, tmp_path / "imported.h5")
    for path in (moved, tmp_path / "imported.h5"):
        again = evaluate_run(run, path=path)
        assert [row["value"] for row in again] == [row["value"] for row in rows]
        assert {row["windows"] for row in again} == {8}
    refused(run, "Trajectory 2 of .*mixed.hdf5 is in the training", write("mixed.hdf5", raw[[6, 7, 2]]))
    assert {row["windows"] for row in evaluate_run(run, path=write("other.hdf5", 2 * raw))} == {32}
    with pytest.raises(ValueError, match=r"Trajectory 0 of the test data .*moved.hdf5 is also in the training data"):
        train_run(replace(SHORT, task=replace(task, test=0)), source, Run(tmp_path / "other"), test=moved)
    train_run(replace(SHORT, task=task), source, run)
    assert run.read_json("data.json") == recorded


def test_run_recorded_by_the_state_of_its_files_is_evaluated_unless_they_changed(raw, tmp_path, monkeypatch):
    source, run = write_flow(tmp_path / "flow.nc", raw), Run(tmp_path / "run")
    with monkeypatch.context() as patch:
        former = replace(formats.guess_format(source), identified_by_values=False)
        patch.setattr(formats, "FORMATS", (former, *formats.FORMATS))
        train_run(SHORT, source, run)
        recorded, rows = run.read_json("data.json"), evaluate_run(run)
    assert recorded.pop("samples")  # which runs of earlier versions did not record
    run.write_json("data.json", recorded)
    assert {row["data"] for row in rows} == {recorded["fingerprint"]}
    assert evaluate_run(run) == evaluate_run(run, path=source) == rows and {row["windows"] for row in rows} == {8}
    assert len(evaluate_run(run, Request(windows=3))) == len(rows)
    train_run(SHORT, source, run)
    assert run.read_json("data.json") == recorded
    os.utime(source, (0, 0))
    for path in (None, source):
        refused(run, "flow.nc is not the training data of .*run, has changed since", path)


def test_run_recorded_before_booleans_were_fields_finds_its_data(raw, tmp_path, monkeypatch):
    xarray = pytest.importorskip("xarray")
    source, run = tmp_path / "flow.zarr", Run(tmp_path / "run")
    dims = ("trajectory", "time", "x", "y")
    flag = np.ones(raw.shape[:-1], dtype=bool)
    xarray.Dataset({"flag": (dims, flag), "vorticity": (dims, raw[..., 0])}).to_zarr(source, zarr_format=2)
    with monkeypatch.context() as patch:  # it skipped booleans, and identified the files by their state
        former = replace(formats.guess_format(source), identified_by_values=False)
        patch.setattr(formats, "FORMATS", (former, *formats.FORMATS))
        train_run(SHORT, open_data(source, ReadOptions(fields=("vorticity",))), run)
    assert {row["windows"] for row in evaluate_run(run)} == {8}


def test_data_on_the_task_grid_are_not_strided_again(tmp_path):
    """A run with a space stride of two: a file on the stored grid is strided, one on the task grid is not."""
    generate(FLOW, 8, 0, tmp_path / "flow.h5")
    task = replace(TASK, grid=(8, 8), space_stride=2)
    train_run(replace(RECIPE, task=task, train=replace(RECIPE.train, updates=2)), tmp_path / "flow.h5",
              Run(tmp_path / "run"))  # fmt: skip
    generate(FLOW, 2, 1, tmp_path / "fine.h5")
    generate(replace(FLOW, stored=8), 2, 1, tmp_path / "coarse.h5")
    with open_store(tmp_path / "fine.h5") as store:
        last, future = cut(np.asarray(store[:, :, ::2, ::2], np.float64), 2, 3)
    for name in ("fine.h5", "coarse.h5"):
        rows = evaluate_run(Run(tmp_path / "run"), path=tmp_path / name)
        assert {tuple(row["grid"]) for row in rows} == {(8, 8)}
        check_rows(rows, by_hand(np.broadcast_to(last[:, None], future.shape), future))


def test_correlation_time_accounts_for_the_time_stride(tmp_path):
    """A wave that shifts by 0.2 per stored frame, with a time stride of two: the correlation of persistence is
    cos(0.4 lead), which drops below 0.8 at the second lead, four stored frames of 0.25 later."""
    x, phase = 2 * np.pi * np.arange(16) / 16, np.arange(6)[:, None]
    moving = [[np.sin(x - 0.2 * frame + start)[:, None] for frame in range(13)] for start in phase[:, 0]]
    layout = Layout(("u",), ("1",), ("periodic",), (x,), 0.25 * np.arange(13))
    with Writer(tmp_path / "wave.h5", Header(layout, "test", {}), 6) as writer:
        writer.append(np.array(moving, np.float32))
    task = Task("wave", ("u",), ("u",), (16,), 2, 1, 4, 4, 2, "channel", time_stride=2)
    recipe = Recipe(task, MODEL, replace(RECIPE.train, updates=2, checks=0, validation=0.0))
    train_run(recipe, tmp_path / "wave.h5", Run(tmp_path / "run"))
    rows = evaluate_run(Run(tmp_path / "run"))
    for lead in (1, 2, 3):
        assert value(rows, "correlation_lead", field="u", lead=lead) == pytest.approx(np.cos(0.4 * lead), abs=1e-6)
    assert value(rows, "correlation_time", field="u") == pytest.approx(1.0)


def test_correlation_time_of_uneven_frames_is_that_of_the_windows(tmp_path, call):
    """The correlation of persistence of this wave is cos(0.4 lead), below 0.8 at the second lead: 19 after the frame at
    time 1. Windows that start elsewhere have other lead times, so that there is no common one."""
    x, times = 2 * np.pi * np.arange(16) / 16, np.array([0.0, 1, 10, 20, 30, 40])
    moving = [[np.sin(x - 0.4 * frame + start)[:, None] for frame in range(6)] for start in range(6)]
    layout = Layout(("u",), ("1",), ("periodic",), (x,), times)
    with Writer(tmp_path / "wave.h5", Header(layout, "test", {}), 6) as writer:
        writer.append(np.array(moving, np.float32))
    model = replace(MODEL, options=Options(time_embedding=True))
    for starts, expected in ((1, 19.0), (2, None)):
        task = Task("wave", ("u",), ("u",), (16,), 2, 1, 3, 4, 2, "channel", starts=starts)
        recipe = Recipe(task, model, replace(RECIPE.train, updates=1, checks=0, validation=0.0))
        run = Run(tmp_path / f"run{starts}")
        train_run(recipe, tmp_path / "wave.h5", run)
        rows = evaluate_run(run)
        if expected is None:
            assert not any(row["metric"] == "correlation_time" for row in rows)
        else:
            assert value(rows, "correlation_time", field="u") == expected
        code, out, _ = call("evaluate", run.path)
        assert code == 0 and ("falls below 0.8 at t = 19" in out) == (expected == 19)
        assert "beyond" not in out or expected == 19


def test_frmse_takes_the_root_after_averaging_windows(run, raw):
    """The root after the mean over windows, not before."""
    last, future = cut(raw[6:], 2, 6)
    still, true = (
        torch.from_numpy(np.array(values)) for values in (np.broadcast_to(last[:, None], future.shape), future)
    )
    expected = float(metrics.frmse(still, true))
    per_window = np.mean([float(metrics.frmse(still[k : k + 1], true[k : k + 1])) for k in range(len(true))])
    assert per_window < 0.999 * expected, "the two orders differ here"
    assert value(evaluate_run(run, Request(horizon=6)), "frmse") == pytest.approx(expected, rel=1e-6)


# --- rows


def test_records_are_tidy_strict_json_on_disk(run):
    rows = evaluate_run(run)

    def refuse(constant):
        raise AssertionError(constant)

    lines = run.records.read_text().splitlines()
    assert [json.loads(line, parse_constant=refuse) for line in lines] == rows
    assert all(row.keys() >= TIDY for row in rows)
    assert {(row["model"], row["seed"]) for row in rows} == {("transolver-sigma", 3), ("persistence", None)}
    assert {row["step"] for row in rows} == {12} and {row["precision"] for row in rows} == {"float32"}
    keys = [(row["model"], row["metric"], row["field"], row["lead"]) for row in rows]
    assert len(set(keys)) == len(keys)
    assert all(row["lead"] in (1, 2, 3) if row["metric"].endswith("_lead") else row["lead"] is None for row in rows)


def test_evaluate_run_reuses_existing_records(run):
    ticks = []
    first = evaluate_run(run, tick=lambda done, total: ticks.append((done, total)))
    assert ticks[-1] == (8, 8)
    before, ticks[:] = run.records.read_bytes(), []
    assert evaluate_run(run, tick=lambda done, total: ticks.append((done, total))) == first
    assert run.records.read_bytes() == before and not ticks
    other = evaluate_run(run, Request(horizon=2))
    assert other != first and read_rows(run.records) == [*first, *other]
    assert evaluate_run(run) == first


def test_records_are_matched_by_weights_not_folder_name(run, tmp_path):
    first, before = evaluate_run(run), run.records.read_bytes()
    shutil.copytree(run.path, tmp_path / "copy")
    run.path.rename(tmp_path / "renamed")
    for name in ("renamed", "copy"):
        moved = Run(tmp_path / name)
        assert evaluate_run(moved) == [{**row, "run": name} for row in first]
        assert moved.records.read_bytes() == before
    replace_rows(moved.records, [*first, *({**row, "run": "copy"} for row in first)])  # as written by older versions
    assert evaluate_run(moved) == [{**row, "run": "copy"} for row in first]


def test_concurrent_evaluation_writes_records_once(run):
    rows = evaluate_run(run)
    run.records.unlink()
    calls = []

    def other_process(done, total):
        calls.append(done)
        replace_rows(run.records, rows)

    assert evaluate_run(run, tick=other_process) == rows and calls
    assert read_rows(run.records) == rows


def test_records_of_different_precisions_coexist(run):
    plain, bf16 = (evaluate_run(run, Request(precision=name)) for name in ("float32", "bf16"))
    assert read_rows(run.records) == [*plain, *bf16]
    for rows, name in ((plain, "float32"), (bf16, "bf16")):
        assert {row["forecast_precision"] for row in rows} == {name}
        assert evaluate_run(run, Request(precision=name)) == rows
    errors = [value(rows, "relative_l2", "transolver-sigma") for rows in (plain, bf16)]
    assert errors[0] != errors[1] and errors[0] == pytest.approx(errors[1], rel=0.02)
    assert value(plain, "relative_l2") == value(bf16, "relative_l2"), "the baseline does not depend on precision"
    table = comparison(with_unique_names(read_rows(run.records)))
    assert [row[0] for row in table.rows] == ["transolver-sigma, float32", "transolver-sigma, bf16", "persistence"]


def test_average_over_symmetries_is_evaluated_and_recorded_by_itself(run, raw):
    usual, averaged = (evaluate_run(run, Request(symmetries=number)) for number in (1, 5))
    assert read_rows(run.records) == [*usual, *averaged]
    assert {row["symmetries"] for row in usual} == {1} and {row["symmetries"] for row in averaged} == {5}
    assert evaluate_run(run, Request(symmetries=5)) == averaged and evaluate_run(run) == usual
    forecaster, errors = load(run.path), []
    for trajectory in raw[6:]:
        for start in range(4):
            history = torch.from_numpy(trajectory[None, start : start + 2]).float()
            truth = torch.from_numpy(trajectory[start + 2 : start + 5])
            mean = symmetric_rollout(forecaster, history, 3, SYMMETRIES["kolmogorov-4"], 5).mean.frames[0].double()
            errors.append(float((mean - truth).norm() / truth.norm()))
    assert value(averaged, "relative_l2", "transolver-sigma") == pytest.approx(np.mean(errors), rel=1e-5)
    assert value(averaged, "relative_l2", "transolver-sigma") != value(usual, "relative_l2", "transolver-sigma")
    assert value(averaged, "relative_l2") == value(usual, "relative_l2"), "the baseline is not averaged"
    table = comparison(with_unique_names(read_rows(run.records)))
    names = ["transolver-sigma", "transolver-sigma, mean over 5 symmetries", "persistence"]
    assert [row[0] for row in table.rows] == names
    assert "mean over 5 symmetries" in sample_of(averaged) and "symmetries" not in sample_of(usual)
    assert records_of_test_part(run, RECIPE) == usual


def test_unsuitable_symmetries_are_refused(run, trained):
    with pytest.raises(ValueError, match="averaged over symmetries; omit the protocol"):
        Request(symmetries=2, protocol="teacher-forced")
    with pytest.raises(ValueError, match="symmetries is 0; it must be at least 1"):
        Request(symmetries=0)
    with pytest.raises(ValueError, match="not a whole number of its 4 grid points"):
        evaluate_run(run, Request(symmetries=2, grid=(4, 4)))
    assert not run.records.exists()


def test_records_without_a_precision_are_float32(run):
    later = ("forecast_precision", "symmetries")
    rows = [{key: entry for key, entry in row.items() if key not in later} for row in evaluate_run(run)]
    replace_rows(run.records, rows)
    assert evaluate_run(run) == rows == read_rows(run.records)
    bf16 = evaluate_run(run, Request(precision="bf16"))
    assert read_rows(run.records) == [*rows, *bf16] and comparison(with_unique_names(rows)) == comparison(rows)


# --- a steady task


def test_steady_task_baseline_is_the_training_mean(tmp_path):
    grid, random = np.arange(8) / 8, np.random.default_rng(0)
    a = random.normal(size=(10, 1, 8, 8)).astype(np.float32)
    p = (2 + 0.5 * a + random.normal(size=a.shape)).astype(np.float32)
    data = np.stack((a, p), -1)
    header = Header(Layout(("a", "p"), ("1", "1"), ("open",) * 2, (grid, grid), np.zeros(1)), "test", {})
    with Writer(tmp_path / "steady.h5", header, 10) as writer:
        writer.append(data)
    recipe, _ = infer_recipe(header, 10, UserChoices("steady", targets=("p",)), False)
    recipe = replace(recipe, model=MODEL, train=replace(recipe.train, updates=2, checks=1))
    run = Run(tmp_path / "run")
    train_run(recipe, tmp_path / "steady.h5", run)
    rows = evaluate_run(run)
    assert {row["model"] for row in rows} == {"transolver-sigma", "training-mean"}
    parts = recipe.split(10)
    true = p[list(parts.test)].astype(np.float64)
    mean = p[list(parts.train)].astype(np.float64).mean()
    ratios = norm(mean - true, 1, 2, 3) / norm(true, 1, 2, 3)
    assert value(rows, "relative_l2", "training-mean", "p") == pytest.approx(ratios.mean(), rel=1e-5)
    assert value(rows, "mae", "training-mean", "p") == pytest.approx(np.abs(mean - true).mean(), rel=1e-5)
    frames = load(run.path)(torch.from_numpy(data[list(parts.test)][..., :1])).detach().double().numpy()[..., 0]
    ratios = norm(frames - true, 1, 2, 3) / norm(true, 1, 2, 3)
    assert value(rows, "relative_l2", "transolver-sigma", "p") == pytest.approx(ratios.mean(), rel=1e-5)


# --- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"protocol": "cheating"}, "choose from free, teacher-forced"),
        ({"split": "exam"}, "choose from train, validation, test"),
        ({"precision": "float16"}, 'Unknown precision "float16"; choose from float32, tf32, bf16'),
        ({"precision": "tf32"}, "choose float32 or bf16 on a CPU"),
        ({"horizon": 0}, "horizon is 0; it must be at least 1"),
        ({"windows": 0}, "windows is 0; it must be at least 1"),
        ({"batch": 0}, "batch is 0; it must be at least 1"),
        ({"horizon": 7}, "A window needs 9 frames"),
        ({"grid": (5,)}, "The stored grid of 16 × 16 cannot be strided to 5 × 5"),
        ({"grid": (16, 8)}, "cannot be strided"),
        ({"grid": (6,)}, "does not divide the 16 points of the periodic axis"),
    ],
)
def test_evaluate_run_rejects_invalid_requests(run, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        evaluate_run(run, Request(**options))
    assert "\n" not in str(caught.value) and str(caught.value).endswith((".", "?"))
    assert not run.records.exists()


def test_evaluate_run_rejects_incomplete_runs(run, tmp_path):
    facts = run.read_json("data.json")
    run.write_json("data.json", {**facts, "parts": {**facts["parts"], "validation": []}})
    with pytest.raises(ValueError, match="has no validation split"):
        evaluate_run(run, Request(split="validation"))
    run.write_json("data.json", {key: facts[key] for key in ("path", "fingerprint")})
    with pytest.raises(ValueError, match="has no test split"):
        evaluate_run(run)
    run.write_json("data.json", {**facts, "path": str(tmp_path / "gone.h5")})
    with pytest.raises(ValueError, match=r"not found at .*gone.h5; pass its new path with --data"):
        evaluate_run(run)
    run.write_json("data.json", facts)
    run.weights.unlink()
    with pytest.raises(ValueError, match="train the run first"):
        evaluate_run(run)
    with pytest.raises(ValueError, match="is not a run"):
        evaluate_run(Run(tmp_path / "nothing"))
