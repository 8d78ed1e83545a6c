"""Answers that clients do not read: how many bytes of them there may be, and for how long."""

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
from tests.http.test_decentrl_http import DETOUR, DID
from tests.http.test_websocket import PLENTY
from tests.in_memory_mediator import PEER

OTHER, THIRD, PROXY = "192.0.2.2", "192.0.2.3", "198.51.100.1"
LOCAL = "127.0.0.1"
PAGE = f"/public/{DID}"
REFUSED = {"type": "ERROR", "code": "RATE_LIMITED"}

# What the tests allow: to one client, and to all.
ONE, ALL = 300_000, 500_000


class CountTests(SynchronousTestCase):
    def test_limits(self) -> None:
        """32 MiB for one client, 256 MiB for all; exactly so much fits, and not a byte more."""
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

    def test_sums(self) -> None:
        """What is gone does not count; of a client who owes nothing, nothing is kept."""
        unread = ResponseBudget()
        for rate_limit_key, size in (("a", 10), ("b", 5), ("a", 7)):
            unread.add(rate_limit_key, size)
        self.assertEqual((unread.of("a"), unread.of("b"), unread.total), (17, 5, 22))
        unread.remove("a", 10)
        unread.remove("b", 5)
        self.assertEqual((unread.of("a"), unread.of("b"), unread.total), (7, 0, 7))
        unread.remove("a", 7)
        self.assertEqual((unread.total, unread._waiting), (0, {}))


