"""Every figure from synthetic records: what the artists hold is what the records say."""

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
from sigmasolver.report.figures.curves import reductions, rollout, scaling, teacher_forcing, training_cost
from sigmasolver.report.figures.energy import decomposition, stack
from sigmasolver.report.figures.layers import attention_scale, corrections, montage, routing
from sigmasolver.report.figures.maps import case_study, cases_of, faces, maps
from sigmasolver.report.figures.style import COLOURS, looks
from sigmasolver.report.published import sweeps
from tests.report import made
from tests.report.made import gathered

TRIO = made.TRIO


def curves_of(axes):
    return [(line.get_xdata(), line.get_ydata(), line) for line in axes.get_lines()]


def wrong(arrays):
    """|forecast - truth| of the first case, (leads, *grid, fields)."""
    return np.abs(arrays["forecast"][0].astype(float) - arrays["truth"][0].astype(float))


def images(figure):
    """The pictures, without colour bars."""
    return [one for axes in figure.axes for one in axes.get_children() if isinstance(one, AxesImage)]


def picked(one, model, protocol, seed):
    wanted = ("relative_l2_lead", model, protocol, seed)
    return (one["metric"], one["model"], one["protocol"], one["seed"]) == wanted


def test_teacher_forced_and_free_curves_are_means_over_seeds():
    rows = [
        one
        for model in TRIO[1:]
        for seed in (42, 43, 44)
        for protocol in ("free", "teacher-forced")
        for one in made.errors("ns2d", model, seed, protocol=protocol)
    ]
    (axes,) = teacher_forcing(rows).axes
    drawn = {(line.get_color(), line.get_linestyle()): y for _, y, line in curves_of(axes)}
    styles = looks(TRIO[1:])
    for model in TRIO[1:]:
        for protocol, dashes in (("free", "-"), ("teacher-forced", "--")):
            values = [
                [100 * one["value"] for one in rows if picked(one, model, protocol, seed)] for seed in (42, 43, 44)
            ]
            assert np.shape(values) == (3, 10)
            assert drawn[styles[model].colour, dashes] == pytest.approx(np.mean(values, axis=0))
    assert len(axes.collections) == 4  # the deviation over seeds, shaded
    assert axes.get_xlabel() == "lead (frames)" and axes.get_ylabel() == "relative L2 error (%)"


def test_teacher_forcing_needs_both_protocols():
    with pytest.raises(ValueError, match="create it with: sigmasolver evaluate ns2d-ffno-42 --protocol teacher-forced"):
        teacher_forcing(made.errors("ns2d", "ffno"))


def test_rollout_panels_and_reductions_by_hand():
    rows = [one for task in ("ns2d", "smoke3d") for model in TRIO for one in made.errors(task, model)]
    figure = rollout(rows)
    first, second, bars = figure.axes
    for axes, task, field in ((first, "ns2d", "vorticity"), (second, "smoke3d", "all")):
        drawn_of = dict(zip(TRIO, (y for _, y, _ in curves_of(axes)), strict=False))  # persistence comes after them
        for model, drawn in drawn_of.items():
            wanted = [
                100 * r["value"]
                for r in rows
                if (r["task"], r["model"], r["metric"], r["field"]) == (task, model, "relative_l2_lead", field)
            ]
            assert drawn == pytest.approx(wanted) and len(wanted) == 10
        assert "n = 200" in axes.get_title(loc="left")
        curve = {model: np.mean(y) for model, y in drawn_of.items()}
        by_hand = 100 * (1 - curve["transolver-sigma"] / min(curve["physolver"], curve["specsolver"]))
        assert reductions(rows)[task] == pytest.approx(by_hand)
    (container,) = [one for one in bars.containers if isinstance(one, BarContainer)]
    assert [bar.get_width() for bar in container] == pytest.approx(list(reductions(rows).values()))
    assert reductions(made.errors("ns2d", "physolver")) == {}
    ours = made.errors("ns2d", "transolver-sigma")
    lost = [{**one, "value": None} if (one["model"], one["lead"]) == (TRIO[0], 10) else one for one in ours]
    assert reductions([*lost, *made.errors("ns2d", "physolver")]) == {}


