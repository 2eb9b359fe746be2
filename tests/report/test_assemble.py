"""A page's study from records: what it says is what the rows hold."""

import numpy as np
import pytest

from sigmasolver.report import assemble
from sigmasolver.report.assemble import study_of
from sigmasolver.report.page import render
from sigmasolver.report.study import Axis, Dimensions

from . import made
from .made import decomposition, errors, facts, finding


def maps_of(model, axes=2, shift=0.0):
    source = facts("ns2d", model)
    rows = [finding(source, "maps", "relative_l2", 0.1, field="vorticity", lead=lead, case=3) for lead in (1, 5, 10)]
    truth = np.random.default_rng(0).normal(size=(1, 3, *(6, 5, 4)[:axes], 1)).astype(np.float32)
    arrays = {"truth": truth, "forecast": truth + shift, "leads": np.array([1, 5, 10]), "cases": np.array([3])}
    return rows, {source["run"]: arrays}


def test_the_summary_names_who_is_ahead_and_how_much_is_carried_on():
    rows = [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "physolver")]
    shares = decomposition("ns2d", "transolver-sigma")
    study = study_of([*rows, *shares], {})
    assert "At lead 1 and at lead 10, Transolver-σ is best, with 0.400 % and " in study.summary
    assert "Persistence has 70.0 % at lead 10." in study.summary
    share = next(r["value"] for r in shares if (r["metric"], r["lead"], r["field"]) == ("propagation_share", 10, None))
    assert f"{100 * share:.3g} % for Transolver-σ" in study.summary
    assert [card.title for card in study.cards] == ["Where the error comes from"]
    assert "<svg" in study.cards[0].svg.decode() and ("commit", "abc1234") in study.facts


def test_a_form_has_its_methods_name_on_the_page_and_its_own_in_the_records():
    rows = [*errors("ns2d", "rno-two-blocks"), *errors("ns2d", "transolver-sigma")]
    study = study_of(rows, {})
    assert [curve.model for curve in study.curves] == ["RNO", "Transolver-σ", "persistence"]
    assert {row["model"] for row in study.records} == {"rno-two-blocks", "transolver-sigma", "persistence"}
    both = study_of([*rows, *errors("ns2d", "rno", seed=43)], {})
    assert [curve.model for curve in both.curves][0::2] == ["RNO (rno-two-blocks)", "RNO"]


def test_the_lead_of_a_race_may_change():
    rows = [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "physolver")]
    first = ("physolver", "relative_l2_lead", 1)
    rows = [{**row, "value": 0.001} if (row["model"], row["metric"], row["lead"]) == first else row for row in rows]
    assert "At lead 1, Physolver is best with 0.100 %; at lead 10, Transolver-σ with " in study_of(rows, {}).summary


def test_a_model_that_blew_up_is_not_ahead():
    rows = [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "physolver")]
    rows = [{**row, "value": None} if (row["model"], row["lead"]) == ("transolver-sigma", 10) else row for row in rows]
    summary = study_of(rows, {}).summary
    assert "at lead 10, Physolver with" in summary and "Transolver-σ no longer beats it" in summary


def test_a_model_stands_side_by_side_once_and_every_seed_can_be_shown():
    one, first = maps_of("transolver-sigma", shift=0.5)
    run = next(iter(first))
    again = [{**row, "seed": 41, "run": "other"} for row in one]
    rows = [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "transolver-sigma", seed=41, run="other")]
    study = study_of([*rows, *one, *again], {"maps": {**first, "other": first[run]}})
    assert study.shown == ("Transolver-σ, seed 41",) and len(study.films[0].forecasts) == 2


def still(rows, *values):
    """The rows with persistence at every lead, with these errors."""
    first = next(row for row in rows if row["model"] == "persistence")
    kept = [row for row in rows if row["model"] != "persistence"]
    return [*kept, *({**first, "lead": lead, "value": value} for lead, value in enumerate(values, 1))]


