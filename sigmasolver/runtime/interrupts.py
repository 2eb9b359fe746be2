"""Ctrl-C and SIGTERM: never swallowed, never a traceback. Light, so that Ctrl-C is heard before slow imports."""

from __future__ import annotations

import os
import signal
from types import FrameType

__all__ = ["STOPPED", "TERMINATED", "Interrupts", "LostProcessError", "Termination"]

STOPPED = "sigmasolver: stopped; the same command resumes."


TERMINATED = 128 + signal.SIGTERM
"""Exit code of a command that SIGTERM stopped."""


class LostProcessError(ValueError):
    """Another process of this training ended or cannot be reached."""


class Interrupts:
    """Ctrl-C, remembered: raised inside a lock of the standard library it may come out as another error, or get lost.

    What moves a bar looks here, so that a lost one is raised again with the next step. A module that is being imported
    may catch anything, or fail half-way with an error of its own; there the process ends at once, as if killed, which
    no file minds.
    """

    asked = False

    def __enter__(self) -> None:
        Interrupts.asked = False
        # What ignores Ctrl-C, as in the background, or hears it otherwise goes on doing so.
        self.ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self.ours:
            signal.signal(signal.SIGINT, self._heard)

    def __exit__(self, *_: object) -> None:
        if self.ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        Interrupts.asked = False

    @staticmethod
    def _heard(number: int, frame: FrameType | None) -> None:
        Interrupts.asked = True
        if _importing(frame):
            os.write(2, f"{STOPPED}\n".encode())
            os._exit(130)
        signal.default_int_handler(number, frame)

    @staticmethod
    def heed() -> None:
        if Interrupts.asked:
            raise KeyboardInterrupt


class Termination:
    """SIGTERM, by which a cluster asks for its machine: inside, work that saves its state stops at its next safe point.

    Elsewhere SIGTERM ends the process at once, which no file minds.
    """

    asked = False

    def __enter__(self) -> None:
        Termination.asked = False
        self.ours = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self.ours:
            signal.signal(signal.SIGTERM, self._heard)

    def __exit__(self, *_: object) -> None:
        if self.ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @staticmethod
    def _heard(number: int, frame: FrameType | None) -> None:
        Termination.asked = True


def _importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None
