"""
DIDs without sockets at other nodes, where it shows without a question that none has come since.

Sockets that come, as all workers of a daemon see it: counters in memory that they share.

Where sockets of a DID were seen last, so that a hint need not wait for the store to say so again.

Asks the store who holds sockets of a DID.

Tells the store which DIDs this node holds sockets of.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Collection, Hashable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Protocol
from zlib import crc32

from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.clock import get_time_left
from mediatord.errors import StoreUnavailable
from mediatord.failure_logging import redact_failure
from mediatord.store.interfaces.cluster import ClusterNode, IClusterStore, PresenceRecord

# DIDs that are remembered; with DIDs of two thousand characters that is 20 MiB at most.
MAX_ABSENT_DIDS = 10_000


class PresenceEpochs(Protocol):
    """What nodes that share memory tell each other of sockets that come."""

    def increment(self, dids: Iterable[str]) -> None:
        """Sockets of these are here, and the store knows it."""

    def epoch(self, did: str) -> Hashable:
        """Something that was never the same before a socket of a DID came to another node and after that."""


class NullPresenceEpochs:
    """Arrivals of nodes that share nothing but the store: what one has said may be over at any time."""

    def increment(self, dids: Iterable[str]) -> None:
        """It is for the store to say."""

    def epoch(self, did: str) -> None:
        """There is none."""


class AbsenceCache:
    """
    What the store has said of DIDs that have no socket at another node.

    As good as a new question is, as far as there are signs: a node shows one after the store knows of a socket, and
    before anybody is told that it is live. So what is stored before the sign is seen is waiting when the socket is
    told how much waits.
    """

    def __init__(self, presence_epochs: PresenceEpochs) -> None:
        self._presence_epochs = presence_epochs
        self._epochs: OrderedDict[str, Hashable] = OrderedDict()

    def __len__(self) -> int:
        return len(self._epochs)

    def is_absent(self, did: str) -> bool:
        """Whether the store would say so now as well."""
        epoch = self._epochs.get(did)
        if epoch is None:
            return False
        if epoch == self._presence_epochs.epoch(did):
            return True
        del self._epochs[did]
        return False

    def epoch(self, did: str) -> Hashable:
        """To be taken before the store is asked."""
        return self._presence_epochs.epoch(did)

    def record(self, did: str, epoch: Hashable) -> None:
        """The store has said so. :param sign: as it was before that."""
        if epoch is None:
            return
        self._epochs.pop(did, None)
        self._epochs[did] = epoch
        if len(self._epochs) > MAX_ABSENT_DIDS:
            self._epochs.popitem(last=False)


# Counters of each worker. A DID has one of them, with others.
COUNTERS_PER_WORKER = 4_096
_COUNTER_BYTES = 8


class SharedPresenceCounters:
    """
    Each worker counts in a part of its own, so that nobody has to take turns. Whoever takes the place of a worker
    goes on counting where that one ended.

    :param number: of the worker, counted from 0.
    """

    def __init__(self, path: Path, number: int) -> None:
        with open(path, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
        self._counters = memoryview(memory).cast("Q")
        parts = range(0, len(self._counters), COUNTERS_PER_WORKER)
        self._own_offset = parts[number]
        self._other_offsets = [part for part in parts if part != self._own_offset]

    @classmethod
    def of(cls, socket: Path) -> SharedPresenceCounters | None:
        """
        That of the worker whose node-to-node socket is called so; None where no supervisor has made any.

        :raise OSError: it cannot be had.
        """
        path = presence_counter_path(socket)
        return cls(path, int(socket.stem) - 1) if path.exists() else None

    def increment(self, dids: Iterable[str]) -> None:
        """Sockets of these are here, and the store knows it."""
        for did in dids:
            self._counters[self._own_offset + _counter_index(did)] += 1

    def epoch(self, did: str) -> tuple[int, ...]:
        """Never the same before a socket of the DID came to another worker and after that."""
        place, counters = _counter_index(did), self._counters
        return tuple([counters[part + place] for part in self._other_offsets])


def create_presence_counters(socket: Path, count: int) -> None:
    """
    Make room for the counters of so many workers.

    :param socket: node-to-node socket of one of them.
    :raise OSError: there is none.
    """
    presence_counter_path(socket).write_bytes(bytes(count * COUNTERS_PER_WORKER * _COUNTER_BYTES))


def presence_counter_path(socket: Path) -> Path:
    """Where the counters are that go with a node-to-node socket."""
    return socket.with_name("arrivals")


def _counter_index(did: str) -> int:
    return crc32(did.encode("utf-8", "surrogatepass")) % COUNTERS_PER_WORKER


# DIDs that are remembered, and for how many seconds after the store was asked about one.
MAX_RECENT_DIDS = 10_000
RECENT_NODE_TTL = 60.0


class RecentNodeCache:
    """
    What the store has said lately of DIDs with sockets at other nodes.

    It is a guess: whoever goes by it asks the store as well.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._live: frozenset[str] = frozenset()
        self._seen: OrderedDict[str, tuple[float, tuple[ClusterNode, ...]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def set_live_nodes(self, live: Collection[str]) -> None:
        """
        Of other nodes nothing is recalled.

        :param live: boots.
        """
        self._live = frozenset(live)

    def get_nodes(self, did: str) -> Sequence[ClusterNode]:
        """The nodes that had sockets of a DID, as far as that is known."""
        until, nodes = self._seen.get(did, (0.0, ()))
        if until <= self._clock.seconds():
            return ()
        return [node for node in nodes if node.boot in self._live]

    def record(self, did: str, nodes: Sequence[ClusterNode]) -> None:
        """These have them, and no others."""
        self._seen.pop(did, None)
        if nodes:
            self._seen[did] = self._clock.seconds() + RECENT_NODE_TTL, tuple(nodes)
            if len(self._seen) > MAX_RECENT_DIDS:
                self._seen.popitem(last=False)


_log = Logger()

# DIDs of one question to the store, and such questions at the same time.
LOOKUP_BATCH = 500
MAX_CONCURRENT_LOOKUPS = 4


class PresenceLookup:
    """
    Asks the store who holds sockets of a DID, for all that comes in one turn of the reactor together.

    Answers for one DID come in the order of the questions.
    """

    def __init__(self, clock: IReactorTime, store: IClusterStore) -> None:
        self._clock = clock
        self._store = store
        self._wanted: dict[str, list[Deferred[list[PresenceRecord]]]] = {}
        self._in_progress: set[str] = set()
        self._lookups = 0
        self._timer: IDelayedCall | None = None

    def of(self, did: str) -> Deferred[list[PresenceRecord]]:
        """
        All that is known of a DID.

        :raise StoreUnavailable: that cannot be known.
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
            lookup.addErrback(lambda failure: _log.failure("looking for sockets failed", redact_failure(failure)))

    def _resolve_waiters(self, found: object, waiting: dict[str, list[Deferred[list[PresenceRecord]]]]) -> None:
        self._lookups -= 1
        self._in_progress.difference_update(waiting)
        self._schedule()
        if not isinstance(found, list):
            for one in _flatten(waiting.values()):
                one.errback(found)  # type: ignore[arg-type]  # a Failure
            return
        presences: dict[str, list[PresenceRecord]] = {did: [] for did in waiting}
        for presence in found:
            presences[presence.did].append(presence)
        for did, deferreds in waiting.items():
            for one in deferreds:
                one.callback(presences[did])


def _flatten(groups: Iterable[list[Deferred[list[PresenceRecord]]]]) -> Iterable[Deferred[list[PresenceRecord]]]:
    return (one for group in groups for one in group)


PUBLISH_BATCH = 500
# Seconds until the store is told again what it did not take.
PUBLISH_RETRY_DELAY = 1.0


class PresencePublisher:
    """
    Keeps what the store says of this node the same as what is so.

    One conversation with the store at a time, in which each DID is said to be here or gone as it is by then: so a
    socket that comes and goes at once ends right, however the answers of the store come.

    :param boot: ours.
    :param arrivals: also told of those who are here, before anybody else is.
    """

    def __init__(
        self, clock: IReactorTime, store: IClusterStore, boot: str, presence_epochs: PresenceEpochs | None = None
    ) -> None:
        self._clock = clock
        self._store = store
        self._boot = boot
        self._presence_epochs = presence_epochs or NullPresenceEpochs()
        self._present: set[str] = set()
        self._changed: dict[str, None] = {}
        # What the store knows, and what it may know because an answer did not come.
        self._published: set[str] = set()
        self._maybe_published: set[str] = set()
        self._waiting: dict[str, list[Deferred[None]]] = {}
        self._generation = 0
        self._is_member = self._is_stopped = False
        self._timer: IDelayedCall | None = None
        self._exchange: Deferred[float] | None = None

    def here(self, did: str) -> Deferred[None]:
        """
        A socket for a DID is here, the first one or one more; fires when other nodes can know.

        :raise StoreUnavailable: they cannot for now; they will when the store is there again.
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

    def gone(self, did: str) -> None:
        """The last one is gone."""
        self._present.discard(did)
        self._resolve_waiters([did])
        self._change(did)

    def joined(self) -> None:
        """This node is one of the cluster, and the store knows nothing of its sockets."""
        self._is_member = True
        self._forget()
        self._changed = dict.fromkeys([*self._present, *self._changed])
        self._schedule(0)

    def parted(self) -> None:
        """It is none any more, for the time being: who comes now waits until it is again."""
        self._is_member = False
        self._forget()

    def stop(self) -> Deferred[None]:
        """Say nothing more; fires when that is sure."""
        self._is_member, self._is_stopped = False, True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._resolve_waiters(list(self._waiting), fault=True)
        over: Deferred[None] = Deferred()
        (self._exchange or succeed(0.0)).addCallback(lambda _: over.callback(None))
        return over

    def _forget(self) -> None:
        """What was said, or is just being said, counts no longer."""
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
        exchange.addErrback(self._publish_failed)
        exchange.addCallback(self._publish_finished)

    def _publish_finished(self, pause: float | None) -> None:
        self._exchange = None
        self._schedule(pause or 0)

    def _publish_failed(self, failure: object) -> float:
        _log.failure("announcing sockets failed", redact_failure(failure))  # type: ignore[arg-type]  # a Failure
        return PUBLISH_RETRY_DELAY

    async def _publish_changes(self) -> float:
        """Say all there is to say; the seconds after which that makes sense again."""
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
            except StoreUnavailable:
                self._resolve_waiters(dids, fault=True)
                return PUBLISH_RETRY_DELAY
            except Exception:
                self._resolve_waiters(dids, fault=True)
                raise
            finally:
                self._changed.update(dict.fromkeys(did for did in dids if not self._is_in_sync(did)))
        return 0

    def _is_in_sync(self, did: str) -> bool:
        return did in self._published if did in self._present else did not in self._maybe_published

    async def _publish(self, dids: Sequence[str]) -> None:
        if dids:
            generation = self._generation
            self._maybe_published.update(dids)
            try:
                await self._store.add_presence(self._boot, dids)
            finally:
                self._presence_epochs.increment(dids)  # if it failed, the store may know all the same
            if generation == self._generation:
                self._published.update(dids)

    async def _unpublish(self, dids: Sequence[str]) -> None:
        if dids:
            self._published.difference_update(dids)
            await self._store.remove_presence(self._boot, dids)
            self._maybe_published.difference_update(dids)

    def _resolve_waiters(self, dids: Iterable[str], *, fault: bool = False) -> None:
        """Tell who waits for these DIDs that others know, or that they cannot."""
        for known in [known for did in dids for known in self._waiting.pop(did, ())]:
            if not known.called:
                known.errback(StoreUnavailable()) if fault else known.callback(None)
