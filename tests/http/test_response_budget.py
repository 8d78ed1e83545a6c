"""Bounds on the bytes and the age of unread responses."""

from __future__ import annotations

from time import perf_counter
from typing import Any, ClassVar

from twisted.internet import reactor as _reactor  # noqa: TID251  what a kernel takes off our hands is the subject
from twisted.internet.defer import Deferred, succeed
from twisted.internet.endpoints import TCP4ClientEndpoint, connectProtocol
from twisted.internet.protocol import Protocol
from twisted.internet.task import deferLater
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase, TestCase

from mediatord.app.public_site import build_site
from mediatord.http.flow_control import MAX_UNREAD_PER_CLIENT, MAX_UNREAD_TOTAL, SMALL_RESPONSE_BYTES, ResponseBudget
from mediatord.ratelimit.admission import RequestReply
from tests.http.fake_protocols import FakeDecentrl, FakeDIDComm
from tests.http.in_memory_site import (
    ENCRYPTED,
    HTTPResponse,
    InMemorySite,
    InMemoryTransport,
    encode_request,
    parse_responses,
)
from tests.http.test_decentrl_http import DID, GENERAL_PATH_HEADERS
from tests.http.test_websocket import HIGH_LIMITS
from tests.in_memory_mediator import PEER

SECOND_CLIENT, THIRD_CLIENT, PROXY = "192.0.2.2", "192.0.2.3", "198.51.100.1"
LOCAL = "127.0.0.1"
PAGE = f"/public/{DID}"
REFUSAL = {"type": "ERROR", "code": "RATE_LIMITED"}

# Limits of the tests for one client and in total.
CLIENT_LIMIT, TOTAL_LIMIT = 300_000, 500_000


class ResponseBudgetTests(SynchronousTestCase):
    def test_limits_per_client_and_in_total(self) -> None:
        """32 MiB for one client, 256 MiB for all, exactly."""
        unread = ResponseBudget()
        self.assertEqual((MAX_UNREAD_PER_CLIENT, MAX_UNREAD_TOTAL), (32 * 1024 * 1024, 256 * 1024 * 1024))
        self.assertTrue(unread.has_room("a", MAX_UNREAD_PER_CLIENT))
        self.assertFalse(unread.has_room("a", MAX_UNREAD_PER_CLIENT + 1))
        for rate_limit_key in "abcdefg":
            unread.add(rate_limit_key, MAX_UNREAD_PER_CLIENT)
        unread.add("h", MAX_UNREAD_PER_CLIENT - SMALL_RESPONSE_BYTES - 1)
        self.assertTrue(unread.has_room("i", SMALL_RESPONSE_BYTES + 1))
        self.assertFalse(unread.has_room("i", SMALL_RESPONSE_BYTES + 2))
        self.assertFalse(unread.has_room("a", SMALL_RESPONSE_BYTES + 1))

    def test_sums_forget_read_responses(self) -> None:
        """Read responses do not count; nothing is kept for a client without unread responses."""
        unread = ResponseBudget()
        for rate_limit_key, size in (("a", 10), ("b", 5), ("a", 7)):
            unread.add(rate_limit_key, size)
        self.assertEqual((unread.of("a"), unread.of("b"), unread.total), (17, 5, 22))
        unread.remove("a", 10)
        unread.remove("b", 5)
        self.assertEqual((unread.of("a"), unread.of("b"), unread.total), (7, 0, 7))
        unread.remove("a", 7)
        self.assertEqual((unread.total, unread._waiting), (0, {}))


