"""Web Push to a push service that is not ours, the npm package web-push-testing, which decrypts what it receives."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from twisted.internet.threads import deferToThread
from twisted.trial.unittest import TestCase

from mediatord.net.outbound_http import ConnectionLimits, OutboundHTTPClient
from mediatord.push.devices import WebPushDevice
from mediatord.push.service import PushResult, Wakeup
from mediatord.push.web_push import VAPIDKey, WebPushService
from tests.foreign.environments import PROJECT
from tests.push.push_test_case import MovableReactor
from tests.push.web_push_server import encode_base64url

INSTALLED = PROJECT / ".node-push"
PATIENCE_SECONDS = 60


@contextmanager
def run_push_service() -> Iterator[str]:
    """Run it; yields its base URL. Skips the test if it is not installed."""
    node = shutil.which("node")
    if node is None or not (INSTALLED / ".installed").exists():
        pytest.skip(".node-push is not installed; `make .node-push` does that, given npm and Node 20")
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    with subprocess.Popen(
        [node, Path(__file__).with_name("push_service.mjs")],
        cwd=INSTALLED,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()
            try:
                process.wait(PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


class ForeignPushServiceTests(TestCase):
    """It checks the headers, verifies the token with jsonwebtoken, and decrypts with http_ece for Node."""

    timeout = 2 * PATIENCE_SECONDS

    def setUp(self) -> None:
        running = run_push_service()
        self.url = running.__enter__()
        self.addCleanup(running.__exit__, None, None, None)
        private = ec.generate_private_key(ec.SECP256R1())
        numbers = private.public_key().public_numbers()
        point = b"\4" + numbers.x.to_bytes(32) + numbers.y.to_bytes(32)
        self.key = VAPIDKey(private, encode_base64url(point))
        client = OutboundHTTPClient(
            MovableReactor(), allow_private=[ip_network("127.0.0.0/8")], keep=ConnectionLimits()
        )
        self.addCleanup(client.close)
        self.service = WebPushService(self.key, "mailto:operator@mediator.example", client)

    async def call(self, path: str, value: object) -> Any:
        """POST JSON to the push service; what it answers."""
        return await deferToThread(self.post, path, value)

    def post(self, path: str, value: object) -> Any:
        """As :meth:`call`, but blocking."""
        request = Request(self.url + path, json.dumps(value).encode(), {"Content-Type": "application/json"})
        with build_opener(ProxyHandler({})).open(request, timeout=PATIENCE_SECONDS) as response:
            body = response.read()
        return json.loads(body)["data"] if body.startswith(b"{") else None

    async def subscribe(self) -> tuple[str, WebPushDevice]:
        """A subscription: its id, and what the wallet registers."""
        data = await self.call("/subscribe", {"userVisibleOnly": "true", "applicationServerKey": self.key.public})
        keys = data["keys"]
        return data["clientHash"], WebPushDevice(data["endpoint"], keys["p256dh"], keys["auth"])

    async def test_message(self) -> None:
        """Arrives, decrypted, once for each wake-up."""
        client, device = await self.subscribe()
        wakeups = (Wakeup("mediator-1"), Wakeup("mediator-1", ("a", "b")))
        for wakeup in wakeups:
            self.assertEqual(await self.service.send(device, wakeup), PushResult("sent", "", 201))
        data = await self.call("/get-notifications", {"clientHash": client})
        self.assertEqual(
            [json.loads(message) for message in data["messages"]],
            [{"mediator": "mediator-1"}, {"mediator": "mediator-1", "message_ids": ["a", "b"]}],
        )

    async def test_expired_subscription(self) -> None:
        """Is gone."""
        client, device = await self.subscribe()
        await self.call(f"/expire-subscription/{client}", {})
        result = await self.service.send(device, Wakeup("mediator-1"))
        self.assertEqual((result.outcome, result.status), ("gone", 410))

    async def test_other_key(self) -> None:
        """A token of another key is refused, and nothing arrives."""
        client, device = await self.subscribe()
        other = VAPIDKey(ec.generate_private_key(ec.SECP256R1()), self.key.public)
        service = WebPushService(other, "mailto:operator@mediator.example", self.service._client)
        self.assertEqual(await service.send(device, Wakeup("mediator-1")), PushResult("rejected", "refused", 400))
        self.assertEqual(await self.call("/get-notifications", {"clientHash": client}), {"messages": []})