class UnreadTests(SynchronousTestCase):
    """
    Each test asks with commands and envelopes on the fast path.

    :cvar way: headers of a request, which decide who serves it.
    """

    way: ClassVar[dict[str, str]] = {}

    def setUp(self) -> None:
        self.didcomm, self.decentrl = FakeDIDComm(), FakeDecentrl()
        self.site_fixture = InMemorySite(self, fake_decentrl=self.decentrl, limits=PLENTY, trusted_proxies=[PROXY])
        didcomm: Any = self.didcomm
        decentrl: Any = self.decentrl
        self.site_fixture.site = build_site(self.site_fixture.base, didcomm, decentrl, self.site_fixture.config)
        self.site_fixture.site.scheduler._steady = self.site_fixture.clock.seconds
        self.unread = self.site_fixture.site.unread = ResponseBudget(ONE, ALL)

    def asking(self, size: int, **headers: str) -> bytes:
        """A command whose answer has so many bytes."""
        self.decentrl.answer = lambda body: succeed(RequestReply(200, b"x" * int(body)))
        return encode_request("POST", "/", b"%d" % size, {"Content-Type": "application/json", **self.way, **headers})

    def leave(self, size: int, peer: str = PEER, **headers: str) -> InMemoryTransport:
        """A connection on which somebody asks for so many bytes, and does not read."""
        line = self.site_fixture.line(peer)
        line.stuck = True
        line.feed(self.asking(size, **headers))
        return line

    def statuses(self, *lines: InMemoryTransport) -> list[int]:
        """Of the one answer on each connection."""
        return [self.only(line).status for line in lines]

    def only(self, line: InMemoryTransport) -> HTTPResponse:
        """The answer on a connection."""
        (answer,) = parse_responses(line.taken())
        return answer

    def is_refused(self, line: InMemoryTransport) -> None:
        """The answer is a refusal that says when to come again."""
        answer = self.only(line)
        self.assertEqual((answer.status, answer.json), (429, REFUSED))
        self.assertEqual(answer.headers["retry-after"], "60")
        self.assertEqual(answer.headers["access-control-expose-headers"], "Retry-After")
        self.assertEqual(answer.headers["access-control-allow-origin"], "*")

    def test_of_one_payer(self) -> None:
        """Exactly as much as is allowed is answered; the next answer is a refusal, of which nothing counts."""
        lines = self.leave(200_000), self.leave(100_000)
        self.assertEqual(self.statuses(*lines), [200, 200])
        self.assertEqual((self.unread.of(PEER), self.unread.total), (ONE, ONE))
        self.is_refused(self.leave(SMALL_RESPONSE_BYTES + 1))
        self.assertEqual(self.unread.of(PEER), ONE)

    def test_one_byte_too_many(self) -> None:
        """The size of the answer itself counts."""
        self.leave(200_000)
        self.is_refused(self.leave(100_001))
        self.assertEqual(self.statuses(self.leave(100_000)), [200])
        self.is_refused(self.leave(ONE + 1, OTHER))

    def test_of_all(self) -> None:
        """Somebody who owes nothing is refused too while there is no room, until somebody has read."""
        first = self.leave(ONE)
        second = self.leave(200_000, OTHER)
        self.assertEqual(self.statuses(first, second), [200, 200])
        self.assertEqual(self.unread.total, ALL)
        self.is_refused(self.leave(SMALL_RESPONSE_BYTES + 1, THIRD))
        second.unstick()
        self.assertEqual(self.statuses(self.leave(200_000, THIRD)), [200])
        self.assertEqual(self.unread.total, ALL)

    def test_of_others(self) -> None:
        """Who reads is not concerned by those who do not."""
        self.leave(ONE)
        self.is_refused(self.leave(ONE))
        self.assertEqual(self.statuses(self.leave(200_000, OTHER)), [200])
        self.assertEqual((self.unread.of(PEER), self.unread.of(OTHER)), (ONE, 200_000))

    def test_small_answers(self) -> None:
        """They are always written; they count where they make the transport full, and not where it has room."""
        self.leave(ONE)
        tiny, small = self.leave(1000), self.leave(SMALL_RESPONSE_BYTES)
        self.assertEqual(self.statuses(tiny, small), [200, 200])
        self.assertEqual(self.unread.of(PEER), ONE + SMALL_RESPONSE_BYTES)
        small.unstick()
        self.assertEqual(self.unread.of(PEER), ONE)

    def test_reading(self) -> None:
        """An answer counts until all of it is taken; then there is room, on the same connection too."""
        line = self.leave(ONE)
        self.is_refused(self.leave(ONE))
        line.unstick()
        self.site_fixture.settle()
        self.assertEqual(self.statuses(line), [200])
        self.assertEqual((self.unread.of(PEER), self.unread.total), (0, 0))
        line.stuck = True
        line.feed(self.asking(ONE))
        self.assertEqual(self.statuses(line), [200])
        self.assertEqual(self.unread.of(PEER), ONE)

    def test_leaving(self) -> None:
        """What will never be read counts no longer, whoever ends the connection."""
        for line in (self.leave(200_000), self.leave(100_000)):
            line.hang_up(cleanly=False)
        self.assertEqual(self.unread.total, 0)
        self.leave(ONE).abortConnection()
        self.assertEqual(self.unread.total, ONE)
        self.site_fixture.settle()
        self.assertEqual(self.unread.total, 0)

    def test_leaving_before_the_answer(self) -> None:
        """To nobody nothing is written."""
        line = self.leave(0)
        line.taken()
        late: Deferred[RequestReply] = Deferred()
        request = self.asking(1)
        self.decentrl.answer = lambda body: late
        line.feed(request)
        line.hang_up()
        late.callback(RequestReply(200, b"x" * ONE))
        self.assertEqual((line.taken(), self.unread.total), (b"", 0))

    def test_who_reads_at_once(self) -> None:
        """May ask for as much as there is, time after time."""
        line = self.site_fixture.line()
        for _ in range(10):
            line.feed(self.asking(ONE))
            self.site_fixture.settle()
            self.assertEqual(self.statuses(line), [200])
            self.assertEqual(self.unread.total, 0)

    def test_pipelining(self) -> None:
        """One connection has one answer unread; the next request is not even looked at."""
        line = self.site_fixture.line()
        line.stuck = True
        requests = self.asking(100_000) * 3
        unread = []

        def answer(body: bytes) -> Deferred[RequestReply]:
            unread.append(self.unread.total)
            return succeed(RequestReply(200, b"x" * 100_000))

        self.decentrl.answer = answer
        line.feed(requests)
        self.assertEqual((unread, self.unread.total), ([0], 100_000))
        line.unstick()
        self.site_fixture.settle()
        self.assertEqual((unread, self.unread.total), ([0, 0, 0], 0))
        self.assertEqual([one.status for one in parse_responses(line.taken())], [200, 200, 200])

    def test_refusals_in_a_row(self) -> None:
        """They keep their order among other answers, and the connection goes on."""
        self.leave(ONE)
        line = self.site_fixture.line()
        line.feed(self.asking(100_000) + self.asking(10) + self.asking(100_000))
        self.assertEqual([answer.status for answer in parse_responses(line.taken())], [429, 200, 429])
        self.assertFalse(line.lost or line.disconnecting)

    def test_an_envelope(self) -> None:
        """A refusal has the form of the protocol that was asked."""
        self.leave(ONE)
        self.didcomm.answer = lambda body: succeed(RequestReply(200, b"x" * 100_000, "text/x-test"))
        line = self.site_fixture.line()
        for path in ("/didcomm", "/"):
            line.feed(encode_request("POST", path, b"{}", {"Content-Type": ENCRYPTED.decode(), **self.way}))
            answer = self.only(line)
            self.assertEqual((answer.status, answer.headers["retry-after"]), (429, "60"))
            self.assertEqual(answer.json, {"status": "error", "detail": "Too many requests"})

    def test_behind_a_proxy(self) -> None:
        """Each client pays for itself, of an IPv6 network all its addresses together."""
        for client, rate_limit_key in (("203.0.113.1", "203.0.113.1"), ("2001:db8::1", "2001:db8::")):
            line = self.leave(200_000, PROXY, **{"X-Forwarded-For": client})
            self.assertEqual((self.statuses(line), self.unread.of(rate_limit_key)), ([200], 200_000))
        self.is_refused(self.leave(100_001, PROXY, **{"X-Forwarded-For": "2001:db8::2"}))
        self.assertEqual(self.statuses(self.leave(100_000, PROXY, **{"X-Forwarded-For": "203.0.113.1"})), [200])
        self.assertEqual((self.unread.of("203.0.113.1"), self.unread.of(PROXY)), (ONE, 0))

    def test_the_patience(self) -> None:
        """Who has not taken an answer after a minute is cut off."""
        line = self.leave(ONE)
        self.site_fixture.clock.advance(59.9)
        self.assertFalse(line.lost)
        self.site_fixture.clock.advance(0.2)
        self.site_fixture.settle()
        self.assertTrue(line.lost)
        self.assertEqual(self.unread.total, 0)

    def test_the_patience_begins_anew(self) -> None:
        """Who has taken one has a minute to ask again, and another for the next."""
        line = self.leave(ONE)
        self.site_fixture.clock.advance(59)
        line.unstick()
        self.site_fixture.clock.advance(59)
        line.stuck = True
        line.feed(self.asking(ONE))
        self.site_fixture.clock.advance(59)
        self.assertFalse(line.lost)
        self.assertEqual(self.unread.total, ONE)
        self.site_fixture.clock.advance(1.1)
        self.site_fixture.settle()
        self.assertTrue(line.lost)

    def test_a_small_answer_does_not_hold_a_connection(self) -> None:
        """Nor may one be kept open by an answer that the transport still had room for."""
        line = self.leave(1000)
        self.site_fixture.clock.advance(60.1)
        self.site_fixture.settle()
        self.assertTrue(line.lost)

    def test_sending_without_reading(self) -> None:
        """A large request that comes while an answer is unread is served once that is read."""
        line = self.leave(ONE)
        request = encode_request("POST", "/", b"7".rjust(300_000), {"Content-Type": "application/json", **self.way})
        line.feed(request)
        self.assertGreater(line.unread, 0)
        line.unstick()
        self.site_fixture.settle()
        self.assertEqual([len(answer.body) for answer in parse_responses(line.taken())], [ONE, 7])


