"""Recipes inferred for a user's own data: they fit any data, and the notes describe every choice."""

from dataclasses import replace
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sigmasolver.data.header import BOUNDARIES, Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.split import Split
from sigmasolver.data.store import open_store, write_store
from sigmasolver.data.windows import Windows
from sigmasolver.models import build_solver
from sigmasolver.recipes import Recipe
from sigmasolver.train.infer_recipe import LARGE, UserChoices, infer_from_data, infer_recipe
from sigmasolver.train.loop import StepPlan
from tests.data.memory import Memory

NAMES = ("u", "v", "velocity_x", "p")
CHOICES = UserChoices("mine")


def header(frames=20, grid=(32, 24), names=("u", "v"), boundary=None) -> Header:
    boundaries = ("open",) * len(grid) if boundary is None else boundary
    coordinates = tuple(np.arange(n, dtype=float) for n in grid)
    return Header(
        Layout(names, ("1",) * len(names), boundaries, coordinates, np.arange(frames, dtype=float)), "test", {}
    )


def check_fits(recipe: Recipe, head: Header, count: int) -> None:
    """Check that split, windows and model of the recipe are valid for data of this size."""
    parts = recipe.split(count)
    members = (*parts.train, *parts.validation, *parts.test)
    assert sorted(members) == list(range(count))
    assert parts.train and parts.test and (parts.validation or len(parts.train) == 1)
    source = Memory(head, np.empty((count, 0)))
    training = Windows(source, parts.train, recipe.training_window_spec())
    assert training.grid == recipe.task.grid
    StepPlan(recipe, training)
    for part in filter(None, (parts.validation, parts.test)):
        assert len(Windows(source, part, recipe.evaluation_window_spec())) >= len(part)
    with torch.device("meta"):
        build_solver(recipe.model.name, recipe.model.config(recipe.task))
    assert Recipe.from_plain(recipe.to_plain()) == recipe


