"""When accounts are woken: rules of the schedule, several processes, crashes, retries, and bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from prometheus_client import CollectorRegistry
from twisted.internet.defer import Deferred, fail
from twisted.internet.task import Clock
from twisted.trial.unittest import SynchronousTestCase

from mediatord.errors import StoreUnavailable
from mediatord.observability.event_recorder import EventRecorder
from mediatord.observability.metrics import Metrics
from mediatord.observability.pseudonyms import Pseudonymizer, PseudonymKey
from mediatord.protocol.probe_markers import PROBE_DID_INFIX
from mediatord.push import scheduler as scheduler_module
from mediatord.push.devices import APNsDevice, DeviceSealer, FCMDevice, PushDevice
from mediatord.push.requester import MAX_REQUESTS_PER_HOST, IPushRequester, PushRequester
from mediatord.push.scheduler import COLLECT_SECONDS, POLL_SECONDS, WakeupScheduler
from mediatord.push.sender import PushSender
from mediatord.push.service import PushResult
from mediatord.store.interfaces.devices import WakeupPolicy
from mediatord.store.interfaces.messages import Payload, QueueLimits, new_stored_message_id
from mediatord.store.sqlite.memory_store import MemoryStore
from tests.observability.memory_event_log import MemoryEventLog
from tests.push.scripted_service import SENT, ScriptedService
from tests.push.sender_pipe import PipedSender

NOW = 1_800_000_000.0
OWNER = "did:example:owner"
OTHER = "did:example:other"
MIN_INTERVAL, QUIET, LEASE = 20.0, 10.0, 30.0
# Seconds after which a note has led to a request: one collection and one more to finish it.
SOON = 2 * COLLECT_SECONDS


class SchedulerTestCase(SynchronousTestCase):
    """A memory store with an account that has a device with FCM; schedulers stand for processes."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.clock.advance(NOW)
        self.fcm, self.apns = ScriptedService("fcm"), ScriptedService("apns")
        self.sealer = DeviceSealer(lambda: [b"secret"], lambda number: b"n" * number)
        self.store = MemoryStore(self.clock, QueueLimits(max_messages=100_000))
        self.successResultOf(self.store.open())
        self.addCleanup(lambda: self.successResultOf(self.store.close()))
        self.add_account(OWNER, FCMDevice("phone", "android"))
        self.scheduler = self.start_scheduler()

    def add_account(self, did: str, *devices: PushDevice) -> None:
        """Register an account with devices."""
        self.successResultOf(self.store.grant(did))
        self.successResultOf(self.store.update_recipients(did, [(did, "add")], max_recipients=10))
        for device in devices:
            self.successResultOf(self.store.devices.set_device(did, self.sealer.seal(device), 10))

    def start_scheduler(
        self, repeat_after: float = 0.0, monotonic: Callable[[], float] | None = None, *, decentrl: bool = True
    ) -> WakeupScheduler:
        """One more process on the same store."""
        metrics = Metrics(CollectorRegistry(), version="test")
        pseudonymizer = Pseudonymizer("plain", PseudonymKey(1, b"x" * 32))
        recorder = EventRecorder(self.clock, MemoryEventLog(), metrics, pseudonymizer, self.clock.seconds)
        sender = PushSender(self.make_requester(), self.store.devices, recorder, _middle)
        policy = WakeupPolicy(MIN_INTERVAL, QUIET, LEASE)
        scheduler = WakeupScheduler(self.clock, self.store.devices, sender, policy, repeat_after, monotonic, decentrl)
        scheduler.startService()
        return scheduler

    def make_requester(self) -> IPushRequester:
        """What makes the requests of one process."""
        return self.make_local_requester(lambda: [b"secret"])

    def make_local_requester(self, secrets: Callable[[], Sequence[bytes]]) -> PushRequester:
        """One that makes them at once."""
        services = {"fcm": self.fcm, "apns": self.apns}
        sealer = DeviceSealer(secrets, bytes)
        return PushRequester(self.clock, services, None, sealer, "mediator", _middle, self.clock.seconds)

    def deliver(self, owner: str = OWNER, *schedulers: WakeupScheduler, number: int = 1) -> None:
        """Store messages that no socket takes, as accepted by these processes."""
        now = self.clock.seconds()
        for _ in range(number):
            payload = Payload(new_stored_message_id(now), b"{}", "json")
            self.successResultOf(self.store.enqueue(owner, [payload], expires_at=now + 86_400))
            for scheduler in schedulers or (self.scheduler,):
                scheduler.note(owner)

    def acknowledge_all(self, owner: str = OWNER) -> None:
        """The owner fetches and acknowledges everything."""
        fetched = self.store.fetch_messages(owner, None, limit=1000, max_bytes=1_000_000)
        messages = self.successResultOf(fetched)
        self.successResultOf(self.store.acknowledge(owner, [message.id for message in messages]))
        self.scheduler.note_poll(owner)

    def pass_time(self, seconds: float) -> None:
        """In steps as small as those of the schedule."""
        self.clock.pump([COLLECT_SECONDS / 2] * round(seconds / COLLECT_SECONDS * 2))

    @contextmanager
    def failing(self, operation: str) -> Iterator[None]:
        """Make an operation of the store fail."""
        with patch.object(self.store.devices, operation, lambda *args, **options: fail(StoreUnavailable())):
            yield


