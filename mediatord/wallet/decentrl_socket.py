"""A Decentrl wallet's WebSocket: authentication, and what is pushed from then on (DCTRL-0004 section 10)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autobahn.twisted.websocket import WebSocketClientFactory, WebSocketClientProtocol
from twisted.internet.defer import Deferred, DeferredQueue, TimeoutError
from twisted.internet.interfaces import IReactorTime, IStreamClientEndpoint

from mediatord.protocol import encoding
from mediatord.wallet import decentrl_messages
from mediatord.wallet.decentrl_client import CommandRefused, DecentrlClient
from mediatord.wallet.didcomm_socket import (
    SOCKET_TIMEOUT_SECONDS,
    SocketClosedError,
    WalletWebSocket,
    make_client_endpoint,
)

WriteFrame = Callable[[bytes, bool], None]


class DecentrlSocket(WalletWebSocket):
    """
    One open socket; made by :func:`connect`.

    :ivar pushed: frames that came unasked, PING excepted: :func:`~mediatord.wallet.decentrl_messages.read_pushed_events`.
    :ivar answer: fires when the mediator has said whether we are who we say; fails with :class:`Refused` or
        :class:`SocketClosedError`.
    :ivar strays: frames that made no sense.
    """

    def __init__(self, write: WriteFrame, end: Callable[[int], None]) -> None:
        super().__init__(write, end)
        self.pushed: DeferredQueue[dict[str, Any]] = DeferredQueue()
        self.answer: Deferred[None] = Deferred()
        self.strays: list[bytes] = []
        self.pings = 0
        self._refusal: str | None = None

    def send(self, value: dict[str, Any]) -> None:
        """
        Send one frame.

        :raise SocketClosed: the socket is closed.
        """
        self.send_frame(encoding.dumps(value))

    def frame_received(self, payload: bytes) -> None:
        """Sort one frame. Never raises."""
        try:
            frame = encoding.loads_object(payload)
        except ValueError:
            self.strays.append(payload)
            return
        kind = frame.get("type")
        if kind == "PING":
            self.pings += 1
            self.send({"type": "PONG", "timestamp": frame.get("timestamp")})
        elif kind == "AUTH_SUCCESS" and not self.answer.called:
            self.answer.callback(None)
        elif kind == "AUTH_FAILED" and not self.answer.called:
            self._refusal = str(frame.get("code"))  # the close frame that follows has the number
        elif kind in ("PENDING_EVENTS", "CONTRACTS_UPDATED"):
            self.pushed.put(frame)
        else:
            self.strays.append(payload)

    def connection_lost(self, code: int) -> None:
        """The socket is gone."""
        self.close_code = code  # before anybody is told
        if not self.answer.called:
            gone = SocketClosedError(code) if self._refusal is None else CommandRefused(code, self._refusal)
            self.answer.errback(gone)
        super().connection_lost(code)


class _DecentrlSocketProtocol(WebSocketClientProtocol):
    """Translates between Autobahn and a :class:`Socket`."""

    def __init__(self) -> None:
        super().__init__()
        self.socket = DecentrlSocket(self.sendMessage, self.sendClose)
        self.opened: Deferred[None] = Deferred()

    def onOpen(self) -> None:
        self.opened.callback(None)

    def onMessage(self, payload: bytes, isBinary: bool) -> None:  # noqa: N803  Autobahn's name
        if isBinary:
            self.socket.strays.append(payload)
        else:
            self.socket.frame_received(payload)

    def onClose(self, wasClean: bool, code: int | None, reason: str | None) -> None:  # noqa: N803  Autobahn's names
        if not self.opened.called:
            self.socket.answer.addErrback(lambda _: None)  # nobody waits for it
            self.opened.errback(SocketClosedError(code or 1006))
        self.socket.connection_lost(code or 1006)


class _DecentrlSocketFactory(WebSocketClientFactory):
    """Makes one protocol, without any of Autobahn's own timers: those would run on the global reactor."""

    def __init__(self, url: str, reactor: IReactorTime) -> None:
        super().__init__(url, reactor=reactor)
        self.setProtocolOptions(openHandshakeTimeout=0, closeHandshakeTimeout=0, serverConnectionDropTimeout=0)

    def buildProtocol(self, addr: object) -> _DecentrlSocketProtocol:
        protocol = _DecentrlSocketProtocol()
        protocol.factory = self
        return protocol


async def open_decentrl_socket(
    reactor: Any, url: str, *, endpoint: IStreamClientEndpoint | None = None
) -> DecentrlSocket:
    """
    Open a socket on which nothing has been said yet.

    :param reactor: for the connection and its time-outs.
    :param endpoint: how to get there, if not as `url` says.
    :raise SocketClosed: nobody there wants one.
    """
    protocol = await (endpoint or make_client_endpoint(reactor, url)).connect(_DecentrlSocketFactory(url, reactor))
    assert isinstance(protocol, _DecentrlSocketProtocol)
    await protocol.opened.addTimeout(
        SOCKET_TIMEOUT_SECONDS, reactor, lambda value, _: _abort_connection(value, protocol)
    )
    return protocol.socket


async def connect_decentrl_socket(
    reactor: Any, client: DecentrlClient, *, endpoint: IStreamClientEndpoint | None = None
) -> DecentrlSocket:
    """
    Open a socket to the client's mediator and authenticate.

    :raise Refused: the mediator does not believe us.
    :raise SocketClosed: it does not want us.
    """
    socket = await open_decentrl_socket(reactor, client.mediator.ws_url, endpoint=endpoint)
    socket.send(decentrl_messages.compose_authentication(client.identity, int(client.clock.seconds() * 1000)))
    try:
        await socket.answer.addTimeout(SOCKET_TIMEOUT_SECONDS, reactor)
    except TimeoutError:
        socket.close()
        raise
    return socket


def _abort_connection(value: Any, protocol: _DecentrlSocketProtocol) -> Any:
    protocol.dropConnection(abort=True)
    return value
