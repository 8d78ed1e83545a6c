"""Expiry and delay."""

from __future__ import annotations

from mediatord.store.interfaces.messages import QueueLimits, QueueStatus, RemovedMessage
from tests.store.builders import ALICE, HOUR, NOON
from tests.store.contract.base import INBOX, OTHER, StoreContract


class TimingContract(StoreContract):
    """Promises of `IMessageStore` about time (reference 4.5, UC-021 AF-5)."""

    limits = QueueLimits(max_messages=100, max_bytes=10_000)

    async def test_expired_is_not_shown(self) -> None:
        """A message cannot be seen from the second it expires, even before it is removed (reference 12)."""
        await self.put("a", ttl=10, data=b"123")
        await self.put("b", ttl=20, data=b"12345")
        self.clock.advance(9.5)
        self.assertEqual(await self.waiting(), ["a", "b"])
        self.clock.advance(0.5)
        for did in (None, INBOX):
            self.assertEqual(await self.waiting(ALICE, did), ["b"])
            self.assertEqual(await self.store.get_queue_status(ALICE, did), QueueStatus(1, 5, NOON, NOON))
        self.clock.advance(10)
        self.assertEqual(await self.store.get_queue_status(ALICE, None), QueueStatus(0, 0))

    async def test_expire(self) -> None:
        """Expired messages are removed, those first that expired first, at most `limit` (UC-021 AF-5)."""
        await self.put("late", ttl=30, data=b"1")
        await self.put("mid", ttl=20, data=b"12")
        await self.put("first", "second", ttl=10, data=b"123")
        self.clock.advance(20)
        await self.store.mark_delivered(["second"])
        removed = await self.store.expire_messages(2)
        self.assertEqual(
            removed,
            [
                RemovedMessage("first", INBOX, ALICE, 3, NOON, 0, "ttl"),
                RemovedMessage("second", INBOX, ALICE, 3, NOON, 1, "ttl"),
            ],
        )
        self.assertEqual([gone.id for gone in await self.store.expire_messages(2)], ["mid"])
        self.assertEqual(await self.store.expire_messages(2), [])
        self.assertEqual(await self.store.queue_sizes(9), ([(INBOX, 1)], 0))
        self.assertEqual(await self.count(), (1, 1))

    async def test_acknowledge_expired(self) -> None:
        """What has expired while it was read can still be acknowledged, and then does not expire."""
        await self.put("a", ttl=1)
        self.clock.advance(2)
        self.assertEqual([gone.id for gone in await self.store.acknowledge(ALICE, ["a"])], ["a"])
        self.assertEqual(await self.store.expire_messages(9), [])

    async def test_expired_on_arrival(self) -> None:
        """A message that has expired when it arrives is never seen."""
        await self.put("a", ttl=0)
        self.assertEqual(await self.waiting(), [])
        self.assertEqual([gone.id for gone in await self.store.expire_messages(9)], ["a"])

    async def test_delayed_is_not_shown(self) -> None:
        """A delayed message cannot be seen before it is due, and then has its place by arrival (reference 4.5)."""
        await self.put("a", delay=10, data=b"123")
        self.clock.advance(1)
        await self.put("b", data=b"12345")
        for did in (None, INBOX):
            self.assertEqual(await self.waiting(ALICE, did), ["b"])
            self.assertEqual(await self.store.get_queue_status(ALICE, did), QueueStatus(1, 5, NOON + 1, NOON + 1))
        self.clock.advance(9)
        self.assertEqual(await self.waiting(), ["a", "b"])
        self.assertEqual(await self.store.get_queue_status(ALICE, None), QueueStatus(2, 8, NOON, NOON + 1))

    async def test_newest_is_delayed(self) -> None:
        """Neither end of the status is that of a message that nobody may see."""
        await self.put("a")
        self.clock.advance(1)
        await self.put("b", delay=10)
        self.assertEqual((await self.store.get_queue_status(ALICE, None)).newest_received_time, NOON)

    async def test_take_due(self) -> None:
        """Each delayed message is handed out once when it is due, those first that were due first."""
        await self.register(ALICE, OTHER)
        await self.put("late", delay=30)
        await self.put("mid", delay=20, to=OTHER)
        await self.put("first", "second", delay=10)
        await self.put("undelayed")
        self.assertEqual(await self.store.take_due_messages(9), [])
        self.clock.advance(20)
        taken = await self.store.take_due_messages(2)
        self.assertEqual([(m.id, m.due_at) for m in taken], [("first", NOON + 10), ("second", NOON + 10)])
        self.assertEqual([(m.id, m.recipient_did) for m in await self.store.take_due_messages(2)], [("mid", OTHER)])
        self.assertEqual(await self.store.take_due_messages(2), [])
        self.assertEqual(await self.waiting(), ["mid", "first", "second", "undelayed"])

    async def test_next_due(self) -> None:
        """It can be asked when the next delayed message becomes visible."""
        self.assertIsNone(await self.store.find_next_due())
        await self.put("undelayed")
        self.assertIsNone(await self.store.find_next_due())
        await self.put("late", delay=30)
        await self.put("soon", delay=10)
        self.assertEqual(await self.store.find_next_due(), NOON + 10)
        self.clock.advance(11)
        self.assertEqual(await self.store.find_next_due(), NOON + 10)
        await self.store.take_due_messages(9)
        self.assertEqual(await self.store.find_next_due(), NOON + 30)
        await self.store.acknowledge(ALICE, ["late"])
        self.assertIsNone(await self.store.find_next_due())

    async def test_expires_before_due(self) -> None:
        """A message that expires before it is due is never seen and never due."""
        await self.put("a", ttl=10, delay=10)
        self.assertIsNone(await self.store.find_next_due())
        self.clock.advance(10)
        self.assertEqual(await self.store.take_due_messages(9), [])
        self.assertEqual(await self.waiting(), [])
        self.assertEqual([gone.id for gone in await self.store.expire_messages(9)], ["a"])

    async def test_expires_before_taken(self) -> None:
        """A message that was due and expired before anybody asked is not handed out, nor waited for."""
        await self.put("a", ttl=20, delay=10)
        await self.put("b", ttl=HOUR, delay=30)
        self.clock.advance(20)
        self.assertEqual(await self.store.find_next_due(), NOON + 30)
        self.assertEqual(await self.store.take_due_messages(9), [])
        self.clock.advance(10)
        self.assertEqual([message.id for message in await self.store.take_due_messages(9)], ["b"])

    async def test_expired_is_not_taken(self) -> None:
        """Nor is one that expires just when it is asked for, by whoever asks for nothing else before."""
        await self.put("a", ttl=20, delay=10)
        self.clock.advance(20)
        self.assertEqual(await self.store.take_due_messages(9), [])

    async def test_expired_and_delayed_count_once(self) -> None:
        """The status leaves out expired and delayed messages, and takes none off twice."""
        await self.put("a", ttl=5, delay=60)
        await self.put("b", ttl=5)
        await self.put("c", delay=60)
        await self.put("d")
        self.clock.advance(10)
        self.assertEqual((await self.count())[0], 1)
        self.assertEqual(await self.waiting(), ["d"])
