"""The memory store keeps the contract."""

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


class MakesMemory:
    """Other processes are daemons that share the store."""

    store: IStore

    def make_store(self, clock: IReactorTime, limits: QueueLimits, caps: DecentrlQuotas, max_nonces: int) -> IStore:
        return MemoryStore(clock, limits, caps=caps, max_nonces=max_nonces)

    def make_second_store(self) -> IStore:
        return self.store


class MemoryEnqueueTests(MakesMemory, contract.EnqueueContract, TestCase): ...


class MemoryFairShareTests(MakesMemory, contract.FairShareContract, TestCase): ...


class MemoryNoFairShareTests(MakesMemory, contract.NoFairShareContract, TestCase): ...


class MemorySenderReserveTests(MakesMemory, contract.SenderReserveContract, TestCase): ...


class MemorySenderReserveRefusalTests(MakesMemory, contract.SenderReserveRefusalContract, TestCase): ...


class MemoryRefusalTests(MakesMemory, contract.RefusalContract, TestCase): ...


class MemoryFairShareRefusalTests(MakesMemory, contract.FairShareRefusalContract, TestCase): ...


class MemoryLedgerTests(MakesMemory, contract.LedgerContract, TestCase): ...


class MemoryDecentrlLedgerTests(MakesMemory, contract.DecentrlLedgerContract, TestCase): ...


class MemoryPickupTests(MakesMemory, contract.PickupContract, TestCase): ...


class MemoryTimingTests(MakesMemory, contract.TimingContract, TestCase): ...


class MemoryAccountTests(MakesMemory, contract.AccountContract, TestCase): ...


class MemoryAccountExpiryTests(MakesMemory, contract.AccountExpiryContract, TestCase): ...


class MemoryNonceTests(MakesMemory, contract.NonceContract, TestCase): ...


class MemoryLifecycleTests(MakesMemory, contract.LifecycleContract, TestCase): ...


class MemoryDecentrlGuardTests(MakesMemory, contract.DecentrlGuardContract, TestCase): ...


class MemoryDecentrlRegistrationTests(MakesMemory, contract.DecentrlRegistrationContract, TestCase): ...


class MemoryDecentrlCommunicationTests(MakesMemory, contract.DecentrlCommunicationContract, TestCase): ...


class MemoryDecentrlRequestTests(MakesMemory, contract.DecentrlRequestContract, TestCase): ...


class MemoryDecentrlDeliveryTests(MakesMemory, contract.DecentrlDeliveryContract, TestCase): ...


class MemoryAdministrationTests(MakesMemory, contract.AdministrationContract, TestCase): ...


class MemoryBacklogTests(MakesMemory, contract.BacklogContract, TestCase): ...


class MemoryDecentrlPendingTests(MakesMemory, contract.DecentrlPendingContract, TestCase): ...


class MemoryDecentrlEventTests(MakesMemory, contract.DecentrlEventContract, TestCase): ...


class MemoryDecentrlFilterTests(MakesMemory, contract.DecentrlFilterContract, TestCase): ...


class MemoryDecentrlTagTests(MakesMemory, contract.DecentrlTagContract, TestCase): ...


class MemoryDecentrlArchiveCapTests(MakesMemory, contract.DecentrlArchiveCapContract, TestCase): ...


class MemoryDecentrlPublicTests(MakesMemory, contract.DecentrlPublicContract, TestCase): ...


class MemoryDecentrlLifecycleTests(MakesMemory, contract.DecentrlLifecycleContract, TestCase): ...


class MemoryMessageLookupTests(MakesMemory, contract.MessageLookupContract, TestCase): ...


class MemoryDecentrlEventLookupTests(MakesMemory, contract.DecentrlEventLookupContract, TestCase): ...


class MemoryClusterTests(MakesMemory, contract.ClusterContract, TestCase): ...


class MemoryLeaderLeaseTests(MakesMemory, contract.LeaderLeaseContract, TestCase): ...


class MemoryClusterPresenceTests(MakesMemory, contract.ClusterPresenceContract, TestCase): ...


class MemoryClusterDeliveryTests(MakesMemory, contract.ClusterDeliveryContract, TestCase): ...


class MemoryQuotaTests(MakesMemory, contract.QuotaContract, TestCase): ...


class SharedMemoryTests(SynchronousTestCase):
    """A store that several daemons of a process have open."""

    def test_last_one_out(self) -> None:
        """Nothing is forgotten before the last of them has closed it; then everything is."""
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
