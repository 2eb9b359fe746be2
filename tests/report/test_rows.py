"""Selection of rows, and the errors for missing ones."""

import math

import pytest

from sigmasolver.report.rows import (
    Need,
    diagnosed,
    evaluated,
    mean_and_std,
    select,
    select_field,
    value_of,
    where,
    with_unique_names,
)
from tests.report.made import decomposition, errors, facts, row


def test_select_matches_protocol_split_and_metric():
    free, forced = errors("ns2d", "physolver"), errors("ns2d", "physolver", protocol="teacher-forced")
    training = [{**r, "part": "train"} for r in free]
    diagnosed_rows = [{**r, "diagnostic": "maps"} for r in free]
    selected = select([*training, *free, *forced, *diagnosed_rows], evaluated("relative_l2_lead"))
    assert selected == [r for r in free if r["metric"] == "relative_l2_lead" and r["model"] == "physolver"]
    with_persistence = select(free, evaluated("relative_l2_lead"), baselines=True)
    assert {r["model"] for r in with_persistence} == {"physolver", "persistence"}


@pytest.mark.parametrize(
    ("need", "command"),
    [
        (evaluated("relative_l2"), "sigmasolver evaluate b"),
        (evaluated("relative_l2_lead", protocol="teacher-forced"), "sigmasolver evaluate b --protocol teacher-forced"),
        (evaluated("realm_error", part="train"), "sigmasolver evaluate b --split train"),
        (diagnosed("routing", "effective_slices"), "sigmasolver diagnose b --only routing"),
    ],
)
def test_select_names_the_command_for_missing_rows(need, command):
    full = {**facts("ns2d", "physolver", run="a", **need.facts), "metric": need.metrics[0], "field": None, "value": 1.0}
    bare = row(facts("ns2d", "physolver", run="b"), "speed", 1.0)
    with pytest.raises(ValueError, match=f"^b has no {need.metrics[0]} .*; create it with: {command}$"):
        select([full, bare], need)


def test_select_without_rows():
    with pytest.raises(ValueError, match=r"^No rows found; create them with: sigmasolver evaluate RUN$"):
        select([], evaluated("relative_l2"))


def test_select_rejects_duplicates_unless_filtered():
    short, long = errors("ns2d", "physolver", horizon=10), errors("ns2d", "physolver", horizon=20)
    need = evaluated("relative_l2")
    with pytest.raises(ValueError, match=r"two values of relative_l2, with horizon 10 and 20; .* --where horizon=10"):
        select([*short, *long], need)
    (selected,) = select(where([*short, *long], ["horizon=20"]), need)
    assert selected["horizon"] == 20
    older = [{key: value for key, value in r.items() if key != "forecast_precision"} for r in short]
    halved = [{**r, "forecast_precision": "bf16"} for r in short]
    with pytest.raises(ValueError, match="with forecast_precision float32 and bf16"):
        select([*older, *halved], need)
    (selected,) = select(where([*older, *halved], ["forecast_precision=float32"]), need)
    assert "forecast_precision" not in selected


def test_select_rejects_mixed_cohorts():
    need = evaluated("relative_l2")
    plain, rollout = (
        errors("ns2d", "physolver"),
        [{**row, "cohort": "rollout"} for row in errors("ns2d", "specsolver")],
    )
    with pytest.raises(ValueError, match=r"with cohort none and .* with cohort rollout, .* --where cohort=none"):
        select([*plain, *rollout], need)
    assert {row["model"] for row in select(where([*plain, *rollout], ["cohort=rollout"]), need)} == {"specsolver"}
    assert {row["model"] for row in select(where([*plain, *rollout], ["cohort=none"]), need)} == {"physolver"}
    explicit_null = [{**row, "cohort": None} for row in errors("ns2d", "specsolver")]
    elsewhere = [{**row, "cohort": "rollout"} for row in errors("kf2d", "specsolver")]
    assert len(select([*plain, *explicit_null, *elsewhere], need)) == 3


