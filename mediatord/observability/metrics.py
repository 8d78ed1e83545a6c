"""
Prometheus metrics of the daemon (contract section 5).

All series live in the given registry. Children of labelled metrics are looked up once; every label but `did` takes
one of a few constant values. :class:`FastCounter` and :class:`FastHistogram` cost no more than an addition:
prometheus-client takes a lock per update, checks labels each time and scans histogram bounds linearly. They must only
be used by the reactor thread.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Gauge, Info, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString


class ProcessMetricsCollector(ProcessCollector):
    """
    `process_*` metrics, also where `/proc` contains nothing but processes (systemd's `ProcSubset=pid`).

    :param proc: mount point of procfs.
    """

    def __init__(self, registry: CollectorRegistry, proc: str = "/proc") -> None:
        super().__init__(proc=proc, registry=registry)

    def _boot_time(self) -> float:
        """Boot time of the host in Unix seconds, without reading a file."""
        return time.clock_gettime(time.CLOCK_REALTIME) - time.clock_gettime(time.CLOCK_BOOTTIME)


class FastCounter:
    """
    One series of a counter.

    :ivar value: current value.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        """:param amount: not negative."""
        self.value += amount


class FastHistogram:
    """
    One series of a histogram.

    :param bounds: upper bounds of the buckets, ascending, without infinity.
    """

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """:param value: in seconds."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative buckets with their bounds as Prometheus formats them, and the sum."""
        found, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            found.append((floatToGoString(bound), float(total)))
        return found, self._sum


class FastCounterFamily:
    """
    A counter with or without labels; without, its only series exists from the start.

    :param name: without `_total`.
    """

    def __init__(self, registry: CollectorRegistry, name: str, text: str, *labels: str) -> None:
        self._about = name, text, labels
        self.series: defaultdict[tuple[str, ...], FastCounter] = defaultdict(FastCounter)
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> FastCounter:
        """The series with these label values."""
        return self.series[values]

    def value(self, *values: str) -> int:
        """Value of a series, without creating it."""
        counter = self.series.get(values)
        return 0 if counter is None else counter.value

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        name, text, labels = self._about
        family = CounterMetricFamily(name, text, labels=labels)
        for values, counter in self.series.items():
            family.add_metric(values, counter.value)
        return [family]


class FastHistogramFamily:
    """A histogram with or without labels; as :class:`FastCounterFamily`."""

    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, bounds: Sequence[float], *labels: str
    ) -> None:
        self._about = name, text, labels
        self.series: defaultdict[tuple[str, ...], FastHistogram] = defaultdict(partial(FastHistogram, tuple(bounds)))
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> FastHistogram:
        """The series with these label values."""
        return self.series[values]

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        name, text, labels = self._about
        family = HistogramMetricFamily(name, text, labels=labels)
        for values, histogram in self.series.items():
            buckets, total = histogram.buckets()
            family.add_metric(values, buckets, total)
        return [family]


