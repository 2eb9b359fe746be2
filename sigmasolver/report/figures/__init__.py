"""The figures of the paper and three of ours from records alone, by name in the command `sigmasolver figure NAME`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from matplotlib.figure import Figure

from sigmasolver.report.figures.components import COMPONENTS, components
from sigmasolver.report.figures.costs import EFFICIENCY, efficiency
from sigmasolver.report.figures.curves import (
    FORCED,
    FREE,
    TRAINED,
    rollout,
    scaling,
    teacher_forcing,
    timed,
    training_cost,
)
from sigmasolver.report.figures.energy import DECOMPOSITION, decomposition
from sigmasolver.report.figures.layers import CORRECTIONS, ROUTING, corrections, routing
from sigmasolver.report.figures.maps import MAPS, case_study, maps
from sigmasolver.report.figures.spectra import SPECTRA, spectra
from sigmasolver.report.figures.style import save, small_print
from sigmasolver.report.published import by_method
from sigmasolver.report.rows import Arrays, Need, Rows
from sigmasolver.report.sample import sample_of, timing_of
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
    """A figure: how it is drawn, the rows it needs, the diagnostic whose arrays it needs, whether it has a field, the
    array without which that diagnostic has nothing to draw, and how to say what its rows were measured on."""

    draw: Callable[[Material], Figure]
    needs: tuple[Need, ...]
    arrays: str | None = None
    by_field: bool = True
    shows: str | None = None
    words: Callable[[Rows], str] = sample_of

    def sample(self, rows: Rows) -> str:
        """What the numbers of this figure were measured on."""
        return self.words([row for row in rows if any(need.fits(row) for need in self.needs)])

    def with_sample(self, material: Material) -> Figure:
        """The figure, by the methods of the paper, with a line that says what its numbers were measured on."""
        material = replace(material, rows=by_method(material.rows))
        return small_print(self.draw(material), self.sample(material.rows))


FIGURES: Mapping[str, Drawing] = {
    "teacher-forcing": Drawing(lambda material: teacher_forcing(material.rows, material.field), (FREE, FORCED)),
    "rollout": Drawing(lambda material: rollout(material.rows, material.field), (FREE,)),
    "decomposition": Drawing(lambda material: decomposition(material.rows, material.field), (DECOMPOSITION,)),
    "maps": Drawing(lambda material: maps(material.rows, material.arrays, material.field), (MAPS,), "maps"),
    "case-study": Drawing(lambda material: case_study(material.rows, material.arrays, material.field), (MAPS,), "maps"),
    "corrections": Drawing(lambda material: corrections(material.rows), (CORRECTIONS,), by_field=False),
    "routing": Drawing(lambda material: routing(material.rows, material.arrays), (ROUTING,), "routing", by_field=False),
    "spectra": Drawing(
        lambda material: spectra(material.rows, material.arrays, material.field),
        (SPECTRA,),
        "trust",
        shows="spectrum_true",
    ),
    "components": Drawing(lambda material: components(material.rows), (COMPONENTS,), by_field=False),
    "efficiency": Drawing(lambda material: efficiency(material.rows), (EFFICIENCY,), by_field=False, words=timing_of),
    "training-cost": Drawing(
        lambda material: training_cost(material.rows, material.field),
        (TRAINED,),
        words=lambda rows: sample_of(timed(rows)),
    ),
    "scaling": Drawing(lambda material: scaling(material.rows), (SWEEPS,), by_field=False),
}
