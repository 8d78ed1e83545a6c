"""The SQLite store keeps the contract."""

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


class MakesSQLite(Base):
    """Other processes have a store of their own on the same file."""

    path: Path | None = None

    def make_store(self, clock: IReactorTime, limits: QueueLimits, caps: DecentrlQuotas, max_nonces: int) -> IStore:
        if self.path is None:
            self.path = make_database_path(self)
        return make_sqlite_store(clock, self.path, limits, caps=caps, max_nonces=max_nonces)


class SQLiteEnqueueTests(MakesSQLite, contract.EnqueueContract, TestCase): ...


class SQLiteFairShareTests(MakesSQLite, contract.FairShareContract, TestCase): ...


class SQLiteNoFairShareTests(MakesSQLite, contract.NoFairShareContract, TestCase): ...


class SQLiteSenderReserveTests(MakesSQLite, contract.SenderReserveContract, TestCase): ...


class SQLiteSenderReserveRefusalTests(MakesSQLite, contract.SenderReserveRefusalContract, TestCase): ...


class SQLiteRefusalTests(MakesSQLite, contract.RefusalContract, TestCase): ...


class SQLiteFairShareRefusalTests(MakesSQLite, contract.FairShareRefusalContract, TestCase): ...


class SQLiteLedgerTests(MakesSQLite, contract.LedgerContract, TestCase): ...


class SQLiteDecentrlLedgerTests(MakesSQLite, contract.DecentrlLedgerContract, TestCase): ...


class SQLitePickupTests(MakesSQLite, contract.PickupContract, TestCase): ...


class SQLiteTimingTests(MakesSQLite, contract.TimingContract, TestCase): ...


class SQLiteAccountTests(MakesSQLite, contract.AccountContract, TestCase): ...


class SQLiteAccountExpiryTests(MakesSQLite, contract.AccountExpiryContract, TestCase): ...


class SQLiteNonceTests(MakesSQLite, contract.NonceContract, TestCase): ...


class SQLiteLifecycleTests(MakesSQLite, contract.LifecycleContract, TestCase):
    sizes_are_exact = True


class SQLiteDecentrlGuardTests(MakesSQLite, contract.DecentrlGuardContract, TestCase): ...


class SQLiteDecentrlRegistrationTests(MakesSQLite, contract.DecentrlRegistrationContract, TestCase): ...


class SQLiteDecentrlCommunicationTests(MakesSQLite, contract.DecentrlCommunicationContract, TestCase): ...


class SQLiteDecentrlRequestTests(MakesSQLite, contract.DecentrlRequestContract, TestCase): ...


class SQLiteDecentrlDeliveryTests(MakesSQLite, contract.DecentrlDeliveryContract, TestCase): ...


class SQLiteAdministrationTests(MakesSQLite, contract.AdministrationContract, TestCase): ...


class SQLiteBacklogTests(MakesSQLite, contract.BacklogContract, TestCase): ...


class SQLiteDecentrlPendingTests(MakesSQLite, contract.DecentrlPendingContract, TestCase): ...


class SQLiteDecentrlEventTests(MakesSQLite, contract.DecentrlEventContract, TestCase): ...


class SQLiteDecentrlFilterTests(MakesSQLite, contract.DecentrlFilterContract, TestCase): ...


class SQLiteDecentrlTagTests(MakesSQLite, contract.DecentrlTagContract, TestCase): ...


class SQLiteDecentrlArchiveCapTests(MakesSQLite, contract.DecentrlArchiveCapContract, TestCase): ...


class SQLiteDecentrlPublicTests(MakesSQLite, contract.DecentrlPublicContract, TestCase): ...


class SQLiteDecentrlLifecycleTests(MakesSQLite, contract.DecentrlLifecycleContract, TestCase): ...


class SQLiteMessageLookupTests(MakesSQLite, contract.MessageLookupContract, TestCase): ...


class SQLiteDecentrlEventLookupTests(MakesSQLite, contract.DecentrlEventLookupContract, TestCase): ...


class SQLiteClusterTests(MakesSQLite, contract.ClusterContract, TestCase): ...


class SQLiteLeaderLeaseTests(MakesSQLite, contract.LeaderLeaseContract, TestCase): ...


class SQLiteClusterPresenceTests(MakesSQLite, contract.ClusterPresenceContract, TestCase): ...


class SQLiteClusterDeliveryTests(MakesSQLite, contract.ClusterDeliveryContract, TestCase): ...


class SQLiteQuotaTests(MakesSQLite, contract.QuotaContract, TestCase): ...
