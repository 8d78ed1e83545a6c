"""Recipients that are new, that have gone quiet, that come back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from analytics.job import Span
from analytics.jobs.senders_and_recipients import compute_retention, count_dormant_recipients
from tests.analytics.frames import at, brief, day, rows, table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def test_dormant(spark: SparkSession) -> None:
    """
    Dormant is who has open messages, is known for as long as the setting says, and acknowledged nothing in that time.

    There is a row for every day, also without anybody; a new epoch makes nobody new whose tag stays.
    """
    recipients = table(
        spark,
        "recipients_daily",
        _seen("quiet", -20, since=-30, acked_on=-20),
        _seen("quiet", -1, since=-30, acked_on=-20),
        _seen("unheard", -14, since=-14, acked_on=None),
        _seen("young", -13, since=-13, acked_on=None),
        _seen("awake", -13, since=-30, acked_on=-13),
        _seen("idle", -20, since=-20, acked_on=None),
        _seen("rekeyed", -1, since=-30, acked_on=-1),
        _seen("rekeyed", 0, since=0, acked_on=None, epoch=2),
        _seen("new", 0, since=0, acked_on=0),
        _seen("quiet", 1, since=-30, acked_on=1),
    )
    waiting = table(
        spark,
        "open",
        *({"rcpt": rcpt, "msg": f"{rcpt}{n}", "size": 10, "accepted_at": at(0)}
          for rcpt in ("quiet", "unheard", "young", "awake", "rekeyed", "new") for n in range(2)),
        # Nothing else of it was seen for so long.
        {"rcpt": "abandoned", "msg": "a", "accepted_at": at(-50)},
        {"dt": day(1), "rcpt": "quiet", "msg": "q", "size": 10, "accepted_at": at(0)},
        {"dt": day(1), "rcpt": None, "msg": "?", "size": 10, "accepted_at": at(-50)},
    )  # fmt: skip
    found = rows("dormant_daily", count_dormant_recipients(recipients, waiting, 14, Span(day(0), day(2))))
    assert brief(found, "dt", "dormant", "waiting", "bytes", "active", "fresh") == [
        (day(0), 3, 5, 40, 1, 1),
        (day(1), 0, 0, 0, 1, 0),
        (day(2), 0, 0, 0, 0, 0),
    ]
    today, so_far = waiting.where(waiting.dt == day(0)), recipients.where(recipients.dt <= day(0))
    assert rows("dormant_daily", count_dormant_recipients(so_far, today, 14, Span(day(0), day(0)))) == found[:1]


def test_retention(spark: SparkSession) -> None:
    """Cohorts by week and epoch, as of each day, for four weeks after the first; small ones are not told."""
    lines = [
        *_acked("a", 0, 0, 3, 7, 9, 29),
        *_acked("b", 1, 1, 8),
        *_acked("c", 6, 6, 30),
        # First seen without an acknowledgement.
        _seen("d", 2, since=2, acked_on=None),
        # Of a later week, of another epoch, and of a week long ago.
        *_acked("e", 9, 9),
        *_acked("a", 7, 7, epoch=2),
        *_acked("old", -30, 8),
    ]  # fmt: skip
    whole = _retention(table(spark, "recipients_daily", *lines), Span(day(0), day(36)))
    columns = ("dt", "epoch", "cohort", "week", "members", "active")
    expected = {
        0: [(1, 0, 0, 1, 1)],
        1: [(1, 0, 0, 2, 2)],
        2: [(1, 0, 0, 3, 2)],
        6: [(1, 0, 0, 4, 3)],
        7: [(1, 0, 1, 4, 1), (2, 7, 0, 1, 1)],
        9: [(1, 0, 1, 4, 2), (1, 7, 0, 1, 1), (2, 7, 0, 1, 1)],
        28: [(1, 0, 4, 4, 0), (1, 7, 3, 1, 0), (2, 7, 3, 1, 0)],
        34: [(1, 0, 4, 4, 2), (1, 7, 3, 1, 0), (2, 7, 3, 1, 0)],
        35: [(1, 7, 4, 1, 0), (2, 7, 4, 1, 0)],
    }
    for number, of_cohorts in expected.items():
        of_day = [row for row in whole if row["dt"] == day(number)]
        assert brief(of_day, *columns) == [
            (day(number), epoch, day(monday), week, members, active)
            for epoch, monday, week, members, active in of_cohorts
        ], number
    kept = [line for line in lines if day(34 - 35) <= line["dt"] <= day(34)]
    alone = _retention(table(spark, "recipients_daily", *kept), Span(day(34), day(34)))
    assert alone == [row for row in whole if row["dt"] == day(34)]
    few = _retention(table(spark, "recipients_daily", *kept), Span(day(34), day(34)), 3)
    assert brief(few, *columns[1:]) == [
        (1, day(0), 4, 4, None),
        (1, day(7), 3, None, None),
        (2, day(7), 3, None, None),
    ]


def _retention(recipients: DataFrame, span: Span, k: int = 1) -> list[dict[str, Any]]:
    return rows("retention_weekly", compute_retention(recipients, k, span))


def _seen(rcpt: str, number: int, *, since: int, acked_on: int | None, epoch: int = 1) -> dict[str, Any]:
    last = None if acked_on is None else day(acked_on)
    return {"dt": day(number), "rcpt": rcpt, "epoch": epoch, "since": day(since), "acked_on": last}


def _acked(rcpt: str, since: int, *numbers: int, epoch: int = 1) -> Iterable[dict[str, Any]]:
    return (_seen(rcpt, number, since=since, acked_on=number, epoch=epoch) for number in numbers)
