"""Finding the nodes that hold sockets of a DID, and hinting to them: at once where that is known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
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
    MAX_SENT_PAYLOAD_BYTES,
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


def message(id_: str, account: str = BOB) -> StoredMessage:
    """One that waits."""
    return StoredMessage(id_, account, account, b"{}", "json", NOW, NOW + 1000)


class Store:
    """What is asked of a store for sockets, answered by the test."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[str], Deferred[list[PresenceRecord]]]] = []

    def find_presence(self, dids: Sequence[str]) -> Deferred[list[PresenceRecord]]:
        """Noted."""
        self.asked.append((list(dids), Deferred()))
        return self.asked[-1][1]


class PresenceLookupTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.clock = Clock()
        self.store = Store()
        self.finder = PresenceLookup(self.clock, cast(Any, self.store))

    def test_one_turn_one_question(self) -> None:
        """And each is told of its own."""
        found = {did: self.finder.find(did) for did in ("did:x:a", "did:x:b")}
        again = self.finder.find("did:x:a")
        self.clock.advance(0)
        ((dids, answer),) = self.store.asked
        self.assertEqual(dids, ["did:x:a", "did:x:b"])
        here = PresenceRecord("did:x:a", ANN.boot, ANN)
        answer.callback([here])
        self.assertEqual(self.successResultOf(found["did:x:a"]), [here])
        self.assertEqual(self.successResultOf(again), [here])
        self.assertEqual(self.successResultOf(found["did:x:b"]), [])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_no_more_than_some_at_once(self) -> None:
        """Questions are short and few; what comes meanwhile is asked together as soon as one is answered."""
        found = [self.finder.find(f"did:x:{number}") for number in range(MAX_CONCURRENT_LOOKUPS * LOOKUP_BATCH + 3)]
        self.clock.advance(0)
        self.assertEqual([len(dids) for dids, _ in self.store.asked], [LOOKUP_BATCH] * MAX_CONCURRENT_LOOKUPS)
        self.store.asked[0][1].callback([])
        self.clock.advance(0)
        self.assertEqual([len(dids) for dids, _ in self.store.asked], [LOOKUP_BATCH] * MAX_CONCURRENT_LOOKUPS + [3])
        for _, answer in self.store.asked[1:]:
            answer.callback([])
        for one in found:
            self.assertEqual(self.successResultOf(one), [])

    def test_in_order(self) -> None:
        """The next question about a DID waits for the answer to the one before; those about others do not."""
        first = self.finder.find("did:x:a")
        self.clock.advance(0)
        second, other = self.finder.find("did:x:a"), self.finder.find("did:x:b")
        self.clock.advance(0)
        self.assertEqual([dids for dids, _ in self.store.asked], [["did:x:a"], ["did:x:b"]])
        self.store.asked[1][1].callback([])
        self.assertEqual(self.successResultOf(other), [])
        self.store.asked[0][1].callback([])
        self.assertEqual(self.successResultOf(first), [])
        self.assertNoResult(second)
        self.clock.advance(0)
        self.store.asked[2][1].callback([])
        self.assertEqual(self.successResultOf(second), [])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_store_away(self) -> None:
        """Whoever asked is told; the next question is asked all the same."""
        found = [self.finder.find("did:x:a"), self.finder.find("did:x:b")]
        self.clock.advance(0)
        self.store.asked.pop()[1].errback(StoreUnavailable())
        for one in found:
            self.failureResultOf(one, StoreUnavailable)
        again = self.finder.find("did:x:a")
        self.clock.advance(0)
        self.store.asked.pop()[1].callback([])
        self.assertEqual(self.successResultOf(again), [])


