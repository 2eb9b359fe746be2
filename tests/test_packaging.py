"""Packaging: the wheel contains the whole package, the source distribution all tracked files."""

import importlib.util
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
UNBOUNDED = {"sigmasolver", "triton"}
"""This package, and Triton, whose version is determined by torch."""
needs_hatchling = pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="needs hatchling")


def build(root, kind, out):
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert result.returncode == 0, result.stderr
    (archive,) = out.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return archive


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(ROOT, "sdist", folder)) as archive:
        archive.extractall(folder, filter="data")
    (root,) = (path for path in folder.iterdir() if path.is_dir())
    return root


@needs_hatchling
def test_sdist_contains_all_tracked_files(unpacked):
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    tracked = [name for name in listed.split("\0") if name and not name.startswith(".ci/") and (ROOT / name).exists()]
    missing = [name for name in tracked if not (unpacked / name).exists()]
    assert len(tracked) > 100 and not missing, missing


@needs_hatchling
def test_wheel_from_sdist_contains_the_package_byte_for_byte(unpacked, tmp_path):
    package = ROOT / "sigmasolver"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    with zipfile.ZipFile(build(unpacked, "wheel", tmp_path)) as wheel:
        contents = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    assert contents == {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in files}
    assert {"page.html.j2", "weights.safetensors", "windows.h5", "py.typed"} <= {path.name for path in files}


def requirements():
    groups = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    return {group: [Requirement(text) for text in texts] for group, texts in groups.items()}


def test_requirements_have_lower_bounds_compatible_with_the_pins():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    groups = requirements()
    assert len(groups[""]) <= 9
    for group, group_requirements in groups.items():
        for requirement in group_requirements:
            if requirement.name in UNBOUNDED or group == "dev":
                continue
            assert [bound.operator for bound in requirement.specifier] == [">="], (
                f"{requirement} has no lower bound, or an upper one"
            )
            assert pins[requirement.name.lower()] in requirement.specifier, (
                f"{requirement} excludes what constraints.txt pins"
            )
