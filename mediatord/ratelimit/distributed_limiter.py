"""
Rate limits shared by several processes through the store.

Each process acquires quota leases from the store and serves requests from them. While the store does not respond,
each process enforces its share of the limits.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.clock import get_time_left, outside_request
from mediatord.errors import StoreUnavailable
from mediatord.log_redaction_and_throttle import redact_failure
from mediatord.store.interfaces.cluster import IClusterStore

_log = Logger()

T = TypeVar("T")

# Seconds until a request to the store times out.
QUOTA_STORE_TIMEOUT = 0.5
# Seconds during which a store that failed is not used.
QUOTA_STORE_BACKOFF = 1.0
# Leases per limit: bounds the unused quota of a node, multiplied by the number of nodes.
_LEASES_PER_LIMIT = 20
_MAX_KEY_LENGTH = 64
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
    answer: Deferred[Any] = Deferred()
    work.addBoth(lambda result: None if answer.called else answer.callback(result))
    if not answer.called:
        answer.addTimeout(seconds, clock, lambda *_: Failure(QuotaStoreUnavailable()))
    return answer


def _shorten_key(key: str) -> str | bytes:
    """The form in which a key is stored; clients determine the length of most keys."""
    if len(key) <= _MAX_KEY_LENGTH:
        return key
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class QuotaLease:
    """
    The part of a shared limit that one process holds: acquired but unused, used but not yet acquired (debt), and
    refused amounts. Everything lapses after `period` seconds.
    """

    __slots__ = ("_left", "_period", "_refused", "_refused_until", "_until")

    def __init__(self, period: float) -> None:
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
        if self.remaining(now) < amount:
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
        excess = self.remaining(now) - most
        if excess <= 0:
            return 0
        self._left = most
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


class _KeyQuota(QuotaLease):
    """
    The lease of one key, and the requests that wait for more.

    :ivar key: name in the store.
    :ivar limit: limit of all processes together.
    :ivar waiting: cost of each waiting request, and a Deferred that fires with its seconds to wait, or 0. None if
        there are none, since an empty deque is larger than the rest of this object.
    """

    __slots__ = ("asking", "key", "limit", "waiting")

    def __init__(self, key: bytes, period: float, limit: int) -> None:
        super().__init__(period)
        self.key = key
        self.limit = limit
        self.waiting: deque[tuple[int, Deferred[float]]] | None = None
        self.asking = False

    def enqueue(self, cost: int, answer: Deferred[float]) -> None:
        """Enqueue a request."""
        if self.waiting is None:
            self.waiting = deque()
        self.waiting.append((cost, answer))

    def wanted(self, now: float) -> int:
        """Amount that covers all waiting requests and the debt."""
        return sum([cost for cost, _ in self.waiting or ()]) - self.remaining(now)

    def needed(self, now: float) -> int:
        """Amount that covers the first waiting request and the debt."""
        return (self.waiting[0][0] if self.waiting else 0) - self.remaining(now)

    def has_work(self, now: float) -> bool:
        """Whether requests wait, or debt can be paid."""
        self.serve(now)
        return bool(self.waiting) or (self.remaining(now) < 0 and not self.wait(0, now))

    def serve(self, now: float) -> None:
        """Admit waiting requests in order, as far as the lease suffices."""
        while self.waiting and self.try_use(self.waiting[0][0], now):
            self.waiting.popleft()[1].callback(0.0)
        if not self.waiting:
            self.waiting = None

    def refuse(self, now: float) -> None:
        """Refuse the waiting requests that need at least what was refused."""
        staying: deque[tuple[int, Deferred[float]]] = deque()
        refused = []
        for cost, answer in self.waiting or ():
            wait = self.wait(cost, now)
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
            key_quota.clear_refusal()

    def wait(self, who: str, cost: int = 1) -> float:
        """Seconds for which `who` is known to be over its limit; 0.0 may be too optimistic."""
        key_quota, now = self._key_quotas.get(_shorten_key(who)), self._clock.seconds()
        wait = 0.0 if key_quota is None else key_quota.wait(cost, now)
        if wait or not self._quotas.is_backing_off() or (key_quota is not None and key_quota.remaining(now) >= cost):
            return wait
        return self._local_wait(who, cost)

    def try_take(self, who: str, cost: int) -> bool:
        """As :meth:`take`, if the lease suffices and no request waits; otherwise nothing is used."""
        key_quota, now = self._key_quotas.get(_shorten_key(who)), self._clock.seconds()
        return key_quota is not None and not key_quota.waiting and key_quota.try_use(cost, now)

    async def take(self, who: str, cost: int) -> float:
        """
        Use an amount and return 0.0, or nothing and return the seconds to wait.

        :param cost: already charged locally; 0 only pays debt.
        """
        key_quota, now = self._key_quota(who), self._clock.seconds()
        self._trim(key_quota, now)
        if not key_quota.waiting and key_quota.try_use(cost, now):
            return 0.0
        wait = key_quota.wait(cost, now)
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
        wait = key_quota.wait(cost, now)
        if wait:
            return wait
        if key_quota.try_use(cost, now):
            return 0.0
        if self._quotas.is_backing_off():
            return self._local_wait(who, 0)
        key_quota.charge_deferred(cost, now)
        self._start_request(who, key_quota)
        return 0.0

    def has_debt(self, who: str) -> bool:
        """Whether used amounts have not been acquired yet."""
        key_quota = self._key_quotas.get(_shorten_key(who))
        return key_quota is not None and key_quota.remaining(self._clock.seconds()) < 0

    def refund(self, who: str, cost: int) -> None:
        """Undo a use, as far as there was one."""
        key_quota = self._key_quotas.get(_shorten_key(who))
        if key_quota is None:
            return
        now = self._clock.seconds()
        key_quota.refund(cost, now)
        excess = self._trim(key_quota, now)
        if excess:
            self._quotas.put_back(key_quota.key, excess)
        key_quota.clear_refusal()

    def _trim(self, key_quota: _KeyQuota, now: float) -> int:
        """
        Give up the surplus of a lease without waiting requests; returns it. No process holds a whole lease unused, so
        all together exceed the limit by less than their leases.
        """
        return 0 if key_quota.waiting else key_quota.trim(self._quotas.lease_size(key_quota.limit) - 1, now)

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
        most = key_quota.limit_request(wanted, needed, now)
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
            key_quota.note_refusal(amount, wait, now)
            return False
        key_quota.add_granted(amount, asked_at, now)
        key_quota.serve(now)
        self._trim(key_quota, now)
        return True

    def _key_quota(self, who: str) -> _KeyQuota:
        short = _shorten_key(who)
        key_quota = self._key_quotas.get(short)
        if key_quota is None:
            self._forget()
            limit = self._overrides.get(who, self._limit)
            key_quota = _KeyQuota(self._quotas.make_key(self._bucket, who), self._period, limit)
            self._key_quotas[short] = key_quota
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
            if len(self._key_quotas) < self._max_keys and (oldest.asking or not oldest.is_idle(now)):
                return
            self._key_quotas.popitem(last=False)
            # A request that still waits must not use it as well.
            if left := oldest.trim(0, now):
                self._quotas.put_back(oldest.key, left)
