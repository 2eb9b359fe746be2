"""The pretrained models of the package: each reproduces the scores of its card and is found by name."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import sigmasolver
from sigmasolver import pretrained
from sigmasolver.cli import models
from sigmasolver.data.domain import Domain
from sigmasolver.data.store import Writer, open_store
from sigmasolver.evaluate import metrics
from sigmasolver.forecast.checkpoint import domain_of, load, load_recipe
from sigmasolver.forecast.symmetric import symmetric_rollout
from sigmasolver.model_cards.make import LIMIT, _choose_encoding, data_facts, make_folder
from sigmasolver.model_cards.score import score, shipped_windows, unseen_windows
from sigmasolver.model_cards.share import RUN_FILES, as_run
from sigmasolver.model_cards.text import card_text
from sigmasolver.recipes import changed, changed_settings, recipe_of
from sigmasolver.runs import Run, read_rows, read_tensors, replace_rows, write_tensors
from sigmasolver.simulate import SIMULATORS, simulator_of
from sigmasolver.simulate.generate import generate, header_of
from sigmasolver.symmetries import SYMMETRIES

ROOT = Path(__file__).parents[2]
FRESH = 8
"""Number of trajectories simulated in the slow test."""


def first_frames(recipe):
    """The simulator of a task, limited to the frames of the first window."""
    simulator, spec = simulator_of(recipe.task.name), recipe.evaluation_window_spec()
    frames = spec.time_stride * (spec.span - 1) + 1
    return replace(simulator, frames=frames) if hasattr(simulator, "frames") else simulator


@pytest.fixture(params=pretrained.names())
def name(request):
    return request.param


def test_pretrained_scores_match_the_card(name):
    folder, card = pretrained.folder(name), pretrained.card(name)
    recipe = load_recipe(Run(folder))
    with open_store(folder / "windows.h5") as store:
        assert store.fingerprint == card["windows"]["fingerprint"]
        assert all(store.verify(index) for index in range(len(store)))
        measured = score(load(name), shipped_windows(store, recipe), recipe)
    for actual, recorded in zip(measured, card["windows"]["scores"], strict=True):
        assert (actual["metric"], actual["field"]) == (recorded["metric"], recorded["field"])
        assert actual["value"] == pytest.approx(recorded["value"], rel=card["windows"]["tolerance"])
        assert actual["yardstick"] == pytest.approx(recorded["yardstick"], rel=1e-6)


@pytest.mark.slow
def test_card_tolerance_detects_rounded_weights(name):
    """Weights rounded to bfloat16 are as accurate on average, but their score must differ from the card."""
    folder, card = pretrained.folder(name), pretrained.card(name)
    recipe, forecaster = load_recipe(Run(folder)), load(name)
    with torch.no_grad():
        for parameter in forecaster.model.parameters():
            parameter.copy_(parameter.bfloat16())
    with open_store(folder / "windows.h5") as store:
        value = score(forecaster, shipped_windows(store, recipe), recipe)[0]["value"]
    assert value != pytest.approx(card["windows"]["scores"][0]["value"], rel=card["windows"]["tolerance"])


@pytest.mark.slow
def test_pretrained_error_on_a_fresh_simulation(name, tmp_path):
    """With a seed other than those of training and windows, within three standard errors of both means."""
    card, folder = pretrained.card(name), pretrained.folder(name)
    recipe = load_recipe(Run(folder))
    seed = 1 + max(card["windows"]["seed"], card["training"]["data_seed"])
    generate(first_frames(recipe), FRESH, seed, tmp_path / "fresh.h5")
    with open_store(tmp_path / "fresh.h5") as store:
        measured = score(load(name), unseen_windows(store, recipe), recipe)
    for fresh, test in zip(measured, card["test"]["scores"], strict=True):
        standard_error = test["deviation"] * math.sqrt(1 / FRESH + 1 / card["test"]["windows"])
        assert abs(fresh["value"] - test["value"]) < 3 * standard_error, (fresh, test)


@pytest.mark.slow
def test_pretrained_windows_are_reproduced_from_their_seed(name):
    """Up to float16 round-off: on another machine the simulation rounds differently, and a flow amplifies that."""
    folder = pretrained.folder(name)
    recipe = load_recipe(Run(folder))
    with open_store(folder / "windows.h5") as store:
        header, stored = store.header, store[0].astype(np.float32)
        stride = header.parameters["space_stride"]
    simulated = first_frames(recipe).simulate(header.seed, [0])[0].numpy()[:: recipe.task.time_stride]
    for _ in range(simulated.ndim - 2):
        simulated = np.moveaxis(simulated[:, ::stride], 1, -2)
    assert stored.shape == simulated.shape and np.linalg.norm(stored - simulated) < 2**-11 * np.linalg.norm(simulated)


def test_card_facts_match_files_and_text(name):
    folder, card = pretrained.folder(name), pretrained.card(name)
    assert (folder / "card.md").read_text() == card_text(card)
    assert Run(folder).digest == card["weights"]["digest"]
    assert (folder / "windows.h5").stat().st_size == card["windows"]["bytes"] <= LIMIT
    assert card["windows"]["seed"] == card["unseen"]["seed"] != card["training"]["data_seed"]
    tensors, facts = read_tensors(folder / "weights.safetensors")
    assert facts["data"] == card["training"]["fingerprint"]
    recipe = load_recipe(Run(folder))
    settings = [f"train.precision={card['training']['precision']}", *card["training"]["changed"]]
    assert changed_settings(recipe) == card["training"]["changed"]
    assert changed(recipe_of(card["task"], card["model"], card["training"]["seed"]), settings) == recipe
    assert {str(tensor.dtype) for tensor in tensors.values()} == {f"torch.{card['weights']['dtype']}"}
    assert sum(tensor.numel() for tensor in tensors.values()) == card["parameters"]
    for row in card["test"]["scores"]:
        assert row["value"] == min(row["seeds"].values()) < row["yardstick"]


def test_data_facts_match_card_and_simulator(name):
    """The simulation that the card names is recognised wherever it is repeated, and the windows are the test data."""
    run, card = Run(pretrained.folder(name)), pretrained.card(name)
    facts, training = run.read_json("data.json"), card["training"]
    assert facts["header"] == header_of(simulator_of(card["task"]), training["data_seed"]).digest
    assert facts["fingerprint"] == training["fingerprint"] and "path" not in facts
    counts = {part: len(trajectories) for part, trajectories in facts["parts"].items()}
    assert counts == {"train": training["train"], "validation": 0, "test": training["test"]}
    with open_store(run.path / "windows.h5") as store:
        assert facts == data_facts(facts, store) and facts["test"]["windows"] == card["windows"]["count"]
        layout = store.header.layout
    assert not domain_of(run).differences(Domain.of(layout, layout.fields, layout.times))


def test_pretrained_model_evaluates_and_diagnoses_like_a_run(call, tmp_path, monkeypatch):
    """On its own windows by default; results are stored in a copy, not in the package."""
    shipped, card = pretrained.folder("darcy"), pretrained.card("darcy")
    before = {path.name for path in shipped.iterdir()}
    monkeypatch.chdir(tmp_path)
    code, out, err = call("evaluate", "darcy", "--device", "cpu")
    assert code == 0 and err == "the results of the pretrained darcy are stored in runs/darcy\n"
    score = card["windows"]["scores"][0]
    assert f"{100 * score['value']:.3f}" in out and "16 windows of the test split" in out
    assert call("evaluate", "darcy", "runs/darcy", "--device", "cpu") == (0, out, err), "the same run"
    rows = sigmasolver.evaluate_run("darcy")  # existing rows of the copy
    (error,) = [r["value"] for r in rows if r["metric"] == "relative_l2" and r["model"] == "transolver-sigma"]
    assert error == pytest.approx(score["value"], rel=card["windows"]["tolerance"])
    corrections = sigmasolver.diagnose_run("darcy", "corrections", windows=2)["corrections"]
    assert (tmp_path / "runs/darcy/diagnose/corrections.jsonl").exists()
    ratios = [row["value"] for row in corrections.rows if row["metric"] == "correction_ratio"]
    assert max(ratios) > 0.2  # of an untrained model: zero
    code, _, err = call("evaluate", "darcy", "--split", "train")
    assert code == 2 and "data.json of runs/darcy has no data path; pass it with --data" in err
    assert {path.name for path in shipped.iterdir()} == before


def test_as_run_does_not_mix_a_pretrained_model_with_other_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert as_run("kf2").path == Path("kf2") and as_run(tmp_path).path == tmp_path
    copy = as_run("darcy")
    assert copy.path == Path("runs/darcy") and as_run("darcy").digest == copy.digest
    assert {path.name for path in copy.path.iterdir()} == set(RUN_FILES)
    write_tensors(copy.weights, {"weight": torch.zeros(1)}, {})
    for unfinished in (False, True):
        if unfinished:
            copy.weights.unlink()
        with pytest.raises(ValueError, match=r"runs/darcy is not a copy of the pretrained model darcy.*rename it"):
            as_run("darcy")
    (tmp_path / "darcy").mkdir()
    (tmp_path / "darcy" / "recipe.json").write_text("{}")
    assert as_run("darcy").path == Path("darcy"), "a run folder of this name is meant"


def test_pretrained_total_size_is_small():
    assert sum(path.stat().st_size for path in Path(pretrained.__file__).parent.glob("*/*")) < 16_000_000


def test_resolve_name_or_path(tmp_path, monkeypatch):
    shipped = pretrained.folder("darcy")
    monkeypatch.chdir(tmp_path)
    assert pretrained.resolve("darcy") == shipped and pretrained.is_pretrained(pretrained.resolve("darcy"))
    assert pretrained.resolve(Path("darcy")) == Path("darcy")
    assert pretrained.resolve("./darcy") == Path("darcy")
    (tmp_path / "darcy").mkdir()
    assert pretrained.resolve("darcy") == shipped, "a folder that is not a run is ignored"
    (tmp_path / "darcy" / "recipe.json").write_text("{}")
    with pytest.raises(ValueError, match=r"write \./darcy for the folder"):
        sigmasolver.load("darcy")
    with pytest.raises(ValueError, match=r'no run folder "dracy" here, and no pretrained model.*darcy'):
        sigmasolver.load("dracy")
    with pytest.raises(ValueError, match='no pretrained model "kf"'):
        pretrained.folder("kf")
    with pytest.raises(AttributeError, match="has no attribute 'loda'"):
        _ = sigmasolver.loda


def test_load_is_imported_lazily():
    code = "import sys, sigmasolver; assert 'sigmasolver.forecast' not in sys.modules; sigmasolver.load('darcy')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def two_windows(tmp_path, monkeypatch):
    """A pretrained model with two windows, timed once, for speed."""
    source, home = pretrained.folder("darcy"), tmp_path / "models"
    shutil.copytree(source, home / "darcy", ignore=shutil.ignore_patterns("windows.h5"))
    with (
        open_store(source / "windows.h5") as store,
        Writer(home / "darcy" / "windows.h5", store.header, 2) as writer,
    ):
        writer.append(store[:2])
        monkeypatch.setattr(pretrained, "_HERE", home)
        monkeypatch.setattr("sigmasolver.model_cards.score.REPEATS", 1)
        yield torch.from_numpy(store[:2][..., 1:].astype(np.float32))


def test_forecast_of_a_pretrained_model_by_name(two_windows, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("forecast", "darcy", "--out", "p.npy", "--animation", "p.png")
    assert code == 0, err
    assert Path("p.png").read_bytes().startswith(b"\x89PNG") and out.splitlines()[-1] == "p.png"
    error = float(metrics.relative_l2(torch.from_numpy(np.load("p.npy")), two_windows).mean())
    rows = {line.split("  ")[1].strip(): line for line in out.splitlines() if line.startswith("  ")}
    assert f"{100 * error:.3g} %" in rows["transolver-sigma, 85 × 85"]
    assert "the truth" in rows["solver, 421 × 421"] and re.search(r"\d m?s\b", rows["solver, 85 × 85"])
    assert "paper 0.40 ± 0.01 %" in out
    for args, message in (
        (("forecast", "darcy", "--out", "p.npy"), "already exists"),
        (("forecast", "darcy", "--steps", "2"), "--steps requires --input"),
        (("forecast", "darcy", "--input", "p.npy"), "--out"),
        (("forecast", "darcy", "--input", "p.npy", "--out", "q.npy", "--animation", "a.png"), "omit --input"),
        (("forecast", "."), "Missing --input"),
    ):
        code, _, err = call(*args)
        assert code == 2 and message in err


def test_forecast_of_a_pretrained_model_averaged_over_symmetries(two_windows, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("forecast", "darcy", "--symmetries", "2", "--out", "p.h5")
    assert code == 0, err
    with open_store(Path("p.h5")) as store:
        frames = torch.from_numpy(store[:])
        assert store.header.parameters["symmetries"] == 2
    with open_store(pretrained.folder("darcy") / "windows.h5") as store:
        history = torch.from_numpy(store[:][..., :1].astype(np.float32))
    average = symmetric_rollout(sigmasolver.load("darcy"), history, 1, SYMMETRIES["square"], 2)
    torch.testing.assert_close(frames, average.mean.frames, rtol=1e-4, atol=1e-7)
    errors = [float(metrics.relative_l2(values, two_windows).mean()) for values in (average.mean.frames, frames)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-3)
    (line,) = (line for line in out.splitlines() if line.startswith("  transolver-sigma, mean over 2"))
    assert f"{100 * errors[1]:.3g} %" in line
    assert f"deviate from it by {100 * float(average.relative_spread().mean()):.3g} % of their norm" in out
    for number, message in (("0", "must be at least 1, got 0"), ("9", "This grid has 8 symmetries")):
        code, _, err = call("forecast", "darcy", "--symmetries", number)
        assert code == 2 and message in err
    code, _, err = call("forecast", "darcy", "--spread", "s.h5")
    assert code == 2 and "--spread requires --input" in err


def test_forecast_of_a_pretrained_model_from_own_frames(call, tmp_path):
    with open_store(pretrained.folder("darcy") / "windows.h5") as store:
        coefficient, truth = store[:2][..., :1].astype(np.float32), store[:2][..., 1:].astype(np.float32)
    np.save(tmp_path / "a.npy", coefficient)
    code, _, err = call("forecast", "darcy", "--input", tmp_path / "a.npy", "--out", tmp_path / "u.npy")
    assert code == 0, err
    error = metrics.relative_l2(torch.from_numpy(np.load(tmp_path / "u.npy")), torch.from_numpy(truth))
    assert float(error.max()) < 0.01


def test_models_lists_pretrained_models(capsys):
    models._print_pretrained()
    lines = capsys.readouterr().out.splitlines()
    for name in pretrained.names():
        value = pretrained.card(name)["test"]["scores"][0]["value"]
        assert any(line.split()[:1] == [name] and f"{100 * value:.3g}" in line for line in lines)


def test_make_folder_from_a_run(tmp_path, monkeypatch):
    """The shipped folder, with records and a log added, serves as the run."""
    source, card = pretrained.folder("darcy"), pretrained.card("darcy")
    run = Run(tmp_path / "run")
    run.path.mkdir()
    for file in ("recipe.json", "normaliser.json", "weights.safetensors"):
        (run.path / file).write_bytes((source / file).read_bytes())
    splits = {"train": list(range(1000)), "validation": [], "test": list(range(1000, 1200))}
    facts = {"fingerprint": card["training"]["fingerprint"], "frames": 1, "parts": splits}
    run.write_json("data.json", facts)
    replace_rows(run.log, [{"step": 125_000, "loss": 0.1, "steps_per_second": 125.0}])
    common = {"task": "darcy", "run": "run",
              "part": "test", "protocol": "free", "horizon": 1, "grid": [85, 85], "weights": run.digest, "lead": None,
              "data": card["training"]["fingerprint"], "windows": 200, "machine": "m", "torch": "t", "commit": "c",
              "date": "d", "forecast_precision": "float32", "metric": "relative_l2", "field": "pressure"}  # fmt: skip
    replace_rows(run.records, [
        {**common, "model": "transolver-sigma", "seed": 42, "value": 0.004, "deviation": 0.001},
        {**common, "model": "training-mean", "seed": None, "value": 0.5, "deviation": 0.1},
        {**common, "windows": 7, "model": "transolver-sigma", "seed": 42, "value": 0.9, "deviation": 0.1},
    ])  # fmt: skip
    small = replace(simulator_of("darcy"), grid=85)  # cheap, with stride 5: 17 × 17
    generate(small, 3, 7, tmp_path / "unseen.h5")
    message = "is not the output of simulate darcy: its parameter grid is 85, expected 421"
    with pytest.raises(ValueError, match=message):
        make_folder(run, tmp_path / "made", tmp_path / "unseen.h5", 2, 0)
    monkeypatch.setitem(SIMULATORS, "darcy", small)
    new_card = make_folder(run, tmp_path / "made", tmp_path / "unseen.h5", 2, 0, note="Chosen by lot.")
    assert new_card == json.loads((tmp_path / "made" / "card.json").read_text())
    assert new_card["training"]["budget_share"] == 1
    assert "trained. Chosen by lot.\n" in (tmp_path / "made" / "card.md").read_text()
    assert new_card["test"]["scores"][0]["value"] == 0.004 and new_card["test"]["scores"][0]["paper"] == "0.40±0.01"
    # these weights are already float16, so storing them as float16 changes nothing
    assert new_card["weights"]["dtype"] == "float16" and new_card["weights"]["changes"]["float16"]["deviation"] == 0
    assert (
        new_card["weights"]["changes"]["bfloat16"]["deviation"]
        > new_card["weights"]["changes"]["int16"]["deviation"]
        > 0
    )
    with open_store(tmp_path / "unseen.h5") as full, open_store(tmp_path / "made" / "windows.h5") as windows:
        assert np.array_equal(windows[:], full[:2, :, ::5, ::5].astype(np.float16))
        assert windows.header.seed == 7 and windows.header.grid == (17, 17)
    grids, errors = zip(*((row["grid"], row["errors"]) for row in new_card["solver"]["rows"]), strict=True)
    assert grids[:2] == ([85, 85], [17, 17]) and errors[0] is None
    assert len(grids) == 2 or errors[2][0] <= new_card["windows"]["scores"][0]["value"] < errors[1][0]
    for seed, count, expected in ((7, 2, "a seed that was not used for training"), (0, 9, "9 windows were requested")):
        with pytest.raises(ValueError, match=expected):
            make_folder(run, tmp_path / "other", tmp_path / "unseen.h5", count, seed)
    with pytest.raises(ValueError, match="already exists"):
        make_folder(run, tmp_path / "made", tmp_path / "unseen.h5", 2, 0)
    assert len(read_rows(run.records)) == 3


@pytest.mark.slow
def test_wheel_contains_pretrained_weights(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    paths = [path for path in Path(pretrained.__file__).parent.glob("*/*") if path.parent.name != "__pycache__"]
    files = {str(path.relative_to(ROOT)) for path in paths}
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert files <= set(wheel.namelist())
        wheel.extractall(tmp_path / "site")
    code = "import sigmasolver, sigmasolver.pretrained as p; print(p.folder('darcy')); sigmasolver.load('darcy')"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0 and str(tmp_path / "site") in result.stdout, result.stderr


@pytest.mark.parametrize(("share", "expected"), [(0.0, "int16"), (0.09, "int16"), (0.11, "float32")])
def test_choose_encoding_is_the_closest_within_a_tenth_of_the_standard_error(share, expected):
    errors = torch.tensor([95.0, 105.0, 95.0, 105.0])
    mean = share * float(errors.std()) / 2  # a share of the standard error of the mean over four windows
    changes = {"float16": {"mean": 9.0, "deviation": 9.0}, "int16": {"mean": mean, "deviation": 0.0}}
    assert _choose_encoding(changes, errors) == expected
