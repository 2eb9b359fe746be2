"""The kernels of a step, compiled in parallel before it first runs.

Triton compiles a kernel when it is first launched, and the step waits: for a training step half a minute. `precompile`
runs the step once without launching its kernels, and then compiles all that it asked for in a pool of threads, which
also build the launchers and load the kernels onto the GPU. MLIR and LLVM release the GIL, and ptxas and the C compiler
are processes of their own, so all cores work. They start after the step, which would otherwise wait for the GIL again
and again. Afterwards every launch finds its kernel. What is in Triton's cache on disk is only loaded.

In that run no kernel writes its results, so the numbers are arbitrary and everything that could keep them is put back:
gradients, buffers, random generators. It is for steps that can be captured as a CUDA graph, whose host code cannot
depend on numbers. An error in it is raised, as the first real step would fail in the same way.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from sigmasolver.ops.dispatch import first_hook, why_plain

__all__ = ["intercepted", "precompile", "why_serial"]

_one_at_a_time = threading.Lock()


def precompile(work: Callable[[], object], model: nn.Module, stream: torch.cuda.Stream | None = None) -> list[Any]:
    """Compile what `work`, a step of `model` in `stream`, launches; the kernels. Empty where `why_serial` has a reason.

    `stream` must be the current one; what others launch meanwhile in other streams runs as ever. None: there is no GPU,
    and kernels are compiled but not loaded.
    """
    if why_serial(model) is not None:
        return []
    triton = importlib.import_module("triton")
    active_mode = importlib.import_module("triton.runtime._async_compile").active_mode
    # Ctrl-C is for the main thread; a compiler that it stopped would be reported as broken.
    pool = ThreadPoolExecutor(initializer=signal.pthread_sigmask, initargs=(signal.SIG_BLOCK, {signal.SIGINT}))
    loader = _Loader(pool, None if stream is None else stream.device)
    mode = triton.AsyncCompileMode(loader)

    def submit(compile: Callable[[], object]) -> None:
        token = active_mode.set(mode)  # by launch: a backward pass runs in a thread of its own
        try:
            compile()
        finally:
            active_mode.reset(token)

    try:
        with _one_at_a_time, _unchanged(model, stream), intercepted(submit, stream):
            work()
        loader.start()
        return [kernel.result() for kernel in list(mode.future_kernels.values())]
    except BaseException:
        loader.cancel()
        for kernel in list(mode.future_kernels.values()):
            if kernel.future is not None and kernel.future.cancelled():
                kernel.result(ignore_errors=True)  # so that a later launch compiles it
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def why_serial(model: nn.Module) -> str | None:
    """Why kernels are compiled one by one as they are first launched; None: `precompile` compiles them in parallel."""
    parameter = next(model.parameters(), None)
    if parameter is None:
        return "the model has no parameters"
    reason = why_plain(parameter)
    if reason is not None:
        return reason
    if not _enabled():
        return "SIGMASOLVER_PRECOMPILE is 0"
    triton = importlib.import_module("triton")
    if triton.knobs.runtime.interpret:
        return "Triton's interpreter is on"
    if not hasattr(triton, "AsyncCompileMode"):
        return f"Triton {triton.__version__} cannot compile in threads"
    for module in model.modules():
        if type(module).__module__.partition(".")[0] not in ("sigmasolver", "torch"):
            return f"{type(module).__name__} may index with arbitrary numbers"  # which ends all work on the GPU
    if any(one._backward_hooks or one._post_accumulate_grad_hooks for one in model.parameters()):
        return "a hook is registered on a parameter"
    return first_hook({"the model": model})


@contextmanager
def intercepted(
    instead: Callable[[Callable[[], Any]], object], stream: torch.cuda.Stream | None = None
) -> Iterator[None]:
    """Inside, a launch of a Triton kernel in `stream` (None: in any) calls `instead` with what would compile that
    kernel for its arguments and return it."""
    jit: Any = importlib.import_module("triton.runtime.jit").JITFunction
    launch = jit.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if stream is not None and torch.cuda.current_stream(stream.device) != stream:
            return launch(kernel, *args, grid=grid, warmup=warmup, **options)
        return instead(partial(launch, kernel, *args, grid=grid, warmup=True, **options))

    jit.run = run
    try:
        yield
    finally:
        jit.run = launch


class _Loader:
    """Where Triton submits its compilations, which wait for `start`. A compiled kernel is loaded onto the device in the
    same thread."""

    def __init__(self, pool: ThreadPoolExecutor, device: torch.device | None) -> None:
        self.pool, self.device = pool, device
        self.submitted: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, compile: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self.submitted.append((future, compile))
        return future

    def start(self) -> None:
        for future, compile in self.submitted:
            self.pool.submit(self._finish, future, compile)

    def cancel(self) -> None:
        """Drop what no thread has begun."""
        for future, _ in self.submitted:
            future.cancel()

    def _finish(self, future: Future[Any], compile: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            kernel = compile()
            if self.device is not None:
                with torch.cuda.device(self.device):
                    kernel.run  # noqa: B018  (the property builds the launcher and loads the binary)
            future.set_result(kernel)
        except BaseException as error:
            future.set_exception(error)


@contextmanager
def _unchanged(model: nn.Module, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Inside, the model has no gradients; afterwards gradients, buffers and random generators are as they were."""
    gradients = [one.grad for one in model.parameters()]
    buffers = [one.clone() for one in model.buffers()]
    try:
        with torch.random.fork_rng([] if stream is None else [stream.device]):
            for parameter in model.parameters():
                parameter.grad = None
            yield
    finally:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)


@cache
def _enabled() -> bool:
    return os.environ.get("SIGMASOLVER_PRECOMPILE", "1") != "0"
