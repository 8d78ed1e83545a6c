"""`mediatord status`: a report from `/health`, `/ready` and `/metrics` of a running mediator."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from math import inf
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.request import ProxyHandler, build_opener

import click
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from mediatord.cli.console import (
    LOCAL_URL,
    ca_option,
    escape_control_characters,
    json_option,
    print_result,
    url_option,
)
from mediatord.errors import OperatorError

if TYPE_CHECKING:
    from rich.table import Table


# Seconds. The first request to /ready waits for a probe.
_TIMEOUT_SECONDS = 10.0


class MediatorUnreachable(OperatorError):
    """No mediator answers at the URL."""


@dataclass(frozen=True, slots=True)
class HealthState:
    """
    Answer of `/health` or `/ready`.

    :param text: `ok`, or the problem.
    :param age: seconds since the last probe; None if the answer has none.
    """

    well: bool
    text: str
    age: float | None = None


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """
    Samples of one scrape of `/metrics`.

    :param at: monotonic time of the scrape, seconds.
    :param date: the same by the mediator's clock, seconds since 1970; None if the response has no date.
    """

    at: float
    samples: tuple[Sample, ...]
    date: float | None = None

    def of(self, name: str) -> Iterator[Sample]:
        """Series of this name."""
        return (sample for sample in self.samples if sample.name == name)

    def has(self, name: str) -> bool:
        return any(True for _ in self.of(name))

    def sum(self, name: str, chosen: Callable[[dict[str, str]], bool] = lambda labels: True) -> float:
        """Sum of the series of this name with matching labels."""
        return sum(sample.value for sample in self.of(name) if chosen(sample.labels))

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of a label."""
        sums: dict[str, float] = {}
        for sample in self.of(name):
            value = sample.labels.get(label, "")
            sums[value] = sums.get(value, 0.0) + sample.value
        return sums

    def quantiles(self, name: str, label: str, *shares: float) -> dict[str, list[float]]:
        """
        Quantiles of a histogram by the value of a label, estimated as by Prometheus.

        :param name: without `_bucket`.
        :param shares: 0 to 1.
        """
        buckets: dict[str, dict[float, float]] = {}
        for sample in self.of(f"{name}_bucket"):
            counts = buckets.setdefault(sample.labels.get(label, ""), {})
            bound = float(sample.labels["le"])
            counts[bound] = counts.get(bound, 0.0) + sample.value
        return {
            value: [_estimate_quantile(sorted(counts.items()), share) for share in shares]
            for value, counts in sorted(buckets.items())
            if counts.get(inf)
        }


def _estimate_quantile(counts: list[tuple[float, float]], share: float) -> float:
    """:param counts: upper bounds of buckets with cumulative counts."""
    wanted = counts[-1][1] * share
    below, before = 0.0, 0.0
    for bound, count in counts:
        if count >= wanted:
            if bound == inf:
                return below
            inside = count - before
            return below + (bound - below) * ((wanted - before) / inside if inside else 1.0)
        below, before = bound, count
    return below


def fetch_health(url: str) -> HealthState:
    """
    Fetch `/health`.

    :param url: of the mediator, without a slash at its end.
    :raise MediatorUnreachable: there is no mediator.
    """
    code, body, _ = _fetch(f"{url}/health")
    state = _parse_health(code, body)
    if state is None:
        raise MediatorUnreachable(f"{url}/health: expected the answer of a mediator, got HTTP {code}")
    return state


def fetch_readiness(url: str) -> HealthState | None:
    """
    Fetch `/ready`; None if the mediator does not offer it.

    :raise MediatorUnreachable: as :func:`fetch_health`.
    """
    code, body, _ = _fetch(f"{url}/ready")
    return None if code == 404 else _parse_health(code, body) or HealthState(False, f"HTTP {code}")


def fetch_metrics(url: str) -> MetricsSnapshot | str:
    """
    Fetch `/metrics`, or the reason why it is not available.

    :raise MediatorUnreachable: as :func:`fetch_health`.
    """
    code, text, date = _fetch(f"{url}/metrics")
    if code != 200:
        return f"not shown to this address (HTTP {code}; see metrics.allow)"
    try:
        families = list(text_string_to_metric_families(text))
    except ValueError:
        return "not readable"
    return MetricsSnapshot(monotonic(), tuple(sample for family in families for sample in family.samples), date)


