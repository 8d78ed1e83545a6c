"""In-memory mediator with its HTTP site; tests play the TCP peer, byte by byte."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from twisted.internet.address import IPv4Address
from twisted.internet.error import ConnectionAborted, ConnectionDone, ConnectionLost
from twisted.internet.protocol import Protocol
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.public_site import build_site
from mediatord.observability.pseudonyms import Pseudonymizer, load_pseudonym_key
from mediatord.protocol import encoding
from tests.http.fake_protocols import FakeDecentrl
from tests.in_memory_mediator import PEER, InMemoryMediator

ENCRYPTED = b"application/didcomm-encrypted+json"

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10

# What a TCP transport of Twisted reads at once, and buffers before it pauses its producer.
_READ = 65_536
_FULL = 65_536


class InMemoryTransport(StringTransport):
    """
    The server's side of a TCP connection.

    :ivar peer_stalled: whether the peer has stopped reading.
    :ivar half_closed: whether the server has closed its side.
    """

    protocol: Protocol

    def __init__(self, clock: Clock, peer: str) -> None:
        super().__init__(peerAddress=IPv4Address("TCP", peer, 50_000), lenient=True)
        self.peer_stalled = False
        self.half_closed = False
        self.lost = False
        self._clock = clock
        self._inbound: deque[bytes] = deque()
        self._delivering = False
        self._unsent = 0
        self._full = False

    @property
    def unsent(self) -> int:
        """Bytes that the peer has not read."""
        return self._unsent

    @property
    def unread(self) -> int:
        """Bytes from the peer that the server has not read, because reading is paused."""
        return sum(map(len, self._inbound))

    def feed(self, data: bytes) -> None:
        """Deliver bytes from the peer and end the reactor iteration."""
        self._inbound.extend(data[start : start + _READ] for start in range(0, len(data), _READ))
        self._deliver()
        self._clock.advance(0)

    def disconnect(self, *, cleanly: bool = True) -> None:
        """Close the connection from the peer's side."""
        self._lose(ConnectionDone() if cleanly else ConnectionLost())

    def resume_peer(self) -> None:
        """Let the peer read everything that waits."""
        self.peer_stalled = False
        self._drain()

    def take_output(self) -> bytes:
        """Return what was written since the last call."""
        value: bytes = self.value()
        self.clear()
        return value

    def write(self, data: bytes) -> None:
        if self.half_closed or self.lost:
            return
        super().write(data)
        self._unsent += len(data)
        if self._unsent <= _FULL:
            self._unsent *= self.peer_stalled
        elif self.producer is not None:
            self._full = True
            self.producer.pauseProducing()
            if not self.peer_stalled:
                self._clock.callLater(0, self._drain)

    def writeSequence(self, data: Any) -> None:  # noqa: N802  the transport's name
        self.write(b"".join(data))

    def resumeProducing(self) -> None:
        super().resumeProducing()
        self._clock.callLater(0, self._deliver)

    def loseConnection(self) -> None:
        super().loseConnection()
        if not self.peer_stalled:
            self._clock.callLater(0, self._lose, ConnectionDone())

    def loseWriteConnection(self) -> None:  # noqa: N802  the transport's name
        """Close the server's side once everything has been written."""
        self._clock.callLater(0, setattr, self, "half_closed", True)

    def abortConnection(self) -> None:  # noqa: N802  the transport's name
        super().loseConnection()
        self._clock.callLater(0, self._lose, ConnectionAborted())

    def _deliver(self) -> None:
        if self._delivering:
            return
        self._delivering = True
        while self._inbound and self.producerState == "producing" and not (self.lost or self.disconnecting):
            self.protocol.dataReceived(self._inbound.popleft())
        self._delivering = False

    def _drain(self) -> None:
        self._unsent = 0
        if self._full and self.producer is not None:
            self._full = False
            self.producer.resumeProducing()
        elif self.disconnecting:
            self._lose(ConnectionDone())

    def _lose(self, reason: Exception) -> None:
        if not self.lost:
            self.lost = True
            if self.producer is not None:
                self.producer.stopProducing()
            self.protocol.connectionLost(Failure(reason))


@dataclass(frozen=True, slots=True)
class HTTPResponse:
    """
    An HTTP response.

    :param headers: by lower-case name; the last one of several with the same name.
    """

    status: int
    headers: dict[str, str]
    body: bytes = field(repr=False)

    @property
    def json(self) -> dict[str, Any]:
        """The body as a JSON object."""
        return encoding.loads_object(self.body)


def parse_responses(raw: bytes, *, head: bool = False) -> list[HTTPResponse]:
    """
    Parse `raw`, which must consist of whole responses.

    :param head: the responses answer HEAD requests and have no bodies.
    """
    responses = []
    while raw:
        top, separator, raw = raw.partition(b"\r\n\r\n")
        assert separator, f"no end of headers: {top!r}"
        first, *lines = top.decode("latin-1").split("\r\n")
        assert first.startswith("HTTP/1.1 "), first
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = 0 if head else int(headers.get("content-length", "0"))
        assert len(raw) >= length, "the body is not complete"
        responses.append(HTTPResponse(int(first.split()[1]), headers, raw[:length]))
        raw = raw[length:]
    return responses


