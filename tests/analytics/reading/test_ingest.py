"""Ingest: every line of a segment becomes an event or is counted as damaged, incomplete or duplicate."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from analytics.reading.files import FileSystem
from analytics.reading.ingest import (
    IngestResult,
    ingest_segments,
    make_quarantine_rows,
    read_frequent_events,
    read_other_lines,
    shape_rows,
    summarize_blocks,
)
from analytics.reading.segments import Segment, discover_segments
from analytics.schema import TABLES, make_events_struct
from tests.analytics.lines import DAY, SegmentWriter, write_file

Tables = dict[str, list[dict[str, Any]]]


class IngestFixture:
    """A directory of logs, and the staged results of its ingest."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark, self.files, self.logs, self.staging = spark, FileSystem(spark), root / "logs", root / "staging"
        self.logs.mkdir()
        self.result = IngestResult(Counter(), 0, 0, 0, 0, 0)

    def put(self, name: str, lines: list[bytes] | bytes) -> None:
        """Write a file of logs."""
        write_file(self.logs, name, lines)

    def discover(self) -> list[Segment]:
        """The segments in the directory."""
        return discover_segments(self.files, [str(self.logs)]).segments

    def run(self, discover: list[Segment] | None = None) -> Tables:
        """Ingest segments. Asserts that every line is accounted for. :return: rows of all tables."""
        self.result = ingest_segments(self.spark, self.files, discover or self.discover(), str(self.staging))
        tables = {name: self.rows(name) for name in ("events", "quarantine", "inputs")}
        for row in tables["inputs"]:
            events_of_segment = sum(event["stem"] == row["stem"] for event in tables["events"])
            assert events_of_segment + row["corrupt"] + row["unfinished"] + row["doubled"] == row["lines"], row[
                "stem"
            ]
            assert sum(line["stem"] == row["stem"] for line in tables["quarantine"]) == row["corrupt"]
        assert self.result.lines == sum(row["lines"] for row in tables["inputs"])
        assert self.result.events == len(tables["events"])
        assert {path.name for path in self.staging.iterdir()} <= {"events", "quarantine", "inputs"}
        return tables

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Rows of a staged table."""
        if not (self.staging / name).exists():
            return []
        return [row.asDict() for row in self.frame(name).collect()]

    def frame(self, name: str) -> DataFrame:
        """A staged table."""
        struct = make_events_struct() if name == "events" else TABLES[name].struct()
        return self.spark.read.schema(struct).parquet(str(self.staging / name))


@pytest.fixture
def ingest(spark: SparkSession, tmp_path: Path) -> IngestFixture:
    return IngestFixture(spark, tmp_path)


def make_line(**changes: Any) -> bytes:
    """A line of JSON with fields changed; None omits a field."""
    defaults = {"v": 1, "ts": "2026-11-20T10:00:00.000000Z", "seq": 900, "node": "one", "boot": "b", "event": "gauge"}
    fields = {**defaults, "level": "info", "epoch": 1, **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode() + b"\n"


def test_ingests_plain_and_compressed_segments(ingest: IngestFixture) -> None:
    """Each field as written, on the day of its time; the inputs table describes the segments."""
    writer = SegmentWriter(now=DAY + timedelta(hours=23, minutes=59, seconds=58))
    stem, lines = writer.segment(2)
    packed_stem, more = writer.segment(1)
    ingest.put(f"{stem}.jsonl", lines)
    ingest.put(f"sub/{packed_stem}.jsonl.gz", gzip.compress(b"".join(more)))
    tables = ingest.run()
    events = sorted(tables["events"], key=lambda row: row["seq"])
    assert [(row["seq"], str(row["dt"]), str(row["batch"])) for row in events] == [
        (1, "2026-11-20", "2026-11-20"),
        (2, "2026-11-20", "2026-11-20"),
        *[(seq, "2026-11-21", "2026-11-20") for seq in (3, 4)],
        *[(seq, "2026-11-21", "2026-11-21") for seq in (5, 6, 7)],
    ]
    second = {name: value for name, value in events[1].items() if value is not None}
    assert second == {
        "dt": date(2026, 11, 20),
        "batch": date(2026, 11, 20),
        "stem": stem,
        "v": 1,
        "ts": datetime(2026, 11, 20, 23, 59, 59, tzinfo=UTC).astimezone().replace(tzinfo=None),
        "seq": 2,
        "node": "one",
        "boot": writer.boot,
        "event": "msg.ack",
        "level": "info",
        "epoch": 1,
        "msg": "m1",
        "rcpt": "r",
        "path": "live",
        "latency_ms": 1.5,
    }
    columns = ("stem", "packed", "state", "lines", "corrupt", "seq_first", "seq_last", "lines_said", "remarks")
    assert [
        tuple(row[name] for name in columns) for row in sorted(tables["inputs"], key=lambda row: row["stem"])
    ] == [
        (stem, "plain", "closed", 4, 0, 1, 4, 4, ""),
        (packed_stem, "gzip", "closed", 3, 0, 5, 7, 3, ""),
    ]
    assert ingest.result.states == {"closed": 2}


LINE = make_line()
DAMAGED = [
    ("torn", LINE[:50] + b"\n"),
    ("torn", LINE[50:]),
    ("glued", LINE[:50] + LINE),
    ("nul", bytes(64) + b"\n"),
    ("nul", bytes(3) + LINE),
    ("utf8", LINE.replace(b"gauge", b"g\xff\xfege")),
    ("not_json", b"[1, 2]\n"),
    ("not_json", b"null\n"),
    ("not_json", b"Segmentation fault\n"),
    ("not_json", b"{'v': 1}\n"),
    ("type", make_line(size="12")),
    ("type", make_line(size=3.5)),
    ("type", make_line(seq=2**63)),
    ("type", make_line(ok="true")),
    ("type", LINE.replace(b"}", b', "lag_ms": NaN}')),
    ("missing", make_line(node=None)),
    ("missing", LINE.replace(b'"gauge"', b"null")),
    ("missing", b"{}\n"),
    ("time", make_line(ts="2026-11-20")),
    ("time", make_line(ts="2026-11-20T10:00:00.000000+00:00")),
    ("time", make_line(ts="2026-13-20T10:00:00.000000Z")),
]
ACCEPTED = [
    make_line(event="gauge.new", colour="blue"),
    make_line(v=2, seq=901),
    make_line(seq=902, ts="2026-11-17T10:00:00.000000Z"),
    make_line(seq=903, msg=5, depth=None).rstrip() + b"\r\n",
]


def test_quarantines_damaged_lines_with_cause(ingest: IngestFixture) -> None:
    """
    On the fast and the general path. Blank lines are ignored; unknown events, versions and fields are accepted; a
    time far from the batch does not change the day.
    """
    gapless = SegmentWriter("quick")
    gapless.seq = 898
    fast_stem, fast_lines = gapless.segment(0)
    general_stem, general_lines = SegmentWriter("careful").segment(0)
    damaged = [line for _, line in DAMAGED]
    ingest.put(f"{fast_stem}.jsonl", [fast_lines[0], *damaged, b"\n", *ACCEPTED])
    others = [line.replace(b'"one"', b'"two"') for line in ACCEPTED]
    separated = [b"\x1e" + line for line in (general_lines[0], *damaged, *others)]
    ingest.put(f"{general_stem}.jsonl", [*separated, b" \n", b"\x1e\n"])
    tables = ingest.run()
    for stem in (fast_stem, general_stem):
        causes = Counter(row["cause"] for row in tables["quarantine"] if row["stem"] == stem)
        assert causes == Counter(cause for cause, _ in DAMAGED)
        events = sorted((row for row in tables["events"] if row["stem"] == stem), key=lambda row: row["seq"])
        found = {(row["event"], row["v"], row["seq"], str(row["dt"]), row["msg"]) for row in events[1:]}
        assert found == {
            ("gauge.new", 1, 900, "2026-11-20", None),
            ("gauge", 2, 901, "2026-11-20", None),
            ("gauge", 1, 902, "2026-11-20", None),
            ("gauge", 1, 903, "2026-11-20", "5"),
        }
    lines = {row["line"] for row in tables["quarantine"] if row["stem"] == fast_stem and row["cause"] == "torn"}
    assert lines == {LINE[:50].decode(), LINE[50:].decode().rstrip()}
    quarantined = [json.loads(row["line"]) for row in tables["quarantine"] if row["cause"] == "time"]
    assert {row["ts"] for row in quarantined} == {
        "2026-11-20",
        "2026-11-20T10:00:00.000000+00:00",
        "2026-13-20T10:00:00.000000Z",
    }
    assert {row["stem"]: (row["state"], row["remarks"]) for row in tables["inputs"]} == {
        fast_stem: ("crashed", ""),
        general_stem: ("crashed", "separators"),
    }
    assert ingest.result.corrupt == 2 * len(DAMAGED) and ingest.result.lines == 2 * (1 + len(DAMAGED) + len(ACCEPTED))


def test_quarantines_damaged_lines_of_frequent_events(ingest: IngestFixture) -> None:
    """Lines read with the reduced schema have the same causes; fields not in the event's schema are ignored."""
    gapless = SegmentWriter()
    gapless.seq = 47
    stem, lines = gapless.segment(1)
    frequent = [
        (cause, line.replace(b"gauge", b"msg.ack").replace(b"lag_ms", b"latency_ms")) for cause, line in DAMAGED
    ]
    damaged = [(cause, line) for cause, line in frequent if b"size" not in line]
    valid = [make_line(event="msg.ack", seq=50, depth="12"), make_line(event="msg.push", seq=51, latency_ms=2)]
    ingest.put(f"{stem}.jsonl", [*lines[:2], *(line for _, line in damaged), *valid])
    tables = ingest.run()
    # `g\xff\xfege` is not the name of a frequent event, so it was not replaced above.
    assert Counter(row["cause"] for row in tables["quarantine"]) == Counter(cause for cause, _ in damaged)
    events = sorted((row["seq"], row["event"], row["latency_ms"], row["depth"]) for row in tables["events"])
    assert events[2:] == [(50, "msg.ack", None, None), (51, "msg.push", 2.0, None)]


