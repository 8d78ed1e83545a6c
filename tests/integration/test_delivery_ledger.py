"""The delivery ledger and the counter checks of the kill tests report every discrepancy."""

from __future__ import annotations

from collections.abc import Iterable

from twisted.trial.unittest import TestCase

from mediatord.wallet.didcomm_client import DeliveredMessage
from tests.integration.database_counters import describe_ledger_gaps, describe_miscounts
from tests.integration.delivery_ledger import DeliveryLedger, LedgerBalance
from tests.integration.message_load import SendAttempt


class FaultyAcknowledger:
    """Acknowledges, or fails."""

    def __init__(self, works: bool = True) -> None:
        self._works = works

    async def acknowledge(self, ids: Iterable[str | DeliveredMessage]) -> None:
        """:raise ConnectionError: it is set to fail."""
        if not self._works:
            raise ConnectionError


class LedgerTests(TestCase):
    """One message, x, and its possible outcomes."""

    def setUp(self) -> None:
        self.ledger = DeliveryLedger()
        self.ledger.expect(["x"])

    def record_attempts(self, *statuses: int | None) -> list[str]:
        """Record attempts with these statuses; return their markers."""
        markers = [self.ledger.begin_attempt("x") for _ in statuses]
        for marker, status in zip(markers, statuses, strict=True):
            self.ledger.record_attempt(SendAttempt(marker, 0.0, status))
        return markers

    async def deliver_and_acknowledge(self, marker: str, *ids: str, works: bool = True) -> None:
        """Record these deliveries of an attempt, and their acknowledgement."""
        for id_ in ids:
            self.ledger.record_delivery(marker, id_)
        await self.ledger.acknowledge(FaultyAcknowledger(works), [DeliveredMessage(id_, b"", "json") for id_ in ids])

    def assert_discrepancies(self, **expected: int) -> LedgerBalance:
        """Of the numbers that must be zero, only these are not."""
        balance = self.ledger.balance(expected.get("left", 0))
        names = ("unsent", "lost", "doubled", "returned", "vanished", "left")
        self.assertEqual({name: getattr(balance, name) for name in names if getattr(balance, name)}, expected)
        self.assertEqual(balance.discrepancy, sum(expected.values()))
        return balance

    async def test_no_discrepancy_after_retries(self) -> None:
        """Refused, broken, then accepted; delivered once."""
        *_, accepted = self.record_attempts(503, None, 503, 202)
        await self.deliver_and_acknowledge(accepted, "1")
        balance = self.assert_discrepancies()
        self.assertEqual((balance.posts, balance.accepted, balance.refused, balance.cut), (4, 1, 2, 1))
        self.assertEqual((balance.repeated, balance.doubtful), (0, 0))

    def test_message_never_accepted_is_unsent(self) -> None:
        """No attempt was accepted."""
        self.record_attempts(503, 429)
        self.assert_discrepancies(unsent=1)

    async def test_accepted_but_undelivered_message_is_lost(self) -> None:
        """It was accepted and never delivered."""
        (accepted,) = self.record_attempts(202)
        self.assertEqual(self.ledger.undelivered(), {accepted})
        self.assert_discrepancies(lost=1)
        await self.deliver_and_acknowledge(accepted, "1")
        self.assertEqual(self.ledger.undelivered(), set())

    async def test_other_attempt_does_not_replace_lost_one(self) -> None:
        """The delivery of a refused or broken attempt does not make up for an accepted one."""
        for first, counted in ((503, "doubtful"), (None, "repeated")):
            self.setUp()
            earlier, accepted = self.record_attempts(first, 202)
            await self.deliver_and_acknowledge(earlier, "1")
            self.assertEqual(self.ledger.undelivered(), {accepted})
            self.assertEqual(getattr(self.assert_discrepancies(lost=1), counted), 1)

    async def test_delivery_of_broken_attempt_is_permitted(self) -> None:
        """Besides that of the accepted one."""
        cut, accepted = self.record_attempts(None, 202)
        await self.deliver_and_acknowledge(cut, "1")
        await self.deliver_and_acknowledge(accepted, "2")
        self.assertEqual(self.assert_discrepancies().repeated, 1)

    async def test_delivery_of_refused_attempt_is_doubtful(self) -> None:
        """Besides that of the accepted one."""
        refused, accepted = self.record_attempts(503, 202)
        await self.deliver_and_acknowledge(refused, "1")
        await self.deliver_and_acknowledge(accepted, "2")
        self.assertEqual(self.assert_discrepancies().doubtful, 1)

    async def test_second_delivery_of_attempt_is_doubled(self) -> None:
        """Whatever the outcome of the attempt."""
        for marker in self.record_attempts(503, None, 202):
            await self.deliver_and_acknowledge(marker, marker, f"{marker} again")
        balance = self.assert_discrepancies(doubled=3)
        self.assertEqual((balance.repeated, balance.doubtful), (1, 1))

    async def test_delivery_without_attempt_is_doubled(self) -> None:
        """More deliveries than attempts, or one of a permanently refused attempt."""
        limited, accepted = self.record_attempts(429, 202)
        for marker in (limited, accepted, self.ledger.begin_attempt("x")):
            await self.deliver_and_acknowledge(marker, marker)
        self.assert_discrepancies(doubled=2)

    async def test_delivery_after_acknowledgement_is_returned(self) -> None:
        """After the acknowledgement was answered."""
        (accepted,) = self.record_attempts(202)
        await self.deliver_and_acknowledge(accepted, "1")
        self.ledger.record_delivery(accepted, "1")
        self.assert_discrepancies(returned=1)

    async def test_delivery_after_broken_acknowledgement_is_permitted(self) -> None:
        """It may be delivered again, or not."""
        (accepted,) = self.record_attempts(202)
        with self.assertRaises(ConnectionError):
            await self.deliver_and_acknowledge(accepted, "1", works=False)
        self.assert_discrepancies()
        await self.deliver_and_acknowledge(accepted, "1")
        self.assert_discrepancies()

    def test_missing_unacknowledged_message_is_vanished(self) -> None:
        """It was delivered, never acknowledged, and is not stored."""
        (accepted,) = self.record_attempts(202)
        self.ledger.record_delivery(accepted, "1")
        self.assert_discrepancies(vanished=1)

    async def test_acknowledged_but_stored_message_is_left(self) -> None:
        """It was acknowledged and is still stored."""
        (accepted,) = self.record_attempts(202)
        await self.deliver_and_acknowledge(accepted, "1")
        self.assert_discrepancies(left=1)


