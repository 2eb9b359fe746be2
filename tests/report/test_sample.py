"""Description of samples: windows, split, horizon and cohort, with names only where they differ."""

import pytest

from sigmasolver.report.sample import count_windows, sample_of, timing_of
from tests.report.made import components, corrections, efficiency, facts, finding, row

FLOW = "200 windows of the test split, horizon 10"


def record(task="ns2d", model="physolver", **more):
    return row(facts(task, model, **more), "relative_l2", 0.1)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([record()], FLOW),
        ([record(), record(model="specsolver"), record("kf2d")], FLOW),
        (
            [record(windows=1, part="train", cohort="rollout")],
            "1 window of the train split, horizon 10, cohort rollout",
        ),
        (
            [record(), record("kf2d", horizon=16)],
            f"NS2D: {FLOW}; KF2D: 200 windows of the test split, horizon 16",
        ),
        (
            [record(), record(model="specsolver", windows=4), record(model="ffno", windows=4)],
            f"Physolver: {FLOW}; Specsolver, F-FNO: 4 windows of the test split, horizon 10",
        ),
        (
            [record(run="a"), record(run="b", seed=43, windows=4)],
            f"a: {FLOW}; b: 4 windows of the test split, horizon 10",
        ),
        ([record(), record(part="train", windows=50)], f"{FLOW}; 50 windows of the train split, horizon 10"),
        ([record(), record(protocol="teacher-forced")], FLOW),
        (
            [record(), record(protocol="teacher-forced", windows=4)],
            f"{FLOW}, free; 4 windows of the test split, horizon 10, teacher-forced",
        ),
        (
            [record(step=5), record(model="specsolver", step=1000), record("kf2d", step=7)],
            f"{FLOW}; NS2D weights after 5 to 1,000 updates",
        ),
        ([{"task": "ns2d", "model": "a", "metric": "relative_l2"}], ""),
        ([], ""),
    ],
)
def test_sample_of_descriptions(rows, expected):
    assert sample_of(rows) == expected


def test_sample_of_attributes_persistence_to_its_run():
    persistence = {**record(windows=4), "model": "persistence", "seed": None}
    other = {**record(model="specsolver"), "model": "persistence", "seed": None}
    rows = [persistence, record(windows=4), other, record(model="specsolver")]
    assert sample_of(rows) == f"Physolver: 4 windows of the test split, horizon 10; Specsolver: {FLOW}"


def test_count_windows_of_diagnostics_on_some_windows():
    profile, _, _ = corrections("ns2d", cases=(0, 7))
    assert {record["windows"] for record in profile} == {200} and count_windows(profile) == 2
    scales = components("ns2d", "physolver")
    assert count_windows(scales) == 200
    assert count_windows([*scales, finding(facts("ns2d", "physolver"), "components", "cases", 4)]) == 4


def test_timing_of_names_machines():
    rows = efficiency("ns2d", "hpm", (1.0, 2.0, 3.0)) + efficiency("kf2d", "hpm", (1.0, 2.0, 3.0))
    assert timing_of(rows) == "none"
    moved = [{**row, "machine": "H200"} if row["task"] == "kf2d" else row for row in rows]
    assert timing_of(moved) == "NS2D HPM: none; KF2D HPM: H200"
