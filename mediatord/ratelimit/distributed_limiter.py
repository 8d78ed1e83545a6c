"""
The allowances in the store: asked for under keys that tell nothing, patiently but not for long.

A bucket's part in what several processes admit together.

One limit for many keys.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.clock import get_time_left, outside_request
from mediatord.errors import StoreUnavailable
from mediatord.failure_logging import redact_failure
from mediatord.ratelimit.sliding_window import QuotaLease, SlidingWindowLimiter, shorten_key
from mediatord.store.interfaces.cluster import IClusterStore

_log = Logger()

T = TypeVar("T")

# Seconds until an answer is late.
QUOTA_STORE_TIMEOUT = 0.5
# Seconds for which a store that did not answer is left alone.
QUOTA_STORE_BACKOFF = 1.0
# What one node may hold unused of a limit, times the number of nodes.
_LEASES_PER_LIMIT = 20


class QuotaStoreUnavailable(Exception):
    """The store is not there, or too slow: each process decides alone, and admits its part of the limit."""


class QuotaStore:
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

    def make_key(self, bucket: str, who: str) -> bytes:
        """What somebody's allowance is called in the store."""
        digest = blake2b(digest_size=16, key=self._secret)
        digest.update(f"{bucket} {who}".encode("utf-8", "surrogatepass"))
        return digest.digest()

    def lease_size(self, limit: int) -> int:
        """How much to take of an allowance at a time, so that what nodes hold unused is 5 % of it at most."""
        return max(1, limit // (_LEASES_PER_LIMIT * max(1, self._nodes())))

    def local_limit(self, limit: int) -> int:
        """How much each process admits by itself while the store does not answer: all together, hardly more."""
        return max(1, limit // max(1, self._nodes()))

    def is_backing_off(self) -> bool:
        """Whether the store is left alone now."""
        if self._well:
            return False
        return self._asking > 0 or 0 < self._rest_until - self._clock.seconds() <= QUOTA_STORE_BACKOFF

    async def take(self, key: bytes, amount: int, *, limit: int, period: float) -> float:
        """
        See :class:`~mediatord.store.interfaces.cluster.IClusterStore`.

        :raise Unanswered: not within :data:`PATIENCE`; what is taken later is lost.
        """
        self._asking += 1
        try:
            wait = await _with_timeout(
                QUOTA_STORE_TIMEOUT, self._store.take_quota(key, amount, limit=limit, period=period), self._clock
            )
        except Exception as error:
            self._failed(error)
            raise QuotaStoreUnavailable from None
        finally:
            self._asking -= 1
        self._well = True
        return wait

    def put_back(self, key: bytes, amount: int) -> None:
        """In the background, and if that fails, not at all."""
        if not self.is_backing_off():
            with outside_request():
                self._store.return_quota(key, amount).addErrback(self._not_put_back)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, (StoreUnavailable, QuotaStoreUnavailable)):
            _log.failure("taking from an allowance failed", redact_failure())
        elif self._well:
            _log.warn("the store does not answer for rate limits: until it does, each process has its part of them")
        self._well = False
        self._rest_until = self._clock.seconds() + QUOTA_STORE_BACKOFF

    @staticmethod
    def _not_put_back(failure: Failure) -> None:
        if not failure.check(StoreUnavailable):
            _log.failure("putting back into an allowance failed", redact_failure(failure))


def _with_timeout(seconds: float, work: Deferred[T], clock: IReactorTime) -> Deferred[T]:
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
        late = clock.callLater(seconds, fire, Failure(QuotaStoreUnavailable()))

        def stop_waiting(result: T) -> T:
            if late.active():
                late.cancel()
            return result

        answer.addBoth(stop_waiting)
    return answer


@dataclass(slots=True)
class _KeyQuota:
    """
    What this process holds of one key's allowance, and who stands in line for more.

    :param key: its name in the store.
    :param limit: how much all processes together may have of it.
    :param waiting: what each of them needs, and where it is told how long it has to wait, or 0; None for nobody, as
        most lines are most of the time, and an empty deque is larger than all the rest.
    """

    key: bytes
    lease: QuotaLease
    limit: int
    waiting: deque[tuple[int, Deferred[float]]] | None = None
    asking: bool = False

    def join(self, cost: int, answer: Deferred[float]) -> None:
        """One more stands in line."""
        if self.waiting is None:
            self.waiting = deque()
        self.waiting.append((cost, answer))

    def wanted(self, now: float) -> int:
        """What would do for all of them, and for what is owed."""
        return sum([cost for cost, _ in self.waiting or ()]) - self.lease.remaining(now)

    def needed(self, now: float) -> int:
        """What would do for the first, and for what is owed."""
        return (self.waiting[0][0] if self.waiting else 0) - self.lease.remaining(now)

    def has_work(self, now: float) -> bool:
        """Whether anybody still waits, or something is owed that may be had."""
        self.serve(now)
        return bool(self.waiting) or (self.lease.remaining(now) < 0 and not self.lease.wait(0, now))

    def serve(self, now: float) -> None:
        """Let all go on for whom there is enough, in the order in which they came."""
        while self.waiting and self.lease.try_use(self.waiting[0][0], now):
            self.waiting.popleft()[1].callback(0.0)
        if not self.waiting:
            self.waiting = None

    def refuse(self, now: float) -> None:
        """Send away all who need as much as was refused."""
        staying: deque[tuple[int, Deferred[float]]] = deque()
        refused = []
        for cost, answer in self.waiting or ():
            wait = self.lease.wait(cost, now)
            if wait:
                refused.append((wait, answer))
            else:
                staying.append((cost, answer))
        self.waiting = staying or None
        for wait, answer in refused:
            answer.callback(wait)

    def release(self, wait: Callable[[], float]) -> None:
        """Let all go on, or away: each is asked about after what became of the one before."""
        waiting, self.waiting = self.waiting, None
        for _, answer in waiting or ():
            answer.callback(wait())


def _never_wait(who: str, cost: int) -> float:
    return 0.0


class DistributedLimiter:
    """
    Takes from the allowances of one bucket, in lots that are used up here.

    What is refused is remembered, and asked for again when its time is over. While the store does not answer, what is
    known still holds, and beyond that this process decides alone. Beyond `max_keys`, what is known of the one asked
    about longest ago is put back and forgotten: the store knows the rest, and is asked again.

    :param alone: seconds that somebody has to wait for so much more than was charged here already, if this process
        decides alone.
    """

    def __init__(
        self,
        clock: IReactorTime,
        allowances: QuotaStore,
        bucket: str,
        limit: int,
        *,
        local_wait: Callable[[str, int], float] = _never_wait,
        period: float = 60.0,
        max_keys: int = 20_000,
    ) -> None:
        self._clock = clock
        self._local_wait = local_wait
        self._allowances = allowances
        self._bucket = bucket
        self._limit = limit
        self._overrides: Mapping[str, int] = {}
        self._period = period
        self._max_keys = max_keys
        self._key_quotas: OrderedDict[str | bytes, _KeyQuota] = OrderedDict()

    def set_limit(self, limit: int, overrides: Mapping[str, int]) -> None:
        """
        Go by another limit, also for those who were refused before.

        :param larger: those of some keys, which are short.
        """
        self._limit = limit
        self._overrides = overrides
        for who, line in self._key_quotas.items():
            line.limit = overrides.get(who, limit) if isinstance(who, str) else limit
            line.lease.clear_refusal()

    def wait(self, who: str, cost: int = 1) -> float:
        """Seconds for which `who` is known to have no more; 0.0 may be too good to be true."""
        line, now = self._key_quotas.get(shorten_key(who)), self._clock.seconds()
        wait = 0.0 if line is None else line.lease.wait(cost, now)
        if wait or not self._allowances.is_backing_off() or (line is not None and line.lease.remaining(now) >= cost):
            return wait
        return self._local_wait(who, cost)

    def try_take(self, who: str, cost: int) -> bool:
        """As :meth:`take`, if there is enough here and nobody stands in line; otherwise nothing is used."""
        line, now = self._key_quotas.get(shorten_key(who)), self._clock.seconds()
        return line is not None and not line.waiting and line.lease.try_use(cost, now)

    async def take(self, who: str, cost: int) -> float:
        """
        Use so much of `who`'s allowance and return 0.0, or nothing and return the seconds it has to wait.

        :param cost: charged here already; 0 to pay only what is owed.
        """
        line, now = self._line(who), self._clock.seconds()
        self._trim(line, now)
        if not line.waiting and line.lease.try_use(cost, now):
            return 0.0
        wait = line.lease.wait(cost, now)
        if wait or self._allowances.is_backing_off():
            return wait or self._local_wait(who, 0)
        answer: Deferred[float] = Deferred()
        line.join(cost, answer)
        # One who has no more time decides without an answer, like one who gets none.
        answer.addTimeout(get_time_left(self._clock), self._clock, lambda *_: self._local_wait(who, 0))
        self._start_request(who, line)
        return await answer

    def charge_deferred(self, who: str, cost: int) -> float:
        """
        Use so much of it in any case, and take it afterwards; unless it is known that there is no more, which costs
        nothing and returns the seconds to wait.

        :param cost: charged here already.
        """
        line, now = self._line(who), self._clock.seconds()
        self._trim(line, now)
        wait = line.lease.wait(cost, now)
        if wait:
            return wait
        if line.lease.try_use(cost, now):
            return 0.0
        if self._allowances.is_backing_off():
            return self._local_wait(who, 0)
        line.lease.charge_deferred(cost, now)
        self._start_request(who, line)
        return 0.0

    def has_debt(self, who: str) -> bool:
        """Whether something was used that is not taken yet."""
        line = self._key_quotas.get(shorten_key(who))
        return line is not None and line.lease.remaining(self._clock.seconds()) < 0

    def refund(self, who: str, cost: int) -> None:
        """Undo a taking, as far as there was one."""
        line = self._key_quotas.get(shorten_key(who))
        if line is None:
            return
        now = self._clock.seconds()
        line.lease.refund(cost, now)
        excess = self._trim(line, now)
        if excess:
            self._allowances.put_back(line.key, excess)
        line.lease.clear_refusal()

    def _trim(self, line: _KeyQuota, now: float) -> int:
        """
        Let go of what nobody waits for, and say how much that was: no process holds a whole lot unused, so that all
        together are over the limit by less than their lots.
        """
        return 0 if line.waiting else line.lease.trim(self._allowances.lease_size(line.limit) - 1, now)

    def _start_request(self, who: str, line: _KeyQuota) -> None:
        if not line.asking:
            line.asking = True
            with outside_request():
                Deferred.fromCoroutine(self._ask(who, line))

    async def _ask(self, who: str, line: _KeyQuota) -> None:
        """Ask for everybody who waits, until nobody does."""
        try:
            while line.has_work(self._clock.seconds()):
                await self._request_lease(line)
        except QuotaStoreUnavailable:
            pass
        except Exception:
            _log.failure("asking for an allowance failed", redact_failure())
        line.asking = False
        line.release(lambda: self._local_wait(who, 0))

    async def _request_lease(self, line: _KeyQuota) -> None:
        """
        Ask for what would do for all, or for a lot, then for what the first needs.

        :raise Unanswered: the store does not answer.
        """
        now = self._clock.seconds()
        needed = line.needed(now)
        wanted = max(line.wanted(now), self._allowances.lease_size(line.limit))
        most = line.lease.limit_request(wanted, needed, now)
        taken = await self._try_take_amount(line, most) or (
            most > needed and await self._try_take_amount(line, needed)
        )
        if not taken:
            line.refuse(self._clock.seconds())

    async def _try_take_amount(self, line: _KeyQuota, amount: int) -> bool:
        asked_at = self._clock.seconds()
        wait = await self._allowances.take(line.key, amount, limit=line.limit, period=self._period)
        now = self._clock.seconds()
        if wait:
            line.lease.note_refusal(amount, wait, now)
            return False
        line.lease.add_granted(amount, asked_at, now)
        line.serve(now)
        self._trim(line, now)
        return True

    def _line(self, who: str) -> _KeyQuota:
        short = shorten_key(who)
        line = self._key_quotas.get(short)
        if line is None:
            self._forget()
            limit = self._overrides.get(who, self._limit)
            line = self._key_quotas[short] = _KeyQuota(
                self._allowances.make_key(self._bucket, who), QuotaLease(self._period), limit
            )
        else:
            self._key_quotas.move_to_end(short)
        return line

    def _forget(self) -> None:
        """Make room for one more; two old ones at a time, so that no call is slow and all of them go."""
        now = self._clock.seconds()
        for _ in range(2):
            if not self._key_quotas:
                return
            oldest = next(iter(self._key_quotas.values()))
            if len(self._key_quotas) < self._max_keys and (oldest.asking or not oldest.lease.is_idle(now)):
                return
            self._key_quotas.popitem(last=False)
            # Who stands in its line still must not use that as well.
            if left := oldest.lease.trim(0, now):
                self._allowances.put_back(oldest.key, left)


class KeyedLimiter:
    """
    One limit, for many keys: exactly in this process, and with all others as far as the store answers; while it does
    not, this process has its part of the limit.

    Waits are whole seconds, and 0 means that it is admitted.
    """

    def __init__(
        self, clock: IReactorTime, name: str, limit: int, allowances: QuotaStore | None, period: float = 60.0
    ) -> None:
        self._clock = clock
        self._window = SlidingWindowLimiter(limit, period)
        self._overrides: Mapping[str, int] = {}
        self._share = None
        if allowances is not None:

            def local_wait(key: str, more: int) -> float:
                limit = self._overrides.get(key, self._window.limit)
                return self._window.wait(key, clock.seconds(), more, allowances.local_limit(limit))

            self._share = DistributedLimiter(clock, allowances, name, limit, local_wait=local_wait, period=period)

    def __len__(self) -> int:
        """How many keys are remembered."""
        return len(self._window)

    def set_limit(self, limit: int, overrides: Mapping[str, int] | None = None) -> None:
        """
        Go by another limit from now on.

        :param larger: those of some keys that have limits of their own.
        """
        overrides = overrides or {}
        if (limit, overrides) != (self._window.limit, self._overrides):
            self._window.limit = limit
            self._overrides = overrides
            if self._share is not None:
                self._share.set_limit(limit, overrides)

    def wait(self, key: str, cost: int = 1) -> int:
        """Whether `key` is known to be over its limit, or would be."""
        wait = self._window.wait(key, self._clock.seconds(), cost, self._overrides.get(key))
        if wait or self._share is None:
            return wait
        return math.ceil(self._share.wait(key, cost))

    async def wait_after_debts(self, key: str, cost: int = 1) -> int:
        """The same, once everything it used is paid for."""
        wait = self.wait(key, cost)
        if not wait and self._share is not None and self._share.has_debt(key):
            wait = math.ceil(await self._share.take(key, 0))
        return wait

    async def admit(self, key: str, cost: int = 1) -> int:
        """Charge `key`; what is refused costs nothing."""
        wait = self._window.admit(key, self._clock.seconds(), cost, self._overrides.get(key))
        if not wait and self._share is not None:
            wait = math.ceil(await self._share.take(key, cost))
            if wait:
                self._window.refund(key, cost)
        return wait

    def try_admit(self, key: str, cost: int = 1) -> bool:
        """Charge `key` if that is known to be within its limit without asking anybody."""
        if self._window.admit(key, self._clock.seconds(), cost, self._overrides.get(key)):
            return False
        if self._share is None or self._share.try_take(key, cost):
            return True
        self._window.refund(key, cost)
        return False

    def charge_deferred(self, key: str) -> int:
        """Charge `key` for what was done already; the other processes know later."""
        wait = self._window.admit(key, self._clock.seconds(), 1, self._overrides.get(key))
        if not wait and self._share is not None:
            wait = math.ceil(self._share.charge_deferred(key, 1))
            if wait:
                self._window.refund(key)
        return wait

    def refund(self, key: str, cost: int) -> None:
        """Undo a charge; the other processes know later."""
        self._window.refund(key, cost)
        if self._share is not None:
            self._share.refund(key, cost)
