"""Rate limits over several processes: within 5 %, and exact if small."""

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

# The process that is used at each step of time.
Order = Callable[[int], Iterator[int]]


def single_process(limit: int) -> Iterator[int]:
    """All requests go to one process."""
    return cycle([0])


def round_robin(limit: int) -> Iterator[int]:
    """Requests go to each process in turn."""
    return cycle([0, 1, 2])


def in_bursts(limit: int) -> Iterator[int]:
    """A third of a minute's limit to each in turn."""
    return (item for item in cycle([0, 1, 2]) for _ in range(limit // 3))


def unevenly(limit: int) -> Iterator[int]:
    """Most requests go to one process."""
    return cycle([0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 2])


def request_for_seconds(processes: LimiterProcesses, order: Iterator[int], seconds: int, rate: float = 3.2) -> float:
    """Send so many times the limit at regular intervals; return the end time."""
    step = 60 / processes.limit / rate
    end = processes.clock.seconds() + seconds
    while processes.clock.seconds() < end:
        processes[next(order)].request_now()
        processes.clock.advance(step)
    return end


def assert_within_5_percent(processes: LimiterProcesses, begin: float, end: float, minute: float = 60.0) -> None:
    """
    In any minute at most 5 % more than the limit, and at least 5 % less from `begin` to `end`, if more was requested.
    """
    limit = processes.limit
    assert max_in_a_minute(processes.admitted) <= limit * 1.05
    assert min_in_a_minute(processes.admitted, begin, end, minute) >= limit * 0.95


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(
    "order", [single_process, round_robin, in_bursts, unevenly], ids=lambda order: order.__name__
)
@pytest.mark.parametrize("rate", [1.1, 3.2])
def test_three_processes(limit: int, order: Order, rate: float) -> None:
    """The limit holds for any distribution and any excess of requests."""
    processes = LimiterProcesses(limit)
    end = request_for_seconds(processes, order(limit), 200, rate)
    assert_within_5_percent(processes, NOW, end)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(
    "order", [single_process, round_robin, in_bursts, unevenly], ids=lambda order: order.__name__
)
def test_limit_used_up_at_once(limit: int, order: Order) -> None:
    """A minute's limit is used up in a second; quota that becomes free is found within half a second."""
    processes = LimiterProcesses(limit)
    end = request_for_seconds(processes, order(limit), 125, rate=20)
    assert_within_5_percent(processes, NOW, end, 60.5)


@pytest.mark.parametrize("limit", LIMITS)
def test_repeated_bursts(limit: int) -> None:
    """A whole minute's limit at once, at all processes at the same time, repeatedly."""
    processes = LimiterProcesses(limit)
    for _ in range(5):
        for number in range(3 * limit):
            processes[number % 3].request_now()
        processes.clock.advance(30)
    assert max_in_a_minute(processes.admitted) <= limit * 1.05
    assert len(processes.admitted) >= 3 * limit * 0.95


@pytest.mark.parametrize("limit", LIMITS)
def test_joining_processes(limit: int) -> None:
    """One process begins, two more join while it is busy."""
    processes = LimiterProcesses(limit, count=1)
    request_for_seconds(processes, cycle([0]), 45)
    processes.join()
    request_for_seconds(processes, cycle([0, 1]), 20)
    processes.join()
    end = request_for_seconds(processes, cycle([0, 1, 2]), 120)
    assert_within_5_percent(processes, NOW, end)


@pytest.mark.parametrize("limit", LIMITS)
def test_leaving_processes(limit: int) -> None:
    """The quota that they held is unused until its minute is over."""
    processes = LimiterProcesses(limit)
    request_for_seconds(processes, cycle([0, 1, 2]), 50)
    del processes.all[1:]
    admitted_before = processes.admitted
    end = request_for_seconds(processes, cycle([0]), 130)
    assert max_in_a_minute(sorted({*admitted_before, *processes.admitted})) <= limit * 1.05
    assert min_in_a_minute(processes.admitted, NOW + 60, end) >= limit * 0.95


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 19])
@pytest.mark.parametrize("order", [single_process, round_robin, in_bursts], ids=lambda order: order.__name__)
def test_small_limits_are_exact(limit: int, order: Order) -> None:
    """A small limit is never exceeded, and used up while requests continue."""
    processes = LimiterProcesses(limit)
    request_for_seconds(processes, order(max(limit, 3)), 200, rate=20)
    assert max_in_a_minute(processes.admitted) == limit


