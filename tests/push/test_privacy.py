"""
What a daemon with all push services lets out: nothing of messages to the services, and nothing that identifies a
device to logs, metrics, status page, commands and files.

Payloads are not encrypted here, so that the daemon could read and reveal them.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.request import Request, urlopen

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from twisted.internet import reactor as _reactor  # noqa: TID251  sockets and TLS are real
from twisted.internet.defer import Deferred
from twisted.internet.threads import deferToThread

from mediatord.protocol import encoding
from mediatord.wallet.didcomm_client import DIDCommWallet
from mediatord.wallet.didcomm_messages import authcrypt, build_forward
from mediatord.wallet.temporary_daemon import find_free_port
from tests.certificate_authority import CertificateAuthority
from tests.integration.message_load import PATIENCE_SECONDS, enrol_wallet, prepare_daemon
from tests.integration.test_canary import find_text
from tests.integration.test_lifecycle import DaemonTestCase
from tests.push.fake_apns import FakeAPNs, answer
from tests.push.fcm_server import FCMServer
from tests.push.scripted_server import LOOPBACK, Answer, ScriptedServer
from tests.push.web_push_server import WebPushServer

pytestmark = pytest.mark.system

reactor: Any = _reactor

# Of messages.
TYPE, CONTENT = "Rotkehlchen-2b7e", "Nachtigall-88d1"
SMALL, LARGE = 100, 60_000
# Of devices.
FCM_TOKEN, APNS_TOKEN = "Goldammer-fcm-5e1d", secrets.token_hex(32)
TEAM, KEY_ID, TOPIC = "TEAM567890", "KEY4567890", "com.example.wallet"
ADMIN_TOKEN = "0123456789abcdef0123456789abcdef"
WEBHOOK_SECRET = "Zeisig-3a9c-secret-of-the-webhook-"
# A service may repeat in its answer what it was sent.
ECHO = Answer(503, f"{FCM_TOKEN} {APNS_TOKEN} {CONTENT}".encode(), {"X-Echo": FCM_TOKEN})


def write_secret(path: Path, content: bytes) -> str:
    """Write a file of mode 0600; return its path."""
    path.touch(0o600)
    path.write_bytes(content)
    return str(path)


def make_key() -> tuple[bytes, bytes]:
    """A private key of the curve P-256 and its public key, as PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return private, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class PrivacyTests(DaemonTestCase):
    """A daemon that logs all it can, and all services over TLS on loopback."""

    timeout = 240

    def setUp(self) -> None:
        temporary = TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        directory = Path(temporary.name)
        authority = CertificateAuthority(directory)
        certificate = authority.issue("push", [LOOPBACK, "localhost"])
        self.fcm, self.web_push = FCMServer(certificate), WebPushServer(certificate)
        self.webhook = ScriptedServer(certificate)
        for server in (self.fcm, self.web_push, self.webhook):
            server.start(reactor)
            self.addCleanup(self.stop_server, server)
        self.admin_port = find_free_port()
        apns_key, public = make_key()
        self.apns = FakeAPNs(public, team=TEAM, key_id=KEY_ID, topic=TOPIC, seconds=reactor.seconds)
        port = self.apns.server.listen(reactor, certificate)
        self.addCleanup(port.stopListening)
        settings = {
            "push": {
                "fcm": {"credentials": str(self.fcm.write_credentials(directory / "fcm.json")), "url": self.fcm.url},
                "apns": {
                    "key_file": write_secret(directory / "key.p8", apns_key),
                    "key_id": KEY_ID,
                    "team_id": TEAM,
                    "topic": TOPIC,
                    "url": f"https://localhost:{port.getHost().port}",
                },
                "web_push": {
                    "key_file": write_secret(directory / "vapid.pem", make_key()[0]),
                    "contact": "mailto:ops@mediator.example",
                },
                "webhook": {
                    "url": f"{self.webhook.url}/woken",
                    "secret_file": write_secret(directory / "webhook", WEBHOOK_SECRET.encode()),
                },
                "quiet_after_poll": "0s",
                "min_interval": "100ms",
            },
            "outbound": {"allow_private": ["127.0.0.0/8"]},
            "didcomm": {"require_encrypted_payload": False},
            "log": {"level": "debug", "dids": "plain", "rotate": {"compress": False}},
            "admin": {
                "listen": f"tcp:{self.admin_port}:interface=127.0.0.1",
                "token_file": write_secret(directory / "admin", ADMIN_TOKEN.encode()),
            },
        }
        self.daemon = prepare_daemon(settings)
        self.daemon.environment["SSL_CERT_FILE"] = str(authority.path)
        self.addCleanup(self.daemon.clean)

    def stop_server(self, server: ScriptedServer) -> Deferred[None]:
        """Stop a server."""
        return Deferred.fromCoroutine(server.stop())

    async def register_devices(self, wallet: DIDCommWallet) -> None:
        """One of each service."""
        self.agent = self.web_push.subscribe(await wallet.vapid_public_key())
        await wallet.set_push_device("fcm", {"device_token": FCM_TOKEN, "device_platform": "android"})
        await wallet.set_push_device("apns", {"device_token": APNS_TOKEN})
        await wallet.set_push_device("web_push", self.agent.subscription)

    def list_secrets(self) -> list[str]:
        """What identifies the devices, or is for their services only."""
        device = self.agent.device
        received = [*self.fcm.received, *self.web_push.received]
        return [
            *(FCM_TOKEN, APNS_TOKEN, device.endpoint.rpartition("/")[2], device.p256dh, device.auth),
            *(request.headers["authorization"].rpartition(" ")[2] for request in received),
            *self.apns.tokens,
            WEBHOOK_SECRET,
        ]

    async def forward(self, sender: DIDCommWallet, recipient: DIDCommWallet, size: int) -> None:
        """Send a message that the mediator can read."""
        message = {"type": f"https://{TYPE}.example/{TYPE}", "body": {"content": CONTENT, "ballast": "x" * size}}
        headers: dict[str, Any] = {"to": [sender.mediator.did], "from": sender.did}
        forward = build_forward(recipient.did, [encoding.dumps(message)], **headers)
        response = await sender.post(authcrypt(forward, sender.identity, sender.mediator.document))
        self.assertEqual(response.status, 202)

    async def await_requests(self, number: int) -> None:
        """Wait until each service has received this many requests."""

        def reached() -> bool:
            servers = (self.fcm, self.web_push, self.webhook)
            return min(*(len(one.received) for one in servers), len(self.apns.server.requests)) >= number

        await self.await_true(reached)

    async def await_true(self, reached: Callable[[], bool]) -> None:
        deadline = reactor.seconds() + PATIENCE_SECONDS
        while not reached():
            self.assertLess(reactor.seconds(), deadline)
            pause: Deferred[None] = Deferred()
            reactor.callLater(0.05, pause.callback, None)
            await pause

    async def run_command(self, *arguments: str) -> str:
        """All output of a command, whatever its status."""
        command = [sys.executable, "-m", "mediatord", *arguments]
        done = await deferToThread(subprocess.run, command, capture_output=True, text=True, check=False, timeout=120)
        return str(done.stdout) + str(done.stderr)

    async def read_places(self, account: str) -> dict[str, bytes]:
        """All that the daemon shows, logs and stores, by name, and what commands print."""
        self.daemon.environment.clear()
        config = ("--config", str(self.daemon.config))
        shown = {
            "metrics": f"{self.daemon.url}/metrics",
            "status page": f"http://127.0.0.1:{self.admin_port}/admin",
            "status document": f"http://127.0.0.1:{self.admin_port}/admin/status.json",
        }
        places = {name: await deferToThread(self.read_url, url) for name, url in shown.items()}
        for arguments in (("push", "test", "--account", account), ("accounts", "show", account)):
            for form in ((), ("--json",)):
                printed = await self.run_command(*arguments, *form, *config)
                places[" ".join((*arguments[:2], *form))] = printed.encode()
        places["status command"] = (await self.run_command("status", "--url", self.daemon.url)).encode()
        await deferToThread(self.daemon.stop)
        places["output"] = self.daemon.output().encode()
        for path in self.daemon.directory.rglob("*"):
            if path.is_file() and path.name not in ("keys.jwks", "log.key"):
                places[str(path.relative_to(self.daemon.directory))] = path.read_bytes()
        return places

    def read_url(self, url: str) -> bytes:
        """Content at a URL of the daemon; blocks."""
        request = Request(url, headers={"Authorization": f"Bearer {ADMIN_TOKEN}"})
        with urlopen(request, timeout=PATIENCE_SECONDS) as response:
            content: bytes = response.read()
        return content

    async def test_reveals_nothing(self) -> None:
        """Small and large messages, then failures of all services, then devices that are gone."""
        await deferToThread(self.daemon.start)
        alice, bob = await enrol_wallet(self.daemon, reactor), await enrol_wallet(self.daemon, reactor)
        await self.register_devices(bob)
        await self.forward(alice, bob, SMALL)
        await self.await_requests(1)
        await bob.fetch(1)  # after which a new message is worth a wake-up
        await self.forward(alice, bob, LARGE)
        await self.await_requests(2)
        self.check_requests(alice, bob)

        config = ("--config", str(self.daemon.config))
        self.fcm.always = self.web_push.always = self.webhook.always = ECHO
        self.apns.server.script.append(answer(503, APNS_TOKEN))
        failed = await self.run_command("push", "test", "--account", bob.did, *config)
        self.assertEqual(failed.count(" retry "), 4, failed)
        self.web_push.always = Answer(410, ECHO.body)
        self.fcm.always = None
        self.fcm.unregistered.add(FCM_TOKEN)
        self.apns.unregistered.add(APNS_TOKEN)
        gone = await self.run_command("push", "test", "--account", bob.did, *config)
        self.assertEqual(gone.count(" gone "), 3, gone)
        self.fcm.unregistered.clear()
        await self.register_devices(bob)
        secrets_ = self.list_secrets()

        places = await self.read_places(bob.did)
        places |= {"failed test": failed.encode(), "test of devices that are gone": gone.encode()}
        lines = [json.loads(line) for name in places if name.endswith(".jsonl") for line in places[name].splitlines()]
        pushed = [line for line in lines if line["event"].startswith("push.")]
        self.assertEqual({line["event"] for line in pushed}, {"push.wake", "push.forget"})
        for line in pushed:
            self.assertNotIn(alice.did, line.values())
            self.assertEqual(set(line) & {"msg", "size", "sender"}, set())
        self.assertIn(b"Push notifications", places["status page"])
        for secret in secrets_:
            self.assertEqual(find_text(secret, places), [], secret)
        messages = {name: content for name, content in places.items() if not name.startswith("mediator.sqlite3")}
        for mark in (TYPE, CONTENT):
            self.assertEqual(find_text(mark, messages), [])
            self.assertNotEqual(find_text(mark, places), [], "the messages are not stored")

    def check_requests(self, alice: DIDCommWallet, bob: DIDCommWallet) -> None:
        """Those for push services are the same whatever the message; no part of any has anything of it."""
        bodies = {
            "fcm": [request.body for request in self.fcm.received],
            "apns": [encoding.dumps(one.payload) for one in self.apns.notifications],
            "web push": self.agent.messages,
        }
        for service, sent in bodies.items():
            self.assertEqual(len(set(sent)), 1, service)
        self.assertEqual(len({len(request.body) for request in self.web_push.received}), 1)
        self.assertEqual(json.loads(bodies["fcm"][0])["message"]["token"], FCM_TOKEN)
        self.assertEqual(self.apns.notifications[0].device_token, APNS_TOKEN)
        for request in self.webhook.received:
            self.assertEqual(set(request.json), {"account", "messages", "bytes"})
        requests = [*self.fcm.received, *self.fcm.tokens.received, *self.web_push.received, *self.webhook.received]
        places = {
            f"{number} {one.path}": f"{one.path} {one.headers}".encode() + one.body
            for number, one in enumerate(requests)
        }
        for number, one in enumerate(self.apns.server.requests):
            places[f"apns {number}"] = str(one.headers).encode() + one.body
        for mark in (TYPE, CONTENT, alice.did, bob.did):
            self.assertEqual(find_text(mark, places), [])
