"""Error maps: leads, row order, scale and norms over channels as in the paper."""

import numpy as np
import pytest

from sigmasolver.report.figures.maps import case_study, cases_of, faces, maps
from sigmasolver.tasks import TASKS

from .made import TRIO, maps_of_models

VELOCITY = ("velocity_x", "velocity_y", "velocity_z")


def all_images(figure):
    return [image for axes in figure.axes for image in axes.get_images()]


def error_images(figure):
    """Images of errors, without the colour bar."""
    return [
        image for image in all_images(figure) if image.get_cmap().name == "magma" and min(image.get_array().shape) > 1
    ]


def difference(arrays, leads=slice(None), channels=(0,)):
    """Norm over channels of forecast - truth of the first case, (leads, *grid), computed explicitly."""
    fields = [arrays[name][0, leads].astype(float)[..., list(channels)] for name in ("forecast", "truth")]
    return np.sqrt(((fields[0] - fields[1]) ** 2).sum(-1))


@pytest.mark.parametrize(
    ("task", "last", "field", "grid"),
    [
        ("ns2d", 10, "vorticity", (8, 8)),
        ("kf2d", 16, "vorticity", (8, 8)),
        ("it3d", 10, "velocity_x", (4, 5, 6)),
        ("smoke3d", 16, "density", (4, 5, 6)),
    ],
)
def test_maps_show_all_leads_and_models_in_the_order_of_the_paper(task, last, field, grid):
    """Columns: leads 1 to 10 or 16. Rows: Physolver, Specsolver, Transolver-σ. One scale to the 99.5th percentile."""
    assert TASKS[task].horizon == last
    leads, fields = tuple(range(1, last + 1)), TASKS[task].targets
    rows, arrays = maps_of_models(task, TRIO, grid=grid, leads=leads, fields=fields)
    figure = maps(rows, arrays)
    panels = [axes for axes in figure.axes if axes.get_images() and axes.get_title()]
    assert [axes.get_title().removeprefix("lead ") for axes in panels] == [str(lead) for lead in leads]
    names = [text.get_text() for axes in figure.axes for text in axes.texts if "olver" in text.get_text()]
    assert names == ["Physolver", "Specsolver", "Transolver-σ"]
    cells = [axes for axes in figure.axes if axes.get_images() and axes.get_label() != "<colorbar>"]
    assert len(cells) == 3 * last  # errors only
    channel = fields.index(field)
    expected = [
        difference(arrays[f"{task}-{model}-42"], channels=(channel,)) for model in ("physolver", "specsolver", TRIO[0])
    ]
    parts = [part for frame in np.concatenate(expected) for part in ([frame] if frame.ndim == 2 else faces(frame))]
    shown = [np.ma.getdata(image.get_array()).T for image in error_images(figure)]
    assert all(np.allclose(pixels, part) for pixels, part in zip(shown, parts, strict=True))
    (limits,) = {image.get_clim() for image in error_images(figure)}
    assert limits == (0.0, np.percentile(np.concatenate([pixels.ravel() for pixels in shown]), 99.5))
    bar = next(axes for axes in figure.axes if axes.get_label() == "<colorbar>")
    assert f"error of {field}" in bar.get_ylabel() and "99.5th percentile" in bar.get_ylabel()


def test_maps_scale_excludes_only_blown_up_frames():
    rows, arrays = maps_of_models("ns2d", TRIO[:2], grid=(8, 8), leads=(1, 2, 3))
    run = "ns2d-physolver-42"
    large = arrays[run]["truth"].astype(float) * -3  # four times the truth, but no blow-up
    figure = maps(rows, {**arrays, run: {**arrays[run], "forecast": large}})
    errors = np.concatenate([4 * np.abs(arrays[run]["truth"][0].astype(float)).ravel(),
                             difference(arrays["ns2d-transolver-sigma-42"]).ravel()])  # fmt: skip
    assert error_images(figure)[0].get_clim()[1] == pytest.approx(np.percentile(errors, 99.5))
    assert error_images(figure)[0].get_clim()[1] > np.abs(arrays[run]["truth"][0]).max()
    diverged = large.copy()
    diverged[:, 2] *= 100
    figure = maps(rows, {**arrays, run: {**arrays[run], "forecast": diverged}})
    valid = np.concatenate([4 * np.abs(arrays[run]["truth"][0, :2].astype(float)).ravel(),
                           difference(arrays["ns2d-transolver-sigma-42"]).ravel()])  # fmt: skip
    assert error_images(figure)[0].get_clim()[1] == pytest.approx(np.percentile(valid, 99.5))


