"""The ledger: its rows are the records of runs, and the page compares them with the paper."""

import json
import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest

from sigmasolver.diagnose.run import diagnose_run
from sigmasolver.evaluate import Request, evaluate_run
from sigmasolver.experiments.ledger import DIAGNOSTICS, METRICS, collect, recorded_runs, write
from sigmasolver.experiments.queue import is_done
from sigmasolver.forecast.checkpoint import load_recipe
from sigmasolver.model_cards.share import as_run
from sigmasolver.models import count_parameters
from sigmasolver.recipes import changed, changed_settings, factor_settings, recipe_of, suite_of
from sigmasolver.report.digits import significant
from sigmasolver.report.ledger import results_page
from sigmasolver.runs import Run, read_rows
from sigmasolver.simulate import simulator_of
from sigmasolver.simulate.generate import generate
from sigmasolver.train.dry_run import updates_of
from sigmasolver.train.job import train_run
from tests.data.waves import Waves

ROOT = Path(__file__).parents[2]
ROWS = read_rows(ROOT / "results" / "ledger.jsonl")


def test_results_page_is_up_to_date():
    planned, compared, timed = (list(suite_of(name)) for name in ("ledger", "comparison", "cost"))
    page = results_page(ROWS, planned, factor_settings(), compared, timed)
    assert (ROOT / "docs" / "results.md").read_text() == page


def test_ledger_rows_match_the_recipes_of_the_suites():
    planned = suite_of("ledger") | suite_of("factors") | suite_of("comparison") | suite_of("cost")
    assert {row["metric"] for row in ROWS} <= {*METRICS, *DIAGNOSTICS["decomposition"], *DIAGNOSTICS["corrections"]}
    for row in ROWS:
        recipe = planned[row["run"]]
        assert row["task"] == recipe.task.name and row["seed"] in (None, recipe.train.seed)
        assert row["precision"] == recipe.train.precision and row["forecast_precision"] == "float32"
        assert row["budget"] == pytest.approx(row["step"] / updates_of(recipe_of(row["task"])), rel=1e-12)
        assert row["grid"] == list(recipe.task.grid) and row["data_seed"] is not None
        frames = len(simulator_of(recipe.task.name).layout.times)
        per_trajectory = recipe.evaluation_window_spec().count_in(frames)
        assert row["split_windows"] == recipe.task.test * per_trajectory >= row["windows"]
        if row["metric"] == "parameters":
            size = count_parameters(recipe.model.name, recipe.model.config(recipe.task))
            assert row["value"] == size, "trained with a different model than that of the suite"


def test_results_page_compares_changed_settings_with_the_default():
    rows = [
        ledger_row(42, value, run, task="kf2d", field="vorticity", metric=metric)
        for run, value in (("a-42", 0.08), ("b-42", 0.06))
        for metric in ("relative_l2", "relative_l2_final")
    ]
    settings = {"a-42": "nothing", "b-42": "train.clip=1.0", "c-42": "train.ema=0.9"}
    page = results_page(rows, [], {"darcy": {"d-42": "nothing"}, "kf2d": settings})
    assert "| `a-42` | nothing | 8.00 | 8.00 | – |" in page
    assert "| `b-42` | train.clip=1.0 | 6.00 | 6.00 | -25.0 % |" in page
    assert "- `c-42`" in page and "- `d-42`" in page and "| a |" not in page
    assert "## One setting at a time: KF2D" in page and "time: Darcy" not in page
    for blown_up in ("a-42", "b-42"):
        values = [{**row, "value": None if row["run"] == blown_up else row["value"]} for row in rows]
        page = results_page(values, [], {"kf2d": settings})
        assert f"| `{blown_up}` | {settings[blown_up]} | not finite | not finite | – |" in page
        assert "%" not in page[page.index("| `b-42`") : page.index("## Not run yet")]


def test_results_page_sorts_cost_by_model_and_updates():
    rows = [
        {
            **ledger_row(42, value, run, task="kf2d", field="vorticity"),
            "model": run[0],
            "step": step,
            "seconds": step / 100,
        }
        for run, value, step in (("b-8-42", 0.1, 800), ("a-8-42", 0.2, 800), ("a-2-42", 0.4, 200))
    ]
    page = results_page(rows, [], {}, [], ["a-2-42", "a-8-42", "b-8-42", "b-2-42"])
    lines = [line for line in page.splitlines() if line.startswith(("| a |", "| b |"))]
    assert lines == ["| a | 200 | 2.00 | 40.0 |", "| a | 800 | 8.00 | 20.0 |", "| b | 800 | 8.00 | 10.0 |"]
    assert "- `b-2-42`" in page and "## KF2D" not in page
    rows = [{**row, "value": None} for row in rows[:1]] + [
        {key: row[key] for key in row if key != "seconds"} for row in rows[1:2]
    ]
    page = results_page(rows, [], {}, [], ["a-8-42", "b-8-42"])
    assert "| a | 800 | – | 20.0 |" in page and "| b | 800 | 8.00 | not finite |" in page


