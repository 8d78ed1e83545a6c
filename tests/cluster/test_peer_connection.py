"""Connections between nodes, what of them is authentic, and what strangers can do at the listener."""

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
# The length of a MAC, and of what is in front of a frame.
MAC, PREFIX = 32, 4


def frame(content: bytes) -> bytes:
    """With its length in front."""
    return len(content).to_bytes(PREFIX, "big") + content


class SecretTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)

    def written(self, content: bytes) -> Path:
        """A private file of its own with this content."""
        path = self.directory / os.urandom(4).hex()
        create_secret_file(path, content)
        return path

    def refusal(self, path: Path) -> str:
        """Why a file cannot be used."""
        with self.assertRaises(SecretFileError) as caught:
            read_cluster_keys(path)
        self.assertNotIn("\n", str(caught.exception))
        return str(caught.exception)

    def test_same_secret_same_keys(self) -> None:
        """Whatever white space an editor leaves around it."""
        self.assertEqual(read_cluster_keys(self.written(b"s" * MIN_SECRET_BYTES)), KEYS)
        self.assertEqual(read_cluster_keys(self.written(b" " + b"s" * MIN_SECRET_BYTES + b"\r\n")), KEYS)

    def test_keys_differ(self) -> None:
        """From each other, from those of another secret, and they do not show themselves."""

        def of(keys: ClusterKeys) -> set[bytes]:
            return {keys.seal, keys.connections, keys.allowances}

        ours = of(KEYS)
        self.assertEqual(len(ours), 3)
        self.assertEqual(ours & of(derive_cluster_keys(b"t" * MIN_SECRET_BYTES)), set())
        self.assertEqual(repr(KEYS), "ClusterKeys()")

    def test_too_short(self) -> None:
        """White space does not count."""
        path = self.written(b"s" * (MIN_SECRET_BYTES - 1) + b"\n")
        self.assertIn(f"{path} is shorter than 32 bytes", self.refusal(path))

    def test_open_to_others(self) -> None:
        """As with all private files."""
        path = self.written(b"s" * MIN_SECRET_BYTES)
        path.chmod(0o640)
        self.assertIn("chmod 600", self.refusal(path))

    def test_missing(self) -> None:
        """It is never made by itself: another node would have another one."""
        self.assertIn("cannot read", self.refusal(self.directory / "none"))


class Pair:
    """Both sides of a connection, between which the test carries the bytes."""

    def __init__(self, test: SynchronousTestCase, *, keys: ClusterKeys = KEYS, reached: str = "bbbb") -> None:
        self.clock = Clock()
        self.refusals: list[str] = []
        self.bodies: list[bytes] = []
        self.peer_server = PeerServer(self.clock, KEYS, "bbbb", self.echo, self.refusals.append)
        self.server: PeerServerConnection = self.peer_server.buildProtocol(IPv4Address("TCP", "10.0.0.1", 1))
        self.client = PeerClientConnection(self.clock, keys.connections, reached, lambda connection: None)
        self.client.answer.addErrback(self.note)
        self.failures: list[type[BaseException] | None] = []
        for side in (self.server, self.client):
            transport: Any = StringTransport()
            side.makeConnection(transport)

    async def echo(self, body: bytes) -> bytes:
        """The body, noted."""
        self.bodies.append(body)
        return body

    def note(self, failure: Failure) -> bytes:
        """How a request failed."""
        self.failures.append(failure.type)
        return b""

    def request(self, body: bytes) -> None:
        """From the client."""
        self.client.request(body).addErrback(self.note)

    def written(self, side: Any) -> bytes:
        """What a side has written since this was asked last."""
        data: bytes = side.transport.value()
        side.transport.clear()
        return data

    def carry(self) -> None:
        """Deliver everything, until both are silent."""
        while data := [(self.written(one), other) for one, other in self.sides() if one.transport.value()]:
            for content, other in data:
                other.dataReceived(content)

    def sides(self) -> list[tuple[Any, Any]]:
        """Each with its other one."""
        return [(self.client, self.server), (self.server, self.client)]

    def has_ended(self, side: Any) -> bool:
        """Whether a side has hung up."""
        return bool(side.transport.disconnecting or side.transport.disconnected)


