"""Spectra in the figure agree with the records; runs that cannot be compared are rejected."""

import numpy as np
import pytest

from sigmasolver.report.figures.spectra import spectra, spectra_of
from sigmasolver.report.figures.style import save

from .made import TRIO, spectra_of_models


def test_spectra_figure_matches_records_and_ratios():
    seeds = (42, 43, 44)
    rows, arrays = spectra_of_models("ns2d", TRIO, seeds)
    figure = spectra(rows, arrays)
    assert [axes.get_title(loc="left") for axes in figure.axes[:4]] == ["lead 1", "lead 4", "lead 7", "lead 10"]
    for column, lead in enumerate((1, 4, 7, 10)):
        above, below = figure.axes[column], figure.axes[4 + column]
        assert (
            {axes.get_yscale() for axes in (above, below)} == {axes.get_xscale() for axes in (above, below)} == {"log"}
        )
        assert below.get_xlabel() == "wavenumber"
        lines, ratios = ({line.get_label(): line for line in axes.get_lines()} for axes in (above, below))
        truth = arrays["ns2d-physolver-43"]["spectrum_true"][lead - 1, 1:, 0]
        assert lines["truth"].get_ydata() == pytest.approx(truth)
        assert lines["truth"].get_xdata().tolist() == list(range(1, 46))  # wavenumber 0 cannot be shown on a log axis
        for model in TRIO:
            forecasts = [arrays[f"ns2d-{model}-{seed}"]["spectrum_forecast"][lead - 1, 1:, 0] for seed in seeds]
            assert lines[model].get_ydata() == pytest.approx(np.mean(forecasts, 0))
            assert ratios[model].get_ydata() == pytest.approx(np.mean(forecasts, 0) / truth)
            shade = above.collections[TRIO.index(model)].get_paths()[0].vertices
            at_last = shade[shade[:, 0] == 45, 1]
            deviation = np.std([forecast[-1] for forecast in forecasts], ddof=1)
            assert np.ptp(at_last) == pytest.approx(2 * deviation, rel=1e-5)
    assert figure.axes[0].get_ylabel() == "energy of vorticity" and figure.axes[4].get_ylabel() == "forecast / truth"


def test_spectra_of_a_chosen_field_and_of_several_tasks():
    rows, arrays = spectra_of_models("it3d", TRIO[:1], fields=("pressure", "velocity_x"), horizon=2)
    assert spectra_of(rows, arrays)[0].field == "velocity_x"  # the field shown in the paper
    (chosen,) = spectra_of(rows, arrays, "pressure")
    assert np.array_equal(chosen.truth, arrays["it3d-transolver-sigma-42"]["spectrum_true"][:, 1:, 0])
    more, more_arrays = spectra_of_models("ns2d", TRIO[:1], horizon=3)
    figure = spectra([*rows, *more], {**arrays, **more_arrays})
    titles = [axes.get_title(loc="left") for axes in figure.axes if axes.axison and axes.get_title(loc="left")]
    assert titles == ["IT3D · lead 1", "IT3D · lead 2", "NS2D · lead 1", "NS2D · lead 2", "NS2D · lead 3"]


def test_spectra_axes_ignore_diverged_forecasts_and_round_off(tmp_path):
    rows, arrays = spectra_of_models("ns2d", TRIO[:2])
    physolver = arrays["ns2d-physolver-42"]
    for run in arrays.values():
        run["spectrum_true"][:, -5:] = 1e-20
    top = physolver["spectrum_true"].max()
    physolver["spectrum_forecast"][3:, :20] = 1e30
    physolver["spectrum_forecast"][6:] = np.inf
    figure = spectra(rows, arrays)
    low, high = figure.axes[0].get_ylim()
    visible = [
        run[name][[0, 3, 6, 9], 1:-5] for run in arrays.values() for name in ("spectrum_true", "spectrum_forecast")
    ]
    visible += [run["spectrum_forecast"][[0, 3, 6, 9], -5:] for run in arrays.values()]
    assert low == pytest.approx(min(values.min() for values in visible) / 1.5) and low > 1e-12 * top
    assert high == pytest.approx(1e3 * top * 1.5)
    assert all(0.001 <= tick <= 1000 for tick in figure.axes[4].get_yticks()) and len(figure.axes[4].get_yticks()) > 2
    ratios = figure.axes[4].get_lines()[1].get_ydata()
    assert np.isnan(ratios[-5:]).all() and np.isfinite(ratios[:-5]).all()
    assert len(save(figure, tmp_path, "spectra")) == 2


def test_spectra_reject_missing_arrays_and_different_windows():
    rows, arrays = spectra_of_models("ns2d", TRIO[:2])
    for incomplete in ({}, {**arrays, "ns2d-physolver-42": {}}):
        with pytest.raises(
            ValueError, match=r"has no array \w+ of trust; if .* sigmasolver diagnose \S+ --only trust$"
        ):
            spectra(rows, incomplete)
    shifted = {**arrays["ns2d-physolver-42"], "spectrum_true": 2 * arrays["ns2d-physolver-42"]["spectrum_true"]}
    shorter = {name: array[:5] for name, array in arrays["ns2d-physolver-42"].items()}
    for other in (shifted, shorter):
        with pytest.raises(ValueError, match="physolver-42 has spectra of different windows than ns2d-transolver"):
            spectra(rows, {**arrays, "ns2d-physolver-42": other})
    with pytest.raises(ValueError, match='ns2d has no field "density"; choose from vorticity'):
        spectra(rows, arrays, "density")
