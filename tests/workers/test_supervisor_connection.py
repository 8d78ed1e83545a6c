"""The worker's side of the control channel, and what it does without a supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from twisted.internet.defer import Deferred, succeed
from twisted.internet.error import ConnectionLost
from twisted.internet.task import Clock
from twisted.internet.testing import MemoryReactorClock, StringTransport
from twisted.logger import Logger, globalLogPublisher
from twisted.trial.unittest import SynchronousTestCase

from mediatord.app.public_site import build_site
from mediatord.app.supervision import bind_supervisor_callbacks
from mediatord.errors import StoreUnavailable
from mediatord.observability.metrics import Metrics
from mediatord.ratelimit.admission import RequestGate
from mediatord.workers import supervisor_connection
from mediatord.workers.control_channel import ControlChannel, NoAnswer, encode_control_message
from mediatord.workers.supervised_worker import REPORT_FD, SPEC_FD, WorkerSpec
from mediatord.workers.supervisor_connection import MAX_BUFFERED_LOG_BYTES, REPLY_TIMEOUT, SupervisorConnection
from tests.http.in_memory_site import InMemorySite, InMemoryTransport, parse_responses
from tests.http.in_memory_site import encode_request as written_request

PATIENCE_SECONDS = 60.0
PLACE = WorkerSpec("/tmp/1.sock", b"secret", b"seed", [5], b"keys", "{}")


class SupervisorConnectionTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.reactor: Any = MemoryReactorClock()
        self.ends: list[str] = []
        self.worker = SupervisorConnection(self.reactor, PLACE, lambda: self.ends.append("orphaned"))
        self.transport = StringTransport()
        self.worker.makeConnection(self.transport)

    def sent_messages(self) -> list[tuple[str, Any]]:
        """Messages to the supervisor since the last call."""
        lines = self.transport.value().splitlines()
        self.transport.clear()
        return [(word, content) for word, content in map(json.loads, lines)]

    def receive(self, word: str, content: Any = None) -> None:
        """Deliver a message from the supervisor."""
        self.worker.dataReceived(encode_control_message(word, content))

    def test_heartbeat(self) -> None:
        """A ping is answered."""
        self.receive("ping")
        self.assertEqual(self.sent_messages(), [("pong", None)])

    def test_systemd_states(self) -> None:
        """Notifications for systemd go to the supervisor, except those that it knows itself."""
        for state in ("STATUS=a=b", "READY=1", "STOPPING=1", "WATCHDOG=1"):
            self.worker.notify(state)
        self.assertEqual(self.sent_messages(), [("status", "a=b"), ("ready", "1")])

    def test_rotate(self) -> None:
        """The request is passed on."""
        rotated: list[str] = []
        self.worker.handlers["rotate"] = lambda _: rotated.append("rotated")
        self.receive("rotate")
        self.assertEqual(rotated, ["rotated"])

    def test_reload(self) -> None:
        """The request is passed on with its configuration, and answered when done."""
        reloaded: list[Any] = []
        self.worker.handlers |= {"reload": reloaded.append, "keys": reloaded.append}
        self.receive("ask", [1, "reload", ["{}", "ok", "keys"]])
        self.assertEqual(reloaded, [["{}", "ok", "keys"]])
        self.receive("ask", [2, "keys", "others"])
        self.assertEqual(reloaded[1:], ["others"])
        self.assertEqual(self.sent_messages(), [("answer", [1, None]), ("answer", [2, None])])

    def test_unable_to_start(self) -> None:
        """The reason is reported; without a connection it is written into the pipe."""
        self.worker.report_failure("no room")
        self.assertEqual(self.sent_messages(), [("start error", "no room")])
        pipe: list[tuple[int, bytes]] = []
        self.patch(os, "write", lambda descriptor, data: pipe.append((descriptor, data)))
        SupervisorConnection(self.reactor, PLACE, lambda: None).report_failure("no keys")
        self.assertEqual(pipe, [(REPORT_FD, encode_control_message("start error", "no keys"))])

    def test_log(self) -> None:
        """Level, origin and text; a traceback is part of the text."""
        observer: Any = self.worker.observe
        log: Any = Logger("mediatord.x", observer=observer)
        log.warn("disk {percent} full", percent=99)
        try:
            raise ValueError("boom")
        except ValueError:
            log.failure("failed")
        (warning, failure) = self.sent_messages()
        self.assertEqual(warning, ("log", ["warn", "mediatord.x", "disk 99 full"]))
        word, (level, namespace, text) = failure
        self.assertEqual((word, level, namespace), ("log", "critical", "mediatord.x"))
        self.assertIn("Traceback", text)
        self.assertIn("boom", text)

    def test_supervisor_that_does_not_read(self) -> None:
        """Log lines are buffered up to a bound, and dropped lines counted. Other messages are kept."""
        observer: Any = self.worker.observe
        log: Any = Logger("mediatord.x", observer=observer)
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)
        producer: Any = self.transport.producer
        producer.pauseProducing()
        for number in range(300):
            log.info("{number} {text}", number=number, text="x" * 10_000)
        self.receive("ping")
        self.assertEqual(self.sent_messages(), [("pong", None)])
        producer.resumeProducing()
        *transports, (_, (level, _, complaint)) = self.sent_messages()
        kept = len(transports)
        self.assertEqual(
            [content[2].split()[0] for _, content in transports], [str(number) for number in range(kept)]
        )
        self.assertTrue(
            MAX_BUFFERED_LOG_BYTES - 11_000
            < sum(len(encode_control_message(*line)) for line in transports)
            <= MAX_BUFFERED_LOG_BYTES
        )
        self.assertEqual((level, complaint.split()[:2]), ("warn", ["dropped", str(300 - kept)]))
        log.info("again")
        self.assertEqual([content[2] for _, content in self.sent_messages()], ["again"])

    def test_supervisor_that_reads_slowly(self) -> None:
        """Messages are sent in order as far as there is room; without a supervisor nothing is kept."""
        producer: Any = self.transport.producer
        producer.pauseProducing()
        log: Any = Logger("mediatord.x", observer=self.worker.observe)  # type: ignore[arg-type]
        for text in ("one", "two", "three"):
            log.info(text)
        really = self.transport.write

        def write(data: bytes) -> None:
            really(data)
            producer.pauseProducing()

        self.patch(self.transport, "write", write)
        for text in ("one", "two"):
            producer.resumeProducing()
            self.assertEqual([content[2] for _, content in self.sent_messages()], [text])
        producer.stopProducing()
        log.info("four")
        self.assertEqual(self.sent_messages(), [])

    def test_metrics_page(self) -> None:
        """The supervisor's page goes to the request."""
        pages = [Deferred.fromCoroutine(self.worker.fetch_metrics()) for _ in range(2)]
        (first, second) = [content[0] for _, content in self.sent_messages() if content[1] == "all metrics"]
        self.receive("answer", [second, "two ü"])
        self.assertNoResult(pages[0])
        self.assertEqual(self.successResultOf(pages[1]), "two ü".encode())
        self.receive("answer", [first, "one"])
        self.assertEqual(self.successResultOf(pages[0]), b"one")
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_metrics_timeout(self) -> None:
        """A request does not wait for a busy supervisor, whose late page is dropped."""
        page = Deferred.fromCoroutine(self.worker.fetch_metrics())
        ((_, (number, _, _)),) = self.sent_messages()
        self.reactor.advance(REPLY_TIMEOUT)
        self.failureResultOf(page, TimeoutError)
        for _ in range(2):
            self.receive("answer", [number, "late"])

    def test_all_statuses(self) -> None:
        """The statuses of all workers go to the request, or nothing after a timeout."""
        states = [Deferred.fromCoroutine(self.worker.fetch_states()) for _ in range(2)]
        (first, _) = [content[0] for _, content in self.sent_messages() if content[1] == "all states"]
        self.receive("answer", [first, [3, [{"a": 1}, {"b": 2}]]])
        self.assertEqual(self.successResultOf(states[0]), (3, [{"a": 1}, {"b": 2}]))
        self.reactor.advance(REPLY_TIMEOUT)
        self.failureResultOf(states[1], TimeoutError)

    def test_status(self) -> None:
        """This process reports its status on request, if it has one."""
        self.receive("ask", [4, "state", None])
        self.worker.handlers["state"] = lambda _: {"pid": 1}
        self.receive("ask", [5, "state", None])
        self.assertEqual(self.sent_messages(), [("answer", [4]), ("answer", [5, {"pid": 1}])])

    def test_report(self) -> None:
        """This process reports its metrics when measured."""
        measured: Deferred[str] = Deferred()
        self.worker.handlers["metrics"] = lambda _: measured
        self.receive("ask", [7, "metrics", None])
        self.assertEqual(self.sent_messages(), [])
        measured.callback("a 1.0\n")
        self.assertEqual(self.sent_messages(), [("answer", [7, "a 1.0\n"])])

    def test_failed_report(self) -> None:
        """The failure is logged, and the supervisor gets an answer."""

        async def measure(_: object) -> str:
            raise RuntimeError("boom")

        self.worker.handlers["metrics"] = measure
        self.receive("ask", [7, "metrics", None])
        self.assertEqual(self.sent_messages(), [("answer", [7])])
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_no_answer(self) -> None:
        """Like a missing answer."""
        page = Deferred.fromCoroutine(self.worker.fetch_metrics())
        self.receive("answer", [1])
        self.failureResultOf(page, TimeoutError)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_supervisor_gone(self) -> None:
        """The worker stops, unless it has already."""
        self.worker.connectionLost()
        self.assertEqual(self.ends, ["orphaned"])
        self.worker.leave()
        self.worker.connectionLost()
        self.assertEqual(self.ends, ["orphaned"])

    def test_alarm(self) -> None:
        """A process whose reactor hangs is killed by a timer of the system, which is restarted while it runs."""
        wound: list[tuple[int, float]] = []
        self.patch(signal, "setitimer", lambda which, seconds: wound.append((which, seconds)))
        worker = SupervisorConnection(self.reactor, PLACE, lambda: None)
        self.patch(supervisor_connection, "StandardIO", lambda *_: None)
        worker.connect()
        self.reactor.pump([10] * 5)
        self.assertEqual(wound, [(signal.ITIMER_REAL, 60)] * 6)


