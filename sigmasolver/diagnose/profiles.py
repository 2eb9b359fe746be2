"""Spread of slices before and after every update, compared with the paper's bounds (app:srpa-theory).

    residual   [1 - |γ|c]₊ diam(Z) ≤ diam(Z⁺) ≤ (1 + |γ|c) diam(Z),    c = η(A) ‖W_v‖₂    (eq:srpa-diameter-bounds)
               (1 - |γ|κ)₊ V(Z)    ≤ V(Z⁺)    ≤ (1 + |γ|κ) V(Z)                           (eq:srpa-centered-bounds)
    replace    diam(Z⁺) ≤ c diam(Z),    V(Z⁺) ≤ κ V(Z)
    keep       Z⁺ = Z

Z are the actual states of a case; A, ΔZ and Z⁺ are recomputed from them and the trained weights in float64, because
float32 round-off would violate the exact bounds where slices have almost collapsed. Each bound holds per head, hence
also for the means over heads and cases in the rows.

Letters: B batch, H heads, M slices, D head width; η Dobrushin coefficient, κ = ‖ΠAΠ‖₂‖W_v‖₂, V centred variation.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import linear

from sigmasolver.diagnose.cases import add_cases, case_views
from sigmasolver.diagnose.geometry import centre, centred_gain, centred_variation, diameter, dobrushin
from sigmasolver.diagnose.subject import Findings, Subject
from sigmasolver.diagnose.watch import slice_operators
from sigmasolver.models.slices import SliceUpdate
from sigmasolver.ops.slices import attention_matrix

__all__ = ["exact_attention", "exact_update", "geometry", "profile"]


def exact_attention(update: SliceUpdate, Z_BHMD: torch.Tensor) -> torch.Tensor | None:
    """A (B, H, M, M) in float64, without dropout; None if the update keeps the slices."""
    if update.kind == "keep":
        return None
    Z, attention = Z_BHMD.double(), update.attention
    return attention_matrix(*(linear(Z, layer.weight.detach().double()) for layer in (attention.query, attention.key)))


def exact_update(update: SliceUpdate, Z_BHMD: torch.Tensor, A: torch.Tensor | None) -> torch.Tensor:
    """Z⁺ in float64 with attention A."""
    Z = Z_BHMD.double()
    if A is None:
        return Z
    delta = A @ linear(Z, update.attention.value.weight.detach().double())
    return delta if update.kind == "replace" else Z + update.gamma.detach().double() * delta


def profile(update: SliceUpdate, Z_BHMD: torch.Tensor) -> dict[str, torch.Tensor]:
    """Metrics by name, each (B, H): the spread before and after the update, and its bounds.

    `bound_...` is the upper and `floor_...` the lower bound; a replacement has no lower bound.
    """
    A = exact_attention(update, Z_BHMD)
    # Rows of A sum to one, so removing the mean first changes no spread, and avoids the round-off of a large mean.
    Z = centre(Z_BHMD.double())
    updated = exact_update(update, Z, A)
    before = {"diameter": diameter(Z), "variation": centred_variation(Z)}
    after = {"diameter": diameter(updated), "variation": centred_variation(updated)}
    metrics = {f"{name}_before": values for name, values in before.items()}
    metrics |= {f"{name}_after": values for name, values in after.items()}
    if A is None:
        return metrics | {f"bound_{name}": values for name, values in before.items()}
    W = update.attention.value.weight.detach().double().mT
    eta, kappa = dobrushin(A), centred_gain(A, W)
    metrics |= {"dobrushin": eta, "kappa": kappa}
    factors = {"diameter": eta * torch.linalg.matrix_norm(W, ord=2), "variation": kappa}
    for name, factor in factors.items():
        if update.kind == "replace":
            metrics[f"bound_{name}"] = factor * before[name]
            continue
        change = update.gamma.detach().double().abs() * factor
        metrics[f"bound_{name}"] = (1 + change) * before[name]
        metrics[f"floor_{name}"] = (1 - change).clamp(min=0) * before[name]
    return metrics


def geometry(subject: Subject) -> Findings:
    """Rows per case and layer (means over heads) and means over cases; arrays by metric (layers, cases, heads)."""
    layers = len(slice_operators(subject))
    cases: list[int] = []
    values: dict[str, list[list[torch.Tensor]]] = {}
    for case, views in case_views(subject):
        cases.append(case)
        for view in views:
            for metric, heads in profile(view.operator.update, view.Z_BHMD).items():
                values.setdefault(metric, [[] for _ in range(layers)])[view.layer - 1].append(heads[0].cpu())
    findings = Findings()
    for metric, by_layer in values.items():
        by_head = torch.stack([torch.stack(per_case) for per_case in by_layer])
        for layer, per_case in enumerate(by_head, start=1):
            add_cases(findings, metric, cases, per_case.mean(-1), layer)
        findings.arrays[metric] = by_head.numpy().astype(np.float32)
    findings.arrays["cases"] = np.array(cases)
    return findings
