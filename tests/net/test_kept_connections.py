"""Connections that are kept between requests, extra headers, Retry-After, and redirects that are not followed."""

from __future__ import annotations

from ipaddress import ip_network

from twisted.internet.defer import Deferred
from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure

from mediatord.net.outbound_http import (
    LOCAL_LIMIT_REASONS,
    ConnectionLimits,
    OutboundAddressError,
    OutboundHTTPClient,
    OutboundRequestError,
    OutboundResponse,
    get_origin,
)
from tests.net.outbound_test_case import OK, PUBLIC, FakeTransport, OutboundTestCase, redirect

CREATED = b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n"


def answer(wire: FakeTransport, response: bytes) -> bytes:
    """Let the peer respond on a connection; what was sent on it before."""
    sent: bytes = wire.value()
    wire.clear()
    wire.protocol.dataReceived(response)
    return sent


class KeptConnectionTests(OutboundTestCase):
    """A client with limits keeps its connections."""

    def setUp(self) -> None:
        super().setUp()
        self.names.known = {**self.names.known, "c.example": [PUBLIC]}
        self.outbound = OutboundHTTPClient(self.reactor, keep=ConnectionLimits(per_host=2, total=2, idle=60))

    def test_second_request_uses_the_connection_of_the_first(self) -> None:
        """And the name is not resolved again."""
        first = self.post()
        wire = self.accept()
        answer(wire, CREATED)
        self.assertEqual(self.successResultOf(first).status, 201)
        second = self.post()
        self.assertEqual(answer(wire, OK).count(b"POST /inbox"), 1)
        self.assertEqual(self.successResultOf(second).body, b"{}")
        self.assertEqual((len(self.attempts()), self.names.asked), (1, ["a.example"]))

    def test_other_port_or_scheme_is_another_host(self) -> None:
        """A connection serves one scheme, host and port."""
        self.post()
        answer(self.accept(), OK)
        self.post("http://a.example:81/inbox")
        self.post("https://a.example:80/inbox")
        self.assertEqual(self.attempts(), [(PUBLIC, 80), (PUBLIC, 81), (PUBLIC, 80)])

    def test_idle_connection_is_closed(self) -> None:
        """After its time; then nothing is left of the host."""
        self.post()
        wire = self.accept()
        answer(wire, OK)
        self.reactor.advance(59)
        self.assertFalse(wire.disconnecting)
        self.reactor.advance(1)
        self.assertTrue(wire.disconnecting)
        wire.protocol.connectionLost(Failure(ConnectionDone()))
        self.assertEqual(self.reactor.getDelayedCalls(), [])
        self.assertEqual((self.outbound.connection_count, self.outbound._hosts), (0, {}))

    def test_connection_closed_by_the_peer_is_not_used(self) -> None:
        """Nor does a timer of it remain."""
        self.post()
        answer(wire := self.accept(), OK)
        wire.protocol.connectionLost(Failure(ConnectionDone()))
        self.assertEqual(self.reactor.getDelayedCalls(), [])
        second = self.post()
        self.respond(OK)
        self.assertEqual(self.successResultOf(second).status, 200)
        self.assertEqual(len(self.attempts()), 2)

    def test_request_that_crosses_the_end_of_its_connection_is_repeated(self) -> None:
        """Once, on a new connection; one that fails there fails."""
        self.post()
        answer(wire := self.accept(), OK)
        second = self.post()
        wire.protocol.connectionLost(Failure(ConnectionDone()))
        self.assertNoResult(second)
        self.accept().protocol.connectionLost(Failure(ConnectionDone()))
        self.failureResultOf(second, OutboundRequestError)
        self.assertEqual(len(self.attempts()), 2)

    def test_request_that_was_answered_in_part_is_not_repeated(self) -> None:
        """It may have been carried out."""
        self.post()
        answer(wire := self.accept(), OK)
        second = self.post()
        wire.protocol.dataReceived(b"HTTP/1.1 2")
        wire.protocol.connectionLost(Failure(ConnectionDone()))
        self.failureResultOf(second, OutboundRequestError)
        self.assertEqual(len(self.attempts()), 1)

    def test_timeout_ends_the_connection_and_is_not_repeated(self) -> None:
        """A response that comes late would be taken for that of another request."""
        self.post()
        answer(wire := self.accept(), OK)
        second = self.post()
        self.reactor.advance(10)
        self.failureResultOf(second, OutboundRequestError)
        self.assertTrue(wire.disconnected)
        self.assertEqual(len(self.attempts()), 1)

    def test_bytes_are_counted_for_each_response(self) -> None:
        """Any number of responses fits through a connection, but none that is too long."""
        body = b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n" + bytes(60_000)
        self.post()
        wire = self.accept()
        answer(wire, body)
        for _ in range(5):
            posted = self.post()
            answer(wire, body)
            self.assertEqual(len(self.successResultOf(posted).body), 60_000)
        self.assertEqual(len(self.attempts()), 1)
        posted = self.post()
        wire.protocol.dataReceived(b"HTTP/1.1 200 OK\r\n")
        for _ in range(200):
            if not wire.disconnected:
                wire.protocol.dataReceived(b"X: " + b"x" * 1000 + b"\r\n")
        self.assertTrue(wire.disconnected)
        self.failureResultOf(posted, OutboundRequestError)

    def test_connections_of_a_host_are_limited(self) -> None:
        """A third request waits for one of two; its time-out runs meanwhile."""
        posted = [self.post() for _ in range(3)]
        self.assertEqual(len(self.attempts()), 2)
        wire = self.accept()
        answer(wire, OK)
        self.assertEqual(answer(wire, OK).count(b"POST"), 1)
        self.assertEqual([one.called for one in posted], [False, True, True])
        self.assertEqual(len(self.attempts()), 2)
        late = [self.post() for _ in range(3)]
        self.reactor.advance(10)
        for one in [posted[0], *late]:
            self.failureResultOf(one, OutboundRequestError)

    def test_wait_for_a_connection_is_limited(self) -> None:
        """And ends with a reason that does not blame the host: of the same host, or because of others."""
        self.outbound = OutboundHTTPClient(self.reactor, keep=ConnectionLimits(per_host=2, total=3, wait=2))
        slow = [self.post() for _ in range(2)]
        third = self.post()
        self.reactor.advance(1)
        slow.append(self.post("http://c.example/inbox"))
        innocent = self.post("http://b.example/inbox")
        for waiting in (third, innocent):
            self.assertNoResult(waiting)
            self.reactor.advance(1)
            error = self.failureResultOf(waiting, OutboundRequestError).value
            self.assertEqual(error.reason, "ConnectionsBusy")
            self.assertIn(error.reason, LOCAL_LIMIT_REASONS)
        self.reactor.advance(8)
        for one in slow:
            self.assertNotIn(self.failureResultOf(one, OutboundRequestError).value.reason, LOCAL_LIMIT_REASONS)
        late = self.post("http://b.example/inbox")
        self.respond(OK)
        self.assertEqual(self.successResultOf(late).status, 200)

    def test_both_waits_for_a_connection_are_limited_together(self) -> None:
        """First for one to the host, then for one of all."""
        self.outbound = OutboundHTTPClient(self.reactor, keep=ConnectionLimits(per_host=1, total=2, wait=2))
        self.post()
        wire = self.accept()
        second = self.post()
        self.post("http://b.example/inbox")
        third = self.post("http://c.example/inbox")
        self.reactor.advance(1.5)
        answer(wire, OK)  # its place of all goes to the third, which asked first
        self.assertNoResult(third)
        self.assertNoResult(second)
        self.reactor.advance(0.5)
        self.assertEqual(self.failureResultOf(second, OutboundRequestError).value.reason, "ConnectionsBusy")
        self.assertNoResult(third)

    def test_connections_to_all_hosts_are_limited(self) -> None:
        """A new connection closes an idle one of the host that was used least recently."""
        wires = []
        for name in ("a", "b", "c"):
            self.post(f"http://{name}.example/inbox")
            wires.append(self.accept())
            answer(wires[-1], OK)
        self.assertEqual([wire.disconnecting for wire in wires], [True, False, False])

    def test_refuses_names_of_private_addresses(self) -> None:
        """As without kept connections, and again when a host that was permitted has a new address (8.5)."""
        for name in ("private.example", "mixed.example", "mapped.example"):
            self.failureResultOf(self.post(f"http://{name}/"), OutboundAddressError)
        self.assertEqual((self.attempts(), self.outbound._hosts), ([], {}))
        self.post()
        answer(wire := self.accept(), OK)
        self.names.known = {"a.example": ["127.0.0.1"]}
        wire.protocol.connectionLost(Failure(ConnectionDone()))
        self.failureResultOf(self.post(), OutboundAddressError)
        self.assertEqual(len(self.attempts()), 1)

    def test_close(self) -> None:
        """Ends idle connections and those in use; whoever waits fails, and nothing is connected again."""
        self.post()
        answer(idle := self.accept(), OK)
        waiting = [self.post() for _ in range(3)]
        self.successResultOf(self.outbound.close())
        self.assertTrue(idle.disconnected)
        for one in [*waiting, self.post()]:
            self.failureResultOf(one, OutboundRequestError)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_response_that_ends_the_connection(self) -> None:
        """A peer may decline to keep it."""
        self.post()
        answer(wire := self.accept(), OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        self.assertTrue(wire.disconnecting)
        self.post()
        self.assertEqual(len(self.attempts()), 2)


class PostOptionTests(OutboundTestCase):
    """What push services need of a POST."""

    def send(self, url: str = "http://a.example/", **options: object) -> Deferred[OutboundResponse]:
        """Post with options."""
        options = {"timeout": 10, **options}
        return Deferred.fromCoroutine(self.outbound.post(url, b"{}", b"application/json", **options))  # type: ignore[arg-type]

    def test_headers(self) -> None:
        """Are sent beside the type."""
        self.send(headers={b"TTL": b"5", b"Authorization": b"vapid t=x"})
        head = self.accept().value().lower()
        self.assertIn(b"\r\nttl: 5\r\n", head)
        self.assertIn(b"\r\nauthorization: vapid t=x\r\n", head)
        self.assertIn(b"\r\ncontent-type: application/json\r\n", head)

    def test_redirect_that_is_not_followed(self) -> None:
        """Is the response."""
        sent = self.send(redirects=False)
        self.respond(redirect(307, b"http://b.example/"))
        self.assertEqual(self.successResultOf(sent).status, 307)
        self.assertEqual(len(self.attempts()), 1)

    def test_http_to_allowed_networks_only(self) -> None:
        """Where a secure connection is asked for; https goes anywhere public."""
        self.outbound = OutboundHTTPClient(self.reactor, allow_private=[ip_network("192.168.0.0/16")])
        self.failureResultOf(self.send(secure=True), OutboundAddressError)
        self.send("http://private.example/", secure=True)
        self.send("https://a.example/", secure=True)
        self.assertEqual(self.attempts(), [("192.168.0.1", 80), (PUBLIC, 443)])

    def test_retry_after(self) -> None:
        """Seconds or a date, within a day; anything else is ignored."""
        self.reactor.advance(784_111_777)  # Sun, 06 Nov 1994 08:49:37 GMT
        for value, expected in (
            (b"120", 120.0),
            (b"0", 0.0),
            (b"9999999999", 86_400.0),
            (b"99999999999999999999", None),
            (b"Sun, 06 Nov 1994 08:51:37 GMT", 120.0),
            (b"Sunday, 06-Nov-94 08:51:37 GMT", 120.0),
            (b"Sun, 06 Nov 1994 08:00:00 GMT", 0.0),
            (b"Sun, 06 Nov 2094 08:00:00 GMT", 86_400.0),
            (b"-5", None),
            (b"1.5", None),
            (b"soon", None),
            (b"a, b c d e:f:g h", None),
            (b"", None),
        ):
            sent = self.send()
            self.respond(b"HTTP/1.1 503 Busy\r\nRetry-After: " + value + b"\r\nContent-Length: 0\r\n\r\n")
            self.assertEqual(self.successResultOf(sent).retry_after, expected, value)
        sent = self.send()
        self.respond(OK)
        self.assertIsNone(self.successResultOf(sent).retry_after)


class OriginTests(OutboundTestCase):
    """Origins of URLs."""

    def test_origins(self) -> None:
        """In lower case and ASCII, with a port that is not the usual one."""
        for url, origin in (
            ("https://Push.Example/send/x?y", "https://push.example"),
            ("https://push.example:443/", "https://push.example"),
            ("https://push.example:80/", "https://push.example:80"),
            ("http://127.0.0.1:8090/x", "http://127.0.0.1:8090"),
            ("https://[2001:db8::1]:444/", "https://[2001:db8::1]:444"),
            ("https://bücher.example/", "https://xn--bcher-kva.example"),
        ):
            self.assertEqual(get_origin(url), origin)
        self.assertRaises(OutboundAddressError, get_origin, "ftp://push.example/")
