"""Sending of wake-ups: outcomes, removal of devices, back-off, and bounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from prometheus_client import CollectorRegistry
from twisted.internet.defer import Deferred, succeed
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.observability.event_recorder import EventRecorder
from mediatord.observability.metrics import Metrics
from mediatord.observability.pseudonyms import Pseudonymizer, PseudonymKey
from mediatord.push.devices import DeviceSealer, FCMDevice, PushDevice, WebPushDevice
from mediatord.push.requester import (
    FAILURES_BEFORE_BACKOFF,
    MAX_REQUESTS_PER_HOST,
    MAX_UNTRUSTED_ATTEMPTS,
    MAX_UNTRUSTED_REQUESTS,
    MAX_WAITING_PER_HOST,
    TRUSTED_SECONDS,
    IPushRequester,
    PushRequester,
)
from mediatord.push.sender import WEBHOOK_TARGET, PushSender, SendReport
from mediatord.push.service import PushResult
from mediatord.store.interfaces.devices import Device, IDeviceStore, WakeupClaim
from tests.observability.memory_event_log import MemoryEventLog
from tests.push.scripted_service import SENT, ScriptedService
from tests.push.sender_pipe import PipedSender

OWNER = "did:example:owner"


class _ForgottenDevices:
    """Stands for the store, of which the sender uses one operation."""

    def __init__(self) -> None:
        self.ids: list[bytes] = []

    def forget_devices(self, ids: Sequence[bytes]) -> Deferred[int]:
        self.ids += ids
        return succeed(len(ids))


class _Webhook:
    """:ivar calls: arguments, in order."""

    def __init__(self, result: PushResult) -> None:
        self.result = result
        self.calls: list[tuple[str, int, int]] = []

    async def notify(self, account: str, messages: int, bytes: int) -> PushResult:
        self.calls.append((account, messages, bytes))
        return self.result

    async def close(self) -> None: ...


class PushSenderTests(SynchronousTestCase):
    """A sender with scripted services."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.log = MemoryEventLog()
        metrics = Metrics(CollectorRegistry(), version="test")
        self.recorder = EventRecorder(
            self.clock, self.log, metrics, Pseudonymizer("plain", PseudonymKey(1, b"x" * 32)), self.clock.seconds
        )
        self.fcm, self.web_push = ScriptedService("fcm"), ScriptedService("web_push")
        self.store = _ForgottenDevices()
        self.secrets = [b"current", b"oldest"]
        self.sealer = DeviceSealer(lambda: self.secrets, lambda number: b"n" * number)
        self.sender = self.make_sender()

    def make_sender(self, webhook: _Webhook | None = None) -> PushSender:
        requester = self.make_requester(webhook)
        store = cast(IDeviceStore, self.store)
        return PushSender(requester, store, self.recorder, _middle, has_webhook=webhook is not None)

    def make_requester(self, webhook: _Webhook | None) -> IPushRequester:
        return self.make_local_requester(webhook, lambda: self.secrets)

    def make_local_requester(self, webhook: _Webhook | None, secrets: Callable[[], Sequence[bytes]]) -> PushRequester:
        services = {"fcm": self.fcm, "web_push": self.web_push}
        sealer = DeviceSealer(secrets, bytes)
        return PushRequester(self.clock, services, webhook, sealer, "mediator-id", _middle, self.clock.seconds)

    def claim(self, *devices: PushDevice) -> WakeupClaim:
        return WakeupClaim(OWNER, tuple(map(self.sealer.seal, devices)), 3, 300, ("message-1",))

    def send(self, claim: WakeupClaim, **options: Any) -> SendReport:
        return self.successResultOf(self.begin(claim, **options))

    def begin(self, claim: WakeupClaim, **options: Any) -> Deferred[SendReport]:
        """Send, and make the calls of this reactor iteration and the next one."""
        report: Deferred[SendReport] = Deferred()
        self.sender.send(claim, report.callback, **options)
        self.clock.advance(0)
        return report

    def count_backing_off(self, service: str) -> int:
        return self.sender.count_backing_off().get(service, 0)

    def test_all_devices_are_woken(self) -> None:
        """Each once, with the id of the mediator and those of messages; the log has one line each."""
        report = self.send(self.claim(FCMDevice("a", "android"), make_browser("https://one.example/1")), age=2.0)
        self.assertEqual(report, SendReport(frozenset()))
        self.assertEqual((self.fcm.tokens, self.web_push.tokens), (["a"], ["https://one.example/1"]))
        told = self.fcm.requests[0][1]
        self.assertEqual((told.mediator, told.message_ids), ("mediator-id", ("message-1",)))
        lines = self.log.named("push.wake")
        self.assertEqual(
            [(one["service"], one["outcome"], one["age_ms"]) for one in lines],
            [
                ("fcm", "sent", 2000),
                ("web_push", "sent", 2000),
            ],
        )
        self.assertEqual(self.recorder.metrics.push_requests.get("fcm", "sent"), 1)

    def test_unknown_devices_are_removed(self) -> None:
        """Those that the service does not know, or that belong to another sender; nothing is owed."""
        answers = {
            "a": PushResult("gone", "UNREGISTERED", 404),
            "b": PushResult("mismatch", "SENDER_ID_MISMATCH", 403),
        }
        self.fcm.script = answers.__getitem__
        claim = self.claim(FCMDevice("a", "android"), FCMDevice("b", "android"))
        self.assertEqual(self.send(claim), SendReport(frozenset()))
        self.assertEqual(self.store.ids, [device.id for device in claim.devices])
        self.assertEqual(
            [one["reason"] for one in self.log.named("push.forget")], ["UNREGISTERED", "SENDER_ID_MISMATCH"]
        )
        self.assertEqual(self.recorder.metrics.push_devices_forgotten.get("fcm"), 2)

    def test_devices_sealed_with_a_retired_key_are_removed(self) -> None:
        """They cannot be opened any more, and no request is sent."""
        claim = self.claim(FCMDevice("a", "android"))
        self.secrets[:] = [b"newer", b"oldest"]
        self.send(claim)
        self.assertEqual((self.store.ids, self.fcm.tokens), ([claim.devices[0].id], []))

    def test_former_keys_open_devices(self) -> None:
        """After a key rotation."""
        claim = self.claim(FCMDevice("a", "android"))
        self.secrets.insert(0, b"newest")
        self.send(claim)
        self.assertEqual(self.fcm.tokens, ["a"])

    def test_owed_devices_are_retried_alone(self) -> None:
        """The report names them, and `only` limits the next attempt to them."""
        self.web_push.script = lambda token: PushResult("retry", status=503)
        claim = self.claim(FCMDevice("a", "android"), make_browser("https://one.example/1"))
        report = self.send(claim)
        self.assertEqual((report.owed, report.is_partial), (frozenset({claim.devices[1].id}), True))
        self.web_push.script = lambda token: SENT
        self.assertEqual(self.send(claim, only=report.owed, attempt=1), SendReport(frozenset()))
        self.assertEqual((len(self.fcm.requests), len(self.web_push.requests)), (1, 2))

    def test_retry_after_is_respected(self) -> None:
        """Nothing is sent to the whole host for that long, and no request is logged meanwhile."""
        self.fcm.script = lambda token: PushResult("retry", "QUOTA_EXCEEDED", 429, retry_after=60.0)
        claim = self.claim(FCMDevice("a", "android"))
        self.assertEqual(self.send(claim).retry_in, 60.0)
        self.assertEqual(self.count_backing_off("fcm"), 1)
        self.clock.advance(59.0)
        self.assertGreaterEqual(self.send(claim).retry_in, 1.0)
        self.assertEqual(len(self.fcm.requests), 1)
        self.assertEqual(len(self.log.named("push.wake")), 1)
        self.clock.advance(1.0)
        self.fcm.script = lambda token: SENT
        self.assertEqual(self.send(claim), SendReport(frozenset()))
        self.assertEqual(self.count_backing_off("fcm"), 0)

    def test_failing_hosts_are_left_alone_longer_and_longer(self) -> None:
        """Other hosts of the same service are not affected."""
        self.web_push.script = lambda token: PushResult("retry", status=500) if "bad" in token else SENT
        bad = self.claim(make_browser("https://bad.example/1"))
        pauses = []
        for _ in range(FAILURES_BEFORE_BACKOFF + 2):
            self.send(bad)
            began = self.clock.seconds()
            while self.count_backing_off("web_push"):
                self.clock.advance(0.25)
            pauses.append(self.clock.seconds() - began)
        self.assertEqual(pauses, [0.0] * (FAILURES_BEFORE_BACKOFF - 1) + [1.0, 2.0, 4.0])
        self.send(bad)
        self.assertEqual(self.send(self.claim(make_browser("https://good.example/1"))), SendReport(frozenset()))

    def test_limit_of_one_subscription_is_not_that_of_its_host(self) -> None:
        """429 of Web Push concerns the subscription (RFC 8030 8.4)."""
        self.web_push.script = lambda token: PushResult("retry", status=429, retry_after=60.0)
        self.assertEqual(self.send(self.claim(make_browser("https://one.example/1"))).retry_in, 60.0)
        self.web_push.script = lambda token: SENT
        self.assertEqual(self.send(self.claim(make_browser("https://one.example/2"))), SendReport(frozenset()))

    def start(self, *claims: WakeupClaim) -> list[Deferred[SendReport]]:
        """Start to send."""
        return [self.begin(claim) for claim in claims]

    def claims_of(self, number: int, prefix: str = "t") -> list[WakeupClaim]:
        """Claims for a device with FCM each."""
        return [self.claim(FCMDevice(f"{prefix}{place}", "android")) for place in range(number)]

    def test_requests_to_a_host_are_bounded(self) -> None:
        """Some wait; when the host asks for a pause all of them are given up at once."""
        self.fcm.script = None
        sending = self.start(*self.claims_of(MAX_REQUESTS_PER_HOST + MAX_WAITING_PER_HOST + 5))
        self.assertEqual(len(self.fcm.held), MAX_REQUESTS_PER_HOST)
        self.assertEqual(len([one for one in sending if one.called]), 5)
        self.fcm.held[0].callback(SENT)
        self.clock.advance(0)
        self.assertEqual(len(self.fcm.held), MAX_REQUESTS_PER_HOST + 1)
        self.fcm.held[1].callback(PushResult("retry", status=503, retry_after=30.0))
        self.clock.advance(0)
        ended = [self.successResultOf(one) for one in sending if one.called]
        self.assertEqual(len(ended), 5 + 2 + MAX_WAITING_PER_HOST - 1)
        for held in self.fcm.held:
            if not held.called:
                held.callback(SENT)
        self.clock.advance(0)
        self.assertEqual(len(self.fcm.held), MAX_REQUESTS_PER_HOST + 1)

    def test_a_failing_host_gets_one_request_at_a_time(self) -> None:
        """After its pause one finds out whether it works again, and the others end at once."""
        self.fcm.script = lambda token: PushResult("retry", "TimeoutError")
        for claim in self.claims_of(FAILURES_BEFORE_BACKOFF):
            self.send(claim)
        while self.count_backing_off("fcm"):
            self.clock.advance(0.5)
        self.fcm.script = None
        sending = self.start(*self.claims_of(20))
        self.assertEqual((len(self.fcm.held), len([one for one in sending if one.called])), (1, 19))
        self.fcm.held[0].callback(SENT)
        self.clock.advance(0)
        self.fcm.script = lambda token: SENT
        self.assertEqual({self.send(claim) for claim in self.claims_of(20)}, {SendReport(frozenset())})

    def test_untrusted_hosts_share_a_bound(self) -> None:
        """Web Push endpoints that never accepted a wake-up take no requests from other hosts and services."""
        self.send(self.claim(make_browser("https://good.example/0")))
        self.web_push.script = None
        for number in range(MAX_UNTRUSTED_REQUESTS + 5):
            self.start(self.claim(make_browser(f"https://h{number}.example/")))
        self.assertEqual(len(self.web_push.held), MAX_UNTRUSTED_REQUESTS)
        self.start(self.claim(make_browser("https://good.example/1")))
        self.assertEqual(len(self.web_push.held), MAX_UNTRUSTED_REQUESTS + 1)
        self.assertEqual(self.send(self.claim(FCMDevice("a", "android"))), SendReport(frozenset()))

    def test_slow_hosts_are_not_trusted(self) -> None:
        """Although they accept: they share the bound of the others."""
        self.web_push.script = None
        (slow,) = self.start(self.claim(make_browser("https://slow.example/1")))
        self.clock.advance(TRUSTED_SECONDS + 0.1)
        self.web_push.held[0].callback(SENT)
        self.clock.advance(0)
        self.assertEqual(self.successResultOf(slow), SendReport(frozenset()))
        for number in range(MAX_UNTRUSTED_REQUESTS):
            self.start(self.claim(make_browser(f"https://h{number}.example/")))
        before = len(self.web_push.held)
        self.start(self.claim(make_browser("https://slow.example/2")))
        self.assertEqual(len(self.web_push.held), before)

    def test_limits_of_this_process_say_nothing_about_a_host(self) -> None:
        """It is not paused for want of connections here."""
        self.web_push.script = lambda token: PushResult("retry", "ConnectionsBusy")
        for _ in range(2 * FAILURES_BEFORE_BACKOFF):
            self.send(self.claim(make_browser("https://one.example/1")))
        self.assertEqual(self.count_backing_off("web_push"), 0)

    def test_hosts_that_only_reject_are_paused(self) -> None:
        """What is no push service is not flooded by those who register it."""
        self.web_push.script = lambda token: PushResult("rejected", "refused", 405)
        for number in range(FAILURES_BEFORE_BACKOFF + 20):
            self.send(self.claim(make_browser(f"https://victim.example/{number}")))
        self.assertEqual(len(self.web_push.requests), FAILURES_BEFORE_BACKOFF)

    def test_attempts_at_untrusted_hosts_are_bounded(self) -> None:
        """A wake-up is given up in the end; that of FCM never is."""
        self.web_push.script = lambda token: PushResult("retry", "NameUnknown")
        self.fcm.script = lambda token: PushResult("retry", status=500)
        claim = self.claim(FCMDevice("a", "android"), make_browser("https://gone.example/1"))
        self.assertEqual(len(self.send(claim, attempt=MAX_UNTRUSTED_ATTEMPTS - 1).owed), 2)
        self.assertEqual(self.send(claim, attempt=MAX_UNTRUSTED_ATTEMPTS).owed, {claim.devices[0].id})

    def test_pause_of_a_subscription(self) -> None:
        """As long as the service asks for, however often it is tried."""
        self.web_push.script = lambda token: PushResult("retry", status=429, retry_after=3600.0)
        claim = self.claim(make_browser("https://one.example/1"))
        self.send(claim)
        self.clock.advance(3599.0)
        self.send(claim, attempt=3)
        self.assertEqual(len(self.web_push.requests), 1)
        self.clock.advance(1.0)
        self.send(claim, attempt=4)
        self.assertEqual(len(self.web_push.requests), 2)

    def test_failures_of_a_service_are_retried(self) -> None:
        """An unexpected exception is logged without its text, and the wake-up is owed."""

        def fail(token: str) -> PushResult:
            raise ValueError(f"secret {token}")

        self.fcm.script = fail
        report = self.send(self.claim(FCMDevice("a", "android")))
        self.assertEqual(len(report.owed), 1)
        (failure,) = self.flushLoggedErrors(ValueError)
        self.assertNotIn("secret", str(failure.value))

    def test_webhook(self) -> None:
        """It is called with numbers, owed like a device, and paused like a host."""
        webhook = _Webhook(PushResult("retry", status=500))
        self.sender = self.make_sender(webhook)
        report = self.send(self.claim(FCMDevice("a", "android")))
        self.assertEqual((report.owed, report.is_partial), (frozenset({WEBHOOK_TARGET}), True))
        webhook.result = SENT
        self.assertEqual(self.send(self.claim(), only=report.owed), SendReport(frozenset()))
        self.assertEqual(webhook.calls, [(OWNER, 3, 300)] * 2)
        self.assertEqual([one["service"] for one in self.log.named("push.wake")], ["fcm", "webhook", "webhook"])
        webhook.result = PushResult("retry", status=404)
        for _ in range(FAILURES_BEFORE_BACKOFF + 5):
            self.send(self.claim(), only=report.owed)
        self.assertEqual(len(webhook.calls), 2 + FAILURES_BEFORE_BACKOFF)
        self.assertEqual(self.count_backing_off("webhook"), 1)

    def test_a_webhook_is_no_device(self) -> None:
        """A device that is owed is tried again soon, although the webhook was called."""
        self.sender = self.make_sender(_Webhook(SENT))
        self.fcm.script = lambda token: PushResult("retry", status=500)
        report = self.send(self.claim(FCMDevice("a", "android")))
        self.assertEqual((len(report.owed), report.is_partial), (1, False))

    def test_devices_of_services_that_are_switched_off_are_kept(self) -> None:
        """They are not woken, and not removed."""
        device = Device(b"i" * 16, "apns", b"sealed")
        self.assertEqual(self.send(WakeupClaim(OWNER, (device,), 1, 1)), SendReport(frozenset()))
        self.assertEqual((self.store.ids, self.log.events), ([], []))

    def test_close_ends_all_requests(self) -> None:
        """Those that wait as well as those in progress."""
        self.fcm.script = None
        sending = []
        for number in range(MAX_REQUESTS_PER_HOST + 3):
            sending.append(self.begin(self.claim(FCMDevice(f"t{number}", "android"))))
        self.successResultOf(Deferred.fromCoroutine(self.sender.close()))
        self.assertEqual({len(self.successResultOf(one).owed) for one in sending}, {1})


class PipedSenderTests(PushSenderTests):
    """The same with the requests made in a child process."""

    def make_requester(self, webhook: _Webhook | None) -> IPushRequester:
        self.pipe = PipedSender(
            self.clock,
            partial(self.make_local_requester, webhook),
            lambda: self.secrets,
            tells_owner=webhook is not None,
        )
        self.pipe.process.start()
        return self.pipe.process

    def count_backing_off(self, service: str) -> int:
        self.pipe.children[-1].server.report_state()
        return super().count_backing_off(service)


def _middle(low: float, high: float) -> float:
    return (low + high) / 2


def make_browser(endpoint: str) -> WebPushDevice:
    """A subscription; the scripted service uses its endpoint only."""
    return WebPushDevice(endpoint, "p256dh", "auth")
