"""The SQLite store keeps the contract."""

from __future__ import annotations

from twisted.internet.interfaces import IReactorTime
from twisted.trial.unittest import TestCase

from mediatord.interfaces import IStore, QueueLimits
from mediatord.store.sqlite_file import Tuning
from tests.store import contract
from tests.store.builders import a_path, a_sqlite_store
from tests.store.contract.base import Base
from tests.store.contract.nonces import CAPACITY


class MakesSQLite(Base):
    def make_store(self, clock: IReactorTime, limits: QueueLimits) -> IStore:
        return a_sqlite_store(clock, a_path(self), limits, tuning=Tuning(max_nonces=CAPACITY))


class SQLiteDepositTests(MakesSQLite, contract.DepositContract, TestCase): ...


class SQLitePickupTests(MakesSQLite, contract.PickupContract, TestCase): ...


class SQLiteTimingTests(MakesSQLite, contract.TimingContract, TestCase): ...


class SQLiteAccountTests(MakesSQLite, contract.AccountContract, TestCase): ...


class SQLiteNonceTests(MakesSQLite, contract.NonceContract, TestCase): ...


class SQLiteLifecycleTests(MakesSQLite, contract.LifecycleContract, TestCase): ...
