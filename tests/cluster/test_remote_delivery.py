"""Finding the nodes that hold sockets of a DID, and notifying them: at once if they are cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster.peer_notifications import PeerNotification
from mediatord.cluster.presence import LOOKUP_BATCH, MAX_CONCURRENT_LOOKUPS, RECENT_NODE_TTL, PresenceLookup
from mediatord.cluster.remote_delivery import (
    LOOKUP_DELAY,
    MAX_PENDING,
    MAX_PENDING_BYTES,
    MAX_RETRY_DELAY,
    MIN_RETRY_DELAY,
    RemoteDelivery,
)
from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.cluster_and_quotas import ClusterNode, PresenceRecord
from mediatord.store.interfaces.decentrl import PendingEvent
from mediatord.store.interfaces.messages import StoredMessage
from tests.in_memory_mediator import NOW

BOB, EVE = "did:x:bob", "did:x:eve"
ANN, BEA, CAL = (
    ClusterNode(name, name * 2, "tcp:host=10.0.0.1:port=7070", b"seal") for name in ("ann", "bea", "cal")
)


def make_message(id_: str, account: str = BOB) -> StoredMessage:
    """A queued message."""
    return StoredMessage(id_, account, account, b"{}", "json", NOW, NOW + 1000)


class FakePresenceStore:
    """Presence lookups, answered by the test."""

    def __init__(self) -> None:
        self.lookups: list[tuple[list[str], Deferred[list[PresenceRecord]]]] = []

    def find_presence(self, dids: Sequence[str]) -> Deferred[list[PresenceRecord]]:
        """Recorded."""
        self.lookups.append((list(dids), Deferred()))
        return self.lookups[-1][1]


class PresenceLookupTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.store = FakePresenceStore()
        self.finder = PresenceLookup(self.clock, cast(Any, self.store))

    def test_one_lookup_per_iteration(self) -> None:
        """Lookups of one iteration share a query; each gets its own result."""
        found = {did: self.finder.find(did) for did in ("did:x:a", "did:x:b")}
        repeated = self.finder.find("did:x:a")
        self.clock.advance(0)
        ((dids, answer),) = self.store.lookups
        self.assertEqual(dids, ["did:x:a", "did:x:b"])
        record = PresenceRecord("did:x:a", ANN.boot, ANN)
        answer.callback([record])
        self.assertEqual(self.successResultOf(found["did:x:a"]), [record])
        self.assertEqual(self.successResultOf(repeated), [record])
        self.assertEqual(self.successResultOf(found["did:x:b"]), [])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_lookups_are_bounded(self) -> None:
        """Queries are small and few; further DIDs share the next one."""
        found = [self.finder.find(f"did:x:{number}") for number in range(MAX_CONCURRENT_LOOKUPS * LOOKUP_BATCH + 3)]
        self.clock.advance(0)
        self.assertEqual([len(dids) for dids, _ in self.store.lookups], [LOOKUP_BATCH] * MAX_CONCURRENT_LOOKUPS)
        self.store.lookups[0][1].callback([])
        self.clock.advance(0)
        self.assertEqual([len(dids) for dids, _ in self.store.lookups], [LOOKUP_BATCH] * MAX_CONCURRENT_LOOKUPS + [3])
        for _, answer in self.store.lookups[1:]:
            answer.callback([])
        for item in found:
            self.assertEqual(self.successResultOf(item), [])

    def test_order_per_did(self) -> None:
        """The next lookup of a DID waits for the one before; other DIDs do not."""
        first = self.finder.find("did:x:a")
        self.clock.advance(0)
        second, other = self.finder.find("did:x:a"), self.finder.find("did:x:b")
        self.clock.advance(0)
        self.assertEqual([dids for dids, _ in self.store.lookups], [["did:x:a"], ["did:x:b"]])
        self.store.lookups[1][1].callback([])
        self.assertEqual(self.successResultOf(other), [])
        self.store.lookups[0][1].callback([])
        self.assertEqual(self.successResultOf(first), [])
        self.assertNoResult(second)
        self.clock.advance(0)
        self.store.lookups[2][1].callback([])
        self.assertEqual(self.successResultOf(second), [])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_store_outage(self) -> None:
        """The lookup fails; the next one queries the store again."""
        found = [self.finder.find("did:x:a"), self.finder.find("did:x:b")]
        self.clock.advance(0)
        self.store.lookups.pop()[1].errback(StoreUnavailable())
        for item in found:
            self.failureResultOf(item, StoreUnavailable)
        repeated = self.finder.find("did:x:a")
        self.clock.advance(0)
        self.store.lookups.pop()[1].callback([])
        self.assertEqual(self.successResultOf(repeated), [])


class RemoteDeliveryTestCase(SynchronousTestCase):
    """
    Stands in for store and peers.

    :ivar presence: nodes with sockets by the store; None while it does not answer.

    :ivar sent: notifications: node name, id.

    :ivar responses: responses of nodes by name; a Deferred stands for none yet.
    """

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.presence: list[PresenceRecord] | None = []
        self.lookups: list[Deferred[list[PresenceRecord]]] = []
        self.notifications: list[tuple[str, str]] = []
        self.weights: list[int] = []
        self.responses: dict[str, bool | Deferred[bool | None] | None] = {}
        self.stale = 0
        self.outcomes: list[str] = []
        self.remote_delivery = RemoteDelivery(self.clock, ANN.boot, cast(Any, self), cast(Any, self), cast(Any, self))
        self.remote_delivery.set_live_nodes([ANN.boot, BEA.boot, CAL.boot])

    def find(self, did: str) -> Deferred[list[PresenceRecord]]:
        """Presence by the store."""
        found: Deferred[list[PresenceRecord]] = Deferred()
        if self.presence is None:
            self.lookups.append(found)
        else:
            found.callback(self.presence)
        return found

    def enqueue(self, node: ClusterNode, notification: PeerNotification) -> Deferred[bool | None]:
        """Recorded."""
        self.notifications.append((node.name, notification.name))
        self.weights.append(notification.payload_bytes)
        response = self.responses.get(node.name, True)
        return response if isinstance(response, Deferred) else succeed(response)

    @property
    def stale_presence(self) -> Any:
        """Counted."""
        return SimpleNamespace(inc=partial(setattr, self, "stale", self.stale + 1))

    @property
    def cluster_pushes(self) -> Any:
        """Recorded."""
        return SimpleNamespace(inc=self.outcomes.append)

    def set_presence(self, *nodes: ClusterNode) -> None:
        """Let these nodes have sockets."""
        self.presence = [PresenceRecord(BOB, node.boot, node) for node in nodes]

    def answer_lookup(self, *nodes: ClusterNode) -> None:
        """Answer the oldest lookup."""
        self.lookups.pop(0).callback([PresenceRecord(BOB, node.boot, node) for node in nodes])

    def send(self, name: str = "m") -> Deferred[bool]:
        """Notify of a message for Bob."""
        return self.remote_delivery.deliver_message(make_message(name))

    def take_sent(self) -> list[tuple[str, str]]:
        """Notifications since the last call."""
        notifications, self.notifications = self.notifications, []
        return notifications

    def cache_presence(self, *nodes: ClusterNode) -> None:
        """The store has reported Bob at these nodes, and does not answer from now on."""
        self.set_presence(*nodes)
        self.send("before")
        self.clock.advance(LOOKUP_DELAY)
        self.take_sent()
        self.presence = None


class RemoteDeliveryTests(RemoteDeliveryTestCase):
    """Without cached nodes."""

    def test_every_other_node(self) -> None:
        """All nodes but this one are notified; the result is true if one accepted it."""
        self.set_presence(ANN, BEA, CAL)
        self.responses = {"bea": False}
        self.assertIs(self.successResultOf(self.send()), True)
        self.assertEqual((self.take_sent(), self.weights), ([("bea", "m"), ("cal", "m")], [2, 2]))

    def test_kinds(self) -> None:
        """A message, an event and a contract change."""
        self.set_presence(BEA)
        self.remote_delivery.deliver_event(PendingEvent("e", BOB, "did:x:ann", "sealed", NOW))
        self.remote_delivery.notify_contracts_changed(BOB)
        self.assertEqual(self.take_sent(), [("bea", "e"), ("bea", BOB)])

    def test_no_presence(self) -> None:
        """Nobody is notified."""
        self.assertIs(self.successResultOf(self.send()), False)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_not_accepted(self) -> None:
        """The result is false once all nodes have responded."""
        self.set_presence(BEA, CAL)
        slow: Deferred[bool | None] = Deferred()
        self.responses = {"bea": False, "cal": slow}
        accepted = self.send()
        self.assertNoResult(accepted)
        slow.callback(None)
        self.assertIs(self.successResultOf(accepted), False)

    def test_stale_presence(self) -> None:
        """A lapsed node is counted and not notified."""
        self.presence = [PresenceRecord(BOB, BEA.boot, None)]
        self.assertIs(self.successResultOf(self.send()), False)
        self.assertEqual((self.stale, self.take_sent()), (1, []))

    def test_store_outage(self) -> None:
        """The message waits; only the store itself logs the outage."""
        self.presence = None
        accepted = self.send()
        self.lookups.pop().errback(StoreUnavailable())
        self.assertIs(self.successResultOf(accepted), False)

    def test_programming_error(self) -> None:
        """A programming error is logged."""
        self.presence = None
        accepted = self.send()
        self.lookups.pop().errback(RuntimeError("boom"))
        self.assertIs(self.successResultOf(accepted), False)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)


class PendingLookupBytesTests(RemoteDeliveryTestCase):
    """Bytes held until presence is known."""

    def make_large_message(self, name: str, size: int = 1 << 20) -> Deferred[bool]:
        """A message, each for another DID."""
        return self.remote_delivery.deliver_message(replace(make_message(name, f"did:x:{name}"), payload=bytes(size)))

    def test_bytes_are_bounded(self) -> None:
        """Beyond the bound there are no lookups and no waiting; results make room."""
        self.presence = None
        size = MAX_PENDING_BYTES // 4
        waiting = [self.make_large_message(str(number), size) for number in range(4)]
        self.assertEqual(self.remote_delivery.pending, (4, MAX_PENDING_BYTES))
        self.assertIs(self.successResultOf(self.make_large_message("more", 1)), False)
        event = PendingEvent("e", BOB, "did:x:ann", "sealed", NOW)
        self.assertIs(self.successResultOf(self.remote_delivery.deliver_event(event)), False)
        self.assertEqual((len(self.lookups), self.outcomes), (4, ["dropped"] * 2))
        self.answer_lookup()
        self.assertIs(self.successResultOf(waiting[0]), False)
        self.assertEqual(self.remote_delivery.pending, (3, 3 * size))
        self.assertNoResult(self.make_large_message("again", size))
        self.assertEqual(len(self.lookups), 4)

    def test_one_message_always_fits(self) -> None:
        """However large it is."""
        self.presence = None
        self.assertNoResult(self.make_large_message("large", MAX_PENDING_BYTES + 1))

    def test_entries_are_bounded(self) -> None:
        """A contract change without room is retried later, and occupies none meanwhile."""
        self.presence = None
        for number in range(MAX_PENDING):
            self.make_large_message(str(number), 0)
        self.assertIs(self.successResultOf(self.remote_delivery.notify_contracts_changed(BOB)), False)
        self.assertIs(self.successResultOf(self.make_large_message("more", 0)), False)
        self.clock.advance(MIN_RETRY_DELAY)
        self.assertEqual(self.remote_delivery.pending, (MAX_PENDING, 0))
        while self.lookups:
            self.answer_lookup()
        self.assertEqual(self.remote_delivery.pending, (0, 0))
        self.set_presence(BEA)
        self.clock.pump([MAX_RETRY_DELAY] * 2)
        self.assertEqual(self.take_sent(), [("bea", BOB)])

    def test_held_until_nodes_respond(self) -> None:
        """Since the payload goes to the endpoint if no socket accepts it."""
        self.set_presence(BEA)
        slow: Deferred[bool | None] = Deferred()
        self.responses = {"bea": slow}
        self.make_large_message("m", 10)
        self.assertEqual(self.remote_delivery.pending, (1, 10))
        slow.callback(False)
        self.assertEqual(self.remote_delivery.pending, (0, 0))

    def test_stop(self) -> None:
        """Nothing is held any more for notifications that preceded their lookup."""
        self.cache_presence(BEA)
        slow: Deferred[bool | None] = Deferred()
        self.responses = {"bea": slow}
        self.send()
        self.remote_delivery.end()
        slow.callback(None)
        self.assertEqual(self.remote_delivery.pending, (0, 0))


class CachedPresenceTests(RemoteDeliveryTestCase):
    """The DID was looked up a moment ago."""

    def test_notifies_without_lookup(self) -> None:
        """The notification does not wait for the store, which is queried once for many."""
        self.cache_presence(BEA)
        self.assertIs(self.successResultOf(self.send("1")), True)
        self.assertIs(self.successResultOf(self.send("2")), True)
        self.assertEqual((self.take_sent(), self.lookups), ([("bea", "1"), ("bea", "2")], []))
        self.clock.advance(LOOKUP_DELAY)
        self.answer_lookup(BEA)
        self.answer_lookup(BEA)
        self.assertEqual((self.take_sent(), self.stale), ([], 0))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_new_socket_elsewhere(self) -> None:
        """A new socket at another node is found by a lookup after the message was stored."""
        self.cache_presence(BEA)
        self.send()
        self.take_sent()
        self.clock.advance(LOOKUP_DELAY)
        self.answer_lookup(BEA, CAL)
        self.assertEqual(self.take_sent(), [("cal", "m")])
        self.send("next")
        self.assertEqual(self.take_sent(), [("bea", "next"), ("cal", "next")])

    def test_socket_moved_elsewhere(self) -> None:
        """A notification without a socket is counted as stale; the one to the right node decides."""
        self.cache_presence(BEA)
        self.responses = {"bea": False}
        accepted = self.send()
        self.assertNoResult(accepted)
        self.clock.advance(LOOKUP_DELAY)
        self.answer_lookup(CAL)
        self.assertIs(self.successResultOf(accepted), True)
        self.assertEqual((self.take_sent(), self.stale), ([("bea", "m"), ("cal", "m")], 1))
        self.send("next")
        self.assertEqual(self.take_sent(), [("cal", "next")])

    def test_socket_gone(self) -> None:
        """Nothing waits for a node without sockets, and it gets no more notifications."""
        self.cache_presence(BEA)
        self.responses = {"bea": Deferred()}
        accepted = self.send()
        self.clock.advance(LOOKUP_DELAY)
        self.answer_lookup()
        self.assertIs(self.successResultOf(accepted), False)
        self.assertEqual((len(self.take_sent()), self.stale), (1, 1))
        self.send("next")
        self.assertEqual((self.take_sent(), len(self.lookups)), ([], 1))

    def test_late_response(self) -> None:
        """The response of a node that nothing waits for is ignored."""
        self.cache_presence(BEA)
        response: Deferred[bool | None] = Deferred()
        self.responses = {"bea": response}
        accepted = self.send()
        self.clock.advance(LOOKUP_DELAY)
        self.answer_lookup()
        response.callback(True)
        self.assertIs(self.successResultOf(accepted), False)

    def test_order_at_new_node(self) -> None:
        """Early notifications reach a new node in order, whichever lookup reports it first."""
        self.cache_presence(BEA)
        self.send("1")
        self.send("2")
        self.clock.advance(LOOKUP_DELAY)
        self.take_sent()
        self.answer_lookup(BEA, CAL)
        self.send("3")
        self.answer_lookup(BEA, CAL)
        self.assertEqual([name for node, name in self.take_sent() if node == "cal"], ["1", "2", "3"])

    def test_order_after_cache_entry_expired(self) -> None:
        """A notification that waits for a lookup is not overtaken by later ones."""
        self.cache_presence(BEA)
        self.clock.advance(RECENT_NODE_TTL)
        self.send("1")
        self.send("2")
        self.assertEqual(self.take_sent(), [])
        self.answer_lookup(BEA)
        self.assertEqual(self.take_sent(), [("bea", "1"), ("bea", "2")])
        self.send("3")
        self.assertEqual(self.take_sent(), [("bea", "3")])

    def test_order_at_returning_node(self) -> None:
        """Nor at a node that is gone and returns."""
        self.cache_presence(BEA)
        for name in "12":
            self.send(name)
        self.clock.advance(LOOKUP_DELAY)
        self.answer_lookup(CAL)
        self.send("3")
        self.take_sent()
        self.answer_lookup(BEA, CAL)
        self.send("4")
        self.assertEqual(self.take_sent(), [("bea", "3"), ("bea", "4"), ("cal", "4")])

    def test_store_outage(self) -> None:
        """An early notification may have arrived all the same."""
        self.cache_presence(BEA)
        slow: Deferred[bool | None] = Deferred()
        self.responses = {"bea": slow}
        accepted = self.send()
        self.clock.advance(LOOKUP_DELAY)
        self.lookups.pop().errback(StoreUnavailable())
        self.assertNoResult(accepted)
        slow.callback(True)
        self.assertIs(self.successResultOf(accepted), True)

    def test_lapsed_node(self) -> None:
        """Cache entries of a node that is not live are ignored: it would not respond."""
        self.cache_presence(BEA)
        self.remote_delivery.set_live_nodes([ANN.boot, CAL.boot])
        self.send()
        self.assertEqual((self.take_sent(), len(self.lookups)), ([], 1))

    def test_many_in_one_iteration(self) -> None:
        """Thousands are sent once each, in order."""
        self.presence = None
        names = [str(number) for number in range(3000)]
        for name in names:
            self.send(name)
        for _ in names:
            self.answer_lookup(BEA)
        self.assertEqual(self.take_sent(), [("bea", name) for name in names])

    def test_stop(self) -> None:
        """Nothing is started any more, and no timer is left."""
        self.cache_presence(BEA)
        self.responses = {"bea": None}
        accepted = self.send()
        self.remote_delivery.end()
        self.assertIs(self.successResultOf(accepted), False)
        self.send("late")
        self.assertEqual(self.take_sent(), [("bea", "m")])
        self.remote_delivery.notify_contracts_changed(BOB)
        for lookup in self.lookups:
            lookup.errback(StoreUnavailable())
        self.assertEqual(self.clock.getDelayedCalls(), [])


class ContractChangeTests(RemoteDeliveryTestCase):
    """Contract changes cannot be found later: they are retried until they are accepted."""

    def test_accepted(self) -> None:
        """Accepted by all nodes, also without a socket: no retry."""
        self.set_presence(BEA, CAL)
        self.responses = {"cal": False}
        self.remote_delivery.notify_contracts_changed(BOB)
        self.clock.advance(LOOKUP_DELAY)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_retries_failed_nodes(self) -> None:
        """Nodes that did not respond are retried, others are not; in the end there are no retries."""
        self.set_presence(BEA, CAL)
        self.responses = {"bea": None}
        self.assertIs(self.successResultOf(self.remote_delivery.notify_contracts_changed(BOB)), True)
        self.assertEqual(self.take_sent(), [("bea", BOB), ("cal", BOB)])
        self.clock.advance(MIN_RETRY_DELAY)
        self.assertEqual(self.take_sent(), [("bea", BOB)])
        self.responses = {}
        self.clock.pump([1.0] * 60)
        self.assertEqual(self.take_sent(), [("bea", BOB)])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_backoff(self) -> None:
        """Pauses double up to a limit."""
        self.set_presence(BEA)
        self.remote_delivery.set_live_nodes([])
        self.responses = {"bea": None}
        self.remote_delivery.notify_contracts_changed(BOB)
        self.take_sent()
        at = []
        for second in range(1, 61):
            self.clock.advance(1)
            at += [second] * len(self.take_sent())
        self.assertEqual(at, [1, 2, 4, 8, 16, 31, 46])
        self.assertEqual(at[-1] - at[-2], MAX_RETRY_DELAY)

    def test_socket_gone(self) -> None:
        """A client that reconnects queries its contracts."""
        self.set_presence(BEA)
        self.responses = {"bea": None}
        self.remote_delivery.notify_contracts_changed(BOB)
        self.take_sent()
        self.set_presence()
        self.clock.pump([MIN_RETRY_DELAY, LOOKUP_DELAY, LOOKUP_DELAY])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_store_outage(self) -> None:
        """The lookup is retried."""
        self.presence = None
        self.remote_delivery.notify_contracts_changed(BOB)
        self.lookups.pop().errback(StoreUnavailable())
        self.set_presence(BEA)
        self.clock.advance(MIN_RETRY_DELAY)
        self.assertEqual(self.take_sent(), [("bea", BOB)])
        self.clock.advance(60)
        self.assertEqual(self.take_sent(), [])

    def test_next_change(self) -> None:
        """A node with the first change gets the second; one without both gets one notification."""
        self.set_presence(BEA, CAL)
        self.responses = {"bea": None}
        self.remote_delivery.notify_contracts_changed(BOB)
        self.responses = {"bea": None, "cal": None}
        self.remote_delivery.notify_contracts_changed(BOB)
        self.take_sent()
        self.responses = {}
        self.clock.pump([LOOKUP_DELAY, MIN_RETRY_DELAY, LOOKUP_DELAY, LOOKUP_DELAY])
        self.assertEqual(self.take_sent(), [("bea", BOB), ("cal", BOB)])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_messages_are_not_retried(self) -> None:
        """Messages are not retried."""
        self.set_presence(BEA)
        self.responses = {"bea": None}
        self.assertIs(self.successResultOf(self.send()), False)
        self.assertEqual(self.clock.getDelayedCalls(), [])
