"""Contract for eviction and refusal at full queues."""

from __future__ import annotations

from itertools import count

from mediatord.errors import MediatorError, QueueFull, UnknownRecipient
from mediatord.store.fair_share import PROBATION_SECONDS
from mediatord.store.interfaces.messages import EnqueueRequest, EnqueueResult, MessageLedger, QueueLimits, StoreLedger
from tests.store.builders import ALICE, HOUR, NOON, make_payload
from tests.store.contract.base import INBOX, LONG_FORM, OTHER, SHORT_FORM, StoreContract


def make_origin(network: int, sender: int) -> int:
    """Origin of a message; 0 stands for an unknown network or sender."""
    return network << 32 | sender


class FairShareTestCase(StoreContract):
    """Helpers that fill queues."""

    async def fill(self, names: str, origin: int = 0, size: int = 1) -> list[str]:
        """Enqueue one message per letter, one after another; return the evicted ids in order."""
        evicted: list[str] = []
        for name in names:
            evicted += [
                message.id for message in (await self.enqueue_ids(name, data=b"x" * size, origin=origin)).evicted
            ]
        return evicted

    async def make_known(self, *origins: int) -> None:
        """Make the senders with these origins known to the recipient."""
        for _ in range(2):
            for number, one in enumerate(origins):
                await self.fill(f"{number}", one)
                await self.store.acknowledge(ALICE, [f"{number}"])
            self.clock.advance(PROBATION_SECONDS)

    def make_enqueue_request(self, names: str, to: str = INBOX, origin: int = 0) -> EnqueueRequest:
        return EnqueueRequest(to, tuple([make_payload(name, b"x") for name in names]), NOON + HOUR, origin=origin)


