"""Exports from every backend and imports into every other: the query results are the same."""

from __future__ import annotations

from pathlib import Path
from random import Random
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

from twisted.internet.defer import Deferred

from mediatord.backup.archive import import_archive, verify_archive, write_archive
from mediatord.backup.mongo_records import open_mongodb_source, open_mongodb_target
from mediatord.backup.records import StoreRecord
from mediatord.backup.sqlite_records import open_sqlite_source, open_sqlite_target
from mediatord.store.interfaces.devices import WakeupClaim, WakeupRequest
from mediatord.store.interfaces.messages import Payload, QueueLimits
from mediatord.store.interfaces.store import IStore
from mediatord.store.interfaces.v1_connections import V1Connection
from mediatord.store.mongo.store import MongoStore
from tests.backup.populated_store import (
    IDENTITIES,
    INBOXES,
    WAKEUP_POLICY,
    WALLETS,
    StorePopulator,
    acknowledge_everything,
    query_devices,
    query_everything,
    query_v1_connections,
)
from tests.mongod import fresh_database
from tests.store.builders import make_sqlite_store
from tests.store.mongo.mongo_test_case import CLOCK, MongoTestCase, run_coroutine

ROUNDS = 60


class StoreLocation:
    """Location of a store."""

    def __init__(self, case: MongoTestCase, where: Path | str) -> None:
        self._case = case
        self._where = where

    def open_source(self, *, offline: bool = False) -> Any:
        """Open for export."""
        if isinstance(self._where, Path):
            return open_sqlite_source(self._where)
        return open_mongodb_source(self._get_uri(), offline=offline, stopped=False)

    def open_target(self) -> Any:
        """Open for import."""
        return (
            open_sqlite_target(self._where)
            if isinstance(self._where, Path)
            else open_mongodb_target(self._get_uri(), stopped=False)
        )

    async def open_store(self) -> IStore:
        """Open as a daemon does."""
        if isinstance(self._where, Path):
            store: IStore = make_sqlite_store(CLOCK, self._where)
        else:
            store = MongoStore(self._case.make_client(self._get_uri()), CLOCK, QueueLimits())
        await store.open()
        return store

    def _get_uri(self) -> str:
        assert isinstance(self._where, str)
        return self._case.servers.uri(self._where)


