"""Contract for the message ledger."""

from __future__ import annotations

from hashlib import sha256

from mediatord.errors import ContractNotFound, MediatorError, QuotaExceeded, StoreUnavailable, UnknownRecipient
from mediatord.store.interfaces.decentrl import DecentrlQuotas, PendingEvent
from mediatord.store.interfaces.messages import EnqueueRequest, EnqueueResult, MessageLedger, StoreLedger
from tests.store.builders import ALICE, BOB, HOUR, NOON, make_payload
from tests.store.contract.base import INBOX, OTHER, StoreContract
from tests.store.contract.decentrl_base import DecentrlContract


class LedgerContract(StoreContract):
    """Contract of `IMessageStore.read_ledger` for messages."""

    async def assert_ledger(self, **expected: int) -> None:
        """The ledger has these numbers, all others are 0, and it balances."""
        ledger = await self.store.read_ledger()
        self.assertEqual(ledger, StoreLedger(didcomm=MessageLedger(**expected)))
        self.assertEqual(ledger.didcomm.difference, 0)

    async def test_starts_empty(self) -> None:
        """An empty store has an empty ledger; accounts and recipients do not count."""
        await self.assert_ledger()

    async def test_counts_accepted(self) -> None:
        """Stored messages are accepted and waiting, by whichever method they were enqueued."""
        await self.register(BOB, OTHER)
        await self.enqueue_ids("a", "b")
        await self.assert_ledger(accepted=2, waiting=2)
        await self.store.enqueue_all([EnqueueRequest(INBOX, (make_payload("c"),), NOON + HOUR)])
        await self.store.enqueue_each([EnqueueRequest(OTHER, (make_payload(id),), NOON + HOUR) for id in "de"])
        await self.assert_ledger(accepted=5, waiting=5)

    async def test_refusal_changes_nothing(self) -> None:
        """A refused request counts neither as accepted nor with the messages it would have evicted."""
        await self.enqueue_ids("a", "b", "c")
        await self.enqueue_ids()
        for enqueue in (self.enqueue_ids("d", to=OTHER), self.enqueue_ids("d", "a"), self.enqueue_ids("e", "e")):
            with self.assertRaises((UnknownRecipient, StoreUnavailable)):
                await enqueue
        with self.assertRaises(UnknownRecipient):
            await self.store.enqueue_all(
                [EnqueueRequest(did, (make_payload("f"),), NOON + HOUR) for did in (INBOX, OTHER)],
            )
        await self.assert_ledger(accepted=3, waiting=3)

    async def test_counts_stored_requests_of_a_batch(self) -> None:
        """Of several requests those stored are counted."""
        deposits = [
            EnqueueRequest(INBOX, (make_payload("a"),), NOON + HOUR),
            EnqueueRequest(OTHER, (make_payload("b"),), NOON + HOUR),
            EnqueueRequest(INBOX, (make_payload("c"), make_payload("c")), NOON + HOUR),
            EnqueueRequest(INBOX, (make_payload("d"),), NOON + HOUR),
        ]
        done = await self.store.enqueue_each(deposits)
        self.assertEqual([isinstance(result, EnqueueResult) for result in done], [True, False, False, True])
        self.assertEqual([isinstance(result, MediatorError) for result in done], [False, True, True, False])
        await self.assert_ledger(accepted=2, waiting=2)

    async def test_early_report_matches_result(self) -> None:
        """Results reported before a batch is complete are final, and reported once."""
        reported: list[tuple[int, object]] = []
        deposits = [
            EnqueueRequest(did, (make_payload(id),), NOON + HOUR)
            for did, id in zip([INBOX, OTHER] * 3, "abcdef", strict=True)
        ]
        done = await self.store.enqueue_each(deposits, reported.extend)
        self.assertEqual(len({position for position, _ in reported}), len(reported))
        self.assertEqual([(position, done[position]) for position, _ in reported], reported)

    async def test_counts_acknowledged(self) -> None:
        """Acknowledgements by id or by digest count; unknown and foreign ids do not."""
        await self.enqueue_ids("a", "b", "c")
        await self.store.acknowledge(BOB, ["a"])
        await self.store.acknowledge(ALICE, ["a", "a", "nobody", sha256(make_payload("b").data).hexdigest()])
        await self.store.acknowledge(ALICE, ["a"])
        await self.assert_ledger(accepted=3, acknowledged=2, waiting=1)

    async def test_endpoint_delivery_counts_as_acknowledged(self) -> None:
        """A message that was delivered to an endpoint and removed counts as acknowledged."""
        await self.enqueue_ids("a", "b")
        await self.store.remove_messages(["b", "nobody", "b"])
        await self.assert_ledger(accepted=2, acknowledged=1, waiting=1)

    async def test_expired_counts_when_removed(self) -> None:
        """An expired message is waiting until it is removed."""
        await self.enqueue_ids("a", "b", ttl=5)
        await self.enqueue_ids("c")
        self.clock.advance(6)
        await self.assert_ledger(accepted=3, waiting=3)
        await self.store.expire_messages(1)
        await self.assert_ledger(accepted=3, expired=1, waiting=2)
        await self.store.expire_messages(9)
        await self.assert_ledger(accepted=3, expired=2, waiting=1)

    async def test_counts_evicted(self) -> None:
        """Evicted messages are counted."""
        await self.enqueue_ids("a", "b", "c")
        await self.enqueue_ids("d", "e")
        await self.assert_ledger(accepted=5, evicted=2, waiting=3)

    async def test_counts_oversized_as_accepted_and_evicted(self) -> None:
        """An oversized message counts as accepted and evicted, though it was never queued."""
        await self.enqueue_payloads(make_payload("a"), make_payload("big", b"x" * 1001))
        await self.assert_ledger(accepted=2, evicted=1, waiting=1)
        await self.enqueue_ids("huge", data=b"x" * 1001)
        await self.assert_ledger(accepted=3, evicted=2, waiting=1)

    async def test_delayed_messages_are_waiting(self) -> None:
        """Delayed messages are waiting, before and after they are due."""
        await self.enqueue_ids("a", delay=5)
        await self.assert_ledger(accepted=1, waiting=1)
        self.clock.advance(5)
        await self.store.take_due_messages(9)
        await self.assert_ledger(accepted=1, waiting=1)

    async def test_other_operations_change_nothing(self) -> None:
        """
        Pushing a message, moving its account or registering its DID elsewhere, or removing its recipient leaves it
        waiting.
        """
        await self.enqueue_ids("a", "b")
        await self.store.mark_delivered(["a", "b"])
        await self.store.mark_pending(["a"])
        await self.update_recipients(ALICE, (INBOX, "remove"))
        await self.register(BOB, INBOX)
        await self.store.move_account(ALICE, "did:example:alice-2")
        await self.assert_ledger(accepted=2, waiting=2)
        await self.store.acknowledge("did:example:alice-2", ["a"])
        await self.assert_ledger(accepted=2, acknowledged=1, waiting=1)

    async def test_all_processes_read_the_same(self) -> None:
        """Every process reads the same ledger."""
        await self.enqueue_ids("a", "b", "c", "d")
        second_store = self.make_second_store()
        await second_store.open()
        await second_store.acknowledge(ALICE, ["b"])
        for store in (self.store, second_store):
            ledger = await store.read_ledger()
            self.assertEqual(ledger.didcomm, MessageLedger(accepted=4, acknowledged=1, waiting=3))
        await second_store.close()