class LedgerMetrics:
    """`mediator_ledger_*`: the ledgers as last read from the store; no series before that."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._entries: dict[str, Mapping[str, int | None]] = {}
        self._differences: dict[str, int | None] = {}
        registry.register(self)

    def update(self, half: str, entries: Mapping[str, int | None], difference: int | None) -> None:
        """
        Set the ledger of one protocol.

        :param entries: number of messages by outcome; None if unknown.
        :param difference: messages unaccounted for; None likewise.
        """
        self._entries[half] = entries
        self._differences[half] = difference

    def collect(self) -> Iterable[Metric]:
        """Called by the registry; unknown values have no series."""
        messages = GaugeMetricFamily(
            "mediator_ledger_messages", "Accepted messages by outcome", labels=["half", "entry"]
        )
        differences = GaugeMetricFamily(
            "mediator_ledger_difference", "Messages unaccounted for in the ledger", labels=["half"]
        )
        for half, entries in self._entries.items():
            for entry, number in entries.items():
                if number is not None:
                    messages.add_metric([half, entry], number)
        for half, difference in self._differences.items():
            if difference is not None:
                differences.add_metric([half], difference)
        return (messages, differences) if self._entries else ()


CONTENT_TYPE = CONTENT_TYPE_LATEST

# Entries and bytes of a buffer; None where not counted.
BufferUsage = tuple[int | None, int | None]

_REQUEST_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_STORE_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# From live delivery to a pickup just before expiry.
_LATENCY_BUCKETS = (
    (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
    + tuple(60.0 * minutes for minutes in (1, 5, 15, 30))
    + tuple(3600.0 * hours for hours in (1, 2, 6, 12, 24, 48, 72))
)
_OTHER_QUEUES = "other"
# As in mediatord.store.interfaces.store.
_STORAGE_FAULTS = ("missing", "damaged", "full")


class Metrics:
    """
    The daemon's metrics.

    :param version: of mediatord.
    :param label: maps a DID to its label value.
    :ivar forwarded: payloads accepted.
    :ivar stored: payloads queued because they could not be pushed.
    :ivar delivered: payloads acknowledged, or accepted by the recipient's endpoint.
    :ivar expired: payloads dropped at the end of their TTL.
    :ivar evicted: payloads dropped to make room.
    :ivar active_connections: open sockets.
    :ivar storage_is_up: whether the store responded to the last health check.
    :ivar ledger: ledger metrics.
    :ivar read_readiness: whether the daemon is ready; None while /ready is not polled, and then there is no such
        series.
    """

    def __init__(
        self, registry: CollectorRegistry, *, version: str, label: Callable[[str], str] = lambda did: did
    ) -> None:
        self._registry = registry
        self._label = label
        self.forwarded = _create_counter(registry, "messages_forwarded", "Payloads accepted for a recipient").labels()
        self.stored = _create_counter(
            registry, "messages_stored", "Payloads queued because they could not be pushed"
        ).labels()
        self.delivered = _create_counter(
            registry, "messages_delivered", "Payloads acknowledged by their recipient"
        ).labels()
        self.expired = _create_counter(
            registry, "messages_expired", "Payloads dropped at the end of their time"
        ).labels()
        self.evicted = _create_counter(
            registry, "messages_evicted", "Payloads dropped to make room for newer ones"
        ).labels()
        self.active_connections = _create_gauge(registry, "active_connections", "Open sockets")
        self._log_dropped = _create_counter(registry, "log_dropped", "Event log lines that were not written").labels()
        self._log_deleted = _create_counter(
            registry, "log_segments_deleted", "Closed segments of the event log deleted by log.retention"
        ).labels()
        self._log_deleted_unread = _create_counter(
            registry, "log_segments_deleted_unread", "Segments deleted before the analysis had read them"
        ).labels()
        self._log_directory_recreated = _create_counter(
            registry, "log_directory_recreated", "Recreations of the removed log directory"
        ).labels()
        self.storage_is_up = False
        self._storage_up = _create_gauge(registry, "storage_up", "Whether the store answers")
        faults = _create_gauge(registry, "storage_fault", "Faults of the store; 1 while present", "fault")
        self._storage_faults = {fault: faults.labels(fault) for fault in _STORAGE_FAULTS}
        self._faults: set[str] = set()
        self._table_size = _create_gauge(registry, "storage_bytes", "Size of store tables in bytes", "table")
        self._queue_size = _create_gauge(
            registry, "message_queue_size", "Queued messages of the largest queues", "did"
        )
        self._queues: frozenset[str] = frozenset()
        requests = _create_counter(registry, "requests", "Requests and frames by outcome", "protocol", "outcome")
        rejected = _create_counter(registry, "rejected", "Requests and frames refused, by reason", "reason")
        duration = _create_histogram(
            registry, "request_duration", "Time from request to response", _REQUEST_BUCKETS, "protocol"
        )
        latency = _create_histogram(
            registry, "delivery_latency", "Time from acceptance to acknowledgement", _LATENCY_BUCKETS, "method"
        )
        store = _create_histogram(
            registry, "store_duration", "Duration of store operations", _STORE_BUCKETS, "operation"
        )
        self._request_counter = requests
        self._rejections = rejected
        self._rejected = rejected.labels
        self._duration, self._latency, self._store = duration.series, latency.series, store.series
        self._reload = _create_gauge(
            registry, "config_last_reload_success", "Whether the last configuration reload succeeded"
        )
        self._reloaded_at = _create_gauge(
            registry, "config_last_reload_success_timestamp_seconds", "Time of the last successful reload or start"
        )
        self._expiry = _create_gauge(
            registry, "certificate_expiry_timestamp_seconds", "Expiry of a listener's certificate", "listener"
        )
        self._cluster_nodes = _create_gauge(registry, "cluster_nodes", "Live nodes, this one among them")
        self._stale_presence = _create_counter(
            registry, "cluster_stale_presence", "Presence entries found to be stale"
        ).labels()
        self._hints = _create_histogram(
            registry, "cluster_hint_duration", "Round trip of notifications to other nodes", _STORE_BUCKETS
        ).labels()
        pushes = _create_counter(
            registry, "cluster_pushes", "Pushes requested from other nodes, by outcome", "outcome"
        )
        refused = _create_counter(registry, "cluster_refused", "Node-to-node requests refused, by reason", "reason")
        self._pushes, self._refused = pushes.labels, refused.labels
        self._buffers: dict[str, Callable[[], BufferUsage]] = {}
        self._waiting: int | None = None
        self._oldest: float | None = None
        self._store_read_at: float | None = None
        self._lag = _create_histogram(
            registry, "reactor_lag", "Timer delay of the reactor, sampled every second", _LAG_BUCKETS
        ).labels()
        ProcessMetricsCollector(registry)
        self.ledger = LedgerMetrics(registry)
        self.read_readiness: Callable[[], bool | None] = lambda: None
        registry.register(self)
        self._cycle = _create_histogram(
            registry, "ready_cycle_duration", "Duration of successful probe cycles", _STORE_BUCKETS
        ).labels()
        failures = _create_counter(registry, "ready_failures", "Failed probe cycles, by stage", "stage")
        self._failures = failures.labels
        expired = _create_counter(registry, "accounts_expired", "Accounts removed for disuse", "reason")
        self._accounts_expired = {reason: expired.labels(reason) for reason in ("unused", "idle")}
        self._accounts: tuple[int, int] | None = None
        Info("mediator_build", "The version that is running", registry=registry).info({"version": version})

    def observe_request(self, protocol: str, outcome: str, seconds: float) -> None:
        """Count a finished request or frame, and its duration."""
        self._request_counter.series[protocol, outcome].value += 1
        self._duration[(protocol,)].observe(seconds)

    def count_lost_line(self) -> None:
        """Count a lost line of the event log."""
        self._log_dropped.inc()

    def count_deleted_segments(self, segments: int, unread: int) -> None:
        """Count deleted segments of the event log; `unread` of them had not been analysed."""
        self._log_deleted.inc(segments)
        self._log_deleted_unread.inc(unread)

    def count_recreated_directory(self) -> None:
        """Count a recreation of the removed log directory."""
        self._log_directory_recreated.inc()

    def collect_totals(self) -> dict[str, int]:
        """Fields of the event `counters`, with which the event log can be compared."""
        totals = {
            "forwarded": self.forwarded.value,
            "stored": self.stored.value,
            "delivered": self.delivered.value,
            "expired": self.expired.value,
            "evicted": self.evicted.value,
            "requests_accepted": 0,
            "requests_rejected": 0,
            "requests_failed": 0,
            "connections": int(list(self.active_connections.collect())[0].samples[0].value),
        }
        for (_, outcome), counter in self._request_counter.series.items():
            totals[f"requests_{outcome}"] += counter.value
        return totals

    def count_rejection(self, reason: str) -> None:
        """Count a refused request or frame. :param reason: label of the error, such as `recipient_unknown`."""
        self._rejected(reason).inc()

    def get_rejection_count(self, reason: str) -> int:
        """Number of rejections with a reason."""
        return self._rejections.value(reason)

    def observe_delivery_latency(self, method: str, seconds: float) -> None:
        """Observe the time from acceptance to acknowledgement. :param method: how the message was delivered."""
        self._latency[(method,)].observe(seconds)

    def observe_store_operation(self, operation: str, seconds: float) -> None:
        """Observe the duration of a store operation, successful or not."""
        self._store[(operation,)].observe(seconds)

    def count_cluster_push(self, outcome: str) -> None:
        """Count a push that another node was asked for: `pushed`, `no_session`, `failed` or `dropped`."""
        self._pushes(outcome).inc()

    def observe_peer_notification(self, seconds: float) -> None:
        """Observe the round trip of a notification to another node."""
        self._hints.observe(seconds)

    def count_stale_presence(self) -> None:
        """Count a presence entry that turned out to be stale."""
        self._stale_presence.inc()

    def count_refused_peer_request(self, reason: str) -> None:
        """Count a refused node-to-node request: `malformed`, or rejected for its `seal`."""
        self._refused(reason).inc()

    def set_reload_result(self, now: float, success: bool) -> None:
        """Record a load of the configuration. :param success: whether all of it was applied."""
        self._reload.set(success)
        if success:
            self._reloaded_at.set(now)

    def set_certificate_expiry(self, listener: str, expiry: float) -> None:
        """Set the expiry of a listener's certificate, in Unix seconds."""
        self._expiry.labels(listener).set(expiry)

    def set_cluster_nodes(self, live: int) -> None:
        """Set the number of live nodes."""
        self._cluster_nodes.set(live)

    def set_storage_up(self, up: bool) -> None:
        """Record whether the store responded to a health check."""
        self.storage_is_up = up and not self._faults
        self._storage_up.set(self.storage_is_up)

    def set_storage_fault(self, fault: str, present: bool) -> None:
        """Set or clear a fault; the store counts as down while there is one."""
        (self._faults.add if present else self._faults.discard)(fault)
        self._storage_faults[fault].set(present)
        self.set_storage_up(not self._faults)

    def set_table_sizes(self, sizes: Mapping[str, int]) -> None:
        """Set the size of store tables in bytes."""
        for table, size in sizes.items():
            self._table_size.labels(table).set(size)

    def observe_reactor_lag(self, seconds: float) -> None:
        """Observe by how much a timer was late."""
        self._lag.observe(seconds)

    def set_queued_messages(self, messages: int, oldest: float | None) -> None:
        """
        Set the number of queued messages. :param oldest: when the oldest arrived, Unix seconds; None if there are
        none.
        """
        self._waiting, self._oldest = messages, oldest

    def count_account_expiry(self, reason: str) -> None:
        """Count an account removed as `unused` or `idle`."""
        self._accounts_expired[reason].inc()

    def set_accounts(self, number: int, size: int) -> None:
        """Set the number of accounts, and the bytes of their DIDs and registrations."""
        self._accounts = number, size

    def set_store_read_time(self, now: float, messages: int) -> None:
        """Record when queues and ledger were read from the store. :param messages: queued messages at that time."""
        self._store_read_at, self._waiting = now, messages
        if not messages:
            self._oldest = None

    def observe_probe_cycle(self, seconds: float) -> None:
        """Observe a successful probe cycle."""
        self._cycle.observe(seconds)

    def count_probe_failure(self, stage: str) -> None:
        """Count a failed probe cycle. :param stage: where it failed."""
        self._failures(stage).inc()

    def register_buffer(self, buffer: str, held: Callable[[], BufferUsage]) -> None:
        """
        Export the usage of a buffer.

        :param buffer: name as in docs/limits.md.
        :param held: called at every scrape; entries and bytes, each None if not counted.
        """
        self._buffers[buffer] = held

    def _filling(self) -> Iterable[Metric]:
        entries = GaugeMetricFamily("mediator_buffer_entries", "Entries in memory buffers", labels=["buffer"])
        sizes = GaugeMetricFamily("mediator_buffer_bytes", "Bytes in memory buffers", labels=["buffer"])
        for buffer, held in self._buffers.items():
            for family, value in zip((entries, sizes), held(), strict=True):
                if value is not None:
                    family.add_metric([buffer], value)
        return entries, sizes

    def collect(self) -> Iterable[Metric]:
        """Called by the registry, for values that are read at scrape time."""
        yield from self._filling()
        ready = self.read_readiness()
        if ready is not None:
            yield GaugeMetricFamily(
                "mediator_ready", "Whether messages get through; absent while /ready is not polled", int(ready)
            )
        if self._accounts is not None:
            number, size = self._accounts
            yield GaugeMetricFamily("mediator_accounts", "Accounts of DIDComm wallets", number)
            yield GaugeMetricFamily("mediator_registration_bytes", "Bytes of DIDs and registrations", size)
        if self._waiting is not None:
            yield GaugeMetricFamily("mediator_messages_waiting", "Queued messages", self._waiting)
        if self._store_read_at is not None:
            yield GaugeMetricFamily(
                "mediator_store_statistics_timestamp_seconds",
                "Time at which queues and ledger were last read",
                self._store_read_at,
            )
        if self._oldest is not None:
            yield GaugeMetricFamily(
                "mediator_oldest_message_timestamp_seconds", "Arrival time of the oldest queued message", self._oldest
            )

    def set_queue_sizes(self, largest: Iterable[tuple[str, int]], other: int) -> None:
        """
        Replace all series of the queue size; empty queues have none.

        :param largest: recipient DIDs with their number of messages.
        :param other: number of messages in all other queues.
        """
        sizes: dict[str, int] = {}
        for did, size in [*((self._label(did), size) for did, size in largest), (_OTHER_QUEUES, other)]:
            if size > 0:
                sizes[did] = sizes.get(did, 0) + size
        for gone in self._queues - sizes.keys():
            self._queue_size.remove(gone)
        for label, size in sizes.items():
            self._queue_size.labels(label).set(size)
        self._queues = frozenset(sizes)

    def render(self) -> bytes:
        """All metrics in Prometheus text format, with content type :data:`CONTENT_TYPE`."""
        return generate_latest(self._registry)


def _create_counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> FastCounterFamily:
    return FastCounterFamily(registry, f"mediator_{name}", text, *labels)


def _create_gauge(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"mediator_{name}", text, labels, registry=registry)


def _create_histogram(
    registry: CollectorRegistry, name: str, text: str, buckets: Sequence[float], *labels: str
) -> FastHistogramFamily:
    return FastHistogramFamily(registry, f"mediator_{name}_seconds", text, buckets, *labels)
