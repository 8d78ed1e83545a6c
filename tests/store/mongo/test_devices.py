"""Devices and wake-ups in MongoDB: races, lost replies, clocks that differ, and what is left behind."""

from __future__ import annotations

from typing import Any, cast

from bson import ObjectId, Timestamp
from twisted.internet.defer import gatherResults
from twisted.internet.interfaces import IReactorTime

from mediatord.errors import MediationNotGranted, StoreUnavailable, TooManyDevices
from mediatord.store.interfaces.decentrl import CommandGuard, Contract, PendingEvent
from mediatord.store.interfaces.devices import Device, FinishedWakeup, WakeupClaim, WakeupPolicy, WakeupRequest
from mediatord.store.mongo.schema import DEVICES
from mediatord.store.mongo.store import MongoStore
from tests.store.mongo.mongo_test_case import (
    ALICE,
    CLOCK,
    INBOX,
    LOST_REPLY_TIME_LIMIT,
    MongoTestCase,
    ShiftedReactor,
)

POLICY = WakeupPolicy(min_interval=20.0, quiet_after_poll=0.0)
ALWAYS = WakeupPolicy(min_interval=0.001, quiet_after_poll=0.0, without_devices=True)
CAROL, DAVE = "did:decentrl:carol", "did:decentrl:dave"
ROUNDS = 20


def make_device(number: int) -> Device:
    return Device(number.to_bytes(16, "big"), "fcm", b"sealed")


class DeviceTestCase(MongoTestCase):
    async def open_stores(self, number: int = 2) -> list[MongoStore]:
        return [await self.open_store() for _ in range(number)]

    def list_wakeups(self) -> list[dict[str, Any]]:
        return list(self.documents["wakeups"].find())


class RaceTests(DeviceTestCase):
    """Several processes that do the same at the same time."""

    async def test_one_process_claims(self) -> None:
        """Of many claims at the same time one succeeds, time after time."""
        stores = await self.open_stores(3)
        await stores[0].devices.set_device(ALICE, make_device(1), 1)
        await self.enqueue_ids(stores[0], "m")
        for _ in range(ROUNDS):
            works = [store.devices.claim_wakeups([WakeupRequest(ALICE)], ALWAYS) for store in stores * 3]
            decisions = [one for some in await gatherResults(works) for one in some]
            (claim,) = [one for one in decisions if isinstance(one, WakeupClaim)]
            self.assertNotIn(0.0, decisions)
            await stores[0].devices.finish_wakeups([FinishedWakeup(ALICE, claim.claim)])

    async def test_devices_are_limited(self) -> None:
        """Processes that add devices at the same time do not exceed the limit."""
        stores = await self.open_stores()
        works = [store.devices.set_device(ALICE, make_device(n), 5) for n in range(4) for store in stores]
        await gatherResults(works)
        works = [stores[n % 2].devices.set_device(ALICE, make_device(n), 5) for n in range(4, 12)]
        refused = 0
        for work in works:
            try:
                await work
            except TooManyDevices:
                refused += 1
        self.assertEqual((refused, len(await stores[0].devices.list_devices(ALICE))), (7, 5))

    async def test_device_moves_once(self) -> None:
        """A token that two accounts set at the same time belongs to one of them."""
        stores = await self.open_stores()
        await stores[0].grant("did:example:bob")
        for _ in range(ROUNDS):
            owners = ALICE, "did:example:bob"
            pairs = zip(stores, owners, strict=True)
            await gatherResults([store.devices.set_device(did, make_device(1), 1) for store, did in pairs])
            found = [one for did in owners for one in await stores[0].devices.list_devices(did)]
            self.assertEqual(found, [make_device(1)])

    async def test_no_device_without_account(self) -> None:
        """A device that is set while its account is removed is refused, or removed with it."""
        stores = await self.open_stores()
        for number in range(ROUNDS):
            did = f"did:example:{number}"
            await stores[0].grant(did)
            setting = stores[0].devices.set_device(did, make_device(number), 1)
            removing = stores[1].administration.remove_account(did)
            try:
                await setting
            except MediationNotGranted:
                pass
            self.assertTrue(await removing)
        self.assertEqual((list(self.documents["devices"].find()), self.list_wakeups()), ([], []))


