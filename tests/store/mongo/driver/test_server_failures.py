"""Failures of MongoDB servers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, cast

from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import deferLater

from mediatord.errors import PayloadTooLarge, StoreUnavailable, UnknownRecipient
from mediatord.runtime.request_time import request_deadline
from mediatord.store.interfaces.messages import Payload
from mediatord.store.interfaces.store import StoreUnusable, ignore_observation
from mediatord.store.mongo.driver import client
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.collection import MAX_DOCUMENT_BYTES, MongoCommand, encode_document
from mediatord.store.mongo.driver.errors import CommitWithError, DuplicateKeyError, UnsupportedServer
from mediatord.store.mongo.driver.transactions import Transaction
from mediatord.store.mongo.driver.uri import parse_mongo_uri
from tests.mongod_process import Mongod, TemporaryDataDirectory
from tests.replica_set import ReplicaSet
from tests.store.builders import HOUR
from tests.store.mongo.mongo_test_case import (
    ALICE,
    CLOCK,
    INBOX,
    LOST_REPLY_TIME_LIMIT,
    MAX_OPERATION_SECONDS,
    THINGS,
    TIME_LIMIT,
    TIME_LIMIT_SETTINGS,
    WAIT_TIMEOUT,
    MongoTestCase,
    ShiftedReactor,
    authenticated_server,
    run_coroutine,
    start_until_exit,
    wait_until,
)

NOT_PRIMARY = (91, 189, 10107, 11600, 11602, 13435, 13436)
TRANSIENT = ["TransientTransactionError"]
CANARY = "Tremendously-secret"


def make_increment(number: int) -> list[MongoCommand]:
    """An idempotent write."""
    return THINGS.update({"_id": number}, {"$set": {"there": True}}, upsert=True)


class ServerTestCase(MongoTestCase):
    """An open client."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        super().setUp()
        self.server = await self.open_client(connections=9)
        self.documents["things"].delete_many({})

    def list_documents(self) -> list[Any]:
        return [document["_id"] for document in self.documents["things"].find().sort("_id", 1)]

    async def assert_fails_in_time(self, work: Coroutine[Any, Any, Any] | Deferred[Any]) -> None:
        """Check that an operation fails with StoreUnavailable in time."""
        start = CLOCK.seconds()
        with self.assertRaises(StoreUnavailable):
            await work
        self.assertLess(CLOCK.seconds() - start, MAX_OPERATION_SECONDS)

    def assert_fails_at_once(self, work: Coroutine[Any, Any, Any]) -> None:
        """Check that an operation fails without waiting."""
        self.failureResultOf(run_coroutine(work), StoreUnavailable)


