"""Contract tests of the connections of DIDComm v1 in MongoDB on a real server."""

from __future__ import annotations

from twisted.trial.unittest import TestCase

from tests.store import contract
from tests.store.mongo.test_contract import MongoBackend


class MongoV1ConnectionTests(MongoBackend, contract.V1ConnectionContract, TestCase): ...
