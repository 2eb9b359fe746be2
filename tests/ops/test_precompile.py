"""Kernels compiled in parallel before the first update: the same ones, the same code, and nothing else changes."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
import triton
from triton.runtime.interpreter import InterpretedFunction

from sigmasolver.models import build_model
from sigmasolver.ops import dispatch, precompile
from sigmasolver.ops.fused.adamw import FusedAdamW
from sigmasolver.ops.fused.weight_cache import WeightCache
from sigmasolver.recipes import changed, recipe_of
from sigmasolver.runtime.parallel import World
from sigmasolver.train import capture
from sigmasolver.train.dry_run import Rehearsal
from sigmasolver.train.engine import Execution
from tests.ops.device import DEVICE, gpu


def precompiled(how, task, model, folder):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.ops.precompiled", how, task, model, str(folder)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is off")
def test_a_dry_step_asks_for_what_an_update_launches(monkeypatch, tmp_path):
    """An update as it is captured, run by Triton's interpreter, against a step without kernels, by name and number."""
    from tests.ops.precompiled import stepper_of

    stepper, launched = stepper_of("kf2d", "transolver-sigma"), []
    stepper._update(1)  # with plain operations: makes the optimiser's states
    monkeypatch.setattr(dispatch, "interpreted", True)
    weights, fused = WeightCache(stepper.model.parameters()), FusedAdamW(stepper.optimiser)
    interpreted = InterpretedFunction.run
    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", lambda *args, **options: None)
        stepper._gradients(1, weights.learn())
    weights.fill()
    gradients = fused._gradients = [one.grad for one in stepper.model.parameters()]  # alive while the kernel reads them
    assert all(one is not None for one in gradients)
    fused.fill()

    def run(kernel, *args, **options):
        launched.append(kernel.fn.__name__)
        return interpreted(kernel, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    stepper._update(1, weights.use(), fused.step)
    found = precompiled("names", "kf2d", "transolver-sigma", tmp_path)["names"]
    assert found == Counter(launched) and {"update_backward", "arrange_weights", "adamw_step"} <= set(found)


def test_in_parallel_as_one_by_one(tmp_path):
    """A U-Net with batch norms, whose buffers a dry step would change."""
    found = precompiled("compile", "darcy", "unet-batchnorm", tmp_path)
    assert len(found["serial"]) >= len(found["names"]) >= 4
    assert found["parallel"] == found["serial"] == found["after an error"]
    on_disk = {path.parent.name for path in (tmp_path / "parallel").rglob("*.cubin")}
    assert on_disk == {path.parent.name for path in (tmp_path / "serial").rglob("*.cubin")}
    assert len(on_disk) == len(found["serial"])
    otherwise = set(found["changed otherwise"])
    assert {"random", "lift.0.weight.grad"} <= otherwise and any("running" in name for name in otherwise)
    assert found["changed"] == []


def test_reasons_to_compile_one_by_one(monkeypatch):
    def solver():
        return build_model("transolver-sigma", grid=(8, 8), in_channels=1, out_channels=1, width=16, depth=1, heads=2)

    class Foreign(nn.Linear):
        pass

    def reason(model):
        return precompile.why_serial(model.to(DEVICE))

    if DEVICE == "cpu":
        assert reason(solver()) == "the tensor is not on a GPU"
        monkeypatch.setattr(dispatch, "interpreted", True)
        assert reason(solver()) == "Triton's interpreter is on"
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    assert reason(solver()) is None
    assert reason(nn.Sequential(solver(), Foreign(1, 1))) == "Foreign may index with arbitrary numbers"
    assert reason(nn.Identity()) == "the model has no parameters"
    hooked = solver()
    hooked.readout.register_forward_hook(lambda *_: None)
    assert reason(hooked) == "a forward hook is registered on the model"
    hooked = solver()
    hooked.readout.weight.register_hook(lambda gradient: gradient)
    assert reason(hooked) == "a hook is registered on a parameter"
    with dispatch.plain():
        assert reason(solver()) == "fused kernels are disabled"
    with monkeypatch.context() as patch:
        patch.delattr(triton, "AsyncCompileMode")
        assert reason(solver()) == f"Triton {triton.__version__} cannot compile in threads"
    monkeypatch.setattr(precompile, "_enabled", lambda: False)
    assert reason(solver()) == "SIGMASOLVER_PRECOMPILE is 0"


# --- on a GPU


class Compilations:
    """Names of the kernels that Triton compiles."""

    def __init__(self, monkeypatch):
        self.names = []
        monkeypatch.setattr(triton.knobs.compilation, "listener", self)

    def __call__(self, *, src, metadata, metadata_group, times, cache_hit):
        if not cache_hit:
            self.names.append(src.name)


def rehearsal(model="transolver-sigma", *settings):
    sizes = ("task.grid=(32,32)", "model.width=32", "model.depth=2", "model.heads=4", "model.slices=8", "model.modes=4")
    recipe = changed(recipe_of("kf2d", model, 0), [*sizes, "train.batch=2", "train.precision=bf16", *settings])
    return Rehearsal(recipe, Execution(World(device=torch.device("cuda")), "graph"))


@gpu
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("transolver-sigma", ()),
        ("transolver-sigma", ("train.noise=0.1", "train.ema=0.9", "model.options.dropout=0.1")),
        ("transolver-sigma", ("train.recompute=true", "train.clip=1.0")),
        ("ffno", ()),
    ],
)
def test_the_losses_are_the_same_bit_for_bit(monkeypatch, model, settings):
    def losses():
        torch.manual_seed(0)
        update, found = rehearsal(model, *settings), []
        for _ in range(6):
            update()
            found.append(update.loss.clone())
        return torch.stack(found).cpu(), [one.detach().cpu() for one in update.stepper.kept.parameters()]

    with_it = losses()
    monkeypatch.setattr(precompile, "_enabled", lambda: False)
    without = losses()
    assert torch.isfinite(with_it[0]).all() and torch.equal(with_it[0], without[0])
    assert all(torch.equal(one, other) for one, other in zip(with_it[1], without[1], strict=True))


