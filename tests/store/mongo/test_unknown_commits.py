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
    INBOX,
    LOST_REPLY_TIME_LIMIT,
    SHORT_TIME_LIMIT,
    TIME_LIMIT,
    MongoTestCase,
    wait_for_recovery,
    wait_until,
)

NO_MAJORITY = {"code": 64, "errmsg": "no"}


class NonceTests(MongoTestCase):
    """A nonce is claimed as long as its operation is done or may be."""

    async def test_uses_last_count_if_counting_fails(self) -> None:
        """If the nonces cannot be counted, the last known number decides, and the failure is logged."""
        store = MongoStore(self.make_client(), CLOCK, QueueLimits(), max_nonces=8)
        self.addCleanup(store.close)
        await store.open()
        later = CLOCK.seconds() + 60
        for command in ("count", "aggregate"):
            keys = [f"{command} {number}".encode() for number in range(4)]
            with self.servers.failpoint(command, errorCode=50, times=1):
                self.assertEqual(await gatherResults([store.claim_nonce(key, later) for key in keys]), [True] * 4)
        await self.assertFailure(store.claim_nonce(b"one more", later), ReplayCacheFull)
        self.assertTrue(any("count" in line for line in self.log_lines))

    async def test_notices_claims_of_other_nodes(self) -> None:
        """Claims of other nodes are noticed when there are many or when there seems to be no room."""
        own_store, second = (MongoStore(self.make_client(), CLOCK, QueueLimits(), max_nonces=4) for _ in range(2))
        later = CLOCK.seconds() + 60
        for store in (own_store, second):
            self.addCleanup(store.close)
            await store.open()
        await own_store.claim_nonce(b"a", later)
        await gatherResults([second.claim_nonce(key, later) for key in (b"b", b"c", b"d")])
        await self.assertFailure(own_store.claim_nonce(b"e", later), ReplayCacheFull)
        self.assertFalse(await own_store.claim_nonce(b"b", later))

    async def test_release_makes_room(self) -> None:
        """Each release makes room for one claim without a count."""
        store = MongoStore(self.make_client(), CLOCK, QueueLimits(), max_nonces=256)
        self.addCleanup(store.close)
        await store.open()
        later, counted = CLOCK.seconds() + 60, store._nonces._count
        for number in range(256):  # together, some would be counted twice until they are counted again
            await store.claim_nonce(b"%d" % number, later)
        await self.assertFailure(store.claim_nonce(b"z", later), ReplayCacheFull)
        counts: list[None] = []

        def count(*args: Any) -> Any:
            counts.append(None)
            return counted(*args)

        self.patch(store._nonces, "_count", count)
        self.patch(nonces, "_RECOUNT_INTERVAL", HOUR)
        for key, next_ in ((b"1", b"e"), (b"2", b"f"), (b"3", b"g")):
            await store.release_nonce(key)
            self.assertTrue(await store.claim_nonce(next_, later))
            await self.assertFailure(store.claim_nonce(b"z", later), ReplayCacheFull)
        self.assertLess(len(counts), 3)

    async def test_failed_release_is_repeated(self) -> None:
        """A failed release is repeated later, and does not delete a newer claim."""
        server = self.make_client()
        store, other = await self.open_store(server=server), await self.open_store()
        later = CLOCK.seconds() + 60
        await gatherResults([store.claim_nonce(b"a", later), store.claim_nonce(b"b", later)])
        for key in (b"a", b"b"):
            with self.servers.failpoint("delete", errorCode=50, times=1):
                await self.assertFailure(store.release_nonce(key), StoreUnavailable)
            if key == b"a":
                self.assertTrue(await store.claim_nonce(key, later))
        await wait_for_recovery(server)
        self.assertEqual([await store.claim_nonce(b"a", later), await other.claim_nonce(b"b", later)], [False, True])

    async def test_release_spares_claim_of_other_process(self) -> None:
        """The claim of another process is not released."""
        store, other = await self.open_store(), await self.open_store()
        later = CLOCK.seconds() + 60
        await store.claim_nonce(b"a", later)
        self.documents["nonces"].delete_one({"_id": b"a"})
        await other.claim_nonce(b"a", later)
        await store.release_nonce(b"a")
        self.assertFalse(await other.claim_nonce(b"a", later))