def encode_request(method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
    """Encode an HTTP request, with a Content-Length if there is a body."""
    lines = {"Host": "mediator.example", **(headers or {})}
    if body is not None:
        lines["Content-Length"] = str(len(body))
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return head.encode("latin-1") + b"\r\n" + (body or b"")


class InMemoryWebSocketClient:
    """WebSocket client that encodes and decodes frames itself, without Autobahn."""

    def __init__(self, site_fixture: InMemorySite, transport: InMemoryTransport, opened: bytes) -> None:
        self.transport = transport
        self._site_fixture = site_fixture
        self._received = opened

    def send(self, payload: bytes, opcode: int = TEXT, *, final: bool = True) -> None:
        """Send one frame."""
        self.transport.feed(encode_masked_frame(payload, opcode, final=final))

    def frames(self) -> list[tuple[int, bytes]]:
        """Return opcodes and payloads received since the last call; all must be final, unmasked and uncompressed."""
        self._site_fixture.run_due_calls()
        self._received += self.transport.take_output()
        decoded = []
        while self._received:
            first, length = self._received[0], self._received[1]
            assert first & 0x70 == 0, "a reserved bit is set"
            assert first & 0x80, "a fragment"
            assert length < 128, "masked by the server"
            start = {126: 4, 127: 10}.get(length, 2)
            if start > 2:
                length = int.from_bytes(self._received[2:start], "big")
            decoded.append((first & 0x0F, self._received[start : start + length]))
            self._received = self._received[start + length :]
        return decoded

    def texts(self) -> list[bytes]:
        """Return the text frames received since the last call; there must be no others."""
        frames = self.frames()
        assert {opcode for opcode, _ in frames} <= {TEXT}, frames
        return [payload for _, payload in frames]

    def close_code(self) -> int | None:
        """Return the code of the close frame, if that was the last frame."""
        frames = self.frames()
        if not frames or frames[-1][0] != CLOSE:
            return None
        return int.from_bytes(frames[-1][1][:2], "big")


def encode_masked_frame(payload: bytes, opcode: int = TEXT, *, final: bool = True) -> bytes:
    """Encode a masked frame, as clients send it (RFC 6455 section 5.2)."""
    mask = b"\x11\x22\x33\x44"
    length = len(payload)
    if length < 126:
        size = bytes([0x80 | length])
    elif length < 65_536:
        size = b"\xfe" + length.to_bytes(2, "big")
    else:
        size = b"\xff" + length.to_bytes(8, "big")
    stretched = (mask * (length // 4 + 1))[:length]
    masked = (int.from_bytes(payload, "big") ^ int.from_bytes(stretched, "big")).to_bytes(length, "big")
    return bytes([0x80 * final | opcode]) + size + mask + masked


class InMemorySite(InMemoryMediator):
    """
    In-memory mediator with its HTTP site.

    :param fake_decentrl: replaces the Decentrl protocol.
    """

    def __init__(
        self, test: SynchronousTestCase, *, fake_decentrl: FakeDecentrl | None = None, **settings: Any
    ) -> None:
        super().__init__(test, **settings)
        protocol: Any = fake_decentrl or self.decentrl
        self.site = build_site(self.base, self.didcomm, protocol, self.config)
        # The work of one quantum, and so the order of events, must not depend on the load of the machine.
        self.site.scheduler._steady = self.clock.seconds

    def connect(self, peer: str = PEER) -> InMemoryTransport:
        """Open a TCP connection."""
        transport = InMemoryTransport(self.clock, peer)
        protocol = self.site.buildProtocol(transport.getPeer())
        transport.protocol = protocol
        protocol.makeConnection(transport)
        return transport

    def pseudonym(self, did: str) -> str:
        """Return the pseudonym of a DID in log and metrics."""
        return Pseudonymizer(
            self.config.log.dids, load_pseudonym_key(self.config.identity.keys.with_name("log.key"))
        ).did(did)

    def run_due_calls(self) -> None:
        """Run all calls that are due now."""
        while any(call.getTime() <= self.clock.seconds() for call in self.clock.getDelayedCalls()):
            self.clock.advance(0)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
        peer: str = PEER,
    ) -> HTTPResponse:
        """Send one request on its own connection and return the response."""
        transport = self.connect(peer)
        transport.feed(encode_request(method, path, body, headers))
        self.run_due_calls()
        (response,) = parse_responses(transport.take_output(), head=method == "HEAD")
        transport.disconnect()
        return response

    def post(self, body: bytes, path: str = "/didcomm", **headers: str) -> HTTPResponse:
        """Post an envelope and return the response."""
        return self.request("POST", path, body, {"Content-Type": ENCRYPTED.decode(), **headers})

    def upgrade(
        self, path: str = "/didcomm", peer: str = PEER, **headers: str
    ) -> tuple[InMemoryTransport, HTTPResponse, bytes]:
        """Request a WebSocket; return the transport, the response and the bytes after it."""
        transport = self.connect(peer)
        upgrade_headers = {
            "Connection": "keep-alive, Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            **headers,
        }
        transport.feed(encode_request("GET", path, None, upgrade_headers))
        self.run_due_calls()
        top, _, rest = transport.take_output().partition(b"\r\n\r\n")
        length = int(parse_responses(top + b"\r\n\r\n", head=True)[0].headers.get("content-length", "0"))
        (response,) = parse_responses(top + b"\r\n\r\n" + rest[:length])
        return transport, response, rest[length:]

    def websocket_client(self, path: str = "/didcomm", peer: str = PEER, **headers: str) -> InMemoryWebSocketClient:
        """Open a WebSocket."""
        transport, response, rest = self.upgrade(path, peer, **headers)
        self.test.assertEqual(response.status, 101)
        return InMemoryWebSocketClient(self, transport, rest)
