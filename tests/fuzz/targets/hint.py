"""Messages between nodes, and what strangers may send in their place."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from twisted.internet.address import IPv4Address
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport

from mediatord.cluster.peer_connection import (
    PROTOCOL_HELLO,
    PeerClientConnection,
    PeerServer,
    PeerServerConnection,
    derive_cluster_keys,
)
from mediatord.cluster.peer_notifications import MAX_NOTIFICATIONS, decode_names, encode_names
from mediatord.protocol import encoding
from tests.fuzz.fuzz_mediator import FuzzMediator
from tests.in_memory_mediator import NOW

_OURS = "boot-of-ours"
_KEYS = derive_cluster_keys(b"s" * 32)


class HintTarget:
    """Modes: `h` notifications, `p` push results, `n` a request of a node, `x` bytes of a stranger."""

    words = (b'"hints"', b'"pushed"', b'"messages"', b'"events"', b'"contracts"', PROTOCOL_HELLO)
    longest = 8_192
    most_calls = (1_500, 30)
    most_memory = (500_000, 200)

    def __init__(self) -> None:
        self._mediator = FuzzMediator(lambda site_fixture: None)  # of which only the log is checked
        self._clock = Clock()
        self._clock.advance(NOW)
        self._refusals: list[str] = []
        self._server = PeerServer(self._clock, _KEYS, _OURS, self._hints, self._refusals.append)

    async def _hints(self, body: bytes) -> bytes:
        return encode_names("pushed", decode_names("hints", body))

    def close(self) -> None:
        """Stop listening."""
        self._mediator.close()

    def run(self, data: bytes) -> None:
        """The input is parsed, or refused with the declared error."""
        way, rest = data[:1], data[1:]
        if way == b"n":
            self._request(rest)
        elif way == b"x":
            server, written = self._connect()
            server.dataReceived(rest)
            output = written.value()
            refused = output[-4:] == bytes(4) and written.disconnecting
            assert refused == bool(self._refusals) and len(output) <= 4 + len(PROTOCOL_HELLO) + 32 + 4
            server.connectionLost()
        else:
            self._read(way, rest)
        self._refusals.clear()
        self._mediator.assert_no_failures()

    def _connect(self) -> tuple[PeerServerConnection, Any]:
        server: PeerServerConnection = self._server.buildProtocol(IPv4Address("TCP", "10.0.0.1", 1))
        transport: Any = StringTransport()
        server.makeConnection(transport)
        return server, transport

    def _request(self, body: bytes) -> None:
        server, written = self._connect()
        client = PeerClientConnection(self._clock, _KEYS.connections, _OURS, lambda connection: None)
        transport: Any = StringTransport()
        client.makeConnection(transport)
        self._transfer(client, server)
        answers: list[bytes] = []
        client.request(body).addCallback(answers.append)
        self._transfer(client, server)
        (answer,) = answers
        assert not self._refusals and (answer == b"" or decode_names("pushed", answer) is not None)
        for side in (client, server):
            side.connectionLost()

    def _transfer(self, client: Any, server: Any) -> None:
        for _ in range(2):
            for one, other in ((client, server), (server, client)):
                data = one.transport.value()
                one.transport.clear()
                other.dataReceived(data)

    def _read(self, way: bytes, rest: bytes) -> None:
        try:
            found = decode_names("pushed" if way == b"p" else "hints", rest)
        except ValueError:
            return
        assert sum(map(len, found.values())) <= MAX_NOTIFICATIONS

    def seeds(self) -> Iterable[bytes]:
        """Notifications of every kind, and forgeries."""
        groups = {"messages": ["a", "b"], "events": ["e"], "contracts": ["did:a:b"], "later": [1]}
        for way, member in ((b"h", "hints"), (b"n", "hints"), (b"p", "pushed")):
            yield way + encoding.dumps({"protocol": 1, member: groups})
        yield b"n" + encoding.dumps({"protocol": 1, "hints": {"messages": ["x"] * 1001}})
        hello = PROTOCOL_HELLO + bytes(32)
        yield b"x" + len(hello).to_bytes(4, "big") + hello + (44).to_bytes(4, "big") + bytes(44)


def make() -> HintTarget:
    """Create the target."""
    return HintTarget()
