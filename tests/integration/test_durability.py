"""A message that was answered 202 survives the death of the daemon (reference 4.1 step 9, 11 rows 1 to 4 and 17)."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.store.interfaces.messages import StoreLedger
from mediatord.wallet.didcomm_client import DeliveredMessage, DIDCommWallet
from mediatord.wallet.didcomm_socket import DIDCommSocket, SocketClosedError, connect_didcomm_socket
from tests.integration.cluster import fresh_storage
from tests.integration.message_load import (
    MANY,
    ROOMY,
    LoadSenders,
    PreparedForward,
    enrol_wallet,
    prepare_daemon,
    prepare_forwards,
    read_marker,
)
from tests.ledger_checks import read_sqlite_ledger
from tests.torture.ledger_checks import read_daemon_mongo_ledger

reactor: Any = _reactor

# `make durability` has more. In four, everything happens: see what depends on the number of a round.
ROUNDS = int(os.environ.get("DURABILITY_ROUNDS", "4"))
LETTERS = 200
# Longer than anything that the daemon does for one message.
WHOLE_MESSAGE_SECONDS = 0.02


class Ledger:
    """
    What was promised and what came of it.

    :ivar sent: how often the sending of a marker was begun.
    :ivar accepted: how often it was answered 202.
    :ivar ids: the ids it was delivered under.
    :ivar asked: ids whose acknowledgement was sent.
    :ivar acknowledged: ids whose acknowledgement was answered.
    :ivar returned: ids that were delivered after that.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.ids: dict[str, set[str]] = {}
        self.asked: set[str] = set()
        self.acknowledged: set[str] = set()
        self.returned: list[str] = []

    def posted(self, senders: LoadSenders) -> None:
        """Enter a whole load."""
        self.sent.update(post.marker for post in senders.posts)
        self.accepted.update(senders.markers(202))

    def delivered(self, wallet: DIDCommWallet, batch: Iterable[DeliveredMessage]) -> None:
        """Enter what came, pushed or fetched."""
        for one in batch:
            self.ids.setdefault(read_marker(wallet, one), set()).add(one.id)
            if one.id in self.acknowledged:
                self.returned.append(one.id)

    async def acknowledge(self, way: DIDCommWallet | DIDCommSocket, batch: Iterable[DeliveredMessage]) -> None:
        """Acknowledge, and enter the answer if there is one."""
        ids = {one.id for one in batch}
        self.asked |= ids
        await way.acknowledge(sorted(ids))
        self.acknowledged |= ids

    def lost(self) -> list[str]:
        """Markers that were accepted more often than they were delivered."""
        return sorted(marker for marker, times in self.accepted.items() if len(self.ids.get(marker, ())) < times)

    def doubled(self) -> list[str]:
        """Markers that were delivered under more ids than they were sent."""
        return sorted(marker for marker, ids in self.ids.items() if len(ids) > self.sent[marker])

    def vanished(self) -> set[str]:
        """Ids that were delivered, never acknowledged, and yet are not there when everything was fetched."""
        return set[str]().union(*self.ids.values()) - self.asked


