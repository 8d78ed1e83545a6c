"""A DIDComm wallet's WebSocket: requests, responses by thread, and pushed messages (reference 3.2 and 6.3)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from autobahn.twisted.websocket import WebSocketClientFactory, WebSocketClientProtocol
from twisted.internet.defer import Deferred, DeferredQueue
from twisted.internet.endpoints import HostnameEndpoint, wrapClientTLS
from twisted.internet.error import ConnectionClosed
from twisted.internet.interfaces import IStreamClientEndpoint
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


class SocketClosedError(ConnectionClosed):
    """
    The socket is closed.

    :param code: as the other side gave it, 1006 when it gave none.
    """

    def __init__(self, code: int) -> None:
        super().__init__(f"closed with {code}")
        self.code = code


class WalletWebSocket(WebSocketClientProtocol):
    """
    A WebSocket of a wallet, whatever its messages are.

    :ivar opened: fires when it is open; fails with :class:`SocketClosedError` if the server refuses.
    :ivar close_code: of the other side; None while the socket is open.
    :ivar unexpected: frames that could not be interpreted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.opened: Deferred[None] = Deferred()
        self.close_code: int | None = None
        self.unexpected: list[bytes] = []
        self._closing: list[Deferred[int]] = []

    def send_frame(self, payload: bytes, *, binary: bool = False) -> None:
        """
        Send one message.

        :raise SocketClosedError: the socket is closed.
        """
        if self.close_code is not None:
            raise SocketClosedError(self.close_code)
        self.sendMessage(payload, binary)

    def close(self, code: int = 1000) -> Deferred[int]:
        """Start the closing handshake; fires as :meth:`closed`."""
        if self.close_code is None:
            self.sendClose(code)
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

    def fail_pending(self, code: int) -> None:
        """Fail what waits for the other side, which has closed the socket."""
        raise NotImplementedError

    def onOpen(self) -> None:
        if not self.opened.called:
            self.opened.callback(None)

    def onMessage(self, payload: bytes, isBinary: bool) -> None:  # noqa: N803  Autobahn's name
        # Mediators send text only (reference 3.2).
        if isBinary:
            self.unexpected.append(payload)
        else:
            self.frame_received(payload)

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:  # noqa: N803  Autobahn's names
        self.close_code = code or 1006
        if not self.opened.called:
            self.opened.errback(SocketClosedError(self.close_code))
        self.fail_pending(self.close_code)
        closing, self._closing = self._closing, []
        for waiter in closing:
            waiter.callback(self.close_code)


WalletSocket = TypeVar("WalletSocket", bound=WalletWebSocket)


async def open_wallet_socket(
    reactor: Any,
    url: str,
    socket: WalletSocket,
    endpoint: IStreamClientEndpoint | None = None,
    headers: Mapping[str, str] | None = None,
) -> WalletSocket:
    """
    Open a WebSocket.

    :param endpoint: where to connect to, if not as `url` says.
    :param headers: of the request, in addition to those of the handshake.
    :raise SocketClosedError: the server refused.
    """

    def abort(value: Any, _: float) -> Any:
        socket.dropConnection(abort=True)
        return value

    factory = WebSocketClientFactory(url, headers=dict(headers or {}), reactor=reactor)
    factory.protocol = lambda: socket  # type: ignore[assignment]
    # Autobahn's own timers would run on the global reactor.
    factory.setProtocolOptions(openHandshakeTimeout=0, closeHandshakeTimeout=0, serverConnectionDropTimeout=0)
    await (endpoint or make_client_endpoint(reactor, url)).connect(factory)
    await socket.opened.addTimeout(SOCKET_TIMEOUT_SECONDS, reactor, abort)
    return socket


def make_client_endpoint(reactor: Any, url: str) -> IStreamClientEndpoint:
    """The endpoint of a `ws:` or `wss:` URL."""
    parts = urlsplit(url)
    host, tls = parts.hostname or "", parts.scheme == "wss"
    endpoint: IStreamClientEndpoint = HostnameEndpoint(reactor, host, parts.port or (443 if tls else 80))
    return wrapClientTLS(optionsForClientTLS(host), endpoint) if tls else endpoint


class DIDCommSocket(MediationRequests, WalletWebSocket):  # type: ignore[misc]  # of Autobahn's bases
    """
    An open socket of a wallet; see :func:`connect_didcomm_socket`.

    :ivar pushed: pushed messages. In raw mode there is no id; it is the SHA-256 of the payload then (reference 6.1).
    :ivar problems: problem reports that belong to no pending request.
    """

    def __init__(self, wallet: DIDCommWallet) -> None:
        MediationRequests.__init__(self, wallet.did, wallet.coordination_version)
        WalletWebSocket.__init__(self)
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
        """Switch live delivery on or off."""
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

    def fail_pending(self, code: int) -> None:
        """Fail pending requests."""
        pending, self._pending = self._pending, {}
        for answer in pending.values():
            answer.errback(SocketClosedError(code))


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
    return await open_wallet_socket(reactor, url, DIDCommSocket(wallet), endpoint, headers)
