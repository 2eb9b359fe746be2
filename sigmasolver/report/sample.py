"""What numbers were measured on, in words: how many windows, of which part, over which horizon, which cohort; times on
which machine, and how much of an epoch was timed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sigmasolver.report.published import TASK_LABELS, model_label
from sigmasolver.report.study import TRIVIAL_BASELINES

__all__ = ["sample_of", "timed_of", "timing_of", "windows_in"]

ONE_CALL = ("corrections", "routing", "geometry")
"""Diagnostics of a single call from the true history; the horizon does not enter them."""
_FACTS = ("task", "run", "diagnostic", "protocol", "part", "windows", "horizon", "cohort")


def sample_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """ "200 windows of the test split, horizon 10"; tasks and models that differ are named. Empty if rows do not say.

    Takes all rows of a diagnosis, not those of some metrics: a diagnostic that looks at a few of its windows tells
    which by its cases.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(name) for name in _FACTS), []).append(row)
    tasks: dict[str, dict[tuple[str, str | None], dict[str, str]]] = {}  # task; words and protocol; run: model
    for group in groups.values():
        first = next((row for row in group if row["model"] not in TRIVIAL_BASELINES), group[0])
        runs = tasks.setdefault(first["task"], {}).setdefault((_words(group), first.get("protocol")), {})
        runs.setdefault(first.get("run") or first["model"], model_label(first["model"]))
    found = {task: _told(held) for task, held in tasks.items()}
    several = len({tuple(held) for held in found.values()}) > 1
    entries = []
    for task, held in found.items():
        named = len({frozenset(runs) for runs in held.values()}) > 1
        for words, runs in held.items():
            who = [TASK_LABELS.get(task, task)] if several else []
            who += _names(runs, held.values()) if named else []
            entries.append(f"{', '.join(who)}: {words}" if who else words)
    return "; ".join(dict.fromkeys(entry for entry in entries if entry))


def _told(held: Mapping[tuple[str, str | None], dict[str, str]]) -> dict[str, dict[str, str]]:
    """By words, the runs; protocols are named only where they were measured on different things."""
    differ = len({words for words, _ in held}) > 1 and len({protocol for _, protocol in held}) > 1
    told: dict[str, dict[str, str]] = {}
    for (words, protocol), runs in held.items():
        told.setdefault(f"{words}, {protocol}" if differ and words else words, {}).update(runs)
    return told


def _names(models: Mapping[str, str], groups: Iterable[Mapping[str, str]]) -> list[str]:
    """The models, or the runs where seeds of one model differ."""
    elsewhere = [set(group.values()) for group in groups if group is not models]
    return list(dict.fromkeys(run if any(m in one for one in elsewhere) else m for run, m in models.items()))


def windows_in(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """How many windows the rows of one run and diagnosis rest on."""
    for row in rows:
        if row.get("diagnostic") is not None and row["metric"] == "cases":
            return int(row["value"])
    cases = {row["case"] for row in rows if row.get("case") is not None}
    return len(cases) or rows[0].get("windows")


def _words(rows: Sequence[Mapping[str, Any]]) -> str:
    first, count = rows[0], windows_in(rows)
    parts = []
    if count is not None:
        parts.append(f"{count} window{'' if count == 1 else 's'} of the {first.get('part') or 'test'} split")
    if first.get("diagnostic") in ONE_CALL:
        parts.append("one call from the true history")
    elif first.get("horizon") is not None:
        parts.append(f"horizon {first['horizon']}")
    if first.get("cohort"):
        parts.append(f"cohort {first['cohort']}")
    return ", ".join(parts)


def timing_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """The machine of the efficiency rows, and the models whose epoch was scaled up from some of its updates."""
    runs: dict[Any, list[Mapping[str, Any]]] = {}
    for row in rows:
        runs.setdefault((row["task"], row.get("run")), []).append(row)
    tasks = {task for task, _ in runs}
    machines: dict[str, list[str]] = {}
    parts: dict[str, list[str]] = {}
    for (task, _), mine in runs.items():
        label = model_label(mine[0]["model"])
        label = label if len(tasks) == 1 else f"{TASK_LABELS.get(task, task)} {label}"
        machines.setdefault(mine[0]["machine"], []).append(label)
        timed = timed_of(mine)
        if timed is not None and timed[0] < timed[1]:
            parts.setdefault(f"{timed[0]:,} of {timed[1]:,} updates of an epoch timed", []).append(label)
    entries = [name if len(machines) == 1 else f"{', '.join(who)}: {name}" for name, who in machines.items()]
    return "; ".join([*entries, *(f"{', '.join(who)}: {words}" for words, who in parts.items())])


def timed_of(rows: Iterable[Mapping[str, Any]]) -> tuple[int, int] | None:
    """Of one run, the updates that were timed and those of an epoch; None where the rows do not say."""
    held = {row["metric"]: row["value"] for row in rows}
    if held.get("timed_updates") is None or held.get("updates_per_epoch") is None:
        return None
    return int(held["timed_updates"]), int(held["updates_per_epoch"])
