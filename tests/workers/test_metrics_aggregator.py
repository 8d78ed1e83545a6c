"""Aggregation of the metrics of all workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from twisted.trial.unittest import SynchronousTestCase

from mediatord.observability.metrics import Metrics
from mediatord.workers.metrics_aggregator import MetricsAggregator


def metrics_of(*steps: Callable[[Metrics], object]) -> Metrics:
    """Metrics of a process after these events."""
    metrics = Metrics(CollectorRegistry(), version="1.2.3")
    for step in steps:
        step(metrics)
    return metrics


def report(*steps: Callable[[Metrics], object]) -> str:
    """The metrics page that such a process reports."""
    return metrics_of(*steps).render().decode()


def values(page: str, name: str) -> dict[tuple[str, ...], float]:
    """Values of a sample by the values of its labels."""
    families = text_string_to_metric_families(page)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {tuple(sample.labels.values()): sample.value for sample in samples}


def _set_readiness(metrics: Metrics, ready: bool) -> None:
    """Record a readiness verdict."""
    metrics.read_readiness = lambda: ready


def forwards(count: int) -> Callable[[Metrics], object]:
    """Record accepted forwards."""
    return lambda metrics: metrics.forwarded.inc(by=count)


class MetricsAggregatorTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.figures = MetricsAggregator()

    def page(self, reports: dict[int, str], first: int = 1, worker_count: int | None = None) -> str:
        return self.figures.page(reports, first, worker_count or len(reports))

    def test_sums_counters_and_connections(self) -> None:
        """Counters and numbers of open connections are summed."""
        one = report(forwards(3), lambda m: m.active_connections.set(5), lambda m: m.rejected.inc("too_large"))
        two = report(forwards(4), lambda m: m.active_connections.set(6), lambda m: m.rejected.inc("rate_limited"))
        page = self.page({1: one, 2: two})
        self.assertEqual(values(page, "mediator_messages_forwarded_total"), {(): 7})
        self.assertEqual(values(page, "mediator_active_connections"), {(): 11})
        self.assertEqual(values(page, "mediator_rejected_total"), {("too_large",): 1, ("rate_limited",): 1})

    def test_sums_histograms(self) -> None:
        """Bucket by bucket, complete and in the order that readers need."""
        one = report(
            lambda m: m.observe_store_operation("commit", 0.003), lambda m: m.observe_store_operation("enqueue", 0.2)
        )
        two = report(lambda m: m.observe_store_operation("commit", 0.03))
        page = self.page({1: one, 2: two})
        self.assertEqual(values(page, "mediator_store_duration_seconds_count"), {("commit",): 2, ("enqueue",): 1})
        buckets = values(page, "mediator_store_duration_seconds_bucket")
        self.assertEqual((buckets["0.0025", "commit"], buckets["0.005", "commit"]), (0, 1))
        self.assertEqual((buckets["0.05", "commit"], buckets["+Inf", "commit"]), (2, 2))
        lines = [line for line in page.splitlines() if 'operation="commit"' in line]
        alone = [line for line in two.splitlines() if 'operation="commit"' in line]
        self.assertEqual([line.split("}")[0] for line in lines], [line.split("}")[0] for line in alone])

    def test_shared_values_are_not_summed(self) -> None:
        """The store is up if it is for all; queue sizes are those of the scraped worker."""
        one = report(lambda m: m.set_storage_up(True), lambda m: m.set_queue_sizes([("did:a", 3)], 2))
        two = report(lambda m: m.set_storage_up(False), lambda m: m.set_queue_sizes([("did:b", 9)], 4))
        for first, sizes in ((1, {("did:a",): 3, ("other",): 2}), (2, {("did:b",): 9, ("other",): 4})):
            page = self.page({1: one, 2: two}, first)
            self.assertEqual(values(page, "mediator_storage_up"), {(): 0})
            self.assertEqual(values(page, "mediator_message_queue_size"), sizes)
            self.assertEqual(values(page, "mediator_build_info"), {("1.2.3",): 1})

    def test_readiness(self) -> None:
        """All are ready only if each worker with a verdict is."""
        workers = {number: report(partial(_set_readiness, ready=ready)) for number, ready in ((1, True), (2, False))}
        for reports, shown in (
            ({1: workers[1], 3: report()}, {(): 1}),
            ({**workers, 3: report()}, {(): 0}),
            ({1: report(), 3: report()}, {}),
        ):
            self.assertEqual(values(self.page(reports), "mediator_ready"), shown)

    @pytest.mark.system
    def test_backlog_and_memory(self) -> None:
        """The shared backlog is not summed; memory is listed per worker."""
        one = report(lambda m: m.set_queued_messages(5, 1000.0), lambda m: m.reactor_lag.observe(0.2))
        two = report(lambda m: m.set_queued_messages(4, 1060.0), lambda m: m.reactor_lag.observe(0.3))
        page = self.page({1: one, 2: two})
        self.assertEqual(values(page, "mediator_messages_waiting"), {(): 5})
        self.assertEqual(values(page, "mediator_oldest_message_timestamp_seconds"), {(): 1000.0})
        self.assertEqual(values(page, "mediator_reactor_lag_seconds_count"), {(): 2})
        (memory,) = values(page, "process_resident_memory_bytes").values()
        self.assertGreater(memory, 1.5 * values(one, "process_resident_memory_bytes")[()])
        (started,) = values(page, "process_start_time_seconds").values()
        # Each collector computes it from the clock and the time since boot.
        self.assertLess(abs(started - values(one, "process_start_time_seconds")[()]), 0.1)

    def test_ledger(self) -> None:
        """The ledger is that of the store, and not summed; workers that have not read it are ignored."""
        one = report(lambda m: m.ledgers.update(didcomm=({"accepted": 5, "waiting": 5}, 3)))
        two = report(lambda m: m.ledgers.update(didcomm=({"accepted": 7, "waiting": 6}, 1)))
        page = self.page({1: one, 2: two}, 2)
        entries = {("accepted", "didcomm"): 7, ("waiting", "didcomm"): 6}
        self.assertEqual(values(page, "mediator_ledger_messages"), entries)
        self.assertEqual(values(page, "mediator_ledger_difference"), {("didcomm",): 1})

    def test_empty_queues(self) -> None:
        """Older queue sizes of another worker are not used."""
        old = report(lambda m: m.set_queue_sizes([("did:b", 9)], 4))
        self.assertEqual(values(self.page({1: report(), 2: old}), "mediator_message_queue_size"), {})

    def test_worst_value_counts(self) -> None:
        """A reload failed if it failed anywhere, and the certificate that expires first counts."""
        one = report(
            lambda m: m.set_reload_result(5.0, True), lambda m: m.certificate_expiry.labels("*:443").set(9.0)
        )
        two = report(
            lambda m: m.set_reload_result(4.0, True),
            lambda m: m.set_reload_result(6.0, False),
            lambda m: m.certificate_expiry.labels("*:443").set(8.0),
        )
        for reports in ({1: one, 2: two}, {1: two, 2: one}):
            page = self.page(reports)
            accepted = values(page, "mediator_config_last_reload_success")
            since = values(page, "mediator_config_last_reload_success_timestamp_seconds")
            expiry = values(page, "mediator_certificate_expiry_timestamp_seconds")
            self.assertEqual((accepted, since, list(expiry.values())), ({(): 0}, {(): 4.0}, [8.0]))

    def test_unresponsive_worker(self) -> None:
        """Its counters keep their last values, so that their return is no burst; its sockets do not count."""
        known = report(forwards(4), lambda m: m.active_connections.set(6))
        self.page({1: report(forwards(3)), 2: known})
        page = self.page({1: report(forwards(5), lambda m: m.active_connections.set(1))}, worker_count=2)
        self.assertEqual(values(page, "mediator_messages_forwarded_total"), {(): 9})
        self.assertEqual(values(page, "mediator_active_connections"), {(): 1})
        counts = values(page, "mediator_workers"), values(page, "mediator_workers_answered")
        self.assertEqual(counts, ({(): 2}, {(): 1}))

    def test_replaced_worker(self) -> None:
        """Its counters stay in the sums, also series that its replacement does not have yet."""
        self.page({1: report(forwards(3)), 2: report(forwards(4), lambda m: m.rejected.inc("too_large"))})
        self.figures.retire(2)
        page = self.page({1: report(forwards(3)), 3: report(forwards(1))})
        self.assertEqual(values(page, "mediator_messages_forwarded_total"), {(): 8})
        self.assertEqual(values(page, "mediator_rejected_total"), {("too_large",): 1})
        self.figures.retire(3)
        self.figures.retire(3)
        page = self.page({1: report(forwards(3))})
        self.assertEqual(values(page, "mediator_messages_forwarded_total"), {(): 8})

    def test_each_family_once(self) -> None:
        """Each family has one HELP and TYPE line, as from a single process."""
        page = self.page({1: report(forwards(1)), 2: report(forwards(1))})
        heads = [line for line in page.splitlines() if line.startswith("#")]
        alone = [line for line in report().splitlines() if line.startswith("#")]
        self.assertEqual([line for line in heads if "mediator_workers" not in line], alone)
