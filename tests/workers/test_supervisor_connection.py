"""A worker's own side: what it tells its supervisor, and what it does when there is none any more."""

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


class WorkerTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.reactor: Any = MemoryReactorClock()
        self.ends: list[str] = []
        self.worker = SupervisorConnection(self.reactor, PLACE, lambda: self.ends.append("orphaned"))
        self.transport = StringTransport()
        self.worker.makeConnection(self.transport)

    def said(self) -> list[tuple[str, Any]]:
        """What the supervisor has heard since the last call."""
        lines = self.transport.value().splitlines()
        self.transport.clear()
        return [(word, content) for word, content in map(json.loads, lines)]

    def hears(self, word: str, content: Any = None) -> None:
        """The supervisor says something."""
        self.worker.dataReceived(encode_control_message(word, content))

    def test_heartbeat(self) -> None:
        """A ping is answered."""
        self.hears("ping")
        self.assertEqual(self.said(), [("pong", None)])

    def test_states(self) -> None:
        """Of what systemd would be told, the supervisor wants to know what it cannot know by itself."""
        for state in ("STATUS=a=b", "READY=1", "STOPPING=1", "WATCHDOG=1"):
            self.worker.notify(state)
        self.assertEqual(self.said(), [("status", "a=b"), ("ready", "1")])

    def test_rotate(self) -> None:
        """It is passed on."""
        rotated: list[str] = []
        self.worker.handlers["rotate"] = lambda _: rotated.append("rotated")
        self.hears("rotate")
        self.assertEqual(rotated, ["rotated"])

    def test_reload(self) -> None:
        """It is passed on, with what became of the configuration, and answered once that was done."""
        reloaded: list[Any] = []
        self.worker.handlers |= {"reload": reloaded.append, "keys": reloaded.append}
        self.hears("ask", [1, "reload", ["{}", "ok", "keys"]])
        self.assertEqual(reloaded, [["{}", "ok", "keys"]])
        self.hears("ask", [2, "keys", "others"])
        self.assertEqual(reloaded[1:], ["others"])
        self.assertEqual(self.said(), [("answer", [1, None]), ("answer", [2, None])])

    def test_unable(self) -> None:
        """Why there is no point in going on; before there is a connection, it goes straight into the pipe."""
        self.worker.report_failure("no room")
        self.assertEqual(self.said(), [("start error", "no room")])
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
        (warning, failure) = self.said()
        self.assertEqual(warning, ("log", ["warn", "mediatord.x", "disk 99 full"]))
        word, (level, namespace, text) = failure
        self.assertEqual((word, level, namespace), ("log", "critical", "mediatord.x"))
        self.assertIn("Traceback", text)
        self.assertIn("boom", text)

    def test_supervisor_that_does_not_read(self) -> None:
        """Log lines wait, up to a bound; the rest are dropped and counted. All else is said."""
        observer: Any = self.worker.observe
        log: Any = Logger("mediatord.x", observer=observer)
        globalLogPublisher.addObserver(observer)
        self.addCleanup(globalLogPublisher.removeObserver, observer)
        producer: Any = self.transport.producer
        producer.pauseProducing()
        for number in range(300):
            log.info("{number} {text}", number=number, text="x" * 10_000)
        self.hears("ping")
        self.assertEqual(self.said(), [("pong", None)])
        producer.resumeProducing()
        *transports, (_, (level, _, complaint)) = self.said()
        kept = len(transports)
        self.assertEqual(
            [content[2].split()[0] for _, content in transports], [str(number) for number in range(kept)]
        )
        self.assertTrue(
            MAX_BUFFERED_LOG_BYTES - 11_000
            < sum(len(encode_control_message(*line)) for line in transports)
            <= MAX_BUFFERED_LOG_BYTES
        )
        self.assertEqual((level, complaint.split()[0]), ("warn", str(300 - kept)))
        log.info("again")
        self.assertEqual([content[2] for _, content in self.said()], ["again"])

    def test_supervisor_that_reads_a_little(self) -> None:
        """What it has room for is sent, in order; nothing is kept for one that is gone."""
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
            self.assertEqual([content[2] for _, content in self.said()], [text])
        producer.stopProducing()
        log.info("four")
        self.assertEqual(self.said(), [])

    def test_page(self) -> None:
        """What the supervisor says, to the one who asked."""
        pages = [Deferred.fromCoroutine(self.worker.fetch_metrics()) for _ in range(2)]
        (first, second) = [content[0] for _, content in self.said() if content[1] == "all metrics"]
        self.hears("answer", [second, "two ü"])
        self.assertNoResult(pages[0])
        self.assertEqual(self.successResultOf(pages[1]), "two ü".encode())
        self.hears("answer", [first, "one"])
        self.assertEqual(self.successResultOf(pages[0]), b"one")
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_no_page(self) -> None:
        """Nobody is kept waiting for a supervisor that is busy; what it says later is nobody's."""
        page = Deferred.fromCoroutine(self.worker.fetch_metrics())
        ((_, (number, _, _)),) = self.said()
        self.reactor.advance(REPLY_TIMEOUT)
        self.failureResultOf(page, TimeoutError)
        for _ in range(2):
            self.hears("answer", [number, "late"])

    def test_all_states(self) -> None:
        """What all know of themselves, to the one who asked; or nobody answers in time."""
        states = [Deferred.fromCoroutine(self.worker.fetch_states()) for _ in range(2)]
        (first, _) = [content[0] for _, content in self.said() if content[1] == "all states"]
        self.hears("answer", [first, [3, [{"a": 1}, {"b": 2}]]])
        self.assertEqual(self.successResultOf(states[0]), (3, [{"a": 1}, {"b": 2}]))
        self.reactor.advance(REPLY_TIMEOUT)
        self.failureResultOf(states[1], TimeoutError)

    def test_state(self) -> None:
        """What this process knows of itself, when it is asked and has something to say."""
        self.hears("ask", [4, "state", None])
        self.worker.handlers["state"] = lambda _: {"pid": 1}
        self.hears("ask", [5, "state", None])
        self.assertEqual(self.said(), [("answer", [4]), ("answer", [5, {"pid": 1}])])

    def test_report(self) -> None:
        """What this process has measured, when it has."""
        measured: Deferred[str] = Deferred()
        self.worker.handlers["metrics"] = lambda _: measured
        self.hears("ask", [7, "metrics", None])
        self.assertEqual(self.said(), [])
        measured.callback("a 1.0\n")
        self.assertEqual(self.said(), [("answer", [7, "a 1.0\n"])])

    def test_report_fails(self) -> None:
        """It is logged, and the supervisor need not wait."""

        async def measure(_: object) -> str:
            raise RuntimeError("boom")

        self.worker.handlers["metrics"] = measure
        self.hears("ask", [7, "metrics", None])
        self.assertEqual(self.said(), [("answer", [7])])
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)

    def test_no_answer(self) -> None:
        """It is as if nobody answered."""
        page = Deferred.fromCoroutine(self.worker.fetch_metrics())
        self.hears("answer", [1])
        self.failureResultOf(page, TimeoutError)
        self.assertEqual(self.reactor.getDelayedCalls(), [])

    def test_orphaned(self) -> None:
        """When the supervisor is gone there is nothing left to do, unless all was done already."""
        self.worker.connectionLost()
        self.assertEqual(self.ends, ["orphaned"])
        self.worker.leave()
        self.worker.connectionLost()
        self.assertEqual(self.ends, ["orphaned"])

    def test_alarm(self) -> None:
        """A process whose reactor stands still is ended by the system; it is wound up again while it does not."""
        wound: list[tuple[int, float]] = []
        self.patch(signal, "setitimer", lambda which, seconds: wound.append((which, seconds)))
        worker = SupervisorConnection(self.reactor, PLACE, lambda: None)
        self.patch(supervisor_connection, "StandardIO", lambda *_: None)
        worker.connect()
        self.reactor.pump([10] * 5)
        self.assertEqual(wound, [(signal.ITIMER_REAL, 60)] * 6)


