"""Contract tests of the MongoDB store on a real server."""

from __future__ import annotations

from typing import Any, cast

from twisted.internet.interfaces import IReactorTime
from twisted.trial.unittest import TestCase

from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES, DecentrlQuotas
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import IStore, ignore_observation
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.uri import parse_mongo_uri
from mediatord.store.mongo.store import MongoStore
from tests.mongod import fresh_database, shared_replica_set
from tests.store import contract
from tests.store.contract.base import Base, StoreContract
from tests.store.mongo.mongo_test_case import CLOCK, TIME_LIMIT, TIME_LIMIT_SETTINGS


class MongoBackend(Base):
    """Stores on one database, which is empty before a test."""

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        for module, name in TIME_LIMIT_SETTINGS:
            cast(TestCase, self).patch(module, name, TIME_LIMIT)
        database = fresh_database()
        self.database = database.__enter__()
        self.addCleanup(database.__exit__, None, None, None)
        await cast(Any, super()).setUp()

    def make_store(self, clock: IReactorTime, limits: QueueLimits, caps: DecentrlQuotas, max_nonces: int) -> IStore:
        address = parse_mongo_uri(shared_replica_set().uri(self.database))
        server = ReplicaSetClient(address, CLOCK, observe=ignore_observation, on_up=lambda up: None, connections=2)
        return MongoStore(server, clock, limits, caps=caps, max_nonces=max_nonces)

    def make_second_store(self) -> IStore:
        return cast(StoreContract, self).make_test_store()


class MongoEnqueueTests(MongoBackend, contract.EnqueueContract, TestCase): ...


class MongoFairShareTests(MongoBackend, contract.FairShareContract, TestCase): ...


class MongoNoFairShareTests(MongoBackend, contract.NoFairShareContract, TestCase): ...


class MongoSenderReserveTests(MongoBackend, contract.SenderReserveContract, TestCase): ...


class MongoSenderReserveRefusalTests(MongoBackend, contract.SenderReserveRefusalContract, TestCase): ...


class MongoRefusalTests(MongoBackend, contract.RefusalContract, TestCase): ...


class MongoFairShareRefusalTests(MongoBackend, contract.FairShareRefusalContract, TestCase): ...


class MongoLedgerTests(MongoBackend, contract.LedgerContract, TestCase): ...


class MongoPickupTests(MongoBackend, contract.PickupContract, TestCase): ...


class MongoTimingTests(MongoBackend, contract.TimingContract, TestCase): ...


class MongoMessageLookupTests(MongoBackend, contract.MessageLookupContract, TestCase):
    largest = MAX_PAGE_BYTES - 2_048


class MongoAccountTests(MongoBackend, contract.AccountContract, TestCase): ...


class MongoAccountExpiryTests(MongoBackend, contract.AccountExpiryContract, TestCase): ...


class MongoNonceTests(MongoBackend, contract.NonceContract, TestCase): ...


class MongoLifecycleTests(MongoBackend, contract.LifecycleContract, TestCase): ...
