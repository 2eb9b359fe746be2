"""What a user names and sets: entries looked up by name, and one generic override for every frozen dataclass.

A dataclass whose fields were renamed declares `ALIASES: ClassVar = {"old": "new"}`: old names are still read, by
`override` and by `from_plain`, and never written. What a setting means stands below its field, as a string;
`list_settings` reads it there.
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
    "check_settings",
    "check_types",
    "from_plain",
    "list_settings",
    "lookup",
    "override",
    "suggest",
    "to_plain",
    "typed",
]

T = TypeVar("T")
FEW, MANY = 6, 20
"""Of more than MANY names a message shows FEW."""
SHOWN = 200
"""Characters of a wrong value that a message shows."""


def suggest(name: str, names: Sequence[str]) -> str:
    """The end of an error about an unknown name: up to three that look like it, or else all (some of very many)."""
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.4)
    if not near:
        rest = f" and {len(names) - FEW} more" if len(names) > MANY else ""
        return f"choose from {', '.join(names[:FEW] if rest else names)}{rest}."
    return _did_you_mean(near)


def _did_you_mean(near: Sequence[str]) -> str:
    return f"did you mean {', '.join(near[:-1])}{' or ' if near[1:] else ''}{near[-1]}?"


def lookup(entries: Mapping[str, T], name: str, kind: str) -> T:
    """The entry of this name in a table of models, tasks, simulators, ..."""
    if name not in entries:
        raise ValueError(f'Unknown {kind} "{name}"; {suggest(name, list(entries))}')
    return entries[name]


def override(value: T, assignments: Sequence[str]) -> T:
    """A copy of the dataclass with every `name=text` applied; `outer.inner=text` reaches into nested ones.

    All of them at once: values that only fit together (a finer grid and its step) need no order.
    """
    return _changed(value, _parsed(assignments), "", list(_names(value)))


def check_settings(kind: type, assignments: Sequence[str]) -> None:
    """Refuse names and values that no dataclass of this kind takes, before there is one to change."""
    everything = [one.name for one in list_settings(kind)]
    for path, text in _parsed(assignments).items():
        _check(kind, path, text, "", everything)


def _check(kind: type, path: str, text: str, prefix: str, everything: Sequence[str]) -> None:
    name, (_, dot, rest) = _known(kind, path, prefix, everything), path.partition(".")
    inner = _kinds(kind)[name]
    if dot and is_dataclass(inner):
        _check(typing.cast(type, inner), rest, text, f"{prefix}{name}.", everything)
    elif dot:
        raise _single(prefix + name)
    elif not is_dataclass(inner):
        _read(inner, text, prefix + path)


def _parsed(assignments: Sequence[str]) -> dict[str, str]:
    changes: dict[str, str] = {}
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path.strip():
            raise ValueError(f'"{assignment}" is not a setting; write name=value.')
        changes.pop(path.strip(), None)  # the last of several comes last
        changes[path.strip()] = text.strip()
    return changes


def _known(kind: type, path: str, prefix: str, everything: Sequence[str]) -> str:
    """The name of the field that a path begins with."""
    names = [field.name for field in fields(typing.cast(Any, kind))]
    first = path.partition(".")[0]
    name = _aliases(kind).get(first, first)
    if name not in names:
        leaf = path.rpartition(".")[2]
        elsewhere = [one for one in everything if one.rpartition(".")[2] == leaf]
        near = _did_you_mean(elsewhere[:3]) if elsewhere else suggest(name, names)
        raise ValueError(f'Unknown setting "{prefix}{path}"; {near}')
    return name


def _single(name: str) -> ValueError:
    return ValueError(f"{name} is a single value without nested settings; remove what follows the dot.")


def _names(value: Any, prefix: str = "") -> Iterator[str]:
    for field in fields(value):
        inner = getattr(value, field.name)
        if is_dataclass(inner):
            yield from _names(inner, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _changed(value: T, changes: dict[str, str], prefix: str, everything: Sequence[str]) -> T:
    kinds = _kinds(type(value))
    new: dict[str, object] = {}
    inside: dict[str, dict[str, str]] = {}
    for path, text in changes.items():
        _, dot, rest = path.partition(".")
        name = _known(type(value), path, prefix, everything)
        if not dot:
            new[name] = _read(kinds[name], text, prefix + path)
        elif not is_dataclass(getattr(value, name)):
            raise _single(prefix + name)
        else:
            inside.setdefault(name, {})[rest] = text
    for name, deeper in inside.items():
        new[name] = _changed(getattr(value, name), deeper, f"{prefix}{name}.", everything)
    return typing.cast(T, replace(typing.cast(Any, value), **new))


def _aliases(kind: type) -> Mapping[str, str]:
    """Old names of fields and the new ones."""
    return getattr(kind, "ALIASES", {})


def check_types(value: object) -> None:
    """For `__post_init__` of a frozen dataclass: every field has the type it is declared with, and numbers are finite.

    Lists become tuples, NumPy's numbers become Python's, whole numbers become floats where a float is declared.
    """
    kinds = _kinds(type(value))
    for field in fields(typing.cast(Any, value)):
        given, kind = _python(getattr(value, field.name)), kinds[field.name]
        if not _fits(given, kind):
            raise ValueError(f"{field.name} must be {_words(kind, given)}, not {_short(given)}.")
        object.__setattr__(value, field.name, _convert(given, kind))


def _python(value: Any) -> Any:
    """A list as a tuple, a NumPy number as Python's own."""
    if isinstance(value, tuple | list):
        return tuple(map(_python, value))
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def to_plain(value: Any) -> Any:
    """A frozen dataclass as what JSON holds."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    return [to_plain(one) for one in value] if isinstance(value, tuple | list) else value


def from_plain(kind: type[T], plain: object, where: str = "") -> T:
    """The dataclass of this kind from `to_plain`; a key or a type that does not belong there is refused."""
    name = where or kind.__name__
    if not isinstance(plain, dict):
        raise ValueError(f"{name} must be a table of settings, not {plain!r}.")
    kinds = _kinds(kind)
    known = {field.name: field for field in fields(typing.cast(Any, kind))}
    values: dict[str, object] = {}
    for given, value in plain.items():
        key = _aliases(kind).get(given, given)
        path = f"{where}.{key}" if where else str(key)
        if key in values:
            raise ValueError(f"{name} sets {key} twice, also as {given}; remove one.")
        if key not in known:
            raise ValueError(f"{name}: unknown setting {json.dumps(str(key))}; {suggest(str(key), list(known))}")
        if is_dataclass(kinds[key]):
            values[key] = from_plain(typing.cast(Any, kinds[key]), value, path)
        elif _fits(value, kinds[key]):
            values[key] = _convert(value, kinds[key])
        else:
            raise ValueError(f"{path} must be {_words(kinds[key], value)}, not {_short(value)}.")
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
    """One line of the list of settings."""

    name: str
    """With the parts before it: `model.options.padding`."""
    kind: str
    """What values it takes, in words."""
    value: str
    """As it is typed, or REQUIRED."""
    meaning: str
    """The first sentence of what stands below the field."""


def list_settings(value: Any, prefix: str = "") -> list[Setting]:
    """Every setting of a dataclass, nested ones too: with the values of an instance, or with the defaults of a type."""
    kind = value if isinstance(value, type) else type(value)
    kinds, meanings, found = _kinds(kind), _meanings(kind), []
    for field in fields(kind):
        name, here = field.name, getattr(value, field.name, field.default)
        if is_dataclass(kinds[name]):
            inner = kinds[name] if isinstance(value, type) else here
            found += list_settings(inner, f"{prefix}{name}.")
        else:
            text = REQUIRED if here is MISSING else typed(here)
            if kinds[name] == tuple[str, ...]:  # one word alone is a list of it
                text = text.removesuffix(",")
            found.append(Setting(prefix + name, _short_words(kinds[name]), text, meanings.get(name, "")))
    return found


_kinds: Callable[[type], Mapping[str, Any]] = functools.cache(typing.get_type_hints)
"""By field, its type; once for each class, because Python compiles and evaluates every annotation for it."""


@functools.cache
def _meanings(kind: type) -> dict[str, str]:
    """By field, the first sentence of the string below it; those of base classes count too."""
    found: dict[str, str] = {}
    for one in reversed(kind.__mro__):
        with contextlib.suppress(OSError, TypeError):  # defined at a prompt, or built in
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(one))).body
            found |= _described(getattr(definition, "body", ()))
    return found


def _described(body: Sequence[ast.stmt]) -> Iterator[tuple[str, str]]:
    for pair in itertools.pairwise(body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split()).partition(". ")[0].removesuffix(".") + "."


def typed(value: object) -> str:
    """A value as it is typed after `--set name=`."""
    if isinstance(value, tuple):
        return "".join(f"{typed(one)}," for one in value).removesuffix("," if len(value) > 1 else "") or "()"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _short_words(kind: Any) -> str:
    """What values a setting takes, short enough for a table."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(map(_short_words, inner))
    if origin is tuple:
        return f"{_short_words(inner[0])}s" if inner[-1] is Ellipsis else f"{len(inner)} {_short_words(inner[0])}s"
    return {int: "integer", float: "number", bool: "true or false", str: "word", type(None): "none"}[kind]


