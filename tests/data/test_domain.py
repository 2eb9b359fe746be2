"""Comparison of domains: units, boundaries, lengths and time steps, independent of the grid."""

from dataclasses import replace

import numpy as np
import pytest

from sigmasolver.data.domain import Domain, time_steps, unevenly_spaced
from sigmasolver.data.layout import Layout
from sigmasolver.settings import from_plain, to_plain


def layout(points=16, side=2.0, end="periodic", unit="m/s", step=0.25, origin=0.0, kind="periodic"):
    """Two axes of this length, sampled at periodic points, cell centres or nodes that include both ends."""
    offset, count = {"periodic": (0.0, points), "centres": (0.5, points), "nodes": (0.0, points - 1)}[kind]
    axis = origin + side * (np.arange(points) + offset) / count
    return Layout(("u", "p"), (unit, "Pa"), (end,) * 2, (axis, axis), origin + step * np.arange(6))


def domain(**options):
    base = layout(**options)
    return Domain.of(base, base.fields, base.times)


def test_domain_is_independent_of_the_grid():
    assert domain().differences(domain(points=64)) == [] == domain().differences(domain(origin=7.0))
    for kind in ("centres", "nodes"):
        for end in ("wall", "open"):
            coarse, fine = (domain(points=points, end=end, kind=kind) for points in (17, 85))
            assert coarse.differences(fine) == [] == fine.differences(coarse)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"unit": "km/h"}, ["the unit of u is km/h, not m/s"]),
        ({"end": "wall"}, ["axis x is wall, not periodic", "axis y is wall, not periodic"]),
        ({"side": 2.1}, ["axis x is 2.1 long, not 2 long", "axis y is 2.1 long, not 2 long"]),
        ({"step": 0.5}, ["its frames are 0.5 apart, not 0.25"]),
        ({"step": 0.5, "unit": "1"}, ["the unit of u is 1, not m/s", "its frames are 0.5 apart, not 0.25"]),
    ],
)
def test_domain_differences_are_described(change, expected):
    assert domain().differences(domain(**change)) == expected
    assert domain().differences(domain(**change), with_times=False) == [
        text for text in expected if "frames" not in text
    ]


def test_domain_differences_tell_a_longer_box_from_a_coarser_grid():
    known = domain(points=32, end="wall", kind="centres")
    assert known.differences(domain(points=32, side=2.2, end="wall", kind="centres"))
    assert not known.differences(domain(points=31, end="wall", kind="nodes"))


def test_unevenly_spaced_ignores_rounded_times():
    reference = layout()
    rounded = np.float32(1000 + 0.01 * np.arange(50))
    assert unevenly_spaced(time_steps(rounded)) is None and unevenly_spaced(time_steps(np.zeros(1))) is None
    uneven = np.array([0.0, 0.25, 0.75, 1.0])
    assert unevenly_spaced(time_steps(uneven)) == "unevenly spaced in time, 0.25 to 0.5 apart"
    other = Domain.of(reference, reference.fields, uneven)
    assert domain().differences(other) == ["its frames are unevenly spaced in time, 0.25 to 0.5 apart, not 0.25"]


def test_domain_without_coordinates_has_no_length():
    """Grids without coordinates are equal to each other, but differ from a box with a length."""
    few, many = (replace(layout(), coordinates=(np.arange(n, dtype=float),) * 2) for n in (8, 16))
    few, many = (Domain.of(base, base.fields, base.times) for base in (few, many))
    assert few.differences(many) == []
    assert domain().differences(many)[0] == "axis x is without coordinates, not 2 long"


def test_domain_json_round_trip():
    assert from_plain(Domain, to_plain(domain())) == domain()
    with pytest.raises(ValueError, match="are inconsistent"):
        from_plain(Domain, {**to_plain(domain()), "points": [3]})
