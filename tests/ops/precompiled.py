"""The kernels of one update, without a GPU: `python -m tests.ops.precompiled names|compile TASK MODEL FOLDER`.

The last line is JSON. A process of its own, since Triton's interpreter is on wherever tests run without a GPU.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from triton import knobs

from sigmasolver.ops.precision import matmul_precision
from sigmasolver.ops.precompile import intercept_launches, precompile
from sigmasolver.recipes import changed, recipe_of
from sigmasolver.train.capture import launch_all
from sigmasolver.train.dry_run import Rehearsal
from sigmasolver.train.engine import Execution, Stepper
from tests.ops.compiled import pretend

SIZES = ("task.grid=(8,8)", "model.width=16", "model.depth=1", "model.heads=2", "model.slices=4", "model.modes=2")
SETTINGS = (*SIZES, "train.batch=2", "train.precision=bf16", "train.noise=0.1")


def stepper_of(task: str, model: str) -> Stepper:
    """About to make its first update, on a CPU."""
    rehearsal = Rehearsal(changed(recipe_of(task, model, 0), SETTINGS), Execution())
    rehearsal.stepper._fetch(0)
    return rehearsal.stepper


def work_of(stepper: Stepper) -> Callable[[], None]:
    return partial(launch_all, partial(stepper._gradients, 1), stepper.model, stepper.optimiser)


class Compiler:
    """Compiles the kernels of a step in several ways, each time as in a new process with an empty cache."""

    def __init__(self, stepper: Stepper, folder: str) -> None:
        self.stepper, self.folder, self.work = stepper, folder, work_of(stepper)
        self.functions: list[Any] = []
        with intercept_launches(lambda compile: self.functions.append(compile.args[0])):  # type: ignore[attr-defined]
            self.work()
        self._fresh("begin")

    def names(self) -> dict[str, int]:
        return Counter(function.__name__ for function in self.functions)

    def serial(self) -> dict[str, str]:
        self._fresh("serial")
        return self._one_by_one()

    def parallel(self) -> dict[str, str]:
        self._fresh("parallel")
        return _code(precompile(self.work, self.stepper.model))

    def after_an_error(self) -> dict[str, str]:
        """Compilations are on their way or waiting when the step fails; a later launch finds or compiles its kernel."""
        self._fresh("error")

        def work() -> None:
            self.work()
            raise MemoryError

        try:
            precompile(work, self.stepper.model)
        except MemoryError:
            return self._one_by_one()
        return {}

    def changed_by(self, work: Callable[[], object]) -> list[str]:
        before = self._state()
        work()
        after = self._state()
        return [name for name, value in after.items() if not _equal(value, before[name])]

    def _state(self) -> dict[str, Any]:
        model, optimiser = self.stepper.model, self.stepper.optimiser
        values = {name: one.clone() for name, one in model.state_dict().items()} | {"loss": self.stepper.loss.clone()}
        gradients = {f"{name}.grad": one.grad for name, one in model.named_parameters()}
        return values | gradients | {"random": torch.get_rng_state(), "optimiser": len(optimiser.state)}

    def _one_by_one(self) -> dict[str, str]:
        made: list[Any] = []
        with intercept_launches(lambda compile: made.append(compile())):
            self.work()
        return _code(made)

    def _fresh(self, name: str) -> None:
        knobs.cache.dir = f"{self.folder}/{name}"
        for function in self.functions:
            function.device_caches.clear()
        self.stepper.optimiser.zero_grad(set_to_none=True)


def _code(kernels: list[Any]) -> dict[str, str]:
    """Checksums of machine code by the key in Triton's cache."""
    return {kernel.hash: hashlib.sha256(kernel.asm["cubin"]).hexdigest() for kernel in kernels}


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one is other or (isinstance(one, int) and one == other)


def main() -> None:
    how, task, model, folder = sys.argv[1:]
    pretend("H200")
    with matmul_precision("bf16"):
        compiler = Compiler(stepper_of(task, model), folder)
        found: dict[str, Any] = {"names": compiler.names()}
        if how == "compile":
            found["changed"] = compiler.changed_by(lambda: found.update(parallel=compiler.parallel()))
            found["serial"], found["after an error"] = compiler.serial(), compiler.after_an_error()
            with intercept_launches(lambda compile: None):
                found["changed otherwise"] = compiler.changed_by(compiler.work)
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
