"""Metrics in the format of Prometheus (contract section 5)."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from mediatord.observability.event_schema import EVENTS
from mediatord.observability.metrics import CONTENT_TYPE, Metrics, ProcessMetricsCollector

# Metric name -> labels.
CONTRACT = {
    "mediator_messages_forwarded_total": set(),
    "mediator_messages_stored_total": set(),
    "mediator_messages_delivered_total": set(),
    "mediator_active_connections": set(),
    "mediator_message_queue_size": {"did"},
    "mediator_messages_expired_total": set(),
    "mediator_messages_evicted_total": set(),
    "mediator_requests_total": {"protocol", "outcome"},
    "mediator_rejected_total": {"reason"},
    "mediator_request_duration_seconds": {"protocol"},
    "mediator_delivery_latency_seconds": {"method"},
    "mediator_store_duration_seconds": {"operation"},
    "mediator_storage_up": set(),
    "mediator_storage_fault": {"fault"},
    "mediator_storage_bytes": {"table"},
    "mediator_config_last_reload_success": set(),
    "mediator_config_last_reload_success_timestamp_seconds": set(),
    "mediator_certificate_expiry_timestamp_seconds": {"listener"},
    "mediator_accounts": set(),
    "mediator_accounts_expired_total": {"reason"},
    "mediator_messages_waiting": set(),
    "mediator_registration_bytes": set(),
    "mediator_oldest_message_timestamp_seconds": set(),
    "mediator_ledger_messages": {"protocol", "entry"},
    "mediator_ledger_difference": {"protocol"},
    "mediator_store_statistics_timestamp_seconds": set(),
    "mediator_reactor_lag_seconds": set(),
    "process_cpu_seconds_total": set(),
    "process_max_fds": set(),
    "process_open_fds": set(),
    "process_resident_memory_bytes": set(),
    "process_start_time_seconds": set(),
    "process_virtual_memory_bytes": set(),
    "mediator_ready": set(),
    "mediator_ready_cycle_duration_seconds": set(),
    "mediator_ready_failures_total": {"stage"},
    "mediator_cluster_nodes": set(),
    "mediator_cluster_pushes_total": {"outcome"},
    "mediator_cluster_hint_duration_seconds": set(),
    "mediator_cluster_stale_presence_total": set(),
    "mediator_cluster_refused_total": {"reason"},
    "mediator_build_info": {"version"},
    "mediator_log_dropped_total": set(),
    "mediator_log_segments_deleted_total": set(),
    "mediator_log_segments_deleted_unread_total": set(),
    "mediator_log_directory_recreated_total": set(),
}


def build_metrics() -> Metrics:
    """Metrics with their own registry."""
    return Metrics(CollectorRegistry(), version="1.2.3")


def series(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """All samples: (name, labels) -> value."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics.render().decode())
        for sample in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """The value of one series, or None."""
    return series(metrics).get((name, frozenset(labels.items())))


def queues(metrics: Metrics) -> dict[str, float]:
    """The series of the queue size."""
    return {
        dict(labels)["did"]: size for (name, labels), size in series(metrics).items() if name.endswith("queue_size")
    }


def test_names_and_labels() -> None:
    """Names and labels are exactly those of the contract."""
    metrics = build_metrics()
    metrics.requests.inc("didcomm", "accepted")
    metrics.request_duration.observe(0.001, "didcomm")
    metrics.rejected.inc("e.p.trust.crypto")
    metrics.delivery_latency.observe(1.0, "live")
    metrics.observe_store_operation("enqueue", 0.001)
    metrics.cluster_pushes.inc("pushed")
    metrics.refused_peer_requests.inc("seal")
    metrics.set_queue_sizes([("did:web:a", 1)], 0)
    metrics.certificate_expiry.labels("*:443").set(1.0)
    metrics.read_readiness = lambda: True
    metrics.probe_failures.inc("store")
    metrics.set_table_sizes({"message": 1})
    metrics.set_queued_messages(1, 1.0)
    metrics.set_accounts(1, 60)
    metrics.accounts_expired.inc("unused")
    metrics.ledgers["didcomm"] = {"accepted": 1}, 0
    metrics.set_store_read_time(1.0, 1)
    shown: dict[str, set[str]] = {}
    for name, labels in series(metrics):
        for suffix in ("_bucket", "_count", "_sum"):
            name = name.removesuffix(suffix)
        shown.setdefault(name, set()).update(dict(labels).keys() - {"le"})
    assert shown == CONTRACT


