"""Totals and backlog of the queues of both protocols: sums in which numbers may be unknown, and buckets by age."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mediatord.store.interfaces.messages import (
    AgeBucket,
    LargeQueue,
    QueueBacklog,
    QueueTotals,
    new_stored_message_id,
)

# Hexadecimal digits of an id that are its time.
_TIME_DIGITS = 12


def complete_buckets(buckets: Sequence[AgeBucket], messages: int, size: int | None) -> list[AgeBucket]:
    """
    Fill in the only bucket that is not exact, if there is one, from the totals.

    :param size: bytes of all; None if unknown.
    """
    unknown = [place for place, one in enumerate(buckets) if not one.exact]
    if len(unknown) != 1:
        return list(buckets)
    (place,) = unknown
    exact = [one for one in buckets if one.exact]
    rest, taken = messages - sum([one.messages for one in exact]), _add_known(*[one.bytes for one in exact])
    left = None if size is None or taken is None else size - taken
    # The totals may be of another moment, or estimates.
    whole = replace(buckets[place], messages=max(rest, buckets[place].messages), bytes=left, exact=True)
    return [*buckets[:place], whole, *buckets[place + 1 :]]


def get_id_ranges(bounds: Sequence[float]) -> list[tuple[str | None, str | None]]:
    """
    For each bucket the first id that may be in it, and the first that may not: prefixes that are not greater than the
    ids of messages of that time or later, and greater than earlier ids.
    """
    edges = [new_stored_message_id(max(bound, 0.0))[:_TIME_DIGITS] for bound in bounds]
    return list(zip([*edges, None], [None, *edges], strict=True))


def build_backlog(
    buckets: Sequence[Sequence[AgeBucket]], totals: Iterable[tuple[int, int | None]], largest: Iterable[LargeQueue]
) -> QueueBacklog:
    """
    Backlog of the two protocols together.

    :param totals: messages and bytes of each.
    """
    messages, sizes = zip(*totals, strict=True)
    return QueueBacklog(sum(messages), _add_known(*sizes), sum_buckets(*buckets), tuple(largest))


def sum_buckets(some: Sequence[AgeBucket], others: Sequence[AgeBucket]) -> tuple[AgeBucket, ...]:
    """Buckets of the two protocols together."""
    return tuple(
        AgeBucket(one.messages + other.messages, _add_known(one.bytes, other.bytes), one.exact and other.exact)
        for one, other in zip(some, others, strict=True)
    )


def find_earliest(*times: float | None) -> float | None:
    """The earliest of the times that are known."""
    return min([at for at in times if at is not None], default=None)


def add_queue_totals(one: QueueTotals, other: QueueTotals) -> QueueTotals:
    """Totals of the two protocols together."""
    return QueueTotals(
        one.messages + other.messages,
        _add_known(one.bytes, other.bytes),
        _add_known(one.recipients, other.recipients),
        find_earliest(one.oldest_received_at, other.oldest_received_at),
    )


def _add_known(*numbers: int | None) -> int | None:
    """Sum; None if one of them is unknown."""
    return None if None in numbers else sum([number or 0 for number in numbers])
