"""A connection that has spent its quantum loses nothing, whatever it becomes or does meanwhile."""

from __future__ import annotations

import shutil
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  what a kernel does with a connection is the subject
from twisted.internet.defer import Deferred
from twisted.internet.protocol import ClientFactory, Protocol
from twisted.internet.ssl import CertificateOptions
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase

from mediatord.net.listeners import Listener
from mediatord.ratelimit.admission import RequestReply
from mediatord.ratelimit.rate_limiter import RateLimits
from tests.certificate_authority import CertificateAuthority
from tests.http.fake_protocols import FakeDecentrl
from tests.http.in_memory_site import (
    PING,
    PONG,
    InMemorySite,
    InMemoryTransport,
    encode_masked_frame,
    encode_request,
    parse_responses,
)
from tests.http.test_websocket import OPENING, PLENTY
from tests.in_memory_mediator import PEER

LOCAL = "127.0.0.1"
JSON = {"Content-Type": "application/json"}
COMMAND = encode_request("POST", "/", b"{}", JSON)
# The same on the general path.
DETOUR = encode_request("POST", "/", b"{}", {**JSON, "X-Anything": "1"})
HEALTH = encode_request("GET", "/health")
CHUNKED = (
    encode_request("POST", "/", None, {**JSON, "Transfer-Encoding": "chunked"}) + b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n"
)
LONG_CHUNKS = (
    encode_request("POST", "/", None, {**JSON, "Transfer-Encoding": "chunked"})
    + b"3e8\r\n%b\r\n" % (b" " * 1000) * 40
) + b"0\r\n\r\n"
PROXY_LINE = b"PROXY TCP4 192.0.2.1 192.0.2.2 50000 443\r\n"
FRAMES = encode_masked_frame(b"first") + encode_masked_frame(b"second") + encode_masked_frame(b"third")
MESSAGES = [b"first", b"second", b"third"]


def padded(size: int) -> bytes:
    """A request of so many bytes, all of them head."""
    shortest = len(encode_request("GET", "/health", None, {"X-Pad": ""}))
    return encode_request("GET", "/health", None, {"X-Pad": "x" * (size - shortest)})


class UpgradeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.decentrl = FakeDecentrl()
        self.site_fixture = InMemorySite(self, fake_decentrl=self.decentrl, limits=PLENTY)

    def told(self, segments: list[bytes], *, at_once: bool) -> tuple[int, list[bytes]]:
        """
        Answers to the requests that the segments begin with, and messages of the socket that they end with.

        :param at_once: give the segments to the connection though it reads no more, as TLS does.
        """
        line = self.site_fixture.line()
        for segment in segments:
            if at_once:
                line.protocol.dataReceived(segment)
            else:
                line.feed(segment)
        self.site_fixture.settle()
        got = line.taken()
        self.assertEqual(line.producerState, "producing")
        (socket,) = self.decentrl.sockets
        self.decentrl.sockets.clear()
        line.hang_up()
        self.site_fixture.settle()
        self.assertEqual(len(self.site_fixture.site.scheduler), 0)
        before = got.partition(b"HTTP/1.1 101 ")[0]
        return len(parse_responses(before)), [one[0] for one in socket.calls if isinstance(one, tuple)]

    def check(self, name: str, number: int, data: bytes, cuts: Any) -> None:
        """Wherever the segments are cut."""
        for at_once in (False, True):
            for cut in cuts:
                with self.subTest(name, cut=cut, at_once=at_once):
                    found = self.told([data[:cut], data[cut:]], at_once=at_once)
                    self.assertEqual(found, (number, MESSAGES))

    def test_behind_requests(self) -> None:
        """Requests that spend the quantum, a handshake, and frames right behind it: all are served, in order."""
        for name, request, number in (
            ("commands", COMMAND, 17),
            ("general path", DETOUR, 5),
            ("chunked bodies", CHUNKED, 5),
            ("mixed", COMMAND * 8 + HEALTH * 2 + CHUNKED, 1),
        ):
            data = request * number + OPENING + FRAMES
            end = len(data) - len(OPENING + FRAMES)
            cuts = {
                *range(0, end, 53),
                *range(end - 30, len(data), 3),
                *range(len(data) - len(FRAMES) - 5, len(data)),
            }
            self.check(name, 11 if name == "mixed" else number, data, sorted(cuts))

    def test_behind_a_piece(self) -> None:
        """Where what is read in one go ends within the handshake or the frames."""
        for size in range(16_384 - len(OPENING + FRAMES) - 3, 16_384 - len(OPENING) + 60, 2):
            data = padded(size - 800 if size > 16_300 else size)
            data += b"" if len(data) == size else padded(size - len(data))
            data += OPENING + FRAMES
            for at_once in (False, True):
                with self.subTest(size, at_once=at_once):
                    number = data.count(b"GET /health")
                    self.assertEqual(self.told([data], at_once=at_once), (number, MESSAGES))

    def test_many_frames(self) -> None:
        """More than is read in one go, and more than a quantum of messages: none is lost, none overtakes another."""
        wanted = [b"%d" % number for number in range(4000)]
        data = HEALTH * 3 + OPENING + b"".join(map(encode_masked_frame, wanted))
        for at_once in (False, True):
            self.assertEqual(self.told([data], at_once=at_once), (3, wanted))

    def test_behind_a_request_that_waits(self) -> None:
        """What came while a request before waits for the store is for the socket."""
        for request in (COMMAND, DETOUR, CHUNKED):
            for at_once in (False, True):
                for cut in range(len(request) - 3, len(request + OPENING + FRAMES), 5):
                    late: Deferred[RequestReply] = Deferred()
                    self.decentrl.answer = partial(_wait_for, late)
                    line = self.site_fixture.line()
                    data = request + OPENING + FRAMES
                    for segment in (data[:cut], data[cut:]):
                        line.protocol.dataReceived(segment) if at_once else line.feed(segment)
                    self.site_fixture.settle()
                    self.assertEqual(self.decentrl.sockets, [])
                    late.callback(RequestReply(200, b"{}"))
                    self.site_fixture.settle()
                    (socket,) = self.decentrl.sockets
                    self.decentrl.sockets.clear()
                    self.assertEqual([one[0] for one in socket.calls if isinstance(one, tuple)], MESSAGES)
                    line.hang_up()

    def test_long_bodies(self) -> None:
        """A chunked body of several pieces, and requests behind it."""
        for number in (1, 3):
            data = LONG_CHUNKS * number + HEALTH * 3
            for at_once in (False, True):
                line = self.site_fixture.line()
                give = line.protocol.dataReceived if at_once else line.feed
                for cut in range(0, len(data), 9000):
                    give(data[cut : cut + 9000])
                self.site_fixture.settle()
                self.assertEqual([one.status for one in parse_responses(line.taken())], [200] * (number + 3))
                line.hang_up()


