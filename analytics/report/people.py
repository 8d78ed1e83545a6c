"""Senders and recipients: only pseudonyms, and only groups that are large enough."""

from __future__ import annotations

from collections import defaultdict

from analytics.report import numbers
from analytics.report.numbers import count, people, share, size
from analytics.report.parts import Column, Figure, Grid, Row, Section
from analytics.report.reading import Day

_WEEKS = 8


def talkers(known: Day) -> Section:
    """The largest, and how unevenly traffic is spread."""
    sides = {row["side"]: row for row in known.today("concentration_daily")}
    figures = [
        figure
        for side, label in (("sender", "Senders"), ("rcpt", "Recipients"))
        for figure in _side(side, label, sides.get(side, {}))
    ]

    def columns(name: str, title: str, partners: str) -> list[Column]:
        return [
            Column("rank", "Rank", count),
            Column(name, f"{title} (pseudonym)", numbers.text, number=False),
            Column("n", "Messages", count),
            Column("bytes", "Bytes", size),
            Column("partners", partners, people),
        ]

    return Section(
        "talkers",
        "Who sends and receives most",
        "Pseudonyms cannot be turned back without the key, and change with it. Anonymous senders are not counted.",
        figures,
        grids=[
            Grid(
                "Largest senders",
                columns("sender", "Sender", "Recipients"),
                known.today("top_senders"),
                "top_senders",
            ),
            Grid(
                "Largest recipients",
                columns("rcpt", "Recipient", "Senders"),
                known.today("top_recipients"),
                "top_recipients",
            ),
        ],
    )


def _side(side: str, label: str, row: Row) -> list[Figure]:
    members, top, gini = (row.get(name) for name in ("members", "top_share", "gini"))
    uneven = numbers.NOTHING if gini is None else f"{gini:.2f}"
    return [
        Figure(f"{side}_members", label, members, count(members), "Distinct DIDs on the day."),
        Figure(
            f"{side}_top_share",
            f"{label}: share of the largest 1 %",
            top,
            share(top),
            f"Of all messages. Gini coefficient {uneven}: 0 is all alike, near 1 is all with one.",
        ),
    ]


def recipients(known: Day) -> Section:
    """Who stays, who does not come back."""
    row = known.one("dormant_daily")
    after = known.settings.dormant_days
    told = (
        ("active", "Active recipients", count, "Acknowledged something on the day."),
        ("fresh", "New recipients", count, "Not seen on any earlier day of these tables."),
        ("dormant", "Dormant recipients", count, f"Have messages waiting and acknowledged none for {after} days."),
        ("waiting", "Waiting for dormant ones", count, "Messages that will most likely be lost."),
        ("bytes", "Bytes waiting for them", size, "Payload bytes of these messages."),
    )
    figures = [
        Figure(f"recipients_{name}", label, row.get(name), shown(row.get(name)), meaning)
        for name, label, shown, meaning in told
    ]
    return Section(
        "recipients",
        "Recipients and retention",
        "Retention: of those first seen in a week, the share that still acknowledges in later weeks. It never goes "
        "across a change of the key that tags are made with, as nobody can be recognised across one.",
        figures,
        grids=[_retention(known)],
    )


def _retention(known: Day) -> Grid:
    cohorts = defaultdict[tuple[int, str], Row](dict)
    for row in known.today("retention_weekly"):
        line = cohorts[row["epoch"], str(row["cohort"])]
        line |= {"epoch": row["epoch"], "cohort": row["cohort"], "members": row["members"]}
        if row["members"] and row["active"] is not None:
            line[f"week{row['week']}"] = row["active"] / row["members"]
    latest = [cohorts[key] for key in sorted(cohorts)[-2 * _WEEKS :]]
    weeks = [week for week in range(_WEEKS + 1) if any(f"week{week}" in line for line in latest)]
    columns = [
        Column("cohort", "First seen, week of", numbers.text, number=False),
        Column("epoch", "Key", count),
        Column("members", "Recipients", people),
        *(Column(f"week{week}", "same week" if not week else f"+{week}", share) for week in weeks),
    ]
    note = "" if latest else "No cohorts yet."
    return Grid("Still there, weeks later", columns, latest, "retention_weekly", note)
