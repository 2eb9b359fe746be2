"""Compile Triton kernels in separate processes: `python -m sigmasolver.ops.compile_server PIPE BACKEND ARCH WARP_SIZE`.

Building the IR of a kernel is Python code, a fifth of its compilation, so threads of one process wait for each other.
Here every kernel is compiled by a process of its own, forked after the imports, without a GPU; the result is the entry
in Triton's cache on disk.

Each line of the input is JSON: a number, module and name of the kernel, and Triton's description of its arguments. Each
line written to the file descriptor PIPE is the number of a request that has ended. An error is not reported: whoever
looks for the kernel in the cache does not find it, compiles it and gets the same error. At the end of the input the
server waits for its processes and exits.
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
from typing import Any, NoReturn

__all__ = ["CompileServer", "NamedTarget", "main"]

LIMIT = 300.0
"""Seconds to wait for a kernel before the server is killed: most take a few, more where many processes share a core."""


class CompileServer:
    """The server as a process of this one, with its modules and its cache; several threads may use it."""

    def __init__(self) -> None:
        triton = importlib.import_module("triton")
        target = importlib.import_module("triton.runtime").driver.active.get_current_target()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        environment |= {"TRITON_CACHE_DIR": str(triton.knobs.cache.dir), "TRITON_INTERPRET": "0"}
        self._reports, reports = os.pipe()  # not its output, where whatever it imports may print
        words = (reports, target.backend, target.arch, target.warp_size)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *map(str, words)],  # -P: no module from the current folder
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(reports,),
            text=True,
            start_new_session=True,  # out of reach of Ctrl-C, and with its processes a group
        )
        os.close(reports)
        self._lock = threading.Lock()
        self._waiting: dict[int, threading.Event] | None = {}
        """By number of the request; None once the server and its processes have exited."""
        self._numbers = itertools.count()
        threading.Thread(target=self._listen, daemon=True).start()

    def compile(self, description: tuple[str, str, str]) -> None:
        """Wait until the kernel is in the cache, or until its compilation has failed."""
        assert self._process.stdin is not None
        ended, number = threading.Event(), next(self._numbers)
        with self._lock:
            if self._waiting is None or self._process.stdin.closed:
                return
            self._waiting[number] = ended
            try:
                self._process.stdin.write(json.dumps((number, *description)) + "\n")
                self._process.stdin.flush()
            except BrokenPipeError:
                return
        if not ended.wait(LIMIT) and self._process.returncode is None:  # it keeps its number until then
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        assert self._process.stdin is not None
        with self._lock, suppress(BrokenPipeError):
            self._process.stdin.close()

    def _listen(self) -> None:
        with open(self._reports) as lines:
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
    reports, backend, arch, warp_size = sys.argv[1:]
    # Before the first request, and once for all processes.
    for module in ("torch", "triton.compiler.code_generator"):
        importlib.import_module(module)
    active_mode = importlib.import_module("triton.runtime._async_compile").active_mode
    target_type = importlib.import_module("triton.backends.compiler").GPUTarget
    target = target_type(backend, int(arch) if arch.isdecimal() else arch, int(warp_size))
    importlib.import_module("triton.runtime").driver.set_active(NamedTarget(target))
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where it is inherited as ignored, nobody can wait for a process
    for line in sys.stdin:
        number, *description = json.loads(line)
        token = active_mode.set(KeysOnly())
        with suppress(Exception):  # the process below gets the same error
            _compile(*description)  # hashes the compiler and the source
        active_mode.reset(token)
        if os.fork() == 0:
            _supervise(int(reports), number, description)
    with suppress(ChildProcessError):
        while True:
            os.wait()  # in a container nobody else may


def _compile(module: str, name: str, arguments: str) -> None:
    getattr(importlib.import_module(module), name).preload(arguments)


def _supervise(reports: int, number: int, description: list[str]) -> NoReturn:
    """Compile in one more process, and report that it has ended, in whatever way."""
    compiler = None
    try:
        compiler = os.fork()
        if compiler == 0:
            _compile(*description)
        else:
            os.waitpid(compiler, 0)
    finally:
        try:
            if compiler != 0:  # also if it could not be forked
                os.write(reports, f"{number}\n".encode())
        finally:
            os._exit(0)


if __name__ == "__main__":
    main()
