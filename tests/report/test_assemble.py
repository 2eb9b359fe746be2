"""`study_of`: the study of a page agrees with the records."""

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


def test_study_of_summary_states_best_model_and_propagated_share():
    rows = [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "physolver")]
    shares = decomposition("ns2d", "transolver-sigma")
    study = study_of([*rows, *shares], {})
    assert "At lead 1 and at lead 10, Transolver-σ is best, with 0.400 % and " in study.summary
    assert "Persistence has 70.0 % at lead 10." in study.summary
    share = next(r["value"] for r in shares if (r["metric"], r["lead"], r["field"]) == ("propagation_share", 10, None))
    assert f"{100 * share:.3g} % for Transolver-σ" in study.summary
    assert [card.title for card in study.cards] == ["Where the error comes from"]
    assert "<svg" in study.cards[0].svg.decode() and ("commit", "abc1234") in study.facts


def test_study_of_shows_method_names_but_exports_variant_names():
    rows = [*errors("ns2d", "rno-two-blocks"), *errors("ns2d", "transolver-sigma")]
    study = study_of(rows, {})
    assert [curve.model for curve in study.curves] == ["RNO", "Transolver-σ", "persistence"]
    assert {row["model"] for row in study.records} == {"rno-two-blocks", "transolver-sigma", "persistence"}
    both = study_of([*rows, *errors("ns2d", "rno", seed=43)], {})
    assert [curve.model for curve in both.curves][0::2] == ["RNO (rno-two-blocks)", "RNO"]


def test_headline_best_model_may_differ_between_first_and_last_lead():
    rows = [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "physolver")]
    first = ("physolver", "relative_l2_lead", 1)
    rows = [{**row, "value": 0.001} if (row["model"], row["metric"], row["lead"]) == first else row for row in rows]
    assert "At lead 1, Physolver is best with 0.100 %; at lead 10, Transolver-σ with " in study_of(rows, {}).summary


def test_headline_ranks_diverged_models_last():
    rows = [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "physolver")]
    rows = [{**row, "value": None} if (row["model"], row["lead"]) == ("transolver-sigma", 10) else row for row in rows]
    summary = study_of(rows, {}).summary
    assert "at lead 10, Physolver with" in summary and "Transolver-σ no longer beats it" in summary


def test_study_of_selects_lowest_seed_initially_and_keeps_all_animations():
    map_rows, arrays = maps_of("transolver-sigma", shift=0.5)
    run = next(iter(arrays))
    other_seed = [{**row, "seed": 41, "run": "other"} for row in map_rows]
    rows = [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "transolver-sigma", seed=41, run="other")]
    study = study_of([*rows, *map_rows, *other_seed], {"maps": {**arrays, "other": arrays[run]}})
    assert study.shown == ("Transolver-σ, seed 41",) and len(study.animations[0].forecasts) == 2


def with_persistence(rows, *values):
    """Replace the rows of persistence by these errors, one per lead."""
    template = next(row for row in rows if row["model"] == "persistence")
    model_rows = [row for row in rows if row["model"] != "persistence"]
    return [*model_rows, *({**template, "lead": lead, "value": value} for lead, value in enumerate(values, 1))]


def errors_of(model, *values, **more):
    rows = errors("ns2d", model, horizon=len(values), **more)
    return [
        {**row, "value": values[row["lead"] - 1]} if row["metric"] == "relative_l2_lead" else row
        for row in rows if row["model"] == model
    ] + [row for row in rows if row["model"] != model]  # fmt: skip


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0.5, 0.6, 0.7), "; Physolver never beats it."),
        ((0.1, 0.3, 0.7), "; Physolver no longer beats it after lead 1."),
        ((0.5, 0.3, 0.1), "; Physolver beats it at 1 of 3 leads."),
        ((0.3, 0.1, 0.3), "; Physolver beats it at 1 of 3 leads."),
        ((0.1, 0.2, 0.2), "at lead 3."),
        ((0.3, 0.3, 0.3), "; Physolver never beats it."),  # a tie is no win
    ],
)
def test_headline_leads_at_which_a_model_beats_persistence(values, expected):
    rows = with_persistence(errors_of("physolver", *values), 0.3, 0.3, 0.3)
    assert f"Persistence has 30.0 % at lead 3{expected.removeprefix('at lead 3')}" in study_of(rows, {}).summary


