"""Engines and data paths give the same losses and weights."""

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
from sigmasolver.recipes.suites import COMPARED
from sigmasolver.runs import Run
from sigmasolver.runtime.parallel import World
from sigmasolver.sampling import hashed_seed
from sigmasolver.simulate.generate import generate
from sigmasolver.simulate.vorticity import DEMO
from sigmasolver.symmetries import SYMMETRIES
from sigmasolver.tasks import Task
from sigmasolver.train.capture import WARM_UP
from sigmasolver.train.dry_run import DryRun, LiveMemory
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
        windows = Windows(store, range(6), recipe.training_window_spec())
        forecaster = build(recipe, *fit("channel", windows)).to(device)
        windows = windows.resident(device) if resident else windows
        plan = StepPlan(recipe, windows)
        stepper = Stepper(recipe, forecaster, windows, plan.members, plan.rates(), execution)
        history = []
        for step in range(plan.steps):
            stepper.run(step)
            history.append(stepper.loss.clone())
    return torch.stack(history).cpu(), {name: t.cpu() for name, t in stepper.kept.state_dict().items()}


def test_prefetched_windows_train_like_resident_ones(data):
    resident_run, prefetched_run = (losses(data, resident=resident) for resident in (True, False))
    assert torch.equal(resident_run[0], prefetched_run[0])
    assert all(torch.equal(resident_run[1][name], prefetched_run[1][name]) for name in resident_run[1])


def test_prefetch_keeps_the_order_and_can_be_closed(data):
    with open_store(data) as store:
        windows = Windows(store, range(6), RECIPE.training_window_spec())
        batches = [torch.tensor([k, 3 * k]) for k in range(6)]
        for indices, (history, future) in zip(batches, prefetch(windows, batches, "cpu"), strict=True):
            expected = windows.batch(indices)
            assert torch.equal(history, expected[0]) and torch.equal(future, expected[1])
        endless = prefetch(windows, iter(lambda: torch.tensor([1]), None), "cpu")
        next(endless)
        endless.close()
        with pytest.raises(IndexError, match="Window 999 is out of range"):
            list(prefetch(windows, [torch.tensor([999])], "cpu"))


def test_stepper_matches_adamw_written_out_by_hand(data):
    """Three steps of AdamW written out in float64 from the same gradients."""
    recipe = replace(RECIPE, train=replace(RECIPE.train, updates=3, clip=None, weight_decay=0.1, lr=1e-2))
    with open_store(data) as store:
        windows = Windows(store, range(6), recipe.training_window_spec()).resident("cpu")
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
def test_optimiser_holds_exactly_the_trainable_parameters(data, name):
    """A parameter without a gradient would disable the fused AdamW of a captured step."""
    stepper, *_ = first_step(data, changed(RECIPE, [f"model.name={name}"]))
    (group,) = stepper.optimiser.param_groups
    assert all(parameter.grad is not None for parameter in group["params"])
    learning = sum(parameter.requires_grad for parameter in stepper.model.parameters())
    assert len(group["params"]) == len(stepper.optimiser.state) == learning
    assert (learning < len(list(stepper.model.parameters()))) == (name != "transolver-sigma")


def first_step(path, recipe, factor=1.0):
    """Run one update on scaled data; return the stepper, the network's input, the initial forecaster and the batch."""
    from tests.data.memory import Memory

    with open_store(path) as store:
        source = Memory(store.header, factor * store[:])
    windows = Windows(source, range(6), recipe.training_window_spec()).resident("cpu")
    forecaster = build(recipe, *fit("channel", windows))
    plan, seen = StepPlan(recipe, windows), []
    forecaster.model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach().clone()))
    before = build(recipe, *fit("channel", windows))  # a copy with the initial weights
    stepper = Stepper(recipe, forecaster, windows, plan.members, plan.rates(), Execution())
    stepper.run(0)
    return stepper, seen[0], before, windows.batch(plan.members(0))


