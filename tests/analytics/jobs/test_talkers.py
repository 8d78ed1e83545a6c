"""The largest senders and recipients, and how uneven it all is, against plain Python."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from datetime import date
from math import ceil
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from analytics.job import Span
from analytics.jobs.senders_and_recipients import TALKERS_JOB
from analytics.settings import Settings
from tests.analytics.frames import at, brief, day, event, events, made

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TOP = 7


def test_against_plain_python(spark: SparkSession) -> None:
    """Two days of messages with a few large senders, some anonymous ones, ties, and missing fields."""
    log = list(_messages(Random(5)))
    found = made(
        TALKERS_JOB,
        Span(day(0), day(1)),
        Settings(top=TOP, k_anonymity=1),
        events=events(spark, *log, event("msg.ack", rcpt="r0", sender="s0", size=1)),
    )
    for name, side, partner in (("top_senders", "sender", "rcpt"), ("top_recipients", "rcpt", "sender")):
        assert brief(found[name], "dt", "rank", side, "n", "bytes", "partners") == [
            row for number in range(2) for row in _largest(log, day(number), side, partner)
        ]
    for row in found["concentration_daily"]:
        counts = Counter(line.get(row["side"]) for line in log if line["dt"] == row["dt"])
        counts.pop(None, None)
        assert (row["members"], row["n"]) == (len(counts), sum(counts.values()))
        assert row["top_share"] == _top_share(counts)
        assert row["gini"] == pytest.approx(_gini(list(counts.values())), abs=1e-12)
    assert len(found["concentration_daily"]) == 4


def test_spread_of_few(spark: SparkSession) -> None:
    """How messages are spread over fewer than k members is theirs; all alike is a coefficient of 0."""
    log = events(
        spark,
        *(event("msg.accept", sender=f"s{n % 2}", rcpt=f"r{n % 3}") for n in range(6)),
    )
    found = made(TALKERS_JOB, Span(day(0), day(0)), Settings(k_anonymity=3), events=log)
    assert brief(found["concentration_daily"], "side", "members", "n", "top_share", "gini") == [
        ("rcpt", 3, 6, 1 / 3, 0.0),
        ("sender", 2, 6, None, None),
    ]


def _messages(random: Random) -> Sequence[dict[str, Any]]:
    lines = []
    for number in range(600):
        sender, rcpt = (int(random.paretovariate(0.6)) % 150 for _ in range(2))
        line = event("msg.accept", at(number % 2), sender=f"s{sender}", rcpt=f"r{rcpt}", size=random.randrange(9))
        for gone in ("sender",) * (number % 7 == 0) + ("size",) * (number % 50 == 0) + ("rcpt",) * (number == 3):
            del line[gone]
        lines.append(line)
    return lines


def _largest(log: Sequence[Mapping[str, Any]], on: date, side: str, partner: str) -> list[tuple[Any, ...]]:
    groups = defaultdict(list)
    for line in log:
        if line["dt"] == on and side in line:
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
        (on, rank, name, -n, -size, partners)
        for rank, (n, size, name, partners) in enumerate(sorted(totals)[:TOP], 1)
    ]


def _top_share(counts: Counter[Any]) -> float:
    return sum(n for _, n in counts.most_common(ceil(len(counts) / 100))) / sum(counts.values())


def _gini(values: Sequence[int]) -> float:
    """By its definition: half the mean difference of all pairs, by the mean."""
    differences = sum(abs(one - other) for one in values for other in values)
    return differences / (2 * len(values) * sum(values))
