"""Processes that share rate limits: their clock, their store, and the outcome of each request."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import Clock

from mediatord.errors import RateLimitExceeded, StoreUnavailable
from mediatord.ratelimit.distributed_limiter import QuotaStore
from mediatord.ratelimit.rate_limiter import RateLimiter, RateLimits
from mediatord.store.interfaces.cluster_and_quotas import IClusterStore
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.sqlite.memory_store import MemoryStore

NOW = 1_800_000_000.0
DID = "did:example:alice"
PEER = "192.0.2.1"


class CountingClusterStore:
    """
    Cluster store that counts quota operations, and can be down or slow.

    :ivar held: Deferreds of operations while it is slow, in order.
    """

    def __init__(self, store: IClusterStore) -> None:
        self._store = store
        self.uses: list[tuple[bytes, int]] = []
        self.put_backs: list[tuple[bytes, int]] = []
        self.away: Exception | None = None
        self.slow = False
        self.held: list[Deferred[None]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def take_quota(self, key: bytes, amount: int, *, limit: int, period: float) -> Deferred[float]:
        self.uses.append((key, amount))
        return self._answer(lambda: self._store.take_quota(key, amount, limit=limit, period=period))

    def return_quota(self, key: bytes, amount: int) -> Deferred[None]:
        self.put_backs.append((key, amount))
        return self._answer(lambda: self._store.return_quota(key, amount))

    def release(self) -> None:
        """Answer everything that was requested so far."""
        held, self.held = self.held, []
        for item in held:
            item.callback(None)

    @property
    def operations(self) -> int:
        """Number of operations so far."""
        return len(self.uses) + len(self.put_backs)

    def _answer(self, work: Any) -> Deferred[Any]:
        if self.away is not None:
            return fail(self.away)
        if not self.slow:
            answer: Deferred[Any] = work()
            return answer
        waiting: Deferred[None] = Deferred()
        self.held.append(waiting)
        return waiting.addCallback(lambda _: work())


class LimiterProcess:
    """
    One process, which records its admissions with their time.

    :param nodes: all live nodes, itself included.

    :ivar key: key of an account's quota in the store.
    """

    def __init__(
        self, clock: IReactorTime, cluster: Any, nodes: Sequence[object], limit: int, secret: bytes = b"secret"
    ) -> None:
        self.allowances = QuotaStore(clock, cluster, lambda: len(nodes), secret=secret)
        self.clock = clock
        self.key = self.allowances.make_key("accounts", DID)
        self.refusals: list[tuple[str, str, str, int]] = []
        self.admitted: list[float] = []
        self.admission = RateLimiter(
            clock,
            lambda *refusal: self.refusals.append(refusal),
            RateLimits(limit, limit, limit),
            self.allowances.make_limiter,
        )

    def request(self, did: str = DID, cost: int = 1) -> Deferred[int]:
        """A request of an account; fires with the seconds it has to wait, or 0."""
        return Deferred.fromCoroutine(self._request(did, cost))

    async def _request(self, did: str, cost: int) -> int:
        try:
            await self.admission.charge_account(did, PEER, cost)
        except RateLimitExceeded as error:
            return int(error.retry_after or 0)
        self.admitted += [self.clock.seconds()] * cost
        return 0

    def request_now(self, did: str = DID, cost: int = 1) -> int:
        """The same, for a store that answers at once."""
        answers: list[int] = []
        self.request(did, cost).addCallback(answers.append)
        (answer,) = answers
        return answer


class LimiterProcesses:
    """
    Processes on one memory store.

    :param limit: requests per minute.
    """

    def __init__(self, limit: int, count: int = 3, secret: bytes = b"secret") -> None:
        self.limit = limit
        self.secret = secret
        self.clock = Clock()
        self.clock.advance(NOW)
        self.store = MemoryStore(self.clock, QueueLimits(10, 10_000))
        self.store.open()
        self.cluster = CountingClusterStore(self.store.cluster)
        self.all: list[LimiterProcess] = []
        for _ in range(count):
            self.join()

    def __getitem__(self, number: int) -> LimiterProcess:
        return self.all[number]

    def join(self) -> LimiterProcess:
        """Add a process."""
        process = LimiterProcess(self.clock, self.cluster, self.all, self.limit, self.secret)
        self.all.append(process)
        return process

    @property
    def admitted(self) -> list[float]:
        """Times of all admissions."""
        return sorted(moment for process in self.all for moment in process.admitted)

    def fail(self) -> None:
        """Let the store be down from now on."""
        self.cluster.away = StoreUnavailable()


def max_in_a_minute(admitted: Sequence[float], minute: float = 60.0) -> int:
    """Most admissions in any 60 seconds."""
    most = first = 0
    for last, moment in enumerate(admitted):
        while admitted[first] <= moment - minute:
            first += 1
        most = max(most, last - first + 1)
    return most


def min_in_a_minute(admitted: Sequence[float], begin: float, end: float, minute: float = 60.0) -> int:
    """Fewest admissions in any 60 seconds between these two times."""
    starts = [begin, *(moment + 2**-20 for moment in admitted if begin <= moment <= end - minute)]
    return min(bisect_left(admitted, start + minute) - bisect_left(admitted, start) for start in starts)
