"""Ingest: every line of a segment is an event, or is counted as what it is instead."""

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
from tests.analytics.lines import DAY, Writer, write

Tables = dict[str, list[dict[str, Any]]]


class IngestFixture:
    """A directory of logs and what ingest makes of it."""

    def __init__(self, spark: SparkSession, root: Path) -> None:
        self.spark, self.files, self.logs, self.staging = spark, FileSystem(spark), root / "logs", root / "staging"
        self.logs.mkdir()
        self.made = IngestResult(Counter(), 0, 0, 0, 0, 0)

    def put(self, name: str, lines: list[bytes] | bytes) -> None:
        """A file of logs."""
        write(self.logs, name, lines)

    def segments(self) -> list[Segment]:
        """That are there."""
        return discover_segments(self.files, [str(self.logs)]).segments

    def run(self, segments: list[Segment] | None = None) -> Tables:
        """Rows of all tables; every line is accounted for."""
        self.made = ingest_segments(self.spark, self.files, segments or self.segments(), str(self.staging))
        tables = {name: self.rows(name) for name in ("events", "quarantine", "inputs")}
        for row in tables["inputs"]:
            there = sum(event["stem"] == row["stem"] for event in tables["events"])
            assert there + row["corrupt"] + row["unfinished"] + row["doubled"] == row["lines"], row["stem"]
            assert sum(line["stem"] == row["stem"] for line in tables["quarantine"]) == row["corrupt"]
        assert self.made.lines == sum(row["lines"] for row in tables["inputs"])
        assert self.made.events == len(tables["events"])
        assert {path.name for path in self.staging.iterdir()} <= {"events", "quarantine", "inputs"}
        return tables

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Of a staged table."""
        if not (self.staging / name).exists():
            return []
        return [row.asDict() for row in self.frame(name).collect()]

    def frame(self, name: str) -> DataFrame:
        """A staged table."""
        struct = make_events_struct() if name == "events" else TABLES[name].struct()
        return self.spark.read.schema(struct).parquet(str(self.staging / name))


@pytest.fixture
def bench(spark: SparkSession, tmp_path: Path) -> IngestFixture:
    return IngestFixture(spark, tmp_path)


def envelope(**changes: Any) -> bytes:
    """A line of JSON with a field changed, or left out where it is None."""
    whole = {"v": 1, "ts": "2026-11-20T10:00:00.000000Z", "seq": 900, "node": "one", "boot": "b", "event": "gauge"}
    fields = {**whole, "level": "info", "epoch": 1, **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode() + b"\n"


def test_whole_segments(bench: IngestFixture) -> None:
    """Packed or not: each field as it was written, in the day of its time, and the segments say what they hold."""
    writer = Writer(now=DAY + timedelta(hours=23, minutes=59, seconds=58))
    stem, lines = writer.segment(2)
    packed, more = writer.segment(1)
    bench.put(f"{stem}.jsonl", lines)
    bench.put(f"sub/{packed}.jsonl.gz", gzip.compress(b"".join(more)))
    tables = bench.run()
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
    said = ("stem", "packed", "state", "lines", "corrupt", "seq_first", "seq_last", "lines_said", "remarks")
    assert [tuple(row[name] for name in said) for row in sorted(tables["inputs"], key=lambda row: row["stem"])] == [
        (stem, "plain", "closed", 4, 0, 1, 4, 4, ""),
        (packed, "gzip", "closed", 3, 0, 5, 7, 3, ""),
    ]
    assert bench.made.states == {"closed": 2}


LINE = envelope()
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
    ("type", envelope(size="12")),
    ("type", envelope(size=3.5)),
    ("type", envelope(seq=2**63)),
    ("type", envelope(ok="true")),
    ("type", LINE.replace(b"}", b', "lag_ms": NaN}')),
    ("missing", envelope(node=None)),
    ("missing", LINE.replace(b'"gauge"', b"null")),
    ("missing", b"{}\n"),
    ("time", envelope(ts="2026-11-20")),
    ("time", envelope(ts="2026-11-20T10:00:00.000000+00:00")),
    ("time", envelope(ts="2026-13-20T10:00:00.000000Z")),
]
ACCEPTED = [
    envelope(event="gauge.new", colour="blue"),
    envelope(v=2, seq=901),
    envelope(seq=902, ts="2026-11-17T10:00:00.000000Z"),
    envelope(seq=903, msg=5, depth=None).rstrip() + b"\r\n",
]


def test_damaged_lines(bench: IngestFixture) -> None:
    """
    Each is in quarantine with its cause, whichever way it is read; blank lines are no lines.

    Unknown events, versions and fields are events; a time far from the batch is put into its day.
    """
    gapless = Writer("quick")
    gapless.seq = 898
    quick, ours = gapless.segment(0)
    careful, theirs = Writer("careful").segment(0)
    bad = [line for _, line in DAMAGED]
    bench.put(f"{quick}.jsonl", [ours[0], *bad, b"\n", *ACCEPTED])
    others = [line.replace(b'"one"', b'"two"') for line in ACCEPTED]
    separated = [b"\x1e" + line for line in (theirs[0], *bad, *others)]
    bench.put(f"{careful}.jsonl", [*separated, b" \n", b"\x1e\n"])
    tables = bench.run()
    for stem in (quick, careful):
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
    lines = {row["line"] for row in tables["quarantine"] if row["stem"] == quick and row["cause"] == "torn"}
    assert lines == {LINE[:50].decode(), LINE[50:].decode().rstrip()}
    shown = [json.loads(row["line"]) for row in tables["quarantine"] if row["cause"] == "time"]
    assert {row["ts"] for row in shown} == {
        "2026-11-20",
        "2026-11-20T10:00:00.000000+00:00",
        "2026-13-20T10:00:00.000000Z",
    }
    assert {row["stem"]: (row["state"], row["remarks"]) for row in tables["inputs"]} == {
        quick: ("crashed", ""),
        careful: ("crashed", "separators"),
    }
    assert bench.made.corrupt == 2 * len(DAMAGED) and bench.made.lines == 2 * (1 + len(DAMAGED) + len(ACCEPTED))


def test_damaged_lines_of_frequent_events(bench: IngestFixture) -> None:
    """They are read by themselves, and end up the same; what is no field of theirs is not looked at."""
    gapless = Writer()
    gapless.seq = 47
    stem, lines = gapless.segment(1)
    frequent = [
        (cause, line.replace(b"gauge", b"msg.ack").replace(b"lag_ms", b"latency_ms")) for cause, line in DAMAGED
    ]
    bad = [(cause, line) for cause, line in frequent if b"size" not in line]
    fine = [envelope(event="msg.ack", seq=50, depth="12"), envelope(event="msg.push", seq=51, latency_ms=2)]
    bench.put(f"{stem}.jsonl", [*lines[:2], *(line for _, line in bad), *fine])
    tables = bench.run()
    # `g\xff\xfege` is no name of theirs, and so nothing of it was replaced.
    assert Counter(row["cause"] for row in tables["quarantine"]) == Counter(cause for cause, _ in bad)
    events = sorted((row["seq"], row["event"], row["latency_ms"], row["depth"]) for row in tables["events"])
    assert events[2:] == [(50, "msg.ack", None, None), (51, "msg.push", 2.0, None)]


def test_whose_a_line_is(bench: IngestFixture) -> None:
    """Each line is read once, by whatever it says its event is; two names in one are sorted out line by line."""
    odd, even = Writer("odd"), Writer("even")
    stem, lines = odd.segment(5)
    lines[1] = lines[1].replace(b'"event":"', b'"event" :  "')
    lines[2] = lines[2].replace(b"event", b"\\u0065vent")
    lines[3] = lines[3].replace(b'"v":1', b'"reason":"\\"event\\":\\"gauge\\"","v":1')
    lines[4] = lines[4].replace(b'"v":1', b'"event":"gauge","v":1')
    bench.put(f"{stem}.jsonl", lines)
    other, twice = even.segment(2)
    twice[1] = twice[1].rstrip().rstrip(b"}") + b',"event":"gauge"}\n'
    bench.put(f"{other}.jsonl", twice)
    # Without log.close nothing else tells how many lines there were.
    crashed, last = Writer("last").segment(1)
    last[1] = last[1].rstrip().rstrip(b"}") + b',"event":"gauge"}\n'
    bench.put(f"{crashed}.jsonl", last[:-1])
    tables = bench.run()
    found: dict[str, list[str]] = {stem: [], other: [], crashed: []}
    for row in sorted(tables["events"], key=lambda row: row["seq"]):
        found[row["stem"]].append(row["event"])
    assert found[stem] == ["log.open", *["msg.ack"] * 5, "log.close"]
    assert found[other] == ["log.open", "gauge", "msg.ack", "log.close"]
    assert found[crashed] == ["log.open", "gauge"]
    assert not tables["quarantine"]


def test_what_the_quick_way_does_not_see(bench: IngestFixture) -> None:
    """Whole lines glued into one and arrays are found to be damaged, as log.close says how many lines there were."""
    stem, lines = Writer().segment(6)
    glued = lines[3].rstrip() + lines[4]
    bench.put(f"{stem}.jsonl", [*lines[:3], glued, b"[]\n", lines[6], b"\x1e" + lines[7]])
    tables = bench.run()
    assert sorted(row["seq"] for row in tables["events"]) == [1, 2, 3, 7, 8]
    assert sorted(row["cause"] for row in tables["quarantine"]) == ["glued", "not_json"]
    (row,) = tables["inputs"]
    assert (row["state"], row["lines"], row["lines_said"], row["remarks"]) == ("closed", 7, 8, "separators")


def test_what_the_quick_way_does_not_see_without_log_close(bench: IngestFixture) -> None:
    """Then the numbers tell: where one is missing, lines are looked at one by one."""
    stem, lines = Writer().segment(8)
    array = b"[" + lines[6].rstrip() + b"," + lines[7].rstrip() + b"]\n"
    bench.put(f"{stem}.jsonl", [*lines[:3], lines[3].rstrip() + lines[4], lines[5], array, lines[8]])
    tables = bench.run()
    assert sorted(row["seq"] for row in tables["events"]) == [1, 2, 3, 6, 9]
    assert sorted(row["cause"] for row in tables["quarantine"]) == ["glued", "glued"]
    (row,) = tables["inputs"]
    assert (row["state"], row["lines"], row["lines_said"]) == ("crashed", 7, None)


def test_files_that_are_not_whole(bench: IngestFixture) -> None:
    """Half an archive is read as far as it goes, an empty or strange file not at all; the rest as if nothing was."""
    writer = Writer("half")
    half, lines = writer.segment(20_000)
    after, more = writer.segment(1)
    bench.put(f"{half}.jsonl.gz", gzip.compress(b"".join(lines))[:-60_000])
    bench.put(f"{after}.jsonl.gz", gzip.compress(b"".join(more)))
    others = {name: Writer(name).segment(1) for name in ("empty", "nothing", "text", "packed", "strange")}
    stems = {name: stem for name, (stem, _) in others.items()}
    bench.put(f"{stems['empty']}.jsonl", b"")
    bench.put(f"{stems['nothing']}.jsonl.gz", gzip.compress(b""))
    bench.put(f"{stems['text']}.jsonl.gz", others["text"][1])
    bench.put(f"{stems['packed']}.jsonl", gzip.compress(b"".join(others["packed"][1])))
    bench.put(f"{stems['strange']}.jsonl.xz", others["strange"][1])
    tables = bench.run()
    assert {row["stem"]: row["state"] for row in tables["inputs"]} == {
        half: "partial",
        after: "closed",
        stems["empty"]: "empty",
        stems["nothing"]: "crashed",
        stems["text"]: "unread",
        stems["packed"]: "unread",
        stems["strange"]: "unread",
    }
    read = [row["seq"] for row in tables["events"] if row["stem"] == half]
    assert 1000 < len(read) < len(lines) and sorted(read) == list(range(1, len(read) + 1))
    assert sum(row["stem"] == after for row in tables["events"]) == len(more)


def test_a_growing_file(bench: IngestFixture) -> None:
    """It is read as far as it went when it was found, but for a line that had no end; what it became is no matter."""
    writer = Writer()
    stem, lines = writer.segment(5)
    bench.put("node/events.jsonl", [*lines[:4], lines[4][:40]])
    other, more = Writer("two").segment(5)
    bench.put("two/events.jsonl", more[:3])
    segments = bench.segments()
    bench.put("node/events.jsonl", lines)
    bench.put("two/events.jsonl", [*more[:3], more[3][:10]])
    tables = bench.run(segments)
    assert {row["stem"]: (row["state"], row["lines"], row["unfinished"]) for row in tables["inputs"]} == {
        stem: ("active", 5, 1),
        other: ("active", 3, 0),
    }
    assert not tables["quarantine"]


def test_files_that_vanish(bench: IngestFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A segment that was packed meanwhile is read all the same; one that is gone is told."""
    writer = Writer()
    (packed, lines), (gone, more), (late, rest) = (writer.segment(n) for n in (2, 3, 4))
    for stem, content in ((packed, lines), (gone, more), (late, rest)):
        bench.put(f"{stem}.jsonl", content)
    segments = bench.segments()
    (bench.logs / f"{packed}.jsonl").rename(bench.logs / "x")
    bench.put(f"{packed}.jsonl.gz", gzip.compress(b"".join(lines)))
    (bench.logs / f"{gone}.jsonl").unlink()
    # The third goes after it was looked at and before it is read.
    read = FileSystem.read

    def last_look(files: FileSystem, url: str, limit: int | None = None, offset: int = 0) -> bytes:
        content = read(files, url, limit, offset)
        if late in url:
            bench.put(f"{late}.jsonl.gz", gzip.compress(b"".join(rest)))
            (bench.logs / f"{late}.jsonl").unlink(missing_ok=True)
        return content

    monkeypatch.setattr(FileSystem, "read", last_look)
    tables = bench.run(segments)
    assert {row["stem"]: (row["state"], row["packed"], row["lines"]) for row in tables["inputs"]} == {
        packed: ("closed", "gzip", len(lines)),
        gone: ("vanished", "plain", 0),
        late: ("closed", "gzip", len(rest)),
    }