class CommandTests(ServerTestCase):
    """Idempotent commands are retried."""

    async def test_retries_after_lost_connection(self) -> None:
        """A read and a write whose connection is closed are retried."""
        with self.servers.failpoint("update", "find", closeConnection=True, times=2):
            await self.server.write("write", make_increment(1))
            self.assertEqual(len(await self.server.query("read", THINGS.find({}))), 1)

    async def test_retries_when_not_primary(self) -> None:
        """Commands that a server rejects as it is not the primary are retried."""
        for number, code in enumerate(NOT_PRIMARY):
            with self.servers.failpoint("update", errorCode=code, times=1):
                await self.server.write("write", make_increment(number))
        self.assertEqual(self.list_documents(), list(range(len(NOT_PRIMARY))))

    async def test_retries_write_without_majority(self) -> None:
        """A write that is not known to be durable is repeated."""
        for code in (64, 91, 11602):
            with self.servers.failpoint("update", writeConcernError={"code": code, "errmsg": CANARY}, times=1):
                await self.server.write("write", make_increment(code))
        self.assertEqual(self.list_documents(), [64, 91, 11602])

    async def test_write_without_majority_fails_in_time(self) -> None:
        """A write that does not become durable fails in time."""
        failing = self.servers.failpoint("update", writeConcernError={"code": 64, "errmsg": CANARY})
        with failing, self.with_short_time_limit():
            await self.assert_fails_in_time(self.server.write("write", make_increment(1)))

    async def test_restarts_query_with_lost_cursor(self) -> None:
        """A query whose cursor is lost is restarted."""
        await self.server.write("write", THINGS.insert([{"_id": number} for number in range(2500)]))
        with self.servers.failpoint("getMore", errorCode=43, times=1):
            self.assertEqual(len(await self.server.query("read", THINGS.find({}))), 2500)

    async def test_does_not_retry_rejected_command(self) -> None:
        """A rejected command is not retried, and the server's text is not logged."""
        await self.assert_fails_in_time(self.server.query("read", THINGS.find({"$nonsense": CANARY})))
        self.assertTrue(self.server.is_available)
        await self.server.write("write", make_increment(1))

    async def test_late_reply_does_not_block_others(self) -> None:
        """A late reply is not awaited, and other commands go on."""
        with self.silence_command("find"):
            with self.with_short_time_limit():
                slow = run_coroutine(self.server.query("read", THINGS.find({})))
            slow.addErrback(
                lambda failure: (
                    failure.trap(StoreUnavailable) and run_coroutine(self.server.write("w", make_increment(1)))
                )
            )
            start = CLOCK.seconds()
            await slow
            self.assertLess(CLOCK.seconds() - start, MAX_OPERATION_SECONDS)
        await self.server.write("write", make_increment(2))
        self.assertEqual(self.list_documents(), [1, 2])

    async def test_rejects_too_large_document(self) -> None:
        """A document that exceeds the limit of a server is rejected before it is sent."""
        largest: dict[str, Any] = {
            "_id": 1,
            "data": b"x" * (MAX_DOCUMENT_BYTES - len(encode_document({"_id": 1, "data": b""}))),
        }
        await self.server.write("write", THINGS.insert([largest]))
        for excess in (1, 1_000_000):
            with self.assertRaises(PayloadTooLarge):
                THINGS.insert([{**largest, "_id": 2, "data": largest["data"] + b"x" * excess}])
        self.assertEqual(self.list_documents(), [1])

    async def test_large_and_small_replies_are_complete(self) -> None:
        """Replies of many megabytes and many small ones arrive complete, each for its query."""
        documents = [{"_id": number, "data": bytes([number]) * 3_000_000} for number in range(8)]
        for document in documents:
            await self.server.write("write", THINGS.insert([document]))
        large = run_coroutine(self.server.query("read", THINGS.find({}, sort={"_id": 1})))
        small = [
            run_coroutine(self.server.query("read", THINGS.find({"_id": number % 8}, projection={"_id": 1})))
            for number in range(100)
        ]
        self.assertEqual([await one for one in small], [[{"_id": number % 8}] for number in range(100)])
        self.assertEqual(await large, documents)

    async def test_rejects_values_that_bson_cannot_store(self) -> None:
        """Lone surrogates and numbers over 64 bits fail, and are not logged."""
        for value in (f"{CANARY}\ud800", 1 << 64):
            await self.assert_fails_in_time(self.server.query("read", THINGS.find({"a": value})))

    async def test_failures_log_no_contents(self) -> None:
        """Failures log nothing of queries, documents and replies."""
        document = {"_id": CANARY, "data": CANARY}
        await self.server.write("write", THINGS.insert([document]))
        with self.assertRaises(DuplicateKeyError):
            await self.server.write("write", THINGS.insert([document]))
        await self.test_does_not_retry_rejected_command()
        await self.test_rejects_values_that_bson_cannot_store()
        with self.servers.failpoint("insert", "find", errorCode=8, closeConnection=False, times=2):
            await self.assert_fails_in_time(self.server.write("write", THINGS.insert([{**document, "_id": 2}])))
            await self.assert_fails_in_time(self.server.query("read", THINGS.find(document)))
        await self.server.close()
        self.assertNotIn(CANARY, "\n".join(self.log_lines))
        self.assertIn("operations failed", "\n".join(self.log_lines))

    async def test_close_finishes_running_operations(self) -> None:
        """Running operations finish, and later ones are rejected."""
        deferred = run_coroutine(self.server.write("write", make_increment(1)))
        await self.server.close()
        self.successResultOf(deferred)
        self.assert_fails_at_once(self.server.query("read", THINGS.find({})))
        await self.server.close()

    async def test_close_ends_command_without_reply(self) -> None:
        """A command without a reply ends before the close does."""
        with self.silence_command("find"), self.with_short_time_limit():
            deferred = run_coroutine(self.server.query("read", THINGS.find({})))
            start = CLOCK.seconds()
            await self.server.close()
            self.assertLess(CLOCK.seconds() - start, MAX_OPERATION_SECONDS)
            self.failureResultOf(deferred, StoreUnavailable)


