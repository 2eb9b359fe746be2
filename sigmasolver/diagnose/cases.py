"""A few fixed held-out cases, looked at one by one (app:srpa-layerwise-corrections), and their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from sigmasolver.data.windows import spread_evenly
from sigmasolver.diagnose.subject import Findings, Subject
from sigmasolver.diagnose.watch import SliceView, watching

__all__ = ["CASES", "add_cases", "deviation", "some_cases", "views_of_cases"]

CASES = 3
"""As many as the paper looks at."""


def some_cases(subject: Subject, count: int = CASES, batch: int = 1) -> Subject:
    """The same subject on a few fixed windows, evenly spread over those it has."""
    chosen = subject.indices[spread_evenly(len(subject.indices), count)]
    return replace(subject, indices=chosen, batch=batch)


def views_of_cases(subject: Subject) -> Iterator[tuple[int, list[SliceView]]]:
    """The number of each case, and what every slice operator did in one call from its true history, batch one."""
    for indices, history, _ in some_cases(subject).batches():
        with torch.no_grad(), watching(subject.forecaster.model) as views:
            subject.forecaster(history, time=subject.times(indices)[:, 0])
        yield int(indices[0]), views


def add_cases(
    findings: Findings, metric: str, cases: Sequence[int], values: torch.Tensor, layer: int | None = None
) -> None:
    """A row for each of the `values` (cases,), and one for their mean."""
    for case, value in zip(cases, values, strict=True):
        findings.add(metric, value, layer=layer, case=case)
    findings.add(metric, values.mean(), deviation(values), layer=layer)


def deviation(values: torch.Tensor) -> torch.Tensor | None:
    """Over cases (n,); a single one has none."""
    return values.std() if len(values) > 1 else None