def test_headline_persistence_may_be_best():
    summary = study_of(with_persistence(errors_of("physolver", 0.5, 0.6), 0.1, 0.2), {}).summary
    assert "At lead 1 and at lead 2, persistence is best, with 10.0 % and 20.0 %." in summary
    assert "The best model at lead 1 is Physolver with 50.0 %. The best model at lead 2" in summary
    crossing = study_of(with_persistence(errors_of("physolver", 0.05, 0.6), 0.1, 0.2), {}).summary
    assert "At lead 1, Physolver is best with 5.00 %; at lead 2, persistence with 20.0 %." in crossing
    level = study_of(with_persistence(errors_of("physolver", 0.1, 0.2), 0.1, 0.2), {}).summary
    assert "Physolver and persistence are best" in level
    several = [*errors_of("physolver", 0.5, 0.6), *errors_of("specsolver", 0.5, 0.7)]
    assert "; Physolver and Specsolver never beat it." in study_of(with_persistence(several, 0.1, 0.2), {}).summary


def test_headline_ties_within_the_spread_over_seeds():
    """In per cent, at lead 1: 11 ± 1.4 and 12 ± 1.4, with a combined spread of 2; at lead 2 they are far apart."""
    rows = [*errors_of("physolver", 0.10, 0.10), *errors_of("physolver", 0.12, 0.101, seed=43)]
    rows += [*errors_of("specsolver", 0.11, 0.30), *errors_of("specsolver", 0.13, 0.301, seed=43)]
    summary = study_of(with_persistence(rows, 0.9, 0.9), {}).summary
    assert "At lead 1 and at lead 2, Physolver is best" in summary
    assert "At lead 1, Specsolver is equally good within the spread over seeds." in summary
    assert "At lead 2, Specsolver is equally good" not in summary


def test_study_of_states_the_sample_of_a_diagnosis_on_fewer_windows():
    rows = errors("ns2d", "physolver", windows=72)
    diagnosis = [{**row, "windows": 4} for row in decomposition("ns2d", "physolver", horizon=6)]
    study = study_of([*rows, *diagnosis], {})
    error_sample, sample = "72 windows of the test split, horizon 10", "4 windows of the test split, horizon 6"
    assert f"on data not used for training: {error_sample}." in study.summary
    assert (
        "The share of the error energy at lead 6 that is propagated" in study.summary
        and f"({sample})." in study.summary
    )
    (card,) = study.cards
    assert card.caption.endswith(f" Measured on {sample} (the errors at the top: {error_sample}).")
    same = study_of([*rows, *({**row, "windows": 72} for row in decomposition("ns2d", "physolver"))], {}).cards[0]
    assert same.caption.endswith(f" Measured on {error_sample}.")
    page = render(study)
    assert f"Means over {error_sample}." in page and f"at every lead, mean over {error_sample}." in page
    assert f"mean over windows ({error_sample})" in study.table.caption


def test_propagation_summary_with_different_horizons():
    long, short = decomposition("ns2d", "physolver"), decomposition("ns2d", "specsolver", horizon=4)
    rows = [*errors("ns2d", "physolver"), *errors("ns2d", "specsolver"), *long, *short]
    summary, shares = study_of(rows, {}).summary, {}
    for row in (*long, *short):
        if row["metric"] == "propagation_share" and row["field"] is None:
            shares[row["model"]] = f"{100 * row['value']:.3g} %"  # the last lead overwrites earlier ones
    text = f"{shares['physolver']} for Physolver at lead 10, {shares['specsolver']} for Specsolver at lead 4"
    assert (
        f"The share of the error energy at the last lead that is propagated from earlier frames is {text} (" in summary
    )


def test_card_captions_state_cases_and_machine():
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


def interventions(model, *metrics):
    """Errors of one run with all operators, and with each given kind disabled."""
    return [finding(facts("ns2d", model), "interventions", metric, 0.1, lead=1) for metric in ("intact", *metrics)]