class RecordingChannel(ControlChannel):
    """Control channel whose lines the test transfers."""

    def __init__(self) -> None:
        super().__init__(Clock())
        self.lines: list[bytes] = []

    def write_line(self, line: bytes) -> None:
        self.lines.append(line)


class ControlChannelTests(SynchronousTestCase):
    def test_messages_in_pieces(self) -> None:
        """Messages may be split anywhere."""
        raw = encode_control_message("a", {"b": "ü\n"}) + encode_control_message("c")
        for size in range(1, len(raw) + 1):
            found: list[tuple[str, Any]] = []
            channel = RecordingChannel()
            for word in "ac":
                channel.handlers[word] = partial(self.record, found, word)
            for start in range(0, len(raw), size):
                channel.receive(raw[start : start + size])
            self.assertEqual(found, [("a", {"b": "ü\n"}), ("c", None)])

    def record(self, found: list[tuple[str, Any]], word: str, content: Any) -> None:
        """Record a message."""
        found.append((word, content))

    def test_questions(self) -> None:
        """Answers may come in any order; an answer without a question is ignored."""
        channel = RecordingChannel()
        first, second = channel.ask("a", 1), channel.ask("a", 2)
        self.assertEqual([json.loads(line) for line in channel.lines], [["ask", [n, "a", n]] for n in (1, 2)])
        channel.receive(encode_control_message("answer", [2, "two"]) + encode_control_message("answer", [9, "nine"]))
        channel.receive(encode_control_message("answer", [1]))
        self.assertEqual(self.successResultOf(second), "two")
        self.failureResultOf(first, NoAnswer)

    def test_connection_lost(self) -> None:
        """Pending questions fail."""
        channel = RecordingChannel()
        response = channel.ask("a", timeout=1.0)
        channel.fail_asked()
        self.failureResultOf(response, ConnectionLost)
        self.assertEqual(channel._clock.getDelayedCalls(), [])