class RuleTests(SchedulerTestCase):
    """One process."""

    def test_a_waiting_message_wakes(self) -> None:
        """After the time for which messages are collected."""
        self.deliver()
        self.assertEqual(self.fcm.tokens, [])
        self.pass_time(SOON)
        self.assertEqual(self.fcm.tokens, ["phone"])

    def test_a_storm_is_one_wakeup(self) -> None:
        """Ten thousand messages for one account within the interval."""
        for _ in range(100):
            self.deliver(number=100)
            self.pass_time(COLLECT_SECONDS)
        self.assertEqual(self.fcm.tokens, ["phone"])

    def test_a_message_that_was_fetched_meanwhile_wakes_nobody(self) -> None:
        """The queue is empty when the account is looked up."""
        self.deliver()
        self.acknowledge_all()
        self.pass_time(60.0)
        self.assertEqual(self.fcm.tokens, [])

    def test_quiet_after_a_poll(self) -> None:
        """An app in the foreground is not disturbed; a message that comes after its last poll wakes it later."""
        self.scheduler.note_poll(OWNER)
        self.pass_time(5.0)
        self.deliver()
        self.pass_time(QUIET - 5.0 - COLLECT_SECONDS)
        self.assertEqual(self.fcm.tokens, [])
        self.pass_time(SOON + COLLECT_SECONDS)
        self.assertEqual(self.fcm.tokens, ["phone"])

    def test_an_app_that_polls_all_the_time_is_never_woken(self) -> None:
        """Whatever comes in between."""
        for _ in range(20):
            self.scheduler.note_poll(OWNER)
            self.pass_time(2.0)
            self.deliver()
            self.pass_time(3.0)
        self.assertEqual(self.fcm.tokens, [])

    def test_a_poll_knows_of_what_came_before(self) -> None:
        """A message that was there when the account polled wakes nobody, though it was not acknowledged."""
        self.deliver()
        self.scheduler.note_poll(OWNER)
        self.pass_time(60.0)
        self.assertEqual(self.fcm.tokens, [])

    def test_unanswered_wakeup_stands_for_what_comes_in_the_interval(self) -> None:
        """Only a message after the interval wakes again."""
        self.deliver()
        self.pass_time(SOON)
        self.deliver()
        self.pass_time(MIN_INTERVAL + 5.0)
        self.assertEqual(self.fcm.tokens, ["phone"])
        self.deliver()
        self.pass_time(SOON)
        self.assertEqual(self.fcm.tokens, ["phone"] * 2)

    def test_answered_wakeup(self) -> None:
        """What comes after the poll wakes again, but not before the interval has passed."""
        self.deliver()
        self.pass_time(SOON)
        self.acknowledge_all()
        self.pass_time(POLL_SECONDS + SOON)
        self.deliver()
        self.pass_time(MIN_INTERVAL - 2.0)
        self.assertEqual(self.fcm.tokens, ["phone"])
        self.pass_time(2.0)
        self.assertEqual(self.fcm.tokens, ["phone"] * 2)

    def test_accounts_without_a_device_cost_one_lookup(self) -> None:
        """No request, and nothing is kept."""
        self.add_account(OTHER)
        self.deliver(OTHER)
        self.pass_time(SOON)
        self.assertEqual((self.fcm.tokens, self.scheduler.waiting), ([], 0))

    def test_probe_is_ignored(self) -> None:
        """The daemon's own messages to itself wake nobody."""
        self.scheduler.note(f"did:peer:2{PROBE_DID_INFIX}x")
        self.assertEqual(self.scheduler.waiting, 0)

    def test_repetition(self) -> None:
        """An unanswered wake-up is repeated while messages wait, if that is switched on."""
        self.scheduler = self.start_scheduler(repeat_after=60.0)
        self.deliver()
        self.pass_time(59.0)
        self.assertEqual(self.fcm.tokens, ["phone"])
        self.pass_time(2.0)
        self.assertEqual(self.fcm.tokens, ["phone"] * 2)
        self.acknowledge_all()
        self.pass_time(200.0)
        self.assertEqual(self.fcm.tokens, ["phone"] * 2)

    def test_repetition_survives_a_message_meanwhile(self) -> None:
        """One that comes while the wake-up is being sent, and which that stands for."""
        self.scheduler = self.start_scheduler(repeat_after=60.0)
        self.fcm.script = None
        self.deliver()
        self.pass_time(SOON)
        self.deliver()
        self.fcm.held[0].callback(SENT)
        self.fcm.script = lambda token: SENT
        self.pass_time(62.0)
        self.assertEqual(self.fcm.tokens, ["phone"] * 2)

    def test_no_repetition_by_default(self) -> None:
        """One message, one wake-up."""
        self.deliver()
        self.pass_time(300.0)
        self.assertEqual(self.fcm.tokens, ["phone"])
        self.assertEqual(self.scheduler.waiting, 0)