class Channel(ControlChannel):
    """One whose lines the test carries."""

    def __init__(self) -> None:
        super().__init__(Clock())
        self.lines: list[bytes] = []

    def write_line(self, line: bytes) -> None:
        self.lines.append(line)


class ControlChannelTests(SynchronousTestCase):
    def test_in_pieces(self) -> None:
        """However they come."""
        raw = encode_control_message("a", {"b": "ü\n"}) + encode_control_message("c")
        for size in range(1, len(raw) + 1):
            found: list[tuple[str, Any]] = []
            channel = Channel()
            for word in "ac":
                channel.handlers[word] = partial(self.note, found, word)
            for start in range(0, len(raw), size):
                channel.receive(raw[start : start + size])
            self.assertEqual(found, [("a", {"b": "ü\n"}), ("c", None)])

    def note(self, found: list[tuple[str, Any]], word: str, content: Any) -> None:
        """A message."""
        found.append((word, content))

    def test_questions(self) -> None:
        """Each gets its own answer, in whatever order they come; what was never asked is nothing."""
        channel = Channel()
        first, second = channel.ask("a", 1), channel.ask("a", 2)
        self.assertEqual([json.loads(line) for line in channel.lines], [["ask", [n, "a", n]] for n in (1, 2)])
        channel.receive(encode_control_message("answer", [2, "two"]) + encode_control_message("answer", [9, "nine"]))
        channel.receive(encode_control_message("answer", [1]))
        self.assertEqual(self.successResultOf(second), "two")
        self.failureResultOf(first, NoAnswer)

    def test_end(self) -> None:
        """Whoever has asked is told that there is nobody any more."""
        channel = Channel()
        response = channel.ask("a", timeout=1.0)
        channel.fail_asked()
        self.failureResultOf(response, ConnectionLost)
        self.assertEqual(channel._clock.getDelayedCalls(), [])


