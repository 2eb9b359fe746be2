"""How far apart slices are before and after every update, against the paper's bounds (app:srpa-theory).

    residual   [1 - |γ|c]₊ diam(Z) ≤ diam(Z⁺) ≤ (1 + |γ|c) diam(Z),    c = η(A) ‖W_v‖₂    (eq:srpa-diameter-bounds)
               (1 - |γ|κ)₊ V(Z)    ≤ V(Z⁺)    ≤ (1 + |γ|κ) V(Z)                           (eq:srpa-centered-bounds)
    replace    diam(Z⁺) ≤ c diam(Z),    V(Z⁺) ≤ κ V(Z)
    keep       Z⁺ = Z

Z are the states that a case really produces; A, ΔZ and Z⁺ are made of them and the trained weights anew, in float64:
the bounds are exact statements, and float32 would break them where slices have almost collapsed. Each holds head by
head, hence also for the means over heads and cases that the rows tell.

Letters: B batch, H heads, M slices, D head width; η Dobrushin coefficient, κ = ‖ΠAΠ‖₂‖W_v‖₂, V centred variation.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn.functional import linear

from sigmasolver.diagnose.cases import add_cases, views_of_cases
from sigmasolver.diagnose.geometry import centre, centred_gain, centred_variation, diameter, dobrushin
from sigmasolver.diagnose.subject import Findings, Subject
from sigmasolver.diagnose.watch import slice_operators
from sigmasolver.models.slices import SliceUpdate
from sigmasolver.ops.slices import attention_matrix

__all__ = ["exact_attention", "exact_update", "geometry", "profile"]


def exact_attention(update: SliceUpdate, Z_BHMD: torch.Tensor) -> torch.Tensor | None:
    """A (B, H, M, M) in float64, without dropout; None where slices are kept."""
    if update.kind == "keep":
        return None
    Z, attention = Z_BHMD.double(), update.attention
    return attention_matrix(*(linear(Z, part.weight.detach().double()) for part in (attention.query, attention.key)))


def exact_update(update: SliceUpdate, Z_BHMD: torch.Tensor, A: torch.Tensor | None) -> torch.Tensor:
    """Z⁺ in float64 by this attention."""
    Z = Z_BHMD.double()
    if A is None:
        return Z
    delta = A @ linear(Z, update.attention.value.weight.detach().double())
    return delta if update.kind == "replace" else Z + update.gamma.detach().double() * delta


def profile(update: SliceUpdate, Z_BHMD: torch.Tensor) -> dict[str, torch.Tensor]:
    """By the name of the metric (B, H): what the update did to the states, and what the bounds allow.

    `bound_...` is the most and `floor_...` the least that can remain; a replacement has no floor.
    """
    A = exact_attention(update, Z_BHMD)
    # Rows of A sum to one, so a mean taken off before comes off after too, and with it the rounding of large means.
    Z = centre(Z_BHMD.double())
    updated = exact_update(update, Z, A)
    before = {"diameter": diameter(Z), "variation": centred_variation(Z)}
    after = {"diameter": diameter(updated), "variation": centred_variation(updated)}
    found = {f"{name}_before": values for name, values in before.items()}
    found |= {f"{name}_after": values for name, values in after.items()}
    if A is None:
        return found | {f"bound_{name}": values for name, values in before.items()}
    W = update.attention.value.weight.detach().double().mT
    eta, kappa = dobrushin(A), centred_gain(A, W)
    found |= {"dobrushin": eta, "kappa": kappa}
    factors = {"diameter": eta * torch.linalg.matrix_norm(W, ord=2), "variation": kappa}
    for name, factor in factors.items():
        if update.kind == "replace":
            found[f"bound_{name}"] = factor * before[name]
            continue
        change = update.gamma.detach().double().abs() * factor
        found[f"bound_{name}"] = (1 + change) * before[name]
        found[f"floor_{name}"] = (1 - change).clamp(min=0) * before[name]
    return found


def geometry(subject: Subject) -> Findings:
    """Rows for every case and layer (means over heads), and over cases; arrays by metric (layers, cases, heads)."""
    layers = len(slice_operators(subject))
    cases: list[int] = []
    values: dict[str, list[list[torch.Tensor]]] = {}
    for case, views in views_of_cases(subject):
        cases.append(case)
        for view in views:
            for metric, each in profile(view.operator.update, view.Z_BHMD).items():
                values.setdefault(metric, [[] for _ in range(layers)])[view.layer - 1].append(each[0].cpu())
    findings = Findings()
    for metric, by_layer in values.items():
        heads = torch.stack([torch.stack(each) for each in by_layer])
        for layer, one in enumerate(heads, start=1):
            add_cases(findings, metric, cases, one.mean(-1), layer)
        findings.arrays[metric] = heads.numpy().astype(np.float32)
    findings.arrays["cases"] = np.array(cases)
    return findings
