"""Client of the worker process (worker.py) that reads foreign HDF5, MATLAB, NetCDF and Zarr files, because a damaged
file may crash their libraries.

One worker serves all files. It is started on first use, which takes about as long as importing h5py, and ends with this
process. If it crashes or exceeds its CPU time, the current file raises ValueError.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from sigmasolver.data import worker

__all__ = ["EXTRA", "UnreadableError", "ask", "check_file"]

SECONDS = 60.0
"""CPU time limit of a request, in addition to the time for its bytes."""
EXTRA = "pip install 'sigmasolver[data]'"
MIN_BYTES_PER_SECOND = 5e6
"""Lowest expected decompression rate."""


FOLDER_OPERATIONS = ("labelled", "labelled_box")
"""Operations that accept a folder, such as a Zarr group."""


class UnreadableError(Exception):
    """A library rejected a file, with the reason `kind` (another format) or `damage`."""


def check_file(path: Path) -> None:
    """Raise ValueError unless this is a regular file: reading a pipe or device could block forever."""
    if not path.exists():
        raise ValueError(f"{path} not found.")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file; save its contents as one.")


class _Process:
    """The worker process, which answers requests in order."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        # Not -m, which would import the package, nor -I, which would ignore a PYTHONPATH that provides h5py.
        self.child = subprocess.Popen(
            [sys.executable, "-P", worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray | None]:
        requests, answers = self.child.stdin, self.child.stdout
        assert requests is not None and isinstance(answers, io.BufferedReader)
        requests.write(json.dumps(request).encode() + b"\n")
        requests.flush()
        line = answers.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        answer = json.loads(line)
        if "shape" not in answer:
            return answer, None
        values = np.empty(answer["shape"], np.dtype(answer["dtype"]))
        if values.nbytes and answers.readinto(values.reshape(-1).view(np.uint8).data) != values.nbytes:
            raise EOFError
        return answer, values.T if answer["turned"] else values

    def end(self) -> int:
        self.child.kill()
        for stream in (self.child.stdin, self.child.stdout):
            if stream is not None:
                with suppress(BrokenPipeError):  # buffered bytes have no reader any more
                    stream.close()
        return self.child.wait()


_process: _Process | None = None
_lock = threading.Lock()


def ask(path: Path, operation: str, arguments: Sequence[Any] = (), nbytes: int = 0) -> Any:
    """Run an `operation` of the worker on a file; `nbytes`, the size of the result, extends the time limit."""
    global _process
    if operation not in FOLDER_OPERATIONS or not path.is_dir():
        check_file(path)
    seconds = SECONDS + nbytes / MIN_BYTES_PER_SECOND
    request = {"operation": operation, "arguments": [os.fsdecode(path.resolve()), *arguments], "seconds": seconds}
    with _lock:
        if _process is None or _process.owner != os.getpid() or _process.child.poll() is not None:
            _process = _Process()
        try:
            answer, values = _process.ask(request)
        except (EOFError, BrokenPipeError):
            status, _process = _exit_status(_process), None
            raise ValueError(_crash_message(path, status, seconds)) from None
        except BaseException:  # a partial answer may be left in the pipe
            _process.end()
            _process = None
            raise
    if "error" in answer:
        raise _error_for(path, answer["error"])
    return answer["value"] if values is None else values


def _exit_status(process: _Process) -> int:
    """Exit status of a worker that died."""
    try:
        status = process.child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        status = 0
    process.end()
    return status


def _crash_message(path: Path, status: int, seconds: float) -> str:
    if status == -getattr(signal, "SIGXCPU", 0):
        return f"Reading {path} did not finish within {seconds:.0f} s of CPU time, so it may be corrupt; save it again."
    if status == -getattr(signal, "SIGKILL", 0):
        return (
            f"{path} could not be read: the reader was killed, probably for lack of memory; split it into "
            "several files."
        )
    return f"{path} is corrupt and crashed the library that reads it; copy or download it again."


def _error_for(path: Path, reason: str) -> Exception:
    if reason == "permission":
        return ValueError(f"Permission denied: {path}.")
    if reason == "memory":
        return ValueError(f"{path} does not fit in memory; split it into several files.")
    if reason == "deep":
        return ValueError(f"{path} has groups nested more than {worker.DEEPEST} deep; flatten them.")
    if reason == "package":
        return ValueError(f"Reading {path} requires xarray, h5netcdf and zarr; install them with {EXTRA}.")
    if reason == "nameless":
        return ValueError(
            f"The arrays in {path} have no dimension names; write it with xarray, or with dimension_names "
            "such as count, time, x, y."
        )
    return UnreadableError(reason)


@atexit.register
def _end() -> None:
    if _process is not None and _process.owner == os.getpid():
        _process.end()
