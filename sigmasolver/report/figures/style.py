"""One look for all figures: sizes of a journal, colours that colour-blind readers tell apart, files that never vary.

Figures are made with matplotlib's objects alone; nothing global is changed. The colours are those of Okabe and Ito,
without the yellow that white paper swallows; models beyond them get dashes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from sigmasolver.report.published import places
from sigmasolver.runs.files import plain_errors, replacing

__all__ = [
    "BLACK",
    "GREY",
    "ONE_COLUMN",
    "TWO_COLUMNS",
    "Look",
    "letter",
    "light_and_dark",
    "looks",
    "models_below",
    "new_figure",
    "save",
    "small_print",
    "style",
    "whole_numbers",
]

ONE_COLUMN, TWO_COLUMNS = 3.5, 7.2
"""Widths in inches: 89 and 183 millimetres."""
BLACK, GREY = "#222222", "#8a8a8a"
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#555555", "#56B4E9")
"""In the order of the page's curves."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GRID = "#e4e4e4"
DARK = {
    BLACK: "#e4e7eb",
    GRID: "#31363f",
    "#555555": "#c4c9d1",
    "#0072B2": "#56b4e9",
    "#56B4E9": "#a8d8f5",
}
"""What takes the place of colours that a dark page would swallow; the others stand out from both."""
RESOLUTION = 200
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so a figure is the same on every machine
    "mathtext.fontset": "dejavusans",
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "axes.linewidth": 0.6,
    "axes.edgecolor": BLACK,
    "axes.labelcolor": BLACK,
    "text.color": BLACK,
    "xtick.color": BLACK,
    "ytick.color": BLACK,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.5,
    "lines.linewidth": 1.3,
    "lines.markersize": 3.2,
    "image.interpolation": "nearest",
    "pdf.fonttype": 42,
    "savefig.facecolor": "white",
    "svg.hashsalt": "sigmasolver",  # names inside a drawing are the same every time
}


@contextmanager
def style() -> Iterator[None]:
    """The look, for what is drawn or saved inside the block."""
    with rc_context(_STYLE):
        yield


class Look:
    """Colour, marker and dashes of one model; a colour that comes again has another marker and other dashes."""

    def __init__(self, index: int) -> None:
        again, colour = divmod(index, len(COLOURS))
        self.colour = COLOURS[colour]
        self.marker = MARKERS[(colour + again) % len(MARKERS)]
        self.dashes: Literal["-", "-.", ":"] = "-" if again == 0 else "-." if again == 1 else ":"


def looks(models: Sequence[str]) -> dict[str, Look]:
    """A look for each model; the paper's own models keep theirs whatever stands beside them."""
    return {model: Look(index) for model, index in places(models).items()}


def new_figure(width: float, height: float) -> Figure:
    """An empty figure in inches; its parts make room for each other."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.03, h_pad=0.03, wspace=0.04, hspace=0.04)  # type: ignore[union-attr,call-arg]
    return figure


def letter(axes: Axes, index: int, title: str) -> None:
    """The title of a panel behind its letter, to the left."""
    axes.set_title(rf"$\bf{{({chr(ord('a') + index)})}}$ {title}", loc="left")


def whole_numbers(axes: Axes, most: int = 6, axis: Literal["x", "y"] = "x") -> None:
    """Leads, layers and slices have no halves."""
    (axes.xaxis if axis == "x" else axes.yaxis).set_major_locator(MaxNLocator(nbins=most, integer=True, min_n_ticks=1))


def models_below(figure: Figure, labels: dict[str, str], more: Sequence[Line2D] = (), columns: int = 6) -> None:
    """A legend of models (name: label) below all panels, and of what else is given."""
    styles = looks(list(labels))
    lines = [
        Line2D(
            [], [], color=styles[name].colour, marker=styles[name].marker, linestyle=styles[name].dashes, label=label
        )
        for name, label in labels.items()
    ]
    entries = [*lines, *more]
    figure.legend(handles=entries, loc="outside lower center", ncols=min(columns, len(entries)), columnspacing=1.4)


def small_print(figure: Figure, text: str) -> Figure:
    """Small print above all panels; the figure grows by the room it takes."""
    lines = textwrap.wrap(text, int(23 * figure.get_figwidth()))
    if lines:
        figure.set_figheight(figure.get_figheight() + 0.06 + 0.11 * len(lines))
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=6, color="#6a6a6a")
    return figure


def light_and_dark(figure: Figure) -> bytes:
    """An SVG without paper of its own; where the reader prefers dark pages, ink and lines turn light.

    The figure loses the paper of its axes.
    """
    for axes in figure.get_axes():
        axes.patch.set_facecolor("none")
    sheet = BytesIO()
    with style():
        figure.savefig(sheet, format="svg", facecolor="none", metadata={"Date": None})
    rules = "".join(
        f'[style*="{kind}: {light.lower()}"] {{{kind}: {dark} !important}}'
        for light, dark in DARK.items()
        for kind in ("fill", "stroke")
    )
    dark = f"<style>@media (prefers-color-scheme: dark) {{{rules}}}</style>"
    return sheet.getvalue().replace(b"</defs>", dark.encode() + b"</defs>", 1)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """NAME.png at 200 dots per inch and NAME.pdf, replaced whole; the same figure gives the same bytes."""
    written = []
    facts: dict[str, dict[str, None]] = {"png": {"Software": None}, "pdf": {"CreationDate": None}}
    for kind, metadata in facts.items():
        path, drawn = folder / f"{name}.{kind}", BytesIO()
        with style():  # in memory: what draws answers a full disk with whatever error comes first
            figure.savefig(drawn, format=kind, dpi=RESOLUTION, metadata=metadata)
        with plain_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(drawn.getvalue())
        written.append(path)
    return written
