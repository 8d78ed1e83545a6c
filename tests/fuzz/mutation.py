"""Mutations of inputs, as bytes and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from tests.protocol.decentrl.mutations import ODDITIES, Path, nested, paths_of, value_at

_MORE_ODDITIES: tuple[Any, ...] = (
    *ODDITIES,
    nested(1000),
    ["x"] * 200,
    {str(number): number for number in range(200)},
    "(a+)+$",
    "*" * 300,
    "@MEDIATOR@",
    "@GUEST@",
    "did:peer:4zQm",
    "https://didcomm.org/routing/2.0/forward",
)
_PLACES = 400


def mutated(data: bytes, rng: Random, most: int, words: Sequence[bytes] = ()) -> bytes:
    """
    Mutate an input.

    :param most: maximum length.
    :param words: tokens to insert.
    """
    way, rest = data[:1], data[1:]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        changed = _mutate_json(rest, rng) if rng.random() < 0.6 else None
        rest = _mutate_bytes(rest, rng, words) if changed is None else changed
    return (way + rest)[:most]


def _mutate_json(data: bytes, rng: Random) -> bytes | None:
    """Change one value; None if the input is no JSON with values to change."""
    if len(data) > 65_536:
        return None
    try:
        value = json.loads(data)
        found = [path for path, _ in zip(paths_of(value), range(_PLACES), strict=False)]
        if not found:
            return None
        value = _mutate_value(value, rng.choice(found), rng)
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
        return text.encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return None


def _mutate_value(value: Any, path: Path, rng: Random) -> Any:
    container, name = value_at(value, path[:-1]), path[-1]
    what = rng.randrange(8)
    if what == 0:
        del container[name]
    elif what == 1:
        container[name] = [container[name]] * rng.choice((1, 2, 101))
    elif what == 2 and isinstance(container, dict):
        container[rng.choice(("", "unknown", "id", "kid", f"{name} "))] = container[name]
    elif what == 3 and isinstance(container[name], str):
        container[name] = _mutate_text(container[name], rng)
    elif what == 4:
        container[name] = value_at(value, rng.choice(list(paths_of(value))))
        json.dumps(value)  # a value cannot contain itself
    else:
        container[name] = rng.choice(_MORE_ODDITIES)
    return value


def _mutate_text(text: str, rng: Random) -> str:
    where = rng.randrange(len(text) + 1)
    more = rng.choice(("", "\0", "=", "#", ":", ".", "%2F", "é", "\ud800", text, "a" * 100))
    return text[:where] + more + text[where + rng.choice((0, 0, 1, 5)) :]


def _mutate_bytes(data: bytes, rng: Random, words: Sequence[bytes]) -> bytes:
    raw = bytearray(data)
    start = rng.randrange(len(raw) + 1)
    end = min(len(raw), start + rng.choice((0, 1, 1, 2, 8, 40)))
    what = rng.randrange(6)
    if what == 0:
        del raw[start:end]
    elif what == 1:
        raw[start:end] = rng.randbytes(rng.choice((1, 2, 4)))
    elif what == 2:
        raw[start:start] = raw[start:end] * rng.choice((1, 2, 50))
    elif what == 3 and start < len(raw):
        raw[start] ^= 1 << rng.randrange(8)
    elif words:
        raw[start:end] = rng.choice(words)
    else:
        raw[start:start] = rng.choice((b"\0", b"\r\n", b'"', b"{", b"[", b"\xff", b"-1", b"1e400", b"\\u0000"))
    return bytes(raw)
