"""Outgoing notifications: one bounded queue per other node."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from math import inf

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from mediatord.cluster.membership import NODE_LEASE
from mediatord.cluster.peer_client import MAX_CALLS_PER_PEER, PeerCallFailed, PeerCallRejected, PeerReplaced
from mediatord.cluster.peer_protocol import (
    ENVELOPE_BYTES,
    MAX_BODY_BYTES,
    NOTIFICATIONS_PATH,
    PeerNotification,
    decode_push_result,
    encode_notifications,
)
from mediatord.failure_logging import LogThrottle, redact_failure
from mediatord.observability.metrics import Metrics
from mediatord.store.interfaces.cluster import ClusterNode

_log = Logger()

# Queued notifications per node, and bytes of the payloads they refer to, which stay in memory meanwhile.
MAX_QUEUED = 1000
MAX_QUEUED_BYTES = 33_554_432
# Per request.
MAX_BATCH = 100
MAX_BATCH_BYTES = 4_194_304
# Seconds before the second and the third attempt.
RETRY_DELAYS = (0.1, 0.5)
# Seconds for which a node that was replaced gets no notifications, unless the store reports its end earlier. Not
# longer: its address may have led elsewhere for a moment.
DEAD_PEER_TTL = NODE_LEASE
MAX_DEAD_PEERS = 256

PeerCall = Callable[[ClusterNode, str, bytes], Awaitable[bytes]]


@dataclass(eq=False, slots=True)
class _QueuedNotification:
    notification: PeerNotification
    since: float
    answered: Deferred[bool | None] = field(default_factory=Deferred)


class PeerQueue:
    """
    Bounded queue of notifications for one node, sent in batches with up to three attempts each.

    A DID has notifications in one batch at a time, so that its sockets get everything in order.

    :param call: sends a request.
    :param replaced: called when another node answers at the address.
    """

    def __init__(
        self,
        clock: IReactorTime,
        node: ClusterNode,
        call: PeerCall,
        metrics: Metrics,
        replaced: Callable[[ClusterNode], None],
    ) -> None:
        self._clock = clock
        self._node = node
        self._call = call
        self._metrics = metrics
        self._on_replaced = replaced
        self._queue: deque[_QueuedNotification] = deque()
        self._bytes = 0
        self._in_flight: set[Deferred[None]] = set()
        self._busy_dids: set[str] = set()
        self._send_timer: IDelayedCall | None = None
        self._warning = LogThrottle(clock)
        self._is_replaced = self._is_closed = False

    @property
    def pending(self) -> tuple[int, int]:
        """Queued notifications, and the bytes of their payloads."""
        return len(self._queue), self._bytes

    def enqueue(self, notification: PeerNotification) -> Deferred[bool | None]:
        """Send a notification; fires with whether a socket took the item, None if unknown; never fails."""
        if len(self._queue) >= MAX_QUEUED or (
            self._queue and self._bytes + notification.payload_bytes > MAX_QUEUED_BYTES
        ):
            self._metrics.cluster_pushes.inc("dropped")
            return succeed(None)
        queued = _QueuedNotification(notification, self._clock.seconds())
        self._queue.append(queued)
        self._bytes += notification.payload_bytes
        # In the next reactor iteration, to batch everything from this one.
        if self._send_timer is None and len(self._in_flight) < MAX_CALLS_PER_PEER:
            self._send_timer = self._clock.callLater(0, self._send)
        return queued.answered

    def end(self) -> None:
        """Cancel everything that has not been answered."""
        self._is_closed = True
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
        queue, self._queue, self._bytes = self._queue, deque(), 0
        for batch in tuple(self._in_flight):
            batch.cancel()
        self._resolve(queue, None)

    def _send(self) -> None:
        self._send_timer = None
        while len(self._in_flight) < MAX_CALLS_PER_PEER and (batch := self._take_batch()):
            dids = {one.notification.did for one in batch}
            self._busy_dids |= dids
            sent = Deferred.fromCoroutine(self._deliver(batch))
            if not sent.called:
                self._in_flight.add(sent)
            sent.addErrback(lambda failure: _log.failure("sending notifications failed", redact_failure(failure)))
            sent.addCallback(self._sent, sent, dids)

    def _sent(self, _: object, sent: Deferred[None], dids: set[str]) -> None:
        self._in_flight.discard(sent)
        self._busy_dids -= dids
        if self._is_replaced:
            self._on_replaced(self._node)
        elif self._queue and self._send_timer is None:
            self._send_timer = self._clock.callLater(0, self._send)

    def _take_batch(self) -> list[_QueuedNotification]:
        """The oldest notifications whose DIDs are not in flight; may be empty."""
        batch: list[_QueuedNotification] = []
        skipped: list[_QueuedNotification] = []
        size, payload_bytes = ENVELOPE_BYTES, 0
        while self._queue and len(batch) < MAX_BATCH:
            one = self._queue.popleft()
            if one.notification.did in self._busy_dids:
                skipped.append(one)
                continue
            size += one.notification.size
            payload_bytes += one.notification.payload_bytes
            if batch and (size > MAX_BODY_BYTES or payload_bytes > MAX_BATCH_BYTES):
                skipped.append(one)
                break
            batch.append(one)
            self._bytes -= one.notification.payload_bytes
        self._queue.extendleft(reversed(skipped))
        return batch

    async def _deliver(self, batch: list[_QueuedNotification]) -> None:
        pushed: Collection[tuple[str, str]] | None = None
        try:
            pushed = await self._send_with_retries(encode_notifications(one.notification for one in batch))
        except CancelledError:
            pass
        finally:
            self._resolve(batch, pushed)

    async def _send_with_retries(self, body: bytes) -> Collection[tuple[str, str]] | None:
        """Kind and name of what was pushed; None if unknown."""
        for pause in (*RETRY_DELAYS, None):
            try:
                return decode_push_result(await self._call(self._node, NOTIFICATIONS_PATH, body))
            except PeerReplaced:
                self._is_replaced = True
                return None
            except PeerCallRejected:
                self._log_failure("rejects this node: its cluster.secret_file or its clock differs")
                return None
            except (PeerCallFailed, ValueError):
                if pause is None or self._is_closed:
                    break
            await deferLater(self._clock, pause, lambda: None)
        self._log_failure("does not answer")
        return None

    def _log_failure(self, why: str) -> None:
        count = 0 if self._is_closed else self._warning.count_occurrence()
        if count:
            _log.warn(
                "node {name} at {address} {why}; failures since the last such line: {count}",
                name=self._node.name,
                address=self._node.address,
                why=why,
                count=count,
            )

    def _resolve(self, batch: Collection[_QueuedNotification], pushed: Collection[tuple[str, str]] | None) -> None:
        """:param pushed: kind and name of what was pushed; None if unknown."""
        now = self._clock.seconds()
        for one in batch:
            if pushed is None:
                self._metrics.cluster_pushes.inc("failed")
                one.answered.callback(None)
                continue
            delivered = (one.notification.kind, one.notification.name) in pushed
            self._metrics.cluster_pushes.inc("pushed" if delivered else "no_session")
            self._metrics.peer_notification_duration.observe(now - one.since)
            one.answered.callback(delivered)


class PeerQueues:
    """
    The queues of all nodes that were notified, by boot.

    :param call: as for :class:`PeerQueue`.
    """

    def __init__(self, clock: IReactorTime, call: PeerCall, metrics: Metrics) -> None:
        self._clock = clock
        self._call = call
        self._metrics = metrics
        self._queues: dict[str, PeerQueue] = {}
        self._missing: set[str] = set()
        self._dead: dict[str, float] = {}
        self._is_closed = False

    @property
    def pending(self) -> tuple[int, int]:
        """Queued notifications, and the bytes of their payloads."""
        pending = [queue.pending for queue in self._queues.values()]
        return sum(entries for entries, _ in pending), sum(size for _, size in pending)

    def __len__(self) -> int:
        return len(self._queues)

    def enqueue(self, node: ClusterNode, notification: PeerNotification) -> Deferred[bool | None]:
        """As :meth:`PeerQueue.enqueue`; fails at once for a dead node, or after the end."""
        if self._is_closed or self._is_dead(node.boot):
            self._metrics.cluster_pushes.inc("failed")
            return succeed(None)
        queue = self._queues.get(node.boot)
        if queue is None:
            queue = self._queues[node.boot] = PeerQueue(self._clock, node, self._call, self._metrics, self._mark_dead)
        return queue.enqueue(notification)

    def set_live_nodes(self, live: Collection[str]) -> None:
        """
        Drop the queues of nodes that are not live.

        :param live: boots from the store; a node that has joined since the query may be missing once.
        """
        missing = self._queues.keys() - live
        for boot in missing & self._missing:
            self._forget(boot)
        self._missing = set(missing)
        self._dead = {boot: at for boot, at in self._dead.items() if boot in live and self._is_dead(boot)}

    def end(self) -> None:
        """Cancel everything, and accept no more."""
        self._is_closed = True
        for boot in tuple(self._queues):
            self._forget(boot)

    def _is_dead(self, boot: str) -> bool:
        # The lower bound matters when the clock is set back.
        return 0.0 <= self._clock.seconds() - self._dead.get(boot, -inf) < DEAD_PEER_TTL

    def _mark_dead(self, node: ClusterNode) -> None:
        self._dead[node.boot] = self._clock.seconds()
        if len(self._dead) > MAX_DEAD_PEERS:
            del self._dead[next(iter(self._dead))]
        self._forget(node.boot)

    def _forget(self, boot: str) -> None:
        queue = self._queues.pop(boot, None)
        if queue is not None:
            queue.end()