class FairShareContract(FairShareTestCase):
    """Contract of `QueueLimits` with `oldest` and a share."""

    limits = QueueLimits(max_messages=10, max_bytes=1000, share=0.5)

    async def test_sender_above_share_evicts_its_own(self) -> None:
        """A sender above its share evicts its own oldest message."""
        await self.fill("abcd", make_origin(1, 1))
        await self.fill("ABCDEF", make_origin(2, 2))
        self.assertEqual(await self.fill("GHI", make_origin(2, 2)), ["A", "B", "C"])
        self.assertEqual(await self.list_waiting(), [*"abcdDEFGHI"])

    async def test_sender_within_share_evicts_by_age(self) -> None:
        """A sender that stays within its share, the new message included, evicts the oldest message."""
        await self.fill("abcdef", make_origin(1, 1))
        await self.fill("ABCD", make_origin(2, 2))
        self.assertEqual(await self.fill("E", make_origin(2, 2)), ["a"])
        self.assertEqual(await self.fill("F", make_origin(2, 2)), ["A"])

    async def test_single_sender_may_fill_queue(self) -> None:
        """A single sender has a first-in, first-out queue of full length."""
        self.assertEqual(await self.fill("abcdefghijkl", make_origin(1, 1)), ["a", "b"])
        self.assertEqual(await self.list_waiting(), [*"cdefghijkl"])

    async def test_network_above_share_evicts_its_own(self) -> None:
        """Many senders of one network, each with few messages, evict that network's oldest message."""
        await self.fill("abcd", make_origin(1, 1))
        for sender, name in enumerate("ABCDEF", 10):
            await self.fill(name, make_origin(2, sender))
        self.assertEqual(await self.fill("G", make_origin(2, 99)), ["A"])
        self.assertEqual(await self.fill("H", make_origin(2, 0)), ["B"])
        self.assertEqual(await self.fill("e", make_origin(1, 1)), ["a"])

    async def test_sender_is_checked_before_network(self) -> None:
        """A sender above its share evicts its own message even if its network has an older one."""
        await self.fill("a", make_origin(2, 1))
        await self.fill("bcd", make_origin(1, 3))
        await self.fill("ABCDEF", make_origin(2, 2))
        self.assertEqual(await self.fill("G", make_origin(2, 2)), ["A"])
        # The same sender in another network is the same party.
        self.assertEqual(await self.fill("H", make_origin(9, 2)), ["B"])

    async def test_sender_and_network_numbers_are_separate(self) -> None:
        """A sender and a network of the same number are unrelated."""
        await self.fill("abcdef", make_origin(7, 1))
        await self.fill("ABCD", make_origin(1, 8))
        self.assertEqual(await self.fill("E", make_origin(2, 7)), ["a"])
        self.assertEqual(await self.fill("F", make_origin(0x7FFF_FFFF, 0xFFFF_FFFF)), ["b"])

    async def test_unknown_origin_has_no_share(self) -> None:
        """Messages of unknown origin evict by age, however many there are; a known half of an origin counts."""
        await self.fill("abcd", make_origin(3, 3))
        await self.fill("ABCDEF")
        self.assertEqual(await self.fill("G"), ["a"])
        self.assertEqual(await self.fill("HIJKL", make_origin(0, 0xFFFF_FFFF)), [*"bcdAB"])
        self.assertEqual(await self.fill("M", make_origin(0, 0xFFFF_FFFF)), ["H"])
        self.assertEqual(await self.list_waiting(), [*"CDEFGIJKLM"])

    async def test_compares_all_bits_of_origin(self) -> None:
        """Origins are compared in all bits."""
        top = make_origin(0x7FFF_FFFF, 0)
        await self.fill("abcd", make_origin(0x3FFF_FFFF, 0))
        await self.fill("ABCDEF", top)
        self.assertEqual(await self.fill("G", top), ["A"])

    async def test_share_counts_bytes(self) -> None:
        """A few large messages use as much of a queue as many small ones."""
        await self.fill("a", make_origin(1, 1), 100)
        await self.fill("ABC", make_origin(2, 2), 300)
        enqueued = await self.enqueue_ids("D", data=b"x" * 299, origin=make_origin(2, 2))
        self.assertEqual([(message.id, message.reason) for message in enqueued.evicted], [("A", "fifo_bytes")])
        self.assertEqual(await self.fill("E", make_origin(3, 3), 100), ["a"])

    async def test_evicts_own_down_to_share(self) -> None:
        """A batch evicts its sender's messages until the share is reached, then by age."""
        await self.fill("abcdef", make_origin(1, 1))
        await self.fill("ABCD", make_origin(2, 2))
        enqueued = await self.enqueue_ids("E", "F", "G", data=b"x", origin=make_origin(2, 2))
        self.assertEqual([message.id for message in enqueued.evicted], ["A", "B", "a"])
        self.assertEqual({message.reason for message in enqueued.evicted}, {"fifo_count"})
        self.assertEqual(await self.list_waiting(), [*"bcdefCDEFG"])

    async def test_batch_above_share_evicts_by_age(self) -> None:
        """A sender above its share only by the new batch evicts by age."""
        await self.fill("abcdefgh", make_origin(1, 1))
        enqueued = await self.enqueue_ids(*"ABCDEF", data=b"x", origin=make_origin(2, 2))
        self.assertEqual([message.id for message in enqueued.evicted], [*"abcd"])

    async def test_oversized_message_does_not_count(self) -> None:
        """An oversized message, which is evicted at once, counts for no share."""
        await self.fill("abcde", make_origin(1, 1))
        await self.fill("ABCDE", make_origin(2, 2))
        await self.enqueue_ids("big", data=b"x" * 1001, origin=make_origin(2, 2))
        self.assertEqual(await self.fill("F", make_origin(1, 3)), ["a"])

    async def test_removed_messages_do_not_count(self) -> None:
        """Acknowledged, taken and expired messages count for no share."""
        await self.fill("abcde", make_origin(1, 1))
        await self.enqueue_ids("X", data=b"x", ttl=5, origin=make_origin(2, 2))
        await self.fill("ABCD", make_origin(2, 2))
        self.clock.advance(6)
        await self.store.expire_messages(1)
        await self.store.acknowledge(ALICE, ["A"])
        await self.store.remove_messages(["B"])
        await self.fill("fgh", make_origin(3, 3))
        self.assertEqual(await self.fill("E", make_origin(2, 2)), ["a"])

    async def test_queues_are_separate(self) -> None:
        """A sender's messages in one queue do not count in another, of the same account or not."""
        await self.register(ALICE, OTHER)
        await self.fill("abcdefghi", make_origin(1, 1))
        await self.fill("A", make_origin(2, 2))
        for name in "BCDEF":
            await self.enqueue_ids(name, to=OTHER, data=b"x", origin=make_origin(2, 2))
        self.assertEqual(await self.fill("G", make_origin(2, 2)), ["a"])

    async def test_same_for_batched_requests(self) -> None:
        """Requests that arrive in one batch are treated alike."""
        await self.fill("abcde", make_origin(1, 1))
        deposits = [self.make_enqueue_request(name, origin=make_origin(2, 2)) for name in "ABCDEFG"]
        done = await self.store.enqueue_each(deposits)
        evicted = [[message.id for message in result.evicted] for result in done if isinstance(result, EnqueueResult)]
        self.assertEqual(evicted, [[], [], [], [], [], ["A"], ["B"]])
        both = await self.store.enqueue_all(
            [self.make_enqueue_request("HI", origin=make_origin(2, 2)), self.make_enqueue_request("J")]
        )
        evicted = [[message.id for message in item.evicted] for item in both]
        self.assertEqual(evicted, [["C", "D"], ["a"]])
        self.assertEqual(
            await self.store.read_ledger(), StoreLedger(MessageLedger(accepted=15, evicted=5, waiting=10))
        )