def test_persistence_is_among_the_others_of_a_rollout():
    rows = [one for model in ("transolver-sigma", "physolver") for one in made.errors("ns2d", model)]
    first = next(one for one in rows if one["model"] == "persistence")
    kept = [one for one in rows if one["model"] != "persistence"]
    still = [{**first, "lead": lead, "value": 0.001 * lead} for lead in range(1, 11)]
    axes, *_ = rollout([*kept, *still, *({**one, "run": "ns2d-physolver-42"} for one in still)]).axes
    *_, (leads, values, _) = curves_of(axes)
    assert leads == pytest.approx(range(1, 11)) and values == pytest.approx(np.arange(1, 11) / 10)
    ours = np.mean([one["value"] for one in kept if picked(one, "transolver-sigma", "free", 42)])
    assert reductions([*kept, *still])["ns2d"] == pytest.approx(100 * (1 - ours / 0.0055)) and ours > 0.0055
    with pytest.raises(ValueError, match="not tested on the same samples"):
        rollout([*kept, *still, {**still[0], "run": "ns2d-physolver-42", "value": 0.5}])


@pytest.mark.parametrize("scale", [0.002, 0.05, 1.0, 30.0])
def test_the_gains_of_a_rollout_have_room_for_their_words(scale):
    """Neither the title nor the number of a bar leaves the figure or touches the name of its task."""
    rows = [one for task in ("ns2d", "kf2d", "it3d", "controlled-cylinder")
            for model in ("transolver-sigma", "physolver") for one in made.errors(task, model)]  # fmt: skip
    rows = [{**one, "value": one["value"] * scale} if one["model"] == "physolver" else one for one in rows]
    figure = FIGURES["rollout"].with_sample(Material(rows))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    bars, draw = figure.axes[-1], canvas.get_renderer()
    for text in (bars._left_title, bars.xaxis.label, *bars.texts):
        box = text.get_window_extent(draw)
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 + 1, text.get_text()
    names = [label.get_window_extent(draw) for label in bars.get_yticklabels()]
    assert bars.texts and not any(text.get_window_extent(draw).overlaps(name) for text in bars.texts for name in names)


def test_a_field_may_be_chosen():
    (axes, _) = rollout([one for m in TRIO for one in made.errors("smoke3d", m)], "velocity").axes
    wanted = [
        100 * r["value"]
        for r in made.errors("smoke3d", TRIO[0])
        if (r["metric"], r["field"]) == ("relative_l2_lead", "velocity")
    ]
    assert curves_of(axes)[0][1] == pytest.approx(wanted)


def test_scaling_bars_are_1_96_s_over_root_n():
    points = {name: [(x, e, 150) for x, e in held] for name, held in made.SWEEPS.items()}
    figure = scaling([one for name, held in points.items() for p in held for one in made.scaling(name, *p)])
    assert len(figure.axes) == 3
    for axes, (name, held) in zip(figure.axes, points.items(), strict=True):
        paper, ours = [one for one in axes.containers if isinstance(one, ErrorbarContainer)]
        assert ours.lines[0].get_xdata() == pytest.approx([x for x, _, _ in held])
        assert ours.lines[0].get_ydata() == pytest.approx([e / 10 for _, e, _ in held])
        low, high = np.array([segment[:, 1] for segment in ours.lines[2][0].get_segments()]).T
        deviation = np.array([e / 10 / 3 for _, e, _ in held])
        assert (high - low) / 2 == pytest.approx(1.96 * deviation / np.sqrt(150))
        low, high = np.array([segment[:, 1] for segment in paper.lines[2][0].get_segments()]).T
        printed = np.array([number.deviation for number in sweeps()[name].errors])
        assert (high - low) / 2 == pytest.approx(1.96 * printed / 10 / np.sqrt(200))


def test_stacks_stand_on_each_other_and_negative_parts_hang():
    bottoms = stack([np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([-0.5, 0.5])])
    assert [bottom.tolist() for bottom in bottoms] == [[0, 0], [1, 2], [0, 6]]


def test_decomposition_bars_add_up_to_the_line():
    rows = [one for model in TRIO[:2] for one in made.decomposition("kf2d", model, 8, 4)]
    figure = decomposition(rows)
    energies, shares = figure.axes[:2], figure.axes[2:4]
    for place, model in enumerate(TRIO[:2]):
        for axes, kind in ((energies[place], "relative"), (shares[place], "share")):
            heights = {c.get_label(): [bar.get_height() for bar in c] for c in axes.containers}
            for part in ("injection", "propagation", "cross"):
                wanted = [
                    100 * r["value"]
                    for r in rows
                    if (r["model"], r["metric"], r["field"]) == (model, f"{part}_{kind}", None)
                ]
                assert heights[part] == pytest.approx(wanted)
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
    assert curves[:3] == [pytest.approx(100 * one) for one in ratios]
    assert curves[3] == pytest.approx(100 * ratios.mean(0))
    dashed = next(y for _, y, line in curves_of(below) if line.get_linestyle() == "--")
    assert dashed == pytest.approx([100 * ratios.mean()] * 2)
    (shade,) = below.collections
    edge = shade.get_paths()[0].vertices
    for layer in range(8):
        held = edge[edge[:, 0] == layer + 1, 1]
        assert (held.min(), held.max()) == pytest.approx((100 * ratios[:, layer].min(), 100 * ratios[:, layer].max()))


