"""The numbers to take along are those of the records, to the last digit."""

import csv
import io
import json

import pytest

from sigmasolver.report.assemble import study_of
from sigmasolver.report.page import to_csv, to_json
from sigmasolver.report.study import Dimensions

from .made import decomposition, errors, row


@pytest.fixture(scope="module")
def rows():
    held = [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "physolver"), *errors("ns2d", "physolver", seed=43)]
    held = [{**one, "value": None} if (one["model"], one["lead"]) == ("physolver", 9) else one for one in held]
    other = row(held[0], "rmse", 0.3, field="vorticity")  # not on the page
    return [*held, *decomposition("ns2d", "transolver-sigma"), other]


def key(row):
    names = ("run", "model", "seed", "diagnostic", "protocol", "metric", "field", "lead", "windows", "horizon")
    return tuple("" if row.get(name) is None else str(row[name]) for name in names)


def test_csv_and_json_hold_every_number_of_the_page_and_what_it_stands_on(rows):
    study = study_of(rows, {}, dimensions=Dimensions(0.1, "s"))
    measured = [one for one in rows if one["metric"] in ("relative_l2_lead", "relative_l2", "parameters")]
    idle = {key(one) for one in measured if one["model"] == "persistence" and one["run"] != rows[0]["run"]}
    lines = list(csv.DictReader(io.StringIO(to_csv(study))))
    plain = json.loads(to_json(study))
    nested = [{**group, **one} for group in plain["measurements"] for one in group["rows"]]
    drawn = {key(one) for one in lines}
    assert drawn == {key(one) for one in nested} and drawn <= {key(one) for one in rows}
    assert {name for name in drawn if not name[3]} == {key(one) for one in measured} - idle  # persistence once
    assert {name[6] for name in drawn if name[3] == "decomposition"} == {""}  # the mean over fields, which is drawn
    for line, one in zip(sorted(lines, key=key), sorted(nested, key=key), strict=True):
        source = next(held for held in rows if key(held) == key(line))
        assert one["value"] == source["value"] and one.get("deviation") == source.get("deviation")
        for name in ("value", "deviation"):
            assert line[name] == "" if source.get(name) is None else float(line[name]) == source[name]
        if source["lead"] is not None:
            assert float(line["time"]) == one["time"] == 0.1 * source["lead"]
        assert line["grid"] == "64×64" and one["commit"] == "abc1234"
    assert plain["time_step"] == 0.1 and plain["units"] == {"time": "s"}


def test_a_page_without_records_has_none_to_take_along(rows):
    study = study_of(rows, {})
    assert to_csv(study).count("\n") == 1 + len(study.records)
    assert "time" not in json.loads(to_json(study))["measurements"][0]["rows"][0]
