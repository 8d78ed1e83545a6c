"""
Push notifications: requests to push services, devices they no longer know, and how soon wallets respond to a wake-up.

Requests to several devices of an account that start within a second of each other are one wake-up. It is picked up by
the first contact of the account within an hour, and otherwise missed. It counts on the day on which that is known:
that of the contact, or of the end of the hour. A day therefore depends on no later one.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from pyspark.sql import Window
from pyspark.sql import functions as F

from analytics.job import Job, Span
from analytics.jobs.column_functions import (
    SECOND_MICROS,
    compute_percentiles,
    get_event_micros,
    include_time_before,
    make_bucket_column,
    micros_to_day,
    select_top_per_day,
)
from analytics.jobs.traffic_and_latency import ALL_VALUES
from analytics.settings import Settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PICKUP_WITHIN_S = 3600
_PICKUP_WITHIN_MICROS = PICKUP_WITHIN_S * SECOND_MICROS
# Longer than a wake-up lasts, so that its requests are complete if it ends in the span.
_LOOK_BACK = timedelta(hours=2)
_QUANTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99}
_GROUP_KEY = ("dt", "service")


def count_push_events(events: DataFrame) -> DataFrame:
    """`push_daily`."""
    pushes = events.where(F.col("event").isin("push.wake", "push.forget")).select(
        "dt",
        *(F.coalesce(name, F.lit("")).alias(name) for name in ("event", "service", "code")),
        F.coalesce("outcome", "reason", F.lit("")).alias("result"),
    )
    return pushes.groupBy("dt", "event", "service", "result", "code").agg(F.count("*").alias("n"))


def find_ended_wakeups(events: DataFrame, span: Span) -> DataFrame:
    """
    Wake-ups that were picked up or missed in the span: `dt`, `did`, `services`, `pickup_ms` (null: missed).

    :param events: of the span and the day before.
    """
    recent = include_time_before(events, span, _LOOK_BACK)
    wakeups = _find_wakeups(recent)
    # Few accounts are woken, while nearly all lines are contacts.
    woken = wakeups.select("did").distinct()
    contacts = _select_contacts(recent).join(F.broadcast(woken), "did", "left_semi")
    both = wakeups.unionByName(contacts, allowMissingColumns=True)
    # Backwards in time, so that the earliest contact so far is the next one.
    backwards = Window.partitionBy("did").orderBy(F.desc("at"), F.col("contact").desc_nulls_last())
    upto = backwards.rowsBetween(Window.unboundedPreceding, Window.currentRow)
    until = F.col("at") + _PICKUP_WITHIN_MICROS
    pickup = F.when(F.col("next") <= until, F.col("next"))
    # A contact may precede the line about the request, which is written when it was answered.
    ended = F.greatest(F.coalesce(pickup, until), "logged")
    return (
        both.withColumn("next", F.min("contact").over(upto))
        .where(F.col("contact").isNull())
        .select(
            micros_to_day(ended).alias("dt"), "did", "services", ((pickup - F.col("at")) / 1000).alias("pickup_ms")
        )
        .where(F.col("dt").between(F.lit(span.first), F.lit(span.last)))
    )


def _find_wakeups(events: DataFrame) -> DataFrame:
    """Wake-ups that a service accepted: `did`, start `at`, first line `logged` (microseconds), `services`."""
    logged = get_event_micros(events)
    lasted = F.coalesce(F.round(F.col("dur_ms") * 1000).cast("bigint"), F.lit(0))
    sent = events.where((F.col("event") == "push.wake") & (F.col("outcome") == "sent") & F.col("did").isNotNull())
    requests = sent.select(
        "did",
        F.coalesce("service", F.lit("")).alias("service"),
        logged.alias("logged"),
        (logged - lasted).alias("at"),
    )
    in_order = Window.partitionBy("did").orderBy("at")
    begins = F.when(F.col("at") - F.lag("at").over(in_order) <= SECOND_MICROS, 0).otherwise(1)
    numbered = requests.withColumn("begins", begins).withColumn("number", F.sum("begins").over(in_order))
    return (
        numbered.groupBy("did", "number")
        .agg(F.min("at").alias("at"), F.min("logged").alias("logged"), F.collect_set("service").alias("services"))
        .drop("number")
    )


def _select_contacts(events: DataFrame) -> DataFrame:
    """Contacts of accounts: `did`, and the time as `at` and `contact`."""
    event, mtype = F.col("event"), F.coalesce("mtype", F.lit(""))
    fetched = (event == "req.done") & (mtype.startswith("messagepickup/") | mtype.startswith("QUERY_"))
    # Refused requests may be those of others, such as replays.
    accepted = ((event == "conn.auth") | fetched) & F.col("code").isNull()
    at = get_event_micros(events)
    did = F.when(event == "conn.auth", F.col("did")).otherwise(F.col("sender"))
    return events.where(accepted).select(did.alias("did"), at.alias("at"), at.alias("contact"))


def summarize_wakeups(ended: DataFrame) -> DataFrame:
    """
    `wakeups_daily`.

    :param ended: result of :func:`find_ended_wakeups`.
    """
    services = F.concat(F.array(F.lit(ALL_VALUES)), "services")
    hist = (
        ended.select(
            "dt", F.explode(services).alias("service"), make_bucket_column(F.col("pickup_ms")).alias("bucket")
        )
        .groupBy(*_GROUP_KEY, "bucket")
        .agg(F.count("*").alias("n"))
    )
    totals = hist.groupBy(*_GROUP_KEY).agg(
        F.sum("n").alias("n"),
        F.coalesce(F.sum(F.when(F.col("bucket").isNull(), F.col("n"))), F.lit(0)).alias("missed"),
    )
    percentiles = compute_percentiles(hist.where(F.col("bucket").isNotNull()), _GROUP_KEY, _QUANTILES).drop("n")
    shares = totals.withColumn("missed_share", F.col("missed") / F.col("n"))
    return shares.join(percentiles, list(_GROUP_KEY), "left")


def rank_missed_accounts(ended: DataFrame, count: int) -> DataFrame:
    """
    `wakeups_missed_top`: the `count` accounts of each day with most wake-ups, of those that picked up none.

    :param ended: result of :func:`find_ended_wakeups`.
    """
    each = ended.groupBy("dt", "did").agg(
        F.count("*").alias("n"),
        F.count("pickup_ms").alias("picked_up"),
        F.array_join(F.array_sort(F.array_distinct(F.flatten(F.collect_list("services")))), ", ").alias("services"),
    )
    missed = each.where("picked_up = 0").drop("picked_up")
    return select_top_per_day(missed, count, F.desc("n"), F.asc("did"))


def _make_wakeups(frames: Mapping[str, DataFrame], settings: Settings, span: Span) -> Mapping[str, DataFrame]:
    events = frames["events"]
    ended = find_ended_wakeups(events, span).persist()
    return {
        "push_daily": count_push_events(events.where(F.col("dt") >= F.lit(span.first))),
        "wakeups_daily": summarize_wakeups(ended),
        "wakeups_missed_top": rank_missed_accounts(ended, settings.top),
    }


WAKEUPS_JOB = Job(
    "wakeups",
    reads=("events",),
    writes=("push_daily", "wakeups_daily", "wakeups_missed_top"),
    transform=_make_wakeups,
    history_days={"events": 1},
)
