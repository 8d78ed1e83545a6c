"""Largest senders and recipients, and their concentration, compared with plain Python."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import date
from math import ceil
from random import Random
from typing import Any

import pytest

from analytics.job import Span
from analytics.jobs.senders_and_recipients import TALKERS_JOB
from analytics.settings import Settings
from tests.analytics.job_tables import at, day, event, run_job, select_columns

TOP = 7


def test_agrees_with_plain_python() -> None:
    """Two days with a few large senders, anonymous senders, ties and missing fields."""
    log = make_messages(Random(5))
    found = run_job(
        TALKERS_JOB,
        Span(day(0), day(1)),
        [*log, event("msg.ack", rcpt="r0", sender="s0", size=1)],
        Settings(top=TOP, k_anonymity=1),
    )
    for name, side, partner in (("top_senders", "sender", "rcpt"), ("top_recipients", "rcpt", "sender")):
        assert select_columns(found[name], "dt", "rank", side, "n", "bytes", "partners") == [
            row for number in range(2) for row in _rank_largest(log, day(number), side, partner)
        ]
    for row in found["concentration_daily"]:
        counts = Counter(line.get(row["side"]) for line in log if line["dt"] == row["dt"])
        counts.pop(None, None)
        assert (row["members"], row["n"]) == (len(counts), sum(counts.values()))
        assert row["top_share"] == _compute_top_share(counts)
        assert row["gini"] == pytest.approx(_compute_gini(list(counts.values())), abs=1e-12)
    assert len(found["concentration_daily"]) == 4


def test_hides_concentration_of_fewer_than_k() -> None:
    """Equal counts have a Gini coefficient of 0."""
    log = [event("msg.accept", sender=f"s{n % 2}", rcpt=f"r{n % 3}") for n in range(6)]
    found = run_job(TALKERS_JOB, Span(day(0), day(0)), log, Settings(k_anonymity=3))
    assert select_columns(found["concentration_daily"], "side", "members", "n", "top_share", "gini") == [
        ("rcpt", 3, 6, 1 / 3, 0.0),
        ("sender", 2, 6, None, None),
    ]


def make_messages(random: Random) -> list[dict[str, Any]]:
    """Of two days."""
    lines = []
    for number in range(600):
        sender, rcpt = (int(random.paretovariate(0.6)) % 150 for _ in range(2))
        line = event("msg.accept", at(number % 2), sender=f"s{sender}", rcpt=f"r{rcpt}", size=random.randrange(9))
        for field in ("sender",) * (number % 7 == 0) + ("size",) * (number % 50 == 0) + ("rcpt",) * (number == 3):
            del line[field]
        lines.append(line)
    return lines


def _rank_largest(log: Sequence[Mapping[str, Any]], on_day: date, side: str, partner: str) -> list[tuple[Any, ...]]:
    groups = defaultdict(list)
    for line in log:
        if line["dt"] == on_day and side in line:
            groups[line[side]].append(line)
    totals = [
        (
            -len(lines),
            -sum(line.get("size", 0) for line in lines),
            name,
            len({line.get(partner) for line in lines} - {None}),
        )
        for name, lines in groups.items()
    ]
    return [
        (on_day, rank, name, -n, -size, partners)
        for rank, (n, size, name, partners) in enumerate(sorted(totals)[:TOP], 1)
    ]


def _compute_top_share(counts: Counter[Any]) -> float:
    return sum(n for _, n in counts.most_common(ceil(len(counts) / 100))) / sum(counts.values())


def _compute_gini(values: Sequence[int]) -> float:
    """By its definition: half the mean difference of all pairs, divided by the mean."""
    differences = sum(abs(one - other) for one in values for other in values)
    return differences / (2 * len(values) * sum(values))