class OverloadTests(MongoTestCase):
    """Work beyond the capacity is rejected, and does not delay the rest."""

    async def make_batcher(self, **bounds: int) -> TransactionBatcher:
        batcher = TransactionBatcher(await self.open_client(), at_once=1, bounds=BatchLimits(**bounds))
        batcher.start()
        self.done: list[list[str]] = []
        return batcher

    async def test_rejects_works_behind_a_late_one(self) -> None:
        """When the oldest work has waited too long, others are rejected, and late ones are not started."""
        batcher = await self.make_batcher()
        held: Deferred[None] = Deferred()

        async def slow(run: Operation, works: Sequence[str], tries: int | None) -> list[None]:
            self.done.append(list(works))
            await held
            return [None for _ in works]

        def submit(work: str) -> Deferred[None]:
            return batcher.submit("test", slow, work, ())

        first = submit("a")
        await wait_until(lambda: bool(self.done))
        with self.with_short_time_limit():
            waiting = submit("b")
            await deferLater(CLOCK, SHORT_TIME_LIMIT / 2)
            with self.assertRaises(StoreUnavailable):
                await submit("c")
            await deferLater(CLOCK, SHORT_TIME_LIMIT / 4)
            held.callback(None)
            await first
            with self.assertRaises(StoreUnavailable):
                await waiting
        await submit("d")
        self.assertEqual(self.done, [["a"], ["d"]])

    async def test_divides_works_that_lose_connection(self) -> None:
        """Works that lose their connection together are divided while there is time."""
        batcher = await self.make_batcher()

        async def together(run: Operation, works: Sequence[str], tries: int | None) -> list[None]:
            if "bad" in works:
                raise ServerUnreachable("too much")
            self.done.append(list(works))
            return [None for _ in works]

        deferreds = [batcher.submit("test", together, work, ()) for work in ("a", "bad", "b", "c")]
        with self.assertRaises(StoreUnavailable):
            await deferreds.pop(1)
        await gatherResults(deferreds)
        self.assertEqual(self.done, [["a"], ["b", "c"]])

    async def test_large_acknowledgements_are_split(self) -> None:
        """Many large acknowledgements do not share a query."""
        self.patch(server_module, "REQUEST_TIME_LIMIT", 6 * TIME_LIMIT)
        observed: Counter[str] = Counter()
        store = await self.open_store(observe=lambda operation, seconds: observed.update([operation]))
        before = observed["commit"]
        deferreds = [store.acknowledge(ALICE, [os.urandom(32).hex() for _ in range(10_000)]) for _ in range(10)]
        self.assertEqual(await gatherResults(deferreds, consumeErrors=True), [[] for _ in range(10)])
        self.assertGreater(observed["commit"] - before, 1)

    async def test_acknowledgement_may_need_several_queries(self) -> None:
        """One may need several queries."""
        self.patch(removal, "_MAX_QUERY_BYTES", 500)
        store = await self.open_store()
        ids = [f"m{number:03}" for number in range(30)]
        await gatherResults([self.enqueue_ids(store, id, data=id.encode()) for id in ids])
        digests = [
            document["digest"].hex() for document in self.documents["messages"].find({"_id": {"$gte": "m010"}})
        ]
        gone = await store.acknowledge(ALICE, [*digests, *ids[:10]])
        self.assertEqual([item.id for item in gone], ids)


