"""Queue gauges by hour, and queues about to lose messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from analytics.job import Span
from analytics.jobs.traffic_and_latency import QUEUES_JOB
from analytics.settings import Settings
from tests.analytics.job_tables import at, day, event, run_job, select_columns

Row = dict[str, Any]

HOUR_S = 3600


def make_gauges() -> list[Row]:
    """Gauges of two nodes, some without fields that older daemons lack."""
    return [
        event("gauge", at(0, 1, 0), depth=10, bytes=100, rcpts=3, oldest_ms=5, conns=7, rss=900, fds=40, lag_ms=0.5),
        event("gauge", at(0, 1, 1), depth=15, bytes=90, rcpts=4, oldest_ms=6, conns=2, rss=950, fds=30, lag_ms=1.25),
        event("gauge", at(0, 1, 2), depth=15),
        event("gauge", at(0, 2, 0), depth=1, node="b"),
        event("req.done", at(0, 3), size=10),
    ]


def test_aggregates_gauges_by_hour_and_node() -> None:
    """Highest values and the mean depth. Gauges of older daemons have fewer fields."""
    found = run_job(QUEUES_JOB, Span(day(0), day(0)), make_gauges())
    assert found["queue_risk"] == []
    first, second = found["queue_hourly"]
    assert first == {
        "dt": day(0), "hour": 1, "node": "a", "depth_max": 15, "depth_mean": 13.333, "bytes_max": 100, "rcpts_max": 4,
        "oldest_ms_max": 6, "conns_max": 7, "rss_max": 950, "fds_max": 40, "lag_ms_max": 1.25,
    }  # fmt: skip
    assert (second["hour"], second["node"], second["depth_mean"], second["rss_max"]) == (2, "b", 1.0, None)


def make_open_messages() -> list[Row]:
    """Open messages of queues that grow, shrink, expire or are empty on the second day."""
    return [
        # Eight of ten, four of them since yesterday: two will not fit tomorrow.
        *_fill_queue("growing", 0, 4),
        *_fill_queue("growing", 1, 8),
        # Was full, and shrinks.
        *_fill_queue("emptying", 0, 10),
        *_fill_queue("emptying", 1, 7),
        # Three expire within a day; one is overdue.
        *_fill_queue("expiring", 1, 2, ttl_s=2 * 24 * HOUR_S, accepted_at=at(0, 12), size=None),
        *_fill_queue("expiring", 1, 1, ttl_s=HOUR_S, accepted_at=at(1, 1)),
        *_fill_queue("expiring", 1, 1, ttl_s=9 * 24 * HOUR_S, accepted_at=at(1, 1)),
        # Empty on the second day.
        *_fill_queue("emptied", 0, 3),
        {"dt": day(1), "msg": "?", "rcpt": None, "size": 3},
    ]


def test_ranks_queues_by_urgency() -> None:
    """
    Queues that lose messages within a day, by expiry or capacity, come first. Growth is measured from the day before.
    """
    ledger_days = make_ledger_days(0, 1)
    found = _rank_queues(make_open_messages(), ledger_days, Span(day(1), day(1)))
    columns = ("rank", "rcpt", "waiting", "bytes", "per_day", "at_risk", "days_to_cap", "days_to_ttl")
    assert select_columns(found, *columns) == [
        (1, "expiring", 4, 20, 4.0, 3, 1.5, 0.0),
        (2, "growing", 8, 80, 4.0, 2, 0.5, None),
        (3, "emptying", 7, 70, -3.0, 0, None, None),
    ]
    both = _rank_queues(make_open_messages(), ledger_days, Span(day(0), day(1)), count=1)
    assert select_columns(both, "dt", "rank", "rcpt", "per_day") == [
        (day(0), 1, "emptying", None),
        (day(1), 1, "expiring", 4.0),
    ]


def test_growth_is_unknown_without_ledger_of_day_before() -> None:
    """A queue on a day that was not analysed, or before the first logs, has no known growth."""
    constant = [row for number in (1, 3, 4) for row in _fill_queue("constant", number, 6)]
    due = _fill_queue("due", 3, 2, ttl_s=HOUR_S, accepted_at=at(3, 23))
    # The first day precedes the logs; the third was not analysed.
    ledger_days = make_ledger_days(0, 1, 3, 4, opened=1)

    found = _rank_queues([*constant, *due], ledger_days, Span(day(0), day(4)))

    columns = ("dt", "rcpt", "waiting", "per_day", "at_risk", "days_to_cap")
    assert select_columns(found, *columns) == [
        (day(1), "constant", 6, None, 0, None),
        (day(3), "due", 2, None, 2, None),
        (day(3), "constant", 6, None, 0, None),
        (day(4), "constant", 6, 0.0, 0, None),
    ]


def _rank_queues(waiting: Iterable[Row], ledger_days: Iterable[Row], span: Span, count: int = 20) -> list[Row]:
    """`queue_risk`, for queues of at most ten messages."""
    tables = {"open": waiting, "ledger_daily": ledger_days}
    return run_job(QUEUES_JOB, span, settings=Settings(queue_max_messages=10, top=count), tables=tables)["queue_risk"]


def make_ledger_days(*days: int, opened: int = 0) -> list[Row]:
    """Days of the ledger, which begins on the day `opened`."""
    return [{"dt": day(number), "books": day(opened)} for number in days]


def _fill_queue(rcpt: str, on: int, count: int, **fields: Any) -> list[Row]:
    row = {"dt": day(on), "rcpt": rcpt, "size": 10, "accepted_at": at(on)} | fields
    return [row | {"msg": f"{rcpt}-{number}"} for number in range(count)]
