"""The scaling study on Darcy flow from records: each run of `sigmasolver suite scaling` is one point of one sweep."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sigmasolver.report.published import sweeps
from sigmasolver.report.rows import Rows, evaluated, of_field, select, value_of

__all__ = ["NEED", "Point", "points_of"]

NEED = evaluated("relative_l2")
_RUN = re.compile(r"darcy-(data|grid|width)-(\d+)")


@dataclass(frozen=True)
class Point:
    """Mean error over `cases` test cases at one setting, and the deviation over them, as fractions."""

    setting: int
    error: float
    deviation: float
    cases: int
    parameters: int | None = None

    @property
    def bar(self) -> float:
        """Half of the 95 % interval of the mean: 1.96 s/√n."""
        return 1.96 * self.deviation / math.sqrt(self.cases)


def points_of(rows: Rows) -> dict[str, list[Point]]:
    """The points of each sweep that is there, in rising order; runs of other names are refused.

    Two sweeps may meet in one setting, so that two folders hold the same run: it is a point of both. A folder that was
    renamed is known by the name it was measured under.
    """
    counts = {row["run"]: int(row["value"]) for row in rows if row["metric"] == "parameters"}
    found: dict[str, list[Point]] = {}
    for row in of_field(select(rows, NEED)):
        names = _names(row.get("folders", [row["run"]])) or _names([row.get("measured_as")])
        if not names:
            raise ValueError(
                f"{row['run']} is not a run of a scaling sweep, such as darcy-data-1000; create them with: "
                "sigmasolver suite scaling"
            )
        spread = row.get("deviation") or 0.0
        for sweep, setting in names:
            point = Point(setting, value_of(row), spread, row["windows"], counts.get(row["run"]))
            found.setdefault(sweep, []).append(point)
    return {name: sorted(found[name], key=lambda point: point.setting) for name in sweeps() if name in found}


def _names(folders: Sequence[str | None]) -> list[tuple[str, int]]:
    """Sweep and setting of every name that has them."""
    return [(found[1], int(found[2])) for name in folders if (found := _RUN.fullmatch(name or ""))]
