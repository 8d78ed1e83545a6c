"""What is remembered of DIDs without sockets elsewhere, and what that saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any, cast

from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.cluster import presence
from mediatord.cluster.peer_protocol import PeerNotification
from mediatord.cluster.presence import AbsenceCache, NullPresenceEpochs, PresencePublisher
from mediatord.cluster.remote_delivery import LOOKUP_DELAY, RemoteDelivery
from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.cluster import ClusterNode, PresenceRecord
from mediatord.store.interfaces.decentrl import PendingEvent
from mediatord.store.interfaces.messages import StoredMessage
from tests.cluster.test_presence_publisher import Ledger
from tests.in_memory_mediator import NOW

BOB, EVE = "did:x:bob", "did:x:eve"
ANN, BEA = (ClusterNode(name, name * 2, "tcp:host=10.0.0.1:port=7070", b"seal") for name in ("ann", "bea"))


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


class AbsenceCacheTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.board = ArrivalCounters()
        self.quiet = AbsenceCache(self.board)

    def test_until_one_comes(self) -> None:
        """Of that DID, not of others."""
        self.assertFalse(self.quiet.is_absent(BOB))
        self.quiet.record(BOB, self.quiet.epoch(BOB))
        self.board.increment([EVE])
        self.assertTrue(self.quiet.is_absent(BOB))
        self.board.increment([BOB])
        self.assertFalse(self.quiet.is_absent(BOB))
        self.assertEqual(len(self.quiet), 0)

    def test_came_while_asking(self) -> None:
        """An answer from before is no use."""
        epoch = self.quiet.epoch(BOB)
        self.board.increment([BOB])
        self.quiet.record(BOB, epoch)
        self.assertFalse(self.quiet.is_absent(BOB))

    def test_no_signs(self) -> None:
        """Where nothing is shared, nothing is remembered."""
        alone = AbsenceCache(NullPresenceEpochs())
        alone.record(BOB, alone.epoch(BOB))
        self.assertFalse(alone.is_absent(BOB))
        self.assertEqual(len(alone), 0)

    def test_limit(self) -> None:
        """The one that was asked for least lately is forgotten."""
        self.patch(presence, "MAX_ABSENT_DIDS", 2)
        for did in (BOB, EVE, BOB, "did:x:sue"):
            self.quiet.record(did, self.quiet.epoch(did))
        self.assertEqual([self.quiet.is_absent(did) for did in (BOB, EVE, "did:x:sue")], [True, False, True])


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
        self.notifications: list[str] = []
        self.remote_delivery = RemoteDelivery(
            self.clock, ANN.boot, cast(Any, self), self, cast(Any, self), self.board
        )
        self.remote_delivery.set_live_nodes([ANN.boot, BEA.boot])

    def of(self, did: str) -> Deferred[list[PresenceRecord]]:
        """What the store says."""
        self.questions += 1
        return succeed(self.places)

    def enqueue(self, node: ClusterNode, notification: PeerNotification) -> Deferred[bool | None]:
        """Noted."""
        self.notifications.append(notification.name)
        return succeed(True)

    def count_stale_presence(self) -> None:
        """A node whose lease is over."""

    def send(self, name: str = "m") -> bool:
        """A message for Bob; whether it was taken elsewhere."""
        message = StoredMessage(name, BOB, BOB, b"{}", "json", NOW, NOW + 1000)
        return self.successResultOf(self.remote_delivery.message(message))

    def test_one_question_for_all(self) -> None:
        """A thousand messages for somebody who is nowhere cost one question."""
        self.assertEqual([self.send() for _ in range(1000)], [False] * 1000)
        event = PendingEvent("e", BOB, EVE, "sealed", NOW)
        self.assertIs(self.successResultOf(self.remote_delivery.event(event)), False)
        self.assertEqual((self.questions, self.clock.getDelayedCalls()), (1, []))

    def test_asked_again(self) -> None:
        """Once a socket has come, and as long as it is there."""
        self.send()
        self.places = [PresenceRecord(BOB, BEA.boot, BEA)]
        self.board.increment([BOB])
        self.assertTrue(self.send("1"))
        self.assertTrue(self.send("2"))
        self.clock.advance(LOOKUP_DELAY)
        self.assertEqual((self.questions, self.notifications), (3, ["1", "2"]))

    def test_gone(self) -> None:
        """When it is gone, nobody is asked once the store has said so."""
        self.places = [PresenceRecord(BOB, BEA.boot, BEA)]
        self.send()
        self.places = []
        self.send()
        self.clock.advance(LOOKUP_DELAY)
        before = self.questions
        self.assertFalse(self.send())
        self.assertEqual(self.questions, before)

    def test_not_live(self) -> None:
        """A node that may come back is asked for each time."""
        self.places = [PresenceRecord(BOB, BEA.boot, None)]
        self.send()
        self.send()
        self.assertEqual(self.questions, 2)

    def test_contracts(self) -> None:
        """What is not to be found later is asked for each time."""
        self.remote_delivery.contracts(BOB)
        self.remote_delivery.contracts(BOB)
        self.assertEqual(self.questions, 2)


class PresencePublisherTests(SynchronousTestCase):
    """Who has come is shown after the store knows, and before the socket is told."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.ledger = Ledger()
        self.board = ArrivalCounters()
        self.announcer = PresencePublisher(self.clock, cast(Any, self.ledger), "aaaa", self.board)
        self.announcer.joined()

    def test_order(self) -> None:
        """Not earlier, or a question might still be answered as before; and not later."""
        self.ledger.late = True
        seen: list[int] = []
        self.announcer.here(BOB).addCallback(lambda _: seen.append(self.board.counts[BOB]))
        self.clock.advance(0)
        self.assertEqual((self.board.counts[BOB], seen), (0, []))
        self.ledger.open.pop().callback(None)
        self.assertEqual(seen, [1])

    def test_in_doubt(self) -> None:
        """A store that did not answer may know all the same."""
        self.ledger.away = True
        known = self.announcer.here(BOB)
        self.clock.advance(0)
        self.failureResultOf(known, StoreUnavailable)
        self.assertEqual(self.board.counts[BOB], 1)