class KillTests(TestCase):
    """kill -9 in the middle of a load, and what Bob finds afterwards."""

    rounds = ROUNDS

    def storage(self) -> dict[str, Any]:
        """Where the daemon keeps everything."""
        return {}

    def books(self) -> StoreLedger:
        """What the store says itself."""
        return read_sqlite_ledger(self.daemon.directory / "mediator.sqlite3")

    def setUp(self) -> None:
        seed = int(os.environ.get("DURABILITY_SEED", random.SystemRandom().randrange(1_000_000)))
        print(f"DURABILITY_SEED={seed}")  # noqa: T201  pytest shows it when the test fails
        self.random = random.Random(seed)
        self.ledger = Ledger()
        self.daemon = prepare_daemon({**ROOMY, "didcomm": {"delivery_limit": MANY}, "storage": self.storage()})
        self.daemon.__enter__()
        self.addCleanup(self.daemon.__exit__, None, None, None)

    async def test_no_accepted_message_is_lost(self) -> None:
        """
        Deaths in the middle of a load lose nothing that was answered 202, and bring nothing back that was
        acknowledged (reference 4.1 step 9, 6.3 "store first, push second").
        """
        bob = await enrol_wallet(self.daemon, reactor)
        again: list[PreparedForward] = []
        for number in range(self.rounds):
            stock = again + prepare_forwards(bob, f"{number}", LETTERS)
            socket = await self.live_socket(bob) if number % 3 == 0 else None
            again = await self.deadly_load(stock, bob, socket)
            self.daemon.start()
            await self.pick_up(bob, everything=number % 4 == 3)
        await self.pick_up(bob, everything=True)
        await self.check_books(bob)

    async def live_socket(self, bob: DIDCommWallet) -> DIDCommSocket:
        socket = await connect_didcomm_socket(reactor, bob)
        self.assertIs((await socket.live()).live_delivery, True)
        return socket

    async def deadly_load(
        self, stock: list[PreparedForward], bob: DIDCommWallet, socket: DIDCommSocket | None
    ) -> list[PreparedForward]:
        """Send until the daemon is killed; the letters whose fate is unknown."""
        senders = LoadSenders(self.daemon.port, stock)
        reading = Deferred.fromCoroutine(self.acknowledge_pushes(bob, socket))
        senders.start()
        await deferToThread(senders.wait_for_posts, self.random.randrange(10, len(stock)))
        # Any moment in the life of a message, unless there is none left.
        await deferToThread(senders.done.wait, self.random.uniform(0, WHOLE_MESSAGE_SECONDS))
        self.daemon.kill()
        await deferToThread(senders.join)
        if socket is not None:
            await socket.closed()
        reading.cancel()
        await reading
        self.ledger.posted(senders)
        self.assertEqual(set(senders.markers(202, None)), {post.marker for post in senders.posts})
        unknown = set(senders.markers(None))
        return [letter for letter in stock if letter.marker in unknown]

    async def acknowledge_pushes(self, bob: DIDCommWallet, socket: DIDCommSocket | None) -> None:
        """Acknowledge what is pushed, until the line is cut."""
        try:
            while socket is not None:
                batch = [await socket.pushed.get()]
                batch += [await socket.pushed.get() for _ in range(len(socket.pushed.pending))]
                self.ledger.delivered(bob, batch)
                await self.ledger.acknowledge(socket, batch)
        except (CancelledError, SocketClosedError):
            pass

    async def pick_up(self, bob: DIDCommWallet, *, everything: bool) -> None:
        """Fetch, and acknowledge some or all of it."""
        while batch := await bob.fetch(MANY):
            self.ledger.delivered(bob, batch)
            share = len(batch) if everything else self.random.randrange(len(batch))
            await self.ledger.acknowledge(bob, batch[:share])
            if not everything:
                break

    async def check_books(self, bob: DIDCommWallet) -> None:
        ledger = self.ledger
        self.assertGreater(sum(ledger.accepted.values()), self.rounds)
        self.assertEqual(ledger.lost(), [])
        self.assertEqual(ledger.doubled(), [])
        self.assertEqual(ledger.vanished(), set())
        self.assertEqual(ledger.returned, [])
        self.assertEqual((await bob.status()).message_count, 0)
        books = (await deferToThread(self.books)).didcomm
        self.assertEqual((books.difference, books.acknowledged), (0, books.accepted))
        self.assertEqual(books.acknowledged, sum(len(ids) for ids in ledger.ids.values()))


class MongoDBKillTests(KillTests):
    """The same with a MongoDB server, which lives on."""

    rounds = max(2, ROUNDS // 3)

    def storage(self) -> dict[str, Any]:
        return fresh_storage(self)

    def books(self) -> StoreLedger:
        return read_daemon_mongo_ledger(self.daemon)
