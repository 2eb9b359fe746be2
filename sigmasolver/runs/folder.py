"""The run folder: the results of a training and the state to resume it from.

    recipe.json           the recipe; another recipe in the same folder is an error
    data.json             the training data: path, fingerprint, and the trajectories of each split
    normaliser.json       the maps between physical and normalised units
    origins.json          origins of user-defined models, losses and optimisers
    weights.safetensors   the weights of the trained model
    resume.safetensors    one consistent state (weights, optimiser, average, step) to resume from
    log.jsonl             rows written periodically during training
    records.jsonl         tidy results: a row per task, model, seed, metric, field and lead

Files are replaced atomically, so a kill at any instant leaves the newest complete version. Rows are appended; a row
that a kill truncated is dropped by the next reader or writer. Nothing is pickled.
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

from sigmasolver.runs.files import open_lock, os_errors_as_value_errors, read_bytes, replacing
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
    """A run folder, created on the first write."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def weights(self) -> Path:
        published = self.path / "model.safetensors"  # the name in a shared folder (model_cards/share.py)
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
        """Hash that identifies the weights."""
        return hashlib.sha256(read_bytes(self.weights)).hexdigest()[:16]

    @contextmanager
    def locked(self, what: str, wait: bool = False) -> Iterator[None]:
        """Lock a part of the run, or raise ValueError if another process holds the lock; it ends with its process."""
        import fcntl  # not on Windows

        with os_errors_as_value_errors(self.path):
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
        """Whether the last step was taken and its weights exist; without a resume state the weights tell."""
        if not self.weights.exists():
            return False
        facts = read_facts(self.resume if self.resume.exists() else self.weights)
        return "steps" in facts and facts.get("step") == facts["steps"]

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        """Write plain values as JSON, replacing the file atomically."""
        with os_errors_as_value_errors(self.path / name):
            self.path.mkdir(parents=True, exist_ok=True)
            with replacing(self.path / name) as target:
                target.write((json.dumps(values, indent=2) + "\n").encode())

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a file written by `write_json`."""
        file = self.path / name
        try:
            values = _parse_json(read_bytes(file))
        except FileNotFoundError:
            raise ValueError(
                f"{self.path} is not a run: {name} not found; pass a run folder, or rerun the command that should "
                "have created it."
            ) from None
        if values is _INVALID_JSON:
            raise ValueError(f"{file} is not valid JSON; copy it again or retrain the run.")
        if not isinstance(values, dict):
            raise ValueError(f"{file} does not contain a JSON object; copy it again or retrain the run.")
        invalid = _invalid_data_entry(values) if name == "data.json" else None
        if invalid is not None:
            raise ValueError(f"{file} is damaged: {invalid} has an unexpected type; copy it again.")
        return values

    def training_seconds(self) -> float | None:
        """Training time summed over all restarts, including the startup of each; None if the log does not record it."""
        times = [row.get("seconds") for row in self.read_log()] if self.log.exists() else []
        seconds = [float(value) for value in times if isinstance(value, int | float)]
        if not seconds or len(seconds) < len(times):
            return None
        return sum(current for current, following in itertools.pairwise([*seconds, -1.0]) if following < current)

    def read_log(self) -> list[dict[str, Any]]:
        """The rows of log.jsonl, each with its step and loss."""
        rows = read_rows(self.log)
        for number, row in enumerate(rows, start=1):
            numbers = (row.get("loss"), row.get("error", 0.0))
            if not _is_count(row.get("step")) or any(type(value) not in (int, float) for value in numbers):
                raise ValueError(f"Line {number} of {self.log} has no step and loss; remove it.")
        return rows

    def start(self, recipe: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> None:
        """Write the recipe, or check that the folder already contains the same one.

        `stored` is the recipe of the folder with current names, if the caller has converted it.
        """
        file = self.path / "recipe.json"
        if file.exists():
            old, new = (json.loads(json.dumps(recipe_values)) for recipe_values in (stored or self.recipe(), recipe))
            if old != new:
                raise ValueError(
                    f"{self.path} contains a run with a different recipe ({', '.join(_differences(old, new))}); "
                    "choose another folder."
                )
            return
        self.write_json("recipe.json", recipe)

    def recipe(self) -> dict[str, Any]:
        """The recipe as plain values."""
        return self.read_json("recipe.json")


def _invalid_data_entry(facts: Mapping[str, Any]) -> str | None:
    """The first entry of data.json with a wrong type; runs of earlier versions may lack some entries."""
    parts = facts.get("parts", {} if "frames" in facts else {part: [] for part in PARTS})
    if not isinstance(parts, dict) or not all(_is_list_of(_is_count, parts.get(part)) for part in PARTS):
        return "parts"
    if not _is_list_of(_is_text, facts.get("digests", [])):
        return "digests"
    if not _is_count(facts.get("frames", 0)):
        return "frames"
    if not _is_list_of(_is_text, facts.get("fields", [])):
        return "fields"
    if "test" in facts and not _is_test_data(facts["test"]):
        return "test"
    return next((key for key in ("path", "fingerprint") if not _is_text(facts.get(key, ""))), None)


def _is_test_data(value: object) -> bool:
    """Whether this describes a separate test data set."""
    if not isinstance(value, dict) or not all(_is_text(value.get(key)) for key in ("path", "fingerprint")):
        return False
    return all(_is_count(value.get(key)) for key in ("count", "frames"))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_list_of(check: Callable[[object], bool], values: object) -> bool:
    return isinstance(values, list) and all(map(check, values))


_INVALID_JSON = object()


def _parse_json(data: bytes | str) -> Any:
    """Parse JSON; `_INVALID_JSON` if it is malformed, too deeply nested, or has an integer of thousands of digits."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return _INVALID_JSON


