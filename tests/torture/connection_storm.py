"""
Thousands of live sockets that all go and come back at once while messages arrive: who gets one twice, by which id.

The first time it is the network that was away, the second time the daemon, by ``kill -9``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from mediatord.bench.processes import raise_file_limit
from mediatord.bench.wallet_group import enrol_group
from mediatord.store.interfaces.messages import MessageLedger
from tests.integration.daemon import Daemon
from tests.integration.message_load import PATIENCE_SECONDS, LoadSenders, PreparedForward, prepare_daemon
from tests.ledger_checks import read_sqlite_ledger
from tests.torture.live_wallets import LiveWalletPool

# Of all deliveries, those that may be of something that was delivered before.
MOST_REPEATED = 0.001
_CONNECTIONS = 4
_LETTER_BYTES = 1_000
_SPARE_FILES = 200


@dataclass(frozen=True, slots=True)
class StormResult:
    """
    :param letters: that were posted.
    :param accepted: answered 202.
    :param messages: that came, by id.
    :param repeated: deliveries of one that had come before.
    :param lost: accepted, and did not come.
    :param doubled: ids beyond one for a letter.
    :param difference: of the store's ledger.
    :param back: seconds until all were live again, after each storm.
    """

    sockets: int
    message_count: int
    accepted: int
    messages: int
    repeated: int
    lost: int
    doubled: int
    difference: int | None
    back: tuple[float, ...]

    @property
    def complaints(self) -> list[str]:
        """What is wrong."""
        share = self.repeated / max(1, self.messages)
        found = [
            (self.accepted > 0, "nothing was accepted"),
            (share <= MOST_REPEATED, f"{share:.2%} of the messages came again"),
            (not self.lost, f"{self.lost} were lost"),
            (not self.doubled, f"{self.doubled} came under another id"),
            (self.difference == 0, f"difference {self.difference}"),
        ]
        return [complaint for well, complaint in found if not well]


class _ForwardSender:
    """Posts messages as fast as they are answered; after a crash of the daemon it continues with the next."""

    def __init__(self, port: int, stock: list[PreparedForward]) -> None:
        self._port = port
        self._stock: Iterator[PreparedForward] = iter(stock)
        self._loads: list[LoadSenders] = []
        self.resume()

    def resume(self) -> None:
        """Begin, or go on."""
        self._loads.append(LoadSenders(self._port, cast(Any, self._stock), _CONNECTIONS))
        self._loads[-1].start()

    @property
    def done(self) -> bool:
        """Whether nobody sends any more."""
        return self._loads[-1].done.is_set()

    def reached(self, accepted: int) -> bool:
        """Whether so many were accepted, or nobody sends any more."""
        return self.done or len(self.markers(202)) >= accepted

    def markers(self, *statuses: int | None) -> list[str]:
        """Of the posts with one of these outcomes."""
        return [marker for load in self._loads for marker in load.markers(*statuses)]


class ConnectionStorm:
    """
    One daemon and its guests.

    :param letters: how many come meanwhile.
    """

    def __init__(self, daemon: Daemon, sockets: int, message_count: int, chance: random.Random) -> None:
        self._daemon = daemon
        self._sockets = sockets
        group = enrol_group(daemon.url, sockets, short=True)
        self._stock = [PreparedForward(tag, body) for body, tag in group.forwards(_LETTER_BYTES, message_count)]
        chance.shuffle(self._stock)
        self._moments = (chance.uniform(0.1, 0.3), chance.uniform(0.5, 0.7))
        self._in_memory = LiveWalletPool(group.wallets, daemon.port)
        self._post: _ForwardSender | None = None
        self._back: list[float] = []

    def run(self) -> StormResult:
        """Both storms, and the reconciliation."""
        try:
            self._blow()
        except TimeoutError:
            pass  # then something is lost
        finally:
            self._in_memory.close()
        accepted = set(self._post.markers(202)) if self._post is not None else set()
        arrivals = self._in_memory.arrivals
        return StormResult(
            sockets=self._sockets,
            message_count=len(self._stock),
            accepted=len(accepted),
            messages=len(arrivals.times),
            repeated=arrivals.repeated,
            lost=len(accepted - arrivals.ids.keys()),
            doubled=len(arrivals.times) - len(arrivals.ids),
            difference=self._ledger().difference,
            back=tuple(self._back),
        )

    def _blow(self) -> None:
        """:raise TimeoutError: something that is to happen does not."""
        in_memory, everybody = self._in_memory, self._sockets
        in_memory.run(wait_for(lambda: in_memory.live == everybody))
        post = self._post = _ForwardSender(self._daemon.port, self._stock)
        for moment, strike in zip(self._moments, (in_memory.storm, self._kill), strict=True):
            in_memory.run(wait_for(partial(post.reached, int(moment * len(self._stock)))))
            strike()
            began = time.monotonic()
            in_memory.run(wait_for(lambda: in_memory.live == everybody))
            self._back.append(round(time.monotonic() - began, 1))
        in_memory.run(wait_for(lambda: post.done))
        accepted = set(post.markers(202))
        in_memory.run(wait_for(lambda: accepted <= in_memory.arrivals.ids.keys()))
        in_memory.run(wait_for(lambda: self._ledger().waiting == 0))

    def _kill(self) -> None:
        self._daemon.kill()
        self._in_memory.run(wait_for(lambda: not self._in_memory.live))
        self._daemon.start()
        assert self._post is not None
        self._post.resume()

    def _ledger(self) -> MessageLedger:
        return read_sqlite_ledger(self._daemon.directory / "mediator.sqlite3").didcomm


def run_storm(sockets: int, message_count: int, seed: int) -> StormResult:
    """:param sockets: one for each wallet."""
    assert raise_file_limit() >= sockets + _SPARE_FILES, "the limit on open files is too low"
    with prepare_daemon() as daemon:
        return ConnectionStorm(daemon, sockets, message_count, random.Random(seed)).run()


def wait_for(reached: Callable[[], bool]) -> Callable[[], bool]:
    """The same, for a while. :raise TimeoutError: it was not reached."""
    deadline = time.monotonic() + PATIENCE_SECONDS

    def look() -> bool:
        if reached():
            return True
        if time.monotonic() > deadline:
            raise TimeoutError
        return False

    return look
