"""Works that are waiting at the same time go to the server together."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Collection, Hashable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Protocol

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IDelayedCall

from mediatord.errors import MediatorError, StoreUnavailable
from mediatord.store.batches import Bounds, log_fault
from mediatord.store.mongo.operations import Operations
from mediatord.store.mongo.refusals import Refusals
from mediatord.store.mongo.replies import UNSTORABLE, Duplicate, Refused, Unreachable
from mediatord.store.mongo.server import Server

# Times that something may be in the way of several works before they are divided.
_TRIES = 2
# Parts of what an operation may take in all: when the first of those who wait has waited so long, more is refused;
# and what is for a request that began so long ago is, too, since it would hardly be done in what is left.
_OVERDUE, _STALE = 0.4, 0.6
# Seconds between the beginnings of requests that share a batch: it has to be done in the time of the first of them.
_SPREAD = 0.25
# When so many wait, batches are larger than they need be: a process that is so busy is slow to go on with one.
_MANY, _LARGE_BATCH = 2_500, 512


class Together(Protocol):
    """Does some works of a kind in their order, all in one transaction."""

    async def __call__(
        self, operations: Operations, works: Sequence[Any], deadline: float, tries: int | None
    ) -> Sequence[Any]:
        """
        :param tries: how often something may be in the way; None for as often as there is time.
        :return: an answer each; a MediatorError is one too.
        """


@dataclass(eq=False, slots=True)
class _Waiting:
    """
    :param since: when it came.
    :param began: when the request began that it is for.
    """

    name: str
    together: Together
    work: Any
    keys: Collection[Hashable]
    size: int
    since: float
    began: float
    answer: Deferred[Any] = field(default_factory=Deferred)


class Gathering:
    """
    Collects works until the end of the reactor's turn, or while as many batches as may be are under way.

    Works that have a key in common are done in the order in which they came, and never at the same time: they would
    only be in each other's way.

    :param at_once: batches that may be under way.
    """

    def __init__(self, server: Server, *, at_once: int, bounds: Bounds) -> None:
        self._server = server
        self._clock = server.clock
        self._at_once = at_once
        self._bounds = bounds
        self._waiting: deque[_Waiting] = deque()
        self._waiting_bytes = 0
        # No request of those who wait began before.
        self._earliest = inf
        self._busy: set[Hashable] = set()
        self._running = 0
        self._accepting = False
        self._scheduled = False
        self._look: IDelayedCall | None = None
        self._look_at = inf
        self._drained: Deferred[None] | None = None
        self._refusals = Refusals(server.clock)

    @property
    def held(self) -> tuple[int, int]:
        """How many works wait, and the bytes that they hold on to."""
        return len(self._waiting), self._waiting_bytes

    def start(self) -> None:
        """Accept works."""
        self._accepting = True

    def submit(
        self, name: str, together: Together, work: Any, keys: Collection[Hashable], size: int = 0
    ) -> Deferred[Any]:
        """
        Have a work done with others.

        :param name: of the operation, for the metric.
        :param keys: what it has to do with.
        :param size: bytes it holds on to while it waits.
        """
        bounds, now = self._bounds, self._clock.seconds()
        began = self._server.began
        if not self._accepting or not self._server.answers or began <= self._stale(now):
            return fail(StoreUnavailable())
        full = len(self._waiting) >= bounds.waiting or self._waiting_bytes + size > bounds.waiting_bytes
        if full or (self._waiting and now - self._waiting[0].since > _OVERDUE * self._server.patience):
            return self._refusals.refuse(Deferred())
        waiting = _Waiting(name, together, work, keys, size, now, began)
        self._waiting.append(waiting)
        self._waiting_bytes += size
        self._earliest = min(self._earliest, began)
        self._schedule()
        if self._running:
            self._expect_stale()
        return waiting.answer

    def drain(self) -> Deferred[None]:
        """Accept no more; fires when nothing waits any more."""
        self._accepting = False
        self._refusals.finish()
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if not self._waiting and not self._running:
            return succeed(None)
        self._drained = Deferred()
        return self._drained

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
        self._expect_stale()
        self._tell_drained()

    def _stale(self, now: float) -> float:
        """What began then, or before, is refused."""
        return now - _STALE * self._server.patience

    def _expect_stale(self) -> None:
        """Refuse what waits when its time has come, also while all that is under way hangs."""
        if not self._waiting or not self._accepting:
            return
        now = self._clock.seconds()
        left = max(self._earliest - self._stale(now), 0.0)
        if self._look is not None and self._look_at <= now + left:
            return
        if self._look is not None:
            self._look.cancel()
        self._look, self._look_at = self._clock.callLater(left, self._look_for_stale), now + left

    def _look_for_stale(self) -> None:
        self._look = None
        self._drop_stale()
        self._expect_stale()

    def _drop_stale(self) -> None:
        """What cannot be done in time any more would have those that are done with it fail as well."""
        now = self._clock.seconds()
        stale = self._stale(now)
        if self._earliest > stale:
            return
        waiting, self._waiting, self._earliest = self._waiting, deque(), inf
        for one in waiting:
            if one.began > stale:
                self._waiting.append(one)
                self._earliest = min(self._earliest, one.began)
            else:
                self._waiting_bytes -= one.size
                self._server.observe(one.name, now - one.since)
                self._refusals.refuse(one.answer)

    def _next_batch(self) -> list[_Waiting]:
        """The first that may begin, with as many of its kind, and of about its time, as fit."""
        batch: list[_Waiting] = []
        left: deque[_Waiting] = deque()
        blocked: set[Hashable] = set(self._busy)
        size, most = 0, self._bounds.batch
        if len(self._waiting) >= _MANY:
            most = max(most, _LARGE_BATCH)
        while self._waiting and len(batch) < most:
            one = self._waiting.popleft()
            fits = size + one.size <= self._bounds.batch_bytes
            if (not batch or (fits and _is_akin(one, batch[0]))) and blocked.isdisjoint(one.keys):
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

    async def _perform(self, batch: list[_Waiting]) -> None:
        until = min([self._clock.seconds(), *[one.began for one in batch]]) + self._server.patience
        answers = await self._answers([one.work for one in batch], batch[0], until)
        now = self._clock.seconds()
        self._running -= 1
        for one in batch:
            self._busy.difference_update(one.keys)
        if self._waiting:
            self._schedule()
        for one in batch:
            self._server.observe(one.name, now - one.since)
        for one, answer in zip(batch, answers, strict=True):
            if isinstance(answer, MediatorError):
                one.answer.errback(answer)
            else:
                one.answer.callback(answer)
        self._tell_drained()

    async def _answers(self, works: Sequence[Any], first: _Waiting, until: float) -> Sequence[Any]:
        def work(operations: Operations, deadline: float) -> Awaitable[list[Any]]:
            return self._do(operations, first.together, works, deadline)

        try:
            return await self._server.operate("commit", work, since=first.since, until=until)
        except MediatorError as error:
            return [error.with_traceback(None)] * len(works)
        except Exception as error:
            log_fault("a batch failed", error)
            return [StoreUnavailable()] * len(works)

    async def _do(
        self, operations: Operations, together: Together, works: Sequence[Any], deadline: float
    ) -> list[Any]:
        """What each is answered. When they cannot be done together, they are in two halves; so a bad one is left."""
        if self._clock.seconds() >= deadline:
            return [StoreUnavailable()] * len(works)
        try:
            return list(await together(operations, works, deadline, _TRIES if len(works) > 1 else None))
        except Unreachable as error:
            if len(works) == 1 or not error.connected or self._clock.seconds() >= deadline:
                self._server.failed("commit", error)
                return [StoreUnavailable()] * len(works)
        except (Refused, Duplicate, MediatorError, *UNSTORABLE) as error:
            if len(works) == 1:
                return [self._answer(error)]
        half = len(works) // 2
        first = await self._do(operations, together, works[:half], deadline)
        return first + await self._do(operations, together, works[half:], deadline)

    def _answer(self, error: Exception) -> MediatorError:
        if isinstance(error, MediatorError):
            return error.with_traceback(None)
        if isinstance(error, Refused):
            self._server.failed("commit", error)
        return StoreUnavailable()

    def _tell_drained(self) -> None:
        if self._drained is not None and not self._waiting and not self._running:
            drained, self._drained = self._drained, None
            drained.callback(None)


def _is_akin(one: _Waiting, other: _Waiting) -> bool:
    """Whether they are of a kind and have about the same time left."""
    return one.together is other.together and abs(one.began - other.began) <= _SPREAD
