"""The fast path for plain POSTs: whatever arrives, clients see what they would see from twisted.web."""

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
    """A transport that notes how the connection ends."""

    ended = ""

    def abortConnection(self) -> None:  # noqa: N802
        """Cut off."""
        self.ended = "aborted"

    def loseConnection(self) -> None:
        """Close."""
        self.ended = self.ended or "closed"
        super().loseConnection()


def site_of(in_memory: InMemoryMediator, didcomm: Any, decentrl: Any) -> MediatorSite:
    """A house's own site, but for the halves behind it."""
    return build_site(in_memory.base, didcomm, decentrl, in_memory.config)


class SiteFixture:
    """One site, to be talked to on the fast path or straight through twisted.web."""

    def __init__(self, test: SynchronousTestCase) -> None:
        # However many requests of one address Hypothesis makes, none of them is one too many.
        limits = {"max_message_bytes": MAX_BODY, "ip_per_minute": 1_000_000}
        self.in_memory = InMemoryMediator(test, limits=limits, trusted_proxies=["192.168.1.1"], listen=["tcp:0"])
        self.didcomm, self.decentrl = FakeDIDComm(), FakeDecentrl()
        self.site = site_of(self.in_memory, self.didcomm, self.decentrl)

    def connect(self, *, stock: bool = False) -> tuple[Any, RecordingTransport]:
        """A new connection."""
        line = RecordingTransport()
        address = line.getPeer()
        channel: Any = self.site.buildProtocol(address)
        if stock:
            channel._read = partial(BackpressureHTTPChannel._read, channel)
        channel.makeConnection(line)
        return channel, line

    def exchange(self, pieces: Sequence[bytes], *, stock: bool = False) -> tuple[list[Any], bytes, str]:
        """What was taken, what was answered (without the date), and how it ended."""
        self.didcomm.received, self.decentrl.received = [], []
        channel, line = self.connect(stock=stock)
        for piece in pieces:
            if not line.disconnecting and not line.ended:
                channel.dataReceived(piece)
        while any(
            call.getTime() <= self.in_memory.clock.seconds() for call in self.in_memory.clock.getDelayedCalls()
        ):
            self.in_memory.clock.advance(0)
        channel.connectionLost(Failure(ConnectionError()))
        taken = [("didcomm", *one) for one in self.didcomm.received] + [
            ("decentrl", *one) for one in self.decentrl.received
        ]
        return taken, _comparable(line.value()), line.ended


def _comparable(answers: bytes) -> bytes:
    """Answers without what may differ: the date, the ids of reports, the order of headers."""
    answers = re.sub(rb"Date: [^\r]*\r\n", b"", answers)
    answers = re.sub(rb'"id":"[0-9a-f-]{36}"', b'"id":""', answers)
    blocks = re.split(rb"(?=HTTP/1\.1 \d{3} )", answers)
    return b"".join(_sorted(block) for block in blocks)


def _sorted(block: bytes) -> bytes:
    head, _, body = block.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    return b"\n".join([status, *sorted(line.lower() for line in lines)]) + b"\n\n" + body + b"\n"


def post(body: bytes = b"hello", path: str = "/didcomm", /, **headers: str) -> bytes:
    """An envelope, unless the headers say otherwise."""
    lines = {"Host": "a", "Content-Type": "application/didcomm-encrypted+json", "Content-Length": str(len(body))}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


def command(body: bytes = b"hello", /, **headers: str) -> bytes:
    """A command."""
    return post(body, "/", **{"Content_Type": "application/json", **headers})


