"""Classes of ages, sizes and pushes: few enough to count by, named so that they sort, empty of null."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

if TYPE_CHECKING:
    from pyspark.sql import Column

_MINUTE = 60_000
_HOUR = 60 * _MINUTE
_DAY = 24 * _HOUR
_KIB = 1024

# Each class ends below its bound; the last has none.
AGES = {
    "0 <1s": 1000,
    "1 <10s": 10_000,
    "2 <1m": _MINUTE,
    "3 <10m": 10 * _MINUTE,
    "4 <1h": _HOUR,
    "5 <6h": 6 * _HOUR,
    "6 <1d": _DAY,
    "7 <3d": 3 * _DAY,
    "8 3d+": None,
}
SIZES = {
    "0 <1K": _KIB,
    "1 <4K": 4 * _KIB,
    "2 <16K": 16 * _KIB,
    "3 <64K": 64 * _KIB,
    "4 <256K": 256 * _KIB,
    "5 <1M": _KIB * _KIB,
    "6 1M+": None,
}
PUSHES = {"0": 1, "1": 2, "2-4": 5, "5+": None}


def age_class(ms: Column) -> Column:
    """The key of :data:`AGE_BOUNDS` for an age in milliseconds; a negative one counts as none."""
    return _class(ms, AGES)


def size_class(size: Column) -> Column:
    """The key of :data:`SIZES` for a size in bytes; K is 1024, M its square."""
    return _class(size, SIZES)


def pushes_class(pushes: Column) -> Column:
    """The key of :data:`PUSHES` for how often a message was handed over."""
    return _class(pushes, PUSHES)


def _class(value: Column, bounds: dict[str, int | None]) -> Column:
    first = F.when(value.isNull(), "")
    return reduce(
        lambda cases, item: cases.otherwise(item[0]) if item[1] is None else cases.when(value < item[1], item[0]),
        bounds.items(),
        first,
    )
