"""Time embedding: it makes a driven system learnable, and every call gets the right time.

    u_t = a(t) u,   a(t) = ω A cos(ωt),      so      u(x, t) = u_0(x) exp(A sin(ωt))

The factor from one frame to the next depends only on the time, which cannot be inferred from a single frame.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import sigmasolver
from sigmasolver.data.formats import open_data
from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.normalise import Normaliser, TimeScale, fit
from sigmasolver.data.store import Writer, open_store
from sigmasolver.data.windows import Windows
from sigmasolver.diagnose.components import trace_errors
from sigmasolver.diagnose.gains import history_update
from sigmasolver.diagnose.linearise import Linearised
from sigmasolver.diagnose.run import DIAGNOSTICS, diagnose_run
from sigmasolver.evaluate import Request, evaluate_run
from sigmasolver.forecast import rollout
from sigmasolver.forecast.checkpoint import build, load
from sigmasolver.forecast.files import forecast_file
from sigmasolver.forecast.replay import Replay
from sigmasolver.models import Options, list_models, variants
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.runs import Run, read_rows, read_tensors
from sigmasolver.runtime.parallel import World, join
from sigmasolver.tasks import Task
from sigmasolver.train import dry_run, job
from sigmasolver.train.engine import Execution, Stepper
from sigmasolver.train.loop import StepPlan
from sigmasolver.train.objectives import Loss, direct, frame_by_frame, pushforward, teacher_forced
from sigmasolver.train.plan import predict
from tests.train.test_processes import distance

ROOT = Path(sigmasolver.__file__).parents[1]
POINTS, FRAMES, OMEGA, GROWTH = 16, 14, 1.9, 0.8
TIMES = 3.0 + 0.4 * np.arange(FRAMES)
FIELDS = ("u", "rate")
TASK = Task("growth", ("u",), ("u",), (POINTS,), 1, 1, 6, 32, 4, "channel", symmetries="shifts-1d")
TIMED = ModelRecipe(width=16, depth=1, heads=2, slices=4, modes=3, options=Options(time_embedding=True))
PLAN = TrainRecipe(updates=6, batch=4, seed=3, checks=1, lr=5e-3, validation=0.25)
RECIPE = Recipe(TASK, TIMED, PLAN)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """36 solutions with random initial waves; `rate` is one number per trajectory, constant in space."""
    random, x = np.random.default_rng(0), np.arange(POINTS) * 2 * np.pi / POINTS
    waves = random.normal(size=(36, 3, 1)) * np.cos(np.arange(3)[:, None] * x + random.normal(size=(36, 3, 1)))
    u = waves.sum(1)[:, None] * np.exp(GROWTH * np.sin(OMEGA * TIMES))[:, None]
    rate = np.broadcast_to(random.uniform(1, 2, size=(36, 1, 1)), u.shape)
    path = tmp_path_factory.mktemp("data") / "growth.h5"
    header = Header(Layout(FIELDS, ("1", "1"), ("periodic",), (x,), TIMES), "test", {})
    with Writer(path, header, 36) as writer:
        writer.append(np.stack((u, rate), axis=-1).astype(np.float32))
    return path


@pytest.fixture(scope="module")
def run(data, tmp_path_factory):
    """A briefly trained run."""
    run = Run(tmp_path_factory.mktemp("runs") / "timed")
    job.train_run(RECIPE, data, run)
    return run


def record_times(model):
    """Record the input of the time embedding in every call of the model."""
    recorded = []
    model.time.register_forward_pre_hook(lambda module, inputs: recorded.append(inputs[0].detach().cpu().clone()))
    return recorded


def forecaster_of(block=1, history=1, scale=None, embedded=(), fields=("u",), dtype=torch.float64):
    """Untrained, with all parameters perturbed, and normalisers that are not the identity."""
    task = replace(TASK, block=block, history=history, inputs=fields, conditions=embedded)
    statistics = [
        Normaliser("channel", names, *torch.tensor([[0.3] * len(names), [1.7] * len(names)], dtype=torch.float64))
        for names in (fields, ("u",))
    ]
    forecaster = build(replace(RECIPE, task=task), *statistics, scale or TimeScale(3.0, 0.4)).to(dtype).eval()
    with torch.no_grad():
        for parameter in forecaster.model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return forecaster


# --- learning


def test_time_embedding_makes_a_driven_system_predictable(data, tmp_path, monkeypatch):
    """Without the time the best forecast is a mean factor. Times scaled to [0, 1] over a trajectory would not help: no
    frequency of the embedding is high enough to distinguish the frames."""
    errors = {}
    for name, embedding in (("frames", True), ("none", False), ("range", True)):
        if name == "range":
            monkeypatch.setattr(TimeScale, "of", lambda times: TimeScale(times[0], times[-1] - times[0]))
        model = replace(TIMED, width=32, options=Options(time_embedding=embedding, padding=("circular",)))
        plan = replace(PLAN, updates=300, batch=8, lr=1e-2, checks=0, validation=0.0)
        run = Run(tmp_path / name)
        job.train_run(replace(RECIPE, model=model, train=plan), data, run)
        rows = evaluate_run(run)
        errors[name] = next(row["value"] for row in rows if row["metric"] == "relative_l2" and row["seed"] is not None)
    assert errors["frames"] < 0.15 and 5 * errors["frames"] < min(errors["none"], errors["range"])


# --- the right time at every call


@pytest.mark.parametrize(("block", "horizon"), [(1, 4), (2, 7), (3, 3)])
def test_rollout_passes_the_time_of_every_call(block, horizon):
    """Free and teacher-forced, also with unevenly spaced frames."""
    forecaster = forecaster_of(block)
    recorded, history = record_times(forecaster.model), torch.randn(2, 1, POINTS, 1, dtype=torch.float64)
    truth = torch.randn(2, horizon, POINTS, 1, dtype=torch.float64)
    times = torch.tensor([[3.0], [11.0]], dtype=torch.float64) + torch.rand(2, horizon + 1).double().cumsum(1)
    for true in (None, truth):
        recorded.clear()
        rollout(forecaster, history, horizon, true, times=times)
        assert len(recorded) == -(-horizon // block)
        for call, scaled in enumerate(recorded):
            assert torch.equal(scaled, ((times[:, [call * block]] - 3.0) / 0.4))


def test_rollout_from_one_time_advances_by_training_frames():
    forecaster, history = forecaster_of(2), torch.randn(3, 1, POINTS, 1, dtype=torch.float64)
    recorded = record_times(forecaster.model)
    once = forecaster.rollout(history, 5, time=4.2)
    torch.testing.assert_close(torch.cat(recorded, 1), torch.tensor([[3.0, 5.0, 7.0]] * 3).double(), rtol=0, atol=1e-12)
    individual = forecaster.rollout(history, 5, time=np.array([4.2, 5.0, 4.2]))
    torch.testing.assert_close(individual.frames[::2], once.frames[::2])
    assert (individual.frames[1] - once.frames[1]).abs().max() > 1e-3


def test_time_scale_resolves_large_close_times():
    """Unix times in hundredths of a second: the spacing of float32 there is 128 seconds."""
    forecaster = forecaster_of(scale=TimeScale(1.7e9, 0.01), dtype=torch.float32)
    recorded = record_times(forecaster.model)
    forecaster.rollout(torch.randn(1, 1, POINTS, 1), 4, time=1.7e9 + 5)
    torch.testing.assert_close(torch.cat(recorded, 1), torch.tensor([[500.0, 501.0, 502.0, 503.0]]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("objective", ["direct", "teacher_forced", "pushforward"])
def test_training_passes_the_time_of_every_window(data, objective):
    recipe = replace(RECIPE, train=replace(PLAN, objective=objective, calls=3))
    with open_store(data) as store:
        windows = Windows(store, range(8), recipe.training_window_spec()).resident("cpu")
        forecaster = build(recipe, *fit("channel", windows), TimeScale.of(windows.times))
        plan, recorded = StepPlan(recipe, windows), record_times(forecaster.model)
        Stepper(recipe, forecaster, windows, plan.members, plan.rates(), Execution()).run(0)
        starts = torch.tensor([windows.rows()[index].history for index in plan.members(0)])
    expected = {  # in frames since the first stored one; the history has one frame
        "direct": [starts],
        "teacher_forced": [(starts[:, None] + torch.arange(6)).flatten()],
        "pushforward": [starts, starts + 1, starts + 2],
    }
    assert len(recorded) == len(expected[objective])
    for scaled, frames in zip(recorded, expected[objective], strict=True):
        torch.testing.assert_close(scaled[:, 0], frames.float(), rtol=1e-6, atol=1e-6)


def test_teacher_forced_times_equal_frame_by_frame():
    forecaster = forecaster_of(history=2)
    history, future = (torch.randn(3, frames, POINTS, 1, dtype=torch.float64) for frames in (2, 5))
    times = 3.0 + torch.rand(3, 6).double().cumsum(1)
    known, loss = torch.cat((history, future), 1), Loss()
    folded = teacher_forced(forecaster, history, future, loss, times)
    alone = [direct(forecaster, known[:, t : t + 2], future[:, t : t + 1], loss, times[:, t:]) for t in range(5)]
    torch.testing.assert_close(folded, torch.stack(alone).sum(), rtol=1e-12, atol=0)
    parts = [direct(forecaster, *pair, loss, later) for *pair, later in frame_by_frame(history, future, times)]
    torch.testing.assert_close(torch.stack(parts), torch.stack(alone), rtol=1e-12, atol=0)
    wrong = [direct(forecaster, known[:, t : t + 2], future[:, t : t + 1], loss, times) for t in range(5)]
    assert (folded - torch.stack(wrong).sum()).abs() > 1e-4


def test_pushforward_loss_is_that_of_the_last_block_of_a_rollout():
    forecaster = forecaster_of(block=2)
    history, future = (torch.randn(3, frames, POINTS, 1, dtype=torch.float64) for frames in (1, 6))
    times = 3.0 + torch.rand(3, 7).double().cumsum(1)
    frames = rollout(forecaster, history, 6, times=times).frames
    pushed = pushforward(forecaster, history, future, Loss(), 3, times)
    torch.testing.assert_close(pushed, Loss()(frames[:, 4:], future[:, 4:]).mean(), rtol=1e-12, atol=0)


def test_follow_uses_the_times_of_the_calls():
    forecaster = forecaster_of(history=2, block=2)
    history, future = (torch.randn(3, frames, POINTS, 1, dtype=torch.float64) for frames in (2, 6))
    times = 3.0 + torch.rand(3, 7).double().cumsum(1)
    trace = trace_errors(forecaster, history, future, {"full": lambda state: state}, nodes=7, times=times)
    error = rollout(forecaster, history, 6, times=times).frames - future
    expected = [error[:, k : k + 2].flatten(1).norm(dim=1) for k in (0, 2, 4)]
    torch.testing.assert_close(trace.error[:, 1:, 0], torch.stack(expected, dim=1).detach(), rtol=1e-10, atol=0)
    assert (trace.residual < 1e-6).all()


# --- conditions


def test_conditions_are_embedded_after_the_time():
    """The embedding gets the time and then the normalised means of the condition fields in the last frame."""
    forecaster = forecaster_of(history=2, embedded=("rate", "force"), fields=("u", "force", "rate"))
    recorded, history = record_times(forecaster.model), torch.randn(2, 2, POINTS, 3, dtype=torch.float64)
    forecaster(history, time=torch.tensor([3.0, 3.8], dtype=torch.float64))
    means = (history[:, -1].mean(1) - 0.3) / 1.7
    expected = torch.stack((torch.tensor([0.0, 2.0]).double(), means[:, 2], means[:, 1]), dim=1)
    torch.testing.assert_close(recorded[0], expected, rtol=0, atol=1e-12)


def test_conditions_work_without_time_embedding(data, tmp_path):
    task = replace(TASK, inputs=FIELDS, conditions=("rate",))
    recipe = replace(RECIPE, task=task, model=replace(TIMED, options=Options()))
    job.train_run(recipe, data, Run(tmp_path))
    forecaster = load(tmp_path)
    recorded = record_times(forecaster.model)
    with open_store(data) as store:
        windows = Windows(store, (8, 9), recipe.evaluation_window_spec())
        forecaster.rollout(windows[0][0][None], 3)
        rate = (store[8][0, 0, 1] - forecaster.inputs.mean[1]) / forecaster.inputs.scale[1]
    torch.testing.assert_close(torch.cat(recorded)[:, 0], torch.full((3,), float(rate)), rtol=1e-5, atol=1e-6)
    assert forecaster.time_scale is None
    untrained = build(recipe, forecaster.inputs, forecaster.targets).model.time.mlp[0].weight
    assert (untrained - forecaster.model.time.mlp[0].weight).abs().max() > 1e-4


@pytest.mark.parametrize("names", [("u",), ("force",), ("rate", "rate")])
def test_condition_must_be_an_input_that_is_not_predicted(names):
    with pytest.raises(ValueError, match="must be an input that is not predicted, listed once; choose from rate"):
        replace(TASK, inputs=FIELDS, conditions=names)


# --- from a run folder


class Stop(Exception):
    pass


@pytest.mark.parametrize("objective", ["direct", "teacher_forced"])
def test_resume_with_time_embedding_gives_identical_weights(data, tmp_path, objective, monkeypatch):
    recipe = replace(RECIPE, train=replace(PLAN, objective=objective))
    job.train_run(recipe, data, Run(tmp_path / "full"))
    original = Stepper.run

    def limited(self, step):
        if step == 4:
            raise Stop
        original(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "run", limited)
        patch.setattr(job, "train", partial(job.train, look=2, keep_seconds=0))
        with pytest.raises(Stop):
            job.train_run(recipe, data, Run(tmp_path / "cut"))
    job.resume_run(Run(tmp_path / "cut"))
    full, cut = (read_tensors(Run(tmp_path / name).weights)[0] for name in ("full", "cut"))
    assert full.keys() == cut.keys() and all(torch.equal(full[name], cut[name]) for name in full)
    errors = [read_rows(Run(tmp_path / name).log)[-1]["error"] for name in ("full", "cut")]
    assert errors[0] == errors[1]


def test_time_scale_is_stored_with_the_run(run):
    """The unit is a frame of the training data, counted from the first one."""
    stored = json.loads((run.path / "normaliser.json").read_text())["time"]
    assert stored == {"origin": 3.0, "unit": pytest.approx(0.4)} and load(run.path).time_scale == TimeScale(**stored)
    facts = run.read_json("normaliser.json")
    facts.pop("time")
    lost = Run(run.path.parent / "lost")
    lost.write_json("recipe.json", run.recipe())
    lost.write_json("normaliser.json", facts)
    lost.weights.write_bytes(run.weights.read_bytes())
    with pytest.raises(ValueError, match="has no time scale; copy it again"):
        load(lost.path)


def test_run_without_the_conditions_setting_resumes_and_loads(data, tmp_path):
    """A recipe without the setting has its default; with another value the recipe differs."""
    recipe = replace(RECIPE, task=replace(TASK, inputs=FIELDS), model=replace(TIMED, options=Options()))
    run = Run(tmp_path)
    job.train_run(recipe, data, run)
    plain = run.recipe()
    assert plain["task"].pop("conditions") == []
    run.write_json("recipe.json", plain)
    before = read_tensors(run.weights)[0]
    run.weights.unlink()
    job.resume_run(run)
    after = read_tensors(run.weights)[0]
    assert all(torch.equal(before[name], after[name]) for name in before) and run.recipe() == plain
    assert load(tmp_path).embedded == ()
    with pytest.raises(ValueError, match=r"different recipe \(.*task\.conditions"):
        job.train_run(replace(recipe, task=replace(recipe.task, conditions=("rate",))), data, run)


@pytest.mark.parametrize("protocol", ["free", "teacher-forced"])
def test_evaluation_uses_the_times_of_the_data(data, run, protocol):
    rows = evaluate_run(run, Request(protocol=protocol))
    value = next(row["value"] for row in rows if row["metric"] == "relative_l2" and row["seed"] is not None)
    forecaster, errors = load(run.path), []
    with open_store(data) as store:
        for trajectory in range(32, 36):
            frames = torch.from_numpy(store[trajectory])[..., :1]
            for start in range(FRAMES - 6):
                predicted, state = [], frames[start]
                for lead in range(6):
                    with torch.no_grad():
                        last = forecaster(state[None, None], time=torch.tensor([TIMES[start + lead]]))[0, 0]
                    predicted.append(last)
                    state = last if protocol == "free" else frames[start + lead + 1]
                true = frames[start + 1 : start + 7].double()
                errors.append(float((torch.stack(predicted).double() - true).norm() / true.norm()))
    assert value == pytest.approx(np.mean(errors), rel=1e-5)


def test_forecast_file_uses_the_times_of_its_input(data, run, tmp_path):
    """A store and arrays with times continue from the last one; arrays without start where the training data did."""
    with open_store(data) as store:
        header, frames = store.header, store[9][..., :1]
    sources = {"store.h5": (5, 14), "timed.npz": (5, 14), "plain.npy": (0, 9)}
    with Writer(tmp_path / "store.h5", replace(header, layout=_with_times(header, ("u",), TIMES[5:])), 1) as writer:
        writer.append(frames[None, 5:])
    np.savez(tmp_path / "timed.npz", u=frames[5:, :, 0], times=TIMES[5:])
    np.save(tmp_path / "plain.npy", frames[:9])
    forecaster, device = load(run.path), torch.device("cpu")
    for name, (_, stop) in sources.items():
        notes = forecast_file(run.path, tmp_path / name, 4, tmp_path / f"{name}.out.h5", device)
        expected = forecaster.rollout(frames[None, stop - 1 : stop], 4, time=TIMES[stop - 1]).frames
        with open_store(tmp_path / f"{name}.out.h5") as out:
            np.testing.assert_allclose(out[0], expected[0].numpy(), rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(out.header.layout.times, TIMES[stop - 1] + 0.4 * np.arange(1, 5), rtol=1e-12)
        assert any("has no times: assuming its frames are the first 9" in line for line in notes) == (name[0] == "p")
    forecast_file(run.path, tmp_path / "plain.npy.out.h5", 3, tmp_path / "on.npy", device)
    full = forecaster.rollout(frames[None, 8:9], 7, time=TIMES[8]).frames
    np.testing.assert_allclose(np.load(tmp_path / "on.npy"), full[:, 4:].numpy(), rtol=1e-5, atol=1e-6)
    np.savez(tmp_path / "back.npz", u=frames[5:, :, 0], times=TIMES[5:][::-1])
    with pytest.raises(ValueError, match=r"The times in .* must be finite, increasing numbers"):
        forecast_file(run.path, tmp_path / "back.npz", 4, tmp_path / "never.h5", device)


@pytest.mark.parametrize("suffix", [".npz", ".h5"])
def test_forecast_continued_from_a_file_equals_one_forecast(data, run, tmp_path, suffix):
    """Six frames at once, or two and then four: the file of the first two has their times and the metadata."""
    outs = [tmp_path / f"{name}{suffix}" for name in ("all", "first", "rest")]
    for start, steps, out in ((data, 6, outs[0]), (data, 2, outs[1]), (outs[1], 4, outs[2])):
        messages = forecast_file(run.path, start, steps, out, torch.device("cpu"))
        assert not any("times" in line or "taken from" in line for line in messages)
    with open_data(outs[0]) as whole, open_data(outs[2]) as rest, open_store(data) as given:
        np.testing.assert_allclose(rest[:], whole[:, 2:], rtol=1e-5, atol=1e-6)
        expected, actual = whole.header.layout, rest.header.layout
        np.testing.assert_allclose(expected.times, TIMES[-1] + 0.4 * np.arange(1, 7), rtol=1e-12)
        np.testing.assert_allclose(actual.times, expected.times[2:], rtol=1e-12)
        np.testing.assert_array_equal(actual.coordinates, given.header.layout.coordinates)
        assert (actual.boundary, actual.units) == (given.header.layout.boundary, given.header.layout.units[:1])


def _with_times(header, fields, times):
    return replace(header.layout, fields=fields, units=("1",) * len(fields), times=times)


def test_diagnose_run_makes_every_diagnosis_with_time_embedding(run):
    diagnoses = diagnose_run(run, request=Request(windows=2))
    assert set(diagnoses) == set(DIAGNOSTICS) and all(
        diagnosis.skipped is None and diagnosis.rows for diagnosis in diagnoses.values()
    )
    rows = {
        (row["metric"], row["lead"]): row["value"] for row in diagnoses["decomposition"].rows if row["field"] is None
    }
    for lead in range(1, 7):
        parts = sum(rows[name, lead] for name in ("injection", "propagation", "cross"))
        assert rows["total", lead] == pytest.approx(parts, rel=1e-4)


def test_linearised_uses_the_time_of_the_call():
    forecaster = forecaster_of(history=2)
    state, v = torch.randn(2, 2, POINTS, 1).double(), torch.randn(4, 2, POINTS, 1).double()
    update = history_update(forecaster, state[..., 1:], torch.tensor([3.4, 6.0]).double())
    point = torch.cat((state, 2 * state))  # two nodes, so the times are repeated like the samples
    recorded, h = record_times(forecaster.model), 1e-6
    slope = (update(point + h * v) - update(point - h * v)) / (2 * h)
    torch.testing.assert_close(Linearised(update, point) @ v, slope, rtol=1e-6, atol=1e-8)
    assert all(torch.allclose(scaled[:, 0], torch.tensor([1.0, 7.5, 1.0, 7.5]).double()) for scaled in recorded)


def test_predict_counts_the_parameters_of_the_embedding(monkeypatch):
    monkeypatch.setattr(dry_run, "TIMING_SECONDS", 0.0)
    timed = predict(RECIPE, Execution(), 1e12)
    untimed = predict(replace(RECIPE, model=replace(TIMED, options=Options())), Execution(), 1e12)
    assert timed.parameters - untimed.parameters == 2 * (16 * 16 + 16)


# --- graphs and processes


def test_replay_with_times_equals_the_forecaster():
    forecaster = forecaster_of(2, dtype=torch.float32)
    history, times = torch.randn(3, 1, POINTS, 1), 3.0 + torch.rand(3, 8).cumsum(1)
    actual, expected = (rollout(model, history, 7, times=times).frames for model in (Replay(forecaster), forecaster))
    assert torch.equal(actual, expected)
    with pytest.raises(ValueError, match="Replay does not support gradients"):
        Replay(forecaster)(history, time=times[:, 0].requires_grad_())


@pytest.mark.gpu
def test_replayed_graph_reads_new_times():
    forecaster = forecaster_of(2, dtype=torch.float32).to("cuda")
    replay, history = Replay(forecaster), torch.randn(3, 1, POINTS, 1, device="cuda")
    for shift in (0.0, 5.0):
        times = (3.0 + shift + torch.rand(3, 8).cumsum(1)).cuda()
        assert replay.eager(history) is None
        actual, expected = (rollout(model, history, 7, times=times).frames for model in (replay, forecaster))
        assert (actual - expected).norm() < 1e-4 * expected.norm()
    assert len(replay._graphs) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("objective", ["direct", "teacher_forced", "pushforward"])
@pytest.mark.parametrize("resident", [True, False])
def test_captured_step_reads_new_times(data, objective, resident):
    plan_of = replace(PLAN, objective=objective, calls=2, updates=12)
    losses = {}
    for engine in ("eager", "graph"):
        recipe, execution = replace(RECIPE, train=plan_of), Execution(World(device=torch.device("cuda")), engine)
        with open_store(data) as store:
            windows = Windows(store, range(8), recipe.training_window_spec())
            forecaster = build(recipe, *fit("channel", windows), TimeScale.of(windows.times)).to("cuda")
            windows = windows.resident("cuda") if resident else windows
            plan = StepPlan(recipe, windows)
            stepper = Stepper(recipe, forecaster, windows, plan.members, plan.rates(), execution)
            losses[engine] = []
            for step in range(plan.steps):
                stepper.run(step)
                losses[engine].append(float(stepper.loss))
    np.testing.assert_allclose(losses["graph"], losses["eager"], rtol=1e-4)


def work(path: str, folder: str, shard: bool) -> None:
    """Train in one of several processes."""
    torch.set_num_threads(1)
    with join(torch.device("cpu")) as world:
        job.train_run(RECIPE, path, Run(folder), Execution(world, shard=shard))


@pytest.mark.slow
@pytest.mark.parametrize("shard", [False, True])
def test_time_embedding_in_two_processes_matches_one(data, run, tmp_path, shard):
    script = tmp_path / "work.py"
    script.write_text(
        f"from tests.train.test_time import work; work({str(data)!r}, {str(tmp_path / 'two')!r}, {shard})"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert distance(run, Run(tmp_path / "two")) < 1e-5
    errors = [read_rows(trained.log)[-1]["error"] for trained in (run, Run(tmp_path / "two"))]
    assert errors[1] == pytest.approx(errors[0], rel=1e-5)


# --- models without a time embedding, and errors


def test_model_without_time_embedding_ignores_times(data, tmp_path):
    recipe = replace(RECIPE, model=replace(TIMED, options=Options()))
    job.train_run(recipe, data, Run(tmp_path))
    assert "time" not in json.loads((tmp_path / "normaliser.json").read_text())
    forecaster, history = load(tmp_path), torch.randn(2, 1, POINTS, 1)
    plain = forecaster.rollout(history, 3).frames
    assert torch.equal(plain, rollout(Replay(forecaster), history, 3, times=torch.rand(2, 4)).frames)


@pytest.mark.parametrize("name", [name for name in list_models() if not name.startswith(("hpm", "drift-net", "rno"))])
def test_every_model_supports_time_embedding(name):
    """Except DRIFT-Net, which has no embedding, RNO, which needs two axes, and HPM, which needs more points and has its
    own test."""
    recipe = replace(RECIPE, model=replace(TIMED, name=name))
    unscaled = Normaliser("none", ("u",), torch.zeros(1).double(), torch.ones(1).double())
    forecaster, history = build(recipe, unscaled, unscaled).eval(), torch.randn(2, 1, POINTS, 1)
    with torch.no_grad():
        for parameter in forecaster.model.parameters():  # initially the output hardly depends on the input
            parameter.add_(0.3 * torch.randn_like(parameter))
        early, late = (forecaster(history, time=torch.tensor([0.0, t])) for t in (1.0, 5.0))
    torch.testing.assert_close(early[0], late[0])
    assert (early[1] - late[1]).abs().max() > 1e-3


def test_model_without_time_input_is_rejected_before_data_are_read(monkeypatch, tmp_path):
    monkeypatch.setitem(variants.MODELS, "plain", lambda config: torch.nn.Linear(config.in_channels, 1))
    recipe = replace(RECIPE, model=replace(TIMED, name="plain"))
    with pytest.raises(ValueError, match=r"plain has no time embedding; set model.options.time_embedding=false"):
        job.train_run(recipe, tmp_path / "nowhere.h5", Run(tmp_path / "run"))
    assert not list(tmp_path.iterdir())


def test_time_arguments_of_wrong_shape_are_rejected():
    forecaster, history = forecaster_of(2), torch.zeros(2, 1, POINTS, 1).double()
    with pytest.raises(ValueError, match=r"pass `time` with one number for each of 2 samples, got none\."):
        forecaster.rollout(history, 3)
    with pytest.raises(ValueError, match=r"for each of 2 samples, got a shape of \(1,\)"):
        forecaster(history, time=torch.zeros(1))
    with pytest.raises(ValueError, match=r"Expected times of shape \(2, 4\), .*, got \(3, 4\)"):
        forecaster.rollout(history, 4, time=torch.zeros(3))
    for shape in ((2, 2), (1, 5), (5,)):
        with pytest.raises(ValueError, match=r"Expected times of shape \(2, 4\), "):
            rollout(forecaster, history, 4, times=torch.zeros(shape))
    with pytest.raises(ValueError, match=r"The unit of time is 0.0; it must be positive"):
        TimeScale(0.0, 0.0)
    with pytest.raises(ValueError, match="conditions is -1; it must be at least 0"):
        replace(TIMED.config(TASK), conditions=-1)
