"""Messages that one process has accepted and another one looks for."""

from __future__ import annotations

from math import inf

from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES
from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival, QueueLimits, StoredMessage
from tests.store.builders import ALICE, BOB, HOUR, NOON
from tests.store.contract.base import INBOX, OTHER, StoreContract

LARGE = b"x" * (MAX_PAGE_BYTES // 2)


class MessageLookupContract(StoreContract):
    """
    Promises of `IMessageStore.find_messages` and `IMessageStore.find_arrivals`.

    :ivar largest: bytes of a message that is more than a slice may have, or nearly as much if no more can be kept.
    """

    largest = MAX_PAGE_BYTES + 1

    limits = QueueLimits(max_messages=100, max_bytes=4 * MAX_PAGE_BYTES)

    async def find(self, *ids: str) -> list[str]:
        return [message.id for message in await self.store.find_messages(ids)]

    async def arrived(
        self, *accounts: str, since: float = NOON, until: float = NOON + HOUR, after: str = "", limit: int = 99
    ) -> list[str]:
        found = await self.store.find_arrivals(accounts, ArrivalWindow(since, until, after), limit=limit)
        return [one.id for one in found]

    async def page_by_page(self, *accounts: str, limit: int) -> list[MessageArrival]:
        window, found = ArrivalWindow(NOON, NOON + HOUR), list[MessageArrival]()
        while page := await self.store.find_arrivals(accounts, window, limit=limit):
            found += page
            if len(page) < limit:
                break
            window = window.behind(page[-1])
        return found

    async def test_find(self) -> None:
        """What waits is found by id, whole, in order of arrival, whoever it is for."""
        await self.register(BOB, OTHER)
        await self.put("c", data=b"1")
        await self.put("a", to=OTHER)
        await self.put("b")
        self.assertEqual(await self.find("b", "unknown", "a", "c", "a", ""), ["c", "a", "b"])
        self.assertEqual(await self.find(), [])
        await self.store.mark_delivered(["c"])
        expected = StoredMessage("c", INBOX, ALICE, b"1", "json", NOON, NOON + HOUR, "delivered")
        self.assertEqual(await self.store.find_messages(["c"]), [expected])

    async def test_find_many(self) -> None:
        """Hundreds of ids are no trouble."""
        ids = [f"m{number}" for number in range(90)]
        await self.put(*ids)
        self.assertEqual(await self.find(*(f"x{number}" for number in range(900)), *reversed(ids)), ids)

    async def test_find_visible(self) -> None:
        """What has expired, is not due or was acknowledged is not found."""
        await self.put("expired", ttl=10)
        await self.put("late", delay=20)
        await self.put("gone", "there")
        await self.store.acknowledge(ALICE, ["gone"])
        self.clock.advance(10)
        self.assertEqual(await self.find("expired", "late", "gone", "there"), ["there"])
        self.clock.advance(10)
        self.assertEqual(await self.find("expired", "late", "gone", "there"), ["late", "there"])

    async def test_find_after_a_move(self) -> None:
        """A message shows the account as it is now."""
        await self.put("a")
        await self.store.move_account(ALICE, "did:example:carol")
        self.assertEqual(
            [message.account for message in await self.store.find_messages(["a"])], ["did:example:carol"]
        )

    async def test_arrived(self) -> None:
        """What came for some accounts between two times is found, in order of time, at most so many."""
        await self.register(BOB, OTHER)
        for id, to in (("d", INBOX), ("c", OTHER), ("b", INBOX), ("a", OTHER)):
            await self.put(id, to=to)
            self.clock.advance(1)
        self.assertEqual(await self.arrived(ALICE, BOB, ALICE), ["d", "c", "b", "a"])
        self.assertEqual(await self.arrived(BOB, "unknown"), ["c", "a"])
        self.assertEqual(await self.arrived(), [])
        self.assertEqual(await self.arrived(ALICE, BOB, since=NOON + 1, until=NOON + 3), ["c", "b"])
        self.assertEqual(await self.arrived(ALICE, BOB, limit=3), ["d", "c", "b"])
        self.assertEqual(await self.arrived(ALICE, BOB, limit=0), [])

    async def test_arrived_whatever_became_of_it(self) -> None:
        """Others may have pushed it in vain: it is found as long as it waits."""
        await self.put("pushed", "again", "never", "gone")
        await self.put("expired", ttl=5)
        await self.store.mark_delivered(["pushed", "again"], node="other")
        await self.store.mark_pending(["again"])
        await self.store.acknowledge(ALICE, ["gone"])
        self.clock.advance(5)
        self.assertEqual(await self.arrived(ALICE), ["again", "expired", "never", "pushed"])
        self.assertEqual(await self.arrived("did:key:z6MkInbox"), [])

    async def test_arrivals(self) -> None:
        """Whose it is and when it came, to the last bit."""
        self.clock.advance(0.1234567)
        await self.put("a")
        at = self.clock.seconds()
        found = await self.store.find_arrivals([ALICE], ArrivalWindow(at, at + 0.5), limit=1)
        self.assertEqual(found, [MessageArrival("a", ALICE, at)])
        self.assertEqual(await self.arrived(ALICE, until=at), [])

    async def test_arrived_ever_since(self) -> None:
        """A window may have no end: whatever clocks say, all that came and can be seen is in it."""
        await self.put("late", delay=10)
        await self.put("delayed", delay=1000)
        await self.put("a", "b")
        self.clock.advance(10)
        await self.store.take_due_messages(9)
        self.assertEqual(await self.arrived(ALICE, until=inf), ["a", "b", "late"])
        self.assertEqual(await self.arrived(ALICE, since=NOON + 5, until=inf, limit=1), ["late"])
        self.assertEqual(await self.arrived(ALICE, since=NOON + 11, until=inf), [])

    async def test_arrived_at_one_time(self) -> None:
        """Of the same time in order of ids, so that any number of them can be gone through."""
        await self.put(*"ecgadfb")
        self.clock.advance(1)
        await self.put("0")
        for limit in (1, 3, 4, 8):
            found = await self.page_by_page(ALICE, limit=limit)
            self.assertEqual([one.id for one in found], [*"abcdefg0"])
        self.assertEqual(await self.arrived(ALICE, after="e"), [*"fg0"])
        self.assertEqual(await self.arrived(ALICE, after="g", until=NOON + 1), [])

    async def test_delayed_arrives_when_it_is_handed_out(self) -> None:
        """However long ago it came, and not before, though it is due."""
        await self.put("late", "later", delay=1000)
        await self.put("early")
        self.clock.advance(1001.7)
        self.assertEqual(await self.arrived(ALICE), ["early"])
        self.assertEqual(len(await self.store.take_due_messages(9)), 2)
        at = self.clock.seconds()
        await self.put("last")
        found = await self.store.find_arrivals([BOB, ALICE], ArrivalWindow(at, at + 1), limit=9)
        self.assertEqual(found, [MessageArrival(id, ALICE, at) for id in ("last", "late", "later")])
        for limit in (1, 2, 3):
            pages = await self.page_by_page(ALICE, limit=limit)
            self.assertEqual([one.id for one in pages], ["early", "last", "late", "later"])
        self.assertEqual(await self.arrived(ALICE, since=at + 0.1), [])
        self.assertEqual(await self.arrived(ALICE, since=at - 1, until=at), [])
        self.assertEqual(await self.arrived(BOB), [])
        self.assertEqual(
            [message.due_at for message in await self.store.find_messages(["late", "early"])], [None, None]
        )
        self.assertEqual((await self.count())[0], 4)
        await self.store.acknowledge(ALICE, ["late"])
        self.assertEqual(await self.arrived(ALICE, since=at), ["last", "later"])

    async def test_handed_out_one_after_another(self) -> None:
        """Each at its time."""
        for number, id in enumerate("cba"):
            await self.put(id, delay=10 * (number + 1))
        for _ in "cba":
            self.clock.advance(10)
            await self.store.take_due_messages(9)
        self.assertEqual(await self.arrived(ALICE), ["c", "b", "a"])
        self.assertEqual(await self.arrived(ALICE, since=NOON + 20), ["b", "a"])
        self.assertEqual(await self.arrived(ALICE, until=NOON + 30), ["c", "b"])
        self.assertIsNone(await self.store.find_next_due())
        self.assertEqual(await self.store.take_due_messages(9), [])

    async def test_arrived_for_many(self) -> None:
        """So many accounts may be asked for as a node has sockets."""
        await self.put("a")
        self.assertEqual(await self.arrived(*(f"did:example:{number}" for number in range(2000)), ALICE), ["a"])

    async def test_not_too_large(self) -> None:
        """No more comes at once than a slice may have, but always something."""
        await self.put("a", "b", data=LARGE)
        await self.put("c", data=LARGE[::4])
        await self.put("d", data=b"x" * self.largest)
        self.assertEqual(await self.find("a", "b", "c"), ["a", "b"])
        self.assertEqual(await self.find("c", "d"), ["c"])
        self.assertEqual(await self.find("d"), ["d"])
