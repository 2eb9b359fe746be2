"""`figure`, `table` and `report` on run folders: their files and text, and one-sentence errors."""

import json
import re
from statistics import fmean, stdev

import pytest
from typer.testing import CliRunner

from sigmasolver.cli import app
from sigmasolver.cli.report import figure, table
from sigmasolver.diagnose.records import write_findings
from sigmasolver.diagnose.subject import Findings
from sigmasolver.experiments.records import dimensions_of, join_records, label_runs
from sigmasolver.report.figures import FIGURES
from sigmasolver.report.paper_tables import TABLES
from sigmasolver.report.study import Dimensions
from sigmasolver.runs import Run, read_rows, replace_rows
from tests.forked import COMMAND, Forked
from tests.report import made


def folder(path, rows=(), diagnostic=None, findings=(), arrays=None):
    """A run folder with these records."""
    path.mkdir()
    (path / "recipe.json").write_text("{}")
    replace_rows(path / "records.jsonl", rows)
    if diagnostic is not None:
        facts = {key: findings[0][key] for key in ("task", "model", "seed", "run", "windows", "horizon")}
        write_findings(Run(path), diagnostic, Findings(list(findings), arrays or {}), facts)
    return path


def call(*args):
    return CliRunner().invoke(app, [str(word) for word in args])


def test_table_aggregates_several_seeds(tmp_path):
    runs = [folder(tmp_path / f"s{seed}", made.errors("ns2d", "transolver-sigma", seed)) for seed in (42, 43, 44)]
    result = call("table", "main", *runs)
    assert result.exit_code == 0, result.output
    caption, blank, heading, *_ = result.stdout.splitlines()
    assert "tab:pde-main-results" in caption and not blank and heading.startswith("| model | from | Darcy p | NS2D ω |")
    rows = [row for seed in (42, 43, 44) for row in made.errors("ns2d", "transolver-sigma", seed)]
    values = [100 * row["value"] for row in rows if row["metric"] == "relative_l2"]
    expected = f"| Transolver-σ | ours, 3 seeds | – | **{fmean(values):.2f} ± {stdev(values):.2f}** |"
    assert len(values) == 3 and expected in result.stdout
    latex = call("table", "main", *runs, "--latex").stdout
    assert latex.startswith("\\begin{tabular}") and latex.endswith("\\end{tabular}\n")
    assert "| <ins>4.23</ins> |" in result.stdout and "\\underline{4.23}" in latex  # FactFormer, second on NS2D


def test_results_file_gives_the_same_table_and_figure_as_run_folders(tmp_path):
    rows_by_run = {f"ns2d-sigma-{seed}": made.errors("ns2d", "transolver-sigma", seed) for seed in (42, 43)}
    rows_by_run = {name: [{**row, "run": name} for row in rows] for name, rows in rows_by_run.items()}
    runs = [folder(tmp_path / name, rows) for name, rows in rows_by_run.items()]
    file = tmp_path / "results.jsonl"
    replace_rows(file, [row for rows in rows_by_run.values() for row in rows])
    assert call("table", "main", file).stdout == call("table", "main", *runs).stdout != ""
    assert call("figure", "rollout", file, "--out", tmp_path / "a").exit_code == 0
    assert call("figure", "rollout", *runs, "--out", tmp_path / "b").exit_code == 0
    assert (tmp_path / "a" / "rollout.png").read_bytes() == (tmp_path / "b" / "rollout.png").read_bytes()
    steady = [{**row, "run": "darcy-unet-42"} for row in made.errors("darcy", "unet") if row["lead"] is None]
    with_others = tmp_path / "with_others.jsonl"  # of which runs without leads are omitted
    replace_rows(with_others, [*read_rows(file), *steady])
    assert call("figure", "rollout", with_others, "--out", tmp_path / "c").exit_code == 0
    assert (tmp_path / "c" / "rollout.png").read_bytes() == (tmp_path / "b" / "rollout.png").read_bytes()
    message = str(call("figure", "spectra", file, "--out", tmp_path).exception)
    assert message == f"{file} has no correlation_lead; pass the folders of the runs instead."