class FloodTests(SynchronousTestCase):
    """Store operations during a flood."""

    def test_used_up_quota_is_not_requested(self) -> None:
        """The store is not queried until quota becomes free, whichever process is flooded."""
        processes = LimiterProcesses(60)
        while not processes[0].request_now():
            pass
        for process in processes.all:
            process.request_now()
        before = processes.cluster.operations
        for _ in range(590):
            processes.clock.advance(0.1)
            self.assertTrue(all(process.request_now() for process in processes.all))
        self.assertEqual(processes.cluster.operations, before)
        processes.clock.advance(2)
        self.assertEqual(processes[0].request_now(), 0)

    def test_gradually_free_quota(self) -> None:
        """A quota that was used up evenly costs each process a few operations in half a second."""
        for limit in (600, 6000):
            processes = LimiterProcesses(limit)
            request_for_seconds(processes, cycle([0, 1, 2]), 60, rate=1)
            before = processes.cluster.operations
            for _ in range(3000):
                for process in processes.all:
                    while not process.request_now():
                        pass
                processes.clock.advance(0.02)
            self.assertLess(processes.cluster.operations - before, 400)

    def test_leases_save_operations(self) -> None:
        """A minute's limit takes about as many operations as it has leases."""
        processes = LimiterProcesses(600)
        request_for_seconds(processes, cycle([0, 1, 2]), 59, rate=1)
        self.assertLessEqual(processes.cluster.operations, 60)

    def test_remainder_is_used(self) -> None:
        """Less than a lease is not lost, and not requested one by one."""
        processes = LimiterProcesses(600)
        processes.cluster.take_quota(processes[0].key, 591, limit=600, period=60)
        before = processes.cluster.operations
        self.assertEqual([processes[0].request_now() for _ in range(10)], [0] * 9 + [60])
        self.assertLessEqual(processes.cluster.operations - before, 12)

    def test_operations_of_a_refusal(self) -> None:
        """One operation for a lease and one for what is needed; the same one where a lease is 1."""
        for limit, questions in ((60, [1]), (60_000, [1000, 3])):
            processes = LimiterProcesses(limit)
            processes[0].request_now(cost=limit)
            before = len(processes.cluster.uses)
            self.assertTrue(processes[1].request_now(cost=questions[-1]))
            self.assertEqual([amount for _, amount in processes.cluster.uses[before:]], questions)

    def test_smaller_request_after_refusal(self) -> None:
        """A refusal of a large cost does not imply one of a small cost."""
        processes = LimiterProcesses(60)
        processes[0].request_now(cost=55)
        self.assertEqual(processes[1].request_now(cost=10), 60)
        self.assertEqual(processes[1].request_now(cost=5), 0)


