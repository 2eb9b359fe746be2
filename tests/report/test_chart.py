"""Geometry of the error chart: curves parsed back from the SVG of the page agree with the data."""

import math
import re
from xml.etree import ElementTree

import numpy as np
import pytest

from sigmasolver.report.chart import chart, gaps
from sigmasolver.report.page import render
from sigmasolver.report.study import Curve, Dimensions, Study, Table

SVG = "{http://www.w3.org/2000/svg}"
NAN = math.nan


def svg_of(*curves):
    page = render(Study("t", "s", curves, Table(("model",), ()), ()))
    return ElementTree.fromstring(re.search(r'<svg class="chart.*?</svg>', page, re.S)[0])


def groups(svg, name):
    return [group for group in svg.iter(f"{SVG}g") if name in group.get("class").split()]


def panel(svg, scale):
    (group,) = groups(svg, scale)
    return group


def ticks(group, axis):
    """(value, coordinate) of every tick."""
    labels = [text for text in group.findall(f"{SVG}text") if "time" not in (text.get("class") or "").split()]
    return np.array([(float(text.text), float(text.get(axis))) for text in labels])


def segments(group):
    """The polylines of one curve."""
    path = group.find(f"{SVG}path").get("d")
    return [np.array(re.findall(r"([\d.]+),([\d.]+)", part), dtype=float) for part in path.split("M") if part]


def affine(pairs, at):
    slope, offset = np.polyfit(pairs[:, 0], pairs[:, 1], 1)
    assert np.abs(slope * pairs[:, 0] + offset - pairs[:, 1]).max() < 0.011  # coordinates have two decimals
    return slope * np.asarray(at) + offset


@pytest.mark.parametrize("size", [3e-6, 0.02, 0.7, 400.0])
def test_chart_linear_axis_points_agree_with_ticks(size):
    rng = np.random.default_rng(0)
    leads = tuple(range(1, 17))
    errors = size * rng.uniform(0.05, 1, 16)
    svg = svg_of(Curve("a", leads, tuple(errors)), Curve("b", leads, tuple(errors[::-1])))
    expected_x = affine(ticks(groups(svg, "leads")[0], "x"), leads)
    values = ticks(groups(panel(svg, "linear"), "values")[0], "y")
    assert values[0, 0] == 0 and values[-1, 0] >= 100 * errors.max()
    (points,) = segments(groups(panel(svg, "linear"), "s3")[0])
    assert points[:, 0] == pytest.approx(expected_x, abs=0.02)
    assert points[:, 1] == pytest.approx(affine(values, 100 * errors), abs=0.02)
    (points,) = segments(groups(panel(svg, "linear"), "s4")[0])
    assert points[:, 1] == pytest.approx(affine(values, 100 * errors[::-1]), abs=0.02)


@pytest.mark.parametrize("span", [3.0, 80.0, 1e7])
def test_chart_log_axis_points_agree_with_ticks(span):
    errors = 0.003 * np.geomspace(1, span, 9)
    svg = svg_of(Curve("a", tuple(range(1, 10)), tuple(errors)))
    values = ticks(groups(panel(svg, "log"), "values")[0], "y")
    values[:, 0] = np.log10(values[:, 0])
    assert len(values) >= 2
    (points,) = segments(groups(panel(svg, "log"), "s3")[0])
    assert points[:, 1] == pytest.approx(affine(values, np.log10(100 * errors)), abs=0.03)


