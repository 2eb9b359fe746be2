"""How much a forecast depends on the orientation and the position of the flow, on which the equation does not.

Forecasts of transformed histories, transformed back (`forecast/symmetric.py`), are an ensemble of one model. Rows per
lead, as for an ensemble of seeds (`ensemble.py`): `spread_lead`, here with R instead of R - 1, so that it is at most
the root mean square error of the forecasts; `error_lead`, that of their mean; `coverage` and `calibration`; and
`single_lead`, the error of the usual forecast. All relative to the truth.
"""

from __future__ import annotations

import math

import torch

from sigmasolver.diagnose.ensemble import add_ensemble, measure_members
from sigmasolver.diagnose.subject import Findings, NotApplicable, Subject
from sigmasolver.evaluate import metrics
from sigmasolver.forecast.checkpoint import symmetries_of_run
from sigmasolver.forecast.symmetric import symmetric_forecasts
from sigmasolver.symmetries import refuse_unsuitable

__all__ = ["symmetry"]

COPIES = 8
"""Symmetries, or as many as there are."""


def symmetry(subject: Subject) -> Findings:
    """Rows per lead, for each field and for their mean (field null)."""
    forecaster, task = subject.forecaster, subject.recipe.task
    windows = subject.windows
    try:
        group = symmetries_of_run(subject.run, subject.recipe)
        refuse_unsuitable(group, task, windows.source.header, windows.spec.space_stride)
    except ValueError as error:
        raise NotApplicable(str(error)) from None
    if forecaster.mask is not None:
        raise NotApplicable("Symmetries are not compared where a mask excludes points.")
    copies = min(COPIES, len(group.on(windows.grid)))
    parts = []
    for indices, history, truth in subject.batches():
        forecasts = symmetric_forecasts(forecaster, history, subject.horizon, group, copies, subject.times(indices))
        members = torch.stack([forecast.frames for forecast in forecasts])
        measured = measure_members(members, truth)
        measured["spread"] = measured["spread"] * math.sqrt((copies - 1) / copies)
        parts.append(measured | {"single": metrics.relative_l2_per_lead(members[0], truth).cpu()})
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