def test_routing_shows_every_slice_of_the_last_layer_and_its_attention():
    rows, arrays = made.routing("transolver-sigma", layers=(1, 3), slices=6, grid=(8, 12))
    pictures = images(routing(rows, {"ns2d-transolver-sigma-42": arrays}))
    shown, attention = (np.ma.getdata(one.get_array()) for one in pictures[:2])
    assert np.array_equal(attention, arrays["attention_L3"][0])
    wanted, across = montage(arrays["routing_L3"][0].astype(float))
    assert np.array_equal(shown, wanted, equal_nan=True) and np.isnan(wanted).any()
    for number in range(6):
        row, column = divmod(number, across)
        tile = wanted[row * 13 : row * 13 + 12, column * 9 : column * 9 + 8]
        assert np.array_equal(tile[::-1].T, arrays["routing_L3"][0, number].astype(float))
    volume = np.random.default_rng(0).random((4, 5, 6, 7))
    assert np.array_equal(montage(volume)[0], montage(volume[..., 3])[0], equal_nan=True)
    assert np.nanmax(montage(volume[..., 0, 0])[0]) == volume[..., 0, 0].max()


def test_attention_is_scaled_by_itself_unless_it_is_even():
    rough = np.array([[0.1, 0.9], [0.4, 0.6]])
    assert attention_scale(rough) == (0.1, 0.9)
    low, high = attention_scale(np.full((4, 4), 0.25) + 1e-7 * np.eye(4))
    assert (low, high) == pytest.approx((0.2475, 0.2525), abs=1e-6)


def test_routing_without_attention_or_without_maps():
    rows, arrays = made.routing("slice-keep", layers=(1,), slices=4, grid=(8, 8))
    bare = {name: held for name, held in arrays.items() if not name.startswith("attention")}
    assert len(images(routing(rows, {"ns2d-slice-keep-42": bare}))) == 1
    with pytest.raises(
        ValueError, match="no routing maps; create them with: sigmasolver diagnose ns2d-slice-keep-42 --only"
    ):
        routing(rows, {})


def test_a_forecast_that_ran_away_is_said_and_drawn(tmp_path):
    rows, arrays = gathered("darcy", TRIO[:2], grid=(12, 8), leads=(1,), fields=("pressure",))
    arrays["darcy-physolver-42"]["forecast"][0, 0, :6] = np.inf  # the frame has blown up, finite here and there
    rows = [{**one, "value": None} if one["model"] == "physolver" else one for one in rows]
    (case,) = cases_of(rows, arrays)
    assert case.notes["Physolver", 1] == "not finite"
    assert case.notes["Transolver-σ", 1].endswith(" %")
    dark = [one for one in images(maps(rows, arrays)) if one.get_cmap().name == "magma"]
    top = np.percentile(wrong(arrays["darcy-transolver-sigma-42"]), 99.5)
    assert len(dark) == 2 and all(one.get_clim() == (0.0, pytest.approx(top)) for one in dark)
    assert len(save(maps(rows, arrays), tmp_path, "maps")) == 2


def test_cube_faces_are_the_largest_smoothed_errors():
    spike = np.zeros((9, 9, 9))
    spike[4, 5, 6] = 1.0
    top, right, left = faces(spike)
    weights = np.exp(-0.5 * (np.arange(-3, 4) / 0.75) ** 2)
    peak = (weights.max() / weights.sum()) ** 3
    for face, place in ((top, (4, 5)), (right, (5, 6)), (left, (4, 6))):
        assert np.unravel_index(face.argmax(), face.shape) == place
        assert face.max() == pytest.approx(peak)
    assert np.allclose(faces(np.full((4, 5, 6), 0.3))[1], 0.3)


