"""The store's ledger in the event log."""

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

    def ledger_events(self) -> list[tuple[str, int]]:
        """Protocol and accepted messages of all ledger lines so far."""
        return [(line["proto"], line["all_accepted"]) for line in self.in_memory.events("ledger")]

    def test_start_and_stop_records(self) -> None:
        """Once the store is open, and when nothing uses it any more."""
        self.service.startService()
        self.assertEqual(self.ledger_events(), [])
        self.service.store_opened()
        self.service.store_opened()
        self.assertEqual(self.ledger_events(), [("didcomm", 0), ("decentrl", 0)])
        bob = InMemoryWallet(self.in_memory).enrol()
        self.in_memory.receive(pack_forward(self.in_memory, bob.did, bob.make_payload()))
        self.successResultOf(self.service.stopService())
        self.assertEqual(self.ledger_events()[2:], [("didcomm", 1), ("decentrl", 0)])

    def test_store_failure(self) -> None:
        """It does not keep the daemon from stopping, and is logged only if it is an internal error."""
        for error, logged in ((StoreUnavailable(), 0), (RuntimeError("boom"), 1)):
            with self.in_memory.failing("read_ledger", error):
                self.successResultOf(self.service.stopService())
            self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), logged)
        self.assertEqual(self.ledger_events(), [])

    def test_hanging_store(self) -> None:
        """It delays the stop only briefly."""
        self.patch(self.in_memory.store, "read_ledger", Deferred)
        stopped = self.service.stopService()
        self.in_memory.clock.advance(1)
        self.assertNoResult(stopped)
        self.in_memory.clock.advance(1)
        self.successResultOf(stopped)
        self.assertEqual(self.ledger_events(), [])


class ProbeMessageTests(SynchronousTestCase):
    """Probe messages are in the ledger and have no lines: ledger events have their number."""

    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self)
        self.own = self.in_memory.base.probe_credentials.identities.identity("m1").did

    def add_messages(self, did: str) -> None:
        """One of each fate; two are accepted."""
        recorder = self.in_memory.base.recorder
        for id_ in ("1", "2"):
            message = StoredMessage(id_, did, did, b"{}", "json", NOW, NOW + 30)
            recorder.record_accept("r", message, None, "didcomm", False)
        removed: Any = RemovedMessage("1", did, did, 2, NOW, 0)
        recorder.record_acknowledgement(removed, "live", "didcomm")
        recorder.record_expiry(removed)
        recorder.record_eviction(removed)

    def last_ledger_event(self) -> dict[str, Any]:
        """The last ledger event of DIDComm."""
        self.in_memory.clock.advance(60)
        line = self.in_memory.events("ledger")[-2]
        return {name: number for name, number in line.items() if name.startswith("own_")}

    def test_counts_since_last_event(self) -> None:
        self.add_messages(self.own)
        ones = dict.fromkeys(("own_acknowledged", "own_expired", "own_evicted"), 1)
        self.assertEqual(self.last_ledger_event(), {"own_accepted": 2, **ones})
        self.assertEqual(self.last_ledger_event(), {})
        self.assertEqual(self.in_memory.events("msg.accept") + self.in_memory.events("msg.ack"), [])

    def test_messages_of_others(self) -> None:
        """They have lines, and are not counted here."""
        self.add_messages(DID)
        self.assertEqual(self.last_ledger_event(), {})
        self.assertEqual(len(self.in_memory.events("msg.accept")), 2)


class StoreNameTests(SynchronousTestCase):
    def name(self, in_memory: InMemoryMediator, backend: str, boot: str = "b") -> str:
        """Name of a store of this mediator."""
        config = Config.model_validate({"storage": {"backend": backend}})
        return derive_store_name(config, in_memory.base.identity.now, boot)

    def test_processes_share_store_name(self) -> None:
        """All processes of a mediator have the same name, after a restart too; a memory store is per process."""
        one, other = InMemoryMediator(self), InMemoryMediator(self)
        self.assertEqual(self.name(one, "mongodb", "1"), self.name(one, "mongodb", "2"))
        names = [self.name(one, "sqlite"), self.name(one, "mongodb"), self.name(other, "sqlite")]
        names += [self.name(one, "memory", "1"), self.name(one, "memory", "2")]
        self.assertEqual(len(set(names)), len(names))
