"""Limits that hold over several processes within 5 %, and exactly where they are small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from math import inf
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import RateLimitExceeded
from mediatord.ratelimit.distributed_limiter import QUOTA_STORE_BACKOFF, QUOTA_STORE_TIMEOUT, DistributedLimiter
from mediatord.ratelimit.rate_limiter import RateLimits
from mediatord.runtime.request_time import REQUEST_TIME_LIMIT as REQUEST
from mediatord.runtime.request_time import get_request_start, request_deadline
from tests.ratelimit.rate_limiter_processes import DID, NOW, PEER, LimiterProcesses, max_in_a_minute, min_in_a_minute

LIMITS = (60, 120, 600)

# Which process is asked at each step of time.
Order = Callable[[int], Iterator[int]]


def one(limit: int) -> Iterator[int]:
    """Everything comes to one process."""
    return cycle([0])


def evenly(limit: int) -> Iterator[int]:
    """Round robin."""
    return cycle([0, 1, 2])


def in_bursts(limit: int) -> Iterator[int]:
    """A third of a minute's allowance to each in turn."""
    return (each for each in cycle([0, 1, 2]) for _ in range(limit // 3))


def unevenly(limit: int) -> Iterator[int]:
    """One has most of it, the others a bit now and then."""
    return cycle([0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 2])


def ask_for_minutes(processes: LimiterProcesses, order: Iterator[int], seconds: int, rate: float = 3.2) -> float:
    """Ask so many times as often as is allowed, at regular intervals; when that was over."""
    step = 60 / processes.limit / rate
    end = processes.clock.seconds() + seconds
    while processes.clock.seconds() < end:
        processes[next(order)].asks()
        processes.clock.advance(step)
    return end


def assert_within_5_percent(processes: LimiterProcesses, begin: float, end: float, minute: float = 60.0) -> None:
    """In any minute at most so many, and at least so many from `begin` to `end`, where more was asked for."""
    limit = processes.limit
    assert max_in_a_minute(processes.admitted) <= limit * 1.05
    assert min_in_a_minute(processes.admitted, begin, end, minute) >= limit * 0.95


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("order", [one, evenly, in_bursts, unevenly], ids=lambda order: order.__name__)
@pytest.mark.parametrize("rate", [1.1, 3.2])
def test_over_three_processes(limit: int, order: Order, rate: float) -> None:
    """Whoever is asked, and however much more is asked for than is allowed."""
    processes = LimiterProcesses(limit)
    end = ask_for_minutes(processes, order(limit), 200, rate)
    assert_within_5_percent(processes, NOW, end)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("order", [one, evenly, in_bursts, unevenly], ids=lambda order: order.__name__)
def test_a_storm(limit: int, order: Order) -> None:
    """A minute's allowance is used up in a second; what comes back is found within half a second."""
    processes = LimiterProcesses(limit)
    end = ask_for_minutes(processes, order(limit), 125, rate=20)
    assert_within_5_percent(processes, NOW, end, 60.5)


@pytest.mark.parametrize("limit", LIMITS)
def test_a_burst(limit: int) -> None:
    """A whole minute's at once, everywhere at the same time, again and again."""
    processes = LimiterProcesses(limit)
    for _ in range(5):
        for number in range(3 * limit):
            processes[number % 3].asks()
        processes.clock.advance(30)
    assert max_in_a_minute(processes.admitted) <= limit * 1.05
    assert len(processes.admitted) >= 3 * limit * 0.95


@pytest.mark.parametrize("limit", LIMITS)
def test_processes_that_join(limit: int) -> None:
    """One begins, two more come while it is busy."""
    processes = LimiterProcesses(limit, count=1)
    ask_for_minutes(processes, cycle([0]), 45)
    processes.join()
    ask_for_minutes(processes, cycle([0, 1]), 20)
    processes.join()
    end = ask_for_minutes(processes, cycle([0, 1, 2]), 120)
    assert_within_5_percent(processes, NOW, end)


@pytest.mark.parametrize("limit", LIMITS)
def test_processes_that_go(limit: int) -> None:
    """What they held is nobody's until its minute is over."""
    processes = LimiterProcesses(limit)
    ask_for_minutes(processes, cycle([0, 1, 2]), 50)
    del processes.all[1:]
    gone = processes.admitted
    end = ask_for_minutes(processes, cycle([0]), 130)
    assert max_in_a_minute(sorted({*gone, *processes.admitted})) <= limit * 1.05
    assert min_in_a_minute(processes.admitted, NOW + 60, end) >= limit * 0.95


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 19])
@pytest.mark.parametrize("order", [one, evenly, in_bursts], ids=lambda order: order.__name__)
def test_small_limits_are_exact(limit: int, order: Order) -> None:
    """None too many, and none too few once somebody keeps asking."""
    processes = LimiterProcesses(limit)
    ask_for_minutes(processes, order(max(limit, 3)), 200, rate=20)
    assert max_in_a_minute(processes.admitted) == limit


