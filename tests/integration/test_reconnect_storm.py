"""All sockets go at once and come back at once: each message comes once, with one id."""

from __future__ import annotations

import random
from collections.abc import Callable
from unittest import TestCase

from mediatord.bench.wallet_group import enrol_group
from tests.integration.message_load import LoadSenders, PreparedForward, prepare_daemon
from tests.ledger_checks import read_sqlite_ledger
from tests.torture.connection_storm import run_storm, wait_for
from tests.torture.live_wallets import LiveWalletPool

SOCKETS = 100
LETTERS = 3 * SOCKETS


class StormTests(TestCase):
    """`python -m tests.torture --kind storm` has 5 000."""

    def setUp(self) -> None:
        self.daemon = prepare_daemon()
        self.daemon.__enter__()
        self.addCleanup(self.daemon.__exit__, None, None, None)
        group = enrol_group(self.daemon.url, SOCKETS, short=True)
        self.stock = [PreparedForward(tag, body) for body, tag in group.forwards(500, LETTERS)]
        self.in_memory = LiveWalletPool(group.wallets, self.daemon.port)
        self.addCleanup(self.in_memory.close)
        self.until(lambda: self.in_memory.live == SOCKETS)

    def test_what_came_meanwhile_comes_once(self) -> None:
        """Nothing was under way when they went: so nothing comes twice, neither after the network nor the daemon."""
        half = LETTERS // 2
        self.in_memory.leave()
        self.post(self.stock[:half])
        self.in_memory.storm()
        self.all_come(self.stock[:half])
        self.daemon.kill()
        self.until(lambda: not self.in_memory.live)
        self.daemon.start()
        self.in_memory.leave()
        self.post(self.stock[half:])
        self.in_memory.storm()
        self.all_come(self.stock)
        self.assertEqual(self.in_memory.arrivals.repeated, 0)
        self.assertEqual({len(ids) for ids in self.in_memory.arrivals.ids.values()}, {1})

    def post(self, stock: list[PreparedForward]) -> None:
        senders = LoadSenders(self.daemon.port, stock)
        senders.start()
        senders.join()
        self.assertEqual(len(senders.markers(202)), len(stock))

    def all_come(self, stock: list[PreparedForward]) -> None:
        markers = {letter.marker for letter in stock}
        self.until(lambda: self.in_memory.live == SOCKETS)
        self.until(lambda: self.in_memory.arrivals.ids.keys() == markers)
        self.until(lambda: read_sqlite_ledger(self.daemon.directory / "mediator.sqlite3").didcomm.waiting == 0)

    def until(self, reached: Callable[[], bool]) -> None:
        self.in_memory.run(wait_for(reached))


class UnderLoadTests(TestCase):
    def test_nothing_is_lost(self) -> None:
        """What was under way may come twice, with the id that it had; the store's ledger agrees."""
        stormed = run_storm(SOCKETS, LETTERS, random.SystemRandom().randrange(1_000_000))
        self.assertGreater(stormed.accepted, LETTERS // 2)
        self.assertEqual((stormed.lost, stormed.doubled, stormed.difference), (0, 0, 0), stormed)
