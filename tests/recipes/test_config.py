"""Recipes as files that people write: what is printed is read back, a mistake is one sentence with the file's name."""

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
def kept(tmp_path):
    def keep(text, name="recipe.toml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return keep


def test_every_recipe_survives_toml_and_json(kept):
    for name, recipe in ALL.items():
        assert read_config(kept(config_text(recipe))) == recipe, name
        assert read_config(kept(json.dumps(recipe.to_plain()), "recipe.json")) == recipe, name


def test_names_with_quotes_and_other_letters_survive(kept):
    recipe = changed(recipe_of("darcy"), ['task.name=a "b" \\\\ ü 𝛼 # c', "train.lr=1e-7"])
    assert read_config(kept(config_text(recipe))) == recipe


def test_none_is_the_default_of_whatever_can_be_none():
    """TOML has no none, so the file leaves such a setting out."""
    for kind in (Task, ModelRecipe, TrainRecipe, Options):
        hints = get_type_hints(kind)
        for field in fields(kind):
            if type(None) in get_args(hints[field.name]):
                assert field.default is None and field.default_factory is MISSING, field.name
            assert is_dataclass(hints[field.name]) == (field.name == "options")


def test_what_a_file_leaves_out_has_its_default(kept):
    text = config_text(recipe_of("ns2d")).partition("[model]")[0]
    recipe = read_config(kept(text))
    assert (recipe.task, recipe.model, recipe.train) == (RECIPES["ns2d"].task, ModelRecipe(), TrainRecipe())


@pytest.mark.parametrize(
    ("old", "new", "says"),
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
def test_mistakes_are_one_sentence(kept, old, new, says):
    text = config_text(recipe_of("darcy"))
    assert text.count(old) == 1
    with pytest.raises(ValueError) as caught:
        read_config(kept(text.replace(old, new)))
    said = str(caught.value)
    assert says in said and "recipe.toml" in said and "\n" not in said and said.endswith((".", "?"))


def test_files_that_are_no_recipe(kept, tmp_path):
    for text, name, says in (
        ("[1, 2", "a.json", "is not valid JSON"),
        ("[1, 2]", "a.json", "must be a table of settings"),
        ("[" * 100_000, "a.json", "a.json"),
        ("x = " + "[" * 5000, "a.toml", "a.toml"),
    ):
        with pytest.raises(ValueError, match=says) as caught:
            read_config(kept(text, name))
        assert "\n" not in str(caught.value)
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe")
    for path, says in ((tmp_path / "b.toml", "not UTF-8"), (tmp_path / "none.toml", "not found")):
        with pytest.raises(ValueError, match=says):
            read_config(path)


# --- at the command line


def test_print_config_is_read_by_config_with_what_was_set(call, kept):
    code, printed, err = call("train", "kf2d", "--set", "model.options.padding=circular", "--seed", 7, "--print-config")
    assert code == 0, err
    file = kept(printed)
    assert read_config(file) == changed(recipe_of("kf2d", seed=7), ["model.options.padding=circular"])
    assert call("train", "--config", file, "--print-config")[1] == printed
    _, again, _ = call(
        "train", "--config", file, "--model", "fno", "--seed", 8, "--set", "train.epochs=2", "--print-config"
    )
    recipe = read_config(kept(again, "again.toml"))
    assert (recipe.model.name, recipe.train.seed, recipe.train.epochs) == ("fno", 8, 2)
    assert recipe.model.options.padding == "circular"


def test_own_data_print_what_was_inferred(call, kept, tmp_path):
    np.save(tmp_path / "waves.npy", np.random.default_rng(0).normal(size=(6, 8, 16, 16, 1)))
    words = ("train", "--data", tmp_path / "waves.npy", "--out", tmp_path / "run", "--set", "train.updates=2")
    code, printed, err = call(*words, "--print-config", "--device", "cpu")
    assert code == 0 and "fields: " in err
    recipe = read_config(kept(printed))
    assert (recipe.task.grid, recipe.train.updates) == ((16, 16), 2)
    assert not (tmp_path / "run" / "recipe.json").exists()
    code, _, err = call(*words[:5], "--config", kept(printed), "--device", "cpu")
    assert code == 0, err
    assert read_config(tmp_path / "run" / "recipe.json") == recipe


def test_arrays_without_names_get_them_again(call, kept, tmp_path):
    np.save(tmp_path / "waves.npy", np.random.default_rng(0).normal(size=(6, 8, 16, 16, 2)))
    words = ("train", "--data", tmp_path / "waves.npy", "--fields", "u,v", "--device", "cpu")
    code, printed, err = call(*words, "--out", tmp_path / "run", "--set", "train.updates=1", "--print-config")
    assert code == 0, err
    code, _, err = call(*words, "--config", kept(printed), "--out", tmp_path / "again")
    assert code == 0, err
    assert read_config(tmp_path / "again" / "recipe.json").task.inputs == ("u", "v")


@pytest.mark.parametrize(
    ("words", "says"),
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
def test_command_line_mistakes(call, kept, words, says):
    file = kept(config_text(recipe_of("kf2d")))
    code, _, err = call(*(file if word == "FILE" else word for word in words))
    assert code == 2 and says in err and err.count("\n") == 1


def test_the_settings_are_listed(call):
    code, out, _ = call("settings", "kf2d")
    lines = dict(line.split("\t", 1) for line in out.splitlines())
    assert code == 0 and lines["model.modes"].startswith("integer or integers\t8\tFourier modes")
    assert call("settings")[1].splitlines()[0].split("\t")[2] == "required"
    assert "viscosity\tnumber\t0.004\t" in call("settings", "demo", "--simulator")[1]
