"""Events on their way, until they are acknowledged."""

from __future__ import annotations

from mediatord.errors import ContractNotFound, QuotaExceeded, RecipientNotRegistered
from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES, CommandGuard, DecentrlQuotas, PendingEvent
from mediatord.store.interfaces.messages import QueueTotals, RemovedMessage
from tests.store.builders import ALICE, BOB, HOUR, NOON
from tests.store.contract.base import INBOX
from tests.store.contract.decentrl_base import ALL, CAROL, LARGE_TEXTS, ODD_TEXTS, DecentrlContract


class DecentrlDeliveryContract(DecentrlContract):
    """Promises about who may write to whom, and how much."""

    caps = DecentrlQuotas(pending=3, pending_bytes=20)

    async def rejected(self, *, to: str = ALICE, sender: str = BOB, payload: str = "") -> None:
        event = PendingEvent("rejected", to, sender, payload, self.clock.seconds())
        await self.refused(ContractNotFound, lambda guard: self.decentrl.enqueue_event(guard, event))

    async def over_quota(self, *, to: str = ALICE, sender: str = BOB, payload: str = "") -> None:
        event = PendingEvent("one too many", to, sender, payload, self.clock.seconds())
        await self.refused(QuotaExceeded, lambda guard: self.decentrl.enqueue_event(guard, event))

    async def acknowledge(self, *ids: str, recipient: str = ALICE) -> list[RemovedMessage]:
        return await self.decentrl.acknowledge_events(self.guard(recipient), recipient, ids)

    async def test_without_contract(self) -> None:
        """Nothing is kept for who has no contract with the sender (reference 6.3)."""
        await self.rejected()
        self.assertEqual(await self.pending(), [])

    async def test_contract_of_the_recipient(self) -> None:
        """What the sender owns does not count; what the recipient owns lets that sender in, and only that one."""
        await self.agree("a", owner=BOB, peer=ALICE)
        await self.rejected()
        await self.agree("b", owner=ALICE, peer=BOB)
        await self.send("p")
        await self.rejected(sender=CAROL)
        await self.rejected(sender=ALICE)
        await self.rejected(sender=BOB[:-1])
        self.assertEqual(await self.pending(), ["p"])

    async def test_registration_is_no_contract(self) -> None:
        """That both are registered lets nobody write to anybody, nor a contract with a third."""
        await self.agree("a", owner=ALICE, peer=CAROL)
        await self.agree("b", owner=BOB, peer=CAROL)
        await self.rejected()

    async def test_contract_expires(self) -> None:
        """From the second in which the contract expires it lets nobody in; what has come stays."""
        await self.agree("a", ttl=10)
        self.clock.advance(9.5)
        await self.send("p")
        self.clock.advance(0.5)
        await self.rejected()
        self.assertEqual(await self.pending(), ["p"])
        await self.agree("b", ttl=-1)
        await self.rejected()

    async def test_looks_at_the_clock(self) -> None:
        """It is the store's clock that a contract expires by, not when the event is said to have come."""
        await self.agree("a", ttl=10)
        late = PendingEvent("late", ALICE, BOB, "", NOON + HOUR)
        await self.decentrl.enqueue_event(self.guard(), late)
        self.clock.advance(10)
        early = PendingEvent("early", ALICE, BOB, "", NOON)
        await self.refused(ContractNotFound, lambda guard: self.decentrl.enqueue_event(guard, early))

    async def test_any_contract(self) -> None:
        """Of several contracts of a pair any that has not expired suffices (reference 6.3)."""
        await self.agree("long", ttl=20)
        await self.agree("short", ttl=10)
        await self.agree("dead", ttl=-10)
        await self.send("a")
        self.clock.advance(15)
        await self.send("b")
        self.clock.advance(5)
        await self.rejected()
        await self.agree("new", ttl=20)
        await self.send("c")
        self.assertEqual(await self.pending(), ["a", "b", "c"])

    async def test_registration_first(self) -> None:
        """Who is not registered has no events, whatever contracts it has, and that is the reason given."""
        await self.agree("a", ttl=9 * HOUR)
        self.clock.advance(HOUR)
        event = PendingEvent("p", ALICE, BOB, "", self.clock.seconds())
        await self.refused(
            RecipientNotRegistered, lambda guard: self.decentrl.enqueue_event(guard, event), self.guard(None, ALICE)
        )

    async def test_cap(self) -> None:
        """At most so many events wait for one DID, whoever they are from; nothing makes room by itself."""
        await self.agree("a", peer=BOB)
        await self.agree("b", peer=CAROL)
        await self.agree("c", owner=BOB, peer=CAROL)
        await self.send("p", "q", sender=BOB)
        await self.send("r", sender=CAROL)
        await self.over_quota()
        await self.over_quota(sender=CAROL)
        await self.send("s", to=BOB, sender=CAROL)
        self.assertEqual(await self.pending(), ["p", "q", "r"])

    async def test_byte_cap(self) -> None:
        """The payloads of what waits have at most so many bytes as UTF-8."""
        await self.agree("a")
        await self.send("p", payload="x" * 10)
        await self.over_quota(payload="x" * 11)
        await self.over_quota(payload="\u20ac\u20ac\u20ac\u20ac")
        await self.send("q", payload="\u20ac\u20ac\u20ac!")
        await self.over_quota(payload="x")
        await self.send("r", payload="")
        self.assertEqual(await self.pending(), ["p", "q", "r"])

    async def test_contract_before_quota(self) -> None:
        """A stranger does not learn how much waits."""
        await self.agree("a")
        await self.send("p", "q", "r")
        await self.rejected(sender=CAROL)

    async def test_acknowledged_makes_room(self) -> None:
        """What is acknowledged counts no more, neither as an event nor in bytes."""
        await self.agree("a")
        await self.send("p", payload="x" * 20)
        await self.over_quota(payload="x")
        await self.acknowledge("p")
        await self.send("q", payload="x" * 18)
        await self.send("r", "s", payload="x")
        await self.over_quota()
        await self.acknowledge("s")
        await self.send("t", payload="x")
        self.assertEqual(await self.pending(), ["q", "r", "t"])


