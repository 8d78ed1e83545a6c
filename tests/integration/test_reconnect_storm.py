"""All sockets close and reconnect at once: each message is delivered once, under one id."""

from __future__ import annotations

import random
from collections.abc import Callable
from unittest import TestCase

from mediatord.bench.wallet_group import enrol_group
from tests.integration.message_load import LoadSenders, PreparedForward, prepare_daemon
from tests.ledger_checks import read_sqlite_ledger
from tests.torture.connection_storm import run_storm, with_timeout
from tests.torture.live_wallets import LiveWalletPool

SOCKETS = 100
MESSAGES = 3 * SOCKETS


class StormTests(TestCase):
    """`python -m tests.torture --kind storm` uses 5 000 sockets."""

    def setUp(self) -> None:
        self.daemon = prepare_daemon()
        self.daemon.__enter__()
        self.addCleanup(self.daemon.__exit__, None, None, None)
        group = enrol_group(self.daemon.url, SOCKETS, short=True)
        self.forwards = [PreparedForward(tag, body) for body, tag in group.forwards(500, MESSAGES)]
        self.pool = LiveWalletPool(group.wallets, self.daemon.port)
        self.addCleanup(self.pool.close)
        self.run_until(lambda: self.pool.live == SOCKETS)

    def test_messages_sent_meanwhile_are_delivered_once(self) -> None:
        """
        Nothing was in flight when the sockets closed, so nothing is duplicated, whether the network or the daemon
        failed.
        """
        half = MESSAGES // 2
        self.pool.disconnect_all()
        self.post_all(self.forwards[:half])
        self.pool.reconnect_all()
        self.wait_until_delivered(self.forwards[:half])
        self.daemon.kill()
        self.run_until(lambda: not self.pool.live)
        self.daemon.start()
        self.pool.disconnect_all()
        self.post_all(self.forwards[half:])
        self.pool.reconnect_all()
        self.wait_until_delivered(self.forwards)
        self.assertEqual(self.pool.received.repeated, 0)
        self.assertEqual({len(ids) for ids in self.pool.received.ids.values()}, {1})

    def post_all(self, forwards: list[PreparedForward]) -> None:
        senders = LoadSenders(self.daemon.port, forwards)
        senders.start()
        senders.join()
        self.assertEqual(len(senders.markers(202)), len(forwards))

    def wait_until_delivered(self, forwards: list[PreparedForward]) -> None:
        markers = {forward.marker for forward in forwards}
        self.run_until(lambda: self.pool.live == SOCKETS)
        self.run_until(lambda: self.pool.received.ids.keys() == markers)
        self.run_until(lambda: read_sqlite_ledger(self.daemon.directory / "mediator.sqlite3").didcomm.waiting == 0)

    def run_until(self, reached: Callable[[], bool]) -> None:
        self.pool.run(with_timeout(reached))


class UnderLoadTests(TestCase):
    def test_messages_in_flight_are_not_lost(self) -> None:
        """They may be delivered twice, under the same id; the store's ledger agrees."""
        result = run_storm(SOCKETS, MESSAGES, random.SystemRandom().randrange(1_000_000))
        self.assertGreater(result.accepted, MESSAGES // 2)
        self.assertEqual((result.lost, result.doubled, result.difference), (0, 0, 0), result)
