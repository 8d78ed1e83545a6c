"""Contract for pending events."""

from __future__ import annotations

from mediatord.errors import ContractNotFound, QuotaExceeded, RecipientNotRegistered
from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES, CommandGuard, DecentrlQuotas, PendingEvent
from mediatord.store.interfaces.messages import QueueTotals, RemovedMessage
from tests.store.builders import ALICE, BOB, HOUR, NOON
from tests.store.contract.base import INBOX
from tests.store.contract.decentrl_base import ALL, CAROL, LARGE_TEXTS, ODD_TEXTS, DecentrlContract


class DecentrlDeliveryContract(DecentrlContract):
    """Contract for delivery: contracts and quotas."""

    caps = DecentrlQuotas(pending=3, pending_bytes=20)

    async def assert_rejected(self, *, to: str = ALICE, sender: str = BOB, payload: str = "") -> None:
        event = PendingEvent("rejected", to, sender, payload, self.clock.seconds())
        await self.assert_refused(ContractNotFound, lambda guard: self.decentrl.enqueue_event(guard, event))

    async def assert_exceeds_quota(self, *, to: str = ALICE, sender: str = BOB, payload: str = "") -> None:
        event = PendingEvent("one too many", to, sender, payload, self.clock.seconds())
        await self.assert_refused(QuotaExceeded, lambda guard: self.decentrl.enqueue_event(guard, event))

    async def acknowledge_events(self, *ids: str, recipient: str = ALICE) -> list[RemovedMessage]:
        return await self.decentrl.acknowledge_events(self.make_guard(recipient), recipient, ids)

    async def test_refuses_without_contract(self) -> None:
        """Nothing is queued for a recipient without a contract with the sender (reference 6.3)."""
        await self.assert_rejected()
        self.assertEqual(await self.list_pending(), [])

    async def test_requires_contract_of_recipient(self) -> None:
        """Only a contract that the recipient owns admits a sender, and only that sender."""
        await self.save_contracts("a", owner=BOB, peer=ALICE)
        await self.assert_rejected()
        await self.save_contracts("b", owner=ALICE, peer=BOB)
        await self.deliver_events("p")
        await self.assert_rejected(sender=CAROL)
        await self.assert_rejected(sender=ALICE)
        await self.assert_rejected(sender=BOB[:-1])
        self.assertEqual(await self.list_pending(), ["p"])

    async def test_registration_is_no_contract(self) -> None:
        """That both are registered admits no sender, nor does a contract with a third DID."""
        await self.save_contracts("a", owner=ALICE, peer=CAROL)
        await self.save_contracts("b", owner=BOB, peer=CAROL)
        await self.assert_rejected()

    async def test_refuses_expired_contract(self) -> None:
        """A contract admits nobody from the second in which it expires; events queued before stay."""
        await self.save_contracts("a", ttl=10)
        self.clock.advance(9.5)
        await self.deliver_events("p")
        self.clock.advance(0.5)
        await self.assert_rejected()
        self.assertEqual(await self.list_pending(), ["p"])
        await self.save_contracts("b", ttl=-1)
        await self.assert_rejected()

    async def test_contract_expires_by_clock_of_store(self) -> None:
        """A contract expires by the store's clock, not by the event's time."""
        await self.save_contracts("a", ttl=10)
        after_expiry = PendingEvent("late", ALICE, BOB, "", NOON + HOUR)
        await self.decentrl.enqueue_event(self.make_guard(), after_expiry)
        self.clock.advance(10)
        before_expiry = PendingEvent("early", ALICE, BOB, "", NOON)
        await self.assert_refused(ContractNotFound, lambda guard: self.decentrl.enqueue_event(guard, before_expiry))

    async def test_any_valid_contract_suffices(self) -> None:
        """Of several contracts of a pair any that has not expired suffices (reference 6.3)."""
        await self.save_contracts("long", ttl=20)
        await self.save_contracts("short", ttl=10)
        await self.save_contracts("dead", ttl=-10)
        await self.deliver_events("a")
        self.clock.advance(15)
        await self.deliver_events("b")
        self.clock.advance(5)
        await self.assert_rejected()
        await self.save_contracts("new", ttl=20)
        await self.deliver_events("c")
        self.assertEqual(await self.list_pending(), ["a", "b", "c"])

    async def test_registration_is_checked_first(self) -> None:
        """An unregistered recipient gets no events, whatever its contracts; the error says so."""
        await self.save_contracts("a", ttl=9 * HOUR)
        self.clock.advance(HOUR)
        event = PendingEvent("p", ALICE, BOB, "", self.clock.seconds())
        await self.assert_refused(
            RecipientNotRegistered,
            lambda guard: self.decentrl.enqueue_event(guard, event),
            self.make_guard(None, ALICE),
        )

    async def test_limits_number_of_events(self) -> None:
        """At most so many events are queued for one DID, from all senders; nothing is evicted."""
        await self.save_contracts("a", peer=BOB)
        await self.save_contracts("b", peer=CAROL)
        await self.save_contracts("c", owner=BOB, peer=CAROL)
        await self.deliver_events("p", "q", sender=BOB)
        await self.deliver_events("r", sender=CAROL)
        await self.assert_exceeds_quota()
        await self.assert_exceeds_quota(sender=CAROL)
        await self.deliver_events("s", to=BOB, sender=CAROL)
        self.assertEqual(await self.list_pending(), ["p", "q", "r"])

    async def test_limits_bytes(self) -> None:
        """Payloads queued for a DID have a maximum of bytes in UTF-8."""
        await self.save_contracts("a")
        await self.deliver_events("p", payload="x" * 10)
        await self.assert_exceeds_quota(payload="x" * 11)
        await self.assert_exceeds_quota(payload="\u20ac\u20ac\u20ac\u20ac")
        await self.deliver_events("q", payload="\u20ac\u20ac\u20ac!")
        await self.assert_exceeds_quota(payload="x")
        await self.deliver_events("r", payload="")
        self.assertEqual(await self.list_pending(), ["p", "q", "r"])

    async def test_contract_is_checked_before_quota(self) -> None:
        """A sender without a contract does not learn how much is queued."""
        await self.save_contracts("a")
        await self.deliver_events("p", "q", "r")
        await self.assert_rejected(sender=CAROL)

    async def test_acknowledgement_frees_quota(self) -> None:
        """Acknowledged events count no more, neither in number nor in bytes."""
        await self.save_contracts("a")
        await self.deliver_events("p", payload="x" * 20)
        await self.assert_exceeds_quota(payload="x")
        await self.acknowledge_events("p")
        await self.deliver_events("q", payload="x" * 18)
        await self.deliver_events("r", "s", payload="x")
        await self.assert_exceeds_quota()
        await self.acknowledge_events("s")
        await self.deliver_events("t", payload="x")
        self.assertEqual(await self.list_pending(), ["q", "r", "t"])


