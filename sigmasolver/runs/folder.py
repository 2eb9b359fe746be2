"""The run folder: all that training leaves behind, and all it needs to go on.

    recipe.json           what was asked for; another recipe in the same folder is refused
    data.json             the file it learns from: where it is, its fingerprint, and the trajectories of each part
    normaliser.json       the maps between physical units and what the network sees
    origins.json          where names that are not built in came from: a model, a loss or an optimiser of one's own
    weights.safetensors   the weights that the run keeps
    resume.safetensors    one consistent state (weights, optimiser, average, step) to continue from
    log.jsonl             a row now and then while training
    records.jsonl         tidy results: a row per task, model, seed, metric, field and lead

Files are replaced whole, so a kill at any instant leaves the newest complete one. Rows are appended whole; a row that a
kill tore is dropped by the next reader or writer. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sigmasolver.runs.files import open_lock, plain_errors, read_bytes, replacing
from sigmasolver.version import __version__

__all__ = [
    "Run",
    "append_row",
    "provenance",
    "read_facts",
    "read_records",
    "read_rows",
    "read_tensors",
    "replace_rows",
    "write_tensors",
]

FORMAT = "sigmasolver-run-1"
PARTS = ("train", "validation", "test")


class Run:
    """A folder; made when first written to."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def weights(self) -> Path:
        published = self.path / "model.safetensors"  # its name in a folder for publishing (model_cards/share.py)
        return published if published.exists() else self.path / "weights.safetensors"

    @property
    def resume(self) -> Path:
        return self.path / "resume.safetensors"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def records(self) -> Path:
        return self.path / "records.jsonl"

    @property
    def digest(self) -> str:
        """What tells the kept weights from others."""
        return hashlib.sha256(read_bytes(self.weights)).hexdigest()[:16]

    @contextmanager
    def held(self, what: str, wait: bool = False) -> Iterator[None]:
        """Hold one part of the run against other processes, or say that one has it; a dead holder holds nothing."""
        import fcntl  # not on Windows

        with plain_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            handle = open_lock(self.path / f"{what}.lock")
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(
                    f"Another process is using {self.path}; wait for it to finish, or choose another folder."
                ) from None
            yield
        finally:
            os.close(handle)

    @property
    def finished(self) -> bool:
        """Whether the last step was taken and its weights are there; final weights need no resume state to tell."""
        if not self.weights.exists():
            return False
        facts = read_facts(self.resume if self.resume.exists() else self.weights)
        return "steps" in facts and facts.get("step") == facts["steps"]

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Plain values as a file of this name, replaced whole."""
        with plain_errors(self.path / name):
            self.path.mkdir(parents=True, exist_ok=True)
            with replacing(self.path / name) as target:
                target.write((json.dumps(values, indent=2) + "\n").encode())

    def read_json(self, name: str) -> dict[str, Any]:
        """What `write_json` wrote."""
        file = self.path / name
        try:
            values = _parse(read_bytes(file))
        except FileNotFoundError:
            raise ValueError(
                f"{self.path} is not a run: {name} not found; pass a run folder, or rerun the command that should "
                "have created it."
            ) from None
        if values is _NO_JSON:
            raise ValueError(f"{file} is not valid JSON; copy it again or retrain the run.")
        if not isinstance(values, dict):
            raise ValueError(f"{file} does not contain a JSON object; copy it again or retrain the run.")
        wrong = _wrong_in_data(values) if name == "data.json" else None
        if wrong is not None:
            raise ValueError(f"{file} is damaged: {wrong} has an unexpected type; copy it again.")
        return values

    def training_seconds(self) -> float | None:
        """Of the training, all its starts together, with what each takes before its first update; None if the log does
        not tell."""
        times = [row.get("seconds") for row in self.read_log()] if self.log.exists() else []
        known = [float(one) for one in times if isinstance(one, int | float)]
        if not known or len(known) < len(times):
            return None
        return sum(one for one, following in itertools.pairwise([*known, -1.0]) if following < one)

    def read_log(self) -> list[dict[str, Any]]:
        """The rows of log.jsonl, each with its step and loss."""
        rows = read_rows(self.log)
        for number, row in enumerate(rows, start=1):
            numbers = (row.get("loss"), row.get("error", 0.0))
            if not _is_count(row.get("step")) or any(type(value) not in (int, float) for value in numbers):
                raise ValueError(f"Line {number} of {self.log} has no step and loss; remove it.")
        return rows

    def start(self, recipe: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> None:
        """Write the recipe, or make sure that the folder already holds this one.

        `stored` is the recipe of the folder in today's names, where the caller knows them.
        """
        file = self.path / "recipe.json"
        if file.exists():
            old, new = (json.loads(json.dumps(plain)) for plain in (stored or self.recipe(), recipe))
            if old != new:
                raise ValueError(
                    f"{self.path} contains a run with a different recipe ({', '.join(_differences(old, new))}); "
                    "choose another folder."
                )
            return
        self.write_json("recipe.json", recipe)

    def recipe(self) -> dict[str, Any]:
        """What was asked for, as plain values."""
        return self.read_json("recipe.json")


def _wrong_in_data(facts: Mapping[str, Any]) -> str | None:
    """The first entry of data.json that is of the wrong type; a run of an earlier version may lack some."""
    parts = facts.get("parts", {} if "frames" in facts else {part: [] for part in PARTS})
    if not isinstance(parts, dict) or not all(_are(_is_count, parts.get(part)) for part in PARTS):
        return "parts"
    if not _are(_is_text, facts.get("digests", [])):
        return "digests"
    if not _is_count(facts.get("frames", 0)):
        return "frames"
    if not _are(_is_text, facts.get("fields", [])):
        return "fields"
    if "test" in facts and not _is_test(facts["test"]):
        return "test"
    return next((key for key in ("path", "fingerprint") if not _is_text(facts.get(key, ""))), None)


def _is_test(value: object) -> bool:
    """Whether this says where test data of their own lie, and what they are."""
    if not isinstance(value, dict) or not all(_is_text(value.get(key)) for key in ("path", "fingerprint")):
        return False
    return all(_is_count(value.get(key)) for key in ("count", "frames"))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _are(check: Callable[[object], bool], values: object) -> bool:
    return isinstance(values, list) and all(map(check, values))


_NO_JSON = object()


def _parse(data: bytes | str) -> Any:
    """What this JSON says; `_NO_JSON` where it is none, too deeply nested, or has an integer of thousands of digits."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return _NO_JSON


