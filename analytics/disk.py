"""Whether there is room for a run, before it writes anything."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from analytics.errors import AnalyticsError
from analytics.files import Files

if TYPE_CHECKING:
    from analytics.segments import Segment

# As measured once on made-up logs; real ones pack less well, so with a reserve.
PACKED = 10
PARQUET = 1 / 6
SHUFFLE = 1 / 4
TABLES = 64 << 20
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Needs:
    """:param out: bytes of new tables, beside the old ones. :param scratch: bytes that Spark spills at most."""

    out: int
    scratch: int


def needs(segments: Iterable[Segment], kept_bytes: int = 0) -> Needs:
    """
    Estimate what a run writes.

    :param kept_bytes: Parquet that is carried over.
    """
    raw = sum(segment.size * (1 if segment.packed == "plain" else PACKED) for segment in segments)
    return Needs(int(raw * PARQUET) + kept_bytes + TABLES, int((raw + kept_bytes / PARQUET) * SHUFFLE) + TABLES)


def check(files: Files, needed: Needs, out: str, scratch: str, keep_free: int) -> None:
    """
    Both may be on the same disk, or show the same free space as they are of one pool: then both have to have room.

    :param scratch: a directory of this machine.
    :param keep_free: bytes that have to stay free.
    :raise AnalyticsError: there is too little room.
    """
    spill = Path(scratch).absolute().as_uri()
    free_out, free_scratch = files.free_bytes(out), files.free_bytes(spill)
    is_shared = free_out == free_scratch or files.disk(out) == files.disk(spill)
    together = needed.out + needed.scratch if is_shared else 0
    for path, free, need in ((out, free_out, needed.out), (scratch, free_scratch, needed.scratch)):
        wanted = max(need, together) + keep_free
        if free < wanted:
            raise AnalyticsError(
                f"{path}: {free // MIB} MiB free, about {-(-wanted // MIB)} MiB needed"
                f" ({keep_free // MIB} MiB of them to stay free)"
            )
