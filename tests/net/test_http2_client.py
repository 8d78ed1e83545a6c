"""HTTP/2 over TLS on loopback, against a server that fails in every way (RFC 9113)."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from ipaddress import IPv4Network
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import PingAckReceived
from h2.settings import SettingCodes
from twisted.internet import reactor as _reactor  # noqa: TID251  sockets and TLS are the subject
from twisted.internet.defer import Deferred, gatherResults
from twisted.internet.ssl import Certificate
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock
from twisted.trial.unittest import SynchronousTestCase, TestCase
from twisted.web.server import Site

from mediatord.net import http2_connection
from mediatord.net.http2_client import HTTP2Client
from mediatord.net.http2_connection import GoAwayExtractor, HTTP2Connection, HTTP2Response
from mediatord.net.outbound_http import OutboundAddressError, OutboundError, OutboundHTTPClient, OutboundRequestError
from tests.certificate_authority import CertificateAuthority
from tests.net.clocked_reactor import ClockedReactor
from tests.net.http2_server import (
    ReceivedRequest,
    ScriptedServer,
    close_connection,
    go_away_after,
    go_away_before,
    hang,
    refuse,
    reset,
    respond,
    wrap_tls,
    write,
)
from tests.net.outbound_test_case import FakeResolver, FakeTransport

NAME = "api.push.example"
LOOPBACK = IPv4Network("127.0.0.0/8")


class NegotiatedTransport(FakeTransport):
    """Transport with which HTTP/2 was negotiated."""

    negotiatedProtocol = b"h2"  # noqa: N815  the interface's name
    producer: Any


class HTTP2TestCase(TestCase):
    """A client and a scripted server."""

    def setUp(self) -> None:
        temporary = TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        directory = Path(temporary.name)
        self.authority = CertificateAuthority(directory)
        self.certificate = self.authority.issue(NAME, [NAME])
        self.server = ScriptedServer()
        self.names = FakeResolver({NAME: ["127.0.0.1"], "other.example": ["127.0.0.1"]})
        self.reactor = ClockedReactor(_reactor, self.names)
        self.clock = self.reactor.clock
        self.listen(self.server.listen(_reactor, self.certificate))

    def listen(self, port: Any) -> None:
        """Use another server, which listens at `port`."""
        self.addCleanup(port.stopListening)
        self.url = f"https://{NAME}:{port.getHost().port}"
        self.outbound = self.make_outbound()
        self.client = self.make_client()

    def make_outbound(
        self, *, allowed: Sequence[IPv4Network] = (LOOPBACK,), trusted: bool = True
    ) -> OutboundHTTPClient:
        """A client that may connect to loopback, and trusts the server's authority."""
        trust_root = Certificate.loadPEM(self.authority.path.read_bytes()) if trusted else None
        return OutboundHTTPClient(self.reactor, allow_private=allowed, trust_root=trust_root)

    def make_client(self, **options: Any) -> HTTP2Client:
        """A client of the server."""
        client = HTTP2Client(self.outbound, self.url, **options)
        self.addCleanup(lambda: Deferred.fromCoroutine(client.close()))
        return client

    def post(self, path: str = "/a", body: bytes = b"{}", timeout: float = 10.0) -> Deferred[HTTP2Response]:
        """Send a request."""
        return Deferred.fromCoroutine(self.client.post(path, [("x-name", "value")], body, timeout=timeout))

    async def assert_fails(self, posted: Deferred[HTTP2Response], reason: str) -> None:
        """A request fails with a reason."""
        error: Any = await self.assertFailure(posted, OutboundError)
        self.assertEqual(error.reason, reason)

    async def echo(self, connection: Any) -> None:
        """Wait until the client has received what the server has sent: it acknowledges settings."""
        acknowledged = connection.acknowledged
        connection.update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 100})
        await self.server.until(lambda: connection.acknowledged > acknowledged)

    def paths(self) -> list[str]:
        """Paths of all requests that the server has received."""
        return [request.path for request in self.server.requests]


