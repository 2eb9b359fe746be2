"""How the error of each component of the state grows from call to call (eq:complement-component-bound).

    x_k ≤ Σ_{j<k} Aʲ ε,      x_k = (‖Q₁e_k‖, ‖Q₂e_k‖),   A_ij ≥ ‖Q_i J̄_k Q_j‖₂,   ε_i ≥ ‖Q_i δ_k‖

e_k, δ_k and J̄_k are those of the complete history update (`gains`); k counts calls. Q₁ = Q_low keeps the wavenumbers
that the spectral operator of the recipe keeps on every axis, Q₂ = Q_high the remaining ones (`bands`): the modes that
the spectral branch of a block resolves on all axes, and those it does not. The split is fixed before anything is
measured. With Q₁ = I alone the bound is that of eq:rollout-finite-bound for one gain and one defect.

There are two kinds of A, each the maximum over the calls of one window:

    measured          ‖Q_i J̄_k Q_j e_k‖ / ‖Q_j e_k‖, the amplification of the actual error. This is all that the proof
                      of the bound needs, so the bound holds for these windows, and for no others.
    lower estimate    ‖Q_i J̄_k Q_j‖₂ by iteration, at selected calls only. It approaches the norm from below, so a bound
                      computed from it is not guaranteed; the rows report how often the true error stays below it.

When a block has more frames than the history, the dropped frames are bounded by eq:rollout-block-output-bound.

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
from sigmasolver.diagnose.cases import deviation, select_cases
from sigmasolver.diagnose.gains import MeanJacobian, block_output, history_update, largest_gain, mean_products
from sigmasolver.diagnose.linearise import StateMap
from sigmasolver.diagnose.subject import Findings, NotApplicable, Subject
from sigmasolver.forecast import Forecaster, feed_back

__all__ = ["Trace", "component_gains", "components", "contracting", "envelope", "spectral_radius", "trace_errors"]

Parts = Mapping[str, StateMap]
"""Orthogonal projections of states (B, T, *grid, q) that add up to the identity, by name."""
CASES, GAIN_CALLS = 4, 4
"""Maximum number of each, evenly spread: an iteration takes dozens of derivatives."""
SLACK = 1e-4
"""Relative tolerance for float32 round-off where a bound is attained, as it is after the first call."""
MEASURED, ESTIMATED = "measured", "lower_estimate"


@dataclass(frozen=True)
class Trace:
    """A free forecast compared with the truth: norms in float64 on the CPU, per sample, call and component."""

    error: torch.Tensor
    """(B, K + 1, n): x_k before each call and after the last."""
    defect: torch.Tensor
    """(B, K, n): ‖Q_i δ_k‖."""
    amplification: torch.Tensor
    """(B, K, n, n): ‖Q_i J̄_k Q_j e_k‖ / ‖Q_j e_k‖; zero where the error is zero."""
    residual: torch.Tensor
    """(B, K): ‖Σ_j J̄_k Q_j e_k - (f(ŝ_k) - f(s_k))‖ over the norm of that difference: the quadrature error."""
    output_error: torch.Tensor
    """(B, K): ‖B(ŝ_k) - y_k‖, over all frames of the block."""
    output_defect: torch.Tensor
    """(B, K): ‖B(s_k) - y_k‖."""
    output_amplification: torch.Tensor
    """(B, K): ‖B(ŝ_k) - B(s_k)‖ / ‖e_k‖."""
    histories: tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], ...]
    """For each call the true history, the history of the free forecast, and the time."""


def trace_errors(
    forecaster: Forecaster,
    history: torch.Tensor,
    truth: torch.Tensor,
    parts: Parts,
    nodes: int = gains.FINE_NODES,
    tick: Callable[[int], None] | None = None,
    times: torch.Tensor | None = None,
) -> Trace:
    """Trace every call whose full block is covered by the truth (B, H, *grid, q); `tick` gets the number of calls done.

    `times` (B, 1 + H) of the last input frame and of the future frames, for a model with a time embedding.
    """
    q, block = truth.shape[-1], forecaster.block
    true = visited = history
    errors, calls, histories = [_norms(torch.zeros_like(history[..., :q]), parts)], [], []
    for start in range(0, truth.shape[1] - block + 1, block):
        target, time = truth[:, start : start + block], None if times is None else times[:, start]
        with torch.no_grad():
            forced = forecaster(true, time=time)
            # Both forecasts share the first call; on a GPU two evaluations may differ by round-off.
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
    """(B, n, n): lower estimates of ‖Q_i J̄ Q_j‖₂. `tick` gets the number of norms done and the products of the next."""
    norms: list[torch.Tensor] = []
    for target in parts.values():
        for source in parts.values():
            on_product = None if tick is None else partial(tick, len(norms))
            norms.append(largest_gain(*_component_map(J, source, target), like, tolerance, on_product))
    return torch.stack(norms, dim=-1).unflatten(-1, (len(parts), -1)).cpu().double()


def envelope(A: torch.Tensor, defects: torch.Tensor, calls: int) -> torch.Tensor:
    """(..., calls + 1, n): Σ_{j<k} Aʲ ε for k = 0 ... calls, from A (..., n, n) and ε (..., n)."""
    bounds = [torch.zeros_like(defects)]
    for _ in range(calls):
        bounds.append(defects + (A @ bounds[-1][..., None])[..., 0])
    return torch.stack(bounds, dim=-2)


def spectral_radius(A: torch.Tensor) -> torch.Tensor:
    """The largest eigenvalue of non-negative matrices (..., 2, 2), by the formula below
    eq:complement-component-bound."""
    a, b, c, d = A[..., 0, 0], A[..., 0, 1], A[..., 1, 0], A[..., 1, 1]
    return (a + d + ((a - d) ** 2 + 4 * b * c).sqrt()) / 2


def contracting(A: torch.Tensor) -> torch.Tensor:
    """A₁₁ < 1, A₂₂ < 1 and A₁₂A₂₁ < (1 - A₁₁)(1 - A₂₂), the condition for a spectral radius below one."""
    a, b, c, d = A[..., 0, 0], A[..., 0, 1], A[..., 1, 0], A[..., 1, 1]
    return (a < 1) & (d < 1) & (b * c < (1 - a) * (1 - d))


def components(subject: Subject) -> Findings:
    """Rows over a few windows, at the last lead of each call: `error_low`, `defect_low`, `bound_measured_low`,
    `bound_lower_estimate_low`, `amplification_low_high` (from low to high), `gain_low_high_lower_estimate`, ... Rows
    without a lead: the maxima over calls, which are the ε and A of the bound, with their spectral radius, and the
    fraction of windows and calls at which the error is within the bound. Arrays of the same names are (windows, calls).
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
    selected = replace(select_cases(subject, count, batch=count), tick=None)
    indices, history, truth = next(selected.batches())
    calls = subject.horizon // subject.forecaster.block
    gain_calls = spread_evenly(calls, GAIN_CALLS).tolist()
    long_block = subject.forecaster.block > history.shape[1]
    progress = _Progress(subject.tick, calls, len(gain_calls), len(parts) ** 2 + 1 + long_block)
    trace = trace_errors(subject.forecaster, history, truth, parts, tick=progress.calls, times=subject.times(indices))
    norms = _estimate_norms(subject.forecaster, trace, parts, gain_calls, long_block, truth.shape[-1], progress)
    progress.finish()

    table = _Table(Findings(), subject.forecaster.block)
    table.components("error", trace.error[:, 1:], parts)
    table.components("defect", trace.defect, parts)
    defects = trace.defect.amax(1)
    for name, values in zip(parts, defects.unbind(-1), strict=True):
        table.over_calls(f"uniform_defect_{name}", values)
    table.per_call("jacobian_residual", trace.residual[:, 1:], range(1, calls))
    _add_bound(table, MEASURED, trace, defects, trace.amplification[:, 1:], list(range(1, calls)), parts)
    _add_bound(table, ESTIMATED, trace, defects, norms["parts"], gain_calls, parts)
    table.per_call(f"gain_{ESTIMATED}", norms["full"], gain_calls)
    if long_block:
        _add_output_bound(table, MEASURED, trace, trace.output_amplification[:, 1:], list(range(1, calls)))
        _add_output_bound(table, ESTIMATED, trace, norms["output"], gain_calls)
    for axis, number in enumerate(modes, start=1):
        table.findings.add(f"modes_axis{axis}", number)
    for metric, value in (("cases", len(indices)), ("calls", len(gain_calls)), ("tolerance", gains.TOLERANCE)):
        table.findings.add(f"gain_{metric}", value)
    table.findings.arrays |= {
        "leads": np.array(table.leads(range(calls))),
        "gain_leads": np.array(table.leads(gain_calls)),
    }
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
    """Add the bound from A (B, calls, n, n) at `calls`; empty for a single call, whose bound is its defect."""
    prefix, suffix = ("amplification", "") if kind == MEASURED else ("gain", f"_{ESTIMATED}")
    largest = A.amax(1) if calls else A.new_zeros(len(A), len(parts), len(parts))
    for j, source in enumerate(parts):
        for i, target in enumerate(parts):
            name = f"{prefix}_{source}_{target}{suffix}"
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


