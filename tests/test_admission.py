"""Limits in one process: exact, and free of waiting."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.admission import SMALL, Admission
from mediatord.errors import RateLimited

ALICE = "did:example:alice"
PEER = "192.0.2.1"
OTHER = "192.0.2.2"


class AdmissionTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(1_800_000_000)
        self.refusals: list[tuple[str, str, str, int]] = []
        self.admission = Admission(
            self.clock,
            lambda *refusal: self.refusals.append(refusal),
            did_per_minute=3,
            ip_per_minute=4,
            account_per_minute=5,
        )

    def passes(self, charge: Coroutine[Deferred[Any], Any, None]) -> bool:
        """Whether it is admitted, without waiting for anything."""
        try:
            charge.send(None)
        except StopIteration:
            return True
        except RateLimited:
            return False
        self.fail("it waits")

    def admitted(self, *charges: Coroutine[Deferred[Any], Any, None]) -> int:
        """How many of them are."""
        return sum([self.passes(charge) for charge in charges])

    def test_each_its_limit(self) -> None:
        """Exactly so many in a minute, and the next one a minute after the first."""
        charge = self.admission
        self.assertEqual(self.admitted(*(charge.sender(ALICE, None, PEER) for _ in range(9))), 3)
        self.assertEqual(self.admitted(*(charge.stranger(PEER) for _ in range(9))), 4)
        self.assertEqual(self.admitted(*(charge.account(ALICE, PEER) for _ in range(9))), 5)
        self.assertEqual(self.admitted(*(charge.reader(PEER) for _ in range(9))), 5)
        self.assertEqual(self.admitted(*(charge.command(PEER, 100) for _ in range(99))), 50)
        self.assertEqual(
            {(bucket, wait) for bucket, _, _, wait in self.refusals}, {("did", 60), ("ip", 60), ("account", 60)}
        )
        self.clock.advance(60)
        self.assertEqual(self.admitted(*(charge.sender(ALICE, None, PEER) for _ in range(9))), 3)

    def test_lookups(self) -> None:
        """Ten documents of did:web in a minute and address."""
        waits = [self.successResultOf(Deferred.fromCoroutine(self.admission.lookup(PEER))) for _ in range(11)]
        self.assertEqual(waits, [0] * 10 + [60])

    def test_a_claimed_sender(self) -> None:
        """It is limited for each address by itself, and nobody is where nobody is claimed."""
        charge = self.admission
        self.assertEqual(self.admitted(*(charge.sender(None, ALICE, PEER) for _ in range(9))), 3)
        self.assertEqual(self.admitted(*(charge.sender(None, ALICE, OTHER) for _ in range(9))), 3)
        self.assertEqual(self.admitted(*(charge.sender(None, None, PEER) for _ in range(9))), 9)

    def test_nothing_costs_nothing(self) -> None:
        """A charge of none is no question."""
        self.assertEqual(self.admitted(*(self.admission.stranger(PEER) for _ in range(4))), 4)
        self.assertTrue(self.passes(self.admission.stranger(PEER, 0)))

    def test_given_back(self) -> None:
        """A charge that is undone was none."""
        for _ in range(20):
            self.assertTrue(self.passes(self.admission.sender(ALICE, None, PEER)))
            self.admission.give_back(ALICE, PEER, outgoing=True)
            self.assertTrue(self.passes(self.admission.account(ALICE, PEER, cost=4)))
            self.admission.give_back(ALICE, PEER, outgoing=False, cost=4)

    def test_in_vain(self) -> None:
        """A used-up address is not read, but for what is small, until that was in vain as often as well."""
        read = 0
        while self.passes(self.admission.before_reading(PEER, SMALL + 1)):
            self.admission.in_vain(PEER)
            read += 1
        self.assertEqual(read, 4)
        while self.passes(self.admission.before_reading(PEER, SMALL)):
            self.admission.in_vain(PEER)
            read += 1
        self.assertEqual(read, 8)
        self.assertTrue(self.passes(self.admission.before_reading(OTHER, SMALL + 1)))

    def test_large_and_in_vain(self) -> None:
        """What is larger costs more, as far as the address has it."""
        self.admission.in_vain(PEER, 2 * SMALL)
        self.assertEqual(self.admitted(*(self.admission.stranger(PEER) for _ in range(9))), 1)
        self.admission.in_vain(OTHER, 100 * SMALL)
        self.assertFalse(self.passes(self.admission.stranger(OTHER)))

    def test_asking_costs_nothing(self) -> None:
        """Only what is not authenticated is refused before it is opened."""
        for _ in range(100):
            self.admission.has_allowance(ALICE, PEER)
            self.admission.has_allowance(None, PEER)
            self.admission.before_opening(PEER, authenticated=False)
        self.admitted(*(self.admission.stranger(PEER) for _ in range(4)))
        self.admission.before_opening(PEER, authenticated=True)
        for ask in (
            lambda: self.admission.before_opening(PEER, authenticated=False),
            lambda: self.admission.has_allowance(None, PEER),
        ):
            self.assertRaises(RateLimited, ask)
