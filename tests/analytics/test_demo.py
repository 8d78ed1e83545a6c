"""`demo`: arguments and directories; generated bulk logs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import click
import orjson
import pytest
from click.testing import CliRunner

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
