"""The package as a whole: light import, typing, README examples, code conventions, version."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sigmasolver

ROOT = Path(__file__).parents[1]


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT)


@pytest.mark.parametrize(("statement", "heavy"), [("", set()), ("; sigmasolver.build_model", {"torch", "numpy"})])
def test_import_is_light_and_build_model_loads_only_torch(statement, heavy):
    code = (
        f"import json, sys, sigmasolver{statement}; print(json.dumps(sorted(m.partition('.')[0] for m in sys.modules)))"
    )
    loaded = set(json.loads(run("-c", code).stdout))
    assert loaded & {"torch", "numpy", "scipy", "h5py", "matplotlib", "jinja2", "typer", "rich"} == heavy


def test_package_is_typed():
    assert (Path(sigmasolver.__file__).parent / "py.typed").is_file()


def test_readme_examples_run():
    """Each with its own variables, all in one process."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    setup = "import torch\nfrom sigmasolver import build_model\nmodel = build_model('transolver-sigma', grid=(12, 12), "
    setup += "in_channels=1, out_channels=1, width=16, depth=1, heads=2)\n"
    small = [setup + block.replace("width=128, depth=8, heads=8", "width=16, depth=1, heads=2") for block in blocks]
    result = run("-c", f"for block in {small!r}: exec(block, {{'__name__': '__main__'}})")
    assert blocks and result.returncode == 0, result.stderr


def test_models_use_no_getattr_and_no_fused_kernels_directly():
    """Capabilities are declared, not looked up by name, and kernels are chosen by `ops.dispatch`."""
    for path in sorted((ROOT / "sigmasolver" / "models").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Name):
                assert node.id not in ("getattr", "hasattr"), path
            elif isinstance(node, ast.Import):
                assert not any(alias.name.startswith("sigmasolver.ops.fused") for alias in node.names), path
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                assert not any(name.startswith("sigmasolver.ops.fused") for name in names), path


def test_contributing_names_existing_files_and_functions():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w/]+/[\w/]*\.(?:py|json|md|toml))`", text)
    missing = [path for path in named if not any((top / path).is_file() for top in (ROOT, ROOT / "sigmasolver"))]
    assert {*missing} == {"ops/NAME.py", "ops/fused/NAME.py"}
    journey = re.findall(r"^\| `(.+?)`: `(?:(\w+)\.)?(\w+)` \|", text.partition("## One batch")[2], re.M)
    assert len(journey) > 15
    for file, kind, name in journey:
        body = ast.parse((ROOT / "sigmasolver" / file).read_text()).body
        if kind:
            (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == kind)
        assert any(isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name for n in body), (file, name)


def test_version_option():
    assert run("-m", "sigmasolver", "--version").stdout.strip() == sigmasolver.__version__


def test_version_matches_citation_and_changelog():
    citation, changes = (ROOT / "CITATION.cff").read_text(), (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\d\S*) \((\d{4}-\d\d-\d\d)\)$", changes, re.M)
    cited = [re.search(rf"^{name}: (.*)$", citation, re.M)[1] for name in ("version", "date-released")]
    assert [newest[1], newest[2]] == cited
    release, _, development = sigmasolver.__version__.partition(".dev")
    if "\n## Unreleased\n" in changes:
        older, newer = ([int(part) for part in version.split(".")] for version in (newest[1], release))
        assert development and older < newer
    else:
        assert sigmasolver.__version__ == newest[1]