class HandshakeTests(SynchronousTestCase):
    """What is authentic, and what is not."""

    def open(self) -> Pair:
        """A pair whose handshake is over."""
        pair = Pair(self)
        pair.carry()
        self.assertEqual(self.successResultOf(pair.client.answer), b"bbbb")
        return pair

    def test_recorded(self) -> None:
        """The bytes are those of the record, which is not to be changed without a new version of the hello."""
        keys = derive_cluster_keys(bytes.fromhex(RECORDED["secret"]))
        self.assertEqual(keys.seal.hex(), RECORDED["seal"])
        nonces = iter([bytes.fromhex(RECORDED[side]["nonce"]) for side in ("server", "client")])
        self.patch(secrets, "token_bytes", lambda count: next(nonces))
        pair = Pair(self, keys=keys)
        pair.server._key = keys.connections
        said: dict[str, list[str]] = {"client": [], "server": []}
        for number in range(3):
            if number == 2:
                pair.request(RECORDED["request"].encode())
            for name, (one, other) in zip(("client", "server"), pair.sides(), strict=True):
                data = pair.written(one)
                said[name].append(data.hex())
                other.dataReceived(data)
        self.assertEqual(said, {side: RECORDED[side]["frames"] for side in said})
        self.assertEqual(pair.bodies, [RECORDED["request"].encode()])

    def test_request_and_answer(self) -> None:
        """One after the other."""
        pair = self.open()
        for body in (b"1", b"2" * MAX_BODY_BYTES):
            pair.request(body)
            pair.carry()
            self.assertEqual(self.successResultOf(pair.client.answer), body)
        self.assertEqual((pair.bodies, pair.refusals), ([b"1", b"2" * MAX_BODY_BYTES], []))

    def test_every_bit_counts(self) -> None:
        """Whatever is altered in a request or an answer, it is not a node's any more."""
        for side, place in ((0, PREFIX), (0, PREFIX + 1), (0, -1), (1, PREFIX), (1, -1), (1, -MAC)):
            pair = self.open()
            pair.request(b"ab")
            if side:
                pair.server.dataReceived(pair.written(pair.client))
            one, other = pair.sides()[side]
            data = bytearray(pair.written(one))
            data[place] ^= 1
            other.dataReceived(bytes(data))
            pair.carry()
            self.assertEqual((len(pair.bodies), pair.refusals), (side, [] if side else ["seal"]))
            self.assertEqual(pair.failures, [PeerCallFailed if side else PeerCallRejected])
            self.assertTrue(pair.has_ended(other))

    def test_another_secret(self) -> None:
        """Is refused, and learns nothing; nor is one believed who has it and is asked."""
        pair = Pair(self, keys=OTHER_KEYS)
        pair.server.dataReceived(pair.written(pair.client))
        self.assertEqual(len(pair.server.transport.value()), PREFIX + len(HELLO))  # type: ignore[union-attr]
        pair.carry()
        self.assertEqual((pair.refusals, pair.failures), (["seal"], [PeerCallRejected]))
        self.assertTrue(pair.has_ended(pair.server))

    def test_impostor(self) -> None:
        """Who has not the secret cannot answer, whatever it says."""
        for said in (bytes(MAC), b"bbbb", b"bbbb" + bytes(MAC), b"x"):
            pair = Pair(self)
            pair.client.dataReceived(frame(HELLO) + frame(said))
            self.assertEqual(pair.failures, [PeerCallFailed])
            self.assertTrue(pair.has_ended(pair.client))

    def test_replay(self) -> None:
        """What was recorded of one connection is nothing on it a second time, nor on another one."""
        recorded = self.open()
        recorded.request(b"again")
        request = recorded.written(recorded.client)
        recorded.server.dataReceived(request)
        recorded.written(recorded.server)
        recorded.server.dataReceived(request)
        self.assertEqual((recorded.bodies, recorded.refusals), ([b"again"], ["seal"]))
        other = self.open()
        other.server.dataReceived(request)
        self.assertEqual((other.bodies, other.refusals), ([], ["seal"]))

    def test_replayed_handshake(self) -> None:
        """All that a node has sent, to a server that has a nonce of its own for everybody."""
        first, second = Pair(self), Pair(self)
        said = []
        for _ in range(2):
            said.append(first.written(first.client))
            first.server.dataReceived(said[-1])
            first.client.dataReceived(first.written(first.server))
        for data in said:
            second.server.dataReceived(data)
        self.assertEqual(second.refusals, ["seal"])
        self.assertTrue(second.has_ended(second.server))

    def test_reordered(self) -> None:
        """Frames count in the order in which they were sent."""
        pair = self.open()
        pair.request(b"1")
        one = pair.written(pair.client)
        pair.request(b"2")
        two = pair.written(pair.client)
        pair.server.dataReceived(two)
        pair.server.dataReceived(one)
        self.assertEqual((pair.bodies, pair.refusals), ([], ["seal"]))

    def test_reflected(self) -> None:
        """Nothing that a side has sent is taken for an answer to it."""
        pair = self.open()
        pair.request(b"x")
        pair.client.dataReceived(pair.written(pair.client))
        self.assertEqual(pair.failures, [PeerCallFailed])
        lonely = Pair(self)
        for _ in range(2):
            lonely.client.dataReceived(lonely.written(lonely.client))
        self.assertEqual(lonely.failures, [PeerCallFailed])

    def test_another_boot(self) -> None:
        """Who answers says who it is, authentically, and serves nothing that is for somebody else."""
        pair = Pair(self, reached="dead")
        pair.carry()
        self.assertEqual(self.successResultOf(pair.client.answer), b"bbbb")
        self.assertTrue(pair.has_ended(pair.server))
        pair.request(b"x")
        pair.server.dataReceived(pair.written(pair.client))
        self.assertEqual((pair.bodies, pair.refusals), ([], []))

    def test_one_request_at_a_time(self) -> None:
        """A node waits for its answer; who does not is no node."""
        pair = self.open()
        held: Deferred[bytes] = Deferred()
        pair.peer_server._operation = lambda body: held
        pair.request(b"1")
        pair.request(b"2")
        pair.server.dataReceived(pair.written(pair.client))
        self.assertTrue(pair.has_ended(pair.server))

    def test_answer_to_nothing(self) -> None:
        """Is none."""
        pair = self.open()
        pair.server.send(b"unasked")
        pair.carry()
        self.assertTrue(pair.has_ended(pair.client))

    def test_slow_reader(self) -> None:
        """Who does not read its answers cannot send requests."""
        pair = self.open()
        transport: Any = pair.server.transport
        transport.producer.pauseProducing()
        self.assertEqual(transport.producerState, "paused")
        transport.producer.resumeProducing()
        pair.request(b"x")
        pair.carry()
        self.assertEqual(pair.bodies, [b"x"])


