"""Error maps: all leads of the paper, its rows, its scale and its norms over channels."""

import numpy as np
import pytest

from sigmasolver.report.figures.maps import case_study, cases_of, faces, maps
from sigmasolver.tasks import TASKS

from .made import TRIO, gathered

VELOCITY = ("velocity_x", "velocity_y", "velocity_z")


def pictures(figure):
    return [one for axes in figure.axes for one in axes.get_images()]


def dark(figure):
    """The pictures of errors, without the colour bar."""
    return [one for one in pictures(figure) if one.get_cmap().name == "magma" and min(one.get_array().shape) > 1]


def difference(arrays, leads=slice(None), channels=(0,)):
    """The norm over channels of forecast - truth of the first case, (leads, *grid), written out."""
    held = [arrays[name][0, leads].astype(float)[..., list(channels)] for name in ("forecast", "truth")]
    return np.sqrt(((held[0] - held[1]) ** 2).sum(-1))


@pytest.mark.parametrize(
    ("task", "last", "field", "grid"),
    [
        ("ns2d", 10, "vorticity", (8, 8)),
        ("kf2d", 16, "vorticity", (8, 8)),
        ("it3d", 10, "velocity_x", (4, 5, 6)),
        ("smoke3d", 16, "density", (4, 5, 6)),
    ],
)
def test_rollouts_show_every_lead_and_the_rows_of_the_paper(task, last, field, grid):
    """Columns: leads 1 to 10 or 16. Rows: Physolver, Specsolver, Transolver-σ. One scale to the 99.5th percentile."""
    assert TASKS[task].horizon == last
    leads, fields = tuple(range(1, last + 1)), TASKS[task].targets
    rows, arrays = gathered(task, TRIO, grid=grid, leads=leads, fields=fields)
    figure = maps(rows, arrays)
    panels = [axes for axes in figure.axes if axes.get_images() and axes.get_title()]
    assert [axes.get_title().removeprefix("lead ") for axes in panels] == [str(lead) for lead in leads]
    names = [text.get_text() for axes in figure.axes for text in axes.texts if "olver" in text.get_text()]
    assert names == ["Physolver", "Specsolver", "Transolver-σ"]
    cells = [axes for axes in figure.axes if axes.get_images() and axes.get_label() != "<colorbar>"]
    assert len(cells) == 3 * last  # errors alone
    channel = fields.index(field)
    wanted = [
        difference(arrays[f"{task}-{model}-42"], channels=(channel,)) for model in ("physolver", "specsolver", TRIO[0])
    ]
    parts = [part for one in np.concatenate(wanted) for part in ([one] if one.ndim == 2 else faces(one))]
    shown = [np.ma.getdata(one.get_array()).T for one in dark(figure)]
    assert all(np.allclose(one, part) for one, part in zip(shown, parts, strict=True))
    (limits,) = {one.get_clim() for one in dark(figure)}
    assert limits == (0.0, np.percentile(np.concatenate([one.ravel() for one in shown]), 99.5))
    bar = next(axes for axes in figure.axes if axes.get_label() == "<colorbar>")
    assert f"error of {field}" in bar.get_ylabel() and "99.5th percentile" in bar.get_ylabel()


def test_errors_larger_than_the_truth_count_unless_the_forecast_blew_up():
    rows, arrays = gathered("ns2d", TRIO[:2], grid=(8, 8), leads=(1, 2, 3))
    run = "ns2d-physolver-42"
    far = arrays[run]["truth"].astype(float) * -3  # four times the truth, but no blow-up
    figure = maps(rows, {**arrays, run: {**arrays[run], "forecast": far}})
    errors = np.concatenate([4 * np.abs(arrays[run]["truth"][0].astype(float)).ravel(),
                             difference(arrays["ns2d-transolver-sigma-42"]).ravel()])  # fmt: skip
    assert dark(figure)[0].get_clim()[1] == pytest.approx(np.percentile(errors, 99.5))
    assert dark(figure)[0].get_clim()[1] > np.abs(arrays[run]["truth"][0]).max()
    lost = far.copy()
    lost[:, 2] *= 100
    figure = maps(rows, {**arrays, run: {**arrays[run], "forecast": lost}})
    calm = np.concatenate([4 * np.abs(arrays[run]["truth"][0, :2].astype(float)).ravel(),
                           difference(arrays["ns2d-transolver-sigma-42"]).ravel()])  # fmt: skip
    assert dark(figure)[0].get_clim()[1] == pytest.approx(np.percentile(calm, 99.5))


