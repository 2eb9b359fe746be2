"""The page is one well-formed, self-contained file with a single script, and all names are escaped."""

import ast
import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import sigmasolver.report
from sigmasolver.report.chart import chart
from sigmasolver.report.figures.style import BLACK, COLOURS, DARK_COLOURS, line_styles
from sigmasolver.report.page import render, write_page
from sigmasolver.report.study import Axis, Card, Curve, Dimensions, Maps, Study, Table

from . import made

FOLDER = Path(sigmasolver.report.__file__).parent
MODELS = ("transolver-sigma", "physolver", "specsolver")
VOID = {"meta", "link", "img", "input"}


def study(models=MODELS, points=64, leads=(1, 4, 8, 12, 16), **overrides):
    rng = np.random.default_rng(0)
    truth = rng.standard_normal((len(leads), points, points))
    rows = tuple((model, f"{i + 1}.00") for i, model in enumerate(models))
    defaults = {
        "title": "Kolmogorov flow",
        "summary": "Three models & a yardstick.",
        "curves": (
            *(Curve(model, leads, tuple(0.01 * (i + lead) for lead in leads)) for i, model in enumerate(models)),
            Curve("persistence", leads, (0.3,) * len(leads)),
        ),
        "table": Table(("model", "lead 1 (%)"), rows, frozenset({(0, 1)})),
        "facts": (("commit", "acc511d"), ("seed", "0")),
        "animations": (Maps("vorticity", leads, truth, {model: truth + 0.1 for model in models}),),
    }
    return Study(**{**defaults, **overrides})


