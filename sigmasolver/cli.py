"""The command line: one sub-command per verb, no science. A mistake of the user ends in one sentence, exit code 2.

Heavy imports stand inside the commands, so that `--help` and a typing mistake answer at once.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from sigmasolver.version import __version__

if TYPE_CHECKING:
    import torch

    from sigmasolver.data.inspect import Summary

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Neural PDE solvers on structured grids, and how far to trust their forecasts.",
)

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a parameter; may be given often.")
]
Dtype = Annotated[str, typer.Option(help="How values are stored: float32 or float16.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of every command."""


@app.command()
def demo() -> None:
    """Build Transolver-sigma, run it at two resolutions, and list the family with parameter counts."""
    from sigmasolver.demo import run

    run(Console())


@app.command()
def simulate(
    task: Annotated[str, typer.Argument(help="darcy, ns2d, kf2d, it3d, smoke3d or demo.")],
    out: Annotated[Path, typer.Option(help="The file to write, or to continue.")],
    count: Annotated[int, typer.Option(help="How many trajectories the file shall hold.")] = 16,
    seed: Annotated[int, typer.Option(help="Trajectory i depends on the seed and i, not on the count.")] = 0,
    settings: Settings = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:1.")] = "cpu",
    dtype: Dtype = "float32",
) -> None:
    """Make a task's data. Stop it at any moment: the same command continues the file."""
    from sigmasolver.data.generate import generate
    from sigmasolver.settings import override
    from sigmasolver.simulate import simulator_of

    simulator = override(simulator_of(task), settings or [])
    place = _device(device)
    batch = simulator.batch_size(place)
    with _progress(f"simulating {task}", count) as move:
        made = generate(
            simulator,
            count,
            seed,
            out,
            place,
            dtype,
            lambda done, total, fraction: move(done + fraction * min(batch, total - done)),
        )
    present = f", {made.present} of them were there" if made.present else ""
    _console().print(
        f"{out}: {made.count} trajectories{present}, {out.stat().st_size / 1e6:.1f} MB\nfingerprint {made.fingerprint}",
        soft_wrap=True,
    )


@app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="A store: what `simulate` or `import-data` wrote.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw one trajectory into this picture (.png, .pdf).")] = None,
    index: Annotated[int, typer.Option(help="The trajectory to draw.")] = 0,
) -> None:
    """Print what a file holds (shapes, ranges, statistics, faults) and check that it is intact."""
    from sigmasolver.data.inspect import draw, summarise

    if plot is not None:  # first, so that a mistake shows before a long file is read
        draw(file, plot, index)
    with _progress("reading", None) as move:
        summary = summarise(file, move)
    console = _console()
    _print_summary(console, summary)
    if plot is not None:
        console.print(f"picture of trajectory {index}: {plot}", soft_wrap=True)
    if summary.damaged:
        raise typer.Exit(1)


@app.command("import-data")
def import_data(
    source: Annotated[Path, typer.Argument(help="A .mat, .npy or .npz file, or a folder of a public data set.")],
    out: Annotated[Path, typer.Option(help="The store to write, or to continue.")],
    kind: Annotated[
        str | None, typer.Option(help="What the source is, where it cannot be told from the files.")
    ] = None,
    dtype: Dtype = "float32",
) -> None:
    """Convert public files (FNO, FactFormer) or your own arrays into a store."""
    from sigmasolver.data.formats import import_data as convert

    with _progress("importing", None) as move:
        made = convert(source, out, kind, dtype, move)
    console = _console()
    shape = " × ".join(map(str, made.shape))
    console.print(f"{out}: {made.count} trajectories of {shape} from {made.kind}", soft_wrap=True)
    for note in made.notes:
        console.print(f"  {note}", soft_wrap=True)
    console.print(f"fingerprint {made.fingerprint}", soft_wrap=True)


def _console(stderr: bool = False) -> Console:
    """Plain text: a file name or a unit may hold brackets, which rich would read as markup."""
    return Console(stderr=stderr, highlight=False, markup=False)


