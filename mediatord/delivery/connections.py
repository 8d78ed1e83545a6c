"""
The connection manager (UC-021 "Connection manager"): open sockets with their send queues, the DIDs that they
subscribe to, and the dispatch of stored messages and events to them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from sys import intern
from typing import Generic, Protocol, TypeVar

from twisted.application.service import Service
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IPushProducer, IReactorTime
from twisted.logger import Logger
from zope.interface import implementer

from mediatord.protocol.probe_markers import PROBE_CLIENT
from mediatord.runtime.failure_logging import redact_failure

K = TypeVar("K", bound=Hashable)
M = TypeVar("M", bound=Hashable)
V = TypeVar("V")


class CompactMultiMap(Generic[K, M, V]):
    """
    Multimap that stores a single member without a dict per key.

    For each key it has members in order of insertion, with a value each. A single member takes a tuple of 56 bytes, a
    quarter of a dict; a key has a dict only while it has several members.

    :ivar groups: by key; to look keys up without a call.
    """

    __slots__ = ("groups",)

    def __init__(self) -> None:
        self.groups: dict[K, tuple[M, V] | dict[M, V]] = {}

    def __len__(self) -> int:
        """Number of keys with members."""
        return len(self.groups)

    def __iter__(self) -> Iterator[K]:
        return iter(self.groups)

    def put(self, key: K, member: M, value: V) -> None:
        """Add a member, or change its value."""
        group = self.groups.get(key)
        if group is None or (isinstance(group, tuple) and group[0] == member):
            self.groups[key] = (member, value)
        elif isinstance(group, tuple):
            self.groups[key] = {group[0]: group[1], member: value}
        else:
            group[member] = value

    def has(self, key: K, member: object) -> bool:
        """Whether the key has this member."""
        group = self.groups.get(key)
        if isinstance(group, tuple):
            return group[0] == member
        return group is not None and member in group

    def count(self, key: K) -> int:
        """Number of members of a key."""
        group = self.groups.get(key)
        return 0 if group is None else 1 if isinstance(group, tuple) else len(group)

    def lookup(self, key: K) -> list[tuple[M, V]]:
        """Copy of the members of a key and their values."""
        group = self.groups.get(key)
        if isinstance(group, tuple):
            return [group]
        return [] if group is None else list(group.items())

    def discard(self, key: K, member: M) -> bool:
        """Remove a member; whether it was there and was the last one."""
        group = self.groups.get(key)
        if isinstance(group, tuple):
            if group[0] != member:
                return False
            del self.groups[key]
            return True
        if group is not None and member in group:
            del group[member]
            if len(group) == 1:
                self.groups[key] = next(iter(group.items()))
        return False

    def pop(self, key: K) -> list[tuple[M, V]]:
        """Remove and return all members of a key and their values."""
        members = self.lookup(key)
        self.groups.pop(key, None)
        return members


# Ids kept for all sockets together, and for one subscription: 100 bytes each.
MAX_BACKLOG_IDS = 100_000
MAX_BACKLOG_IDS_PER_SUBSCRIPTION = 10_000

_Subscription = tuple[str, Hashable]


class SubscriptionBacklogs:
    """
    Ids of the messages that were queued when a socket subscribed: it fetches these, and they are not pushed to it.

    Beyond :data:`MAX_BACKLOG_IDS` the oldest backlogs are dropped.
    """

    def __init__(self) -> None:
        self._backlogs: OrderedDict[_Subscription, tuple[float, frozenset[str]]] = OrderedDict()
        self._ids = 0

    def __len__(self) -> int:
        """Number of ids."""
        return self._ids

    def put(self, did: str, session: Hashable, at: float, ids: Iterable[str]) -> None:
        """Set the backlog of a subscription: the messages that were queued at a time."""
        self.discard(did, session)
        backlog = frozenset(ids)
        if backlog:
            self._backlogs[did, session] = at, backlog
            self._ids += len(backlog)
        while self._ids > MAX_BACKLOG_IDS:
            self.discard(*next(iter(self._backlogs)))

    def lookup(self, did: str, session: Hashable) -> tuple[float, frozenset[str]] | None:
        """Time and ids of a subscription's backlog, if it has one."""
        return self._backlogs.get((did, session))

    def has(self, did: str, session: Hashable, id_: str) -> bool:
        """Whether a message is in the backlog of a subscription."""
        backlog = self._backlogs.get((did, session))
        return backlog is not None and id_ in backlog[1]

    def discard(self, did: str, session: Hashable) -> None:
        """Drop the backlog of a subscription."""
        backlog = self._backlogs.pop((did, session), None)
        if backlog is not None:
            self._ids -= len(backlog[1])

    def forget(self, before: float) -> None:
        """Drop backlogs from before a time."""
        for (did, session), (at, _) in list(self._backlogs.items()):
            if at < before:
                self.discard(did, session)


