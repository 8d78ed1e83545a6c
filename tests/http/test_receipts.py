"""Receipts of frames: pings behind them, and the pongs of the peer; used by bare envelopes of DIDComm v1."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.delivery.connections import MAX_RECEIPTS
from mediatord.http.websocket import MediatorSocket
from tests.didcomm_v1.in_memory_wallet import InMemoryV1Wallet, compose, pack_forward
from tests.http.in_memory_site import PING, PONG, TEXT, InMemorySite, InMemoryWebSocketClient
from tests.http.test_websocket import HIGH_LIMITS

IMPLICIT: dict[str, Any] = {"response_requested": False, "~transport": {"return_route": "all"}}


class ReceiptTestCase(SynchronousTestCase):
    """A site, and an open socket that speaks DIDComm."""

    def setUp(self) -> None:
        self.site_fixture = InMemorySite(self, limits=HIGH_LIMITS)
        self.client = self.site_fixture.websocket_client()
        self.socket: MediatorSocket = self.client.transport.protocol  # type: ignore[assignment]
        self.received: list[str] = []

    def send(self, *names: str) -> list[bool]:
        """Send frames whose receipts are recorded; whether the socket took them."""
        return [self.socket.send_with_receipt(name.encode(), partial(self.received.append, name)) for name in names]

    def take_pings(self) -> list[bytes]:
        """Payloads of the pings that have come since the last call."""
        return [payload for opcode, payload in self.client.frames() if opcode == PING]


class ReceiptTests(ReceiptTestCase):
    def test_ping_follows_frame(self) -> None:
        """Each text frame is followed by its ping; the pong calls back, once."""
        self.assertEqual(self.send("a", "b"), [True, True])
        frames = self.client.frames()
        self.assertEqual([opcode for opcode, _ in frames], [TEXT, PING, TEXT, PING])
        self.assertEqual([payload for opcode, payload in frames if opcode == TEXT], [b"a", b"b"])
        first, second = [payload for opcode, payload in frames if opcode == PING]
        for pong, received in ((first, ["a"]), (first, ["a"]), (second, ["a", "b"]), (second, ["a", "b"])):
            self.client.send(pong, PONG)
            self.assertEqual(self.received, received)

    def test_last_pong_stands_for_all(self) -> None:
        """A peer may answer only the last of several pings."""
        self.send("a", "b", "c")
        _, second, _ = self.take_pings()
        self.client.send(second, PONG)
        self.assertEqual(self.received, ["a", "b"])

    def test_keepalive_repeats_last_ping(self) -> None:
        """So its pong, which may replace an earlier one, is a receipt too."""
        self.send("a")
        self.take_pings()
        self.site_fixture.clock.pump([1] * 35)
        (keepalive,) = self.take_pings()
        self.client.send(keepalive, PONG)
        self.assertEqual(self.received, ["a"])
        self.site_fixture.clock.pump([1] * 30)
        self.assertEqual(self.take_pings(), [keepalive])
        self.assertFalse(self.client.transport.lost)

    def test_foreign_pongs(self) -> None:
        """A pong that answers no ping counts for nothing, also if it foresees a number."""
        self.send("a")
        (number,) = self.take_pings()
        for payload in (b"", b"ping", b"2", b"99", b"-1", b"+1", b" 1", b"0", "¹".encode(), b"1" * 125):
            self.client.send(payload, PONG)
        self.assertEqual(self.received, [])
        self.client.send(number, PONG)
        self.assertEqual(self.received, ["a"])

    def test_unusual_pongs(self) -> None:
        """A pong between fragments of a message, which Autobahn reads, and one in pieces."""
        self.send("a", "b")
        first, second = self.take_pings()
        self.client.send(b"{", final=False)
        self.client.send(first, PONG)
        self.assertEqual(self.received, ["a"])
        self.client.send(b"}", 0)
        self.client.frames()
        self.client.send(second, PONG)
        self.assertEqual(self.received, ["a", "b"])

    def test_order_under_congestion(self) -> None:
        """A queued frame stays in front of its ping, and no pong counts for a frame that is still queued."""
        self.client.transport.peer_stalled = True
        self.socket.send(b"x" * 100_000)
        self.assertEqual(self.send("a", "b"), [True, True])
        self.client.send(b"1", PONG)
        self.client.send(b"2", PONG)
        self.assertEqual(self.received, [])
        self.client.transport.resume_peer()
        self.assertEqual([opcode for opcode, _ in self.client.frames()], [TEXT, TEXT, PING, TEXT, PING])
        self.client.send(b"2", PONG)
        self.assertEqual(self.received, ["a", "b"])

    def test_full_queue(self) -> None:
        """A frame that the queue refuses has no ping and no receipt, and does not count."""
        self.client.transport.peer_stalled = True
        self.socket.send(b"x" * 100_000)
        taken = self.send(*["y" * 300_000] * 6)
        self.assertIn(False, taken)
        self.client.transport.resume_peer()
        pings = self.take_pings()
        self.assertEqual(len(pings), taken.count(True))
        self.client.send(pings[-1], PONG)
        self.assertEqual(len(self.received), taken.count(True))

    def test_missing_receipts_are_bounded(self) -> None:
        """Beyond the limit a frame is refused, until a pong comes."""
        names = [str(number) for number in range(MAX_RECEIPTS + 1)]
        self.assertEqual(self.send(*names), [True] * MAX_RECEIPTS + [False])
        self.client.send(self.take_pings()[0], PONG)
        self.assertEqual(self.send("one", "too many"), [True, False])

    def test_failing_callback(self) -> None:
        """It concerns no other."""

        def fail() -> None:
            raise RuntimeError("broken")

        self.assertTrue(self.socket.send_with_receipt(b"a", fail))
        self.send("b")
        self.client.send(self.take_pings()[-1], PONG)
        self.assertEqual(self.received, ["b"])
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_closed_socket(self) -> None:
        """A closed socket takes nothing, and keeps nothing."""
        self.send("a")
        self.client.transport.disconnect()
        self.assertEqual(self.send("b"), [False])
        self.assertEqual(self.received, [])

    def test_other_sockets_have_none(self) -> None:
        """A socket without such frames has no tracker, and its keepalive is as ever."""
        self.assertIsNone(self.socket._receipts)
        self.site_fixture.clock.pump([1] * 35)
        self.assertEqual(self.take_pings(), [b"ping"])
        self.client.send(b"ping", PONG)
        self.assertIsNone(self.socket._receipts)


class BareEnvelopeTests(ReceiptTestCase):
    """Implicit pickup over real frames."""

    def setUp(self) -> None:
        super().setUp()
        self.wallet = InMemoryV1Wallet(self.site_fixture, implicit_pickup="raw").enrol()

    def forward(self, size: int = 0) -> bytes:
        """A message for the wallet; its payload."""
        payload = self.wallet.make_payload("x" * size)
        forward = pack_forward(self.site_fixture, self.wallet.recipient_base58, payload)
        self.assertEqual(self.site_fixture.receive(forward, peer="203.0.113.7").status, 202)
        self.site_fixture.clock.advance(0.001)
        return payload

    def begin(self, client: InMemoryWebSocketClient) -> None:
        """Ask for implicit pickup."""
        client.send(self.wallet.pack(compose("trust_ping/1.0/ping", **IMPLICIT)))

    def read(self, client: InMemoryWebSocketClient) -> Iterator[bytes]:
        """Read as a client does: answer each ping, until there is nothing more."""
        while frames := client.frames():
            for opcode, payload in frames:
                if opcode == TEXT:
                    yield payload
                else:
                    client.send(payload, PONG)

    def count_queued(self) -> int:
        """Number of queued messages."""
        getting = self.site_fixture.store.get_queue_status(self.wallet.key.did_key, None)
        return self.successResultOf(getting).message_count

    def test_whole_queue(self) -> None:
        """Each message once, in order, and removed."""
        sent = [self.forward() for _ in range(MAX_RECEIPTS * 2)]
        self.begin(self.client)
        self.assertEqual(list(self.read(self.client)), sent)
        self.assertEqual(self.count_queued(), 0)
        sent = [self.forward() for _ in range(3)]
        self.assertEqual(list(self.read(self.client)), sent)
        self.assertEqual(self.count_queued(), 0)

    def test_connection_lost_on_the_way(self) -> None:
        """What the wallet has read is gone, and the rest comes on its next socket, in order."""
        sent = [self.forward() for _ in range(30)]
        self.begin(self.client)
        reading, taken = self.read(self.client), []
        for _ in range(8):
            taken.append(next(reading))
        self.client.transport.disconnect(cleanly=False)
        again = self.site_fixture.websocket_client()
        self.begin(again)
        rest = list(self.read(again))
        self.assertEqual(taken, sent[:8])
        self.assertIn(rest, (sent[7:], sent[8:]))  # the last one was read, but its ping was not answered
        self.assertEqual(self.count_queued(), 0)

    def test_slow_reader(self) -> None:
        """Nothing is lost, memory is bounded, and the rest follows when the peer reads on."""
        sent = [self.forward(30_000) for _ in range(100)]
        self.client.transport.peer_stalled = True
        self.begin(self.client)
        self.site_fixture.run_due_calls()
        _, queued = self.socket.unsent
        self.assertLess(queued, 1_500_000)
        self.client.transport.resume_peer()
        taken = list(self.read(self.client))
        self.site_fixture.clock.pump([1] * 5)
        taken += self.read(self.client)
        self.assertEqual(taken, sent)
        self.assertEqual(self.count_queued(), 0)