def test_table_in_terminal_is_styled_and_never_truncated(tmp_path, monkeypatch):
    run = folder(tmp_path / "run", made.errors("ns2d", "transolver-sigma"))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then assumes a terminal
    for columns in ("200", "60"):
        monkeypatch.setenv("COLUMNS", columns)
        output = call("table", "main", run).stdout
        assert "\x1b[4m4.23\x1b[0m" in output and "\x1b[1m2.79" in output and "|" not in output
        plain = re.sub(r"\x1b\[[0-9;]*m", "", output)
        (unet,) = (line.split() for line in plain.splitlines() if line.startswith("  U-Net"))
        assert unet == ["U-Net", "paper", "0.80", "19.82", "32.81", "47.24", "35.76", "48.49", "44.10", "14.95"]
    assert call("table", "main", run, "--latex").stdout.startswith("\\begin{tabular}")


def test_table_separates_runs_with_different_recipes(tmp_path):
    def run(name, seed, width):
        path = folder(tmp_path / f"ns2d-{name}-{seed}", made.errors("ns2d", "physolver", seed))
        recipe = {"model": {"width": width}, "train": {"seed": seed}}
        (path / "recipe.json").write_text(json.dumps(recipe))
        return path

    def table(*runs):
        result = call("table", "main", *runs)
        assert result.exit_code == 0, result.output
        return [
            line.split(" | ")[:2] for line in result.stdout.splitlines() if line.startswith("| ") and "| ours" in line
        ]

    full, matched = ([run(name, seed, width) for seed in (42, 43)] for name, width in (("full", 128), ("other", 160)))
    assert table(*full) == [["| Physolver", "ours, 2 seeds"]]
    assert table(full[0], matched[1]) == [["| ns2d-full", "ours, 1 seed"], ["| ns2d-other", "ours, 1 seed"]]
    assert table(*full, *matched) == [["| ns2d-full", "ours, 2 seeds"], ["| ns2d-other", "ours, 2 seeds"]]


def test_figure_out_and_where_options(tmp_path):
    rows = made.errors("ns2d", "physolver") + made.errors("ns2d", "physolver", horizon=20)
    run = folder(tmp_path / "run", rows)
    refused = call("figure", "rollout", run, "--out", tmp_path / "new")
    assert isinstance(refused.exception, ValueError) and "--where horizon=10" in str(refused.exception)
    result = call("figure", "rollout", run, "--out", tmp_path / "new", "--where", "horizon=20")
    assert result.exit_code == 0, result.output
    assert result.stdout.split() == [str(tmp_path / "new" / f"rollout.{kind}") for kind in ("png", "pdf")]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["rollout.pdf", "rollout.png"]


def test_figure_maps_of_a_renamed_run(tmp_path):
    rows, arrays = made.maps("ns2d", "physolver", grid=(8, 8), leads=(1, 2))
    run = folder(tmp_path / "renamed", [], "maps", rows, arrays)
    result = call("figure", "maps", run, "--out", tmp_path)
    assert result.exit_code == 0, result.exception
    invalid = call("figure", "maps", run, "--out", tmp_path, "--field", "density")
    assert str(invalid.exception) == 'ns2d has no field "density"; choose from vorticity.'


def test_report_page_has_animations_and_title(tmp_path):
    rows, arrays = made.maps("ns2d", "physolver", grid=(8, 8), leads=(1, 2))
    run = folder(tmp_path / "one", made.errors("ns2d", "physolver"), "maps", rows, arrays)
    result = call("report", run, "--out", tmp_path / "page.html", "--title", "Mine & yours")
    assert result.exit_code == 0, result.exception
    page = (tmp_path / "page.html").read_text()
    assert "<h1>Mine &amp; yours</h1>" in page and page.count("data-animation=") == len(arrays["cases"])
    bare = folder(tmp_path / "bare")
    assert "evaluate" in str(call("report", bare, "--out", tmp_path / "no.html").exception)
    assert not (tmp_path / "no.html").exists()


