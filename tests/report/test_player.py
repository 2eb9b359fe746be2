"""The page in a real browser: display, readout, playback and downloads agree with the study."""

import base64
import csv
import io
import json
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from sigmasolver.report.figures.style import style, themed_svg
from sigmasolver.report.page import write_page
from sigmasolver.report.pictures import encode_animation
from sigmasolver.report.study import Axis, Card, Curve, Dimensions, Maps, Study, Table

from . import made
from .browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
LEADS = (1, 2, 4, 8)
NAMES = ("first", "second")
POINTS = 24
LEFT, TOP = 34, 1  # offset of a map inside its canvas


def fields(seed):
    """Travelling waves, different for every lead, case and model."""
    x = np.stack(np.meshgrid(*(np.linspace(0, 2 * np.pi, POINTS),) * 2, indexing="ij"))
    frames = [np.sin(x[0] * (1 + seed % 3) + 0.4 * lead) * np.cos(x[1] - 0.3 * lead * seed) for lead in LEADS]
    return np.stack(frames)


def animations():
    result, growth = [], np.array([0.002, 0.02, 0.1, 0.4])[:, None, None]
    for case in (1, 2):
        for index, field in enumerate(("vorticity", "pressure")):
            truth = fields(2 * case + index) + 2 * index
            forecasts = {name: truth + k * growth * fields(7 + case) for k, name in enumerate(NAMES, 1)}
            axes = (Axis("x", 0.25, "m"), Axis("y", 0.25, "m"))
            result.append(Maps(field, LEADS, truth, forecasts, case=str(case), unit="1/s", axes=axes))
    return tuple(result)


def card(name, inches):
    with style():
        figure = Figure(figsize=(inches, 2))
        figure.subplots().set_title("drawn")
    return Card(name, f"{inches} inches", "A drawing.", "Read it so.", themed_svg(figure), inches, "9 windows & more")


@pytest.fixture(scope="module")
def study():
    curves = (
        Curve("first", LEADS, (0.01, 0.02, 0.05, 0.1), (0.001, 0.002, 0.005, 0.01), (0.002, 0.004, 0.01, 0.02)),
        Curve("second", LEADS, (0.02, 0.04, 0.1, 0.2)),
    )
    columns = ("model", *(f"a long heading of column {n} (%)" for n in range(8)))
    table = Table(columns, tuple((name, *["1.00 ± 0.05"] * 8) for name in NAMES), frozenset({(0, 1)}))
    cards = (card("wide", 7.2), card("small", 3.5))
    records = [row for model in made.TRIO for row in made.errors("ns2d", model)]
    return Study("A study", "Two models.", curves, table, (("commit", "abc"),), animations(), cards,
                 "9 windows, horizon 8", Dimensions(0.5, "s"), records=records)  # fmt: skip


@pytest.fixture(scope="module")
def shared_browser():
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def browser(shared_browser, study, tmp_path):
    """The page on a desktop; after every test, the console must be empty and nothing may have been fetched."""
    write_page(tmp_path / "page.html", study)
    shared_browser.look()
    shared_browser.open(tmp_path / "page.html")
    shared_browser.value(
        "document.querySelector('#cases .animations img').decode().then(() => new Promise(requestAnimationFrame))"
    )
    yield shared_browser
    assert not shared_browser.errors
    assert all(url.startswith(("file:", "data:", "blob:")) for url in shared_browser.requests)


def pick(browser, name, value):
    browser.value(
        f"(() => {{ const s = document.querySelector('#cases select[name={name}]'); s.value = '{value}';"
        " s.dispatchEvent(new Event('change')); return new Promise((done) => setTimeout(done, 50)); })()"
    )


def click(browser, name, value):
    browser.value(f"document.querySelector('input[name={name}][value=\"{value}\"]').click()")


def slide(browser, index):
    browser.value(
        f"(() => {{ const s = document.querySelector('#cases input[type=range]'); s.value = {index};"
        " s.dispatchEvent(new Event('input')); })()"
    )