def _parse_health(code: int, body: str) -> HealthState | None:
    try:
        answer: Any = json.loads(body)
        state, detail = str(answer["status"]), str(answer.get("detail", ""))
        age = float(answer["age_ms"]) / 1000 if "age_ms" in answer else None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return HealthState(code == 200 and state == "ok", f"{state}: {detail}" if detail else state, age)


def _fetch(url: str) -> tuple[int, str, float | None]:
    """Status, body and date, without using a proxy."""
    opener = build_opener(ProxyHandler({}))
    try:
        with opener.open(url, timeout=_TIMEOUT_SECONDS) as response:
            return response.status, response.read().decode("utf-8", "replace"), _parse_date(response.headers)
    except HTTPError as error:
        with error:
            return error.code, error.read().decode("utf-8", "replace"), _parse_date(error.headers)
    except HTTPException:
        raise MediatorUnreachable(f"{url}: the answer is not HTTP, or incomplete") from None
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise MediatorUnreachable(f"{url}: {getattr(reason, 'strerror', None) or reason}") from None


def _parse_date(headers: Message) -> float | None:
    try:
        return parsedate_to_datetime(headers.get("Date", "")).timestamp()
    except ValueError:
        return None


_QUEUE_SIZE_METRIC = "mediator_message_queue_size"
_MESSAGE_COUNTERS = ("forwarded", "stored", "delivered", "expired", "evicted")
_STORE_READ_METRIC = "mediator_store_statistics_timestamp_seconds"
_LEDGER_METRIC, _DIFFERENCE_METRIC = "mediator_ledger_messages", "mediator_ledger_difference"
# Outcomes of accepted messages, in the order of the report.
_LEDGER_OUTCOMES = ("acknowledged", "waiting", "expired", "evicted", "removed", "withdrawn")
_MAX_REASONS = 6
_OTHER_LABEL = "other"

ReportRow = tuple[str, str]


@dataclass(frozen=True, slots=True)
class StatusSample:
    """
    State of a mediator at one time.

    :param ready: None if the mediator has no `/ready`.
    :param figures: metrics, or the reason why there are none.
    """

    health: HealthState
    ready: HealthState | None
    figures: MetricsSnapshot | str


def take_sample(url: str) -> StatusSample:
    """
    Fetch health, readiness and metrics.

    :param url: of the mediator, without a slash at its end.
    :raise MediatorUnreachable: there is no mediator.
    """
    return StatusSample(fetch_health(url), fetch_readiness(url), fetch_metrics(url))


def take_sample_or_failure(url: str) -> StatusSample:
    """The same; an unreachable mediator is reported as its state."""
    try:
        return take_sample(url)
    except MediatorUnreachable as error:
        return StatusSample(HealthState(False, f"unreachable: {error}"), None, "not known")