def test_where_filters_and_errors():
    rows = errors("ns2d", "physolver")
    assert where(rows, []) == rows
    assert where(rows, ["grid=64,64"]) == rows
    assert [r["lead"] for r in where(rows, ["lead=3", "metric=relative_l2_lead"])] == [3]
    leads = [r["lead"] for r in rows if r["metric"] == "relative_l2_lead"]
    assert [r["lead"] for r in where(rows, ["metric=*_lea?"])] == leads and len(leads) > 3
    assert where(rows, ["metric=*"]) == rows
    assert [r["lead"] for r in where(rows, ["lead=3", "metric=relative_l2_lead", "lead=5"])] == [3, 5]
    with pytest.raises(ValueError, match=r"^No row has lead 99; "):
        where(rows, ["lead=3", "lead=99"])
    named = [{**row, "run": f"wide [{row['metric']}]"} for row in rows]
    assert {r["metric"] for r in where(named, ["run=wide [relative_l2]"])} == {"relative_l2"}
    with pytest.raises(ValueError, match=r"^No row has metric relative_l3\*; the rows have "):
        where(rows, ["metric=relative_l3*"])
    with pytest.raises(ValueError, match=r"^--where must be name=value"):
        where(rows, ["horizon"])
    with pytest.raises(ValueError, match=r"^No row has horizon 11; the rows have 10\.$"):
        where(rows, ["horizon=11"])
    with pytest.raises(ValueError, match=r'^No row has "horizn"; choose from .*field, .*horizon, .*\.$'):
        where(rows, ["horizn=10"])
    with pytest.raises(ValueError, match=r'^No row has "foo"; there are no rows\.$'):
        where([], ["foo=1"])


def test_select_field_named_else_all_else_only_field():
    smoke, flow = errors("smoke3d", "physolver"), errors("ns2d", "physolver")
    lead = evaluated("relative_l2_lead")
    assert {r["field"] for r in select_field(select([*smoke, *flow], lead))} == {"all", "vorticity"}
    assert {r["field"] for r in select_field(select(smoke, lead), "velocity")} == {"velocity"}
    joint = [r for r in decomposition("ns2d", "physolver") if r["metric"] == "total"]
    assert {r["field"] for r in select_field(joint)} == {None}
    with pytest.raises(ValueError, match=r'smoke3d has no field "vorticity"; choose from density, velocity_x, .*, all'):
        select_field(select(smoke, lead), "vorticity")


def test_mean_and_std_over_groups():
    source = facts("ns2d", "physolver")
    rows = [row(source, "m", value, lead=lead) for lead, value in ((1, 1.0), (1, 2.0), (1, 6.0), (2, 4.0), (3, None))]
    statistics = mean_and_std(rows, "lead")
    assert statistics[1,] == (3.0, pytest.approx(math.sqrt(7)))
    assert statistics[2,] == (4.0, None)
    assert math.isnan(statistics[3,][0]) and math.isnan(value_of(rows[-1]))


def test_need_takes_only_matching_rows():
    need = Need(("a", "b"), {"part": "test"})
    assert need.matches({"metric": "b", "part": "test"})
    assert not need.matches({"metric": "c", "part": "test"})
    assert not need.matches({"metric": "a", "part": "train"})


def test_named_apart_keeps_model_names_across_tasks():
    flow, smoke = errors("ns2d", "ffno"), errors("smoke3d", "ffno")
    assert {r["model"] for r in with_unique_names([*flow, *smoke])} == {"ffno", "persistence"}
    twin = errors("ns2d", "ffno", run="twin")
    names = {(r["task"], r["model"]) for r in with_unique_names([*flow, *twin, *smoke])}
    assert {("ns2d", "ns2d-ffno-42"), ("ns2d", "twin"), ("smoke3d", "ffno")} <= names


def test_unique_names_separate_recipes_by_their_recorded_settings():
    """Seeds of one recipe stay together, whatever other recipes of the model there are."""
    usual = [r for seed in (42, 43) for r in errors("darcy", "transolver-sigma", seed)]
    augmented = [
        {**r, "run": "augmented", "settings": ["train.augment=True"]} for r in errors("darcy", "transolver-sigma", 42)
    ]
    names = {r["model"] for r in with_unique_names([*usual, *augmented])}
    assert names == {"transolver-sigma", "transolver-sigma, train.augment=True", "persistence"}
    assert {r["model"] for r in with_unique_names(augmented)} == {"transolver-sigma", "persistence"}