# What programs and pages send around a command.
LIBRARIES = {
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
BROWSER = LIBRARIES["axios in a browser"]

# Requests in which parsers have disagreed, and plain ones with something odd about them.
ODD = [
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
    # Where the label decides, two labels or an odd one must not be read in two ways.
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
    command(**BROWSER),
    post(**BROWSER),
    b"\x16\x03\x01\x02\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


# What makes a head mean something else.
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
PLAIN = [post(), post(b"{}"), command(), command(b"{}"), command(Content_Type="text/plain")]


class EquivalenceTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.fixture = SiteFixture(self)

    def check(self, pieces: Sequence[bytes]) -> None:
        """Both ways take the same messages and give the same answers."""
        self.assertEqual(self.fixture.exchange(pieces), self.fixture.exchange(pieces, stock=True))

    def test_odd_requests(self) -> None:
        """Alone, and with a plain one before and after them on the same connection."""
        for request in ODD:
            self.check([request])
            self.check([post(b"before") + request + command(b"after")])
            self.check([command(b"before"), request, post(b"after")])

    def test_what_libraries_send(self) -> None:
        """Also with everything that browsers and proxies add."""
        for headers in LIBRARIES.values():
            self.check([command(**headers) + post(**headers)])

    def test_in_any_pieces(self) -> None:
        """Wherever the network cuts."""
        for request in (post(), command(), ODD[1], ODD[9], post(b"one") + command(b"two") + ODD[0]):
            for size in (1, 2, 7, 64):
                self.check([request[start : start + size] for start in range(0, len(request), size)])

    @settings(max_examples=300, deadline=None)
    @given(st.data())
    def test_anything(self, data: Any) -> None:
        """Requests with bytes changed, inserted and removed, in any pieces and any sequence."""
        stream = b"".join(data.draw(st.lists(st.sampled_from([*PLAIN, *ODD]), min_size=1, max_size=3)))
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, len(stream)))
            gone = data.draw(st.integers(0, 2))
            new = data.draw(st.sampled_from([b"", b"\r", b"\n", b"\r\n", b" ", b"\0", b":", b"\t", b"0", b"\xff"]))
            stream = stream[:at] + new + stream[at + gone :]
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
        edges = [0, *cuts, len(stream)]
        self.check([stream[a:b] for a, b in zip(edges, edges[1:], strict=False)])

    @settings(max_examples=500, deadline=None)
    @given(st.data())
    def test_whole_requests(self, data: Any) -> None:
        """One after the other, each in one piece and most of them like the one before, with bytes changed in it."""
        request = data.draw(st.sampled_from([*PLAIN, *(one for one in ODD if len(one) < 600)]))
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
        self.check(pieces)


class FastPathTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.fixture = SiteFixture(self)
        self.channel: MediatorHTTPChannel
        self.channel, self.line = self.fixture.connect()
        self.parsed_by_twisted: list[bytes] = []
        self.patch(HTTPChannel, "lineReceived", lambda channel, line: self.parsed_by_twisted.append(line))

    def answers(self) -> list[bytes]:
        """The status lines so far."""
        return re.findall(rb"HTTP/1\.1 (\d{3}) ", self.line.value())

    def test_a_plain_post_never_reaches_twisted_web(self) -> None:
        """That is what it is for."""
        self.fixture.didcomm.answer = lambda body: succeed(ACCEPTED)
        self.channel.dataReceived(post())
        self.assertEqual(self.answers(), [b"202"])
        self.assertIn(b"Content-Length: 0\r\n\r\n", self.line.value())
        self.assertNotIn(b"Content-Type", self.line.value())
        self.assertEqual(self.parsed_by_twisted, [])

    def test_a_plain_command_never_reaches_twisted_web(self) -> None:
        """Nor one that a browser, axios or a proxy has dressed up; each is charged to its client."""
        for headers in LIBRARIES.values():
            self.fixture.decentrl.received = []
            self.channel.dataReceived(command(**headers))
            self.assertEqual(
                self.fixture.decentrl.received, [(b"hello", headers.get("X-Forwarded-For", "192.168.1.1"))]
            )
            (answer,) = parse_responses(self.line.value())
            self.assertEqual((answer.status, answer.json), (200, {"n": 5}))
            self.assertEqual(answer.headers["content-type"], "application/json")
            self.assertEqual(answer.headers["access-control-allow-origin"], "*")
            self.assertEqual(self.parsed_by_twisted, [])
            self.line.clear()

    def test_whom_a_body_is_for(self) -> None:
        """At `/` the label decides, at `/didcomm` it does not matter."""
        json, envelope = "application/json", "Application/DIDComm-Encrypted+JSON; charset=utf-8"
        for path, label in (("/", json), ("/", envelope), ("/didcomm", json), ("/didcomm", envelope)):
            self.channel.dataReceived(post(path.encode(), path, Content_Type=label))
        self.assertEqual([raw for raw, _ in self.fixture.decentrl.received], [b"/"])
        self.assertEqual([raw for raw, _ in self.fixture.didcomm.received], [b"/", b"/didcomm", b"/didcomm"])
        self.assertEqual(self.parsed_by_twisted, [])

    def test_answers_come_in_order(self) -> None:
        """A second request that arrives while the first is served waits for its turn."""
        first: Deferred[RequestReply] = Deferred()
        self.fixture.didcomm.answer = lambda body: first if body == b"one" else succeed(ACCEPTED)
        self.channel.dataReceived(post(b"one") + post(b"two"))
        self.assertEqual([raw for raw, _ in self.fixture.didcomm.received], [b"one"])
        first.callback(RequestReply(429, media_type="", retry_after=7))
        self.assertEqual(self.answers(), [b"429", b"202"])
        self.assertIn(b"Retry-After: 7\r\n", self.line.value())

    def test_reading_stops_while_too_much_waits(self) -> None:
        """What is read ahead is bounded."""
        first: Deferred[RequestReply] = Deferred()
        self.fixture.didcomm.answer = lambda body: first if body == b"one" else succeed(ACCEPTED)
        self.channel.dataReceived(post(b"one") + post(b"x" * 900) * 80)
        self.channel.dataReceived(post())
        self.assertEqual(self.line.producerState, "paused")
        first.callback(ACCEPTED)
        self.assertEqual(self.line.producerState, "paused")
        for _ in range(82):
            self.fixture.in_memory.clock.advance(0)
        self.assertEqual(self.line.producerState, "producing")
        self.assertEqual(len(self.answers()), 82)

    def test_a_client_that_does_not_read_is_served_no_more(self) -> None:
        """Until it has read what there was."""
        self.channel.pauseProducing()
        self.channel.dataReceived(post())
        self.assertEqual(self.answers(), [])
        self.channel.resumeProducing()
        self.assertEqual(self.answers(), [b"200"])

    def test_a_request_that_takes_too_long(self) -> None:
        """503 after the deadline; the next is served, and the late answer goes nowhere."""
        first: Deferred[RequestReply] = Deferred()
        self.fixture.didcomm.answer = lambda body: first if body == b"one" else succeed(ACCEPTED)
        self.channel.dataReceived(post(b"one") + post(b"two"))
        self.fixture.in_memory.clock.advance(9.9)
        self.assertEqual(self.answers(), [])
        self.fixture.in_memory.clock.advance(0.2)
        self.assertEqual(self.answers(), [b"503", b"202"])
        first.callback(ACCEPTED)
        self.assertEqual(self.answers(), [b"503", b"202"])

    def test_a_command_that_takes_too_long(self) -> None:
        """503 in the form of its protocol; an envelope behind it that takes too long gets the other form."""
        self.fixture.decentrl.answer = self.fixture.didcomm.answer = lambda body: Deferred()
        self.channel.dataReceived(command() + post())
        self.fixture.in_memory.clock.pump([10, 10])
        first, second = parse_responses(self.line.value())
        self.assertEqual((first.status, first.json), (503, {"type": "ERROR", "code": "UNAVAILABLE"}))
        self.assertEqual(first.headers["retry-after"], "5")
        self.assertEqual((second.status, second.json["status"]), (503, "error"))

    def test_silence_ends_the_connection(self) -> None:
        """Before the first request, within one, and between two."""
        self.channel.dataReceived(post(b"hello")[:-1])
        self.fixture.in_memory.clock.pump([30, 29])
        self.assertEqual(self.line.ended, "")
        self.channel.dataReceived(b"o")
        self.assertEqual(self.answers(), [b"200"])
        self.fixture.in_memory.clock.pump([30, 29])
        self.assertEqual(self.line.ended, "")
        self.fixture.in_memory.clock.pump([1.1])
        self.assertEqual(self.line.ended, "aborted")

    def test_a_clock_set_back(self) -> None:
        """Neither a request that takes too long nor a silent client has more time than that once more."""
        self.fixture.didcomm.answer = lambda body: Deferred()
        self.channel.dataReceived(post())
        self.fixture.in_memory.clock.set_by(-3600)
        self.fixture.in_memory.clock.pump([10, 10])
        self.assertEqual(self.answers(), [b"503"])
        self.fixture.in_memory.clock.set_by(-3600)
        self.fixture.in_memory.clock.pump([60, 60])
        self.assertEqual(self.line.ended, "aborted")

    def test_a_fault(self) -> None:
        """500, and the connection lives."""
        self.fixture.didcomm.answer = self.fixture.decentrl.answer = lambda body: fail(ZeroDivisionError("secret"))
        self.channel.dataReceived(post() + command())
        first, second = parse_responses(self.line.value())
        self.assertEqual((first.status, first.json["status"]), (500, "error"))
        self.assertEqual((second.status, second.json), (500, {"type": "ERROR", "code": "INTERNAL_ERROR"}))
        self.assertEqual(len(self.flushLoggedErrors(ZeroDivisionError)), 2)

    def test_while_stopping(self) -> None:
        """503 with Retry-After."""
        in_memory = self.fixture.in_memory
        self.fixture.site = site_of(in_memory, in_memory.didcomm, in_memory.decentrl)
        channel, line = self.fixture.connect()
        in_memory.base.gate.stopService()
        channel.dataReceived(post() + command())
        first, second = parse_responses(line.value())
        self.assertEqual((first.status, first.headers["retry-after"]), (503, "5"))
        self.assertEqual((second.status, second.headers["retry-after"]), (503, "5"))
        self.assertEqual(second.json, {"type": "ERROR", "code": "UNAVAILABLE"})

    def test_a_client_that_leaves(self) -> None:
        """What it asked for is done; nothing is written and no timer stays."""
        first: Deferred[RequestReply] = Deferred()
        self.fixture.didcomm.answer = lambda body: first
        self.channel.dataReceived(post())
        self.channel.connectionLost()
        first.callback(ACCEPTED)
        self.assertEqual(self.line.value(), b"")
        mine = [call for call in self.fixture.in_memory.clock.getDelayedCalls() if "HTTPChannel" in repr(call)]
        self.assertEqual(mine, [])


