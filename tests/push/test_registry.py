"""Devices of an owner: sealed in the store, opened for whom they belong to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

from twisted.internet.defer import Deferred, fail
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import MediationNotGranted, StoreUnavailable, TooManyDevices, UnsupportedMessageType
from mediatord.push.devices import FCMDevice, PushDevice, ServiceName
from mediatord.push.registry import DeviceRegistry
from tests.push.registries import APNS, FCM, FakeDeviceStore, FakeQuota, make_registry, make_subscription

ALICE, BOB = "did:example:alice", "did:example:bob"
PEER = "192.0.2.1"


def parse(registry: DeviceRegistry, service: ServiceName, members: Mapping[str, Any]) -> PushDevice:
    """A device, which is valid."""
    device = registry.parse_device(service, members)
    assert device is not None
    return device


class RegistryTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.store = FakeDeviceStore()
        self.store.owners = {ALICE, BOB}
        self.quota = FakeQuota()
        self.registry = make_registry(self.store, self.quota)
        self.fcm = parse(self.registry, "fcm", FCM)
        self.web = parse(self.registry, "web_push", make_subscription())

    def set_device(self, owner: str, device: PushDevice) -> None:
        """Register a device."""
        self.successResultOf(Deferred.fromCoroutine(self.registry.set_device(owner, device, PEER)))

    def get_devices(self, owner: str, *service: ServiceName) -> list[PushDevice]:
        """Devices of an owner."""
        return self.successResultOf(Deferred.fromCoroutine(self.registry.get_devices(owner, *service)))

    def test_get(self) -> None:
        """Of one service, or of all, in order of registration."""
        self.set_device(ALICE, self.web)
        self.set_device(ALICE, self.fcm)
        self.assertEqual(self.get_devices(ALICE), [self.web, self.fcm])
        self.assertEqual(self.get_devices(ALICE, "fcm"), [self.fcm])
        self.assertEqual(self.get_devices(ALICE, "apns"), [])
        self.assertEqual(self.get_devices(BOB), [])

    def test_remove(self) -> None:
        """All of one service."""
        self.set_device(ALICE, self.web)
        self.set_device(ALICE, self.fcm)
        removed = Deferred.fromCoroutine(self.registry.remove_devices(ALICE, "fcm"))
        self.assertEqual(self.successResultOf(removed), 1)
        self.assertEqual(self.get_devices(ALICE), [self.web])

    def test_token_under_another_owner(self) -> None:
        """It moves: its id does not depend on the owner."""
        self.set_device(ALICE, self.fcm)
        self.set_device(BOB, self.fcm)
        self.assertEqual((self.get_devices(ALICE), self.get_devices(BOB)), ([], [self.fcm]))

    def test_store_sees_no_token(self) -> None:
        """What is stored does not contain what was registered."""
        self.set_device(ALICE, self.fcm)
        ((_, stored),) = self.store.devices.values()
        self.assertNotIn(FCM["device_token"].encode(), stored.sealed)

    def test_key_that_is_gone(self) -> None:
        """A device that no key opens is not shown."""
        self.set_device(ALICE, self.fcm)
        self.registry = make_registry(self.store, self.quota, keys=[b"x" * 32])
        self.assertEqual(self.get_devices(ALICE), [])

    def test_limit(self) -> None:
        """It counts devices of all services."""
        self.registry = make_registry(self.store, self.quota, max_devices=1)
        self.set_device(ALICE, self.fcm)
        self.set_device(ALICE, self.fcm)
        self.failureResultOf(Deferred.fromCoroutine(self.registry.set_device(ALICE, self.web, PEER)), TooManyDevices)

    def test_quota(self) -> None:
        """An address is charged for a device that the owner has not, once it is stored."""
        self.registry = make_registry(self.store, self.quota, max_devices=1)
        self.set_device(ALICE, self.fcm)
        ((_, stored),) = self.store.devices.values()
        self.set_device(ALICE, self.fcm)
        self.failureResultOf(Deferred.fromCoroutine(self.registry.set_device(ALICE, self.web, PEER)), TooManyDevices)
        self.assertEqual(self.quota.charged, {PEER: len(stored.sealed)})
        self.set_device(BOB, self.fcm)
        self.assertEqual(self.quota.charged, {PEER: 2 * len(stored.sealed)})

    def test_unknown_owner(self) -> None:
        """The error of the store."""
        refused = Deferred.fromCoroutine(self.registry.set_device("did:example:carol", self.fcm, PEER))
        self.failureResultOf(refused, MediationNotGranted)

    def test_services_that_are_not_configured(self) -> None:
        """Their devices are neither accepted nor shown, but can be removed."""
        self.set_device(ALICE, self.fcm)
        self.registry = make_registry(self.store, self.quota, services=["web_push", "apns"])
        self.assertEqual(self.registry.services, ("apns", "web_push"))
        self.failureResultOf(
            Deferred.fromCoroutine(self.registry.set_device(BOB, self.fcm, PEER)), UnsupportedMessageType
        )
        self.assertEqual(self.get_devices(ALICE), [])
        self.assertEqual(self.successResultOf(Deferred.fromCoroutine(self.registry.remove_devices(ALICE, "fcm"))), 1)

    def test_web_push_without_key(self) -> None:
        """There is no Web Push that no subscription can be made for."""
        with self.assertRaises(ValueError):
            DeviceRegistry(self.store, None, None, ["web_push"], 1, "")  # type: ignore[arg-type]

    def test_secrets_are_not_shown(self) -> None:
        """Neither a device nor its stored form shows them where it is logged by mistake."""
        for device, secret in ((self.fcm, FCM["device_token"]), (parse(self.registry, "apns", APNS), "abcdef")):
            self.assertNotIn(secret, repr(device))

    def reseal(self, registry: DeviceRegistry) -> int:
        """Let housekeeping seal devices again; number of its steps."""
        steps = 1
        while self.successResultOf(Deferred.fromCoroutine(registry.reseal_devices())):
            steps += 1
        return steps

    def test_former_key_is_not_needed_after_reseal(self) -> None:
        """After a rotation devices are sealed with the new key under the same ids; the former one can be retired."""
        old, new, root = b"o" * 32, b"n" * 32, b"r" * 32
        keys = [old, root]
        registry = make_registry(self.store, self.quota, max_devices=500, keys=keys)
        devices = [FCMDevice(f"token {number}", "android") for number in range(250)]
        self.registry = registry
        for device in devices:
            self.set_device(ALICE, device)
        before = dict(self.store.devices)
        self.reseal(registry)
        self.assertEqual(self.store.devices, before)
        keys[:] = [new, old, root]
        self.reseal(registry)
        self.assertEqual(list(self.store.devices), list(before))
        keys[:] = [new, root]
        self.assertEqual(self.get_devices(ALICE), devices)
        self.store.devices = before
        self.assertEqual(self.get_devices(ALICE), [])
        self.reseal(make_registry(self.store, self.quota, keys=keys))
        self.assertEqual(self.store.devices, before)

    def test_reseals_once_for_each_key(self) -> None:
        """All devices are read once for each current key, in slices; a slice that failed is repeated."""
        keys = [b"1" * 32]
        registry = make_registry(self.store, self.quota, max_devices=500, keys=keys)
        self.registry = registry
        for number in range(250):
            self.set_device(ALICE, FCMDevice(f"token {number}", "android"))
        with patch.object(self.store, "scan_devices", return_value=fail(StoreUnavailable())):
            self.failureResultOf(Deferred.fromCoroutine(registry.reseal_devices()), StoreUnavailable)
        with patch.object(self.store, "scan_devices", wraps=self.store.scan_devices) as scan:
            self.assertEqual((self.reseal(registry), scan.call_count), (4, 4))
            self.assertEqual((self.reseal(registry), scan.call_count), (1, 4))
            keys[0] = b"2" * 32
            self.assertEqual((self.reseal(registry), scan.call_count), (4, 8))
