"""Rate limits over several nodes on a real MongoDB server, in real time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

import pytest
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.task import LoopingCall, deferLater

from mediatord.errors import RateLimitExceeded
from mediatord.ratelimit import distributed_limiter
from mediatord.ratelimit.distributed_limiter import QuotaStore
from mediatord.ratelimit.rate_limiter import RateLimiter, RateLimits, SlidingWindowLimiter, resolve_wait
from mediatord.store.interfaces.cluster_and_quotas import QUOTA_WINDOW_SLOTS
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.mongo.store import MongoStore
from tests.ratelimit.rate_limiter_processes import DID, PEER, max_in_a_minute, min_in_a_minute
from tests.store.mongo.mongo_test_case import CLOCK, MongoTestCase

# Seconds: the period, which is a minute in production, and the number of periods observed.
PERIOD = 10.0
PERIODS = 2.3
NODES = 3


class LimiterLoad:
    """
    Sends more requests than allowed to all nodes in turn.

    :ivar admitted: times of admissions.

    :ivar slowest: longest wait for an answer, or longest pause between requests: the process was not scheduled.
    """

    def __init__(self, buckets: Sequence[SlidingWindowLimiter], limit: int) -> None:
        self.limit = limit
        self.admitted: list[float] = []
        self.slowest = 0.0
        self._buckets = cycle(buckets)
        self._asked = CLOCK.seconds()
        self._asking: list[Deferred[None]] = []

    async def run(self, seconds: float) -> None:
        """Send three times as many requests as allowed."""
        self._asked = CLOCK.seconds()
        loop = LoopingCall.withCount(self._request)
        loop.clock = CLOCK
        done = loop.start(PERIOD / self.limit / 3)
        await deferLater(CLOCK, seconds)
        loop.stop()
        await done
        await gatherResults(self._asking)

    def _request(self, times: int) -> None:
        self.slowest, self._asked = max(self.slowest, CLOCK.seconds() - self._asked), CLOCK.seconds()
        for _ in range(times):
            self._asking.append(Deferred.fromCoroutine(self._request_one(next(self._buckets))))

    async def _request_one(self, bucket: SlidingWindowLimiter) -> None:
        start = CLOCK.seconds()
        wait = await resolve_wait(bucket.admit(DID, start))
        now = CLOCK.seconds()
        self.slowest = max(self.slowest, now - start)
        if not wait:
            self.admitted.append(now)


class DistributedLimiterTests(MongoTestCase):
    """Three nodes, each with its own store object. The test tolerates a busy machine."""

    time_limit = 60.0

    async def make_node(self) -> QuotaStore:
        store = MongoStore(self.make_client(), CLOCK, QueueLimits())
        self.addCleanup(store.close)
        await store.open()
        return QuotaStore(CLOCK, store.cluster, lambda: NODES, secret=b"secret")

    def _wait_for_slow_answers(self) -> None:
        """Wait for answers of the store, also beyond the time of a request."""
        self.patch(distributed_limiter, "QUOTA_STORE_TIMEOUT", 60.0)
        self.patch(distributed_limiter, "get_time_left", lambda _: 60.0)

    @pytest.mark.exhaustive
    async def test_within_5_percent(self) -> None:
        """The limit holds in any period; admissions may be earlier by the time an answer took."""
        self._wait_for_slow_answers()
        nodes = [await self.make_node() for _ in range(NODES)]
        loads = [
            LimiterLoad([node.make_limiter(f"limit of {limit}", limit, PERIOD) for node in nodes], limit)
            for limit in (60, 120, 600)
        ]
        start = CLOCK.seconds()
        await gatherResults([Deferred.fromCoroutine(load.run(PERIODS * PERIOD)) for load in loads])
        for load in loads:
            admitted, limit, delay = sorted(load.admitted), load.limit, load.slowest
            self.assertLessEqual(max_in_a_minute(admitted, PERIOD - delay), limit * 1.05, f"{delay} s")
            longer = PERIOD + PERIOD / QUOTA_WINDOW_SLOTS + 2 * delay
            fewest = min_in_a_minute(admitted, start, start + PERIODS * PERIOD, longer)
            self.assertGreaterEqual(fewest, limit * 0.95, f"{delay} s")

    async def test_burst_at_all_nodes(self) -> None:
        """Of requests at all nodes at the same time exactly the limit is admitted."""
        self._wait_for_slow_answers()
        limits = (60, 120, 600)
        stores = [await self.make_node() for _ in range(NODES)]
        nodes = [RateLimiter(CLOCK, lambda *_: None, RateLimits(*limits), store.make_limiter) for store in stores]
        answers = await gatherResults(
            [
                Deferred.fromCoroutine(charge).addCallbacks(lambda _: True, self.count_refusal)
                for _ in range(250)
                for node in nodes
                for charge in (
                    node.charge_sender(DID, None, PEER),
                    node.charge_anonymous(PEER),
                    node.charge_account(DID, PEER),
                )
            ]
        )
        for number, limit in enumerate(limits):
            self.assertGreaterEqual(sum(answers[number::3]), limit * 0.95)
            self.assertLessEqual(sum(answers[number::3]), limit)
        self.assertNotIn(DID, repr(list(self.documents["quotas"].find())))

    def count_refusal(self, failure: Any) -> bool:
        failure.trap(RateLimitExceeded)
        return False
