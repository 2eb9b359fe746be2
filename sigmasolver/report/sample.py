"""Describe the sample behind measured numbers: windows, split, horizon and cohort; for timings the machine, and how
much of an epoch was timed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sigmasolver.report.published import TASK_LABELS, model_label
from sigmasolver.report.study import TRIVIAL_BASELINES

__all__ = ["count_windows", "sample_of", "timed_updates", "timing_of"]

ONE_CALL = ("corrections", "routing", "geometry")
"""Diagnostics of a single call from the true history, which are independent of the horizon."""
_GROUP_KEYS = ("task", "run", "diagnostic", "protocol", "part", "windows", "horizon", "cohort", "symmetries")


def sample_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Describe the sample, such as "200 windows of the test split, horizon 10"; empty if unknown.

    Tasks and models are named only where their samples differ, numbers of updates only where those of a task differ.
    Pass all rows of a diagnostic, not only some metrics: a diagnostic that uses only some of its windows lists them as
    cases.
    """
    rows = list(rows)
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in _GROUP_KEYS), []).append(row)
    tasks: dict[str, dict[tuple[str, str | None], dict[str, str]]] = {}  # task -> (text, protocol) -> run -> model
    for group in groups.values():
        first = next((row for row in group if row["model"] not in TRIVIAL_BASELINES), group[0])
        runs = tasks.setdefault(first["task"], {}).setdefault((_describe(group), first.get("protocol")), {})
        runs.setdefault(first.get("run") or first["model"], model_label(first["model"]))
    descriptions = {task: _name_protocols(by_text) for task, by_text in tasks.items()}
    several = len({tuple(by_text) for by_text in descriptions.values()}) > 1
    entries = []
    for task, by_text in descriptions.items():
        named = len({frozenset(runs) for runs in by_text.values()}) > 1
        for text, runs in by_text.items():
            names = [TASK_LABELS.get(task, task)] if several else []
            names += _names(runs, by_text.values()) if named else []
            entries.append(f"{', '.join(names)}: {text}" if names else text)
    entries += _different_updates(rows)
    return "; ".join(dict.fromkeys(entry for entry in entries if entry))


def _different_updates(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The range of updates of each task whose weights were not all trained for equally many."""
    updates: dict[str, set[int]] = {}
    for row in rows:
        if row.get("step") is not None and row["model"] not in TRIVIAL_BASELINES:
            updates.setdefault(row["task"], set()).add(row["step"])
    return [
        f"{TASK_LABELS.get(task, task)} weights after {min(steps):,} to {max(steps):,} updates"
        for task, steps in updates.items()
        if len(steps) > 1
    ]


def _name_protocols(groups: Mapping[tuple[str, str | None], dict[str, str]]) -> dict[str, dict[str, str]]:
    """Runs by description; the protocol is added only if protocols were measured on different samples."""
    differ = len({text for text, _ in groups}) > 1 and len({protocol for _, protocol in groups}) > 1
    named: dict[str, dict[str, str]] = {}
    for (text, protocol), runs in groups.items():
        named.setdefault(f"{text}, {protocol}" if differ and text else text, {}).update(runs)
    return named


def _names(models: Mapping[str, str], groups: Iterable[Mapping[str, str]]) -> list[str]:
    """Names of the models, or of the runs if seeds of one model differ."""
    other_groups = [set(group.values()) for group in groups if group is not models]
    return list(dict.fromkeys(run if any(m in names for names in other_groups) else m for run, m in models.items()))


def count_windows(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """Number of windows behind the rows of one run and diagnostic."""
    for row in rows:
        if row.get("diagnostic") is not None and row["metric"] == "cases":
            return int(row["value"])
    cases = {row["case"] for row in rows if row.get("case") is not None}
    return len(cases) or rows[0].get("windows")


def _describe(rows: Sequence[Mapping[str, Any]]) -> str:
    first, count = rows[0], count_windows(rows)
    parts = []
    if count is not None:
        parts.append(f"{count} window{'' if count == 1 else 's'} of the {first.get('part') or 'test'} split")
    if first.get("diagnostic") in ONE_CALL:
        parts.append("one call from the true history")
    elif first.get("horizon") is not None:
        parts.append(f"horizon {first['horizon']}")
    if first.get("cohort"):
        parts.append(f"cohort {first['cohort']}")
    if first.get("symmetries", 1) > 1:
        parts.append(f"mean over {first['symmetries']} symmetries")
    return ", ".join(parts)


def timing_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """Machine of the efficiency rows, and the models whose epoch time was extrapolated from some of its updates."""
    runs: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        runs.setdefault((row["task"], row.get("run")), []).append(row)
    tasks = {task for task, _ in runs}
    machines: dict[str, list[str]] = {}
    partial: dict[str, list[str]] = {}
    for (task, _), run_rows in runs.items():
        label = model_label(run_rows[0]["model"])
        label = label if len(tasks) == 1 else f"{TASK_LABELS.get(task, task)} {label}"
        machines.setdefault(run_rows[0]["machine"], []).append(label)
        timed = timed_updates(run_rows)
        if timed is not None and timed[0] < timed[1]:
            partial.setdefault(f"{timed[0]:,} of {timed[1]:,} updates of an epoch timed", []).append(label)
    entries = [name if len(machines) == 1 else f"{', '.join(labels)}: {name}" for name, labels in machines.items()]
    return "; ".join([*entries, *(f"{', '.join(labels)}: {text}" for text, labels in partial.items())])


def timed_updates(rows: Iterable[Mapping[str, Any]]) -> tuple[int, int] | None:
    """Timed updates and updates per epoch of one run; None if the rows do not contain them."""
    values = {row["metric"]: row["value"] for row in rows}
    if values.get("timed_updates") is None or values.get("updates_per_epoch") is None:
        return None
    return int(values["timed_updates"]), int(values["updates_per_epoch"])