def test_reads_each_line_once_by_its_event_name(ingest: IngestFixture) -> None:
    """A line with two event names is resolved individually."""
    odd, even = SegmentWriter("odd"), SegmentWriter("even")
    stem, lines = odd.segment(5)
    lines[1] = lines[1].replace(b'"event":"', b'"event" :  "')
    lines[2] = lines[2].replace(b"event", b"\\u0065vent")
    lines[3] = lines[3].replace(b'"v":1', b'"reason":"\\"event\\":\\"gauge\\"","v":1')
    lines[4] = lines[4].replace(b'"v":1', b'"event":"gauge","v":1')
    ingest.put(f"{stem}.jsonl", lines)
    other, twice = even.segment(2)
    twice[1] = twice[1].rstrip().rstrip(b"}") + b',"event":"gauge"}\n'
    ingest.put(f"{other}.jsonl", twice)
    # Without log.close the number of lines is unknown.
    crashed, last = SegmentWriter("last").segment(1)
    last[1] = last[1].rstrip().rstrip(b"}") + b',"event":"gauge"}\n'
    ingest.put(f"{crashed}.jsonl", last[:-1])
    tables = ingest.run()
    found: dict[str, list[str]] = {stem: [], other: [], crashed: []}
    for row in sorted(tables["events"], key=lambda row: row["seq"]):
        found[row["stem"]].append(row["event"])
    assert found[stem] == ["log.open", *["msg.ack"] * 5, "log.close"]
    assert found[other] == ["log.open", "gauge", "msg.ack", "log.close"]
    assert found[crashed] == ["log.open", "gauge"]
    assert not tables["quarantine"]


