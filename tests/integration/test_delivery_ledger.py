"""The books of the kill tests: whatever goes wrong is in them."""

from __future__ import annotations

from collections.abc import Iterable

from twisted.trial.unittest import TestCase

from mediatord.wallet.didcomm_client import DeliveredMessage
from tests.integration.database_counters import describe_ledger_gaps, describe_miscounts
from tests.integration.delivery_ledger import DeliveryLedger, LedgerBalance
from tests.integration.message_load import SendAttempt


class FaultyAcknowledger:
    """Acknowledges, unless it is out of order."""

    def __init__(self, works: bool = True) -> None:
        self._works = works

    async def acknowledge(self, ids: Iterable[str | DeliveredMessage]) -> None:
        """:raise ConnectionError: it does not work."""
        if not self._works:
            raise ConnectionError


class LedgerTests(TestCase):
    """One letter, x, and what may become of it. Messages have the ids that the tests give them."""

    def setUp(self) -> None:
        self.ledger = DeliveryLedger()
        self.ledger.due(["x"])

    def posted(self, *statuses: int | None) -> list[str]:
        """Attempts with these outcomes; their markers."""
        markers = [self.ledger.attempt("x") for _ in statuses]
        for marker, status in zip(markers, statuses, strict=True):
            self.ledger.posted(SendAttempt(marker, 0.0, status))
        return markers

    async def acknowledged(self, marker: str, *ids: str, works: bool = True) -> None:
        """These came of an attempt, and were acknowledged."""
        for id_ in ids:
            self.ledger.came(marker, id_)
        await self.ledger.acknowledge(FaultyAcknowledger(works), [DeliveredMessage(id_, b"", "json") for id_ in ids])

    def assert_owed(self, **owed: int) -> LedgerBalance:
        """Of what has to be zero, only these are not."""
        balance = self.ledger.balance(owed.get("left", 0))
        names = ("unsent", "lost", "doubled", "returned", "vanished", "left")
        self.assertEqual({name: getattr(balance, name) for name in names if getattr(balance, name)}, owed)
        self.assertEqual(balance.owed, sum(owed.values()))
        return balance

    async def test_all_is_well(self) -> None:
        """Refused and cut off a few times, then accepted; it came once."""
        *_, accepted = self.posted(503, None, 503, 202)
        await self.acknowledged(accepted, "1")
        balance = self.assert_owed()
        self.assertEqual((balance.posts, balance.accepted, balance.refused, balance.cut), (4, 1, 2, 1))
        self.assertEqual((balance.repeated, balance.doubtful), (0, 0))

    def test_never_accepted(self) -> None:
        """Nobody got it, which is no wonder."""
        self.posted(503, 429)
        self.assert_owed(unsent=1)

    async def test_lost(self) -> None:
        """It was accepted, and never came."""
        (accepted,) = self.posted(202)
        self.assertEqual(self.ledger.awaited(), {accepted})
        self.assert_owed(lost=1)
        await self.acknowledged(accepted, "1")
        self.assertEqual(self.ledger.awaited(), set())

    async def test_lost_although_it_came(self) -> None:
        """An attempt that was refused, or cut off, makes up for none that was accepted."""
        for first, counted in ((503, "doubtful"), (None, "repeated")):
            self.setUp()
            earlier, accepted = self.posted(first, 202)
            await self.acknowledged(earlier, "1")
            self.assertEqual(self.ledger.awaited(), {accepted})
            self.assertEqual(getattr(self.assert_owed(lost=1), counted), 1)

    async def test_cut_off(self) -> None:
        """Two came of one that was accepted and one of which nobody knows."""
        cut, accepted = self.posted(None, 202)
        await self.acknowledged(cut, "1")
        await self.acknowledged(accepted, "2")
        self.assertEqual(self.assert_owed().repeated, 1)

    async def test_doubtful(self) -> None:
        """One of two was said to be refused."""
        refused, accepted = self.posted(503, 202)
        await self.acknowledged(refused, "1")
        await self.acknowledged(accepted, "2")
        self.assertEqual(self.assert_owed().doubtful, 1)

    async def test_doubled(self) -> None:
        """Twice of one attempt, whatever became of that."""
        for marker in self.posted(503, None, 202):
            await self.acknowledged(marker, marker, f"{marker} again")
        balance = self.assert_owed(doubled=3)
        self.assertEqual((balance.repeated, balance.doubtful), (1, 1))

    async def test_never_sent(self) -> None:
        """More came than were ever sent, or one that was refused for good."""
        limited, accepted = self.posted(429, 202)
        for marker in (limited, accepted, self.ledger.attempt("x")):
            await self.acknowledged(marker, marker)
        self.assert_owed(doubled=2)

    async def test_returned(self) -> None:
        """It came again after its acknowledgement was answered."""
        (accepted,) = self.posted(202)
        await self.acknowledged(accepted, "1")
        self.ledger.came(accepted, "1")
        self.assert_owed(returned=1)

    async def test_an_acknowledgement_that_was_not_answered(self) -> None:
        """It may come again then, or not."""
        (accepted,) = self.posted(202)
        with self.assertRaises(ConnectionError):
            await self.acknowledged(accepted, "1", works=False)
        self.assert_owed()
        await self.acknowledged(accepted, "1")
        self.assert_owed()

    def test_vanished(self) -> None:
        """It came, was never acknowledged, and is not there any more."""
        (accepted,) = self.posted(202)
        self.ledger.came(accepted, "1")
        self.assert_owed(vanished=1)

    async def test_left(self) -> None:
        """It was acknowledged, and is still there."""
        (accepted,) = self.posted(202)
        await self.acknowledged(accepted, "1")
        self.assert_owed(left=1)


