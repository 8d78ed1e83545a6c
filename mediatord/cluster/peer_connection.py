"""
Authenticated connections between nodes, over TCP or UNIX sockets.

Everything is in frames: four bytes of length, then the content. The client begins with a hello, which is a version
and a nonce, and the server answers with its own. From the cluster secret and both nonces each side derives a key for
either direction. Every further frame ends in an HMAC-SHA256 over its number and its content; so none can be altered,
left out, repeated, reordered, reflected, or moved to another connection, and clocks do not matter. The client's first
such frame is the boot that it wants to reach, the server's is its own. Then the client sends one request at a time,
and the server answers each; an empty answer means that the request was not served and may be repeated.

A client that does not authenticate gets an empty frame without a MAC, and is disconnected.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Any, TypeVar

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from twisted.internet.defer import CancelledError, Deferred, fail
from twisted.internet.endpoints import clientFromString
from twisted.internet.interfaces import IAddress, IReactorTime
from twisted.internet.protocol import Factory, connectionDone
from twisted.logger import Logger
from twisted.protocols.basic import Int32StringReceiver
from twisted.protocols.policies import TimeoutMixin
from twisted.python.failure import Failure

from mediatord.errors import StoreUnavailable
from mediatord.runtime.failure_logging import LogThrottle, redact_failure
from mediatord.runtime.request_time import request_deadline
from mediatord.runtime.secret_files import SecretFileError, read_secret_file
from mediatord.store.interfaces.cluster_and_quotas import ClusterNode

_log = Logger()

T = TypeVar("T")

MIN_SECRET_BYTES = 32
_KEY_PURPOSES = (b"seal", b"connections", b"allowances")


@dataclass(frozen=True, slots=True)
class ClusterKeys:
    """
    Keys derived from the cluster secret; none reveals the secret or another key.

    :param seal: proves knowledge of the secret to other nodes, which compare it with theirs.
    :param connections: authenticates connections between nodes.
    :param allowances: pseudonymizes the subjects of rate limits in the store.
    """

    seal: bytes = field(repr=False)
    connections: bytes = field(repr=False)
    allowances: bytes = field(repr=False)


def read_cluster_keys(path: Path) -> ClusterKeys:
    """
    Derive the keys from the secret in a file, without the white space around it.

    :raise SecretFileError: the file cannot be read, others have access to it, or the secret is too short.
    """
    secret = read_secret_file(path).strip()
    if len(secret) < MIN_SECRET_BYTES:
        raise SecretFileError(f"{path} is shorter than {MIN_SECRET_BYTES} bytes; run: openssl rand -hex 32 > {path}")
    return derive_cluster_keys(secret)


def derive_cluster_keys(secret: bytes) -> ClusterKeys:
    """Derive the keys from a secret of at least :data:`MIN_SECRET_BYTES` bytes."""
    infos = [b"mediatord cluster: " + purpose for purpose in _KEY_PURPOSES]
    return ClusterKeys(*(HKDF(SHA256(), 32, salt=None, info=info).derive(secret) for info in infos))


PROTOCOL_HELLO = b"mediatord peers 2\n"
NONCE_BYTES = MAC_BYTES = 32
# Bytes of a request or an answer, and of a frame from a node that has not authenticated yet.
MAX_BODY_BYTES = 65_536
MAX_HANDSHAKE_BYTES = 128
_MAX_FRAME_BYTES = MAX_BODY_BYTES + MAC_BYTES


class PeerConnection(Int32StringReceiver, TimeoutMixin):
    """
    One side of a connection between nodes.

    :param key: that of :class:`ClusterKeys` for connections.
    """

    MAX_LENGTH = MAX_HANDSHAKE_BYTES
    is_client: bool

    def __init__(self, clock: IReactorTime, key: bytes) -> None:
        self.callLater = clock.callLater  # type: ignore[method-assign,assignment]  # for the timeout
        self._key = key
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._send_key = self._receive_key = b""
        self._sent = self._received = 0

    def timeoutConnection(self) -> None:  # noqa: N802  Twisted's name
        self.abort()

    def abort(self) -> None:
        """Close the connection at once, and read no more of it."""
        self.paused = True
        if self.transport is not None:
            self.transport.abortConnection()  # type: ignore[attr-defined]

    def send_hello(self) -> None:
        """Begin this direction."""
        self.sendString(PROTOCOL_HELLO + self._nonce)

    def send(self, body: bytes) -> None:
        """Send an authenticated frame."""
        number, self._sent = self._sent, self._sent + 1
        self.sendString(body + hmac.digest(self._send_key, number.to_bytes(8, "big") + body, "sha256"))

    def stringReceived(self, frame: bytes) -> None:  # noqa: N802  Twisted's name
        if not self._receive_key:
            self._process_hello(frame)
            return
        body = frame[:-MAC_BYTES]
        mac = hmac.digest(self._receive_key, self._received.to_bytes(8, "big") + body, "sha256")
        if not hmac.compare_digest(mac, frame[-MAC_BYTES:]):
            self.refuse("seal", frame)
            return
        self._received += 1
        self.body_received(body)

    def _process_hello(self, frame: bytes) -> None:
        if len(frame) != len(PROTOCOL_HELLO) + NONCE_BYTES or not frame.startswith(PROTOCOL_HELLO):
            self.refuse("malformed", frame)
            return
        theirs = frame[-NONCE_BYTES:]
        nonces = self._nonce + theirs if self.is_client else theirs + self._nonce
        both = [hmac.digest(self._key, side + nonces, "sha256") for side in (b"client", b"server")]
        self._send_key, self._receive_key = both if self.is_client else reversed(both)
        self.hello_received()

    def lengthLimitExceeded(self, length: int) -> None:  # noqa: N802  Twisted's name
        self.refuse("malformed", None)

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.setTimeout(None)

    def hello_received(self) -> None:
        """The other side has begun its direction: authenticated frames may be sent."""
        raise NotImplementedError

    def body_received(self, body: bytes) -> None:
        """A frame of the other side was authentic."""
        raise NotImplementedError

    def refuse(self, reason: str, frame: bytes | None) -> None:
        """
        End a connection whose other side is no node.

        :param frame: None for one that is too long.
        """
        raise NotImplementedError


CALL_TIMEOUT = 2.0
# Seconds; less than the other side keeps an idle connection.
CLIENT_IDLE_TIMEOUT = 30.0


class PeerCallFailed(Exception):
    """A request failed: no connection, no answer in time, or none from a node."""


class PeerReplaced(PeerCallFailed):
    """
    Another node listens at the address by now.

    :ivar boot: of that node.
    """

    def __init__(self, boot: str) -> None:
        super().__init__(boot)
        self.boot = boot


class PeerCallRejected(PeerCallFailed):
    """The other node did not accept the authentication: its secret differs."""


class PeerClientConnection(PeerConnection):
    """
    A connection to another node.

    :param boot: that the node should have.
    :param lost: called when the connection has ended.
    :ivar answer: to what was sent last; at first, the boot that the node has.
    """

    is_client = True

    def __init__(
        self, clock: IReactorTime, key: bytes, boot: str, lost: Callable[[PeerClientConnection], None]
    ) -> None:
        super().__init__(clock, key)
        self.boot = boot
        self._lost = lost
        self.answer: Deferred[bytes] = Deferred(lambda _: self.abort())

    def connectionMade(self) -> None:
        self.setTimeout(CLIENT_IDLE_TIMEOUT)
        self.send_hello()

    def hello_received(self) -> None:
        self.send(self.boot.encode())

    def request(self, body: bytes) -> Deferred[bytes]:
        """Send a request, once the last one was answered; fails with :class:`PeerCallFailed`."""
        self.MAX_LENGTH = _MAX_FRAME_BYTES
        self.resetTimeout()
        self.answer = Deferred(lambda _: self.abort())
        self.send(body)
        return self.answer

    def body_received(self, body: bytes) -> None:
        if self.answer.called:
            self.abort()
        else:
            self.answer.callback(body)

    def refuse(self, reason: str, frame: bytes | None) -> None:
        self._fail(PeerCallRejected() if frame == b"" else PeerCallFailed())
        self.abort()

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        super().connectionLost(reason)
        self._lost(self)
        self._fail(PeerCallFailed())

    def _fail(self, error: PeerCallFailed) -> None:
        if not self.answer.called:
            self.answer.errback(error)


class PeerClient:
    """Sends requests to other nodes, over connections that it keeps for a while."""

    def __init__(self, reactor: Any, keys: ClusterKeys, *, timeout: float = CALL_TIMEOUT) -> None:
        self._reactor = reactor
        self._key = keys.connections
        self._timeout = timeout
        self._idle: dict[str, PeerClientConnection] = {}
        self._in_flight: set[Deferred[Any]] = set()
        self._is_closed = False

    def call(self, node: ClusterNode, body: bytes) -> Deferred[bytes]:
        """
        Send a request to a node; fires with its answer.

        :raise PeerReplaced: another node listens at its address.
        :raise PeerCallRejected: it did not accept the authentication.
        :raise PeerCallFailed: anything else.
        """
        return self._start(self._exchange(node, body))

    async def probe(self, node: ClusterNode) -> str | None:
        """
        The boot of the node that answers at a node's address; None if no node does.

        :raise CancelledError: it was cancelled.
        """
        try:
            (await self._start(self._connect(node))).abort()
        except PeerReplaced as other:
            return other.boot
        except PeerCallFailed:
            return None
        return node.boot

    def close(self) -> None:
        """Cancel requests, refuse new ones, and close the connections."""
        self._is_closed = True
        for pending in tuple(self._in_flight):
            pending.cancel()
        for connection in tuple(self._idle.values()):
            connection.abort()

    def _start(self, work: Coroutine[Any, Any, T]) -> Deferred[T]:
        if self._is_closed:
            work.close()
            return fail(PeerCallFailed())
        pending = Deferred.fromCoroutine(work)
        self._in_flight.add(pending)
        return pending.addTimeout(self._timeout, self._reactor).addBoth(self._finish, pending)

    def _finish(self, result: T | Failure, pending: Deferred[T]) -> T | Failure:
        self._in_flight.discard(pending)
        if not isinstance(result, Failure) or result.check(PeerCallFailed):
            return result
        if result.check(CancelledError) and not self._is_closed:
            return result
        # An address may be no endpoint, and connecting fails in many ways.
        return Failure(PeerCallFailed())

    async def _exchange(self, node: ClusterNode, body: bytes) -> bytes:
        connection = self._idle.pop(node.boot, None) or await self._connect(node)
        answer = await connection.request(body)
        self._idle[node.boot] = connection
        if not answer:
            raise PeerCallFailed
        return answer

    async def _connect(self, node: ClusterNode) -> PeerClientConnection:
        connection = PeerClientConnection(self._reactor, self._key, node.boot, self._remove_idle)
        factory: Any = Factory()
        factory.noisy = False
        factory.protocol = lambda: connection
        await clientFromString(self._reactor, node.address).connect(factory)
        boot = (await connection.answer).decode()
        if boot != node.boot:
            connection.abort()
            raise PeerReplaced(boot)
        return connection

    def _remove_idle(self, connection: PeerClientConnection) -> None:
        if self._idle.get(connection.boot) is connection:
            del self._idle[connection.boot]


# Authenticated connections; further ones count as unauthenticated.
MAX_AUTHENTICATED = 256
# Other connections, in all and per address.
MAX_UNAUTHENTICATED = 128
MAX_UNAUTHENTICATED_PER_ADDRESS = 64
# Requests served at a time; further ones are answered as not served.
MAX_CONCURRENT_REQUESTS = 64
# Seconds until a connection has to be authenticated, and until a request has to be complete.
RECEIVE_TIMEOUT = 10.0
# Seconds; more than a node keeps an idle connection.
SERVER_IDLE_TIMEOUT = 60.0


class PeerServerConnection(PeerConnection):
    """A connection from a client, which may be a node."""

    is_client = False
    factory: PeerServer

    is_authenticated = False
    _is_closing = False
    _serving: Deferred[Any] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request awaits its answer."""
        return self._serving is None

    def connectionMade(self) -> None:
        self.setTimeout(RECEIVE_TIMEOUT)

    def dataReceived(self, data: bytes) -> None:
        if self._is_closing:
            return  # TLS goes on reading until the other side has closed
        if self.timeOut == SERVER_IDLE_TIMEOUT:
            self.setTimeout(RECEIVE_TIMEOUT)
        super().dataReceived(data)

    def hello_received(self) -> None:
        self.send_hello()

    def body_received(self, body: bytes) -> None:
        if self._serving is not None:
            self.abort()
        elif self.is_authenticated:
            self.setTimeout(SERVER_IDLE_TIMEOUT)
            self._serving = Deferred.fromCoroutine(self.factory.serve(body))
            self._serving.addCallback(self._answer).addErrback(self._fail)
        else:
            self.send(self.factory.boot)
            if body == self.factory.boot:
                self._authenticated()
            else:
                self._close()

    def _authenticated(self) -> None:
        self.is_authenticated = True
        self.MAX_LENGTH = _MAX_FRAME_BYTES
        self.setTimeout(SERVER_IDLE_TIMEOUT)
        self.factory.mark_authenticated(self)
        # Reads no further requests while the client does not read answers.
        self.transport.registerProducer(self, True)  # type: ignore[union-attr]

    def _answer(self, answer: bytes) -> None:
        self._serving = None
        self.send(answer)

    def _fail(self, failure: Failure) -> None:
        if not failure.check(CancelledError):
            _log.failure("serving a request of another node failed", redact_failure(failure))
        self.abort()

    def refuse(self, reason: str, frame: bytes | None) -> None:
        if self.is_authenticated and frame is None:
            self.abort()
            return
        self.factory.count_refusal(reason)
        self.sendString(b"")
        self._close()

    def _close(self) -> None:
        """Close once everything is written; the timeout still applies."""
        self.paused = self._is_closing = True
        self.transport.loseConnection()  # type: ignore[union-attr]

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        super().connectionLost(reason)
        self.factory.remove(self)
        if self._serving is not None:
            self._serving.cancel()


