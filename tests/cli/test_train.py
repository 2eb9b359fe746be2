"""`train`, `evaluate`, `forecast` and `suite` on a user's own arrays: written files and one-sentence errors."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

import sigmasolver
from sigmasolver.data.formats import import_data
from sigmasolver.forecast.checkpoint import load, load_recipe
from sigmasolver.models import list_models
from sigmasolver.recipes import SUITES, suite_of
from sigmasolver.runs import Run, read_rows, read_tensors
from tests.forked import COMMAND, Forked

ROOT = Path(sigmasolver.__file__).parents[1]
TINY = [
    word
    for setting in (
        "model.width=16",
        "model.depth=1",
        "model.heads=2",
        "model.slices=4",
        "model.modes=3",
        "train.updates=4",
    )
    for word in ("--set", setting)
]
OWN = ["--fields", "u", "--history", 2, "--block", 1, "--horizon", 3]


def waves(path, count=6, frames=8):
    """Write sine waves travelling over an 8 x 8 grid: (count, frames, x, y)."""
    t, x, y = np.meshgrid(np.arange(frames), np.arange(8), np.arange(8), indexing="ij")
    phases = np.random.default_rng(0).uniform(0, 6, count)
    np.save(path, np.stack([np.sin(np.pi * (x + y - t) / 4 + phase) for phase in phases]).astype(np.float32))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on own arrays, trained in a separate process."""
    folder = tmp_path_factory.mktemp("learned")
    args = ["train", "--data", waves(folder / "my.npy"), *OWN, *TINY, "--out", folder / "run", "--device", "cpu"]
    process = Forked(COMMAND, *args, env={**os.environ, "COLUMNS": "200"})
    out, err = process.communicate()
    assert process.returncode == 0, err
    import_data(folder / "my.npy", folder / "my.h5", names=["u"])
    return folder, out


def test_train_on_own_arrays_prints_its_choices_and_writes_a_run(trained):
    folder, out = trained
    recipe = load_recipe(Run(folder / "run"))
    task = recipe.task
    assert (task.name, task.inputs, task.history, task.block, task.horizon) == ("my", ("u",), 2, 1, 3)
    assert (recipe.model.width, recipe.train.updates, task.train, task.test) == (16, 4, 5, 1)
    for line in (
        "my.npy: 6 trajectories of 8 × 8 × 8 × 1 from arrays, read in place",
        "2 given, 1 predicted per call, 3 evaluated",
        "the first 5 trajectories for training, the last 1 for testing",
        "grid: 8 × 8, as stored",
        "trained, 4 steps",
    ):
        assert line in out, out
    assert f"next: sigmasolver evaluate {folder / 'run'}" in out
    assert read_tensors(Run(folder / "run").weights)[1]["step"] == 4
    assert not list((folder / "run").glob("*.h5")), "the arrays stay where they are"


def test_evaluate_prints_the_records_it_writes(trained, call):
    folder, _ = trained
    code, out, _ = call("evaluate", folder / "run", "--device", "cpu")
    assert code == 0
    rows = read_rows(Run(folder / "run").records)
    error = {row["model"]: row["value"] for row in rows if row["metric"] == "relative_l2"}
    assert set(error) == {"transolver-sigma", "persistence"}
    assert f"{100 * error['persistence']:.3g}"[:4] in out and "my: relative L2 error of free forecasts" in out
    # The waves move by one point per frame, so persistence has the relative error 2 sin(π t / 8) in every window.
    for row in rows:
        if row["model"] == "persistence" and row["metric"] == "relative_l2_lead":
            assert row["value"] == pytest.approx(2 * np.sin(np.pi * row["lead"] / 8), rel=1e-5)
    code, out, _ = call("evaluate", folder / "run", "--precision", "bf16", "--device", "cpu")
    assert code == 0 and "windows of the test split, horizon 3, in bf16" in out
    both = read_rows(Run(folder / "run").records)
    assert both[: len(rows)] == rows and {row["forecast_precision"] for row in both[len(rows) :]} == {"bf16"}
    longer, out, _ = call("evaluate", folder / "run", "--horizon", 5, "--protocol", "teacher-forced", "--windows", 1)
    assert longer == 0 and "teacher-forced forecasts on 8 × 8, 1 window of the test split, horizon 5" in out