class SenderReserveContract(FairShareTestCase):
    """
    Contract of `QueueLimits` with `oldest` and a reserve, by which each sender rank keeps its part of the queue.
    """

    limits = QueueLimits(max_messages=20, max_bytes=2000, share=0.5, reserved=0.25)

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        self.numbers = count()

    async def flood(self, number: int, networks: int, *, senders: int = 0) -> None:
        """Enqueue so many messages, from these networks in turn and as many senders, or anonymous ones."""
        for one in range(number):
            sender = 100 + one % senders if senders else 0
            await self.enqueue_ids(
                f"flood-{next(self.numbers)}", data=b"x", origin=make_origin(100 + one % networks, sender)
            )

    async def list_remaining(self, names: str) -> str:
        """Those of these ids that are still queued."""
        waiting = set(await self.list_waiting())
        return "".join(name for name in names if name in waiting)

    async def test_anonymous_messages_spare_other_ranks(self) -> None:
        """Anonymous messages of many addresses evict neither authenticated senders' nor known networks' messages."""
        for networks in (1, 3, 30):
            await self.make_known(make_origin(7, 0), make_origin(0, 8))
            await self.fill("ABCDE", make_origin(1, 1))
            await self.fill("FGH", make_origin(7, 0))
            await self.fill("IJ", make_origin(9, 8))
            await self.flood(60, networks)
            self.assertEqual(await self.list_remaining("ABCDEFGHIJ"), "ABCDEFGHIJ")
            await self.store.acknowledge(ALICE, await self.list_waiting())

    async def test_anonymous_network_with_few_messages_keeps_them(self) -> None:
        """An anonymous network with few messages loses none to several with many."""
        await self.fill("abc", make_origin(1, 0))
        await self.flood(60, 3)
        self.assertEqual(await self.list_remaining("abc"), "abc")
        await self.flood(60, 30)
        self.assertEqual(len(await self.list_waiting()), 20)

    async def test_invented_senders_spare_other_ranks(self) -> None:
        """Invented senders evict no messages of known senders, and leave the reserve of anonymous ones."""
        await self.make_known(make_origin(2, 2))
        await self.fill("abcde", make_origin(1, 0))
        await self.fill("ABCDE", make_origin(2, 2))
        await self.flood(60, 20, senders=60)
        self.assertEqual(await self.list_remaining("abcdeABCDE"), "abcdeABCDE")

    async def test_invented_senders_count_by_network(self) -> None:
        """Many invented senders with one message each do not evict those of a real one with a few."""
        await self.fill("ABC", make_origin(1, 1))
        await self.flood(60, 2, senders=60)
        self.assertEqual(await self.list_remaining("ABC"), "ABC")

    async def test_known_senders_evict_beyond_reserve(self) -> None:
        """Known senders evict what exceeds the reserve of each rank, and nothing within it."""
        known_origins = [make_origin(0, number) for number in (2, 3, 4)]
        await self.make_known(*known_origins)
        await self.fill("abcdef", make_origin(1, 0))
        await self.fill("ABCDEF", make_origin(5, 5))
        for name, one in zip("0123456789KLMNOPQRSTUVW", known_origins * 9, strict=False):
            await self.fill(name, one)
        self.assertEqual(
            (await self.list_remaining("abcdef"), await self.list_remaining("ABCDEF")), ("bcdef", "BCDEF")
        )

    async def test_known_senders_keep_only_reserve(self) -> None:
        """Known senders' messages beyond the reserve are evicted for others that are below theirs."""
        known_origins = [make_origin(number, number) for number in (2, 3)]
        await self.make_known(*known_origins)
        for name, one in zip("ABCDEFGHIJKLMNOPQRST", known_origins * 10, strict=False):
            await self.fill(name, one)
        await self.flood(30, 3)
        self.assertEqual(await self.list_remaining("ABCDEFGHIJKLMNOPQRST"), "FGHIJKLMNOPQRST")

    async def test_one_acknowledgement_is_not_enough(self) -> None:
        """Neither one acknowledgement nor several within an hour make a sender known."""
        for name in "xyz":
            await self.fill(name, make_origin(7, 0))
            await self.store.acknowledge(ALICE, [name])
            self.clock.advance(PROBATION_SECONDS / 2 - 1)
        await self.fill("ABCDE", make_origin(7, 0))
        await self.flood(60, 30)
        self.assertEqual(await self.list_remaining("ABCDE"), "")

    async def test_equal_networks_evict_oldest(self) -> None:
        """Among equals the oldest message is evicted."""
        for number, name in enumerate("abcdefghijklmnopqrst", 1):
            await self.fill(name, make_origin(number, 0))
        self.assertEqual(await self.fill("u", make_origin(50, 0)), ["a"])
        self.assertEqual(await self.fill("v", make_origin(51, 0)), ["b"])
        self.assertEqual(await self.fill("w", make_origin(10, 0)), ["j"])

    async def test_counts_rank_within_network(self) -> None:
        """A new message counts for its own rank only."""
        await self.fill("ABCDEF", make_origin(3, 3))
        await self.fill("abcd", make_origin(1, 0))
        await self.fill("efghi", make_origin(2, 0))
        await self.fill("jklmn", make_origin(4, 4))
        self.assertEqual(await self.fill("o", make_origin(1, 1)), ["e"])
        self.assertEqual(await self.fill("p", make_origin(1, 0)), ["a"])

    async def test_equal_networks_evict_in_turn(self) -> None:
        """Networks with equally many messages lose them in turn, whatever their numbers."""
        await self.fill("abcdefghij", make_origin(9, 0))
        await self.fill("klmnopqrst", make_origin(8, 0))
        self.assertEqual(await self.fill("u", make_origin(7, 0)), ["a"])
        self.assertEqual(await self.fill("v", make_origin(7, 0)), ["k"])
        self.assertEqual(await self.fill("w", make_origin(9, 0)), ["b"])

    async def test_unknown_origin_is_anonymous(self) -> None:
        """A message without sender and network is anonymous."""
        await self.fill("abcdefghijklmnopqrst")
        self.assertEqual(await self.fill("u"), ["a"])
        self.assertEqual(await self.fill("A", make_origin(1, 1)), ["b"])

    async def test_batch_evicts_one_by_one(self) -> None:
        """Messages of one batch evict one after another."""
        await self.fill("ABCDEFGH", make_origin(1, 1))
        await self.fill("abcdefghijkl", make_origin(2, 0))
        enqueued = await self.enqueue_ids(*"uvw", data=b"x", origin=make_origin(3, 0))
        self.assertEqual([message.id for message in enqueued.evicted], [*"abc"])

    async def test_same_for_batched_requests(self) -> None:
        """Requests that arrive in one batch are treated alike."""
        await self.make_known(make_origin(0, 8))
        await self.fill("ABCDE", make_origin(1, 1))
        await self.fill("FGHIJ", make_origin(2, 8))
        deposits = [
            self.make_enqueue_request(name, origin=make_origin(20 + number % 3, 0))
            for number, name in enumerate("abcdefghijklmnop")
        ]
        done = await self.store.enqueue_each(deposits)
        evicted = [message.id for result in done if isinstance(result, EnqueueResult) for message in result.evicted]
        self.assertEqual(evicted, [*"abcdef"])

    async def test_senders_are_known_per_recipient(self) -> None:
        """A sender known to one recipient is not known to another."""
        await self.register(ALICE, OTHER)
        await self.make_known(make_origin(7, 0))
        for name in "ABCDE":
            await self.enqueue_ids(name, to=OTHER, data=b"x", origin=make_origin(7, 0))
        for number in range(60):
            await self.enqueue_ids(f"flood-{number}", to=OTHER, data=b"x", origin=make_origin(100 + number % 30, 0))
        self.assertEqual(await self.list_remaining("ABCDE"), "")

    async def test_new_registration_forgets_known_senders(self) -> None:
        """A recipient that is registered anew has no known senders."""
        await self.make_known(make_origin(7, 0))
        for action in ("remove", "add"):
            await self.store.update_recipients(ALICE, [(INBOX, action)], max_recipients=9)
        await self.fill("ABCDE", make_origin(7, 0))
        await self.flood(60, 30)
        self.assertEqual(await self.list_remaining("ABCDE"), "")


