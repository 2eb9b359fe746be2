"""Damaged run folders and invalid environments: every command ends with one sentence."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sigmasolver.cli import main
from sigmasolver.runs import Run, read_rows, read_tensors, write_tensors
from tests.cli.test_train import OWN, TINY, waves

ROOT = Path(__file__).parents[2]
NESTED = "[" * 100_000
DIGITS = "9" * 6000


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run stopped half-way, and the same run finished and evaluated."""
    folder = tmp_path_factory.mktemp("made")
    command = ["train", "--data", waves(folder / "my.npy"), *OWN, *TINY, "--set", "train.ema=0.9"]
    commands = [
        [*command, "--out", folder / "half", "--minutes", 1e-9],
        [*command, "--out", folder / "run"],
        ["evaluate", folder / "run"],
    ]
    for arguments in commands:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exited:
            patch.setattr(sys, "argv", ["sigmasolver", *map(str, arguments), "--device", "cpu"])
            main()
        assert not exited.value.code
    np.save(folder / "start.npy", np.load(folder / "my.npy")[0, :3])
    return folder


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "sigmasolver", *map(str, arguments)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.fixture
def copy(runs, tmp_path):
    for name in ("run", "half"):
        shutil.copytree(runs / name, tmp_path / name)
    return tmp_path


def check_one_sentence(code, err, *texts):
    assert code == 2, err
    assert (
        err.startswith("sigmasolver: ")
        and err.count("\n") == 1
        and err.rstrip().endswith((".", "?"))
        and len(err) < 600
    )
    assert all(text in err for text in texts), err


def commands(folder, runs):
    run, out = folder / "run", folder / "out.npy"
    yield "evaluate", run, "--horizon", 2
    yield "diagnose", run, "--only", "decomposition"
    yield "forecast", run, "--input", runs / "start.npy", "--steps", 2, "--out", out
    yield "train", "--resume", run
    yield "report", run, "--out", folder / "page.html"


def check_refused(call, folder, runs, *texts, failing=("evaluate", "diagnose", "train")):
    """The commands in `failing` must end with one sentence; the others may succeed."""
    for arguments in commands(folder, runs):
        code, _, err = call(*arguments, *([] if arguments[0] == "report" else ["--device", "cpu"]))
        if arguments[0] in failing:
            check_one_sentence(code, err, *texts)
        elif code:
            check_one_sentence(code, err)
        (folder / "out.npy").unlink(missing_ok=True)


@pytest.mark.parametrize(
    "change",
    [
        {"parts": 3},
        {"parts": {"train": "all", "validation": [], "test": []}},
        {"parts": {"train": [0], "validation": [], "test": [[]]}},
        {"parts": {"train": [0], "validation": [], "test": [10**30]}},
        {"parts": {"test": [5]}},
        {"digests": 7},
        {"digests": [[]]},
        {"path": ["a"]},
        {"path": "a\0b"},
        {"fingerprint": {}},
        {"fields": "u"},
        {"test": {"path": "a.h5", "fingerprint": "0", "count": "many", "frames": 4}},
    ],
)
def test_data_json_wrong_types(call, copy, runs, change):
    file = copy / "run" / "data.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    check_refused(call, copy, runs, "data.json is damaged: " + next(iter(change)))


@pytest.mark.parametrize("text", [NESTED, f'{{"a": {DIGITS}}}', "7"])
def test_json_too_deep_or_too_large(call, copy, runs, text):
    for name in ("data.json", "recipe.json", "normaliser.json"):
        before = (copy / "run" / name).read_text()
        (copy / "run" / name).write_text(text)
        check_refused(
            call, copy, runs, name, failing=("evaluate",) if name == "data.json" else ("evaluate", "forecast")
        )
        (copy / "run" / name).write_text(before)
    for name in ("records.jsonl", "log.jsonl"):
        (copy / "run" / name).write_text(text + "\n")
        with pytest.raises(ValueError, match=rf"Line 1 of .*{name} is not a JSON object; remove it\.$"):
            read_rows(copy / "run" / name)
    code, _, err = call("evaluate", copy / "run", "--device", "cpu")
    check_one_sentence(code, err, "Line 1 of", "records.jsonl")


@pytest.mark.parametrize("row", [{}, {"step": "1", "loss": 1.0}, {"step": 1, "loss": None}, {"step": 1, "loss": []}])
def test_log_rows_without_step_or_loss(call, copy, row):
    (copy / "half" / "log.jsonl").write_text(json.dumps(row) + "\n")
    code, _, err = call("train", "--resume", copy / "half", "--device", "cpu")
    check_one_sentence(code, err, "Line 1 of", "log.jsonl has no step and loss; remove it.")


@pytest.mark.parametrize("facts", [{}, {"step": "4", "steps": 4}, {"step": -1}, {"step": 10**30}])
def test_weights_with_missing_or_invalid_facts(call, copy, runs, facts):
    weights = Run(copy / "run").weights
    write_tensors(weights, read_tensors(weights)[0], facts)
    check_refused(call, copy, runs, "weights.safetensors", failing=("evaluate", "forecast"))


@pytest.mark.parametrize("key", ["step", "steps", "best"])
def test_resume_state_with_missing_facts(call, copy, key):
    resume = Run(copy / "half").resume
    tensors, facts = read_tensors(resume)
    write_tensors(resume, tensors, {name: value for name, value in facts.items() if name != key})
    code, _, err = call("train", "--resume", copy / "half", "--device", "cpu")
    check_one_sentence(code, err, f"resume.safetensors has no {key}")