def test_forecast_writes_the_rollout(trained, call, tmp_path):
    folder, _ = trained
    history = np.load(folder / "my.npy")[0, :3]
    np.save(tmp_path / "start.npy", history)
    args = ["--input", tmp_path / "start.npy", "--steps", 5, "--out", tmp_path / "p.npy", "--device", "cpu"]
    code, out, _ = call("forecast", folder / "run", *args)
    assert code == 0 and "has 3 frames; the last 2 were used" in out and "1 × 5 × 8 × 8 × 1" in out
    expected = load(folder / "run").rollout(torch.from_numpy(history[None, 1:, ..., None]), 5).frames
    np.testing.assert_array_equal(np.load(tmp_path / "p.npy"), expected.numpy())
    code, _, err = call("forecast", folder / "run", *args)
    assert code == 2 and "already exists" in err
    args[5] = tmp_path / "short.npy"
    code, _, err = call("forecast", folder / "run", *args, "--precision", "bf16")
    assert code == 0, err
    bf16_frames, frames = np.load(tmp_path / "short.npy"), expected.numpy()
    assert 0 < np.linalg.norm(bf16_frames - frames) < 0.02 * np.linalg.norm(frames)


def test_train_resume_of_a_finished_run_changes_nothing(trained, call):
    folder, _ = trained
    run = Run(folder / "run")
    before = run.weights.read_bytes(), run.log.read_bytes()
    code, out, _ = call("train", "--resume", folder / "run", "--device", "cpu")
    assert code == 0 and "trained, 4 steps" in out and (run.weights.read_bytes(), run.log.read_bytes()) == before
    code, _, err = call("train", "--resume", folder / "run", "--history", 4)
    assert code == 2 and "keeps its recipe" in err


def test_windows_lists_stored_frames(trained, call):
    folder, _ = trained
    settings = ("task.inputs=('u',)", "task.targets=('u',)", "task.grid=(8,8)", "task.train=5", "task.test=1",
                "task.history=2", "task.horizon=3")  # fmt: skip
    args = [word for setting in settings for word in ("--set", setting)]
    code, out, err = call("windows", "ns2d", "--data", folder / "my.h5", "--split", "test", *args)
    assert code == 0, err
    head, *lines = out.splitlines()
    assert head.split("\t") == ["trajectory", "history", "future", "last"]
    assert [tuple(map(int, line.split("\t"))) for line in lines] == [(5, s, s + 2, s + 4) for s in range(4)]
    assert "4 windows, 4 in each of 1 trajectories" in err
    assert call("windows", "ns2d", "--data", folder / "my.h5", "--part", "test", *args) == (0, out, err)


def test_suite_list_shows_progress(call, tmp_path):
    code, out, _ = call("suite", "ablations", "--list", "--out", tmp_path / "runs", "--only", "ns2d-*-43")
    lines = [line.split() for line in out.splitlines()]
    names = [name for name in suite_of("ablations") if name.startswith("ns2d") and name.endswith("43")]
    assert code == 0 and lines == [[name, "pending"] for name in names] and len(names) == 8
    assert not list(tmp_path.iterdir())


def test_suite_minutes_stops_and_resumes(call, trained, tmp_path):
    folder, _ = trained
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "ns2d.h5").symlink_to(folder / "my.h5")
    sizes = ("grid=(8,8)", "history=2", "horizon=3", "train=4", "test=1", "inputs=('u',)", "targets=('u',)")
    args = [word for setting in sizes for word in ("--set", f"task.{setting}")]
    args = [*args, *TINY, "--data", tmp_path / "data", "--out", tmp_path / "runs", "--only", "ns2d-*-sigma-42"]
    code, out, err = call("suite", "main", *args, "--minutes", "1e-9")
    assert code == 0, err
    assert "stopped by --minutes while training (25.0 % trained); the same command resumes" in out
    assert call("suite", "main", *args, "--list")[1].split() == ["ns2d-transolver-sigma-42", "25.0", "%"]
    code, out, err = call("suite", "main", *args)
    assert code == 0 and "training from 25.0 %" in out, err
    assert call("suite", "main", *args, "--list")[1].split() == ["ns2d-transolver-sigma-42", "finished"]
    assert "already finished" in call("suite", "main", *args)[1]
    code, out, err = call("suite", "main", *args, "--windows", 1)
    assert code == 0 and "ns2d-transolver-sigma-42: evaluating" in out and "training from" not in out, err


