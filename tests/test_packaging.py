"""What is handed out: the wheel holds the whole package, the source distribution all that its tests and README need."""

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
BARE = {"sigmasolver", "triton"}
"""This package, and Triton, whose version follows from that of torch."""
needs_hatchling = pytest.mark.skipif(importlib.util.find_spec("hatchling") is None, reason="needs hatchling")


def build(root, kind, out):
    words = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    (made,) = out.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return made


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The source distribution, unpacked."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build(ROOT, "sdist", folder)) as archive:
        archive.extractall(folder, filter="data")
    (root,) = (path for path in folder.iterdir() if path.is_dir())
    return root


@needs_hatchling
def test_the_sdist_holds_what_is_tracked(unpacked):
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "-C", ROOT, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    tracked = [name for name in listed.split("\0") if name and not name.startswith(".ci/") and (ROOT / name).exists()]
    missing = [name for name in tracked if not (unpacked / name).exists()]
    assert len(tracked) > 100 and not missing, missing


@needs_hatchling
def test_a_wheel_made_from_the_sdist_holds_the_package_byte_for_byte(unpacked, tmp_path):
    package = ROOT / "sigmasolver"
    files = [path for path in package.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    with zipfile.ZipFile(build(unpacked, "wheel", tmp_path)) as wheel:
        held = {name: wheel.read(name) for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in files}
    assert {"page.html.j2", "weights.safetensors", "windows.h5", "py.typed"} <= {path.name for path in files}


def requirements():
    groups = {"": PROJECT["dependencies"], **PROJECT["optional-dependencies"]}
    return {group: [Requirement(text) for text in texts] for group, texts in groups.items()}


def test_the_core_is_nine_packages_and_all_that_users_install_have_a_lower_bound_that_the_pins_keep():
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    asked = requirements()
    assert len(asked[""]) <= 9
    for group, wanted in asked.items():
        for one in wanted:
            if one.name in BARE or group == "dev":
                continue
            assert [part.operator for part in one.specifier] == [">="], f"{one} has no lower bound, or an upper one"
            assert pins[one.name.lower()] in one.specifier, f"{one} excludes what constraints.txt pins"
