"""
One cycle of the end-to-end probe: a store write; then, over each listener, a forward that is pushed and acknowledged.

Also the probe identities, by which the mediator's processes recognise probes, and connections to the daemon's own
listeners.
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from OpenSSL import SSL
from treq.client import HTTPClient
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.endpoints import (
    TCP4ClientEndpoint,
    TCP6ClientEndpoint,
    UNIXClientEndpoint,
    wrapClientTLS,
)
from twisted.internet.interfaces import (
    IOpenSSLClientConnectionCreator,
    IProtocol,
    IStreamClientEndpoint,
)
from twisted.internet.ssl import CertificateOptions
from twisted.protocols.policies import ProtocolWrapper, WrappingFactory
from twisted.web.client import Agent, HTTPConnectionPool
from twisted.web.http_headers import Headers
from twisted.web.iweb import IAgentEndpointFactory
from zope.interface import implementer

from mediatord.errors import StoreUnavailable
from mediatord.protocol import encoding
from mediatord.protocol.didcomm.did_methods import make_did_peer_2
from mediatord.protocol.didcomm.forward import FORWARD
from mediatord.protocol.didcomm.keys import PrivateKey
from mediatord.protocol.error_codes import DIDCOMM_ERROR_CODES
from mediatord.protocol.probe_markers import PROBE_DID_INFIX, PROBE_HEADER, PROBE_SERVICE_TYPE
from mediatord.wallet.didcomm_client import (
    DeliveredMessage,
    DIDCommMediator,
    DIDCommWallet,
    MediatorProblem,
    QueueStatus,
    read_attachment,
)
from mediatord.wallet.didcomm_identity import WalletIdentity, WalletKey
from mediatord.wallet.didcomm_messages import anoncrypt, build_attachment, compose_message
from mediatord.wallet.didcomm_socket import DIDCommSocket, connect_didcomm_socket

_TAG_BYTES = 16


class ProbeIdentities:
    """
    Probe DIDs of all nodes of a mediator, one per node name, stable across restarts.

    Each contains a tag that only the mediator's processes can compute.

    :param seed: a secret of the mediator.
    """

    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._tags = _derive_key(seed, "tags", 32)

    def identity(self, node: str) -> WalletIdentity:
        """Probe identity of a node."""
        secret = _derive_key(self._seed, f"keys of {node}", 64)
        agreement = PrivateKey.from_secret("X25519", secret[:32])
        signing = PrivateKey.from_secret("Ed25519", secret[32:])
        did = self._tagged(make_did_peer_2([("E", agreement.public), ("V", signing.public)], []))
        return WalletIdentity(did, WalletKey(f"{did}#key-1", agreement), WalletKey(f"{did}#key-2", signing))

    def is_probe_did(self, did: str) -> bool:
        """Whether a DID is a probe DID; fast for all others."""
        keys, mark, _ = did.partition(PROBE_DID_INFIX)
        return bool(mark) and hmac.compare_digest(_encode_did(did), _encode_did(self._tagged(keys)))

    def _tagged(self, keys: str) -> str:
        tag = hmac.digest(self._tags, _encode_did(keys), "sha256")[:_TAG_BYTES]
        service = encoding.dumps({"t": PROBE_SERVICE_TYPE, "s": encoding.encode_base64url(tag)})
        return f"{keys}.S{encoding.encode_base64url(service)}"


@dataclass(frozen=True, slots=True)
class ProbeCredentials:
    """
    Distinguishes probe requests from others.

    :param token: sent in a header of probe requests; shared by the workers of a daemon.
    """

    identities: ProbeIdentities
    token: bytes = field(repr=False)


def derive_probe_credentials(seed: bytes, shared: bytes | None) -> ProbeCredentials:
    """
    :param seed: a secret of the mediator.
    :param shared: a secret of all workers of a daemon; None for a single process.
    """
    token = secrets.token_bytes(32) if shared is None else _derive_key(shared, "token", 32)
    return ProbeCredentials(ProbeIdentities(seed), token.hex().encode("ascii"))


def _encode_did(did: str) -> bytes:
    """Encode text that need not be a valid DID."""
    return did.encode("utf-8", "surrogatepass")


def _derive_key(secret: bytes, purpose: str, length: int) -> bytes:
    info = f"mediatord readiness, {purpose}".encode()
    return HKDF(algorithm=SHA256(), length=length, salt=None, info=info).derive(secret)


# Twisted does not accept a PROXY header with an unknown client.
_PROXY_HEADER = b"PROXY TCP4 127.0.0.1 127.0.0.1 1 1\r\n"
_LOOPBACK_ADDRESSES: dict[type[IPv4Address | IPv6Address], str] = {IPv4Address: "127.0.0.1", IPv6Address: "::1"}


@dataclass(frozen=True, slots=True)
class ListenerAddress:
    """
    Address of a listener.

    :param address: address object of the Twisted port, or the path of a UNIX socket.
    :param tls: whether it uses TLS.
    :param proxied: whether connections start with a PROXY header.
    """

    address: Any
    tls: bool = False
    proxied: bool = False


def make_listener_endpoint(reactor: Any, place: ListenerAddress, name: str) -> IStreamClientEndpoint:
    """
    Client endpoint to one of the daemon's own listeners.

    :param name: server name for SNI; the certificate is not verified.
    """
    endpoint = _make_plain_endpoint(reactor, place.address)
    if place.tls:
        endpoint = wrapClientTLS(_UnverifiedTLS(name), endpoint)
    return _ProxyHeaderEndpoint(endpoint) if place.proxied else endpoint


def _make_plain_endpoint(reactor: Any, address: Any) -> IStreamClientEndpoint:
    host = getattr(address, "host", None)
    if host is None:
        path = getattr(address, "name", address)
        endpoint: IStreamClientEndpoint = UNIXClientEndpoint(
            reactor, path.decode() if isinstance(path, bytes) else path
        )
        return endpoint
    ip = ip_address(host)
    if ip.is_unspecified:
        host = _LOOPBACK_ADDRESSES[type(ip)]
    return (TCP6ClientEndpoint if ip.version == 6 else TCP4ClientEndpoint)(reactor, host, address.port)


@implementer(IOpenSSLClientConnectionCreator)
class _UnverifiedTLS:
    """TLS without verification: probe messages are encrypted for the mediator anyway."""

    def __init__(self, name: str) -> None:
        self._name = name.encode("idna")
        self._context = CertificateOptions().getContext()

    def clientConnectionForTLS(self, tlsProtocol: Any) -> SSL.Connection:  # noqa: N802, N803  Twisted's names
        """Called for each connection."""
        connection = SSL.Connection(self._context, None)
        connection.set_tlsext_host_name(self._name)
        return connection


class _ProxyHeaderProtocol(ProtocolWrapper):
    """Sends a PROXY header first, as a proxy's own health check does."""

    def makeConnection(self, transport: Any) -> None:  # noqa: N802  Twisted's name
        transport.write(_PROXY_HEADER)
        super().makeConnection(transport)