class LossTests(SynchronousTestCase):
    """What is left of a connection that breaks while it waits for a quantum: nothing."""

    def setUp(self) -> None:
        self.decentrl = FakeDecentrl()
        self.site_fixture = InMemorySite(self, fake_decentrl=self.decentrl, limits=PLENTY)

    def broken(self, first: bytes, data: bytes) -> InMemoryTransport:
        """A connection that is suspended, and breaks."""
        line = self.site_fixture.line()
        if first:
            line.feed(first)
            self.site_fixture.settle()
        line.protocol.dataReceived(data)
        self.assertEqual(line.producerState, "paused")
        self.assertEqual(len(self.site_fixture.site.scheduler), 1)
        line.hang_up(cleanly=False)
        return line

    def test_nothing_is_left(self) -> None:
        """No bytes, no place in the queue of the scheduler, none among the connections of the address."""
        site = self.site_fixture.site
        for first, data in (
            (b"", COMMAND * 500),
            (b"", HEALTH * 500),
            (b"", CHUNKED * 500),
            (OPENING, encode_masked_frame(b"", PING) * 900),
            (OPENING, encode_masked_frame(b"x") * 900),
            (HEALTH * 3 + OPENING, encode_masked_frame(b"x") * 900),
        ):
            with self.subTest(first=first[:20], data=data[:20]):
                line = self.broken(first, data)
                served = len(self.decentrl.received), len(line.value())
                self.assertEqual((len(site.scheduler), site._per_host, len(site.reading)), (0, {}, 0))
                self.site_fixture.settle()
                self.assertEqual((len(self.decentrl.received), len(line.value())), served)
                self.assertEqual(site.read_ahead(), (0, 0))
                self.assertEqual(len(self.site_fixture.base.connections), 0)
                self.assertEqual(self.held("socket_inboxes"), (0, 0))
                self.assertEqual(self.held("socket_outboxes"), (0, 0))
                for kept in ("_ahead", "_unparsed", "_buffer", "_partial", "_dataBuffer"):
                    self.assertFalse(getattr(line.protocol, kept, b""))
        self.assertEqual(self.site_fixture.counter("mediator_active_connections"), 0)

    def held(self, buffer: str) -> tuple[float, float]:
        """What the gauges of a buffer say."""
        return tuple(  # type: ignore[return-value]
            self.site_fixture.counter(f"mediator_buffer_{kind}", buffer=buffer) for kind in ("entries", "bytes")
        )

    def test_flooded_while_the_answer_is_not_read(self) -> None:
        """Nothing more is served on a connection that was turned away, and it ends once its answers are read."""
        self.site_fixture.base.rate_limiter.set_limits(RateLimits(1, 1, 1))
        self.decentrl.answer = lambda body: _reply(b"x" * 100)
        line = self.site_fixture.line(PEER)
        line.stuck = True
        line.feed(COMMAND * 1001)
        self.site_fixture.settle()
        for _ in range(20):
            line.unstick()
            line.stuck = True
            self.site_fixture.settle()
            if line.disconnecting:
                break
        self.assertTrue(line.disconnecting)
        served = len(self.decentrl.received)
        turned_away = self.site_fixture.counter("mediator_rejections_total", reason="rate_limited")
        for _ in range(5):
            line.protocol.dataReceived(COMMAND)
        self.site_fixture.settle()
        self.assertEqual(len(self.decentrl.received), served)
        self.assertEqual(self.site_fixture.counter("mediator_rejections_total", reason="rate_limited"), turned_away)
        line.unstick()
        self.site_fixture.settle()
        self.assertTrue(line.lost)


def _wait_for(late: Deferred[RequestReply], _body: bytes) -> Deferred[RequestReply]:
    return late


async def _reply(body: bytes) -> RequestReply:
    return RequestReply(200, body)


class Client(Protocol):
    """
    A client.

    :ivar over: what it got, once the connection is closed.
    """

    def __init__(self) -> None:
        self.got = b""
        self.made: Deferred[Client] = Deferred()
        self.over: Deferred[bytes] = Deferred()
        self._wanted = (b"", 0)
        self._found: Deferred[bytes] = Deferred()

    def connectionMade(self) -> None:
        """It may send."""
        self.made.callback(self)

    def found(self, what: bytes, number: int) -> Deferred[bytes]:
        """What it got, once that contains something so many times."""
        self._wanted = what, number
        self._look()
        return self._found

    def _look(self) -> None:
        what, number = self._wanted
        if number and not self._found.called and self.got.count(what) >= number:
            self._found.callback(self.got)

    def dataReceived(self, data: bytes) -> None:
        self.got += data
        self._look()

    def connectionLost(self, reason: Failure | None = None) -> None:
        """All is there."""
        self.over.callback(self.got)