class FloodTests(SynchronousTestCase):
    """What a flood costs the store."""

    def test_what_is_used_up_is_not_asked_for(self) -> None:
        """Nothing more is asked until something may be had, whichever process is flooded."""
        processes = LimiterProcesses(60)
        while not processes[0].asks():
            pass
        for process in processes.all:
            process.asks()
        before = processes.cluster.operations
        for _ in range(590):
            processes.clock.advance(0.1)
            self.assertTrue(all(process.asks() for process in processes.all))
        self.assertEqual(processes.cluster.operations, before)
        processes.clock.advance(2)
        self.assertEqual(processes[0].asks(), 0)

    def test_where_it_comes_back_bit_by_bit(self) -> None:
        """An allowance that was used up evenly costs each process a few questions in half a second."""
        for limit in (600, 6000):
            processes = LimiterProcesses(limit)
            ask_for_minutes(processes, cycle([0, 1, 2]), 60, rate=1)
            before = processes.cluster.operations
            for _ in range(3000):
                for process in processes.all:
                    while not process.asks():
                        pass
                processes.clock.advance(0.02)
            self.assertLess(processes.cluster.operations - before, 400)

    def test_what_lots_save(self) -> None:
        """A minute's allowance takes about as many questions as there are lots in it."""
        processes = LimiterProcesses(600)
        ask_for_minutes(processes, cycle([0, 1, 2]), 59, rate=1)
        self.assertLessEqual(processes.cluster.operations, 60)

    def test_the_last_ones_are_found(self) -> None:
        """What is less than a lot is not lost, and not asked for one by one."""
        processes = LimiterProcesses(600)
        processes.cluster.take_quota(processes[0].key, 591, limit=600, period=60)
        before = processes.cluster.operations
        self.assertEqual([processes[0].asks() for _ in range(10)], [0] * 9 + [60])
        self.assertLessEqual(processes.cluster.operations - before, 12)

    def test_what_a_refusal_costs(self) -> None:
        """A question for a lot and one for what is needed; where a lot is one, these are the same."""
        for limit, questions in ((60, [1]), (60_000, [1000, 3])):
            processes = LimiterProcesses(limit)
            processes[0].asks(cost=limit)
            before = len(processes.cluster.taken)
            self.assertTrue(processes[1].asks(cost=questions[-1]))
            self.assertEqual([amount for _, amount in processes.cluster.taken[before:]], questions)

    def test_a_smaller_request(self) -> None:
        """That much was refused does not say that little is."""
        processes = LimiterProcesses(60)
        processes[0].asks(cost=55)
        self.assertEqual(processes[1].asks(cost=10), 60)
        self.assertEqual(processes[1].asks(cost=5), 0)


