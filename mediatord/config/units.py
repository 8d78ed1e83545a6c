"""Sizes and durations as operators write them: `64MiB`, `64 MB`, `512k`, `72h`, `500ms`, or plain numbers."""

from __future__ import annotations

import math
import re
from fractions import Fraction

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
    return int(Fraction(number) * base ** (_UNIT_POWERS[unit.lower()] if unit else 0))


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
