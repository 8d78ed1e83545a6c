"""Who makes room in a full queue, and who is refused."""

from __future__ import annotations

from itertools import count

from mediatord.errors import MediatorError, QueueFull, UnknownRecipient
from mediatord.store.fair_share import PROBATION_SECONDS
from mediatord.store.interfaces.messages import EnqueueRequest, EnqueueResult, MessageLedger, QueueLimits, StoreLedger
from tests.store.builders import ALICE, HOUR, NOON, make_payload
from tests.store.contract.base import INBOX, LONG_FORM, OTHER, SHORT_FORM, StoreContract


def origin(network: int, sender: int) -> int:
    """0 in either stands for one that is not known."""
    return network << 32 | sender


class FairShareTestCase(StoreContract):
    """How queues are filled."""

    async def fill(self, names: str, origin: int = 0, size: int = 1) -> list[str]:
        """Deposit a message for each letter, one after another; what had to make room, in order."""
        gone: list[str] = []
        for name in names:
            gone += [one.id for one in (await self.put(name, data=b"x" * size, origin=origin)).evicted]
        return gone

    async def befriend(self, *origins: int) -> None:
        """Have these known to the recipient."""
        for _ in range(2):
            for number, one in enumerate(origins):
                await self.fill(f"{number}", one)
                await self.store.acknowledge(ALICE, [f"{number}"])
            self.clock.advance(PROBATION_SECONDS)

    def enqueue(self, names: str, to: str = INBOX, origin: int = 0) -> EnqueueRequest:
        return EnqueueRequest(to, tuple([make_payload(name, b"x") for name in names]), NOON + HOUR, origin=origin)


