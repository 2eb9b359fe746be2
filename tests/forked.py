"""Python code in a process of its own that has torch and the package loaded: a fork of a server that loads them once.

For what a process leaves behind when it is killed, stopped or refused room; what a command does from its very start is
tested with `subprocess`.
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
LOADED = ["torch", "h5py", "pytest", "safetensors.torch", "sigmasolver.cli", "sigmasolver.train.job"]
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(LOADED)


class Forked:
    """What `subprocess.Popen([sys.executable, "-c", code, *words], env=..., cwd=ROOT)` has, as far as tests need it."""

    returncode: int | None = None

    def __init__(
        self, code: str, *words: object, env: Mapping[str, str] | None = None, stdout: int | None = None
    ) -> None:
        self._out, self._err = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        ends = [DupFd(self._out.fileno() if stdout is None else stdout), DupFd(self._err.fileno())]
        work = (code, list(map(str, words)), dict(os.environ if env is None else env), *ends)
        self._process = _processes.Process(target=_run, args=work)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        assert wait([self._process.sentinel], timeout), f"it still runs after {timeout} s"
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
        """What it wrote, once it has ended."""
        self.wait(timeout)
        said = []
        for file in (self._out, self._err):
            file.seek(0)
            said.append(file.read().decode())
        return said[0], said[1]


def check_output(code: str, *words: object) -> str:
    """As `subprocess.check_output`."""
    process = Forked(code, *words)
    out, err = process.communicate()
    assert process.returncode == 0, err
    return out


def _run(code: str, words: list[str], environment: dict[str, str], out: Any, err: Any) -> None:
    os.dup2(out.detach(), 1)
    os.dup2(err.detach(), 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    sys.argv = ["-c", *words]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
