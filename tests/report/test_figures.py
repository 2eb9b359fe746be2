"""All figures from synthetic records: the data of the artists agree with the records."""

import ast
import itertools
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.image import AxesImage

import sigmasolver.report
from sigmasolver.report.figures import FIGURES, Material, save
from sigmasolver.report.figures.components import components
from sigmasolver.report.figures.curves import reductions, rollout, scaling, symmetry, teacher_forcing, training_cost
from sigmasolver.report.figures.energy import decomposition, stack
from sigmasolver.report.figures.layers import attention_scale, corrections, montage, routing
from sigmasolver.report.figures.maps import case_study, cases_of, faces, maps
from sigmasolver.report.figures.style import COLOURS, line_styles
from sigmasolver.report.published import sweeps
from tests.report import made
from tests.report.made import maps_of_models

TRIO = made.TRIO


def curves_of(axes):
    return [(line.get_xdata(), line.get_ydata(), line) for line in axes.get_lines()]


def absolute_error(arrays):
    """|forecast - truth| of the first case, (leads, *grid, fields)."""
    return np.abs(arrays["forecast"][0].astype(float) - arrays["truth"][0].astype(float))


def images(figure):
    """Images of a figure, without colour bars."""
    return [artist for axes in figure.axes for artist in axes.get_children() if isinstance(artist, AxesImage)]


def is_error_row(row, model, protocol, seed):
    expected = ("relative_l2_lead", model, protocol, seed)
    return (row["metric"], row["model"], row["protocol"], row["seed"]) == expected


def test_teacher_forcing_curves_are_means_over_seeds():
    rows = [
        row
        for model in TRIO[1:]
        for seed in (42, 43, 44)
        for protocol in ("free", "teacher-forced")
        for row in made.errors("ns2d", model, seed, protocol=protocol)
    ]
    (axes,) = teacher_forcing(rows).axes
    drawn = {(line.get_color(), line.get_linestyle()): y for _, y, line in curves_of(axes)}
    styles = line_styles(TRIO[1:])
    for model in TRIO[1:]:
        for protocol, dashes in (("free", "-"), ("teacher-forced", "--")):
            values = [
                [100 * row["value"] for row in rows if is_error_row(row, model, protocol, seed)]
                for seed in (42, 43, 44)
            ]
            assert np.shape(values) == (3, 10)
            assert drawn[styles[model].colour, dashes] == pytest.approx(np.mean(values, axis=0))
    assert len(axes.collections) == 4  # the deviation over seeds, shaded
    assert axes.get_xlabel() == "lead (frames)" and axes.get_ylabel() == "relative L2 error (%)"


def test_teacher_forcing_needs_both_protocols():
    with pytest.raises(ValueError, match="create it with: sigmasolver evaluate ns2d-ffno-42 --protocol teacher-forced"):
        teacher_forcing(made.errors("ns2d", "ffno"))


def test_rollout_panels_and_reductions_match_hand_computed_values():
    rows = [row for task in ("ns2d", "smoke3d") for model in TRIO for row in made.errors(task, model)]
    figure = rollout(rows)
    first, second, bars = figure.axes
    for axes, task, field in ((first, "ns2d", "vorticity"), (second, "smoke3d", "all")):
        drawn_of = dict(zip(TRIO, (y for _, y, _ in curves_of(axes)), strict=False))  # persistence comes last
        for model, drawn in drawn_of.items():
            expected = [
                100 * r["value"]
                for r in rows
                if (r["task"], r["model"], r["metric"], r["field"]) == (task, model, "relative_l2_lead", field)
            ]
            assert drawn == pytest.approx(expected) and len(expected) == 10
        assert "n = 200" in axes.get_title(loc="left")
        curve = {model: np.mean(y) for model, y in drawn_of.items()}
        reduction = 100 * (1 - curve["transolver-sigma"] / min(curve["physolver"], curve["specsolver"]))
        assert reductions(rows)[task] == pytest.approx(reduction)
    (container,) = [artist for artist in bars.containers if isinstance(artist, BarContainer)]
    assert [bar.get_width() for bar in container] == pytest.approx(list(reductions(rows).values()))
    assert reductions(made.errors("ns2d", "physolver")) == {}
    ours = made.errors("ns2d", "transolver-sigma")
    diverged = [{**row, "value": None} if (row["model"], row["lead"]) == (TRIO[0], 10) else row for row in ours]
    assert reductions([*diverged, *made.errors("ns2d", "physolver")]) == {}


