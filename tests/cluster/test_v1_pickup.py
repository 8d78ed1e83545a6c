"""Pickup of DIDComm v1 across nodes: a wallet's socket is at one of them, its HTTP requests come to any."""

from __future__ import annotations

from typing import Any

from mediatord.didcomm_v1.push_writers import MAX_BARE, MAX_DELIVERED, PROBE_SECONDS, RETRY_SECONDS
from mediatord.store.interfaces.v1_connections import ImplicitPickup
from tests.cluster.in_memory_cluster import InMemoryClusterTestCase, InMemoryNode
from tests.didcomm_v1.in_memory_wallet import InMemoryV1Wallet, compose, pack_forward
from tests.didcomm_v1.test_pickup import (
    DELIVERY_REQUEST,
    LIVE_DELIVERY_CHANGE,
    MESSAGES_RECEIVED,
    STATUS_REQUEST,
    read_delivery,
)
from tests.in_memory_mediator import FakeSocket


class V1ClusterTestCase(InMemoryClusterTestCase):
    def setUp(self) -> None:
        super().setUp()
        self.a, self.b = self.in_memory_nodes

    def connect(self, how: ImplicitPickup) -> tuple[InMemoryV1Wallet, InMemoryV1Wallet]:
        """A wallet, once for each node."""
        at_a = InMemoryV1Wallet(self.a, implicit_pickup=how).enrol()
        at_b = InMemoryV1Wallet(self.b, implicit_pickup=how)
        return at_a, at_b

    def forward(self, node: InMemoryNode, wallet: InMemoryV1Wallet, number: int) -> list[bytes]:
        """Forward messages at a node; their payloads."""
        payloads = [wallet.make_payload(str(one)) for one in range(number)]
        for payload in payloads:
            self.assertEqual(node.receive(pack_forward(node, wallet.recipient_base58, payload)).status, 202)
            self.clock.advance(0.001)
        self.settle()
        return payloads

    def begin(self, wallet: InMemoryV1Wallet) -> FakeSocket:
        """Begin implicit pickup."""
        socket = wallet.in_memory.socket()
        wallet.ask("trust_ping/1.0/ping", response_requested=False, socket=socket)
        self.settle()
        return socket

    def take_pushes(self, wallet: InMemoryV1Wallet, socket: FakeSocket) -> dict[str, bytes]:
        """Messages that were pushed since the last call."""
        found: dict[str, bytes] = {}
        for frame in socket.frames:
            found |= read_delivery(wallet.open(frame))
        socket.frames.clear()
        return found

    def acknowledge(self, wallet: InMemoryV1Wallet, *ids: str) -> Any:
        """Acknowledge by HTTP; what the status counts."""
        count = wallet.answer(MESSAGES_RECEIVED, message_id_list=list(ids)).members["message_count"]
        self.settle()
        return count


