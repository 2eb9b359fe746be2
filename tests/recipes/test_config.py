"""Configuration files of recipes: they round-trip exactly, and errors name the file."""

import json
from dataclasses import MISSING, fields, is_dataclass
from typing import get_args, get_type_hints

import numpy as np
import pytest

from sigmasolver.models import Options
from sigmasolver.recipes import (
    RECIPES,
    ModelRecipe,
    TrainRecipe,
    changed,
    config_text,
    read_config,
    recipe_of,
    suite_of,
)
from sigmasolver.tasks import Task

ALL = RECIPES | suite_of("main") | suite_of("factors")


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="recipe.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write_file


def test_config_round_trip_of_every_recipe(write):
    for name, recipe in ALL.items():
        assert read_config(write(config_text(recipe))) == recipe, name
        assert read_config(write(json.dumps(recipe.to_plain()), "recipe.json")) == recipe, name


def test_config_round_trip_of_quotes_and_unicode(write):
    recipe = changed(recipe_of("darcy"), ['task.name=a "b" \\\\ ü 𝛼 # c', "train.lr=1e-7"])
    assert read_config(write(config_text(recipe))) == recipe


def test_optional_settings_default_to_none():
    """TOML has no null, so the file omits such a setting."""
    for kind in (Task, ModelRecipe, TrainRecipe, Options):
        hints = get_type_hints(kind)
        for field in fields(kind):
            if type(None) in get_args(hints[field.name]):
                assert field.default is None and field.default_factory is MISSING, field.name
            assert is_dataclass(hints[field.name]) == (field.name == "options")


def test_read_config_fills_in_defaults(write):
    text = config_text(recipe_of("ns2d")).partition("[model]")[0]
    recipe = read_config(write(text))
    assert (recipe.task, recipe.model, recipe.train) == (RECIPES["ns2d"].task, ModelRecipe(), TrainRecipe())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("epochs = 500", "epocs = 500", 'train: unknown setting "epocs"; did you mean epochs'),
        ("[train]", "[trian]", 'Recipe: unknown setting "trian"; did you mean train'),
        ("width = 128", 'width = "wide"', "model.width must be an integer"),
        ("epochs = 500", "epochs =", "is not valid TOML: "),
        ("history = 1 ", "# ", "task: missing setting history; add it"),
        ("epochs = 500", "epochs = 0", "epochs is 0; it must be at least 1"),
        ("lr = 0.001", "lr = nan", "train.lr must be a finite number"),
    ],
)
def test_read_config_rejects_invalid_settings(write, old, new, message):
    text = config_text(recipe_of("darcy"))
    assert text.count(old) == 1
    with pytest.raises(ValueError) as caught:
        read_config(write(text.replace(old, new)))
    error = str(caught.value)
    assert message in error and "recipe.toml" in error and "\n" not in error and error.endswith((".", "?"))


def test_read_config_rejects_invalid_files(write, tmp_path):
    for text, name, message in (
        ("[1, 2", "a.json", "is not valid JSON"),
        ("[1, 2]", "a.json", "must be a table of settings"),
        ("[" * 100_000, "a.json", "a.json"),
        ("x = " + "[" * 5000, "a.toml", "a.toml"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            read_config(write(text, name))
        assert "\n" not in str(caught.value)
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    for path, message in ((tmp_path / "b.toml", "not UTF-8"), (tmp_path / "none.toml", "not found")):
        with pytest.raises(ValueError, match=message):
            read_config(path)


# --- at the command line


def test_print_config_round_trips_through_config_with_changes(call, write):
    code, printed, err = call("train", "kf2d", "--set", "model.options.padding=circular", "--seed", 7, "--print-config")
    assert code == 0, err
    file = write(printed)
    assert read_config(file) == changed(recipe_of("kf2d", seed=7), ["model.options.padding=circular"])
    assert call("train", "--config", file, "--print-config")[1] == printed
    _, modified, _ = call(
        "train", "--config", file, "--model", "fno", "--seed", 8, "--set", "train.epochs=2", "--print-config"
    )
    recipe = read_config(write(modified, "modified.toml"))
    assert (recipe.model.name, recipe.train.seed, recipe.train.epochs) == ("fno", 8, 2)
    assert recipe.model.options.padding == "circular"


def test_print_config_of_own_data_is_the_inferred_recipe(call, write, tmp_path):
    np.save(tmp_path / "waves.npy", np.random.default_rng(0).normal(size=(6, 8, 16, 16, 1)))
    arguments = ("train", "--data", tmp_path / "waves.npy", "--out", tmp_path / "run", "--set", "train.updates=2")
    code, printed, err = call(*arguments, "--print-config", "--device", "cpu")
    assert code == 0 and "fields: " in err
    recipe = read_config(write(printed))
    assert (recipe.task.grid, recipe.train.updates) == ((16, 16), 2)
    assert not (tmp_path / "run" / "recipe.json").exists()
    code, _, err = call(*arguments[:5], "--config", write(printed), "--device", "cpu")
    assert code == 0, err
    assert read_config(tmp_path / "run" / "recipe.json") == recipe


def test_config_with_unnamed_arrays_takes_fields_again(call, write, tmp_path):
    np.save(tmp_path / "waves.npy", np.random.default_rng(0).normal(size=(6, 8, 16, 16, 2)))
    arguments = ("train", "--data", tmp_path / "waves.npy", "--fields", "u,v", "--device", "cpu")
    code, printed, err = call(*arguments, "--out", tmp_path / "run", "--set", "train.updates=1", "--print-config")
    assert code == 0, err
    code, _, err = call(*arguments, "--config", write(printed), "--out", tmp_path / "named")
    assert code == 0, err
    assert read_config(tmp_path / "named" / "recipe.json").task.inputs == ("u", "v")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train", "kf2d", "--config", "FILE"), "The recipe is given twice"),
        (("train", "--config", "none.toml"), "none.toml not found"),
        (("train", "--config", "FILE", "--history", 4), "only to your own data"),
        (("train", "--resume", "x", "--config", "FILE"), "keeps its recipe"),
        (("train", "--resume", "x", "--print-config"), "keeps its recipe"),
        (("plan",), "Missing recipe"),
        (("settings", "kf3d"), "did you mean"),
        (("settings", "--simulator"), "Missing simulator name"),
        (("train", "kf2d", "--set", "padding=circular"), "did you mean model.options.padding?"),
    ],
)
def test_config_command_line_errors(call, write, arguments, message):
    file = write(config_text(recipe_of("kf2d")))
    code, _, err = call(*(file if argument == "FILE" else argument for argument in arguments))
    assert code == 2 and message in err and err.count("\n") == 1


def test_settings_command_lists_settings(call):
    code, out, _ = call("settings", "kf2d")
    lines = dict(line.split("\t", 1) for line in out.splitlines())
    assert code == 0 and lines["model.modes"].startswith("integer or integers\t8\tFourier modes")
    assert call("settings")[1].splitlines()[0].split("\t")[2] == "required"
    assert "viscosity\tnumber\t0.004\t" in call("settings", "demo", "--simulator")[1]