def test_dimensions_of_runs_and_units_option(tmp_path):
    def run(name, step=0.25, unit="1/h", **facts):
        rows, arrays = made.maps("ns2d", name, grid=(8, 8), leads=(1, 2))
        records = [{**row, **facts} for row in made.errors("ns2d", name)]
        path = folder(tmp_path / f"{name}{step}{len(facts)}", records, "maps", rows, arrays)
        domain = {"fields": ["vorticity"], "units": [unit], "boundary": ["periodic", "wall"], "lengths": [1.75, None],
                  "points": [8, 8], "time_steps": [step, step]}  # fmt: skip
        (path / "data.json").write_text(json.dumps({"domain": domain}))
        return path

    def dimensions(paths, *units):
        rows, _ = join_records(label_runs(paths), ("maps",))
        return dimensions_of(paths, rows, units)

    agreeing = [run("physolver"), run("specsolver")]
    units = {"vorticity": "1/h"}
    assert dimensions(agreeing) == Dimensions(
        0.25, "", (2.0, None), (True, False), "", units
    )  # the period: 8 / 7 of 1.75
    overridden = dimensions(agreeing, "time=h", "length = km", "vorticity=1/s")
    assert overridden == Dimensions(0.25, "h", (2.0, None), (True, False), "km", {"vorticity": "1/s"})
    speed = [run("physolver", 0.125, "length/time")]
    assert dimensions(speed, "time=s", "length=m").units == {"vorticity": "m/s"}
    assert dimensions(speed, "length=m").units == {"vorticity": "m/time"}
    assert dimensions([agreeing[0], run("specsolver", step=0.5)]) == Dimensions()
    assert dimensions([run("physolver", anyway="its frames are 1 apart")]) == Dimensions()
    result = call("report", *agreeing, "--out", tmp_path / "page.html", "--units", "time=h")
    assert result.exit_code == 0, result.exception
    page = (tmp_path / "page.html").read_text()
    assert "lead 10, 2.5 h (%)" in page and "vorticity (1/h)" in page
    invalid = call("report", *agreeing, "--out", tmp_path / "page.html", "--units", "mass=kg")
    assert str(invalid.exception) == (
        'Invalid unit "mass=kg"; pass NAME=UNIT, where NAME is one of time, length, vorticity.'
    )


def folder_with_weights(path, weights, *arguments):
    """A run folder with weights, which identify the run."""
    run = folder(path, *arguments)
    (path / "weights.safetensors").write_bytes(weights)
    return run


def test_repeated_records_of_a_renamed_run_count_once(tmp_path):
    rows = made.errors("ns2d", "physolver", run="before")
    newer = [{**row, "run": "now", "date": "2026-02-02", "commit": "fff"} for row in rows]
    run = folder_with_weights(tmp_path / "now", b"w", [*rows, *newer])
    for args in (("table", "comparison", run), ("figure", "rollout", run, "--out", tmp_path),
                  ("report", run, "--out", tmp_path / "page.html")):  # fmt: skip
        assert (result := call(*args)).exit_code == 0, result.exception
    assert "<dd>2026-02-02</dd>" in (tmp_path / "page.html").read_text()
    other = [{**row, "weights": "f" * 16} for row in rows]
    mixed = folder_with_weights(tmp_path / "mixed", b"w", [*rows, *other])
    assert ", with weights" in str(call("table", "comparison", mixed).exception)


def test_copied_run_is_shown_once_with_a_note(tmp_path):
    free, forced = (made.errors("ns2d", "physolver", protocol=name) for name in ("free", "teacher-forced"))
    findings, arrays = made.maps("ns2d", "physolver", grid=(8, 8), leads=(1, 2))
    run = folder_with_weights(tmp_path / "run", b"w", free)
    copy = folder_with_weights(tmp_path / "copy", b"w", [*free, *forced], "maps", findings, arrays)
    alone, both = call("table", "comparison", run), call("table", "comparison", run, copy)
    assert both.stdout == alone.stdout and both.exit_code == 0
    assert both.stderr == f"{copy} is a copy of {run}; it is shown once, as run.\n" and not alone.stderr
    for name in ("teacher-forcing", "maps"):  # records that only the copy has are used as well
        assert call("figure", name, run, copy, "--out", tmp_path).exit_code == 0
        assert call("figure", name, run, "--out", tmp_path).exit_code != 0
    other = folder_with_weights(tmp_path / "other", b"v", free)
    assert call("table", "comparison", run, copy, other).stdout.count("\n| other |") == 1