class FairShareContract(FairShareTestCase):
    """Promises of `QueueLimits` with `oldest` and a share."""

    limits = QueueLimits(max_messages=10, max_bytes=1000, share=0.5)

    async def test_sender_makes_room_for_itself(self) -> None:
        """Who has more than its share pushes out its own oldest message, and nobody else's."""
        await self.fill("abcd", origin(1, 1))
        await self.fill("ABCDEF", origin(2, 2))
        self.assertEqual(await self.fill("GHI", origin(2, 2)), ["A", "B", "C"])
        self.assertEqual(await self.waiting(), [*"abcdDEFGHI"])

    async def test_not_beyond_its_share(self) -> None:
        """Who has no more than its share with what comes now makes room like all, by age."""
        await self.fill("abcdef", origin(1, 1))
        await self.fill("ABCD", origin(2, 2))
        self.assertEqual(await self.fill("E", origin(2, 2)), ["a"])
        self.assertEqual(await self.fill("F", origin(2, 2)), ["A"])

    async def test_alone(self) -> None:
        """One sender alone has a first-in, first-out queue of full length."""
        self.assertEqual(await self.fill("abcdefghijkl", origin(1, 1)), ["a", "b"])
        self.assertEqual(await self.waiting(), [*"cdefghijkl"])

    async def test_network_makes_room(self) -> None:
        """Many senders of one network, each with little, push out the oldest message of that network."""
        await self.fill("abcd", origin(1, 1))
        for sender, name in enumerate("ABCDEF", 10):
            await self.fill(name, origin(2, sender))
        self.assertEqual(await self.fill("G", origin(2, 99)), ["A"])
        self.assertEqual(await self.fill("H", origin(2, 0)), ["B"])
        self.assertEqual(await self.fill("e", origin(1, 1)), ["a"])

    async def test_sender_before_network(self) -> None:
        """Of both it is the sender's own, though another of its network has an older one."""
        await self.fill("a", origin(2, 1))
        await self.fill("bcd", origin(1, 3))
        await self.fill("ABCDEF", origin(2, 2))
        self.assertEqual(await self.fill("G", origin(2, 2)), ["A"])
        # From elsewhere the same sender is the same party.
        self.assertEqual(await self.fill("H", origin(9, 2)), ["B"])

    async def test_halves_are_told_apart(self) -> None:
        """A sender and a network with the same number have nothing to do with each other."""
        await self.fill("abcdef", origin(7, 1))
        await self.fill("ABCD", origin(1, 8))
        self.assertEqual(await self.fill("E", origin(2, 7)), ["a"])
        self.assertEqual(await self.fill("F", origin(0x7FFF_FFFF, 0xFFFF_FFFF)), ["b"])

    async def test_unknown_is_no_party(self) -> None:
        """What is known of nobody makes room by age, whatever there is of it; a known half counts by itself."""
        await self.fill("abcd", origin(3, 3))
        await self.fill("ABCDEF")
        self.assertEqual(await self.fill("G"), ["a"])
        self.assertEqual(await self.fill("HIJKL", origin(0, 0xFFFF_FFFF)), [*"bcdAB"])
        self.assertEqual(await self.fill("M", origin(0, 0xFFFF_FFFF)), ["H"])
        self.assertEqual(await self.waiting(), [*"CDEFGIJKLM"])

    async def test_high_numbers(self) -> None:
        """All bits count."""
        top = origin(0x7FFF_FFFF, 0)
        await self.fill("abcd", origin(0x3FFF_FFFF, 0))
        await self.fill("ABCDEF", top)
        self.assertEqual(await self.fill("G", top), ["A"])

    async def test_by_bytes(self) -> None:
        """A few large messages are as much of a queue as many small ones."""
        await self.fill("a", origin(1, 1), 100)
        await self.fill("ABC", origin(2, 2), 300)
        enqueued = await self.put("D", data=b"x" * 299, origin=origin(2, 2))
        self.assertEqual([(gone.id, gone.reason) for gone in enqueued.evicted], [("A", "fifo_bytes")])
        self.assertEqual(await self.fill("E", origin(3, 3), 100), ["a"])

    async def test_as_far_as_its_share(self) -> None:
        """One deposit of several messages takes from its own until that is no more than the share, then by age."""
        await self.fill("abcdef", origin(1, 1))
        await self.fill("ABCD", origin(2, 2))
        enqueued = await self.put("E", "F", "G", data=b"x", origin=origin(2, 2))
        self.assertEqual([gone.id for gone in enqueued.evicted], ["A", "B", "a"])
        self.assertEqual({gone.reason for gone in enqueued.evicted}, {"fifo_count"})
        self.assertEqual(await self.waiting(), [*"bcdefCDEFG"])

    async def test_nothing_of_itself(self) -> None:
        """Who has more than its share only by what comes now makes room like all."""
        await self.fill("abcdefgh", origin(1, 1))
        enqueued = await self.put(*"ABCDEF", data=b"x", origin=origin(2, 2))
        self.assertEqual([gone.id for gone in enqueued.evicted], [*"abcd"])

    async def test_too_large_is_nobodys(self) -> None:
        """What is out again at once counts for no share."""
        await self.fill("abcde", origin(1, 1))
        await self.fill("ABCDE", origin(2, 2))
        await self.put("big", data=b"x" * 1001, origin=origin(2, 2))
        self.assertEqual(await self.fill("F", origin(1, 3)), ["a"])

    async def test_what_is_gone_does_not_count(self) -> None:
        """Acknowledged, taken and expired messages are nobody's share."""
        await self.fill("abcde", origin(1, 1))
        await self.put("X", data=b"x", ttl=5, origin=origin(2, 2))
        await self.fill("ABCD", origin(2, 2))
        self.clock.advance(6)
        await self.store.expire_messages(1)
        await self.store.acknowledge(ALICE, ["A"])
        await self.store.remove_messages(["B"])
        await self.fill("fgh", origin(3, 3))
        self.assertEqual(await self.fill("E", origin(2, 2)), ["a"])

    async def test_queues_are_apart(self) -> None:
        """What somebody has in one queue does not count in another, of the same account or not."""
        await self.register(ALICE, OTHER)
        await self.fill("abcdefghi", origin(1, 1))
        await self.fill("A", origin(2, 2))
        for name in "BCDEF":
            await self.put(name, to=OTHER, data=b"x", origin=origin(2, 2))
        self.assertEqual(await self.fill("G", origin(2, 2)), ["a"])

    async def test_many_at_once(self) -> None:
        """It is the same for deposits that come together."""
        await self.fill("abcde", origin(1, 1))
        deposits = [self.enqueue(name, origin=origin(2, 2)) for name in "ABCDEFG"]
        done = await self.store.enqueue_each(deposits)
        gone = [[one.id for one in each.evicted] for each in done if isinstance(each, EnqueueResult)]
        self.assertEqual(gone, [[], [], [], [], [], ["A"], ["B"]])
        both = await self.store.enqueue_all([self.enqueue("HI", origin=origin(2, 2)), self.enqueue("J")])
        gone = [[one.id for one in each.evicted] for each in both]
        self.assertEqual(gone, [["C", "D"], ["a"]])
        self.assertEqual(
            await self.store.read_ledger(), StoreLedger(MessageLedger(accepted=15, evicted=5, waiting=10))
        )