def test_detects_glued_lines_by_line_count(ingest: IngestFixture) -> None:
    """Joined lines and arrays, which the fast path misses, are found by the line count in log.close."""
    stem, lines = SegmentWriter().segment(6)
    glued = lines[3].rstrip() + lines[4]
    ingest.put(f"{stem}.jsonl", [*lines[:3], glued, b"[]\n", lines[6], b"\x1e" + lines[7]])
    tables = ingest.run()
    assert sorted(row["seq"] for row in tables["events"]) == [1, 2, 3, 7, 8]
    assert sorted(row["cause"] for row in tables["quarantine"]) == ["glued", "not_json"]
    (row,) = tables["inputs"]
    assert (row["state"], row["lines"], row["lines_said"], row["remarks"]) == ("closed", 7, 8, "separators")


def test_detects_glued_lines_by_sequence_gap(ingest: IngestFixture) -> None:
    """Without log.close, a gap in the sequence numbers causes every line to be checked."""
    stem, lines = SegmentWriter().segment(8)
    array = b"[" + lines[6].rstrip() + b"," + lines[7].rstrip() + b"]\n"
    ingest.put(f"{stem}.jsonl", [*lines[:3], lines[3].rstrip() + lines[4], lines[5], array, lines[8]])
    tables = ingest.run()
    assert sorted(row["seq"] for row in tables["events"]) == [1, 2, 3, 6, 9]
    assert sorted(row["cause"] for row in tables["quarantine"]) == ["glued", "glued"]
    (row,) = tables["inputs"]
    assert (row["state"], row["lines"], row["lines_said"]) == ("crashed", 7, None)


