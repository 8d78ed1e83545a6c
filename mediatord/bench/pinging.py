"""
How soon idle sockets are answered (RFC 6455 5.5.2).

Run by the process that holds the wallets (:mod:`mediatord.bench.wallets`).
"""

from __future__ import annotations

import select
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from time import perf_counter

from mediatord.bench.cycling import Live
from mediatord.bench.rawsocket import PING
from mediatord.bench.schedule import intended_times


@dataclass(slots=True)
class Pinged:
    """:param latencies_us: from when a ping was to be sent to its pong."""

    latencies_us: list[int] = field(default_factory=list)


def ping(lives: Sequence[Live], seconds: float, rate: float) -> Pinged:
    """One socket after the other in a beat, on each of which nothing else is said."""
    found = Pinged()
    turns = cycle(lives)
    start = perf_counter()
    for due in intended_times(rate, seconds, 0, even=True):
        select.select([], [], [], max(0.0, start + due - perf_counter()))
        socket = next(turns).socket
        socket.send(b"", PING)
        if socket.take():
            raise RuntimeError("a message on an idle socket")
        found.latencies_us.append(int((perf_counter() - start - due) * 1e6))
    return found
