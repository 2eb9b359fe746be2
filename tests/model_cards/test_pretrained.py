"""The weights that come with the package: each scores what its card says, and is found by its name."""

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
from sigmasolver.data.store import Writer, open_store
from sigmasolver.evaluate import metrics
from sigmasolver.forecast.checkpoint import load, recipe_in
from sigmasolver.model_cards.make import LIMIT, make_folder
from sigmasolver.model_cards.score import score, shipped_windows, unseen_windows
from sigmasolver.model_cards.text import card_text
from sigmasolver.runs import Run, read_rows, read_tensors, replace_rows
from sigmasolver.simulate import SIMULATORS, simulator_of
from sigmasolver.simulate.generate import generate

ROOT = Path(__file__).parents[2]
FRESH = 8
"""Trajectories that the slow test simulates."""


def first_frames(recipe):
    """The simulator of a task, stopped after its first window."""
    simulator, spec = simulator_of(recipe.task.name), recipe.evaluation_windows()
    frames = spec.time_stride * (spec.span - 1) + 1
    return replace(simulator, frames=frames) if hasattr(simulator, "frames") else simulator


@pytest.fixture(params=pretrained.names())
def name(request):
    return request.param


def test_every_pretrained_model_scores_what_its_card_says(name):
    folder, card = pretrained.folder(name), pretrained.card(name)
    recipe = recipe_in(Run(folder))
    with open_store(folder / "windows.h5") as store:
        assert store.fingerprint == card["windows"]["fingerprint"]
        assert all(store.verify(index) for index in range(len(store)))
        measured = score(load(name), shipped_windows(store, recipe), recipe)
    for now, then in zip(measured, card["windows"]["scores"], strict=True):
        assert (now["metric"], now["field"]) == (then["metric"], then["field"])
        assert now["value"] == pytest.approx(then["value"], rel=card["windows"]["tolerance"])
        assert now["yardstick"] == pytest.approx(then["yardstick"], rel=1e-6)


@pytest.mark.slow
def test_the_tolerance_sees_a_small_change_of_the_weights(name):
    """Weights rounded to the eight bits of bfloat16 are as good on average, and still no longer these weights."""
    folder, card = pretrained.folder(name), pretrained.card(name)
    recipe, forecaster = recipe_in(Run(folder)), load(name)
    with torch.no_grad():
        for parameter in forecaster.model.parameters():
            parameter.copy_(parameter.bfloat16())
    with open_store(folder / "windows.h5") as store:
        value = score(forecaster, shipped_windows(store, recipe), recipe)[0]["value"]
    assert value != pytest.approx(card["windows"]["scores"][0]["value"], rel=card["windows"]["tolerance"])


@pytest.mark.slow
def test_a_fresh_simulation_agrees_with_the_recorded_error(name, tmp_path):
    """Another seed than that of the training and of the windows; three standard errors of both means."""
    card, folder = pretrained.card(name), pretrained.folder(name)
    recipe = recipe_in(Run(folder))
    seed = 1 + max(card["windows"]["seed"], card["training"]["data_seed"])
    generate(first_frames(recipe), FRESH, seed, tmp_path / "fresh.h5")
    with open_store(tmp_path / "fresh.h5") as store:
        measured = score(load(name), unseen_windows(store, recipe), recipe)
    for now, test in zip(measured, card["test"]["scores"], strict=True):
        unsure = test["deviation"] * math.sqrt(1 / FRESH + 1 / card["test"]["windows"])
        assert abs(now["value"] - test["value"]) < 3 * unsure, (now, test)


@pytest.mark.slow
def test_the_windows_are_what_their_seed_gives(name):
    """To the rounding of float16: another machine rounds the simulation differently, and a flow amplifies that."""
    folder = pretrained.folder(name)
    recipe = recipe_in(Run(folder))
    with open_store(folder / "windows.h5") as store:
        header, kept = store.header, store[0].astype(np.float32)
        stride = header.parameters["space_stride"]
    made = first_frames(recipe).simulate(header.seed, [0])[0].numpy()[:: recipe.task.time_stride]
    for _ in range(made.ndim - 2):
        made = np.moveaxis(made[:, ::stride], 1, -2)
    assert kept.shape == made.shape and np.linalg.norm(kept - made) < 2**-11 * np.linalg.norm(made)


