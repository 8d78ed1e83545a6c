"""A mediator with its HTTP site, in memory: TCP connections whose peer the test plays, byte by byte."""

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

# As much as a TCP transport of Twisted reads at once, and holds before it calls itself full.
_READ = 65_536
_FULL = 65_536


class InMemoryTransport(StringTransport):
    """
    Our end of a TCP connection.

    :ivar stuck: whether the peer has stopped reading.
    :ivar half_closed: whether we have said that nothing more will come.
    """

    protocol: Protocol

    def __init__(self, clock: Clock, peer: str) -> None:
        super().__init__(peerAddress=IPv4Address("TCP", peer, 50_000), lenient=True)
        self.stuck = False
        self.half_closed = False
        self.lost = False
        self._clock = clock
        self._inbound: deque[bytes] = deque()
        self._delivering = False
        self._unsent = 0
        self._full = False

    @property
    def unsent(self) -> int:
        """Bytes that wait for the peer to read."""
        return self._unsent

    @property
    def unread(self) -> int:
        """Bytes from the peer that we have not looked at, because reading is paused."""
        return sum(map(len, self._inbound))

    def feed(self, data: bytes) -> None:
        """The peer sends, and the reactor's turn ends."""
        self._inbound.extend(data[start : start + _READ] for start in range(0, len(data), _READ))
        self._deliver()
        self._clock.advance(0)

    def hang_up(self, *, cleanly: bool = True) -> None:
        """The peer closes the connection."""
        self._lose(ConnectionDone() if cleanly else ConnectionLost())

    def unstick(self) -> None:
        """The peer reads again, all there is."""
        self.stuck = False
        self._drained()

    def taken(self) -> bytes:
        """What was written since this was asked last."""
        value: bytes = self.value()
        self.clear()
        return value

    def write(self, data: bytes) -> None:
        if self.half_closed or self.lost:
            return
        super().write(data)
        self._unsent += len(data)
        if self._unsent <= _FULL:
            self._unsent *= self.stuck
        elif self.producer is not None:
            self._full = True
            self.producer.pauseProducing()
            if not self.stuck:
                self._clock.callLater(0, self._drained)

    def writeSequence(self, data: Any) -> None:  # noqa: N802  the transport's name
        self.write(b"".join(data))

    def resumeProducing(self) -> None:
        super().resumeProducing()
        self._clock.callLater(0, self._deliver)

    def loseConnection(self) -> None:
        super().loseConnection()
        if not self.stuck:
            self._clock.callLater(0, self._lose, ConnectionDone())

    def loseWriteConnection(self) -> None:  # noqa: N802  the transport's name
        """Say that nothing more will come, once all that was written is gone."""
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

    def _drained(self) -> None:
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

    :param headers: by lower-case name; of several with one name the last.
    """

    status: int
    headers: dict[str, str]
    body: bytes = field(repr=False)

    @property
    def json(self) -> dict[str, Any]:
        """The body as an object."""
        return encoding.loads_object(self.body)


def parse_responses(raw: bytes, *, head: bool = False) -> list[HTTPResponse]:
    """
    All responses in `raw`, which has to consist of nothing else.

    :param head: they answer HEAD requests, so that there are no bodies.
    """
    found = []
    while raw:
        top, separator, raw = raw.partition(b"\r\n\r\n")
        assert separator, f"no end of headers: {top!r}"
        first, *lines = top.decode("latin-1").split("\r\n")
        assert first.startswith("HTTP/1.1 "), first
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = 0 if head else int(headers.get("content-length", "0"))
        assert len(raw) >= length, "the body is not complete"
        found.append(HTTPResponse(int(first.split()[1]), headers, raw[:length]))
        raw = raw[length:]
    return found


def encode_request(method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> bytes:
    """An HTTP request as bytes, with a Content-Length if there is a body."""
    lines = {"Host": "mediator.example", **(headers or {})}
    if body is not None:
        lines["Content-Length"] = str(len(body))
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return head.encode("latin-1") + b"\r\n" + (body or b"")


class InMemoryWebSocketClient:
    """A client's WebSocket: everything it sends and gets is written and read here, none of it by Autobahn."""

    def __init__(self, site_fixture: InMemorySite, line: InMemoryTransport, opened: bytes) -> None:
        self.line = line
        self._site_fixture = site_fixture
        self._got = opened

    def send(self, payload: bytes, opcode: int = TEXT, *, final: bool = True) -> None:
        """Send one frame."""
        self.line.feed(encode_masked_frame(payload, opcode, final=final))

    def frames(self) -> list[tuple[int, bytes]]:
        """What has arrived since this was asked last: opcodes and payloads, all final, unmasked, uncompressed."""
        self._site_fixture.settle()
        self._got += self.line.taken()
        found = []
        while self._got:
            first, length = self._got[0], self._got[1]
            assert first & 0x70 == 0, "a reserved bit is set"
            assert first & 0x80, "a fragment"
            assert length < 128, "masked by the server"
            start = {126: 4, 127: 10}.get(length, 2)
            if start > 2:
                length = int.from_bytes(self._got[2:start], "big")
            found.append((first & 0x0F, self._got[start : start + length]))
            self._got = self._got[start + length :]
        return found

    def texts(self) -> list[bytes]:
        """The text frames that have arrived; there must be no others."""
        frames = self.frames()
        assert {opcode for opcode, _ in frames} <= {TEXT}, frames
        return [payload for _, payload in frames]

    def close_code(self) -> int | None:
        """The code of the close frame that arrived last of all, if one did."""
        frames = self.frames()
        if not frames or frames[-1][0] != CLOSE:
            return None
        return int.from_bytes(frames[-1][1][:2], "big")


