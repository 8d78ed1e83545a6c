"""Web Push: requests, their encryption, identification by VAPID, and what each answer means."""

from __future__ import annotations

import json
from typing import Any
from unittest import TestCase as PlainTestCase

import http_ece
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from twisted.internet.task import Clock

from mediatord.net.outbound_http import OutboundHTTPClient
from mediatord.push import web_push
from mediatord.push.devices import WebPushDevice
from mediatord.push.service import PushResult, Wakeup
from mediatord.push.web_push import VAPIDKey, VAPIDTokenCache, WebPushService, encrypt, load_vapid_key
from mediatord.runtime.secret_files import SecretFileError
from tests.push.push_test_case import PushTestCase
from tests.push.scripted_server import LOOPBACK, Answer
from tests.push.web_push_server import (
    KEY_MISMATCH,
    UserAgent,
    WebPushServer,
    decode_base64url,
    encode_base64url,
    verify_vapid_token,
)

CONTACT = "mailto:operator@mediator.example"
WAKEUP = Wakeup("mediator-1")


class WebPushTestCase(PushTestCase):
    """A push service on loopback, a user agent with a subscription, and a service that sends to it."""

    def setUp(self) -> None:
        super().setUp()
        self.server = WebPushServer(self.certificate)
        self.start(self.server)
        self.key = self.make_key()
        self.agent = self.server.subscribe(self.key.public)
        self.service = WebPushService(self.key, CONTACT, self.client)

    def make_key(self) -> VAPIDKey:
        """A new VAPID key, from a file."""
        path = self.directory / "vapid.pem"
        path.touch(0o600)
        key = ec.generate_private_key(ec.SECP256R1())
        path.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return load_vapid_key(path)

    async def send(self, wakeup: Wakeup = WAKEUP) -> PushResult:
        """Send a wake-up to the user agent."""
        return await self.service.send(self.agent.device, wakeup)


class MessageTests(WebPushTestCase):
    """What push service and user agent receive."""

    async def test_message(self) -> None:
        """The user agent decrypts the id of the mediator; the push service sees headers and what is encrypted."""
        self.assertEqual(await self.send(), PushResult("sent", "", 201))
        self.assertEqual(self.agent.messages, [b'{"mediator":"mediator-1"}'])
        [request] = self.server.received
        self.assertEqual(
            {name: request.headers[name] for name in ("ttl", "urgency", "content-encoding")},
            {"ttl": "2419200", "urgency": "high", "content-encoding": "aes128gcm"},
        )
        self.assertRegex(request.headers["topic"], r"\A[A-Za-z0-9_-]{32}\Z")
        self.assertNotIn(b"mediator", request.body)

    async def test_message_ids(self) -> None:
        """Are sent if there are any, and left out where the message would be too long for a push service."""
        await self.send(Wakeup("mediator-1", ("a", "b")))
        await self.send(Wakeup("mediator-1", ("x" * 400,) * 10))
        await self.send(Wakeup("m", ("y" * (3993 - len('{"mediator":"m","message_ids":[""]}')),)))
        first, second, third = map(json.loads, self.agent.messages)
        self.assertEqual(first, {"mediator": "mediator-1", "message_ids": ["a", "b"]})
        self.assertEqual(second, {"mediator": "mediator-1"})
        self.assertEqual(len(third["message_ids"]), 1)
        self.assertEqual(len(self.server.received[2].body), 4096)

    async def test_keys_are_used_once(self) -> None:
        """Two equal messages have neither salt nor key in common."""
        await self.send()
        await self.send()
        first, second = [request.body for request in self.server.received]
        self.assertNotEqual(first[:16], second[:16])
        self.assertNotEqual(first[21:86], second[21:86])

    async def test_topic(self) -> None:
        """A message replaces one of the same mediator only."""
        for name in ("a", "a", "b"):
            await self.send(Wakeup(name))
        first, second, third = [request.headers["topic"] for request in self.server.received]
        self.assertEqual((first == second, first == third), (True, False))

    async def test_connection_is_kept(self) -> None:
        """Messages to one push service go over one connection."""
        other = self.server.subscribe(self.key.public)
        for agent in (self.agent, other, self.agent):
            self.assertEqual((await self.service.send(agent.device, WAKEUP)).outcome, "sent")
        self.assertEqual((len(other.messages), self.server.connections), (1, 1))

    async def test_host(self) -> None:
        """The host of a device is that of its endpoint."""
        self.assertEqual(self.service.host_of(self.agent.device), self.server.url.removeprefix("https://"))
        self.assertEqual(self.service.host_of(WebPushDevice("nonsense", "", "")), "")

    async def test_other_subscription_cannot_decrypt(self) -> None:
        """A message is for one subscription."""
        other = UserAgent(self.agent.endpoint, self.key.public)
        self.assertRaises(http_ece.ECEException, other.receive, encrypt(b"{}", self.agent.device))