class SenderReserveContract(FairShareTestCase):
    """Promises of `QueueLimits` with `oldest` and a reserved part: who has what is scarce does not lose to others."""

    limits = QueueLimits(max_messages=20, max_bytes=2000, share=0.5, reserved=0.25)

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        self.numbers = count()

    async def flood(self, number: int, networks: int, *, senders: int = 0) -> None:
        """So many messages from so many networks in turn, and as many senders, or anonymous ones."""
        for one in range(number):
            sender = 100 + one % senders if senders else 0
            await self.put(f"flood-{next(self.numbers)}", data=b"x", origin=origin(100 + one % networks, sender))

    async def left(self, names: str) -> str:
        """Those of these that are still there."""
        waiting = set(await self.waiting())
        return "".join(name for name in names if name in waiting)

    async def test_anonymous_addresses_together(self) -> None:
        """However many there are, they do not push out what has a sender, nor what is of a known network."""
        for networks in (1, 3, 30):
            await self.befriend(origin(7, 0), origin(0, 8))
            await self.fill("ABCDE", origin(1, 1))
            await self.fill("FGH", origin(7, 0))
            await self.fill("IJ", origin(9, 8))
            await self.flood(60, networks)
            self.assertEqual(await self.left("ABCDEFGHIJ"), "ABCDEFGHIJ")
            await self.store.acknowledge(ALICE, await self.waiting())

    async def test_anonymous_addresses_among_each_other(self) -> None:
        """Who has sent little loses nothing to several who send much."""
        await self.fill("abc", origin(1, 0))
        await self.flood(60, 3)
        self.assertEqual(await self.left("abc"), "abc")
        await self.flood(60, 30)
        self.assertEqual(len(await self.waiting()), 20)

    async def test_made_up_senders(self) -> None:
        """They do not push out what is of known senders, and leave a part to anonymous ones."""
        await self.befriend(origin(2, 2))
        await self.fill("abcde", origin(1, 0))
        await self.fill("ABCDE", origin(2, 2))
        await self.flood(60, 20, senders=60)
        self.assertEqual(await self.left("abcdeABCDE"), "abcdeABCDE")

    async def test_made_up_senders_of_one_network(self) -> None:
        """Each with one message, they do not push out those of a real one that has a few."""
        await self.fill("ABC", origin(1, 1))
        await self.flood(60, 2, senders=60)
        self.assertEqual(await self.left("ABC"), "ABC")

    async def test_known_ones(self) -> None:
        """They push out what is over the part of each rank, and not what is within."""
        known = [origin(0, number) for number in (2, 3, 4)]
        await self.befriend(*known)
        await self.fill("abcdef", origin(1, 0))
        await self.fill("ABCDEF", origin(5, 5))
        for name, one in zip("0123456789KLMNOPQRSTUVW", known * 9, strict=False):
            await self.fill(name, one)
        self.assertEqual((await self.left("abcdef"), await self.left("ABCDEF")), ("bcdef", "BCDEF"))

    async def test_only_what_is_reserved(self) -> None:
        """What known senders have beyond that makes room for others, when these have less than their part."""
        known = [origin(number, number) for number in (2, 3)]
        await self.befriend(*known)
        for name, one in zip("ABCDEFGHIJKLMNOPQRST", known * 10, strict=False):
            await self.fill(name, one)
        await self.flood(30, 3)
        self.assertEqual(await self.left("ABCDEFGHIJKLMNOPQRST"), "FGHIJKLMNOPQRST")

    async def test_one_acknowledgement_is_not_enough(self) -> None:
        """Nor are several within an hour."""
        for name in "xyz":
            await self.fill(name, origin(7, 0))
            await self.store.acknowledge(ALICE, [name])
            self.clock.advance(PROBATION_SECONDS / 2 - 1)
        await self.fill("ABCDE", origin(7, 0))
        await self.flood(60, 30)
        self.assertEqual(await self.left("ABCDE"), "")

    async def test_first_come_first_out(self) -> None:
        """Among equals the oldest makes room."""
        for number, name in enumerate("abcdefghijklmnopqrst", 1):
            await self.fill(name, origin(number, 0))
        self.assertEqual(await self.fill("u", origin(50, 0)), ["a"])
        self.assertEqual(await self.fill("v", origin(51, 0)), ["b"])
        self.assertEqual(await self.fill("w", origin(10, 0)), ["j"])

    async def test_another_rank_of_the_same_network(self) -> None:
        """What comes counts for its own rank only."""
        await self.fill("ABCDEF", origin(3, 3))
        await self.fill("abcd", origin(1, 0))
        await self.fill("efghi", origin(2, 0))
        await self.fill("jklmn", origin(4, 4))
        self.assertEqual(await self.fill("o", origin(1, 1)), ["e"])
        self.assertEqual(await self.fill("p", origin(1, 0)), ["a"])

    async def test_of_equals_the_first(self) -> None:
        """Networks that have as much make room in turn, whatever their numbers are."""
        await self.fill("abcdefghij", origin(9, 0))
        await self.fill("klmnopqrst", origin(8, 0))
        self.assertEqual(await self.fill("u", origin(7, 0)), ["a"])
        self.assertEqual(await self.fill("v", origin(7, 0)), ["k"])
        self.assertEqual(await self.fill("w", origin(9, 0)), ["b"])

    async def test_of_nobody_known(self) -> None:
        """What is from nobody knows where is anonymous."""
        await self.fill("abcdefghijklmnopqrst")
        self.assertEqual(await self.fill("u"), ["a"])
        self.assertEqual(await self.fill("A", origin(1, 1)), ["b"])

    async def test_in_one_deposit(self) -> None:
        """Several messages of one deposit make room one after the other."""
        await self.fill("ABCDEFGH", origin(1, 1))
        await self.fill("abcdefghijkl", origin(2, 0))
        enqueued = await self.put(*"uvw", data=b"x", origin=origin(3, 0))
        self.assertEqual([gone.id for gone in enqueued.evicted], [*"abc"])

    async def test_many_at_once(self) -> None:
        """It is the same for deposits that come together."""
        await self.befriend(origin(0, 8))
        await self.fill("ABCDE", origin(1, 1))
        await self.fill("FGHIJ", origin(2, 8))
        deposits = [
            self.enqueue(name, origin=origin(20 + number % 3, 0)) for number, name in enumerate("abcdefghijklmnop")
        ]
        done = await self.store.enqueue_each(deposits)
        gone = [one.id for each in done if isinstance(each, EnqueueResult) for one in each.evicted]
        self.assertEqual(gone, [*"abcdef"])

    async def test_of_its_own_queue_only(self) -> None:
        """Who is known to one recipient is not to another."""
        await self.register(ALICE, OTHER)
        await self.befriend(origin(7, 0))
        for name in "ABCDE":
            await self.put(name, to=OTHER, data=b"x", origin=origin(7, 0))
        for number in range(60):
            await self.put(f"flood-{number}", to=OTHER, data=b"x", origin=origin(100 + number % 30, 0))
        self.assertEqual(await self.left("ABCDE"), "")

    async def test_forgotten_with_the_recipient(self) -> None:
        """Who registers a DID anew knows nobody."""
        await self.befriend(origin(7, 0))
        for action in ("remove", "add"):
            await self.store.update_recipients(ALICE, [(INBOX, action)], max_recipients=9)
        await self.fill("ABCDE", origin(7, 0))
        await self.flood(60, 30)
        self.assertEqual(await self.left("ABCDE"), "")


