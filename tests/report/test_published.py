"""The published numbers: digits as printed, and consistent with other statements of the paper."""

import pytest

from sigmasolver.models import SolverConfig, count_parameters
from sigmasolver.recipes import suite_of
from sigmasolver.recipes.rows import FORMS
from sigmasolver.report.published import (
    METHODS,
    MODEL_LABELS,
    OURS,
    by_method,
    cohorts,
    forms_in,
    model_label,
    numbers,
    seed_tables,
    sweeps,
    tables,
)
from sigmasolver.tasks import TASKS, field_groups

PRINTED = [
    ("main", "unet", 0, "0.80"),
    ("main", "vit", 7, "12.86"),
    ("main", "ffno", 1, "23.22"),
    ("main", "transolver-plus", 3, "79.07"),
    ("main", "eddyformer", 5, "19.43"),
    ("main", "linearno", 6, "50.04"),
    ("main", "transolver-sigma", 4, "10.80±0.16"),
    ("realpdebench", "wdno", 0, "233.15"),
    ("realpdebench", "dpot-large", 10, "2.08"),
    ("realpdebench", "transolver", 11, "78.25"),
    ("realpdebench", "transolver-sigma", 12, "0.18"),
    ("ablations", "no-spectral", 1, "7.94"),
    ("ablations", "slice-replace", 2, "19.53"),
    ("slice-updates", "transolver-keep", 1, "7.7124"),
    ("slice-updates", "transolver-srpa", 0, "0.4275"),
    ("realm", "crop", 1, "0.20"),
    ("realm", "ono", 7, "70.96"),
    ("realm", "transolver-sigma", 0, "98.49"),
]


def row_of(name, model):
    return next(row for candidate, _, row in tables()[name].rows if candidate == model)


@pytest.mark.parametrize(("name", "model", "column", "text"), PRINTED)
def test_published_digits_as_printed(name, model, column, text):
    assert row_of(name, model)[column].text == text


def test_published_table_sizes_and_sources():
    shapes = {name: (table.source, len(table.rows), len(table.columns)) for name, table in tables().items()}
    assert shapes == {
        "main": ("tab:pde-main-results", 13, 8),
        "realpdebench": ("tab:realpdebench-results", 11, 13),
        "ablations": ("tab:ablation-components", 8, 4),
        "slice-updates": ("tab:slice-attention-analysis", 4, 2),
        "realm": ("tab:realm-results", 12, 8),
    }
    for table in tables().values():
        assert len({model for model, _, _ in table.rows}) == len(table.rows)
        for _, _, row in table.rows:
            assert len(row) == len(table.columns)
            assert all(number.source == table.source and number.value > 0 for number in row)


def strongest(name, column, higher=False):
    values = [row[column].value for model, _, row in tables()[name].rows if model != OURS]
    return max(values) if higher else min(values)


def test_published_promotions_match_the_main_table():
    """The last line of the table, and its mean over benchmarks in the text: 33.4 %.

    The paper prints 19.4 for the pressure of IT3D and 33.4 in all, where its rounded errors give 19.455 and 33.45.
    """
    ours = row_of("main", OURS)
    assert [number.value for number in tables()["main"].strongest()] == [strongest("main", index) for index in range(8)]
    assert tables()["realm"].strongest()[0].text == "97.36"  # higher correlation is better
    gains = [100 * (1 - number.value / strongest("main", index)) for index, number in enumerate(ours)]
    assert gains == pytest.approx([11.1, 34.0, 80.1, 81.2, 15.0, 19.4, 25.4, 23.1], abs=0.0551)
    darcy, ns2d, kf2d, it3d, smoke3d = (
        gains[0], gains[1], sum(gains[2:4]) / 2, sum(gains[4:6]) / 2, sum(gains[6:]) / 2,
    )  # fmt: skip
    assert (darcy + ns2d + kf2d + it3d + smoke3d) / 5 == pytest.approx(33.4, abs=0.0551)


def test_published_numbers_match_reductions_in_the_text():
    ours, unet = row_of("realpdebench", OURS), row_of("realpdebench", "unet")
    assert f"{100 * (1 - ours[7].value / strongest('realpdebench', 7)):.1f}" == "53.0"  # Foil RMSE
    assert f"{100 * (1 - ours[12].value / strongest('realpdebench', 12)):.1f}" == "25.0"  # Combustion fRMSE
    assert f"{100 * ours[0].value / unet[0].value:.1f}" == "13.6"  # parameters
    keep, residual = row_of("slice-updates", "transolver-keep"), row_of("slice-updates", "transolver-srpa")
    assert [f"{100 * (1 - b.value / a.value):.1f}" for a, b in zip(keep, residual, strict=True)] == ["9.5", "13.5"]
    sequential = min(row_of("ablations", name)[2].value for name in MODEL_LABELS if "-then-" in name)
    assert f"{100 * (1 - row_of('ablations', OURS)[2].value / sequential):.1f}" == "16.0"


def test_published_numbers_transolver_sigma_is_best_where_claimed():
    for name, column, higher in [(n, c, col.higher) for n, t in tables().items() for c, col in enumerate(t.columns)]:
        if name == "slice-updates" or tables()[name].columns[column].metric == "parameters":
            continue
        ours, best = row_of(name, OURS)[column].value, strongest(name, column, higher)
        if (name, column) == ("realm", 1):  # CROP is better on the training split of IgnitHIT
            assert best == 0.20 < ours
        elif (name, column) == ("ablations", 0):  # tied with the variant without a spectral branch
            assert best == ours == 0.40
        else:
            assert ours > best if higher else ours < best, (name, column)