def canvases(browser):
    """Pixels of the maps by their aria-label."""
    labelled_uris = browser.value(
        "[...document.querySelectorAll('#cases canvas')].map((c) => [c.getAttribute('aria-label'), c.toDataURL()])"
    )
    pictures = {label: io.BytesIO(base64.b64decode(uri.partition(",")[2])) for label, uri in labelled_uris}
    return {label: np.array(Image.open(picture).convert("RGB")) for label, picture in pictures.items()}


def colours_at(pixels):
    """Colours (X, Y, 3) at the centres of the grid points; the maps are square."""
    wide = pixels.shape[1] - LEFT - 8
    centres = ((np.arange(POINTS) + 0.5) / POINTS * wide).astype(int)
    return pixels[TOP + centres][:, LEFT + centres][::-1].transpose(1, 0, 2)


def expected(shown, index, model, kind, scale="all"):
    """Expected scale and values of a map."""
    truth = shown.truth[index]
    if kind == "truth":
        return encode_animation(shown).values, truth
    if kind == "forecast":
        return encode_animation(shown).values, shown.forecasts[model][index]
    encoded = encode_animation(shown)
    top = encoded.errors.high if scale == "all" else encoded.limits[index]
    return type(encoded.errors)("magma", 0.0, top), np.abs(shown.forecasts[model][index] - truth)


def colours_match(pixels, scale, values, tolerance):
    """Return whether every colour is that of a level within `tolerance` of the level of its value."""
    levels, palette = scale.levels(values).astype(int), scale.palette().astype(int)
    candidates = [palette[(levels + k).clip(0, 254)] for k in range(-tolerance, tolerance + 1)]
    return np.min([np.abs(colours_at(pixels).astype(int) - c).max(-1) for c in candidates], axis=0).max() <= 2


def test_player_shows_models_in_the_colours_of_their_values(browser):
    shown = animations()[0]
    slide(browser, 2)
    maps = canvases(browser)
    kinds = ["truth", *(f"{kind} of {name}" for name in NAMES for kind in ("forecast", "error"))]
    assert list(maps) == [f"vorticity, {kind}, lead 4, 2 s" for kind in kinds]
    for kind, pixels in zip(kinds, maps.values(), strict=True):
        quantity, _, model = kind.partition(" of ")
        scale, values = expected(shown, 2, model, quantity)
        assert colours_match(pixels, scale, values, tolerance=1 if quantity == "error" else 0)
    click(browser, "models", "first")
    assert len(canvases(browser)) == 3
    pick(browser, "case", "2")
    pick(browser, "field", "pressure")
    (pixels, *_) = canvases(browser).values()
    assert colours_match(pixels, *expected(animations()[3], 2, "", "truth"), tolerance=0)


def test_player_error_scale_per_lead(browser):
    """The first lead is black on the common scale; on its own it spans all colours and the bar shows its limit."""
    shown, label = animations()[0], "vorticity, error of second, lead 1, 0.5 s"
    before = canvases(browser)[label]
    assert colours_match(before, *expected(shown, 0, "second", "error"), tolerance=1) and colours_at(before).max() < 20
    click(browser, "errors", "each")
    after = canvases(browser)[label]
    assert (
        colours_match(after, *expected(shown, 0, "second", "error", "each"), tolerance=2)
        and colours_at(after).max() > 240
    )
    end = browser.value("document.querySelector('.screens [data-kind=errors] div span:last-child').textContent")
    assert float(end) == pytest.approx(encode_animation(shown).limits[0], rel=0.01)


def test_player_shows_leads_side_by_side(browser):
    click(browser, "view", "leads")
    assert list(canvases(browser)) == [
        f"vorticity, {quantity}, lead {lead}, {0.5 * lead:g} s"
        for lead in LEADS
        for quantity in ("truth", "forecast of first", "error of first")
    ]


