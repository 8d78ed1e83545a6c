"""Contract for expiry and delay."""

from __future__ import annotations

from mediatord.store.interfaces.messages import QueueLimits, QueueStatus, RemovedMessage
from tests.store.builders import ALICE, HOUR, NOON
from tests.store.contract.base import INBOX, OTHER, StoreContract


class TimingContract(StoreContract):
    """Contract of `IMessageStore` for times (reference 4.5, UC-021 AF-5)."""

    limits = QueueLimits(max_messages=100, max_bytes=10_000)

    async def test_expired_message_is_hidden(self) -> None:
        """A message is hidden from the second it expires, even before it is removed (reference 12)."""
        await self.enqueue_ids("a", ttl=10, data=b"123")
        await self.enqueue_ids("b", ttl=20, data=b"12345")
        self.clock.advance(9.5)
        self.assertEqual(await self.list_waiting(), ["a", "b"])
        self.clock.advance(0.5)
        for did in (None, INBOX):
            self.assertEqual(await self.list_waiting(ALICE, did), ["b"])
            self.assertEqual(await self.store.get_queue_status(ALICE, did), QueueStatus(1, 5, NOON, NOON))
        self.clock.advance(10)
        self.assertEqual(await self.store.get_queue_status(ALICE, None), QueueStatus(0, 0))

    async def test_removes_expired_messages(self) -> None:
        """Expired messages are removed in order of expiry, at most `limit` (UC-021 AF-5)."""
        await self.enqueue_ids("late", ttl=30, data=b"1")
        await self.enqueue_ids("mid", ttl=20, data=b"12")
        await self.enqueue_ids("first", "second", ttl=10, data=b"123")
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
        self.assertEqual([message.id for message in await self.store.expire_messages(2)], ["mid"])
        self.assertEqual(await self.store.expire_messages(2), [])
        self.assertEqual(await self.store.queue_sizes(9), ([(INBOX, 1)], 0))
        self.assertEqual(await self.count_messages(), (1, 1))

    async def test_expired_message_can_be_acknowledged(self) -> None:
        """A message that expired while it was read can be acknowledged, and then does not expire."""
        await self.enqueue_ids("a", ttl=1)
        self.clock.advance(2)
        self.assertEqual([message.id for message in await self.store.acknowledge(ALICE, ["a"])], ["a"])
        self.assertEqual(await self.store.expire_messages(9), [])

    async def test_message_expired_on_arrival_is_hidden(self) -> None:
        """A message that has expired on arrival is never visible."""
        await self.enqueue_ids("a", ttl=0)
        self.assertEqual(await self.list_waiting(), [])
        self.assertEqual([message.id for message in await self.store.expire_messages(9)], ["a"])

    async def test_delayed_message_is_hidden_until_due(self) -> None:
        """A delayed message is hidden until it is due, and then has its place by arrival (reference 4.5)."""
        await self.enqueue_ids("a", delay=10, data=b"123")
        self.clock.advance(1)
        await self.enqueue_ids("b", data=b"12345")
        for did in (None, INBOX):
            self.assertEqual(await self.list_waiting(ALICE, did), ["b"])
            self.assertEqual(await self.store.get_queue_status(ALICE, did), QueueStatus(1, 5, NOON + 1, NOON + 1))
        self.clock.advance(9)
        self.assertEqual(await self.list_waiting(), ["a", "b"])
        self.assertEqual(await self.store.get_queue_status(ALICE, None), QueueStatus(2, 8, NOON, NOON + 1))

    async def test_status_times_skip_delayed_messages(self) -> None:
        """The times of the status are those of visible messages."""
        await self.enqueue_ids("a")
        self.clock.advance(1)
        await self.enqueue_ids("b", delay=10)
        self.assertEqual((await self.store.get_queue_status(ALICE, None)).newest_received_time, NOON)

    async def test_takes_due_messages_once(self) -> None:
        """Each delayed message is taken once when it is due, in order of due times."""
        await self.register(ALICE, OTHER)
        await self.enqueue_ids("late", delay=30)
        await self.enqueue_ids("mid", delay=20, to=OTHER)
        await self.enqueue_ids("first", "second", delay=10)
        await self.enqueue_ids("undelayed")
        self.assertEqual(await self.store.take_due_messages(9), [])
        self.clock.advance(20)
        due = await self.store.take_due_messages(2)
        self.assertEqual([(m.id, m.due_at) for m in due], [("first", NOON + 10), ("second", NOON + 10)])
        self.assertEqual([(m.id, m.recipient_did) for m in await self.store.take_due_messages(2)], [("mid", OTHER)])
        self.assertEqual(await self.store.take_due_messages(2), [])
        self.assertEqual(await self.list_waiting(), ["mid", "first", "second", "undelayed"])

    async def test_reads_next_due_time(self) -> None:
        """The time when the next delayed message becomes visible can be read."""
        self.assertIsNone(await self.store.find_next_due())
        await self.enqueue_ids("undelayed")
        self.assertIsNone(await self.store.find_next_due())
        await self.enqueue_ids("late", delay=30)
        await self.enqueue_ids("soon", delay=10)
        self.assertEqual(await self.store.find_next_due(), NOON + 10)
        self.clock.advance(11)
        self.assertEqual(await self.store.find_next_due(), NOON + 10)
        await self.store.take_due_messages(9)
        self.assertEqual(await self.store.find_next_due(), NOON + 30)
        await self.store.acknowledge(ALICE, ["late"])
        self.assertIsNone(await self.store.find_next_due())

    async def test_message_expiring_before_due_is_skipped(self) -> None:
        """A message that expires before it is due is never visible and never due."""
        await self.enqueue_ids("a", ttl=10, delay=10)
        self.assertIsNone(await self.store.find_next_due())
        self.clock.advance(10)
        self.assertEqual(await self.store.take_due_messages(9), [])
        self.assertEqual(await self.list_waiting(), [])
        self.assertEqual([message.id for message in await self.store.expire_messages(9)], ["a"])

    async def test_due_message_expired_before_taken_is_skipped(self) -> None:
        """A due message that expired before it was taken is not taken, and not waited for."""
        await self.enqueue_ids("a", ttl=20, delay=10)
        await self.enqueue_ids("b", ttl=HOUR, delay=30)
        self.clock.advance(20)
        self.assertEqual(await self.store.find_next_due(), NOON + 30)
        self.assertEqual(await self.store.take_due_messages(9), [])
        self.clock.advance(10)
        self.assertEqual([message.id for message in await self.store.take_due_messages(9)], ["b"])

    async def test_message_expiring_when_taken_is_skipped(self) -> None:
        """A message that expires at the moment of the call is not taken, even by the first call."""
        await self.enqueue_ids("a", ttl=20, delay=10)
        self.clock.advance(20)
        self.assertEqual(await self.store.take_due_messages(9), [])

    async def test_expired_and_delayed_message_is_excluded_once(self) -> None:
        """The status excludes expired and delayed messages, each once."""
        await self.enqueue_ids("a", ttl=5, delay=60)
        await self.enqueue_ids("b", ttl=5)
        await self.enqueue_ids("c", delay=60)
        await self.enqueue_ids("d")
        self.clock.advance(10)
        self.assertEqual((await self.count_messages())[0], 1)
        self.assertEqual(await self.list_waiting(), ["d"])