@pytest.mark.parametrize(("grid", "parts"), [((6, 8), 1), ((4, 5, 6), 3)])
def test_a_vector_is_shown_by_the_norm_over_its_channels(grid, parts):
    names = VELOCITY[: len(grid)]
    rows, arrays = gathered("mine", TRIO[:1], grid=grid, leads=(1, 2), fields=("density", *names))
    (case,) = cases_of(rows, arrays, "velocity")
    channels = range(1, 1 + len(names))
    assert np.allclose(case.errors["Transolver-σ"], difference(arrays["mine-transolver-sigma-42"], channels=channels))
    truth = arrays["mine-transolver-sigma-42"]["truth"][0].astype(float)[..., 1:]
    assert np.allclose(case.truth, np.sqrt((truth**2).sum(-1)))
    # The number below a panel is the mean over components, as in the main table.
    each = [row["value"] for row in rows if row["field"] in names and (row["lead"], row["case"]) == (2, 0)]
    assert len(each) == len(names) and float(case.notes["Transolver-σ", 2].split()[0]) == pytest.approx(
        100 * np.mean(each), rel=5e-3
    )
    figure = maps(rows, arrays, "velocity")
    assert len(dark(figure)) == 2 * parts
    assert "‖error of velocity‖" in next(axes for axes in figure.axes if axes.get_label() == "<colorbar>").get_ylabel()
    (scalar,) = cases_of(rows, arrays, "density")
    assert np.allclose(scalar.errors["Transolver-σ"], difference(arrays["mine-transolver-sigma-42"]))
    assert np.array_equal(scalar.truth, arrays["mine-transolver-sigma-42"]["truth"][0, ..., 0].astype(float))
    with pytest.raises(ValueError, match=f"choose from density, {', '.join(names)}, velocity"):
        maps(rows, arrays, "pressure")


def test_a_case_study_has_every_field_of_each_task_at_the_last_lead():
    parts = [
        gathered("ns2d", TRIO[:2], grid=(8, 8), leads=(1, 5)),
        gathered("fsi", TRIO[:2], grid=(8, 8), leads=(1, 20), fields=VELOCITY[:2]),
        gathered("smoke3d", TRIO[:2], grid=(4, 4, 4), leads=(1, 16), fields=("density", *VELOCITY)),
    ]
    rows = [row for held, _ in parts for row in held]
    arrays = {run: held for _, all_held in parts for run, held in all_held.items()}
    cases = cases_of(rows, arrays, last=True)
    assert [(case.task, case.field, case.vector, case.leads) for case in cases] == [
        ("ns2d", "vorticity", False, (5,)),
        ("fsi", "velocity", True, (20,)),
        ("smoke3d", "density", False, (16,)),
        ("smoke3d", "velocity", True, (16,)),
    ]
    figure = case_study(rows, arrays)
    drawn = dark(figure)
    assert len(drawn) == 2 + 2 + 6 + 6
    fsi = [difference(arrays[f"fsi-{model}-42"], slice(1, 2), (0, 1))[0] for model in TRIO[:2]]
    for one, error in zip(drawn[2:4], fsi, strict=True):
        assert np.allclose(np.ma.getdata(one.get_array()).T, error)
        assert one.get_clim() == (0.0, pytest.approx(np.percentile(np.stack(fsi), 99.5)))
    labels = [axes.get_ylabel() for axes in figure.axes if axes.get_label() == "<colorbar>"]
    assert labels == ["vorticity", "|error|", "‖velocity‖", "‖error‖", "density", "|error|", "‖velocity‖", "‖error‖"]
    smoke, held = parts[2]
    assert [case.field for case in cases_of(smoke, held, "velocity_y", last=True)] == ["velocity_y"]


def test_maps_with_other_leads_are_drawn_at_those_that_all_have():
    many = tuple(range(1, 21))
    rows, arrays = gathered("ns2d", TRIO[:2], grid=(8, 8), leads=many)
    (case,) = cases_of(rows, arrays)
    assert case.leads == many and len(case.notes) == 40
    assert len(dark(maps(rows, arrays))) == 2 * 20
    old = arrays["ns2d-physolver-42"]
    few = {name: held[:, [0, 9, 19]] if name in ("truth", "forecast") else held for name, held in old.items()}
    few["leads"] = np.array([1, 10, 20])
    (mixed,) = cases_of(rows, {**arrays, "ns2d-physolver-42": few})
    assert mixed.leads == (1, 10, 20)
    assert np.array_equal(mixed.truth, arrays["ns2d-transolver-sigma-42"]["truth"][0, [0, 9, 19], ..., 0].astype(float))
    with pytest.raises(ValueError, match="have no lead in common; diagnose them on the same windows"):
        cases_of(rows, {**arrays, "ns2d-physolver-42": {**few, "leads": np.array([21, 22, 23])}})