def _add_output_bound(table: _Table, kind: str, trace: Trace, L: torch.Tensor, calls: list[int]) -> None:
    """Add eq:rollout-block-output-bound with the bound of the history before each call."""
    largest = L.amax(1) if calls else L.new_zeros(len(L))
    bound = trace.output_defect + largest[:, None] * table.history_bound[kind]
    if kind == MEASURED:
        table.per_call("output_error", trace.output_error)
        table.per_call("output_defect", trace.output_defect)
    table.per_call("output_amplification" if kind == MEASURED else f"output_gain_{ESTIMATED}", L, calls)
    table.per_call(f"output_bound_{kind}", bound)
    table.over_calls(f"output_within_{kind}", _within(trace.output_error, bound).mean(1))


def _estimate_norms(
    forecaster: Forecaster,
    trace: Trace,
    parts: Parts,
    calls: list[int],
    long_block: bool,
    q: int,
    progress: _Progress,
) -> dict[str, torch.Tensor]:
    """Lower estimates at `calls`: of all blocks of J̄ (B, calls, n, n), of J̄ and of the block output map (B, calls)."""
    norms: dict[str, list[torch.Tensor]] = {}
    for position, call in enumerate(calls):
        true, visited, time = trace.histories[call]
        given, segment = true[..., q:], (true[..., :q], visited[..., :q])
        # One Jacobian at a time: two would double the memory.
        J = MeanJacobian(history_update(forecaster, given, time), *segment)
        tick = partial(progress.products, position)
        norms.setdefault("parts", []).append(component_gains(J, parts, segment[0], tick=tick))
        norms.setdefault("full", []).append(_jacobian_norm(J, segment[0], partial(tick, len(parts) ** 2)))
        if long_block:
            J = MeanJacobian(block_output(forecaster, given, time), *segment)
            norms.setdefault("output", []).append(_jacobian_norm(J, segment[0], partial(tick, len(parts) ** 2 + 1)))
    return {name: torch.stack(values, dim=1) for name, values in norms.items()}


