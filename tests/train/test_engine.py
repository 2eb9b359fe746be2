"""Engines and data paths change the speed, never what is learned."""

from dataclasses import replace

import pytest
import torch

from sigmasolver.data.generate import generate
from sigmasolver.data.normalise import fit
from sigmasolver.data.prefetch import prefetch
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows
from sigmasolver.models import Options
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.parallel import World
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.tasks import Task
from sigmasolver.train.capture import WARM_UP
from sigmasolver.train.engine import ENGINES, Place, Stepper
from sigmasolver.train.loop import Plan
from sigmasolver.train.rehearsal import Rehearsal
from sigmasolver.trained import build

FLOW = replace(DEMO, grid=32, stored=16, step=1 / 64, burn_in=1.0, frames=8)
TASK = Task("tiny", ("vorticity",), ("vorticity",), (16, 16), 2, 1, 3, 6, 2, "channel")
MODEL = ModelRecipe(width=16, depth=1, heads=2, slices=4, modes=3)
RECIPE = Recipe(TASK, MODEL, TrainRecipe(updates=12, batch=4, seed=3, clip=1.0))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "flow.h5"
    generate(FLOW, 8, 0, path)
    return path


def losses(path, recipe=RECIPE, place=None, resident=True):
    place = Place() if place is None else place
    device = place.world.device
    with open_store(path) as store:
        windows = Windows(store, range(6), recipe.training_windows())
        forecaster = build(recipe, *fit("channel", windows)).to(device)
        windows = windows.resident(device) if resident else windows
        plan = Plan(recipe, windows)
        stepper = Stepper(recipe, forecaster, windows, plan.members, plan.rates(), place)
        found = []
        for step in range(plan.steps):
            stepper.run(step)
            found.append(stepper.loss.clone())
    return torch.stack(found).cpu(), {name: t.cpu() for name, t in stepper.kept.state_dict().items()}


def test_windows_read_ahead_train_like_resident_ones(data):
    held, read = (losses(data, resident=resident) for resident in (True, False))
    assert torch.equal(held[0], read[0])
    assert all(torch.equal(held[1][name], read[1][name]) for name in held[1])


def test_prefetched_batches_come_in_order_and_stop_when_nobody_wants_them(data):
    with open_store(data) as store:
        windows = Windows(store, range(6), RECIPE.training_windows())
        batches = [torch.tensor([k, 3 * k]) for k in range(6)]
        for indices, (history, future) in zip(batches, prefetch(windows, batches, "cpu"), strict=True):
            expected = windows.batch(indices)
            assert torch.equal(history, expected[0]) and torch.equal(future, expected[1])
        endless = prefetch(windows, iter(lambda: torch.tensor([1]), None), "cpu")
        next(endless)
        endless.close()
        with pytest.raises(IndexError, match="There is no window 999"):
            list(prefetch(windows, [torch.tensor([999])], "cpu"))


