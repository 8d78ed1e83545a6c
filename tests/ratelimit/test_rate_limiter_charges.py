"""Charges: what is reported and logged, what is free, and what is decided locally."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import RateLimitExceeded
from mediatord.protocol.probe_markers import PROBE_CLIENT
from mediatord.ratelimit.distributed_limiter import DistributedLimiter
from mediatord.ratelimit.rate_limiter import SMALL_REQUEST_BYTES, RateLimiter, RateLimits
from tests.ratelimit.rate_limiter_processes import DID, NOW, PEER, LimiterProcesses

OTHER = "192.0.2.2"
LIMIT = 3

Charge = Callable[[], Coroutine[Deferred[Any], Any, None] | None]


class _ChargeTestCase(SynchronousTestCase):
    limits = RateLimits(LIMIT, LIMIT, LIMIT)

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.refusals: list[tuple[str, str, str, int]] = []
        self.admission = RateLimiter(
            self.clock,
            lambda *refusal: self.refusals.append(refusal),
            self.limits,
        )

    def read_wait(self, charge: Charge) -> int:
        """Reported waiting time; 0 if admitted."""
        try:
            charged = charge()
            if charged is not None:
                charged.send(None)
                self.fail("it waits")
        except RateLimitExceeded as error:
            return int(error.retry_after or 0)
        except StopIteration:
            pass
        return 0

    def count_admitted(self, charge: Charge) -> int:
        """Number of admissions, of more than are ever admitted here."""
        return sum(not self.read_wait(charge) for _ in range(100))


class RefusalReportTests(_ChargeTestCase):
    """The limit and its key go to the log, the waiting time to the client."""

    def read_refusal(self, charge: Charge) -> tuple[str, str, str, int]:
        """What is logged and returned for the first refusal, 20 seconds after the first admission."""
        self.read_wait(charge)
        self.clock.advance(20)
        while not (wait := self.read_wait(charge)):
            pass
        self.assertEqual(wait, self.refusals[0][-1])
        return self.refusals[0]

    def test_proven_sender(self) -> None:
        """Its DID is logged."""
        self.assertEqual(
            self.read_refusal(lambda: self.admission.charge_sender(DID, None, PEER)), ("did", DID, PEER, 40)
        )

    def test_claimed_sender(self) -> None:
        """The address is logged: a claim is not proof."""
        self.assertEqual(
            self.read_refusal(lambda: self.admission.charge_sender(None, DID, PEER)), ("did", PEER, PEER, 40)
        )

    def test_account(self) -> None:
        """Its DID is logged, also for a check."""
        self.assertEqual(
            self.read_refusal(lambda: self.admission.charge_account(DID, PEER)), ("account", DID, PEER, 40)
        )
        self.assertEqual(self.read_wait(lambda: self.admission.check_allowance(DID, OTHER)), 40)
        self.assertEqual(self.refusals[-1], ("account", DID, OTHER, 40))

    def test_address(self) -> None:
        """The address is logged, also for a check."""
        self.assertEqual(self.read_refusal(lambda: self.admission.charge_anonymous(PEER)), ("ip", PEER, PEER, 40))
        checks: tuple[Charge, ...] = (
            lambda: self.admission.check_allowance(None, PEER),
            lambda: self.admission.check_before_decryption(PEER, authenticated=False),
            lambda: self.admission.check_before_read(PEER, SMALL_REQUEST_BYTES + 1),
        )
        for check in checks:
            self.assertEqual((self.read_wait(check), self.refusals.pop()), (40, ("ip", PEER, PEER, 40)))

    def test_reader(self) -> None:
        """The address is logged."""
        self.assertEqual(
            self.read_refusal(lambda: self.admission.charge_public_read(PEER)), ("account", PEER, PEER, 40)
        )

    def test_commands(self) -> None:
        """The address is logged."""
        self.assertEqual(
            self.read_refusal(lambda: self.admission.charge_command(PEER, 1)), ("account", PEER, PEER, 40)
        )


class UnchargedTests(_ChargeTestCase):
    """Free requests."""

    limits = RateLimits(LIMIT, LIMIT, LIMIT, frozenset({OTHER}), 5)

    def test_daemon_itself(self) -> None:
        """Requests of the daemon to itself are neither charged nor refused."""
        charges: tuple[Charge, ...] = (
            lambda: self.admission.charge_sender(DID, None, PROBE_CLIENT),
            lambda: self.admission.charge_anonymous(PROBE_CLIENT),
            lambda: self.admission.charge_account(DID, PROBE_CLIENT),
            lambda: self.admission.check_before_read(PROBE_CLIENT, 100 * SMALL_REQUEST_BYTES),
            lambda: self.admission.charge_failure(PROBE_CLIENT, 100 * SMALL_REQUEST_BYTES),
            lambda: self.admission.check_before_decryption(PROBE_CLIENT, authenticated=False),
            lambda: self.admission.check_allowance(None, PROBE_CLIENT),
        )
        for charge in charges:
            self.assertEqual(self.count_admitted(charge), 100)
        self.assertTrue(all(self.admission.try_charge_anonymous(PROBE_CLIENT) for _ in range(100)))
        self.assertEqual(len(self.admission), 0)

    def test_trusted_peer(self) -> None:
        """Its address has a larger limit and its senders are free; accounts are not."""
        for peer, most in ((PEER, LIMIT), (OTHER, 5)):
            self.assertEqual(self.count_admitted(lambda peer=peer: self.admission.charge_anonymous(peer)), most)  # type: ignore[misc]
            self.assertEqual(self.count_admitted(lambda peer=peer: self.admission.charge_public_read(peer)), most)  # type: ignore[misc]
        self.assertEqual(
            self.count_admitted(lambda: self.admission.check_before_decryption(OTHER, authenticated=False)), 0
        )
        self.assertEqual(self.count_admitted(lambda: self.admission.charge_sender(DID, None, OTHER)), 100)
        self.admission.refund(DID, OTHER, outgoing=True)
        self.assertEqual(self.count_admitted(lambda: self.admission.charge_sender(DID, None, PEER)), LIMIT)
        self.admission.refund(DID, OTHER, outgoing=True)
        self.assertEqual(self.count_admitted(lambda: self.admission.charge_sender(DID, None, PEER)), 0)
        self.assertEqual(self.count_admitted(lambda: self.admission.charge_account(DID, OTHER)), LIMIT)

    def test_check_of_trusted_peer(self) -> None:
        """It is refused beyond its own limit, not beyond the default."""
        for _ in range(5):
            self.assertEqual(self.read_wait(lambda: self.admission.check_allowance(None, OTHER)), 0)
            self.assertEqual(self.read_wait(lambda: self.admission.charge_anonymous(OTHER)), 0)
        self.assertEqual(self.read_wait(lambda: self.admission.check_allowance(None, OTHER)), 60)

    def test_commands_of_trusted_peer(self) -> None:
        """It has as many commands as other requests, if that is more than the default."""
        self.admission.set_limits(RateLimits(LIMIT, LIMIT, LIMIT, frozenset({OTHER}), 50))
        self.assertEqual(self.count_admitted(lambda: self.admission.charge_command(OTHER, 1)), 50)
        self.assertEqual(self.count_admitted(lambda: self.admission.charge_command(PEER, 1)), 10 * LIMIT)

    def test_trusted_peer_has_at_least_the_default(self) -> None:
        """A lower limit than the default does not apply."""
        self.assertEqual(self.limits.make_overrides(7), {OTHER: 7})

    def test_small_requests_are_limited(self) -> None:
        """Small requests of a used-up address are read up to the limit of an account."""
        self.assertEqual(self.count_admitted(lambda: self.admission.charge_anonymous(PEER)), LIMIT)
        self.assertEqual(
            self.count_admitted(lambda: self.admission.check_before_read(PEER, SMALL_REQUEST_BYTES)), LIMIT
        )
        self.assertEqual(
            self.count_admitted(lambda: self.admission.check_before_read(PEER, SMALL_REQUEST_BYTES + 1)), 0
        )

    def test_cost_of_a_command(self) -> None:
        """One, and one more for each 64 KiB; the limit is ten times an account's."""
        self.assertEqual(
            self.count_admitted(lambda: self.admission.charge_command(PEER, 2 * SMALL_REQUEST_BYTES)), 10 * LIMIT // 3
        )


