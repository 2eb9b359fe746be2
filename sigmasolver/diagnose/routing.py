"""How points are routed to slices, and how slice attention is distributed (app:slice-attention-analysis).

    effective_slices         exp H(s),     s_m = 1/N Σ_n P_nm     slices in use; M: uniform, 1: a single one
    effective_slices_point   exp(1/N Σ_n H(P_n))                  slices per point
    key_concentration        (M Σ_j k_j² - 1)/(M - 1),  k_j = 1/M Σ_i A_ij     0: uniform, 1: a single key
    temperature              the clipped τ; temperature_head1, ... per head

H(p) = -Σ p ln p. Metrics are computed per head and then averaged over heads. The arrays are averages over heads of P,
reshaped to the grid, and of A (rows are queries, columns are keys).

Letters: B batch, H heads, N points, M slices.
"""

from __future__ import annotations

import numpy as np
import torch

from sigmasolver.diagnose.cases import add_cases, case_views, deviation
from sigmasolver.diagnose.subject import Findings, Subject
from sigmasolver.diagnose.watch import SliceView, slice_operators

__all__ = ["effective_slices", "effective_slices_per_point", "key_concentration", "routing"]


def effective_slices(P_BHNM: torch.Tensor) -> torch.Tensor:
    """(B, H): exp of the entropy of the slices' shares of all points; from 1 to M."""
    return _entropy(P_BHNM.double().mean(-2)).exp()


def effective_slices_per_point(P_BHNM: torch.Tensor) -> torch.Tensor:
    """(B, H): exp of the mean entropy of the weights of a point; from 1 to M."""
    return _entropy(P_BHNM.double()).mean(-1).exp()


def key_concentration(A_BHMM: torch.Tensor) -> torch.Tensor:
    """(B, H): how unevenly attention is distributed over keys, from 0 to 1; 1 for a single slice."""
    M = A_BHMM.shape[-1]
    energy = A_BHMM.double().mean(-2).square().sum(-1)
    # Round-off would make uniform weights slightly negative.
    return ((M * energy - 1) / (M - 1)).clamp(min=0) if M > 1 else torch.ones_like(energy)


def _entropy(p: torch.Tensor) -> torch.Tensor:
    """Entropy over the last axis; 0 ln 0 = 0."""
    return -torch.xlogy(p, p).sum(-1)


def routing(subject: Subject) -> Findings:
    """Rows per case and layer and means over cases; arrays `routing_L1` (cases, M, *grid) as float16 and
    `attention_L1` (cases, M, M), ... In 3D only the routing map of the first case and last layer is stored."""
    operators = slice_operators(subject)
    findings = Findings()
    for layer, operator in enumerate(operators, start=1):
        temperatures = operator.routing.clipped().detach().cpu()
        findings.add("temperature", temperatures.mean(), deviation(temperatures), layer=layer)
        for head, temperature in enumerate(temperatures, start=1):
            findings.add(f"temperature_head{head}", temperature, layer=layer)
    cases: list[int] = []
    maps: dict[str, list[np.ndarray]] = {}
    values_by_layer: dict[tuple[str, int], list[float]] = {}
    volume = len(subject.windows.grid) == 3  # a map of 60³ points and 32 slices takes 14 MB
    for case, views in case_views(subject):
        for view in views:
            metrics, A = _measure_view(view)
            for metric, value in metrics.items():
                values_by_layer.setdefault((metric, view.layer), []).append(value)
            if A is not None:
                maps.setdefault(f"attention_L{view.layer}", []).append(A)
            if not volume or (not cases and view.layer == len(operators)):
                maps.setdefault(f"routing_L{view.layer}", []).append(_on_grid(view.P_BHNM, subject.windows.grid))
        cases.append(case)
    for (metric, layer), values in values_by_layer.items():
        add_cases(findings, metric, cases, torch.tensor(values, dtype=torch.float64), layer)
    findings.arrays = {name: np.stack(arrays) for name, arrays in maps.items()} | {"cases": np.array(cases)}
    return findings


def _measure_view(view: SliceView) -> tuple[dict[str, float], np.ndarray | None]:
    """Metrics of one layer and case, and its attention averaged over heads."""
    metrics = {
        "effective_slices": effective_slices(view.P_BHNM).mean().item(),
        "effective_slices_point": effective_slices_per_point(view.P_BHNM).mean().item(),
    }
    if view.delta_BHMD is None:
        return metrics, None
    with torch.no_grad():
        A_BHMM = view.operator.update.attention.weights(view.Z_BHMD)
    metrics["key_concentration"] = key_concentration(A_BHMM).mean().item()
    return metrics, A_BHMM[0].mean(0).cpu().numpy()


def _on_grid(P_BHNM: torch.Tensor, grid: tuple[int, ...]) -> np.ndarray:
    """(M, *grid) of the first sample, averaged over heads."""
    mean_NM = P_BHNM[0].mean(0)
    return mean_NM.mT.reshape(-1, *grid).to(torch.float16).cpu().numpy()
