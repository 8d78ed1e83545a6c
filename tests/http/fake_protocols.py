"""Fake protocols that record what the web layer passes to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twisted.internet.defer import Deferred, succeed

from mediatord.delivery.connections import WebSocketSession
from mediatord.didcomm.messages import MessageOrigin, UnpackedMessage
from mediatord.ratelimit.admission import RequestReply


class FakeDIDComm:
    """DIDComm protocol that replies with the length of the body."""

    def __init__(self) -> None:
        self.received: list[tuple[bytes, MessageOrigin]] = []
        self.answer: Callable[[bytes], Any] = lambda body: succeed(
            RequestReply(200, b"%d" % len(body), "text/x-test")
        )
        self.dispatcher = self
        self.forward_fast_path = self.acknowledgement_fast_path = self

    def take(
        self, raw: bytes, origin: object, answer: Callable[[RequestReply], None], fallback: Callable[..., None]
    ) -> bool:
        """Decline the fast path."""
        return False

    async def receive(self, raw: bytes, origin: MessageOrigin, opened: UnpackedMessage | None = None) -> RequestReply:
        """Record the message and reply."""
        self.received.append((raw, origin))
        reply: RequestReply = await self.answer(raw)
        return reply


class FakeDecentrl:
    """
    Decentrl protocol that replies to commands with the length of the body, and to queries with an empty object.

    :ivar opened: called with every new socket protocol.
    """

    def __init__(self) -> None:
        self.received: list[tuple[bytes, str]] = []
        self.queried: list[tuple[str, Mapping[bytes, Sequence[bytes]], str]] = []
        self.sockets: list[FakeDecentrlSocketProtocol] = []
        self.opened: Callable[[FakeDecentrlSocketProtocol], None] = lambda socket: None
        self.answer: Callable[[bytes], Any] = lambda body: succeed(RequestReply(200, b'{"n":%d}' % len(body)))
        self.page: Callable[[str], Any] = lambda did: succeed(RequestReply(200, b"{}"))
        self.dispatcher = self

    async def receive(self, raw: bytes, peer: str) -> RequestReply:
        """Record the command and reply."""
        self.received.append((raw, peer))
        reply: RequestReply = await self.answer(raw)
        return reply

    async def public(self, did: str, arguments: Mapping[bytes, Sequence[bytes]], peer: str) -> RequestReply:
        """Record the query and reply."""
        self.queried.append((did, arguments, peer))
        reply: RequestReply = await self.page(did)
        return reply

    def open_socket(self, session: WebSocketSession) -> FakeDecentrlSocketProtocol:
        """Open a socket."""
        self.sockets.append(FakeDecentrlSocketProtocol(session, lambda socket: self.opened(socket)))
        return self.sockets[-1]


class FakeDecentrlSocketProtocol:
    """
    Socket protocol that records its calls.

    :ivar calls: calls in order; messages as payload and whether they were binary.
    :ivar answer: fires when a message has been served.
    """

    def __init__(self, session: WebSocketSession, opened: Callable[[FakeDecentrlSocketProtocol], None]) -> None:
        self._opened = opened
        self.session = session
        self.calls: list[Any] = []
        self.answer: Callable[[bytes], Deferred[None]] = lambda frame: succeed(None)

    def start(self) -> None:
        """Record the call."""
        self.calls.append("begin")
        self._opened(self)

    async def handle_message(self, frame: bytes, binary: bool) -> None:
        """Record the message; served when `answer` fires."""
        self.calls.append((frame, binary))
        await self.answer(frame)

    def stop(self) -> None:
        """Record the call."""
        self.calls.append("end")