_log = Logger()

Recipient = TypeVar("Recipient")

# DIDs that one socket may subscribe to; the presence of each is published to other nodes.
MAX_DIDS_PER_SOCKET = 256


class TooManySubscriptions(Exception):
    """The socket has as many subscriptions as one may have."""


def _ignore_frame(frame: bytes) -> None:
    """Nothing is written to a closed connection."""


def _ignore_drained() -> None:
    """A closed connection waits for nothing."""


@implementer(IPushProducer)
class SendQueue:
    """
    Bounded queue in front of a transport, as its producer: that of one WebSocket, or of a worker's log.

    :param write: sends one frame.
    :param max_frames: frames that may be queued while the transport is congested.
    :param max_bytes: bytes that may be queued; a first frame always may.
    :param on_drained: called when the queue is empty and the transport takes frames again.
    :ivar queued_bytes: bytes of queued frames.
    """

    __slots__ = (
        "_on_drained",
        "_max_bytes",
        "_max_frames",
        "_paused",
        "_stopped",
        "_queued",
        "_write",
        "queued_bytes",
    )

    def __init__(
        self,
        write: Callable[[bytes], None],
        max_frames: int = 64,
        max_bytes: int = 1_048_576,
        on_drained: Callable[[], None] = lambda: None,
    ) -> None:
        self._write = write
        self._on_drained = on_drained
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        # An empty deque would be larger than all other state of an idle socket.
        self._queued: deque[bytes] | None = None
        self.queued_bytes = 0
        self._paused = False
        self._stopped = False

    def limit(self, max_bytes: int) -> None:
        """Change the limit of bytes; queued frames are kept."""
        self._max_bytes = max_bytes

    @property
    def queued_frames(self) -> int:
        """Number of queued frames."""
        return len(self._queued or ())

    @property
    def is_drained(self) -> bool:
        """Whether a frame would be sent at once, or never because the connection is closed."""
        return self._stopped or not (self._paused or self._queued)

    def put(self, frame: bytes) -> None:
        """Send now or when the socket drains, beyond the limits: for replies, which are not made while congested."""
        if self._stopped:
            return
        if self._paused or self._queued:
            self._keep(frame)
        else:
            self._write(frame)

    def offer(self, frame: bytes) -> bool:
        """Send now or when the socket drains; False when full or closed."""
        if self._stopped:
            return False
        if not self._paused:
            self._write(frame)
            return True
        queued = self._queued
        if queued and (len(queued) >= self._max_frames or self.queued_bytes + len(frame) > self._max_bytes):
            return False
        self._keep(frame)
        return True

    def _keep(self, frame: bytes) -> None:
        if self._queued is None:
            self._queued = deque()
        self._queued.append(frame)
        self.queued_bytes += len(frame)

    def pauseProducing(self) -> None:
        """The transport's buffer is full; called for every write while it is."""
        self._paused = True

    def resumeProducing(self) -> None:
        """The transport drained: write queued frames until it is full again."""
        self._paused = False
        while self._queued and not self._paused:
            frame = self._queued.popleft()
            self.queued_bytes -= len(frame)
            self._write(frame)
        if not self._queued:
            self._queued = None
        if self.is_drained:
            self._on_drained()

    def stopProducing(self) -> None:
        """The connection is closed: drop queued frames, which are still in the store, and the connection."""
        self._stopped = True
        self._queued = None
        self.queued_bytes = 0
        self._on_drained()
        # They are methods of the connection, which would stay in a reference cycle.
        self._write, self._on_drained = _ignore_frame, _ignore_drained


# Answers to pings that may be missing on one socket.
MAX_RECEIPTS = 64


