"""The ledger of the MongoDB store: concurrent writes, carrying forward, imports."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import gatherResults

from mediatord.backup.mongo_records import open_mongodb_target
from mediatord.backup.records import AccountRecord, MessageRecord, RecipientRecord, StoreRecord
from mediatord.backup.records import PendingEventRecord as PendingRecord
from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.decentrl import CommandGuard, Contract, PendingEvent
from mediatord.store.interfaces.messages import MessageLedger, Payload, QueueLimits, StoreLedger
from mediatord.store.interfaces.store import BatchLimits
from mediatord.store.mongo import ledger
from mediatord.store.mongo import store as store_module
from mediatord.store.mongo.driver.errors import MongoCommandError
from mediatord.store.mongo.store import MongoStore
from tests.store.builders import BOB
from tests.store.mongo.mongo_test_case import (
    ALICE,
    CLOCK,
    INBOX,
    LOST_REPLY_TIME_LIMIT,
    MongoTestCase,
    run_coroutine,
    wait_for_recovery,
)

NO_MAJORITY = {"code": 64, "errmsg": "no"}
OTHER = "did:key:z6MkOther"


class LedgerTestCase(MongoTestCase):
    """Checks of the ledger's documents."""

    def list_document_owners(self) -> list[str]:
        """Owners of all documents; empty for the one that is carried forward."""
        return sorted(page.get("owner", "") for page in self.documents["ledger"].find())

    async def assert_ledger(self, store: MongoStore, **expected: int) -> None:
        """Check the DIDComm part, and that it is balanced."""
        found = (await store.read_ledger()).didcomm
        self.assertEqual(found, MessageLedger(**expected))
        self.assertEqual(found.difference, 0)


class ConcurrentNodesTests(LedgerTestCase):
    """Several nodes that write and read at the same time."""

    async def test_reads_are_consistent(self) -> None:
        """Every read sees committed changes completely and others not at all."""
        stores = [await self.open_store(QueueLimits(max_messages=30)) for _ in range(3)]
        await self.register(stores[0], OTHER)
        snapshots: list[MessageLedger] = []
        writing = True

        async def write(store: MongoStore, number: int) -> None:
            ids = [f"{number} {position:02}" for position in range(40)]
            await gatherResults([self.enqueue_ids(store, id, to=(INBOX, OTHER)[number % 2]) for id in ids])
            await gatherResults([store.acknowledge(ALICE, [id]) for id in ids[::2]])
            await store.remove_messages(ids[1::8])

        async def look(store: MongoStore) -> None:
            while writing:
                snapshots.append((await store.read_ledger()).didcomm)

        looking = [run_coroutine(look(store)) for store in stores[:2]]
        for _ in range(2):
            await gatherResults([run_coroutine(write(store, number)) for number, store in enumerate(stores)])
            self.documents["messages"].count_documents({})
            for store in stores:
                await store.acknowledge(ALICE, self.list_queued())
        writing = False
        await gatherResults(looking)
        self.assertEqual({entry.difference for entry in snapshots}, {0})
        self.assertGreater(len({entry.accepted for entry in snapshots}), 3)
        last = (await stores[2].read_ledger()).didcomm
        self.assertEqual((last.accepted, last.waiting, last.difference), (240, 0, 0))
        self.assertGreater(last.evicted, 0)

    async def test_concurrent_transactions_do_not_conflict(self) -> None:
        """Concurrent transactions do not write to the same document."""
        self.patch(store_module, "_BATCH_BOUNDS", BatchLimits(batch=1))
        store = await self.open_store()
        dids = [f"did:key:z6Mk{number}" for number in range(12)]
        await self.register(store, *dids)
        conflicts = self.record_write_conflicts()
        for iteration in range(10):
            await gatherResults([self.enqueue_ids(store, f"{iteration} {did}", to=did) for did in dids])
        self.assertEqual(conflicts, [])
        self.assertIn(len(self.list_document_owners()), range(3, 8))

    def record_write_conflicts(self) -> list[MongoCommandError]:
        """
        Record the write conflicts of this test's transactions.

        The server's own counter includes conflicts with transactions that an earlier test left open, and with their
        expiry.
        """
        found: list[MongoCommandError] = []
        is_write_conflict: Any = MongoCommandError.is_write_conflict

        def note(error: MongoCommandError) -> bool:
            if is_write_conflict.fget(error):
                found.append(error)
            return bool(is_write_conflict.fget(error))

        self.patch(MongoCommandError, "is_write_conflict", property(note))
        return found

    async def test_unknown_count_of_very_many_messages(self) -> None:
        """With very many queued messages their number is unknown, and the entries are known."""
        self.patch(ledger, "_COUNT_LIMIT", 3)
        store = await self.open_store()
        await self.enqueue_ids(store, "a", "b", "c")
        await self.assert_ledger(store, accepted=3, waiting=3)
        await self.enqueue_ids(store, "d")
        await store.acknowledge(ALICE, ["a"])
        await self.enqueue_ids(store, "e")
        found = (await store.read_ledger()).didcomm
        self.assertEqual((found, found.difference), (MessageLedger(accepted=5, acknowledged=1, waiting=None), None))

    async def test_unknown_count_after_time_limit(self) -> None:
        """The number is unknown if counting exceeds the time limit."""
        store = await self.open_store()
        await self.enqueue_ids(store, "a")
        with self.servers.failpoint("aggregate", errorCode=50, times=1):
            found = await store.read_ledger()
        self.assertEqual(found, StoreLedger(MessageLedger(accepted=1, waiting=None), MessageLedger(waiting=None)))
        await self.assert_ledger(store, accepted=1, waiting=1)


