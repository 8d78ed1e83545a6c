"""What an import into MongoDB, or an export from there, does not do, and as whom it can be done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

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
)
from mediatord.store.interfaces.cluster_and_quotas import ClusterNode
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import Account as InterfaceAccount
from mediatord.store.interfaces.store import StoreUnusable
from mediatord.store.mongo.store import MongoStore
from tests.replica_set import ReplicaSet
from tests.store.mongo.mongo_test_case import ALICE, CLOCK, MongoTestCase, authenticated_server, start_until_exit


class RefusalTests(MongoTestCase):
    """What an import into MongoDB, or an export from there, does not do."""

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

    def imported(
        self, archive: Path, *, stopped: bool = False, tell: ProgressCallback = ignore_progress
    ) -> RecordCounts:
        with open_mongodb_target(self.uri, stopped=stopped) as target:
            return import_archive(verify_archive(archive), target, tell)

    def refused(self, work: Callable[[], object]) -> Deferred[str]:
        """What is said."""
        return self.run_in_thread(lambda: str(self.assertRaises(BackupError, work)))

    async def test_what_is_kept_is_in_the_way(self) -> None:
        """An import wants an empty store; what it had is as it was."""
        store = await self.open_store()
        await store.close()
        said = await self.refused(lambda: self.imported(self.archive))
        self.assertIn("is not empty (1 accounts, 1 recipient DIDs)", said)
        self.assertEqual(self.documents["accounts"].count_documents({}), 1)
        await (await self.open_store()).close()

    def test_what_is_too_large(self) -> None:
        """Is refused before anything is written, whether it is one text or many."""
        event = StoredEventRecord(
            id="e", owner="o", sender="s", recipient="r", timestamp=1.0, contract_id=None, processed=False,
            tags=(), payload="",
        )  # fmt: skip
        with open_mongodb_target(self.uri, stopped=False) as target:
            target.accept(event)
            target.accept(event.model_copy(update={"tags": ("tag",) * 1000}))
            for more in ({"payload": "x" * (17 << 20)}, {"tags": ("tag",) * 1_200_000}):
                with self.assertRaisesRegex(InvalidArchiveError, "larger than MongoDB takes"):
                    target.accept(event.model_copy(update=more))

    async def test_daemons_are_in_the_way(self) -> None:
        """One that runs; one that was killed is believed to run until the operator says that it does not."""
        server = self.make_client()
        store = MongoStore(server, CLOCK, QueueLimits())
        await store.open()
        said = await self.refused(lambda: self.imported(self.archive))
        self.assertIn("a daemon uses the MongoDB database", said)
        await store.cluster.join(ClusterNode("north", "boot", "tcp:127.0.0.1:9", b"seal"), 3600.0)
        said = await self.refused(lambda: self.imported(self.archive, stopped=True))
        self.assertIn("nodes use the MongoDB database (north)", said)
        said = await self.refused(lambda: exported(self.uri, self.archive.with_name("c.gz"), offline=True))
        self.assertIn("nodes use the MongoDB database (north)", said)
        await store.cluster.drop("boot", until=float("inf"))
        await self.run_in_thread(self.imported, self.archive, stopped=True)
        await store.close()

    async def test_a_daemon_refuses_what_is_not_finished(self) -> None:
        """As does another archive, and an export; the same one is brought to its end, and then a daemon starts."""

        class Interrupted(Exception):
            pass

        def interrupt(done: int) -> None:
            raise Interrupted

        await self.run_in_thread(self.assertRaises, Interrupted, self.imported, self.archive, tell=interrupt)
        with self.assertRaises(StoreUnusable) as caught:
            await MongoStore(self.make_client(), CLOCK, QueueLimits()).open()
        self.assertIn("an import into it is not finished", str(caught.exception))
        self.assertIn("another archive", await self.refused(lambda: self.imported(self.other)))
        said = await self.refused(lambda: exported(self.uri, self.archive.with_name("c.gz")))
        self.assertIn("is not finished", said)
        await self.run_in_thread(self.imported, self.archive)
        store = MongoStore(self.make_client(), CLOCK, QueueLimits())
        await store.open()
        self.assertEqual(await store.get_account("did:a"), InterfaceAccount("did:a", 1.0))
        await store.close()

    async def test_a_daemon_that_begins_meanwhile_ends_the_import(self) -> None:
        """It had looked before the import began; nothing is written beside it."""
        with open_mongodb_target(self.uri, stopped=False) as target:
            archive = verify_archive(self.archive)
            target.begin(archive.id)
            self.documents["session_owners"].insert_one({"_id": "somebody"})
            with self.assertRaises(BackupError):
                target.write(1, [record for record, _ in archive.records()])
        self.assertEqual(self.documents["accounts"].count_documents({}), 0)
        self.documents["schema"].delete_many({})

    async def test_only_the_last_one_to_begin_writes(self) -> None:
        """Two imports of the same archive, of which the first is not dead after all: each record is there once."""
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

    async def test_a_server_that_is_away(self) -> None:
        """One line; when it is back, the same command goes on where it had stopped."""
        servers = start_until_exit(ReplicaSet())
        uri = servers.uri("away")
        with open_mongodb_target(uri, stopped=False) as target:
            target.begin(verify_archive(self.archive).id)
        servers.kill(0)
        self.patch(mongo_records, "_SERVER_SELECTION_TIMEOUT_MS", 200)

        def imported() -> None:
            with open_mongodb_target(uri, stopped=False) as target:
                import_archive(verify_archive(self.archive), target)

        self.assertIn("does not answer", await self.refused(imported))
        servers.start(0)
        self.patch(mongo_records, "_SERVER_SELECTION_TIMEOUT_MS", 60_000)
        await self.run_in_thread(imported)
        self.assertEqual(servers.client["away"]["accounts"].count_documents({}), 1)

    async def test_a_snapshot_does_not_see_what_comes_later(self) -> None:
        """An export is of the time when it began, however long it takes."""
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

    async def test_a_forgotten_snapshot(self) -> None:
        """The server keeps no history any more: that is said, with what can be done."""
        store = await self.open_store()
        await store.close()
        with self.servers.failpoint("find", errorCode=239, times=1):
            said = await self.refused(lambda: exported(self.uri, self.archive.with_name("c.gz")))
        self.assertIn("minSnapshotHistoryWindowInSeconds", said)
        self.assertFalse(self.archive.with_name("c.gz").exists())


class CredentialTests(MongoTestCase):
    """A server that takes nobody without credentials."""

    def choose_servers(self) -> ReplicaSet:
        return authenticated_server()

    async def test_a_user_who_may_read_and_write(self) -> None:
        """Is enough for all of it, even to go on; somebody else is told that he is refused."""
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

        def moved() -> None:
            with open_mongodb_target(uri, stopped=False) as target:
                target.begin(verify_archive(archive).id)
            with open_mongodb_target(uri, stopped=False) as target:
                import_archive(verify_archive(archive), target)
            exported(uri, folder / "b.gz")

        await self.run_in_thread(moved)
        self.assertEqual(list(verify_archive(folder / "b.gz").records()), list(verify_archive(archive).records()))
        wrong = uri.replace("p4ss", "wrong")
        with self.assertRaises(BackupError) as caught:
            await self.run_in_thread(exported, wrong, folder / "c.gz")
        self.assertIn("refused: AuthenticationFailed", str(caught.exception))
        self.assertNotIn("wrong", str(caught.exception))


def exported(uri: str, path: Path, *, offline: bool = False) -> None:
    with open_mongodb_source(uri, offline=offline, stopped=False) as source:
        write_archive(path, source.backend, source.records())