class CounterTests(TestCase):
    """One account, two DIDs, three messages for one of them, and their counters."""

    def setUp(self) -> None:
        self.account = {"_id": 1, "did": "did:x:account", "recipients": 1}
        self.busy = {"_id": 2, "did": "did:x:busy", "account": 1, "registered": 0}
        self.busy |= {"messages": 3, "bytes": 60, "waited_for": True}
        self.idle = {"_id": 3, "did": "did:x:idle", "account": 1, "messages": 0, "bytes": 0}
        self.messages = [{"recipient": 2, "size": size} for size in (10, 20, 30)]

    def describe_miscounts(self) -> list[str]:
        """Lines about wrong counters."""
        return describe_miscounts([self.account], [self.busy, self.idle], self.messages)

    def test_reports_nothing_if_counters_match(self) -> None:
        """All counters match."""
        self.assertEqual(self.describe_miscounts(), [])

    def test_reports_every_wrong_counter(self) -> None:
        """Each counter in turn."""
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
                self.assertEqual(len(self.describe_miscounts()), 1)
                document[name] = right

    def test_reports_messages_without_recipient(self) -> None:
        """A message whose recipient does not exist."""
        self.messages.append({"recipient": 4, "size": 10})
        self.assertEqual(self.describe_miscounts(), ["messages of no recipient: 1"])

    def test_reports_ledger_gaps(self) -> None:
        """For both protocols; pages of the ledger are added up."""
        pages = [
            {"_id": "a", "didcomm": {"accepted": 9, "evicted": 1, "expired": 1}, "decentrl": {"accepted": 2}},
            {"_id": "b", "didcomm": {"accepted": 1, "acknowledged": 2, "withdrawn": 1}, "decentrl": {"removed": 2}},
        ]
        for didcomm, decentrl, wrong in ((5, 0, 0), (4, 0, 1), (6, 0, 1), (5, 1, 1), (0, 9, 2)):
            found = describe_ledger_gaps(pages, {"didcomm": didcomm, "decentrl": decentrl})
            self.assertEqual(len(found), wrong, f"{didcomm} {decentrl}")