class UncertainCommitTests(LedgerTestCase):
    """Commits with an unknown outcome."""

    async def lose_commit_reply(self, deferred: Any) -> None:
        with (
            self.servers.failpoint("commitTransaction", writeConcernError=NO_MAJORITY),
            self.with_short_time_limit(LOST_REPLY_TIME_LIMIT),
        ):
            with self.assertRaises(StoreUnavailable):
                await deferred()

    async def wait_for_undo(self) -> None:
        await wait_for_recovery(self.server)

    async def open_uncertain_store(self, **limits: Any) -> MongoStore:
        self.server = self.make_client()
        return await self.open_store(QueueLimits(**limits), server=self.server)

    async def test_records_withdrawn_messages(self) -> None:
        """Withdrawn messages are recorded; messages they have evicted stay evicted."""
        store = await self.open_uncertain_store(max_messages=2, max_bytes=100)
        await self.enqueue_ids(store, "a", "b")
        await self.lose_commit_reply(
            lambda: store.enqueue(
                INBOX,
                [Payload("c", b"x", "json"), Payload("large", b"x" * 101, "json")],
                expires_at=CLOCK.seconds() + 60,
            )
        )
        await self.wait_for_undo()
        await self.assert_ledger(store, accepted=4, evicted=2, withdrawn=1, waiting=1)

    async def test_counts_removals_once(self) -> None:
        """Acknowledged and expired messages are counted once."""
        store = await self.open_uncertain_store()
        await self.enqueue_ids(store, "a", "b")
        await store.enqueue(INBOX, [Payload("old", b"x", "json")], expires_at=CLOCK.seconds() - 1)
        await self.lose_commit_reply(lambda: store.acknowledge(ALICE, ["a", "x"]))
        await self.lose_commit_reply(lambda: store.expire_messages(9))
        await self.wait_for_undo()
        await store.acknowledge(ALICE, ["a"])
        await self.assert_ledger(store, accepted=3, acknowledged=1, expired=1, waiting=1)

    async def test_operations_without_effect_do_not_count(self) -> None:
        """Operations without effect are not counted."""
        store = await self.open_uncertain_store()
        for command in ("commitTransaction", "update"):
            with self.servers.failpoint(command, closeConnection=True), self.with_short_time_limit():
                with self.assertRaises(StoreUnavailable):
                    await self.enqueue_ids(store, command)
            await self.wait_for_undo()
        found = (await store.read_ledger()).didcomm
        self.assertEqual((found.waiting, found.difference), (0, 0))

    async def test_uncertain_commits_of_events(self) -> None:
        """The same holds for events."""
        decentrl, later = (store := await self.open_uncertain_store()).decentrl, CLOCK.seconds() + 3600
        await decentrl.save_contract(
            CommandGuard(b"1", later), Contract("contract", ALICE, BOB, later, b"digest", b"text")
        )
        for id in "ab":
            await decentrl.enqueue_event(
                CommandGuard(id.encode(), later), PendingEvent(id, ALICE, BOB, "payload", 1.0)
            )
        event = PendingEvent("c", ALICE, BOB, "payload", 1.0)
        await self.lose_commit_reply(lambda: decentrl.enqueue_event(CommandGuard(b"c", later), event))
        await self.lose_commit_reply(lambda: decentrl.acknowledge_events(CommandGuard(b"2", later), ALICE, ["a"]))
        await self.wait_for_undo()
        found = (await store.read_ledger()).decentrl
        self.assertEqual(found, MessageLedger(accepted=3, acknowledged=1, withdrawn=1, waiting=1))