def encode_masked_frame(payload: bytes, opcode: int = TEXT, *, final: bool = True) -> bytes:
    """A masked frame, as clients write it (RFC 6455 section 5.2)."""
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
    A mediator in memory with its HTTP site.

    :param fake_decentrl: what is to be served instead of the real one.
    """

    def __init__(
        self, test: SynchronousTestCase, *, fake_decentrl: FakeDecentrl | None = None, **settings: Any
    ) -> None:
        super().__init__(test, **settings)
        protocol: Any = fake_decentrl or self.decentrl
        self.site = build_site(self.base, self.didcomm, protocol, self.config)
        # How much is served in a turn, and so the order of events, does not depend on how busy the machine is.
        self.site.scheduler._steady = self.clock.seconds

    def line(self, peer: str = PEER) -> InMemoryTransport:
        """A new connection."""
        line = InMemoryTransport(self.clock, peer)
        protocol = self.site.buildProtocol(line.getPeer())
        line.protocol = protocol
        protocol.makeConnection(line)
        return line

    def tag(self, did: str) -> str:
        """How the log and the metrics name a DID."""
        return Pseudonymizer(
            self.config.log.dids, load_pseudonym_key(self.config.identity.keys.with_name("log.key"))
        ).did(did)

    def settle(self) -> None:
        """Let everything happen that is to happen at once."""
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
        """The response to one request on a connection of its own."""
        line = self.line(peer)
        line.feed(encode_request(method, path, body, headers))
        self.settle()
        (response,) = parse_responses(line.taken(), head=method == "HEAD")
        line.hang_up()
        return response

    def post(self, body: bytes, path: str = "/didcomm", **headers: str) -> HTTPResponse:
        """The response to an envelope."""
        return self.request("POST", path, body, {"Content-Type": ENCRYPTED.decode(), **headers})

    def upgrade(
        self, path: str = "/didcomm", peer: str = PEER, **headers: str
    ) -> tuple[InMemoryTransport, HTTPResponse, bytes]:
        """Ask for a WebSocket; the line, the response, and what came after it."""
        line = self.line(peer)
        wanted = {
            "Connection": "keep-alive, Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
            **headers,
        }
        line.feed(encode_request("GET", path, None, wanted))
        self.settle()
        top, _, rest = line.taken().partition(b"\r\n\r\n")
        length = int(parse_responses(top + b"\r\n\r\n", head=True)[0].headers.get("content-length", "0"))
        (response,) = parse_responses(top + b"\r\n\r\n" + rest[:length])
        return line, response, rest[length:]

    def websocket_client(self, path: str = "/didcomm", peer: str = PEER, **headers: str) -> InMemoryWebSocketClient:
        """A WebSocket that is open."""
        line, response, rest = self.upgrade(path, peer, **headers)
        self.test.assertEqual(response.status, 101)
        return InMemoryWebSocketClient(self, line, rest)
