"""Rate limit hits, their bursts, and the share of senders affected."""

from __future__ import annotations

from typing import Any

from analytics.job import Span
from analytics.jobs.refusals import LIMITS_JOB
from analytics.settings import Settings
from tests.analytics.job_tables import at, day, event, run_job, select_columns


def make_log() -> list[dict[str, Any]]:
    """Hits of several parties on three limits, and accepted messages."""
    return [
        event("limit.hit", at(0, 1), limit="sends", who="x"),
        event("limit.hit", at(0, 1, 1), limit="sends", who="x", node="b"),
        event("limit.hit", at(0, 1, 1), limit="sends", who="x", node="a"),
        event("limit.hit", at(0, 1, 2, 1e-6), limit="sends", who="x"),
        event("limit.hit", at(0, 1, 2, 30), limit="sends", who="y"),
        event("limit.hit", at(0, 1), limit="opens", who="x"),
        event("limit.hit", at(0, 2), limit="opens"),
        # Each day is counted separately, although the burst continues.
        event("limit.hit", at(0, 23, 59, 59), limit="late", who="z"),
        event("limit.hit", at(1), limit="late", who="z"),
        *(event("msg.accept", sender=sender) for sender in ("x", "x", "u", "v", "w")),
        event("msg.accept"),
    ]


def test_counts_hits_bursts_and_shares() -> None:
    """A pause of exactly the gap does not end a burst, one a microsecond longer does; bursts span nodes."""
    found = run_job(LIMITS_JOB, Span(day(0), day(1)), make_log(), Settings(k_anonymity=1, top=3, burst_gap_s=60))
    columns = ("dt", "limit", "hits", "who_n", "bursts", "longest_burst_s", "share")
    assert select_columns(found["limits_daily"], *columns) == [
        (day(0), "late", 1, 1, 1, 0.0, 0.0),
        (day(0), "opens", 2, 1, 2, 0.0, 1 / 4),
        (day(0), "sends", 5, 2, 3, 60.0, 1 / 4),
        (day(1), "late", 1, 1, 1, 0.0, 0.0),
    ]
    assert select_columns(found["limits_top"], "dt", "rank", "who", "limit", "hits", "bursts") == [
        (day(0), 1, "x", "sends", 4, 2),
        (day(0), 2, "x", "opens", 1, 1),
        (day(0), 3, "y", "sends", 1, 1),
        (day(1), 1, "z", "late", 1, 1),
    ]


def test_hides_counts_of_fewer_than_k_parties() -> None:
    """Hits are always shown; the number of parties and shares only from k on."""
    log = [
        *(event("limit.hit", limit="few", who=f"x{n}") for n in range(2)),
        *(event("limit.hit", limit="enough", who=f"x{n}") for n in range(3)),
        event("limit.hit", limit="nobody"),
        event("msg.accept", sender="x0"),
    ]
    found = run_job(LIMITS_JOB, Span(day(0), day(0)), log, Settings(k_anonymity=3))
    assert select_columns(found["limits_daily"], "limit", "hits", "who_n", "share") == [
        ("enough", 3, 3, 1.0),
        ("few", 2, None, None),
        ("nobody", 1, 0, 0.0),
    ]