class WebSocketSession(Protocol):
    """
    One open socket of either protocol.

    :ivar client: rate limit key.
    :ivar name: random id for the log.
    """

    client: str
    name: str

    def send(self, frame: bytes) -> bool:
        """Queue one text frame; False when the socket cannot take it now."""

    def send_with_receipt(self, frame: bytes, on_receipt: Callable[[], None]) -> bool:
        """
        As :meth:`send`; calls back when the peer has answered a ping behind the frame, which shows that it has read
        it. False also when :data:`MAX_RECEIPTS` are missing on this socket.
        """

    def close(self, code: int, reason: str) -> None:
        """Begin the closing handshake."""

    def __hash__(self) -> int: ...


def send_to_subscribers(
    subscribers: Iterable[tuple[WebSocketSession, Recipient]], frame: Callable[[Recipient], bytes | None]
) -> list[WebSocketSession]:
    """
    Write to sockets; returns those that took the frame. Never fails.

    A socket for which writing raises is closed, so that its wallet does not wait in vain; others are not affected.

    :param frame: builds the frame for a recipient; None to skip the socket.
    """
    accepted_by = []
    for session, recipient in subscribers:
        try:
            payload = frame(recipient)
            if payload is not None and session.send(payload):
                accepted_by.append(session)
        except Exception:
            _log.failure("writing to a socket failed", redact_failure())
            close_ignoring_errors(session, 1011, "internal error")
    return accepted_by


def close_ignoring_errors(session: WebSocketSession, code: int, reason: str) -> None:
    """Begin the closing handshake of a socket; never fails."""
    try:
        session.close(code, reason)
    except Exception:
        _log.failure("closing a socket failed", redact_failure())


_get_account = attrgetter("account")


class _StoredItem(Protocol):
    @property
    def id(self) -> str: ...


Item = TypeVar("Item", bound=_StoredItem)


@dataclass(slots=True)
class LiveDispatcher(Generic[Item]):
    """
    Passes stored messages or events to sockets of this process, to other nodes, or elsewhere.

    :param push: writes to the sockets of this process; returns the ids of the items that a socket took,
        and never fails.
    :param push_elsewhere: has other nodes push; fires with whether a socket took it, or with None if one may yet take
        it, and never fails. Returns None if no other can have one. None for one process.
    :param fail_over: called with what no socket took or may yet take; None to leave it in the queue.
    :param fail_over_prefix: of the accounts of items for which it is called; empty for all. Others pay no call.
    :param wake: called with what no socket is known to have taken; None to wake nobody.
    """

    push: Callable[[Sequence[Item]], Container[str]]
    push_elsewhere: Callable[[Item], Deferred[bool] | Deferred[bool | None] | None] | None
    fail_over: Callable[[Item], None] | None = None
    wake: Callable[[Item], None] | None = None
    fail_over_prefix: str = ""

    def dispatch(
        self, item: Item, on_result: Callable[[bool], None] | None = None, taken_here: Container[str] | None = None
    ) -> None:
        """
        Waits for nothing and never fails; what nobody takes stays in the queue.

        :param on_result: called with whether a socket took it, as soon as that is known.
        :param taken_here: the result of :attr:`push`, where that was called for several items; by default it is
            called for this one.
        """
        pushed = item.id in (self.push((item,)) if taken_here is None else taken_here)
        if self.push_elsewhere is not None:
            # The recipient may have sockets at several nodes, and all of them get it.
            taken = self.push_elsewhere(item)
            if taken is not None and not pushed:
                taken.addCallback(self._finish, item, on_result)
                taken.addErrback(
                    lambda failure: _log.failure("pushing to other nodes failed", redact_failure(failure))
                )
                return
        self._finish(pushed, item, on_result)

    def dispatch_all(self, items: Sequence[Item]) -> None:
        """As :meth:`dispatch`, for several that are pushed together."""
        taken_here = self.push(items)
        for item in items:
            self.dispatch(item, taken_here=taken_here)

    def _finish(self, pushed: bool | None, item: Item, on_result: Callable[[bool], None] | None) -> None:
        if on_result is not None:
            on_result(bool(pushed))
        if pushed is False and self.fail_over is not None:
            prefix = self.fail_over_prefix
            if not prefix or _get_account(item).startswith(prefix):
                self.fail_over(item)
        if not pushed and self.wake is not None:
            self.wake(item)


class IPresencePublisher(Protocol):
    """Publishes to other nodes which DIDs have sockets here."""

    def add(self, did: str) -> Deferred[None]:
        """A socket subscribed; fires when other nodes can know, and fails with StoreUnavailable."""

    def remove(self, did: str) -> None:
        """The last socket is gone."""


