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

from sigmasolver.report.rows import ALL, named_apart, precision_of
from sigmasolver.report.sample import sample_of
from sigmasolver.report.study import TRIVIAL_BASELINES
from sigmasolver.report.study import Table as Cells
from sigmasolver.report.tables import OVER_FIELDS, TOGETHER, comparison
from sigmasolver.runtime.interrupts import Interrupts
from sigmasolver.runtime.threads import describe_threads
from sigmasolver.tasks import REALM

if TYPE_CHECKING:  # --help answers at once without torch
    from sigmasolver.data.inspect import Summary
    from sigmasolver.runtime.parallel import World
    from sigmasolver.train.loop import Progress as Step

__all__ = [
    "Mover",
    "console",
    "print_scores",
    "print_summary",
    "print_table",
    "progress",
    "say_threads",
    "training",
]


NOT_SHOWN = ("attributes", "made", "split", "statistics")
"""Parameters of a header that have lines of their own."""
LONGEST = 200
"""Letters of an attribute that are shown."""


def console(stderr: bool = False) -> Console:
    """Plain text: a file name or a unit may hold brackets, which rich would read as markup."""
    return Console(stderr=stderr, highlight=False, markup=False)


class Rate(ProgressColumn):
    """Trajectories per second, or seconds per trajectory."""

    def render(self, task: Task) -> Text:
        if not task.speed:
            return Text("")
        slow = task.speed < 1
        return Text(f"{1 / task.speed:.1f} s each" if slow else f"{task.speed:.1f} per s")


def _bar(*more: ProgressColumn) -> Progress:
    """Label, bar, text, more columns, elapsed and remaining time; only in an interactive terminal."""
    console = Console(stderr=True)
    left = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[shown]}"), *more, *left)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def progress(label: str, total: int | None) -> Iterator[Mover]:
    """A bar on stderr with remaining time and throughput; silent if stderr is not a terminal."""
    with _bar(Rate()) as bar:
        yield Mover(bar, label, total)


class Mover:
    """Moves the bar: called with the count done, and the total if it was not known before."""

    def __init__(self, bar: Progress, label: str, total: int | None) -> None:
        self.bar, self.task = bar, bar.add_task(label, total=total, shown="")

    def __call__(self, done: float, total: int | None = None) -> None:
        Interrupts.heed()
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
        told = [0.0]

        def watch(now: Step) -> None:
            Interrupts.heed()
            error = "" if now.error is None else f"  validation {100 * now.error:.3g} %"
            shown = f"step {now.step}/{now.steps}  loss {now.loss:.4g}{error}"
            bar.update(task, completed=now.step, total=now.steps, shown=shown)
            if not bar.console.is_terminal and now.step / now.steps >= told[0] + 0.05:
                told[0] = now.step / now.steps
                bar.console.print(shown, soft_wrap=True)

        yield watch


def say_threads(world: World) -> None:
    """What a computation on the CPU does it with."""
    if world.first and world.device.type == "cpu":
        console().print(f"computing with {describe_threads()}", soft_wrap=True)