def test_another_file_of_a_segment_that_vanishes(bench: IngestFixture) -> None:
    """It is read instead, wherever it is."""
    stem, lines = Writer().segment(3)
    bench.put(f"a/{stem}.jsonl", lines)
    bench.put(f"b/{stem}.jsonl.xz", b"whatever")
    bench.put(f"c/{stem}.jsonl", lines)
    segments = bench.segments()
    Path(segments[0].path.removeprefix("file:")).unlink()
    tables = bench.run(segments)
    (row,) = tables["inputs"]
    assert (row["state"], row["lines"], row["path"] != segments[0].path) == ("closed", len(lines), True)


def test_doubled_lines(bench: IngestFixture) -> None:
    """Every number of a start counts once: of a segment under two names and of a line written twice one is kept."""
    writer = Writer()
    stem, lines = writer.segment(100)
    bench.put(f"{stem}.jsonl", lines)
    bench.put(f"{stem}-2.jsonl", lines)
    other, more = Writer("two").segment(10)
    bench.put(f"{other}.jsonl", [*more[:5], more[4], *more[5:]])
    whole, rest = Writer("three").segment(70)
    bench.put(f"{whole}.jsonl", rest)
    tables = bench.run()
    numbers = Counter((row["node"], row["seq"]) for row in tables["events"])
    assert set(numbers.values()) == {1} and len(numbers) == len(lines) + len(more) + len(rest)
    assert {row["stem"]: row["doubled"] for row in tables["inputs"]} == {
        stem: 0,
        f"{stem}-2": len(lines),
        other: 1,
        whole: 0,
    }


