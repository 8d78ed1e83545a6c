"""The cache of presence, and the lookups that it saves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster import presence
from mediatord.cluster.peer_notifications import PeerNotification
from mediatord.cluster.presence import RECENT_NODE_TTL, PresenceCache, PresencePublisher
from mediatord.cluster.remote_delivery import LOOKUP_DELAY, RemoteDelivery
from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.cluster_and_quotas import ClusterNode, PresenceRecord
from mediatord.store.interfaces.decentrl import PendingEvent
from mediatord.store.interfaces.messages import StoredMessage
from tests.cluster.test_presence_publisher import Ledger
from tests.in_memory_mediator import NOW

BOB, EVE = "did:x:bob", "did:x:eve"
ANN, BEA, CAL = (
    ClusterNode(name, name * 2, "tcp:host=10.0.0.1:port=7070", b"seal") for name in ("ann", "bea", "cal")
)


class ArrivalCounters:
    """Counts who has come, where all can see it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def increment(self, dids: Iterable[str]) -> None:
        """Counted."""
        self.counts.update(dids)

    def epoch(self, did: str) -> Hashable:
        """The count."""
        return self.counts[did]


class PresenceCacheTests(SynchronousTestCase):
    """With shared counters."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.board = ArrivalCounters()
        self.cache = PresenceCache(self.clock, cast(Any, self.board))
        self.cache.set_live_nodes([ANN.boot, BEA.boot])

    def record(self, did: str, *nodes: ClusterNode) -> None:
        """A lookup found these."""
        self.cache.record(did, nodes, self.cache.epoch(did))

    def is_absent(self, did: str) -> bool:
        """Whether the DID is known to have no socket at another node."""
        nodes, is_complete = self.cache.get_nodes(did)
        return is_complete and not nodes

    def test_absent(self) -> None:
        """Known until a socket of that DID connects, not one of another DID."""
        self.assertFalse(self.is_absent(BOB))
        self.record(BOB)
        self.board.increment([EVE])
        self.clock.advance(2 * RECENT_NODE_TTL)
        self.assertTrue(self.is_absent(BOB))
        self.board.increment([BOB])
        self.assertFalse(self.is_absent(BOB))
        self.assertEqual(len(self.cache), 0)

    def test_came_during_the_lookup(self) -> None:
        """The epoch is read before the lookup, so its result does not count as complete."""
        epoch = self.cache.epoch(BOB)
        self.board.increment([BOB])
        self.cache.record(BOB, [], epoch)
        self.assertFalse(self.is_absent(BOB))

    def test_complete(self) -> None:
        """Until a socket connects at another node; then the nodes are a guess for a while."""
        self.record(BOB, BEA)
        self.assertEqual(self.cache.get_nodes(BOB), ([BEA], True))
        self.board.increment([BOB])
        self.assertEqual(self.cache.get_nodes(BOB), ([BEA], False))
        self.clock.advance(RECENT_NODE_TTL)
        self.assertEqual(self.cache.get_nodes(BOB), ((), False))

    def test_node_gone(self) -> None:
        """Without a node that held sockets the rest is not complete."""
        self.record(BOB, ANN, BEA)
        self.cache.set_live_nodes([ANN.boot])
        self.assertEqual(self.cache.get_nodes(BOB), ([ANN], False))

    def test_limit(self) -> None:
        """The entry that was recorded first is dropped."""
        self.patch(presence, "MAX_CACHED_DIDS", 2)
        for did in (BOB, EVE, BOB, "did:x:sue"):
            self.record(did)
        self.assertEqual([self.is_absent(did) for did in (BOB, EVE, "did:x:sue")], [True, False, True])


class GuessTests(SynchronousTestCase):
    """Without shared counters."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.cache = PresenceCache(self.clock)
        self.cache.set_live_nodes([ANN.boot, BEA.boot])

    def test_for_a_while(self) -> None:
        """From the latest lookup."""
        self.cache.record(BOB, [BEA], None)
        self.clock.advance(RECENT_NODE_TTL - 1)
        self.assertEqual(self.cache.get_nodes(BOB), ([BEA], False))
        self.cache.record(BOB, [BEA, ANN], None)
        self.clock.advance(RECENT_NODE_TTL - 1)
        self.assertEqual(self.cache.get_nodes(BOB), ([BEA, ANN], False))
        self.clock.advance(1)
        self.assertEqual(self.cache.get_nodes(BOB), ((), False))

    def test_absent(self) -> None:
        """Not remembered, as a socket may connect at any time."""
        self.cache.record(BOB, [BEA], None)
        self.cache.record(BOB, [], self.cache.epoch(BOB))
        self.assertEqual((self.cache.get_nodes(BOB), len(self.cache)), (((), False), 0))


