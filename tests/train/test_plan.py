"""The planner against costs measured on the full grid, the advice it gives, and its command."""

from dataclasses import replace
from math import prod

import pytest
import torch

from sigmasolver.recipes import RECIPES, changed, recipe_of
from sigmasolver.train import dry_run, plan
from sigmasolver.train.dry_run import Cost, DryRun, LiveMemory, estimate_cost
from sigmasolver.train.engine import Execution
from sigmasolver.train.plan import MARGIN, SHARES, advise, on_grid, predict, probe_grids
from tests.train.saved import saved_bytes

SIZES = ("model.width=16", "model.depth=2", "model.heads=2", "model.slices=4", "model.modes=3")
TINY = [option for setting in SIZES for option in ("--set", setting)]
PLENTY = 1e12


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Time a single update: no test here depends on seconds."""
    monkeypatch.setattr(dry_run, "TIMING_SECONDS", 0.0)


def tiny(task, grid, *settings, model="transolver-sigma"):
    return on_grid(changed(recipe_of(task, model), [*SIZES, "model.depth=1", *settings]), grid)


@pytest.mark.parametrize("task", RECIPES)
def test_probe_grids_scale_all_axes_alike_and_fit_the_modes(task):
    recipe = RECIPES[task]
    full, modes = recipe.task.grid, recipe.model.modes
    for grid, share in zip(probe_grids(recipe), SHARES[0], strict=True):
        assert prod(grid) / prod(full) == pytest.approx(share, rel=0.2)
        for points, full_points in zip(grid, full, strict=True):
            assert points % 2 == full_points % 2 and points // 2 + 1 >= modes
            assert points / full_points == pytest.approx(share ** (1 / len(full)), abs=1 / 16)


def test_probe_grids_keep_factors_of_two():
    assert probe_grids(tiny("kf2d", (128, 64))) == ((64, 32), (96, 48))
    assert probe_grids(tiny("darcy", (85, 85))) == ((43, 43), (61, 61))
    assert probe_grids(tiny("it3d", (60, 60, 60))) == ((36, 36, 36), (48, 48, 48))


def test_probe_grids_of_a_minimal_grid_is_the_grid_itself():
    assert probe_grids(tiny("ns2d", (6, 6), "model.modes=4")) == ((6, 6),)
    assert probe_grids(tiny("ns2d", (12, 12), "model.modes=7")) == ((12, 12),)
    recipe = tiny("ns2d", (6, 6), "model.modes=4")
    assert predict(recipe, Execution(), PLENTY).update.memory == pytest.approx(
        estimate_cost(recipe, Execution()).memory, rel=0.02
    )


RECIPES_AND_GRIDS = {
    "steady, odd": tiny("darcy", (37, 37)),
    "teacher forced": tiny("ns2d", (24, 24)),
    "recompute": tiny("ns2d", (24, 24), "train.recompute=true", "model.depth=4"),
    "bf16": tiny("kf2d", (32, 32), "train.precision=bf16", "train.batch=2"),
    "three axes": tiny("smoke3d", (16, 16, 16)),
    "uneven axes": tiny("foil", (16, 32), "train.ema=0.9"),
    "pushforward": tiny("ignit-hit", (24, 24), "train.batch=3", "train.clip=1", "train.noise=0.1"),
    "baseline": tiny("darcy", (37, 37), model="transolver"),
}


@pytest.mark.parametrize("name", RECIPES_AND_GRIDS)
def test_predict_memory_from_smaller_grids(name):
    recipe = RECIPES_AND_GRIDS[name]
    prediction = predict(recipe, Execution(), PLENTY)
    assert all(prod(grid) < 0.62 * prod(recipe.task.grid) for grid in prediction.probed)
    assert prediction.update.memory == pytest.approx(estimate_cost(recipe, Execution()).memory, rel=0.02)


def test_predict_augmented_training_on_a_grid_that_its_symmetries_fit():
    """Those of the smaller grids need not."""
    recipe = changed(recipe_of("kf2d"), ["task.grid=80,80", "model.width=16", "model.depth=1", "train.augment=true"])
    usual = changed(recipe, ["train.augment=false"])
    assert predict(recipe, Execution(), PLENTY).probed == predict(usual, Execution(), PLENTY).probed
    with pytest.raises(ValueError, match="not a whole number of its 81 grid points"):
        predict(changed(recipe, ["task.grid=81,81"]), Execution(), PLENTY)


def test_alive_counts_bytes_by_hand():
    excluded = torch.randn(1000)  # not counted, like the training windows
    with LiveMemory(excluded) as alive:
        a = excluded + 1  # 4 kB
        b = a * 2  # 8 kB, the peak so far
        view = b.view(10, 100)
        del a, b  # the view keeps the storage of b alive
        c = torch.cat((view, view))  # 4 + 8 kB
        del view
        d = c.sum()  # 8 kB + 4 B
        assert (alive.now, alive.peak) == (8004, 12000)
        del c, d
        assert alive.now == 0


def test_alive_peak_covers_weights_gradients_states_and_activations():
    update = DryRun(tiny("ns2d", (16, 16)), Execution())
    weights = list(update.stepper.model.parameters())
    update()
    with LiveMemory(update.windows.values_on_device) as alive:
        update()
    saved = saved_bytes(update, [*weights, update.windows.values_on_device])
    expected = saved + 4 * sum(weight.nbytes for weight in weights)
    assert expected < alive.peak < 1.5 * expected


def test_predict_windows_and_updates_of_the_stored_data():
    """NS2D: 1000 trajectories of 20 frames, one window each. KF2D: 100 of 134 windows each. Values of 4 bytes."""
    prediction = predict(tiny("ns2d", (16, 16)), Execution(), PLENTY)
    assert prediction.windows == 1000 * 20 * 16 * 16 * 4 and prediction.updates == 500 * 1000 // 2 and prediction.known
    kolmogorov = tiny("kf2d", (16, 16), "train.batch=8")
    prediction = predict(kolmogorov, Execution(), PLENTY)
    assert prediction.updates == 50 * (100 * 134 // 8) and prediction.known
    assert prediction.seconds == prediction.updates * prediction.update.seconds
    reacting = predict(tiny("ignit-hit", (16, 16), "train.batch=2"), Execution(), PLENTY)
    assert not reacting.known and reacting.updates == 20_000
    longer = predict(tiny("ns2d", (16, 16), "task.horizon=30"), Execution(), PLENTY)
    assert not longer.known and longer.windows == 1000 * 40 * 16 * 16 * 4


def test_predict_memory_includes_resident_windows():
    recipe = tiny("ns2d", (16, 16))
    large, small = predict(recipe, Execution(), PLENTY), predict(recipe, Execution(), 3 * 1000 * 20 * 16 * 16 * 4)
    assert large.resident and large.memory == large.update.memory + large.windows
    assert not small.resident and small.memory == small.update.memory


@pytest.mark.parametrize("share", [0.6, 0.1])
def test_advise_ends_with_settings_that_fit(share):
    """Also where the first changes are not enough: a tenth of the memory needs a smaller batch and width."""
    recipe = tiny("darcy", (17, 17), "model.width=32", "model.depth=2")
    first = predict(recipe, Execution(), PLENTY)
    memory = share * first.update.memory
    tried = list(advise(first, Execution(), memory))
    assert [prediction.fits(memory) for _, prediction in tried] == [False] * (len(tried) - 1) + [True]
    settings, prediction = tried[-1]
    advised = changed(recipe, settings)
    assert prediction.recipe == advised and not is_resident(advised, memory)
    assert estimate_cost(advised, Execution()).memory <= memory
    reduced = any("batch" in setting for setting in settings), any("width" in setting for setting in settings)
    assert reduced == ((True, True) if share < 0.2 else (False, False))


def is_resident(recipe, memory):
    return predict(recipe, Execution(), memory).resident


def test_advise_ends_when_nothing_fits_and_skips_settings_in_use():
    recipe = tiny("darcy", (12, 12), "train.precision=bf16", "train.recompute=true", "train.batch=2")
    first = predict(recipe, Execution(), PLENTY)
    tried = list(advise(first, Execution(), 1e4))
    assert [settings for settings, _ in tried] == [
        ("train.batch=1",),
        ("train.batch=1", "model.width=12"),
        ("train.batch=1", "model.width=8"),
        ("train.batch=1", "model.width=4"),
    ]
    assert not any(prediction.fits(1e4) for _, prediction in tried)


def test_advise_does_not_recompute_random_layers_in_a_captured_step():
    class Captured:
        captured = True

    for model, dropout, expected in (
        ("transolver-sigma", 0.0, True),
        ("transolver-sigma", 0.1, False),
        ("transolver-plus", 0.0, False),
    ):
        recipe = tiny("ns2d", (12, 12), f"model.options.dropout={dropout}", model=model)
        names = [name for name, _ in plan._changes(recipe, Captured)]
        assert ("train.recompute" in names) == expected


def test_predict_falls_back_to_smaller_probe_grids(monkeypatch):
    recipe = tiny("darcy", (48, 48))
    full = estimate_cost(recipe, Execution()).memory
    monkeypatch.setattr(plan, "available_memory", lambda device: full / 5)
    prediction = predict(recipe, Execution(), full / 5)
    assert prediction.probed == probe_grids(recipe, SHARES[1]) and not prediction.fits(full / 5)
    assert prediction.update.memory == pytest.approx(full, rel=0.1)
    monkeypatch.setattr(plan, "available_memory", lambda device: 1000)
    with pytest.raises(
        ValueError, match=r"^An update on 8 × 8 points, a fraction of the grid, does not fit on this device; lower"
    ):
        predict(recipe, Execution(), 1000)


def test_extrapolate_and_fits_by_hand():
    probed = {(4, 4): Cost(100.0, 2.0), (8, 4): Cost(180.0, 1.0)}
    assert plan._extrapolate(probed, 64) == Cost(340.0, 1.0)
    prediction = replace(predict(tiny("ns2d", (12, 12)), Execution(), PLENTY), update=Cost(95.0, 1.0), resident=False)
    assert prediction.fits(95 / (1 - MARGIN) + 0.01) and not prediction.fits(95 / (1 - MARGIN) - 0.01)


@pytest.fixture
def planned(call):
    return lambda *arguments: call("plan", *arguments, "--device", "cpu")


def cells(out):
    """Parse the rows of a printed table into names and values."""
    return dict(part for line in out.splitlines() if len(part := line.strip().split("  ", 1)) == 2)


def test_plan_command_reports_what_fits_and_checks_itself(planned):
    code, out, error = planned("ns2d", *TINY, "--grid", 16, "--check")
    assert code == 0, error
    values = {name: value.strip() for name, value in cells(out).items()}
    assert "ns2d on 16 × 16: transolver-sigma of width 16 and depth 2, batch 2, float32, eager on cpu" in out
    assert values["parameters"] == "8,515" and values["updates"] == "250,000"
    assert values["training windows, on the device"] == "20.5 MB"
    assert "measured on 8 × 8 and 12 × 12; memory counted" in out and "It fits: " in out
    memory = values["memory"].split()
    assert memory[:2] == values["memory of one update"].split() and abs(float(memory[-2])) < 3


def test_plan_command_advises_settings_that_fit(planned):
    code, out, error = planned("darcy", *TINY, "--grid", 17, "--memory", 0.0021)
    assert code == 1, error
    assert "It does NOT fit" in out and "training windows, read as needed" in out
    last = next(line for line in reversed(out.splitlines()) if "--set" in line)
    assert out.endswith("The last one fits.\n") and "--set train.precision=bf16" in last
    code, advised, _ = planned(
        "darcy", *TINY, "--grid", 17, "--memory", 0.0021, *last.split()[last.split().index("--set") :]
    )
    assert code == 0 and "It fits" in advised
    code, out, _ = planned("darcy", *TINY, "--grid", 9, "--memory", 1e-5, "--set", "train.batch=1")
    assert code == 1 and "None of them fits; use a coarser grid with --grid" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("ns3d",), "did you mean ns2d"),
        (("smoke3d", "--grid", "64,64"), "has 2 axes, but smoke3d has 3"),
        (("ns2d", "--grid", "4"), "too small for modes=4"),
        (("ns2d", "--grid", "wide"), "integers such as 64"),
        (("ns2d", "--grid", "0"), "too small"),
        (("ns2d", "--memory", "0"), "The memory is 0 GB; it must be positive"),
        (("ns2d", "--memory", "-3"), "it must be positive"),
        (("ns2d", "--memory", "nan"), "and finite"),
        (("ns2d", "--memory", "inf"), "and finite"),
        (("ns2d", "--model", "transsolver"), "did you mean transolver"),
        (("ns2d", "--set", "train.batch=2000"), "lower train.batch"),
        (("ns2d", "--engine", "graph"), "needs a GPU"),
    ],
)
def test_plan_command_rejects_invalid_options(planned, arguments, message):
    code, out, error = planned(*arguments)
    assert code == 2 and message in error and not out, error
    assert error.count("\n") == 1 and error.startswith("sigmasolver: ") and error.rstrip("\n").endswith((".", "?")), (
        error
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.depth=1000000"], r"model.depth is 1000000; the maximum is 1,000"),
        (["model.width=1600000000"], r"model.width is 1.6e\+09; the maximum is 16,777,216"),
        (["model.width=16384"], "GB for its weights, gradients and optimiser states"),
        (["train.batch=100000000"], "needs more than .* GB"),
        (["task.grid=(99999999,99999999)"], "needs more than .* GB"),
    ],
)
def test_predict_rejects_absurd_sizes_by_an_estimate(settings, message):
    """Building or measuring them would exhaust the memory or take forever."""
    with pytest.raises(ValueError, match=message):
        predict(changed(recipe_of("ns2d"), settings), Execution(), 1e12)


def test_predict_rejects_slow_updates_by_an_estimate(monkeypatch):
    """The estimate is a lower bound: the measured update took longer."""
    recipe = tiny("ns2d", (16, 16), "train.batch=2")
    cost = estimate_cost(recipe, Execution())
    monkeypatch.setattr(plan, "PATIENCE", 0.0)
    with pytest.raises(ValueError, match=r"takes at least .* minutes here, too long to measure") as caught:
        predict(recipe, Execution(), PLENTY)
    assert 60 * float(str(caught.value).split("at least ")[1].split()[0].replace(",", "")) <= cost.seconds
