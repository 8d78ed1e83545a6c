"""What waits by age: what the backends have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mediatord.ids import new_message_id
from mediatord.interfaces import Backlog, Cohort, LongQueue

# Of an id, that say when it was made.
_DIGITS = 12


def grouped(found: Iterable[tuple[float, int]], bounds: Sequence[float], limit: int) -> list[Cohort]:
    """
    The cohorts of what is looked at.

    :param found: time and bytes of each, the latest first; no more than `limit` are looked at.
    :param bounds: latest first.
    """
    messages, sizes = [0] * (len(bounds) + 1), [0] * (len(bounds) + 1)
    last, complete = 0, True
    for number, (at, size) in enumerate(found):
        if number == limit:
            complete = False
            break
        last = next((place for place, bound in enumerate(bounds) if at >= bound), len(bounds))
        messages[last] += 1
        sizes[last] += size
    return [Cohort(messages[place], sizes[place], complete or place < last) for place in range(len(bounds) + 1)]


def completed(cohorts: Sequence[Cohort], messages: int, size: int | None) -> list[Cohort]:
    """
    The same, with what is known of all: if it is one only that was not counted to its end, that is the rest.

    :param size: bytes of all; None where nobody knows.
    """
    unknown = [place for place, one in enumerate(cohorts) if not one.exact]
    if len(unknown) != 1:
        return list(cohorts)
    rest = messages - sum([one.messages for one in cohorts if one.exact])
    sizes = [one.bytes for one in cohorts if one.exact]
    left = None if size is None or None in sizes else size - sum([one or 0 for one in sizes])
    (place,) = unknown
    last = cohorts[place]
    # What all amounts to may have been found out at another moment, or be a little wrong.
    whole = replace(last, messages=max(rest, last.messages), bytes=left, exact=True)
    return [*cohorts[:place], whole, *cohorts[place + 1 :]]


def id_at(time: float) -> str:
    """Not greater than the id of anything that came then or later, and greater than that of what came before."""
    return new_message_id(max(time, 0.0))[:_DIGITS]


def spans(bounds: Sequence[float]) -> list[tuple[str | None, str | None]]:
    """For each cohort the first id that may be in it and the first that may not."""
    edges = [id_at(bound) for bound in bounds]
    return list(zip([*edges, None], [None, *edges], strict=True))


def together(
    halves: Sequence[Sequence[Cohort]], totals: Iterable[tuple[int, int | None]], largest: Iterable[LongQueue]
) -> Backlog:
    """
    The two halves as one.

    :param totals: messages and bytes of each.
    """
    messages, sizes = zip(*totals, strict=True)
    size = None if None in sizes else sum(sizes)
    return Backlog(sum(messages), size, summed(*halves), tuple(largest))


def summed(some: Sequence[Cohort], others: Sequence[Cohort]) -> tuple[Cohort, ...]:
    """Of the two halves together."""
    return tuple(
        Cohort(
            one.messages + other.messages,
            None if one.bytes is None or other.bytes is None else one.bytes + other.bytes,
            one.exact and other.exact,
        )
        for one, other in zip(some, others, strict=True)
    )


def earliest(*times: float | None) -> float | None:
    """Of those that are known."""
    return min([at for at in times if at is not None], default=None)
