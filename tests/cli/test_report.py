"""`figure`, `table` and `report` on run folders: files and text as a user gets them, one sentence for a mistake."""

import json
import re
import subprocess
import sys
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
from sigmasolver.runs import Run, replace_rows
from tests.report import made


def folder(path, rows=(), diagnostic=None, found=(), arrays=None):
    """A run folder with these records."""
    path.mkdir()
    (path / "recipe.json").write_text("{}")
    replace_rows(path / "records.jsonl", rows)
    if diagnostic is not None:
        facts = {key: found[0][key] for key in ("task", "model", "seed", "run", "windows", "horizon")}
        write_findings(Run(path), diagnostic, Findings(list(found), arrays or {}), facts)
    return path


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_table_from_the_records_of_several_seeds(tmp_path):
    runs = [folder(tmp_path / f"s{seed}", made.errors("ns2d", "transolver-sigma", seed)) for seed in (42, 43, 44)]
    done = call("table", "main", *runs)
    assert done.exit_code == 0, done.output
    caption, blank, heading, *_ = done.stdout.splitlines()
    assert "tab:pde-main-results" in caption and not blank and heading.startswith("| model | from | Darcy p | NS2D ω |")
    rows = [row for seed in (42, 43, 44) for row in made.errors("ns2d", "transolver-sigma", seed)]
    values = [100 * row["value"] for row in rows if row["metric"] == "relative_l2"]
    wanted = f"| Transolver-σ | ours, 3 seeds | – | **{fmean(values):.2f} ± {stdev(values):.2f}** |"
    assert len(values) == 3 and wanted in done.stdout
    latex = call("table", "main", *runs, "--latex").stdout
    assert latex.startswith("\\begin{tabular}") and latex.endswith("\\end{tabular}\n")
    assert "| <ins>4.23</ins> |" in done.stdout and "\\underline{4.23}" in latex  # FactFormer, second on NS2D


def test_one_file_of_results_gives_what_its_run_folders_give(tmp_path):
    kept = {f"ns2d-sigma-{seed}": made.errors("ns2d", "transolver-sigma", seed) for seed in (42, 43)}
    kept = {name: [{**row, "run": name} for row in rows] for name, rows in kept.items()}
    runs = [folder(tmp_path / name, rows) for name, rows in kept.items()]
    file = tmp_path / "results.jsonl"
    replace_rows(file, [row for rows in kept.values() for row in rows])
    assert call("table", "main", file).stdout == call("table", "main", *runs).stdout != ""
    assert call("figure", "rollout", file, "--out", tmp_path / "a").exit_code == 0
    assert call("figure", "rollout", *runs, "--out", tmp_path / "b").exit_code == 0
    assert (tmp_path / "a" / "rollout.png").read_bytes() == (tmp_path / "b" / "rollout.png").read_bytes()
    refused = str(call("figure", "spectra", file, "--out", tmp_path).exception)
    assert refused == f"{file} has no correlation_lead; pass the folders of the runs instead."


def test_a_terminal_gets_bold_and_underlined_numbers_and_no_number_loses_its_end(tmp_path, monkeypatch):
    run = folder(tmp_path / "run", made.errors("ns2d", "transolver-sigma"))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")  # what rich takes for a terminal
    for columns in ("200", "60"):
        monkeypatch.setenv("COLUMNS", columns)
        drawn = call("table", "main", run).stdout
        assert "\x1b[4m4.23\x1b[0m" in drawn and "\x1b[1m2.79" in drawn and "|" not in drawn
        plain = re.sub(r"\x1b\[[0-9;]*m", "", drawn)
        (unet,) = (line.split() for line in plain.splitlines() if line.startswith("  U-Net"))
        assert unet == ["U-Net", "paper", "0.80", "19.82", "32.81", "47.24", "35.76", "48.49", "44.10", "14.95"]
    assert call("table", "main", run, "--latex").stdout.startswith("\\begin{tabular}")


def test_runs_by_different_recipes_are_not_seeds_of_each_other(tmp_path):
    def run(name, seed, width):
        made_run = folder(tmp_path / f"ns2d-{name}-{seed}", made.errors("ns2d", "physolver", seed))
        recipe = {"model": {"width": width}, "train": {"seed": seed}}
        (made_run / "recipe.json").write_text(json.dumps(recipe))
        return made_run

    def table(*runs):
        done = call("table", "main", *runs)
        assert done.exit_code == 0, done.output
        return [
            line.split(" | ")[:2] for line in done.stdout.splitlines() if line.startswith("| ") and "| ours" in line
        ]

    full, matched = ([run(name, seed, width) for seed in (42, 43)] for name, width in (("full", 128), ("other", 160)))
    assert table(*full) == [["| Physolver", "ours, 2 seeds"]]
    assert table(full[0], matched[1]) == [["| ns2d-full", "ours, 1 seed"], ["| ns2d-other", "ours, 1 seed"]]
    assert table(*full, *matched) == [["| ns2d-full", "ours, 2 seeds"], ["| ns2d-other", "ours, 2 seeds"]]


