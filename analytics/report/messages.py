"""What became of messages: losses, traffic, and how long delivery took."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from statistics import median
from typing import NamedTuple

from analytics.histogram import BASE
from analytics.report import numbers
from analytics.report.charts import Line, by_day, by_hour, cumulative
from analytics.report.numbers import count, duration, plural, share, size
from analytics.report.parts import Chart, Column, Figure, Grid, Row, Section
from analytics.report.reading import Day
from analytics.report.svg import BAD, FIRST, SECOND, THIRD

_DAYS = 28
_WAYS = {"live": ("live", FIRST), "pickup": ("pickup", SECOND), "poll": ("poll", THIRD)}


def classes(name: str) -> str:
    """A class without the digit that it sorts by: `<1h`."""
    return numbers.text(name.partition(" ")[2] or name)


class LostMessages(NamedTuple):
    """
    :param accepted: of which a line says that they were accepted.
    :param unaccepted: of which none does.
    """

    accepted: int
    unaccepted: int

    @property
    def total(self) -> int:
        """All that expired, were evicted or removed."""
        return self.accepted + self.unaccepted


def lost_messages(known: Day) -> LostMessages:
    """How many were lost on the day."""
    return LostMessages(known.total("lost_daily", "n"), known.total("ledger_daily", "lost_unaccepted"))


def lost(known: Day) -> Section:
    """Messages that were never delivered."""
    rows = known.today("lost_daily")
    lost = lost_messages(known)
    total = lost.total
    pushed = sum(row["n"] for row in rows if row["pushed"])
    accepted = known.one("ledger_daily").get("accepted")
    of_accepted = total / accepted if accepted else None
    figures = [
        Figure(
            "messages_lost",
            "Messages lost",
            total,
            count(total),
            "Expired, evicted or removed on the day without having been acknowledged: the sum of the next two.",
            "warn" if total else "good",
        ),
        Figure(
            "messages_lost_accepted",
            "Lost with acceptance line",
            lost.accepted,
            count(lost.accepted),
            "Of these, messages of which a line says that they were accepted.",
        ),
        Figure(
            "messages_lost_unaccepted",
            "Lost without acceptance line",
            lost.unaccepted,
            count(lost.unaccepted),
            "Of these, messages of which none does: lines are missing, or they are older than the first logs.",
        ),
        Figure(
            "lost_share",
            "By messages accepted",
            of_accepted,
            share(of_accepted),
            "Lost on the day by accepted on the day; what is lost today was mostly accepted earlier.",
        ),
        Figure(
            "messages_pushed_and_lost",
            "Handed over, then lost",
            pushed,
            count(pushed),
            "Sent to a recipient and never acknowledged: a wallet that does not confirm, or a dead socket.",
        ),
        Figure(
            "bytes_lost",
            "Bytes lost",
            known.total("lost_daily", "bytes"),
            size(known.total("lost_daily", "bytes")),
            "Payload bytes of these messages.",
        ),
    ]
    columns = [
        Column("reason", "Reason", numbers.text, number=False),
        Column("age_class", "Age", classes, number=False),
        Column("size_class", "Size", classes, number=False),
        Column("pushed", "Handed over", _yes, number=False),
        Column("n", "Messages", count),
        Column("bytes", "Bytes", size),
    ]
    grids = [_by_reason(rows)] if rows else []
    shown = rows[: known.settings.top]
    note = "" if rows else "No message with an acceptance line was lost." if total else "No message was lost."
    if rows and lost.unaccepted:
        note = f"Without the {plural(lost.unaccepted, 'message')} of which no line says that it was accepted."
    grids.append(Grid("Lost messages by reason, age and size", columns, shown, "lost_daily", note))
    return Section(
        "lost",
        "Lost messages",
        "The sender was told that these were accepted. Reason ttl: they waited too long; fifo_count, fifo_bytes: the "
        "queue was full and the oldest had to go.",
        figures,
        _daily(known, "lost-days", "Messages lost by day", "messages_lost", BAD),
        grids,
    )


def _yes(value: bool | None) -> str:
    return "yes" if value else "no"


def _by_reason(rows: Sequence[Row]) -> Grid:
    totals = Counter[str]()
    for row in rows:
        totals[row["reason"]] += row["n"]
    columns = [Column("reason", "Reason", numbers.text, number=False), Column("n", "Messages", count)]
    return Grid("Lost messages by reason", columns, [{"reason": name, "n": n} for name, n in totals.most_common()])


def _daily(known: Day, name: str, title: str, metric: str, colour: str) -> list[Chart]:
    past = known.past(metric)
    first = known.day - timedelta(_DAYS)
    values = {float((day - first).days): value for day, value in past.items() if day >= first}
    if len(values) < 2:
        return []
    said = f"{title}, last {len(values)} days. {numbers.count(past.get(known.day))} on {known.day}."
    return [by_day(name, title, said, [Line(title, values, colour, filled=True)], count, first)]


def usual(known: Day, metric: str) -> dict[float, float]:
    """Hour to the median of the same weekday in the four weeks before."""
    samples = defaultdict[float, list[float]](list)
    for row in known.rows["series_hourly"]:
        if row["metric"] == metric and row["dt"] < known.day and (known.day - row["dt"]).days % 7 == 0:
            samples[row["hour"]].append(row["value"])
    return {hour: median(values) for hour, values in samples.items()}


def against_usual(
    known: Day, name: str, title: str, metric: str, told: Callable[[float], str], log: bool = False
) -> list[Chart]:
    """The day by the hour, and what is usual on that weekday; no chart without data."""
    values = {float(hour): value for hour, value in known.hours(metric).items()}
    if not values:
        return []
    lines = [Line("this day", values, filled=not log)]
    before = usual(known, metric)
    if before:
        lines.append(Line(f"usual on a {known.day:%A}", before, SECOND, faint=True))
    top = max(values, key=lambda hour: values[hour])
    said = f"{title} on {known.day}; highest {told(values[top])} from {int(top):02}:00 UTC."
    return [by_hour(name, title, said, lines, told, log)]


def traffic(known: Day) -> Section:
    """How much came and went."""
    ledger = known.one("ledger_daily")
    rows = known.today("traffic_daily")
    requests = sum(row["n"] for row in rows if row["event"] == "req.done")
    carried = sum(row["bytes"] or 0 for row in rows if row["event"] == "msg.accept")
    figures = [
        Figure(
            "messages_accepted",
            "Messages accepted",
            ledger.get("accepted"),
            count(ledger.get("accepted")),
            "Taken over from senders on the day.",
        ),
        Figure(
            "messages_acknowledged",
            "Messages delivered",
            ledger.get("acked"),
            count(ledger.get("acked")),
            "Acknowledged by their recipients on the day, whenever they were accepted.",
        ),
        Figure("bytes_accepted", "Bytes accepted", carried, size(carried), "Payloads of the accepted messages."),
        Figure("requests", "Requests", requests, count(requests), "HTTP requests and WebSocket frames answered."),
    ]
    charts = [
        *against_usual(known, "accepted-hours", "Messages accepted by hour", "messages_accepted", count),
        *against_usual(known, "acknowledged-hours", "Messages acknowledged by hour", "messages_acknowledged", count),
        *_daily(known, "accepted-days", "Messages accepted by day", "messages_accepted", FIRST),
        *against_usual(known, "requests-hours", "Requests by hour", "requests", count),
    ]
    columns = [
        Column("node", "Node", numbers.text, number=False),
        Column("proto", "Protocol", numbers.text, number=False),
        Column("event", "Event", numbers.text, number=False),
        Column("n", "Number", count),
        Column("bytes", "Bytes", size),
    ]
    return Section(
        "traffic",
        "Traffic",
        "What was carried, against what is usual on the same day of the week (middle of up to four weeks).",
        figures,
        charts,
        [_states(known), Grid("Events by node and protocol", columns, rows[:40], "traffic_daily")],
    )


def _states(known: Day) -> Grid:
    totals: dict[str, Row] = {}
    for row in known.today("messages_daily"):
        total = totals.setdefault(row["state"], {"state": row["state"], "n": 0, "bytes": 0})
        total["n"] += row["n"]
        total["bytes"] += row["bytes"] or 0
    columns = [
        Column("state", "Messages that were", numbers.text, number=False),
        Column("n", "Number", count),
        Column("bytes", "Bytes", size),
    ]
    rows = sorted(totals.values(), key=lambda row: row["state"])
    return Grid("What became of messages", columns, rows, "messages_daily")


def latency(known: Day) -> Section:
    """Live against queued."""
    rows = [row for row in known.today("latency_daily") if row["node"] == "*"]
    by = {(row["metric"], row["path"]): row for row in rows}
    figures = [
        _p95(by, "push", "live", "Live push", "From acceptance until it was pushed to an open socket"),
        _p95(by, "push", "pickup", "Pickup", "From acceptance until the recipient came and fetched it"),
        _p95(by, "ack", "*", "Acknowledged", "From acceptance until the recipient confirmed it"),
        _p95(by, "request", "*", "Requests", "From the arrival of a request until its answer"),
    ]
    order = {"push": 0, "ack": 1, "request": 2}
    told = {"push": "handed over", "ack": "acknowledged", "request": "request answered"}
    table = [
        row | {"metric": told.get(row["metric"], row["metric"]), "path": "all" if row["path"] == "*" else row["path"]}
        for row in sorted(rows, key=lambda row: (order.get(row["metric"], 3), row["path"]))
    ]
    columns = [
        Column("metric", "Until", numbers.text, number=False),
        Column("path", "Path", numbers.text, number=False),
        Column("n", "Number", count),
        *(Column(f"{name}_ms", name, duration) for name in ("p50", "p90", "p95", "p99")),
        Column("max_ms", "longest", duration),
    ]
    note = "p95: 95 of 100 took at most that long."
    return Section(
        "latency",
        "Latency",
        "How long messages took. Live: the recipient was connected. Pickup and poll: it came later, so the time is "
        "mostly how long it was away.",
        figures,
        [*_distribution(known), *_latency_hours(known)],
        [Grid("Durations, all nodes", columns, table, "latency_daily", note)],
    )


def _p95(by: dict[tuple[str, str], Row], metric: str, path: str, label: str, meaning: str) -> Figure:
    value = by.get((metric, path), {}).get("p95_ms")
    key = f"{metric}_{'all' if path == '*' else path}_p95_ms"
    return Figure(key, f"{label}, p95", value, duration(value), f"{meaning}: 95 of 100 took at most this long.")


def _distribution(known: Day) -> list[Chart]:
    lines = []
    for path, (label, colour) in _WAYS.items():
        buckets = {
            row["bucket"]: row["n"]
            for row in known.today("latency_hist")
            if row["metric"] == "push" and row["path"] == path
        }
        total, so_far, shares = sum(buckets.values()), 0, {}
        for bucket in sorted(buckets):
            so_far += buckets[bucket]
            shares[max(1.0, BASE ** (bucket + 1))] = so_far / total
        if shares:
            lines.append(Line(label, {1.0: 0.0, **shares} if 1.0 not in shares else shares, colour))
    title = "Handed over within"
    said = "Share of messages that were handed over within a time since acceptance, by path; the time is logarithmic."
    return [cumulative("latency-shares", title, said, lines)] if lines else []


def _latency_hours(known: Day) -> list[Chart]:
    metrics = {"live": ("latency_live_p95_ms", FIRST), "pickup or poll": ("latency_pickup_p95_ms", SECOND)}
    lines = [
        Line(label, {float(hour): value for hour, value in known.hours(metric).items()}, colour)
        for label, (metric, colour) in metrics.items()
    ]
    lines = [line for line in lines if line.values]
    title = "95th percentile by hour"
    said = f"95th percentile of the time until messages were handed over, by hour on {known.day}; logarithmic."
    return [by_hour("latency-hours", title, said, lines, duration, log=True)] if lines else []
