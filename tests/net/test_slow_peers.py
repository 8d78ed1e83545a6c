"""Connections to slow, endless or faulty peers (reference 4.7 and 8.5)."""

from __future__ import annotations

from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure

from mediatord.net.outbound_http import OutboundRequestError
from tests.net.outbound_test_case import OK, OutboundTestCase, redirect


class TimeoutTests(OutboundTestCase):
    """Slow, endless or faulty peers."""

    def test_slow_lookup(self) -> None:
        """The time-out covers the lookup of the name."""
        asked = self.get("https://slow.example/")
        self.reactor.advance(4.9)
        self.assertNoResult(asked)
        self.reactor.advance(0.2)
        self.failureResultOf(asked, OutboundRequestError)
        self.assertEqual(self.attempts(), [])

    def test_slow_connection(self) -> None:
        """The time-out covers the connection."""
        asked = self.get("https://a.example/")
        self.reactor.advance(5)
        self.failureResultOf(asked, OutboundRequestError)

    def test_slow_response(self) -> None:
        """The time-out covers the response; then the connection is aborted."""
        posted = self.post()
        wire = self.accept()
        self.reactor.advance(10)
        self.failureResultOf(posted, OutboundRequestError)
        self.assertTrue(wire.disconnected)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_slow_body(self) -> None:
        """The time-out covers the body; then the connection is aborted, even if the peer does not close."""
        posted = self.post()
        wire = self.respond(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1234")
        self.reactor.advance(10)
        self.failureResultOf(posted, OutboundRequestError)
        self.reactor.advance(2)
        self.assertTrue(wire.disconnected)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_slow_redirects(self) -> None:
        """The time-out covers all redirects together."""
        posted = self.post()
        self.reactor.advance(6)
        self.respond(redirect(307, b"/other"))
        self.accept()
        self.assertNoResult(posted)
        self.reactor.advance(4)
        self.failureResultOf(posted, OutboundRequestError)

    def test_peer_that_stays_connected(self) -> None:
        """After the response the connection is closed; a peer that keeps it open, as TLS allows, is aborted."""
        posted = self.post()
        wire = self.respond(OK)
        self.successResultOf(posted)
        self.assertTrue(wire.disconnecting)
        self.assertFalse(wire.disconnected)
        self.reactor.advance(2)
        self.assertTrue(wire.disconnected)

    def test_peer_that_disconnects(self) -> None:
        """If the peer closes too, nothing remains to be done."""
        self.post()
        self.respond(OK).protocol.connectionLost(Failure(ConnectionDone()))
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_endless_headers(self) -> None:
        """A peer that sends endless headers is disconnected."""
        posted = self.post()
        wire = self.respond(b"HTTP/1.1 200 OK\r\n")
        for number in range(300):
            if not wire.disconnected:
                wire.protocol.dataReceived(b"X-%d: %s\r\n" % (number, b"x" * 1000))
        self.assertTrue(wire.disconnected)
        self.failureResultOf(posted, OutboundRequestError)

    def test_malformed_responses(self) -> None:
        """Malformed and truncated responses are failures whose text has nothing of them."""
        for response in (
            b"SSH-2.0-secret\r\n",
            b"HTTP/1.1 secret\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nsecret\r\n\r\n",
            b"",
        ):
            posted = self.post()
            wire = self.respond(response)
            wire.abortConnection()
            failure = self.failureResultOf(posted, OutboundRequestError)
            self.assertNotIn("secret", failure.getErrorMessage() + repr(failure.value.args))
            self.assertIsNone(failure.value.__cause__)
            self.assertTrue(failure.value.__suppress_context__)

    def test_close(self) -> None:
        """Closing aborts requests in progress, and fires when all are gone."""
        posted = [self.post(), self.post()]
        wires = []
        for client in self.reactor.tcpClients:
            self.reactor.tcpClients = [client]
            wires.append(self.accept())
        closed = self.outbound.close()
        self.successResultOf(closed)
        for deferred, wire in zip(posted, wires, strict=True):
            self.failureResultOf(deferred, OutboundRequestError)
            self.assertTrue(wire.disconnected)
        self.successResultOf(self.outbound.close())
