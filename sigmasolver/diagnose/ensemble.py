"""Several seeds of one model as an ensemble: does their disagreement tell where they are wrong?

    spread = ‖s‖ / ‖y‖,    error = ‖m − y‖ / ‖y‖             of a window, a lead and a field, over points

m and s mean and sample deviation of the R members at a point, y the truth. `calibration` is the correlation of spread
and error over windows; `coverage` the share of points at which the truth lies between the least and the largest
forecast. Were the truth one more draw of the members, coverage would be (R − 1) / (R + 1).
"""

from __future__ import annotations

import torch

from sigmasolver.diagnose.subject import Findings

__all__ = ["add_ensemble", "correlation", "measure_members"]


def measure_members(members: torch.Tensor, truth: torch.Tensor) -> dict[str, torch.Tensor]:
    """`spread`, `error` and `coverage`, each (B, H, q), from `members` (R, B, H, *grid, q) and `truth` without R."""
    members, truth = members.double(), truth.double()
    size = _norm(truth)
    inside = (members.amin(0) <= truth) & (truth <= members.amax(0))
    return {
        "spread": (_norm(members.std(0)) / size).cpu(),
        "error": (_norm(members.mean(0) - truth) / size).cpu(),
        "coverage": inside.double().flatten(2, -2).mean(2).cpu(),
    }


def add_ensemble(findings: Findings, measures: dict[str, torch.Tensor], fields: tuple[str, ...], members: int) -> None:
    """Rows per lead, for each field and for the mean over fields (field null), from measures (windows, H, q)."""
    together = {name: torch.cat((one, one.mean(-1, keepdim=True)), -1) for name, one in measures.items()}
    for channel, field in enumerate((*fields, None)):
        for step in range(together["spread"].shape[1]):
            spread, error, coverage = (together[name][:, step, channel] for name in ("spread", "error", "coverage"))
            for metric, values in (("spread_lead", spread), ("error_lead", error), ("coverage", coverage)):
                deviation = values.std() if len(values) > 1 else None
                findings.add(metric, values.mean(), deviation, field=field, lead=step + 1)
            findings.add("calibration", correlation(spread, error), field=field, lead=step + 1)
    findings.add("coverage_expected", (members - 1) / (members + 1))
    findings.add("members", members)


def correlation(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Pearson's, of two (n,); NaN where one of them does not vary."""
    first, second = (one - one.mean() for one in (first, second))
    return (first * second).sum() / (first.norm() * second.norm())


def _norm(frames: torch.Tensor) -> torch.Tensor:
    return frames.flatten(2, -2).norm(dim=2)
