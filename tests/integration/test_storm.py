"""All sockets go at once and come back at once: each message comes once, with one id."""

from __future__ import annotations

import random
from collections.abc import Callable
from unittest import TestCase

from mediatord.bench.courier import Courier
from mediatord.bench.crowd import gather, letters
from tests.books import of_sqlite
from tests.integration.traffic import Letter, Senders, prepared
from tests.torture.guests import House
from tests.torture.storm import patiently, storm

SOCKETS = 100
LETTERS = 3 * SOCKETS


class StormTests(TestCase):
    """`python -m tests.torture --kind storm` has 5 000."""

    def setUp(self) -> None:
        self.daemon = prepared()
        self.daemon.__enter__()
        self.addCleanup(self.daemon.__exit__, None, None, None)
        crowd = gather(self.daemon.url, SOCKETS, short=True)
        self.stock = [Letter(tag, body) for body, tag in letters(crowd, 500, LETTERS)]
        self.house = House([Courier(wallet, crowd.mediator) for wallet in crowd.wallets], self.daemon.port)
        self.addCleanup(self.house.close)
        self.until(lambda: self.house.live == SOCKETS)

    def test_what_came_meanwhile_comes_once(self) -> None:
        """Nothing was under way when they went: so nothing comes twice, neither after the network nor the daemon."""
        half = LETTERS // 2
        self.house.leave()
        self.post(self.stock[:half])
        self.house.storm()
        self.all_come(self.stock[:half])
        self.daemon.kill()
        self.until(lambda: not self.house.live)
        self.daemon.start()
        self.house.leave()
        self.post(self.stock[half:])
        self.house.storm()
        self.all_come(self.stock)
        self.assertEqual(self.house.arrivals.repeated, 0)
        self.assertEqual({len(ids) for ids in self.house.arrivals.ids.values()}, {1})

    def post(self, stock: list[Letter]) -> None:
        senders = Senders(self.daemon.port, stock)
        senders.start()
        senders.join()
        self.assertEqual(len(senders.markers(202)), len(stock))

    def all_come(self, stock: list[Letter]) -> None:
        markers = {letter.marker for letter in stock}
        self.until(lambda: self.house.live == SOCKETS)
        self.until(lambda: self.house.arrivals.ids.keys() == markers)
        self.until(lambda: of_sqlite(self.daemon.directory / "mediator.sqlite3").didcomm.waiting == 0)

    def until(self, reached: Callable[[], bool]) -> None:
        self.house.run(patiently(reached))


class UnderLoadTests(TestCase):
    def test_nothing_is_lost(self) -> None:
        """What was under way may come twice, with the id that it had; the store's ledger agrees."""
        stormed = storm(SOCKETS, LETTERS, random.SystemRandom().randrange(1_000_000))
        self.assertGreater(stormed.accepted, LETTERS // 2)
        self.assertEqual((stormed.lost, stormed.doubled, stormed.difference), (0, 0, 0), stormed)
