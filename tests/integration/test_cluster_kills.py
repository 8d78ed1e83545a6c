"""
Faults under load in a cluster of three nodes and three servers: every accepted message is acknowledged once
(UC-021).
"""

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
from tests.integration.message_load import MAX_DELIVERY, PATIENCE_SECONDS, enrol_wallet
from tests.integration.retrying_clients import (
    PAUSE_SECONDS,
    SENDER_COUNT,
    ReconnectingRecipient,
    RetryingSenders,
    SendTask,
)
from tests.mongod_process import mongod_binary

reactor: Any = _reactor

# `make cluster-test` runs more.
ROUNDS = int(os.environ.get("CLUSTER_ROUNDS", "3"))
RECIPIENTS = 3
# Messages to each recipient in one round.
MESSAGES = 40


class KillTests(TestCase):
    """One fault after the other; the ledger is reconciled after each."""

    timeout = 240.0 * max(ROUNDS, 5)

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        mongod_binary()
        seed = int(os.environ.get("CLUSTER_SEED", random.SystemRandom().randrange(1_000_000)))
        print(f"CLUSTER_SEED={seed}")  # noqa: T201  pytest shows it when the test fails
        self.random = random.Random(seed)
        self.cluster = FaultInjectionCluster(reactor, self.random, {"didcomm": {"delivery_limit": MAX_DELIVERY}})
        self.addCleanup(self.cluster.close)
        await self.cluster.open()
        self.ledger = DeliveryLedger()
        self.recipients = [await self.make_recipient(number) for number in range(RECIPIENTS)]

    async def make_recipient(self, number: int) -> ReconnectingRecipient:
        """A wallet with an account, with sockets at any node."""
        ports = self.cluster.ports
        wallet = await enrol_wallet(self.cluster.nodes[0], reactor)
        recipient = ReconnectingRecipient(
            wallet_at_node(wallet, ports[number % len(ports)], reactor), ports, self.ledger, reactor
        )
        self.addCleanup(recipient.stop)
        return recipient

    async def test_every_accepted_message_is_acknowledged_once(self) -> None:
        """
        None is lost, duplicated, left or late, whichever process is killed, frozen or isolated (issue: kill tests).
        """
        doubtful = refused = 0
        for number, name in zip(range(ROUNDS), self.fault_names(), strict=False):
            await self.run_round(number, name)
            balance = self.ledger.balance(await deferToThread(self.cluster.count_messages))
            print(f"{number + 1:3}. {name}: {balance}")  # noqa: T201  what this is for
            self.assertEqual(balance.discrepancy, 0, str(balance))
            # Concurrent posts may share one transaction with an unknown outcome: at most one in a round.
            limit = SENDER_COUNT + (balance.refused - refused) // 50
            self.assertLessEqual(balance.doubtful - doubtful, limit, str(balance))
            doubtful, refused = balance.doubtful, balance.refused
            self.assertEqual(await deferToThread(self.cluster.find_miscounts), [])

    def fault_names(self) -> Iterator[str]:
        """Names of faults without end, each as often as the others."""
        while True:
            yield from self.random.sample(sorted(self.cluster.faults), len(self.cluster.faults))

    async def run_round(self, number: int, name: str) -> None:
        """One load with a fault in its middle."""
        tasks = self.make_tasks(str(number), MESSAGES)
        senders = self.start_senders(self.cluster.ports, tasks)
        for recipient in self.recipients:
            recipient.start()
        await deferToThread(senders.wait_for_accepted, self.random.randrange(len(tasks) // 3))
        async with self.cluster.faults[name]():
            await deferToThread(senders.wait_for_answers, self.random.randrange(5, len(tasks) // 3))
        await deferToThread(senders.join)
        await self.cluster.wait_until_recovered()
        await self.wait_for_remote_pushes(number)
        await self.wait_until_all_delivered()
        for recipient in self.recipients:
            await recipient.drain()

    async def wait_for_remote_pushes(self, number: int) -> None:
        """Wait until each node's messages are pushed by others again; presence takes a moment to recover."""
        initial = await deferToThread(self.cluster.count_remote_pushes)
        deadline = reactor.seconds() + PATIENCE_SECONDS
        for attempt in count():
            for port in initial:
                senders = self.start_senders([port], self.make_tasks(f"{number}-calm-{attempt}-{port}", 1))
                await deferToThread(senders.join)
            pushes = await deferToThread(self.cluster.count_remote_pushes)
            connected_ports = {recipient.connected_port for recipient in self.recipients}
            if None not in connected_ports and all(
                pushes[port] > initial[port] or connected_ports == {port} for port in pushes
            ):
                return
            self.assertLess(reactor.seconds(), deadline, f"{initial}, {pushes}: nodes do not push for each other")
            await deferLater(reactor, PAUSE_SECONDS)

    async def wait_until_all_delivered(self) -> None:
        """Every accepted message is pushed without a request."""
        # Within 18 s (docs/operations.md) on an idle machine whose clocks are right.
        deadline = reactor.seconds() + PATIENCE_SECONDS
        while undelivered := self.ledger.undelivered():
            self.assertLess(reactor.seconds(), deadline, f"{sorted(undelivered)} were accepted, and are not pushed")
            await deferLater(reactor, PAUSE_SECONDS)

    def make_tasks(self, prefix: str, number: int) -> list[SendTask]:
        """`number` messages to each recipient, in random order."""
        send_tasks = [
            SendTask(recipient.wallet, f"{prefix}-{index}-{message_number}")
            for index, recipient in enumerate(self.recipients)
            for message_number in range(number)
        ]
        self.random.shuffle(send_tasks)
        return send_tasks

    def start_senders(self, ports: Sequence[int], tasks: Sequence[SendTask]) -> RetryingSenders:
        """Senders that work on these tasks."""
        self.ledger.expect(send_task.message for send_task in tasks)
        senders = RetryingSenders(ports, self.ledger)
        self.addCleanup(senders.stop)
        senders.start(tasks)
        return senders
