"""
Delivery to sockets at other nodes of what was accepted here.

A node that accepts something notifies the nodes that hold sockets of the recipient. A lost notification of a message
or event only delays it, since anti-entropy finds it in the store. A contract change leaves nothing to find, so its
notification is repeated until every node that holds sockets has acknowledged it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from twisted.internet.defer import Deferred, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.cluster.peer_notifications import PeerNotification, PeerQueues
from mediatord.cluster.presence import PresenceCache, PresenceLookup
from mediatord.errors import StoreUnavailable
from mediatord.observability.metrics import Metrics
from mediatord.runtime.failure_logging import redact_failure
from mediatord.store.interfaces.cluster_and_quotas import ClusterNode, PresenceRecord
from mediatord.store.interfaces.decentrl import PendingEvent
from mediatord.store.interfaces.messages import StoredMessage

_log = Logger()


@dataclass(eq=False, slots=True)
class NotificationFanout:
    """
    One notification to all nodes that hold sockets of its DID, at most once to each.

    :param on_done: called when nothing more is awaited.
    :param acknowledged: boots that have answered, and those that need no notification.
    :ivar delivered: fires with whether a socket of another node took it, as soon as that is known.
    :ivar sent: boots that it was sent to.
    :ivar waiting: those of them whose answers are awaited.
    :ivar holders: boots that hold sockets, once they are known.
    """

    notification: PeerNotification
    on_done: Callable[[NotificationFanout], None] | None
    acknowledged: set[str]
    delivered: Deferred[bool] = field(default_factory=Deferred)
    sent: set[str] = field(default_factory=set)
    waiting: set[str] = field(default_factory=set)
    holders: frozenset[str] | None = None
    is_lookup_done: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether the nodes with sockets are known, and all of them have acknowledged."""
        return self.holders is not None and self.holders <= self.acknowledged


@dataclass(slots=True)
class _PendingFanouts:
    """
    Notifications of one DID, in order, whose lookup is not finished.

    :param offered: boots that all of them were sent to.
    """

    fanouts: dict[NotificationFanout, None] = field(default_factory=dict)
    offered: frozenset[str] = frozenset()


_get_boot = attrgetter("boot")


# DIDs in both retry queues, and DIDs retried at a time.
MAX_RETRY_DIDS = 10_000
RETRY_BATCH = 100
# Seconds before the first retry, and the limit that doubling the delay after each failure stops at.
MIN_RETRY_DELAY, MAX_RETRY_DELAY = 1.0, 15.0


class _BackoffQueue(OrderedDict[str, frozenset[str]]):
    """
    DIDs, and the boots that need no notification, retried at a common, growing interval, oldest first.

    :param retry: called with each DID and its boots.
    :param max_delay: seconds that the interval grows to.
    """

    def __init__(self, clock: IReactorTime, retry: Callable[[str, Collection[str]], None], max_delay: float) -> None:
        super().__init__()
        self._clock = clock
        self._retry = retry
        self._max_delay = max_delay
        self._delay = MIN_RETRY_DELAY
        self._timer: IDelayedCall | None = None

    def schedule(self) -> None:
        """Start the timer, if it does not run and there is something to retry."""
        if self and self._timer is None:
            self._timer = self._clock.callLater(self._delay, self._retry_batch)

    def cancel(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def reset_backoff(self) -> None:
        """Return to the shortest interval; a timer that already has it keeps running."""
        if self._delay > MIN_RETRY_DELAY:
            self._delay = MIN_RETRY_DELAY
            self.cancel()
            self.schedule()

    def _retry_batch(self) -> None:
        self._timer = None
        self._delay = min(2 * self._delay, self._max_delay)
        batch = [self.popitem(last=False) for _ in range(min(RETRY_BATCH, len(self)))]
        for did, acknowledged in batch:
            self._retry(did, acknowledged)
        self.schedule()


class ContractChangeRetryQueue:
    """
    Contract changes that some nodes have yet to acknowledge, one entry per DID.

    DIDs whose retry failed are kept apart, so that thousands of them for an unreachable node delay no others.

    :param retry: notifies the nodes with sockets of a DID, except for these boots; has to call :meth:`add_failed` or
        :meth:`record_success`.
    :param dropped: called for each entry that exceeds the limit.
    """

    def __init__(
        self, clock: IReactorTime, retry: Callable[[str, Collection[str]], None], dropped: Callable[[], None]
    ) -> None:
        self._dropped = dropped
        self._new = _BackoffQueue(clock, retry, MIN_RETRY_DELAY)
        self._failed = _BackoffQueue(clock, retry, MAX_RETRY_DELAY)
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._new) + len(self._failed)

    def add(self, did: str, acknowledged: Collection[str]) -> None:
        """Add a change that only these boots have acknowledged."""
        self._put(self._new, did, acknowledged)

    def add_failed(self, did: str, acknowledged: Collection[str]) -> None:
        """Add a change whose retry failed; it joins a newer change of the same DID, if there is one."""
        self._put(self._new if did in self._new else self._failed, did, acknowledged)

    def record_success(self) -> None:
        """Retry the failed ones soon: a retry has reached all its nodes."""
        self._failed.reset_backoff()

    def end(self) -> None:
        """Drop all entries and accept no more."""
        self._is_closed = True
        for queue in (self._new, self._failed):
            queue.clear()
            queue.cancel()

    def _put(self, queue: _BackoffQueue, did: str, acknowledged: Collection[str]) -> None:
        if self._is_closed:
            return
        common = frozenset(acknowledged)
        for one in (self._new, self._failed):
            common &= one.pop(did, common)
        queue[did] = common
        queue.schedule()
        if len(self) > MAX_RETRY_DIDS:
            (self._failed or self._new).popitem(last=False)
            self._dropped()


