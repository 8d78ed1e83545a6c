"""
What became of each message: the core of the ledger.

The rows of a span are grouped by the message's tag once, together with the messages that were open before it. Only
numbers are aggregated, as Spark hashes those and would have to sort for strings. All times are microseconds.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from analytics.classes import age_class, pushes_class
from analytics.job import Span
from analytics.times import SECOND, day_of, happened, micros, with_tail

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# The lines of a message may come in any order across nodes, and its acknowledgement before its acceptance: clocks
# differ, and an acceptance is logged once a push has come back.
EARLY = 600 * SECOND

ENDINGS = {"msg.ack": "acked", "msg.expire": "expired", "msg.evict": "evicted", "msg.remove": "removed"}
STATES = tuple(ENDINGS.values())
_LINES = ("msg.accept", "msg.push", *ENDINGS)
_PROTOS = ("", "didcomm", "decentrl")
# Room for the number of the state below the time of an ending.
_ROOM = 8


def lives(events: DataFrame, opening: DataFrame, span: Span) -> DataFrame:
    """
    One row for each message that was open before the span or has a line in it.

    :param events: of the span and of the day before, as far as there is one.
    :param opening: rows of `open`, one for each message.
    :return: msg; accepted_at, null if no line says so; accepted_on: the day, null if open before the span;
        ended_at and ended_on, null if open; state; size; ttl_s; proto; epoch of acceptance and ending_epoch, null of
        plain tags; since: when it was accepted, by its ending; pushes: so many by the end of each day of the span, an
        array; repeats and repeated_on: acceptances after the first; surplus and surplus_on: endings after the first;
        past: accepted and ended before the span, and now once more.
    """
    found = _lines(events, span).unionByName(_carried(opening), allowMissingColumns=True)
    accepting, ending = F.col("accepting"), F.col("state") > 0
    recent = F.col("at") >= micros(span.first)
    days = range(len(span.days))
    grouped = found.groupBy("msg").agg(
        F.max("carried").alias("carried"),
        F.min(F.when(accepting | (F.col("carried") == 1), F.col("at"))).alias("accepted_at"),
        F.count(F.when(accepting & recent, 1)).alias("accepts"),
        F.max(F.when(accepting, F.col("at"))).alias("repeated_at"),
        F.min(F.when(ending, F.col("at") * _ROOM + F.col("state"))).alias("ending"),
        F.count(F.when(ending, 1)).alias("endings"),
        F.max(F.when(ending, F.col("at"))).alias("surplus_at"),
        F.count(F.when(ending & recent, 1)).alias("recent_endings"),
        F.max(F.when(ending, F.col("at") - F.col("age"))).alias("since"),
        *(F.max(name).alias(name) for name in ("size", "ttl_s", "proto", "epoch", "ending_epoch")),
        F.sum(F.when(F.col("push_on") < 0, F.col("pushes"))).alias("early"),
        *(F.sum(F.when(F.col("push_on") <= day, F.col("pushes"))).alias(f"p{day}") for day in days),
    )
    return _settled(grouped, span).where(~F.col("past") | (F.col("repeats") + F.col("surplus") > 0))


def _lines(events: DataFrame, span: Span) -> DataFrame:
    """Lines of the span, and those before it that may belong to messages accepted in it."""
    event, at, start = F.col("event"), happened(events), micros(span.first)
    accepting, pushing = event == "msg.accept", event == "msg.push"
    age = F.coalesce(F.col("latency_ms").cast("bigint"), F.col("age_ms"), F.lit(0)) * 1000
    late = (accepting & (at >= start - 3 * EARLY)) | (~accepting & (at >= start - EARLY) & (age < EARLY))
    # Plain tags are the same under any key.
    keyed = ~F.coalesce(F.col("rcpt").startswith("did:"), F.lit(False))
    wanted = event.isin(*_LINES) & F.col("msg").isNotNull() & (~pushing | F.coalesce("ok", F.lit(True)))
    lines = with_tail(events, span, timedelta(microseconds=3 * EARLY))
    return lines.where(wanted & ((F.col("dt") >= F.lit(span.first)) | late)).select(
        "msg",
        at.alias("at"),
        accepting.alias("accepting"),
        F.lit(0).alias("carried"),
        _number(event, tuple(ENDINGS)).alias("state"),
        age.alias("age"),
        F.when(accepting, F.col("size")).alias("size"),
        F.when(accepting, F.col("ttl_s")).alias("ttl_s"),
        _number(F.col("proto"), _PROTOS[1:]).alias("proto"),
        F.when(accepting & keyed, F.col("epoch")).alias("epoch"),
        F.when(~accepting & ~pushing & keyed, F.col("epoch")).alias("ending_epoch"),
        F.when(pushing, F.datediff("dt", F.lit(span.first))).alias("push_on"),
        F.lit(1).cast("bigint").alias("pushes"),
    )  # fmt: skip


def _carried(opening: DataFrame) -> DataFrame:
    """Messages that were open, as lines."""
    return opening.select(
        "msg",
        F.unix_micros("accepted_at").alias("at"),
        F.lit(False).alias("accepting"),
        F.lit(1).alias("carried"),
        F.lit(0).alias("state"),
        "size",
        "ttl_s",
        _number(F.col("proto"), _PROTOS[1:]).alias("proto"),
        "epoch",
        F.lit(0).alias("push_on"),
        "pushes",
    )


def _number(value: Column, names: tuple[str, ...]) -> Column:
    """Which of these it is, from 1; 0 if none."""
    cases = F.when(value.isNull(), 0)
    for number, name in enumerate(names, 1):
        cases = cases.when(value == name, number)
    return cases.otherwise(0)


def _name(number: Column, names: tuple[str, ...]) -> Column:
    return F.element_at(F.array(*(F.lit(name) for name in names)), number)


def _settled(grouped: DataFrame, span: Span) -> DataFrame:
    """From what was counted to what became of the message."""
    carried, accepted_at, start = F.col("carried") == 1, F.col("accepted_at"), micros(span.first)
    at = F.shiftright("ending", _ROOM.bit_length() - 1)
    past = F.coalesce(~carried & (accepted_at < start), F.lit(False))
    # A message that was open has its pushes of the day before counted already.
    early = F.when(carried, F.coalesce("early", F.lit(0))).otherwise(0)
    pushes = [F.coalesce(f"p{day}", F.lit(0)) - early for day in range(len(span.days))]
    # Without an acceptance, one may still come just after midnight.
    wait = F.when(accepted_at.isNull() & (at - F.col("since") < EARLY), EARLY).otherwise(0)
    ended = at.isNotNull() & ~past
    ended_at = F.when(ended, F.greatest(at + wait, accepted_at, F.lit(start)))
    return grouped.select(
        "msg",
        "accepted_at",
        past.alias("past"),
        F.when(~carried, day_of(accepted_at)).alias("accepted_on"),
        ended_at.alias("ended_at"),
        day_of(ended_at).alias("ended_on"),
        F.when(ended, _name((F.col("ending") % _ROOM).cast("int"), STATES)).alias("state"),
        F.coalesce("size", F.lit(0)).alias("size"),
        "ttl_s",
        _name(F.col("proto") + 1, _PROTOS).alias("proto"),
        F.coalesce("epoch", "ending_epoch").alias("epoch"),
        "ending_epoch",
        "since",
        F.array(*pushes).alias("pushes"),
        # Of those in the span; the first one came before it if the message was open then, or has ended.
        F.greatest(F.col("accepts") - F.when(carried | past, 0).otherwise(1), F.lit(0)).alias("repeats"),
        day_of(F.col("repeated_at")).alias("repeated_on"),
        F.when(past, F.col("recent_endings")).otherwise(F.greatest(F.col("endings") - 1, F.lit(0))).alias("surplus"),
        day_of(F.greatest("surplus_at", F.lit(start))).alias("surplus_on"),
    )


def summary(lives: DataFrame, span: Span) -> DataFrame:
    """
    The same, small: messages that are looked at one by one each have a row, the others are counted.

    :return: accepted_on, ended_on, state, proto, epoch, ended_age and ended_pushes (classes, null if open), n, bytes;
        one: the rest of the message, null where n messages were accepted and acknowledged on one day, once each.
    """
    simple = (
        (F.col("accepted_on") == F.col("ended_on"))
        & (F.col("state") == STATES[0])
        & (F.col("repeats") == 0)
        & (F.col("surplus") == 0)
    )
    one = F.struct(
        *("msg", "accepted_at", "size", "ttl_s", "since", "ending_epoch", "pushes"),
        *("repeats", "repeated_on", "surplus", "surplus_on", "past"),
    )
    pushes = pushes_on(F.col("pushes"), F.col("ended_on"), span)
    age = F.floor((F.col("ended_at") - F.col("accepted_at")) / 1000)
    ended = F.col("ended_on").isNotNull()
    return lives.groupBy(
        *("accepted_on", "ended_on", "state", "proto", "epoch"),
        F.when(ended, age_class(age)).alias("ended_age"),
        F.when(ended, pushes_class(pushes)).alias("ended_pushes"),
        F.when(~F.coalesce(simple, F.lit(False)), one).alias("one"),
    ).agg(F.count(F.lit(1)).alias("n"), F.sum("size").alias("bytes"))


def pushes_on(pushes: Column, day: Column, span: Span) -> Column:
    """How often a message was handed over by the end of a day of the span."""
    return F.try_element_at(pushes, F.datediff(day, F.lit(span.first)) + 1)
