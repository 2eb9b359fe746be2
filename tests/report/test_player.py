"""The player in a real browser: it plays, its pickers change the picture, and it asks no one for anything."""

import numpy as np
import pytest

from sigmasolver.report.page import Curve, Maps, Study, Table, write_page
from sigmasolver.report.study import Card

from .browser import CHROMIUM, Browser

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
LEADS = (1, 2, 4, 8)


def fields(seed):
    """Waves that move, so that every lead, case and model looks different."""
    x = np.stack(np.meshgrid(*(np.linspace(0, 2 * np.pi, 24),) * 2, indexing="ij"))
    frames = [np.sin(x[0] * (1 + seed % 3) + 0.4 * lead) * np.cos(x[1] - 0.3 * lead * seed) for lead in LEADS]
    return np.stack(frames)


def films():
    made = []
    for case in (1, 2):
        for place, field in enumerate(("vorticity", "pressure")):
            truth = fields(2 * case + place) + 2 * place
            forecasts = {name: truth + 0.1 * k * fields(7 + case) for k, name in enumerate(("first", "second"), 1)}
            made.append(Maps(field, LEADS, truth, forecasts, case=str(case)))
    return tuple(made)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    curves = (Curve("first", LEADS, (0.01, 0.02, 0.05, 0.1)), Curve("second", LEADS, (0.02, 0.04, 0.1, 0.2)))
    table = Table(("model", "error (%)"), (("first", "1.0"), ("second", "2.0")))
    svg = b'<svg xmlns="http://www.w3.org/2000/svg" width="518pt" height="200pt" viewBox="0 0 518 200"/>'
    cards = tuple(Card(f"{inches} inches", "A drawing.", "Read it so.", svg, inches) for inches in (7.2, 3.5))
    study = Study("A study", "Two models.", curves, table, films()[0], (("commit", "abc"),), films(), cards)
    write_page(path, study)
    return path


@pytest.fixture
def browser(page):
    one = Browser()
    one.open(page)
    yield one
    one.close()


def pictures(browser):
    """What the three screens show."""
    return browser.value("[...document.querySelectorAll('#player canvas')].map((c) => c.toDataURL())")


def pick(browser, name, value):
    browser.value(
        f"(() => {{ const s = document.querySelector('#player select[name={name}]'); s.value = '{value}';"
        " s.dispatchEvent(new Event('change')); })()"
    )


def test_pickers_change_what_they_name_and_nothing_else(browser):
    truth, forecast, error = pictures(browser)
    assert len({truth, forecast, error}) == 3
    pick(browser, "model", "second")
    other = pictures(browser)
    assert other[0] == truth and other[1] != forecast and other[2] != error
    pick(browser, "model", "first")
    pick(browser, "field", "pressure")
    assert pictures(browser)[0] != truth
    pick(browser, "field", "vorticity")
    assert pictures(browser) == [truth, forecast, error]
    pick(browser, "case", "2")
    assert pictures(browser)[0] != truth
    assert not browser.errors and all(url.startswith(("file:", "data:")) for url in browser.requests)


def test_the_slider_shows_each_lead_with_its_error(browser):
    seen, read = set(), []
    for index in range(len(LEADS)):
        browser.value(
            f"(() => {{ const s = document.querySelector('#player input'); s.value = {index};"
            " s.dispatchEvent(new Event('input')); })()"
        )
        seen.add(pictures(browser)[0])
        read.append(browser.value("document.querySelector('#player .lead-number').textContent"))
    assert len(seen) == len(LEADS) and read == [f"{lead} of 8" for lead in LEADS]
    film = films()[0]
    expected = 100 * np.linalg.norm(film.forecasts["first"][-1] - film.truth[-1]) / np.linalg.norm(film.truth[-1])
    shown = browser.value("document.querySelector('#player .error-number').textContent")
    assert float(shown.split()[0]) == pytest.approx(expected, rel=0.01)


def test_it_plays_to_the_end_and_stops(browser):
    browser.value("document.querySelector('#player button').click()")
    assert browser.value("document.querySelector('#player button').textContent") == "Pause"
    browser.value("new Promise((done) => setTimeout(done, 2200))")
    assert browser.value("document.querySelector('#player .lead-number').textContent") == "8 of 8"
    assert browser.value("document.querySelector('#player button').getAttribute('aria-pressed')") == "false"


def test_every_control_can_be_reached_and_has_a_name(browser):
    named = browser.value(
        "[...document.querySelectorAll('#player select, #player button, #player input')].filter((e) => e.offsetParent)"
        ".map((e) => e.tabIndex >= 0 && (e.labels?.length > 0 || e.getAttribute('aria-label') || e.textContent) !== '')"
    )
    assert len(named) == 5 and all(named)  # case, field, model, play, lead: there is but one plane


@pytest.mark.parametrize("width", [360, 1200])
def test_nothing_is_wider_than_the_window(page, width):
    one = Browser(width=width)
    try:
        one.open(page)
        assert one.value("document.documentElement.scrollWidth") <= width
        boxes = one.value(
            "[...document.querySelectorAll('.card .box')].map((box) => [box.clientWidth, box.scrollWidth])"
        )
        ((seen, whole),) = boxes  # the wide drawing keeps its size on a small screen and is scrolled
        assert whole >= 700 and (whole > seen) == (width < 700)
    finally:
        one.close()
