"""Activity of recipients, carried over from day to day."""

from __future__ import annotations

from analytics.job import Span
from analytics.jobs.senders_and_recipients import RECIPIENT_HISTORY_DAYS, RECIPIENTS_JOB
from tests.analytics.job_tables import at, day, event, run_job, select_columns

COLUMNS = ("dt", "rcpt", "epoch", "accepted", "acked", "since", "acked_on")
LOG = [
    event("msg.accept", at(0, 3), rcpt="r"),
    event("msg.accept", at(0, 2), rcpt="r"),
    event("msg.ack", at(0, 5), rcpt="r"),
    event("msg.push", at(0, 9), rcpt="r"),
    event("msg.accept", at(0, 6), rcpt="r", epoch=2),
    event("msg.accept", at(0, 7), rcpt="known"),
    event("msg.accept", at(0, 7), rcpt="late", epoch=None),
    event("msg.accept", at(0, 7)),
]
HISTORY = [
    {"dt": day(-9), "rcpt": "known", "epoch": 1, "since": day(-60), "acked_on": day(-20)},
    {"dt": day(-8), "rcpt": "known", "epoch": 1, "since": day(-60), "acked_on": day(-8)},
    {"dt": day(-1), "rcpt": "elsewhere", "epoch": 1, "since": day(-1)},
]


def test_counts_activity_of_a_day() -> None:
    """Counts, first and last time, by recipient and key epoch; history carries over."""
    tables = {"recipients_daily": HISTORY}
    found = run_job(RECIPIENTS_JOB, Span(day(0), day(0)), LOG, tables=tables)["recipients_daily"]
    assert select_columns(found, *COLUMNS) == [
        (day(0), "known", 1, 1, 0, day(-60), day(-8)),
        (day(0), "late", 0, 1, 0, day(0), None),
        (day(0), "r", 1, 2, 1, day(0), day(0)),
        (day(0), "r", 2, 1, 0, day(0), None),
    ]
    of_r = next(row for row in found if row["rcpt"] == "r")
    assert [of_r["first_at"].hour, of_r["last_at"].hour] == [2, 5]


def test_span_equals_its_days_one_by_one() -> None:
    """A recipient that was away for longer than the history is new."""
    log = [
        *(
            event("msg.accept", at(number), rcpt="steady")
            for number in (0, RECIPIENT_HISTORY_DAYS, 2 * RECIPIENT_HISTORY_DAYS)
        ),
        event("msg.ack", at(RECIPIENT_HISTORY_DAYS), rcpt="steady"),
        *(event("msg.ack", at(number), rcpt="pausing") for number in (0, RECIPIENT_HISTORY_DAYS + 1)),
    ]
    all_at_once = run_job(RECIPIENTS_JOB, Span(day(0), day(80)), log)["recipients_daily"]
    assert select_columns(all_at_once, "dt", "rcpt", "since", "acked_on") == [
        (day(0), "pausing", day(0), day(0)),
        (day(0), "steady", day(0), None),
        (day(RECIPIENT_HISTORY_DAYS), "steady", day(0), day(RECIPIENT_HISTORY_DAYS)),
        (
            day(RECIPIENT_HISTORY_DAYS + 1),
            "pausing",
            day(RECIPIENT_HISTORY_DAYS + 1),
            day(RECIPIENT_HISTORY_DAYS + 1),
        ),
        (day(2 * RECIPIENT_HISTORY_DAYS), "steady", day(0), day(RECIPIENT_HISTORY_DAYS)),
    ]
    for number in (RECIPIENT_HISTORY_DAYS, RECIPIENT_HISTORY_DAYS + 1, 2 * RECIPIENT_HISTORY_DAYS):
        current_day = day(number)
        kept = [row for row in all_at_once if day(number - RECIPIENT_HISTORY_DAYS) <= row["dt"] < current_day]
        single_day = run_job(
            RECIPIENTS_JOB,
            Span(current_day, current_day),
            [line for line in log if line["dt"] == current_day],
            tables={"recipients_daily": kept},
        )
        assert single_day["recipients_daily"] == [row for row in all_at_once if row["dt"] == current_day]
