"""Messages answered 202 survive the death of the daemon (reference 4.1 step 9, 11 rows 1 to 4 and 17)."""

from __future__ import annotations

import contextlib
import os
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
from twisted.internet import reactor as _reactor  # noqa: TID251  the daemon is a child process, its sockets are real
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.store.interfaces.messages import StoreLedger
from mediatord.wallet.didcomm_client import DeliveredMessage, open_http
from mediatord.wallet.didcomm_socket import SocketClosedError, connect_didcomm_socket
from mediatord.wallet.didcomm_v1_client import V1Wallet, fetch_v1_invitation
from mediatord.wallet.didcomm_v1_socket import V1Socket, connect_v1_socket
from tests.integration.cluster import make_mongo_storage
from tests.integration.message_load import (
    MAX_DELIVERY,
    PATIENCE_SECONDS,
    ROOMY,
    LoadSenders,
    PreparedForward,
    enrol_wallet,
    prepare_daemon,
    prepare_forwards,
    read_marker,
)
from tests.ledger_checks import read_sqlite_ledger
from tests.torture.ledger_checks import read_shared_mongo_ledger

reactor: Any = _reactor

# `make durability` runs more rounds. Four rounds cover all variants, which depend on the round number.
ROUNDS = int(os.environ.get("DURABILITY_ROUNDS", "4"))
MESSAGES = 200
# Longer than the daemon takes for one message.
WHOLE_MESSAGE_SECONDS = 0.02


def read_any_marker(wallet: Any, message: DeliveredMessage) -> str:
    """Marker of a message to a wallet of either version."""
    return wallet.open(message).text if isinstance(wallet, V1Wallet) else read_marker(wallet, message)


