"""Periodic measurements for event log and metrics: message ledger, process gauges, reactor lag, store statistics."""

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
from mediatord.errors import StoreUnavailable
from mediatord.runtime.failure_logging import redact_failure

_log = Logger()

# Seconds that reading the ledger may delay the stop of the daemon.
_LEDGER_TIMEOUT = 2.0


async def record_ledger(core: CoreServices) -> None:
    """
    Record the message ledger of the store.

    :raise StoreUnavailable: it could not be read.
    """
    core.recorder.record_ledger(core.store_name, await core.store.read_ledger())


class StartStopLedgerRecorder(Service):
    """
    Records the message ledger when the store has been opened and when nothing uses it any more.

    So the two records enclose exactly what the event log reports between them. Stops after everything that uses the
    store, and before the store is closed.
    """

    name = "ledger"

    def __init__(self, core: CoreServices) -> None:
        self._core = core
        self._is_open = False

    def store_opened(self) -> None:
        """Record the ledger of the opened store, once."""
        if not self._is_open:
            self._is_open = True
            self._record()

    def stopService(self) -> Deferred[None]:
        """Fires when the last ledger is recorded, or at the timeout."""
        super().stopService()
        return self._record()

    def _record(self) -> Deferred[None]:
        recorded = Deferred.fromCoroutine(record_ledger(self._core))
        recorded.addTimeout(_LEDGER_TIMEOUT, self._core.reactor)
        return recorded.addErrback(_log_ledger_failure)


def _log_ledger_failure(failure: Failure) -> None:
    # The store logs by itself that it is unavailable.
    if not failure.check(StoreUnavailable, DeferredTimeout, CancelledError):
        _log.failure("reading the message ledger failed", redact_failure(failure))


# Seconds between measurements.
LAG_SAMPLE_SECONDS = 1.0


class ReactorLagMonitor(Service):
    """
    Measures how late the reactor runs timers.

    :param monotonic: seconds of a monotonic clock.
    :param observe: called with each measurement in seconds.
    """

    name = "lag"

    def __init__(self, clock: IReactorTime, monotonic: Callable[[], float], observe: Callable[[float], None]) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._observe = observe
        self._due = 0.0
        self._worst = 0.0
        self._timer: IDelayedCall | None = None

    def startService(self) -> None:
        """Start measuring."""
        super().startService()
        self._schedule()

    def stopService(self) -> None:
        """Stop measuring."""
        super().stopService()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def take(self) -> float:
        """The longest delay in seconds since the previous call."""
        self._update_worst()
        worst, self._worst = self._worst, 0.0
        return worst

    def _schedule(self) -> None:
        self._due = self._monotonic() + LAG_SAMPLE_SECONDS
        self._timer = self._clock.callLater(LAG_SAMPLE_SECONDS, self._sample)

    def _sample(self) -> None:
        self._update_worst()
        self._observe(max(0.0, self._monotonic() - self._due))
        self._schedule()

    def _update_worst(self) -> None:
        if self.running:
            self._worst = max(self._worst, self._monotonic() - self._due)


async def record_gauges(core: CoreServices, lag: ReactorLagMonitor) -> None:
    """
    Record gauges of the process, the queued messages, the message ledger, accounts and connections.

    :raise StoreUnavailable: the store did not answer; the gauges of the process are recorded.
    """
    own = {
        "conns": len(core.connections),
        "rss": _read_resident_bytes(),
        "fds": _count_descriptors(),
        "lag_ms": lag.take() * 1000,
    }
    try:
        waiting = await core.store.get_queue_totals()
    except StoreUnavailable:
        core.recorder.record_gauge(**own)
        raise
    core.recorder.metrics.set_table_sizes(await core.store.table_sizes())
    since = waiting.oldest_received_at
    core.recorder.metrics.set_queued_messages(waiting.messages, since)
    core.recorder.record_gauge(
        depth=waiting.messages,
        bytes=waiting.bytes,
        rcpts=waiting.recipients,
        oldest_ms=None if since is None else max(0, int((core.reactor.seconds() - since) * 1000)),
        **own,
    )
    await record_ledger(core)
    usage = await core.registrations.usage()
    core.recorder.metrics.set_accounts(usage.accounts, usage.bytes)
    with_account, pending = await core.store.v1_connections.count_connections()
    core.recorder.metrics.set_v1_connections(with_account, pending)


def _read_resident_bytes() -> int | None:
    """Resident bytes of this process; None without /proc."""
    try:
        pages = Path("/proc/self/statm").read_text("ascii").split()[1]
    except OSError:
        return None
    return int(pages) * resource.getpagesize()


def _count_descriptors() -> int | None:
    """Open file descriptors of this process; None without /proc."""
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:
        return None


# Seconds from which a query counts as slow, and the factor of its duration for which it is not repeated then.
_SLOW_READ_SECONDS, _BACKOFF_FACTOR = 0.05, 20


async def refresh_store_metrics(core: CoreServices) -> None:
    """
    Set the metrics of the store to its current state.

    :raise StoreUnavailable: the store did not answer; the metrics are unchanged.
    """
    found = await core.store.read_statistics(core.reloader.config.metrics.queue_size_top)
    largest = [one for one in found.largest if not core.probe_credentials.identities.is_probe_did(one[0])]
    # Probe messages have no series of their own, but count in the sum, as in the ledger.
    other = found.other + sum(number for _, number in found.largest) - sum(number for _, number in largest)
    core.recorder.metrics.set_queue_sizes(largest, other)
    core.recorder.update_ledger_metrics(found.ledger)
    core.recorder.metrics.set_store_read_time(core.reactor.seconds(), sum(number for _, number in largest) + other)


class StoreMetricsRefresher:
    """Refreshes the metrics of the store for a scrape, less often if that is slow."""

    def __init__(self, core: CoreServices) -> None:
        self._core = core
        self._due = 0.0

    async def __call__(self) -> None:
        """:raise StoreUnavailable: as :func:`refresh_store_metrics`."""
        began = self._core.monotonic()
        if began < self._due:
            return
        await refresh_store_metrics(self._core)
        took = self._core.monotonic() - began
        self._due = began + took * _BACKOFF_FACTOR if took > _SLOW_READ_SECONDS else 0.0
