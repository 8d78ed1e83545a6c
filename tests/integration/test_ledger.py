"""The books of the kill tests: whatever goes wrong is in them."""

from __future__ import annotations

from collections.abc import Iterable

from twisted.trial.unittest import TestCase

from mediatord.wallet.mediation import Delivered
from tests.integration.ledger import Balance, ClusterLedger
from tests.integration.traffic import Post


class Way:
    """Acknowledges, unless it is out of order."""

    def __init__(self, works: bool = True) -> None:
        self._works = works

    async def acknowledge(self, ids: Iterable[str | Delivered]) -> None:
        """:raise ConnectionError: it does not work."""
        if not self._works:
            raise ConnectionError


class LedgerTests(TestCase):
    """One letter, x, and what may become of it."""

    def setUp(self) -> None:
        self.ledger = ClusterLedger()
        self.ledger.due(["x"])

    def posted(self, *statuses: int | None) -> None:
        """Attempts with these outcomes."""
        for status in statuses:
            self.ledger.posted(Post("x", 0.0, status))

    async def acknowledged(self, *ids: str, works: bool = True) -> None:
        """These came, and were acknowledged."""
        for id_ in ids:
            self.ledger.came("x", id_)
        await self.ledger.acknowledge(Way(works), [Delivered(id_, b"", "json") for id_ in ids])

    def assert_owed(self, **owed: int) -> Balance:
        """Of what has to be zero, only these are not."""
        balance = self.ledger.balance(owed.get("left", 0))
        names = ("unsent", "lost", "doubled", "returned", "vanished", "left")
        self.assertEqual({name: getattr(balance, name) for name in names if getattr(balance, name)}, owed)
        self.assertEqual(balance.owed, sum(owed.values()))
        return balance

    async def test_all_is_well(self) -> None:
        """Refused and cut off a few times, then accepted; it came once."""
        self.posted(503, None, 503, 202)
        await self.acknowledged("1")
        balance = self.assert_owed()
        self.assertEqual((balance.posts, balance.accepted, balance.refused, balance.cut), (4, 1, 2, 1))
        self.assertEqual((balance.repeated, balance.doubtful), (0, 0))

    def test_never_accepted(self) -> None:
        """Nobody got it, which is no wonder."""
        self.posted(503, 429)
        self.assert_owed(unsent=1)

    def test_lost(self) -> None:
        """It was accepted, and never came."""
        self.posted(202)
        self.assert_owed(lost=1)

    async def test_cut_off(self) -> None:
        """Two came of one that was accepted and one of which nobody knows."""
        self.posted(None, 202)
        await self.acknowledged("1", "2")
        self.assertEqual(self.assert_owed().repeated, 1)

    async def test_doubtful(self) -> None:
        """One of two was said to be refused."""
        self.posted(503, 202)
        await self.acknowledged("1", "2")
        self.assertEqual(self.assert_owed().doubtful, 1)

    async def test_doubled(self) -> None:
        """More came than were ever sent."""
        self.posted(503, None, 202)
        await self.acknowledged("1", "2", "3", "4")
        balance = self.assert_owed(doubled=1)
        self.assertEqual((balance.repeated, balance.doubtful), (1, 1))

    async def test_returned(self) -> None:
        """It came again after its acknowledgement was answered."""
        self.posted(202)
        await self.acknowledged("1")
        self.ledger.came("x", "1")
        self.assert_owed(returned=1)

    async def test_an_acknowledgement_that_was_not_answered(self) -> None:
        """It may come again then, or not."""
        self.posted(202)
        with self.assertRaises(ConnectionError):
            await self.acknowledged("1", works=False)
        self.assert_owed()
        await self.acknowledged("1")
        self.assert_owed()

    def test_vanished(self) -> None:
        """It came, was never acknowledged, and is not there any more."""
        self.posted(202)
        self.ledger.came("x", "1")
        self.assert_owed(vanished=1)

    async def test_left(self) -> None:
        """It was acknowledged, and is still there."""
        self.posted(202)
        await self.acknowledged("1")
        self.assert_owed(left=1)
