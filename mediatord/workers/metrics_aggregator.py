"""Metrics of all workers, added up in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from mediatord.observability.metrics import METRICS

SeriesKey = tuple[str, tuple[tuple[str, str], ...]]
SeriesValues = dict[SeriesKey, float]

_CUMULATIVE_TYPES = ("counter", "histogram")
# Gauges that are not summed: the minimum or maximum counts, or the value of the worker that serves the scrape.
_MINIMUM_GAUGES = {
    "mediator_storage_up",
    "mediator_ready",
    "mediator_certificate_expiry_timestamp_seconds",
    "mediator_config_last_reload_success",
    "mediator_config_last_reload_success_timestamp_seconds",
    "process_start_time_seconds",
}
_MAXIMUM_GAUGES = {"mediator_storage_fault"}
_SHARED_GAUGES = {
    "mediator_message_queue_size",
    "mediator_accounts",
    "mediator_messages_waiting",
    "mediator_registration_bytes",
    "mediator_push_devices",
    "mediator_v1_connections",
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
    Aggregates the metrics of several processes.

    Counters never decrease, although a replacement worker starts at zero and a busy one may not answer: the last
    report of each process keeps counting. Gauges count only if they were reported just now.
    """

    def __init__(self) -> None:
        self._last: dict[int, dict[str, SeriesValues]] = {}
        self._retired: dict[str, SeriesValues] = {}

    def retire(self, process: int) -> None:
        """Keep the counters of a process that has ended."""
        for name, counts in self._last.pop(process, {}).items():
            _add_values(self._retired.setdefault(name, {}), counts)

    def page(self, reports: Mapping[int, str], first: int, asked: int) -> str:
        """
        Aggregate reports into one text.

        :param reports: text format by process.
        :param first: the process that serves the scrape; it is among the reports.
        :param asked: number of processes that were queried.
        :raise ValueError: a report cannot be parsed.
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
                into = merged.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                if family.type not in _CUMULATIVE_TYPES and (process == first or family.name not in _SHARED_GAUGES):
                    _merge_gauges(into, family)
        for family in merged.values():
            if family.type in _CUMULATIVE_TYPES:
                family.samples = self._total(family.name)
        workers = [
            GaugeMetricFamily(name, METRICS[name].text, value)
            for name, value in (("mediator_workers", asked), ("mediator_workers_answered", len(reports)))
        ]
        registry: Any = SimpleNamespace(collect=lambda: [*merged.values(), *workers])
        return generate_latest(registry).decode("utf-8")

    def _total(self, name: str) -> list[Sample]:
        """
        The samples of a family, summed over current and former processes.

        They are in the order of the reports, which have the buckets of a histogram together and ascending.
        """
        totals: SeriesValues = {}
        for families in (self._retired, *self._last.values()):
            _add_values(totals, families.get(name, {}))
        return [Sample(series, dict(labels), value) for (series, labels), value in totals.items()]


def _series_key(sample: Sample) -> SeriesKey:
    return sample.name, tuple(sample.labels.items())


def _add_values(to: SeriesValues, counts: SeriesValues) -> None:
    for series, value in counts.items():
        to[series] = to.get(series, 0.0) + value


def _merge_gauges(into: Metric, family: Metric) -> None:
    """Add the gauges of one more process."""
    reduce = min if family.name in _MINIMUM_GAUGES else max if family.name in _MAXIMUM_GAUGES else sum
    values = {_series_key(sample): sample.value for sample in into.samples}
    for sample in family.samples:
        series = _series_key(sample)
        values[series] = reduce((values[series], sample.value)) if series in values else sample.value
    into.samples = [Sample(name, dict(labels), value) for (name, labels), value in values.items()]