def test_cards_keep_the_limits_and_their_text_is_made_from_their_facts(name):
    folder, card = pretrained.folder(name), pretrained.card(name)
    assert (folder / "card.md").read_text() == card_text(card)
    assert Run(folder).digest == card["weights"]["digest"]
    assert (folder / "windows.h5").stat().st_size == card["windows"]["bytes"] <= LIMIT
    assert card["windows"]["seed"] == card["unseen"]["seed"] != card["training"]["data_seed"]
    tensors, facts = read_tensors(folder / "weights.safetensors")
    assert facts["data"] == card["training"]["fingerprint"]
    assert {str(one.dtype) for one in tensors.values()} == {f"torch.{card['weights']['dtype']}"}
    assert sum(one.numel() for one in tensors.values()) == card["parameters"]
    for row in card["test"]["scores"]:
        assert row["value"] == min(row["seeds"].values()) < row["yardstick"]


def test_all_pretrained_weights_together_are_small():
    assert sum(path.stat().st_size for path in Path(pretrained.__file__).parent.glob("*/*")) < 16_000_000


def test_a_name_a_path_both_or_neither(tmp_path, monkeypatch):
    shipped = pretrained.folder("darcy")
    monkeypatch.chdir(tmp_path)
    assert pretrained.resolve("darcy") == shipped and pretrained.is_pretrained(pretrained.resolve("darcy"))
    assert pretrained.resolve(Path("darcy")) == Path("darcy")
    assert pretrained.resolve("./darcy") == Path("darcy")
    (tmp_path / "darcy").mkdir()
    assert pretrained.resolve("darcy") == shipped, "a folder that is no run cannot be meant"
    (tmp_path / "darcy" / "recipe.json").write_text("{}")
    with pytest.raises(ValueError, match=r"write \./darcy for the folder"):
        sigmasolver.load("darcy")
    with pytest.raises(ValueError, match=r'no run folder "dracy" here, and no pretrained model.*darcy'):
        sigmasolver.load("dracy")
    with pytest.raises(ValueError, match='no pretrained model "kf"'):
        pretrained.folder("kf")
    with pytest.raises(AttributeError, match="has no attribute 'loda'"):
        _ = sigmasolver.loda


def test_load_is_lazy_and_public():
    code = "import sys, sigmasolver; assert 'sigmasolver.forecast' not in sys.modules; sigmasolver.load('darcy')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def two_windows(tmp_path, monkeypatch):
    """A model of the package with two of its windows, which is quicker."""
    source, home = pretrained.folder("darcy"), tmp_path / "models"
    shutil.copytree(source, home / "darcy", ignore=shutil.ignore_patterns("windows.h5"))
    with (
        open_store(source / "windows.h5") as store,
        Writer(home / "darcy" / "windows.h5", store.header, 2) as writer,
    ):
        writer.append(store[:2])
        monkeypatch.setattr(pretrained, "_HERE", home)
        yield torch.from_numpy(store[:2][..., 1:].astype(np.float32))