class OutageTests(SynchronousTestCase):
    """A store that does not answer holds nobody up, and lets nobody have more than they may."""

    def setUp(self) -> None:
        self.processes = LimiterProcesses(60)

    def test_each_alone(self) -> None:
        """While the store is away each process admits its part of the limit; it is asked once a second."""
        self.processes.fail()
        for _ in range(40):
            for process in self.processes.all:
                for _ in range(10):
                    process.asks()
            self.processes.clock.advance(0.25)
        self.assertEqual([len(process.admitted) for process in self.processes.all], [20] * 3)
        self.assertLessEqual(self.processes.cluster.operations, 3 * 10)

    def test_each_alone_with_a_small_limit(self) -> None:
        """One is admitted by each in any case."""
        processes = LimiterProcesses(2)
        processes.fail()
        self.assertEqual([[process.asks() for _ in range(2)] for process in processes.all], [[0, 60]] * 3)

    def test_known_before(self) -> None:
        """What a process holds is used up first; what it admitted before is part of its part."""
        processes = LimiterProcesses(600)
        processes[0].asks(cost=250)
        processes[0].asks()
        processes.fail()
        held = 0
        while not processes[0].asks():
            held += 1
        self.assertEqual(held, processes[0].allowances.lease_size(600) - 1)
        self.assertRaises(RateLimitExceeded, processes[0].admission.check_allowance, DID, PEER)
        processes[1].admission.check_allowance(DID, PEER)
        self.assertEqual([processes[1].asks() for _ in range(250)].count(0), 200)
        self.assertRaises(RateLimitExceeded, processes[1].admission.check_allowance, DID, PEER)

    def test_whoever_makes_the_store_slow(self) -> None:
        """Gains nothing by it, however often it does, at all processes at the same time."""
        self.processes.cluster.slow = True
        for _ in range(20):
            for process in self.processes.all:
                for _ in range(30):
                    process.ask()
                    process.admission.charge_failure(PEER)
            self.processes.clock.advance(QUOTA_STORE_TIMEOUT)
            for process in self.processes.all:
                process.ask()
            self.processes.clock.advance(QUOTA_STORE_BACKOFF)
            self.processes.cluster.let_go()
        self.assertGreaterEqual(len(self.processes.admitted), 57)
        self.assertLessEqual(max_in_a_minute(self.processes.admitted), 63)

    def test_back_again(self) -> None:
        """Once it answers, limits hold over all of them again."""
        ask_for_minutes(self.processes, cycle([0, 1, 2]), 30)
        self.processes.fail()
        ask_for_minutes(self.processes, cycle([0, 1, 2]), 30)
        self.processes.cluster.away = None
        back = self.processes.clock.seconds()
        end = ask_for_minutes(self.processes, cycle([0, 1, 2]), 200)
        later = [moment for moment in self.processes.admitted if moment >= back + 1]
        self.assertLessEqual(max_in_a_minute(later), 63)
        self.assertGreaterEqual(min_in_a_minute(later, back + 61, end), 57)

    def test_slow(self) -> None:
        """Nobody waits longer than half a second, and then the store is left alone for a second."""
        self.processes.cluster.slow = True
        waiting = [self.processes[0].ask() for _ in range(5)]
        for one in waiting:
            self.assertNoResult(one)
        self.processes.clock.advance(QUOTA_STORE_TIMEOUT)
        self.assertEqual([self.successResultOf(one) for one in waiting], [0] * 5)
        self.assertEqual(self.successResultOf(self.processes[0].ask("did:example:other")), 0)
        self.assertEqual(self.processes.cluster.operations, 1)
        self.processes.clock.advance(QUOTA_STORE_BACKOFF)
        self.assertNoResult(self.processes[0].ask())
        self.assertEqual(self.successResultOf(self.processes[0].ask("did:example:other")), 0)
        self.assertEqual(self.processes.cluster.operations, 2)

    def test_a_request_that_is_late(self) -> None:
        """It waits for what is left of its time, those that ask with it for longer, and the answer counts for all."""
        self.processes.cluster.slow = True
        clock, process = self.processes.clock, self.processes[0]
        with request_deadline(clock):
            clock.advance(REQUEST - QUOTA_STORE_TIMEOUT / 2)
            late = process.ask()
        other = process.ask()
        clock.advance(QUOTA_STORE_TIMEOUT / 2)
        self.assertEqual(self.successResultOf(late), 0)
        self.assertNoResult(other)
        self.processes.cluster.slow = False
        self.processes.cluster.let_go()
        self.assertEqual(self.successResultOf(other), 0)
        self.assertEqual([process.asks() for _ in range(60)].count(0), 58)
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_asking_is_no_requests(self) -> None:
        """Others are waiting for the answer as well."""
        seen: list[float] = []
        take = self.processes.cluster.take_quota

        def noting(*args: Any, **options: Any) -> Deferred[float]:
            seen.append(get_request_start(inf))
            result: Deferred[float] = take(*args, **options)
            return result

        self.patch(self.processes.cluster, "take_quota", noting)
        with request_deadline(self.processes.clock):
            self.processes[0].asks()
        self.assertEqual(seen, [inf])

    def test_an_answer_that_comes_late(self) -> None:
        """It does no harm, whatever it is."""
        self.processes.cluster.slow = True
        for away in (None, RuntimeError("boom")):
            self.processes.cluster.away = None
            late = self.processes[0].ask()
            self.processes.clock.advance(QUOTA_STORE_TIMEOUT)
            self.assertEqual(self.successResultOf(late), 0)
            self.processes.cluster.away = away
            self.processes.cluster.let_go()
            self.processes.clock.advance(QUOTA_STORE_BACKOFF)
        self.assertEqual(self.processes.clock.getDelayedCalls(), [])

    def test_well_again(self) -> None:
        """Once the store has answered, many ask at the same time again, and nobody is let through unasked."""
        self.processes.fail()
        self.processes[0].asks()
        self.processes.cluster.away = None
        self.processes.clock.advance(QUOTA_STORE_BACKOFF)
        self.processes[0].asks()
        self.processes.cluster.slow = True
        asking = [self.processes[0].ask(f"did:example:{number}") for number in range(3)]
        for one in asking:
            self.assertNoResult(one)
        self.assertEqual(len(self.processes.cluster.held), 3)
        self.processes.cluster.let_go()
        self.assertEqual([self.successResultOf(one) for one in asking], [0] * 3)
        self.assertEqual(self.processes.clock.getDelayedCalls(), [])

    def test_a_fault_of_ours(self) -> None:
        """It is logged, and refuses nobody either."""
        self.processes.cluster.away = RuntimeError("boom")
        self.assertEqual(self.processes[0].asks(), 0)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_what_was_refused_stays_refused(self) -> None:
        """An outage does not make known refusals undone."""
        while not self.processes[0].asks():
            pass
        self.assertTrue(self.processes[1].asks())
        self.processes.fail()
        self.assertTrue(self.processes[1].asks())