def outline(group, band):
    """Upper and lower edge of the band of a curve."""
    (path,) = [path.get("d") for path in group.iter(f"{SVG}path") if band in (path.get("class") or "").split()]
    points = np.array(re.findall(r"([\d.]+),([\d.]+)", path), dtype=float)
    return points[: len(points) // 2, 1], points[: len(points) // 2 - 1 : -1, 1]


def test_chart_band_is_one_deviation_to_either_side():
    errors, spread = np.array([0.1, 0.2, 0.3]), np.array([0.02, 0.05, 0.01])
    svg = svg_of(Curve("a", (1, 2, 3), tuple(errors), tuple(spread), tuple(spread / 2)))
    values = ticks(groups(panel(svg, "linear"), "values")[0], "y")
    for band, size in (("windows", spread), ("seeds", spread / 2)):
        above, below = outline(panel(svg, "linear"), band)
        assert above == pytest.approx(affine(values, 100 * (errors + size)), abs=0.02)
        assert below == pytest.approx(affine(values, 100 * (errors - size)), abs=0.02)
    logs = ticks(groups(panel(svg, "log"), "values")[0], "y")
    above, _ = outline(panel(svg, "log"), "seeds")
    inside = np.minimum(100 * (errors + spread / 2), logs[-1, 0])
    assert above == pytest.approx(affine(np.c_[np.log(logs[:, 0]), logs[:, 1]], np.log(inside)), abs=0.03)


def test_chart_band_is_clipped_and_has_gaps_at_unknown_deviations():
    wide = chart([Curve("a", (1, 2, 3), (0.1, 0.2, 0.3), (5.0, 5.0, 5.0))])
    top = float(wide.panels[0].ticks[-1][1])
    assert top <= 50  # the curve still fills most of the axis
    for axis_panel in wide.panels:
        heights = [float(y) for y in re.findall(r",([\d.]+)", axis_panel.series[0].bands[0][1])]
        assert min(heights) == wide.top and max(heights) == wide.bottom
    gap = chart([Curve("a", (1, 2, 3, 4, 5), (0.1, 0.2, 0.3, 0.4, 0.5), (0.01, 0.01, NAN, 0.01, 0.01))])
    assert gap.panels[0].series[0].bands[0][1].count("M") == 2 and gap.bands == ("windows",)
    assert chart([Curve("a", (1, 2), (0.1, 0.2))]).bands == ()


def test_chart_rows_have_times_and_spreads():
    curve = Curve("a", (2, 4), (0.123, 0.4), (0.0456, NAN), (0.01, 0.02))
    drawn = chart([curve], Dimensions(0.25, "s"))
    assert [(row.lead, row.time) for row in drawn.rows] == [(2, "0.5 s"), (4, "1 s")]
    assert [row.cells[0].text for row in drawn.rows] == ["12.3", "40.0"]
    assert drawn.bands == ("seeds", "windows") and [row.cells[0].spread for row in drawn.rows] == [
        ("1.0", "4.6"),
        ("2.0", ""),
    ]
    assert [time for _, _, time in drawn.ticks] == ["0.5", "1"] and drawn.time_label == "time (s)"


def test_chart_seed_counts():
    one, three, five = (Curve(f"m{n}", (1,), (0.1,), seeds=n) for n in (1, 3, 5))
    persistence = Curve("persistence", (1,), (0.2,))
    assert chart([one, persistence]).seeds == ""
    assert chart([three, persistence]).seeds == "3 seeds of each model"
    assert chart([three, five, persistence]).seeds == "seeds: m3 3, m5 5"


def test_chart_points_lie_inside_the_plotting_area():
    errors = (1e-4, 0.3, 70.0)
    drawn = chart([Curve("a", (1, 5, 40), errors)])
    for axis_panel in drawn.panels:
        for _, x, y in axis_panel.series[0].points:
            assert drawn.left <= x <= drawn.right
            assert drawn.top <= y <= drawn.bottom


def test_chart_gap_splits_the_line_and_is_described():
    leads = tuple(range(1, 9))
    curve = Curve("a", leads, (0.1, 0.2, NAN, 0.4, math.inf, 0.6, NAN, NAN))
    svg = svg_of(curve)
    first, second, third = segments(groups(panel(svg, "linear"), "s3")[0])
    values = ticks(groups(panel(svg, "linear"), "values")[0], "y")
    assert first[:, 1] == pytest.approx(affine(values, [10, 20]), abs=0.02)
    assert second[:, 1] == pytest.approx(affine(values, [40, 40]), abs=0.02)  # a dot: a zero-length line
    assert third[:, 1] == pytest.approx(affine(values, [60, 60]), abs=0.02)
    assert gaps(curve) == "not finite at leads 3, 5, 7 and 8"


@pytest.mark.parametrize(
    ("errors", "text"),
    [
        ((0.1, 0.2, 0.3), None),
        ((0.1, NAN, NAN), "not finite from lead 7"),
        ((0.1, 0.2, NAN), "not finite from lead 9"),
        ((NAN, 0.2, 0.3), "not finite at lead 5"),
        ((NAN, 0.2, NAN), "not finite at leads 5 and 9"),
        ((NAN, NAN, math.inf), "not finite at any lead"),
    ],
)
def test_gaps_describes_non_finite_leads(errors, text):
    curve = Curve("a", (5, 7, 9), errors)
    assert gaps(curve) == text
    assert chart([curve]).notes == ((f"a: {text}",) if text else ())


def test_chart_zero_error_is_omitted_on_the_log_axis():
    drawn = chart([Curve("a", (1, 2), (0.0, 0.1))])
    linear, log = drawn.panels
    assert linear.series[0].points[0][2] == drawn.bottom
    assert [index for index, _, _ in log.series[0].points] == [1]
    assert [p.scale for p in chart([Curve("a", (1,), (0.0,)), Curve("b", (1,), (NAN,))]).panels] == ["linear"]


def test_chart_curves_over_different_leads_share_one_axis():
    drawn = chart([Curve("a", (1, 3), (0.1, 0.3)), Curve("b", (2, 5), (0.2, 0.5))])
    assert [(row.lead, tuple(cell.text for cell in row.cells)) for row in drawn.rows] == [
        (1, ("10.0", "–")),
        (2, ("–", "20.0")),
        (3, ("30.0", "–")),
        (5, ("–", "50.0")),
    ]
    assert [index for index, _, _ in drawn.panels[0].series[1].points] == [1, 3]


def test_chart_styles_are_unique_and_baselines_use_no_colour():
    models = ["persistence", *(f"m{i}" for i in range(13))]
    styles = chart([Curve(model, (1, 2), (0.1, 0.2)) for model in models]).styles
    assert styles[:3] == ("yardstick", "s3", "s4")
    assert len(set(styles)) == 14


def test_chart_errors_over_many_decades_start_on_the_log_axis():
    assert chart([Curve("a", (1, 2), (0.001, 0.9))]).start == "linear"
    assert chart([Curve("a", (1, 2), (0.001, 900.0))]).start == "log"


@pytest.mark.parametrize(
    ("horizon", "labels"),
    [(1, "1"), (10, "1 2 3 4 5 6 7 8 9 10"), (16, "2 4 6 8 10 12 14 16"), (20, "2 4 6 8 10 12 14 16 18 20")],
)
def test_chart_lead_ticks_are_round(horizon, labels):
    drawn = chart([Curve("a", tuple(range(1, horizon + 1)), (0.1,) * horizon)])
    assert [label for _, label, _ in drawn.ticks] == labels.split()
    assert [label for _, label, _ in chart([Curve("a", tuple(range(1, 101)), (0.1,) * 100)]).ticks][:3] == [
        "1",
        "10",
        "20",
    ]
