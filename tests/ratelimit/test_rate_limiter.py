"""Rate limits in one process: exact and synchronous."""

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

    def is_admitted(self, charge: Coroutine[Deferred[Any], Any, None]) -> bool:
        """Whether it is admitted, synchronously."""
        try:
            charge.send(None)
        except StopIteration:
            return True
        except RateLimitExceeded:
            return False
        self.fail("it waits")

    def count_admitted(self, *charges: Coroutine[Deferred[Any], Any, None]) -> int:
        """Number of admitted charges."""
        return sum([self.is_admitted(charge) for charge in charges])

    def test_each_limit_is_exact(self) -> None:
        """Exactly the limit in a minute, and the next one a minute after the first."""
        charge = self.admission
        self.assertEqual(self.count_admitted(*(charge.charge_sender(ALICE, None, PEER) for _ in range(9))), 3)
        self.assertEqual(self.count_admitted(*(charge.charge_anonymous(PEER) for _ in range(9))), 4)
        self.assertEqual(self.count_admitted(*(charge.charge_account(ALICE, PEER) for _ in range(9))), 5)
        self.assertEqual(self.count_admitted(*(charge.charge_public_read(PEER) for _ in range(9))), 5)
        self.assertEqual(self.count_admitted(*(charge.charge_command(PEER, 100) for _ in range(99))), 50)
        self.assertEqual(
            {(bucket, wait) for bucket, _, _, wait in self.refusals}, {("did", 60), ("ip", 60), ("account", 60)}
        )
        self.clock.advance(60)
        self.assertEqual(self.count_admitted(*(charge.charge_sender(ALICE, None, PEER) for _ in range(9))), 3)

    def test_did_web_lookups(self) -> None:
        """Ten did:web documents per minute and address."""
        waits = [
            self.successResultOf(Deferred.fromCoroutine(self.admission.charge_did_lookup(PEER))) for _ in range(11)
        ]
        self.assertEqual(waits, [0] * 10 + [60])

    def test_claimed_sender_is_limited_per_address(self) -> None:
        """A claimed sender is limited per address; without a claim there is no sender limit."""
        charge = self.admission
        self.assertEqual(self.count_admitted(*(charge.charge_sender(None, ALICE, PEER) for _ in range(9))), 3)
        self.assertEqual(self.count_admitted(*(charge.charge_sender(None, ALICE, OTHER) for _ in range(9))), 3)
        self.assertEqual(self.count_admitted(*(charge.charge_sender(None, None, PEER) for _ in range(9))), 9)

    def test_zero_cost_is_free(self) -> None:
        """A charge of zero is admitted."""
        self.assertEqual(self.count_admitted(*(self.admission.charge_anonymous(PEER) for _ in range(4))), 4)
        self.assertTrue(self.is_admitted(self.admission.charge_anonymous(PEER, 0)))

    def test_refunded_charge(self) -> None:
        """A refunded charge does not count."""
        for _ in range(20):
            self.assertTrue(self.is_admitted(self.admission.charge_sender(ALICE, None, PEER)))
            self.admission.refund(ALICE, PEER, outgoing=True)
            self.assertTrue(self.is_admitted(self.admission.charge_account(ALICE, PEER, cost=4)))
            self.admission.refund(ALICE, PEER, outgoing=False, cost=4)

    def test_failed_reads(self) -> None:
        """The address is refused before reading, except for small bodies, until that has failed as often."""
        read = 0
        while self.is_admitted(self.admission.check_before_read(PEER, SMALL_REQUEST_BYTES + 1)):
            self.admission.charge_failure(PEER)
            read += 1
        self.assertEqual(read, 4)
        while self.is_admitted(self.admission.check_before_read(PEER, SMALL_REQUEST_BYTES)):
            self.admission.charge_failure(PEER)
            read += 1
        self.assertEqual(read, 8)
        self.assertTrue(self.is_admitted(self.admission.check_before_read(OTHER, SMALL_REQUEST_BYTES + 1)))

    def test_large_failed_reads(self) -> None:
        """Larger bodies cost more, as far as the address has quota."""
        self.admission.charge_failure(PEER, 2 * SMALL_REQUEST_BYTES)
        self.assertEqual(self.count_admitted(*(self.admission.charge_anonymous(PEER) for _ in range(9))), 1)
        self.admission.charge_failure(OTHER, 100 * SMALL_REQUEST_BYTES)
        self.assertFalse(self.is_admitted(self.admission.charge_anonymous(OTHER)))

    def test_check_does_not_charge(self) -> None:
        """Only unauthenticated envelopes are refused before decryption."""
        for _ in range(100):
            self.admission.check_allowance(ALICE, PEER)
            self.admission.check_allowance(None, PEER)
            self.admission.check_before_decryption(PEER, authenticated=False)
        self.count_admitted(*(self.admission.charge_anonymous(PEER) for _ in range(4)))
        self.admission.check_before_decryption(PEER, authenticated=True)
        for check in (
            lambda: self.admission.check_before_decryption(PEER, authenticated=False),
            lambda: self.admission.check_allowance(None, PEER),
        ):
            self.assertRaises(RateLimitExceeded, check)