class LocalDecisionTests(SynchronousTestCase):
    """Decisions of a process without the store."""

    def test_failed_reads_per_address(self) -> None:
        """Each address has its part of the limit and takes nothing from others."""
        processes = LimiterProcesses(30)
        processes.fail()
        admission = processes[0].admission
        for peer in (PEER, OTHER):
            read = 0
            while read < 100 and self.would_read(admission, peer):
                admission.charge_failure(peer)
                read += 1
            self.assertEqual(read, 10)

    def test_large_failed_reads(self) -> None:
        """They cost no more than this process's part: the rest is available with the store."""
        processes = LimiterProcesses(30)
        processes.fail()
        admission = processes[0].admission
        admission.charge_failure(PEER, 100 * SMALL_REQUEST_BYTES)
        processes.clock.advance(2)
        processes.cluster.away = None
        self.assertTrue(self.would_read(admission, PEER))

    def would_read(self, admission: RateLimiter, peer: str) -> bool:
        """Whether a large envelope would be read."""
        deferred = Deferred.fromCoroutine(admission.check_before_read(peer, SMALL_REQUEST_BYTES + 1))
        return deferred.addErrback(lambda failure: failure.trap(RateLimitExceeded) and True).result is None


class EvictedKeyTests(SynchronousTestCase):
    """Quota leases of evicted keys."""

    def test_last_unit_is_returned(self) -> None:
        """The lease is returned to the store, however small it is."""
        processes = LimiterProcesses(600, count=1)
        allowances = processes[0].allowances
        share = DistributedLimiter(processes.clock, allowances, "bucket", 600, max_keys=2)
        lease = allowances.lease_size(600)
        for who, cost in (("first", 1), ("first", lease - 2), ("second", 1), ("third", 1)):
            self.assertEqual(self.successResultOf(Deferred.fromCoroutine(share.take(who, cost))), 0)
        self.assertEqual(processes.cluster.put_backs, [(allowances.make_key("bucket", "first"), 1)])


