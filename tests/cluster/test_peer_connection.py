"""Connections between nodes: authentication, and what unauthenticated clients can do."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  real sockets
from twisted.internet.address import IPv4Address, UNIXAddress
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.endpoints import clientFromString, connectProtocol, serverFromString
from twisted.internet.protocol import Protocol, connectionDone
from twisted.internet.task import Clock
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase

from mediatord.cluster import peer_connection
from mediatord.cluster.peer_connection import (
    CLIENT_IDLE_TIMEOUT,
    MAX_AUTHENTICATED,
    MAX_BODY_BYTES,
    MAX_CONCURRENT_REQUESTS,
    MAX_HANDSHAKE_BYTES,
    MAX_UNAUTHENTICATED,
    MAX_UNAUTHENTICATED_PER_ADDRESS,
    MIN_SECRET_BYTES,
    NONCE_BYTES,
    PROTOCOL_HELLO,
    RECEIVE_TIMEOUT,
    SERVER_IDLE_TIMEOUT,
    ClusterKeys,
    PeerCallFailed,
    PeerCallRejected,
    PeerClient,
    PeerClientConnection,
    PeerReplaced,
    PeerServer,
    PeerServerConnection,
    derive_cluster_keys,
    normalize_address,
    read_cluster_keys,
)
from mediatord.errors import StoreUnavailable
from mediatord.runtime.secret_files import SecretFileError, create_secret_file
from mediatord.store.interfaces.cluster_and_quotas import ClusterNode

reactor: Any = _reactor
KEYS, OTHER_KEYS = derive_cluster_keys(b"s" * MIN_SECRET_BYTES), derive_cluster_keys(b"t" * MIN_SECRET_BYTES)
RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("protocol-2.json").read_text("utf-8"))
HELLO = PROTOCOL_HELLO + bytes(NONCE_BYTES)
# The length of a MAC, and of the header of a frame.
MAC, PREFIX = 32, 4


def make_frame(content: bytes) -> bytes:
    """A frame with its length."""
    return len(content).to_bytes(PREFIX, "big") + content


class ClusterKeysTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)

    def write_secret(self, content: bytes) -> Path:
        """A private file with this content."""
        path = self.directory / os.urandom(4).hex()
        create_secret_file(path, content)
        return path

    def read_refusal(self, path: Path) -> str:
        """The error of a secret file."""
        with self.assertRaises(SecretFileError) as caught:
            read_cluster_keys(path)
        self.assertNotIn("\n", str(caught.exception))
        return str(caught.exception)

    def test_same_secret_gives_same_keys(self) -> None:
        """Surrounding white space does not matter."""
        self.assertEqual(read_cluster_keys(self.write_secret(b"s" * MIN_SECRET_BYTES)), KEYS)
        self.assertEqual(read_cluster_keys(self.write_secret(b" " + b"s" * MIN_SECRET_BYTES + b"\r\n")), KEYS)

    def test_keys_differ(self) -> None:
        """Keys differ from each other and from those of another secret, and their repr hides them."""

        def of(keys: ClusterKeys) -> set[bytes]:
            return {keys.seal, keys.connections, keys.allowances}

        own_keys = of(KEYS)
        self.assertEqual(len(own_keys), 3)
        self.assertEqual(own_keys & of(derive_cluster_keys(b"t" * MIN_SECRET_BYTES)), set())
        self.assertEqual(repr(KEYS), "ClusterKeys()")

    def test_short_secret(self) -> None:
        """White space does not count."""
        path = self.write_secret(b"s" * (MIN_SECRET_BYTES - 1) + b"\n")
        self.assertIn(f"{path} is shorter than 32 bytes", self.read_refusal(path))

    def test_file_readable_by_others(self) -> None:
        """A secret file has to be private."""
        path = self.write_secret(b"s" * MIN_SECRET_BYTES)
        path.chmod(0o640)
        self.assertIn("chmod 600", self.read_refusal(path))

    def test_missing_file(self) -> None:
        """A missing file is not created: each node would get another secret."""
        self.assertIn("cannot read", self.read_refusal(self.directory / "none"))


class ConnectedPair:
    """Both sides of a connection, between which the test carries the bytes."""

    def __init__(self, test: SynchronousTestCase, *, keys: ClusterKeys = KEYS, reached: str = "bbbb") -> None:
        self.clock = Clock()
        self.refusals: list[str] = []
        self.bodies: list[bytes] = []
        self.peer_server = PeerServer(self.clock, KEYS, "bbbb", self.echo, self.refusals.append)
        self.server: PeerServerConnection = self.peer_server.buildProtocol(IPv4Address("TCP", "10.0.0.1", 1))
        self.client = PeerClientConnection(self.clock, keys.connections, reached, lambda connection: None)
        self.client.answer.addErrback(self.record_failure)
        self.failures: list[type[BaseException] | None] = []
        for side in (self.server, self.client):
            transport: Any = StringTransport()
            side.makeConnection(transport)

    async def echo(self, body: bytes) -> bytes:
        """Record and return the body."""
        self.bodies.append(body)
        return body

    def record_failure(self, failure: Failure) -> bytes:
        """Record a failed request."""
        self.failures.append(failure.type)
        return b""

    def request(self, body: bytes) -> None:
        """Send a request from the client."""
        self.client.request(body).addErrback(self.record_failure)

    def take_written(self, side: Any) -> bytes:
        """Bytes that a side has written since the last call."""
        data: bytes = side.transport.value()
        side.transport.clear()
        return data

    def carry(self) -> None:
        """Deliver all bytes, until both sides are silent."""
        while data := [(self.take_written(one), other) for one, other in self.list_sides() if one.transport.value()]:
            for content, other in data:
                other.dataReceived(content)

    def list_sides(self) -> list[tuple[Any, Any]]:
        """Each side with the other one."""
        return [(self.client, self.server), (self.server, self.client)]

    def has_ended(self, side: Any) -> bool:
        """Whether a side has closed the connection."""
        return bool(side.transport.disconnecting or side.transport.disconnected)


class HandshakeTests(SynchronousTestCase):
    """Authentication of handshake, requests and responses."""

    def open_pair(self) -> ConnectedPair:
        """A pair after its handshake."""
        pair = ConnectedPair(self)
        pair.carry()
        self.assertEqual(self.successResultOf(pair.client.answer), b"bbbb")
        return pair

    def test_recorded_bytes(self) -> None:
        """The bytes are those of the recording, which only a new version of the hello may change."""
        keys = derive_cluster_keys(bytes.fromhex(RECORDED["secret"]))
        self.assertEqual(keys.seal.hex(), RECORDED["seal"])
        nonces = iter([bytes.fromhex(RECORDED[side]["nonce"]) for side in ("server", "client")])
        self.patch(secrets, "token_bytes", lambda count: next(nonces))
        pair = ConnectedPair(self, keys=keys)
        pair.server._key = keys.connections
        transcript: dict[str, list[str]] = {"client": [], "server": []}
        for number in range(3):
            if number == 2:
                pair.request(RECORDED["request"].encode())
            for name, (one, other) in zip(("client", "server"), pair.list_sides(), strict=True):
                data = pair.take_written(one)
                transcript[name].append(data.hex())
                other.dataReceived(data)
        self.assertEqual(transcript, {side: RECORDED[side]["frames"] for side in transcript})
        self.assertEqual(pair.bodies, [RECORDED["request"].encode()])

    def test_requests_and_responses(self) -> None:
        """Requests and responses alternate."""
        pair = self.open_pair()
        for body in (b"1", b"2" * MAX_BODY_BYTES):
            pair.request(body)
            pair.carry()
            self.assertEqual(self.successResultOf(pair.client.answer), body)
        self.assertEqual((pair.bodies, pair.refusals), ([b"1", b"2" * MAX_BODY_BYTES], []))

    def test_every_bit_is_authenticated(self) -> None:
        """An altered bit in a request or a response invalidates it."""
        for side, position in ((0, PREFIX), (0, PREFIX + 1), (0, -1), (1, PREFIX), (1, -1), (1, -MAC)):
            pair = self.open_pair()
            pair.request(b"ab")
            if side:
                pair.server.dataReceived(pair.take_written(pair.client))
            one, other = pair.list_sides()[side]
            data = bytearray(pair.take_written(one))
            data[position] ^= 1
            other.dataReceived(bytes(data))
            pair.carry()
            self.assertEqual((len(pair.bodies), pair.refusals), (side, [] if side else ["seal"]))
            self.assertEqual(pair.failures, [PeerCallFailed if side else PeerCallRejected])
            self.assertTrue(pair.has_ended(other))

    def test_another_secret(self) -> None:
        """A client or server with another secret is refused and learns nothing."""
        pair = ConnectedPair(self, keys=OTHER_KEYS)
        pair.server.dataReceived(pair.take_written(pair.client))
        self.assertEqual(len(pair.server.transport.value()), PREFIX + len(HELLO))  # type: ignore[union-attr]
        pair.carry()
        self.assertEqual((pair.refusals, pair.failures), (["seal"], [PeerCallRejected]))
        self.assertTrue(pair.has_ended(pair.server))

    def test_impostor_cannot_respond(self) -> None:
        """A server without the secret cannot respond."""
        for frame in (bytes(MAC), b"bbbb", b"bbbb" + bytes(MAC), b"x"):
            pair = ConnectedPair(self)
            pair.client.dataReceived(make_frame(HELLO) + make_frame(frame))
            self.assertEqual(pair.failures, [PeerCallFailed])
            self.assertTrue(pair.has_ended(pair.client))

    def test_replayed_request(self) -> None:
        """A recorded request is invalid when repeated on the same or another connection."""
        recorded = self.open_pair()
        recorded.request(b"again")
        request = recorded.take_written(recorded.client)
        recorded.server.dataReceived(request)
        recorded.take_written(recorded.server)
        recorded.server.dataReceived(request)
        self.assertEqual((recorded.bodies, recorded.refusals), ([b"again"], ["seal"]))
        other = self.open_pair()
        other.server.dataReceived(request)
        self.assertEqual((other.bodies, other.refusals), ([], ["seal"]))

    def test_replayed_handshake(self) -> None:
        """A recorded handshake fails, as the server has a new nonce for each connection."""
        first, second = ConnectedPair(self), ConnectedPair(self)
        frames = []
        for _ in range(2):
            frames.append(first.take_written(first.client))
            first.server.dataReceived(frames[-1])
            first.client.dataReceived(first.take_written(first.server))
        for data in frames:
            second.server.dataReceived(data)
        self.assertEqual(second.refusals, ["seal"])
        self.assertTrue(second.has_ended(second.server))

    def test_reordered_frames(self) -> None:
        """Frames are valid in the order sent only."""
        pair = self.open_pair()
        pair.request(b"1")
        one = pair.take_written(pair.client)
        pair.request(b"2")
        two = pair.take_written(pair.client)
        pair.server.dataReceived(two)
        pair.server.dataReceived(one)
        self.assertEqual((pair.bodies, pair.refusals), ([], ["seal"]))

    def test_reflected_frames(self) -> None:
        """A frame sent back to its sender is no valid response."""
        pair = self.open_pair()
        pair.request(b"x")
        pair.client.dataReceived(pair.take_written(pair.client))
        self.assertEqual(pair.failures, [PeerCallFailed])
        lonely = ConnectedPair(self)
        for _ in range(2):
            lonely.client.dataReceived(lonely.take_written(lonely.client))
        self.assertEqual(lonely.failures, [PeerCallFailed])

    def test_another_boot(self) -> None:
        """The server states its boot, authentically, and serves nothing meant for another one."""
        pair = ConnectedPair(self, reached="dead")
        pair.carry()
        self.assertEqual(self.successResultOf(pair.client.answer), b"bbbb")
        self.assertTrue(pair.has_ended(pair.server))
        pair.request(b"x")
        pair.server.dataReceived(pair.take_written(pair.client))
        self.assertEqual((pair.bodies, pair.refusals), ([], []))

    def test_one_request_at_a_time(self) -> None:
        """A client that does not wait for the response is disconnected."""
        pair = self.open_pair()
        held: Deferred[bytes] = Deferred()
        pair.peer_server._operation = lambda body: held
        pair.request(b"1")
        pair.request(b"2")
        pair.server.dataReceived(pair.take_written(pair.client))
        self.assertTrue(pair.has_ended(pair.server))

    def test_unexpected_response(self) -> None:
        """A response without a request is an error."""
        pair = self.open_pair()
        pair.server.send(b"unasked")
        pair.carry()
        self.assertTrue(pair.has_ended(pair.client))

    def test_slow_reader(self) -> None:
        """A client that does not read responses cannot send requests."""
        pair = self.open_pair()
        transport: Any = pair.server.transport
        transport.producer.pauseProducing()
        self.assertEqual(transport.producerState, "paused")
        transport.producer.resumeProducing()
        pair.request(b"x")
        pair.carry()
        self.assertEqual(pair.bodies, [b"x"])


class UnauthenticatedClientTests(SynchronousTestCase):
    """What the server does with an unauthenticated client."""

    def test_invalid_hello(self) -> None:
        """Anything but a hello is refused with an empty frame, and counted."""
        long = (MAX_HANDSHAKE_BYTES + 1).to_bytes(PREFIX, "big")
        for data in (
            make_frame(b""),
            make_frame(HELLO[:-1]),
            make_frame(HELLO + b"x"),
            make_frame(HELLO.replace(b"2", b"3")),
            long,
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\r\n\r\n",
            b"\xff" * 10_000,
        ):
            pair = ConnectedPair(self)
            pair.server.dataReceived(data)
            self.assertEqual((pair.take_written(pair.server), pair.refusals), (make_frame(b""), ["malformed"]), data)
            self.assertTrue(pair.has_ended(pair.server))

    def test_hello_without_proof(self) -> None:
        """A hello alone gets only the server's hello."""
        for content in (b"", b"bbbb", b"bbbb" + bytes(MAC), bytes(MAC), HELLO):
            pair = ConnectedPair(self)
            pair.server.dataReceived(make_frame(HELLO))
            self.assertEqual(pair.take_written(pair.server)[:-NONCE_BYTES], make_frame(HELLO)[:-NONCE_BYTES])
            pair.server.dataReceived(make_frame(content))
            self.assertEqual((pair.take_written(pair.server), pair.refusals), (make_frame(b""), ["seal"]))

    def test_one_response(self) -> None:
        """Of pipelined frames only the first is read."""
        pair = ConnectedPair(self)
        pair.server.dataReceived(make_frame(b"x") * 50)
        pair.server.dataReceived(make_frame(HELLO))
        self.assertEqual((pair.take_written(pair.server), pair.refusals), (make_frame(b""), ["malformed"]))

    def test_keeps_no_data_after_refusal(self) -> None:
        """Data that arrives while the connection closes, as it may over TLS, takes no memory."""
        pair = ConnectedPair(self)
        pair.server.dataReceived(make_frame(b"x"))
        for _ in range(3):
            pair.server.dataReceived(b"x" * 10_000)
        self.assertLess(len(pair.server._unprocessed), 10_000)

    def test_request_size_is_limited(self) -> None:
        """An authenticated node may send long requests up to a limit."""
        pair = ConnectedPair(self)
        pair.carry()
        pair.server.dataReceived((MAX_BODY_BYTES + MAC + 1).to_bytes(PREFIX, "big"))
        self.assertEqual((pair.take_written(pair.server), pair.refusals), (b"", []))
        self.assertTrue(pair.has_ended(pair.server))

    def test_handshake_timeout(self) -> None:
        """A client that sends nothing, or sends slowly, is disconnected after a while."""
        for content in (b"", make_frame(HELLO), make_frame(HELLO) + b"\x00\x00\x00\x40" + b"x" * 60):
            pair = ConnectedPair(self)
            pair.clock.advance(1.0)
            for number in range(int(RECEIVE_TIMEOUT) - 1):
                self.assertFalse(pair.has_ended(pair.server))
                pair.server.dataReceived(content[10 * number : 10 * number + 10])
                pair.clock.advance(1.0)
            self.assertTrue(pair.has_ended(pair.server))

    def test_request_timeout(self) -> None:
        """An authenticated node may be idle for long, but each request has to arrive in time."""
        pair = ConnectedPair(self)
        pair.carry()
        pair.clock.advance(SERVER_IDLE_TIMEOUT - 1)
        pair.server.dataReceived(b"\x00\x00\x00\x40")
        for _ in range(int(RECEIVE_TIMEOUT)):
            self.assertFalse(pair.has_ended(pair.server))
            pair.server.dataReceived(b"x")
            pair.clock.advance(1)
        self.assertTrue(pair.has_ended(pair.server))

    def test_idle_connection_is_closed(self) -> None:
        """An idle connection is closed, first by its client."""
        self.assertLess(CLIENT_IDLE_TIMEOUT, SERVER_IDLE_TIMEOUT)
        pair = ConnectedPair(self)
        pair.carry()
        pair.clock.advance(CLIENT_IDLE_TIMEOUT - 1)
        pair.request(b"x")
        pair.carry()
        pair.clock.advance(CLIENT_IDLE_TIMEOUT - 1)
        self.assertFalse(pair.has_ended(pair.client))
        pair.clock.advance(1)
        self.assertTrue(pair.has_ended(pair.client))
        pair.clock.advance(SERVER_IDLE_TIMEOUT - CLIENT_IDLE_TIMEOUT - 1)
        self.assertFalse(pair.has_ended(pair.server))
        pair.clock.advance(1)
        self.assertTrue(pair.has_ended(pair.server))


