"""Works that fail, exceed a limit or have an unknown outcome."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater

from mediatord.errors import ReplayCacheFull, StoreUnavailable
from mediatord.runtime.failure_logging import LogThrottle
from mediatord.store.interfaces.decentrl import CommandGuard, Contract, PendingEvent
from mediatord.store.interfaces.messages import Payload, QueueLimits, RemovedMessage
from mediatord.store.interfaces.store import BatchLimits
from mediatord.store.mongo import nonces, removal
from mediatord.store.mongo.driver import client as server_module
from mediatord.store.mongo.driver.errors import ServerUnreachable
from mediatord.store.mongo.driver.operation import Operation
from mediatord.store.mongo.driver.transactions import Transaction
from mediatord.store.mongo.schema import MESSAGES
from mediatord.store.mongo.store import MongoStore
from mediatord.store.mongo.transaction_batcher import TransactionBatcher
from tests.store.builders import BOB, HOUR
from tests.store.mongo.mongo_test_case import (
    ALICE,
    CLOCK,
    IMPATIENT,
    INBOX,
    PATIENT,
    MongoTestCase,
    wait_for_recovery,
    wait_until,
)

NO_MAJORITY = {"code": 64, "errmsg": "no"}


class NonceTests(MongoTestCase):
    """A nonce is claimed as long as its operation is done or may be."""

    async def test_not_counted(self) -> None:
        """If the nonces cannot be counted, the last known number decides, and the failure is logged."""
        store = MongoStore(self.a_server(), CLOCK, QueueLimits(), max_nonces=8)
        self.addCleanup(store.close)
        await store.open()
        later = CLOCK.seconds() + 60
        for command in ("count", "aggregate"):
            keys = [f"{command} {number}".encode() for number in range(4)]
            with self.servers.failpoint(command, errorCode=50, times=1):
                self.assertEqual(await gatherResults([store.claim_nonce(key, later) for key in keys]), [True] * 4)
        await self.assertFailure(store.claim_nonce(b"one more", later), ReplayCacheFull)
        self.assertTrue(any("count" in line for line in self.said))

    async def test_others(self) -> None:
        """Claims of other nodes are noticed when there are many or when there seems to be no room."""
        ours, theirs = (MongoStore(self.a_server(), CLOCK, QueueLimits(), max_nonces=4) for _ in range(2))
        later = CLOCK.seconds() + 60
        for store in (ours, theirs):
            self.addCleanup(store.close)
            await store.open()
        await ours.claim_nonce(b"a", later)
        await gatherResults([theirs.claim_nonce(key, later) for key in (b"b", b"c", b"d")])
        await self.assertFailure(ours.claim_nonce(b"e", later), ReplayCacheFull)
        self.assertFalse(await ours.claim_nonce(b"b", later))

    async def test_releases(self) -> None:
        """Each release makes room for one claim without a count."""
        store = MongoStore(self.a_server(), CLOCK, QueueLimits(), max_nonces=256)
        self.addCleanup(store.close)
        await store.open()
        later, counted = CLOCK.seconds() + 60, store._nonces._count
        for number in range(256):  # together, some would be counted twice until they are counted again
            await store.claim_nonce(b"%d" % number, later)
        await self.assertFailure(store.claim_nonce(b"z", later), ReplayCacheFull)
        counts: list[None] = []

        def count(*asked: Any) -> Any:
            counts.append(None)
            return counted(*asked)

        self.patch(store._nonces, "_count", count)
        self.patch(nonces, "_RECOUNT_INTERVAL", HOUR)
        for key, next_ in ((b"1", b"e"), (b"2", b"f"), (b"3", b"g")):
            await store.release_nonce(key)
            self.assertTrue(await store.claim_nonce(next_, later))
            await self.assertFailure(store.claim_nonce(b"z", later), ReplayCacheFull)
        self.assertLess(len(counts), 3)

    async def test_release_fails(self) -> None:
        """A failed release is repeated later, and does not delete a newer claim."""
        server = self.a_server()
        store, other = await self.a_store(server=server), await self.a_store()
        later = CLOCK.seconds() + 60
        await gatherResults([store.claim_nonce(b"a", later), store.claim_nonce(b"b", later)])
        for key in (b"a", b"b"):
            with self.servers.failpoint("delete", errorCode=50, times=1):
                await self.assertFailure(store.release_nonce(key), StoreUnavailable)
            if key == b"a":
                self.assertTrue(await store.claim_nonce(key, later))
        await wait_for_recovery(server)
        self.assertEqual([await store.claim_nonce(b"a", later), await other.claim_nonce(b"b", later)], [False, True])

    async def test_released_late(self) -> None:
        """The claim of another process is not released."""
        store, other = await self.a_store(), await self.a_store()
        later = CLOCK.seconds() + 60
        await store.claim_nonce(b"a", later)
        self.documents["nonces"].delete_one({"_id": b"a"})
        await other.claim_nonce(b"a", later)
        await store.release_nonce(b"a")
        self.assertFalse(await other.claim_nonce(b"a", later))


class OverloadTests(MongoTestCase):
    """Work beyond the capacity is rejected, and does not delay the rest."""

    async def a_gathering(self, **bounds: int) -> TransactionBatcher:
        gathering = TransactionBatcher(await self.an_open_server(), at_once=1, bounds=BatchLimits(**bounds))
        gathering.start()
        self.done: list[list[str]] = []
        return gathering

    async def test_late(self) -> None:
        """When the oldest work has waited too long, others are rejected, and late ones are not started."""
        gathering = await self.a_gathering()
        held: Deferred[None] = Deferred()

        async def slow(run: Operation, works: Sequence[str], tries: int | None) -> list[None]:
            self.done.append(list(works))
            await held
            return [None for _ in works]

        def submit(work: str) -> Deferred[None]:
            return gathering.submit("test", slow, work, ())

        first = submit("a")
        await wait_until(lambda: bool(self.done))
        with self.impatiently():
            waiting = submit("b")
            await deferLater(CLOCK, IMPATIENT / 2)
            with self.assertRaises(StoreUnavailable):
                await submit("c")
            await deferLater(CLOCK, IMPATIENT / 4)
            held.callback(None)
            await first
            with self.assertRaises(StoreUnavailable):
                await waiting
        await submit("d")
        self.assertEqual(self.done, [["a"], ["d"]])

    async def test_lost_together(self) -> None:
        """Works that lose their connection together are divided while there is time."""
        gathering = await self.a_gathering()

        async def together(run: Operation, works: Sequence[str], tries: int | None) -> list[None]:
            if "bad" in works:
                raise ServerUnreachable("too much")
            self.done.append(list(works))
            return [None for _ in works]

        asked = [gathering.submit("test", together, work, ()) for work in ("a", "bad", "b", "c")]
        with self.assertRaises(StoreUnavailable):
            await asked.pop(1)
        await gatherResults(asked)
        self.assertEqual(self.done, [["a"], ["b", "c"]])

    async def test_large_acknowledgements(self) -> None:
        """Many large acknowledgements do not share a query."""
        self.patch(server_module, "REQUEST_TIME_LIMIT", 6 * PATIENT)
        observed: Counter[str] = Counter()
        store = await self.a_store(observe=lambda operation, seconds: observed.update([operation]))
        before = observed["commit"]
        asked = [store.acknowledge(ALICE, [os.urandom(32).hex() for _ in range(10_000)]) for _ in range(10)]
        self.assertEqual(await gatherResults(asked, consumeErrors=True), [[] for _ in range(10)])
        self.assertGreater(observed["commit"] - before, 1)

    async def test_many_questions(self) -> None:
        """One may need several queries."""
        self.patch(removal, "_MAX_QUERY_BYTES", 500)
        store = await self.a_store()
        ids = [f"m{number:03}" for number in range(30)]
        await gatherResults([self.put(store, id, data=id.encode()) for id in ids])
        digests = [one["digest"].hex() for one in self.documents["messages"].find({"_id": {"$gte": "m010"}})]
        gone = await store.acknowledge(ALICE, [*digests, *ids[:10]])
        self.assertEqual([one.id for one in gone], ids)


class LateOutcomeTests(MongoTestCase):
    """Operations that turn out to have succeeded."""

    def setUp(self) -> None:
        super().setUp()
        self.told: list[tuple[str, str | None]] = []

    def tell(self, removed: Sequence[RemovedMessage]) -> None:
        self.told += [(one.id, one.reason) for one in removed]

    def tell_events(self, removed: Sequence[RemovedMessage]) -> None:
        self.told += [(f"event {one.id}", one.reason) for one in removed]

    async def telling_store(self) -> MongoStore:
        store = MongoStore(
            self.a_server(),
            CLOCK,
            QueueLimits(max_messages=2),
            on_late_removals=self.tell,
            on_late_acknowledgements=self.tell_events,
        )
        self.addCleanup(store.close)
        await store.open()
        await store.grant(ALICE)
        await self.register(store, INBOX)
        return store

    async def in_doubt(self, asked: Any) -> None:
        with self.servers.failpoint("commitTransaction", writeConcernError=NO_MAJORITY), self.impatiently():
            with self.assertRaises(StoreUnavailable):
                await asked()

    async def test_evicted(self) -> None:
        """Messages evicted by an enqueue that is undone are reported, but not those of the enqueue."""
        store = await self.telling_store()
        await self.put(store, "a", "b")
        await self.in_doubt(lambda: self.put(store, "c"))
        await wait_until(lambda: bool(self.told))
        self.assertEqual((self.told, self.kept()), ([("a", "fifo_count")], ["b"]))
        self.assertTrue(any("1 fifo_count" in line for line in self.said))

    async def test_acknowledged(self) -> None:
        """Acknowledged messages are reported."""
        store = await self.telling_store()
        await self.put(store, "a", "b")
        await self.in_doubt(lambda: store.acknowledge(ALICE, ["b", "x"]))
        await wait_until(lambda: bool(self.told))
        self.assertEqual((self.told, self.kept()), ([("b", None)], ["a"]))

    async def test_event_acknowledged(self) -> None:
        """Acknowledged events are reported apart."""
        decentrl, later = (await self.telling_store()).decentrl, CLOCK.seconds() + 3600
        contract = Contract("contract", ALICE, BOB, later, b"digest", b"text")
        await decentrl.save_contract(CommandGuard(b"1", later), contract)
        await decentrl.enqueue_event(
            CommandGuard(b"2", later), PendingEvent("e", ALICE, BOB, "payload", CLOCK.seconds())
        )
        await self.in_doubt(lambda: decentrl.acknowledge_events(CommandGuard(b"3", later), ALICE, ["e"]))
        await wait_until(lambda: bool(self.told))
        self.assertEqual(self.told, [("event e", None)])

    async def test_expired(self) -> None:
        """Expired messages are reported."""
        store = await self.telling_store()
        await store.enqueue(INBOX, [Payload("a", b"x", "json")], expires_at=CLOCK.seconds() - 1)
        await self.in_doubt(lambda: store.expire_messages(9))
        await wait_until(lambda: bool(self.told))
        self.assertEqual((self.told, self.kept()), ([("a", "ttl")], []))

    async def test_due(self) -> None:
        """A due message is due again, once."""
        store = await self.telling_store()
        now = CLOCK.seconds()
        await store.enqueue(INBOX, [Payload("a", b"x", "json")], expires_at=now + 60, due_at=now - 1)
        await self.in_doubt(lambda: store.take_due_messages(9))
        await wait_for_recovery(store._client)
        self.assertEqual(self.documents["messages"].count_documents({"wakes_at": {"$exists": True}}), 1)
        self.assertEqual([(one.id, one.due_at) for one in await store.take_due_messages(9)], [("a", now - 1)])
        self.assertEqual(await store.take_due_messages(9), [])


class ResolverTests(MongoTestCase):
    """Undo of uncertain commits."""

    async def test_writes(self) -> None:
        """Every undo writes, so that it cannot be acknowledged by a former primary."""
        server = await self.an_open_server()
        self.documents["health_probe"].delete_many({})

        async def look(transaction: Transaction) -> None:
            await transaction.query(MESSAGES.find({}))

        server.transactions.schedule_undo(look)
        await wait_until(lambda: not server.transactions.has_uncertain_commits)
        self.assertEqual(self.documents["health_probe"].count_documents({"_id": "undone"}), 1)

    async def test_in_the_way(self) -> None:
        """An undo that fails does not block others, and does not fill the log."""
        server = await self.an_open_server()
        undone: list[int] = []
        failing, failures = True, 0
        self.patch(server._error_log, "_failures", LogThrottle(CLOCK, HOUR))

        async def fail(transaction: Transaction) -> None:
            nonlocal failures
            if failing:
                failures += 1
                raise ValueError("SECRET")

        def undo(number: int) -> None:
            async def work(transaction: Transaction) -> Any:
                return lambda: undone.append(number)

            server.transactions.schedule_undo(work)

        server.transactions.schedule_undo(fail)
        undo(1)
        undo(2)
        await wait_until(lambda: undone == [1, 2])
        await wait_until(lambda: failures > 3)
        lines = [line for line in self.said if "undo of" in line]
        self.assertTrue(server.transactions.has_uncertain_commits)
        self.assertEqual((len(lines), any("SECRET" in line for line in self.said)), (1, False))
        failing = False
        await wait_until(lambda: not server.transactions.has_uncertain_commits)
