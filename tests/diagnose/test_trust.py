"""Trust metrics, ensembles and maps against NumPy and fields with known values."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.normalise import Normaliser
from sigmasolver.data.store import Writer, open_store
from sigmasolver.data.windows import Windows
from sigmasolver.diagnose.ensemble import correlation, measure_members
from sigmasolver.diagnose.maps import maps, spread_leads, storage_type, stored_leads
from sigmasolver.diagnose.states import States, training_states
from sigmasolver.diagnose.subject import Subject
from sigmasolver.diagnose.trust import trust
from sigmasolver.forecast import Forecaster
from sigmasolver.recipes import ModelRecipe, Recipe, TrainRecipe
from sigmasolver.runs import Run
from sigmasolver.tasks import Task

POINTS = 16
FIELDS = ("u", "v")


class Scaled(nn.Module):
    """The last of two frames of two fields, times a number."""

    def __init__(self, factor):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x):
        return self.factor * x[..., 2:]


def forecaster(factor):
    identity = Normaliser("none", FIELDS, torch.zeros(2).double(), torch.ones(2).double())
    return Forecaster(Scaled(factor), identity, identity, 1, history=2)


def make(folder, boundary="periodic"):
    """Six trajectories of seven frames: u one wave of number 3, v noise."""
    axis = np.arange(POINTS) / POINTS
    header = Header(Layout(FIELDS, ("1", "1"), (boundary,) * 2, (axis, axis), np.arange(7.0) / 4), "test", {})
    random = np.random.default_rng(1)
    size = random.uniform(1, 2, (6, 7, 1, 1))
    u = size * np.cos(2 * np.pi * 3 * axis + random.uniform(0, 6, (6, 1, 1, 1))) * np.ones((POINTS, 1))
    v = random.normal(size=u.shape) * random.uniform(1, 20, (6, 1, 1, 1))
    with Writer(folder / f"{boundary}.h5", header, 6) as writer:
        writer.append(np.stack((u, v), -1).astype(np.float32))
    return folder / f"{boundary}.h5"


def subject_of(store, folder, factor=0.9, peers=()):
    task = Task("waves", FIELDS, FIELDS, (POINTS, POINTS), 2, 1, 4, 4, 2, "none")
    recipe = Recipe(task, ModelRecipe(), TrainRecipe(batch=2))
    windows = Windows(store, [4, 5], recipe.evaluation_window_spec())
    training = Windows(store, [0, 1, 2, 3], recipe.training_window_spec())
    members = tuple(map(forecaster, peers))
    return Subject(
        Run(folder), recipe, forecaster(factor), windows, torch.arange(len(windows)), 4, 3, training, members
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with open_store(make(tmp_path_factory.mktemp("waves"))) as reader:
        yield reader


def frames_of(subject):
    """Input, true and forecast frames of all windows in float64; the forecast is known in closed form."""
    history, truth = subject.windows.batch(subject.indices)
    factor = float(subject.forecaster.model.factor.detach())
    powers = torch.tensor([factor**k for k in range(1, 5)]).view(1, 4, 1, 1, 1)
    return history.double().numpy(), truth.double().numpy(), (history[:, -1:] * powers).double().numpy()


def values(findings, metric, field=None):
    rows = [row for row in findings.rows if row["metric"] == metric and row["field"] == field]
    return [row["value"] for row in sorted(rows, key=lambda row: row["lead"] or 0)]


def test_trust_spectrum_of_one_wave_is_in_its_bin(store, tmp_path):
    subject = subject_of(store, tmp_path)
    findings = trust(subject)
    _, truth, forecast = frames_of(subject)
    assert findings.arrays["wavenumber"][3] == 3
    for name, frames in (("spectrum_true", truth), ("spectrum_forecast", forecast)):
        spectrum = findings.arrays[name]
        assert spectrum.shape[0] == 4 and spectrum.shape[2] == 2
        wave = spectrum[..., 0]
        assert np.delete(wave, 3, axis=1).max() < 1e-10 * wave[:, 3].min()
        # A wave of amplitude a has a mean square of a²/2, and an energy of half of that; noise fills its shells.
        half = 0.5 * (frames**2).mean((2, 3))
        np.testing.assert_allclose(spectrum.sum(1), half.mean(0), rtol=1e-5)


def test_trust_has_no_spectrum_on_non_periodic_grids(tmp_path):
    with open_store(make(tmp_path, "open")) as reader:
        assert "spectrum_true" not in trust(subject_of(reader, tmp_path)).arrays


def test_trust_correlation_matches_numpy(store, tmp_path):
    subject = subject_of(store, tmp_path)
    findings = trust(subject)
    _, truth, forecast = frames_of(subject)
    expected = np.empty((len(truth), 4, 2))
    for index in np.ndindex(expected.shape):
        window, step, channel = index
        pair = (frames[window, step, ..., channel].ravel() for frames in (forecast, truth))
        expected[index] = np.corrcoef(*pair)[0, 1]
    np.testing.assert_allclose(findings.arrays["correlation"], expected, atol=1e-5)
    for field, channel in (("u", [0]), ("v", [1]), (None, [0, 1])):
        np.testing.assert_allclose(
            values(findings, "correlation_lead", field), expected[..., channel].mean((0, 2)), atol=1e-6
        )
    # u never decorrelates, v is noise; frames are a quarter of a time unit apart.
    assert values(findings, "correlation_time", "u") == [np.inf]
    assert values(findings, "correlation_time", "v") == [0.25]


def test_trust_correlation_time_of_uneven_frames(store, tmp_path):
    subject = subject_of(store, tmp_path)
    subject.windows.times = np.array([0.0, 1, 10, 20, 30, 40, 50])
    assert values(trust(replace(subject, indices=torch.tensor([0, 2]))), "correlation_time", "v") == [9.0]
    assert values(trust(subject), "correlation_time", "v") == []  # the lead times differ between the windows


def test_trust_distance_matches_brute_force(store, tmp_path):
    subject = subject_of(store, tmp_path, factor=3.0)
    findings = trust(subject)
    _, truth, forecast = frames_of(subject)
    training = np.stack([store[i] for i in range(4)]).astype(np.float64)
    scale = training.reshape(-1, 2).std(0, ddof=1)

    def distance(a, b):
        return np.sqrt((((a - b) / scale) ** 2).mean())

    states = [(i, frame) for i in range(4) for frame in training[i]]
    near = [min(distance(a, b) for j, b in states if j != i) for i, a in states]
    typical = sorted(near)[(len(near) - 1) // 2]
    assert values(findings, "distance_typical") == [pytest.approx(typical, rel=1e-6)]
    assert values(findings, "distance_states") == [28]
    for metric, frames in (("distance_lead", forecast), ("distance_true_lead", truth)):
        ratios = (
            np.array([[min(distance(frame, b) for _, b in states) for frame in window] for window in frames]) / typical
        )
        np.testing.assert_allclose(values(findings, metric), ratios.mean(0), rtol=1e-5)
        if metric == "distance_lead":
            np.testing.assert_allclose(findings.arrays["distance"], ratios, rtol=1e-5)
    assert np.all(np.diff(values(findings, "distance_lead")) > 0), "a forecast that explodes leaves the data"


def test_training_states_have_distance_zero_and_need_two_trajectories(store, tmp_path):
    training = subject_of(store, tmp_path).training
    states = training_states(training, torch.device("cpu"))
    inside = torch.from_numpy(np.asarray(store[2]))[None]
    assert states.nearest(inside).max() < 1e-6
    alone = Windows(store, [0], training.spec)
    assert training_states(alone, torch.device("cpu")) is None


def test_typical_distance_excludes_the_own_trajectory():
    """Trajectories at 0, 1 and at 10, 12: the nearest foreign states are 10, 9, 9 and 11 away."""
    line = States(torch.tensor([[0.0], [1.0], [10.0], [12.0]]).double(), torch.tensor([0, 0, 1, 1]), torch.ones(1))
    assert float(line.typical()) == 9
    assert line.nearest(torch.tensor([[[4.0], [11.5]]])[..., None]).tolist() == [[3.0, 0.5]]


# --- several seeds


def test_ensemble_rows_match_numpy(store, tmp_path):
    subject = subject_of(store, tmp_path, peers=(1.1, 0.5))
    findings = trust(subject)
    given, truth, _ = frames_of(subject)
    factors = np.array([[f**k for k in range(1, 5)] for f in np.float32([0.9, 1.1, 0.5]).astype(np.float64)])
    members = factors[:, None, :, None, None, None] * given[None, :, -1:]
    size = np.sqrt((truth**2).sum((2, 3)))
    spread = np.sqrt((members.std(0, ddof=1) ** 2).sum((2, 3))) / size
    error = np.sqrt(((members.mean(0) - truth) ** 2).sum((2, 3))) / size
    inside = ((members.min(0) <= truth) & (truth <= members.max(0))).mean((2, 3))
    for field, pick in (("u", lambda a: a[..., 0]), ("v", lambda a: a[..., 1]), (None, lambda a: a.mean(-1))):
        np.testing.assert_allclose(values(findings, "spread_lead", field), pick(spread).mean(0), rtol=1e-5)
        np.testing.assert_allclose(values(findings, "error_lead", field), pick(error).mean(0), rtol=1e-5)
        np.testing.assert_allclose(values(findings, "coverage", field), pick(inside).mean(0), rtol=1e-3)
        expected = [np.corrcoef(pick(spread)[:, k], pick(error)[:, k])[0, 1] for k in range(4)]
        np.testing.assert_allclose(values(findings, "calibration", field), expected, rtol=1e-4, atol=1e-4)
    assert values(findings, "coverage_expected") == [0.5] and values(findings, "members") == [3]


def test_ensemble_coverage_of_a_truth_drawn_like_the_members():
    draws = torch.randn(5, 4, 1, 40, 40, 1, dtype=torch.float64)
    measures = measure_members(draws[:4], draws[4])
    assert float(measures["coverage"].mean()) == pytest.approx(3 / 5, abs=0.02)
    identical = measure_members(draws[:1].expand(3, -1, -1, -1, -1, -1), draws[4])
    assert identical["spread"].eq(0).all() and identical["coverage"].eq(0).all()


def test_correlation_of_proportional_and_constant_values():
    numbers = torch.tensor([1.0, 3.0, 7.0])
    assert float(correlation(numbers, 2 * numbers + 1)) == pytest.approx(1)
    assert float(correlation(numbers, -numbers)) == pytest.approx(-1)
    assert correlation(numbers, torch.ones(3)).isnan()


def test_trust_without_peers_has_no_ensemble_rows(store, tmp_path):
    assert not any(row["metric"] in ("spread_lead", "coverage") for row in trust(subject_of(store, tmp_path)).rows)


# --- maps


def test_maps_arrays_are_truth_and_forecast(store, tmp_path):
    subject = subject_of(store, tmp_path)
    findings = maps(subject)
    given, truth, forecast = frames_of(subject)
    cases, leads = findings.arrays["cases"], findings.arrays["leads"]
    assert cases.tolist() == [0, 1, 2, 3] and leads.tolist() == [1, 2, 3, 4]
    for name, frames in (("truth", truth), ("forecast", forecast)):
        assert findings.arrays[name].dtype == np.float16
        np.testing.assert_allclose(findings.arrays[name], frames, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(findings.arrays["given"], given[:, -1], rtol=1e-3, atol=1e-4)
    for row in findings.rows:
        error, true = (
            frames[row["case"], row["lead"] - 1, ..., FIELDS.index(row["field"])]
            for frames in (forecast - truth, truth)
        )
        assert row["value"] == pytest.approx(np.linalg.norm(error) / np.linalg.norm(true), rel=1e-5)
    assert len(findings.rows) == 4 * 4 * 2


def test_maps_in_3d_store_fewer_cases(tmp_path):
    """Two cases of a box with walls; all metrics are finite in 3D."""
    axis, random = np.arange(6.0), np.random.default_rng(0)
    header = Header(Layout(FIELDS, ("1", "1"), ("wall",) * 3, (axis,) * 3, np.arange(9.0)), "test", {})
    with Writer(tmp_path / "box.h5", header, 4) as writer:
        writer.append(random.normal(size=(4, 9, 6, 6, 6, 2)).astype(np.float32))
    task = Task("box", FIELDS, FIELDS, (6, 6, 6), 2, 1, 6, 3, 1, "none")
    recipe = Recipe(task, ModelRecipe(), TrainRecipe(batch=2))
    with open_store(tmp_path / "box.h5") as store:
        windows = Windows(store, [2, 3], recipe.evaluation_window_spec())
        training = Windows(store, [0, 1], recipe.training_window_spec())
        subject = Subject(Run(tmp_path), recipe, forecaster(0.9), windows, torch.arange(4), 6, 2, training)
        arrays, findings = maps(subject).arrays, trust(subject)
    assert arrays["truth"].shape == (2, 6, 6, 6, 6, 2) and arrays["given"].shape == (2, 6, 6, 6, 2)
    assert arrays["cases"].tolist() == [0, 3] and arrays["leads"].tolist() == [1, 2, 3, 4, 5, 6]
    assert np.isfinite(values(findings, "distance_lead")).all() and "spectrum_true" not in findings.arrays


def test_storage_type_is_float32_out_of_float16_range():
    assert storage_type(torch.tensor([[1.0, 0.0], [-5e4, 0.0]])) is np.float16
    assert storage_type(torch.tensor([[1.0, 7e4]])) is np.float32
    assert storage_type(torch.tensor([[1.0, 1e-6]])) is np.float32


@pytest.mark.parametrize(
    ("horizon", "most", "leads"),
    [(1, 4, [1]), (3, 5, [1, 2, 3]), (16, 4, [1, 6, 11, 16]), (10, 5, [1, 3, 5, 8, 10])],
)
def test_spread_leads_from_first_to_last(horizon, most, leads):
    assert spread_leads(horizon, most) == leads


@pytest.mark.parametrize(
    ("horizon", "grid", "fields", "cases", "count"),
    [
        (10, (64, 64), 1, 4, 10),  # all of them
        (50, (64, 64), 1, 4, 20),  # at most 20
        (10, (60, 60, 60), 4, 2, 10),
        (16, (64, 64, 64), 4, 2, 16),  # as in the paper for Smoke3D
        (20, (64, 64, 64), 4, 2, 16),  # 16 leads of this volume have 67 million values, 17 have 71 million
        (39, (256, 256), 39, 4, 4),  # one lead has 20 million
    ],
)
def test_stored_leads_are_limited_by_size(horizon, grid, fields, cases, count):
    values_per_lead = 2 * cases * math.prod(grid) * fields
    leads = stored_leads(horizon, values_per_lead)
    assert len(leads) == count and leads[0] == 1 and leads[-1] == horizon
    assert len(set(np.diff(leads).tolist())) <= 2  # evenly spaced up to rounding
    assert count == 4 or count * values_per_lead <= 70e6
