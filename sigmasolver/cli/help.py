"""Layout of `--help`: commands in panels by stage, and a placeholder for the value of each option."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["STAGES", "Command", "Group", "group_commands"]

STAGES = {
    "Start": ("demo", "models", "settings"),
    "Data": ("simulate", "import-data", "inspect", "windows", "make-fixture"),
    "Learn": ("plan", "train", "suite", "submit"),
    "Measure": ("evaluate", "measure", "ledger", "table"),
    "Explain": ("diagnose", "figure", "report"),
    "Use": ("forecast", "export", "save-pretrained"),
}
"""The commands of each panel, in order; every command is listed."""

PLACEHOLDERS = {
    "runs": "RUN",
    "run": "RUN",
    "resume": "RUN",
    "task": "TASK",
    "suite": "SUITE",
    "sources": "PATH",
    "file": "FILE",
    "start": "FILE",
    "plot": "FILE",
    "animation": "FILE",
    "model": "MODEL",
    "models": "MODEL,...",
    "fields": "NAME,...",
    "targets": "NAME,...",
    "history": "FRAMES",
    "block": "FRAMES",
    "horizon": "FRAMES",
    "steps": "FRAMES",
    "grid": "POINTS",
    "minutes": "MINUTES",
    "memory": "GB",
    "device": "DEVICE",
    "engine": "ENGINE",
    "precision": "PRECISION",
    "cohort": "COHORT",
    "split": "SPLIT",
    "kind": "FORMAT",
    "to": "FORMAT",
    "on": "WHERE",
    "dtype": "TYPE",
    "protocol": "PROTOCOL",
    "seconds": "SECONDS",
    "name": "NAME",
    "field": "NAME",
    "only": "NAME,...",
} | dict.fromkeys(
    (
        *("seed", "data_seed", "count", "windows", "batch", "index", "first", "rounds", "repeats", "dpi", "test"),
        *("symmetries", "nodes", "processes", "most"),
    ),
    "NUMBER",
)
"""Placeholder by parameter name; the parameters in `PATHS` show PATH, all others TEXT."""
PATHS = ("data", "out", "spread", "results", "page", "records", "jobs", "tensorboard", "config", "plugin", "test_data")


def _with_placeholders(parameters: list[Any]) -> list[Any]:
    for param in parameters:
        if param.metavar is None:
            flag = getattr(param, "is_flag", False)
            param.metavar = "" if flag else PLACEHOLDERS.get(param.name, "PATH" if param.name in PATHS else "TEXT")
        if param.param_type_name == "argument":  # hide its type: the placeholder is enough
            param.display_type_rich = lambda ctx: None
    return parameters


class Command(TyperCommand):
    """A command whose help shows a placeholder for each option."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _with_placeholders(super().get_params(ctx))


class Group(TyperGroup):
    """The same for the top-level group."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _with_placeholders(super().get_params(ctx))


def group_commands(app: typer.Typer) -> None:
    """Put the commands into the panels of their stages, in the order of `STAGES`."""
    positions = {name: (stage, index) for stage, names in STAGES.items() for index, name in enumerate(names)}
    order = list(STAGES)
    for info in app.registered_commands:
        info.cls = Command
        info.rich_help_panel = positions[_name(info)][0]
    app.registered_commands.sort(key=lambda info: (order.index(positions[_name(info)][0]), positions[_name(info)][1]))


def _name(info: Any) -> str:
    name: str = info.name or info.callback.__name__.replace("_", "-")
    return name
