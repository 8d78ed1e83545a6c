"""Numbers for people: a unit with each, few digits, the same everywhere. None is a dash."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite

FEW = "few"
NOTHING = "\N{EN DASH}"
_SPACE = "\N{NO-BREAK SPACE}"
_LONGEST = 160
_BYTES = ((1, "B"), (1024, "KiB"), (1024**2, "MiB"), (1024**3, "GiB"), (1024**4, "TiB"))
_TIMES = ((1, "ms"), (1000, "s"), (60_000, "min"), (3_600_000, "h"), (86_400_000, "d"))


def count(value: float | None) -> str:
    """`12,345`; halves and less are shown only where the number is small."""
    if value is None or not isfinite(value):
        return NOTHING
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:,.1f}"


def short(value: float) -> str:
    """A count for an axis: `12 k`, `1.5 M`."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= factor:
            return f"{value / (1000 if unit == 'k' else factor):,.4g}{_SPACE}{unit}"
    return f"{value:,.4g}"


def size(value: float | None) -> str:
    """Bytes: `1.2 MiB`."""
    return _scaled(value, _BYTES)


def duration(ms: float | None) -> str:
    """Milliseconds: `350 ms`, `2.1 s`, `3.4 h`."""
    return _scaled(ms, _TIMES)


def share(value: float | None) -> str:
    """Of one: `1.2 %`."""
    if value is None or not isfinite(value):
        return NOTHING
    percent = value * 100
    digits = 0 if percent >= 99.95 or percent == int(percent) else 2 if abs(percent) < 1 else 1
    return f"{percent:.{digits}f}{_SPACE}%"


def days(value: float | None) -> str:
    """`2.5 days`."""
    return NOTHING if value is None else f"{count(value)}{_SPACE}days"


def of(name: str) -> Callable[[float | None], str]:
    """How values are told whose name has their unit: `..._ms`, `..._share`, bytes, or a count."""
    if "bytes" in name:
        return size
    if "_ms" in name:
        return duration
    return share if name.endswith("share") else count


def text(value: object) -> str:
    """As it is, or the beginning of what is longer than a line; a dash for nothing."""
    whole = NOTHING if value is None or value == "" else str(value)
    return whole if len(whole) <= _LONGEST else f"{whole[:_LONGEST]}\N{HORIZONTAL ELLIPSIS}"


def people(value: float | None) -> str:
    """A count of individuals; null where k-anonymity hides it."""
    return FEW if value is None else count(value)


def plural(number: int, one: str, many: str = "") -> str:
    """`1 node`, `3 nodes`."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _scaled(value: float | None, units: Sequence[tuple[int, str]]) -> str:
    if value is None or not isfinite(value):
        return NOTHING
    factor, unit = next((each for each in reversed(units) if abs(value) >= each[0]), units[0])
    scaled = value / factor
    digits = 0 if scaled == int(scaled) or abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
    return f"{scaled:.{digits}f}{_SPACE}{unit}"
