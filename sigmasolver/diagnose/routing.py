"""Who goes where: how points are routed to slices, and which slices are listened to (app:slice-attention-analysis).

    effective_slices         exp H(s),     s_m = 1/N Σ_n P_nm     how many slices share the points; M: evenly, 1: one
    effective_slices_point   exp(1/N Σ_n H(P_n))                  among how many slices one point is split
    key_concentration        (M Σ_j k_j² - 1)/(M - 1),  k_j = 1/M Σ_i A_ij     0: all keys alike, 1: one key only
    temperature              the clipped τ; temperature_head1, ... head by head

H(p) = -Σ p ln p. The numbers are made head by head and then averaged over heads. The arrays are averages over heads of
P, folded back onto the grid, and of A (rows ask, columns answer).

Letters: B batch, H heads, N points, M slices.
"""

from __future__ import annotations

import numpy as np
import torch

from sigmasolver.diagnose.cases import add_cases, deviation, views_of_cases
from sigmasolver.diagnose.subject import Findings, Subject
from sigmasolver.diagnose.watch import SliceView, slice_operators

__all__ = ["effective_slices", "effective_slices_per_point", "key_concentration", "routing"]


def effective_slices(P_BHNM: torch.Tensor) -> torch.Tensor:
    """(B, H): exp of the entropy of the share that every slice has of all points; from 1 to M."""
    return _entropy(P_BHNM.double().mean(-2)).exp()


def effective_slices_per_point(P_BHNM: torch.Tensor) -> torch.Tensor:
    """(B, H): exp of the mean entropy of the points' own weights; from 1 to M."""
    return _entropy(P_BHNM.double()).mean(-1).exp()


def key_concentration(A_BHMM: torch.Tensor) -> torch.Tensor:
    """(B, H): how unevenly the keys are read, from 0 to 1; with a single slice 1."""
    M = A_BHMM.shape[-1]
    energy = A_BHMM.double().mean(-2).square().sum(-1)
    # Rounding of even weights would show as a tiny negative number.
    return ((M * energy - 1) / (M - 1)).clamp(min=0) if M > 1 else torch.ones_like(energy)


def _entropy(p: torch.Tensor) -> torch.Tensor:
    """Of the last axis; 0 ln 0 = 0."""
    return -torch.xlogy(p, p).sum(-1)


def routing(subject: Subject) -> Findings:
    """Rows for every case and layer, and over cases; arrays `routing_L1` (cases, M, *grid) as float16 and
    `attention_L1` (cases, M, M), ... In three dimensions the maps are those of the first case and the last layer."""
    operators = slice_operators(subject)
    findings = Findings()
    for layer, operator in enumerate(operators, start=1):
        temperatures = operator.routing.clipped().detach().cpu()
        findings.add("temperature", temperatures.mean(), deviation(temperatures), layer=layer)
        for head, temperature in enumerate(temperatures, start=1):
            findings.add(f"temperature_head{head}", temperature, layer=layer)
    cases: list[int] = []
    maps: dict[str, list[np.ndarray]] = {}
    numbers: dict[tuple[str, int], list[float]] = {}
    volume = len(subject.windows.grid) == 3  # one map of 60³ points and 32 slices has 14 MB
    for case, views in views_of_cases(subject):
        for view in views:
            measured, A = _measured(view)
            for metric, value in measured.items():
                numbers.setdefault((metric, view.layer), []).append(value)
            if A is not None:
                maps.setdefault(f"attention_L{view.layer}", []).append(A)
            if not volume or (not cases and view.layer == len(operators)):
                maps.setdefault(f"routing_L{view.layer}", []).append(_on_grid(view.P_BHNM, subject.windows.grid))
        cases.append(case)
    for (metric, layer), values in numbers.items():
        add_cases(findings, metric, cases, torch.tensor(values, dtype=torch.float64), layer)
    findings.arrays = {name: np.stack(each) for name, each in maps.items()} | {"cases": np.array(cases)}
    return findings


def _measured(view: SliceView) -> tuple[dict[str, float], np.ndarray | None]:
    """The numbers of one layer and case, and its attention averaged over heads."""
    measured = {
        "effective_slices": effective_slices(view.P_BHNM).mean().item(),
        "effective_slices_point": effective_slices_per_point(view.P_BHNM).mean().item(),
    }
    if view.delta_BHMD is None:
        return measured, None
    with torch.no_grad():
        A_BHMM = view.operator.update.attention.weights(view.Z_BHMD)
    measured["key_concentration"] = key_concentration(A_BHMM).mean().item()
    return measured, A_BHMM[0].mean(0).cpu().numpy()


def _on_grid(P_BHNM: torch.Tensor, grid: tuple[int, ...]) -> np.ndarray:
    """(M, *grid) of the first sample, averaged over heads."""
    mean_NM = P_BHNM[0].mean(0)
    return mean_NM.mT.reshape(-1, *grid).to(torch.float16).cpu().numpy()