class SenderReserveRefusalContract(FairShareTestCase):
    """Promises of `QueueLimits` with `refuse` and a reserved part."""

    limits = QueueLimits(max_messages=8, max_bytes=800, when_full="refuse", reserved=0.25)

    async def test_reserved(self) -> None:
        """What nobody knows is refused while there is room for known senders."""
        await self.befriend(origin(7, 0))
        await self.fill("abc", origin(1, 0))
        await self.fill("def", origin(2, 2))
        for one in (origin(1, 0), origin(3, 3), 0):
            with self.assertRaises(QueueFull):
                await self.put("g", data=b"x", origin=one)
        await self.fill("gh", origin(7, 0))
        with self.assertRaises(QueueFull):
            await self.put("i", data=b"x", origin=origin(7, 0))

    async def test_together(self) -> None:
        """So is a deposit that would be too much with those before it."""
        await self.befriend(origin(7, 0))
        deposits = [self.enqueue("abcd", origin=origin(1, 0)), self.enqueue("efg", origin=origin(2, 0))]
        with self.assertRaises(QueueFull):
            await self.store.enqueue_all(deposits)
        done = await self.store.enqueue_each(deposits)
        self.assertEqual([isinstance(one, EnqueueResult) for one in done], [True, False])

    async def test_nobody_is_known(self) -> None:
        """Who knows nobody has nothing to reserve."""
        await self.fill("abcdefgh", origin(1, 0))
        with self.assertRaises(QueueFull):
            await self.put("i", data=b"x", origin=origin(2, 0))


