"""Sizes in bytes as operators write them: `64MiB`, `64 MB`, `512k`, or a plain number."""

from __future__ import annotations

import re
from fractions import Fraction

_SIZE_PATTERN = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*(?:b|([kmgt])(ib|b)?)?", re.IGNORECASE)
_UNIT_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_BINARY_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def parse_size(text: str) -> int:
    """
    The number of bytes, rounded down.

    As GNU programs have it, `64M` and `64MiB` are powers of 1024 and `64MB` is one of 1000. Case does not count.

    :raise ValueError: it is not a size.
    """
    match = _SIZE_PATTERN.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size such as 64MiB, 512k or a number of bytes")
    number, unit, suffix = match.groups()
    base = 1000 if suffix and suffix.lower() == "b" else 1024
    return int(Fraction(number) * base ** (_UNIT_POWERS[unit.lower()] if unit else 0))


def format_size(size: int) -> str:
    """The shortest exact way to write a size with a binary unit."""
    for unit, factor in _BINARY_UNITS:
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)