def test_cubes_share_one_scale_and_hold_the_faces():
    rows, arrays = gathered("it3d", TRIO[:2], grid=(8, 9, 10), leads=(1, 4), fields=("pressure", "velocity_x"))
    figure = maps(rows, arrays)
    (case,) = cases_of(rows, arrays)
    assert case.field == "velocity_x"
    errors = (case.errors[name] for name in ("Physolver", "Transolver-σ"))
    wanted = [face for held in errors for lead in held for face in faces(lead)]
    dark = [one for one in images(figure) if tuple(one.get_extent()) == (0, 1, 0, 1)]
    assert len(dark) == len(wanted) == 12
    for one, face in zip(dark, wanted, strict=True):
        assert np.array_equal(np.ma.getdata(one.get_array()), face.T)
    top = np.percentile(np.concatenate([face.ravel() for face in wanted]), 99.5)
    assert {one.get_clim() for one in dark} == {(0.0, top)}
    (chosen,) = cases_of(rows, arrays, "pressure")
    assert np.array_equal(chosen.truth, arrays["it3d-physolver-42"]["truth"][0, ..., 0].astype(float))


def test_case_study_scales_each_task_by_itself():
    flat, flat_arrays = gathered("ns2d", TRIO[:2], grid=(16, 16), leads=(1, 5))
    deep, deep_arrays = gathered("it3d", TRIO[:2], grid=(8, 8, 8), leads=(1, 4), fields=("pressure", "velocity_x"))
    figure = case_study([*flat, *deep], {**flat_arrays, **deep_arrays})
    dark = [one for one in images(figure) if one.get_cmap().name == "magma"]
    assert len(dark) == 2 + 2 * 6  # a plane, and the three faces of two fields, for two runs
    scales = [{one.get_clim() for one in dark[held]} for held in (slice(2), slice(2, 8), slice(8, 14))]
    assert [len(held) for held in scales] == [1, 1, 1] and len(set.union(*scales)) == 3
    errors = [wrong(held)[-1] for held in flat_arrays.values()]
    assert dark[0].get_clim()[1] == pytest.approx(np.percentile(np.concatenate([e.ravel() for e in errors]), 99.5))


def test_of_several_seeds_the_lowest_is_drawn():
    rows, arrays = gathered("ns2d", TRIO[:2], grid=(8, 8), leads=(1, 2))
    run = "ns2d-physolver-42"
    worse = {**arrays[run], "forecast": arrays[run]["forecast"] + 1}
    more = [{**row, "seed": 43, "run": "later"} for row in rows if row["run"] == run]
    every = {**arrays, "later": worse}
    alone, beside = (maps(held, every) for held in (rows, [*more, *rows]))
    shown = [
        sorted(float(np.ma.getdata(one.get_array()).sum()) for one in images(figure)) for figure in (alone, beside)
    ]
    assert shown[0] == shown[1]
    # Two runs of one seed differ in something else: both stay.
    same = [{**row, "seed": 42} for row in more]
    assert len(images(maps([*rows, *same], every))) > len(images(alone))


def test_maps_that_cannot_be_compared_are_refused():
    rows, arrays = gathered("ns2d", TRIO[:2], grid=(8, 8), leads=(1, 2))
    moved = {**arrays["ns2d-physolver-42"], "truth": arrays["ns2d-physolver-42"]["truth"] + 1}
    with pytest.raises(ValueError, match="shows a different case than"):
        maps(rows, {**arrays, "ns2d-physolver-42": moved})
    with pytest.raises(
        ValueError, match=r"no array truth of maps; create it with: sigmasolver diagnose .* --only maps"
    ):
        maps(rows, {})
    with pytest.raises(ValueError, match='ns2d has no field "density"; choose from vorticity'):
        maps(rows, arrays, "density")
    more, more_arrays = gathered("kf2d", TRIO[:1], grid=(8, 8), leads=(1, 2))
    with pytest.raises(ValueError, match=r"different tasks \(ns2d, kf2d\); draw one task at a time"):
        maps([*rows, *more], {**arrays, **more_arrays})
    line, line_arrays = gathered("mine", TRIO[:1], grid=(8,), leads=(1, 2))
    with pytest.raises(ValueError, match="1 spatial axis; error maps require two or three"):
        maps(line, line_arrays)


