"""What each charge is told of, what is not charged, and what is charged without asking anybody."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.admission import SMALL, Admission, Trusted
from mediatord.admission.share import Share
from mediatord.errors import RateLimited
from mediatord.synthetic import ITSELF
from tests.admissions import DID, NOW, PEER, Processes

OTHER = "192.0.2.2"
LIMIT = 3

Charge = Callable[[], Coroutine[Deferred[Any], Any, None] | None]


class _Case(SynchronousTestCase):
    trusted = Trusted()

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.refusals: list[tuple[str, str, str, int]] = []
        self.admission = Admission(
            self.clock,
            lambda *refusal: self.refusals.append(refusal),
            did_per_minute=LIMIT,
            ip_per_minute=LIMIT,
            account_per_minute=LIMIT,
            trusted=self.trusted,
        )

    def wait(self, charge: Charge) -> int:
        """What it says that somebody has to wait; 0 if it is admitted."""
        try:
            charged = charge()
            if charged is not None:
                charged.send(None)
                self.fail("it waits")
        except RateLimited as error:
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
        self.assertEqual(self.refused(lambda: self.admission.sender(DID, None, PEER)), ("did", DID, PEER, 40))

    def test_of_a_claimed_sender(self) -> None:
        """The address: a stranger's claim is not put down."""
        self.assertEqual(self.refused(lambda: self.admission.sender(None, DID, PEER)), ("did", PEER, PEER, 40))

    def test_of_an_account(self) -> None:
        """Also where it is only asked."""
        self.assertEqual(self.refused(lambda: self.admission.account(DID, PEER)), ("account", DID, PEER, 40))
        self.assertEqual(self.wait(lambda: self.admission.has_allowance(DID, OTHER)), 40)
        self.assertEqual(self.refusals[-1], ("account", DID, OTHER, 40))

    def test_of_an_address(self) -> None:
        """Also where it is only asked."""
        self.assertEqual(self.refused(lambda: self.admission.stranger(PEER)), ("ip", PEER, PEER, 40))
        asked: tuple[Charge, ...] = (
            lambda: self.admission.has_allowance(None, PEER),
            lambda: self.admission.before_opening(PEER, authenticated=False),
            lambda: self.admission.before_reading(PEER, SMALL + 1),
        )
        for ask in asked:
            self.assertEqual((self.wait(ask), self.refusals.pop()), (40, ("ip", PEER, PEER, 40)))

    def test_of_a_reader(self) -> None:
        """The address."""
        self.assertEqual(self.refused(lambda: self.admission.reader(PEER)), ("account", PEER, PEER, 40))

    def test_of_commands(self) -> None:
        """The address."""
        self.assertEqual(self.refused(lambda: self.admission.command(PEER, 1)), ("account", PEER, PEER, 40))