def _differences(first: Mapping[str, Any], second: Mapping[str, Any], where: str = "") -> list[str]:
    """The settings that differ, by their dotted names."""
    found = []
    for key in dict.fromkeys((*first, *second)):
        one, two = first.get(key), second.get(key)
        if isinstance(one, dict) and isinstance(two, dict):
            found += _differences(one, two, f"{where}{key}.")
        elif one != two:
            found.append(f"{where}{key}")
    return found


DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""As safetensors names them."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
    """Named tensors and plain facts into one safetensors file, replaced whole; equal contents give equal bytes.

    The library's own `save_file` orders the metadata at random and makes files that only their owner can read.
    """
    # Wide types first, as the library has them: every tensor is then aligned.
    contents = sorted(tensors.items(), key=lambda one: (-one[1].element_size(), one[0]))
    header: dict[str, Any] = {"__metadata__": {"facts": json.dumps(facts), "format": FORMAT, "package": __version__}}
    end = 0
    for name, tensor in contents:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    kept = ", and the previous file is kept" if path.exists() else ""
    with plain_errors(path, kept):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, tensor in contents:
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def read_tensors(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What `write_tensors` wrote."""
    with _opened(path, device) as (file, facts):
        return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118


def read_facts(path: Path) -> dict[str, Any]:
    """The facts alone, without reading the tensors."""
    with _opened(path, "cpu") as (_, facts):
        return facts


@contextmanager
def _opened(path: Path, device: torch.device | str) -> Iterator[tuple[Any, dict[str, Any]]]:
    if not path.exists():
        raise ValueError(f"{path} not found; train the run first.")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file; copy the run again.")
    damaged = ValueError(f"{path} is truncated or damaged; copy it again or use an earlier checkpoint.")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            notes = file.metadata() or {}
            if notes.get("format") != FORMAT:
                raise ValueError(
                    f"{path} was written by another version of sigmasolver: expected format {FORMAT}, got "
                    f"{notes.get('format', 'none')}."
                )
            facts = _parse(notes.get("facts", ""))
            if not isinstance(facts, dict) or not all(_is_count(facts.get(key, 0)) for key in ("step", "steps")):
                raise damaged
            yield file, _Facts(path, facts)
    except (SafetensorError, OSError):
        read_bytes(path)  # says so where it may not be read, which the library does not
        raise damaged from None


class _Facts(dict[str, Any]):
    """The facts of a file, which says so where one is missing."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        super().__init__(facts)
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"{self.path} has no {key}; copy it again or use an earlier checkpoint.")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """One JSON row at the end of the file, on disk before this returns."""
    line = (json.dumps(row) + "\n").encode()
    with plain_errors(path, ", and the previous rows are kept"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            whole = _end_of_whole_rows(path)
            if whole < file.seek(0, os.SEEK_END):
                file.truncate(whole)
            try:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(path, whole)
                raise


def _end_of_whole_rows(path: Path) -> int:
    """Where the last line break ends; searched from the end, because a log grows long."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            found = file.read(end - start).rfind(b"\n")
            if found >= 0:
                return start + found + 1
            end = start
    return 0


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows; none where there is no file."""
    if not path.exists():
        return []
    rows = []
    *lines, _ = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        row = _parse(line)
        if not isinstance(row, dict):
            raise ValueError(f"Line {number} of {path} is not a JSON object; remove it.")
        rows.append(row)
    return rows


_NAMES = ("task", "run", "model", "metric")
_COUNTS = ("step", "horizon", "windows", "rows", "cases", "rounds")
_WORDS = ("package", "precision", "forecast_precision", "part", "protocol", "commit", "machine", "torch", "date")
_EMPTY_WORDS = ("field", "cohort", "weights", "data", "arrays", "anyway")
_EMPTY_COUNTS = ("seed", "lead", "data_seed")
_PLACES = ("layer", "case")
_NUMBERS = ("value", "deviation", "budget")


def read_records(path: Path, also: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All whole rows of results; each tells what was measured and has a number, or null, and the facts `also`."""
    rows = read_rows(path)
    for number, row in enumerate(rows, start=1):
        wrong = _wrong_in_record(row, also)
        if wrong is not None:
            raise ValueError(
                f"Line {number} of {path} is not a valid record: {wrong} is missing or has an unexpected type; "
                "remove the line and measure again."
            )
    return rows


def _wrong_in_record(row: Mapping[str, Any], also: Sequence[str]) -> str | None:
    """The first fact of a result that is missing or of the wrong type."""
    for key in (*_NAMES, "seed", "field", "lead", "value", *also):
        if key not in row:
            return key
    checks: tuple[tuple[Callable[[object], bool], bool, tuple[str, ...]], ...] = (
        (_is_word, False, (*_NAMES, *_WORDS)),
        (_is_word, True, _EMPTY_WORDS),
        (_is_count, False, _COUNTS),
        (_is_count, True, _EMPTY_COUNTS),
        (_is_number, True, _NUMBERS),
        (lambda value: _is_count(value) or _is_word(value), True, _PLACES),
        (lambda value: _are(_is_count, value), False, ("grid",)),
        (lambda value: _are(_is_word, value), False, ("members",)),
    )
    for check, empty, keys in checks:
        for key in keys:
            if key in row and not (empty and row[key] is None) and not check(row[key]):
                return key
    return None


def _is_word(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def replace_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """These rows and no others, replaced whole."""
    with plain_errors(path, ", and the rows are unchanged"), replacing(path) as file:
        file.writelines((json.dumps(row) + "\n").encode() for row in rows)


def provenance(device: torch.device) -> dict[str, str]:
    """Where a number came from: commit (of a checkout, or SIGMASOLVER_COMMIT), package, machine, torch, day."""
    return {
        "commit": os.environ.get("SIGMASOLVER_COMMIT") or _commit() or "unknown",
        "package": __version__,
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _commit() -> str | None:
    """Of the checkout that this package lies in; an installed package has none."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    words = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        answer = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return None
    return answer.stdout.strip() or None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    name = names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"
