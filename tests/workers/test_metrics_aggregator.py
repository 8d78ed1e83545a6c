"""What all workers have measured together."""

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
    """Those of a process to which all this has happened."""
    metrics = Metrics(CollectorRegistry(), version="1.2.3")
    for step in steps:
        step(metrics)
    return metrics


def report(*steps: Callable[[Metrics], object]) -> str:
    """The text that such a process reports."""
    return metrics_of(*steps).render().decode()


def values(page: str, name: str) -> dict[tuple[str, ...], float]:
    """Values of a sample name by the values of its labels."""
    families = text_string_to_metric_families(page)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return {tuple(sample.labels.values()): sample.value for sample in samples}


def _is(metrics: Metrics, ready: bool) -> None:
    """Cycles say so."""
    metrics.read_readiness = lambda: ready


def forwards(count: int) -> Callable[[Metrics], object]:
    """So many forwards were accepted."""
    return lambda metrics: metrics.forwarded.inc(by=count)


class MetricsAggregatorTests(SynchronousTestCase):
    def setUp(self) -> None:
        self.figures = MetricsAggregator()

    def page(self, reports: dict[int, str], first: int = 1, asked: int | None = None) -> str:
        return self.figures.page(reports, first, asked or len(reports))

    def test_counters_and_connections_are_sums(self) -> None:
        """Whatever grows, and what is open, in all processes together."""
        one = report(forwards(3), lambda m: m.active_connections.set(5), lambda m: m.rejected.inc("too_large"))
        two = report(forwards(4), lambda m: m.active_connections.set(6), lambda m: m.rejected.inc("rate_limited"))
        page = self.page({1: one, 2: two})
        self.assertEqual(values(page, "mediator_messages_forwarded_total"), {(): 7})
        self.assertEqual(values(page, "mediator_active_connections"), {(): 11})
        self.assertEqual(values(page, "mediator_rejected_total"), {("too_large",): 1, ("rate_limited",): 1})

    def test_histograms_are_sums(self) -> None:
        """Bucket by bucket, and still in the order and completeness that readers need."""
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

    def test_what_is_no_sum(self) -> None:
        """The store is up if it is for all; the queues, which they share, are as the one that is asked sees them."""
        one = report(lambda m: m.set_storage_up(True), lambda m: m.set_queue_sizes([("did:a", 3)], 2))
        two = report(lambda m: m.set_storage_up(False), lambda m: m.set_queue_sizes([("did:b", 9)], 4))
        for first, sizes in ((1, {("did:a",): 3, ("other",): 2}), (2, {("did:b",): 9, ("other",): 4})):
            page = self.page({1: one, 2: two}, first)
            self.assertEqual(values(page, "mediator_storage_up"), {(): 0})
            self.assertEqual(values(page, "mediator_message_queue_size"), sizes)
            self.assertEqual(values(page, "mediator_build_info"), {("1.2.3",): 1})

    def test_readiness(self) -> None:
        """All are ready only if each is of those that were asked; of others nothing is known."""
        asked = {number: report(partial(_is, ready=ready)) for number, ready in ((1, True), (2, False))}
        for reports, shown in (
            ({1: asked[1], 3: report()}, {(): 1}),
            ({**asked, 3: report()}, {(): 0}),
            ({1: report(), 3: report()}, {}),
        ):
            self.assertEqual(values(self.page(reports), "mediator_ready"), shown)

    @pytest.mark.system
    def test_what_waits(self) -> None:
        """It waits for all of them, and is no more where more processes know of it; memory is that of each."""
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
        self.assertAlmostEqual(started, values(one, "process_start_time_seconds")[()], delta=0.1)

    def test_ledger(self) -> None:
        """The store's books are the same for all, and no sum; who has not read them yet takes nothing away."""
        one = report(lambda m: m.ledgers.update(didcomm=({"accepted": 5, "waiting": 5}, 3)))
        two = report(lambda m: m.ledgers.update(didcomm=({"accepted": 7, "waiting": 6}, 1)))
        page = self.page({1: one, 2: two}, 2)
        entries = {("accepted", "didcomm"): 7, ("waiting", "didcomm"): 6}
        self.assertEqual(values(page, "mediator_ledger_messages"), entries)
        self.assertEqual(values(page, "mediator_ledger_difference"), {("didcomm",): 1})

    def test_empty_queues(self) -> None:
        """What another process has seen of them earlier is no substitute."""
        old = report(lambda m: m.set_queue_sizes([("did:b", 9)], 4))
        self.assertEqual(values(self.page({1: report(), 2: old}), "mediator_message_queue_size"), {})

    def test_what_is_as_good_as_the_worst(self) -> None:
        """A reload that one has not taken was not taken, and the certificate that ends first is what counts."""
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
            taken = values(page, "mediator_config_last_reload_success")
            since = values(page, "mediator_config_last_reload_success_timestamp_seconds")
            expiry = values(page, "mediator_certificate_expiry_timestamp_seconds")
            self.assertEqual((taken, since, list(expiry.values())), ({(): 0}, {(): 4.0}, [8.0]))

    def test_one_that_does_not_answer(self) -> None:
        """Its counters stay as they were, or their return would be taken for a burst; its sockets are left out."""
        known = report(forwards(4), lambda m: m.active_connections.set(6))
        self.page({1: report(forwards(3)), 2: known})
        page = self.page({1: report(forwards(5), lambda m: m.active_connections.set(1))}, asked=2)
        self.assertEqual(values(page, "mediator_messages_forwarded_total"), {(): 9})
        self.assertEqual(values(page, "mediator_active_connections"), {(): 1})
        asked = values(page, "mediator_workers"), values(page, "mediator_workers_answered")
        self.assertEqual(asked, ({(): 2}, {(): 1}))

    def test_one_that_was_replaced(self) -> None:
        """What it had counted stays in the sum, also of series that its replacement does not have yet."""
        self.page({1: report(forwards(3)), 2: report(forwards(4), lambda m: m.rejected.inc("too_large"))})
        self.figures.retire(2)
        page = self.page({1: report(forwards(3)), 3: report(forwards(1))})
        self.assertEqual(values(page, "mediator_messages_forwarded_total"), {(): 8})
        self.assertEqual(values(page, "mediator_rejected_total"), {("too_large",): 1})
        self.figures.retire(3)
        self.figures.retire(3)
        page = self.page({1: report(forwards(3))})
        self.assertEqual(values(page, "mediator_messages_forwarded_total"), {(): 8})

    def test_every_family_once(self) -> None:
        """With its explanation and its kind, as one process would write it."""
        page = self.page({1: report(forwards(1)), 2: report(forwards(1))})
        heads = [line for line in page.splitlines() if line.startswith("#")]
        alone = [line for line in report().splitlines() if line.startswith("#")]
        self.assertEqual([line for line in heads if "mediator_workers" not in line], alone)
