"""docs/paper_map.md is complete: files, tests and commands exist, all tables and figures are covered, no cell is empty,
and the stated results agree with results/*.jsonl."""

import ast
import json
import re
import shlex
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from sigmasolver.cli import app
from sigmasolver.diagnose.run import DIAGNOSTICS
from sigmasolver.models import count_parameters
from sigmasolver.recipes import SUITES, suite_of
from sigmasolver.report.figures import FIGURES
from sigmasolver.report.paper_tables import TABLES
from sigmasolver.tasks import CANONICAL, REALM, REALPDEBENCH, cohort_of
from sigmasolver.train.dry_run import updates_of

ROOT = Path(__file__).parents[1]
MAP = ROOT / "docs" / "paper_map.md"
LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")
COMMAND = re.compile(r"`sigmasolver ([^`]+)`")
LABEL_TEXT = """
fig:accuracy-stability-discrepancy fig:transolver-sigma-architecture fig:srpa-comparison tab:pde-main-results
tab:realpdebench-results fig:rollout-comparison tab:ablation-components fig:efficiency-representations
fig:case-study-baselines tab:slice-attention-analysis tab:benchmark-overview tab:forecast-protocols
tab:training-settings tab:srpa-profile-settings fig:srpa-layerwise-corrections fig:case-study-ns2d fig:case-study-kf2d
fig:case-study-it3d fig:case-study-smoke3d tab:realm-results fig:darcy-scaling tab:darcy-data-scaling
tab:darcy-resolution-scaling tab:darcy-width-scaling tab:canonical-seed-results tab:external-seed-results
tab:realm-standard-deviations fig:exact-error-decomposition tab:decomposition-cohort tab:efficiency-settings
"""
LABELS = LABEL_TEXT.split()
"""All tables and figures of the paper, in order."""
EXTRA_COMMANDS = {"figure spectra", "figure symmetry", "figure components", "figure training-cost", "table comparison"}
REGISTRIES = {"figure": FIGURES, "table": TABLES, "suite": SUITES}
"""Commands whose first argument comes from a registry."""


