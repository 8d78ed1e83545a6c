"""
Rate limits shared by several processes through the store.

Each process acquires quota leases from the store and serves requests from them. While the store does not respond,
each process enforces its share of the limits.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from hashlib import blake2b
from math import ceil
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.errors import StoreUnavailable
from mediatord.ratelimit.rate_limiter import SlidingWindowLimiter, WaitTime
from mediatord.runtime.failure_logging import redact_failure
from mediatord.runtime.request_time import get_time_left, outside_request
from mediatord.store.interfaces.cluster_and_quotas import IClusterStore

_log = Logger()

T = TypeVar("T")

# Seconds until a request to the store times out.
QUOTA_STORE_TIMEOUT = 0.5
# Seconds during which a store that failed is not used.
QUOTA_STORE_BACKOFF = 1.0
# Leases per limit: bounds the unused quota of a node, multiplied by the number of nodes.
_LEASES_PER_LIMIT = 20
# In seconds; smaller values would be lost in a float of the current time.
_MIN_REFUSAL_SECONDS = 0.001


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

    def make_limiter(self, name: str, limit: int, period: float) -> DistributedLimiter:
        """Make a limiter; see :data:`~mediatord.ratelimit.rate_limiter.LimiterFactory`."""
        return DistributedLimiter(self._clock, self, name, limit, period)

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
        See :class:`~mediatord.store.interfaces.cluster_and_quotas.IClusterStore`.

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
                "the rate limit store does not respond; each process enforces its share of the limits meanwhile"
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
    answer: Deferred[Any] = Deferred()
    work.addBoth(lambda result: None if answer.called else answer.callback(result))
    if not answer.called:
        answer.addTimeout(seconds, clock, lambda *_: Failure(QuotaStoreUnavailable()))
    return answer


class QuotaLease:
    """
    The part of the shared limit of a key that one process holds: acquired but unused, used but not yet acquired
    (debt), and refused amounts; and the requests that wait for more. Amounts lapse after `period` seconds.

    :ivar key: name in the store.
    :ivar limit: limit of all processes together.
    :ivar waiting: cost of each waiting request, and a Deferred that fires with its seconds to wait, or 0. None if
        there are none, since an empty deque is larger than the rest of this object.
    :ivar asking: whether the store is being asked for more.
    """

    __slots__ = ("_left", "_period", "_refused", "_refused_until", "_until", "asking", "key", "limit", "waiting")

    def __init__(self, key: bytes, period: float, limit: int) -> None:
        self.key = key
        self.limit = limit
        self.waiting: deque[tuple[int, Deferred[float]]] | None = None
        self.asking = False
        self._period = period
        self._left = 0
        self._until = 0.0
        self._refused = 0
        self._refused_until = 0.0

    def remaining(self, now: float) -> int:
        """Amount that may be used; negative if there is debt."""
        if not self._in_force(self._until, now):
            self._left = 0
        return self._left

    def add_granted(self, amount: int, asked_at: float, now: float) -> None:
        """Add an acquired amount. It counts from the time of the request, the earliest possible time of the grant."""
        self._left = self.remaining(now) + amount
        self._until = asked_at + self._period

    def try_use(self, amount: int, now: float) -> bool:
        """Use an amount if it is available."""
        if not 0 < self._until - now < self._period + 1:
            self._left = 0
        if self._left < amount:
            return False
        self._left -= amount
        return True

    def charge_deferred(self, amount: int, now: float) -> None:
        """Use an amount, incurring debt if necessary."""
        if self.remaining(now) < amount:
            self._until = now + self._period
        self._left -= amount

    def refund(self, amount: int, now: float) -> None:
        """Undo a use. Amounts used more than a period ago are ignored."""
        if self._in_force(self._until, now):
            self._left += amount

    def trim(self, most: int, now: float) -> int:
        """Give up what exceeds `most`; returns that amount."""
        excess = max(0, self.remaining(now) - most)
        self._left -= excess
        return excess

    def note_refusal(self, amount: int, wait: float, now: float) -> None:
        """Record that an amount was refused, and for how many seconds."""
        self._refused = amount
        self._refused_until = now + min(max(wait, _MIN_REFUSAL_SECONDS), self._period)

    def clear_refusal(self) -> None:
        """Forget the refusal."""
        self._refused_until = 0.0

    def wait(self, amount: int, now: float) -> float:
        """Seconds during which it is pointless to request what is missing for `amount`."""
        missing = amount - self.remaining(now)
        if missing <= 0 or missing < self._refused or not self._in_force(self._refused_until, now):
            return 0.0
        return self._refused_until - now

    def limit_request(self, wanted: int, needed: int, now: float) -> int:
        """Amount to request: `wanted`, but a quarter of a recent refusal at most, and `needed` at least."""
        if self._in_force(self._refused_until, now):
            wanted = min(wanted, self._refused // 4)
        return max(wanted, needed)

    def is_idle(self, now: float) -> bool:
        """Whether there is neither amount, debt nor refusal."""
        return not self.remaining(now) and not self._in_force(self._refused_until, now)

    def _in_force(self, until: float, now: float) -> bool:
        # A clock that was set back must not block anybody for much longer than a period.
        return 0 < until - now < self._period + 1

    def serve(self, now: float) -> None:
        """Admit waiting requests in order, as far as the lease suffices."""
        while self.waiting and self.try_use(self.waiting[0][0], now):
            self.waiting.popleft()[1].callback(0.0)
        if not self.waiting:
            self.waiting = None

    def refuse(self, now: float) -> None:
        """Refuse the waiting requests that need at least what was refused."""
        decided = [(cost, answer, self.wait(cost, now)) for cost, answer in self.waiting or ()]
        self.waiting = deque((cost, answer) for cost, answer, wait in decided if not wait) or None
        for _, answer, wait in decided:
            if wait:
                answer.callback(wait)


class DistributedLimiter(SlidingWindowLimiter):
    """
    A limiter whose limit is shared with other processes: exact within the process, and charged against quotas in the
    store, by leases that are used up locally.

    Refusals are cached until they lapse. While the store is unavailable, existing leases and refusals still apply,
    and beyond them the process enforces its share of the limit. Beyond `max_keys`, the least recently used key is
    dropped and its lease returned.
    """

    def __init__(
        self,
        clock: IReactorTime,
        quotas: QuotaStore,
        name: str,
        limit: int,
        period: float = 60.0,
        max_keys: int = 20_000,
    ) -> None:
        super().__init__(limit, period, max_keys)
        self._clock = clock
        self._quotas = quotas
        self._name = name
        self._leases: OrderedDict[int, QuotaLease] = OrderedDict()

    def set_limit(self, limit: int, overrides: Mapping[str, int] | None = None) -> None:
        """Change the limit, and forget refusals if it is another one."""
        overrides = overrides or {}
        if (limit, overrides) == (self.limit, self._overrides):
            return
        super().set_limit(limit, overrides)
        limits = {hash(key): other for key, other in overrides.items()}
        for name, lease in self._leases.items():
            lease.limit = limits.get(name, limit)
            lease.clear_refusal()

    def wait(self, key: str, now: float, cost: int = 1, limit: int | None = None) -> int:
        """Seconds for which `key` is known to be over its limit; 0 may be too optimistic."""
        wait: float = super().wait(key, now, cost, limit)
        lease = self._leases.get(hash(key))
        if not wait and lease is not None:
            wait = lease.wait(cost, now)
        if not wait and self._quotas.is_backing_off() and (lease is None or lease.remaining(now) < cost):
            wait = self._wait_for_share(key, cost)
        return ceil(wait)

    def has_debts(self, key: str, now: float) -> bool:
        """Whether more was used than the lease had."""
        lease = self._leases.get(hash(key))
        return lease is not None and lease.remaining(now) < 0

    def wait_after_debts(  # type: ignore[override]  # others need not ask the store
        self, key: str, now: float, cost: int = 1
    ) -> WaitTime:
        """As :meth:`wait`, after acquiring what was used in advance."""
        wait = self.wait(key, now, cost)
        return self.take(key, 0) if not wait and self.has_debts(key, now) else wait

    def admit(self, key: str, now: float, cost: int = 1) -> WaitTime:
        """Admit `cost` times, or not at all; the seconds to wait, for which the store may have to be asked."""
        return super().admit(key, now, cost) or self._admit_everywhere(key, cost)

    async def _admit_everywhere(self, key: str, cost: int) -> int:
        wait = await self.take(key, cost)
        if wait:
            super().refund(key, cost)
        return wait

    def try_admit(self, key: str, now: float, cost: int = 1) -> WaitTime:
        """As :meth:`admit`, if the lease suffices and no request waits; otherwise nothing is used, and it is 1."""
        if wait := super().admit(key, now, cost):
            return wait
        lease = self._leases.get(hash(key))
        if lease is not None and not lease.waiting and lease.try_use(cost, now):
            return 0
        super().refund(key, cost)
        return 1

    def charge_deferred(self, key: str, now: float, cost: int = 1) -> WaitTime:
        """
        Charge `key` for something already done, and acquire the amount afterwards. If it is known to be over its
        limit, use nothing and return the seconds to wait.
        """
        if wait := super().admit(key, now, cost):
            return wait
        lease = self._get_lease(key, now)
        refusal = lease.wait(cost, now)
        if not refusal and not lease.try_use(cost, now):
            if self._quotas.is_backing_off():
                refusal = self._wait_for_share(key, 0)
            else:
                lease.charge_deferred(cost, now)
                self._start_request(key, lease)
        if refusal:
            super().refund(key, cost)
        return ceil(refusal)

    def refund(self, key: str, cost: int = 1) -> None:
        """Undo a charge, as far as there was one."""
        super().refund(key, cost)
        if (lease := self._leases.get(hash(key))) is None:
            return
        now = self._clock.seconds()
        lease.refund(cost, now)
        if excess := self._trim(lease, now):
            self._quotas.put_back(lease.key, excess)
        lease.clear_refusal()

    async def take(self, key: str, cost: int) -> int:
        """
        Use an amount and return 0, or nothing and return the seconds to wait.

        :param cost: already charged in this process; 0 only pays debt.
        """
        now = self._clock.seconds()
        lease = self._get_lease(key, now)
        if not lease.waiting and lease.try_use(cost, now):
            return 0
        wait = lease.wait(cost, now)
        if not wait and not self._quotas.is_backing_off():
            answer: Deferred[float] = Deferred()
            if lease.waiting is None:
                lease.waiting = deque()
            lease.waiting.append((cost, answer))
            # A request without time left is decided locally, as if the store were unavailable.
            answer.addTimeout(get_time_left(self._clock), self._clock, lambda *_: self._wait_for_share(key, 0))
            self._start_request(key, lease)
            return ceil(await answer)
        return ceil(wait) or self._wait_for_share(key, 0)

    def _wait_for_share(self, key: str, cost: int) -> int:
        """Seconds to wait for an amount on top of what was charged, if this process has to decide alone."""
        limit = self._quotas.local_limit(self._overrides.get(key, self.limit))
        return super().wait(key, self._clock.seconds(), cost, limit)

    def _trim(self, lease: QuotaLease, now: float) -> int:
        """
        Give up the surplus of a lease without waiting requests; returns it. No process holds a whole lease unused, so
        all together exceed the limit by less than their leases.
        """
        return 0 if lease.waiting else lease.trim(self._quotas.lease_size(lease.limit) - 1, now)

    def _start_request(self, key: str, lease: QuotaLease) -> None:
        if not lease.asking:
            lease.asking = True
            with outside_request():
                Deferred.fromCoroutine(self._acquire(key, lease))

    async def _acquire(self, key: str, lease: QuotaLease) -> None:
        """Acquire leases until no request waits and, if possible, the debt is paid."""
        try:
            while await self._request_lease(lease):
                pass
        except QuotaStoreUnavailable:
            pass
        except Exception:
            _log.failure("acquiring a quota lease failed", redact_failure())
        lease.asking = False
        waiting, lease.waiting = lease.waiting, None
        for _, answer in waiting or ():
            answer.callback(self._wait_for_share(key, 0))

    async def _request_lease(self, lease: QuotaLease) -> bool:
        """
        Request enough for all requests and the debt, or a whole lease, then what the first request needs.

        :return: False if there was nothing to request.
        :raise QuotaStoreUnavailable: the store does not respond.
        """
        now = self._clock.seconds()
        lease.serve(now)
        costs, debt = [cost for cost, _ in lease.waiting or ()], -lease.remaining(now)
        if not costs and (debt <= 0 or lease.wait(0, now)):
            return False
        needed = debt + (costs[0] if costs else 0)
        most = lease.limit_request(max(debt + sum(costs), self._quotas.lease_size(lease.limit)), needed, now)
        taken = await self._try_take_amount(lease, most) or (
            most > needed and await self._try_take_amount(lease, needed)
        )
        if not taken:
            lease.refuse(self._clock.seconds())
        return True

    async def _try_take_amount(self, lease: QuotaLease, amount: int) -> bool:
        asked_at = self._clock.seconds()
        wait = await self._quotas.take(lease.key, amount, limit=lease.limit, period=self.period)
        now = self._clock.seconds()
        if wait:
            lease.note_refusal(amount, wait, now)
            return False
        lease.add_granted(amount, asked_at, now)
        lease.serve(now)
        self._trim(lease, now)
        return True

    def _get_lease(self, key: str, now: float) -> QuotaLease:
        """The lease of a key, without its surplus."""
        # As in the window: clients determine the length of most keys.
        name = hash(key)
        lease = self._leases.get(name)
        if lease is None:
            self._drop_idle(now)
            limit = self._overrides.get(key, self.limit)
            lease = self._leases[name] = QuotaLease(self._quotas.make_key(self._name, key), self.period, limit)
        else:
            self._leases.move_to_end(name)
            self._trim(lease, now)
        return lease

    def _drop_idle(self, now: float) -> None:
        """Drop up to two idle keys to make room, so that no call is slow."""
        for _ in range(2):
            if not self._leases:
                return
            oldest = next(iter(self._leases.values()))
            if len(self._leases) < self._max_keys and (oldest.asking or not oldest.is_idle(now)):
                return
            self._leases.popitem(last=False)
            # A request that still waits must not use it as well.
            if left := oldest.trim(0, now):
                self._quotas.put_back(oldest.key, left)