class ConnectionManager(Service, Generic[Recipient]):
    """
    Open sockets and their subscriptions to DIDs. The length leaves out the sockets of the probe.

    A DID may have several sockets and a socket several DIDs. `Recipient` is what a protocol needs to write to that
    DID on that socket.

    :param max_per_peer: sockets that one address may hold.
    :param larger: larger limits of some addresses.
    """

    name = "connections"

    def __init__(self, max_per_peer: int, larger: Mapping[str, int] | None = None) -> None:
        self._max_per_peer = max_per_peer
        self._larger = larger or {}
        self._sessions: set[WebSocketSession] = set()
        self._per_peer: Counter[str] = Counter()
        self._presence_publisher: IPresencePublisher | None = None
        self._clock: IReactorTime | None = None
        self._live: CompactMultiMap[str, WebSocketSession, Recipient] = CompactMultiMap()
        # To find out without a call that a DID has no subscription.
        self.live_dids: Container[str] = self._live.groups
        self._since: CompactMultiMap[str, WebSocketSession, float] = CompactMultiMap()
        # Only where other nodes accept messages too: see :meth:`record_backlog`.
        self.backlogs = SubscriptionBacklogs()
        # Announced subscriptions, with whether the backlog is known.
        self._wanted: CompactMultiMap[str, WebSocketSession, bool] = CompactMultiMap()
        self._dids: CompactMultiMap[WebSocketSession, str, None] = CompactMultiMap()
        self._closed: list[Callable[[WebSocketSession], None]] = []
        self._emptied: Deferred[None] | None = None
        self._draining = False

    def __len__(self) -> int:
        return len(self._sessions) - self._per_peer[PROBE_CLIENT]

    def __contains__(self, session: WebSocketSession) -> bool:
        return session in self._sessions

    @property
    def draining(self) -> bool:
        """Whether the daemon is stopping and refuses sockets."""
        return self._draining

    @property
    def subscriptions(self) -> int:
        """Number of DIDs with a subscription, announced ones included."""
        return len(self._wanted)

    def has_room(self, peer: str) -> bool:
        """Whether one more socket from `peer` is within its limit."""
        return peer == PROBE_CLIENT or self._per_peer[peer] < self._larger.get(peer, self._max_per_peer)

    def limit(self, max_per_peer: int, larger: Mapping[str, int] | None = None) -> None:
        """Change the limits; open sockets are kept."""
        self._max_per_peer = max_per_peer
        self._larger = larger or {}

    def on_close(self, callback: Callable[[WebSocketSession], None]) -> None:
        """Register a callback for every closed socket."""
        self._closed.append(callback)

    def opened(self, session: WebSocketSession) -> None:
        """A socket completed its handshake."""
        self._sessions.add(session)
        self._per_peer[session.client] += 1
        if self._draining:
            session.close(1001, "going away")

    def closed(self, session: WebSocketSession) -> None:
        """A socket is closed; may be called more than once."""
        if session not in self._sessions:
            return
        self._sessions.discard(session)
        self._per_peer[session.client] -= 1
        if not self._per_peer[session.client]:
            del self._per_peer[session.client]
        for did, _ in self._dids.lookup(session):
            self.unsubscribe(session, did)
        for callback in self._closed:
            try:
                callback(session)
            except Exception:
                _log.failure("cleaning up after a socket failed", redact_failure())
        if self._emptied is not None and not self._sessions:
            emptied, self._emptied = self._emptied, None
            emptied.callback(None)

    def set_presence_publisher(self, publisher: IPresencePublisher, clock: IReactorTime) -> None:
        """Publish presence to other nodes, and keep the times of subscriptions."""
        self._presence_publisher = publisher
        self._clock = clock

    def announce_subscription(self, session: WebSocketSession, did: str) -> Deferred[None]:
        """
        Publish that this socket is about to subscribe to `did`; fires when other nodes can know.

        :raise TooManySubscriptions: the socket has as many as one may have.
        :raise StoreUnavailable: other nodes cannot know for now.
        """
        if session not in self._sessions:
            return succeed(None)
        if not self._dids.has(session, did) and self._dids.count(session) >= MAX_DIDS_PER_SOCKET:
            return fail(TooManySubscriptions())
        did = intern(did)  # DIDs are long, and each message has its own copy
        if not self._wanted.has(did, session):
            self._wanted.put(did, session, False)
        self._dids.put(session, did, None)
        return succeed(None) if self._presence_publisher is None else self._presence_publisher.add(did)

    def subscribe(self, session: WebSocketSession, did: str, recipient: Recipient) -> Deferred[None]:
        """
        Push messages for `did` to this socket from now on; as :meth:`announce_subscription`.

        :raise TooManySubscriptions: the socket has as many as one may have, and is not subscribed.
        :raise StoreUnavailable: messages that other nodes accept are not pushed until the store is available again.
        """
        known = self.announce_subscription(session, did)
        if self._wanted.has(did, session):
            self._live.put(intern(did), session, recipient)
            if self._clock is not None and not self._since.has(did, session):
                self._since.put(intern(did), session, self._clock.seconds())
        return known

    def transfer_subscription(
        self, session: WebSocketSession, prior: str, did: str, recipient: Recipient
    ) -> Deferred[None]:
        """
        Replace the subscription to `prior` by one to `did` with the same time and backlog; as :meth:`subscribe`.
        """
        since, backlog = dict(self._since.lookup(prior)).get(session), self.backlogs.lookup(prior, session)
        is_backlog_known = self.is_backlog_known(session, prior)
        self.unsubscribe(session, prior)
        is_new = not self.is_subscribed(session, did)
        known = self.subscribe(session, did, recipient)
        if is_new and since is not None and self.is_subscribed(session, did):
            self._since.put(intern(did), session, since)
            self._wanted.put(did, session, is_backlog_known)
            if backlog is not None:
                self.backlogs.put(intern(did), session, *backlog)
        return known

    def is_backlog_known(self, session: WebSocketSession, did: str) -> bool:
        """Whether :meth:`record_backlog` was called for this subscription."""
        return dict(self._wanted.lookup(did)).get(session, False)

    def record_backlog(self, session: WebSocketSession, did: str, ids: Iterable[str]) -> None:
        """Set the messages for `did` that were queued before the socket subscribed."""
        if self._clock is not None and self._wanted.has(did, session):
            self._wanted.put(did, session, True)
            self.backlogs.put(intern(did), session, self._clock.seconds(), ids)

    def unsubscribe(self, session: WebSocketSession, did: str) -> None:
        """Stop pushing messages for `did` to this socket."""
        self._dids.discard(session, did)
        self._live.discard(did, session)
        self._since.discard(did, session)
        self.backlogs.discard(did, session)
        if self._wanted.discard(did, session) and self._presence_publisher is not None:
            self._presence_publisher.remove(did)

    def subscribers(
        self, did: str, *, by: float = inf, message: str | None = None
    ) -> list[tuple[WebSocketSession, Recipient]]:
        """
        The sockets that are subscribed to `did`.

        :param by: leaves out those that subscribed after this time, where that is kept; a time in the future, from
            before the clock was set back, does not count.
        :param message: leaves out those with this message id in their backlog.
        """
        recipients = self._live.lookup(did)
        if self._clock is None:
            return recipients
        if by != inf:
            now, since = self._clock.seconds(), dict(self._since.lookup(did))
            recipients = [one for one in recipients if not by < since.get(one[0], 0.0) <= now]
        if message is not None:
            recipients = [one for one in recipients if not self.backlogs.has(did, one[0], message)]
        return recipients

    def live(self, wanted: Callable[[Recipient], bool]) -> list[str]:
        """The DIDs with a subscription whose recipient fulfils a condition."""
        return [did for did in self._live if any(wanted(recipient) for _, recipient in self._live.lookup(did))]

    def close_denied(self, denied: Callable[[str], bool], wanted: Callable[[Recipient], bool]) -> None:
        """
        Close the sockets that are subscribed to a denied DID.

        :param wanted: condition on the recipient of the subscription.
        """
        for did in filter(denied, self.live(wanted)):
            for session, recipient in self.subscribers(did):
                if wanted(recipient):
                    close_ignoring_errors(session, 1008, "denied")

    def is_subscribed(self, session: Hashable, did: str) -> bool:
        """Whether this socket is subscribed to `did`."""
        return self._live.has(did, session)

    def startService(self) -> None:
        """Accept sockets."""
        super().startService()
        self._draining = False

    def stopService(self) -> Deferred[None]:
        """Close every socket with 1001 (going away); fires when the last one is closed."""
        super().stopService()
        self._draining = True
        if not self._sessions:
            return succeed(None)
        self._emptied = Deferred()
        for session in tuple(self._sessions):
            close_ignoring_errors(session, 1001, "going away")
        return self._emptied or succeed(None)
