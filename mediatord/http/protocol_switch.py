"""Choice of a socket's protocol by its first message: DIDComm or Decentrl (contract section 3)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from mediatord.delivery.connections import WebSocketSession
from mediatord.didcomm.messages import DIDCommReply, MessageOrigin, is_unreadable
from mediatord.observability.event_recorder import ProtocolName
from mediatord.protocol.decentrl.commands import is_didcomm_envelope

ReceiveMessage = Callable[[bytes, MessageOrigin], Awaitable[DIDCommReply]]

MAX_UNDECRYPTABLE = 3


class SocketHandler(Protocol):
    """Our side of one Decentrl socket (DCTRL-0004 section 10)."""

    def start(self) -> None:
        """The socket is open."""

    async def handle_message(self, frame: bytes, binary: bool) -> None:
        """
        One message; what there is to say goes to the session.

        :raise ShutdownInProgress: it was not served.
        """

    def stop(self) -> None:
        """The socket is gone, or is served as DIDComm after all; nothing more will be heard."""


class ProtocolSocketHandler(SocketHandler, Protocol):
    """
    What one socket speaks.

    :ivar half: the protocol.
    """

    half: ProtocolName


class DIDCommSocketHandler:
    """
    A socket that speaks DIDComm (DIDComm reference 3.2).

    :param answer: sends one frame, sooner or later.
    """

    __slots__ = ("_answer", "_undecryptable", "_receive", "_session")

    # Of the class: it is the same for all.
    half: ProtocolName = "didcomm"

    def __init__(self, receive: ReceiveMessage, session: WebSocketSession, answer: Callable[[bytes], None]) -> None:
        self._receive = receive
        self._session = session
        self._answer = answer
        self._undecryptable = 0

    def start(self) -> None:
        """Nothing is said before the first message."""

    async def handle_message(self, frame: bytes, binary: bool) -> None:
        """One message, text or binary; served also when the socket has gone meanwhile."""
        reply = await self._receive(frame, MessageOrigin(self._session.client, self._session))
        if is_unreadable(reply):
            self._undecryptable += 1
            if self._undecryptable == 1:
                self._answer(reply.body)
            elif self._undecryptable >= MAX_UNDECRYPTABLE:
                self._session.close(1008, "undecryptable")
        elif reply.body:
            self._answer(reply.body)

    def stop(self) -> None:
        """Nothing ends with the socket."""


class ProtocolSwitch:
    """A socket that speaks Decentrl, unless what it says first is an envelope."""

    def __init__(self, decentrl: SocketHandler, didcomm: ProtocolSocketHandler) -> None:
        self._decentrl = decentrl
        self._didcomm = didcomm
        self._has_first_frame = False
        self._stopped = False
        self.half: ProtocolName = "decentrl"

    def start(self) -> None:
        """The socket is open."""
        self._decentrl.start()

    async def handle_message(self, frame: bytes, binary: bool) -> None:
        """One message."""
        if not self._has_first_frame:
            self._has_first_frame = True
            if is_didcomm_envelope(frame):
                self.half = "didcomm"
                self._decentrl.stop()
        if self.half == "didcomm":
            await self._didcomm.handle_message(frame, binary)
        elif not self._stopped:
            await self._decentrl.handle_message(frame, binary)

    def stop(self) -> None:
        """The socket is gone: nobody is there to authenticate, while what came in envelopes still counts."""
        if self.half == "decentrl" and not self._stopped:
            self._stopped = True
            self._decentrl.stop()
