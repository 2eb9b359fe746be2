"""docs/paper_map.md names files, tests and commands that exist, every table and figure, and leaves no cell empty; what
it says of results is what results/*.jsonl hold."""

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
PICTURED = """
fig:accuracy-stability-discrepancy fig:transolver-sigma-architecture fig:srpa-comparison tab:pde-main-results
tab:realpdebench-results fig:rollout-comparison tab:ablation-components fig:efficiency-representations
fig:case-study-baselines tab:slice-attention-analysis tab:benchmark-overview tab:forecast-protocols
tab:training-settings tab:srpa-profile-settings fig:srpa-layerwise-corrections fig:case-study-ns2d fig:case-study-kf2d
fig:case-study-it3d fig:case-study-smoke3d tab:realm-results fig:darcy-scaling tab:darcy-data-scaling
tab:darcy-resolution-scaling tab:darcy-width-scaling tab:canonical-seed-results tab:external-seed-results
tab:realm-standard-deviations fig:exact-error-decomposition tab:decomposition-cohort tab:efficiency-settings
"""
LABELS = PICTURED.split()
"""Every table and figure of the paper, in its order."""
OURS = {"figure spectra", "figure components", "figure training-cost", "table comparison"}
NAMES = {"figure": FIGURES, "table": TABLES, "suite": SUITES}
"""Commands whose first word comes from a registry."""


