"""Data for pictures: truth and free forecast of a few windows at selected leads (app:rollout-case-studies).

Fields are stored as float16, which makes no visible difference; if the truth is out of its range (largest value below
0.01 or above 60,000), as float32. A forecast that overflows float16 becomes infinite.
"""

from __future__ import annotations

from math import prod

import numpy as np
import torch

from sigmasolver.data.windows import spread_evenly
from sigmasolver.diagnose.subject import Findings, Subject, without_solid
from sigmasolver.evaluate import metrics
from sigmasolver.forecast import rollout

__all__ = ["maps", "spread_leads", "storage_type", "stored_leads"]

CASES, CASES_3D = 4, 2
MAX_LEADS, MIN_LEADS = 20, 4
MAX_VALUES = 70_000_000
"""Maximum number of values in truth and forecast, unless there are only `MIN_LEADS` leads: enough for the 16 leads of
Smoke3D in the paper."""
SMALL, LARGE = 1e-2, 6e4


def maps(subject: Subject) -> Findings:
    """Arrays: `truth`, `forecast` (cases, leads, *grid, fields), `given` (cases, *grid, input fields; the last frame
    of the history), `leads`, `cases` (window numbers). Rows: `relative_l2` of each case, lead and field."""
    volume = len(subject.windows.grid) > 2
    cases = subject.indices[spread_evenly(len(subject.indices), CASES_3D if volume else CASES)]
    leads = stored_leads(subject.horizon, 2 * len(cases) * prod(subject.windows.grid) * len(subject.fields))
    steps = [lead - 1 for lead in leads]
    selected = Subject(
        subject.run, subject.recipe, subject.forecaster, subject.windows, cases, subject.horizon, 1, tick=subject.tick
    )
    given, truth, forecast, errors = [], [], [], []
    for indices, history, future in selected.batches():
        with torch.no_grad():
            frames = rollout(subject.forecaster, history, subject.horizon, times=subject.times(indices)).frames
        given.append(history[:, -1].cpu())
        truth.append(future[:, steps].cpu())
        forecast.append(frames[:, steps].cpu())
        fluid = subject.forecaster.fluid_points(history)
        errors.append(metrics.relative_l2_per_lead(*without_solid(fluid, frames[:, steps], future[:, steps])).cpu())
    last_input, true, predicted = (torch.cat(parts) for parts in (given, truth, forecast))
    with np.errstate(over="ignore"):
        arrays = {
            "truth": true.numpy().astype(storage_type(true)),
            "forecast": predicted.numpy().astype(storage_type(true)),
            "given": last_input.numpy().astype(storage_type(last_input)),
        }
    findings = Findings(arrays={**arrays, "leads": np.array(leads), "cases": cases.numpy()})
    for case, case_errors in zip(cases.tolist(), torch.cat(errors), strict=True):
        for lead, lead_errors in zip(leads, case_errors, strict=True):
            for field, error in zip(subject.fields, lead_errors, strict=True):
                findings.add("relative_l2", error, field=field, lead=lead, case=case)
    return findings


def stored_leads(horizon: int, numbers: int) -> list[int]:
    """Evenly spread leads, each of `numbers` values: as many as the limits allow, at least `MIN_LEADS`."""
    return spread_leads(horizon, min(MAX_LEADS, max(MIN_LEADS, MAX_VALUES // numbers)))


def spread_leads(horizon: int, most: int) -> list[int]:
    """At most `most` leads from the first to the last, evenly spread."""
    return [int(step) + 1 for step in spread_evenly(horizon, most)]


def storage_type(frames: torch.Tensor) -> type[np.floating]:
    """float16 where it holds every field of (..., fields) to three digits, else float32."""
    largest = frames.abs().flatten(0, -2).amax(0)
    fits = ((largest >= SMALL) & (largest <= LARGE)) | (largest == 0)
    return np.float16 if bool(fits.all()) else np.float32
