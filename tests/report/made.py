"""Synthetic records in the format of `sigmasolver evaluate` and `sigmasolver diagnose`, with plausible magnitudes."""

import numpy as np

TRIO = ("transolver-sigma", "physolver", "specsolver")
GROWTH = {"transolver-sigma": (0.4, 0.35), "physolver": (0.5, 1.4), "specsolver": (1.2, 0.8)}
FIELDS = {
    "darcy": ("pressure",),
    "it3d": ("pressure", "velocity_x", "velocity_y", "velocity_z", "velocity", "all"),
    "smoke3d": ("density", "velocity_x", "velocity_y", "velocity_z", "velocity", "all"),
}


def facts(task, model, seed=42, run=None, **more):
    """Keys common to all rows of one run."""
    return {
        "task": task, "model": model, "seed": seed, "run": run or f"{task}-{model}-{seed}", "part": "test",
        "protocol": "free", "windows": 200, "horizon": 10, "grid": [64, 64], "step": 100, "weights": "0123456789abcdef",
        "package": "0.1", "precision": "float32", "forecast_precision": "float32", "data": "f" * 16,
        "commit": "abc1234", "machine": "none", "torch": "2.13", "date": "2026-01-01", **more,
    }  # fmt: skip


def row(source, metric, value, **more):
    keys = {"field": None, "lead": None, "value": value}
    return {**source, **keys, "metric": metric, **more}


def finding(source, diagnostic, metric, value, **more):
    keys = {"field": None, "lead": None, "layer": None, "case": None, "deviation": None}
    return {**source, "diagnostic": diagnostic, **keys, "metric": metric, "value": value, **more}


def errors(task, model, seed=42, horizon=10, protocol="free", **more):
    """Errors per lead of one run for every field of its task, with those of persistence."""
    source = facts(task, model, seed, protocol=protocol, horizon=horizon, **more)
    start, growth = GROWTH.get(model, (0.9, 1.0))
    if protocol == "teacher-forced":
        growth /= 8
    shift = 1 + 0.05 * (seed - 42)
    rows = []
    for index, field in enumerate(FIELDS.get(task, ("vorticity",))):
        for lead in range(1, horizon + 1):
            value = shift * (1 + 0.1 * index) * (start + growth * (lead - 1) ** 1.3) / 100
            rows.append(row(source, "relative_l2_lead", value, field=field, lead=lead, deviation=value / 5))
        rows.append(row(source, "relative_l2", rows[-1]["value"] / 2, field=field, deviation=0.001))
    persist = {**source, "model": "persistence", "seed": None}
    rows += [row(persist, "relative_l2_lead", 0.2 + 0.05 * lead, field="vorticity", lead=lead) for lead in (1, horizon)]
    return [*rows, row(source, "parameters", 1245289)]


def decomposition(task, model, horizon=10, block=1, fields=("vorticity",)):
    source = facts(task, model, horizon=horizon)
    size, growth = GROWTH[model]
    rows = []
    for field in (*fields, None):
        for lead in range(1, horizon + 1):
            calls = (lead - 1) // block
            injection = 1e-4 * size * (1 + 0.3 * lead)
            propagation = 1e-4 * growth * calls**1.6
            cross = (-0.5 if model == "physolver" else 0.4) * (injection * propagation) ** 0.5
            total = injection + propagation + cross
            parts = {"injection": injection, "propagation": propagation, "cross": cross, "total": total}
            for name, value in parts.items():
                for kind, scale in (("", 4096.0), ("_relative", 1.0)):
                    entry = finding(source, "decomposition", name + kind, scale * value, field=field, lead=lead)
                    rows.append({**entry, "deviation": 0.1 * value})
                if name != "total":
                    rows.append(
                        finding(source, "decomposition", f"{name}_share", value / total, field=field, lead=lead)
                    )
    return rows


def symmetry(task, model, seed=42, horizon=10, fields=("vorticity",)):
    """Errors of one forecast, of the mean, and their difference: in the ratio 1 : 0.75 : 0.6."""
    source, rows = facts(task, model, seed, horizon=horizon), []
    for lead in range(1, horizon + 1):
        error = 1e-2 * GROWTH[model][0] * lead
        for metric, factor in (("single_lead", 1.0), ("error_lead", 0.75), ("spread_lead", 0.6)):
            rows += [finding(source, "symmetry", metric, factor * error, field=f, lead=lead) for f in (*fields, None)]
    return rows