def errors_of(model, *values, **more):
    rows = errors("ns2d", model, horizon=len(values), **more)
    return [
        {**row, "value": values[row["lead"] - 1]} if row["metric"] == "relative_l2_lead" else row
        for row in rows if row["model"] == model
    ] + [row for row in rows if row["model"] != model]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((0.5, 0.6, 0.7), "; Physolver never beats it."),
        ((0.1, 0.3, 0.7), "; Physolver no longer beats it after lead 1."),
        ((0.5, 0.3, 0.1), "; Physolver beats it at 1 of 3 leads."),
        ((0.3, 0.1, 0.3), "; Physolver beats it at 1 of 3 leads."),
        ((0.1, 0.2, 0.2), "at lead 3."),
        ((0.3, 0.3, 0.3), "; Physolver never beats it."),  # as good is not better
    ],
)
def test_where_a_model_beats_persistence(values, says):
    rows = still(errors_of("physolver", *values), 0.3, 0.3, 0.3)
    assert f"Persistence has 30.0 % at lead 3{says.removeprefix('at lead 3')}" in study_of(rows, {}).summary


def test_persistence_may_be_ahead_and_a_model_that_loses_to_it_is_not():
    summary = study_of(still(errors_of("physolver", 0.5, 0.6), 0.1, 0.2), {}).summary
    assert "At lead 1 and at lead 2, persistence is best, with 10.0 % and 20.0 %." in summary
    assert "The best model at lead 1 is Physolver with 50.0 %. The best model at lead 2" in summary
    crossing = study_of(still(errors_of("physolver", 0.05, 0.6), 0.1, 0.2), {}).summary
    assert "At lead 1, Physolver is best with 5.00 %; at lead 2, persistence with 20.0 %." in crossing
    level = study_of(still(errors_of("physolver", 0.1, 0.2), 0.1, 0.2), {}).summary
    assert "Physolver and persistence are best" in level
    several = [*errors_of("physolver", 0.5, 0.6), *errors_of("specsolver", 0.5, 0.7)]
    assert "; Physolver and Specsolver never beat it." in study_of(still(several, 0.1, 0.2), {}).summary


def test_a_lead_that_the_spread_over_seeds_explains_is_called_so():
    """In per cent, at lead 1: 11 ± 1.4 and 12 ± 1.4, whose distance has a spread of 2; at lead 2 they are far apart."""
    rows = [*errors_of("physolver", 0.10, 0.10), *errors_of("physolver", 0.12, 0.101, seed=43)]
    rows += [*errors_of("specsolver", 0.11, 0.30), *errors_of("specsolver", 0.13, 0.301, seed=43)]
    summary = study_of(still(rows, 0.9, 0.9), {}).summary
    assert "At lead 1 and at lead 2, Physolver is best" in summary
    assert "At lead 1, Specsolver is equally good within the spread over seeds." in summary
    assert "At lead 2 Specsolver is no worse" not in summary


def test_a_diagnosis_of_few_windows_says_so_wherever_it_stands():
    rows = errors("ns2d", "physolver", windows=72)
    few = [{**row, "windows": 4} for row in decomposition("ns2d", "physolver", horizon=6)]
    study = study_of([*rows, *few], {})
    errors_on, own = "72 windows of the test split, horizon 10", "4 windows of the test split, horizon 6"
    assert f"on data not used for training: {errors_on}." in study.summary
    assert (
        "The share of the error energy at lead 6 that is propagated" in study.summary and f"({own})." in study.summary
    )
    (card,) = study.cards
    assert card.caption.endswith(f" Measured on {own} (the errors at the top: {errors_on}).")
    same = study_of([*rows, *({**row, "windows": 72} for row in decomposition("ns2d", "physolver"))], {}).cards[0]
    assert same.caption.endswith(f" Measured on {errors_on}.")
    page = render(study)
    assert f"Means over {errors_on}." in page and f"at every lead, mean over {errors_on}." in page
    assert f"mean over windows ({errors_on})" in study.table.caption


def test_horizons_that_differ_are_told_apart():
    long, short = decomposition("ns2d", "physolver"), decomposition("ns2d", "specsolver", horizon=4)
    rows = [*errors("ns2d", "physolver"), *errors("ns2d", "specsolver"), *long, *short]
    summary, shares = study_of(rows, {}).summary, {}
    for row in (*long, *short):
        if row["metric"] == "propagation_share" and row["field"] is None:
            shares[row["model"]] = f"{100 * row['value']:.3g} %"  # the last lead comes last
    said = f"{shares['physolver']} for Physolver at lead 10, {shares['specsolver']} for Specsolver at lead 4"
    assert (
        f"The share of the error energy at the last lead that is propagated from earlier frames is {said} (" in summary
    )


