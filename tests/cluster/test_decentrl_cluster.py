"""What nodes do for each other in Decentrl."""

from __future__ import annotations

import json
from typing import Any

from twisted.internet.defer import Deferred, fail

from mediatord.cluster.anti_entropy import ANTI_ENTROPY_INTERVAL, MIN_MESSAGE_AGE, SCAN_WINDOW
from mediatord.cluster.peer_notifications import MAX_VISIBILITY_DELAY
from mediatord.errors import StoreUnavailable
from tests.cluster.in_memory_cluster import InMemoryClusterTestCase
from tests.in_memory_identities import InMemoryDecentrlSocket

SOON = ANTI_ENTROPY_INTERVAL + MIN_MESSAGE_AGE + 1


class DecentrlTests(InMemoryClusterTestCase):
    """Alice asks node a, Bob node b; Bob lets Alice write to him."""

    def setUp(self) -> None:
        super().setUp()
        self.a, self.b = self.in_memory_nodes
        self.alice, self.bob = self.new_identity(self.a, "alice"), self.new_identity(self.b, "bob")
        self.alice.register()
        self.bob.register()
        self.bob.befriend(self.alice)

    def tell(self, text: str = "sealed") -> str:
        """Alice sends Bob an event; its id."""
        reply = self.alice.tell(self.bob, text)
        self.assertEqual(reply.status, 200)
        return str(json.loads(reply.body)["pendingEventId"])

    def heard(self, dialogue: InMemoryDecentrlSocket) -> list[dict[str, Any]]:
        """What came since this was asked last, but for pings."""
        return [frame for frame in dialogue.heard() if frame["type"] != "PING"]

    def payloads(self, dialogue: InMemoryDecentrlSocket) -> list[str]:
        """What was pushed since this was asked last."""
        return [event["payload"] for frame in self.heard(dialogue) for event in frame["events"]]

    def methods(self) -> list[str]:
        """How accepted events went, by the log of the node that accepted them."""
        return [event["method"] for event in self.a.events("msg.accept")]

    def test_event(self) -> None:
        """Pushed at once where the socket is, and counted as live wherever it is acknowledged."""
        dialogue = self.bob.connect()
        ids = [self.tell("one"), self.tell("two")]
        self.assertEqual(self.payloads(dialogue), ["one", "two"])
        self.assertEqual(self.methods(), ["live", "live"])
        self.bob.answer("ACKNOWLEDGE_PENDING_EVENTS", event_ids=ids[:1])
        self.bob.in_memory = self.a
        self.bob.answer("ACKNOWLEDGE_PENDING_EVENTS", event_ids=ids[1:])
        for in_memory in self.in_memory_nodes:
            self.assertEqual([event["path"] for event in in_memory.events("msg.ack")], ["live"])

    def test_contracts(self) -> None:
        """CONTRACTS_UPDATED comes from other nodes too: for a request, for an answer to one, for one's own."""
        dialogue = self.bob.connect()
        expected = {"type": "CONTRACTS_UPDATED"}
        self.alice.answer("REQUEST_COMMUNICATION_CONTRACT", to=self.bob.did, **self.alice.sealed_registration({}))
        self.assertEqual(dialogue.heard(), [expected])
        self.bob.in_memory = self.a
        self.bob.befriend(self.alice)
        self.assertEqual(dialogue.heard(), [expected])

    def test_both(self) -> None:
        """Sockets at both nodes get it, each once."""
        there = self.bob.connect()
        self.bob.in_memory = self.a
        here = self.bob.connect()
        self.tell()
        self.later(2 * SOON)
        self.assertEqual((self.payloads(here), self.payloads(there)), (["sealed"], ["sealed"]))

    def test_lost_hint(self) -> None:
        """The event is found by the next round, once."""
        dialogue = self.bob.connect()
        self.network.cut = lambda node: True
        self.tell()
        self.later(SOON)
        self.assertEqual(self.payloads(dialogue), ["sealed"])
        self.later(2 * SCAN_WINDOW)
        self.assertEqual(self.heard(dialogue), [])
        self.assertEqual(self.methods(), ["queue"])

    def test_lost_contract_hint(self) -> None:
        """A change is told when the nodes reach each other again, however often something has changed: once."""
        dialogue = self.bob.connect()
        self.network.cut = lambda node: True
        self.bob.in_memory = self.a
        self.bob.befriend(self.alice)
        self.bob.befriend(self.alice)
        self.later(60)
        self.assertEqual(self.heard(dialogue), [])
        self.network.cut = lambda node: False
        self.later(SOON)
        self.assertEqual(self.heard(dialogue), [{"type": "CONTRACTS_UPDATED"}])
        self.later(60)
        self.assertEqual(self.heard(dialogue), [])

    def test_contract_hint_without_the_store(self) -> None:
        """That nobody could say where the sockets are delays it, too."""
        dialogue = self.bob.connect()
        cluster: Any = self.store.cluster
        cluster.find_presence = lambda dids: fail(StoreUnavailable())
        self.bob.in_memory = self.a
        self.bob.befriend(self.alice)
        self.later(1)
        self.assertEqual(self.heard(dialogue), [])
        del cluster.find_presence
        self.later(SOON)
        self.assertEqual(self.heard(dialogue), [{"type": "CONTRACTS_UPDATED"}])

    def test_contract_hint_to_one_of_two(self) -> None:
        """Who was told is not told again."""
        third = self.in_memory("c").start()
        there = self.bob.connect()
        self.bob.in_memory = third
        here = self.bob.connect()
        self.network.cut = lambda node: node.boot == self.b.boot
        self.bob.in_memory = self.a
        self.bob.befriend(self.alice)
        self.later(5)
        self.assertEqual((len(self.heard(there)), len(self.heard(here))), (0, 1))
        self.network.cut = lambda node: False
        self.later(SOON)
        self.assertEqual((len(self.heard(there)), len(self.heard(here))), (1, 0))

    def test_dead_socket_elsewhere(self) -> None:
        """What a socket of another node has taken is no less missing here."""
        there = self.bob.connect()
        self.bob.in_memory = self.a
        self.bob.connect()
        self.network.cut = lambda node: True
        self.tell()
        self.assertEqual(self.payloads(there), [])
        self.later(2 * SOON)
        self.assertEqual(self.payloads(there), ["sealed"])

    def test_stuck_socket_here(self) -> None:
        """A socket that can take nothing gets it from a round, though one of another node has it."""
        there = self.bob.connect()
        self.bob.in_memory = self.a
        here = self.bob.connect()
        here.socket.takes = False
        self.tell()
        here.socket.takes = True
        self.later(2 * SOON)
        self.assertEqual((self.payloads(here), self.payloads(there)), (["sealed"], ["sealed"]))

    def test_no_backlog(self) -> None:
        """What came before AUTH_SUCCESS is asked for, not pushed, however shortly before that."""
        for seconds in (MAX_VISIBILITY_DELAY, 11.0, 0.0):
            self.tell()
            self.later(seconds)
        dialogue = self.bob.connect()
        self.later(SCAN_WINDOW)
        self.assertEqual(self.heard(dialogue), [])
        self.assertEqual(len(self.bob.pending()), 3)

    def test_picked_up(self) -> None:
        """What was asked for is not pushed as well, wherever it was asked for."""
        dialogue = self.bob.connect()
        self.network.cut = lambda node: True
        self.tell()
        self.bob.in_memory = self.a
        (event,) = self.bob.pending()
        self.later(22)
        self.bob.answer("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[event["id"]])
        self.later(SCAN_WINDOW)
        self.assertEqual(self.heard(dialogue), [])

    def test_expired_registration(self) -> None:
        """Nothing is pushed for a registration that has expired meanwhile, by a round or a reminder."""
        self.bob.in_memory = self.b
        brief = self.new_identity(self.b, "brief")
        brief.register(expires_at=int(self.clock.seconds()) + 5)
        brief.befriend(self.alice)
        dialogue = brief.connect()
        self.network.cut = lambda node: True
        self.assertEqual(self.alice.tell(brief).status, 200)
        self.alice.answer("REQUEST_COMMUNICATION_CONTRACT", to=brief.did, **self.alice.sealed_registration({}))
        self.later(5)
        self.network.cut = lambda node: False
        self.later(SCAN_WINDOW)
        self.assertEqual(self.heard(dialogue), [])

    def test_registration_that_lasts(self) -> None:
        """One that has not expired gets both."""
        dialogue = self.bob.connect()
        self.network.cut = lambda node: True
        self.tell()
        self.alice.answer("REQUEST_COMMUNICATION_CONTRACT", to=self.bob.did, **self.alice.sealed_registration({}))
        self.later(5)
        self.network.cut = lambda node: False
        self.later(SCAN_WINDOW)
        self.assertEqual({frame["type"] for frame in self.heard(dialogue)}, {"PENDING_EVENTS", "CONTRACTS_UPDATED"})

    def test_success_comes_first(self) -> None:
        """While other nodes do not know yet, nothing is pushed or promised; what comes is found by asking."""
        cluster: Any = self.store.cluster
        held: Deferred[None] = Deferred()
        announce = cluster.add_presence
        cluster.add_presence = lambda boot, dids: held.addCallback(lambda _: announce(boot, dids))
        dialogue = InMemoryDecentrlSocket(self.b)
        said = Deferred.fromCoroutine(dialogue.conversation.handle_message(self.bob.greeting(), False))
        self.settle()
        self.tell("before")
        self.later(0.5)
        self.assertEqual(dialogue.heard(), [])
        held.callback(None)
        self.settle()
        self.successResultOf(said)
        self.assertEqual(dialogue.heard(), [{"type": "AUTH_SUCCESS"}])
        (before,) = self.bob.pending()
        self.assertEqual(before["payload"], "before")
        self.bob.answer("ACKNOWLEDGE_PENDING_EVENTS", event_ids=[before["id"]])
        self.tell("after")
        self.assertEqual(self.payloads(dialogue), ["after"])
        self.later(SOON)
        self.assertEqual(dialogue.heard(), [])

    def test_store_away(self) -> None:
        """A socket that others cannot know of is told to come again, and leaves nothing behind."""
        cluster: Any = self.store.cluster
        cluster.add_presence = lambda boot, dids: fail(StoreUnavailable())
        dialogue = InMemoryDecentrlSocket(self.b)
        dialogue.say(self.bob.greeting())
        (told,) = dialogue.heard()
        self.assertEqual(told["type"], "AUTH_FAILED")
        self.assertEqual(dialogue.socket.codes, [1013])
        del cluster.add_presence
        dialogue.hang_up()
        self.later(2)
        self.assertEqual(self.successResultOf(cluster.find_presence([self.bob.did])), [])

    def test_gone_while_it_authenticates(self) -> None:
        """Likewise."""
        cluster: Any = self.store.cluster
        held: Deferred[None] = Deferred()
        announce = cluster.add_presence
        cluster.add_presence = lambda boot, dids: held.addCallback(lambda _: announce(boot, dids))
        dialogue = InMemoryDecentrlSocket(self.b)
        said = Deferred.fromCoroutine(dialogue.conversation.handle_message(self.bob.greeting(), False))
        self.settle()
        dialogue.hang_up()
        held.callback(None)
        self.settle()
        self.successResultOf(said)
        self.assertEqual(dialogue.heard(), [])
        self.assertEqual(self.successResultOf(cluster.find_presence([self.bob.did])), [])
