"""`demo` and `goals`: arguments, generated bulk logs, and the judgement of measurements."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import click
import orjson
import pytest
from click.testing import CliRunner

from analytics.benchmark import (
    Measurements,
    find_differences,
    judge_targets,
    run_python,
    run_task,
    sum_resident_bytes,
)
from analytics.cli import demo, prepare_demo_directory
from analytics.errors import AnalyticsError
from analytics.sample.bulk_log import BUSIEST_ACCOUNT, BulkTruth, generate_bulk_logs


@pytest.fixture(scope="module")
def bulk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BulkTruth]:
    """24 000 lines."""
    directory = tmp_path_factory.mktemp("bulk")
    return directory, generate_bulk_logs(directory, 0.04, processes=2)


def test_bulk_truth_agrees_with_lines(bulk: tuple[Path, BulkTruth]) -> None:
    directory, truth = bulk
    events: Counter[str] = Counter()
    damaged, missing, accepted, ended = 0, 0, set(), Counter[str]()
    for node in sorted(path for path in directory.iterdir() if path.is_dir()):
        last = line_count = 0
        for segment in sorted(node.iterdir()):
            for line in segment.read_bytes().splitlines():
                try:
                    event = orjson.loads(line)
                except orjson.JSONDecodeError:
                    damaged += 1
                    continue
                events[event["event"]] += 1
                last, line_count = event["seq"], line_count + 1
                if event["event"] == "msg.accept":
                    accepted.add(event["msg"])
                elif event["event"] in ("msg.ack", "msg.expire", "msg.evict", "msg.remove"):
                    ended[event["event"]] += event["msg"] in accepted
                    accepted.discard(event["msg"])
        missing += last - line_count
    assert (events, damaged, missing) == (truth.events, truth.damaged, truth.missing)
    assert len(accepted) == truth.open
    assert sorted(ended.values()) == sorted(truth.ended.values())
    assert sum(events.values()) + damaged == truth.lines == 24_000


def test_bulk_logs_are_reused(bulk: tuple[Path, BulkTruth]) -> None:
    directory, truth = bulk
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("events-*")}
    assert generate_bulk_logs(directory, 0.04) == truth
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("events-*")} == before
    with pytest.raises(ValueError, match="holds other files"):
        generate_bulk_logs(directory, 0.05)


@pytest.mark.parametrize(("skew", "least", "most"), [(0.0, 0.05, 0.25), (0.5, 0.5, 0.7)])
def test_skew_gives_share_of_events_to_one_account(tmp_path: Path, skew: float, least: float, most: float) -> None:
    truth = generate_bulk_logs(tmp_path, 0.02, skew=skew, processes=2)
    own = identified = accepted = 0
    for segment in tmp_path.rglob("events-*"):
        for line in map(orjson.loads, segment.read_bytes().splitlines()):
            parties = {line[name] for name in ("rcpt", "sender", "did") if name in line}
            identified += bool(parties)
            own += BUSIEST_ACCOUNT in parties
            accepted += line["event"] == "msg.accept" and line["rcpt"] == BUSIEST_ACCOUNT
    assert accepted == truth.busiest
    assert least <= own / identified <= most


def test_scan_counts_every_line(bulk: tuple[Path, BulkTruth]) -> None:
    directory, truth = bulk
    scan = run_task("scan", logs=str(directory))
    assert scan["events"] == dict(truth.events)
    assert scan["damaged"] == truth.damaged


def test_measures_time_and_memory_of_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its grandchild holds the memory for a second, and until it was measured."""
    measure, found = sum_resident_bytes, tmp_path / "found"

    def record_resident_bytes(pid: int, *parent: tuple[int, int]) -> int:
        held = measure(pid, *parent)
        if held > 150_000_000:
            found.touch()
        return held

    monkeypatch.setattr("analytics.benchmark.sum_resident_bytes", record_resident_bytes)
    allocating = (
        "import pathlib, time; held = b'x' * 150_000_000; time.sleep(1)\n"
        f"for _ in range(6000):\n  if pathlib.Path({str(found)!r}).exists(): break\n  time.sleep(0.01)"
    )
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {allocating!r}])"
    measurement = run_python(["-c", child])
    assert measurement.peak > 150_000_000
    assert measurement.seconds >= 1
    with pytest.raises(AnalyticsError, match="status 3: what is wrong"):
        run_python(["-c", "import sys; print('what is wrong', file=sys.stderr); sys.exit(3)"])


def test_judges_targets() -> None:
    figures = Measurements(scan=10, night=49, ingest=43, ingest_small=10, parse=20, declared=10, inferred=18)
    figures.cold_ingest, figures.after_ingest, figures.ingest_alone, figures.peak = 40, 25, 70, 2**31
    figures.wrong, figures.unequal = ["open: 3, not 4"], ["ledger_daily"]
    results = {result.name: result.met for result in judge_targets(figures, timed=True)}
    assert results == {
        "G1": True,
        "G2": True,
        "G3": True,
        "G4": True,
        "G5": False,
        "G6": True,
        "G7": True,
        "G8": False,
        "G9": False,
    }
    untimed = {result.name: result.met for result in judge_targets(figures, timed=False)}
    assert {name for name, met in untimed.items() if met is None} == {"G1", "G2", "G3", "G4", "G5", "G6", "G7"}


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


def test_demo_replaces_only_demo_directories(tmp_path: Path) -> None:
    other_directory = tmp_path / "theirs"
    other_directory.mkdir()
    (other_directory / "thesis.txt").write_text("ten years")
    with pytest.raises(AnalyticsError, match="is not empty and not from a demo"):
        prepare_demo_directory(other_directory)
    assert (other_directory / "thesis.txt").exists()
    demo_directory = prepare_demo_directory(tmp_path / "ours")
    (demo_directory / "results").mkdir()
    assert not (prepare_demo_directory(demo_directory) / "results").exists()


@pytest.mark.parametrize("arguments", [["--days", "1"], ["--messages", "0"], ["--nonsense"]])
def test_rejects_invalid_arguments(arguments: list[str]) -> None:
    assert isinstance(demo, click.Command)
    result = CliRunner().invoke(demo, arguments)
    assert result.exit_code == 2
    assert "Error:" in result.output


def test_tasks_print_json(bulk: tuple[Path, BulkTruth]) -> None:
    result = run_python(["-m", "analytics.benchmark", "duck", json.dumps({"logs": str(bulk[0]), "threads": 2})])
    assert set(json.loads(result.output)) == {"ingest", "query_raw", "query_parquet"}
