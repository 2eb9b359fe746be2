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
import json
import os
import signal
import sys

import torch  # noqa: F401  (before it is needed)
import triton.compiler.code_generator  # noqa: F401  (otherwise every process imports it)
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime._async_compile import active_mode

__all__ = ["NamedTarget", "main"]


class NamedTarget:
    """The part of a Triton driver that compilation needs, without a GPU."""

    def __init__(self, target: GPUTarget, device: int = 0) -> None:
        self.target, self.device = target, device

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return self.device  # the key of Triton's cache of compiled kernels


class KeysOnly:
    """In place of Triton's mode of compiling in threads: computes the key of a kernel in the cache, and no more."""

    def submit(self, key: str, *functions: object) -> None:
        pass


def main() -> None:
    backend, arch, warp_size = sys.argv[1:]
    driver.set_active(NamedTarget(GPUTarget(backend, int(arch) if arch.isdecimal() else arch, int(warp_size))))
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
        kernel.preload(arguments)  # hashes the compiler and the source here, once for all processes
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