class FailureTests(SchedulerTestCase):
    """Services and stores that fail."""

    def test_retries_back_off(self) -> None:
        """Until the service answers; then nothing is left."""
        self.fcm.script = lambda token: PushResult("retry", status=503)
        self.deliver()
        self.pass_time(60.0)
        attempts = len(self.fcm.tokens)
        self.assertTrue(3 <= attempts <= 8, attempts)
        self.fcm.script = lambda token: SENT
        self.pass_time(60.0)
        self.assertEqual(len(self.fcm.tokens), attempts + 1)
        self.assertEqual(self.scheduler.waiting, 0)

    def test_no_retry_once_the_messages_are_fetched(self) -> None:
        """The owner has found out by itself."""
        self.fcm.script = lambda token: PushResult("retry", status=503)
        self.deliver()
        self.pass_time(SOON)
        self.acknowledge_all()
        attempts = len(self.fcm.tokens)
        self.pass_time(120.0)
        self.assertEqual(len(self.fcm.tokens), attempts)
        self.assertEqual(self.scheduler.waiting, 0)

    def test_a_device_does_not_wait_for_another(self) -> None:
        """One service is down: the other device is woken for each message, the first once the service is back."""
        self.add_account(OTHER, FCMDevice("android", "android"), APNsDevice("iphone"))
        self.fcm.script = lambda token: PushResult("retry", status=503, retry_after=100.0)
        self.deliver(OTHER)
        self.pass_time(MIN_INTERVAL + 1.0)
        self.assertEqual(self.apns.tokens, ["iphone"])
        self.deliver(OTHER)
        self.pass_time(SOON)
        self.assertEqual(self.apns.tokens, ["iphone"] * 2)
        self.fcm.script = lambda token: SENT
        self.pass_time(130.0)
        self.assertEqual(self.apns.tokens, ["iphone"] * 2)
        self.assertEqual(self.fcm.tokens, ["android"] * 2)

    def test_a_message_during_an_attempt_leaves_no_device_out(self) -> None:
        """The wake-up of one device stands for the message too; the device that failed is woken for both."""
        self.add_account(OTHER, FCMDevice("android", "android"), APNsDevice("iphone"))
        self.fcm.script = None
        self.deliver(OTHER)
        self.pass_time(SOON)
        self.deliver(OTHER)
        self.fcm.held[0].callback(PushResult("retry", status=503))
        self.fcm.script = lambda token: SENT
        self.pass_time(120.0)
        self.assertEqual(self.fcm.tokens, ["android"] * 2)
        self.assertEqual(self.apns.tokens, ["iphone"])
        self.assertEqual(self.scheduler.waiting, 0)

    def test_unavailable_store(self) -> None:
        """Nothing is lost while claims fail, or the end of one."""
        self.deliver()
        with self.failing("claim_wakeups"):
            self.pass_time(5.0)
        self.assertEqual(self.fcm.tokens, [])
        self.pass_time(2.0)
        self.assertEqual(self.fcm.tokens, ["phone"])
        self.pass_time(MIN_INTERVAL + 10.0)
        self.deliver()
        with self.failing("finish_wakeups"):
            self.pass_time(5.0)
        self.pass_time(60.0)
        self.assertEqual(self.fcm.tokens, ["phone"] * 2)

    def test_wakeups_at_a_time_are_bounded(self) -> None:
        """Further accounts wait, and are woken when others have ended."""
        self.fcm.script = None
        accounts = [f"did:example:{number}" for number in range(5)]
        with patch.object(scheduler_module, "MAX_WAKEUPS_AT_ONCE", 3):
            for account in accounts:
                self.add_account(account, FCMDevice(account, "android"))
                self.deliver(account)
            self.pass_time(1.0)
            self.assertEqual(len(self.fcm.held), 3)
            self.assertEqual(self.scheduler.waiting, 5)
            self.fcm.held[0].callback(SENT)
            self.pass_time(SOON)
            self.assertEqual(len(self.fcm.held), 4)

    def test_a_service_that_hangs_delays_no_other(self) -> None:
        """Other accounts are woken while a hundred requests to it are in progress, or wait for them."""
        self.fcm.script = None
        for number in range(100):
            self.add_account(f"did:example:{number}", FCMDevice(f"phone-{number}", "android"))
            self.deliver(f"did:example:{number}")
        self.pass_time(SOON)
        self.add_account(OTHER, APNsDevice("tablet"))
        self.deliver(OTHER)
        self.pass_time(SOON)
        self.assertEqual(self.apns.tokens, ["tablet"])
        self.assertEqual([held.called for held in self.fcm.held], [False] * MAX_REQUESTS_PER_HOST)

    def test_accounts_beyond_the_bound_are_found_later(self) -> None:
        """They are not noted, but their messages are in the store."""
        accounts = [f"did:example:{number}" for number in range(10)]
        with patch.object(scheduler_module, "MAX_NOTED_ACCOUNTS", 4):
            for account in accounts:
                self.add_account(account, FCMDevice(account, "android"))
                self.deliver(account)
            self.assertEqual(self.scheduler.waiting, 4)
            self.pass_time(10.0)
        self.assertEqual(sorted(self.fcm.tokens), accounts)


