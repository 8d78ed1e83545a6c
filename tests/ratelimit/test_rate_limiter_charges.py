"""What each charge is told of, what is not charged, and what is charged without asking anybody."""

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


class _Case(SynchronousTestCase):
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

    def wait(self, charge: Charge) -> int:
        """What it says that somebody has to wait; 0 if it is admitted."""
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

    def admitted(self, charge: Charge) -> int:
        """How many are, of more than are ever admitted here."""
        return sum(not self.wait(charge) for _ in range(100))


class RefusalTests(_Case):
    """Whose limit it was, and where it came from, goes to the log; how long it takes, to whoever asked."""

    def refused(self, charge: Charge) -> tuple[str, str, str, int]:
        """What is said of the first refusal, and is also its answer, 20 seconds after the first was admitted."""
        self.wait(charge)
        self.clock.advance(20)
        while not (wait := self.wait(charge)):
            pass
        self.assertEqual(wait, self.refusals[0][-1])
        return self.refusals[0]

    def test_of_a_proven_sender(self) -> None:
        """Its DID."""
        self.assertEqual(self.refused(lambda: self.admission.charge_sender(DID, None, PEER)), ("did", DID, PEER, 40))

    def test_of_a_claimed_sender(self) -> None:
        """The address: a stranger's claim is not put down."""
        self.assertEqual(self.refused(lambda: self.admission.charge_sender(None, DID, PEER)), ("did", PEER, PEER, 40))

    def test_of_an_account(self) -> None:
        """Also where it is only asked."""
        self.assertEqual(self.refused(lambda: self.admission.charge_account(DID, PEER)), ("account", DID, PEER, 40))
        self.assertEqual(self.wait(lambda: self.admission.check_allowance(DID, OTHER)), 40)
        self.assertEqual(self.refusals[-1], ("account", DID, OTHER, 40))

    def test_of_an_address(self) -> None:
        """Also where it is only asked."""
        self.assertEqual(self.refused(lambda: self.admission.charge_anonymous(PEER)), ("ip", PEER, PEER, 40))
        asked: tuple[Charge, ...] = (
            lambda: self.admission.check_allowance(None, PEER),
            lambda: self.admission.check_before_decryption(PEER, authenticated=False),
            lambda: self.admission.check_before_read(PEER, SMALL_REQUEST_BYTES + 1),
        )
        for ask in asked:
            self.assertEqual((self.wait(ask), self.refusals.pop()), (40, ("ip", PEER, PEER, 40)))

    def test_of_a_reader(self) -> None:
        """The address."""
        self.assertEqual(self.refused(lambda: self.admission.charge_public_read(PEER)), ("account", PEER, PEER, 40))

    def test_of_commands(self) -> None:
        """The address."""
        self.assertEqual(self.refused(lambda: self.admission.charge_command(PEER, 1)), ("account", PEER, PEER, 40))


class UnchargedTests(_Case):
    """Who does not pay, and for what."""

    limits = RateLimits(LIMIT, LIMIT, LIMIT, frozenset({OTHER}), 5)

    def test_the_daemon_itself(self) -> None:
        """Nothing of what it sends to itself is charged to anybody, or refused because of it."""
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
            self.assertEqual(self.admitted(charge), 100)
        self.assertTrue(all(self.admission.try_charge_anonymous(PROBE_CLIENT) for _ in range(100)))
        self.assertEqual(len(self.admission), 0)

    def test_trusted(self) -> None:
        """Such an address has more of each limit of addresses, and its senders pay nothing; accounts do."""
        for peer, most in ((PEER, LIMIT), (OTHER, 5)):
            self.assertEqual(self.admitted(lambda peer=peer: self.admission.charge_anonymous(peer)), most)  # type: ignore[misc]
            self.assertEqual(self.admitted(lambda peer=peer: self.admission.charge_public_read(peer)), most)  # type: ignore[misc]
        self.assertEqual(self.admitted(lambda: self.admission.check_before_decryption(OTHER, authenticated=False)), 0)
        self.assertEqual(self.admitted(lambda: self.admission.charge_sender(DID, None, OTHER)), 100)
        self.admission.refund(DID, OTHER, outgoing=True)
        self.assertEqual(self.admitted(lambda: self.admission.charge_sender(DID, None, PEER)), LIMIT)
        self.admission.refund(DID, OTHER, outgoing=True)
        self.assertEqual(self.admitted(lambda: self.admission.charge_sender(DID, None, PEER)), 0)
        self.assertEqual(self.admitted(lambda: self.admission.charge_account(DID, OTHER)), LIMIT)

    def test_trusted_and_only_asked(self) -> None:
        """It is refused beyond its own limit, not beyond that of others."""
        for _ in range(5):
            self.assertEqual(self.wait(lambda: self.admission.check_allowance(None, OTHER)), 0)
            self.assertEqual(self.wait(lambda: self.admission.charge_anonymous(OTHER)), 0)
        self.assertEqual(self.wait(lambda: self.admission.check_allowance(None, OTHER)), 60)

    def test_trusted_with_commands(self) -> None:
        """It has as many commands as anything else, where that is more than others have."""
        self.admission.set_limits(RateLimits(LIMIT, LIMIT, LIMIT, frozenset({OTHER}), 50))
        self.assertEqual(self.admitted(lambda: self.admission.charge_command(OTHER, 1)), 50)
        self.assertEqual(self.admitted(lambda: self.admission.charge_command(PEER, 1)), 10 * LIMIT)

    def test_not_less_than_others(self) -> None:
        """One that is trusted with less than others have has what they have."""
        self.assertEqual(self.limits.make_overrides(7), {OTHER: 7})

    def test_small_requests_have_a_limit(self) -> None:
        """Behind a used-up address as many small ones are read as an account may make."""
        self.assertEqual(self.admitted(lambda: self.admission.charge_anonymous(PEER)), LIMIT)
        self.assertEqual(self.admitted(lambda: self.admission.check_before_read(PEER, SMALL_REQUEST_BYTES)), LIMIT)
        self.assertEqual(self.admitted(lambda: self.admission.check_before_read(PEER, SMALL_REQUEST_BYTES + 1)), 0)

    def test_a_command_costs_what_it_weighs(self) -> None:
        """One, and one more for each 64 KiB, of ten times an account's."""
        self.assertEqual(
            self.admitted(lambda: self.admission.charge_command(PEER, 2 * SMALL_REQUEST_BYTES)), 10 * LIMIT // 3
        )


