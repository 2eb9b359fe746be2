"""Error maps of diagnoses with many leads, and with different ones."""

import numpy as np
import pytest

from sigmasolver.report.figures.maps import cases_of, maps

from .made import TRIO, gathered


def pictures(figure):
    return [one for axes in figure.axes for one in axes.get_images()]


def test_maps_of_many_leads_are_thinned_and_old_ones_stand_beside_them():
    many = tuple(range(1, 21))
    rows, arrays = gathered("ns2d", TRIO[:2], grid=(8, 8), leads=many)
    (case,) = cases_of(rows, arrays)
    assert case.leads == (1, 6, 11, 15, 20) and len(case.notes) == 40
    for title, run in (("Transolver-σ", "ns2d-transolver-sigma-42"), ("Physolver", "ns2d-physolver-42")):
        kept = arrays[run]["forecast"][0, [0, 5, 10, 14, 19], ..., 0]
        assert np.array_equal(case.forecasts[title], kept.astype(float))
    assert len([one for one in pictures(maps(rows, arrays)) if one.get_array().shape == (8, 8)]) == 5 * 5
    old = arrays["ns2d-physolver-42"]
    few = {name: held[:, [0, 9, 19]] if name in ("truth", "forecast") else held for name, held in old.items()}
    few["leads"] = np.array([1, 10, 20])
    (mixed,) = cases_of(rows, {**arrays, "ns2d-physolver-42": few})
    assert mixed.leads == (1, 10, 20)
    assert np.array_equal(mixed.truth, arrays["ns2d-transolver-sigma-42"]["truth"][0, [0, 9, 19], ..., 0].astype(float))
    with pytest.raises(ValueError, match="have no lead in common; diagnose them on the same windows"):
        cases_of(rows, {**arrays, "ns2d-physolver-42": {**few, "leads": np.array([21, 22, 23])}})
