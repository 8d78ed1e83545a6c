"""Sections on messages and requests: losses, traffic, latency, queues, errors, rate limits, replays."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from statistics import median
from typing import NamedTuple

from analytics.report.charts import (
    BAD_COLOUR,
    FIRST_COLOUR,
    SECOND_COLOUR,
    THIRD_COLOUR,
    ChartLine,
    make_cumulative_chart,
    make_daily_chart,
    make_hourly_chart,
)
from analytics.report.content import (
    FEW_LABEL,
    NO_VALUE,
    Chart,
    Figure,
    Normal,
    ReportColumn,
    ReportData,
    ReportTable,
    Row,
    Section,
    find_normal,
    format_count,
    format_days,
    format_duration,
    format_party_count,
    format_plural,
    format_share,
    format_size,
    format_text,
    is_operator,
    limit_rows,
)
from analytics.sql_functions import BUCKET_BASE

_CHART_DAYS = 28
_DELIVERY_PATHS = {
    "live": ("live", FIRST_COLOUR),
    "pickup": ("pickup", SECOND_COLOUR),
    "poll": ("poll", THIRD_COLOUR),
}


_STATE_LABELS = {"acked": "acknowledged"}


def format_class(name: str) -> str:
    """A class without its sort digit: `<1h`."""
    return format_text(name.partition(" ")[2] or name)


class LostMessages(NamedTuple):
    """
    Messages that expired or were evicted before they were acknowledged.

    :param accepted: with a logged acceptance.
    :param unaccepted: without one.
    """

    accepted: int
    unaccepted: int

    @property
    def total(self) -> int:
        """All lost messages."""
        return self.accepted + self.unaccepted


_REMOVED_REASON = "purged"


def select_lost_rows(data: ReportData) -> list[Row]:
    """Rows of lost_daily without what owners or operators removed."""
    return [row for row in data.get_rows("lost_daily") if row["reason"] != _REMOVED_REASON]


def count_lost_messages(data: ReportData) -> LostMessages:
    """Count messages lost on the day."""
    accepted = sum(data.sum_column("ledger_daily", ending) for ending in ("expired", "evicted"))
    return LostMessages(accepted, data.sum_column("ledger_daily", "lost_unaccepted"))


def make_lost_normal(data: ReportData) -> Normal:
    """Normal number of lost messages."""
    return make_ledger_normal(data, "expired", "evicted", "lost_unaccepted")


def make_ledger_normal(data: ReportData, *entries: str) -> Normal:
    """Normal sum of these entries of the message ledger."""
    sums = {row["dt"]: sum(row[entry] or 0 for entry in entries) for row in data.rows["ledger_daily"]}
    return find_normal(sums, data.day, format_count)


def make_lost_section(data: ReportData) -> Section:
    """Messages that were not delivered."""
    rows = select_lost_rows(data)
    lost = count_lost_messages(data)
    total = lost.total
    pushed = sum(row["n"] for row in rows if row["pushed"])
    bytes_lost = sum(row["bytes"] or 0 for row in rows)
    ledger = data.get_row("ledger_daily")
    accepted, removed = ledger.get("accepted"), ledger.get("removed")
    of_accepted = total / accepted if accepted else None
    figures = [
        Figure(
            "messages_lost",
            "Messages lost",
            total,
            format_count(total),
            "Expired or evicted on the day before they were acknowledged: the sum of the next two.",
            "warn" if total else "good",
            make_lost_normal(data),
        ),
        Figure(
            "messages_lost_accepted",
            "Lost, acceptance logged",
            lost.accepted,
            format_count(lost.accepted),
            "Lost messages whose acceptance is in the logs.",
        ),
        Figure(
            "messages_lost_unaccepted",
            "Lost, acceptance not logged",
            lost.unaccepted,
            format_count(lost.unaccepted),
            "Lost messages whose acceptance is not in the logs: lines are missing, or the messages are older.",
        ),
        Figure(
            "lost_share",
            "Lost per accepted message",
            of_accepted,
            format_share(of_accepted),
            "Messages lost on the day divided by those accepted; most lost messages were accepted earlier.",
        ),
        Figure(
            "messages_pushed_and_lost",
            "Pushed, then lost",
            pushed,
            format_count(pushed),
            "Pushed to a recipient and never acknowledged: the wallet does not acknowledge, or its socket was dead.",
        ),
        Figure("bytes_lost", "Bytes lost", bytes_lost, format_size(bytes_lost), "Payload bytes of these messages."),
        Figure(
            "messages_removed",
            "Removed by owner or operator",
            removed,
            format_count(removed),
            "By mediatord queue purge or accounts remove, or as a v1 wallet hung up. Not lost, so omitted otherwise.",
            normal=make_ledger_normal(data, "removed"),
        ),
    ]
    columns = [
        ReportColumn("reason", "Reason", format_text, number=False),
        ReportColumn("age_class", "Age", format_class, number=False),
        ReportColumn("size_class", "Size", format_class, number=False),
        ReportColumn("pushed", "Pushed", _format_yes_no, number=False),
        ReportColumn("n", "Messages", format_count),
        ReportColumn("bytes", "Bytes", format_size),
    ]
    grids = [_make_reason_table(rows)] if rows else []
    shown = rows[: data.settings.top]
    note = "" if rows else "No lost message has a logged acceptance." if total else "No messages were lost."
    if rows and lost.unaccepted:
        note = f"Excluding {format_plural(lost.unaccepted, 'message')} without a logged acceptance."
    grids.append(ReportTable("Lost messages by reason, age and size", columns, shown, "lost_daily", note))
    return Section(
        "lost",
        "Lost messages",
        "Messages that expired or were evicted before they were acknowledged. Reasons: ttl, the message expired; "
        "fifo_count and fifo_bytes, the queue was full and its oldest message was evicted.",
        figures,
        _make_daily_charts(data, "lost-days", "Messages lost by day", "messages_lost", BAD_COLOUR),
        grids,
    )


def _format_yes_no(value: bool | None) -> str:
    return "yes" if value else "no"


def _make_reason_table(rows: Sequence[Row]) -> ReportTable:
    totals = Counter[str]()
    for row in rows:
        totals[row["reason"]] += row["n"]
    columns = [
        ReportColumn("reason", "Reason", format_text, number=False),
        ReportColumn("n", "Messages", format_count),
    ]
    return ReportTable(
        "Lost messages by reason", columns, [{"reason": name, "n": n} for name, n in totals.most_common()]
    )


def _make_daily_charts(data: ReportData, name: str, title: str, metric: str, colour: str) -> list[Chart]:
    past = data.get_past_days(metric)
    first = data.day - timedelta(_CHART_DAYS)
    values = {float((day - first).days): value for day, value in past.items() if day >= first}
    if len(values) < 2:
        return []
    description = f"{title}, last {len(values)} days. {format_count(past.get(data.day))} on {data.day}."
    return [
        make_daily_chart(
            name, title, description, [ChartLine(title, values, colour, filled=True)], format_count, first
        )
    ]


def compute_usual_hours(data: ReportData, metric: str) -> dict[float, float]:
    """Median of the same weekday in the four weeks before, by hour."""
    samples = defaultdict[float, list[float]](list)
    for row in data.rows["series_hourly"]:
        if row["metric"] == metric and row["dt"] < data.day and (data.day - row["dt"]).days % 7 == 0:
            samples[row["hour"]].append(row["value"])
    return {hour: median(values) for hour, values in samples.items()}


def make_usual_charts(
    data: ReportData, name: str, title: str, metric: str, format: Callable[[float], str], log: bool = False
) -> list[Chart]:
    """The day by hour, and the usual values of that weekday; no chart without data."""
    values = {float(hour): value for hour, value in data.get_hours(metric).items()}
    if not values:
        return []
    lines = [ChartLine("this day", values, filled=not log)]
    before = compute_usual_hours(data, metric)
    if before:
        lines.append(ChartLine(f"usual {data.day:%A}", before, SECOND_COLOUR, faint=True))
    top = max(values, key=lambda hour: values[hour])
    description = f"{title} on {data.day}; maximum {format(values[top])} in the hour from {int(top):02}:00 UTC."
    return [make_hourly_chart(name, title, description, lines, format, log)]


def make_volume_figures(data: ReportData) -> list[Figure]:
    """Messages accepted and acknowledged, by the message ledger."""
    ledger = data.get_row("ledger_daily")
    figures = (
        ("accepted", "messages_accepted", "Messages accepted", "Accepted from senders on the day"),
        ("acked", "messages_acknowledged", "Messages acknowledged", "Acknowledged by their recipients on the day"),
    )
    return [
        Figure(
            key,
            label,
            ledger.get(entry),
            format_count(ledger.get(entry)),
            f"{meaning}, by the log; each message once.",
            normal=make_ledger_normal(data, entry),
            section="traffic",
        )
        for entry, key, label, meaning in figures
    ]


def make_traffic_section(data: ReportData) -> Section:
    """Volume of traffic."""
    rows = [row for row in data.get_rows("traffic_daily") if not is_operator(row["node"])]
    requests = sum(row["n"] for row in rows if row["event"] == "req.done")
    carried = sum(row["bytes"] or 0 for row in rows if row["event"] == "msg.accept")
    figures = [
        *make_volume_figures(data),
        Figure(
            "bytes_accepted",
            "Bytes accepted",
            carried,
            format_size(carried),
            "Payloads of the accepted messages.",
            normal=data.get_normal("bytes_accepted"),
        ),
        Figure(
            "requests",
            "Requests",
            requests,
            format_count(requests),
            "HTTP requests and WebSocket frames.",
            normal=data.get_normal("requests"),
        ),
    ]
    charts = [
        *make_usual_charts(data, "accepted-hours", "Messages accepted by hour", "messages_accepted", format_count),
        *make_usual_charts(
            data, "acknowledged-hours", "Messages acknowledged by hour", "messages_acknowledged", format_count
        ),
        *_make_daily_charts(data, "accepted-days", "Messages accepted by day", "messages_accepted", FIRST_COLOUR),
        *make_usual_charts(data, "requests-hours", "Requests by hour", "requests", format_count),
    ]
    columns = [
        ReportColumn("node", "Node", format_text, number=False),
        ReportColumn("proto", "Protocol", format_text, number=False),
        ReportColumn("event", "Event", format_text, number=False),
        ReportColumn("n", "Number", format_count),
        ReportColumn("bytes", "Bytes", format_size),
    ]
    return Section(
        "traffic",
        "Traffic",
        "Traffic of the day; the charts compare it with the usual values of that weekday.",
        figures,
        charts,
        [_make_state_table(data), ReportTable("Events by node and protocol", columns, rows[:40], "traffic_daily")],
    )


def _make_state_table(data: ReportData) -> ReportTable:
    totals: dict[str, Row] = {}
    for row in data.get_rows("messages_daily"):
        total = totals.setdefault(row["state"], {"state": row["state"], "n": 0, "bytes": 0})
        total["n"] += row["n"]
        total["bytes"] += row["bytes"] or 0
    columns = [
        ReportColumn("state", "Outcome", format_text, number=False),
        ReportColumn("n", "Number", format_count),
        ReportColumn("bytes", "Bytes", format_size),
    ]
    for total in totals.values():
        total["state"] = _STATE_LABELS.get(total["state"], total["state"])
    rows = sorted(totals.values(), key=lambda row: row["state"])
    return ReportTable("Messages by outcome", columns, rows, "messages_daily")


def make_latency_section(data: ReportData) -> Section:
    """Latency by delivery path."""
    rows = [row for row in data.get_rows("latency_daily") if row["node"] == "*"]
    by = {(row["metric"], row["path"]): row for row in rows}
    figures = [
        replace(
            _make_p95_figure(by, "push", "live", "Live push", "From acceptance to the push on an open socket"),
            normal=data.get_normal("latency_live_p95_ms"),
        ),
        _make_p95_figure(by, "push", "pickup", "Pickup", "From acceptance to pickup by the recipient"),
        _make_p95_figure(by, "ack", "*", "Acknowledged", "From acceptance to acknowledgement by the recipient"),
        _make_p95_figure(by, "request", "*", "Requests", "From request to response"),
    ]
    order = {"push": 0, "ack": 1, "request": 2}
    format = {"push": "pushed or fetched", "ack": "acknowledged", "request": "response"}
    table = [
        row
        | {"metric": format.get(row["metric"], row["metric"]), "path": "all" if row["path"] == "*" else row["path"]}
        for row in sorted(rows, key=lambda row: (order.get(row["metric"], 3), row["path"]))
    ]
    columns = [
        ReportColumn("metric", "Until", format_text, number=False),
        ReportColumn("path", "Path", format_text, number=False),
        ReportColumn("n", "Number", format_count),
        *(ReportColumn(f"{name}_ms", name, format_duration) for name in ("p50", "p90", "p95", "p99")),
        ReportColumn("max_ms", "maximum", format_duration),
    ]
    note = "p95: 95 of 100 took at most this long."
    return Section(
        "latency",
        "Latency",
        "Times from acceptance to push, fetch and acknowledgement. Live: the recipient was connected. Pickup and "
        "poll: the recipient connected later, and the time includes its absence.",
        figures,
        [*_make_distribution_charts(data), *_make_latency_charts(data)],
        [ReportTable("Durations, all nodes", columns, table, "latency_daily", note)],
    )


def _make_p95_figure(by: dict[tuple[str, str], Row], metric: str, path: str, label: str, meaning: str) -> Figure:
    value = by.get((metric, path), {}).get("p95_ms")
    key = f"{metric}_{'all' if path == '*' else path}_p95_ms"
    return Figure(
        key, f"{label}, p95", value, format_duration(value), f"{meaning}; 95 of 100 took at most this long."
    )


def _make_distribution_charts(data: ReportData) -> list[Chart]:
    lines = []
    for path, (label, colour) in _DELIVERY_PATHS.items():
        buckets = {
            row["bucket"]: row["n"]
            for row in data.get_rows("latency_hist")
            if row["metric"] == "push" and row["path"] == path
        }
        total, so_far, shares = sum(buckets.values()), 0, {}
        for bucket in sorted(buckets):
            so_far += buckets[bucket]
            shares[max(1.0, BUCKET_BASE ** (bucket + 1))] = so_far / total
        if shares:
            lines.append(ChartLine(label, {1.0: 0.0, **shares} if 1.0 not in shares else shares, colour))
    title = "Pushed or fetched within"
    description = (
        "Share of messages pushed or fetched within a time since acceptance, by path; logarithmic time axis."
    )
    return [make_cumulative_chart("latency-shares", title, description, lines)] if lines else []


def _make_latency_charts(data: ReportData) -> list[Chart]:
    metrics = {
        "live": ("latency_live_p95_ms", FIRST_COLOUR),
        "pickup or poll": ("latency_pickup_p95_ms", SECOND_COLOUR),
    }
    lines = [
        ChartLine(label, {float(hour): value for hour, value in data.get_hours(metric).items()}, colour)
        for label, (metric, colour) in metrics.items()
    ]
    lines = [line for line in lines if line.values]
    title = "95th percentile by hour"
    description = f"95th percentile of the time from acceptance to push or fetch, by hour on {data.day}; logarithmic."
    return [make_hourly_chart("latency-hours", title, description, lines, format_duration, log=True)] if lines else []


def make_queues_section(data: ReportData) -> Section:
    """Sizes of queues, and those at risk."""
    hours = data.get_rows("queue_hourly")

    def most(column: str) -> float | None:
        return max((row[column] for row in hours if row[column] is not None), default=None)

    figures = [
        Figure(
            "depth_max",
            "Queued messages, maximum",
            most("depth_max"),
            format_count(most("depth_max")),
            "In all queues, sampled every minute.",
            normal=data.get_normal("depth_max"),
        ),
        Figure(
            "queue_bytes_max",
            "Queued bytes, maximum",
            most("bytes_max"),
            format_size(most("bytes_max")),
            "Payload bytes of queued messages.",
            normal=data.get_normal("queue_bytes_max"),
        ),
        Figure(
            "oldest_ms_max",
            "Oldest message",
            most("oldest_ms_max"),
            format_duration(most("oldest_ms_max")),
            "Age of the oldest queued message.",
        ),
        Figure(
            "lag_ms_max",
            "Reactor lag, maximum",
            most("lag_ms_max"),
            format_duration(most("lag_ms_max")),
            "Longest delay of timed calls in a node's event loop; all its connections wait that long.",
            normal=data.get_normal("lag_ms_max"),
        ),
    ]
    capacity = data.settings.queue_max_messages
    columns = [
        ReportColumn("rank", "Rank", format_count),
        ReportColumn("rcpt", "Recipient (pseudonym)", format_text, number=False),
        ReportColumn("waiting", "Queued", format_count),
        ReportColumn("bytes", "Bytes", format_size),
        ReportColumn("per_day", "Growth per day", format_count),
        ReportColumn("days_to_cap", f"Until {capacity:,} messages", format_days),
        ReportColumn("days_to_ttl", "Until first expiry", format_days),
    ]
    rows, note = limit_rows(data.get_rows("queue_risk"), data.settings.top, "queue_risk")
    return Section(
        "queues",
        "Queues and risk",
        "Messages are queued for absent recipients. A full queue evicts its oldest message for each new one.",
        figures,
        make_usual_charts(data, "depth-hours", "Queued messages by hour, maximum", "depth_max", format_count),
        [ReportTable("Queues at risk of loss", columns, rows, "queue_risk", note)],
    )


def make_errors_section(data: ReportData) -> Section:
    """Errors by code."""
    rows = data.get_rows("errors_daily")
    refused = sum(row["n"] for row in rows)
    part = sum(row["share"] or 0 for row in rows)
    new = sorted({row["code"] or f"status {row['status']}" for row in rows if row["is_new"]})
    figures = [
        Figure(
            "requests_refused",
            "Refused or failed",
            refused,
            format_count(refused),
            "Requests and frames with an error code or a status of 400 or above.",
            normal=data.get_normal("requests_refused"),
        ),
        Figure(
            "error_share",
            "Share of all requests",
            part,
            format_share(part),
            "Refused or failed requests divided by all requests.",
            normal=data.get_normal("error_share"),
        ),
        Figure(
            "new_codes",
            "New codes",
            len(new),
            format_count(len(new)),
            "Codes not seen on any earlier day; highlighted below.",
            "warn" if new else "plain",
        ),
    ]
    shown, note = limit_rows(rows, data.settings.top, "errors_daily")
    columns = [
        ReportColumn("code", "Code", format_text, number=False),
        ReportColumn("is_new", "New", lambda new: "new" if new else "", number=False),
        ReportColumn("status", "Status", lambda status: str(status or NO_VALUE)),
        ReportColumn("proto", "Protocol", format_text, number=False),
        ReportColumn("mtype", "Message type or command", format_text, number=False),
        ReportColumn("n", "Number", format_count),
        ReportColumn("senders", "Senders", format_party_count),
        ReportColumn("share", "Of all requests", format_share),
    ]
    senders = [
        ReportColumn("rank", "Rank", format_count),
        ReportColumn("sender", "Sender (pseudonym)", format_text, number=False),
        ReportColumn("n", "Refusals", format_count),
        ReportColumn("codes", "Codes", format_count),
        ReportColumn("worst", "Most frequent code", format_text, number=False),
    ]
    marked = frozenset(index for index, row in enumerate(shown) if row["is_new"])
    return Section(
        "errors",
        "Errors by code",
        "Codes are listed in the protocol reference (docs/reference/protocols.md).",
        figures,
        make_usual_charts(
            data, "refused-hours", "Requests refused or failed by hour", "requests_refused", format_count
        ),
        [
            ReportTable("Errors", columns, shown, "errors_daily", note, marked),
            ReportTable("Senders with the most refusals", senders, data.get_rows("error_senders"), "error_senders"),
        ],
    )


def make_limits_section(data: ReportData) -> Section:
    """Hits on rate limits."""
    rows = data.get_rows("limits_daily")
    hits = sum(row["hits"] for row in rows)
    longest = max((row["longest_burst_s"] or 0 for row in rows), default=0)
    figures = [
        Figure(
            "limit_hits",
            "Rate-limit hits",
            hits,
            format_count(hits),
            "Requests refused by a rate limit.",
            normal=data.get_normal("limit_hits"),
        ),
        Figure(
            "longest_burst_s",
            "Longest burst",
            longest,
            format_duration(longest * 1000),
            f"Longest series of hits by one party without a pause of {data.settings.burst_gap_s} s.",
        ),
    ]
    columns = [
        ReportColumn("limit", "Limit", format_text, number=False),
        ReportColumn("hits", "Hits", format_count),
        ReportColumn("who_n", "Parties", format_party_count),
        ReportColumn("bursts", "Bursts", format_count),
        ReportColumn("longest_burst_s", "Longest burst", lambda s: format_duration(None if s is None else s * 1000)),
        ReportColumn("share", "Of all senders", lambda value: FEW_LABEL if value is None else format_share(value)),
    ]
    parties = [
        ReportColumn("rank", "Rank", format_count),
        ReportColumn("who", "Party (pseudonym)", format_text, number=False),
        ReportColumn("limit", "Limit", format_text, number=False),
        ReportColumn("hits", "Hits", format_count),
        ReportColumn("bursts", "Bursts", format_count),
    ]
    charts = (
        make_usual_charts(data, "limit-hours", "Rate-limit hits by hour", "limit_hits", format_count) if hits else []
    )
    return Section(
        "limits",
        "Rate limits",
        "Many hits by one party suggest abuse or a faulty wallet; hits by many parties, a limit that is too low.",
        figures,
        charts,
        [
            ReportTable("Limits", columns, rows, "limits_daily", "" if rows else "No limits were hit."),
            ReportTable("Parties with the most hits", parties, data.get_rows("limits_top"), "limits_top"),
        ],
    )


def make_replay_section(data: ReportData) -> Section:
    """Replayed and untimely requests."""
    rows = data.get_rows("replay_daily")
    total = sum(row["n"] for row in rows)
    skewed = sum(row["n"] for row in rows if row["age_class"] == "skew")
    figures = [
        Figure(
            "replays",
            "Replayed or untimely",
            total,
            format_count(total),
            "Requests refused as replays or outside the time window.",
            normal=data.get_normal("replays"),
        ),
        Figure(
            "replays_by_skew",
            "Probable clock skew",
            skewed,
            format_count(skewed),
            "Timestamps five to ten minutes early or late.",
        ),
    ]
    columns = [
        ReportColumn("code", "Code", format_text, number=False),
        ReportColumn("age_class", "Age by timestamp", format_class, number=False),
        ReportColumn("n", "Number", format_count),
        ReportColumn("senders", "Senders", format_party_count),
        ReportColumn("on_nodes", "On several nodes", format_party_count),
    ]
    note = "" if rows else "No replays."
    return Section(
        "replay",
        "Replayed and untimely requests",
        "A repeated request is a retry or an attack; the same request on several nodes is rarely a retry.",
        figures,
        grids=[ReportTable("By code and age", columns, rows, "replay_daily", note)],
    )