def test_the_head_reader_is_strict() -> None:
    """Of all the odd heads it reads only those whose spelling cannot mean two things."""
    read = [request for request in ODD if parse_plain_head(request.partition(b"\r\n\r\n")[0]) is not None]
    assert post() not in ODD and parse_plain_head(post().partition(b"\r\n\r\n")[0]) is not None
    for request in read:
        assert request.startswith((b"POST /didcomm HTTP/1.1\r\n", b"POST / HTTP/1.1\r\n"))
        assert request.lower().count(b"content-length") == 1
        assert request.lower().count(b"content-type") <= 1
        assert b"transfer-encoding" not in request.lower() and b"expect" not in request.lower()


class ReadAheadTests(SynchronousTestCase):
    def test_what_is_not_served_yet_is_counted(self) -> None:
        """Parts of requests, and requests behind one that takes its time, until they are served or gone."""
        fixture = SiteFixture(self)
        held: Deferred[Any] = Deferred()
        fixture.didcomm.answer = lambda body: held
        (part, line), (behind, _) = fixture.connect(), fixture.connect()
        part.dataReceived(post()[:-1])
        behind.dataReceived(post())
        self.assertEqual(fixture.site.read_ahead(), (1, len(post()) - 1))
        behind.dataReceived(post() + post())
        self.assertEqual(fixture.site.read_ahead(), (2, 3 * len(post()) - 1))
        part.connectionLost(Failure(ConnectionError()))
        self.assertEqual(fixture.site.read_ahead(), (1, 2 * len(post())))
        held.callback(RequestReply(202, media_type=""))
        self.assertEqual(fixture.site.read_ahead(), (0, 0))
        self.assertEqual(line.ended, "")


def _heads() -> st.SearchStrategy[bytes]:
    """Heads that are alike, as those of one connection are, and not quite."""
    request = st.sampled_from([*PLAIN, *(one for one in ODD if b"ontent-" in one), post(Content_Length="007")])
    length = st.sampled_from([b"5", b"0", b"17", b"+5", b"5 ", b" 5", b"5\r\nHost: b", b"", b"1234567890", b"5:5"])

    def with_length(request: bytes, length: bytes) -> bytes:
        return request.partition(b"\r\n\r\n")[0].replace(b"Content-Length: 5", b"Content-Length: " + length)

    return st.builds(with_length, request, length)


@settings(max_examples=1000, deadline=None)
@given(st.lists(_heads(), min_size=2, max_size=5))
def test_cached_heads(heads: list[bytes]) -> None:
    """After others, a head is parsed as if it were the first; what is parsed never has a second length."""
    parsed = [parse_plain_head(head) for head in heads]
    for head, found in zip(heads, parsed, strict=True):
        channel_module._parse_cached_head.cache_clear()
        assert parse_plain_head(head) == found
        assert found is None or head.lower().count(b"content-length") == 1