class ProcessTests(SchedulerTestCase):
    """Several processes, and their ends."""

    def test_one_process_sends(self) -> None:
        """Although several have accepted messages for the account."""
        second = self.start_scheduler()
        self.deliver(OWNER, self.scheduler, second, number=3)
        self.pass_time(60.0)
        self.assertEqual(self.fcm.tokens, ["phone"])

    def test_a_poll_at_another_process(self) -> None:
        """It is known to all processes."""
        second = self.start_scheduler()
        second.note_poll(OWNER)
        self.pass_time(3.0)
        self.deliver()
        self.pass_time(QUIET - 4.0)
        self.assertEqual(self.fcm.tokens, [])

    def test_crash_between_storing_and_claiming(self) -> None:
        """The next process finds that the wake-up is owed."""
        self.deliver()
        self._kill(self.scheduler)
        self.pass_time(60.0)
        self.assertEqual(self.fcm.tokens, [])
        self.start_scheduler().recover()
        self.pass_time(2.0)
        self.assertEqual(self.fcm.tokens, ["phone"])

    def test_crash_while_sending(self) -> None:
        """Another process sends when the lease has ended, and only once."""
        self.fcm.script = None
        self.deliver()
        self.pass_time(SOON)
        self._kill(self.scheduler)
        self.fcm.script = lambda token: SENT
        self.start_scheduler().recover()
        self.pass_time(LEASE - 1.0)
        self.assertEqual(self.fcm.tokens, ["phone"])
        self.pass_time(3.0)
        self.assertEqual(self.fcm.tokens, ["phone"] * 2)
        self.pass_time(60.0)
        self.assertEqual(self.fcm.tokens, ["phone"] * 2)

    def test_recovery_repeats_nothing(self) -> None:
        """A wake-up that was sent is not owed, although its messages still wait."""
        self.deliver()
        self.pass_time(1.0)
        self._kill(self.scheduler)
        self.start_scheduler().recover()
        self.pass_time(60.0)
        self.assertEqual(self.fcm.tokens, ["phone"])

    def test_stop_ends_what_is_being_sent(self) -> None:
        """It is aborted after a while, and free for the next process at once."""
        self.fcm.script = None
        self.deliver()
        self.pass_time(SOON)
        stopped = Deferred.fromCoroutine(_wait(self.scheduler.stopService()))
        self.pass_time(1.0)
        self.assertNoResult(stopped)
        self.pass_time(2.0)
        self.successResultOf(stopped)
        self.fcm.script = lambda token: SENT
        self.start_scheduler().recover()
        self.pass_time(1.0)
        self.assertEqual(self.fcm.tokens, ["phone"] * 2)

    def test_recovery_that_is_asked_for_while_one_runs(self) -> None:
        """Its messages may be where the search has been already, so it begins again."""
        self.pass_time(1.0)  # that of the start has ended
        self.scheduler.recover()
        self.deliver_silently()
        self.scheduler.recover()
        self.pass_time(2.0)
        self.assertEqual(self.fcm.tokens, ["phone"])

    def test_decentrl_identities_that_are_switched_off(self) -> None:
        """They are not woken, although they have registered devices before."""
        self.scheduler = self.start_scheduler(decentrl=False)
        self.scheduler.note("did:decentrl:someone")
        self.assertEqual(self.scheduler.waiting, 0)

    def test_stop_after_a_part_was_sent(self) -> None:
        """The next process wakes the devices that are owed, and others once more."""
        self.add_account(OTHER, FCMDevice("android", "android"), APNsDevice("iphone"))
        self.apns.script = None
        self.deliver(OTHER)
        self.pass_time(SOON)
        stopped = Deferred.fromCoroutine(_wait(self.scheduler.stopService()))
        self.pass_time(3.0)
        self.successResultOf(stopped)
        self.apns.script = lambda token: SENT
        self.start_scheduler()
        self.pass_time(2.0)
        self.assertEqual(self.apns.tokens, ["iphone"] * 2)

    def deliver_silently(self) -> None:
        """Store a message that no process notes, as one that dies does."""
        now = self.clock.seconds()
        payload = Payload(new_stored_message_id(now), b"{}", "json")
        self.successResultOf(self.store.enqueue(OWNER, [payload], expires_at=now + 86_400))

    def _kill(self, scheduler: WakeupScheduler) -> None:
        """What was in memory is gone, and no timer of the process runs any more."""
        for call in list(self.clock.getDelayedCalls()):
            call.cancel()
        scheduler.running = False


