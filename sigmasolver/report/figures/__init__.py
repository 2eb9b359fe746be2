"""The figures of the paper and four additional ones from records, by the name in `sigmasolver figure NAME`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from matplotlib.figure import Figure

from sigmasolver.report.figures.components import COMPONENTS, components
from sigmasolver.report.figures.costs import EFFICIENCY, efficiency
from sigmasolver.report.figures.curves import (
    FORCED,
    FREE,
    SYMMETRY,
    TRAINED,
    rollout,
    scaling,
    symmetry,
    teacher_forcing,
    timed_rows,
    training_cost,
)
from sigmasolver.report.figures.energy import DECOMPOSITION, decomposition
from sigmasolver.report.figures.layers import CORRECTIONS, ROUTING, corrections, routing
from sigmasolver.report.figures.maps import MAPS, case_study, maps
from sigmasolver.report.figures.spectra import SPECTRA, spectra
from sigmasolver.report.figures.style import add_sample_note, save
from sigmasolver.report.published import by_method
from sigmasolver.report.rows import Arrays, Need, Rows
from sigmasolver.report.sample import sample_of, timing_of
from sigmasolver.report.sweeps import NEED as SWEEPS

__all__ = ["FIGURES", "Drawing", "Material", "save"]


@dataclass(frozen=True, eq=False)
class Material:
    """Input of a figure: rows, the arrays of one diagnostic by run, and the requested field."""

    rows: Rows
    arrays: Arrays = field(default_factory=dict)
    field: str | None = None


@dataclass(frozen=True)
class Drawing:
    """A figure: its drawing function, the rows it needs, the diagnostic whose arrays it needs, whether it shows one
    field, the array that must be present, and the function that describes the sample of its rows."""

    draw: Callable[[Material], Figure]
    needs: tuple[Need, ...]
    arrays: str | None = None
    by_field: bool = True
    required_array: str | None = None
    describe_sample: Callable[[Rows], str] = sample_of

    def sample(self, rows: Rows) -> str:
        """Describe the sample behind the numbers of this figure."""
        return self.describe_sample([row for row in rows if any(need.fits(row) for need in self.needs)])

    def with_sample(self, material: Material) -> Figure:
        """Draw the figure under the method names of the paper, with a line that describes the sample."""
        material = replace(material, rows=by_method(material.rows))
        return add_sample_note(self.draw(material), self.sample(material.rows))


FIGURES: Mapping[str, Drawing] = {
    "teacher-forcing": Drawing(lambda material: teacher_forcing(material.rows, material.field), (FREE, FORCED)),
    "symmetry": Drawing(lambda material: symmetry(material.rows, material.field), (SYMMETRY,)),
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
        required_array="spectrum_true",
    ),
    "components": Drawing(lambda material: components(material.rows), (COMPONENTS,), by_field=False),
    "efficiency": Drawing(
        lambda material: efficiency(material.rows), (EFFICIENCY,), by_field=False, describe_sample=timing_of
    ),
    "training-cost": Drawing(
        lambda material: training_cost(material.rows, material.field),
        (TRAINED,),
        describe_sample=lambda rows: sample_of(timed_rows(rows)),
    ),
    "scaling": Drawing(lambda material: scaling(material.rows), (SWEEPS,), by_field=False),
}