class AcrossBackendsTests(MongoTestCase):
    """Each test uses a real server."""

    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(mkdtemp(prefix="mediatord-transfer-"))
        self.addCleanup(rmtree, self.folder)

    def make_sqlite(self, name: str) -> StoreLocation:
        return StoreLocation(self, self.folder / f"{name}.sqlite3")

    def make_mongodb(self) -> StoreLocation:
        database = fresh_database(self.servers)
        name = database.__enter__()
        self.addCleanup(database.__exit__, None, None, None)
        return StoreLocation(self, name)

    async def fill(self, location: StoreLocation) -> dict[str, Any]:
        """Fill a store; return its query results after it was reopened."""
        store = await location.open_store()
        populator = StorePopulator(store, Random(7), CLOCK.seconds())
        await populator.fill(ROUNDS)
        await populator.register_devices()
        await populator.connect_v1_wallets()
        await store.close()
        return await self.query(location)

    async def query(self, location: StoreLocation) -> dict[str, Any]:
        store = await location.open_store()
        devices = await query_devices(store)
        # MongoDB does not know when an imported message has arrived by the clock of its server.
        del devices["owed wake-ups"]
        results = await query_everything(store) | devices | await query_v1_connections(store)
        await store.close()
        return results

    def transfer(self, source: StoreLocation, target: StoreLocation, name: str) -> Path:
        """Export and import; return the archive."""
        archive = self.folder / f"{name}.gz"
        with source.open_source() as store:
            counts = write_archive(archive, store.backend, store.records())
            self.assertEqual(counts, store.counts())
        self.assertTrue(all(counts.values()), counts)
        with target.open_target() as store:
            self.assertEqual(import_archive(verify_archive(archive, accept=store.accept), store), counts)
        return archive

    async def round_trip(self, one: StoreLocation, other: StoreLocation, back: StoreLocation) -> None:
        results = await self.fill(one)
        exported = await self.run_in_thread(self.transfer, one, other, "there")
        self.assertEqual(await self.query(other), results)
        exported_again = await self.run_in_thread(self.transfer, other, back, "again")
        self.assertEqual(read_records(exported_again), read_records(exported))
        self.assertEqual(await self.query(back), results)
        self.assertFalse([line for line in self.log_lines if "building indexes" in line])
        await self.assert_continues(back)
        await self.assert_continues(other)

    async def assert_continues(self, location: StoreLocation) -> None:
        """New messages come last, claims are remembered, and counters of visible messages return to zero."""
        store = await location.open_store()
        self.assertFalse(await store.claim_nonce(b"nonce 1", 1.0))
        self.assertTrue(await store.claim_nonce(b"another", CLOCK.seconds() + 60))
        owners = {inbox: await store.find_owner(inbox) for inbox in INBOXES}
        inbox, owner = next((inbox, owner) for inbox, owner in owners.items() if owner is not None)
        await store.enqueue(inbox, [Payload("zz-last", b"x", "json")], expires_at=CLOCK.seconds() + 60)
        found = await store.fetch_messages(owner, None, limit=10_000, max_bytes=1 << 40)
        self.assertEqual(found[-1].id, "zz-last")
        await store.update_recipients(owner, [("did:key:z6MkLast", "add")], max_recipients=1000)
        registered, number = await store.list_recipients(owner, offset=0, limit=1000)
        self.assertEqual((registered[-1], number), ("did:key:z6MkLast", len(registered)))
        await self.assert_wakes(store)
        await self.assert_counts_connections(store)
        await acknowledge_everything(store)
        for wallet in WALLETS:
            self.assertEqual((await store.get_queue_status(wallet, None)).message_count, 0)
        _, remaining = await store.queue_sizes(0)
        self.assertEqual(remaining, (await store.get_queue_totals()).messages)
        await store.close()

    async def assert_wakes(self, store: IStore) -> None:
        """Claims are gone, and owners of devices are not woken after a poll."""
        woken = [owner for owner in (*WALLETS, *IDENTITIES) if await store.devices.list_devices(owner)]
        later = [WakeupRequest(owner, -60.0) for owner in woken]
        decisions = await store.devices.claim_wakeups(later, WAKEUP_POLICY)
        self.assertTrue(any(isinstance(one, WakeupClaim) for one in decisions))
        self.assertFalse(any(isinstance(one, float) for one in decisions))
        await store.devices.record_polls(dict.fromkeys(woken, 0.0))
        earlier = [WakeupRequest(owner, 60.0) for owner in woken]
        decisions = await store.devices.claim_wakeups(earlier, WAKEUP_POLICY)
        self.assertEqual(set(decisions), {None})

    async def assert_counts_connections(self, store: IStore) -> None:
        """Connections are known to have an account or not: those expire, and the others are removed with it."""
        connections = store.v1_connections
        with_account, pending = await connections.count_connections()
        another = V1Connection("did:key:z6MkMore", "did:key:z6MkMoreOwn", "request")
        await connections.put_connection(another, max_pending=pending)
        self.assertEqual(await connections.count_connections(), (with_account, pending))
        expired = 0
        while number := await connections.expire_connections(CLOCK.seconds() + 60.0, 2):
            expired += number
        self.assertEqual((await connections.count_connections(), expired), ((with_account, 0), pending))
        left = await connections.scan_connections("", 100)
        self.assertEqual(len(left), with_account)
        self.assertTrue(await store.administration.remove_account(left[0].account))
        self.assertEqual(await connections.count_connections(), (with_account - 1, 0))

    def test_sqlite_mongodb_sqlite(self) -> Deferred[None]:
        """A round trip has the same records and the same results."""
        return run_coroutine(self.round_trip(self.make_sqlite("a"), self.make_mongodb(), self.make_sqlite("b")))

    def test_mongodb_sqlite_mongodb(self) -> Deferred[None]:
        """The same, starting from the other backend."""
        return run_coroutine(self.round_trip(self.make_mongodb(), self.make_sqlite("a"), self.make_mongodb()))

    def test_sqlite_sqlite(self) -> Deferred[None]:
        """The same with one backend."""
        return run_coroutine(self.round_trip(self.make_sqlite("a"), self.make_sqlite("b"), self.make_sqlite("c")))

    def test_mongodb_mongodb(self) -> Deferred[None]:
        """The same with one backend."""
        return run_coroutine(self.round_trip(self.make_mongodb(), self.make_mongodb(), self.make_mongodb()))


def read_records(path: Path) -> list[StoreRecord]:
    return [record for record, _ in verify_archive(path).records()]
