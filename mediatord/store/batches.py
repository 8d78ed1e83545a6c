"""What is asked for in one turn of the reactor goes to the thread in one hop."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.errors import StoreUnavailable
from mediatord.store.group_commit import Outcome, Work
from mediatord.store.threads import ConnectionThread

T = TypeVar("T")

Perform = Callable[[sqlite3.Connection, Sequence[Work]], list[Outcome]]

_log = Logger(namespace="mediatord.store")


class Observer(Protocol):
    """Told how long something took, in seconds."""

    def __call__(self, operation: str, seconds: float, /) -> None: ...


def unobserved(_operation: str, _seconds: float, /) -> None:
    """Nobody wants to know."""


def log_fault(what: str, error: BaseException | None) -> None:
    """Log that something failed by the kind of error only: its text may show what was stored."""
    code = getattr(error, "sqlite_errorname", None)
    _log.error("{what}: {error} {code}", event="store.failed", what=what, error=type(error).__name__, code=code)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much goes into one batch, and how much may wait for one before more is refused."""

    batch: int = 512
    batch_bytes: int = 8_388_608
    waiting: int = 20_000
    waiting_bytes: int = 134_217_728


@dataclass(eq=False, slots=True)
class _Operation:
    name: str
    work: Work
    size: int
    since: float
    answer: Deferred[Any] = field(default_factory=Deferred)


class Batches:
    """
    Collects operations until the end of the reactor's turn, or while a batch is being performed, and has them
    performed together. Their Deferreds fire when the whole batch is done.
    """

    def __init__(
        self, thread: ConnectionThread, perform: Perform, clock: IReactorTime, observe: Observer, bounds: Bounds
    ) -> None:
        self._thread = thread
        self._perform = perform
        self._clock = clock
        self._observe = observe
        self._bounds = bounds
        self._waiting: deque[_Operation] = deque()
        self._waiting_bytes = 0
        self._after_batch: Callable[[float], None] | None = None
        self._accepting = False
        self._busy = False
        self._drained: Deferred[None] | None = None
        self._quiet_until = 0.0
        self._failed = 0

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
        bounds = self._bounds
        full = len(self._waiting) >= bounds.waiting or self._waiting_bytes + size > bounds.waiting_bytes
        if full or not self._accepting:
            return fail(StoreUnavailable())
        operation = _Operation(name, work, size, self._clock.seconds())
        self._waiting.append(operation)
        self._waiting_bytes += size
        if not self._busy:
            self._schedule()
        return operation.answer

    def stop(self) -> Deferred[None]:
        """Accept no more; fires when everything that was accepted is done."""
        self._accepting = False
        if not self._busy:
            return succeed(None)
        self._drained = Deferred()
        return self._drained

    def _schedule(self) -> None:
        self._busy = True
        self._clock.callLater(0, self._begin)

    def _begin(self) -> None:
        batch = self._next_batch()
        works = [operation.work for operation in batch]
        done = self._thread.run(lambda connection: self._perform(connection, works))
        done.addErrback(self._not_performed, len(batch))
        done.addCallback(self._finish, batch, self._clock.seconds())

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
        if self._after_batch is not None:
            self._after_batch(now - begun)
        self._report([outcome.cause for outcome in outcomes if outcome.cause is not None], now)
        if outcomes[-1].locked_out:
            # Whoever waits has waited for the same lock, and would wait as long again.
            late = self._take_all()
            batch, outcomes = [*batch, *late], [*outcomes, *(Outcome(error=StoreUnavailable()) for _ in late)]
        self._busy = False
        if self._waiting:
            self._schedule()
        for operation, outcome in zip(batch, outcomes, strict=True):
            if outcome.error is None:
                operation.answer.callback(outcome.value)
            else:
                operation.answer.errback(outcome.error)
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
