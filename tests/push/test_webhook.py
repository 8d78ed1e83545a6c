"""The webhook: its notifications, their signature, and what each answer means."""

from __future__ import annotations

import hashlib
import hmac

import pytest

from mediatord.push import webhook
from mediatord.push.service import PushResult
from mediatord.push.webhook import WebhookNotifier, load_webhook_secret
from mediatord.runtime.secret_files import SecretFileError
from tests.push.push_test_case import PushTestCase
from tests.push.scripted_server import Answer, ScriptedServer

SECRET = b"0123456789abcdef0123456789abcdef"


class WebhookTests(PushTestCase):
    """Notifications to an operator's server on loopback."""

    def setUp(self) -> None:
        super().setUp()
        self.server = ScriptedServer(self.certificate)
        self.start(self.server)
        self.notifier = WebhookNotifier(
            f"{self.server.url}/woken?x=1", SECRET, self.client, lambda did: f"name:{did}"
        )

    async def test_notification(self) -> None:
        """Account as configured, number and bytes; the receiver can verify the signature."""
        result = await self.notifier.notify("did:example:alice", 3, 5120)
        self.assertEqual(result, PushResult("sent", "", 200))
        [request] = self.server.received
        self.assertEqual((request.method, request.path), ("POST", "/woken?x=1"))
        self.assertEqual(request.json, {"account": "name:did:example:alice", "messages": 3, "bytes": 5120})
        self.assertEqual(request.headers["content-type"], "application/json")
        timestamp = request.headers["mediator-timestamp"]
        self.assertLess(abs(int(timestamp) - self.reactor.seconds()), 60)
        expected = hmac.new(SECRET, timestamp.encode() + b"." + request.body, hashlib.sha256).hexdigest()
        self.assertEqual(request.headers["mediator-signature"], f"v1={expected}")

    async def test_answers(self) -> None:
        """2xx is success; anything else is tried again."""
        for answer, expected in (
            (Answer(204), PushResult("sent", "", 204)),
            (Answer(202, b"x" * 100), PushResult("sent", "", 202)),
            (Answer(400), PushResult("retry", "refused", 400)),
            (Answer(404), PushResult("retry", "refused", 404)),
            (Answer(410), PushResult("retry", "refused", 410)),
            (Answer(408), PushResult("retry", "refused", 408)),
            (Answer(429, headers={"Retry-After": "5"}), PushResult("retry", "refused", 429, 5.0)),
            (Answer(500), PushResult("retry", "refused", 500)),
            (Answer(503, headers={"Retry-After": "9"}), PushResult("retry", "refused", 503, 9.0)),
            (Answer(307, headers={"Location": "/other"}), PushResult("retry", "refused", 307)),
            (Answer(200, behaviour="oversize"), PushResult("sent", "", 200)),
        ):
            self.server.script.append(answer)
            self.assertEqual(await self.notifier.notify("a", 1, 1), expected)
        self.assertEqual(len(self.server.received), 11)

    async def test_failures_of_the_connection(self) -> None:
        """Are tried again."""
        for behaviour in ("hang", "stall", "reset"):
            self.server.always = Answer(behaviour=behaviour)
            self.shorten_timeout(webhook, self.server.always)
            result = await self.notifier.notify("a", 1, 1)
            self.assertEqual((result.outcome, result.status), ("retry", None), behaviour)

    async def test_blocked_address(self) -> None:
        """The guard applies to the operator's URL too; an internal network has to be allowed."""
        notifier = WebhookNotifier("http://10.0.0.1/", SECRET, self.client, str)
        self.assertEqual(await notifier.notify("a", 1, 1), PushResult("retry", "AddressOffLimits"))

    def test_secret_file(self) -> None:
        """At least 32 bytes, without the end of the line."""
        path = self.directory / "secret"
        path.touch(0o600)
        path.write_bytes(SECRET + b"\n")
        self.assertEqual(load_webhook_secret(path), SECRET)
        path.write_bytes(SECRET[:31] + b"\n")
        with pytest.raises(SecretFileError, match="expected at least 32 bytes"):
            load_webhook_secret(path)
