"""Three nodes on three servers, in trouble under load: whatever was accepted is acknowledged once (UC-021)."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  the nodes are child processes, their sockets are real
from twisted.internet.task import deferLater
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from tests.integration.cluster import wallet_at_node
from tests.integration.delivery_ledger import DeliveryLedger
from tests.integration.fault_injection import FaultInjectionCluster
from tests.integration.message_load import MANY, PATIENCE_SECONDS, enrol_wallet
from tests.integration.retrying_clients import (
    COURIERS,
    PAUSE_SECONDS,
    ReconnectingRecipient,
    RetryingSenders,
    SendTask,
)
from tests.mongod_process import mongod_binary

reactor: Any = _reactor

# `make cluster-test` has more.
ROUNDS = int(os.environ.get("CLUSTER_ROUNDS", "3"))
RECIPIENTS = 3
# In one round, to each recipient.
LETTERS = 40


class KillTests(TestCase):
    """Troubles one after the other, and the books after each."""

    timeout = 240.0 * max(ROUNDS, 5)

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        mongod_binary()
        seed = int(os.environ.get("CLUSTER_SEED", random.SystemRandom().randrange(1_000_000)))
        print(f"CLUSTER_SEED={seed}")  # noqa: T201  pytest shows it when the test fails
        self.random = random.Random(seed)
        self.stage = FaultInjectionCluster(reactor, self.random, {"didcomm": {"delivery_limit": MANY}})
        self.addCleanup(self.stage.close)
        await self.stage.open()
        self.ledger = DeliveryLedger()
        self.recipients = [await self.recipient(number) for number in range(RECIPIENTS)]

    async def recipient(self, number: int) -> ReconnectingRecipient:
        """A wallet with an account, which is to listen at one node or another."""
        ports = self.stage.ports
        wallet = await enrol_wallet(self.stage.nodes[0], reactor)
        recipient = ReconnectingRecipient(
            wallet_at_node(wallet, ports[number % len(ports)], reactor), ports, self.ledger, reactor
        )
        self.addCleanup(recipient.stop)
        return recipient

    async def test_every_accepted_message_is_acknowledged_once(self) -> None:
        """None lost, twice, left or late, whoever dies, freezes or is cut off (issue: kill tests)."""
        doubtful = refused = 0
        for number, name in zip(range(ROUNDS), self.names(), strict=False):
            await self.round(number, name)
            balance = self.ledger.balance(await deferToThread(self.stage.messages))
            print(f"{number + 1:3}. {name}: {balance}")  # noqa: T201  what this is for
            self.assertEqual(balance.owed, 0, str(balance))
            # What all of them post may be one transaction, of which nobody knows whether it was done: one in a round.
            most = COURIERS + (balance.refused - refused) // 50
            self.assertLessEqual(balance.doubtful - doubtful, most, str(balance))
            doubtful, refused = balance.doubtful, balance.refused
            self.assertEqual(await deferToThread(self.stage.miscounted), [])

    def names(self) -> Iterator[str]:
        """Troubles without end, each as often as the others."""
        while True:
            yield from self.random.sample(sorted(self.stage.troubles), len(self.stage.troubles))

    async def round(self, number: int, name: str) -> None:
        """One load, and trouble in the midst of it."""
        stock = self.stock(str(number), LETTERS)
        senders = self.senders(self.stage.ports, stock)
        for recipient in self.recipients:
            recipient.start()
        await deferToThread(senders.wait_for_accepted, self.random.randrange(len(stock) // 3))
        async with self.stage.troubles[name]():
            await deferToThread(senders.wait_for_answers, self.random.randrange(5, len(stock) // 3))
        await deferToThread(senders.join)
        await self.stage.recovered()
        await self.pushes_go_on(number)
        await self.all_comes()
        for recipient in self.recipients:
            await recipient.settle()

    async def pushes_go_on(self, number: int) -> None:
        """What each node accepts is pushed by others. It may be a moment until they know again who listens where."""
        before = await deferToThread(self.stage.pushes)
        deadline = reactor.seconds() + PATIENCE_SECONDS
        for attempt in count():
            for port in before:
                senders = self.senders([port], self.stock(f"{number}-calm-{attempt}-{port}", 1))
                await deferToThread(senders.join)
            pushes = await deferToThread(self.stage.pushes)
            places = {recipient.listens_at for recipient in self.recipients}
            if None not in places and all(pushes[port] > before[port] or places == {port} for port in pushes):
                return
            self.assertLess(reactor.seconds(), deadline, f"{before}, {pushes}: nodes do not push for each other")
            await deferLater(reactor, PAUSE_SECONDS)

    async def all_comes(self) -> None:
        """Nobody has to ask for what was accepted."""
        # Within 18 s (docs/operations.md) if the machine has nothing else to do, and no clock was wrong.
        deadline = reactor.seconds() + PATIENCE_SECONDS
        while awaited := self.ledger.awaited():
            self.assertLess(reactor.seconds(), deadline, f"{sorted(awaited)} were accepted, and are not pushed")
            await deferLater(reactor, PAUSE_SECONDS)

    def stock(self, prefix: str, number: int) -> list[SendTask]:
        """So many letters to each recipient, well mixed."""
        send_tasks = [
            SendTask(recipient.wallet, f"{prefix}-{who}-{letter}")
            for who, recipient in enumerate(self.recipients)
            for letter in range(number)
        ]
        self.random.shuffle(send_tasks)
        return send_tasks

    def senders(self, ports: Sequence[int], stock: Sequence[SendTask]) -> RetryingSenders:
        """They are under way with this."""
        self.ledger.due(send_task.letter for send_task in stock)
        senders = RetryingSenders(ports, self.ledger)
        self.addCleanup(senders.stop)
        senders.start(stock)
        return senders
