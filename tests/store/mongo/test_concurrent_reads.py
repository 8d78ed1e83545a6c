"""Slow reads delay neither writes nor reads of other accounts."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, DeferredList, gatherResults

from tests.store.mongo.mongo_test_case import ALICE, MongoTestCase

BOB = "did:example:bob"
# Longer than the other operations take on a busy machine.
SLOW: dict[str, Any] = {"blockConnection": True, "blockTimeMS": 6_000}


class ConcurrentReadTests(MongoTestCase):
    """The server delays a status, because it uses a command that writes never do."""

    async def test_reads_do_not_block_writes(self) -> None:
        """Writes go on, however many reads are running."""
        store = await self.open_store(connections=10)
        dids = [f"did:example:{number}" for number in range(40)]
        await gatherResults([store.grant(did) for did in dids])
        with self.servers.failpoint("aggregate", **SLOW):
            reading = [store.get_queue_status(did, None) for did in dids]
            over = DeferredList(reading, consumeErrors=True)  # more than the connections can serve
            await self.enqueue_ids(store, "a")
            self.assertEqual([one for one in reading if one.called], [])
        await over

    async def test_reads_of_one_account_run_in_turn(self) -> None:
        """Reads of one account run one at a time, and those of others meanwhile."""
        store = await self.open_store(connections=10)
        await store.grant(BOB)
        with self.servers.failpoint("aggregate", times=1, **SLOW):
            own_reads: list[Deferred[Any]] = [store.get_queue_status(ALICE, None) for _ in range(3)]
            own_reads.append(store.fetch_messages(ALICE, None, limit=1, max_bytes=1))
            await store.fetch_messages(BOB, None, limit=1, max_bytes=1)
            await store.get_queue_status(BOB, None)
            self.assertEqual([read for read in own_reads if read.called], [])
            await gatherResults(own_reads)