class AnswerTests(WebPushTestCase):
    """What each answer means."""

    async def test_answers(self) -> None:
        """Only answers about the subscription remove the device."""
        for answer, expected in (
            (Answer(200), PushResult("sent", "", 200)),
            (Answer(202), PushResult("sent", "", 202)),
            (Answer(204), PushResult("sent", "", 204)),
            (Answer(404), PushResult("gone", "subscription_gone", 404)),
            (Answer(410), PushResult("gone", "subscription_gone", 410)),
            (Answer(400, b"secret"), PushResult("rejected", "refused", 400)),
            (Answer(401), PushResult("rejected", "refused", 401)),
            (Answer(403, b'{"reason":"BadJwtToken"}'), PushResult("rejected", "refused", 403)),
            (Answer(403, b'{"reason":"VapidPkHashMismatch"}'), PushResult("mismatch", "vapid_key_mismatch", 403)),
            (KEY_MISMATCH, PushResult("mismatch", "vapid_key_mismatch", 403)),
            (Answer(413), PushResult("rejected", "too_large", 413)),
            (Answer(408), PushResult("retry", "unavailable", 408)),
            (Answer(429, headers={"Retry-After": "90"}), PushResult("retry", "unavailable", 429, 90.0)),
            (Answer(500), PushResult("retry", "unavailable", 500)),
            (Answer(503, headers={"Retry-After": "3"}), PushResult("retry", "unavailable", 503, 3.0)),
            (Answer(307, headers={"Location": self.agent.endpoint}), PushResult("rejected", "refused", 307)),
            (Answer(503, behaviour="oversize"), PushResult("retry", "unavailable", 503)),
        ):
            self.server.script.append(answer)
            self.assertEqual(await self.send(), expected)
        self.assertEqual(len(self.server.received), 17)

    async def test_ended_subscription(self) -> None:
        """Is gone, as is one that never was."""
        self.server.unsubscribe(self.agent)
        self.assertEqual(await self.send(), PushResult("gone", "subscription_gone", 410))
        self.agent.endpoint += "x"
        self.assertEqual(await self.send(), PushResult("gone", "subscription_gone", 404))

    async def test_subscription_of_another_key(self) -> None:
        """As after the VAPID key was replaced: the device does not belong to this sender."""
        self.service = WebPushService(self.make_key(), CONTACT, self.client)
        self.assertEqual((await self.send()).outcome, "mismatch")

    async def test_failures_of_the_connection(self) -> None:
        """Are tried again, whatever they are."""
        for behaviour in ("hang", "stall", "reset"):
            self.server.always = Answer(behaviour=behaviour)
            self.shorten_timeout(web_push, self.server.always)
            result = await self.send()
            self.assertEqual((result.outcome, result.status), ("retry", None), behaviour)
        self.server.always = None
        self.assertEqual((await self.send()).outcome, "sent")

    async def test_invalid_subscriptions(self) -> None:
        """Are rejected, and nothing is sent."""
        device = self.agent.device
        for invalid in (
            WebPushDevice(device.endpoint, "", device.auth),
            WebPushDevice(device.endpoint, encode_base64url(b"\4" + bytes(64)), device.auth),
            WebPushDevice(device.endpoint, "ä", device.auth),
            WebPushDevice("ftp://a.example/", device.p256dh, device.auth),
            WebPushDevice("https://user@127.0.0.1/", device.p256dh, device.auth),
        ):
            self.assertEqual((await self.service.send(invalid, WAKEUP)).outcome, "rejected")
        self.assertEqual(self.server.connections, 0)

    async def test_blocked_endpoints(self) -> None:
        """Private addresses are not connected to, nor is http but to networks that the operator allows."""
        device = self.agent.device
        for endpoint in ("https://10.0.0.1/push", "https://[::1]/push", "http://93.184.216.34/push"):
            blocked = WebPushDevice(endpoint, device.p256dh, device.auth)
            self.assertEqual(await self.service.send(blocked, WAKEUP), PushResult("rejected", "AddressOffLimits"))

    async def test_loopback_that_is_not_allowed(self) -> None:
        """Without the operator's permission nothing reaches loopback."""
        client = OutboundHTTPClient(self.reactor)
        self.addCleanup(client.close)
        service = WebPushService(self.key, CONTACT, client)
        result = await service.send(self.agent.device, WAKEUP)
        self.assertEqual(result, PushResult("rejected", "AddressOffLimits"))
        self.assertEqual(self.server.connections, 0)

    async def test_plain_http_on_loopback(self) -> None:
        """Works where loopback is allowed, as in the demo."""
        plain = WebPushServer()
        self.start(plain)
        agent = plain.subscribe(self.key.public)
        self.assertEqual((await self.service.send(agent.device, WAKEUP)).outcome, "sent")

    async def test_untrusted_certificate(self) -> None:
        """Is a failure that may pass."""
        client = OutboundHTTPClient(self.reactor, allow_private=self.client.guard._allowed)
        self.addCleanup(client.close)
        result = await WebPushService(self.key, CONTACT, client).send(self.agent.device, WAKEUP)
        self.assertEqual((result.outcome, self.server.received), ("retry", []))


