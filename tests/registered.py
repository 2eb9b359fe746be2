"""Undo registrations and plugin imports after a block of code."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sigmasolver import plugins
from sigmasolver.models.variants import MODELS
from sigmasolver.recipes.rows import RECIPES
from sigmasolver.symmetries import SYMMETRIES
from sigmasolver.train.objectives import LOSSES
from sigmasolver.train.optimisers import OPTIMISERS


@contextmanager
def forgotten() -> Iterator[Callable[[], None]]:
    """Restore the registries on exit; yields a function that restores them earlier."""
    tables = [MODELS, LOSSES, OPTIMISERS, SYMMETRIES, RECIPES, plugins._origins, plugins._loaded]
    snapshots, sys_path, modules = [dict(table) for table in tables], list(sys.path), set(sys.modules)

    def forget() -> None:
        for table, snapshot in zip(tables, snapshots, strict=True):
            table.clear()
            table.update(snapshot)
        sys.path[:] = sys_path
        for name in set(sys.modules) - modules:
            if "plugin" in name or name == "foreign_package":
                del sys.modules[name]

    try:
        yield forget
    finally:
        forget()