class StartTests(SynchronousTestCase):
    """Before the reactor of a worker runs."""

    @pytest.mark.system
    def test_hanging_start_is_killed(self) -> None:
        """Also without a supervisor (here: the spec never arrives)."""
        program = (
            f"import os; os.dup2(0, {SPEC_FD})\n"
            "from mediatord.workers import supervisor_connection as module; module._ALARM_SECONDS = 0.5\n"
            "from mediatord.cli.run_and_worker import worker; worker.callback('x')"
        )
        with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
            try:
                self.assertEqual(process.wait(PATIENCE_SECONDS), -signal.SIGALRM)
            finally:
                process.kill()


class ScrapeTests(SynchronousTestCase):
    """`GET /metrics` of a worker."""

    def setUp(self) -> None:
        self.reactor: Any = MemoryReactorClock()
        self.worker = SupervisorConnection(self.reactor, PLACE, lambda: None)
        self.transport = StringTransport()
        self.worker.makeConnection(self.transport)
        self.site_fixture = InMemorySite(self)
        half = self.site_fixture
        self.site_fixture.site = build_site(half.base, half.didcomm, half.decentrl, half.config, self.worker)

    def test_aggregated_page(self) -> None:
        """The page is the supervisor's."""
        transport = self.request_metrics()
        self.worker.dataReceived(encode_control_message("answer", [1, "a_total 1.0\n"]))
        (response,) = parse_responses(transport.take_output())
        self.assertEqual((response.status, response.body), (200, b"a_total 1.0\n"))

    def test_no_supervisor(self) -> None:
        """An unresponsive supervisor fails the scrape, after its timeout."""
        transport = self.request_metrics()
        self.reactor.advance(REPLY_TIMEOUT)
        (response,) = parse_responses(transport.take_output())
        self.assertEqual((response.status, response.json["detail"]), (503, "workers do not respond"))

    def request_metrics(self) -> InMemoryTransport:
        """Request the metrics on a new connection."""
        transport = self.site_fixture.connect("127.0.0.1")
        transport.feed(written_request("GET", "/metrics"))
        self.site_fixture.run_due_calls()
        self.assertEqual(
            (transport.take_output(), self.transport.value()),
            (b"", encode_control_message("ask", [1, "all metrics", None])),
        )
        return transport


