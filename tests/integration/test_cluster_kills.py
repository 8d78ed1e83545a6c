"""Three nodes on three servers, in trouble under load: whatever was accepted is acknowledged once (UC-021)."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  the nodes are child processes, their sockets are real
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from tests.integration.cluster import at
from tests.integration.couriers import Couriers, Recipient
from tests.integration.ledger import ClusterLedger
from tests.integration.traffic import MANY, Letter, enrolled, letters
from tests.integration.trouble import Stage
from tests.mongod import mongod_binary

reactor: Any = _reactor

# `make cluster-test` has more.
ROUNDS = int(os.environ.get("CLUSTER_ROUNDS", "4"))
RECIPIENTS = 3
# In one round, to each recipient.
LETTERS = 40


class KillTests(TestCase):
    """Troubles one after the other, and the books after each."""

    timeout = 60.0 * max(ROUNDS, 4)

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        mongod_binary()
        seed = int(os.environ.get("CLUSTER_SEED", random.SystemRandom().randrange(1_000_000)))
        print(f"CLUSTER_SEED={seed}")  # noqa: T201  pytest shows it when the test fails
        self.random = random.Random(seed)
        self.stage = Stage(reactor, self.random, {"didcomm": {"delivery_limit": MANY}})
        self.addCleanup(self.stage.close)
        await self.stage.open()
        self.ledger = ClusterLedger()
        self.recipients = [await self.recipient(number) for number in range(RECIPIENTS)]

    async def recipient(self, number: int) -> Recipient:
        """A wallet with an account, which is to listen at one node or another."""
        ports = self.stage.ports
        wallet = await enrolled(self.stage.nodes[0], reactor)
        recipient = Recipient(at(wallet, ports[number % len(ports)], reactor), ports, self.ledger, reactor)
        self.addCleanup(recipient.stop)
        return recipient

    async def test_every_accepted_message_is_acknowledged_once(self) -> None:
        """None lost, none twice, none left, whoever dies, freezes or is cut off (issue: kill tests)."""
        for number, name in zip(range(ROUNDS), self.names(), strict=False):
            await self.round(number, name)
            balance = self.ledger.balance(await deferToThread(self.stage.messages))
            print(f"{number + 1:3}. {name}: {balance}")  # noqa: T201  what this is for
            self.assertEqual(balance.owed, 0, str(balance))
            self.assertLessEqual(balance.doubtful, 1 + balance.refused // 50, str(balance))

    def names(self) -> Iterator[str]:
        """Troubles without end, each as often as the others."""
        while True:
            yield from self.random.sample(sorted(self.stage.troubles), len(self.stage.troubles))

    async def round(self, number: int, name: str) -> None:
        """One load, and trouble in the midst of it."""
        stock = await deferToThread(self.stock, number)
        self.ledger.due(letter.marker for letter in stock)
        couriers = Couriers(self.stage.ports, self.ledger)
        self.addCleanup(couriers.stop)
        couriers.start(stock)
        for recipient in self.recipients:
            recipient.start()
        await deferToThread(couriers.wait_for_accepted, self.random.randrange(len(stock) // 3))
        async with self.stage.troubles[name]():
            await deferToThread(couriers.wait_for_answers, self.random.randrange(5, len(stock) // 3))
        await deferToThread(couriers.join)
        await self.stage.recovered()
        for recipient in self.recipients:
            await recipient.settle()

    def stock(self, number: int) -> list[Letter]:
        """What is sent in one round, well mixed."""
        sealed = [
            letter
            for who, recipient in enumerate(self.recipients)
            for letter in letters(recipient.wallet, f"{number}-{who}", LETTERS)
        ]
        self.random.shuffle(sealed)
        return sealed