class OutageTests(SynchronousTestCase):
    """A store that does not answer neither blocks requests nor raises limits."""

    def setUp(self) -> None:
        self.processes = LimiterProcesses(60)

    def test_each_process_has_its_part(self) -> None:
        """During an outage each process admits its part of the limit; the store is tried once a second."""
        self.processes.fail()
        for _ in range(40):
            for process in self.processes.all:
                for _ in range(10):
                    process.request_now()
            self.processes.clock.advance(0.25)
        self.assertEqual([len(process.admitted) for process in self.processes.all], [20] * 3)
        self.assertLessEqual(self.processes.cluster.operations, 3 * 10)

    def test_small_limit(self) -> None:
        """Each process admits at least one."""
        processes = LimiterProcesses(2)
        processes.fail()
        self.assertEqual([[process.request_now() for _ in range(2)] for process in processes.all], [[0, 60]] * 3)

    def test_held_quota_counts(self) -> None:
        """A process uses its lease first; earlier admissions count against its part."""
        processes = LimiterProcesses(600)
        processes[0].request_now(cost=250)
        processes[0].request_now()
        processes.fail()
        held = 0
        while not processes[0].request_now():
            held += 1
        self.assertEqual(held, processes[0].allowances.lease_size(600) - 1)
        self.assertRaises(RateLimitExceeded, processes[0].admission.check_allowance, DID, PEER)
        processes[1].admission.check_allowance(DID, PEER)
        self.assertEqual([processes[1].request_now() for _ in range(250)].count(0), 200)
        self.assertRaises(RateLimitExceeded, processes[1].admission.check_allowance, DID, PEER)

    def test_slowing_the_store_gains_nothing(self) -> None:
        """A client that makes the store slow gains nothing, however often, at all processes at once."""
        self.processes.cluster.slow = True
        for _ in range(20):
            for process in self.processes.all:
                for _ in range(30):
                    process.request()
                    process.admission.charge_failure(PEER)
            self.processes.clock.advance(QUOTA_STORE_TIMEOUT)
            for process in self.processes.all:
                process.request()
            self.processes.clock.advance(QUOTA_STORE_BACKOFF)
            self.processes.cluster.release()
        self.assertGreaterEqual(len(self.processes.admitted), 57)
        self.assertLessEqual(max_in_a_minute(self.processes.admitted), 63)

    def test_store_recovers(self) -> None:
        """Once the store answers the limit holds over all processes again."""
        request_for_seconds(self.processes, cycle([0, 1, 2]), 30)
        self.processes.fail()
        request_for_seconds(self.processes, cycle([0, 1, 2]), 30)
        self.processes.cluster.away = None
        back = self.processes.clock.seconds()
        end = request_for_seconds(self.processes, cycle([0, 1, 2]), 200)
        later = [moment for moment in self.processes.admitted if moment >= back + 1]
        self.assertLessEqual(max_in_a_minute(later), 63)
        self.assertGreaterEqual(min_in_a_minute(later, back + 61, end), 57)

    def test_slow_store(self) -> None:
        """Nobody waits longer than half a second, and then the store is not used for a second."""
        self.processes.cluster.slow = True
        waiting = [self.processes[0].request() for _ in range(5)]
        for message in waiting:
            self.assertNoResult(message)
        self.processes.clock.advance(QUOTA_STORE_TIMEOUT)
        self.assertEqual([self.successResultOf(message) for message in waiting], [0] * 5)
        self.assertEqual(self.successResultOf(self.processes[0].request("did:example:other")), 0)
        self.assertEqual(self.processes.cluster.operations, 1)
        self.processes.clock.advance(QUOTA_STORE_BACKOFF)
        self.assertNoResult(self.processes[0].request())
        self.assertEqual(self.successResultOf(self.processes[0].request("did:example:other")), 0)
        self.assertEqual(self.processes.cluster.operations, 2)

    def test_request_deadline(self) -> None:
        """
        A request waits for its remaining time, others in the same operation longer, and the answer counts for all.
        """
        self.processes.cluster.slow = True
        clock, process = self.processes.clock, self.processes[0]
        with request_deadline(clock):
            clock.advance(REQUEST - QUOTA_STORE_TIMEOUT / 2)
            deferred = process.request()
        other = process.request()
        clock.advance(QUOTA_STORE_TIMEOUT / 2)
        self.assertEqual(self.successResultOf(deferred), 0)
        self.assertNoResult(other)
        self.processes.cluster.slow = False
        self.processes.cluster.release()
        self.assertEqual(self.successResultOf(other), 0)
        self.assertEqual([process.request_now() for _ in range(60)].count(0), 58)
        self.assertEqual(clock.getDelayedCalls(), [])

    def test_query_is_independent_of_request(self) -> None:
        """The operation has no request deadline, as others wait for it too."""
        deadlines: list[float] = []
        take = self.processes.cluster.take_quota

        def noting(*args: Any, **options: Any) -> Deferred[float]:
            deadlines.append(get_request_start(inf))
            result: Deferred[float] = take(*args, **options)
            return result

        self.patch(self.processes.cluster, "take_quota", noting)
        with request_deadline(self.processes.clock):
            self.processes[0].request_now()
        self.assertEqual(deadlines, [inf])

    def test_late_answer(self) -> None:
        """A late answer does no harm."""
        self.processes.cluster.slow = True
        for away in (None, RuntimeError("boom")):
            self.processes.cluster.away = None
            deferred = self.processes[0].request()
            self.processes.clock.advance(QUOTA_STORE_TIMEOUT)
            self.assertEqual(self.successResultOf(deferred), 0)
            self.processes.cluster.away = away
            self.processes.cluster.release()
            self.processes.clock.advance(QUOTA_STORE_BACKOFF)
        self.assertEqual(self.processes.clock.getDelayedCalls(), [])

    def test_concurrent_requests_after_recovery(self) -> None:
        """Once the store has answered, concurrent requests wait for it again and none is admitted without."""
        self.processes.fail()
        self.processes[0].request_now()
        self.processes.cluster.away = None
        self.processes.clock.advance(QUOTA_STORE_BACKOFF)
        self.processes[0].request_now()
        self.processes.cluster.slow = True
        deferreds = [self.processes[0].request(f"did:example:{number}") for number in range(3)]
        for deferred in deferreds:
            self.assertNoResult(deferred)
        self.assertEqual(len(self.processes.cluster.held), 3)
        self.processes.cluster.release()
        self.assertEqual([self.successResultOf(deferred) for deferred in deferreds], [0] * 3)
        self.assertEqual(self.processes.clock.getDelayedCalls(), [])

    def test_programming_error(self) -> None:
        """A programming error is logged and refuses nobody."""
        self.processes.cluster.away = RuntimeError("boom")
        self.assertEqual(self.processes[0].request_now(), 0)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_known_refusals_hold(self) -> None:
        """An outage does not cancel known refusals."""
        while not self.processes[0].request_now():
            pass
        self.assertTrue(self.processes[1].request_now())
        self.processes.fail()
        self.assertTrue(self.processes[1].request_now())