def test_bubbles_stand_at_time_and_memory_with_areas_like_sizes():
    rows = [one for model, values in made.COSTS["ns2d"].items() for one in made.efficiency("ns2d", model, values)]
    (axes,) = FIGURES["efficiency"].draw(Material(rows)).axes
    bubbles = [one for one in axes.collections if isinstance(one, PathCollection)]
    for bubble, (seconds, peak, size) in zip(bubbles, made.COSTS["ns2d"].values(), strict=True):
        assert np.ma.getdata(bubble.get_offsets())[0] == pytest.approx((seconds, peak / 1e3))
        assert bubble.get_sizes()[0] / bubbles[0].get_sizes()[0] == pytest.approx(
            size / made.COSTS["ns2d"]["hpm-frozen"][2]
        )
    bars = [one for one in axes.containers if isinstance(one, ErrorbarContainer)]
    for bar, (seconds, _, _) in zip(bars, made.COSTS["ns2d"].values(), strict=True):
        ((start, _), (end, _)) = bar.lines[2][0].get_segments()[0]
        assert (end - start) / 2 == pytest.approx(0.03 * seconds)
    with pytest.raises(ValueError, match="has no peak_megabytes; measure it with: sigmasolver diagnose"):
        FIGURES["efficiency"].draw(Material([one for one in rows if one["metric"] != "peak_megabytes"]))


