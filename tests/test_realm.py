"""REALM from files to table: epochs and start frames, loss, two-step training, errors and correlation against their
definitions, model sizes, and a suite on fixtures of both cases."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sigmasolver.data.formats import import_data, open_data
from sigmasolver.data.normalise import Normaliser, fit, fit_trajectories
from sigmasolver.data.windows import Windows
from sigmasolver.evaluate import evaluate_run, metrics
from sigmasolver.experiments.queue import ensure_store
from sigmasolver.forecast import Forecaster
from sigmasolver.forecast.checkpoint import load
from sigmasolver.models import Options, SolverConfig, build_solver, count_parameters
from sigmasolver.models.layers import coordinates, distances, proportional
from sigmasolver.recipes import RECIPES, TrainRecipe, changed, recipe_of
from sigmasolver.runs import Run, read_records
from sigmasolver.simulate.fixtures.realm import write_realm
from sigmasolver.tasks import TASKS, field_groups
from sigmasolver.train.engine import Execution
from sigmasolver.train.job import train_run
from sigmasolver.train.loop import StepPlan, _relative_errors
from sigmasolver.train.objectives import Loss, pushforward

GRID = (8, 8)
SETTINGS = [
    f"task.grid={GRID}", "model.width=8", "model.depth=1", "model.heads=2", "model.slices=3", "model.modes=3",
    "train.batch=4", "train.updates=3", "train.checks=1",
]  # fmt: skip
SHORT = ["task.horizon=3", "task.starts=1", "train.starts=20"]
GROUPS = {"ignit-hit": (8, 1, 1, 2), "evolve-jet": (35, 1, 1, 2)}


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    folder = tmp_path_factory.mktemp("downloads")
    write_realm("ignit-hit", folder / "IgnitHIT", grid=GRID)
    write_realm("evolve-jet", folder / "realm-bench-EvolveJet", grid=GRID)
    return folder


# --- epochs and start frames


def plan_of(name: str, downloads, batch: int = 2) -> tuple[StepPlan, Windows]:
    recipe = changed(recipe_of(name), [f"train.batch={batch}", f"task.grid={GRID}"])
    folder = "IgnitHIT" if recipe.task.name == "ignit-hit" else "realm-bench-EvolveJet"
    data = open_data(downloads / folder)
    windows = Windows(data, recipe.split_of(data).train, recipe.training_window_spec())
    return StepPlan(recipe, windows), windows


@pytest.mark.parametrize(("name", "frames"), [("ignit-hit", 30), ("evolve-jet", 40), ("ignit-hit-released", 30)])
def test_step_plan_visits_every_trajectory_once_per_epoch_from_all_starts(name, frames, downloads):
    plan, windows = plan_of(name, downloads)
    assert (
        windows.windows_per_trajectory == frames - 2 and plan.per_epoch == 2
    )  # two updates per epoch, as with batch 12 of 24
    starts = set()
    for epoch in range(150):
        members = torch.cat([plan.members(2 * epoch + half) for half in (0, 1)])
        assert (members // windows.windows_per_trajectory).sort().values.tolist() == [0, 1, 2, 3]
        starts |= set((members % windows.windows_per_trajectory).tolist())
        if name.endswith("released"):
            for half in (0, 1):  # a common start for all windows of a step
                assert len(set((plan.members(2 * epoch + half) % windows.windows_per_trajectory).tolist())) == 1
    assert starts == set(range(frames - 2))


def test_recipes_of_updates_and_released_training():
    for name, updates in (("ignit-hit", 20_000), ("evolve-jet", 40_000), ("evolve-jet-20k-updates", 20_000)):
        assert RECIPES[name].train.updates == updates and RECIPES[name].train.one_start
    for name, batches in (("ignit-hit", "26 of 26"), ("evolve-jet", "12 of 24")):
        batch, trajectories = map(int, batches.split(" of "))
        recipe = RECIPES[name]
        assert (recipe.train.batch, recipe.task.train) == (batch, trajectories)
        assert recipe.train.updates == 20_000 * (trajectories // batch)
    released = RECIPES["evolve-jet-released"]
    assert (released.train.loss, released.train.objective, released.train.keep) == ("absolute", "direct", "best")
    assert released.task == replace(TASKS["evolve-jet"], normaliser="box-cox-released")
    assert released.train.updates // released.train.checks == 2 * 50  # validated every 50 epochs
    with pytest.raises(ValueError, match="shared_start needs one_start"):
        TrainRecipe(shared_start=True)


# --- the loss and the training step


def flame(count: int, frames: int, fields: tuple[str, ...], seed: int = 0) -> torch.Tensor:
    """(count, frames, 4, 4, fields) in float64; species from 1 down to 1e-14."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(count, frames, 4, 4, len(fields), generator=generator, dtype=torch.float64)
    species = torch.tensor([name.startswith("species_") for name in fields])
    return torch.where(species, 10 ** (-14 * values), 300 * values)


