"""Fetching, counting, pushing and acknowledging."""

from __future__ import annotations

from hashlib import sha256

from twisted.internet.defer import gatherResults

from mediatord.store.interfaces.messages import QueueStatus, QueueTotals, RemovedMessage
from tests.store.builders import ALICE, BOB, HOUR, NOON
from tests.store.contract.base import INBOX, OTHER, StoreContract

NOTHING = QueueStatus(0, 0)


class PickupContract(StoreContract):
    """Promises of the rest of `IMessageStore`, but for those about time."""

    async def test_fetch_limit(self) -> None:
        """At most `limit` messages are fetched, the oldest, and again the same until acknowledged (reference 6.1)."""
        await self.put("a", "b", "c")
        for _ in range(2):
            found = await self.store.fetch_messages(ALICE, None, limit=2, max_bytes=1000)
            self.assertEqual([message.id for message in found], ["a", "b"])
        self.assertEqual(await self.store.fetch_messages(ALICE, None, limit=0, max_bytes=1000), [])

    async def test_fetch_max_bytes(self) -> None:
        """No more is fetched than fits in `max_bytes`, but at least one message (reference 6.1)."""
        await self.put("a", "b", "c", data=b"x" * 100)
        for max_bytes, expected in ((1, 1), (199, 1), (200, 2), (299, 2), (300, 3)):
            found = await self.store.fetch_messages(ALICE, None, limit=9, max_bytes=max_bytes)
            self.assertEqual(len(found), expected, f"in {max_bytes} bytes")

    async def test_fetch_one_recipient(self) -> None:
        """`recipient_did` narrows to one DID; without it all of the account's are meant (reference 6.1)."""
        await self.register(ALICE, OTHER)
        await self.put("a")
        await self.put("b", to=OTHER)
        self.assertEqual(await self.waiting(ALICE), ["a", "b"])
        self.assertEqual(await self.waiting(ALICE, OTHER), ["b"])
        self.assertEqual(await self.count(ALICE, OTHER), (1, len(b'{"ciphertext":"b"}')))

    async def test_foreign_recipient(self) -> None:
        """Nobody sees what waits for somebody else's DID, nor for a DID or account that does not exist."""
        await self.put("a")
        for account, did in ((BOB, None), (BOB, INBOX), (ALICE, OTHER), ("did:example:nobody", INBOX), (INBOX, None)):
            self.assertEqual(await self.waiting(account, did), [])
            self.assertEqual(await self.store.get_queue_status(account, did), NOTHING)

    async def test_status(self) -> None:
        """The status counts messages and bytes and gives the first and the last time of arrival (reference 6)."""
        self.assertEqual(await self.store.get_queue_status(ALICE, None), NOTHING)
        await self.put("a", data=b"12345")
        self.clock.advance(10)
        await self.put("b", "c", data=b"123")
        expected = QueueStatus(3, 11, NOON, NOON + 10)
        self.assertEqual(await self.store.get_queue_status(ALICE, None), expected)
        self.assertEqual(await self.store.get_queue_status(ALICE, INBOX), expected)

    async def test_delivered_still_waits(self) -> None:
        """A pushed message stays in the queue and counts until it is acknowledged (reference 6.1, 6.3)."""
        await self.put("a", "b")
        await self.store.mark_delivered(["a", "unknown"])
        found = await self.store.fetch_messages(ALICE, None, limit=9, max_bytes=1000)
        self.assertEqual([(m.id, m.status) for m in found], [("a", "delivered"), ("b", "pending")])
        self.assertEqual((await self.count())[0], 2)

    async def test_back_to_pending(self) -> None:
        """What was pushed and not acknowledged becomes pending; the answer names just those (UC-021 AF-6)."""
        await self.put("a", "b", "c")
        await self.store.mark_delivered(["c", "a"])
        self.assertEqual(await self.store.mark_pending(["c", "b", "c", "unknown", "a"]), ["c", "a"])
        self.assertEqual(await self.store.mark_pending(["a", "c"]), [])
        found = await self.store.fetch_messages(ALICE, None, limit=9, max_bytes=1000)
        self.assertEqual({m.status for m in found}, {"pending"})

    async def test_acknowledge_by_id(self) -> None:
        """Acknowledged messages are gone for good; a second acknowledgement finds nothing (reference 6.1)."""
        await self.put("a", "b", "c", data=b"1234")
        await self.store.mark_delivered(["a", "a"])
        removed = await self.store.acknowledge(ALICE, ["c", "a", "a", "unknown", ""])
        self.assertEqual(
            removed, [RemovedMessage("a", INBOX, ALICE, 4, NOON, 1), RemovedMessage("c", INBOX, ALICE, 4, NOON, 0)]
        )
        self.assertEqual(await self.waiting(), ["b"])
        self.assertEqual(await self.count(), (1, 4))
        self.assertEqual(await self.store.acknowledge(ALICE, ["c", "a"]), [])
        self.assertEqual(await self.store.acknowledge(ALICE, []), [])

    async def test_acknowledge_once(self) -> None:
        """A nonce is claimed and messages are removed; if it was claimed before, nothing is removed."""
        await self.register(ALICE, OTHER)
        await self.put("a", "b", "c", data=b"12345")
        await self.put("d", to=OTHER)
        await self.put("e", to=OTHER, delay=9)
        until = self.clock.seconds() + HOUR
        done = await self.store.acknowledge_once(ALICE, ["b", "a", "unknown"], b"first", until, with_status=True)
        assert done is not None
        self.assertEqual([one.id for one in done.removed], ["a", "b"])
        self.assertEqual(done.status, await self.store.get_queue_status(ALICE, None))
        self.assertEqual(await self.count(), (2, 5 + len(b'{"ciphertext":"d"}')))
        self.assertIsNone(await self.store.acknowledge_once(ALICE, ["c"], b"first", until, with_status=True))
        self.assertFalse(await self.store.claim_nonce(b"first", until))
        self.assertEqual(await self.waiting(), ["c", "d"])
        digest = sha256(b"12345").hexdigest()
        done = await self.store.acknowledge_once(ALICE, [digest, "d"], b"second", until)
        assert done is not None
        self.assertEqual(([one.id for one in done.removed], done.status), (["c", "d"], None))

    async def test_acknowledge_once_together(self) -> None:
        """Each of several at the same time has its own result; of those with one nonce the first is done."""
        await self.put("a", "b", "c")
        until = self.clock.seconds() + HOUR
        done = await gatherResults(
            [
                self.store.acknowledge_once(account, [id], key, until, with_status=True)
                for account, id, key in ((ALICE, "a", b"1"), (ALICE, "b", b"1"), (BOB, "c", b"2"), (ALICE, "c", b"3"))
            ]
        )
        self.assertEqual(
            [None if one is None else [gone.id for gone in one.removed] for one in done], [["a"], None, [], ["c"]]
        )
        self.assertEqual(await self.waiting(), ["b"])

    async def test_acknowledge_by_digest(self) -> None:
        """The lower-case hexadecimal SHA-256 of a payload stands for every message with it (reference 6.1)."""
        await self.put("a", "b", data=b"same")
        await self.put("c", data=b"other")
        same = sha256(b"same").hexdigest()
        self.assertEqual(await self.store.acknowledge(ALICE, [same.upper(), same[:-1], same + "0"]), [])
        removed = await self.store.acknowledge(ALICE, [same, "b", same])
        self.assertEqual([gone.id for gone in removed], ["a", "b"])
        self.assertEqual(await self.waiting(), ["c"])

    async def test_acknowledge_many_digests(self) -> None:
        """An acknowledgement may be long."""
        await self.put("a", data=b"1")
        strangers = [sha256(b"%d" % number).hexdigest() for number in range(2000, 3200)]
        removed = await self.store.acknowledge(ALICE, [*strangers, sha256(b"1").hexdigest(), *strangers])
        self.assertEqual([gone.id for gone in removed], ["a"])

    async def test_acknowledge_foreign(self) -> None:
        """Nobody can remove another account's messages, neither by id nor by digest (reference 6.1)."""
        await self.put("a", data=b"same")
        await self.register(BOB, OTHER)
        await self.put("b", to=OTHER, data=b"same")
        digest = sha256(b"same").hexdigest()
        for account in ("did:example:nobody", INBOX):
            self.assertEqual(await self.store.acknowledge(account, ["a", "b", digest]), [])
        self.assertEqual([gone.id for gone in await self.store.acknowledge(BOB, ["a", digest])], ["b"])
        self.assertEqual(await self.waiting(ALICE), ["a"])

    async def test_acknowledge_one_of_several_queues(self) -> None:
        """The same payload for two DIDs is two messages; acknowledging one id leaves the other (reference 6.1)."""
        await self.register(ALICE, OTHER)
        await self.put("a", data=b"same")
        await self.put("b", to=OTHER, data=b"same")
        await self.store.acknowledge(ALICE, ["a"])
        self.assertEqual(await self.waiting(), ["b"])

    async def test_half_a_character(self) -> None:
        """What no text has is an id that nobody knows, and a DID that nobody has."""
        await self.put("a", "b")
        half = "\ud800"
        self.assertEqual(await self.store.acknowledge(ALICE, [half]), [])
        await self.store.mark_delivered([half, "a"])
        self.assertEqual(await self.store.mark_pending([half, "a"]), ["a"])
        self.assertEqual([one.id for one in await self.store.find_messages([half, "a"])], ["a"])
        self.assertEqual(await self.store.find_messages([half]), [])
        for account, did in ((ALICE, half), (half, None), (half, INBOX)):
            self.assertEqual(await self.waiting(account, did), [])
            self.assertEqual(await self.store.get_queue_status(account, did), NOTHING)
        self.assertEqual([one.id for one in await self.store.acknowledge(ALICE, [half, "a"])], ["a"])
        self.assertEqual([one.id for one in await self.store.remove_messages([half, "b"])], ["b"])

    async def test_room_after_acknowledgement(self) -> None:
        """What was acknowledged takes no room any more, however it went."""
        await self.put("a", "b", "c", data=b"x" * 333)
        await self.store.acknowledge(ALICE, ["a", "b", "c"])
        self.assertEqual((await self.put("d", "e", "f", data=b"y" * 333)).evicted, ())

    async def test_queue_sizes(self) -> None:
        """The largest queues come first, and the rest as one sum; empty ones do not appear."""
        self.assertEqual(await self.store.queue_sizes(3), ([], 0))
        await self.register(BOB, OTHER, "did:key:third", "did:key:empty")
        await self.put("a", "b")
        await self.put("c", "d", "e", to=OTHER)
        await self.put("f", to="did:key:third")
        self.assertEqual(await self.store.queue_sizes(9), ([(OTHER, 3), (INBOX, 2), ("did:key:third", 1)], 0))
        self.assertEqual(await self.store.queue_sizes(1), ([(OTHER, 3)], 3))
        self.assertEqual(await self.store.queue_sizes(0), ([], 6))
        await self.store.acknowledge(BOB, ["c", "d", "e"])
        self.assertEqual(await self.store.queue_sizes(9), ([(INBOX, 2), ("did:key:third", 1)], 0))

    async def test_waiting(self) -> None:
        """All that waits for anybody, also what is delayed or has expired, until it is gone."""
        self.assertEqual(await self.store.get_queue_totals(), QueueTotals(0, 0, 0, None))
        await self.register(BOB, OTHER)
        await self.put("a", "b", data=b"x" * 10)
        self.clock.advance(5)
        await self.put("c", data=b"x" * 7, to=OTHER)
        self.assertEqual(await self.store.get_queue_totals(), QueueTotals(3, 27, 2, NOON))
        await self.store.acknowledge(ALICE, ["a"])
        self.assertEqual(await self.store.get_queue_totals(), QueueTotals(2, 17, 2, NOON))
        await self.store.acknowledge(ALICE, ["b"])
        self.assertEqual(await self.store.get_queue_totals(), QueueTotals(1, 7, 1, NOON + 5))
        await self.store.acknowledge(BOB, ["c"])
        self.assertEqual(await self.store.get_queue_totals(), QueueTotals(0, 0, 0, None))

    async def test_queue_sizes_of_a_did_that_changed_hands(self) -> None:
        """A DID appears once, with all that waits for it, whoever has it now."""
        await self.register(ALICE, OTHER)
        await self.put("x", "y", "z", to=OTHER)
        await self.put("a", "b")
        await self.change(ALICE, (INBOX, "remove"))
        await self.register(BOB, INBOX)
        await self.put("c", "d")
        self.assertEqual(await self.store.queue_sizes(1), ([(INBOX, 4)], 3))
        self.assertEqual(await self.store.queue_sizes(9), ([(INBOX, 4), (OTHER, 3)], 0))