class DecentrlPendingContract(DecentrlContract):
    """Promises about events that wait."""

    caps = DecentrlQuotas(pending_bytes=2 * MAX_PAGE_BYTES)

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        await self.agree("alice and bob", peer=BOB)
        await self.agree("alice and carol", peer=CAROL)
        await self.agree("bob and alice", owner=BOB, peer=ALICE)

    async def acknowledge(self, *ids: str, recipient: str = ALICE) -> list[RemovedMessage]:
        return await self.decentrl.acknowledge_events(self.guard(recipient), recipient, ids)

    async def test_as_given(self) -> None:
        """An event comes back as it was given."""
        events = [
            PendingEvent(f"p{number}", ALICE, BOB, text, NOON - number / 3) for number, text in enumerate(ODD_TEXTS)
        ]
        for event in events:
            await self.decentrl.enqueue_event(self.guard(), event)
        found = await self.decentrl.pending_events(ALICE, None, ALL)
        self.assertEqual((found.items, found.total), (tuple(events), len(events)))

    async def test_order_of_arrival(self) -> None:
        """Events wait in the order in which they were delivered, whatever their ids and times say."""
        for id, received_at in (("c", NOON), ("a", NOON + 5), ("b", NOON - 5), ("d", NOON)):
            await self.decentrl.enqueue_event(self.guard(), PendingEvent(id, ALICE, BOB, "", received_at))
        self.assertEqual(await self.pending(), ["c", "a", "b", "d"])

    async def test_of_one_sender(self) -> None:
        """The events of one sender can be asked for, and are still in order."""
        await self.send("c", sender=BOB)
        await self.send("b", sender=CAROL)
        await self.send("a", sender=BOB)
        self.assertEqual(await self.pending(sender=BOB), ["c", "a"])
        self.assertEqual(await self.pending(sender=CAROL), ["b"])
        self.assertEqual(await self.pending(), ["c", "b", "a"])
        for stranger in (ALICE, BOB[:-1], ""):
            self.assertEqual(await self.pending(sender=stranger), [])

    async def test_recipients_are_apart(self) -> None:
        """What waits for one waits for nobody else, its sender included."""
        await self.send("a", to=ALICE, sender=BOB)
        self.assertEqual(await self.pending(BOB), [])
        self.assertEqual(await self.pending(ALICE[:-1]), [])
        self.assertEqual(await self.pending(ALICE), ["a"])

    async def test_acknowledge(self) -> None:
        """What its recipient acknowledges is gone and reported, in order of arrival, each once."""
        await self.send("b", sender=CAROL, payload="\u20ac")
        self.clock.advance(5)
        await self.send("a", "c", payload="12345")
        gone = await self.acknowledge("a", "unknown", "b", "a", "")
        self.assertEqual(
            gone, [RemovedMessage("b", ALICE, ALICE, 3, NOON, 0), RemovedMessage("a", ALICE, ALICE, 5, NOON + 5, 0)]
        )
        self.assertEqual(await self.pending(), ["c"])
        self.assertEqual(await self.pending(sender=CAROL), [])
        self.assertEqual(await self.acknowledge("a", "b"), [])
        self.assertEqual(await self.acknowledge(), [])

    async def test_acknowledge_foreign(self) -> None:
        """Nobody acknowledges what waits for somebody else, not even its sender (reference 8)."""
        await self.send("a", to=ALICE, sender=BOB)
        await self.send("b", to=BOB, sender=ALICE)
        self.assertEqual([gone.id for gone in await self.acknowledge("a", "b", recipient=BOB)], ["b"])
        self.assertEqual(await self.pending(), ["a"])

    async def test_acknowledge_many(self) -> None:
        """A thousand ids are no more trouble than one."""
        ids = [f"p{number}" for number in range(30)]
        await self.send(*ids)
        gone = await self.acknowledge(*(f"unknown {number}" for number in range(1500)), *ids[1:])
        self.assertEqual([one.id for one in gone], ids[1:])
        self.assertEqual(await self.pending(), ["p0"])

    async def test_outlives_the_contract(self) -> None:
        """What waits is there when contract and registration are not any more."""
        await self.send("a")
        self.clock.advance(2 * HOUR)
        self.assertEqual(await self.pending(), ["a"])
        await self.decentrl.acknowledge_events(CommandGuard(b"nonce", NOON), ALICE, ["a"])
        self.assertEqual(await self.pending(), [])

    async def test_slices(self) -> None:
        """Any slice can be asked for, however far beyond the end, and the total does not depend on it."""
        await self.send("z", "a")
        await self.send("y", sender=CAROL)
        await self.send("b")
        await self.slices(lambda part: self.decentrl.pending_events(ALICE, None, part), ["z", "a", "y", "b"])
        await self.slices(lambda part: self.decentrl.pending_events(ALICE, BOB, part), ["z", "a", "b"])

    async def test_too_large(self) -> None:
        """Too much at once is refused, so that less can be asked for."""
        for number, text in enumerate(LARGE_TEXTS):
            await self.send(f"p{number}", payload=text)
        await self.too_large(lambda part: self.decentrl.pending_events(ALICE, None, part))

    async def test_waiting(self) -> None:
        """Events count like messages, and the oldest of both is the oldest."""
        await self.send("a", "b", to=ALICE, payload="xy")
        first = await self.store.get_queue_totals()
        self.assertEqual((first.messages, first.bytes, first.recipients), (2, 4, 1))
        assert first.oldest_received_at is not None
        self.clock.advance(5)
        await self.put("m", data=b"x" * 7)
        self.assertEqual(await self.store.get_queue_totals(), QueueTotals(3, 11, 2, first.oldest_received_at))
        await self.acknowledge("a", "b")
        later = await self.store.get_queue_totals()
        self.assertEqual((later.messages, later.bytes, later.recipients), (1, 7, 1))
        assert later.oldest_received_at is not None and later.oldest_received_at > first.oldest_received_at

    async def test_queue_sizes(self) -> None:
        """What waits for a DID is part of its queue, together with messages of the other protocol."""
        await self.put("m")
        await self.send("a", "b", to=ALICE)
        await self.send("c", to=BOB, sender=ALICE)
        self.assertEqual(await self.store.queue_sizes(1), ([(ALICE, 2)], 2))
        await self.store.update_recipients(BOB, [(BOB, "add")], max_recipients=9)
        await self.put("n", "o", to=BOB)
        largest, rest = await self.store.queue_sizes(9)
        self.assertEqual(
            (largest[:2], dict(largest), rest), ([(BOB, 3), (ALICE, 2)], {BOB: 3, ALICE: 2, INBOX: 1}, 0)
        )
        await self.acknowledge("a", "b")
        await self.acknowledge("c", recipient=BOB)
        self.assertEqual(await self.store.queue_sizes(9), ([(BOB, 2), (INBOX, 1)], 0))
        self.assertEqual(await self.store.queue_sizes(0), ([], 3))