class GeneralPathTests(UnreadTests):
    """The same, and what only twisted.web serves."""

    way = DETOUR

    def test_a_public_channel(self) -> None:
        """A page is refused like the answer to a command; HEAD is none, and never is."""
        self.decentrl.page = lambda did: succeed(RequestReply(200, b"x" * 100_000))
        self.leave(200_001)
        line = self.site_fixture.line()
        line.feed(encode_request("GET", PAGE))
        self.is_refused(line)
        line.feed(encode_request("HEAD", PAGE) * 2)
        answers = parse_responses(line.taken(), head=True)
        self.assertEqual([(one.status, one.headers["content-length"]) for one in answers], [(200, "100000")] * 2)
        self.assertEqual(self.unread.total, 200_001)

    def test_heads(self) -> None:
        """Of an answer to HEAD there is nothing to count."""
        self.decentrl.page = lambda did: succeed(RequestReply(200, b"x" * ONE))
        line = self.site_fixture.line()
        line.stuck = True
        line.feed(encode_request("HEAD", PAGE))
        self.assertEqual((line.taken()[:12], self.unread.total), (b"HTTP/1.1 200", 0))

    def test_the_largest_page(self) -> None:
        """What is the same for everybody is in memory as often as it is unread."""
        size = len(self.site_fixture.request("GET", "/openapi.json").body)
        self.assertGreater(size, SMALL_RESPONSE_BYTES)
        self.leave(ONE - size)
        for status in (200, 429):
            line = self.site_fixture.line()
            line.stuck = True
            line.feed(encode_request("GET", "/openapi.json"))
            self.assertEqual(self.statuses(line), [status])
        self.assertEqual(self.unread.of(PEER), ONE)

    def test_the_last_answer(self) -> None:
        """Of a connection that ends with it: it counts until it is taken, and then the connection is closed."""
        line = self.leave(ONE, Connection="close")
        self.site_fixture.settle()
        self.assertEqual((line.lost, self.unread.of(PEER)), (False, ONE))
        line.unstick()
        self.assertEqual((line.lost, self.unread.total), (True, 0))

    def test_the_last_answer_is_not_taken(self) -> None:
        """It does not stay for ever, be it large or small."""
        lines = self.leave(ONE, Connection="close"), self.leave(10, Connection="close")
        self.site_fixture.clock.advance(59.9)
        self.assertEqual([line.lost for line in lines], [False, False])
        self.site_fixture.clock.advance(0.2)
        self.site_fixture.settle()
        self.assertEqual([line.lost for line in lines], [True, True])
        self.assertEqual(self.unread.total, 0)

    def test_after_the_last_answer(self) -> None:
        """What a client sends then is neither served nor kept, though a transport that closes reads on."""
        for size in (ONE, 10):
            line = self.leave(size, Connection="close")
            served = len(self.decentrl.received)
            for _ in range(10):
                line.protocol.dataReceived(self.asking(10) + b"x" * 100_000)
            channel: Any = line.protocol
            self.assertEqual(channel.held, 0)
            self.assertEqual(len(self.decentrl.received), served)

    def test_after_a_bad_request(self) -> None:
        """The same holds where there was no answer but that what came is no HTTP."""
        line = self.site_fixture.line()
        line.stuck = True
        line.feed(b"nonsense\r\n\r\n")
        self.assertEqual(line.taken()[:12], b"HTTP/1.1 400")
        for piece in self.asking(ONE).splitlines(keepends=True):
            line.protocol.dataReceived(piece)
        self.assertEqual((line.taken(), self.decentrl.received), (b"", []))
        self.site_fixture.clock.advance(60.1)
        self.site_fixture.settle()
        self.assertTrue(line.lost)


