"""Depositing and making room."""

from __future__ import annotations

from mediatord.errors import StoreUnavailable, UnknownRecipient
from mediatord.store.interfaces.messages import EnqueueRequest, EnqueueResult, RemovedMessage, StoredMessage
from tests.store.builders import ALICE, BOB, HOUR, NOON, make_payload
from tests.store.contract.base import INBOX, LONG_FORM, OTHER, SHORT_FORM, StoreContract


class EnqueueContract(StoreContract):
    """Promises of `IMessageStore.enqueue`."""

    async def test_stored_as_sent(self) -> None:
        """A deposit answers with the messages as stored, and the same come back from fetch (UC-021)."""
        enqueued = await self.put_payloads(
            make_payload("a", b"\x00\xff raw", "base64"), make_payload("b", b"{}", "json")
        )
        expected = (
            StoredMessage("a", INBOX, ALICE, b"\x00\xff raw", "base64", NOON, NOON + HOUR),
            StoredMessage("b", INBOX, ALICE, b"{}", "json", NOON, NOON + HOUR),
        )
        self.assertEqual(enqueued.messages, expected)
        self.assertEqual(enqueued.evicted, ())
        self.assertEqual(tuple(await self.store.fetch_messages(ALICE, None, limit=10, max_bytes=1000)), expected)

    async def test_order_of_arrival(self) -> None:
        """Messages come back in order of arrival, even if the clock stands still or goes back (reference 12)."""
        await self.register(ALICE, OTHER)
        await self.put("b")
        await self.put("c", "a", to=OTHER)
        self.clock.rightNow -= 5
        await self.put("d")
        self.assertEqual(await self.waiting(), ["b", "c", "a", "d"])

    async def test_unknown_recipient(self) -> None:
        """A deposit for a DID that nobody has registered is refused (UC-021 AF-1)."""
        with self.assertRaises(UnknownRecipient):
            await self.put("a", to=OTHER)
        await self.register(ALICE, OTHER)
        self.assertEqual(await self.waiting(), [])

    async def test_account_did_is_no_recipient(self) -> None:
        """An account DID is not routable unless it was registered (reference 5.3)."""
        with self.assertRaises(UnknownRecipient):
            await self.put("a", to=ALICE)

    async def test_exact_match(self) -> None:
        """A DID that is the beginning of a registered one, or goes on after it, is another DID (reference 4.3)."""
        for stranger in (INBOX[:-1], INBOX + "x", INBOX.upper(), INBOX + "%"):
            with self.assertRaises(UnknownRecipient):
                await self.put("a", to=stranger)
        self.assertEqual(await self.waiting(ALICE), [])

    async def test_nothing_to_store(self) -> None:
        """A deposit of nothing stores nothing, but still wants a recipient."""
        self.assertEqual((await self.put()).messages, ())
        with self.assertRaises(UnknownRecipient):
            await self.put(to=OTHER)

    async def test_all_or_nothing(self) -> None:
        """If one payload cannot be stored none is, nothing is evicted, and the store goes on (reference 4.4)."""
        await self.put("a", "b", "c")
        with self.assertRaises(StoreUnavailable):
            await self.put("d", "b")
        with self.assertRaises(StoreUnavailable):
            await self.put("e", "e")
        self.assertEqual(await self.waiting(), ["a", "b", "c"])
        self.assertEqual((await self.store.queue_sizes(9)), ([(INBOX, 3)], 0))
        await self.put("d")
        self.assertEqual(await self.waiting(), ["b", "c", "d"])

    async def test_identical_payloads(self) -> None:
        """Two identical payloads are two messages (reference 6.1)."""
        await self.put("a", "b", data=b"same")
        self.assertEqual(await self.waiting(), ["a", "b"])
        self.assertEqual(await self.count(), (2, 8))

    async def test_evicts_oldest_by_count(self) -> None:
        """A full queue drops its oldest message and the new one is stored (UC-021 AF-4)."""
        await self.put("a", "b", data=b"x" * 10)
        await self.put("c")
        self.clock.advance(7)
        enqueued = await self.put("d", data=b"y")
        evicted = RemovedMessage("a", INBOX, ALICE, size=10, received_at=NOON, pushes=0, reason="fifo_count")
        self.assertEqual(enqueued.evicted, (evicted,))
        self.assertEqual(await self.waiting(), ["b", "c", "d"])

    async def test_spellings_share_a_queue(self) -> None:
        """One batch that names a recipient in several ways evicts once for each message, whatever was registered."""
        spellings = LONG_FORM, SHORT_FORM, f"{LONG_FORM}#key-1", f"{SHORT_FORM}?a=b"
        for registered in (LONG_FORM, SHORT_FORM):
            await self.register(ALICE, registered)
            before = (await self.store.read_ledger()).didcomm
            await self.put("a", "b", "c", to=registered)
            deposits = [
                EnqueueRequest(did, (make_payload(id),), NOON + HOUR)
                for did, id in zip(spellings, "defg", strict=True)
            ]
            done = [one for one in await self.store.enqueue_each(deposits[:2]) if isinstance(one, EnqueueResult)]
            done += await self.store.enqueue_all(deposits[2:])
            self.assertEqual([gone.id for one in done for gone in one.evicted], ["a", "b", "c", "d"])
            self.assertEqual(await self.waiting(ALICE, SHORT_FORM), ["e", "f", "g"])
            self.assertEqual(await self.store.queue_sizes(9), ([(registered, 3)], 0))
            books = (await self.store.read_ledger()).didcomm
            self.assertEqual((books.accepted - before.accepted, books.evicted - before.evicted), (7, 4))
            self.assertEqual(books.difference, 0)
            await self.store.acknowledge(ALICE, ["e", "f", "g"])
            await self.change(ALICE, (registered, "remove"))

    async def test_evicts_oldest_by_bytes(self) -> None:
        """A queue with too many bytes drops its oldest messages until the new one fits, however few they are."""
        await self.put("a", "b", data=b"x" * 400)
        enqueued = await self.put("c", data=b"x" * 201)
        evicted = RemovedMessage("a", INBOX, ALICE, size=400, received_at=NOON, pushes=0, reason="fifo_bytes")
        self.assertEqual(enqueued.evicted, (evicted,))
        self.assertEqual(await self.waiting(), ["b", "c"])

    async def test_evicts_by_count_and_bytes(self) -> None:
        """What has to go is told with the limit that it was over at that moment."""
        await self.put("a", "b", data=b"x" * 400)
        await self.put("c", data=b"x" * 200)
        enqueued = await self.put("d", data=b"x" * 700)
        # One is over the number; of the rest, 400 + 200 + 700, one more is over the bytes.
        self.assertEqual(
            [(gone.id, gone.reason) for gone in enqueued.evicted], [("a", "fifo_count"), ("b", "fifo_bytes")]
        )
        self.assertEqual(await self.waiting(), ["c", "d"])
        self.assertEqual(await self.count(), (2, 900))

    async def test_exactly_full(self) -> None:
        """A queue may be as full as the limits say."""
        await self.put("a", data=b"x" * 999)
        self.assertEqual((await self.put("b", data=b"x")).evicted, ())
        self.assertEqual((await self.put("c", data=b"")).evicted, ())

    async def test_own_deposit_stays(self) -> None:
        """A deposit of more than the limits allow evicts all before it, but nothing of itself."""
        await self.put("a", "b")
        enqueued = await self.put("c", "d", "e", "f")
        self.assertEqual([gone.id for gone in enqueued.evicted], ["a", "b"])
        self.assertEqual(await self.waiting(), ["c", "d", "e", "f"])
        enqueued = await self.put("g")
        self.assertEqual([gone.id for gone in enqueued.evicted], ["c", "d"])

    async def test_too_large_alone(self) -> None:
        """A message that could never fit is out again at once, and others do not have to make room for it."""
        await self.put("a")
        enqueued = await self.put_payloads(make_payload("b"), make_payload("big", b"x" * 1001), make_payload("c"))
        self.assertEqual([message.id for message in enqueued.messages], ["b", "big", "c"])
        self.assertEqual(
            enqueued.evicted, (RemovedMessage("big", INBOX, ALICE, 1001, NOON, pushes=0, reason="fifo_bytes"),)
        )
        self.assertEqual(await self.waiting(), ["a", "b", "c"])

    async def test_too_large_for_an_overfull_queue(self) -> None:
        """A queue that is over its limits is brought within them, even by a message that could never fit."""
        await self.put_payloads(make_payload("a", b"x" * 600), make_payload("b", b"x" * 600))
        enqueued = await self.put_payloads(make_payload("big", b"x" * 1001))
        self.assertEqual({gone.id for gone in enqueued.evicted}, {"a", "big"})
        self.assertEqual(await self.waiting(), ["b"])

    async def test_limits_are_per_recipient_did(self) -> None:
        """One full queue takes nothing from another of the same account (reference 12)."""
        await self.register(ALICE, OTHER)
        await self.put("a", "b", "c")
        await self.put("d", to=OTHER)
        self.assertEqual(await self.waiting(), ["a", "b", "c", "d"])

    async def test_delayed_count_against_limits(self) -> None:
        """A delayed message takes room like any other and is evicted like any other (reference 4.5)."""
        await self.put("a", delay=600)
        await self.put("b", "c")
        enqueued = await self.put("d")
        self.assertEqual([gone.id for gone in enqueued.evicted], ["a"])
        self.clock.advance(600)
        self.assertEqual(await self.waiting(), ["b", "c", "d"])
        self.assertEqual(await self.store.take_due_messages(9), [])

    async def test_expired_count_until_removed(self) -> None:
        """An expired message that was not yet removed is the first to make room."""
        await self.put("a", ttl=1)
        await self.put("b", "c")
        self.clock.advance(2)
        self.assertEqual([gone.id for gone in (await self.put("d")).evicted], ["a"])

    async def test_evicted_tells_pushes(self) -> None:
        """What is evicted tells how often it was pushed."""
        await self.put("a", "b", "c")
        await self.store.mark_delivered(["a"])
        await self.store.mark_pending(["a"])
        await self.store.mark_delivered(["a"])
        self.assertEqual([gone.pushes for gone in (await self.put("d")).evicted], [2])

    async def test_several_deposits_are_one(self) -> None:
        """All of them in order, each for its own recipient (reference 4.4)."""
        await self.register(BOB, OTHER)
        enqueued = await self.store.enqueue_all(
            [
                EnqueueRequest(INBOX, (make_payload("a"), make_payload("b")), NOON + HOUR),
                EnqueueRequest(OTHER, (make_payload("c"),), NOON + HOUR, NOON + 1),
            ]
        )
        self.assertEqual([[message.id for message in one.messages] for one in enqueued], [["a", "b"], ["c"]])
        self.assertEqual(await self.waiting(ALICE), ["a", "b"])
        self.assertEqual(await self.waiting(BOB), [])
        self.clock.advance(1)
        self.assertEqual(await self.waiting(BOB), ["c"])

    async def test_several_deposits_or_none(self) -> None:
        """An unknown recipient, or an id that was used, and nothing at all is stored."""
        await self.put("used")
        for last, error in (
            (EnqueueRequest(OTHER, (make_payload("b"),), NOON + HOUR), UnknownRecipient),
            (EnqueueRequest(INBOX, (make_payload("used"),), NOON + HOUR), StoreUnavailable),
        ):
            with self.assertRaises(error):
                await self.store.enqueue_all([EnqueueRequest(INBOX, (make_payload("a"),), NOON + HOUR), last])
        self.assertEqual(await self.waiting(ALICE), ["used"])

    async def test_removal_by_id_alone(self) -> None:
        """Whoever a message belongs to, also after its account goes by another DID; unknown ids do not matter."""
        await self.put("a", "b")
        await self.store.move_account(ALICE, "did:example:alice-2")
        removed = await self.store.remove_messages(["b", "nobody", "b"])
        self.assertEqual(
            [(one.id, one.account, one.recipient_did) for one in removed], [("b", "did:example:alice-2", INBOX)]
        )
        self.assertEqual(await self.waiting("did:example:alice-2"), ["a"])