class ConcurrentTests(SynchronousTestCase):
    """Requests that arrive during a store operation."""

    def setUp(self) -> None:
        self.processes = LimiterProcesses(600)
        self.cluster = self.processes.cluster
        self.cluster.slow = True

    @staticmethod
    def record(order: list[int], number: int, wait: int) -> None:
        order.append(number)

    def test_changed_limit(self) -> None:
        """A changed limit applies at once at each reloaded process, also after a refusal."""
        processes = LimiterProcesses(6)
        one, two = processes[0], processes[1]
        self.assertEqual(
            [bool(process.request_now()) for process in (one, two) for _ in range(4)], [False] * 6 + [True] * 2
        )
        for process in (one, two):
            process.admission.set_limits(RateLimits(8, 8, 8))
        self.assertEqual(
            [bool(process.request_now()) for process in (two, one) for _ in range(2)], [False, False, True, True]
        )
        one.admission.set_limits(RateLimits(1, 1, 1))
        processes.clock.advance(61)
        self.assertEqual([bool(one.request_now()) for _ in range(2)], [False, True])

    def test_one_operation_for_all(self) -> None:
        """Requests wait for the same answer, in order of arrival."""
        order: list[int] = []
        for number in range(8):
            self.processes[0].request().addCallback(partial(self.record, order, number))
        self.cluster.release()
        self.assertEqual(order, list(range(8)))
        self.assertEqual([amount for _, amount in self.cluster.uses], [10])

    def test_more_than_a_lease(self) -> None:
        """Requests that the first answer does not cover share the next operation."""
        deferreds = [self.processes[0].request() for _ in range(45)]
        self.cluster.release()
        self.cluster.release()
        self.assertEqual([self.successResultOf(deferred) for deferred in deferreds], [0] * 45)
        self.assertEqual([amount for _, amount in self.cluster.uses], [10, 35])

    def test_more_than_the_quota(self) -> None:
        """As many as possible are admitted, the others refused; none is forgotten and nothing is left over."""
        deferreds = [process.request() for _ in range(600) for process in self.processes.all]
        while self.cluster.held:
            self.cluster.release()
        answers = [self.successResultOf(deferred) for deferred in deferreds]
        self.assertEqual(answers.count(0), 600)
        self.assertLess(self.cluster.operations, 60)

    def test_large_among_small_requests(self) -> None:
        """A request that costs too much is refused, and the others are served."""
        self.cluster.slow = False
        self.processes[1].request_now(cost=580)
        self.cluster.slow = True
        large, small = self.processes[0].request(cost=30), self.processes[0].request()
        while self.cluster.held:
            self.cluster.release()
        self.assertEqual((self.successResultOf(large), self.successResultOf(small)), (60, 0))

    def test_order_of_arrival(self) -> None:
        """A small request does not use what an earlier one waits for."""
        self.cluster.slow = False
        self.processes[0].request_now()
        self.cluster.slow = True
        large, small = self.processes[0].request(cost=30), self.processes[0].request()
        self.assertNoResult(small)
        self.cluster.release()
        self.cluster.release()
        self.assertEqual((self.successResultOf(large), self.successResultOf(small)), (0, 0))

    def test_keys_are_independent(self) -> None:
        """Each key has its own queue."""
        self.processes[0].request()
        self.processes[0].request("did:example:bob")
        self.assertEqual(len({key for key, _ in self.cluster.uses}), 2)

    def test_cancelled_request(self) -> None:
        """The others get their answer."""
        first, second = self.processes[0].request(), self.processes[0].request()
        first.addErrback(lambda _: None)
        first.cancel()
        self.cluster.release()
        self.assertEqual(self.successResultOf(second), 0)


