"""From every backend to every other: what a store answers afterwards is what the other one answered."""

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
from mediatord.store.interfaces.messages import Payload, QueueLimits
from mediatord.store.interfaces.store import IStore
from mediatord.store.mongo.store import MongoStore
from tests.backup.populated_store import INBOXES, WALLETS, StorePopulator, acknowledge_everything, query_everything
from tests.mongod import fresh_database
from tests.store.builders import make_sqlite_store
from tests.store.mongo.mongo_test_case import CLOCK, MongoTestCase, run_coroutine

ROUNDS = 60


class StoreLocation:
    """Where a store is."""

    def __init__(self, case: MongoTestCase, where: Path | str) -> None:
        self._case = case
        self._where = where

    def source(self, *, offline: bool = False) -> Any:
        """To be exported."""
        if isinstance(self._where, Path):
            return open_sqlite_source(self._where)
        return open_mongodb_source(self._uri(), offline=offline, stopped=False)

    def target(self) -> Any:
        """To be imported into."""
        return (
            open_sqlite_target(self._where)
            if isinstance(self._where, Path)
            else open_mongodb_target(self._uri(), stopped=False)
        )

    async def opened(self) -> IStore:
        """By a daemon."""
        if isinstance(self._where, Path):
            store: IStore = make_sqlite_store(CLOCK, self._where)
        else:
            store = MongoStore(self._case.make_client(self._uri()), CLOCK, QueueLimits())
        await store.open()
        return store

    def _uri(self) -> str:
        assert isinstance(self._where, str)
        return self._case.servers.uri(self._where)


class BetweenStoresTests(MongoTestCase):
    """Each with a real server."""

    def setUp(self) -> None:
        super().setUp()
        self.folder = Path(mkdtemp(prefix="mediatord-transfer-"))
        self.addCleanup(rmtree, self.folder)

    def sqlite(self, name: str) -> StoreLocation:
        return StoreLocation(self, self.folder / f"{name}.sqlite3")

    def mongodb(self) -> StoreLocation:
        fresh = fresh_database(self.servers)
        name = fresh.__enter__()
        self.addCleanup(fresh.__exit__, None, None, None)
        return StoreLocation(self, name)

    async def filled(self, place: StoreLocation) -> dict[str, Any]:
        """Fill a store; its answers, once it has been opened anew."""
        store = await place.opened()
        await StorePopulator(store, Random(7), CLOCK.seconds()).fill(ROUNDS)
        await store.close()
        return await self.asked(place)

    async def asked(self, place: StoreLocation) -> dict[str, Any]:
        store = await place.opened()
        told = await query_everything(store)
        await store.close()
        return told

    def moved(self, source: StoreLocation, target: StoreLocation, name: str) -> Path:
        """Export and import; the archive."""
        archive = self.folder / f"{name}.gz"
        with source.source() as store:
            counts = write_archive(archive, store.backend, store.records())
            self.assertEqual(counts, store.counts())
        self.assertTrue(all(counts.values()), counts)
        with target.target() as store:
            self.assertEqual(import_archive(verify_archive(archive, accept=store.accept), store), counts)
        return archive

    async def round_trip(self, one: StoreLocation, other: StoreLocation, back: StoreLocation) -> None:
        told = await self.filled(one)
        there = await self.run_in_thread(self.moved, one, other, "there")
        self.assertEqual(await self.asked(other), told)
        again = await self.run_in_thread(self.moved, other, back, "again")
        self.assertEqual(records_of(again), records_of(there))
        self.assertEqual(await self.asked(back), told)
        self.assertFalse([line for line in self.log_lines if "building indexes" in line])
        await self.goes_on(back)
        await self.goes_on(other)

    async def goes_on(self, place: StoreLocation) -> None:
        """What comes afterwards comes last, claims are remembered, and counters come down to nothing that is seen."""
        store = await place.opened()
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
        await acknowledge_everything(store)
        for wallet in WALLETS:
            self.assertEqual((await store.get_queue_status(wallet, None)).message_count, 0)
        _, left = await store.queue_sizes(0)
        self.assertEqual(left, (await store.get_queue_totals()).messages)
        await store.close()

    def test_sqlite_mongodb_sqlite(self) -> Deferred[None]:
        """There and back: the same records, the same answers."""
        return run_coroutine(self.round_trip(self.sqlite("a"), self.mongodb(), self.sqlite("b")))

    def test_mongodb_sqlite_mongodb(self) -> Deferred[None]:
        """There and back from the other side."""
        return run_coroutine(self.round_trip(self.mongodb(), self.sqlite("a"), self.mongodb()))

    def test_sqlite_sqlite(self) -> Deferred[None]:
        """To the same backend."""
        return run_coroutine(self.round_trip(self.sqlite("a"), self.sqlite("b"), self.sqlite("c")))

    def test_mongodb_mongodb(self) -> Deferred[None]:
        """Likewise."""
        return run_coroutine(self.round_trip(self.mongodb(), self.mongodb(), self.mongodb()))


def records_of(path: Path) -> list[StoreRecord]:
    return [record for record, _ in verify_archive(path).records()]