def rows(header="| label |"):
    """The cells of the table that starts so."""
    _, found, rest = MAP.read_text().partition(f"\n{header}")
    assert found, header
    lines = [line for line in rest.partition("\n\n")[0].splitlines()[1:] if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def commands(text):
    return [shlex.split(words) for words in COMMAND.findall(text)]


def test_every_row_is_complete_and_named_once():
    labels = [row[0] for row in rows()]
    assert len(labels) > 100 and len(set(labels)) == len(labels)
    for row in rows():
        assert len(row) == 4 and all(row), row
        for cell in row[2:]:
            assert cell in {"prose", "not built yet"} or LINK.search(cell), row
        assert (row[2] == "not built yet") == (row[3] == "not built yet"), row


def test_every_link_leads_to_a_file_and_every_named_test_exists():
    links = [link for row in rows() for cell in row[2:] for link in LINK.findall(cell)]
    assert links
    for text, target in links:
        path = (MAP.parent / target).resolve()
        assert path.is_file(), target
        if "::" in text:
            assert re.search(rf"def {text.split('::')[1]}\(", path.read_text()), text


def test_every_table_and_figure_of_the_paper_has_its_row_and_its_command():
    found = {row[0].strip("`"): row for row in rows() if row[0].startswith(("`tab:", "`fig:"))}
    assert list(found) == LABELS
    for label, row in found.items():
        assert commands(row[1]) and LINK.search(row[2]) and LINK.search(row[3]), label


def test_what_a_table_is_made_from_is_what_its_command_says():
    """A table of the registry says under which label it stands in the paper."""
    from sigmasolver.report.published import seed_tables, sweeps, tables

    named = {row[0].strip("`"): commands(row[1]) for row in rows()}
    sources = {name: held.source for name, held in (*tables().items(), *seed_tables().items())}
    for name, source in (*sources.items(), *(("scaling", sweep.source) for sweep in sweeps().values())):
        for label in re.findall(r"tab:[\w-]+", source):
            assert ["table", name, "RUN..."] in named[label], (name, label)


@pytest.mark.parametrize("words", sorted({tuple(one) for one in commands(MAP.read_text())}), ids=" ".join)
def test_every_command_is_one_that_the_program_takes(words):
    name, *rest = words
    command = get_command(app).commands[name]
    with command.make_context(name, list(rest)) as context:  # a word or option that it does not know ends it here
        given = context.params
    if name in NAMES:
        assert given["name"] in NAMES[name]
    if given.get("only") and name == "diagnose":
        assert set(given["only"].split(",")) <= set(DIAGNOSTICS)


def test_every_registered_table_and_figure_is_in_the_map():
    registered = {f"figure {name}" for name in FIGURES} | {f"table {name}" for name in TABLES}
    in_rows = {" ".join(one[:2]) for row in rows() for one in commands(row[1])}
    above = {" ".join(one[:2]) for one in commands(MAP.read_text().partition("\n| label |")[0])}
    assert registered - OURS <= in_rows and above == OURS
    assert not OURS & in_rows and registered >= OURS


# --- results


@dataclass(frozen=True)
class Content:
    """What a table or figure is made of: trainings of a suite, and one row at least of each of these kinds."""

    runs: dict
    kinds: tuple[dict, ...]
    seeds: int = 1
    """So many of each model are needed for the thing to say anything at all."""
    by_name: bool = False
    """Whether its trainings differ in more than task, model and seed, so that only the run's name tells them apart."""

    def of(self, row, name, recipe):
        """Is this row, but for its kind, one of that training?"""
        if self.by_name:
            return row.get("run") == name
        found = row.get("task"), row.get("model"), row.get("seed")
        return found == (recipe.task.name, recipe.model.name, recipe.train.seed)


trainings = cache(suite_of)


def some(suite, tasks=None, models=None):
    return {
        name: one
        for name, one in trainings(suite).items()
        if (tasks is None or one.task.name in tasks) and (models is None or one.model.name in models)
    }


def also(runs, *models):
    """The same trainings, and those of other models, built here or not."""
    return runs | {
        f"{name} {model}": replace(one, model=replace(one.model, name=model))
        for name, one in runs.items()
        for model in models
    }


def sweep(name):
    return {run: one for run, one in trainings("scaling").items() if name in run}


def names(tasks):
    return {task.name for task in tasks}


EVALUATED = {"metric": "relative_l2", "protocol": "free", "part": "test"}
LEADS = {"metric": "relative_l2_lead", "protocol": "free", "part": "test"}
FORCED = {**LEADS, "protocol": "teacher-forced"}
SETTINGS, DRAWING = "none: settings", "none: a drawing"
SIGMA = ("transolver-sigma",)
CONTENTS = {
    "fig:accuracy-stability-discrepancy": Content(
        some("counterparts", ("ns2d",), ("physolver", "specsolver")), (LEADS, FORCED)
    ),
    "fig:transolver-sigma-architecture": DRAWING,
    "fig:srpa-comparison": DRAWING,
    "tab:pde-main-results": Content(some("main", names(CANONICAL)), (EVALUATED,)),
    "tab:realpdebench-results": Content(some("main", names(REALPDEBENCH)), (EVALUATED,)),
    "fig:rollout-comparison": Content(some("counterparts"), (LEADS,)),
    "tab:ablation-components": Content(some("ablations"), (EVALUATED,)),
    "fig:efficiency-representations": Content(
        some("main", ("ns2d", "kf2d"), ("transolver", *SIGMA)),
        ({"diagnostic": "efficiency"}, {"diagnostic": "routing"}),
    ),
    "fig:case-study-baselines": Content(
        also(some("main", ("ns2d", "fsi"), SIGMA), "eddyformer", "drift-net"), ({"diagnostic": "maps"},)
    ),
    "tab:slice-attention-analysis": Content(some("slice-updates"), (EVALUATED,)),
    "tab:benchmark-overview": SETTINGS,
    "tab:forecast-protocols": SETTINGS,
    "tab:training-settings": SETTINGS,
    "tab:srpa-profile-settings": SETTINGS,
    "fig:srpa-layerwise-corrections": Content(
        some("main", names(CANONICAL), SIGMA),
        tuple({"diagnostic": "corrections", "metric": metric} for metric in ("gamma", "correction_ratio")),
    ),
    **{
        f"fig:case-study-{task}": Content(some("counterparts", (task,)), ({"diagnostic": "maps"},))
        for task in ("ns2d", "kf2d", "it3d", "smoke3d")
    },
    "tab:realm-results": Content(some("main", names(REALM)), (EVALUATED,)),
    "fig:darcy-scaling": Content(trainings("scaling"), (EVALUATED,), by_name=True),
    "tab:darcy-data-scaling": Content(sweep("data"), (EVALUATED,), by_name=True),
    "tab:darcy-resolution-scaling": Content(sweep("grid"), (EVALUATED,), by_name=True),
    "tab:darcy-width-scaling": Content(sweep("width"), (EVALUATED,), by_name=True),
    "tab:canonical-seed-results": Content(some("main", names(CANONICAL), SIGMA), (EVALUATED,), seeds=2),
    "tab:external-seed-results": Content(some("main", names(REALPDEBENCH)), (EVALUATED,), seeds=2),
    "tab:realm-standard-deviations": Content(some("main", names(REALM)), (EVALUATED,), seeds=2),
    "fig:exact-error-decomposition": Content(
        some("counterparts"), tuple({"diagnostic": "decomposition", "metric": f"{part}_share"}
                                    for part in ("injection", "propagation", "cross")),
    ),
    "tab:decomposition-cohort": SETTINGS,
    "tab:efficiency-settings": SETTINGS,
}  # fmt: skip


def measured():
    """Every row of results/*.jsonl with the name of its file."""
    return [
        {"file": path.name, **json.loads(line)}
        for path in sorted((ROOT / "results").glob("*.jsonl"))
        for line in path.read_text().splitlines()
    ]


def whole_budget(row, recipe, held):
    """Did this run train as long, on a model of that size, and was it tested on all windows, or all of a cohort?"""
    cohort = row.get("cohort")
    windows = recipe.task.test * (recipe.task.starts or 1) if cohort is None else len(cohort_of(cohort, row["task"]))
    if (row.get("step") or 0) < updates_of(recipe) or (row.get("windows") or 0) < windows:
        return False
    count = count_parameters(recipe.model.name, recipe.model.config(recipe.task))
    return any(one.get("metric") == "parameters" and one["value"] == count for one in held)


def state_of(content, measured):
    """The phrase of the map, and the files whose rows it rests on."""
    if isinstance(content, str):
        return content, set()
    tasks = list(dict.fromkeys(one.task.name for one in content.runs.values()))
    states, files = {}, set()
    for task in tasks:
        found, whole = {}, True
        for name, recipe in content.runs.items():
            if recipe.task.name != task:
                continue
            held = [row for row in measured if content.of(row, name, recipe)]
            kinds = [[row for row in held if kind.items() <= row.items()] for kind in content.kinds]
            there = all(kinds)
            key = name if content.by_name else recipe.model.name
            found.setdefault(key, []).append({row["file"] for kind in kinds for row in kind} if there else set())
            whole = whole and there and all(any(whole_budget(row, recipe, held) for row in kind) for kind in kinds)
        enough = all(sum(map(bool, each)) >= content.seeds for each in found.values())
        states[task] = PHRASES[0] if whole else PHRASES[1] if enough else PHRASES[2]
        if enough:
            files |= {file for each in found.values() for one in each for file in one}
    grouped = {phrase: [task for task in tasks if states[task] == phrase] for phrase in PHRASES}
    if len(set(states.values())) == 1:
        return states[tasks[0]], files
    return "; ".join(f"{phrase}: {', '.join(held)}" for phrase, held in grouped.items() if held), files


PHRASES = ("at the paper's budget", "at a reduced budget", "not yet")


def test_the_map_says_of_every_table_and_figure_which_results_there_are():
    """New rows in results/ need nothing but the phrase that this test prints."""
    told, held = {row[0].strip("`"): row[1:] for row in rows("| table or figure |")}, measured()
    assert list(told) == list(CONTENTS) == LABELS
    for label, (phrase, links) in told.items():
        expected, files = state_of(CONTENTS[label], held)
        assert phrase == expected, f"{label} is {expected}"
        assert {text for text, _ in LINK.findall(links)} == files, f"{label} rests on {sorted(files)}"
        for text, target in LINK.findall(links):
            assert (MAP.parent / target).resolve() == ROOT / "results" / text
    assert "results not built" not in MAP.read_text()  # one place tells it


def test_a_result_is_at_the_papers_budget_only_with_its_updates_cases_size_and_seeds():
    content = Content(some("main", ("ns2d",), SIGMA), (EVALUATED,))
    recipe = next(iter(content.runs.values()))
    size = count_parameters(recipe.model.name, recipe.model.config(recipe.task))

    def made(step=250_000, windows=200, size=size, seeds=(42, 43, 44)):
        facts = {"file": "x.jsonl", "task": "ns2d", "model": "transolver-sigma", "step": step, "windows": windows}
        return [
            {**facts, "seed": seed, **kind}
            for seed in seeds
            for kind in ({**EVALUATED, "value": 0.1}, {"metric": "parameters", "value": size})
        ]

    assert recipe.train.epochs * recipe.task.train // recipe.train.batch == 250_000
    assert state_of(content, made()) == ("at the paper's budget", {"x.jsonl"})
    less = ({"step": 249_999}, {"windows": 40}, {"size": size // 4}, {"seeds": (42, 43)})
    assert {state_of(content, made(**one))[0] for one in less} == {"at a reduced budget"}
    assert state_of(content, []) == ("not yet", set())
    two = Content(some("counterparts", ("ns2d", "kf2d")), (EVALUATED,))
    assert state_of(two, made()) == ("not yet", set())  # one of three models is no comparison
    others = [{**row, "model": model} for row in made() for model in ("physolver", "specsolver")]
    assert state_of(two, made() + others)[0] == "at a reduced budget: ns2d; not yet: kf2d"
