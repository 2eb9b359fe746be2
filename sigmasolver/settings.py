"""One generic override for every frozen dataclass: `--set viscosity=1e-4`, checked against the field's type."""

from __future__ import annotations

import ast
import difflib
import types
import typing
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

__all__ = ["override"]

T = TypeVar("T")


def override(value: T, assignments: Sequence[str]) -> T:
    """A copy of the dataclass with `name=text` applied in order; `outer.inner=text` reaches into nested ones."""
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise ValueError(f'"{assignment}" is not a setting; write name=value.')
        value = _assign(value, path.strip().split("."), text.strip(), path.strip())
    return value


def _assign(value: T, path: list[str], text: str, whole: str) -> T:
    if not is_dataclass(value):
        raise ValueError(f'"{whole}" reaches into something that has no settings of its own; drop the last dot.')
    names = [field.name for field in fields(value)]
    name, *rest = path
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5) or names
        raise ValueError(f'There is no setting "{whole}"; near names: {", ".join(near)}.')
    if rest:
        new = _assign(getattr(value, name), rest, text, whole)
    else:
        new = _read(typing.get_type_hints(type(value))[name], text, whole)
    return typing.cast(T, replace(typing.cast(Any, value), **{name: new}))


def _read(kind: Any, text: str, whole: str) -> object:
    if kind is str:
        return text
    try:
        literal = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        literal = text
    if not _fits(literal, kind):
        raise ValueError(f'{whole} must be {_words(kind)}, not "{text}".')
    return _convert(literal, kind)


def _fits(literal: object, kind: Any) -> bool:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(literal, option) for option in inner)
    if origin is tuple:
        if not isinstance(literal, tuple | list):
            return False
        kinds = inner[:1] * len(literal) if inner[-1] is Ellipsis else inner
        return len(kinds) == len(literal) and all(map(_fits, literal, kinds))
    if kind is type(None):
        return literal is None
    if kind is float:
        return isinstance(literal, int | float) and not isinstance(literal, bool)
    return isinstance(literal, kind) and (kind is bool or not isinstance(literal, bool))


def _convert(literal: Any, kind: Any) -> object:
    if isinstance(literal, tuple | list):
        return tuple(literal)
    return float(literal) if kind is float else literal


def _words(kind: Any) -> str:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_words, inner))
    if origin is tuple:
        count = "" if inner[-1] is Ellipsis else f"{len(inner)} "
        return f"a list of {count}values, each {_words(inner[0])}"
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "none"}[kind]