def test_player_slider_shows_each_lead_with_its_error(browser):
    shown = animations()[0]
    for index, lead in enumerate(LEADS):
        slide(browser, index)
        assert browser.value("document.querySelector('.lead-number').textContent") == f"{lead} of 8, {0.5 * lead:g} s"
        labels = browser.value("[...document.querySelectorAll('.screens figcaption > span')].map((s) => s.textContent)")
        difference = shown.forecasts["second"][index] - shown.truth[index]
        error = 100 * np.linalg.norm(difference) / np.linalg.norm(shown.truth[index])
        (note,) = [text for text in labels if text.startswith("error")][1:]
        assert float(note.split()[1]) == pytest.approx(error, rel=0.01)


def test_player_hover_reads_position_and_values(browser):
    shown, (i, j) = animations()[0], (5, 17)
    slide(browser, 3)
    browser.value(
        "(() => { const c = document.querySelectorAll('#cases canvas')[3], box = c.getBoundingClientRect();"
        f" const wide = box.width - {LEFT} - 8, x = box.left + {LEFT} + ({i} + 0.5) / {POINTS} * wide;"
        f" const y = box.top + {TOP} + ({POINTS - 1 - j} + 0.5) / {POINTS} * wide;"
        " c.dispatchEvent(new PointerEvent('pointermove', { clientX: x, clientY: y })); })()"
    )
    reading = browser.value("document.querySelector('.reading').textContent")
    assert reading.startswith("x = 1.25 m, y = 4.25 m;") and "in 1/s" in reading
    texts = browser.value("[...document.querySelectorAll('.screens output')].map((o) => o.textContent)")
    truth, first, first_error, second, second_error = (float(text.replace("−", "-")) for text in texts)
    scale = encode_animation(shown)
    level = (scale.values.high - scale.values.low) / 254
    for value, frames in ((truth, shown.truth), (first, shown.forecasts["first"]), (second, shown.forecasts["second"])):
        assert abs(value - frames[3, i, j]) < 1.2 * level or abs(value) >= 0.99 * scale.values.high
    for value, name in ((first_error, "first"), (second_error, "second")):
        error = abs(shown.forecasts[name][3, i, j] - shown.truth[3, i, j])
        assert value == pytest.approx(error, rel=0.06, abs=scale.tops[3] * 1e-4)


def test_chart_hover_reads_every_model_with_its_spread(browser):
    point = (
        "(() => { const c = document.querySelector('.chart'), box = c.getBoundingClientRect();"
        " c.dispatchEvent(new PointerEvent('pointermove', { clientX: box.left + 60, clientY: box.top + 50 })); })()"
    )
    browser.value(point)
    tip = "[...document.querySelectorAll('.tip p')].map((p) => p.textContent)"
    assert browser.value(tip) == ["lead 1, 0.5 s", "first1.00 ± 0.20 %", "second2.00 %"]
    click(browser, "band", "windows")
    browser.value(point)
    assert browser.value(tip)[1] == "first1.00 ± 0.10 %"
    assert browser.value("[...document.querySelectorAll('.legend data')].map((d) => d.textContent)")[0] == "1.00 ± 0.10"


def test_player_plays_to_the_end_and_stops(browser):
    browser.value("document.querySelector('#cases .transport button').click()")
    assert browser.value("document.querySelector('#cases .transport button').textContent") == "Pause"
    browser.value("new Promise((done) => setTimeout(done, 1700))")
    assert browser.value("document.querySelector('#cases .lead-number').textContent") == "8 of 8, 4 s"
    assert browser.value("document.querySelector('#cases .transport button').getAttribute('aria-pressed')") == "false"


def test_downloaded_numbers_match_the_records(browser, study):
    lines = list(csv.DictReader(io.StringIO(browser.download("a[download$=csv]", "numbers.csv").decode())))
    assert [float(line["value"]) for line in lines] == [row["value"] for row in study.records]
    assert {(line["windows"], line["horizon"]) for line in lines} == {("200", "10")}
    document = json.loads(browser.download("a[download$=json]", "numbers.json"))
    values = sorted(row["value"] for group in document["measurements"] for row in group["rows"])
    assert values == sorted(row["value"] for row in study.records)


