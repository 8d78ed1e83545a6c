"""Contract for the lookup of events that another process has accepted."""

from __future__ import annotations

from math import inf

from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES, DecentrlQuotas, PendingEvent
from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival
from tests.store.builders import ALICE, BOB, HOUR, NOON
from tests.store.contract.decentrl_base import DecentrlContract

HALF_PAGE = "x" * (MAX_PAGE_BYTES // 2)


class DecentrlEventLookupContract(DecentrlContract):
    """
    Contract of `IDecentrlStore.find_pending` and `IDecentrlStore.find_pending_arrivals`.

    :ivar largest: bytes of an event that is more than a slice may have, or nearly as much if no more can be kept.
    """

    largest = MAX_PAGE_BYTES + 1

    caps = DecentrlQuotas(pending_bytes=4 * MAX_PAGE_BYTES)

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        await self.save_contracts("contract of Alice", owner=ALICE, peer=BOB)
        await self.save_contracts("contract of Bob", owner=BOB, peer=ALICE)

    async def find_ids(self, *ids: str) -> list[str]:
        return [event.id for event in await self.decentrl.find_pending(ids)]

    async def find_arrivals(
        self, *recipients: str, since: float = NOON, until: float = NOON + HOUR, after: str = "", limit: int = 99
    ) -> list[str]:
        found = await self.decentrl.find_pending_arrivals(recipients, ArrivalWindow(since, until, after), limit=limit)
        return [item.id for item in found]

    async def test_finds_by_id(self) -> None:
        """Pending events are found by id, complete, in order of arrival, whoever the recipient is."""
        await self.deliver_events("c", payload="1\u20ac")
        await self.deliver_events("a", to=BOB, sender=ALICE)
        await self.deliver_events("b")
        self.assertEqual(await self.find_ids("b", "unknown", "a", "c", "a", ""), ["c", "a", "b"])
        self.assertEqual(await self.find_ids(), [])
        expected = PendingEvent("c", ALICE, BOB, "1\u20ac", NOON)
        self.assertEqual(await self.decentrl.find_pending(["c"]), [expected])
        await self.decentrl.acknowledge_events(self.make_guard(ALICE), ALICE, ["c"])
        self.assertEqual(await self.find_ids("c", "b"), ["b"])

    async def test_finds_hundreds_of_ids(self) -> None:
        """Hundreds of ids can be looked up at once."""
        ids = [f"p{number}" for number in range(40)]
        await self.deliver_events(*ids)
        self.assertEqual(await self.find_ids(*(f"x{number}" for number in range(900)), *reversed(ids)), ids)

    async def test_finds_arrivals_in_window(self) -> None:
        """Events that arrived for some DIDs in a time window are found in order of time, up to a limit."""
        for id, to, sender in (("d", ALICE, BOB), ("c", BOB, ALICE), ("b", ALICE, BOB), ("a", BOB, ALICE)):
            await self.deliver_events(id, to=to, sender=sender)
            self.clock.advance(1)
        self.assertEqual(await self.find_arrivals(ALICE, BOB, ALICE), ["d", "c", "b", "a"])
        self.assertEqual(await self.find_arrivals(BOB, "unknown"), ["c", "a"])
        self.assertEqual(await self.find_arrivals(), [])
        self.assertEqual(await self.find_arrivals(ALICE, BOB, since=NOON + 1, until=NOON + 3), ["c", "b"])
        self.assertEqual(await self.find_arrivals(ALICE, BOB, limit=3), ["d", "c", "b"])
        self.assertEqual(await self.find_arrivals(ALICE, BOB, limit=0), [])
        await self.decentrl.acknowledge_events(self.make_guard(ALICE), ALICE, ["d"])
        self.assertEqual(await self.find_arrivals(ALICE), ["b"])

    async def test_arrivals_have_recipient_and_exact_time(self) -> None:
        """An arrival has its recipient and its exact time of arrival."""
        self.clock.advance(0.1234567)
        await self.deliver_events("a")
        at = self.clock.seconds()
        found = await self.decentrl.find_pending_arrivals([BOB, ALICE], ArrivalWindow(at, at + 0.5), limit=1)
        self.assertEqual(found, [MessageArrival("a", ALICE, at)])
        self.assertEqual(await self.find_arrivals(ALICE, until=at), [])

    async def test_window_may_be_open_ended(self) -> None:
        """A window may have no end."""
        await self.deliver_events("a", "b")
        self.assertEqual(await self.find_arrivals(ALICE, until=inf), ["a", "b"])
        self.assertEqual(await self.find_arrivals(ALICE, since=NOON + 1, until=inf), [])

    async def test_same_time_is_ordered_by_id(self) -> None:
        """Arrivals of the same time are ordered by id, so that any number can be read in pages."""
        await self.deliver_events(*"ecgadfb")
        self.clock.advance(1)
        await self.deliver_events("0")
        for limit in (1, 3, 4, 8):
            window, found = ArrivalWindow(NOON, NOON + HOUR), list[str]()
            while page := await self.decentrl.find_pending_arrivals([ALICE], window, limit=limit):
                found += [one.id for one in page]
                window = window.behind(page[-1])
            self.assertEqual(found, [*"abcdefg0"])
        self.assertEqual(await self.find_arrivals(ALICE, after="g", until=NOON + 1), [])

    async def test_accepts_many_recipients(self) -> None:
        """As many DIDs can be looked up as a node has sockets."""
        await self.deliver_events("a")
        self.assertEqual(await self.find_arrivals(*(f"did:example:{number}" for number in range(2000)), ALICE), ["a"])

    async def test_page_is_limited_in_bytes(self) -> None:
        """A page has at most the allowed bytes, but at least one event."""
        await self.deliver_events("a", "b", payload=HALF_PAGE)
        await self.deliver_events("c", payload=HALF_PAGE[::4])
        await self.deliver_events("d", payload="x" * self.largest)
        self.assertEqual(await self.find_ids("a", "b", "c"), ["a", "b"])
        self.assertEqual(await self.find_ids("c", "d"), ["c"])
        self.assertEqual(await self.find_ids("d"), ["d"])
