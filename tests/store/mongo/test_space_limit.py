"""Limits on the size of a MongoDB database and on the free space of its disk."""

from __future__ import annotations

import random
from typing import Any

from twisted.internet.defer import Deferred

from mediatord.errors import StoreUnavailable
from mediatord.store.disk_space import SpaceLimits
from mediatord.store.interfaces.decentrl import CommandGuard, Contract, DecentrlQuotas
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import StoreFault
from mediatord.store.mongo.space_limit import CHECK_INTERVAL, MongoSpaceLimit
from mediatord.store.mongo.store import MongoStore
from tests.store.mongo.mongo_test_case import ALICE, CLOCK, INBOX, WAIT_TIMEOUT, MongoTestCase, wait_until

BOB = "did:example:bob"
LIMIT_BYTES = 4_000_000


class SpaceTestCase(MongoTestCase):
    """
    Checks of the space limit.

    :ivar faults: reported faults.
    """

    faults: list[tuple[StoreFault, bool]]

    async def open_limited_store(self, limits: SpaceLimits) -> MongoStore:
        """An open store with limits."""
        self.faults = []
        store = MongoStore(
            self.make_client(),
            CLOCK,
            QueueLimits(max_messages=10_000, max_bytes=1 << 30),
            caps=DecentrlQuotas(),
            space_limits=limits,
            on_fault=lambda fault, present: self.faults.append((fault, present)),
        )
        self.addCleanup(store.close)
        await store.open()
        return store

    async def write_checkpoint(self, store: MongoStore) -> None:
        """Make the server write its files, and the store check them."""
        await self.run_in_thread(self.servers.client.admin.command, "fsync")
        await store.space_limit.check()

    async def assert_unavailable(self, *writes: Deferred[Any]) -> None:
        """Check that operations are rejected."""
        for write in writes:
            with self.assertRaises(StoreUnavailable):
                await write


