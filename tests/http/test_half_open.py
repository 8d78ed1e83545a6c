"""A peer that disappears without closing loses nothing (reference 6.3, UC-021 AF-6)."""

from __future__ import annotations

from mediatord.wallet.didcomm_client import read_delivery
from mediatord.wallet.didcomm_messages import OpenedMessage
from tests.http.in_memory_site import PING, PONG, InMemoryWebSocketClient
from tests.http.test_websocket import SocketTestCase

# Seconds between pings of a socket.
PING_INTERVAL = 30


class HalfOpenTests(SocketTestCase):
    """Only pings reveal a dead peer: a push may stay unacknowledged for an hour."""

    settings = {"queue": {"delivered_timeout": "1h"}}

    def test_push_is_pending_within_two_ping_intervals(self) -> None:
        """
        Whenever the peer dies, before or after answering a ping, its pushes are pending again within two ping
        intervals, and are delivered by pickup and by push with the same id.
        """
        for age in range(0, 2 * PING_INTERVAL + 1, 7):
            with self.subTest(age=age):
                self.setUp()
                self.check_peer_dying_at(age)

    def check_peer_dying_at(self, age: int) -> None:
        """:param age: seconds for which the peer answers."""
        websocket_client = self.site_fixture.websocket_client()
        self.go_live(websocket_client)
        for _ in range(age):
            self.site_fixture.clock.advance(1)
            self.answer_pings(websocket_client)
        self.forward(self.bob)
        (frame,) = websocket_client.texts()
        pushed = self.delivered(frame).id
        self.assertEqual(self.pending(), 0)
        self.site_fixture.clock.pump([1] * (2 * PING_INTERVAL))
        self.site_fixture.run_due_calls()
        self.assertEqual(self.pending(), 1)
        (fetched,) = self.bob.fetch()
        self.assertEqual(fetched.id, pushed)
        self.assertEqual(self.ids_on_another_socket(), [pushed])

    def answer_pings(self, websocket_client: InMemoryWebSocketClient) -> None:
        for opcode, payload in websocket_client.frames():
            self.assertEqual(opcode, PING)
            websocket_client.send(payload, PONG)

    def pending(self) -> float:
        return self.site_fixture.counter("mediator_messages_stored_total")

    def ids_on_another_socket(self) -> list[str]:
        """Ids delivered to Bob on a new socket, on request."""
        websocket_client = self.site_fixture.websocket_client()
        self.go_live(websocket_client)
        websocket_client.send(self.bob.pack("https://didcomm.org/messagepickup/3.0/delivery-request", {"limit": 10}))
        opened: list[OpenedMessage] = [self.bob.open(frame) for frame in websocket_client.texts()]
        return [delivered.id for answer in opened for delivered in read_delivery(answer.message)]
