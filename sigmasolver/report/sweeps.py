"""The scaling study on Darcy flow from records: each run of `sigmasolver suite scaling` is one point of one sweep."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from sigmasolver.report.published import sweeps
from sigmasolver.report.rows import Rows, evaluated, select, select_field, value_of

__all__ = ["NEED", "Point", "points_of"]

NEED = evaluated("relative_l2")
_RUN = re.compile(r"darcy-(data|grid|width)-(\d+)")


@dataclass(frozen=True)
class Point:
    """Mean error over `cases` test cases at one setting and its deviation over cases, as fractions."""

    setting: int
    error: float
    deviation: float
    cases: int
    parameters: int | None = None

    @property
    def bar(self) -> float:
        """Half-width of the 95 % confidence interval of the mean: 1.96 s/√n."""
        return 1.96 * self.deviation / math.sqrt(self.cases)


def points_of(rows: Rows) -> dict[str, list[Point]]:
    """Points of each sweep present, in ascending order; raise for runs with other names.

    Two sweeps may share a setting, so that two folders hold the same run: it is a point of both. A renamed folder is
    recognized by the name under which it was measured.
    """
    counts = {row["run"]: int(row["value"]) for row in rows if row["metric"] == "parameters"}
    points: dict[str, list[Point]] = {}
    for row in select_field(select(rows, NEED)):
        names = _names(row.get("folders", [row["run"]])) or _names([row.get("measured_as")])
        if not names:
            raise ValueError(
                f"{row['run']} is not a run of a scaling sweep, such as darcy-data-1000; create them with: "
                "sigmasolver suite scaling"
            )
        spread = row.get("deviation") or 0.0
        for sweep, setting in names:
            point = Point(setting, value_of(row), spread, row["windows"], counts.get(row["run"]))
            points.setdefault(sweep, []).append(point)
    return {name: sorted(points[name], key=lambda point: point.setting) for name in sweeps() if name in points}


def _names(folders: Sequence[str | None]) -> list[tuple[str, int]]:
    """Sweep and setting of every folder name that matches."""
    return [(match[1], int(match[2])) for name in folders if (match := _RUN.fullmatch(name or ""))]
