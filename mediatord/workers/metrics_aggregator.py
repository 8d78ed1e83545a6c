"""
What all workers have measured together, in Prometheus' text format.

Asking all workers what they have measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from twisted.internet.interfaces import IReactorTime
from twisted.logger import Logger

from mediatord.workers.worker_pool import BroadcastQuery
from mediatord.workers.worker_process import WorkerProcess

SeriesKey = tuple[str, tuple[tuple[str, str], ...]]
SeriesValues = dict[SeriesKey, float]

_CUMULATIVE_TYPES = ("counter", "histogram")
# Not a sum: the worst of them, or the same for all and taken from the one that is asked.
_MINIMUM_GAUGES = {
    "mediator_storage_up",
    "mediator_ready",
    "mediator_certificate_expiry_timestamp_seconds",
    "mediator_config_last_reload_success",
    "mediator_config_last_reload_success_timestamp_seconds",
    "process_start_time_seconds",
}
# The other way round: a fault of one is a fault.
_MAXIMUM_GAUGES = {"mediator_storage_fault"}
_SHARED_GAUGES = {
    "mediator_message_queue_size",
    "mediator_accounts",
    "mediator_messages_waiting",
    "mediator_registration_bytes",
    "mediator_store_statistics_timestamp_seconds",
    "mediator_storage_bytes",
    "mediator_ledger_messages",
    "mediator_ledger_difference",
    "mediator_oldest_message_timestamp_seconds",
    "mediator_cluster_nodes",
    "mediator_build_info",
}


class MetricsAggregator:
    """
    Adds up what workers report.

    Sums of counters never fall, though a worker that was replaced begins at zero and one may not answer in time:
    what each reported last goes on counting. Of gauges only those count that were reported just now.
    """

    def __init__(self) -> None:
        self._last: dict[int, dict[str, SeriesValues]] = {}
        self._retired: dict[str, SeriesValues] = {}

    def retire(self, process: int) -> None:
        """A process is gone, and what it has counted stays."""
        for name, counts in self._last.pop(process, {}).items():
            _add_values(self._retired.setdefault(name, {}), counts)

    def page(self, reports: dict[int, str], first: int, asked: int) -> str:
        """
        The text for a scrape.

        :param reports: by process, in the text format.
        :param first: the process that is asked; it is among the reports.
        :param asked: how many processes were.
        :raise ValueError: a report cannot be read.
        """
        families = {process: list(text_string_to_metric_families(text)) for process, text in reports.items()}
        for process, of_one in families.items():
            self._last[process] = {
                family.name: {_series_key(sample): sample.value for sample in family.samples}
                for family in of_one
                if family.type in _CUMULATIVE_TYPES
            }
        merged: dict[str, Metric] = {}
        for process in sorted(families, key=lambda process: process != first):
            for family in families[process]:
                into = merged.setdefault(family.name, _copy_without_samples(family))
                if family.type not in _CUMULATIVE_TYPES and (process == first or family.name not in _SHARED_GAUGES):
                    _merge_gauges(into, family)
        for family in merged.values():
            if family.type in _CUMULATIVE_TYPES:
                family.samples = self._total(family.name)
        return generate_latest(_MetricRegistry([*merged.values(), *_worker_gauges(asked, len(reports))])).decode(
            "utf-8"
        )

    def _total(self, name: str) -> list[Sample]:
        """Of a family, over all that are there and all that were."""
        totals: SeriesValues = {}
        for families in (self._retired, *self._last.values()):
            _add_values(totals, families.get(name, {}))
        return [Sample(series, dict(labels), value) for (series, labels), value in _sort_series(totals)]


class _MetricRegistry:
    """What the renderer takes for a registry."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Called by the renderer."""
        return self._families


def _series_key(sample: Sample) -> SeriesKey:
    return sample.name, tuple(sample.labels.items())


def _copy_without_samples(family: Metric) -> Metric:
    return Metric(family.name, family.documentation, family.type)


def _add_values(to: SeriesValues, counts: SeriesValues) -> None:
    for series, value in counts.items():
        to[series] = to.get(series, 0.0) + value


def _merge_gauges(into: Metric, family: Metric) -> None:
    """Put the gauges of one more process to those of the others."""
    values = {_series_key(sample): sample.value for sample in into.samples}
    for sample in family.samples:
        series = _series_key(sample)
        there = values.get(series)
        if there is None:
            values[series] = sample.value
        else:
            values[series] = _gauge_reducer(family.name)((there, sample.value))
    into.samples = [Sample(name, dict(labels), value) for (name, labels), value in values.items()]


def _gauge_reducer(name: str) -> Callable[[tuple[float, float]], float]:
    """What becomes of the values of two processes."""
    return min if name in _MINIMUM_GAUGES else max if name in _MAXIMUM_GAUGES else sum


def _sort_series(totals: SeriesValues) -> Iterator[tuple[SeriesKey, float]]:
    """Series of a histogram that differ in the bucket alone are to stand together, in the order of the buckets."""

    def place(series: SeriesKey) -> tuple[object, ...]:
        name, labels = series
        bound = dict(labels).get("le")
        others = tuple(label for label in labels if label[0] != "le")
        return others, (0, float(bound)) if bound is not None else (1, name)

    yield from sorted(totals.items(), key=lambda item: place(item[0]))


def _worker_gauges(asked: int, answered: int) -> list[Metric]:
    return [
        GaugeMetricFamily("mediator_workers", "Processes asked for this page", asked),
        GaugeMetricFamily("mediator_workers_answered", "Those of them that answered in time", answered),
    ]


_log = Logger()


class WorkerMetricsCollector:
    """
    Collects reports, and adds them up for the one that wants to know.

    :param workers: those that are there.
    """

    def __init__(self, clock: IReactorTime, workers: Callable[[], Iterable[WorkerProcess]]) -> None:
        self._aggregator = MetricsAggregator()
        self._query = BroadcastQuery(clock, "report", workers)
        self.take = self._query.take
        self.stop = self._query.stop

    def begin(self, requester: WorkerProcess, answer: Callable[[str], None]) -> None:
        """
        Ask every worker that serves, the asker included.

        :param answer: called with the page, after :data:`~mediatord.workers.worker_pool.QUERY_TIMEOUT` at the latest.
        """
        self._query.begin(requester, lambda asked, reports: self._finish(requester.pid, asked, reports, answer))

    def gone(self, child: WorkerProcess) -> None:
        """A worker has ended."""
        self._query.gone(child)
        self._aggregator.retire(child.pid)

    def _finish(self, requester: int, asked: int, reports: Mapping[int, str], answer: Callable[[str], None]) -> None:
        if requester not in reports:
            return  # It is gone, or busy, and has told its client so.
        try:
            answer(self._aggregator.page(dict(reports), requester, asked))
        except ValueError:
            _log.failure("what the workers report cannot be added up")
