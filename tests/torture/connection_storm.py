"""
Thousands of live sockets that all close and reconnect at once while messages arrive.

First the network fails, then the daemon is killed.
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

# Permitted share of repeated deliveries.
MOST_REPEATED = 0.001
_CONNECTIONS = 4
_MESSAGE_BYTES = 1_000
_SPARE_FILES = 200


@dataclass(frozen=True, slots=True)
class StormResult:
    """
    :param message_count: messages that were posted.
    :param accepted: posts answered 202.
    :param messages: messages received, by id.
    :param repeated: deliveries of messages delivered before.
    :param lost: accepted messages that were not delivered.
    :param doubled: further ids of the same message.
    :param difference: difference of the store's ledger.
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
        """Violations of the requirements."""
        share = self.repeated / max(1, self.messages)
        checks = [
            (self.accepted > 0, "no message was accepted"),
            (share <= MOST_REPEATED, f"{share:.2%} of the messages were delivered again"),
            (not self.lost, f"{self.lost} were lost"),
            (not self.doubled, f"{self.doubled} were delivered under another id"),
            (self.difference == 0, f"difference {self.difference}"),
        ]
        return [complaint for is_met, complaint in checks if not is_met]


class _ForwardSender:
    """Posts messages in a closed loop; after a crash of the daemon it continues with the next one."""

    def __init__(self, port: int, forwards: list[PreparedForward]) -> None:
        self._port = port
        self._forwards: Iterator[PreparedForward] = iter(forwards)
        self._loads: list[LoadSenders] = []
        self.resume()

    def resume(self) -> None:
        """Start or continue sending."""
        self._loads.append(LoadSenders(self._port, cast(Any, self._forwards), _CONNECTIONS))
        self._loads[-1].start()

    @property
    def done(self) -> bool:
        """Whether all senders have ended."""
        return self._loads[-1].done.is_set()

    def reached(self, accepted: int) -> bool:
        """Whether `accepted` posts were accepted, or all senders have ended."""
        return self.done or len(self.markers(202)) >= accepted

    def markers(self, *statuses: int | None) -> list[str]:
        """Markers of posts with one of these statuses."""
        return [marker for load in self._loads for marker in load.markers(*statuses)]


class ConnectionStorm:
    """
    One daemon and its wallets.

    :param message_count: messages to send meanwhile.
    """

    def __init__(self, daemon: Daemon, sockets: int, message_count: int, chance: random.Random) -> None:
        self._daemon = daemon
        self._sockets = sockets
        group = enrol_group(daemon.url, sockets, short=True)
        self._forwards = [PreparedForward(tag, body) for body, tag in group.forwards(_MESSAGE_BYTES, message_count)]
        chance.shuffle(self._forwards)
        self._storm_points = (chance.uniform(0.1, 0.3), chance.uniform(0.5, 0.7))
        self._pool = LiveWalletPool(group.wallets, daemon.port)
        self._sender: _ForwardSender | None = None
        self._back: list[float] = []

    def run(self) -> StormResult:
        """Run both storms and reconcile."""
        try:
            self._run_storms()
        except TimeoutError:
            pass  # the result shows what was lost
        finally:
            self._pool.close()
        accepted = set(self._sender.markers(202)) if self._sender is not None else set()
        arrivals = self._pool.received
        return StormResult(
            sockets=self._sockets,
            message_count=len(self._forwards),
            accepted=len(accepted),
            messages=len(arrivals.times),
            repeated=arrivals.repeated,
            lost=len(accepted - arrivals.ids.keys()),
            doubled=len(arrivals.times) - len(arrivals.ids),
            difference=self._ledger().difference,
            back=tuple(self._back),
        )

    def _run_storms(self) -> None:
        """
        :raise TimeoutError: an expected event does not happen in time.

        :raise TimeoutError: something that is to happen does not.
        """
        pool, count = self._pool, self._sockets
        pool.run(with_timeout(lambda: pool.live == count))
        sender = self._sender = _ForwardSender(self._daemon.port, self._forwards)
        for point, disconnect in zip(self._storm_points, (pool.reconnect_all, self._kill), strict=True):
            pool.run(with_timeout(partial(sender.reached, int(point * len(self._forwards)))))
            disconnect()
            start = time.monotonic()
            pool.run(with_timeout(lambda: pool.live == count))
            self._back.append(round(time.monotonic() - start, 1))
        pool.run(with_timeout(lambda: sender.done))
        accepted = set(sender.markers(202))
        pool.run(with_timeout(lambda: accepted <= pool.received.ids.keys()))
        pool.run(with_timeout(lambda: self._ledger().waiting == 0))

    def _kill(self) -> None:
        self._daemon.kill()
        self._pool.run(with_timeout(lambda: not self._pool.live))
        self._daemon.start()
        assert self._sender is not None
        self._sender.resume()

    def _ledger(self) -> MessageLedger:
        return read_sqlite_ledger(self._daemon.directory / "mediator.sqlite3").didcomm


def run_storm(sockets: int, message_count: int, seed: int) -> StormResult:
    """:param sockets: one for each wallet."""
    assert raise_file_limit() >= sockets + _SPARE_FILES, "the limit on open files is too low"
    with prepare_daemon() as daemon:
        return ConnectionStorm(daemon, sockets, message_count, random.Random(seed)).run()


def with_timeout(condition: Callable[[], bool]) -> Callable[[], bool]:
    """The condition, with a time-out. :raise TimeoutError: it did not become true in time."""
    deadline = time.monotonic() + PATIENCE_SECONDS

    def check() -> bool:
        if condition():
            return True
        if time.monotonic() > deadline:
            raise TimeoutError
        return False

    return check