def test_step_loss_includes_the_derivative_term(data):
    """Reference: central differences with zero padding, of the prediction with zero boundary points."""
    for factor in (0.0, 0.5):
        recipe = replace(RECIPE, train=replace(RECIPE.train, derivative=factor))
        stepper, _, before, (history, future) = first_step(data, recipe)
        truth = future[:, :1].double()
        prediction = before(history).detach().double()
        expected = (prediction - truth).flatten(1).norm(dim=1) / truth.flatten(1).norm(dim=1)
        interior = torch.zeros_like(prediction)
        interior[:, :, 1:-1, 1:-1] = prediction[:, :, 1:-1, 1:-1]
        for axis in (2, 3):
            slopes = []
            for frames in (interior, truth):
                pad = (0, 0, 1, 1) if axis == 3 else (0, 0, 0, 0, 1, 1)
                wide = torch.nn.functional.pad(frames, pad)
                slopes.append((wide.narrow(axis, 2, 16) - wide.narrow(axis, 0, 16)).flatten(1))
            expected = expected + factor * (slopes[0] - slopes[1]).norm(dim=1) / slopes[1].norm(dim=1)
        assert float(stepper.loss) == pytest.approx(float(expected.mean()), rel=1e-5)


def test_clip_limits_the_global_gradient_norm(data):
    """The global norm is clipped, the direction kept; a shorter gradient is unchanged."""
    gradients = {}
    for clip in (None, 1e-3, 1e6):
        stepper, *_ = first_step(data, replace(RECIPE, train=replace(RECIPE.train, clip=clip)))
        gradients[clip] = torch.cat([parameter.grad.flatten() for parameter in stepper.model.parameters()]).double()
    assert gradients[None].norm() > 1e-2
    torch.testing.assert_close(gradients[1e-3], 1e-3 * gradients[None] / gradients[None].norm(), rtol=1e-3, atol=1e-9)
    torch.testing.assert_close(gradients[1e6], gradients[None], rtol=1e-6, atol=0)


@pytest.mark.parametrize("exponent", [-110, 70, 100])
@pytest.mark.parametrize("loss", ["relative_l2", "squared"])
def test_losses_do_not_depend_on_the_scale_of_the_data(data, exponent, loss):
    """Scaling the data by a power of two leaves the loss of every step bitwise identical, if the gradient with respect
    to physical values, which has the inverse scale, is not subnormal."""
    from tests.data.memory import Memory

    recipe = replace(RECIPE, train=replace(RECIPE.train, updates=4, loss=loss))
    history = []
    with open_store(data) as store:
        for factor in (1.0, 2.0**exponent):
            source = Memory(store.header, np.float32(factor) * store[:])
            windows = Windows(source, range(6), recipe.training_window_spec()).resident("cpu")
            plan = StepPlan(recipe, windows)
            stepper = Stepper(
                recipe, build(recipe, *fit("channel", windows)), windows, plan.members, plan.rates(), Execution()
            )
            for step in range(4):
                stepper.run(step)
                history.append(stepper.loss.item())
    assert history[:4] == history[4:]


def test_noise_is_added_in_normalised_units(data):
    """Its standard deviation in the network's input is `train.noise`, whatever the units of the data."""
    for factor in (1.0, 500.0):
        seen = [
            first_step(data, replace(RECIPE, train=replace(RECIPE.train, noise=noise)), factor)[1]
            for noise in (0.0, 0.1)
        ]
        noise = seen[1] - seen[0]
        assert float(noise.std()) == pytest.approx(0.1, rel=0.05) and abs(float(noise.mean())) < 0.01


def test_constant_input_field_works_with_every_objective(data):
    """A constant second input field, with every objective."""
    from tests.data.memory import Memory

    with open_store(data) as store:
        frames = torch.stack([torch.from_numpy(store[k]) for k in range(8)])
        layout = store.header.layout
        header = replace(store.header, layout=replace(layout, fields=("vorticity", "reynolds"), units=("1/s", "1")))
    values = torch.cat((frames, torch.full_like(frames, 250.0)), dim=-1)
    task = replace(TASK, inputs=("vorticity", "reynolds"))
    for objective in ("direct", "teacher_forced", "pushforward"):
        recipe = replace(RECIPE, task=task, train=replace(RECIPE.train, objective=objective, calls=2, updates=2))
        windows = Windows(Memory(header, values), range(6), recipe.training_window_spec()).resident("cpu")
        forecaster = build(recipe, *fit("channel", windows))
        plan = StepPlan(recipe, windows)
        stepper = Stepper(recipe, forecaster, windows, plan.members, plan.rates(), Execution())
        stepper.run(0)
        assert forecaster.inputs.constant == ("reynolds",) and torch.isfinite(stepper.loss)


