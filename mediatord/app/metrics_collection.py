"""
What the store's own books say, told to the log: at the start, every minute, and at the end.

What the event log says of the state of the daemon, once a minute.

How full everything is that grows with what peers do or leave undone, for the metrics (docs/limits.md).

What the metrics say of the store: queues and ledger, always of one moment.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path

from twisted.application.service import Service
from twisted.internet.defer import CancelledError, Deferred
from twisted.internet.defer import TimeoutError as DeferredTimeout
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.app.core_services import CoreServices
from mediatord.didcomm.endpoint_delivery import EndpointDelivery
from mediatord.didcomm.forward_router import ForwardRouter
from mediatord.didcomm.live_delivery import LiveDelivery
from mediatord.errors import StoreUnavailable
from mediatord.failure_logging import redact_failure
from mediatord.http.site import MediatorSite
from mediatord.http.websocket import MediatorSocketFactory
from mediatord.net.did_resolver import DIDResolver

_log = Logger()

# Seconds that the last look may take: whoever stops the daemon does not wait for figures.
_LEDGER_TIMEOUT = 2.0


async def record_ledger(base: CoreServices) -> None:
    """
    Read the books and say what they say.

    :raise StoreUnavailable: they could not be read.
    """
    base.recorder.record_ledger(base.store_name, await base.store.read_ledger())


class StartStopLedgerRecorder(Service):
    """
    Tells of the books when the store was opened, and when nothing is done with it any more: of what the log says
    between the two nothing is missing in either.

    It is stopped before the store is closed, and after all that uses it.

    :param opened: told as well when the store is open.
    """

    name = "ledger"

    def __init__(self, base: CoreServices, opened: Callable[[], None] = lambda: None) -> None:
        self._base = base
        self._opened = opened
        self._is_open = False

    def store_opened(self) -> None:
        """The store is open."""
        if not self._is_open:
            self._is_open = True
            self._tell()
        self._opened()

    def stopService(self) -> Deferred[None]:
        """Fires when the last line is written, or it is no use to wait for it."""
        super().stopService()
        return self._tell()

    def _tell(self) -> Deferred[None]:
        looking = Deferred.fromCoroutine(record_ledger(self._base))
        looking.addTimeout(_LEDGER_TIMEOUT, self._base.reactor)
        return looking.addErrback(_log_ledger_failure)


def _log_ledger_failure(failure: Failure) -> None:
    """That the store is away is said elsewhere."""
    if not failure.check(StoreUnavailable, DeferredTimeout, CancelledError):
        _log.failure("reading the books of the store failed", redact_failure(failure))


# Seconds between looks at how late the reactor is.
LAG_SAMPLE_SECONDS = 1.0


class ReactorLagMonitor(Service):
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
        self._schedule()

    def stopService(self) -> None:
        """Look no more."""
        super().stopService()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def take(self) -> float:
        """The longest in seconds since this was asked last."""
        self._update_worst()
        worst, self._worst = self._worst, 0.0
        return worst

    def _schedule(self) -> None:
        self._due = self._steady() + LAG_SAMPLE_SECONDS
        self._timer = self._clock.callLater(LAG_SAMPLE_SECONDS, self._sample)

    def _sample(self) -> None:
        self._update_worst()
        self._tell(max(0.0, self._steady() - self._due))
        self._schedule()

    def _update_worst(self) -> None:
        if self.running:
            self._worst = max(self._worst, self._steady() - self._due)


async def record_gauges(base: CoreServices, lag: ReactorLagMonitor) -> None:
    """
    Write down how the daemon is, and what the store's books say.

    :raise StoreUnavailable: what waits, or what became of the rest, is not known; all else was written.
    """
    own = {
        "conns": len(base.connections),
        "rss": _read_resident_bytes(),
        "fds": _count_descriptors(),
        "lag_ms": lag.take() * 1000,
    }
    try:
        waiting = await base.store.get_queue_totals()
    except StoreUnavailable:
        base.recorder.record_gauge(**own)
        raise
    base.recorder.metrics.set_table_sizes(await base.store.table_sizes())
    since = waiting.oldest_received_at
    base.recorder.metrics.set_queued_messages(waiting.messages, since)
    base.recorder.record_gauge(
        depth=waiting.messages,
        bytes=waiting.bytes,
        rcpts=waiting.recipients,
        oldest_ms=None if since is None else max(0, int((base.reactor.seconds() - since) * 1000)),
        **own,
    )
    await record_ledger(base)
    usage = await base.registrations.usage()
    base.recorder.metrics.set_accounts(usage.accounts, usage.bytes)


def _read_resident_bytes() -> int | None:
    """Resident bytes of this process; None where there is no /proc."""
    try:
        pages = Path("/proc/self/statm").read_text("ascii").split()[1]
    except OSError:
        return None
    return int(pages) * resource.getpagesize()


def _count_descriptors() -> int | None:
    """Open file descriptors of this process; None where there is no /proc."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None


