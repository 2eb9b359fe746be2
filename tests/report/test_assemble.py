"""A page's study from records: what it says is what the rows hold."""

import numpy as np
import pytest

from sigmasolver.report.assemble import few_leads, study_of
from sigmasolver.report.page import render

from .made import decomposition, errors, facts, finding


def maps_of(model, axes=2, shift=0.0):
    source = facts("ns2d", model)
    rows = [finding(source, "maps", "relative_l2", 0.1, field="vorticity", lead=lead, case=3) for lead in (1, 5, 10)]
    truth = np.random.default_rng(0).normal(size=(1, 3, *(6, 5, 4)[:axes], 1)).astype(np.float32)
    arrays = {"truth": truth, "forecast": truth + shift, "leads": np.array([1, 5, 10]), "cases": np.array([3])}
    return rows, {source["run"]: arrays}


def test_it_names_who_is_ahead_and_how_much_is_carried_on():
    rows = [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "physolver")]
    shares = decomposition("ns2d", "transolver-sigma")
    study = study_of([*rows, *shares], {})
    assert "At lead 1 transolver-sigma is ahead with 0.400 %" in study.summary
    assert "Persistence has 70.0 % there." in study.summary
    share = next(r["value"] for r in shares if (r["metric"], r["lead"], r["field"]) == ("propagation_share", 10, None))
    assert f"{100 * share:.3g} % for transolver-sigma" in study.summary
    assert [card.title for card in study.cards] == ["Where the error comes from"]
    assert "<svg" in study.cards[0].svg.decode() and ("commit", "abc1234") in study.facts


def test_a_model_behind_its_yardstick_is_named():
    rows = errors("ns2d", "physolver")
    worse = [{**row, "value": 0.01} if row["model"] == "persistence" else row for row in rows]
    assert "physolver no longer beats it" in study_of(worse, {}).summary


def test_films_hold_the_frames_of_every_run_that_shows_the_same_cases():
    one, first = maps_of("transolver-sigma", shift=0.5)
    two, second = maps_of("physolver", shift=1.0)
    rows = [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "physolver"), *one, *two]
    (film,) = study_of(rows, {"maps": {**first, **second}}).films
    assert film.leads == (1, 5, 10) and film.case == "3" and len(film.forecasts) == 2
    for forecast, shift in zip(film.forecasts.values(), (0.5, 1.0), strict=True):
        np.testing.assert_allclose(forecast - film.truth, shift, rtol=1e-6)
    other = {run: {**held, "leads": held["leads"] + 1} for run, held in second.items()}
    (alone,) = study_of(rows, {"maps": {**first, **other}}).films
    assert len(alone.forecasts) == 1


def test_a_volume_is_cut_in_the_middle_of_each_axis():
    rows, arrays = maps_of("transolver-sigma", axes=3)
    films = study_of([*errors("ns2d", "transolver-sigma"), *rows], {"maps": arrays}).films
    truth = next(iter(arrays.values()))["truth"][0, ..., 0]
    assert [film.plane for film in films] == ["middle x", "middle y", "middle z"]
    np.testing.assert_array_equal(films[1].truth, truth[:, :, 2])


def test_few_leads_keep_the_first_and_the_last():
    rows, arrays = maps_of("transolver-sigma")
    (film,) = study_of([*errors("ns2d", "transolver-sigma"), *rows], {"maps": arrays}).films
    assert few_leads(film).leads == (1, 5, 10)


def test_tasks_do_not_share_a_page():
    with pytest.raises(ValueError, match="one page for each task"):
        study_of([*errors("ns2d", "physolver"), *errors("kf2d", "physolver")], {})


def test_the_page_of_it_all_is_one_file():
    rows, arrays = maps_of("transolver-sigma")
    page = render(study_of([*errors("ns2d", "transolver-sigma"), *decomposition("ns2d", "transolver-sigma"), *rows],
                           {"maps": arrays}))  # fmt: skip
    assert page.count("<script>") == 1 and "http://" not in page.replace("http://www.w3.org", "")
