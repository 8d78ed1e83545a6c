"""The connection manager: which open sockets serve which DIDs (UC-021 "Connection manager")."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from math import inf
from sys import intern
from typing import Generic, Protocol, TypeVar

from twisted.application.service import Service
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.backlogs import Backlogs
from mediatord.faults import without_text
from mediatord.few import Few
from mediatord.synthetic import ITSELF

_log = Logger()

Reader = TypeVar("Reader")


# DIDs of one socket: for each of them other nodes are told that it is here.
MAX_DIDS = 256


class TooManyDIDs(Exception):
    """A socket is live for as many as one may be."""


class Session(Protocol):
    """One open socket, whichever protocol it speaks."""

    client: str
    name: str

    def send(self, frame: bytes) -> bool:
        """Queue one text frame; False when the socket cannot take it now."""

    def close(self, code: int, reason: str) -> None:
        """Begin the closing handshake."""

    def __hash__(self) -> int: ...


def send_each(
    subscribers: Iterable[tuple[Session, Reader]], frame: Callable[[Reader], bytes | None]
) -> list[Session]:
    """
    Write to each of several sockets; those that took it. Never fails.

    A socket for which that raises is closed, since its wallet would wait in vain. It is no reason to doubt that the
    others have what they took.

    :param frame: what to write for a reader; None where the socket is not meant.
    """
    took = []
    for session, reader in subscribers:
        try:
            payload = frame(reader)
            if payload is not None and session.send(payload):
                took.append(session)
        except Exception:
            _log.failure("writing to a socket failed", without_text())
            close_quietly(session, 1011, "internal error")
    return took


def close_quietly(session: Session, code: int, reason: str) -> None:
    """Begin the closing handshake of one socket among others; never fails."""
    try:
        session.close(code, reason)
    except Exception:
        _log.failure("closing a socket failed", without_text())


class Announcer(Protocol):
    """Tells other nodes which DIDs there are sockets for."""

    def here(self, did: str) -> Deferred[None]:
        """One, or one more; fires when they can know, and fails with StoreUnavailable when they cannot for now."""

    def gone(self, did: str) -> None:
        """None any more."""


class _Alone:
    """Takes the place of an announcer where there are no other nodes."""

    def here(self, did: str) -> Deferred[None]:
        return succeed(None)

    def gone(self, did: str) -> None:
        pass


class Connections(Service, Generic[Reader]):
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
        self._sessions: set[Session] = set()
        self._per_peer: dict[str, int] = {}
        self._announcer: Announcer = _Alone()
        self._clock: IReactorTime | None = None
        self._live: Few[str, Session, Reader] = Few()
        self._since: Few[str, Session, float] = Few()
        # Only where messages are accepted elsewhere, too: see :meth:`waited`.
        self.backlogs = Backlogs()
        # With whether it is known what waited.
        self._wanted: Few[str, Session, bool] = Few()
        self._dids: Few[Session, str, None] = Few()
        self._closed: list[Callable[[Session], None]] = []
        self._emptied: Deferred[None] | None = None
        self._draining = False

    def __len__(self) -> int:
        return len(self._sessions) - self._per_peer.get(ITSELF, 0)

    def __contains__(self, session: Session) -> bool:
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
        return peer == ITSELF or self._per_peer.get(peer, 0) < self._larger.get(peer, self._max_per_peer)

    def limit(self, max_per_peer: int, larger: Mapping[str, int] | None = None) -> None:
        """Let one address hold so many from now on, and some more; who has more keeps them."""
        self._max_per_peer = max_per_peer
        self._larger = larger or {}

    def on_close(self, callback: Callable[[Session], None]) -> None:
        """Have `callback` told of every socket that is gone."""
        self._closed.append(callback)

    def opened(self, session: Session) -> None:
        """A socket finished its handshake."""
        self._sessions.add(session)
        self._per_peer[session.client] = self._per_peer.get(session.client, 0) + 1
        if self._draining:
            session.close(1001, "going away")

    def closed(self, session: Session) -> None:
        """A socket is gone, in whichever way; known to be called more than once."""
        if session not in self._sessions:
            return
        self._sessions.discard(session)
        left = self._per_peer[session.client] - 1
        if left:
            self._per_peer[session.client] = left
        else:
            del self._per_peer[session.client]
        for did, _ in self._dids.of(session):
            self.unsubscribe(session, did)
        for callback in self._closed:
            try:
                callback(session)
            except Exception:
                _log.failure("cleaning up after a socket failed", without_text())
        if self._emptied is not None and not self._sessions:
            emptied, self._emptied = self._emptied, None
            emptied.callback(None)

    def announce_to(self, announcer: Announcer, clock: IReactorTime) -> None:
        """Let other nodes know for whom there are sockets, and remember since when."""
        self._announcer = announcer
        self._clock = clock

    def expect(self, session: Session, did: str) -> Deferred[None]:
        """
        This socket will be subscribed to what comes for `did`; fires when other nodes can know.

        :raise TooManyDIDs: it is so for as many DIDs as one socket may be.
        :raise StoreUnavailable: they cannot for now.
        """
        if session not in self._sessions:
            return succeed(None)
        if not self._may_have(session, did):
            return fail(TooManyDIDs())
        did = intern(did)  # a DID is long, and every message brings a copy of it
        if not self._wanted.has(did, session):
            self._wanted.put(did, session, False)
        self._dids.put(session, did, None)
        return self._announcer.here(did)

    def subscribe(self, session: Session, did: str, reader: Reader) -> Deferred[None]:
        """
        Push what comes for `did` to this socket from now on, written for `reader`; as :meth:`expect`.

        :raise TooManyDIDs: nothing comes, since it is live for so many already.
        :raise StoreUnavailable: what other nodes accept will not be pushed before the store is there again.
        """
        known = self.expect(session, did)
        if self._wanted.has(did, session):
            self._live.put(intern(did), session, reader)
            if self._clock is not None and not self._since.has(did, session):
                self._since.put(intern(did), session, self._clock.seconds())
        return known

    def move(self, session: Session, prior: str, did: str, reader: Reader) -> Deferred[None]:
        """
        Let this socket be subscribed to `did` in place of `prior`, as if it had been all the time.

        As :meth:`subscribe`.
        """
        since, backlog = dict(self._since.of(prior)).get(session), self.backlogs.of(prior, session)
        knows_backlog = self.knows_backlog(session, prior)
        self.unsubscribe(session, prior)
        is_new = not self.is_subscribed(session, did)
        known = self.subscribe(session, did, reader)
        if is_new and since is not None and self.is_subscribed(session, did):
            self._since.put(intern(did), session, since)
            self._wanted.put(did, session, knows_backlog)
            if backlog is not None:
                self.backlogs.put(intern(did), session, *backlog)
        return known

    def knows_backlog(self, session: Session, did: str) -> bool:
        """Whether :meth:`waited` was called, and the socket is not unsubscribed since."""
        return dict(self._wanted.of(did)).get(session, False)

    def waited(self, session: Session, did: str, ids: Iterable[str]) -> None:
        """These are for `did` and came before the socket was subscribed to it, whatever clocks say."""
        if self._clock is not None and self._wanted.has(did, session):
            self._wanted.put(did, session, True)
            self.backlogs.put(intern(did), session, self._clock.seconds(), ids)

    def unsubscribe(self, session: Session, did: str) -> None:
        """Stop pushing what comes for `did` to this socket; others are not touched."""
        self._dids.drop(session, did)
        self._live.drop(did, session)
        self._since.drop(did, session)
        self.backlogs.drop(did, session)
        if self._wanted.drop(did, session):
            self._announcer.gone(did)

    def subscribers(self, did: str, *, by: float = inf, message: str | None = None) -> list[tuple[Session, Reader]]:
        """
        The sockets that want what comes for `did`.

        :param by: leaves out those that subscribed after this time; only where it is remembered, and not those that
            did so before the clock was set back.
        :param message: leaves out those for which the message with this id waited when they subscribed.
        """
        readers = self._live.of(did)
        if (message is None and by == inf) or self._clock is None or not readers:
            return readers
        now, since = self._clock.seconds(), dict(self._since.of(did))
        return [
            (session, reader)
            for session, reader in readers
            if not by < since.get(session, 0.0) <= now
            and not (message is not None and self.backlogs.has(did, session, message))
        ]

    def live(self, wanted: Callable[[Reader], bool]) -> list[str]:
        """The DIDs that a socket with such a reader wants to have what comes for."""
        return [did for did in self._live if any(wanted(reader) for _, reader in self._live.of(did))]

    def close_denied(self, denied: Callable[[str], bool], wanted: Callable[[Reader], bool]) -> None:
        """
        Close the sockets on which somebody waits who is not served any more.

        :param wanted: whether a reader is of those who are asked about.
        """
        for did in filter(denied, self.live(wanted)):
            for session, reader in self.subscribers(did):
                if wanted(reader):
                    close_quietly(session, 1008, "not served")

    def is_subscribed(self, session: Hashable, did: str) -> bool:
        """Whether this very socket wants what comes for `did`."""
        return self._live.has(did, session)

    def _may_have(self, session: Session, did: str) -> bool:
        return self._dids.has(session, did) or self._dids.count(session) < MAX_DIDS

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
            close_quietly(session, 1001, "going away")
        return self._emptied or succeed(None)
