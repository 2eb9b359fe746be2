"""The demo at a small size: every step runs, prints its results, and is not repeated."""

import base64
import io
import json
import re
import shutil

import pytest
import torch
from rich.console import Console

from sigmasolver import load, pretrained
from sigmasolver.cli.demo_flow import CASES, MODELS, Size, run
from sigmasolver.data.store import Writer, open_store
from sigmasolver.evaluate import metrics
from sigmasolver.forecast.checkpoint import load_recipe
from sigmasolver.model_cards import score
from sigmasolver.models import count_parameters
from sigmasolver.report.tables import curves
from sigmasolver.runs import Run, read_rows

SMALL = Size("darcy", flows=3, test=1, updates=3)


@pytest.fixture(scope="module")
def one_window(tmp_path_factory):
    """A pretrained model with one window and without the solver on the fine grid, timed once, for speed."""
    source, home = pretrained.folder("darcy"), tmp_path_factory.mktemp("models")
    shutil.copytree(source, home / "darcy", ignore=shutil.ignore_patterns("windows.h5", "card.json"))
    card = pretrained.card("darcy")
    card["solver"]["rows"] = [row for row in card["solver"]["rows"] if row["grid"] == [85, 85]]
    (home / "darcy" / "card.json").write_text(json.dumps(card))
    with (
        open_store(source / "windows.h5") as store,
        Writer(home / "darcy" / "windows.h5", store.header, 1) as writer,
        pytest.MonkeyPatch.context() as patch,
    ):
        writer.append(store[:1])
        patch.setattr(pretrained, "_HERE", home)
        patch.setattr(score, "REPEATS", 1)
        yield


@pytest.fixture(scope="module")
def demo(one_window, tmp_path_factory):
    out, screen = tmp_path_factory.mktemp("demo"), Console(file=io.StringIO(), width=100)
    run(screen, out, SMALL)
    return out, screen.file.getvalue()


def without_times(text):
    """Mask the times of the pretrained model and of the solver."""
    return [re.sub(r"[\d.e+]+ m?s\b", "time", line).split() for line in text.splitlines()]


def test_demo_starts_with_the_pretrained_model(demo):
    out, text = demo
    page, model = (out / "page.html").read_text(), load("darcy")
    with open_store(pretrained.folder("darcy") / "windows.h5") as store:
        coefficient, truth = (torch.from_numpy(store[:1][..., [field]].astype("float32")) for field in (0, 1))
    with torch.no_grad():
        value = float(metrics.relative_l2(model.rollout(coefficient, 1).frames, truth))
    error = f"{100 * value:.3g} %"
    assert text.index("a pretrained model forecasts") < text.index(error) < text.index("2  3 turbulent flows")
    opening = page[page.index('class="opening"') : page.index('class="title"')]
    assert opening.count(error) == 2 and "solver, 85 × 85" in opening
    moving, fallback = (
        base64.b64decode(png) for png in re.findall(r'(?:srcset|img src)="data:image/png;base64,(.*?)"', opening)[::-1]
    )
    assert b"acTL" not in fallback and moving.startswith(b"\x89PNG")
    assert page.index("<h1") < page.index('class="title"') and page.count("<h1") == 1


def test_demo_table_has_every_model_and_persistence(demo):
    out, text = demo
    rows = [row for name in MODELS for row in read_rows(Run(out / name).records)]
    assert {row["model"] for row in rows} == {*MODELS, "persistence"}
    table = text.partition("4  free rollouts")[2].splitlines()
    for curve in curves(rows):
        line = next(line for line in table if line.strip().startswith(curve.model))
        assert curve.leads == tuple(range(1, 11))
        assert f"{100 * curve.errors[0]:.3g}" in line or f"{100 * curve.errors[0]:.2f}" in line


def test_demo_models_have_similar_size_and_equal_budget(demo):
    recipes = [load_recipe(Run(demo[0] / name)) for name in MODELS]
    sizes = [count_parameters(recipe.model.name, recipe.model.config(recipe.task)) for recipe in recipes]
    assert max(sizes) < 1.1 * min(sizes)
    assert len({recipe.train for recipe in recipes}) == len({recipe.task for recipe in recipes}) == 1


def test_demo_page_shows_curves_and_unseen_cases(demo):
    page = (demo[0] / "page.html").read_text()
    assert all(name in page for name in (*MODELS, "persistence", "lead 10", "3 steps of 4 windows"))
    cases = min(CASES, SMALL.test)
    assert page.count("data-animation=") == cases and page.count('data-kind="error"') == cases * len(MODELS)
    assert "lead 10, t = 1.25 (%)" in page and "vorticity (1/time)" in page and "Persistence has " in page
    count = read_rows(Run(demo[0] / MODELS[0]).records)[0]["windows"]
    assert f"Means over {count} windows of the test split, horizon 10." in page


def test_demo_reuses_existing_results(demo):
    out, text = demo
    before = {
        path: path.stat().st_mtime_ns for path in out.rglob("*") if path.name in ("weights.safetensors", "flow.h5")
    }
    screen = Console(file=io.StringIO(), width=100)
    run(screen, out, SMALL)
    assert without_times(screen.file.getvalue()) == without_times(text)
    assert before == {path: path.stat().st_mtime_ns for path in before}
