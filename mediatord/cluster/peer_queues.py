"""The other nodes as those that hints are sent to, each with a queue of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from math import inf
from typing import Literal, Protocol

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
from mediatord.store.interfaces.cluster import ClusterNode

_log = Logger()

# What may wait for one node: hints, and bytes of the messages that they are about, which are in memory meanwhile.
MAX_QUEUED = 1000
MAX_QUEUED_BYTES = 33_554_432
# Of one request.
MAX_BATCH = 100
MAX_BATCH_BYTES = 4_194_304
# Seconds before the second and the third attempt.
RETRY_DELAYS = (0.1, 0.5)
# Nodes that seem to be gone are remembered for so many seconds, unless the store knows earlier: it may have been
# their address that led elsewhere for a moment.
DEAD_PEER_TTL = NODE_LEASE
MAX_DEAD_PEERS = 256

NotificationOutcome = Literal["pushed", "no_session", "failed", "dropped"]


class NotificationMetrics(Protocol):
    """What counts the hints."""

    def count_cluster_push(self, outcome: NotificationOutcome) -> None:
        """A hint came to this end."""

    def observe_peer_notification(self, seconds: float) -> None:
        """A hint was answered so long after it was to be sent."""


PeerCall = Callable[[ClusterNode, str, bytes], Awaitable[bytes]]


@dataclass(eq=False, slots=True)
class _QueuedNotification:
    notification: PeerNotification
    since: float
    answered: Deferred[bool | None] = field(default_factory=Deferred)


class PeerQueue:
    """
    One other node: hints to it wait in a queue that is bounded, and go in batches, each of them tried three times.

    A DID has hints in one batch at a time, so that what is pushed to its sockets comes in order.

    :param ask: sends a request.
    :param gone: told when the node turns out not to be there any more.
    """

    def __init__(
        self,
        clock: IReactorTime,
        node: ClusterNode,
        call: PeerCall,
        metrics: NotificationMetrics,
        gone: Callable[[ClusterNode], None],
    ) -> None:
        self._clock = clock
        self._node = node
        self._call = call
        self._metrics = metrics
        self._gone = gone
        self._queue: deque[_QueuedNotification] = deque()
        self._bytes = 0
        self._in_flight: set[Deferred[None]] = set()
        self._busy_dids: set[str] = set()
        self._send_timer: IDelayedCall | None = None
        self._warning = LogThrottle(clock)
        self._is_replaced = self._is_closed = False

    @property
    def held(self) -> tuple[int, int]:
        """Hints that wait, and their bytes."""
        return len(self._queue), self._bytes

    def enqueue(self, notification: PeerNotification) -> Deferred[bool | None]:
        """Send a hint; fires with whether a socket took what it is about, None if that is not known; never fails."""
        if len(self._queue) >= MAX_QUEUED or (
            self._queue and self._bytes + notification.payload_bytes > MAX_QUEUED_BYTES
        ):
            self._metrics.count_cluster_push("dropped")
            return succeed(None)
        waiting = _QueuedNotification(notification, self._clock.seconds())
        self._queue.append(waiting)
        self._bytes += notification.payload_bytes
        # In the next turn: what comes in this one goes along.
        if self._send_timer is None and len(self._in_flight) < MAX_CALLS_PER_PEER:
            self._send_timer = self._clock.callLater(0, self._send)
        return waiting.answered

    def end(self) -> None:
        """Give up whatever has not been answered, for good."""
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
            sent.addErrback(lambda failure: _log.failure("sending hints failed", redact_failure(failure)))
            sent.addCallback(self._sent, sent, dids)

    def _sent(self, _: object, sent: Deferred[None], dids: set[str]) -> None:
        self._in_flight.discard(sent)
        self._busy_dids -= dids
        if self._is_replaced:
            self._gone(self._node)
        elif self._queue and self._send_timer is None:
            self._send_timer = self._clock.callLater(0, self._send)

    def _take_batch(self) -> list[_QueuedNotification]:
        """The oldest that may go now; empty when all have to wait for others of their DIDs."""
        batch: list[_QueuedNotification] = []
        held: list[_QueuedNotification] = []
        size, payload_bytes = ENVELOPE_BYTES, 0
        while self._queue and len(batch) < MAX_BATCH:
            one = self._queue.popleft()
            if one.notification.did in self._busy_dids:
                held.append(one)
                continue
            size += one.notification.size
            payload_bytes += one.notification.payload_bytes
            if batch and (size > MAX_BODY_BYTES or payload_bytes > MAX_BATCH_BYTES):
                held.append(one)
                break
            batch.append(one)
            self._bytes -= one.notification.payload_bytes
        self._queue.extendleft(reversed(held))
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
        """What was pushed; None when that is not known."""
        for pause in (*RETRY_DELAYS, None):
            try:
                return decode_push_result(await self._call(self._node, NOTIFICATIONS_PATH, body))
            except PeerReplaced:
                self._is_replaced = True
                return None
            except PeerCallRejected:
                self._log_failure("does not take us for a node: its cluster.secret_file differs, or its clock")
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
                "node {name} at {address} {why}; times since this was last said: {count}",
                name=self._node.name,
                address=self._node.address,
                why=why,
                count=count,
            )

    def _resolve(self, batch: Collection[_QueuedNotification], pushed: Collection[tuple[str, str]] | None) -> None:
        """:param pushed: None when it is not known."""
        now = self._clock.seconds()
        for one in batch:
            there = None if pushed is None else (one.notification.kind, one.notification.name) in pushed
            self._metrics.count_cluster_push("failed" if there is None else "pushed" if there else "no_session")
            if there is not None:
                self._metrics.observe_peer_notification(now - one.since)
            one.answered.callback(there)


class PeerQueues:
    """
    All other nodes that there was something for.

    :param ask: as for :class:`PeerQueue`.
    """

    def __init__(self, clock: IReactorTime, call: PeerCall, metrics: NotificationMetrics) -> None:
        self._clock = clock
        self._call = call
        self._metrics = metrics
        self._queues: dict[str, PeerQueue] = {}
        self._missing: set[str] = set()
        self._gone: dict[str, float] = {}
        self._is_closed = False

    @property
    def held(self) -> tuple[int, int]:
        """Hints that wait for other nodes, and their bytes."""
        waiting = [queue.held for queue in self._queues.values()]
        return sum(entries for entries, _ in waiting), sum(size for _, size in waiting)

    def __len__(self) -> int:
        return len(self._queues)

    def enqueue(self, node: ClusterNode, notification: PeerNotification) -> Deferred[bool | None]:
        """As :meth:`Peer.put`; at once for a node that is known to be gone, or when this has ended."""
        if self._is_closed or self._is_dead(node.boot):
            self._metrics.count_cluster_push("failed")
            return succeed(None)
        queue = self._queues.get(node.boot)
        if queue is None:
            queue = self._queues[node.boot] = PeerQueue(self._clock, node, self._call, self._metrics, self._mark_dead)
        return queue.enqueue(notification)

    def set_live_nodes(self, live: Collection[str]) -> None:
        """
        Forget nodes that are not among the live ones any more.

        :param live: boots, as the store said; who has joined since then may be missing once.
        """
        missing = self._queues.keys() - live
        for boot in missing & self._missing:
            self._forget(boot)
        self._missing = set(missing)
        self._gone = {boot: at for boot, at in self._gone.items() if boot in live and self._is_dead(boot)}

    def end(self) -> None:
        """Give up everything, for good."""
        self._is_closed = True
        for boot in tuple(self._queues):
            self._forget(boot)

    def _is_dead(self, boot: str) -> bool:
        """For no longer than that, even if the clock is set back."""
        return 0.0 <= self._clock.seconds() - self._gone.get(boot, -inf) < DEAD_PEER_TTL

    def _mark_dead(self, node: ClusterNode) -> None:
        self._gone[node.boot] = self._clock.seconds()
        if len(self._gone) > MAX_DEAD_PEERS:
            del self._gone[next(iter(self._gone))]
        self._forget(node.boot)

    def _forget(self, boot: str) -> None:
        queue = self._queues.pop(boot, None)
        if queue is not None:
            queue.end()
