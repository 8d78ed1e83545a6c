"""The message ledger, against books kept in plain Python."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from analytics.job import Span
from analytics.jobs.message_ledger import LEDGER_JOB
from tests.analytics.events import at, day, event, events, plans, run, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Row = dict[str, Any]
DAYS = 5
COLUMNS = ("opening", "accepted", "acked", "expired", "evicted", "removed", "open", "again")
ENDS = {"acked": "msg.ack", "expired": "msg.expire", "evicted": "msg.evict", "removed": "msg.remove"}


def accept(ts: datetime, msg: str, **fields: Any) -> Row:
    own = {"rcpt": "r1", "proto": "didcomm", "size": 100, "ttl_s": 86_400, "method": "queue"}
    return event(ts, "msg.accept", msg=msg, **{**own, **fields})


def end(ts: datetime, state: str, msg: str, since: datetime, **fields: Any) -> Row:
    ms = int((ts - since).total_seconds() * 1000)
    own = {"latency_ms": float(ms)} if state == "acked" else {"age_ms": ms, "size": 100, "reason": state}
    return event(ts, ENDS[state], msg=msg, **{"rcpt": "r1", **own, **fields})


def push(ts: datetime, msg: str, **fields: Any) -> Row:
    return event(ts, "msg.push", msg=msg, rcpt="r1", **{"latency_ms": 1.0, "ok": True, **fields})


class ExpectedLedger:
    """What a client would write down, message by message."""

    def __init__(self, seed: int, messages: int) -> None:
        self.lines: list[Row] = []
        self.accepted: Counter[int] = Counter()
        self.ended: Counter[tuple[int, str]] = Counter()
        self.again: Counter[int] = Counter()
        self.open: dict[int, dict[str, int]] = {n: {} for n in range(DAYS)}
        chance = random.Random(seed)
        for number in range(messages):
            self._live(f"m{number}", chance)
        # Lines come in no order.
        chance.shuffle(self.lines)

    def _live(self, msg: str, chance: random.Random) -> None:
        seconds = chance.uniform(0, DAYS * 86_400 - 1)
        born = at(0, second=seconds)
        state = chance.choices([*ENDS, ""], [70, 8, 8, 4, 10])[0]
        lasted = chance.expovariate(1 / 300) if chance.random() < 0.6 else chance.uniform(0, 2 * 86_400)
        node, size = chance.choice("abc"), chance.randrange(1, 5000)
        self.lines.append(accept(born, msg, node=node, size=size, rcpt=chance.choice(["hot", "hot", "r2"])))
        pushed = [born + timedelta(seconds=lasted * share) for share in chance.choices([0.1, 0.5, 0.9], k=2)]
        self.lines += [push(ts, msg) for ts in pushed if ts < at(DAYS)]
        self.lines.append(push(born, msg, ok=False))
        gone = born + timedelta(seconds=lasted)
        first = int(seconds // 86_400)
        last = int((seconds + lasted) // 86_400) if state else DAYS
        self.accepted[first] += 1
        for n in range(first, min(last, DAYS)):
            self.open[n][msg] = sum(ts < at(n + 1) for ts in pushed)
        if last < DAYS and state:
            self.lines.append(end(gone, state, msg, born, node=chance.choice("abc")))
            self.ended[last, state] += 1
            self._redeliver(msg, born, gone, last, state, chance)

    def _redeliver(
        self, msg: str, born: datetime, gone: datetime, last: int, state: str, chance: random.Random
    ) -> None:
        later = gone + timedelta(seconds=chance.uniform(1, 7200))
        if state == "acked" and chance.random() < 0.1 and later < at(DAYS):
            self.lines += [push(later, msg), end(later, "acked", msg, born)]
            self.again[(later - at(0)).days] += 1

    def ledger(self) -> list[dict[str, int]]:
        rows = []
        for n in range(DAYS):
            row = {state: self.ended[n, state] for state in ENDS}
            row |= {"opening": len(self.open[n - 1]) if n else 0, "accepted": self.accepted[n]}
            rows.append(row | {"open": len(self.open[n]), "again": self.again[n]})
        return rows


def tables(spark: SparkSession, lines: list[Row], before: dict[str, list[Row]] | None = None) -> dict[str, Any]:
    past = before or {}
    return {
        "events": events(spark, lines),
        "open": table(spark, "open", past.get("open", [])),
        "ledger_daily": table(spark, "ledger_daily", past.get("ledger_daily", [])),
        "boots_daily": table(spark, "boots_daily", past.get("boots_daily", boots(lines))),
    }


def boots(lines: list[Row]) -> list[Row]:
    """What another job makes of the lines."""
    found: dict[tuple[Any, ...], Row] = {}
    for row in sorted(lines, key=lambda row: row["ts"]):
        name = {column: row[column] for column in ("dt", "node", "boot")}
        known = found.setdefault(tuple(name.values()), {**name, "stopped": False})
        known["last_at"] = row["ts"]
        known["stopped"] |= row["event"] == "proc.stop"
    return list(found.values())


@pytest.fixture(autouse=True)
def no_cache(spark: SparkSession) -> Iterator[None]:
    yield
    spark.catalog.clearCache()


@pytest.mark.exhaustive
def test_five_days_at_once_and_in_parts_agree_with_the_truth(spark: SparkSession) -> None:
    books = ExpectedLedger(seed=5, messages=200)
    span = Span(day(0), day(DAYS - 1))
    whole = run(LEDGER_JOB, tables(spark, books.lines), span)

    assert [{name: row[name] for name in COLUMNS} for row in whole["ledger_daily"]] == books.ledger()
    for row in whole["ledger_daily"]:
        assert row["difference"] == row["orphans"] == row["before_books"] == row["across_epochs"] == 0
    found = {n: {row["msg"]: row["pushes"] for row in whole["open"] if row["dt"] == day(n)} for n in range(DAYS)}
    assert found == books.open
    for row in whole["ledger_daily"]:
        states = Counter[str]()
        for part in whole["messages_daily"]:
            states[part["state"]] += part["n"] if part["dt"] == row["dt"] else 0
        assert states == Counter({state: row[state] for state in (*ENDS, "open") if row[state]})
        lost = sum(part["n"] for part in whole["lost_daily"] if part["dt"] == row["dt"])
        assert lost == row["expired"] + row["evicted"] + row["removed"]

    daily: dict[str, list[Row]] = {name: [] for name in LEDGER_JOB.writes}
    for span in (Span(day(0), day(1)), Span(day(2), day(4))):
        recalled = [row for row in books.lines if row["dt"] in span.widen(before=3)]
        made = run(LEDGER_JOB, tables(spark, recalled, daily), span)
        for name, rows in made.items():
            daily[name] += rows
    assert daily == whole


def test_a_late_file_heals_the_books(spark: SparkSession) -> None:
    books = ExpectedLedger(seed=6, messages=150)
    span = Span(day(0), day(DAYS - 1))
    late = [row for row in books.lines if row["event"] == "msg.accept" and row["node"] == "a"][::5]
    missing = [row for row in books.lines if row not in late]

    broken = run(LEDGER_JOB, tables(spark, missing), span)["ledger_daily"]
    healed = run(LEDGER_JOB, tables(spark, books.lines), span)["ledger_daily"]

    ended = {row["msg"] for row in books.lines if row["event"] in ENDS.values()}
    assert sum(row["orphans"] for row in broken) == len({row["msg"] for row in late} & ended) > 0
    assert all(row["difference"] == 0 for row in broken + healed)
    assert [{name: row[name] for name in COLUMNS} for row in healed] == books.ledger()


def test_what_a_day_can_hold(spark: SparkSession) -> None:
    noon, soon = at(1, 12), at(1, 13)
    lines = [
        # Acknowledged before the acceptance was logged, around midnight.
        accept(at(1, 0, 0, 0.2), "early", ttl_s=None),
        end(at(0, 23, 59, 59.9), "acked", "early", at(0, 23, 59, 59.8)),
        push(at(0, 23, 59, 59.85), "early"),
        # The same of the next day: not yet known.
        end(at(1, 23, 59, 59.9), "acked", "tomorrow's", at(1, 23, 59, 59.8)),
        # All on the day before, of which only the last minutes are looked at.
        accept(at(0, 23, 58), "past"),
        end(at(0, 23, 59), "acked", "past", at(0, 23, 58)),
        end(at(1, 0, 1), "acked", "past", at(0, 23, 58)),
        # Accepted once more, of which only the first acceptance is looked at.
        accept(at(0, 23, 40), "reborn"),
        end(at(0, 23, 41), "acked", "reborn", at(0, 23, 40)),
        accept(noon, "reborn"),
        # A second ending of what ended on the day before, and one of nobody knows what.
        accept(at(0, 3), "known"),
        end(at(0, 4), "acked", "known", at(0, 3)),
        end(noon, "acked", "known", at(0, 3)),
        end(noon, "expired", "unknown", at(0, 3)),
        # Accepted before the books were opened.
        end(noon, "acked", "ancient", at(-9, 3)),
        # Two endings: the first one counts; two acceptances: once.
        accept(noon, "twice", proto="decentrl", size=None),
        accept(noon, "twice", proto="decentrl", size=7),
        end(soon, "evicted", "twice", noon, reason="fifo_bytes"),
        end(at(1, 14), "acked", "twice", noon),
        # Lost after three pushes, without a word why.
        accept(noon, "lost", size=2000),
        *(push(soon, "lost") for _ in range(3)),
        end(at(1, 23), "removed", "lost", noon, reason=None),
        # Open for long: one overdue, one for ever, one in time, and one carried that ended.
        accept(noon, "brief", ttl_s=3600),
        # Its clock had lost the day.
        {**accept(at(-400), "misdated"), "dt": day(1)},
        event(noon, "msg.ack"),
        event(noon, "msg.accept"),
        event(noon, "req.done"),
        end(soon, "acked", "carried", at(-1)),
    ]
    carried = {"dt": day(0), "rcpt": "r9", "proto": "decentrl", "node": "z", "size": 5, "pushes": 4, "epoch": 1}
    before: dict[str, list[Row]] = {
        "open": [
            {**carried, "msg": "carried", "accepted_at": at(-1)},
            {**carried, "msg": "for ever", "accepted_at": at(-2), "ttl_s": None},
            # Of a day that has long been followed by another.
            {**carried, "dt": day(-1), "msg": "older", "accepted_at": at(-2)},
        ],
        "ledger_daily": [{"dt": day(n), "books": day(-1)} for n in (-1, 0)],
    }

    made = run(LEDGER_JOB, tables(spark, lines, before), Span(day(1), day(1)))

    assert made["ledger_daily"] == [
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
    own = {"dt": day(1), "rcpt": "r1", "proto": "didcomm", "node": "a", "size": 100, "epoch": 1, "pushes": 0}
    assert made["open"] == [
        {**own, "msg": "brief", "accepted_at": noon.replace(tzinfo=None), "ttl_s": 3600},
        {**carried, "dt": day(1), "msg": "for ever", "accepted_at": at(-2).replace(tzinfo=None), "ttl_s": None},
        {**own, "msg": "misdated", "accepted_at": at(1).replace(tzinfo=None), "ttl_s": 86_400},
    ]
    assert made["lost_daily"] == [
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
    assert [tuple(row.values())[1:] for row in made["messages_daily"]] == [
        ("decentrl", "acked", "7 <3d", "2-4", 1, 5),
        ("decentrl", "evicted", "5 <6h", "0", 1, 7),
        ("decentrl", "open", "8 3d+", "2-4", 1, 5),
        ("didcomm", "acked", "0 <1s", "1", 1, 100),
        ("didcomm", "open", "6 <1d", "0", 1, 100),
        ("didcomm", "open", "7 <3d", "0", 1, 100),
        ("didcomm", "removed", "6 <1d", "2-4", 1, 2000),
    ]


def test_acceptances_lost_with_a_killed_start_are_no_orphans(spark: SparkSession) -> None:
    killed, stopped = at(1, 11), at(1, 9)
    lines = [
        event(at(0, 1), "log.open", boot="killed"),
        event(killed, "req.done", boot="killed"),
        event(at(1, 11, 1), "log.open", boot="next"),
        # Silent ever since, but no other start of the node came after it.
        event(at(1, 10), "log.open", node="b", boot="last"),
        event(stopped, "log.open", node="c", boot="stopped"),
        event(stopped, "proc.stop", node="c", boot="stopped"),
        event(at(1, 9, 1), "log.open", node="c", boot="after"),
        end(at(1, 12), "acked", "just after", killed + timedelta(seconds=9.9), boot="next"),
        end(at(2, 12), "expired", "just before", killed - timedelta(seconds=9.9), boot="next"),
        end(at(1, 12), "acked", "too late", killed + timedelta(seconds=10.2), boot="next"),
        end(at(1, 12), "acked", "in order", stopped, boot="next"),
        end(at(1, 12), "acked", "running", at(1, 10), boot="next"),
    ]

    made = run(
        LEDGER_JOB, tables(spark, lines, {"ledger_daily": [{"dt": day(0), "books": day(0)}]}), Span(day(1), day(2))
    )

    rows = made["ledger_daily"]
    assert [(row["around_crash"], row["orphans"], row["difference"]) for row in rows] == [(1, 3, 0), (1, 0, 0)]


@pytest.mark.exhaustive
def test_a_killed_start_is_remembered_for_as_long_as_messages_wait(spark: SparkSession) -> None:
    """A night knows what a back-fill of all days knows, and no more."""
    lines = [
        event(at(0, 12), "req.done", boot="killed"),
        event(at(0, 12, 1), "log.open", boot="next"),
        end(at(5, 12), "expired", "long lost", at(0, 12), boot="next"),
        # Killed before midnight: on the day itself nobody knows yet that it does not go on.
        event(at(1, 23, 40), "req.done", node="b", boot="dead"),
        event(at(2, 0, 0, 1), "log.open", node="b", boot="anew"),
        end(at(1, 23, 58), "acked", "early", at(1, 23, 40), boot="next"),
        end(at(2, 1), "acked", "late", at(1, 23, 40), boot="next"),
    ]

    def night(first: int, last: int) -> list[tuple[int, int]]:
        recalled = [row for row in lines if row["dt"] in Span(day(first), day(last)).widen(before=3)]
        known = [row for row in boots(lines) if row["dt"] <= day(last)]
        before = [{"dt": day(n), "books": day(-9)} for n in range(-1, first)]
        made = run(
            LEDGER_JOB,
            tables(spark, recalled, {"ledger_daily": before, "boots_daily": known}),
            Span(day(first), day(last)),
        )
        return [(row["around_crash"], row["orphans"]) for row in made["ledger_daily"]]

    whole = night(0, 5)

    assert whole == [(0, 0), (0, 1), (1, 0), (0, 0), (0, 0), (1, 0)]
    assert [night(1, 1), night(5, 5)] == [whole[1:2], whole[5:]]


def test_books_open_on_the_first_day_that_has_events(spark: SparkSession) -> None:
    """Days without logs before it, in a back-fill, make no orphans of what was accepted in them."""
    lines = [end(at(3, 1), "acked", "old", at(2, 20)), accept(at(3, 2), "m"), end(at(3, 3), "acked", "m", at(3, 2))]

    made = run(LEDGER_JOB, tables(spark, lines), Span(day(0), day(4)))["ledger_daily"]

    assert [(row["before_books"], row["orphans"]) for row in made] == [(0, 0), (0, 0), (0, 0), (1, 0), (0, 0)]
    assert {row["books"] for row in made} == {day(3)}


def test_messages_vanish_once_and_losses_without_acceptance_count(spark: SparkSession) -> None:
    """On the day their time ends, or the next one with books; endings that are losses are told from deliveries."""
    lines = [
        accept(at(0, 1), "hour", ttl_s=3600),
        accept(at(0, 2), "day", ttl_s=86_400),
        accept(at(0, 3), "for ever", ttl_s=None),
        accept(at(0, 4), "in the gap", ttl_s=2 * 86_400),
        accept(at(0, 5), "expired late", ttl_s=3600),
        end(at(1, 5), "expired", "expired late", at(0, 5)),
        *(end(at(1, 6), state, f"unaccepted {state}", at(0, 6)) for state in ENDS),
        end(at(1, 7), "evicted", "before the books", at(-3)),
        # Once more what had ended already.
        end(at(1, 8), "expired", "expired late", at(0, 5)),
        # It ran until the end of these days.
        *(event(at(n, 23, 59), "counters") for n in range(3)),
        event(at(4, 1), "req.done"),
    ]

    whole = run(LEDGER_JOB, tables(spark, lines), Span(day(0), day(4)))["ledger_daily"]

    columns = ("overdue", "vanished", "orphans", "before_books", "lost_unaccepted")
    found = [tuple(row[name] for name in columns) for row in whole]
    assert found == [(2, 2, 0, 0, 0), (2, 1, 4, 1, 4), (3, 1, 0, 0, 0), (3, 0, 0, 0, 0), (3, 0, 0, 0, 0)]

    daily: dict[str, list[Row]] = {name: [] for name in LEDGER_JOB.writes}
    nights = []
    # None was made of the days between: nobody was there.
    for span in (Span(day(0), day(1)), Span(day(4), day(4))):
        recalled = [row for row in lines if row["dt"] in span.widen(before=3)]
        made = run(LEDGER_JOB, tables(spark, recalled, daily), span)
        nights += [tuple(row[name] for name in columns[:2]) for row in made["ledger_daily"]]
        for name, rows in made.items():
            daily[name] += rows
    assert nights == [(2, 2), (2, 1), (3, 1)]


def test_what_could_not_expire_has_not_vanished(spark: SparkSession) -> None:
    """While no daemon has run for an hour since, a message is overdue only."""
    lines = [
        event(at(0, 1), "proc.start", boot="one"),
        accept(at(0, 20), "gone before the stop", ttl_s=3600, boot="one"),
        *(accept(at(0, 21), msg, ttl_s=3600, boot="one") for msg in ("expired at the start", "gone")),
        event(at(0, 22, 30), "proc.stop", boot="one"),
        event(at(1, 8), "proc.start", boot="two"),
        end(at(1, 8), "expired", "expired at the start", at(0, 21), boot="two"),
        event(at(1, 8, 30), "proc.stop", boot="two"),
        event(at(1, 23, 30), "proc.start", boot="three"),
        event(at(1, 23, 59), "counters", boot="three"),
        event(at(2, 0, 31), "counters", boot="three"),
    ]

    def found(span: Span, daily: dict[str, list[Row]]) -> list[tuple[int, int, int]]:
        recalled = [row for row in lines if row["dt"] in span.widen(before=3)]
        made = run(LEDGER_JOB, tables(spark, recalled, daily), span)
        for name, rows in made.items():
            daily.setdefault(name, []).extend(rows)
        return [(row["overdue"], row["vanished"], row["difference"]) for row in made["ledger_daily"]]

    whole = found(Span(day(0), day(2)), {})

    assert whole == [(3, 1, 0), (2, 0, 0), (2, 1, 0)]
    nights: dict[str, list[Row]] = {}
    assert found(Span(day(0), day(1)), nights) + found(Span(day(2), day(2)), nights) == whole


def test_a_day_without_anything(spark: SparkSession) -> None:
    made = run(LEDGER_JOB, tables(spark, []), Span(day(0), day(1)))

    assert [row["dt"] for row in made["ledger_daily"]] == [day(0), day(1)]
    assert {value for row in made["ledger_daily"] for value in row.values()} == {0, day(0), day(1)}
    assert {row["books"] for row in made["ledger_daily"]} == {day(0)}
    assert made["open"] == made["messages_daily"] == made["lost_daily"] == []


@pytest.mark.parametrize("rcpt, gone", [("a" * 32, 2), ("did:key:z6Mk", 0)])
def test_a_new_key_does_not_break_the_balance(spark: SparkSession, rcpt: str, gone: int) -> None:
    """What is open when the key changes ends under another tag, unless tags are plain."""
    new = {"rcpt": rcpt, "epoch": 2}
    lines = [
        accept(at(0, 12), "old tag", rcpt=rcpt, ttl_s=86_400),
        accept(at(0, 13), "older tag", rcpt=rcpt, ttl_s=None),
        accept(at(1, 12), "new", **new),
        end(at(1, 13), "acked", "new", at(1, 12), **new),
        end(at(1, 14), "acked", "new tag", at(0, 12), **new),
    ]

    made = run(LEDGER_JOB, tables(spark, lines), Span(day(0), day(9)))["ledger_daily"]

    assert all(row["difference"] == 0 for row in made)
    assert [row["open"] for row in made] == ([2, *[1] * 6, *[0] * 3] if gone else [2] * 10)
    assert [row["across_epochs"] for row in made] == ([0, 1, *[0] * 5, 1, 0, 0] if gone else [0] * 10)
    assert sum(row["ended_across_epochs"] for row in made) == (1 if gone else 0)
    assert sum(row["orphans"] for row in made) == (0 if gone else 1)


def test_plans(spark: SparkSession) -> None:
    found = plans(LEDGER_JOB, tables(spark, [accept(at(0), "m")]), Span(day(0), day(0)))

    assert "HashAggregate" in found
    assert not any(name in found for name in ("CartesianProduct", "BatchEvalPython", "Window"))
