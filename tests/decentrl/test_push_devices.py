"""Commands of our own that register devices for push notifications."""

from __future__ import annotations

import json
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import MediationNotGranted, StoreUnavailable
from mediatord.protocol import encoding
from mediatord.protocol.decentrl.crypto import (
    decode_public_key,
    decrypt,
    derive_shared_secret,
    generate_key_pair,
)
from mediatord.protocol.encoding import encode_base64
from tests.in_memory_identities import InMemoryIdentity, code_of
from tests.in_memory_mediator import InMemoryMediator
from tests.push.registries import (
    APNS,
    FCM,
    VAPID_PUBLIC_KEY,
    FakeDeviceStore,
    make_core_registry,
    make_registry,
    make_subscription,
)

SET, QUERY, REMOVE = "SET_PUSH_DEVICE", "QUERY_PUSH_DEVICES", "REMOVE_PUSH_DEVICES"
INVALID = (400, "INVALID_COMMAND")


def seal_device(identity: InMemoryIdentity, device: Any) -> dict[str, Any]:
    """Members of SET_PUSH_DEVICE with any JSON, or with the given text."""
    return identity.encrypt_push_device(device if isinstance(device, bytes) else encoding.dumps(device))


def list_devices(identity: InMemoryIdentity) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Devices of an identity, decrypted, and the payload that they came in."""
    private, public = generate_key_pair()
    payload = identity.answer(QUERY, sender_ephemeral_public_key=encode_base64(public))["payload"]
    secret = derive_shared_secret(private, decode_public_key(payload["ephemeral_public_key"]))
    devices: list[dict[str, Any]] = json.loads(decrypt(payload["encrypted_push_devices"], secret))
    return devices, payload


class DeviceCommandTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, devices=make_core_registry)
        self.alice, self.bob = (InMemoryIdentity(self.in_memory, name) for name in ("alice", "bob"))
        self.alice.register()
        self.bob.register()

    def set_device(self, identity: InMemoryIdentity, service: str, values: dict[str, Any]) -> None:
        """Register a device, which must succeed."""
        reply = identity.answer(SET, **seal_device(identity, {"service": service, **values}))
        self.assertEqual(reply, {"type": "SUCCESS"})
        self.in_memory.clock.advance(1)

    def test_all_services(self) -> None:
        """Devices are listed as they were registered, in that order, and removed by service."""
        subscription = make_subscription()
        for service, values in (("web_push", subscription), ("fcm", FCM), ("apns", APNS)):
            self.set_device(self.alice, service, values)
        devices, payload = list_devices(self.alice)
        self.assertEqual(
            devices,
            [{"service": "web_push", **subscription}, {"service": "fcm", **FCM}, {"service": "apns", **APNS}],
        )
        self.assertEqual(payload["services"], ["fcm", "apns", "web_push"])
        self.assertEqual(payload["vapid_public_key"], VAPID_PUBLIC_KEY)
        self.assertEqual(self.alice.answer(REMOVE, service="fcm"), {"type": "SUCCESS"})
        self.assertEqual([one["service"] for one in list_devices(self.alice)[0]], ["web_push", "apns"])
        self.assertEqual(list_devices(self.bob)[0], [])

    def test_moves_between_identities(self) -> None:
        """A device belongs to the identity that registered it last."""
        self.set_device(self.alice, "apns", APNS)
        self.set_device(self.bob, "apns", APNS)
        self.assertEqual(list_devices(self.alice)[0], [])
        self.assertEqual(list_devices(self.bob)[0], [{"service": "apns", **APNS}])

    def test_limit(self) -> None:
        """One device too many is refused."""
        for number in (1, 2, 3, 3):
            self.set_device(self.alice, "fcm", {**FCM, "device_token": f"token-{number}"})
        more = {"service": "fcm", **FCM, "device_token": "token-4"}
        self.assertEqual(code_of(self.alice.ask(SET, **seal_device(self.alice, more))), (429, "RATE_LIMITED"))

    def test_invalid_devices(self) -> None:
        """Malformed, incomplete and empty ones, unknown services, and what is no JSON or not encrypted to us."""
        good = seal_device(self.alice, {"service": "apns", **APNS})
        invalid: list[Any] = [
            {"service": "apns"},
            {"service": "apns", "device_token": "x"},
            {"service": "fcm", **FCM, "device_platform": None},
            {"service": "web_push", **make_subscription(endpoint="ftp://x/")},
            {"service": "sms", **APNS},
            {"service": None, **APNS},
            {"service": [], **APNS},
            {"service": {}, **APNS},
            APNS,
            [],
            "x",
            7,
            None,
            b"",
            b"{",
            b"\xff",
            b'{"service":' * 1000,
        ]
        for device in invalid:
            self.assertEqual(code_of(self.alice.ask(SET, **seal_device(self.alice, device))), INVALID)
        for changes in (
            {"encrypted_push_device": good["encrypted_push_device"][:-8] + "AAAAAAA="},
            {"encrypted_push_device": "x"},
            {"sender_ephemeral_public_key": encode_base64(bytes(32))},
            {"sender_ephemeral_public_key": encode_base64(generate_key_pair()[1])},
            {"sender_ephemeral_public_key": "x"},
        ):
            self.assertEqual(code_of(self.alice.ask(SET, **{**good, **changes})), INVALID)
        for key in ("x", encode_base64(bytes(32)), encode_base64(b"x" * 31)):
            self.assertEqual(code_of(self.alice.ask(QUERY, sender_ephemeral_public_key=key)), INVALID)
        self.assertEqual(list_devices(self.alice)[0], [])

    def test_requires_registration(self) -> None:
        """Of the sender, and the mediator as the recipient."""
        carol = InMemoryIdentity(self.in_memory, "carol")
        members = seal_device(carol, {"service": "apns", **APNS})
        key = members["sender_ephemeral_public_key"]
        commands: list[tuple[str, dict[str, Any]]] = [
            (SET, members),
            (QUERY, {"sender_ephemeral_public_key": key}),
            (REMOVE, {"service": "apns"}),
        ]
        for name, payload in commands:
            self.assertEqual(code_of(carol.ask(name, **payload)), (401, "UNAUTHORIZED_COMMAND"))
            self.assertEqual(code_of(self.alice.ask(name, to=self.bob.did, **payload)), (401, "UNAUTHORIZED_COMMAND"))

    def test_replay(self) -> None:
        """A recorded command does not bring back a device that was removed."""
        raw = self.alice.command({"type": SET, **seal_device(self.alice, {"service": "apns", **APNS})})
        self.assertEqual(self.in_memory.receive_command(raw).status, 200)
        self.alice.answer(REMOVE, service="apns")
        self.assertEqual(code_of(self.in_memory.receive_command(raw)), (401, "DUPLICATE_NONCE"))
        self.assertEqual(list_devices(self.alice)[0], [])

    def test_secrets_are_not_recorded(self) -> None:
        """Neither in the event log, nor in the clear in a reply."""
        self.set_device(self.alice, "fcm", FCM)
        _, payload = list_devices(self.alice)
        kinds = [event["mtype"] for event in self.in_memory.events("req.done")[-2:]]
        self.assertEqual(kinds, [SET, QUERY])
        text = json.dumps([self.in_memory.events("req.done"), payload])
        self.assertNotIn(FCM["device_token"], text)


class FailureTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.store = FakeDeviceStore()
        self.in_memory = InMemoryMediator(
            self, devices=lambda core: make_registry(self.store, core.registrations, ["apns"])
        )
        self.alice = InMemoryIdentity(self.in_memory, "alice")
        self.alice.register()

    def code_of_set(self, service: str, values: dict[str, Any]) -> tuple[int, str]:
        """The refusal of a registration."""
        return code_of(self.alice.ask(SET, **seal_device(self.alice, {"service": service, **values})))

    def test_services_that_are_not_configured(self) -> None:
        """They do not exist; but their devices can be removed."""
        self.assertEqual(self.code_of_set("fcm", FCM), INVALID)
        self.alice.answer(REMOVE, service="fcm")
        _, payload = list_devices(self.alice)
        self.assertEqual(payload["services"], ["apns"])

    def test_failures_of_the_store(self) -> None:
        """A registration that ended meanwhile, and a store that does not answer."""
        self.store.fault = MediationNotGranted()
        self.assertEqual(self.code_of_set("apns", APNS), (401, "UNAUTHORIZED_COMMAND"))
        self.store.fault = StoreUnavailable()
        self.assertEqual(self.code_of_set("apns", APNS), (503, "UNAVAILABLE"))

    def test_without_devices(self) -> None:
        """The commands are as unknown as any other, whoever sends them."""
        in_memory = InMemoryMediator(self)
        alice, bob = (InMemoryIdentity(in_memory, name) for name in ("alice", "bob"))
        alice.register()
        for identity in (alice, bob):
            members = seal_device(identity, {"service": "apns", **APNS})
            key = members["sender_ephemeral_public_key"]
            self.assertEqual(code_of(identity.ask(SET, **members)), INVALID)
            self.assertEqual(code_of(identity.ask(QUERY, sender_ephemeral_public_key=key)), INVALID)
            self.assertEqual(code_of(identity.ask(REMOVE, service="apns")), INVALID)
            self.assertEqual(code_of(identity.ask("UNKNOWN")), INVALID)
        events = in_memory.events("req.done")
        kinds = {event.get("mtype") for event in events if event.get("code") == "INVALID_COMMAND"}
        self.assertEqual(kinds, {None})
