"""What users add under a name: models, losses, optimisers and tasks of their own.

A name comes from a program that calls `register_model` and its like, from a plugin file that does (`--plugin FILE.py`),
or from an installed package that declares an entry point; packages are asked only for a name that is not known
otherwise. A run keeps names and where they came from, never code: loading a run does not load a plugin.
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
"""As a run records it: a plugin and its sha256, a package and its version, or the module of a program."""

_origins: dict[tuple[str, str], Origin] = {}
"""By kind and name."""
_loaded: dict[Path, str] = {}
"""Plugins and their sha256."""
_current: list[Origin] = []
"""Whose code is running now, the innermost last."""


class Registry(dict[str, T]):
    """A table of entries by name that users add to: by calling `function`, or by an entry point of `group`. `check`
    refuses what cannot be an entry, in one sentence."""

    def __init__(
        self, kind: str, entries: dict[str, T], group: str, check: Callable[[str, Any], T], function: str
    ) -> None:
        super().__init__(entries)
        self.kind, self.group, self.check, self.function = kind, group, check, function

    def register(self, name: str, entry: Any) -> None:
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(
                f'"{name}" is not a valid name for {_a(self.kind)}; use letters, digits, dots, hyphens and underscores.'
            )
        if name in self:
            raise ValueError(f'The {self.kind} "{name}" already exists; choose another name.')
        self[name] = self.check(name, entry)
        _origins[self.kind, name] = (
            _current[-1] if _current else {"module": str(getattr(entry, "__module__", None) or type(entry).__module__)}
        )

    def knows(self, name: str) -> bool:
        """Whether `find` would find it."""
        return name in self or name in self._installed()

    def names(self) -> tuple[str, ...]:
        """All names; those of packages are not loaded for it."""
        return tuple(dict.fromkeys((*self, *self._installed())))

    def find(self, name: str) -> T:
        """The entry of this name; an installed package is asked where it is not known here."""
        offered = self._installed().get(name) if name not in self else None
        if offered is not None:
            package = offered.dist
            came = {"package": package.name, "version": package.version} if package else {"package": offered.module}
            with _running(came):
                entry = offered.load()
                if name not in self:  # importing the package may have registered it
                    self.register(name, entry)
        return lookup(self, name, self.kind)

    def _installed(self) -> dict[str, EntryPoint]:
        return {one.name: one for one in entry_points(group=self.group)}


def _a(kind: str) -> str:
    return f"an {kind}" if kind[0] in "aeiou" else f"a {kind}"


def declared(entry: object, name: str) -> Any:
    """An attribute by which a user's class, which need not derive from ours, says what it can do; None without it."""
    return getattr(entry, name, None)


def origin_of(kind: str, name: str) -> Origin | None:
    """Where this name came from; None: it is built in, or not known."""
    return _origins.get((kind, name))


def loaded_plugins() -> tuple[Path, ...]:
    """For processes that need the same names."""
    return tuple(_loaded)


def load_plugin(path: Path) -> None:
    """Run a Python file that registers names; modules beside it can be imported from it."""
    path = path.resolve()
    if not path.is_file():
        raise ValueError(f"Plugin {path} not found; pass a Python file.")
    source = path.read_bytes()
    sha256 = hashlib.sha256(source).hexdigest()
    if _loaded.get(path) == sha256:
        return
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # at the end: it must not hide an installed package
    module = ModuleType(f"sigmasolver_plugin_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look their module up
    before = len(_origins)
    with _running({"plugin": path.name, "sha256": sha256}):
        try:
            exec(compile(source, str(path), "exec"), module.__dict__)
        except Exception as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
            line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
            at = f" at line {line}" if line else ""
            said = " ".join(str(error).split())
            raise ValueError(f"The plugin {path} failed{at} with {type(error).__name__}: {said}") from error
    if len(_origins) == before:
        raise ValueError(
            f"The plugin {path} registers nothing; call sigmasolver.register_model, train.objectives.register_loss, "
            "train.optimisers.register_optimiser or recipes.register_task in it."
        )
    _loaded[path] = sha256


@contextmanager
def _running(origin: Origin) -> Iterator[None]:
    _current.append(origin)
    try:
        yield
    finally:
        _current.pop()