@gpu
def test_nothing_is_compiled_after_the_dry_step(monkeypatch, tmp_path):
    """In a width that no other test has; the kernels of the captured step are there too, and all are loaded."""
    from sigmasolver.ops.fused.parameter_kernels import adamw_step, arrange_weights
    from sigmasolver.ops.fused.slice_update import update_backward

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    for kernel in (adamw_step, arrange_weights, update_backward):  # other tests may have compiled the same form
        kernel.device_caches.clear()
    seen, after = Compilations(monkeypatch), []
    ahead = capture.precompile

    def watched(work, model, stream):
        kernels = ahead(work, model, stream)
        assert kernels and all(kernel.module is not None for kernel in kernels)
        after.append(len(seen.names))
        return kernels

    monkeypatch.setattr(capture, "precompile", watched)
    update = rehearsal("transolver-sigma", "model.width=48", "model.heads=6")
    for _ in range(6):
        update()
    assert {"update_backward", "arrange_weights", "adamw_step"} <= set(seen.names)
    assert after == [len(seen.names)], seen.names[after[0] :]


@gpu
def test_other_streams_launch_meanwhile():
    """A kernel that another thread launches in its own stream runs, and is not taken for one of the step."""
    from sigmasolver.ops.fused.reductions import sum_partials

    parts = torch.randn(40, 16, device="cuda")
    model, side, found = nn.Linear(4, 4, device="cuda"), torch.cuda.Stream(), []

    def work():
        with torch.cuda.stream(torch.cuda.default_stream()):
            found.append(sum_partials(parts))

    with torch.cuda.stream(side):
        assert precompile.precompile(work, model, side) == []
    torch.testing.assert_close(found[0], parts.sum(0))
