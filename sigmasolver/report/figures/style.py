"""Common style of all figures: journal sizes, colour-blind safe colours, reproducible files.

Figures use matplotlib's object-oriented API without pyplot or global state. The colours are the Okabe-Ito palette
without yellow, which is invisible on white; further models get dashed lines.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator

from sigmasolver.report.published import colour_indices
from sigmasolver.runs.files import os_errors_as_value_errors, replacing

__all__ = [
    "BLACK",
    "GREY",
    "ONE_COLUMN",
    "TWO_COLUMNS",
    "LineStyle",
    "add_model_legend",
    "add_sample_note",
    "integer_ticks",
    "line_styles",
    "new_figure",
    "save",
    "set_panel_title",
    "style",
    "themed_svg",
]

ONE_COLUMN, TWO_COLUMNS = 3.5, 7.2
"""Widths in inches: 89 and 183 millimetres."""
BLACK, GREY = "#222222", "#8a8a8a"
COLOURS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#555555", "#56B4E9")
"""In the same order as the curves of the page."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GRID = "#e4e4e4"
DARK_COLOURS = {
    BLACK: "#e4e7eb",
    GRID: "#31363f",
    "#555555": "#c4c9d1",
    "#0072B2": "#56b4e9",
    "#56B4E9": "#a8d8f5",
}
"""Replacements on a dark background; the other colours have enough contrast on both."""
DPI = 200
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",  # ships with matplotlib, so figures are identical on every machine
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
    "svg.hashsalt": "sigmasolver",  # reproducible element ids
}


@contextmanager
def style() -> Iterator[None]:
    """Apply the style to everything drawn or saved inside the block."""
    with rc_context(_STYLE):
        yield


class LineStyle:
    """Colour, marker and dashes of one model; a reused colour gets a different marker and dashes."""

    def __init__(self, index: int) -> None:
        cycle, colour = divmod(index, len(COLOURS))
        self.colour = COLOURS[colour]
        self.marker = MARKERS[(colour + cycle) % len(MARKERS)]
        self.dashes: Literal["-", "-.", ":"] = "-" if cycle == 0 else "-." if cycle == 1 else ":"


def line_styles(models: Sequence[str]) -> dict[str, LineStyle]:
    """Line style of each model; the paper's own models always have the same one."""
    return {model: LineStyle(index) for model, index in colour_indices(models).items()}


def new_figure(width: float, height: float) -> Figure:
    """Create an empty figure, size in inches, with constrained layout."""
    layout = ConstrainedLayoutEngine(w_pad=0.03, h_pad=0.03, wspace=0.04, hspace=0.04)
    return Figure(figsize=(width, height), layout=layout)


def set_panel_title(axes: Axes, index: int, title: str) -> None:
    """Set the left-aligned title of a panel, preceded by its letter."""
    axes.set_title(rf"$\bf{{({chr(ord('a') + index)})}}$ {title}", loc="left")


def integer_ticks(axes: Axes, bins: int = 6, axis: Literal["x", "y"] = "x") -> None:
    """Use integer ticks, for leads, layers and slices."""
    (axes.xaxis if axis == "x" else axes.yaxis).set_major_locator(MaxNLocator(nbins=bins, integer=True, min_n_ticks=1))


def add_model_legend(figure: Figure, labels: dict[str, str], extra: Sequence[Line2D] = (), columns: int = 6) -> None:
    """Add a legend of models (name: label) and `extra` lines below all panels, in as many columns as fit."""
    styles = line_styles(list(labels))
    lines = [
        Line2D(
            [], [], color=styles[name].colour, marker=styles[name].marker, linestyle=styles[name].dashes, label=label
        )
        for name, label in labels.items()
    ]
    entries = [*lines, *extra]
    widths = [_text_width(str(entry.get_label())) + _HANDLE for entry in entries]
    fitting = [n for n in range(1, min(columns, len(entries)) + 1) if _legend_width(widths, n) <= figure.get_figwidth()]
    figure.legend(handles=entries, loc="outside lower center", ncols=max(fitting, default=1), columnspacing=1.4)


_POINTS = 72
"""Per inch."""
_HANDLE = (2.0 + 0.8) * float(_STYLE["legend.fontsize"]) / _POINTS
"""Width in inches of the line of a legend entry and of its distance from the text (matplotlib's defaults)."""


def _text_width(text: str) -> float:
    """Width in inches of a text in a legend."""
    with style():
        font = FontProperties(size=_STYLE["legend.fontsize"])
        return float(TextPath((0, 0), text, prop=font).get_extents().width) / _POINTS if text.strip() else 0.0


def _legend_width(widths: Sequence[float], columns: int) -> float:
    """Width in inches of a legend, which is filled column by column."""
    spacing = 1.4 * float(_STYLE["legend.fontsize"]) / _POINTS
    short, longer = divmod(len(widths), columns)
    sizes = [short + 1] * longer + [short] * (columns - longer)
    starts = [sum(sizes[:column]) for column in range(columns + 1)]
    return sum(max(widths[a:b]) for a, b in pairwise(starts)) + spacing * columns


def add_sample_note(figure: Figure, text: str) -> Figure:
    """Add small text above all panels, growing the figure by its height."""
    lines = textwrap.wrap(text, int(23 * figure.get_figwidth()))
    if lines:
        figure.set_figheight(figure.get_figheight() + 0.06 + 0.11 * len(lines))
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=6, color="#6a6a6a")
    return figure


def themed_svg(figure: Figure) -> bytes:
    """Render as SVG with a transparent background and light lines and text in dark mode.

    Makes the backgrounds of the axes transparent in place.
    """
    for axes in figure.get_axes():
        axes.patch.set_facecolor("none")
    buffer = BytesIO()
    with style():
        figure.savefig(buffer, format="svg", facecolor="none", metadata={"Date": None})
    rules = "".join(
        f'[style*="{kind}: {light.lower()}"] {{{kind}: {dark_colour} !important}}'
        for light, dark_colour in DARK_COLOURS.items()
        for kind in ("fill", "stroke")
    )
    dark_style = f"<style>@media (prefers-color-scheme: dark) {{{rules}}}</style>"
    return buffer.getvalue().replace(b"</defs>", dark_style.encode() + b"</defs>", 1)


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Write NAME.png at 200 dpi and NAME.pdf atomically; the same figure gives the same bytes."""
    written = []
    formats: dict[str, dict[str, None]] = {"png": {"Software": None}, "pdf": {"CreationDate": None}}
    for extension, metadata in formats.items():
        path, buffer = folder / f"{name}.{extension}", BytesIO()
        with style():  # in memory: savefig raises arbitrary errors when the disk is full
            figure.savefig(buffer, format=extension, dpi=DPI, metadata=metadata)
        with os_errors_as_value_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
            with replacing(path) as file:
                file.write(buffer.getvalue())
        written.append(path)
    return written