class ImmediateChargeTests(SynchronousTestCase):
    """Synchronous charges of one payload."""

    def test_single_process(self) -> None:
        """Up to the limit; refused and refunded charges do not count."""
        admission = RateLimiter(Clock(), lambda *_: None, RateLimits(LIMIT, LIMIT, LIMIT))
        admission.try_charge_anonymous(PEER)
        admission.refund_anonymous(PEER)
        self.assertEqual([admission.try_charge_anonymous(PEER) for _ in range(5)], [True] * LIMIT + [False] * 2)
        admission.refund_anonymous(PEER)
        self.assertEqual([admission.try_charge_anonymous(PEER) for _ in range(2)], [True, False])

    def test_charges_held_lease(self) -> None:
        """With several processes: only from an existing lease, each unit once."""
        processes = LimiterProcesses(600, count=1)
        admission = processes[0].admission
        self.assertFalse(admission.try_charge_anonymous(PEER))
        self.assertEqual(processes.cluster.operations, 0)
        self.successResultOf(Deferred.fromCoroutine(admission.charge_anonymous(PEER)))
        ((_, lease),) = processes.cluster.uses
        self.assertGreater(lease, 2)
        self.assertEqual([admission.try_charge_anonymous(PEER) for _ in range(lease)], [True] * (lease - 1) + [False])
        self.assertEqual(processes.cluster.operations, 1)

    def test_does_not_overtake_waiting_requests(self) -> None:
        """While a request waits for the store no later one is admitted."""
        processes = LimiterProcesses(600, count=1)
        admission, cluster = processes[0].admission, processes.cluster
        self.successResultOf(Deferred.fromCoroutine(admission.charge_anonymous(PEER)))
        cluster.slow = True
        first = Deferred.fromCoroutine(admission.charge_anonymous(PEER, 200))
        self.assertFalse(admission.try_charge_anonymous(PEER))
        cluster.release()
        self.successResultOf(first)