def test_only_the_length_of_a_known_head_is_parsed() -> None:
    """Of a head like one before; one that is too long to keep is parsed anew."""
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
    """A head that is too long for the fast path is left to twisted.web, and does not keep the reactor busy."""

    def setUp(self) -> None:
        self.fixture = SiteFixture(self)

    def connect(self) -> tuple[Any, RecordingTransport]:
        """A connection that gives up after a hundred quanta, in place of going on for ever."""
        channel, line = self.fixture.connect()
        self.quanta = 0
        run_quantum = channel.run_quantum

        def counted() -> None:
            self.quanta += 1
            if self.quanta <= 100:
                run_quantum()

        channel.run_quantum = counted
        return channel, line

    def send(self, channel: Any, line: RecordingTransport, pieces: Sequence[bytes]) -> None:
        """Send pieces, each once all work on those before it is done."""
        for piece in pieces:
            if not line.ended:
                channel.dataReceived(piece)
                self.fixture.in_memory.clock.advance(0)
        self.assertLessEqual(self.quanta, 100)

    def test_a_line_that_does_not_end(self) -> None:
        """It is given up as by twisted.web, whole or in pieces."""
        request = b"POST /didcomm HTTP/1.1\r\nHost: a\r\nX: "
        for beginning in (b"", b"GET /", request, request + b"a\r\n "):
            for size in (1_000, 9_000, 20_000, 1_000_000):
                endless = beginning + b"a" * 100_000
                pieces = [endless[at : at + size] for at in range(0, len(endless), size)]
                channel, line = self.connect()
                self.send(channel, line, pieces)
                _, answered, ended = self.fixture.exchange(pieces, stock=True)
                self.assertEqual((_comparable(line.value()), line.ended), (answered, ended), (beginning, size))
                self.assertTrue(line.ended)

    def test_a_line_that_waits_for_its_end(self) -> None:
        """Between the longest plain head and what twisted.web reads, the rest is waited for, and then parsed."""
        for beginning, rest in ((b"POST /didcomm HTTP/1.1\r\nX: ", b""), (b"POST /didcomm?", b" HTTP/1.1")):
            channel, line = self.connect()
            self.send(channel, line, (beginning, b"a" * 8_000, b"a" * 4_000, b"a"))
            self.assertEqual((line.value(), line.ended), (b"", ""))
            self.send(channel, line, [rest + b"\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"])
            self.assertEqual(self.fixture.didcomm.received.pop()[0], b"hello")
            self.assertEqual(line.ended, "")


class SlowRequestTests(SynchronousTestCase):
    """A request that takes more than a minute to arrive is given up, however steadily it drips."""

    def setUp(self) -> None:
        self.fixture = SiteFixture(self)

    def drip(self, beginning: bytes, step: float = 0.0) -> str:
        channel, line = self.fixture.connect()
        channel.dataReceived(beginning)
        self.fixture.in_memory.clock.set_by(step)
        channel.dataReceived(b"x")
        for _ in range(5):
            self.fixture.in_memory.clock.advance(15)
            if not line.ended:
                channel.dataReceived(b"x")
        return line.ended

    def test_body(self) -> None:
        """On the fast path."""
        self.assertEqual(self.drip(post(b"", Content_Length="900")), "aborted")

    def test_body_when_the_clock_is_set_back(self) -> None:
        """As long from then on."""
        self.assertEqual(self.drip(post(b"", Content_Length="900"), step=-3600), "aborted")

    def test_head(self) -> None:
        """At twisted.web."""
        self.assertEqual(self.drip(b"POST /didcomm HTTP/1.1\r\nX: "), "aborted")

    def test_connections_of_one_address_are_limited(self) -> None:
        """One too many is closed at once; when one is gone, there is room again."""
        limit = 4 * self.fixture.in_memory.config.limits.max_connections_per_ip
        in_memory = InMemoryMediator(self)
        site = site_of(in_memory, self.fixture.didcomm, self.fixture.decentrl)
        address = StringTransport().getPeer()
        channels = [site.buildProtocol(address) for _ in range(limit)]
        self.assertIsNone(site.buildProtocol(address))
        channels[0].connectionLost()
        self.assertIsNotNone(site.buildProtocol(address))