def test_rollout_includes_persistence_in_reductions():
    rows = [row for model in ("transolver-sigma", "physolver") for row in made.errors("ns2d", model)]
    template = next(row for row in rows if row["model"] == "persistence")
    model_rows = [row for row in rows if row["model"] != "persistence"]
    persistence = [{**template, "lead": lead, "value": 0.001 * lead} for lead in range(1, 11)]
    axes, *_ = rollout([*model_rows, *persistence, *({**row, "run": "ns2d-physolver-42"} for row in persistence)]).axes
    *_, (leads, values, _) = curves_of(axes)
    assert leads == pytest.approx(range(1, 11)) and values == pytest.approx(np.arange(1, 11) / 10)
    ours = np.mean([row["value"] for row in model_rows if is_error_row(row, "transolver-sigma", "free", 42)])
    assert reductions([*model_rows, *persistence])["ns2d"] == pytest.approx(100 * (1 - ours / 0.0055)) and ours > 0.0055
    with pytest.raises(ValueError, match="not tested on the same samples"):
        rollout([*model_rows, *persistence, {**persistence[0], "run": "ns2d-physolver-42", "value": 0.5}])


@pytest.mark.parametrize("scale", [0.002, 0.05, 1.0, 30.0])
def test_rollout_gain_labels_do_not_overlap(scale):
    """Titles and bar labels stay inside the figure and do not overlap the task names."""
    rows = [row for task in ("ns2d", "kf2d", "it3d", "controlled-cylinder")
            for model in ("transolver-sigma", "physolver") for row in made.errors(task, model)]  # fmt: skip
    rows = [{**row, "value": row["value"] * scale} if row["model"] == "physolver" else row for row in rows]
    figure = FIGURES["rollout"].with_sample(Material(rows))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    bars, renderer = figure.axes[-1], canvas.get_renderer()
    for text in (bars._left_title, bars.xaxis.label, *bars.texts):
        box = text.get_window_extent(renderer)
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 + 1, text.get_text()
    names = [label.get_window_extent(renderer) for label in bars.get_yticklabels()]
    assert bars.texts and not any(
        text.get_window_extent(renderer).overlaps(name) for text in bars.texts for name in names
    )


@pytest.mark.parametrize(("letters", "columns"), [(1, 6), (30, 3), (50, 2), (80, 1)])
def test_legend_has_as_many_columns_as_fit(letters, columns):
    names = [f"{'model' * letters}"[:letters] + str(number) for number in range(7)]
    figure = rollout([{**row, "model": name, "run": name} for name in names for row in made.errors("ns2d", "physolver")
                      if row["model"] == "physolver"])  # fmt: skip
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (legend,) = figure.legends
    box = legend.get_window_extent(canvas.get_renderer())
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
    assert legend._ncols == columns


def test_rollout_of_a_selected_field():
    (axes, _) = rollout([row for m in TRIO for row in made.errors("smoke3d", m)], "velocity").axes
    expected = [
        100 * r["value"]
        for r in made.errors("smoke3d", TRIO[0])
        if (r["metric"], r["field"]) == ("relative_l2_lead", "velocity")
    ]
    assert curves_of(axes)[0][1] == pytest.approx(expected)


def test_scaling_bars_are_1_96_s_over_root_n():
    points = {name: [(x, e, 150) for x, e in values] for name, values in made.SWEEPS.items()}
    figure = scaling([row for name, values in points.items() for p in values for row in made.scaling(name, *p)])
    assert len(figure.axes) == 3
    for axes, (name, values) in zip(figure.axes, points.items(), strict=True):
        paper, ours = [artist for artist in axes.containers if isinstance(artist, ErrorbarContainer)]
        assert ours.lines[0].get_xdata() == pytest.approx([x for x, _, _ in values])
        assert ours.lines[0].get_ydata() == pytest.approx([e / 10 for _, e, _ in values])
        low, high = np.array([segment[:, 1] for segment in ours.lines[2][0].get_segments()]).T
        deviation = np.array([e / 10 / 3 for _, e, _ in values])
        assert (high - low) / 2 == pytest.approx(1.96 * deviation / np.sqrt(150))
        low, high = np.array([segment[:, 1] for segment in paper.lines[2][0].get_segments()]).T
        printed = np.array([number.deviation for number in sweeps()[name].errors])
        assert (high - low) / 2 == pytest.approx(1.96 * printed / 10 / np.sqrt(200))


