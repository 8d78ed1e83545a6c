"""Protocol halves that only note what the web layer hands to them, and answer as a test wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from twisted.internet.defer import Deferred, succeed

from mediatord.decentrl.context import DecentrlReply
from mediatord.delivery.connections import WebSocketSession
from mediatord.didcomm.messages import DIDCommReply, MessageOrigin


class FakeDIDComm:
    """A DIDComm half that answers with the length of the body."""

    def __init__(self) -> None:
        self.received: list[tuple[bytes, MessageOrigin]] = []
        self.answer: Callable[[bytes], Any] = lambda body: succeed(
            DIDCommReply(200, b"%d" % len(body), "text/x-test")
        )
        self.dispatcher = self
        self.forward_fast_path = self

    def take(
        self, raw: bytes, peer: str, answer: Callable[[DIDCommReply], None], fallback: Callable[[], None]
    ) -> bool:
        """Nothing takes the fast path."""
        return False

    async def receive(self, raw: bytes, origin: MessageOrigin) -> DIDCommReply:
        """Note and answer."""
        self.received.append((raw, origin))
        reply: DIDCommReply = await self.answer(raw)
        return reply


class FakeDecentrl:
    """
    A Decentrl half that answers commands with the length of the body, and queries with an empty object.

    :ivar opened: told of every socket.
    """

    def __init__(self) -> None:
        self.received: list[tuple[bytes, str]] = []
        self.queried: list[tuple[str, Mapping[bytes, Sequence[bytes]], str]] = []
        self.talks: list[FakeDecentrlSocketProtocol] = []
        self.opened: Callable[[FakeDecentrlSocketProtocol], None] = lambda talk: None
        self.answer: Callable[[bytes], Any] = lambda body: succeed(DecentrlReply(200, b'{"n":%d}' % len(body)))
        self.page: Callable[[str], Any] = lambda did: succeed(DecentrlReply(200, b"{}"))
        self.dispatcher = self

    async def receive(self, raw: bytes, peer: str) -> DecentrlReply:
        """Note and answer."""
        self.received.append((raw, peer))
        reply: DecentrlReply = await self.answer(raw)
        return reply

    async def public(self, did: str, arguments: Mapping[bytes, Sequence[bytes]], peer: str) -> DecentrlReply:
        """Note and answer."""
        self.queried.append((did, arguments, peer))
        reply: DecentrlReply = await self.page(did)
        return reply

    def open_socket(self, session: WebSocketSession) -> FakeDecentrlSocketProtocol:
        """Begin a conversation."""
        self.talks.append(FakeDecentrlSocketProtocol(session, lambda talk: self.opened(talk)))
        return self.talks[-1]


class FakeDecentrlSocketProtocol:
    """
    A conversation that notes what it is told.

    :ivar told: what happened, in order; messages as payload and whether they were binary.
    :ivar answer: fires when a message has been served.
    """

    def __init__(self, session: WebSocketSession, opened: Callable[[FakeDecentrlSocketProtocol], None]) -> None:
        self._opened = opened
        self.session = session
        self.told: list[Any] = []
        self.answer: Callable[[bytes], Deferred[None]] = lambda frame: succeed(None)

    def start(self) -> None:
        """Note."""
        self.told.append("begin")
        self._opened(self)

    async def handle_message(self, frame: bytes, binary: bool) -> None:
        """Note, and be done when the test says so."""
        self.told.append((frame, binary))
        await self.answer(frame)

    def stop(self) -> None:
        """Note."""
        self.told.append("end")