class LookupTests(SynchronousTestCase):
    """
    Takes the place of store and peers.

    :ivar questions: how often the store was asked.
    """

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.board = ArrivalCounters()
        self.places: list[PresenceRecord] = []
        self.questions = 0
        self.stale = 0
        self.notifications: list[str] = []
        self.sent_to: dict[str, list[str]] = defaultdict(list)
        self.took: bool | Deferred[bool | None] = True
        self.remote_delivery = RemoteDelivery(
            self.clock, ANN.boot, cast(Any, self), cast(Any, self), cast(Any, self), cast(Any, self.board)
        )
        self.remote_delivery.set_live_nodes([ANN.boot, BEA.boot])

    def find(self, did: str) -> Deferred[list[PresenceRecord]]:
        """What the store says."""
        self.questions += 1
        return succeed(self.places)

    def enqueue(self, node: ClusterNode, notification: PeerNotification, message: object) -> Deferred[bool | None]:
        """Noted."""
        self.notifications.append(notification.name)
        self.sent_to[node.name].append(notification.name)
        return self.took if isinstance(self.took, Deferred) else succeed(self.took)

    @property
    def stale_presence(self) -> Any:
        """Counted."""
        return SimpleNamespace(inc=partial(setattr, self, "stale", self.stale + 1))

    def send(self, name: str = "m") -> bool:
        """A message for Bob; whether it was taken elsewhere."""
        message = StoredMessage(name, BOB, BOB, b"{}", "json", NOW, NOW + 1000)
        return self.successResultOf(self.remote_delivery.deliver_message(message))

    def test_one_question_for_all(self) -> None:
        """A thousand messages for somebody who is nowhere cost one question."""
        self.assertEqual([self.send() for _ in range(1000)], [False] * 1000)
        event = PendingEvent("e", BOB, EVE, "sealed", NOW)
        self.assertIs(self.successResultOf(self.remote_delivery.deliver_event(event)), False)
        self.assertEqual((self.questions, self.clock.getDelayedCalls()), (1, []))

    def test_looked_up_once(self) -> None:
        """When a socket has connected, and no more while every notification is delivered."""
        self.send()
        self.places = [PresenceRecord(BOB, BEA.boot, BEA)]
        self.board.increment([BOB])
        self.assertTrue(self.send("1"))
        self.assertTrue(self.send("2"))
        self.assertEqual((self.questions, self.notifications, self.clock.getDelayedCalls()), (2, ["1", "2"], []))

    def test_not_delivered(self) -> None:
        """A node that did not deliver is looked up, counted, and then known to have no socket."""
        self.places = [PresenceRecord(BOB, BEA.boot, BEA)]
        self.send("1")
        self.places, self.took = [], False
        self.assertFalse(self.send("2"))
        self.assertEqual((self.questions, self.stale), (2, 1))
        self.assertFalse(self.send("3"))
        self.assertEqual((self.questions, self.notifications), (2, ["1", "2"]))

    def test_moved(self) -> None:
        """A notification that was not delivered goes to where the socket is by now."""
        self.remote_delivery.set_live_nodes([ANN.boot, BEA.boot, CAL.boot])
        self.places = [PresenceRecord(BOB, BEA.boot, BEA)]
        self.send("1")
        answer: Deferred[bool | None] = Deferred()
        self.took = answer
        taken = self.remote_delivery.deliver_message(StoredMessage("2", BOB, BOB, b"{}", "json", NOW, NOW + 1000))
        self.assertNoResult(taken)
        self.places, self.took = [PresenceRecord(BOB, CAL.boot, CAL)], True
        answer.callback(None)
        self.assertIs(self.successResultOf(taken), True)
        self.assertEqual((self.notifications, self.stale, self.remote_delivery.pending), (["1", "2", "2"], 1, (0, 0)))

    def test_one_of_two(self) -> None:
        """The lookup for a node that did not take it does not wait for the answer of another one."""
        self.remote_delivery.set_live_nodes([ANN.boot, BEA.boot, CAL.boot])
        self.places = [PresenceRecord(BOB, node.boot, node) for node in (BEA, CAL)]
        self.send("1")
        answers: list[Deferred[bool | None]] = [succeed(None), Deferred()]
        self.patch(self, "enqueue", lambda *args: answers.pop(0))
        self.remote_delivery.deliver_message(StoredMessage("2", BOB, BOB, b"{}", "json", NOW, NOW + 1000))
        self.assertEqual((self.questions, answers), (2, []))

    def test_order(self) -> None:
        """What is to be looked up does not overtake what awaits an answer."""
        self.places = [PresenceRecord(BOB, BEA.boot, BEA)]
        self.send("1")
        self.took = Deferred()
        first = self.remote_delivery.deliver_message(StoredMessage("2", BOB, BOB, b"{}", "json", NOW, NOW + 1000))
        self.board.increment([BOB])
        self.remote_delivery.deliver_message(StoredMessage("3", BOB, BOB, b"{}", "json", NOW, NOW + 1000))
        self.places.append(PresenceRecord(BOB, CAL.boot, CAL))
        self.clock.advance(LOOKUP_DELAY)
        self.assertNoResult(first)
        self.assertEqual(self.sent_to["cal"], ["2", "3"])

    def test_end(self) -> None:
        """Nothing is looked up any more."""
        self.places = [PresenceRecord(BOB, BEA.boot, BEA)]
        self.send("1")
        answer: Deferred[bool | None] = Deferred()
        self.took = answer
        taken = self.remote_delivery.deliver_message(StoredMessage("2", BOB, BOB, b"{}", "json", NOW, NOW + 1000))
        self.remote_delivery.end()
        answer.callback(None)
        self.assertIs(self.successResultOf(taken), False)
        self.assertEqual((self.questions, self.remote_delivery.pending), (1, (0, 0)))

    def test_not_live(self) -> None:
        """A node that may come back is asked for each time."""
        self.places = [PresenceRecord(BOB, BEA.boot, None)]
        self.send()
        self.send()
        self.assertEqual(self.questions, 2)

    def test_contracts(self) -> None:
        """What is not to be found later is asked for each time."""
        self.remote_delivery.notify_contracts_changed(BOB)
        self.remote_delivery.notify_contracts_changed(BOB)
        self.assertEqual(self.questions, 2)


class PresencePublisherTests(SynchronousTestCase):
    """Who has come is shown after the store knows, and before the socket is told."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.ledger = Ledger()
        self.board = ArrivalCounters()
        self.publisher = PresencePublisher(self.clock, cast(Any, self.ledger), "aaaa", cast(Any, self.board))
        self.publisher.joined()

    def test_order(self) -> None:
        """Not earlier, or a question might still be answered as before; and not later."""
        self.ledger.late = True
        seen: list[int] = []
        self.publisher.add(BOB).addCallback(lambda _: seen.append(self.board.counts[BOB]))
        self.clock.advance(0)
        self.assertEqual((self.board.counts[BOB], seen), (0, []))
        self.ledger.open.pop().callback(None)
        self.assertEqual(seen, [1])

    def test_in_doubt(self) -> None:
        """A store that did not answer may know all the same."""
        self.ledger.away = True
        known = self.publisher.add(BOB)
        self.clock.advance(0)
        self.failureResultOf(known, StoreUnavailable)
        self.assertEqual(self.board.counts[BOB], 1)
