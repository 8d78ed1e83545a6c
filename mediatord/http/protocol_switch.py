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
    """Handles the messages of one socket."""

    def start(self) -> None:
        """Called when the socket is open."""

    async def handle_message(self, frame: bytes, binary: bool) -> None:
        """
        Handle a message; replies go to the session.

        :raise ShutdownInProgress: it was not processed.
        """

    def stop(self) -> None:
        """Called when the socket is closed, or its protocol is DIDComm after all."""


class ProtocolSocketHandler(SocketHandler, Protocol):
    """
    A handler with a known protocol.

    :ivar half: the protocol.
    """

    half: ProtocolName


class DIDCommSocketHandler:
    """
    Handles a DIDComm socket (DIDComm reference 3.2).

    :param answer: sends one frame.
    """

    __slots__ = ("_answer", "_undecryptable", "_receive", "_session")

    half: ProtocolName = "didcomm"

    def __init__(self, receive: ReceiveMessage, session: WebSocketSession, answer: Callable[[bytes], None]) -> None:
        self._receive = receive
        self._session = session
        self._answer = answer
        self._undecryptable = 0

    def start(self) -> None:
        """Do nothing."""

    async def handle_message(self, frame: bytes, binary: bool) -> None:
        """Handle a message, also if the socket was closed meanwhile."""
        reply = await self._receive(frame, MessageOrigin(self._session.client, self._session))
        if reply.fault is not None and is_unreadable(reply.fault):
            self._undecryptable += 1
            if self._undecryptable == 1:
                self._answer(reply.body)
            elif self._undecryptable >= MAX_UNDECRYPTABLE:
                self._session.close(1008, "undecryptable")
        elif reply.body:
            self._answer(reply.body)

    def stop(self) -> None:
        """Do nothing."""


class ProtocolSwitch:
    """Handles a Decentrl socket, or a DIDComm socket if its first message is an envelope."""

    def __init__(self, decentrl: SocketHandler, didcomm: ProtocolSocketHandler) -> None:
        self._decentrl = decentrl
        self._didcomm = didcomm
        self._has_first_frame = False
        self._stopped = False
        self.half: ProtocolName = "decentrl"

    def start(self) -> None:
        """Called when the socket is open."""
        self._decentrl.start()

    async def handle_message(self, frame: bytes, binary: bool) -> None:
        """Handle a message."""
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
        """Stop the Decentrl handler; received envelopes are still processed."""
        if self.half == "decentrl" and not self._stopped:
            self._stopped = True
            self._decentrl.stop()