class ConcurrentTests(SynchronousTestCase):
    """Requests that come while the store is being asked."""

    def setUp(self) -> None:
        self.processes = LimiterProcesses(600)
        self.cluster = self.processes.cluster
        self.cluster.slow = True

    @staticmethod
    def note(order: list[int], number: int, wait: int) -> None:
        order.append(number)

    def test_another_limit(self) -> None:
        """It counts at once at each process that was told, also for who was refused just now."""
        processes = LimiterProcesses(6)
        one, two = processes[0], processes[1]
        self.assertEqual([bool(process.asks()) for process in (one, two) for _ in range(4)], [False] * 6 + [True] * 2)
        for process in (one, two):
            process.admission.set_limits(RateLimits(8, 8, 8))
        self.assertEqual(
            [bool(process.asks()) for process in (two, one) for _ in range(2)], [False, False, True, True]
        )
        one.admission.set_limits(RateLimits(1, 1, 1))
        processes.clock.advance(61)
        self.assertEqual([bool(one.asks()) for _ in range(2)], [False, True])

    def test_one_question_for_all(self) -> None:
        """They wait for the same answer, in the order in which they came."""
        order: list[int] = []
        for number in range(8):
            self.processes[0].ask().addCallback(partial(self.note, order, number))
        self.cluster.let_go()
        self.assertEqual(order, list(range(8)))
        self.assertEqual([amount for _, amount in self.cluster.taken], [10])

    def test_more_than_a_lot(self) -> None:
        """Those for whom the first answer does not do ask together for the rest."""
        asked = [self.processes[0].ask() for _ in range(45)]
        self.cluster.let_go()
        self.cluster.let_go()
        self.assertEqual([self.successResultOf(one) for one in asked], [0] * 45)
        self.assertEqual([amount for _, amount in self.cluster.taken], [10, 35])

    def test_more_than_there_is(self) -> None:
        """As many as may are admitted, the others refused; nobody is forgotten, and nothing left over."""
        asked = [process.ask() for _ in range(600) for process in self.processes.all]
        while self.cluster.held:
            self.cluster.let_go()
        answers = [self.successResultOf(one) for one in asked]
        self.assertEqual(answers.count(0), 600)
        self.assertLess(self.cluster.operations, 60)

    def test_large_among_small(self) -> None:
        """Who needs too much is refused, and the others are served."""
        self.cluster.slow = False
        self.processes[1].asks(cost=580)
        self.cluster.slow = True
        large, small = self.processes[0].ask(cost=30), self.processes[0].ask()
        while self.cluster.held:
            self.cluster.let_go()
        self.assertEqual((self.successResultOf(large), self.successResultOf(small)), (60, 0))

    def test_nobody_is_overtaken(self) -> None:
        """Who needs little does not take what somebody waits for who came before."""
        self.cluster.slow = False
        self.processes[0].asks()
        self.cluster.slow = True
        large, small = self.processes[0].ask(cost=30), self.processes[0].ask()
        self.assertNoResult(small)
        self.cluster.let_go()
        self.cluster.let_go()
        self.assertEqual((self.successResultOf(large), self.successResultOf(small)), (0, 0))

    def test_keys_do_not_wait_for_each_other(self) -> None:
        """Everybody has a line of their own."""
        self.processes[0].ask()
        self.processes[0].ask("did:example:bob")
        self.assertEqual(len({key for key, _ in self.cluster.taken}), 2)

    def test_somebody_who_gives_up(self) -> None:
        """The others get their answer."""
        first, second = self.processes[0].ask(), self.processes[0].ask()
        first.addErrback(lambda _: None)
        first.cancel()
        self.cluster.let_go()
        self.assertEqual(self.successResultOf(second), 0)