class _ProxyHeaderFactory(WrappingFactory):
    protocol = _ProxyHeaderProtocol
    noisy = False


@implementer(IStreamClientEndpoint)
class _ProxyHeaderEndpoint:
    """A way to a listener that takes connections of proxies only."""

    def __init__(self, endpoint: IStreamClientEndpoint) -> None:
        self._endpoint = endpoint

    def connect(self, protocolFactory: Any) -> Deferred[IProtocol]:  # noqa: N803  Twisted's name
        """Go it."""
        connecting: Deferred[Any] = self._endpoint.connect(_ProxyHeaderFactory(protocolFactory))
        return connecting.addCallback(lambda announcing: announcing.wrappedProtocol)


@implementer(IStreamClientEndpoint)
class AbortableConnector:
    """
    A way that is gone for one connection, which can be cut.

    :param connected: told when there is one.
    """

    def __init__(self, endpoint: IStreamClientEndpoint, connected: Callable[[], None] = lambda: None) -> None:
        self._endpoint = endpoint
        self._connected = connected
        self._protocol: Any = None

    def connect(self, protocolFactory: Any) -> Deferred[IProtocol]:  # noqa: N803  Twisted's name
        """Go it."""
        protocolFactory.noisy = False  # every few seconds
        connecting: Deferred[IProtocol] = self._endpoint.connect(protocolFactory)
        return connecting.addCallback(self._keep)

    def abort(self) -> None:
        """End the connection at once, if there is one."""
        if self._protocol is not None and self._protocol.transport is not None:
            self._protocol.transport.abortConnection()

    def _keep(self, protocol: IProtocol) -> IProtocol:
        self._protocol = protocol
        self._connected()
        return protocol