def _read(kind: Any, text: str, whole: str) -> object:
    if kind is str:
        return text
    try:
        literal = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text.lower(), text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        literal = text
    if literal is text and _takes_words(kind) and ("," in text or not _fits(text, kind)):
        words = tuple(word.strip() for word in text.strip("()[] ").removesuffix(",").split(","))
        literal = words if all(words) else text
    if not _fits(literal, kind):
        raise ValueError(
            f'{whole} must be {_words(kind, literal)}, not "{text if len(text) < SHOWN else text[:SHOWN] + "…"}".'
        )
    return _convert(literal, kind)


def _takes_words(kind: Any) -> bool:
    """Whether a list of words is meant, which may be typed without quotes."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return any(map(_takes_words, typing.get_args(kind)))
    return typing.get_origin(kind) is tuple and typing.get_args(kind)[0] is str


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
        number = isinstance(literal, int | float) and not isinstance(literal, bool)
        return number and abs(typing.cast(float, literal)) <= sys.float_info.max  # false for NaN, too
    if kind is str:
        return isinstance(literal, str) and literal.isprintable()
    if kind is int:
        return isinstance(literal, int) and not isinstance(literal, bool) and -(2**63) <= literal < 2**63
    return isinstance(literal, kind)


def _convert(literal: Any, kind: Any) -> object:
    if isinstance(literal, tuple | list):
        return tuple(literal)
    return float(literal) if kind is float else literal


def _short(value: object) -> str:
    """A value as a message shows it; an integer of thousands of digits has no text in Python."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) < SHOWN else text[:SHOWN] + "…"


def _words(kind: Any, given: object = None) -> str:
    """What a value of this kind is; a whole number that is refused as such is too large."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_words(one, given) for one in inner)
    if kind is int and isinstance(given, int) and not isinstance(given, bool):
        return "an integer below 2^63"
    if origin is tuple:
        count = "" if inner[-1] is Ellipsis else f"{len(inner)} "
        return f"a list of {count}values, each {_words(inner[0])}"
    if isinstance(kind, type) and is_dataclass(kind):
        return f"of type {kind.__name__}"
    return {int: "an integer", float: "a finite number", bool: "true or false", str: "a word", type(None): "none"}[kind]
