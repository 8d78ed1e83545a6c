"""Connections to peers that are slow, endless or rude (reference 4.7 and 8.5)."""

from __future__ import annotations

from twisted.internet.error import ConnectionDone
from twisted.python.failure import Failure

from mediatord.net.outbound_http import OutboundRequestError
from tests.net.outbound_test_case import OK, OutboundTestCase, redirect


class TimeoutTests(OutboundTestCase):
    """Peers that are slow, endless or rude."""

    def test_slow_name(self) -> None:
        """The time covers the resolution of the name."""
        asked = self.get("https://slow.example/")
        self.reactor.advance(4.9)
        self.assertNoResult(asked)
        self.reactor.advance(0.2)
        self.failureResultOf(asked, OutboundRequestError)
        self.assertEqual(self.attempts(), [])

    def test_slow_connection(self) -> None:
        """The time covers the connection."""
        asked = self.get("https://a.example/")
        self.reactor.advance(5)
        self.failureResultOf(asked, OutboundRequestError)

    def test_slow_answer(self) -> None:
        """The time covers the answer; then the connection is cut off."""
        posted = self.post()
        wire = self.accept()
        self.reactor.advance(10)
        self.failureResultOf(posted, OutboundRequestError)
        self.assertTrue(wire.disconnected)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_slow_body(self) -> None:
        """The time covers the body; then the connection is cut off, even if the peer does not let go."""
        posted = self.post()
        wire = self.answer(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n1234")
        self.reactor.advance(10)
        self.failureResultOf(posted, OutboundRequestError)
        self.reactor.advance(2)
        self.assertTrue(wire.disconnected)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_slow_redirects(self) -> None:
        """The time covers all redirects together."""
        posted = self.post()
        self.reactor.advance(6)
        self.answer(redirect(307, b"/other"))
        self.accept()
        self.assertNoResult(posted)
        self.reactor.advance(4)
        self.failureResultOf(posted, OutboundRequestError)

    def test_peer_that_stays(self) -> None:
        """After the answer the connection is closed; a peer that keeps it open (TLS lets it) is cut off."""
        posted = self.post()
        wire = self.answer(OK)
        self.successResultOf(posted)
        self.assertTrue(wire.disconnecting)
        self.assertFalse(wire.disconnected)
        self.reactor.advance(2)
        self.assertTrue(wire.disconnected)

    def test_peer_that_leaves(self) -> None:
        """When the peer lets go too, nothing remains to be done."""
        self.post()
        self.answer(OK).protocol.connectionLost(Failure(ConnectionDone()))
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_endless_headers(self) -> None:
        """A peer that sends headers without end is cut off."""
        posted = self.post()
        wire = self.answer(b"HTTP/1.1 200 OK\r\n")
        for number in range(300):
            if not wire.disconnected:
                wire.protocol.dataReceived(b"X-%d: %s\r\n" % (number, b"x" * 1000))
        self.assertTrue(wire.disconnected)
        self.failureResultOf(posted, OutboundRequestError)

    def test_rude_answers(self) -> None:
        """What is no HTTP, or ends too early, is a failure that repeats nothing of it."""
        for response in (
            b"SSH-2.0-secret\r\n",
            b"HTTP/1.1 secret\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nsecret\r\n\r\n",
            b"",
        ):
            posted = self.post()
            wire = self.answer(response)
            wire.abortConnection()
            failure = self.failureResultOf(posted, OutboundRequestError)
            self.assertNotIn("secret", failure.getErrorMessage() + repr(failure.value.args))
            self.assertIsNone(failure.value.__cause__)
            self.assertTrue(failure.value.__suppress_context__)

    def test_close(self) -> None:
        """Closing cuts off what is under way, and fires when all of it is gone."""
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
