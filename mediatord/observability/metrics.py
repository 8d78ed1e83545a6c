"""
Prometheus metrics of the daemon (contract section 5).

All series live in the given registry; every label but `did` takes one of a few constant values.
:class:`FastCounter` and :class:`FastHistogram` cost no more than an addition: prometheus-client takes a lock per
update, checks labels each time and scans histogram bounds linearly. They must only be used by the reactor thread.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry, Gauge, Info, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from mediatord.observability.event_schema import MESSAGE_COUNTERS, REQUEST_COUNTERS


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
    A counter with or without labels; without, its only series exists from the start.

    :param name: without `mediator_` and `_total`.
    :ivar counts: by the values of the labels; to be increased directly where a call costs too much.
    """

    def __init__(self, registry: CollectorRegistry, name: str, text: str, *labels: str) -> None:
        self._about = f"mediator_{name}", text, labels
        self.counts: defaultdict[tuple[str, ...], int] = defaultdict(int)
        if not labels:
            self.counts[()] = 0
        registry.register(self)

    def inc(self, *labels: str, by: int = 1) -> None:
        """:param by: not negative."""
        self.counts[labels] += by

    def get(self, *labels: str) -> int:
        """Value of a series, without creating it."""
        return self.counts.get(labels, 0)

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        name, text, labels = self._about
        family = CounterMetricFamily(name, text, labels=labels)
        for values, count in self.counts.items():
            family.add_metric(values, count)
        return [family]


class FastHistogram:
    """
    A histogram of seconds with or without labels; as :class:`FastCounter`.

    :param name: without `mediator_` and `_seconds`.
    :param bounds: upper bounds of the buckets, ascending, without infinity.
    """

    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, bounds: Sequence[float], *labels: str
    ) -> None:
        self._about = f"mediator_{name}_seconds", text, labels
        self._bounds = bounds
        # Numbers of values in the buckets, and the sum of all values.
        self.series: defaultdict[tuple[str, ...], list[float]] = defaultdict(lambda: [0] * (len(bounds) + 1) + [0.0])
        if not labels:
            self.series[()]
        registry.register(self)

    def observe(self, seconds: float, *labels: str) -> None:
        """Count a value."""
        series = self.series[labels]
        series[bisect_left(self._bounds, seconds)] += 1
        series[-1] += seconds

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        name, text, labels = self._about
        bounds = [floatToGoString(bound) for bound in (*self._bounds, float("inf"))]
        family = HistogramMetricFamily(name, text, labels=labels)
        for values, (*counts, total) in self.series.items():
            family.add_metric(values, list(zip(bounds, map(float, accumulate(counts)), strict=True)), total)
        return [family]


MetricType = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricDeclaration:
    """
    Declaration of a metric.

    :param text: its help text.
    """

    type: MetricType
    text: str
    labels: tuple[str, ...] = ()