class LateChargeTests(SynchronousTestCase):
    """What is charged for after it was done, and what is given back."""

    def setUp(self) -> None:
        self.processes = LimiterProcesses(60)
        self.cluster = self.processes.cluster

    def read(self, number: int, size: int = 100_000) -> Deferred[None]:
        """A process begins to read something of an address."""
        return Deferred.fromCoroutine(self.processes[number].admission.check_before_read(PEER, size))

    def fails(self, number: int) -> bool:
        """An address sends something that cannot be opened; whether it was read at all."""
        reading = self.read(number)
        if reading.result is not None:
            self.failureResultOf(reading)
            return False
        self.processes[number].admission.charge_failure(PEER)
        return True

    def test_in_vain(self) -> None:
        """One address is read for its limit and one more for each process, wherever it sends."""
        for pace, expected in ((0.0, 63), (0.125, 63), (1.5, 63)):
            self.processes = LimiterProcesses(60)
            read = []
            for step in range(1500):
                if self.fails(step % 3):
                    read.append(self.processes.clock.seconds())
                self.processes.clock.advance(pace)
            self.assertLessEqual(max_in_a_minute(read), expected)
            self.assertGreaterEqual(max_in_a_minute(read), 57 if pace < 1 else 39)

    def test_in_vain_waits_for_nothing(self) -> None:
        """The store is told in the background, of several at once together."""
        self.cluster.slow = True
        for _ in range(5):
            self.processes[0].admission.charge_failure(PEER)
        self.assertEqual(len(self.cluster.held), 1)
        self.cluster.let_go()
        self.cluster.let_go()
        self.assertEqual([amount for _, amount in self.cluster.taken], [1, 4])

    def test_in_vain_while_somebody_waits(self) -> None:
        """What was taken for somebody is kept until it does for both."""
        processes = LimiterProcesses(600)
        processes.cluster.slow = True
        charge = Deferred.fromCoroutine(processes[0].admission.charge_anonymous(PEER, 30))
        processes[0].admission.charge_failure(PEER)
        processes.cluster.let_go()
        self.assertNoResult(charge)
        processes.cluster.let_go()
        self.successResultOf(charge)
        self.assertEqual([amount for _, amount in processes.cluster.taken], [30, 10])

    def test_what_is_owed_is_paid_first(self) -> None:
        """An address that used up its minute elsewhere is not read here again."""
        for _ in range(60):
            self.processes[0].admission.charge_failure(PEER)
        self.assertTrue(self.fails(1))
        self.assertFalse(self.fails(1))
        self.processes.clock.advance(60)
        self.assertTrue(self.fails(1))

    def test_in_vain_all_over_a_minute(self) -> None:
        """Also where the allowance comes back bit by bit, and everybody waits for it."""
        processes = self.processes = LimiterProcesses(120)
        read = []
        for pace in (0.5, 0.05):
            for step in range(1200):
                if self.fails(step % 3):
                    read.append(processes.clock.seconds())
                processes.clock.advance(pace)
        self.assertLessEqual(max_in_a_minute(read), 126)
        self.assertGreaterEqual(max_in_a_minute(read), 114)

    def test_in_vain_is_not_counted_where_it_was_refused(self) -> None:
        """What costs nothing does not use up the window of the process either."""
        for number in (0, 1):
            for _ in range(60):
                self.processes[number].admission.charge_failure(PEER)
            self.processes.clock.advance(50)
        self.processes.fail()
        self.assertEqual([self.fails(1) for _ in range(61)].count(True), 19)

    def test_what_is_known_before_it_is_charged(self) -> None:
        """An account or address that used up its minute elsewhere is refused here before anything is done for it."""
        first, second = self.processes[0].admission, self.processes[1].admission
        while not self.processes[0].asks():
            pass
        for _ in range(60):
            first.charge_failure(PEER)
        second.check_allowance(DID, PEER)
        second.check_allowance(None, PEER)
        second.check_before_decryption(PEER, authenticated=False)
        self.processes[1].asks()
        second.charge_failure(PEER)
        before = self.cluster.operations
        self.assertRaises(RateLimitExceeded, second.check_allowance, DID, PEER)
        self.assertRaises(RateLimitExceeded, second.check_allowance, None, PEER)
        self.assertRaises(RateLimitExceeded, second.check_before_decryption, PEER, authenticated=False)
        self.assertEqual(self.cluster.operations, before)

    def test_a_flood_in_vain_costs_nothing(self) -> None:
        """Neither the store, nor, once its minute is used up, time to read it."""
        for number in range(300):
            self.fails(number % 3)
        before = self.cluster.operations
        for number in range(300):
            self.assertFalse(self.fails(number % 3))
        self.assertEqual(self.cluster.operations, before)

    def test_given_back(self) -> None:
        """It can be used here or elsewhere, and nothing is put back that was not taken."""
        for _ in range(60):
            self.assertEqual(self.processes[0].asks(), 0)
        self.processes[0].admission.refund(DID, PEER, outgoing=False)
        self.assertEqual(self.processes[1].asks(), 0)
        self.assertTrue(self.processes[0].asks())
        self.processes.clock.advance(120)
        before = len(self.cluster.put_backs)
        self.processes[0].admission.refund(DID, PEER, outgoing=False)
        self.processes[0].admission.refund("did:example:nobody", PEER, outgoing=False)
        self.assertEqual(len(self.cluster.put_backs), before)

    def test_given_back_after_a_refusal(self) -> None:
        """What was refused may be had again."""
        self.processes[1].asks()
        while not self.processes[0].asks():
            pass
        self.processes[0].admission.refund(DID, PEER, outgoing=False)
        self.assertEqual((self.processes[0].asks(), self.processes[0].asks()), (0, 60))

    def test_given_back_into_a_lot(self) -> None:
        """What a process may hold, it keeps: that costs no question."""
        processes = LimiterProcesses(600)
        processes[0].asks()
        processes[0].asks()
        processes[0].admission.refund(DID, PEER, outgoing=False)
        self.assertEqual(processes.cluster.put_backs, [])
        processes[0].admission.refund(DID, PEER, outgoing=False)
        self.assertEqual([amount for _, amount in processes.cluster.put_backs], [1])

    def test_put_back_in_vain(self) -> None:
        """A store that is away keeps it; that harms nobody."""
        self.processes[0].asks()
        self.processes.fail()
        self.processes[0].admission.refund(DID, PEER, outgoing=False)
        self.cluster.away = RuntimeError("boom")
        self.processes[0].admission.refund(DID, PEER, outgoing=False)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_a_refusal_costs_nothing_here(self) -> None:
        """What the others used up is not counted in this process."""
        for _ in range(60):
            self.processes[0].asks()
        for _ in range(100):
            self.processes[1].asks()
        self.processes.fail()
        self.processes.clock.advance(60)
        self.assertEqual([self.processes[1].asks() for _ in range(61)].count(0), 20)


