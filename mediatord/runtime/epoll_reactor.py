"""
Twisted's epoll reactor with less work around each event.

For each ready socket Twisted asks for a log prefix and copies a dict with it, and for each call without a delay it
makes four comparisons or more in a heap of timers, and asks the kernel for events before it makes the call. Only its
legacy log has a use for the prefix, which names the address of the peer. A thread that hands over a call writes to a
pipe, which is read, even if the reactor does not sleep.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from select import EPOLLET, EPOLLIN
from typing import Any

from twisted.internet.base import DelayedCall
from twisted.internet.epollreactor import EPollReactor
from twisted.internet.error import ConnectionDone
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.runtime.failure_logging import redact_failure

# Events in one iteration. The kernel returns the others first the next time.
MAX_EVENTS = 1024
# What epoll_wait(2) takes, in milliseconds.
MAX_WAIT_SECONDS = (1 << 31) / 1000 - 1
# In one iteration: calls without a delay, those that they make, and so on. The next iteration makes the others.
MAX_PASSES = 4

_log = Logger()


class EventWaker:
    """
    Wakes the reactor, by an `eventfd(2)` of which the kernel reports every write once, so that it need not be read.
    """

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """See :class:`~twisted.internet.interfaces.IFileDescriptor`."""
        return self._descriptor

    def wakeUp(self) -> None:  # noqa: N802  Twisted's name
        """Make the reactor's wait end; may be called from any thread."""
        if self._descriptor >= 0:
            os.eventfd_write(self._descriptor, 1)

    def doRead(self) -> None:  # noqa: N802  Twisted's name
        """The reactor is awake."""

    def logPrefix(self) -> str:  # noqa: N802  Twisted's name
        """See :class:`~twisted.internet.interfaces.ILoggingContext`."""
        return "waker"

    def connectionLost(self, reason: Failure) -> None:  # noqa: N802  Twisted's name
        """Close the descriptor."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class LeanEPollReactor(EPollReactor):
    """
    As Twisted's, with the same order of calls, except that one without a delay that another call makes runs in the
    same iteration, unless it repeats the call that makes it: that yields to events.

    Twisted has no public way to change either; the names of its that are used here begin with an underscore.
    """

    # Calls without a delay, for the end of this iteration.
    _immediate: list[DelayedCall]
    # Repetitions, for the next iteration.
    _repeated: list[DelayedCall]
    # What the call that is being made calls.
    _calling: Callable[..., Any] | None = None
    # Whether a thread that adds a call has to wake the reactor.
    _is_waiting = False

    def mainLoop(self) -> None:  # noqa: N802  Twisted's name
        """Iterate until the reactor is stopped."""
        while self._started:
            try:
                while self._started:
                    self.runUntilCurrent()
                    self.doIteration(self.timeout() if self.running else 0.0)
            except BaseException:  # as Twisted does
                _log.failure("an iteration of the reactor failed", redact_failure())

    def callFromThread(  # noqa: N802  Twisted's name
        self, f: Callable[..., Any], *args: object, **kw: object
    ) -> None:
        """See :class:`~twisted.internet.interfaces.IReactorFromThreads`."""
        self.threadCallQueue.append((f, args, kw))
        # The reactor looks at the queue after it has set this.
        if self._is_waiting:
            self.wakeUp()

    def callLater(  # noqa: N802  Twisted's name
        self, delay: float, callable: Callable[..., Any], *args: object, **kw: object
    ) -> DelayedCall:
        """See :class:`~twisted.internet.interfaces.IReactorTime`."""
        if delay:
            return super().callLater(delay, callable, *args, **kw)
        now = self.seconds()
        call = DelayedCall(
            now, callable, args, kw, self._cancelCallLater, self._moveCallLaterSooner, seconds=self.seconds
        )
        (self._repeated if callable == self._calling else self._immediate).append(call)
        return call

    def getDelayedCalls(self) -> list[IDelayedCall]:  # noqa: N802  Twisted's name
        """See :class:`~twisted.internet.interfaces.IReactorTime`."""
        immediate = (call for call in self._immediate + self._repeated if not call.cancelled)
        return [*super().getDelayedCalls(), *immediate]

    def timeout(self) -> float | None:
        """Seconds for which nothing is due, or None."""
        if self._immediate or self._repeated or self._justStopped:
            return 0.0
        if self._newTimedCalls or not self._pendingTimedCalls:
            return super().timeout()
        left: float = self._pendingTimedCalls[0].time - self.seconds()
        return 0.0 if left < 0.0 else min(left, MAX_WAIT_SECONDS)

    def runUntilCurrent(self) -> None:  # noqa: N802  Twisted's name
        """Make the calls that are due."""
        if self.threadCallQueue:
            self._make_thread_calls()
        timers = self._pendingTimedCalls
        if self._newTimedCalls or (timers and timers[0].time <= self.seconds()) or self._justStopped:
            super().runUntilCurrent()
        if self._repeated:
            self._immediate += self._repeated
            self._repeated = []
        for _ in range(MAX_PASSES):
            if not self._immediate:
                break
            calls, self._immediate = self._immediate, []
            self._make_immediate_calls(calls)

    def _make_immediate_calls(self, calls: list[DelayedCall]) -> None:
        for call in calls:
            if call.cancelled:
                self._cancellations -= 1
            elif call.delayed_time:  # delayed after all
                self._newTimedCalls.append(call)
            else:
                call.called = 1
                self._calling = call.func
                try:
                    call.func(*call.args, **call.kw)
                except BaseException:  # as Twisted does
                    _log.failure("a delayed call failed", redact_failure())
        self._calling = None

    def _make_thread_calls(self) -> None:
        """Make the calls that threads have added; what is added meanwhile is for the next iteration."""
        calls = self.threadCallQueue[:]
        del self.threadCallQueue[: len(calls)]
        for function, args, kw in calls:
            try:
                function(*args, **kw)
            except BaseException:  # as Twisted does
                _log.failure("a call from a thread failed", redact_failure())

    def doIteration(self, timeout: float | None) -> None:  # noqa: N802  Twisted's name
        """Wait for events, `timeout` seconds at most, and handle them."""
        selectables = self._selectables
        self._is_waiting = True
        try:
            events = self._poller.poll(
                0.0 if self.threadCallQueue else -1 if timeout is None else timeout,
                min(len(selectables), MAX_EVENTS),
            )
        except InterruptedError:
            return
        finally:
            self._is_waiting = False
        for descriptor, event in events:
            selectable = selectables.get(descriptor)
            if selectable is None:  # closed by the handler of another
                continue
            try:
                if event != EPOLLIN or selectable.fileno() == -1:  # which says that it is closed
                    self._doReadOrWrite(selectable, descriptor, event)
                    continue
                try:
                    why = selectable.doRead()
                except BaseException as error:  # as Twisted does
                    _log.failure("reading from a connection failed", redact_failure())
                    why = error
                if why:
                    self._disconnectSelectable(selectable, why, True)
            except BaseException:  # as Twisted does
                _log.failure("handling an event failed", redact_failure())


def use_lean_events(reactor: Any) -> None:
    """
    Make a reactor a :class:`LeanEPollReactor` if it is Twisted's for epoll; others remain as they are.

    :param reactor: the program's own, which does not run yet.
    """
    if type(reactor) is EPollReactor:
        lean: Any = reactor
        lean.__class__ = LeanEPollReactor
        lean._immediate, lean._repeated = [], []
        lean.removeReader(lean.waker)
        lean._internalReaders.discard(lean.waker)
        lean.waker.connectionLost(Failure(ConnectionDone()))
        lean.waker = EventWaker()
        lean._internalReaders.add(lean.waker)
        lean.addReader(lean.waker)
        lean._poller.modify(lean.waker.fileno(), EPOLLIN | EPOLLET)
