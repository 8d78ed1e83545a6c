"""What waits by age and by queue."""

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
    """Promises about what an operator sees of the queues."""

    limits = QueueLimits(max_messages=50, max_bytes=100_000)
    caps = DecentrlQuotas(pending=50)

    async def arrive(self, *sizes: int, to: str = INBOX) -> list[str]:
        """Messages of so many bytes, with the ids that the daemon would give them."""
        ids = [new_stored_message_id(self.clock.seconds()) for _ in sizes]
        for id, size in zip(ids, sizes, strict=True):
            await self.put(id, to=to, data=b"x" * size)
        return ids

    async def buckets(self, *ages: float) -> Sequence[AgeBucket]:
        """Of what is younger than each of these, and of the rest."""
        now = self.clock.seconds()
        backlog: QueueBacklog = await self.store.read_backlog([now - age for age in ages], 0)
        return backlog.buckets

    async def test_nothing(self) -> None:
        """An empty store has empty buckets, and no queues."""
        self.assertEqual(await self.store.read_backlog([NOON, NOON - 5], 3), QueueBacklog(0, 0, (NOTHING,) * 3, ()))
        self.assertEqual(await self.store.read_backlog([], 0), QueueBacklog(0, 0, (NOTHING,), ()))

    async def test_ages(self) -> None:
        """Each bound is the first moment of its bucket; what is delayed or has expired counts until it is gone."""
        await self.arrive(1, 2)
        self.clock.advance(10)
        (acknowledged, _) = await self.arrive(100, 4)
        self.clock.advance(10)
        await self.put(new_stored_message_id(self.clock.seconds()), data=b"x" * 8, delay=60, ttl=5)
        self.assertEqual(await self.buckets(), (AgeBucket(5, 115),))
        self.assertEqual(await self.buckets(5, 15), (AgeBucket(1, 8), AgeBucket(2, 104), AgeBucket(2, 3)))
        self.assertEqual(await self.buckets(10, 20), (AgeBucket(3, 112), AgeBucket(2, 3), NOTHING))
        self.assertEqual(await self.buckets(0, 9.9), (AgeBucket(1, 8), NOTHING, AgeBucket(4, 107)))
        await self.store.acknowledge(ALICE, [acknowledged])
        self.clock.advance(1000)
        self.assertEqual(await self.buckets(60, 1015), (NOTHING, AgeBucket(2, 12), AgeBucket(2, 3)))

    async def test_events(self) -> None:
        """Events count with the messages."""
        await self.agree("contract")
        await self.arrive(5)
        self.clock.advance(10)
        await self.send(new_stored_message_id(self.clock.seconds()), payload="é")
        self.assertEqual(await self.buckets(5), (AgeBucket(1, 2), AgeBucket(1, 5)))

    async def test_largest(self) -> None:
        """The largest queues come first, with their bytes and since when something waits."""
        await self.register(BOB, OTHER)
        await self.agree("contract")
        await self.arrive(5)
        self.clock.advance(10)
        await self.arrive(1, 2, 3, to=OTHER)
        await self.send(*[new_stored_message_id(self.clock.seconds()) for _ in "ab"], payload="xy")
        other, alice = LargeQueue(OTHER, 3, 6, NOON + 10), LargeQueue(ALICE, 2, 4, NOON + 10)
        for top in (1, 2, 3, 9):
            backlog = await self.store.read_backlog([], top)
            self.assertEqual(backlog.largest, (other, alice, LargeQueue(INBOX, 1, 5, NOON))[:top])
            self.assertEqual((backlog.messages, backlog.bytes), (6, 15))

    async def test_queue_of_both_halves(self) -> None:
        """What waits for a DID as messages and as events is one queue, also when it has changed hands."""
        await self.agree("contract")
        await self.register(BOB, ALICE)
        await self.arrive(1, to=ALICE)
        await self.change(BOB, (ALICE, "remove"))
        await self.register(ALICE, ALICE)
        self.clock.advance(10)
        await self.arrive(2, to=ALICE)
        await self.send(new_stored_message_id(self.clock.seconds()), payload="four")
        self.assertEqual((await self.store.read_backlog([], 1)).largest, (LargeQueue(ALICE, 3, 7, NOON),))

    async def test_figures_of_one_moment(self) -> None:
        """Queues, ages and the ledger add up to the same, while messages come and go in both protocols."""
        await self.register(BOB, OTHER)
        await self.agree("contract")
        (acknowledged, *_) = await self.arrive(1, 2, 3)
        await self.arrive(4, to=OTHER)
        await self.send(*[new_stored_message_id(self.clock.seconds()) for _ in "ab"])
        await self.store.acknowledge(ALICE, [acknowledged])
        books = await self.store.read_ledger()
        self.assertEqual((books.didcomm.waiting, books.decentrl.waiting), (3, 2))
        for top, sizes in ((0, ()), (1, (2,)), (9, (2, 2, 1))):
            found = await self.store.read_statistics(top)
            self.assertEqual(tuple(number for _, number in found.largest), sizes)
            self.assertEqual((sum(sizes) + found.other, found.ledger), (5, books))
            backlog = await self.store.read_backlog([NOON], top)
            self.assertEqual((backlog.messages, backlog.ledger), (5, books))
            self.assertEqual(sum(one.messages for one in backlog.buckets), 5)
        # Asked while others write.
        writing = [self.arrive(1), self.arrive(2, to=OTHER)]
        looking = [Deferred.fromCoroutine(one) for one in writing]
        backlog, found = await self.store.read_backlog([NOON], 9), await self.store.read_statistics(1)
        for books, total in (
            (backlog.ledger, sum(one.messages for one in backlog.buckets)),
            (found.ledger, found.largest[0][1] + found.other),
        ):
            self.assertEqual((books.didcomm.difference, books.decentrl.difference), (0, 0))
            self.assertEqual((books.didcomm.waiting or 0) + (books.decentrl.waiting or 0), total)
        for one in looking:
            await one
