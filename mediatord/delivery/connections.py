"""
Groups that have one member nearly always, and must not cost a hash table each.

What waited for a DID when a socket subscribed to it.

The connection manager: which open sockets serve which DIDs (UC-021 "Connection manager").
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from math import inf
from sys import intern
from typing import Generic, Protocol, TypeVar

from twisted.application.service import Service
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.failure_logging import redact_failure
from mediatord.protocol.probe_requests import PROBE_CLIENT

K = TypeVar("K", bound=Hashable)
M = TypeVar("M", bound=Hashable)
V = TypeVar("V")


class CompactMultiMap(Generic[K, M, V]):
    """
    For each key its members in order of coming, and a value for each of them.

    A single member takes a tuple of 56 bytes, where a dictionary would take four times as much; from the second on
    the key has a dictionary, for as long as there are several.
    """

    __slots__ = ("groups",)

    def __init__(self) -> None:
        self.groups: dict[K, tuple[M, V] | dict[M, V]] = {}

    def __len__(self) -> int:
        """How many keys have members."""
        return len(self.groups)

    def __iter__(self) -> Iterator[K]:
        return iter(self.groups)

    def put(self, key: K, member: M, value: V) -> None:
        """Let it be a member, or give it another value."""
        group = self.groups.get(key)
        if group is None or (isinstance(group, tuple) and group[0] == member):
            self.groups[key] = (member, value)
        elif isinstance(group, tuple):
            self.groups[key] = {group[0]: group[1], member: value}
        else:
            group[member] = value

    def has(self, key: K, member: object) -> bool:
        """Whether it is a member."""
        group = self.groups.get(key)
        if isinstance(group, tuple):
            return group[0] == member
        return group is not None and member in group

    def count(self, key: K) -> int:
        """How many members there are."""
        group = self.groups.get(key)
        return 0 if group is None else 1 if isinstance(group, tuple) else len(group)

    def lookup(self, key: K) -> list[tuple[M, V]]:
        """The members and their values, as they are now."""
        group = self.groups.get(key)
        if isinstance(group, tuple):
            return [group]
        return [] if group is None else list(group.items())

    def discard(self, key: K, member: M) -> bool:
        """Let it be none. Whether it was one, and the last."""
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
        """The members and their values; the key has none any more."""
        members = self.lookup(key)
        self.groups.pop(key, None)
        return members


# Ids that are remembered for all sockets together, and for one subscription: 100 bytes each.
MAX_BACKLOG_IDS = 100_000
MAX_BACKLOG_IDS_PER_SUBSCRIPTION = 10_000

_Subscription = tuple[str, Hashable]


class SubscriptionBacklogs:
    """
    Ids of messages by subscription: the owner of the socket asks for these, and they are not pushed to it.

    Beyond :data:`MAX_IDS` the oldest are forgotten; of a message that is forgotten it is not known that it waited.
    """

    def __init__(self) -> None:
        self._backlogs: OrderedDict[_Subscription, tuple[float, frozenset[str]]] = OrderedDict()
        self._ids = 0

    def __len__(self) -> int:
        """How many ids are remembered."""
        return self._ids

    def put(self, did: str, session: Hashable, at: float, ids: Iterable[str]) -> None:
        """These waited at a time, and nothing else."""
        self.discard(did, session)
        backlog = frozenset(ids)
        if backlog:
            self._backlogs[did, session] = at, backlog
            self._ids += len(backlog)
        while self._ids > MAX_BACKLOG_IDS:
            self.discard(*next(iter(self._backlogs)))

    def lookup(self, did: str, session: Hashable) -> tuple[float, frozenset[str]] | None:
        """The time and the ids of a subscription, if anything waited."""
        return self._backlogs.get((did, session))

    def has(self, did: str, session: Hashable, id_: str) -> bool:
        """Whether a message waited when the socket subscribed."""
        backlog = self._backlogs.get((did, session))
        return backlog is not None and id_ in backlog[1]

    def discard(self, did: str, session: Hashable) -> None:
        """The subscription is over."""
        backlog = self._backlogs.pop((did, session), None)
        if backlog is not None:
            self._ids -= len(backlog[1])

    def forget(self, before: float) -> None:
        """Nobody asks any more for what waited before a time."""
        for (did, session), (at, _) in list(self._backlogs.items()):
            if at < before:
                self.discard(did, session)


_log = Logger()

Recipient = TypeVar("Recipient")

# DIDs of one socket: for each of them other nodes are told that it is here.
MAX_DIDS_PER_SOCKET = 256


class TooManySubscriptions(Exception):
    """A socket is live for as many as one may be."""


class WebSocketSession(Protocol):
    """One open socket, whichever protocol it speaks."""

    client: str
    name: str

    def send(self, frame: bytes) -> bool:
        """Queue one text frame; False when the socket cannot take it now."""

    def close(self, code: int, reason: str) -> None:
        """Begin the closing handshake."""

    def __hash__(self) -> int: ...


def send_to_subscribers(
    subscribers: Iterable[tuple[WebSocketSession, Recipient]], frame: Callable[[Recipient], bytes | None]
) -> list[WebSocketSession]:
    """
    Write to each of several sockets; those that took it. Never fails.

    A socket for which that raises is closed, since its wallet would wait in vain. It is no reason to doubt that the
    others have what they took.

    :param frame: what to write for a reader; None where the socket is not meant.
    """
    took = []
    for session, recipient in subscribers:
        try:
            payload = frame(recipient)
            if payload is not None and session.send(payload):
                took.append(session)
        except Exception:
            _log.failure("writing to a socket failed", redact_failure())
            close_ignoring_errors(session, 1011, "internal error")
    return took


def close_ignoring_errors(session: WebSocketSession, code: int, reason: str) -> None:
    """Begin the closing handshake of one socket among others; never fails."""
    try:
        session.close(code, reason)
    except Exception:
        _log.failure("closing a socket failed", redact_failure())


class IPresencePublisher(Protocol):
    """Tells other nodes which DIDs there are sockets for."""

    def here(self, did: str) -> Deferred[None]:
        """One, or one more; fires when they can know, and fails with StoreUnavailable when they cannot for now."""

    def gone(self, did: str) -> None:
        """None any more."""


class _NullPresencePublisher:
    """Takes the place of an announcer where there are no other nodes."""

    def here(self, did: str) -> Deferred[None]:
        return succeed(None)

    def gone(self, did: str) -> None:
        pass


class ConnectionManager(Service, Generic[Recipient]):
    """
    Every open socket, and for each DID the sockets that want its messages pushed; its length leaves out the daemon's
    own.

    A DID may have several sockets and a socket several DIDs. `Reader` is whatever the protocol half needs to write
    to that DID on that socket.

    :param max_per_peer: sockets one address may hold.
    :param larger: the same of some addresses that may hold more.
    """

    name = "connections"

    def __init__(self, max_per_peer: int, larger: Mapping[str, int] | None = None) -> None:
        self._max_per_peer = max_per_peer
        self._larger = larger or {}
        self._sessions: set[WebSocketSession] = set()
        self._per_peer: dict[str, int] = {}
        self._presence_publisher: IPresencePublisher = _NullPresencePublisher()
        self._clock: IReactorTime | None = None
        self._live: CompactMultiMap[str, WebSocketSession, Recipient] = CompactMultiMap()
        self._since: CompactMultiMap[str, WebSocketSession, float] = CompactMultiMap()
        # Only where messages are accepted elsewhere, too: see :meth:`waited`.
        self.backlogs = SubscriptionBacklogs()
        # With whether it is known what waited.
        self._wanted: CompactMultiMap[str, WebSocketSession, bool] = CompactMultiMap()
        self._dids: CompactMultiMap[WebSocketSession, str, None] = CompactMultiMap()
        self._closed: list[Callable[[WebSocketSession], None]] = []
        self._emptied: Deferred[None] | None = None
        self._draining = False

    def __len__(self) -> int:
        return len(self._sessions) - self._per_peer.get(PROBE_CLIENT, 0)

    def __contains__(self, session: WebSocketSession) -> bool:
        return session in self._sessions

    @property
    def draining(self) -> bool:
        """Whether the daemon is stopping: no socket is welcome."""
        return self._draining

    @property
    def subscriptions(self) -> int:
        """DIDs that sockets want the messages of, or have said that they will."""
        return len(self._wanted)

    def has_room(self, peer: str) -> bool:
        """Whether one more socket from `peer` is within its limit."""
        return peer == PROBE_CLIENT or self._per_peer.get(peer, 0) < self._larger.get(peer, self._max_per_peer)

    def limit(self, max_per_peer: int, larger: Mapping[str, int] | None = None) -> None:
        """Let one address hold so many from now on, and some more; who has more keeps them."""
        self._max_per_peer = max_per_peer
        self._larger = larger or {}

    def on_close(self, callback: Callable[[WebSocketSession], None]) -> None:
        """Have `callback` told of every socket that is gone."""
        self._closed.append(callback)

    def opened(self, session: WebSocketSession) -> None:
        """A socket finished its handshake."""
        self._sessions.add(session)
        self._per_peer[session.client] = self._per_peer.get(session.client, 0) + 1
        if self._draining:
            session.close(1001, "going away")

    def closed(self, session: WebSocketSession) -> None:
        """A socket is gone, in whichever way; known to be called more than once."""
        if session not in self._sessions:
            return
        self._sessions.discard(session)
        left = self._per_peer[session.client] - 1
        if left:
            self._per_peer[session.client] = left
        else:
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
        """Let other nodes know for whom there are sockets, and remember since when."""
        self._presence_publisher = publisher
        self._clock = clock

    def announce_subscription(self, session: WebSocketSession, did: str) -> Deferred[None]:
        """
        This socket will be subscribed to what comes for `did`; fires when other nodes can know.

        :raise TooManyDIDs: it is so for as many DIDs as one socket may be.
        :raise StoreUnavailable: they cannot for now.
        """
        if session not in self._sessions:
            return succeed(None)
        if not self._may_have(session, did):
            return fail(TooManySubscriptions())
        did = intern(did)  # a DID is long, and every message brings a copy of it
        if not self._wanted.has(did, session):
            self._wanted.put(did, session, False)
        self._dids.put(session, did, None)
        return self._presence_publisher.here(did)

    def subscribe(self, session: WebSocketSession, did: str, recipient: Recipient) -> Deferred[None]:
        """
        Push what comes for `did` to this socket from now on, written for `reader`; as :meth:`expect`.

        :raise TooManyDIDs: nothing comes, since it is live for so many already.
        :raise StoreUnavailable: what other nodes accept will not be pushed before the store is there again.
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
        Let this socket be subscribed to `did` in place of `prior`, as if it had been all the time.

        As :meth:`subscribe`.
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
        """Whether :meth:`waited` was called, and the socket is not unsubscribed since."""
        return dict(self._wanted.lookup(did)).get(session, False)

    def record_backlog(self, session: WebSocketSession, did: str, ids: Iterable[str]) -> None:
        """These are for `did` and came before the socket was subscribed to it, whatever clocks say."""
        if self._clock is not None and self._wanted.has(did, session):
            self._wanted.put(did, session, True)
            self.backlogs.put(intern(did), session, self._clock.seconds(), ids)

    def unsubscribe(self, session: WebSocketSession, did: str) -> None:
        """Stop pushing what comes for `did` to this socket; others are not touched."""
        self._dids.discard(session, did)
        self._live.discard(did, session)
        self._since.discard(did, session)
        self.backlogs.discard(did, session)
        if self._wanted.discard(did, session):
            self._presence_publisher.gone(did)

    def subscribers(
        self, did: str, *, by: float = inf, message: str | None = None
    ) -> list[tuple[WebSocketSession, Recipient]]:
        """
        The sockets that want what comes for `did`.

        :param by: leaves out those that subscribed after this time; only where it is remembered, and not those that
            did so before the clock was set back.
        :param message: leaves out those for which the message with this id waited when they subscribed.
        """
        if did not in self._live.groups:
            return []
        recipients = self._live.lookup(did)
        if (message is None and by == inf) or self._clock is None:
            return recipients
        now, since = self._clock.seconds(), dict(self._since.lookup(did))
        return [
            (session, recipient)
            for session, recipient in recipients
            if not by < since.get(session, 0.0) <= now
            and not (message is not None and self.backlogs.has(did, session, message))
        ]

    def live(self, wanted: Callable[[Recipient], bool]) -> list[str]:
        """The DIDs that a socket with such a reader wants to have what comes for."""
        return [did for did in self._live if any(wanted(recipient) for _, recipient in self._live.lookup(did))]

    def close_denied(self, denied: Callable[[str], bool], wanted: Callable[[Recipient], bool]) -> None:
        """
        Close the sockets on which somebody waits who is not served any more.

        :param wanted: whether a reader is of those who are asked about.
        """
        for did in filter(denied, self.live(wanted)):
            for session, recipient in self.subscribers(did):
                if wanted(recipient):
                    close_ignoring_errors(session, 1008, "not served")

    def is_subscribed(self, session: Hashable, did: str) -> bool:
        """Whether this very socket wants what comes for `did`."""
        return self._live.has(did, session)

    def _may_have(self, session: WebSocketSession, did: str) -> bool:
        return self._dids.has(session, did) or self._dids.count(session) < MAX_DIDS_PER_SOCKET

    def startService(self) -> None:
        """Take sockets."""
        super().startService()
        self._draining = False

    def stopService(self) -> Deferred[None]:
        """Close every socket with 1001 (going away); fires when the last one is gone."""
        super().stopService()
        self._draining = True
        if not self._sessions:
            return succeed(None)
        self._emptied = Deferred()
        for session in tuple(self._sessions):
            close_ignoring_errors(session, 1001, "going away")
        return self._emptied or succeed(None)
