"""Parsing of Twisted endpoint strings, as Twisted does it, without opening them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

# Prefix of endpoints whose connections start with a PROXY header.
HAPROXY_PREFIX = "haproxy:"

# Path parameters by endpoint type: positional ones in order (None: not a path), named ones, and Twisted's default
# path.
_POSITIONAL_PARAMETERS: dict[str, tuple[str | None, ...]] = {
    "unix": ("address",),
    "ssl": (None, "privateKey", "certKey"),
    "tls": ("path",),
}
_PATH_PARAMETERS = {"ssl": ("extraCertChain", "dhParameters")}
_DEFAULT_PATHS = {"ssl": ("privateKey", "server.pem")}


def parse_endpoint_string(endpoint: str) -> tuple[str, list[str], dict[str, str]]:
    """
    Type of the endpoint, such as `tcp`, positional arguments, and named arguments.

    The type is `haproxy` if that prefixes another one. A backslash escapes the next character.
    """
    kind, *arguments = _split_unescaped(endpoint, ":")
    given: list[str] = []
    named: dict[str, str] = {}
    for argument in arguments:
        name, *value = _split_unescaped(argument, "=", 1)
        if value:
            named[_unescape(name)] = _unescape(value[0])
        else:
            given.append(_unescape(argument))
    return kind, given, named


def resolve_endpoint_paths(endpoint: str, base: Path) -> str:
    """Resolve the relative paths of an endpoint against `base`."""
    prefix = HAPROXY_PREFIX if endpoint.startswith(HAPROXY_PREFIX) else ""
    kind, *arguments = _split_unescaped(endpoint.removeprefix(HAPROXY_PREFIX), ":")
    if kind not in _POSITIONAL_PARAMETERS:
        return endpoint
    return prefix + ":".join([kind, *_resolve_arguments(kind, arguments, base)])


def _resolve_arguments(kind: str, arguments: list[str], base: Path) -> Iterator[str]:
    positional = iter(_POSITIONAL_PARAMETERS[kind])
    paths = {*_POSITIONAL_PARAMETERS[kind], *_PATH_PARAMETERS.get(kind, ())}
    seen: set[str | None] = set()
    for argument in arguments:
        name, *value = _split_unescaped(argument, "=", 1)
        parameter = _unescape(name) if value else next(positional, None)
        seen.add(parameter)
        path = _unescape(value[0] if value else argument)
        if parameter not in paths or parameter is None or not path or path.startswith("/"):
            yield argument
        elif value:
            yield f"{name}={_escape_path(base / path)}"
        else:
            yield _escape_path(base / path)
    parameter, path = _DEFAULT_PATHS.get(kind, ("", ""))
    if path and parameter not in seen:
        yield f"{parameter}={_escape_path(base / path)}"


def _split_unescaped(text: str, separator: str, most: int = 0) -> list[str]:
    """Split at unescaped separators, at most `most` times (0: no limit); escapes are kept."""
    parts: list[str] = [""]
    for piece in re.findall(r"\\.|[^\\]|\\$", text, re.DOTALL):
        if piece == separator and (not most or len(parts) <= most):
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _escape_path(path: Path) -> str:
    return re.sub(r"([\\:=])", r"\\\1", str(path))


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)