def test_the_optimiser_is_adamw_by_hand(data):
    """Three steps of AdamW written out in float64 from the same gradients."""
    recipe = replace(RECIPE, train=replace(RECIPE.train, updates=3, clip=None, weight_decay=0.1, peak=1e-2))
    with open_store(data) as store:
        windows = Windows(store, range(6), recipe.training_windows()).resident("cpu")
        forecaster = build(recipe, *fit("channel", windows))
        plan = Plan(recipe, windows)
        rates = plan.rates()
        stepper = Stepper(recipe, forecaster, windows, plan.members, rates, Place())
        parameter = forecaster.model.readout.weight
        w, m, v = (
            parameter.detach().double(),
            torch.zeros_like(parameter).double(),
            torch.zeros_like(parameter).double(),
        )
        for step in range(3):
            stepper.run(step)
            g, rate = parameter.grad.double(), float(rates[step])
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            unbiased = (m / (1 - 0.9 ** (step + 1))) / ((v / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
            w = w * (1 - rate * 0.1) - rate * unbiased
            torch.testing.assert_close(parameter.detach().double(), w, rtol=1e-5, atol=1e-8)


def test_fields_that_are_given_train_too(data):
    """A constant second field: with its weights in the lift at zero the losses are those without it."""
    from tests.data.memory import Memory

    with open_store(data) as store:
        frames = torch.stack([torch.from_numpy(store[k]) for k in range(8)])
        layout = store.header.layout
        both = replace(store.header, layout=replace(layout, fields=("vorticity", "reynolds"), units=("1/s", "1")))
    values = torch.cat((frames, torch.full_like(frames, 250.0)), dim=-1)
    task = replace(TASK, inputs=("vorticity", "reynolds"))
    for objective in ("direct", "teacher_forced", "pushforward"):
        recipe = replace(RECIPE, task=task, train=replace(RECIPE.train, objective=objective, calls=2, updates=2))
        windows = Windows(Memory(both, values), range(6), recipe.training_windows()).resident("cpu")
        forecaster = build(recipe, *fit("channel", windows))
        plan = Plan(recipe, windows)
        stepper = Stepper(recipe, forecaster, windows, plan.members, plan.rates(), Place())
        stepper.run(0)
        assert forecaster.inputs.constant == ("reynolds",) and torch.isfinite(stepper.loss)


@pytest.mark.parametrize("engine", ["graph", "compiled-graph"])
def test_a_graph_needs_a_gpu(engine):
    with pytest.raises(ValueError, match="needs a GPU"):
        Place(engine=engine)


def test_mistakes_are_one_sentence(data):
    with pytest.raises(ValueError, match="There is no engine"):
        Place(engine="fast")
    with pytest.raises(ValueError, match="nothing to share"):
        Place(shard=True)
    with pytest.raises(ValueError, match="cannot be shared evenly by 3 processes"):
        losses(data, place=Place(World(0, 3)))


def test_the_precision_of_products_is_set_inside_and_restored():
    before = torch.backends.cuda.matmul.allow_tf32
    for precision, inside in (("tf32", True), ("float32", False), ("bf16", True)):
        with matmul_precision(precision):
            assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == inside
        assert torch.backends.cuda.matmul.allow_tf32 == before


def test_bf16_stays_near_float32(data):
    full, _ = losses(data)
    half, _ = losses(data, replace(RECIPE, train=replace(RECIPE.train, precision="bf16")))
    torch.testing.assert_close(half, full, rtol=0.03, atol=0)


@pytest.mark.slow
def test_a_compiled_network_learns_the_same_on_a_cpu(data):
    eager, _ = losses(data)
    compiled, _ = losses(data, place=Place(engine="compiled"))
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=0)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "eager"])
@pytest.mark.parametrize("objective", ["direct", "teacher_forced", "pushforward"])
def test_engines_give_the_losses_of_eager(data, engine, objective):
    plan = replace(RECIPE.train, objective=objective, calls=2, push_every=2, ema=0.9, updates=4 * WARM_UP)
    recipe = replace(RECIPE, train=plan)
    world = World(device=torch.device("cuda", 0))
    eager, other = (losses(data, recipe, Place(world, name)) for name in ("eager", engine))
    tolerance = 1e-3 if "compiled" in engine else 1e-5
    torch.testing.assert_close(other[0], eager[0], rtol=tolerance, atol=0)


@gpu
@pytest.mark.parametrize("objective", ["direct", "teacher_forced", "pushforward"])
def test_a_captured_bf16_step_learns_like_an_eager_one_in_several_streams(objective):
    """The losses differ by what bf16 makes of weights that differ by round-off."""
    plan = replace(RECIPE.train, objective=objective, calls=2, precision="bf16", updates=4 * WARM_UP)
    recipe, world = replace(RECIPE, train=plan), World(device=torch.device("cuda", 0))
    eager, graph = (Rehearsal(recipe, Place(world, name)) for name in ("eager", "graph"))
    for _ in range(4 * WARM_UP):
        eager()
        graph()
        torch.testing.assert_close(graph.loss, eager.loss, rtol=2e-2, atol=0)
    for capture in graph.stepper._captures.values():
        assert capture._lanes.sound and capture._moments is not None


@gpu
@pytest.mark.parametrize("resident", [True, False])
def test_a_captured_step_draws_new_noise_and_new_windows_every_time(data, resident):
    recipe = replace(RECIPE, model=replace(MODEL, options=Options(dropout=0.1)), train=replace(RECIPE.train, noise=0.1))
    world = World(device=torch.device("cuda", 0))
    eager, graph = (losses(data, recipe, Place(world, name), resident)[0] for name in ("eager", "graph"))
    torch.testing.assert_close(graph, eager, rtol=1e-4, atol=0)
    assert len(set(graph.tolist())) == len(graph)