def test_table_labels_equal_folder_names_by_parent(tmp_path):
    for name, model in (("a", "physolver"), ("b", "physolver"), ("c", "specsolver")):
        (tmp_path / name).mkdir()
        folder_with_weights(tmp_path / name / "run", name.encode(), made.errors("ns2d", model))
    output = call("table", "comparison", *(tmp_path / name / "run" for name in "abc")).stdout
    assert [line.split(" | ")[0] for line in output.splitlines()[4:]] == [
        "| a/run", "| b/run", "| specsolver", "| persistence",
    ]  # fmt: skip


def test_table_scaling_run_shared_by_two_sweeps(tmp_path):
    rows = made.scaling("data", 1000, 4.1)
    shared = [folder_with_weights(tmp_path / name, b"w", rows) for name in ("darcy-data-1000", "darcy-grid-85")]
    lines = call("table", "scaling", *shared).stdout.splitlines()
    assert sum("4.10 ± 1.37" in line for line in lines) == 2
    renamed = folder_with_weights(tmp_path / "mine", b"v", rows)
    assert sum("4.10 ± 1.37" in line for line in call("table", "scaling", renamed).stdout.splitlines()) == 1


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "teacher-forcing"])
def test_figure_without_records_names_the_command(name, tmp_path):
    run = folder(tmp_path / "run")
    message = str(call("figure", name, run, "--out", tmp_path).exception)
    command = f"diagnose {run} --only " if FIGURES[name].needs[0].facts.get("diagnostic") else f"evaluate {run}"
    assert (
        message.startswith(f"{run} has no ")
        and f"; create it with: sigmasolver {command}" in message
        and "\n" not in message
    )


@pytest.mark.parametrize("name", TABLES)
def test_table_without_records_names_the_command(name, tmp_path):
    run = folder(tmp_path / "run")
    message = str(call("table", name, run).exception)
    assert re.fullmatch(rf"{run} has no \S+ \(.*\); create it with: sigmasolver (evaluate|diagnose) {run}.*", message)


def test_report_command_errors_are_one_sentence(tmp_path):
    run = folder(tmp_path / "run", made.errors("ns2d", "physolver"))
    for args, message in [
        (("figure", "rolout", run), 'Unknown figure "rolout"; did you mean rollout'),
        (("table", "mian", run), 'Unknown table "mian"; did you mean main'),
        (("figure", "scaling", run, "--field", "u"), "The figure scaling does not show a field; omit --field."),
        (("table", "comparison", tmp_path / "none"), "is not a run: recipe.json not found"),
        (("table", "comparison", run, "--where", "horizon"), "--where must be name=value"),
        (("report", tmp_path / "none", "--out", tmp_path), f"{tmp_path} is a folder; pass a file name."),
        (("report", run, "--out", "."), ". is a folder; pass a file name."),
    ]:
        assert message in str(call(*args).exception), args


def test_help_lists_every_figure_and_table():
    for command, names in ((figure, FIGURES), (table, TABLES)):
        annotation = command.__annotations__["name"]
        assert all(re.search(rf"\b{name}\b", str(annotation)) for name in names)


def test_figure_error_in_a_process_exits_with_code_2(tmp_path):
    run = folder(tmp_path / "run")
    process = Forked(COMMAND, "figure", "maps", run)
    out, err = process.communicate()
    assert process.returncode == 2 and not out
    assert err.startswith(f"sigmasolver: {run} has no relative_l2 (maps); create it with: sigmasolver diagnose")
    assert json.loads((run / "recipe.json").read_text()) == {}