def _device(text: str) -> torch.device:
    import torch

    try:
        device = torch.device(text)
    except RuntimeError:
        raise ValueError(f'There is no device "{text}"; write cpu, cuda or cuda:1.') from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("This machine has no GPU that torch can use; leave --device out to work on the CPU.")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f'Simulators run on cpu and cuda, not on "{text}".')
    return device


class _Rate(ProgressColumn):
    """Trajectories per second, or seconds per trajectory."""

    def render(self, task: Task) -> Text:
        if not task.speed:
            return Text("")
        slow = task.speed < 1
        return Text(f"{1 / task.speed:.1f} s each" if slow else f"{task.speed:.1f} per s")


@contextmanager
def _progress(label: str, total: int | None) -> Iterator[_Mover]:
    """A bar on stderr with time left and throughput; on a pipe or in a log file it stays silent."""
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[shown]}"),
        _Rate(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        yield _Mover(bar, label, total)


class _Mover:
    """Called with what is done, and the total where it was not known before."""

    def __init__(self, bar: Progress, label: str, total: int | None) -> None:
        self.bar, self.task = bar, bar.add_task(label, total=total, shown="")

    def __call__(self, done: float, total: int | None = None) -> None:
        if total is not None:
            self.bar.update(self.task, total=total)
        whole = self.bar.tasks[self.task].total
        self.bar.update(self.task, completed=done, shown=f"{int(done)}/{int(whole or 0)}")


def _print_summary(console: Console, summary: Summary) -> None:
    header = summary.header
    layout = header.layout
    frames, *grid, _ = header.shape
    seed = "" if header.seed is None else f", seed {header.seed}"
    console.print(f"{summary.path}: {header.source}{seed}, written by sigmasolver {summary.package}", soft_wrap=True)
    missing = "" if summary.whole == summary.count else f" of {summary.count} (the same command continues the file)"
    console.print(f"  {summary.whole} trajectories{missing}, {summary.size / 1e6:.1f} MB of {header.dtype}")
    console.print(f"  {frames} frames, t = {layout.times[0]:g} to {layout.times[-1]:g}")
    ends = ", ".join(
        f"{name} {len(axis)} points from {axis[0]:.4g} to {axis[-1]:.4g} ({boundary})"
        for name, axis, boundary in zip("xyz", layout.coordinates, layout.boundary, strict=False)
    )
    console.print(f"  grid {' × '.join(map(str, grid))}: {ends}", soft_wrap=True)
    settings = ", ".join(f"{name}={value}" for name, value in header.parameters.items())
    console.print(f"  parameters: {settings}", soft_wrap=True)
    if summary.whole == 0:
        console.print("  no trajectory is whole yet")
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
    for field in summary.fields:
        if field.nans or field.infinities:
            console.print(f"  {field.name} has {field.nans} NaN and {field.infinities} infinite values; clean it.")
        if field.constant:
            console.print(f"  {field.name} is constant: a model can learn nothing from it.")
    if not any(field.nans or field.infinities for field in summary.fields):
        console.print("  all values are finite")
    if summary.damaged:
        shown = ", ".join(map(str, summary.damaged[:10]))
        console.print(
            f"  DAMAGED: the values of trajectories {shown} are not those that were written; make them again."
        )
    else:
        console.print("  intact: every trajectory has the digest it was written with")
    console.print(f"fingerprint {summary.fingerprint}", soft_wrap=True)


def main() -> None:
    console = _console(stderr=True)
    try:
        app()
    except SystemExit as leaving:  # typer ends every command so, Ctrl-C with 130
        if leaving.code == 130:
            console.print("sigmasolver: stopped; the same command continues.", soft_wrap=True)
        raise
    except (ValueError, MemoryError, RuntimeError) as error:
        sentence = _sentence(error)
        if sentence is None:
            raise
        console.print(f"sigmasolver: {sentence}", soft_wrap=True)
        sys.exit(2)


def _sentence(error: Exception) -> str | None:
    """What to tell the user, or None for a fault of ours, which keeps its traceback."""
    if isinstance(error, ValueError):
        return str(error)
    if isinstance(error, MemoryError) or "allocate" in str(error) or "out of memory" in str(error):
        return "There is not enough memory for this; ask for a coarser grid, fewer frames or fewer trajectories."
    return None
