"""The push service and the user agents of the demo: what they deliver and decrypt, and what they refuse."""

from __future__ import annotations

import json
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from twisted.internet import reactor as _reactor  # noqa: TID251  the receiver is an HTTP server
from twisted.internet.defer import Deferred
from twisted.trial.unittest import TestCase

from mediatord.net.outbound_http import OutboundHTTPClient
from mediatord.push.device_json import parse_device
from mediatord.push.devices import WebPushDevice
from mediatord.push.service import PushResult, Wakeup
from mediatord.push.web_push import VAPIDKey, VAPIDTokenCache, WebPushService, encrypt, load_vapid_key
from mediatord.runtime.secret_files import create_secret_file
from mediatord.wallet.didcomm_messages import UnreadableMessage
from mediatord.wallet.temporary_daemon import make_vapid_key
from mediatord.wallet.web_push_receiver import PushRefused, WebPushReceiver, WebPushSubscription
from tests.push.push_test_case import MovableReactor

CONTACT = "mailto:operator@mediator.example"
WAKEUP = Wakeup("mediator-1")
DAY = 86_400.0


class ReceiverTestCase(TestCase):
    """A receiver with a subscription, and the mediator's service that sends to it."""

    timeout = 60

    def setUp(self) -> None:
        directory = TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)
        self.reactor: Any = MovableReactor()
        self.receiver = WebPushReceiver(self.reactor)
        self.receiver.start()
        self.addCleanup(lambda: Deferred.fromCoroutine(self.receiver.stop()))
        self.key = self.make_key("vapid.pem")
        self.subscription = self.receiver.subscribe(self.key.public)

    def make_key(self, name: str) -> VAPIDKey:
        """A VAPID key as that of a temporary daemon."""
        path = self.directory / name
        create_secret_file(path, make_vapid_key())
        return load_vapid_key(path)

    def device_of(self, subscription: WebPushSubscription) -> WebPushDevice:
        """Its registration at a mediator that allows http."""
        device = parse_device("web_push", subscription.to_json(), allow_http=True)
        assert isinstance(device, WebPushDevice)
        return device


class DeliveryTests(ReceiverTestCase):
    """Messages of the mediator's own service for Web Push."""

    async def send(self, key: VAPIDKey, device: WebPushDevice) -> PushResult:
        """Send a wake-up over HTTP."""
        client = OutboundHTTPClient(_reactor, allow_private=[ip_network("127.0.0.0/8")])
        service = WebPushService(key, CONTACT, client)
        try:
            return await service.send(device, WAKEUP)
        finally:
            await service.close()

    async def test_wakeup(self) -> None:
        """Only its own subscription decrypts it."""
        other = self.receiver.subscribe(self.key.public)
        result = await self.send(self.key, self.device_of(self.subscription))
        self.assertEqual(result, PushResult("sent", "", 201))
        ciphertext = await self.subscription.next_message()
        self.assertNotIn(b"mediator", ciphertext)
        self.assertEqual(json.loads(self.subscription.decrypt(ciphertext)), {"mediator": "mediator-1"})
        for body in (ciphertext[:-1], ciphertext[:20], b""):
            self.assertRaises(UnreadableMessage, self.subscription.decrypt, body)
        self.assertRaises(UnreadableMessage, other.decrypt, ciphertext)
        self.assertNoResult(other.next_message())

    async def test_unknown_subscription(self) -> None:
        """The mediator removes it."""
        device = replace(self.device_of(self.subscription), endpoint=f"{self.receiver.url}/push/unknown")
        self.assertEqual((await self.send(self.key, device)).outcome, "gone")
        self.assertNoResult(self.subscription.next_message())

    async def test_other_server(self) -> None:
        """The subscription is for one server; whoever waits for a message learns of the refusal."""
        result = await self.send(self.make_key("other.pem"), self.device_of(self.subscription))
        self.assertEqual((result.outcome, result.status), ("rejected", 403))
        with self.assertRaises(PushRefused):
            await self.subscription.next_message()


class RefusalTests(ReceiverTestCase):
    """Messages that a push service must not deliver."""

    def setUp(self) -> None:
        super().setUp()
        self.path = self.subscription.endpoint.removeprefix(self.receiver.url)
        self.tokens = VAPIDTokenCache(self.key, CONTACT, self.reactor)
        self.body = encrypt(b"{}", self.device_of(self.subscription))

    def receive(self, body: bytes | None = None, **changes: str) -> int:
        """The status for a message with other headers."""
        headers = {"ttl": "60", "content-encoding": "aes128gcm", "authorization": self.authorize(self.receiver.url)}
        changed = {name.replace("_", "-"): value for name, value in changes.items()}
        return self.receiver.receive(self.path, {**headers, **changed}, self.body if body is None else body)

    def authorize(self, origin: str) -> str:
        """The header with a token for an origin."""
        return self.tokens.get(origin).decode()

    async def assert_refused(self, status: int, reason: str) -> None:
        """The last message was refused."""
        with self.assertRaises(PushRefused) as context:
            await self.subscription.next_message()
        self.assertEqual(context.exception.status, status)
        self.assertIn(reason, str(context.exception))

    async def test_headers_and_size(self) -> None:
        """TTL and encoding are required; a body may have 4096 bytes."""
        cases: tuple[tuple[dict[str, Any], int, str], ...] = (
            ({"ttl": ""}, 400, "TTL"),
            ({"ttl": "-1"}, 400, "TTL"),
            ({"content_encoding": "gzip"}, 415, "aes128gcm"),
            ({"body": bytes(4097)}, 413, "large"),
        )
        for changes, status, reason in cases:
            self.assertEqual(self.receive(**changes), status)
            await self.assert_refused(status, reason)
        self.assertEqual(self.receive(bytes(4096)), 201)

    async def test_tokens(self) -> None:
        """A token is for this origin, for a day at most, and signed with the key of the subscription."""
        good = self.authorize(self.receiver.url)
        head, _, claims_and_signature = good.partition(".")
        other = self.authorize("http://127.0.0.1:1").partition(".")[2].partition(".")[0]
        forged = f"{head}.{other}.{claims_and_signature.partition('.')[2]}"
        cases = (
            ("", "server"),
            ("Bearer x", "server"),
            (good.partition(",")[0] + ",k=AAAA", "server"),
            (forged, "signature"),
            (self.authorize("http://127.0.0.1:1"), "another push service"),
        )
        for header, reason in cases:
            self.assertEqual(self.receive(authorization=header), 403, header)
            await self.assert_refused(403, reason)
        self.assertEqual(self.receive(authorization=good), 201)

    async def test_validity_of_tokens(self) -> None:
        """They expire, and must not be valid for more than a day."""
        good = self.authorize(self.receiver.url)
        for offset in (DAY, -DAY):
            self.reactor.offset = offset
            self.assertEqual(self.receive(authorization=good), 403)
            await self.assert_refused(403, "expired")
