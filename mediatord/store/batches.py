"""What is asked for in one turn of the reactor goes to the thread in one hop."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.python.failure import Failure

from mediatord.errors import StoreUnavailable
from mediatord.store.group_commit import Outcome, Work
from mediatord.store.operation_observer import Bounds, Observer, log_fault, unobserved  # noqa: F401
from mediatord.store.threads import ConnectionThread

T = TypeVar("T")

Perform = Callable[[sqlite3.Connection, Sequence[Work]], list[Outcome]]


class _Answer:
    """
    Where the outcomes of operations go that were asked for together: there is one Deferred for all of them.

    :ivar early: told of those that are done while others are not: the place of the first, and their outcomes.
    """

    __slots__ = ("deferred", "early", "number", "outcomes", "told")

    def __init__(self, number: int, early: Callable[[int, list[Outcome]], None] | None) -> None:
        self.number = number
        self.early = early
        self.outcomes: list[Outcome] = []
        self.told = 0
        self.deferred: Deferred[list[Outcome]] = Deferred()

    def settle(self, outcome: Outcome) -> None:
        """The next of them is done."""
        self.outcomes.append(outcome)
        if len(self.outcomes) == self.number:
            self.deferred.callback(self.outcomes)

    def tell_early(self) -> None:
        """A batch is done that may not have been the last with operations of this answer."""
        if self.early is not None and len(self.outcomes) < self.number:
            told, self.told = self.told, len(self.outcomes)
            try:
                self.early(told, self.outcomes[told:])
            except Exception as error:
                log_fault("telling of operations failed", error)


class _Operation:
    __slots__ = ("answer", "name", "since", "size", "work")

    def __init__(self, name: str, work: Work, size: int, since: float, answer: _Answer) -> None:
        self.name = name
        self.work = work
        self.size = size
        self.since = since
        self.answer = answer


class Batches:
    """
    Collects operations until the end of the reactor's turn, or while a batch is being performed, and has them
    performed together. Their Deferreds fire when the whole batch is done.

    :param on_fault: told what an operation failed of below.
    :param gather: seconds for which a batch waits for more at most, as long as every turn brings some, and never for
        more than an eighth of what the last one took: where the disk is slow, those who have just been answered come
        back in that time, and one wait for it will do for all.
    """

    def __init__(
        self,
        thread: ConnectionThread,
        perform: Perform,
        clock: IReactorTime,
        observe: Observer,
        bounds: Bounds,
        *,
        on_fault: Callable[[BaseException], None] = lambda error: None,
        gather: float = 0.0,
    ) -> None:
        self._thread = thread
        self._on_fault = on_fault
        self._perform = perform
        self._clock = clock
        self._observe = observe
        self._bounds = bounds
        self._gather = gather
        self._took = 0.0
        self._gathering_until = 0.0
        self._gathered = 0
        self._waiting: deque[_Operation] = deque()
        self._waiting_bytes = 0
        self._after_batch: Callable[[float], None] | None = None
        self._accepting = False
        self._busy = False
        self._drained: Deferred[None] | None = None
        self._quiet_until = 0.0
        self._failed = 0

    @property
    def held(self) -> tuple[int, int]:
        """How many operations wait, and the bytes that they hold on to."""
        return len(self._waiting), self._waiting_bytes

    @property
    def accepting(self) -> bool:
        return self._accepting

    def start(self, after_batch: Callable[[float], None] | None = None) -> None:
        """
        Accept operations.

        :param after_batch: called with the seconds each batch took, before its Deferreds fire.
        """
        self._after_batch = after_batch
        self._accepting = True

    def submit(self, name: str, work: Callable[[sqlite3.Connection], T], size: int = 0) -> Deferred[T]:
        """
        Have `work` performed with the next batch.

        :param size: bytes it holds on to while it waits.
        :raise StoreUnavailable: not started, stopped, or too much is waiting already.
        """
        return self.submit_each(name, [(work, size)]).addCallback(_only)

    def submit_each(
        self,
        name: str,
        works: Sequence[tuple[Work, int]],
        early: Callable[[int, list[Outcome]], None] | None = None,
    ) -> Deferred[list[Outcome]]:
        """
        The same with several, each of which may have another outcome; there is at least one.

        :param works: each with its size.
        :param early: told of those that are done while others wait for a later batch: the place of the first, and
            their outcomes.
        :raise StoreUnavailable: as :meth:`submit`, for all of them.
        """
        bounds, size = self._bounds, sum([size for _, size in works])
        full = len(self._waiting) >= bounds.waiting or self._waiting_bytes + size > bounds.waiting_bytes
        if full or not self._accepting:
            return fail(StoreUnavailable())
        answer, now = _Answer(len(works), early), self._clock.seconds()
        self._waiting.extend([_Operation(name, work, size, now, answer) for work, size in works])
        self._waiting_bytes += size
        if not self._busy:
            self._schedule()
        return answer.deferred

    def stop(self) -> Deferred[None]:
        """Accept no more; fires when everything that was accepted is done."""
        self._accepting = False
        if not self._busy:
            return succeed(None)
        self._drained = Deferred()
        return self._drained

    def _schedule(self) -> None:
        self._busy = True
        self._gathered = 0
        if self._gather:
            self._gathering_until = self._clock.seconds() + min(self._took / 8, self._gather)
        self._clock.callLater(0, self._begin)

    def _begin(self) -> None:
        now = self._clock.seconds()
        if self._goes_on_gathering(now):
            self._clock.callLater(0, self._begin)
            return
        batch = self._next_batch()
        works = [operation.work for operation in batch]
        done = self._thread.run(lambda connection: self._perform(connection, works))
        done.addErrback(self._not_performed, len(batch))
        done.addCallback(self._finish, batch, now)

    def _goes_on_gathering(self, now: float) -> bool:
        """Whether the turn has brought more, and there is room and time for more still."""
        before, self._gathered = self._gathered, len(self._waiting)
        return before < self._gathered < self._bounds.batch and now < self._gathering_until

    def _next_batch(self) -> list[_Operation]:
        """At least one, then as many as fit."""
        batch: list[_Operation] = []
        size = 0
        while self._waiting and len(batch) < self._bounds.batch:
            size += self._waiting[0].size
            if batch and size > self._bounds.batch_bytes:
                break
            batch.append(self._waiting.popleft())
            self._waiting_bytes -= batch[-1].size
        return batch

    def _take_all(self) -> list[_Operation]:
        waiting = list(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        return waiting

    def _not_performed(self, failure: Failure, number: int) -> list[Outcome]:
        return [Outcome(error=StoreUnavailable(), cause=failure.value) for _ in range(number)]

    def _finish(self, outcomes: list[Outcome], batch: list[_Operation], begun: float) -> None:
        now = self._clock.seconds()
        self._took = now - begun
        if self._after_batch is not None:
            self._after_batch(self._took)
        self._report([outcome.cause for outcome in outcomes if outcome.cause is not None], now)
        if outcomes[-1].locked_out:
            # Whoever waits has waited for the same lock, and would wait as long again.
            late = self._take_all()
            batch, outcomes = [*batch, *late], [*outcomes, *(Outcome(error=StoreUnavailable()) for _ in late)]
        self._busy = False
        if self._waiting:
            self._schedule()
        for operation, outcome in zip(batch, outcomes, strict=True):
            operation.answer.settle(outcome)
        # Of all that were asked for together with others only the last ones may go on in the next batch.
        batch[-1].answer.tell_early()
        for operation in batch:
            self._observe(operation.name, now - operation.since)
        if self._drained is not None and not self._busy:
            drained, self._drained = self._drained, None
            drained.callback(None)

    def _report(self, faults: list[BaseException], now: float) -> None:
        """Log a fault, but no more than one a second: a full disk fails everything."""
        self._failed += len(faults)
        if faults and now >= self._quiet_until:
            log_fault(f"operations failed ({self._failed})", faults[0])
            self._quiet_until = now + 1.0
            self._failed = 0
        for fault in faults:
            self._on_fault(fault)


def _only(outcomes: list[Outcome]) -> Any:
    (outcome,) = outcomes
    # Not raised: the traceback would lead back here, and to the outcome itself.
    return outcome.value if outcome.error is None else Failure(outcome.error)
