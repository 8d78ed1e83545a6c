"""Lookup of messages by id: round trips, and limits on size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.defer import Deferred

from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES
from mediatord.store.interfaces.messages import QueueLimits
from tests.store.mongo.mongo_test_case import ALICE, MongoTestCase

LIMITS = QueueLimits(max_messages=100, max_bytes=4 * MAX_PAGE_BYTES)


class FindTests(MongoTestCase):
    async def count_commands(self, operation: Callable[[], Deferred[Any]]) -> list[str]:
        """Commands of the server on our collections."""
        self.documents.command("profile", 2)
        try:
            await operation()
        finally:
            self.documents.command("profile", 0)
        # The store itself reads the size of the database every few seconds.
        query = {"ns": {"$not": {"$regex": "system[.]profile$"}}, "command.dbStats": {"$exists": False}}
        operations = list(self.documents["system.profile"].find(query).sort("ts"))
        self.documents["system.profile"].drop()
        return [next(iter(entry["command"])) for entry in operations]

    async def test_one_round_trip(self) -> None:
        """All messages are read in one query, once the recipient DIDs are cached."""
        store = await self.open_store(LIMITS)
        await self.enqueue_ids(store, "a", "b")
        await store.find_messages(["a"])
        self.assertEqual(await self.count_commands(lambda: store.find_messages(["b", "a", "b"])), ["aggregate"])

    async def test_page_is_limited_in_bytes(self) -> None:
        """Of messages that exceed a page the first in order of arrival; no cursor is left open."""
        store = await self.open_store(LIMITS)
        ids = [f"{number:02}" for number in reversed(range(20))]
        for id in ids:
            await self.enqueue_ids(store, id, data=b"x" * 1_000_000)
        self.assertEqual([message.id for message in await store.find_messages(sorted(ids))], ids[:16])
        idle = {"type": "idleCursor", "ns": f"{self.database}.messages"}
        cursors = self.documents.client.admin.aggregate([{"$currentOp": {"idleCursors": True}}, {"$match": idle}])
        self.assertEqual(list(cursors), [])

    async def test_large_and_small_messages_in_order_of_arrival(self) -> None:
        """Large and small messages are found in order of arrival."""
        store = await self.open_store(LIMITS)
        for id in "cab":
            await self.enqueue_ids(store, id, data=b"x" * (2_000_000 if id == "a" else 1))
        self.assertEqual(
            [message.id for message in await store.find_messages(["a", "b", "c", "gone"])], ["c", "a", "b"]
        )

    async def test_finds_message_of_maximum_size(self) -> None:
        """A message as large as a document can be, and one of a very long DID, are found."""
        store = await self.open_store(LIMITS)
        long = "did:example:" + "x" * 40_000
        await store.move_account(ALICE, long)
        largest = MAX_PAGE_BYTES - 2_048
        await self.enqueue_ids(store, "a", data=b"x" * largest)
        await self.enqueue_ids(store, "b")
        for id, size in (("a", largest), ("b", 7)):
            (found,) = await store.find_messages([id])
            self.assertEqual((found.account, len(found.payload)), (long, size))

    async def test_message_deleted_during_lookup_is_not_found(self) -> None:
        """A message that is deleted with its recipient during the lookup is not found."""
        store = await self.open_store(LIMITS)
        await self.enqueue_ids(store, "a")
        self.documents["recipients"].delete_many({})
        self.assertEqual(await store.find_messages(["a"]), [])
