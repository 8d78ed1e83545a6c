"""Queues, and what was refused: errors, limits, repeated requests."""

from __future__ import annotations

from analytics.report import numbers
from analytics.report.messages import against_usual, classes
from analytics.report.numbers import FEW, count, days, duration, people, share, size
from analytics.report.parts import Column, Figure, Grid, Section, capped
from analytics.report.reading import Day


def queues(known: Day) -> Section:
    """How full, and what is at risk."""
    hours = known.today("queue_hourly")

    def most(column: str) -> float | None:
        return max((row[column] for row in hours if row[column] is not None), default=None)

    figures = [
        Figure(
            "depth_max",
            "Waiting messages, highest",
            most("depth_max"),
            count(most("depth_max")),
            "In all queues together, by the gauge of each minute.",
        ),
        Figure(
            "queue_bytes_max",
            "Waiting bytes, highest",
            most("bytes_max"),
            size(most("bytes_max")),
            "Payload bytes of them.",
        ),
        Figure(
            "oldest_ms_max",
            "Oldest message",
            most("oldest_ms_max"),
            duration(most("oldest_ms_max")),
            "How long the message that waited longest had been waiting.",
        ),
        Figure(
            "lag_ms_max",
            "Reactor lag, highest",
            most("lag_ms_max"),
            duration(most("lag_ms_max")),
            "How late a node was with what it had to do; everybody connected to it waited that long.",
        ),
    ]
    capacity = known.settings.queue_max_messages
    columns = [
        Column("rank", "Rank", count),
        Column("rcpt", "Recipient (pseudonym)", numbers.text, number=False),
        Column("waiting", "Waiting", count),
        Column("bytes", "Bytes", size),
        Column("per_day", "More a day", count),
        Column("days_to_cap", f"Until {capacity:,} messages", days),
        Column("days_to_ttl", "Until the first expires", days),
    ]
    rows, note = capped(known.today("queue_risk"), known.settings.top, "queue_risk")
    return Section(
        "queues",
        "Queues and risk",
        "Messages wait for recipients that are away. A queue that is full drops its oldest message for each new one.",
        figures,
        against_usual(known, "depth-hours", "Waiting messages by hour, highest", "depth_max", count),
        [Grid("Queues closest to a loss", columns, rows, "queue_risk", note)],
    )


def errors(known: Day) -> Section:
    """Refusals and failures by code."""
    rows = known.today("errors_daily")
    refused = sum(row["n"] for row in rows)
    part = sum(row["share"] or 0 for row in rows)
    new = sorted({row["code"] or f"status {row['status']}" for row in rows if row["is_new"]})
    figures = [
        Figure(
            "requests_refused",
            "Refused or failed",
            refused,
            count(refused),
            "Requests and frames that were answered with an error code or a status of 400 or above.",
        ),
        Figure("error_share", "Share of all requests", part, share(part), "Refused or failed by all of the day."),
        Figure(
            "new_codes",
            "New codes",
            len(new),
            count(len(new)),
            "Codes that no earlier day of these tables has seen; marked below.",
            "warn" if new else "plain",
        ),
    ]
    shown, note = capped(rows, known.settings.top, "errors_daily")
    columns = [
        Column("code", "Code", numbers.text, number=False),
        Column("is_new", "New", lambda new: "new" if new else "", number=False),
        Column("status", "Status", lambda status: str(status or numbers.NOTHING)),
        Column("proto", "Protocol", numbers.text, number=False),
        Column("mtype", "Message type or command", numbers.text, number=False),
        Column("n", "Number", count),
        Column("senders", "Senders", people),
        Column("share", "Of all requests", share),
    ]
    senders = [
        Column("rank", "Rank", count),
        Column("sender", "Sender (pseudonym)", numbers.text, number=False),
        Column("n", "Refusals", count),
        Column("codes", "Codes", count),
        Column("worst", "Most frequent code", numbers.text, number=False),
    ]
    marked = frozenset(place for place, row in enumerate(shown) if row["is_new"])
    return Section(
        "errors",
        "Errors by code",
        "A code says what went wrong; docs and the metrics of the daemon use the same ones.",
        figures,
        against_usual(known, "refused-hours", "Requests refused or failed by hour", "requests_refused", count),
        [
            Grid("Errors", columns, shown, "errors_daily", note, marked),
            Grid("Senders with most refusals", senders, known.today("error_senders"), "error_senders"),
        ],
    )


def limits(known: Day) -> Section:
    """Who is over a limit."""
    rows = known.today("limits_daily")
    hits = sum(row["hits"] for row in rows)
    longest = max((row["longest_burst_s"] or 0 for row in rows), default=0)
    figures = [
        Figure("limit_hits", "Hits on limits", hits, count(hits), "Requests that a rate limit turned away."),
        Figure(
            "longest_burst_s",
            "Longest burst",
            longest,
            duration(longest * 1000),
            f"One party kept on hitting a limit, without a pause of {known.settings.burst_gap_s} s.",
        ),
    ]
    columns = [
        Column("limit", "Limit", numbers.text, number=False),
        Column("hits", "Hits", count),
        Column("who_n", "Parties", people),
        Column("bursts", "Bursts", count),
        Column("longest_burst_s", "Longest burst", lambda s: duration(None if s is None else s * 1000)),
        Column("share", "Of all senders", lambda value: FEW if value is None else share(value)),
    ]
    parties = [
        Column("rank", "Rank", count),
        Column("who", "Party (pseudonym)", numbers.text, number=False),
        Column("limit", "Limit", numbers.text, number=False),
        Column("hits", "Hits", count),
        Column("bursts", "Bursts", count),
    ]
    charts = against_usual(known, "limit-hours", "Hits on limits by hour", "limit_hits", count) if hits else []
    return Section(
        "limits",
        "Rate limits",
        "Many hits by one party are abuse or a wallet in a loop; hits by many parties are a limit that is too tight.",
        figures,
        charts,
        [
            Grid("Limits", columns, rows, "limits_daily", "" if rows else "No limit was hit."),
            Grid("Parties that hit limits most", parties, known.today("limits_top"), "limits_top"),
        ],
    )


def replay(known: Day) -> Section:
    """Repeated or untimely requests."""
    rows = known.today("replay_daily")
    total = sum(row["n"] for row in rows)
    skewed = sum(row["n"] for row in rows if row["age_class"] == "skew")
    figures = [
        Figure(
            "replays", "Repeated or untimely", total, count(total), "Requests refused as seen before or out of time."
        ),
        Figure(
            "replays_by_skew", "Likely a wrong clock", skewed, count(skewed), "Five to ten minutes off either way."
        ),
    ]
    columns = [
        Column("code", "Code", numbers.text, number=False),
        Column("age_class", "Age by its own clock", classes, number=False),
        Column("n", "Number", count),
        Column("senders", "Senders", people),
        Column("on_nodes", "At several nodes", people),
    ]
    note = "" if rows else "Nothing was repeated."
    return Section(
        "replay",
        "Repeated and untimely requests",
        "The same request twice is a retry or an attack; the same at several nodes is rarely a retry.",
        figures,
        grids=[Grid("By code and age", columns, rows, "replay_daily", note)],
    )
