"""Time for those who wait: that of the host goes back when somebody sets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from twisted.internet.interfaces import IDelayedCall, IReactorTime
from zope.interface import implementer


@implementer(IReactorTime)
class Ticking:
    """
    The time of a reactor, but that it never goes back, and that it has passed once what was to be called later is
    called. So a deadline is never further away than it was, as long as its timers go on; see :mod:`mediatord.steady`.

    Delayed calls can be cancelled; they tell of the reactor's own time, so nobody may look at it or move them.
    """

    def __init__(self, reactor: IReactorTime) -> None:
        self._reactor = reactor
        self._ahead = 0.0
        self._latest = reactor.seconds()

    def seconds(self) -> float:
        """That of the reactor until it is set back for the first time."""
        return self._pass(self._latest)

    def callLater(  # noqa: N802  the interface's name
        self, delay: float, callable: Callable[..., object], *args: object, **kw: object
    ) -> IDelayedCall:
        """See :class:`IReactorTime`."""
        return self._reactor.callLater(delay, self._call, self.seconds() + delay, callable, args, kw)

    def getDelayedCalls(self) -> Any:  # noqa: N802  the interface's name
        """See :class:`IReactorTime`."""
        return self._reactor.getDelayedCalls()

    def _call(self, due: float, callable: Callable[..., object], args: Any, kw: Any) -> None:
        self._pass(due)
        callable(*args, **kw)

    def _pass(self, moment: float) -> float:
        """Now, which is no earlier than this."""
        now = self._reactor.seconds() + self._ahead
        if now < moment:
            self._ahead += moment - now
            now = moment
        self._latest = now
        return now
