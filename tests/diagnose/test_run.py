"""Diagnoses in a run folder: tidy, computed once, complete or rejected; and the `diagnose` command."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sigmasolver.data.header import Header
from sigmasolver.data.layout import Layout
from sigmasolver.data.store import Writer, open_store
from sigmasolver.diagnose import run as module
from sigmasolver.diagnose.records import read_findings, rows_file
from sigmasolver.diagnose.run import DIAGNOSTICS, diagnose_run, peers_of
from sigmasolver.diagnose.subject import Findings
from sigmasolver.evaluate import Request, evaluate_run
from sigmasolver.forecast.checkpoint import load_recipe
from sigmasolver.runs import Run
from sigmasolver.simulate.generate import generate
from sigmasolver.train.infer_recipe import UserChoices, infer_recipe
from sigmasolver.train.job import train_run
from tests.diagnose.conftest import FLOW, MODEL

NAMES = ("decomposition", "trust", "maps")
KEYS = {
    "task", "model", "seed", "run", "diagnostic", "metric", "field", "lead", "layer", "case", "value", "deviation",
    "weights", "data", "part", "windows", "horizon", "precision", "package", "commit", "machine", "torch", "date",
}  # fmt: skip


@pytest.fixture
def diagnostic_calls(monkeypatch):
    """The diagnostics in the order they were run."""
    calls = []
    for name, diagnostic in DIAGNOSTICS.items():
        monkeypatch.setitem(
            DIAGNOSTICS, name, lambda s, name=name, diagnostic=diagnostic: (calls.append(name), diagnostic(s))[1]
        )
    return calls


def test_diagnosis_rows_are_tidy_strict_json_on_disk(runs):
    run = runs["first"]
    diagnoses = diagnose_run(run, NAMES)

    def refuse(constant):
        raise AssertionError(constant)

    assert list(diagnoses) == list(NAMES)
    for name, findings in diagnoses.items():
        lines = rows_file(run, name).read_text().splitlines()
        rows = [json.loads(line, parse_constant=refuse) for line in lines]
        assert rows == findings.rows and all(row.keys() >= KEYS for row in rows)
        identities = {(row["task"], row["model"], row["seed"], row["run"], row["diagnostic"]) for row in rows}
        assert identities == {("tiny", "transolver-sigma", 3, "first", name)}
        keys = [tuple(row[key] for key in ("metric", "field", "lead", "layer", "case")) for row in rows]
        assert len(set(keys)) == len(keys)
        with np.load(rows_file(run, name).with_suffix(".npz"), allow_pickle=False) as file:
            assert {key: file[key].dtype for key in file} == {key: a.dtype for key, a in findings.arrays.items()}


def test_diagnosis_agrees_with_evaluation(runs):
    """The root of total energy over energy of the truth is the relative error; the correlations are equal."""
    run = runs["first"]
    diagnoses, records = diagnose_run(run, NAMES), evaluate_run(run)
    arrays = diagnoses["decomposition"].arrays
    for lead in (1, 2, 3):
        error = np.sqrt(arrays["total"][:, lead - 1, 0] / arrays["truth"][:, lead - 1, 0]).mean()
        (record,) = [
            r for r in records
            if r["metric"] == "relative_l2_lead" and r["lead"] == lead and r["model"] == "transolver-sigma"
        ]  # fmt: skip
        assert error == pytest.approx(record["value"], rel=1e-5)
        correlations = [
            row["value"] for row in (*diagnoses["trust"].rows, *records)
            if (row["metric"], row["lead"], row["field"]) == ("correlation_lead", lead, "vorticity")
            and row["model"] == "transolver-sigma"
        ]  # fmt: skip
        assert len(correlations) == 2 and correlations[0] == pytest.approx(correlations[1], rel=1e-6)


def test_diagnose_run_reuses_existing_results(runs, diagnostic_calls):
    run, ticks = runs["first"], []
    first = diagnose_run(run, NAMES, tick=lambda *progress: ticks.append(progress))
    assert diagnostic_calls == list(NAMES) and ("decomposition", 8, 8) in ticks
    before = {path: path.read_bytes() for path in (run.path / "diagnose").iterdir()}
    again = diagnose_run(run, NAMES)
    assert diagnostic_calls == list(NAMES)
    assert {path: path.read_bytes() for path in (run.path / "diagnose").iterdir()} == before
    for name in NAMES:
        assert again[name].rows == first[name].rows and again[name].arrays.keys() == first[name].arrays.keys()
        assert all(np.array_equal(again[name].arrays[key], first[name].arrays[key], True) for key in first[name].arrays)


@pytest.mark.parametrize(
    "request_", [Request(horizon=2), Request(windows=3), Request(split="train")], ids=["horizon", "windows", "split"]
)
def test_diagnose_run_repeats_for_another_request(runs, diagnostic_calls, request_):
    run = runs["first"]
    first = diagnose_run(run, ["decomposition"])["decomposition"]
    other = diagnose_run(run, ["decomposition"], request_)["decomposition"]
    assert diagnostic_calls == ["decomposition"] * 2 and other.rows != first.rows
    assert read_findings(run, "decomposition").rows == other.rows
    diagnose_run(run, ["decomposition"], request_)
    assert diagnostic_calls == ["decomposition"] * 2


def test_diagnose_run_reuses_results_of_a_renamed_run(runs, diagnostic_calls):
    original = diagnose_run(runs["first"], ["decomposition", "trust"], peers=[runs["second"]])
    moved = {name: Run(runs[name].path.rename(runs[name].path.with_name(f"{name}-moved"))) for name in runs}
    again = diagnose_run(moved["first"], ["decomposition", "trust"], peers=[moved["second"]])
    assert diagnostic_calls == ["decomposition", "trust"]
    assert {name: findings.rows for name, findings in again.items()} == {
        n: findings.rows for n, findings in original.items()
    }


def test_diagnose_run_repeats_for_other_weights(runs, diagnostic_calls):
    run = runs["first"]
    diagnose_run(run, ["decomposition"])
    run.weights.write_bytes(runs["second"].weights.read_bytes())
    diagnose_run(run, ["decomposition"])
    assert len(diagnostic_calls) == 2


def test_diagnose_run_replaces_arrays_without_rows(runs, diagnostic_calls):
    run = runs["first"]
    diagnose_run(run, ["maps"])
    rows_file(run, "maps").unlink()
    diagnose_run(run, ["maps"])
    assert diagnostic_calls == ["maps"] * 2 and read_findings(run, "maps") is not None


@pytest.mark.parametrize("cut", ["line", "row", "empty", "arrays", "gone", "mixed"])
def test_read_findings_rejects_truncated_or_mismatched_files(runs, cut):
    run = runs["first"]
    diagnose_run(run, ["decomposition"])
    rows = rows_file(run, "decomposition")
    arrays, text = rows.with_suffix(".npz"), rows.read_bytes()
    if cut == "line":
        rows.write_bytes(text[:-40])
    elif cut == "row":
        rows.write_bytes(b"".join(text.splitlines(keepends=True)[:-1]))
    elif cut == "empty":
        rows.write_bytes(b"")
    elif cut == "arrays":
        arrays.write_bytes(arrays.read_bytes()[:-100])
    elif cut == "gone":
        arrays.unlink()
    else:
        np.savez(arrays, total=np.zeros(3))
    with pytest.raises(ValueError, match=r"diagnose.*(truncated|missing).*remove") as caught:
        diagnose_run(run, ["decomposition"])
    assert "\n" not in str(caught.value) and str(caught.value).endswith((".", "?"))


def test_diagnose_run_skips_diagnostics_that_do_not_apply(runs, monkeypatch):
    fast = {name: DIAGNOSTICS[name] for name in ("decomposition", "corrections", "routing")}
    monkeypatch.setattr(module, "DIAGNOSTICS", fast)
    diagnoses = diagnose_run(runs["ffno"])
    assert diagnoses["decomposition"].skipped is None and diagnoses["decomposition"].rows
    for name in ("corrections", "routing"):
        assert diagnoses[name].skipped.endswith(".") and not diagnoses[name].rows
        assert not rows_file(runs["ffno"], name).exists()
    assert diagnose_run(runs["ffno"], ["corrections"])["corrections"].skipped.startswith("ffno has no slice operator")


def test_write_findings_rejects_a_diagnosis_without_rows(runs, monkeypatch):
    monkeypatch.setitem(DIAGNOSTICS, "maps", lambda subject: Findings())
    with pytest.raises(ValueError, match="The diagnostic maps returned no rows"):
        diagnose_run(runs["first"], ["maps"])


def test_diagnose_run_of_a_steady_task(tmp_path):
    grid, random = np.arange(8) / 8, np.random.default_rng(0)
    a = random.normal(size=(10, 1, 8, 8, 1))
    data = np.concatenate((a, 2 + 0.5 * a + random.normal(size=a.shape)), -1).astype(np.float32)
    header = Header(Layout(("a", "p"), ("1", "1"), ("open",) * 2, (grid, grid), np.zeros(1)), "test", {})
    with Writer(tmp_path / "steady.h5", header, 10) as writer:
        writer.append(data)
    recipe, _ = infer_recipe(header, 10, UserChoices("steady", targets=("p",)), False)
    run = Run(tmp_path / "run")
    train_run(replace(recipe, model=MODEL, train=replace(recipe.train, updates=2)), tmp_path / "steady.h5", run)
    results = diagnose_run(run, (*NAMES, "efficiency"))
    terms = {row["metric"]: row["value"] for row in results["decomposition"].rows if row["field"] == "p"}
    assert terms["propagation"] == terms["cross"] == 0 and terms["injection_share"] == 1
    assert results["maps"].arrays["given"].shape[1:] == (8, 8, 1) and results["maps"].arrays["leads"].tolist() == [1]
    test = list(recipe.split(10).test)
    np.testing.assert_allclose(results["maps"].arrays["given"][..., 0], data[test, 0, ..., 0], rtol=1e-3, atol=1e-3)
    assert any(row["metric"] == "distance_lead" for row in results["trust"].rows)


# --- seeds


def test_peers_are_diagnosed_with_the_lowest_seed(runs, diagnostic_calls):
    all_runs = [runs["second"], runs["ffno"], runs["first"]]
    assert peers_of(runs["first"], all_runs) == (runs["second"],)
    assert peers_of(runs["second"], all_runs) == () == peers_of(runs["ffno"], all_runs)
    alone = diagnose_run(runs["first"], ["trust"])["trust"]
    pair = diagnose_run(runs["first"], ["trust"], peers=[runs["second"]])["trust"]
    assert diagnostic_calls == ["trust"] * 2 and len(pair.rows) > len(alone.rows)
    assert {row["metric"] for row in pair.rows} >= {"spread_lead", "error_lead", "calibration", "coverage", "members"}
    assert all(len(row["members"]) == 1 and row["members"][0].startswith("second ") for row in pair.rows)
    # The rows of the pair include its own, so it is not diagnosed again.
    assert diagnose_run(runs["first"], ["trust"])["trust"].rows == pair.rows and len(diagnostic_calls) == 2
    own = {(row["metric"], row["lead"], row["field"]): row["value"] for row in alone.rows}
    assert own.items() <= {(row["metric"], row["lead"], row["field"]): row["value"] for row in pair.rows}.items()


# --- errors


@pytest.mark.parametrize(
    ("names", "request_", "message"),
    [
        (["decompositon"], Request(), 'Unknown diagnostic "decompositon"; did you mean decomposition'),
        (None, Request(protocol="teacher-forced"), "Diagnostics use free forecasts"),
        (None, Request(precision="bf16"), "Diagnostics run in float32"),
        (None, Request(grid=(8, 8)), "use the training grid"),
        (["maps"], Request(horizon=7), "A window needs 9 frames"),
    ],
)
def test_diagnose_run_rejects_invalid_requests(runs, names, request_, message):
    with pytest.raises(ValueError, match=message) as caught:
        diagnose_run(runs["first"], names, request_)
    assert "\n" not in str(caught.value) and not (runs["first"].path / "diagnose").exists()


def test_diagnose_run_on_other_data(runs, study, tmp_path, diagnostic_calls):
    """All of them are test data, without distances to the training states; a repeated simulation is that of the run."""
    run, own = runs["first"], diagnose_run(runs["first"], ["trust"])["trust"]
    generate(FLOW, 2, 5, tmp_path / "other.h5")
    other = diagnose_run(run, ["trust"], path=tmp_path / "other.h5")["trust"]
    assert {row["windows"] for row in other.rows} == {8} == {row["windows"] for row in own.rows}
    metrics = {row["metric"] for row in other.rows}
    assert {row["metric"] for row in own.rows} - metrics >= {"distance_lead", "distance_true_lead"}
    (error,) = [
        row["value"] for row in evaluate_run(run, path=tmp_path / "other.h5")
        if (row["metric"], row["lead"], row["model"]) == ("correlation_lead", 3, "transolver-sigma")
    ]  # fmt: skip
    assert error == pytest.approx(
        next(r["value"] for r in other.rows if (r["metric"], r["lead"]) == ("correlation_lead", 3)), rel=1e-6
    )
    with open_store(study / "flow.h5") as store, Writer(tmp_path / "again.h5", store.header, 8) as writer:
        writer.append(store[:] * np.float32(1 + 1e-6))
    again = diagnose_run(run, ["trust"], path=tmp_path / "again.h5")["trust"]
    assert {row["metric"] for row in again.rows} == {row["metric"] for row in own.rows}
    assert {row["windows"] for row in again.rows} == {8} and again.rows[0]["data"] != own.rows[0]["data"]


def test_diagnosis_without_the_training_data_is_completed_with_them(runs, study, tmp_path, diagnostic_calls):
    """The location of the separate test data of a run does not say where its training data are."""
    generate(FLOW, 2, 5, tmp_path / "other.h5")
    first, run = runs["first"], Run(tmp_path / "run")
    recipe = load_recipe(first)
    recipe = replace(recipe, task=replace(recipe.task, test=0), train=replace(recipe.train, updates=1, checks=0))
    train_run(recipe, study / "flow.h5", run, test=tmp_path / "other.h5")
    for path, calls, distances in (
        (tmp_path / "other.h5", 1, False),
        (None, 2, True),
        (tmp_path / "other.h5", 2, True),
    ):
        for _ in range(2):
            rows = diagnose_run(run, ["trust"], Request(windows=2), path=path)["trust"].rows
            assert len(diagnostic_calls) == calls and any(row["metric"] == "distance_lead" for row in rows) == distances


def test_diagnose_run_rejects_other_domains_and_folders(runs, study, tmp_path):
    generate(replace(FLOW, interval=FLOW.interval / 2), 2, 5, tmp_path / "other.h5")
    with pytest.raises(ValueError, match=r"its frames are .* apart, not .*; use matching data\.$"):
        diagnose_run(runs["first"], ["maps"], path=tmp_path / "other.h5")
    with (
        open_store(study / "flow.h5") as store,
        Writer(tmp_path / "mixed.h5", replace(store.header, source="selection"), 1) as writer,
    ):
        writer.append(store[:1])
    with pytest.raises(ValueError, match="is in the training data of"):
        diagnose_run(runs["first"], ["maps"], path=tmp_path / "mixed.h5")
    with pytest.raises(ValueError, match="is not a run"):
        diagnose_run(Run(tmp_path / "nothing"), ["maps"])
    assert not (tmp_path / "nothing").exists()
    moved = tmp_path / "moved.h5"
    moved.write_bytes((study / "flow.h5").read_bytes())
    assert diagnose_run(runs["first"], ["maps"], path=moved)["maps"].rows


# --- the command


def test_diagnose_command_writes_files_and_a_summary(call, runs):
    folders = [runs[name].path for name in ("first", "second", "ffno")]
    options = ("--only", "decomposition, trust", "--device", "cpu", "--windows", 4, "--horizon", 4)
    code, out, err = call("diagnose", *folders, *options)
    assert code == 0 and not err
    for run in runs.values():
        for name in ("decomposition", "trust"):
            assert read_findings(run, name).rows[0]["horizon"] == 4
    rows = read_findings(runs["ffno"], "decomposition").rows
    (share,) = [
        r["value"] for r in rows if (r["metric"], r["lead"], r["field"]) == ("propagation_share", 4, None)
    ]  # fmt: skip
    summary = next(line for line in out.splitlines() if "ffno: " in line and "earlier calls" in line)
    assert float(summary.split()[1]) == pytest.approx(100 * share, rel=0.01)
    assert "(4 windows of the test split, horizon 4)" in out and "spread of seeds" in out
    assert call("diagnose", *folders, *options) == (code, out, err)


def test_diagnose_command_skips_diagnostics_that_do_not_apply(call, runs, monkeypatch):
    fast = {name: DIAGNOSTICS[name] for name in ("maps", "corrections")}
    monkeypatch.setattr(module, "DIAGNOSTICS", fast)
    code, out, _ = call("diagnose", runs["ffno"].path, "--device", "cpu")
    assert code == 0 and "corrections skipped for ffno: ffno has no slice operator" in out and "maps: " in out
    both = (runs["ffno"].path, runs["first"].path, "--only", "corrections", "--windows", 2, "--device", "cpu")
    code, out, _ = call("diagnose", *both)
    assert code == 0 and "corrections skipped for ffno" in out and "first: slice attention changes" in out


def test_diagnose_command_reports_errors_in_one_line(call, runs, tmp_path):
    for arguments, message in (
        ((runs["first"].path, "--only", "magic"), 'Unknown diagnostic "magic"'),
        ((tmp_path / "no",), "is not a run"),
        ((runs["ffno"].path, "--only", "corrections"), "ffno has no slice operator"),
        ((runs["first"].path, "--split", "exam"), "choose from train, validation, test"),
        ((runs["first"].path, "--part", "exam"), "choose from train, validation, test"),  # the old option name
    ):
        code, out, err = call("diagnose", *arguments, "--device", "cpu")
        assert code == 2 and not out and message in err and err.count("\n") == 1


def test_diagnose_help_lists_every_diagnostic():
    from sigmasolver.cli.diagnose import SUMMARIES

    assert SUMMARIES.keys() == DIAGNOSTICS.keys()
