"""Wallets, how often they write and come, and the hours and days on which they do."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from random import Random
from typing import Literal

from analytics.sample.spec import DAY, HOUR, Spec
from mediatord.observability.pseudonyms import Pseudonymizer

Half = Literal["didcomm", "decentrl"]

# Share of the day's messages in each hour, UTC, times 24: people between London and Helsinki.
_HOURS = (
    *(0.25, 0.18, 0.15, 0.15, 0.2, 0.4, 0.8, 1.2, 1.5, 1.6, 1.6, 1.55),
    *(1.5, 1.5, 1.5, 1.45, 1.4, 1.4, 1.4, 1.35, 1.25, 1.0, 0.7, 0.4),
)
_MEAN = sum(_HOURS) / 24
_WEEKDAYS = (1.0, 1.05, 1.05, 1.0, 0.95, 0.65, 0.55)
BUSIEST = max(_HOURS) / _MEAN * max(_WEEKDAYS)

_DORMANT_SHARE = 0.02
_JOINED_BEFORE = 0.75


@dataclass(slots=True, eq=False)
class Message:
    """Waiting, or pushed and not acknowledged. :ivar until: the end of its time, seconds since the epoch."""

    tag: str
    to: Wallet
    size: int
    at: float
    until: float | None
    pushes: int = 0


@dataclass(slots=True, eq=False)
class Socket:
    """:ivar pending: tags to messages pushed on it and not acknowledged. :ivar traffic: as in `conn.close`."""

    name: str
    wallet: Wallet
    place: int
    opened: float
    pending: dict[str, Message] = field(default_factory=dict)
    traffic: list[int] = field(default_factory=lambda: [0, 0, 0, 0])


@dataclass(slots=True, eq=False)
class Wallet:
    """
    :ivar pace: seconds between its visits, mean, in the busiest hour.
    :ivar waiting: tags to messages, oldest first.
    :ivar away: seconds since the epoch until which it does not come.
    """

    did: str
    proto: Half
    peer: str
    pace: float
    joined: float
    away: float
    waiting: dict[str, Message] = field(default_factory=dict)
    socket: Socket | None = None


class Zipf:
    """Picks members, the first ones most often."""

    def __init__(self, members: Sequence[Wallet], rng: Random) -> None:
        self._members = members
        self._sums = list(accumulate(1 / rank for rank in range(1, len(members) + 1)))
        self._rng = rng

    def pick(self, now: float) -> Wallet:
        """One of them that has joined."""
        while True:
            found = self._members[bisect_left(self._sums, self._rng.random() * self._sums[-1])]
            if found.joined <= now:
                return found


def liveliness(at: float) -> float:
    """How busy people are at this moment; 1 is the mean of a weekday."""
    moment = datetime.fromtimestamp(at, UTC)
    return _HOURS[moment.hour] / _MEAN * _WEEKDAYS[moment.weekday()]


def population(spec: Spec, tags: Pseudonymizer, rng: Random) -> list[Wallet]:
    """All wallets of the month; some of them join only later, a few never come back."""
    return [_wallet(number, spec, tags, rng) for number in range(spec.wallets)]


def _wallet(number: int, spec: Spec, tags: Pseudonymizer, rng: Random) -> Wallet:
    half: Half = "didcomm" if rng.random() < 0.7 else "decentrl"
    joined = 0.0 if rng.random() < _JOINED_BEFORE else spec.begin + rng.random() * spec.days * DAY
    dormant = half == "didcomm" and number > spec.wallets // 10 and rng.random() < _DORMANT_SHARE
    return Wallet(
        did=tags.did(f"did:{'peer:2' if half == 'didcomm' else 'decentrl'}:wallet-{number}"),
        proto=half,
        peer=tags.peer(f"10.{rng.randrange(64)}.{rng.randrange(256)}.1") or "",
        pace=HOUR * rng.uniform(1.0, 7.0),
        joined=joined,
        away=float("inf") if dormant else 0.0,
    )
