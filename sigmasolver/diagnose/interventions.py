"""What the forecast is without one of its operators, and how errors travel through a call
(app:spectral-physical-complementarity). Nothing is trained again.

    zero_physical, zero_spectral   relative L2 error per lead of a free forecast in which every response of that kind
                                   is zero; `intact`: the same windows with all responses
    alignment                      share of windows with 2⟨r, c⟩ > ‖c‖²        (eq:complement-marginal-alignment)
    defect_reduction               mean of (2⟨r, c⟩ - ‖c‖²)/‖r‖²: the share of the squared error that it removes
    gain                           ‖J̄_k‖₂                                      (eq:rollout-finite-bound)
    cross_propagation_low_high     ‖Q_high J̄_k Q_low‖₂, and high_low: how strongly error moves from one range of scales
                                   to the other                                (eq:complement-component-bound)

r = y - S(u) and c = f(u) - S(u) at the true history u: S is the model with silent physical operators, f the whole one
and y the truth (alignment_spectral: silent spectral operators). J̄_k is the mean Jacobian of `gains`, its rows stand at
the first lead that call k makes; `gain_cases`, `gain_calls` and `gain_tolerance` tell how many cases and calls were
measured, and to which residual of the squared gain. Q_low keeps the wavenumbers below the modes of the recipe on every
axis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from sigmasolver import metrics
from sigmasolver.data.windows import spread_evenly
from sigmasolver.diagnose import gains
from sigmasolver.diagnose.bands import Bands
from sigmasolver.diagnose.cases import deviation, some_cases
from sigmasolver.diagnose.gains import MeanJacobian, history_update, largest_gain
from sigmasolver.diagnose.linearise import Linear
from sigmasolver.diagnose.subject import Findings, Subject
from sigmasolver.diagnose.watch import KINDS, operators, silenced
from sigmasolver.forecast import Forecaster, feed_back, rollout

__all__ = ["Alignment", "alignment", "interventions", "propagation"]

NORMS = ("gain", "cross_propagation_low_high", "cross_propagation_high_low")
GAIN_CASES, GAIN_CALLS = 2, 4
"""At most so many, evenly spread: each takes dozens of derivatives, and gains differ by percents between them."""


@dataclass(frozen=True)
class Alignment:
    """Of an operator's contribution c with what the rest leaves undone, r; sums over points, (B, H, q) each."""

    gained: torch.Tensor
    """2⟨r, c⟩ - ‖c‖²: by so much the contribution lowers the squared error."""
    left: torch.Tensor
    """‖r‖²"""


def alignment(whole: torch.Tensor, silent: torch.Tensor, true: torch.Tensor) -> Alignment:
    """From frames (B, H, *grid, q) of the whole model, of the silenced one and of the truth; in float64."""
    r, c = (frames.double() - silent.double() for frames in (true, whole))
    points = tuple(range(2, true.ndim - 1))
    return Alignment((2 * r * c - c * c).sum(points), (r * r).sum(points))


def propagation(
    J: MeanJacobian, bands: Bands, like: torch.Tensor, tick: Callable[[int, int], None] | None = None
) -> dict[str, torch.Tensor]:
    """By the name of the metric (B,): the norm of J̄, and of its two parts that lead from one band to the other.

    `tick` is told how many norms are done, and how many products for the next one.
    """
    maps = (
        (J.__matmul__, J.transposed),
        _between(J, bands.low, bands.high),
        _between(J, bands.high, bands.low),
    )
    return {
        metric: largest_gain(*both, like, tick=None if tick is None else partial(tick, done))
        for done, (metric, both) in enumerate(zip(NORMS, maps, strict=True))
    }


def _between(J: MeanJacobian, source: Linear, target: Linear) -> tuple[Linear, Linear]:
    """Q_target J̄ Q_source and its transpose; projections are their own."""
    return lambda v: target(J @ source(v)), lambda u: source(J.transposed(target(u)))


def interventions(subject: Subject) -> Findings:
    """Rows per lead, per field and for all fields together (null); gains for a few cases and calls, with arrays
    (cases, calls). A steady task has no history to feed back, hence no gains.
    """
    findings = Findings()
    kinds = [kind for kind in KINDS if operators(subject.forecaster.model, kind)]
    calls = [] if subject.recipe.task.steady else spread_evenly(_count(subject), GAIN_CALLS).tolist()
    bar = _Bar(subject, kinds, len(calls))
    with subject.forecaster.register_forward_hook(bar.called):
        _add_silenced(findings, replace(subject, tick=None), kinds)
    if calls:
        _add_gains(findings, replace(subject, tick=None), calls, bar)
    bar.finish()
    return findings


