"""Fixtures: files for every task and format that can be read and trained on."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from sigmasolver.cli import app
from sigmasolver.data.formats import FORMATS, guess_format, open_data
from sigmasolver.data.inspect import open_any, summarise
from sigmasolver.recipes import changed, recipe_of
from sigmasolver.runs import Run
from sigmasolver.simulate.fixtures import FIXTURES, fixture_of
from sigmasolver.simulate.fixtures.tiny import COUNT, flow, settings_for
from sigmasolver.tasks import CANONICAL, REALM, REALPDEBENCH, TASKS
from sigmasolver.train.job import train_run
from tests.simulate.pages import DOCS, PAGES, documented_output, inspect_output

FORMAT_OF_FIXTURE = {
    "netcdf": "netcdf", "zarr": "zarr", "vtk": "vtk", "the-well": "the-well", "pdearena": "pdearena",
    "fno-mat": "fno-ns", "factformer": "factformer-it3d", "arrays": "arrays",
}  # fmt: skip


def test_every_task_has_a_fixture() -> None:
    assert set(TASKS) <= set(FIXTURES) and len(TASKS) == 12
    with pytest.raises(ValueError, match=r'"netcfd".*netcdf'):
        fixture_of("netcfd")


def test_flow_velocity_matches_vorticity() -> None:
    """ω = ∂v/∂x - ∂u/∂y and ∂u/∂x + ∂v/∂y = 0, with exact derivatives of the trigonometric polynomials."""
    values, _ = flow(COUNT, 0)
    vorticity, u, v = np.moveaxis(values.astype(np.float64), -1, 0)
    k = 2j * np.pi * np.fft.fftfreq(values.shape[2], 1 / values.shape[2])
    k[values.shape[2] // 2] = 0
    dx, dy = (lambda f: np.fft.ifft(k[:, None] * np.fft.fft(f, axis=-2), axis=-2).real,
              lambda f: np.fft.ifft(k * np.fft.fft(f, axis=-1), axis=-1).real)  # fmt: skip
    scale = np.abs(vorticity).max()
    np.testing.assert_allclose(dx(u) + dy(v), 0, atol=1e-5 * scale)
    curl = dx(v) - dy(u)
    error = np.fft.fft2(curl - vorticity)
    error[..., values.shape[2] // 2, :] = error[..., :, values.shape[2] // 2] = 0  # no derivative at Nyquist
    np.testing.assert_allclose(np.fft.ifft2(error).real, 0, atol=1e-4 * scale)


@pytest.mark.parametrize("name", FORMAT_OF_FIXTURE)
def test_fixtures_of_formats_contain_simulated_values(tmp_path: Path, name: str) -> None:
    path = FIXTURES[name].write(tmp_path / name, 0)
    assert guess_format(path).name == FORMAT_OF_FIXTURE[name]
    with open_any(path) as data:
        assert len(data) == COUNT
        if name == "factformer":
            assert data.shape[1:] == (20, 12, 12, 12, 4)
            return
        values, layout = flow(COUNT, 0)
        fields = 1 if name == "fno-mat" else 3
        np.testing.assert_array_equal(data[:][..., :fields], values[..., :fields])
        np.testing.assert_allclose(data.header.layout.times, layout.times, rtol=1e-6)
    assert [problem for problem in summarise(path).problems() if "viscosity" not in problem] == []


def test_fixture_layouts_of_pdebench(tmp_path: Path) -> None:
    FIXTURES["pdebench"].write(tmp_path, 0)
    values, _ = flow(COUNT, 0)
    expected = {
        "2D_vorticity.hdf5": values[..., :1], "2D_grouped_NA_NA.h5": values, "ns_incom_2d.h5": values[..., [1, 2, 0]],
    }  # fmt: skip
    for name, fields in expected.items():
        with open_data(tmp_path / name) as data:
            np.testing.assert_array_equal(data[:][..., : fields.shape[-1]], fields)
    with open_data(tmp_path / "3D_CFD_Turb_periodic.hdf5") as data:
        assert data.header.layout.fields == ("density", "pressure", "Vx", "Vy", "Vz")
        assert data.header.layout.boundary == ("periodic",) * 3


@pytest.mark.parametrize("task", [task.name for task in CANONICAL])
def test_canonical_tasks_train_on_fixtures(tmp_path: Path, task: str) -> None:
    path = FIXTURES[task].write(tmp_path, 0)
    with open_data(path) as data:
        recipe = changed(recipe_of(task), settings_for(task, data))
    train_run(recipe, path, Run(tmp_path / "run"))
    assert Run(tmp_path / "run").finished


@pytest.mark.parametrize("task", [task.name for task in (*REALPDEBENCH, *REALM)])
def test_benchmark_tasks_from_make_fixture_to_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    """The commands of a user: make-fixture, the training command that it prints, evaluate, table and report."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> str:
        result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments])
        assert result.exit_code == 0, (result.output, result.exception)
        return result.stdout

    command = shlex.split(call("make-fixture", task, "--out", "files").split("next: sigmasolver ")[1])
    call(*command, "--set", "train.updates=2", "--set", "train.checks=1", "--device", "cpu")
    assert command[:2] == ["train", task] and Run(Path("runs") / task).finished
    assert not list(Path("runs").rglob("*.h5")), "the files are read in place"
    assert f"{task}: " in call("evaluate", f"runs/{task}", "--device", "cpu")
    table = call("table", "realpdebench" if TASKS[task] in REALPDEBENCH else "realm", f"runs/{task}")
    assert "Transolver-σ" in table
    call("report", f"runs/{task}", "--out", "page.html")
    assert task in Path("page.html").read_text()