@dataclass(frozen=True, slots=True)
class StatusReport:
    """
    :param now: the last sample.
    :param before: an earlier one, for rates.
    """

    now: StatusSample
    before: StatusSample | None = None

    @property
    def healthy(self) -> bool:
        """Whether it is healthy, ready if it has `/ready`, and its ledger balances."""
        ready, figures = self.now.ready, self.now.figures
        accounted = isinstance(figures, str) or not any(sample.value for sample in figures.of(_DIFFERENCE_METRIC))
        return self.now.health.well and (ready is None or ready.well) and accounted

    def values(self) -> dict[str, Any]:
        """For JSON; unknown values are left out."""
        found: dict[str, Any] = {"status": self.now.health.text, "healthy": self.healthy}
        if self.now.ready is not None:
            found["ready"] = self.now.ready.text
            if self.now.ready.age is not None:
                found["ready_age_seconds"] = self.now.ready.age
        figures = self.now.figures
        if isinstance(figures, str):
            return {**found, "metrics": figures}
        return {**found, **_read_identity_values(figures), **_read_times(figures), **self._amounts(figures)}

    def rows(self) -> list[ReportRow]:
        """For the terminal: names and values."""
        return list(self._rows(self.values()))

    def _amounts(self, figures: MetricsSnapshot) -> dict[str, Any]:
        longest = max(
            (one.value for one in figures.of(_QUEUE_SIZE_METRIC) if one.labels.get("did") != _OTHER_LABEL),
            default=0.0,
        )
        return {
            "storage": "up" if figures.sum("mediator_storage_up") else "down",
            "connections": int(figures.sum("mediator_active_connections")),
            "waiting": {"messages": int(figures.sum(_QUEUE_SIZE_METRIC)), "longest_queue": int(longest)},
            **_read_ledger(figures),
            "messages": {name: self._counter(f"mediator_messages_{name}_total") for name in _MESSAGE_COUNTERS},
            "requests": self._counter("mediator_requests_total"),
            "refused": {
                **self._counter("mediator_rejected_total"),
                "reasons": {
                    reason: int(number)
                    for reason, number in figures.by("mediator_rejected_total", "reason").items()
                    if number
                },
            },
            "delivery_seconds": _read_quantiles(figures, "mediator_delivery_latency_seconds", "method"),
            "request_seconds": _read_quantiles(figures, "mediator_request_duration_seconds", "protocol"),
        }

    def _counter(self, name: str) -> dict[str, Any]:
        """The total, and the rate between the two samples if there are two."""
        now, before = self.now.figures, self.before.figures if self.before else ""
        assert isinstance(now, MetricsSnapshot)
        total = now.sum(name)
        if isinstance(before, str) or now.at <= before.at or total < before.sum(name):
            return {"total": int(total)}
        return {"total": int(total), "per_second": round((total - before.sum(name)) / (now.at - before.at), 3)}

    def _rows(self, values: dict[str, Any]) -> Iterator[ReportRow]:
        for name in ("status", "ready", "metrics", "version", "node", "storage", "nodes"):
            if name in values:
                age = values.get(f"{name}_age_seconds")
                yield name, str(values[name]) if age is None else f"{values[name]}, tried {_format_span(age)} ago"
        if "workers" in values:
            yield "workers", f"{values['workers']['answered']} of {values['workers']['asked']} answer"
        if "figures_at" in values:
            yield "as of", _format_time_of_day(values["figures_at"])
        if "messages" in values:
            yield from _format_amounts(values)


def _format_amounts(values: dict[str, Any]) -> Iterator[ReportRow]:
    yield "connections", str(values["connections"])
    if "store_at" in values:
        yield "store as of", f"{_format_time_of_day(values['store_at'])}, {values['store_age_seconds']} s ago"
    waiting = values["waiting"]
    yield "waiting", f"{waiting['messages']} messages, {waiting['longest_queue']} in the longest queue"
    for half, entries in values.get("ledger", {}).items():
        yield f"ledger {half}", _format_ledger(entries)
    for name, counter in values["messages"].items():
        yield name, _format_counter(counter)
    yield "requests", _format_counter(values["requests"])
    yield "refused", _format_counter(values["refused"])
    reasons = sorted(values["refused"]["reasons"].items(), key=lambda one: -one[1])
    for reason, number in reasons[:_MAX_REASONS]:
        yield f"  {reason}", str(number)
    for method, shares in values["delivery_seconds"].items():
        yield f"delivery {method}", _format_quantiles(shares)
    for protocol, shares in values["request_seconds"].items():
        yield f"answer {protocol}", _format_quantiles(shares)


def _read_identity_values(figures: MetricsSnapshot) -> dict[str, Any]:
    """Version, node and number of processes."""
    info = next(figures.of("mediator_build_info"), None)
    labels = info.labels if info else {}
    found: dict[str, Any] = {"version": labels.get("version", "unknown")}
    if "node" in labels:
        found["node"] = labels["node"]
    if nodes := figures.sum("mediator_cluster_nodes"):
        found["nodes"] = int(nodes)
    if asked := figures.sum("mediator_workers"):
        found["workers"] = {"asked": int(asked), "answered": int(figures.sum("mediator_workers_answered"))}
    return found


def _read_times(figures: MetricsSnapshot) -> dict[str, Any]:
    """Time of all figures, and time of those of queues and ledger."""
    now = datetime.now(UTC).timestamp() if figures.date is None else figures.date
    read = next((one.value for one in figures.of(_STORE_READ_METRIC)), None)
    found: dict[str, Any] = {"figures_at": round(now, 3)}
    if read is not None:
        # A date has whole seconds.
        found |= {"store_at": round(read, 3), "store_age_seconds": max(0, int(now - read))}
    return found