def test_stack_positive_parts_up_and_negative_parts_down():
    bottoms = stack([np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([-0.5, 0.5])])
    assert [bottom.tolist() for bottom in bottoms] == [[0, 0], [1, 2], [0, 6]]


def test_decomposition_bars_add_up_to_the_line():
    rows = [row for model in TRIO[:2] for row in made.decomposition("kf2d", model, 8, 4)]
    figure = decomposition(rows)
    energies, shares = figure.axes[:2], figure.axes[2:4]
    for index, model in enumerate(TRIO[:2]):
        for axes, kind in ((energies[index], "relative"), (shares[index], "share")):
            heights = {c.get_label(): [bar.get_height() for bar in c] for c in axes.containers}
            for part in ("injection", "propagation", "cross"):
                expected = [
                    100 * r["value"]
                    for r in rows
                    if (r["model"], r["metric"], r["field"]) == (model, f"{part}_{kind}", None)
                ]
                assert heights[part] == pytest.approx(expected)
            total = np.sum(list(heights.values()), axis=0)
            if kind == "share":
                assert total == pytest.approx(np.full(8, 100.0))
            else:
                line = next(y for x, y, _ in curves_of(axes) if len(x) == 8)
                assert total == pytest.approx(line)
    assert decomposition(rows, "vorticity").axes
    with pytest.raises(ValueError, match='no field "density"'):
        decomposition(rows, "density")


def test_correction_profiles_show_scales_cases_means_and_their_range():
    rows, gamma, ratios = made.corrections("kf2d")
    above, below = corrections(rows).axes
    named = {line.get_label(): line.get_ydata() for line in above.get_lines()}
    assert named["γ"] == pytest.approx(gamma) and named["|γ|"] == pytest.approx(np.abs(gamma))
    curves = [y for x, y, _ in curves_of(below) if len(x) == 8]
    assert curves[:3] == [pytest.approx(100 * case_ratios) for case_ratios in ratios]
    assert curves[3] == pytest.approx(100 * ratios.mean(0))
    dashed = next(y for _, y, line in curves_of(below) if line.get_linestyle() == "--")
    assert dashed == pytest.approx([100 * ratios.mean()] * 2)
    (shade,) = below.collections
    edge = shade.get_paths()[0].vertices
    for layer in range(8):
        bounds = edge[edge[:, 0] == layer + 1, 1]
        assert (bounds.min(), bounds.max()) == pytest.approx(
            (100 * ratios[:, layer].min(), 100 * ratios[:, layer].max())
        )


def test_routing_shows_every_slice_of_the_last_layer_and_its_attention():
    rows, arrays = made.routing("transolver-sigma", layers=(1, 3), slices=6, grid=(8, 12))
    pictures = images(routing(rows, {"ns2d-transolver-sigma-42": arrays}))
    shown, attention = (np.ma.getdata(image.get_array()) for image in pictures[:2])
    assert np.array_equal(attention, arrays["attention_L3"][0])
    expected, columns = montage(arrays["routing_L3"][0].astype(float))
    assert np.array_equal(shown, expected, equal_nan=True) and np.isnan(expected).any()
    for index in range(6):
        row, column = divmod(index, columns)
        tile = expected[row * 13 : row * 13 + 12, column * 9 : column * 9 + 8]
        assert np.array_equal(tile[::-1].T, arrays["routing_L3"][0, index].astype(float))
    volume = np.random.default_rng(0).random((4, 5, 6, 7))
    assert np.array_equal(montage(volume)[0], montage(volume[..., 3])[0], equal_nan=True)
    assert np.nanmax(montage(volume[..., 0, 0])[0]) == volume[..., 0, 0].max()


def test_attention_scale_has_a_minimum_width():
    rough = np.array([[0.1, 0.9], [0.4, 0.6]])
    assert attention_scale(rough) == (0.1, 0.9)
    low, high = attention_scale(np.full((4, 4), 0.25) + 1e-7 * np.eye(4))
    assert (low, high) == pytest.approx((0.2475, 0.2525), abs=1e-6)


