"""
Rate limits shared by several processes through the store.

Each process acquires quota leases from the store and serves requests from them. While the store does not respond,
each process enforces its share of the limits.
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
from mediatord.log_redaction_and_throttle import redact_failure
from mediatord.ratelimit.sliding_window import QuotaLease, SlidingWindowLimiter, shorten_key
from mediatord.store.interfaces.cluster import IClusterStore

_log = Logger()

T = TypeVar("T")

# Seconds until a request to the store times out.
QUOTA_STORE_TIMEOUT = 0.5
# Seconds during which a store that failed is not used.
QUOTA_STORE_BACKOFF = 1.0
# Leases per limit: bounds the unused quota of a node, multiplied by the number of nodes.
_LEASES_PER_LIMIT = 20


class QuotaStoreUnavailable(Exception):
    """The store failed or timed out; each process enforces its share of the limit."""


class QuotaStore:
    """
    Access to the quotas in the store, shared by all limiters of a process.

    After a failure, one request at a time tests the store until it responds.

    :param nodes: number of live nodes.
    :param secret: the same on all nodes; without it, addresses could be recovered from keys by trying all of them.
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
        """Name of a quota in the store."""
        digest = blake2b(digest_size=16, key=self._secret)
        digest.update(f"{bucket} {who}".encode("utf-8", "surrogatepass"))
        return digest.digest()

    def lease_size(self, limit: int) -> int:
        """Amount to acquire at a time; nodes together hold at most 5 % of a limit unused."""
        return max(1, limit // (_LEASES_PER_LIMIT * max(1, self._nodes())))

    def local_limit(self, limit: int) -> int:
        """Limit of each process while the store is unavailable; together hardly more than the limit."""
        return max(1, limit // max(1, self._nodes()))

    def is_backing_off(self) -> bool:
        """Whether the store is not to be used now."""
        if self._well:
            return False
        return self._asking > 0 or 0 < self._rest_until - self._clock.seconds() <= QUOTA_STORE_BACKOFF

    async def take(self, key: bytes, amount: int, *, limit: int, period: float) -> float:
        """
        See :class:`~mediatord.store.interfaces.cluster.IClusterStore`.

        :raise QuotaStoreUnavailable: no response within :data:`QUOTA_STORE_TIMEOUT`; a later grant is lost.
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
        """Return an amount in the background; failures are ignored."""
        if not self.is_backing_off():
            with outside_request():
                self._store.return_quota(key, amount).addErrback(self._not_put_back)

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, (StoreUnavailable, QuotaStoreUnavailable)):
            _log.failure("acquiring a quota lease failed", redact_failure())
        elif self._well:
            _log.warn(
                "rate limit store not responding; each process enforces its share of the limits until it recovers"
            )
        self._well = False
        self._rest_until = self._clock.seconds() + QUOTA_STORE_BACKOFF

    @staticmethod
    def _not_put_back(failure: Failure) -> None:
        if not failure.check(StoreUnavailable):
            _log.failure("returning a quota lease failed", redact_failure(failure))


def _with_timeout(seconds: float, work: Deferred[T], clock: IReactorTime) -> Deferred[T]:
    """
    Fires with the result of `work`, or fails with QuotaStoreUnavailable after `seconds`; `work` is not cancelled.
    """
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
    The lease of one key, and the requests that wait for more.

    :param key: name in the store.
    :param limit: limit of all processes together.
    :param waiting: cost of each waiting request, and a Deferred that fires with its seconds to wait, or 0. None if
        there are none, since an empty deque is larger than the rest of this object.
    """

    key: bytes
    lease: QuotaLease
    limit: int
    waiting: deque[tuple[int, Deferred[float]]] | None = None
    asking: bool = False

    def enqueue(self, cost: int, answer: Deferred[float]) -> None:
        """Enqueue a request."""
        if self.waiting is None:
            self.waiting = deque()
        self.waiting.append((cost, answer))

    def wanted(self, now: float) -> int:
        """Amount that covers all waiting requests and the debt."""
        return sum([cost for cost, _ in self.waiting or ()]) - self.lease.remaining(now)

    def needed(self, now: float) -> int:
        """Amount that covers the first waiting request and the debt."""
        return (self.waiting[0][0] if self.waiting else 0) - self.lease.remaining(now)

    def has_work(self, now: float) -> bool:
        """Whether requests wait, or debt can be paid."""
        self.serve(now)
        return bool(self.waiting) or (self.lease.remaining(now) < 0 and not self.lease.wait(0, now))

    def serve(self, now: float) -> None:
        """Admit waiting requests in order, as far as the lease suffices."""
        while self.waiting and self.lease.try_use(self.waiting[0][0], now):
            self.waiting.popleft()[1].callback(0.0)
        if not self.waiting:
            self.waiting = None

    def refuse(self, now: float) -> None:
        """Refuse the waiting requests that need at least what was refused."""
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
        """End all waiting; `wait` is called for each request after the previous one was decided."""
        waiting, self.waiting = self.waiting, None
        for _, answer in waiting or ():
            answer.callback(wait())


def _never_wait(who: str, cost: int) -> float:
    return 0.0


class DistributedLimiter:
    """
    Charges keys of one limiter against quotas in the store, by leases that are used up locally.

    Refusals are cached until they lapse. While the store is unavailable, existing leases and refusals still apply,
    and `local_wait` decides beyond them. Beyond `max_keys`, the least recently used key is dropped and its lease
    returned.

    :param local_wait: seconds to wait for an amount on top of what was charged in this process, if it has to decide
        alone.
    """

    def __init__(
        self,
        clock: IReactorTime,
        quotas: QuotaStore,
        bucket: str,
        limit: int,
        *,
        local_wait: Callable[[str, int], float] = _never_wait,
        period: float = 60.0,
        max_keys: int = 20_000,
    ) -> None:
        self._clock = clock
        self._local_wait = local_wait
        self._quotas = quotas
        self._bucket = bucket
        self._limit = limit
        self._overrides: Mapping[str, int] = {}
        self._period = period
        self._max_keys = max_keys
        self._key_quotas: OrderedDict[str | bytes, _KeyQuota] = OrderedDict()

    def set_limit(self, limit: int, overrides: Mapping[str, int]) -> None:
        """
        Change the limit, and forget refusals.

        :param overrides: limits of single keys, which must be short.
        """
        self._limit = limit
        self._overrides = overrides
        for who, key_quota in self._key_quotas.items():
            key_quota.limit = overrides.get(who, limit) if isinstance(who, str) else limit
            key_quota.lease.clear_refusal()

    def wait(self, who: str, cost: int = 1) -> float:
        """Seconds for which `who` is known to be over its limit; 0.0 may be too optimistic."""
        key_quota, now = self._key_quotas.get(shorten_key(who)), self._clock.seconds()
        wait = 0.0 if key_quota is None else key_quota.lease.wait(cost, now)
        if (
            wait
            or not self._quotas.is_backing_off()
            or (key_quota is not None and key_quota.lease.remaining(now) >= cost)
        ):
            return wait
        return self._local_wait(who, cost)

    def try_take(self, who: str, cost: int) -> bool:
        """As :meth:`take`, if the lease suffices and no request waits; otherwise nothing is used."""
        key_quota, now = self._key_quotas.get(shorten_key(who)), self._clock.seconds()
        return key_quota is not None and not key_quota.waiting and key_quota.lease.try_use(cost, now)

    async def take(self, who: str, cost: int) -> float:
        """
        Use an amount and return 0.0, or nothing and return the seconds to wait.

        :param cost: already charged locally; 0 only pays debt.
        """
        key_quota, now = self._key_quota(who), self._clock.seconds()
        self._trim(key_quota, now)
        if not key_quota.waiting and key_quota.lease.try_use(cost, now):
            return 0.0
        wait = key_quota.lease.wait(cost, now)
        if wait or self._quotas.is_backing_off():
            return wait or self._local_wait(who, 0)
        answer: Deferred[float] = Deferred()
        key_quota.enqueue(cost, answer)
        # A request without time left is decided locally, as if the store were unavailable.
        answer.addTimeout(get_time_left(self._clock), self._clock, lambda *_: self._local_wait(who, 0))
        self._start_request(who, key_quota)
        return await answer

    def charge_deferred(self, who: str, cost: int) -> float:
        """
        Use an amount immediately and acquire it afterwards. If `who` is known to be over its limit, use nothing and
        return the seconds to wait.

        :param cost: already charged locally.
        """
        key_quota, now = self._key_quota(who), self._clock.seconds()
        self._trim(key_quota, now)
        wait = key_quota.lease.wait(cost, now)
        if wait:
            return wait
        if key_quota.lease.try_use(cost, now):
            return 0.0
        if self._quotas.is_backing_off():
            return self._local_wait(who, 0)
        key_quota.lease.charge_deferred(cost, now)
        self._start_request(who, key_quota)
        return 0.0

    def has_debt(self, who: str) -> bool:
        """Whether used amounts have not been acquired yet."""
        key_quota = self._key_quotas.get(shorten_key(who))
        return key_quota is not None and key_quota.lease.remaining(self._clock.seconds()) < 0

    def refund(self, who: str, cost: int) -> None:
        """Undo a use, as far as there was one."""
        key_quota = self._key_quotas.get(shorten_key(who))
        if key_quota is None:
            return
        now = self._clock.seconds()
        key_quota.lease.refund(cost, now)
        excess = self._trim(key_quota, now)
        if excess:
            self._quotas.put_back(key_quota.key, excess)
        key_quota.lease.clear_refusal()

    def _trim(self, key_quota: _KeyQuota, now: float) -> int:
        """
        Give up the surplus of a lease without waiting requests; returns it. No process holds a whole lease unused, so
        all together exceed the limit by less than their leases.
        """
        return 0 if key_quota.waiting else key_quota.lease.trim(self._quotas.lease_size(key_quota.limit) - 1, now)

    def _start_request(self, who: str, key_quota: _KeyQuota) -> None:
        if not key_quota.asking:
            key_quota.asking = True
            with outside_request():
                Deferred.fromCoroutine(self._ask(who, key_quota))

    async def _ask(self, who: str, key_quota: _KeyQuota) -> None:
        """Acquire leases until no request waits."""
        try:
            while key_quota.has_work(self._clock.seconds()):
                await self._request_lease(key_quota)
        except QuotaStoreUnavailable:
            pass
        except Exception:
            _log.failure("acquiring a quota lease failed", redact_failure())
        key_quota.asking = False
        key_quota.release(lambda: self._local_wait(who, 0))

    async def _request_lease(self, key_quota: _KeyQuota) -> None:
        """
        Request enough for all or a whole lease, then what the first needs.

        :raise QuotaStoreUnavailable: the store does not respond.
        """
        now = self._clock.seconds()
        needed = key_quota.needed(now)
        wanted = max(key_quota.wanted(now), self._quotas.lease_size(key_quota.limit))
        most = key_quota.lease.limit_request(wanted, needed, now)
        taken = await self._try_take_amount(key_quota, most) or (
            most > needed and await self._try_take_amount(key_quota, needed)
        )
        if not taken:
            key_quota.refuse(self._clock.seconds())

    async def _try_take_amount(self, key_quota: _KeyQuota, amount: int) -> bool:
        asked_at = self._clock.seconds()
        wait = await self._quotas.take(key_quota.key, amount, limit=key_quota.limit, period=self._period)
        now = self._clock.seconds()
        if wait:
            key_quota.lease.note_refusal(amount, wait, now)
            return False
        key_quota.lease.add_granted(amount, asked_at, now)
        key_quota.serve(now)
        self._trim(key_quota, now)
        return True

    def _key_quota(self, who: str) -> _KeyQuota:
        short = shorten_key(who)
        key_quota = self._key_quotas.get(short)
        if key_quota is None:
            self._forget()
            limit = self._overrides.get(who, self._limit)
            key_quota = self._key_quotas[short] = _KeyQuota(
                self._quotas.make_key(self._bucket, who), QuotaLease(self._period), limit
            )
        else:
            self._key_quotas.move_to_end(short)
        return key_quota

    def _forget(self) -> None:
        """Drop up to two idle keys to make room, so that no call is slow."""
        now = self._clock.seconds()
        for _ in range(2):
            if not self._key_quotas:
                return
            oldest = next(iter(self._key_quotas.values()))
            if len(self._key_quotas) < self._max_keys and (oldest.asking or not oldest.lease.is_idle(now)):
                return
            self._key_quotas.popitem(last=False)
            # A request that still waits must not use it as well.
            if left := oldest.lease.trim(0, now):
                self._quotas.put_back(oldest.key, left)


class KeyedLimiter:
    """
    One limit for many keys: exact within the process, and shared with other processes as far as the store responds;
    otherwise the process enforces its share.

    Waits are whole seconds; 0 means admitted.
    """

    def __init__(
        self, clock: IReactorTime, name: str, limit: int, quotas: QuotaStore | None, period: float = 60.0
    ) -> None:
        self._clock = clock
        self._window = SlidingWindowLimiter(limit, period)
        self._overrides: Mapping[str, int] = {}
        self._distributed = None
        if quotas is not None:

            def local_wait(key: str, more: int) -> float:
                limit = self._overrides.get(key, self._window.limit)
                return self._window.wait(key, clock.seconds(), more, quotas.local_limit(limit))

            self._distributed = DistributedLimiter(clock, quotas, name, limit, local_wait=local_wait, period=period)

    def __len__(self) -> int:
        """Number of keys."""
        return len(self._window)

    def set_limit(self, limit: int, overrides: Mapping[str, int] | None = None) -> None:
        """
        Change the limit.

        :param overrides: limits of single keys.
        """
        overrides = overrides or {}
        if (limit, overrides) != (self._window.limit, self._overrides):
            self._window.limit = limit
            self._overrides = overrides
            if self._distributed is not None:
                self._distributed.set_limit(limit, overrides)

    def wait(self, key: str, cost: int = 1) -> int:
        """Seconds for which `key` is known to be over its limit."""
        wait = self._window.wait(key, self._clock.seconds(), cost, self._overrides.get(key))
        if wait or self._distributed is None:
            return wait
        return math.ceil(self._distributed.wait(key, cost))

    async def wait_after_debts(self, key: str, cost: int = 1) -> int:
        """As :meth:`wait`, after acquiring what was used in advance."""
        wait = self.wait(key, cost)
        if not wait and self._distributed is not None and self._distributed.has_debt(key):
            wait = math.ceil(await self._distributed.take(key, 0))
        return wait

    async def admit(self, key: str, cost: int = 1) -> int:
        """Charge `key`; refused requests cost nothing."""
        wait = self._window.admit(key, self._clock.seconds(), cost, self._overrides.get(key))
        if not wait and self._distributed is not None:
            wait = math.ceil(await self._distributed.take(key, cost))
            if wait:
                self._window.refund(key, cost)
        return wait

    def try_admit(self, key: str, cost: int = 1) -> bool:
        """Charge `key` if it can be decided without asking the store."""
        if self._window.admit(key, self._clock.seconds(), cost, self._overrides.get(key)):
            return False
        if self._distributed is None or self._distributed.try_take(key, cost):
            return True
        self._window.refund(key, cost)
        return False

    def charge_deferred(self, key: str) -> int:
        """Charge `key` for something already done; other processes learn of it later."""
        wait = self._window.admit(key, self._clock.seconds(), 1, self._overrides.get(key))
        if not wait and self._distributed is not None:
            wait = math.ceil(self._distributed.charge_deferred(key, 1))
            if wait:
                self._window.refund(key)
        return wait

    def refund(self, key: str, cost: int) -> None:
        """Undo a charge; other processes learn of it later."""
        self._window.refund(key, cost)
        if self._distributed is not None:
            self._distributed.refund(key, cost)
