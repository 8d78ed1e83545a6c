"""
Twisted's epoll reactor with less work around each event.

For each ready socket Twisted asks for a log prefix and copies a dict with it, and for each call without a delay it
makes four comparisons or more in a heap of timers. Only its legacy log has a use for the prefix, which names the
address of the peer.
"""

from __future__ import annotations

from collections.abc import Callable
from select import EPOLLIN
from typing import Any

from twisted.internet.base import DelayedCall
from twisted.internet.epollreactor import EPollReactor
from twisted.internet.interfaces import IDelayedCall
from twisted.logger import Logger

from mediatord.runtime.failure_logging import redact_failure

# Events in one iteration. The kernel returns the others first the next time.
MAX_EVENTS = 1024
# What epoll_wait(2) takes, in milliseconds.
MAX_WAIT_SECONDS = (1 << 31) / 1000 - 1

_log = Logger()


class LeanEPollReactor(EPollReactor):
    """
    As Twisted's, with the same order of calls, except that one without a delay that a timer makes runs in the same
    iteration.

    Twisted has no public way to change either; the names of its that are used here begin with an underscore.
    """

    # Calls without a delay, for the end of this iteration.
    _immediate: list[DelayedCall]

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
        self._immediate.append(call)
        return call

    def getDelayedCalls(self) -> list[IDelayedCall]:  # noqa: N802  Twisted's name
        """See :class:`~twisted.internet.interfaces.IReactorTime`."""
        return [*super().getDelayedCalls(), *(call for call in self._immediate if not call.cancelled)]

    def timeout(self) -> float | None:
        """Seconds for which nothing is due, or None."""
        if self._immediate or self._justStopped:
            return 0.0
        if self._newTimedCalls or not self._pendingTimedCalls:
            return super().timeout()
        left: float = self._pendingTimedCalls[0].time - self.seconds()
        return 0.0 if left < 0.0 else min(left, MAX_WAIT_SECONDS)

    def runUntilCurrent(self) -> None:  # noqa: N802  Twisted's name
        """Make the calls that are due."""
        timers = self._pendingTimedCalls
        if (
            self.threadCallQueue
            or self._newTimedCalls
            or (timers and timers[0].time <= self.seconds())
            or self._justStopped
        ):
            super().runUntilCurrent()
        if not self._immediate:
            return
        calls, self._immediate = self._immediate, []
        for call in calls:
            if call.cancelled:
                self._cancellations -= 1
            elif call.delayed_time:  # delayed after all
                self._newTimedCalls.append(call)
            else:
                call.called = 1
                try:
                    call.func(*call.args, **call.kw)
                except BaseException:  # as Twisted does
                    _log.failure("a delayed call failed", redact_failure())

    def doIteration(self, timeout: float | None) -> None:  # noqa: N802  Twisted's name
        """Wait for events, `timeout` seconds at most, and handle them."""
        selectables = self._selectables
        try:
            events = self._poller.poll(-1 if timeout is None else timeout, min(len(selectables), MAX_EVENTS))
        except InterruptedError:
            return
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
        lean._immediate = []