def test_slice_cards_name_models_without_slices():
    models = ("transolver-sigma", "unet", "ffno", "transolver")
    rows = [row for model in models for row in errors("ns2d", model)]
    rows += interventions("transolver-sigma", "zero_physical", "zero_spectral")
    rows += (
        interventions("unet") + interventions("ffno", "zero_spectral") + interventions("transolver", "zero_physical")
    )
    profile, _, _ = made.corrections("ns2d")
    ours, transolver = made.routing("transolver-sigma", grid=(8, 8)), made.routing("transolver", grid=(8, 8))
    arrays = {
        f"ns2d-{model}-42": routing for model, (_, routing) in (("transolver-sigma", ours), ("transolver", transolver))
    }
    study = study_of([*rows, *profile, *ours[0], *transolver[0], *decomposition("ns2d", "transolver-sigma")],
                     {"routing": arrays})  # fmt: skip
    captions = {card.name: card.caption for card in study.cards}
    expected = " U-Net and F-FNO have no slice operator of Transolver's form: not shown here."
    assert captions["routing"].endswith(expected)
    assert captions["corrections"].endswith(f"{expected} No such records for Transolver: not shown here.")
    assert "not shown" not in captions["decomposition"]  # defined for all models
    assert render(study).count("U-Net and F-FNO have no slice operator") == 2
    alone = study_of(
        [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "unet"), *interventions("unet"), *profile], {}
    )
    assert alone.cards[0].caption.endswith(" U-Net has no slice operator of Transolver's form: not shown here.")
    all_sliced = study_of([*errors("ns2d", "transolver-sigma"), *profile], {})
    assert "not shown" not in all_sliced.cards[0].caption


def test_animations_contain_all_runs_with_the_same_cases():
    sigma_rows, sigma_arrays = maps_of("transolver-sigma", shift=0.5)
    physolver_rows, physolver_arrays = maps_of("physolver", shift=1.0)
    rows = [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "physolver"), *sigma_rows, *physolver_rows]
    (animation,) = study_of(rows, {"maps": {**sigma_arrays, **physolver_arrays}}).animations
    assert animation.leads == (1, 5, 10) and animation.case == "3" and len(animation.forecasts) == 2
    for forecast, shift in zip(animation.forecasts.values(), (0.5, 1.0), strict=True):
        np.testing.assert_allclose(forecast - animation.truth, shift, rtol=1e-6)
    other = {run: {**run_arrays, "leads": run_arrays["leads"] + 1} for run, run_arrays in physolver_arrays.items()}
    (alone,) = study_of(rows, {"maps": {**sigma_arrays, **other}}).animations
    assert len(alone.forecasts) == 1


def test_animations_use_the_common_leads_of_all_runs():
    rows = [*errors("ns2d", "transolver-sigma"), *errors("ns2d", "physolver")]
    many_leads, first = made.maps("ns2d", "transolver-sigma", grid=(6, 5), leads=tuple(range(1, 11)), cases=1)
    few_leads, second = made.maps("ns2d", "physolver", grid=(6, 5), leads=(1, 3, 5, 8, 10), cases=1)
    arrays = {"ns2d-transolver-sigma-42": first, "ns2d-physolver-42": second}
    (animation,) = study_of([*rows, *many_leads, *few_leads], {"maps": arrays}).animations
    assert animation.leads == (1, 3, 5, 8, 10) and len(animation.forecasts) == 2
    np.testing.assert_array_equal(animation.forecasts["Transolver-σ"], first["forecast"][0, [0, 2, 4, 7, 9], ..., 0])
    np.testing.assert_array_equal(animation.forecasts["Physolver"], second["forecast"][0, ..., 0])


def test_animations_over_the_size_budget_drop_leads_then_cases_then_fields(monkeypatch):
    rows, fields = errors("ns2d", "physolver"), ("u", "v")
    map_rows, arrays = made.maps("ns2d", "physolver", grid=(8, 8), leads=tuple(range(1, 11)), fields=fields, cases=4)
    frame = 3 * 64  # truth, forecast and error

    def shape(points):
        monkeypatch.setattr(assemble, "MAX_POINTS", points)
        animations = study_of([*rows, *map_rows], {"maps": {"ns2d-physolver-42": arrays}}).animations
        (leads,) = {animation.leads for animation in animations}
        assert leads[0] == 1 and leads[-1] == 10
        return len(leads), len({each.case for each in animations}), len({each.field for each in animations})

    assert shape(10 * 4 * 2 * frame) == (10, 4, 2)
    assert shape(7 * 4 * 2 * frame) == (7, 4, 2)
    assert shape(5 * 3 * 2 * frame) == (5, 3, 2)
    assert shape(5 * 1 * 1 * frame) == (5, 1, 1)
    assert shape(1) == (5, 1, 1)