_EMPTY_MESSAGE_TYPE = "https://didcomm.org/empty/1.0/empty"

# Seconds after which a message that was left behind is dropped.
PROBE_MESSAGE_SECONDS = 30
# Times that what earlier cycles left behind is fetched.
_MAX_PICKUP_ROUNDS = 5
# The listener is known to be ours, so that its name makes no difference.
_HOST = "localhost"
_HTTP_ACCEPTED, _HTTP_UNAVAILABLE = 202, 503


class ProbeError(Exception):
    """
    A probe cycle failed.

    :param stage: `store`, `listener`, `socket`, `forward`, `push` or `acknowledgement`.
    :param cause: name of the error.
    """

    def __init__(self, stage: str, cause: str = "") -> None:
        super().__init__(stage)
        self.stage = stage
        self.cause = cause


class _QueueNotEmpty(Exception):
    """Messages in the probe's queue could not be removed."""


@dataclass(frozen=True, slots=True)
class ProbeContext:
    """
    Collaborators of a probe cycle.

    :param reactor: for connections and time.
    :param endpoints: client endpoints of the listeners; None for one that does not listen.
    :param write: makes the store keep a small record for a while.
    :param mediator: current DID of the mediator.
    """

    reactor: Any
    endpoints: Callable[[], Sequence[IStreamClientEndpoint | None]]
    write: Callable[[], Deferred[Any]]
    mediator: Callable[[], str]
    identity: WalletIdentity = field(repr=False)
    token: bytes = field(repr=False)


class ProbeCycle:
    """
    Runs probe cycles, one at a time.

    :ivar stage: current stage, or the last one of a finished cycle.
    """

    def __init__(self, context: ProbeContext) -> None:
        self.stage = "store"
        self._context = context
        self._headers = {PROBE_HEADER: context.token.decode("ascii")}
        self._enrolled = False

    async def run(self) -> None:
        """
        Run one cycle.

        :raise ProbeError: it failed. After a cancellation, `stage` tells where it was.
        """
        try:
            await self._run()
        except Exception as error:
            self._enrolled = False
            if _is_store_failure(error):
                self.stage = "store"
            raise ProbeError(self.stage, "no answer" if _is_timeout(error) else type(error).__name__) from None

    async def _run(self) -> None:
        self.stage = "store"
        await _shield_from_cancellation(self._context.write())
        for endpoint in self._context.endpoints():
            self.stage = "listener"
            if endpoint is None:
                raise ConnectionError
            await self._over(endpoint)

    async def _over(self, endpoint: IStreamClientEndpoint) -> None:
        """Probe one listener: WebSocket for the receiving side, POST for the forward, on separate connections."""
        post = _ProbeHTTPClient(
            self._context.reactor, AbortableConnector(endpoint, lambda: self._at("forward")), self._headers
        )
        line = AbortableConnector(endpoint, lambda: self._at("socket"))
        mediator = DIDCommMediator.from_did(self._context.mediator())
        wallet = DIDCommWallet(self._context.identity, post, self._context.reactor, mediator)
        try:
            url = f"ws://{_HOST}/didcomm"
            socket = await connect_didcomm_socket(
                self._context.reactor, wallet, url=url, endpoint=line, headers=self._headers
            )
            await self._settle(socket)
            sent = await self._forward(wallet)
            self._at("push")
            delivered = await _wait_for_push(wallet, socket, sent)
            self._at("acknowledgement")
            await _empty_queue(socket, await socket.acknowledge(delivered))
            await socket.close()
        finally:
            line.abort()
            post.close()

    async def _settle(self, socket: DIDCommSocket) -> None:
        """Ensure an account, live delivery and an empty queue."""
        if not self._enrolled:
            await socket.grant()
            if (await socket.register())[0] not in ("success", "no_change"):
                raise _QueueNotEmpty
            self._enrolled = True
        await _empty_queue(socket, await socket.live())

    async def _forward(self, wallet: DIDCommWallet) -> str:
        """Forward a message to the probe identity; returns its id."""
        note = compose_message(_EMPTY_MESSAGE_TYPE, to=[wallet.did])
        sealed = build_attachment(anoncrypt(note, wallet.identity.document))
        expires = int(wallet.clock.seconds()) + PROBE_MESSAGE_SECONDS
        _, envelope = wallet.pack(FORWARD, {"next": wallet.did}, attachments=[sealed], expires_time=expires)
        self._at("listener")
        response = await wallet.post(envelope, url=f"http://{_HOST}/didcomm")
        if response.status != _HTTP_ACCEPTED:
            raise MediatorProblem(response.status)
        return str(note["id"])

    def _at(self, stage: str) -> None:
        self.stage = stage


