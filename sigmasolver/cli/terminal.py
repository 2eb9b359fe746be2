"""Terminal output: plain text, progress bars with the remaining time, tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from sigmasolver.report.rows import ALL, precision_of, with_unique_names
from sigmasolver.report.sample import sample_of
from sigmasolver.report.study import TRIVIAL_BASELINES
from sigmasolver.report.study import Table as Cells
from sigmasolver.report.tables import JOINT_NORM, MEAN_OVER_FIELDS, comparison
from sigmasolver.runtime.interrupts import Interrupts
from sigmasolver.runtime.threads import describe_threads
from sigmasolver.tasks import REALM

if TYPE_CHECKING:  # keeps torch out of --help
    from sigmasolver.data.inspect import Summary
    from sigmasolver.runtime.parallel import World
    from sigmasolver.train.loop import Progress as Step

__all__ = [
    "ProgressUpdater",
    "console",
    "print_scores",
    "print_summary",
    "print_table",
    "print_threads",
    "progress",
    "training",
]


HIDDEN_PARAMETERS = ("attributes", "made", "split", "statistics")
"""Header parameters that are printed separately or not at all."""
MAX_ATTRIBUTE_LENGTH = 200
"""Number of characters of an attribute to print."""


def console(stderr: bool = False) -> Console:
    """A console without markup: file names and units may contain brackets, which rich would parse as tags."""
    return Console(stderr=stderr, highlight=False, markup=False)


class Rate(ProgressColumn):
    """Trajectories per second, or seconds per trajectory."""

    def render(self, task: Task) -> Text:
        if not task.speed:
            return Text("")
        slow = task.speed < 1
        return Text(f"{1 / task.speed:.1f} s each" if slow else f"{task.speed:.1f} per s")


def _bar(*extra: ProgressColumn) -> Progress:
    """A progress bar with label, text, extra columns, elapsed and remaining time; only in an interactive terminal."""
    console = Console(stderr=True)
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[shown]}"), *extra, *times)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def progress(label: str, total: int | None) -> Iterator[ProgressUpdater]:
    """A bar on stderr with remaining time and throughput; silent if stderr is not a terminal."""
    with _bar(Rate()) as bar:
        yield ProgressUpdater(bar, label, total)


class ProgressUpdater:
    """Updates a progress bar with the count done, and the total if it was unknown before."""

    def __init__(self, bar: Progress, label: str, total: int | None) -> None:
        self.bar, self.task = bar, bar.add_task(label, total=total, shown="")

    def __call__(self, done: float, total: int | None = None) -> None:
        Interrupts.raise_if_interrupted()
        if total is not None:
            self.bar.update(self.task, total=total)
        total_now = self.bar.tasks[self.task].total
        self.bar.update(self.task, completed=done, shown=f"{int(done)}/{int(total_now or 0)}")


@contextmanager
def training(world: World) -> Iterator[Callable[[Step], None] | None]:
    """A bar with loss, validation error and remaining time; in a log file, a line every 5 % instead."""
    if not world.first:
        yield None
        return
    with _bar() as bar:
        task = bar.add_task("training", total=None, shown="")
        last_printed = [0.0]

        def watch(now: Step) -> None:
            Interrupts.raise_if_interrupted()
            error = "" if now.error is None else f"  validation {100 * now.error:.3g} %"
            text = f"step {now.step}/{now.steps}  loss {now.loss:.4g}{error}"
            bar.update(task, completed=now.step, total=now.steps, shown=text)
            if not bar.console.is_terminal and now.step / now.steps >= last_printed[0] + 0.05:
                last_printed[0] = now.step / now.steps
                bar.console.print(text, soft_wrap=True)

        yield watch


def print_threads(world: World) -> None:
    """Print the CPU thread configuration, if computing on the CPU."""
    if world.first and world.device.type == "cpu":
        console().print(f"computing with {describe_threads()}", soft_wrap=True)


def print_summary(console: Console, summary: Summary) -> None:
    from sigmasolver.train.command import train_command

    header = summary.header
    layout = header.layout
    frames, *grid, _ = header.shape
    seed = "" if header.seed is None else f", seed {header.seed}"
    origin = f"written by sigmasolver {summary.package}"
    if summary.package is None:
        origin = "read in place"
    console.print(f"{summary.path}: {header.source}{seed}, {origin}", soft_wrap=True)
    incomplete = (
        "" if summary.whole == summary.count else f" of {summary.count} (rerun the same command to complete the file)"
    )
    console.print(f"  {summary.whole} trajectories{incomplete}, {summary.size / 1e6:.1f} MB of {header.dtype}")
    console.print(f"  {frames} frames, t = {layout.times[0]:g} to {layout.times[-1]:g}")
    axes = ", ".join(
        f"{name} {len(axis)} points from {axis[0]:.4g} to {axis[-1]:.4g} ({boundary})"
        for name, axis, boundary in zip(layout.axis_names, layout.coordinates, layout.boundary, strict=True)
    )
    console.print(f"  grid {' × '.join(map(str, grid))}: {axes}", soft_wrap=True)
    split = summary.published_split
    if split is not None:
        sizes = f"{len(split.train)} train, {len(split.validation)} validation, {len(split.test)} test"
        console.print(f"  published split: {sizes}", soft_wrap=True)
    settings = ", ".join(
        f"{name}={value if isinstance(value, str) or len(str(value)) < 100 else f'({len(value)} entries)'}"
        for name, value in header.parameters.items()
        if name not in HIDDEN_PARAMETERS
    )
    if settings:
        console.print(f"  parameters: {settings}", soft_wrap=True)
    for line in _attribute_lines(header.parameters.get("attributes", {})):
        console.print(f"  {line}", soft_wrap=True)
    for note in summary.notes:
        console.print(f"  {note}", soft_wrap=True)
    if summary.whole == 0:
        console.print("  no trajectory is complete yet")
        return
    table = Table("field", "unit", box=SIMPLE_HEAD)
    for column in ("range", "mean", "std", "std over frames"):
        table.add_column(column, justify="right")
    for field in summary.fields:
        table.add_row(
            Text(field.name),
            Text(field.unit),
            f"{field.minimum:.3g} to {field.maximum:.3g}",
            f"{field.mean:.3g}",
            f"{field.std:.4g}",
            f"{field.frame_std[0]:.3g} to {field.frame_std[-1]:.3g}",
        )
    console.print(table)
    if summary.read < summary.whole:
        console.print(f"  statistics of the first {summary.read} trajectories")
    for problem in summary.problems():
        console.print(f"  {problem}", soft_wrap=True)
    if not any(field.nans or field.infinities for field in summary.fields):
        console.print("  all values are finite")
    if summary.damaged:
        damaged = ", ".join(map(str, summary.damaged[:10]))
        console.print(
            f"  DAMAGED: the values of trajectories {damaged} do not match their checksums; simulate or import them "
            "again."
        )
    elif summary.package is not None:
        console.print("  intact: every trajectory matches its checksum")
    if summary.fingerprint is not None:
        console.print(f"fingerprint {summary.fingerprint}", soft_wrap=True)
    console.print(f"next: {train_command(summary) or 'fix the non-finite values'}", soft_wrap=True)


def _attribute_lines(attributes: Mapping[str, Any]) -> list[str]:
    """Attributes of the files, their axes and their fields; long texts are truncated."""
    lines = []
    for section in ("data set", "axes", "fields"):
        for name, value in attributes.get(section, {}).items():
            if section == "data set":
                lines.append(f"{name}: {str(value)[:MAX_ATTRIBUTE_LENGTH]}")
                continue
            redundant = {"axes": ("boundary", "axis"), "fields": ("units",)}[section]  # printed elsewhere
            text = ", ".join(f"{key}={entry}" for key, entry in value.items() if key not in redundant)
            if text and text not in (f"name={name}", "name=time"):
                lines.append(f"{name}: {text[:MAX_ATTRIBUTE_LENGTH]}")
    return lines


def print_scores(screen: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of one task, and a line with further metrics for each run and trivial baseline; copies of a run
    are shown once."""
    copies = _copied_runs(rows)
    rows = [row for row in rows if row["run"] not in copies]
    table, first = comparison(with_unique_names(rows)), rows[0]
    grid = " or ".join(dict.fromkeys(" × ".join(map(str, row["grid"])) for row in rows))
    what = f"{first['protocol']} forecasts" if any(row["horizon"] > 1 for row in rows) else "predictions"
    precision = "" if precision_of(first) == "float32" else f", in {precision_of(first)}"
    over_fields = f", {MEAN_OVER_FIELDS}," if any(row["field"] == ALL for row in rows) else ""
    title = f"relative L2 error{over_fields} of {what} on {grid}, {sample_of(rows)}{precision}"
    screen.print(f"{first['task']}: {title}", soft_wrap=True)
    print_table(screen, table)
    for run in dict.fromkeys(row["run"] for row in rows):
        own_rows = [row for row in rows if row["run"] == run and row["model"] not in TRIVIAL_BASELINES]
        screen.print(f"  {run}: {_score_line(own_rows)}", soft_wrap=True)
    for name in (name for name in TRIVIAL_BASELINES if any(row["model"] == name for row in rows)):
        trivial = [row for row in rows if row["model"] == name]
        screen.print(
            f"  {name}: {_score_line([row for row in trivial if row['run'] == trivial[0]['run']])}", soft_wrap=True
        )
    for copy, run in copies.items():
        screen.print(f"  {copy} is a copy of {run} and is not shown", soft_wrap=True)


