"""Lookup of entries by name, and a generic override of the fields of frozen dataclasses.

A dataclass whose fields were renamed declares `ALIASES: ClassVar = {"old": "new"}`: `override` and `from_plain` still
accept the old names, which are never written. A setting is documented by the string below its field, which
`list_settings` reads.
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import functools
import inspect
import itertools
import json
import numbers
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar

__all__ = [
    "REQUIRED",
    "Setting",
    "assignment_list",
    "check_settings",
    "check_types",
    "from_plain",
    "list_settings",
    "lookup",
    "override",
    "split_names",
    "suggest",
    "to_plain",
    "typed",
]

T = TypeVar("T")
MAX_LISTED, LIST_LIMIT = 6, 20
"""A message lists MAX_LISTED of the names if there are more than LIST_LIMIT."""
MAX_SHOWN = 200
"""Characters of a wrong value shown in a message."""


def split_names(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of names, such as "u, v"."""
    return tuple(name.strip() for name in text.split(","))


def assignment_list(assignments: str | Sequence[str]) -> list[str]:
    """A list of `name=text`; a string is a single one, since a text may contain commas."""
    return [assignments] if isinstance(assignments, str) else list(assignments)


def suggest(name: str, names: Sequence[str]) -> str:
    """The end of an error message about an unknown name: up to three close matches, or else all names (shortened)."""
    matches = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.4)
    if not matches:
        more = f" and {len(names) - MAX_LISTED} more" if len(names) > LIST_LIMIT else ""
        return f"choose from {', '.join(names[:MAX_LISTED] if more else names)}{more}."
    return _did_you_mean(matches)


def _did_you_mean(matches: Sequence[str]) -> str:
    return f"did you mean {', '.join(matches[:-1])}{' or ' if matches[1:] else ''}{matches[-1]}?"


def lookup(entries: Mapping[str, T], name: str, kind: str) -> T:
    """The entry of this name in a table of models, tasks, simulators, ..."""
    if name not in entries:
        raise ValueError(f'Unknown {kind} "{name}"; {suggest(name, list(entries))}')
    return entries[name]


def override(value: T, assignments: str | Sequence[str]) -> T:
    """A copy of the dataclass with every `name=text` applied; `outer.inner=text` sets a field of a nested one.

    All are applied at once: values that are valid only together (a finer grid and its step) may come in any order.
    """
    return _apply_changes(value, _parse_assignments(assignments), "", list(_leaf_names(value)))


def check_settings(kind: type, assignments: str | Sequence[str]) -> None:
    """Validate names and values for a dataclass type, before an instance exists."""
    all_names = [setting.name for setting in list_settings(kind)]
    for path, text in _parse_assignments(assignments).items():
        _check(kind, path, text, "", all_names)


def _check(kind: type, path: str, text: str, prefix: str, all_names: Sequence[str]) -> None:
    name, (_, dot, remainder) = _field_name(kind, path, prefix, all_names), path.partition(".")
    inner = _type_hints(kind)[name]
    if dot and is_dataclass(inner):
        _check(typing.cast(type, inner), remainder, text, f"{prefix}{name}.", all_names)
    elif dot:
        raise _not_nested(prefix + name)
    elif not is_dataclass(inner):
        _parse_value(inner, text, prefix + path)


def _parse_assignments(assignments: str | Sequence[str]) -> dict[str, str]:
    changes: dict[str, str] = {}
    for assignment in assignment_list(assignments):
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise ValueError(f'"{assignment}" is not a setting; write name=value.')
        changes.pop(path.strip(), None)  # a repeated setting takes the position of its last occurrence
        changes[path.strip()] = text.strip()
    return changes


def _field_name(kind: type, path: str, prefix: str, all_names: Sequence[str]) -> str:
    """The field name that a dotted path begins with, with aliases resolved."""
    names = [field.name for field in fields(typing.cast(Any, kind))]
    first = path.partition(".")[0]
    name = _aliases(kind).get(first, first)
    if name not in names:
        leaf = path.rpartition(".")[2]
        elsewhere = [candidate for candidate in all_names if candidate.rpartition(".")[2] == leaf]
        suggestion = _did_you_mean(elsewhere[:3]) if elsewhere else suggest(name, names)
        raise ValueError(f'Unknown setting "{prefix}{path}"; {suggestion}')
    return name


def _not_nested(name: str) -> ValueError:
    return ValueError(f"{name} is a single value without nested settings; remove what follows the dot.")


