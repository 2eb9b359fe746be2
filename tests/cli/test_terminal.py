"""What a person at the terminal reads: every number with its windows and its horizon, persistence like any other."""

import io

import pytest
from rich.console import Console

from sigmasolver.cli.diagnose import SUMMARIES, _say
from sigmasolver.cli.terminal import print_scores
from sigmasolver.diagnose.subject import Findings
from sigmasolver.experiments.records import folder_labels
from tests.report import made

BESIDE = {"rmse": 0.25, "mae": 0.125, "correlation": 0.9, "correlation_time": None, "blow_up": 0.0}


def scores(model, run, weights, windows=72, horizon=10, still=1.0):
    source = made.facts("ns2d", model, run=run, weights=weights, windows=windows, horizon=horizon)
    rows = [row for row in made.errors("ns2d", model, horizon=horizon) if row["metric"] != "correlation"]
    rows = [{**row, **source, "model": row["model"], "seed": row["seed"]} for row in rows]
    for who, factor in (({}, 1.0), ({"model": "persistence", "seed": None}, still)):
        for metric, value in BESIDE.items():
            field = None if metric == "blow_up" else "vorticity"
            rows.append(made.row({**source, **who}, metric, value and factor * value, field=field))
    return rows


def told(rows):
    screen = Console(file=io.StringIO(), width=120)
    print_scores(screen, rows)
    return screen.file.getvalue()


def test_scores_say_windows_and_horizon_and_what_persistence_has():
    text = told(scores("physolver", "mine", "w", still=4.0))
    assert text.startswith(
        "ns2d: relative L2 error of free forecasts on 64 × 64, 72 windows of the test split, horizon 10\n"
    )
    assert "  mine: RMSE 0.25, MAE 0.125, correlation falls below 0.8 beyond the horizon\n" in text
    assert "  persistence: RMSE 1, MAE 0.5, correlation falls below 0.8 beyond the horizon\n" in text


def test_scores_of_a_run_and_its_copy_are_shown_once():
    one, copy, other = (scores("physolver", name, name[0]) for name in ("a-run", "a-copy", "b-run"))
    alone, both = told(one), told([*one, *copy])
    assert both == f"{alone}  a-copy is a copy of a-run and is not shown\n"
    three = told([*one, *copy, *other])
    assert "\n  a-run " in three and "\n  b-run " in three and "\n  a-copy " in three  # the sentence alone
    assert sum("a-copy" in line for line in three.splitlines()) == 1


def test_runs_with_other_windows_are_named_with_theirs():
    rows = [*scores("physolver", "one", "a"), *scores("specsolver", "two", "b", windows=4)]
    assert "Physolver: 72 windows of the test split, horizon 10; Specsolver: 4 windows of the test split" in told(rows)


def diagnosis(name, found):
    screen = Console(file=io.StringIO(), width=200)
    _say(screen, SUMMARIES[name], name, {run: Findings(rows) for run, rows in found.items()})
    return screen.file.getvalue().splitlines()


def test_a_diagnosis_of_several_tasks_says_the_windows_and_horizon_of_each():
    found = {"flow": made.decomposition("ns2d", "physolver"), "other": made.decomposition("kf2d", "physolver", 16, 4)}
    found["other"] = [{**row, "windows": 4} for row in found["other"]]
    heading = diagnosis("decomposition", found)[0]
    assert heading.endswith(
        "(NS2D: 200 windows of the test split, horizon 10; KF2D: 4 windows of the test split, horizon 16)"
    )
    same = {name: made.decomposition("ns2d", model) for name, model in (("a", "physolver"), ("b", "specsolver"))}
    assert diagnosis("decomposition", same)[0].endswith("(200 windows of the test split, horizon 10)")


@pytest.mark.parametrize("timed", [40, 2000])
def test_a_diagnosis_says_how_much_of_an_epoch_was_timed(timed):
    source = made.facts("ns2d", "physolver", machine="H200")
    rows = made.efficiency("ns2d", "physolver", (1.0, 2.0, 3.0))
    rows = [{**row, "machine": "H200"} for row in rows]
    rows += [made.finding(source, "efficiency", "timed_updates", timed)]
    rows += [made.finding(source, "efficiency", "updates_per_epoch", 2000)]
    heading = diagnosis("efficiency", {"run": rows})[0]
    part = "; Physolver: 40 of 2,000 updates of an epoch timed" if timed == 40 else ""
    assert heading == f"efficiency: cost of the model, float32 (H200{part})"


def test_a_diagnosis_of_a_few_cases_counts_those():
    rows, _, _ = made.corrections("ns2d", cases=(0, 7, 19))
    assert diagnosis("corrections", {"run": rows})[0].endswith(
        "(3 windows of the test split, one call from the true history)"
    )


def test_folders_are_named_by_what_tells_them_apart(tmp_path):
    paths = [tmp_path / name for name in ("a/x/run", "b/x/run", "c/run", "other")]
    assert folder_labels(paths) == ["a/x/run", "b/x/run", "c/run", "other"]
    assert folder_labels(paths[:1]) == ["run"]