def components(task, model, seed=42, horizon=4):
    """Errors at two scales with their bounds, and gains with a distinct value per metric, source and target."""
    source = facts(task, model, seed, horizon=horizon)
    rows, shift = [], 1 + 0.1 * (seed - 42)
    for source_index, scale in enumerate(("low", "high")):
        for metric, factor in (("defect", 0.5), ("error", 1), ("bound_measured", 2), ("bound_lower_estimate", 3)):
            for lead in range(1, horizon + 1):
                value = shift * factor * (1 + source_index) * lead**2
                rows.append(finding(source, "components", f"{metric}_{scale}", value, lead=lead))
        for target_index, target in enumerate(("low", "high")):
            value = shift * (0.4 + 0.2 * source_index + 0.1 * target_index)
            rows.append(finding(source, "components", f"uniform_amplification_{scale}_{target}", value))
            rows.append(finding(source, "components", f"uniform_gain_{scale}_{target}_lower_estimate", 2 * value))
    radii = (("measured", 0.9), ("lower_estimate", 1.8))
    return rows + [finding(source, "components", f"spectral_radius_{kind}", shift * value) for kind, value in radii]


def corrections(task, layers=8, cases=(0, 7, 19)):
    rng = np.random.default_rng(sum(map(ord, task)))
    source = facts(task, "transolver-sigma")
    gamma = rng.normal(0.2, 0.4, layers)
    ratios = np.abs(gamma) * rng.uniform(0.3, 1.0, layers) * rng.uniform(0.85, 1.15, (len(cases), layers))
    rows = [finding(source, "corrections", "gamma", g, layer=layer) for layer, g in enumerate(gamma, 1)]
    for case, case_ratios in zip(cases, ratios, strict=True):
        rows += [
            finding(source, "corrections", "correction_ratio", r, layer=layer, case=case)
            for layer, r in enumerate(case_ratios, 1)
        ]
    rows += [
        finding(source, "corrections", "correction_ratio", m, layer=layer) for layer, m in enumerate(ratios.mean(0), 1)
    ]
    return [*rows, finding(source, "corrections", "correction_ratio", ratios.mean())], gamma, ratios


def smooth_field(rng, shape, width=0.12):
    """Random periodic field of unit variance; `width` is the structure size relative to the domain."""
    wavenumbers = np.meshgrid(*(np.fft.fftfreq(n, 1 / n) for n in shape), indexing="ij")
    low_pass = np.exp(-0.5 * (width * np.sqrt(sum(k**2 for k in wavenumbers))) ** 2 * np.pi)
    field = np.fft.ifftn(np.fft.fftn(rng.standard_normal(shape)) * low_pass).real
    return (field - field.mean()) / field.std()


def routing(model, layers=(1, 2), slices=32, grid=(64, 64), cases=2, sharp=4.0):
    rng = np.random.default_rng(len(model))
    arrays = {"cases": np.arange(cases)}
    for layer in layers:
        logits = np.stack([[smooth_field(rng, grid) for _ in range(slices)] for _ in range(cases)])
        logits *= sharp
        logits += rng.normal(0, 0 if model == "transolver-sigma" else 5, (1, slices, *[1] * len(grid)))
        shares = np.exp(logits - logits.max(1, keepdims=True))
        arrays[f"routing_L{layer}"] = (shares / shares.sum(1, keepdims=True)).astype(np.float16)
        scores = rng.normal(0, 0.6, (cases, slices, slices))
        scores += rng.normal(0, 0.3 if model == "transolver-sigma" else 1.8, (cases, 1, slices))
        weights = np.exp(scores)
        arrays[f"attention_L{layer}"] = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    source = facts("ns2d", model)
    rows = [
        finding(source, "routing", metric, value, layer=layer)
        for layer in layers
        for metric, value in (("effective_slices", 20.5 + layer), ("key_concentration", 0.1))
    ]
    return rows, arrays


