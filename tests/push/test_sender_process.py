"""The child process that makes requests: lines, bounds, restarts, secrets, and its log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import orjson
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import Clock
from twisted.logger import LogLevel
from twisted.trial.unittest import SynchronousTestCase

from mediatord.push import sender_process
from mediatord.push.devices import DeviceSealer, FCMDevice
from mediatord.push.requester import BUSY, PROCESS_ENDED, PushRequest, PushRequester, TimedResult
from mediatord.push.sender_process import (
    FIRST_RESTART_PAUSE,
    MAX_RESTART_PAUSE,
    MAX_UNANSWERED,
    SILENCE_LIMIT,
    STOP_SECONDS,
    LineSplitter,
    encode_log_line,
)
from mediatord.push.service import PushResult
from tests.push.scripted_service import ScriptedService
from tests.push.sender_pipe import PipedSender

OWNER = "did:example:owner"


class SenderProcessTests(SynchronousTestCase):
    """A child with a scripted service, behind pipes in memory."""

    def setUp(self) -> None:
        self.clock = Clock()
        self.fcm = ScriptedService("fcm")
        self.secrets = [b"current", b"oldest"]
        self.sealer = DeviceSealer(lambda: self.secrets, bytes)
        self.pipe = PipedSender(self.clock, self.make_requester, lambda: self.secrets)
        self.process = self.pipe.process
        self.process.start()
        self.pipe.children[0].reports.clear()  # its first report of the state
        self.answers: list[list[TimedResult]] = []

    def make_requester(self, secrets: Callable[[], Sequence[bytes]]) -> PushRequester:
        sealer = DeviceSealer(secrets, bytes)
        clock = cast(IReactorTime, self.clock)
        return PushRequester(clock, {"fcm": self.fcm}, None, sealer, "m", lambda low, high: low, self.clock.seconds)

    def request(self, number: int = 1) -> None:
        """Make requests for as many accounts in one iteration of the reactor."""
        for _ in range(number):
            device = self.sealer.seal(FCMDevice("phone", "android"))
            self.process.request(PushRequest(OWNER, (device,)), lambda results: self.answers.append(list(results)))

    @property
    def results(self) -> list[PushResult]:
        """Those that have arrived."""
        return [one.result for results in self.answers for one in results]

    def test_an_iteration_is_one_line(self) -> None:
        """Each way, however many requests there are; the next iteration has its own."""
        self.request(100)
        self.assertEqual(self.pipe.children[0].commands, [])
        self.clock.advance(0)
        (child,) = self.pipe.children
        self.assertEqual([line.count(b"\n") for line in child.commands + child.reports], [1, 1])
        self.assertEqual([one.outcome for one in self.results], ["sent"] * 100)
        self.request(100)
        self.clock.advance(0)
        self.assertEqual((len(child.commands), len(child.reports), len(self.results)), (2, 2, 200))

    def test_owners_and_tokens_are_not_told(self) -> None:
        """Without a webhook the child needs no DID, and devices stay sealed on their way."""
        self.request()
        self.clock.advance(0)
        (line,) = self.pipe.children[0].commands
        self.assertNotIn(OWNER.encode(), line)
        self.assertNotIn(b"phone", line)

    def test_secrets_are_sent_when_they_change(self) -> None:
        """With the first request that needs them, once."""
        for _ in range(2):
            self.request()
            self.clock.advance(0)
        self.secrets.insert(0, b"newest")
        self.request()
        self.clock.advance(0)
        lines = [orjson.loads(line) for line in self.pipe.children[0].commands]
        self.assertEqual([len(line.get("secrets", ())) for line in lines], [2, 0, 3])
        self.assertEqual([one.outcome for one in self.results], ["sent"] * 3)

    def test_a_killed_child_is_replaced(self) -> None:
        """What it has not answered is to be tried again at once; the next child gets the secrets too."""
        self.fcm.script = None
        self.request(3)
        self.clock.advance(0)
        self.pipe.children[0].kill()
        self.request()
        self.assertEqual(self.results, [PushResult("retry", PROCESS_ENDED)] * 4)
        self.clock.advance(FIRST_RESTART_PAUSE)
        self.fcm.script = lambda token: PushResult("sent")
        self.request()
        self.clock.advance(0)
        self.assertEqual((len(self.pipe.children), self.results[-1].outcome), (2, "sent"))

    def test_restarts_are_rarer_and_rarer(self) -> None:
        """While the child cannot start, or ends at once; no longer once it has lived for a while."""
        self.pipe.fault = OSError(12, "Cannot allocate memory")
        self.pipe.children[0].kill()
        pauses = []
        for _ in range(8):
            began, before = self.clock.seconds(), len(self.clock.getDelayedCalls())
            (call,) = self.clock.getDelayedCalls()
            self.clock.advance(call.getTime() - began)
            pauses.append(self.clock.seconds() - began)
            self.assertEqual(len(self.clock.getDelayedCalls()), before)
        self.assertEqual(pauses, [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0])
        self.pipe.fault = None
        self.clock.advance(MAX_RESTART_PAUSE)
        self.clock.advance(MAX_RESTART_PAUSE)
        self.pipe.children[-1].kill()
        self.clock.advance(FIRST_RESTART_PAUSE)
        self.assertEqual(len(self.pipe.children), 3)

    def test_a_child_that_does_not_answer_is_killed(self) -> None:
        """After a while with requests, but never without."""
        self.clock.pump([SILENCE_LIMIT / 10] * 30)
        self.fcm.script = None
        self.request()
        self.clock.pump([SILENCE_LIMIT / 10] * 9)
        self.assertEqual(self.results, [])
        self.clock.pump([SILENCE_LIMIT / 10] * 3)
        self.assertEqual(self.results, [PushResult("retry", PROCESS_ENDED)])
        self.assertTrue(self.pipe.children[0].has_ended)

    def test_a_child_that_does_not_read(self) -> None:
        """Requests are collected until it reads, and sent in one line; further ones are to be tried again."""
        child = self.pipe.children[0]
        child.producer.pauseProducing()
        self.request(MAX_UNANSWERED + 5)
        self.clock.advance(0)
        self.assertEqual((child.commands, self.results), ([], [PushResult("retry", BUSY)] * 5))
        self.answers.clear()
        child.producer.resumeProducing()
        self.clock.advance(0)
        self.assertEqual((len(child.commands), len(self.results)), (1, MAX_UNANSWERED))

    def test_close(self) -> None:
        """The child ends, and is not started again; those who wait get `retry`."""
        self.fcm.script = None
        self.request()
        self.clock.advance(0)
        self.successResultOf(Deferred.fromCoroutine(self.process.close()))
        self.assertTrue(self.pipe.children[0].has_ended)
        self.assertEqual(self.results, [PushResult("retry", PROCESS_ENDED)])
        self.successResultOf(Deferred.fromCoroutine(self.process.close()))
        self.assertEqual([call for call in self.clock.getDelayedCalls() if call.active()], [])

    def test_close_of_a_child_that_hangs(self) -> None:
        """It is killed."""
        self.pipe.children[0].is_hanging = True
        closing = [Deferred.fromCoroutine(self.process.close()) for _ in range(2)]
        self.assertNoResult(closing[0])
        self.clock.advance(STOP_SECONDS)
        for one in closing:
            self.successResultOf(one)
        self.assertTrue(self.pipe.children[0].has_ended)

    def test_log_lines(self) -> None:
        """The daemon writes those of the child, with their level; their number is bounded."""
        logged: list[tuple[str, str]] = []

        def emit(level: object, template: str, **fields: str) -> None:
            logged.append((str(getattr(level, "name", "")), fields["text"]))

        self.patch(sender_process, "Logger", lambda namespace: _Emitter(emit))
        for number in range(1_000):
            event = {"log_level": LogLevel.warn, "log_namespace": "x", "log_format": "line {n}", "n": number}
            self.pipe.children[0].server.observe(event)
        self.clock.advance(0)
        self.assertEqual(logged[:2], [("warn", "line 0"), ("warn", "line 1")])
        self.assertEqual(len(logged), 100)
        self.process.childDataReceived(3, encode_log_line("error", "x", "cannot start"))
        self.assertEqual(logged[-1], ("error", "cannot start"))


class LineSplitterTests(SynchronousTestCase):
    """Pieces as pipes deliver them."""

    def test_pieces(self) -> None:
        """However the bytes are divided, the lines are the same."""
        data = b'{"a":1}\n[2]\n"three"\n'
        for size in range(1, len(data) + 1):
            lines = LineSplitter()
            found = [lines.receive(data[start : start + size]) for start in range(0, len(data), size)]
            self.assertEqual([value for values in found for value in values], [{"a": 1}, [2], "three"])


class _Emitter:
    def __init__(self, emit: Callable[..., None]) -> None:
        self.emit = emit
