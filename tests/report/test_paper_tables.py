"""Tables of the paper with measured rows beside the published ones."""

import pytest

from sigmasolver.report.paper_tables import TABLES
from sigmasolver.report.tables import to_latex, to_markdown
from tests.report.made import COSTS, SWEEPS, decomposition, efficiency, errors, facts, row, scaling


def make(name, rows):
    return TABLES[name].make(rows)


def lines(table, model):
    return [cells for cells in table.rows if cells[0] == model]


def main_rows(model, values, seed=42):
    """Rows of the main table with these values (fractions): darcy p, ns2d ω, kf2d avg., final."""
    places = (
        ("darcy", "relative_l2", "pressure"), ("ns2d", "relative_l2", "vorticity"),
        ("kf2d", "relative_l2", "vorticity"), ("kf2d", "relative_l2_final", "vorticity"),
    )  # fmt: skip
    return [
        row(facts(task, model, seed), metric, value, field=field)
        for (task, metric, field), value in zip(places, values, strict=True)
    ]


def test_measured_rows_stand_below_the_published_ones():
    seeds = [(0.0041, 0.028, 0.03, 0.05), (0.0043, 0.030, 0.03, 0.05)]
    rows = [one for seed, values in enumerate(seeds) for one in main_rows("transolver-sigma", values, 42 + seed)]
    rows += main_rows("ffno", (0.008, 0.02, 0.25, 0.4)) + main_rows("mine", (0.009, 0.09, 0.2, 0.3))
    rows += errors("ns2d", "physolver")[-2:-1]  # a yardstick
    table = make("main", rows)
    assert table.columns[:4] == ("model", "from", "Darcy p", "NS2D ω")
    assert len(table.rows) == 13 + 3
    paper, ours = lines(table, "Transolver-σ")
    assert paper[:4] == ("Transolver-σ", "paper", "0.40 ± 0.01", "2.79 ± 0.05")
    # Sample deviation of 0.41 and 0.43 is 0.02/√2 = 0.014, of 2.8 and 3.0 it is 0.14.
    assert ours[:5] == ("Transolver-σ", "ours", "0.420 ± 0.014", "2.90 ± 0.14", "3.00 ± 0.00")
    assert ours[6:] == ("–",) * 4
    assert lines(table, "F-FNO") == [
        ("F-FNO", "paper", "0.77", "23.22", "24.53", "38.61", "23.03", "32.64", "37.13", "12.36"),
        ("F-FNO", "ours", "0.800", "2.00", "25.0", "40.0", "–", "–", "–", "–"),
    ]
    assert table.rows[-1][:3] == ("mine", "ours", "0.900")
    names = [cells[:2] for cells in table.rows]
    sigma, theirs, ffno = (
        names.index(pair) for pair in (("Transolver-σ", "ours"), ("Transolver-σ", "paper"), ("F-FNO", "ours"))
    )
    assert {(theirs, column) for column in range(2, 10)} <= table.bold
    assert {(sigma, 2), (ffno, 3), (sigma, 4), (sigma, 5)} <= table.bold and len(table.bold) == 8 + 4
    assert "tab:pde-main-results" in table.caption


def test_higher_correlation_is_better_and_parts_are_apart():
    def realm(model, corr, train, test):
        source = facts("ignit-hit", model)
        return [
            row(source, "correlation", corr, field="all"),
            row({**source, "part": "train"}, "realm_error", train),
            row(source, "realm_error", test),
        ]

    table = make("realm", realm("transolver-sigma", 0.98, 0.5, 1.6) + realm("ffno", 0.97, 0.4, 1.9))
    (_, sigma), (_, ffno) = lines(table, "Transolver-σ"), lines(table, "F-FNO")
    assert sigma[2:6] == ("98.0", "0.500", "–", "1.60") and ffno[2:6] == ("97.0", "0.400", "–", "1.90")
    places = {cells: index for index, cells in enumerate(table.rows)}
    assert {(places[sigma], 2), (places[ffno], 3), (places[sigma], 5)} <= table.bold
    crop = next(i for i, cells in enumerate(table.rows) if cells[:2] == ("CROP", "paper"))
    assert (crop, 3) in table.bold  # the one column that the paper does not lead


def test_parameters_are_the_mean_over_tasks_and_never_bold():
    counts = (("fsi", 1e6), ("foil", 3e6), ("ns2d", 9e6))
    table = make("realpdebench", [row(facts(task, "ffno"), "parameters", count) for task, count in counts])
    assert [cells[1:3] for cells in lines(table, "F-FNO")] == [("ours", "2.00")]  # the paper has none there
    assert not [place for place in table.bold if place[1] == 2]


def test_ablations_and_slice_updates_find_their_rows():
    made = make("ablations", [row(facts("darcy", "no-context"), "relative_l2", 0.005, field="pressure")])
    assert lines(made, "w/o Shared CPE")[1][1:3] == ("ours", "0.500")
    made = make("slice-updates", [row(facts("ns2d", "transolver-srpa"), "relative_l2", 0.07, field="vorticity")])
    assert lines(made, "Transolver with SRPA") == [
        ("Transolver with SRPA", "paper", "0.4275", "6.6735"),
        ("Transolver with SRPA", "ours", "–", "7.00"),
    ]


