"""Replay refusals: clock skew is distinguished from attacks."""

from __future__ import annotations

from typing import Any

from analytics.job import Span
from analytics.jobs.refusals import REPLAY_JOB
from analytics.settings import Settings
from tests.analytics.job_tables import at, day, event, run_job, select_columns

MINUTE = 60_000
AGES = {
    0: "fresh", -5 * MINUTE: "fresh", 5 * MINUTE: "fresh", 5 * MINUTE + 1: "skew", -10 * MINUTE: "skew",
    10 * MINUTE + 1: "old", 1440 * MINUTE: "old", 1440 * MINUTE + 1: "ancient",
    -10 * MINUTE - 1: "future", None: "",
}  # fmt: skip


def make_log() -> list[dict[str, Any]]:
    """Requests of all ages, and those of senders at one or several nodes."""
    return [
        *(event("replay.drop", code="AGE", age_ms=age) for age in AGES),
        *(
            event("replay.drop", at(1), code="NONCE", age_ms=1, sender=f"s{sender}", node=node)
            for sender, nodes in enumerate(("aa", "ab", "abc", "ba"))
            for node in nodes
        ),
        event("replay.drop", at(1), code="NONCE", age_ms=6 * MINUTE, sender="s0"),
        event("replay.drop", at(1), sender=None, age_ms=1),
        event("replay.drop", at(1), sender=None, age_ms=1, node="b"),
    ]


def test_classifies_ages_and_hides_few_senders() -> None:
    """
    Age classes extend to both sides of the present; senders at several nodes are counted; fewer than k are hidden.
    """
    found = run_job(REPLAY_JOB, Span(day(0), day(1)), make_log(), Settings(k_anonymity=3))["replay_daily"]
    first = {row["age_class"]: row["n"] for row in found if row["dt"] == day(0)}
    assert first == {name: list(AGES.values()).count(name) for name in AGES.values()}
    assert select_columns(found[len(first) :], "code", "age_class", "n", "senders", "on_nodes") == [
        ("", "fresh", 2, 0, 0),
        ("NONCE", "fresh", 9, 4, 3),
        ("NONCE", "skew", 1, None, 0),
    ]
