"""The message ledger, compared with a ledger kept in plain Python."""

from __future__ import annotations

import random
from collections import Counter
from datetime import datetime, timedelta
from itertools import count
from typing import Any

import pytest

from analytics.job import Span
from analytics.jobs.message_ledger import LEDGER_JOB
from tests.analytics.job_tables import at, day, event, run_job

Row = dict[str, Any]
DAYS = 5
_SEQ = count(1)
COLUMNS = ("opening", "accepted", "acked", "expired", "evicted", "removed", "open", "again")
ENDS = {"acked": "msg.ack", "expired": "msg.expire", "evicted": "msg.evict", "removed": "msg.remove"}


def make_line(name: str, ts: datetime, **fields: Any) -> Row:
    return event(name, ts, **{"boot": "b", "seq": next(_SEQ), **fields})


def make_accept(ts: datetime, msg: str, **fields: Any) -> Row:
    defaults = {"rcpt": "r1", "proto": "didcomm", "size": 100, "ttl_s": 86_400, "method": "queue"}
    return make_line("msg.accept", ts, msg=msg, **{**defaults, **fields})


def make_ending(ts: datetime, state: str, msg: str, since: datetime, **fields: Any) -> Row:
    ms = int((ts - since).total_seconds() * 1000)
    defaults = {"latency_ms": float(ms)} if state == "acked" else {"age_ms": ms, "size": 100, "reason": state}
    return make_line(ENDS[state], ts, msg=msg, **{"rcpt": "r1", **defaults, **fields})


def make_push(ts: datetime, msg: str, **fields: Any) -> Row:
    return make_line("msg.push", ts, msg=msg, rcpt="r1", **{"latency_ms": 1.0, "ok": True, **fields})


