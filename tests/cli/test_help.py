"""The help: quick, in panels by stage, with placeholders that say what an option takes; and shell completion."""

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


def test_every_command_has_one_stage():
    listed = [name for names in STAGES.values() for name in names]
    assert len(listed) == len(set(listed)) and set(COMMANDS) <= set(listed)


def test_the_panels_come_in_the_order_of_the_work(call):
    code, out, _ = call("--help")
    panels = re.findall(r"^╭─ (\w+) ─", out, re.M)
    assert code == 0 and panels == ["Options", *(stage for stage in STAGES if stage in panels)]
    assert {"Data", "Learn", "Measure", "Explain"} <= set(panels)


@pytest.mark.parametrize("name", COMMANDS)
def test_options_say_what_they_take(call, name):
    code, out, _ = call(name, "--help")
    assert code == 0 and not re.findall(r"<(bool|int|str|float|path|list)\b|\b(BOOLEAN|INTEGER)\b", out)


def command(code, **more):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": ROOT, **more}
    )


CALL = "import sys; sys.argv = ['sigmasolver']; from sigmasolver.__main__ import main; main()"


@pytest.mark.parametrize(
    ("typed", "number", "found"), [("sigmasolver tr", 1, "train"), ("sigmasolver eva", 1, "evaluate")]
)
def test_the_shell_completes_commands(typed, number, found):
    done = command(CALL, _SIGMASOLVER_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(number))
    assert done.stdout.split() == [found], done.stderr


def test_the_shell_completes_options():
    done = command(CALL, _SIGMASOLVER_COMPLETE="complete_bash", COMP_WORDS="sigmasolver train --res", COMP_CWORD="2")
    assert done.stdout.split() == ["--resume"], done.stderr


def test_the_script_for_the_shell_is_valid(tmp_path):
    done = command(CALL, _SIGMASOLVER_COMPLETE="source_bash")
    assert "complete -o default -F" in done.stdout and "sigmasolver" in done.stdout
    assert subprocess.run(["bash", "-n"], input=done.stdout, text=True).returncode == 0


def test_help_needs_no_torch():
    code = CALL.replace("['sigmasolver']", "['sigmasolver', '--help']").replace("; main()", "")
    done = command(code + "\ntry:\n    main()\nexcept SystemExit:\n    print('torch' in sys.modules, file=sys.stderr)")
    assert done.stderr.split()[-1] == "False"
