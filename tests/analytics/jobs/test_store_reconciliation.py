"""Reconciliation of the store's ledger with log lines."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from analytics.engine import AnalysisSession
from analytics.job import Span
from analytics.jobs.reconciliation import ENTRY_EVENTS, STORE_ENTRIES, STORES_JOB
from analytics.run_plan import find_integrity_errors
from analytics.schema import TABLES
from tests.analytics.job_tables import at, day, event, fill_table, run_job

Row = dict[str, Any]
NO_ENTRIES = dict.fromkeys(("accepted", "acknowledged", "expired", "evicted", "removed", "withdrawn"), 0)


def ledger(ts: datetime, *, waiting: int | None = 0, proto: str = "didcomm", store: str = "s", **fields: Any) -> Row:
    """A ledger event; `own_...` and other fields by their names, all others by ledger entry."""
    entries = {name: fields.pop(name, 0) for name in NO_ENTRIES}
    difference = fields.pop("difference", None if waiting is None else 0)
    totals = {f"all_{name}": number for name, number in entries.items()}
    fields = {"boot": "b", **totals, **fields}
    return event("ledger", ts, proto=proto, store=store, waiting=waiting, difference=difference, **fields)


def line(entry: str, ts: datetime, **fields: Any) -> Row:
    """A line for one message."""
    return event(ENTRY_EVENTS[entry], ts, **{"boot": "b", "proto": "didcomm", **fields})


def reconcile(span: Span, rows: list[Row]) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Rows of stores_daily: day, store, protocol and entry to total, change, logged, own and gap."""
    found = run_job(STORES_JOB, span, rows)["stores_daily"]
    columns = ("dt", "store", "proto", "entry", "total", "change", "logged", "own", "gap")
    return {tuple(row[name] for name in columns[:4]): tuple(row[name] for name in columns[4:]) for row in found}


def test_day_spans_last_ledgers_before_its_midnights() -> None:
    """Each protocol by itself, with exactly the lines in between."""
    rows = [
        ledger(at(0, 12), accepted=1),
        ledger(at(0, 23, 59), accepted=10, acknowledged=4, waiting=6),
        line("accepted", at(0, 23, 59)),  # before that ledger, hence included
        line("accepted", at(0, 23, 59, 30)),
        line("acknowledged", at(1, 1)),
        line("expired", at(1, 2)),
        line("evicted", at(1, 3)),
        line("removed", at(1, 4), node="a-operator", boot="o"),
        line("accepted", at(1, 5), proto="decentrl"),
        line("accepted", at(1, 5), node="stranger", boot="x"),
        ledger(at(1, 6), accepted=11, acknowledged=5, expired=1, evicted=1, removed=1, waiting=3),
        ledger(at(1, 6), accepted=1, waiting=1, proto="decentrl"),
        ledger(at(0, 23, 58), proto="decentrl"),
        line("accepted", at(1, 7)),  # of the next day
    ]
    found = reconcile(Span(day(1), day(1)), rows)
    assert set(found) == {(day(1), "s", proto, entry) for proto in ("didcomm", "decentrl") for entry in STORE_ENTRIES}
    assert [found[day(1), "s", "didcomm", entry] for entry in STORE_ENTRIES] == [
        (11, 1, 1, 0, 0),
        (5, 1, 1, 0, 0),
        (1, 1, 1, 0, 0),
        (1, 1, 1, 0, 0),
        (1, 1, 1, 0, 0),
        (0, 0, None, None, None),
        (3, -3, None, None, None),
        (0, None, None, None, None),
    ]
    assert found[day(1), "s", "decentrl", "accepted"] == (1, 1, 1, 0, 0)
    assert found[day(1), "s", "decentrl", "removed"] == (0, 0, 0, 0, 0)


def test_gap_excludes_probes_and_withdrawn_messages() -> None:
    """The daemon's messages to itself and withdrawn messages have no lines; lines lost in a crash are the gap."""
    rows = [
        ledger(at(0, 1), own_accepted=90),  # before the first ledger of the day
        line("accepted", at(0, 2)),
        ledger(at(0, 3), accepted=8, own_accepted=3, own_acknowledged=2, acknowledged=2, waiting=6),
        ledger(at(0, 4), accepted=9, own_expired=1, acknowledged=2, expired=1, withdrawn=2, waiting=4),
    ]
    found = reconcile(Span(day(0), day(0)), rows)
    assert found[day(0), "s", "didcomm", "accepted"] == (9, 9, 1, 3, 3)
    assert found[day(0), "s", "didcomm", "acknowledged"] == (2, 2, 0, 2, 0)
    assert found[day(0), "s", "didcomm", "expired"] == (1, 1, 0, 1, 0)
    assert found[day(0), "s", "didcomm", "withdrawn"] == (2, 2, None, None, None)