class TransactionTests(ServerTestCase):
    """Transactions are atomic and take effect once."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        await self.server.write("write", THINGS.insert([{"_id": 0, "number": 0}]))
        self.attempts = 0

    async def increment(self, transaction: Transaction) -> int:
        """Increment the number, reading first and writing at the end."""
        self.attempts += 1
        (found,) = await transaction.query(THINGS.find({"_id": 0}))
        transaction.write_at_end(THINGS.insert([{"_id": found["number"] + 1}]))
        transaction.write_at_end(THINGS.update_each([{"q": {"_id": 0}, "u": {"$inc": {"number": 1}}}]))
        return int(found["number"])

    def read_number(self) -> int:
        """The number, after checking that every increment was complete."""
        documents = self.list_documents()
        found = self.documents["things"].find_one({"_id": 0})
        assert found is not None
        self.assertEqual(documents, list(range(found["number"] + 1)))
        return int(found["number"])

    async def test_transaction_is_durable_and_reads_own_writes(self) -> None:
        """A transaction is durable when it ends, and reads its own writes."""

        async def work(transaction: Transaction) -> list[Any]:
            await transaction.write(THINGS.insert([{"_id": 1}]))
            await transaction.write(THINGS.update_each([{"q": {"_id": 1}, "u": {"$set": {"a": 1}}}]))
            await transaction.write(THINGS.update_each([{"q": {"_id": 1}, "u": {"$inc": {"a": 1}}}]))
            self.assertEqual(await transaction.query(THINGS.find({"_id": 1})), [{"_id": 1, "a": 2}])
            (deleted,) = await transaction.write(THINGS.delete({"_id": 0}, {"_id": 9}))
            self.assertEqual(deleted["n"], 1)
            self.assertEqual(self.list_documents(), [0])
            return await transaction.query(THINGS.aggregate([{"$match": {}}]))

        self.assertEqual(await self.server.transact("work", work), [{"_id": 1, "a": 2}])
        self.assertEqual(self.list_documents(), [1])

    async def test_error_aborts_unless_commit_is_requested(self) -> None:
        """An error aborts the transaction, unless it asks for a commit."""

        async def refuse(transaction: Transaction) -> None:
            await transaction.write(THINGS.insert([{"_id": 1}]))
            raise UnknownRecipient()

        async def keep(transaction: Transaction) -> None:
            await transaction.write(THINGS.insert([{"_id": 2}]))
            raise CommitWithError(UnknownRecipient())

        for work in (refuse, keep):
            with self.assertRaises(UnknownRecipient):
                await self.server.transact("work", work)
        self.assertEqual(self.list_documents(), [0, 2])

    async def test_reports_index_of_duplicate_key(self) -> None:
        """A duplicate key is reported with the name of the index, and nothing is written."""

        async def work(transaction: Transaction) -> None:
            transaction.write_at_end(THINGS.update_each([{"q": {"_id": 0}, "u": {"$set": {"number": 9}}}]))
            transaction.write_at_end(THINGS.insert([{"_id": 0}]))

        with self.assertRaises(DuplicateKeyError) as caught:
            await self.server.transact("work", work)
        self.assertEqual((caught.exception.collection, caught.exception.index), ("things", "_id_"))
        self.assertEqual(self.read_number(), 0)

    async def test_retries_after_transient_errors(self) -> None:
        """After any transient error the transaction is retried, and takes effect once."""
        for command in ("find", "insert", "update", "commitTransaction"):
            for code, labels in ((112, TRANSIENT), (251, TRANSIENT), (10107, TRANSIENT), (11602, TRANSIENT)):
                before = self.read_number()
                with self.servers.failpoint(command, errorCode=code, errorLabels=labels, times=1):
                    self.assertEqual(await self.server.transact("count", self.increment), before)
                self.assertEqual(self.read_number(), before + 1, f"{command} {code}")

    async def test_retries_after_lost_connection(self) -> None:
        """A transaction is retried when the connection is lost at any point, and takes effect once."""
        for command in ("find", "insert", "update", "commitTransaction"):
            before = self.read_number()
            with self.servers.failpoint(command, closeConnection=True, times=1):
                await self.server.transact("count", self.increment)
            self.assertEqual(self.read_number(), before + 1, command)

    async def test_unacknowledged_commit_is_applied_once(self) -> None:
        """A commit that succeeded but was not acknowledged is not applied twice."""
        for code in (64, 91, 11600):
            before, self.attempts = self.read_number(), 0
            error = {"code": code, "errmsg": CANARY}
            with self.servers.failpoint("commitTransaction", writeConcernError=error, times=2):
                await self.server.transact("count", self.increment)
            self.assertEqual((self.read_number(), self.attempts), (before + 1, 1))

    async def test_conflicting_transactions_all_succeed(self) -> None:
        """Conflicting transactions all succeed."""
        self.patch(client, "REQUEST_TIME_LIMIT", 6 * TIME_LIMIT)
        counting = [run_coroutine(self.server.transact("count", self.increment)) for _ in range(30)]
        self.assertEqual(sorted([await one for one in counting]), list(range(30)))
        self.assertEqual(self.read_number(), 30)

    async def test_permanent_conflict_fails_in_time(self) -> None:
        """A transaction that keeps conflicting fails in time, and leaves no locks."""
        in_the_way = self.servers.failpoint("commitTransaction", errorCode=112, errorLabels=TRANSIENT)
        with in_the_way, self.with_short_time_limit():
            await self.assert_fails_in_time(self.server.transact("count", self.increment))
        self.assertEqual(self.read_number(), 0)
        await self.server.transact("count", self.increment)

    async def test_cancelled_transaction_leaves_no_locks(self) -> None:
        """A transaction that is given up after a write leaves no locks."""

        async def write_first(transaction: Transaction) -> None:
            await transaction.write(THINGS.update_each([{"q": {"_id": 0}, "u": {"$inc": {"number": 1}}}]))
            await transaction.query(THINGS.find({}))

        with self.silence_command("find"), self.with_short_time_limit():
            await self.assert_fails_in_time(self.server.transact("work", write_first))
        start = CLOCK.seconds()
        await self.server.transact("count", self.increment)
        self.assertLess(CLOCK.seconds() - start, MAX_OPERATION_SECONDS)
        self.assertEqual(self.read_number(), 1)

    async def test_aborts_transactions_of_dead_process(self) -> None:
        """Another process can abort the transactions of a dead one."""

        async def leave(transaction: Transaction) -> None:
            await transaction.write(THINGS.update_each([{"q": {"_id": 0}, "u": {"$inc": {"number": 1}}}]))
            await Deferred[None]()

        self.server.set_session_owner("boot 1")
        abandoned = run_coroutine(self.server.transact("work", leave))
        abandoned.addErrback(lambda _: None)
        other = await self.open_client()
        await wait_until(
            lambda: any("transaction" in operation for operation in self.list_session_operations(self.server))
        )
        await other.end_sessions("boot 1")
        await other.transact("count", self.increment)
        self.assertEqual(self.read_number(), 1)
        abandoned.cancel()


class UncertainCommitTests(ServerTestCase):
    """A commit with an unknown outcome is reported as failed and undone."""

    async def insert(self, transaction: Transaction) -> None:
        transaction.write_at_end(THINGS.insert([{"_id": 1}]))

    async def undo(self, transaction: Transaction) -> None:
        await transaction.write(THINGS.delete({"_id": 1}))

    async def test_undoes_commit_that_succeeded(self) -> None:
        """The commit succeeded but was not acknowledged in time."""
        with self.servers.failpoint("commitTransaction", writeConcernError={"code": 64, "errmsg": "no"}):
            with self.with_short_time_limit(LOST_REPLY_TIME_LIMIT):
                await self.assert_fails_in_time(self.server.transact("insert", self.insert, undo=self.undo))
            self.assertEqual(self.list_documents(), [1])
        await wait_until(lambda: not self.list_documents())
        await self.server.transact("insert", self.insert)

    async def test_undoes_commit_that_was_blocked(self) -> None:
        """The commit did not succeed in time, and does not later."""
        with self.servers.failpoint("commitTransaction", blockConnection=True, blockTimeMS=2_000, times=1):
            with self.with_short_time_limit():
                await self.assert_fails_in_time(self.server.transact("insert", self.insert, undo=self.undo))
            await wait_until(lambda: not self.server.transactions.has_uncertain_commits)
        self.assertEqual(self.list_documents(), [])
        await self.server.transact("insert", self.insert)
        self.assertEqual(self.list_documents(), [1])


class UnavailableServerTests(ServerTestCase):
    """A server that is down or does not reply."""

    time_limit = None

    def choose_servers(self) -> ReplicaSet:
        return start_restartable_server()

    async def assert_recovers(self, stop: Callable[[int], None], restart: Callable[[int], None]) -> None:
        """Operations fail in time while the server is down, soon at once, and work soon after it is back."""
        await self.run_in_thread(stop, 0)
        try:
            await self.assert_fails_in_time(self.server.write("write", make_increment(1)))
            await wait_until(lambda: not self.server.is_available)
            self.assert_fails_at_once(self.server.write("write", make_increment(1)))
            self.assert_fails_at_once(self.server.transact("work", self.read))
        finally:
            await self.run_in_thread(restart, 0)
        # Only after there is a primary again, which is up to the servers.
        await self.run_in_thread(self.servers.primary)
        seconds = await wait_until(lambda: self.server.is_available)
        await self.server.write("write", make_increment(2))
        self.assertEqual(self.availability_changes, [True, False, True], f"after {seconds:.1f} s")
        self.assertIn(2, self.list_documents())

    async def read(self, transaction: Transaction) -> list[Any]:
        return await transaction.query(THINGS.find({}))

    async def test_stopped_server(self) -> None:
        """A server that is stopped and restarted."""
        await self.assert_recovers(self.servers.stop, self.servers.start)

    async def test_killed_server(self) -> None:
        """A server that crashes."""
        await self.assert_recovers(self.servers.kill, self.servers.start)

    async def test_frozen_server(self) -> None:
        """A server that keeps its connections but does not reply."""
        await self.assert_recovers(self.servers.freeze, self.servers.thaw)

    async def test_operations_time_out_despite_clock_set_back(self) -> None:
        """Waiting operations fail in time even if the clock of this host is set back."""
        clock = ShiftedReactor()
        server = ReplicaSetClient(
            parse_mongo_uri(self.servers.uri(self.database)),
            cast(Any, clock),
            observe=ignore_observation,
            on_up=self.availability_changes.append,
        )
        self.addCleanup(server.close)
        store = await self.open_store(clock=cast(Any, clock), server=server)
        await self.run_in_thread(self.servers.freeze, 0)
        try:
            deferreds: list[Deferred[Any]] = [
                store.enqueue(INBOX, [Payload("a", b"payload", "json")], expires_at=clock.seconds() + HOUR),
                store.fetch_messages(ALICE, None, limit=1, max_bytes=1),
                store.fetch_messages(ALICE, None, limit=1, max_bytes=1),
                store.get_account(ALICE),
                store.claim_nonce(b"nonce", clock.seconds() + HOUR),
            ]
            await deferLater(CLOCK, 0.3)
            clock.ahead = -HOUR
            await gatherResults([run_coroutine(self.assert_fails_in_time(deferred)) for deferred in deferreds])
            await wait_until(lambda: not server.is_available)
        finally:
            await self.run_in_thread(self.servers.thaw, 0)
        await wait_until(lambda: server.is_available)
        self.assertIsNotNone(await store.get_account(ALICE))
        with request_deadline(cast(Any, clock)):
            self.assertEqual(await store.find_owner(INBOX), ALICE)

    async def test_counts_messages_after_crash(self) -> None:
        """Queued messages are counted right after a crash, unlike in the server's metadata."""
        for module, name in TIME_LIMIT_SETTINGS:
            self.patch(module, name, TIME_LIMIT)
        store = await self.open_store()
        ids = [f"{number}" for number in range(200)]
        await self.enqueue_ids(store, *ids)
        self.servers.client.admin.command("fsync")
        self.servers.client.admin.command("setParameter", 1, syncdelay=0)  # and not once more before the crash
        await store.acknowledge(ALICE, ids[2:])
        await self.run_in_thread(self.servers.kill, 0)
        await self.run_in_thread(self.servers.start, 0)
        await self.run_in_thread(self.servers.primary)
        self.assertGreater(self.documents.command("count", "messages")["n"], 2)
        other = await self.open_store()
        self.assertEqual(await other.queue_sizes(0), ([], 2))
        self.assertEqual(await other.queue_sizes(1), ([(INBOX, 2)], 0))

    async def test_uses_server_started_after_client(self) -> None:
        """A server that starts after the client is used as soon as it is up."""
        server = self.make_client()
        await self.run_in_thread(self.servers.kill, 0)
        try:
            await self.assert_fails_in_time(server.open())
            self.assert_fails_at_once(server.query("read", THINGS.find({})))
        finally:
            await self.run_in_thread(self.servers.start, 0)
        # Only after there is a primary, which is up to the servers.
        await self.run_in_thread(self.servers.primary)
        await server.open()
        await server.query("read", THINGS.find({}))

    async def test_close_does_not_wait_for_stopped_server(self) -> None:
        """Closing does not wait for a server that is down."""
        await self.run_in_thread(self.servers.kill, 0)
        try:
            deferreds = [run_coroutine(self.server.write("write", make_increment(number))) for number in range(20)]
            await wait_until(lambda: True)
            start = CLOCK.seconds()
            await self.server.close()
            self.assertLess(CLOCK.seconds() - start, MAX_OPERATION_SECONDS)
            for deferred in deferreds:
                self.failureResultOf(deferred, StoreUnavailable)
        finally:
            await self.run_in_thread(self.servers.start, 0)