class V1PickupTests(V1ClusterTestCase):
    """A wallet at two nodes."""

    def test_acknowledged_elsewhere(self) -> None:
        """What was pushed at one node is left out of the status at another, so that Credo does not ask for it."""
        at_a, at_b = self.connect("delivery")
        socket = self.a.socket()
        at_a.answer(LIVE_DELIVERY_CHANGE, live_delivery=True, socket=socket)
        sent = self.forward(self.b, at_b, 5)
        pushed = self.take_pushes(at_a, socket)
        self.assertEqual(list(pushed.values()), sent)
        for id_ in pushed:
            self.assertEqual(self.acknowledge(at_b, id_), 0)
        self.assertEqual(at_b.answer(STATUS_REQUEST).members["message_count"], 0)

    def test_unpushed_messages_count(self) -> None:
        """What nobody has pushed is counted at each node."""
        at_a, at_b = self.connect("delivery")
        self.forward(self.a, at_a, 3)
        first, *_ = read_delivery(at_b.answer(DELIVERY_REQUEST, limit=10))
        self.assertEqual(self.acknowledge(at_b, first), 2)

    def test_stale_pushes(self) -> None:
        """Pushes at one node that were acknowledged at another hide no message that no socket has taken."""
        at_a, at_b = self.connect("delivery")
        socket = self.a.socket()
        at_a.answer(LIVE_DELIVERY_CHANGE, live_delivery=True, socket=socket)
        self.forward(self.a, at_a, 1)
        self.assertEqual(self.acknowledge(at_b, *self.take_pushes(at_a, socket)), 0)
        socket.takes = False
        self.forward(self.a, at_a, 1)
        self.assertEqual(self.acknowledge(at_a, "none"), 1)

    def test_probe_is_acknowledged_elsewhere(self) -> None:
        """A first delivery at one node that is acknowledged at another was not ignored."""
        at_a, at_b = self.connect("unknown")
        sent = self.forward(self.a, at_a, 1)
        socket = self.begin(at_a)
        pushed = self.take_pushes(at_a, socket)
        self.assertEqual(list(pushed.values()), sent)
        socket.confirm()
        self.acknowledge(at_b, *pushed)
        self.clock.advance(PROBE_SECONDS)
        self.settle()
        getting = self.a.store.v1_connections.get_connection(at_a.key.did_key)
        connection = self.successResultOf(getting)
        assert connection is not None
        self.assertEqual(connection.implicit_pickup, "delivery")
        sent = self.forward(self.b, at_b, 1)
        self.assertEqual(list(self.take_pushes(at_a, socket).values()), sent)

    def test_bare_envelopes(self) -> None:
        """A backlog, then messages that come to either node: each once."""
        at_a, at_b = self.connect("raw")
        sent = self.forward(self.b, at_b, MAX_BARE + 20)
        socket, taken = self.begin(at_a), []
        for node in (self.a, self.b, self.a):
            sent += self.forward(node, at_a, 2)
        while socket.frames:
            taken += socket.frames
            socket.frames.clear()
            socket.confirm()
            self.settle()
        self.assertEqual(taken, sent)
        self.assertEqual(at_b.answer(STATUS_REQUEST).members["message_count"], 0)

    def test_window_moves_on(self) -> None:
        """Deliveries at one node that are acknowledged at another make room for the next ones within seconds."""
        at_a, at_b = self.connect("delivery")
        sent = self.forward(self.a, at_a, 3 * MAX_DELIVERED)
        socket, found = self.begin(at_a), dict[str, bytes]()
        for _ in range(10):
            pushed = self.take_pushes(at_a, socket)
            self.assertFalse(found.keys() & pushed)
            found |= pushed
            self.acknowledge(at_b, *pushed)
            self.clock.advance(RETRY_SECONDS)
            self.settle()
        self.assertEqual(list(found.values()), sent)

    def test_moves_to_another_node(self) -> None:
        """The wallet comes back at another node before the first one has learned of its loss."""
        at_a, at_b = self.connect("raw")
        sent = self.forward(self.a, at_a, 3)
        self.begin(at_a)
        new = self.begin(at_b)
        self.assertEqual(new.frames, sent)
        new.confirm()
        self.settle()
        self.assertEqual(at_b.answer(STATUS_REQUEST).members["message_count"], 0)


class V1ReplayTests(V1ClusterTestCase):
    """What one node has served, no other serves again."""

    def test_replay_at_another_node(self) -> None:
        """A stranger's socket at another node gets nothing by a recorded request, and nothing is removed."""
        at_a, _ = self.connect("raw")
        self.forward(self.a, at_a, 2)
        route: dict[str, Any] = {"~transport": {"return_route": "all"}}
        recorded = [
            at_a.pack(compose(type_, **members, **route))
            for type_, members in (
                ("trust_ping/1.0/ping", {"response_requested": False}),
                (LIVE_DELIVERY_CHANGE, {"live_delivery": True}),
                ("messagepickup/1.0/batch-pickup", {"batch_size": 1}),
                ("coordinate-mediation/1.0/keylist-update", {"updates": []}),
            )
        ]
        for raw in recorded:
            self.a.receive(raw)
        self.settle()
        for node in (self.b, self.a):
            stranger = node.socket()
            for raw in recorded:
                self.assertEqual(at_a.open(node.receive(raw, stranger).body).type.name, "problem-report")
            self.forward(node, at_a, 1)
            self.assertEqual(stranger.frames, [])
        self.assertEqual(at_a.answer(STATUS_REQUEST).members["message_count"], 4)