def _format_time_of_day(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"


def _read_ledger(figures: MetricsSnapshot) -> dict[str, Any]:
    """The store's ledger by protocol; empty before it was read."""
    halves: dict[str, dict[str, int | None]] = {}
    for sample in (*figures.of(_LEDGER_METRIC), *figures.of(_DIFFERENCE_METRIC)):
        entries = halves.setdefault(sample.labels.get("half", ""), {"waiting": None, "difference": None})
        entries[sample.labels.get("entry", "difference")] = int(sample.value)
    return {"ledger": dict(sorted(halves.items(), reverse=True))} if halves else {}


def _format_ledger(entries: dict[str, int | None]) -> str:
    """As an equation."""
    outcomes = " + ".join(f"{_format_number(entries.get(name))} {name}" for name in _LEDGER_OUTCOMES)
    accepted, difference = _format_number(entries.get("accepted")), _format_number(entries["difference"])
    return f"{accepted} accepted = {outcomes}, difference {difference}"


def _format_number(number: int | None) -> str:
    return "unknown" if number is None else str(number)


def _read_quantiles(figures: MetricsSnapshot, name: str, label: str) -> dict[str, dict[str, float]]:
    """Median and 95th percentile since the daemon's start, by label."""
    found = figures.quantiles(name, label, 0.5, 0.95)
    return {value: {"p50": round(half, 6), "p95": round(most, 6)} for value, (half, most) in found.items()}


def _format_counter(counter: dict[str, Any]) -> str:
    rate = counter.get("per_second")
    return f"{counter['total']}" if rate is None else f"{counter['total']}, {rate:.1f}/s"


def _format_quantiles(shares: dict[str, float]) -> str:
    return f"p50 {_format_span(shares['p50'])}, p95 {_format_span(shares['p95'])}"


def _format_span(seconds: float) -> str:
    for unit, size, most in (("ms", 0.001, 1), ("s", 1, 120), ("min", 60, 7200)):
        if seconds < most:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 3600:.1f} h"


class _IntervalRange(click.FloatRange):
    """A number of seconds."""

    name = "seconds"


@click.command()
@url_option(default=LOCAL_URL, show_default=True, help="URL of the mediator.")
@click.option(
    "--watch",
    metavar="[SECONDS]",
    type=_IntervalRange(0.1, 3600),
    is_flag=False,
    flag_value=2.0,
    help="Repeat every SECONDS, by default 2, until Ctrl-C.",
)
@click.option(
    "--over",
    metavar="SECONDS",
    type=_IntervalRange(0, 3600),
    default=1.0,
    show_default=True,
    help="Sampling interval for rates; 0 turns them off.",
)
@ca_option
@json_option
def status(url: str, watch: float | None, over: float, as_json: bool) -> int:
    """
    Show the status of a running mediator. Exits with 1 if it is not healthy, or its ledger does not balance.

    Rates are measured between two samples; counters and quantiles of delivery and response times are since the start
    of the daemon. Queues and ledger are of one moment, whose age is shown; the ledger is since the store was created.
    """
    if watch is not None:
        return _watch_status(url, watch, as_json)
    first = take_sample(url)
    report = StatusReport(first)
    if over and not isinstance(first.figures, str):
        sleep(over)
        report = StatusReport(take_sample(url), first)
    if as_json or not sys.stdout.isatty():
        print_result(as_json, report.values(), _format_rows(report.rows()))
    else:
        from rich.console import Console

        Console().print(_make_table(url, report))
    return 0 if report.healthy else 1


def _watch_status(url: str, seconds: float, as_json: bool) -> int:
    """Repeat until interrupted."""
    try:
        if as_json or not sys.stdout.isatty():
            for report in _take_reports(url, seconds):
                print_result(as_json, report.values(), _format_rows(report.rows()) + "\n")
                sys.stdout.flush()
        else:
            _draw_live(url, seconds)
    except KeyboardInterrupt:
        pass
    return 0


def _take_reports(url: str, seconds: float) -> Iterator[StatusReport]:
    before: StatusSample | None = None
    while True:
        now = take_sample_or_failure(url)
        yield StatusReport(now, before)
        before = now
        sleep(seconds)


def _draw_live(url: str, seconds: float) -> None:
    """Update one table in place."""
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for report in _take_reports(url, seconds):
            live.update(_make_table(url, report), refresh=True)


def _make_table(url: str, report: StatusReport) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, title=Text(url, style="bold"), title_justify="left", pad_edge=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for place, (name, value) in enumerate(report.rows()):
        style = "" if place else "green" if report.healthy else "red"
        table.add_row(Text(escape_control_characters(name)), Text(escape_control_characters(value), style=style))
    return table


def _format_rows(rows: list[ReportRow]) -> str:
    """Two columns."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(escape_control_characters(f"{name:{width}}  {value}") for name, value in rows)
