"""Registration of devices for push notifications by wallets of DIDComm v1."""

from __future__ import annotations

from typing import Any

from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import StoreUnavailable
from mediatord.protocol.didcomm_v1.keys import SigningKey
from mediatord.protocol.didcomm_v1.message import DIDCOMM_ORG, OLD_PREFIX, V1Message
from tests.didcomm_v1.in_memory_wallet import InMemoryV1Wallet, compose
from tests.in_memory_mediator import InMemoryMediator, InMemoryWallet
from tests.push.registries import APNS, FCM, VAPID_PUBLIC_KEY, make_core_registry, make_subscription
from tests.wallet_identities import generate_identity

ALL: dict[str, Any] = {"~transport": {"return_route": "all"}}
FCM_FAMILY = "push-notifications-fcm/1.0"
APNS_FAMILY = "push-notifications-apns/1.0"
WEB_URI = "urn:mediatord:web-push/1.0"


def get_members(message: V1Message) -> dict[str, Any]:
    """The members of a message without those that every message has."""
    return {name: value for name, value in message.members.items() if not name.startswith(("@", "~"))}


class RegistrationTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.in_memory = InMemoryMediator(self, devices=make_core_registry)
        self.alice = InMemoryV1Wallet(self.in_memory, "alice").enrol()
        self.bob = InMemoryV1Wallet(self.in_memory, "bob").enrol()

    def set_device(self, wallet: InMemoryV1Wallet, type_: str, **members: Any) -> None:
        """Register or remove, which must succeed."""
        answer = wallet.answer(type_, **members, **{"~thread": {"thid": "thread-0001"}})
        protocol = WEB_URI if type_.startswith(WEB_URI) else f"{DIDCOMM_ORG}notification/1.0"
        self.assertEqual((answer.members["@type"], answer.thid), (f"{protocol}/ack", "thread-0001"))
        self.assertEqual(get_members(answer), {"status": "OK"})
        self.in_memory.clock.advance(1)

    def assert_refused(self, wallet: InMemoryV1Wallet, type_: str, code: str, **members: Any) -> None:
        """A request is refused, by the report of its protocol."""
        report = wallet.answer(type_, **members)
        self.assertEqual(report.members["description"]["code"], code, members)
        protocol = "notification/1.0" if type_.startswith(WEB_URI) else type_.rpartition("/")[0]
        self.assertEqual(report.members["@type"], f"{DIDCOMM_ORG}{protocol}/problem-report")

    def test_fcm_and_apns(self) -> None:
        """A device is acknowledged, shown with all its values, and forgotten when they are null."""
        for family, values in ((FCM_FAMILY, FCM), (APNS_FAMILY, APNS)):
            self.set_device(self.alice, f"{family}/set-device-info", **values)
        for family, values in ((FCM_FAMILY, FCM), (APNS_FAMILY, APNS)):
            answer = self.alice.answer(f"{family}/get-device-info")
            self.assertEqual(answer.members["@type"], f"{DIDCOMM_ORG}{family}/device-info")
            self.assertEqual(get_members(answer), values)
            self.set_device(self.alice, f"{family}/set-device-info", **dict.fromkeys(values))
            self.assert_refused(self.alice, f"{family}/get-device-info", "not-registered-for-push-notifications")

    def test_former_prefix(self) -> None:
        """Acks and devices have the prefix of the request."""
        for type_, members in ((f"{FCM_FAMILY}/set-device-info", FCM), (f"{FCM_FAMILY}/get-device-info", {})):
            raw = self.alice.pack(compose(type_, OLD_PREFIX, **ALL, **members))
            answer = self.alice.open(self.in_memory.receive(raw).body)
            self.assertEqual(answer.type.prefix, OLD_PREFIX)
        self.assertEqual(get_members(answer), FCM)

    def test_web_push(self) -> None:
        """A subscription, and the key for making one, which is shown without any, too."""
        subscription = make_subscription()
        empty = {"subscription": None, "vapid_public_key": VAPID_PUBLIC_KEY}
        self.assertEqual(get_members(self.alice.answer(f"{WEB_URI}/get-subscription")), empty)
        self.set_device(self.alice, f"{WEB_URI}/set-subscription", subscription=subscription)
        answer = self.alice.answer(f"{WEB_URI}/get-subscription")
        self.assertEqual(answer.members["@type"], f"{WEB_URI}/subscription")
        self.assertEqual(get_members(answer), {**empty, "subscription": subscription})
        self.set_device(self.alice, f"{WEB_URI}/set-subscription", subscription=None)
        self.assertEqual(get_members(self.alice.answer(f"{WEB_URI}/get-subscription")), empty)

    def test_same_devices_as_of_v2(self) -> None:
        """A v2 wallet whose DID is the key of the connection sees the device, and may forget it."""
        identity = generate_identity("did:key")
        key = SigningKey.from_seed(identity.signing.private.secret)
        v1, v2 = InMemoryV1Wallet(self.in_memory, "both", key=key), InMemoryWallet(self.in_memory, identity).enrol()
        self.set_device(v1, f"{FCM_FAMILY}/set-device-info", **FCM)
        self.assertEqual(v2.answer(f"{DIDCOMM_ORG}{FCM_FAMILY}/get-device-info").body, FCM)
        v2.answer(f"{DIDCOMM_ORG}{FCM_FAMILY}/set-device-info", dict.fromkeys(FCM))
        self.assert_refused(v1, f"{FCM_FAMILY}/get-device-info", "not-registered-for-push-notifications")

    def test_moves_between_accounts(self) -> None:
        """A device belongs to the account that registered it last; nobody is shown that of another one."""
        for wallet in (self.alice, self.bob):
            self.set_device(wallet, f"{APNS_FAMILY}/set-device-info", **APNS)
        self.assertEqual(get_members(self.bob.answer(f"{APNS_FAMILY}/get-device-info")), APNS)
        self.assert_refused(self.alice, f"{APNS_FAMILY}/get-device-info", "not-registered-for-push-notifications")

    def test_too_many_devices(self) -> None:
        """One more than an account may have is refused."""
        for number in range(3):
            self.set_device(self.alice, f"{FCM_FAMILY}/set-device-info", **{**FCM, "device_token": f"token{number}"})
        more = {**FCM, "device_token": "one-more"}
        self.assert_refused(self.alice, f"{FCM_FAMILY}/set-device-info", "e.p.me.res.devices", **more)

    def test_malformed_values(self) -> None:
        """One value without the other, and malformed ones; nothing is stored."""
        nested: Any = []
        for _ in range(30):
            nested = {"device_token": nested}
        for members in (
            {"device_token": FCM["device_token"]},
            {"device_token": None, "device_platform": "ios"},
            {"device_token": FCM["device_token"], "device_platform": None},
        ):
            self.assert_refused(self.alice, f"{FCM_FAMILY}/set-device-info", "missing-value", **members)
        for values in (
            {"device_token": ""},
            {"device_token": "x" * 5000},
            {"device_token": "with space"},
            {"device_token": 7},
            {"device_token": nested},
            {"device_platform": ["ios"]},
            {"device_platform": "x" * 100_000},
        ):
            members = {**FCM, **values}
            self.assert_refused(self.alice, f"{FCM_FAMILY}/set-device-info", "e.p.msg.bad-body", **members)
        for token in ("no digits" * 8, "12", ["ab" * 32], "ab" * 500):
            self.assert_refused(self.alice, f"{APNS_FAMILY}/set-device-info", "e.p.msg.bad-body", device_token=token)
        subscriptions: list[Any] = ["x", [], {"endpoint": "https://push.example/1", "keys": []}, {"endpoint": nested}]
        for subscription in subscriptions:
            type_ = f"{WEB_URI}/set-subscription"
            code = self.alice.answer(type_, subscription=subscription).members["description"]["code"]
            self.assertIn(code, ("e.p.msg.bad-body", "missing-value"), subscription)
        devices = self.in_memory.store.devices.list_devices(self.alice.key.did_key, None)
        self.assertEqual(self.successResultOf(devices), [])

    def test_requires_an_account(self) -> None:
        """A wallet that has only connected registers nothing."""
        wallet = InMemoryV1Wallet(self.in_memory, "new")
        self.assert_refused(wallet, f"{FCM_FAMILY}/set-device-info", "mediation_not_granted", **FCM)

    def test_store_failure(self) -> None:
        """A device that was not stored is not acknowledged, and the same request may be sent again."""
        raw = self.alice.pack(compose(f"{FCM_FAMILY}/set-device-info", **FCM, **ALL))

        def fail_to_store(*args: object) -> Any:
            raise StoreUnavailable

        patched = self.patch(self.in_memory.store.devices, "set_device", fail_to_store)
        self.assertEqual(self.in_memory.receive(raw).status, 503)
        patched.restore()
        self.assertEqual(self.in_memory.receive(raw).status, 200)

    def test_not_configured(self) -> None:
        """Without push services the requests are unknown."""
        in_memory = InMemoryMediator(self)
        wallet = InMemoryV1Wallet(in_memory).enrol()
        self.assert_refused(wallet, f"{FCM_FAMILY}/set-device-info", "e.p.msg.unsupported", **FCM)