class LateChargeTests(SynchronousTestCase):
    """Charges made afterwards, and refunds."""

    def setUp(self) -> None:
        self.processes = LimiterProcesses(60)
        self.cluster = self.processes.cluster

    def start_reading(self, number: int, size: int = 100_000) -> Deferred[None]:
        """A process starts to read a body of an address."""
        return Deferred.fromCoroutine(self.processes[number].admission.check_before_read(PEER, size))

    def fail_reading(self, number: int) -> bool:
        """An address sends a body that cannot be decrypted; returns whether it was read at all."""
        reading = self.start_reading(number)
        if reading.result is not None:
            self.failureResultOf(reading)
            return False
        self.processes[number].admission.charge_failure(PEER)
        return True

    def test_failed_reads(self) -> None:
        """An address gets its limit of failed reads, plus one for each process."""
        for pace, expected in ((0.0, 63), (0.125, 63), (1.5, 63)):
            self.processes = LimiterProcesses(60)
            read = []
            for step in range(1500):
                if self.fail_reading(step % 3):
                    read.append(self.processes.clock.seconds())
                self.processes.clock.advance(pace)
            self.assertLessEqual(max_in_a_minute(read), expected)
            self.assertGreaterEqual(max_in_a_minute(read), 57 if pace < 1 else 39)

    def test_failed_reads_do_not_wait(self) -> None:
        """The store is updated in the background, for several at once."""
        self.cluster.slow = True
        for _ in range(5):
            self.processes[0].admission.charge_failure(PEER)
        self.assertEqual(len(self.cluster.held), 1)
        self.cluster.release()
        self.cluster.release()
        self.assertEqual([amount for _, amount in self.cluster.uses], [1, 4])

    def test_failed_read_while_a_request_waits(self) -> None:
        """Quota taken for a request is kept until it covers both."""
        processes = LimiterProcesses(600)
        processes.cluster.slow = True
        charge = Deferred.fromCoroutine(processes[0].admission.charge_anonymous(PEER, 30))
        processes[0].admission.charge_failure(PEER)
        processes.cluster.release()
        self.assertNoResult(charge)
        processes.cluster.release()
        self.successResultOf(charge)
        self.assertEqual([amount for _, amount in processes.cluster.uses], [30, 10])

    def test_debt_is_paid_first(self) -> None:
        """An address that used up its minute at another process is not read here again."""
        for _ in range(60):
            self.processes[0].admission.charge_failure(PEER)
        self.assertTrue(self.fail_reading(1))
        self.assertFalse(self.fail_reading(1))
        self.processes.clock.advance(60)
        self.assertTrue(self.fail_reading(1))

    def test_failed_reads_spread_over_a_minute(self) -> None:
        """The limit also holds where quota becomes free gradually and all requests wait."""
        processes = self.processes = LimiterProcesses(120)
        read = []
        for pace in (0.5, 0.05):
            for step in range(1200):
                if self.fail_reading(step % 3):
                    read.append(processes.clock.seconds())
                processes.clock.advance(pace)
        self.assertLessEqual(max_in_a_minute(read), 126)
        self.assertGreaterEqual(max_in_a_minute(read), 114)

    def test_refused_charges_are_not_counted(self) -> None:
        """A refused charge does not use up the process's window."""
        for number in (0, 1):
            for _ in range(60):
                self.processes[number].admission.charge_failure(PEER)
            self.processes.clock.advance(50)
        self.processes.fail()
        self.assertEqual([self.fail_reading(1) for _ in range(61)].count(True), 19)

    def test_known_refusal_precedes_work(self) -> None:
        """An account or address that used up its minute elsewhere is refused before any work is done."""
        first, second = self.processes[0].admission, self.processes[1].admission
        while not self.processes[0].request_now():
            pass
        for _ in range(60):
            first.charge_failure(PEER)
        second.check_allowance(DID, PEER)
        second.check_allowance(None, PEER)
        second.check_before_decryption(PEER, authenticated=False)
        self.processes[1].request_now()
        second.charge_failure(PEER)
        before = self.cluster.operations
        self.assertRaises(RateLimitExceeded, second.check_allowance, DID, PEER)
        self.assertRaises(RateLimitExceeded, second.check_allowance, None, PEER)
        self.assertRaises(RateLimitExceeded, second.check_before_decryption, PEER, authenticated=False)
        self.assertEqual(self.cluster.operations, before)

    def test_flood_of_failed_reads_is_cheap(self) -> None:
        """It costs no store operations, nor, once the minute is used up, time to read."""
        for number in range(300):
            self.fail_reading(number % 3)
        before = self.cluster.operations
        for number in range(300):
            self.assertFalse(self.fail_reading(number % 3))
        self.assertEqual(self.cluster.operations, before)

    def test_refund(self) -> None:
        """A refund can be used here or elsewhere, and nothing is refunded that was not charged."""
        for _ in range(60):
            self.assertEqual(self.processes[0].request_now(), 0)
        self.processes[0].admission.refund(DID, PEER, outgoing=False)
        self.assertEqual(self.processes[1].request_now(), 0)
        self.assertTrue(self.processes[0].request_now())
        self.processes.clock.advance(120)
        before = len(self.cluster.put_backs)
        self.processes[0].admission.refund(DID, PEER, outgoing=False)
        self.processes[0].admission.refund("did:example:nobody", PEER, outgoing=False)
        self.assertEqual(len(self.cluster.put_backs), before)

    def test_refund_after_refusal(self) -> None:
        """Quota refused before is available after a refund."""
        self.processes[1].request_now()
        while not self.processes[0].request_now():
            pass
        self.processes[0].admission.refund(DID, PEER, outgoing=False)
        self.assertEqual((self.processes[0].request_now(), self.processes[0].request_now()), (0, 60))

    def test_refund_into_lease(self) -> None:
        """A process keeps what its lease may hold: that costs no operation."""
        processes = LimiterProcesses(600)
        processes[0].request_now()
        processes[0].request_now()
        processes[0].admission.refund(DID, PEER, outgoing=False)
        self.assertEqual(processes.cluster.put_backs, [])
        processes[0].admission.refund(DID, PEER, outgoing=False)
        self.assertEqual([amount for _, amount in processes.cluster.put_backs], [1])

    def test_refund_during_outage(self) -> None:
        """A refund lost in an outage does no harm."""
        self.processes[0].request_now()
        self.processes.fail()
        self.processes[0].admission.refund(DID, PEER, outgoing=False)
        self.cluster.away = RuntimeError("boom")
        self.processes[0].admission.refund(DID, PEER, outgoing=False)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_refusal_is_free_in_this_process(self) -> None:
        """Quota used up by others is not counted in this process."""
        for _ in range(60):
            self.processes[0].request_now()
        for _ in range(100):
            self.processes[1].request_now()
        self.processes.fail()
        self.processes.clock.advance(60)
        self.assertEqual([self.processes[1].request_now() for _ in range(61)].count(0), 20)


