"""
The store's own books against the lines of the log.

A `ledger` line says what became of all that a store has ever accepted. Between two of them its entries must have
grown by as many as there are lines of that kind, and messages of the daemon to itself, which have none but are
counted in the `ledger` lines. A day goes from the last ledger of the two hours before it, else from its own first,
to its own last one, by the clock: what is between a commit and its line at that moment stands on the other side.

All that tell of a store share it. What an operator removes has lines of a node with a name of its own,
`NODE-operator`: they belong to the store of the node NODE, or of its workers, `NODE-1` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.settings import Settings
from analytics.times import SECOND, happened, with_tail

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Entry of the books to event.
LINES = {
    "accepted": "msg.accept",
    "acknowledged": "msg.ack",
    "expired": "msg.expire",
    "evicted": "msg.evict",
    "removed": "msg.remove",
}
_OWN = ("accepted", "acknowledged", "expired", "evicted")
_DIFFERENCE = "difference"
ENTRIES = (*LINES, "withdrawn", "waiting", _DIFFERENCE)
_OPERATOR, _WORKER = "-operator$", r"-\d+$"
_TAIL = timedelta(hours=2)
_TAIL_MICROS = int(_TAIL.total_seconds()) * SECOND
_STORE = ("dt", "store", "proto")


def stores(tables: Mapping[str, DataFrame], settings: Settings, span: Span) -> dict[str, DataFrame]:
    """`stores_daily`."""
    events = with_tail(tables["events"], span, _TAIL)
    told = _told(events)
    bounds = _bounds(told, span)
    counted = _within(_lines(events, told), bounds).unionByName(_within(_own(told), bounds))
    sums = counted.groupBy(*_STORE, "entry").agg(F.sum("logged").alias("logged"), F.sum("own").alias("own"))
    return {"stores_daily": _compared(bounds, sums)}


def _told(events: DataFrame) -> DataFrame:
    """The `ledger` lines."""
    lines = events.where((F.col("event") == "ledger") & F.col("store").isNotNull() & F.col("proto").isNotNull())
    books = (*(F.col(name if name in ("waiting", _DIFFERENCE) else f"all_{name}").alias(name) for name in ENTRIES),)
    own = (f"own_{name}" for name in _OWN)
    return lines.select(*_STORE, _node(), "boot", happened(events).alias("at"), F.struct(*books).alias("books"), *own)


def _node() -> Column:
    return F.coalesce("node", F.lit("")).alias("node")


def _bounds(told: DataFrame, span: Span) -> DataFrame:
    """For each day, store and half: the last books and the ones to compare them with, and when both were told."""
    daily = told.groupBy(*_STORE).agg(
        F.max(F.struct("at", "books")).alias("end"), F.min(F.struct("at", "books")).alias("first")
    )
    before = daily.select(F.date_add("dt", 1).alias("dt"), "store", "proto", F.col("end").alias("before"))
    recent = before.where(F.col("before.at") >= F.unix_micros(F.col("dt").cast("timestamp")) - _TAIL_MICROS)
    return (
        daily.where(F.col("dt") >= F.lit(span.first))
        .join(recent, list(_STORE), "left")
        .select(*_STORE, "end", F.coalesce("before", "first").alias("begin"))
    )


def _lines(events: DataFrame, told: DataFrame) -> DataFrame:
    """The lines that the books should have counted, each with its store."""
    entry = F.coalesce(*(F.when(F.col("event") == event, F.lit(entry)) for entry, event in LINES.items()))
    lines = events.where(F.col("event").isin(*LINES.values()) & F.col("proto").isNotNull()).select(
        "dt", "proto", _node(), "boot", happened(events).alias("at"), entry.alias("entry")
    )
    members = told.select("node", "boot", "store").distinct()
    names = members.select(F.explode(F.array("node", F.regexp_replace("node", _WORKER, ""))).alias("node"), "store")
    theirs = lines.where(F.col("node").rlike(_OPERATOR)).withColumn("node", F.regexp_replace("node", _OPERATOR, ""))
    own = lines.join(F.broadcast(members), ["node", "boot"])
    return (
        own.unionByName(theirs.join(F.broadcast(names.distinct()), "node"))
        .drop("node", "boot")
        .withColumns({"logged": F.lit(1), "own": F.lit(0)})
    )


def _own(told: DataFrame) -> DataFrame:
    """What processes did for the daemon itself, each since its line before."""
    each = F.array(*(F.struct(F.lit(name).alias("entry"), F.col(f"own_{name}").alias("own")) for name in _OWN))
    rows = told.select(*_STORE, "at", F.inline(each)).where(F.col("own").isNotNull())
    return rows.withColumn("logged", F.lit(0))


def _within(lines: DataFrame, bounds: DataFrame) -> DataFrame:
    """Those after the first books of a day and not after the last; late lines may belong to the day after."""
    midnight = F.unix_micros(F.date_add("dt", 1).cast("timestamp"))
    both = F.array(F.col("dt"), F.date_add("dt", 1))
    days = F.when(F.col("at") >= midnight - _TAIL_MICROS, both).otherwise(F.array(F.col("dt")))
    times = bounds.select(*_STORE, F.col("begin.at").alias("since"), F.col("end.at").alias("until"))
    return (
        lines.withColumn("dt", F.explode(days))
        .join(F.broadcast(times), list(_STORE))
        .where((F.col("at") > F.col("since")) & (F.col("at") <= F.col("until")))
        .select(*_STORE, "entry", F.col("logged").cast("bigint"), F.col("own").cast("bigint"))
    )


def _compared(bounds: DataFrame, sums: DataFrame) -> DataFrame:
    """`stores_daily`."""
    each = F.array(*(_entry(name) for name in ENTRIES))
    has_lines = F.col("entry").isin(*LINES)
    joined = bounds.select(*_STORE, F.inline(each)).join(sums, [*_STORE, "entry"], "left")
    counted = {name: F.when(has_lines, F.coalesce(name, F.lit(0))) for name in ("logged", "own")}
    gap = F.col("change") - F.col("unseen") - F.col("logged") - F.col("own")
    return joined.withColumns(counted).withColumn("gap", gap).drop("unseen")


def _entry(name: str) -> Column:
    """:return: entry, total, change; unseen: what of the change has no line, as its sender was refused."""
    change = F.lit(None).cast("bigint") if name == _DIFFERENCE else _grown(name)
    return F.struct(
        F.lit(name).alias("entry"),
        F.col(f"end.books.{name}").alias("total"),
        change.alias("change"),
        (_grown("withdrawn") if name == "accepted" else F.lit(0).cast("bigint")).alias("unseen"),
    )


def _grown(name: str) -> Column:
    return F.col(f"end.books.{name}") - F.col(f"begin.books.{name}")


JOB = Job("stores", ("events",), ("stores_daily",), stores, recalls={"events": 1})
