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
from tests.cluster.test_presence_publisher import FakePresenceStore
from tests.in_memory_mediator import NOW

BOB, EVE = "did:x:bob", "did:x:eve"
ANN, BEA, CAL = (
    ClusterNode(name, name * 2, "tcp:host=10.0.0.1:port=7070", b"seal") for name in ("ann", "bea", "cal")
)


class FakePresenceCounters:
    """Counts sockets per DID, as shared memory does."""

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
        self.counters = FakePresenceCounters()
        self.cache = PresenceCache(self.clock, cast(Any, self.counters))
        self.cache.set_live_nodes([ANN.boot, BEA.boot])

    def record(self, did: str, *nodes: ClusterNode) -> None:
        """Record the result of a lookup."""
        self.cache.record(did, nodes, self.cache.epoch(did))

    def is_absent(self, did: str) -> bool:
        """Whether the DID is known to have no socket at another node."""
        nodes, is_complete = self.cache.get_nodes(did)
        return is_complete and not nodes

    def test_absence_is_known_until_a_socket_connects(self) -> None:
        """Absence is known until a socket of that DID connects; other DIDs do not matter."""
        self.assertFalse(self.is_absent(BOB))
        self.record(BOB)
        self.counters.increment([EVE])
        self.clock.advance(2 * RECENT_NODE_TTL)
        self.assertTrue(self.is_absent(BOB))
        self.counters.increment([BOB])
        self.assertFalse(self.is_absent(BOB))
        self.assertEqual(len(self.cache), 0)

    def test_socket_connected_during_lookup(self) -> None:
        """The epoch is read before the lookup, so its result does not count as complete."""
        epoch = self.cache.epoch(BOB)
        self.counters.increment([BOB])
        self.cache.record(BOB, [], epoch)
        self.assertFalse(self.is_absent(BOB))

    def test_complete_until_a_socket_connects(self) -> None:
        """Until a socket connects at another node; then the nodes are a guess for a while."""
        self.record(BOB, BEA)
        self.assertEqual(self.cache.get_nodes(BOB), ([BEA], True))
        self.counters.increment([BOB])
        self.assertEqual(self.cache.get_nodes(BOB), ([BEA], False))
        self.clock.advance(RECENT_NODE_TTL)
        self.assertEqual(self.cache.get_nodes(BOB), ((), False))

    def test_removed_node(self) -> None:
        """Without a node that held sockets the result is not complete."""
        self.record(BOB, ANN, BEA)
        self.cache.set_live_nodes([ANN.boot])
        self.assertEqual(self.cache.get_nodes(BOB), ([ANN], False))

    def test_limit(self) -> None:
        """The entry that was recorded first is dropped."""
        self.patch(presence, "MAX_CACHED_DIDS", 2)
        for did in (BOB, EVE, BOB, "did:x:sue"):
            self.record(did)
        self.assertEqual([self.is_absent(did) for did in (BOB, EVE, "did:x:sue")], [True, False, True])


