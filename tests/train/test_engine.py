"""Engines and data paths change the speed, never what is learned."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from sigmasolver.data.normalise import fit
from sigmasolver.data.prefetch import prefetch
from sigmasolver.data.store import open_store
from sigmasolver.data.windows import Windows
from sigmasolver.forecast.checkpoint import build, skeleton
from sigmasolver.models import Options
from sigmasolver.models.layers import draws_noise
from sigmasolver.models.variants import BASELINES
from sigmasolver.ops.precision import matmul_precision
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe, changed
from sigmasolver.runs import Run
from sigmasolver.runtime.parallel import World
from sigmasolver.simulate.generate import generate
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.tasks import Task
from sigmasolver.train.capture import WARM_UP
from sigmasolver.train.dry_run import Alive, Rehearsal
from sigmasolver.train.engine import ENGINES, Execution, Stepper
from sigmasolver.train.job import train_run
from sigmasolver.train.loop import StepPlan

FLOW = replace(DEMO, grid=32, stored=16, step=1 / 64, burn_in=1.0, frames=8)
TASK = Task("tiny", ("vorticity",), ("vorticity",), (16, 16), 2, 1, 3, 6, 2, "channel")
MODEL = ModelRecipe(width=16, depth=1, heads=2, slices=4, modes=3)
RECIPE = Recipe(TASK, MODEL, TrainRecipe(updates=12, batch=4, seed=3, clip=1.0))
FORCED = replace(RECIPE, train=replace(RECIPE.train, objective="teacher_forced"))
ACCUMULATED = changed(FORCED, ["train.accumulate=true"])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "flow.h5"
    generate(FLOW, 8, 0, path)
    return path


def losses(path, recipe=RECIPE, execution=None, resident=True):
    execution = Execution() if execution is None else execution
    device = execution.world.device
    with open_store(path) as store:
        windows = Windows(store, range(6), recipe.training_windows())
        forecaster = build(recipe, *fit("channel", windows)).to(device)
        windows = windows.resident(device) if resident else windows
        plan = StepPlan(recipe, windows)
        stepper = Stepper(recipe, forecaster, windows, plan.members, plan.rates(), execution)
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
        with pytest.raises(IndexError, match="Window 999 is out of range"):
            list(prefetch(windows, [torch.tensor([999])], "cpu"))


def test_the_optimiser_is_adamw_by_hand(data):
    """Three steps of AdamW written out in float64 from the same gradients."""
    recipe = replace(RECIPE, train=replace(RECIPE.train, updates=3, clip=None, weight_decay=0.1, lr=1e-2))
    with open_store(data) as store:
        windows = Windows(store, range(6), recipe.training_windows()).resident("cpu")
        forecaster = build(recipe, *fit("channel", windows))
        plan = StepPlan(recipe, windows)
        rates = plan.rates()
        stepper = Stepper(recipe, forecaster, windows, plan.members, rates, Execution())
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


@pytest.mark.parametrize("name", ["transolver-sigma", "factformer", "hpm-frozen"])
def test_the_optimiser_holds_what_learns_and_nothing_else(data, name):
    """One parameter without a gradient would keep a captured step from the kernel of its update."""
    stepper, *_ = first_step(data, changed(RECIPE, [f"model.name={name}"]))
    (group,) = stepper.optimiser.param_groups
    assert all(parameter.grad is not None for parameter in group["params"])
    learning = sum(one.requires_grad for one in stepper.model.parameters())
    assert len(group["params"]) == len(stepper.optimiser.state) == learning
    assert (learning < len(list(stepper.model.parameters()))) == (name != "transolver-sigma")


def first_step(path, recipe, factor=1.0):
    """One update on the data times `factor`: the stepper, the channels its network was given, and the batch."""
    from tests.data.memory import Memory

    with open_store(path) as store:
        source = Memory(store.header, factor * store[:])
    windows = Windows(source, range(6), recipe.training_windows()).resident("cpu")
    forecaster = build(recipe, *fit("channel", windows))
    plan, seen = StepPlan(recipe, windows), []
    forecaster.model.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().clone()))
    before = build(recipe, *fit("channel", windows))  # the same weights, which stay
    stepper = Stepper(recipe, forecaster, windows, plan.members, plan.rates(), Execution())
    stepper.run(0)
    return stepper, seen[0], before, windows.batch(plan.members(0))


def test_the_loss_of_a_step_has_its_derivative_term(data):
    """By hand: central differences with zeros beyond the ends, of the prediction less its outer ring."""
    for factor in (0.0, 0.5):
        recipe = replace(RECIPE, train=replace(RECIPE.train, derivative=factor))
        stepper, _, before, (history, future) = first_step(data, recipe)
        truth = future[:, :1].double()
        prediction = before(history).detach().double()
        expected = (prediction - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
        ringless = torch.zeros_like(prediction)
        ringless[:, :, 1:-1, 1:-1] = prediction[:, :, 1:-1, 1:-1]
        for axis in (2, 3):
            slopes = []
            for frames in (ringless, truth):
                pad = (0, 0, 1, 1) if axis == 3 else (0, 0, 0, 0, 1, 1)
                wide = torch.nn.functional.pad(frames, pad)
                slopes.append((wide.narrow(axis, 2, 16) - wide.narrow(axis, 0, 16)).flatten(1))
            expected = expected + factor * (slopes[0] - slopes[1]).norm(dim=1) / slopes[1].norm(dim=1)
        assert float(stepper.loss) == pytest.approx(float(expected.mean()), rel=1e-5)


def test_gradients_are_clipped_to_their_norm(data):
    """All of them together, direction kept; and left alone where they are shorter."""
    found = {}
    for clip in (None, 1e-3, 1e6):
        stepper, *_ = first_step(data, replace(RECIPE, train=replace(RECIPE.train, clip=clip)))
        found[clip] = torch.cat([one.grad.flatten() for one in stepper.model.parameters()]).double()
    assert found[None].norm() > 1e-2
    torch.testing.assert_close(found[1e-3], 1e-3 * found[None] / found[None].norm(), rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(found[1e6], found[None], rtol=1e-6, atol=0)


@pytest.mark.parametrize("exponent", [-110, 70, 115])
@pytest.mark.parametrize("loss", ["relative_l2", "squared"])
def test_data_of_any_magnitude_train_alike(data, exponent, loss):
    """Another power of two as the unit: the same bits in the loss of every step."""
    from tests.data.memory import Memory

    recipe = replace(RECIPE, train=replace(RECIPE.train, updates=4, loss=loss))
    found = []
    with open_store(data) as store:
        for factor in (1.0, 2.0**exponent):
            source = Memory(store.header, np.float32(factor) * store[:])
            windows = Windows(source, range(6), recipe.training_windows()).resident("cpu")
            plan = StepPlan(recipe, windows)
            stepper = Stepper(
                recipe, build(recipe, *fit("channel", windows)), windows, plan.members, plan.rates(), Execution()
            )
            for step in range(4):
                stepper.run(step)
                found.append(stepper.loss.item())
    assert found[:4] == found[4:]


def test_noise_is_of_normalised_fields(data):
    """Its deviation is `train.noise` in what the network sees, whatever the units of the data."""
    for factor in (1.0, 500.0):
        seen = [
            first_step(data, replace(RECIPE, train=replace(RECIPE.train, noise=noise)), factor)[1]
            for noise in (0.0, 0.1)
        ]
        noise = seen[1] - seen[0]
        assert float(noise.std()) == pytest.approx(0.1, rel=0.05) and abs(float(noise.mean())) < 0.01


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
        plan = StepPlan(recipe, windows)
        stepper = Stepper(recipe, forecaster, windows, plan.members, plan.rates(), Execution())
        stepper.run(0)
        assert forecaster.inputs.constant == ("reynolds",) and torch.isfinite(stepper.loss)


# --- teacher forcing frame by frame


def first_gradients(recipe):
    """Of one update on random windows in float64: all parameters as one vector, and the loss."""
    rehearsal = Rehearsal(recipe, Execution())
    stepper, windows = rehearsal.stepper, rehearsal.windows
    stepper.model.double()
    stepper.loss = stepper.loss.double()
    single = windows.batch
    windows.batch = lambda indices: tuple(frames.double() for frames in single(indices))
    rehearsal()
    return torch.cat([parameter.grad.flatten() for parameter in stepper.model.parameters()]), rehearsal.loss


@pytest.mark.parametrize("again", ["false", "true"])
def test_an_accumulated_update_has_the_gradient_and_the_loss_of_the_folded_one(again):
    settings = [f"train.recompute={again}", "train.noise=0.1", "train.clip=none", "task.normaliser=none"]
    folded, accumulated = (first_gradients(changed(recipe, settings)) for recipe in (FORCED, ACCUMULATED))
    for one, other in zip(folded, accumulated, strict=True):
        assert one.dtype == torch.float64
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12 * float(one.abs().max()))


@pytest.mark.parametrize("settings", [(), ("train.ema=0.9", "train.noise=0.1", "train.recompute=true")])
def test_a_whole_training_has_the_losses_of_the_folded_one(data, settings):
    (folded, weights), (accumulated, others) = (losses(data, changed(one, settings)) for one in (FORCED, ACCUMULATED))
    torch.testing.assert_close(accumulated, folded, rtol=1e-4, atol=0)
    whole, other = (torch.cat([t.flatten() for t in held.values()]) for held in (weights, others))
    assert (other - whole).norm() < 1e-3 * whole.norm()


def test_accumulated_bf16_stays_near_the_folded_one(data):
    folded, accumulated = (losses(data, changed(one, ["train.precision=bf16"]))[0] for one in (FORCED, ACCUMULATED))
    torch.testing.assert_close(accumulated, folded, rtol=0.03, atol=0)


def alive(recipe):
    rehearsal = Rehearsal(recipe, Execution())
    with Alive(rehearsal.windows.values_on_device) as counted:
        for _ in range(2):
            rehearsal()
    return counted.peak, rehearsal


def test_accumulation_holds_the_activations_of_one_frame():
    """Activations grow with the frames of a call: ten folded ones take ten times what a single one takes, while the
    peak of an accumulated update is that of a task with one frame, but for the frames themselves."""
    settings = ["task.history=10", "task.horizon=10", "model.width=32", "train.ema=none"]
    (folded, rehearsal), (accumulated, _) = (alive(changed(one, settings)) for one in (FORCED, ACCUMULATED))
    (single, _) = alive(changed(FORCED, [*settings, "task.horizon=1"]))
    parameters = sum(one.nbytes for one in rehearsal.stepper.model.parameters())
    batch = 4 * 20 * 16 * 16 * 4  # float32 frames of one batch
    states = 4 * parameters  # weights, gradients, two moments
    assert single <= accumulated <= single + parameters + 3 * batch
    assert (folded - states) / (single - states) == pytest.approx(10, rel=0.1)


def test_a_run_from_before_the_setting_goes_on(data, tmp_path):
    """A recipe.json that lacks a setting has its default, also for `train` in the same folder."""
    run = Run(tmp_path / "run")
    train_run(FORCED, data, run)
    plain = run.recipe()
    assert plain["train"].pop("accumulate") is False
    run.write_json("recipe.json", plain)
    train_run(FORCED, data, run)
    with pytest.raises(ValueError, match="contains a run with a different recipe"):
        train_run(ACCUMULATED, data, run)


@pytest.mark.parametrize("engine", ["graph", "compiled-graph"])
def test_a_graph_needs_a_gpu(engine):
    with pytest.raises(ValueError, match="needs a GPU"):
        Execution(engine=engine)


def test_mistakes_are_one_sentence(data):
    with pytest.raises(ValueError, match="Unknown engine"):
        Execution(engine="fast")
    with pytest.raises(ValueError, match="--shard needs several processes"):
        Execution(shard=True)
    with pytest.raises(ValueError, match="is not divisible by 3 processes"):
        losses(data, execution=Execution(World(0, 3)))
    with pytest.raises(ValueError, match="accumulate needs the objective teacher_forced, not direct; set"):
        changed(RECIPE, ["train.accumulate=true"])


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
@pytest.mark.parametrize(("learned", "expected"), [(RECIPE, RECIPE), (ACCUMULATED, FORCED)])
def test_a_compiled_network_learns_the_same_on_a_cpu(data, learned, expected):
    eager, _ = losses(data, expected)
    compiled, _ = losses(data, learned, Execution(engine="compiled"))
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=0)


QUICK = ("vit", "ffno", "linearno")
"""Baselines without anything in common but the frame: attention, Fourier modes, convolutions."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BASELINES]
)
def test_a_compiled_baseline_learns_the_same_on_a_cpu(data, name, monkeypatch):
    """Traced forward and backward, without the code generator, which is slow on a CPU."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    recipe = changed(RECIPE, [f"model.name={name}", "train.updates=3"])
    eager, compiled = (losses(data, recipe, Execution(engine=engine))[0] for engine in ("eager", "compiled"))
    # InstanceNorm over the few points of the deepest level magnifies rounding.
    torch.testing.assert_close(compiled, eager, rtol=1e-3 if name.startswith("unet") else 1e-5, atol=0)
    assert len(set(eager.tolist())) == 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "engine"),
    [(name, "graph") for name in BASELINES]
    + [pytest.param(name, "compiled-graph", marks=[] if name in QUICK else pytest.mark.slow) for name in BASELINES],
)
def test_engines_give_the_losses_of_eager_for_every_baseline(data, name, engine):
    """Three captured updates after the warm-up."""
    torch._dynamo.reset()
    recipe = changed(RECIPE, [f"model.name={name}", f"train.updates={WARM_UP + 3}"])
    world = World(device=torch.device("cuda", 0))
    eager, other = (losses(data, recipe, Execution(world, one))[0] for one in ("eager", engine))
    assert torch.isfinite(other).all()
    # A captured update draws other random numbers than an eager one of the same seed.
    tolerance = 0.1 if draws_noise(skeleton(recipe)) else 5e-3 if name.startswith("unet") else 1e-3
    torch.testing.assert_close(other, eager, rtol=tolerance, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "eager"])
@pytest.mark.parametrize("objective", ["direct", "teacher_forced", "pushforward"])
def test_engines_give_the_losses_of_eager(data, engine, objective):
    plan = replace(RECIPE.train, objective=objective, calls=2, push_every=2, ema=0.9, updates=4 * WARM_UP)
    recipe = replace(RECIPE, train=plan)
    world = World(device=torch.device("cuda", 0))
    eager, other = (losses(data, recipe, Execution(world, name)) for name in ("eager", engine))
    tolerance = 1e-3 if "compiled" in engine else 1e-5
    torch.testing.assert_close(other[0], eager[0], rtol=tolerance, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_every_engine_accumulates_what_eager_folds(data, engine, precision):
    settings = [f"train.precision={precision}", "train.ema=0.9", f"train.updates={4 * WARM_UP}"]
    world = World(device=torch.device("cuda", 0))
    folded = losses(data, changed(FORCED, settings), Execution(world))[0]
    accumulated = losses(data, changed(ACCUMULATED, settings), Execution(world, engine))[0]
    torch.testing.assert_close(accumulated, folded, rtol=1e-3 if precision == "float32" else 3e-2, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("objective", ["direct", "teacher_forced", "pushforward"])
def test_a_captured_bf16_step_learns_like_an_eager_one_in_several_streams(objective):
    """The losses differ by what bf16 makes of weights that differ by round-off."""
    plan = replace(RECIPE.train, objective=objective, calls=2, precision="bf16", updates=4 * WARM_UP)
    recipe, world = replace(RECIPE, train=plan), World(device=torch.device("cuda", 0))
    eager, graph = (Rehearsal(recipe, Execution(world, name)) for name in ("eager", "graph"))
    for _ in range(4 * WARM_UP):
        eager()
        graph()
        torch.testing.assert_close(graph.loss, eager.loss, rtol=2e-2, atol=0)
    for capture in graph.stepper._captures.values():
        assert capture._streams.sound and capture._adamw is not None


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [True, False])
def test_a_captured_step_draws_new_noise_and_new_windows_every_time(data, resident):
    recipe = replace(RECIPE, model=replace(MODEL, options=Options(dropout=0.1)), train=replace(RECIPE.train, noise=0.1))
    world = World(device=torch.device("cuda", 0))
    eager, graph = (losses(data, recipe, Execution(world, name), resident)[0] for name in ("eager", "graph"))
    torch.testing.assert_close(graph, eager, rtol=1e-4, atol=0)
    assert len(set(graph.tolist())) == len(graph)