@pytest.mark.parametrize("task", GROUPS)
@pytest.mark.parametrize("absolute", [False, True])
def test_loss_is_sum_over_groups_of_channel_means(task, absolute):
    fields = TASKS[task].targets
    truth, prediction = flame(3, 2, fields), flame(3, 2, fields, seed=1)
    normaliser = fit_trajectories("box-cox", fields, truth)
    groups = tuple(field_groups(fields).values())
    assert tuple(map(len, groups)) == GROUPS[task]
    loss = Loss(groups, normaliser=normaliser, absolute=absolute)(prediction, truth)
    for sample in range(3):
        expected = 0.0
        for group in groups:
            channel_means = []
            for q in group:
                p, t = prediction[sample, ..., q], truth[sample, ..., q]
                if fields[q].startswith("species_"):
                    p, t = 10 * (p**0.1 - 1), 10 * (t.clamp(min=1e-8) ** 0.1 - 1)
                difference = (p - t) / normaliser.scale[q]
                channel_means.append(float((difference.abs() if absolute else difference**2).mean()))
            expected += np.mean(channel_means)
        assert float(loss[sample]) == pytest.approx(expected, rel=1e-10)


def test_pushforward_equals_definition_in_normalised_space():
    """z1 from the first frame without gradient, floored like data; z2 from z1 with gradient, compared with frame 3."""
    fields = ("species_OH", "species_H2O", "temperature")
    data = flame(2, 3, fields)
    normaliser = fit_trajectories("box-cox", fields, data)
    torch.manual_seed(1)
    network = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)).double()
    with torch.no_grad():
        network[-1].bias[0] = -1.2  # below the floor at some points
    forecaster = Forecaster(network, normaliser, normaliser, 1, history=1)
    loss = pushforward(forecaster, data[:, :1], data[:, 1:], Loss(((0, 1), (2,)), normaliser=normaliser), calls=2)
    gradients = torch.autograd.grad(loss, list(network.parameters()))

    mean, scale = normaliser.mean, normaliser.scale
    floor = torch.where(torch.tensor([True, True, False]), (10 * (1e-8**0.1 - 1) - mean) / scale, -torch.inf)
    z0, z2 = normaliser.encode(data[:, 0]), normaliser.encode(data[:, 2])
    with torch.no_grad():
        z1 = network(z0)
    assert bool((z1 < floor).any()) and bool((z1[..., :2] > floor[:2]).any())
    squares = (network(torch.maximum(z1, floor)) - z2) ** 2
    expected = squares[..., :2].mean() + squares[..., 2].mean()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(
        gradients, torch.autograd.grad(expected, list(network.parameters())), rtol=1e-7, atol=1e-12
    )


def test_validation_error_ignores_constant_species():
    fields = ("species_AR", "species_OH", "temperature")
    true = flame(2, 3, fields)
    true[..., 0] = 0
    normaliser = fit_trajectories("box-cox", fields, true)
    predicted = flame(2, 3, fields, seed=1)
    remaining = ("species_OH", "temperature")
    selected = normaliser.select(remaining)
    expected = metrics.relative_l2(selected.encode_forecast(predicted[..., 1:]), selected.encode(true[..., 1:])).mean(1)
    torch.testing.assert_close(_relative_errors(normaliser, predicted, true), expected)
    plain = Normaliser("channel", fields, normaliser.mean, normaliser.scale)
    true[..., 0] = 1
    expected = metrics.relative_l2(predicted, true).mean(1)
    assert torch.equal(_relative_errors(plain, predicted, true), expected)


