"""The summary agrees with plain definitions in float64, and the picture shows what is there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from sigmasolver.data import inspect
from sigmasolver.data.formats import import_data
from sigmasolver.data.header import Header
from sigmasolver.data.inspect import draw, summarise
from sigmasolver.data.layout import Layout
from sigmasolver.data.store import StoreError, Writer
from sigmasolver.simulate.fixtures.the_well import write_well
from sigmasolver.simulate.generate import generate
from tests.data.waves import Waves

LAYOUT = Layout(
    ("a", "b", "flat"), ("1", "m", "1"), ("open",), (np.arange(50.0),), np.arange(4.0)
)  # fmt: skip
HEADER = Header(LAYOUT, "test", {"k": 1})


def filled(path: Path, data: np.ndarray, header: Header = HEADER, count: int | None = None) -> Path:
    with Writer(path, header, count or len(data)) as writer:
        writer.append(data)
    return path


def sample(count: int = 7) -> np.ndarray:
    data = np.random.default_rng(0).standard_normal((count, *HEADER.shape))
    data *= [1.0, 1e-3, 0.0]
    data += [0.0, 1e3, 2.5]  # a mean a million times the spread, where naive sums of squares fail
    return data.astype(np.float32)


@pytest.mark.parametrize("block", [1, 3 * 50 * 3 * 4, 2**24])
def test_statistics_equal_the_definitions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(inspect, "_BLOCK", block)
    data = sample()
    summary = summarise(filled(tmp_path / "a.h5", data, count=9))
    exact = data.astype(np.float64)
    for q, field in enumerate(summary.fields):
        assert (field.minimum, field.maximum) == (exact[..., q].min(), exact[..., q].max())
        np.testing.assert_allclose(field.mean, exact[..., q].mean(), rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(field.std, exact[..., q].std(), rtol=1e-9, atol=1e-15)
        np.testing.assert_allclose(field.frame_mean, exact[..., q].mean((0, 2)), rtol=1e-13, atol=1e-15)
        np.testing.assert_allclose(field.frame_std, exact[..., q].std((0, 2)), rtol=1e-9, atol=1e-15)
    assert [field.constant for field in summary.fields] == [False, False, True]
    assert (summary.whole, summary.count, summary.damaged) == (7, 9, ())
    assert summary.size == data.nbytes and summary.header.parameters == {"k": 1}


def test_nans_and_infinities_are_counted_and_left_out(tmp_path: Path) -> None:
    data = sample()
    data[0, 1, :5, 0] = np.nan
    data[3, 2, 7, 0] = np.inf
    data[:, 0, :, 1] = np.nan
    summary = summarise(filled(tmp_path / "a.h5", data))
    first, second, flat = summary.fields
    assert (first.nans, first.infinities) == (5, 1)
    assert (second.nans, second.infinities) == (7 * 50, 0)
    assert (flat.nans, flat.infinities) == (0, 0)
    finite = np.where(np.isfinite(data[..., 0]), data[..., 0], np.nan).astype(np.float64)
    np.testing.assert_allclose(first.mean, np.nanmean(finite), rtol=1e-12)
    np.testing.assert_allclose(first.std, np.nanstd(finite), rtol=1e-12)
    assert first.maximum == np.nanmax(finite)
    assert np.isnan(second.frame_mean[0]) and np.isnan(second.frame_std[0])
    assert np.isfinite(second.mean) and np.isfinite(second.frame_mean[1])


def test_nothing_finite_gives_nan(tmp_path: Path) -> None:
    field = summarise(filled(tmp_path / "a.h5", np.full_like(sample(1), np.nan))).fields[0]
    assert all(np.isnan(one) for one in (field.minimum, field.maximum, field.mean, field.std))
    assert not field.constant


def test_damage_is_named(tmp_path: Path) -> None:
    path = filled(tmp_path / "a.h5", sample())
    before = summarise(path)
    with h5py.File(path, "r+") as file:
        file["fields"][5, 3, 49, 2] += 1
    after = summarise(path)
    assert (before.damaged, after.damaged) == ((), (5,))
    assert after.fingerprint == before.fingerprint


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    summarise(filled(tmp_path / "a.h5", sample(3)), lambda *call: calls.append(call))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def cube() -> tuple[Header, np.ndarray]:
    """A field that tells where it is: x in the first channel, z in the second, equal over y and time."""
    x = np.linspace(0, 1, 8)
    layout = Layout(("x", "z"), ("1", "m"), ("open",) * 3, (x, x, x), np.arange(6.0))
    data = np.zeros((1, 6, 8, 8, 8, 2), np.float32)
    data[..., 0] = x[:, None, None] - 0.5
    data[..., 1] = x
    return Header(layout, "cube", {}, seed=1), data


def test_pictures_are_drawn(tmp_path: Path) -> None:
    from matplotlib.image import imread

    generate(Waves(), 2, 0, tmp_path / "waves.h5")
    draw(tmp_path / "waves.h5", tmp_path / "waves.png", index=1, columns=3)
    header, data = cube()
    draw(filled(tmp_path / "cube.h5", data, header), tmp_path / "cube.png")
    for name in ("waves", "cube"):
        assert imread(tmp_path / f"{name}.png").std() > 0.05


def test_panels_show_the_first_axis_to_the_right_and_the_last_up() -> None:
    from matplotlib.figure import Figure

    header, data = cube()
    plane = inspect._plane(data[0, 0])
    assert plane.shape == (8, 8, 2)
    axes = Figure().subplots(1, 2)
    right, up = (
        inspect._panel(panel, plane[..., q], header, inspect._colours(plane[..., q])) for q, panel in enumerate(axes)
    )
    shown = [np.asarray(mesh.get_array()).reshape(8, 8) for mesh in (right, up)]
    assert np.all(np.diff(shown[0], axis=1) > 0) and right.get_clim() == (-0.5, 0.5)
    assert np.all(np.diff(shown[1], axis=0) > 0) and up.get_clim() == (0, 1)
    assert (right.get_cmap().name, up.get_cmap().name) == ("RdBu_r", "viridis")
    np.testing.assert_allclose(axes[0].get_xlim(), (-1 / 14, 1 + 1 / 14))


def test_what_cannot_be_drawn_is_said(tmp_path: Path) -> None:
    line = filled(tmp_path / "line.h5", sample(1))
    with pytest.raises(StoreError, match="one-dimensional fields"):
        draw(line, tmp_path / "a.png")
    header, data = cube()
    path = filled(tmp_path / "cube.h5", data, header)
    with pytest.raises(StoreError, match="has no trajectory 1: it has 1"):
        draw(path, tmp_path / "a.png", index=1)
    with pytest.raises(StoreError, match="cannot be written"):
        draw(path, tmp_path / "missing" / "a.png")
    with pytest.raises(StoreError, match="Cannot write the image"):
        draw(path, tmp_path / "a.nopicture")


def test_the_documented_five_lines_read_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data_format.md").read_text()
    found = re.search(r"```python\n(.*?)```", page, re.S)
    assert found is not None and len([line for line in found[1].splitlines() if line]) == 5
    waves = Waves()
    with Writer(tmp_path / "waves.h5", replace(Header(waves.layout, "waves", {}), seed=0), 5) as writer:
        writer.append(waves.simulate(0, range(3)).numpy())
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(found[1], names)
    np.testing.assert_array_equal(names["fields"], waves.simulate(0, range(3)).numpy())
    assert names["names"] == ["height", "slope"] and names["whole"] == 3
    np.testing.assert_array_equal(names["times"], waves.layout.times)


# --- foreign files, problems and the command that trains


def foreign(path: Path, data: np.ndarray, times: np.ndarray | None = None, **more: object) -> Path:
    times = np.arange(data.shape[1], dtype=np.float64) if times is None else times
    np.savez(path, fields=data, names=np.array(["u", "v"]), times=times, **more)
    return path


def flow(count: int = 5) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(count, 4, 6, 5, 2)).astype(np.float32)


def test_foreign_files_have_the_statistics_of_their_store(tmp_path: Path) -> None:
    source = foreign(tmp_path / "a.npz", flow())
    import_data(source, tmp_path / "a.h5")
    here, imported = summarise(source), summarise(tmp_path / "a.h5")
    assert here.fields == imported.fields and (here.whole, here.package) == (5, None)
    assert any("No units" in note for note in here.notes) and here.damaged == ()
    first = summarise(source, first=2)
    assert (first.read, first.whole) == (2, 5)
    np.testing.assert_allclose(first.fields[0].mean, flow()[:2, ..., 0].mean(dtype=np.float64), rtol=1e-12)
    draw(source, tmp_path / "a.png")


def test_problems_are_named(tmp_path: Path) -> None:
    data = flow()
    assert summarise(foreign(tmp_path / "fine.npz", data)).problems() == []
    data[3] = data[1]
    data[0, 0, 0, 0, 0] = np.nan
    data[..., 1] = 1000 + 1e-3 * data[..., 1]
    times = np.array([0.0, 1.0, 2.0, 4.0])
    found = " ".join(summarise(foreign(tmp_path / "a.npz", data, times, x=np.array([0, 1, 2, 3, 4, 9]))).problems())
    for words in (
        "u has 1 NaN and 0 infinite values",
        "v varies by only 1e-06 of its mean",
        "Trajectories 1 and 3 have identical values; keep them in the same split",
        "The frames are unevenly spaced in time, 1 to 2 apart",
        "x is unevenly spaced, 1 to 5 apart",
    ):
        assert words in found, words
    assert "Only one trajectory" in " ".join(summarise(foreign(tmp_path / "one.npz", flow(1))).problems())


def test_one_trajectory_in_two_splits_is_named(tmp_path: Path) -> None:
    data = flow(6)
    data[5], data[1] = data[2], data[0]
    parts = {"train": data[:4], "valid": data[4:5], "test": data[5:]}
    layout = Layout(("u", "v"), ("1", "1"), ("periodic", "wall"), (np.arange(6.0), np.arange(5.0)), np.arange(4.0))
    write_well(tmp_path / "set", parts, layout, {})
    summary = summarise(tmp_path / "set")
    assert summary.duplicates == ((0, 1), (2, 5))
    assert [one for one in summary.problems() if "identical values" in one] == [
        "Trajectories 2 and 5 have identical values, but one is in the train split and the other in the test split; "
        "remove one."
    ]
