"""A few fixed held-out cases, analysed one at a time (app:srpa-layerwise-corrections), and their rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from sigmasolver.data.windows import spread_evenly
from sigmasolver.diagnose.subject import Findings, Subject
from sigmasolver.diagnose.watch import SliceView, record_slices

__all__ = ["CASES", "add_cases", "case_views", "deviation", "select_cases"]

CASES = 3
"""As many as in the paper."""


def select_cases(subject: Subject, count: int = CASES, batch: int = 1) -> Subject:
    """The same subject restricted to `count` of its windows, evenly spread."""
    selected = subject.indices[spread_evenly(len(subject.indices), count)]
    return replace(subject, indices=selected, batch=batch)


def case_views(subject: Subject) -> Iterator[tuple[int, list[SliceView]]]:
    """Window number of each case and the views of all slice operators in one call from its true history, batch of 1."""
    for indices, history, _ in select_cases(subject).batches():
        with torch.no_grad(), record_slices(subject.forecaster.model) as views:
            subject.forecaster(history, time=subject.times(indices)[:, 0])
        yield int(indices[0]), views


def add_cases(
    findings: Findings, metric: str, cases: Sequence[int], values: torch.Tensor, layer: int | None = None
) -> None:
    """Add a row for each of the `values` (cases,) and one for their mean."""
    for case, value in zip(cases, values, strict=True):
        findings.add(metric, value, layer=layer, case=case)
    findings.add(metric, values.mean(), deviation(values), layer=layer)


def deviation(values: torch.Tensor) -> torch.Tensor | None:
    """Sample standard deviation over cases (n,); None for a single case."""
    return values.std() if len(values) > 1 else None