def test_reads_truncated_archives_and_skips_unreadable_files(ingest: IngestFixture) -> None:
    """A truncated archive is read as far as possible; empty and unreadable files do not affect others."""
    writer = SegmentWriter("half")
    truncated, lines = writer.segment(20_000)
    after, more = writer.segment(1)
    ingest.put(f"{truncated}.jsonl.gz", gzip.compress(b"".join(lines))[:-60_000])
    ingest.put(f"{after}.jsonl.gz", gzip.compress(b"".join(more)))
    others = {name: SegmentWriter(name).segment(1) for name in ("empty", "nothing", "text", "packed", "strange")}
    stems = {name: stem for name, (stem, _) in others.items()}
    ingest.put(f"{stems['empty']}.jsonl", b"")
    ingest.put(f"{stems['nothing']}.jsonl.gz", gzip.compress(b""))
    ingest.put(f"{stems['text']}.jsonl.gz", others["text"][1])
    ingest.put(f"{stems['packed']}.jsonl", gzip.compress(b"".join(others["packed"][1])))
    ingest.put(f"{stems['strange']}.jsonl.xz", others["strange"][1])
    tables = ingest.run()
    assert {row["stem"]: row["state"] for row in tables["inputs"]} == {
        truncated: "partial",
        after: "closed",
        stems["empty"]: "empty",
        stems["nothing"]: "crashed",
        stems["text"]: "unread",
        stems["packed"]: "unread",
        stems["strange"]: "unread",
    }
    read = [row["seq"] for row in tables["events"] if row["stem"] == truncated]
    assert 1000 < len(read) < len(lines) and sorted(read) == list(range(1, len(read) + 1))
    assert sum(row["stem"] == after for row in tables["events"]) == len(more)


def test_reads_growing_file_up_to_discovered_size(ingest: IngestFixture) -> None:
    """Except for an incomplete last line; later changes are ignored."""
    writer = SegmentWriter()
    stem, lines = writer.segment(5)
    ingest.put("node/events.jsonl", [*lines[:4], lines[4][:40]])
    other, more = SegmentWriter("two").segment(5)
    ingest.put("two/events.jsonl", more[:3])
    discover = ingest.discover()
    ingest.put("node/events.jsonl", lines)
    ingest.put("two/events.jsonl", [*more[:3], more[3][:10]])
    tables = ingest.run(discover)
    assert {row["stem"]: (row["state"], row["lines"], row["unfinished"]) for row in tables["inputs"]} == {
        stem: ("active", 5, 1),
        other: ("active", 3, 0),
    }
    assert not tables["quarantine"]