def test_routing_without_attention_or_maps():
    rows, arrays = made.routing("slice-keep", layers=(1,), slices=4, grid=(8, 8))
    without_attention = {name: array for name, array in arrays.items() if not name.startswith("attention")}
    assert len(images(routing(rows, {"ns2d-slice-keep-42": without_attention}))) == 1
    with pytest.raises(
        ValueError, match="no routing maps; create them with: sigmasolver diagnose ns2d-slice-keep-42 --only"
    ):
        routing(rows, {})


def test_maps_of_a_diverged_forecast(tmp_path):
    rows, arrays = maps_of_models("darcy", TRIO[:2], grid=(12, 8), leads=(1,), fields=("pressure",))
    arrays["darcy-physolver-42"]["forecast"][0, 0, :6] = np.inf  # the frame has blown up, but is partly finite
    rows = [{**row, "value": None} if row["model"] == "physolver" else row for row in rows]
    (case,) = cases_of(rows, arrays)
    assert case.notes["Physolver", 1] == "not finite"
    assert case.notes["Transolver-σ", 1].endswith(" %")
    error_images = [image for image in images(maps(rows, arrays)) if image.get_cmap().name == "magma"]
    top = np.percentile(absolute_error(arrays["darcy-transolver-sigma-42"]), 99.5)
    assert len(error_images) == 2 and all(image.get_clim() == (0.0, pytest.approx(top)) for image in error_images)
    assert len(save(maps(rows, arrays), tmp_path, "maps")) == 2


def test_cube_faces_are_the_largest_smoothed_errors():
    spike = np.zeros((9, 9, 9))
    spike[4, 5, 6] = 1.0
    top, right, left = faces(spike)
    weights = np.exp(-0.5 * (np.arange(-3, 4) / 0.75) ** 2)
    peak = (weights.max() / weights.sum()) ** 3
    for face, position in ((top, (4, 5)), (right, (5, 6)), (left, (4, 6))):
        assert np.unravel_index(face.argmax(), face.shape) == position
        assert face.max() == pytest.approx(peak)
    assert np.allclose(faces(np.full((4, 5, 6), 0.3))[1], 0.3)


def test_maps_of_volumes_draw_faces_on_one_scale():
    rows, arrays = maps_of_models("it3d", TRIO[:2], grid=(8, 9, 10), leads=(1, 4), fields=("pressure", "velocity_x"))
    figure = maps(rows, arrays)
    (case,) = cases_of(rows, arrays)
    assert case.field == "velocity_x"
    errors = (case.errors[name] for name in ("Physolver", "Transolver-σ"))
    expected = [face for error in errors for frame in error for face in faces(frame)]
    error_images = [image for image in images(figure) if tuple(image.get_extent()) == (0, 1, 0, 1)]
    assert len(error_images) == len(expected) == 12
    for image, face in zip(error_images, expected, strict=True):
        assert np.array_equal(np.ma.getdata(image.get_array()), face.T)
    top = np.percentile(np.concatenate([face.ravel() for face in expected]), 99.5)
    assert {image.get_clim() for image in error_images} == {(0.0, top)}
    (chosen,) = cases_of(rows, arrays, "pressure")
    assert np.array_equal(chosen.truth, arrays["it3d-physolver-42"]["truth"][0, ..., 0].astype(float))


def test_case_study_has_one_scale_per_task_and_field():
    plane_rows, plane_arrays = maps_of_models("ns2d", TRIO[:2], grid=(16, 16), leads=(1, 5))
    volume_rows, volume_arrays = maps_of_models(
        "it3d", TRIO[:2], grid=(8, 8, 8), leads=(1, 4), fields=("pressure", "velocity_x")
    )
    figure = case_study([*plane_rows, *volume_rows], {**plane_arrays, **volume_arrays})
    error_images = [image for image in images(figure) if image.get_cmap().name == "magma"]
    assert len(error_images) == 2 + 2 * 6  # a plane, and three faces of two fields, for two runs
    scales = [{image.get_clim() for image in error_images[group]} for group in (slice(2), slice(2, 8), slice(8, 14))]
    assert [len(group) for group in scales] == [1, 1, 1] and len(set.union(*scales)) == 3
    errors = [absolute_error(run_maps)[-1] for run_maps in plane_arrays.values()]
    assert error_images[0].get_clim()[1] == pytest.approx(
        np.percentile(np.concatenate([e.ravel() for e in errors]), 99.5)
    )


