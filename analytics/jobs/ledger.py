"""
J3: where the messages went.

The books balance, each day: opening + accepted = acked + expired + evicted + removed + across_epochs + open. The
opening comes from the snapshot of the day before, accepted from a count of lines that the rest is not made from.

A message's first acceptance and first ending count. Ids are never given out twice, and a message ends once; should a
line say otherwise, it counts as `again`, and as nothing else. An ending without an acceptance is an orphan, unless

* the message was, by its own age, accepted before the books were opened, on the first day that has events
  (`before_books`), or
* it may have been accepted under an earlier key, which gave it another tag (`ended_across_epochs`), or
* the acceptance is in the logs of the days before, so that the message had ended already (`again`), or
* it was accepted in the last moment of a start that was killed, before the line was written (`around_crash`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from analytics.classes import age_class, pushes_class, size_class
from analytics.job import Job, Span
from analytics.jobs import crashes, uptime
from analytics.jobs.lives import EARLY, ENDINGS, STATES, lives, pushes_on, summary
from analytics.settings import Settings
from analytics.times import DAY, SECOND, day_of, micros

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# A day without any log leaves a hole; what was open before it still is, as far back as this.
REMEMBERED_DAYS = 7
# Acceptances of messages that end a second time are looked for so far back.
_ENDED_DAYS = 3
_OVERDUE = 3600 * SECOND
# When to give up what waits for ever and was accepted under an earlier key.
_FOR_EVER = 7 * DAY
_LOSSES = dict(tuple(ENDINGS.items())[1:])
_OUT = (*STATES, "across_epochs", "open")
_ENTRY = "array<struct<dt: date, entry: string, n: bigint>>"
_STANDING = "array<struct<dt: date, state: string, age_class: string, pushes_class: string>>"
_ENTRIES = (
    "opening",
    "accepted",
    *_OUT,
    "orphans",
    "around_crash",
    "before_books",
    "again",
    "overdue",
    "vanished",
    "lost_unaccepted",
    "ended_across_epochs",
)


def ledger(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    """`ledger_daily`, `messages_daily`, `lost_daily` and `open`."""
    events = tables["events"]
    before, opened = _before(tables["ledger_daily"], events, span)
    opening = tables["open"].where(F.col("dt") == F.lit(before))
    small = summary(lives(events, opening, span), span).persist()
    epochs = _epochs(small, span)
    followed = _followed(small, epochs, span)
    entries = [
        opening.select(F.lit(span.first).alias("dt"), F.lit("opening").alias("entry"), F.lit(1).alias("n")),
        _accepted(events, span),
        _entries(followed, _known_until(tables, before, span), span),
        _strays(small, tables, epochs, opened, span),
    ]
    return {
        "ledger_daily": _books(entries, opened, span),
        "messages_daily": _messages(followed, span),
        "lost_daily": _lost(followed, events, span),
        "open": _snapshot(followed, events, opening, span),
    }


def _before(ledger_daily: DataFrame, events: DataFrame, span: Span) -> tuple[date | None, date]:
    """The last day before the span that has books, None if there is none, and the day that books were opened."""
    past = ledger_daily.where(F.col("dt") < F.lit(span.first))
    row = past.agg(F.max("dt").alias("dt"), F.max_by("books", "dt").alias("books")).first()
    assert row is not None
    return row.dt, row.books or _first_day(events, span)


def _first_day(events: DataFrame, span: Span) -> date:
    """The first day of the span that has events, or of the span if none has."""
    row = events.where(F.col("dt") >= F.lit(span.first)).agg(F.min("dt").alias("dt")).first()
    return row.dt if row and row.dt else span.first


@dataclass(frozen=True, slots=True)
class _Epoch:
    """
    A key epoch.

    :param since: the first day with it.
    :param latest: last acceptance of a message that did not just come and go, microseconds.
    """

    number: int
    since: date
    latest: int


def _epochs(small: DataFrame, span: Span) -> list[_Epoch]:
    """The key epochs in the books, a handful; none if tags are plain."""
    carried = F.when(F.col("one.accepted_at").isNotNull(), F.lit(span.first))
    found = (
        small.where(F.col("epoch").isNotNull())
        .groupBy("epoch")
        .agg(F.min(F.coalesce("accepted_on", carried, "ended_on")), F.coalesce(F.max("one.accepted_at"), F.lit(0)))
        .orderBy("epoch")
    )
    return [_Epoch(*row) for row in found.collect()]


def _followed(small: DataFrame, epochs: Sequence[_Epoch], span: Span) -> DataFrame:
    """
    Messages in the books, and further lines of those that had ended.

    :return: as :func:`analytics.jobs.lives.summary`, and lapsed_at: when they become overdue, microseconds; lapsed:
        the day of that;
        written_off: the day; open_on: the days at whose end they were open, null if there is none.
    """
    rows = small.select("*", "one.*").drop("one").withColumn("past", F.coalesce("past", F.lit(False)))
    patience = F.coalesce(F.col("ttl_s") * SECOND + _OVERDUE, F.lit(_FOR_EVER))
    superseded = _superseded(epochs)
    given_up = F.greatest(day_of(F.col("accepted_at") + patience), superseded, F.lit(span.first))
    is_gone = superseded.isNotNull() & F.col("ended_on").isNull() & ~F.col("past") & (given_up <= F.lit(span.last))
    first = F.coalesce("accepted_on", F.lit(span.first))
    last = F.least(F.lit(span.last), F.date_sub(F.coalesce("ended_on", "written_off"), 1))
    return (
        rows.where(F.col("msg").isNull() | F.col("accepted_at").isNotNull())
        .withColumn("lapsed_at", F.col("accepted_at") + F.col("ttl_s") * SECOND + _OVERDUE)
        .withColumn("lapsed", day_of(F.col("lapsed_at")))
        .withColumn("written_off", F.when(is_gone, given_up))
        .withColumn(
            "open_on", F.when((first <= last) & F.col("msg").isNotNull() & ~F.col("past"), F.sequence(first, last))
        )
    )


def _superseded(epochs: Sequence[_Epoch]) -> Column:
    """The first day of a later epoch than that of the message; null if there is none."""
    later = F.lit(None).cast("date")
    for this, after in pairwise(epochs):
        later = F.when(F.col("epoch") == this.number, F.lit(after.since)).otherwise(later)
    return later


def _strays(
    small: DataFrame, tables: Mapping[str, DataFrame], epochs: Sequence[_Epoch], opened: date, span: Span
) -> DataFrame:
    """Endings without an acceptance, as entries of the books."""
    strays = small.where(F.col("one").isNotNull()).select("ended_on", "state", "one.*")
    strays = strays.where(F.col("accepted_at").isNull() & (F.col("ended_on") <= F.lit(span.last)))
    earlier = F.lit(False)
    for epoch in epochs:
        fits = (F.col("ending_epoch") > epoch.number) & (F.col("since") <= epoch.latest + EARLY)
        earlier = earlier | F.coalesce(fits, F.lit(False))
    excuse = F.when(F.col("since") < micros(opened) + EARLY, "before_books").when(earlier, "ended_across_epochs")
    named = strays.select("msg", "since", "state", F.col("ended_on").alias("dt"), excuse.alias("excuse"))
    suspects = named.where(F.col("excuse").isNull()).select("msg", "since", "dt")
    events = tables["events"]
    accepted = events.where((F.col("event") == "msg.accept") & (F.col("dt") < F.lit(span.first))).select("msg")
    had_ended = accepted.join(suspects, "msg").select("msg").distinct().withColumn("entry", F.lit("again"))
    untold = crashes.near_crash(suspects, tables["boots_daily"]).withColumn("crash", F.lit("around_crash"))
    entry = F.coalesce("excuse", "entry", "crash", F.lit("orphans"))
    known = named.join(had_ended, "msg", "left").join(untold, "msg", "left").withColumn("entry", entry)
    is_lost = F.col("state").isin(*_LOSSES.values()) & (F.col("entry") != "again")
    entries = F.array_compact(F.array("entry", F.when(is_lost, F.lit("lost_unaccepted"))))
    return known.select("dt", F.explode(entries).alias("entry"), F.lit(1).alias("n"))


def _accepted(events: DataFrame, span: Span) -> DataFrame:
    """Lines that accept a message."""
    lines = events.where(
        (F.col("event") == "msg.accept") & F.col("msg").isNotNull() & (F.col("dt") >= F.lit(span.first))
    )
    return lines.groupBy("dt").agg(F.lit("accepted").alias("entry"), F.count(F.lit(1)).alias("n"))


def _known_until(tables: Mapping[str, DataFrame], before: date | None, span: Span) -> dict[date, tuple[int, int]]:
    """
    Day to two times, microseconds: a message that became overdue between them is missed for the first time that day.

    A daemon that was down could not let it expire, so they are the last lines of starts that had run for an hour.
    """
    lines = {row["dt"]: row["last"] for row in uptime.last_lines(tables["boots_daily"], tables["events"]).collect()}
    known = [max((at for day, at in lines.items() if day <= last), default=0) for last in span.days]
    earlier = max((at for day, at in lines.items() if before is not None and day <= before), default=0)
    return dict(zip(span.days, pairwise([earlier, *known]), strict=True))


def _entries(followed: DataFrame, known_until: Mapping[date, tuple[int, int]], span: Span) -> DataFrame:
    """What the messages add to the books."""
    again = [
        _entry("repeated_on", "accepted", -F.col("repeats")),
        _entry("repeated_on", "again", F.col("repeats")),
        _entry("surplus_on", "again", F.col("surplus")),
    ]
    ended = F.struct(F.col("ended_on").alias("dt"), F.col("state").alias("entry"), "n")
    once = F.array(ended, _entry("written_off", "across_epochs", F.col("n")), *again)
    daily = F.transform("open_on", lambda dt: F.array(
        _entry(dt, "open", F.col("n")),
        _entry(F.date_add(dt, 1), "opening", F.col("n")),
        _entry(F.when(F.col("lapsed") <= dt, dt), "overdue", F.col("n")),
        _entry(F.when(_has_vanished(dt, known_until), dt), "vanished", F.col("n")),
    ))  # fmt: skip
    every = F.concat(once, F.coalesce(F.flatten(daily), F.array().cast(_ENTRY)))
    return followed.select(F.inline(every)).where(F.col("dt").between(F.lit(span.first), F.lit(span.last)))


def _has_vanished(day: Column, known_until: Mapping[date, tuple[int, int]]) -> Column:
    after, until = (
        F.create_map(*(F.lit(one) for day, times in known_until.items() for one in (day, times[n]))) for n in (0, 1)
    )
    return (F.col("lapsed_at") > after[day]) & (F.col("lapsed_at") <= until[day])


def _entry(day: Column | str, entry: str, n: Column) -> Column:
    day = F.col(day) if isinstance(day, str) else day
    return F.struct(day.alias("dt"), F.lit(entry).alias("entry"), n.alias("n"))


def _books(entries: Sequence[DataFrame], opened: date, span: Span) -> DataFrame:
    """`ledger_daily`: the entries added up, a row for each day of the span even if nothing happened."""
    days = F.explode(F.sequence(F.lit(span.first), F.lit(span.last)))
    none = entries[0].sparkSession.range(1).select(days.alias("dt"), F.lit("").alias("entry"), F.lit(0).alias("n"))
    every = reduce(lambda one, other: one.unionByName(other), entries, none)
    totals = [
        F.coalesce(F.sum(F.when(F.col("entry") == name, F.col("n"))), F.lit(0)).alias(name) for name in _ENTRIES
    ]
    into, out_of = F.col("opening") + F.col("accepted"), reduce(lambda a, b: a + b, map(F.col, _OUT))
    return every.groupBy("dt").agg(*totals).withColumn("difference", into - out_of).withColumn("books", F.lit(opened))


def _messages(followed: DataFrame, span: Span) -> DataFrame:
    """`messages_daily`."""
    ended = F.struct(
        F.col("ended_on").alias("dt"),
        "state",
        F.col("ended_age").alias("age_class"),
        F.col("ended_pushes").alias("pushes_class"),
    )
    still = F.transform("open_on", lambda dt: F.struct(
        dt.alias("dt"),
        F.lit("open").alias("state"),
        age_class((_end_of(dt) - F.col("accepted_at")) / 1000).alias("age_class"),
        pushes_class(pushes_on(F.col("pushes"), dt, span)).alias("pushes_class"),
    ))  # fmt: skip
    each = F.concat(F.array(ended), F.coalesce(still, F.array().cast(_STANDING)))
    return (
        followed.select("proto", "n", "bytes", F.inline(each))
        .where(F.col("dt").isNotNull())
        .groupBy("dt", "proto", "state", "age_class", "pushes_class")
        .agg(F.sum("n").alias("n"), F.sum("bytes").alias("bytes"))
    )


def _end_of(day: Column) -> Column:
    return F.unix_micros(F.date_add(day, 1).cast("timestamp"))


def _lost(followed: DataFrame, events: DataFrame, span: Span) -> DataFrame:
    """`lost_daily`."""
    lost = followed.where(F.col("state").isin(*_LOSSES.values()))
    lines = events.where(F.col("event").isin(*_LOSSES) & (F.col("dt") >= F.lit(span.widened(before=1).first))).select(
        "msg", "reason", _state().alias("state")
    )
    # Not of every line that ends a message, only of the ones needed: an aggregate of strings is slow.
    reasons = lost.join(lines, ["msg", "state"], "left").groupBy(
        "msg", F.col("ended_on").alias("dt"), size_class(F.col("size")).alias("size_class"),
        F.col("ended_age").alias("age_class"), (F.col("ended_pushes") != "0").alias("pushed"), "bytes",
    ).agg(F.coalesce(F.min("reason"), F.lit("")).alias("reason"))  # fmt: skip
    return reasons.groupBy("dt", "reason", "size_class", "age_class", "pushed").agg(
        F.count(F.lit(1)).alias("n"), F.sum("bytes").alias("bytes")
    )


def _state() -> Column:
    return F.coalesce(*(F.when(F.col("event") == event, F.lit(state)) for event, state in _LOSSES.items()))


def _snapshot(followed: DataFrame, events: DataFrame, opening: DataFrame, span: Span) -> DataFrame:
    """`open`."""
    accepted = events.where((F.col("event") == "msg.accept") & (F.col("dt") >= F.lit(span.first)))
    names = ("msg", "rcpt", "node")
    known = accepted.select(*names).unionByName(opening.select(*names))
    some = followed.where(F.col("open_on").isNotNull())
    own = ("msg", "proto", "accepted_at", "size", "ttl_s", "pushes", "epoch", "open_on")
    named = some.select(*own).join(known, "msg").groupBy(*own).agg(F.min(F.struct("node", "rcpt")).alias("first"))
    return named.withColumn("dt", F.explode("open_on")).select(
        "dt",
        "msg",
        "first.rcpt",
        "proto",
        "first.node",
        F.timestamp_micros("accepted_at").alias("accepted_at"),
        "size",
        "ttl_s",
        pushes_on(F.col("pushes"), F.col("dt"), span).alias("pushes"),
        "epoch",
    )


JOB = Job(
    "ledger",
    reads=("events",),
    # `open` comes last: by then it is known how little the others left to look at.
    makes=("ledger_daily", "messages_daily", "lost_daily", "open"),
    transform=ledger,
    recalls={
        "events": _ENDED_DAYS,
        "open": REMEMBERED_DAYS,
        "ledger_daily": REMEMBERED_DAYS,
        "boots_daily": crashes.REMEMBERED_DAYS,
    },
)