class ConnectionLimitTests(SynchronousTestCase):
    """Connections that the node-to-node listener accepts."""

    def setUp(self) -> None:
        self.server = PeerServer(Clock(), KEYS, "bbbb", lambda body: Deferred(), lambda reason: None)

    def reserve(self, origin: str = "10.0.0.1") -> PeerServerConnection | None:
        """Reserve a slot if there is one."""
        address: Any = IPv4Address("TCP", origin, 1) if origin else UNIXAddress(b"")
        connection: PeerServerConnection | None = self.server.buildProtocol(address)
        if connection is not None:
            connection.abort = lambda: self.ended.append(connection)  # type: ignore[method-assign]
        return connection

    def connect_from(self, count: int = 1, origin: str = "10.0.0.1") -> list[PeerServerConnection]:
        """So many connections from one address."""
        self.ended: list[PeerServerConnection] = getattr(self, "ended", [])
        callers = [self.reserve(origin) for _ in range(count)]
        return [caller for caller in callers if caller is not None or self.fail("refused")]

    def fill_slots(self) -> list[PeerServerConnection]:
        """Occupy all unauthenticated slots, each from another address."""
        return [self.connect_from(origin=f"10.0.0.{number}")[0] for number in range(MAX_UNAUTHENTICATED)]

    def test_full(self) -> None:
        """A new client gets a slot; the oldest is closed."""
        clients = self.fill_slots()
        self.connect_from(2, origin="10.0.1.1")
        self.assertEqual(self.ended, clients[:2])
        self.assertEqual(len(self.server), MAX_UNAUTHENTICATED)

    def test_one_address(self) -> None:
        """An address does not take slots of others, however often it connects."""
        (other,) = self.connect_from(origin="10.0.1.1")
        clients = self.connect_from(MAX_UNAUTHENTICATED_PER_ADDRESS + 1)
        self.assertEqual(self.ended, clients[:1])
        self.connect_from(MAX_UNAUTHENTICATED)
        self.assertNotIn(other, self.ended)
        self.assertEqual(len(self.server), 1 + MAX_UNAUTHENTICATED_PER_ADDRESS)

    def test_unix_socket(self) -> None:
        """On a UNIX socket no client has an address."""
        self.connect_from(MAX_UNAUTHENTICATED, origin="")
        self.assertEqual(len(self.server), MAX_UNAUTHENTICATED)

    def test_busy_connections_keep_slots(self) -> None:
        """A client that waits for a response keeps its slot; if all do there is none."""
        clients = self.fill_slots()
        for client in clients:
            client._serving = Deferred()
        self.assertIsNone(self.reserve("10.0.1.1"))
        clients[7]._serving = None
        self.connect_from(origin="10.0.1.1")
        self.assertEqual(self.ended, [clients[7]])

    def test_authenticated_nodes(self) -> None:
        """Nodes take no unauthenticated slots and are not closed for them; they are counted too."""
        nodes = self.connect_from(MAX_UNAUTHENTICATED_PER_ADDRESS)
        for node in nodes:
            self.server.mark_authenticated(node)
            self.server.mark_authenticated(node)
        self.connect_from(MAX_UNAUTHENTICATED_PER_ADDRESS)
        self.fill_slots()
        self.assertFalse(set(nodes) & set(self.ended))
        self.assertEqual(len(self.server), MAX_UNAUTHENTICATED_PER_ADDRESS + MAX_UNAUTHENTICATED)
        for node in nodes:
            self.server.remove(node)
        self.assertEqual(len(self.server), MAX_UNAUTHENTICATED)

    def test_too_many_nodes(self) -> None:
        """Nodes beyond the limit keep an unauthenticated slot, which may be closed."""
        for number in range(MAX_AUTHENTICATED):
            (node,) = self.connect_from(origin=f"node {number}")
            self.server.mark_authenticated(node)
        (slot,) = self.connect_from()
        self.server.mark_authenticated(slot)
        self.fill_slots()
        self.assertIn(slot, self.ended)
        self.assertEqual(len(self.server), MAX_AUTHENTICATED + MAX_UNAUTHENTICATED)

    def test_next_node_gets_free_slot(self) -> None:
        """The first node without a slot gets the next free one."""
        nodes = []
        for number in range(MAX_AUTHENTICATED + 2):
            nodes += self.connect_from(origin=f"node {number}")
            nodes[-1].is_authenticated = True
            self.server.mark_authenticated(nodes[-1])
        self.server.remove(nodes[0])
        self.fill_slots()
        self.assertEqual(self.ended, nodes[-1:])

    def test_late_authentication(self) -> None:
        """A client that has lost its slot cannot authenticate."""
        (caller,) = self.connect_from()
        self.server.remove(caller)
        self.server.mark_authenticated(caller)
        self.assertEqual(len(self.server), 0)