class StrangerTests(SynchronousTestCase):
    """What the server makes of somebody who is no node."""

    def test_no_hello(self) -> None:
        """Whatever is no hello: refused without a word but an empty frame, and counted."""
        long = (MAX_HANDSHAKE_BYTES + 1).to_bytes(PREFIX, "big")
        for data in (
            frame(b""),
            frame(HELLO[:-1]),
            frame(HELLO + b"x"),
            frame(HELLO.replace(b"2", b"3")),
            long,
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x16\x03\x01\r\n\r\n",
            b"\xff" * 10_000,
        ):
            pair = Pair(self)
            pair.server.dataReceived(data)
            self.assertEqual((pair.written(pair.server), pair.refusals), (frame(b""), ["malformed"]), data)
            self.assertTrue(pair.has_ended(pair.server))

    def test_no_proof(self) -> None:
        """Nor does a hello get anybody further than to the server's."""
        for content in (b"", b"bbbb", b"bbbb" + bytes(MAC), bytes(MAC), HELLO):
            pair = Pair(self)
            pair.server.dataReceived(frame(HELLO))
            self.assertEqual(pair.written(pair.server)[:-NONCE_BYTES], frame(HELLO)[:-NONCE_BYTES])
            pair.server.dataReceived(frame(content))
            self.assertEqual((pair.written(pair.server), pair.refusals), (frame(b""), ["seal"]))

    def test_one_answer(self) -> None:
        """Of what was sent in a row only the first is looked at."""
        pair = Pair(self)
        pair.server.dataReceived(frame(b"x") * 50)
        pair.server.dataReceived(frame(HELLO))
        self.assertEqual((pair.written(pair.server), pair.refusals), (frame(b""), ["malformed"]))

    def test_nothing_is_kept_at_the_end(self) -> None:
        """What still comes while the connection closes, as it may over TLS, takes no memory."""
        pair = Pair(self)
        pair.server.dataReceived(frame(b"x"))
        for _ in range(3):
            pair.server.dataReceived(b"x" * 10_000)
        self.assertLess(len(pair.server._unprocessed), 10_000)

    def test_long_request(self) -> None:
        """Who is a node may send long ones, and none that are longer."""
        pair = Pair(self)
        pair.carry()
        pair.server.dataReceived((MAX_BODY_BYTES + MAC + 1).to_bytes(PREFIX, "big"))
        self.assertEqual((pair.written(pair.server), pair.refusals), (b"", []))
        self.assertTrue(pair.has_ended(pair.server))

    def test_patience(self) -> None:
        """Who says nothing, or says it slowly, is cut off after a while, however steadily it drips."""
        for content in (b"", frame(HELLO), frame(HELLO) + b"\x00\x00\x00\x40" + b"x" * 60):
            pair = Pair(self)
            pair.clock.advance(1.0)
            for number in range(int(RECEIVE_TIMEOUT) - 1):
                self.assertFalse(pair.has_ended(pair.server))
                pair.server.dataReceived(content[10 * number : 10 * number + 10])
                pair.clock.advance(1.0)
            self.assertTrue(pair.has_ended(pair.server))

    def test_patience_with_nodes(self) -> None:
        """Who has shown to be a node may be idle for long, but its next request has to arrive in time as well."""
        pair = Pair(self)
        pair.carry()
        pair.clock.advance(SERVER_IDLE_TIMEOUT - 1)
        pair.server.dataReceived(b"\x00\x00\x00\x40")
        for _ in range(int(RECEIVE_TIMEOUT)):
            self.assertFalse(pair.has_ended(pair.server))
            pair.server.dataReceived(b"x")
            pair.clock.advance(1)
        self.assertTrue(pair.has_ended(pair.server))

    def test_idle(self) -> None:
        """A connection that is not used is closed, by its client at first."""
        self.assertLess(CLIENT_IDLE_TIMEOUT, SERVER_IDLE_TIMEOUT)
        pair = Pair(self)
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
    """Who may have a connection with the node-to-node listener."""

    def setUp(self) -> None:
        self.server = PeerServer(Clock(), KEYS, "bbbb", lambda body: Deferred(), lambda reason: None)

    def reserve(self, origin: str = "10.0.0.1") -> PeerServerConnection | None:
        """One more, if it may."""
        address: Any = IPv4Address("TCP", origin, 1) if origin else UNIXAddress(b"")
        connection: PeerServerConnection | None = self.server.buildProtocol(address)
        if connection is not None:
            connection.abort = lambda: self.ended.append(connection)  # type: ignore[method-assign]
        return connection

    def come(self, count: int = 1, origin: str = "10.0.0.1") -> list[PeerServerConnection]:
        """So many from one address."""
        self.ended: list[PeerServerConnection] = getattr(self, "ended", [])
        callers = [self.reserve(origin) for _ in range(count)]
        return [caller for caller in callers if caller is not None or self.fail("refused")]

    def fill(self) -> list[PeerServerConnection]:
        """All places of strangers, each from an address of its own."""
        return [self.come(origin=f"10.0.0.{number}")[0] for number in range(MAX_UNAUTHENTICATED)]

    def test_full(self) -> None:
        """Who comes has a place; the oldest gives its own up."""
        strangers = self.fill()
        self.come(2, origin="10.0.1.1")
        self.assertEqual(self.ended, strangers[:2])
        self.assertEqual(len(self.server), MAX_UNAUTHENTICATED)

    def test_one_address(self) -> None:
        """It takes no place of others, however often it comes."""
        (other,) = self.come(origin="10.0.1.1")
        strangers = self.come(MAX_UNAUTHENTICATED_PER_ADDRESS + 1)
        self.assertEqual(self.ended, strangers[:1])
        self.come(MAX_UNAUTHENTICATED)
        self.assertNotIn(other, self.ended)
        self.assertEqual(len(self.server), 1 + MAX_UNAUTHENTICATED_PER_ADDRESS)

    def test_no_address(self) -> None:
        """On a UNIX socket all are from nowhere."""
        self.come(MAX_UNAUTHENTICATED, origin="")
        self.assertEqual(len(self.server), MAX_UNAUTHENTICATED)

    def test_speaking(self) -> None:
        """Who waits for an answer keeps its place; when all do there is none."""
        strangers = self.fill()
        for one in strangers:
            one._serving = Deferred()
        self.assertIsNone(self.reserve("10.0.1.1"))
        strangers[7]._serving = None
        self.come(origin="10.0.1.1")
        self.assertEqual(self.ended, [strangers[7]])

    def test_nodes(self) -> None:
        """Take no place of strangers, and are not ended for them; they are counted as well."""
        nodes = self.come(MAX_UNAUTHENTICATED_PER_ADDRESS)
        for node in nodes:
            self.server.mark_authenticated(node)
            self.server.mark_authenticated(node)
        self.come(MAX_UNAUTHENTICATED_PER_ADDRESS)
        self.fill()
        self.assertFalse(set(nodes) & set(self.ended))
        self.assertEqual(len(self.server), MAX_UNAUTHENTICATED_PER_ADDRESS + MAX_UNAUTHENTICATED)
        for node in nodes:
            self.server.remove(node)
        self.assertEqual(len(self.server), MAX_UNAUTHENTICATED)

    def test_too_many_nodes(self) -> None:
        """What is over the limit stays a stranger, which may have to go."""
        for number in range(MAX_AUTHENTICATED):
            (node,) = self.come(origin=f"node {number}")
            self.server.mark_authenticated(node)
        (late,) = self.come()
        self.server.mark_authenticated(late)
        self.fill()
        self.assertIn(late, self.ended)
        self.assertEqual(len(self.server), MAX_AUTHENTICATED + MAX_UNAUTHENTICATED)

    def test_next_node(self) -> None:
        """The first node that found no place takes the one that another gives up."""
        nodes = []
        for number in range(MAX_AUTHENTICATED + 2):
            nodes += self.come(origin=f"node {number}")
            nodes[-1].is_authenticated = True
            self.server.mark_authenticated(nodes[-1])
        self.server.remove(nodes[0])
        self.fill()
        self.assertEqual(self.ended, nodes[-1:])

    def test_late(self) -> None:
        """Who has given up its place is no node any more."""
        (caller,) = self.come()
        self.server.remove(caller)
        self.server.mark_authenticated(caller)
        self.assertEqual(len(self.server), 0)