class DecentrlLedgerContract(DecentrlContract):
    """Contract of `IMessageStore.read_ledger` for pending events."""

    caps = DecentrlQuotas(pending=3)

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        await self.save_contracts("ab")
        await self.save_contracts("ba", owner=BOB, peer=ALICE)

    async def assert_ledger(self, **expected: int) -> None:
        """The ledger has these numbers, all others are 0, and it balances."""
        ledger = await self.store.read_ledger()
        self.assertEqual(ledger, StoreLedger(decentrl=MessageLedger(**expected)))
        self.assertEqual(ledger.decentrl.difference, 0)

    async def test_counts_pending_events_only(self) -> None:
        """Pending events count; contracts, requests and stored events do not."""
        await self.add_requests("r")
        await self.assert_ledger()
        await self.deliver_events("a", "b")
        await self.deliver_events("c", to=BOB, sender=ALICE)
        await self.assert_ledger(accepted=3, waiting=3)

    async def test_refused_events_do_not_count(self) -> None:
        """Events that were refused, or could not be stored, are not accepted."""
        await self.deliver_events("a", "b")
        with self.assertRaises(StoreUnavailable):
            await self.deliver_events("a")
        await self.deliver_events("c")
        with self.assertRaises(QuotaExceeded):
            await self.deliver_events("d")
        unauthorized_event = PendingEvent("e", ALICE, "did:example:stranger", "", NOON)
        with self.assertRaises(ContractNotFound):
            await self.decentrl.enqueue_event(self.make_guard(), unauthorized_event)
        await self.assert_ledger(accepted=3, waiting=3)

    async def test_counts_acknowledged_once(self) -> None:
        """Acknowledgements by the recipient count once; those of foreign or unknown events do not."""
        await self.deliver_events("a", "b")
        await self.deliver_events("c", to=BOB, sender=ALICE)
        await self.decentrl.acknowledge_events(self.make_guard(), ALICE, ["b", "b", "c", "nobody"])
        await self.assert_ledger(accepted=3, acknowledged=1, waiting=2)
        await self.decentrl.acknowledge_events(self.make_guard(), ALICE, ["b"])
        await self.assert_ledger(accepted=3, acknowledged=1, waiting=2)

    async def test_events_outlive_registrations(self) -> None:
        """Events stay waiting after the registrations and contracts of both sides have expired."""
        await self.deliver_events("a")
        self.clock.advance(2 * HOUR)
        await self.store.prune_nonces()
        await self.assert_ledger(accepted=1, waiting=1)

    async def test_messages_have_separate_ledger(self) -> None:
        """Messages count in the other ledger."""
        await self.enqueue_ids("m", "n")
        await self.store.acknowledge(ALICE, ["m"])
        await self.deliver_events("a")
        ledger = await self.store.read_ledger()
        self.assertEqual(
            ledger,
            StoreLedger(MessageLedger(accepted=2, acknowledged=1, waiting=1), MessageLedger(accepted=1, waiting=1)),
        )