def rows(header="| label |"):
    """Cells of the table with this header."""
    _, match, tail = MAP.read_text().partition(f"\n{header}")
    assert match, header
    lines = [line for line in tail.partition("\n\n")[0].splitlines()[1:] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def commands(text):
    return [shlex.split(words) for words in COMMAND.findall(text)]


def test_paper_map_rows_are_complete_and_unique():
    labels = [row[0] for row in rows()]
    assert len(labels) > 100 and len(set(labels)) == len(labels)
    for row in rows():
        assert len(row) == 4 and all(row), row
        for cell in row[2:]:
            assert cell in {"prose", "not built yet"} or LINK.search(cell), row
        assert (row[2] == "not built yet") == (row[3] == "not built yet"), row


def test_paper_map_links_and_tests_exist():
    links = [link for row in rows() for cell in row[2:] for link in LINK.findall(cell)]
    assert links
    for text, target in links:
        path = (MAP.parent / target).resolve()
        assert path.is_file(), target
        file, *names = text.split("::")
        assert path.as_posix().endswith(f"/{file}"), (text, target)
        scope = ast.parse(path.read_text()).body if names else []
        for name in names:  # a test id of pytest: classes, then the function
            (node,) = (node for node in scope if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name)
            scope = node.body


def test_paper_map_covers_all_tables_and_figures():
    by_label = {row[0].strip("`"): row for row in rows() if row[0].startswith(("`tab:", "`fig:"))}
    assert list(by_label) == LABELS
    for label, row in by_label.items():
        assert commands(row[1]) and LINK.search(row[2]) and LINK.search(row[3]), label


def test_paper_map_table_sources_match_commands():
    """Every registered table knows its label in the paper."""
    from sigmasolver.report.published import seed_tables, sweeps, tables

    commands_of = {row[0].strip("`"): commands(row[1]) for row in rows()}
    sources = {name: table.source for name, table in (*tables().items(), *seed_tables().items())}
    for name, source in (*sources.items(), *(("scaling", sweep.source) for sweep in sweeps().values())):
        for label in re.findall(r"tab:[\w-]+", source):
            assert ["table", name, "RUN..."] in commands_of[label], (name, label)


@pytest.mark.parametrize("words", sorted({tuple(command) for command in commands(MAP.read_text())}), ids=" ".join)
def test_paper_map_commands_are_valid(words):
    name, *arguments = words
    command = get_command(app).commands[name]
    with command.make_context(name, list(arguments)) as context:  # fails on an unknown argument or option
        params = context.params
    if name in REGISTRIES:
        assert params["name"] in REGISTRIES[name]
    if params.get("only") and name == "diagnose":
        assert set(params["only"].split(",")) <= set(DIAGNOSTICS)


def test_paper_map_lists_all_registered_tables_and_figures():
    registered = {f"figure {name}" for name in FIGURES} | {f"table {name}" for name in TABLES}
    in_rows = {" ".join(command[:2]) for row in rows() for command in commands(row[1])}
    in_intro = {" ".join(command[:2]) for command in commands(MAP.read_text().partition("\n| label |")[0])}
    assert registered - EXTRA_COMMANDS <= in_rows and in_intro == EXTRA_COMMANDS
    assert not EXTRA_COMMANDS & in_rows and registered >= EXTRA_COMMANDS


# --- results


@dataclass(frozen=True)
class Requirements:
    """What a table or figure requires: trainings of a suite, and at least one row of each kind."""

    runs: dict
    kinds: tuple[dict, ...]
    seeds: int = 1
    """Minimum number of seeds per model for a meaningful result."""
    by_name: bool = False
    """Whether trainings differ in more than task, model and seed, so that only the run name identifies them."""

    def matches(self, row, name, recipe):
        """Return whether a row belongs to this training, regardless of its kind. The paper averages no forecasts."""
        if row.get("symmetries", 1) > 1:
            return False
        if self.by_name:
            return row.get("run") == name
        identity = row.get("task"), row.get("model"), row.get("seed")
        return identity == (recipe.task.name, recipe.model.name, recipe.train.seed)


trainings = cache(suite_of)


def runs_of(suite, tasks=None, models=None):
    return {
        name: recipe
        for name, recipe in trainings(suite).items()
        if (tasks is None or recipe.task.name in tasks) and (models is None or recipe.model.name in models)
    }


def with_models(runs, *models):
    """The same trainings plus those of other models, implemented or not."""
    return runs | {
        f"{name} {model}": replace(recipe, model=replace(recipe.model, name=model))
        for name, recipe in runs.items()
        for model in models
    }


def sweep(name):
    return {run: recipe for run, recipe in trainings("scaling").items() if name in run}


def names(tasks):
    return {task.name for task in tasks}


EVALUATED = {"metric": "relative_l2", "protocol": "free", "part": "test"}
LEADS = {"metric": "relative_l2_lead", "protocol": "free", "part": "test"}
FORCED = {**LEADS, "protocol": "teacher-forced"}
SETTINGS, DRAWING = "none: settings", "none: a drawing"
SIGMA = ("transolver-sigma",)
REQUIREMENTS = {
    "fig:accuracy-stability-discrepancy": Requirements(
        runs_of("counterparts", ("ns2d",), ("physolver", "specsolver")), (LEADS, FORCED)
    ),
    "fig:transolver-sigma-architecture": DRAWING,
    "fig:srpa-comparison": DRAWING,
    "tab:pde-main-results": Requirements(runs_of("main", names(CANONICAL)), (EVALUATED,)),
    "tab:realpdebench-results": Requirements(runs_of("main", names(REALPDEBENCH)), (EVALUATED,)),
    "fig:rollout-comparison": Requirements(runs_of("counterparts"), (LEADS,)),
    "tab:ablation-components": Requirements(runs_of("ablations"), (EVALUATED,)),
    "fig:efficiency-representations": Requirements(
        runs_of("main", ("ns2d", "kf2d"), ("transolver", *SIGMA)),
        ({"diagnostic": "efficiency"}, {"diagnostic": "routing"}),
    ),
    "fig:case-study-baselines": Requirements(
        with_models(runs_of("main", ("ns2d", "fsi"), SIGMA), "eddyformer", "drift-net"), ({"diagnostic": "maps"},)
    ),
    "tab:slice-attention-analysis": Requirements(runs_of("slice-updates"), (EVALUATED,)),
    "tab:benchmark-overview": SETTINGS,
    "tab:forecast-protocols": SETTINGS,
    "tab:training-settings": SETTINGS,
    "tab:srpa-profile-settings": SETTINGS,
    "fig:srpa-layerwise-corrections": Requirements(
        runs_of("main", names(CANONICAL), SIGMA),
        tuple({"diagnostic": "corrections", "metric": metric} for metric in ("gamma", "correction_ratio")),
    ),
    **{
        f"fig:case-study-{task}": Requirements(runs_of("counterparts", (task,)), ({"diagnostic": "maps"},))
        for task in ("ns2d", "kf2d", "it3d", "smoke3d")
    },
    "tab:realm-results": Requirements(runs_of("main", names(REALM)), (EVALUATED,)),
    "fig:darcy-scaling": Requirements(trainings("scaling"), (EVALUATED,), by_name=True),
    "tab:darcy-data-scaling": Requirements(sweep("data"), (EVALUATED,), by_name=True),
    "tab:darcy-resolution-scaling": Requirements(sweep("grid"), (EVALUATED,), by_name=True),
    "tab:darcy-width-scaling": Requirements(sweep("width"), (EVALUATED,), by_name=True),
    "tab:canonical-seed-results": Requirements(runs_of("main", names(CANONICAL), SIGMA), (EVALUATED,), seeds=2),
    "tab:external-seed-results": Requirements(runs_of("main", names(REALPDEBENCH)), (EVALUATED,), seeds=2),
    "tab:realm-standard-deviations": Requirements(runs_of("main", names(REALM)), (EVALUATED,), seeds=2),
    "fig:exact-error-decomposition": Requirements(
        runs_of("counterparts"), tuple({"diagnostic": "decomposition", "metric": f"{part}_share"}
                                    for part in ("injection", "propagation", "cross")),
    ),
    "tab:decomposition-cohort": SETTINGS,
    "tab:efficiency-settings": SETTINGS,
}  # fmt: skip


def load_results():
    """All rows of results/*.jsonl with their file name."""
    return [
        {"file": path.name, **json.loads(line)}
        for path in sorted((ROOT / "results").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def at_full_budget(row, recipe, run_rows):
    """Return whether a run has the full number of updates, model size and test windows (or those of its cohort)."""
    cohort = row.get("cohort")
    windows = recipe.task.test * (recipe.task.starts or 1) if cohort is None else len(cohort_of(cohort, row["task"]))
    if (row.get("step") or 0) < updates_of(recipe) or (row.get("windows") or 0) < windows:
        return False
    count = count_parameters(recipe.model.name, recipe.model.config(recipe.task))
    return any(run_row.get("metric") == "parameters" and run_row["value"] == count for run_row in run_rows)


def state_of(requirements, results):
    """Phrase of the map, and the files with the rows it is based on."""
    if isinstance(requirements, str):
        return requirements, set()
    tasks = list(dict.fromkeys(recipe.task.name for recipe in requirements.runs.values()))
    states, files = {}, set()
    for task in tasks:
        files_by_model, complete = {}, True
        for name, recipe in requirements.runs.items():
            if recipe.task.name != task:
                continue
            run_rows = [row for row in results if requirements.matches(row, name, recipe)]
            rows_by_kind = [[row for row in run_rows if kind.items() <= row.items()] for kind in requirements.kinds]
            present = all(rows_by_kind)
            key = name if requirements.by_name else recipe.model.name
            files_by_model.setdefault(key, []).append(
                {row["file"] for kind in rows_by_kind for row in kind} if present else set()
            )
            complete = (
                complete
                and present
                and all(any(at_full_budget(row, recipe, run_rows) for row in kind) for kind in rows_by_kind)
            )
        enough = all(sum(map(bool, file_sets)) >= requirements.seeds for file_sets in files_by_model.values())
        states[task] = PHRASES[0] if complete else PHRASES[1] if enough else PHRASES[2]
        if enough:
            files |= {file for file_sets in files_by_model.values() for file_set in file_sets for file in file_set}
    grouped = {phrase: [task for task in tasks if states[task] == phrase] for phrase in PHRASES}
    if len(set(states.values())) == 1:
        return states[tasks[0]], files
    return "; ".join(f"{phrase}: {', '.join(group)}" for phrase, group in grouped.items() if group), files


PHRASES = ("at the paper's budget", "at a reduced budget", "not yet")


def test_paper_map_states_match_results():
    """After adding rows to results/, copy the phrase printed by this test into the map."""
    stated, results = {row[0].strip("`"): row[1:] for row in rows("| table or figure |")}, load_results()
    assert list(stated) == list(REQUIREMENTS) == LABELS
    for label, (phrase, links) in stated.items():
        expected, files = state_of(REQUIREMENTS[label], results)
        assert phrase == expected, f"{label} is {expected}"
        assert {text for text, _ in LINK.findall(links)} == files, f"{label} rests on {sorted(files)}"
        for text, target in LINK.findall(links):
            assert (MAP.parent / target).resolve() == ROOT / "results" / text
    assert "results not built" not in MAP.read_text()  # stated in one place only


def test_state_of_requires_updates_windows_size_and_seeds():
    requirements = Requirements(runs_of("main", ("ns2d",), SIGMA), (EVALUATED,))
    recipe = next(iter(requirements.runs.values()))
    size = count_parameters(recipe.model.name, recipe.model.config(recipe.task))

    def synthetic_rows(step=250_000, windows=200, size=size, seeds=(42, 43, 44)):
        facts = {"file": "x.jsonl", "task": "ns2d", "model": "transolver-sigma", "step": step, "windows": windows}
        return [
            {**facts, "seed": seed, **kind}
            for seed in seeds
            for kind in ({**EVALUATED, "value": 0.1}, {"metric": "parameters", "value": size})
        ]

    assert recipe.train.epochs * recipe.task.train // recipe.train.batch == 250_000
    assert state_of(requirements, synthetic_rows()) == ("at the paper's budget", {"x.jsonl"})
    reductions = ({"step": 249_999}, {"windows": 40}, {"size": size // 4}, {"seeds": (42, 43)})
    assert {state_of(requirements, synthetic_rows(**change))[0] for change in reductions} == {"at a reduced budget"}
    assert state_of(requirements, []) == ("not yet", set())
    two_tasks = Requirements(runs_of("counterparts", ("ns2d", "kf2d")), (EVALUATED,))
    assert state_of(two_tasks, synthetic_rows()) == ("not yet", set())  # one of three models is not enough
    counterparts = [{**row, "model": model} for row in synthetic_rows() for model in ("physolver", "specsolver")]
    assert state_of(two_tasks, synthetic_rows() + counterparts)[0] == "at a reduced budget: ns2d; not yet: kf2d"
