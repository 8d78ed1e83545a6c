"""Sockets, nodes, and what requests cost them."""

from __future__ import annotations

from analytics.report import numbers
from analytics.report.charts import Line, by_hour
from analytics.report.messages import classes
from analytics.report.numbers import count, duration, plural, share, size
from analytics.report.parts import Chart, Column, Figure, Grid, Section, capped
from analytics.report.reading import Day
from analytics.report.svg import FIRST


def sessions(known: Day) -> Section:
    """Sockets: how many, how long, how they ended."""
    sockets = known.today("sockets_daily")
    opened, unclosed, storms = (
        known.total("sockets_daily", name) for name in ("opened", "unclosed", "storm_minutes")
    )
    peak = known.past("connections_peak").get(known.day)
    figures = [
        Figure("sockets_opened", "Sockets opened", opened, count(opened), "By all wallets, at all nodes."),
        Figure(
            "sockets_peak", "Open at a time, highest", peak, count(peak), "Highest minute of each node, added up."
        ),
        Figure(
            "sockets_unclosed",
            "Never closed",
            unclosed,
            count(unclosed),
            "Of processes that ended: a crash, or lost lines.",
            "warn" if unclosed else "plain",
        ),
        Figure(
            "storm_minutes",
            "Minutes of a storm",
            storms,
            count(storms),
            "Over ten times the usual sockets opened, and over a hundred: everybody came back at once.",
            "warn" if storms else "plain",
        ),
    ]
    nodes = [
        Column("node", "Node", numbers.text, number=False),
        *(Column(name, name.capitalize(), count) for name in ("opened", "authenticated", "closed", "unclosed")),
        Column("storm_minutes", "Storm (minutes)", count),
        Column("peak", "Peak", count),
    ]
    rows, note = capped(known.today("sessions_daily"), known.settings.top, "sessions_daily")
    closes = [
        Column("ws_code", "Close code", lambda code: str(code or numbers.NOTHING)),
        Column("reason", "Closed by", numbers.text, number=False),
        Column("proto", "Protocol", numbers.text, number=False),
        Column("node", "Node", numbers.text, number=False),
        Column("n", "Sockets", count),
        Column("dur_p50_ms", "Open for, median", duration),
        Column("dur_p95_ms", "p95", duration),
        Column("n_in", "Messages in", count),
        Column("n_out", "out", count),
        Column("bytes_in", "Bytes in", size),
        Column("bytes_out", "out", size),
    ]
    return Section(
        "sessions",
        "Sessions",
        "Sockets of wallets. Close code 1000: as agreed; 1001: gone away or shut down; 1006: the line broke.",
        figures,
        _concurrency(known),
        [
            Grid("Sockets by node", nodes, sockets, "sockets_daily"),
            Grid("How sockets ended", closes, rows, "sessions_daily", note),
        ],
    )


def _concurrency(known: Day) -> list[Chart]:
    peaks = {row["at_hour"]: float(row["peak"] or 0) for row in known.today("concurrency_10m")}
    if not peaks:
        return []
    title = "Open sockets by ten minutes"
    said = f"{title} on {known.day}, peaks of all nodes added up; highest {count(max(peaks.values()))}."
    return [by_hour("sockets-day", title, said, [Line("open sockets", peaks, FIRST, filled=True)], count)]


def nodes(known: Day) -> Section:
    """Each node against the others."""
    rows = known.today("node_compare")
    flagged = [row for row in rows if row["flagged"]]
    names = {row["node"] for row in rows}
    factor = count(known.settings.node_factor)
    figures = [
        Figure("nodes", "Nodes", len(names), count(len(names)), "That wrote logs on the day."),
        Figure(
            "nodes_flagged",
            "Unlike the others",
            len(flagged),
            count(len(flagged)),
            f"Figures of a node more than {factor} times the middle of all, or less than one part in {factor}.",
            "warn" if flagged else "plain",
        ),
    ]
    columns = [
        Column("node", "Node", numbers.text, number=False),
        Column("metric", "Figure", numbers.text, number=False),
        Column("value", "Of the node", numbers.text),
        Column("median", "Middle of all", numbers.text),
        Column("ratio", "Ratio", lambda ratio: numbers.NOTHING if ratio is None else f"{ratio:.2f}"),
    ]
    shown, note = capped(rows, 2 * known.settings.top, "node_compare")
    shown = [row | {name: numbers.of(row["metric"])(row[name]) for name in ("value", "median")} for row in shown]
    marked = frozenset(place for place, row in enumerate(shown) if row["flagged"])
    lead = f"{plural(len(names), 'node')} compared. A load balancer or a sick node shows here."
    return Section(
        "nodes",
        "Nodes",
        lead,
        figures,
        grids=[Grid("Nodes against all", columns, shown, "node_compare", note, marked)],
    )


def cost(known: Day) -> Section:
    """Where the time goes."""
    rows = known.today("cost_daily")
    busy, crypto = (sum(row[name] or 0 for row in rows) for name in ("dur_ms", "crypto_ms"))
    part = crypto / busy if busy else None
    figures = [
        Figure("request_ms", "Time in requests", busy, duration(busy), "Durations of all requests added up."),
        Figure("crypto_ms", "Of it in envelopes", crypto, duration(crypto), "Opening and sealing them."),
        Figure("crypto_share", "Share of envelopes", part, share(part), "The least that a request costs."),
    ]
    columns = [
        Column("mtype", "Message type or command", numbers.text, number=False),
        Column("proto", "Protocol", numbers.text, number=False),
        Column("size_class", "Size", classes, number=False),
        Column("n", "Requests", count),
        Column("dur_ms", "Time", duration),
        Column("crypto_ms", "In envelopes", duration),
        Column("dur_p50_ms", "Median", duration),
        Column("dur_p95_ms", "p95", duration),
    ]
    shown, note = capped(rows, known.settings.top, "cost_daily")
    return Section(
        "cost",
        "Cost",
        "What takes time, by message type and size, most expensive first.",
        figures,
        grids=[Grid("Time by message type", columns, shown, "cost_daily", note)],
    )
