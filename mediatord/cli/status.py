"""`mediatord status`: a report from `/health`, `/ready` and `/metrics` of a running mediator."""

from __future__ import annotations

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
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
from mediatord.observability.push_statistics import read_push_statistics
from mediatord.runtime.option_types import NumberRange
from mediatord.runtime.progress_bar import progress_bar

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

    def of(self, name: str) -> list[Sample]:
        """Series of this name."""
        return [sample for sample in self.samples if sample.name == name]

    def sum(self, name: str) -> float:
        """Sum of the series of this name."""
        return sum(sample.value for sample in self.of(name))

    def quantiles(self, name: str, label: str) -> dict[str, dict[str, float]]:
        """
        Median and 95th percentile of a histogram by the value of a label, estimated as by Prometheus.

        :param name: without `_bucket`.
        """
        buckets: defaultdict[str, Counter[float]] = defaultdict(Counter)
        for sample in self.of(f"{name}_bucket"):
            buckets[sample.labels.get(label, "")][float(sample.labels["le"])] += sample.value  # type: ignore[assignment]
        return {
            value: {
                quantile: round(_estimate_quantile(sorted(counts.items()), share), 6)
                for quantile, share in (("p50", 0.5), ("p95", 0.95))
            }
            for value, counts in sorted(buckets.items())
            if counts[inf]
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
    code, body, _ = _fetch(f"{url}/health")
    health = _parse_health(code, body)
    if health is None:
        raise MediatorUnreachable(f"{url}/health: not a mediatord response (HTTP {code})")
    code, body, _ = _fetch(f"{url}/ready")
    ready = None if code == 404 else _parse_health(code, body) or HealthState(False, f"HTTP {code}")
    code, body, date = _fetch(f"{url}/metrics")
    if code != 200:
        return StatusSample(health, ready, f"hidden from this address (HTTP {code}), by metrics.allow or a proxy")
    try:
        families = list(text_string_to_metric_families(body))
    except ValueError:
        return StatusSample(health, ready, "invalid response")
    samples = tuple(sample for family in families for sample in family.samples)
    return StatusSample(health, ready, MetricsSnapshot(monotonic(), samples, date))


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
    try:
        try:
            response = build_opener(ProxyHandler({})).open(url, timeout=_TIMEOUT_SECONDS)
        except HTTPError as error:
            response = error
        with response:
            body = response.read().decode("utf-8", "replace")
    except HTTPException:
        raise MediatorUnreachable(f"{url}: invalid or incomplete HTTP response") from None
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        raise MediatorUnreachable(f"{url}: {getattr(reason, 'strerror', None) or reason}") from None
    date = None
    with suppress(ValueError):
        date = parsedate_to_datetime(response.headers.get("Date", "")).timestamp()
    return response.status, body, date


_QUEUE_SIZE_METRIC = "mediator_message_queue_size"
_DIFFERENCE_METRIC = "mediator_ledger_difference"
_MESSAGE_COUNTERS = ("forwarded", "stored", "delivered", "expired", "evicted")
# Outcomes of accepted messages, in the order of the report.
_LEDGER_OUTCOMES = ("acknowledged", "waiting", "expired", "evicted", "removed", "withdrawn")
_MAX_REASONS = 6
_OTHER_LABEL = "other"

ReportRow = tuple[str, str]


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
        return {**found, **_read_origin(figures), **self._read_amounts(figures)}

    def _read_amounts(self, figures: MetricsSnapshot) -> dict[str, Any]:
        queues = figures.of(_QUEUE_SIZE_METRIC)
        longest = max((one.value for one in queues if one.labels.get("did") != _OTHER_LABEL), default=0.0)
        reasons: Counter[str] = Counter()
        for sample in figures.of("mediator_rejected_total"):
            reasons[sample.labels.get("reason", "")] += int(sample.value)
        return {
            "storage": "up" if figures.sum("mediator_storage_up") else "down",
            "connections": int(figures.sum("mediator_active_connections")),
            "waiting": {"messages": int(figures.sum(_QUEUE_SIZE_METRIC)), "longest_queue": int(longest)},
            **_read_ledger(figures),
            "messages": {name: self._read_counter(f"mediator_messages_{name}_total") for name in _MESSAGE_COUNTERS},
            "requests": self._read_counter("mediator_requests_total"),
            "refused": {**self._read_counter("mediator_rejected_total"), "reasons": dict(+reasons)},
            "delivery_seconds": figures.quantiles("mediator_delivery_latency_seconds", "method"),
            "request_seconds": figures.quantiles("mediator_request_duration_seconds", "protocol"),
            **_read_push(figures),
            **_read_v1_connections(figures),
        }

    def _read_counter(self, name: str) -> dict[str, Any]:
        """The total, and the rate between the two samples if there are two."""
        now, before = self.now.figures, self.before.figures if self.before else ""
        assert isinstance(now, MetricsSnapshot)
        total = now.sum(name)
        if isinstance(before, str) or now.at <= before.at or total < before.sum(name):
            return {"total": int(total)}
        return {"total": int(total), "per_second": round((total - before.sum(name)) / (now.at - before.at), 3)}

    def rows(self) -> list[ReportRow]:
        """For the terminal: names and values."""
        values = self.values()
        shown = ("status", "ready", "metrics", "version", "node", "storage", "nodes")
        rows: list[ReportRow] = [(name, str(values[name])) for name in shown if name in values]
        if "ready_age_seconds" in values:
            rows[1] = ("ready", f"{values['ready']}, tried {_format_span(values['ready_age_seconds'])} ago")
        if "workers" in values:
            rows.append(("workers", f"{values['workers']['answered']} of {values['workers']['asked']} respond"))
        return [*rows, *_format_amounts(values)] if "messages" in values else rows


def _read_origin(figures: MetricsSnapshot) -> dict[str, Any]:
    """Version, node, number of processes; time of all figures, and time of those of queues and ledger."""
    labels = next((one.labels for one in figures.of("mediator_build_info")), {})
    found: dict[str, Any] = {"version": labels.get("version", "unknown")}
    if "node" in labels:
        found["node"] = labels["node"]
    if nodes := figures.sum("mediator_cluster_nodes"):
        found["nodes"] = int(nodes)
    if asked := figures.sum("mediator_workers"):
        found["workers"] = {"asked": int(asked), "answered": int(figures.sum("mediator_workers_answered"))}
    now = datetime.now(UTC).timestamp() if figures.date is None else figures.date
    found["figures_at"] = round(now, 3)
    for one in figures.of("mediator_store_statistics_timestamp_seconds"):
        # A date has whole seconds.
        found |= {"store_at": round(one.value, 3), "store_age_seconds": max(0, int(now - one.value))}
    return found


def _read_ledger(figures: MetricsSnapshot) -> dict[str, Any]:
    """The store's ledger by protocol; empty before it was read."""
    protocols: dict[str, dict[str, int | None]] = {}
    for sample in (*figures.of("mediator_ledger_messages"), *figures.of(_DIFFERENCE_METRIC)):
        entries = protocols.setdefault(sample.labels.get("protocol", ""), {"waiting": None, "difference": None})
        entries[sample.labels.get("entry", "difference")] = int(sample.value)
    return {"ledger": dict(sorted(protocols.items(), reverse=True))} if protocols else {}


def _read_push(figures: MetricsSnapshot) -> dict[str, Any]:
    """The configured push services by name; empty if there are none."""
    services = {
        one.service: {
            name: number for name, number in asdict(one).items() if name != "service" and number is not None
        }
        for one in read_push_statistics(figures.samples)
    }
    return {"push": services} if services else {}


def _read_v1_connections(figures: MetricsSnapshot) -> dict[str, Any]:
    """Number of connections of DIDComm v1 by state; empty before they were counted."""
    states = {one.labels.get("state", ""): int(one.value) for one in figures.of("mediator_v1_connections")}
    return {"v1_connections": states} if states else {}


def _format_amounts(values: dict[str, Any]) -> Iterator[ReportRow]:
    yield "as of", _format_time_of_day(values["figures_at"])
    yield "connections", str(values["connections"])
    if "store_at" in values:
        yield "store as of", f"{_format_time_of_day(values['store_at'])}, {values['store_age_seconds']} s ago"
    waiting = values["waiting"]
    yield "waiting", f"{waiting['messages']} messages, {waiting['longest_queue']} in the longest queue"
    for protocol, entries in values.get("ledger", {}).items():
        known = {name: "unknown" if number is None else number for name, number in entries.items()}
        outcomes = " + ".join(f"{known.get(name, 'unknown')} {name}" for name in _LEDGER_OUTCOMES)
        accepted = known.get("accepted", "unknown")
        yield f"ledger {protocol}", f"{accepted} accepted = {outcomes}, difference {known['difference']}"
    for name, counter in {**values["messages"], "requests": values["requests"], "refused": values["refused"]}.items():
        rate = f", {counter['per_second']:.1f}/s" if "per_second" in counter else ""
        yield name, f"{counter['total']}{rate}"
    reasons = sorted(values["refused"]["reasons"].items(), key=lambda one: -one[1])
    for reason, number in reasons[:_MAX_REASONS]:
        yield f"  {reason}", str(number)
    for what, quantiles in (("delivery", values["delivery_seconds"]), ("response", values["request_seconds"])):
        for label, shares in quantiles.items():
            yield f"{what} {label}", f"p50 {_format_span(shares['p50'])}, p95 {_format_span(shares['p95'])}"
    yield from _format_v1_and_push(values)


def _format_v1_and_push(values: dict[str, Any]) -> Iterator[ReportRow]:
    if "v1_connections" in values:
        states = values["v1_connections"]
        yield "v1 wallets", f"{states.get('account', 0)} with an account, {states.get('pending', 0)} pending"
    for service, numbers in values.get("push", {}).items():
        yield f"push {service}", ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in numbers.items())


