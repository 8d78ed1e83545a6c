"""The SQLite store keeps the contract."""

from __future__ import annotations

from pathlib import Path

from twisted.internet.interfaces import IReactorTime
from twisted.trial.unittest import TestCase

from mediatord.interfaces import IStore, QueueLimits
from mediatord.interfaces.decentrl import Caps
from mediatord.store.sqlite_file import Tuning
from tests.store import contract
from tests.store.builders import a_path, a_sqlite_store
from tests.store.contract.base import Base


class MakesSQLite(Base):
    """Other processes have a store of their own on the same file."""

    path: Path | None = None

    def make_store(self, clock: IReactorTime, limits: QueueLimits, caps: Caps, max_nonces: int) -> IStore:
        if self.path is None:
            self.path = a_path(self)
        return a_sqlite_store(clock, self.path, limits, caps=caps, tuning=Tuning(max_nonces=max_nonces))


class SQLiteDepositTests(MakesSQLite, contract.DepositContract, TestCase): ...


class SQLiteShareTests(MakesSQLite, contract.ShareContract, TestCase): ...


class SQLiteNoShareTests(MakesSQLite, contract.NoShareContract, TestCase): ...


class SQLiteRankTests(MakesSQLite, contract.RankContract, TestCase): ...


class SQLiteRankRefusalTests(MakesSQLite, contract.RankRefusalContract, TestCase): ...


class SQLiteRefusalTests(MakesSQLite, contract.RefusalContract, TestCase): ...


class SQLiteRefusalByShareTests(MakesSQLite, contract.RefusalByShareContract, TestCase): ...


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


class SQLiteBacklogTests(MakesSQLite, contract.BacklogContract, TestCase): ...


class SQLiteDecentrlPendingTests(MakesSQLite, contract.DecentrlPendingContract, TestCase): ...


class SQLiteDecentrlEventTests(MakesSQLite, contract.DecentrlEventContract, TestCase): ...


class SQLiteDecentrlFilterTests(MakesSQLite, contract.DecentrlFilterContract, TestCase): ...


class SQLiteDecentrlTagTests(MakesSQLite, contract.DecentrlTagContract, TestCase): ...


class SQLiteDecentrlArchiveCapTests(MakesSQLite, contract.DecentrlArchiveCapContract, TestCase): ...


class SQLiteDecentrlPublicTests(MakesSQLite, contract.DecentrlPublicContract, TestCase): ...


class SQLiteDecentrlLifecycleTests(MakesSQLite, contract.DecentrlLifecycleContract, TestCase): ...


class SQLiteArrivalTests(MakesSQLite, contract.ArrivalContract, TestCase): ...


class SQLiteDecentrlArrivalTests(MakesSQLite, contract.DecentrlArrivalContract, TestCase): ...


class SQLiteClusterTests(MakesSQLite, contract.ClusterContract, TestCase): ...


class SQLiteClusterTurnTests(MakesSQLite, contract.ClusterTurnContract, TestCase): ...


class SQLiteClusterPresenceTests(MakesSQLite, contract.ClusterPresenceContract, TestCase): ...


class SQLiteClusterDeliveryTests(MakesSQLite, contract.ClusterDeliveryContract, TestCase): ...


class SQLiteAllowanceTests(MakesSQLite, contract.AllowanceContract, TestCase): ...
