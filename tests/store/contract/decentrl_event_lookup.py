"""Events that one process has accepted and another one looks for."""

from __future__ import annotations

from math import inf

from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES, DecentrlQuotas, PendingEvent
from mediatord.store.interfaces.messages import ArrivalWindow, MessageArrival
from tests.store.builders import ALICE, BOB, HOUR, NOON
from tests.store.contract.decentrl_base import DecentrlContract

HALF = "x" * (MAX_PAGE_BYTES // 2)


class DecentrlEventLookupContract(DecentrlContract):
    """
    Promises of `IDecentrlStore.find_pending` and `IDecentrlStore.find_pending_arrivals`.

    :ivar largest: bytes of an event that is more than a slice may have, or nearly as much if no more can be kept.
    """

    largest = MAX_PAGE_BYTES + 1

    caps = DecentrlQuotas(pending_bytes=4 * MAX_PAGE_BYTES)

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        await self.agree("contract of Alice", owner=ALICE, peer=BOB)
        await self.agree("contract of Bob", owner=BOB, peer=ALICE)

    async def find(self, *ids: str) -> list[str]:
        return [event.id for event in await self.decentrl.find_pending(ids)]

    async def arrived(
        self, *recipients: str, since: float = NOON, until: float = NOON + HOUR, after: str = "", limit: int = 99
    ) -> list[str]:
        found = await self.decentrl.find_pending_arrivals(recipients, ArrivalWindow(since, until, after), limit=limit)
        return [one.id for one in found]

    async def test_find(self) -> None:
        """What waits is found by id, whole, in order of arrival, whoever it is for."""
        await self.send("c", payload="1\u20ac")
        await self.send("a", to=BOB, sender=ALICE)
        await self.send("b")
        self.assertEqual(await self.find("b", "unknown", "a", "c", "a", ""), ["c", "a", "b"])
        self.assertEqual(await self.find(), [])
        expected = PendingEvent("c", ALICE, BOB, "1\u20ac", NOON)
        self.assertEqual(await self.decentrl.find_pending(["c"]), [expected])
        await self.decentrl.acknowledge_events(self.guard(ALICE), ALICE, ["c"])
        self.assertEqual(await self.find("c", "b"), ["b"])

    async def test_find_many(self) -> None:
        """Hundreds of ids are no trouble."""
        ids = [f"p{number}" for number in range(40)]
        await self.send(*ids)
        self.assertEqual(await self.find(*(f"x{number}" for number in range(900)), *reversed(ids)), ids)

    async def test_arrived(self) -> None:
        """What came for some DIDs between two times is found, in order of time, at most so many."""
        for id, to, sender in (("d", ALICE, BOB), ("c", BOB, ALICE), ("b", ALICE, BOB), ("a", BOB, ALICE)):
            await self.send(id, to=to, sender=sender)
            self.clock.advance(1)
        self.assertEqual(await self.arrived(ALICE, BOB, ALICE), ["d", "c", "b", "a"])
        self.assertEqual(await self.arrived(BOB, "unknown"), ["c", "a"])
        self.assertEqual(await self.arrived(), [])
        self.assertEqual(await self.arrived(ALICE, BOB, since=NOON + 1, until=NOON + 3), ["c", "b"])
        self.assertEqual(await self.arrived(ALICE, BOB, limit=3), ["d", "c", "b"])
        self.assertEqual(await self.arrived(ALICE, BOB, limit=0), [])
        await self.decentrl.acknowledge_events(self.guard(ALICE), ALICE, ["d"])
        self.assertEqual(await self.arrived(ALICE), ["b"])

    async def test_arrivals(self) -> None:
        """Whose it is and when it came, to the last bit."""
        self.clock.advance(0.1234567)
        await self.send("a")
        at = self.clock.seconds()
        found = await self.decentrl.find_pending_arrivals([BOB, ALICE], ArrivalWindow(at, at + 0.5), limit=1)
        self.assertEqual(found, [MessageArrival("a", ALICE, at)])
        self.assertEqual(await self.arrived(ALICE, until=at), [])

    async def test_arrived_ever_since(self) -> None:
        """A window may have no end."""
        await self.send("a", "b")
        self.assertEqual(await self.arrived(ALICE, until=inf), ["a", "b"])
        self.assertEqual(await self.arrived(ALICE, since=NOON + 1, until=inf), [])

    async def test_arrived_at_one_time(self) -> None:
        """Of the same time in order of ids, so that any number of them can be gone through."""
        await self.send(*"ecgadfb")
        self.clock.advance(1)
        await self.send("0")
        for limit in (1, 3, 4, 8):
            window, found = ArrivalWindow(NOON, NOON + HOUR), list[str]()
            while page := await self.decentrl.find_pending_arrivals([ALICE], window, limit=limit):
                found += [one.id for one in page]
                window = window.behind(page[-1])
            self.assertEqual(found, [*"abcdefg0"])
        self.assertEqual(await self.arrived(ALICE, after="g", until=NOON + 1), [])

    async def test_arrived_for_many(self) -> None:
        """So many DIDs may be asked for as a node has sockets."""
        await self.send("a")
        self.assertEqual(await self.arrived(*(f"did:example:{number}" for number in range(2000)), ALICE), ["a"])

    async def test_not_too_large(self) -> None:
        """No more comes at once than a slice may have, but always something."""
        await self.send("a", "b", payload=HALF)
        await self.send("c", payload=HALF[::4])
        await self.send("d", payload="x" * self.largest)
        self.assertEqual(await self.find("a", "b", "c"), ["a", "b"])
        self.assertEqual(await self.find("c", "d"), ["c"])
        self.assertEqual(await self.find("d"), ["d"])
