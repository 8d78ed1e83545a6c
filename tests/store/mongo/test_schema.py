"""Collections, indexes and versions of the MongoDB store."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pymongo.errors import OperationFailure
from twisted.internet.defer import Deferred, gatherResults

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.decentrl import ContractFilter, EventFilter, PageRequest, PublicEventFilter
from mediatord.store.interfaces.devices import WakeupPolicy, WakeupRequest
from mediatord.store.interfaces.messages import MessageLedger, StoreLedger
from mediatord.store.interfaces.store import StoreUnusable
from mediatord.store.mongo import schema
from mediatord.store.mongo import schema as schema_module
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.collection import Collection
from mediatord.store.mongo.driver.operation import Operation
from mediatord.store.mongo.schema import MESSAGES, RECIPIENTS, MongoMigration, MongoSchema
from mediatord.store.mongo.store import MongoStore
from tests.mongod import fresh_database
from tests.replica_set import ReplicaSet
from tests.store.mongo.mongo_test_case import (
    ALICE,
    CLOCK,
    INBOX,
    MAX_OPERATION_SECONDS,
    MongoTestCase,
    authenticated_server,
    wait_until,
)
from tests.store.mongo.snapshot import CONNECTION, DEVICE, FAR_FUTURE, RECORDED, WALLET, restore_snapshot

THINGS = Collection(
    "things",
    {
        "thing_name": {
            "key": {"name": 1, "place": -1},
            "unique": True,
            "partialFilterExpression": {"place": {"$gt": 1}},
        },
        "thing_end": {"key": {"end": 1}, "expireAfterSeconds": 60},
    },
)


class SchemaTestCase(MongoTestCase):
    """A new database."""

    def setUp(self) -> None:
        super().setUp()
        fresh = fresh_database(self.servers)
        self.database = fresh.__enter__()
        self.addCleanup(fresh.__exit__, None, None, None)
        self.documents = self.servers.client[self.database]

    def list_indexes(self, collection: str) -> dict[str, Any]:
        """Definitions by name, without that of `_id`."""
        found = self.documents[collection].index_information()
        return {
            name: {key: value for key, value in one.items() if key != "v"}
            for name, one in found.items()
            if name != "_id_"
        }

    def read_version(self) -> Any:
        return self.documents["schema"].find_one()


class IndexTests(SchemaTestCase):
    """Missing indexes are created, and different ones rebuilt."""

    EXPECTED = {
        "thing_name": {
            "key": [("name", 1), ("place", -1)],
            "unique": True,
            "partialFilterExpression": {"place": {"$gt": 1}},
        },
        "thing_end": {"key": [("end", 1)], "expireAfterSeconds": 60},
    }

    async def prepare(self) -> None:
        server = self.make_client()
        await server.open(MongoSchema([THINGS]).prepare)
        self.assertEqual(self.list_indexes("things"), self.EXPECTED)

    async def test_creates_indexes_of_new_database(self) -> None:
        """All collections and indexes exist once the store is open, with their version."""
        await self.open_store()
        for collection in schema.ALL_COLLECTIONS:
            self.assertEqual(set(self.list_indexes(collection.name)), set(collection.indexes))
        self.assertEqual(self.read_version(), {"_id": "schema", "version": 3, "readable_from": 1})

    async def test_reopening_changes_nothing(self) -> None:
        """Opening it again changes nothing."""
        await self.prepare()
        await self.prepare()

    async def test_recreates_missing_index(self) -> None:
        """A dropped index is created again."""
        await self.prepare()
        self.documents["things"].drop_index("thing_name")
        await self.prepare()

    async def test_rebuilds_index_with_other_definition(self) -> None:
        """An index with another definition is rebuilt."""
        for other in (
            {"keys": [("place", -1), ("name", 1)], "unique": True},
            {"keys": [("name", 1), ("place", -1)]},
            {"keys": [("name", 1), ("place", 1)], "unique": True, "partialFilterExpression": {"place": {"$gt": 1}}},
        ):
            self.documents["things"].drop_indexes()
            self.documents["things"].create_index(name="thing_name", **other)
            await self.prepare()

    async def test_replaces_index_with_other_name(self) -> None:
        """An index with another name is replaced."""
        self.documents["things"].create_index([("end", 1)], name="end_1", expireAfterSeconds=60)
        await self.prepare()

    async def test_rebuilds_index_with_other_expiry(self) -> None:
        """An index with another expiry is rebuilt."""
        for time in (61, 10_000):
            self.documents["things"].drop_indexes()
            self.documents["things"].create_index([("end", 1)], name="thing_end", expireAfterSeconds=time)
            await self.prepare()

    async def test_waits_for_build_in_progress(self) -> None:
        """A build in progress is awaited, and needs a majority of the members."""
        self.documents["things"].insert_many([{"name": number, "place": 2} for number in range(100)])
        hang = {"configureFailPoint": "hangAfterStartingIndexBuild"}
        self.servers.client.admin.command({**hang, "mode": "alwaysOn"})
        server = self.make_client()
        try:
            first = self.run_in_thread(self.build_unique_partial_index)
            await wait_until(lambda: self.count_builds() == 1)
            server.open(MongoSchema([THINGS]).prepare)
            await wait_until(lambda: self.count_builds() == 2)
            self.assertFalse(server.is_available)
        finally:
            self.servers.client.admin.command({**hang, "mode": "off"})
        await first
        await wait_until(lambda: server.is_available)
        self.assertEqual(self.list_indexes("things"), self.EXPECTED)
        self.assertTrue(any("building indexes of things: thing_name, thing_end" in line for line in self.log_lines))

    async def test_replaces_build_of_other_definition(self) -> None:
        """A build in progress with another definition is replaced."""
        self.documents["things"].create_index([("end", 1)], name="thing_end", expireAfterSeconds=60)
        self.documents["things"].insert_many([{"name": number, "place": 2} for number in range(100)])
        hang = {"configureFailPoint": "hangAfterStartingIndexBuild"}
        self.servers.client.admin.command({**hang, "mode": "alwaysOn"})
        try:
            other = self.run_in_thread(self.documents["things"].create_index, [("place", 1)], name="thing_name")
            await wait_until(lambda: any("buildUUID" in index for index in self.list_index_descriptions()))
            opened = self.make_client().open(MongoSchema([THINGS]).prepare)
            await wait_until(lambda: any("rebuilding index thing_name" in line for line in self.log_lines))
        finally:
            self.servers.client.admin.command({**hang, "mode": "off"})
        await self.assertFailure(other, OperationFailure)
        await opened
        self.assertEqual(self.list_indexes("things"), self.EXPECTED)

    async def test_build_outlives_time_limit(self) -> None:
        """A build that exceeds the time limit goes on, and the next start waits for the same."""
        self.documents["things"].insert_many([{"name": number, "place": 2} for number in range(100)])
        time_limit = self.patch(schema_module, "_BUILD_TIMEOUT", 3.0)
        hang = {"configureFailPoint": "hangAfterStartingIndexBuild"}
        self.servers.client.admin.command({**hang, "mode": "alwaysOn"})
        builds: list[Any] = []
        try:
            for _ in range(2):
                with self.assertRaises(StoreUnavailable):
                    await self.make_client().open(MongoSchema([THINGS]).prepare)
                builds += [index["buildUUID"] for index in self.list_index_descriptions() if "buildUUID" in index]
        finally:
            self.servers.client.admin.command({**hang, "mode": "off"})
        time_limit.restore()
        # Both indexes are built together.
        self.assertEqual((len(builds), len(set(builds))), (4, 1))
        await self.prepare()

    async def test_index_exists_until_replaced(self) -> None:
        """An index that is to be replaced exists while others are built, for queries that name it."""
        self.documents["things"].insert_many([{"name": number, "place": 2} for number in range(100)])
        self.documents["things"].create_index([("end", 1)], name="thing_end", expireAfterSeconds=61)
        hang = {"configureFailPoint": "hangAfterStartingIndexBuild"}
        self.servers.client.admin.command({**hang, "mode": "alwaysOn"})
        try:
            opened = self.make_client().open(MongoSchema([THINGS]).prepare)
            await wait_until(lambda: self.count_builds() == 1)
            self.assertIn("thing_end", [index.get("name") for index in self.list_index_descriptions()])
        finally:
            self.servers.client.admin.command({**hang, "mode": "off"})
        await opened
        self.assertEqual(self.list_indexes("things"), self.EXPECTED)

    def list_index_descriptions(self) -> list[Any]:
        """Its indexes, with those that are being built."""
        reply = self.documents.command({"listIndexes": "things", "includeBuildUUIDs": True})
        found: list[Any] = reply["cursor"]["firstBatch"]
        return found

    def build_unique_partial_index(self) -> None:
        self.documents["things"].create_index(
            [("name", 1), ("place", -1)],
            name="thing_name",
            unique=True,
            partialFilterExpression={"place": {"$gt": 1}},
        )

    def count_builds(self) -> int:
        """Number of builds of our collection."""
        operations = self.servers.client.admin.command("currentOp")["inprog"]
        commands = [operation.get("command", {}) for operation in operations if "client" in operation]
        wanted = [
            command
            for command in commands
            if command.get("createIndexes") == "things" and command["$db"] == self.database
        ]
        return len(wanted)

    async def test_keeps_unknown_indexes(self) -> None:
        """Unknown indexes stay."""
        self.documents["things"].create_index([("other", 1)], name="theirs")
        with self.assertRaises(AssertionError):
            await self.prepare()
        self.assertEqual(self.list_indexes("things").pop("theirs"), {"key": [("other", 1)]})

    async def test_concurrent_starts_succeed(self) -> None:
        """Several nodes that start on a new database at the same time all succeed."""
        servers = [self.make_client() for _ in range(5)]
        self.documents["things"].create_index([("name", 1)], name="thing_name")
        await gatherResults([server.open(MongoSchema([THINGS]).prepare) for server in servers])
        self.assertEqual(self.list_indexes("things"), self.EXPECTED)

    async def test_does_not_wait_for_missing_reply(self) -> None:
        """A server that does not list its indexes is not awaited."""
        self.patch(schema_module, "_COMMAND_TIMEOUT", 0.3)
        server, start = self.make_client(), CLOCK.seconds()
        with self.silence_command("listIndexes"):
            with self.assertRaises(StoreUnavailable):
                await server.open(MongoSchema([THINGS]).prepare)
            self.assertLess(CLOCK.seconds() - start, MAX_OPERATION_SECONDS)

    async def test_duplicates_prevent_start(self) -> None:
        """Documents that violate a unique index prevent the start, with an error that names the index."""
        self.documents["things"].insert_many([{"name": 1, "place": 2}, {"name": 1, "place": 2}])
        server = self.make_client()
        with self.assertRaisesRegex(StoreUnusable, "cannot create index thing_name of the MongoDB collection things"):
            await server.open(MongoSchema([THINGS]).prepare)
        self.assertFalse(server.is_available)


class AuthorizationTests(MongoTestCase):
    """A user with the role `readWrite` only."""

    def choose_servers(self) -> ReplicaSet:
        return authenticated_server()

    def create_user(self, user: str) -> str:
        """The URI of a new user."""
        self.documents.command("createUser", user, pwd="p4ss", roles=["readWrite"], mechanisms=["SCRAM-SHA-1"])
        self.addCleanup(self.documents.command, "dropUser", user)
        return self.servers.uri(self.database, credentials=f"{user}:p4ss", authSource=self.database)

    async def test_rebuilds_index_with_role_read_write(self) -> None:
        """An index with another expiry can be rebuilt by that user."""
        await (await self.open_store(uri=self.create_user("node"))).close()
        leases = self.documents["leases"]
        wanted = leases.index_information()
        leases.drop_index("lease_end")
        leases.create_index([("until", 1)], name="lease_end", expireAfterSeconds=1)
        await self.open_store(uri=self.servers.uri(self.database, credentials="node:p4ss", authSource=self.database))
        self.assertEqual(leases.index_information(), wanted)

    async def test_warns_once_of_different_users(self) -> None:
        """Nodes with different users warn once, as neither can abort the transactions of the other."""
        one, other = self.create_user("one"), self.create_user("other")
        await self.open_store(uri=one)
        self.assertEqual(self.list_warnings(), [])
        store = await self.open_store(uri=other)
        (warning,) = self.list_warnings()
        self.assertIn(f"MongoDB as user other@{self.database}, another node as one@{self.database}", warning)
        await self.open_store(uri=one)
        await store.open()
        self.assertEqual(len(self.list_warnings()), 2)

    def list_warnings(self) -> list[str]:
        return [line for line in self.log_lines if "the same user" in line]


class QuorumTests(SchemaTestCase):
    """Three servers, one of which is down."""

    def choose_servers(self) -> ReplicaSet:
        servers = ReplicaSet(3)
        servers.open()
        self.addCleanup(servers.close)
        return servers

    async def test_builds_index_without_stopped_member(self) -> None:
        """An index is built without the member that is down."""
        self.documents["things"].insert_one({"name": 1, "place": 2})
        away = next(number for number in range(3) if number != self.servers.primary())
        await self.run_in_thread(self.servers.kill, away)
        server = self.make_client()
        server.open(MongoSchema([THINGS]).prepare)
        await wait_until(lambda: server.is_available)
        self.assertEqual(set(self.list_indexes("things")), {"thing_name", "thing_end"})


async def _name_places(run: Operation) -> None:
    await run.write(RECIPIENTS.update({}, {"$set": {"place": "here"}}, multi=True))


async def _count_places(run: Operation) -> None:
    await run.write(Collection("counts").update({"_id": 1}, {"$inc": {"n": 1}}, upsert=True))


RENAME_MIGRATION = MongoMigration(_name_places, readable_from=1)
COUNT_MIGRATION = MongoMigration(_count_places, readable_from=4)


class UpgradeTests(SchemaTestCase):
    """Two versions with different indexes at the same time."""

    OTHERS = Collection("things", {**THINGS.indexes, "thing_name": {"key": {"name": 1}}})

    def setUp(self) -> None:
        super().setUp()
        self.migrating: Deferred[None] = Deferred()
        self.migrate: Deferred[None] = Deferred()

    async def take_time(self, run: Operation) -> None:
        self.migrating.callback(None)
        await self.migrate

    def open_version(self, schema: MongoSchema) -> Deferred[None]:
        return self.make_client().open(schema.prepare)

    def make_next_version(self, readable_from: int = 1) -> MongoSchema:
        return MongoSchema([self.OTHERS], [MongoMigration(self.take_time, readable_from)])

    def assert_next_version(self) -> None:
        self.assertEqual(self.list_indexes("things")["thing_name"], {"key": [("name", 1)]})
        self.assertEqual(self.read_version(), {"_id": "schema", "version": 2, "readable_from": 1})

    async def test_older_version_starts_during_migration(self) -> None:
        """The older version leaves changed definitions alone, and creates what is missing."""
        await self.open_version(MongoSchema([THINGS]))
        newer = self.open_version(self.make_next_version())
        await self.migrating
        self.documents["things"].drop_index("thing_end")
        await self.open_version(MongoSchema([THINGS]))
        self.assertEqual(self.list_indexes("things")["thing_name"], {"key": [("name", 1)]})
        self.assertIn("thing_end", self.list_indexes("things"))
        self.migrate.callback(None)
        await newer
        self.assert_next_version()

    async def test_repairs_changes_of_older_version(self) -> None:
        """What the older version undoes before the announcement is repaired."""
        newer = self.open_version(self.make_next_version())
        await self.migrating
        self.documents["things"].drop_index("thing_name")
        self.documents["things"].create_index([("name", 1), ("place", -1)], name="thing_name")
        self.migrate.callback(None)
        await newer
        self.assert_next_version()

    async def test_concurrent_start_of_both_versions(self) -> None:
        """Both versions can start concurrently, in any order."""
        self.migrate.callback(None)
        for order in (1, -1):
            self.migrating = Deferred()
            self.documents["schema"].delete_many({})
            self.documents["things"].drop()
            await gatherResults(
                [self.open_version(schema) for schema in (MongoSchema([THINGS]), self.make_next_version())[::order]]
            )
            self.assert_next_version()

    async def test_rejects_incompatible_migration(self) -> None:
        """A database that is being migrated to an incompatible version is rejected."""
        newer = self.open_version(self.make_next_version(readable_from=2))
        await self.migrating
        with self.assertRaisesRegex(StoreUnusable, "its schema version is 2, but this release supports at most 1"):
            await self.open_version(MongoSchema([THINGS]))
        self.migrate.callback(None)
        await newer


class VersionTests(SchemaTestCase):
    """Databases of other versions."""

    async def test_runs_missing_migrations_once(self) -> None:
        """Missing migrations are run in order, once, and keep the data."""
        old = await self.open_store()
        await self.enqueue_ids(old, "a")
        await old.close()
        for _ in range(2):
            store = await self.open_store(migrations=(RENAME_MIGRATION, COUNT_MIGRATION))
            self.assertEqual(self.list_queued(), ["a"])
            await store.close()
        self.assertEqual(self.read_version(), {"_id": "schema", "version": 5, "readable_from": 4})
        self.assertEqual([document["place"] for document in self.documents["recipients"].find()], ["here"])
        self.assertEqual(self.documents["counts"].find_one(), {"_id": 1, "n": 1})

    async def test_versions_run_side_by_side(self) -> None:
        """Nodes of this version and the next use one database at the same time, in any order of start."""
        for _ in range(2):
            current = await self.open_store()
            newer = await self.open_store(migrations=(RENAME_MIGRATION,))
            again = await self.open_store()
            await gatherResults([self.enqueue_ids(store, f"m{n}") for n, store in enumerate((current, newer, again))])
            self.assertEqual(sorted(self.list_queued()), ["m0", "m1", "m2"])
            for store in (current, newer, again):
                self.assertEqual(await store.find_owner(INBOX), ALICE)
                await store.acknowledge(ALICE, ["m0", "m1", "m2"])
                await store.close()
        self.assertEqual(self.read_version(), {"_id": "schema", "version": 4, "readable_from": 1})

    async def test_opens_snapshot_of_every_version(self) -> None:
        """A database of any recorded version is used by the next, with all data."""
        for version in RECORDED:
            for collection in self.documents.list_collection_names():
                self.documents.drop_collection(collection)
            restore_snapshot(self.documents, version)
            store = await self.open_store(migrations=(RENAME_MIGRATION,))
            await self.assert_snapshot_data(store)
            if version > 1:
                self.assertEqual(await store.devices.list_devices(ALICE), [DEVICE])
                (decision,) = await store.devices.claim_wakeups([WakeupRequest(ALICE)], WakeupPolicy(1.0, FAR_FUTURE))
                assert isinstance(decision, float)
                self.assertGreater(decision, FAR_FUTURE / 2)
            if version > 2:
                found = await store.v1_connections.get_connection(CONNECTION.account)
                assert found is not None
                self.assertEqual(replace(found, created_at=0.0), CONNECTION)
                self.assertEqual(await store.v1_connections.count_connections(), (0, 1))
            await store.close()

    async def test_former_versions_run_side_by_side(self) -> None:
        """Nodes of former versions, which do not know all collections, use a database of this one, in any order."""
        added: list[tuple[Collection, ...]] = [(schema.DEVICES, schema.WAKEUPS), (schema.V1_CONNECTIONS,)]
        formers = []
        for number in (1, 2):
            unknown = [one for some in added[number - 1 :] for one in some]
            known = [one for one in schema.ALL_COLLECTIONS if one not in unknown]
            formers.append(MongoSchema(known, schema.MIGRATIONS[: number - 1]))
        for number, former in enumerate(formers, 1):
            await self.make_client().open(former.prepare)
            self.assertEqual(self.read_version()["version"], number)
        store = await self.open_store()
        await store.devices.set_device(ALICE, DEVICE, 1)
        await store.v1_connections.put_connection(CONNECTION, max_pending=1)
        for former in formers * 2:
            await self.make_client().open(former.prepare)
            self.assertEqual(self.read_version(), {"_id": "schema", "version": 3, "readable_from": 1})
            for collection in (schema.DEVICES, schema.V1_CONNECTIONS):
                self.assertEqual(set(self.list_indexes(collection.name)), set(collection.indexes))
            await store.close()
            await store.open()
            self.assertEqual(await store.devices.list_devices(ALICE), [DEVICE])
            self.assertEqual(await store.v1_connections.count_connections(), (0, 1))

    async def assert_snapshot_data(self, store: MongoStore) -> None:
        self.assertEqual([line for line in self.log_lines if "rebuilding" in line], [])
        self.assertEqual(self.list_queued(), ["m", "left-over"])
        (found,) = await store.fetch_messages(ALICE, None, limit=9, max_bytes=99)
        self.assertEqual((found.id, found.payload, found.status), ("m", b"{}", "pending"))
        self.assertEqual(await store.list_recipients(ALICE, offset=0, limit=9), ([INBOX], 1))
        self.assertEqual(await store.get_account("did:example:old"), None)
        self.assertTrue((await store.grant("did:example:new")).draft03)
        self.assertFalse(await store.claim_nonce(b"nonce", CLOCK.seconds() + 1))
        self.assertEqual(await store.recall_did("did:peer:4z"), "did:peer:4z:long")
        self.assertEqual(await store.queue_sizes(1), ([("did:example:wallet", 1)], 2))
        self.assertEqual(
            (await store.decentrl.pending_events(WALLET, None, PageRequest())).items[0].payload, "payload"
        )
        self.assertEqual((await store.decentrl.contract_requests(WALLET, PageRequest())).total, 1)
        self.assertEqual((await store.decentrl.contracts(WALLET, ContractFilter(), PageRequest())).total, 1)
        self.assertEqual((await store.decentrl.events(WALLET, EventFilter(tags=("tag",)), PageRequest())).total, 1)
        self.assertEqual((await store.decentrl.public_events(WALLET, PublicEventFilter(), PageRequest())).total, 1)
        ledger = StoreLedger(MessageLedger(accepted=2, waiting=2), MessageLedger(accepted=1, waiting=1))
        self.assertEqual(await store.read_ledger(), ledger)

    async def test_does_not_change_incompatible_version(self) -> None:
        """A database of an incompatible version is not changed."""
        newer = await self.open_store(migrations=(RENAME_MIGRATION, COUNT_MIGRATION))
        await newer.close()
        self.documents["messages"].drop_index("message_expiry")
        server: ReplicaSetClient = self.make_client()
        with self.assertRaisesRegex(StoreUnusable, "its schema version is 5, but this release supports at most 3"):
            await self.open_store(server=server)
        self.assertFalse(server.is_available)
        self.assertNotIn("message_expiry", self.list_indexes("messages"))
        await self.open_store(migrations=(RENAME_MIGRATION,))

    async def test_failed_migration_is_repeated(self) -> None:
        """A migration that fails is run when the store is opened again."""
        await self.open_store()
        with self.servers.failpoint("update", errorCode=8, times=1):
            with self.assertRaises(StoreUnavailable):
                await self.open_store(migrations=(RENAME_MIGRATION,))
        self.assertEqual(self.read_version()["version"], 3)
        await self.open_store(migrations=(RENAME_MIGRATION,))
        self.assertEqual(self.read_version()["version"], 4)

    async def test_migration_may_use_any_command(self) -> None:
        """Migrations may use any command."""
        done: list[Any] = []

        async def ask(run: Operation) -> None:
            done.append(await run.command(MESSAGES.count()))

        await self.open_store(migrations=(MongoMigration(ask, readable_from=1),))
        self.assertEqual([result["n"] for result in done], [0])
