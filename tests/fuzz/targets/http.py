"""HTTP as bytes: the connection, twisted.web behind it, the resource tree, and both protocols."""

from __future__ import annotations

from collections.abc import Iterable

from tests.fuzz.fuzz_mediator import FuzzMediator
from tests.fuzz.targets import replace_words
from tests.http.in_memory_site import InMemorySite, InMemoryTransport

# Requests are never answered with these.
STATUSES = {100, 101, 200, 202, 204, 400, 404, 405, 411, 413, 414, 415, 426, 429, 431, 503}
_END = b"\r\n\r\n"
# Each piece takes a reactor iteration.
_MOST_PIECES = 300


class HTTPTarget:
    """
    A connection that gets an input whole, and another one in pieces: responses must be alike.

    The mode is the size of the pieces.
    """

    words = (
        *(
            b"GET ",
            b"POST /didcomm HTTP/1.1\r\n",
            b"HEAD ",
            b"OPTIONS ",
            b" HTTP/1.0\r\n",
            b"\r\n\r\n",
            b"\r\n",
            b"\n",
        ),
        *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Expect: 100-continue\r\n", b"0\r\n\r\n"),
        *(b"Content-Encoding: gzip\r\n", b"Upgrade: websocket\r\n", b"Connection: close\r\n", b"Host: a\r\n", b"%00"),
        *(b"X-Forwarded-For: 1.2.3.4\r\n", b"/public/did:x?tags=", b";x=y\r\n", b"\0", b"%2F..", b"Range: bytes=0-"),
    )
    longest = 4_096
    # Each piece takes a reactor iteration, which checks the timers.
    most_calls = (30_000, 400)
    most_memory = (4_000_000, 300)

    def __init__(self) -> None:
        self._mediator = FuzzMediator(self._prepare, listen=["tcp:0"], metrics={"allow": ["192.0.2.0/24"]})
        self._timers = 0

    def _prepare(self, site_fixture: InMemorySite) -> None:
        site_fixture.run_due_calls()
        self._timers = len(site_fixture.clock.getDelayedCalls())

    def close(self) -> None:
        """Stop the mediator."""
        self._mediator.close()

    def run(self, data: bytes) -> None:
        """Send the input, and compare the responses."""
        site_fixture = self._mediator.enter()
        size, rest = data[:1], replace_words(data[1:], {b"@MEDIATOR@": site_fixture.did})
        step = size[0] if size else 1
        whole = self._exchange(site_fixture, [rest])
        pieces = [rest[start : start + step] for start in range(0, len(rest), step)] if step else [rest]
        if len(pieces) <= _MOST_PIECES:
            other = self._exchange(site_fixture, pieces)
            assert other == whole, f"{whole} at once, {other} in pieces of {step}"

    def _exchange(self, site_fixture: InMemorySite, pieces: list[bytes]) -> list[int]:
        """The statuses of the responses on one connection, which must leave nothing behind."""
        transport: InMemoryTransport = site_fixture.connect()
        for piece in pieces:
            transport.feed(piece)
        site_fixture.run_due_calls()
        found = statuses(transport.take_output())
        transport.disconnect()
        site_fixture.run_due_calls()
        self._mediator.assert_no_failures()
        assert set(found) <= STATUSES, found
        site = site_fixture.site
        assert not site._per_host, "a connection that is still counted"
        assert not site.unread.total and site.read_ahead() == (0, 0), "an answer or a request that is still held"
        return found

    def seeds(self) -> Iterable[bytes]:
        """A request of every kind, and some that are nearly valid."""
        host = b"Host: mediator.example\r\n"
        for path in _PATHS:
            for method in (b"GET", b"HEAD", b"OPTIONS") if path in _PATHS[:3] else (b"GET",):
                yield b"\7%b %b HTTP/1.1\r\n%b\r\n" % (method, path, host)
        for path, label, body in _BODIES:
            head = b"POST %b HTTP/1.1\r\n%bContent-Type: %b\r\n" % (path, host, label)
            yield b"\5%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)
            yield b"\3%bTransfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (head, len(body), body)
            yield b"\x20" + (b"%bContent-Length: %d\r\n\r\n%b" % (head, len(body), body)) * 3
        upgrade = (
            b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        )
        for path in (b"/ws", b"/didcomm", b"/"):
            yield b"\x09GET %b HTTP/1.1\r\n%b%b\x81\x82\0\0\0\0{}" % (path, host, upgrade)
        yield b"\1GET / HTTP/1.1\n\n"
        yield b"\1\x16\x03\x01\x02\x00\x01\x00"
        yield b"\1PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        yield b"\6POST /didcomm HTTP/1.1\r\n%bContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}" % host
        yield b"\6POST /didcomm HTTP/1.1\r\n%bExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}" % host
        yield b"\6POST /didcomm HTTP/1.1\r\n%bContent-Length: 99999999\r\n\r\n{}" % host


_PATHS = (
    *(b"/", b"/didcomm", b"/public/did:web:a?tags=a,b&page=1&after=2", b"/ws", b"/did", b"/did.json", b"/invitation"),
    *(
        b"/invitationOOB",
        b"/oob?_oobid=0",
        b"/openapi.json",
        b"/health",
        b"/metrics",
        b"/.well-known/did.json",
        b"/none",
        b"/public/%ff",
    ),
    *(b"*", b"http://a/did", b"//", b"/did/", b"/ready"),
)
_BODIES = (
    (b"/didcomm", b"application/didcomm-encrypted+json", b'{"ciphertext":"AAAA","protected":"e30"}'),
    (b"/", b"application/json", b'{"header":{"channel":"TWO_WAY_PRIVATE"},"payload":"","signature":""}'),
    (b"/didcomm/", b"text/plain; charset=utf-8", b"\0"),
)


def statuses(raw: bytes) -> list[int]:
    """
    The statuses of all responses. Those to HEAD have a length and no body.

    :raise AssertionError: it is anything but whole responses, with frames of a socket at the end.
    """
    found: list[int] = []
    while raw:
        head, end, raw = raw.partition(_END)
        assert end and head.startswith(b"HTTP/1."), head[:60]
        lines = head.split(b"\r\n")
        found.append(int(lines[0].split(b" ")[1]))
        if found[-1] == 101:
            break
        named = dict(line.lower().split(b": ", 1) for line in lines[1:])
        length = int(named.get(b"content-length", b"0"))
        if raw and not raw.startswith(b"HTTP/1."):
            assert len(raw) >= length > 0, "a body that is not whole"
            raw = raw[length:]
    return found


def make() -> HTTPTarget:
    """Create the target."""
    return HTTPTarget()
