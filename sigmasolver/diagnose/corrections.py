"""How strongly slices correct each other, layer by layer (app:srpa-layerwise-corrections).

    ρ_ℓ,c = |γ_ℓ| ‖ΔZ_ℓ,c‖ / ‖Z_ℓ,c‖,     ΔZ = A Z W_v        (eq:srpa-joint-ratio)

One norm over heads, slices and channels; ρ is averaged over cases, then over layers (eq:srpa-profile-means). Each case
is a single call from its true history with batch size 1; γ is the signed value stored in the weights.

Letters: B batch, H heads, M slices, D head width; ℓ layer, c case.
"""

from __future__ import annotations

import torch

from sigmasolver.diagnose.cases import add_cases, case_views
from sigmasolver.diagnose.subject import Findings, NotApplicable, Subject
from sigmasolver.diagnose.watch import slice_operators

__all__ = ["correction_ratio", "corrections"]


def correction_ratio(gamma: torch.Tensor, Z_BHMD: torch.Tensor, delta_BHMD: torch.Tensor) -> torch.Tensor:
    """ρ (B,), in float64; γ has shape (1,). NaN where all states are zero."""
    size, change = (torch.linalg.vector_norm(states.double(), dim=(1, 2, 3)) for states in (Z_BHMD, delta_BHMD))
    return gamma.double().abs() * change / size


def corrections(subject: Subject) -> Findings:
    """Rows `gamma` per layer and `correction_ratio` per case and layer, with means over cases and over layers."""
    operators = slice_operators(subject)
    if any(operator.update.kind != "residual" for operator in operators):
        raise NotApplicable(
            f"{subject.recipe.model.name} has no residual slice update to measure; choose a model with one, such as "
            "transolver-sigma."
        )
    gammas = [operator.update.gamma.detach() for operator in operators]
    cases, ratios = [], []
    for case, views in case_views(subject):
        cases.append(case)
        ratios.append(
            [
                correction_ratio(gamma, view.Z_BHMD, view.delta_BHMD).item()
                for gamma, view in zip(gammas, views, strict=True)
                if view.delta_BHMD is not None
            ]
        )
    findings, rho = Findings(), torch.tensor(ratios, dtype=torch.float64)
    for layer, gamma in enumerate(gammas, start=1):
        findings.add("gamma", gamma.item(), layer=layer)
        add_cases(findings, "correction_ratio", cases, rho[:, layer - 1], layer)
    add_cases(findings, "correction_ratio", cases, rho.mean(1))
    return findings
