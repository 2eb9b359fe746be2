"""CSV and JSON exports contain the records without rounding."""

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
    records = [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "physolver"), *errors("ns2d", "physolver", seed=43)]
    records = [{**r, "value": None} if (r["model"], r["lead"]) == ("physolver", 9) else r for r in records]
    unused = row(records[0], "rmse", 0.3, field="vorticity")  # not shown on the page
    return [*records, *decomposition("ns2d", "transolver-sigma"), unused]


def key(row):
    names = ("run", "model", "seed", "diagnostic", "protocol", "metric", "field", "lead", "windows", "horizon")
    return tuple("" if row.get(name) is None else str(row[name]) for name in names)


def test_csv_and_json_contain_all_numbers_with_provenance(rows):
    study = study_of(rows, {}, dimensions=Dimensions(0.1, "s"))
    measured = [entry for entry in rows if entry["metric"] in ("relative_l2_lead", "relative_l2", "parameters")]
    repeated = {key(entry) for entry in measured if entry["model"] == "persistence" and entry["run"] != rows[0]["run"]}
    lines = list(csv.DictReader(io.StringIO(to_csv(study))))
    document = json.loads(to_json(study))
    nested = [{**group, **entry} for group in document["measurements"] for entry in group["rows"]]
    exported = {key(entry) for entry in lines}
    assert exported == {key(entry) for entry in nested} and exported <= {key(entry) for entry in rows}
    assert {k for k in exported if not k[3]} == {key(entry) for entry in measured} - repeated  # persistence once
    assert {k[6] for k in exported if k[3] == "decomposition"} == {""}  # only the joint value is plotted
    for line, entry in zip(sorted(lines, key=key), sorted(nested, key=key), strict=True):
        source = next(record for record in rows if key(record) == key(line))
        assert entry["value"] == source["value"] and entry.get("deviation") == source.get("deviation")
        for name in ("value", "deviation"):
            assert line[name] == "" if source.get(name) is None else float(line[name]) == source[name]
        if source["lead"] is not None:
            assert float(line["time"]) == entry["time"] == 0.1 * source["lead"]
        assert line["grid"] == "64×64" and entry["commit"] == "abc1234"
    assert document["time_step"] == 0.1 and document["units"] == {"time": "s"}


def test_csv_and_json_line_count_and_missing_time(rows):
    study = study_of(rows, {})
    assert to_csv(study).count("\n") == 1 + len(study.records)
    assert "time" not in json.loads(to_json(study))["measurements"][0]["rows"][0]
