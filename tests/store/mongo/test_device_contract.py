"""Contract tests of the devices and wake-ups of the MongoDB store on a real server."""

from __future__ import annotations

from math import ceil
from typing import Any

from bson import Timestamp
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from tests.mongod import shared_replica_set
from tests.store import contract
from tests.store.mongo.test_contract import MongoBackend

_DATES = ("polled", "woken", "claimed", "until", "changed")


class MongoDeviceBackend(MongoBackend):
    """The clock of the server cannot be set: time passes for it by moving what it has written into the past."""

    clock_tolerance = 5.0
    clock: Any

    def pass_time(self, seconds: float) -> Deferred[None]:
        self.clock.advance(seconds)
        return deferToThread(self._move_into_past, seconds)

    def _move_into_past(self, seconds: float) -> None:
        database = shared_replica_set().client[self.database]
        milliseconds = round(seconds * 1000)
        # Of a date that is missing nothing is subtracted.
        earlier = {name: {"$subtract": [f"${name}", milliseconds]} for name in _DATES}
        known = {name: {"$cond": [{"$gt": [f"${name}", None]}, time, "$$REMOVE"]} for name, time in earlier.items()}
        database["wakeups"].update_many({}, [{"$set": known}])
        for collection, name in (("messages", "seq"), ("messages", "visible"), ("pending_events", "seq")):
            for one in database[collection].find({name: {"$exists": True}}, {name: 1}):
                moved = Timestamp(one[name].time - ceil(seconds), one[name].inc)
                database[collection].update_one({"_id": one["_id"]}, {"$set": {name: moved}})


class MongoDeviceTests(MongoDeviceBackend, contract.DeviceContract, TestCase): ...


class MongoWakeupTests(MongoDeviceBackend, contract.WakeupContract, TestCase): ...


class MongoOwedWakeupTests(MongoDeviceBackend, contract.OwedWakeupContract, TestCase): ...
