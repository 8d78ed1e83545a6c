"""
A hint on its way to all nodes that it is for.

Contract changes that nodes with sockets are yet to be told of.

A message that no hint came for is found in the store; that a contract has changed is not. So whoever could not say
so says it again, until all who hold sockets have answered or hold none any more.

Has other nodes push what was accepted here: finds those that hold sockets of a DID, and hints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.cluster.peer_protocol import PeerNotification
from mediatord.cluster.presence import (
    AbsenceCache,
    NullPresenceEpochs,
    PresenceEpochs,
    PresenceLookup,
    RecentNodeCache,
)
from mediatord.errors import StoreUnavailable
from mediatord.failure_logging import redact_failure
from mediatord.store.interfaces.cluster import ClusterNode, PresenceRecord
from mediatord.store.interfaces.decentrl import PendingEvent
from mediatord.store.interfaces.messages import StoredMessage


class NotificationSender(Protocol):
    """What takes hints for other nodes."""

    def enqueue(self, node: ClusterNode, notification: PeerNotification) -> Deferred[bool | None]:
        """Fires with whether a socket of that node took it, None when that is not known; never fails."""


class NotificationFanout:
    """
    Goes once to each node: to those where sockets were seen last, and to those where they are.

    :param over: told of it when there is nothing more to wait for.
    :param told: boots that need not be told.
    :ivar taken: fires with whether a socket of another node took it, as soon as that is known.
    :ivar sent: boots that it went to.
    :ivar told: boots that have answered, and those that need not.
    """

    def __init__(
        self,
        notification: PeerNotification,
        sender: NotificationSender,
        on_done: Callable[[NotificationFanout], None] = lambda fanout: None,
        told: Iterable[str] = (),
    ) -> None:
        self.notification = notification
        self.taken: Deferred[bool] = Deferred()
        self.sent: set[str] = set()
        self.told = set(told)
        self._sender = sender
        self._on_done = on_done
        self._waiting: set[str] = set()
        self._holders: frozenset[str] | None = None
        self._is_lookup_done = False

    @property
    def complete(self) -> bool:
        """Whether it is known who holds sockets, and all of them have answered."""
        return self._holders is not None and self._holders <= self.told

    def send_to(self, nodes: Iterable[ClusterNode]) -> None:
        """These should have it; those that had it are passed over."""
        for node in nodes:
            if node.boot not in self.sent and node.boot not in self.told:
                self.sent.add(node.boot)
                self._waiting.add(node.boot)
                self._sender.enqueue(node, self.notification).addCallback(self._answered, node.boot)

    def end(self, nodes: Sequence[ClusterNode] | None) -> None:
        """
        These hold sockets, and nobody else has to be waited for.

        :param nodes: None when that cannot be known.
        """
        if nodes is not None:
            self._holders = frozenset(node.boot for node in nodes)
            self.send_to(nodes)
            self._waiting &= self._holders
        self._is_lookup_done = True
        self._finish_if_done()

    def _answered(self, took: bool | None, boot: str) -> None:
        if took is not None:
            self.told.add(boot)
        if took and not self.taken.called:
            self.taken.callback(True)
        if boot in self._waiting:
            self._waiting.discard(boot)
            self._finish_if_done()

    def _finish_if_done(self) -> None:
        if self._is_lookup_done and not self._waiting:
            if not self.taken.called:
                self.taken.callback(False)
            self._on_done(self)


# DIDs that are remembered, and how many are gone through at a time.
MAX_RETRY_DIDS = 10_000
RETRY_BATCH = 100
# Seconds until the next attempt: at first, and at most, twice as many after each that failed.
MIN_RETRY_DELAY, MAX_RETRY_DELAY = 1.0, 15.0


class _BackoffQueue:
    """
    DIDs that wait for the same pace, the oldest in front.

    :param remind: told of each, with the boots that need not be told.
    :param longest: seconds that the pause between two lots grows to.
    """

    def __init__(self, clock: IReactorTime, retry: Callable[[str, Collection[str]], None], max_delay: float) -> None:
        self.entries: OrderedDict[str, frozenset[str]] = OrderedDict()
        self._clock = clock
        self._retry = retry
        self._max_delay = max_delay
        self._delay = MIN_RETRY_DELAY
        self._timer: IDelayedCall | None = None

    def put(self, did: str, told: frozenset[str]) -> None:
        """At its end."""
        self.entries[did] = told
        self._schedule()

    def reset_backoff(self) -> None:
        """Begin with short pauses again, if they are not: the next lot is not put off over and over."""
        if self._delay > MIN_RETRY_DELAY:
            self._delay = MIN_RETRY_DELAY
            self._cancel()
            self._schedule()

    def end(self) -> None:
        """Forget them."""
        self.entries.clear()
        self._cancel()

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self) -> None:
        if self.entries and self._timer is None:
            self._timer = self._clock.callLater(self._delay, self._retry_batch)

    def _retry_batch(self) -> None:
        self._timer = None
        self._delay = min(2 * self._delay, self._max_delay)
        some = [self.entries.popitem(last=False) for _ in range(min(RETRY_BATCH, len(self.entries)))]
        for did, told in some:
            self._retry(did, told)
        self._schedule()


class ContractChangeRetryQueue:
    """
    However often something has changed for a DID, it is said once.

    Those that failed have a line of their own: of a node that nobody reaches there may be thousands, which are in
    nobody's way there.

    :param remind: says so to all who hold sockets of a DID, but for these boots; calls :meth:`owe_still` or
        :meth:`paid`.
    :param dropped: called when there are too many.
    """

    def __init__(
        self, clock: IReactorTime, retry: Callable[[str, Collection[str]], None], dropped: Callable[[], None]
    ) -> None:
        self._dropped = dropped
        self._new = _BackoffQueue(clock, retry, MIN_RETRY_DELAY)
        self._failed = _BackoffQueue(clock, retry, MAX_RETRY_DELAY)
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._new.entries) + len(self._failed.entries)

    def add(self, did: str, told: Collection[str]) -> None:
        """
        Some could not be told of a change.

        :param told: boots that could.
        """
        self._put(self._new, did, told)

    def add_failed(self, did: str, told: Collection[str]) -> None:
        """
        Nor when they were reminded, unless there is a newer change to remind them of.

        :param told: boots that need not be told.
        """
        self._put(self._new if did in self._new.entries else self._failed, did, told)

    def record_success(self) -> None:
        """A reminder came to all whom it was for: others may, too."""
        self._failed.reset_backoff()

    def end(self) -> None:
        """Forget them."""
        self._is_closed = True
        self._new.end()
        self._failed.end()

    def _put(self, queue: _BackoffQueue, did: str, told: Collection[str]) -> None:
        if self._is_closed:
            return
        needless = frozenset(told)
        for one in (self._new, self._failed):
            needless &= one.entries.pop(did, needless)
        queue.put(did, needless)
        if len(self) > MAX_RETRY_DIDS:
            (self._failed.entries or self._new.entries).popitem(last=False)
            self._dropped()


_log = Logger()

# Seconds that a question to the store comes after hints that did not wait for its answer: so it is in nobody's way,
# and there is one for many.
LOOKUP_DELAY = 0.05
# What may wait for the store and for other nodes to say where its sockets are: messages, events and changes of
# contracts, and bytes of their payloads, which are in memory meanwhile.
MAX_PENDING = 10_000
MAX_PENDING_BYTES = 67_108_864


class RemoteDeliveryMetrics(Protocol):
    """What counts."""

    def count_stale_presence(self) -> None:
        """A node was said to hold sockets, and is gone or holds none."""

    def count_cluster_push(self, outcome: Literal["dropped"]) -> None:
        """A hint came to this end."""


@dataclass(slots=True)
class _PendingFanouts:
    """
    Hints of one DID that the store has not answered for.

    :param ways: in order.
    :param offered: boots that all of them were offered to.
    """

    fanouts: dict[NotificationFanout, None] = field(default_factory=dict)
    offered: frozenset[str] = frozenset()

    def add(self, fanout: NotificationFanout, nodes: Sequence[ClusterNode]) -> None:
        """:param nodes: where sockets were seen last."""
        self.fanouts[fanout] = None
        self.send_to(nodes)
        fanout.send_to(nodes)

    def send_to(self, nodes: Sequence[ClusterNode]) -> None:
        """All go to these nodes, so that none is overtaken there by one that comes later."""
        boots = frozenset(node.boot for node in nodes)
        if not boots <= self.offered:
            for fanout in self.fanouts:
                fanout.send_to(nodes)
        self.offered = boots


class RemoteDelivery:
    """
    What routing and delivery know of other nodes. None of its Deferreds fails.

    A hint goes at once to the nodes where sockets of its DID were seen last. The store is asked all the same, after
    what the hint is about is stored, and those that hold sockets by then and have no hint yet get one. So a socket
    that has just come, anywhere, is found as if nothing was remembered. Hints of a DID go to each node in order.

    Nobody is asked where it shows without a question that the store would say nobody again.

    :param boot: ours.
    :param arrivals: what shows that.
    """

    def __init__(
        self,
        clock: IReactorTime,
        boot: str,
        presence_lookup: PresenceLookup,
        sender: NotificationSender,
        told: RemoteDeliveryMetrics,
        presence_epochs: PresenceEpochs | None = None,
    ) -> None:
        self._clock = clock
        self._boot = boot
        self._presence_lookup = presence_lookup
        self._sender = sender
        self._told = told
        self._recent_nodes = RecentNodeCache(clock)
        self._absence_cache = AbsenceCache(presence_epochs or NullPresenceEpochs())
        self._retry_queue = ContractChangeRetryQueue(clock, self._retry, lambda: told.count_cluster_push("dropped"))
        self._pending_by_did: dict[str, _PendingFanouts] = {}
        # Those of them that the store is yet to be asked for.
        self._awaiting_lookup: list[NotificationFanout] = []
        self._lookup_timer: IDelayedCall | None = None
        self._is_closed = False
        self._pending_count = self._pending_bytes = 0

    @property
    def held(self) -> tuple[int, int]:
        """Messages, events and changes that wait until it is known whether a socket took them, and their bytes."""
        return self._pending_count, self._pending_bytes

    def message(self, message: StoredMessage) -> Deferred[bool]:
        """Fires with whether a socket of another node took a message."""
        if self._absence_cache.is_absent(message.account):
            return succeed(False)
        return self._start_if_room(PeerNotification("messages", message.id, message.account, len(message.payload)))

    def event(self, event: PendingEvent) -> Deferred[bool]:
        """Fires with whether a socket of another node took an event."""
        if self._absence_cache.is_absent(event.recipient_did):
            return succeed(False)
        return self._start_if_room(PeerNotification("events", event.id, event.recipient_did, len(event.payload)))

    def contracts(self, did: str) -> Deferred[bool]:
        """
        Fires with whether a socket of another node was told that the contracts of `did` have changed. Who cannot be
        told now is told later.
        """
        notification = PeerNotification("contracts", did, did)
        if not self._has_room(notification):
            self._retry_queue.add(did, ())
            return succeed(False)
        return self._start(NotificationFanout(notification, self._sender, self._queue_retry))

    def set_live_nodes(self, live: Collection[str]) -> None:
        """
        These nodes are live.

        :param live: boots.
        """
        self._recent_nodes.set_live_nodes(live)

    def end(self) -> None:
        """Wait for nothing more, and begin nothing by itself."""
        self._is_closed = True
        self._retry_queue.end()
        awaiting_lookup, self._awaiting_lookup = self._awaiting_lookup, []
        if self._lookup_timer is not None:
            self._lookup_timer.cancel()
            self._lookup_timer = None
        for fanout in awaiting_lookup:
            self._finish(fanout, None)

    def _has_room(self, notification: PeerNotification) -> bool:
        return self._pending_count < MAX_PENDING and (
            not self._pending_count or self._pending_bytes + notification.payload_bytes <= MAX_PENDING_BYTES
        )

    def _start_if_room(self, notification: PeerNotification) -> Deferred[bool]:
        """What there is no room for waits in the store, where the catch-up round finds it."""
        if self._has_room(notification):
            return self._start(NotificationFanout(notification, self._sender))
        self._told.count_cluster_push("dropped")
        return succeed(False)

    def _start(self, fanout: NotificationFanout) -> Deferred[bool]:
        did = fanout.notification.did
        self._pending_count += 1
        self._pending_bytes += fanout.notification.payload_bytes
        fanout.taken.addCallback(self._release, fanout.notification.payload_bytes)
        nodes = () if self._is_closed else self._recent_nodes.get_nodes(did)
        self._pending_by_did.setdefault(did, _PendingFanouts()).add(fanout, nodes)
        if nodes:
            self._awaiting_lookup.append(fanout)
            if self._lookup_timer is None:
                self._lookup_timer = self._clock.callLater(LOOKUP_DELAY, self._look_up_waiting)
        else:
            self._look_up(fanout)
        return fanout.taken

    def _release(self, taken: bool, payload_bytes: int) -> bool:
        """It is known now: whoever waited for that lets go of the payload."""
        self._pending_count -= 1
        self._pending_bytes -= payload_bytes
        return taken

    def _look_up_waiting(self) -> None:
        self._lookup_timer = None
        awaiting_lookup, self._awaiting_lookup = self._awaiting_lookup, []
        for fanout in awaiting_lookup:
            self._look_up(fanout)

    def _look_up(self, fanout: NotificationFanout) -> None:
        did = fanout.notification.did
        epoch, found = self._absence_cache.epoch(did), self._presence_lookup.of(did)
        found.addCallbacks(self._found, self._not_found, callbackArgs=(fanout, epoch), errbackArgs=(fanout,))
        found.addErrback(lambda failure: _log.failure("hinting at a message failed", redact_failure(failure)))

    def _found(self, presences: Sequence[PresenceRecord], fanout: NotificationFanout, epoch: Hashable) -> None:
        did = fanout.notification.did
        others = [presence for presence in presences if presence.boot != self._boot]
        nodes = [presence.node for presence in others if presence.node is not None]
        stale = len(others) - len(nodes) + len(fanout.sent - {presence.boot for presence in others})
        for _ in range(stale):
            self._told.count_stale_presence()
        self._recent_nodes.record(did, nodes)
        if not others:
            self._absence_cache.record(did, epoch)
        self._pending_by_did[did].send_to(nodes)
        self._finish(fanout, nodes)

    def _not_found(self, failure: Failure, fanout: NotificationFanout) -> None:
        """The message is in the store, and is found there when the catch-up round comes."""
        if not failure.check(StoreUnavailable):
            _log.failure("looking for sockets failed", redact_failure(failure))
        self._finish(fanout, None)

    def _finish(self, fanout: NotificationFanout, nodes: Sequence[ClusterNode] | None) -> None:
        did = self._pending_by_did[fanout.notification.did]
        del did.fanouts[fanout]
        if not did.fanouts:
            del self._pending_by_did[fanout.notification.did]
        fanout.end(nodes)

    def _queue_retry(self, fanout: NotificationFanout) -> None:
        if not fanout.complete:
            self._retry_queue.add(fanout.notification.did, fanout.told)

    def _retry(self, did: str, told: Collection[str]) -> None:
        if not self._has_room(PeerNotification("contracts", did, did)):
            self._retry_queue.add_failed(did, told)
            return
        self._start(NotificationFanout(PeerNotification("contracts", did, did), self._sender, self._retried, told))

    def _retried(self, fanout: NotificationFanout) -> None:
        if fanout.complete:
            self._retry_queue.record_success()
        else:
            self._retry_queue.add_failed(fanout.notification.did, fanout.told)