# All metrics but those of the process (`process_*`).
METRICS: dict[str, MetricDeclaration] = {
    "mediator_messages_forwarded_total": MetricDeclaration("counter", "Messages accepted for a recipient"),
    "mediator_messages_stored_total": MetricDeclaration(
        "counter", "Messages queued because no socket took them, or because a push was not acknowledged"
    ),
    "mediator_messages_delivered_total": MetricDeclaration(
        "counter", "Messages acknowledged by the recipient or accepted by its endpoint"
    ),
    "mediator_messages_expired_total": MetricDeclaration(
        "counter", "Messages that expired (queue.ttl) before they were acknowledged"
    ),
    "mediator_messages_evicted_total": MetricDeclaration("counter", "Messages evicted from full queues"),
    "mediator_messages_waiting": MetricDeclaration("gauge", "Queued messages"),
    "mediator_message_queue_size": MetricDeclaration(
        "gauge", "Messages in each of the metrics.queue_size_top longest queues, and in all others (other)", ("did",)
    ),
    "mediator_oldest_message_timestamp_seconds": MetricDeclaration(
        "gauge", "Arrival time of the oldest queued message; absent without messages"
    ),
    "mediator_delivery_latency_seconds": MetricDeclaration(
        "histogram",
        "Time from acceptance to acknowledgement, by delivery method: live, pickup, poll, http",
        ("method",),
    ),
    "mediator_ledger_messages": MetricDeclaration(
        "gauge",
        "Message ledger: all messages since the store was created, by outcome "
        "(accepted, acknowledged, expired, evicted, removed, withdrawn, waiting)",
        ("protocol", "entry"),
    ),
    "mediator_ledger_difference": MetricDeclaration(
        "gauge", "Accepted messages minus all outcomes; not 0 if messages are unaccounted for", ("protocol",)
    ),
    "mediator_active_connections": MetricDeclaration("gauge", "Open WebSockets"),
    "mediator_requests_total": MetricDeclaration(
        "counter",
        "Requests and WebSocket messages, by outcome: accepted, rejected (client error), failed (server error)",
        ("protocol", "outcome"),
    ),
    "mediator_rejected_total": MetricDeclaration("counter", "Rejected requests and WebSocket messages", ("reason",)),
    "mediator_request_duration_seconds": MetricDeclaration(
        "histogram", "Time from complete request to response", ("protocol",)
    ),
    "mediator_accounts": MetricDeclaration("gauge", "Accounts of DIDComm wallets"),
    "mediator_v1_connections": MetricDeclaration(
        "gauge",
        "Connections of DIDComm v1: of wallets that have an account, and pending ones of wallets without",
        ("state",),
    ),
    "mediator_registration_bytes": MetricDeclaration("gauge", "Bytes of DIDs and registrations"),
    "mediator_accounts_expired_total": MetricDeclaration(
        "counter", "Accounts removed for disuse, by reason: unused, idle", ("reason",)
    ),
    "mediator_storage_up": MetricDeclaration("gauge", "Whether the store responds and has no fault"),
    "mediator_storage_fault": MetricDeclaration(
        "gauge", "Whether the store has the fault: missing, damaged, full", ("fault",)
    ),
    "mediator_storage_bytes": MetricDeclaration(
        "gauge", "Size of each table or collection with its indexes; free is reusable space", ("table",)
    ),
    "mediator_store_duration_seconds": MetricDeclaration("histogram", "Duration of store operations", ("operation",)),
    "mediator_store_statistics_timestamp_seconds": MetricDeclaration(
        "gauge", "Time at which queues and ledger were last read from the store"
    ),
    "mediator_ready": MetricDeclaration("gauge", "Whether the end-to-end probe succeeds; absent while not polled"),
    "mediator_ready_cycle_duration_seconds": MetricDeclaration("histogram", "Duration of successful probe cycles"),
    "mediator_ready_failures_total": MetricDeclaration(
        "counter", "Failed probe cycles by stage: store, listener, socket, forward, push, acknowledgement", ("stage",)
    ),
    "mediator_certificate_expiry_timestamp_seconds": MetricDeclaration(
        "gauge", "Expiry of the certificate of an ssl: listener, by interface and port", ("listener",)
    ),
    "mediator_config_last_reload_success": MetricDeclaration(
        "gauge", "Whether the last reload succeeded, including certificates and admin token"
    ),
    "mediator_config_last_reload_success_timestamp_seconds": MetricDeclaration(
        "gauge", "Time of the last successful reload or start"
    ),
    "mediator_log_dropped_total": MetricDeclaration("counter", "Event log lines lost"),
    "mediator_log_segments_deleted_total": MetricDeclaration("counter", "Segments deleted by log.retention"),
    "mediator_log_segments_deleted_unread_total": MetricDeclaration(
        "counter", "Segments deleted before the nightly analysis had read them"
    ),
    "mediator_log_directory_recreated_total": MetricDeclaration(
        "counter", "Times that a removed log directory was recreated"
    ),
    "mediator_buffer_entries": MetricDeclaration("gauge", "Entries in a memory buffer", ("buffer",)),
    "mediator_buffer_bytes": MetricDeclaration("gauge", "Bytes in a memory buffer", ("buffer",)),
    "mediator_reactor_lag_seconds": MetricDeclaration("histogram", "Delay of a reactor timer, sampled every second"),
    "mediator_cluster_nodes": MetricDeclaration("gauge", "Live nodes, including this one; 0 without a cluster"),
    "mediator_cluster_pushes_total": MetricDeclaration(
        "counter", "Pushes between nodes or workers, by outcome: pushed, no_session, failed, dropped", ("outcome",)
    ),
    "mediator_cluster_hint_duration_seconds": MetricDeclaration(
        "histogram", "Round trip of pushes between nodes or workers"
    ),
    "mediator_cluster_stale_presence_total": MetricDeclaration("counter", "Presence records found to be stale"),
    "mediator_cluster_refused_total": MetricDeclaration(
        "counter", "Rejected node-to-node requests, by reason: malformed, seal (authentication failed)", ("reason",)
    ),
    "mediator_workers": MetricDeclaration("gauge", "Worker processes queried for this scrape"),
    "mediator_workers_answered": MetricDeclaration("gauge", "Worker processes that responded in time"),
    "mediator_push_requests_total": MetricDeclaration(
        "counter",
        "Requests to push services (fcm, apns, web_push, webhook), by outcome: sent, gone, mismatch, rejected, retry",
        ("service", "outcome"),
    ),
    "mediator_push_request_duration_seconds": MetricDeclaration(
        "histogram", "Duration of requests to push services", ("service",)
    ),
    "mediator_push_devices": MetricDeclaration("gauge", "Devices registered for push notifications", ("service",)),
    "mediator_push_devices_forgotten_total": MetricDeclaration(
        "counter", "Devices removed because their push service does not know them", ("service",)
    ),
    "mediator_push_hosts_backing_off": MetricDeclaration(
        "gauge", "Hosts of push services to which nothing is sent at the moment, as they fail", ("service",)
    ),
    "mediator_build_info": MetricDeclaration("gauge", "Version of mediatord", ("version",)),
}