class RequestTests(HTTP2TestCase):
    """Requests and responses."""

    async def test_request_and_response(self) -> None:
        """All of a request arrives, and all of its response returns."""
        self.server.script.append(respond(410, {"retry-after": "7"}, b'{"reason":"Unregistered"}'))
        response = await self.post("/3/device/ab", b"body")
        self.assertEqual((response.status, response.body), (410, b'{"reason":"Unregistered"}'))
        self.assertEqual(response.headers["retry-after"], "7")
        (request,) = self.server.requests
        self.assertEqual(request.body, b"body")
        expected = {
            ":method": "POST",
            ":scheme": "https",
            ":authority": self.url.removeprefix("https://"),
            ":path": "/3/device/ab",
            "x-name": "value",
            "content-length": "4",
        }
        self.assertEqual(request.headers, expected)

    async def test_empty_body(self) -> None:
        """A request without a body ends with its headers."""
        self.assertEqual((await self.post(body=b"")).status, 200)

    async def test_many_requests_share_a_connection(self) -> None:
        """Requests at once, and later ones, need one connection and one lookup."""
        responses = await gatherResults([self.post(f"/{number}") for number in range(300)])
        self.assertEqual([response.status for response in responses], [200] * 300)
        await self.post("/300")
        self.assertEqual(sorted(self.paths()), sorted(f"/{number}" for number in range(301)))
        self.assertEqual(len(self.server.connections), 1)
        self.assertEqual(self.names.asked, [NAME])

    async def test_limit_of_streams(self) -> None:
        """No more streams are open than the server permits; the others wait for their turn, in order."""
        self.server.settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 2
        self.server.default = hang
        posted = [self.post(f"/{number}") for number in range(5)]
        for number in range(5):
            await self.server.until_requests(min(5, number + 2))
            self.assertEqual(len(self.server.requests), min(5, number + 2))
            self.server.requests[number].respond()
            await posted[number]
        self.assertEqual(self.paths(), [f"/{number}" for number in range(5)])

    async def test_limit_that_is_raised(self) -> None:
        """The limit is raised while requests wait, as APNs does once it has seen a valid token."""
        self.server.settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 1
        self.server.default = hang
        posted = [self.post(f"/{number}") for number in range(20)]
        await self.server.until_requests(1)
        self.server.connections[0].update_settings({SettingCodes.MAX_CONCURRENT_STREAMS: 1000})
        await self.server.until_requests(20)
        for request in self.server.requests:
            request.respond()
        await gatherResults(posted)

    async def test_bounded_queue(self) -> None:
        """Requests beyond the queue fail at once."""
        self.server.settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 1
        self.server.default = hang
        self.client = self.make_client(max_waiting=2)
        posted = [self.post("/first")]
        await self.server.until_requests(1)
        posted += [self.post(), self.post()]
        await self.assert_fails(self.post("/beyond"), "QueueFull")
        self.server.default = respond()
        self.server.requests[0].respond()
        await gatherResults(posted)
        self.assertEqual(self.paths(), ["/first", "/a", "/a"])

    async def test_flow_control(self) -> None:
        """Bodies wait for small windows, several at once."""
        self.server.settings[SettingCodes.INITIAL_WINDOW_SIZE] = 100
        bodies = [bytes([number]) * 20_000 for number in range(5)]
        await gatherResults([self.post(f"/{number}", body) for number, body in enumerate(bodies)])
        self.assertEqual({request.body for request in self.server.requests}, set(bodies))

    async def test_answer_before_the_end_of_a_body(self) -> None:
        """A server that answers without reading all of a body is listened to, and the stream is reset."""
        self.server.settings[SettingCodes.INITIAL_WINDOW_SIZE] = 10
        self.server.on_headers = respond(413)
        self.assertEqual((await self.post(body=bytes(1000))).status, 413)
        self.server.on_headers = None
        self.assertEqual((await self.post()).status, 200)
        self.assertEqual(len(self.server.connections), 1)

    async def test_invalid_header(self) -> None:
        """A request that HTTP/2 does not permit fails, and no later one."""
        posted = Deferred.fromCoroutine(self.client.post("/a", [(":x-name", "b")], b"", timeout=10.0))
        await self.assert_fails(posted, "ProtocolError")
        self.assertEqual((await self.post("/b")).status, 200)
        self.assertEqual(self.paths(), ["/b"])

    async def test_limit_of_streams_of_a_connection(self) -> None:
        """After many streams a connection is replaced, and closed in order."""
        self.patch(http2_connection, "_MAX_STREAMS_EVER", 3)
        await gatherResults([self.post(f"/{number}") for number in range(7)])
        self.assertEqual([len(connection.requests) for connection in self.server.connections], [3, 3, 1])
        await gatherResults([self.server.connections[0].closed, self.server.connections[1].closed])


