"""Decentrl across nodes."""

from __future__ import annotations

import json
from typing import Any

from twisted.internet.defer import Deferred, fail

from mediatord.cluster.anti_entropy import ANTI_ENTROPY_INTERVAL, MIN_MESSAGE_AGE, SCAN_WINDOW
from mediatord.cluster.peer_notifications import MAX_VISIBILITY_DELAY
from mediatord.errors import StoreUnavailable
from tests.cluster.in_memory_cluster import InMemoryClusterTestCase
from tests.in_memory_identities import InMemoryDecentrlSocket

NEXT_ROUND = ANTI_ENTROPY_INTERVAL + MIN_MESSAGE_AGE + 1


class DecentrlClusterTests(InMemoryClusterTestCase):
    """Alice uses node a, Bob node b; Bob's contract admits Alice."""

    def setUp(self) -> None:
        super().setUp()
        self.a, self.b = self.in_memory_nodes
        self.alice, self.bob = self.new_identity(self.a, "alice"), self.new_identity(self.b, "bob")
        self.alice.register()
        self.bob.register()
        self.bob.save_contract_with(self.alice)

    def send_event(self, text: str = "sealed") -> str:
        """Alice sends Bob an event; returns its id."""
        reply = self.alice.send_event(self.bob, text)
        self.assertEqual(reply.status, 200)
        return str(json.loads(reply.body)["pendingEventId"])

    def read_frames(self, dialogue: InMemoryDecentrlSocket) -> list[dict[str, Any]]:
        """Frames since the last call, without pings."""
        return [frame for frame in dialogue.take_frames() if frame["type"] != "PING"]

    def read_payloads(self, dialogue: InMemoryDecentrlSocket) -> list[str]:
        """Payloads pushed since the last call."""
        return [event["payload"] for frame in self.read_frames(dialogue) for event in frame["events"]]

    def list_methods(self) -> list[str]:
        """How accepted events were delivered, by the event log of the accepting node."""
        return [event["method"] for event in self.a.events("msg.accept")]

    def test_event_is_pushed_to_other_node(self) -> None:
        """An event is pushed to the node of the socket and counts as live wherever it is acknowledged."""
        dialogue = self.bob.connect()
        ids = [self.send_event("one"), self.send_event("two")]
        self.assertEqual(self.read_payloads(dialogue), ["one", "two"])
        self.assertEqual(self.list_methods(), ["live", "live"])
        self.bob.answer("ACKNOWLEDGE_PENDING_EVENTS", event_ids=ids[:1])
        self.bob.in_memory = self.a
        self.bob.answer("ACKNOWLEDGE_PENDING_EVENTS", event_ids=ids[1:])
        for in_memory in self.in_memory_nodes:
            self.assertEqual([event["path"] for event in in_memory.events("msg.ack")], ["live"])

    def test_contract_changes_reach_other_nodes(self) -> None:
        """CONTRACTS_UPDATED is sent across nodes: for a request, its answer, and a contract of one's own."""
        dialogue = self.bob.connect()
        expected = {"type": "CONTRACTS_UPDATED"}
        self.alice.answer("REQUEST_COMMUNICATION_CONTRACT", to=self.bob.did, **self.alice.encrypt_registration({}))
        self.assertEqual(dialogue.take_frames(), [expected])
        self.bob.in_memory = self.a
        self.bob.save_contract_with(self.alice)
        self.assertEqual(dialogue.take_frames(), [expected])

    def test_sockets_at_both_nodes(self) -> None:
        """Sockets at both nodes get the event, each once."""
        remote_socket = self.bob.connect()
        self.bob.in_memory = self.a
        local_socket = self.bob.connect()
        self.send_event()
        self.advance(2 * NEXT_ROUND)
        self.assertEqual(
            (self.read_payloads(local_socket), self.read_payloads(remote_socket)), (["sealed"], ["sealed"])
        )

    def test_lost_notification(self) -> None:
        """The event is found by the next round, once."""
        dialogue = self.bob.connect()
        self.network.cut = lambda node: True
        self.send_event()
        self.advance(NEXT_ROUND)
        self.assertEqual(self.read_payloads(dialogue), ["sealed"])
        self.advance(2 * SCAN_WINDOW)
        self.assertEqual(self.read_frames(dialogue), [])
        self.assertEqual(self.list_methods(), ["queue"])

    def test_lost_contract_notification(self) -> None:
        """A change is notified when the nodes reach each other again: once, however many changes there were."""
        dialogue = self.bob.connect()
        self.network.cut = lambda node: True
        self.bob.in_memory = self.a
        self.bob.save_contract_with(self.alice)
        self.bob.save_contract_with(self.alice)
        self.advance(60)
        self.assertEqual(self.read_frames(dialogue), [])
        self.network.cut = lambda node: False
        self.advance(NEXT_ROUND)
        self.assertEqual(self.read_frames(dialogue), [{"type": "CONTRACTS_UPDATED"}])
        self.advance(60)
        self.assertEqual(self.read_frames(dialogue), [])

    def test_contract_notification_without_store(self) -> None:
        """The notification is also delayed if the presence lookup fails."""
        dialogue = self.bob.connect()
        cluster: Any = self.store.cluster
        cluster.find_presence = lambda dids: fail(StoreUnavailable())
        self.bob.in_memory = self.a
        self.bob.save_contract_with(self.alice)
        self.advance(1)
        self.assertEqual(self.read_frames(dialogue), [])
        del cluster.find_presence
        self.advance(NEXT_ROUND)
        self.assertEqual(self.read_frames(dialogue), [{"type": "CONTRACTS_UPDATED"}])

    def test_contract_notification_to_one_of_two(self) -> None:
        """A notified node is not notified again."""
        third = self.make_node("c").start()
        remote_socket = self.bob.connect()
        self.bob.in_memory = third
        local_socket = self.bob.connect()
        self.network.cut = lambda node: node.boot == self.b.boot
        self.bob.in_memory = self.a
        self.bob.save_contract_with(self.alice)
        self.advance(5)
        self.assertEqual((len(self.read_frames(remote_socket)), len(self.read_frames(local_socket))), (0, 1))
        self.network.cut = lambda node: False
        self.advance(NEXT_ROUND)
        self.assertEqual((len(self.read_frames(remote_socket)), len(self.read_frames(local_socket))), (1, 0))

    def test_blocked_socket_elsewhere(self) -> None:
        """A push to a socket of another node does not replace one here."""
        remote_socket = self.bob.connect()
        self.bob.in_memory = self.a
        self.bob.connect()
        self.network.cut = lambda node: True
        self.send_event()
        self.assertEqual(self.read_payloads(remote_socket), [])
        self.advance(2 * NEXT_ROUND)
        self.assertEqual(self.read_payloads(remote_socket), ["sealed"])

    def test_blocked_socket_here(self) -> None:
        """A blocked socket gets the event from a later round, though a socket of another node has it."""
        remote_socket = self.bob.connect()
        self.bob.in_memory = self.a
        local_socket = self.bob.connect()
        local_socket.socket.takes = False
        self.send_event()
        local_socket.socket.takes = True
        self.advance(2 * NEXT_ROUND)
        self.assertEqual(
            (self.read_payloads(local_socket), self.read_payloads(remote_socket)), (["sealed"], ["sealed"])
        )

    def test_backlog_is_not_pushed(self) -> None:
        """Events from before AUTH_SUCCESS are for the client to query."""
        for seconds in (MAX_VISIBILITY_DELAY, 11.0, 0.0):
            self.send_event()
            self.advance(seconds)
        dialogue = self.bob.connect()
        self.advance(SCAN_WINDOW)
        self.assertEqual(self.read_frames(dialogue), [])
        self.assertEqual(len(self.bob.pending()), 3)

    def test_picked_up_event_is_not_pushed(self) -> None:
        """A queried event is not pushed as well, wherever it was queried."""
        dialogue = self.bob.connect()
        self.network.cut = lambda node: True
        self.send_event()
        self.bob.in_memory = self.a
        (event,) = self.bob.pending()
        self.advance(22)
        self.bob.answer("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[event["id"]])
        self.advance(SCAN_WINDOW)
        self.assertEqual(self.read_frames(dialogue), [])

    def test_expired_registration(self) -> None:
        """Nothing is pushed for a registration that has expired meanwhile, by a round or a retry."""
        self.bob.in_memory = self.b
        brief = self.new_identity(self.b, "brief")
        brief.register(expires_at=int(self.clock.seconds()) + 5)
        brief.save_contract_with(self.alice)
        dialogue = brief.connect()
        self.network.cut = lambda node: True
        self.assertEqual(self.alice.send_event(brief).status, 200)
        self.alice.answer("REQUEST_COMMUNICATION_CONTRACT", to=brief.did, **self.alice.encrypt_registration({}))
        self.advance(5)
        self.network.cut = lambda node: False
        self.advance(SCAN_WINDOW)
        self.assertEqual(self.read_frames(dialogue), [])

    def test_valid_registration(self) -> None:
        """A registration that has not expired gets both."""
        dialogue = self.bob.connect()
        self.network.cut = lambda node: True
        self.send_event()
        self.alice.answer("REQUEST_COMMUNICATION_CONTRACT", to=self.bob.did, **self.alice.encrypt_registration({}))
        self.advance(5)
        self.network.cut = lambda node: False
        self.advance(SCAN_WINDOW)
        self.assertEqual(
            {frame["type"] for frame in self.read_frames(dialogue)}, {"PENDING_EVENTS", "CONTRACTS_UPDATED"}
        )

    def test_auth_success_precedes_pushes(self) -> None:
        """Until other nodes know of the socket there is no AUTH_SUCCESS and no push; queries find new events."""
        cluster: Any = self.store.cluster
        held: Deferred[None] = Deferred()
        announce = cluster.add_presence
        cluster.add_presence = lambda boot, dids: held.addCallback(lambda _: announce(boot, dids))
        dialogue = InMemoryDecentrlSocket(self.b)
        authenticated = Deferred.fromCoroutine(
            dialogue.protocol.handle_message(self.bob.authentication_frame(), False)
        )
        self.settle()
        self.send_event("before")
        self.advance(0.5)
        self.assertEqual(dialogue.take_frames(), [])
        held.callback(None)
        self.settle()
        self.successResultOf(authenticated)
        self.assertEqual(dialogue.take_frames(), [{"type": "AUTH_SUCCESS"}])
        (before,) = self.bob.pending()
        self.assertEqual(before["payload"], "before")
        self.bob.answer("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[before["id"]])
        self.send_event("after")
        self.assertEqual(self.read_payloads(dialogue), ["after"])
        self.advance(NEXT_ROUND)
        self.assertEqual(dialogue.take_frames(), [])

    def test_store_outage(self) -> None:
        """A socket that cannot be announced is told to retry, and leaves no presence."""
        cluster: Any = self.store.cluster
        cluster.add_presence = lambda boot, dids: fail(StoreUnavailable())
        dialogue = InMemoryDecentrlSocket(self.b)
        dialogue.send(self.bob.authentication_frame())
        (reply,) = dialogue.take_frames()
        self.assertEqual(reply["type"], "AUTH_FAILED")
        self.assertEqual(dialogue.socket.codes, [1013])
        del cluster.add_presence
        dialogue.disconnect()
        self.advance(2)
        self.assertEqual(self.successResultOf(cluster.find_presence([self.bob.did])), [])

    def test_closed_while_authenticating(self) -> None:
        """A socket closed while it authenticates leaves no presence."""
        cluster: Any = self.store.cluster
        held: Deferred[None] = Deferred()
        announce = cluster.add_presence
        cluster.add_presence = lambda boot, dids: held.addCallback(lambda _: announce(boot, dids))
        dialogue = InMemoryDecentrlSocket(self.b)
        authenticated = Deferred.fromCoroutine(
            dialogue.protocol.handle_message(self.bob.authentication_frame(), False)
        )
        self.settle()
        dialogue.disconnect()
        held.callback(None)
        self.settle()
        self.successResultOf(authenticated)
        self.assertEqual(dialogue.take_frames(), [])
        self.assertEqual(self.successResultOf(cluster.find_presence([self.bob.did])), [])
