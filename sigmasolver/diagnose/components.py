"""How the error of each component of the state grows from call to call (eq:complement-component-bound).

    x_k ≤ Σ_{j<k} Aʲ ε,      x_k = (‖Q₁e_k‖, ‖Q₂e_k‖),   A_ij ≥ ‖Q_i J̄_k Q_j‖₂,   ε_i ≥ ‖Q_i δ_k‖

e_k, δ_k and J̄_k are those of the complete history update (`gains`); k counts calls. Q₁ = Q_low keeps the wavenumbers
that the spectral operator of the recipe keeps on every axis, Q₂ = Q_high the rest (`bands`): what the spectral half of
a block can see as a whole, and what it cannot. The split is fixed before anything is measured. With Q₁ = I alone the
bound is that of eq:rollout-finite-bound for one gain and one defect.

Two kinds of A are told apart, each the largest over the calls of one window:

    measured          ‖Q_i J̄_k Q_j e_k‖ / ‖Q_j e_k‖, the amplification of the error that is there. All that the proof of
                      the bound needs, so the bound holds for these windows, and for no others.
    lower estimate    ‖Q_i J̄_k Q_j‖₂ found by iteration, at some calls only. It approaches the norm from below, so a
                      bound made of it is no guarantee; whether the truth stays under it is checked and counted.

When a block has more frames than the history, those that are not kept are bounded by eq:rollout-block-output-bound.

Letters: B batch, K calls, n components; i target, j source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from sigmasolver.data.windows import spread_evenly
from sigmasolver.diagnose import gains
from sigmasolver.diagnose.bands import Bands
from sigmasolver.diagnose.cases import deviation, some_cases
from sigmasolver.diagnose.gains import MeanJacobian, block_output, history_update, largest_gain, mean_products
from sigmasolver.diagnose.linearise import Linear
from sigmasolver.diagnose.subject import Findings, NotApplicable, Subject
from sigmasolver.forecast import Forecaster, feed_back

__all__ = ["Trace", "component_gains", "components", "contracting", "envelope", "follow", "spectral_radius"]

Parts = Mapping[str, Linear]
"""Orthogonal projections of states (B, T, *grid, q) that add up to the identity, by name."""
CASES, GAIN_CALLS = 4, 4
"""At most so many, evenly spread: an iteration takes dozens of derivatives."""
SLACK = 1e-4
"""Relative room for the rounding of float32 where a bound is attained, as it is after the first call."""
MEASURED, ESTIMATED = "measured", "lower_estimate"


@dataclass(frozen=True)
class Trace:
    """A free forecast beside the truth: norms in float64 on the CPU, for every sample, call and component."""

    error: torch.Tensor
    """(B, K + 1, n): x_k before each call and after the last."""
    defect: torch.Tensor
    """(B, K, n): ‖Q_i δ_k‖."""
    amplification: torch.Tensor
    """(B, K, n, n): ‖Q_i J̄_k Q_j e_k‖ / ‖Q_j e_k‖; zero where there is no error to amplify."""
    residual: torch.Tensor
    """(B, K): ‖Σ_j J̄_k Q_j e_k - (f(ŝ_k) - f(s_k))‖ over the norm of that difference: what the quadrature misses."""
    output_error: torch.Tensor
    """(B, K): ‖B(ŝ_k) - y_k‖, of all frames of the block."""
    output_defect: torch.Tensor
    """(B, K): ‖B(s_k) - y_k‖."""
    output_amplification: torch.Tensor
    """(B, K): ‖B(ŝ_k) - B(s_k)‖ / ‖e_k‖."""
    histories: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], ...]
    """The true and the freely forecast history before each call, and its time."""


def follow(
    forecaster: Forecaster,
    history: torch.Tensor,
    truth: torch.Tensor,
    parts: Parts,
    nodes: int = gains.FINE_NODES,
    tick: Callable[[int], None] | None = None,
    times: torch.Tensor | None = None,
) -> Trace:
    """Of every call whose whole block the truth (B, H, *grid, q) covers; `tick` is told how many calls are done.

    `times` (B, 1 + H): of the last given and of the future frames, for a model that is told the time.
    """
    q, block = truth.shape[-1], forecaster.block
    true = visited = history
    errors, calls, histories = [_norms(torch.zeros_like(history[..., :q]), parts)], [], []
    for start in range(0, truth.shape[1] - block + 1, block):
        target, time = truth[:, start : start + block], None if times is None else times[:, start]
        with torch.no_grad():
            forced = forecaster(true, time=time)
            # The first call is one and the same; on a GPU two of them may round differently.
            free = forecaster(visited, time=time) if start else forced
        following, reached = feed_back(true, target), feed_back(visited, free)
        propagated = (reached - feed_back(true, forced))[..., :q]
        e = (visited - true)[..., :q]
        sources = [project(e) for project in parts.values()]
        update = history_update(forecaster, true[..., q:], time)
        images = mean_products(update, true[..., :q], visited[..., :q], sources, nodes)
        along = [_ratio(_norms(image, parts), _norm(v)) for image, v in zip(images, sources, strict=True)]
        calls.append(
            {
                "defect": _norms((feed_back(true, forced) - following)[..., :q], parts),
                "amplification": torch.stack(along, dim=-1),
                "residual": _ratio(_norm(sum(images, -propagated)), _norm(propagated)),
                "output_error": _norm(free - target),
                "output_defect": _norm(forced - target),
                "output_amplification": _ratio(_norm(free - forced), _norm(e)),
            }
        )
        errors.append(_norms((reached - following)[..., :q], parts))
        histories.append((true, visited, time))
        true, visited = following, reached
        if tick is not None:
            tick(len(calls))
    stacked = {name: torch.stack([call[name] for call in calls], dim=1) for name in calls[0]}
    return Trace(error=torch.stack(errors, dim=1), histories=tuple(histories), **stacked)


def component_gains(
    J: MeanJacobian,
    parts: Parts,
    like: torch.Tensor,
    tolerance: float = gains.TOLERANCE,
    tick: Callable[[int, int], None] | None = None,
) -> torch.Tensor:
    """(B, n, n): lower estimates of ‖Q_i J̄ Q_j‖₂. `tick` is told how many are done, and the products of the next."""
    found: list[torch.Tensor] = []
    for target in parts.values():
        for source in parts.values():
            told = None if tick is None else partial(tick, len(found))
            found.append(largest_gain(*_between(J, source, target), like, tolerance, told))
    return torch.stack(found, dim=-1).unflatten(-1, (len(parts), -1)).cpu().double()


def envelope(A: torch.Tensor, defects: torch.Tensor, calls: int) -> torch.Tensor:
    """(..., calls + 1, n): Σ_{j<k} Aʲ ε for k = 0 ... calls, from A (..., n, n) and ε (..., n)."""
    bounds = [torch.zeros_like(defects)]
    for _ in range(calls):
        bounds.append(defects + (A @ bounds[-1][..., None])[..., 0])
    return torch.stack(bounds, dim=-2)


def spectral_radius(A: torch.Tensor) -> torch.Tensor:
    """The largest eigenvalue of matrices (..., 2, 2) without negative entries, as printed below
    eq:complement-component-bound."""
    a, b, c, d = A[..., 0, 0], A[..., 0, 1], A[..., 1, 0], A[..., 1, 1]
    return (a + d + ((a - d) ** 2 + 4 * b * c).sqrt()) / 2


def contracting(A: torch.Tensor) -> torch.Tensor:
    """A₁₁ < 1, A₂₂ < 1 and A₁₂A₂₁ < (1 - A₁₁)(1 - A₂₂), the condition for a spectral radius below one."""
    a, b, c, d = A[..., 0, 0], A[..., 0, 1], A[..., 1, 0], A[..., 1, 1]
    return (a < 1) & (d < 1) & (b * c < (1 - a) * (1 - d))


def components(subject: Subject) -> Findings:
    """Rows over a few windows, at the last lead that a call makes: `error_low`, `defect_low`, `bound_measured_low`,
    `bound_lower_estimate_low`, `amplification_low_high` (from low to high), `gain_low_high_lower_estimate`, ... Without
    a lead the largest over calls, which are the ε and A of the bound, with their spectral radius, and the share of
    windows and calls at which the truth is within the bound. Arrays of the same names are (windows, calls).
    """
    if subject.recipe.task.steady:
        raise NotApplicable("A steady task has no history to feed back, so no error grows from call to call.")
    if subject.horizon < subject.forecaster.block:
        raise NotApplicable(
            f"The horizon must be at least the {subject.forecaster.block} frames of one call, got {subject.horizon}."
        )
    if subject.forecaster.mask is not None:
        raise NotApplicable(
            "Scales are separated on the whole grid, which would include the points of the solid in these data."
        )
    modes = subject.recipe.model.config(subject.recipe.task).modes_per_axis
    bands = Bands(modes)
    parts = {"low": bands.low, "high": bands.high}
    count = CASES if len(subject.windows.grid) < 3 else 1  # derivatives of a volume take gigabytes
    few = replace(some_cases(subject, count, batch=count), tick=None)
    indices, history, truth = next(few.batches())
    calls = subject.horizon // subject.forecaster.block
    chosen = spread_evenly(calls, GAIN_CALLS).tolist()
    longer = subject.forecaster.block > history.shape[1]
    bar = _Bar(subject.tick, calls, len(chosen), len(parts) ** 2 + 1 + longer)
    trace = follow(subject.forecaster, history, truth, parts, tick=bar.calls, times=subject.times(indices))
    norms = _iterated(subject.forecaster, trace, parts, chosen, longer, truth.shape[-1], bar)
    bar.finish()

    table = _Table(Findings(), subject.forecaster.block)
    table.components("error", trace.error[:, 1:], parts)
    table.components("defect", trace.defect, parts)
    defects = trace.defect.amax(1)
    for name, values in zip(parts, defects.unbind(-1), strict=True):
        table.over_calls(f"uniform_defect_{name}", values)
    table.per_call("jacobian_residual", trace.residual[:, 1:], range(1, calls))
    _add_bound(table, MEASURED, trace, defects, trace.amplification[:, 1:], list(range(1, calls)), parts)
    _add_bound(table, ESTIMATED, trace, defects, norms["parts"], chosen, parts)
    table.per_call(f"gain_{ESTIMATED}", norms["whole"], chosen)
    if longer:
        _add_output(table, MEASURED, trace, trace.output_amplification[:, 1:], list(range(1, calls)))
        _add_output(table, ESTIMATED, trace, norms["output"], chosen)
    for axis, number in enumerate(modes, start=1):
        table.findings.add(f"modes_axis{axis}", number)
    for metric, value in (("cases", len(indices)), ("calls", len(chosen)), ("tolerance", gains.TOLERANCE)):
        table.findings.add(f"gain_{metric}", value)
    table.findings.arrays |= {"leads": np.array(table.leads(range(calls))), "gain_leads": np.array(table.leads(chosen))}
    table.findings.arrays["cases"] = indices.numpy()
    return table.findings


def _add_bound(
    table: _Table,
    kind: str,
    trace: Trace,
    defects: torch.Tensor,
    A: torch.Tensor,
    calls: list[int],
    parts: Parts,
) -> None:
    """From A (B, calls, n, n) at these calls. A single call has no error to amplify, and its bound is its defect."""
    word, suffix = ("amplification", "") if kind == MEASURED else ("gain", f"_{ESTIMATED}")
    largest = A.amax(1) if calls else A.new_zeros(len(A), len(parts), len(parts))
    for j, source in enumerate(parts):
        for i, target in enumerate(parts):
            name = f"{word}_{source}_{target}{suffix}"
            table.per_call(name, A[:, :, i, j], calls)
            if calls:
                table.over_calls(f"uniform_{name}", largest[:, i, j])
    bound = envelope(largest, defects, trace.defect.shape[1])[:, 1:]
    table.components(f"bound_{kind}", bound, parts)
    table.over_calls(f"within_{kind}", _within(trace.error[:, 1:], bound).flatten(1).mean(1))
    if calls:
        radius = spectral_radius(largest)
        table.over_calls(f"spectral_radius_{kind}", radius)
        table.over_calls(f"contracting_{kind}", contracting(largest).double().masked_fill(radius.isnan(), torch.nan))
    table.history_bound[kind] = torch.cat((torch.zeros_like(bound[:, :1]), bound[:, :-1]), dim=1).norm(dim=-1)


def _add_output(table: _Table, kind: str, trace: Trace, L: torch.Tensor, calls: list[int]) -> None:
    """eq:rollout-block-output-bound with the bound of the history before each call."""
    largest = L.amax(1) if calls else L.new_zeros(len(L))
    bound = trace.output_defect + largest[:, None] * table.history_bound[kind]
    if kind == MEASURED:
        table.per_call("output_error", trace.output_error)
        table.per_call("output_defect", trace.output_defect)
    table.per_call("output_amplification" if kind == MEASURED else f"output_gain_{ESTIMATED}", L, calls)
    table.per_call(f"output_bound_{kind}", bound)
    table.over_calls(f"output_within_{kind}", _within(trace.output_error, bound).mean(1))


def _iterated(
    forecaster: Forecaster, trace: Trace, parts: Parts, calls: list[int], longer: bool, q: int, bar: _Bar
) -> dict[str, torch.Tensor]:
    """Lower estimates at these calls: of the parts (B, calls, n, n), of J̄ and of the block's output map (B, calls)."""
    found: dict[str, list[torch.Tensor]] = {}
    for done, call in enumerate(calls):
        true, visited, time = trace.histories[call]
        given, ends = true[..., q:], (true[..., :q], visited[..., :q])
        # One Jacobian at a time: two would take twice the memory.
        J = MeanJacobian(history_update(forecaster, given, time), *ends)
        tick = partial(bar.products, done)
        found.setdefault("parts", []).append(component_gains(J, parts, ends[0], tick=tick))
        found.setdefault("whole", []).append(_norm_of(J, ends[0], partial(tick, len(parts) ** 2)))
        if longer:
            J = MeanJacobian(block_output(forecaster, given, time), *ends)
            found.setdefault("output", []).append(_norm_of(J, ends[0], partial(tick, len(parts) ** 2 + 1)))
    return {name: torch.stack(values, dim=1) for name, values in found.items()}


