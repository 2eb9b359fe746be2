"""Forecasts with one kind of operator silenced (app:spectral-physical-complementarity), without retraining.

    zero_physical, zero_spectral   relative L2 error per lead of a free forecast in which the output of every operator
                                   of that kind is zero; `intact`: the same windows with all operators
    alignment                      fraction of windows with 2⟨r, c⟩ > ‖c‖²        (eq:complement-marginal-alignment)
    defect_reduction               mean of (2⟨r, c⟩ - ‖c‖²)/‖r‖²: the fraction of the squared error that it removes

r = y - S(u) and c = f(u) - S(u) at the true history u: S is the model with its physical operators silenced, f the full
model and y the truth (alignment_spectral: spectral operators silenced).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from sigmasolver.diagnose.cases import deviation
from sigmasolver.diagnose.subject import Findings, Subject, without_solid
from sigmasolver.diagnose.watch import OPERATOR_CLASSES, operators, silenced
from sigmasolver.evaluate import metrics
from sigmasolver.forecast import rollout

__all__ = ["Alignment", "alignment", "interventions"]


@dataclass(frozen=True)
class Alignment:
    """Alignment of an operator's contribution c with the error r without it; sums over points, each (B, H, q)."""

    gained: torch.Tensor
    """2⟨r, c⟩ - ‖c‖²: the reduction of the squared error by the contribution."""
    left: torch.Tensor
    """‖r‖²"""


def alignment(full: torch.Tensor, silent: torch.Tensor, true: torch.Tensor) -> Alignment:
    """From frames (B, H, *grid, q) of the full model, the silenced model and the truth; in float64."""
    r, c = (frames.double() - silent.double() for frames in (true, full))
    points = tuple(range(2, true.ndim - 1))
    return Alignment((2 * r * c - c * c).sum(points), (r * r).sum(points))


def interventions(subject: Subject) -> Findings:
    """Rows per lead, per field and for all fields jointly (field null)."""
    findings = Findings()
    kinds = [kind for kind in OPERATOR_CLASSES if operators(subject.forecaster.model, kind)]
    progress = _Progress(subject, kinds)
    with subject.forecaster.register_forward_hook(progress.on_call):
        _add_rows(findings, replace(subject, tick=None), kinds)
    progress.finish()
    return findings


class _Progress:
    """Progress in forecaster calls; a forecast that becomes non-finite skips some."""

    def __init__(self, subject: Subject, kinds: list[str]) -> None:
        self._tick, self._done = subject.tick, 0
        forecasts = 2 + 2 * len(kinds)  # free and teacher-forced
        self._total = len(subject.indices) * -(-subject.horizon // subject.forecaster.block) * forecasts

    def on_call(self, _: torch.nn.Module, __: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Forward hook of the forecaster."""
        self._done += len(out)
        self._report(self._done)

    def finish(self) -> None:
        self._report(self._total)

    def _report(self, done: int) -> None:
        if self._tick is not None:
            self._tick(done, self._total)


def _add_rows(findings: Findings, subject: Subject, kinds: list[str]) -> None:
    errors: dict[str, list[torch.Tensor]] = {}
    aligned: dict[str, list[Alignment]] = {}
    for indices, history, truth in subject.batches():
        times = subject.times(indices)
        fluid = subject.forecaster.fluid_points(history)
        (true,) = without_solid(fluid, truth)
        (intact,) = without_solid(fluid, _forecast(subject, history, times))
        errors.setdefault("intact", []).append(_errors(intact, true))
        (full,) = without_solid(fluid, _forecast(subject, history, times, truth=truth))
        for kind in kinds:
            (free,) = without_solid(fluid, _forecast(subject, history, times, kind))
            errors.setdefault(f"zero_{kind}", []).append(_errors(free, true))
            (silent,) = without_solid(fluid, _forecast(subject, history, times, kind, truth))
            aligned.setdefault(kind, []).append(alignment(full, silent, true))
    for metric, parts in errors.items():
        for field, lead, values in _by_field_and_lead(torch.cat(parts), subject.fields):
            findings.add(metric, values.mean(), deviation(values), field=field, lead=lead)
    for kind, batches in aligned.items():
        gained, left = (
            _with_joint(torch.cat([getattr(batch, name) for batch in batches])) for name in ("gained", "left")
        )
        suffix = "" if kind == "physical" else f"_{kind}"
        for field, lead, values in _by_field_and_lead((gained > 0).double(), subject.fields):
            findings.add(f"alignment{suffix}", values.mean(), field=field, lead=lead)
        for field, lead, values in _by_field_and_lead(gained / left, subject.fields):
            findings.add(f"defect_reduction{suffix}", values.mean(), deviation(values), field=field, lead=lead)


def _forecast(
    subject: Subject,
    history: torch.Tensor,
    times: torch.Tensor,
    kind: str | None = None,
    truth: torch.Tensor | None = None,
) -> torch.Tensor:
    """Forecast freely, or teacher-forced if `truth` is given, with the operators of `kind` silenced."""
    with torch.no_grad(), nullcontext() if kind is None else silenced(subject.forecaster.model, kind):
        return rollout(subject.forecaster, history, subject.horizon, truth, times=times).frames


def _errors(predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """(B, H, q + 1): relative L2 error per field and, last, of all fields in one norm."""
    per_field = metrics.relative_l2_per_lead(predicted, true)
    leads = range(true.shape[1])
    joint = [metrics.relative_l2_joint(predicted[:, [lead]], true[:, [lead]]) for lead in leads]
    return torch.cat((per_field, torch.stack(joint, dim=1)[..., None]), dim=-1).cpu()


def _with_joint(sums: torch.Tensor) -> torch.Tensor:
    """(B, H, q) -> (B, H, q + 1), all fields jointly last."""
    return torch.cat((sums, sums.sum(-1, keepdim=True)), dim=-1).cpu()


def _by_field_and_lead(values: torch.Tensor, fields: tuple[str, ...]) -> Iterator[tuple[str | None, int, torch.Tensor]]:
    """(field or None, lead, values (B,)) from (B, H, q + 1)."""
    for channel, field in enumerate((*fields, None)):
        for lead in range(values.shape[1]):
            yield field, lead + 1, values[:, lead, channel]