class UnreadResponseTests(SynchronousTestCase):
    """
    Unread responses to commands and envelopes on the fast path.

    :cvar path_headers: headers that select the path of a request.
    """

    path_headers: ClassVar[dict[str, str]] = {}

    def setUp(self) -> None:
        self.didcomm, self.decentrl = FakeDIDComm(), FakeDecentrl()
        self.site_fixture = InMemorySite(
            self, fake_decentrl=self.decentrl, limits=HIGH_LIMITS, trusted_proxies=[PROXY]
        )
        didcomm: Any = self.didcomm
        decentrl: Any = self.decentrl
        self.site_fixture.site = build_site(self.site_fixture.base, didcomm, decentrl, self.site_fixture.config)
        self.site_fixture.site.scheduler._steady = self.site_fixture.clock.seconds
        self.unread = self.site_fixture.site.unread = ResponseBudget(CLIENT_LIMIT, TOTAL_LIMIT)

    def request_of_size(self, size: int, **headers: str) -> bytes:
        """Encode a command whose response has `size` bytes."""
        self.decentrl.answer = lambda body: succeed(RequestReply(200, b"x" * int(body)))
        return encode_request(
            "POST", "/", b"%d" % size, {"Content-Type": "application/json", **self.path_headers, **headers}
        )

    def request_without_reading(self, size: int, peer: str = PEER, **headers: str) -> InMemoryTransport:
        """Request `size` bytes on a new connection and do not read them."""
        transport = self.site_fixture.connect(peer)
        transport.peer_stalled = True
        transport.feed(self.request_of_size(size, **headers))
        return transport

    def statuses(self, *lines: InMemoryTransport) -> list[int]:
        """The status of the one response on each connection."""
        return [self.response_on(line).status for line in lines]

    def response_on(self, transport: InMemoryTransport) -> HTTPResponse:
        """The one response on a connection."""
        (response,) = parse_responses(transport.take_output())
        return response

    def assert_refused(self, line: InMemoryTransport) -> None:
        """The response is a refusal with Retry-After."""
        response = self.response_on(line)
        self.assertEqual((response.status, response.json), (429, REFUSAL))
        self.assertEqual(response.headers["retry-after"], "60")
        self.assertEqual(response.headers["access-control-expose-headers"], "Retry-After")
        self.assertEqual(response.headers["access-control-allow-origin"], "*")

    def test_limit_of_one_client(self) -> None:
        """The limit can be used up exactly; the next response is a refusal, which does not count."""
        transports = self.request_without_reading(200_000), self.request_without_reading(100_000)
        self.assertEqual(self.statuses(*transports), [200, 200])
        self.assertEqual((self.unread.of(PEER), self.unread.total), (CLIENT_LIMIT, CLIENT_LIMIT))
        self.assert_refused(self.request_without_reading(SMALL_RESPONSE_BYTES + 1))
        self.assertEqual(self.unread.of(PEER), CLIENT_LIMIT)

    def test_limit_includes_new_response(self) -> None:
        """The size of the new response counts."""
        self.request_without_reading(200_000)
        self.assert_refused(self.request_without_reading(100_001))
        self.assertEqual(self.statuses(self.request_without_reading(100_000)), [200])
        self.assert_refused(self.request_without_reading(CLIENT_LIMIT + 1, SECOND_CLIENT))

    def test_total_limit(self) -> None:
        """A client without unread responses is refused too, until others have read."""
        first = self.request_without_reading(CLIENT_LIMIT)
        second = self.request_without_reading(200_000, SECOND_CLIENT)
        self.assertEqual(self.statuses(first, second), [200, 200])
        self.assertEqual(self.unread.total, TOTAL_LIMIT)
        self.assert_refused(self.request_without_reading(SMALL_RESPONSE_BYTES + 1, THIRD_CLIENT))
        second.resume_peer()
        self.assertEqual(self.statuses(self.request_without_reading(200_000, THIRD_CLIENT)), [200])
        self.assertEqual(self.unread.total, TOTAL_LIMIT)

    def test_limit_of_one_client_spares_others(self) -> None:
        """Other clients are not affected."""
        self.request_without_reading(CLIENT_LIMIT)
        self.assert_refused(self.request_without_reading(CLIENT_LIMIT))
        self.assertEqual(self.statuses(self.request_without_reading(200_000, SECOND_CLIENT)), [200])
        self.assertEqual((self.unread.of(PEER), self.unread.of(SECOND_CLIENT)), (CLIENT_LIMIT, 200_000))

    def test_small_responses_are_always_written(self) -> None:
        """Small responses are always written, and count only if the transport is full."""
        self.request_without_reading(CLIENT_LIMIT)
        tiny, small = self.request_without_reading(1000), self.request_without_reading(SMALL_RESPONSE_BYTES)
        self.assertEqual(self.statuses(tiny, small), [200, 200])
        self.assertEqual(self.unread.of(PEER), CLIENT_LIMIT + SMALL_RESPONSE_BYTES)
        small.resume_peer()
        self.assertEqual(self.unread.of(PEER), CLIENT_LIMIT)

    def test_read_response_makes_room(self) -> None:
        """A response counts until it is read whole; then there is room, also on the same connection."""
        transport = self.request_without_reading(CLIENT_LIMIT)
        self.assert_refused(self.request_without_reading(CLIENT_LIMIT))
        transport.resume_peer()
        self.site_fixture.run_due_calls()
        self.assertEqual(self.statuses(transport), [200])
        self.assertEqual((self.unread.of(PEER), self.unread.total), (0, 0))
        transport.peer_stalled = True
        transport.feed(self.request_of_size(CLIENT_LIMIT))
        self.assertEqual(self.statuses(transport), [200])
        self.assertEqual(self.unread.of(PEER), CLIENT_LIMIT)

    def test_disconnect_makes_room(self) -> None:
        """Responses of a closed connection do not count, whoever closed it."""
        for transport in (self.request_without_reading(200_000), self.request_without_reading(100_000)):
            transport.disconnect(cleanly=False)
        self.assertEqual(self.unread.total, 0)
        self.request_without_reading(CLIENT_LIMIT).abortConnection()
        self.assertEqual(self.unread.total, CLIENT_LIMIT)
        self.site_fixture.run_due_calls()
        self.assertEqual(self.unread.total, 0)

    def test_late_response_to_disconnected_client(self) -> None:
        """Nothing is written to a disconnected client."""
        transport = self.request_without_reading(0)
        transport.take_output()
        pending_reply: Deferred[RequestReply] = Deferred()
        request = self.request_of_size(1)
        self.decentrl.answer = lambda body: pending_reply
        transport.feed(request)
        transport.disconnect()
        pending_reply.callback(RequestReply(200, b"x" * CLIENT_LIMIT))
        self.assertEqual((transport.take_output(), self.unread.total), (b"", 0))

    def test_fast_reader_is_never_refused(self) -> None:
        """A client that reads at once can request any amount in total."""
        transport = self.site_fixture.connect()
        for _ in range(10):
            transport.feed(self.request_of_size(CLIENT_LIMIT))
            self.site_fixture.run_due_calls()
            self.assertEqual(self.statuses(transport), [200])
            self.assertEqual(self.unread.total, 0)

    def test_pipelined_requests_wait_for_reader(self) -> None:
        """A connection has one unread response; the next request waits."""
        transport = self.site_fixture.connect()
        transport.peer_stalled = True
        requests = self.request_of_size(100_000) * 3
        unread = []

        def answer(body: bytes) -> Deferred[RequestReply]:
            unread.append(self.unread.total)
            return succeed(RequestReply(200, b"x" * 100_000))

        self.decentrl.answer = answer
        transport.feed(requests)
        self.assertEqual((unread, self.unread.total), ([0], 100_000))
        transport.resume_peer()
        self.site_fixture.run_due_calls()
        self.assertEqual((unread, self.unread.total), ([0, 0, 0], 0))
        self.assertEqual([response.status for response in parse_responses(transport.take_output())], [200, 200, 200])

    def test_refusals_keep_order_and_connection(self) -> None:
        """Refusals keep their order among other responses, and the connection stays open."""
        self.request_without_reading(CLIENT_LIMIT)
        transport = self.site_fixture.connect()
        transport.feed(self.request_of_size(100_000) + self.request_of_size(10) + self.request_of_size(100_000))
        self.assertEqual([answer.status for answer in parse_responses(transport.take_output())], [429, 200, 429])
        self.assertFalse(transport.lost or transport.disconnecting)

    def test_refused_envelope(self) -> None:
        """A refusal has the form of the protocol that was used."""
        self.request_without_reading(CLIENT_LIMIT)
        self.didcomm.answer = lambda body: succeed(RequestReply(200, b"x" * 100_000, "text/x-test"))
        transport = self.site_fixture.connect()
        for path in ("/didcomm", "/"):
            transport.feed(
                encode_request("POST", path, b"{}", {"Content-Type": ENCRYPTED.decode(), **self.path_headers})
            )
            response = self.response_on(transport)
            self.assertEqual((response.status, response.headers["retry-after"]), (429, "60"))
            self.assertEqual(response.json, {"status": "error", "detail": "Too many requests"})

    def test_clients_behind_proxy_are_counted_separately(self) -> None:
        """Each client behind a proxy has its limit, an IPv6 /64 a common one."""
        for client, rate_limit_key in (("203.0.113.1", "203.0.113.1"), ("2001:db8::1", "2001:db8::")):
            line = self.request_without_reading(200_000, PROXY, **{"X-Forwarded-For": client})
            self.assertEqual((self.statuses(line), self.unread.of(rate_limit_key)), ([200], 200_000))
        self.assert_refused(self.request_without_reading(100_001, PROXY, **{"X-Forwarded-For": "2001:db8::2"}))
        self.assertEqual(
            self.statuses(self.request_without_reading(100_000, PROXY, **{"X-Forwarded-For": "203.0.113.1"})), [200]
        )
        self.assertEqual((self.unread.of("203.0.113.1"), self.unread.of(PROXY)), (CLIENT_LIMIT, 0))

    def test_unread_response_times_out(self) -> None:
        """A client that has not read a response after a minute is disconnected."""
        transport = self.request_without_reading(CLIENT_LIMIT)
        self.site_fixture.clock.advance(59.9)
        self.assertFalse(transport.lost)
        self.site_fixture.clock.advance(0.2)
        self.site_fixture.run_due_calls()
        self.assertTrue(transport.lost)
        self.assertEqual(self.unread.total, 0)

    def test_reading_restarts_timeout(self) -> None:
        """After reading, a client has a minute for the next request, and another for its response."""
        transport = self.request_without_reading(CLIENT_LIMIT)
        self.site_fixture.clock.advance(59)
        transport.resume_peer()
        self.site_fixture.clock.advance(59)
        transport.peer_stalled = True
        transport.feed(self.request_of_size(CLIENT_LIMIT))
        self.site_fixture.clock.advance(59)
        self.assertFalse(transport.lost)
        self.assertEqual(self.unread.total, CLIENT_LIMIT)
        self.site_fixture.clock.advance(1.1)
        self.site_fixture.run_due_calls()
        self.assertTrue(transport.lost)

    def test_small_unread_response_times_out(self) -> None:
        """A small unread response does not keep a connection open."""
        transport = self.request_without_reading(1000)
        self.site_fixture.clock.advance(60.1)
        self.site_fixture.run_due_calls()
        self.assertTrue(transport.lost)

    def test_large_request_waits_for_reader(self) -> None:
        """A large request that arrives while a response is unread is served after that is read."""
        transport = self.request_without_reading(CLIENT_LIMIT)
        request = encode_request(
            "POST", "/", b"7".rjust(300_000), {"Content-Type": "application/json", **self.path_headers}
        )
        transport.feed(request)
        self.assertGreater(transport.unread, 0)
        transport.resume_peer()
        self.site_fixture.run_due_calls()
        self.assertEqual([len(answer.body) for answer in parse_responses(transport.take_output())], [CLIENT_LIMIT, 7])


