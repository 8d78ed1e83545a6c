"""Steps of `mediatord demo` that fail; that they succeed, `tests/integration/test_demo.py` shows."""

from __future__ import annotations

from typing import Any

import pytest
from twisted.internet.defer import Deferred
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.push.device_json import parse_device
from mediatord.push.devices import WebPushDevice
from mediatord.push.web_push import encrypt
from mediatord.wallet.demo import DemoPrinter, DemoStepFailed, PushDemo, is_on_loopback
from mediatord.wallet.web_push_receiver import WebPushReceiver, WebPushSubscription


class WakeupTests(SynchronousTestCase):
    """What a push service delivers, or does not."""

    def setUp(self) -> None:
        self.clock = Clock()
        receiver = WebPushReceiver(self.clock)
        receiver.url = "http://127.0.0.1:1"
        self.demo = PushDemo(self.clock, receiver, DemoPrinter())
        self.subscription = WebPushSubscription(f"{receiver.url}/push/a", "")

    def begin_wake(self) -> Deferred[None]:
        """Wait for a wake-up."""
        return Deferred.fromCoroutine(self.demo.wake(self.subscription))

    def deliver(self, content: bytes) -> None:
        """Encrypt a wake-up and deliver it."""
        device = parse_device("web_push", self.subscription.to_json(), allow_http=True)
        assert isinstance(device, WebPushDevice)
        self.subscription.put(encrypt(content, device))

    def test_no_wakeup(self) -> None:
        """The demo waits for 30 s, and names the settings to look at."""
        waiting = self.begin_wake()
        self.clock.advance(29)
        self.assertNoResult(waiting)
        self.clock.advance(1)
        failure: Any = self.failureResultOf(waiting, DemoStepFailed)
        self.assertIn("outbound.allow_private", str(failure.value))

    def test_contents(self) -> None:
        """Ids of messages are an operator's choice; anything else is too much."""
        for content in (b'{"mediator":"a"}', b'{"mediator":"a","message_ids":["b"]}'):
            self.deliver(content)
            self.successResultOf(self.begin_wake())
        for content in (b'{"mediator":"a","from":"did:example:alice"}', b"{}"):
            self.deliver(content)
            self.failureResultOf(self.begin_wake(), DemoStepFailed)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8080", True),
        ("https://localhost:8443/", True),
        ("http://[::1]:8080", True),
        ("https://mediator.example.org", False),
        ("http://10.0.0.1", False),
        ("mediator", False),
    ],
)
def test_is_on_loopback(url: str, expected: bool) -> None:
    """Only there a mediator can reach the push service of the demo."""
    assert is_on_loopback(url) is expected