class _ProbeHTTPClient:
    """HTTP client of the probe's wallet: POSTs over a fixed endpoint with the probe header."""

    def __init__(self, reactor: Any, endpoint: IStreamClientEndpoint, headers: dict[str, str]) -> None:
        # Persistent connections resemble those of wallets; they are closed after the cycle.
        self._pool = HTTPConnectionPool(reactor, persistent=True)
        self._client = HTTPClient(Agent.usingEndpointFactory(reactor, _FixedEndpointFactory(endpoint), self._pool))
        self._headers = headers

    def post(self, url: str, /, *, data: bytes, headers: Headers, allow_redirects: bool) -> Awaitable[Any]:
        for name, value in self._headers.items():
            headers.setRawHeaders(name, [value])
        posted: Awaitable[Any] = self._client.post(
            url, data=data, headers=headers, allow_redirects=allow_redirects, unbuffered=True
        )
        return posted

    def close(self) -> None:
        self._pool.closeCachedConnections()


@implementer(IAgentEndpointFactory)
class _FixedEndpointFactory:
    """Always the same endpoint, whatever the URI."""

    def __init__(self, endpoint: IStreamClientEndpoint) -> None:
        self._way = endpoint

    def endpointForURI(self, uri: object) -> IStreamClientEndpoint:  # noqa: N802  Twisted's name
        return self._way


def _shield_from_cancellation(work: Deferred[Any]) -> Deferred[Any]:
    """Fires with the result of `work`; cancelling it leaves `work` running, which others may wait for."""
    told: Deferred[Any] = Deferred()

    def tell(outcome: Any) -> None:
        if not told.called:
            told.callback(outcome)

    work.addBoth(tell)
    return told


async def _wait_for_push(wallet: DIDCommWallet, socket: DIDCommSocket, id_: str) -> list[DeliveredMessage]:
    """Deliveries pushed until a message arrives, that one included."""
    delivered: list[DeliveredMessage] = []
    while not delivered or _read_message_id(wallet, delivered[-1].payload) != id_:
        delivered.append(await socket.pushed.get())
    return delivered


def _read_message_id(wallet: DIDCommWallet, payload: bytes) -> str:
    """Id of the message in a payload, which `didcomm.rewrap` wraps into another forward."""
    message = wallet.open(payload).message
    if message.type.uri == FORWARD:
        (inner,) = message.attachments or ({},)
        message = wallet.open(read_attachment({"id": "0", **inner}).payload).message
    return message.id


async def _empty_queue(socket: DIDCommSocket, status: QueueStatus) -> None:
    """Acknowledge all queued messages."""
    for _ in range(_MAX_PICKUP_ROUNDS):
        if not status.message_count:
            return
        status = await socket.acknowledge(await socket.fetch())
    raise _QueueNotEmpty


def _is_timeout(error: Exception) -> bool:
    """Whether an error means cancellation; cancelled requests report it in a list."""
    reasons = getattr(error, "reasons", ())
    return isinstance(error, CancelledError) or any(reason.check(CancelledError) for reason in reasons)


def _is_store_failure(error: Exception) -> bool:
    if isinstance(error, MediatorProblem):
        return error.status == _HTTP_UNAVAILABLE or error.code == DIDCOMM_ERROR_CODES[StoreUnavailable].code
    return isinstance(error, StoreUnavailable)
