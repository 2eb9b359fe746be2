"""The right rows, and plain words where they are not there."""

import math

import pytest

from sigmasolver.report.rows import (
    Need,
    diagnosed,
    evaluated,
    named_apart,
    of_field,
    select,
    spread_of,
    value_of,
    where,
)
from tests.report.made import decomposition, errors, facts, row


def test_only_the_rows_of_the_protocol_part_and_metric_are_taken():
    free, forced = errors("ns2d", "physolver"), errors("ns2d", "physolver", protocol="teacher-forced")
    other = [{**one, "part": "train"} for one in free]
    diagnosed_rows = [{**one, "diagnostic": "maps"} for one in free]
    taken = select([*other, *free, *forced, *diagnosed_rows], evaluated("relative_l2_lead"))
    assert taken == [one for one in free if one["metric"] == "relative_l2_lead" and one["model"] == "physolver"]
    with_yardstick = select(free, evaluated("relative_l2_lead"), yardsticks=True)
    assert {one["model"] for one in with_yardstick} == {"physolver", "persistence"}


@pytest.mark.parametrize(
    ("need", "command"),
    [
        (evaluated("relative_l2"), "sigmasolver evaluate b"),
        (evaluated("relative_l2_lead", protocol="teacher-forced"), "sigmasolver evaluate b --protocol teacher-forced"),
        (evaluated("realm_error", part="train"), "sigmasolver evaluate b --split train"),
        (diagnosed("routing", "effective_slices"), "sigmasolver diagnose b --only routing"),
    ],
)
def test_a_run_without_the_rows_is_told_the_command_that_makes_them(need, command):
    full = {**facts("ns2d", "physolver", run="a", **need.facts), "metric": need.metrics[0], "field": None, "value": 1.0}
    bare = row(facts("ns2d", "physolver", run="b"), "speed", 1.0)
    with pytest.raises(ValueError, match=f"^b has no {need.metrics[0]} .*; create it with: {command}$"):
        select([full, bare], need)


def test_no_rows_at_all():
    with pytest.raises(ValueError, match=r"^No rows found; create them with: sigmasolver evaluate RUN$"):
        select([], evaluated("relative_l2"))


def test_two_numbers_for_one_thing_are_refused_and_a_condition_chooses():
    short, long = errors("ns2d", "physolver", horizon=10), errors("ns2d", "physolver", horizon=20)
    need = evaluated("relative_l2")
    with pytest.raises(ValueError, match=r"two values of relative_l2, with horizon 10 and 20; .* --where horizon=10"):
        select([*short, *long], need)
    (kept,) = select(where([*short, *long], ["horizon=20"]), need)
    assert kept["horizon"] == 20
    older = [{key: value for key, value in one.items() if key != "forecast_precision"} for one in short]
    halved = [{**one, "forecast_precision": "bf16"} for one in short]
    with pytest.raises(ValueError, match="with forecast_precision float32 and bf16"):
        select([*older, *halved], need)
    (kept,) = select(where([*older, *halved], ["forecast_precision=float32"]), need)
    assert "forecast_precision" not in kept


def test_runs_of_one_task_are_measured_on_one_cohort():
    need = evaluated("relative_l2")
    one, two = errors("ns2d", "physolver"), [{**row, "cohort": "rollout"} for row in errors("ns2d", "specsolver")]
    with pytest.raises(ValueError, match=r"with cohort none and .* with cohort rollout, .* --where cohort=none"):
        select([*one, *two], need)
    assert {row["model"] for row in select(where([*one, *two], ["cohort=rollout"]), need)} == {"specsolver"}
    assert {row["model"] for row in select(where([*one, *two], ["cohort=none"]), need)} == {"physolver"}
    spelt = [{**row, "cohort": None} for row in errors("ns2d", "specsolver")]
    elsewhere = [{**row, "cohort": "rollout"} for row in errors("kf2d", "specsolver")]
    assert len(select([*one, *spelt, *elsewhere], need)) == 3


def test_conditions_in_words():
    rows = errors("ns2d", "physolver")
    assert where(rows, []) == rows
    assert where(rows, ["grid=64,64"]) == rows
    assert [one["lead"] for one in where(rows, ["lead=3", "metric=relative_l2_lead"])] == [3]
    with pytest.raises(ValueError, match=r"^--where must be name=value"):
        where(rows, ["horizon"])
    with pytest.raises(ValueError, match=r"^No row has horizon 11; the rows have 10\.$"):
        where(rows, ["horizon=11"])
    with pytest.raises(ValueError, match=r"^No row has horizn 10; the rows have nothing\.$"):
        where(rows, ["horizn=10"])


def test_the_field_is_the_named_one_else_all_else_the_only_one():
    smoke, flow = errors("smoke3d", "physolver"), errors("ns2d", "physolver")
    lead = evaluated("relative_l2_lead")
    assert {one["field"] for one in of_field(select([*smoke, *flow], lead))} == {"all", "vorticity"}
    assert {one["field"] for one in of_field(select(smoke, lead), "velocity")} == {"velocity"}
    joint = [one for one in decomposition("ns2d", "physolver") if one["metric"] == "total"]
    assert {one["field"] for one in of_field(joint)} == {None}
    with pytest.raises(ValueError, match=r'smoke3d has no field "vorticity"; choose from density, velocity_x, .*, all'):
        of_field(select(smoke, lead), "vorticity")


def test_mean_and_sample_deviation():
    source = facts("ns2d", "physolver")
    rows = [row(source, "m", value, lead=lead) for lead, value in ((1, 1.0), (1, 2.0), (1, 6.0), (2, 4.0), (3, None))]
    held = spread_of(rows, "lead")
    assert held[1,] == (3.0, pytest.approx(math.sqrt(7)))
    assert held[2,] == (4.0, None)
    assert math.isnan(held[3,][0]) and math.isnan(value_of(rows[-1]))


def test_a_need_takes_nothing_with_another_fact():
    need = Need(("a", "b"), {"part": "test"})
    assert need.takes({"metric": "b", "part": "test"})
    assert not need.takes({"metric": "c", "part": "test"})
    assert not need.takes({"metric": "a", "part": "train"})


def test_runs_of_one_model_on_two_tasks_keep_the_name_of_the_model():
    flow, smoke = errors("ns2d", "ffno"), errors("smoke3d", "ffno")
    assert {one["model"] for one in named_apart([*flow, *smoke])} == {"ffno", "persistence"}
    twin = errors("ns2d", "ffno", run="twin")
    names = {(one["task"], one["model"]) for one in named_apart([*flow, *twin, *smoke])}
    assert {("ns2d", "ns2d-ffno-42"), ("ns2d", "twin"), ("smoke3d", "ffno")} <= names
