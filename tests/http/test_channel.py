"""The fast path for plain POSTs responds as twisted.web would, whatever arrives."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, fail, succeed
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from twisted.web.http import HTTPChannel

from mediatord.app.public_site import build_site
from mediatord.didcomm.messages import ACCEPTED
from mediatord.http import channel as channel_module
from mediatord.http.channel import BackpressureHTTPChannel, MediatorHTTPChannel, parse_plain_head
from mediatord.http.site import MediatorSite
from mediatord.ratelimit.admission import RequestReply
from tests.http.fake_protocols import FakeDecentrl, FakeDIDComm
from tests.http.in_memory_site import parse_responses
from tests.in_memory_mediator import InMemoryMediator

MAX_BODY = 1000


class RecordingTransport(StringTransport):
    """Transport that records how the connection ended."""

    ended = ""

    def abortConnection(self) -> None:  # noqa: N802
        """Record the abort."""
        self.ended = "aborted"

    def loseConnection(self) -> None:
        """Record the close."""
        self.ended = self.ended or "closed"
        super().loseConnection()


def build_site_with_protocols(in_memory: InMemoryMediator, didcomm: Any, decentrl: Any) -> MediatorSite:
    """Build the site of an in-memory mediator with other protocols."""
    return build_site(in_memory.base, didcomm, decentrl, in_memory.config)


class SiteFixture:
    """A site that can be used through the fast path or through twisted.web alone."""

    def __init__(self, test: SynchronousTestCase) -> None:
        # Hypothesis sends more requests than the default limit of one address.
        limits = {"max_message_bytes": MAX_BODY, "ip_per_minute": 1_000_000}
        self.in_memory = InMemoryMediator(test, limits=limits, trusted_proxies=["192.168.1.1"], listen=["tcp:0"])
        self.didcomm, self.decentrl = FakeDIDComm(), FakeDecentrl()
        self.site = build_site_with_protocols(self.in_memory, self.didcomm, self.decentrl)

    def connect(self, *, stock: bool = False) -> tuple[Any, RecordingTransport]:
        """Open a connection."""
        transport = RecordingTransport()
        address = transport.getPeer()
        channel: Any = self.site.buildProtocol(address)
        if stock:
            channel._read = partial(BackpressureHTTPChannel._read, channel)
        channel.makeConnection(transport)
        return channel, transport

    def exchange(self, pieces: Sequence[bytes], *, stock: bool = False) -> tuple[list[Any], bytes, str]:
        """Send pieces; return the accepted messages, the comparable responses and how the connection ended."""
        self.didcomm.received, self.decentrl.received = [], []
        channel, transport = self.connect(stock=stock)
        for piece in pieces:
            if not transport.disconnecting and not transport.ended:
                channel.dataReceived(piece)
        while any(
            call.getTime() <= self.in_memory.clock.seconds() for call in self.in_memory.clock.getDelayedCalls()
        ):
            self.in_memory.clock.advance(0)
        channel.connectionLost(Failure(ConnectionError()))
        accepted = [("didcomm", *item) for item in self.didcomm.received] + [
            ("decentrl", *element) for element in self.decentrl.received
        ]
        return accepted, _normalize_responses(transport.value()), transport.ended


def _normalize_responses(responses: bytes) -> bytes:
    """Remove what may differ between responses: date, report ids, order of headers."""
    responses = re.sub(rb"Date: [^\r]*\r\n", b"", responses)
    responses = re.sub(rb'"id":"[0-9a-f-]{36}"', b'"id":""', responses)
    blocks = re.split(rb"(?=HTTP/1\.1 \d{3} )", responses)
    return b"".join(_normalize_response(block) for block in blocks)


def _normalize_response(block: bytes) -> bytes:
    head, _, body = block.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    return b"\n".join([status, *sorted(line.lower() for line in lines)]) + b"\n\n" + body + b"\n"


def post(body: bytes = b"hello", path: str = "/didcomm", /, **headers: str) -> bytes:
    """Encode a request with an envelope, unless the headers say otherwise."""
    lines = {"Host": "a", "Content-Type": "application/didcomm-encrypted+json", "Content-Length": str(len(body))}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


def command(body: bytes = b"hello", /, **headers: str) -> bytes:
    """Encode a request with a command."""
    return post(body, "/", **{"Content_Type": "application/json", **headers})


# Headers that programs and pages send with a command.
LIBRARY_HEADERS = {
    "axios in a browser": {
        "Connection": "keep-alive",
        "sec-ch-ua-platform": '"Linux"',
        "User-Agent": "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/140.0.0.0",
        "Accept": "application/json, text/plain, */*",
        "sec-ch-ua": '"Chromium";v="140", "Not=A?Brand";v="24"',
        "sec-ch-ua-mobile": "?0",
        "Origin": "https://wallet.example",
        "Sec-Fetch-Site": "cross-site",
        "Sec-Fetch-Mode": "cors",
        "Sec-Fetch-Dest": "empty",
        "Sec-Fetch-Storage-Access": "active",
        "Referer": "https://wallet.example/",
        "Accept-Encoding": "gzip, deflate, br, zstd",
        "Accept-Language": "en-US,en;q=0.9",
    },
    "fetch in Firefox": {
        "User-Agent": "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0",
        "Accept": "*/*",
        "Accept-Language": "en-US,en;q=0.5",
        "Accept-Encoding": "gzip, deflate, br, zstd",
        "Referer": "http://localhost:5173/",
        "Origin": "http://localhost:5173",
        "DNT": "1",
        "Sec-GPC": "1",
        "Connection": "keep-alive",
        "Sec-Fetch-Dest": "empty",
        "Sec-Fetch-Mode": "cors",
        "Sec-Fetch-Site": "same-site",
        "Priority": "u=4",
        "Pragma": "no-cache",
        "Cache-Control": "no-cache",
    },
    "axios in Node": {
        "Accept": "application/json, text/plain, */*",
        "User-Agent": "axios/1.12.2",
        "Accept-Encoding": "gzip, compress, deflate, br",
        "Connection": "keep-alive",
    },
    "fetch in Node": {
        "connection": "keep-alive",
        "accept": "*/*",
        "accept-language": "*",
        "sec-fetch-mode": "cors",
        "user-agent": "node",
        "accept-encoding": "gzip, deflate",
    },
    "anything behind a proxy": {
        "User-Agent": "x",
        "X-Real-IP": "203.0.113.9",
        "X-Forwarded-For": "203.0.113.9",
        "X-Forwarded-Proto": "https",
        "X-Forwarded-Host": "mediator.example",
        "X-Forwarded-Port": "443",
    },
}
BROWSER_HEADERS = LIBRARY_HEADERS["axios in a browser"]

# Requests on which parsers have disagreed, and plain ones with one odd detail.
ODD_REQUESTS = [
    post().replace(b"Host: a\r\n", b""),
    post(Transfer_Encoding="chunked"),
    post(b"5\r\nhello\r\n0\r\n\r\n", Transfer_Encoding="chunked"),
    post().replace(b"Content-Length: 5", b"Content-Length: 5\r\nContent-Length: 6"),
    post().replace(b"Content-Length: 5", b"Content-Length: 5\r\nContent-Length: 5"),
    post().replace(b"Content-Length: 5", b"Content-Length : 5"),
    post().replace(b"Content-Length: 5", b"Content-Length: +5"),
    post().replace(b"Content-Length: 5", b"Content-Length: 0x5"),
    post().replace(b"Content-Length: 5", b"Content-Length: 5, 5"),
    post().replace(b"Content-Length: 5", b"Content-Length: \xb2"),
    post().replace(b"Content-Length: 5", b"content-LENGTH:5"),
    post().replace(b"Content-Length: 5", b"Content-Length:\t 5 \t"),
    post().replace(b"Content-Length: 5", b"Content-Length:"),
    post().replace(b"Content-Length: 5", b"Content-Length: -1"),
    post().replace(b"Content-Length: 5\r\n", b""),
    post().replace(b"Host: a", b"Host: a\n X: b"),
    post().replace(b"Host: a", b"Host: a\r\n continued"),
    post().replace(b"Host: a", b"Host: a\rContent-Length: 1"),
    post().replace(b"Host: a", b"Host: a\0b"),
    post().replace(b"Host: a", b": a"),
    post().replace(b"Host: a", b"no colon"),
    post().replace(b"Host: a", b"Host: \xe9"),
    post().replace(b"\r\n", b"\n"),
    b"\r\n" + post(),
    post().replace(b"POST", b"post"),
    post().replace(b"POST", b"GET"),
    post().replace(b"HTTP/1.1", b"HTTP/1.0"),
    post().replace(b"HTTP/1.1", b"HTTP/9.9"),
    post().replace(b"/didcomm", b"/didcomm/"),
    post().replace(b"/didcomm", b"/didcomm?a=b"),
    post().replace(b"/didcomm", b"/"),
    post().replace(b"/didcomm", b"/didcomm/../metrics"),
    post().replace(b"/didcomm ", b"/didcomm  "),
    post().replace(b"/didcomm", b"http://a/didcomm"),
    post(Connection="close"),
    post(Connection="Keep-Alive"),
    post(Connection="Upgrade", Upgrade="h2c"),
    post(Expect="100-continue"),
    post(X_Forwarded_For="203.0.113.9"),
    post(X_Forwarded_For="203.0.113.9, 192.168.1.1"),
    post(X_Forwarded_For="\xff"),
    post(Origin="https://a.example"),
    post(Referer="https://a.example/?x=y"),
    post(Content_Type="text/html"),
    post(Content_Type="Application/DIDComm-Encrypted+JSON; charset=utf-8"),
    post(b""),
    post(b"x" * MAX_BODY),
    post(b"x" * (MAX_BODY + 1)),
    post(b"x", Content_Length="99999999999"),
    post(User_Agent="x" * 9000),
    post(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
    b"GET /did HTTP/1.1\r\nHost: a\r\n\r\n",
    # Where the Content-Type decides, two of them or an odd one must not be read in two ways.
    command().replace(b"Content-Type", b"X-Label"),
    command().replace(b"Content-Type: application/json\r\n", b""),
    command(Content_Type=""),
    command(Content_Type="text/plain;charset=UTF-8"),
    command(Content_Type="text/plain; x=didcomm"),
    command(Content_Type="application/didcomm+encrypted"),
    command(Content_Type="multipart/form-data; boundary=x"),
    command(b"a=b", Content_Type="application/x-www-form-urlencoded"),
    command().replace(b"Host: a", b"Host: a\r\nContent-Type: application/didcomm-encrypted+json"),
    command(content_type="application/didcomm-encrypted+json"),
    command(Transfer_Encoding="chunked"),
    command().replace(b"POST / ", b"POST /? "),
    command().replace(b"POST / ", b"POST // "),
    command().replace(b"POST / ", b"POST  "),
    command().replace(b"POST / ", b"POST /%2f "),
    command().replace(b"POST / ", b"PUT / "),
    command(b"x" * MAX_BODY),
    command(b"x" * (MAX_BODY + 1)),
    command(Content_Type="application/didcomm-encrypted+json", Content_Length="1001"),
    command(Cookie="a=b"),
    command(Origin="null"),
    command(Origin="https://\xe9.example"),
    command(Sec_WebSocket_Key="x", Upgrade="websocket"),
    command(Sec_Fetch_Mode="cors", sec_fetch_mode="cors"),
    command(**BROWSER_HEADERS),
    post(**BROWSER_HEADERS),
    b"\x16\x03\x01\x02\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


# Insertions that change the meaning of a head.
_INSERTED = [
    *(b"", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b"\0", b":", b"\t", b"0", b"4", b"55", b"-", b"+", b"\xff"),
    *(b",", b"\r\nTransfer-Encoding: chunked", b"\r\n Content-Length: 3", b"\r\nX: content-length:1"),
    *(
        b"\r\nContent-Length: 3",
        b"\r\nConnection: close",
        b"\r\nHost: b",
        b"\r\nAccept: */*",
        b"\r\nAccept: Content-Length: 1",
    ),
]
PLAIN_REQUESTS = [post(), post(b"{}"), command(), command(b"{}"), command(Content_Type="text/plain")]


class EquivalenceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.fixture = SiteFixture(self)

    def assert_paths_agree(self, pieces: Sequence[bytes]) -> None:
        """Both paths accept the same messages and send the same responses."""
        self.assertEqual(self.fixture.exchange(pieces), self.fixture.exchange(pieces, stock=True))

    def test_odd_requests_alone_and_between_plain_ones(self) -> None:
        """Odd requests get the same responses alone and between plain ones on one connection."""
        for request in ODD_REQUESTS:
            self.assert_paths_agree([request])
            self.assert_paths_agree([post(b"before") + request + command(b"after")])
            self.assert_paths_agree([command(b"before"), request, post(b"after")])

    def test_requests_of_http_libraries(self) -> None:
        """Headers that browsers, libraries and proxies add make no difference."""
        for headers in LIBRARY_HEADERS.values():
            self.assert_paths_agree([command(**headers) + post(**headers)])

    def test_requests_in_pieces(self) -> None:
        """Cuts at any position make no difference."""
        for request in (
            post(),
            command(),
            ODD_REQUESTS[1],
            ODD_REQUESTS[9],
            post(b"one") + command(b"two") + ODD_REQUESTS[0],
        ):
            for size in (1, 2, 7, 64):
                self.assert_paths_agree([request[start : start + size] for start in range(0, len(request), size)])

    @settings(max_examples=300, deadline=None)
    @given(st.data())
    def test_mutated_streams(self, data: Any) -> None:
        """Both paths agree on requests with bytes changed, inserted and removed, cut anywhere."""
        stream = b"".join(
            data.draw(st.lists(st.sampled_from([*PLAIN_REQUESTS, *ODD_REQUESTS]), min_size=1, max_size=3))
        )
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, len(stream)))
            gone = data.draw(st.integers(0, 2))
            new = data.draw(st.sampled_from([b"", b"\r", b"\n", b"\r\n", b" ", b"\0", b":", b"\t", b"0", b"\xff"]))
            stream = stream[:at] + new + stream[at + gone :]
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
        edges = [0, *cuts, len(stream)]
        self.assert_paths_agree([stream[a:b] for a, b in zip(edges, edges[1:], strict=False)])

    @settings(max_examples=500, deadline=None)
    @given(st.data())
    def test_mutated_requests_in_sequence(self, data: Any) -> None:
        """Both paths agree on whole requests with changed bytes, most of them like the one before."""
        request = data.draw(st.sampled_from([*PLAIN_REQUESTS, *(item for item in ODD_REQUESTS if len(item) < 600)]))
        pieces = []
        for _ in range(data.draw(st.integers(2, 5))):
            piece = request
            for _ in range(data.draw(st.integers(0, 2))):
                head = max(piece.find(b"\r\n\r\n"), 0) + 4
                length = piece.find(b"ontent-Length: ") + 15
                at = data.draw(st.integers(0, head) | st.integers(max(length - 3, 0), length + 3))
                gone = data.draw(st.integers(0, 2))
                piece = piece[:at] + data.draw(st.sampled_from(_INSERTED)) + piece[at + gone :]
            pieces.append(piece)
        self.assert_paths_agree(pieces)


class FastPathTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.fixture = SiteFixture(self)
        self.channel: MediatorHTTPChannel
        self.channel, self.transport = self.fixture.connect()
        self.parsed_by_twisted: list[bytes] = []
        self.patch(HTTPChannel, "lineReceived", lambda channel, transport: self.parsed_by_twisted.append(transport))

    def status_lines(self) -> list[bytes]:
        """Status lines of the responses so far."""
        return re.findall(rb"HTTP/1\.1 (\d{3}) ", self.transport.value())

    def test_plain_post_bypasses_twisted_web(self) -> None:
        """twisted.web parses no plain POST."""
        self.fixture.didcomm.answer = lambda body: succeed(ACCEPTED)
        self.channel.dataReceived(post())
        self.assertEqual(self.status_lines(), [b"202"])
        self.assertIn(b"Content-Length: 0\r\n\r\n", self.transport.value())
        self.assertNotIn(b"Content-Type", self.transport.value())
        self.assertEqual(self.parsed_by_twisted, [])

    def test_plain_command_bypasses_twisted_web(self) -> None:
        """twisted.web parses no command, with headers of browsers, axios or proxies either; its client is charged."""
        for headers in LIBRARY_HEADERS.values():
            self.fixture.decentrl.received = []
            self.channel.dataReceived(command(**headers))
            self.assertEqual(
                self.fixture.decentrl.received, [(b"hello", headers.get("X-Forwarded-For", "192.168.1.1"))]
            )
            (response,) = parse_responses(self.transport.value())
            self.assertEqual((response.status, response.json), (200, {"n": 5}))
            self.assertEqual(response.headers["content-type"], "application/json")
            self.assertEqual(response.headers["access-control-allow-origin"], "*")
            self.assertEqual(self.parsed_by_twisted, [])
            self.transport.clear()

    def test_content_type_selects_protocol(self) -> None:
        """At `/` the Content-Type selects the protocol, at `/didcomm` it does not matter."""
        json, envelope = "application/json", "Application/DIDComm-Encrypted+JSON; charset=utf-8"
        for path, label in (("/", json), ("/", envelope), ("/didcomm", json), ("/didcomm", envelope)):
            self.channel.dataReceived(post(path.encode(), path, Content_Type=label))
        self.assertEqual([raw for raw, _ in self.fixture.decentrl.received], [b"/"])
        self.assertEqual([raw for raw, _ in self.fixture.didcomm.received], [b"/", b"/didcomm", b"/didcomm"])
        self.assertEqual(self.parsed_by_twisted, [])

    def test_responses_keep_request_order(self) -> None:
        """A request that arrives while the one before is served waits."""
        first: Deferred[RequestReply] = Deferred()
        self.fixture.didcomm.answer = lambda body: first if body == b"one" else succeed(ACCEPTED)
        self.channel.dataReceived(post(b"one") + post(b"two"))
        self.assertEqual([raw for raw, _ in self.fixture.didcomm.received], [b"one"])
        first.callback(RequestReply(429, media_type="", retry_after=7))
        self.assertEqual(self.status_lines(), [b"429", b"202"])
        self.assertIn(b"Retry-After: 7\r\n", self.transport.value())

    def test_pauses_reading_beyond_read_ahead_limit(self) -> None:
        """Read-ahead is bounded."""
        first: Deferred[RequestReply] = Deferred()
        self.fixture.didcomm.answer = lambda body: first if body == b"one" else succeed(ACCEPTED)
        self.channel.dataReceived(post(b"one") + post(b"x" * 900) * 80)
        self.channel.dataReceived(post())
        self.assertEqual(self.transport.producerState, "paused")
        first.callback(ACCEPTED)
        self.assertEqual(self.transport.producerState, "paused")
        for _ in range(82):
            self.fixture.in_memory.clock.advance(0)
        self.assertEqual(self.transport.producerState, "producing")
        self.assertEqual(len(self.status_lines()), 82)

    def test_pauses_serving_until_client_reads(self) -> None:
        """A client that does not read its responses is not served."""
        self.channel.pauseProducing()
        self.channel.dataReceived(post())
        self.assertEqual(self.status_lines(), [])
        self.channel.resumeProducing()
        self.assertEqual(self.status_lines(), [b"200"])

    def test_request_times_out(self) -> None:
        """503 after the deadline; the next request is served, the late reply is discarded."""
        first: Deferred[RequestReply] = Deferred()
        self.fixture.didcomm.answer = lambda body: first if body == b"one" else succeed(ACCEPTED)
        self.channel.dataReceived(post(b"one") + post(b"two"))
        self.fixture.in_memory.clock.advance(9.9)
        self.assertEqual(self.status_lines(), [])
        self.fixture.in_memory.clock.advance(0.2)
        self.assertEqual(self.status_lines(), [b"503", b"202"])
        first.callback(ACCEPTED)
        self.assertEqual(self.status_lines(), [b"503", b"202"])

    def test_command_times_out(self) -> None:
        """A 503 has the form of its protocol, also for an envelope that times out behind a command."""
        self.fixture.decentrl.answer = self.fixture.didcomm.answer = lambda body: Deferred()
        self.channel.dataReceived(command() + post())
        self.fixture.in_memory.clock.pump([10, 10])
        first, second = parse_responses(self.transport.value())
        self.assertEqual((first.status, first.json), (503, {"type": "ERROR", "code": "UNAVAILABLE"}))
        self.assertEqual(first.headers["retry-after"], "5")
        self.assertEqual((second.status, second.json["status"]), (503, "error"))

    def test_closes_idle_connections(self) -> None:
        """Idle connections time out before, within and between requests."""
        self.channel.dataReceived(post(b"hello")[:-1])
        self.fixture.in_memory.clock.pump([30, 29])
        self.assertEqual(self.transport.ended, "")
        self.channel.dataReceived(b"o")
        self.assertEqual(self.status_lines(), [b"200"])
        self.fixture.in_memory.clock.pump([30, 29])
        self.assertEqual(self.transport.ended, "")
        self.fixture.in_memory.clock.pump([1.1])
        self.assertEqual(self.transport.ended, "aborted")

    def test_timeouts_survive_clock_step(self) -> None:
        """Setting the clock back at most doubles the time of a request or an idle client."""
        self.fixture.didcomm.answer = lambda body: Deferred()
        self.channel.dataReceived(post())
        self.fixture.in_memory.clock.step_wall_clock(-3600)
        self.fixture.in_memory.clock.pump([10, 10])
        self.assertEqual(self.status_lines(), [b"503"])
        self.fixture.in_memory.clock.step_wall_clock(-3600)
        self.fixture.in_memory.clock.pump([60, 60])
        self.assertEqual(self.transport.ended, "aborted")

    def test_internal_error_keeps_connection(self) -> None:
        """An internal error is a 500; the connection stays open."""
        self.fixture.didcomm.answer = self.fixture.decentrl.answer = lambda body: fail(ZeroDivisionError("secret"))
        self.channel.dataReceived(post() + command())
        first, second = parse_responses(self.transport.value())
        self.assertEqual((first.status, first.json["status"]), (500, "error"))
        self.assertEqual((second.status, second.json), (500, {"type": "ERROR", "code": "INTERNAL_ERROR"}))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)

    def test_refuses_while_stopping(self) -> None:
        """503 with Retry-After while the daemon stops."""
        in_memory = self.fixture.in_memory
        self.fixture.site = build_site_with_protocols(in_memory, in_memory.didcomm, in_memory.decentrl)
        channel, transport = self.fixture.connect()
        in_memory.base.gate.stopService()
        channel.dataReceived(post() + command())
        first, second = parse_responses(transport.value())
        self.assertEqual((first.status, first.headers["retry-after"]), (503, "5"))
        self.assertEqual((second.status, second.headers["retry-after"]), (503, "5"))
        self.assertEqual(second.json, {"type": "ERROR", "code": "UNAVAILABLE"})

    def test_request_of_disconnected_client_finishes(self) -> None:
        """The request is finished, nothing is written, and no timer remains."""
        first: Deferred[RequestReply] = Deferred()
        self.fixture.didcomm.answer = lambda body: first
        self.channel.dataReceived(post())
        self.channel.connectionLost()
        first.callback(ACCEPTED)
        self.assertEqual(self.transport.value(), b"")
        mine = [call for call in self.fixture.in_memory.clock.getDelayedCalls() if "HTTPChannel" in repr(call)]
        self.assertEqual(mine, [])


def test_plain_head_parser_rejects_ambiguous_heads() -> None:
    """The parser accepts only the odd heads that cannot be read in two ways."""
    read = [request for request in ODD_REQUESTS if parse_plain_head(request.partition(b"\r\n\r\n")[0]) is not None]
    assert post() not in ODD_REQUESTS and parse_plain_head(post().partition(b"\r\n\r\n")[0]) is not None
    for request in read:
        assert request.startswith((b"POST /didcomm HTTP/1.1\r\n", b"POST / HTTP/1.1\r\n"))
        assert request.lower().count(b"content-length") == 1
        assert request.lower().count(b"content-type") <= 1
        assert b"transfer-encoding" not in request.lower() and b"expect" not in request.lower()


class ReadAheadTests(SynchronousTestCase):
    def test_read_ahead_is_counted(self) -> None:
        """Partial and waiting requests count as read-ahead until they are served or gone."""
        fixture = SiteFixture(self)
        held: Deferred[Any] = Deferred()
        fixture.didcomm.answer = lambda body: held
        (part, transport), (behind, _) = fixture.connect(), fixture.connect()
        part.dataReceived(post()[:-1])
        behind.dataReceived(post())
        self.assertEqual(fixture.site.read_ahead(), (1, len(post()) - 1))
        behind.dataReceived(post() + post())
        self.assertEqual(fixture.site.read_ahead(), (2, 3 * len(post()) - 1))
        part.connectionLost(Failure(ConnectionError()))
        self.assertEqual(fixture.site.read_ahead(), (1, 2 * len(post())))
        held.callback(RequestReply(202, media_type=""))
        self.assertEqual(fixture.site.read_ahead(), (0, 0))
        self.assertEqual(transport.ended, "")


def _heads() -> st.SearchStrategy[bytes]:
    """Similar heads, as those of one connection are."""
    request = st.sampled_from(
        [*PLAIN_REQUESTS, *(item for item in ODD_REQUESTS if b"ontent-" in item), post(Content_Length="007")]
    )
    length = st.sampled_from([b"5", b"0", b"17", b"+5", b"5 ", b" 5", b"5\r\nHost: b", b"", b"1234567890", b"5:5"])

    def replace_length(request: bytes, length: bytes) -> bytes:
        return request.partition(b"\r\n\r\n")[0].replace(b"Content-Length: 5", b"Content-Length: " + length)

    return st.builds(replace_length, request, length)


@settings(max_examples=1000, deadline=None)
@given(st.lists(_heads(), min_size=2, max_size=5))
def test_cached_heads_parse_like_new_ones(heads: list[bytes]) -> None:
    """A head after others is parsed as if it were the first; none has two lengths."""
    parsed = [parse_plain_head(head) for head in heads]
    for head, found in zip(heads, parsed, strict=True):
        channel_module._parse_cached_head.cache_clear()
        assert parse_plain_head(head) == found
        assert found is None or head.lower().count(b"content-length") == 1


def test_parses_only_length_of_cached_head() -> None:
    """Only the length of a cached head is parsed; a head too long for the cache is parsed whole."""
    cached = channel_module._parse_cached_head
    cached.cache_clear()
    head = b"POST / HTTP/1.1\r\nHost: a\r\n%bContent-Length: %d"
    heads = [head % (more, length) for more in (b"", b"Accept: */*\r\n") for length in (5, 17, 5)]
    assert [found and found[1] for found in map(parse_plain_head, heads)] == [5, 17, 5] * 2
    assert cached.cache_info().misses == 2
    long = post(User_Agent="x" * 600).partition(b"\r\n\r\n")[0]
    assert parse_plain_head(long) is not None
    assert cached.cache_info().currsize == 2


class EndlessHeadTests(SynchronousTestCase):
    """A head too long for the fast path is left to twisted.web and does not occupy the reactor."""

    def setUp(self) -> None:
        self.fixture = SiteFixture(self)

    def connect(self) -> tuple[Any, RecordingTransport]:
        """Open a connection that fails after a hundred quanta."""
        channel, transport = self.fixture.connect()
        self.quanta = 0
        run_quantum = channel.run_quantum

        def count_quantum() -> None:
            self.quanta += 1
            if self.quanta <= 100:
                run_quantum()

        channel.run_quantum = count_quantum
        return channel, transport

    def send(self, channel: Any, transport: RecordingTransport, pieces: Sequence[bytes]) -> None:
        """Send pieces, each after all work on those before is done."""
        for piece in pieces:
            if not transport.ended:
                channel.dataReceived(piece)
                self.fixture.in_memory.clock.advance(0)
        self.assertLessEqual(self.quanta, 100)

    def test_rejects_endless_line(self) -> None:
        """An endless line is rejected as by twisted.web, whole or in pieces."""
        request = b"POST /didcomm HTTP/1.1\r\nHost: a\r\nX: "
        for beginning in (b"", b"GET /", request, request + b"a\r\n "):
            for size in (1_000, 9_000, 20_000, 1_000_000):
                endless = beginning + b"a" * 100_000
                pieces = [endless[at : at + size] for at in range(0, len(endless), size)]
                channel, transport = self.connect()
                self.send(channel, transport, pieces)
                _, response, ended = self.fixture.exchange(pieces, stock=True)
                self.assertEqual(
                    (_normalize_responses(transport.value()), transport.ended), (response, ended), (beginning, size)
                )
                self.assertTrue(transport.ended)

    def test_waits_for_rest_of_long_line(self) -> None:
        """A line between the limits of the fast path and of twisted.web is read to its end and parsed."""
        for beginning, rest in ((b"POST /didcomm HTTP/1.1\r\nX: ", b""), (b"POST /didcomm?", b" HTTP/1.1")):
            channel, transport = self.connect()
            self.send(channel, transport, (beginning, b"a" * 8_000, b"a" * 4_000, b"a"))
            self.assertEqual((transport.value(), transport.ended), (b"", ""))
            self.send(channel, transport, [rest + b"\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"])
            self.assertEqual(self.fixture.didcomm.received.pop()[0], b"hello")
            self.assertEqual(transport.ended, "")


class SlowRequestTests(SynchronousTestCase):
    """A request that takes more than a minute is given up, however steadily it arrives."""

    def setUp(self) -> None:
        self.fixture = SiteFixture(self)

    def send_slowly(self, beginning: bytes, step: float = 0.0) -> str:
        channel, transport = self.fixture.connect()
        channel.dataReceived(beginning)
        self.fixture.in_memory.clock.step_wall_clock(step)
        channel.dataReceived(b"x")
        for _ in range(5):
            self.fixture.in_memory.clock.advance(15)
            if not transport.ended:
                channel.dataReceived(b"x")
        return transport.ended

    def test_slow_body(self) -> None:
        """A slow body times out on the fast path."""
        self.assertEqual(self.send_slowly(post(b"", Content_Length="900")), "aborted")

    def test_slow_body_when_clock_is_set_back(self) -> None:
        """After the clock is set back, the time-out counts from then."""
        self.assertEqual(self.send_slowly(post(b"", Content_Length="900"), step=-3600), "aborted")

    def test_slow_head(self) -> None:
        """A slow head times out in twisted.web."""
        self.assertEqual(self.send_slowly(b"POST /didcomm HTTP/1.1\r\nX: "), "aborted")

    def test_limits_connections_per_address(self) -> None:
        """Connections above the limit are closed at once; closed ones make room."""
        limit = 4 * self.fixture.in_memory.config.limits.max_connections_per_ip
        in_memory = InMemoryMediator(self)
        site = build_site_with_protocols(in_memory, self.fixture.didcomm, self.fixture.decentrl)
        address = StringTransport().getPeer()
        channels = [site.buildProtocol(address) for _ in range(limit)]
        self.assertIsNone(site.buildProtocol(address))
        channels[0].connectionLost()
        self.assertIsNotNone(site.buildProtocol(address))
