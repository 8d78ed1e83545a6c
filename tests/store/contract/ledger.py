"""What became of all that was accepted."""

from __future__ import annotations

from hashlib import sha256

from mediatord.errors import ContractNotFound, MediatorError, QuotaExceeded, StoreUnavailable, UnknownRecipient
from mediatord.store.interfaces.decentrl import DecentrlQuotas, PendingEvent
from mediatord.store.interfaces.messages import EnqueueRequest, EnqueueResult, MessageLedger, StoreLedger
from tests.store.builders import ALICE, BOB, HOUR, NOON, make_payload
from tests.store.contract.base import INBOX, OTHER, StoreContract
from tests.store.contract.decentrl_base import DecentrlContract


class LedgerContract(StoreContract):
    """Promises of `IMessageStore.read_ledger` for messages."""

    async def check(self, **expected: int) -> None:
        """The ledger has these numbers, others are 0, and nothing is unaccounted for."""
        books = await self.store.read_ledger()
        self.assertEqual(books, StoreLedger(didcomm=MessageLedger(**expected)))
        self.assertEqual(books.didcomm.difference, 0)

    async def test_empty(self) -> None:
        """It begins with nothing; accounts and recipients are no messages."""
        await self.check()

    async def test_accepted(self) -> None:
        """What was stored is accepted and waits, in whatever way it was deposited."""
        await self.register(BOB, OTHER)
        await self.put("a", "b")
        await self.check(accepted=2, waiting=2)
        await self.store.enqueue_all([EnqueueRequest(INBOX, (make_payload("c"),), NOON + HOUR)])
        await self.store.enqueue_each([EnqueueRequest(OTHER, (make_payload(id),), NOON + HOUR) for id in "de"])
        await self.check(accepted=5, waiting=5)

    async def test_nothing_stored(self) -> None:
        """What was refused was not accepted, nor what had to make room for it removed."""
        await self.put("a", "b", "c")
        await self.put()
        for enqueue in (self.put("d", to=OTHER), self.put("d", "a"), self.put("e", "e")):
            with self.assertRaises((UnknownRecipient, StoreUnavailable)):
                await enqueue
        with self.assertRaises(UnknownRecipient):
            await self.store.enqueue_all(
                [EnqueueRequest(did, (make_payload("f"),), NOON + HOUR) for did in (INBOX, OTHER)],
            )
        await self.check(accepted=3, waiting=3)

    async def test_each_by_itself(self) -> None:
        """Of several deposits those are counted that were stored."""
        deposits = [
            EnqueueRequest(INBOX, (make_payload("a"),), NOON + HOUR),
            EnqueueRequest(OTHER, (make_payload("b"),), NOON + HOUR),
            EnqueueRequest(INBOX, (make_payload("c"), make_payload("c")), NOON + HOUR),
            EnqueueRequest(INBOX, (make_payload("d"),), NOON + HOUR),
        ]
        done = await self.store.enqueue_each(deposits)
        self.assertEqual([isinstance(one, EnqueueResult) for one in done], [True, False, False, True])
        self.assertEqual([isinstance(one, MediatorError) for one in done], [False, True, True, False])
        await self.check(accepted=2, waiting=2)

    async def test_told_early(self) -> None:
        """What is told of some deposits before all are done is what all of them come to, and told once."""
        told: list[tuple[int, object]] = []
        deposits = [
            EnqueueRequest(did, (make_payload(id),), NOON + HOUR)
            for did, id in zip([INBOX, OTHER] * 3, "abcdef", strict=True)
        ]
        done = await self.store.enqueue_each(deposits, told.extend)
        self.assertEqual(len({place for place, _ in told}), len(told))
        self.assertEqual([(place, done[place]) for place, _ in told], told)

    async def test_acknowledged(self) -> None:
        """What its recipient acknowledges by id or by digest; unknown and foreign ids count nothing."""
        await self.put("a", "b", "c")
        await self.store.acknowledge(BOB, ["a"])
        await self.store.acknowledge(ALICE, ["a", "a", "nobody", sha256(make_payload("b").data).hexdigest()])
        await self.store.acknowledge(ALICE, ["a"])
        await self.check(accepted=3, acknowledged=2, waiting=1)

    async def test_taken_by_an_endpoint(self) -> None:
        """What was delivered and removed counts as acknowledged."""
        await self.put("a", "b")
        await self.store.remove_messages(["b", "nobody", "b"])
        await self.check(accepted=2, acknowledged=1, waiting=1)

    async def test_expired(self) -> None:
        """What has expired waits until it is removed."""
        await self.put("a", "b", ttl=5)
        await self.put("c")
        self.clock.advance(6)
        await self.check(accepted=3, waiting=3)
        await self.store.expire_messages(1)
        await self.check(accepted=3, expired=1, waiting=2)
        await self.store.expire_messages(9)
        await self.check(accepted=3, expired=2, waiting=1)

    async def test_evicted(self) -> None:
        """What had to make room."""
        await self.put("a", "b", "c")
        await self.put("d", "e")
        await self.check(accepted=5, evicted=2, waiting=3)

    async def test_evicted_at_once(self) -> None:
        """What is too large for any queue was accepted and evicted, though it never waited."""
        await self.put_payloads(make_payload("a"), make_payload("big", b"x" * 1001))
        await self.check(accepted=2, evicted=1, waiting=1)
        await self.put("huge", data=b"x" * 1001)
        await self.check(accepted=3, evicted=2, waiting=1)

    async def test_delayed(self) -> None:
        """What nobody sees yet waits like anything else, and so does what is handed out."""
        await self.put("a", delay=5)
        await self.check(accepted=1, waiting=1)
        self.clock.advance(5)
        await self.store.take_due_messages(9)
        await self.check(accepted=1, waiting=1)

    async def test_what_changes_nothing(self) -> None:
        """To push a message, to hand over its DID or its account, or to remove its recipient, leaves it waiting."""
        await self.put("a", "b")
        await self.store.mark_delivered(["a", "b"])
        await self.store.mark_pending(["a"])
        await self.change(ALICE, (INBOX, "remove"))
        await self.register(BOB, INBOX)
        await self.store.move_account(ALICE, "did:example:alice-2")
        await self.check(accepted=2, waiting=2)
        await self.store.acknowledge("did:example:alice-2", ["a"])
        await self.check(accepted=2, acknowledged=1, waiting=1)

    async def test_everywhere_the_same(self) -> None:
        """Every process says the same."""
        await self.put("a", "b", "c", "d")
        neighbour = self.a_neighbour()
        await neighbour.open()
        await neighbour.acknowledge(ALICE, ["b"])
        for store in (self.store, neighbour):
            books = await store.read_ledger()
            self.assertEqual(books.didcomm, MessageLedger(accepted=4, acknowledged=1, waiting=3))
        await neighbour.close()


