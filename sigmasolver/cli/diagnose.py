"""The command that explains why a forecast drifts, and the text of its summaries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from string import Formatter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sigmasolver.cli.app import Cohort, Device, OldSplit, Plugins, Split, app, device_of
from sigmasolver.cli.evaluate import OtherData, Runs, runs_of, warn_not_compared, warn_other_code
from sigmasolver.cli.terminal import ProgressUpdater, console, progress
from sigmasolver.report.digits import significant
from sigmasolver.report.sample import sample_of, timing_of
from sigmasolver.report.tables import JOINT_NORM, MEAN_OVER_FIELDS

if TYPE_CHECKING:
    from sigmasolver.diagnose.subject import Findings

__all__ = ["diagnose"]


@dataclass(frozen=True)
class Cell:
    """A metric of a diagnostic in the printed table: at the last lead, averaged over layers. Without a label it is only
    used in the sentence."""

    label: str
    metric: str
    percent: bool = False


@dataclass(frozen=True)
class Summary:
    """What is printed for a diagnostic: title, metrics, one sentence per run, and how to read them.

    `sentence` is a format string with metrics of the cells in braces; a run that lacks one of them gets no sentence.
    """

    title: str
    cells: tuple[Cell, ...]
    sentence: str
    explanation: str


SUMMARIES: dict[str, Summary] = {
    "decomposition": Summary(
        "error energy at the last lead",
        (
            Cell("of the truth", "total_relative", True),
            Cell("injection", "injection_share", True),
            Cell("propagation", "propagation_share", True),
            Cell("cross", "cross_share", True),
        ),
        "{propagation_share} of the error energy is propagated from earlier calls, {injection_share} is injected by "
        "the last call",
        "injection is the error of the last call given the true history, propagation the effect of earlier errors; "
        "if the cross term is negative, they partly cancel",
    ),
    "trust": Summary(
        "correlation with the truth and distance to the training states, at the last lead",
        (
            Cell("correlation", "correlation_lead"),
            Cell("below 0.8 at t", "correlation_time"),
            Cell("distance", "distance_lead"),
            Cell("of the truth", "distance_true_lead"),
            Cell("spread of seeds", "spread_lead", True),
            Cell("error of their mean", "error_lead", True),
            Cell("coverage", "coverage", True),
        ),
        "correlation {correlation_lead} at the end; forecast states lie {distance_lead} typical distances from the "
        "training states, true ones {distance_true_lead}",
        "a distance of 1 means as close to the training states as they are to each other",
    ),
    "symmetry": Summary(
        "forecasts under symmetries of the equation, at the last lead",
        (
            Cell("they differ by", "spread_lead", True),
            Cell("error", "single_lead", True),
            Cell("error of their mean", "error_lead", True),
            Cell("coverage", "coverage", True),
        ),
        "forecasts of transformed histories differ by {spread_lead}; the error of one is {single_lead}, that of their "
        "mean {error_lead}",
        "the exact solution does not depend on the symmetry, so the difference is error; it is seen without truth",
    ),
    "corrections": Summary(
        "effect of slice attention, mean over layers",
        (Cell("gamma", "gamma"), Cell("correction", "correction_ratio", True)),
        "slice attention changes the slice states by {correction_ratio} of their norm",
        "the correction is the norm of the update divided by the norm of the slice states",
    ),
    "routing": Summary(
        "assignment of points to slices, mean over layers",
        (
            Cell("effective slices", "effective_slices"),
            Cell("key concentration", "key_concentration"),
            Cell("temperature", "temperature"),
        ),
        "points are spread over {effective_slices} slices",
        "effective slices are those that receive points; a low temperature assigns each point to few slices",
    ),
    "geometry": Summary(
        "spread of the slices before and after attention, mean over layers",
        (
            Cell("diameter before", "diameter_before"),
            Cell("after", "diameter_after"),
            Cell("variation before", "variation_before"),
            Cell("after", "variation_after"),
            Cell("Dobrushin", "dobrushin"),
        ),
        "attention changes the diameter of the slices from {diameter_before} to {diameter_after}",
        "a much smaller value after attention means that the slices become alike",
    ),
    "interventions": Summary(
        f"contribution of the physical and the spectral half, at the last lead; errors: relative L2, {JOINT_NORM}",
        (
            Cell("error without physical", "zero_physical", True),
            Cell("without spectral", "zero_spectral", True),
            Cell("alignment", "alignment", True),
        ),
        "without the physical half the error is {zero_physical}, without the spectral half {zero_spectral}",
        "alignment is the share of windows for which the physical operators reduce the error",
    ),
    "components": Summary(
        "history errors at large (low) and small (high) scales after the last call, and their bounds",
        (
            Cell("low error", "error_low"),
            Cell("low bound", "bound_measured_low"),
            Cell("high error", "error_high"),
            Cell("high bound", "bound_measured_high"),
            Cell("gain, lower estimate", "gain_lower_estimate"),
            Cell("", "spectral_radius_measured"),
            Cell("", "spectral_radius_lower_estimate"),
            Cell("", "within_measured", True),
            Cell("", "within_lower_estimate", True),
        ),
        "the error is within the measured bound for {within_measured} of windows and calls, within the bound from "
        "lower estimates for {within_lower_estimate}; spectral radius {spectral_radius_measured} measured, "
        "{spectral_radius_lower_estimate} from lower estimates",
        "the bounds use the measured amplification of the actual errors and hold only for these windows; gains are "
        "lower estimates from an iteration, so a bound built from them is no guarantee; with a spectral radius "
        "below 1 the bound stays finite for any number of calls",
    ),
    "maps": Summary(
        "fields saved for figures",
        (Cell("relative L2 at the last lead", "relative_l2", True),),
        "relative L2 error at the last lead: {relative_l2}",
        f"{MEAN_OVER_FIELDS} and the saved cases",
    ),
    "efficiency": Summary(
        "cost of the model, float32",
        (
            Cell("parameters", "parameters"),
            Cell("MB", "parameter_megabytes"),
            Cell("positions MB", "position_megabytes"),
            Cell("s per epoch", "seconds_per_epoch"),
            Cell("peak MB", "peak_megabytes"),
            Cell("ms per call", "inference_milliseconds"),
        ),
        "an epoch takes {seconds_per_epoch} s with a peak of {peak_megabytes} MB, a call {inference_milliseconds} ms",
        "peak memory is for one update, without its data; a call is one block for one window",
    ),
}


@app.command()
def diagnose(
    runs: Runs,
    only: Annotated[
        str | None, typer.Option(help=f"One or more of {', '.join(SUMMARIES)}; default: all that apply to the model.")
    ] = None,
    horizon: Annotated[int | None, typer.Option(help="Frames to forecast, also beyond the training horizon.")] = None,
    windows: Annotated[int | None, typer.Option(help="Number of evenly spaced windows; default: all.")] = None,
    split: Split = "test",
    part: OldSplit = None,
    batch: Annotated[int, typer.Option(help="Batch size, in windows.")] = 8,
    cohort: Cohort = None,
    data: OtherData = None,
    plugin: Plugins = None,
    device: Device = "auto",
) -> None:
    """Explain why forecasts drift; writes rows and arrays to diagnose/ in each run folder.

    Runs of one model with different seeds are also compared.
    """
    from sigmasolver.diagnose.run import diagnose_run, peers_of
    from sigmasolver.evaluate import Request
    from sigmasolver.experiments.records import folder_labels
    from sigmasolver.forecast.checkpoint import load_recipe

    names = None if only is None else [name.strip() for name in only.split(",")]
    request = Request(horizon=horizon, windows=windows, split=part or split, batch=batch, cohort=cohort)
    folders = runs_of(runs)
    findings_by_run = {}
    for label, run in zip(folder_labels([run.path for run in folders]), folders, strict=True):
        warn_other_code(run)
        if data is not None:
            warn_not_compared(run, data)
        with progress(f"diagnosing {label}", None) as update:
            peers = peers_of(run, folders)
            findings_by_run[label] = diagnose_run(
                run, names, request, device_of(device), _NamedProgress(update), peers, data
            )
    for name in names or ():
        reasons = [_skip_reason(name, findings[name]) for findings in findings_by_run.values()]
        if all(reasons):
            raise ValueError(str(reasons[0]))
    if any(load_recipe(run).task.mask is not None for run in folders):
        console().print(
            "The data contain a solid. Errors, correlations and distances below exclude it; corrections, routing, "
            "geometry and efficiency describe the network and include its points.\n",
            soft_wrap=True,
        )
    for name in next(iter(findings_by_run.values())):
        _print_summary(
            console(), SUMMARIES[name], name, {run: findings[name] for run, findings in findings_by_run.items()}
        )


class _NamedProgress:
    """Updates the progress bar, labelled with the running diagnostic."""

    def __init__(self, updater: ProgressUpdater) -> None:
        self.updater = updater

    def __call__(self, name: str, done: int, total: int) -> None:
        self.updater.bar.update(self.updater.task, description=name)
        self.updater(done, total)


def _print_summary(screen: Console, summary: Summary, name: str, findings_by_run: Mapping[str, Findings]) -> None:
    """Print one table with a row per run, how to read it, and the runs that the diagnostic does not apply to."""
    reasons = {run: _skip_reason(name, findings) for run, findings in findings_by_run.items()}
    applicable = {run: findings for run, findings in findings_by_run.items() if reasons[run] is None}
    if applicable:
        rows = [{**row, "run": run} for run, findings in applicable.items() for row in findings.rows]
        sample = timing_of(rows) if name == "efficiency" else sample_of(rows)
        screen.print(f"{name}: {summary.title} ({sample})", soft_wrap=True)
        texts = {
            run: [_cell_text(cell, findings.rows) for cell in summary.cells] for run, findings in applicable.items()
        }
        labelled = [i for i, cell in enumerate(summary.cells) if cell.label]
        columns = [i for i in labelled if any(cells[i] is not None for cells in texts.values())]
        table = Table(box=SIMPLE_HEAD)
        table.add_column("run", overflow="fold")  # names may differ only at the end
        for i in columns:
            table.add_column(summary.cells[i].label, justify="right", overflow="fold")
        for run, cells in texts.items():
            table.add_row(Text(run), *(Text(cells[i] or "–") for i in columns))
        screen.print(table)
        for run, cells in texts.items():
            values = {cell.metric: text for cell, text in zip(summary.cells, cells, strict=True) if text is not None}
            if all(key in values for _, key, _, _ in Formatter().parse(summary.sentence) if key):
                screen.print(f"  {run}: {summary.sentence.format(**values)}", soft_wrap=True)
        screen.print(f"  ({summary.explanation})", soft_wrap=True)
    for run, reason in reasons.items():
        if reason is not None:
            screen.print(f"{name} skipped for {run}: {reason}", soft_wrap=True)
    screen.print()


def _skip_reason(name: str, findings: Findings) -> str | None:
    """Why a diagnostic does not apply to a model: it was skipped, or has none of its metrics. None: it applies."""
    if findings.skipped is not None or any(_cell_text(cell, findings.rows) for cell in SUMMARIES[name].cells):
        return findings.skipped
    return f"{findings.rows[0]['model']} has none of the components that {name} measures."


def _cell_text(cell: Cell, rows: Sequence[dict[str, Any]]) -> str | None:
    """The metric as text; None if the rows do not contain it."""
    matches = [row for row in rows if row["metric"] == cell.metric]
    if not matches:
        return None
    for key in ("case", "field", "layer"):  # prefer aggregate rows; otherwise average
        matches = [row for row in matches if row[key] is None] or matches
    last = max(row["lead"] or 0 for row in matches)
    values = [row["value"] for row in matches if (row["lead"] or 0) == last]
    if any(value is None for value in values):
        return "beyond" if cell.metric == "correlation_time" else significant(math.nan)
    value = mean(values)
    if cell.percent:
        return f"{significant(100 * value)} %"
    return f"{value:,.0f}" if cell.metric == "parameters" else significant(value)
