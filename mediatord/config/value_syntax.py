"""
Syntax of values of the configuration: sizes (`64MiB`, `64 MB`, `512k`), durations (`72h`, `500ms`) and
Twisted endpoint strings; and the default path of the file.

Imports neither pydantic nor Twisted, so that the CLI starts fast.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

_SIZE_PATTERN = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(?:b|([kmgt])(ib|b)?)?", re.IGNORECASE)
_UNIT_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_BINARY_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def parse_size(text: str) -> int:
    """
    Number of bytes, rounded down. As in GNU programs, `64M` and `64MiB` are powers of 1024, `64MB` of 1000; case is
    ignored.

    :raise ValueError: not a size.
    """
    match = _SIZE_PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 64MiB, 512k or a number of bytes")
    number, unit, suffix = match.groups()
    base = 1000 if suffix and suffix.lower() == "b" else 1024
    whole, _, decimals = number.partition(".")
    scaled = int(whole + decimals) * base ** (_UNIT_POWERS[unit.lower()] if unit else 0)
    return int(scaled // 10 ** len(decimals))


def format_size(size: int) -> str:
    """The shortest exact spelling of a size with a binary unit."""
    for unit, factor in _BINARY_UNITS:
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION_PATTERN = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?")


def parse_duration(value: object) -> float:
    """
    Seconds, from a number of seconds or a text such as `72h`.

    :raise ValueError: not a duration.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str) and (match := _DURATION_PATTERN.fullmatch(value.strip())):
        seconds = float(match[1]) * _DURATION_UNITS[match[2] or "s"]
    else:
        seconds = math.nan
    if not math.isfinite(seconds) or seconds < 0:
        raise ValueError("expected a duration such as 72h, 60s, 500ms or a number of seconds")
    return seconds


def format_duration(seconds: float) -> str:
    """The shortest exact spelling of a duration; days only from a week on, so that 72h stays 72h."""
    milliseconds = round(seconds * 1000)
    if milliseconds % 1000:
        return f"{milliseconds}ms"
    whole = milliseconds // 1000
    for unit, size, least in (("d", 86400, 7 * 86400), ("h", 3600, 3600), ("m", 60, 600)):
        if whole >= least and whole % size == 0:
            return f"{whole // size}{unit}"
    return f"{whole}s"


# Prefix of endpoints whose connections start with a PROXY header.
HAPROXY_PREFIX = "haproxy:"

# Positional parameters by endpoint type, for types with paths; parameters that are paths; Twisted's default paths.
_POSITIONAL_PARAMETERS = {"unix": ("address",), "ssl": ("port", "privateKey", "certKey"), "tls": ("path",)}
_PATH_PARAMETERS = {"address", "path", "privateKey", "certKey", "extraCertChain", "dhParameters"}
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


def resolve_endpoint_paths(base: Path, endpoint: str) -> str:
    """Resolve the relative paths of an endpoint against `base`."""
    prefix = HAPROXY_PREFIX if endpoint.startswith(HAPROXY_PREFIX) else ""
    kind, given, named = parse_endpoint_string(endpoint.removeprefix(HAPROXY_PREFIX))
    if kind not in _POSITIONAL_PARAMETERS:
        return endpoint
    parameters = _POSITIONAL_PARAMETERS[kind]
    for place, parameter in enumerate(parameters[: len(given)]):
        given[place] = _resolve_parameter(base, parameter, given[place])
    named = {parameter: _resolve_parameter(base, parameter, value) for parameter, value in named.items()}
    parameter, path = _DEFAULT_PATHS.get(kind, ("", ""))
    if path and parameter not in (*named, *parameters[: len(given)]):
        named[parameter] = str(base / path)
    arguments = [*map(_escape, given), *(f"{_escape(name)}={_escape(value)}" for name, value in named.items())]
    return prefix + ":".join([kind, *arguments])


def _resolve_parameter(base: Path, parameter: str, value: str) -> str:
    return str(base / value) if parameter in _PATH_PARAMETERS and value else value


def _split_unescaped(text: str, separator: str, most: int = 0) -> list[str]:
    """Split at unescaped separators, at most `most` times (0: no limit); escapes are kept."""
    parts: list[str] = [""]
    for piece in re.findall(r"\\.|[^\\]|\\$", text, re.DOTALL):
        if piece == separator and (not most or len(parts) <= most):
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _escape(text: str) -> str:
    return re.sub(r"([\\:=])", r"\\\1", text)


def _unescape(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)


DEFAULT_CONFIG_PATH = Path("/etc/mediatord/mediator.yaml")
CONFIG_PATH_VARIABLE = "MEDIATORD_CONFIG"


def get_default_config_path(environ: Mapping[str, str] = os.environ) -> Path:
    """The path in the environment variable, or the system's default; an empty variable counts as unset."""
    return Path(environ.get(CONFIG_PATH_VARIABLE) or DEFAULT_CONFIG_PATH)
