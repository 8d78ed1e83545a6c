"""Mutations of JSON values, at every position in a command."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]


def nested(depth: int, innermost: Any = None) -> Any:
    """Nest `depth` arrays around `innermost`."""
    value = [] if innermost is None else innermost
    for _ in range(depth - (innermost is None)):
        value = [value]
    return value


# Replacements that Python, orjson, pydantic, SQLite and JavaScript interpret differently.
ODDITIES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1.5,
    -0.0,
    1e-7,
    1e21,
    1.7976931348623157e308,
    5e-324,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**400,
    -(10**400),
    float("nan"),
    float("inf"),
    "",
    " ",
    "0",
    "null",
    "\0",
    "a\0b",
    "\ud800",
    "\udfff\ud800",
    "\u2028\x7f\ufeff\ufffe",
    "\U0001f600",
    "did:web:127.0.0.1",
    "did:decentrl:::::",
    "did:decentrl:" + "A" * 2000,
    "#signing",
    "%00%s{0}';--",
    "AAAA",
    "=",
    "z",
    "x" * 1025,
    [],
    {},
    [[]],
    [None],
    {"": ""},
    {"__proto__": {"a": 1}, "constructor": None, "type": "QUERY_EVENTS"},
    {"\U0001f600": 1, "\ue000": 2, "\ud7ff": 3},
    {"\0": "\0"},
    {"\ud800": 1},
    ["tag"] * 1001,
    [""] * 1000,
    nested(60),
    nested(70),
    nested(300),
)


def paths_of(value: Any, path: Path = ()) -> Iterator[Path]:
    """Paths of all members and elements of a JSON value, containers before their contents."""
    inner: Iterator[tuple[str | int, Any]] = iter(())
    if isinstance(value, dict):
        inner = iter(value.items())
    elif isinstance(value, list):
        inner = iter(enumerate(value))
    for name, member in inner:
        yield (*path, name)
        yield from paths_of(member, (*path, name))


def value_at(value: Any, path: Path) -> Any:
    """The value at a path."""
    for name in path:
        value = value[name]
    return value


def replaced(value: Any, path: Path, new: Any) -> Any:
    """A copy of the value with another value at `path`, which may be a new member of an object."""
    changed = copy.deepcopy(value)
    value_at(changed, path[:-1])[path[-1]] = new
    return changed


def without(value: Any, path: Path) -> Any:
    """A copy of the value without the one at `path`."""
    changed = copy.deepcopy(value)
    del value_at(changed, path[:-1])[path[-1]]
    return changed


def variants(value: Any, oddities: tuple[Any, ...] = ODDITIES) -> Iterator[Any]:
    """The value with every oddity at every path, with every path removed, and with everything duplicated."""
    for path in paths_of(value):
        yield without(value, path)
        for oddity in oddities:
            yield replaced(value, path, oddity)
        found = value_at(value, path)
        if isinstance(found, dict):
            yield replaced(value, (*path, "unknown\0\U0001f600"), nested(3, {"\ue000": 1.0}))
        if isinstance(found, list):
            yield replaced(value, path, found * 2)


def to_json(value: Any) -> bytes:
    """Write JSON without restrictions: lone surrogates, unbounded numbers, NaN."""
    return json.dumps(value).encode()
