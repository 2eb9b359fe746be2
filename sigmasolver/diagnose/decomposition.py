"""Exact split of a free forecast's error into injected and propagated parts (app:exact-error-decomposition).

    δ = f(x) − y,   π = f(x̂) − f(x),   e = f(x̂) − y = δ + π                    (eq:exact-error-vectors)
    ‖e‖² = ‖δ‖² + ‖π‖² + 2⟨δ, π⟩                                               (eq:exact-error-energy)
    total  injection  propagation  cross

f is one call of the forecaster, boundary operator included; x is the true history and x̂ the model's own forecast
history at the same block boundary; y is the true block. All frames of a block share one history, so the propagation in
the first block is zero. Everything is in physical units. The cross term is signed: if negative, the two errors cancel.

Norms run over the points of a frame (fluid points only if there is a solid), per field and jointly over all fields;
sums are in float64, so the identity holds to round-off. The paper's curves are relative energies: each is divided by
‖y‖² of its own window, lead and field, then averaged over windows.
"""

from __future__ import annotations

import torch

from sigmasolver.diagnose.subject import Findings, Subject, without_solid
from sigmasolver.forecast import Forecaster, rollout

__all__ = ["TERMS", "decompose", "decomposition"]

TERMS = ("injection", "propagation", "cross", "total")
TRUTH = "truth"


def decomposition(subject: Subject) -> Findings:
    """Error energies at every lead, per field and for all fields jointly (field null).

    Rows: `injection`, `propagation`, `cross`, `total` are means over windows of squared norms in physical units;
    `_share` divides by the mean total; `_relative` divides by the energy of the truth of each window, then averages.
    Arrays: the same four and `truth`, (windows, leads, fields + 1), all fields jointly last.
    """
    parts = [
        decompose(subject.forecaster, history, truth, subject.times(indices))
        for indices, history, truth in subject.batches()
    ]
    energies = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    findings = Findings(arrays={name: values.float().numpy() for name, values in energies.items()})
    for channel, field in enumerate((*subject.fields, None)):
        for step in range(subject.horizon):
            _add_rows(findings, {name: values[:, step, channel] for name, values in energies.items()}, field, step + 1)
    return findings


def decompose(
    forecaster: Forecaster, history: torch.Tensor, truth: torch.Tensor, times: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Terms of the error energy and the energy of the truth by name: float64 (B, H, q + 1), all fields jointly last.

    `history` (B, T_in, *grid, q_in) and `truth` (B, H, *grid, q) are in physical units; `times` as in `rollout`.
    """
    horizon = truth.shape[1]
    with torch.no_grad():
        free = rollout(forecaster, history, horizon, times=times).frames
        forced = rollout(forecaster, history, horizon, truth, times=times).frames
    # Both share the first call; on a GPU two evaluations may differ by round-off.
    forced[:, : forecaster.block] = free[:, : forecaster.block]
    fluid = forecaster.fluid_points(history)
    free, forced, true = without_solid(fluid, free.double(), forced.double(), truth.double())
    injected, propagated = forced - true, free - forced
    return {
        "injection": _inner(injected, injected),
        "propagation": _inner(propagated, propagated),
        "cross": 2 * _inner(injected, propagated),
        "total": _inner(free - true, free - true),
        TRUTH: _inner(true, true),
    }


def _inner(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Inner products over points, then their sum over fields last: (B, H, q + 1) on the CPU."""
    per_field = (first * second).flatten(2, -2).sum(2)
    return torch.cat((per_field, per_field.sum(-1, keepdim=True)), dim=-1).cpu()


def _add_rows(findings: Findings, energies: dict[str, torch.Tensor], field: str | None, lead: int) -> None:
    """Add the rows of one field and lead from energies (windows,)."""
    several = len(energies["total"]) > 1
    for name in TERMS:
        for metric, values in ((name, energies[name]), (f"{name}_relative", energies[name] / energies[TRUTH])):
            findings.add(metric, values.mean(), values.std() if several else None, field=field, lead=lead)
        if name != "total":
            share = energies[name].mean() / energies["total"].mean()
            findings.add(f"{name}_share", share, field=field, lead=lead)
