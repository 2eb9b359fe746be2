"""Kernels compiled in parallel before the first update: the same kernels, the same code, and no other change."""

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

from sigmasolver.models import build_model, list_models
from sigmasolver.ops import dispatch, precompile
from sigmasolver.ops.fused.adamw import FusedAdamW
from sigmasolver.ops.fused.weight_cache import WeightCache
from sigmasolver.recipes import changed, recipe_of
from sigmasolver.runtime.parallel import World
from sigmasolver.train import capture
from sigmasolver.train.dry_run import DryRun
from sigmasolver.train.engine import Execution
from tests.ops.device import DEVICE, gpu


def precompiled(how, task, model, folder, **variables):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    command = [sys.executable, "-m", "tests.ops.precompiled", how, task, model, str(folder)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter is off")
def test_precompile_dry_run_requests_the_kernels_of_an_update(monkeypatch, tmp_path):
    """The kernels of a captured update in Triton's interpreter against those of a dry run, by name and count."""
    from tests.ops.precompiled import stepper_of

    stepper, launched = stepper_of("kf2d", "transolver-sigma"), []
    stepper._update(1)  # with plain operations: creates the states of the optimiser
    monkeypatch.setattr(dispatch, "interpreted", True)
    weights, fused = WeightCache(stepper.model.parameters()), FusedAdamW(stepper.optimiser)
    interpreted = InterpretedFunction.run
    with monkeypatch.context() as patch:
        patch.setattr(InterpretedFunction, "run", lambda *args, **options: None)
        stepper._forward_backward(1, weights.learn())
    weights.fill()
    gradients = fused._gradients = [p.grad for p in stepper.model.parameters()]  # alive while the kernel reads them
    assert all(gradient is not None for gradient in gradients)
    fused.fill()

    def run(kernel, *args, **options):
        launched.append(kernel.fn.__name__)
        return interpreted(kernel, *args, **options)

    monkeypatch.setattr(InterpretedFunction, "run", run)
    stepper._update(1, weights.use(), fused.step)
    names = precompiled("names", "kf2d", "transolver-sigma", tmp_path)["names"]
    assert names == Counter(launched) and {"update_backward", "arrange_weights", "adamw_step"} <= set(names)


def test_precompile_equals_serial_compilation(tmp_path):
    """A U-Net with batch norms, whose buffers a dry run would change."""
    compiled = precompiled("compile", "darcy", "unet-batchnorm", tmp_path)
    assert len(compiled["serial"]) >= len(compiled["names"]) >= 4
    assert compiled["parallel"] == compiled["serial"] == compiled["after an error"]
    assert compiled["compiled here"] == []
    assert len(compiled["compiled without a server"]) == len(compiled["serial"])
    on_disk = {path.parent.name for path in (tmp_path / "parallel").rglob("*.cubin")}
    assert on_disk == {path.parent.name for path in (tmp_path / "serial").rglob("*.cubin")}
    assert len(on_disk) == len(compiled["serial"])
    unprotected = set(compiled["changed otherwise"])
    assert {"random", "lift.0.weight.grad"} <= unprotected and any("running" in name for name in unprotected)
    assert compiled["changed"] == []


def test_server_compiles_what_a_step_launches(tmp_path):
    """Triton's description of a launch, sent as text, leads to the same entry of its cache, for every model."""
    pairs = precompiled("keys", "kf2d", ",".join(list_models()), tmp_path)
    assert tuple(pairs) == list_models()
    for launched, described in pairs.values():
        assert len(launched) >= 9 and launched == described


def test_kernels_request_fused_multiply_add(tmp_path):
    """Whatever Triton's default is: from 3.10 on, it does not fuse by itself."""
    fused, unfused = (
        precompiled("keys", "kf2d", "unet", tmp_path, TRITON_DEFAULT_FP_FUSION=default)["unet"][0] for default in "10"
    )
    # A key ends with the environment variables that Triton reads.
    assert len(fused) >= 9 and [key.rpartition("-[")[0] for key in fused] == [
        key.rpartition("-[")[0] for key in unfused
    ]


def test_why_serial_gives_each_reason(monkeypatch):
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
    """Names of the kernels that Triton compiles, or takes from its cache on disk."""

    def __init__(self, monkeypatch):
        self.names = []
        monkeypatch.setattr(triton.knobs.compilation, "listener", self)

    def __call__(self, *, src, **_):
        self.names.append(src.name)


def dry_run(model="transolver-sigma", *settings):
    sizes = ("task.grid=(32,32)", "model.width=32", "model.depth=2", "model.heads=4", "model.slices=8", "model.modes=4")
    recipe = changed(recipe_of("kf2d", model, 0), [*sizes, "train.batch=2", "train.precision=bf16", *settings])
    return DryRun(recipe, Execution(World(device=torch.device("cuda")), "graph"))


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
def test_precompile_leaves_losses_bitwise_equal(monkeypatch, model, settings):
    def losses():
        torch.manual_seed(0)
        update, values = dry_run(model, *settings), []
        for _ in range(6):
            update()
            values.append(update.loss.clone())
        return torch.stack(values).cpu(), [parameter.detach().cpu() for parameter in update.stepper.kept.parameters()]

    parallel = losses()
    monkeypatch.setattr(precompile, "_enabled", lambda: False)
    serial = losses()
    assert torch.isfinite(parallel[0]).all() and torch.equal(parallel[0], serial[0])
    assert all(torch.equal(a, b) for a, b in zip(parallel[1], serial[1], strict=True))


@gpu
def test_precompile_leaves_nothing_to_compile(monkeypatch, tmp_path):
    """With a width that no other test uses; the kernels of the captured step are included, and all are loaded."""
    from sigmasolver.ops.fused.parameter_kernels import adamw_step, arrange_weights
    from sigmasolver.ops.fused.slice_update import update_backward

    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    for kernel in (adamw_step, arrange_weights, update_backward):  # other tests may have compiled the same variant
        kernel.device_caches.clear()
    seen, after = Compilations(monkeypatch), []
    original = capture.precompile

    def observed(work, model, stream):
        kernels = original(work, model, stream)
        assert kernels and all(kernel.module is not None for kernel in kernels)
        after.append(len(seen.names))
        return kernels

    monkeypatch.setattr(capture, "precompile", observed)
    update = dry_run("transolver-sigma", "model.width=48", "model.heads=6")
    for _ in range(6):
        update()
    assert {"update_backward", "arrange_weights", "adamw_step"} <= set(seen.names)
    assert after == [len(seen.names)], seen.names[after[0] :]


@gpu
def test_precompile_leaves_other_streams_alone():
    """A kernel launched on another stream runs, and is not mistaken for one of the step."""
    from sigmasolver.ops.fused.reductions import sum_partials

    partials = torch.randn(40, 16, device="cuda")
    model, side, sums = nn.Linear(4, 4, device="cuda"), torch.cuda.Stream(), []

    def work():
        with torch.cuda.stream(torch.cuda.default_stream()):
            sums.append(sum_partials(partials))

    with torch.cuda.stream(side):
        assert precompile.precompile(work, model, side) == []
    torch.testing.assert_close(sums[0], partials.sum(0))