def test_cards_count_the_cases_that_were_looked_at_and_name_the_machine():
    profile, _, _ = made.corrections("ns2d", cases=(0, 7))
    costs = [{**row, "machine": "H200"} for row in made.efficiency("ns2d", "transolver-sigma", (1.0, 2.0, 3.0))]
    scales = [*made.components("ns2d", "transolver-sigma")]
    scales += [finding(facts("ns2d", "transolver-sigma", horizon=4), "components", "cases", 3)]
    cards = {card.title: card.caption for card in study_of(
        [*errors("ns2d", "transolver-sigma"), *profile, *costs, *scales], {}).cards}  # fmt: skip
    own = "Measured on 2 windows of the test split, one call from the true history (the errors at the top: 200 windows"
    assert own in cards["How strongly slices correct each other"]
    assert "Measured on 3 windows of the test split, horizon 4 (the" in cards["How errors grow at each scale"]
    assert cards["Cost"].endswith("Measured on H200.")


def without_parts(model, *metrics):
    """Of one run, the errors of a forecast with all operators, and without those of each kind that it has."""
    return [finding(facts("ns2d", model), "interventions", one, 0.1, lead=1) for one in ("intact", *metrics)]


def test_sections_of_slices_name_the_models_without_them():
    models = ("transolver-sigma", "unet", "ffno", "transolver")
    rows = [row for model in models for row in errors("ns2d", model)]
    rows += without_parts("transolver-sigma", "zero_physical", "zero_spectral")
    rows += (
        without_parts("unet") + without_parts("ffno", "zero_spectral") + without_parts("transolver", "zero_physical")
    )
    profile, _, _ = made.corrections("ns2d")
    mine, theirs = made.routing("transolver-sigma", grid=(8, 8)), made.routing("transolver", grid=(8, 8))
    arrays = {f"ns2d-{model}-42": held for model, (_, held) in (("transolver-sigma", mine), ("transolver", theirs))}
    study = study_of([*rows, *profile, *mine[0], *theirs[0], *decomposition("ns2d", "transolver-sigma")],
                     {"routing": arrays})  # fmt: skip
    captions = {card.name: card.caption for card in study.cards}
    said = " U-Net and F-FNO have no slices: not shown here."
    assert captions["routing"].endswith(said)
    assert captions["corrections"].endswith(f"{said} No such records for Transolver: not shown here.")
    assert "not shown" not in captions["decomposition"]  # for every model, where it was made
    assert render(study).count("U-Net and F-FNO have no slices") == 2
    alone = study_of(
        [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "unet"), *without_parts("unet"), *profile], {}
    )
    assert alone.cards[0].caption.endswith(" U-Net has no slices: not shown here.")
    everyone = study_of([*errors("ns2d", "transolver-sigma"), *profile], {})
    assert "not shown" not in everyone.cards[0].caption


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


def test_films_play_the_leads_that_all_runs_have():
    rows = [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "physolver")]
    many, first = made.maps("ns2d", "transolver-sigma", grid=(6, 5), leads=tuple(range(1, 11)), cases=1)
    few, second = made.maps("ns2d", "physolver", grid=(6, 5), leads=(1, 3, 5, 8, 10), cases=1)
    held = {"ns2d-transolver-sigma-42": first, "ns2d-physolver-42": second}
    (film,) = study_of([*rows, *many, *few], {"maps": held}).films
    assert film.leads == (1, 3, 5, 8, 10) and len(film.forecasts) == 2
    np.testing.assert_array_equal(film.forecasts["Transolver-σ"], first["forecast"][0, [0, 2, 4, 7, 9], ..., 0])
    np.testing.assert_array_equal(film.forecasts["Physolver"], second["forecast"][0, ..., 0])


def test_films_that_have_no_room_lose_leads_then_cases_then_fields(monkeypatch):
    rows, fields = errors("ns2d", "physolver"), ("u", "v")
    more, arrays = made.maps("ns2d", "physolver", grid=(8, 8), leads=tuple(range(1, 11)), fields=fields, cases=4)
    frame = 3 * 64  # truth, forecast and error

    def shape(room):
        monkeypatch.setattr(assemble, "ROOM", room)
        films = study_of([*rows, *more], {"maps": {"ns2d-physolver-42": arrays}}).films
        assert len({film.leads for film in films}) == 1 and films[0].leads[0] == 1 and films[0].leads[-1] == 10
        return len(films[0].leads), len({film.case for film in films}), len({film.field for film in films})

    assert shape(10 * 4 * 2 * frame) == (10, 4, 2)
    assert shape(7 * 4 * 2 * frame) == (7, 4, 2)
    assert shape(5 * 3 * 2 * frame) == (5, 3, 2)
    assert shape(5 * 1 * 1 * frame) == (5, 1, 1)
    assert shape(1) == (5, 1, 1)


