"""Training curves in other tools, by callbacks.

A watch is a callback that takes a `Progress`. The progress bar is one, `tensorboard` returns another, and one for any
other service takes three lines (docs/tracking.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sigmasolver.runs import Run
from sigmasolver.train.loop import Progress

__all__ = ["Watch", "combine_watches", "tensorboard"]

Watch = Callable[[Progress], None]


def combine_watches(*watches: Watch | None) -> Watch | None:
    """Combine callbacks into one; return None if there are none."""
    present = [watch for watch in watches if watch is not None]

    def watch(progress: Progress) -> None:
        for callback in present:
            callback(progress)

    return watch if present else None


@contextmanager
def tensorboard(folder: str | Path | None, run: Run) -> Iterator[Watch | None]:
    """Write event files of a training into `folder`/NAME OF THE RUN; with None, write nothing.

    A resumed run continues in the same folder: TensorBoard hides events beyond the step from which it resumes.
    """
    if folder is None:
        yield None
        return
    try:
        from torch.utils.tensorboard.writer import SummaryWriter
    except ImportError:
        raise ValueError(
            "--tensorboard requires TensorBoard; install it with pip install 'sigmasolver[tracking]'."
        ) from None
    target = Path(folder) / run.path.resolve().name
    writers: list[Any] = []
    last_error: list[float | None] = [None]

    def watch(progress: Progress) -> None:
        if not writers:  # the step from which the run resumes is not known before
            writers.append(SummaryWriter(str(target), purge_step=progress.step))
            writers[0].add_text("recipe", f"```\n{json.dumps(run.recipe(), indent=2)}\n```", progress.step)
        values = {"loss": progress.loss, "learning rate": progress.rate, "steps per second": progress.steps_per_second}
        if progress.error is not None and progress.error != last_error[0]:
            values["validation error"] = last_error[0] = progress.error
        for name, value in values.items():
            writers[0].add_scalar(name, value, progress.step)

    try:
        yield watch
    finally:
        for writer in writers:
            writer.close()