class LimitTests(HTTP2TestCase):
    """Responses that are too large, and time."""

    async def test_large_body(self) -> None:
        """A body above the limit fails its request, not the connection; also if there are many of them."""
        self.server.default = respond(body=bytes(16_385))
        for _ in range(8):
            await self.assert_fails(self.post(), "TooLong")
        self.server.default = respond(body=bytes(16_384))
        self.assertEqual(len((await self.post()).body), 16_384)
        self.assertEqual(len(self.server.connections), 1)

    async def test_large_headers(self) -> None:
        """Headers above the limit end the connection; the next request makes another."""
        self.server.script.append(respond(headers={"x-large": "x" * 20_000}))
        await self.assert_fails(self.post(), "ProtocolError")
        await self.post()
        self.assertEqual(len(self.server.connections), 2)

    async def test_time_out_of_a_response(self) -> None:
        """A request that is not answered resets its stream, and no other."""
        self.server.script.extend([hang, hang])
        first, second = self.post("/first"), self.post("/second", timeout=20.0)
        await self.server.until_requests(2)
        self.clock.advance(10)
        await self.assert_fails(first, "TimeoutError")
        await self.server.until(lambda: self.server.connections[0].resets == [1])
        self.server.requests[1].respond()
        self.assertEqual((await second).status, 200)
        self.assertEqual((await self.post()).status, 200)
        self.assertEqual(len(self.server.connections), 1)

    async def test_late_answer(self) -> None:
        """An answer to a stream that was reset changes nothing."""
        self.server.script.append(hang)
        posted = self.post()
        await self.server.until_requests(1)
        self.server.silent = True  # it does not see the reset
        self.clock.advance(10)
        await self.assert_fails(posted, "TimeoutError")
        self.server.requests[0].respond(body=b"late")
        self.server.silent = False
        self.assertEqual((await self.post()).status, 200)
        self.assertEqual(len(self.server.connections), 1)

    async def test_time_out_in_the_queue(self) -> None:
        """A request that waits for a stream in vain is never sent."""
        self.server.settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 1
        self.server.script.append(hang)
        first, second = self.post("/first", timeout=60.0), self.post("/second")
        await self.server.until_requests(1)
        self.clock.advance(10)
        await self.assert_fails(second, "TimeoutError")
        self.server.requests[0].respond()
        await first
        await self.post("/third")
        self.assertEqual(self.paths(), ["/first", "/third"])

    async def test_cancellation(self) -> None:
        """A request that is cancelled resets its stream."""
        self.server.script.append(hang)
        posted = self.post()
        await self.server.until_requests(1)
        posted.cancel()
        await self.assert_fails(posted, "CancelledError")
        await self.server.until(lambda: self.server.connections[0].resets == [1])

    async def test_silent_server(self) -> None:
        """A server that never sends its settings gets no request, and is given up."""
        self.server.silent = True
        posted = self.post()
        await self.server.until(lambda: len(self.server.connections) == 1)
        self.clock.advance(5)
        await self.assert_fails(posted, "TimeoutError")
        await self.server.connections[0].closed
        self.server.silent = False
        await self.post("/b")
        self.assertEqual(self.paths(), ["/b"])


