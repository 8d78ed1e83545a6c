"""Contract tests of the SQLite store."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.interfaces import IReactorTime
from twisted.trial.unittest import TestCase

from mediatord.store.interfaces.decentrl import DecentrlQuotas
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import IStore
from tests.store import contract
from tests.store.builders import make_database_path, make_sqlite_store
from tests.store.contract.base import Base


class SQLiteBackend(Base):
    """Other processes have a store of their own on the same file."""

    path: Path | None = None

    def make_store(self, clock: IReactorTime, limits: QueueLimits, caps: DecentrlQuotas, max_nonces: int) -> IStore:
        if self.path is None:
            self.path = make_database_path(self)
        return make_sqlite_store(clock, self.path, limits, caps=caps, max_nonces=max_nonces)


class SQLiteEnqueueTests(SQLiteBackend, contract.EnqueueContract, TestCase): ...


class SQLiteFairShareTests(SQLiteBackend, contract.FairShareContract, TestCase): ...


class SQLiteNoFairShareTests(SQLiteBackend, contract.NoFairShareContract, TestCase): ...


class SQLiteSenderReserveTests(SQLiteBackend, contract.SenderReserveContract, TestCase): ...


class SQLiteSenderReserveRefusalTests(SQLiteBackend, contract.SenderReserveRefusalContract, TestCase): ...


class SQLiteRefusalTests(SQLiteBackend, contract.RefusalContract, TestCase): ...


class SQLiteFairShareRefusalTests(SQLiteBackend, contract.FairShareRefusalContract, TestCase): ...


class SQLiteLedgerTests(SQLiteBackend, contract.LedgerContract, TestCase): ...


class SQLiteDecentrlLedgerTests(SQLiteBackend, contract.DecentrlLedgerContract, TestCase): ...


class SQLitePickupTests(SQLiteBackend, contract.PickupContract, TestCase): ...


class SQLiteTimingTests(SQLiteBackend, contract.TimingContract, TestCase): ...


class SQLiteAccountTests(SQLiteBackend, contract.AccountContract, TestCase): ...


class SQLiteAccountExpiryTests(SQLiteBackend, contract.AccountExpiryContract, TestCase): ...


class SQLiteNonceTests(SQLiteBackend, contract.NonceContract, TestCase): ...


class SQLiteLifecycleTests(SQLiteBackend, contract.LifecycleContract, TestCase):
    sizes_are_exact = True


class SQLiteDecentrlGuardTests(SQLiteBackend, contract.DecentrlGuardContract, TestCase): ...


class SQLiteDecentrlRegistrationTests(SQLiteBackend, contract.DecentrlRegistrationContract, TestCase): ...


class SQLiteDecentrlCommunicationTests(SQLiteBackend, contract.DecentrlCommunicationContract, TestCase): ...


class SQLiteDecentrlRequestTests(SQLiteBackend, contract.DecentrlRequestContract, TestCase): ...


class SQLiteDecentrlDeliveryTests(SQLiteBackend, contract.DecentrlDeliveryContract, TestCase): ...


class SQLiteAdministrationTests(SQLiteBackend, contract.AdministrationContract, TestCase): ...


class SQLiteBacklogTests(SQLiteBackend, contract.BacklogContract, TestCase): ...


class SQLiteDecentrlPendingTests(SQLiteBackend, contract.DecentrlPendingContract, TestCase): ...


class SQLiteDecentrlEventTests(SQLiteBackend, contract.DecentrlEventContract, TestCase): ...


class SQLiteDecentrlFilterTests(SQLiteBackend, contract.DecentrlFilterContract, TestCase): ...


class SQLiteDecentrlTagTests(SQLiteBackend, contract.DecentrlTagContract, TestCase): ...


class SQLiteDecentrlArchiveCapTests(SQLiteBackend, contract.DecentrlArchiveCapContract, TestCase): ...


class SQLiteDecentrlPublicTests(SQLiteBackend, contract.DecentrlPublicContract, TestCase): ...


class SQLiteDecentrlLifecycleTests(SQLiteBackend, contract.DecentrlLifecycleContract, TestCase): ...


class SQLiteMessageLookupTests(SQLiteBackend, contract.MessageLookupContract, TestCase): ...


class SQLiteDecentrlEventLookupTests(SQLiteBackend, contract.DecentrlEventLookupContract, TestCase): ...


class SQLiteClusterTests(SQLiteBackend, contract.ClusterContract, TestCase): ...


class SQLiteLeaderLeaseTests(SQLiteBackend, contract.LeaderLeaseContract, TestCase): ...


class SQLiteClusterPresenceTests(SQLiteBackend, contract.ClusterPresenceContract, TestCase): ...


class SQLiteClusterDeliveryTests(SQLiteBackend, contract.ClusterDeliveryContract, TestCase): ...


class SQLiteQuotaTests(SQLiteBackend, contract.QuotaContract, TestCase): ...


class SQLiteDeviceTests(SQLiteBackend, contract.DeviceContract, TestCase): ...


class SQLiteWakeupTests(SQLiteBackend, contract.WakeupContract, TestCase): ...


class SQLiteOwedWakeupTests(SQLiteBackend, contract.OwedWakeupContract, TestCase): ...


class SQLiteV1ConnectionTests(SQLiteBackend, contract.V1ConnectionContract, TestCase): ...
