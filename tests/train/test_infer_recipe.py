"""Recipes for data of one's own: whatever the data, what is chosen fits them, and every choice is told."""

from dataclasses import replace
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from sigmasolver.data.header import BOUNDARIES, Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.windows import Windows
from sigmasolver.models import build_solver
from sigmasolver.recipes import Recipe
from sigmasolver.train.infer_recipe import LARGE, UserChoices, infer_recipe
from sigmasolver.train.loop import StepPlan
from tests.data.memory import Memory

NAMES = ("u", "v", "velocity_x", "p")
CHOICES = UserChoices("mine")


def header(frames=20, grid=(32, 24), names=("u", "v"), boundary=None) -> Header:
    ends = ("open",) * len(grid) if boundary is None else boundary
    coordinates = tuple(np.arange(n, dtype=float) for n in grid)
    return Header(Layout(names, ("1",) * len(names), ends, coordinates, np.arange(frames, dtype=float)), "test", {})


def fits(recipe: Recipe, head: Header, count: int) -> None:
    """The recipe splits, cuts and builds, with room for its batch and for every part's horizon."""
    parts = recipe.split(count)
    members = (*parts.train, *parts.validation, *parts.test)
    assert sorted(members) == list(range(count))
    assert parts.train and parts.test and (parts.validation or len(parts.train) == 1)
    source = Memory(head, np.empty((count, 0)))
    training = Windows(source, parts.train, recipe.training_windows())
    assert training.grid == recipe.task.grid
    StepPlan(recipe, training)
    for part in filter(None, (parts.validation, parts.test)):
        assert len(Windows(source, part, recipe.evaluation_windows())) >= len(part)
    with torch.device("meta"):
        build_solver(recipe.model.name, recipe.model.config(recipe.task))
    assert Recipe.from_plain(recipe.to_plain()) == recipe