def test_resume_state_with_missing_or_wrong_tensors(call, copy):
    resume = Run(copy / "half").resume
    tensors, facts = read_tensors(resume)
    part = {name.partition(".")[0]: name for name in tensors}
    assert set(part) == {"model", "average", "optimiser"}
    wrong = [{name: t for name, t in tensors.items() if name != missing} for missing in part.values()]
    wrong += [{**tensors, name: torch.zeros(3, 5, 7)} for name in part.values()]
    wrong += [{**tensors, f"{name}.more": torch.zeros(1)} for name in part.values()]
    wrong += [{**tensors, f"optimiser.{index}.step": torch.tensor(1.0)} for index in ("9999", "x", DIGITS)]
    wrong += [{name: t for name, t in tensors.items() if not name.startswith("optimiser.")}]
    for state in wrong:
        write_tensors(resume, state, facts)
        code, _, err = call("train", "--resume", copy / "half", "--device", "cpu")
        check_one_sentence(code, err, "resume.safetensors is not a complete state of this model")
    write_tensors(resume, tensors, facts)
    assert call("train", "--resume", copy / "half", "--device", "cpu")[0] == 0
    assert Run(copy / "half").digest == Run(copy / "run").digest, "same weights as the uninterrupted run"


@pytest.mark.parametrize("width", [10**30, 16 * 10**16, 16 * 10**8])
def test_recipe_width_beyond_memory(call, copy, runs, width):
    file = copy / "run" / "recipe.json"
    recipe = json.loads(file.read_text())
    file.write_text(json.dumps({**recipe, "model": {**recipe["model"], "width": width}}))
    check_refused(call, copy, runs, failing=("evaluate", "forecast", "train"))


@pytest.mark.parametrize("value", [DIGITS, "0x" + "f" * 6000, "-1" + "0" * 30])
def test_settings_with_integers_of_thousands_of_digits(call, copy, runs, value):
    for arguments in (
        ("simulate", "demo", "--out", copy / "x.h5", "--set", f"grid={value}"),
        ("train", "--data", runs / "my.npy", *OWN, "--set", f"model.width={value}", "--out", copy / "new"),
    ):
        code, _, err = call(*arguments, "--device", "cpu")
        check_one_sentence(code, err, "must be an integer")


@pytest.mark.parametrize(
    "environment",
    [
        {"LOCAL_WORLD_SIZE": "0"},
        {"LOCAL_WORLD_SIZE": DIGITS},
        {"RANK": "one", "WORLD_SIZE": "2"},
        {"WORLD_SIZE": "0", "RANK": "0"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "1"},
    ],
)
def test_invalid_torchrun_environment(call, copy, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, _, err = call("train", "--resume", copy / "half", "--device", "cpu")
    check_one_sentence(code, err, "let torchrun set", next(iter(environment)))


def test_file_name_that_is_not_utf_8(tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.npy")
    waves(tmp_path / "a.npy").rename(name)
    for arguments in (("import-data", name, "--out", tmp_path / "a.h5"), ("inspect", name), ("evaluate", name)):
        result = run(*arguments)
        check_one_sentence(result.returncode, result.stderr, "is not UTF-8; rename")


def test_run_folder_without_permission(call, copy):
    for path in (copy, *list(copy.parents)[:3]):
        path.chmod(path.stat().st_mode | 0o055)
    (copy / "run").chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        code, _, err = call("evaluate", copy / "run", "--device", "cpu")
    finally:
        if root:
            os.seteuid(0)
        (copy / "run").chmod(0o755)
    check_one_sentence(code, err, "Permission denied: ")


def test_records_with_a_missing_row(call, copy):
    """A missing row would silently be missing from the table."""
    records = Run(copy / "run").records
    rows = records.read_text().splitlines(keepends=True)
    assert call("evaluate", copy / "run", "--device", "cpu")[0] == 0
    for lost in (0, 1, len(rows) - 1):
        records.write_text("".join(rows[:lost] + rows[lost + 1 :]))
        code, _, err = call("evaluate", copy / "run", "--device", "cpu")
        check_one_sentence(code, err, "records.jsonl contains only part of this evaluation")


@pytest.mark.parametrize("change", [{"metric": 7}, {"seed": "1"}, {"grid": None}, {"value": []}, {"run": None}])
def test_records_with_invalid_rows(call, copy, change):
    records = Run(copy / "run").records
    first, *others = read_rows(records)
    records.write_text("".join(json.dumps(row) + "\n" for row in ({**first, **change}, *others)))
    for arguments in (
        ("evaluate", copy / "run", "--device", "cpu"),
        ("report", copy / "run", "--out", copy / "x.html"),
    ):
        code, _, err = call(*arguments)
        check_one_sentence(code, err, "Line 1 of", f"is not a valid record: {next(iter(change))} is missing")


def test_normaliser_of_another_recipe(call, copy, runs):
    """Its statistics would belong to other fields."""
    file = copy / "run" / "normaliser.json"
    facts = json.loads(file.read_text())
    facts["inputs"]["fields"] = ["v"]
    file.write_text(json.dumps(facts))
    check_refused(call, copy, runs, "normaliser.json of", "does not match its recipe", failing=("evaluate", "forecast"))