class OriginTests(SynchronousTestCase):
    def test_ipv4(self) -> None:
        """Each address, however it is written."""
        self.assertEqual(normalize_address("10.0.0.1"), "10.0.0.1")
        self.assertEqual(normalize_address("::ffff:10.0.0.1"), "10.0.0.1")

    def test_ipv6(self) -> None:
        """A network of 64 bits is one customer's."""
        self.assertEqual(normalize_address("2001:db8:1:2::1"), normalize_address("2001:db8:1:2:ffff::"))
        self.assertNotEqual(normalize_address("2001:db8:1:2::1"), normalize_address("2001:db8:1:3::1"))
        self.assertEqual(normalize_address("fe80::1%eth0"), normalize_address("fe80::2%eth0"))

    def test_none(self) -> None:
        """On a UNIX socket."""
        self.assertEqual(normalize_address(""), "")


class RawPeer(Protocol):
    """A connection of somebody who knows nothing."""

    def __init__(self) -> None:
        self.got = b""
        self.gone: Deferred[None] = Deferred()

    def dataReceived(self, data: bytes) -> None:
        """Keep it."""
        self.got += data

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        """They have hung up."""
        self.gone.callback(None)

    def say(self, data: bytes) -> None:
        """Send something."""
        self.transport.write(data)  # type: ignore[union-attr]  # it is connected