class SenderReserveRefusalContract(FairShareTestCase):
    """Contract of `QueueLimits` with `refuse` and a reserve."""

    limits = QueueLimits(max_messages=8, max_bytes=800, when_full="refuse", reserved=0.25)

    async def test_refuses_unknown_senders_beyond_reserve(self) -> None:
        """Other senders are refused while the reserve of known ones is free."""
        await self.make_known(make_origin(7, 0))
        await self.fill("abc", make_origin(1, 0))
        await self.fill("def", make_origin(2, 2))
        for one in (make_origin(1, 0), make_origin(3, 3), 0):
            with self.assertRaises(QueueFull):
                await self.enqueue_ids("g", data=b"x", origin=one)
        await self.fill("gh", make_origin(7, 0))
        with self.assertRaises(QueueFull):
            await self.enqueue_ids("i", data=b"x", origin=make_origin(7, 0))

    async def test_counts_requests_of_one_batch(self) -> None:
        """A request is refused if it exceeds the limit together with those before it in the batch."""
        await self.make_known(make_origin(7, 0))
        deposits = [
            self.make_enqueue_request("abcd", origin=make_origin(1, 0)),
            self.make_enqueue_request("efg", origin=make_origin(2, 0)),
        ]
        with self.assertRaises(QueueFull):
            await self.store.enqueue_all(deposits)
        done = await self.store.enqueue_each(deposits)
        self.assertEqual([isinstance(result, EnqueueResult) for result in done], [True, False])

    async def test_no_known_senders_no_reserve(self) -> None:
        """A recipient without known senders reserves nothing."""
        await self.fill("abcdefgh", make_origin(1, 0))
        with self.assertRaises(QueueFull):
            await self.enqueue_ids("i", data=b"x", origin=make_origin(2, 0))