class FakeStore:
    """Store that answers as told."""

    def __init__(self) -> None:
        self.calls = 0
        self.answer: Deferred[tuple[list[tuple[str, int]], int]] = succeed(([], 0))

    def queue_sizes(self, top: int) -> Deferred[tuple[list[tuple[str, int]], int]]:
        assert top == 0
        self.calls += 1
        return self.answer


class FakeCoreServices:
    """The parts of the core services that are measured."""

    def __init__(self) -> None:
        self.reactor = Clock()
        self.store = FakeStore()
        self.gate = RequestGate(self.reactor)
        self.gate.startService()
        self.events = self.recorder = self
        self.metrics = Metrics(CollectorRegistry(), version="1")

    def rotate(self) -> None:
        """Ignore."""


class MeasurementTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.base = FakeCoreServices()
        self.worker = SupervisorConnection(MemoryReactorClock(), PLACE, lambda: None)
        base: Any = self.base
        bind_supervisor_callbacks(self.worker, base)

    def begin(self) -> Deferred[str]:
        """Request a report."""
        return Deferred.fromCoroutine(self.worker.handlers["metrics"](None))

    def assert_up(self, measured: Deferred[str], up: float) -> None:
        self.assertIn(f"\nmediator_storage_up {up}\n", self.successResultOf(measured))

    def test_measures_store_for_each_report(self) -> None:
        """Each report checks the store, as no other request might have."""
        self.assert_up(self.begin(), 1.0)
        failed: Deferred[Any] = Deferred()
        failed.errback(StoreUnavailable())
        self.base.store.answer = failed
        self.assert_up(self.begin(), 0.0)
        self.base.store.answer = succeed(([], 0))
        self.assert_up(self.begin(), 1.0)
        self.assertEqual(self.base.store.calls, 3)
        self.assertEqual(self.base.reactor.getDelayedCalls(), [])

    def test_slow_store(self) -> None:
        """A slow store is not awaited, nor asked again before it has answered."""
        self.assert_up(self.begin(), 1.0)
        self.base.store.answer = Deferred()
        for _ in range(2):
            measured = self.begin()
            self.assertNoResult(measured)
            self.base.reactor.advance(0.5)
            self.assert_up(measured, 1.0)
        self.assertEqual(self.base.store.calls, 2)
        self.base.store.answer.errback(StoreUnavailable())
        self.base.store.answer = succeed(([], 0))
        self.assert_up(self.begin(), 1.0)

    def test_stopping(self) -> None:
        """Reports continue until the end."""
        self.base.gate.stopService()
        self.assert_up(self.begin(), 0.0)
        self.assertEqual(self.base.store.calls, 0)

    def test_internal_error(self) -> None:
        """The error is logged, and the rest is reported."""
        broken: Deferred[Any] = Deferred()
        broken.errback(RuntimeError("boom"))
        self.base.store.answer = broken
        self.assert_up(self.begin(), 0.0)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