class ClientLedger:
    """
    What senders were promised and the recipient received.

    :ivar sent: number of posts begun, by marker.
    :ivar accepted: number of responses 202, by marker.
    :ivar ids: ids delivered, by marker.
    :ivar acknowledgements_sent: ids whose acknowledgement was sent.
    :ivar acknowledged: ids whose acknowledgement was answered.
    :ivar returned: ids that were delivered after that.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()
        self.ids: dict[str, set[str]] = {}
        self.acknowledgements_sent: set[str] = set()
        self.acknowledged: set[str] = set()
        self.returned: list[str] = []

    def record_posts(self, senders: LoadSenders) -> None:
        """Record the outcome of a load."""
        self.sent.update(post.marker for post in senders.posts)
        self.accepted.update(senders.markers(202))

    def record_deliveries(self, wallet: Any, batch: Iterable[DeliveredMessage]) -> None:
        """Record messages that were pushed or fetched."""
        for message in batch:
            self.ids.setdefault(read_any_marker(wallet, message), set()).add(message.id)
            if message.id in self.acknowledged:
                self.returned.append(message.id)

    async def acknowledge(self, client: Any, batch: Iterable[DeliveredMessage]) -> None:
        """Acknowledge, and record the response if there is one."""
        ids = {message.id for message in batch}
        self.acknowledgements_sent |= ids
        await client.acknowledge(sorted(ids))
        self.acknowledged |= ids

    def find_lost(self) -> list[str]:
        """Markers accepted more often than delivered."""
        return sorted(marker for marker, times in self.accepted.items() if len(self.ids.get(marker, ())) < times)

    def find_duplicates(self) -> list[str]:
        """Markers delivered under more ids than they were sent."""
        return sorted(marker for marker, ids in self.ids.items() if len(ids) > self.sent[marker])

    def find_vanished(self) -> set[str]:
        """Ids delivered, never acknowledged, and missing when everything was fetched."""
        return set[str]().union(*self.ids.values()) - self.acknowledgements_sent


class KillTests(TestCase):
    """SIGKILL in the middle of a load, and what is fetched afterwards."""

    rounds = ROUNDS

    def storage(self) -> dict[str, Any]:
        """Storage settings of the daemon."""
        return {}

    def read_store_ledger(self) -> StoreLedger:
        """Read the store's ledger."""
        return read_sqlite_ledger(self.daemon.directory / "mediator.sqlite3")

    def setUp(self) -> None:
        seed = int(os.environ.get("DURABILITY_SEED", random.SystemRandom().randrange(1_000_000)))
        print(f"DURABILITY_SEED={seed}")  # noqa: T201  pytest shows it when the test fails
        self.random = random.Random(seed)
        self.ledger = ClientLedger()
        self.daemon = prepare_daemon(
            {**ROOMY, "didcomm": {"delivery_limit": MAX_DELIVERY}, "storage": self.storage()}
        )
        self.daemon.__enter__()
        self.addCleanup(self.daemon.__exit__, None, None, None)

    async def test_no_accepted_message_is_lost(self) -> None:
        """
        Kills under load lose no message answered 202, and restore none that was acknowledged (reference 4.1 step 9,
        6.3 "store first, push second").
        """
        bob = await self.enrol()
        unanswered: list[PreparedForward] = []
        for number in range(self.rounds):
            forwards = unanswered + self.prepare(bob, f"{number}")
            socket = await self.open_live_socket(bob) if number % 3 == 0 else None
            unanswered = await self.kill_under_load(forwards, bob, socket)
            self.daemon.start()
            await self.fetch_and_acknowledge(bob, everything=number % 4 == 3)
        await self.fetch_and_acknowledge(bob, everything=True)
        await self.reconcile_ledgers(bob)

    async def enrol(self) -> Any:
        """The recipient."""
        return await enrol_wallet(self.daemon, reactor)

    def prepare(self, bob: Any, prefix: str) -> list[PreparedForward]:
        """Forwards to the recipient."""
        return prepare_forwards(bob, prefix, MESSAGES)

    async def open_live_socket(self, bob: Any) -> Any:
        """A socket of the recipient in live mode."""
        socket = await connect_didcomm_socket(reactor, bob)
        self.assertIs((await socket.live()).live_delivery, True)
        return socket

    async def kill_under_load(self, forwards: list[PreparedForward], bob: Any, socket: Any) -> list[PreparedForward]:
        """Send until the daemon is killed; return the forwards that were not answered."""
        senders = LoadSenders(self.daemon.port, forwards)
        reading = Deferred.fromCoroutine(self.acknowledge_pushes(bob, socket))
        senders.start()
        await deferToThread(senders.wait_for_posts, self.random.randrange(10, len(forwards)))
        # At a random moment in the processing of a message, unless none is left.
        await deferToThread(senders.done.wait, self.random.uniform(0, WHOLE_MESSAGE_SECONDS))
        self.daemon.kill()
        await deferToThread(senders.join)
        if socket is not None:
            await socket.closed()
        reading.cancel()
        await reading
        self.ledger.record_posts(senders)
        self.assertEqual(set(senders.markers(202, None)), {post.marker for post in senders.posts})
        unanswered = set(senders.markers(None))
        return [forward for forward in forwards if forward.marker in unanswered]

    async def acknowledge_pushes(self, bob: Any, socket: Any) -> None:
        """Acknowledge pushes until the socket closes."""
        try:
            while socket is not None:
                batch = [await socket.pushed.get()]
                batch += [await socket.pushed.get() for _ in range(len(socket.pushed.pending))]
                self.ledger.record_deliveries(bob, batch)
                await self.ledger.acknowledge(socket, batch)
        except (CancelledError, SocketClosedError):
            pass

    async def fetch_and_acknowledge(self, bob: Any, *, everything: bool) -> None:
        """Fetch, and acknowledge some or all of it."""
        while batch := await bob.fetch(MAX_DELIVERY):
            self.ledger.record_deliveries(bob, batch)
            count = len(batch) if everything else self.random.randrange(len(batch))
            await self.ledger.acknowledge(bob, batch[:count])
            if not everything:
                break

    async def reconcile_ledgers(self, bob: Any) -> None:
        ledger = self.ledger
        self.assertGreater(sum(ledger.accepted.values()), self.rounds)
        self.assertEqual(ledger.find_lost(), [])
        self.assertEqual(ledger.find_duplicates(), [])
        self.assertEqual(ledger.find_vanished(), set())
        self.assertEqual(ledger.returned, [])
        self.assertEqual((await bob.status()).message_count, 0)
        store_ledger = (await deferToThread(self.read_store_ledger)).didcomm
        self.assertEqual((store_ledger.difference, store_ledger.acknowledged), (0, store_ledger.accepted))
        self.assertEqual(store_ledger.acknowledged, sum(len(ids) for ids in ledger.ids.values()))


