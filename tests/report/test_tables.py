"""Tables and curves from rows, compared with hand-computed numbers."""

import math

import pytest

from sigmasolver.report.digits import significant, spread
from sigmasolver.report.study import Table
from sigmasolver.report.tables import comparison, curves, to_latex, to_markdown


def row(model, value, metric="relative_l2_lead", lead=None, seed=0, field="vorticity", task="ns2d"):
    return {
        "task": task,
        "model": model,
        "seed": seed,
        "metric": metric,
        "field": field,
        "lead": lead,
        "value": value,
    }


RUNS = (("a", 0.0), ("b", 1e-9))


def per_lead(model, values, **more):
    return [row(model, value, lead=lead, **more) for lead, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.2345, "1.23"),
        (12.345, "12.3"),
        (0.08731, "0.0873"),
        (9.996, "10.0"),
        (999.6, "1000"),
        (1234.0, "1230"),
        (0.0, "0.00"),
        (1234567.0, "1.23e+06"),
        (2e-7, "2.00e-07"),
        (math.inf, "not finite"),
        (math.nan, "not finite"),
    ],
)
def test_significant_three_digits(value, text):
    assert significant(value) == text


def test_spread_deviation_has_the_decimals_of_the_mean():
    assert spread(12.345, 0.678) == "12.3 ± 0.7"
    assert spread(1.2345, 0.678) == "1.23 ± 0.68"
    assert spread(2.5e7, 1.25e6) == "2.50e+07 ± 1.25e+06"
    assert spread(math.nan, 1.0) == "not finite"


def test_comparison_means_and_deviations_over_seeds():
    # Lead 1 in per cent: 1, 2, 6, mean 3, squared distances 4 + 1 + 9 = 14, sample variance 14 / 2 = 7.
    # Whole horizon: 10, 10, 40, mean 20, squared distances 100 + 100 + 400 = 600, sample variance 300.
    records = [row("sigma", value, lead=1, seed=seed) for seed, value in enumerate((0.01, 0.02, 0.06))]
    records += [row("sigma", value, "relative_l2", seed=seed) for seed, value in enumerate((0.1, 0.1, 0.4))]
    table = comparison(records)
    assert table.columns == ("model", "lead 1 (%)", "whole horizon (%)")
    assert table.rows == (("sigma", f"3.00 ± {7**0.5:.2f}", f"20.0 ± {300**0.5:.1f}"),)
    assert "over seeds" in table.caption


def test_comparison_columns_first_middle_last_lead_and_horizon():
    values = [lead / 100 for lead in range(1, 17)]
    table = comparison([*per_lead("sigma", values), row("sigma", 0.123, "relative_l2")])
    assert table.columns == ("model", "lead 1 (%)", "lead 8 (%)", "lead 16 (%)", "whole horizon (%)")
    assert table.rows == (("sigma", "1.00", "8.00", "16.0", "12.3"),)
    assert "seeds" not in table.caption


@pytest.mark.parametrize(("horizon", "shown"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (10, [1, 5, 10])])
def test_comparison_short_horizons_repeat_no_column(horizon, shown):
    table = comparison(per_lead("sigma", [0.1] * horizon))
    assert table.columns[1:] == tuple(f"lead {lead} (%)" for lead in shown)


def test_comparison_bold_includes_persistence_in_the_last_row():
    records = per_lead("persistence", [0.001, 0.9])
    records += per_lead("first", [0.02, 0.03]) + per_lead("second", [0.01, 0.04])
    records += [row("first", 1245289, "parameters", field=None), row("second", 7, "parameters", field=None)]
    table = comparison(records)
    assert table.columns == ("model", "parameters", "lead 1 (%)", "lead 2 (%)")
    assert table.rows == (
        ("first", "1,245,289", "2.00", "3.00"),
        ("second", "7", "1.00", "4.00"),
        ("persistence", "–", "0.100", "90.0"),
    )
    assert table.bold == {(2, 2), (0, 3)}
    assert "Persistence repeats" in table.caption


def test_comparison_model_worse_than_persistence_is_not_bold():
    table = comparison(per_lead("persistence", [0.1, 0.2]) + per_lead("loser", [0.5, 0.6]))
    assert [cells[0] for cells in table.rows] == ["loser", "persistence"] and table.bold == {(1, 1), (1, 2)}


def test_comparison_caption_states_the_sample():
    facts = {"run": "r", "part": "test", "windows": 72, "horizon": 2}
    rows = [{**r, **facts} for r in per_lead("sigma", [0.1, 0.2])]
    assert "mean over windows (72 windows of the test split, horizon 2);" in comparison(rows).caption
    cohort_caption = comparison([{**r, "cohort": "rollout"} for r in rows]).caption
    assert "(72 windows of the test split, horizon 2, cohort rollout)" in cohort_caption
    other_run = [{**r, **facts, "run": "s", "windows": 1} for r in per_lead("other", [0.1, 0.2])]
    assert "(sigma: 72 windows of the test split, horizon 2; other: 1 window of the test split, horizon 2)" in (
        comparison([*rows, *other_run]).caption
    )
    assert "% Relative L2 error on ns2d, mean over windows (72 windows" in to_latex(comparison(rows))


def test_comparison_counts_trivial_baselines_once():
    runs = [[row(model, 0.2, lead=1), row("training-mean", 0.9 + tiny, lead=1, seed=None)] for model, tiny in RUNS]
    other = [row("training-mean", value, "realm_error", seed=None) for value in (1.0, 2.0)]  # ignored
    table = comparison([record for run in runs for record in run] + other)
    assert table.rows == (("a", "20.0"), ("b", "20.0"), ("training-mean", "90.0"))
    assert table.caption.endswith("Training-mean predicts the mean of the training fields.")
    assert comparison([row("persistence", None, lead=1, seed=None)] * 2).rows == (("persistence", "not finite"),)