class CarryForwardTests(LedgerTestCase):
    """Documents of processes that have ended."""

    async def test_merges_documents_of_ended_processes(self) -> None:
        """Documents of processes that have ended become one when another one starts."""
        for number in range(3):
            store = await self.open_store(QueueLimits(max_messages=2))
            await self.enqueue_ids(store, f"m{number}")
            await store.close()
        last = await self.open_store()
        self.assertEqual(self.list_document_owners(), [""])
        await self.enqueue_ids(last, "x")
        self.assertEqual(len(self.list_document_owners()), 2)
        await self.assert_ledger(last, accepted=4, evicted=1, waiting=3)

    async def test_concurrent_merges_count_once(self) -> None:
        """Concurrent merges count everything once; documents of live processes stay."""
        for number in range(5):
            store = await self.open_store()
            await self.enqueue_ids(store, f"m{number}")
            await store.close()
            self.documents["ledger"].update_many({"owner": {"$exists": True}}, {"$set": {"owner": "dead"}})
        live = [await self.open_client() for _ in range(3)]
        await gatherResults([run_coroutine(ledger.carry_forward(server)) for server in live])
        store = await self.open_store()
        await self.enqueue_ids(store, "x")
        await store.prune_nonces()
        self.assertEqual(len(self.list_document_owners()), 2)
        await self.assert_ledger(store, accepted=6, waiting=6)

    async def test_live_process_continues_after_merge(self) -> None:
        """A process that was taken for dead goes on."""
        store = await self.open_store()
        await self.enqueue_ids(store, "a")
        self.documents["session_owners"].delete_many({})
        await (await self.open_store()).close()
        self.assertEqual(self.list_document_owners(), [""])
        await self.enqueue_ids(store, "b")
        await self.assert_ledger(store, accepted=2, waiting=2)


class ImportTests(LedgerTestCase):
    """Messages of an import, and messages that are missing."""

    async def test_imported_messages_are_accepted_once(self) -> None:
        """Imported messages are accepted by the import, not by the first read."""
        message = MessageRecord(
            id="m", account=1, recipient=1, form="json", payload=b"x", received_at=1.0, expires_at=4e9, due_at=None,
            arrived_at=1.0, pushes=0,
        )  # fmt: skip
        records = [
            AccountRecord(number=1, did=ALICE, created_at=1.0, draft03=False),
            RecipientRecord(number=1, account=1, did=INBOX, place=1),
            *[message.model_copy(update={"id": f"m{number}"}) for number in range(3)],
            PendingRecord(id="e", recipient=ALICE, sender=BOB, received_at=1.0, payload="x"),
        ]
        await self.run_in_thread(self.load, records)
        self.documents["messages"].delete_one({"_id": "m1"})
        store = await self.open_store()
        found = await store.read_ledger()
        self.assertEqual(
            found, StoreLedger(MessageLedger(accepted=3, waiting=2), MessageLedger(accepted=1, waiting=1))
        )

    def load(self, records: list[StoreRecord]) -> None:
        with open_mongodb_target(self.servers.uri(self.database), stopped=False) as target:
            target.begin("archive")
            target.write(1, records)
            target.finish()

    async def test_lost_message_is_a_difference(self) -> None:
        """A message that was removed without an entry is a difference, also after a restart."""
        store = await self.open_store()
        await self.enqueue_ids(store, "a", "b", "c")
        self.documents["messages"].delete_one({"_id": "b"})
        for one in (store, await self.open_store()):
            self.assertEqual((await one.read_ledger()).didcomm.difference, 1)
