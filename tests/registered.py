"""What a block of code registers or loads is forgotten after it, as at the end of a process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sigmasolver import plugins
from sigmasolver.models.variants import MODELS
from sigmasolver.recipes.rows import RECIPES
from sigmasolver.train.objectives import LOSSES
from sigmasolver.train.optimisers import OPTIMISERS


@contextmanager
def forgotten() -> Iterator[Callable[[], None]]:
    """Yields a function that forgets earlier."""
    tables = [MODELS, LOSSES, OPTIMISERS, RECIPES, plugins._origins, plugins._loaded]
    kept, path, modules = [dict(table) for table in tables], list(sys.path), set(sys.modules)

    def forget() -> None:
        for table, before in zip(tables, kept, strict=True):
            table.clear()
            table.update(before)
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if "plugin" in name or name == "foreign_package":
                del sys.modules[name]

    try:
        yield forget
    finally:
        forget()
