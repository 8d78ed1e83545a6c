"""Contract for fetching, counting, pushing and acknowledging."""

from __future__ import annotations

from hashlib import sha256

from mediatord.store.interfaces.messages import (
    AcknowledgementRequest,
    AcknowledgementResult,
    QueueStatus,
    QueueTotals,
    RemovedMessage,
)
from tests.store.builders import ALICE, BOB, NOON
from tests.store.contract.base import INBOX, OTHER, StoreContract

NOTHING = QueueStatus(0, 0)


class PickupContract(StoreContract):
    """Contract of the rest of `IMessageStore`, except for times."""

    async def test_fetches_oldest_up_to_limit(self) -> None:
        """At most `limit` messages are fetched, the oldest, and the same again until acknowledged (reference 6.1)."""
        await self.enqueue_ids("a", "b", "c")
        for _ in range(2):
            found = await self.store.fetch_messages(ALICE, None, limit=2, max_bytes=1000)
            self.assertEqual([message.id for message in found], ["a", "b"])
        self.assertEqual(await self.store.fetch_messages(ALICE, None, limit=0, max_bytes=1000), [])

    async def test_fetches_up_to_max_bytes(self) -> None:
        """At most `max_bytes` are fetched, but at least one message (reference 6.1)."""
        await self.enqueue_ids("a", "b", "c", data=b"x" * 100)
        for max_bytes, expected in ((1, 1), (199, 1), (200, 2), (299, 2), (300, 3)):
            found = await self.store.fetch_messages(ALICE, None, limit=9, max_bytes=max_bytes)
            self.assertEqual(len(found), expected, f"in {max_bytes} bytes")

    async def test_fetches_for_one_recipient(self) -> None:
        """`recipient_did` limits a fetch to one DID; without it all of the account's are fetched (reference 6.1)."""
        await self.register(ALICE, OTHER)
        await self.enqueue_ids("a")
        await self.enqueue_ids("b", to=OTHER)
        self.assertEqual(await self.list_waiting(ALICE), ["a", "b"])
        self.assertEqual(await self.list_waiting(ALICE, OTHER), ["b"])
        self.assertEqual(await self.count_messages(ALICE, OTHER), (1, len(b'{"ciphertext":"b"}')))

    async def test_foreign_recipient_has_no_messages(self) -> None:
        """Messages for another account's DID, or an unknown DID or account, are not fetched."""
        await self.enqueue_ids("a")
        for account, did in ((BOB, None), (BOB, INBOX), (ALICE, OTHER), ("did:example:nobody", INBOX), (INBOX, None)):
            self.assertEqual(await self.list_waiting(account, did), [])
            self.assertEqual(await self.store.get_queue_status(account, did), NOTHING)

    async def test_status_has_counts_and_times(self) -> None:
        """The status has messages, bytes, and the first and last time of arrival (reference 6)."""
        self.assertEqual(await self.store.get_queue_status(ALICE, None), NOTHING)
        await self.enqueue_ids("a", data=b"12345")
        self.clock.advance(10)
        await self.enqueue_ids("b", "c", data=b"123")
        expected = QueueStatus(3, 11, NOON, NOON + 10)
        self.assertEqual(await self.store.get_queue_status(ALICE, None), expected)
        self.assertEqual(await self.store.get_queue_status(ALICE, INBOX), expected)

    async def test_pushed_message_stays_queued(self) -> None:
        """A pushed message stays queued and counts until it is acknowledged (reference 6.1, 6.3)."""
        await self.enqueue_ids("a", "b")
        await self.store.mark_delivered(["a", "unknown"])
        found = await self.store.fetch_messages(ALICE, None, limit=9, max_bytes=1000)
        self.assertEqual([(m.id, m.status) for m in found], [("a", "delivered"), ("b", "pending")])
        self.assertEqual((await self.count_messages())[0], 2)

    async def test_requeues_unacknowledged_pushes(self) -> None:
        """Unacknowledged pushes become pending; the result names just those (UC-021 AF-6)."""
        await self.enqueue_ids("a", "b", "c")
        await self.store.mark_delivered(["c", "a"])
        self.assertEqual(await self.store.mark_pending(["c", "b", "c", "unknown", "a"]), ["c", "a"])
        self.assertEqual(await self.store.mark_pending(["a", "c"]), [])
        found = await self.store.fetch_messages(ALICE, None, limit=9, max_bytes=1000)
        self.assertEqual({m.status for m in found}, {"pending"})

    async def test_acknowledges_by_id(self) -> None:
        """Acknowledged messages are removed; a second acknowledgement finds nothing (reference 6.1)."""
        await self.enqueue_ids("a", "b", "c", data=b"1234")
        await self.store.mark_delivered(["a", "a"])
        removed = await self.store.acknowledge(ALICE, ["c", "a", "a", "unknown", ""])
        self.assertEqual(
            removed, [RemovedMessage("a", INBOX, ALICE, 4, NOON, 1), RemovedMessage("c", INBOX, ALICE, 4, NOON, 0)]
        )
        self.assertEqual(await self.list_waiting(), ["b"])
        self.assertEqual(await self.count_messages(), (1, 4))
        self.assertEqual(await self.store.acknowledge(ALICE, ["c", "a"]), [])
        self.assertEqual(await self.store.acknowledge(ALICE, []), [])

    async def test_acknowledges_with_status(self) -> None:
        """Each result has the messages that were removed, and the status of all queues if that is wanted."""
        await self.register(ALICE, OTHER)
        await self.enqueue_ids("a", "b", "c", data=b"12345")
        await self.enqueue_ids("d", to=OTHER)
        await self.enqueue_ids("e", to=OTHER, delay=9)
        (done,) = await self.store.acknowledge_each([AcknowledgementRequest(ALICE, ["b", "a", "unknown"], True)])
        assert isinstance(done, AcknowledgementResult)
        self.assertEqual([message.id for message in done.removed], ["a", "b"])
        self.assertEqual(done.status, await self.store.get_queue_status(ALICE, None))
        self.assertEqual(await self.count_messages(), (2, 5 + len(b'{"ciphertext":"d"}')))
        digest = sha256(b"12345").hexdigest()
        (done,) = await self.store.acknowledge_each([AcknowledgementRequest(ALICE, [digest, "d"])])
        assert isinstance(done, AcknowledgementResult)
        self.assertEqual(([message.id for message in done.removed], done.status), (["c", "d"], None))

    async def test_acknowledges_each(self) -> None:
        """Acknowledgements of one call have results of their own, in order."""
        await self.enqueue_ids("a", "b", data=b"1")
        await self.enqueue_ids("c", data=b"2")
        digest = sha256(b"2").hexdigest()
        requests = [
            AcknowledgementRequest(account, ids, True)
            for account, ids in ((ALICE, ["a"]), (BOB, ["b"]), (ALICE, ["a", "b"]), (ALICE, [digest]))
        ]
        done = await self.store.acknowledge_each(requests)
        removed = [[message.id for message in one.removed] for one in done if isinstance(one, AcknowledgementResult)]
        self.assertEqual(removed, [["a"], [], ["b"], ["c"]])

    async def test_acknowledges_by_digest(self) -> None:
        """The lower-case hexadecimal SHA-256 of a payload stands for every message with it (reference 6.1)."""
        await self.enqueue_ids("a", "b", data=b"same")
        await self.enqueue_ids("c", data=b"other")
        same = sha256(b"same").hexdigest()
        self.assertEqual(await self.store.acknowledge(ALICE, [same.upper(), same[:-1], same + "0"]), [])
        removed = await self.store.acknowledge(ALICE, [same, "b", same])
        self.assertEqual([message.id for message in removed], ["a", "b"])
        self.assertEqual(await self.list_waiting(), ["c"])

    async def test_acknowledges_many_digests(self) -> None:
        """An acknowledgement may have many digests."""
        await self.enqueue_ids("a", data=b"1")
        unknown_digests = [sha256(b"%d" % number).hexdigest() for number in range(2000, 3200)]
        removed = await self.store.acknowledge(ALICE, [*unknown_digests, sha256(b"1").hexdigest(), *unknown_digests])
        self.assertEqual([message.id for message in removed], ["a"])

    async def test_acknowledge_ignores_foreign_messages(self) -> None:
        """Another account's messages are removed neither by id nor by digest (reference 6.1)."""
        await self.enqueue_ids("a", data=b"same")
        await self.register(BOB, OTHER)
        await self.enqueue_ids("b", to=OTHER, data=b"same")
        digest = sha256(b"same").hexdigest()
        for account in ("did:example:nobody", INBOX):
            self.assertEqual(await self.store.acknowledge(account, ["a", "b", digest]), [])
        self.assertEqual([message.id for message in await self.store.acknowledge(BOB, ["a", digest])], ["b"])
        self.assertEqual(await self.list_waiting(ALICE), ["a"])

    async def test_acknowledges_in_one_of_several_queues(self) -> None:
        """A payload for two DIDs is two messages; acknowledging one leaves the other (reference 6.1)."""
        await self.register(ALICE, OTHER)
        await self.enqueue_ids("a", data=b"same")
        await self.enqueue_ids("b", to=OTHER, data=b"same")
        await self.store.acknowledge(ALICE, ["a"])
        self.assertEqual(await self.list_waiting(), ["b"])

    async def test_lone_surrogates_match_nothing(self) -> None:
        """Ids and DIDs with a lone surrogate match nothing."""
        await self.enqueue_ids("a", "b")
        half = "\ud800"
        self.assertEqual(await self.store.acknowledge(ALICE, [half]), [])
        await self.store.mark_delivered([half, "a"])
        self.assertEqual(await self.store.mark_pending([half, "a"]), ["a"])
        self.assertEqual([message.id for message in await self.store.find_messages([half, "a"])], ["a"])
        self.assertEqual(await self.store.find_messages([half]), [])
        for account, did in ((ALICE, half), (half, None), (half, INBOX)):
            self.assertEqual(await self.list_waiting(account, did), [])
            self.assertEqual(await self.store.get_queue_status(account, did), NOTHING)
        self.assertEqual([message.id for message in await self.store.acknowledge(ALICE, [half, "a"])], ["a"])
        self.assertEqual([message.id for message in await self.store.remove_messages([half, "b"])], ["b"])

    async def test_acknowledgement_frees_capacity(self) -> None:
        """Acknowledged messages occupy no capacity, however they were acknowledged."""
        await self.enqueue_ids("a", "b", "c", data=b"x" * 333)
        await self.store.acknowledge(ALICE, ["a", "b", "c"])
        self.assertEqual((await self.enqueue_ids("d", "e", "f", data=b"y" * 333)).evicted, ())

    async def test_queue_sizes_of_largest_queues(self) -> None:
        """The largest queues come first, the rest as one sum; empty ones are omitted."""
        self.assertEqual(await self.store.queue_sizes(3), ([], 0))
        await self.register(BOB, OTHER, "did:key:third", "did:key:empty")
        await self.enqueue_ids("a", "b")
        await self.enqueue_ids("c", "d", "e", to=OTHER)
        await self.enqueue_ids("f", to="did:key:third")
        self.assertEqual(await self.store.queue_sizes(9), ([(OTHER, 3), (INBOX, 2), ("did:key:third", 1)], 0))
        self.assertEqual(await self.store.queue_sizes(1), ([(OTHER, 3)], 3))
        self.assertEqual(await self.store.queue_sizes(0), ([], 6))
        await self.store.acknowledge(BOB, ["c", "d", "e"])
        self.assertEqual(await self.store.queue_sizes(9), ([(INBOX, 2), ("did:key:third", 1)], 0))

    async def test_statistics_count_all_queued(self) -> None:
        """All queued messages count, delayed and expired ones too, until they are removed."""
        self.assertEqual(await self.store.get_queue_totals(), QueueTotals(0, 0, 0, None))
        await self.register(BOB, OTHER)
        await self.enqueue_ids("a", "b", data=b"x" * 10)
        self.clock.advance(5)
        await self.enqueue_ids("c", data=b"x" * 7, to=OTHER)
        self.assertEqual(await self.store.get_queue_totals(), QueueTotals(3, 27, 2, NOON))
        await self.store.acknowledge(ALICE, ["a"])
        self.assertEqual(await self.store.get_queue_totals(), QueueTotals(2, 17, 2, NOON))
        await self.store.acknowledge(ALICE, ["b"])
        self.assertEqual(await self.store.get_queue_totals(), QueueTotals(1, 7, 1, NOON + 5))
        await self.store.acknowledge(BOB, ["c"])
        self.assertEqual(await self.store.get_queue_totals(), QueueTotals(0, 0, 0, None))

    async def test_queue_sizes_after_change_of_owner(self) -> None:
        """A DID is listed once, with all messages queued for it, whoever owns it now."""
        await self.register(ALICE, OTHER)
        await self.enqueue_ids("x", "y", "z", to=OTHER)
        await self.enqueue_ids("a", "b")
        await self.update_recipients(ALICE, (INBOX, "remove"))
        await self.register(BOB, INBOX)
        await self.enqueue_ids("c", "d")
        self.assertEqual(await self.store.queue_sizes(1), ([(INBOX, 4)], 3))
        self.assertEqual(await self.store.queue_sizes(9), ([(INBOX, 4), (OTHER, 3)], 0))
