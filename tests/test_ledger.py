"""The store's own books, as the daemon tells of them."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.config import Config
from mediatord.errors import StoreUnavailable
from mediatord.interfaces import Removed, StoredMessage
from mediatord.wiring.base import _store_name
from mediatord.wiring.ledger import FirstAndLast
from tests.house import NOW, Guest, House, sealed_forward

DID = "did:example:bob"


class FirstAndLastTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.house = House(self)
        self.service = FirstAndLast(self.house.base)

    def told(self) -> list[tuple[str, int]]:
        """Half and messages accepted of all lines so far."""
        return [(line["proto"], line["all_accepted"]) for line in self.house.events("ledger")]

    def test_when(self) -> None:
        """Once the store is open, however often that is said, and when nothing is done with it any more."""
        self.service.startService()
        self.assertEqual(self.told(), [])
        self.service.store_opened()
        self.service.store_opened()
        self.assertEqual(self.told(), [("didcomm", 0), ("decentrl", 0)])
        bob = Guest(self.house).enrol()
        self.house.receive(sealed_forward(self.house, bob.did, bob.letter()))
        self.successResultOf(self.service.stopService())
        self.assertEqual(self.told()[2:], [("didcomm", 1), ("decentrl", 0)])

    def test_a_store_that_fails(self) -> None:
        """Does not keep the daemon from stopping, and is news only if it is a fault."""
        for error, logged in ((StoreUnavailable(), 0), (RuntimeError("boom"), 1)):
            with self.house.failing("ledger", error):
                self.successResultOf(self.service.stopService())
            self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), logged)
        self.assertEqual(self.told(), [])

    def test_a_store_that_hangs(self) -> None:
        """Is waited for a moment only."""
        self.patch(self.house.store, "ledger", Deferred)
        stopped = self.service.stopService()
        self.house.clock.advance(1)
        self.assertNoResult(stopped)
        self.house.clock.advance(1)
        self.successResultOf(stopped)
        self.assertEqual(self.told(), [])


class OwnTests(SynchronousTestCase):
    """Messages of the daemon to itself are in the books and have no lines: how many is told with the books."""

    def setUp(self) -> None:
        self.house = House(self)
        self.own = self.house.base.own.kin.identity("m1").did

    def messages(self, did: str) -> None:
        """One of each fate; two that are accepted."""
        journal = self.house.base.journal
        for id_ in ("1", "2"):
            message = StoredMessage(id_, did, did, b"{}", "json", NOW, NOW + 30)
            journal.accepted("r", message, None, "queue", "didcomm")
        removed: Any = Removed("1", did, did, 2, NOW, 0)
        journal.acknowledged(removed, "live", "didcomm")
        journal.expired(removed)
        journal.evicted(removed)

    def ledger(self) -> dict[str, Any]:
        """What is told of DIDComm now."""
        self.house.clock.advance(60)
        line = self.house.events("ledger")[-2]
        return {name: number for name, number in line.items() if name.startswith("own_")}

    def test_since_the_line_before(self) -> None:
        self.messages(self.own)
        ones = dict.fromkeys(("own_acknowledged", "own_expired", "own_evicted"), 1)
        self.assertEqual(self.ledger(), {"own_accepted": 2, **ones})
        self.assertEqual(self.ledger(), {})
        self.assertEqual(self.house.events("msg.accept") + self.house.events("msg.ack"), [])

    def test_those_of_others(self) -> None:
        """Have lines, and are not counted here."""
        self.messages(DID)
        self.assertEqual(self.ledger(), {})
        self.assertEqual(len(self.house.events("msg.accept")), 2)


class StoreNameTests(SynchronousTestCase):
    def name(self, house: House, backend: str, boot: str = "b") -> str:
        """Of a store of this mediator."""
        config = Config.model_validate({"storage": {"backend": backend}})
        return _store_name(config, house.base.identity.now, boot)

    def test_who_shares_a_store(self) -> None:
        """All processes of a mediator, after a restart as well; but what is in memory is of one process."""
        one, other = House(self), House(self)
        self.assertEqual(self.name(one, "mongodb", "1"), self.name(one, "mongodb", "2"))
        names = [self.name(one, "sqlite"), self.name(one, "mongodb"), self.name(other, "sqlite")]
        names += [self.name(one, "memory", "1"), self.name(one, "memory", "2")]
        self.assertEqual(len(set(names)), len(names))
