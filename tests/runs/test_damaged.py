"""Run folders that were damaged, and what the environment may say: one sentence each, from every command."""

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
def made(tmp_path_factory):
    """A run that was stopped half-way, and the same run finished and evaluated."""
    folder = tmp_path_factory.mktemp("made")
    words = ["train", "--data", waves(folder / "my.npy"), *OWN, *TINY, "--set", "train.ema=0.9"]
    commands = [
        [*words, "--out", folder / "half", "--minutes", 1e-9],
        [*words, "--out", folder / "run"],
        ["evaluate", folder / "run"],
    ]
    for one in commands:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as left:
            patch.setattr(sys, "argv", ["sigmasolver", *map(str, one), "--device", "cpu"])
            main()
        assert not left.value.code
    np.save(folder / "start.npy", np.load(folder / "my.npy")[0, :3])
    return folder


def run(*words, **environment):
    return subprocess.run(
        [sys.executable, "-m", "sigmasolver", *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.fixture
def copy(made, tmp_path):
    for name in ("run", "half"):
        shutil.copytree(made / name, tmp_path / name)
    return tmp_path


def one_sentence(code, err, *says):
    assert code == 2, err
    assert (
        err.startswith("sigmasolver: ")
        and err.count("\n") == 1
        and err.rstrip().endswith((".", "?"))
        and len(err) < 600
    )
    assert all(one in err for one in says), err


def commands(folder, made):
    run, out = folder / "run", folder / "out.npy"
    yield "evaluate", run, "--horizon", 2
    yield "diagnose", run, "--only", "decomposition"
    yield "forecast", run, "--input", made / "start.npy", "--steps", 2, "--out", out
    yield "train", "--resume", run
    yield "report", run, "--out", folder / "page.html"


def refused(call, folder, made, *says, which=("evaluate", "diagnose", "train")):
    """These commands end in one sentence; the others end in one or do their work."""
    for words in commands(folder, made):
        code, _, err = call(*words, *([] if words[0] == "report" else ["--device", "cpu"]))
        if words[0] in which:
            one_sentence(code, err, *says)
        elif code:
            one_sentence(code, err)
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
def test_wrong_types_in_data_json(call, copy, made, change):
    file = copy / "run" / "data.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    refused(call, copy, made, "data.json is damaged: " + next(iter(change)))


@pytest.mark.parametrize("text", [NESTED, f'{{"a": {DIGITS}}}', "7"])
def test_json_that_python_cannot_hold(call, copy, made, text):
    for name in ("data.json", "recipe.json", "normaliser.json"):
        before = (copy / "run" / name).read_text()
        (copy / "run" / name).write_text(text)
        refused(call, copy, made, name, which=("evaluate",) if name == "data.json" else ("evaluate", "forecast"))
        (copy / "run" / name).write_text(before)
    for name in ("records.jsonl", "log.jsonl"):
        (copy / "run" / name).write_text(text + "\n")
        with pytest.raises(ValueError, match=rf"Line 1 of .*{name} is not a JSON object; remove it\.$"):
            read_rows(copy / "run" / name)
    code, _, err = call("evaluate", copy / "run", "--device", "cpu")
    one_sentence(code, err, "Line 1 of", "records.jsonl")


@pytest.mark.parametrize("row", [{}, {"step": "1", "loss": 1.0}, {"step": 1, "loss": None}, {"step": 1, "loss": []}])
def test_rows_of_the_log_without_step_or_loss(call, copy, row):
    (copy / "half" / "log.jsonl").write_text(json.dumps(row) + "\n")
    code, _, err = call("train", "--resume", copy / "half", "--device", "cpu")
    one_sentence(code, err, "Line 1 of", "log.jsonl has no step and loss; remove it.")


@pytest.mark.parametrize("facts", [{}, {"step": "4", "steps": 4}, {"step": -1}, {"step": 10**30}])
def test_facts_missing_in_the_weights(call, copy, made, facts):
    weights = Run(copy / "run").weights
    write_tensors(weights, read_tensors(weights)[0], facts)
    refused(call, copy, made, "weights.safetensors", which=("evaluate", "forecast"))


@pytest.mark.parametrize("key", ["step", "steps", "best"])
def test_facts_missing_in_the_state(call, copy, key):
    resume = Run(copy / "half").resume
    tensors, facts = read_tensors(resume)
    write_tensors(resume, tensors, {name: value for name, value in facts.items() if name != key})
    code, _, err = call("train", "--resume", copy / "half", "--device", "cpu")
    one_sentence(code, err, f"resume.safetensors has no {key}")


def test_a_state_that_lacks_a_tensor(call, copy):
    resume = Run(copy / "half").resume
    tensors, facts = read_tensors(resume)
    part = {name.partition(".")[0]: name for name in tensors}
    assert set(part) == {"model", "average", "optimiser"}
    wrong = [{name: t for name, t in tensors.items() if name != one} for one in part.values()]
    wrong += [{**tensors, name: torch.zeros(3, 5, 7)} for name in part.values()]
    wrong += [{**tensors, f"{name}.more": torch.zeros(1)} for name in part.values()]
    wrong += [{**tensors, f"optimiser.{index}.step": torch.tensor(1.0)} for index in ("9999", "x", DIGITS)]
    wrong += [{name: t for name, t in tensors.items() if not name.startswith("optimiser.")}]
    for one in wrong:
        write_tensors(resume, one, facts)
        code, _, err = call("train", "--resume", copy / "half", "--device", "cpu")
        one_sentence(code, err, "resume.safetensors is not a complete state of this model")
    write_tensors(resume, tensors, facts)
    assert call("train", "--resume", copy / "half", "--device", "cpu")[0] == 0
    assert Run(copy / "half").digest == Run(copy / "run").digest, "on the way of the run that was never stopped"


@pytest.mark.parametrize("width", [10**30, 16 * 10**16, 16 * 10**8])
def test_a_width_beyond_any_memory(call, copy, made, width):
    file = copy / "run" / "recipe.json"
    recipe = json.loads(file.read_text())
    file.write_text(json.dumps({**recipe, "model": {**recipe["model"], "width": width}}))
    refused(call, copy, made, which=("evaluate", "forecast", "train"))


@pytest.mark.parametrize("value", [DIGITS, "0x" + "f" * 6000, "-1" + "0" * 30])
def test_integers_of_thousands_of_digits(call, copy, made, value):
    for words in (
        ("simulate", "demo", "--out", copy / "x.h5", "--set", f"grid={value}"),
        ("train", "--data", made / "my.npy", *OWN, "--set", f"model.width={value}", "--out", copy / "new"),
    ):
        code, _, err = call(*words, "--device", "cpu")
        one_sentence(code, err, "must be an integer")


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
def test_an_environment_that_torchrun_did_not_make(call, copy, monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, _, err = call("train", "--resume", copy / "half", "--device", "cpu")
    one_sentence(code, err, "let torchrun set", next(iter(environment)))


def test_a_name_that_is_not_utf_8(tmp_path):
    name = os.fsdecode(os.fsencode(tmp_path) + b"/a\xff.npy")
    waves(tmp_path / "a.npy").rename(name)
    for words in (("import-data", name, "--out", tmp_path / "a.h5"), ("inspect", name), ("evaluate", name)):
        done = run(*words)
        one_sentence(done.returncode, done.stderr, "is not UTF-8; rename")


def test_a_folder_that_may_not_be_entered(call, copy):
    for one in (copy, *list(copy.parents)[:3]):
        one.chmod(one.stat().st_mode | 0o055)
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
    one_sentence(code, err, "Permission denied: ")


def test_records_that_lost_a_row_of_an_evaluation(call, copy):
    """A row that is gone would be missing from the table without a word."""
    records = Run(copy / "run").records
    rows = records.read_text().splitlines(keepends=True)
    assert call("evaluate", copy / "run", "--device", "cpu")[0] == 0
    for lost in (0, 1, len(rows) - 1):
        records.write_text("".join(rows[:lost] + rows[lost + 1 :]))
        code, _, err = call("evaluate", copy / "run", "--device", "cpu")
        one_sentence(code, err, "records.jsonl contains only part of this evaluation")


@pytest.mark.parametrize("change", [{"metric": 7}, {"seed": "1"}, {"grid": None}, {"value": []}, {"run": None}])
def test_rows_of_records_that_are_no_results(call, copy, change):
    records = Run(copy / "run").records
    first, *rest = read_rows(records)
    records.write_text("".join(json.dumps(row) + "\n" for row in ({**first, **change}, *rest)))
    for words in (("evaluate", copy / "run", "--device", "cpu"), ("report", copy / "run", "--out", copy / "x.html")):
        code, _, err = call(*words)
        one_sentence(code, err, "Line 1 of", f"is not a valid record: {next(iter(change))} is missing")


def test_a_normaliser_of_another_recipe(call, copy, made):
    """Its numbers would be those of other fields."""
    file = copy / "run" / "normaliser.json"
    facts = json.loads(file.read_text())
    facts["inputs"]["fields"] = ["v"]
    file.write_text(json.dumps(facts))
    refused(call, copy, made, "normaliser.json of", "does not match its recipe", which=("evaluate", "forecast"))