class KernelTests(TestCase):
    """On real sockets."""

    timeout = 120

    def setUp(self) -> None:
        self.reactor: Any = _reactor
        self.decentrl = FakeDecentrl()
        self.site_fixture = InMemorySite(self, fake_decentrl=self.decentrl, limits=PLENTY)
        scheduler = self.site_fixture.site.scheduler
        scheduler._clock, scheduler._steady = self.reactor, perf_counter

    def listen(self, *, tls: bool, proxied: bool = False) -> int:
        """The port of a listener."""
        endpoint = f"{'haproxy:' if proxied else ''}tcp:0:interface={LOCAL}"
        if tls:
            directory = Path(tempfile.mkdtemp())
            self.addCleanup(shutil.rmtree, directory)
            both = CertificateAuthority(directory).issue("here", [LOCAL])
            endpoint = f"ssl:0:privateKey={both}:certKey={both}:interface={LOCAL}"
        listener = Listener(endpoint, self.site_fixture.site, self.reactor)
        listener.privilegedStartService()
        listener.startService()
        self.addCleanup(listener.stopService)
        port: int = listener.address.port
        return port

    async def connect(self, port: int, *, tls: bool) -> Client:
        """A client that is connected."""
        client = Client()
        factory = ClientFactory.forProtocol(lambda: client)
        factory.noisy = False
        if tls:
            self.reactor.connectSSL(LOCAL, port, factory, CertificateOptions())
        else:
            self.reactor.connectTCP(LOCAL, port, factory)
        await client.made
        wire: Any = client.transport
        self.addCleanup(lambda: None if client.over.called else wire.abortConnection())
        return client

    async def test_upgrade(self) -> None:
        """Requests, a handshake and frames in one go are served in turn, and nothing of it is lost."""
        numbers = [b"%d" % number for number in range(500)]
        pings = b"".join(encode_masked_frame(one, PING) for one in numbers)
        pongs = b"".join(bytes([0x80 | PONG, len(one)]) + one for one in numbers)
        for tls in (False, True):
            port = self.listen(tls=tls)
            for requests, number in ((COMMAND * 300, 300), (HEALTH * 50, 50), (CHUNKED * 50 + COMMAND * 9, 59)):
                client = await self.connect(port, tls=tls)
                wire: Any = client.transport
                wire.write(requests + OPENING + pings)
                got = await client.found(pongs[-30:], 1)
                before, _, after = got.partition(b"HTTP/1.1 101 ")
                self.assertEqual(len(parse_responses(before)), number)
                self.assertEqual(after.partition(b"\r\n\r\n")[2], pongs)
                wire.abortConnection()
                await client.over
        await self.closed()

    async def test_address_behind_the_proxy_protocol(self) -> None:
        """Each client is charged by its own address, whoever parses its request."""
        port = self.listen(tls=False, proxied=True)
        for request in (COMMAND, DETOUR):
            client = await self.connect(port, tls=False)
            wire: Any = client.transport
            wire.write(PROXY_LINE + request)
            wire.loseWriteConnection()
            await client.over
        self.assertEqual([peer for _, peer in self.decentrl.received], ["192.0.2.1"] * 2)

    async def test_half_closed(self) -> None:
        """Who sends requests and says that no more will come gets all answers, then the connection is closed."""
        ports = {b"": self.listen(tls=False), PROXY_LINE: self.listen(tls=False, proxied=True)}
        for request, number in ((COMMAND, 1), (COMMAND, 300), (HEALTH, 1), (HEALTH, 50), (CHUNKED, 50)):
            for first, port in ports.items():
                client = await self.connect(port, tls=False)
                wire: Any = client.transport
                wire.write(first + request * number)
                wire.loseWriteConnection()
                with self.subTest(request=request[:30], number=number, first=first):
                    self.assertEqual(len(parse_responses(await client.over)), number)

    async def test_half_closed_while_one_waits(self) -> None:
        """Also the answer that is made only after that."""
        channels: list[Any] = []
        build = self.site_fixture.site.buildProtocol

        def build_noted(address: object) -> Any:
            channels.append(build(address))
            return channels[-1]

        self.patch(self.site_fixture.site, "buildProtocol", build_noted)
        port = self.listen(tls=False)
        for request in (COMMAND, DETOUR):
            late: Deferred[RequestReply] = Deferred()

            self.decentrl.answer = partial(_wait_for, late)
            client = await self.connect(port, tls=False)
            wire: Any = client.transport
            wire.write(request)
            wire.loseWriteConnection()
            while not (channels and channels[-1]._half_closed):
                await deferLater(self.reactor, 0.01)
            late.callback(RequestReply(200, b"{}"))
            self.assertEqual([one.status for one in parse_responses(await client.over)], [200])
        await self.closed()

    async def closed(self) -> None:
        """Return when the daemon has no connection any more, nor a WebSocket."""
        while self.site_fixture.site._per_host or len(self.site_fixture.base.connections):
            await deferLater(self.reactor, 0.01)

    async def test_flooded(self) -> None:
        """A client that is turned away is told so, and its connection closed, also behind TLS."""
        for tls in (False, True):
            self.site_fixture.base.rate_limiter.set_limits(RateLimits(1, 1, 1))
            port = self.listen(tls=tls)
            for requests in (COMMAND * 1200, HEALTH * 1200):
                client = await self.connect(port, tls=tls)
                wire: Any = client.transport
                wire.write(requests)
                self.assertEqual(parse_responses(await client.over)[-1].status, 429)
                await self.closed()