class GeneralPathTests(UnreadResponseTests):
    """The same on the general path, and what only twisted.web serves."""

    path_headers = GENERAL_PATH_HEADERS

    def test_public_channel(self) -> None:
        """Pages of public channels are limited like replies to commands; responses to HEAD are not."""
        self.decentrl.page = lambda did: succeed(RequestReply(200, b"x" * 100_000))
        self.request_without_reading(200_001)
        transport = self.site_fixture.connect()
        transport.feed(encode_request("GET", PAGE))
        self.assert_refused(transport)
        transport.feed(encode_request("HEAD", PAGE) * 2)
        responses = parse_responses(transport.take_output(), head=True)
        self.assertEqual(
            [(response.status, response.headers["content-length"]) for response in responses], [(200, "100000")] * 2
        )
        self.assertEqual(self.unread.total, 200_001)

    def test_head_does_not_count(self) -> None:
        """A response to HEAD counts nothing."""
        self.decentrl.page = lambda did: succeed(RequestReply(200, b"x" * CLIENT_LIMIT))
        transport = self.site_fixture.connect()
        transport.peer_stalled = True
        transport.feed(encode_request("HEAD", PAGE))
        self.assertEqual((transport.take_output()[:12], self.unread.total), (b"HTTP/1.1 200", 0))

    def test_static_document_counts_per_connection(self) -> None:
        """A shared document counts once for each connection that has not read it."""
        size = len(self.site_fixture.request("GET", "/openapi.json").body)
        self.assertGreater(size, SMALL_RESPONSE_BYTES)
        self.request_without_reading(CLIENT_LIMIT - size)
        for status in (200, 429):
            transport = self.site_fixture.connect()
            transport.peer_stalled = True
            transport.feed(encode_request("GET", "/openapi.json"))
            self.assertEqual(self.statuses(transport), [status])
        self.assertEqual(self.unread.of(PEER), CLIENT_LIMIT)

    def test_last_response_counts_until_read(self) -> None:
        """The last response of a connection counts until it is read; then the connection closes."""
        transport = self.request_without_reading(CLIENT_LIMIT, Connection="close")
        self.site_fixture.run_due_calls()
        self.assertEqual((transport.lost, self.unread.of(PEER)), (False, CLIENT_LIMIT))
        transport.resume_peer()
        self.assertEqual((transport.lost, self.unread.total), (True, 0))

    def test_unread_last_response_times_out(self) -> None:
        """An unread last response times out, large or small."""
        transports = (
            self.request_without_reading(CLIENT_LIMIT, Connection="close"),
            self.request_without_reading(10, Connection="close"),
        )
        self.site_fixture.clock.advance(59.9)
        self.assertEqual([transport.lost for transport in transports], [False, False])
        self.site_fixture.clock.advance(0.2)
        self.site_fixture.run_due_calls()
        self.assertEqual([transport.lost for transport in transports], [True, True])
        self.assertEqual(self.unread.total, 0)

    def test_data_after_last_response_is_discarded(self) -> None:
        """Data after the last response is neither served nor kept, although a closing transport reads on."""
        for size in (CLIENT_LIMIT, 10):
            transport = self.request_without_reading(size, Connection="close")
            served = len(self.decentrl.received)
            for _ in range(10):
                transport.protocol.dataReceived(self.request_of_size(10) + b"x" * 100_000)
            channel: Any = transport.protocol
            self.assertEqual(channel.held, 0)
            self.assertEqual(len(self.decentrl.received), served)

    def test_data_after_bad_request_is_discarded(self) -> None:
        """The same after a request that is not HTTP."""
        transport = self.site_fixture.connect()
        transport.peer_stalled = True
        transport.feed(b"nonsense\r\n\r\n")
        self.assertEqual(transport.take_output()[:12], b"HTTP/1.1 400")
        for piece in self.request_of_size(CLIENT_LIMIT).splitlines(keepends=True):
            transport.protocol.dataReceived(piece)
        self.assertEqual((transport.take_output(), self.decentrl.received), (b"", []))
        self.site_fixture.clock.advance(60.1)
        self.site_fixture.run_due_calls()
        self.assertTrue(transport.lost)


