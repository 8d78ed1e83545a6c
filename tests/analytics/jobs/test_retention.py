"""New, dormant and returning recipients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from analytics.job import Span
from analytics.jobs.senders_and_recipients import RETENTION_JOB
from analytics.settings import Settings
from tests.analytics.job_tables import at, day, run_job, select_columns


def test_counts_dormant_recipients() -> None:
    """
    A recipient is dormant if it has open messages, has been known for the configured time, and acknowledged nothing
    in it. Every day has a row. A new key epoch does not make a recipient new.
    """
    recipients = [
        _make_recipient_day("quiet", -20, since=-30, acked_on=-20),
        _make_recipient_day("quiet", -1, since=-30, acked_on=-20),
        _make_recipient_day("unheard", -14, since=-14, acked_on=None),
        _make_recipient_day("young", -13, since=-13, acked_on=None),
        _make_recipient_day("awake", -13, since=-30, acked_on=-13),
        _make_recipient_day("idle", -20, since=-20, acked_on=None),
        _make_recipient_day("rekeyed", -1, since=-30, acked_on=-1),
        _make_recipient_day("rekeyed", 0, since=0, acked_on=None, epoch=2),
        _make_recipient_day("new", 0, since=0, acked_on=0),
        _make_recipient_day("quiet", 1, since=-30, acked_on=1),
    ]
    waiting: list[Mapping[str, Any]] = [
        *({"rcpt": rcpt, "msg": f"{rcpt}{n}", "size": 10, "accepted_at": at(0)}
          for rcpt in ("quiet", "unheard", "young", "awake", "rekeyed", "new") for n in range(2)),
        # No other activity for a long time.
        {"rcpt": "abandoned", "msg": "a", "accepted_at": at(-50)},
        {"dt": day(1), "rcpt": "quiet", "msg": "q", "size": 10, "accepted_at": at(0)},
        {"dt": day(1), "rcpt": None, "msg": "?", "size": 10, "accepted_at": at(-50)},
    ]  # fmt: skip

    def count_dormant(span: Span, *recipients: Mapping[str, Any]) -> list[dict[str, Any]]:
        rows = [row for row in waiting if row.get("dt", day(0)) in span]
        tables = {"recipients_daily": recipients, "open": rows}
        return run_job(RETENTION_JOB, span, settings=Settings(dormant_days=14), tables=tables)["dormant_daily"]

    found = count_dormant(Span(day(0), day(2)), *recipients)
    assert select_columns(found, "dt", "dormant", "waiting", "bytes", "active", "fresh") == [
        (day(0), 3, 5, 40, 1, 1),
        (day(1), 0, 0, 0, 1, 0),
        (day(2), 0, 0, 0, 0, 0),
    ]
    so_far = [row for row in recipients if row["dt"] <= day(0)]
    assert count_dormant(Span(day(0), day(0)), *so_far) == found[:1]


def test_retention_of_weekly_cohorts() -> None:
    """By week and epoch, as of each day, for four weeks after the first; small cohorts are hidden."""
    lines = [
        *_make_acknowledging_days("a", 0, 0, 3, 7, 9, 29),
        *_make_acknowledging_days("b", 1, 1, 8),
        *_make_acknowledging_days("c", 6, 6, 30),
        # First seen without an acknowledgement.
        _make_recipient_day("d", 2, since=2, acked_on=None),
        # Of a later week, another epoch, and a week long ago.
        *_make_acknowledging_days("e", 9, 9),
        *_make_acknowledging_days("a", 7, 7, epoch=2),
        *_make_acknowledging_days("old", -30, 8),
    ]  # fmt: skip
    all_days = _compute_rows(lines, Span(day(0), day(36)))
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
        of_day = [row for row in all_days if row["dt"] == day(number)]
        assert select_columns(of_day, *columns) == [
            (day(number), epoch, day(monday), week, members, active)
            for epoch, monday, week, members, active in of_cohorts
        ], number
    kept = [line for line in lines if day(34 - 35) <= line["dt"] <= day(34)]
    single_day = _compute_rows(kept, Span(day(34), day(34)))
    assert single_day == [row for row in all_days if row["dt"] == day(34)]
    few = _compute_rows(kept, Span(day(34), day(34)), 3)
    assert select_columns(few, *columns[1:]) == [
        (1, day(0), 4, 4, None),
        (1, day(7), 3, None, None),
        (2, day(7), 3, None, None),
    ]


def _compute_rows(recipients: Iterable[Mapping[str, Any]], span: Span, k: int = 1) -> list[dict[str, Any]]:
    tables = {"recipients_daily": recipients}
    return run_job(RETENTION_JOB, span, settings=Settings(k_anonymity=k), tables=tables)["retention_weekly"]


def _make_recipient_day(
    rcpt: str, number: int, *, since: int, acked_on: int | None, epoch: int = 1
) -> dict[str, Any]:
    last = None if acked_on is None else day(acked_on)
    return {"dt": day(number), "rcpt": rcpt, "epoch": epoch, "since": day(since), "acked_on": last}


def _make_acknowledging_days(rcpt: str, since: int, *numbers: int, epoch: int = 1) -> Iterable[dict[str, Any]]:
    return (_make_recipient_day(rcpt, number, since=since, acked_on=number, epoch=epoch) for number in numbers)