def test_published_seed_tables_match_their_tables():
    assert {name: table.source for name, table in seed_tables().items()} == {
        "canonical-seeds": "tab:canonical-seed-results",
        "realpdebench-seeds": "tab:external-seed-results",
        "realm-seeds": "tab:realm-standard-deviations",
    }
    for seeds in seed_tables().values():
        columns, row = tables()[seeds.of].columns, row_of(seeds.of, OURS)
        for index, (column, best, ours) in enumerate(zip(columns, seeds.strongest, seeds.ours, strict=True)):
            if best is None:
                assert ours is None and column.metric == "parameters"
                continue
            assert best.value == strongest(seeds.of, index, column.higher)
            assert ours.deviation > 0
            # Both are the same mean, rounded to two and to three digits.
            assert abs(ours.value - row[index].value) <= 0.005
    assert seed_tables()["realm-seeds"].ours[0].text == "98.493±0.267"
    assert seed_tables()["realpdebench-seeds"].ours[11].text == "52.857±0.550"


def test_published_sweeps_decrease_and_match_the_text():
    data, grid, width = (sweeps()[name] for name in ("data", "grid", "width"))
    for sweep, gain in ((data, "19.7"), (grid, "31.0"), (width, "46.0")):
        errors = [number.value for number in sweep.errors]
        assert errors == sorted(errors, reverse=True)
        assert f"{100 * (1 - errors[-1] / errors[0]):.1f}" == gain
    assert data.errors[0].text == grid.errors[0].text == "3.912±1.259"
    assert width.errors[2].text == "1.832±0.388" and width.errors[2].deviation == 0.388
    counts = [
        count_parameters(OURS, SolverConfig((211, 211), 1, 1, width=value, slices=128, modes=8))
        for value in width.values
    ]
    assert counts == list(width.parameters) == [125161, 462937, 1776489, 3946377, 6964889]
    assert set(data.parameters) == set(grid.parameters) == {1245289}


def test_published_cohorts_match_the_tasks():
    assert {task: (c.samples, c.block, c.horizon) for task, c in cohorts().items()} == {
        "ns2d": (200, 1, 10),
        "kf2d": (400, 4, 16),
        "it3d": (100, 2, 10),
        "smoke3d": (200, 4, 16),
    }
    for task, cohort in cohorts().items():
        assert (cohort.block, cohort.horizon) == (TASKS[task].block, TASKS[task].horizon)


def test_published_efficiency_numbers_match_the_text():
    values = {key: number.value for key, number in numbers("app:efficiency-measurements").items()}
    ours, other = values["ns2d", OURS, "parameter_megabytes"], values["ns2d", "factformer", "parameter_megabytes"]
    assert (f"{other / ours:.1f}", round(100 * (1 - ours / other))) == ("3.4", 71)
    speed = values["ns2d", "factformer", "seconds_per_epoch"] / values["ns2d", OURS, "seconds_per_epoch"]
    assert f"{speed:.2f}" == "1.05"
    assert f"{values['kf2d', OURS, 'position_megabytes']:.2f}" == f"{128 * 128 * 64 * 4 / 1e6:.2f}"


def test_published_diagnoses_match_the_text():
    energies = {key[1:]: number.value for key, number in numbers("app:exact-error-decomposition").items()}
    for model in ("physolver", OURS):  # propagation exceeds injection at the last lead
        assert energies[model, "propagation_relative"] > energies[model, "injection_relative"]
    for part in ("injection_relative", "propagation_relative"):
        assert energies[OURS, part] < energies["physolver", part]
    layers = {key: number.value for key, number in numbers("app:srpa-layerwise-corrections").items()}
    assert layers["kf2d", OURS, "gamma_layer_4"] > layers["kf2d", OURS, "gamma_layer_2"]
    assert layers["kf2d", OURS, "correction_ratio_layer_4"] < layers["kf2d", OURS, "correction_ratio_layer_2"]
    assert layers["darcy", OURS, "correction_ratio_layer_1"] > 100 * layers["darcy", OURS, "correction_ratio_layer_2"]


def test_published_columns_match_rows_of_an_evaluation():
    for table in tables().values():
        for column in table.columns:
            assert column.part in ("train", "validation", "test")
            if column.field is None or column.task is None:
                continue
            fields = TASKS[column.task].targets
            named = {*fields, *field_groups(fields), *(["all"] if len(fields) > 1 else [])}
            assert column.field in named, column.heading


def test_model_label_matches_the_paper():
    assert model_label("transolver-sigma") == "Transolver-σ"
    assert model_label("ffno") == "F-FNO"
    assert model_label("no-context") == "w/o Shared CPE"
    assert model_label("specsolver") == "Specsolver"
    assert model_label("mine") == "mine"
    assert model_label("hpm-frozen") == "HPM (hpm-frozen)"


def test_by_method_maps_all_suite_models_to_rows_of_the_paper():
    for suite in ("main", "efficiency", "comparison"):
        rows = [{"task": recipe.task.name, "model": recipe.model.name} for recipe in suite_of(suite).values()]
        assert {row["model"] for row in by_method(rows)} <= MODEL_LABELS.keys()
    assert {(METHODS[form], form) for form in METHODS if form != "hpm-frozen"} == {
        (model, form) for (_, model), form in FORMS.items()
    }


def test_by_method_keeps_names_of_several_variants():
    rows = [{"task": "darcy", "model": "unet-batchnorm"}, {"task": "kf2d", "model": "unet"}]
    named = by_method(rows)
    assert [row["model"] for row in named] == ["unet", "unet"] and forms_in(named) == "U-Net is unet-batchnorm on Darcy"
    both = [*rows, {"task": "darcy", "model": "unet"}]
    assert by_method(both) == both and forms_in(both) == ""