def maps(task, model, grid=(64, 64), leads=(1, 3, 6, 8, 10), fields=("vorticity",), cases=2):
    """Maps with the same truth for every model of a task, and errors that grow with the lead."""
    truth_rng = np.random.default_rng(sum(map(ord, task)))
    rng = np.random.default_rng(len(model))
    start, growth = GROWTH[model]
    shape = (cases, len(leads), *grid, len(fields))
    truth, forecast = np.zeros(shape), np.zeros(shape)
    source, rows = facts(task, model), []
    for case in range(cases):
        for channel, field in enumerate(fields):
            mean_field, drift = smooth_field(truth_rng, grid), smooth_field(truth_rng, grid)
            for index, lead in enumerate(leads):
                true_frame = mean_field + 0.08 * lead * drift
                error_field = 0.02 * (start + growth * lead) * smooth_field(rng, grid, 0.06) * np.abs(drift)
                truth[case, index, ..., channel] = true_frame
                forecast[case, index, ..., channel] = true_frame + error_field
                relative_error = np.linalg.norm(error_field) / np.linalg.norm(true_frame)
                rows.append(finding(source, "maps", "relative_l2", relative_error, field=field, lead=lead, case=case))
    arrays = {"truth": truth.astype(np.float16), "forecast": forecast.astype(np.float16), "given": truth[:, 0]}
    return rows, {**arrays, "leads": np.array(leads), "cases": np.arange(cases)}


def maps_of_models(task, models, **more):
    """Rows and arrays of maps for several models."""
    parts = {model: maps(task, model, **more) for model in models}
    rows = [entry for model_rows, _ in parts.values() for entry in model_rows]
    return rows, {f"{task}-{model}-42": arrays for model, (_, arrays) in parts.items()}


SCALES = {"transolver-sigma": -0.1, "physolver": -0.6, "specsolver": 0.35}
"""Exponent by which the smallest scales of a forecast decay (negative) or grow per ten leads."""


def trust(task, model, seed=42, horizon=10, bins=46, fields=("vorticity",)):
    """Correlations, and spectra with a power-law decay; all models share the truth."""
    source, rows = facts(task, model, seed, horizon=horizon), []
    for field in (*fields, None):
        for lead in range(1, horizon + 1):
            rows.append(finding(source, "trust", "correlation_lead", 1 - 0.01 * lead, field=field, lead=lead))
    waves, leads = np.arange(bins), np.arange(1, horizon + 1)
    shape = (waves + 1) ** 2 / (1 + (waves / 4) ** 6) * np.exp(-waves / 12)
    truth = shape[None, :, None] * (1 + np.arange(len(fields))) * np.exp(-0.02 * leads)[:, None, None]
    change = SCALES.get(model, -0.3) * (1 + 0.2 * (seed - 42))
    forecast = truth * np.exp(change * leads[:, None] / 10 * (waves / bins * 3) ** 2)[..., None]
    arrays = {"spectrum_true": truth, "spectrum_forecast": forecast, "wavenumber": waves}
    return rows, {name: array.astype(np.float32) for name, array in arrays.items()}


def spectra_of_models(task, models, seeds=(42,), **more):
    """Rows and arrays of spectra for several models and seeds."""
    parts = {(m, s): trust(task, m, s, **more) for m in models for s in seeds}
    rows = [entry for model_rows, _ in parts.values() for entry in model_rows]
    return rows, {f"{task}-{model}-{seed}": arrays for (model, seed), (_, arrays) in parts.items()}


COSTS = {
    "ns2d": {
        "hpm-frozen": (240, 4800, 66.21), "drift-net": (430, 5100, 76.3), "factformer": (210.461, 6900, 66.92),
        "transolver": (180, 5600, 22.9), "transolver-sigma": (200.132, 6200, 19.44),
    },
    "kf2d": {
        "hpm-frozen": (690, 5900, 79.63), "drift-net": (760, 4300, 76.3), "factformer": (980, 9900, 18.0),
        "transolver": (640, 7100, 6.1), "transolver-sigma": (700, 7600, 7.2),
    },
}  # fmt: skip


def efficiency(task, model, values):
    source = facts(task, model)
    seconds, peak, size = values
    return [
        finding(source, "efficiency", "seconds_per_epoch", seconds, deviation=0.03 * seconds),
        finding(source, "efficiency", "peak_megabytes", peak),
        finding(source, "efficiency", "parameter_megabytes", size),
    ]


SWEEPS = {
    "data": ((1000, 4.1), (2000, 3.5), (3000, 3.3), (4000, 3.25), (5000, 3.2)),
    "grid": ((85, 4.1), (106, 3.6), (141, 3.0), (211, 2.8), (421, 2.75)),
    "width": ((32, 3.3), (64, 2.4), (128, 1.9), (192, 1.85), (256, 1.75)),
}


def scaling(sweep, setting, thousandths, windows=200):
    source = facts("darcy", "transolver-sigma", run=f"darcy-{sweep}-{setting}", windows=windows)
    value = thousandths / 1e3
    error_row = row(source, "relative_l2", value, field="pressure", deviation=value / 3)
    return [error_row, row(source, "parameters", 125161 if setting == 32 else 1245289)]