class PausableClient(Protocol):
    """Client that reads only on request."""

    def __init__(self) -> None:
        self.got = bytearray()
        self._wanted = 0
        self._whole: Deferred[bytes] = Deferred()

    def ask(self, request: bytes) -> None:
        """Send a request and stop reading."""
        assert self.transport is not None
        wire: Any = self.transport
        wire.pauseProducing()
        wire.write(request)

    def read(self, body: int) -> Deferred[bytes]:
        """Read a whole response with a body of `body` bytes."""
        self._wanted, self._whole = body, Deferred()
        wire: Any = self.transport
        wire.resumeProducing()
        return self._whole

    def dataReceived(self, data: bytes) -> None:
        self.got += data
        end = self.got.find(b"\r\n\r\n", 0, 4096)
        if end > 0 and len(self.got) >= end + 4 + self._wanted and not self._whole.called:
            output, self.got = bytes(self.got), bytearray()
            self._whole.callback(output)

    def connectionLost(self, reason: Failure | None = None) -> None:
        """Fail the pending read."""
        if not self._whole.called:
            self._whole.errback(Failure(ConnectionError()))


class RealSocketTests(TestCase):
    """Flow control of transports on real sockets."""

    timeout = 120

    def setUp(self) -> None:
        reactor: Any = _reactor
        self.call_later = reactor.callLater
        self.decentrl = FakeDecentrl()
        site_fixture = InMemorySite(self, fake_decentrl=self.decentrl, limits=HIGH_LIMITS)
        self.site = site_fixture.site
        self.unread = self.site.unread
        self.site.scheduler._clock, self.site.scheduler._steady = reactor, perf_counter
        port = reactor.listenTCP(0, self.site, interface=LOCAL)
        self.addCleanup(port.stopListening)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.all_closed()))
        self.endpoint = TCP4ClientEndpoint(reactor, LOCAL, port.getHost().port)

    async def all_closed(self) -> None:
        """Fire when the daemon has no connection any more."""
        while self.site._per_host:
            await deferLater(_reactor, 0.01)

    async def client(self) -> PausableClient:
        """Connect a client."""
        reader = PausableClient()
        await connectProtocol(self.endpoint, reader)
        wire: Any = reader.transport
        self.addCleanup(wire.abortConnection)
        return reader

    async def request_unread(self, reader: PausableClient, size: int, headers: dict[str, str]) -> None:
        """Have a client request `size` bytes; return when the daemon has answered, without reading."""
        arrived: Deferred[None] = Deferred()
        reply: Deferred[RequestReply] = Deferred()

        def answer(body: bytes) -> Deferred[RequestReply]:
            self.call_later(0, arrived.callback, None)
            return reply

        self.decentrl.answer = answer
        reader.ask(encode_request("POST", "/", b"{}", {"Content-Type": "application/json", **headers}))
        await arrived
        reply.callback(RequestReply(200, b"x" * size))

    async def test_delayed_reader(self) -> None:
        """20 MiB count until they are read; as much again is refused before that, and answered afterwards."""
        size = 20 * 1024 * 1024
        headers: dict[str, str]
        for headers in ({}, GENERAL_PATH_HEADERS):
            first, second = await self.client(), await self.client()
            await self.request_unread(first, size, headers)
            self.assertEqual((self.unread.of(LOCAL), self.unread.total), (size, size))
            await self.request_unread(second, size, headers)
            (refused,) = parse_responses(await second.read(len(b'{"type":"ERROR","code":"RATE_LIMITED"}')))
            self.assertEqual((refused.status, refused.json), (429, REFUSAL))
            self.assertEqual(self.unread.total, size)
            (whole,) = parse_responses(await first.read(size))
            self.assertEqual((whole.status, len(whole.body)), (200, size))
            self.assertEqual(self.unread.total, 0)
            await self.request_unread(second, size, headers)
            (whole,) = parse_responses(await second.read(size))
            self.assertEqual((whole.status, len(whole.body)), (200, size))
            self.assertEqual(self.unread.total, 0)