class MongoDBKillTests(KillTests):
    """The same with a MongoDB server, which keeps running."""

    rounds = max(2, ROUNDS // 3)

    def storage(self) -> dict[str, Any]:
        return make_mongo_storage(self)

    def read_store_ledger(self) -> StoreLedger:
        return read_shared_mongo_ledger(self.daemon)


@pytest.mark.exhaustive
class V1KillTests(KillTests):
    """The same with a wallet of DIDComm v1, and forwards of v1."""

    async def enrol(self) -> V1Wallet:
        http = open_http(reactor)
        wallet = await V1Wallet.connect(await fetch_v1_invitation(http, self.daemon.url), http, reactor)
        await wallet.enrol()
        await wallet.add_key()
        return wallet

    def prepare(self, bob: V1Wallet, prefix: str) -> list[PreparedForward]:
        _, key = bob.keys
        markers = [f"{prefix}-{number}" for number in range(MESSAGES)]
        return [PreparedForward(marker, bob.make_forward(key, marker)) for marker in markers]

    async def open_live_socket(self, bob: V1Wallet) -> V1Socket:
        socket = await connect_v1_socket(reactor, bob)
        self.assertIs((await socket.live()).live_delivery, True)
        return socket

    async def fetch_and_acknowledge(self, bob: V1Wallet, *, everything: bool) -> None:
        """A wallet that goes live is handed out anew what it has not acknowledged."""
        if everything:
            socket = await self.open_live_socket(bob)
            await socket.close()
        await super().fetch_and_acknowledge(bob, everything=everything)

    async def test_pickup_without_acknowledgements(self) -> None:
        """
        A wallet of Pickup 1.0 and one of implicit pickup get every accepted message at least once, though the daemon
        is killed while they fetch.
        """
        batch, implicit = await self.enrol(), await self.enrol()
        found: dict[V1Wallet, set[str]] = {batch: set(), implicit: set()}
        for number in range(2):
            forwards = [one for wallet in found for one in self.prepare(wallet, f"{id(wallet)} {number}")]
            self.random.shuffle(forwards)
            socket = await connect_v1_socket(reactor, implicit)
            socket.start_implicit_pickup()
            fetching = [
                Deferred.fromCoroutine(self.fetch_batches(batch, found[batch])),
                Deferred.fromCoroutine(self.read_frames(implicit, socket, found[implicit])),
            ]
            await self.kill_under_load(forwards, implicit, None)
            await socket.closed()
            for one in fetching:
                one.cancel()
                await one
            self.daemon.start()
        socket = await connect_v1_socket(reactor, implicit)
        socket.start_implicit_pickup()
        deadline = reactor.seconds() + PATIENCE_SECONDS
        while await batch.count() or await implicit.count():
            self.assertLess(reactor.seconds(), deadline, "messages are left that nobody is sent")
            found[batch] |= {batch.open(one).text for one in await batch.fetch_batch(MAX_DELIVERY)}
        while socket.pushed.pending:
            found[implicit].add(implicit.open(await socket.pushed.get()).text)
        await socket.close()
        accepted = set(self.ledger.accepted)
        self.assertGreater(len(accepted), 20)
        self.assertEqual(accepted - found[batch] - found[implicit], set())
        ledger = (await deferToThread(self.read_store_ledger)).didcomm
        self.assertEqual((ledger.difference, ledger.acknowledged), (0, ledger.accepted))

    async def fetch_batches(self, wallet: V1Wallet, found: set[str]) -> None:
        """Fetch until the daemon is killed."""
        with contextlib.suppress(Exception, CancelledError):
            while True:
                found |= {wallet.open(one).text for one in await wallet.fetch_batch(5)}

    async def read_frames(self, wallet: V1Wallet, socket: V1Socket, found: set[str]) -> None:
        """Read bare messages until the socket closes."""
        with contextlib.suppress(CancelledError):
            while True:
                found.add(wallet.open(await socket.pushed.get()).text)


@pytest.mark.exhaustive
class V1MongoDBKillTests(V1KillTests, MongoDBKillTests):
    """The same with a MongoDB server, which keeps running."""

    rounds = MongoDBKillTests.rounds