def test_a_figure_goes_to_its_folder_and_keeps_to_the_conditions(tmp_path):
    rows = made.errors("ns2d", "physolver") + made.errors("ns2d", "physolver", horizon=20)
    run = folder(tmp_path / "run", rows)
    refused = call("figure", "rollout", run, "--out", tmp_path / "new")
    assert isinstance(refused.exception, ValueError) and "--where horizon=10" in str(refused.exception)
    done = call("figure", "rollout", run, "--out", tmp_path / "new", "--where", "horizon=20")
    assert done.exit_code == 0, done.output
    assert done.stdout.split() == [str(tmp_path / "new" / f"rollout.{kind}") for kind in ("png", "pdf")]
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["rollout.pdf", "rollout.png"]


def test_maps_come_from_the_files_of_a_diagnosis_whatever_the_folder_is_called_now(tmp_path):
    rows, arrays = made.maps("ns2d", "physolver", grid=(8, 8), leads=(1, 2))
    run = folder(tmp_path / "renamed", [], "maps", rows, arrays)
    done = call("figure", "maps", run, "--out", tmp_path)
    assert done.exit_code == 0, done.exception
    wrong = call("figure", "maps", run, "--out", tmp_path, "--field", "density")
    assert str(wrong.exception) == 'ns2d has no field "density"; choose from vorticity.'


def test_the_page_of_runs_holds_their_films_and_drawings(tmp_path):
    rows, arrays = made.maps("ns2d", "physolver", grid=(8, 8), leads=(1, 2))
    run = folder(tmp_path / "one", made.errors("ns2d", "physolver"), "maps", rows, arrays)
    done = call("report", run, "--out", tmp_path / "page.html", "--title", "Mine & yours")
    assert done.exit_code == 0, done.exception
    page = (tmp_path / "page.html").read_text()
    assert "<h1>Mine &amp; yours</h1>" in page and page.count("data-film=") == len(arrays["cases"])
    bare = folder(tmp_path / "bare")
    assert "evaluate" in str(call("report", bare, "--out", tmp_path / "no.html").exception)
    assert not (tmp_path / "no.html").exists()


def test_the_page_says_times_lengths_and_units_as_far_as_the_runs_agree(tmp_path):
    def run(name, step=0.25, unit="1/h", **facts):
        rows, arrays = made.maps("ns2d", name, grid=(8, 8), leads=(1, 2))
        found = [{**row, **facts} for row in made.errors("ns2d", name)]
        path = folder(tmp_path / f"{name}{step}{len(facts)}", found, "maps", rows, arrays)
        domain = {"fields": ["vorticity"], "units": [unit], "boundary": ["periodic", "wall"], "lengths": [1.75, None],
                  "points": [8, 8], "time_steps": [step, step]}  # fmt: skip
        (path / "data.json").write_text(json.dumps({"domain": domain}))
        return path

    def dimensions(paths, *units):
        rows, _ = join_records(label_runs(paths), ("maps",))
        return dimensions_of(paths, rows, units)

    both = [run("physolver"), run("specsolver")]
    units = {"vorticity": "1/h"}
    assert dimensions(both) == Dimensions(0.25, "", (2.0, None), (True, False), "", units)  # the period: 8 / 7 of 1.75
    named = dimensions(both, "time=h", "length = km", "vorticity=1/s")
    assert named == Dimensions(0.25, "h", (2.0, None), (True, False), "km", {"vorticity": "1/s"})
    speed = [run("physolver", 0.125, "length/time")]
    assert dimensions(speed, "time=s", "length=m").units == {"vorticity": "m/s"}
    assert dimensions(speed, "length=m").units == {"vorticity": "m/time"}
    assert dimensions([both[0], run("specsolver", step=0.5)]) == Dimensions()
    assert dimensions([run("physolver", anyway="its frames are 1 apart")]) == Dimensions()
    done = call("report", *both, "--out", tmp_path / "page.html", "--units", "time=h")
    assert done.exit_code == 0, done.exception
    page = (tmp_path / "page.html").read_text()
    assert "lead 10, 2.5 h (%)" in page and "vorticity (1/h)" in page
    wrong = call("report", *both, "--out", tmp_path / "page.html", "--units", "mass=kg")
    assert str(wrong.exception) == (
        'Invalid unit "mass=kg"; pass NAME=UNIT, where NAME is one of time, length, vorticity.'
    )


def weighed(path, weights, *more):
    """A run folder with weights, which tell a run from others."""
    made_folder = folder(path, *more)
    (path / "weights.safetensors").write_bytes(weights)
    return made_folder