def test_forecast_needs_nothing_but_the_name(two_windows, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = call("forecast", "darcy", "--out", "p.npy", "--animation", "p.png")
    assert code == 0, err
    assert Path("p.png").read_bytes().startswith(b"\x89PNG") and out.splitlines()[-1] == "p.png"
    error = float(metrics.relative_l2(torch.from_numpy(np.load("p.npy")), two_windows).mean())
    rows = {line.split("  ")[1].strip(): line for line in out.splitlines() if line.startswith("  ")}
    assert f"{100 * error:.3g} %" in rows["transolver-sigma, 85 × 85"]
    assert "the truth" in rows["solver, 421 × 421"] and re.search(r"\d m?s\b", rows["solver, 85 × 85"])
    assert "paper 0.40 ± 0.01 %" in out
    for words, sentence in (
        (("forecast", "darcy", "--out", "p.npy"), "already exists"),
        (("forecast", "darcy", "--steps", "2"), "--steps requires --input"),
        (("forecast", "darcy", "--input", "p.npy"), "--out"),
        (("forecast", "darcy", "--input", "p.npy", "--out", "q.npy", "--animation", "a.png"), "omit --input"),
        (("forecast", "."), "Missing --input"),
    ):
        code, _, err = call(*words)
        assert code == 2 and sentence in err


def test_a_pretrained_model_forecasts_from_frames_of_the_user(call, tmp_path):
    with open_store(pretrained.folder("darcy") / "windows.h5") as store:
        given, truth = store[:2][..., :1].astype(np.float32), store[:2][..., 1:].astype(np.float32)
    np.save(tmp_path / "a.npy", given)
    code, _, err = call("forecast", "darcy", "--input", tmp_path / "a.npy", "--out", tmp_path / "u.npy")
    assert code == 0, err
    error = metrics.relative_l2(torch.from_numpy(np.load(tmp_path / "u.npy")), torch.from_numpy(truth))
    assert float(error.max()) < 0.01


def test_models_lists_the_pretrained_ones(capsys):
    models._print_pretrained()
    lines = capsys.readouterr().out.splitlines()
    for name in pretrained.names():
        value = pretrained.card(name)["test"]["scores"][0]["value"]
        assert any(line.split()[:1] == [name] and f"{100 * value:.3g}" in line for line in lines)


def test_a_folder_is_made_from_a_run_whose_data_it_refuses(tmp_path, monkeypatch):
    """The shipped folder, with records and a log, is itself a run from which a folder can be made."""
    source, card = pretrained.folder("darcy"), pretrained.card("darcy")
    run = Run(tmp_path / "run")
    run.path.mkdir()
    for file in ("recipe.json", "normaliser.json", "weights.safetensors"):
        (run.path / file).write_bytes((source / file).read_bytes())
    parts = {"train": list(range(1000)), "validation": [], "test": list(range(1000, 1200))}
    facts = {"fingerprint": card["training"]["fingerprint"], "frames": 1, "parts": parts}
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
    small = replace(simulator_of("darcy"), grid=85)  # cheap, and thinned to 17 × 17
    generate(small, 3, 7, tmp_path / "unseen.h5")
    message = "is not the output of simulate darcy: its parameter grid is 85, expected 421"
    with pytest.raises(ValueError, match=message):
        make_folder(run, tmp_path / "made", tmp_path / "unseen.h5", 2, 0)
    monkeypatch.setitem(SIMULATORS, "darcy", small)
    made = make_folder(run, tmp_path / "made", tmp_path / "unseen.h5", 2, 0)
    assert made == json.loads((tmp_path / "made" / "card.json").read_text())
    assert made["training"]["budget_share"] == 1
    assert made["test"]["scores"][0]["value"] == 0.004 and made["test"]["scores"][0]["paper"] == "0.40±0.01"
    # these weights are float16 already: storing them so changes nothing
    assert made["weights"]["dtype"] == "float16" and made["weights"]["changes"]["float16"]["deviation"] == 0
    assert made["weights"]["changes"]["bfloat16"]["deviation"] > 0
    with open_store(tmp_path / "unseen.h5") as full, open_store(tmp_path / "made" / "windows.h5") as kept:
        assert np.array_equal(kept[:], full[:2, :, ::5, ::5].astype(np.float16))
        assert kept.header.seed == 7 and kept.header.grid == (17, 17)
    grids, errors = zip(*((row["grid"], row["errors"]) for row in made["solver"]["rows"]), strict=True)
    assert grids[:2] == ([85, 85], [17, 17]) and errors[0] is None
    assert len(grids) == 2 or errors[2][0] <= made["windows"]["scores"][0]["value"] < errors[1][0]
    for seed, count, sentence in ((7, 2, "a seed that was not used for training"), (0, 9, "9 windows were requested")):
        with pytest.raises(ValueError, match=sentence):
            make_folder(run, tmp_path / "other", tmp_path / "unseen.h5", count, seed)
    with pytest.raises(ValueError, match="already exists"):
        make_folder(run, tmp_path / "made", tmp_path / "unseen.h5", 2, 0)
    assert len(read_rows(run.records)) == 3


@pytest.mark.slow
def test_the_wheel_holds_the_weights(tmp_path):
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = {str(path.relative_to(ROOT)) for path in Path(pretrained.__file__).parent.glob("*/*")}
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        assert files <= set(wheel.namelist())
        wheel.extractall(tmp_path / "site")
    code = "import sigmasolver, sigmasolver.pretrained as p; print(p.folder('darcy')); sigmasolver.load('darcy')"
    alone = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=alone)
    assert done.returncode == 0 and str(tmp_path / "site") in done.stdout, done.stderr