def test_counters() -> None:
    """Counters grow by the given amounts."""
    metrics = build_metrics()
    metrics.forwarded.inc()
    metrics.forwarded.inc(by=2)
    metrics.rejected.inc("e.p.msg")
    metrics.rejected.inc("e.p.msg")
    metrics.active_connections.inc()
    metrics.active_connections.dec()
    assert value(metrics, "mediator_messages_forwarded_total") == 3
    assert value(metrics, "mediator_messages_stored_total") == 0
    assert value(metrics, "mediator_rejected_total", reason="e.p.msg") == 2
    assert value(metrics, "mediator_active_connections") == 0
    assert value(metrics, "mediator_build_info", version="1.2.3") == 1


def test_totals() -> None:
    """Totals to compare with the event log: every counter, requests of both protocols together."""
    metrics = build_metrics()
    nothing = metrics.collect_totals()
    assert set(nothing) == set(EVENTS["counters"].fields) and set(nothing.values()) == {0}
    for number, counter in enumerate(
        (metrics.forwarded, metrics.stored, metrics.delivered, metrics.expired, metrics.evicted), 1
    ):
        counter.inc(by=number)
    metrics.active_connections.inc(2)
    metrics.active_connections.dec()
    for protocol, outcome in (("didcomm", "accepted"), ("decentrl", "accepted"), ("decentrl", "rejected")):
        metrics.requests.inc(protocol, outcome)
    metrics.requests.inc("didcomm", "failed")
    metrics.request_duration.observe(0.1, "didcomm")
    assert metrics.collect_totals() == {
        "forwarded": 1,
        "stored": 2,
        "delivered": 3,
        "expired": 4,
        "evicted": 5,
        "requests_accepted": 2,
        "requests_rejected": 1,
        "requests_failed": 1,
        "connections": 1,
    }


def test_event_log_metrics() -> None:
    """Lost events and deleted segments."""
    metrics = build_metrics()
    metrics.log_dropped.inc()
    metrics.log_dropped.inc()
    metrics.log_segments_deleted.inc(by=3)
    metrics.log_segments_deleted_unread.inc(by=2)
    metrics.log_directory_recreated.inc()
    assert value(metrics, "mediator_log_dropped_total") == 2
    assert value(metrics, "mediator_log_segments_deleted_total") == 3
    assert value(metrics, "mediator_log_segments_deleted_unread_total") == 2
    assert value(metrics, "mediator_log_directory_recreated_total") == 1


def test_requests() -> None:
    """A request is counted by outcome and timed by protocol."""
    metrics = build_metrics()
    metrics.requests.inc("didcomm", "accepted")
    metrics.request_duration.observe(0.0004, "didcomm")
    metrics.requests.inc("didcomm", "rejected")
    metrics.request_duration.observe(0.003, "didcomm")
    assert value(metrics, "mediator_requests_total", protocol="didcomm", outcome="accepted") == 1
    assert value(metrics, "mediator_request_duration_seconds_count", protocol="didcomm") == 2
    assert value(metrics, "mediator_request_duration_seconds_bucket", protocol="didcomm", le="0.0005") == 1


def test_latency_buckets_reach_the_ttl() -> None:
    """A message fetched just before its TTL of 72 hours is in another bucket than a later one."""
    metrics = build_metrics()
    metrics.delivery_latency.observe(72 * 3600 - 1, "pickup")
    assert value(metrics, "mediator_delivery_latency_seconds_bucket", method="pickup", le="172800.0") == 0
    assert value(metrics, "mediator_delivery_latency_seconds_bucket", method="pickup", le="259200.0") == 1


