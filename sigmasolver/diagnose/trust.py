"""How far a free forecast can be trusted: correlation with the truth, energy spectra, distance to the training data.

    correlation_lead   Pearson correlation over points, mean over windows; correlation_time: first lead time below 0.8,
                       if the lead times are the same in all windows
    distance_lead      distance of forecast states to the nearest training state, relative to the typical one
    distance_true_lead the same for the true states, as a reference
    spectrum_*         mean energy in shells of the wavenumber (periodic grids only)

With other seeds of the same model also: spread_lead, error_lead, calibration and coverage (`diagnose.ensemble`).
"""

from __future__ import annotations

import numpy as np
import torch

from sigmasolver.data.mask import in_fluid
from sigmasolver.diagnose.ensemble import add_ensemble, measure_members
from sigmasolver.diagnose.states import States, training_states
from sigmasolver.diagnose.subject import Findings, Subject, without_solid
from sigmasolver.evaluate import metrics
from sigmasolver.forecast import rollout

__all__ = ["trust"]

Measures = dict[str, torch.Tensor]
"""By name, one entry per window: (windows, leads, ...)."""


def trust(subject: Subject) -> Findings:
    """Rows per lead, for each field and for their mean (field null).

    Arrays: `correlation` (windows, leads, fields; NaN where truth or forecast is constant), `distance` (windows,
    leads), and on periodic grids `spectrum_true`, `spectrum_forecast` (leads, bins, fields) and `wavenumber` (bins,).
    The distance requires at least two training trajectories.
    """
    mask = subject.forecaster.mask
    states = None if subject.training is None else training_states(subject.training, subject.device, mask)
    sides = subject.windows.sides
    parts = []
    for indices, history, truth in subject.batches():
        times = subject.times(indices)
        with torch.no_grad():
            frames = [
                rollout(member, history, subject.horizon, times=times).frames
                for member in (subject.forecaster, *subject.peers)
            ]
        parts.append(_measure(frames, truth, states, sides, subject.forecaster.fluid_points(history)))
    measures = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    findings = Findings()
    _add_correlation(findings, measures, subject)
    if states is not None:
        _add_distance(findings, measures, states)
    if sides is not None:
        _add_spectra(findings, measures)
    if subject.peers:
        ensemble = {name: measures[name] for name in ("spread", "error", "coverage")}
        add_ensemble(findings, ensemble, subject.fields, 1 + len(subject.peers))
    return findings


def _measure(
    frames: list[torch.Tensor],
    truth: torch.Tensor,
    states: States | None,
    sides: tuple[float, ...] | None,
    fluid: torch.Tensor | None = None,
) -> Measures:
    """Measures of a batch; the first entry of `frames` is the forecast, the others are those of the peers.

    If not all points are `fluid`, correlation and coverage exclude the solid; states and spectra are zero there.
    """
    measures = _measure_at_points(frames, truth, fluid)
    forecast, truth = without_solid(fluid, frames[0], truth)
    if states is not None:
        measures |= {"distance": states.nearest(forecast), "distance_true": states.nearest(truth)}
    if sides is not None:
        measures["spectrum_true"] = metrics.energy_spectrum(truth, sides)
        measures["spectrum_forecast"] = metrics.energy_spectrum(forecast, sides)
    return {name: values.cpu() for name, values in measures.items()}


def _measure_at_points(frames: list[torch.Tensor], truth: torch.Tensor, fluid: torch.Tensor | None) -> Measures:
    if fluid is not None:
        samples = []
        for sample, where in enumerate(fluid[:, 0, ..., 0]):
            inside = [in_fluid(values[sample], where)[None] for values in (*frames, truth)]
            samples.append(_measure_at_points(inside[:-1], inside[-1], None))
        return {name: torch.cat([measured[name] for measured in samples]) for name in samples[0]}
    measures = {"correlation": metrics.pearson(frames[0], truth), "constant": metrics.is_constant(truth)}
    return measures | (measure_members(torch.stack(frames), truth) if len(frames) > 1 else {})


def _add_correlation(findings: Findings, measures: Measures, subject: Subject) -> None:
    """Add correlation rows; a constant truth has no correlation and is excluded."""
    lead_times = subject.windows.lead_times(subject.indices)
    findings.arrays["correlation"] = measures["correlation"].float().numpy()
    for field, channels in _channels_by_name(subject.fields):
        values, constant = (measures[key][..., channels] for key in ("correlation", "constant"))
        mean = metrics.mean_correlation(values, constant, "lead")
        for lead, value in enumerate(mean, start=1):
            findings.add("correlation_lead", value, field=field, lead=lead)
        if lead_times is not None:
            when = metrics.correlation_time(mean, lead_times[: subject.horizon])
            findings.add("correlation_time", when, field=field)


def _channels_by_name(fields: tuple[str, ...]) -> list[tuple[str | None, list[int]]]:
    """Channel of each field, and all channels under None."""
    return [*((name, [channel]) for channel, name in enumerate(fields)), (None, list(range(len(fields))))]


def _add_distance(findings: Findings, measures: Measures, states: States) -> None:
    typical = states.typical().cpu()
    findings.add("distance_typical", typical)
    findings.add("distance_states", len(states.values))
    findings.arrays["distance"] = (measures["distance"] / typical).float().numpy()
    for metric, name in (("distance_lead", "distance"), ("distance_true_lead", "distance_true")):
        ratios = measures[name] / typical
        for lead, values in enumerate(ratios.unbind(1), start=1):
            findings.add(metric, values.mean(), values.std() if len(values) > 1 else None, lead=lead)


def _add_spectra(findings: Findings, measures: Measures) -> None:
    for name in ("spectrum_true", "spectrum_forecast"):
        findings.arrays[name] = measures[name].mean(0).float().numpy()
    findings.arrays["wavenumber"] = np.arange(findings.arrays["spectrum_true"].shape[1], dtype=np.float32)
