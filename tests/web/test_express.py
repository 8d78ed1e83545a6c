"""The short way for plain POSTs: whatever arrives, clients see what they would see from twisted.web."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from twisted.internet.defer import Deferred, succeed
from twisted.internet.testing import StringTransport
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm.exchange import ACCEPTED, Origin, Reply
from mediatord.web.express import ExpressChannel, read_head
from mediatord.web.site import MediatorSite
from mediatord.wiring import build_site
from tests.house import House

MAX_BODY = 1000


class Line(StringTransport):
    """A transport that notes how the connection ends."""

    ended = ""

    def abortConnection(self) -> None:  # noqa: N802
        """Cut off."""
        self.ended = "aborted"

    def loseConnection(self) -> None:
        """Close."""
        self.ended = self.ended or "closed"
        super().loseConnection()


class Half:
    """A DIDComm half that notes what it is given, and answers with the length of the body."""

    def __init__(self) -> None:
        self.received: list[tuple[bytes, Origin]] = []
        self.answer: Callable[[bytes], Any] = lambda body: succeed(Reply(200, b"%d" % len(body), "text/x-test"))
        self.mediator = self

    async def receive(self, raw: bytes, origin: Origin) -> Reply:
        """Note and answer."""
        self.received.append((raw, origin))
        reply: Reply = await self.answer(raw)
        return reply


class Rig:
    """One site, to be talked to on the short way or straight through twisted.web."""

    def __init__(self, test: SynchronousTestCase) -> None:
        self.house = House(
            test, limits={"max_message_bytes": MAX_BODY}, trusted_proxies=["192.168.1.1"], listen=["tcp:0"]
        )
        self.house.base.gate.startService()
        self.half = Half()
        self.site: MediatorSite = build_site(self.house.base, self.half, self.house.config)  # type: ignore[arg-type]

    def connect(self, *, stock: bool = False) -> tuple[Any, Line]:
        """A new connection."""
        line = Line()
        address = line.getPeer()
        channel: Any = self.site.stock_channel(address) if stock else self.site.buildProtocol(address)
        channel.makeConnection(line)
        return channel, line

    def talk(self, pieces: Sequence[bytes], *, stock: bool = False) -> tuple[list[Any], bytes, str]:
        """What was taken, what was answered (without the date), and how it ended."""
        self.half.received = []
        channel, line = self.connect(stock=stock)
        for piece in pieces:
            if not line.disconnecting and not line.ended:
                channel.dataReceived(piece)
        self.house.clock.advance(0)
        channel.connectionLost(Failure(ConnectionError()))
        return self.half.received, _comparable(line.value()), line.ended


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


def post(body: bytes = b"hello", **headers: str) -> bytes:
    lines = {"Host": "a", "Content-Type": "application/didcomm-encrypted+json", "Content-Length": str(len(body))}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST /didcomm HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


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
    post(Origin="https://a.example"),
    post(Content_Type="text/html"),
    post(Content_Type="Application/DIDComm-Encrypted+JSON; charset=utf-8"),
    post(b""),
    post(b"x" * MAX_BODY),
    post(b"x" * (MAX_BODY + 1)),
    post(b"x", Content_Length="99999999999"),
    post(User_Agent="x" * 9000),
    post(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"),
    b"GET /did HTTP/1.1\r\nHost: a\r\n\r\n",
    b"\x16\x03\x01\x02\x00",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]


class SameAsStockTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.rig = Rig(self)

    def check(self, pieces: Sequence[bytes]) -> None:
        """Both ways take the same messages and give the same answers."""
        self.assertEqual(self.rig.talk(pieces), self.rig.talk(pieces, stock=True))

    def test_odd_requests(self) -> None:
        """Alone, and with a plain one before and after them on the same connection."""
        for request in ODD:
            self.check([request])
            self.check([post(b"before") + request + post(b"after")])
            self.check([post(b"before"), request, post(b"after")])

    def test_in_any_pieces(self) -> None:
        """Wherever the network cuts."""
        for request in (post(), ODD[1], ODD[9], post(b"one") + post(b"two") + ODD[0]):
            for size in (1, 2, 7, 64):
                self.check([request[start : start + size] for start in range(0, len(request), size)])

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def test_anything(self, data: Any) -> None:
        """Requests with bytes changed, inserted and removed, in any pieces and any sequence."""
        stream = b"".join(data.draw(st.lists(st.sampled_from([post(), post(b"{}"), *ODD]), min_size=1, max_size=3)))
        for _ in range(data.draw(st.integers(0, 3))):
            at = data.draw(st.integers(0, len(stream)))
            gone = data.draw(st.integers(0, 2))
            new = data.draw(st.sampled_from([b"", b"\r", b"\n", b"\r\n", b" ", b"\0", b":", b"\t", b"0", b"\xff"]))
            stream = stream[:at] + new + stream[at + gone :]
        cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
        edges = [0, *cuts, len(stream)]
        self.check([stream[a:b] for a, b in zip(edges, edges[1:], strict=False)])


class ExpressTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.rig = Rig(self)
        self.channel: ExpressChannel
        self.channel, self.line = self.rig.connect()

    def answers(self) -> list[bytes]:
        """The status lines so far."""
        return re.findall(rb"HTTP/1\.1 (\d{3}) ", self.line.value())

    def test_a_plain_post_never_reaches_twisted_web(self) -> None:
        """That is what it is for."""
        self.rig.half.answer = lambda body: succeed(ACCEPTED)
        self.channel.dataReceived(post())
        self.assertEqual(self.answers(), [b"202"])
        self.assertIn(b"Content-Length: 0\r\n\r\n", self.line.value())
        self.assertNotIn(b"Content-Type", self.line.value())
        self.assertIsNone(self.channel._stock)

    def test_answers_come_in_order(self) -> None:
        """A second request that arrives while the first is served waits for its turn."""
        first: Deferred[Reply] = Deferred()
        self.rig.half.answer = lambda body: first if body == b"one" else succeed(ACCEPTED)
        self.channel.dataReceived(post(b"one") + post(b"two"))
        self.assertEqual([raw for raw, _ in self.rig.half.received], [b"one"])
        first.callback(Reply(429, retry_after=7))
        self.assertEqual(self.answers(), [b"429", b"202"])
        self.assertIn(b"Retry-After: 7\r\n", self.line.value())

    def test_reading_stops_while_too_much_waits(self) -> None:
        """What is read ahead is bounded."""
        first: Deferred[Reply] = Deferred()
        self.rig.half.answer = lambda body: first if body == b"one" else succeed(ACCEPTED)
        self.channel.dataReceived(post(b"one") + post(b"x" * 900) * 80)
        self.channel.dataReceived(post())
        self.assertEqual(self.line.producerState, "paused")
        first.callback(ACCEPTED)
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
        first: Deferred[Reply] = Deferred()
        self.rig.half.answer = lambda body: first if body == b"one" else succeed(ACCEPTED)
        self.channel.dataReceived(post(b"one") + post(b"two"))
        self.rig.house.clock.advance(9.9)
        self.assertEqual(self.answers(), [])
        self.rig.house.clock.advance(0.2)
        self.assertEqual(self.answers(), [b"503", b"202"])
        first.callback(ACCEPTED)
        self.assertEqual(self.answers(), [b"503", b"202"])

    def test_silence_ends_the_connection(self) -> None:
        """Before the first request, within one, and between two."""
        self.channel.dataReceived(post(b"hello")[:-1])
        self.rig.house.clock.pump([30, 29])
        self.assertEqual(self.line.ended, "")
        self.channel.dataReceived(b"o")
        self.assertEqual(self.answers(), [b"200"])
        self.rig.house.clock.pump([30, 29])
        self.assertEqual(self.line.ended, "")
        self.rig.house.clock.pump([1.1])
        self.assertEqual(self.line.ended, "aborted")

    def test_a_fault(self) -> None:
        """500, and the connection lives."""
        self.rig.half.answer = lambda body: Deferred().errback(ZeroDivisionError())
        self.channel.dataReceived(post())
        self.assertEqual(self.answers(), [b"500"])
        self.flushLoggedErrors()

    def test_while_stopping(self) -> None:
        """503 with Retry-After."""
        self.rig.house.base.gate.stopService()
        self.channel.dataReceived(post())
        self.assertEqual(self.answers(), [b"503"])
        self.assertIn(b"Retry-After", self.line.value())

    def test_a_client_that_leaves(self) -> None:
        """What it asked for is done; nothing is written and no timer stays."""
        first: Deferred[Reply] = Deferred()
        self.rig.half.answer = lambda body: first
        self.channel.dataReceived(post())
        self.channel.connectionLost()
        first.callback(ACCEPTED)
        self.assertEqual(self.line.value(), b"")
        mine = [call for call in self.rig.house.clock.getDelayedCalls() if "ExpressChannel" in repr(call)]
        self.assertEqual(mine, [])


def test_the_head_reader_is_strict() -> None:
    """Of all the odd heads it reads only those whose spelling cannot mean two things."""
    read = [request for request in ODD if read_head(request.partition(b"\r\n\r\n")[0]) is not None]
    assert post() not in ODD and read_head(post().partition(b"\r\n\r\n")[0]) is not None
    for request in read:
        assert request.startswith(b"POST /didcomm HTTP/1.1\r\n")
        assert request.lower().count(b"content-length") == 1
        assert b"transfer-encoding" not in request.lower() and b"expect" not in request.lower()


class DrippingTests(SynchronousTestCase):
    """A request that takes more than a minute to arrive is given up, however steadily it drips."""

    def setUp(self) -> None:
        self.rig = Rig(self)

    def drip(self, beginning: bytes) -> str:
        channel, line = self.rig.connect()
        channel.dataReceived(beginning)
        for _ in range(5):
            self.rig.house.clock.advance(15)
            if not line.ended:
                channel.dataReceived(b"x")
        return line.ended

    def test_body(self) -> None:
        """On the short way."""
        self.assertEqual(self.drip(post(b"", Content_Length="900")), "aborted")

    def test_head(self) -> None:
        """At twisted.web."""
        self.assertEqual(self.drip(b"POST /didcomm HTTP/1.1\r\nX: "), "aborted")

    def test_connections_of_one_address_are_limited(self) -> None:
        """One too many is closed at once; when one is gone, there is room again."""
        limit = 4 * self.rig.house.config.limits.max_connections_per_ip
        house = House(self)
        house.base.gate.startService()
        site = build_site(house.base, self.rig.half, house.config)  # type: ignore[arg-type]
        address = StringTransport().getPeer()
        channels = [site.buildProtocol(address) for _ in range(limit)]
        self.assertIsNone(site.buildProtocol(address))
        channels[0].connectionLost()
        self.assertIsNotNone(site.buildProtocol(address))