class UncountedPresenceCacheTests(SynchronousTestCase):
    """Without shared counters."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.cache = PresenceCache(self.clock)
        self.cache.set_live_nodes([ANN.boot, BEA.boot])

    def test_guess_expires(self) -> None:
        """A guess expires some time after the latest lookup."""
        self.cache.record(BOB, [BEA], None)
        self.clock.advance(RECENT_NODE_TTL - 1)
        self.assertEqual(self.cache.get_nodes(BOB), ([BEA], False))
        self.cache.record(BOB, [BEA, ANN], None)
        self.clock.advance(RECENT_NODE_TTL - 1)
        self.assertEqual(self.cache.get_nodes(BOB), ([BEA, ANN], False))
        self.clock.advance(1)
        self.assertEqual(self.cache.get_nodes(BOB), ((), False))

    def test_absence_is_not_cached(self) -> None:
        """Absence is not cached, as a socket may connect at any time."""
        self.cache.record(BOB, [BEA], None)
        self.cache.record(BOB, [], self.cache.epoch(BOB))
        self.assertEqual((self.cache.get_nodes(BOB), len(self.cache)), (((), False), 0))


class LookupTests(SynchronousTestCase):
    """
    Stands in for store and peers.

    :ivar lookups: number of lookups in the store.
    """

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.counters = FakePresenceCounters()
        self.presence: list[PresenceRecord] = []
        self.lookups = 0
        self.stale = 0
        self.notifications: list[str] = []
        self.sent_to: dict[str, list[str]] = defaultdict(list)
        self.response: bool | Deferred[bool | None] = True
        self.remote_delivery = RemoteDelivery(
            self.clock, ANN.boot, cast(Any, self), cast(Any, self), cast(Any, self), cast(Any, self.counters)
        )
        self.remote_delivery.set_live_nodes([ANN.boot, BEA.boot])

    def find(self, did: str) -> Deferred[list[PresenceRecord]]:
        """Presence by the store."""
        self.lookups += 1
        return succeed(self.presence)

    def enqueue(self, node: ClusterNode, notification: PeerNotification, message: object) -> Deferred[bool | None]:
        """Recorded."""
        self.notifications.append(notification.name)
        self.sent_to[node.name].append(notification.name)
        return self.response if isinstance(self.response, Deferred) else succeed(self.response)

    @property
    def stale_presence(self) -> Any:
        """Counted."""
        return SimpleNamespace(inc=partial(setattr, self, "stale", self.stale + 1))

    def send(self, name: str = "m") -> bool:
        """Notify of a message for Bob; returns whether another node accepted it."""
        message = StoredMessage(name, BOB, BOB, b"{}", "json", NOW, NOW + 1000)
        return self.successResultOf(self.remote_delivery.deliver_message(message))

    def test_one_lookup_for_absent_did(self) -> None:
        """A thousand messages for an absent DID cost one lookup."""
        self.assertEqual([self.send() for _ in range(1000)], [False] * 1000)
        event = PendingEvent("e", BOB, EVE, "sealed", NOW)
        self.assertIs(self.successResultOf(self.remote_delivery.deliver_event(event)), False)
        self.assertEqual((self.lookups, self.clock.getDelayedCalls()), (1, []))

    def test_one_lookup_per_socket(self) -> None:
        """One lookup after a socket has connected, and no more while every notification is delivered."""
        self.send()
        self.presence = [PresenceRecord(BOB, BEA.boot, BEA)]
        self.counters.increment([BOB])
        self.assertTrue(self.send("1"))
        self.assertTrue(self.send("2"))
        self.assertEqual((self.lookups, self.notifications, self.clock.getDelayedCalls()), (2, ["1", "2"], []))

    def test_not_delivered(self) -> None:
        """A node that did not deliver is looked up, counted, and then known to have no socket."""
        self.presence = [PresenceRecord(BOB, BEA.boot, BEA)]
        self.send("1")
        self.presence, self.response = [], False
        self.assertFalse(self.send("2"))
        self.assertEqual((self.lookups, self.stale), (2, 1))
        self.assertFalse(self.send("3"))
        self.assertEqual((self.lookups, self.notifications), (2, ["1", "2"]))

    def test_moved_socket(self) -> None:
        """A notification that was not delivered goes to the node that has the socket by now."""
        self.remote_delivery.set_live_nodes([ANN.boot, BEA.boot, CAL.boot])
        self.presence = [PresenceRecord(BOB, BEA.boot, BEA)]
        self.send("1")
        answer: Deferred[bool | None] = Deferred()
        self.response = answer
        accepted = self.remote_delivery.deliver_message(StoredMessage("2", BOB, BOB, b"{}", "json", NOW, NOW + 1000))
        self.assertNoResult(accepted)
        self.presence, self.response = [PresenceRecord(BOB, CAL.boot, CAL)], True
        answer.callback(None)
        self.assertIs(self.successResultOf(accepted), True)
        self.assertEqual((self.notifications, self.stale, self.remote_delivery.pending), (["1", "2", "2"], 1, (0, 0)))

    def test_one_of_two_nodes(self) -> None:
        """The lookup for a node that did not accept does not wait for the response of another one."""
        self.remote_delivery.set_live_nodes([ANN.boot, BEA.boot, CAL.boot])
        self.presence = [PresenceRecord(BOB, node.boot, node) for node in (BEA, CAL)]
        self.send("1")
        answers: list[Deferred[bool | None]] = [succeed(None), Deferred()]
        self.patch(self, "enqueue", lambda *args: answers.pop(0))
        self.remote_delivery.deliver_message(StoredMessage("2", BOB, BOB, b"{}", "json", NOW, NOW + 1000))
        self.assertEqual((self.lookups, answers), (2, []))

    def test_order(self) -> None:
        """A notification that needs a lookup does not overtake one that waits for a response."""
        self.presence = [PresenceRecord(BOB, BEA.boot, BEA)]
        self.send("1")
        self.response = Deferred()
        first = self.remote_delivery.deliver_message(StoredMessage("2", BOB, BOB, b"{}", "json", NOW, NOW + 1000))
        self.counters.increment([BOB])
        self.remote_delivery.deliver_message(StoredMessage("3", BOB, BOB, b"{}", "json", NOW, NOW + 1000))
        self.presence.append(PresenceRecord(BOB, CAL.boot, CAL))
        self.clock.advance(LOOKUP_DELAY)
        self.assertNoResult(first)
        self.assertEqual(self.sent_to["cal"], ["2", "3"])

    def test_stop(self) -> None:
        """There are no lookups after the stop."""
        self.presence = [PresenceRecord(BOB, BEA.boot, BEA)]
        self.send("1")
        answer: Deferred[bool | None] = Deferred()
        self.response = answer
        accepted = self.remote_delivery.deliver_message(StoredMessage("2", BOB, BOB, b"{}", "json", NOW, NOW + 1000))
        self.remote_delivery.end()
        answer.callback(None)
        self.assertIs(self.successResultOf(accepted), False)
        self.assertEqual((self.lookups, self.remote_delivery.pending), (1, (0, 0)))

    def test_lapsed_node_is_looked_up_each_time(self) -> None:
        """A node that may return is looked up each time."""
        self.presence = [PresenceRecord(BOB, BEA.boot, None)]
        self.send()
        self.send()
        self.assertEqual(self.lookups, 2)

    def test_contract_changes_are_looked_up_each_time(self) -> None:
        """Presence for contract changes is looked up each time, as they cannot be found later."""
        self.remote_delivery.notify_contracts_changed(BOB)
        self.remote_delivery.notify_contracts_changed(BOB)
        self.assertEqual(self.lookups, 2)


class EpochTests(SynchronousTestCase):
    """The epoch changes after the store has the presence and before the socket is told."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.store = FakePresenceStore()
        self.counters = FakePresenceCounters()
        self.publisher = PresencePublisher(self.clock, cast(Any, self.store), "aaaa", cast(Any, self.counters))
        self.publisher.joined()

    def test_order(self) -> None:
        """A change before the store knows would let a stale lookup count, one after the reply comes too late."""
        self.store.is_held = True
        counts: list[int] = []
        self.publisher.add(BOB).addCallback(lambda _: counts.append(self.counters.counts[BOB]))
        self.clock.advance(0)
        self.assertEqual((self.counters.counts[BOB], counts), (0, []))
        self.store.open.pop().callback(None)
        self.assertEqual(counts, [1])

    def test_uncertain_write(self) -> None:
        """A store that did not respond may have written the presence."""
        self.store.is_down = True
        published = self.publisher.add(BOB)
        self.clock.advance(0)
        self.failureResultOf(published, StoreUnavailable)
        self.assertEqual(self.counters.counts[BOB], 1)
