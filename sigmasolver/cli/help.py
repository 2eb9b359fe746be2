"""How `--help` looks: commands in panels by stage, and a placeholder that says what an option takes."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["STAGES", "Command", "Group", "arrange"]

STAGES = {
    "Start": ("demo", "models", "settings"),
    "Data": ("simulate", "import-data", "inspect", "windows", "make-fixture"),
    "Learn": ("plan", "train", "suite", "submit"),
    "Measure": ("evaluate", "measure", "ledger", "table"),
    "Explain": ("diagnose", "figure", "report"),
    "Use": ("forecast", "export", "save-pretrained"),
}
"""The commands of each panel, in order; a name that no command has is left out."""

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
        *("nodes", "processes", "most"),
    ),
    "NUMBER",
)
"""By the name of the parameter; paths are told by their names below, and what is left is text."""
PATHS = ("data", "out", "results", "page", "records", "jobs", "tensorboard", "config", "plugin", "test_data")


def _with_placeholders(parameters: list[Any]) -> list[Any]:
    for one in parameters:
        if one.metavar is None:
            flag = getattr(one, "is_flag", False)
            one.metavar = "" if flag else PLACEHOLDERS.get(one.name, "PATH" if one.name in PATHS else "TEXT")
        if one.param_type_name == "argument":  # its placeholder is its name, and typer would show its type too
            one.display_type_rich = lambda ctx: None
    return parameters


class Command(TyperCommand):
    """A command whose help names what its options take."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _with_placeholders(super().get_params(ctx))


class Group(TyperGroup):
    """The same for `sigmasolver` itself."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _with_placeholders(super().get_params(ctx))


def arrange(app: typer.Typer) -> None:
    """Put the commands into the panels of their stages, in the order of `STAGES`."""
    places = {name: (stage, number) for stage, names in STAGES.items() for number, name in enumerate(names)}
    order = list(STAGES)
    for info in app.registered_commands:
        info.cls = Command
        info.rich_help_panel = places[_name(info)][0]
    app.registered_commands.sort(key=lambda info: (order.index(places[_name(info)][0]), places[_name(info)][1]))


def _name(info: Any) -> str:
    return info.name or info.callback.__name__.replace("_", "-")