class SpaceLimitTests(SpaceTestCase):
    """A limit in bytes."""

    async def test_rejects_writes_beyond_limit(self) -> None:
        """Beyond the limit messages and registrations are rejected, reads and deletes go on, until there is room."""
        # Space that other tests occupy in indexes does not count.
        stats = await self.run_in_thread(self.documents.command, "dbStats")
        limits = SpaceLimits(max_bytes=int(stats["indexSize"] + stats["dataSize"]) + LIMIT_BYTES, min_free_bytes=1)
        store = await self.open_limited_store(limits)
        await store.grant(ALICE)
        await self.register(store, INBOX)
        await self.write_checkpoint(store)
        self.assertEqual((store.fault_description, self.faults), ("", []))
        number, tomorrow = 0, CLOCK.seconds() + 86_400
        while not store.fault_description:
            self.assertLess(number, 100)
            await self.enqueue_ids(store, f"m{number}", data=random.randbytes(100_000))
            await self.write_checkpoint(store)
            number += 1
        self.assertGreater(number, LIMIT_BYTES // 400_000)
        self.assertEqual(
            (store.fault_description, self.faults), ("store full: only reads and deletions succeed", [("full", True)])
        )
        await self.assert_unavailable(
            self.enqueue_ids(store, "one more"),
            store.grant(BOB),
            store.move_account(ALICE, BOB),
            store.remember_did("did:peer:4short", "did:peer:4long"),
            store.update_recipients(ALICE, [("did:example:more", "add")], max_recipients=9),
            store.decentrl.save_contract(
                CommandGuard(b"1", tomorrow), Contract("c", None, BOB, tomorrow, b"c", b"{}")
            ),
            store.ping(),
        )
        await store.decentrl.check_guard(CommandGuard(b"2", tomorrow))
        found = await store.fetch_messages(ALICE, None, limit=number, max_bytes=1 << 30)
        self.assertEqual([message.id for message in found], [f"m{each}" for each in range(number)])
        self.assertTrue(await store.claim_nonce(b"nonce", CLOCK.seconds() + 9))
        await store.mark_delivered(["m0"])
        self.assertEqual(len(await store.acknowledge(ALICE, ["m0"])), 1)
        await self.write_checkpoint(store)
        await self.assert_unavailable(self.enqueue_ids(store, "one more"))  # a message less is not enough
        await store.acknowledge(ALICE, [message.id for message in found])
        await store.update_recipients(ALICE, [(INBOX, "remove")], max_recipients=9)
        await self.write_checkpoint(store)
        self.assertEqual((store.fault_description, self.faults), ("", [("full", True), ("full", False)]))
        await store.ping()
        await self.register(store, INBOX)
        await self.enqueue_ids(store, "one more")

    async def test_checks_periodically(self) -> None:
        """The store checks soon after it is open, and periodically."""
        store = await self.open_limited_store(SpaceLimits(max_bytes=1))
        await wait_until(lambda: bool(store.fault_description), WAIT_TIMEOUT)
        store.space_limit.limits = SpaceLimits()
        await wait_until(lambda: not store.fault_description, CHECK_INTERVAL + WAIT_TIMEOUT)
        self.assertEqual(self.faults, [("full", True), ("full", False)])


class DiskTests(SpaceTestCase):
    """Free space of the server's disk."""

    async def test_rejects_writes_on_full_disk(self) -> None:
        """Writes are rejected if less space is free than the limit."""
        store = await self.open_limited_store(SpaceLimits(min_free_bytes=1 << 60))
        await wait_until(lambda: bool(store.fault_description), WAIT_TIMEOUT)
        await self.assert_unavailable(store.grant(ALICE), store.ping())

    async def test_limits_around_free_space(self) -> None:
        """Limits above and below the free space, which other programs may change meanwhile."""
        stats = await self.run_in_thread(self.documents.command, "dbStats")
        free = stats["fsTotalSize"] - stats["fsUsedSize"]
        for least, trouble in (
            (int(free * 0.5), ""),
            (int(free * 4), "store full: only reads and deletions succeed"),
        ):
            store = await self.open_limited_store(SpaceLimits(min_free_bytes=least))
            await store.space_limit.check()
            self.assertEqual(store.fault_description, trouble)
            await store.close()


class StatisticsErrorTests(SpaceTestCase):
    """Errors instead of statistics."""

    async def check_with_error(self, code: int) -> tuple[MongoStore, list[str]]:
        """Check while the server replies with this error once. :return: and what is logged."""
        store = await self.open_limited_store(SpaceLimits(max_bytes=1))
        await wait_until(lambda: bool(store.fault_description), WAIT_TIMEOUT)
        store.space_limit.stop()  # or its own check might be the one that gets the error
        self.log_lines.clear()
        with self.servers.failpoint("dbStats", times=1, errorCode=code):
            await store.space_limit.check()
        return store, self.log_lines

    async def test_server_without_free_storage(self) -> None:
        """A server without `freeStorage` is queried without it."""
        store, log_text = await self.check_with_error(72)
        self.assertEqual((bool(store.fault_description), log_text), (True, []))

    async def test_missing_privilege_is_logged_once(self) -> None:
        """It is logged once; the last known state stays."""
        store, log_text = await self.check_with_error(13)
        self.assertEqual((bool(store.fault_description), len(log_text)), (True, 1))
        self.assertIn("lacks the dbStats privilege", log_text[0])
        with self.servers.failpoint("dbStats", times=1, errorCode=13):
            await store.space_limit.check()
        self.assertEqual(len(log_text), 1)

    async def test_check_after_timeout_is_complete(self) -> None:
        """The next check is complete again."""
        with self.assertRaises(StoreUnavailable):
            await self.check_with_error(50)

    async def test_stopped_server_is_no_fault(self) -> None:
        """The fault is not reported while the server is down."""
        store = await self.open_limited_store(SpaceLimits(max_bytes=1))
        await wait_until(lambda: bool(store.fault_description), WAIT_TIMEOUT)
        await store.close()
        self.assertEqual(store.fault_description, "")


class ReuseTests(SpaceTestCase):
    """Free space on the disk, and inside the files."""

    async def test_free_space_inside_files_counts_in_part(self) -> None:
        """Free space inside the files counts, but journal and oplog need some of the disk."""
        limit = MongoSpaceLimit(self.make_client(), SpaceLimits(min_free_bytes=1000), lambda fault, present: None)
        for free, reusable, full in ((1000, 0, False), (600, 400, False), (600, 300, True), (400, 9000, True)):
            self.assertEqual(limit.exceeded(taken=1, free=free, reusable=reusable, total=10_000), full)
