"""The allowances in the store: asked for under keys that tell nothing, patiently but not for long."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.deadline import on_its_own
from mediatord.errors import StoreUnavailable
from mediatord.faults import without_text
from mediatord.interfaces import IClusterStore

_log = Logger()

T = TypeVar("T")

# Seconds until an answer is late.
PATIENCE = 0.5
# Seconds for which a store that did not answer is left alone.
REST = 1.0
# What one node may hold unused of a limit, times the number of nodes.
_HELD = 20


class Unanswered(Exception):
    """The store is not there, or too slow: each process decides alone, and admits its part of the limit."""


class Allowances:
    """
    What all buckets of all nodes share.

    After a failure it is asked again by one request at a time, until it answers.

    :param nodes: how many nodes are live.
    :param secret: the same on all nodes; without it addresses can be found out from keys by trying them all.
    """

    def __init__(
        self, clock: IReactorTime, store: IClusterStore, nodes: Callable[[], int], *, secret: bytes = b""
    ) -> None:
        self._clock = clock
        self._store = store
        self._nodes = nodes
        self._secret = blake2b(secret, digest_size=32, person=b"allowances").digest()
        self._asking = 0
        self._well = True
        self._rest_until = 0.0

    def key(self, bucket: str, who: str) -> bytes:
        """What somebody's allowance is called in the store."""
        digest = blake2b(digest_size=16, key=self._secret)
        digest.update(f"{bucket} {who}".encode("utf-8", "surrogatepass"))
        return digest.digest()

    def lot(self, limit: int) -> int:
        """How much to take of an allowance at a time, so that what nodes hold unused is 5 % of it at most."""
        return max(1, limit // (_HELD * max(1, self._nodes())))

    def part(self, limit: int) -> int:
        """How much each process admits by itself while the store does not answer: all together, hardly more."""
        return max(1, limit // max(1, self._nodes()))

    def resting(self) -> bool:
        """Whether the store is left alone now."""
        if self._well:
            return False
        return self._asking > 0 or 0 < self._rest_until - self._clock.seconds() <= REST

    async def take(self, key: bytes, amount: int, *, limit: int, period: float) -> float:
        """
        See :class:`~mediatord.interfaces.IClusterStore`.

        :raise Unanswered: not within :data:`PATIENCE`; what is taken later is lost.
        """
        self._asking += 1
        try:
            wait = await _within(PATIENCE, self._store.take(key, amount, limit=limit, period=period), self._clock)
        except Exception as error:
            self._failed(error)
            raise Unanswered from None
        finally:
            self._asking -= 1
        self._well = True
        return wait

    def put_back(self, key: bytes, amount: int) -> None:
        """In the background, and if that fails, not at all."""
        if not self.resting():
            with on_its_own():
                self._store.put_back(key, amount).addErrback(self._not_put_back)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, (StoreUnavailable, Unanswered)):
            _log.failure("taking from an allowance failed", without_text())
        elif self._well:
            _log.warn("the store does not answer for rate limits: until it does, each process has its part of them")
        self._well = False
        self._rest_until = self._clock.seconds() + REST

    @staticmethod
    def _not_put_back(failure: Failure) -> None:
        if not failure.check(StoreUnavailable):
            _log.failure("putting back into an allowance failed", without_text(failure))


def _within(seconds: float, work: Deferred[T], clock: IReactorTime) -> Deferred[T]:
    """What `work` fires with, or Unanswered when that takes too long; `work` itself is not ended."""
    answer: Deferred[T] = Deferred()

    def fire(result: T | Failure) -> None:
        if answer.called:
            return
        if isinstance(result, Failure):
            answer.errback(result)
        else:
            answer.callback(result)

    work.addBoth(fire)
    if not answer.called:
        late = clock.callLater(seconds, fire, Failure(Unanswered()))

        def stop_waiting(result: T) -> T:
            if late.active():
                late.cancel()
            return result

        answer.addBoth(stop_waiting)
    return answer