def test_nothing_but_damage(bench: IngestFixture) -> None:
    """Without a single event there is no table of events, and no failure."""
    stem, _ = Writer().segment(1)
    bench.put(f"{stem}.jsonl", b"nothing\n")
    tables = bench.run()
    assert [row["cause"] for row in tables["quarantine"]] == ["not_json"] and not tables["events"]


def test_plans(bench: IngestFixture) -> None:
    """Nothing is done in Python, and who reads the events of a day looks into the partitions of that day only."""
    stem, lines = Writer().segment(1)
    bench.put(f"{stem}.jsonl", lines)
    paths = [segment.path for segment in bench.segments()]
    both = [read(bench.spark, paths) for read in (read_frequent_events, read_other_lines)]
    shaped = shape_rows(both[0].unionByName(both[1], allowMissingColumns=True), DAY.date())
    for frame in (shaped, make_quarantine_rows(shaped), summarize_blocks(shaped)):
        assert "Python" not in plan(frame) and "CartesianProduct" not in plan(frame)
    bench.run()
    assert "PartitionFilters: [isnotnull(dt" in plan(bench.frame("events").where("dt = DATE'2026-11-20'"))


def plan(frame: DataFrame) -> str:
    """The physical plan."""
    return str(frame._jdf.queryExecution().executedPlan().toString())
