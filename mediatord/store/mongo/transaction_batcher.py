"""Batching of concurrent operations into shared transactions, and shedding of load that exceeds the time limit."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IDelayedCall
from twisted.internet.task import Cooperator
from twisted.logger import Logger

from mediatord.errors import MediatorError, StoreUnavailable
from mediatord.runtime.failure_logging import LogThrottle
from mediatord.store.interfaces.store import BatchLimits, log_store_fault
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.errors import (
    ENCODING_ERRORS,
    DuplicateKeyError,
    MongoCommandError,
    ServerUnreachable,
)
from mediatord.store.mongo.driver.operation import Operation

# Conflicts of works that share a transaction before they are divided.
_MAX_SHARED_TRIES = 2
# Shares of the time limit: after the first work has waited this long, more is rejected; and works of requests that
# began this long ago are rejected, since they would hardly be done in time.
_MAX_WAIT_SHARE, _MAX_AGE_SHARE = 0.4, 0.6
# Seconds between the starts of requests that share a batch, which has the deadline of the earliest.
_MAX_START_SPREAD = 0.25
# Seconds between checks whether waiting works are too old.
_STALE_CHECK_INTERVAL = 0.1
# With this many works waiting, batches are larger: a process that is so busy is slow to start the next one.
_LARGE_BACKLOG, _LARGE_BATCH = 2_500, 512

_log = Logger(namespace="mediatord.store")


# Does works of a kind in their order, in one transaction: is called with them and with the tries of
# :meth:`~mediatord.store.mongo.driver.transactions.TransactionRunner.transact`, and returns for each an answer or a
# MediatorError.
BatchOperation = Callable[[Operation, Sequence[Any], int | None], Awaitable[Sequence[Any]]]


@dataclass(eq=False, slots=True)
class _PendingWork:
    """
    :param since: when it was submitted.
    :param began: when its request began.
    """

    name: str
    batch_operation: BatchOperation
    work: Any
    keys: Collection[Hashable]
    size: int
    since: float
    began: float
    answer: Deferred[Any] = field(default_factory=Deferred)


class TransactionBatcher:
    """
    Collects works until the end of the reactor iteration, or while enough batches are running.

    Works with a common key are done in the order of submission and never at the same time, since they would conflict.

    :param name: of a batch, for the metric; works of the same name are not observed apart from it.
    :param at_once: batches that may run at a time.
    """

    def __init__(
        self,
        client: ReplicaSetClient,
        name: str = "commit",
        *,
        at_once: int,
        bounds: BatchLimits = BatchLimits(),  # noqa: B008  it is frozen
    ) -> None:
        self._client = client
        self._name = name
        self._clock = client.clock
        self._at_once = at_once
        self._bounds = bounds
        self._waiting: deque[_PendingWork] = deque()
        self._waiting_bytes = 0
        # When the earliest request of waiting works began.
        self._earliest = inf
        self._busy: set[Hashable] = set()
        self._running = 0
        self._accepting = False
        self._scheduled = False
        self._stale_timer: IDelayedCall | None = None
        self._drained: Deferred[None] | None = None
        self._refused: deque[Deferred[Any]] = deque()
        # Rejects for a part of each reactor iteration only: clients that retry at once would otherwise leave no time
        # for accepted operations.
        self._cooperator = Cooperator(scheduler=lambda step: self._clock.callLater(0, step))
        self._refusal_throttle = LogThrottle(client.clock)

    @property
    def held(self) -> tuple[int, int]:
        """Number and bytes of waiting works."""
        return len(self._waiting), self._waiting_bytes

    def start(self) -> None:
        self._accepting = True

    def submit(
        self, name: str, batch_operation: BatchOperation, work: Any, keys: Collection[Hashable], size: int = 0
    ) -> Deferred[Any]:
        """
        Submit a work; fire with its answer.

        :param name: of the operation, for the metric.
        :param size: bytes of its data.
        """
        bounds, now = self._bounds, self._clock.seconds()
        began = self._client.request_started_at
        if not self._accepting or not self._client.is_available or began <= self._get_age_limit(now):
            return fail(StoreUnavailable())
        full = len(self._waiting) >= bounds.waiting or self._waiting_bytes + size > bounds.waiting_bytes
        if full or (self._waiting and now - self._waiting[0].since > _MAX_WAIT_SHARE * self._client.time_limit):
            return self._refuse(Deferred())
        waiting = _PendingWork(name, batch_operation, work, keys, size, now, began)
        self._waiting.append(waiting)
        self._waiting_bytes += size
        self._earliest = min(self._earliest, began)
        self._schedule()
        if self._running:
            self._schedule_stale_check()
        return waiting.answer

    def drain(self) -> Deferred[None]:
        """Reject further works; fire when all others are done."""
        self._accepting = False
        for _ in self._reject_refused():
            pass
        if self._stale_timer is not None:
            self._stale_timer.cancel()
            self._stale_timer = None
        if not self._waiting and not self._running:
            return succeed(None)
        self._drained = Deferred()
        return self._drained

    def _refuse(self, answer: Deferred[Any]) -> Deferred[Any]:
        """Make a Deferred fail with StoreUnavailable shortly."""
        if not self._refused:
            self._cooperator.cooperate(self._reject_refused())
        self._refused.append(answer)
        if number := self._refusal_throttle.count_occurrence():
            _log.warn("MongoDB is overloaded: rejected {number} operations", number=number)
        return answer

    def _reject_refused(self) -> Iterator[None]:
        while self._refused:
            self._refused.popleft().errback(StoreUnavailable())
            yield

    def _schedule(self) -> None:
        if not self._scheduled and self._running < self._at_once:
            self._scheduled = True
            self._clock.callLater(0, self._begin)

    def _begin(self) -> None:
        self._scheduled = False
        self._drop_stale()
        while self._running < self._at_once and (batch := self._next_batch()):
            self._running += 1
            Deferred.fromCoroutine(self._perform(batch))
        self._schedule_stale_check()
        self._fire_drained()

    def _get_age_limit(self, now: float) -> float:
        """Works of requests that began at this time or before are rejected."""
        return now - _MAX_AGE_SHARE * self._client.time_limit

    def _schedule_stale_check(self) -> None:
        """Reject stale works in time even if all running batches hang."""
        if self._stale_timer is None and self._waiting and self._accepting:
            self._stale_timer = self._clock.callLater(_STALE_CHECK_INTERVAL, self._check_stale)

    def _check_stale(self) -> None:
        self._stale_timer = None
        self._drop_stale()
        self._schedule_stale_check()

    def _drop_stale(self) -> None:
        """Reject works that cannot be done in time, since those of the same batch would fail with them."""
        now = self._clock.seconds()
        age_limit = self._get_age_limit(now)
        if self._earliest > age_limit:
            return
        waiting, self._waiting, self._earliest = self._waiting, deque(), inf
        for one in waiting:
            if one.began > age_limit:
                self._waiting.append(one)
                self._earliest = min(self._earliest, one.began)
            else:
                self._waiting_bytes -= one.size
                self._observe(one, now)
                self._refuse(one.answer)

    def _next_batch(self) -> list[_PendingWork]:
        """Take the first work that may start, and others of its kind and about its deadline that fit."""
        batch: list[_PendingWork] = []
        left: deque[_PendingWork] = deque()
        blocked: set[Hashable] = set(self._busy)
        size, limit = 0, self._bounds.batch
        if len(self._waiting) >= _LARGE_BACKLOG:
            limit = max(limit, _LARGE_BATCH)
        while self._waiting and len(batch) < limit:
            one = self._waiting.popleft()
            fits = size + one.size <= self._bounds.batch_bytes
            if (not batch or (fits and _can_share_batch(one, batch[0]))) and blocked.isdisjoint(one.keys):
                batch.append(one)
                size += one.size
            else:
                left.append(one)
                blocked.update(one.keys)
        left.extend(self._waiting)
        self._waiting = left
        for one in batch:
            self._busy.update(one.keys)
        self._waiting_bytes -= size
        return batch

    async def _perform(self, batch: list[_PendingWork]) -> None:
        until = min([self._clock.seconds(), *[one.began for one in batch]]) + self._client.time_limit
        answers = await self._run_operation([one.work for one in batch], batch[0], until)
        now = self._clock.seconds()
        self._running -= 1
        for one in batch:
            self._busy.difference_update(one.keys)
        if self._waiting:
            self._schedule()
        for one in batch:
            self._observe(one, now)
        for one, answer in zip(batch, answers, strict=True):
            if isinstance(answer, MediatorError):
                one.answer.errback(answer)
            else:
                one.answer.callback(answer)
        self._fire_drained()

    def _observe(self, work: _PendingWork, now: float) -> None:
        if work.name != self._name:
            self._client.observe(work.name, now - work.since)

    async def _run_operation(self, works: Sequence[Any], first: _PendingWork, until: float) -> Sequence[Any]:
        try:
            with self._client.operate(self._name, since=first.since, until=until) as run:
                return await self._run_works(first.batch_operation, works, run)
        except MediatorError as error:
            return [error.with_traceback(None)] * len(works)
        except Exception as error:
            log_store_fault("a batch failed", error)
            return [StoreUnavailable()] * len(works)

    async def _run_works(self, batch_operation: BatchOperation, works: Sequence[Any], run: Operation) -> list[Any]:
        """Return the answer to each work. If they fail together they are divided, so that only a bad one fails."""
        if run.is_over:
            return [StoreUnavailable()] * len(works)
        try:
            return list(await batch_operation(run, works, _MAX_SHARED_TRIES if len(works) > 1 else None))
        except ServerUnreachable as error:
            if len(works) == 1 or not error.connected or run.is_over:
                self._client.report_failure(self._name, error)
                return [StoreUnavailable()] * len(works)
        except (MongoCommandError, DuplicateKeyError, MediatorError, *ENCODING_ERRORS) as error:
            if len(works) == 1:
                return [self._convert_error(error)]
        half = len(works) // 2
        first = await self._run_works(batch_operation, works[:half], run)
        return first + await self._run_works(batch_operation, works[half:], run)

    def _convert_error(self, error: Exception) -> MediatorError:
        if isinstance(error, MediatorError):
            return error.with_traceback(None)
        if isinstance(error, MongoCommandError):
            self._client.report_failure(self._name, error)
        return StoreUnavailable()

    def _fire_drained(self) -> None:
        if self._drained is not None and not self._waiting and not self._running:
            drained, self._drained = self._drained, None
            drained.callback(None)


def _can_share_batch(one: _PendingWork, other: _PendingWork) -> bool:
    """Whether two works are of a kind and have about the same deadline."""
    return one.batch_operation == other.batch_operation and abs(one.began - other.began) <= _MAX_START_SPREAD