class WireTestCase(TestCase):
    """A node that answers, on TCP and on a UNIX socket."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        self.directory = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.directory)
        self.addCleanup(self.all_closed)
        self.callers: list[PeerClient] = []
        self.refusals: list[str] = []
        self.bodies: list[bytes] = []
        self.use: Callable[[bytes], Coroutine[Any, Any, bytes]] = self.echo
        self.clock = Clock()
        self.server = PeerServer(self.clock, KEYS, "bbbb", lambda body: self.use(body), self.refusals.append)
        port = await self.listen("tcp:0:interface=127.0.0.1")
        self.port = port.getHost().port
        self.bea = ClusterNode("bea", "bbbb", f"tcp:host=127.0.0.1:port={self.port}", KEYS.seal)
        self.calling = self.caller(KEYS)

    async def listen(self, endpoint: str) -> Any:
        """Serve there as well."""
        port = await serverFromString(reactor, endpoint).listen(self.server)
        self.addCleanup(port.stopListening)
        return port

    def caller(self, keys: Any, **options: Any) -> PeerClient:
        """Another node, which is in no hurry unless it is told to be."""
        calling = PeerClient(reactor, keys, **{"timeout": 60.0, **options})
        self.callers.append(calling)
        self.addCleanup(calling.close)
        return calling

    async def all_closed(self) -> None:
        """Nobody is connected any more."""
        while len(self.server) or any(calling._idle for calling in self.callers):
            await self.turn()

    async def echo(self, body: bytes) -> bytes:
        """The body, noted."""
        self.bodies.append(body)
        return body

    async def stranger(self, options: str = "") -> RawPeer:
        """Somebody connects. :param options: of the endpoint."""
        endpoint = clientFromString(reactor, self.bea.address + options)
        found = RawPeer()
        connected: Any = await connectProtocol(endpoint, found)
        self.addCleanup(connected.transport.abortConnection)
        return found

    async def turn(self) -> None:
        """Let the reactor look at its sockets."""
        turned: Deferred[None] = Deferred()
        reactor.callLater(0.005, turned.callback, None)
        await turned

    async def failure(self, kind: type[Exception], calling: PeerClient, node: ClusterNode) -> None:
        """A request has to fail in exactly this way."""
        with self.assertRaises(PeerCallFailed) as caught:
            await calling.call(node, b"{}")
        self.assertIs(type(caught.exception), kind)


class PeerClientTests(WireTestCase):
    async def test_ask(self) -> None:
        """A body there and one back; the connection is kept for the next one."""
        for number in range(3):
            body = b'{"n":%d}' % number
            self.assertEqual(await self.calling.call(self.bea, body), body)
        self.assertEqual(len(self.server), 1)
        self.assertEqual(self.refusals, [])

    async def test_unix(self) -> None:
        """Processes of one host need no TCP."""
        path = self.directory / "node.sock"
        await self.listen(f"unix:{path}")
        bea = ClusterNode("bea", "bbbb", f"unix:{path}", KEYS.seal)
        self.assertEqual(await self.calling.call(bea, b"{}"), b"{}")
        self.assertEqual(await self.calling.probe(bea), "bbbb")

    async def test_largest(self) -> None:
        """As long as may be, both ways; what is longer is cut off."""
        body = b"x" * MAX_BODY_BYTES
        self.assertEqual(await self.calling.call(self.bea, body), body)
        with self.assertRaises(PeerCallFailed):
            await self.calling.call(self.bea, body + b"x")

    async def test_long_answer(self) -> None:
        """What is longer is no answer."""

        async def talkative(body: bytes) -> bytes:
            return b"x" * (MAX_BODY_BYTES + 1)

        self.use = talkative
        await self.failure(PeerCallFailed, self.calling, self.bea)

    async def test_probe(self) -> None:
        """Which node is where one said it is: that one, another one, or none that we know for one."""
        self.assertEqual(await self.calling.probe(self.bea), "bbbb")
        other = ClusterNode("bea", "dead", self.bea.address, KEYS.seal)
        self.assertEqual(await self.calling.probe(other), "bbbb")
        self.assertIsNone(await self.caller(OTHER_KEYS).probe(self.bea))
        for number, address in enumerate(
            ("tcp:host=127.0.0.1:port=1", f"unix:{self.directory}/none.sock", "nonsense", "tcp:host=127.0.0.1")
        ):
            self.assertIsNone(await self.calling.probe(ClusterNode("bea", f"b{number}", address, KEYS.seal)))
        self.assertEqual(self.bodies, [])

    async def test_nobody_listens(self) -> None:
        """That is known at once."""
        for number, address in enumerate(("tcp:host=127.0.0.1:port=1", f"unix:{self.directory}/none.sock")):
            await self.failure(PeerCallFailed, self.calling, ClusterNode("bea", f"b{number}", address, KEYS.seal))

    async def test_another_boot(self) -> None:
        """A request for a node that was there before: its address may be forgotten."""
        await self.failure(PeerReplaced, self.calling, ClusterNode("bea", "dead", self.bea.address, KEYS.seal))
        self.assertEqual(self.bodies, [])

    async def test_another_secret(self) -> None:
        """Refused, and nothing was done."""
        await self.failure(PeerCallRejected, self.caller(OTHER_KEYS), self.bea)
        self.assertEqual((self.bodies, self.refusals), ([], ["seal"]))

    async def test_server_that_hangs_up(self) -> None:
        """The next request has a connection of its own."""
        await self.calling.call(self.bea, b"{}")
        self.server.stopFactory()
        while self.calling._idle:
            await self.turn()
        self.assertEqual(await self.calling.call(self.bea, b"{}"), b"{}")

    async def test_closed(self) -> None:
        """What is under way is given up, its connection too, and nothing begins any more."""
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
            await self.turn()
        await self.failure(PeerCallFailed, self.calling, self.bea)
        self.assertIsNone(await self.calling.probe(self.bea))
        self.assertEqual(len(self.server), 0)

    async def test_no_answer(self) -> None:
        """After the timeout it has failed, and the connection is not used again."""
        never: Deferred[bytes] = Deferred()

        async def silent(body: bytes) -> bytes:
            return await never

        self.use = silent
        await self.failure(PeerCallFailed, self.caller(KEYS, timeout=0.1), self.bea)
        self.use = self.echo
        self.assertEqual(await self.calling.call(self.bea, b"{}"), b"{}")

    async def test_what_the_other_side_says_no_to(self) -> None:
        """Bodies that are none, a store that is away: it failed, and may be tried again."""

        async def not_understood(body: bytes) -> bytes:
            raise ValueError("none")

        async def away(body: bytes) -> bytes:
            raise StoreUnavailable

        for self.use in (not_understood, away):
            await self.failure(PeerCallFailed, self.calling, self.bea)
        self.assertEqual((self.refusals, len(self.server)), ([], 1))

    async def test_too_much_at_once(self) -> None:
        """What is more than can be served now is refused for now."""
        held: list[Deferred[bytes]] = []

        async def slow(body: bytes) -> bytes:
            held.append(Deferred())
            return await held[-1]

        self.use = slow
        work = [self.calling.call(self.bea, b"{}") for _ in range(MAX_CONCURRENT_REQUESTS + 1)]
        refused, _ = await DeferredList([one.addErrback(lambda failure: failure.type) for one in work], True)
        self.assertIs(refused, PeerCallFailed)
        self.assertEqual(len(held), MAX_CONCURRENT_REQUESTS)
        for one in held:
            one.callback(b"{}")
        self.assertEqual(sum(answer == b"{}" for _, answer in await DeferredList(work)), MAX_CONCURRENT_REQUESTS)

    async def test_fault(self) -> None:
        """A mistake of ours is logged there, and a failure here."""

        async def broken(body: bytes) -> bytes:
            raise RuntimeError("boom")

        self.use = broken
        await self.failure(PeerCallFailed, self.calling, self.bea)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)


class UnauthenticatedPeerTests(WireTestCase):
    async def test_refused(self) -> None:
        """An empty frame, and the connection is closed."""
        stranger = await self.stranger()
        stranger.say(b"POST /cluster/hints HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        await stranger.gone
        self.assertEqual((stranger.got, self.refusals, self.bodies), (frame(b""), ["malformed"], []))

    async def test_fault_before_the_proof(self) -> None:
        """A mistake of ours is no way in: it ends the connection."""
        self.patch(PeerServerConnection, "hello_received", lambda *args: 1 // 0)
        stranger = await self.stranger()
        stranger.say(frame(HELLO))
        await stranger.gone
        self.assertEqual((stranger.got, len(self.flushLoggedErrors(ZeroDivisionError))), (b"", 1))

    async def test_strangers_keep_no_node_out(self) -> None:
        """However many hold connections open, from however many addresses: a node that comes is served, and stays."""
        await self.calling.call(self.bea, b"{}")
        self.patch(peer_connection, "MAX_UNAUTHENTICATED", 4)
        self.patch(peer_connection, "MAX_UNAUTHENTICATED_PER_ADDRESS", 2)
        strangers = [await self.stranger() for _ in range(3)]
        await strangers[0].gone
        strangers += [await self.stranger(f":bindAddress=127.0.0.{number}") for number in (2, 2, 3, 3)]
        await strangers[1].gone
        await strangers[2].gone
        self.assertEqual(await self.caller(KEYS).call(self.bea, b"{}"), b"{}")
        await strangers[3].gone
        for _ in range(8):
            await self.stranger()
        self.assertEqual(await self.calling.call(self.bea, b"{}"), b"{}")
        self.assertEqual([len(self.server), len(self.bodies)], [2 + 2 + 2, 3])

    async def test_stops(self) -> None:
        """When nobody listens any more, open connections end as well."""
        stranger = await self.stranger()
        while not len(self.server):
            await self.turn()
        self.server.doStop()
        await stranger.gone
        self.server.doStart()