class KeyTests(SynchronousTestCase):
    """What the store sees, and how much is remembered here."""

    def test_keys_tell_nothing(self) -> None:
        """16 bytes, other ones in each bucket, and other ones with another secret."""
        processes = LimiterProcesses(60)
        admission = processes[0].admission
        processes[0].asks()
        admission.charge_failure(PEER)
        for charge in (
            admission.charge_anonymous(PEER),
            admission.charge_sender(DID, None, PEER),
            admission.charge_public_read(PEER),
        ):
            self.successResultOf(Deferred.fromCoroutine(charge))
        keys = [key for key, _ in processes.cluster.taken]
        self.assertEqual({len(key) for key in keys}, {16})
        self.assertEqual(len(set(keys)), 4)
        self.assertNotEqual(processes[0].key, LimiterProcesses(60, secret=b"other")[0].key)
        self.assertEqual(processes[0].key, processes[1].key)

    def test_any_text(self) -> None:
        """Whatever a stranger claims to be."""
        self.assertEqual(LimiterProcesses(60)[0].asks("did:example:\ud800" + "x" * 100_000), 0)


# What happens, on which process, how much of it, and how many eighths of a second before the next.
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "flood", "join", "back"]),
        st.integers(0, 3),
        st.integers(1, 12),
        st.sampled_from([0, 0, 1, 4, 40, 200, 479, 480]),
    ),
    min_size=1,
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([1, 5, 19, 20, 45, 60, 120]), STEPS)
def test_never_more_than_5_percent_too_many(limit: int, steps: list[tuple[str, int, int, int]]) -> None:
    """Whatever comes where, in whatever rhythm, and whoever joins; and nothing at all too many of a small limit."""
    processes = LimiterProcesses(limit, count=1)
    for what, number, amount, gap in steps:
        process = processes[number % len(processes.all)]
        if what == "join" and len(processes.all) < 4:
            processes.join()
        elif what == "flood":
            while not process.asks():
                pass
        elif what == "back" and process.admitted[-1:] == [processes.clock.seconds()]:
            process.admission.refund(DID, PEER, outgoing=False)
            process.admitted.pop()
        else:
            process.asks(cost=min(amount, limit))
        processes.clock.advance(gap / 8)
    assert max_in_a_minute(processes.admitted) <= limit + limit // 20


