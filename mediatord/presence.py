"""The connection manager: which open sockets serve which DIDs (UC-021 "Connection manager")."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

from twisted.application.service import Service
from twisted.internet.defer import Deferred, succeed

Reader = TypeVar("Reader")


class Session(Protocol):
    """One open socket, whichever protocol it speaks."""

    client: str
    name: str

    def send(self, frame: bytes) -> bool:
        """Queue one text frame; False when the socket cannot take it now."""

    def close(self, code: int, reason: str) -> None:
        """Begin the closing handshake."""

    def __hash__(self) -> int: ...


class Connections(Service, Generic[Reader]):
    """
    Every open socket, and for each DID the sockets that want its messages pushed.

    A DID may have several sockets and a socket several DIDs. `Reader` is whatever the protocol half needs to write
    to that DID on that socket.

    :param max_per_peer: sockets one address may hold.
    """

    name = "connections"

    def __init__(self, max_per_peer: int) -> None:
        self._max_per_peer = max_per_peer
        self._sessions: set[Session] = set()
        self._per_peer: dict[str, int] = {}
        self._live: dict[str, dict[Session, Reader]] = {}
        self._dids: dict[Session, set[str]] = {}
        self._closed: list[Callable[[Session], None]] = []
        self._emptied: Deferred[None] | None = None
        self._draining = False

    def __len__(self) -> int:
        return len(self._sessions)

    def __contains__(self, session: Session) -> bool:
        return session in self._sessions

    @property
    def draining(self) -> bool:
        """Whether the daemon is stopping: no socket is welcome."""
        return self._draining

    def has_room(self, peer: str) -> bool:
        """Whether one more socket from `peer` is within its limit."""
        return self._per_peer.get(peer, 0) < self._max_per_peer

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
        for did in tuple(self._dids.get(session, ())):
            self.unsubscribe(session, did)
        for callback in self._closed:
            callback(session)
        if self._emptied is not None and not self._sessions:
            emptied, self._emptied = self._emptied, None
            emptied.callback(None)

    def subscribe(self, session: Session, did: str, reader: Reader) -> None:
        """Push what comes for `did` to this socket from now on, written for `reader`."""
        if session in self._sessions:
            self._live.setdefault(did, {})[session] = reader
            self._dids.setdefault(session, set()).add(did)

    def unsubscribe(self, session: Session, did: str) -> None:
        """Stop pushing what comes for `did` to this socket; others are not touched."""
        readers = self._live.get(did)
        if readers is None or readers.pop(session, None) is None:
            return
        if not readers:
            del self._live[did]
        dids = self._dids[session]
        dids.discard(did)
        if not dids:
            del self._dids[session]

    def subscribers(self, did: str) -> list[tuple[Session, Reader]]:
        """The sockets that want what comes for `did`."""
        return list(self._live.get(did, {}).items())

    def is_subscribed(self, session: Hashable, did: str) -> bool:
        """Whether this very socket wants what comes for `did`."""
        return session in self._live.get(did, {})

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
            session.close(1001, "going away")
        return self._emptied or succeed(None)