def test_comparison_bold_ties_and_non_finite_values():
    records = [row("a", 0.012301, lead=1), row("b", 0.012299, lead=1), row("c", math.nan, lead=1)]
    records += [row("d", None, lead=1), row("e", 0.0124, lead=1)]
    table = comparison(records)
    assert [cells[1] for cells in table.rows] == ["1.23", "1.23", "not finite", "not finite", "1.24"]
    assert table.bold == {(0, 1), (1, 1)}


def test_comparison_non_finite_seed_makes_the_mean_non_finite():
    table = comparison([row("a", 0.01, lead=1), row("a", math.nan, lead=1, seed=1)])
    assert table.rows == (("a", "not finite"),)
    assert not table.bold


def test_comparison_column_blocks_per_field():
    parts = per_lead("a", [0.01, 0.02], field="pressure") + per_lead("a", [0.03, 0.06], field="density")
    table = comparison(parts)
    assert table.columns[1:] == tuple(
        f"{field}: lead {lead} (%)" for field in ("pressure", "density") for lead in (1, 2)
    )
    assert table.rows == (("a", "1.00", "2.00", "3.00", "6.00"),)
    assert curves(parts)[0].errors == pytest.approx((0.02, 0.04))  # the mean over both fields
    mean_over_fields = comparison(parts + per_lead("a", [0.5, 0.7], field="all"))
    assert mean_over_fields.rows == (("a", "50.0", "70.0"),)
    assert curves(parts + per_lead("a", [0.5, 0.7], field="all"))[0].errors == (0.5, 0.7)


def test_curves_are_means_over_seeds_with_gaps():
    records = per_lead("persistence", [0.5, 0.6, 0.7]) + per_lead("a", [0.1, 0.2, math.nan])
    records += [*per_lead("a", [0.3, 0.6, 0.1], seed=1), row("a", 5, "parameters")]
    first, last = curves(records)
    assert (first.model, last.model) == ("a", "persistence")
    assert first.leads == (1, 2, 3)
    assert first.errors[:2] == pytest.approx((0.2, 0.4))
    assert math.isnan(first.errors[2])


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "no records"),
        ([{"task": "ns2d"}], "no model"),
        ([row("a", 1, lead=1), row("a", 1, lead=2, task="kf2d")], "ns2d and of kf2d"),
        ([row("a", 1, lead=1), row("a", 2, lead=1)], "two values of relative_l2_lead of a at lead 1 for seed 0"),
        ([row("persistence", v, lead=1, seed=None) for v in (0.5, 0.6)], "0.500 and 0.600: .* not tested on the same"),
        ([row("training-mean", v, seed=None) for v in (0.5, 0.6)], "not trained on the same cases or not tested on"),
        ([row("persistence", v, lead=1, seed=None) for v in (0.5, None)], "0.500 and not finite"),
        ([row("a", 1, "speed")], "no errors"),
        (
            [row("a", 1, lead=1), row("a", 5, "parameters"), row("a", 6, "parameters", seed=1)],
            "5 and 6 parameters",
        ),
    ],
)
def test_comparison_rejects_invalid_records(records, message):
    with pytest.raises(ValueError, match=message) as caught:
        comparison(records)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


TABLE = Table(("model", "lead 1 (%)"), (("a|b_c\\", "1.23 ± 0.04"), ("σ & co", "5")), frozenset({(0, 1)}))


def test_to_markdown_escapes_cells():
    assert to_markdown(TABLE) == (
        "| model | lead 1 (%) |\n| :--- | ---: |\n| a\\|b_c\\\\ | **1.23 ± 0.04** |\n| σ & co | 5 |\n"
    )


def test_to_latex_escapes_special_characters():
    lines = to_latex(TABLE).splitlines()
    assert lines[0] == "\\begin{tabular}{lr}"
    assert lines[2] == "model & lead 1 (\\%) \\\\"
    assert lines[4] == "a|b\\_c\\textbackslash{} & \\textbf{1.23 $\\pm$ 0.04} \\\\"
    assert lines[5] == "$\\sigma$ \\& co & 5 \\\\"
    assert lines[-1] == "\\end{tabular}"


def test_curves_spread_over_seeds_and_windows():
    # Seeds at lead 1: 1, 2, 6, sample variance 7 as above. Deviations over windows 3 and 4 and 5: root of 50 / 3.
    records = [
        {**row("sigma", value, lead=1, seed=seed), "deviation": deviation}
        for seed, (value, deviation) in enumerate(((1.0, 3.0), (2.0, 4.0), (6.0, 5.0)))
    ]
    records += [{**row("persistence", 0.5, lead=1, seed=None), "deviation": None}] * 2
    sigma, persistence = curves(records)
    assert sigma.over_seeds == pytest.approx((7**0.5,)) and sigma.over_windows == pytest.approx(((50 / 3) ** 0.5,))
    assert (sigma.seeds, persistence.seeds) == (3, 1)
    assert math.isnan(persistence.over_seeds[0]) and math.isnan(persistence.over_windows[0])
    two = [{**r, "field": field, "deviation": 1.0} for field in "uv" for r in per_lead("a", [0.1])]
    assert curves(two)[0].over_windows == ()  # unknown for a mean over fields
