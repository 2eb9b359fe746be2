"""Handlers of Ctrl-C and SIGTERM: never swallowed, never a traceback.

This module imports little, so that the handlers are installed before slow imports.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

__all__ = ["STOPPED", "TERMINATED", "Interrupts", "LostProcessError", "Termination"]

STOPPED = "sigmasolver: stopped; the same command resumes."


TERMINATED = 128 + signal.SIGTERM
"""Exit code of a command stopped by SIGTERM."""


class LostProcessError(ValueError):
    """Another process of a distributed training ended or cannot be reached."""


class Interrupts:
    """Context manager that remembers Ctrl-C: a KeyboardInterrupt raised inside a lock of the standard library may be
    lost or turn into another error.

    Progress bars call `raise_if_interrupted` at every step, which raises a lost interrupt again. During an import the
    process exits at once, because the imported module may catch the interrupt or fail half-way with another error;
    files survive this like a kill.
    """

    requested = False

    def __enter__(self) -> None:
        Interrupts.requested = False
        # Keep another handler, and SIG_IGN, which a background process inherits.
        self.installed = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self.installed:
            signal.signal(signal.SIGINT, self._on_signal)

    def __exit__(self, *_: object) -> None:
        if self.installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        Interrupts.requested = False

    @staticmethod
    def _on_signal(number: int, frame: FrameType | None) -> None:
        Interrupts.requested = True
        if _importing(frame):
            os.write(2, f"{STOPPED}\n".encode())
            os._exit(130)
        signal.default_int_handler(number, frame)

    @staticmethod
    def raise_if_interrupted() -> None:
        if Interrupts.requested:
            raise KeyboardInterrupt


class Termination:
    """Context manager that turns SIGTERM, which a cluster sends before it reclaims a machine, into a flag: work that
    saves its state stops at the next safe point.

    Outside of it SIGTERM ends the process at once; files survive this like a kill.
    """

    requested = False

    def __enter__(self) -> None:
        Termination.requested = False
        self.installed = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self.installed:
            signal.signal(signal.SIGTERM, self._on_signal)

    def __exit__(self, *_: object) -> None:
        if self.installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @staticmethod
    def _on_signal(number: int, frame: FrameType | None) -> None:
        Termination.requested = True


def _importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None