# --- sizes and coordinates


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("ignit-hit", 2_487_040),
        ("evolve-jet", 21_013_273),
        # Two more inputs to the first layer, which has twice the width of the model.
        ("ignit-hit-coordinates", 2_487_040 + 2 * 2 * 128),
        ("evolve-jet-coordinates", 21_013_273 + 2 * 2 * 256),
    ],
)
def test_transolver_sigma_parameter_counts(name, parameters):
    recipe = RECIPES[name]
    assert count_parameters("transolver-sigma", recipe.model.config(recipe.task)) == parameters


def test_proportional_coordinates_keep_aspect_ratio():
    """As in the benchmark: minus the minimum of each axis, divided by the range of the first axis, for square cells."""
    x, y = 0.4 * np.arange(5) + 3, 0.4 * np.arange(9) - 7
    expected = np.stack(np.meshgrid((x - x[0]) / (x[-1] - x[0]), (y - y[0]) / (x[-1] - x[0]), indexing="ij"), -1)
    result = proportional((5, 9), torch.float64, torch.device("cpu"))
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-12)
    options = (torch.float64, torch.device("cpu"))
    torch.testing.assert_close(proportional((6, 6), *options), coordinates((6, 6), *options))


@pytest.mark.parametrize(("positions", "channels"), [("proportional", 2), ("distances-proportional", 66)])
def test_solver_positions_proportional(positions, channels):
    config = SolverConfig(
        (6, 9), 3, 2, width=8, depth=1, heads=2, slices=3, modes=2, options=Options(positions=positions)
    )
    model = build_solver("transolver-sigma", config)
    x = torch.randn(2, 6, 9, 3)
    points = model.points(x)
    assert points.shape == (6, 9, channels) == (6, 9, config.position_channels)
    assert model.lift[0].in_features == channels + 3 and model(x).shape == (2, 6, 9, 2)
    assert torch.equal(points[..., -2:], proportional((6, 9), x.dtype, x.device))
    if channels == 66:
        assert torch.equal(points[..., :64], distances((6, 9), 8, x.dtype, x.device))


# --- from files to the table


@pytest.fixture(scope="module")
def trained(downloads, tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("runs") / "run")
    recipe = changed(recipe_of("evolve-jet-released"), SETTINGS)
    train_run(recipe, downloads / "realm-bench-EvolveJet", run)
    return run, recipe


def test_realm_errors_equal_rollout_in_normalised_space(trained, downloads):
    """Per group and call, the mean over cases, channels and points; then the sum or the mean over calls."""
    run, recipe = trained
    records = evaluate_run(run)
    rows = [row for row in records if row["model"] == "transolver-sigma"]
    forecaster = load(run.path)
    normaliser = forecaster.targets
    with open_data(downloads / "realm-bench-EvolveJet") as data:
        true = torch.from_numpy(np.stack([data[index] for index in (5, 6)]))
    state, calls = true[:, 0], 39
    errors, correlations = {group: 0.0 for group in field_groups(recipe.task.targets)}, []
    for call in range(calls):
        with torch.no_grad():
            output = forecaster.model(normaliser.encode(state))
        difference = (output - normaliser.encode(true[:, call + 1])).double() ** 2
        for group, channels in field_groups(recipe.task.targets).items():
            errors[group] += float(difference[..., list(channels)].mean())
        state = normaliser.decode(output)
        for sample in range(2):
            for q in range(39):
                if np.ptp(true[sample, call + 1, ..., q].numpy()) > 0:
                    pair = (values[sample, ..., q].double().flatten().numpy() for values in (state, true[:, call + 1]))
                    correlations.append(np.corrcoef(*pair)[0, 1])

    def value(metric, field=None):
        (number,) = [
            row["value"] for row in rows if (row["metric"], row["field"], row["lead"]) == (metric, field, None)
        ]
        return number

    for group, error in errors.items():
        assert value("realm_error", group) == pytest.approx(error, rel=1e-4)
        assert value("realm_error_per_call", group) == pytest.approx(error / calls, rel=1e-4)
    assert value("realm_error") == pytest.approx(sum(errors.values()), rel=1e-4)
    assert value("realm_error_per_call") == pytest.approx(sum(errors.values()) / calls, rel=1e-4)
    assert value("correlation", "all") == pytest.approx(np.mean(correlations), rel=1e-3)
    masked = 2 * calls  # argon, at every call of both cases
    assert value("correlation_masked", "all") == value("correlation_masked", "species_AR") == masked
    rows = [row for row in records if row["model"] == "persistence"]
    persistence = (normaliser.encode(true[:, :1]) - normaliser.encode(true[:, 1:])).double() ** 2
    groups = field_groups(recipe.task.targets).values()
    expected = sum(float(persistence[..., list(group)].mean((0, 2, 3, 4)).sum()) for group in groups)
    assert value("realm_error") == pytest.approx(expected, rel=1e-5)
    rows = [row for row in records if row["model"] == "transolver-sigma"]
    assert value("relative_l2", "species_AR") is None  # undefined for a zero field
    errors_of_fields = [value("relative_l2", name) for name in recipe.task.targets[1:]]
    assert value("relative_l2", "all") == pytest.approx(np.mean(errors_of_fields), rel=1e-9)
    assert value("correlation", "species_AR") is None and len(correlations) + masked == 2 * calls * 39


