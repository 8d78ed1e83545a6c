"""The daemon's reactor: calls without a delay, and events without Twisted's wrappers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from functools import partial
from select import EPOLLIN
from threading import Thread
from typing import Any
from unittest.mock import Mock

from twisted.internet import base, epollreactor
from twisted.internet.epollreactor import EPollReactor
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IHalfCloseableProtocol
from twisted.internet.protocol import ClientFactory, Factory, Protocol, connectionDone
from twisted.internet.selectreactor import SelectReactor
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from mediatord.runtime import epoll_reactor
from mediatord.runtime.epoll_reactor import EventWaker, use_lean_events

MOST_ITERATIONS = 1000


class ReactorTestCase(SynchronousTestCase):
    """A reactor that the test iterates."""

    def setUp(self) -> None:
        self.reactor: Any = EPollReactor()
        use_lean_events(self.reactor)
        self.addCleanup(self.close)
        self.made: list[str] = []

    def close(self) -> None:
        """Close everything that the reactor has open."""
        for selectable in [*self.reactor.removeAll(), self.reactor.waker]:
            selectable.connectionLost(Failure(ConnectionDone()))
        self.reactor._poller.close()

    def record(self, name: str) -> Callable[[], None]:
        """A function that records its call."""
        return lambda: self.made.append(name)

    def iterate_until(self, condition: Callable[[], object]) -> None:
        """Iterate until something is true."""
        for _ in range(MOST_ITERATIONS):
            if condition():
                return
            self.reactor.iterate(0.01)
        self.fail("it did not happen")


class ImmediateCallTests(ReactorTestCase):
    def test_order_and_iteration(self) -> None:
        """Calls are made in order, and then, in the same iteration, those that they make."""
        self.reactor.callLater(0, lambda: self.reactor.callLater(0, self.record("third")))
        self.reactor.callLater(0, self.record("first"))
        self.reactor.callLater(0, self.record("second"))
        self.assertEqual(self.reactor.timeout(), 0)
        self.reactor.runUntilCurrent()
        self.assertEqual(self.made, ["first", "second", "third"])
        self.assertIsNone(self.reactor.timeout())

    def test_bounded_passes(self) -> None:
        """A chain of calls lets the reactor look for events after a limited number of them."""
        for _ in range(2):
            call = self.record("end")
            for _ in range(epoll_reactor.MAX_PASSES):
                call = partial(self.reactor.callLater, 0, call)
            self.reactor.callLater(0, call)
        self.reactor.runUntilCurrent()
        self.assertEqual((self.made, self.reactor.timeout()), ([], 0.0))
        self.reactor.runUntilCurrent()
        self.assertEqual((self.made, self.reactor.timeout()), (["end", "end"], None))

    def test_repetition(self) -> None:
        """A call that repeats itself yields to events, and to the calls that those make."""

        def repeat() -> None:
            self.made.append("repeat")
            if len(self.made) < 5:
                self.reactor.callLater(0, repeat)
                self.reactor.callLater(0, self.record("other"))

        self.reactor.callLater(0, repeat)
        self.reactor.runUntilCurrent()
        self.assertEqual((self.made, self.reactor.timeout()), (["repeat", "other"], 0.0))
        self.assertEqual(len(self.reactor.getDelayedCalls()), 1)
        self.reactor.callLater(0, self.record("event"))
        self.reactor.runUntilCurrent()
        self.assertEqual(self.made, ["repeat", "other", "event", "repeat", "other"])

    def test_same_iteration_as_cause(self) -> None:
        """A call that another thread or a timer causes is made in the same iteration."""
        now = [self.reactor.seconds()]
        self.reactor.seconds = lambda: now[0]
        self.reactor.callFromThread(self.reactor.callLater, 0, self.record("thread"))
        self.reactor.callLater(1, self.reactor.callLater, 0, self.record("timer"))
        self.reactor.runUntilCurrent()
        self.assertEqual(self.made, ["thread"])
        now[0] += 1
        self.reactor.runUntilCurrent()
        self.assertEqual(self.made, ["thread", "timer"])

    def test_no_comparisons(self) -> None:
        """Such a call is not compared with the timers, of which each connection has one."""
        compared: list[object] = []
        for _ in range(64):
            self.reactor.callLater(60, self.record("timer"))
        self.reactor.iterate(0)

        def compare(one: base.DelayedCall, other: base.DelayedCall) -> bool:
            compared.append(one)
            return one.time < other.time

        self.patch(base.DelayedCall, "__lt__", compare)
        self.patch(base.DelayedCall, "__le__", compare)
        self.reactor.callLater(0, self.record("now"))
        self.reactor.iterate(0)
        self.assertEqual((self.made, compared), (["now"], []))

    def test_timeout(self) -> None:
        """The reactor sleeps until the first timer, but no longer than the kernel can."""
        self.reactor.seconds = lambda: 1000.0
        self.reactor.callLater(1e9, self.record("timer"))
        self.reactor.iterate(0)
        self.assertEqual(self.reactor.timeout(), epoll_reactor.MAX_WAIT_SECONDS)
        self.reactor.callLater(5, self.record("timer"))
        self.reactor.iterate(0)
        self.assertEqual(self.reactor.timeout(), 5.0)
        self.reactor.seconds = lambda: 1006.0
        self.assertEqual(self.reactor.timeout(), 0.0)

    def test_stop(self) -> None:
        """Such a call can stop the reactor, which does not wait for a timer then."""
        waits: list[float | None] = []

        def stop() -> None:
            self.reactor.stop()
            waits.append(self.reactor.timeout())

        self.reactor.callLater(60, self.record("timer"))
        self.reactor.callLater(0, stop)
        self.reactor.run(installSignalHandlers=False)
        self.assertEqual((self.made, waits), ([], [0.0]))

    def test_cancel(self) -> None:
        """A cancelled call is not made, also if a call of the same iteration cancels it."""
        later = [self.reactor.callLater(0, self.record("cancelled")) for _ in range(2)]
        later[0].cancel()
        self.assertEqual(self.reactor.getDelayedCalls(), later[1:])
        first = self.reactor.callLater(0, lambda: later.pop().cancel())
        later.append(self.reactor.callLater(0, self.record("cancelled")))
        later[1].cancel()
        self.reactor.iterate(0)
        self.assertEqual((self.made, self.reactor._cancellations, len(later)), ([], 0, 2))
        self.assertFalse(first.active())

    def test_delay(self) -> None:
        """A call that is delayed after all is a timer."""
        call = self.reactor.callLater(0, self.record("later"))
        call.reset(60)
        self.reactor.iterate(0)
        self.assertTrue(call.active())
        self.assertEqual((self.made, self.reactor.getDelayedCalls()), ([], [call]))
        call.reset(0)
        self.reactor.iterate(0)
        self.assertEqual(self.made, ["later"])

    def test_failure(self) -> None:
        """A call that fails is logged without the text of its exception, and the others are made."""
        self.reactor.callLater(0, int, "secret")
        self.reactor.callLater(0, self.record("next"))
        self.reactor.iterate(0)
        (failure,) = self.flushLoggedErrors(ValueError)
        self.assertEqual((self.made, str(failure.value)), (["next"], ""))


class StubPoller:
    """
    Poller without events, which records how long the reactor would wait.

    :ivar during: called during each wait.
    """

    def __init__(self) -> None:
        self.waits: list[float] = []
        self.during: Callable[[], object] = lambda: None

    def poll(self, timeout: float, limit: int) -> list[tuple[int, int]]:
        self.waits.append(timeout)
        self.during()
        return []

    def close(self) -> None:
        """Nothing to close."""


class ThreadCallTests(ReactorTestCase):
    """A thread wakes the reactor only if it sleeps, and never in vain."""

    def setUp(self) -> None:
        super().setUp()
        self.wakes = 0
        wake = self.reactor.waker.wakeUp

        def count() -> None:
            self.wakes += 1
            wake()

        self.patch(self.reactor.waker, "wakeUp", count)

    def stub_poller(self) -> StubPoller:
        self.reactor._poller.close()
        self.reactor._poller = stub = StubPoller()
        return stub

    def test_awake(self) -> None:
        """A call that is added while the reactor works costs no system call, and the reactor does not sleep then."""
        stub = self.stub_poller()
        self.reactor.callFromThread(self.record("made"))
        self.reactor.doIteration(60.0)
        self.assertEqual((self.wakes, stub.waits, self.made), (0, [0.0], []))
        self.reactor.runUntilCurrent()
        self.reactor.doIteration(60.0)
        self.assertEqual((self.wakes, stub.waits, self.made), (0, [0.0, 60.0], ["made"]))

    def test_asleep(self) -> None:
        """A call that is added from when the reactor sleeps wakes it."""
        stub = self.stub_poller()
        stub.during = lambda: self.reactor.callFromThread(self.record("made"))
        self.reactor.doIteration(60.0)
        self.assertEqual(self.wakes, 1)
        stub.during = lambda: None
        self.reactor.iterate(60.0)
        self.assertEqual((self.wakes, self.made), (1, ["made"]))

    def test_failed_wait(self) -> None:
        """After a wait that failed the reactor does not pass for asleep."""
        for error in (InterruptedError, ValueError):
            stub = self.stub_poller()
            stub.during = Mock(side_effect=error)
            with contextlib.suppress(ValueError):
                self.reactor.doIteration(60.0)
            self.reactor.callFromThread(self.record("made"))
            self.assertEqual(self.wakes, 0)

    def test_each_wake_ends_a_wait(self) -> None:
        """The kernel reports each wake once, without a read in between."""
        results = []
        for _ in range(3):
            thread = Thread(target=self.call_when_asleep)
            thread.start()
            results.append(self.reactor._poller.poll(60.0, 8) if self.set_asleep() else [])
            thread.join()
            results.append(self.reactor._poller.poll(0.0, 8))
        self.assertEqual(results, [[(self.reactor.waker.fileno(), EPOLLIN)], []] * 3)
        self.reactor.iterate(0)
        self.assertEqual((self.made, self.wakes), (["thread"] * 3, 3))

    def set_asleep(self) -> bool:
        self.reactor._is_waiting = True
        return True

    def call_when_asleep(self) -> None:
        while not self.reactor._is_waiting:
            pass
        self.reactor.callFromThread(self.record("thread"))
        self.reactor._is_waiting = False

    def test_many_threads(self) -> None:
        """No call is lost or waits for another event, whenever it is added."""
        calls, threads = 500, 4

        def add() -> None:
            for _ in range(calls):
                self.reactor.callFromThread(self.record("made"))

        started = [Thread(target=add) for _ in range(threads)]
        for thread in started:
            self.reactor.callLater(0, thread.start)
        timers: list[str] = []
        self.reactor.callLater(60, timers.append, "a wake-up was lost")
        while len(self.made) < calls * threads:
            self.reactor.doIteration(self.reactor.timeout())
            self.reactor.runUntilCurrent()
        for thread in started:
            thread.join()
        self.assertEqual(timers, [])

    def test_failure(self) -> None:
        """A call that fails is logged without the text of its exception, and the others are made."""
        self.reactor.callFromThread(int, "secret")
        self.reactor.callFromThread(self.record("next"))
        self.reactor.runUntilCurrent()
        (failure,) = self.flushLoggedErrors(ValueError)
        self.assertEqual((self.made, str(failure.value)), (["next"], ""))

    def test_calls_of_calls(self) -> None:
        """What such a call adds is made in the next iteration."""
        self.reactor.callFromThread(self.reactor.callFromThread, self.record("next"))
        self.reactor.runUntilCurrent()
        self.assertEqual(self.made, [])
        self.reactor.runUntilCurrent()
        self.assertEqual(self.made, ["next"])

    def test_close(self) -> None:
        """A waker that is closed twice closes nothing else."""
        waker = EventWaker()
        descriptor = waker.fileno()
        waker.connectionLost(Failure(ConnectionDone()))
        other = os.dup2(self.reactor.waker.fileno(), descriptor)
        self.addCleanup(os.close, other)
        waker.connectionLost(Failure(ConnectionDone()))
        os.fstat(other)
        self.assertEqual(waker.fileno(), -1)
        waker.wakeUp()  # a thread may be late


class MainLoopTests(ReactorTestCase):
    def test_failing_iteration(self) -> None:
        """The loop goes on after an iteration that failed, which is logged without the exception's text."""
        poller = self.reactor._poller
        self.reactor._poller = Mock(poll=Mock(side_effect=[OSError("secret"), []]), close=poller.close)
        self.reactor.callLater(0, lambda: self.reactor.callLater(1e-6, self.reactor.stop))
        self.reactor.run(installSignalHandlers=False)
        (failure,) = self.flushLoggedErrors(OSError)
        self.assertEqual(str(failure.value), "")