def test_maps_draw_the_lowest_seed():
    rows, arrays = maps_of_models("ns2d", TRIO[:2], grid=(8, 8), leads=(1, 2))
    run = "ns2d-physolver-42"
    worse = {**arrays[run], "forecast": arrays[run]["forecast"] + 1}
    other_seed = [{**row, "seed": 43, "run": "later"} for row in rows if row["run"] == run]
    all_arrays = {**arrays, "later": worse}
    alone, beside = (maps(selected, all_arrays) for selected in (rows, [*other_seed, *rows]))
    shown = [
        sorted(float(np.ma.getdata(image.get_array()).sum()) for image in images(figure)) for figure in (alone, beside)
    ]
    assert shown[0] == shown[1]
    # Two runs with the same seed differ otherwise: both are kept.
    same = [{**row, "seed": 42} for row in other_seed]
    assert len(images(maps([*rows, *same], all_arrays))) > len(images(alone))


def test_maps_reject_incomparable_runs():
    rows, arrays = maps_of_models("ns2d", TRIO[:2], grid=(8, 8), leads=(1, 2))
    moved = {**arrays["ns2d-physolver-42"], "truth": arrays["ns2d-physolver-42"]["truth"] + 1}
    with pytest.raises(ValueError, match="shows a different case than"):
        maps(rows, {**arrays, "ns2d-physolver-42": moved})
    with pytest.raises(
        ValueError, match=r"no array truth of maps; create it with: sigmasolver diagnose .* --only maps"
    ):
        maps(rows, {})
    with pytest.raises(ValueError, match='ns2d has no field "density"; choose from vorticity'):
        maps(rows, arrays, "density")
    more, more_arrays = maps_of_models("kf2d", TRIO[:1], grid=(8, 8), leads=(1, 2))
    with pytest.raises(ValueError, match=r"different tasks \(ns2d, kf2d\); draw one task at a time"):
        maps([*rows, *more], {**arrays, **more_arrays})
    line, line_arrays = maps_of_models("mine", TRIO[:1], grid=(8,), leads=(1, 2))
    with pytest.raises(ValueError, match="1 spatial axis; error maps require two or three"):
        maps(line, line_arrays)


def test_efficiency_bubbles_show_time_memory_and_size():
    rows = [row for model, values in made.COSTS["ns2d"].items() for row in made.efficiency("ns2d", model, values)]
    (axes,) = FIGURES["efficiency"].draw(Material(rows)).axes
    bubbles = [artist for artist in axes.collections if isinstance(artist, PathCollection)]
    for bubble, (seconds, peak, size) in zip(bubbles, made.COSTS["ns2d"].values(), strict=True):
        assert np.ma.getdata(bubble.get_offsets())[0] == pytest.approx((seconds, peak / 1e3))
        assert bubble.get_sizes()[0] / bubbles[0].get_sizes()[0] == pytest.approx(
            size / made.COSTS["ns2d"]["hpm-frozen"][2]
        )
    bars = [artist for artist in axes.containers if isinstance(artist, ErrorbarContainer)]
    for bar, (seconds, _, _) in zip(bars, made.COSTS["ns2d"].values(), strict=True):
        ((start, _), (end, _)) = bar.lines[2][0].get_segments()[0]
        assert (end - start) / 2 == pytest.approx(0.03 * seconds)
    with pytest.raises(ValueError, match="has no peak_megabytes; measure it with: sigmasolver diagnose"):
        FIGURES["efficiency"].draw(Material([row for row in rows if row["metric"] != "peak_megabytes"]))