class RepeatTests(HTTP2TestCase):
    """What is sent again, and what is not."""

    async def test_refused_stream(self) -> None:
        """A stream that was refused is sent again on the same connection."""
        self.server.script.append(refuse)
        self.assertEqual((await self.post()).status, 200)
        self.assertEqual(self.paths(), ["/a", "/a"])
        self.assertEqual(len(self.server.connections), 1)

    async def test_endless_refusals(self) -> None:
        """After three refusals a request fails."""
        self.server.default = refuse
        await self.assert_fails(self.post(), "Refused")
        self.assertEqual(len(self.server.requests), 3)

    async def test_reset_stream(self) -> None:
        """A stream that was reset otherwise may have been processed, and is not sent again."""
        for code in (ErrorCodes.INTERNAL_ERROR, ErrorCodes.CANCEL, ErrorCodes.HTTP_1_1_REQUIRED):
            self.server.script.append(reset(code))
            await self.assert_fails(self.post(), "StreamReset")
        self.assertEqual(len(self.server.requests), 3)
        self.assertEqual(len(self.server.connections), 1)

    async def test_goaway_before_processing(self) -> None:
        """A request above the last stream of GOAWAY is sent again, once, on a new connection."""
        self.server.script.append(go_away_before)
        self.assertEqual((await self.post()).status, 200)
        self.assertEqual([len(connection.requests) for connection in self.server.connections], [1, 1])
        await self.server.connections[0].closed

    async def test_goaway_after_processing(self) -> None:
        """A request up to the last stream of GOAWAY is answered on the old connection, and not sent again."""
        self.server.script.append(go_away_after)
        self.assertEqual((await self.post("/first")).status, 200)
        self.assertEqual((await self.post("/second")).status, 200)
        self.assertEqual(self.paths(), ["/first", "/second"])
        self.assertEqual(len(self.server.connections), 2)
        await self.server.connections[0].closed

    async def test_goaway_in_flight(self) -> None:
        """Of many requests in flight, each is processed exactly once."""
        processed: list[str] = []

        def process(request: ReceivedRequest) -> None:
            processed.append(request.path)
            request.respond()

        self.server.settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 40
        self.server.default = hang
        posted = [self.post(f"/{number}") for number in range(100)]
        await self.server.until_requests(40)
        connection = self.server.connections[0]
        accepted = connection.requests[:25]
        self.server.default = process
        connection.go_away(2**31 - 1)  # the announcement of a graceful stop
        connection.go_away(accepted[-1].stream_id)
        for request in accepted:
            process(request)
        await gatherResults(posted)
        self.assertEqual(sorted(processed), sorted(f"/{number}" for number in range(100)))
        self.assertEqual(len(self.server.connections), 2)
        await connection.closed

    async def test_endless_goaways(self) -> None:
        """After three connections that refuse it by GOAWAY, a request fails."""
        self.server.default = go_away_before
        await self.assert_fails(self.post(), "Refused")
        self.assertEqual(len(self.server.connections), 3)

    async def test_bounded_connections(self) -> None:
        """A server that keeps requests after GOAWAY does not make the client open connections without end."""

        def keep(request: ReceivedRequest) -> None:
            request.connection.go_away(request.stream_id)

        self.server.default = keep
        for number in range(4):
            self.post(f"/{number}").addErrback(lambda _: None)
            await self.server.until_requests(number + 1)
            await self.echo(self.server.connections[number])
        last = self.post("/last")
        self.assertEqual(len(self.names.asked), 4)  # the fifth is not even tried
        self.server.default = respond()
        self.server.requests[0].respond()
        self.assertEqual((await last).status, 200)
        self.assertEqual(len(self.server.connections), 5)

    async def test_lost_connection(self) -> None:
        """A request whose connection is lost may have been processed; the next one makes a new connection."""
        self.server.script.append(close_connection)
        await self.assert_fails(self.post("/first"), "ConnectionLost")
        self.assertEqual((await self.post("/second")).status, 200)
        self.assertEqual(self.paths(), ["/first", "/second"])

    async def test_connection_closed_between_requests(self) -> None:
        """A connection that the server closes while nothing is in progress costs no request."""
        await self.post()
        self.server.connections[0].close()
        await self.server.connections[0].closed
        await self.post()
        self.assertEqual(len(self.server.connections), 2)

    async def test_garbage(self) -> None:
        """What is no HTTP/2 ends the connection, and fails its requests."""
        for garbage in (b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0\0\x01\x07\0\0\0\0\0\0", b"\xff" * 100):
            self.server.script.append(write(garbage))
            await self.assert_fails(self.post(), "ProtocolError")
        self.assertEqual((await self.post()).status, 200)


class ConnectionTests(HTTP2TestCase):
    """Connecting, keeping and closing."""

    async def test_ping_finds_dead_connection(self) -> None:
        """A connection that answers no ping is closed, after 70 seconds without requests."""
        await self.post()
        self.clock.advance(60)
        await self.server.until_pings(1)
        await self.post()  # the answer to the ping arrives with this one at the latest
        self.clock.advance(60)
        self.server.silent = True
        self.clock.advance(9)
        self.clock.advance(1)
        await self.server.connections[0].closed
        self.server.silent = False
        await self.post()
        self.assertEqual(len(self.server.connections), 2)

    async def test_ping_after_time_out(self) -> None:
        """A request that times out asks at once whether the peer is alive."""
        self.server.script.append(hang)
        posted = self.post()
        await self.server.until_requests(1)
        self.server.silent = True
        self.clock.advance(10)
        await self.assert_fails(posted, "TimeoutError")
        self.clock.advance(10)
        await self.server.connections[0].closed

    async def test_idle_connection(self) -> None:
        """A connection without requests is closed after half an hour."""
        await self.post()
        connection = self.server.connections[0]
        for minute in range(1, 30):
            self.clock.advance(60)
            await self.server.until_pings(minute)
            await self.echo(connection)
        self.assertFalse(connection.closed.called)
        self.clock.advance(60)
        await connection.closed
        self.assertEqual((await self.post()).status, 200)

    async def test_refused_connection(self) -> None:
        """Without a server all waiting requests fail, and the next one tries again."""
        reserved = socket.socket()
        self.addCleanup(reserved.close)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))  # does not listen, and nobody else is given the port
        number = reserved.getsockname()[1]
        self.client = HTTP2Client(self.outbound, f"https://{NAME}:{number}")
        for posted in [self.post(), self.post()]:
            await self.assert_fails(posted, "ConnectionRefusedError")
        reserved.close()
        self.listen(self.server.listen(_reactor, self.certificate, port=number))
        self.assertEqual((await self.post()).status, 200)

    async def test_guarded_address(self) -> None:
        """An address that the guard refuses is not connected to."""
        self.outbound = self.make_outbound(allowed=())
        self.client = self.make_client()
        error: Any = await self.assertFailure(self.post(), OutboundAddressError)
        self.assertEqual(error.reason, "AddressOffLimits")
        self.assertEqual(self.server.connections, [])

    def test_other_schemes(self) -> None:
        """HTTP/2 without TLS is not supported."""
        for url in ("http://api.push.example", "api.push.example", "https://user@api.push.example"):
            self.assertRaises(OutboundAddressError, HTTP2Client, self.outbound, url)

    async def test_wrong_certificate(self) -> None:
        """A certificate for another name, or of an unknown authority, is refused."""
        self.url = self.url.replace(NAME, "other.example")
        self.client = self.make_client()
        await self.assert_fails(self.post(), "VerificationError")
        self.url = self.url.replace("other.example", NAME)
        self.outbound = self.make_outbound(trusted=False)
        self.client = self.make_client()
        await self.assert_fails(self.post(), "TLSError")
        self.assertEqual(self.server.requests, [])

    async def test_server_of_http_1(self) -> None:
        """A server that speaks HTTP/1.1 only is recognised, whether it knows ALPN or not."""
        for protocols in (None, [b"http/1.1"]):
            self.listen(_reactor.listenTCP(0, wrap_tls(Site(None), self.certificate, protocols)))
            error: Any = await self.assertFailure(self.post(), OutboundRequestError)
            self.assertIn(error.reason, ("NotHTTP2", "TLSError"))

    async def test_close(self) -> None:
        """Closing aborts requests on streams, and those that wait; later ones fail at once."""
        self.server.settings[SettingCodes.MAX_CONCURRENT_STREAMS] = 1
        self.server.default = hang
        posted = [self.post(), self.post()]
        await self.server.until_requests(1)
        closed = Deferred.fromCoroutine(self.client.close())
        for one in posted:
            await self.assert_fails(one, "Closed")
        await closed
        await self.server.connections[0].closed
        await self.assert_fails(self.post(), "Closed")
        await self.client.close()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    async def test_close_while_connecting(self) -> None:
        """Closing ends an attempt to connect."""
        self.server.silent = True
        posted = self.post()
        await self.server.until(lambda: len(self.server.connections) == 1)
        closed = Deferred.fromCoroutine(self.client.close())
        await self.assert_fails(posted, "Closed")
        await closed
        await self.server.connections[0].closed
        self.assertEqual(self.clock.getDelayedCalls(), [])


