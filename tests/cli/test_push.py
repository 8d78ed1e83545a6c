"""`mediatord push`: test wake-ups through the daemon, and new keys."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from mediatord.cli import init, store_access
from mediatord.control.queue_and_account_operations import ControlOperations
from mediatord.observability.event_recorder import EventRecorder
from mediatord.observability.metrics import Metrics
from mediatord.push.devices import APNsDevice, DeviceSealer, FCMDevice, WebPushDevice
from mediatord.push.manual_wakeup import send_manual_wakeup
from mediatord.push.requester import PushRequester
from mediatord.push.sender import PushSender
from mediatord.push.service import PushResult
from mediatord.push.web_push import load_vapid_key
from mediatord.push.webhook import load_webhook_secret
from mediatord.store.interfaces.decentrl import CommandGuard, Contract
from mediatord.store.interfaces.devices import WakeupClaim, WakeupPolicy, WakeupRequest
from tests.cli.test_commands import Capture, call, one_line
from tests.cli.test_queue import ALICE, BOB, CAROL, ConfiguredStore, configured_store
from tests.push.scripted_service import SENT, ScriptedService
from tests.store.builders import result_of

__all__ = ["configured_store"]

TOKEN = "token-that-nobody-may-see"
ENDPOINT = "https://push.example/endpoint-that-nobody-may-see"


class Webhook:
    """:ivar calls: arguments, in order."""

    def __init__(self, result: PushResult = SENT) -> None:
        self.result = result
        self.calls: list[tuple[str, int, int]] = []

    async def notify(self, account: str, messages: int, bytes: int) -> PushResult:
        self.calls.append((account, messages, bytes))
        return self.result

    async def close(self) -> None: ...


class PushedStore:
    """The store of a daemon with push services whose answers a test gives."""

    def __init__(self, configured: ConfiguredStore, webhook: Webhook | None = None) -> None:
        self.path = configured.path
        self.store = configured.store
        self.fcm, self.web_push = ScriptedService("fcm"), ScriptedService("web_push")
        self.sealer = DeviceSealer(lambda: [b"secret"], os.urandom)
        metrics = Metrics(CollectorRegistry(), version="1")
        recorder = EventRecorder(configured.clock, configured.daemon.events, metrics, configured.pseudonymizer)
        services = {"fcm": self.fcm, "web_push": self.web_push}
        requester = PushRequester(
            configured.clock, services, webhook, self.sealer, "m", lambda low, high: low, configured.clock.seconds
        )
        sender = PushSender(
            requester, self.store.devices, recorder, lambda low, high: low, has_webhook=webhook is not None
        )
        times = iter(range(100))
        wake = partial(send_manual_wakeup, store=self.store, sender=sender, monotonic=lambda: next(times) / 4)
        configured.daemon.operations = ControlOperations(self.store, lambda: recorder, wake_account=wake)

    def add(self, owner: str, *devices: FCMDevice | APNsDevice | WebPushDevice) -> None:
        """Register devices."""
        for device in devices:
            assert result_of(self.store.devices.set_device(owner, self.sealer.seal(device), 10)) is None

    def arguments(self, *arguments: str) -> tuple[str, ...]:
        """Arguments of `mediatord push`, with the configuration."""
        return ("push", *arguments, "--config", str(self.path))


def test_prints_answer_of_each_service(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """One line for each device and the webhook; nothing that identifies a device; status 1 as not all were sent."""
    configured_store.put("a", "b")
    webhook = Webhook()
    pushed = PushedStore(configured_store, webhook)
    pushed.fcm.script = lambda token: PushResult("retry", "QUOTA_EXCEEDED", 429, 60.0)
    pushed.add(ALICE, FCMDevice(TOKEN, "android"), WebPushDevice(ENDPOINT, "p", "a"))
    assert call(*pushed.arguments("test", "--account", ALICE)) == 1
    output = capsys.readouterr()
    assert [line.split() for line in output.out.splitlines()] == [
        ["service", "outcome", "status", "reason", "duration"],
        ["fcm", "retry", "429", "QUOTA_EXCEEDED,", "retry", "after", "60", "s", "0.25", "s"],
        ["web_push", "sent", "200", "0.25", "s"],
        ["webhook", "sent", "200", "0.25", "s"],
        ["2", "of", "3", "wake-ups", "sent", "for", ALICE],
    ]
    assert (pushed.fcm.tokens, pushed.web_push.tokens) == ([TOKEN], [ENDPOINT])
    assert webhook.calls == [(ALICE, 2, 20)]
    assert call(*pushed.arguments("test", "--account", ALICE, "--json")) == 1
    printed = capsys.readouterr().out
    document = json.loads(printed)
    assert (document["did"], document["sent"]) == (ALICE, 2)
    assert [(one["service"], one["outcome"]) for one in document["results"]] == [
        ("fcm", "retry"),
        ("web_push", "sent"),
        ("webhook", "sent"),
    ]
    for secret in (TOKEN, ENDPOINT, "push.example"):
        assert secret not in output.out + output.err + printed


def test_succeeds_if_all_are_sent(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """For accounts and Decentrl identities, by pseudonyms too; without a message."""
    pushed = PushedStore(configured_store)
    pushed.add(ALICE, FCMDevice(TOKEN, "android"))
    assert call(*pushed.arguments("test", "--account", configured_store.pseudonymizer.did(ALICE))) == 0
    assert "1 of 1 wake-up sent" in capsys.readouterr().out
    registration = Contract("registration", None, CAROL, 9e9, b"another digest", b"{}")
    assert result_of(pushed.store.decentrl.save_contract(CommandGuard(b"nonce", 9e9), registration)) is None
    pushed.add(CAROL, WebPushDevice(ENDPOINT, "p", "a"))
    assert call(*pushed.arguments("test", "--account", CAROL)) == 0


def test_removes_unknown_device(configured_store: ConfiguredStore, capsys: Capture) -> None:
    """As after any wake-up; then there is nothing to wake."""
    pushed = PushedStore(configured_store)
    pushed.fcm.script = lambda token: PushResult("gone", "UNREGISTERED", 404)
    pushed.add(ALICE, FCMDevice(TOKEN, "android"))
    assert call(*pushed.arguments("test", "--account", ALICE)) == 1
    assert "UNREGISTERED" in capsys.readouterr().out
    assert call(*pushed.arguments("test", "--account", ALICE)) == 1
    assert one_line(capsys) == f"{ALICE} has no device; its wallet has to register one"


def test_is_not_a_wakeup_for_the_schedule(configured_store: ConfiguredStore) -> None:
    """A message is woken for at once after a test, whatever the minimum interval."""
    pushed = PushedStore(configured_store)
    pushed.add(ALICE, FCMDevice(TOKEN, "android"))
    configured_store.put("a")
    policy = WakeupPolicy(min_interval=3600, quiet_after_poll=0)
    assert call(*pushed.arguments("test", "--account", ALICE)) == 0
    (decision,) = result_of(pushed.store.devices.claim_wakeups([WakeupRequest(ALICE)], policy))
    assert isinstance(decision, WakeupClaim)


def test_device_of_service_that_is_not_configured(configured_store: ConfiguredStore, capsys: Capture) -> None:
    pushed = PushedStore(configured_store)
    pushed.add(ALICE, APNsDevice("ab" * 32))
    assert call(*pushed.arguments("test", "--account", ALICE)) == 1
    assert "not_configured" in capsys.readouterr().out


def test_refusals_are_one_line(
    configured_store: ConfiguredStore, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Push is not configured; the account is unknown; no daemon runs."""
    pushed = PushedStore(configured_store)
    assert call(*pushed.arguments("test", "--account", BOB)) == 1
    assert one_line(capsys) == f"{BOB} is not a registered DID"
    configured_store.daemon.operations = ControlOperations(pushed.store, lambda: None)
    assert call(*pushed.arguments("test", "--account", ALICE)) == 1
    assert one_line(capsys) == "push notifications are not configured: no service under push is"
    monkeypatch.setattr(store_access, "connect_daemon", lambda config: None)
    assert call(*pushed.arguments("test", "--account", ALICE)) == 1
    assert one_line(capsys).startswith("this needs a running daemon; no daemon listens on ")


