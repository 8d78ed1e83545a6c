"""What can go wrong with JSON, wherever in a command it may stand."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

Path = tuple[str | int, ...]


def nested(depth: int, innermost: Any = None) -> Any:
    """So many arrays within one another."""
    value = [] if innermost is None else innermost
    for _ in range(depth - (innermost is None)):
        value = [value]
    return value


# In place of anything. Each is something that Python, orjson, pydantic, SQLite and JavaScript see in different ways.
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


def places(value: Any, path: Path = ()) -> Iterator[Path]:
    """Where every member and every element of a JSON value is, the containers before what they hold."""
    inner: Iterator[tuple[str | int, Any]] = iter(())
    if isinstance(value, dict):
        inner = iter(value.items())
    elif isinstance(value, list):
        inner = iter(enumerate(value))
    for name, member in inner:
        yield (*path, name)
        yield from places(member, (*path, name))


def at(value: Any, path: Path) -> Any:
    """What is there."""
    for name in path:
        value = value[name]
    return value


def replaced(value: Any, path: Path, new: Any) -> Any:
    """The value with something else in one place; an object's member may be a new one."""
    changed = copy.deepcopy(value)
    at(changed, path[:-1])[path[-1]] = new
    return changed


def without(value: Any, path: Path) -> Any:
    """The value with one place taken out."""
    changed = copy.deepcopy(value)
    del at(changed, path[:-1])[path[-1]]
    return changed


def variants(value: Any, oddities: tuple[Any, ...] = ODDITIES) -> Iterator[Any]:
    """The value with every oddity in every place, with every place missing, and with everything there twice."""
    for path in places(value):
        yield without(value, path)
        for oddity in oddities:
            yield replaced(value, path, oddity)
        found = at(value, path)
        if isinstance(found, dict):
            yield replaced(value, (*path, "unknown\0\U0001f600"), nested(3, {"\ue000": 1.0}))
        if isinstance(found, list):
            yield replaced(value, path, found * 2)


def spelled(value: Any) -> bytes:
    """As JSON that anything can be written in: half of a surrogate pair, numbers without bounds, NaN."""
    return json.dumps(value).encode()
