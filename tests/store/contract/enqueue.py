"""Contract for enqueueing and eviction."""

from __future__ import annotations

from mediatord.errors import StoreUnavailable, UnknownRecipient
from mediatord.store.interfaces.messages import EnqueueRequest, EnqueueResult, RemovedMessage, StoredMessage
from tests.store.builders import ALICE, BOB, HOUR, NOON, make_payload
from tests.store.contract.base import INBOX, LONG_FORM, OTHER, SHORT_FORM, StoreContract


class EnqueueContract(StoreContract):
    """Contract of `IMessageStore.enqueue`."""

    async def test_returns_messages_as_stored(self) -> None:
        """Enqueueing returns the messages as stored, and fetching returns the same (UC-021)."""
        enqueued = await self.enqueue_payloads(
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
        """Messages are fetched in order of arrival, even if the clock stands still or goes back (reference 12)."""
        await self.register(ALICE, OTHER)
        await self.enqueue_ids("b")
        await self.enqueue_ids("c", "a", to=OTHER)
        self.clock.rightNow -= 5
        await self.enqueue_ids("d")
        self.assertEqual(await self.list_waiting(), ["b", "c", "a", "d"])

    async def test_refuses_unknown_recipient(self) -> None:
        """A message for an unregistered DID is refused (UC-021 AF-1)."""
        with self.assertRaises(UnknownRecipient):
            await self.enqueue_ids("a", to=OTHER)
        await self.register(ALICE, OTHER)
        self.assertEqual(await self.list_waiting(), [])

    async def test_account_did_is_no_recipient(self) -> None:
        """An account's DID receives messages only if it was registered (reference 5.3)."""
        with self.assertRaises(UnknownRecipient):
            await self.enqueue_ids("a", to=ALICE)

    async def test_recipient_must_match_exactly(self) -> None:
        """A prefix or an extension of a registered DID is another DID (reference 4.3)."""
        for other in (INBOX[:-1], INBOX + "x", INBOX.upper(), INBOX + "%"):
            with self.assertRaises(UnknownRecipient):
                await self.enqueue_ids("a", to=other)
        self.assertEqual(await self.list_waiting(ALICE), [])

    async def test_empty_request_needs_recipient(self) -> None:
        """A request without payloads stores nothing, but needs a known recipient."""
        self.assertEqual((await self.enqueue_ids()).messages, ())
        with self.assertRaises(UnknownRecipient):
            await self.enqueue_ids(to=OTHER)

    async def test_enqueues_all_or_nothing(self) -> None:
        """
        If one payload cannot be stored none is, nothing is evicted, and the store keeps working (reference 4.4).
        """
        await self.enqueue_ids("a", "b", "c")
        with self.assertRaises(StoreUnavailable):
            await self.enqueue_ids("d", "b")
        with self.assertRaises(StoreUnavailable):
            await self.enqueue_ids("e", "e")
        self.assertEqual(await self.list_waiting(), ["a", "b", "c"])
        self.assertEqual((await self.store.queue_sizes(9)), ([(INBOX, 3)], 0))
        await self.enqueue_ids("d")
        self.assertEqual(await self.list_waiting(), ["b", "c", "d"])

    async def test_identical_payloads_are_separate(self) -> None:
        """Two identical payloads are two messages (reference 6.1)."""
        await self.enqueue_ids("a", "b", data=b"same")
        self.assertEqual(await self.list_waiting(), ["a", "b"])
        self.assertEqual(await self.count_messages(), (2, 8))

    async def test_evicts_oldest_by_count(self) -> None:
        """A full queue drops its oldest message and stores the new one (UC-021 AF-4)."""
        await self.enqueue_ids("a", "b", data=b"x" * 10)
        await self.enqueue_ids("c")
        self.clock.advance(7)
        enqueued = await self.enqueue_ids("d", data=b"y")
        evicted = RemovedMessage("a", INBOX, ALICE, size=10, received_at=NOON, pushes=0, reason="fifo_count")
        self.assertEqual(enqueued.evicted, (evicted,))
        self.assertEqual(await self.list_waiting(), ["b", "c", "d"])

    async def test_spellings_share_a_queue(self) -> None:
        """A batch with several spellings of a recipient evicts once per message, whatever was registered."""
        spellings = LONG_FORM, SHORT_FORM, f"{LONG_FORM}#key-1", f"{SHORT_FORM}?a=b"
        for registered in (LONG_FORM, SHORT_FORM):
            await self.register(ALICE, registered)
            before = (await self.store.read_ledger()).didcomm
            await self.enqueue_ids("a", "b", "c", to=registered)
            deposits = [
                EnqueueRequest(did, (make_payload(id),), NOON + HOUR)
                for did, id in zip(spellings, "defg", strict=True)
            ]
            done = [
                result for result in await self.store.enqueue_each(deposits[:2]) if isinstance(result, EnqueueResult)
            ]
            done += await self.store.enqueue_all(deposits[2:])
            self.assertEqual([message.id for result in done for message in result.evicted], ["a", "b", "c", "d"])
            self.assertEqual(await self.list_waiting(ALICE, SHORT_FORM), ["e", "f", "g"])
            self.assertEqual(await self.store.queue_sizes(9), ([(registered, 3)], 0))
            ledger = (await self.store.read_ledger()).didcomm
            self.assertEqual((ledger.accepted - before.accepted, ledger.evicted - before.evicted), (7, 4))
            self.assertEqual(ledger.difference, 0)
            await self.store.acknowledge(ALICE, ["e", "f", "g"])
            await self.update_recipients(ALICE, (registered, "remove"))

    async def test_evicts_oldest_by_bytes(self) -> None:
        """A queue with too many bytes drops its oldest messages until the new one fits."""
        await self.enqueue_ids("a", "b", data=b"x" * 400)
        enqueued = await self.enqueue_ids("c", data=b"x" * 201)
        evicted = RemovedMessage("a", INBOX, ALICE, size=400, received_at=NOON, pushes=0, reason="fifo_bytes")
        self.assertEqual(enqueued.evicted, (evicted,))
        self.assertEqual(await self.list_waiting(), ["b", "c"])

    async def test_reports_limit_of_each_eviction(self) -> None:
        """Each evicted message is reported with the limit that was exceeded at that moment."""
        await self.enqueue_ids("a", "b", data=b"x" * 400)
        await self.enqueue_ids("c", data=b"x" * 200)
        enqueued = await self.enqueue_ids("d", data=b"x" * 700)
        # The first exceeds the number; of the rest, 400 + 200 + 700, one more exceeds the bytes.
        self.assertEqual(
            [(message.id, message.reason) for message in enqueued.evicted], [("a", "fifo_count"), ("b", "fifo_bytes")]
        )
        self.assertEqual(await self.list_waiting(), ["c", "d"])
        self.assertEqual(await self.count_messages(), (2, 900))

    async def test_queue_may_be_exactly_full(self) -> None:
        """A queue may be exactly as full as its limits."""
        await self.enqueue_ids("a", data=b"x" * 999)
        self.assertEqual((await self.enqueue_ids("b", data=b"x")).evicted, ())
        self.assertEqual((await self.enqueue_ids("c", data=b"")).evicted, ())

    async def test_does_not_evict_own_batch(self) -> None:
        """A batch beyond the limits evicts everything before it, but nothing of itself."""
        await self.enqueue_ids("a", "b")
        enqueued = await self.enqueue_ids("c", "d", "e", "f")
        self.assertEqual([message.id for message in enqueued.evicted], ["a", "b"])
        self.assertEqual(await self.list_waiting(), ["c", "d", "e", "f"])
        enqueued = await self.enqueue_ids("g")
        self.assertEqual([message.id for message in enqueued.evicted], ["c", "d"])

    async def test_oversized_message_evicts_only_itself(self) -> None:
        """A message that can never fit is evicted at once, without evicting others."""
        await self.enqueue_ids("a")
        enqueued = await self.enqueue_payloads(make_payload("b"), make_payload("big", b"x" * 1001), make_payload("c"))
        self.assertEqual([message.id for message in enqueued.messages], ["b", "big", "c"])
        self.assertEqual(
            enqueued.evicted, (RemovedMessage("big", INBOX, ALICE, 1001, NOON, pushes=0, reason="fifo_bytes"),)
        )
        self.assertEqual(await self.list_waiting(), ["a", "b", "c"])

    async def test_oversized_message_trims_overfull_queue(self) -> None:
        """An overfull queue is brought within its limits, even by a message that can never fit."""
        await self.enqueue_payloads(make_payload("a", b"x" * 600), make_payload("b", b"x" * 600))
        enqueued = await self.enqueue_payloads(make_payload("big", b"x" * 1001))
        self.assertEqual({message.id for message in enqueued.evicted}, {"a", "big"})
        self.assertEqual(await self.list_waiting(), ["b"])

    async def test_limits_are_per_recipient_did(self) -> None:
        """A full queue does not affect another one of the same account (reference 12)."""
        await self.register(ALICE, OTHER)
        await self.enqueue_ids("a", "b", "c")
        await self.enqueue_ids("d", to=OTHER)
        self.assertEqual(await self.list_waiting(), ["a", "b", "c", "d"])

    async def test_delayed_messages_count(self) -> None:
        """A delayed message counts and is evicted like any other (reference 4.5)."""
        await self.enqueue_ids("a", delay=600)
        await self.enqueue_ids("b", "c")
        enqueued = await self.enqueue_ids("d")
        self.assertEqual([message.id for message in enqueued.evicted], ["a"])
        self.clock.advance(600)
        self.assertEqual(await self.list_waiting(), ["b", "c", "d"])
        self.assertEqual(await self.store.take_due_messages(9), [])

    async def test_expired_messages_count_until_removed(self) -> None:
        """An expired message that was not yet removed is evicted first."""
        await self.enqueue_ids("a", ttl=1)
        await self.enqueue_ids("b", "c")
        self.clock.advance(2)
        self.assertEqual([message.id for message in (await self.enqueue_ids("d")).evicted], ["a"])

    async def test_evicted_messages_have_push_counts(self) -> None:
        """An evicted message is reported with its number of pushes."""
        await self.enqueue_ids("a", "b", "c")
        await self.store.mark_delivered(["a"])
        await self.store.mark_pending(["a"])
        await self.store.mark_delivered(["a"])
        self.assertEqual([message.pushes for message in (await self.enqueue_ids("d")).evicted], [2])

    async def test_enqueues_several_requests_in_order(self) -> None:
        """Several requests are stored in order, each for its own recipient (reference 4.4)."""
        await self.register(BOB, OTHER)
        enqueued = await self.store.enqueue_all(
            [
                EnqueueRequest(INBOX, (make_payload("a"), make_payload("b")), NOON + HOUR),
                EnqueueRequest(OTHER, (make_payload("c"),), NOON + HOUR, NOON + 1),
            ]
        )
        self.assertEqual([[message.id for message in result.messages] for result in enqueued], [["a", "b"], ["c"]])
        self.assertEqual(await self.list_waiting(ALICE), ["a", "b"])
        self.assertEqual(await self.list_waiting(BOB), [])
        self.clock.advance(1)
        self.assertEqual(await self.list_waiting(BOB), ["c"])

    async def test_several_requests_all_or_nothing(self) -> None:
        """With an unknown recipient or a used id in one request nothing is stored."""
        await self.enqueue_ids("used")
        for last, error in (
            (EnqueueRequest(OTHER, (make_payload("b"),), NOON + HOUR), UnknownRecipient),
            (EnqueueRequest(INBOX, (make_payload("used"),), NOON + HOUR), StoreUnavailable),
        ):
            with self.assertRaises(error):
                await self.store.enqueue_all([EnqueueRequest(INBOX, (make_payload("a"),), NOON + HOUR), last])
        self.assertEqual(await self.list_waiting(ALICE), ["used"])

    async def test_removes_by_id(self) -> None:
        """Messages are removed by id alone, also after their account has moved; unknown ids are ignored."""
        await self.enqueue_ids("a", "b")
        await self.store.move_account(ALICE, "did:example:alice-2")
        removed = await self.store.remove_messages(["b", "nobody", "b"])
        self.assertEqual(
            [(message.id, message.account, message.recipient_did) for message in removed],
            [("b", "did:example:alice-2", INBOX)],
        )
        self.assertEqual(await self.list_waiting("did:example:alice-2"), ["a"])