# --- teacher forcing with accumulated gradients


def first_gradients(recipe):
    """Gradient of one update on random windows in float64, as one vector, and the loss."""
    dry_run = DryRun(recipe, Execution())
    stepper, windows = dry_run.stepper, dry_run.windows
    stepper.model.double()
    stepper.loss = stepper.loss.double()
    single = windows.batch
    windows.batch = lambda indices: tuple(frames.double() for frames in single(indices))
    dry_run()
    return torch.cat([parameter.grad.flatten() for parameter in stepper.model.parameters()]), dry_run.loss


@pytest.mark.parametrize("recompute", ["false", "true"])
def test_accumulate_gives_the_gradient_and_loss_of_folded_frames(recompute):
    settings = [f"train.recompute={recompute}", "train.noise=0.1", "train.clip=none", "task.normaliser=none"]
    folded, accumulated = (first_gradients(changed(recipe, settings)) for recipe in (FORCED, ACCUMULATED))
    for expected, actual in zip(folded, accumulated, strict=True):
        assert expected.dtype == torch.float64
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12 * float(expected.abs().max()))


@pytest.mark.parametrize("settings", [(), ("train.ema=0.9", "train.noise=0.1", "train.recompute=true")])
def test_accumulate_gives_the_losses_of_folded_frames_over_a_full_training(data, settings):
    (folded, expected), (accumulated, actual) = (
        losses(data, changed(recipe, settings)) for recipe in (FORCED, ACCUMULATED)
    )
    torch.testing.assert_close(accumulated, folded, rtol=1e-4, atol=0)
    folded_weights, accumulated_weights = (
        torch.cat([t.flatten() for t in weights.values()]) for weights in (expected, actual)
    )
    assert (accumulated_weights - folded_weights).norm() < 1e-3 * folded_weights.norm()


def test_accumulate_bf16_parity(data):
    folded, accumulated = (
        losses(data, changed(recipe, ["train.precision=bf16"]))[0] for recipe in (FORCED, ACCUMULATED)
    )
    torch.testing.assert_close(accumulated, folded, rtol=0.03, atol=0)


def peak_bytes(recipe):
    dry_run = DryRun(recipe, Execution())
    with LiveMemory(dry_run.windows.values_on_device) as counted:
        for _ in range(2):
            dry_run()
    return counted.peak, dry_run


def test_accumulate_peak_memory_is_that_of_one_frame():
    """Activations are proportional to the frames of a call: ten folded frames take ten times the memory of one, while
    the peak of an accumulated update is that of a task with one frame, apart from the frames themselves."""
    settings = ["task.history=10", "task.horizon=10", "model.width=32", "train.ema=none"]
    (folded, dry_run), (accumulated, _) = (peak_bytes(changed(recipe, settings)) for recipe in (FORCED, ACCUMULATED))
    (single, _) = peak_bytes(changed(FORCED, [*settings, "task.horizon=1"]))
    parameters = sum(parameter.nbytes for parameter in dry_run.stepper.model.parameters())
    batch = 4 * 20 * 16 * 16 * 4  # float32 frames of one batch
    states = 4 * parameters  # weights, gradients, two moments
    assert single <= accumulated <= single + parameters + 3 * batch
    assert (folded - states) / (single - states) == pytest.approx(10, rel=0.1)


def test_recipe_without_a_new_setting_has_its_default(data, tmp_path):
    """A setting missing from recipe.json has its default, so training recompute in the same folder is accepted."""
    run = Run(tmp_path / "run")
    train_run(FORCED, data, run)
    plain = run.recipe()
    assert plain["train"].pop("accumulate") is False
    run.write_json("recipe.json", plain)
    train_run(FORCED, data, run)
    with pytest.raises(ValueError, match="contains a run with a different recipe"):
        train_run(ACCUMULATED, data, run)