@pytest.mark.parametrize("noisy", [False, True])
def test_page_size_stays_below_15_megabytes(noisy):
    """Also for noise, which does not compress."""
    fields, leads, rows, map_arrays = ("u", "v", "w"), tuple(range(1, 21)), [], {}
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(2, 20, 64, 64, 3)).astype(np.float16)
    for model in made.TRIO:
        map_rows, arrays = made.maps("ns2d", model, leads=leads, fields=fields)
        if noisy:
            arrays |= {"truth": noise, "forecast": noise + rng.normal(size=noise.shape).astype(np.float16)}
        rows += [*errors("ns2d", model), *map_rows]
        map_arrays[f"ns2d-{model}-42"] = arrays
    study = study_of(rows, {"maps": map_arrays})
    assert len(study.animations) == 6 and all(animation.leads == leads for animation in study.animations)
    assert len(render(study)) < 15e6


def test_spectra_card_for_periodic_grids():
    rows, arrays = [], {}
    for model in ("transolver-sigma", "physolver"):
        more, arrays[f"ns2d-{model}-42"] = made.trust("ns2d", model)
        rows += [*errors("ns2d", model), *more]
    (card,) = study_of(rows, {"trust": arrays}).cards
    assert card.title == "Energy at each scale" and card.words and "spurious energy. Measured on" in card.caption
    page = render(study_of(rows, {"trust": arrays}))
    assert f'alt="{card.words}"' in page and page == render(study_of(rows, {"trust": arrays}))
    assert study_of(rows, {"trust": {run: {"correlation": np.ones(3)} for run in arrays}}).cards == ()


def test_components_card_states_lower_estimates():
    rows = [*errors("ns2d", "physolver"), *made.components("ns2d", "physolver")]
    (card,) = study_of(rows, {}).cards
    assert card.title == "How errors grow at each scale" and "lower estimates: it is no guarantee" in card.caption


def test_animations_of_a_volume_show_the_middle_planes():
    rows, arrays = maps_of("transolver-sigma", axes=3)
    animations = study_of([*errors("ns2d", "transolver-sigma"), *rows], {"maps": arrays}).animations
    truth = next(iter(arrays.values()))["truth"][0, ..., 0]
    assert [animation.plane for animation in animations] == ["middle x", "middle y", "middle z"]
    np.testing.assert_array_equal(animations[1].truth, truth[:, :, 2])
    assert [[axis.name for axis in animation.axes] for animation in animations] == [["y", "z"], ["x", "z"], ["x", "y"]]


def test_study_of_uses_dimensions_for_times_units_and_axes():
    rows, arrays = maps_of("transolver-sigma")  # 6 points along x, 5 along y
    rows += errors("ns2d", "transolver-sigma")
    dimensions = Dimensions(0.5, "s", (3.0, 2.0), (True, False), "m", {"vorticity": "1/s"})
    study = study_of(rows, {"maps": arrays}, dimensions=dimensions)
    assert "At lead 1 (0.5 s) and at lead 10 (5 s), Transolver-σ is best" in study.summary
    assert study.table.columns[2:5] == ("lead 1, 0.5 s (%)", "lead 5, 2.5 s (%)", "lead 10, 5 s (%)")
    (animation,) = study.animations
    assert animation.unit == "1/s" and animation.axes == (
        Axis("x", 0.5, "m"),
        Axis("y", 0.5, "m"),
    )  # 3 / 6 and 2 / (5 - 1)
    numbered = study_of(rows, {"maps": arrays}, dimensions=Dimensions(step=1.0))
    assert "At lead 1 and at lead 10, Transolver-σ" in numbered.summary  # a time equal to the lead is omitted
    assert numbered.animations[0].axes == (Axis("x"), Axis("y"))


def test_study_of_rejects_several_tasks():
    with pytest.raises(ValueError, match="one page per task"):
        study_of([*errors("ns2d", "physolver"), *errors("kf2d", "physolver")], {})


def test_rendered_study_is_one_file():
    rows, arrays = maps_of("transolver-sigma")
    page = render(study_of([*errors("ns2d", "transolver-sigma"), *decomposition("ns2d", "transolver-sigma"), *rows],
                           {"maps": arrays}))  # fmt: skip
    assert page.count("<script>") == 1 and "http://" not in page.replace("http://www.w3.org", "")
