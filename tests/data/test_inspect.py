"""`summarise` agrees with NumPy in float64, and `draw` plots the right data."""

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
    data += [0.0, 1e3, 2.5]  # a mean of a million standard deviations, where naive sums of squares fail
    return data.astype(np.float32)


@pytest.mark.parametrize("block", [1, 3 * 50 * 3 * 4, 2**24])
def test_summarise_statistics_equal_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
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


def test_summarise_counts_and_excludes_non_finite_values(tmp_path: Path) -> None:
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


def test_summarise_of_only_nans_is_nan(tmp_path: Path) -> None:
    field = summarise(filled(tmp_path / "a.h5", np.full_like(sample(1), np.nan))).fields[0]
    assert all(np.isnan(value) for value in (field.minimum, field.maximum, field.mean, field.std))
    assert not field.constant


def test_summarise_reports_damaged_trajectories(tmp_path: Path) -> None:
    path = filled(tmp_path / "a.h5", sample())
    before = summarise(path)
    with h5py.File(path, "r+") as file:
        file["fields"][5, 3, 49, 2] += 1
    after = summarise(path)
    assert (before.damaged, after.damaged) == ((), (5,))
    assert after.fingerprint == before.fingerprint


def test_summarise_progress(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    summarise(filled(tmp_path / "a.h5", sample(3)), lambda *call: calls.append(call))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def cube() -> tuple[Header, np.ndarray]:
    """A field of coordinates: x in the first channel, z in the second, constant in y and time."""
    x = np.linspace(0, 1, 8)
    layout = Layout(("x", "z"), ("1", "m"), ("open",) * 3, (x, x, x), np.arange(6.0))
    data = np.zeros((1, 6, 8, 8, 8, 2), np.float32)
    data[..., 0] = x[:, None, None] - 0.5
    data[..., 1] = x
    return Header(layout, "cube", {}, seed=1), data


def test_draw_writes_images(tmp_path: Path) -> None:
    from matplotlib.image import imread

    generate(Waves(), 2, 0, tmp_path / "waves.h5")
    draw(tmp_path / "waves.h5", tmp_path / "waves.png", index=1, columns=3)
    header, data = cube()
    draw(filled(tmp_path / "cube.h5", data, header), tmp_path / "cube.png")
    for name in ("waves", "cube"):
        assert imread(tmp_path / f"{name}.png").std() > 0.05


def test_draw_panel_orientation_and_colours() -> None:
    from matplotlib.figure import Figure

    header, data = cube()
    plane = inspect._plane(data[0, 0])
    assert plane.shape == (8, 8, 2)
    axes = Figure().subplots(1, 2)
    right, up = (
        inspect._panel(panel, plane[..., q], header, inspect._colours(plane[..., q])) for q, panel in enumerate(axes)
    )
    values = [np.asarray(mesh.get_array()).reshape(8, 8) for mesh in (right, up)]
    assert np.all(np.diff(values[0], axis=1) > 0) and right.get_clim() == (-0.5, 0.5)
    assert np.all(np.diff(values[1], axis=0) > 0) and up.get_clim() == (0, 1)
    assert (right.get_cmap().name, up.get_cmap().name) == ("RdBu_r", "viridis")
    np.testing.assert_allclose(axes[0].get_xlim(), (-1 / 14, 1 + 1 / 14))


def test_draw_errors(tmp_path: Path) -> None:
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


def test_documented_example_reads_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "data_format.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.S)
    assert example is not None and len([line for line in example[1].splitlines() if line]) == 5
    waves = Waves()
    with Writer(tmp_path / "waves.h5", replace(Header(waves.layout, "waves", {}), seed=0), 5) as writer:
        writer.append(waves.simulate(0, range(3)).numpy())
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    exec(example[1], namespace)
    np.testing.assert_array_equal(namespace["fields"], waves.simulate(0, range(3)).numpy())
    assert namespace["names"] == ["height", "slope"] and namespace["whole"] == 3
    np.testing.assert_array_equal(namespace["times"], waves.layout.times)


# --- foreign files and problems


def foreign(path: Path, data: np.ndarray, times: np.ndarray | None = None, **arrays: object) -> Path:
    times = np.arange(data.shape[1], dtype=np.float64) if times is None else times
    np.savez(path, fields=data, names=np.array(["u", "v"]), times=times, **arrays)
    return path


def flow(count: int = 5) -> np.ndarray:
    return np.random.default_rng(3).normal(size=(count, 4, 6, 5, 2)).astype(np.float32)


def test_summarise_of_foreign_files_equals_their_store(tmp_path: Path) -> None:
    source = foreign(tmp_path / "a.npz", flow())
    import_data(source, tmp_path / "a.h5")
    in_place, imported = summarise(source), summarise(tmp_path / "a.h5")
    assert in_place.fields == imported.fields and (in_place.whole, in_place.package) == (5, None)
    assert any("No units" in note for note in in_place.notes) and in_place.damaged == ()
    first = summarise(source, first=2)
    assert (first.read, first.whole) == (2, 5)
    np.testing.assert_allclose(first.fields[0].mean, flow()[:2, ..., 0].mean(dtype=np.float64), rtol=1e-12)
    draw(source, tmp_path / "a.png")


def test_summary_problems(tmp_path: Path) -> None:
    data = flow()
    assert summarise(foreign(tmp_path / "fine.npz", data)).problems() == []
    data[3] = data[1]
    data[0, 0, 0, 0, 0] = np.nan
    data[..., 1] = 1000 + 1e-3 * data[..., 1]
    times = np.array([0.0, 1.0, 2.0, 4.0])
    problems = " ".join(summarise(foreign(tmp_path / "a.npz", data, times, x=np.array([0, 1, 2, 3, 4, 9]))).problems())
    for text in (
        "u has 1 NaN and 0 infinite values",
        "v varies by only 7e-06 of its magnitude, which float32 resolves poorly; subtract a constant from it.",
        "Trajectories 1 and 3 have identical values; keep them in the same split",
        "The frames are unevenly spaced in time, 1 to 2 apart",
        "x is unevenly spaced, 1 to 5 apart",
    ):
        assert text in problems, text
    assert (
        "Only one trajectory; training and testing need at least two, so split it in time."
        in summarise(foreign(tmp_path / "one.npz", flow(1))).problems()
    )
    assert (
        "Only one case; training and testing need at least two, so add some."
        in summarise(foreign(tmp_path / "case.npz", flow(1)[:, :1])).problems()
    )


@pytest.mark.parametrize(
    ("deviation", "message"),
    [
        (1e-4, "v varies from 99999.9996668 to 100000.000332, which float32 stores as a constant; subtract an offset"),
        (1e-2, "v varies by only 7e-07 of its magnitude, which float32 resolves poorly"),
        (10.0, None),
    ],
)
def test_summary_reports_variation_below_float32(tmp_path: Path, deviation: float, message: str | None) -> None:
    data = flow().astype(np.float64)
    data[..., 1] = 1e5 + deviation * data[..., 1]
    source = foreign(tmp_path / "a.npz", data)
    problems = summarise(source).problems()
    notes = [note for note in import_data(source, tmp_path / "a.h5").notes if "float32" in note]
    assert problems == notes and len(problems) == (message is not None)
    if message is not None:
        assert problems[0].startswith(message)


def test_summary_problems_report_duplicates_across_splits(tmp_path: Path) -> None:
    data = flow(6)
    data[5], data[1] = data[2], data[0]
    parts = {"train": data[:4], "valid": data[4:5], "test": data[5:]}
    layout = Layout(("u", "v"), ("1", "1"), ("periodic", "wall"), (np.arange(6.0), np.arange(5.0)), np.arange(4.0))
    write_well(tmp_path / "set", parts, layout, {})
    summary = summarise(tmp_path / "set")
    assert summary.duplicates == ((0, 1), (2, 5))
    assert [text for text in summary.problems() if "identical values" in text] == [
        "Trajectories 2 and 5 have identical values, but one is in the train split and the other in the test split; "
        "remove one."
    ]