@settings(deadline=None, max_examples=80)
@given(data=st.data(), count=st.integers(2, 50), frames=st.integers(2, 60), gpu=st.booleans())
def test_infer_recipe_fits_the_data_and_describes_every_choice(data, count, frames, gpu):
    axes = data.draw(st.integers(1, 3))
    grid = tuple(data.draw(st.lists(st.integers(2, 700 // 4**axes * 4), min_size=axes, max_size=axes)))
    boundaries = tuple(data.draw(st.lists(st.sampled_from(BOUNDARIES), min_size=axes, max_size=axes)))
    names = NAMES[: data.draw(st.integers(1, 4))]
    targets = data.draw(st.none() | st.lists(st.sampled_from(names), min_size=1, unique=True).map(tuple))
    history = data.draw(st.none() | st.integers(1, frames - 1))
    remaining = frames - (history or max(1, min(10, frames // 4)))
    horizon = data.draw(st.none() | st.integers(1, remaining))
    block = data.draw(st.none() | st.integers(1, horizon or remaining))
    choices = replace(CHOICES, targets=targets, history=history, block=block, horizon=horizon)
    head = header(frames, grid, names, boundaries)
    recipe, notes = infer_recipe(head, count, choices, gpu)
    check_fits(recipe, head, count)
    task = recipe.task
    for requested, got in (
        (history, task.history),
        (horizon, task.horizon),
        (block, task.block),
        (targets, task.targets),
    ):
        assert requested is None or requested == got
    assert set(task.inputs) == set(names) and task.inputs[: len(task.targets)] == task.targets
    text = " | ".join(notes)
    assert f"{task.history} given, {task.block} predicted per call, {task.horizon} evaluated" in text
    assert all(name in notes[0] for name in names) and " × ".join(map(str, task.grid)) in text
    assert f"the first {task.train} trajectories for training, the last {task.test} for testing" in text
    assert f"width {recipe.model.width}, depth {recipe.model.depth}" in text and f"{recipe.model.modes} modes" in text
    assert f"{recipe.train.updates:,} steps of {recipe.train.batch} windows in {recipe.train.precision}" in text
    assert ", ".join(recipe.model.options.padding) in text and all("\n" not in note for note in notes)


@settings(deadline=None, max_examples=60)
@given(count=st.integers(2, 50), grid=st.lists(st.integers(2, 40), min_size=1, max_size=3).map(tuple))
def test_infer_recipe_of_one_frame_is_a_steady_task(count, grid):
    head = header(1, grid, ("a", "b", "p"))
    recipe, notes = infer_recipe(head, count, replace(CHOICES, targets=("p",)), False)
    check_fits(recipe, head, count)
    assert recipe.task.steady and recipe.task.inputs == ("a", "b") and recipe.task.targets == ("p",)
    assert notes[0] == "fields: p from a, b"


# --- subsampling


@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_space_stride_keeps_periodic_axes_periodic_and_is_minimal(data):
    axes = data.draw(st.integers(1, 3))
    sizes = st.integers(2, {1: 20_000, 2: 1500, 3: 400}[axes])
    head = header(
        4,
        tuple(data.draw(st.lists(sizes, min_size=axes, max_size=axes))),
        boundary=tuple(data.draw(st.lists(st.sampled_from(BOUNDARIES), min_size=axes, max_size=axes))),
    )
    recipe, notes = infer_recipe(head, 5, CHOICES, True)
    stride, grid = recipe.task.space_stride, recipe.task.grid
    Windows(
        Memory(head, np.empty((5, 0))), (0,), recipe.training_window_spec()
    )  # raises if a stride does not divide a period
    assert grid == tuple(-(-n // stride) for n in head.grid) and (stride == 1 or min(grid) >= 16)
    boundaries = zip(head.grid, head.layout.boundary, strict=True)
    periods = [n for n, boundary in boundaries if boundary == "periodic"]
    coarser = [s for s in range(1, stride) if not any(n % s for n in periods)]
    assert all(prod(-(-n // s) for n in head.grid) > LARGE[axes] for s in coarser), (
        "a finer grid would have been small enough"
    )
    grid_note = next(note for note in notes if note.startswith("grid"))
    assert ("as stored" in grid_note) == (stride == 1) and (stride == 1 or f"stride {stride} along" in grid_note)


@pytest.mark.parametrize(
    ("grid", "ends", "stride"),
    [
        ((512, 512), "periodic", 2),
        ((421, 421), "wall", 2),
        ((300, 450), "periodic", 2),
        ((6561, 6561), "periodic", 27),
        ((128, 128, 128), "periodic", 2),
        ((257, 263), "periodic", 1),  # primes: no common divisor
        ((5003,), "periodic", 1),
        ((8, 4000, 4000), "open", 1),  # the short axis cannot lose a point
    ],
)
def test_space_stride_examples(grid, ends, stride):
    recipe, _ = infer_recipe(header(5, grid, boundary=(ends,) * len(grid)), 4, CHOICES, True)
    assert recipe.task.space_stride == stride


def test_padding_follows_the_boundary():
    recipe, _ = infer_recipe(header(5, (32, 16, 16), boundary=("periodic", "wall", "open")), 4, CHOICES, True)
    assert recipe.model.options.padding == ("circular", "zeros", "zeros")


def test_inputs_list_the_targets_first():
    recipe, _ = infer_recipe(header(names=("a", "u", "b")), 4, replace(CHOICES, targets=("u",)), False)
    assert recipe.task.inputs == ("u", "a", "b") and recipe.task.targets == ("u",)


def test_fields_option_excludes_other_fields():
    choices = replace(CHOICES, fields=("b", "u"), targets=("u",))
    recipe, _ = infer_recipe(header(names=("a", "u", "b")), 4, choices, False)
    assert recipe.task.inputs == ("u", "b")


def test_model_size_is_the_papers_on_a_gpu_and_the_seed_is_kept():
    small, large = (infer_recipe(header(), 9, replace(CHOICES, seed=5), gpu)[0] for gpu in (False, True))
    assert (large.model.width, large.model.depth, large.model.slices) == (128, 8, 32)
    assert small.model.width < large.model.width and small.train.seed == large.train.seed == 5
    assert (small.train.precision, large.train.precision) == ("float32", "tf32")


# --- mistakes


@pytest.mark.parametrize(
    ("head", "count", "choices", "message"),
    [
        (header(), 1, {}, "there is only one; split"),
        (header(1), 1, {"targets": ("v",)}, "need at least two cases, but there is only one; add some"),
        (header(), 0, {}, "there are none yet"),
        (header(), 4, {"fields": ("w",)}, 'Unknown field "w"; choose from u, v'),
        (header(), 4, {"targets": ("velocity",)}, "did you mean|choose from"),
        (header(), 4, {"history": 20}, "leaves no frames to forecast out of 20"),
        (header(), 4, {"history": 0}, "history of mine is 0; it must be at least 1"),
        (header(), 4, {"block": 0}, "block of mine is 0; it must be at least 1"),
        (header(), 4, {"horizon": 0}, "horizon of mine is 0; it must be at least 1"),
        (header(), 4, {"history": -3}, "at least 1"),
        (header(), 4, {"history": 5, "horizon": 16}, "need 21 frames, but a trajectory has 20"),
        (header(), 4, {"block": 4, "horizon": 3}, "block of mine is 4; it must not exceed the horizon of 3"),
        (header(), 4, {"history": 5, "block": 16}, "a trajectory has 20"),
        (header(1), 4, {}, "set them with --targets"),
        (header(1), 4, {"targets": ("u", "v")}, "set them with --targets"),
        (header(1), 4, {"targets": ("v",), "history": 2}, "omit --history"),
    ],
)
def test_infer_recipe_rejects_invalid_choices(head, count, choices, message):
    with pytest.raises(ValueError, match=message) as caught:
        infer_recipe(head, count, replace(CHOICES, **choices), False)
    assert "\n" not in str(caught.value) and str(caught.value).endswith((".", "?"))


def test_axis_of_one_point_is_rejected_when_the_model_is_built():
    recipe, _ = infer_recipe(header(5, (16, 1)), 4, CHOICES, False)
    with pytest.raises(ValueError, match="axis 1 has 1 point"):
        recipe.model.config(recipe.task)


@settings(deadline=None, max_examples=100)
@given(
    frames=st.integers(1, 12),
    history=st.none() | st.integers(-2, 14),
    block=st.none() | st.integers(-2, 14),
    horizon=st.none() | st.integers(-2, 14),
)
def test_any_history_block_and_horizon_is_used_or_rejected(frames, history, block, horizon):
    head, choices = header(frames), replace(CHOICES, targets=("u",), history=history, block=block, horizon=horizon)
    try:
        recipe, _ = infer_recipe(head, 6, choices, False)
    except ValueError as error:
        assert "\n" not in str(error) and str(error).endswith((".", "?"))
    else:
        check_fits(recipe, head, 6)
        assume(not recipe.task.steady)
        got = (recipe.task.history, recipe.task.block, recipe.task.horizon)
        assert all(requested in (None, value) for requested, value in zip((history, block, horizon), got, strict=True))


@pytest.mark.parametrize(
    ("choices", "split", "message"),
    [
        ({"steady": True}, None, "flow.h5 has 20 frames and is not steady; omit --steady"),
        ({"test": 2}, Split((0, 1), (2,), (3,)), "flow.h5 defines its own test split; omit --test"),
    ],
)
def test_infer_from_data_refuses_choices_that_contradict_the_data(choices, split, message):
    data = SimpleNamespace(path="flow.h5", header=header(), published_split=split)
    with pytest.raises(ValueError, match=message):
        infer_from_data(data, replace(CHOICES, **choices), False)


def test_infer_from_data_detects_constant_fields_unless_targets_are_named(tmp_path):
    values = np.random.default_rng(0).standard_normal((4, 20, 32, 24, 2)).astype(np.float32)
    values[..., 1] = values[:, :1, ..., 1]
    write_store(tmp_path / "flow.h5", header(), values)
    with open_store(tmp_path / "flow.h5") as data:
        detected, named = (infer_from_data(data, replace(CHOICES, targets=t), False) for t in (None, ("v",)))
    assert (detected.task.targets, named.task.targets) == (("u",), ("v",))