def _format_time_of_day(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%H:%M:%S} UTC"


def _format_span(seconds: float) -> str:
    for unit, size, most in (("ms", 0.001, 1), ("s", 1, 120), ("min", 60, 7200)):
        if seconds < most:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds / 3600:.1f} h"


@click.command()
@url_option(default=LOCAL_URL, show_default=True, help="URL of the mediator.")
@click.option(
    "--watch",
    metavar="[SECONDS]",
    type=NumberRange(0.1, 3600),
    is_flag=False,
    flag_value=2.0,
    help="Repeat every SECONDS (default: 2) until Ctrl-C.",
)
@click.option(
    "--over",
    metavar="SECONDS",
    type=NumberRange(0, 3600),
    default=1.0,
    show_default=True,
    help="Sampling interval for rates; 0: no rates.",
)
@ca_option
@json_option
def status(url: str, watch: float | None, over: float, as_json: bool) -> int:
    """
    Show the status of a running mediator. Exits with 1 if it is unhealthy or its ledger does not balance.

    Rates are measured between two samples. Counters and quantiles count from the start of the daemon, the ledger from
    the creation of the store. Queues and ledger come from one read of the store; its age is shown.
    """
    if watch is not None:
        with suppress(KeyboardInterrupt):
            _watch_status(url, watch, as_json)
        return 0
    with progress_bar("querying", delay=over + 1):  # it always waits between the samples
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


def _watch_status(url: str, seconds: float, as_json: bool) -> None:
    """Print reports; on a terminal one table that is updated in place."""
    if as_json or not sys.stdout.isatty():
        for report in _take_reports(url, seconds):
            print_result(as_json, report.values(), _format_rows(report.rows()) + "\n")
            sys.stdout.flush()
        return
    from rich.live import Live

    with Live(auto_refresh=False) as live:
        for report in _take_reports(url, seconds):
            live.update(_make_table(url, report), refresh=True)


def _take_reports(url: str, seconds: float) -> Iterator[StatusReport]:
    """Reports without an end; an unreachable mediator is reported as its state."""
    before: StatusSample | None = None
    while True:
        try:
            now = take_sample(url)
        except MediatorUnreachable as error:
            now = StatusSample(HealthState(False, f"unreachable: {error}"), None, "unknown")
        yield StatusReport(now, before)
        before = now
        sleep(seconds)


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
