"""Registration of devices for push notifications (Aries RFC 0734, 0699; Web Push), and its disclosure."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.didcomm.replay_protection import LONG_RETENTION, REPLAY_WINDOW
from mediatord.errors import StoreUnavailable
from mediatord.protocol.didcomm.push_notifications import PUSH_PROTOCOLS, PushServiceName
from mediatord.wallet.didcomm_messages import anoncrypt, authcrypt, compose_message
from tests.in_memory_mediator import InMemoryMediator, InMemoryWallet, code_of
from tests.push.registries import (
    APNS,
    FCM,
    MEDIATOR_ID,
    VAPID_PUBLIC_KEY,
    FakeDeviceStore,
    make_core_registry,
    make_registry,
    make_subscription,
)

QUERIES = "https://didcomm.org/discover-features/2.0/queries"
FCM_URI = "https://didcomm.org/push-notifications-fcm/1.0"
APNS_URI = "https://didcomm.org/push-notifications-apns/1.0"
WEB_URI = "urn:mediatord:web-push/1.0"
SERVICES: tuple[PushServiceName, ...] = ("fcm", "apns", "web_push")


def list_requests() -> list[str]:
    """Type URIs of all requests."""
    return [protocol.type(name) for protocol in PUSH_PROTOCOLS.values() for name in ("set", "get")]


class RegistrationTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, devices=make_core_registry)
        self.alice = InMemoryWallet(self.in_memory).enrol()
        self.bob = InMemoryWallet(self.in_memory).enrol()

    def set_device(self, wallet: InMemoryWallet, type_: str, body: dict[str, Any]) -> None:
        """Register or remove, which must succeed."""
        answer = wallet.answer(type_, body, id="request-1")
        self.assertEqual(answer.message.type.uri, type_.rpartition("/")[0] + "/ack")
        self.assertEqual((answer.body, answer.message.thid), ({"status": "OK"}, "request-1"))
        self.assertEqual(json.loads(answer.plaintext)["ack"], ["request-1"])
        self.in_memory.clock.advance(1)

    def refusal_of(self, wallet: InMemoryWallet, type_: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        """How a request is refused."""
        reply = wallet.ask(type_, body)
        return reply.status, code_of(reply, wallet)

    def test_messages_have_the_names_of_the_texts(self) -> None:
        """Types as in the two texts, and ours."""
        names = ("set-device-info", "get-device-info", "device-info", "ack")
        for service, uri in (("fcm", FCM_URI), ("apns", APNS_URI)):
            protocol = PUSH_PROTOCOLS[service]  # type: ignore[index]
            types = [protocol.type(name) for name in ("set", "get", "info", "ack")]
            self.assertEqual(types, [f"{uri}/{name}" for name in names])
        types = [PUSH_PROTOCOLS["web_push"].type(name) for name in ("set", "get", "info", "ack")]
        self.assertEqual(
            types, [f"{WEB_URI}/{name}" for name in ("set-subscription", "get-subscription", "subscription", "ack")]
        )

    def test_fcm_and_apns(self) -> None:
        """A device is acknowledged, shown and removed, each by its own protocol."""
        for uri, values in ((FCM_URI, FCM), (APNS_URI, APNS)):
            self.set_device(self.alice, f"{uri}/set-device-info", values)
        for uri, values in ((FCM_URI, FCM), (APNS_URI, APNS)):
            answer = self.alice.answer(f"{uri}/get-device-info", id="request-2")
            self.assertEqual((answer.message.type.uri, answer.message.thid), (f"{uri}/device-info", "request-2"))
            self.assertEqual(answer.body, values)
            self.set_device(self.alice, f"{uri}/set-device-info", dict.fromkeys(values))
            self.assertEqual(
                self.refusal_of(self.alice, f"{uri}/get-device-info"),
                (200, "e.p.req.not-registered-for-push-notifications"),
            )

    def test_web_push(self) -> None:
        """A subscription, and the key for making one, which is shown without any, too."""
        subscription = make_subscription(expirationTime=4_000_000_000_000)
        empty = {"subscription": None, "vapid_public_key": VAPID_PUBLIC_KEY}
        self.assertEqual(self.alice.answer(f"{WEB_URI}/get-subscription").body, empty)
        self.set_device(self.alice, f"{WEB_URI}/set-subscription", {"subscription": subscription})
        answer = self.alice.answer(f"{WEB_URI}/get-subscription")
        self.assertEqual(answer.message.type.uri, f"{WEB_URI}/subscription")
        self.assertEqual(answer.body, {**empty, "subscription": subscription})
        self.set_device(self.alice, f"{WEB_URI}/set-subscription", {"subscription": None})
        self.assertEqual(self.alice.answer(f"{WEB_URI}/get-subscription").body, empty)

    def test_latest_of_several_devices(self) -> None:
        """Of several devices the one that was registered last is shown; null removes them all."""
        for token in ("first", "second"):
            self.set_device(self.alice, f"{FCM_URI}/set-device-info", {**FCM, "device_token": token})
        self.assertEqual(self.alice.answer(f"{FCM_URI}/get-device-info").body["device_token"], "second")
        self.set_device(self.alice, f"{FCM_URI}/set-device-info", {})
        self.assertEqual(self.refusal_of(self.alice, f"{FCM_URI}/get-device-info")[0], 200)

    def test_moves_between_accounts(self) -> None:
        """A device belongs to the account that registered it last."""
        for wallet in (self.alice, self.bob):
            self.set_device(wallet, f"{APNS_URI}/set-device-info", APNS)
        self.assertEqual(self.bob.answer(f"{APNS_URI}/get-device-info").body, APNS)
        code = "e.p.req.not-registered-for-push-notifications"
        self.assertEqual(self.refusal_of(self.alice, f"{APNS_URI}/get-device-info"), (200, code))

    def test_too_many_devices(self) -> None:
        """A device of the limit is replaced, one more is refused."""
        for number in (1, 2, 3, 3):
            self.set_device(self.alice, f"{FCM_URI}/set-device-info", {**FCM, "device_token": f"token-{number}"})
        refused = self.refusal_of(self.alice, f"{FCM_URI}/set-device-info", {**FCM, "device_token": "token-4"})
        self.assertEqual(refused, (200, "e.p.me.res.devices"))

    def test_invalid_bodies(self) -> None:
        """One value without the other, and malformed ones; nothing is stored."""
        for type_, body, code in (
            (f"{FCM_URI}/set-device-info", {**FCM, "device_token": None}, "e.p.msg.missing-value"),
            (f"{FCM_URI}/set-device-info", {**FCM, "device_platform": None}, "e.p.msg.missing-value"),
            (f"{FCM_URI}/set-device-info", {**FCM, "device_token": 1}, "e.p.msg.bad-body"),
            (f"{APNS_URI}/set-device-info", {"device_token": "x"}, "e.p.msg.bad-body"),
            (f"{WEB_URI}/set-subscription", {"subscription": "x"}, "e.p.msg.bad-body"),
            (f"{WEB_URI}/set-subscription", {"subscription": []}, "e.p.msg.bad-body"),
            (f"{WEB_URI}/set-subscription", {"subscription": {"endpoint": "https://x/"}}, "e.p.msg.missing-value"),
        ):
            self.assertEqual(self.refusal_of(self.alice, type_, body), (200, code))
        for type_ in list_requests():
            if "/set-" in type_:
                headers: dict[str, Any] = {"from": self.alice.did, "to": [self.in_memory.did], "return_route": "all"}
                message = {**compose_message(type_, **headers), "body": ["x"]}
                raw = authcrypt(message, self.alice.identity, self.in_memory.document)
                self.assertEqual(code_of(self.in_memory.receive(raw), self.alice), "e.p.msg.bad-body")
        self.assertIsNone(self.alice.answer(f"{WEB_URI}/get-subscription").body["subscription"])
        code = "e.p.req.not-registered-for-push-notifications"
        self.assertEqual(self.refusal_of(self.alice, f"{FCM_URI}/get-device-info"), (200, code))

    def test_requires_an_account(self) -> None:
        """Without a grant, and without an authenticated sender."""
        stranger = InMemoryWallet(self.in_memory)
        for type_ in list_requests():
            self.assertEqual(self.refusal_of(stranger, type_, FCM), (200, "e.p.req.not_enroll"))
            raw = anoncrypt(compose_message(type_, FCM, to=[self.in_memory.did]), self.in_memory.document)
            self.assertEqual(code_of(self.in_memory.receive(raw)), "e.p.trust.authcrypt-required")

    def test_reply_goes_where_it_is_wanted(self) -> None:
        """Without a route and an endpoint to reply to, nothing is sent; the device is registered all the same."""
        reply = self.alice.ask(f"{APNS_URI}/set-device-info", APNS, return_route="none")
        self.assertEqual((reply.status, reply.body), (202, b""))
        self.assertEqual(self.alice.answer(f"{APNS_URI}/get-device-info").body, APNS)

    def test_answers(self) -> None:
        """Messages that only wallets receive are unsupported."""
        for type_ in (f"{FCM_URI}/device-info", f"{FCM_URI}/ack", f"{WEB_URI}/subscription"):
            self.assertEqual(self.refusal_of(self.alice, type_, FCM), (200, "e.p.msg.unsupported"))

    def test_spellings_of_types(self) -> None:
        """As of all protocols: minor versions and punctuation are tolerated, other name spaces are not."""
        for type_ in (
            "https://didcomm.org/push-notifications-apns/1.7/set-device-info",
            "https://didcomm.org/Push_Notifications_APNs/1.0/SetDeviceInfo",
            "https://didcomm.org/push-notifications-apns/1/set_device_info",
        ):
            self.assertEqual(self.alice.answer(type_, APNS).body, {"status": "OK"})
        self.assertIn("vapid_public_key", self.alice.answer("urn:mediatord:web-push/1.2/get-subscription").body)
        for type_ in (
            "https://didcomm.org/web-push/1.0/get-subscription",
            "https://didcomm.org/urn:mediatord:web-push/1.0/get-subscription",
            "urn:mediatord:web-push/2.0/get-subscription",
            "urn:mediatord:trust-ping/2.0/ping",
            "urn:mediatord:push-notifications-fcm/1.0/get-device-info",
            "urn:example:web-push/1.0/get-subscription",
        ):
            self.assertEqual(self.refusal_of(self.alice, type_), (200, "e.p.msg.unsupported"))

    def test_is_recorded_without_secrets(self) -> None:
        """The event log has the name of the message, and nothing of its body."""
        subscription = make_subscription()
        self.set_device(self.alice, f"{FCM_URI}/set-device-info", FCM)
        self.set_device(self.alice, f"{WEB_URI}/set-subscription", {"subscription": subscription})
        events = self.in_memory.events("req.done")
        types = [event.get("mtype") for event in events[-2:]]
        self.assertEqual(types, ["push-notifications-fcm/1.0/set-device-info", f"{WEB_URI}/set-subscription"])
        text = json.dumps(events)
        for secret in (FCM["device_token"], subscription["endpoint"], subscription["keys"]["auth"]):
            self.assertNotIn(secret, text)


class ReplayTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.store = FakeDeviceStore()
        self.in_memory = InMemoryMediator(self, devices=lambda core: make_registry(self.store, core.registrations))
        self.alice = InMemoryWallet(self.in_memory).enrol()

    def test_replay_of_a_registration(self) -> None:
        """It does not bring back a device that was removed, even if it has no time, for 30 days."""
        raw = self.alice.pack(f"{APNS_URI}/set-device-info", APNS, return_route="all")
        self.assertEqual(self.alice.open(self.in_memory.receive(raw).body).body, {"status": "OK"})
        self.alice.answer(f"{APNS_URI}/set-device-info", {})
        for seconds in (0, REPLAY_WINDOW + 100, LONG_RETENTION - REPLAY_WINDOW - 200):
            self.in_memory.clock.advance(seconds)
            self.assertEqual(code_of(self.in_memory.receive(raw), self.alice), "e.p.crypto.message.dejavu")
        self.assertEqual(self.store.devices, {})

    def test_repeated_after_a_failure(self) -> None:
        """What the store could not do may be sent again as it is."""
        raw = self.alice.pack(f"{APNS_URI}/set-device-info", APNS, return_route="all")
        working, self.store.fault = self.store.fault, StoreUnavailable()
        self.assertEqual(self.in_memory.receive(raw).status, 503)
        self.store.fault = working
        self.assertEqual(self.alice.open(self.in_memory.receive(raw).body).body, {"status": "OK"})


class DisclosureTests(SynchronousTestCase):
    def disclosures_of(self, in_memory: InMemoryMediator, match: str) -> list[dict[str, Any]]:
        """Protocols that match."""
        query = {"queries": [{"feature-type": "protocol", "match": match}]}
        found: list[dict[str, Any]] = InMemoryWallet(in_memory).answer(QUERIES, query).body["disclosures"]
        return found

    def test_configured_services(self) -> None:
        """Exactly those that are configured are served and disclosed; Web Push with its key."""
        for services in ((), ("fcm",), ("apns", "web_push"), SERVICES):
            in_memory = InMemoryMediator(self, devices=partial(make_core_registry, services=services))
            found = self.disclosures_of(in_memory, "*push*")
            self.assertEqual({one["id"] for one in found}, {PUSH_PROTOCOLS[name].uri for name in services})
            for one in found:
                self.assertEqual((one["roles"], one["mediator"]), (["notification-sender"], MEDIATOR_ID))
                wanted = VAPID_PUBLIC_KEY if one["id"] == WEB_URI else None
                self.assertEqual(one.get("vapid_public_key"), wanted)
            alice = InMemoryWallet(in_memory).enrol()
            for service in SERVICES:
                reply = alice.ask(PUSH_PROTOCOLS[service].type("get"))
                answer = alice.open(reply.body)
                self.assertEqual(answer.body.get("code") == "e.p.msg.unsupported", service not in services)

    def test_without_push_notifications(self) -> None:
        """All is as it was: nothing is disclosed, and every message is unsupported."""
        in_memory = InMemoryMediator(self)
        self.assertEqual(self.disclosures_of(in_memory, "*push*"), [])
        self.assertNotEqual(self.disclosures_of(in_memory, "*"), [])
        alice = InMemoryWallet(in_memory).enrol()
        for type_ in list_requests():
            reply = alice.ask(type_, FCM)
            self.assertEqual((reply.status, code_of(reply, alice)), (200, "e.p.msg.unsupported"))