class ClientOriginTests(SynchronousTestCase):
    def test_ipv4(self) -> None:
        """Every IPv4 address counts by itself, in any notation."""
        self.assertEqual(normalize_address("10.0.0.1"), "10.0.0.1")
        self.assertEqual(normalize_address("::ffff:10.0.0.1"), "10.0.0.1")

    def test_ipv6(self) -> None:
        """An IPv6 /64 network counts as one."""
        self.assertEqual(normalize_address("2001:db8:1:2::1"), normalize_address("2001:db8:1:2:ffff::"))
        self.assertNotEqual(normalize_address("2001:db8:1:2::1"), normalize_address("2001:db8:1:3::1"))
        self.assertEqual(normalize_address("fe80::1%eth0"), normalize_address("fe80::2%eth0"))

    def test_unix_socket(self) -> None:
        """A UNIX socket has no address."""
        self.assertEqual(normalize_address(""), "")


class RawClient(Protocol):
    """A client that does not know the protocol."""

    def __init__(self) -> None:
        self.got = b""
        self.closed: Deferred[None] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        """Record the data."""
        self.got += data

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """The server has closed the connection."""
        self.closed.callback(None)

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.transport.write(data)  # type: ignore[union-attr]  # it is connected


class SocketTestCase(TestCase):
    """A node that responds on TCP and on a UNIX socket."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        self.addCleanup(self.wait_until_closed)
        self.callers: list[PeerClient] = []
        self.refusals: list[str] = []
        self.bodies: list[bytes] = []
        self.use: Callable[[bytes], Coroutine[Any, Any, bytes]] = self.echo
        self.clock = Clock()
        self.server = PeerServer(self.clock, KEYS, "bbbb", lambda body: self.use(body), self.refusals.append)
        port = await self.listen("tcp:0:interface=127.0.0.1")
        self.port = port.getHost().port
        self.bea = ClusterNode("bea", "bbbb", f"tcp:host=127.0.0.1:port={self.port}", KEYS.seal)
        self.calling = self.make_client(KEYS)

    async def listen(self, endpoint: str) -> Any:
        """Listen there as well."""
        port = await serverFromString(reactor, endpoint).listen(self.server)
        self.addCleanup(port.stopListening)
        return port

    def make_client(self, keys: Any, **options: Any) -> PeerClient:
        """Another node's client, with long timeouts by default."""
        calling = PeerClient(reactor, keys, **{"timeout": 60.0, **options})
        self.callers.append(calling)
        self.addCleanup(calling.close)
        return calling

    async def wait_until_closed(self) -> None:
        """Wait until there are no connections."""
        while len(self.server) or any(calling._idle for calling in self.callers):
            await self.run_iteration()

    async def echo(self, body: bytes) -> bytes:
        """Record and return the body."""
        self.bodies.append(body)
        return body

    async def connect_raw(self, options: str = "") -> RawClient:
        """Connect a raw client. :param options: of the endpoint."""
        endpoint = clientFromString(reactor, self.bea.address + options)
        found = RawClient()
        connected: Any = await connectProtocol(endpoint, found)
        self.addCleanup(connected.transport.abortConnection)
        return found

    async def run_iteration(self) -> None:
        """Run one reactor iteration."""
        done: Deferred[None] = Deferred()
        reactor.callLater(0.005, done.callback, None)
        await done

    async def assert_fails(self, kind: type[Exception], calling: PeerClient, node: ClusterNode) -> None:
        """A request fails in exactly this way."""
        with self.assertRaises(PeerCallFailed) as caught:
            await calling.call(node, b"{}")
        self.assertIs(type(caught.exception), kind)