@implementer(IHalfCloseableProtocol)
class Recorder(Protocol):
    """Records what a connection does."""

    def __init__(self) -> None:
        self.received = b""
        self.lost: Failure | None = None
        self.is_half_closed = False

    def dataReceived(self, data: bytes) -> None:
        self.received += data
        if b"pause" in data:
            self.transport.pauseProducing()  # type: ignore[union-attr]
        if b"fail" in data:
            raise ValueError("secret")

    def readConnectionLost(self) -> None:  # noqa: N802  Twisted's name
        self.is_half_closed = True

    def writeConnectionLost(self) -> None:  # noqa: N802  Twisted's name
        pass

    def connectionLost(self, reason: Failure = connectionDone) -> None:
        self.lost = reason
        if b"badly" in self.received:
            raise ZeroDivisionError("secret")


class ClosedReader:
    """A reader that says by its descriptor that it is closed."""

    def __init__(self) -> None:
        self.pipe = os.pipe()
        self.descriptor = self.pipe[0]
        self.lost: Failure | None = None

    def fileno(self) -> int:
        return self.descriptor

    def logPrefix(self) -> str:  # noqa: N802  Twisted's name
        return "reader"

    def doRead(self) -> None:  # noqa: N802  Twisted's name
        raise AssertionError("it is closed")

    def connectionLost(self, reason: Failure) -> None:  # noqa: N802  Twisted's name
        self.lost = reason
        for descriptor in self.pipe:
            os.close(descriptor)