def make_three_stores() -> list[Row]:
    """Store `s` of two workers and an operator, store `t` with a difference, and store `u` with a single ledger."""
    return [
        ledger(at(0, 1), node="m-1", boot="1"),
        ledger(at(0, 1), node="m-2", boot="2"),
        ledger(at(0, 1), node="x", boot="3", store="t"),
        line("accepted", at(0, 2), node="m-1", boot="1"),
        line("accepted", at(0, 2), node="m-2", boot="2"),
        line("removed", at(0, 3), node="m-operator", boot="o"),
        line("accepted", at(0, 4), node="x", boot="3"),
        ledger(at(0, 5), node="m-1", boot="1", accepted=2, removed=1, waiting=1),
        ledger(at(0, 6), node="x", boot="3", store="t", accepted=2, waiting=1, difference=1),
        ledger(at(0, 6), node="y", boot="4", store="u", accepted=5, waiting=None),
    ]


def test_groups_nodes_by_store() -> None:
    """
    All lines of a store count, whichever node wrote them; operator lines belong to the node or workers of that name.
    """
    found = reconcile(Span(day(0), day(0)), make_three_stores())
    assert found[day(0), "s", "didcomm", "accepted"] == (2, 2, 2, 0, 0)
    assert found[day(0), "s", "didcomm", "removed"] == (1, 1, 1, 0, 0)
    assert found[day(0), "t", "didcomm", "accepted"] == (2, 2, 1, 0, 1)
    assert found[day(0), "t", "didcomm", "removed"] == (0, 0, 0, 0, 0)
    assert found[day(0), "t", "didcomm", "difference"] == (1, None, None, None, None)
    # A single ledger: nothing to compare it with.
    assert found[day(0), "u", "didcomm", "accepted"] == (5, 0, 0, 0, 0)
    assert found[day(0), "u", "didcomm", "waiting"] == (None, None, None, None, None)
    assert found[day(0), "u", "didcomm", "difference"] == (None, None, None, None, None)


@pytest.mark.exhaustive
def test_days_at_once_and_one_by_one_agree() -> None:
    """After a long silence, a day begins with its own first ledger."""
    rows = [ledger(at(0, hour), accepted=hour, waiting=hour) for hour in range(0, 21)]
    rows += [line("accepted", at(0, hour, 30)) for hour in range(0, 21)]
    rows += [ledger(at(1, hour), accepted=40 + hour, waiting=40 + hour) for hour in range(3, 24)]
    rows += [line("accepted", at(1, hour, 30)) for hour in range(3, 24)]
    rows += [ledger(at(2, 0, 45), accepted=64, waiting=64)]
    all_at_once = reconcile(Span(day(0), day(2)), rows)
    daily: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for number in range(3):
        recent_rows = [row for row in rows if day(number - 1) <= row["dt"] <= day(number)]
        daily |= reconcile(Span(day(number), day(number)), recent_rows)
    assert daily == all_at_once
    accepted = [all_at_once[day(number), "s", "didcomm", "accepted"] for number in range(3)]
    assert accepted == [(20, 20, 20, 0, 0), (63, 20, 20, 0, 0), (64, 1, 1, 0, 0)]


def test_difference_is_an_integrity_error(session: AnalysisSession) -> None:
    """In either direction and any store; a gap or an unknown value is not."""
    entries = [("s", "difference", -2, None), ("t", "difference", 1, None), ("t", "accepted", 9, 5)]
    rows = [
        {"dt": day(1), "store": store, "proto": "didcomm", "entry": entry, "total": total, "gap": gap}
        for store, entry, total, gap in entries
    ]
    rows.append({"dt": day(0), "store": "u", "proto": "didcomm", "entry": "difference", "total": None})
    for name in ("ledger_daily", "reconciliation_daily", "boots_daily", "stores_daily"):
        fill_table(session.database, TABLES[name], rows if name == "stores_daily" else ())
    assert find_integrity_errors(session.database, Span(day(0), day(1))) == [
        f"{day(1)}: the ledgers of the stores have a difference of 3"
    ]
    assert find_integrity_errors(session.database, Span(day(0), day(0))) == []


def test_no_rows_without_ledger_events() -> None:
    assert reconcile(Span(day(0), day(1)), [line("accepted", at(0, 1))]) == {}
