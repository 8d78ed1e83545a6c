"""
The message ledger.

It balances each day: opening + accepted = acked + expired + evicted + removed + across_epochs + open. The opening
comes from the snapshot of the day before; accepted is a count of lines that the other entries are not derived from.

The rows of a span are grouped by message id once, together with the messages that were open before it. Only numbers
are aggregated, because Spark hashes numbers but sorts strings. All times are microseconds.

A message's first acceptance and first ending count. Ids are unique and a message ends once; lines that contradict
this count as `again` only. An ending without an acceptance is an orphan, unless

* by its own age the message was accepted before the first day with events (`before_books`), or
* it may have been accepted under an earlier key, under another pseudonym (`ended_across_epochs`), or
* the acceptance is in the logs of earlier days, so that the message had ended already (`again`), or
* it was accepted just before a daemon was killed, before the line was written (`around_crash`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import reduce
from itertools import pairwise
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.jobs.column_functions import (
    DAY_MICROS,
    SECOND_MICROS,
    classify_age,
    classify_pushes,
    classify_size,
    day_to_micros,
    get_event_micros,
    include_time_before,
    micros_to_day,
)
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Longer than messages live, because only their ending shows that an acceptance was lost.
CRASH_HISTORY_DAYS = 40
# Distance from the last line of a killed start within which acceptances may be lost.
_CRASH_WINDOW = 10 * SECOND_MICROS


def find_accepted_near_crash(messages: DataFrame, boots: DataFrame) -> DataFrame:
    """
    Messages accepted just before any node was killed.

    :param messages: msg; since: time of acceptance in microseconds; dt: day of the ending.
    :param boots: `boots_daily` of all days to search. Only what was known by the end of `dt` counts.
    :return: msg, distinct.
    """
    ends = _find_crashes(boots).withColumn(
        "block", F.explode(F.sequence(*(_get_window_number("at") + n for n in (-1, 1))))
    )
    found = messages.withColumn("block", _get_window_number("since")).join(F.broadcast(ends), "block")
    near = (F.abs(F.col("since") - F.col("at")) <= _CRASH_WINDOW) & (F.col("known_on") <= F.col("dt"))
    return found.where(near).select("msg").distinct()


def _get_window_number(time: str) -> Column:
    return F.floor(F.col(time) / _CRASH_WINDOW)


def _find_crashes(boots: DataFrame) -> DataFrame:
    """
    Starts without proc.stop that were followed by another start of the node.

    :return: at: time of the last line, microseconds; known_on: the day on which the next one began.
    """
    starts = boots.groupBy("node", "boot").agg(
        F.unix_micros(F.max("last_at")).alias("at"), F.max("stopped").alias("stopped"), F.min("dt").alias("began_on")
    )
    # One pass over the starts instead of a self-join.
    in_order = F.sort_array(F.collect_list(F.struct("at", "stopped", "began_on"))).alias("starts")
    nodes = starts.where(F.col("at").isNotNull()).groupBy("node").agg(in_order)
    each = F.transform("starts", lambda start, index: F.struct(
        start.at.alias("at"),
        start.stopped.alias("stopped"),
        F.get("starts", index + 1).began_on.alias("known_on"),
    ))  # fmt: skip
    killed = ~F.col("stopped") & F.col("known_on").isNotNull()
    return nodes.select(F.inline(each)).where(killed).select("at", "known_on")


_MIN_UPTIME = 3600 * SECOND_MICROS


def find_last_lines(boots: DataFrame, events: DataFrame) -> DataFrame:
    """
    Last line on each day of any start that had run for an hour by then.

    :param boots: `boots_daily`.
    :param events: with the proc.start of these starts; a start without it counts from the beginning of its first day.
    :return: dt; last: microseconds. Days without such a line are missing.
    """
    name = ["node", "boot"]
    start_times = events.where(F.col("event") == "proc.start").groupBy(*name).agg(F.min("ts").alias("began"))
    firsts = boots.groupBy(*name).agg(F.min("dt").cast("timestamp").alias("midnight")).join(start_times, name, "left")
    last, since = F.unix_micros("last_at"), F.unix_micros(F.coalesce("began", "midnight"))
    return boots.join(firsts, name).where(last - since >= _MIN_UPTIME).groupBy("dt").agg(F.max(last).alias("last"))


# Lines of a message may be in any order across nodes, even an acknowledgement before its acceptance: clocks differ,
# and an acceptance is logged after the response to a push.
CLOCK_TOLERANCE = 600 * SECOND_MICROS

ENDING_EVENTS = {"msg.ack": "acked", "msg.expire": "expired", "msg.evict": "evicted", "msg.remove": "removed"}
ENDED_STATES = tuple(ENDING_EVENTS.values())
_MESSAGE_EVENTS = ("msg.accept", "msg.push", *ENDING_EVENTS)
_PROTOS = ("", "didcomm", "decentrl")
# Reserves the low bits of an ending's time for the number of its state.
_STATE_FACTOR = 8


def trace_messages(events: DataFrame, opening: DataFrame, span: Span) -> DataFrame:
    """
    One row for each message that was open before the span or has a line in it.

    :param events: of the span and of the day before, as far as there is one.
    :param opening: rows of `open`, one for each message.
    :return: msg; accepted_at, null without a logged acceptance; accepted_on: the day, null if open before the span;
        ended_at and ended_on, null if open; state; size; ttl_s; proto; epoch of acceptance and ending_epoch, null of
        plain identifiers; since: time of acceptance according to the ending; pushes: array of the number of pushes by
        the end of each day of the span; repeats and repeated_on: acceptances after the first; surplus and surplus_on:
        endings after the first; past: accepted and ended before the span, and now once more.
    """
    found = _select_message_lines(events, span).unionByName(_convert_open_messages(opening), allowMissingColumns=True)
    accepting, ending = F.col("accepting"), F.col("state") > 0
    recent = F.col("at") >= day_to_micros(span.first)
    days = range(len(span.days))
    grouped = found.groupBy("msg").agg(
        F.max("carried").alias("carried"),
        F.min(F.when(accepting | (F.col("carried") == 1), F.col("at"))).alias("accepted_at"),
        F.count(F.when(accepting & recent, 1)).alias("accepts"),
        F.max(F.when(accepting, F.col("at"))).alias("repeated_at"),
        F.min(F.when(ending, F.col("at") * _STATE_FACTOR + F.col("state"))).alias("ending"),
        F.count(F.when(ending, 1)).alias("endings"),
        F.max(F.when(ending, F.col("at"))).alias("surplus_at"),
        F.count(F.when(ending & recent, 1)).alias("recent_endings"),
        F.max(F.when(ending, F.col("at") - F.col("age"))).alias("since"),
        *(F.max(name).alias(name) for name in ("size", "ttl_s", "proto", "epoch", "ending_epoch")),
        F.sum(F.when(F.col("push_on") < 0, F.col("pushes"))).alias("early"),
        *(F.sum(F.when(F.col("push_on") <= day, F.col("pushes"))).alias(f"p{day}") for day in days),
    )
    return _resolve_messages(grouped, span).where(~F.col("past") | (F.col("repeats") + F.col("surplus") > 0))


def _select_message_lines(events: DataFrame, span: Span) -> DataFrame:
    """Lines of the span, and earlier ones that may belong to messages accepted in it."""
    event, at, start = F.col("event"), get_event_micros(events), day_to_micros(span.first)
    accepting, pushing = event == "msg.accept", event == "msg.push"
    age = F.coalesce(F.col("latency_ms").cast("bigint"), F.col("age_ms"), F.lit(0)) * 1000
    late = (accepting & (at >= start - 3 * CLOCK_TOLERANCE)) | (
        ~accepting & (at >= start - CLOCK_TOLERANCE) & (age < CLOCK_TOLERANCE)
    )
    # Plain identifiers are the same under any key.
    keyed = ~F.coalesce(F.col("rcpt").startswith("did:"), F.lit(False))
    wanted = event.isin(*_MESSAGE_EVENTS) & F.col("msg").isNotNull() & (~pushing | F.coalesce("ok", F.lit(True)))
    lines = include_time_before(events, span, timedelta(microseconds=3 * CLOCK_TOLERANCE))
    return lines.where(wanted & ((F.col("dt") >= F.lit(span.first)) | late)).select(
        "msg",
        at.alias("at"),
        accepting.alias("accepting"),
        F.lit(0).alias("carried"),
        _encode_name(event, tuple(ENDING_EVENTS)).alias("state"),
        age.alias("age"),
        F.when(accepting, F.col("size")).alias("size"),
        F.when(accepting, F.col("ttl_s")).alias("ttl_s"),
        _encode_name(F.col("proto"), _PROTOS[1:]).alias("proto"),
        F.when(accepting & keyed, F.col("epoch")).alias("epoch"),
        F.when(~accepting & ~pushing & keyed, F.col("epoch")).alias("ending_epoch"),
        F.when(pushing, F.datediff("dt", F.lit(span.first))).alias("push_on"),
        F.lit(1).cast("bigint").alias("pushes"),
    )  # fmt: skip


def _convert_open_messages(opening: DataFrame) -> DataFrame:
    """Convert open messages to lines."""
    return opening.select(
        "msg",
        F.unix_micros("accepted_at").alias("at"),
        F.lit(False).alias("accepting"),
        F.lit(1).alias("carried"),
        F.lit(0).alias("state"),
        "size",
        "ttl_s",
        _encode_name(F.col("proto"), _PROTOS[1:]).alias("proto"),
        "epoch",
        F.lit(0).alias("push_on"),
        "pushes",
    )


def _encode_name(value: Column, names: tuple[str, ...]) -> Column:
    """Position of the name, from 1; 0 if it is not listed."""
    cases = F.when(value.isNull(), 0)
    for number, name in enumerate(names, 1):
        cases = cases.when(value == name, number)
    return cases.otherwise(0)


def _decode_name(number: Column, names: tuple[str, ...]) -> Column:
    return F.element_at(F.array(*(F.lit(name) for name in names)), number)


def _resolve_messages(grouped: DataFrame, span: Span) -> DataFrame:
    """Derive the outcome of each message from its counts."""
    carried, accepted_at, start = F.col("carried") == 1, F.col("accepted_at"), day_to_micros(span.first)
    at = F.shiftright("ending", _STATE_FACTOR.bit_length() - 1)
    past = F.coalesce(~carried & (accepted_at < start), F.lit(False))
    # The snapshot of an open message includes the pushes of the day before.
    early = F.when(carried, F.coalesce("early", F.lit(0))).otherwise(0)
    pushes = [F.coalesce(f"p{day}", F.lit(0)) - early for day in range(len(span.days))]
    # A missing acceptance may still follow just after midnight.
    wait = F.when(accepted_at.isNull() & (at - F.col("since") < CLOCK_TOLERANCE), CLOCK_TOLERANCE).otherwise(0)
    ended = at.isNotNull() & ~past
    ended_at = F.when(ended, F.greatest(at + wait, accepted_at, F.lit(start)))
    return grouped.select(
        "msg",
        "accepted_at",
        past.alias("past"),
        F.when(~carried, micros_to_day(accepted_at)).alias("accepted_on"),
        ended_at.alias("ended_at"),
        micros_to_day(ended_at).alias("ended_on"),
        F.when(ended, _decode_name((F.col("ending") % _STATE_FACTOR).cast("int"), ENDED_STATES)).alias("state"),
        F.coalesce("size", F.lit(0)).alias("size"),
        "ttl_s",
        _decode_name(F.col("proto") + 1, _PROTOS).alias("proto"),
        F.coalesce("epoch", "ending_epoch").alias("epoch"),
        "ending_epoch",
        "since",
        F.array(*pushes).alias("pushes"),
        # Acceptances in the span beyond the first, which was earlier if the message was open or has ended.
        F.greatest(F.col("accepts") - F.when(carried | past, 0).otherwise(1), F.lit(0)).alias("repeats"),
        micros_to_day(F.col("repeated_at")).alias("repeated_on"),
        F.when(past, F.col("recent_endings")).otherwise(F.greatest(F.col("endings") - 1, F.lit(0))).alias("surplus"),
        micros_to_day(F.greatest("surplus_at", F.lit(start))).alias("surplus_on"),
    )


def summarize_messages(messages: DataFrame, span: Span) -> DataFrame:
    """
    Aggregate messages: those that need individual treatment have a row each, the others are counted.

    :return: accepted_on, ended_on, state, proto, epoch, ended_age and ended_pushes (classes, null if open), n, bytes;
        one: the rest of the message, null where n messages were accepted and acknowledged on one day, once each.
    """
    simple = (
        (F.col("accepted_on") == F.col("ended_on"))
        & (F.col("state") == ENDED_STATES[0])
        & (F.col("repeats") == 0)
        & (F.col("surplus") == 0)
    )
    one = F.struct(
        *("msg", "accepted_at", "size", "ttl_s", "since", "ending_epoch", "pushes"),
        *("repeats", "repeated_on", "surplus", "surplus_on", "past"),
    )
    pushes = get_pushes_on_day(F.col("pushes"), F.col("ended_on"), span)
    age = F.floor((F.col("ended_at") - F.col("accepted_at")) / 1000)
    ended = F.col("ended_on").isNotNull()
    return messages.groupBy(
        *("accepted_on", "ended_on", "state", "proto", "epoch"),
        F.when(ended, classify_age(age)).alias("ended_age"),
        F.when(ended, classify_pushes(pushes)).alias("ended_pushes"),
        F.when(~F.coalesce(simple, F.lit(False)), one).alias("one"),
    ).agg(F.count(F.lit(1)).alias("n"), F.sum("size").alias("bytes"))


def get_pushes_on_day(pushes: Column, day: Column, span: Span) -> Column:
    """Number of pushes by the end of a day of the span."""
    return F.try_element_at(pushes, F.datediff(day, F.lit(span.first)) + 1)


# A day without logs leaves a gap; open messages are carried over gaps of up to this length.
LEDGER_HISTORY_DAYS = 7
# How far back acceptances of messages that end twice are searched.
_ENDED_HISTORY_DAYS = 3
_OVERDUE_AFTER = 3600 * SECOND_MICROS
# When to write off messages without a time to live that were accepted under an earlier key.
_WRITE_OFF_AFTER = 7 * DAY_MICROS
_LOSS_EVENTS = dict(tuple(ENDING_EVENTS.items())[1:])
_OUTGOING_ENTRIES = (*ENDED_STATES, "across_epochs", "open")
_ENTRY_TYPE = "array<struct<dt: date, entry: string, n: bigint>>"
_OPEN_DAY_TYPE = "array<struct<dt: date, state: string, age_class: string, pushes_class: string>>"
_LEDGER_ENTRIES = (
    "opening",
    "accepted",
    *_OUTGOING_ENTRIES,
    "orphans",
    "around_crash",
    "before_books",
    "again",
    "overdue",
    "vanished",
    "lost_unaccepted",
    "ended_across_epochs",
)


def make_ledger(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    """`ledger_daily`, `messages_daily`, `lost_daily` and `open`."""
    events = tables["events"]
    before, first_ledger_day = _find_previous_ledger(tables["ledger_daily"], events, span)
    opening = tables["open"].where(F.col("dt") == F.lit(before))
    small = summarize_messages(trace_messages(events, opening, span), span).persist()
    epochs = _find_key_epochs(small, span)
    message_rows = _track_messages(small, epochs, span)
    entries = [
        opening.select(F.lit(span.first).alias("dt"), F.lit("opening").alias("entry"), F.lit(1).alias("n")),
        _count_accepted(events, span),
        _make_message_entries(message_rows, _find_overdue_windows(tables, before, span), span),
        _classify_orphans(small, tables, epochs, first_ledger_day, span),
    ]
    return {
        "ledger_daily": _sum_entries(entries, first_ledger_day, span),
        "messages_daily": _make_messages_daily(message_rows, span),
        "lost_daily": _make_lost_daily(message_rows, events, span),
        "open": _make_open_snapshot(message_rows, events, opening, span),
    }


def _find_previous_ledger(ledger_daily: DataFrame, events: DataFrame, span: Span) -> tuple[date | None, date]:
    """Last day before the span that has a ledger, or None, and the first day of the ledger."""
    past = ledger_daily.where(F.col("dt") < F.lit(span.first))
    row = past.agg(F.max("dt").alias("dt"), F.max_by("books", "dt").alias("books")).first()
    assert row is not None
    return row.dt, row.books or _find_first_event_day(events, span)


def _find_first_event_day(events: DataFrame, span: Span) -> date:
    """First day of the span that has events; the first day if none has."""
    row = events.where(F.col("dt") >= F.lit(span.first)).agg(F.min("dt").alias("dt")).first()
    return row.dt if row and row.dt else span.first


@dataclass(frozen=True, slots=True)
class _KeyEpoch:
    """
    A key epoch.

    :param since: its first day.
    :param latest: last acceptance of a message that was not acknowledged on the same day, microseconds.
    """

    number: int
    since: date
    latest: int


def _find_key_epochs(small: DataFrame, span: Span) -> list[_KeyEpoch]:
    """Key epochs in the ledger, a handful; none if identifiers are plain."""
    carried = F.when(F.col("one.accepted_at").isNotNull(), F.lit(span.first))
    found = (
        small.where(F.col("epoch").isNotNull())
        .groupBy("epoch")
        .agg(F.min(F.coalesce("accepted_on", carried, "ended_on")), F.coalesce(F.max("one.accepted_at"), F.lit(0)))
        .orderBy("epoch")
    )
    return [_KeyEpoch(*row) for row in found.collect()]


def _track_messages(small: DataFrame, epochs: Sequence[_KeyEpoch], span: Span) -> DataFrame:
    """
    Messages in the ledger, and further lines of those that had ended.

    :return: as :func:`summarize_messages`, and lapsed_at: when they become overdue, microseconds; lapsed: the day of
        that; written_off: the day; open_on: the days at whose end they were open, null if there is none.
    """
    rows = small.select("*", "one.*").drop("one").withColumn("past", F.coalesce("past", F.lit(False)))
    patience = F.coalesce(F.col("ttl_s") * SECOND_MICROS + _OVERDUE_AFTER, F.lit(_WRITE_OFF_AFTER))
    superseded = _get_superseding_day(epochs)
    given_up = F.greatest(micros_to_day(F.col("accepted_at") + patience), superseded, F.lit(span.first))
    is_gone = superseded.isNotNull() & F.col("ended_on").isNull() & ~F.col("past") & (given_up <= F.lit(span.last))
    first = F.coalesce("accepted_on", F.lit(span.first))
    last = F.least(F.lit(span.last), F.date_sub(F.coalesce("ended_on", "written_off"), 1))
    return (
        rows.where(F.col("msg").isNull() | F.col("accepted_at").isNotNull())
        .withColumn("lapsed_at", F.col("accepted_at") + F.col("ttl_s") * SECOND_MICROS + _OVERDUE_AFTER)
        .withColumn("lapsed", micros_to_day(F.col("lapsed_at")))
        .withColumn("written_off", F.when(is_gone, given_up))
        .withColumn(
            "open_on", F.when((first <= last) & F.col("msg").isNotNull() & ~F.col("past"), F.sequence(first, last))
        )
    )


def _get_superseding_day(epochs: Sequence[_KeyEpoch]) -> Column:
    """First day of the epoch after that of the message; null if there is none."""
    later = F.lit(None).cast("date")
    for this, after in pairwise(epochs):
        later = F.when(F.col("epoch") == this.number, F.lit(after.since)).otherwise(later)
    return later


def _classify_orphans(
    small: DataFrame, tables: Mapping[str, DataFrame], epochs: Sequence[_KeyEpoch], first_ledger_day: date, span: Span
) -> DataFrame:
    """Classify endings without an acceptance, as ledger entries."""
    unaccepted = small.where(F.col("one").isNotNull()).select("ended_on", "state", "one.*")
    unaccepted = unaccepted.where(F.col("accepted_at").isNull() & (F.col("ended_on") <= F.lit(span.last)))
    earlier = F.lit(False)
    for epoch in epochs:
        fits = (F.col("ending_epoch") > epoch.number) & (F.col("since") <= epoch.latest + CLOCK_TOLERANCE)
        earlier = earlier | F.coalesce(fits, F.lit(False))
    explanation = F.when(F.col("since") < day_to_micros(first_ledger_day) + CLOCK_TOLERANCE, "before_books").when(
        earlier, "ended_across_epochs"
    )
    named = unaccepted.select("msg", "since", "state", F.col("ended_on").alias("dt"), explanation.alias("excuse"))
    candidates = named.where(F.col("excuse").isNull()).select("msg", "since", "dt")
    events = tables["events"]
    accepted = events.where((F.col("event") == "msg.accept") & (F.col("dt") < F.lit(span.first))).select("msg")
    had_ended = accepted.join(candidates, "msg").select("msg").distinct().withColumn("entry", F.lit("again"))
    near_crash = find_accepted_near_crash(candidates, tables["boots_daily"]).withColumn(
        "crash", F.lit("around_crash")
    )
    entry = F.coalesce("excuse", "entry", "crash", F.lit("orphans"))
    known = named.join(had_ended, "msg", "left").join(near_crash, "msg", "left").withColumn("entry", entry)
    is_lost = F.col("state").isin("expired", "evicted") & (F.col("entry") != "again")
    entries = F.array_compact(F.array("entry", F.when(is_lost, F.lit("lost_unaccepted"))))
    return known.select("dt", F.explode(entries).alias("entry"), F.lit(1).alias("n"))


def _count_accepted(events: DataFrame, span: Span) -> DataFrame:
    """Count lines that accept a message."""
    lines = events.where(
        (F.col("event") == "msg.accept") & F.col("msg").isNotNull() & (F.col("dt") >= F.lit(span.first))
    )
    return lines.groupBy("dt").agg(F.lit("accepted").alias("entry"), F.count(F.lit(1)).alias("n"))


def _find_overdue_windows(
    tables: Mapping[str, DataFrame], before: date | None, span: Span
) -> dict[date, tuple[int, int]]:
    """
    For each day, the range of times (microseconds) in which a message that became overdue counts as vanished on that
    day.

    A daemon that is down cannot expire messages, so the bounds are last lines of starts that had run for an hour.
    """
    lines = {row["dt"]: row["last"] for row in find_last_lines(tables["boots_daily"], tables["events"]).collect()}
    known = [max((at for day, at in lines.items() if day <= last), default=0) for last in span.days]
    earlier = max((at for day, at in lines.items() if before is not None and day <= before), default=0)
    return dict(zip(span.days, pairwise([earlier, *known]), strict=True))


def _make_message_entries(
    message_rows: DataFrame, known_until: Mapping[date, tuple[int, int]], span: Span
) -> DataFrame:
    """Ledger entries of the messages."""
    again = [
        _make_entry("repeated_on", "accepted", -F.col("repeats")),
        _make_entry("repeated_on", "again", F.col("repeats")),
        _make_entry("surplus_on", "again", F.col("surplus")),
    ]
    ended = F.struct(F.col("ended_on").alias("dt"), F.col("state").alias("entry"), "n")
    once = F.array(ended, _make_entry("written_off", "across_epochs", F.col("n")), *again)
    daily = F.transform("open_on", lambda dt: F.array(
        _make_entry(dt, "open", F.col("n")),
        _make_entry(F.date_add(dt, 1), "opening", F.col("n")),
        _make_entry(F.when(F.col("lapsed") <= dt, dt), "overdue", F.col("n")),
        _make_entry(F.when(_has_vanished(dt, known_until), dt), "vanished", F.col("n")),
    ))  # fmt: skip
    every = F.concat(once, F.coalesce(F.flatten(daily), F.array().cast(_ENTRY_TYPE)))
    return message_rows.select(F.inline(every)).where(F.col("dt").between(F.lit(span.first), F.lit(span.last)))


def _has_vanished(day: Column, known_until: Mapping[date, tuple[int, int]]) -> Column:
    after, until = (
        F.create_map(*(F.lit(one) for day, times in known_until.items() for one in (day, times[n]))) for n in (0, 1)
    )
    return (F.col("lapsed_at") > after[day]) & (F.col("lapsed_at") <= until[day])


def _make_entry(day: Column | str, entry: str, n: Column) -> Column:
    day = F.col(day) if isinstance(day, str) else day
    return F.struct(day.alias("dt"), F.lit(entry).alias("entry"), n.alias("n"))


def _sum_entries(entries: Sequence[DataFrame], first_ledger_day: date, span: Span) -> DataFrame:
    """`ledger_daily`: sum the entries; a row for each day of the span even without events."""
    days = F.explode(F.sequence(F.lit(span.first), F.lit(span.last)))
    none = entries[0].sparkSession.range(1).select(days.alias("dt"), F.lit("").alias("entry"), F.lit(0).alias("n"))
    every = reduce(lambda one, other: one.unionByName(other), entries, none)
    totals = [
        F.coalesce(F.sum(F.when(F.col("entry") == name, F.col("n"))), F.lit(0)).alias(name)
        for name in _LEDGER_ENTRIES
    ]
    into, out_of = F.col("opening") + F.col("accepted"), reduce(lambda a, b: a + b, map(F.col, _OUTGOING_ENTRIES))
    return (
        every.groupBy("dt")
        .agg(*totals)
        .withColumn("difference", into - out_of)
        .withColumn("books", F.lit(first_ledger_day))
    )


def _make_messages_daily(message_rows: DataFrame, span: Span) -> DataFrame:
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
        classify_age((_get_end_of_day(dt) - F.col("accepted_at")) / 1000).alias("age_class"),
        classify_pushes(get_pushes_on_day(F.col("pushes"), dt, span)).alias("pushes_class"),
    ))  # fmt: skip
    each = F.concat(F.array(ended), F.coalesce(still, F.array().cast(_OPEN_DAY_TYPE)))
    return (
        message_rows.select("proto", "n", "bytes", F.inline(each))
        .where(F.col("dt").isNotNull())
        .groupBy("dt", "proto", "state", "age_class", "pushes_class")
        .agg(F.sum("n").alias("n"), F.sum("bytes").alias("bytes"))
    )


def _get_end_of_day(day: Column) -> Column:
    return F.unix_micros(F.date_add(day, 1).cast("timestamp"))


def _make_lost_daily(message_rows: DataFrame, events: DataFrame, span: Span) -> DataFrame:
    """`lost_daily`."""
    lost = message_rows.where(F.col("state").isin(*_LOSS_EVENTS.values()))
    lines = events.where(
        F.col("event").isin(*_LOSS_EVENTS) & (F.col("dt") >= F.lit(span.widen(before=1).first))
    ).select("msg", "reason", _get_loss_state().alias("state"))
    # Only of lost messages: aggregating strings is slow.
    reasons = lost.join(lines, ["msg", "state"], "left").groupBy(
        "msg", F.col("ended_on").alias("dt"), classify_size(F.col("size")).alias("size_class"),
        F.col("ended_age").alias("age_class"), (F.col("ended_pushes") != "0").alias("pushed"), "bytes",
    ).agg(F.coalesce(F.min("reason"), F.lit("")).alias("reason"))  # fmt: skip
    return reasons.groupBy("dt", "reason", "size_class", "age_class", "pushed").agg(
        F.count(F.lit(1)).alias("n"), F.sum("bytes").alias("bytes")
    )


def _get_loss_state() -> Column:
    return F.coalesce(*(F.when(F.col("event") == event, F.lit(state)) for event, state in _LOSS_EVENTS.items()))


def _make_open_snapshot(message_rows: DataFrame, events: DataFrame, opening: DataFrame, span: Span) -> DataFrame:
    """`open`."""
    accepted = events.where((F.col("event") == "msg.accept") & (F.col("dt") >= F.lit(span.first)))
    names = ("msg", "rcpt", "node")
    known = accepted.select(*names).unionByName(opening.select(*names))
    some = message_rows.where(F.col("open_on").isNotNull())
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
        get_pushes_on_day(F.col("pushes"), F.col("dt"), span).alias("pushes"),
        "epoch",
    )


LEDGER_JOB = Job(
    "ledger",
    reads=("events",),
    # `open` comes last, when the others have narrowed down the messages.
    writes=("ledger_daily", "messages_daily", "lost_daily", "open"),
    transform=make_ledger,
    history_days={
        "events": _ENDED_HISTORY_DAYS,
        "open": LEDGER_HISTORY_DAYS,
        "ledger_daily": LEDGER_HISTORY_DAYS,
        "boots_daily": CRASH_HISTORY_DAYS,
    },
)
