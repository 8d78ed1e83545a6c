"""What the event log says of the state of the daemon, once a minute."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

from twisted.application.service import Service
from twisted.internet.interfaces import IDelayedCall, IReactorTime

from mediatord.errors import StoreUnavailable
from mediatord.wiring.base import Base
from mediatord.wiring.ledger import tell_ledger

# Seconds between looks at how late the reactor is.
LOOK = 1.0


class Lag(Service):
    """
    Measures how late the reactor does what it is to do.

    :param steady: seconds since any time, by a clock that nobody sets.
    :param tell: told so at every look, in seconds.
    """

    name = "lag"

    def __init__(self, clock: IReactorTime, steady: Callable[[], float], tell: Callable[[float], None]) -> None:
        self._clock = clock
        self._steady = steady
        self._tell = tell
        self._due = 0.0
        self._worst = 0.0
        self._timer: IDelayedCall | None = None

    def startService(self) -> None:
        """Begin to look."""
        super().startService()
        self._wait()

    def stopService(self) -> None:
        """Look no more."""
        super().stopService()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def take(self) -> float:
        """The longest in seconds since this was asked last."""
        self._look()
        worst, self._worst = self._worst, 0.0
        return worst

    def _wait(self) -> None:
        self._due = self._steady() + LOOK
        self._timer = self._clock.callLater(LOOK, self._again)

    def _again(self) -> None:
        self._look()
        self._tell(max(0.0, self._steady() - self._due))
        self._wait()

    def _look(self) -> None:
        if self.running:
            self._worst = max(self._worst, self._steady() - self._due)


async def gauge(base: Base, lag: Lag) -> None:
    """
    Write down how the daemon is, and what the store's books say.

    :raise StoreUnavailable: what waits, or what became of the rest, is not known; all else was written.
    """
    own = {"conns": len(base.connections), "rss": _resident(), "fds": _descriptors(), "lag_ms": lag.take() * 1000}
    try:
        waiting = await base.store.waiting()
    except StoreUnavailable:
        base.journal.gauge(**own)
        raise
    base.journal.metrics.table_sizes(await base.store.table_sizes())
    since = waiting.oldest_received_at
    base.journal.metrics.waiting(waiting.messages, since)
    base.journal.gauge(
        depth=waiting.messages,
        bytes=waiting.bytes,
        rcpts=waiting.recipients,
        oldest_ms=None if since is None else max(0, int((base.reactor.seconds() - since) * 1000)),
        **own,
    )
    await tell_ledger(base)
    usage = await base.registrations.usage()
    base.journal.metrics.accounts(usage.accounts, usage.bytes)


def _resident() -> int | None:
    """Resident bytes of this process; None where there is no /proc."""
    try:
        pages = Path("/proc/self/statm").read_text("ascii").split()[1]
    except OSError:
        return None
    return int(pages) * resource.getpagesize()


def _descriptors() -> int | None:
    """Open file descriptors of this process; None where there is no /proc."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None
