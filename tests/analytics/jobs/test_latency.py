"""Histograms and percentiles of durations."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from analytics.job import Span
from analytics.jobs.latency_and_cost import LATENCY_JOB
from tests.analytics.events import at, day, event, events, run
from tests.analytics.jobs.test_percentiles import nearest_rank

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_of_each_node_and_path_and_of_all(spark: SparkSession) -> None:
    chance = random.Random(3)
    values = {(node, path): [chance.lognormvariate(4, 2) for _ in range(200)] for node in "ab" for path in "xy"}
    lines = [
        event(at(0, chance.uniform(0, 24)), "msg.ack", node=node, path=path, latency_ms=ms)
        for (node, path), each in values.items()
        for ms in each
    ]

    made = run(LATENCY_JOB, {"events": events(spark, lines)}, Span(day(0), day(0)))

    assert sum(row["n"] for row in made["latency_hist"]) == 800
    assert {row["metric"] for row in made["latency_hist"]} == {"ack"}
    assert len(made["latency_daily"]) == 9
    for row in made["latency_daily"]:
        wanted = [
            ms
            for (node, path), each in values.items()
            if row["node"] in (node, "*") and row["path"] in (path, "*")
            for ms in each
        ]
        assert row["n"] == len(wanted)
        for share in (50, 90, 95, 99):
            assert abs(row[f"p{share}_ms"] / nearest_rank(wanted, share / 100) - 1) < 0.0101
        assert 1 <= row["max_ms"] / max(wanted) * 1.0000001 < 1.0201


def test_what_counts_as_which(spark: SparkSession) -> None:
    lines = [
        event(at(0, 5), "msg.push", path="live", latency_ms=1.0, ok=True),
        event(at(0, 5), "msg.push", path="live", latency_ms=1.0),
        event(at(0, 5), "msg.push", path="live", latency_ms=9.0, ok=False),
        event(at(0, 5), "msg.push", path="live", ok=True),
        event(at(0, 6), "msg.ack", latency_ms=0.0),
        event(at(0, 7), "req.done", proto="decentrl", dur_ms=100.0, latency_ms=7.0),
        event(at(0, 7), "req.done", node=None, dur_ms=100.0),
        event(at(0, 7), "conn.close", dur_ms=100.0),
    ]

    made = run(LATENCY_JOB, {"events": events(spark, lines)}, Span(day(0), day(0)))

    assert [tuple(row.values())[1:] for row in made["latency_hist"]] == [
        (5, "a", "push", "live", 0, 2),
        (6, "a", "ack", "", -349, 1),
        (7, "", "request", "", 232, 1),
        (7, "a", "request", "decentrl", 232, 1),
    ]
