"""A connection whose quantum is used up loses nothing, whatever happens to it meanwhile."""

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
from tests.http.test_websocket import HIGH_LIMITS, OPENING
from tests.in_memory_mediator import PEER

LOCAL = "127.0.0.1"
JSON = {"Content-Type": "application/json"}
COMMAND = encode_request("POST", "/", b"{}", JSON)
# The same request on the general path.
GENERAL_PATH_HEADERS = encode_request("POST", "/", b"{}", {**JSON, "X-Anything": "1"})
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


def request_of_size(size: int) -> bytes:
    """Encode a request of `size` bytes, all of them head."""
    shortest = len(encode_request("GET", "/health", None, {"X-Pad": ""}))
    return encode_request("GET", "/health", None, {"X-Pad": "x" * (size - shortest)})


class UpgradeTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.decentrl = FakeDecentrl()
        self.site_fixture = InMemorySite(self, fake_decentrl=self.decentrl, limits=HIGH_LIMITS)

    def exchange_segments(self, segments: list[bytes], *, at_once: bool) -> tuple[int, list[bytes]]:
        """
        Return the number of responses and the socket messages from the segments.

        :param at_once: deliver the segments although the transport is paused, as TLS does.
        """
        transport = self.site_fixture.connect()
        for segment in segments:
            if at_once:
                transport.protocol.dataReceived(segment)
            else:
                transport.feed(segment)
        self.site_fixture.run_due_calls()
        output = transport.take_output()
        self.assertEqual(transport.producerState, "producing")
        (socket,) = self.decentrl.sockets
        self.decentrl.sockets.clear()
        transport.disconnect()
        self.site_fixture.run_due_calls()
        self.assertEqual(len(self.site_fixture.site.scheduler), 0)
        before = output.partition(b"HTTP/1.1 101 ")[0]
        return len(parse_responses(before)), [call[0] for call in socket.calls if isinstance(call, tuple)]

    def check_cuts(self, name: str, number: int, data: bytes, cuts: Any) -> None:
        """Check all cuts of the data."""
        for at_once in (False, True):
            for cut in cuts:
                with self.subTest(name, cut=cut, at_once=at_once):
                    found = self.exchange_segments([data[:cut], data[cut:]], at_once=at_once)
                    self.assertEqual(found, (number, MESSAGES))

    def test_handshake_behind_requests(self) -> None:
        """Requests that use up the quantum, a handshake and frames right behind it are all served in order."""
        for name, request, number in (
            ("commands", COMMAND, 17),
            ("general path", GENERAL_PATH_HEADERS, 5),
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
            self.check_cuts(name, 11 if name == "mixed" else number, data, sorted(cuts))

    def test_handshake_across_reads(self) -> None:
        """A read may end within the handshake or the frames."""
        for size in range(16_384 - len(OPENING + FRAMES) - 3, 16_384 - len(OPENING) + 60, 2):
            data = request_of_size(size - 800 if size > 16_300 else size)
            data += b"" if len(data) == size else request_of_size(size - len(data))
            data += OPENING + FRAMES
            for at_once in (False, True):
                with self.subTest(size, at_once=at_once):
                    number = data.count(b"GET /health")
                    self.assertEqual(self.exchange_segments([data], at_once=at_once), (number, MESSAGES))

    def test_many_frames(self) -> None:
        """Frames beyond one read and one quantum are all served, in order."""
        wanted = [b"%d" % number for number in range(4000)]
        data = HEALTH * 3 + OPENING + b"".join(map(encode_masked_frame, wanted))
        for at_once in (False, True):
            self.assertEqual(self.exchange_segments([data], at_once=at_once), (3, wanted))

    def test_handshake_behind_waiting_request(self) -> None:
        """Frames that arrive while the request before waits for the store reach the socket."""
        for request in (COMMAND, GENERAL_PATH_HEADERS, CHUNKED):
            for at_once in (False, True):
                for cut in range(len(request) - 3, len(request + OPENING + FRAMES), 5):
                    pending_reply: Deferred[RequestReply] = Deferred()
                    self.decentrl.answer = partial(_reply_after, pending_reply)
                    transport = self.site_fixture.connect()
                    data = request + OPENING + FRAMES
                    for segment in (data[:cut], data[cut:]):
                        transport.protocol.dataReceived(segment) if at_once else transport.feed(segment)
                    self.site_fixture.run_due_calls()
                    self.assertEqual(self.decentrl.sockets, [])
                    pending_reply.callback(RequestReply(200, b"{}"))
                    self.site_fixture.run_due_calls()
                    (socket,) = self.decentrl.sockets
                    self.decentrl.sockets.clear()
                    self.assertEqual([call[0] for call in socket.calls if isinstance(call, tuple)], MESSAGES)
                    transport.disconnect()

    def test_chunked_bodies(self) -> None:
        """Chunked bodies in several segments, with requests behind them."""
        for number in (1, 3):
            data = LONG_CHUNKS * number + HEALTH * 3
            for at_once in (False, True):
                transport = self.site_fixture.connect()
                feed = transport.protocol.dataReceived if at_once else transport.feed
                for cut in range(0, len(data), 9000):
                    feed(data[cut : cut + 9000])
                self.site_fixture.run_due_calls()
                self.assertEqual(
                    [response.status for response in parse_responses(transport.take_output())], [200] * (number + 3)
                )
                transport.disconnect()


class LossTests(SynchronousTestCase):
    """Nothing remains of a connection that is lost while suspended."""

    def setUp(self) -> None:
        self.decentrl = FakeDecentrl()
        self.site_fixture = InMemorySite(self, fake_decentrl=self.decentrl, limits=HIGH_LIMITS)

    def lose_suspended(self, first: bytes, data: bytes) -> InMemoryTransport:
        """Suspend a connection and lose it."""
        transport = self.site_fixture.connect()
        if first:
            transport.feed(first)
            self.site_fixture.run_due_calls()
        transport.protocol.dataReceived(data)
        self.assertEqual(transport.producerState, "paused")
        self.assertEqual(len(self.site_fixture.site.scheduler), 1)
        transport.disconnect(cleanly=False)
        return transport

    def test_nothing_remains(self) -> None:
        """No bytes, no entry in the scheduler, none among the connections of the address."""
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
                transport = self.lose_suspended(first, data)
                served = len(self.decentrl.received), len(transport.value())
                self.assertEqual((len(site.scheduler), site._per_host, len(site.reading)), (0, {}, 0))
                self.site_fixture.run_due_calls()
                self.assertEqual((len(self.decentrl.received), len(transport.value())), served)
                self.assertEqual(site.read_ahead(), (0, 0))
                self.assertEqual(len(self.site_fixture.base.connections), 0)
                self.assertEqual(self.buffer_gauges("socket_inboxes"), (0, 0))
                self.assertEqual(self.buffer_gauges("socket_outboxes"), (0, 0))
                for kept in ("_ahead", "_unparsed", "_buffer", "_partial", "_dataBuffer"):
                    self.assertFalse(getattr(transport.protocol, kept, b""))
        self.assertEqual(self.site_fixture.counter("mediator_active_connections"), 0)

    def buffer_gauges(self, buffer: str) -> tuple[float, float]:
        """Return the gauges of a buffer."""
        return tuple(  # type: ignore[return-value]
            self.site_fixture.counter(f"mediator_buffer_{kind}", buffer=buffer) for kind in ("entries", "bytes")
        )

    def test_flooding_connection_with_unread_response(self) -> None:
        """A refused connection is served no more, and closes once its responses are read."""
        self.site_fixture.base.rate_limiter.set_limits(RateLimits(1, 1, 1))
        self.decentrl.answer = lambda body: _reply(b"x" * 100)
        transport = self.site_fixture.connect(PEER)
        transport.peer_stalled = True
        transport.feed(COMMAND * 1001)
        self.site_fixture.run_due_calls()
        for _ in range(20):
            transport.resume_peer()
            transport.peer_stalled = True
            self.site_fixture.run_due_calls()
            if transport.disconnecting:
                break
        self.assertTrue(transport.disconnecting)
        served = len(self.decentrl.received)
        turned_away = self.site_fixture.counter("mediator_rejections_total", reason="rate_limited")
        for _ in range(5):
            transport.protocol.dataReceived(COMMAND)
        self.site_fixture.run_due_calls()
        self.assertEqual(len(self.decentrl.received), served)
        self.assertEqual(self.site_fixture.counter("mediator_rejections_total", reason="rate_limited"), turned_away)
        transport.resume_peer()
        self.site_fixture.run_due_calls()
        self.assertTrue(transport.lost)


def _reply_after(pending_reply: Deferred[RequestReply], _body: bytes) -> Deferred[RequestReply]:
    return pending_reply


async def _reply(body: bytes) -> RequestReply:
    return RequestReply(200, body)


class RecordingClient(Protocol):
    """
    Client that records what it receives.

    :ivar closed: fires with the received bytes when the connection is closed.
    """

    def __init__(self) -> None:
        self.got = b""
        self.made: Deferred[RecordingClient] = Deferred()
        self.closed: Deferred[bytes] = Deferred()
        self._wanted = (b"", 0)
        self._found: Deferred[bytes] = Deferred()

    def connectionMade(self) -> None:
        """Report the connection."""
        self.made.callback(self)

    def wait_for(self, what: bytes, number: int) -> Deferred[bytes]:
        """Fire when the received bytes contain `what` so many times."""
        self._wanted = what, number
        self._check_expectation()
        return self._found

    def _check_expectation(self) -> None:
        what, number = self._wanted
        if number and not self._found.called and self.got.count(what) >= number:
            self._found.callback(self.got)

    def dataReceived(self, data: bytes) -> None:
        self.got += data
        self._check_expectation()

    def connectionLost(self, reason: Failure | None = None) -> None:
        """Report the received bytes."""
        self.closed.callback(self.got)


class RealSocketTests(TestCase):
    """Behaviour of real sockets."""

    timeout = 120

    def setUp(self) -> None:
        self.reactor: Any = _reactor
        self.decentrl = FakeDecentrl()
        self.site_fixture = InMemorySite(self, fake_decentrl=self.decentrl, limits=HIGH_LIMITS)
        scheduler = self.site_fixture.site.scheduler
        scheduler._clock, scheduler._steady = self.reactor, perf_counter

    def listen(self, *, tls: bool, proxied: bool = False) -> int:
        """Listen and return the port."""
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

    async def connect(self, port: int, *, tls: bool) -> RecordingClient:
        """Connect a client."""
        client = RecordingClient()
        factory = ClientFactory.forProtocol(lambda: client)
        factory.noisy = False
        if tls:
            self.reactor.connectSSL(LOCAL, port, factory, CertificateOptions())
        else:
            self.reactor.connectTCP(LOCAL, port, factory)
        await client.made
        wire: Any = client.transport
        self.addCleanup(lambda: None if client.closed.called else wire.abortConnection())
        return client

    async def test_upgrade_behind_requests(self) -> None:
        """Requests, a handshake and frames in one segment are served in order."""
        numbers = [b"%d" % number for number in range(500)]
        pings = b"".join(encode_masked_frame(item, PING) for item in numbers)
        pongs = b"".join(bytes([0x80 | PONG, len(element)]) + element for element in numbers)
        for tls in (False, True):
            port = self.listen(tls=tls)
            for requests, number in ((COMMAND * 300, 300), (HEALTH * 50, 50), (CHUNKED * 50 + COMMAND * 9, 59)):
                client = await self.connect(port, tls=tls)
                wire: Any = client.transport
                wire.write(requests + OPENING + pings)
                output = await client.wait_for(pongs[-30:], 1)
                before, _, after = output.partition(b"HTTP/1.1 101 ")
                self.assertEqual(len(parse_responses(before)), number)
                self.assertEqual(after.partition(b"\r\n\r\n")[2], pongs)
                wire.abortConnection()
                await client.closed
        await self.all_closed()

    async def test_proxy_protocol_address_is_charged(self) -> None:
        """Each client is charged by its own address, on either path."""
        port = self.listen(tls=False, proxied=True)
        for request in (COMMAND, GENERAL_PATH_HEADERS):
            client = await self.connect(port, tls=False)
            wire: Any = client.transport
            wire.write(PROXY_LINE + request)
            wire.loseWriteConnection()
            await client.closed
        self.assertEqual([peer for _, peer in self.decentrl.received], ["192.0.2.1"] * 2)

    async def test_half_closed_connection(self) -> None:
        """A client that sends requests and closes its side gets all responses."""
        ports = {b"": self.listen(tls=False), PROXY_LINE: self.listen(tls=False, proxied=True)}
        for request, number in ((COMMAND, 1), (COMMAND, 300), (HEALTH, 1), (HEALTH, 50), (CHUNKED, 50)):
            for first, port in ports.items():
                client = await self.connect(port, tls=False)
                wire: Any = client.transport
                wire.write(first + request * number)
                wire.loseWriteConnection()
                with self.subTest(request=request[:30], number=number, first=first):
                    self.assertEqual(len(parse_responses(await client.closed)), number)

    async def test_half_closed_connection_with_waiting_request(self) -> None:
        """The response to a waiting request is sent too."""
        channels: list[Any] = []
        build = self.site_fixture.site.buildProtocol

        def build_recorded(address: object) -> Any:
            channels.append(build(address))
            return channels[-1]

        self.patch(self.site_fixture.site, "buildProtocol", build_recorded)
        port = self.listen(tls=False)
        for request in (COMMAND, GENERAL_PATH_HEADERS):
            pending_reply: Deferred[RequestReply] = Deferred()

            self.decentrl.answer = partial(_reply_after, pending_reply)
            client = await self.connect(port, tls=False)
            wire: Any = client.transport
            wire.write(request)
            wire.loseWriteConnection()
            while not (channels and channels[-1]._half_closed):
                await deferLater(self.reactor, 0.01)
            pending_reply.callback(RequestReply(200, b"{}"))
            self.assertEqual([response.status for response in parse_responses(await client.closed)], [200])
        await self.all_closed()

    async def all_closed(self) -> None:
        """Fire when the daemon has no connection or WebSocket any more."""
        while self.site_fixture.site._per_host or len(self.site_fixture.base.connections):
            await deferLater(self.reactor, 0.01)

    async def test_flooding_client_is_closed(self) -> None:
        """A refused client gets its refusal and is disconnected, also behind TLS."""
        for tls in (False, True):
            self.site_fixture.base.rate_limiter.set_limits(RateLimits(1, 1, 1))
            port = self.listen(tls=tls)
            for requests in (COMMAND * 1200, HEALTH * 1200):
                client = await self.connect(port, tls=tls)
                wire: Any = client.transport
                wire.write(requests)
                self.assertEqual(parse_responses(await client.closed)[-1].status, 429)
                await self.all_closed()