def test_results_page_sorts_comparison_by_error():
    names = ("a-1-42", "a-1-43", "b-1-42")
    rows = [
        {
            **ledger_row(int(run[-2:]), value, run, task="kf2d", field="vorticity", metric=metric),
            "model": run[0],
            "lead": lead,
        }
        for run, value in zip(names, (0.08, 0.10, 0.06), strict=True)
        for metric, lead in (("relative_l2", None), ("relative_l2_lead", 1), ("relative_l2_lead", 2))
    ]
    rows += [{**row, "metric": "parameters", "value": 1234, "lead": None} for row in rows if row["lead"] == 1]
    baseline = [
        {**row, "model": "persistence", "seed": None, "value": 0.9} for row in rows if row["metric"] != "parameters"
    ]
    page = results_page([*rows, *baseline], [], {}, [*names, "c-1-42"])
    lines = [line for line in page.splitlines() if line.startswith(("| a |", "| b |", "| persistence |"))]
    assert lines == [
        "| b | 1,234 | 1 | 6.00 | 6.00 | 6.00 |",
        "| a | 1,234 | 2 | 9.00 ± 1.41 | 9.00 ± 1.41 | 9.00 ± 1.41 |",
        "| persistence | – | – | 90.0 | 90.0 | 90.0 |",
    ]
    assert "- `c-1-42`" in page and "## KF2D\n" not in page


def test_results_page_compares_single_domain_counterparts():
    base = {"task": "ns2d", "field": "vorticity"}
    values = {"transolver-sigma": 0.03, "physolver": 0.06, "specsolver": 0.04, "specsolver-matched": 0.05}

    def rows(label):
        for name, value in values.items():
            model = name.removesuffix("-matched")
            run = f"ns2d-{model}-bf16-{label}{name.removeprefix(model)}-42"
            yield ledger_row(42, value, run, **base, model=model)
            yield ledger_row(42, 5000, run, **{**base, "field": None}, model=model, metric="parameters")
            for lead in (1, 2, 3):
                yield ledger_row(42, lead * value, run, **base, model=model, metric="relative_l2_lead", lead=lead)

    page = results_page([*rows("short")], [])
    lines = [line for line in page.splitlines() if line.startswith("| NS2D ω | 50 %")]
    assert lines == [
        "| NS2D ω | 50 % | transolver-sigma | 5,000 | 3.00 | 6.00 | 9.00 | 3.00 | – |",
        "| NS2D ω | 50 % | physolver | 5,000 | 6.00 | 12.0 | 18.0 | 6.00 | 50.0 % |",
        "| NS2D ω | 50 % | specsolver | 5,000 | 4.00 | 8.00 | 12.0 | 4.00 | 25.0 % |",
        "| NS2D ω | 50 % | specsolver, matched | 5,000 | 5.00 | 10.0 | 15.0 | 5.00 | 40.0 % |",
    ]
    incomplete = [row for row in rows("short") if row["model"] != "physolver"]
    assert "Single-domain counterparts" not in results_page(incomplete, []), "one of them is missing"
    other = [
        {**row, "run": row["run"].replace("short", "long")} for row in rows("short") if row["model"] == "physolver"
    ]
    assert "Single-domain counterparts" not in results_page([*incomplete, *other], []), "not trained alike"


