"""Endpoint strings of Twisted, taken apart as Twisted does it, to look at them without listening on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

# Before an endpoint string: the first line of each connection is that of a proxy, about its client.
PROXIED = "haproxy:"

# Parameters that are paths, by kind: those without names in their order (None: no path), then those that always have
# one; and the path that Twisted takes where there is none.
_POSITIONAL: dict[str, tuple[str | None, ...]] = {
    "unix": ("address",),
    "ssl": (None, "privateKey", "certKey"),
    "tls": ("path",),
}
_NAMED = {"ssl": ("extraCertChain", "dhParameters")}
_DEFAULTS = {"ssl": ("privateKey", "server.pem")}


def take_apart(endpoint: str) -> tuple[str, list[str], dict[str, str]]:
    """
    Its kind, such as `tcp`, the arguments without names, and those with.

    Its kind is `haproxy` where that is before another. A backslash has what follows it meant as it is.
    """
    kind, *arguments = _split(endpoint, ":")
    given: list[str] = []
    named: dict[str, str] = {}
    for argument in arguments:
        name, *value = _split(argument, "=", 1)
        if value:
            named[_plain(name)] = _plain(value[0])
        else:
            given.append(_plain(argument))
    return kind, given, named


def with_absolute_paths(endpoint: str, base: Path) -> str:
    """The same endpoint with every relative path in it taken to be relative to `base`."""
    prefix = PROXIED if endpoint.startswith(PROXIED) else ""
    kind, *arguments = _split(endpoint.removeprefix(PROXIED), ":")
    if kind not in _POSITIONAL:
        return endpoint
    return prefix + ":".join([kind, *_resolved(kind, arguments, base)])


def _resolved(kind: str, arguments: list[str], base: Path) -> Iterator[str]:
    positional = iter(_POSITIONAL[kind])
    paths = {*_POSITIONAL[kind], *_NAMED.get(kind, ())}
    seen: set[str | None] = set()
    for argument in arguments:
        name, *value = _split(argument, "=", 1)
        parameter = _plain(name) if value else next(positional, None)
        seen.add(parameter)
        path = _plain(value[0] if value else argument)
        if parameter not in paths or parameter is None or not path or path.startswith("/"):
            yield argument
        elif value:
            yield f"{name}={_quoted(base / path)}"
        else:
            yield _quoted(base / path)
    parameter, path = _DEFAULTS.get(kind, ("", ""))
    if path and parameter not in seen:
        yield f"{parameter}={_quoted(base / path)}"


def _split(text: str, separator: str, most: int = 0) -> list[str]:
    """Where the separator is not escaped, `most` times at most, or everywhere; escapes are kept."""
    parts: list[str] = [""]
    for piece in re.findall(r"\\.|[^\\]|\\$", text, re.DOTALL):
        if piece == separator and (not most or len(parts) <= most):
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _quoted(path: Path) -> str:
    return re.sub(r"([\\:=])", r"\\\1", str(path))


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)