def _leaf_names(value: Any, prefix: str = "") -> Iterator[str]:
    for field in fields(value):
        inner = getattr(value, field.name)
        if is_dataclass(inner):
            yield from _leaf_names(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _apply_changes(value: T, changes: dict[str, str], prefix: str, all_names: Sequence[str]) -> T:
    kinds = _type_hints(type(value))
    new: dict[str, object] = {}
    nested: dict[str, dict[str, str]] = {}
    for path, text in changes.items():
        _, dot, remainder = path.partition(".")
        name = _field_name(type(value), path, prefix, all_names)
        if not dot:
            new[name] = _parse_value(kinds[name], text, prefix + path)
        elif not is_dataclass(getattr(value, name)):
            raise _not_nested(prefix + name)
        else:
            nested.setdefault(name, {})[remainder] = text
    for name, inner_changes in nested.items():
        new[name] = _apply_changes(getattr(value, name), inner_changes, f"{prefix}{name}.", all_names)
    return typing.cast(T, replace(typing.cast(Any, value), **new))


def _aliases(kind: type) -> Mapping[str, str]:
    """Old field names and their replacements."""
    return getattr(kind, "ALIASES", {})


def check_types(value: object) -> None:
    """Validate the field types of a frozen dataclass in its `__post_init__`; numbers must be finite.

    Lists become tuples, NumPy scalars become Python numbers, integers become floats where a float is declared.
    """
    kinds = _type_hints(type(value))
    for field in fields(typing.cast(Any, value)):
        current, kind = _to_python(getattr(value, field.name)), kinds[field.name]
        if not _matches_type(current, kind):
            raise ValueError(f"{field.name} must be {_describe_type(kind, current)}, not {_shortened(current)}.")
        object.__setattr__(value, field.name, _convert(current, kind))


def _to_python(value: Any) -> Any:
    """Convert a list to a tuple and a NumPy scalar to a Python number."""
    if isinstance(value, tuple | list):
        return tuple(map(_to_python, value))
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def to_plain(value: Any) -> Any:
    """Convert a frozen dataclass to JSON-compatible values."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    return [to_plain(item) for item in value] if isinstance(value, tuple | list) else value


def from_plain(kind: type[T], plain: object, where: str = "") -> T:
    """The inverse of `to_plain`; unknown keys and wrong types raise ValueError."""
    name = where or kind.__name__
    if not isinstance(plain, dict):
        raise ValueError(f"{name} must be a table of settings, not {plain!r}.")
    kinds = _type_hints(kind)
    known = {field.name: field for field in fields(typing.cast(Any, kind))}
    values: dict[str, object] = {}
    for written_key, value in plain.items():
        key = _aliases(kind).get(written_key, written_key)
        path = f"{where}.{key}" if where else str(key)
        if key in values:
            raise ValueError(f"{name} sets {key} twice, also as {written_key}; remove one.")
        if key not in known:
            raise ValueError(f"{name}: unknown setting {json.dumps(str(key))}; {suggest(str(key), list(known))}")
        if is_dataclass(kinds[key]):
            values[key] = from_plain(typing.cast(Any, kinds[key]), value, path)
        elif _matches_type(value, kinds[key]):
            values[key] = _convert(value, kinds[key])
        else:
            raise ValueError(f"{path} must be {_describe_type(kinds[key], value)}, not {_shortened(value)}.")
    missing = [
        key
        for key, field in known.items()
        if key not in values and field.default is MISSING and field.default_factory is MISSING
    ]
    if missing:
        raise ValueError(f"{name}: missing setting {missing[0]}; add it.")
    return kind(**values)


REQUIRED = "required"
"""The value of a setting without default."""


@dataclass(frozen=True)
class Setting:
    """A row of the list of settings."""

    name: str
    """Dotted name, such as `model.options.padding`."""
    kind: str
    """Description of the accepted values."""
    value: str
    """Value as typed at the command line, or REQUIRED."""
    meaning: str
    """First sentence of the string below the field."""


def list_settings(value: Any, prefix: str = "") -> list[Setting]:
    """Every setting of a dataclass, including nested ones, with the values of an instance or the defaults of a type."""
    kind = value if isinstance(value, type) else type(value)
    kinds, meanings, settings = _type_hints(kind), _meanings(kind), []
    for field in fields(kind):
        name, current = field.name, getattr(value, field.name, field.default)
        if is_dataclass(kinds[name]):
            inner = kinds[name] if isinstance(value, type) else current
            settings += list_settings(inner, f"{prefix}{name}.")
        else:
            text = REQUIRED if current is MISSING else typed(current)
            if kinds[name] == tuple[str, ...]:  # a single word is a list of one
                text = text.removesuffix(",")
            settings.append(Setting(prefix + name, _short_type_name(kinds[name]), text, meanings.get(name, "")))
    return settings


_type_hints: Callable[[type], Mapping[str, Any]] = functools.cache(typing.get_type_hints)
"""Type hints by field; cached, because resolving them compiles and evaluates every annotation."""


@functools.cache
def _meanings(kind: type) -> dict[str, str]:
    """First sentence of the string below each field, including those of base classes."""
    meanings: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        with contextlib.suppress(OSError, TypeError):  # no source: defined at a prompt, or built in
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            meanings |= _field_docs(getattr(definition, "body", ()))
    return meanings


def _field_docs(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for pair in itertools.pairwise(body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split()).partition(". ")[0].removesuffix(".") + "."


def typed(value: object) -> str:
    """A value as typed after `--set name=`."""
    if isinstance(value, tuple):
        return "".join(f"{typed(item)}," for item in value).removesuffix("," if len(value) > 1 else "") or "()"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _short_type_name(kind: Any) -> str:
    """The accepted values of a setting, short enough for a table."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_short_type_name, inner))
    if origin is tuple:
        return (
            f"{_short_type_name(inner[0])}s" if inner[-1] is Ellipsis else f"{len(inner)} {_short_type_name(inner[0])}s"
        )
    return {int: "integer", float: "number", bool: "true or false", str: "word", type(None): "none"}[kind]


def _parse_value(kind: Any, text: str, name: str) -> object:
    if kind is str:
        return text
    try:
        literal = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        literal = text
    if literal is text and _accepts_strings(kind) and ("," in text or not _matches_type(text, kind)):
        words = tuple(word.strip() for word in text.strip("()[] ").removesuffix(",").split(","))
        literal = words if all(words) else text
    if not _matches_type(literal, kind):
        raise ValueError(
            f"{name} must be {_describe_type(kind, literal)}, not "
            f'"{text if len(text) < MAX_SHOWN else text[:MAX_SHOWN] + "…"}".'
        )
    return _convert(literal, kind)


def _accepts_strings(kind: Any) -> bool:
    """Whether the type is a list of strings, which may be typed without quotes."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return any(map(_accepts_strings, typing.get_args(kind)))
    return typing.get_origin(kind) is tuple and typing.get_args(kind)[0] is str


def _matches_type(literal: object, kind: Any) -> bool:
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_matches_type(literal, option) for option in inner)
    if origin is tuple:
        if not isinstance(literal, tuple | list):
            return False
        kinds = inner[:1] * len(literal) if inner[-1] is Ellipsis else inner
        return len(kinds) == len(literal) and all(map(_matches_type, literal, kinds))
    if kind is type(None):
        return literal is None
    if kind is float:
        number = isinstance(literal, int | float) and not isinstance(literal, bool)
        return number and abs(typing.cast(float, literal)) <= sys.float_info.max  # also false for NaN
    if kind is str:
        return isinstance(literal, str) and literal.isprintable()
    if kind is int:
        return isinstance(literal, int) and not isinstance(literal, bool) and -(2**63) <= literal < 2**63
    return isinstance(literal, kind)


def _convert(literal: Any, kind: Any) -> object:
    if isinstance(literal, tuple | list):
        return tuple(literal)
    return float(literal) if kind is float else literal


def _shortened(value: object) -> str:
    """A value as shown in a message; Python refuses to print integers of thousands of digits."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) < MAX_SHOWN else text[:MAX_SHOWN] + "…"


def _describe_type(kind: Any, value: object = None) -> str:
    """Describe the accepted values; an integer that was rejected is too large."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe_type(option, value) for option in inner)
    if kind is int and isinstance(value, int) and not isinstance(value, bool):
        return "an integer below 2^63"
    if origin is tuple:
        count = "" if inner[-1] is Ellipsis else f"{len(inner)} "
        return f"a list of {count}values, each {_describe_type(inner[0])}"
    if isinstance(kind, type) and is_dataclass(kind):
        return f"of type {kind.__name__}"
    return {int: "an integer", float: "a finite number", bool: "true or false", str: "a word", type(None): "none"}[kind]
