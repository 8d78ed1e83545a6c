"""
Presence: which nodes hold live sockets of a DID.

Each node publishes its own DIDs to the store (:class:`PresencePublisher`) and looks up those of others
(:class:`PresenceLookup`, :class:`PresenceCache`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.errors import StoreUnavailable
from mediatord.runtime.failure_logging import redact_failure
from mediatord.runtime.request_time import get_time_left
from mediatord.store.interfaces.cluster_and_quotas import ClusterNode, IClusterStore, PresenceRecord

_log = Logger()

# With DIDs of 2,000 characters these are 40 MiB at most.
MAX_CACHED_DIDS = 20_000
# Seconds for which an entry says where to try first.
RECENT_NODE_TTL = 60.0


class PresenceCache:
    """Nodes that held sockets of a DID when the store was last asked: a guess, to be confirmed by a lookup."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._live: frozenset[str] = frozenset()
        self._entries: OrderedDict[str, tuple[float, Sequence[ClusterNode]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def set_live_nodes(self, boots: Collection[str]) -> None:
        """Return only these nodes from now on."""
        self._live = frozenset(boots)

    def get_nodes(self, did: str) -> Sequence[ClusterNode]:
        """The live nodes last known to hold sockets of a DID."""
        until, nodes = self._entries.get(did, (0.0, ()))
        if nodes and until <= self._clock.seconds():
            del self._entries[did]
            return ()
        return [node for node in nodes if node.boot in self._live]

    def record(self, did: str, nodes: Sequence[ClusterNode]) -> None:
        """Store the result of a lookup."""
        self._entries.pop(did, None)
        if nodes:
            self._entries[did] = self._clock.seconds() + RECENT_NODE_TTL, nodes
            if len(self._entries) > MAX_CACHED_DIDS:
                self._entries.popitem(last=False)


# DIDs per query, and concurrent queries.
LOOKUP_BATCH = 500
MAX_CONCURRENT_LOOKUPS = 4


class PresenceLookup:
    """
    Looks up presence in the store, with one query for all DIDs of a reactor iteration.

    Results for one DID arrive in the order of the calls.
    """

    def __init__(self, clock: IReactorTime, store: IClusterStore) -> None:
        self._clock = clock
        self._store = store
        self._wanted: dict[str, list[Deferred[list[PresenceRecord]]]] = {}
        self._in_progress: set[str] = set()
        self._lookups = 0
        self._timer: IDelayedCall | None = None

    def find(self, did: str) -> Deferred[list[PresenceRecord]]:
        """
        All presence records of a DID.

        :raise StoreUnavailable: the store did not answer.
        """
        found: Deferred[list[PresenceRecord]] = Deferred()
        self._wanted.setdefault(did, []).append(found)
        self._schedule()
        return found

    def _schedule(self) -> None:
        if self._wanted and self._timer is None and self._lookups < MAX_CONCURRENT_LOOKUPS:
            self._timer = self._clock.callLater(0, self._look_up)

    def _look_up(self) -> None:
        self._timer = None
        while self._lookups < MAX_CONCURRENT_LOOKUPS:
            dids = list(islice((did for did in self._wanted if did not in self._in_progress), LOOKUP_BATCH))
            if not dids:
                break
            self._in_progress.update(dids)
            waiting = {did: self._wanted.pop(did) for did in dids}
            self._lookups += 1
            lookup = self._store.find_presence(dids)
            lookup.addBoth(self._resolve_waiters, waiting)
            lookup.addErrback(lambda failure: _log.failure("presence lookup failed", redact_failure(failure)))

    def _resolve_waiters(
        self, found: list[PresenceRecord] | Failure, waiting: dict[str, list[Deferred[list[PresenceRecord]]]]
    ) -> None:
        self._lookups -= 1
        self._in_progress.difference_update(waiting)
        self._schedule()
        records: dict[str, list[PresenceRecord]] = {did: [] for did in waiting}
        if not isinstance(found, Failure):
            for record in found:
                records[record.did].append(record)
        for did, deferreds in waiting.items():
            for one in deferreds:
                if isinstance(found, Failure):
                    one.errback(found)
                else:
                    one.callback(records[did])


PUBLISH_BATCH = 500
# Seconds between attempts after the store failed.
PUBLISH_RETRY_DELAY = 1.0


class PresencePublisher:
    """
    Keeps the presence records of this node in the store up to date.

    Runs one exchange with the store at a time and publishes each DID's state as of that moment. So the final state is
    right however quickly sockets come and go.

    :param boot: of this node.
    """

    def __init__(self, clock: IReactorTime, store: IClusterStore, boot: str) -> None:
        self._clock = clock
        self._store = store
        self._boot = boot
        self._present: set[str] = set()
        self._changed: dict[str, None] = {}
        # What the store knows, and what it may know although its answer was lost.
        self._published: set[str] = set()
        self._maybe_published: set[str] = set()
        self._waiting: dict[str, list[Deferred[None]]] = {}
        self._generation = 0
        self._is_member = self._is_stopped = False
        self._timer: IDelayedCall | None = None
        self._exchange: Deferred[float] | None = None

    def add(self, did: str) -> Deferred[None]:
        """
        Publish that this node has a socket of a DID; fires when other nodes can find it.

        :raise StoreUnavailable: not for now; it is published when the store is available again.
        """
        if did in self._published and did in self._present:
            return succeed(None)
        self._present.add(did)
        if self._is_stopped:
            return fail(StoreUnavailable())
        known: Deferred[None] = Deferred()
        self._waiting.setdefault(did, []).append(known)
        known.addTimeout(get_time_left(self._clock), self._clock, lambda _, __: fail(StoreUnavailable()))
        self._change(did)
        return known

    def remove(self, did: str) -> None:
        """Publish that the last socket of a DID is closed."""
        self._present.discard(did)
        self._resolve_waiters([did])
        self._change(did)

    def joined(self) -> None:
        """Publish everything: this node has just joined, and the store knows none of its sockets."""
        self._is_member = True
        self._invalidate()
        self._changed = dict.fromkeys([*self._present, *self._changed])
        self._schedule(0)

    def parted(self) -> None:
        """Publish nothing until this node has joined again."""
        self._is_member = False
        self._invalidate()

    def stop(self) -> Deferred[None]:
        """Publish nothing more; fires when the exchange in progress has ended."""
        self._is_member, self._is_stopped = False, True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._resolve_waiters(list(self._waiting), fault=True)
        over: Deferred[None] = Deferred()
        (self._exchange or succeed(0.0)).addCallback(lambda _: over.callback(None))
        return over

    def _invalidate(self) -> None:
        """Disregard what was published, and what is being published now."""
        self._generation += 1
        self._published.clear()

    def _change(self, did: str) -> None:
        self._changed[did] = None
        self._schedule(0)

    def _schedule(self, delay: float) -> None:
        if self._is_member and self._changed and self._timer is None and self._exchange is None:
            self._timer = self._clock.callLater(delay, self._start)

    def _start(self) -> None:
        self._timer = None
        self._exchange = exchange = Deferred.fromCoroutine(self._publish_changes())
        exchange.addCallback(self._publish_finished)

    def _publish_finished(self, pause: float) -> None:
        self._exchange = None
        self._schedule(pause)

    async def _publish_changes(self) -> float:
        """Publish all changes; returns the delay before the next attempt in seconds."""
        while self._is_member and self._changed:
            dids = list(self._changed)[:PUBLISH_BATCH]
            for did in dids:
                del self._changed[did]
            try:
                await self._publish([did for did in dids if did in self._present and did not in self._published])
                self._resolve_waiters(did for did in dids if did in self._published)
                await self._unpublish(
                    [did for did in dids if did not in self._present and did in self._maybe_published]
                )
            except Exception as error:
                if not isinstance(error, StoreUnavailable):
                    _log.failure("publishing presence failed", redact_failure())
                self._resolve_waiters(dids, fault=True)
                return PUBLISH_RETRY_DELAY
            finally:
                self._changed.update(dict.fromkeys(did for did in dids if not self._is_in_sync(did)))
        return 0

    def _is_in_sync(self, did: str) -> bool:
        return did in self._published if did in self._present else did not in self._maybe_published

    async def _publish(self, dids: Sequence[str]) -> None:
        if dids:
            generation = self._generation
            self._maybe_published.update(dids)
            await self._store.add_presence(self._boot, dids)
            if generation == self._generation:
                self._published.update(dids)

    async def _unpublish(self, dids: Sequence[str]) -> None:
        if dids:
            self._published.difference_update(dids)
            await self._store.remove_presence(self._boot, dids)
            self._maybe_published.difference_update(dids)

    def _resolve_waiters(self, dids: Iterable[str], *, fault: bool = False) -> None:
        for known in [known for did in dids for known in self._waiting.pop(did, ())]:
            if not known.called:
                known.errback(StoreUnavailable()) if fault else known.callback(None)
