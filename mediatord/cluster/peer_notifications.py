"""
Notifications between nodes: an item in the store is for sockets of another node.

The sender queues them for each node and sends them in batches, one at a time, so that a DID's arrive in order. A
request is `{"protocol": 1, "hints": {"messages": [ids], "events": [ids], "contracts": [DIDs]}}`, its answer
`{"protocol": 1, "pushed": {...}}` with those that a socket took. The other node reads them from the store. Nodes of
different versions run side by side: both sides ignore unknown members and kinds, and a higher protocol number means
nothing. The answer to an unknown kind is that none of it was pushed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Generic, Literal, Protocol, TypeVar, get_args

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from mediatord.cluster.membership import NODE_LEASE
from mediatord.cluster.peer_connection import MAX_BODY_BYTES, PeerCallFailed, PeerCallRejected, PeerReplaced
from mediatord.delivery.connections import ConnectionManager
from mediatord.observability.metrics import Metrics
from mediatord.protocol import encoding
from mediatord.runtime.failure_logging import LogThrottle, redact_failure
from mediatord.store.interfaces.cluster_and_quotas import MAX_CLOCK_SKEW, ClusterNode, IClusterStore
from mediatord.store.interfaces.decentrl import PendingEvent
from mediatord.store.interfaces.messages import MessageArrival, StoredMessage

_log = Logger()

PROTOCOL_VERSION = 1
# Notifications in one request that is still accepted, and bytes of a body beside the names.
MAX_NOTIFICATIONS = 1000
ENVELOPE_BYTES = 256

NotificationKind = Literal["messages", "events", "contracts"]
NOTIFICATION_KINDS: tuple[NotificationKind, ...] = get_args(NotificationKind)
NotificationNames = dict[NotificationKind, list[str]]


@dataclass(frozen=True, slots=True)
class PeerNotification:
    """
    Notice to a node with sockets of a DID: an item was stored, or the DID's contracts have changed.

    :param kind: DIDComm messages, pending Decentrl events, or changed contracts.
    :param name: id of the message or event, or the DID.
    :param did: the recipient, whose notifications arrive in order.
    :param payload_bytes: size of what the other node will read from the store.
    """

    kind: NotificationKind
    name: str
    did: str = field(default="", compare=False)
    payload_bytes: int = field(default=0, compare=False)


def encode_names(member: Literal["hints", "pushed"], names: NotificationNames) -> bytes:
    """Encode the body of a request or an answer."""
    return encoding.dumps({"protocol": PROTOCOL_VERSION, member: names})


def decode_names(member: Literal["hints", "pushed"], body: bytes) -> NotificationNames:
    """
    Decode the body of a request or an answer.

    :raise ValueError: it is malformed.
    """
    groups = encoding.loads_object(body).get(member)
    if not isinstance(groups, dict):
        raise ValueError(f"no {member}")
    found: NotificationNames = {}
    for kind in NOTIFICATION_KINDS:
        listed = groups.get(kind)
        if isinstance(listed, list) and listed:
            found[kind] = list(dict.fromkeys([name for name in listed if isinstance(name, str)]))
    if sum(map(len, found.values())) > MAX_NOTIFICATIONS:
        raise ValueError(f"too many {member}")
    return found


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

PeerCall = Callable[[ClusterNode, bytes], Awaitable[bytes]]


@dataclass(eq=False, slots=True)
class _QueuedNotification:
    notification: PeerNotification
    since: float
    answered: Deferred[bool | None] = field(default_factory=Deferred)


class PeerQueue:
    """
    Bounded queue of notifications for one node, sent in batches with up to three attempts each.

    :param call: sends a request.
    """

    def __init__(self, clock: IReactorTime, node: ClusterNode, call: PeerCall, metrics: Metrics) -> None:
        self._clock = clock
        self._node = node
        self._call = call
        self._metrics = metrics
        self._queue: deque[_QueuedNotification] = deque()
        self._bytes = 0
        self._sending: Deferred[None] | None = None
        self._warning = LogThrottle(clock)
        self._is_closed = False
        self._replaced_at = -inf

    @property
    def pending(self) -> tuple[int, int]:
        """Queued notifications, and the bytes of their payloads."""
        return len(self._queue), self._bytes

    def enqueue(self, notification: PeerNotification) -> Deferred[bool | None]:
        """
        Send a notification; fires with whether a socket took the item, None if unknown; never fails.

        Nothing is sent while another node answers at the address.
        """
        now = self._clock.seconds()
        # The lower bound matters when the clock is set back.
        if 0.0 <= now - self._replaced_at < DEAD_PEER_TTL:
            self._metrics.cluster_pushes.inc("failed")
            return succeed(None)
        if len(self._queue) >= MAX_QUEUED or (
            self._queue and self._bytes + notification.payload_bytes > MAX_QUEUED_BYTES
        ):
            self._metrics.cluster_pushes.inc("dropped")
            return succeed(None)
        queued = _QueuedNotification(notification, now)
        self._queue.append(queued)
        self._bytes += notification.payload_bytes
        if self._sending is None:
            self._sending = Deferred.fromCoroutine(self._send_queued())
            self._sending.addErrback(lambda failure: failure.trap(CancelledError))
        return queued.answered

    def end(self) -> None:
        """Cancel everything that has not been answered."""
        self._is_closed = True
        self._drop_queued()
        if self._sending is not None:
            self._sending.cancel()

    def _drop_queued(self) -> None:
        queue, self._queue, self._bytes = self._queue, deque(), 0
        self._resolve(queue, None)

    async def _send_queued(self) -> None:
        """Send until the queue is empty, from the end of this reactor iteration on, to batch everything from it."""
        try:
            await deferLater(self._clock, 0)
            while self._queue:
                batch = self._take_batch()
                pushed: NotificationNames | None = None
                try:
                    pushed = await self._send_with_retries(batch)
                except PeerReplaced:
                    self._replaced_at = self._clock.seconds()
                    self._drop_queued()
                except CancelledError:
                    raise
                except Exception:
                    _log.failure("sending notifications failed", redact_failure())
                finally:
                    self._resolve(batch, pushed)
        finally:
            self._sending = None

    def _take_batch(self) -> list[_QueuedNotification]:
        """The oldest notifications, as many as fit in a request."""
        batch: list[_QueuedNotification] = []
        size, payload_bytes = ENVELOPE_BYTES, 0
        while self._queue and len(batch) < MAX_BATCH:
            notification = self._queue[0].notification
            size += len(encoding.dumps(notification.name)) + 1
            payload_bytes += notification.payload_bytes
            if batch and (size > MAX_BODY_BYTES or payload_bytes > MAX_BATCH_BYTES):
                break
            batch.append(self._queue.popleft())
            self._bytes -= notification.payload_bytes
        return batch

    async def _send_with_retries(self, batch: Sequence[_QueuedNotification]) -> NotificationNames | None:
        """What was pushed; None if unknown."""
        names: NotificationNames = {}
        for queued in batch:
            names.setdefault(queued.notification.kind, []).append(queued.notification.name)
        body = encode_names("hints", names)
        for pause in (*RETRY_DELAYS, None):
            try:
                return decode_names("pushed", await self._call(self._node, body))
            except PeerReplaced:
                raise
            except PeerCallRejected:
                self._log_failure("rejects this node: cluster.secret_file or version differs")
                return None
            except (PeerCallFailed, ValueError):
                if pause is None or self._is_closed:
                    break
            await deferLater(self._clock, pause)
        self._log_failure("does not respond")
        return None

    def _log_failure(self, why: str) -> None:
        count = 0 if self._is_closed else self._warning.count_occurrence()
        if count:
            _log.warn(
                "node {name} at {address} {why} ({count} failures since the last report)",
                name=self._node.name,
                address=self._node.address,
                why=why,
                count=count,
            )

    def _resolve(self, batch: Collection[_QueuedNotification], pushed: NotificationNames | None) -> None:
        """:param pushed: None if unknown."""
        now = self._clock.seconds()
        for one in batch:
            if pushed is None:
                self._metrics.cluster_pushes.inc("failed")
                one.answered.callback(None)
                continue
            delivered = one.notification.name in pushed.get(one.notification.kind, ())
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
        self._is_closed = False

    @property
    def pending(self) -> tuple[int, int]:
        """Queued notifications, and the bytes of their payloads."""
        pending = [queue.pending for queue in self._queues.values()]
        return sum(entries for entries, _ in pending), sum(size for _, size in pending)

    def __len__(self) -> int:
        return len(self._queues)

    def enqueue(self, node: ClusterNode, notification: PeerNotification) -> Deferred[bool | None]:
        """As :meth:`PeerQueue.enqueue`; fails at once after the end."""
        if self._is_closed:
            self._metrics.cluster_pushes.inc("failed")
            return succeed(None)
        queue = self._queues.get(node.boot)
        if queue is None:
            queue = self._queues[node.boot] = PeerQueue(self._clock, node, self._call, self._metrics)
        return queue.enqueue(notification)

    def set_live_nodes(self, live: Collection[str]) -> None:
        """
        Drop the queues of nodes that are not live.

        :param live: boots from the store; a node that has joined since the query may be missing once.
        """
        missing = self._queues.keys() - live
        for boot in missing & self._missing:
            self._queues.pop(boot).end()
        self._missing = set(missing)

    def end(self) -> None:
        """Cancel everything, and accept no more."""
        self._is_closed = True
        for boot in tuple(self._queues):
            self._queues.pop(boot).end()


Item = TypeVar("Item", StoredMessage, PendingEvent)
ContraItem = TypeVar("ContraItem", StoredMessage, PendingEvent, contravariant=True)

# Seconds between the time of a message, taken from another node's clock before it is written, and its commit.
MAX_COMMIT_DELAY = 2.5
# Seconds after its own time, by the clock of this node, at which a message may become visible in the store.
MAX_VISIBILITY_DELAY = MAX_CLOCK_SKEW + MAX_COMMIT_DELAY


class RemotePusher(Protocol[ContraItem]):
    """Pushes items of one protocol that another node has accepted."""

    def push_remote(self, items: Sequence[ContraItem], /, by: Mapping[str, float] = ...) -> Container[str]:
        """The ids of those that a socket took. :param by: leaves out, by id, sockets that subscribed later."""

    def was_pushed(self, id_: str, /) -> bool:
        """Whether it was pushed here, as far as that is remembered."""


@dataclass(frozen=True, slots=True)
class PeerNotificationDelivery(Generic[Item]):
    """
    Pushes items of one protocol, accepted by other nodes, to the sockets of this node.

    :param is_wanted: whether a subscription belongs to this protocol.
    :param filter_served: which of several DIDs may still be pushed to; None for all.
    """

    connections: ConnectionManager[Any]
    pusher: RemotePusher[Item]
    find: Callable[[Sequence[str]], Deferred[list[Item]]]
    list_arrivals: Callable[..., Deferred[list[MessageArrival]]]
    store: IClusterStore
    is_wanted: Callable[[Any], bool]
    filter_served: Callable[[Collection[str]], Awaitable[Collection[str]]] | None = None

    def list_live_dids(self) -> list[str]:
        """DIDs that have sockets here."""
        return self.connections.live(self.is_wanted)

    def is_live(self, did: str) -> bool:
        """Whether a DID has sockets here."""
        return any(self.is_wanted(recipient) for _, recipient in self.connections.subscribers(did))

    async def push_notified(self, ids: Sequence[str]) -> list[str]:
        """
        Push what another node has notified this one of; returns the ids that were pushed, now or before.

        :raise StoreUnavailable: the store did not answer.
        """
        was_pushed = self.pusher.was_pushed
        pushed = list(filter(was_pushed, ids))
        wanted = [id_ for id_ in ids if id_ not in pushed] if pushed else ids
        async for items in self._find_served(wanted):
            # A repeated notification may have been served meanwhile.
            taken = self.pusher.push_remote([item for item in items if not was_pushed(item.id)])
            pushed += [item.id for item in items if item.id in taken or was_pushed(item.id)]
        return pushed

    async def push_missed(self, arrivals: Sequence[MessageArrival]) -> None:
        """
        Push what no notification came for, to the sockets that were open when it arrived.

        :raise StoreUnavailable: the store did not answer.
        """
        missed = {one.id: one.at + MAX_VISIBILITY_DELAY for one in arrivals if self._is_missed(one)}
        if missed:
            for id_ in await self.store.find_picked_up(list(missed)):
                del missed[id_]
        async for items in self._find_served(list(missed)):
            self.pusher.push_remote([item for item in items if not self.pusher.was_pushed(item.id)], missed)

    def _is_missed(self, arrival: MessageArrival) -> bool:
        return not self.pusher.was_pushed(arrival.id) and bool(
            self.connections.subscribers(arrival.did, by=arrival.at + MAX_VISIBILITY_DELAY, message=arrival.id)
        )

    async def _find_served(self, ids: Sequence[str]) -> AsyncIterator[list[Item]]:
        while ids and (found := await self.find(ids)):
            if self.filter_served is None:
                yield found
            else:
                served = await self.filter_served({item.recipient_did for item in found})
                yield [item for item in found if item.recipient_did in served]
            if len(found) == len(ids):
                return
            # The others do not exist any more, or exceed what is read at once.
            found_ids = {item.id for item in found}
            ids = [id_ for id_ in ids if id_ not in found_ids]


@dataclass(frozen=True, slots=True)
class NotificationReceiver:
    """
    Pushes to the sockets of this process what other nodes, or workers, have accepted.

    :param filter_registered: which of several DIDs may still be notified of their contracts.
    :param push_contracts_updated: notifies the sockets of a DID; False if there are none.
    """

    didcomm: PeerNotificationDelivery[StoredMessage]
    decentrl: PeerNotificationDelivery[PendingEvent]
    filter_registered: Callable[[Collection[str]], Awaitable[Collection[str]]]
    push_contracts_updated: Callable[[str], bool]

    async def receive(self, body: bytes) -> bytes:
        """
        Push what a request names; returns the body of the answer.

        :raise ValueError: the request is malformed.
        :raise StoreUnavailable: the sender has to try again later.
        """
        pushed = decode_names("hints", body)
        for kind, names in pushed.items():
            if kind == "messages":
                pushed[kind] = await self.didcomm.push_notified(names)
            elif kind == "events":
                pushed[kind] = await self.decentrl.push_notified(names)
            else:
                served = await self.filter_registered(names)
                pushed[kind] = [did for did in names if did in served and self.push_contracts_updated(did)]
        return encode_names("pushed", pushed)
