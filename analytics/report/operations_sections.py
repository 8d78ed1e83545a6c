"""Sections on sockets, push notifications, nodes, cost, senders and recipients, anomalies and the forecast."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import date
from typing import NamedTuple

from analytics.jobs.time_series import METRICS, MIN_HISTORY_DAYS
from analytics.jobs.traffic_and_latency import ALL_VALUES
from analytics.report.charts import FIRST_COLOUR, ChartLine, make_forecast_chart, make_hourly_chart
from analytics.report.content import (
    NO_VALUE,
    Chart,
    Figure,
    ReportColumn,
    ReportData,
    ReportTable,
    Row,
    Section,
    format_count,
    format_duration,
    format_party_count,
    format_plural,
    format_share,
    format_size,
    format_text,
    get_formatter,
    is_operator,
    limit_rows,
)
from analytics.report.message_sections import format_class


def make_sessions_section(data: ReportData) -> Section:
    """Sockets: number, duration, close codes."""
    sockets = data.get_rows("sockets_daily")
    opened, unclosed, storms = (
        data.sum_column("sockets_daily", name) for name in ("opened", "unclosed", "storm_minutes")
    )
    peak = data.get_past_days("connections_peak").get(data.day)
    figures = [
        Figure(
            "sockets_opened",
            "Sockets opened",
            opened,
            format_count(opened),
            "By all wallets, on all nodes.",
            normal=data.get_normal("sockets_opened"),
        ),
        Figure(
            "sockets_peak",
            "Concurrent sockets, maximum",
            peak,
            format_count(peak),
            "Sum over nodes of each node's maximum.",
            normal=data.get_normal("connections_peak"),
        ),
        Figure(
            "sockets_unclosed",
            "Not closed",
            unclosed,
            format_count(unclosed),
            "Still open when their process ended: a crash, or missing log lines.",
            "warn" if unclosed else "plain",
        ),
        Figure(
            "storm_minutes",
            "Storm minutes",
            storms,
            format_count(storms),
            "Minutes of a reconnect storm: more than 100 opened sockets, and more than ten times the median.",
            "warn" if storms else "plain",
        ),
    ]
    nodes = [
        ReportColumn("node", "Node", format_text, number=False),
        ReportColumn("opened", "Opened", format_count),
        ReportColumn("authenticated", "Authenticated", format_count),
        ReportColumn("closed", "Closed", format_count),
        ReportColumn("unclosed", "Not closed", format_count),
        ReportColumn("storm_minutes", "Storm minutes", format_count),
        ReportColumn("peak", "Peak", format_count),
    ]
    rows, note = limit_rows(data.get_rows("sessions_daily"), data.settings.top, "sessions_daily")
    closes = [
        ReportColumn("ws_code", "Close code", lambda code: str(code or NO_VALUE)),
        ReportColumn("reason", "Closed by", format_text, number=False),
        ReportColumn("proto", "Protocol", format_text, number=False),
        ReportColumn("node", "Node", format_text, number=False),
        ReportColumn("n", "Sockets", format_count),
        ReportColumn("dur_p50_ms", "Duration, median", format_duration),
        ReportColumn("dur_p95_ms", "Duration, p95", format_duration),
        ReportColumn("n_in", "Messages in", format_count),
        ReportColumn("n_out", "Messages out", format_count),
        ReportColumn("bytes_in", "Bytes in", format_size),
        ReportColumn("bytes_out", "Bytes out", format_size),
    ]
    return Section(
        "sessions",
        "Sessions",
        "WebSockets of wallets. Close code 1000: regular; 1001: going away or shutdown; 1006: without a close frame.",
        figures,
        _make_concurrency_charts(data),
        [
            ReportTable("Sockets by node", nodes, sockets, "sockets_daily"),
            ReportTable("Closed sockets by reason", closes, rows, "sessions_daily", note),
        ],
    )


def _make_concurrency_charts(data: ReportData) -> list[Chart]:
    peaks = {row["at_hour"]: float(row["peak"] or 0) for row in data.get_rows("concurrency_10m")}
    if not peaks:
        return []
    title = "Concurrent sockets by ten minutes"
    description = (
        f"{title} on {data.day}, sum of the maxima of all nodes; maximum {format_count(max(peaks.values()))}."
    )
    return [
        make_hourly_chart(
            "sockets-day",
            title,
            description,
            [ChartLine("open sockets", peaks, FIRST_COLOUR, filled=True)],
            format_count,
        )
    ]


_MAX_ACCOUNTS = 10
_OUTCOMES = ("sent", "retry", "gone", "mismatch", "rejected")


class PushTotals(NamedTuple):
    """
    Totals of push notifications on a day.

    :param requests: requests to push services. :param sent: those that a service accepted.
    :param forgotten: devices that were removed. :param wakeups: wake-ups. :param missed: those without a pickup.
    """

    requests: int
    sent: int
    forgotten: int
    wakeups: int
    missed: int

    @property
    def sent_share(self) -> float | None:
        """Accepted requests divided by all."""
        return self.sent / self.requests if self.requests else None

    @property
    def forgotten_share(self) -> float | None:
        """Removed devices divided by requests."""
        return self.forgotten / self.requests if self.requests else None

    @property
    def missed_share(self) -> float | None:
        """Wake-ups without a pickup divided by all."""
        return self.missed / self.wakeups if self.wakeups else None


def sum_pushes(data: ReportData, day: date) -> PushTotals:
    """Sum the push notifications of a day over all services."""
    counts = Counter[str]()
    for row in data.rows["push_daily"]:
        if row["dt"] != day:
            continue
        counts[row["event"]] += row["n"]
        counts["sent"] += row["n"] if row["event"] == "push.wake" and row["result"] == "sent" else 0
    every = _get_wakeups(data, day)
    return PushTotals(
        counts["push.wake"], counts["sent"], counts["push.forget"], every.get("n") or 0, every.get("missed") or 0
    )


def _get_wakeups(data: ReportData, day: date) -> Row:
    rows = data.rows["wakeups_daily"]
    return next((row for row in rows if row["dt"] == day and row["service"] == ALL_VALUES), {})


def make_push_section(data: ReportData) -> Section:
    """Push notifications: requests, wake-ups and the responses to them, dead tokens."""
    totals = sum_pushes(data, data.day)
    figures = [
        Figure(
            "push_requests",
            "Requests to push services",
            totals.requests,
            format_count(totals.requests),
            "One for each device, and for each call of the webhook.",
        ),
        Figure(
            "push_sent_share",
            "Success rate",
            totals.sent_share,
            format_share(totals.sent_share),
            "Requests that the push service accepted, divided by all.",
        ),
        Figure(
            "wakeups",
            "Wake-ups",
            totals.wakeups,
            format_count(totals.wakeups),
            "Wake-ups of accounts that ended on the day; devices woken together count once.",
        ),
        Figure(
            "wakeups_missed",
            "Without pickup",
            totals.missed,
            format_count(totals.missed),
            "The account did not connect or fetch within an hour.",
        ),
        Figure(
            "wakeups_missed_share",
            "Share without pickup",
            totals.missed_share,
            format_share(totals.missed_share),
            "Wake-ups without pickup divided by all.",
        ),
        *_make_pickup_figures(_get_wakeups(data, data.day)),
        Figure(
            "push_devices_forgotten",
            "Dead tokens",
            totals.forgotten,
            format_count(totals.forgotten),
            "Devices forgotten because their push service does not know them.",
        ),
    ]
    return Section(
        "push",
        "Push notifications",
        "A wake-up counts on the day on which the account connects or fetches, or on which the hour for that ends.",
        figures,
        grids=_make_push_tables(data),
    )


def _make_pickup_figures(row: Row) -> list[Figure]:
    values = [(name, row.get(f"{name}_ms")) for name in ("p50", "p90", "p99")]
    return [
        Figure(
            f"wakeup_{name}_ms",
            f"From wake-up to pickup, {name}",
            value,
            format_duration(value),
            f"Of wake-ups with a pickup; {name[1:]} of 100 took at most this long.",
        )
        for name, value in values
    ]


def _make_push_tables(data: ReportData) -> list[ReportTable]:
    pushes = data.get_rows("push_daily")
    if not pushes and not data.get_rows("wakeups_daily"):
        return [ReportTable("Wake-ups by service", (), (), note="No push notifications.")]
    service = ReportColumn("service", "Service", format_text, number=False)
    wakeups = [
        ReportColumn(
            "service", "Service", lambda name: "all" if name == ALL_VALUES else format_text(name), number=False
        ),
        ReportColumn("n", "Wake-ups", format_count),
        ReportColumn("missed", "Without pickup", format_count),
        ReportColumn("missed_share", "Share", format_share),
        *(ReportColumn(f"{name}_ms", f"Pickup, {name}", format_duration) for name in ("p50", "p90", "p99")),
    ]
    codes = [
        service,
        ReportColumn("result", "Outcome", format_text, number=False),
        ReportColumn("code", "Code", format_text, number=False),
        ReportColumn("n", "Requests", format_count),
    ]
    reasons = [
        service,
        ReportColumn("result", "Reason", format_text, number=False),
        ReportColumn("n", "Devices", format_count),
    ]
    accounts = [
        ReportColumn("rank", "Rank", format_count),
        ReportColumn("did", "Account (pseudonym)", format_text, number=False),
        ReportColumn("n", "Wake-ups", format_count),
        ReportColumn("services", "Services", format_text, number=False),
    ]
    failed = [row for row in pushes if row["event"] == "push.wake" and row["result"] != "sent"]
    refused, refused_note = limit_rows(failed, data.settings.top, "push_daily")
    removed = [row for row in pushes if row["event"] == "push.forget"]
    forgotten, forgotten_note = limit_rows(removed, data.settings.top, "push_daily")
    top, top_note = limit_rows(data.get_rows("wakeups_missed_top"), _MAX_ACCOUNTS, "wakeups_missed_top")
    return [
        ReportTable("Wake-ups by service", wakeups, data.get_rows("wakeups_daily"), "wakeups_daily"),
        _make_outcome_table(pushes),
        ReportTable("Requests that were not accepted", codes, refused, "push_daily", refused_note),
        ReportTable("Dead tokens", reasons, forgotten, "push_daily", forgotten_note),
        ReportTable("Accounts woken most that picked up nothing", accounts, top, "wakeups_missed_top", top_note),
    ]


def _make_outcome_table(pushes: Sequence[Row]) -> ReportTable:
    """Requests by service, in columns by outcome."""
    services = defaultdict[str, Counter[str]](Counter)
    for row in pushes:
        if row["event"] == "push.wake":
            services[row["service"]] += Counter({row["result"]: row["n"]})
    rows: list[Row] = [
        {"service": name, **counts, "all": counts.total(), "share": counts["sent"] / counts.total()}
        for name, counts in sorted(services.items())
    ]
    columns = [
        ReportColumn("service", "Service", format_text, number=False),
        ReportColumn("all", "Requests", format_count),
        *(ReportColumn(name, name.capitalize(), lambda n: format_count(n or 0)) for name in _OUTCOMES),
        ReportColumn("share", "Success rate", format_share),
    ]
    return ReportTable("Requests by service and outcome", columns, rows, "push_daily")


def make_nodes_section(data: ReportData) -> Section:
    """Each node compared with the median."""
    rows = [row for row in data.get_rows("node_compare") if not is_operator(row["node"])]
    flagged = [row for row in rows if row["flagged"]]
    names = {row["node"] for row in rows}
    factor = format_count(data.settings.node_factor)
    figures = [
        Figure(
            "nodes",
            "Nodes",
            len(names),
            format_count(len(names)),
            "Nodes with traffic or gauges on the day.",
        ),
        Figure(
            "nodes_flagged",
            "Outliers",
            len(flagged),
            format_count(len(flagged)),
            f"Figures of a node above {factor} times the median of all nodes, or below 1/{factor} of it.",
            "warn" if flagged else "plain",
        ),
    ]
    columns = [
        ReportColumn("node", "Node", format_text, number=False),
        ReportColumn("metric", "Figure", format_text, number=False),
        ReportColumn("value", "Node's value", format_text),
        ReportColumn("median", "Median", format_text),
        ReportColumn("ratio", "Ratio", lambda ratio: NO_VALUE if ratio is None else f"{ratio:.2f}"),
    ]
    shown, note = limit_rows(rows, 2 * data.settings.top, "node_compare")
    shown = [row | {name: get_formatter(row["metric"])(row[name]) for name in ("value", "median")} for row in shown]
    marked = frozenset(index for index, row in enumerate(shown) if row["flagged"])
    lead = f"{format_plural(len(names), 'node')} compared with their median; shows uneven load and faulty nodes."
    return Section(
        "nodes",
        "Nodes",
        lead,
        figures,
        grids=[ReportTable("Nodes compared with the median", columns, shown, "node_compare", note, marked)],
    )


def make_cost_section(data: ReportData) -> Section:
    """Processing time by message type."""
    rows = data.get_rows("cost_daily")
    busy, crypto = (sum(row[name] or 0 for row in rows) for name in ("dur_ms", "crypto_ms"))
    part = crypto / busy if busy else None
    figures = [
        Figure(
            "request_ms", "Time in requests", busy, format_duration(busy), "Sum of the durations of all requests."
        ),
        Figure(
            "crypto_ms",
            "Cryptography",
            crypto,
            format_duration(crypto),
            "Part spent on decrypting and encrypting envelopes.",
        ),
        Figure(
            "crypto_share",
            "Share of cryptography",
            part,
            format_share(part),
            "Cryptography divided by all time in requests.",
        ),
    ]
    columns = [
        ReportColumn("mtype", "Message type or command", format_text, number=False),
        ReportColumn("proto", "Protocol", format_text, number=False),
        ReportColumn("size_class", "Size", format_class, number=False),
        ReportColumn("n", "Requests", format_count),
        ReportColumn("dur_ms", "Time", format_duration),
        ReportColumn("crypto_ms", "Cryptography", format_duration),
        ReportColumn("dur_p50_ms", "Duration, median", format_duration),
        ReportColumn("dur_p95_ms", "Duration, p95", format_duration),
    ]
    shown, note = limit_rows(rows, data.settings.top, "cost_daily")
    return Section(
        "cost",
        "Cost",
        "Processing time by message type and size, largest first.",
        figures,
        grids=[ReportTable("Time by message type", columns, shown, "cost_daily", note)],
    )


_RETENTION_WEEKS = 8


def make_talkers_section(data: ReportData) -> Section:
    """Top senders and recipients, and the concentration of traffic."""
    sides = {row["side"]: row for row in data.get_rows("concentration_daily")}
    figures = [
        figure
        for side, label in (("sender", "Senders"), ("rcpt", "Recipients"))
        for figure in _make_side_figures(side, label, sides.get(side, {}))
    ]

    def columns(name: str, title: str, partners: str) -> list[ReportColumn]:
        return [
            ReportColumn("rank", "Rank", format_count),
            ReportColumn(name, f"{title} (pseudonym)", format_text, number=False),
            ReportColumn("n", "Messages", format_count),
            ReportColumn("bytes", "Bytes", format_size),
            ReportColumn("partners", partners, format_party_count),
        ]

    return Section(
        "talkers",
        "Top senders and recipients",
        "Pseudonyms cannot be reversed without the key, and change with it. Anonymous senders are not counted.",
        figures,
        grids=[
            ReportTable(
                "Largest senders",
                columns("sender", "Sender", "Recipients"),
                data.get_rows("top_senders"),
                "top_senders",
            ),
            ReportTable(
                "Largest recipients",
                columns("rcpt", "Recipient", "Senders"),
                data.get_rows("top_recipients"),
                "top_recipients",
            ),
        ],
    )


def _make_side_figures(side: str, label: str, row: Row) -> list[Figure]:
    members, top, gini = (row.get(name) for name in ("members", "top_share", "gini"))
    uneven = NO_VALUE if gini is None else f"{gini:.2f}"
    return [
        Figure(f"{side}_members", label, members, format_count(members), "Distinct DIDs on the day."),
        Figure(
            f"{side}_top_share",
            f"{label}: share of the largest 1 %",
            top,
            format_share(top),
            f"Of all messages. Gini coefficient {uneven}: 0 if all are equal, near 1 if one dominates.",
        ),
    ]


def make_recipients_section(data: ReportData) -> Section:
    """Active, new and dormant recipients, and retention."""
    row = data.get_row("dormant_daily")
    after = data.settings.dormant_days
    format = (
        ("active", "Active recipients", format_count, "Acknowledged a message on the day."),
        ("fresh", "New recipients", format_count, "Not seen in the 35 days before."),
        (
            "dormant",
            "Dormant recipients",
            format_count,
            f"Have queued messages and acknowledged none for {after} days.",
        ),
        (
            "waiting",
            "Queued for dormant recipients",
            format_count,
            "Messages that will probably be lost.",
        ),
        ("bytes", "Bytes for dormant recipients", format_size, "Payload bytes of these messages."),
    )
    figures = [
        Figure(f"recipients_{name}", label, row.get(name), shown(row.get(name)), meaning)
        for name, label, shown, meaning in format
    ]
    return Section(
        "recipients",
        "Recipients and retention",
        "Retention: of recipients first seen in a week, the share that acknowledges in later weeks. It does not "
        "cross a key epoch, because pseudonyms change with the key.",
        figures,
        grids=[_make_retention_table(data)],
    )


def _make_retention_table(data: ReportData) -> ReportTable:
    cohorts = defaultdict[tuple[int, str], Row](dict)
    for row in data.get_rows("retention_weekly"):
        line = cohorts[row["epoch"], str(row["cohort"])]
        line |= {"epoch": row["epoch"], "cohort": row["cohort"], "members": row["members"]}
        if row["members"] and row["active"] is not None:
            line[f"week{row['week']}"] = row["active"] / row["members"]
    latest = [cohorts[key] for key in sorted(cohorts)[-2 * _RETENTION_WEEKS :]]
    weeks = [week for week in range(_RETENTION_WEEKS + 1) if any(f"week{week}" in line for line in latest)]
    columns = [
        ReportColumn("cohort", "First seen, week of", format_text, number=False),
        ReportColumn("epoch", "Key epoch", format_count),
        ReportColumn("members", "Recipients", format_party_count),
        *(ReportColumn(f"week{week}", "same week" if not week else f"week +{week}", format_share) for week in weeks),
    ]
    note = "" if latest else "No cohorts yet."
    return ReportTable("Retention by week", columns, latest, "retention_weekly", note)


def make_anomalies_section(data: ReportData) -> Section:
    """Anomalous hours, as sentences."""
    settings = data.settings
    rows = sorted(data.get_rows("anomalies"), key=lambda row: (-abs(row["z"]), row["hour"], row["metric"]))
    columns = [
        ReportColumn("hour", "Hour (UTC)", lambda hour: f"{hour:02}:00", number=False),
        ReportColumn("reason", "Finding", str, number=False),
    ]
    note = "" if rows else "No anomalies."
    if len(rows) > settings.top:
        note = f"{len(rows) - settings.top:,} more in anomalies.csv."
    hours = len({row["hour"] for row in rows})
    figures = [
        Figure(
            "anomalies",
            "Anomalies",
            len(rows),
            format_count(len(rows)),
            "Hourly figures far from the usual ones.",
            "warn" if rows else "good",
        ),
        Figure("hours", "Hours with anomalies", hours, format_count(hours), "Of the 24 hours of the day."),
    ]
    return Section(
        "anomalies",
        "Anomalies",
        f"Hours that deviate by more than {format_count(settings.anomaly_z)} times the usual spread from the median "
        f"of the same hour of the week in the previous {settings.baseline_days} days. With fewer than "
        f"{settings.baseline_samples} such weeks, the usual value is that of the same hour of all days.",
        figures,
        grids=[ReportTable("Anomalous hours", columns, rows[: settings.top], "anomalies", note)],
    )


def make_forecast_section(data: ReportData) -> Section:
    """Capacity forecast and its error."""
    lead = (
        "Extrapolation of the last weeks: a linear trend plus an effect of the weekday. The shaded band is the 80 % "
        f"interval. Needs {MIN_HISTORY_DAYS} days of history."
    )
    rows = data.get_rows("forecast")
    names = [name for name in METRICS if any(row["metric"] == name for row in rows)]
    without = [name for name, metric in METRICS.items() if metric.capacity and name not in names]
    notes = []
    if without:
        missing = "; ".join(METRICS[name].title.lower() for name in without)
        notes.append(f"Too little history (fewer than {MIN_HISTORY_DAYS} days) for: {missing}.")
    highest_days = [_find_highest_day(data, name, [row for row in rows if row["metric"] == name]) for name in names]
    return Section(
        "forecast",
        f"Forecast, {data.settings.forecast_days} days",
        lead,
        [_make_forecast_figure(row) for row in highest_days],
        [_make_forecast_chart(data, name) for name in names],
        [_make_forecast_table(highest_days), _make_forecast_error_table(data)] if names else [],
        notes,
    )


def _find_highest_day(data: ReportData, name: str, rows: list[Row]) -> Row:
    """The highest expected day, compared with the last week."""
    past = [value for day, value in data.get_past_days(name).items() if (data.day - day).days < 7]
    highest = max(rows, key=lambda row: (row["value"], row["day"]))
    return {**highest, "name": name, "now": max(past, default=None)}


def _make_forecast_figure(row: Row) -> Figure:
    shown = get_formatter(row["name"])
    return Figure(
        f"{row['name']}_highest_expected",
        METRICS[row["name"]].title,
        row["value"],
        shown(row["value"]),
        f"Highest expected day, {row['day']}; upper end of the interval {shown(row['high'])}. "
        f"Highest of the last week: {shown(row['now'])}.",
    )


def _make_forecast_chart(data: ReportData, name: str) -> Chart:
    rows = sorted((row for row in data.get_rows("forecast") if row["metric"] == name), key=lambda row: row["day"])
    title = METRICS[name].title
    last = rows[-1]
    shown = get_formatter(name)
    description = (
        f"{title} by day: past values, and from {data.day} on the forecast with its interval; "
        f"{shown(last['value'])} ({shown(last['low'])} to {shown(last['high'])}) on {last['day']}."
    )
    return make_forecast_chart(
        f"forecast-{name.replace('_', '-')}", title, description, data.get_past_days(name), rows, shown
    )


def _make_forecast_table(highest_days: list[Row]) -> ReportTable:
    shown = [
        {
            "metric": METRICS[row["name"]].title,
            "day": row["day"],
            **{name: get_formatter(row["name"])(row[name]) for name in ("now", "value", "low", "high")},
        }
        for row in highest_days
    ]
    columns = [
        ReportColumn("metric", "Daily figure", format_text, number=False),
        ReportColumn("now", "Highest of last week", format_text),
        ReportColumn("value", "Highest expected", format_text),
        ReportColumn("low", "Interval, lower end", format_text),
        ReportColumn("high", "Interval, upper end", format_text),
        ReportColumn("day", "Expected on", format_text, number=False),
    ]
    return ReportTable("Highest expected days", columns, shown, "forecast")


def _make_forecast_error_table(data: ReportData) -> ReportTable:
    rows = [
        row | {"metric": METRICS[row["metric"]].title}
        for row in sorted(data.get_rows("forecast_error"), key=lambda row: row["metric"])
    ]
    columns = [
        ReportColumn("metric", "Daily figure", format_text, number=False),
        ReportColumn("mape", "Error", format_share),
        ReportColumn("naive_mape", "Error of a naive forecast", format_share),
        ReportColumn("inside", "Days inside the interval", format_share),
        ReportColumn("held_back", "Days left out", format_count),
        ReportColumn("trained_on", "Training days", format_count),
    ]
    note = (
        "Mean absolute error divided by the mean value, of a forecast that left out the last days. "
        "The naive forecast repeats the week before."
    )
    if not rows:
        note = f"No error estimate yet: needs {MIN_HISTORY_DAYS + data.settings.held_back_days} days of history."
    return ReportTable("Forecast error", columns, rows, "forecast_error", note)