def test_generates_keys(tmp_path: Path, capsys: Capture) -> None:
    """Which the services accept; nothing is overwritten."""
    vapid, secret = tmp_path / "vapid.pem", tmp_path / "secret"
    assert call("push", "generate-key", "web-push", str(vapid)) == 0
    public = load_vapid_key(vapid).public
    assert capsys.readouterr().out.splitlines() == [
        f"wrote {vapid}; set push.web_push.key_file to it",
        f"public key: {public}",
    ]
    assert call("push", "generate-key", "webhook", str(secret), "--json") == 0
    setting = "push.webhook.secret_file"
    assert json.loads(capsys.readouterr().out) == {"file": str(secret), "setting": setting, "public_key": None}
    assert len(load_webhook_secret(secret)) == 64
    assert call("push", "generate-key", "webhook", str(vapid)) == 1
    assert one_line(capsys) == f"{vapid} already exists and will not be overwritten"
    assert load_vapid_key(vapid).public == public


def test_keys_in_system_directory_belong_to_the_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As those that `init` writes."""
    monkeypatch.setattr(init, "system_owner", lambda: (12345, 12346))
    monkeypatch.setattr(init, "is_system_directory", lambda directory: directory == tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert init.find_file_owner(tmp_path) == (12345, 12346)
    assert init.find_file_owner(tmp_path / "elsewhere") is None