def test_suite_records_finished_rows_in_a_ledger(call, trained, tmp_path):
    """Rows are diagnosed, added to the file, and from then on skipped wherever their runs are."""
    folder, _ = trained
    (tmp_path / "data").mkdir()
    import_data(folder / "my.npy", tmp_path / "data" / "ns2d.h5", names=["u"])
    sizes = ("grid=(8,8)", "history=2", "horizon=3", "train=4", "test=2", "inputs=('u',)", "targets=('u',)")
    args = [word for setting in sizes for word in ("--set", f"task.{setting}")]
    ledger, names = tmp_path / "ledger.jsonl", ["ns2d-transolver-sigma-42", "ns2d-unet-42"]
    args = ["suite", "main", *args, *TINY, "--data", tmp_path / "data", "--diagnose", "--ledger", ledger]
    only = [word for name in names for word in ("--only", name)]
    code, out, err = call(*args, *only[:2], "--out", tmp_path / "runs")
    assert code == 0, err
    rows = read_rows(ledger)
    samples = {(row.get("diagnostic"), row["windows"], row["part"]) for row in rows}
    assert samples == {(None, 8, "test"), ("decomposition", 8, "test"), ("corrections", 3, "test")}
    assert {row["run"] for row in rows} == set(names[:1]) and {row["budget"] for row in rows} == {4 / 250_000}
    for lead in (1, 2, 3):
        parts = {row["metric"]: row["value"] for row in rows if row.get("diagnostic") and row["lead"] == lead}
        whole = sum(parts[f"{part}_relative"] for part in ("injection", "propagation", "cross"))
        assert whole == pytest.approx(parts["total_relative"], rel=1e-6)
    elsewhere = ("--out", tmp_path / "elsewhere")
    code, out, err = call(*args, *only, *elsewhere, "--list")
    assert dict(line.split(maxsplit=1) for line in out.splitlines()) == {names[0]: f"in {ledger}", names[1]: "pending"}
    code, out, err = call(*args, *only, *elsewhere)
    assert code == 0 and f"{ledger}: has 1 of 2 runs" in out, err
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == names[1:]
    diagnosed = {(row["run"], row.get("diagnostic")) for row in read_rows(ledger)}
    expected = {(names[0], name) for name in (None, "decomposition", "corrections")}
    assert diagnosed == expected | {(names[1], None), (names[1], "decomposition")}, "a U-Net has no slices"
    unwritable = tmp_path / "ledger.jsonl" / "rows.jsonl"  # in a file: nothing is trained for it
    code, out, err = call(*args[:-1], unwritable, "--only", names[1], "--out", tmp_path / "new")
    assert code == 2 and "rows.jsonl" in err and not (tmp_path / "new").exists(), err
    table = call("figure", "decomposition", ledger, "--where", "diagnostic=decomposition", "--out", tmp_path)
    assert table[0] == 0, table[2]
    code, _, err = call(*args[:-1], tmp_path)
    assert code == 2 and "is a folder" in err


def test_train_minutes_stops_and_resumes(call, trained, tmp_path):
    folder, _ = trained
    args = ("train", "--data", folder / "my.npy", *OWN, *TINY, "--out", tmp_path / "run")
    code, out, err = call(*args, "--minutes", "1e-9")
    assert code == 0, err
    assert "stopped, 1 steps, loss" in out and f"next: sigmasolver train --resume {tmp_path / 'run'}" in out
    code, out, err = call("train", "--resume", tmp_path / "run")
    assert code == 0 and "trained, 4 steps" in out, err