class MemoryTests(SynchronousTestCase):
    """How many keys are remembered."""

    def setUp(self) -> None:
        self.processes = LimiterProcesses(60)
        self.share = DistributedLimiter(
            self.processes.clock, self.processes[0].allowances, "bucket", 1200, max_keys=100
        )

    def take(self, who: str, cost: int = 1) -> float:
        return self.successResultOf(Deferred.fromCoroutine(self.share.take(who, cost)))

    def test_bounded(self) -> None:
        """The one unused for longest goes first; what it held is given back, so that it does not miss it."""
        for number in range(100):
            self.take(f"{number}")
        self.take("0")
        self.take("new")
        before = len(self.processes.cluster.taken)
        self.take("0")
        self.assertEqual(len(self.processes.cluster.taken), before)
        self.take("1")
        self.assertEqual(len(self.processes.cluster.taken), before + 1)
        self.assertLessEqual(len(self.share._leases), 100)
        held = {self.processes[0].allowances.make_key("bucket", who): 19 for who in ("1", "2")}
        self.assertEqual(dict(self.processes.cluster.put_backs), held)

    def test_forgotten_while_it_asks(self) -> None:
        """What was given back of a line is not used as well by who stands in it."""
        self.take("asking")
        self.processes.cluster.slow = True
        asking = Deferred.fromCoroutine(self.share.take("asking", 25))
        self.processes.cluster.slow = False
        for number in range(100):
            self.take(f"{number}")
        key = self.processes[0].allowances.make_key("bucket", "asking")
        (given_back,) = [amount for of, amount in self.processes.cluster.put_backs if of == key]
        self.processes.cluster.slow = True
        for _ in range(3):
            self.processes.cluster.let_go()
        self.assertEqual(self.successResultOf(asking), 0)
        taken = sum([amount for of, amount in self.processes.cluster.taken if of == key])
        self.assertGreaterEqual(taken - given_back, 1 + 25)

    def test_what_is_over_is_forgotten(self) -> None:
        """Memory follows what is going on."""
        for number in range(90):
            self.take(f"{number}")
        self.processes.clock.advance(61)
        for number in range(50):
            self.take(f"new {number}")
        self.assertEqual(len(self.share._leases), 50)

    def test_kept_while_there_is_room(self) -> None:
        """What is asked for, refused or left is not forgotten for a new key."""
        self.processes.cluster.slow = True
        asking = [Deferred.fromCoroutine(self.share.take("asking", 1))]
        self.processes.cluster.slow = False
        for known in (lambda: self.take("refused", 1200), lambda: self.take("refused"), lambda: self.take("left")):
            known()
            for number in range(10):
                self.take(f"{number}")
        before = self.processes.cluster.operations
        self.assertGreater(self.take("refused"), 0)
        self.take("left")
        asking.append(Deferred.fromCoroutine(self.share.take("asking", 1)))
        self.assertEqual(self.processes.cluster.operations, before)
        self.processes.cluster.let_go()
        self.assertEqual([self.successResultOf(one) for one in asking], [0, 0])