class PipedRequests(SchedulerTestCase):
    """Requests are made in a child process."""

    def make_requester(self) -> IPushRequester:
        """As of the other form."""
        return PipedSender(self.clock, self.make_local_requester, lambda: [b"secret"]).process


class PipedRuleTests(PipedRequests, RuleTests):
    """The same rules."""


class PipedFailureTests(PipedRequests, FailureTests):
    """The same failures."""


class PipedProcessTests(PipedRequests, ProcessTests):
    """The same ends of daemons."""


def _middle(low: float, high: float) -> float:
    return (low + high) / 2


async def _wait(done: Deferred[Any]) -> None:
    await done


class ClockStepTests(SchedulerTestCase):
    """The wall clock is set while a wake-up is postponed."""

    def test_clock_set_back(self) -> None:
        """What was to be looked up later is, by a clock that cannot be set."""
        steady = Clock()
        self.scheduler = self.start_scheduler(monotonic=steady.seconds)
        self.scheduler.note_poll(OWNER)
        for _ in range(40):  # the poll is recorded
            self.clock.advance(COLLECT_SECONDS)
            steady.advance(COLLECT_SECONDS)
        self.deliver()
        self.clock.advance(SOON)
        steady.advance(SOON)
        self.assertEqual(self.fcm.tokens, [])
        self.clock.rightNow -= 3_600.0
        for call in self.clock.calls:
            call.time -= 3_600.0
        for _ in range(100):
            self.clock.advance(COLLECT_SECONDS)
            steady.advance(COLLECT_SECONDS)
        self.assertEqual(self.fcm.tokens, ["phone"])
