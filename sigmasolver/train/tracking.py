"""Training curves in other tools: whatever is called with `Progress` can follow a training.

A watch is a function of one `Progress`. The progress bar is one, `tensorboard` makes another, and a client of any other
service takes three lines (docs/tracking.md).
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
    """All of these as one; None where there is none."""
    present = [watch for watch in watches if watch is not None]

    def watch(now: Progress) -> None:
        for one in present:
            one(now)

    return watch if present else None


@contextmanager
def tensorboard(folder: str | Path | None, run: Run) -> Iterator[Watch | None]:
    """Writes event files of a training into `folder`/NAME OF THE RUN; None: writes nothing.

    A resumed run goes on in the same folder: what an earlier process wrote beyond the step that it resumes from is
    hidden by TensorBoard.
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
    checked: list[float | None] = [None]

    def watch(now: Progress) -> None:
        if not writers:  # only now is it known from which step the run goes on
            writers.append(SummaryWriter(str(target), purge_step=now.step))
            writers[0].add_text("recipe", f"```\n{json.dumps(run.recipe(), indent=2)}\n```", now.step)
        values = {"loss": now.loss, "learning rate": now.rate, "steps per second": now.steps_per_second}
        if now.error is not None and now.error != checked[0]:
            values["validation error"] = checked[0] = now.error
        for name, value in values.items():
            writers[0].add_scalar(name, value, now.step)

    try:
        yield watch
    finally:
        for writer in writers:
            writer.close()