def test_downloaded_figures_have_legend_and_sample(browser):
    svg = ElementTree.fromstring(browser.download("#errors [data-take=svg]", "errors.svg"))
    texts = [node.text for node in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"first", "second", "Means over 9 windows, horizon 8."} <= set(texts)
    assert not any(text.startswith("Bands and ±: one standard deviation over windows") for text in texts)  # not shown
    picture = Image.open(io.BytesIO(browser.download("#errors [data-take=png]", "errors.png")))
    assert picture.size == (2 * int(float(svg.get("width"))), 2 * int(float(svg.get("height"))))
    drawing = ElementTree.fromstring(browser.download(".card [data-take=svg]", "wide.svg"))
    assert [node.text for node in drawing.iter("{http://www.w3.org/2000/svg}text")] == ["9 windows & more"]
    assert (
        Image.open(io.BytesIO(browser.download(".card [data-take=png]", "wide.png"))).getpixel((2, 2))[:3] == (255,) * 3
    )


def test_downloaded_gif_has_one_frame_per_lead_in_map_colours(browser):
    picture = Image.open(io.BytesIO(browser.download("#cases [data-take=png]", "case-1-vorticity-lead-1.png")))
    movie = Image.open(io.BytesIO(browser.download("#cases [data-take=gif]", "case-1-vorticity.gif")))
    assert movie.n_frames == len(LEADS) and picture.size == tuple(2 * side for side in movie.size)
    shown, wide = (
        animations()[0],
        250 - LEFT - 8,
    )  # layout of the sheet: truth at the left, 14 px from the edge, 76 px from the top
    centres = ((np.arange(POINTS) + 0.5) / POINTS * wide).astype(int)
    for index in range(len(LEADS)):
        movie.seek(index)
        frame = np.array(movie.convert("RGB")).astype(int)
        scale, truth = expected(shown, index, "", "truth")
        expected_colours = scale.palette()[scale.levels(truth)].astype(int)
        actual = frame[76 + centres][:, 14 + LEFT + centres][::-1].transpose(1, 0, 2)
        assert np.abs(actual - expected_colours).max() <= 12  # quantized to 118 of 255 colours
    assert (frame[:, :10] == 255).all()  # white background


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_figures_follow_the_colour_scheme(browser, tmp_path, dark):
    browser.look(dark=dark)
    browser.screenshot(tmp_path / "page.png")
    box = browser.value("(({ x, y, width, height }) => [x, y + scrollY, x + width, y + scrollY + height])"
                        "(document.querySelector('.card img').getBoundingClientRect())")  # fmt: skip
    grey = np.array(Image.open(tmp_path / "page.png").convert("L").crop(tuple(map(int, box))))
    ink, paper = (grey.max(), np.median(grey)) if dark else (grey.min(), np.median(grey))
    assert (paper < 40 and ink > 200) if dark else (paper > 240 and ink < 60)


@pytest.mark.parametrize("width", [390, 1280])
def test_page_does_not_overflow_the_window(browser, width):
    browser.look(width)
    browser.value("document.querySelector('details').open = true")
    assert browser.value("document.documentElement.scrollWidth") <= width
    boxes = browser.value(
        "[...document.querySelectorAll('.box:has(table)')].map((b) => [b.clientWidth, b.scrollWidth])"
    )
    assert len(boxes) == 2 and (width > 390 or all(content <= box for box, content in boxes))
    ends = browser.value(
        "[...document.querySelectorAll('canvas, .legend, .choice')].map((c) => c.getBoundingClientRect().right)"
    )
    assert max(ends) <= width


def test_controls_are_focusable_and_labelled(browser):
    named = browser.value(
        "[...document.querySelectorAll('select, button, input, a')].filter((e) => e.offsetParent)"
        ".map((e) => e.tabIndex >= 0 && Boolean(e.labels?.length || e.getAttribute('aria-label') || e.textContent))"
    )
    assert len(named) > 20 and all(named)
