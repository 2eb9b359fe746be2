"""Overrides of frozen dataclasses: every field type, and errors of one sentence."""

import json
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from sigmasolver.models import Options, SolverConfig
from sigmasolver.recipes import RECIPES, Recipe, changed, recipe_of
from sigmasolver.settings import REQUIRED, from_plain, list_settings, override, split_names, suggest, to_plain
from sigmasolver.simulate import SIMULATORS


@dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    name: str = "a"


@dataclass(frozen=True)
class Outer:
    count: int = 1
    wave: tuple[int, int] = (1, 1)
    modes: int | tuple[int, ...] = 4
    flag: bool = True
    limit: float | None = None
    names: tuple[str, ...] = ()
    ends: str | tuple[str, ...] | None = None
    inner: Inner = field(default_factory=Inner)


@dataclass(frozen=True)
class Renamed:
    ALIASES: ClassVar = {"speed": "rate", "core": "inner"}
    rate: float = 0.5
    inner: Inner = field(default_factory=Inner)


@pytest.mark.parametrize(
    ("assignment", "expected"),
    [
        ("count=3", Outer(count=3)),
        ("wave=(0, 8)", Outer(wave=(0, 8))),
        ("wave=[0,8]", Outer(wave=(0, 8))),
        ("modes=6", Outer(modes=6)),
        ("modes=(3,4,5)", Outer(modes=(3, 4, 5))),
        ("flag=false", Outer(flag=False)),
        ("limit=2", Outer(limit=2)),
        ("limit=none", Outer()),
        ("names=u", Outer(names=("u",))),
        ("names=u, v", Outer(names=("u", "v"))),
        ("names=('u','v')", Outer(names=("u", "v"))),
        ("names=[u,v]", Outer(names=("u", "v"))),
        ("ends=circular", Outer(ends="circular")),
        ("ends=circular,", Outer(ends=("circular",))),
        ("ends=circular,zeros", Outer(ends=("circular", "zeros"))),
        ("ends=none", Outer()),
        ("inner.rate=1e-4", Outer(inner=Inner(rate=1e-4))),
        ("inner.name=1e-4", Outer(inner=Inner(name="1e-4"))),
    ],
)
def test_override_parses_values_by_type(assignment, expected):
    assert override(Outer(), [assignment]) == expected


def test_override_takes_a_string_as_one_assignment():
    assert override(Outer(), "count=2") == override(Outer(), ["count=2"]) == Outer(2)
    assert recipe_of("kf2d").task.grid != (8, 8)
    assert changed(recipe_of("kf2d"), "task.grid=(8,8)").task.grid == (8, 8)
    epochs = changed(recipe_of("fsi"), "train.epochs=2").train
    assert (epochs.epochs, epochs.updates) == (2, None)


def test_split_names_at_commas():
    assert split_names("u, v,p ") == ("u", "v", "p") and split_names("u") == ("u",)


def test_override_converts_integers_to_floats():
    changed = override(SIMULATORS["ns2d"], ["viscosity=1", "scheme=euler"])
    assert isinstance(changed.viscosity, float) and changed.scheme == "euler"
    assert SIMULATORS["ns2d"].viscosity == 1e-5


def test_override_applies_all_settings_at_once():
    for order in (1, -1):
        changed = override(SIMULATORS["demo"], ["grid=32", "stored=16", "step=0.03125"][::order])
        assert (changed.grid, changed.stored, changed.step) == (32, 16, 0.03125)


def test_override_last_assignment_wins():
    assert override(Outer(), ["count=2", "count=3", "inner.rate=1", "inner.name=b"]) == Outer(3, inner=Inner(1.0, "b"))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("count", "write name=value"),
        ("=3", "write name=value"),
        ("cuont=3", "did you mean count"),
        ("count=1.5", "count must be an integer"),
        ("count=True", "count must be an integer"),
        ("count=__import__('os')", "count must be an integer"),
        ("wave=(1,2,3)", "wave must be a list of 2 values"),
        ("flag=1", "flag must be true or false"),
        ("limit=wide", "limit must be a finite number or none"),
        ("count.more=1", "without nested settings"),
        ("inner.rat=1", "did you mean rate"),
        ("rate=1", r'Unknown setting "rate"; did you mean inner.rate\?'),
        ("names=u,,v", "names must be a list of values, each a word"),
    ],
)
def test_override_errors(assignment, message):
    with pytest.raises(ValueError, match=message) as caught:
        override(Outer(), [assignment])
    assert "\n" not in str(caught.value) and str(caught.value).endswith((".", "?"))


