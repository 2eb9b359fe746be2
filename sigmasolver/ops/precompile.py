"""Compile the kernels of a step in parallel before it first runs.

Triton compiles a kernel on its first launch, while the step waits: half a minute for a training step. `precompile` does
a dry run of the step that launches no kernels, and compiles everything it requested at once: processes compile for
Triton's cache on disk (`ops.compile_server`; they start during the dry run), then threads take the kernels from there,
build the launchers and load the kernels onto the GPU. Afterwards every launch finds its kernel. If all kernels are in
the cache, no process is started; what a process fails to compile, a thread compiles.

No kernel writes its results in the dry run, so the values are arbitrary, and everything that could retain them is
restored: gradients, buffers, random generators. Precompilation is meant for steps that can be captured as a CUDA graph,
whose host code cannot depend on values. Errors propagate, as the first real step would fail in the same way.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sigmasolver.ops.compile_server import CompileServer
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
    compilations = _Compilations(None if stream is None else stream.device)

    class Mode(triton.AsyncCompileMode):  # type: ignore[misc, name-defined]
        def submit(self, key: str, *functions: Callable[..., Any]) -> Any:
            compilations.key = key
            return super().submit(key, *functions)

    mode = Mode(compilations)

    def submit(compile: Callable[[], object]) -> None:
        token = active_mode.set(mode)  # for each launch: autograd runs the backward pass in another thread
        try:
            compile()
        finally:
            active_mode.reset(token)

    try:
        with _lock, _preserve_state(model, stream), compilations.described(), intercept_launches(submit, stream):
            work()
        compilations.start()
        return [kernel.result() for kernel in list(mode.future_kernels.values())]
    except BaseException:
        compilations.cancel()
        for kernel in list(mode.future_kernels.values()):
            if kernel.future is not None and kernel.future.cancelled():
                kernel.result(ignore_errors=True)  # so that a later launch compiles it
        raise
    finally:
        compilations.close()


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


class _Compilations:
    """Executor to which Triton submits the compilations of a dry run, deferred until `start`."""

    def __init__(self, device: torch.device | None) -> None:
        self.device = device
        self.key = ""
        """Key of the next submission in Triton's cache."""
        self.description: Any = None
        """Of the next submission: module, name and arguments of the kernel, as the server takes them."""
        self._submitted: list[tuple[Future[Any], Callable[[], Any], Any]] = []
        self._server: CompileServer | None = None
        # Ctrl-C is for the main thread; an interrupted compiler would be reported as broken.
        arguments = (signal.SIG_BLOCK, {signal.SIGINT})
        self._pool = ThreadPoolExecutor(initializer=signal.pthread_sigmask, initargs=arguments)

    @contextmanager
    def described(self) -> Iterator[None]:
        """Let Triton describe every kernel before it is submitted, so that another process can compile it."""
        knobs = importlib.import_module("triton").knobs.runtime
        other = knobs.jit_cache_hook

        def describe(*, fn: Any, compile: Any, **launch: Any) -> Any:
            self.description = fn.module, fn.name, compile["specialization_data"]
            return other(fn=fn, compile=compile, **launch) if other is not None else None

        knobs.jit_cache_hook = describe
        try:
            yield
        finally:
            knobs.jit_cache_hook = other

    def submit(self, compile: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        missing = not _is_on_disk(self.key)
        if missing and self._server is None:
            self._server = CompileServer()
        self._submitted.append((future, compile, self.description if missing else None))
        return future

    def start(self) -> None:
        # Last launched first: the kernels of the backward pass, which take longest to compile.
        for submission in reversed(self._submitted):
            self._pool.submit(self._finish, *submission)

    def cancel(self) -> None:
        """Cancel the compilations that have not started."""
        for future, _, _ in self._submitted:
            future.cancel()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._server is not None:
            self._server.close()

    def _finish(self, future: Future[Any], compile: Callable[[], Any], description: Any) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            if description is not None and self._server is not None:
                self._server.compile(description)
            kernel = compile()
            if self.device is not None:
                with torch.cuda.device(self.device):
                    kernel.run  # noqa: B018  (the property builds the launcher and loads the binary)
            future.set_result(kernel)
        except BaseException as error:
            future.set_exception(error)


def _is_on_disk(key: str) -> bool:
    """Whether Triton's cache has a kernel; False if it is not a folder."""
    cache_of = importlib.import_module("triton.runtime.cache").get_cache_manager
    folder = getattr(cache_of(hashlib.sha256(key.encode()).hexdigest()), "cache_dir", None)
    return folder is not None and any(Path(folder).glob("__grp__*.json"))


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
