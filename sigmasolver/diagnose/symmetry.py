"""How much a forecast depends on the orientation and the position of the flow, on which the equation does not.

Forecasts of transformed histories, transformed back (`forecast/symmetric.py`), are an ensemble of one model. Rows per
lead, as for an ensemble of seeds (`ensemble.py`): `spread_lead`, which needs no truth, next to `error_lead`, that of
the mean, `coverage` and `calibration`; and `single_lead`, the error of the usual forecast. All relative to the truth.
"""

from __future__ import annotations

import torch

from sigmasolver.diagnose.ensemble import add_ensemble, measure_members
from sigmasolver.diagnose.subject import Findings, NotApplicable, Subject
from sigmasolver.evaluate import metrics
from sigmasolver.forecast.symmetric import symmetric_forecasts
from sigmasolver.symmetries import refuse_other_forcing, symmetries_of

__all__ = ["symmetry"]

COPIES = 8
"""Symmetries, or as many as there are."""


def symmetry(subject: Subject) -> Findings:
    """Rows per lead, for each field and for their mean (field null)."""
    forecaster = subject.forecaster
    try:
        group = symmetries_of(subject.recipe.task)
        group.on(subject.windows.grid)
        refuse_other_forcing(group, subject.windows.source.header)
    except ValueError as error:
        raise NotApplicable(str(error)) from None
    if forecaster.mask is not None:
        raise NotApplicable("Symmetries are not compared where a mask excludes points.")
    copies = COPIES if group.translations else min(COPIES, len(group.isometries))
    parts = []
    for indices, history, truth in subject.batches():
        forecasts = symmetric_forecasts(forecaster, history, subject.horizon, group, copies, subject.times(indices))
        members = torch.stack([forecast.frames for forecast in forecasts])
        parts.append(
            measure_members(members, truth) | {"single": metrics.relative_l2_per_lead(members[0], truth).cpu()}
        )
    measures = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    single = measures.pop("single")
    findings = Findings()
    add_ensemble(findings, measures, subject.fields, copies)
    with_mean = torch.cat((single, single.mean(-1, keepdim=True)), -1)
    for channel, field in enumerate((*subject.fields, None)):
        for lead, errors in enumerate(with_mean[..., channel].unbind(1), start=1):
            deviation = errors.std() if len(errors) > 1 else None
            findings.add("single_lead", errors.mean(), deviation, field=field, lead=lead)
    return findings