class PeerClientTests(SocketTestCase):
    async def test_reuses_connection(self) -> None:
        """A request and its response; the connection is kept for the next one."""
        for number in range(3):
            body = b'{"n":%d}' % number
            self.assertEqual(await self.calling.call(self.bea, body), body)
        self.assertEqual(len(self.server), 1)
        self.assertEqual(self.refusals, [])

    async def test_unix_socket(self) -> None:
        """Processes of one host need no TCP."""
        path = self.directory / "node.sock"
        await self.listen(f"unix:{path}")
        bea = ClusterNode("bea", "bbbb", f"unix:{path}", KEYS.seal)
        self.assertEqual(await self.calling.call(bea, b"{}"), b"{}")
        self.assertEqual(await self.calling.probe(bea), "bbbb")

    async def test_largest_bodies(self) -> None:
        """Bodies may be as long as the limit in both directions; a longer request is cut off."""
        body = b"x" * MAX_BODY_BYTES
        self.assertEqual(await self.calling.call(self.bea, body), body)
        with self.assertRaises(PeerCallFailed):
            await self.calling.call(self.bea, body + b"x")

    async def test_too_long_response(self) -> None:
        """A longer response is a failure."""

        async def respond_too_long(body: bytes) -> bytes:
            return b"x" * (MAX_BODY_BYTES + 1)

        self.use = respond_too_long
        await self.assert_fails(PeerCallFailed, self.calling, self.bea)

    async def test_probe(self) -> None:
        """A probe returns the boot at an address, or None if no known node answers."""
        self.assertEqual(await self.calling.probe(self.bea), "bbbb")
        other = ClusterNode("bea", "dead", self.bea.address, KEYS.seal)
        self.assertEqual(await self.calling.probe(other), "bbbb")
        self.assertIsNone(await self.make_client(OTHER_KEYS).probe(self.bea))
        for number, address in enumerate(
            ("tcp:host=127.0.0.1:port=1", f"unix:{self.directory}/none.sock", "nonsense", "tcp:host=127.0.0.1")
        ):
            self.assertIsNone(await self.calling.probe(ClusterNode("bea", f"b{number}", address, KEYS.seal)))
        self.assertEqual(self.bodies, [])

    async def test_nobody_listens(self) -> None:
        """A missing listener fails at once."""
        for number, address in enumerate(("tcp:host=127.0.0.1:port=1", f"unix:{self.directory}/none.sock")):
            await self.assert_fails(
                PeerCallFailed, self.calling, ClusterNode("bea", f"b{number}", address, KEYS.seal)
            )

    async def test_another_boot(self) -> None:
        """A request for an earlier node at the address fails: the address may be forgotten."""
        await self.assert_fails(PeerReplaced, self.calling, ClusterNode("bea", "dead", self.bea.address, KEYS.seal))
        self.assertEqual(self.bodies, [])

    async def test_another_secret(self) -> None:
        """It is refused and nothing is done."""
        await self.assert_fails(PeerCallRejected, self.make_client(OTHER_KEYS), self.bea)
        self.assertEqual((self.bodies, self.refusals), ([], ["seal"]))

    async def test_reconnects(self) -> None:
        """After the server has closed the connection the next request opens another one."""
        await self.calling.call(self.bea, b"{}")
        self.server.stopFactory()
        while self.calling._idle:
            await self.run_iteration()
        self.assertEqual(await self.calling.call(self.bea, b"{}"), b"{}")

    async def test_close_cancels_requests(self) -> None:
        """Closing cancels pending requests and their connections, and later requests fail."""
        arrived: Deferred[None] = Deferred()

        async def silent(body: bytes) -> bytes:
            arrived.callback(None)
            return await Deferred()

        self.use = silent
        under_way = self.calling.call(self.bea, b"{}")
        await arrived
        self.calling.close()
        failed = await under_way.addErrback(lambda failure: failure.type)
        self.assertIs(failed, PeerCallFailed)
        while len(self.server):
            await self.run_iteration()
        await self.assert_fails(PeerCallFailed, self.calling, self.bea)
        self.assertIsNone(await self.calling.probe(self.bea))
        self.assertEqual(len(self.server), 0)

    async def test_response_timeout(self) -> None:
        """After the timeout the request fails and the connection is not used again."""
        never: Deferred[bytes] = Deferred()

        async def silent(body: bytes) -> bytes:
            return await never

        self.use = silent
        await self.assert_fails(PeerCallFailed, self.make_client(KEYS, timeout=0.1), self.bea)
        self.use = self.echo
        self.assertEqual(await self.calling.call(self.bea, b"{}"), b"{}")

    async def test_refused_requests(self) -> None:
        """Malformed bodies, or an unavailable store, fail the request, which may be repeated."""

        async def not_understood(body: bytes) -> bytes:
            raise ValueError("none")

        async def away(body: bytes) -> bytes:
            raise StoreUnavailable

        for self.use in (not_understood, away):
            await self.assert_fails(PeerCallFailed, self.calling, self.bea)
        self.assertEqual((self.refusals, len(self.server)), ([], 1))

    async def test_too_many_requests(self) -> None:
        """Requests beyond the capacity are refused for now."""
        held: list[Deferred[bytes]] = []

        async def slow(body: bytes) -> bytes:
            held.append(Deferred())
            return await held[-1]

        self.use = slow
        work = [self.calling.call(self.bea, b"{}") for _ in range(MAX_CONCURRENT_REQUESTS + 1)]
        results, _ = await DeferredList([one.addErrback(lambda failure: failure.type) for one in work], True)
        self.assertIs(results, PeerCallFailed)
        self.assertEqual(len(held), MAX_CONCURRENT_REQUESTS)
        for item in held:
            item.callback(b"{}")
        self.assertEqual(sum(answer == b"{}" for _, answer in await DeferredList(work)), MAX_CONCURRENT_REQUESTS)

    async def test_programming_error(self) -> None:
        """A programming error is logged at the server and is a failure at the client."""

        async def broken(body: bytes) -> bytes:
            raise RuntimeError("boom")

        self.use = broken
        await self.assert_fails(PeerCallFailed, self.calling, self.bea)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)


