"""The package as a stranger meets it: light import, typed, README that runs, plain errors at the command line."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sigmasolver

ROOT = Path(__file__).parents[1]


def run(*words):
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize(("more", "heavy"), [("", set()), ("; sigmasolver.build_model", {"torch", "numpy"})])
def test_import_loads_nothing_heavy_and_a_model_only_torch(more, heavy):
    code = f"import json, sys, sigmasolver{more}; print(json.dumps(sorted(m.partition('.')[0] for m in sys.modules)))"
    loaded = set(json.loads(run("-c", code).stdout))
    assert loaded & {"torch", "numpy", "scipy", "h5py", "matplotlib", "jinja2", "typer", "rich"} == heavy


def test_the_package_says_it_is_typed():
    assert (Path(sigmasolver.__file__).parent / "py.typed").is_file()


@pytest.mark.parametrize("block", re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S))
def test_the_python_in_the_readme_runs(block):
    setup = "import torch\nfrom sigmasolver import build_model\nmodel = build_model('transolver-sigma', grid=(12, 12), "
    setup += "in_channels=1, out_channels=1, width=16, depth=1, heads=2)\n"
    small = block.replace("width=128, depth=8, heads=8", "width=16, depth=1, heads=2")
    done = run("-c", setup + small)
    assert done.returncode == 0, done.stderr


def test_models_declare_what_they_can_do_and_leave_the_choice_of_kernels_to_ops():
    """No attribute is looked up by its name, and no kernel is imported past `ops.dispatch`."""
    for path in sorted((ROOT / "sigmasolver" / "models").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name):
                assert node.id not in ("getattr", "hasattr"), path
            elif isinstance(node, ast.Import):
                assert not any(one.name.startswith("sigmasolver.ops.fused") for one in node.names), path
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{one.name}" for one in node.names]
                assert not any(name.startswith("sigmasolver.ops.fused") for name in names), path


def test_the_files_and_functions_that_contributing_names_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w/]+/[\w/]*\.(?:py|json|md|toml))`", text)
    missing = [one for one in named if not any((top / one).is_file() for top in (ROOT, ROOT / "sigmasolver"))]
    assert {*missing} == {"ops/NAME.py", "ops/fused/NAME.py"}
    journey = re.findall(r"^\| `(.+?)`: `(?:(\w+)\.)?(\w+)` \|", text.partition("## One batch")[2], re.M)
    assert len(journey) > 15
    for file, kind, name in journey:
        body = ast.parse((ROOT / "sigmasolver" / file).read_text()).body
        if kind:
            (body,) = (one.body for one in body if isinstance(one, ast.ClassDef) and one.name == kind)
        assert any(isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name == name for one in body), (file, name)


def test_version_at_the_command_line():
    assert run("-m", "sigmasolver", "--version").stdout.strip() == sigmasolver.__version__


def test_a_release_has_one_version_and_one_day():
    citation, changes = (ROOT / "CITATION.cff").read_text(), (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\d\S*) \((\d{4}-\d\d-\d\d)\)$", changes, re.M)
    cited = [re.search(rf"^{name}: (.*)$", citation, re.M)[1] for name in ("version", "date-released")]
    assert [newest[1], newest[2]] == cited
    release, _, development = sigmasolver.__version__.partition(".dev")
    if "\n## Unreleased\n" in changes:
        older, newer = ([int(part) for part in one.split(".")] for one in (newest[1], release))
        assert development and older < newer
    else:
        assert sigmasolver.__version__ == newest[1]