class DecentrlLedgerContract(DecentrlContract):
    """Promises of `IMessageStore.read_ledger` for pending events."""

    caps = DecentrlQuotas(pending=3)

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        await self.agree("ab")
        await self.agree("ba", owner=BOB, peer=ALICE)

    async def check(self, **expected: int) -> None:
        """The ledger has these numbers, others are 0, and nothing is unaccounted for."""
        books = await self.store.read_ledger()
        self.assertEqual(books, StoreLedger(decentrl=MessageLedger(**expected)))
        self.assertEqual(books.decentrl.difference, 0)

    async def test_accepted(self) -> None:
        """Events that wait; contracts, requests and what is stored are none."""
        await self.request("r")
        await self.check()
        await self.send("a", "b")
        await self.send("c", to=BOB, sender=ALICE)
        await self.check(accepted=3, waiting=3)

    async def test_refused(self) -> None:
        """What was refused, or could not be stored, was not accepted."""
        await self.send("a", "b")
        with self.assertRaises(StoreUnavailable):
            await self.send("a")
        await self.send("c")
        with self.assertRaises(QuotaExceeded):
            await self.send("d")
        stranger = PendingEvent("e", ALICE, "did:example:stranger", "", NOON)
        with self.assertRaises(ContractNotFound):
            await self.decentrl.enqueue_event(self.guard(), stranger)
        await self.check(accepted=3, waiting=3)

    async def test_acknowledged(self) -> None:
        """What its recipient acknowledges, once; what belongs to somebody else, or to nobody, counts nothing."""
        await self.send("a", "b")
        await self.send("c", to=BOB, sender=ALICE)
        await self.decentrl.acknowledge_events(self.guard(), ALICE, ["b", "b", "c", "nobody"])
        await self.check(accepted=3, acknowledged=1, waiting=2)
        await self.decentrl.acknowledge_events(self.guard(), ALICE, ["b"])
        await self.check(accepted=3, acknowledged=1, waiting=2)

    async def test_they_wait_on(self) -> None:
        """They outlive the registrations and contracts of both sides."""
        await self.send("a")
        self.clock.advance(2 * HOUR)
        await self.store.prune_nonces()
        await self.check(accepted=1, waiting=1)

    async def test_halves_are_apart(self) -> None:
        """Messages are counted in the other ledger."""
        await self.put("m", "n")
        await self.store.acknowledge(ALICE, ["m"])
        await self.send("a")
        books = await self.store.read_ledger()
        self.assertEqual(
            books,
            StoreLedger(MessageLedger(accepted=2, acknowledged=1, waiting=1), MessageLedger(accepted=1, waiting=1)),
        )