class RemoteDeliveryTestCase(SynchronousTestCase):
    """
    Takes the place of store and peers.

    :ivar places: where there are sockets of anybody, as the store says; None while it does not answer.
    :ivar hints: what was sent: name of the node, name of the hint.
    :ivar took: what nodes answer, by name; nothing while there is a Deferred.
    """

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.places: list[PresenceRecord] | None = []
        self.asked: list[Deferred[list[PresenceRecord]]] = []
        self.notifications: list[tuple[str, str]] = []
        self.weights: list[int] = []
        self.messages: list[StoredMessage | None] = []
        self.took: dict[str, bool | Deferred[bool | None] | None] = {}
        self.stale = 0
        self.outcomes: list[str] = []
        self.remote_delivery = RemoteDelivery(self.clock, ANN.boot, cast(Any, self), cast(Any, self), cast(Any, self))
        self.remote_delivery.set_live_nodes([ANN.boot, BEA.boot, CAL.boot])

    def find(self, did: str) -> Deferred[list[PresenceRecord]]:
        """What the store says."""
        found: Deferred[list[PresenceRecord]] = Deferred()
        if self.places is None:
            self.asked.append(found)
        else:
            found.callback(self.places)
        return found

    def enqueue(
        self, node: ClusterNode, notification: PeerNotification, message: StoredMessage | None
    ) -> Deferred[bool | None]:
        """Noted."""
        self.messages.append(message)
        self.notifications.append((node.name, notification.name))
        self.weights.append(notification.payload_bytes)
        took = self.took.get(node.name, True)
        return took if isinstance(took, Deferred) else succeed(took)

    @property
    def stale_presence(self) -> Any:
        """Counted."""
        return SimpleNamespace(inc=partial(setattr, self, "stale", self.stale + 1))

    @property
    def cluster_pushes(self) -> Any:
        """Noted."""
        return SimpleNamespace(inc=self.outcomes.append)

    def at(self, *nodes: ClusterNode) -> None:
        """There are sockets at these."""
        self.places = [PresenceRecord(BOB, node.boot, node) for node in nodes]

    def answer(self, *nodes: ClusterNode) -> None:
        """The store answers the oldest question."""
        self.asked.pop(0).callback([PresenceRecord(BOB, node.boot, node) for node in nodes])

    def send(self, name: str = "m") -> Deferred[bool]:
        """A message for Bob."""
        return self.remote_delivery.deliver_message(message(name))

    def sent(self) -> list[tuple[str, str]]:
        """Since this was asked last."""
        notifications, self.notifications = self.notifications, []
        return notifications

    def seen_at(self, *nodes: ClusterNode) -> None:
        """The store has just said that Bob is there, and is silent from now on."""
        self.at(*nodes)
        self.send("before")
        self.clock.advance(LOOKUP_DELAY)
        self.sent()
        self.places = None


class RemoteDeliveryTests(RemoteDeliveryTestCase):
    """When nothing is remembered."""

    def test_every_other_node(self) -> None:
        """Not this one; taken when one of them took it."""
        self.at(ANN, BEA, CAL)
        self.took = {"bea": False}
        self.assertIs(self.successResultOf(self.send()), True)
        self.assertEqual((self.sent(), self.weights), ([("bea", "m"), ("cal", "m")], [2, 2]))

    def test_kinds(self) -> None:
        """A message, an event and a change of contracts."""
        self.at(BEA)
        self.remote_delivery.deliver_event(PendingEvent("e", BOB, "did:x:ann", "sealed", NOW))
        self.remote_delivery.notify_contracts_changed(BOB)
        self.assertEqual(self.sent(), [("bea", "e"), ("bea", BOB)])

    def test_nowhere(self) -> None:
        """Nobody is told."""
        self.assertIs(self.successResultOf(self.send()), False)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_nobody_took_it(self) -> None:
        """Which is known when all have answered."""
        self.at(BEA, CAL)
        slow: Deferred[bool | None] = Deferred()
        self.took = {"bea": False, "cal": slow}
        taken = self.send()
        self.assertNoResult(taken)
        slow.callback(None)
        self.assertIs(self.successResultOf(taken), False)

    def test_stale(self) -> None:
        """A node whose lease is over is counted, and not asked."""
        self.places = [PresenceRecord(BOB, BEA.boot, None)]
        self.assertIs(self.successResultOf(self.send()), False)
        self.assertEqual((self.stale, self.sent()), (1, []))

    def test_store_away(self) -> None:
        """The message just waits; nothing is logged but what the store says itself."""
        self.places = None
        taken = self.send()
        self.asked.pop().errback(StoreUnavailable())
        self.assertIs(self.successResultOf(taken), False)

    def test_fault(self) -> None:
        """A mistake of ours is logged."""
        self.places = None
        taken = self.send()
        self.asked.pop().errback(RuntimeError("boom"))
        self.assertIs(self.successResultOf(taken), False)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)


