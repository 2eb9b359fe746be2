"""The figures of the paper and two of ours from records alone, by the name of the command `sigmasolver figure NAME`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from sigmasolver.report.figures.components import COMPONENTS, components
from sigmasolver.report.figures.costs import EFFICIENCY, efficiency
from sigmasolver.report.figures.curves import FORCED, FREE, rollout, scaling, teacher_forcing
from sigmasolver.report.figures.energy import DECOMPOSITION, decomposition
from sigmasolver.report.figures.layers import CORRECTIONS, ROUTING, corrections, routing
from sigmasolver.report.figures.maps import MAPS, case_study, maps
from sigmasolver.report.figures.spectra import SPECTRA, spectra
from sigmasolver.report.figures.style import save
from sigmasolver.report.rows import Arrays, Need, Rows
from sigmasolver.report.sweeps import NEED as SWEEPS

__all__ = ["FIGURES", "Drawing", "Material", "save"]


@dataclass(frozen=True, eq=False)
class Material:
    """What figures are drawn from: rows, the arrays of one diagnostic by run, and the field that is asked for."""

    rows: Rows
    arrays: Arrays = field(default_factory=dict)
    field: str | None = None


@dataclass(frozen=True)
class Drawing:
    """A figure: how it is drawn, the rows it needs, the diagnostic whose arrays it needs, whether it has a field, and
    the array without which that diagnostic has nothing to draw."""

    draw: Callable[[Material], Figure]
    needs: tuple[Need, ...]
    arrays: str | None = None
    by_field: bool = True
    shows: str | None = None


FIGURES: Mapping[str, Drawing] = {
    "teacher-forcing": Drawing(lambda held: teacher_forcing(held.rows, held.field), (FREE, FORCED)),
    "rollout": Drawing(lambda held: rollout(held.rows, held.field), (FREE,)),
    "decomposition": Drawing(lambda held: decomposition(held.rows, held.field), (DECOMPOSITION,)),
    "maps": Drawing(lambda held: maps(held.rows, held.arrays, held.field), (MAPS,), "maps"),
    "case-study": Drawing(lambda held: case_study(held.rows, held.arrays, held.field), (MAPS,), "maps"),
    "corrections": Drawing(lambda held: corrections(held.rows), (CORRECTIONS,), by_field=False),
    "routing": Drawing(lambda held: routing(held.rows, held.arrays), (ROUTING,), "routing", by_field=False),
    "spectra": Drawing(
        lambda held: spectra(held.rows, held.arrays, held.field), (SPECTRA,), "trust", shows="spectrum_true"
    ),
    "components": Drawing(lambda held: components(held.rows), (COMPONENTS,), by_field=False),
    "efficiency": Drawing(lambda held: efficiency(held.rows), (EFFICIENCY,), by_field=False),
    "scaling": Drawing(lambda held: scaling(held.rows), (SWEEPS,), by_field=False),
}