class OpeningTests(MongoTestCase):
    """Unsupported servers."""

    async def test_warns_once_of_untested_version(self) -> None:
        """An untested version is used, and logged once."""
        self.patch(client, "NEWEST_TESTED_VERSION", (5, 0))
        server = self.make_client()
        for _ in range(2):
            await server.open()
            await server.query("read", THINGS.find({}))
            await server.close()
        self.assertEqual(sum("is untested with" in line for line in self.log_lines), 1)

    async def test_tested_version_is_not_logged(self) -> None:
        """A tested version is not logged."""
        await self.open_client()
        self.assertEqual([line for line in self.log_lines if "is untested with" in line], [])

    async def test_rejects_standalone_server(self) -> None:
        """A server without a replica set is rejected."""
        directory = TemporaryDataDirectory()
        self.addCleanup(directory.close)
        alone = Mongod(directory.path / "0", [])
        await self.run_in_thread(alone.start)
        self.addCleanup(alone.kill)
        server = self.make_client(uri=f"mongodb://127.0.0.1:{alone.port}/test")
        reason = f"127.0.0.1:{alone.port} is not a member of a replica set"
        with self.assertRaisesRegex(UnsupportedServer, reason):
            await server.open()
        with self.assertRaisesRegex(StoreUnusable, reason):
            await self.open_store(server=server)

    async def test_does_not_use_replica_set_of_other_name(self) -> None:
        """A replica set of another name than the URI has is not used."""
        server = self.make_client(uri=self.servers.uri(self.database, replicaSet="another"))
        with self.with_short_time_limit(), self.assertRaises(StoreUnavailable):
            await server.open()
        self.assertFalse(server.is_available)


