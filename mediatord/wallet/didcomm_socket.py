"""A wallet's WebSocket to its mediator: requests, answers by thread, and pushed messages (reference 3.2 and 6.3)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any
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
from mediatord.wallet.didcomm_client import DIDCommWallet
from mediatord.wallet.didcomm_mediation import (
    PICKUP,
    PROBLEM_REPORT,
    DeliveredMessage,
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


class WalletWebSocket:
    """
    An open socket of which frames and the end are all that is known.

    :param write: sends one message, as binary or not.
    :param end: begins to close, with a code.
    :ivar close_code: as the other side gave it; None while it is open.
    """

    def __init__(self, write: Callable[[bytes, bool], None], end: Callable[[int], None]) -> None:
        self.close_code: int | None = None
        self._write = write
        self._end = end
        self._closing: list[Deferred[int]] = []

    def send_frame(self, payload: bytes, *, binary: bool = False) -> None:
        """
        Send one message as it is.

        :raise SocketClosed: the socket is.
        """
        if self.close_code is not None:
            raise SocketClosedError(self.close_code)
        self._write(payload, binary)

    def close(self, code: int = 1000) -> Deferred[int]:
        """Close in an orderly way; fires as :meth:`closed`."""
        if self.close_code is None:
            self._end(code)
        return self.closed()

    def closed(self) -> Deferred[int]:
        """Fires with the close code once the socket is closed, whoever closed it."""
        waiter: Deferred[int] = Deferred()
        if self.close_code is not None:
            waiter.callback(self.close_code)
        else:
            self._closing.append(waiter)
        return waiter

    def connection_lost(self, code: int) -> None:
        """The socket is gone."""
        self.close_code = code
        closing, self._closing = self._closing, []
        for waiter in closing:
            waiter.callback(code)


class DIDCommSocket(MediationRequests, WalletWebSocket):
    """
    One open socket of a wallet; made by :func:`connect`.

    :ivar pushed: messages that came unasked, one :class:`~mediatord.wallet.didcomm_mediation.DeliveredMessage` each. In raw mode
        there is no id, so that it is the SHA-256 of the payload (reference 6.1).
    :ivar problems: reports that belong to no waiting request.
    :ivar strays: frames that made no sense.
    """

    def __init__(
        self, wallet: DIDCommWallet, write: Callable[[bytes, bool], None], end: Callable[[int], None]
    ) -> None:
        MediationRequests.__init__(self, self.request, wallet.did, wallet.version)
        WalletWebSocket.__init__(self, write, end)
        self.wallet = wallet
        self.pushed: DeferredQueue[DeliveredMessage] = DeferredQueue()
        self.problems: DeferredQueue[MediatorProblem] = DeferredQueue()
        self.strays: list[bytes] = []
        self._waiting: dict[str, Deferred[Message]] = {}

    async def request(self, type_: str, body: Mapping[str, Any] | None = None, /, **headers: Any) -> Message:
        """
        Ask the mediator anything; the answer in the same thread, after all checks.

        :raise Problem: a problem report about this thread.
        :raise SocketClosed: before there was an answer.
        """
        message, envelope = self.wallet.pack(type_, body, **headers)
        thread = str(message.get("thid", message["id"]))
        answer: Deferred[Message] = Deferred()
        self._waiting[thread] = answer
        try:
            self.send_frame(envelope)
            return await answer.addTimeout(SOCKET_TIMEOUT_SECONDS, self.wallet.clock)
        finally:
            self._waiting.pop(thread, None)

    async def live(self, on: bool = True) -> QueueStatus:
        """Switch live delivery on this socket."""
        return read_status(await self.request(f"{PICKUP}/live-delivery-change", {"live_delivery": on}))

    def frame_received(self, payload: bytes) -> None:
        """Sort one frame: an answer, a push, a problem or a stray. Never raises."""
        try:
            if "ciphertext" not in encoding.loads_object(payload):
                self._take_report(open_problem_report(payload, self.wallet.book.resolve))
                return
            opened = self.wallet.open(payload)
            if canonicalize_did(opened.sender or "") != canonicalize_did(self.wallet.mediator.did):
                self.pushed.put(DeliveredMessage(hashlib.sha256(payload).hexdigest(), payload, "json"))
            else:
                self._take(opened)
        except (UnreadableMessage, ValueError):
            self.strays.append(payload)

    def _take(self, opened: OpenedMessage) -> None:
        message = opened.message
        if message.type.uri == PROBLEM_REPORT:
            self._take_report(encoding.loads_object(opened.plaintext))
        elif (answer := self._waiting.pop(message.thid or "", None)) is not None:
            answer.callback(message)
        else:
            for delivered in read_delivery(message):
                self.pushed.put(delivered)

    def _take_report(self, value: dict[str, Any]) -> None:
        if value.get("type") != PROBLEM_REPORT:
            raise UnreadableMessage("a frame in the clear")
        problem = MediatorProblem(None, value)
        answer = self._waiting.pop(problem.pthid or "", None)
        if answer is None:
            self.problems.put(problem)
        else:
            answer.errback(problem)

    def connection_lost(self, code: int) -> None:
        """The socket is gone: requests that wait fail."""
        self.close_code = code  # before anybody is told
        waiting, self._waiting = self._waiting, {}
        for answer in waiting.values():
            answer.errback(SocketClosedError(code))
        super().connection_lost(code)


class _DIDCommSocketProtocol(WebSocketClientProtocol):
    """Translates between Autobahn and a :class:`DIDCommSocket`."""

    def __init__(self, wallet: DIDCommWallet) -> None:
        super().__init__()
        self.socket = DIDCommSocket(wallet, self.sendMessage, self.sendClose)
        self.opened: Deferred[DIDCommSocket] = Deferred()

    def onOpen(self) -> None:
        self._answer_connect(self.socket)

    def onMessage(self, payload: bytes, isBinary: bool) -> None:  # noqa: N803  Autobahn's name
        # Mediators send text only (reference 3.2).
        if isBinary:
            self.socket.strays.append(payload)
        else:
            self.socket.frame_received(payload)

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:  # noqa: N803  Autobahn's names
        self._answer_connect(SocketClosedError(code or 1006))
        self.socket.connection_lost(code or 1006)

    def _answer_connect(self, outcome: DIDCommSocket | SocketClosedError) -> None:
        if self.opened.called:
            return
        if isinstance(outcome, SocketClosedError):
            self.opened.errback(outcome)
        else:
            self.opened.callback(outcome)


class _DIDCommSocketFactory(WebSocketClientFactory):
    """Makes one protocol, without any of Autobahn's own timers: those would run on the global reactor."""

    def __init__(
        self, url: str, reactor: IReactorTime, wallet: DIDCommWallet, headers: Mapping[str, str] | None
    ) -> None:
        super().__init__(url, headers=dict(headers or {}), reactor=reactor)
        self.setProtocolOptions(openHandshakeTimeout=0, closeHandshakeTimeout=0, serverConnectionDropTimeout=0)
        self._wallet = wallet

    def buildProtocol(self, addr: object) -> _DIDCommSocketProtocol:
        protocol = _DIDCommSocketProtocol(self._wallet)
        protocol.factory = self
        return protocol


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

    :param reactor: for the connection and its time-outs.
    :param url: instead of the one in the mediator's DID document.
    :param endpoint: how to get there, if not as `url` says.
    :param headers: of the request, besides those of every handshake.
    :raise SocketClosed: the mediator does not want us.
    :raise Unreadable: the mediator's document names no WebSocket.
    """
    url = url or wallet.mediator.ws_uri
    if url is None:
        raise UnreadableMessage("the mediator has no WebSocket")
    factory = _DIDCommSocketFactory(url, reactor, wallet, headers)
    protocol = await (endpoint or make_client_endpoint(reactor, url)).connect(factory)
    assert isinstance(protocol, _DIDCommSocketProtocol)
    return await protocol.opened.addTimeout(
        SOCKET_TIMEOUT_SECONDS, reactor, lambda value, _: _abort_connection(value, protocol)
    )


def _abort_connection(value: Any, protocol: _DIDCommSocketProtocol) -> Any:
    protocol.dropConnection(abort=True)
    return value


def make_client_endpoint(reactor: Any, url: str) -> IStreamClientEndpoint:
    """Where the host of a ws: or wss: URL is connected to."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme == "wss":
        tls: IStreamClientEndpoint = wrapClientTLS(
            optionsForClientTLS(host), HostnameEndpoint(reactor, host, parts.port or 443)
        )
        return tls
    plain: IStreamClientEndpoint = HostnameEndpoint(reactor, host, parts.port or 80)
    return plain