def test_results_page_compares_variants_with_the_paper():
    values = {"transolver-sigma": (0.04, 0.06), "no-physical": (0.10, 0.15), "slice-replace": (0.05, None)}
    rows = []
    for model, errors in values.items():
        for seed, error in zip((42, 43), errors, strict=True):
            run, base = f"ns2d-{model}-bf16-short-{seed}", {"task": "ns2d", "model": model}
            rows.append(ledger_row(seed, error, run, **base, field="vorticity"))
            rows.append(ledger_row(seed, 5000, run, **base, field=None, metric="parameters"))
    page = results_page(rows, [])
    section = page[page.index("## Ablations") : page.index("## Not run yet")]
    # The paper has 4.96, 3.07 and 2.79 %.
    assert [line for line in section.splitlines() if "NS2D" in line] == [
        "| w/o Physical Branch | no-physical | NS2D ω | 5,000 | 50 % | 2 | 4.96 | +78 % | 12.5 ± 3.5 | +150 % |",
        "| SRPA → PA | slice-replace | NS2D ω | 5,000 | 50 % | 2 | 3.07 | +10 % | not finite | – |",
        "| Transolver-σ | transolver-sigma | NS2D ω | 5,000 | 50 % | 2 | 2.79 | – | 5.00 ± 1.41 | – |",
    ]
    alone = [row for row in rows if row["model"] == "transolver-sigma"]
    assert "## Ablations" not in results_page(alone, []), "nothing to compare"
    other = [{**row, "run": row["run"].replace("short", "long")} for row in rows if row["model"] == "no-physical"]
    assert "## Ablations" not in results_page([*alone, *other], []), "not trained alike"


@pytest.mark.parametrize(
    ("task", "updates"),
    [("darcy", 125_000), ("ns2d", 250_000), ("kf2d", 83_750), ("it3d", 80_000), ("smoke3d", 200_000)],
)
def test_updates_of_the_paper_recipes(task, updates):
    assert updates_of(recipe_of(task)) == updates


def ledger_row(seed, value, run=None, **overrides):
    """A ledger row like that of a finished Darcy run."""
    facts = {"task": "darcy", "model": "transolver-sigma", "metric": "relative_l2", "field": "pressure", "lead": None}
    origin = {"data": "f" * 64, "weights": "w" * 16, "commit": "c", "machine": "m", "date": "d", "windows": 200}
    values = {
        "run": run or f"darcy-transolver-sigma-bf16-{seed}",
        "seed": seed,
        "value": value,
        "step": 62_500,
        "budget": 0.5,
    }
    return {**facts, **origin, "precision": "bf16", "data_seed": 3, **values, **overrides}


