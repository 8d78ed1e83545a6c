"""`goals`: measurements of processes and of Spark, and their judgement."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from threading import Event, Thread

import pytest

from analytics.benchmark import (
    Measurements,
    SparkWork,
    Usage,
    find_differences,
    judge_targets,
    list_descendants,
    measure_command,
    read_proportional_bytes,
    read_spark_work,
    scan_lines,
    shares_memory,
)
from analytics.errors import AnalyticsError
from analytics.sample.bulk_log import BulkTruth, generate_bulk_logs

_FORKED = """
import os, sys
held = bytearray(96 << 20)
if os.fork():
    print("both", flush=True)
sys.stdin.read()
"""
# The parent ends at once; its child holds memory and works for a second.
_ORPHAN = """
import os, time
if not os.fork():
    held = b"x" * 150_000_000
    while time.process_time() < 1:
        pass
"""


def test_scan_counts_every_line(tmp_path: Path) -> None:
    truth = generate_bulk_logs(tmp_path, 0.01, processes=2)
    usage, events, damaged = scan_lines(tmp_path)
    assert (events, damaged) == (truth.events, truth.damaged)
    assert 0 < usage.cpu <= usage.seconds


def test_shared_memory_of_fork_counts_once() -> None:
    with subprocess.Popen([sys.executable, "-c", _FORKED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        (forked,) = list_descendants(child.pid)
        assert forked in list_descendants(os.getpid())
        assert 96 << 20 < sum(map(read_proportional_bytes, (child.pid, forked))) < 190 << 20
        assert child.stdin is not None
        child.stdin.close()


def test_knows_processes_that_share_all_memory() -> None:
    """As a thread does; a forked process only has a copy."""
    ended = Event()
    thread = Thread(target=ended.wait)
    thread.start()
    try:
        assert thread.native_id is not None
        assert shares_memory(os.getpid(), thread.native_id)
        assert not shares_memory(os.getpid(), os.getppid())
    finally:
        ended.set()
        thread.join()


def test_measures_orphans_of_command() -> None:
    usage = measure_command([sys.executable, "-c", _ORPHAN])
    assert usage.cpu >= 1
    assert usage.peak > 150_000_000


def test_reports_last_line_of_failed_command() -> None:
    with pytest.raises(AnalyticsError, match="status 3: what is wrong"):
        measure_command([sys.executable, "-c", "import sys; print('what is wrong', file=sys.stderr); sys.exit(3)"])


def test_reads_skew_of_heaviest_stage(tmp_path: Path) -> None:
    """Tasks of one stage take 1, 2 and 5 s; those of another one are less skewed and shorter."""
    tasks = [(0, 0, 1000), (0, 0, 2000), (0, 1000, 6000), (1, 0, 2000), (1, 0, 2500), (2, 0, 9000)]
    written = {"Shuffle Write Metrics": {"Shuffle Bytes Written": 7}}
    events = [
        {"Event": "org.apache.spark.sql.execution.ui.SparkListenerSQLExecutionStart"},
        *(
            {
                "Event": "SparkListenerTaskEnd",
                "Stage ID": stage,
                "Task Info": {"Launch Time": launched, "Finish Time": finished},
                "Task Metrics": written,
            }
            for stage, launched, finished in tasks
        ),
    ]
    event_log = tmp_path / "local-1"
    event_log.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert read_spark_work(event_log) == SparkWork(executions=1, stages=3, tasks=6, shuffled_bytes=42, skew=2.5)


def make_measurements() -> Measurements:
    """Measurements that meet all targets."""
    logs = ("large", "medium", "small", "sixteenfold", "skewed")
    figures = Measurements(dict.fromkeys(logs, 1000), {log: Usage(10, 5) for log in logs})
    for nights in figures.nights.values():
        nights |= {
            "large": Usage(50, 90, 2**32),
            "medium": Usage(60, 75, 2**31),
            "small": Usage(40, 30, 2**30),
            "sixteenfold": Usage(680, 100, 2**32),
        }
    figures.skewed = SparkWork(10, 20, 40, 1000, 2.0)
    return figures


def test_judges_targets() -> None:
    figures = make_measurements()
    assert {result.met for result in judge_targets(figures, timed=True)} == {True}
    figures.nights["duckdb"] |= {"large": Usage(51, 0), "medium": Usage(0, 76, 2**31 + 2**25), "small": Usage(41, 31)}
    figures.nights["spark"]["sixteenfold"] = Usage(700, 0)
    figures.skewed = SparkWork(10, 20, 40, 1000, 2.1)
    figures.wrong, figures.unequal = ["spark, small: open: 3, not 4"], ["small: events/a.parquet"]
    missed = [(result.engine, result.measured) for result in judge_targets(figures, timed=True) if not result.met]
    assert missed == [
        ("spark", "17.50 x"),
        ("duckdb", "5.10 x"),
        ("duckdb", "15.20 x"),
        ("duckdb", "2.03 GiB"),
        ("duckdb", "31.00 s"),
        ("duckdb", "41.00 s"),
        ("spark", "2.10 x"),
        ("both", "1"),
        ("both", "1"),
    ]
    untimed = judge_targets(figures, timed=False)
    assert [result.engine for result in untimed if result.met is not None] == ["both", "both"]


def test_names_differences_from_truth() -> None:
    truth = BulkTruth(lines=3, events=Counter({"msg.accept": 2}), accepted=2, open=2)
    counts = {
        "events": {"msg.accept": 2},
        "damaged": 0,
        "missing": 0,
        "accepted": 2,
        "open": 2,
        "orphans": 0,
        "difference": 0,
        "again": 0,
        "acked": 0,
        "expired": 0,
        "evicted": 0,
        "removed": 0,
        "drift": {},
    }
    assert find_differences(counts, truth) == []
    assert find_differences({**counts, "open": 1, "drift": {"x": 1}}, truth) == [
        "open: 1, not 2",
        "counters: {'x': 1}, not {}",
    ]
