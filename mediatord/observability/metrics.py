"""
`process_*` of the metrics, also where `/proc` shows nothing but processes, as it does under `ProcSubset=pid`.

Counters and histograms that cost as much as an addition.

Those of prometheus-client take a lock for every number, check each time whether they have labels, and go through all
bounds of a histogram one after the other. What is counted several times for each message is counted here, by the
reactor's thread alone; what is exposed is the same.

`mediator_ledger_*` of the metrics: what the store's own books say, as they were read last.

What Prometheus reads (contract section 5).

All series live in the registry that is passed in. Children of labelled metrics are looked up once and kept; every
label but `did` takes one of a few fixed words.
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
    Those of prometheus_client, which leaves all of them out where there is no `/proc/stat`.

    :param proc: where that file system is.
    """

    def __init__(self, registry: CollectorRegistry, proc: str = "/proc") -> None:
        super().__init__(proc=proc, registry=registry)

    def _boot_time(self) -> float:
        """When the host was started, in seconds since the epoch, without a file."""
        return time.clock_gettime(time.CLOCK_REALTIME) - time.clock_gettime(time.CLOCK_BOOTTIME)


class FastCounter:
    """
    One series of a counter.

    :ivar value: what it has come to.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        """:param amount: not less than 0."""
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
        """Upper bounds as Prometheus writes them, each with how many values were not above it; and the sum of all."""
        found, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            found.append((floatToGoString(bound), float(total)))
        return found, self._sum


class FastCounterFamily:
    """
    A counter with labels, or without; in the latter case its only series is there from the beginning.

    :param name: without `_sum_usage`.
    """

    def __init__(self, registry: CollectorRegistry, name: str, text: str, *labels: str) -> None:
        self._about = name, text, labels
        self.series: defaultdict[tuple[str, ...], FastCounter] = defaultdict(FastCounter)
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> FastCounter:
        """The series of these values, one for each label."""
        return self.series[values]

    def value(self, *values: str) -> int:
        """What the series of these values has come to; asking does not make it."""
        tally = self.series.get(values)
        return 0 if tally is None else tally.value

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        name, text, labels = self._about
        family = CounterMetricFamily(name, text, labels=labels)
        for values, tally in self.series.items():
            family.add_metric(values, tally.value)
        return [family]


class FastHistogramFamily:
    """A histogram with labels, or without; as :class:`FastCounterFamily`."""

    def __init__(
        self, registry: CollectorRegistry, name: str, text: str, bounds: Sequence[float], *labels: str
    ) -> None:
        self._about = name, text, labels
        self.series: defaultdict[tuple[str, ...], FastHistogram] = defaultdict(partial(FastHistogram, tuple(bounds)))
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> FastHistogram:
        """The series of these values, one for each label."""
        return self.series[values]

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        name, text, labels = self._about
        family = HistogramMetricFamily(name, text, labels=labels)
        for values, spread in self.series.items():
            buckets, total = spread.buckets()
            family.add_metric(values, buckets, total)
        return [family]


class LedgerMetrics:
    """Has no series before the books were read for the first time."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._entries: dict[str, Mapping[str, int | None]] = {}
        self._differences: dict[str, int | None] = {}
        registry.register(self)

    def update(self, half: str, entries: Mapping[str, int | None], difference: int | None) -> None:
        """
        The books of one half were read.

        :param entries: of what became of so many messages, by one word each; None where that is not known.
        :param difference: what they do not account for; None likewise.
        """
        self._entries[half] = entries
        self._differences[half] = difference

    def collect(self) -> Iterable[Metric]:
        """Called by the registry; what is not known has no series."""
        messages = GaugeMetricFamily(
            "mediator_ledger_messages", "What became of all that the store ever accepted", labels=["half", "entry"]
        )
        differences = GaugeMetricFamily(
            "mediator_ledger_difference", "Messages that the store does not account for", labels=["half"]
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

# Entries and bytes of a buffer, as far as they are counted.
BufferUsage = tuple[int | None, int | None]

_REQUEST_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_STORE_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
_LAG_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
# From a wallet that holds a socket to one that comes back when its message is about to expire.
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
    :param label: what stands for a DID in a label.
    :ivar forwarded: +1 for every payload accepted.
    :ivar stored: +1 for every payload that waits in a queue because it could not be pushed.
    :ivar delivered: +1 for every payload acknowledged, or taken by the recipient's endpoint.
    :ivar expired: +1 for every payload dropped at the end of its time.
    :ivar evicted: +1 for every payload dropped to make room.
    :ivar active_connections: open sockets.
    :ivar storage_is_up: whether the store answered when last asked.
    :ivar ledger: told what the store's own books say.
    :ivar ready_now: whether messages get through; None while nobody wants to know, and then there is no such series.
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
        self._log_dropped = _create_counter(
            registry, "log_dropped", "Lines of the event log that were not written"
        ).labels()
        self._log_deleted = _create_counter(
            registry, "log_segments_deleted", "Closed segments of the event log deleted by log.retention"
        ).labels()
        self._log_deleted_unread = _create_counter(
            registry, "log_segments_deleted_unread", "Of these, segments that the analysis had not read"
        ).labels()
        self._log_directory_recreated = _create_counter(
            registry, "log_directory_recreated", "How often the removed log directory was made again"
        ).labels()
        self.storage_is_up = False
        self._storage_up = _create_gauge(registry, "storage_up", "Whether the store answers")
        faults = _create_gauge(registry, "storage_fault", "What is wrong with the store", "fault")
        self._storage_faults = {fault: faults.labels(fault) for fault in _STORAGE_FAULTS}
        self._faults: set[str] = set()
        self._table_size = _create_gauge(registry, "storage_bytes", "Size of what the store keeps, by table", "table")
        self._queue_size = _create_gauge(
            registry, "message_queue_size", "Waiting messages of the largest queues", "did"
        )
        self._queues: frozenset[str] = frozenset()
        requests = _create_counter(registry, "requests", "Requests and frames by outcome", "protocol", "outcome")
        rejected = _create_counter(registry, "rejected", "Requests and frames refused, by reason", "reason")
        duration = _create_histogram(
            registry, "request_duration", "From request to answer", _REQUEST_BUCKETS, "protocol"
        )
        latency = _create_histogram(
            registry, "delivery_latency", "From acceptance to acknowledgement", _LATENCY_BUCKETS, "method"
        )
        store = _create_histogram(registry, "store_duration", "Operations of the store", _STORE_BUCKETS, "operation")
        self._request_counter = requests
        self._rejections = rejected
        self._rejected = rejected.labels
        self._duration, self._latency, self._store = duration.series, latency.series, store.series
        self._reload = _create_gauge(
            registry, "config_last_reload_success", "Whether all of the last reload was taken"
        )
        self._reloaded_at = _create_gauge(
            registry, "config_last_reload_success_timestamp_seconds", "When a reload, or the start, was taken last"
        )
        self._expiry = _create_gauge(
            registry, "certificate_expiry_timestamp_seconds", "When the certificate of a listener ends", "listener"
        )
        self._cluster_nodes = _create_gauge(registry, "cluster_nodes", "Live nodes, this one among them")
        self._stale_presence = _create_counter(
            registry, "cluster_stale_presence", "Sockets that are not where they were"
        ).labels()
        self._hints = _create_histogram(
            registry, "cluster_hint_duration", "From a message for another node to its answer", _STORE_BUCKETS
        ).labels()
        pushes = _create_counter(registry, "cluster_pushes", "What other nodes were to push, by outcome", "outcome")
        refused = _create_counter(registry, "cluster_refused", "Node-to-node requests refused, by reason", "reason")
        self._pushes, self._refused = pushes.labels, refused.labels
        self._buffers: dict[str, Callable[[], BufferUsage]] = {}
        self._waiting: int | None = None
        self._oldest: float | None = None
        self._store_read_at: float | None = None
        self._lag = _create_histogram(
            registry, "reactor_lag", "How late the reactor was, every second", _LAG_BUCKETS
        ).labels()
        ProcessMetricsCollector(registry)
        self.ledger = LedgerMetrics(registry)
        self.read_readiness: Callable[[], bool | None] = lambda: None
        registry.register(self)
        self._cycle = _create_histogram(
            registry, "ready_cycle_duration", "Readiness cycles that succeeded", _STORE_BUCKETS
        ).labels()
        failures = _create_counter(registry, "ready_failures", "Readiness cycles that did not, by stage", "stage")
        self._failures = failures.labels
        expired = _create_counter(registry, "accounts_expired", "Accounts removed because nobody used them", "reason")
        self._accounts_expired = {reason: expired.labels(reason) for reason in ("unused", "idle")}
        self._accounts: tuple[int, int] | None = None
        Info("mediator_build", "The version that is running", registry=registry).info({"version": version})

    def observe_request(self, protocol: str, outcome: str, seconds: float) -> None:
        """A request or frame was answered, whichever way, `seconds` after it came."""
        self._request_counter.series[protocol, outcome].value += 1
        self._duration[(protocol,)].observe(seconds)

    def count_lost_line(self) -> None:
        """A line of the event log was not written."""
        self._log_dropped.inc()

    def count_deleted_segments(self, segments: int, unread: int) -> None:
        """So many closed segments of the event log were deleted, `unread` of them before the analysis read them."""
        self._log_deleted.inc(segments)
        self._log_deleted_unread.inc(unread)

    def count_recreated_directory(self) -> None:
        """The directory of the event log had been removed, and was made again."""
        self._log_directory_recreated.inc()

    def collect_totals(self) -> dict[str, int]:
        """What the counters say that the event log can be compared with, as fields of the event `counters`."""
        totals = {
            "forwarded": self.forwarded.value,
            "stored": self.stored.value,
            "delivered": self.delivered.value,
            "expired": self.expired.value,
            "evicted": self.evicted.value,
            "requests_accepted": 0,
            "requests_rejected": 0,
            "requests_failed": 0,
            "connections": _read_gauge(self.active_connections),
        }
        for (_, outcome), tally in self._request_counter.series.items():
            totals[f"requests_{outcome}"] += tally.value
        return totals

    def count_rejection(self, reason: str) -> None:
        """A request or frame was refused. :param reason: name of the situation in words, as `recipient_unknown`."""
        self._rejected(reason).inc()

    def get_rejection_count(self, reason: str) -> int:
        """How often that was so."""
        return self._rejections.value(reason)

    def observe_delivery_latency(self, method: str, seconds: float) -> None:
        """A payload was acknowledged `seconds` after it was accepted. :param method: how it was handed over."""
        self._latency[(method,)].observe(seconds)

    def observe_store_operation(self, operation: str, seconds: float) -> None:
        """The store was done with an operation, well or not."""
        self._store[(operation,)].observe(seconds)

    def count_cluster_push(self, outcome: str) -> None:
        """Another node was to push something: `pushed`, `no_session`, `failed` or `dropped`."""
        self._pushes(outcome).inc()

    def observe_peer_notification(self, seconds: float) -> None:
        """Another node has answered."""
        self._hints.observe(seconds)

    def count_stale_presence(self) -> None:
        """A socket is not where it was said to be, or was remembered to be."""
        self._stale_presence.inc()

    def count_refused_peer_request(self, reason: str) -> None:
        """A node-to-node request was refused: it was `malformed`, or because of its `seal`, `time` or `replay`."""
        self._refused(reason).inc()

    def set_reload_result(self, now: float, success: bool) -> None:
        """The configuration was read, at the start or later. :param success: whether all of it could be used."""
        self._reload.set(success)
        if success:
            self._reloaded_at.set(now)

    def set_certificate_expiry(self, listener: str, expiry: float) -> None:
        """A listener has a certificate. :param expiry: when it ends, Unix seconds."""
        self._expiry.labels(listener).set(expiry)

    def set_cluster_nodes(self, live: int) -> None:
        """So many nodes are live."""
        self._cluster_nodes.set(live)

    def set_storage_up(self, up: bool) -> None:
        """Whether the store answered when last asked."""
        self.storage_is_up = up and not self._faults
        self._storage_up.set(self.storage_is_up)

    def set_storage_fault(self, fault: str, present: bool) -> None:
        """Something is wrong with the store, or is no longer; as long as it is, the store is not up."""
        (self._faults.add if present else self._faults.discard)(fault)
        self._storage_faults[fault].set(present)
        self.set_storage_up(not self._faults)

    def set_table_sizes(self, sizes: Mapping[str, int]) -> None:
        """So many bytes has each table of the store."""
        for table, size in sizes.items():
            self._table_size.labels(table).set(size)

    def observe_reactor_lag(self, seconds: float) -> None:
        """The reactor did so late what it was to do."""
        self._lag.observe(seconds)

    def set_queued_messages(self, messages: int, oldest: float | None) -> None:
        """So much waits for anybody. :param oldest: when the first of it came, Unix seconds; None if nothing does."""
        self._waiting, self._oldest = messages, oldest

    def count_account_expiry(self, reason: str) -> None:
        """An account was removed because it was `unused` or `idle`."""
        self._accounts_expired[reason].inc()

    def set_accounts(self, number: int, size: int) -> None:
        """There are so many accounts, whose DIDs and registrations take so many bytes."""
        self._accounts = number, size

    def set_store_read_time(self, now: float, messages: int) -> None:
        """Queues and ledger were read from the store, of one moment. :param messages: all that waits for anybody."""
        self._store_read_at, self._waiting = now, messages
        if not messages:
            self._oldest = None

    def observe_probe_cycle(self, seconds: float) -> None:
        """A readiness cycle got through."""
        self._cycle.observe(seconds)

    def count_probe_failure(self, stage: str) -> None:
        """A readiness cycle did not get through. :param stage: where it ended."""
        self._failures(stage).inc()

    def register_buffer(self, buffer: str, held: Callable[[], BufferUsage]) -> None:
        """
        Show how full a buffer is.

        :param buffer: its name, one of those in docs/limits.md.
        :param held: asked at every scrape: entries and bytes, each None where it is not counted.
        """
        self._buffers[buffer] = held

    def _filling(self) -> Iterable[Metric]:
        entries = GaugeMetricFamily("mediator_buffer_entries", "Entries of what is kept in memory", labels=["buffer"])
        sizes = GaugeMetricFamily("mediator_buffer_bytes", "Bytes of what is kept in memory", labels=["buffer"])
        for buffer, held in self._buffers.items():
            for family, value in zip((entries, sizes), held(), strict=True):
                if value is not None:
                    family.add_metric([buffer], value)
        return entries, sizes

    def collect(self) -> Iterable[Metric]:
        """Called by the registry, for what is known only when it is asked for."""
        yield from self._filling()
        ready = self.read_readiness()
        if ready is not None:
            yield GaugeMetricFamily("mediator_ready", "Whether messages get through; only while asked", int(ready))
        if self._accounts is not None:
            number, size = self._accounts
            yield GaugeMetricFamily("mediator_accounts", "Accounts of DIDComm wallets", number)
            yield GaugeMetricFamily("mediator_registration_bytes", "Bytes of DIDs and registrations", size)
        if self._waiting is not None:
            yield GaugeMetricFamily("mediator_messages_waiting", "All that waits for anybody", self._waiting)
        if self._store_read_at is not None:
            yield GaugeMetricFamily(
                "mediator_store_statistics_timestamp_seconds",
                "When queues and ledger were read from the store",
                self._store_read_at,
            )
        if self._oldest is not None:
            yield GaugeMetricFamily(
                "mediator_oldest_message_timestamp_seconds", "When what waits longest came", self._oldest
            )

    def set_queue_sizes(self, largest: Iterable[tuple[str, int]], other: int) -> None:
        """
        Replace all series of the queue size; empty queues have none.

        :param largest: recipient DIDs and how many messages wait for each.
        :param other: how many wait in all queues that are not among them.
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
        """All of it in Prometheus' text format; to be sent as :data:`CONTENT_TYPE`."""
        return generate_latest(self._registry)


def _read_gauge(gauge: Gauge) -> int:
    """Of one that has no labels."""
    (family,) = gauge.collect()
    return int(family.samples[0].value)


def _create_counter(registry: CollectorRegistry, name: str, text: str, *labels: str) -> FastCounterFamily:
    return FastCounterFamily(registry, f"mediator_{name}", text, *labels)


def _create_gauge(registry: CollectorRegistry, name: str, text: str, *labels: str) -> Gauge:
    return Gauge(f"mediator_{name}", text, labels, registry=registry)


def _create_histogram(
    registry: CollectorRegistry, name: str, text: str, buckets: Sequence[float], *labels: str
) -> FastHistogramFamily:
    return FastHistogramFamily(registry, f"mediator_{name}_seconds", text, buckets, *labels)
