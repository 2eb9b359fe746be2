"""docs/paper_map.md names files, tests and commands that exist, every table and figure, and leaves no cell empty."""

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from sigmasolver.cli import app
from sigmasolver.diagnose.run import DIAGNOSTICS
from sigmasolver.recipes import SUITES
from sigmasolver.report.figures import FIGURES
from sigmasolver.report.paper_tables import TABLES

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
OURS = {"figure spectra", "table comparison"}
NAMES = {"figure": FIGURES, "table": TABLES, "suite": SUITES}
"""Commands whose first word comes from a registry."""


def rows():
    lines = [line for line in MAP.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


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
    above = {" ".join(one[:2]) for one in commands(MAP.read_text().partition("| label")[0])}
    assert registered - OURS <= in_rows and above == OURS
    assert not OURS & in_rows and registered >= OURS