class DecentrlPendingContract(DecentrlContract):
    """Contract for queued events."""

    caps = DecentrlQuotas(pending_bytes=2 * MAX_PAGE_BYTES)

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        await self.save_contracts("alice and bob", peer=BOB)
        await self.save_contracts("alice and carol", peer=CAROL)
        await self.save_contracts("bob and alice", owner=BOB, peer=ALICE)

    async def acknowledge_events(self, *ids: str, recipient: str = ALICE) -> list[RemovedMessage]:
        return await self.decentrl.acknowledge_events(self.make_guard(recipient), recipient, ids)

    async def test_stores_event_unchanged(self) -> None:
        """An event comes back as it was delivered."""
        events = [
            PendingEvent(f"p{number}", ALICE, BOB, text, NOON - number / 3) for number, text in enumerate(ODD_TEXTS)
        ]
        for event in events:
            await self.decentrl.enqueue_event(self.make_guard(), event)
        found = await self.decentrl.pending_events(ALICE, None, ALL)
        self.assertEqual((found.items, found.total), (tuple(events), len(events)))

    async def test_order_of_arrival(self) -> None:
        """Events are queued in the order of delivery, whatever their ids and times are."""
        for id, received_at in (("c", NOON), ("a", NOON + 5), ("b", NOON - 5), ("d", NOON)):
            await self.decentrl.enqueue_event(self.make_guard(), PendingEvent(id, ALICE, BOB, "", received_at))
        self.assertEqual(await self.list_pending(), ["c", "a", "b", "d"])

    async def test_filters_by_sender(self) -> None:
        """Events of one sender can be listed, still in order."""
        await self.deliver_events("c", sender=BOB)
        await self.deliver_events("b", sender=CAROL)
        await self.deliver_events("a", sender=BOB)
        self.assertEqual(await self.list_pending(sender=BOB), ["c", "a"])
        self.assertEqual(await self.list_pending(sender=CAROL), ["b"])
        self.assertEqual(await self.list_pending(), ["c", "b", "a"])
        for other in (ALICE, BOB[:-1], ""):
            self.assertEqual(await self.list_pending(sender=other), [])

    async def test_recipients_are_separate(self) -> None:
        """Events are listed for their recipient only, not even for their sender."""
        await self.deliver_events("a", to=ALICE, sender=BOB)
        self.assertEqual(await self.list_pending(BOB), [])
        self.assertEqual(await self.list_pending(ALICE[:-1]), [])
        self.assertEqual(await self.list_pending(ALICE), ["a"])

    async def test_acknowledge_removes_and_reports_once(self) -> None:
        """Acknowledged events are removed and reported in order of arrival, each once."""
        await self.deliver_events("b", sender=CAROL, payload="\u20ac")
        self.clock.advance(5)
        await self.deliver_events("a", "c", payload="12345")
        removed = await self.acknowledge_events("a", "unknown", "b", "a", "")
        self.assertEqual(
            removed,
            [RemovedMessage("b", ALICE, ALICE, 3, NOON, 0), RemovedMessage("a", ALICE, ALICE, 5, NOON + 5, 0)],
        )
        self.assertEqual(await self.list_pending(), ["c"])
        self.assertEqual(await self.list_pending(sender=CAROL), [])
        self.assertEqual(await self.acknowledge_events("a", "b"), [])
        self.assertEqual(await self.acknowledge_events(), [])

    async def test_acknowledge_ignores_foreign_events(self) -> None:
        """Events of another recipient cannot be acknowledged, not even by their sender (reference 8)."""
        await self.deliver_events("a", to=ALICE, sender=BOB)
        await self.deliver_events("b", to=BOB, sender=ALICE)
        self.assertEqual([event.id for event in await self.acknowledge_events("a", "b", recipient=BOB)], ["b"])
        self.assertEqual(await self.list_pending(), ["a"])

    async def test_acknowledges_a_thousand_ids(self) -> None:
        """A thousand ids fit into one call."""
        ids = [f"p{number}" for number in range(30)]
        await self.deliver_events(*ids)
        removed = await self.acknowledge_events(*(f"unknown {number}" for number in range(1500)), *ids[1:])
        self.assertEqual([item.id for item in removed], ids[1:])
        self.assertEqual(await self.list_pending(), ["p0"])

    async def test_kept_after_contract_expired(self) -> None:
        """Queued events stay when contract and registration have expired."""
        await self.deliver_events("a")
        self.clock.advance(2 * HOUR)
        self.assertEqual(await self.list_pending(), ["a"])
        await self.decentrl.acknowledge_events(CommandGuard(b"nonce", NOON), ALICE, ["a"])
        self.assertEqual(await self.list_pending(), [])

    async def test_pages_and_totals(self) -> None:
        """Any page can be read, even beyond the end, and the total does not depend on it."""
        await self.deliver_events("z", "a")
        await self.deliver_events("y", sender=CAROL)
        await self.deliver_events("b")
        await self.assert_pages(lambda part: self.decentrl.pending_events(ALICE, None, part), ["z", "a", "y", "b"])
        await self.assert_pages(lambda part: self.decentrl.pending_events(ALICE, BOB, part), ["z", "a", "b"])

    async def test_refuses_too_large_page(self) -> None:
        """A page of too many bytes is refused, so that a smaller one can be requested."""
        for number, text in enumerate(LARGE_TEXTS):
            await self.deliver_events(f"p{number}", payload=text)
        await self.assert_page_is_limited(lambda part: self.decentrl.pending_events(ALICE, None, part))

    async def test_statistics_include_events(self) -> None:
        """Events count like messages, and the oldest of both is the oldest."""
        await self.deliver_events("a", "b", to=ALICE, payload="xy")
        first = await self.store.get_queue_totals()
        self.assertEqual((first.messages, first.bytes, first.recipients), (2, 4, 1))
        assert first.oldest_received_at is not None
        self.clock.advance(5)
        await self.enqueue_ids("m", data=b"x" * 7)
        self.assertEqual(await self.store.get_queue_totals(), QueueTotals(3, 11, 2, first.oldest_received_at))
        await self.acknowledge_events("a", "b")
        later = await self.store.get_queue_totals()
        self.assertEqual((later.messages, later.bytes, later.recipients), (1, 7, 1))
        assert later.oldest_received_at is not None and later.oldest_received_at > first.oldest_received_at

    async def test_queue_sizes_include_events(self) -> None:
        """Events for a DID are part of its queue, together with messages of the other protocol."""
        await self.enqueue_ids("m")
        await self.deliver_events("a", "b", to=ALICE)
        await self.deliver_events("c", to=BOB, sender=ALICE)
        self.assertEqual(await self.store.queue_sizes(1), ([(ALICE, 2)], 2))
        await self.store.update_recipients(BOB, [(BOB, "add")], max_recipients=9)
        await self.enqueue_ids("n", "o", to=BOB)
        largest, rest = await self.store.queue_sizes(9)
        self.assertEqual(
            (largest[:2], dict(largest), rest), ([(BOB, 3), (ALICE, 2)], {BOB: 3, ALICE: 2, INBOX: 1}, 0)
        )
        await self.acknowledge_events("a", "b")
        await self.acknowledge_events("c", recipient=BOB)
        self.assertEqual(await self.store.queue_sizes(9), ([(BOB, 2), (INBOX, 1)], 0))
        self.assertEqual(await self.store.queue_sizes(0), ([], 3))