@pytest.mark.parametrize("seconds", [(2.0, 40.0, 41.0, 39.5, 40.5), (300.0, 5.0, 5.1, 4.9, 5.2)])
def test_efficiency_labels_of_close_bubbles_do_not_overlap(seconds):
    """Both axes start at zero, labels do not overlap and stay inside the figure; HPM has the paper's name."""
    rows = [
        row
        for task, costs in made.COSTS.items()
        for (model, (_, peak, size)), time in zip(costs.items(), seconds, strict=True)
        for row in made.efficiency(task, model, (time, peak, size))
    ]
    figure = FIGURES["efficiency"].with_sample(Material(rows))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    boxes = []
    for axes in figure.axes:
        assert axes.get_xlim()[0] == axes.get_ylim()[0] == 0 and axes.get_xlim()[1] > 1.03 * max(seconds)
        names = axes.get_legend().get_texts()
        labels = [text.get_text().partition(",")[0] for text in names]
        assert labels == ["HPM", "DRIFT-Net", "FactFormer", "Transolver", "Transolver-σ"]
        right, top = axes.get_xlim()[1], axes.get_ylim()[1]
        ticks = [text for text in axes.get_xticklabels() if text.get_position()[0] <= right]
        ticks += [text for text in axes.get_yticklabels() if text.get_position()[1] <= top]
        texts = [*names, *ticks, axes.xaxis.label, axes.yaxis.label]
        boxes += [text.get_window_extent(renderer) for text in texts]
        for box in (text.get_window_extent(renderer) for text in names):
            assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and figure.bbox.y0 <= box.y0
    assert not any(box.overlaps(other) for box, other in itertools.combinations(boxes, 2))


def test_efficiency_and_routing_figures_match_the_caption_of_the_paper():
    """fig:efficiency-representations: (a, b) epoch time and peak memory of NS2D and Kolmogorov flow, bubble area for
    parameter storage, bars of one sample deviation over three runs; (c, d) routing maps and slice attention of the
    final layer of both models."""
    rng, rows, runs = np.random.default_rng(0), [], {}
    for task in ("ns2d", "kf2d"):
        for model in ("transolver", "transolver-sigma"):
            seconds, peak, size = made.COSTS[task][model]
            runs[task, model] = seconds * (1 + 0.05 * rng.standard_normal(3)), peak, size
            epochs = runs[task, model][0]
            costs = made.efficiency(task, model, (epochs.mean(), peak, size))
            rows += [{**costs[0], "deviation": epochs.std(ddof=1)}, *costs[1:]]
    panels = FIGURES["efficiency"].draw(Material(rows)).axes
    assert [axes.get_title(loc="left")[-4:] for axes in panels] == ["NS2D", "KF2D"]
    per_megabyte = []
    for axes, task in zip(panels, ("ns2d", "kf2d"), strict=True):
        assert axes.get_xlabel() == "epoch time (s)" and axes.get_ylabel() == "peak memory (GB)"
        bubbles = [artist for artist in axes.collections if isinstance(artist, PathCollection)]
        bars = [artist for artist in axes.containers if isinstance(artist, ErrorbarContainer)]
        for bubble, bar, model in zip(bubbles, bars, ("transolver", "transolver-sigma"), strict=True):
            epochs, peak, size = runs[task, model]
            assert np.ma.getdata(bubble.get_offsets())[0] == pytest.approx((epochs.mean(), peak / 1e3))
            per_megabyte.append(bubble.get_sizes()[0] / size)
            assert bar.has_xerr and not bar.has_yerr
            ((left, _), (right, _)) = bar.lines[2][0].get_segments()[0]
            assert (left, right) == pytest.approx(
                (epochs.mean() - epochs.std(ddof=1), epochs.mean() + epochs.std(ddof=1))
            )
    assert per_megabyte == pytest.approx([per_megabyte[0]] * 4), "one scale of areas for both panels"

    models = {
        model: made.routing(model, layers=(1, 7, 8), slices=32, grid=(16, 16))
        for model in ("transolver", "transolver-sigma")
    }
    routed = [row for model_rows, _ in models.values() for row in model_rows]
    arrays = {f"ns2d-{model}-42": model_arrays for model, (_, model_arrays) in models.items()}
    pictures = images(FIGURES["routing"].draw(Material(routed, arrays)))
    assert len(pictures) == 4
    for index, (_, model_arrays) in enumerate(models.values()):
        maps_of_slices, attention = pictures[2 * index : 2 * index + 2]
        assert np.array_equal(
            np.ma.getdata(maps_of_slices.get_array()),
            montage(model_arrays["routing_L8"][0].astype(float))[0],
            equal_nan=True,
        )
        drawn = np.ma.getdata(attention.get_array())
        assert np.array_equal(drawn, model_arrays["attention_L8"][0])
        assert drawn.sum(1) == pytest.approx(np.ones(32)), "a row is a query"
        assert attention.get_clim() == pytest.approx((drawn.min(), drawn.max())), "scaled to its own range"