class Elements(HTMLParser):
    """All elements with their attributes and text; fails if tags are not nested correctly."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.elements, self.open_elements = [], []
        self.feed(page)
        assert not self.open_elements

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), []))
        if tag not in VOID:
            self.open_elements.append(self.elements[-1])

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes), []))

    def handle_endtag(self, tag):
        assert self.open_elements.pop()[0] == tag

    def handle_data(self, data):
        for element in self.open_elements:
            element[2].append(data)

    def all(self, *tags):
        return [(attributes, "".join(text)) for tag, attributes, text in self.elements if tag in tags]


def test_render_escapes_markup_in_names():
    nasty = '<script>alert("1")</script>\' onload=x'
    contents = study(
        models=(nasty,),
        title=nasty,
        summary=nasty,
        table=Table((nasty,), ((nasty,),), frozenset({(0, 0)}), caption=nasty),
        animations=(
            Maps(nasty, (1,), np.eye(3)[None], {nasty: np.eye(3)[None]}, nasty, nasty, nasty, (Axis(nasty),) * 2),
        ),
        cards=(Card(nasty, nasty, nasty, nasty, b"<svg/>", 7.2, nasty),),
        sample=nasty,
        dimensions=Dimensions(0.5, nasty, units={nasty: nasty}),
        records=({**made.errors("ns2d", "physolver")[0], "model": nasty},),
        curves=(Curve(nasty, (1, 2), (0.1, float("nan"))),),
        facts=((nasty, nasty),),
    )
    page = render(contents)
    elements = Elements(page)
    assert page.count("<script") == 1
    assert not any("onload" in attributes for _, attributes, _ in elements.elements)
    assert [text for _, text in elements.all("h1")] == [nasty]
    assert [text for _, text in elements.all("strong", "dd")] == [nasty, nasty]
    (facts,) = [attributes["data-animation"] for attributes, _ in elements.all("div") if "data-animation" in attributes]
    assert [json.loads(facts)[name] for name in ("case", "field", "unit", "plane")] == [nasty] * 4
    assert {a["data-model"] for a, _ in elements.all("img") if "data-model" in a} == {nasty}
    (card,) = [attributes for attributes, _ in elements.all("section") if "data-name" in attributes]
    assert card["data-name"] == card["data-sample"] == nasty


def test_page_loads_no_external_resources():
    page = render(study())
    assert set(re.findall(r"\w+://[^\s\"'<)]*", page)) == {"http://www.w3.org/2000/svg"}
    assert "url(" not in page and "@import" not in page
    for _, attributes, _ in Elements(page).elements:
        for name in ("src", "href", "srcset", "poster", "data", "action"):
            assert attributes.get(name, "data:").startswith("data:")


def test_content_security_policy_allows_only_own_script_and_style():
    elements = Elements(render(study()))
    (policy,) = [a["content"] for a, _ in elements.all("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    for tag, rule in (("script", "script-src"), ("style", "style-src")):
        ((attributes, text),) = elements.all(tag)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert not attributes
        assert f"{rule} 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'; img-src data:;") and "unsafe" not in policy
    assert not any("style" in attributes for _, attributes, _ in elements.elements)  # blocked by the policy


def test_page_accessibility_attributes():
    elements = Elements(render(study()))
    assert [text for _, text in elements.all("h1", "h2")] == [
        "Kolmogorov flow", "Error over the forecast", "Comparison", "Forecasts of unseen cases", "Provenance",
    ]  # fmt: skip
    assert len(elements.all("caption")) == len(elements.all("table")) == 2
    assert all(a["aria-label"] for a, _ in elements.all("div") if a.get("role") in ("radiogroup", "group", "region"))
    assert all(a["tabindex"] == "0" and a["aria-label"] for a, _ in elements.all("div") if a.get("class") == "box")
    (alt_text,) = [a["aria-label"] for a, _ in elements.all("svg") if a.get("role") == "img"]
    assert "transolver-sigma 1.00 at lead 1, 16.0 at lead 16" in alt_text
    ids = [attributes["id"] for _, attributes, _ in elements.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {a["aria-labelledby"] for a, _ in elements.all("section")} <= set(ids)


def test_legend_shows_the_last_lead_and_table_all_numbers():
    leads = (1, 2, 3)
    curves = (Curve("a", leads, (0.01, 0.02, 0.0345)), Curve("b", leads, (0.1, float("nan"), float("nan"))))
    elements = Elements(render(study(curves=curves, animations=(), facts=(), table=Table(("model",), ()))))
    assert [text for _, text in elements.all("data")] == ["3.45", "not finite"]
    assert [text for _, text in elements.all("output")] == ["3"]
    labels = [attributes["data-label"] for attributes, _ in elements.all("td")]
    assert labels == ["a", "b"] * 3  # labels of the numbers on a narrow screen
    assert [text for _, text in elements.all("td")] == ["1.00", "10.0", "2.00", "not finite", "3.45", "not finite"]
    assert "b: not finite from lead 2." in [text for _, text in elements.all("p")]
    assert "Provenance" not in [text for _, text in elements.all("h2")]


def test_write_page_is_small_and_reproducible(tmp_path):
    path = tmp_path / "page.html"
    write_page(path, study())  # noise, the worst case for compression
    first = path.read_bytes()
    assert len(first) < 2_000_000
    write_page(path, study())
    assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


def test_write_page_error_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match=r"page\.html cannot be written: .*\.$"):
        write_page(tmp_path / "nowhere" / "page.html", study(points=4))


def luminance(colour):
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot([0.2126, 0.7152, 0.0722], linear))


def contrast(first, second):
    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("block", [0, 1], ids=["light", "dark"])
def test_page_colours_have_sufficient_contrast(block):
    """WCAG 2.2: 3 to 1 for graphics, 4.5 to 1 for text."""
    style = (FOLDER / "page.css").read_text()
    colours = dict(re.findall(r"--(\w+): (#\w{6})", re.findall(r":root[^{]* \{(.*?)\}", style, re.S)[block]))
    for name in ("s0", "s1", "s2", "s3", "s4", "s5", "yardstick", "focus"):
        assert contrast(colours[name], colours["paper"]) >= 3
    for name in ("ink", "soft"):
        assert contrast(colours[name], colours["paper"]) >= 4.5


def test_figure_colours_have_sufficient_contrast_in_both_themes():
    style = (FOLDER / "page.css").read_text()
    light, dark = (
        re.search(r"--paper: (#\w{6})", block)[1] for block in re.findall(r":root[^{]* \{(.*?)\}", style, re.S)
    )
    for colour in (BLACK, *COLOURS):
        assert contrast(DARK_COLOURS.get(colour, colour), dark) >= 3
        assert contrast(colour, light) >= (2 if colour in COLOURS[4:] else 3)  # the lightest also have markers


def test_model_colours_agree_between_page_and_figures():
    """By name or by label, regardless of the other models."""
    style = (FOLDER / "page.css").read_text()
    colours = dict(re.findall(r"--(s\d): (#\w{6})", re.findall(r":root[^{]* \{(.*?)\}", style, re.S)[0]))
    for models in (MODELS, ("other", "Specsolver", "Transolver-σ")):
        drawn = chart([Curve(model, (1,), (0.1,)) for model in models]).styles
        assert [colours[name].upper() for name in drawn] == [line_styles(models)[model].colour for model in models]


def test_style_sheet_has_a_rule_for_every_curve_style():
    style = (FOLDER / "page.css").read_text()
    for name in ("s0", "s1", "s2", "s3", "s4", "s5", "yardstick"):
        assert f".{name} {{ color: var(--{name}); }}" in style
    assert ".dash1 path" in style and ".dash2 path" in style and ".yardstick path { stroke-dasharray" in style


def test_report_imports_neither_torch_nor_other_packages():
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                assert name.partition(".")[0] != "torch"
                assert not name.startswith("sigmasolver.") or name.startswith(
                    ("sigmasolver.report", "sigmasolver.runs.files", "sigmasolver.sampling")
                )