@pytest.mark.parametrize("seconds", [(2.0, 40.0, 41.0, 39.5, 40.5), (300.0, 5.0, 5.1, 4.9, 5.2)])
def test_the_costs_of_models_that_lie_together_can_be_read(seconds):
    """Both axes from zero, no text upon another, all of it inside the figure; HPM under the paper's name."""
    rows = [
        one
        for task, held in made.COSTS.items()
        for (model, (_, peak, size)), time in zip(held.items(), seconds, strict=True)
        for one in made.efficiency(task, model, (time, peak, size))
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
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def test_efficiency_and_representations_are_drawn_as_the_caption_says():
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
        bubbles = [one for one in axes.collections if isinstance(one, PathCollection)]
        bars = [one for one in axes.containers if isinstance(one, ErrorbarContainer)]
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
    routed = [one for held, _ in models.values() for one in held]
    arrays = {f"ns2d-{model}-42": held for model, (_, held) in models.items()}
    pictures = images(FIGURES["routing"].draw(Material(routed, arrays)))
    assert len(pictures) == 4
    for number, (_, held) in enumerate(models.values()):
        maps_of_slices, attention = pictures[2 * number : 2 * number + 2]
        assert np.array_equal(
            np.ma.getdata(maps_of_slices.get_array()), montage(held["routing_L8"][0].astype(float))[0], equal_nan=True
        )
        drawn = np.ma.getdata(attention.get_array())
        assert np.array_equal(drawn, held["attention_L8"][0])
        assert drawn.sum(1) == pytest.approx(np.ones(32)), "a row is a query"
        assert attention.get_clim() == pytest.approx((drawn.min(), drawn.max())), "scaled to its own range"


def whole():
    """Small material for every figure."""
    leads = [one for m in TRIO for p in ("free", "teacher-forced") for one in made.errors("ns2d", m, protocol=p)]
    plane, plane_arrays = gathered("ns2d", TRIO[:2], grid=(8, 8), leads=(1, 2))
    routed, routed_arrays = made.routing("transolver-sigma", layers=(1,), slices=4, grid=(8, 8))
    return {
        "teacher-forcing": Material(leads),
        "rollout": Material(leads),
        "decomposition": Material(made.decomposition("ns2d", "physolver", 4)),
        "maps": Material(plane, plane_arrays),
        "case-study": Material(plane, plane_arrays),
        "corrections": Material(made.corrections("ns2d", 2)[0]),
        "routing": Material(routed, {"ns2d-transolver-sigma-42": routed_arrays}),
        "spectra": Material(*made.trusted("ns2d", TRIO[:2], horizon=3)),
        "components": Material(made.components("ns2d", "physolver")),
        "efficiency": Material(made.efficiency("ns2d", "ffno", (1.0, 2.0, 3.0))),
        "training-cost": Material([{**one, "seconds": 60.0} for one in leads]),
        "scaling": Material(made.scaling("width", 32, 3.0)),
    }


def test_error_over_training_time_joins_the_lengths_of_a_model_and_averages_seeds():
    rows = []
    lengths = (("fno", 800, 90.0, 1.0), ("fno", 200, 20.0, 3.0), ("fno", 200, 40.0, 5.0), ("vit", 800, 50.0, 2.0))
    for number, (model, step, seconds, factor) in enumerate(lengths):
        for one in made.errors("ns2d", model):
            timed = {"run": f"{model}-{number}", "seed": number, "step": step, "seconds": seconds}
            rows.append({**one, **timed, "value": factor * one["value"]})
    rows += made.errors("ns2d", "unet")  # not timed, so not shown
    (axes,) = training_cost(rows).axes
    value = {}
    for model in ("fno", "vit"):
        of_all = (one["value"] for one in made.errors("ns2d", model) if one["metric"] == "relative_l2")
        value[model] = 100 * next(of_all)
    lines = [(line.get_xdata(), line.get_ydata()) for line in axes.get_lines()]
    assert lines[0][0] == pytest.approx([30, 90]) and lines[0][1] == pytest.approx([4 * value["fno"], value["fno"]])
    assert lines[1][0] == pytest.approx([50]) and lines[1][1] == pytest.approx([2 * value["vit"]])
    assert len(lines) == 2
    with pytest.raises(ValueError, match="have no recorded training time"):
        training_cost(made.errors("ns2d", "fno"))


def test_components_show_truth_bounds_and_gains_and_call_estimates_so():
    rows = [one for model in TRIO[:2] for seed in (42, 43) for one in made.components("ns2d", model, seed)]
    figure = components(rows)
    mean = 1.05  # of two seeds
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
def test_every_figure_is_written_twice_and_names_its_axes(name, tmp_path):
    figure = FIGURES[name].with_sample(whole()[name])
    png, pdf = save(figure, tmp_path / "new", name)
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and pdf.read_bytes()[:5] == b"%PDF-"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [f"{name}.pdf", f"{name}.png"]
    assert figure.get_figwidth() <= 7.3
    assert len([text for text in figure.texts if "windows of the test split" in text.get_text()]) == (
        name != "efficiency"
    )
    plots = [axes for axes in figure.axes if axes.axison and axes.get_lines() and not axes.get_images()]
    assert all(axes.get_xlabel() for axes in plots[-1:])


def test_the_same_records_give_the_same_bytes(tmp_path):
    material = whole()["scaling"]
    first, second = (save(FIGURES["scaling"].draw(material), tmp_path / side, "scaling") for side in "ab")
    assert [one.read_bytes() for one in first] == [one.read_bytes() for one in second]


@pytest.mark.parametrize("name", FIGURES)
def test_no_rows_are_one_sentence_with_the_command(name):
    with pytest.raises(ValueError, match=r"create them with: sigmasolver (evaluate|diagnose) RUN"):
        FIGURES[name].draw(Material([]))


def test_the_papers_models_keep_their_colours_and_no_two_models_look_alike():
    many = looks(["a", "physolver", *"bcdefghijklmnop", "transolver-sigma"])
    assert many["physolver"].colour == looks(["physolver"])["physolver"].colour == COLOURS[1]
    assert len({(one.colour, one.dashes) for one in many.values()}) == len(many)


def test_figures_leave_no_global_state_and_import_nothing_heavy():
    from matplotlib import rcParams

    before = dict(rcParams)
    FIGURES["scaling"].draw(whole()["scaling"])
    assert dict(rcParams) == before
    for file in Path(sigmasolver.report.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any("pyplot" in name or name.partition(".")[0] == "torch" for name in names), file
            assert all(
                not name.startswith("sigmasolver.")
                or name.startswith(("sigmasolver.report", "sigmasolver.runs.files", "sigmasolver.tasks"))
                for name in names
            ), file


def test_slices_and_leads_are_marked_by_whole_numbers_that_exist():
    rows, arrays = made.routing("transolver-sigma", layers=(1,), slices=4, grid=(8, 8))
    right = next(axes for axes in routing(rows, {"ns2d-transolver-sigma-42": arrays}).axes if axes.get_xlabel())
    for low, high, ticks in ((*right.get_xlim(), right.get_xticks()), (*sorted(right.get_ylim()), right.get_yticks())):
        assert [tick for tick in ticks if low <= tick <= high] == [0, 1, 2, 3]
    (axes, *_) = rollout(made.errors("ns2d", "physolver", horizon=22)).axes
    shown = [tick for tick in axes.get_xticks() if axes.get_xlim()[0] <= tick <= axes.get_xlim()[1]]
    assert shown[0] >= 1 and all(tick % 1 == 0 for tick in shown)


def test_the_numbers_of_neighbouring_gains_do_not_touch():
    figure = components([one for model in TRIO for one in made.components("ns2d", model)])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for axes in figure.axes[-3:]:
        boxes = [text.get_window_extent(canvas.get_renderer()) for text in axes.texts]
        bars = [bar.get_window_extent() for one in axes.containers for bar in one]
        assert len(boxes) == len(bars) == 8
        assert not any(box.overlaps(other) for box in boxes for other in (*boxes, *bars) if other is not box)