@pytest.mark.parametrize(("grid", "parts"), [((6, 8), 1), ((4, 5, 6), 3)])
def test_maps_show_the_norm_of_vector_fields(grid, parts):
    names = VELOCITY[: len(grid)]
    rows, arrays = maps_of_models("mine", TRIO[:1], grid=grid, leads=(1, 2), fields=("density", *names))
    (case,) = cases_of(rows, arrays, "velocity")
    channels = range(1, 1 + len(names))
    assert np.allclose(case.errors["Transolver-σ"], difference(arrays["mine-transolver-sigma-42"], channels=channels))
    truth = arrays["mine-transolver-sigma-42"]["truth"][0].astype(float)[..., 1:]
    assert np.allclose(case.truth, np.sqrt((truth**2).sum(-1)))
    # The number below a panel is the mean over components, as in the main table.
    components = [row["value"] for row in rows if row["field"] in names and (row["lead"], row["case"]) == (2, 0)]
    assert len(components) == len(names) and float(case.notes["Transolver-σ", 2].split()[0]) == pytest.approx(
        100 * np.mean(components), rel=5e-3
    )
    figure = maps(rows, arrays, "velocity")
    assert len(error_images(figure)) == 2 * parts
    assert "‖error of velocity‖" in next(axes for axes in figure.axes if axes.get_label() == "<colorbar>").get_ylabel()
    (scalar,) = cases_of(rows, arrays, "density")
    assert np.allclose(scalar.errors["Transolver-σ"], difference(arrays["mine-transolver-sigma-42"]))
    assert np.array_equal(scalar.truth, arrays["mine-transolver-sigma-42"]["truth"][0, ..., 0].astype(float))
    with pytest.raises(ValueError, match=f"choose from density, {', '.join(names)}, velocity"):
        maps(rows, arrays, "pressure")


def test_case_study_shows_all_fields_at_the_last_lead():
    parts = [
        maps_of_models("ns2d", TRIO[:2], grid=(8, 8), leads=(1, 5)),
        maps_of_models("fsi", TRIO[:2], grid=(8, 8), leads=(1, 20), fields=VELOCITY[:2]),
        maps_of_models("smoke3d", TRIO[:2], grid=(4, 4, 4), leads=(1, 16), fields=("density", *VELOCITY)),
    ]
    rows = [row for map_rows, _ in parts for row in map_rows]
    arrays = {run: run_maps for _, by_run in parts for run, run_maps in by_run.items()}
    cases = cases_of(rows, arrays, last=True)
    assert [(case.task, case.field, case.vector, case.leads) for case in cases] == [
        ("ns2d", "vorticity", False, (5,)),
        ("fsi", "velocity", True, (20,)),
        ("smoke3d", "density", False, (16,)),
        ("smoke3d", "velocity", True, (16,)),
    ]
    figure = case_study(rows, arrays)
    images = error_images(figure)
    assert len(images) == 2 + 2 + 6 + 6
    fsi = [difference(arrays[f"fsi-{model}-42"], slice(1, 2), (0, 1))[0] for model in TRIO[:2]]
    for image, error in zip(images[2:4], fsi, strict=True):
        assert np.allclose(np.ma.getdata(image.get_array()).T, error)
        assert image.get_clim() == (0.0, pytest.approx(np.percentile(np.stack(fsi), 99.5)))
    labels = [axes.get_ylabel() for axes in figure.axes if axes.get_label() == "<colorbar>"]
    assert labels == ["vorticity", "|error|", "‖velocity‖", "‖error‖", "density", "|error|", "‖velocity‖", "‖error‖"]
    smoke_rows, smoke_arrays = parts[2]
    assert [case.field for case in cases_of(smoke_rows, smoke_arrays, "velocity_y", last=True)] == ["velocity_y"]


def test_maps_use_the_common_leads_of_all_runs():
    many = tuple(range(1, 21))
    rows, arrays = maps_of_models("ns2d", TRIO[:2], grid=(8, 8), leads=many)
    (case,) = cases_of(rows, arrays)
    assert case.leads == many and len(case.notes) == 40
    assert len(error_images(maps(rows, arrays))) == 2 * 20
    physolver = arrays["ns2d-physolver-42"]
    few = {name: array[:, [0, 9, 19]] if name in ("truth", "forecast") else array for name, array in physolver.items()}
    few["leads"] = np.array([1, 10, 20])
    (mixed,) = cases_of(rows, {**arrays, "ns2d-physolver-42": few})
    assert mixed.leads == (1, 10, 20)
    assert np.array_equal(mixed.truth, arrays["ns2d-transolver-sigma-42"]["truth"][0, [0, 9, 19], ..., 0].astype(float))
    with pytest.raises(ValueError, match="have no lead in common; diagnose them on the same windows"):
        cases_of(rows, {**arrays, "ns2d-physolver-42": {**few, "leads": np.array([21, 22, 23])}})
