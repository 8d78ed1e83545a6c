"""Devices of wallets: what identifies one at its push service, and how that is sealed for the store."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mediatord.store.interfaces.devices import DEVICE_ID_BYTES, Device

ServiceName = Literal["fcm", "apns", "web_push"]
SERVICE_NAMES: tuple[ServiceName, ...] = ("fcm", "apns", "web_push")


@dataclass(frozen=True, slots=True)
class FCMDevice:
    """
    An app at Firebase Cloud Messaging.

    :param platform: as the wallet named it, such as `android` or `ios`.
    """

    token: str = field(repr=False)
    platform: str


@dataclass(frozen=True, slots=True)
class APNsDevice:
    """:param token: device token of the Apple Push Notification service: hexadecimal digits."""

    token: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class WebPushDevice:
    """
    A push subscription (W3C Push API).

    :param p256dh: public key of the user agent: 65 bytes, base64url without padding.
    :param auth: authentication secret: 16 bytes, likewise.
    :param expires_at: seconds since the epoch; None for never.
    """

    endpoint: str = field(repr=False)
    p256dh: str = field(repr=False)
    auth: str = field(repr=False)
    expires_at: float | None = None


PushDevice = FCMDevice | APNsDevice | WebPushDevice

_NONCE_BYTES = 12


class DeviceSealer:
    """
    Encrypts registrations for the store, which reveals no token without the key file.

    :param secrets: returns secrets of the mediator, the current one first and the one that changes least often last.
        Devices are sealed with the first and opened with any; ids are made with the last, so that a device that
        registers again is known as long as that does not change.
    :param random_bytes: returns that many unpredictable bytes.
    """

    def __init__(self, secrets: Callable[[], Sequence[bytes]], random_bytes: Callable[[int], bytes]) -> None:
        self._secrets = secrets
        self._random_bytes = random_bytes

    def seal(self, device: PushDevice) -> Device:
        """The device as the store keeps it."""
        service, address, fields = _to_fields(device)
        secrets = self._secrets()
        id_ = hmac.digest(secrets[-1], b"mediatord device id " + orjson.dumps([service, address]), "sha256")
        id_ = id_[:DEVICE_ID_BYTES]
        sealed = self._encrypt(secrets[0], orjson.dumps(fields), service, id_)
        return Device(id_, service, sealed, device.expires_at if isinstance(device, WebPushDevice) else None)

    def open(self, device: Device) -> PushDevice | None:
        """The registration; None if it was sealed with a key that is gone, or is damaged."""
        for secret in self._secrets():
            plain = _decrypt(secret, device)
            if plain is not None:
                return _from_fields(device.service, orjson.loads(plain), device.expires_at)
        return None

    def reseal(self, device: Device) -> bytes | None:
        """What to keep instead, sealed with the first secret; None if that opens it already, or no secret does."""
        first, *others = self._secrets()
        if _decrypt(first, device) is None:
            for secret in others:
                plain = _decrypt(secret, device)
                if plain is not None:
                    return self._encrypt(first, plain, device.service, device.id)
        return None

    def get_current_secret(self) -> bytes:
        """The one that devices are sealed with."""
        return self._secrets()[0]

    def _encrypt(self, secret: bytes, plain: bytes, service: str, id_: bytes) -> bytes:
        nonce = self._random_bytes(_NONCE_BYTES)
        return nonce + _make_cipher(secret).encrypt(nonce, plain, service.encode() + id_)


def get_service_name(device: PushDevice) -> ServiceName:
    """The service that a device is registered with."""
    return _to_fields(device)[0]


def _decrypt(secret: bytes, device: Device) -> bytes | None:
    """None if it was sealed with another secret, or is damaged."""
    nonce, ciphertext = device.sealed[:_NONCE_BYTES], device.sealed[_NONCE_BYTES:]
    try:
        return _make_cipher(secret).decrypt(nonce, ciphertext, device.service.encode() + device.id)
    except (InvalidTag, ValueError):
        return None


def _make_cipher(secret: bytes) -> AESGCM:
    return AESGCM(hmac.digest(secret, b"mediatord push devices", "sha256"))


def _to_fields(device: PushDevice) -> tuple[ServiceName, str, list[str]]:
    """Service, what identifies the device there, and all fields."""
    match device:
        case FCMDevice(token, platform):
            return "fcm", token, [token, platform]
        case APNsDevice(token):
            return "apns", token, [token]
        case WebPushDevice(endpoint, p256dh, auth):
            return "web_push", endpoint, [endpoint, p256dh, auth]


def _from_fields(service: str, fields: list[str], expires_at: float | None) -> PushDevice | None:
    match service, fields:
        case "fcm", [token, platform]:
            return FCMDevice(token, platform)
        case "apns", [token]:
            return APNsDevice(token)
        case "web_push", [endpoint, p256dh, auth]:
            return WebPushDevice(endpoint, p256dh, auth, expires_at)
    return None
