"""Refusals and failures by code, and their senders."""

from __future__ import annotations

from typing import Any

from analytics.job import Span
from analytics.jobs.refusals import ERRORS_JOB
from analytics.settings import Settings
from tests.analytics.job_tables import at, day, event, run_job, select_columns


def make_log() -> list[dict[str, Any]]:
    """Accepted, refused and failed requests of two days."""
    return [
        *(event("req.done", proto="didcomm", mtype="forward", status=202, sender=f"s{n}") for n in range(5)),
        *(
            event("req.done", proto="didcomm", mtype="forward", status=400, code="not-found", sender=f"s{n}")
            for n in range(3)
        ),
        event("req.done", proto="didcomm", mtype="forward", status=400, code="not-found"),
        # On a socket, a refusal can have a status of success.
        event("req.done", proto="decentrl", status=200, code="OLD", sender="s1"),
        # A failure without a code counts by its status; a line without either is a success.
        event("req.done", status=503),
        event("req.done"),
        event("req.done", at(1), proto="decentrl", mtype="SEND", status=200, code="OLD", sender="s1"),
        event("req.done", at(1), proto="didcomm", mtype="forward", status=400, code="not-found", sender="s0"),
        event("msg.accept", at(1), sender="s0", size=9),
    ]


def test_counts_codes_by_day() -> None:
    """
    Counts, shares of all requests, and senders unless they are fewer than k. A code is new on its first day only, and
    not if the history has it.
    """
    history = [{"dt": day(-300), "code": "OLD", "proto": "didcomm", "n": 1}]
    found = run_job(
        ERRORS_JOB, Span(day(0), day(1)), make_log(), Settings(k_anonymity=3, top=2), {"errors_daily": history}
    )
    assert select_columns(
        found["errors_daily"], "dt", "proto", "mtype", "status", "code", "n", "senders", "share", "is_new"
    ) == [
        (day(0), "", "", 503, "", 1, 0, 1 / 12, True),
        (day(0), "decentrl", "", 200, "OLD", 1, None, 1 / 12, False),
        (day(0), "didcomm", "forward", 400, "not-found", 4, 3, 4 / 12, True),
        (day(1), "decentrl", "SEND", 200, "OLD", 1, None, 1 / 2, False),
        (day(1), "didcomm", "forward", 400, "not-found", 1, None, 1 / 2, False),
    ]
    assert select_columns(found["error_senders"], "dt", "rank", "sender", "n", "codes", "worst") == [
        (day(0), 1, "s1", 2, 2, "not-found"),
        (day(0), 2, "s0", 1, 1, "not-found"),
        (day(1), 1, "s0", 1, 1, "not-found"),
        (day(1), 2, "s1", 1, 1, "OLD"),
    ]