@settings(deadline=None, max_examples=80)
@given(data=st.data(), count=st.integers(2, 50), frames=st.integers(2, 60), gpu=st.booleans())
def test_what_is_chosen_fits_the_data_and_is_told(data, count, frames, gpu):
    axes = data.draw(st.integers(1, 3))
    grid = tuple(data.draw(st.lists(st.integers(2, 700 // 4**axes * 4), min_size=axes, max_size=axes)))
    ends = tuple(data.draw(st.lists(st.sampled_from(BOUNDARIES), min_size=axes, max_size=axes)))
    names = NAMES[: data.draw(st.integers(1, 4))]
    targets = data.draw(st.none() | st.lists(st.sampled_from(names), min_size=1, unique=True).map(tuple))
    history = data.draw(st.none() | st.integers(1, frames - 1))
    rest = frames - (history or max(1, min(10, frames // 4)))
    horizon = data.draw(st.none() | st.integers(1, rest))
    block = data.draw(st.none() | st.integers(1, horizon or rest))
    choices = replace(CHOICES, targets=targets, history=history, block=block, horizon=horizon)
    head = header(frames, grid, names, ends)
    recipe, notes = infer_recipe(head, count, choices, gpu)
    fits(recipe, head, count)
    task = recipe.task
    for wish, got in ((history, task.history), (horizon, task.horizon), (block, task.block), (targets, task.targets)):
        assert wish is None or wish == got
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
def test_one_frame_is_a_steady_task(count, grid):
    head = header(1, grid, ("a", "b", "p"))
    recipe, notes = infer_recipe(head, count, replace(CHOICES, targets=("p",)), False)
    fits(recipe, head, count)
    assert recipe.task.steady and recipe.task.inputs == ("a", "b") and recipe.task.targets == ("p",)
    assert notes[0] == "fields: p from a, b"


# --- thinning


@settings(deadline=None, max_examples=120)
@given(data=st.data())
def test_thinning_keeps_periodic_axes_periodic_and_stops_when_small_enough(data):
    axes = data.draw(st.integers(1, 3))
    sizes = st.integers(2, {1: 20_000, 2: 1500, 3: 400}[axes])
    head = header(
        4,
        tuple(data.draw(st.lists(sizes, min_size=axes, max_size=axes))),
        boundary=tuple(data.draw(st.lists(st.sampled_from(BOUNDARIES), min_size=axes, max_size=axes))),
    )
    recipe, notes = infer_recipe(head, 5, CHOICES, True)
    stride, grid = recipe.task.space_stride, recipe.task.grid
    Windows(Memory(head, np.empty((5, 0))), (0,), recipe.training_windows())  # refuses a torn period
    assert grid == tuple(-(-n // stride) for n in head.grid) and (stride == 1 or min(grid) >= 16)
    ends = zip(head.grid, head.layout.boundary, strict=True)
    periods = [n for n, end in ends if end == "periodic"]
    coarser = [s for s in range(1, stride) if not any(n % s for n in periods)]
    assert all(prod(-(-n // s) for n in head.grid) > LARGE[axes] for s in coarser), "no finer grid would have done"
    told = next(note for note in notes if note.startswith("grid"))
    assert ("as stored" in told) == (stride == 1) and (stride == 1 or f"stride {stride} along" in told)


@pytest.mark.parametrize(
    ("grid", "ends", "stride"),
    [
        ((512, 512), "periodic", 2),
        ((421, 421), "wall", 2),
        ((300, 450), "periodic", 2),
        ((6561, 6561), "periodic", 27),
        ((128, 128, 128), "periodic", 2),
        ((257, 263), "periodic", 1),  # primes: nothing divides both
        ((5003,), "periodic", 1),
        ((8, 4000, 4000), "open", 1),  # the short axis has no point to spare
    ],
)
def test_thinning_by_example(grid, ends, stride):
    recipe, _ = infer_recipe(header(5, grid, boundary=(ends,) * len(grid)), 4, CHOICES, True)
    assert recipe.task.space_stride == stride


def test_padding_follows_the_boundary():
    recipe, _ = infer_recipe(header(5, (32, 16, 16), boundary=("periodic", "wall", "open")), 4, CHOICES, True)
    assert recipe.model.options.padding == ("circular", "zeros", "zeros")


def test_a_given_field_comes_behind_the_targets():
    recipe, _ = infer_recipe(header(names=("a", "u", "b")), 4, replace(CHOICES, targets=("u",)), False)
    assert recipe.task.inputs == ("u", "a", "b") and recipe.task.targets == ("u",)


def test_named_fields_leave_the_others_out():
    choices = replace(CHOICES, fields=("b", "u"), targets=("u",))
    recipe, _ = infer_recipe(header(names=("a", "u", "b")), 4, choices, False)
    assert recipe.task.inputs == ("u", "b")


def test_a_gpu_gets_the_papers_size_and_both_get_the_seed():
    small, large = (infer_recipe(header(), 9, replace(CHOICES, seed=5), gpu)[0] for gpu in (False, True))
    assert (large.model.width, large.model.depth, large.model.slices) == (128, 8, 32)
    assert small.model.width < large.model.width and small.train.seed == large.train.seed == 5
    assert (small.train.precision, large.train.precision) == ("float32", "tf32")


# --- mistakes


@pytest.mark.parametrize(
    ("head", "count", "choices", "says"),
    [
        (header(), 1, {}, "there is only one; split"),
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
def test_mistakes_are_one_sentence(head, count, choices, says):
    with pytest.raises(ValueError, match=says) as caught:
        infer_recipe(head, count, replace(CHOICES, **choices), False)
    assert "\n" not in str(caught.value) and str(caught.value).endswith((".", "?"))


def test_an_axis_of_one_point_is_refused_when_the_model_is_built():
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
def test_any_wish_is_met_or_refused_in_one_sentence(frames, history, block, horizon):
    head, choices = header(frames), replace(CHOICES, targets=("u",), history=history, block=block, horizon=horizon)
    try:
        recipe, _ = infer_recipe(head, 6, choices, False)
    except ValueError as error:
        assert "\n" not in str(error) and str(error).endswith((".", "?"))
    else:
        fits(recipe, head, 6)
        assume(not recipe.task.steady)
        got = (recipe.task.history, recipe.task.block, recipe.task.horizon)
        assert all(wish in (None, value) for wish, value in zip((history, block, horizon), got, strict=True))