def print_summary(console: Console, summary: Summary) -> None:
    from sigmasolver.train.command import train_command

    header = summary.header
    layout = header.layout
    frames, *grid, _ = header.shape
    seed = "" if header.seed is None else f", seed {header.seed}"
    made = f"written by sigmasolver {summary.package}"
    if summary.package is None:
        made = "read in place"
    console.print(f"{summary.path}: {header.source}{seed}, {made}", soft_wrap=True)
    missing = (
        "" if summary.whole == summary.count else f" of {summary.count} (rerun the same command to complete the file)"
    )
    console.print(f"  {summary.whole} trajectories{missing}, {summary.size / 1e6:.1f} MB of {header.dtype}")
    console.print(f"  {frames} frames, t = {layout.times[0]:g} to {layout.times[-1]:g}")
    ends = ", ".join(
        f"{name} {len(axis)} points from {axis[0]:.4g} to {axis[-1]:.4g} ({boundary})"
        for name, axis, boundary in zip(layout.axis_names, layout.coordinates, layout.boundary, strict=True)
    )
    console.print(f"  grid {' × '.join(map(str, grid))}: {ends}", soft_wrap=True)
    split = summary.published_split
    if split is not None:
        sizes = f"{len(split.train)} train, {len(split.validation)} validation, {len(split.test)} test"
        console.print(f"  published split:  {sizes}", soft_wrap=True)
    settings = ", ".join(
        f"{name}={value if isinstance(value, str) or len(str(value)) < 100 else f'({len(value)} entries)'}"
        for name, value in header.parameters.items()
        if name not in NOT_SHOWN
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
        shown = ", ".join(map(str, summary.damaged[:10]))
        console.print(
            f"  DAMAGED: the values of trajectories {shown} do not match their checksums; simulate or import them "
            "again."
        )
    elif summary.package is not None:
        console.print("  intact: every trajectory matches its checksum")
    if summary.fingerprint is not None:
        console.print(f"fingerprint {summary.fingerprint}", soft_wrap=True)
    console.print(f"next: {train_command(summary) or 'fix the non-finite values'}", soft_wrap=True)


def _attribute_lines(attributes: Mapping[str, Any]) -> list[str]:
    """What the files say of themselves and of their axes and fields; texts that are long are cut."""
    lines = []
    for part in ("data set", "axes", "fields"):
        for name, value in attributes.get(part, {}).items():
            if part == "data set":
                lines.append(f"{name}: {str(value)[:LONGEST]}")
                continue
            shown = {"axes": ("boundary", "axis"), "fields": ("units",)}[part]  # stands elsewhere
            said = ", ".join(f"{key}={one}" for key, one in value.items() if key not in shown)
            if said and said not in (f"name={name}", "name=time"):
                lines.append(f"{name}: {said[:LONGEST]}")
    return lines


def print_scores(screen: Console, rows: Sequence[dict[str, Any]]) -> None:
    """One task's table, and a line for each run and for the yardstick with what the table leaves out; a run whose
    folder was copied is shown once."""
    copies = _copies(rows)
    rows = [row for row in rows if row["run"] not in copies]
    found, first = comparison(named_apart(rows)), rows[0]
    grid = " or ".join(dict.fromkeys(" × ".join(map(str, row["grid"])) for row in rows))
    what = f"{first['protocol']} forecasts" if any(row["horizon"] > 1 for row in rows) else "predictions"
    how = "" if precision_of(first) == "float32" else f", in {precision_of(first)}"
    norm = f", {OVER_FIELDS}," if any(row["field"] == ALL for row in rows) else ""
    told = f"relative L2 error{norm} of {what} on {grid}, {sample_of(rows)}{how}"
    screen.print(f"{first['task']}: {told}", soft_wrap=True)
    print_table(screen, found)
    for run in dict.fromkeys(row["run"] for row in rows):
        mine = [row for row in rows if row["run"] == run and row["model"] not in TRIVIAL_BASELINES]
        screen.print(f"  {run}: {_beside(mine)}", soft_wrap=True)
    for name in (name for name in TRIVIAL_BASELINES if any(row["model"] == name for row in rows)):
        own = [row for row in rows if row["model"] == name]
        screen.print(f"  {name}: {_beside([row for row in own if row['run'] == own[0]['run']])}", soft_wrap=True)
    for copy, run in copies.items():
        screen.print(f"  {copy} is a copy of {run} and is not shown", soft_wrap=True)


def _copies(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Runs with the weights and the seed of one before them, and that one."""
    firsts: dict[tuple[Any, ...], str] = {}
    copies = {}
    for row in rows:
        if row.get("weights") is not None and row["model"] not in TRIVIAL_BASELINES:
            key = tuple(row[name] for name in ("task", "model", "seed", "weights"))
            if firsts.setdefault(key, row["run"]) != row["run"]:
                copies[row["run"]] = firsts[key]
    return copies


def print_table(screen: Console, table: Cells) -> None:
    """The best in bold, the second best underlined, an empty line where a table has a rule. What is too wide is broken
    between words, and left to the terminal's own wrapping where that is not enough: no number loses its end."""
    drawn = Table(box=SIMPLE_HEAD)
    for number, column in enumerate(table.columns):
        longest = max(len(word) for text in (column, *(cells[number] for cells in table.rows)) for word in text.split())
        drawn.add_column(column, justify="right" if number else "left", no_wrap=number == 0, min_width=longest)
    for number, cells in enumerate(table.rows):
        if number in table.rules:
            drawn.add_section()
        indices = ((number, column) for column in range(len(cells)))
        styles = ("bold" if at in table.bold else "underline" if at in table.underlined else "" for at in indices)
        drawn.add_row(*(Text.assemble(marked) for marked in zip(cells, styles, strict=True)))  # the padding is bare
    needed = Measurement.get(screen, screen.options, drawn).minimum
    screen.print(drawn, width=max(screen.width, needed), crop=False)


def _beside(rows: Sequence[dict[str, Any]]) -> str:
    """RMSE, MAE, how long the forecast correlates, and whether it blew up, of one run or yardstick."""
    whole = [row for row in rows if row["lead"] is None]
    fields = [row["field"] for row in whole if row["metric"] == "rmse"]
    held = {row["metric"]: row["value"] for row in whole if row["field"] in (None, fields[-1])}
    reach = f"correlation {_number(held['correlation'])}"
    if rows[0]["horizon"] > 1:
        when = "beyond the horizon" if held["correlation_time"] is None else f"at t = {held['correlation_time']:.3g}"
        reach = f"correlation falls below 0.8 {when}"
    blown = f"; {100 * held['blow_up']:.3g} % of the forecasts blew up" if held["blow_up"] else ""
    if rows[0]["task"] in (task.name for task in REALM):
        summed, mean = (_number(held[name]) for name in ("realm_error", "realm_error_per_call"))
        return f"REALM error {summed} summed over calls, {mean} per call, {reach}{blown}"
    joint = held.get("relative_l2_joint")
    together = ""
    if ALL in fields and joint is not None:
        together = f"relative L2 error of {TOGETHER} {_number(100 * joint)} %, "
    return f"{together}RMSE {_number(held['rmse'])}, MAE {_number(held['mae'])}, {reach}{blown}"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3g}"