class NoFairShareContract(FairShareTestCase):
    """Contract of `QueueLimits` with `oldest` and no share."""

    limits = QueueLimits(max_messages=4, max_bytes=1000, share=1.0)

    async def test_evicts_oldest_of_any_sender(self) -> None:
        """The oldest message is evicted, whoever sent it."""
        await self.fill("a", make_origin(1, 1))
        await self.fill("ABC", make_origin(2, 2))
        enqueued = await self.enqueue_ids("D", "E", data=b"x", origin=make_origin(2, 2))
        self.assertEqual([message.id for message in enqueued.evicted], ["a", "A"])


class RefusalContract(FairShareTestCase):
    """Contract of `QueueLimits` with `refuse`."""

    limits = QueueLimits(max_messages=4, max_bytes=100, when_full="refuse")

    async def assert_refused(self, *names: str, size: int = 1, origin: int = 0) -> None:
        before = await self.list_waiting()
        with self.assertRaises(QueueFull):
            await self.enqueue_ids(*names, data=b"x" * size, origin=origin)
        self.assertEqual(await self.list_waiting(), before)

    async def test_refuses_beyond_message_limit(self) -> None:
        """A request beyond the limit is refused and nothing is evicted; one that fits is stored."""
        await self.fill("abcd")
        await self.assert_refused("e")
        await self.store.acknowledge(ALICE, ["b"])
        self.assertEqual(await self.fill("e"), [])
        self.assertEqual(await self.list_waiting(), [*"acde"])

    async def test_refuses_beyond_byte_limit(self) -> None:
        """A request beyond the byte limit is refused; a queue may be exactly full."""
        await self.fill("ab", size=40)
        await self.assert_refused("c", size=21)
        self.assertEqual(await self.fill("c", size=20), [])

    async def test_refuses_oversized_message(self) -> None:
        """An oversized message is refused and never stored."""
        await self.assert_refused("big", size=101)
        with self.assertRaises(QueueFull):
            await self.enqueue_payloads(make_payload("a", b"x"), make_payload("big", b"x" * 101))
        self.assertEqual(await self.store.read_ledger(), StoreLedger())

    async def test_refuses_batch_as_a_whole(self) -> None:
        """Nothing is stored of a batch of which a part would fit."""
        await self.fill("abc")
        await self.assert_refused("d", "e")
        await self.fill("d")

    async def test_spellings_share_a_queue(self) -> None:
        """All spellings of a recipient count against one limit, in one transaction or separately."""
        await self.register(ALICE, LONG_FORM)
        with self.assertRaises(QueueFull):
            await self.store.enqueue_all(
                [self.make_enqueue_request("abc", LONG_FORM), self.make_enqueue_request("de", SHORT_FORM)]
            )
        done = await self.store.enqueue_each(
            [self.make_enqueue_request("abc", LONG_FORM), self.make_enqueue_request("de", SHORT_FORM)]
        )
        self.assertEqual([type(result) for result in done], [EnqueueResult, QueueFull])
        self.assertEqual(await self.list_waiting(), [*"abc"])

    async def test_enqueue_each_stores_requests_that_fit(self) -> None:
        """Of several requests those that fit are stored, each checked after those before it."""
        await self.fill("ab")
        deposits = [
            self.make_enqueue_request("cde"),
            self.make_enqueue_request("c"),
            self.make_enqueue_request("x", OTHER),
            self.make_enqueue_request("d"),
        ]
        done = await self.store.enqueue_each([*deposits, self.make_enqueue_request("e")])
        kinds = [type(result) if isinstance(result, MediatorError) else EnqueueResult for result in done]
        self.assertEqual(kinds, [QueueFull, EnqueueResult, UnknownRecipient, EnqueueResult, QueueFull])
        self.assertEqual(await self.list_waiting(), [*"abcd"])

    async def test_enqueue_all_stores_all_or_none(self) -> None:
        """Of requests that belong together none is stored if they exceed a limit, alone or in sum."""
        await self.register(ALICE, OTHER)
        await self.fill("ab")
        for deposits in (
            [self.make_enqueue_request("c", OTHER), self.make_enqueue_request("cde")],
            [self.make_enqueue_request("c"), self.make_enqueue_request("e", OTHER), self.make_enqueue_request("df")],
        ):
            with self.assertRaises(QueueFull):
                await self.store.enqueue_all(deposits)
            self.assertEqual(await self.list_waiting(), ["a", "b"])
        await self.store.enqueue_all(
            [self.make_enqueue_request("c"), self.make_enqueue_request("d"), self.make_enqueue_request("efgh", OTHER)]
        )
        self.assertEqual(await self.list_waiting(), [*"abcdefgh"])

    async def test_unknown_recipient_is_not_full(self) -> None:
        """An unknown recipient is reported as such, whatever the number of messages."""
        with self.assertRaises(UnknownRecipient):
            await self.enqueue_ids("a", "b", "c", "d", "e", to=OTHER)

    async def test_refused_messages_are_not_accepted(self) -> None:
        """Refused messages do not count as accepted in the ledger."""
        await self.fill("abcd")
        await self.assert_refused("e")
        await self.store.enqueue_each([self.make_enqueue_request("f")])
        self.assertEqual(await self.store.read_ledger(), StoreLedger(MessageLedger(accepted=4, waiting=4)))