def _copied_runs(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Map each run with the same weights and seed as an earlier run to that run."""
    firsts: dict[tuple[Any, ...], str] = {}
    copies = {}
    for row in rows:
        if row.get("weights") is not None and row["model"] not in TRIVIAL_BASELINES:
            key = tuple(row[name] for name in ("task", "model", "seed", "weights"))
            if firsts.setdefault(key, row["run"]) != row["run"]:
                copies[row["run"]] = firsts[key]
    return copies


def print_table(screen: Console, table: Cells) -> None:
    """Print the best values in bold and the second best underlined, with an empty line for each rule. A wide table is
    wrapped between words, then left to the terminal to wrap, so that no number is truncated."""
    rich_table = Table(box=SIMPLE_HEAD)
    for index, column in enumerate(table.columns):
        longest = max(len(word) for text in (column, *(cells[index] for cells in table.rows)) for word in text.split())
        rich_table.add_column(column, justify="right" if index else "left", no_wrap=index == 0, min_width=longest)
    for index, cells in enumerate(table.rows):
        if index in table.rules:
            rich_table.add_section()
        positions = ((index, column) for column in range(len(cells)))
        styles = (
            "bold" if cell in table.bold else "underline" if cell in table.underlined else "" for cell in positions
        )
        rich_table.add_row(*(Text.assemble(pair) for pair in zip(cells, styles, strict=True)))  # padding stays unstyled
    min_width = Measurement.get(screen, screen.options, rich_table).minimum
    screen.print(rich_table, width=max(screen.width, min_width), crop=False)


def _score_line(rows: Sequence[dict[str, Any]]) -> str:
    """RMSE, MAE, correlation time and blow-up rate of one run or trivial baseline."""
    aggregates = [row for row in rows if row["lead"] is None]
    fields = [row["field"] for row in aggregates if row["metric"] == "rmse"]
    score = {row["metric"]: row["value"] for row in aggregates if row["field"] in (None, fields[-1])}
    correlation = f"correlation {_number(score['correlation'])}"
    if rows[0]["horizon"] > 1 and "correlation_time" in score:
        when = "beyond the horizon" if score["correlation_time"] is None else f"at t = {score['correlation_time']:.3g}"
        correlation = f"correlation falls below 0.8 {when}"
    blow_up = f"; {100 * score['blow_up']:.3g} % of the forecasts blew up" if score["blow_up"] else ""
    if rows[0]["task"] in (task.name for task in REALM):
        summed, mean = (_number(score[name]) for name in ("realm_error", "realm_error_per_call"))
        return f"REALM error {summed} summed over calls, {mean} per call, {correlation}{blow_up}"
    joint = score.get("relative_l2_joint")
    joint_error = ""
    if ALL in fields and joint is not None:
        joint_error = f"relative L2 error of {JOINT_NORM} {_number(100 * joint)} %, "
    return f"{joint_error}RMSE {_number(score['rmse'])}, MAE {_number(score['mae'])}, {correlation}{blow_up}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