class LateOutcomeTests(MongoTestCase):
    """Operations that turn out to have succeeded."""

    def setUp(self) -> None:
        super().setUp()
        self.reported: list[tuple[str, str | None]] = []

    def record_removed(self, removed: Sequence[RemovedMessage]) -> None:
        self.reported += [(message.id, message.reason) for message in removed]

    def record_removed_events(self, removed: Sequence[RemovedMessage]) -> None:
        self.reported += [(f"event {one.id}", one.reason) for one in removed]

    async def open_reporting_store(self) -> MongoStore:
        store = MongoStore(
            self.make_client(),
            CLOCK,
            QueueLimits(max_messages=2),
            on_late_removals=self.record_removed,
            on_late_acknowledgements=self.record_removed_events,
        )
        self.addCleanup(store.close)
        await store.open()
        await store.grant(ALICE)
        await self.register(store, INBOX)
        return store

    async def lose_commit_reply(self, deferred: Any) -> None:
        with (
            self.servers.failpoint("commitTransaction", writeConcernError=NO_MAJORITY),
            self.with_short_time_limit(LOST_REPLY_TIME_LIMIT),
        ):
            with self.assertRaises(StoreUnavailable):
                await deferred()

    async def test_reports_evictions_of_undone_enqueue(self) -> None:
        """Messages evicted by an enqueue that is undone are reported, but not those of the enqueue."""
        store = await self.open_reporting_store()
        await self.enqueue_ids(store, "a", "b")
        await self.lose_commit_reply(lambda: self.enqueue_ids(store, "c"))
        await wait_until(lambda: bool(self.reported))
        self.assertEqual((self.reported, self.list_queued()), ([("a", "fifo_count")], ["b"]))
        self.assertTrue(any("1 fifo_count" in line for line in self.log_lines))

    async def test_reports_acknowledged_messages(self) -> None:
        """Acknowledged messages are reported."""
        store = await self.open_reporting_store()
        await self.enqueue_ids(store, "a", "b")
        await self.lose_commit_reply(lambda: store.acknowledge(ALICE, ["b", "x"]))
        await wait_until(lambda: bool(self.reported))
        self.assertEqual((self.reported, self.list_queued()), ([("b", None)], ["a"]))

    async def test_reports_acknowledged_events(self) -> None:
        """Acknowledged events are reported apart."""
        decentrl, later = (await self.open_reporting_store()).decentrl, CLOCK.seconds() + 3600
        contract = Contract("contract", ALICE, BOB, later, b"digest", b"text")
        await decentrl.save_contract(CommandGuard(b"1", later), contract)
        await decentrl.enqueue_event(
            CommandGuard(b"2", later), PendingEvent("e", ALICE, BOB, "payload", CLOCK.seconds())
        )
        await self.lose_commit_reply(lambda: decentrl.acknowledge_events(CommandGuard(b"3", later), ALICE, ["e"]))
        await wait_until(lambda: bool(self.reported))
        self.assertEqual(self.reported, [("event e", None)])

    async def test_reports_expired_messages(self) -> None:
        """Expired messages are reported."""
        store = await self.open_reporting_store()
        await store.enqueue(INBOX, [Payload("a", b"x", "json")], expires_at=CLOCK.seconds() - 1)
        await self.lose_commit_reply(lambda: store.expire_messages(9))
        await wait_until(lambda: bool(self.reported))
        self.assertEqual((self.reported, self.list_queued()), ([("a", "ttl")], []))

    async def test_due_message_is_due_again(self) -> None:
        """A due message is due again, once."""
        store = await self.open_reporting_store()
        now = CLOCK.seconds()
        await store.enqueue(INBOX, [Payload("a", b"x", "json")], expires_at=now + 60, due_at=now - 1)
        await self.lose_commit_reply(lambda: store.take_due_messages(9))
        await wait_for_recovery(store._client)
        self.assertEqual(self.documents["messages"].count_documents({"wakes_at": {"$exists": True}}), 1)
        self.assertEqual(
            [(message.id, message.due_at) for message in await store.take_due_messages(9)], [("a", now - 1)]
        )
        self.assertEqual(await store.take_due_messages(9), [])


class ResolverTests(MongoTestCase):
    """Undo of uncertain commits."""

    async def test_every_undo_writes(self) -> None:
        """Every undo writes, so that it cannot be acknowledged by a former primary."""
        server = await self.open_client()
        self.documents["health_probe"].delete_many({})

        async def look(transaction: Transaction) -> None:
            await transaction.query(MESSAGES.find({}))

        server.transactions.schedule_undo(look)
        await wait_until(lambda: not server.transactions.has_uncertain_commits)
        self.assertEqual(self.documents["health_probe"].count_documents({"_id": "undone"}), 1)

    async def test_failing_undo_does_not_block_others(self) -> None:
        """An undo that fails does not block others, and does not fill the log."""
        server = await self.open_client()
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
        lines = [line for line in self.log_lines if "undo of" in line]
        self.assertTrue(server.transactions.has_uncertain_commits)
        self.assertEqual((len(lines), any("SECRET" in line for line in self.log_lines)), (1, False))
        failing = False
        await wait_until(lambda: not server.transactions.has_uncertain_commits)
