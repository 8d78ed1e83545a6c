"""Contract of devices and wake-ups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twisted.internet.defer import Deferred, gatherResults
from zope.interface.verify import verifyObject

from mediatord.errors import MediationNotGranted, StoreUnavailable, TooManyDevices
from mediatord.store.interfaces.devices import (
    DEVICE_ID_BYTES,
    ClaimKey,
    Device,
    FinishedWakeup,
    IDeviceStore,
    WakeupClaim,
    WakeupDecision,
    WakeupPolicy,
    WakeupRequest,
)
from mediatord.store.interfaces.messages import QueueLimits
from tests.store.builders import ALICE, BOB, HOUR
from tests.store.contract.base import OTHER
from tests.store.contract.decentrl_base import DecentrlContract

CAROL = "did:decentrl:carol"
DAVE = "did:decentrl:dave"
MAX_DEVICES = 10
POLICY = WakeupPolicy(min_interval=20.0, quiet_after_poll=10.0, lease=30.0)
WITHOUT_DEVICES = WakeupPolicy(min_interval=20.0, quiet_after_poll=10.0, without_devices=True)


def make_device(
    name: str, service: str = "fcm", expires_at: float | None = None, sealed: bytes = b"\0\xff"
) -> Device:
    return Device(name.encode().ljust(DEVICE_ID_BYTES, b"\0"), service, sealed + name.encode(), expires_at)


class DeviceStoreContract(DecentrlContract):
    """
    An open store in which ALICE and BOB have accounts, and the Decentrl identities CAROL and DAVE are registered for
    an hour. ALICE and CAROL have a device.
    """

    limits = QueueLimits(max_messages=20_000, max_bytes=10_000_000)
    devices: IDeviceStore

    async def setUp(self) -> None:  # type: ignore[override]  # trial waits for it
        await super().setUp()
        self.devices = self.store.devices
        self.claims: dict[str, ClaimKey] = {}
        verifyObject(IDeviceStore, self.devices)
        await self.register_dids(CAROL, DAVE)
        await self.save_contracts("carol with dave", owner=CAROL, peer=DAVE)
        await self.set_devices(ALICE, make_device("alice"))
        await self.set_devices(CAROL, make_device("carol", "web_push"))

    async def set_devices(self, owner: str, *devices: Device, max_devices: int = MAX_DEVICES) -> None:
        for device in devices:
            await self.devices.set_device(owner, device, max_devices)

    async def list_names(self, owner: str = ALICE, service: str | None = None) -> list[str]:
        found = await self.devices.list_devices(owner, service)
        return [device.id.rstrip(b"\0").decode() for device in found]

    async def claim(self, owner: str = ALICE, age: float = 0.0, policy: WakeupPolicy = POLICY) -> WakeupDecision:
        (decision,) = await self.devices.claim_wakeups([WakeupRequest(owner, age)], policy)
        if isinstance(decision, WakeupClaim):
            self.claims[owner] = decision.claim
        return decision

    async def finish(self, owner: str = ALICE, retry_in: float | None = None) -> None:
        """End the last claim of an owner."""
        await self.devices.finish_wakeups([FinishedWakeup(owner, self.claims[owner], retry_in)])

    async def poll(self, owner: str = ALICE, age: float = 0.0) -> None:
        await self.devices.record_polls({owner: age})

    async def wake(self, owner: str = ALICE) -> None:
        """Claim and send a wake-up for a message that arrived now."""
        self.assertIsInstance(await self.claim(owner), WakeupClaim)
        await self.finish(owner)

    async def find_owed(
        self, policy: WakeupPolicy = POLICY, limit: int = 100, repeat_after: float = 0.0
    ) -> list[str]:
        """All owners that are owed a wake-up, in no order."""
        owed: list[str] = []
        after: str | None = ""
        while after is not None:
            some, after = await self.devices.find_owed_wakeups(after, limit, policy, repeat_after=repeat_after)
            self.assertLessEqual(len(some), limit)
            owed += some
        return sorted(owed)

    def assert_waits(self, decision: WakeupDecision, seconds: float) -> None:
        """A decision to ask again after some seconds; servers with a clock of their own are not exact."""
        assert isinstance(decision, float)
        self.assertApproximates(decision, seconds, max(self.clock_tolerance, 1e-4))

    #: Seconds by which times may differ, where a server has the clock.
    clock_tolerance = 0.0


class DeviceContract(DeviceStoreContract):
    """Contract of devices."""

    async def test_lists_devices_in_order_of_registration(self) -> None:
        """Devices are listed in order of registration, with all that was stored; also those of one service only."""
        later = self.clock.seconds() + HOUR + 0.1234567
        devices = [
            make_device("z"),
            make_device("y", "web_push", later),
            make_device("x", "apns", sealed=bytes(range(256)) * 32),
        ]
        await self.set_devices(BOB, *devices)
        self.assertEqual(await self.devices.list_devices(BOB), devices)
        self.assertEqual(await self.devices.list_devices(BOB, "web_push"), devices[1:2])
        self.assertEqual(await self.devices.list_devices(BOB, None), devices)
        self.assertEqual(await self.list_names(BOB, "none"), [])
        self.assertEqual((await self.list_names(), await self.list_names(CAROL)), (["alice"], ["carol"]))
        self.assertEqual(await self.list_names("did:example:nobody"), [])
        self.assertEqual(await self.list_names("did:decentrl:nobody"), [])

    async def test_replaces_device_of_same_id(self) -> None:
        """A device of the same id is replaced, and keeps its place."""
        await self.set_devices(BOB, make_device("a"), make_device("b"))
        changed = make_device("a", expires_at=self.clock.seconds() + HOUR, sealed=b"changed")
        await self.set_devices(BOB, changed)
        self.assertEqual(await self.devices.list_devices(BOB), [changed, make_device("b")])
        self.assertEqual(await self.devices.count_devices(), {"fcm": 3, "web_push": 1})

    async def test_moves_device_from_another_owner(self) -> None:
        """A device of the same id moves here from its former owner, of either protocol, as the last one."""
        await self.set_devices(BOB, make_device("b"), make_device("alice"), make_device("carol", "web_push"))
        self.assertEqual(await self.list_names(BOB), ["b", "alice", "carol"])
        self.assertEqual((await self.list_names(), await self.list_names(CAROL)), ([], []))
        await self.set_devices(CAROL, make_device("alice"))
        self.assertEqual((await self.list_names(CAROL), await self.list_names(BOB)), (["alice"], ["b", "carol"]))

    async def test_refuses_device_without_account(self) -> None:
        """A device of a DID without account, or of an identity that is not registered, is refused."""
        await self.register_dids("did:decentrl:brief", ttl=10.0)
        await self.pass_time(11.0)
        for owner in ("did:example:nobody", "did:decentrl:nobody", "did:decentrl:brief"):
            with self.assertRaises(MediationNotGranted):
                await self.set_devices(owner, make_device("alice"))
        self.assertEqual(await self.list_names(), ["alice"])

    async def test_limits_devices(self) -> None:
        """One device too many is refused, and changes nothing; one can be replaced, and expired ones do not count."""
        names = [f"device {number}" for number in range(MAX_DEVICES)]
        await self.set_devices(BOB, *map(make_device, names))
        for other in (make_device("one more"), make_device("alice")):
            with self.assertRaises(TooManyDevices):
                await self.set_devices(BOB, other)
        self.assertEqual((await self.list_names(BOB), await self.list_names()), (names, ["alice"]))
        await self.set_devices(BOB, make_device(names[3], expires_at=self.clock.seconds() + 10.0))
        with self.assertRaises(TooManyDevices):
            await self.set_devices(BOB, make_device("one more"))
        await self.pass_time(11.0)
        await self.set_devices(BOB, make_device("one more"))
        self.assertEqual(await self.list_names(BOB), [*names[:3], *names[4:], "one more"])

    async def test_replaces_device_above_limit(self) -> None:
        """A device can be replaced while there are more than a limit that was lowered."""
        await self.set_devices(BOB, make_device("a"), make_device("b"))
        await self.set_devices(BOB, make_device("a", sealed=b"new"), max_devices=1)
        self.assertEqual(await self.list_names(BOB), ["a", "b"])

    async def test_removes_devices_of_service(self) -> None:
        """All devices of an owner with one service are removed, and those of nobody else."""
        await self.set_devices(BOB, make_device("a"), make_device("b", "apns"), make_device("c"))
        self.assertEqual(await self.devices.remove_devices(BOB, "fcm"), 2)
        self.assertEqual(await self.devices.remove_devices(BOB, "fcm"), 0)
        self.assertEqual(await self.devices.remove_devices("did:example:nobody", "fcm"), 0)
        self.assertEqual((await self.list_names(BOB), await self.list_names()), (["b"], ["alice"]))
        self.assertEqual(await self.devices.remove_devices(CAROL, "web_push"), 1)
        self.assertEqual(await self.list_names(CAROL), [])

    async def test_forgets_devices_by_id(self) -> None:
        """Devices are removed by id, whoever has them; unknown ids are ignored."""
        await self.set_devices(BOB, make_device("a"), make_device("b"))
        ids = [make_device(name).id for name in ("a", "alice", "carol", "unknown", "a")]
        self.assertEqual(await self.devices.forget_devices(ids), 3)
        self.assertEqual(await self.devices.forget_devices(ids), 0)
        self.assertEqual(await self.devices.forget_devices([]), 0)
        self.assertEqual([await self.list_names(owner) for owner in (ALICE, BOB, CAROL)], [[], ["b"], []])

    async def test_expires_devices(self) -> None:
        """Expired devices are not listed, and at most so many are removed at once."""
        now = self.clock.seconds()
        expiring = [make_device(f"{number}", "web_push", now + 10.0 + number / 100) for number in range(5)]
        await self.set_devices(BOB, *expiring, make_device("late", "web_push", now + HOUR), make_device("never"))
        self.assertEqual(await self.devices.expire_devices(100), 0)
        await self.pass_time(11.0)
        self.assertEqual(await self.list_names(BOB), ["late", "never"])
        self.assertEqual([await self.devices.expire_devices(limit) for limit in (2, 0, 100, 100)], [2, 0, 3, 0])
        self.assertEqual(await self.list_names(BOB), ["late", "never"])
        self.assertEqual(await self.devices.count_devices(), {"fcm": 2, "web_push": 2})

    async def test_scans_devices(self) -> None:
        """Devices of all owners are read in slices, in the order of their ids."""
        later = make_device("b", "web_push", self.clock.seconds() + HOUR + 0.1234567)
        await self.set_devices(BOB, make_device("z"), later)
        found: list[Device] = []
        while some := await self.devices.scan_devices(found[-1].id if found else b"", 3):
            self.assertLessEqual(len(some), 3)
            found += some
        self.assertEqual(found, [make_device("alice"), later, make_device("carol", "web_push"), make_device("z")])
        self.assertEqual(await self.devices.scan_devices(b"", 0), [])

    async def test_reseals_devices(self) -> None:
        """What is sealed is replaced where it is as it was read, and nothing else changes."""
        later = self.clock.seconds() + HOUR
        old = [make_device(name, "web_push", later) for name in ("a", "b", "c")]
        await self.set_devices(BOB, *old)
        await self.set_devices(BOB, make_device("b", "web_push", later, b"registered again"))
        await self.devices.forget_devices([old[2].id])
        await self.devices.reseal_devices([(one, b"new") for one in (*old, make_device("alice"))])
        await self.devices.reseal_devices([])
        new = Device(old[0].id, "web_push", b"new", later)
        self.assertEqual(
            await self.devices.list_devices(BOB), [new, make_device("b", "web_push", later, b"registered again")]
        )
        self.assertEqual(await self.devices.list_devices(ALICE), [Device(make_device("alice").id, "fcm", b"new")])

    async def test_counts_devices_by_service(self) -> None:
        """Devices are counted by service; services without any are left out."""
        await self.set_devices(BOB, make_device("a"), make_device("b", "apns"))
        self.assertEqual(await self.devices.count_devices(), {"apns": 1, "fcm": 2, "web_push": 1})
        await self.devices.remove_devices(BOB, "apns")
        self.assertEqual(await self.devices.count_devices(), {"fcm": 2, "web_push": 1})

    async def test_devices_follow_moved_account(self) -> None:
        """Devices and the state of wake-ups follow an account to its new DID."""
        await self.enqueue_ids("m")
        await self.wake()
        await self.pass_time(5.0)
        self.assertTrue(await self.store.move_account(ALICE, "did:example:alice2"))
        self.assertEqual((await self.list_names("did:example:alice2"), await self.list_names()), (["alice"], []))
        self.assertIsNone(await self.claim("did:example:alice2"))
        self.assertIsNone(await self.claim())

    async def test_devices_are_removed_with_account(self) -> None:
        """Devices and the state of wake-ups are removed with the account, however that is removed."""
        await self.set_devices(BOB, make_device("b"))
        await self.poll(BOB)
        self.assertTrue(await self.store.administration.remove_account(BOB))
        await self.set_devices_refused(BOB)
        self.assertEqual(await self.devices.count_devices(), {"fcm": 1, "web_push": 1})
        await self.pass_time(10.0)
        now = self.clock.seconds()
        expired = await self.store.expire_accounts(10, unused_before=None, idle_before=now - 5.0)
        self.assertEqual([one.did for one in expired], [ALICE])
        self.assertEqual(await self.devices.count_devices(), {"web_push": 1})
        await self.store.grant(BOB)
        await self.register(BOB, OTHER)
        await self.enqueue_ids("m", to=OTHER)
        self.assertEqual(await self.list_names(BOB), [])
        await self.set_devices(BOB, make_device("b"))
        # The poll before is forgotten: it does not count for this account.
        self.assertIsInstance(await self.claim(BOB, age=15.0), WakeupClaim)

    async def set_devices_refused(self, owner: str) -> None:
        with self.assertRaises(MediationNotGranted):
            await self.set_devices(owner, make_device("refused"))
        self.assertEqual(await self.list_names(owner), [])

    async def test_devices_are_removed_with_last_registration(self) -> None:
        """Devices of an identity are removed with its last registration, not with an earlier one."""
        await self.register_dids(CAROL, ttl=3 * HOUR)
        await self.pass_time(2 * HOUR)
        await self.store.prune_nonces()
        self.assertEqual(await self.list_names(CAROL), ["carol"])
        await self.pass_time(2 * HOUR)
        await self.store.prune_nonces()
        self.assertEqual(await self.list_names(CAROL), [])
        self.assertEqual(await self.devices.count_devices(), {"fcm": 1})
        await self.register_dids(CAROL)
        self.assertEqual(await self.list_names(CAROL), [])

    async def test_devices_survive_renewal_of_registration(self) -> None:
        """Devices of an identity stay when it registers again before an expired registration was removed."""
        await self.pass_time(2 * HOUR)
        await self.register_dids(CAROL)
        self.assertEqual(await self.list_names(CAROL), ["carol"])

    async def test_devices_survive_restart(self) -> None:
        """Devices are known to other processes."""
        other = self.make_second_store()
        await other.open()
        self.assertEqual(await other.devices.list_devices(ALICE), [make_device("alice")])
        await other.close()

    async def test_fails_after_close(self) -> None:
        """All operations fail after close."""
        await self.store.close()
        calls: list[Deferred[Any]] = [
            self.devices.set_device(ALICE, make_device("a"), 1),
            self.devices.list_devices(ALICE),
            self.devices.remove_devices(ALICE, "fcm"),
            self.devices.forget_devices([make_device("a").id]),
            self.devices.expire_devices(1),
            self.devices.count_devices(),
            self.devices.scan_devices(b"", 1),
            self.devices.reseal_devices([(make_device("a"), b"new")]),
            self.devices.record_polls({ALICE: 0.0}),
            self.devices.claim_wakeups([WakeupRequest(ALICE)], POLICY),
            self.devices.finish_wakeups([FinishedWakeup(ALICE, 0.0)]),
            self.devices.find_owed_wakeups("", 1, POLICY),
        ]
        for failing in calls:
            with self.assertRaises(StoreUnavailable):
                await failing


class WakeupContract(DeviceStoreContract):
    """Contract of claims of wake-ups."""

    async def test_claims_wakeup(self) -> None:
        """An owner that was never woken is woken for a pending message: with devices, messages and bytes."""
        expired = make_device("expired", expires_at=self.clock.seconds() + 1.0)
        await self.set_devices(ALICE, make_device("second", "apns"), expired)
        await self.register(ALICE, OTHER)
        await self.enqueue_ids("m1", "m2", data=b"12345")
        await self.enqueue_ids("m3", to=OTHER, data=b"123")
        await self.pass_time(2.0)
        devices = make_device("alice"), make_device("second", "apns")
        self.assertEqual(await self.claim(), WakeupClaim(ALICE, devices, 3, 13))

    async def test_claims_wakeup_of_decentrl_identity(self) -> None:
        """A Decentrl identity is woken for a pending event."""
        self.assertIsNone(await self.claim(CAROL))
        await self.deliver_events("e1", "e2", to=CAROL, sender=DAVE, payload="12345")
        self.assertEqual(await self.claim(CAROL), WakeupClaim(CAROL, (make_device("carol", "web_push"),), 2, 10))
        await self.decentrl.acknowledge_events(self.make_guard(CAROL), CAROL, ["e1", "e2"])
        await self.pass_time(HOUR / 2)
        self.assertIsNone(await self.claim(CAROL))

    async def test_names_newest_messages(self) -> None:
        """A claim has the ids of so many of the newest visible pending messages, the newest first."""
        policy = WakeupPolicy(20.0, 10.0, max_message_ids=3)
        await self.register(ALICE, OTHER)
        await self.enqueue_ids("m1", "m2")
        await self.enqueue_ids("m3", to=OTHER)
        await self.enqueue_ids("m4", "m5")
        await self.enqueue_ids("delayed", delay=100.0)
        await self.store.mark_delivered(["m4"])
        await self.deliver_events("e1", "e2", "e3", "e4", to=CAROL, sender=DAVE)
        claims = await self.devices.claim_wakeups([WakeupRequest(ALICE), WakeupRequest(CAROL)], policy)
        ids = [claim.message_ids for claim in claims if isinstance(claim, WakeupClaim)]
        self.assertEqual(ids, [("m5", "m3", "m2"), ("e4", "e3", "e2")])

    async def test_does_not_wake_without_device(self) -> None:
        """An owner without a device that has not expired is not woken, unless the policy says so."""
        await self.register(BOB, OTHER)
        await self.enqueue_ids("m", to=OTHER, data=b"123")
        await self.set_devices(BOB, make_device("expired", expires_at=self.clock.seconds() + 1.0))
        await self.pass_time(2.0)
        self.assertIsNone(await self.claim(BOB))
        self.assertEqual(await self.claim(BOB, policy=WITHOUT_DEVICES), WakeupClaim(BOB, (), 1, 3))
        await self.save_contracts("dave with carol", owner=DAVE, peer=CAROL)
        await self.deliver_events("e", to=DAVE, sender=CAROL, payload="1234")
        self.assertIsNone(await self.claim(DAVE))
        self.assertEqual(await self.claim(DAVE, policy=WITHOUT_DEVICES), WakeupClaim(DAVE, (), 1, 4))
        for nobody in ("did:example:nobody", "did:decentrl:nobody"):
            self.assertIsNone(await self.claim(nobody, policy=WITHOUT_DEVICES))

    async def test_does_not_wake_without_pending_message(self) -> None:
        """An owner is not woken without a message that is visible and pending."""
        self.assertIsNone(await self.claim())
        await self.enqueue_ids("expiring", ttl=10.0)
        await self.enqueue_ids("delayed", delay=60.0)
        await self.enqueue_ids("delivered")
        await self.store.mark_delivered(["delivered"])
        await self.pass_time(11.0)
        self.assertIsNone(await self.claim())
        await self.store.mark_pending(["delivered"])
        self.assertIsInstance(await self.claim(), WakeupClaim)

    async def test_wakes_for_message_that_became_visible(self) -> None:
        """An owner is woken for a delayed message once it is due, taken or not."""
        for id in ("taken", "not taken"):
            await self.enqueue_ids(id, delay=60.0)
            await self.pass_time(61.0)
            if id == "taken":
                self.assertEqual([one.id for one in await self.store.take_due_messages(10)], [id])
            self.assertIsInstance(await self.claim(), WakeupClaim)
            await self.finish()
            await self.store.acknowledge(ALICE, [id])

    async def test_older_message_counts(self) -> None:
        """An older visible pending message counts as well."""
        await self.enqueue_ids("m")
        await self.enqueue_ids("delayed", delay=60.0)
        await self.enqueue_ids("delivered")
        await self.store.mark_delivered(["delivered"])
        self.assertIsInstance(await self.claim(), WakeupClaim)

    async def test_many_undeliverable_messages(self) -> None:
        """A message behind any number of others that do not count is woken for."""
        await self.enqueue_ids("m")
        for start in range(0, 300, 100):
            await self.enqueue_ids(*(f"delayed {start + number}" for number in range(100)), delay=60.0)
        self.assertIsInstance(await self.claim(), WakeupClaim)

    async def test_poll_after_arrival_counts(self) -> None:
        """A poll that was not before the arrival of the message means that the owner knows of it."""
        await self.enqueue_ids("m")
        await self.poll()
        self.assertIsNone(await self.claim(age=self.clock_tolerance))
        await self.pass_time(15.0)
        self.assertIsNone(await self.claim(age=15.0 + self.clock_tolerance))
        self.assertIsInstance(await self.claim(age=5.0), WakeupClaim)

    async def test_quiet_after_poll(self) -> None:
        """An owner is not woken so many seconds after its last poll."""
        await self.enqueue_ids("m")
        await self.poll()
        await self.pass_time(4.0)
        self.assert_waits(await self.claim(age=1.0), 6.0)
        await self.pass_time(3.0)
        self.assert_waits(await self.claim(age=4.0), 3.0)
        await self.pass_time(3.0 + self.clock_tolerance)
        self.assertIsInstance(await self.claim(age=7.0), WakeupClaim)

    async def test_records_latest_poll(self) -> None:
        """Of several polls the latest counts, in whichever order they are recorded."""
        await self.enqueue_ids("m")
        await self.poll(age=2.0)
        await self.poll(age=9.0)
        await self.pass_time(1.0)
        self.assert_waits(await self.claim(), 7.0)

    async def test_records_no_poll_of_others(self) -> None:
        """Polls of owners that were never woken and have no device are left out, as are unknown ones."""
        await self.register(BOB, OTHER)
        await self.enqueue_ids("m", to=OTHER)
        await self.devices.record_polls({BOB: 0.0, "did:example:nobody": 0.0, "did:decentrl:nobody": 0.0})
        await self.devices.record_polls({})
        await self.pass_time(1.0)
        self.assertIsInstance(await self.claim(BOB, policy=WITHOUT_DEVICES), WakeupClaim)
        await self.finish(BOB)
        await self.pass_time(30.0)
        await self.devices.record_polls({BOB: 0.0, CAROL: 0.0})
        await self.pass_time(1.0)
        self.assert_waits(await self.claim(BOB, policy=WITHOUT_DEVICES), 9.0)
        await self.deliver_events("e", to=CAROL, sender=DAVE)
        self.assert_waits(await self.claim(CAROL), 9.0)

    async def test_claimed_wakeup_is_not_claimed_again(self) -> None:
        """Of a claimed wake-up others are told when the lease ends."""
        await self.enqueue_ids("m")
        self.assertIsInstance(await self.claim(), WakeupClaim)
        self.assert_waits(await self.claim(), 30.0)
        await self.pass_time(10.0)
        self.assert_waits(await self.claim(), 20.0)

    async def test_lease_lapses(self) -> None:
        """A claim that is never finished, as after a crash, can be claimed by another process once its lease ends."""
        policy = WakeupPolicy(20.0, 10.0, lease=30.0)
        await self.enqueue_ids("m")
        self.assertIsInstance(await self.claim(policy=policy), WakeupClaim)
        other = self.make_second_store()
        await other.open()
        self.assertEqual(await self.find_owed(), [ALICE])
        await self.pass_time(10.0)
        (decision,) = await other.devices.claim_wakeups([WakeupRequest(ALICE, 10.0)], policy)
        self.assert_waits(decision, 20.0)
        await self.pass_time(20.0 + self.clock_tolerance)
        (decision,) = await other.devices.claim_wakeups([WakeupRequest(ALICE, 30.0)], policy)
        self.assertIsInstance(decision, WakeupClaim)
        await other.close()

    async def test_one_of_two_stores_wins(self) -> None:
        """Of two processes that claim at the same time one wins, for each of many owners."""
        other = self.make_second_store()
        await other.open()
        owners = [f"did:example:owner{number}" for number in range(20)]
        for number, owner in enumerate(owners):
            await self.store.grant(owner)
            await self.register(owner, f"did:key:z6Mk{number}")
            await self.set_devices(owner, make_device(f"device {number}"))
            await self.enqueue_ids(f"m{number}", to=f"did:key:z6Mk{number}")
        requests = [WakeupRequest(owner) for owner in owners]
        claims = [store.devices.claim_wakeups([one], POLICY) for one in requests for store in (self.store, other)]
        batches = [store.devices.claim_wakeups(requests, POLICY) for store in (other, self.store)]
        decisions = await gatherResults(claims + batches)
        claimed = [one.owner for some in decisions for one in some if isinstance(one, WakeupClaim)]
        waiting = [one for some in decisions for one in some if isinstance(one, float)]
        self.assertEqual((sorted(claimed), len(waiting)), (sorted(owners), 3 * len(owners)))
        await other.close()

    async def test_many_messages_are_one_wakeup(self) -> None:
        """Ten thousand messages to a sleeping owner are one wake-up, asked for together or one after the other."""
        for start in range(0, 10_000, 500):
            await self.enqueue_ids(*(f"m{start + number}" for number in range(500)), data=b"12345")
        decisions: list[WakeupDecision] = []
        for _ in range(10):
            decisions += await self.devices.claim_wakeups([WakeupRequest(ALICE)] * 1000, POLICY)
        claims = [one for one in decisions if isinstance(one, WakeupClaim)]
        self.assertEqual(claims, [WakeupClaim(ALICE, (make_device("alice"),), 10_000, 50_000)])
        await self.devices.finish_wakeups([FinishedWakeup(ALICE, claims[0].claim)])
        decisions = await self.devices.claim_wakeups([WakeupRequest(ALICE)] * 1000, POLICY)
        self.assertEqual(set(decisions), {None})

    async def test_decides_in_order_of_requests(self) -> None:
        """Decisions have the order of the requests, whatever the protocol of each."""
        await self.enqueue_ids("m")
        await self.deliver_events("e", to=CAROL, sender=DAVE)
        owners = [BOB, CAROL, "did:example:nobody", ALICE, DAVE]
        decisions = await self.devices.claim_wakeups([WakeupRequest(owner) for owner in owners], POLICY)
        self.assertEqual([getattr(one, "owner", one) for one in decisions], [None, CAROL, None, ALICE, None])
        self.assertEqual(await self.devices.claim_wakeups([], POLICY), [])

    async def test_unanswered_wakeup_stands_for_messages(self) -> None:
        """A wake-up that was not answered stands for messages that arrive until `min_interval` after it."""
        await self.enqueue_ids("m")
        await self.wake()
        await self.pass_time(5.0)
        self.assertIsNone(await self.claim())
        await self.pass_time(18.0)
        self.assertIsNone(await self.claim(age=4.0 + self.clock_tolerance))
        self.assertIsInstance(await self.claim(age=1.0), WakeupClaim)

    async def test_min_interval_after_answered_wakeup(self) -> None:
        """An owner that has answered its last wake-up is woken `min_interval` after it at the earliest."""
        await self.enqueue_ids("m")
        await self.wake()
        await self.pass_time(1.0)
        await self.poll()
        await self.pass_time(1.0)
        self.assert_waits(await self.claim(), 18.0)
        await self.pass_time(18.0 + self.clock_tolerance)
        self.assertIsInstance(await self.claim(age=18.0), WakeupClaim)
        await self.finish()
        await self.pass_time(15.0)
        await self.poll()
        await self.pass_time(1.0)
        self.assert_waits(await self.claim(), 9.0)

    async def test_woken_is_time_of_claim(self) -> None:
        """The time of a wake-up that was sent is that of its claim: a poll between the two has answered it."""
        await self.enqueue_ids("m")
        self.assertIsInstance(await self.claim(), WakeupClaim)
        await self.pass_time(5.0)
        await self.poll()
        await self.pass_time(5.0)
        await self.finish()
        self.assert_waits(await self.claim(age=1.0), 10.0)

    async def test_retry_stays_claimed(self) -> None:
        """A wake-up that is to be repeated stays claimed until then, and is not counted as sent."""
        await self.enqueue_ids("m")
        self.assertIsInstance(await self.claim(), WakeupClaim)
        await self.finish(retry_in=100.0)
        await self.pass_time(40.0)
        self.assert_waits(await self.claim(age=40.0), 60.0)
        self.assertEqual(await self.find_owed(), [ALICE])
        await self.pass_time(60.0 + self.clock_tolerance)
        self.assertIsInstance(await self.claim(age=100.0), WakeupClaim)

    async def test_retry_is_not_claimed_after_poll(self) -> None:
        """A wake-up that is to be repeated is not due any more when the owner has polled meanwhile."""
        await self.enqueue_ids("m")
        self.assertIsInstance(await self.claim(), WakeupClaim)
        await self.finish(retry_in=30.0)
        await self.pass_time(10.0)
        await self.poll()
        await self.pass_time(20.0 + self.clock_tolerance)
        self.assertIsNone(await self.claim(age=30.0))
        self.assertEqual(await self.find_owed(), [])

    async def test_finishing_without_claim_changes_nothing(self) -> None:
        """The end of an attempt of which there is no claim, or no owner any more, changes nothing."""
        await self.enqueue_ids("m")
        for claim in (b"claim", 0.0):
            finished = [FinishedWakeup(ALICE, claim), FinishedWakeup("did:example:nobody", claim, 50.0)]
            await self.devices.finish_wakeups([*finished, FinishedWakeup(ALICE, claim, 50.0)])
        await self.devices.finish_wakeups([])
        self.assertIsInstance(await self.claim(), WakeupClaim)
        await self.finish()
        await self.finish(retry_in=50.0)
        await self.pass_time(20.0 + self.clock_tolerance)
        self.assertIsInstance(await self.claim(), WakeupClaim)

    async def test_lapsed_claim_ends_no_later_one(self) -> None:
        """A process whose lease has ended does not end the claim that another one made since; that one does."""
        await self.enqueue_ids("m")
        self.assertIsInstance(await self.claim(), WakeupClaim)
        lapsed = self.claims[ALICE]
        await self.pass_time(30.0 + self.clock_tolerance)
        self.assertIsInstance(await self.claim(age=30.0), WakeupClaim)
        for retry_in in (None, 0.0, 90.0):
            await self.devices.finish_wakeups([FinishedWakeup(ALICE, lapsed, retry_in)])
            self.assert_waits(await self.claim(age=30.0), 30.0)
        finished = [FinishedWakeup(ALICE, claim) for claim in (self.claims[ALICE], lapsed)]
        await self.devices.finish_wakeups(finished)
        self.assertIsNone(await self.claim(age=30.0))

    async def test_finishes_several(self) -> None:
        """Several attempts end in one call, each in its way."""
        await self.enqueue_ids("m")
        await self.deliver_events("e", to=CAROL, sender=DAVE)
        await self.claim()
        await self.claim(CAROL)
        finished = [FinishedWakeup(CAROL, self.claims[CAROL], 7.0), FinishedWakeup(ALICE, self.claims[ALICE])]
        await self.devices.finish_wakeups(finished)
        first, second = await self.devices.claim_wakeups([WakeupRequest(ALICE), WakeupRequest(CAROL)], POLICY)
        self.assertIsNone(first)
        self.assert_waits(second, 7.0)


class OwedWakeupContract(DeviceStoreContract):
    """Contract of the search for wake-ups that were never sent."""

    async def test_finds_owners_that_were_not_woken(self) -> None:
        """Owners with pending messages, a device, and no wake-up since are found; nothing is changed."""
        self.assertEqual(await self.find_owed(), [])
        await self.enqueue_ids("m")
        await self.deliver_events("e", to=CAROL, sender=DAVE)
        await self.register(BOB, OTHER)
        await self.enqueue_ids("no device", to=OTHER)
        self.assertEqual(await self.find_owed(), [CAROL, ALICE])
        self.assertEqual(await self.find_owed(WITHOUT_DEVICES), [CAROL, ALICE, BOB])
        await self.wake()
        self.assertEqual(await self.find_owed(), [CAROL])
        await self.wake(CAROL)
        self.assertEqual(await self.find_owed(), [])

    async def test_finds_owner_whose_first_device_expired(self) -> None:
        """An owner is found by any of its devices that has not expired, wherever a slice ends."""
        await self.register(BOB, OTHER)
        await self.enqueue_ids("m", to=OTHER)
        expiring = [make_device(f"{number}", "web_push", self.clock.seconds() + 1.0) for number in range(3)]
        await self.set_devices(BOB, *expiring, make_device("bob"))
        await self.pass_time(2.0)
        for limit in range(1, 6):
            self.assertEqual(await self.find_owed(limit=limit), [BOB])

    async def test_finds_claimed_owners(self) -> None:
        """An owner whose wake-up is claimed, and was perhaps never sent, is included."""
        await self.enqueue_ids("m")
        self.assertIsInstance(await self.claim(), WakeupClaim)
        self.assertEqual(await self.find_owed(), [ALICE])

    async def test_messages_that_are_not_pending_are_owed_nothing(self) -> None:
        """Nothing is owed for messages that are expired, delayed, or delivered; it is once they are pending."""
        await self.enqueue_ids("expiring", ttl=10.0)
        await self.enqueue_ids("delayed", delay=60.0)
        await self.enqueue_ids("delivered")
        await self.store.mark_delivered(["delivered"])
        await self.pass_time(11.0)
        self.assertEqual(await self.find_owed(), [])
        await self.store.mark_pending(["delivered"])
        self.assertEqual(await self.find_owed(), [ALICE])

    async def test_finds_message_that_became_visible(self) -> None:
        """A delayed message counts from the time at which it became visible, also behind newer ones."""
        await self.enqueue_ids("taken", delay=30.0)
        await self.enqueue_ids("not taken", delay=60.0)
        await self.enqueue_ids("m")
        await self.wake()
        for _ in range(2):
            await self.pass_time(30.0)
            if not await self.store.take_due_messages(1):
                self.fail("nothing was due")
            self.assertEqual(await self.find_owed(), [ALICE])
            await self.pass_time(1.0)
            await self.poll()
            self.assertEqual(await self.find_owed(), [])

    async def test_newest_of_several_queues_counts(self) -> None:
        """The newest message of all queues of an account counts."""
        await self.register(ALICE, OTHER)
        await self.enqueue_ids("m1")
        await self.enqueue_ids("m2", to=OTHER)
        await self.pass_time(1.0)
        await self.poll()
        self.assertEqual(await self.find_owed(), [])
        await self.pass_time(1.0)
        await self.enqueue_ids("m3", to=OTHER)
        self.assertEqual(await self.find_owed(), [ALICE])

    async def test_answered_wakeup_stands_for_nothing(self) -> None:
        """A message that arrived after a poll which answered the last wake-up is owed one."""
        await self.enqueue_ids("m1")
        await self.wake()
        await self.pass_time(1.0)
        await self.poll()
        self.assertEqual(await self.find_owed(), [])
        await self.pass_time(1.0)
        await self.enqueue_ids("m2")
        self.assertEqual(await self.find_owed(), [ALICE])

    async def test_unanswered_wakeup_stands_for_messages(self) -> None:
        """A wake-up that was not answered stands for messages that arrived until `min_interval` after it."""
        await self.enqueue_ids("m1")
        await self.wake()
        await self.pass_time(5.0)
        await self.enqueue_ids("m2")
        await self.pass_time(HOUR / 2)
        self.assertEqual(await self.find_owed(), [])
        await self.enqueue_ids("m3")
        self.assertEqual(await self.find_owed(), [ALICE])

    async def test_repeats_unanswered_wakeup(self) -> None:
        """An unanswered wake-up is owed again after `repeat_after`, while messages wait and if that is not 0."""
        await self.enqueue_ids("m")
        await self.wake()
        await self.pass_time(60.0)
        self.assertEqual(await self.find_owed(repeat_after=100.0), [])
        await self.pass_time(40.0 + self.clock_tolerance)
        self.assertEqual(await self.find_owed(repeat_after=100.0), [ALICE])
        self.assertEqual(await self.find_owed(), [])
        await self.wake()
        self.assertEqual(await self.find_owed(repeat_after=100.0), [])
        await self.pass_time(101.0)
        await self.poll()
        self.assertEqual(await self.find_owed(repeat_after=100.0), [])

    async def test_does_not_repeat_without_messages(self) -> None:
        """An unanswered wake-up is not repeated when its messages are gone, or were known before."""
        await self.enqueue_ids("known")
        await self.pass_time(1.0)
        await self.poll()
        await self.pass_time(15.0)
        await self.enqueue_ids("m")
        await self.wake()
        await self.pass_time(101.0)
        self.assertEqual(await self.find_owed(repeat_after=100.0), [ALICE])
        await self.store.remove_messages(["m"])
        self.assertEqual(await self.find_owed(repeat_after=100.0), [])

    async def test_walks_in_slices(self) -> None:
        """Slices of any size find the same owners, each once."""
        everybody = [ALICE, CAROL]
        await self.enqueue_ids("m")
        await self.deliver_events("e", to=CAROL, sender=DAVE)
        for number in range(7):
            did, inbox = f"did:example:{number}", f"did:key:z6Mk{number}"
            await self.store.grant(did)
            await self.register(did, inbox, f"{inbox}b")
            await self.enqueue_ids(f"m{number}", to=inbox)
            await self.enqueue_ids(f"n{number}", to=f"{inbox}b")
            if number % 2:
                await self.set_devices(did, make_device(did[-8:]))
                everybody.append(did)
        for limit in (1, 2, 3, 5, 100):
            self.assertEqual(await self.find_owed(limit=limit), sorted(everybody))

    async def test_search_reads_bounded_slices(self) -> None:
        """A slice ends after some owners, whether they are owed a wake-up or not."""
        for number in range(30):
            did, inbox = f"did:example:{number}", f"did:key:z6Mk{number}"
            await self.store.grant(did)
            await self.register(did, inbox)
            await self.enqueue_ids(f"m{number}", to=inbox)
        slices: list[Any] = [await self.devices.find_owed_wakeups("", 10, WITHOUT_DEVICES)]
        while slices[-1][1] is not None:
            slices.append(await self.devices.find_owed_wakeups(slices[-1][1], 10, WITHOUT_DEVICES))
        self.assertGreaterEqual(len(slices), 3)
        self.assertEqual(sorted(self._join(slices)), sorted(f"did:example:{number}" for number in range(30)))

    def _join(self, slices: Sequence[tuple[list[str], str | None]]) -> list[str]:
        return [owner for owners, _ in slices for owner in owners]

    async def test_owner_of_other_process(self) -> None:
        """A process finds what another one did not send, after that has crashed."""
        await self.enqueue_ids("m")
        await self.claim()
        other = self.make_second_store()
        await other.open()
        owed, after = await other.devices.find_owed_wakeups("", 10, POLICY)
        self.assertEqual(owed, [ALICE])
        await other.close()
