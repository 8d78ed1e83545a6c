"""Tokens, endpoints and keys appear in no log, representation, result or exception."""

from __future__ import annotations

import json
import traceback
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from twisted.logger import ILogObserver, LogEvent, formatEvent, globalLogPublisher
from zope.interface import implementer

from mediatord.push import fcm, web_push, webhook
from mediatord.push.devices import FCMDevice, WebPushDevice
from mediatord.push.fcm import FCMService, load_fcm_credentials
from mediatord.push.service import PushResult, Wakeup
from mediatord.push.web_push import WebPushService, load_vapid_key
from mediatord.push.webhook import WebhookNotifier
from tests.push.fcm_server import FCMServer
from tests.push.push_test_case import PushTestCase
from tests.push.scripted_server import Answer, ScriptedServer
from tests.push.web_push_server import UserAgent, WebPushServer

CANARY = "canary-5d1f"
WAKEUP = Wakeup(f"{CANARY}-mediator", (f"{CANARY}-message",))
# A service may repeat anything in its answer.
ECHO = f'{{"error":{{"status":"{CANARY}","message":"{CANARY}","details":[{{"errorCode":"{CANARY}"}}]}}}}'.encode()
ANSWERS = (
    *(Answer(status, ECHO) for status in (200, 307, 400, 401, 403, 404, 410, 413, 429, 500, 503)),
    *(Answer(behaviour=behaviour) for behaviour in ("hang", "stall", "reset", "oversize")),
    Answer(200, ECHO, {"Retry-After": CANARY, "X-Canary": CANARY}),
)


@implementer(ILogObserver)
class LogKeeper:
    """
    Keeps all of every log event as text.

    :param seen: where to.
    """

    def __init__(self, seen: list[str]) -> None:
        self._seen = seen

    def __call__(self, event: LogEvent) -> None:
        self._seen.append(formatEvent(event))
        self._seen.append(repr({key: value for key, value in event.items() if key != "log_logger"}))
        if "log_failure" in event:
            self._seen.append(event["log_failure"].getTraceback(detail="verbose"))


class SecrecyTests(PushTestCase):
    """Every answer of every service, with all logging on."""

    def setUp(self) -> None:
        super().setUp()
        self.seen: list[str] = []
        keeper = LogKeeper(self.seen)
        globalLogPublisher.addObserver(keeper)
        self.addCleanup(globalLogPublisher.removeObserver, keeper)

    def keep(self, *values: object) -> None:
        """Keep representations."""
        for value in values:
            self.seen += [repr(value), str(value)]

    def check(self, *secrets: str) -> None:
        """None of the secrets was seen, in whole or in part."""
        text = "\n".join(self.seen)
        for secret in (CANARY, *secrets):
            where = text.find(secret)
            self.assertEqual(where, -1, text[max(0, where - 300) : where + 100])

    async def test_fcm(self) -> None:
        """Registration token, access token, key of the service account."""
        server = FCMServer(self.certificate)
        self.start(server)
        credentials = load_fcm_credentials(server.write_credentials(self.directory / "fcm.json"))
        device = FCMDevice(f"{CANARY}-token", "android")
        results: list[PushResult] = []
        for target in (server, server.tokens):
            for answer in ANSWERS:
                target.always = answer
                self.shorten_timeout(fcm, answer)
                service = FCMService(credentials, self.client, url=server.url)
                results.append(await service.send(device, WAKEUP))
                self.keep(service, vars(service), vars(service._tokens), credentials, device)
            target.always = None
        self.keep(*results)
        self.assertIn(CANARY.encode(), server.received[0].body)
        key = server.tokens.credentials["private_key"].splitlines()
        self.check("ya29", *key[1:-1], *(request.body.decode()[-40:] for request in server.tokens.received))

    async def test_web_push(self) -> None:
        """Endpoint, keys of the subscription, VAPID key and tokens."""
        server = WebPushServer(self.certificate)
        self.start(server)
        path = self.directory / "vapid"
        path.touch(0o600)
        pem = ec.generate_private_key(ec.SECP256R1()).private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        path.write_bytes(pem)
        key = load_vapid_key(path)
        agent = UserAgent(f"{server.url}/push/{CANARY}", key.public)
        server.agents[f"/push/{CANARY}"] = agent
        device = agent.device
        service = WebPushService(key, f"mailto:{CANARY}@mediator.example", self.client)
        for answer in (None, *ANSWERS):
            server.always = answer
            self.shorten_timeout(web_push, answer)
            self.keep(await service.send(device, WAKEUP), service, service.__dict__, key, device)
        for endpoint in (f"https://{CANARY}.example.invalid:0/", f"https://10.0.0.1/{CANARY}"):
            bad = WebPushDevice(endpoint, device.p256dh, device.auth)
            self.keep(await service.send(bad, WAKEUP), bad)
        self.assertEqual(json.loads(agent.messages[0])["mediator"], WAKEUP.mediator)
        self.check(device.auth, device.p256dh, pem.decode().splitlines()[1], "vapid t=")

    async def test_webhook(self) -> None:
        """Account, signature and secret."""
        server = ScriptedServer(self.certificate)
        self.start(server)
        secret = f"{CANARY}-secret-of-at-least-32-bytes".encode()
        notifier = WebhookNotifier(f"{server.url}/{CANARY}", secret, self.client, str)
        for answer in ANSWERS:
            server.always = answer
            self.shorten_timeout(webhook, answer)
            self.keep(await notifier.notify(f"did:example:{CANARY}", 1, 1), notifier)
        self.assertIn(CANARY.encode(), server.received[0].body)
        self.check("v1=")

    def test_invalid_credentials(self) -> None:
        """The error has nothing of the file, nor has its traceback."""
        path = self.directory / "key"
        path.touch(0o600)
        loaders: list[Any] = [load_fcm_credentials, load_vapid_key]
        fields = {"project_id": CANARY, "client_email": CANARY, "token_uri": "https://a.example/"}
        for content in (CANARY, json.dumps({**fields, "private_key": CANARY}), f"-----BEGIN {CANARY}"):
            path.write_text(content)
            for load in loaders:
                try:
                    load(path)
                except Exception as error:
                    self.seen.append("".join(traceback.format_exception(error)))
        self.assertEqual(len(self.seen), 6)
        self.check()
