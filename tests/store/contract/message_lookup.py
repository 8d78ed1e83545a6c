"""Contract for the lookup of messages that another process has accepted."""

from __future__ import annotations

from math import inf

from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES
from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival, QueueLimits, StoredMessage
from tests.store.builders import ALICE, BOB, HOUR, NOON
from tests.store.contract.base import INBOX, OTHER, StoreContract

LARGE = b"x" * (MAX_PAGE_BYTES // 2)


class MessageLookupContract(StoreContract):
    """
    Contract of `IMessageStore.find_messages` and `IMessageStore.find_arrivals`.

    :ivar largest: bytes of a message that is more than a slice may have, or nearly as much if no more can be kept.
    """

    largest = MAX_PAGE_BYTES + 1

    limits = QueueLimits(max_messages=100, max_bytes=4 * MAX_PAGE_BYTES)

    async def find_ids(self, *ids: str) -> list[str]:
        return [message.id for message in await self.store.find_messages(ids)]

    async def find_arrivals(
        self, *accounts: str, since: float = NOON, until: float = NOON + HOUR, after: str = "", limit: int = 99
    ) -> list[str]:
        found = await self.store.find_arrivals(accounts, ArrivalWindow(since, until, after), limit=limit)
        return [item.id for item in found]

    async def read_pages(self, *accounts: str, limit: int) -> list[MessageArrival]:
        window, found = ArrivalWindow(NOON, NOON + HOUR), list[MessageArrival]()
        while page := await self.store.find_arrivals(accounts, window, limit=limit):
            found += page
            if len(page) < limit:
                break
            window = window.behind(page[-1])
        return found

    async def test_finds_by_id(self) -> None:
        """Queued messages are found by id, complete, in order of arrival, whoever the recipient is."""
        await self.register(BOB, OTHER)
        await self.enqueue_ids("c", data=b"1")
        await self.enqueue_ids("a", to=OTHER)
        await self.enqueue_ids("b")
        self.assertEqual(await self.find_ids("b", "unknown", "a", "c", "a", ""), ["c", "a", "b"])
        self.assertEqual(await self.find_ids(), [])
        await self.store.mark_delivered(["c"])
        expected = StoredMessage("c", INBOX, ALICE, b"1", "json", NOON, NOON + HOUR, "delivered")
        self.assertEqual(await self.store.find_messages(["c"]), [expected])

    async def test_finds_hundreds_of_ids(self) -> None:
        """Hundreds of ids can be looked up at once."""
        ids = [f"m{number}" for number in range(90)]
        await self.enqueue_ids(*ids)
        self.assertEqual(await self.find_ids(*(f"x{number}" for number in range(900)), *reversed(ids)), ids)

    async def test_finds_visible_messages_only(self) -> None:
        """Expired, delayed and acknowledged messages are not found."""
        await self.enqueue_ids("expired", ttl=10)
        await self.enqueue_ids("late", delay=20)
        await self.enqueue_ids("gone", "there")
        await self.store.acknowledge(ALICE, ["gone"])
        self.clock.advance(10)
        self.assertEqual(await self.find_ids("expired", "late", "gone", "there"), ["there"])
        self.clock.advance(10)
        self.assertEqual(await self.find_ids("expired", "late", "gone", "there"), ["late", "there"])

    async def test_finds_current_account_after_move(self) -> None:
        """A message is found with its current account."""
        await self.enqueue_ids("a")
        await self.store.move_account(ALICE, "did:example:carol")
        self.assertEqual(
            [message.account for message in await self.store.find_messages(["a"])], ["did:example:carol"]
        )

    async def test_finds_arrivals_in_window(self) -> None:
        """Messages that arrived for some accounts in a time window are found in order of time, up to a limit."""
        await self.register(BOB, OTHER)
        for id, to in (("d", INBOX), ("c", OTHER), ("b", INBOX), ("a", OTHER)):
            await self.enqueue_ids(id, to=to)
            self.clock.advance(1)
        self.assertEqual(await self.find_arrivals(ALICE, BOB, ALICE), ["d", "c", "b", "a"])
        self.assertEqual(await self.find_arrivals(BOB, "unknown"), ["c", "a"])
        self.assertEqual(await self.find_arrivals(), [])
        self.assertEqual(await self.find_arrivals(ALICE, BOB, since=NOON + 1, until=NOON + 3), ["c", "b"])
        self.assertEqual(await self.find_arrivals(ALICE, BOB, limit=3), ["d", "c", "b"])
        self.assertEqual(await self.find_arrivals(ALICE, BOB, limit=0), [])

    async def test_finds_arrivals_pushed_in_vain(self) -> None:
        """A message that others have pushed in vain is found as long as it is queued."""
        await self.enqueue_ids("pushed", "again", "never", "gone")
        await self.enqueue_ids("expired", ttl=5)
        await self.store.mark_delivered(["pushed", "again"], node="other")
        await self.store.mark_pending(["again"])
        await self.store.acknowledge(ALICE, ["gone"])
        self.clock.advance(5)
        self.assertEqual(await self.find_arrivals(ALICE), ["again", "expired", "never", "pushed"])
        self.assertEqual(await self.find_arrivals("did:key:z6MkInbox"), [])

    async def test_arrivals_have_account_and_exact_time(self) -> None:
        """An arrival has its account and its exact time of arrival."""
        self.clock.advance(0.1234567)
        await self.enqueue_ids("a")
        at = self.clock.seconds()
        found = await self.store.find_arrivals([ALICE], ArrivalWindow(at, at + 0.5), limit=1)
        self.assertEqual(found, [MessageArrival("a", ALICE, at)])
        self.assertEqual(await self.find_arrivals(ALICE, until=at), [])

    async def test_window_may_be_open_ended(self) -> None:
        """A window may have no end: it then has all visible messages, whatever clocks say."""
        await self.enqueue_ids("late", delay=10)
        await self.enqueue_ids("delayed", delay=1000)
        await self.enqueue_ids("a", "b")
        self.clock.advance(10)
        await self.store.take_due_messages(9)
        self.assertEqual(await self.find_arrivals(ALICE, until=inf), ["a", "b", "late"])
        self.assertEqual(await self.find_arrivals(ALICE, since=NOON + 5, until=inf, limit=1), ["late"])
        self.assertEqual(await self.find_arrivals(ALICE, since=NOON + 11, until=inf), [])

    async def test_same_time_is_ordered_by_id(self) -> None:
        """Arrivals of the same time are ordered by id, so that any number can be read in pages."""
        await self.enqueue_ids(*"ecgadfb")
        self.clock.advance(1)
        await self.enqueue_ids("0")
        for limit in (1, 3, 4, 8):
            found = await self.read_pages(ALICE, limit=limit)
            self.assertEqual([item.id for item in found], [*"abcdefg0"])
        self.assertEqual(await self.find_arrivals(ALICE, after="e"), [*"fg0"])
        self.assertEqual(await self.find_arrivals(ALICE, after="g", until=NOON + 1), [])

    async def test_delayed_message_arrives_when_dispatched(self) -> None:
        """A delayed message arrives when it is taken as due, whenever it came, and not before, even if due."""
        await self.enqueue_ids("late", "later", delay=1000)
        await self.enqueue_ids("early")
        self.clock.advance(1001.7)
        self.assertEqual(await self.find_arrivals(ALICE), ["early"])
        self.assertEqual(len(await self.store.take_due_messages(9)), 2)
        at = self.clock.seconds()
        await self.enqueue_ids("last")
        found = await self.store.find_arrivals([BOB, ALICE], ArrivalWindow(at, at + 1), limit=9)
        self.assertEqual(found, [MessageArrival(id, ALICE, at) for id in ("last", "late", "later")])
        for limit in (1, 2, 3):
            pages = await self.read_pages(ALICE, limit=limit)
            self.assertEqual([page.id for page in pages], ["early", "last", "late", "later"])
        self.assertEqual(await self.find_arrivals(ALICE, since=at + 0.1), [])
        self.assertEqual(await self.find_arrivals(ALICE, since=at - 1, until=at), [])
        self.assertEqual(await self.find_arrivals(BOB), [])
        self.assertEqual(
            [message.due_at for message in await self.store.find_messages(["late", "early"])], [None, None]
        )
        self.assertEqual((await self.count_messages())[0], 4)
        await self.store.acknowledge(ALICE, ["late"])
        self.assertEqual(await self.find_arrivals(ALICE, since=at), ["last", "later"])

    async def test_delayed_messages_arrive_separately(self) -> None:
        """Each delayed message arrives at its own time."""
        for number, id in enumerate("cba"):
            await self.enqueue_ids(id, delay=10 * (number + 1))
        for _ in "cba":
            self.clock.advance(10)
            await self.store.take_due_messages(9)
        self.assertEqual(await self.find_arrivals(ALICE), ["c", "b", "a"])
        self.assertEqual(await self.find_arrivals(ALICE, since=NOON + 20), ["b", "a"])
        self.assertEqual(await self.find_arrivals(ALICE, until=NOON + 30), ["c", "b"])
        self.assertIsNone(await self.store.find_next_due())
        self.assertEqual(await self.store.take_due_messages(9), [])

    async def test_accepts_many_accounts(self) -> None:
        """As many accounts can be looked up as a node has sockets."""
        await self.enqueue_ids("a")
        self.assertEqual(await self.find_arrivals(*(f"did:example:{number}" for number in range(2000)), ALICE), ["a"])

    async def test_page_is_limited_in_bytes(self) -> None:
        """A page has at most the allowed bytes, but at least one message."""
        await self.enqueue_ids("a", "b", data=LARGE)
        await self.enqueue_ids("c", data=LARGE[::4])
        await self.enqueue_ids("d", data=b"x" * self.largest)
        self.assertEqual(await self.find_ids("a", "b", "c"), ["a", "b"])
        self.assertEqual(await self.find_ids("c", "d"), ["c"])
        self.assertEqual(await self.find_ids("d"), ["d"])