class UnauthenticatedPeerTests(SocketTestCase):
    async def test_refused(self) -> None:
        """The server sends an empty frame and closes the connection."""
        client = await self.connect_raw()
        client.send(b"POST /cluster/hints HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        await client.closed
        self.assertEqual((client.got, self.refusals, self.bodies), (make_frame(b""), ["malformed"], []))

    async def test_programming_error_before_proof(self) -> None:
        """A programming error ends the connection."""
        self.patch(PeerServerConnection, "hello_received", lambda *args: 1 // 0)
        client = await self.connect_raw()
        client.send(make_frame(HELLO))
        await client.closed
        self.assertEqual((client.got, len(self.flushLoggedErrors(ZeroDivisionError))), (b"", 1))

    async def test_flood_does_not_exclude_nodes(self) -> None:
        """Any number of open connections from any addresses does not exclude a node."""
        await self.calling.call(self.bea, b"{}")
        self.patch(peer_connection, "MAX_UNAUTHENTICATED", 4)
        self.patch(peer_connection, "MAX_UNAUTHENTICATED_PER_ADDRESS", 2)
        clients = [await self.connect_raw() for _ in range(3)]
        await clients[0].closed
        clients += [await self.connect_raw(f":bindAddress=127.0.0.{number}") for number in (2, 2, 3, 3)]
        await clients[1].closed
        await clients[2].closed
        self.assertEqual(await self.make_client(KEYS).call(self.bea, b"{}"), b"{}")
        await clients[3].closed
        for _ in range(8):
            await self.connect_raw()
        self.assertEqual(await self.calling.call(self.bea, b"{}"), b"{}")
        self.assertEqual([len(self.server), len(self.bodies)], [2 + 2 + 2, 3])

    async def test_stop_closes_connections(self) -> None:
        """When the listener stops, open connections are closed."""
        client = await self.connect_raw()
        while not len(self.server):
            await self.run_iteration()
        self.server.doStop()
        await client.closed
        self.server.doStart()