CONTENT_TYPE = CONTENT_TYPE_LATEST

# Entries and bytes of a buffer; None where not counted.
BufferUsage = tuple[int | None, int | None]

REQUEST_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
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
# Gauges that have no series while their value is unknown.
_OPTIONAL_GAUGES = (
    "accounts",
    "registration_bytes",
    "messages_waiting",
    "store_statistics_timestamp_seconds",
    "oldest_message_timestamp_seconds",
)


class Metrics:
    """
    The daemon's metrics; their texts say what they are.

    :param version: of mediatord.
    :param label: maps a DID to its label value.
    :ivar storage_is_up: whether the store responded to the last health check.
    :ivar optional_values: of the gauges that have no series while their value is None.
    :ivar read_readiness: whether the daemon is ready; None while /ready is not polled, and then there is no such
        series.
    """

    def __init__(
        self, registry: CollectorRegistry, *, version: str, label: Callable[[str], str] = lambda did: did
    ) -> None:
        self._registry = registry
        self._label = label

        def counter(name: str) -> FastCounter:
            declared = METRICS[f"mediator_{name}_total"]
            return FastCounter(registry, name, declared.text, *declared.labels)

        def histogram(name: str, bounds: Sequence[float]) -> FastHistogram:
            declared = METRICS[f"mediator_{name}_seconds"]
            return FastHistogram(registry, name, declared.text, bounds, *declared.labels)

        def gauge(name: str) -> Gauge:
            declared = METRICS[f"mediator_{name}"]
            return Gauge(f"mediator_{name}", declared.text, declared.labels, registry=registry)

        self.forwarded = counter("messages_forwarded")
        self.stored = counter("messages_stored")
        self.delivered = counter("messages_delivered")
        self.expired = counter("messages_expired")
        self.evicted = counter("messages_evicted")
        self.active_connections = gauge("active_connections")
        self.log_dropped = counter("log_dropped")
        self.log_segments_deleted = counter("log_segments_deleted")
        self.log_segments_deleted_unread = counter("log_segments_deleted_unread")
        self.log_directory_recreated = counter("log_directory_recreated")
        self.storage_is_up = False
        self._storage_up = gauge("storage_up")
        faults = gauge("storage_fault")
        self._storage_faults = {fault: faults.labels(fault) for fault in _STORAGE_FAULTS}
        self._faults: set[str] = set()
        self._table_size = gauge("storage_bytes")
        self._queue_size = gauge("message_queue_size")
        self.requests = counter("requests")
        self.rejected = counter("rejected")
        self.request_duration = histogram("request_duration", REQUEST_BUCKETS)
        self.delivery_latency = histogram("delivery_latency", _LATENCY_BUCKETS)
        self._store_duration = histogram("store_duration", _STORE_BUCKETS)
        self._reload = gauge("config_last_reload_success")
        self._reloaded_at = gauge("config_last_reload_success_timestamp_seconds")
        self.certificate_expiry = gauge("certificate_expiry_timestamp_seconds")
        self.cluster_nodes = gauge("cluster_nodes")
        self.stale_presence = counter("cluster_stale_presence")
        self.peer_notification_duration = histogram("cluster_hint_duration", _STORE_BUCKETS)
        # Outcomes: pushed, no_session, failed, dropped.
        self.cluster_pushes = counter("cluster_pushes")
        # Reasons: malformed, seal.
        self.refused_peer_requests = counter("cluster_refused")
        self._buffers: dict[str, Callable[[], BufferUsage]] = {}
        self.optional_values: dict[str, float | None] = {}
        self.reactor_lag = histogram("reactor_lag", _LAG_BUCKETS)
        ProcessMetricsCollector(registry)
        # By protocol: the number of messages by outcome, and those unaccounted for; None if unknown.
        self.ledgers: dict[str, tuple[Mapping[str, int | None], int | None]] = {}
        self.read_readiness: Callable[[], bool | None] = lambda: None
        registry.register(self)
        self.probe_cycle_duration = histogram("ready_cycle_duration", _STORE_BUCKETS)
        self.probe_failures = counter("ready_failures")
        self.accounts_expired = counter("accounts_expired")
        for reason in ("unused", "idle"):
            self.accounts_expired.inc(reason, by=0)
        self.push_requests = counter("push_requests")
        self.push_duration = histogram("push_request_duration", REQUEST_BUCKETS)
        self.push_devices_forgotten = counter("push_devices_forgotten")
        # By state.
        self.v1_connections: Mapping[str, int] = {}
        # By push service.
        self.push_devices: Mapping[str, int] = {}
        self.count_push_hosts_backing_off: Callable[[], Mapping[str, int]] = dict
        Info("mediator_build", METRICS["mediator_build_info"].text, registry=registry).info({"version": version})

    def collect_totals(self) -> dict[str, int]:
        """Fields of the event `counters`, with which the event log can be compared."""
        totals = {
            **{name: getattr(self, name).get() for name in MESSAGE_COUNTERS},
            **dict.fromkeys(REQUEST_COUNTERS, 0),
            "connections": int(list(self.active_connections.collect())[0].samples[0].value),
        }
        for (_, outcome), count in self.requests.counts.items():
            totals[f"requests_{outcome}"] += count
        return totals

    def observe_store_operation(self, operation: str, seconds: float) -> None:
        """Observe the duration of a store operation, successful or not; inlined, as it is called for each message."""
        series = self._store_duration.series[operation,]
        series[bisect_left(_STORE_BUCKETS, seconds)] += 1
        series[-1] += seconds

    def set_reload_result(self, now: float, success: bool) -> None:
        """Record a load of the configuration. :param success: whether all of it was applied."""
        self._reload.set(success)
        if success:
            self._reloaded_at.set(now)

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

    def set_queued_messages(self, messages: int, oldest: float | None) -> None:
        """
        Set the number of queued messages. :param oldest: when the oldest arrived, Unix seconds; None if there are
        none.
        """
        self.optional_values.update(messages_waiting=messages, oldest_message_timestamp_seconds=oldest)

    def set_accounts(self, number: int, size: int) -> None:
        """Set the number of accounts, and the bytes of their DIDs and registrations."""
        self.optional_values.update(accounts=number, registration_bytes=size)

    def set_v1_connections(self, with_account: int, pending: int) -> None:
        """Set the number of connections of DIDComm v1 with an account, and without one."""
        self.v1_connections = {"account": with_account, "pending": pending}

    def set_store_read_time(self, now: float, messages: int) -> None:
        """Record when queues and ledger were read from the store. :param messages: queued messages at that time."""
        self.optional_values.update(store_statistics_timestamp_seconds=now, messages_waiting=messages)
        if not messages:
            self.optional_values["oldest_message_timestamp_seconds"] = None

    def register_buffer(self, buffer: str, held: Callable[[], BufferUsage]) -> None:
        """
        Export the usage of a buffer.

        :param buffer: name as in docs/reference/limits.md.
        :param held: called at every scrape; entries and bytes, each None if not counted.
        """
        self._buffers[buffer] = held

    def collect(self) -> Iterable[Metric]:
        """Called by the registry, for values that are read at scrape time."""
        yield from self._collect_buffers()
        ready = self.read_readiness()
        if ready is not None:
            yield _build_gauge("ready", {(): int(ready)})
        for name in _OPTIONAL_GAUGES:
            value = self.optional_values.get(name)
            if value is not None:
                yield _build_gauge(name, {(): value})
        for name, numbers in (
            ("v1_connections", self.v1_connections),
            ("push_devices", self.push_devices),
            ("push_hosts_backing_off", self.count_push_hosts_backing_off()),
        ):
            if numbers:
                yield _build_gauge(name, {(label,): number for label, number in numbers.items()})
        if self.ledgers:
            entries: LabelledValues = {}
            for protocol, (ledger, _) in self.ledgers.items():
                entries |= {(protocol, entry): number for entry, number in ledger.items()}
            yield _build_gauge("ledger_messages", entries)
            differences: LabelledValues = {
                (protocol,): difference for protocol, (_, difference) in self.ledgers.items()
            }
            yield _build_gauge("ledger_difference", differences)

    def _collect_buffers(self) -> Iterable[Metric]:
        usage = {buffer: held() for buffer, held in self._buffers.items()}
        for number, unit in enumerate(("entries", "bytes")):
            yield _build_gauge(f"buffer_{unit}", {(buffer,): held[number] for buffer, held in usage.items()})

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
        self._queue_size.clear()
        for label, size in sizes.items():
            self._queue_size.labels(label).set(size)

    def render(self) -> bytes:
        """All metrics in Prometheus text format, with content type :data:`CONTENT_TYPE`."""
        return generate_latest(self._registry)


LabelledValues = dict[tuple[str, ...], float | None]


def _build_gauge(name: str, values: Mapping[tuple[str, ...], float | None]) -> GaugeMetricFamily:
    """A gauge without series for unknown values."""
    declared = METRICS[f"mediator_{name}"]
    family = GaugeMetricFamily(f"mediator_{name}", declared.text, labels=declared.labels)
    for label_values, value in values.items():
        if value is not None:
            family.add_metric(label_values, value)
    return family