def register_core_buffers(base: CoreServices) -> None:
    """What both halves stand on."""
    metrics, recorder, connections = base.recorder.metrics, base.recorder, base.connections
    metrics.register_buffer("store_operations", base.store.get_buffered)
    metrics.register_buffer("event_log", lambda: (None, base.events.pending))
    metrics.register_buffer("rate_limits", lambda: (len(base.admission) + len(base.registrations), None))
    metrics.register_buffer("requests_in_progress", lambda: base.admission.memory.held)
    metrics.register_buffer("counted_pushes", lambda: (recorder.attempt_count, None))
    metrics.register_buffer("subscriptions", lambda: (connections.subscriptions, None))
    metrics.register_buffer("subscription_backlogs", lambda: (len(connections.backlogs), None))


def register_didcomm_buffers(
    base: CoreServices,
    live: LiveDelivery,
    forward_router: ForwardRouter,
    resolver: DIDResolver,
    endpoints: EndpointDelivery,
) -> None:
    """The DIDComm half."""
    metrics = base.recorder.metrics
    metrics.register_buffer("live_pushes", lambda: (live.unacknowledged_pushes, None))
    metrics.register_buffer("remembered_pushes", lambda: (live.remembered, None))
    metrics.register_buffer("seen_forwards", lambda: (forward_router.remembered, None))
    metrics.register_buffer("did_documents", lambda: resolver.held)
    metrics.register_buffer("endpoint_deliveries", lambda: endpoints.held)


def register_http_buffers(base: CoreServices, sockets: MediatorSocketFactory, site: MediatorSite) -> None:
    """The listeners."""
    metrics = base.recorder.metrics
    metrics.register_buffer("socket_outboxes", sockets.unsent)
    metrics.register_buffer("socket_inboxes", sockets.unserved)
    metrics.register_buffer("http_requests", site.read_ahead)
    metrics.register_buffer("http_answers", lambda: site.unread.held)


# Seconds from which on a look counts as expensive, and how many times as long it is not repeated then.
_SLOW_READ_SECONDS, _BACKOFF_FACTOR = 0.05, 20


async def refresh_store_metrics(base: CoreServices) -> None:
    """
    Have the metrics say how the store is now.

    :raise StoreUnavailable: it does not say, and the metrics say how it was.
    """
    found = await base.store.read_statistics(base.reloading.config.metrics.queue_size_top)
    largest = [one for one in found.largest if not base.own.identities.is_probe_did(one[0])]
    # What the daemon sends to itself has no series, but is in the sum as it is in the ledger.
    other = found.other + sum(number for _, number in found.largest) - sum(number for _, number in largest)
    base.recorder.metrics.set_queue_sizes(largest, other)
    base.recorder.update_ledger_metrics(found.books)
    base.recorder.metrics.set_store_read_time(base.reactor.seconds(), sum(number for _, number in largest) + other)


class StoreMetricsRefresher:
    """Reads the statistics for a scrape, less often where that takes long."""

    def __init__(self, base: CoreServices) -> None:
        self._base = base
        self._due = 0.0

    async def __call__(self) -> None:
        """:raise StoreUnavailable: as :func:`refresh_store_metrics`."""
        began = self._base.steady()
        if began < self._due:
            return
        await refresh_store_metrics(self._base)
        took = self._base.steady() - began
        self._due = began + took * _BACKOFF_FACTOR if took > _SLOW_READ_SECONDS else 0.0