class SentMessageTests(RemoteDeliveryTestCase):
    """Messages that are sent with their notifications."""

    def setUp(self) -> None:
        super().setUp()
        epochs = count()
        counters: Any = SimpleNamespace(epoch=lambda did: (next(epochs),))
        self.remote_delivery = RemoteDelivery(
            self.clock, ANN.boot, cast(Any, self), cast(Any, self), cast(Any, self), counters
        )
        self.remote_delivery.set_live_nodes([ANN.boot, BEA.boot, CAL.boot])

    def test_nodes_in_the_cache(self) -> None:
        """They get the message; those that are found later read it, so that it is not kept for them."""
        self.seen_at(BEA)
        self.messages.clear()
        self.send()
        self.clock.advance(LOOKUP_DELAY)
        self.answer(BEA, CAL)
        self.assertEqual(self.sent(), [("bea", "m"), ("cal", "m")])
        self.assertEqual(self.messages, [message("m"), None])

    def test_large(self) -> None:
        """A large one is read."""
        self.seen_at(BEA)
        self.messages.clear()
        for size in (MAX_SENT_PAYLOAD_BYTES, MAX_SENT_PAYLOAD_BYTES + 1):
            self.remote_delivery.deliver_message(replace(message("m"), payload=bytes(size)))
        self.assertEqual([one is None for one in self.messages], [False, True])


class PendingLookupBytesTests(RemoteDeliveryTestCase):
    """What is held in memory until it is known who has sockets."""

    def big(self, name: str, size: int = 1 << 20) -> Deferred[bool]:
        """A message for somebody else each time."""
        return self.remote_delivery.deliver_message(replace(message(name, f"did:x:{name}"), payload=bytes(size)))

    def test_bytes(self) -> None:
        """Beyond the bound nothing is asked, and nobody waits; there is room again once something is known."""
        self.places = None
        size = MAX_PENDING_BYTES // 4
        waiting = [self.big(str(number), size) for number in range(4)]
        self.assertEqual(self.remote_delivery.pending, (4, MAX_PENDING_BYTES))
        self.assertIs(self.successResultOf(self.big("more", 1)), False)
        event = PendingEvent("e", BOB, "did:x:ann", "sealed", NOW)
        self.assertIs(self.successResultOf(self.remote_delivery.deliver_event(event)), False)
        self.assertEqual((len(self.asked), self.outcomes), (4, ["dropped"] * 2))
        self.answer()
        self.assertIs(self.successResultOf(waiting[0]), False)
        self.assertEqual(self.remote_delivery.pending, (3, 3 * size))
        self.assertNoResult(self.big("again", size))
        self.assertEqual(len(self.asked), 4)

    def test_one_may_always_wait(self) -> None:
        """However large."""
        self.places = None
        self.assertNoResult(self.big("large", MAX_PENDING_BYTES + 1))

    def test_entries(self) -> None:
        """A change of contracts that there is no room for is told later, and takes none when it is not known yet."""
        self.places = None
        for number in range(MAX_PENDING):
            self.big(str(number), 0)
        self.assertIs(self.successResultOf(self.remote_delivery.notify_contracts_changed(BOB)), False)
        self.assertIs(self.successResultOf(self.big("more", 0)), False)
        self.clock.advance(MIN_RETRY_DELAY)
        self.assertEqual(self.remote_delivery.pending, (MAX_PENDING, 0))
        while self.asked:
            self.answer()
        self.assertEqual(self.remote_delivery.pending, (0, 0))
        self.at(BEA)
        self.clock.pump([MAX_RETRY_DELAY] * 2)
        self.assertEqual(self.sent(), [("bea", BOB)])

    def test_until_other_nodes_have_answered(self) -> None:
        """Since what no socket takes is handed to somebody else, who needs the payload."""
        self.at(BEA)
        slow: Deferred[bool | None] = Deferred()
        self.took = {"bea": slow}
        self.big("m", 10)
        self.assertEqual(self.remote_delivery.pending, (1, 10))
        slow.callback(False)
        self.assertEqual(self.remote_delivery.pending, (0, 0))

    def test_end(self) -> None:
        """Nothing is held any more by those that were ahead of the store."""
        self.seen_at(BEA)
        slow: Deferred[bool | None] = Deferred()
        self.took = {"bea": slow}
        self.send()
        self.remote_delivery.end()
        slow.callback(None)
        self.assertEqual(self.remote_delivery.pending, (0, 0))