class CredentialTests(MongoTestCase):
    """A server with access control."""

    time_limit = None

    PASSWORD = "p4ss-w0rd"

    def choose_servers(self) -> ReplicaSet:
        return authenticated_server()

    async def test_logs_wrong_credentials_once(self) -> None:
        """Wrong credentials are logged once, without secrets; correcting them needs no restart."""
        uri = self.servers.uri(self.database, credentials=f"late:{self.PASSWORD}", authMechanism="SCRAM-SHA-1")
        server = self.make_client(uri=uri)
        for _ in range(2):
            with self.assertRaises(StoreUnavailable):
                await server.open()
        warnings = [line for line in self.log_lines if "rejects the credentials" in line]
        self.assertEqual(len(warnings), 1)
        self.assertIn(self.servers.hosts[0], warnings[0])
        self.servers.client.admin.command(
            "createUser", "late", pwd=self.PASSWORD, roles=[{"role": "readWrite", "db": self.database}]
        )
        self.addCleanup(self.servers.client.admin.command, "dropUser", "late")
        start = CLOCK.seconds()
        while True:
            self.assertLess(CLOCK.seconds() - start, WAIT_TIMEOUT)
            with contextlib.suppress(StoreUnavailable):
                await server.open()
                await server.write("write", make_increment(1))
                break
        server.set_session_owner("boot")
        await server.transact("work", lambda t: t.write(THINGS.insert([{"_id": 2}])))
        await server.end_sessions("boot")
        self.assertNotIn(self.PASSWORD, "\n".join(self.log_lines))


@cache
def start_restartable_server() -> ReplicaSet:
    """A server for tests that stop and restart it."""
    return start_until_exit(ReplicaSet())