def test_seeds_beside_the_strongest_baseline_of_the_table():
    rows = [
        one for seed in range(3) for one in main_rows("transolver-sigma", (0.004 + 1e-4 * seed, 0.03, 0.1, 0.1), seed)
    ]
    rows += main_rows("ffno", (0.008, 0.02, 0.2, 0.3)) + main_rows("transolver", (0.007, 0.09, 0.3, 0.4))
    rows += main_rows("mine", (0.001, 0.001, 0.001, 0.001))  # no baseline of the paper
    table = make("canonical-seeds", rows)
    assert table.columns[0] == "quantity" and len(table.rows) == 8
    assert table.rows[0] == ("Darcy p", "0.45", "0.700 (Transolver)", "0.40 ± 0.01", "0.410 ± 0.010")
    assert table.rows[1][2:] == ("2.00 (F-FNO)", "2.79 ± 0.05", "3.00 ± 0.00")
    assert table.rows[4] == ("IT3D u", "12.70", "–", "10.80 ± 0.16", "–")
    assert {(0, 3), (0, 4), (1, 3), (1, 2)} <= table.bold and (1, 4) not in table.bold
    assert len(make("realpdebench-seeds", [row(facts("fsi", "ffno"), "rmse", 0.01, field="all")]).rows) == 12


def test_scaling_with_deviations_over_cases():
    rows = [one for sweep, points in SWEEPS.items() for point in points for one in scaling(sweep, *point)]
    table = make("scaling", rows)
    assert len(table.rows) == 15
    assert table.rows[0] == ("training cases", "1,000", "1,245,289", "3.912 ± 1.259", "4.10 ± 1.37")
    assert table.rows[10] == ("hidden width", "32", "125,161", "3.170 ± 1.041", "3.30 ± 1.10")
    assert table.bold == {(line, column) for line in (4, 9, 14) for column in (3, 4)}
    one = make("scaling", scaling("width", 48, 2.5))
    assert [cells[1] for cells in one.rows if cells[0] == "hidden width"] == ["32", "48", "64", "128", "192", "256"]
    with pytest.raises(ValueError, match=r"ns2d-ffno-42 is no run of a scaling sweep.*sigmasolver suite scaling"):
        make("scaling", errors("ns2d", "ffno"))


def test_cohorts_tell_the_block_by_the_leads_without_propagation():
    table = make("cohorts", decomposition("kf2d", "physolver", 16, 4) + decomposition("mine", "physolver", 6, 6))
    assert lines(table, "KF2D") == [("KF2D", "400", "200", "4", "4", "16", "16", "none")]
    assert lines(table, "NS2D") == [("NS2D", "200", "–", "1", "–", "10", "–", "–")]
    assert lines(table, "mine") == [("mine", "–", "200", "–", "6", "–", "6", "none")]
    two = decomposition("ns2d", "physolver") + [{**one, "windows": 50} for one in decomposition("ns2d", "specsolver")]
    assert lines(make("cohorts", two), "NS2D")[0][1:3] == ("200", "200 or 50")
    fixed = [{**one, "cohort": "decomposition"} for one in decomposition("ns2d", "physolver")]
    assert lines(make("cohorts", fixed), "NS2D")[0][-1] == "decomposition"


def test_efficiency_beside_the_numbers_of_the_text():
    rows = [one for model, values in COSTS["ns2d"].items() for one in efficiency("ns2d", model, values)]
    table = make("efficiency", rows)
    sigma = next(cells for cells in table.rows if cells[:2] == ("NS2D", "Transolver-σ"))
    assert sigma[2:] == ("19.44", "19.4", "–", "–", "200.132", "200 ± 6", "–", "6200")
    names = [cells[:2] for cells in table.rows]
    assert (names.index(("NS2D", "Transolver-σ")), 3) in table.bold
    assert (names.index(("NS2D", "Transolver")), 7) in table.bold
    assert ("KF2D", "HPM") in names  # printed, not measured


def test_the_comparison_takes_free_evaluations_alone():
    rows = errors("ns2d", "physolver") + errors("ns2d", "physolver", protocol="teacher-forced")
    rows += [{**one, "diagnostic": "maps"} for one in rows]
    table = make("comparison", rows)
    assert [cells[0] for cells in table.rows] == ["physolver", "persistence"]


@pytest.mark.parametrize("name", ["main", "ablations", "slice-updates", "realm", "realpdebench", "canonical-seeds"])
def test_runs_that_have_nothing_of_a_table_are_told_the_suite(name):
    suite = {"ablations": "ablations", "slice-updates": "slice-updates"}.get(name, "main")
    with pytest.raises(
        ValueError, match=f"the table {name}.*; make them with: sigmasolver suite {suite} and"
    ) as caught:
        make(name, [row(facts("mine", "ffno"), "relative_l2", 0.1, field="u")])
    assert "\n" not in str(caught.value)


def test_two_evaluations_of_one_run_are_refused():
    one = row(facts("ns2d", "ffno"), "relative_l2", 0.1, field="vorticity")
    with pytest.raises(ValueError, match="--where horizon=10"):
        make("main", [one, {**one, "horizon": 20}])


def test_both_writers_take_every_table():
    table = make("slice-updates", [row(facts("ns2d", "linearno"), "relative_l2", 0.07, field="vorticity")])
    assert "| LinearNO | ours | – | **7.00** |" in to_markdown(table)
    assert "model & from & Darcy p & NS2D $\\omega$ \\\\" in to_latex(table)
    ablations = make("ablations", [row(facts("ns2d", "no-context"), "relative_l2", 0.07, field="vorticity")])
    assert "SRPA $\\rightarrow$ PA & paper" in to_latex(ablations)
