"""The store's own books, as the daemon tells of them."""

from __future__ import annotations

from typing import Any

from twisted.internet.defer import Deferred
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.core_services import derive_store_name
from mediatord.app.metrics_collection import StartStopLedgerRecorder
from mediatord.config.settings import Config
from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.messages import RemovedMessage, StoredMessage
from tests.in_memory_mediator import NOW, InMemoryMediator, InMemoryWallet, pack_forward

DID = "did:example:bob"


class StartStopRecordTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.service = StartStopLedgerRecorder(self.in_memory.base)

    def told(self) -> list[tuple[str, int]]:
        """Half and messages accepted of all lines so far."""
        return [(line["proto"], line["all_accepted"]) for line in self.in_memory.events("ledger")]

    def test_when(self) -> None:
        """Once the store is open, however often that is said, and when nothing is done with it any more."""
        self.service.startService()
        self.assertEqual(self.told(), [])
        self.service.store_opened()
        self.service.store_opened()
        self.assertEqual(self.told(), [("didcomm", 0), ("decentrl", 0)])
        bob = InMemoryWallet(self.in_memory).enrol()
        self.in_memory.receive(pack_forward(self.in_memory, bob.did, bob.letter()))
        self.successResultOf(self.service.stopService())
        self.assertEqual(self.told()[2:], [("didcomm", 1), ("decentrl", 0)])

    def test_a_store_that_fails(self) -> None:
        """Does not keep the daemon from stopping, and is news only if it is a fault."""
        for error, logged in ((StoreUnavailable(), 0), (RuntimeError("boom"), 1)):
            with self.in_memory.failing("read_ledger", error):
                self.successResultOf(self.service.stopService())
            self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), logged)
        self.assertEqual(self.told(), [])

    def test_a_store_that_hangs(self) -> None:
        """Is waited for a moment only."""
        self.patch(self.in_memory.store, "read_ledger", Deferred)
        stopped = self.service.stopService()
        self.in_memory.clock.advance(1)
        self.assertNoResult(stopped)
        self.in_memory.clock.advance(1)
        self.successResultOf(stopped)
        self.assertEqual(self.told(), [])


class ProbeMessageTests(SynchronousTestCase):
    """Messages of the daemon to itself are in the books and have no lines: how many is told with the books."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.own = self.in_memory.base.probe_credentials.identities.identity("m1").did

    def messages(self, did: str) -> None:
        """One of each fate; two that are accepted."""
        recorder = self.in_memory.base.recorder
        for id_ in ("1", "2"):
            message = StoredMessage(id_, did, did, b"{}", "json", NOW, NOW + 30)
            recorder.record_accept("r", message, None, "didcomm", False)
        removed: Any = RemovedMessage("1", did, did, 2, NOW, 0)
        recorder.record_acknowledgement(removed, "live", "didcomm")
        recorder.record_expiry(removed)
        recorder.record_eviction(removed)

    def ledger(self) -> dict[str, Any]:
        """What is told of DIDComm now."""
        self.in_memory.clock.advance(60)
        line = self.in_memory.events("ledger")[-2]
        return {name: number for name, number in line.items() if name.startswith("own_")}

    def test_since_the_line_before(self) -> None:
        self.messages(self.own)
        ones = dict.fromkeys(("own_acknowledged", "own_expired", "own_evicted"), 1)
        self.assertEqual(self.ledger(), {"own_accepted": 2, **ones})
        self.assertEqual(self.ledger(), {})
        self.assertEqual(self.in_memory.events("msg.accept") + self.in_memory.events("msg.ack"), [])

    def test_those_of_others(self) -> None:
        """Have lines, and are not counted here."""
        self.messages(DID)
        self.assertEqual(self.ledger(), {})
        self.assertEqual(len(self.in_memory.events("msg.accept")), 2)


class StoreNameTests(SynchronousTestCase):
    def name(self, in_memory: InMemoryMediator, backend: str, boot: str = "b") -> str:
        """Of a store of this mediator."""
        config = Config.model_validate({"storage": {"backend": backend}})
        return derive_store_name(config, in_memory.base.identity.now, boot)

    def test_who_shares_a_store(self) -> None:
        """All processes of a mediator, after a restart as well; but what is in memory is of one process."""
        one, other = InMemoryMediator(self), InMemoryMediator(self)
        self.assertEqual(self.name(one, "mongodb", "1"), self.name(one, "mongodb", "2"))
        names = [self.name(one, "sqlite"), self.name(one, "mongodb"), self.name(other, "sqlite")]
        names += [self.name(one, "memory", "1"), self.name(one, "memory", "2")]
        self.assertEqual(len(set(names)), len(names))
