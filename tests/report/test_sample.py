"""Windows, part, horizon and cohort in words; what differs is named, what does not is said once."""

import pytest

from sigmasolver.report.sample import sample_of, timing_of, windows_in
from tests.report.made import components, corrections, efficiency, facts, finding, row

FLOW = "200 windows of the test split, horizon 10"


def one(task="ns2d", model="physolver", **more):
    return row(facts(task, model, **more), "relative_l2", 0.1)


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([one()], FLOW),
        ([one(), one(model="specsolver"), one("kf2d")], FLOW),
        ([one(windows=1, part="train", cohort="rollout")], "1 window of the train split, horizon 10, cohort rollout"),
        ([one(), one("kf2d", horizon=16)], f"NS2D: {FLOW}; KF2D: 200 windows of the test split, horizon 16"),
        (
            [one(), one(model="specsolver", windows=4), one(model="ffno", windows=4)],
            f"Physolver: {FLOW}; Specsolver, F-FNO: 4 windows of the test split, horizon 10",
        ),
        (
            [one(run="a"), one(run="b", seed=43, windows=4)],
            f"a: {FLOW}; b: 4 windows of the test split, horizon 10",
        ),
        ([one(), one(part="train", windows=50)], f"{FLOW}; 50 windows of the train split, horizon 10"),
        ([one(), one(protocol="teacher-forced")], FLOW),
        (
            [one(), one(protocol="teacher-forced", windows=4)],
            f"{FLOW}, free; 4 windows of the test split, horizon 10, teacher-forced",
        ),
        ([{"task": "ns2d", "model": "a", "metric": "relative_l2"}], ""),
        ([], ""),
    ],
)
def test_what_was_measured_on_in_words(rows, says):
    assert sample_of(rows) == says


def test_a_yardstick_belongs_to_the_run_that_brought_it():
    still = {**one(windows=4), "model": "persistence", "seed": None}
    other = {**one(model="specsolver"), "model": "persistence", "seed": None}
    rows = [still, one(windows=4), other, one(model="specsolver")]
    assert sample_of(rows) == f"Physolver: 4 windows of the test split, horizon 10; Specsolver: {FLOW}"


def test_a_diagnostic_that_looks_at_some_of_its_windows_counts_those():
    profile, _, _ = corrections("ns2d", cases=(0, 7))
    assert {one["windows"] for one in profile} == {200} and windows_in(profile) == 2
    scales = components("ns2d", "physolver")
    assert windows_in(scales) == 200
    assert windows_in([*scales, finding(facts("ns2d", "physolver"), "components", "cases", 4)]) == 4


def test_machines_and_parts_of_an_epoch():
    rows = efficiency("ns2d", "hpm", (1.0, 2.0, 3.0)) + efficiency("kf2d", "hpm", (1.0, 2.0, 3.0))
    assert timing_of(rows) == "none"
    moved = [{**row, "machine": "H200"} if row["task"] == "kf2d" else row for row in rows]
    assert timing_of(moved) == "NS2D HPM: none; KF2D HPM: H200"
