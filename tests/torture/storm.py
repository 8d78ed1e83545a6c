"""
Thousands of live sockets that all go and come back at once while letters come: who gets one twice, by which id.

The first time it is the network that was away, the second time the daemon, by ``kill -9``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from mediatord.bench.courier import Courier
from mediatord.bench.crowd import gather
from mediatord.bench.crowd import letters as packed
from mediatord.bench.processes import allow_many_files
from mediatord.interfaces import Ledger
from tests.books import of_sqlite
from tests.integration.daemon import Daemon
from tests.integration.traffic import PATIENCE_SECONDS, Letter, Senders, prepared
from tests.torture.guests import House

# Of all deliveries, those that may be of something that was delivered before.
MOST_REPEATED = 0.001
_CONNECTIONS = 4
_LETTER_BYTES = 1_000
_SPARE_FILES = 200


@dataclass(frozen=True, slots=True)
class Stormed:
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
    letters: int
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


class _Post:
    """Letters that are posted as fast as they are answered; after a death of the daemon it goes on with the next."""

    def __init__(self, port: int, stock: list[Letter]) -> None:
        self._port = port
        self._stock: Iterator[Letter] = iter(stock)
        self._loads: list[Senders] = []
        self.resume()

    def resume(self) -> None:
        """Begin, or go on."""
        self._loads.append(Senders(self._port, cast(Any, self._stock), _CONNECTIONS))
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


class Weather:
    """
    One daemon and its guests.

    :param letters: how many come meanwhile.
    """

    def __init__(self, daemon: Daemon, sockets: int, letters: int, chance: random.Random) -> None:
        self._daemon = daemon
        self._sockets = sockets
        crowd = gather(daemon.url, sockets, short=True)
        self._stock = [Letter(tag, body) for body, tag in packed(crowd, _LETTER_BYTES, letters)]
        chance.shuffle(self._stock)
        self._moments = (chance.uniform(0.1, 0.3), chance.uniform(0.5, 0.7))
        self._house = House([Courier(wallet, crowd.mediator) for wallet in crowd.wallets], daemon.port)
        self._post: _Post | None = None
        self._back: list[float] = []

    def run(self) -> Stormed:
        """Both storms, and the books."""
        try:
            self._blow()
        except TimeoutError:
            pass  # then something is lost
        finally:
            self._house.close()
        accepted = set(self._post.markers(202)) if self._post is not None else set()
        arrivals = self._house.arrivals
        return Stormed(
            sockets=self._sockets,
            letters=len(self._stock),
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
        house, everybody = self._house, self._sockets
        house.run(patiently(lambda: house.live == everybody))
        post = self._post = _Post(self._daemon.port, self._stock)
        for moment, strike in zip(self._moments, (house.storm, self._kill), strict=True):
            house.run(patiently(partial(post.reached, int(moment * len(self._stock)))))
            strike()
            began = time.monotonic()
            house.run(patiently(lambda: house.live == everybody))
            self._back.append(round(time.monotonic() - began, 1))
        house.run(patiently(lambda: post.done))
        accepted = set(post.markers(202))
        house.run(patiently(lambda: accepted <= house.arrivals.ids.keys()))
        house.run(patiently(lambda: self._ledger().waiting == 0))

    def _kill(self) -> None:
        self._daemon.kill()
        self._house.run(patiently(lambda: not self._house.live))
        self._daemon.start()
        assert self._post is not None
        self._post.resume()

    def _ledger(self) -> Ledger:
        return of_sqlite(self._daemon.directory / "mediator.sqlite3").didcomm


def storm(sockets: int, letters: int, seed: int) -> Stormed:
    """:param sockets: one for each wallet."""
    assert allow_many_files() >= sockets + _SPARE_FILES, "the limit on open files is too low"
    with prepared() as daemon:
        return Weather(daemon, sockets, letters, random.Random(seed)).run()


def patiently(reached: Callable[[], bool]) -> Callable[[], bool]:
    """The same, for a while. :raise TimeoutError: it was not reached."""
    deadline = time.monotonic() + PATIENCE_SECONDS

    def look() -> bool:
        if reached():
            return True
        if time.monotonic() > deadline:
            raise TimeoutError
        return False

    return look
