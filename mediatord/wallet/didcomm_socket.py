"""A DIDComm wallet's WebSocket: requests, responses by thread, and pushed messages (reference 3.2 and 6.3)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from autobahn.twisted.websocket import WebSocketClientFactory, WebSocketClientProtocol
from twisted.internet.defer import Deferred, DeferredQueue
from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.error import ConnectionClosed
from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint
from twisted.internet.ssl import optionsForClientTLS

from mediatord.protocol import encoding
from mediatord.protocol.canonical_did import canonicalize_did
from mediatord.protocol.didcomm.message import Message
from mediatord.wallet.didcomm_client import (
    PICKUP,
    PROBLEM_REPORT,
    DeliveredMessage,
    DIDCommWallet,
    MediationRequests,
    MediatorProblem,
    QueueStatus,
    read_delivery,
    read_status,
)
from mediatord.wallet.didcomm_messages import OpenedMessage, UnreadableMessage, open_problem_report

SOCKET_TIMEOUT_SECONDS = 30.0

WriteMessage = Callable[[bytes, bool], None]
StartClosing = Callable[[int], None]


class SocketClosedError(ConnectionClosed):
    """
    The socket is closed.

    :param code: as the other side gave it, 1006 when it gave none.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"closed with {code}")
        self.code = code


class WalletWebSocket:
    """
    An open WebSocket, whatever its messages are.

    :param write: sends one message, as binary or not.
    :param end: starts the closing handshake, with a code.
    :ivar close_code: of the other side; None while the socket is open.
    :ivar unexpected: frames that could not be interpreted.
    """

    def __init__(self, write: WriteMessage, end: StartClosing) -> None:
        self.close_code: int | None = None
        self.unexpected: list[bytes] = []
        self._write = write
        self._end = end
        self._closing: list[Deferred[int]] = []

    def send_frame(self, payload: bytes, *, binary: bool = False) -> None:
        """
        Send one message.

        :raise SocketClosedError: the socket is closed.
        """
        if self.close_code is not None:
            raise SocketClosedError(self.close_code)
        self._write(payload, binary)

    def close(self, code: int = 1000) -> Deferred[int]:
        """Start the closing handshake; fires as :meth:`closed`."""
        if self.close_code is None:
            self._end(code)
        return self.closed()

    def closed(self) -> Deferred[int]:
        """Fires with the close code once the socket is closed, by either side."""
        waiter: Deferred[int] = Deferred()
        if self.close_code is not None:
            waiter.callback(self.close_code)
        else:
            self._closing.append(waiter)
        return waiter

    def frame_received(self, payload: bytes) -> None:
        """Handle a text frame. Never raises."""
        raise NotImplementedError

    def connection_lost(self, code: int) -> None:
        """Handle the end of the socket."""
        self.close_code = code
        closing, self._closing = self._closing, []
        for waiter in closing:
            waiter.callback(code)


WalletSocket = TypeVar("WalletSocket", bound=WalletWebSocket)
MakeSocket = Callable[[WriteMessage, StartClosing], WalletSocket]


class _WebSocketProtocol(WebSocketClientProtocol, Generic[WalletSocket]):
    """Passes frames of Autobahn to a :class:`WalletWebSocket`."""

    def __init__(self, make_socket: MakeSocket[WalletSocket]) -> None:
        super().__init__()
        self.socket = make_socket(self.sendMessage, self.sendClose)
        self.opened: Deferred[WalletSocket] = Deferred()
        self._is_open = False

    def onOpen(self) -> None:
        if not self.opened.called:
            self._is_open = True
            self.opened.callback(self.socket)

    def onMessage(self, payload: bytes, isBinary: bool) -> None:  # noqa: N803  Autobahn's name
        # Mediators send text only (reference 3.2).
        if isBinary:
            self.socket.unexpected.append(payload)
        else:
            self.socket.frame_received(payload)

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:  # noqa: N803  Autobahn's names
        if self._is_open:
            self.socket.connection_lost(code or 1006)
        elif not self.opened.called:
            self.opened.errback(SocketClosedError(code or 1006))


class _WebSocketFactory(WebSocketClientFactory, Generic[WalletSocket]):
    """Builds one protocol, without Autobahn's own timers, which would run on the global reactor."""

    def __init__(
        self,
        url: str,
        reactor: IReactorTime,
        make_socket: MakeSocket[WalletSocket],
        headers: Mapping[str, str] | None,
    ) -> None:
        super().__init__(url, headers=dict(headers or {}), reactor=reactor)
        self.setProtocolOptions(openHandshakeTimeout=0, closeHandshakeTimeout=0, serverConnectionDropTimeout=0)
        self._make_socket = make_socket

    def buildProtocol(self, addr: object) -> _WebSocketProtocol[WalletSocket]:
        protocol = _WebSocketProtocol(self._make_socket)
        protocol.factory = self
        return protocol


