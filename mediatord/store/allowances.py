"""
How much of an allowance is left, worked out from what was taken of it.

Takings are put together that come within a small part of the period, as if all had come at the end of it, so that
there are no more than some hundred lots however much is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

# When it was taken, and how much; oldest first.
Lot = tuple[float, int]

SLOTS = 128


def still_counting(lots: Sequence[Lot], period: float, now: float) -> list[Lot]:
    """Those that were taken less than a period ago."""
    return [lot for lot in lots if lot[0] > now - period]


def wait_for(lots: Sequence[Lot], amount: int, *, limit: int, period: float, now: float) -> float:
    """
    Seconds until so much more may be had; 0.0 when that is now, `period` when it is more than the limit.

    :param lots: all that still count.
    """
    if amount > limit:
        return period
    excess = sum([taken for _, taken in lots]) + amount - limit
    if excess <= 0:
        return 0.0
    for at, taken in lots:
        excess -= taken
        if excess <= 0:
            return at + period - now
    return period


def with_taking(lots: Sequence[Lot], amount: int, *, period: float, now: float) -> list[Lot]:
    """All of them and one more."""
    slot = period / SLOTS
    at = ceil(now / slot) * slot
    if lots and lots[-1][0] >= at:
        return [*lots[:-1], (lots[-1][0], lots[-1][1] + amount)]
    return [*lots, (at, amount)]


def without_latest(lots: Sequence[Lot], amount: int) -> list[Lot]:
    """What is left when the latest takings are undone, so much together."""
    left = list(lots)
    while left and amount > 0:
        at, taken = left.pop()
        if taken > amount:
            left.append((at, taken - amount))
        amount -= taken
    return left
