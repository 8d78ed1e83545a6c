"""Contract tests of the Decentrl part of the MongoDB store on a real server."""

from __future__ import annotations

from twisted.internet import reactor  # noqa: TID251  a server's answers come by themselves
from twisted.internet.interfaces import IReactorTime
from twisted.trial.unittest import TestCase

from mediatord.store.interfaces.decentrl import MAX_PAGE_BYTES, DecentrlQuotas
from mediatord.store.interfaces.messages import QueueLimits
from mediatord.store.interfaces.store import IStore, ignore_observation
from mediatord.store.mongo.decentrl_store import MongoDecentrlStore
from mediatord.store.mongo.driver.client import ReplicaSetClient
from mediatord.store.mongo.driver.uri import parse_mongo_uri
from mediatord.store.mongo.nonces import NonceCapacity
from mediatord.store.mongo.store import MongoStore
from tests.mongod import shared_replica_set
from tests.store import contract
from tests.store.mongo.test_contract import MongoBackend


class LongListBackend(MongoBackend):
    """Lists of three events are long, and scanned in small steps."""

    def make_store(self, clock: IReactorTime, limits: QueueLimits, caps: DecentrlQuotas, max_nonces: int) -> IStore:
        address = parse_mongo_uri(shared_replica_set().uri(self.database))
        server = ReplicaSetClient(
            address, IReactorTime(reactor), observe=ignore_observation, on_up=lambda up: None, connections=2
        )
        store = MongoStore(server, clock, limits, caps=caps, max_nonces=max_nonces)
        store.decentrl = MongoDecentrlStore(server, clock, caps, NonceCapacity(server, max_nonces), step=2)
        return store


class MongoDecentrlGuardTests(MongoBackend, contract.DecentrlGuardContract, TestCase): ...


class MongoDecentrlRegistrationTests(MongoBackend, contract.DecentrlRegistrationContract, TestCase): ...


class MongoDecentrlCommunicationTests(MongoBackend, contract.DecentrlCommunicationContract, TestCase): ...


class MongoDecentrlRequestTests(MongoBackend, contract.DecentrlRequestContract, TestCase): ...


class MongoDecentrlDeliveryTests(MongoBackend, contract.DecentrlDeliveryContract, TestCase): ...


class MongoAdministrationTests(MongoBackend, contract.AdministrationContract, TestCase): ...


class MongoBacklogTests(MongoBackend, contract.BacklogContract, TestCase): ...


class MongoDecentrlPendingTests(MongoBackend, contract.DecentrlPendingContract, TestCase): ...


class MongoDecentrlLedgerTests(MongoBackend, contract.DecentrlLedgerContract, TestCase): ...


class MongoDecentrlEventLookupTests(MongoBackend, contract.DecentrlEventLookupContract, TestCase):
    largest = MAX_PAGE_BYTES - 2_048


class MongoDecentrlEventTests(MongoBackend, contract.DecentrlEventContract, TestCase): ...


class MongoDecentrlFilterTests(MongoBackend, contract.DecentrlFilterContract, TestCase): ...


class MongoDecentrlTagTests(MongoBackend, contract.DecentrlTagContract, TestCase): ...


class MongoDecentrlArchiveCapTests(MongoBackend, contract.DecentrlArchiveCapContract, TestCase): ...


class MongoDecentrlPublicTests(MongoBackend, contract.DecentrlPublicContract, TestCase): ...


class MongoDecentrlLifecycleTests(MongoBackend, contract.DecentrlLifecycleContract, TestCase): ...


class LongListEventTests(LongListBackend, contract.DecentrlEventContract, TestCase): ...


class LongListFilterTests(LongListBackend, contract.DecentrlFilterContract, TestCase): ...


class LongListTagTests(LongListBackend, contract.DecentrlTagContract, TestCase): ...


class LongListPublicTests(LongListBackend, contract.DecentrlPublicContract, TestCase): ...