class CongestionTests(SynchronousTestCase):
    """A server that does not read, in memory."""

    def setUp(self) -> None:
        self.server = H2Connection(H2Configuration(client_side=False))
        self.server.initiate_connection()
        owner = HTTP2Client(OutboundHTTPClient(MemoryReactorClock()), "https://push.example")
        self.connection = HTTP2Connection(owner, Clock())
        self.transport = NegotiatedTransport()
        self.transport.protocol = self.connection
        self.connection.makeConnection(self.transport)
        self.connection.dataReceived(self.server.data_to_send())
        self.server.receive_data(self.transport.value())
        self.transport.clear()
        self.transport.producer.pauseProducing()

    def ping(self, number: int) -> None:
        """Let the server send a ping that it recognises."""
        self.server.ping(number.to_bytes(8))
        self.connection.dataReceived(self.server.data_to_send())

    def test_flood_of_pings(self) -> None:
        """Answers that cannot be written are bounded: then the connection is aborted."""
        for number in range(65_536 // 17):
            self.ping(number)
        self.assertFalse(self.transport.disconnected)
        self.ping(0)
        self.assertTrue(self.transport.disconnected)
        self.assertEqual(self.transport.value(), b"")

    def test_pause(self) -> None:
        """What was held back is sent, in order, when the server reads again; meanwhile no request is."""
        for number in range(3):
            self.ping(number)
        self.assertFalse(self.connection.can_send())
        self.transport.producer.resumeProducing()
        self.assertTrue(self.connection.can_send())
        events = self.server.receive_data(self.transport.value())
        answers = [int.from_bytes(event.ping_data) for event in events if isinstance(event, PingAckReceived)]
        self.assertEqual(answers, [0, 1, 2])


class GoAwayExtractorTests(SynchronousTestCase):
    """GOAWAY frames among others."""

    def test_any_cut(self) -> None:
        """However the bytes are cut, all other frames pass unchanged, and each GOAWAY at its place."""
        settings = b"\0\0\0\x04\0\0\0\0\0"
        data = b"\0\0\x03\0\x01\0\0\0\x01abc"
        goaway = b"\0\0\x0a\x07\0\0\0\0\0" + b"\x80\0\0\x05" + bytes(4) + b"{}"
        wire = settings + goaway + data + goaway + settings
        for size in range(1, len(wire) + 1):
            extractor = GoAwayExtractor()
            parts: list[bytes | int] = [b""]
            for start in range(0, len(wire), size):
                for part in extractor.feed(wire[start : start + size]):
                    if isinstance(part, bytes) and isinstance(parts[-1], bytes):
                        parts[-1] += part
                    else:
                        parts.append(part)
            self.assertEqual(parts, [settings, 5, data, 5, settings])

    def test_invalid_size(self) -> None:
        """A GOAWAY that is too short, or longer than any frame may be, is refused by its head."""
        for size in (0, 7, 16_385):
            with self.assertRaises(ValueError):
                list(GoAwayExtractor().feed(size.to_bytes(3) + b"\x07" + bytes(5)))
