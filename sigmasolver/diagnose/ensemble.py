"""Several seeds of one model as an ensemble: does their spread predict their error?

    spread = ‖s‖ / ‖y‖,    error = ‖m − y‖ / ‖y‖             per window, lead and field, over points

m and s are the mean and sample deviation of the R members at each point, y is the truth. `calibration` is the
correlation of spread and error over windows; `coverage` is the fraction of points at which the truth lies between the
smallest and the largest forecast. If the truth were another sample of the ensemble, it would be (R − 1) / (R + 1).
"""

from __future__ import annotations

import torch

from sigmasolver.diagnose.subject import Findings

__all__ = ["add_ensemble", "correlation", "measure_members"]


def measure_members(members: torch.Tensor, truth: torch.Tensor) -> dict[str, torch.Tensor]:
    """`spread`, `error` and `coverage`, each (B, H, q), from `members` (R, B, H, *grid, q) and `truth` (no R axis)."""
    members, truth = members.double(), truth.double()
    size = _norm(truth)
    inside = (members.amin(0) <= truth) & (truth <= members.amax(0))
    return {
        "spread": (_norm(members.std(0)) / size).cpu(),
        "error": (_norm(members.mean(0) - truth) / size).cpu(),
        "coverage": inside.double().flatten(2, -2).mean(2).cpu(),
    }


def add_ensemble(findings: Findings, measures: dict[str, torch.Tensor], fields: tuple[str, ...], members: int) -> None:
    """Add rows per lead, per field and for the mean over fields (field null), from measures (windows, H, q)."""
    extended = {name: torch.cat((values, values.mean(-1, keepdim=True)), -1) for name, values in measures.items()}
    for channel, field in enumerate((*fields, None)):
        for step in range(extended["spread"].shape[1]):
            spread, error, coverage = (extended[name][:, step, channel] for name in ("spread", "error", "coverage"))
            for metric, values in (("spread_lead", spread), ("error_lead", error), ("coverage", coverage)):
                deviation = values.std() if len(values) > 1 else None
                findings.add(metric, values.mean(), deviation, field=field, lead=step + 1)
            findings.add("calibration", correlation(spread, error), field=field, lead=step + 1)
    findings.add("coverage_expected", (members - 1) / (members + 1))
    findings.add("members", members)


def correlation(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Pearson correlation of two vectors (n,); NaN if either is constant."""
    first, second = (values - values.mean() for values in (first, second))
    return (first * second).sum() / (first.norm() * second.norm())


def _norm(frames: torch.Tensor) -> torch.Tensor:
    return frames.flatten(2, -2).norm(dim=2)
