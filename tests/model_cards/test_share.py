"""`save_pretrained`: the content of the published folder, which forecasts like the run."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

import sigmasolver
from sigmasolver import api
from sigmasolver.model_cards import share
from sigmasolver.model_cards.share import save_pretrained
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.runs import Run, read_rows
from sigmasolver.simulate.generate import generate
from sigmasolver.tasks import Task
from sigmasolver.train.job import train_run
from tests.data.waves import Waves

BOTH = ("height", "slope")
TASK = Task("waves", BOTH, BOTH, (12, 12), 2, 1, 3, 3, 1, "channel")
RECIPE = Recipe(
    TASK, ModelRecipe(width=16, depth=1, heads=2, slices=4, modes=3), TrainRecipe(updates=5, batch=4, checks=0)
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("share")
    generate(Waves(frames=7), 4, 0, folder / "secret-place.h5")
    return api.train_model(RECIPE, folder / "secret-place.h5", folder / "run")


def test_save_pretrained_folder_forecasts_like_the_run(run, tmp_path):
    folder = save_pretrained(run, tmp_path / "mine")
    original, published = sigmasolver.load(run.path), sigmasolver.load(folder)
    history = torch.randn(2, 2, 12, 12, 2)
    assert torch.equal(original.rollout(history, 4).frames, published.rollout(history, 4).frames)
    weights = load_file(folder / "model.safetensors")  # as other programs read it
    assert {name: tensor.shape for name, tensor in weights.items()} == {
        name: tensor.shape for name, tensor in original.model.state_dict().items()
    }
    config = json.loads((folder / "config.json").read_text())
    assert config["parameters"] == sum(tensor.numel() for tensor in original.model.parameters())
    assert (config["library_name"], config["model_type"], config["width"]) == ("sigmasolver", "transolver-sigma", 16)
    assert Run(folder).digest == run.digest and Run(folder).finished


@pytest.mark.parametrize("separate", [False, True])
def test_save_pretrained_does_not_leak_the_data_path(run, tmp_path, separate):
    if separate:
        data, run = run.path.parent, Run(run.path.parent / "separate")
        generate(Waves(frames=7), 2, 9, data / "test.h5")
        train_run(replace(RECIPE, task=replace(TASK, test=0)), data / "secret-place.h5", run, test=data / "test.h5")
    folder = save_pretrained(run, tmp_path / "mine")
    for path in folder.iterdir():
        assert str(run.path.parent).encode() not in path.read_bytes(), path.name
    test = Run(folder).read_json("data.json").get("test")
    assert test["path"] == "test.h5" if separate else test is None


def test_save_pretrained_card_has_errors_of_model_and_baseline(run, tmp_path):
    assert "Not measured yet" in (save_pretrained(run, tmp_path / "before") / "README.md").read_text()
    records = api.evaluate_run(run)
    text = (save_pretrained(run, tmp_path / "after") / "README.md").read_text()
    assert text.startswith("---\nlibrary_name: sigmasolver\n") and "Not measured" not in text
    (own, persistence) = (
        next(
            row["value"]
            for row in records
            if row["model"] == name
            and row["metric"] == "relative_l2"
            and row["lead"] is None
            and row["field"] == "slope"
        )
        for name in ("transolver-sigma", "persistence")
    )
    line = next(line for line in text.splitlines() if line.startswith("| slope |"))
    printed = [float(cell.split()[0]) for cell in line.strip("| ").split(" | ")[2:]]
    assert printed == pytest.approx([100 * own, 100 * persistence], rel=5e-3)
    assert len(read_rows(run.records)) == len(records)


def test_save_pretrained_card_leaves_averages_over_symmetries_out(run, tmp_path):
    records = [row for row in api.evaluate_run(run) if row["metric"] == "relative_l2"]
    averaged = [{**row, "symmetries": 4, "value": 0.1234} for row in records]
    table = share._error_table([*records, *averaged])
    assert table == share._error_table(records) and not any("12.3" in line for line in table)


def test_evaluate_published_folder_requires_data(run, tmp_path, call):
    folder = save_pretrained(run, tmp_path / "mine")
    generate(Waves(frames=7), 2, 9, tmp_path / "other.h5")
    code, out, err = call("evaluate", folder, "--data", tmp_path / "other.h5")
    assert code == 0 and "persistence" in out, err
    code, _, err = call("evaluate", folder)
    assert code == 2 and "pass its new path with --data" in err


def test_save_pretrained_errors_are_one_sentence(run, tmp_path, call):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    for folder, message in ((tmp_path / "full", "is not empty"), (tmp_path / "full" / "file", "already exists")):
        with pytest.raises(ValueError, match=message):
            save_pretrained(run, folder)
    code, _, err = call("save-pretrained", tmp_path / "nowhere", "--out", tmp_path / "new")
    assert code == 2 and "is not a run" in err and not (tmp_path / "new").exists()
    code, out, _ = call("save-pretrained", run.path, "--out", tmp_path / "new")
    assert code == 0 and "README.md" in out
