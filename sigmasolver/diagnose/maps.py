"""Pictures to be: truth and free forecast of a few windows at the leads to play (app:rollout-case-studies).

Fields are float16, which a picture does not see; where it could not hold the truth (values below 0.01 or above 60,000
at most), they are float32. A forecast that outgrows float16 becomes infinite there.
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch

from sigmasolver.data.windows import spread_evenly
from sigmasolver.diagnose.subject import Findings, Subject, fluid_points, without_solid
from sigmasolver.evaluate import metrics
from sigmasolver.forecast import rollout

__all__ = ["kept_leads", "maps", "shown_leads", "storage_type"]

CASES, CASES_3D = 4, 2
LEADS, FEWEST = 20, 4
ROOM = 70_000_000
"""Numbers that truth and forecast have together, at most, while more than `FEWEST` leads are kept: enough for all 16
leads of Smoke3D, which the paper shows."""
SMALL, LARGE = 1e-2, 6e4


def maps(subject: Subject) -> Findings:
    """Arrays: `truth`, `forecast` (cases, leads, *grid, fields), `given` (cases, *grid, input fields; the last frame
    of the history), `leads`, `cases` (numbers of the windows). Rows: `relative_l2` of each case, lead and field."""
    volume = len(subject.windows.grid) > 2
    cases = subject.indices[spread_evenly(len(subject.indices), CASES_3D if volume else CASES)]
    leads = kept_leads(subject.horizon, 2 * len(cases) * prod(subject.windows.grid) * len(subject.fields))
    kept = [lead - 1 for lead in leads]
    shown = Subject(
        subject.run, subject.recipe, subject.forecaster, subject.windows, cases, subject.horizon, 1, tick=subject.tick
    )
    given, truth, forecast, errors = [], [], [], []
    for indices, history, future in shown.batches():
        with torch.no_grad():
            frames = rollout(subject.forecaster, history, subject.horizon, times=subject.times(indices)).frames
        given.append(history[:, -1].cpu())
        truth.append(future[:, kept].cpu())
        forecast.append(frames[:, kept].cpu())
        fluid = fluid_points(subject.forecaster, history)
        errors.append(metrics.relative_l2_per_lead(*without_solid(fluid, frames[:, kept], future[:, kept])).cpu())
    start, true, predicted = (torch.cat(parts) for parts in (given, truth, forecast))
    with np.errstate(over="ignore"):
        arrays = {
            "truth": true.numpy().astype(storage_type(true)),
            "forecast": predicted.numpy().astype(storage_type(true)),
            "given": start.numpy().astype(storage_type(start)),
        }
    findings = Findings(arrays={**arrays, "leads": np.array(leads), "cases": cases.numpy()})
    for case, of_case in zip(cases.tolist(), torch.cat(errors), strict=True):
        for lead, of_lead in zip(leads, of_case, strict=True):
            for field, error in zip(subject.fields, of_lead, strict=True):
                findings.add("relative_l2", error, field=field, lead=lead, case=case)
    return findings


def kept_leads(horizon: int, numbers: int) -> list[int]:
    """All leads up to 20, or as many as there is room for at so many numbers each, but no less than four."""
    return shown_leads(horizon, min(LEADS, max(FEWEST, ROOM // numbers)))


def shown_leads(horizon: int, most: int) -> list[int]:
    """At most so many leads from the first to the last, evenly spread."""
    return [int(step) + 1 for step in spread_evenly(horizon, most)]


def storage_type(frames: torch.Tensor) -> type[np.floating]:
    """float16 where it holds every field of (..., fields) to three digits, else float32."""
    largest = frames.abs().flatten(0, -2).amax(0)
    fits = ((largest >= SMALL) & (largest <= LARGE)) | (largest == 0)
    return np.float16 if bool(fits.all()) else np.float32