def material_of_all_figures():
    """Small input for every figure."""
    leads = [row for m in TRIO for p in ("free", "teacher-forced") for row in made.errors("ns2d", m, protocol=p)]
    map_rows, map_arrays = maps_of_models("ns2d", TRIO[:2], grid=(8, 8), leads=(1, 2))
    routing_rows, routing_arrays = made.routing("transolver-sigma", layers=(1,), slices=4, grid=(8, 8))
    return {
        "teacher-forcing": Material(leads),
        "symmetry": Material(made.symmetry("ns2d", "physolver", horizon=4)),
        "rollout": Material(leads),
        "decomposition": Material(made.decomposition("ns2d", "physolver", 4)),
        "maps": Material(map_rows, map_arrays),
        "case-study": Material(map_rows, map_arrays),
        "corrections": Material(made.corrections("ns2d", 2)[0]),
        "routing": Material(routing_rows, {"ns2d-transolver-sigma-42": routing_arrays}),
        "spectra": Material(*made.spectra_of_models("ns2d", TRIO[:2], horizon=3)),
        "components": Material(made.components("ns2d", "physolver")),
        "efficiency": Material(made.efficiency("ns2d", "ffno", (1.0, 2.0, 3.0))),
        "training-cost": Material([{**row, "seconds": 60.0} for row in leads]),
        "scaling": Material(made.scaling("width", 32, 3.0)),
    }


def test_symmetry_figure_shows_errors_and_difference_of_each_task():
    rows = [row for task in ("ns2d", "kf2d") for m in TRIO[:2] for row in made.symmetry(task, m, horizon=4)]
    rows += [row for m in TRIO[:2] for row in made.trust("ns2d", m)[0]]  # has other rows of these names
    figure = symmetry(rows)
    assert len(figure.axes) == 2
    for axes in figure.axes:
        lines = np.array([line.get_ydata() for line in axes.get_lines()])
        single, mean, difference = lines[:2], lines[2:4], lines[4:]
        sizes = np.array([made.GROWTH[m][0] for m in TRIO[:2]])
        np.testing.assert_allclose(single, sizes[:, None] * np.arange(1, 5))
        np.testing.assert_allclose(mean, 0.75 * single)
        np.testing.assert_allclose(difference, 0.6 * single)
        assert [line.get_linestyle() for line in axes.get_lines()] == ["-", "-", "--", "--", ":", ":"]


def test_training_cost_connects_training_lengths_and_averages_seeds():
    rows = []
    lengths = (("fno", 800, 90.0, 1.0), ("fno", 200, 20.0, 3.0), ("fno", 200, 40.0, 5.0), ("vit", 800, 50.0, 2.0))
    for seed, (model, step, seconds, factor) in enumerate(lengths):
        for row in made.errors("ns2d", model):
            timed = {"run": f"{model}-{seed}", "seed": seed, "step": step, "seconds": seconds}
            rows.append({**row, **timed, "value": factor * row["value"]})
    rows += made.errors("ns2d", "unet")  # not timed, so not shown
    (axes,) = training_cost(rows).axes
    error = {}
    for model in ("fno", "vit"):
        errors = (row["value"] for row in made.errors("ns2d", model) if row["metric"] == "relative_l2")
        error[model] = 100 * next(errors)
    lines = [(line.get_xdata(), line.get_ydata()) for line in axes.get_lines()]
    assert lines[0][0] == pytest.approx([30, 90]) and lines[0][1] == pytest.approx([4 * error["fno"], error["fno"]])
    assert lines[1][0] == pytest.approx([50]) and lines[1][1] == pytest.approx([2 * error["vit"]])
    assert len(lines) == 2
    with pytest.raises(ValueError, match="have no recorded training time"):
        training_cost(made.errors("ns2d", "fno"))