@pytest.mark.parametrize("noisy", [False, True])
def test_three_models_two_cases_and_three_fields_stay_below_15_megabytes(noisy):
    """Also where the fields are noise, which no compression makes smaller."""
    fields, leads, rows, held = ("u", "v", "w"), tuple(range(1, 21)), [], {}
    random = np.random.default_rng(0)
    noise = random.normal(size=(2, 20, 64, 64, 3)).astype(np.float16)
    for model in made.TRIO:
        more, arrays = made.maps("ns2d", model, leads=leads, fields=fields)
        if noisy:
            arrays |= {"truth": noise, "forecast": noise + random.normal(size=noise.shape).astype(np.float16)}
        rows += [*errors("ns2d", model), *more]
        held[f"ns2d-{model}-42"] = arrays
    study = study_of(rows, {"maps": held})
    assert len(study.films) == 6 and all(film.leads == leads for film in study.films)
    assert len(render(study)) < 15e6


def test_spectra_have_a_card_where_grids_are_periodic():
    rows, arrays = [], {}
    for model in ("transolver-sigma", "physolver"):
        more, arrays[f"ns2d-{model}-42"] = made.trust("ns2d", model)
        rows += [*errors("ns2d", model), *more]
    (card,) = study_of(rows, {"trust": arrays}).cards
    assert card.title == "Energy at each scale" and card.words and "spurious energy. Measured on" in card.caption
    page = render(study_of(rows, {"trust": arrays}))
    assert f'alt="{card.words}"' in page and page == render(study_of(rows, {"trust": arrays}))
    assert study_of(rows, {"trust": {run: {"correlation": np.ones(3)} for run in arrays}}).cards == ()


def test_components_have_a_card_that_calls_norms_lower_estimates():
    rows = [*errors("ns2d", "physolver"), *made.components("ns2d", "physolver")]
    (card,) = study_of(rows, {}).cards
    assert card.title == "How errors grow at each scale" and "lower estimates: it is no guarantee" in card.caption


def test_a_volume_is_cut_in_the_middle_of_each_axis():
    rows, arrays = maps_of("transolver-sigma", axes=3)
    films = study_of([*errors("ns2d", "transolver-sigma"), *rows], {"maps": arrays}).films
    truth = next(iter(arrays.values()))["truth"][0, ..., 0]
    assert [film.plane for film in films] == ["middle x", "middle y", "middle z"]
    np.testing.assert_array_equal(films[1].truth, truth[:, :, 2])
    assert [[axis.name for axis in film.axes] for film in films] == [["y", "z"], ["x", "z"], ["x", "y"]]


def test_leads_have_times_fields_units_and_maps_axes_where_they_are_known():
    rows, arrays = maps_of("transolver-sigma")  # 6 points along x, 5 along y
    rows += errors("ns2d", "transolver-sigma")
    known = Dimensions(0.5, "s", (3.0, 2.0), (True, False), "m", {"vorticity": "1/s"})
    study = study_of(rows, {"maps": arrays}, dimensions=known)
    assert "At lead 1 (0.5 s) and at lead 10 (5 s), Transolver-σ is best" in study.summary
    assert study.table.columns[2:5] == ("lead 1, 0.5 s (%)", "lead 5, 2.5 s (%)", "lead 10, 5 s (%)")
    (film,) = study.films
    assert film.unit == "1/s" and film.axes == (Axis("x", 0.5, "m"), Axis("y", 0.5, "m"))  # 3 / 6 and 2 / (5 - 1)
    numbered = study_of(rows, {"maps": arrays}, dimensions=Dimensions(step=1.0))
    assert "At lead 1 and at lead 10, Transolver-σ" in numbered.summary  # a time that is the lead says nothing
    assert numbered.films[0].axes == (Axis("x"), Axis("y"))


def test_tasks_do_not_share_a_page():
    with pytest.raises(ValueError, match="one page per task"):
        study_of([*errors("ns2d", "physolver"), *errors("kf2d", "physolver")], {})


def test_the_page_of_it_all_is_one_file():
    rows, arrays = maps_of("transolver-sigma")
    page = render(study_of([*errors("ns2d", "transolver-sigma"), *decomposition("ns2d", "transolver-sigma"), *rows],
                           {"maps": arrays}))  # fmt: skip
    assert page.count("<script>") == 1 and "http://" not in page.replace("http://www.w3.org", "")
