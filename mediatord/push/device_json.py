"""
Devices in JSON, as wallets register them and see them again: members of `set-device-info` (Aries RFC 0734, 0699), and
a `PushSubscription` as browsers serialise it (W3C Push API).

Null and absent members are the same, as many serialisers leave nulls out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey

from mediatord.errors import InvalidBody, MissingDeviceValue
from mediatord.protocol import encoding
from mediatord.push.devices import APNsDevice, FCMDevice, PushDevice, ServiceName, WebPushDevice

# Characters. Tokens of FCM have about 160; Apple announces up to 100 bytes, and those in use have 32.
MAX_FCM_TOKEN = 4096
MAX_ENDPOINT = 2048
_PUBLIC_KEY_BYTES = 65
_AUTH_BYTES = 16
# Milliseconds since the epoch; the largest integer that JSON readers agree on.
_MAX_EXPIRATION = 2**53 - 1

_FCM_TOKEN = re.compile(rf"[!-~]{{1,{MAX_FCM_TOKEN}}}")
_PLATFORM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_APNS_TOKEN = re.compile(r"(?:[0-9A-Fa-f]{2}){32,100}")
_ENDPOINT = re.compile(rf"https?://[!-~]{{1,{MAX_ENDPOINT}}}", re.IGNORECASE)


def parse_device(service: ServiceName, members: Mapping[str, Any], *, allow_http: bool = False) -> PushDevice | None:
    """
    Read a registration; None if all its values are null, which removes the devices of the service.

    :param members: other than those of the service are ignored.
    :param allow_http: whether an endpoint of Web Push may be reached without TLS.
    :raise MissingDeviceValue: some values are null, and others are not.
    :raise InvalidBody: a value is malformed.
    """
    return _PARSERS[service](members, allow_http)


def format_device(device: PushDevice) -> dict[str, Any]:
    """The inverse of :func:`parse_device`."""
    match device:
        case FCMDevice(token, platform):
            return {"device_token": token, "device_platform": platform}
        case APNsDevice(token):
            return {"device_token": token}
        case WebPushDevice(endpoint, p256dh, auth, expires_at):
            milliseconds = None if expires_at is None else round(expires_at * 1000)
            return {
                "endpoint": endpoint,
                "expirationTime": milliseconds,
                "keys": {"p256dh": p256dh, "auth": auth},
            }


def _parse_fcm_device(members: Mapping[str, Any], _allow_http: bool) -> FCMDevice | None:
    values = [members.get("device_token"), members.get("device_platform")]
    if not _has_values(values):
        return None
    token, platform = values
    return FCMDevice(_require_match(_FCM_TOKEN, token), _require_match(_PLATFORM, platform))


def _parse_apns_device(members: Mapping[str, Any], _allow_http: bool) -> APNsDevice | None:
    token = members.get("device_token")
    return None if token is None else APNsDevice(_require_match(_APNS_TOKEN, token).lower())


def _parse_web_push_device(members: Mapping[str, Any], allow_http: bool) -> WebPushDevice | None:
    keys = members.get("keys")
    if not (keys is None or isinstance(keys, dict)):
        raise InvalidBody
    values = [members.get("endpoint"), *((keys or {}).get(name) for name in ("p256dh", "auth"))]
    if not _has_values(values):
        return None
    endpoint, p256dh, auth = values
    return WebPushDevice(
        _require_endpoint(endpoint, allow_http),
        _normalize_public_key(p256dh),
        encoding.encode_base64url(_require_bytes(auth, _AUTH_BYTES)),
        _parse_expiration(members.get("expirationTime")),
    )


_PARSERS: dict[ServiceName, Callable[[Mapping[str, Any], bool], PushDevice | None]] = {
    "fcm": _parse_fcm_device,
    "apns": _parse_apns_device,
    "web_push": _parse_web_push_device,
}


def _has_values(values: list[Any]) -> bool:
    """Whether all values are there, not none. :raise MissingDeviceValue: some are."""
    missing = values.count(None)
    if 0 < missing < len(values):
        raise MissingDeviceValue
    return not missing


def _require_match(pattern: re.Pattern[str], value: object) -> str:
    if isinstance(value, str) and pattern.fullmatch(value):
        return value
    raise InvalidBody


def _require_endpoint(value: object, allow_http: bool) -> str:
    """A URL with a host, and without credentials and fragment; where it leads is checked when it is used."""
    text = _require_match(_ENDPOINT, value)
    try:
        url = urlsplit(text)
        has_host = bool(url.hostname) and url.port != 0
    except ValueError:
        raise InvalidBody from None
    is_allowed = url.scheme == "https" or allow_http
    if len(text) > MAX_ENDPOINT or not (has_host and is_allowed) or "@" in url.netloc or "#" in text:
        raise InvalidBody
    return text


def _normalize_public_key(value: object) -> str:
    data = _require_bytes(value, _PUBLIC_KEY_BYTES)
    try:
        EllipticCurvePublicKey.from_encoded_point(SECP256R1(), data)
    except ValueError:
        raise InvalidBody from None
    return encoding.encode_base64url(data)


def _require_bytes(value: object, size: int) -> bytes:
    # Its length bounds the work of decoding.
    if not isinstance(value, str) or len(value) > 2 * size:
        raise InvalidBody
    try:
        data = encoding.decode_base64url(value)
    except ValueError:
        raise InvalidBody from None
    if len(data) != size:
        raise InvalidBody
    return data


def _parse_expiration(value: object) -> float | None:
    """Seconds since the epoch, of milliseconds."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= _MAX_EXPIRATION:
        raise InvalidBody
    return value / 1000
