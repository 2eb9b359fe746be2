"""Foreign HDF5, MATLAB, NetCDF and Zarr files are read by a process of its own (worker.py), which a damaged file may
crash.

One such process serves all files. It is started when first needed, in the time that importing h5py takes, and ends
with this one. If it dies or computes without end, the file at hand is refused with a sentence.
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
"""Computing time that a request may take, beyond what its bytes take."""
EXTRA = "pip install 'sigmasolver[data]'"
SLOWEST = 5e6
"""Bytes that are decompressed in a second at the least."""


ON_FOLDERS = ("labelled", "labelled_box")
"""What can be asked of a folder: Zarr groups are some."""


class UnreadableError(Exception):
    """The libraries' objection to a file: `kind` (another kind of file) or `damage`."""


def check_file(path: Path) -> None:
    """Refuse what is no file: a pipe or a device could be waited on for ever."""
    if not path.exists():
        raise ValueError(f"{path} not found.")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file; save its contents as one.")


class _Process:
    """The worker; its answers come in the order of the requests."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        # No -m, which would import the package, and no -I, which would lose a PYTHONPATH that h5py may come from.
        self.child = subprocess.Popen(
            [sys.executable, "-P", worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], np.ndarray | None]:
        questions, answers = self.child.stdin, self.child.stdout
        assert questions is not None and isinstance(answers, io.BufferedReader)
        questions.write(json.dumps(request).encode() + b"\n")
        questions.flush()
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
                with suppress(BrokenPipeError):  # what was still to be written has no reader
                    stream.close()
        return self.child.wait()


_process: _Process | None = None
_turn = threading.Lock()


def ask(path: Path, operation: str, arguments: Sequence[Any] = (), nbytes: int = 0) -> Any:
    """What the worker's `operation` gives for this file; an array of about `nbytes` bytes takes its time."""
    global _process
    if operation not in ON_FOLDERS or not path.is_dir():
        check_file(path)
    seconds = SECONDS + nbytes / SLOWEST
    request = {"operation": operation, "arguments": [os.fsdecode(path.resolve()), *arguments], "seconds": seconds}
    with _turn:
        if _process is None or _process.owner != os.getpid() or _process.child.poll() is not None:
            _process = _Process()
        try:
            answer, values = _process.ask(request)
        except (EOFError, BrokenPipeError):
            status, _process = _status(_process), None
            raise ValueError(_last_words(path, status, seconds)) from None
        except BaseException:  # half an answer may be left in the pipe
            _process.end()
            _process = None
            raise
    if "error" in answer:
        raise _objection(path, answer["error"])
    return answer["value"] if values is None else values


def _status(process: _Process) -> int:
    """How it died."""
    try:
        status = process.child.wait(timeout=5)
    except subprocess.TimeoutExpired:
        status = 0
    process.end()
    return status


def _last_words(path: Path, status: int, seconds: float) -> str:
    if status == -getattr(signal, "SIGXCPU", 0):
        return f"Reading {path} did not finish within {seconds:.0f} s of CPU time, so it may be corrupt; save it again."
    if status == -getattr(signal, "SIGKILL", 0):
        return (
            f"{path} could not be read: the reader was killed, probably for lack of memory; split it into "
            "several files."
        )
    return f"{path} is corrupt and crashed the library that reads it; copy or download it again."


def _objection(path: Path, reason: str) -> Exception:
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
