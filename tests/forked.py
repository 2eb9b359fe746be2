"""Run Python code in a separate process with torch and the package preloaded: a fork of a server that loads them once.

For tests of processes that are killed, stopped or run out of disk space; the startup of a command is tested with
`subprocess`.
"""

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMMAND = "from sigmasolver.__main__ import main; main()"
"""Code of a process that runs the command line with its arguments."""
PRELOADED = ["torch", "h5py", "pytest", "safetensors.torch", "sigmasolver.cli", "sigmasolver.train.job"]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


class Forked:
    """The part of `subprocess.Popen([sys.executable, "-c", code, *arguments], env=..., cwd=ROOT)` that tests need."""

    returncode: int | None = None

    def __init__(
        self, code: str, *arguments: object, env: Mapping[str, str] | None = None, stdout: int | None = None
    ) -> None:
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        descriptors = [DupFd(self._out.fileno() if stdout is None else stdout), DupFd(self._err.fileno())]
        process_arguments = (code, list(map(str, arguments)), dict(os.environ if env is None else env), *descriptors)
        self._process = _context.Process(target=_run, args=process_arguments)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        assert wait([self._process.sentinel], timeout), f"still running after {timeout} s"
        self._process.join()
        self.returncode = self._process.exitcode
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the process and return its stdout and stderr."""
        self.wait(timeout)
        outputs = []
        for file in (self._out, self._err):
            file.seek(0)
            outputs.append(file.read().decode())
        return outputs[0], outputs[1]


def check_output(code: str, *arguments: object) -> str:
    """Like `subprocess.check_output`."""
    process = Forked(code, *arguments)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def _run(code: str, arguments: list[str], environment: dict[str, str], out: Any, err: Any) -> None:
    os.dup2(out.detach(), 1)
    os.dup2(err.detach(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