class FaultTests(DeviceTestCase):
    """Replies that are lost."""

    async def test_claim_is_repeated_with_its_token(self) -> None:
        """A claim that was written without the confirmation of a majority is repeated, and still ours."""
        store = await self.open_store()
        await self.enqueue_ids(store, "m")
        error = {"code": 91, "errmsg": "shutting down"}
        with self.servers.failpoint("update", times=1, writeConcernError=error):
            (decision,) = await store.devices.claim_wakeups([WakeupRequest(ALICE)], ALWAYS)
        self.assertIsInstance(decision, WakeupClaim)

    async def test_claim_of_unknown_outcome_lapses(self) -> None:
        """A claim whose outcome was never known holds others off until its lease ends."""
        store, other = await self.open_stores()
        await self.enqueue_ids(store, "m")
        error = {"code": 91, "errmsg": "shutting down"}
        with (
            self.with_short_time_limit(LOST_REPLY_TIME_LIMIT),
            self.servers.failpoint("update", writeConcernError=error),
        ):
            await self.assertFailure(store.devices.claim_wakeups([WakeupRequest(ALICE)], ALWAYS), StoreUnavailable)
        (decision,) = await other.devices.claim_wakeups([WakeupRequest(ALICE)], ALWAYS)
        assert isinstance(decision, float)
        self.assertGreater(decision, ALWAYS.lease / 2)
        lapsed = {"$set": {"until": {"$subtract": ["$until", round(ALWAYS.lease * 1000)]}}}
        self.documents["wakeups"].update_one({}, [lapsed])
        (decision,) = await other.devices.claim_wakeups([WakeupRequest(ALICE)], ALWAYS)
        self.assertIsInstance(decision, WakeupClaim)


class ClockTests(DeviceTestCase):
    """A host whose clock is behind that of the server, by less than what is refused."""

    async def test_finds_message_of_slow_host(self) -> None:
        """A message that arrived after a poll is owed a wake-up, whatever its host took for its time."""
        clock = ShiftedReactor()
        clock.ahead = -50.0
        store = await self.open_store(clock=cast(IReactorTime, clock))
        await store.devices.set_device(ALICE, make_device(1), 1)
        await store.devices.record_polls({ALICE: 5.0})
        await self.enqueue_ids(store, "m")
        self.assertLess(self.documents["messages"].find_one({})["received_at"], CLOCK.seconds() - 40.0)  # type: ignore[index]
        self.assertEqual(await store.devices.find_owed_wakeups("decentrl:" + "0" * 32, 9, POLICY), ([], None))
        owed, after = await store.devices.find_owed_wakeups("", 9, POLICY)
        self.assertEqual((owed, after), ([ALICE], "decentrl:" + "0" * 32))

    async def test_imported_message_may_be_late(self) -> None:
        """Of an imported message only the time of a host is known, which may be behind."""
        store = await self.open_store()
        await store.devices.set_device(ALICE, make_device(1), 1)
        await self.enqueue_ids(store, "m")
        await store.devices.record_polls({ALICE: 30.0})
        for age, expected in ((45.0, [ALICE]), (100.0, [])):
            arrived = CLOCK.seconds() - age
            change = {"seq": Timestamp(1, 7), "received_at": arrived, "arrived_at": arrived}
            self.documents["messages"].update_one({}, {"$set": change})
            owed, _ = await store.devices.find_owed_wakeups("", 9, POLICY)
            self.assertEqual(owed, expected)


class RemainderTests(DeviceTestCase):
    """Documents that nobody needs any more."""

    async def test_wakeups_go_with_party(self) -> None:
        """The wake-ups of an identity that never registered go with it."""
        clock = ShiftedReactor()
        store = await self.open_store(clock=cast(IReactorTime, clock))
        now = clock.seconds()
        contract = Contract("contract", CAROL, DAVE, now + 60.0, b"1" * 32, b"{}")
        await store.decentrl.save_contract(CommandGuard(b"1", now + 60.0), contract)
        await store.decentrl.enqueue_event(CommandGuard(b"2", now + 60.0), PendingEvent("e", CAROL, DAVE, "x", now))
        (decision,) = await store.devices.claim_wakeups([WakeupRequest(CAROL)], ALWAYS)
        self.assertIsInstance(decision, WakeupClaim)
        await store.decentrl.acknowledge_events(CommandGuard(b"3", now + 60.0), CAROL, ["e"])
        await store.prune_nonces()
        self.assertEqual(len(self.list_wakeups()), 1)
        self.documents["contracts"].delete_many({})
        self.documents["parties"].update_many({}, {"$set": {"contracts": 0, "unused": True}})
        await store.prune_nonces()
        self.assertEqual(self.list_wakeups(), [])

    async def test_owner_without_account_is_owed_nothing(self) -> None:
        """Devices that a node of an older version has left behind do no harm."""
        store = await self.open_store()
        await store.devices.set_device(ALICE, make_device(1), 1)
        await self.enqueue_ids(store, "m", to=INBOX)
        self.documents[DEVICES.name].update_many({}, {"$set": {"owner": ObjectId()}})
        self.assertEqual((await store.devices.find_owed_wakeups("", 9, POLICY))[0], [])
        self.assertEqual(await store.devices.claim_wakeups([WakeupRequest(ALICE)], POLICY), [None])