class FairShareRefusalContract(FairShareTestCase):
    """Contract of `QueueLimits` with `refuse` and a share."""

    limits = QueueLimits(max_messages=8, max_bytes=100, when_full="refuse", share=0.5)

    async def assert_refused(self, *names: str, size: int = 1, origin: int) -> None:
        before = await self.list_waiting()
        with self.assertRaises(QueueFull):
            await self.enqueue_ids(*names, data=b"x" * size, origin=origin)
        self.assertEqual(await self.list_waiting(), before)

    async def test_refuses_sender_above_share(self) -> None:
        """A sender above its share is refused while there is room for others; its share it may use."""
        await self.fill("abcd", make_origin(1, 1))
        await self.assert_refused("e", origin=make_origin(1, 1))
        await self.assert_refused("e", origin=make_origin(2, 1))
        await self.fill("ABCD", make_origin(2, 2))
        await self.store.acknowledge(ALICE, ["a"])
        await self.fill("e", make_origin(1, 1))

    async def test_refuses_network_above_share(self) -> None:
        """A sender is refused if its network would exceed its share."""
        for sender, name in enumerate("abcd", 1):
            await self.fill(name, make_origin(1, sender))
        await self.assert_refused("e", origin=make_origin(1, 9))
        await self.assert_refused("e", origin=make_origin(1, 0))
        await self.fill("e", make_origin(3, 9))

    async def test_share_counts_bytes(self) -> None:
        """The share limits bytes as well."""
        await self.fill("ab", make_origin(1, 1), 25)
        await self.assert_refused("c", origin=make_origin(1, 1))
        await self.fill("c", make_origin(2, 2), 50)

    async def test_counts_whole_batch(self) -> None:
        """One request can exceed a share, and so can several in one transaction."""
        await self.assert_refused(*"abcde", origin=make_origin(1, 1))
        with self.assertRaises(QueueFull):
            await self.store.enqueue_all(
                [self.make_enqueue_request(some, origin=make_origin(1, 1)) for some in ("abc", "de")]
            )

    async def test_enqueue_each_counts_earlier_requests(self) -> None:
        """Each request of a batch is checked after those before it."""
        deposits = [self.make_enqueue_request(some, origin=make_origin(1, 1)) for some in ("abc", "de", "f")]
        done = await self.store.enqueue_each(deposits)
        self.assertEqual([isinstance(result, EnqueueResult) for result in done], [True, False, True])
        self.assertEqual(await self.list_waiting(), [*"abcf"])

    async def test_unknown_origin_may_fill_queue(self) -> None:
        """Messages of unknown origin may fill a queue."""
        await self.fill("abcdefgh")
        await self.assert_refused("i", origin=0)