class NoFairShareContract(FairShareTestCase):
    """Promises of `QueueLimits` with `oldest` and no share."""

    limits = QueueLimits(max_messages=4, max_bytes=1000, share=1.0)

    async def test_by_age(self) -> None:
        """Whoever sent it, the oldest makes room."""
        await self.fill("a", origin(1, 1))
        await self.fill("ABC", origin(2, 2))
        enqueued = await self.put("D", "E", data=b"x", origin=origin(2, 2))
        self.assertEqual([gone.id for gone in enqueued.evicted], ["a", "A"])


class RefusalContract(FairShareTestCase):
    """Promises of `QueueLimits` with `refuse`."""

    limits = QueueLimits(max_messages=4, max_bytes=100, when_full="refuse")

    async def refused(self, *names: str, size: int = 1, origin: int = 0) -> None:
        before = await self.waiting()
        with self.assertRaises(QueueFull):
            await self.put(*names, data=b"x" * size, origin=origin)
        self.assertEqual(await self.waiting(), before)

    async def test_full(self) -> None:
        """A deposit that would exceed a limit is refused, and nothing makes room; one that fits is stored."""
        await self.fill("abcd")
        await self.refused("e")
        await self.store.acknowledge(ALICE, ["b"])
        self.assertEqual(await self.fill("e"), [])
        self.assertEqual(await self.waiting(), [*"acde"])

    async def test_bytes(self) -> None:
        """Likewise for bytes; exactly full is not too full."""
        await self.fill("ab", size=40)
        await self.refused("c", size=21)
        self.assertEqual(await self.fill("c", size=20), [])

    async def test_too_large(self) -> None:
        """What would never fit is refused, and is not stored for a moment."""
        await self.refused("big", size=101)
        with self.assertRaises(QueueFull):
            await self.put_payloads(make_payload("a", b"x"), make_payload("big", b"x" * 101))
        self.assertEqual(await self.store.read_ledger(), StoreLedger())

    async def test_as_a_whole(self) -> None:
        """Of a deposit of which a part would fit nothing is stored."""
        await self.fill("abc")
        await self.refused("d", "e")
        await self.fill("d")

    async def test_spellings_share_a_queue(self) -> None:
        """What fits under one spelling of a recipient leaves no room under another, together or each by itself."""
        await self.register(ALICE, LONG_FORM)
        with self.assertRaises(QueueFull):
            await self.store.enqueue_all([self.enqueue("abc", LONG_FORM), self.enqueue("de", SHORT_FORM)])
        done = await self.store.enqueue_each([self.enqueue("abc", LONG_FORM), self.enqueue("de", SHORT_FORM)])
        self.assertEqual([type(one) for one in done], [EnqueueResult, QueueFull])
        self.assertEqual(await self.waiting(), [*"abc"])

    async def test_each_by_itself(self) -> None:
        """Of several deposits those are stored that fit, each in its turn."""
        await self.fill("ab")
        deposits = [self.enqueue("cde"), self.enqueue("c"), self.enqueue("x", OTHER), self.enqueue("d")]
        done = await self.store.enqueue_each([*deposits, self.enqueue("e")])
        kinds = [type(one) if isinstance(one, MediatorError) else EnqueueResult for one in done]
        self.assertEqual(kinds, [QueueFull, EnqueueResult, UnknownRecipient, EnqueueResult, QueueFull])
        self.assertEqual(await self.waiting(), [*"abcd"])

    async def test_all_or_none(self) -> None:
        """Of several that belong together none is stored if they are too much, alone or with each other."""
        await self.register(ALICE, OTHER)
        await self.fill("ab")
        for deposits in (
            [self.enqueue("c", OTHER), self.enqueue("cde")],
            [self.enqueue("c"), self.enqueue("e", OTHER), self.enqueue("df")],
        ):
            with self.assertRaises(QueueFull):
                await self.store.enqueue_all(deposits)
            self.assertEqual(await self.waiting(), ["a", "b"])
        await self.store.enqueue_all([self.enqueue("c"), self.enqueue("d"), self.enqueue("efgh", OTHER)])
        self.assertEqual(await self.waiting(), [*"abcdefgh"])

    async def test_unknown_recipient(self) -> None:
        """Nobody's queue is not full."""
        with self.assertRaises(UnknownRecipient):
            await self.put("a", "b", "c", "d", "e", to=OTHER)

    async def test_ledger(self) -> None:
        """What was refused was not accepted."""
        await self.fill("abcd")
        await self.refused("e")
        await self.store.enqueue_each([self.enqueue("f")])
        self.assertEqual(await self.store.read_ledger(), StoreLedger(MessageLedger(accepted=4, waiting=4)))