class PeerServer(Factory):
    """
    The node-to-node listener, with limits on everything that a client can do before it is authenticated.

    When all places are taken, a new connection evicts the oldest unauthenticated one that is idle. So idle
    connections cannot keep a node out, since a node authenticates at once.

    :param boot: of this node.
    :param operation: answers a request; raises ValueError for a malformed one, and StoreUnavailable.
    :param refused: called for each refused client with the reason: `malformed`, or `seal` for a wrong MAC.
    """

    noisy = False
    protocol: Any = PeerServerConnection

    def __init__(
        self,
        clock: IReactorTime,
        keys: ClusterKeys,
        boot: str,
        operation: Callable[[bytes], Awaitable[bytes]],
        refused: Callable[[str], None],
    ) -> None:
        self._clock = clock
        self._key = keys.connections
        self.boot = boot.encode()
        self._operation = operation
        self._refused = refused
        self._warning = LogThrottle(clock)
        self._requests = 0
        self._authenticated: set[PeerServerConnection] = set()
        self._unauthenticated: dict[PeerServerConnection, str] = {}

    def __len__(self) -> int:
        return len(self._authenticated) + len(self._unauthenticated)

    def buildProtocol(self, addr: IAddress | None) -> Any:
        """A connection, or None if there are too many."""
        address = normalize_address(getattr(addr, "host", "") or "")
        oldest_first = list(self._unauthenticated)
        same_address = [one for one in oldest_first if address and self._unauthenticated[one] == address]
        if len(same_address) >= MAX_UNAUTHENTICATED_PER_ADDRESS:
            oldest_first = same_address
        if oldest_first is same_address or len(oldest_first) >= MAX_UNAUTHENTICATED:
            evicted = next((one for one in oldest_first if one.is_idle), None)
            if evicted is None:
                return None
            self.remove(evicted)
            evicted.abort()
        connection = PeerServerConnection(self._clock, self._key)
        connection.factory = self
        self._unauthenticated[connection] = address
        return connection

    def mark_authenticated(self, connection: PeerServerConnection) -> None:
        """Count a connection as authenticated, if there is a place."""
        if connection in self._unauthenticated and len(self._authenticated) < MAX_AUTHENTICATED:
            del self._unauthenticated[connection]
            self._authenticated.add(connection)

    def remove(self, connection: PeerServerConnection) -> None:
        """Free the place of a connection."""
        self._authenticated.discard(connection)
        self._unauthenticated.pop(connection, None)
        # One that found no place takes the one that is free now.
        if waiting := next((one for one in self._unauthenticated if one.is_authenticated), None):
            self.mark_authenticated(waiting)

    async def serve(self, body: bytes) -> bytes:
        """The answer to a request of a node; empty if it was not served."""
        if self._requests >= MAX_CONCURRENT_REQUESTS:
            return b""
        self._requests += 1
        try:
            with request_deadline(self._clock):
                return await self._operation(body)
        except (ValueError, StoreUnavailable):
            return b""
        finally:
            self._requests -= 1

    def count_refusal(self, reason: str) -> None:
        """Count a refused client, and log it now and then."""
        self._refused(reason)
        count = self._warning.count_occurrence()
        if count:
            _log.warn(
                "refused {count} requests to cluster.listen (last reason: {reason}): the sender is not a node, or "
                "uses a different cluster.secret_file",
                count=count,
                reason=reason,
            )

    def stopFactory(self) -> None:
        """Abort the connections that are still open."""
        for connection in (*self._authenticated, *self._unauthenticated):
            connection.abort()


def normalize_address(host: str) -> str:
    """The address that a client is limited by: with IPv6 its /64 network."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return host
    return str(address.ipv4_mapped or ip_network((int(address), 64), strict=False))