class ClosedReaderTests(ReactorTestCase):
    def test_negative_descriptor(self) -> None:
        """A reader whose descriptor has become -1 is dropped without being read."""
        reader = ClosedReader()
        self.reactor.addReader(reader)
        os.write(reader.pipe[1], b"data")
        reader.descriptor = -1
        self.iterate_until(lambda: reader.lost)
        self.assertEqual(self.reactor.getReaders(), [self.reactor.waker])


class EventTests(ReactorTestCase):
    """A server and a client in one reactor."""

    def setUp(self) -> None:
        super().setUp()
        self.ends: list[Recorder] = []

        def build(_: object) -> Recorder:
            self.ends.append(Recorder())
            return self.ends[-1]

        factory = Factory()
        factory.buildProtocol = build  # type: ignore[method-assign,assignment]
        factory.noisy = False
        port = self.reactor.listenTCP(0, factory, interface="127.0.0.1")
        client = ClientFactory()
        client.noisy = False
        client.buildProtocol = build  # type: ignore[method-assign,assignment]
        self.reactor.connectTCP("127.0.0.1", port.getHost().port, client)
        self.iterate_until(lambda: len([end for end in self.ends if end.transport]) == 2)
        is_server = [end.transport.getHost().port == port.getHost().port for end in self.ends]  # type: ignore[union-attr]
        self.server = self.ends[is_server.index(True)]
        self.client = self.ends[is_server.index(False)]

    def send(self, data: bytes) -> None:
        """Send from the client."""
        self.client.transport.write(data)  # type: ignore[union-attr]

    def test_no_wrapper(self) -> None:
        """Reading makes none of the calls that add a prefix to the legacy log."""
        wrapped: list[object] = []
        self.patch(vars(epollreactor)["log"], "callWithLogger", lambda *call: wrapped.append(call))
        self.send(b"data")
        self.iterate_until(lambda: self.server.received == b"data")
        self.assertEqual(wrapped, [])

    def test_failing_reader(self) -> None:
        """A protocol that fails loses its connection, which is logged without the exception's text."""
        self.send(b"fail")
        self.iterate_until(lambda: self.server.lost)
        self.assertIsInstance(self.server.lost.value, ValueError)  # type: ignore[union-attr]
        (failure,) = self.flushLoggedErrors(ValueError)
        self.assertEqual(str(failure.value), "")

    def test_failing_paused_reader(self) -> None:
        """So does one that has paused reading."""
        self.send(b"pause and fail")
        self.iterate_until(lambda: self.server.lost)
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)

    def test_failing_disconnection(self) -> None:
        """The loop goes on when a protocol fails as it loses its connection."""
        self.send(b"fail badly")
        self.iterate_until(lambda: self.server.lost)
        (failure,) = self.flushLoggedErrors(ZeroDivisionError)
        self.assertEqual(str(failure.value), "")
        self.assertEqual(len(self.flushLoggedErrors(ValueError)), 1)
        self.iterate_until(lambda: self.client.lost or self.client.is_half_closed)

    def test_half_close(self) -> None:
        """A protocol learns that its peer sends nothing more, and can still answer."""
        self.client.transport.loseWriteConnection()  # type: ignore[union-attr]
        self.iterate_until(lambda: self.server.is_half_closed)
        self.assertIsNone(self.server.lost)
        self.server.transport.write(b"answer")  # type: ignore[union-attr]
        self.iterate_until(lambda: self.client.received == b"answer")
        self.server.transport.loseConnection()  # type: ignore[union-attr]
        self.iterate_until(lambda: self.server.lost)

    def test_bounded_events(self) -> None:
        """An iteration handles a limited number of events, and the next ones the others."""
        self.patch(epoll_reactor, "MAX_EVENTS", 1)
        self.send(b"one")
        self.server.transport.write(b"two")  # type: ignore[union-attr]
        self.iterate_until(lambda: self.server.received and self.client.received)


class OtherReactorTests(SynchronousTestCase):
    def test_unchanged(self) -> None:
        """Reactors of other kinds remain as they are."""
        reactor = SelectReactor()
        self.addCleanup(reactor.waker.connectionLost, Failure(ConnectionError()))
        use_lean_events(reactor)
        self.assertIs(type(reactor), SelectReactor)