def test_make_fixture_prints_training_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = CliRunner().invoke(app, ["make-fixture"])
    assert listed.exit_code == 0 and all(name in listed.stdout for name in FIXTURES)
    written = CliRunner().invoke(app, ["make-fixture", "netcdf", "--out", "here"])
    command = shlex.split(written.stdout.split("next: sigmasolver ")[1])
    assert command == ["train", "--data", "here/flow.nc", "--out", "runs/netcdf"]
    result = CliRunner().invoke(app, [*command, "--set", "train.updates=1", "--history", "2", "--block", "1"])
    assert result.exit_code == 0, result.output
    assert Run(Path("runs/netcdf")).finished and not Path("runs/netcdf/data.h5").exists()
    again = CliRunner().invoke(app, ["make-fixture", "netcdf", "--out", "here"])
    assert isinstance(again.exception, ValueError) and "here is not an empty folder" in str(again.exception)


def test_make_fixture_scenarios_share_folder_without_overwriting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The messages of `suite` suggest to make all of them in the same folder."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    Path("data/notes.txt").write_text("mine")
    for task in ("foil", "controlled-cylinder"):
        written = CliRunner().invoke(app, ["make-fixture", task, "--out", "data"])
        assert written.exit_code == 0, written.exception
    assert sorted(os.listdir("data")) == ["controlled_cylinder", "foil", "notes.txt", "version.json"]
    FIXTURES["foil"].write(Path("alone"), 0)
    for file in sorted(Path("alone/foil").rglob("*.arrow")):
        assert (Path("data/foil") / file.relative_to("alone/foil")).read_bytes() == file.read_bytes()
    again = CliRunner().invoke(app, ["make-fixture", "foil", "--out", "data"])
    assert isinstance(again.exception, ValueError) and "data/foil already exists" in str(again.exception)
    assert Path("data/notes.txt").read_text() == "mine"


def test_every_format_is_documented() -> None:
    texts = {page: (DOCS / page).read_text() for page in PAGES}
    for row in FORMATS:
        assert f"`{row.name}`" in texts["formats.md"], row.name
    for kind in (*FORMAT_OF_FIXTURE.values(), "realpdebench", "realm"):
        assert f": {kind}, read in place\n" in "".join(texts.values()), kind


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_output_of_inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str) -> None:
    """Except for what depends on the machine: round-off, sizes and dates of files."""
    monkeypatch.chdir(tmp_path)
    blocks = list(documented_output(page))
    assert blocks
    for path, expected in blocks:
        assert _normalised(inspect_output(path)) == _normalised(expected), (
            f"python -m tests.simulate.pages writes {path} anew"
        )


def _normalised(text: str) -> list[str]:
    text = re.sub(r"-?\d(\.\d+)?e-\d+", "0", text)
    text = re.sub(r"(bytes=)\d+|(state=|fingerprint )[0-9a-f]+", r"\1\2", text)
    return [" ".join(re.sub("─+", "─", line).split()) for line in text.splitlines()]