def test_reads_compressed_replacement_of_vanished_file(
    ingest: IngestFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment compressed meanwhile is read; a deleted one is reported as vanished."""
    writer = SegmentWriter()
    (packed_stem, lines), (gone, more), (late, rest) = (writer.segment(n) for n in (2, 3, 4))
    for stem, content in ((packed_stem, lines), (gone, more), (late, rest)):
        ingest.put(f"{stem}.jsonl", content)
    discover = ingest.discover()
    (ingest.logs / f"{packed_stem}.jsonl").rename(ingest.logs / "x")
    ingest.put(f"{packed_stem}.jsonl.gz", gzip.compress(b"".join(lines)))
    (ingest.logs / f"{gone}.jsonl").unlink()
    # The third is replaced after its inspection and before it is read.
    read = FileSystem.read

    def read_then_replace(files: FileSystem, url: str, limit: int | None = None, offset: int = 0) -> bytes:
        content = read(files, url, limit, offset)
        if late in url:
            ingest.put(f"{late}.jsonl.gz", gzip.compress(b"".join(rest)))
            (ingest.logs / f"{late}.jsonl").unlink(missing_ok=True)
        return content

    monkeypatch.setattr(FileSystem, "read", read_then_replace)
    tables = ingest.run(discover)
    assert {row["stem"]: (row["state"], row["packed"], row["lines"]) for row in tables["inputs"]} == {
        packed_stem: ("closed", "gzip", len(lines)),
        gone: ("vanished", "plain", 0),
        late: ("closed", "gzip", len(rest)),
    }


def test_reads_other_copy_of_vanished_file(ingest: IngestFixture) -> None:
    """In any directory."""
    stem, lines = SegmentWriter().segment(3)
    ingest.put(f"a/{stem}.jsonl", lines)
    ingest.put(f"b/{stem}.jsonl.xz", b"whatever")
    ingest.put(f"c/{stem}.jsonl", lines)
    discover = ingest.discover()
    Path(discover[0].path.removeprefix("file:")).unlink()
    tables = ingest.run(discover)
    (row,) = tables["inputs"]
    assert (row["state"], row["lines"], row["path"] != discover[0].path) == ("closed", len(lines), True)


def test_counts_each_sequence_number_once(ingest: IngestFixture) -> None:
    """Duplicate segments and duplicate lines are ignored, and counted."""
    writer = SegmentWriter()
    stem, lines = writer.segment(100)
    ingest.put(f"{stem}.jsonl", lines)
    ingest.put(f"{stem}-2.jsonl", lines)
    other, more = SegmentWriter("two").segment(10)
    ingest.put(f"{other}.jsonl", [*more[:5], more[4], *more[5:]])
    defaults, rest = SegmentWriter("three").segment(70)
    ingest.put(f"{defaults}.jsonl", rest)
    tables = ingest.run()
    numbers = Counter((row["node"], row["seq"]) for row in tables["events"])
    assert set(numbers.values()) == {1} and len(numbers) == len(lines) + len(more) + len(rest)
    assert {row["stem"]: row["doubled"] for row in tables["inputs"]} == {
        stem: 0,
        f"{stem}-2": len(lines),
        other: 1,
        defaults: 0,
    }


def test_segment_without_events_has_no_events_table(ingest: IngestFixture) -> None:
    """The run does not fail."""
    stem, _ = SegmentWriter().segment(1)
    ingest.put(f"{stem}.jsonl", b"nothing\n")
    tables = ingest.run()
    assert [row["cause"] for row in tables["quarantine"]] == ["not_json"] and not tables["events"]


def test_plan_uses_no_python_and_prunes_partitions(ingest: IngestFixture) -> None:
    """Reading the events of a day reads only its partitions."""
    stem, lines = SegmentWriter().segment(1)
    ingest.put(f"{stem}.jsonl", lines)
    paths = [segment.path for segment in ingest.discover()]
    both = [read(ingest.spark, paths) for read in (read_frequent_events, read_other_lines)]
    shaped_rows = shape_rows(both[0].unionByName(both[1], allowMissingColumns=True), DAY.date())
    for frame in (shaped_rows, make_quarantine_rows(shaped_rows), summarize_blocks(shaped_rows)):
        assert "Python" not in explain_frame(frame) and "CartesianProduct" not in explain_frame(frame)
    ingest.run()
    assert "PartitionFilters: [isnotnull(dt" in explain_frame(ingest.frame("events").where("dt = DATE'2026-11-20'"))


def explain_frame(frame: DataFrame) -> str:
    """The physical plan."""
    return str(frame._jdf.queryExecution().executedPlan().toString())
