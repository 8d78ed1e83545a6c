"""Whether the logs of a span can be relied on: what exit status 4 stands for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analytics.job import Span
from analytics.warehouse import Warehouse

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


def broken(warehouse: Warehouse, span: Span) -> list[str]:
    """
    Sentences, one for each day and kind, in order; none if all is well.

    Broken is what means that messages or log lines are gone: a ledger that does not balance, endings of messages that
    no log accepted, messages that vanished, a store whose own books have a difference, counters of the daemon that
    differ from its lines, and gaps in `seq`. Everything else that is counted is shown and no more: acceptances lost
    as a daemon was killed, doubled or damaged lines say.
    """
    from pyspark.sql import functions as F

    def wrong(table: str, kind: str, count: Column) -> DataFrame:
        amount = F.sum(count)
        frame = warehouse.read(table, span).groupBy("dt").agg(amount.alias("n"))
        return frame.where("n > 0").select("dt", F.lit(kind).alias("kind"), "n")

    rows = (
        wrong("ledger_daily", "messages that the ledger cannot account for", F.abs("difference"))
        .unionAll(wrong("ledger_daily", "messages that ended and that no log accepted", F.col("orphans")))
        .unionAll(
            wrong("ledger_daily", "messages that vanished: their time is over and no log says so", F.col("vanished"))
        )
        .unionAll(
            wrong("reconciliation_daily", "between the daemon's counters and its log lines", F.abs("difference"))
        )
        .unionAll(
            wrong(
                "stores_daily",
                "messages that the store's own books do not account for",
                F.abs(F.when(F.col("entry") == "difference", F.col("total"))),
            )
        )
        .unionAll(wrong("boots_daily", "log lines are missing", F.col("missing")))
    )
    return [f"{row.dt}: {row.n} {row.kind}" for row in rows.orderBy("dt", "kind").toLocalIterator()]