class Reader(Protocol):
    """A client that reads when it is told to."""

    def __init__(self) -> None:
        self.got = bytearray()
        self._wanted = 0
        self._whole: Deferred[bytes] = Deferred()

    def ask(self, request: bytes) -> None:
        """Send, and stop reading."""
        assert self.transport is not None
        wire: Any = self.transport
        wire.pauseProducing()
        wire.write(request)

    def read(self, body: int) -> Deferred[bytes]:
        """All of an answer, whose body has so many bytes."""
        self._wanted, self._whole = body, Deferred()
        wire: Any = self.transport
        wire.resumeProducing()
        return self._whole

    def dataReceived(self, data: bytes) -> None:
        self.got += data
        end = self.got.find(b"\r\n\r\n", 0, 4096)
        if end > 0 and len(self.got) >= end + 4 + self._wanted and not self._whole.called:
            got, self.got = bytes(self.got), bytearray()
            self._whole.callback(got)

    def connectionLost(self, reason: Failure | None = None) -> None:
        """What was awaited will not come."""
        if not self._whole.called:
            self._whole.errback(Failure(ConnectionError()))


class KernelTests(TestCase):
    """How a transport tells that it is full, and that it no longer is, only real sockets show."""

    timeout = 120

    def setUp(self) -> None:
        reactor: Any = _reactor
        self.call_later = reactor.callLater
        self.decentrl = FakeDecentrl()
        site_fixture = InMemorySite(self, fake_decentrl=self.decentrl, limits=PLENTY)
        self.site = site_fixture.site
        self.unread = self.site.unread
        self.site.scheduler._clock, self.site.scheduler._steady = reactor, perf_counter
        port = reactor.listenTCP(0, self.site, interface=LOCAL)
        self.addCleanup(port.stopListening)
        self.addCleanup(lambda: Deferred.fromCoroutine(self.closed()))
        self.endpoint = TCP4ClientEndpoint(reactor, LOCAL, port.getHost().port)

    async def closed(self) -> None:
        """Return when the daemon has no connection any more."""
        while self.site._per_host:
            await deferLater(_reactor, 0.01)

    async def client(self) -> Reader:
        """A client that is connected."""
        reader = Reader()
        await connectProtocol(self.endpoint, reader)
        wire: Any = reader.transport
        self.addCleanup(wire.abortConnection)
        return reader

    async def asked(self, reader: Reader, size: int, headers: dict[str, str]) -> None:
        """Wait until this client's request was answered with so many bytes; it reads nothing of it."""
        arrived: Deferred[None] = Deferred()
        reply: Deferred[RequestReply] = Deferred()

        def answer(body: bytes) -> Deferred[RequestReply]:
            self.call_later(0, arrived.callback, None)
            return reply

        self.decentrl.answer = answer
        reader.ask(encode_request("POST", "/", b"{}", {"Content-Type": "application/json", **headers}))
        await arrived
        reply.callback(RequestReply(200, b"x" * size))

    async def test_a_client_that_waits_with_reading(self) -> None:
        """20 MiB count until they are read; as much again is refused before that, and answered afterwards."""
        size = 20 * 1024 * 1024
        headers: dict[str, str]
        for headers in ({}, DETOUR):
            first, second = await self.client(), await self.client()
            await self.asked(first, size, headers)
            self.assertEqual((self.unread.of(LOCAL), self.unread.total), (size, size))
            await self.asked(second, size, headers)
            (refused,) = parse_responses(await second.read(len(b'{"type":"ERROR","code":"RATE_LIMITED"}')))
            self.assertEqual((refused.status, refused.json), (429, REFUSED))
            self.assertEqual(self.unread.total, size)
            (whole,) = parse_responses(await first.read(size))
            self.assertEqual((whole.status, len(whole.body)), (200, size))
            self.assertEqual(self.unread.total, 0)
            await self.asked(second, size, headers)
            (whole,) = parse_responses(await second.read(size))
            self.assertEqual((whole.status, len(whole.body)), (200, size))
            self.assertEqual(self.unread.total, 0)