class RememberedTests(RemoteDeliveryTestCase):
    """When the store was asked about a DID a moment ago."""

    def test_at_once(self) -> None:
        """The hint does not wait for the store, which is asked once for many."""
        self.seen_at(BEA)
        self.assertIs(self.successResultOf(self.send("1")), True)
        self.assertIs(self.successResultOf(self.send("2")), True)
        self.assertEqual((self.sent(), self.asked), ([("bea", "1"), ("bea", "2")], []))
        self.assertEqual(self.messages, [None] * 3)  # nobody but workers of one daemon is sent them
        self.clock.advance(LOOKUP_DELAY)
        self.answer(BEA)
        self.answer(BEA)
        self.assertEqual((self.sent(), self.stale), ([], 0))
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_come_elsewhere(self) -> None:
        """A socket that has come at another node is found by asking, after the message was stored."""
        self.seen_at(BEA)
        self.send()
        self.sent()
        self.clock.advance(LOOKUP_DELAY)
        self.answer(BEA, CAL)
        self.assertEqual(self.sent(), [("cal", "m")])
        self.send("next")
        self.assertEqual(self.sent(), [("bea", "next"), ("cal", "next")])

    def test_gone_elsewhere(self) -> None:
        """A hint to where there is no socket any more is counted; the one to where there is one decides."""
        self.seen_at(BEA)
        self.took = {"bea": False}
        taken = self.send()
        self.assertNoResult(taken)
        self.clock.advance(LOOKUP_DELAY)
        self.answer(CAL)
        self.assertIs(self.successResultOf(taken), True)
        self.assertEqual((self.sent(), self.stale), ([("bea", "m"), ("cal", "m")], 1))
        self.send("next")
        self.assertEqual(self.sent(), [("cal", "next")])

    def test_gone(self) -> None:
        """Nobody waits for the answer of a node that holds no sockets; and it gets no more hints."""
        self.seen_at(BEA)
        self.took = {"bea": Deferred()}
        taken = self.send()
        self.clock.advance(LOOKUP_DELAY)
        self.answer()
        self.assertIs(self.successResultOf(taken), False)
        self.assertEqual((len(self.sent()), self.stale), (1, 1))
        self.send("next")
        self.assertEqual((self.sent(), len(self.asked)), ([], 1))

    def test_late_answer(self) -> None:
        """Of a node that nobody waits for any more."""
        self.seen_at(BEA)
        late: Deferred[bool | None] = Deferred()
        self.took = {"bea": late}
        taken = self.send()
        self.clock.advance(LOOKUP_DELAY)
        self.answer()
        late.callback(True)
        self.assertIs(self.successResultOf(taken), False)

    def test_order_at_a_node_that_comes(self) -> None:
        """What went ahead reaches it in order, whichever question is answered first to tell of it."""
        self.seen_at(BEA)
        self.send("1")
        self.send("2")
        self.clock.advance(LOOKUP_DELAY)
        self.sent()
        self.answer(BEA, CAL)
        self.send("3")
        self.answer(BEA, CAL)
        self.assertEqual([name for node, name in self.sent() if node == "cal"], ["1", "2", "3"])

    def test_order_when_it_was_forgotten(self) -> None:
        """What has to wait for the store is not overtaken by what comes when it has answered."""
        self.seen_at(BEA)
        self.clock.advance(RECENT_NODE_TTL)
        self.send("1")
        self.send("2")
        self.assertEqual(self.sent(), [])
        self.answer(BEA)
        self.assertEqual(self.sent(), [("bea", "1"), ("bea", "2")])
        self.send("3")
        self.assertEqual(self.sent(), [("bea", "3")])

    def test_order_when_it_comes_back(self) -> None:
        """Nor where a node is gone and there again."""
        self.seen_at(BEA)
        for name in "12":
            self.send(name)
        self.clock.advance(LOOKUP_DELAY)
        self.answer(CAL)
        self.send("3")
        self.sent()
        self.answer(BEA, CAL)
        self.send("4")
        self.assertEqual(self.sent(), [("bea", "3"), ("bea", "4"), ("cal", "4")])

    def test_store_away(self) -> None:
        """What went ahead may have arrived all the same."""
        self.seen_at(BEA)
        slow: Deferred[bool | None] = Deferred()
        self.took = {"bea": slow}
        taken = self.send()
        self.clock.advance(LOOKUP_DELAY)
        self.asked.pop().errback(StoreUnavailable())
        self.assertNoResult(taken)
        slow.callback(True)
        self.assertIs(self.successResultOf(taken), True)

    def test_not_live(self) -> None:
        """Of a node that is not one of the live ones nothing is recalled: it would not answer."""
        self.seen_at(BEA)
        self.remote_delivery.set_live_nodes([ANN.boot, CAL.boot])
        self.send()
        self.assertEqual((self.sent(), len(self.asked)), ([], 1))

    def test_many_in_one_turn(self) -> None:
        """All of thousands go once, in order."""
        self.places = None
        names = [str(number) for number in range(3000)]
        for name in names:
            self.send(name)
        for _ in names:
            self.answer(BEA)
        self.assertEqual(self.sent(), [("bea", name) for name in names])

    def test_end(self) -> None:
        """Nothing is begun any more, and no timer is left."""
        self.seen_at(BEA)
        self.took = {"bea": None}
        taken = self.send()
        self.remote_delivery.end()
        self.assertIs(self.successResultOf(taken), False)
        self.send("late")
        self.assertEqual(self.sent(), [("bea", "m")])
        self.remote_delivery.notify_contracts_changed(BOB)
        for one in self.asked:
            one.errback(StoreUnavailable())
        self.assertEqual(self.clock.getDelayedCalls(), [])


