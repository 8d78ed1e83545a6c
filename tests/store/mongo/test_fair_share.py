"""Fair shares of full queues in MongoDB, with several nodes and cached usage."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from twisted.internet.defer import gatherResults

from mediatord.errors import QueueFull, StoreUnavailable
from mediatord.store.interfaces.messages import EnqueueRequest, EnqueueResult, FullQueuePolicy, Payload, QueueLimits
from mediatord.store.interfaces.store import IStore
from mediatord.store.mongo.driver.collection import MongoCommand
from mediatord.store.mongo.driver.connection_pool import PrimaryConnectionPool
from mediatord.store.sqlite.memory_store import MemoryStore
from tests.store.mongo.mongo_test_case import ALICE, CLOCK, INBOX, MongoTestCase, wait_for_recovery

NO_MAJORITY = {"code": 64, "errmsg": "no"}


class ConcurrentFairShareTests(MongoTestCase):
    """Nodes that fill the same queue in turn."""

    def setUp(self) -> None:
        super().setUp()
        self.aggregations = 0
        exchange = PrimaryConnectionPool.exchange

        async def count(pool: PrimaryConnectionPool, commands: Sequence[MongoCommand], *args: Any, **kw: Any) -> Any:
            self.aggregations += sum("aggregate" in command.body for command in commands)
            return await exchange(pool, commands, *args, **kw)

        self.patch(PrimaryConnectionPool, "exchange", count)

    async def open_nodes(self, when_full: FullQueuePolicy) -> None:
        limits = QueueLimits(max_messages=12, max_bytes=120, when_full=when_full, share=0.4)
        memory = MemoryStore(CLOCK, limits)
        await memory.open()
        await memory.grant(ALICE)
        await memory.update_recipients(ALICE, [(INBOX, "add")], max_recipients=9)
        self.stores = [await self.open_store(limits) for _ in range(2)]
        self.random, self.memory, self.ids = Random(3), memory, 0
        for _ in range(60):
            await self.enqueue_origins()
            if not self.random.randrange(4):
                await self.acknowledge()
        self.assertEqual((await self.stores[0].read_ledger()).didcomm, (await memory.read_ledger()).didcomm)
        self.assertEqual(self.list_queued(), await self.list_waiting(memory))

    async def enqueue_origins(self) -> None:
        """Queue messages of several origins together."""
        deposits = []
        for _ in range(self.random.randrange(1, 4)):
            self.ids += 1
            size, origin = self.random.choice((1, 9, 40)), self.random.randrange(3) << 32 | self.random.randrange(4)
            payload = Payload(f"m{self.ids:04}", b"x" * size, "json")
            deposits.append(EnqueueRequest(INBOX, (payload,), CLOCK.seconds() + 3600, origin=origin))
        store = self.random.choice(self.stores)
        results = [await one.enqueue_each(deposits) for one in (store, self.memory)]
        one, other = [[_evicted(answer) for answer in answers] for answers in results]
        self.assertEqual(one, other)

    async def acknowledge(self) -> None:
        waiting = await self.list_waiting(self.memory)
        ids = self.random.sample(waiting, min(2, len(waiting)))
        for one in (self.random.choice(self.stores), self.memory):
            await one.acknowledge(ALICE, ids)

    async def list_waiting(self, store: IStore) -> list[str]:
        return [message.id for message in await store.fetch_messages(ALICE, None, limit=99, max_bytes=9_999)]

    async def test_evicts_like_one_node(self) -> None:
        """Nodes evict as a single one would."""
        await self.open_nodes("oldest")

    async def test_refuses_like_one_node(self) -> None:
        """Nodes reject as a single one would."""
        await self.open_nodes("refuse")

    async def test_withdrawn_messages_do_not_count(self) -> None:
        """Withdrawn messages count for no share."""
        server = self.make_client()
        store = await self.open_store(QueueLimits(max_messages=4, share=0.5, when_full="refuse"), server=server)

        async def enqueue_ids(*ids: str) -> None:
            payloads = [Payload(id, b"x", "json") for id in ids]
            await store.enqueue(INBOX, payloads, expires_at=CLOCK.seconds() + 3600, origin=7)

        await self.enqueue_ids(store, "a", "b")
        await enqueue_ids("c")
        with self.servers.failpoint("commitTransaction", writeConcernError=NO_MAJORITY), self.with_short_time_limit():
            with self.assertRaises(StoreUnavailable):
                await enqueue_ids("d")
        await wait_for_recovery(server)
        with self.assertRaises(QueueFull):
            await enqueue_ids("e", "f")
        await enqueue_ids("g")
        self.assertEqual(self.list_queued(), ["a", "b", "c", "g"])

    async def test_caches_usage_of_full_queue(self) -> None:
        """Usage of a full queue is counted once, until another node changes the queue."""
        stores = [await self.open_store(QueueLimits(max_messages=50, share=0.5)) for _ in range(2)]
        await gatherResults([self.enqueue_ids(stores[0], f"old {number:02}") for number in range(50)])
        counted = []
        for number, store in enumerate([*stores[:1] * 3, *stores[1:] * 3, stores[0]]):
            before = self.aggregations
            payloads = [Payload(f"new {number}", b"x", "json")]
            await store.enqueue(INBOX, payloads, expires_at=CLOCK.seconds() + 3600, origin=7)
            counted.append(self.aggregations - before)
        self.assertEqual(counted, [1, 0, 0, 1, 0, 0, 1])

    async def test_cache_is_bounded(self) -> None:
        """The cache is bounded, and keeps what was used last."""
        store = await self.open_store(QueueLimits(max_messages=2, share=0.5))
        self.patch(store._enqueue_batch.usage_cache, "_capacity", 8)
        dids = [f"did:key:z6Mk{number}" for number in range(3)]
        await self.register(store, *dids)
        counted = []
        for round_number, did in enumerate([did for did in dids for _ in range(3)] + [dids[2], dids[0]]):
            before = self.aggregations
            payloads = [Payload(f"{round_number}", b"x", "json")]
            await store.enqueue(did, payloads, expires_at=CLOCK.seconds() + 3600, origin=round_number + 1 << 32 | 7)
            counted.append(self.aggregations - before)
        self.assertEqual(counted, [0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 1])


def _evicted(answer: object) -> object:
    """Ids of evicted messages; of an error its class."""
    return [message.id for message in answer.evicted] if isinstance(answer, EnqueueResult) else type(answer)