def _norm_of(J: MeanJacobian, like: torch.Tensor, tick: Callable[[int], None]) -> torch.Tensor:
    return largest_gain(J.__matmul__, J.transposed, like, tick=tick).cpu().double()


def _between(J: MeanJacobian, source: Linear, target: Linear) -> tuple[Linear, Linear]:
    """Q_target J̄ Q_source and its transpose; projections are their own."""
    return lambda v: target(J @ source(v)), lambda u: source(J.transposed(target(u)))


def _norm(states: torch.Tensor) -> torch.Tensor:
    """(B,)"""
    return torch.linalg.vector_norm(states.flatten(1).double(), dim=1).cpu()


def _norms(states: torch.Tensor, parts: Parts) -> torch.Tensor:
    """(B, n): of every component."""
    return torch.stack([_norm(project(states)) for project in parts.values()], dim=-1)


def _ratio(image: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """`image` (B, ...) over `size` (B,); zero over zero is zero, since nothing came of nothing."""
    size = size.view(-1, *(1,) * (image.ndim - 1))
    return torch.where((size == 0) & (image == 0), 0.0, image / size)


def _within(truth: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """1 where the truth is not above the bound, 0 where it is, NaN where one of them is not a number."""
    return (truth <= bound * (1 + SLACK)).double().masked_fill(truth.isnan() | bound.isnan(), torch.nan)


class _Table:
    """Values (B, calls) as rows over windows, with the arrays they come from."""

    def __init__(self, findings: Findings, block: int) -> None:
        self.findings, self._block = findings, block
        self.history_bound: dict[str, torch.Tensor] = {}
        """(B, K) by kind: the bound of ‖e_k‖ before each call."""

    def leads(self, calls: range | list[int]) -> list[int]:
        """The last lead of each call."""
        return [(call + 1) * self._block for call in calls]

    def per_call(self, metric: str, values: torch.Tensor, calls: range | list[int] | None = None) -> None:
        places = range(values.shape[1]) if calls is None else calls
        for lead, each in zip(self.leads(places), values.unbind(1), strict=True):
            self.findings.add(metric, each.mean(), deviation(each), lead=lead)
        self.findings.arrays[metric] = values.numpy().astype(np.float32)

    def components(self, metric: str, values: torch.Tensor, parts: Parts) -> None:
        """(B, K, n)"""
        for name, each in zip(parts, values.unbind(-1), strict=True):
            self.per_call(f"{metric}_{name}", each)

    def over_calls(self, metric: str, values: torch.Tensor) -> None:
        """(B,), one number for all calls of a window."""
        self.findings.add(metric, values.mean(), deviation(values))
        self.findings.arrays[metric] = values.numpy().astype(np.float32)


class _Bar:
    """Calls, then products with J̄ᵀJ̄, on the one bar there is; what ends early skips the rest."""

    def __init__(self, tick: Callable[[int, int], None] | None, calls: int, iterated: int, norms: int) -> None:
        self._tick, self._calls, self._norms = tick, calls, norms
        self._total = calls + iterated * norms * gains.MOST

    def calls(self, done: int) -> None:
        self._tell(done)

    def products(self, iterated: int, norms: int, done: int) -> None:
        """So many calls are done, so many norms of the next one, and so many products of the next norm."""
        self._tell(self._calls + (iterated * self._norms + norms) * gains.MOST + done)

    def finish(self) -> None:
        self._tell(self._total)

    def _tell(self, done: int) -> None:
        if self._tick is not None:
            self._tick(done, self._total)