def _differences(first: Mapping[str, Any], second: Mapping[str, Any], where: str = "") -> list[str]:
    """Dotted names of the settings that differ."""
    names = []
    for key in dict.fromkeys((*first, *second)):
        old, new = first.get(key), second.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            names += _differences(old, new, f"{where}{key}.")
        elif old != new:
            names.append(f"{where}{key}")
    return names


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
"""Names of dtypes in safetensors."""


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
    """Write named tensors and plain facts to a safetensors file atomically; equal contents give equal bytes.

    The library's `save_file` writes metadata in random order and creates files readable only by their owner.
    """
    # Wide dtypes first, as in the library, so that every tensor is aligned.
    contents = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {"facts": json.dumps(facts), "format": FORMAT, "package": __version__}}
    end = 0
    for name, tensor in contents:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    survives = ", and the previous file is kept" if path.exists() else ""
    with os_errors_as_value_errors(path, survives):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, tensor in contents:
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def read_tensors(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read a file written by `write_tensors`."""
    with _open_tensors(path, device) as (file, facts):
        return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118


def read_facts(path: Path) -> dict[str, Any]:
    """Read the facts without the tensors."""
    with _open_tensors(path, "cpu") as (_, facts):
        return facts


@contextmanager
def _open_tensors(path: Path, device: torch.device | str) -> Iterator[tuple[Any, dict[str, Any]]]:
    if not path.exists():
        raise ValueError(f"{path} not found; train the run first.")
    if not path.is_file():
        raise ValueError(f"{path} is not a regular file; copy the run again.")
    damaged = ValueError(f"{path} is truncated or damaged; copy it again or use an earlier checkpoint.")
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise ValueError(
                    f"{path} was written by another version of sigmasolver: expected format {FORMAT}, got "
                    f"{metadata.get('format', 'none')}."
                )
            facts = _parse_json(metadata.get("facts", ""))
            if not isinstance(facts, dict) or not all(_is_count(facts.get(key, 0)) for key in ("step", "steps")):
                raise damaged
            yield file, _Facts(path, facts)
    except (SafetensorError, OSError):
        read_bytes(path)  # raises a clear error if permission is denied, unlike the library
        raise damaged from None


class _Facts(dict[str, Any]):
    """The facts of a file; a missing key raises ValueError with the path."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        super().__init__(facts)
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"{self.path} has no {key}; copy it again or use an earlier checkpoint.")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def append_row(path: Path, row: Mapping[str, Any]) -> None:
    """Append a JSON row and sync it to disk; drops a truncated last row first."""
    line = (json.dumps(row) + "\n").encode()
    with os_errors_as_value_errors(path, ", and the previous rows are kept"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab+") as file:
            end = _end_of_complete_rows(path)
            if end < file.seek(0, os.SEEK_END):
                file.truncate(end)
            try:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                os.truncate(path, end)
                raise


def _end_of_complete_rows(path: Path) -> int:
    """Offset after the last newline, searched backwards because logs grow long."""
    with open(path, "rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All complete rows; empty if the file does not exist."""
    if not path.exists():
        return []
    rows = []
    *lines, _ = read_bytes(path).split(b"\n")
    for number, line in enumerate(lines, start=1):
        row = _parse_json(line)
        if not isinstance(row, dict):
            raise ValueError(f"Line {number} of {path} is not a JSON object; remove it.")
        rows.append(row)
    return rows


_NAMES = ("task", "run", "model", "metric")
_COUNTS = ("step", "horizon", "windows", "symmetries", "rows", "cases", "rounds")
_TEXTS = ("package", "precision", "forecast_precision", "part", "protocol", "commit", "machine", "torch", "date")
_OPTIONAL_TEXTS = ("field", "cohort", "weights", "data", "arrays", "anyway")
_OPTIONAL_COUNTS = ("seed", "lead", "data_seed")
_INDICES = ("layer", "case")
_OPTIONAL_NUMBERS = ("value", "deviation", "budget")


def read_records(path: Path, also: Sequence[str] = ()) -> list[dict[str, Any]]:
    """All complete records, validated: required keys and those in `also` exist, and values are numbers or null."""
    rows = read_rows(path)
    for number, row in enumerate(rows, start=1):
        invalid = _invalid_record_entry(row, also)
        if invalid is not None:
            raise ValueError(
                f"Line {number} of {path} is not a valid record: {invalid} is missing or has an unexpected type; "
                "remove the line and measure again."
            )
    return rows


def _invalid_record_entry(row: Mapping[str, Any], also: Sequence[str]) -> str | None:
    """The first key of a record that is missing or has a wrong type."""
    for key in (*_NAMES, "seed", "field", "lead", "value", *also):
        if key not in row:
            return key
    checks: tuple[tuple[Callable[[object], bool], bool, tuple[str, ...]], ...] = (
        (_is_printable, False, (*_NAMES, *_TEXTS)),
        (_is_printable, True, _OPTIONAL_TEXTS),
        (_is_count, False, _COUNTS),
        (_is_count, True, _OPTIONAL_COUNTS),
        (_is_number, True, _OPTIONAL_NUMBERS),
        (lambda value: _is_count(value) or _is_printable(value), True, _INDICES),
        (lambda value: _is_list_of(_is_count, value), False, ("grid",)),
        (lambda value: _is_list_of(_is_printable, value), False, ("members",)),
    )
    for check, optional, keys in checks:
        for key in keys:
            if key in row and not (optional and row[key] is None) and not check(row[key]):
                return key
    return None


def _is_printable(value: object) -> bool:
    return isinstance(value, str) and value.isprintable()


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def replace_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace all rows of the file atomically."""
    with os_errors_as_value_errors(path, ", and the rows are unchanged"), replacing(path) as file:
        file.writelines((json.dumps(row) + "\n").encode() for row in rows)


def provenance(device: torch.device) -> dict[str, str]:
    """Provenance of a result: commit (of the checkout, or SIGMASOLVER_COMMIT), package, machine, torch, date."""
    return {
        "commit": os.environ.get("SIGMASOLVER_COMMIT") or _git_commit() or "unknown",
        "package": __version__,
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else _describe_cpu(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _git_commit() -> str | None:
    """Commit of the checkout that contains this package; None if it is installed."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # git is not installed
        return None
    return result.stdout.strip() or None


def _describe_cpu() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    name = names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"