# Seconds between sending to cached nodes and the lookup that confirms them: one query then serves many notifications.
LOOKUP_DELAY = 0.05
# Notifications whose outcome is unknown, and bytes of their payloads, which stay in memory meanwhile.
MAX_PENDING = 10_000
MAX_PENDING_BYTES = 67_108_864


class RemoteDelivery:
    """
    Notifies other nodes of what was accepted here. None of its Deferreds fails.

    Nodes in the presence cache are notified at once. A lookup follows, after the item is stored, and the nodes that
    it adds are notified as well. So a socket that has just connected anywhere is found as if there were no cache.
    Notifications of one DID reach each node in order.

    :param boot: of this node.
    """

    def __init__(
        self,
        clock: IReactorTime,
        boot: str,
        presence_lookup: PresenceLookup,
        peers: PeerQueues,
        metrics: Metrics,
    ) -> None:
        self._clock = clock
        self._boot = boot
        self._presence_lookup = presence_lookup
        self._peers = peers
        self._metrics = metrics
        self._cache = PresenceCache(clock)
        self._retry_queue = ContractChangeRetryQueue(
            clock, self._retry_contracts, lambda: metrics.cluster_pushes.inc("dropped")
        )
        self._pending_by_did: dict[str, _PendingFanouts] = {}
        self._awaiting_lookup: list[NotificationFanout] = []
        self._lookup_timer: IDelayedCall | None = None
        self._is_closed = False
        self._pending_count = self._pending_bytes = 0

    @property
    def pending(self) -> tuple[int, int]:
        """Notifications whose outcome is unknown, and the bytes of their payloads."""
        return self._pending_count, self._pending_bytes

    def deliver_message(self, message: StoredMessage) -> Deferred[bool]:
        """Fires with whether a socket of another node took a message."""
        return self._deliver(PeerNotification("messages", message.id, message.account, len(message.payload)))

    def deliver_event(self, event: PendingEvent) -> Deferred[bool]:
        """Fires with whether a socket of another node took an event."""
        return self._deliver(PeerNotification("events", event.id, event.recipient_did, len(event.payload)))

    def notify_contracts_changed(self, did: str) -> Deferred[bool]:
        """
        Fires with whether a socket of another node was told that the contracts of `did` have changed.

        Nodes that do not acknowledge are notified again later.
        """
        if not self._has_capacity(0):
            self._retry_queue.add(did, ())
            return succeed(False)
        fanout = NotificationFanout(PeerNotification("contracts", did, did), self._contracts_notified, set())
        return self._start(fanout)

    def set_live_nodes(self, live: Collection[str]) -> None:
        """
        Disregard cached nodes other than these.

        :param live: boots.
        """
        self._cache.set_live_nodes(live)

    def end(self) -> None:
        """Resolve what awaits a lookup as not delivered; look up and retry nothing more."""
        self._is_closed = True
        self._retry_queue.end()
        if self._lookup_timer is not None:
            self._lookup_timer.cancel()
        self._look_up_waiting()

    def _has_capacity(self, payload_bytes: int) -> bool:
        return self._pending_count < MAX_PENDING and (
            not self._pending_count or self._pending_bytes + payload_bytes <= MAX_PENDING_BYTES
        )

    def _deliver(self, notification: PeerNotification) -> Deferred[bool]:
        if not self._has_capacity(notification.payload_bytes):
            # Anti-entropy finds it in the store.
            self._metrics.cluster_pushes.inc("dropped")
            return succeed(False)
        return self._start(NotificationFanout(notification, None, set()))

    def _start(self, fanout: NotificationFanout) -> Deferred[bool]:
        """Send to cached nodes, and look up others."""
        notification = fanout.notification
        self._pending_count += 1
        self._pending_bytes += notification.payload_bytes
        pending = self._pending_by_did.get(notification.did)
        if pending is None:
            pending = self._pending_by_did[notification.did] = _PendingFanouts()
        pending.fanouts[fanout] = None
        nodes = () if self._is_closed else self._cache.get_nodes(notification.did)
        self._send(pending, nodes, fanout)
        if not nodes:
            self._look_up(fanout)
        else:
            self._awaiting_lookup.append(fanout)
            if self._lookup_timer is None:
                self._lookup_timer = self._clock.callLater(LOOKUP_DELAY, self._look_up_waiting)
        return fanout.delivered

    def _send(self, pending: _PendingFanouts, nodes: Sequence[ClusterNode], latest: NotificationFanout) -> None:
        """Send the latest notification to nodes, and to a new one all of them, so that it gets them in order."""
        boots = frozenset(map(_get_boot, nodes))
        is_known, pending.offered = boots <= pending.offered, boots
        for fanout in (latest,) if is_known else tuple(pending.fanouts):
            for node in nodes:
                if node.boot not in fanout.sent and node.boot not in fanout.acknowledged:
                    fanout.sent.add(node.boot)
                    fanout.waiting.add(node.boot)
                    answered = self._peers.enqueue(node, fanout.notification)
                    answered.addCallback(self._answered, fanout, node.boot)

    def _answered(self, delivered: bool | None, fanout: NotificationFanout, boot: str) -> None:
        if delivered is not None:
            fanout.acknowledged.add(boot)
        if delivered and not fanout.delivered.called:
            self._resolve(fanout, delivered=True)
        if boot in fanout.waiting:
            fanout.waiting.discard(boot)
            self._finish(fanout)

    def _resolve(self, fanout: NotificationFanout, *, delivered: bool) -> None:
        self._pending_count -= 1
        self._pending_bytes -= fanout.notification.payload_bytes
        fanout.delivered.callback(delivered)

    def _finish(self, fanout: NotificationFanout) -> None:
        """Finish if nothing more is awaited."""
        if not fanout.waiting and fanout.is_lookup_done:
            self._remove_pending(fanout)
            if not fanout.delivered.called:
                self._resolve(fanout, delivered=False)
            if fanout.on_done is not None:
                fanout.on_done(fanout)

    def _remove_pending(self, fanout: NotificationFanout) -> None:
        pending = self._pending_by_did.get(fanout.notification.did)
        if pending is not None:
            pending.fanouts.pop(fanout, None)
            if not pending.fanouts:
                del self._pending_by_did[fanout.notification.did]

    def _look_up_waiting(self) -> None:
        self._lookup_timer = None
        awaiting_lookup, self._awaiting_lookup = self._awaiting_lookup, []
        for fanout in awaiting_lookup:
            self._look_up(fanout)

    def _look_up(self, fanout: NotificationFanout) -> None:
        if self._is_closed:
            self._finish_lookup(fanout, None)
            return
        found = self._presence_lookup.find(fanout.notification.did)
        found.addCallbacks(self._found, self._not_found, callbackArgs=(fanout,), errbackArgs=(fanout,))
        found.addErrback(lambda failure: _log.failure("notifying other nodes failed", redact_failure(failure)))

    def _found(self, records: Sequence[PresenceRecord], fanout: NotificationFanout) -> None:
        did = fanout.notification.did
        others = [record for record in records if record.boot != self._boot]
        nodes = [record.node for record in others if record.node is not None]
        stale = len(others) - len(nodes) + len(fanout.sent - set(map(_get_boot, others)))
        for _ in range(stale):
            self._metrics.stale_presence.inc()
        self._cache.record(did, nodes)
        self._send(self._pending_by_did[did], nodes, fanout)
        self._finish_lookup(fanout, nodes)

    def _not_found(self, failure: Failure, fanout: NotificationFanout) -> None:
        if not failure.check(StoreUnavailable):
            _log.failure("presence lookup failed", redact_failure(failure))
        self._finish_lookup(fanout, None)

    def _finish_lookup(self, fanout: NotificationFanout, nodes: Sequence[ClusterNode] | None) -> None:
        """Wait only for nodes that hold sockets. :param nodes: those, which it was sent to; None if unknown."""
        self._remove_pending(fanout)
        if nodes is not None:
            fanout.holders = frozenset(map(_get_boot, nodes))
            fanout.waiting &= fanout.holders
        fanout.is_lookup_done = True
        self._finish(fanout)

    def _contracts_notified(self, fanout: NotificationFanout) -> None:
        if not fanout.is_complete:
            self._retry_queue.add(fanout.notification.did, fanout.acknowledged)

    def _retry_contracts(self, did: str, acknowledged: Collection[str]) -> None:
        if not self._has_capacity(0):
            self._retry_queue.add_failed(did, acknowledged)
            return
        notification = PeerNotification("contracts", did, did)
        fanout = NotificationFanout(notification, self._contracts_retried, set(acknowledged))
        self._start(fanout)

    def _contracts_retried(self, fanout: NotificationFanout) -> None:
        if fanout.is_complete:
            self._retry_queue.record_success()
        else:
            self._retry_queue.add_failed(fanout.notification.did, fanout.acknowledged)