class FairShareRefusalContract(FairShareTestCase):
    """Promises of `QueueLimits` with `refuse` and a share."""

    limits = QueueLimits(max_messages=8, max_bytes=100, when_full="refuse", share=0.5)

    async def refused(self, *names: str, size: int = 1, origin: int) -> None:
        before = await self.waiting()
        with self.assertRaises(QueueFull):
            await self.put(*names, data=b"x" * size, origin=origin)
        self.assertEqual(await self.waiting(), before)

    async def test_sender(self) -> None:
        """Who would have more than its share is refused while there is room for others; its share it may have."""
        await self.fill("abcd", origin(1, 1))
        await self.refused("e", origin=origin(1, 1))
        await self.refused("e", origin=origin(2, 1))
        await self.fill("ABCD", origin(2, 2))
        await self.store.acknowledge(ALICE, ["a"])
        await self.fill("e", origin(1, 1))

    async def test_network(self) -> None:
        """So is who comes from a network of which all together would."""
        for sender, name in enumerate("abcd", 1):
            await self.fill(name, origin(1, sender))
        await self.refused("e", origin=origin(1, 9))
        await self.refused("e", origin=origin(1, 0))
        await self.fill("e", origin(3, 9))

    async def test_bytes(self) -> None:
        """The share is one of bytes as well."""
        await self.fill("ab", origin(1, 1), 25)
        await self.refused("c", origin=origin(1, 1))
        await self.fill("c", origin(2, 2), 50)

    async def test_at_once(self) -> None:
        """A deposit by itself can be more than a share, and several together can be."""
        await self.refused(*"abcde", origin=origin(1, 1))
        with self.assertRaises(QueueFull):
            await self.store.enqueue_all([self.enqueue(some, origin=origin(1, 1)) for some in ("abc", "de")])

    async def test_each_in_its_turn(self) -> None:
        """Of several deposits that come together each finds what those before it have left."""
        deposits = [self.enqueue(some, origin=origin(1, 1)) for some in ("abc", "de", "f")]
        done = await self.store.enqueue_each(deposits)
        self.assertEqual([isinstance(one, EnqueueResult) for one in done], [True, False, True])
        self.assertEqual(await self.waiting(), [*"abcf"])

    async def test_unknown_is_no_party(self) -> None:
        """Those of whom nothing is known may fill a queue."""
        await self.fill("abcdefgh")
        await self.refused("i", origin=0)
