"""Limits in one process: exact, and free of waiting."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import RateLimitExceeded
from mediatord.ratelimit.rate_limiter import SMALL_REQUEST_BYTES, RateLimiter, RateLimits

ALICE = "did:example:alice"
PEER = "192.0.2.1"
OTHER = "192.0.2.2"


class RateLimiterTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(1_800_000_000)
        self.refusals: list[tuple[str, str, str, int]] = []
        self.admission = RateLimiter(
            self.clock,
            lambda *refusal: self.refusals.append(refusal),
            RateLimits(did=3, ip=4, account=5),
        )

    def passes(self, charge: Coroutine[Deferred[Any], Any, None]) -> bool:
        """Whether it is admitted, without waiting for anything."""
        try:
            charge.send(None)
        except StopIteration:
            return True
        except RateLimitExceeded:
            return False
        self.fail("it waits")

    def admitted(self, *charges: Coroutine[Deferred[Any], Any, None]) -> int:
        """How many of them are."""
        return sum([self.passes(charge) for charge in charges])

    def test_each_its_limit(self) -> None:
        """Exactly so many in a minute, and the next one a minute after the first."""
        charge = self.admission
        self.assertEqual(self.admitted(*(charge.charge_sender(ALICE, None, PEER) for _ in range(9))), 3)
        self.assertEqual(self.admitted(*(charge.charge_anonymous(PEER) for _ in range(9))), 4)
        self.assertEqual(self.admitted(*(charge.charge_account(ALICE, PEER) for _ in range(9))), 5)
        self.assertEqual(self.admitted(*(charge.charge_public_read(PEER) for _ in range(9))), 5)
        self.assertEqual(self.admitted(*(charge.charge_command(PEER, 100) for _ in range(99))), 50)
        self.assertEqual(
            {(bucket, wait) for bucket, _, _, wait in self.refusals}, {("did", 60), ("ip", 60), ("account", 60)}
        )
        self.clock.advance(60)
        self.assertEqual(self.admitted(*(charge.charge_sender(ALICE, None, PEER) for _ in range(9))), 3)

    def test_lookups(self) -> None:
        """Ten documents of did:web in a minute and address."""
        waits = [
            self.successResultOf(Deferred.fromCoroutine(self.admission.charge_did_lookup(PEER))) for _ in range(11)
        ]
        self.assertEqual(waits, [0] * 10 + [60])

    def test_a_claimed_sender(self) -> None:
        """It is limited for each address by itself, and nobody is where nobody is claimed."""
        charge = self.admission
        self.assertEqual(self.admitted(*(charge.charge_sender(None, ALICE, PEER) for _ in range(9))), 3)
        self.assertEqual(self.admitted(*(charge.charge_sender(None, ALICE, OTHER) for _ in range(9))), 3)
        self.assertEqual(self.admitted(*(charge.charge_sender(None, None, PEER) for _ in range(9))), 9)

    def test_nothing_costs_nothing(self) -> None:
        """A charge of none is no question."""
        self.assertEqual(self.admitted(*(self.admission.charge_anonymous(PEER) for _ in range(4))), 4)
        self.assertTrue(self.passes(self.admission.charge_anonymous(PEER, 0)))

    def test_given_back(self) -> None:
        """A charge that is undone was none."""
        for _ in range(20):
            self.assertTrue(self.passes(self.admission.charge_sender(ALICE, None, PEER)))
            self.admission.refund(ALICE, PEER, outgoing=True)
            self.assertTrue(self.passes(self.admission.charge_account(ALICE, PEER, cost=4)))
            self.admission.refund(ALICE, PEER, outgoing=False, cost=4)

    def test_in_vain(self) -> None:
        """A used-up address is not read, but for what is small, until that was in vain as often as well."""
        read = 0
        while self.passes(self.admission.check_before_read(PEER, SMALL_REQUEST_BYTES + 1)):
            self.admission.charge_failure(PEER)
            read += 1
        self.assertEqual(read, 4)
        while self.passes(self.admission.check_before_read(PEER, SMALL_REQUEST_BYTES)):
            self.admission.charge_failure(PEER)
            read += 1
        self.assertEqual(read, 8)
        self.assertTrue(self.passes(self.admission.check_before_read(OTHER, SMALL_REQUEST_BYTES + 1)))

    def test_large_and_in_vain(self) -> None:
        """What is larger costs more, as far as the address has it."""
        self.admission.charge_failure(PEER, 2 * SMALL_REQUEST_BYTES)
        self.assertEqual(self.admitted(*(self.admission.charge_anonymous(PEER) for _ in range(9))), 1)
        self.admission.charge_failure(OTHER, 100 * SMALL_REQUEST_BYTES)
        self.assertFalse(self.passes(self.admission.charge_anonymous(OTHER)))

    def test_asking_costs_nothing(self) -> None:
        """Only what is not authenticated is refused before it is opened."""
        for _ in range(100):
            self.admission.check_allowance(ALICE, PEER)
            self.admission.check_allowance(None, PEER)
            self.admission.check_before_decryption(PEER, authenticated=False)
        self.admitted(*(self.admission.charge_anonymous(PEER) for _ in range(4)))
        self.admission.check_before_decryption(PEER, authenticated=True)
        for ask in (
            lambda: self.admission.check_before_decryption(PEER, authenticated=False),
            lambda: self.admission.check_allowance(None, PEER),
        ):
            self.assertRaises(RateLimitExceeded, ask)
