"""Ctrl-C during imports: the command exits with 130 and one line, even if the imported module catches the interrupt."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOOK = """
import os, signal, sys

class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["PRESSED_AT"]:
            sys.meta_path.remove(self)
            try:
                os.kill(os.getpid(), signal.SIGINT)
                for _ in range(1000):  # the handler runs between two instructions
                    pass
            except BaseException:
                if os.environ["AND_THEN"] == "raised":
                    raise ImportError("half imported") from None

sys.meta_path.insert(0, Pressed())
"""


@pytest.mark.parametrize("then", ["swallowed", "raised"])
@pytest.mark.parametrize("module", ["typer", "rich.progress", "torch", "h5py"])
def test_ctrl_c_during_imports(tmp_path, module, then):
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT))),
        "PRESSED_AT": module,
        "AND_THEN": then,
    }
    arguments = ["simulate", "demo", "--count", "1", "--out", str(tmp_path / "out.h5"), "--device", "cpu"]
    result = subprocess.run(
        [sys.executable, "-m", "sigmasolver", *arguments], capture_output=True, text=True, env=environment
    )
    assert (result.returncode, result.stdout) == (130, ""), result.stderr
    assert result.stderr == "sigmasolver: stopped; the same command resumes.\n"
    assert not (tmp_path / "out.h5").exists()