class FreeTests(_Case):
    """Who does not pay, and for what."""

    trusted = Trusted(frozenset({OTHER}), 5)

    def test_the_daemon_itself(self) -> None:
        """Nothing of what it sends to itself is charged to anybody, or refused because of it."""
        charges: tuple[Charge, ...] = (
            lambda: self.admission.sender(DID, None, ITSELF),
            lambda: self.admission.stranger(ITSELF),
            lambda: self.admission.account(DID, ITSELF),
            lambda: self.admission.before_reading(ITSELF, 100 * SMALL),
            lambda: self.admission.in_vain(ITSELF, 100 * SMALL),
            lambda: self.admission.before_opening(ITSELF, authenticated=False),
            lambda: self.admission.has_allowance(None, ITSELF),
        )
        for charge in charges:
            self.assertEqual(self.admitted(charge), 100)
        self.assertTrue(all(self.admission.stranger_at_once(ITSELF) for _ in range(100)))
        self.assertEqual(len(self.admission), 0)

    def test_trusted(self) -> None:
        """Such an address has more of each limit of addresses, and its senders pay nothing; accounts do."""
        for peer, most in ((PEER, LIMIT), (OTHER, 5)):
            self.assertEqual(self.admitted(lambda peer=peer: self.admission.stranger(peer)), most)  # type: ignore[misc]
            self.assertEqual(self.admitted(lambda peer=peer: self.admission.reader(peer)), most)  # type: ignore[misc]
        self.assertEqual(self.admitted(lambda: self.admission.before_opening(OTHER, authenticated=False)), 0)
        self.assertEqual(self.admitted(lambda: self.admission.sender(DID, None, OTHER)), 100)
        self.admission.give_back(DID, OTHER, outgoing=True)
        self.assertEqual(self.admitted(lambda: self.admission.sender(DID, None, PEER)), LIMIT)
        self.admission.give_back(DID, OTHER, outgoing=True)
        self.assertEqual(self.admitted(lambda: self.admission.sender(DID, None, PEER)), 0)
        self.assertEqual(self.admitted(lambda: self.admission.account(DID, OTHER)), LIMIT)

    def test_trusted_and_only_asked(self) -> None:
        """It is refused beyond its own limit, not beyond that of others."""
        for _ in range(5):
            self.assertEqual(self.wait(lambda: self.admission.has_allowance(None, OTHER)), 0)
            self.assertEqual(self.wait(lambda: self.admission.stranger(OTHER)), 0)
        self.assertEqual(self.wait(lambda: self.admission.has_allowance(None, OTHER)), 60)

    def test_trusted_with_commands(self) -> None:
        """It has as many commands as anything else, where that is more than others have."""
        self.admission.change(
            did_per_minute=LIMIT,
            ip_per_minute=LIMIT,
            account_per_minute=LIMIT,
            trusted=Trusted(frozenset({OTHER}), 50),
        )
        self.assertEqual(self.admitted(lambda: self.admission.command(OTHER, 1)), 50)
        self.assertEqual(self.admitted(lambda: self.admission.command(PEER, 1)), 10 * LIMIT)

    def test_not_less_than_others(self) -> None:
        """One that is trusted with less than others have has what they have."""
        self.assertEqual(Trusted(frozenset({OTHER}), 5).limits(7), {OTHER: 7})

    def test_small_requests_have_a_limit(self) -> None:
        """Behind a used-up address as many small ones are read as an account may make."""
        self.assertEqual(self.admitted(lambda: self.admission.stranger(PEER)), LIMIT)
        self.assertEqual(self.admitted(lambda: self.admission.before_reading(PEER, SMALL)), LIMIT)
        self.assertEqual(self.admitted(lambda: self.admission.before_reading(PEER, SMALL + 1)), 0)

    def test_a_command_costs_what_it_weighs(self) -> None:
        """One, and one more for each 64 KiB, of ten times an account's."""
        self.assertEqual(self.admitted(lambda: self.admission.command(PEER, 2 * SMALL)), 10 * LIMIT // 3)


class AloneTests(SynchronousTestCase):
    """A process that decides without the store."""

    def test_what_was_in_vain(self) -> None:
        """Each address has its part of the limit: one that used it up takes nothing from others."""
        processes = Processes(30)
        processes.fail()
        admission = processes[0].admission
        for peer in (PEER, OTHER):
            read = 0
            while read < 100 and self.reads(admission, peer):
                admission.in_vain(peer)
                read += 1
            self.assertEqual(read, 10)

    def test_what_was_large_and_in_vain(self) -> None:
        """It costs no more than this process' part: the rest is there again with the store."""
        processes = Processes(30)
        processes.fail()
        admission = processes[0].admission
        admission.in_vain(PEER, 100 * SMALL)
        processes.clock.advance(2)
        processes.cluster.away = None
        self.assertTrue(self.reads(admission, PEER))

    def reads(self, admission: Admission, peer: str) -> bool:
        """Whether an envelope that is not small would be read."""
        asked = Deferred.fromCoroutine(admission.before_reading(peer, SMALL + 1))
        return asked.addErrback(lambda failure: failure.trap(RateLimited) and True).result is None


class ForgottenTests(SynchronousTestCase):
    """What a process held of somebody whom it forgets."""

    def test_the_last_one(self) -> None:
        """It goes back to the store, however little it is."""
        processes = Processes(600, count=1)
        allowances = processes[0].allowances
        share = Share(processes.clock, allowances, "bucket", 600, max_keys=2)
        lot = allowances.lot(600)
        for who, cost in (("first", 1), ("first", lot - 2), ("second", 1), ("third", 1)):
            self.assertEqual(self.successResultOf(Deferred.fromCoroutine(share.take(who, cost))), 0)
        self.assertEqual(processes.cluster.put_backs, [(allowances.key("bucket", "first"), 1)])


class AtOnceTests(SynchronousTestCase):
    """One payload is charged where nobody has to be asked."""

    def test_alone(self) -> None:
        """As far as the limit goes; what is refused or undone costs nothing."""
        admission = Admission(
            Clock(), lambda *_: None, did_per_minute=LIMIT, ip_per_minute=LIMIT, account_per_minute=LIMIT
        )
        admission.stranger_at_once(PEER)
        admission.not_a_stranger(PEER)
        self.assertEqual([admission.stranger_at_once(PEER) for _ in range(5)], [True] * LIMIT + [False] * 2)
        admission.not_a_stranger(PEER)
        self.assertEqual([admission.stranger_at_once(PEER) for _ in range(2)], [True, False])

    def test_of_what_is_held(self) -> None:
        """Several processes: only of a lot that was taken before, of which each is used once."""
        processes = Processes(600, count=1)
        admission = processes[0].admission
        self.assertFalse(admission.stranger_at_once(PEER))
        self.assertEqual(processes.cluster.operations, 0)
        self.successResultOf(Deferred.fromCoroutine(admission.stranger(PEER)))
        ((_, lot),) = processes.cluster.taken
        self.assertGreater(lot, 2)
        self.assertEqual([admission.stranger_at_once(PEER) for _ in range(lot)], [True] * (lot - 1) + [False])
        self.assertEqual(processes.cluster.operations, 1)

    def test_not_before_those_in_line(self) -> None:
        """While somebody waits for the store, nobody goes ahead of it."""
        processes = Processes(600, count=1)
        admission, cluster = processes[0].admission, processes.cluster
        self.successResultOf(Deferred.fromCoroutine(admission.stranger(PEER)))
        cluster.slow = True
        first = Deferred.fromCoroutine(admission.stranger(PEER, 200))
        self.assertFalse(admission.stranger_at_once(PEER))
        cluster.let_go()
        self.successResultOf(first)