def test_storage_up() -> None:
    """The store is down until it has answered."""
    metrics = build_metrics()
    assert value(metrics, "mediator_storage_up") == 0
    metrics.set_storage_up(True)
    assert value(metrics, "mediator_storage_up") == 1
    metrics.set_storage_up(False)
    assert value(metrics, "mediator_storage_up") == 0


def test_storage_faults() -> None:
    """The store is down while its file has a fault, whoever says that it answers."""
    metrics = build_metrics()
    assert value(metrics, "mediator_storage_fault", fault="full") == 0
    metrics.set_storage_fault("full", True)
    metrics.set_storage_up(True)
    metrics.set_storage_fault("missing", True)
    metrics.set_storage_fault("missing", False)
    assert value(metrics, "mediator_storage_up") == 0 and not metrics.storage_is_up
    assert value(metrics, "mediator_storage_fault", fault="full") == 1
    assert value(metrics, "mediator_storage_fault", fault="missing") == 0
    metrics.set_storage_fault("full", False)
    assert value(metrics, "mediator_storage_up") == 1


def test_queue_sizes_are_replaced() -> None:
    """Queues that are not reported again, or are empty, have no series (reference 12)."""
    metrics = build_metrics()
    metrics.set_queue_sizes([("did:web:a", 3), ("did:web:b", 2)], 40)
    assert queues(metrics) == {"did:web:a": 3, "did:web:b": 2, "other": 40}
    metrics.set_queue_sizes([("did:web:b", 5), ("did:web:c", 0)], 0)
    assert queues(metrics) == {"did:web:b": 5}
    metrics.set_queue_sizes([], 0)
    assert queues(metrics) == {}


def test_queue_label() -> None:
    """The label is the pseudonym of the DID; two DIDs with one pseudonym are summed."""
    metrics = Metrics(CollectorRegistry(), version="1", label=lambda did: did[:9])
    metrics.set_queue_sizes([("did:web:a1", 3), ("did:web:a2", 2), ("did:web:b1", 1)], 0)
    assert queues(metrics) == {"did:web:a": 5, "did:web:b": 1}


def test_registries_are_separate() -> None:
    """Two metrics objects in one process are independent."""
    first, second = build_metrics(), build_metrics()
    first.forwarded.inc()
    assert value(second, "mediator_messages_forwarded_total") == 0


def test_backlog() -> None:
    """The backlog has no series before it is known; the oldest message has none while the backlog is empty."""
    metrics = build_metrics()
    shown = ("mediator_messages_waiting", "mediator_oldest_message_timestamp_seconds")
    assert [value(metrics, name) for name in shown] == [None, None]
    metrics.set_queued_messages(2, 1000.5)
    assert [value(metrics, name) for name in shown] == [2, 1000.5]
    metrics.set_queued_messages(0, None)
    assert [value(metrics, name) for name in shown] == [0, None]


def test_process_metrics() -> None:
    """Memory and files of this process, under the usual names."""
    metrics = build_metrics()
    resident, files = value(metrics, "process_resident_memory_bytes"), value(metrics, "process_open_fds")
    assert resident is not None and resident > 1_000_000
    assert files is not None and 3 <= files <= (value(metrics, "process_max_fds") or 0)


def test_process_metrics_without_host_files(tmp_path: Path) -> None:
    """As under systemd's ProcSubset=pid, where /proc has processes only."""
    (tmp_path / "self").symlink_to("/proc/self")
    registry, whole = CollectorRegistry(), CollectorRegistry()
    ProcessMetricsCollector(registry, str(tmp_path))
    ProcessCollector(registry=whole)
    started = [item.get_sample_value("process_start_time_seconds") or 0.0 for item in (registry, whole)]
    assert started[0] == pytest.approx(started[1], abs=2.0)
    names = {f"process_{name}" for name in ("cpu_seconds_total", "resident_memory_bytes", "open_fds", "max_fds")}
    assert all(registry.get_sample_value(name) is not None for name in names)


def test_content_type() -> None:
    """The Content-Type is that of Prometheus' text format."""
    assert CONTENT_TYPE.startswith("text/plain; version=")
