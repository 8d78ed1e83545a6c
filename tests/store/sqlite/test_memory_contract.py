"""Contract tests of the memory store."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime
from twisted.trial.unittest import SynchronousTestCase, TestCase

from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.decentrl import DecentrlQuotas
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import IStore
from mediatord.store.sqlite.memory_store import MemoryStore
from tests.store import contract
from tests.store.builders import ALICE, ImmediateClock


class MemoryBackend:
    """Other processes are daemons that share the store."""

    store: IStore

    def make_store(self, clock: IReactorTime, limits: QueueLimits, caps: DecentrlQuotas, max_nonces: int) -> IStore:
        return MemoryStore(clock, limits, caps=caps, max_nonces=max_nonces)

    def make_second_store(self) -> IStore:
        return self.store


class MemoryEnqueueTests(MemoryBackend, contract.EnqueueContract, TestCase): ...


class MemoryFairShareTests(MemoryBackend, contract.FairShareContract, TestCase): ...


class MemoryNoFairShareTests(MemoryBackend, contract.NoFairShareContract, TestCase): ...


class MemorySenderReserveTests(MemoryBackend, contract.SenderReserveContract, TestCase): ...


class MemorySenderReserveRefusalTests(MemoryBackend, contract.SenderReserveRefusalContract, TestCase): ...


class MemoryRefusalTests(MemoryBackend, contract.RefusalContract, TestCase): ...


class MemoryFairShareRefusalTests(MemoryBackend, contract.FairShareRefusalContract, TestCase): ...


class MemoryLedgerTests(MemoryBackend, contract.LedgerContract, TestCase): ...


class MemoryDecentrlLedgerTests(MemoryBackend, contract.DecentrlLedgerContract, TestCase): ...


class MemoryPickupTests(MemoryBackend, contract.PickupContract, TestCase): ...


class MemoryTimingTests(MemoryBackend, contract.TimingContract, TestCase): ...


class MemoryAccountTests(MemoryBackend, contract.AccountContract, TestCase): ...


class MemoryAccountExpiryTests(MemoryBackend, contract.AccountExpiryContract, TestCase): ...


class MemoryNonceTests(MemoryBackend, contract.NonceContract, TestCase): ...


class MemoryLifecycleTests(MemoryBackend, contract.LifecycleContract, TestCase): ...


class MemoryDecentrlGuardTests(MemoryBackend, contract.DecentrlGuardContract, TestCase): ...


class MemoryDecentrlRegistrationTests(MemoryBackend, contract.DecentrlRegistrationContract, TestCase): ...


class MemoryDecentrlCommunicationTests(MemoryBackend, contract.DecentrlCommunicationContract, TestCase): ...


class MemoryDecentrlRequestTests(MemoryBackend, contract.DecentrlRequestContract, TestCase): ...


class MemoryDecentrlDeliveryTests(MemoryBackend, contract.DecentrlDeliveryContract, TestCase): ...


class MemoryAdministrationTests(MemoryBackend, contract.AdministrationContract, TestCase): ...


class MemoryBacklogTests(MemoryBackend, contract.BacklogContract, TestCase): ...


class MemoryDecentrlPendingTests(MemoryBackend, contract.DecentrlPendingContract, TestCase): ...


class MemoryDecentrlEventTests(MemoryBackend, contract.DecentrlEventContract, TestCase): ...


class MemoryDecentrlFilterTests(MemoryBackend, contract.DecentrlFilterContract, TestCase): ...


class MemoryDecentrlTagTests(MemoryBackend, contract.DecentrlTagContract, TestCase): ...


class MemoryDecentrlArchiveCapTests(MemoryBackend, contract.DecentrlArchiveCapContract, TestCase): ...


class MemoryDecentrlPublicTests(MemoryBackend, contract.DecentrlPublicContract, TestCase): ...


class MemoryDecentrlLifecycleTests(MemoryBackend, contract.DecentrlLifecycleContract, TestCase): ...


class MemoryMessageLookupTests(MemoryBackend, contract.MessageLookupContract, TestCase): ...


class MemoryDecentrlEventLookupTests(MemoryBackend, contract.DecentrlEventLookupContract, TestCase): ...


class MemoryClusterTests(MemoryBackend, contract.ClusterContract, TestCase): ...


class MemoryLeaderLeaseTests(MemoryBackend, contract.LeaderLeaseContract, TestCase): ...


class MemoryClusterPresenceTests(MemoryBackend, contract.ClusterPresenceContract, TestCase): ...


class MemoryClusterDeliveryTests(MemoryBackend, contract.ClusterDeliveryContract, TestCase): ...


class MemoryQuotaTests(MemoryBackend, contract.QuotaContract, TestCase): ...


class SharedMemoryTests(SynchronousTestCase):
    """A store that several daemons of one process have open."""

    def test_last_close_deletes_data(self) -> None:
        """Data is kept until the last daemon closes the store, and then deleted."""
        store = MemoryStore(ImmediateClock(), QueueLimits())
        for _ in range(2):
            self.successResultOf(store.open())
        self.successResultOf(store.grant(ALICE))
        self.successResultOf(store.close())
        self.assertIsNotNone(self.successResultOf(store.get_account(ALICE)))
        self.successResultOf(store.close())
        self.failureResultOf(store.get_account(ALICE), StoreUnavailable)
        self.successResultOf(store.close())
        self.successResultOf(store.open())
        self.assertIsNone(self.successResultOf(store.get_account(ALICE)))
        self.successResultOf(store.close())
