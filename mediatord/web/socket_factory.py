"""Makes the sockets of upgraded requests, and keeps what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import txaio
from autobahn.twisted.websocket import WebSocketServerFactory
from twisted.internet.interfaces import IDelayedCall

from mediatord.web.pulse import Pulse
from mediatord.web.resting import at_rest
from mediatord.web.websocket import MAX_OUTBOX, MediatorSocket, Silence, Sockets


class _Timers:
    """
    Takes the place of Autobahn's batched timer, which puts calls for the same moment on one timer of the reactor.

    When the clock is set, a timer keeps the time that it has left and is at another moment from then on: what is
    asked for then would find one that fires much earlier or later.
    """

    def __init__(self, reactor: Any) -> None:
        self._reactor = reactor

    def call_later(self, delay: float, call: Callable[..., None], *args: Any, **options: Any) -> IDelayedCall:
        """Have something called after so many seconds."""
        timer: IDelayedCall = self._reactor.callLater(delay, call, *args, **options)
        return timer


class SocketFactory(WebSocketServerFactory):
    """
    Makes sockets for upgraded requests.

    :param max_message: bytes of a message, and of a frame.
    """

    log: Any = Silence()

    def __init__(self, reactor: Any, sockets: Sockets, max_message: int, *, ping_interval: float = 30.0) -> None:
        super().__init__(url=None, server="mediatord", reactor=reactor)
        # Autobahn's timers run on this.
        txaio.config.loop = reactor  # type: ignore[attr-defined]  # made at run time
        # There is no public way: txaio's own takes the moments from the reactor.
        self._batched_timer = _Timers(reactor)
        self.setProtocolOptions(
            # Fail with a close code, not by cutting the line.
            failByDrop=False,
            openHandshakeTimeout=10,
            closeHandshakeTimeout=2,
            # One timer for each socket would be more than all else it takes; see the pulse.
            autoPingInterval=0,
            tcpNoDelay=True,
            # JSON is checked to be UTF-8 when it is parsed.
            utf8validateIncoming=False,
        )
        own = {"__slots__": (), "_sockets": sockets, "_pulse": Pulse(reactor, ping_interval)}
        self._make: type[MediatorSocket] = type("Socket", (MediatorSocket,), {**at_rest(self), **own})
        self.limit(max_message)

    def limit(self, max_message: int, max_outbox: int = MAX_OUTBOX) -> None:
        """
        Take messages and frames of so many bytes from now on, also on sockets that are open, and keep so many bytes
        of pushes for each.
        """
        self._make._max_outbox = max_outbox
        for socket in self._open():
            socket.limit_outbox(max_outbox)
        self.setProtocolOptions(maxFramePayloadSize=max_message, maxMessagePayloadSize=max_message)
        # What Autobahn asks for is of the class.
        self._make.maxFramePayloadSize = self._make.maxMessagePayloadSize = max_message

    def unsent(self) -> tuple[int, int]:
        """Of all open sockets together; see :attr:`MediatorSocket.unsent`."""
        return _total(socket.unsent for socket in self._open())

    def unserved(self) -> tuple[int, int]:
        """Likewise; see :attr:`MediatorSocket.unserved`."""
        return _total(socket.unserved for socket in self._open())

    def _open(self) -> Iterator[MediatorSocket]:
        return cast(Iterator[MediatorSocket], iter(self._make._pulse))

    def buildProtocol(self, addr: object) -> MediatorSocket:
        """One socket."""
        return self._make()


def _total(held: Iterable[tuple[int, int]]) -> tuple[int, int]:
    entries = size = 0
    for more, bytes_ in held:
        entries, size = entries + more, size + bytes_
    return entries, size
