"""Compile the kernels of a step in parallel before it first runs.

Triton compiles a kernel on its first launch, while the step waits: half a minute for a training step. `precompile` does
a dry run of the step that launches no kernels, then compiles everything it requested in a thread pool, whose threads
also build the launchers and load the kernels onto the GPU. MLIR and LLVM release the GIL, and ptxas and the C compiler
are separate processes, so all cores are busy. Compilation starts after the dry run, which would otherwise keep waiting
for the GIL. Afterwards every launch finds its kernel. Kernels in Triton's cache on disk are only loaded.

No kernel writes its results in the dry run, so the values are arbitrary, and everything that could retain them is
restored: gradients, buffers, random generators. Precompilation is meant for steps that can be captured as a CUDA graph,
whose host code cannot depend on values. Errors propagate, as the first real step would fail in the same way.
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

__all__ = ["intercept_launches", "precompile", "why_serial"]

_lock = threading.Lock()


def precompile(work: Callable[[], object], model: nn.Module, stream: torch.cuda.Stream | None = None) -> list[Any]:
    """Compile the kernels that `work`, a step of `model` on `stream`, launches, and return them.

    The list is empty where `why_serial` gives a reason. `stream` must be the current one; launches by other threads on
    other streams run as usual. If it is None, there is no GPU, and kernels are compiled but not loaded.
    """
    if why_serial(model) is not None:
        return []
    triton = importlib.import_module("triton")
    active_mode = importlib.import_module("triton.runtime._async_compile").active_mode
    # Ctrl-C is for the main thread; an interrupted compiler would be reported as broken.
    pool = ThreadPoolExecutor(initializer=signal.pthread_sigmask, initargs=(signal.SIG_BLOCK, {signal.SIGINT}))
    loader = _Loader(pool, None if stream is None else stream.device)
    mode = triton.AsyncCompileMode(loader)

    def submit(compile: Callable[[], object]) -> None:
        token = active_mode.set(mode)  # for each launch: autograd runs the backward pass in another thread
        try:
            compile()
        finally:
            active_mode.reset(token)

    try:
        with _lock, _preserve_state(model, stream), intercept_launches(submit, stream):
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
    """The reason why kernels are compiled one by one on first launch; None if `precompile` compiles them up front."""
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
            return f"{type(module).__name__} may index with arbitrary numbers"  # and break the CUDA context
    if any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in model.parameters()):
        return "a hook is registered on a parameter"
    return first_hook({"the model": model})


@contextmanager
def intercept_launches(
    handle: Callable[[Callable[[], Any]], object], stream: torch.cuda.Stream | None = None
) -> Iterator[None]:
    """Replace launches of Triton kernels on `stream` (None: on any stream) by calls of `handle` with a function that
    compiles the kernel for its arguments and returns it."""
    jit: Any = importlib.import_module("triton.runtime.jit").JITFunction
    launch = jit.run

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if stream is not None and torch.cuda.current_stream(stream.device) != stream:
            return launch(kernel, *args, grid=grid, warmup=warmup, **options)
        return handle(partial(launch, kernel, *args, grid=grid, warmup=True, **options))

    jit.run = run
    try:
        yield
    finally:
        jit.run = launch


class _Loader:
    """Executor to which Triton submits its compilations, deferred until `start`. The thread that compiles a kernel also
    loads it onto the device."""

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
        """Cancel the compilations that have not started."""
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
def _preserve_state(model: nn.Module, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Clear the gradients inside the block; restore gradients, buffers and random generators afterwards."""
    gradients = [parameter.grad for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    try:
        with torch.random.fork_rng([] if stream is None else [stream.device]):
            for parameter in model.parameters():
                parameter.grad = None
            yield
    finally:
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, saved in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(saved)


@cache
def _enabled() -> bool:
    return os.environ.get("SIGMASOLVER_PRECOMPILE", "1") != "0"
