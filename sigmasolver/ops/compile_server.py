"""Compile Triton kernels in separate processes: `python -m sigmasolver.ops.compile_server BACKEND ARCH WARP_SIZE`.

Building the IR of a kernel is Python code, a fifth of its compilation, so threads of one process wait for each other.
Here every kernel is compiled by a process of its own, forked after the imports, without a GPU; the result is the entry
in Triton's cache on disk.

Each line of the input is JSON: a number, module and name of the kernel, and Triton's description of its arguments. Each
line of the output is the number of a request that has ended. An error is not reported: whoever looks for the kernel
in the cache does not find it, compiles it and gets the same error. At the end of the input the server exits.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

__all__ = ["CompileServer", "NamedTarget", "main"]


class CompileServer:
    """The server as a process of this one, with its modules and its cache; several threads may use it."""

    def __init__(self) -> None:
        triton = importlib.import_module("triton")
        target = importlib.import_module("triton.runtime").driver.active.get_current_target()
        words = (target.backend, target.arch, target.warp_size)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        environment |= {"TRITON_CACHE_DIR": str(triton.knobs.cache.dir), "TRITON_INTERPRET": "0"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, words)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # out of reach of Ctrl-C
        )
        self._lock = threading.Lock()
        self._waiting: dict[int, threading.Event] | None = {}
        """By number of the request; None once the server has exited."""
        self._numbers = itertools.count()
        threading.Thread(target=self._listen, daemon=True).start()

    def compile(self, description: tuple[str, str, str]) -> None:
        """Wait until the kernel is in the cache, or until its compilation has failed."""
        assert self._process.stdin is not None
        ended, number = threading.Event(), next(self._numbers)
        with self._lock:
            if self._waiting is None:
                return
            self._waiting[number] = ended
            try:
                self._process.stdin.write(json.dumps((number, *description)) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                return
        ended.wait()

    def close(self) -> None:
        assert self._process.stdin is not None
        with self._lock, suppress(BrokenPipeError):
            self._process.stdin.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                with self._lock:
                    if self._waiting is not None:
                        self._waiting.pop(int(line)).set()
        with self._lock:
            abandoned, self._waiting = self._waiting or {}, None
        for ended in abandoned.values():
            ended.set()
        self._process.wait()


class NamedTarget:
    """The part of a Triton driver that compilation needs, without a GPU."""

    def __init__(self, target: Any, device: int = 0) -> None:
        self.target, self.device = target, device

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.device  # the key of Triton's cache of compiled kernels


class KeysOnly:
    """In place of Triton's mode of compiling in threads: computes the key of a kernel in the cache, and no more."""

    def submit(self, key: str, *functions: object) -> None:
        pass


def main() -> None:
    backend, arch, warp_size = sys.argv[1:]
    # Before the first request, and once for all processes.
    for module in ("torch", "triton.compiler.code_generator"):
        importlib.import_module(module)
    active_mode = importlib.import_module("triton.runtime._async_compile").active_mode
    target_type = importlib.import_module("triton.backends.compiler").GPUTarget
    target = target_type(backend, int(arch) if arch.isdecimal() else arch, int(warp_size))
    importlib.import_module("triton.runtime").driver.set_active(NamedTarget(target))
    numbers: dict[int, str] = {}

    def report(*_: object) -> None:
        while numbers:
            process, _status = os.waitpid(-1, os.WNOHANG)
            if not process:
                return
            os.write(sys.stdout.fileno(), f"{numbers.pop(process)}\n".encode())

    signal.signal(signal.SIGCHLD, report)
    for line in sys.stdin:
        number, module, name, arguments = json.loads(line)
        kernel = getattr(importlib.import_module(module), name)
        token = active_mode.set(KeysOnly())
        kernel.preload(arguments)  # hashes the compiler and the source
        active_mode.reset(token)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # until the process has its number
        process = os.fork()
        if process == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the compiler waits for processes of its own
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            try:
                kernel.preload(arguments)
            finally:
                os._exit(0)
        numbers[process] = number
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


if __name__ == "__main__":
    main()
