"""Registration of user-defined models, losses, optimisers and tasks.

A name is registered by a program that calls `register_model` or a similar function, by a plugin file that does
(`--plugin FILE.py`), or by an installed package that declares an entry point; entry points are consulted only for names
that are not registered otherwise. A run stores names and their origins, never code: loading it does not load a plugin.
"""

from __future__ import annotations

import hashlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from sigmasolver.settings import lookup

__all__ = ["Origin", "Registry", "declared", "load_plugin", "loaded_plugins", "origin_of"]

T = TypeVar("T")
Origin = dict[str, str]
"""As recorded in a run: a plugin and its sha256, a package and its version, or the module of a program."""

_origins: dict[tuple[str, str], Origin] = {}
"""Origins by kind and name."""
_loaded: dict[Path, str] = {}
"""Loaded plugins and their sha256."""
_active_origins: list[Origin] = []
"""Stack of the origins whose code is running, innermost last."""


class Registry(dict[str, T]):
    """Entries by name, extended by users through `function` or an entry point of `group`. `check` validates an entry
    and raises ValueError."""

    def __init__(
        self, kind: str, entries: dict[str, T], group: str, check: Callable[[str, Any], T], function: str
    ) -> None:
        super().__init__(entries)
        self.kind, self.group, self.check, self.function = kind, group, check, function

    def register(self, name: str, entry: Any) -> None:
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(
                f'"{name}" is not a valid name for {_with_article(self.kind)}; use letters, digits, dots, '
                "hyphens and underscores."
            )
        if name in self:
            raise ValueError(f'The {self.kind} "{name}" already exists; choose another name.')
        self[name] = self.check(name, entry)
        _origins[self.kind, name] = (
            _active_origins[-1]
            if _active_origins
            else {"module": str(getattr(entry, "__module__", None) or type(entry).__module__)}
        )

    def knows(self, name: str) -> bool:
        """Whether the name is registered or declared by an entry point."""
        return name in self or name in self._entry_points()

    def names(self) -> tuple[str, ...]:
        """All names; entry points are listed without being loaded."""
        return tuple(dict.fromkeys((*self, *self._entry_points())))

    def find(self, name: str) -> T:
        """The entry of this name; an entry point is loaded if it is not registered yet."""
        entry_point = self._entry_points().get(name) if name not in self else None
        if entry_point is not None:
            package = entry_point.dist
            origin = (
                {"package": package.name, "version": package.version} if package else {"package": entry_point.module}
            )
            with _registering_from(origin):
                entry = entry_point.load()
                if name not in self:  # importing the package may have registered it
                    self.register(name, entry)
        return lookup(self, name, self.kind)

    def _entry_points(self) -> dict[str, EntryPoint]:
        return {entry_point.name: entry_point for entry_point in entry_points(group=self.group)}


def _with_article(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def declared(entry: object, name: str) -> Any:
    """An attribute that declares a capability of a user's class, which need not derive from ours; None if missing."""
    return getattr(entry, name, None)


def origin_of(kind: str, name: str) -> Origin | None:
    """The origin of a name; None if it is built in or unknown."""
    return _origins.get((kind, name))


def loaded_plugins() -> tuple[Path, ...]:
    """Paths of the loaded plugins, for child processes that need the same names."""
    return tuple(_loaded)


def load_plugin(path: Path) -> None:
    """Run a Python file that registers names; modules next to it can be imported from it."""
    path = path.resolve()
    if not path.is_file():
        raise ValueError(f"Plugin {path} not found; pass a Python file.")
    source = path.read_bytes()
    sha256 = hashlib.sha256(source).hexdigest()
    if _loaded.get(path) == sha256:
        return
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # at the end, so as not to shadow an installed package
    module = ModuleType(f"sigmasolver_plugin_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look up their module here
    before = len(_origins)
    with _registering_from({"plugin": path.name, "sha256": sha256}):
        try:
            exec(compile(source, str(path), "exec"), module.__dict__)
        except (Exception, SystemExit) as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
            location = f" at line {line}" if line else ""
            message = " ".join(str(error).split())
            raise ValueError(f"The plugin {path} failed{location} with {type(error).__name__}: {message}") from error
    if len(_origins) == before:
        raise ValueError(
            f"The plugin {path} registers nothing; call sigmasolver.register_model, train.objectives.register_loss, "
            "train.optimisers.register_optimiser or recipes.register_task in it."
        )
    _loaded[path] = sha256


@contextmanager
def _registering_from(origin: Origin) -> Iterator[None]:
    _active_origins.append(origin)
    try:
        yield
    finally:
        _active_origins.pop()