class KeyTests(SynchronousTestCase):
    """Keys in the store, and cached keys."""

    def test_keys_are_pseudonymous(self) -> None:
        """Keys have 16 bytes, and differ between buckets and secrets."""
        processes = LimiterProcesses(60)
        admission = processes[0].admission
        processes[0].request_now()
        admission.charge_failure(PEER)
        for charge in (
            admission.charge_anonymous(PEER),
            admission.charge_sender(DID, None, PEER),
            admission.charge_public_read(PEER),
        ):
            self.successResultOf(Deferred.fromCoroutine(charge))
        keys = [key for key, _ in processes.cluster.uses]
        self.assertEqual({len(key) for key in keys}, {16})
        self.assertEqual(len(set(keys)), 4)
        self.assertNotEqual(processes[0].key, LimiterProcesses(60, secret=b"other")[0].key)
        self.assertEqual(processes[0].key, processes[1].key)

    def test_any_text(self) -> None:
        """A claimed sender may be any text."""
        self.assertEqual(LimiterProcesses(60)[0].request_now("did:example:\ud800" + "x" * 100_000), 0)


# Kind of operation, process, cost, and eighths of a second before the next.
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
def test_limit_is_never_exceeded_by_more_than_5_percent(limit: int, steps: list[tuple[str, int, int, int]]) -> None:
    """For any requests at any times at any process, joining ones included; a small limit is never exceeded."""
    processes = LimiterProcesses(limit, count=1)
    for what, number, amount, gap in steps:
        process = processes[number % len(processes.all)]
        if what == "join" and len(processes.all) < 4:
            processes.join()
        elif what == "flood":
            while not process.request_now():
                pass
        elif what == "back" and process.admitted[-1:] == [processes.clock.seconds()]:
            process.admission.refund(DID, PEER, outgoing=False)
            process.admitted.pop()
        else:
            process.request_now(cost=min(amount, limit))
        processes.clock.advance(gap / 8)
    assert max_in_a_minute(processes.admitted) <= limit + limit // 20