class StartTests(SynchronousTestCase):
    """Before a worker's reactor runs."""

    @pytest.mark.system
    def test_one_that_hangs_ends(self) -> None:
        """Also when there is no supervisor that would notice (here: it waits for a brief that never comes)."""
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

    def test_page_of_all(self) -> None:
        """The page is what the supervisor says."""
        transport = self.ask()
        self.worker.dataReceived(encode_control_message("answer", [1, "a_total 1.0\n"]))
        (response,) = parse_responses(transport.take_output())
        self.assertEqual((response.status, response.body), (200, b"a_total 1.0\n"))

    def test_no_supervisor(self) -> None:
        """One that says nothing costs the scrape, and no more time than that."""
        transport = self.ask()
        self.reactor.advance(REPLY_TIMEOUT)
        (response,) = parse_responses(transport.take_output())
        self.assertEqual((response.status, response.json["detail"]), (503, "workers do not answer"))

    def ask(self) -> InMemoryTransport:
        """A connection on which somebody does."""
        transport = self.site_fixture.connect("127.0.0.1")
        transport.feed(written_request("GET", "/metrics"))
        self.site_fixture.run_due_calls()
        self.assertEqual(
            (transport.take_output(), self.transport.value()),
            (b"", encode_control_message("ask", [1, "all metrics", None])),
        )
        return transport


class Store:
    """Answers what it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.answer: Deferred[tuple[list[tuple[str, int]], int]] = succeed(([], 0))

    def queue_sizes(self, top: int) -> Deferred[tuple[list[tuple[str, int]], int]]:
        assert top == 0
        self.asked += 1
        return self.answer


class Base:
    """As much of the daemon as is measured."""

    def __init__(self) -> None:
        self.reactor = Clock()
        self.store = Store()
        self.gate = RequestGate(self.reactor)
        self.gate.startService()
        self.events = self.recorder = self
        self.metrics = Metrics(CollectorRegistry(), version="1")

    def rotate(self) -> None:
        """There is no log."""


class MeasuringTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.base = Base()
        self.worker = SupervisorConnection(MemoryReactorClock(), PLACE, lambda: None)
        base: Any = self.base
        bind_supervisor_callbacks(self.worker, base)

    def begin(self) -> Deferred[str]:
        """Ask for a report."""
        return Deferred.fromCoroutine(self.worker.handlers["metrics"](None))

    def assert_up(self, measured: Deferred[str], up: float) -> None:
        self.assertIn(f"\nmediator_storage_up {up}\n", self.successResultOf(measured))

    def test_store_is_looked_at(self) -> None:
        """Each time: nobody else might have asked this process lately."""
        self.assert_up(self.begin(), 1.0)
        failed: Deferred[Any] = Deferred()
        failed.errback(StoreUnavailable())
        self.base.store.answer = failed
        self.assert_up(self.begin(), 0.0)
        self.base.store.answer = succeed(([], 0))
        self.assert_up(self.begin(), 1.0)
        self.assertEqual(self.base.store.asked, 3)
        self.assertEqual(self.base.reactor.getDelayedCalls(), [])

    def test_slow_store(self) -> None:
        """It is not waited for, nor asked again before it has answered."""
        self.assert_up(self.begin(), 1.0)
        self.base.store.answer = Deferred()
        for _ in range(2):
            measured = self.begin()
            self.assertNoResult(measured)
            self.base.reactor.advance(0.5)
            self.assert_up(measured, 1.0)
        self.assertEqual(self.base.store.asked, 2)
        self.base.store.answer.errback(StoreUnavailable())
        self.base.store.answer = succeed(([], 0))
        self.assert_up(self.begin(), 1.0)

    def test_stopping(self) -> None:
        """It reports until the end."""
        self.base.gate.stopService()
        self.assert_up(self.begin(), 0.0)
        self.assertEqual(self.base.store.asked, 0)

    def test_fault(self) -> None:
        """One of ours is logged, and the rest is reported."""
        broken: Deferred[Any] = Deferred()
        broken.errback(RuntimeError("boom"))
        self.base.store.answer = broken
        self.assert_up(self.begin(), 0.0)
        self.assertEqual(len(self.flushLoggedErrors(RuntimeError)), 1)