def test_released_run_stores_normaliser_and_validates(trained, downloads):
    run, recipe = trained
    with open_data(downloads / "realm-bench-EvolveJet") as data:
        windows = Windows(data, recipe.split_of(data).train, recipe.training_window_spec())
        assert run.read_json("normaliser.json")["inputs"] == fit("box-cox-released", windows)[0].to_dict()
        argon = run.read_json("normaliser.json")["inputs"]["mean"][0]
        assert argon == pytest.approx(-9.99900, abs=1e-6)
    (row,) = [row for row in run.read_log() if "error" in row]
    assert 0 < row["error"] < 1e3


def test_suite_trains_on_downloads_and_fills_table(downloads, tmp_path, call):
    arguments = [
        "--only",
        "ignit-hit*42",
        "--only",
        "evolve-jet*42",
        "--data",
        downloads,
        "--out",
        tmp_path,
        "--device",
        "cpu",
    ]
    for setting in (*SETTINGS, *SHORT):
        arguments += ["--set", setting]
    code, _, err = call("suite", "main", *arguments)
    assert code == 0, err
    runs = [tmp_path / f"{task}-transolver-sigma-42" for task in GROUPS]
    code, out, err = call("table", "realm", *runs)
    assert code == 0, err
    (ours,) = [line for line in out.splitlines() if "Transolver-σ" in line and "ours" in line]
    assert "–" not in ours and len(ours.split()) >= 10
    for run, task in zip(runs, GROUPS, strict=True):
        records = read_records(run / "records.jsonl")
        assert {row["part"] for row in records} == {"train", "validation", "test"}
        counts = {row["part"]: row["windows"] for row in records}
        assert counts == {"train": 4, "validation": 1, "test": 2}
        for row in records:
            if row["metric"] == "realm_error" and row["model"] == "transolver-sigma" and row["field"] is None:
                assert f"{row['value']:.3g}" in ours.replace("±", " "), (task, row["part"])
    code, out, _ = call("evaluate", runs[0])
    assert "REALM error" in out and "summed over calls" in out
    code, _, err = call("report", runs[1], "--out", tmp_path / "page.html")
    assert code == 0 and "evolve-jet" in (tmp_path / "page.html").read_text(), err
    code, out, _ = call("suite", "main", *arguments)
    assert code == 0 and out.count("already finished") == 2


def test_ensure_store_prefers_imported_store(downloads, tmp_path):
    recipe = recipe_of("ignit-hit")
    stores = [ensure_store(recipe, downloads, [recipe], seed, Execution()) for seed in (None, 3)]
    assert stores == [downloads / "IgnitHIT"] * 2  # the seed only matters for simulated tasks
    import_data(downloads / "IgnitHIT", tmp_path / "ignit-hit.h5")
    for seed in (None, 3):
        assert ensure_store(recipe, tmp_path, [recipe], seed, Execution()) == tmp_path / "ignit-hit.h5"


@pytest.mark.parametrize("task", GROUPS)
def test_suite_without_download_names_missing_files(task, tmp_path, call):
    code, _, err = call("suite", "main", "--only", f"{task}*42", "--data", tmp_path, "--out", tmp_path / "runs")
    assert code != 0 and "data/data.npz" in err and f"make-fixture {task}" in err
    assert not (tmp_path / "runs").exists()
