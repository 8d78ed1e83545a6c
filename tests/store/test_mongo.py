"""The MongoDB store keeps the contract, on a real server."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.interfaces import IReactorTime
from twisted.trial.unittest import TestCase

from mediatord.interfaces import IStore, QueueLimits
from mediatord.interfaces.decentrl import LARGEST_SLICE, Caps
from mediatord.store.batches import unobserved
from mediatord.store.mongo import server as server_module
from mediatord.store.mongo.server import Server
from mediatord.store.mongo.store import MongoStore
from mediatord.store.mongo.uri import read_uri
from tests.mongod import fresh_database, shared_replica_set
from tests.store import contract
from tests.store.contract.base import Base, StoreContract
from tests.store.mongo import CLOCK, PATIENT


class MakesMongo(Base):
    """Stores on one database, which has no documents before a test."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        cast(TestCase, self).patch(server_module, "PATIENCE", PATIENT)
        fresh = fresh_database()
        self.database = fresh.__enter__()
        self.addCleanup(fresh.__exit__, None, None, None)
        await cast(Any, super()).setUp()

    def make_store(self, clock: IReactorTime, limits: QueueLimits, caps: Caps, max_nonces: int) -> IStore:
        address = read_uri(shared_replica_set().uri(self.database))
        server = Server(address, CLOCK, observe=unobserved, on_up=lambda up: None, connections=2)
        return MongoStore(server, clock, limits, caps=caps, max_nonces=max_nonces)

    def a_neighbour(self) -> IStore:
        return cast(StoreContract, self).a_store()


class MongoDepositTests(MakesMongo, contract.DepositContract, TestCase): ...


class MongoShareTests(MakesMongo, contract.ShareContract, TestCase): ...


class MongoNoShareTests(MakesMongo, contract.NoShareContract, TestCase): ...


class MongoRankTests(MakesMongo, contract.RankContract, TestCase): ...


class MongoRankRefusalTests(MakesMongo, contract.RankRefusalContract, TestCase): ...


class MongoRefusalTests(MakesMongo, contract.RefusalContract, TestCase): ...


class MongoRefusalByShareTests(MakesMongo, contract.RefusalByShareContract, TestCase): ...


class MongoLedgerTests(MakesMongo, contract.LedgerContract, TestCase): ...


class MongoPickupTests(MakesMongo, contract.PickupContract, TestCase): ...


class MongoTimingTests(MakesMongo, contract.TimingContract, TestCase): ...


class MongoArrivalTests(MakesMongo, contract.ArrivalContract, TestCase):
    largest = LARGEST_SLICE - 2_048


class MongoAccountTests(MakesMongo, contract.AccountContract, TestCase): ...


class MongoAccountExpiryTests(MakesMongo, contract.AccountExpiryContract, TestCase): ...


class MongoNonceTests(MakesMongo, contract.NonceContract, TestCase): ...


class MongoLifecycleTests(MakesMongo, contract.LifecycleContract, TestCase): ...