class CounterTests(TestCase):
    """One account, two DIDs, three messages for one of them; and whatever is said of them."""

    def setUp(self) -> None:
        self.account = {"_id": 1, "did": "did:x:account", "recipients": 1}
        self.busy = {"_id": 2, "did": "did:x:busy", "account": 1, "registered": 0}
        self.busy |= {"messages": 3, "bytes": 60, "waited_for": True}
        self.idle = {"_id": 3, "did": "did:x:idle", "account": 1, "messages": 0, "bytes": 0}
        self.messages = [{"recipient": 2, "size": size} for size in (10, 20, 30)]

    def differences(self) -> list[str]:
        """Between all that."""
        return describe_miscounts([self.account], [self.busy, self.idle], self.messages)

    def test_right(self) -> None:
        """Nothing is wrong."""
        self.assertEqual(self.differences(), [])

    def test_wrong(self) -> None:
        """Whichever it is."""
        for document, name, value in (
            (self.account, "recipients", 2),
            (self.busy, "messages", 2),
            (self.busy, "bytes", 61),
            (self.busy, "waited_for", False),
            (self.idle, "messages", -1),
            (self.idle, "bytes", 1),
            (self.idle, "waited_for", True),
        ):
            with self.subTest(name=name, value=value):
                right = document.get(name, False)
                document[name] = value
                self.assertEqual(len(self.differences()), 1)
                document[name] = right

    def test_of_nobody(self) -> None:
        """A message whose recipient is not there."""
        self.messages.append({"recipient": 4, "size": 10})
        self.assertEqual(self.differences(), ["messages of no recipient: 1"])

    def test_unaccounted(self) -> None:
        """Of either protocol, what the ledger does not know or knows twice; its pages are added up."""
        pages = [
            {"_id": "a", "didcomm": {"accepted": 9, "evicted": 1, "expired": 1}, "decentrl": {"accepted": 2}},
            {"_id": "b", "didcomm": {"accepted": 1, "acknowledged": 2, "withdrawn": 1}, "decentrl": {"removed": 2}},
        ]
        for didcomm, decentrl, wrong in ((5, 0, 0), (4, 0, 1), (6, 0, 1), (5, 1, 1), (0, 9, 2)):
            found = describe_ledger_gaps(pages, {"didcomm": didcomm, "decentrl": decentrl})
            self.assertEqual(len(found), wrong, f"{didcomm} {decentrl}")