class LocalDecisionTests(SynchronousTestCase):
    """A process that decides without the store."""

    def test_what_was_in_vain(self) -> None:
        """Each address has its part of the limit: one that used it up takes nothing from others."""
        processes = LimiterProcesses(30)
        processes.fail()
        admission = processes[0].admission
        for peer in (PEER, OTHER):
            read = 0
            while read < 100 and self.reads(admission, peer):
                admission.charge_failure(peer)
                read += 1
            self.assertEqual(read, 10)

    def test_what_was_large_and_in_vain(self) -> None:
        """It costs no more than this process' part: the rest is there again with the store."""
        processes = LimiterProcesses(30)
        processes.fail()
        admission = processes[0].admission
        admission.charge_failure(PEER, 100 * SMALL_REQUEST_BYTES)
        processes.clock.advance(2)
        processes.cluster.away = None
        self.assertTrue(self.reads(admission, PEER))

    def reads(self, admission: RateLimiter, peer: str) -> bool:
        """Whether an envelope that is not small would be read."""
        asked = Deferred.fromCoroutine(admission.check_before_read(peer, SMALL_REQUEST_BYTES + 1))
        return asked.addErrback(lambda failure: failure.trap(RateLimitExceeded) and True).result is None


class ForgottenTests(SynchronousTestCase):
    """What a process held of somebody whom it forgets."""

    def test_the_last_one(self) -> None:
        """It goes back to the store, however little it is."""
        processes = LimiterProcesses(600, count=1)
        allowances = processes[0].allowances
        share = DistributedLimiter(processes.clock, allowances, "bucket", 600, max_keys=2)
        lease = allowances.lease_size(600)
        for who, cost in (("first", 1), ("first", lease - 2), ("second", 1), ("third", 1)):
            self.assertEqual(self.successResultOf(Deferred.fromCoroutine(share.take(who, cost))), 0)
        self.assertEqual(processes.cluster.put_backs, [(allowances.make_key("bucket", "first"), 1)])


class ImmediateChargeTests(SynchronousTestCase):
    """One payload is charged where nobody has to be asked."""

    def test_alone(self) -> None:
        """As far as the limit goes; what is refused or undone costs nothing."""
        admission = RateLimiter(Clock(), lambda *_: None, RateLimits(LIMIT, LIMIT, LIMIT))
        admission.try_charge_anonymous(PEER)
        admission.refund_anonymous(PEER)
        self.assertEqual([admission.try_charge_anonymous(PEER) for _ in range(5)], [True] * LIMIT + [False] * 2)
        admission.refund_anonymous(PEER)
        self.assertEqual([admission.try_charge_anonymous(PEER) for _ in range(2)], [True, False])

    def test_of_what_is_held(self) -> None:
        """Several processes: only of a lot that was taken before, of which each is used once."""
        processes = LimiterProcesses(600, count=1)
        admission = processes[0].admission
        self.assertFalse(admission.try_charge_anonymous(PEER))
        self.assertEqual(processes.cluster.operations, 0)
        self.successResultOf(Deferred.fromCoroutine(admission.charge_anonymous(PEER)))
        ((_, lease),) = processes.cluster.taken
        self.assertGreater(lease, 2)
        self.assertEqual([admission.try_charge_anonymous(PEER) for _ in range(lease)], [True] * (lease - 1) + [False])
        self.assertEqual(processes.cluster.operations, 1)

    def test_not_before_those_in_line(self) -> None:
        """While somebody waits for the store, nobody goes ahead of it."""
        processes = LimiterProcesses(600, count=1)
        admission, cluster = processes[0].admission, processes.cluster
        self.successResultOf(Deferred.fromCoroutine(admission.charge_anonymous(PEER)))
        cluster.slow = True
        first = Deferred.fromCoroutine(admission.charge_anonymous(PEER, 200))
        self.assertFalse(admission.try_charge_anonymous(PEER))
        cluster.let_go()
        self.successResultOf(first)