class ContractTests(RemoteDeliveryTestCase):
    """That contracts have changed is nowhere to be found later: it is said until it was heard."""

    def test_heard(self) -> None:
        """By all, also where no socket took it: nothing more to be said."""
        self.at(BEA, CAL)
        self.took = {"cal": False}
        self.remote_delivery.notify_contracts_changed(BOB)
        self.clock.advance(LOOKUP_DELAY)
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_not_heard(self) -> None:
        """Those who did not answer are told again, the others are not; and in the end there is silence."""
        self.at(BEA, CAL)
        self.took = {"bea": None}
        self.assertIs(self.successResultOf(self.remote_delivery.notify_contracts_changed(BOB)), True)
        self.assertEqual(self.sent(), [("bea", BOB), ("cal", BOB)])
        self.clock.advance(MIN_RETRY_DELAY)
        self.assertEqual(self.sent(), [("bea", BOB)])
        self.took = {}
        self.clock.pump([1.0] * 60)
        self.assertEqual(self.sent(), [("bea", BOB)])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_ever_more_seldom(self) -> None:
        """The pauses double up to a limit."""
        self.at(BEA)
        self.remote_delivery.set_live_nodes([])
        self.took = {"bea": None}
        self.remote_delivery.notify_contracts_changed(BOB)
        self.sent()
        at = []
        for second in range(1, 61):
            self.clock.advance(1)
            at += [second] * len(self.sent())
        self.assertEqual(at, [1, 2, 4, 8, 16, 31, 46])
        self.assertEqual(at[-1] - at[-2], MAX_RETRY_DELAY)

    def test_socket_gone(self) -> None:
        """Whoever comes again asks for the contracts."""
        self.at(BEA)
        self.took = {"bea": None}
        self.remote_delivery.notify_contracts_changed(BOB)
        self.sent()
        self.at()
        self.clock.pump([MIN_RETRY_DELAY, LOOKUP_DELAY, LOOKUP_DELAY])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_store_away(self) -> None:
        """Where the sockets are is asked again."""
        self.places = None
        self.remote_delivery.notify_contracts_changed(BOB)
        self.asked.pop().errback(StoreUnavailable())
        self.at(BEA)
        self.clock.advance(MIN_RETRY_DELAY)
        self.assertEqual(self.sent(), [("bea", BOB)])
        self.clock.advance(60)
        self.assertEqual(self.sent(), [])

    def test_changed_again(self) -> None:
        """Who has heard of the first change is told of the second; who has of neither, once of both."""
        self.at(BEA, CAL)
        self.took = {"bea": None}
        self.remote_delivery.notify_contracts_changed(BOB)
        self.took = {"bea": None, "cal": None}
        self.remote_delivery.notify_contracts_changed(BOB)
        self.sent()
        self.took = {}
        self.clock.pump([LOOKUP_DELAY, MIN_RETRY_DELAY, LOOKUP_DELAY, LOOKUP_DELAY])
        self.assertEqual(self.sent(), [("bea", BOB), ("cal", BOB)])
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def test_messages(self) -> None:
        """Of those nobody is reminded."""
        self.at(BEA)
        self.took = {"bea": None}
        self.assertIs(self.successResultOf(self.send()), False)
        self.assertEqual(self.clock.getDelayedCalls(), [])