def test_records_of_a_run_that_was_renamed_and_measured_again_count_once(tmp_path):
    rows = made.errors("ns2d", "physolver", run="before")
    newer = [{**row, "run": "now", "date": "2026-02-02", "commit": "fff"} for row in rows]
    run = weighed(tmp_path / "now", b"w", [*rows, *newer])
    for words in (("table", "comparison", run), ("figure", "rollout", run, "--out", tmp_path),
                  ("report", run, "--out", tmp_path / "page.html")):  # fmt: skip
        assert (done := call(*words)).exit_code == 0, done.exception
    assert "<dd>2026-02-02</dd>" in (tmp_path / "page.html").read_text()
    other = [{**row, "weights": "f" * 16} for row in rows]
    mixed = weighed(tmp_path / "mixed", b"w", [*rows, *other])
    assert ", with weights" in str(call("table", "comparison", mixed).exception)


def test_a_copy_is_shown_once_with_a_word(tmp_path):
    free, forced = (made.errors("ns2d", "physolver", protocol=name) for name in ("free", "teacher-forced"))
    found, arrays = made.maps("ns2d", "physolver", grid=(8, 8), leads=(1, 2))
    run = weighed(tmp_path / "run", b"w", free)
    copy = weighed(tmp_path / "copy", b"w", [*free, *forced], "maps", found, arrays)
    alone, both = call("table", "comparison", run), call("table", "comparison", run, copy)
    assert both.stdout == alone.stdout and both.exit_code == 0
    assert both.stderr == f"{copy} is a copy of {run}; it is shown once, as run.\n" and not alone.stderr
    for name in ("teacher-forcing", "maps"):  # what only the copy has counts as well
        assert call("figure", name, run, copy, "--out", tmp_path).exit_code == 0
        assert call("figure", name, run, "--out", tmp_path).exit_code != 0
    other = weighed(tmp_path / "other", b"v", free)
    assert call("table", "comparison", run, copy, other).stdout.count("\n| other |") == 1


def test_folders_of_one_name_are_told_apart_by_their_parents(tmp_path):
    for name, model in (("a", "physolver"), ("b", "physolver"), ("c", "specsolver")):
        (tmp_path / name).mkdir()
        weighed(tmp_path / name / "run", name.encode(), made.errors("ns2d", model))
    shown = call("table", "comparison", *(tmp_path / name / "run" for name in "abc")).stdout
    assert [line.split(" | ")[0] for line in shown.splitlines()[4:]] == [
        "| a/run", "| b/run", "| specsolver", "| persistence",
    ]  # fmt: skip


def test_a_run_that_two_sweeps_share_is_a_point_of_both(tmp_path):
    rows = made.scaling("data", 1000, 4.1)
    shared = [weighed(tmp_path / name, b"w", rows) for name in ("darcy-data-1000", "darcy-grid-85")]
    lines = call("table", "scaling", *shared).stdout.splitlines()
    assert sum("4.10 ± 1.37" in line for line in lines) == 2
    renamed = weighed(tmp_path / "mine", b"v", rows)
    assert sum("4.10 ± 1.37" in line for line in call("table", "scaling", renamed).stdout.splitlines()) == 1


@pytest.mark.parametrize("name", [name for name in FIGURES if name != "teacher-forcing"])
def test_missing_records_of_a_figure_name_the_command(name, tmp_path):
    run = folder(tmp_path / "run")
    said = str(call("figure", name, run, "--out", tmp_path).exception)
    made_by = f"diagnose {run} --only " if FIGURES[name].needs[0].facts.get("diagnostic") else f"evaluate {run}"
    assert said.startswith(f"{run} has no ") and f"; create it with: sigmasolver {made_by}" in said and "\n" not in said


@pytest.mark.parametrize("name", TABLES)
def test_missing_records_of_a_table_name_the_command(name, tmp_path):
    run = folder(tmp_path / "run")
    said = str(call("table", name, run).exception)
    assert re.fullmatch(rf"{run} has no \S+ \(.*\); create it with: sigmasolver (evaluate|diagnose) {run}.*", said)


def test_mistakes_are_one_sentence(tmp_path):
    run = folder(tmp_path / "run", made.errors("ns2d", "physolver"))
    for words, said in [
        (("figure", "rolout", run), 'Unknown figure "rolout"; did you mean rollout'),
        (("table", "mian", run), 'Unknown table "mian"; did you mean main'),
        (("figure", "scaling", run, "--field", "u"), "The figure scaling does not show a field; omit --field."),
        (("table", "comparison", tmp_path / "none"), "is not a run: recipe.json not found"),
        (("table", "comparison", run, "--where", "horizon"), "--where must be name=value"),
    ]:
        assert said in str(call(*words).exception), words


def test_the_help_lists_every_name():
    for command, names in ((figure, FIGURES), (table, TABLES)):
        written = command.__annotations__["name"]
        assert all(re.search(rf"\b{name}\b", str(written)) for name in names)


def test_as_a_process_a_mistake_ends_with_code_2(tmp_path):
    run = folder(tmp_path / "run")
    done = subprocess.run(
        [sys.executable, "-m", "sigmasolver", "figure", "maps", str(run)], capture_output=True, text=True
    )
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"sigmasolver: {run} has no relative_l2 (maps); create it with: sigmasolver diagnose")
    assert json.loads((run / "recipe.json").read_text()) == {}
