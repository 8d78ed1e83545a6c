"""Registries of devices on a store in memory, and values that wallets register."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from twisted.internet.defer import Deferred, fail, succeed

from mediatord.app.core_services import CoreServices
from mediatord.errors import MediationNotGranted, MediatorError, TooManyDevices
from mediatord.protocol.encoding import encode_base64url
from mediatord.push.devices import SERVICE_NAMES, DeviceSealer, ServiceName
from mediatord.push.registry import DeviceRegistry
from mediatord.store.interfaces.devices import Device

FCM = {"device_token": "bk3RNwTe3H0:CI2k_HHwgIpoDKCIZvvDMExUdFQ3P1", "device_platform": "android"}
APNS = {"device_token": "1234567890abcdef" * 4}
# Keys of RFC 8291, appendix A.
SUBSCRIPTION: dict[str, Any] = {
    "endpoint": "https://push.example.net/push/JzLQ3raZJfFBR0aqvOMsLrt54w4rJUsV",
    "expirationTime": None,
    "keys": {
        "p256dh": "BCVxsr7N_eNgVRqvHtD0zTZsEc6-VV-JvLexhqUzORcxaOzi6-AYWXvTBHm4bjyPjs7Vd8pZGH6SRpkNtoIAiw4",
        "auth": "BTBZMqHH6r4Tts7J_aSIgg",
    },
}


def make_public_key() -> str:
    """A public key on P-256, as user agents and mediators show theirs."""
    public = generate_private_key(SECP256R1()).public_key()
    return encode_base64url(public.public_bytes(Encoding.X962, PublicFormat.UncompressedPoint))


MEDIATOR_ID = "mediator-id"
VAPID_PUBLIC_KEY = make_public_key()


def make_subscription(**members: Any) -> dict[str, Any]:
    """What `PushSubscription.toJSON()` returns in a browser."""
    keys = {"p256dh": make_public_key(), "auth": encode_base64url(secrets.token_bytes(16))}
    return {"endpoint": "https://push.example/send/1", "expirationTime": None, "keys": keys, **members}


class FakeDeviceStore:
    """
    Devices by owner, in order of registration.

    :ivar owners: those that may register devices; None for anybody.
    :ivar fault: that every registration fails with.
    """

    def __init__(self) -> None:
        self.owners: set[str] | None = None
        self.fault: MediatorError | None = None
        self.devices: dict[bytes, tuple[str, Device]] = {}

    def set_device(self, owner: str, device: Device, max_devices: int) -> Deferred[None]:
        """As the store."""
        if self.fault is not None:
            return fail(self.fault)
        if self.owners is not None and owner not in self.owners:
            return fail(MediationNotGranted())
        others = [id_ for id_, (holder, _) in self.devices.items() if holder == owner and id_ != device.id]
        if len(others) >= max_devices:
            return fail(TooManyDevices())
        self.devices.pop(device.id, None)
        self.devices[device.id] = owner, device
        return succeed(None)

    def list_devices(self, owner: str, service: str | None = None) -> Deferred[list[Device]]:
        """As the store."""
        found = [one for holder, one in self.devices.values() if holder == owner and service in (None, one.service)]
        return succeed(found)

    def remove_devices(self, owner: str, service: str) -> Deferred[int]:
        """As the store."""
        found = [id_ for id_, (holder, one) in self.devices.items() if (holder, one.service) == (owner, service)]
        for id_ in found:
            del self.devices[id_]
        return succeed(len(found))

    def scan_devices(self, after: bytes, limit: int) -> Deferred[list[Device]]:
        """As the store."""
        return succeed([self.devices[id_][1] for id_ in sorted(self.devices) if id_ > after][:limit])

    def reseal_devices(self, changes: Sequence[tuple[Device, bytes]]) -> Deferred[None]:
        """As the store."""
        for old, sealed in changes:
            owner, found = self.devices[old.id]
            if found == old:
                self.devices[old.id] = owner, replace(old, sealed=sealed)
        return succeed(None)


class FakeQuota:
    """:ivar charged: bytes by address."""

    def __init__(self) -> None:
        self.charged: Counter[str] = Counter()

    async def charge(self, peer: str, size: int, accounts: int = 0) -> None:
        """Count them."""
        self.charged[peer] += size

    def refund(self, peer: str, size: int, accounts: int = 0) -> None:
        """Count them no more."""
        self.charged[peer] -= size


def make_registry(
    store: Any,
    quota: Any,
    services: Collection[ServiceName] = SERVICE_NAMES,
    max_devices: int = 3,
    keys: Sequence[bytes] = (b"k" * 32,),
) -> DeviceRegistry:
    """A registry with these services and secrets."""
    sealer = DeviceSealer(lambda: keys, secrets.token_bytes)
    return DeviceRegistry(store, sealer, quota, services, max_devices, MEDIATOR_ID, vapid_public_key=VAPID_PUBLIC_KEY)


def make_core_registry(core: CoreServices, services: Collection[ServiceName] = SERVICE_NAMES) -> DeviceRegistry:
    """A registry with these services on the store of a mediator."""
    return make_registry(core.store.devices, core.registrations, services)
