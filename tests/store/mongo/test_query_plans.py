"""Keys and documents that the MongoDB server examines for the DIDComm part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from twisted.internet.defer import Deferred, gatherResults

from mediatord.store.interfaces.devices import Device, FinishedWakeup, WakeupPolicy, WakeupRequest
from mediatord.store.interfaces.messages import AgeBucket, ArrivalWindow, EnqueueRequest, new_stored_message_id
from mediatord.store.interfaces.v1_connections import V1Connection
from mediatord.store.mongo import ledger, message_queues, queue_statistics
from tests.store.builders import ALICE, HOUR, NOON, ImmediateClock, make_payload
from tests.store.mongo.mongo_test_case import MongoTestCase, run_coroutine

# Number of other accounts, and of messages queued for each recipient DID.
OTHER_ACCOUNTS = 12
QUEUED_MESSAGES = 30
# What may be examined for two messages: their recipient, the messages, and the bounds of a search.
KEYS, DOCUMENTS = 12, 10

Ask = Callable[[], Deferred[Any]]


def make_connection(number: int) -> V1Connection:
    return V1Connection(f"did:key:z6MkWallet{number:02}", f"did:key:z6MkOwn{number:02}", "r")


def make_did(number: int) -> str:
    return f"did:key:{ALICE}-{number}"


class PlanTests(MongoTestCase):
    """No query scans a collection, or depends on messages of others or later ones."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        super().setUp()
        self.clock = ImmediateClock()
        self.store = await self.open_store(clock=self.clock)
        accounts = [ALICE, *(f"did:example:{number}" for number in range(OTHER_ACCOUNTS))]
        await gatherResults([Deferred.fromCoroutine(self.fill_account(account)) for account in accounts])
        await gatherResults([self.store.claim_nonce(b"%d" % number, NOON + HOUR + number) for number in range(100)])

    async def fill_account(self, account: str) -> None:
        """Store two recipient DIDs with messages of all kinds."""
        store = self.store
        await store.grant(account)
        dids = [f"did:key:{account}-{number}" for number in (0, 1)]
        await store.update_recipients(account, [(did, "add") for did in dids], max_recipients=9)
        ids = [f"{account} {number:03}" for number in range(QUEUED_MESSAGES)]
        for number, did in enumerate(dids):
            payloads = tuple(make_payload(id) for id in ids[number::2])
            delayed_payloads = (make_payload(f"{did} late"),)
            await store.enqueue_all(
                [
                    EnqueueRequest(did, payloads, NOON + HOUR),
                    EnqueueRequest(did, delayed_payloads, NOON + HOUR, NOON + 60),
                ]
            )
        await store.mark_delivered(ids[::5], node=account)

    async def profile(self, operation: Ask) -> list[dict[str, Any]]:
        """What the server records of an operation."""
        self.documents.command("profile", 2)
        try:
            await operation()
        finally:
            self.documents.command("profile", 0)
        profiled = list(self.documents["system.profile"].find({"ns": {"$not": {"$regex": "system[.]profile$"}}}))
        self.documents["system.profile"].drop()
        self.assertTrue(profiled)
        for entry in profiled:
            if not entry["ns"].endswith((".nodes", ".session_owners", ".ledger")):  # of which there are never many
                self.assertNotIn("COLLSCAN", entry.get("planSummary", ""), entry["ns"])
        return profiled

    async def measure_examined(self, operation: Ask) -> tuple[int, int]:
        """Examined keys and documents."""
        profiled = await self.profile(operation)
        return sum(entry.get("keysExamined", 0) for entry in profiled), sum(
            entry.get("docsExamined", 0) for entry in profiled
        )

    async def assert_examined(self, keys: int, documents: int, **operations: Ask) -> None:
        for name, operation in operations.items():
            found = await self.measure_examined(operation)
            self.assertLessEqual(found[0], keys, f"keys: {name}")
            self.assertLessEqual(found[1], documents, f"documents: {name}")

    async def test_operations_on_two_messages(self) -> None:
        """Operations on two messages cost the same, however many there are."""
        store = self.store
        await self.assert_examined(
            KEYS,
            DOCUMENTS,
            fetch=lambda: store.fetch_messages(ALICE, None, limit=2, max_bytes=1000),
            fetch_one=lambda: store.fetch_messages(ALICE, make_did(0), limit=2, max_bytes=1000),
            find=lambda: store.find_messages([f"{ALICE} 001", f"{ALICE} 002"]),
            enqueue=lambda: self.enqueue_ids(store, "new-1", "new-2", to=make_did(0)),
            mark_delivered=lambda: store.mark_delivered([f"{ALICE} 001", f"{ALICE} 002"], node="x"),
            mark_pending=lambda: store.mark_pending([f"{ALICE} 001", f"{ALICE} 002"]),
            acknowledge=lambda: store.acknowledge(ALICE, [f"{ALICE} 001"]),
            remove=lambda: store.remove_messages([f"{ALICE} 003"]),
            next_due=store.find_next_due,
        )

    async def test_operations_on_an_account(self) -> None:
        """Operations on an account do not depend on others."""
        store = self.store
        await self.assert_examined(
            6 * QUEUED_MESSAGES,
            4 * QUEUED_MESSAGES,
            by_digest=lambda: store.acknowledge(ALICE, ["0" * 64, "f" * 64]),
            recipients=lambda: store.list_recipients(ALICE, offset=1, limit=1),
            status=lambda: store.get_queue_status(ALICE, None),
            status_of_one=lambda: store.get_queue_status(ALICE, make_did(0)),
        )

    async def test_status_does_not_read_messages(self) -> None:
        """Counting does not read messages."""
        await self.assert_examined(16, 16, status=lambda: self.store.get_queue_status(ALICE, make_did(1)))

    async def test_expired_messages_of_others(self) -> None:
        """Reads do not depend on expired messages of others."""
        (alice,) = self.documents["accounts"].find({"did": ALICE})
        self.documents["messages"].update_many({"account": {"$ne": alice["_id"]}}, {"$set": {"expires_at": NOON - 1}})
        store = self.store
        await self.assert_examined(
            40,
            16,
            status=lambda: store.get_queue_status(ALICE, None),
            status_of_one=lambda: store.get_queue_status(ALICE, make_did(1)),
            fetch=lambda: store.fetch_messages(ALICE, None, limit=2, max_bytes=1000),
            fetch_one=lambda: store.fetch_messages(ALICE, make_did(0), limit=2, max_bytes=1000),
            find=lambda: store.find_messages([f"{ALICE} 001", f"{ALICE} 002"]),
        )

    async def test_arrivals_are_found_by_keys(self) -> None:
        """Recent arrivals are found by keys alone, without those of others."""
        first, rest = ArrivalWindow(NOON, NOON + 1), ArrivalWindow(NOON, NOON + 1, f"{ALICE} 001")
        await self.assert_examined(KEYS, 1, arrived=lambda: self.store.find_arrivals([ALICE], first, limit=2))
        await self.assert_examined(KEYS, 1, arrived=lambda: self.store.find_arrivals([ALICE], rest, limit=2))

    async def test_due_and_expired_messages(self) -> None:
        """Due and expired messages are found by an index."""
        self.clock.advance(60)
        await self.assert_examined(4 * KEYS, 4 * DOCUMENTS, take_due=lambda: self.store.take_due_messages(2))
        self.clock.advance(HOUR)
        await self.assert_examined(4 * KEYS, 4 * DOCUMENTS, expire=lambda: self.store.expire_messages(2))
        await self.assert_examined(250, 250, prune=self.store.prune_nonces)

    async def test_ledger_counts_keys(self) -> None:
        """Queued messages are counted by keys, and not at all if there are too many."""
        messages = self.documents["messages"].count_documents({})
        await self.assert_examined(messages + KEYS, DOCUMENTS, ledger=self.store.read_ledger)
        self.patch(ledger, "_COUNT_LIMIT", messages - 1)
        await self.assert_examined(KEYS, DOCUMENTS, ledger=self.store.read_ledger)

    async def test_accounts(self) -> None:
        """Accounts, their DIDs and remembered DIDs are looked up."""
        store = self.store
        await self.assert_examined(
            KEYS,
            DOCUMENTS,
            account=lambda: store.get_account(ALICE),
            grant=lambda: store.grant(ALICE),
            grant_new=lambda: store.grant("did:example:new"),
            owner=lambda: store.find_owner(make_did(0)),
            update=lambda: store.update_recipients(
                ALICE, [(make_did(0), "remove"), (make_did(2), "add")], max_recipients=9
            ),
            move=lambda: store.move_account(ALICE, "did:example:newer"),
            mark_draft03=lambda: store.mark_draft03("did:example:newer"),
            remember_did=lambda: store.remember_did("did:peer:4a", "did:peer:4a:b"),
            recall_did=lambda: store.recall_did("did:peer:4a"),
            is_retired=lambda: store.is_retired(ALICE),
            claim=lambda: store.claim_nonce(b"1", NOON),
            release=lambda: store.release_nonce(b"1"),
            ping=store.ping,
        )

    async def test_delayed_messages(self) -> None:
        """Delayed messages do not slow down reads of others, and are only counted."""
        store, account = self.store, "did:example:waits"
        await store.grant(account)
        await store.update_recipients(account, [(make_did(7), "add"), (make_did(8), "add")], max_recipients=9)
        for delayed in (100, 300):
            delayed_payloads = tuple(make_payload(f"late {delayed} {number}") for number in range(delayed // 2))
            await store.enqueue(make_did(7), delayed_payloads, expires_at=NOON + HOUR, due_at=NOON + 60)
            other = tuple(make_payload(f"other {delayed} {number}") for number in range(delayed // 2))
            await store.enqueue(make_did(8), other, expires_at=NOON + HOUR, due_at=NOON + 60)
            new_payloads = (make_payload(f"fresh {delayed} 1"), make_payload(f"fresh {delayed} 2"))
            await store.enqueue(make_did(8), new_payloads, expires_at=NOON + HOUR)
            await self.assert_examined(
                KEYS, DOCUMENTS, fetch=lambda: store.fetch_messages(account, None, limit=2, max_bytes=1000)
            )
            found = await store.fetch_messages(account, None, limit=2, max_bytes=1000)
            self.assertEqual([item.id for item in found], ["fresh 100 1", "fresh 100 2"])
        self.assertEqual((await store.get_queue_status(account, None)).message_count, 4)
        await self.assert_examined(400 + 2 * KEYS, 16, status=lambda: store.get_queue_status(account, None))

    async def test_due_messages(self) -> None:
        """Of due messages that were not handed out only those that are fetched are read."""
        store = self.store
        delayed_payloads = tuple(make_payload(f"late {number}") for number in range(100))
        await store.enqueue(make_did(0), delayed_payloads, expires_at=NOON + HOUR, due_at=NOON + 60)
        self.clock.advance(60)
        await self.assert_examined(
            2 * 100 + 2 * KEYS,
            DOCUMENTS + 2,
            fetch=lambda: store.fetch_messages(ALICE, None, limit=2, max_bytes=1000),
            status=lambda: store.get_queue_status(ALICE, None),
        )

    async def test_queue_sizes_examine_bounded_number(self) -> None:
        """Of very many queues and messages a bounded number is examined."""
        self.patch(queue_statistics, "_MAX_RANKED_QUEUES", 5)
        self.patch(queue_statistics, "_EXACT_COUNT_LIMIT", 9)
        before = self.read_metadata_count()
        largest, rest = await self.store.queue_sizes(2)
        self.assertEqual(len(largest), 2)
        self.assertIn(rest + sum(number for _, number in largest), (before, self.read_metadata_count()))
        await self.assert_examined(2 * 5 + 4 + 9, 2 * 5 + 4, queue_sizes=lambda: self.store.queue_sizes(2))
        await self.assert_examined(9, 0, queue_sizes=lambda: self.store.queue_sizes(0))
        self.patch(ledger, "_COUNT_LIMIT", 9)
        pages = sum(self.documents[name].estimated_document_count() for name in ("ledger", "session_owners"))
        await self.assert_examined(2 * 5 + 4 + 9, 2 * 5 + 4 + pages, statistics=lambda: self.store.read_statistics(2))

    async def test_statistics_read_counters(self) -> None:
        """The first message is read, and a bounded number of counters."""
        self.patch(queue_statistics, "_EXACT_COUNT_LIMIT", 9)
        queues = 2 * (OTHER_ACCOUNTS + 1)
        expected = await self.store.get_queue_totals()
        self.assertEqual(expected.recipients, queues)
        await self.assert_examined(2 * queues + 9 + 4, queues + 2, waiting=lambda: self.store.get_queue_totals())
        namespace = f"{self.documents.name}.recipients"
        with self.servers.failpoint("aggregate", errorCode=50, namespace=namespace):  # more than one would be late
            self.assertEqual(await self.store.get_queue_totals(), replace(expected, bytes=None, recipients=None))
        self.patch(queue_statistics, "_MAX_SUMMED_QUEUES", 5)
        unknown = await self.store.get_queue_totals()
        self.assertEqual((unknown.bytes, unknown.recipients), (None, None))
        self.assertEqual(unknown.oldest_received_at, expected.oldest_received_at)
        await self.assert_examined(6 + 9 + 4, 2, waiting=lambda: self.store.get_queue_totals())

    async def test_backlog_counts_bounded_keys(self) -> None:
        """Of each age a bounded number of keys is counted, and of few messages the bytes are summed."""
        self.patch(queue_statistics, "_BUCKET_COUNT_LIMIT", 9)
        self.patch(ledger, "_COUNT_LIMIT", 9)
        self.patch(queue_statistics, "_EXACT_COUNT_LIMIT", 9)
        self.patch(queue_statistics, "_BUCKET_SIZE_LIMIT", 5)
        aged = tuple(make_payload(new_stored_message_id(NOON - 10)) for _ in "ab")
        await self.store.enqueue(make_did(0), aged, expires_at=NOON + HOUR)
        size = sum(len(payload.data) for payload in aged)
        bounds = [NOON, NOON - 5]
        # Ids of messages generated here sort after those of any time.
        before = self.read_metadata_count()
        buckets = (await self.store.read_backlog(bounds, 0)).buckets
        self.assertEqual(buckets[1:], (AgeBucket(0, 0), AgeBucket(2, size)))
        self.assertIsNone(buckets[0].bytes)
        self.assertIn(buckets[0].messages + 2, (before, self.read_metadata_count()))
        ages = 2 * (9 + 3) + 2 * 3
        pages = sum(self.documents[name].estimated_document_count() for name in ("ledger", "session_owners"))
        await self.assert_examined(ages, 2 + pages, by_age=lambda: self.store.read_backlog(bounds, 0))
        queues = 2 * (OTHER_ACCOUNTS + 1)
        await self.assert_examined(
            ages + queues + 4 + 3 * 3, 2 + pages + queues + 4 + 3, all=lambda: self.store.read_backlog(bounds, 3)
        )

    def read_metadata_count(self) -> int:
        """The count in the metadata; it may be wrong after aborted transactions."""
        return sum(self.documents[name].estimated_document_count() for name in ("messages", "pending_events"))

    async def test_largest_queues(self) -> None:
        """The longest queues are found among non-empty ones."""
        empty = [(f"did:key:empty-{number}", "add") for number in range(200)]
        await self.store.update_recipients(ALICE, empty, max_recipients=1000)  # type: ignore[arg-type]  # of a list of pairs
        self.documents["parties"].insert_many([{"did": f"did:example:{n}", "pending": 0} for n in range(200)])
        queues = 2 * (OTHER_ACCOUNTS + 1)
        keys = queues + 4 + (OTHER_ACCOUNTS + 1) * (QUEUED_MESSAGES + 2) + 1
        await self.assert_examined(keys, queues + 4, queue_sizes=lambda: self.store.queue_sizes(5))

    async def test_open_examines_deliveries_of_dead_nodes(self) -> None:
        """Opening the store examines only messages delivered by dead nodes."""
        self.patch(message_queues, "_RELEASE_BATCH", 20)
        boots, delivered = OTHER_ACCOUNTS + 1, (OTHER_ACCOUNTS + 1) * QUEUED_MESSAGES // 5
        for more in (100, 400):
            self.documents["messages"].insert_many(
                [{"_id": f"{more} {number}", "delivered": "gone"} for number in range(more)]
            )
            # One key to find a message and two to change it, and a few for each slice and each boot.
            number, slices = delivered + more, boots + more // 20
            await self.assert_examined(3 * number + 4 * slices, number + 4 * slices, open=self.store.open)
            self.assertEqual(self.documents["messages"].count_documents({"delivered": {"$exists": True}}), 0)
            delivered = 0

    async def test_delivering_nodes(self) -> None:
        """Delivering nodes are found with a key for each."""
        server = await self.open_client()
        await self.assert_examined(
            OTHER_ACCOUNTS + 3, 0, delivered_by=lambda: run_coroutine(message_queues.list_delivering_boots(server))
        )

    async def test_wakeups(self) -> None:
        """Wake-ups of an account do not depend on others, nor on the number of its messages."""
        devices, policy = self.store.devices, WakeupPolicy(20.0, 10.0, max_message_ids=2)
        accounts = [ALICE, *(f"did:example:{number}" for number in range(OTHER_ACCOUNTS))]
        for number, account in enumerate(accounts):
            await devices.set_device(account, Device(number.to_bytes(16, "big"), "fcm", b"", NOON + number), 9)
        await self.assert_examined(
            4 * KEYS,
            3 * DOCUMENTS,
            claim=lambda: devices.claim_wakeups([WakeupRequest(ALICE)], policy),
            finish=lambda: devices.finish_wakeups([FinishedWakeup(ALICE, b"token")]),
            polls=lambda: devices.record_polls({ALICE: 0.0}),
            set_device=lambda: devices.set_device(ALICE, Device(bytes(16), "fcm", b"new"), 9),
            list_devices=lambda: devices.list_devices(ALICE),
            remove_devices=lambda: devices.remove_devices(ALICE, "apns"),
            scan=lambda: devices.scan_devices(b"", 2),
            reseal=lambda: devices.reseal_devices([(Device(bytes(16), "fcm", b"new"), b"newer")]),
            forget=lambda: devices.forget_devices([bytes(16)]),
        )
        await self.assert_examined(6 * KEYS, 5 * DOCUMENTS, owed=lambda: devices.find_owed_wakeups("", 2, policy))
        await self.assert_examined(20, 0, count=devices.count_devices)
        profiled = await self.profile(lambda: devices.claim_wakeups([WakeupRequest(ALICE)], policy))
        returned = [entry["nreturned"] for entry in profiled if entry["ns"].endswith(".recipients")]
        self.assertEqual(returned, [1], "of the two queues of the account")
        self.clock.advance(2)
        await self.assert_examined(4, 4, expire=lambda: devices.expire_devices(1))

    async def test_v1_connections(self) -> None:
        """What concerns one connection reads only that, and a count only the keys of pending ones."""
        connections = self.store.v1_connections
        for number in range(QUEUED_MESSAGES):
            await connections.put_connection(make_connection(number), max_pending=QUEUED_MESSAGES)
        for number in range(QUEUED_MESSAGES - 10):
            await self.store.grant(make_connection(number).account)
        await self.assert_examined(
            4,
            4,
            find=lambda: connections.find_connection(make_connection(1).own_key),
            get=lambda: connections.get_connection(make_connection(1).account),
            put=lambda: connections.put_connection(make_connection(1), max_pending=1),
            change=lambda: connections.change_connection(make_connection(1).account, has_base58_keys=True),
            scan=lambda: connections.scan_connections("", 2),
            remove=lambda: connections.remove_connection(make_connection(2).account),
        )
        await self.assert_examined(12, 0, count=connections.count_connections)
        new = make_connection(QUEUED_MESSAGES)
        await self.assert_examined(12, 1, insert=lambda: connections.put_connection(new, max_pending=11))
        newer = make_connection(QUEUED_MESSAGES + 1)
        await self.assert_examined(16, 3, replace=lambda: connections.put_connection(newer, max_pending=11))
        self.clock.advance(2)
        await self.assert_examined(4, 3, expire=lambda: connections.expire_connections(NOON + 1, 1))
