"""Terminal output: scores and diagnostics with their windows and horizon, for runs and persistence."""

import io

import pytest
from rich.console import Console

from sigmasolver.cli.diagnose import SUMMARIES, _print_summary
from sigmasolver.cli.terminal import print_scores
from sigmasolver.diagnose.subject import Findings
from sigmasolver.experiments.records import folder_labels
from tests.report import made

OTHER_METRICS = {"rmse": 0.25, "mae": 0.125, "correlation": 0.9, "correlation_time": None, "blow_up": 0.0}


def scores(model, run, weights, windows=72, horizon=10, factor_of_persistence=1.0):
    source = made.facts("ns2d", model, run=run, weights=weights, windows=windows, horizon=horizon)
    rows = [row for row in made.errors("ns2d", model, horizon=horizon) if row["metric"] != "correlation"]
    rows = [{**row, **source, "model": row["model"], "seed": row["seed"]} for row in rows]
    for model_facts, factor in (({}, 1.0), ({"model": "persistence", "seed": None}, factor_of_persistence)):
        for metric, value in OTHER_METRICS.items():
            field = None if metric == "blow_up" else "vorticity"
            rows.append(made.row({**source, **model_facts}, metric, value and factor * value, field=field))
    return rows


def render(rows):
    screen = Console(file=io.StringIO(), width=120)
    print_scores(screen, rows)
    return screen.file.getvalue()


def test_print_scores_shows_windows_horizon_and_persistence():
    text = render(scores("physolver", "mine", "w", factor_of_persistence=4.0))
    assert text.startswith(
        "ns2d: relative L2 error of free forecasts on 64 × 64, 72 windows of the test split, horizon 10\n"
    )
    assert "  mine: RMSE 0.25, MAE 0.125, correlation falls below 0.8 beyond the horizon\n" in text
    assert "  persistence: RMSE 1, MAE 0.5, correlation falls below 0.8 beyond the horizon\n" in text


def test_print_scores_shows_copied_run_once():
    run, copy, other = (scores("physolver", name, name[0]) for name in ("a-run", "a-copy", "b-run"))
    alone, both = render(run), render([*run, *copy])
    assert both == f"{alone}  a-copy is a copy of a-run and is not shown\n"
    all_three = render([*run, *copy, *other])
    assert "\n  a-run " in all_three and "\n  b-run " in all_three and "\n  a-copy " in all_three  # only in the note
    assert sum("a-copy" in line for line in all_three.splitlines()) == 1


def test_print_scores_lists_windows_per_model_if_they_differ():
    rows = [*scores("physolver", "one", "a"), *scores("specsolver", "two", "b", windows=4)]
    assert "Physolver: 72 windows of the test split, horizon 10; Specsolver: 4 windows of the test split" in render(
        rows
    )


def render_diagnostic(name, rows_by_run):
    screen = Console(file=io.StringIO(), width=200)
    _print_summary(screen, SUMMARIES[name], name, {run: Findings(rows) for run, rows in rows_by_run.items()})
    return screen.file.getvalue().splitlines()


def test_diagnose_summary_lists_windows_and_horizon_per_task():
    rows_by_run = {
        "flow": made.decomposition("ns2d", "physolver"),
        "other": made.decomposition("kf2d", "physolver", 16, 4),
    }
    rows_by_run["other"] = [{**row, "windows": 4} for row in rows_by_run["other"]]
    heading = render_diagnostic("decomposition", rows_by_run)[0]
    assert heading.endswith(
        "(NS2D: 200 windows of the test split, horizon 10; KF2D: 4 windows of the test split, horizon 16)"
    )
    same = {name: made.decomposition("ns2d", model) for name, model in (("a", "physolver"), ("b", "specsolver"))}
    assert render_diagnostic("decomposition", same)[0].endswith("(200 windows of the test split, horizon 10)")


@pytest.mark.parametrize("timed", [40, 2000])
def test_diagnose_efficiency_shows_timed_share_of_an_epoch(timed):
    source = made.facts("ns2d", "physolver", machine="H200")
    rows = made.efficiency("ns2d", "physolver", (1.0, 2.0, 3.0))
    rows = [{**row, "machine": "H200"} for row in rows]
    rows += [made.finding(source, "efficiency", "timed_updates", timed)]
    rows += [made.finding(source, "efficiency", "updates_per_epoch", 2000)]
    heading = render_diagnostic("efficiency", {"run": rows})[0]
    note = "; Physolver: 40 of 2,000 updates of an epoch timed" if timed == 40 else ""
    assert heading == f"efficiency: cost of the model, float32 (H200{note})"


def test_diagnose_corrections_counts_cases():
    rows, _, _ = made.corrections("ns2d", cases=(0, 7, 19))
    assert render_diagnostic("corrections", {"run": rows})[0].endswith(
        "(3 windows of the test split, one call from the true history)"
    )


def test_folder_labels_add_parents_until_unique(tmp_path):
    paths = [tmp_path / name for name in ("a/x/run", "b/x/run", "c/run", "other")]
    assert folder_labels(paths) == ["a/x/run", "b/x/run", "c/run", "other"]
    assert folder_labels(paths[:1]) == ["run"]