class ExpectedLedger:
    """Random messages: their log lines, and the ledger they must produce."""

    def __init__(self, seed: int, messages: int) -> None:
        self.lines: list[Row] = []
        self.accepted: Counter[int] = Counter()
        self.ended: Counter[tuple[int, str]] = Counter()
        self.ended_again: Counter[int] = Counter()
        self.open: dict[int, dict[str, int]] = {n: {} for n in range(DAYS)}
        rng = random.Random(seed)
        for number in range(messages):
            self._add_message(f"m{number}", rng)
        # The order of lines does not matter.
        rng.shuffle(self.lines)

    def _add_message(self, msg: str, rng: random.Random) -> None:
        seconds = rng.uniform(0, DAYS * 86_400 - 1)
        accepted_at = at(0, second=seconds)
        state = rng.choices([*ENDS, ""], [70, 8, 8, 4, 10])[0]
        lifetime = rng.expovariate(1 / 300) if rng.random() < 0.6 else rng.uniform(0, 2 * 86_400)
        node, size = rng.choice("abc"), rng.randrange(1, 5000)
        self.lines.append(make_accept(accepted_at, msg, node=node, size=size, rcpt=rng.choice(["hot", "hot", "r2"])))
        pushed = [accepted_at + timedelta(seconds=lifetime * share) for share in rng.choices([0.1, 0.5, 0.9], k=2)]
        self.lines += [make_push(ts, msg) for ts in pushed if ts < at(DAYS)]
        self.lines.append(make_push(accepted_at, msg, ok=False))
        tag_changes = accepted_at + timedelta(seconds=lifetime)
        first = int(seconds // 86_400)
        last = int((seconds + lifetime) // 86_400) if state else DAYS
        self.accepted[first] += 1
        for n in range(first, min(last, DAYS)):
            self.open[n][msg] = sum(ts < at(n + 1) for ts in pushed)
        if last < DAYS and state:
            self.lines.append(make_ending(tag_changes, state, msg, accepted_at, node=rng.choice("abc")))
            self.ended[last, state] += 1
            self._redeliver(msg, accepted_at, tag_changes, last, state, rng)

    def _redeliver(
        self, msg: str, accepted_at: datetime, tag_changes: datetime, last: int, state: str, rng: random.Random
    ) -> None:
        later = tag_changes + timedelta(seconds=rng.uniform(1, 7200))
        if state == "acked" and rng.random() < 0.1 and later < at(DAYS):
            self.lines += [make_push(later, msg), make_ending(later, "acked", msg, accepted_at)]
            self.ended_again[(later - at(0)).days] += 1

    def ledger(self) -> list[dict[str, int]]:
        rows = []
        for n in range(DAYS):
            row = {state: self.ended[n, state] for state in ENDS}
            row |= {"opening": len(self.open[n - 1]) if n else 0, "accepted": self.accepted[n]}
            rows.append(row | {"open": len(self.open[n]), "again": self.ended_again[n]})
        return rows


def run_ledger(lines: list[Row], span: Span, before: dict[str, list[Row]] | None = None) -> dict[str, list[Row]]:
    return run_job(LEDGER_JOB, span, lines, tables={"boots_daily": boots(lines), **(before or {})})


def boots(lines: list[Row]) -> list[Row]:
    """The rows of `boots_daily` that the quality job computes from these lines."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in sorted(lines, key=lambda row: row["ts"]):
        name = {column: row[column] for column in ("dt", "node", "boot")}
        boot_row = found.setdefault(tuple(name.values()), {**name, "stopped": False})
        boot_row["last_at"] = row["ts"]
        boot_row["stopped"] |= row["event"] == "proc.stop"
    return list(found.values())


@pytest.mark.exhaustive
def test_five_days_at_once_and_in_parts_agree_with_expected_ledger() -> None:
    expected = ExpectedLedger(seed=5, messages=200)
    span = Span(day(0), day(DAYS - 1))
    all_at_once = run_ledger(expected.lines, span)

    assert [{name: row[name] for name in COLUMNS} for row in all_at_once["ledger_daily"]] == expected.ledger()
    for row in all_at_once["ledger_daily"]:
        assert row["difference"] == row["orphans"] == row["before_books"] == row["across_epochs"] == 0
    found = {
        n: {row["msg"]: row["pushes"] for row in all_at_once["open"] if row["dt"] == day(n)} for n in range(DAYS)
    }
    assert found == expected.open
    for row in all_at_once["ledger_daily"]:
        states = Counter[str]()
        for part in all_at_once["messages_daily"]:
            states[part["state"]] += part["n"] if part["dt"] == row["dt"] else 0
        assert states == Counter({state: row[state] for state in (*ENDS, "open") if row[state]})
        lost = sum(part["n"] for part in all_at_once["lost_daily"] if part["dt"] == row["dt"])
        assert lost == row["expired"] + row["evicted"] + row["removed"]

    daily: dict[str, list[Row]] = {name: [] for name in LEDGER_JOB.writes}
    for span in (Span(day(0), day(1)), Span(day(2), day(4))):
        recent_lines = [row for row in expected.lines if row["dt"] in span.widen(before=3)]
        result = run_ledger(recent_lines, span, daily)
        for name, rows in result.items():
            daily[name] += rows
    assert daily == all_at_once


def test_late_segment_removes_orphans() -> None:
    expected = ExpectedLedger(seed=6, messages=150)
    span = Span(day(0), day(DAYS - 1))
    late = [row for row in expected.lines if row["event"] == "msg.accept" and row["node"] == "a"][::5]
    missing = [row for row in expected.lines if row not in late]

    without_late = run_ledger(missing, span)["ledger_daily"]
    with_late = run_ledger(expected.lines, span)["ledger_daily"]

    ended = {row["msg"] for row in expected.lines if row["event"] in ENDS.values()}
    assert sum(row["orphans"] for row in without_late) == len({row["msg"] for row in late} & ended) > 0
    assert all(row["difference"] == 0 for row in without_late + with_late)
    assert [{name: row[name] for name in COLUMNS} for row in with_late] == expected.ledger()


CARRIED: Row = {"dt": day(0), "rcpt": "r9", "proto": "decentrl", "node": "z", "size": 5, "pushes": 4, "epoch": 1}


def make_unusual_histories() -> tuple[list[Row], dict[str, list[Row]]]:
    """Lines of the second day and the end of the first, and other tables."""
    noon, soon = at(1, 12), at(1, 13)
    lines = [
        # Acknowledged before the acceptance was logged, around midnight.
        make_accept(at(1, 0, 0, 0.2), "early", ttl_s=None),
        make_ending(at(0, 23, 59, 59.9), "acked", "early", at(0, 23, 59, 59.8)),
        make_push(at(0, 23, 59, 59.85), "early"),
        # Likewise on the next day, which is not loaded yet.
        make_ending(at(1, 23, 59, 59.9), "acked", "tomorrow's", at(1, 23, 59, 59.8)),
        # Entirely on the day before, of which only the last minutes are read.
        make_accept(at(0, 23, 58), "past"),
        make_ending(at(0, 23, 59), "acked", "past", at(0, 23, 58)),
        make_ending(at(1, 0, 1), "acked", "past", at(0, 23, 58)),
        # Accepted twice; only the first acceptance counts.
        make_accept(at(0, 23, 40), "reborn"),
        make_ending(at(0, 23, 41), "acked", "reborn", at(0, 23, 40)),
        make_accept(noon, "reborn"),
        # A second ending of a message that ended on the day before, and an ending of an unknown message.
        make_accept(at(0, 3), "known"),
        make_ending(at(0, 4), "acked", "known", at(0, 3)),
        make_ending(noon, "acked", "known", at(0, 3)),
        make_ending(noon, "expired", "unknown", at(0, 3)),
        # Accepted before the ledger begins.
        make_ending(noon, "acked", "ancient", at(-9, 3)),
        # Of two endings the first counts; two acceptances count once.
        make_accept(noon, "twice", proto="decentrl", size=None),
        make_accept(noon, "twice", proto="decentrl", size=7),
        make_ending(soon, "evicted", "twice", noon, reason="fifo_bytes"),
        make_ending(at(1, 14), "acked", "twice", noon),
        # Lost after three pushes, without a reason.
        make_accept(noon, "lost", size=2000),
        *(make_push(soon, "lost") for _ in range(3)),
        make_ending(at(1, 23), "removed", "lost", noon, reason=None),
        # Open: one overdue, one without expiry, one in time, and one carried over that ended.
        make_accept(noon, "brief", ttl_s=3600),
        # The node's clock had a wrong date.
        {**make_accept(at(-400), "misdated"), "dt": day(1)},
        make_line("msg.ack", noon),
        make_line("msg.accept", noon),
        make_line("req.done", noon),
        make_ending(soon, "acked", "carried", at(-1)),
    ]
    before: dict[str, list[Row]] = {
        "open": [
            {**CARRIED, "msg": "carried", "accepted_at": at(-1)},
            {**CARRIED, "msg": "for ever", "accepted_at": at(-2), "ttl_s": None},
            # Of an earlier day, superseded by the day before.
            {**CARRIED, "dt": day(-1), "msg": "older", "accepted_at": at(-2)},
        ],
        "ledger_daily": [{"dt": day(n), "books": day(-1)} for n in (-1, 0)],
    }
    return lines, before


def test_ledger_of_unusual_message_histories() -> None:
    lines, before = make_unusual_histories()
    noon = at(1, 12)

    result = run_ledger(lines, Span(day(1), day(1)), before)

    assert result["ledger_daily"] == [
        {"dt": day(1), "opening": 2, "accepted": 5, "acked": 2, "expired": 0, "evicted": 1, "removed": 1, "open": 3}
        | {
            "difference": 0,
            "orphans": 1,
            "around_crash": 0,
            "before_books": 1,
            "again": 5,
            "overdue": 1,
            "vanished": 1,
        }
        # "unknown" expired.
        | {"lost_unaccepted": 1}
        | {"across_epochs": 0, "ended_across_epochs": 0, "books": day(-1)}
    ]
    defaults = {"dt": day(1), "rcpt": "r1", "proto": "didcomm", "node": "a", "size": 100, "epoch": 1, "pushes": 0}
    assert result["open"] == [
        {**defaults, "msg": "brief", "accepted_at": noon, "ttl_s": 3600},
        {**CARRIED, "dt": day(1), "msg": "for ever", "accepted_at": at(-2), "ttl_s": None},
        {**defaults, "msg": "misdated", "accepted_at": at(1), "ttl_s": 86_400},
    ]
    assert result["lost_daily"] == [
        {
            "dt": day(1),
            "reason": "",
            "size_class": "1 <4K",
            "age_class": "6 <1d",
            "pushed": True,
            "n": 1,
            "bytes": 2000,
        },
        {"dt": day(1), "reason": "fifo_bytes", "size_class": "0 <1K", "age_class": "5 <6h", "pushed": False}
        | {"n": 1, "bytes": 7},
    ]
    assert [tuple(row.values())[1:] for row in result["messages_daily"]] == [
        ("decentrl", "acked", "7 <3d", "2-4", 1, 5),
        ("decentrl", "evicted", "5 <6h", "0", 1, 7),
        ("decentrl", "open", "8 3d+", "2-4", 1, 5),
        ("didcomm", "acked", "0 <1s", "1", 1, 100),
        ("didcomm", "open", "6 <1d", "0", 1, 100),
        ("didcomm", "open", "7 <3d", "0", 1, 100),
        ("didcomm", "removed", "6 <1d", "2-4", 1, 2000),
    ]


def test_acceptances_lost_in_a_crash_are_not_orphans() -> None:
    killed, stopped = at(1, 11), at(1, 9)
    lines = [
        make_line("log.open", at(0, 1), boot="killed"),
        make_line("req.done", killed, boot="killed"),
        make_line("log.open", at(1, 11, 1), boot="next"),
        # No lines since, but the node has no later start.
        make_line("log.open", at(1, 10), node="b", boot="last"),
        make_line("log.open", stopped, node="c", boot="stopped"),
        make_line("proc.stop", stopped, node="c", boot="stopped"),
        make_line("log.open", at(1, 9, 1), node="c", boot="after"),
        make_ending(at(1, 12), "acked", "just after", killed + timedelta(seconds=9.9), boot="next"),
        make_ending(at(2, 12), "expired", "just before", killed - timedelta(seconds=9.9), boot="next"),
        make_ending(at(1, 12), "acked", "too late", killed + timedelta(seconds=10.2), boot="next"),
        make_ending(at(1, 12), "acked", "in order", stopped, boot="next"),
        make_ending(at(1, 12), "acked", "running", at(1, 10), boot="next"),
    ]

    result = run_ledger(lines, Span(day(1), day(2)), {"ledger_daily": [{"dt": day(0), "books": day(0)}]})

    rows = result["ledger_daily"]
    assert [(row["around_crash"], row["orphans"], row["difference"]) for row in rows] == [(1, 3, 0), (1, 0, 0)]


@pytest.mark.exhaustive
def test_crashes_are_known_while_their_messages_may_be_open() -> None:
    """A nightly run knows as much as a back-fill of all days."""
    lines = [
        make_line("req.done", at(0, 12), boot="killed"),
        make_line("log.open", at(0, 12, 1), boot="next"),
        make_ending(at(5, 12), "expired", "long lost", at(0, 12), boot="next"),
        # Killed before midnight: only the next day shows that it does not continue.
        make_line("req.done", at(1, 23, 40), node="b", boot="dead"),
        make_line("log.open", at(2, 0, 0, 1), node="b", boot="anew"),
        make_ending(at(1, 23, 58), "acked", "early", at(1, 23, 40), boot="next"),
        make_ending(at(2, 1), "acked", "late", at(1, 23, 40), boot="next"),
    ]

    def run_nightly(first: int, last: int) -> list[tuple[int, int]]:
        recent_lines = [row for row in lines if row["dt"] in Span(day(first), day(last)).widen(before=3)]
        boot_row = [row for row in boots(lines) if row["dt"] <= day(last)]
        before = [{"dt": day(n), "books": day(-9)} for n in range(-1, first)]
        result = run_ledger(
            recent_lines, Span(day(first), day(last)), {"ledger_daily": before, "boots_daily": boot_row}
        )
        return [(row["around_crash"], row["orphans"]) for row in result["ledger_daily"]]

    all_at_once = run_nightly(0, 5)

    assert all_at_once == [(0, 0), (0, 1), (1, 0), (0, 0), (0, 0), (1, 0)]
    assert [run_nightly(1, 1), run_nightly(5, 5)] == [all_at_once[1:2], all_at_once[5:]]


def test_ledger_begins_on_first_day_with_events() -> None:
    """In a back-fill, messages accepted on earlier days without logs are not orphans."""
    lines = [
        make_ending(at(3, 1), "acked", "old", at(2, 20)),
        make_accept(at(3, 2), "m"),
        make_ending(at(3, 3), "acked", "m", at(3, 2)),
    ]

    result = run_ledger(lines, Span(day(0), day(4)))["ledger_daily"]

    assert [(row["before_books"], row["orphans"]) for row in result] == [(0, 0), (0, 0), (0, 0), (1, 0), (0, 0)]
    assert {row["books"] for row in result} == {day(3)}


def test_counts_vanished_messages_once_and_losses_without_acceptance() -> None:
    """
    A message vanishes on the day it becomes overdue, or on the next day with a ledger. Losses are distinguished from
    deliveries.
    """
    lines = [
        make_accept(at(0, 1), "hour", ttl_s=3600),
        make_accept(at(0, 2), "day", ttl_s=86_400),
        make_accept(at(0, 3), "for ever", ttl_s=None),
        make_accept(at(0, 4), "in the gap", ttl_s=2 * 86_400),
        make_accept(at(0, 5), "expired late", ttl_s=3600),
        make_ending(at(1, 5), "expired", "expired late", at(0, 5)),
        *(make_ending(at(1, 6), state, f"unaccepted {state}", at(0, 6)) for state in ENDS),
        make_ending(at(1, 7), "evicted", "before the books", at(-3)),
        # It had ended already.
        make_ending(at(1, 8), "expired", "expired late", at(0, 5)),
        # The daemon ran until the end of these days.
        *(make_line("counters", at(n, 23, 59)) for n in range(3)),
        make_line("req.done", at(4, 1)),
    ]

    all_at_once = run_ledger(lines, Span(day(0), day(4)))["ledger_daily"]

    columns = ("overdue", "vanished", "orphans", "before_books", "lost_unaccepted")
    found = [tuple(row[name] for name in columns) for row in all_at_once]
    assert found == [(2, 2, 0, 0, 0), (2, 1, 4, 1, 3), (3, 1, 0, 0, 0), (3, 0, 0, 0, 0), (3, 0, 0, 0, 0)]

    daily: dict[str, list[Row]] = {name: [] for name in LEDGER_JOB.writes}
    nights = []
    # No run covered the days between.
    for span in (Span(day(0), day(1)), Span(day(4), day(4))):
        recent_lines = [row for row in lines if row["dt"] in span.widen(before=3)]
        result = run_ledger(recent_lines, span, daily)
        nights += [tuple(row[name] for name in columns[:2]) for row in result["ledger_daily"]]
        for name, rows in result.items():
            daily[name] += rows
    assert nights == [(2, 2), (2, 1), (3, 1)]


def test_message_has_not_vanished_while_no_daemon_ran() -> None:
    """Until a daemon has run for an hour since, it is only overdue."""
    lines = [
        make_line("proc.start", at(0, 1), boot="one"),
        make_accept(at(0, 20), "gone before the stop", ttl_s=3600, boot="one"),
        *(make_accept(at(0, 21), msg, ttl_s=3600, boot="one") for msg in ("expired at the start", "gone")),
        make_line("proc.stop", at(0, 22, 30), boot="one"),
        make_line("proc.start", at(1, 8), boot="two"),
        make_ending(at(1, 8), "expired", "expired at the start", at(0, 21), boot="two"),
        make_line("proc.stop", at(1, 8, 30), boot="two"),
        make_line("proc.start", at(1, 23, 30), boot="three"),
        make_line("counters", at(1, 23, 59), boot="three"),
        make_line("counters", at(2, 0, 31), boot="three"),
    ]

    def found(span: Span, daily: dict[str, list[Row]]) -> list[tuple[int, int, int]]:
        recent_lines = [row for row in lines if row["dt"] in span.widen(before=3)]
        result = run_ledger(recent_lines, span, daily)
        for name, rows in result.items():
            daily.setdefault(name, []).extend(rows)
        return [(row["overdue"], row["vanished"], row["difference"]) for row in result["ledger_daily"]]

    all_at_once = found(Span(day(0), day(2)), {})

    assert all_at_once == [(3, 1, 0), (2, 0, 0), (2, 1, 0)]
    nights: dict[str, list[Row]] = {}
    assert found(Span(day(0), day(1)), nights) + found(Span(day(2), day(2)), nights) == all_at_once


def test_ledger_of_a_day_without_events() -> None:
    result = run_ledger([], Span(day(0), day(1)))

    assert [row["dt"] for row in result["ledger_daily"]] == [day(0), day(1)]
    assert {value for row in result["ledger_daily"] for value in row.values()} == {0, day(0), day(1)}
    assert {row["books"] for row in result["ledger_daily"]} == {day(0)}
    assert result["open"] == result["messages_daily"] == result["lost_daily"] == []


@pytest.mark.parametrize("rcpt, tag_changes", [("a" * 32, 2), ("did:key:z6Mk", 0)])
def test_new_pseudonym_key_keeps_ledger_balanced(rcpt: str, tag_changes: int) -> None:
    """Messages open when the key changes end under another pseudonym, unless identifiers are plain."""
    new = {"rcpt": rcpt, "epoch": 2}
    lines = [
        make_accept(at(0, 12), "old tag", rcpt=rcpt, ttl_s=86_400),
        make_accept(at(0, 13), "older tag", rcpt=rcpt, ttl_s=None),
        make_accept(at(1, 12), "new", **new),
        make_ending(at(1, 13), "acked", "new", at(1, 12), **new),
        make_ending(at(1, 14), "acked", "new tag", at(0, 12), **new),
    ]

    result = run_ledger(lines, Span(day(0), day(9)))["ledger_daily"]

    assert all(row["difference"] == 0 for row in result)
    assert [row["open"] for row in result] == ([2, *[1] * 6, *[0] * 3] if tag_changes else [2] * 10)
    assert [row["across_epochs"] for row in result] == ([0, 1, *[0] * 5, 1, 0, 0] if tag_changes else [0] * 10)
    assert sum(row["ended_across_epochs"] for row in result) == (1 if tag_changes else 0)
    assert sum(row["orphans"] for row in result) == (0 if tag_changes else 1)
