"""Contract for the backlog by age and by queue."""

from __future__ import annotations

from collections.abc import Sequence

from twisted.internet.defer import Deferred

from mediatord.store.interfaces.decentrl import DecentrlQuotas
from mediatord.store.interfaces.messages import (
    AgeBucket,
    LargeQueue,
    QueueBacklog,
    QueueLimits,
    new_stored_message_id,
)
from tests.store.builders import ALICE, BOB, NOON
from tests.store.contract.base import INBOX, OTHER
from tests.store.contract.decentrl_base import DecentrlContract

NOTHING = AgeBucket(0, 0)


class BacklogContract(DecentrlContract):
    """Contract of `QueueBacklog` as the operator reads it."""

    limits = QueueLimits(max_messages=50, max_bytes=100_000)
    caps = DecentrlQuotas(pending=50)

    async def enqueue_sizes(self, *sizes: int, to: str = INBOX) -> list[str]:
        """Enqueue messages of these sizes, with ids as the daemon generates them."""
        ids = [new_stored_message_id(self.clock.seconds()) for _ in sizes]
        for id, size in zip(ids, sizes, strict=True):
            await self.enqueue_ids(id, to=to, data=b"x" * size)
        return ids

    async def count_by_age(self, *ages: float) -> Sequence[AgeBucket]:
        """Counts of entries younger than each of these ages, and of the rest."""
        now = self.clock.seconds()
        backlog: QueueBacklog = await self.store.read_backlog([now - age for age in ages], 0)
        return backlog.buckets

    async def test_empty_store_has_empty_backlog(self) -> None:
        """An empty store has empty buckets and no queues."""
        self.assertEqual(await self.store.read_backlog([NOON, NOON - 5], 3), QueueBacklog(0, 0, (NOTHING,) * 3, ()))
        self.assertEqual(await self.store.read_backlog([], 0), QueueBacklog(0, 0, (NOTHING,), ()))

    async def test_buckets_by_age(self) -> None:
        """Each bound is the first moment of its bucket; delayed and expired messages count until they are removed."""
        await self.enqueue_sizes(1, 2)
        self.clock.advance(10)
        (acknowledged, _) = await self.enqueue_sizes(100, 4)
        self.clock.advance(10)
        await self.enqueue_ids(new_stored_message_id(self.clock.seconds()), data=b"x" * 8, delay=60, ttl=5)
        self.assertEqual(await self.count_by_age(), (AgeBucket(5, 115),))
        self.assertEqual(await self.count_by_age(5, 15), (AgeBucket(1, 8), AgeBucket(2, 104), AgeBucket(2, 3)))
        self.assertEqual(await self.count_by_age(10, 20), (AgeBucket(3, 112), AgeBucket(2, 3), NOTHING))
        self.assertEqual(await self.count_by_age(0, 9.9), (AgeBucket(1, 8), NOTHING, AgeBucket(4, 107)))
        await self.store.acknowledge(ALICE, [acknowledged])
        self.clock.advance(1000)
        self.assertEqual(await self.count_by_age(60, 1015), (NOTHING, AgeBucket(2, 12), AgeBucket(2, 3)))

    async def test_counts_events_with_messages(self) -> None:
        """Events count with the messages."""
        await self.save_contracts("contract")
        await self.enqueue_sizes(5)
        self.clock.advance(10)
        await self.deliver_events(new_stored_message_id(self.clock.seconds()), payload="é")
        self.assertEqual(await self.count_by_age(5), (AgeBucket(1, 2), AgeBucket(1, 5)))

    async def test_largest_queues_come_first(self) -> None:
        """The largest queues come first, with their bytes and their oldest entry's time of arrival."""
        await self.register(BOB, OTHER)
        await self.save_contracts("contract")
        await self.enqueue_sizes(5)
        self.clock.advance(10)
        await self.enqueue_sizes(1, 2, 3, to=OTHER)
        await self.deliver_events(*[new_stored_message_id(self.clock.seconds()) for _ in "ab"], payload="xy")
        other, alice = LargeQueue(OTHER, 3, 6, NOON + 10), LargeQueue(ALICE, 2, 4, NOON + 10)
        for top in (1, 2, 3, 9):
            backlog = await self.store.read_backlog([], top)
            self.assertEqual(backlog.largest, (other, alice, LargeQueue(INBOX, 1, 5, NOON))[:top])
            self.assertEqual((backlog.messages, backlog.bytes), (6, 15))

    async def test_combines_both_protocols_of_a_did(self) -> None:
        """Messages and events queued for a DID are one queue, also after the DID has changed owners."""
        await self.save_contracts("contract")
        await self.register(BOB, ALICE)
        await self.enqueue_sizes(1, to=ALICE)
        await self.update_recipients(BOB, (ALICE, "remove"))
        await self.register(ALICE, ALICE)
        self.clock.advance(10)
        await self.enqueue_sizes(2, to=ALICE)
        await self.deliver_events(new_stored_message_id(self.clock.seconds()), payload="four")
        self.assertEqual((await self.store.read_backlog([], 1)).largest, (LargeQueue(ALICE, 3, 7, NOON),))

    async def test_snapshot_is_consistent(self) -> None:
        """Queues, ages and the ledger add up while messages of both protocols arrive and are acknowledged."""
        await self.register(BOB, OTHER)
        await self.save_contracts("contract")
        (acknowledged, *_) = await self.enqueue_sizes(1, 2, 3)
        await self.enqueue_sizes(4, to=OTHER)
        await self.deliver_events(*[new_stored_message_id(self.clock.seconds()) for _ in "ab"])
        await self.store.acknowledge(ALICE, [acknowledged])
        ledger = await self.store.read_ledger()
        self.assertEqual((ledger.didcomm.waiting, ledger.decentrl.waiting), (3, 2))
        for top, sizes in ((0, ()), (1, (2,)), (9, (2, 2, 1))):
            found = await self.store.read_statistics(top)
            self.assertEqual(tuple(number for _, number in found.largest), sizes)
            self.assertEqual((sum(sizes) + found.other, found.ledger), (5, ledger))
            backlog = await self.store.read_backlog([NOON], top)
            self.assertEqual((backlog.messages, backlog.ledger), (5, ledger))
            self.assertEqual(sum(bucket.messages for bucket in backlog.buckets), 5)
        # Read during concurrent writes.
        writing = [self.enqueue_sizes(1), self.enqueue_sizes(2, to=OTHER)]
        looking = [Deferred.fromCoroutine(one) for one in writing]
        backlog, found = await self.store.read_backlog([NOON], 9), await self.store.read_statistics(1)
        for ledger, total in (
            (backlog.ledger, sum(bucket.messages for bucket in backlog.buckets)),
            (found.ledger, found.largest[0][1] + found.other),
        ):
            self.assertEqual((ledger.didcomm.difference, ledger.decentrl.difference), (0, 0))
            self.assertEqual((ledger.didcomm.waiting or 0) + (ledger.decentrl.waiting or 0), total)
        for one in looking:
            await one