@pytest.mark.parametrize("engine", ["graph", "compiled-graph"])
def test_graph_engine_needs_a_gpu(engine):
    with pytest.raises(ValueError, match="needs a GPU"):
        Execution(engine=engine)


def test_execution_and_stepper_reject_invalid_settings(data):
    with pytest.raises(ValueError, match="Unknown engine"):
        Execution(engine="fast")
    with pytest.raises(ValueError, match="--shard needs several processes"):
        Execution(shard=True)
    with pytest.raises(ValueError, match="is not divisible by 3 processes"):
        losses(data, execution=Execution(World(0, 3)))
    with pytest.raises(ValueError, match="accumulate needs the objective teacher_forced, not direct; set"):
        changed(RECIPE, ["train.accumulate=true"])


def test_matmul_precision_is_set_and_restored():
    before = torch.backends.cuda.matmul.allow_tf32
    for precision, inside in (("tf32", True), ("float32", False), ("bf16", True)):
        with matmul_precision(precision):
            assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == inside
        assert torch.backends.cuda.matmul.allow_tf32 == before


def test_bf16_losses_are_close_to_float32(data):
    full, _ = losses(data)
    half, _ = losses(data, replace(RECIPE, train=replace(RECIPE.train, precision="bf16")))
    torch.testing.assert_close(half, full, rtol=0.03, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("learned", "expected"), [(RECIPE, RECIPE), (ACCUMULATED, FORCED)])
def test_compiled_engine_parity_on_a_cpu(data, learned, expected):
    eager, _ = losses(data, expected)
    compiled, _ = losses(data, learned, Execution(engine="compiled"))
    torch.testing.assert_close(compiled, eager, rtol=1e-4, atol=0)