@pytest.mark.parametrize(
    "value",
    [
        Outer(3, (0, 8), (1, 2, 3), False, 2.5, ("u",), ("a", "b"), Inner(0.25, "b")),
        SolverConfig((64, 64), 10, 1, modes=(4, 5), options=Options(padding=("zeros", "circular"))),
        *SIMULATORS.values(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_to_plain_round_trip_is_exact(value):
    assert from_plain(type(value), json.loads(json.dumps(to_plain(value)))) == value


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"cuont": 1}, 'Outer: unknown setting "cuont"; did you mean count'),
        ({"inner": {"rate": "fast"}}, "inner.rate must be a finite number"),
        ({"inner": {"speed": 1}}, 'inner: unknown setting "speed"'),
        ({"wave": [1]}, "wave must be a list of 2 values"),
        ({"count": True}, "count must be an integer"),
        ([1, 2], "must be a table of settings"),
        ({"inner": 3}, "inner must be a table of settings"),
    ],
)
def test_from_plain_errors(plain, message):
    with pytest.raises(ValueError, match=message):
        from_plain(Outer, plain)


def test_from_plain_reports_a_missing_setting():
    with pytest.raises(ValueError, match="missing setting grid"):
        from_plain(SolverConfig, {"in_channels": 1, "out_channels": 1})


def test_aliases_are_read_but_not_written():
    new = Renamed(2.0, Inner(name="b"))
    assert from_plain(Renamed, {"speed": 2, "core": {"name": "b"}}) == new
    assert override(Renamed(), ["speed=2", "core.name=b"]) == new
    assert set(to_plain(new)) == {"rate", "inner"}


def test_aliases_last_assignment_wins_and_duplicates_are_refused():
    assert override(Renamed(), ["speed=1", "rate=2", "speed=3"]).rate == 3
    assert override(Renamed(), ["rate=1", "speed=2", "rate=3"]).rate == 3
    with pytest.raises(ValueError, match="sets rate twice, also as speed; remove one"):
        from_plain(Renamed, {"rate": 1.0, "speed": 1.0})


def test_aliases_are_not_suggested():
    with pytest.raises(ValueError, match="rate") as caught:
        override(Renamed(), ["spede=1"])
    assert "speed" not in str(caught.value)


def test_suggest_lists_three_matches_or_all_names():
    names = [f"setting_{letter}" for letter in "abcdef"]
    assert suggest("setting", names).count("setting_") == 3
    assert suggest("q", names) == f"choose from {', '.join(names)}."
    assert suggest("q", [f"setting_{number}" for number in range(30)]).endswith("setting_5 and 24 more.")


@pytest.mark.parametrize("value", [*RECIPES.values(), *SIMULATORS.values()], ids=[*RECIPES, *SIMULATORS])
def test_list_settings_values_can_be_set_again(value):
    """Setting all listed values gives the same dataclass again."""
    listed = list_settings(value)
    assert override(value, [f"{setting.name}={setting.value}" for setting in listed]) == value
    assert all(setting.meaning.endswith(".") and setting.kind for setting in listed)


def test_list_settings_of_a_recipe_is_complete():
    plain = RECIPES["kf2d"].to_plain()
    options = plain["model"].pop("options")
    names = [f"{part}.{name}" for part, values in plain.items() for name in values]
    names += [f"model.options.{name}" for name in options]
    listed = {setting.name: setting for setting in list_settings(Recipe)}
    assert sorted(listed) == sorted(names)
    assert listed["task.grid"].value == REQUIRED and listed["train.lr"].value == "0.001"
    assert listed["model.options.padding"].kind == "word or words or none"


def test_list_settings_without_source_has_no_meaning():
    namespace: dict = {}
    exec("from dataclasses import dataclass\n@dataclass\nclass Typed:\n    count: int = 3\n", namespace)
    (setting,) = list_settings(namespace["Typed"]())
    assert (setting.name, setting.value, setting.meaning) == ("count", "3", "")
