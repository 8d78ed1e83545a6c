"""The Decentrl half of the MongoDB store keeps the contract, on a real server."""

from __future__ import annotations

from twisted.internet import reactor  # noqa: TID251  a server's answers come by themselves
from twisted.internet.interfaces import IReactorTime
from twisted.trial.unittest import TestCase

from mediatord.interfaces import IStore, QueueLimits
from mediatord.interfaces.decentrl import LARGEST_SLICE, Caps
from mediatord.store.batches import unobserved
from mediatord.store.mongo.decentrl import MongoDecentrl
from mediatord.store.mongo.nonces import Nonces
from mediatord.store.mongo.server import Server
from mediatord.store.mongo.store import MongoStore
from mediatord.store.mongo.uri import read_uri
from tests.mongod import shared_replica_set
from tests.store import contract
from tests.store.test_mongo import MakesMongo


class MakesLongLists(MakesMongo):
    """Three events are a long list, along which one walks in small steps."""

    def make_store(self, clock: IReactorTime, limits: QueueLimits, caps: Caps, max_nonces: int) -> IStore:
        address = read_uri(shared_replica_set().uri(self.database))
        server = Server(address, IReactorTime(reactor), observe=unobserved, on_up=lambda up: None, connections=2)
        store = MongoStore(server, clock, limits, caps=caps, max_nonces=max_nonces)
        store.decentrl = MongoDecentrl(server, clock, caps, Nonces(server, max_nonces), step=2)
        return store


class MongoDecentrlGuardTests(MakesMongo, contract.DecentrlGuardContract, TestCase): ...


class MongoDecentrlRegistrationTests(MakesMongo, contract.DecentrlRegistrationContract, TestCase): ...


class MongoDecentrlCommunicationTests(MakesMongo, contract.DecentrlCommunicationContract, TestCase): ...


class MongoDecentrlRequestTests(MakesMongo, contract.DecentrlRequestContract, TestCase): ...


class MongoDecentrlDeliveryTests(MakesMongo, contract.DecentrlDeliveryContract, TestCase): ...


class MongoBacklogTests(MakesMongo, contract.BacklogContract, TestCase): ...


class MongoDecentrlPendingTests(MakesMongo, contract.DecentrlPendingContract, TestCase): ...


class MongoDecentrlLedgerTests(MakesMongo, contract.DecentrlLedgerContract, TestCase): ...


class MongoDecentrlArrivalTests(MakesMongo, contract.DecentrlArrivalContract, TestCase):
    largest = LARGEST_SLICE - 2_048


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
