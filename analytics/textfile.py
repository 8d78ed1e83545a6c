"""
The figures of the last day for Prometheus, by the textfile collector of its node exporter.

Gauges without timestamps, as the collector refuses those. The file is replaced at once, and only after a run that
published its results, so what an alert looks at is the last good run and how long ago that was.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from analytics.facts import RunFacts
from analytics.metrics import METRICS
from analytics.report.parts import Row
from analytics.report.reading import Day, read
from analytics.settings import Settings
from analytics.warehouse import Warehouse

_TABLES = (
    *("ledger_daily", "lost_daily", "latency_daily", "reconciliation_daily", "boots_daily", "inputs", "anomalies"),
    *("forecast", "errors_daily", "queue_risk", "queue_hourly"),
)
_QUANTILES = {"p50_ms": "0.5", "p90_ms": "0.9", "p95_ms": "0.95", "p99_ms": "0.99"}
_STATES = ("opening", "accepted", "acked", "expired", "evicted", "removed", "open")
_AHEAD_DAYS = 30


def write(warehouse: Warehouse, day: date, path: str, facts: RunFacts) -> None:
    """
    Replace the file.

    :param path: on this machine, in the directory of the collector; ends in `.prom`.
    :raise OSError: it cannot be written; one that is there is as it was.
    """
    replace(Path(path), generate_latest(registry(read(warehouse, day, Settings(), facts, _TABLES))))


def replace(path: Path, content: bytes) -> None:
    """
    Replace the file at once by one that everybody may read, whatever the umask: the node exporter is another user.

    :raise OSError: it cannot be written; one that is there is as it was.
    """
    # The collector takes no notice of files with another suffix.
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(content)
        # nosemgrep: open-to-others  figures without secrets, which the node exporter reads as another user
        draft.chmod(0o644)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def registry(known: Day) -> CollectorRegistry:
    """All gauges of a day."""
    made = _Gauges(CollectorRegistry())
    _about_the_run(made, known)
    _about_integrity(made, known)
    _about_messages(made, known)
    _about_what_is_to_come(made, known)
    return made.registry


class _Gauges:
    """:ivar registry: its own, so that nothing of this process is in it."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

    def one(self, name: str, meaning: str, value: float | None) -> None:
        """A gauge without labels; none of what is not known."""
        if value is not None:
            Gauge(f"mediatord_{name}", meaning, registry=self.registry).set(value)

    def many(
        self, name: str, meaning: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], float | None]]
    ) -> None:
        """:param values: label values, and the sum of those with the same ones."""
        gauge = Gauge(f"mediatord_{name}", meaning, labels, registry=self.registry)
        for of, value in values:
            if value is not None:
                gauge.labels(*of).inc(value)


def _about_the_run(made: _Gauges, known: Day) -> None:
    name = "analytics_last_success_timestamp_seconds"
    made.one(name, "When the last run that published results was done", known.facts.now.timestamp())
    made.one(
        "analytics_day_timestamp_seconds",
        "Midnight, UTC, at the beginning of the day that all this is about",
        (known.day.toordinal() - date(1970, 1, 1).toordinal()) * 86_400,
    )
    made.one(
        "analytics_run_duration_seconds", "From its start until its results were published", known.facts.duration_s
    )
    made.one("analytics_segments", "Log segments of the day", known.total("inputs", "segments"))


def _about_integrity(made: _Gauges, known: Day) -> None:
    ledger = known.one("ledger_daily")
    made.one("analytics_corrupt_lines", "Log lines of the day that are no events", known.total("inputs", "corrupt"))
    made.one("analytics_seq_missing", "Log lines of the day that are missing", known.total("boots_daily", "missing"))
    made.one("analytics_seq_doubled", "Log lines of the day that came twice", known.total("boots_daily", "doubled"))
    difference = ledger.get("difference")
    made.one("analytics_ledger_difference", "Messages that the ledger cannot account for", difference)
    made.one("analytics_ledger_orphans", "Messages that ended and that no log accepted", ledger.get("orphans"))
    made.one("analytics_ledger_vanished", "Messages that vanished without a line", ledger.get("vanished"))
    made.one("analytics_ledger_overdue", "Open messages past the end of their time", ledger.get("overdue"))
    made.one(
        "analytics_reconciliation_difference",
        "Between the daemon's counters and its log lines, all counters and nodes",
        sum(abs(row["difference"]) for row in known.today("reconciliation_daily")),
    )


def _about_messages(made: _Gauges, known: Day) -> None:
    ledger = known.one("ledger_daily")
    states = [((state,), ledger.get(state)) for state in _STATES]
    made.many("day_messages", "Messages of the day by what became of them", ["state"], states)
    lost = [((row["reason"],), row["n"]) for row in known.today("lost_daily")]
    made.many("day_messages_lost", "Messages never delivered, by reason", ["reason"], lost)
    unaccepted = ledger.get("lost_unaccepted")
    made.one("day_messages_lost_unaccepted", "Messages lost of which no line says they were accepted", unaccepted)
    latencies = [
        ((quantile, row["path"]), row[column] / 1000)
        for row in known.today("latency_daily")
        if row["node"] == "*" and row["metric"] == "push" and row["path"] != "*"
        for column, quantile in _QUANTILES.items()
        if row[column] is not None
    ]
    made.many("day_latency_seconds", "From acceptance until handed over, by path", ["quantile", "path"], latencies)
    made.one("day_requests_refused", "Requests refused or failed", known.total("errors_daily", "n"))
    new = {row["code"] for row in known.today("errors_daily") if row["is_new"]}
    made.one("day_error_codes_new", "Error codes not seen on any earlier day", len(new))
    made.one("day_anomalies", "Hours of figures that were far from usual", len(known.today("anomalies")))


def _about_what_is_to_come(made: _Gauges, known: Day) -> None:
    depths = [row["depth_max"] for row in known.today("queue_hourly") if row["depth_max"] is not None]
    made.one("day_queue_depth_max", "Most messages that waited at a time", max(depths, default=None))
    fullest = [row["days_to_cap"] for row in known.today("queue_risk") if row["days_to_cap"] is not None]
    soonest = min(fullest, default=None)
    made.one("day_queue_days_to_capacity", "Days until the first queue is full at its slope of the day", soonest)
    highest: dict[str, Row] = {}
    for row in known.today("forecast"):
        if (row["day"] - known.day).days <= _AHEAD_DAYS and row["metric"] in METRICS:
            highest[row["metric"]] = max(row, highest.get(row["metric"], row), key=lambda each: each["value"])
    meaning = "Highest day of the 30 to come: expected, and the ends of its 80 % interval"
    ends = [((metric, end), row[end]) for metric, row in highest.items() for end in ("value", "low", "high")]
    made.many("forecast_highest_day", meaning, ["metric", "end"], ends)