def _jacobian_norm(J: MeanJacobian, like: torch.Tensor, tick: Callable[[int], None]) -> torch.Tensor:
    return largest_gain(J.__matmul__, J.transposed, like, tick=tick).cpu().double()


def _component_map(J: MeanJacobian, source: StateMap, target: StateMap) -> tuple[StateMap, StateMap]:
    """Q_target J̄ Q_source and its transpose; orthogonal projections are self-adjoint."""
    return lambda v: target(J @ source(v)), lambda u: source(J.transposed(target(u)))


def _norm(states: torch.Tensor) -> torch.Tensor:
    """(B,)"""
    return torch.linalg.vector_norm(states.flatten(1).double(), dim=1).cpu()


def _norms(states: torch.Tensor, parts: Parts) -> torch.Tensor:
    """(B, n): the norm of each component."""
    return torch.stack([_norm(project(states)) for project in parts.values()], dim=-1)


def _ratio(image: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
    """`image` (B, ...) over `size` (B,); 0 / 0 is 0: a zero input has no amplification."""
    size = size.view(-1, *(1,) * (image.ndim - 1))
    return torch.where((size == 0) & (image == 0), 0.0, image / size)


def _within(error: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    """1 where the error is within the bound, 0 where it is above, NaN where either is NaN."""
    return (error <= bound * (1 + SLACK)).double().masked_fill(error.isnan() | bound.isnan(), torch.nan)


class _Table:
    """Turns values (B, calls) into rows over windows and stores the arrays as well."""

    def __init__(self, findings: Findings, block: int) -> None:
        self.findings, self._block = findings, block
        self.history_bound: dict[str, torch.Tensor] = {}
        """(B, K) by kind: the bound of ‖e_k‖ before each call."""

    def leads(self, calls: range | list[int]) -> list[int]:
        """The last lead of each call."""
        return [(call + 1) * self._block for call in calls]

    def per_call(self, metric: str, values: torch.Tensor, calls: range | list[int] | None = None) -> None:
        indices = range(values.shape[1]) if calls is None else calls
        for lead, column in zip(self.leads(indices), values.unbind(1), strict=True):
            self.findings.add(metric, column.mean(), deviation(column), lead=lead)
        self.findings.arrays[metric] = values.numpy().astype(np.float32)

    def components(self, metric: str, values: torch.Tensor, parts: Parts) -> None:
        """(B, K, n)"""
        for name, column in zip(parts, values.unbind(-1), strict=True):
            self.per_call(f"{metric}_{name}", column)

    def over_calls(self, metric: str, values: torch.Tensor) -> None:
        """(B,), one number per window for all calls."""
        self.findings.add(metric, values.mean(), deviation(values))
        self.findings.arrays[metric] = values.numpy().astype(np.float32)


class _Progress:
    """One progress bar over calls, then over products with J̄ᵀJ̄; an iteration that converges early skips ahead."""

    def __init__(self, tick: Callable[[int, int], None] | None, calls: int, iterated: int, norms: int) -> None:
        self._tick, self._calls, self._norms = tick, calls, norms
        self._total = calls + iterated * norms * gains.MAX_PRODUCTS

    def calls(self, done: int) -> None:
        self._report(done)

    def products(self, iterated: int, norms: int, done: int) -> None:
        """Calls done, norms done of the next call, and products done of the next norm."""
        self._report(self._calls + (iterated * self._norms + norms) * gains.MAX_PRODUCTS + done)

    def finish(self) -> None:
        self._report(self._total)

    def _report(self, done: int) -> None:
        if self._tick is not None:
            self._tick(done, self._total)
