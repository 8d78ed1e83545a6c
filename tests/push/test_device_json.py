"""Registrations as wallets send them: the forms that are accepted, and hostile ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediatord.errors import InvalidBody, MissingDeviceValue
from mediatord.protocol.encoding import encode_base64url
from mediatord.push.device_json import format_device, parse_device
from mediatord.push.devices import SERVICE_NAMES, APNsDevice, FCMDevice, ServiceName, WebPushDevice
from tests.push.registries import APNS, FCM, SUBSCRIPTION


def change_keys(**changes: Any) -> dict[str, Any]:
    """A subscription with other keys."""
    return {**SUBSCRIPTION, "keys": {**SUBSCRIPTION["keys"], **changes}}


@pytest.mark.parametrize(("service", "members"), [("fcm", FCM), ("apns", APNS), ("web_push", SUBSCRIPTION)])
def test_formats_what_it_parses(service: ServiceName, members: dict[str, Any]) -> None:
    """A wallet sees what it has registered, in the form in which it did."""
    device = parse_device(service, members)
    assert device is not None
    assert format_device(device) == members


def test_values_of_devices() -> None:
    """Unknown members are ignored; the two cases of hexadecimal digits are one token."""
    assert parse_device("fcm", {**FCM, "extra": 1}) == FCMDevice(FCM["device_token"], "android")
    upper = {"device_token": APNS["device_token"].upper(), "voip_device_token": "beef"}
    assert parse_device("apns", upper) == APNsDevice(APNS["device_token"])


def test_browser_subscription() -> None:
    """The time is in milliseconds; padded keys are those without padding."""
    keys = SUBSCRIPTION["keys"]
    padded = change_keys(p256dh=keys["p256dh"] + "=", auth=keys["auth"] + "==")
    found = parse_device("web_push", {**padded, "expirationTime": 1_800_000_000_500})
    assert found == WebPushDevice(SUBSCRIPTION["endpoint"], keys["p256dh"], keys["auth"], 1_800_000_000.5)
    assert found is not None
    assert format_device(found)["expirationTime"] == 1_800_000_000_500


@pytest.mark.parametrize(
    ("service", "members"),
    [
        ("fcm", {"device_token": None, "device_platform": None}),
        ("apns", {"device_token": None}),
        ("web_push", {"endpoint": None, "keys": None, "expirationTime": None}),
        ("web_push", {"endpoint": None, "keys": {"p256dh": None, "auth": None}}),
        *[(service, {}) for service in SERVICE_NAMES],
    ],
)
def test_null_values_remove(service: ServiceName, members: dict[str, Any]) -> None:
    """Absent values are nulls."""
    assert parse_device(service, members) is None


@pytest.mark.parametrize(
    ("service", "members"),
    [
        ("fcm", {**FCM, "device_token": None}),
        ("fcm", {**FCM, "device_platform": None}),
        ("fcm", {"device_token": FCM["device_token"]}),
        ("web_push", {**SUBSCRIPTION, "endpoint": None}),
        ("web_push", {**SUBSCRIPTION, "keys": None}),
        ("web_push", change_keys(auth=None)),
        ("web_push", change_keys(p256dh=None)),
    ],
)
def test_missing_values(service: ServiceName, members: dict[str, Any]) -> None:
    """One value without the others."""
    with pytest.raises(MissingDeviceValue):
        parse_device(service, members)


WRONG_TYPES: list[Any] = [0, 1, True, False, [], {}, ["x"], {"a": "b"}, 1.5]
OFF_CURVE = encode_base64url(b"\x04" + b"\x01" * 64)
COMPRESSED = encode_base64url(b"\x02" + b"\x01" * 32)


@pytest.mark.parametrize("token", [*WRONG_TYPES, "", "a b", "a\n", "é", "\0", "\ud800", "x" * 4097])
def test_invalid_fcm_tokens(token: Any) -> None:
    """Printable ASCII without spaces, up to 4096 characters."""
    assert parse_device("fcm", {**FCM, "device_token": "~" * 4096}) is not None
    with pytest.raises(InvalidBody):
        parse_device("fcm", {**FCM, "device_token": token})


@pytest.mark.parametrize("platform", [*WRONG_TYPES, "", "-", "i os", "ios\n", "ïos", "x" * 33])
def test_invalid_platforms(platform: Any) -> None:
    """A short word."""
    assert parse_device("fcm", {**FCM, "device_platform": "x" * 32}) is not None
    with pytest.raises(InvalidBody):
        parse_device("fcm", {**FCM, "device_platform": platform})


@pytest.mark.parametrize(
    "token", [*WRONG_TYPES, "", "a" * 62, "a" * 65, "a" * 202, "g" * 64, "a" * 64 + "\n", "٣" * 64]
)
def test_invalid_apns_tokens(token: Any) -> None:
    """32 to 100 bytes in hexadecimal."""
    assert parse_device("apns", {"device_token": "aB" * 100}) is not None
    with pytest.raises(InvalidBody):
        parse_device("apns", {"device_token": token})


@pytest.mark.parametrize(
    "endpoint",
    [
        *WRONG_TYPES,
        "",
        "https://",
        "https:///x",
        "https://:443/x",
        "http://push.example/1",
        "ftp://push.example/1",
        "file:///etc/passwd",
        "//push.example/1",
        "javascript:alert(1)",
        "https://user:secret@push.example/1",
        "https://@push.example/1",
        "https://push.example/1#fragment",
        "https://push.example/a b",
        "https://push.example/\r\nHost: x",
        " https://push.example/1",
        "https://push.example/é",
        "https://push.example:99999/",
        "https://push.example:0/",
        "https://push.example:x/",
        "https://[::1/",
        "https://push.example/".ljust(2049, "x"),
    ],
)
def test_invalid_endpoints(endpoint: Any) -> None:
    """An https URL with a host, up to 2048 characters."""
    longest = "https://push.example/".ljust(2048, "x")
    assert parse_device("web_push", {**SUBSCRIPTION, "endpoint": longest}) is not None
    with pytest.raises(InvalidBody):
        parse_device("web_push", {**SUBSCRIPTION, "endpoint": endpoint})


def test_http_endpoints() -> None:
    """Only where the operator allows them."""
    members = {**SUBSCRIPTION, "endpoint": "http://push.example/1"}
    assert parse_device("web_push", members, allow_http=True) is not None
    with pytest.raises(InvalidBody):
        parse_device("web_push", members)


@pytest.mark.parametrize("key", [*WRONG_TYPES, "", "x", "!" * 87, "A" * 87, "A" * 1_000_000, OFF_CURVE, COMPRESSED])
def test_invalid_public_keys(key: Any) -> None:
    """65 bytes, an uncompressed point on P-256."""
    with pytest.raises(InvalidBody):
        parse_device("web_push", change_keys(p256dh=key))


@pytest.mark.parametrize(
    "auth", [*WRONG_TYPES, "", "x", "!" * 22, "A" * 21, "A" * 23, "A" * 1_000_000, encode_base64url(b"x" * 17)]
)
def test_invalid_authentication_secrets(auth: Any) -> None:
    """16 bytes."""
    with pytest.raises(InvalidBody):
        parse_device("web_push", change_keys(auth=auth))


@pytest.mark.parametrize("time", ["", "1800000000000", True, False, -1, 2**53, 1e300, [], {}])
def test_invalid_expiration_times(time: Any) -> None:
    """A number of milliseconds."""
    with pytest.raises(InvalidBody):
        parse_device("web_push", {**SUBSCRIPTION, "expirationTime": time})


@pytest.mark.parametrize("keys", [[], "", "x", 0, 1, True, False, [SUBSCRIPTION["keys"]]])
def test_invalid_keys(keys: Any) -> None:
    """An object."""
    with pytest.raises(InvalidBody):
        parse_device("web_push", {**SUBSCRIPTION, "keys": keys})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["p256dh", "auth", "x"]), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(["device_token", "device_platform", "endpoint", "keys", "expirationTime", "x"])


@given(st.sampled_from(SERVICE_NAMES), st.dictionaries(NAMES, JSON))
def test_anything_is_parsed_or_refused(service: ServiceName, members: dict[str, Any]) -> None:
    """There is no third outcome; what is accepted comes back as a device."""
    try:
        device = parse_device(service, members)
    except InvalidBody:
        return
    if device is not None:
        assert parse_device(service, format_device(device)) == device
