"""A Decentrl wallet's WebSocket: authentication and pushed events (DCTRL-0004 section 10)."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred, DeferredQueue, TimeoutError
from twisted.internet.interfaces import IStreamClientEndpoint

from mediatord.protocol import encoding
from mediatord.wallet.decentrl_client import CommandRefused, DecentrlWallet
from mediatord.wallet.decentrl_messages import compose_authentication
from mediatord.wallet.didcomm_socket import (
    SOCKET_TIMEOUT_SECONDS,
    SocketClosedError,
    StartClosing,
    WalletWebSocket,
    WriteMessage,
    open_wallet_socket,
)


class DecentrlSocket(WalletWebSocket):
    """
    An open socket; see :func:`connect_decentrl_socket`.

    :ivar pushed: pushed frames, for :func:`~mediatord.wallet.decentrl_messages.read_pushed_events`.
    :ivar authenticated: fires when authentication has succeeded; fails with :class:`CommandRefused` or
        :class:`SocketClosedError`.
    :ivar pings: number of answered pings.
    """

    def __init__(self, write: WriteMessage, end: StartClosing) -> None:
        super().__init__(write, end)
        self.pushed: DeferredQueue[dict[str, Any]] = DeferredQueue()
        self.authenticated: Deferred[None] = Deferred()
        self.pings = 0
        self._error_code: str | None = None

    def send(self, value: dict[str, Any]) -> None:
        """
        Send a frame.

        :raise SocketClosedError: the socket is closed.
        """
        self.send_frame(encoding.dumps(value))

    def frame_received(self, payload: bytes) -> None:
        """Dispatch a frame. Never raises."""
        try:
            frame = encoding.loads_object(payload)
        except ValueError:
            self.unexpected.append(payload)
            return
        kind = frame.get("type")
        if kind == "PING":
            self.pings += 1
            self.send({"type": "PONG", "timestamp": frame.get("timestamp")})
        elif kind == "AUTH_SUCCESS" and not self.authenticated.called:
            self.authenticated.callback(None)
        elif kind == "AUTH_FAILED" and not self.authenticated.called:
            self._error_code = str(frame.get("code"))  # the close frame that follows has the status
        elif kind in ("PENDING_EVENTS", "CONTRACTS_UPDATED"):
            self.pushed.put(frame)
        else:
            self.unexpected.append(payload)

    def connection_lost(self, code: int) -> None:
        """Fail authentication if it is pending."""
        self.close_code = code  # callbacks may look at it
        if not self.authenticated.called:
            refused = None if self._error_code is None else CommandRefused(code, self._error_code)
            self.authenticated.errback(refused or SocketClosedError(code))
        super().connection_lost(code)


async def open_decentrl_socket(
    reactor: Any, url: str, *, endpoint: IStreamClientEndpoint | None = None
) -> DecentrlSocket:
    """
    Open a socket without authentication.

    :param endpoint: where to connect to, if not as `url` says.
    :raise SocketClosedError: the mediator refused.
    """
    return await open_wallet_socket(reactor, url, DecentrlSocket, endpoint)


async def connect_decentrl_socket(
    reactor: Any, wallet: DecentrlWallet, *, endpoint: IStreamClientEndpoint | None = None
) -> DecentrlSocket:
    """
    Open a socket to the wallet's mediator and authenticate.

    :raise CommandRefused: authentication failed.
    :raise SocketClosedError: the mediator refused the socket.
    """
    socket = await open_decentrl_socket(reactor, wallet.mediator.ws_url, endpoint=endpoint)
    socket.send(compose_authentication(wallet.identity, int(wallet.clock.seconds() * 1000)))
    try:
        await socket.authenticated.addTimeout(SOCKET_TIMEOUT_SECONDS, reactor)
    except TimeoutError:
        socket.close()
        raise
    return socket