def test_results_page_means_deviations_and_differences():
    values = (0.0041, 0.0044, 0.0050)
    rows = [ledger_row(seed, value) for seed, value in zip((42, 43, 44), values, strict=True)]
    rows += [
        ledger_row(42, 1_245_289, metric="parameters", field=None),
        ledger_row(None, 0.56, rows[0]["run"], model="training-mean"),
    ]
    page = results_page(rows, ["darcy-transolver-sigma-bf16-42", "darcy-ffno-bf16-42"])
    mean, deviation = 100 * np.mean(values), 100 * np.std(values, ddof=1)
    line = next(line for line in page.splitlines() if line.startswith("| darcy-transolver-sigma-bf16 |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "darcy-transolver-sigma-bf16", "Darcy p", "1,245,289", "50 %", "42, 43, 44", "0.40 ± 0.01",
        f"{mean:.3f} ± {deviation:.3f}", f"{100 * (mean / 0.40 - 1):+.1f} %",
    ]  # fmt: skip
    assert "| training-mean | Darcy p | – | – | – | – | 56.0 | – |" in page
    assert "- `darcy-ffno-bf16-42`" in page and "- `darcy-transolver-sigma-bf16-42`" not in page


def test_results_page_shows_blown_up_run_as_not_finite():
    page = results_page([ledger_row(42, None), ledger_row(43, 0.004)], [])
    line = next(line for line in page.splitlines() if line.startswith("| darcy-transolver-sigma-bf16 |"))
    assert line.endswith("| not finite | – |"), "no difference of the seeds that are finite"


def test_results_page_averages_errors_by_lead_over_seeds():
    base = {"task": "kf2d", "field": "vorticity"}
    rows = []
    for seed, factor in ((42, 1.0), (43, 3.0)):
        run = f"kf2d-transolver-sigma-{seed}"
        rows += [ledger_row(seed, 0.02, run, **base), ledger_row(seed, 0.03, run, metric="relative_l2_final", **base)]
        rows += [
            ledger_row(seed, factor * lead / 1000, run, **{**base, "metric": "relative_l2_lead", "lead": lead})
            for lead in range(1, 17)
        ]
    page = results_page(rows, [])
    assert "| run | lead 1 | lead 8 | lead 16 | mean over leads |" in page
    assert "| kf2d-transolver-sigma | 0.200 | 1.60 | 3.20 | 1.70 |" in page
    blown_up = [{**row, "value": None} if (row["seed"], row["lead"]) == (43, 16) else row for row in rows]
    assert "| kf2d-transolver-sigma | 0.200 | 1.60 | not finite | not finite |" in results_page(blown_up, [])


# --- from run folders


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A small training of a row of the paper, on waves instead of its data."""
    folder = tmp_path_factory.mktemp("ledger")
    store = generate(Waves(grid=8, frames=20), 4, 5, folder / "ns2d.h5").path
    fields = ("task.inputs=('height',)", "task.targets=('height',)")
    task_settings = (*fields, "task.grid=(8,8)", "task.train=2", "task.test=2", "model.modes=3")
    model_settings = ("model.width=16", "model.depth=1", "model.heads=2", "model.slices=4", "train.updates=5")
    recipe = changed(recipe_of("ns2d", "physolver"), [*task_settings, *model_settings])
    run = Run(folder / "ns2d-physolver-42")
    train_run(recipe, store, run)
    evaluate_run(run)
    return run


def test_collect_adds_budget_and_data_seed_to_the_records(run):
    rows = collect(run)
    records = {
        (row["model"], row["metric"], row["field"], row["lead"]): row["value"]
        for row in read_rows(run.records)
        if row["metric"] in METRICS
    }
    assert {(row["model"], row["metric"], row["field"], row["lead"]): row["value"] for row in rows} == records
    assert {row["budget"] for row in rows} == {5 / 250_000}
    assert {row["data_seed"] for row in rows} == {5}


def test_collect_accepts_final_records_without_weights(run, tmp_path):
    shutil.copytree(run.path, tmp_path / run.path.name, ignore=shutil.ignore_patterns("*.safetensors"))
    copy = Run(tmp_path / run.path.name)
    assert collect(copy) == collect(run)
    text = copy.records.read_text()
    copy.records.write_text(text.replace('"step": 5', '"step": 4'))
    with pytest.raises(ValueError, match="is not finished"):
        collect(copy)
    copy.records.write_text(text.replace(run.digest, "0" * 16, 1))
    with pytest.raises(ValueError, match="is not finished"):
        collect(copy)


def test_write_replaces_rows_of_the_same_run(run, tmp_path):
    file, rows = tmp_path / "ledger.jsonl", collect(run)
    other = [{**row, "run": "ns2d-specsolver-42"} for row in rows]
    write(file, other)
    write(file, rows)
    assert write(file, rows) == [*other, *rows] == [json.loads(line) for line in file.read_text().splitlines()]


def test_recorded_runs_have_the_same_settings(run, tmp_path):
    file, name = tmp_path / "ledger.jsonl", run.path.name
    recipe = load_recipe(run)
    assert recorded_runs(file, {name: recipe}, 5) == set()
    write(file, collect(run))
    assert recorded_runs(file, {name: recipe}) == recorded_runs(file, {name: recipe, "other": recipe}, 5) == {name}
    assert recorded_runs(file, {"other": recipe}, 6) == set()
    longer, rounded, slower = (
        changed(recipe, [setting]) for setting in ("train.updates=9", "train.precision=bf16", "train.lr=1e-9")
    )
    # `recorded_runs` is given recipes of a suite, whose settings come from the same function.
    assert all(row["settings"] == changed_settings(recipe) for row in read_rows(file))
    for other, seed, windows, difference in (
        (recipe, 6, None, "data seed 5, not 6"),
        (recipe, 5, 1, "number of test windows 2, not 1"),
        (longer, 5, None, "number of updates 5, not 9"),
        (rounded, 5, None, "training precision float32, not bf16"),
        (slower, 5, None, r"settings \(.*\), not \(.*train.lr=1e-09.*\)"),
    ):
        with pytest.raises(ValueError, match=f"has {name} with {difference}; its rows would be replaced"):
            recorded_runs(file, {name: other}, seed, windows)
    assert recorded_runs(file, {name: recipe}, 5, windows=1000) == {name}, "the test split has fewer"
    write(file, [{**row, "windows": 1} for row in read_rows(file)])
    with pytest.raises(ValueError, match="number of test windows 1, not 2"):
        recorded_runs(file, {name: recipe}, 5)
    older = [{key: row[key] for key in row if key not in ("settings", "split_windows")} for row in read_rows(file)]
    write(file, older)
    assert recorded_runs(file, {name: recipe}, 5) == {name}, "rows of earlier versions do not contain them"


def test_collect_includes_diagnoses_of_the_same_weights(run, tmp_path):
    shutil.copytree(run.path, tmp_path / run.path.name)
    copy = Run(tmp_path / run.path.name)
    findings = diagnose_run(copy, ["decomposition", "corrections"])
    rows = collect(copy)
    assert rows[: len(collect(run))] == collect(run)
    diagnosed = rows[len(collect(run)) :]
    assert {row["metric"] for row in diagnosed} == {metric for metrics in DIAGNOSTICS.values() for metric in metrics}
    assert {row["budget"] for row in diagnosed} == {5 / 250_000} and {row["field"] for row in diagnosed} == {None}
    energies = [row for row in findings["decomposition"].rows if row["field"] is None and row["lead"] == 10]
    page = results_page([{**row, "field": row["field"] and "vorticity"} for row in rows], [])
    parts = [next(row["value"] for row in energies if row["metric"] == f"{part}_relative")
             for part in ("injection", "propagation", "cross", "total")]  # fmt: skip
    injection, propagation, cross, total = map(significant, parts)
    line = f"| 10 | 2 | {injection} | 0.00720 | {propagation} | 0.01876 | {cross} | {total} |"
    assert f"| ns2d-physolver | 0.002 % {line}" in page
    means = [row for row in findings["corrections"].rows if row["case"] is None and row["layer"] is not None]
    (ratio,) = [100 * row["value"] for row in means if row["metric"] == "correction_ratio"]
    assert f"| ns2d-physolver-42 | 0.002 % | correction (%) | {significant(ratio)} |" in page
    diverged = [{**row, "value": None if row["metric"] == "correction_ratio" else row["value"]} for row in diagnosed]
    assert "| ns2d-physolver-42 | 0.002 % | correction (%) | not finite |" in results_page(diverged, [])
    other = copy.path / "diagnose" / "decomposition.jsonl"
    other.write_text(other.read_text().replace(run.digest, "0" * 16))
    assert {row.get("diagnostic") for row in collect(copy)} == {None, "corrections"}


@pytest.mark.parametrize("other_request", [Request(windows=1), Request(horizon=5)])
def test_collect_leaves_out_diagnoses_of_other_samples(run, tmp_path, other_request):
    """The results page shows the numbers next to those of the paper."""
    shutil.copytree(run.path, tmp_path / run.path.name)
    copy = Run(tmp_path / run.path.name)
    diagnose_run(copy, ["decomposition", "corrections"], other_request)
    assert collect(copy) == collect(run)
    diagnose_run(copy, ["decomposition"])
    assert {row.get("diagnostic") for row in collect(copy)} == {None, "decomposition"}


def test_collect_refuses_the_copy_of_a_pretrained_model(tmp_path):
    copy = as_run("darcy", tmp_path)
    evaluate_run(copy)
    with pytest.raises(ValueError, match="is a pretrained model, evaluated on the few windows that it comes with; add"):
        collect(copy)


def test_results_page_leaves_out_other_tasks_and_fields():
    """The paper's main table has no column for them, but the rest of the page is made."""
    rows = [
        ledger_row(42, 0.1, "darcy-a-42", task="darcy", field="pressure"),
        ledger_row(42, 0.2, "fsi-a-42", task="fsi", field="vorticity"),
        ledger_row(42, 0.3, "ns2d-a-42", task="ns2d", field="height"),
    ]
    page = results_page(rows, [])
    assert "## Darcy" in page and "## NS2D" not in page and page.count("-a-42 | 62,500 |") == 3


def test_collect_errors(run, tmp_path):
    with pytest.raises(ValueError, match="is not a run"):
        collect(Run(tmp_path))
    recipe = changed(recipe_of("ns2d"), ["train.updates=5"])
    Run(tmp_path / "new").start(recipe.to_plain())
    with pytest.raises(ValueError, match="is not finished; resume with: sigmasolver train --resume"):
        collect(Run(tmp_path / "new"))


@pytest.mark.parametrize("other_request", [Request(windows=1), Request(protocol="teacher-forced"), Request(horizon=5)])
def test_collect_rejects_other_evaluations(run, tmp_path, other_request):
    shutil.copytree(run.path, tmp_path / "run")
    other = Run(tmp_path / "run")
    other.records.unlink()
    evaluate_run(other, other_request)
    with pytest.raises(ValueError, match="no records of its final weights on the whole test split"):
        collect(other)
    assert not is_done(other, load_recipe(other)) and is_done(run, load_recipe(run))


def write_rows(file, number):
    for step in range(5):
        write(file, [ledger_row(number, 0.1, f"darcy-{number}-{step}")])


def test_write_from_concurrent_processes_loses_no_row(tmp_path):
    file = tmp_path / "ledger.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_rows, args=(file, number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert {row["run"] for row in read_rows(file)} == {
        f"darcy-{number}-{step}" for number in range(4) for step in range(5)
    }