def test_components_figure_shows_errors_bounds_and_gains():
    rows = [row for model in TRIO[:2] for seed in (42, 43) for row in made.components("ns2d", model, seed)]
    figure = components(rows)
    mean = 1.05  # over two seeds
    for scale in (0, 1):
        for axes in figure.axes[2 * scale : 2 * scale + 2]:
            truth, measured, estimated, defect = (line.get_ydata() for line in axes.get_lines())
            expected = mean * (1 + scale) * np.arange(1, 5) ** 2
            for values, factor in ((truth, 1), (measured, 2), (estimated, 3), (defect, 0.5)):
                assert values == pytest.approx(factor * expected)
    for axes in figure.axes[4:]:
        heights = [bar.get_height() for bar in axes.patches]
        assert heights == pytest.approx([mean * value for value in (0.4, 0.5, 0.6, 0.7, 0.8, 1.0, 1.2, 1.4)])
        assert [tick.get_text() for tick in axes.get_xticklabels()] == [
            "low →\nlow", "low →\nhigh", "high →\nlow", "high →\nhigh"
        ]  # fmt: skip
        assert axes.get_title(loc="left") == "radius 0.945 measured, 1.89 lower estimate"
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "bound, lower estimates (no guarantee)" in legend and "gain, lower estimate" in legend


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_saved_as_png_and_pdf_with_axis_labels(name, tmp_path):
    figure = FIGURES[name].with_sample(material_of_all_figures()[name])
    png, pdf = save(figure, tmp_path / "new", name)
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and pdf.read_bytes()[:5] == b"%PDF-"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [f"{name}.pdf", f"{name}.png"]
    assert figure.get_figwidth() <= 7.3
    assert len([text for text in figure.texts if "windows of the test split" in text.get_text()]) == (
        name != "efficiency"
    )
    plots = [axes for axes in figure.axes if axes.axison and axes.get_lines() and not axes.get_images()]
    assert all(axes.get_xlabel() for axes in plots[-1:])


def test_save_is_reproducible(tmp_path):
    material = material_of_all_figures()["scaling"]
    first, second = (save(FIGURES["scaling"].draw(material), tmp_path / side, "scaling") for side in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.parametrize("name", FIGURES)
def test_figures_without_rows_name_the_command(name):
    with pytest.raises(ValueError, match=r"create them with: sigmasolver (evaluate|diagnose) RUN"):
        FIGURES[name].draw(Material([]))


def test_line_styles_are_unique_and_fixed_for_the_papers_models():
    styles = line_styles(["a", "physolver", *"bcdefghijklmnop", "transolver-sigma"])
    assert styles["physolver"].colour == line_styles(["physolver"])["physolver"].colour == COLOURS[1]
    assert len({(line_style.colour, line_style.dashes) for line_style in styles.values()}) == len(styles)


def test_figures_change_no_global_state_and_do_not_import_torch():
    from matplotlib import rcParams

    before = dict(rcParams)
    FIGURES["scaling"].draw(material_of_all_figures()["scaling"])
    assert dict(rcParams) == before
    for file in Path(sigmasolver.report.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any("pyplot" in name or name.partition(".")[0] == "torch" for name in names), file
            ours = [name.removeprefix("sigmasolver.") for name in names if name.startswith("sigmasolver.")]
            assert all(name.startswith(("report", "runs.files", "sampling", "tasks")) for name in ours), file


def test_slice_and_lead_ticks_are_valid_integers():
    rows, arrays = made.routing("transolver-sigma", layers=(1,), slices=4, grid=(8, 8))
    right = next(axes for axes in routing(rows, {"ns2d-transolver-sigma-42": arrays}).axes if axes.get_xlabel())
    for low, high, ticks in ((*right.get_xlim(), right.get_xticks()), (*sorted(right.get_ylim()), right.get_yticks())):
        assert [tick for tick in ticks if low <= tick <= high] == [0, 1, 2, 3]
    (axes, *_) = rollout(made.errors("ns2d", "physolver", horizon=22)).axes
    shown = [tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    assert shown[0] >= 1 and all(tick % 1 == 0 for tick in shown)


def test_components_figure_says_which_runs_have_none():
    rows = [*made.components("ns2d", "physolver"), *made.errors("ns2d", "unet")]
    with pytest.raises(ValueError, match="steady tasks and data with a solid have none: omit the run"):
        components(rows)


def test_components_gain_labels_do_not_overlap():
    figure = components([row for model in TRIO for row in made.components("ns2d", model)])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for axes in figure.axes[-3:]:
        boxes = [text.get_window_extent(canvas.get_renderer()) for text in axes.texts]
        bars = [bar.get_window_extent() for container in axes.containers for bar in container]
        assert len(boxes) == len(bars) == 8
        assert not any(box.overlaps(other) for box in boxes for other in (*boxes, *bars) if other is not box)
