"""Refusals and privileges of imports into MongoDB and exports from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from bson import ObjectId
from twisted.internet.defer import Deferred

from mediatord.backup import mongo_records
from mediatord.backup.archive import (
    ProgressCallback,
    ignore_progress,
    import_archive,
    verify_archive,
    write_archive,
)
from mediatord.backup.mongo_records import open_mongodb_source, open_mongodb_target
from mediatord.backup.records import (
    AccountRecord,
    BackupError,
    InvalidArchiveError,
    MessageRecord,
    RecordCounts,
    StoredEventRecord,
    V1ConnectionRecord,
)
from mediatord.store.interfaces.cluster_and_quotas import ClusterNode
from mediatord.store.interfaces.devices import DEVICE_ID_BYTES, Device
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import Account as InterfaceAccount
from mediatord.store.interfaces.store import StoreUnusable
from mediatord.store.interfaces.v1_connections import V1Connection
from mediatord.store.mongo.store import MongoStore
from tests.replica_set import ReplicaSet
from tests.store.mongo.mongo_test_case import ALICE, CLOCK, MongoTestCase, authenticated_server, start_until_exit

DEVICE = Device(bytes(DEVICE_ID_BYTES), "fcm", b"sealed")


class RefusalTests(MongoTestCase):
    """Imports and exports that are refused or interrupted."""

    def setUp(self) -> None:
        super().setUp()
        folder = Path(mkdtemp(prefix="mediatord-transfer-"))
        self.addCleanup(rmtree, folder)
        self.uri = self.servers.uri(self.database)
        self.archive = folder / "a.gz"
        write_archive(
            self.archive, "sqlite", [AccountRecord(number=1, did="did:a", created_at=1.0, draft03=False, seen_at=2.0)]
        )
        self.other = folder / "b.gz"
        write_archive(
            self.other, "sqlite", [AccountRecord(number=1, did="did:b", created_at=1.0, draft03=False, seen_at=2.0)]
        )

    def import_into(
        self, archive: Path, *, stopped: bool = False, report_progress: ProgressCallback = ignore_progress
    ) -> RecordCounts:
        with open_mongodb_target(self.uri, stopped=stopped) as target:
            return import_archive(verify_archive(archive), target, report_progress)

    def assert_refused(self, work: Callable[[], object]) -> Deferred[str]:
        """The error text."""
        return self.run_in_thread(lambda: str(self.assertRaises(BackupError, work)))

    async def test_import_needs_empty_store(self) -> None:
        """An import into a store with data is refused, and the data is unchanged."""
        store = await self.open_store()
        await store.close()
        error = await self.assert_refused(lambda: self.import_into(self.archive))
        self.assertIn("is not empty (1 accounts, 1 recipient DIDs)", error)
        self.assertEqual(self.documents["accounts"].count_documents({}), 1)
        await (await self.open_store()).close()

    async def test_export_leaves_out_devices_without_owner(self) -> None:
        """Devices and wake-ups whose owner is gone are not exported; polls of others are recorded after an import."""
        store = await self.open_store()
        await store.devices.set_device(ALICE, DEVICE, 1)
        await store.close()
        owners = ObjectId(), bytes(16)
        self.documents["devices"].insert_many([{"_id": n, "owner": one} for n, one in enumerate(owners)])
        self.documents["wakeups"].insert_many([{"_id": one, "woken": datetime.now(UTC)} for one in owners])
        exported = await self.run_in_thread(self.export_and_drop)
        self.assertEqual((exported["device"], exported["wakeup"]), (1, 0))
        self.assertEqual(await self.run_in_thread(self.import_into, self.archive), exported)
        store = await self.open_store()
        self.assertEqual(await store.devices.list_devices(ALICE), [DEVICE])
        await store.devices.record_polls({ALICE: 1.0})
        self.assertIn("polled", self.documents["wakeups"].find_one({}) or {})

    async def test_connection_left_behind_is_pending(self) -> None:
        """A connection whose account was removed by a node of a former version is pending after an import."""
        store = await self.open_store()
        account, other = "did:key:z6MkAccount", "did:key:z6MkOther"
        for did in (account, other):
            await store.grant(did)
            connection = V1Connection(did, f"{did}Own", "request")
            await store.v1_connections.put_connection(connection, max_pending=0)
        self.documents["accounts"].delete_one({"did": other})
        self.assertEqual(await store.v1_connections.count_connections(), (2, 0))
        before = await store.v1_connections.scan_connections("", 9)
        await store.close()
        exported = await self.run_in_thread(self.export_and_drop)
        self.assertEqual(await self.run_in_thread(self.import_into, self.archive), exported)
        store = await self.open_store()
        self.assertEqual(await store.v1_connections.scan_connections("", 9), before)
        self.assertEqual(await store.v1_connections.count_connections(), (1, 1))
        self.assertEqual(await store.v1_connections.expire_connections(CLOCK.seconds() + 60.0, 9), 1)
        self.assertIsNone(await store.v1_connections.get_connection(other))

    async def test_refuses_key_of_two_connections(self) -> None:
        """An archive in which two connections have the same key is refused."""
        fields: dict[str, Any] = dataclasses.asdict(V1Connection("", "did:key:z6MkOwn", "r"))
        del fields["account"]
        records = [V1ConnectionRecord(wallet=f"did:key:z6Mk{number}", **fields) for number in range(2)]
        self.archive.unlink()
        write_archive(self.archive, "sqlite", records)
        error = await self.assert_refused(lambda: self.import_into(self.archive))
        self.assertEqual(error, "a DIDComm v1 connection has a key that another connection has")
        self.assertEqual(self.documents["v1_connections"].count_documents({}), 0)

    def export_and_drop(self) -> RecordCounts:
        """Export, and drop all collections."""
        self.archive.unlink()
        with open_mongodb_source(self.uri, offline=False, stopped=False) as source:
            counts = source.counts()
            self.assertEqual(write_archive(self.archive, source.backend, source.records()), counts)
        for name in self.documents.list_collection_names():
            self.documents.drop_collection(name)
        return counts

    def test_too_large_records(self) -> None:
        """Records that are too large are refused before anything is written, one large text or many."""
        event = StoredEventRecord(
            id="e", owner="o", sender="s", recipient="r", timestamp=1.0, contract_id=None, processed=False,
            tags=(), payload="",
        )  # fmt: skip
        with open_mongodb_target(self.uri, stopped=False) as target:
            target.accept(event)
            target.accept(event.model_copy(update={"tags": ("tag",) * 1000}))
            for more in ({"payload": "x" * (17 << 20)}, {"tags": ("tag",) * 1_200_000}):
                with self.assertRaisesRegex(InvalidArchiveError, "exceeds MongoDB's limit"):
                    target.accept(event.model_copy(update=more))

    async def test_running_daemons_prevent_import(self) -> None:
        """A live node prevents an import; a killed one too, unless the operator says that none runs."""
        server = self.make_client()
        store = MongoStore(server, CLOCK, QueueLimits())
        await store.open()
        error = await self.assert_refused(lambda: self.import_into(self.archive))
        self.assertIn("a daemon uses the MongoDB database", error)
        await store.cluster.join(ClusterNode("north", "boot", "tcp:127.0.0.1:9", b"seal"), 3600.0)
        error = await self.assert_refused(lambda: self.import_into(self.archive, stopped=True))
        self.assertIn("nodes use the MongoDB database: north", error)
        error = await self.assert_refused(
            lambda: export_store(self.uri, self.archive.with_name("c.gz"), offline=True)
        )
        self.assertIn("nodes use the MongoDB database: north", error)
        await store.cluster.drop("boot", until=float("inf"))
        await self.run_in_thread(self.import_into, self.archive, stopped=True)
        await store.close()

    async def test_unfinished_import_blocks_daemon(self) -> None:
        """
        An unfinished import blocks a daemon, another archive and an export; once it is finished a daemon starts.
        """

        class Interrupted(Exception):
            pass

        def interrupt(done: int) -> None:
            raise Interrupted

        await self.run_in_thread(
            self.assertRaises, Interrupted, self.import_into, self.archive, report_progress=interrupt
        )
        with self.assertRaises(StoreUnusable) as caught:
            await MongoStore(self.make_client(), CLOCK, QueueLimits()).open()
        self.assertIn("an import into it is incomplete", str(caught.exception))
        self.assertIn("another archive", await self.assert_refused(lambda: self.import_into(self.other)))
        error = await self.assert_refused(lambda: export_store(self.uri, self.archive.with_name("c.gz")))
        self.assertIn("is incomplete", error)
        await self.run_in_thread(self.import_into, self.archive)
        store = MongoStore(self.make_client(), CLOCK, QueueLimits())
        await store.open()
        self.assertEqual(await store.get_account("did:a"), InterfaceAccount("did:a", 1.0))
        await store.close()

    async def test_starting_daemon_ends_import(self) -> None:
        """A daemon that checked before the import began ends it; nothing is written beside it."""
        with open_mongodb_target(self.uri, stopped=False) as target:
            archive = verify_archive(self.archive)
            target.begin(archive.id)
            self.documents["session_owners"].insert_one({"_id": "somebody"})
            with self.assertRaises(BackupError):
                target.write(1, [record for record, _ in archive.records()])
        self.assertEqual(self.documents["accounts"].count_documents({}), 0)
        self.documents["schema"].delete_many({})

    async def test_only_latest_import_writes(self) -> None:
        """Of two imports of one archive, of which the first was taken for dead, each record is stored once."""
        with (
            open_mongodb_target(self.uri, stopped=False) as first,
            open_mongodb_target(self.uri, stopped=False) as last,
        ):
            archive = verify_archive(self.archive)
            records = [record for record, _ in archive.records()]
            self.assertEqual((first.begin(archive.id), last.begin(archive.id)), (0, 0))
            with self.assertRaises(BackupError):
                first.write(1, records)
            last.write(1, records)
            with self.assertRaises(BackupError):
                first.finish()
            last.finish()
        self.assertEqual(self.documents["accounts"].count_documents({}), 1)

    async def test_continues_after_server_outage(self) -> None:
        """The error is one line; once the server is back the same command continues."""
        servers = start_until_exit(ReplicaSet())
        uri = servers.uri("away")
        with open_mongodb_target(uri, stopped=False) as target:
            target.begin(verify_archive(self.archive).id)
        servers.kill(0)
        self.patch(mongo_records, "_SERVER_SELECTION_TIMEOUT_MS", 200)

        def import_into() -> None:
            with open_mongodb_target(uri, stopped=False) as target:
                import_archive(verify_archive(self.archive), target)

        self.assertIn("does not respond", await self.assert_refused(import_into))
        servers.start(0)
        self.patch(mongo_records, "_SERVER_SELECTION_TIMEOUT_MS", 60_000)
        await self.run_in_thread(import_into)
        self.assertEqual(servers.client["away"]["accounts"].count_documents({}), 1)

    async def test_export_is_a_snapshot(self) -> None:
        """An export has the data of its start, however long it takes."""
        store = await self.open_store()
        await self.enqueue_ids(store, "before")
        with open_mongodb_source(self.uri, offline=False, stopped=False) as source:
            counts = source.counts()
            await store.acknowledge(ALICE, ["before"])
            await self.enqueue_ids(store, "after")
            found = [record.id for record in source.records() if isinstance(record, MessageRecord)]
            self.assertEqual(source.counts(), counts)
        self.assertEqual(found, ["before"])
        await store.close()

    async def test_expired_snapshot(self) -> None:
        """An expired snapshot is reported, with a remedy."""
        store = await self.open_store()
        await store.close()
        with self.servers.failpoint("find", errorCode=239, times=1):
            error = await self.assert_refused(lambda: export_store(self.uri, self.archive.with_name("c.gz")))
        self.assertIn("minSnapshotHistoryWindowInSeconds", error)
        self.assertFalse(self.archive.with_name("c.gz").exists())


class CredentialTests(MongoTestCase):
    """A server with access control."""

    def choose_servers(self) -> ReplicaSet:
        return authenticated_server()

    async def test_read_write_user_suffices(self) -> None:
        """A user with readWrite suffices for everything, also to continue; another user is told of missing rights."""
        folder = Path(mkdtemp(prefix="mediatord-transfer-"))
        self.addCleanup(rmtree, folder)
        create: dict[str, Any] = {"pwd": "p4ss", "roles": ["readWrite"], "mechanisms": ["SCRAM-SHA-1"]}
        self.documents.command("createUser", "mover", **create)
        self.addCleanup(self.documents.command, "dropUser", "mover")
        uri = self.servers.uri(self.database, credentials="mover:p4ss", authSource=self.database)
        archive = folder / "a.gz"
        write_archive(
            archive, "sqlite", [AccountRecord(number=1, did="did:a", created_at=1.0, draft03=False, seen_at=2.0)]
        )

        def transfer() -> None:
            with open_mongodb_target(uri, stopped=False) as target:
                target.begin(verify_archive(archive).id)
            with open_mongodb_target(uri, stopped=False) as target:
                import_archive(verify_archive(archive), target)
            export_store(uri, folder / "b.gz")

        await self.run_in_thread(transfer)
        self.assertEqual(list(verify_archive(folder / "b.gz").records()), list(verify_archive(archive).records()))
        wrong_uri = uri.replace("p4ss", "wrong")
        with self.assertRaises(BackupError) as caught:
            await self.run_in_thread(export_store, wrong_uri, folder / "c.gz")
        self.assertIn("returned an error: AuthenticationFailed", str(caught.exception))
        self.assertNotIn("wrong", str(caught.exception))


def export_store(uri: str, path: Path, *, offline: bool = False) -> None:
    with open_mongodb_source(uri, offline=offline, stopped=False) as source:
        write_archive(path, source.backend, source.records())
