"""The kernels of one update, without a GPU: `python -m tests.ops.precompiled names|keys|compile TASK MODEL FOLDER`.

The last line of its output is JSON. This is a separate process, since tests without a GPU enable Triton's interpreter.
"""

import hashlib
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton import knobs
from triton.runtime._async_compile import active_mode
from triton.runtime.jit import JITFunction

from sigmasolver.ops.precision import matmul_precision
from sigmasolver.ops.precompile import _Compilations, intercept_launches, precompile
from sigmasolver.recipes import changed, recipe_of
from sigmasolver.train.capture import launch_all
from sigmasolver.train.dry_run import DryRun
from sigmasolver.train.engine import Execution, Stepper
from tests.ops.compiled import pretend

SIZES = ("task.grid=(16,16)", "model.width=16", "model.depth=1", "model.heads=2", "model.slices=4", "model.modes=2")
SETTINGS = (*SIZES, "train.batch=2", "train.precision=bf16", "train.noise=0.1")


def stepper_of(task: str, model: str) -> Stepper:
    """A stepper on a CPU before its first update."""
    dry_run = DryRun(changed(recipe_of(task, model, 0), SETTINGS), Execution())
    dry_run.stepper._fetch(0)
    return dry_run.stepper


def work_of(stepper: Stepper) -> Callable[[], None]:
    return partial(launch_all, partial(stepper._forward_backward, 1), stepper.model, stepper.optimiser)


class Compiler:
    """Compiles the kernels of a step in several ways, each time with empty caches, as in a new process."""

    def __init__(self, stepper: Stepper, folder: str) -> None:
        self.stepper, self.folder, self.work = stepper, folder, work_of(stepper)
        self.functions: list[Any] = []
        with intercept_launches(lambda compile: self.functions.append(compile.args[0])):  # type: ignore[attr-defined]
            self.work()
        self._clear_caches("begin")

    def names(self) -> dict[str, int]:
        return Counter(function.__name__ for function in self.functions)

    def serial(self) -> dict[str, str]:
        self._clear_caches("serial")
        return self._compile_serially()

    def parallel(self, folder: str = "parallel") -> dict[str, str]:
        self._clear_caches(folder)
        return _checksums(precompile(self.work, self.stepper.model))

    def compiled_here(self, compile: Callable[[], object]) -> list[str]:
        """Names of the kernels that `compile` compiles in this process, without a server."""
        names: list[str] = []

        def listen(*, src: Any, cache_hit: bool, **_: object) -> None:
            names.extend([] if cache_hit else [src.name])

        knobs.compilation.listener = listen
        compile()
        knobs.compilation.listener = None
        return names

    def after_an_error(self) -> dict[str, str]:
        """The step fails while compilations are running or pending; a later launch finds or compiles its kernel."""
        self._clear_caches("error")

        def work() -> None:
            self.work()
            raise MemoryError

        try:
            precompile(work, self.stepper.model)
        except MemoryError:
            return self._compile_serially()
        return {}

    def changed_by(self, work: Callable[[], object]) -> list[str]:
        before = self._state()
        work()
        after = self._state()
        return [name for name, value in after.items() if not _equal(value, before[name])]

    def _state(self) -> dict[str, Any]:
        model, optimiser = self.stepper.model, self.stepper.optimiser
        values = {name: x.clone() for name, x in model.state_dict().items()} | {"loss": self.stepper.loss.clone()}
        gradients = {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}
        return values | gradients | {"random": torch.get_rng_state(), "optimiser": len(optimiser.state)}

    def _compile_serially(self) -> dict[str, str]:
        kernels: list[Any] = []
        with intercept_launches(lambda compile: kernels.append(compile())):
            self.work()
        return _checksums(kernels)

    def _clear_caches(self, name: str) -> None:
        knobs.cache.dir = f"{self.folder}/{name}"
        for function in self.functions:
            function.device_caches.clear()
        self.stepper.optimiser.zero_grad(set_to_none=True)


class Keys:
    """In place of Triton's mode of compiling in threads: collects the keys of kernels in its cache."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def submit(self, key: str, *functions: object) -> None:
        self.keys.append(key)


def keys_of_launches_and_descriptions(stepper: Stepper) -> tuple[list[str], list[str]]:
    """Keys of the kernels that a dry run launches, and of those that a process compiles from their descriptions, in
    another order."""
    launched, described, compilations, descriptions = Keys(), Keys(), _Compilations(None), []

    def note(compile: Callable[[], object]) -> None:
        token = active_mode.set(launched)  # type: ignore[arg-type]
        compile()
        active_mode.reset(token)
        descriptions.append(json.dumps(compilations.description))

    with compilations.described(), intercept_launches(note):
        work_of(stepper)()
    _forget_hashes()
    token = active_mode.set(described)  # type: ignore[arg-type]
    for module, name, arguments in map(json.loads, reversed(descriptions)):
        getattr(importlib.import_module(module), name).preload(arguments)
    active_mode.reset(token)
    return launched.keys, described.keys[::-1]


def _forget_hashes() -> None:
    """As in a new process: Triton hashes a function once, when it is first launched or called."""
    for name, module in list(sys.modules.items()):
        for function in list(vars(module).values()) if name.startswith("sigmasolver.ops.fused") else ():
            if isinstance(function, JITFunction):
                function.hash, function.used_global_vals = None, {}


def _checksums(kernels: list[Any]) -> dict[str, str]:
    """Checksums of the machine code, by key in Triton's cache."""
    return {kernel.hash: hashlib.sha256(kernel.asm["cubin"]).hexdigest() for kernel in kernels}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return torch.equal(a, b)
    return a is b or (isinstance(a, int) and a == b)


def main() -> None:
    how, task, model, folder = sys.argv[1:]
    pretend("H200")
    with matmul_precision("bf16"):
        if how == "keys":
            pairs = {name: keys_of_launches_and_descriptions(stepper_of(task, name)) for name in model.split(",")}
            sys.stdout.write(json.dumps(pairs))
            return
        compiler = Compiler(stepper_of(task, model), folder)
        results: dict[str, Any] = {"names": compiler.names()}
        if how == "compile":
            results["compiled here"] = compiler.compiled_here(
                lambda: results.update(
                    changed=compiler.changed_by(lambda: results.update(parallel=compiler.parallel()))
                )
            )
            results["serial"], results["after an error"] = compiler.serial(), compiler.after_an_error()
            sys.executable = "false"
            results["compiled without a server"] = compiler.compiled_here(lambda: compiler.parallel("without"))
            with intercept_launches(lambda compile: None):
                results["changed otherwise"] = compiler.changed_by(compiler.work)
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
