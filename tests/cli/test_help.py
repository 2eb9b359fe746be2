"""`--help`: fast, in panels by stage, with placeholders for option values; and shell completion."""

import os
import re
import subprocess
import sys

import pytest
from typer.main import get_command

from sigmasolver.cli import app
from sigmasolver.cli.help import STAGES

COMMANDS = sorted(get_command(app).commands)
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def test_stages_list_every_command_once():
    listed = [name for names in STAGES.values() for name in names]
    assert len(listed) == len(set(listed)) and set(COMMANDS) <= set(listed)


def test_help_panels_are_in_stage_order(call):
    code, out, _ = call("--help")
    panels = re.findall(r"^╭─ (\w+) ─", out, re.M)
    assert code == 0 and panels == ["Options", *(stage for stage in STAGES if stage in panels)]
    assert {"Data", "Learn", "Measure", "Explain"} <= set(panels)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_placeholders_instead_of_types(call, name):
    code, out, _ = call(name, "--help")
    assert code == 0 and not re.findall(r"<(bool|int|str|float|path|list)\b|\b(BOOLEAN|INTEGER)\b", out)


def run_code(code, **variables):
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": ROOT, **variables},
    )


CALL = "import sys; sys.argv = ['sigmasolver']; from sigmasolver.__main__ import main; main()"


@pytest.mark.parametrize(
    ("typed", "number", "completion"), [("sigmasolver tr", 1, "train"), ("sigmasolver eva", 1, "evaluate")]
)
def test_shell_completion_of_commands(typed, number, completion):
    result = run_code(CALL, _SIGMASOLVER_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(number))
    assert result.stdout.split() == [completion], result.stderr


def test_shell_completion_of_options():
    result = run_code(CALL, _SIGMASOLVER_COMPLETE="complete_bash", COMP_WORDS="sigmasolver train --res", COMP_CWORD="2")
    assert result.stdout.split() == ["--resume"], result.stderr


def test_shell_completion_script_is_valid(tmp_path):
    result = run_code(CALL, _SIGMASOLVER_COMPLETE="source_bash")
    assert "complete -o default -F" in result.stdout and "sigmasolver" in result.stdout
    assert subprocess.run(["bash", "-n"], input=result.stdout, text=True).returncode == 0


def test_help_does_not_import_torch():
    code = CALL.replace("['sigmasolver']", "['sigmasolver', '--help']").replace("; main()", "")
    result = run_code(
        code + "\ntry:\n    main()\nexcept SystemExit:\n    print('torch' in sys.modules, file=sys.stderr)"
    )
    assert result.stderr.split()[-1] == "False"