class MemoryTests(SynchronousTestCase):
    """Number of cached keys."""

    def setUp(self) -> None:
        self.processes = LimiterProcesses(60)
        self.share = DistributedLimiter(
            self.processes.clock, self.processes[0].allowances, "bucket", 1200, max_keys=100
        )

    def request(self, who: str, cost: int = 1) -> float:
        return self.successResultOf(Deferred.fromCoroutine(self.share.take(who, cost)))

    def test_number_of_keys_is_bounded(self) -> None:
        """The key unused for longest goes first; its lease is returned, so that it is not missing."""
        for number in range(100):
            self.request(f"{number}")
        self.request("0")
        self.request("new")
        before = len(self.processes.cluster.uses)
        self.request("0")
        self.assertEqual(len(self.processes.cluster.uses), before)
        self.request("1")
        self.assertEqual(len(self.processes.cluster.uses), before + 1)
        self.assertLessEqual(len(self.share._leases), 100)
        held = {self.processes[0].allowances.make_key("bucket", who): 19 for who in ("1", "2")}
        self.assertEqual(dict(self.processes.cluster.put_backs), held)

    def test_forgotten_during_operation(self) -> None:
        """A lease returned for a key is not used by its waiting requests too."""
        self.request("asking")
        self.processes.cluster.slow = True
        deferreds = Deferred.fromCoroutine(self.share.take("asking", 25))
        self.processes.cluster.slow = False
        for number in range(100):
            self.request(f"{number}")
        key = self.processes[0].allowances.make_key("bucket", "asking")
        (given_back,) = [amount for of, amount in self.processes.cluster.put_backs if of == key]
        self.processes.cluster.slow = True
        for _ in range(3):
            self.processes.cluster.release()
        self.assertEqual(self.successResultOf(deferreds), 0)
        used = sum([amount for of, amount in self.processes.cluster.uses if of == key])
        self.assertGreaterEqual(used - given_back, 1 + 25)

    def test_expired_keys_are_forgotten(self) -> None:
        """Memory follows current use."""
        for number in range(90):
            self.request(f"{number}")
        self.processes.clock.advance(61)
        for number in range(50):
            self.request(f"new {number}")
        self.assertEqual(len(self.share._leases), 50)

    def test_keys_in_use_are_kept(self) -> None:
        """Keys with waiting requests, refusals or leases are not dropped for a new one."""
        self.processes.cluster.slow = True
        deferreds = [Deferred.fromCoroutine(self.share.take("asking", 1))]
        self.processes.cluster.slow = False
        for known in (
            lambda: self.request("refused", 1200),
            lambda: self.request("refused"),
            lambda: self.request("left"),
        ):
            known()
            for number in range(10):
                self.request(f"{number}")
        before = self.processes.cluster.operations
        self.assertGreater(self.request("refused"), 0)
        self.request("left")
        deferreds.append(Deferred.fromCoroutine(self.share.take("asking", 1)))
        self.assertEqual(self.processes.cluster.operations, before)
        self.processes.cluster.release()
        self.assertEqual([self.successResultOf(deferred) for deferred in deferreds], [0, 0])