QUICK = ("vit", "ffno", "linearno")
"""Baselines of different kinds: attention, Fourier modes, convolutions."""


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BASELINES]
)
def test_compiled_baseline_parity_on_a_cpu(data, name, monkeypatch):
    """Forward and backward are traced, but without Inductor, which compiles slowly on a CPU."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    assert_compiled_matches_eager(data, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in COMPARED if name in BASELINES])
def test_baseline_parity_with_inductor_on_a_cpu(data, name):
    """One row of each method."""
    assert_compiled_matches_eager(data, name)


def assert_compiled_matches_eager(data, name):
    torch._dynamo.reset()
    recipe = changed(RECIPE, [f"model.name={name}", "train.updates=3"])
    eager, compiled = (losses(data, recipe, Execution(engine=engine))[0] for engine in ("eager", "compiled"))
    # InstanceNorm over the few points of the deepest level amplifies round-off.
    torch.testing.assert_close(compiled, eager, rtol=1e-3 if name.startswith("unet") else 1e-5, atol=0)
    assert len(set(eager.tolist())) == 3


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "engine"),
    [(name, "graph") for name in BASELINES]
    + [pytest.param(name, "compiled-graph", marks=[] if name in QUICK else pytest.mark.slow) for name in BASELINES],
)
def test_graph_engines_match_eager_for_every_baseline(data, name, engine):
    """Three captured updates after the warm-up."""
    torch._dynamo.reset()
    recipe = changed(RECIPE, [f"model.name={name}", f"train.updates={WARM_UP + 3}"])
    world = World(device=torch.device("cuda", 0))
    eager, other = (losses(data, recipe, Execution(world, choice))[0] for choice in ("eager", engine))
    assert torch.isfinite(other).all()
    # A captured update draws other random numbers than an eager one with the same seed.
    tolerance = 0.1 if draws_noise(skeleton(recipe)) else 5e-3 if name.startswith("unet") else 1e-3
    torch.testing.assert_close(other, eager, rtol=tolerance, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "eager"])
@pytest.mark.parametrize("objective", ["direct", "teacher_forced", "pushforward"])
def test_engines_match_eager(data, engine, objective):
    plan = replace(RECIPE.train, objective=objective, calls=2, push_every=2, ema=0.9, updates=4 * WARM_UP)
    recipe = replace(RECIPE, train=plan)
    world = World(device=torch.device("cuda", 0))
    eager, other = (losses(data, recipe, Execution(world, name)) for name in ("eager", engine))
    tolerance = 1e-3 if "compiled" in engine else 1e-5
    torch.testing.assert_close(other[0], eager[0], rtol=tolerance, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_accumulate_matches_folded_frames_in_every_engine(data, engine, precision):
    settings = [f"train.precision={precision}", "train.ema=0.9", f"train.updates={4 * WARM_UP}"]
    world = World(device=torch.device("cuda", 0))
    folded = losses(data, changed(FORCED, settings), Execution(world))[0]
    accumulated = losses(data, changed(ACCUMULATED, settings), Execution(world, engine))[0]
    torch.testing.assert_close(accumulated, folded, rtol=1e-3 if precision == "float32" else 3e-2, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("objective", ["direct", "teacher_forced", "pushforward"])
def test_captured_bf16_step_with_side_streams_matches_eager(objective):
    """The weights differ by round-off, which bf16 amplifies in the losses."""
    plan = replace(RECIPE.train, objective=objective, calls=2, precision="bf16", updates=4 * WARM_UP)
    recipe, world = replace(RECIPE, train=plan), World(device=torch.device("cuda", 0))
    eager, graph = (DryRun(recipe, Execution(world, name)) for name in ("eager", "graph"))
    for _ in range(4 * WARM_UP):
        eager()
        graph()
        torch.testing.assert_close(graph.loss, eager.loss, rtol=2e-2, atol=0)
    for capture in graph.stepper._captures.values():
        assert capture._streams.verified and capture._adamw is not None


def test_augmented_step_trains_on_transformed_windows(data):
    """Network input and loss are those of the windows under the symmetries drawn for this step."""
    recipe = changed(RECIPE, ["task.symmetries=kolmogorov-4", "train.augment=true"])
    stepper, seen, before, (history, future) = first_step(data, recipe)
    symmetries = SYMMETRIES["kolmogorov-4"].on((16, 16))
    rows = symmetries.random(4, torch.Generator().manual_seed(hashed_seed("augment/3/0")))
    assert len({tuple(row) for row in rows.tolist()}) == 4
    moved, target = (symmetries.apply(frames, ("vorticity",), rows) for frames in (history, future[:, :1]))
    assert torch.equal(seen, before.inputs.encode(moved).movedim(1, -2).flatten(-2))
    errors = (before(moved) - target).flatten(1).norm(dim=1) / target.flatten(1).norm(dim=1)
    torch.testing.assert_close(stepper.loss, errors.mean().detach())
    usual, *_ = first_step(data, changed(RECIPE, ["task.symmetries=kolmogorov-4"]))
    assert not torch.equal(usual.loss, stepper.loss)


def test_augmentation_without_symmetries_is_refused_before_the_first_step(data):
    known = "No symmetries of the task tiny are known; train with --set task[.]symmetries=NAME, one of shifts-1d"
    with pytest.raises(ValueError, match=known):
        first_step(data, changed(RECIPE, ["train.augment=true"]))
    with pytest.raises(ValueError, match="are those of 3 axes, but the grid has 2"):
        first_step(data, changed(RECIPE, ["train.augment=true", "task.symmetries=periodic-cube"]))
    with pytest.raises(ValueError, match='Unknown symmetry group "sqare"; did you mean square'):
        first_step(data, changed(RECIPE, ["train.augment=true", "task.symmetries=sqare"]))


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [True, False])
def test_captured_step_uses_new_noise_symmetries_and_windows_every_time(data, resident):
    recipe = replace(RECIPE, model=replace(MODEL, options=Options(dropout=0.1)), train=replace(RECIPE.train, noise=0.1))
    recipe = changed(recipe, ["task.symmetries=kolmogorov-4", "train.augment=true"])
    world = World(device=torch.device("cuda", 0))
    eager, graph = (losses(data, recipe, Execution(world, name), resident)[0] for name in ("eager", "graph"))
    torch.testing.assert_close(graph, eager, rtol=1e-4, atol=0)
    assert len(set(graph.tolist())) == len(graph)