async def open_wallet_socket(
    reactor: Any,
    url: str,
    make_socket: MakeSocket[WalletSocket],
    endpoint: IStreamClientEndpoint | None = None,
    headers: Mapping[str, str] | None = None,
) -> WalletSocket:
    """
    Open a WebSocket.

    :param make_socket: given what sends a message and what starts the closing handshake.
    :param endpoint: where to connect to, if not as `url` says.
    :param headers: of the request, in addition to those of the handshake.
    :raise SocketClosedError: the server refused.
    """

    def abort(value: Any, _: float) -> Any:
        protocol.dropConnection(abort=True)
        return value

    factory = _WebSocketFactory(url, reactor, make_socket, headers)
    protocol: Any = await (endpoint or make_client_endpoint(reactor, url)).connect(factory)
    opened: Deferred[WalletSocket] = protocol.opened
    return await opened.addTimeout(SOCKET_TIMEOUT_SECONDS, reactor, abort)


def make_client_endpoint(reactor: Any, url: str) -> IStreamClientEndpoint:
    """The endpoint of a `ws:` or `wss:` URL."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "wss":
        tls: IStreamClientEndpoint = wrapClientTLS(
            optionsForClientTLS(host), HostnameEndpoint(reactor, host, parts.port or 443)
        )
        return tls
    plain: IStreamClientEndpoint = HostnameEndpoint(reactor, host, parts.port or 80)
    return plain


class DIDCommSocket(MediationRequests, WalletWebSocket):
    """
    An open socket of a wallet; see :func:`connect_didcomm_socket`.

    :ivar pushed: pushed messages. In raw mode there is no id; it is the SHA-256 of the payload then (reference 6.1).
    :ivar problems: problem reports that belong to no pending request.
    """

    def __init__(self, wallet: DIDCommWallet, write: WriteMessage, end: StartClosing) -> None:
        MediationRequests.__init__(self, self.request, wallet.did, wallet.version)
        WalletWebSocket.__init__(self, write, end)
        self.wallet = wallet
        self.pushed: DeferredQueue[DeliveredMessage] = DeferredQueue()
        self.problems: DeferredQueue[MediatorProblem] = DeferredQueue()
        self._pending: dict[str, Deferred[Message]] = {}

    async def request(self, type_: str, body: Mapping[str, Any] | None = None, /, **headers: Any) -> Message:
        """
        Send a request; the response in the same thread, after all checks.

        :raise MediatorProblem: the response is a problem report.
        :raise SocketClosedError: the socket was closed before the response.
        """
        message, envelope = self.wallet.pack(type_, body, **headers)
        thread = str(message.get("thid", message["id"]))
        answer: Deferred[Message] = Deferred()
        self._pending[thread] = answer
        try:
            self.send_frame(envelope)
            return await answer.addTimeout(SOCKET_TIMEOUT_SECONDS, self.wallet.clock)
        finally:
            self._pending.pop(thread, None)

    async def live(self, on: bool = True) -> QueueStatus:
        """Turn live delivery on or off."""
        return read_status(await self.request(f"{PICKUP}/live-delivery-change", {"live_delivery": on}))

    def frame_received(self, payload: bytes) -> None:
        """Dispatch a frame: a response, a push or a problem report. Never raises."""
        try:
            if "ciphertext" not in encoding.loads_object(payload):
                self._take_report(open_problem_report(payload, self.wallet.documents.resolve))
                return
            opened = self.wallet.open(payload)
            if canonicalize_did(opened.sender or "") != canonicalize_did(self.wallet.mediator.did):
                self.pushed.put(DeliveredMessage(hashlib.sha256(payload).hexdigest(), payload, "json"))
            else:
                self._take(opened)
        except (UnreadableMessage, ValueError):
            self.unexpected.append(payload)

    def _take(self, opened: OpenedMessage) -> None:
        message = opened.message
        if message.type.uri == PROBLEM_REPORT:
            self._take_report(encoding.loads_object(opened.plaintext))
        elif (answer := self._pending.pop(message.thid or "", None)) is not None:
            answer.callback(message)
        else:
            for delivered in read_delivery(message):
                self.pushed.put(delivered)

    def _take_report(self, value: dict[str, Any]) -> None:
        if value.get("type") != PROBLEM_REPORT:
            raise UnreadableMessage("an unencrypted frame")
        problem = MediatorProblem(None, value)
        answer = self._pending.pop(problem.pthid or "", None)
        if answer is None:
            self.problems.put(problem)
        else:
            answer.errback(problem)

    def connection_lost(self, code: int) -> None:
        """Fail pending requests."""
        self.close_code = code  # callbacks may look at it
        pending, self._pending = self._pending, {}
        for answer in pending.values():
            answer.errback(SocketClosedError(code))
        super().connection_lost(code)


async def connect_didcomm_socket(
    reactor: Any,
    wallet: DIDCommWallet,
    *,
    url: str | None = None,
    endpoint: IStreamClientEndpoint | None = None,
    headers: Mapping[str, str] | None = None,
) -> DIDCommSocket:
    """
    Open a socket to the wallet's mediator.

    :param url: instead of the one in the mediator's DID document.
    :param endpoint: where to connect to, if not as `url` says.
    :param headers: of the request, in addition to those of the handshake.
    :raise SocketClosedError: the mediator refused.
    :raise UnreadableMessage: the mediator's document names no WebSocket.
    """
    url = url or wallet.mediator.ws_uri
    if url is None:
        raise UnreadableMessage("the mediator has no WebSocket")
    return await open_wallet_socket(reactor, url, partial(DIDCommSocket, wallet), endpoint, headers)