def test_models_lists_all_with_parameter_counts(call):
    code, out, _ = call("models")
    assert code == 0 and all(name in out for name in list_models())
    row = next(line.split() for line in out.splitlines() if line.strip().startswith("transolver-sigma "))
    assert row == ["transolver-sigma", "1,245,289", "4.98", "128"]
    rows = {cells[0]: cells[1] for line in out.splitlines() if len(cells := line.split()) == 4}
    assert (rows["unet"], rows["eddyformer"], rows["ffno"]) == ("17,323,137", "2,232,611", "9,494,657")
    assert "trainable parameters for: sigmasolver train darcy --model NAME" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("train", "ns3d", "--data", "DATA", "--out", "NEW"), "did you mean ns2d"),
        (("train", "ns2d", "--out", "NEW"), "Missing --data"),
        (("train", "--data", "DATA"), "Missing --data or --out"),
        (
            ("train", "ns2d", "--data", "DATA", "--out", "NEW", "--fields", "u"),
            "--fields applies only to your own data",
        ),
        (("train", "--data", "nothing.npy", "--out", "NEW"), "File or folder not found: nothing.npy"),
        (("train", "--data", "DATA", "--out", "NEW", "--history", "9"), "leaves no frames to forecast out of 8"),
        (("train", "--data", "DATA", "--out", "NEW", "--history", "0"), "must be at least 1"),
        (("train", "--data", "DATA", "--out", "NEW", "--targets", "w"), 'Unknown field "w"'),
        (("train", "--data", "DATA", "--out", "NEW", "--model", "transsolver"), "did you mean transolver"),
        (("train", "--data", "DATA", "--out", "NEW", "--set", "train.updates=many"), "an integer or none"),
        (("train", "--data", "DATA", "--out", "NEW", "--set", "train.batch=99"), "lower train.batch"),
        (("train", "--data", "DATA", "--out", "NEW", "--set", "task.grid=(9,9)"), "set task.space_stride or task.grid"),
        (("train", "--data", "DATA", "--out", "NEW", "--engine", "steam"), "choose from eager, compiled"),
        (("train", "--data", "DATA", "--out", "NEW", "--engine", "graph"), "needs a GPU"),
        (("train", "--data", "DATA", "--out", "NEW", "--shard"), "start them with torchrun"),
        (("train", "ns2d", "--data", "DATA", "--out", "NEW"), "training and"),
        (("train", "--resume", "."), "is not a run"),
        (("evaluate", "NEW"), "is not a run"),
        (("evaluate", "RUN", "--grid", "wide"), "integers such as 64"),
        (("evaluate", "RUN", "--horizon", "9"), "shorten history or horizon"),
        (("evaluate", "RUN", "--part", "exam"), "choose from train, validation, test"),
        (("evaluate", "RUN", "--split", "exam"), "choose from train, validation, test"),
        (("evaluate", "RUN", "--precision", "half"), "choose from float32, tf32, bf16"),
        (("evaluate", "RUN", "--precision", "tf32"), "choose float32 or bf16 on a CPU"),
        (("evaluate", "RUN", "--data", "DATA.h5"), "DATA.h5 not found"),
        (("forecast", "RUN", "--input", "nothing.npy", "--steps", "3", "--out", "p.npy"), "nothing.npy not found"),
        (("forecast", "RUN", "--input", "DATA", "--steps", "3", "--out", "p.csv"), "the file name must end in"),
        (("suite", "main"), "with --data"),
        (("suite", "everything", "--list"), "Unknown suite"),
        (("suite", "main", "--only", "x*"), "list them with --list"),
        (("windows", "ns2d", "--data", "DATA", "--split", "exam"), "choose from train, validation, test"),
        (("windows", "ns2d", "--data", "DATA"), "training and"),
    ],
)
def test_train_and_evaluate_errors_are_one_sentence(trained, call, args, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder, _ = trained
    paths = {"DATA": folder / "my.h5", "RUN": folder / "run", "NEW": tmp_path / "new"}
    on_cpu = ("--device", "cpu") * (args[0] != "windows")
    code, _, err = call(*(paths.get(word, word) for word in args), *on_cpu)
    assert code == 2 and message in err, err
    assert err.count("\n") == 1 and err.startswith("sigmasolver: ") and err.rstrip("\n").endswith((".", "?")), err
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_train_succeeds_in_the_folder_of_a_failed_command(trained, call, tmp_path):
    folder, _ = trained
    args = [
        "train",
        "--data",
        folder / "my.h5",
        *OWN[2:],
        *TINY,
        "--out",
        tmp_path / "new",
        "--device",
        "cpu",
    ]
    code, _, err = call(*args, "--set", "train.batch=99")
    assert code == 2 and "an epoch has" in err
    code, _, err = call(*args)
    assert code == 0, err
    assert json.loads((tmp_path / "new" / "recipe.json").read_text())["train"]["batch"] == 8


def test_suite_help_lists_every_suite(call):
    code, out, _ = call("suite", "--help")
    assert code == 0 and all(name in out for name in SUITES)