class VAPIDTokenTests(PlainTestCase):
    """Tokens that identify this server."""

    def setUp(self) -> None:
        private = ec.generate_private_key(ec.SECP256R1())
        numbers = private.public_key().public_numbers()
        point = b"\4" + numbers.x.to_bytes(32) + numbers.y.to_bytes(32)
        self.key = VAPIDKey(private, encode_base64url(point))
        self.clock = Clock()
        self.clock.advance(1_800_000_000)
        self.tokens = VAPIDTokenCache(self.key, CONTACT, self.clock)

    def read(self, header: bytes) -> dict[str, Any]:
        """Claims of a header, whose signature is verified."""
        token, _, key = header.decode().removeprefix("vapid t=").partition(",k=")
        self.assertEqual(key, self.key.public)
        return verify_vapid_token(token, key)

    def test_claims(self) -> None:
        """Origin, end within 24 hours, and contact; jwcrypto verifies the signature."""
        claims = self.read(self.tokens.get("https://push.example"))
        self.assertEqual(claims, {"aud": "https://push.example", "exp": 1_800_000_000 + 43_200, "sub": CONTACT})

    def test_kept_for_each_origin(self) -> None:
        """And renewed hours before its end."""
        first = self.tokens.get("https://push.example")
        self.clock.advance(21_000)
        self.assertEqual(self.tokens.get("https://push.example"), first)
        self.assertNotEqual(self.tokens.get("https://other.example"), first)
        self.clock.advance(1000)
        second = self.tokens.get("https://push.example")
        self.assertEqual(self.read(second)["exp"] - self.read(first)["exp"], 22_000)

    def test_clock_that_was_set_back(self) -> None:
        """A token whose end is too far away now is replaced."""
        first = self.tokens.get("https://push.example")
        self.clock.rightNow -= 86_400
        self.assertNotEqual(self.tokens.get("https://push.example"), first)

    def test_number_of_origins_is_bounded(self) -> None:
        """Strangers choose them; the least recently used is dropped."""
        first = self.tokens.get("https://kept.example")
        dropped = self.tokens.get("https://dropped.example")
        for number in range(998):
            self.tokens.get(f"https://{number}.example")
        self.assertEqual(self.tokens.get("https://kept.example"), first)
        self.tokens.get("https://one-more.example")
        self.assertEqual(self.tokens.get("https://kept.example"), first)
        self.assertEqual(len(self.tokens._headers), 1000)
        self.assertNotEqual(self.tokens.get("https://dropped.example"), dropped)


class KeyFileTests(PushTestCase):
    """The VAPID key file."""

    def test_formats(self) -> None:
        """PEM in both forms, and base64url of the number or of DER, as other servers write it."""
        private = ec.generate_private_key(ec.SECP256R1())
        number = private.private_numbers().private_value.to_bytes(32)
        der = private.private_bytes(Encoding.DER, PrivateFormat.PKCS8, NoEncryption())
        publics = set()
        for content in (
            private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
            private.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()),
            encode_base64url(number).encode() + b"\n",
            encode_base64url(der).encode(),
        ):
            key = self.load(content)
            self.assertNotIn("private", repr(key))
            publics.add(key.public)
        [public] = publics
        self.assertEqual((len(public), decode_base64url(public)[0]), (87, 4))

    def test_invalid_files(self) -> None:
        """Each gets one line, which has nothing of the key."""
        private = ec.generate_private_key(ec.SECP256R1())
        for content in (
            b"",
            b"-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n",
            b"secret" * 10,
            "sécret".encode(),
            encode_base64url(bytes(32)).encode(),
            encode_base64url(b"\xff" * 32).encode(),
            private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret")),
            ec.generate_private_key(ec.SECP384R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        ):
            with pytest.raises(SecretFileError, match="expected an unencrypted private key") as caught:
                self.load(content)
            self.assertNotIn("\n", str(caught.value))
            self.assertNotIn("secret", str(caught.value))

    def load(self, content: bytes) -> VAPIDKey:
        """Load a file with this content."""
        path = self.directory / "key"
        path.touch(0o600)
        path.write_bytes(content)
        return load_vapid_key(path)


def test_rfc_8291_example() -> None:
    """The user agent of the tests decrypts the example of RFC 8291, section 5."""
    agent = UserAgent("https://push.example.net/", "")
    agent._private = ec.derive_private_key(
        int.from_bytes(decode_base64url("q1dXpw3UpT5VOmu_cf_v6ih07Aems3njxI-JWgLcM94")), ec.SECP256R1()
    )
    agent._secret = decode_base64url("BTBZMqHH6r4Tts7J_aSIgg")
    agent.receive(
        decode_base64url(
            "DGv6ra1nlYgDCS1FRnbzlwAAEABBBP4z9KsN6nGRTbVYI_c7VJSPQTBtkgcy27mlmlMoZIIgDll6e3vCYLocInmYWAmS6TlzAC8wEqKK6PBr"
            "u3jl7A_yl95bQpu6cVPTpK4Mqgkf1CXztLVBSt2Ks3oZwbuwXPXLWyouBWLVWGNWQexSgSxsj_Qulcy4a-fN"
        )
    )
    assert agent.messages == [b"When I grow up, I want to be a watermelon"]
    assert LOOPBACK not in agent.endpoint