def _count(subject: Subject) -> int:
    """Calls of the forecaster in one forecast."""
    return -(-subject.horizon // subject.forecaster.block)


class _Bar:
    """Calls for a window, then products with J̄ᵀJ̄, on the one bar there is; what ends early skips the rest."""

    def __init__(self, subject: Subject, kinds: list[str], calls: int) -> None:
        self._tick, self._done = subject.tick, 0
        forecasts = 2 + 2 * len(kinds)  # free ones, and those from true histories
        self._before = len(subject.indices) * _count(subject) * forecasts
        self._total = self._before + calls * len(NORMS) * gains.MOST

    def called(self, _: torch.nn.Module, __: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """A hook of the forecaster."""
        self._done += len(out)
        self._tell(self._done)

    def products(self, calls: int, norms: int, done: int) -> None:
        """So many calls are done, so many norms of the next one, and so many products of the next norm."""
        self._tell(self._before + (calls * len(NORMS) + norms) * gains.MOST + done)

    def finish(self) -> None:
        self._tell(self._total)

    def _tell(self, done: int) -> None:
        if self._tick is not None:
            self._tick(done, self._total)


def _add_silenced(findings: Findings, subject: Subject, kinds: list[str]) -> None:
    errors: dict[str, list[torch.Tensor]] = {}
    aligned: dict[str, list[Alignment]] = {}
    for indices, history, truth in subject.batches():
        times = subject.times(indices)
        errors.setdefault("intact", []).append(_errors(_forecast(subject, history, times), truth))
        whole = _forecast(subject, history, times, truth=truth)
        for kind in kinds:
            errors.setdefault(f"zero_{kind}", []).append(_errors(_forecast(subject, history, times, kind), truth))
            silent = _forecast(subject, history, times, kind, truth)
            aligned.setdefault(kind, []).append(alignment(whole, silent, truth))
    for metric, parts in errors.items():
        for field, lead, values in _each(torch.cat(parts), subject.fields):
            findings.add(metric, values.mean(), deviation(values), field=field, lead=lead)
    for kind, found in aligned.items():
        gained, left = (_with_joint(torch.cat([getattr(one, name) for one in found])) for name in ("gained", "left"))
        suffix = "" if kind == "physical" else f"_{kind}"
        for field, lead, values in _each((gained > 0).double(), subject.fields):
            findings.add(f"alignment{suffix}", values.mean(), field=field, lead=lead)
        for field, lead, values in _each(gained / left, subject.fields):
            findings.add(f"defect_reduction{suffix}", values.mean(), deviation(values), field=field, lead=lead)


def _forecast(
    subject: Subject,
    history: torch.Tensor,
    times: torch.Tensor,
    kind: str | None = None,
    truth: torch.Tensor | None = None,
) -> torch.Tensor:
    """Free, or with `truth` from the true history of every block; with the operators of a kind silenced."""
    with torch.no_grad(), nullcontext() if kind is None else silenced(subject.forecaster.model, kind):
        return rollout(subject.forecaster, history, subject.horizon, truth, times=times).frames


def _errors(predicted: torch.Tensor, true: torch.Tensor) -> torch.Tensor:
    """(B, H, q + 1): relative L2 of every field and, last, of all fields in one norm."""
    per_field = metrics.relative_l2_per_lead(predicted, true)
    leads = range(true.shape[1])
    joint = [metrics.relative_l2_joint(predicted[:, [lead]], true[:, [lead]]) for lead in leads]
    return torch.cat((per_field, torch.stack(joint, dim=1)[..., None]), dim=-1).cpu()


def _with_joint(sums: torch.Tensor) -> torch.Tensor:
    """(B, H, q) -> (B, H, q + 1), all fields together last."""
    return torch.cat((sums, sums.sum(-1, keepdim=True)), dim=-1).cpu()


def _each(values: torch.Tensor, fields: tuple[str, ...]) -> Iterator[tuple[str | None, int, torch.Tensor]]:
    """(field or None, lead, values (B,)) from (B, H, q + 1)."""
    for place, field in enumerate((*fields, None)):
        for lead in range(values.shape[1]):
            yield field, lead + 1, values[:, lead, place]


def _add_gains(findings: Findings, subject: Subject, calls: list[int], bar: _Bar) -> None:
    count = GAIN_CASES if len(subject.windows.grid) < 3 else 1  # derivatives of a volume take gigabytes
    indices, history, truth = next(some_cases(subject, count, batch=count).batches())
    leads = [1 + call * subject.forecaster.block for call in calls]
    found: dict[str, list[torch.Tensor]] = {metric: [] for metric in NORMS}
    steps = _histories(subject.forecaster, history, truth, subject.times(indices))
    for call, (true, visited, time) in enumerate(steps):
        if call in calls:
            tick = partial(bar.products, calls.index(call))
            for metric, values in _propagation_at(subject, true, visited, time, tick).items():
                found[metric].append(values.cpu().double())
    for metric, values_of in found.items():
        for lead, values in zip(leads, values_of, strict=True):
            findings.add(metric, values.mean(), deviation(values), lead=lead)
        findings.arrays[metric] = torch.stack(values_of, dim=1).numpy().astype(np.float32)
    findings.arrays |= {"leads": np.array(leads), "cases": indices.numpy()}
    for metric, number in (("cases", len(indices)), ("calls", len(calls)), ("tolerance", gains.TOLERANCE)):
        findings.add(f"gain_{metric}", number)


def _propagation_at(
    subject: Subject,
    true: torch.Tensor,
    visited: torch.Tensor,
    time: torch.Tensor,
    tick: Callable[[int, int], None],
) -> dict[str, torch.Tensor]:
    """Of one call. Its Jacobian is gone before that of the next call is made: both would take twice the memory."""
    recipe, q = subject.recipe, len(subject.fields)
    bands = Bands(recipe.model.config(recipe.task).modes_per_axis)
    J = MeanJacobian(history_update(subject.forecaster, true[..., q:], time), true[..., :q], visited[..., :q])
    return propagation(J, bands, true[..., :q], tick)


def _histories(
    forecaster: Forecaster, history: torch.Tensor, truth: torch.Tensor, times: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The true history, that of the free forecast, and the time before every call."""
    true = visited = history
    for start in range(0, truth.shape[1], forecaster.block):
        yield true, visited, times[:, start]
        with torch.no_grad():
            visited = feed_back(visited, forecaster(visited, time=times[:, start]))
        true = feed_back(true, truth[:, start : start + forecaster.block])
