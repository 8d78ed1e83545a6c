"""Contract tests of Decentrl of the MongoDB store on a real server."""

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
from tests.store.mongo.test_contract import MakesMongo


class MakesLongLists(MakesMongo):
    """Lists of three events are long, and scanned in small steps."""

    def make_store(self, clock: IReactorTime, limits: QueueLimits, caps: DecentrlQuotas, max_nonces: int) -> IStore:
        address = parse_mongo_uri(shared_replica_set().uri(self.database))
        server = ReplicaSetClient(
            address, IReactorTime(reactor), observe=ignore_observation, on_up=lambda up: None, connections=2
        )
        store = MongoStore(server, clock, limits, caps=caps, max_nonces=max_nonces)
        store.decentrl = MongoDecentrlStore(server, clock, caps, NonceCapacity(server, max_nonces), step=2)
        return store


class MongoDecentrlGuardTests(MakesMongo, contract.DecentrlGuardContract, TestCase): ...


class MongoDecentrlRegistrationTests(MakesMongo, contract.DecentrlRegistrationContract, TestCase): ...


class MongoDecentrlCommunicationTests(MakesMongo, contract.DecentrlCommunicationContract, TestCase): ...


class MongoDecentrlRequestTests(MakesMongo, contract.DecentrlRequestContract, TestCase): ...


class MongoDecentrlDeliveryTests(MakesMongo, contract.DecentrlDeliveryContract, TestCase): ...


class MongoAdministrationTests(MakesMongo, contract.AdministrationContract, TestCase): ...


class MongoBacklogTests(MakesMongo, contract.BacklogContract, TestCase): ...


class MongoDecentrlPendingTests(MakesMongo, contract.DecentrlPendingContract, TestCase): ...


class MongoDecentrlLedgerTests(MakesMongo, contract.DecentrlLedgerContract, TestCase): ...


class MongoDecentrlEventLookupTests(MakesMongo, contract.DecentrlEventLookupContract, TestCase):
    largest = MAX_PAGE_BYTES - 2_048


class MongoDecentrlEventTests(MakesMongo, contract.DecentrlEventContract, TestCase): ...


class MongoDecentrlFilterTests(MakesMongo, contract.DecentrlFilterContract, TestCase): ...


class MongoDecentrlTagTests(MakesMongo, contract.DecentrlTagContract, TestCase): ...


class MongoDecentrlArchiveCapTests(MakesMongo, contract.DecentrlArchiveCapContract, TestCase): ...


class MongoDecentrlPublicTests(MakesMongo, contract.DecentrlPublicContract, TestCase): ...


class MongoDecentrlLifecycleTests(MakesMongo, contract.DecentrlLifecycleContract, TestCase): ...


class LongListEventTests(MakesLongLists, contract.DecentrlEventContract, TestCase): ...


class LongListFilterTests(MakesLongLists, contract.DecentrlFilterContract, TestCase): ...


class LongListTagTests(MakesLongLists, contract.DecentrlTagContract, TestCase): ...


class LongListPublicTests(MakesLongLists, contract.DecentrlPublicContract, TestCase): ...
