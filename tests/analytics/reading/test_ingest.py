"""Ingest: every line of a segment becomes an event or is counted as damaged, incomplete or duplicate."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from analytics.database import Row
from analytics.engine import AnalysisSession
from analytics.job import Span
from analytics.reading import ingest as ingest_module
from analytics.reading.ingest import can_workers_read, count_processes, ingest_segments
from analytics.reading.segments import Segment, discover_segments
from analytics.run_plan import load_read_segments, make_plan, stage_input
from analytics.writing.warehouse import Warehouse
from tests.analytics.lines import DAY, SegmentWriter, write_file

Tables = dict[str, list[dict[str, Any]]]


class IngestFixture:
    """A directory of logs, and the staged results of its ingest."""

    def __init__(self, session: AnalysisSession, root: Path) -> None:
        self.session, self.logs, self.root = session, root / "logs", root
        self.logs.mkdir()

    @property
    def staging(self) -> Path:
        return self.root / "_staging" / "run"

    def put(self, name: str, lines: list[bytes] | bytes) -> None:
        """Write a file of logs."""
        write_file(self.logs, name, lines)

    def discover(self) -> list[Segment]:
        """The segments in the directory."""
        return discover_segments(self.session.files, [str(self.logs)]).segments

    def run(self, discover: list[Segment] | None = None) -> Tables:
        """Ingest segments. Asserts that every line is accounted for. :return: rows of all tables."""
        warehouse, read = self._stage(discover or self.discover())
        tables = read_tables(warehouse)
        assert tables["inputs"] == sorted(read, key=lambda row: (row["dt"], row["stem"]))
        assert {path.name for path in self.staging.iterdir()} <= {"events", "quarantine", "inputs"}
        assert {path.suffix for path in self.staging.rglob("*") if path.is_file()} == {".parquet"}
        return tables

    def publish(self) -> list[Row]:
        """Ingest what has changed, and publish it. :return: rows of `inputs`, without paths."""
        warehouse, _ = self._stage(self.discover())
        warehouse.publish(str(self.root / "runs" / "run.json"), b"{}", [])
        return [{**row, "path": ""} for row in read_tables(warehouse)["inputs"]]

    def _stage(self, segments: Sequence[Segment]) -> tuple[Warehouse, Sequence[Row]]:
        warehouse = Warehouse(self.session.database, self.session.files, str(self.root), "run")
        before = load_read_segments(warehouse, {segment.batch for segment in segments})
        plan = make_plan(WINDOW, 0, segments, before)
        staged = stage_input(
            warehouse,
            self.session.database,
            plan,
            before,
            lambda changed: ingest_segments(self.session, changed, warehouse.staging),
        )
        return warehouse, staged.read


def read_tables(warehouse: Warehouse) -> Tables:
    """All rows. Asserts that every line is accounted for."""
    tables = {name: warehouse.rows(name, WINDOW) for name in ("events", "quarantine", "inputs")}
    check_balance(tables)
    return tables


WINDOW = Span(DAY.date() - timedelta(30), DAY.date() + timedelta(30))


def check_balance(tables: Tables) -> None:
    """Every line is an event, in quarantine, unfinished, or a duplicate."""
    for row in tables["inputs"]:
        events_of_segment = sum(event["stem"] == row["stem"] for event in tables["events"])
        found = events_of_segment + row["corrupt"] + row["unfinished"] + row["doubled"]
        assert found == row["lines"], row["stem"]
        assert sum(line["stem"] == row["stem"] for line in tables["quarantine"]) == row["corrupt"]


@pytest.fixture
def ingest(session: AnalysisSession, tmp_path: Path) -> IngestFixture:
    return IngestFixture(session, tmp_path)


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
        "ts": datetime(2026, 11, 20, 23, 59, 59, tzinfo=UTC).replace(tzinfo=None),
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
    ("type", make_line(depth="12")),
    ("type", make_line(depth=3.5)),
    ("type", make_line(depth=3.0)),
    ("type", make_line(depth=True)),
    ("type", make_line(seq=2**63)),
    ("type", make_line(v=2**31)),
    ("type", make_line(boot=5)),
    ("type", make_line(event="msg.push", ok="true")),
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
    With and without record separators. Blank lines are ignored; unknown events, versions and fields are accepted; a
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
            ("gauge", 1, 903, "2026-11-20", None),
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
    counts = [(row["corrupt"], row["lines"]) for row in tables["inputs"]]
    assert counts == [(len(DAMAGED), 1 + len(DAMAGED) + len(ACCEPTED))] * 2


def test_quarantines_damaged_lines_of_frequent_events(ingest: IngestFixture) -> None:
    """They have the same causes; fields that the event does not have are ignored."""
    gapless = SegmentWriter()
    gapless.seq = 47
    stem, lines = gapless.segment(1)
    frequent = [
        (cause, line.replace(b"gauge", b"msg.ack").replace(b"lag_ms", b"latency_ms")) for cause, line in DAMAGED
    ]
    damaged = [(cause, line) for cause, line in frequent if b"depth" not in line]
    valid = [make_line(event="msg.ack", seq=50, depth="12"), make_line(event="msg.push", seq=51, latency_ms=2)]
    ingest.put(f"{stem}.jsonl", [*lines[:2], *(line for _, line in damaged), *valid])
    tables = ingest.run()
    assert Counter(row["cause"] for row in tables["quarantine"]) == Counter(cause for cause, _ in damaged)
    events = sorted((row["seq"], row["event"], row["latency_ms"], row["depth"]) for row in tables["events"])
    assert events[2:] == [(50, "msg.ack", None, None), (51, "msg.push", 2.0, None)]


def test_reads_event_names_as_json(ingest: IngestFixture) -> None:
    """However they are written; the last of two counts."""
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
    tables = ingest.run()
    found: dict[str, list[str]] = {stem: [], other: []}
    for row in sorted(tables["events"], key=lambda row: row["seq"]):
        found[row["stem"]].append(row["event"])
    assert found[stem] == ["log.open", *["msg.ack"] * 5, "log.close"]
    assert found[other] == ["log.open", "gauge", "msg.ack", "log.close"]
    assert not tables["quarantine"]


def test_detects_glued_lines(ingest: IngestFixture) -> None:
    """Two objects or an array on a line."""
    stem, lines = SegmentWriter().segment(6)
    glued = lines[3].rstrip() + lines[4]
    ingest.put(f"{stem}.jsonl", [*lines[:3], glued, b"[]\n", lines[6], b"\x1e" + lines[7]])
    tables = ingest.run()
    assert sorted(row["seq"] for row in tables["events"]) == [1, 2, 3, 7, 8]
    assert sorted(row["cause"] for row in tables["quarantine"]) == ["glued", "not_json"]
    (row,) = tables["inputs"]
    assert (row["state"], row["lines"], row["lines_said"], row["remarks"]) == ("closed", 7, 8, "separators")


def test_detects_glued_lines_in_crashed_segment(ingest: IngestFixture) -> None:
    """Whatever log.close would say."""
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


def test_reads_compressed_replacement_of_vanished_file(ingest: IngestFixture) -> None:
    """A segment compressed meanwhile is read; a deleted one is reported as vanished."""
    writer = SegmentWriter()
    (packed_stem, lines), (deleted, more) = (writer.segment(n) for n in (2, 3))
    for stem, content in ((packed_stem, lines), (deleted, more)):
        ingest.put(f"{stem}.jsonl", content)
    discover = ingest.discover()
    ingest.put(f"{packed_stem}.jsonl.gz", gzip.compress(b"".join(lines)))
    for stem in (packed_stem, deleted):
        (ingest.logs / f"{stem}.jsonl").unlink()
    tables = ingest.run(discover)
    assert {row["stem"]: (row["state"], row["packed"], row["lines"]) for row in tables["inputs"]} == {
        packed_stem: ("closed", "gzip", len(lines)),
        deleted: ("vanished", "plain", 0),
    }


def test_reads_active_segment_that_was_closed_meanwhile(ingest: IngestFixture) -> None:
    """Not the next one, which has its name."""
    writer = SegmentWriter()
    (stem, lines), (_, more) = writer.segment(3), writer.segment(9)
    ingest.put("events.jsonl", lines[:2])
    discover = ingest.discover()
    ingest.put(f"{stem}.jsonl", lines)
    ingest.put("events.jsonl", more[:4])
    tables = ingest.run(discover)
    (row,) = tables["inputs"]
    assert (row["stem"], row["state"], row["lines"]) == (stem, "closed", len(lines))


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


def read_staged(root: Path) -> dict[str, bytes]:
    """Contents of the staged files of events and damaged lines."""
    files = [path for name in ("events", "quarantine") for path in (root / name).rglob("*.parquet")]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


def write_varied_logs(ingest: IngestFixture) -> None:
    """Segments of two days, plain and compressed, with frequent and rare events, damage and duplicates."""
    writer = SegmentWriter(now=DAY + timedelta(hours=20))
    for number, count in enumerate((13_000, 4000, 300)):
        stem, lines = writer.segment(count)
        lines[150:150] = [b"damaged\n", make_line(seq=10**6), make_line(seq=10**6, event="new"), lines[100]]
        if number == 1:
            ingest.put(f"{stem}.jsonl.gz", gzip.compress(b"".join(lines)))
        else:
            ingest.put(f"{stem}.jsonl", lines)
        if number == 2:
            ingest.put(f"{stem}-2.jsonl", lines[:50])


@pytest.mark.parametrize(
    "limits",
    [
        {"CHUNK_BYTES": 30_000},
        {"CHUNK_BYTES": 1 << 17, "_COMPRESSED_PIECE_BYTES": 999},
        {"_SMALL_INPUT_BYTES": 0},
    ],
    ids=["lines", "pieces", "processes"],
)
def test_bytes_depend_on_lines_only(
    session: AnalysisSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, int]
) -> None:
    """Not on the size of chunks, on processes or on earlier runs."""
    if "CHUNK_BYTES" in limits:  # other processes have the default
        monkeypatch.setattr(ingest_module, "BLOCK_BYTES", 1 << 20)
    found: list[dict[str, bytes]] = []
    for changed in ({}, {}, limits):
        for name, value in changed.items():
            monkeypatch.setattr(ingest_module, name, value)
        root = tmp_path / str(len(found))
        root.mkdir()
        fixture = IngestFixture(session, root)
        write_varied_logs(fixture)
        assert [row["doubled"] for row in fixture.run()["inputs"]] == [2, 3, 2, 50]
        found.append(read_staged(fixture.staging))
    assert len(found[0]) == 8
    assert found[0] == found[1] == found[2]


def test_readers_skip_other_events(ingest: IngestFixture) -> None:
    """A frequent event has row groups of its own, with statistics of its name."""
    stem, lines = SegmentWriter().segment(12_000)
    ingest.put(f"{stem}.jsonl", lines)
    ingest.run()
    (path,) = ingest.staging.glob("events/**/*.parquet")
    metadata = pq.ParquetFile(path).metadata
    event = metadata.schema.names.index("event")
    statistics = [metadata.row_group(number).column(event).statistics for number in range(metadata.num_row_groups)]
    assert [(one.min, one.max) for one in statistics] == [("msg.ack", "msg.ack"), ("log.close", "log.open")]


def test_order_of_ingest_does_not_matter(session: AnalysisSession, tmp_path: Path) -> None:
    """A repeated line stays in the lowest segment, whichever was read first; files and counts are the same."""
    writer = SegmentWriter()
    segments = [writer.segment(50) for _ in range(3)]
    first, second, third = (stem for stem, _ in segments)
    content = {first: segments[0][1], second: [*segments[0][1][10:], *segments[1][1]], third: segments[1][1]}
    found = []
    for number, order in enumerate(
        ([[first, second, third]], [[third], [first], [second]], [[second, third], [first]])
    ):
        (tmp_path / str(number)).mkdir()
        fixture = IngestFixture(session, tmp_path / str(number))
        for stems in order:
            for stem in stems:
                ingest_path = fixture.logs / f"{stem}.jsonl"
                ingest_path.write_bytes(b"".join(content[stem]))
                os.utime(ingest_path, (0, 0))
            rows = fixture.publish()
        found.append((rows, read_staged(fixture.root / "tables")))
    assert [row["doubled"] for row in found[0][0]] == [0, 42, 52]
    assert len(found[0][1]) == 2
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("processors", "mebibytes", "expected"), [(2, 24_000, 2), (32, 4096, 10), (32, 64_000, 32), (2, 300, 1)]
)
def test_processes_take_at_most_half_of_the_memory(processors: int, mebibytes: int, expected: int) -> None:
    """Many processors do not need more memory than there is; one process always reads."""
    assert count_processes(processors, mebibytes << 20) == expected


@pytest.mark.parametrize(
    ("master", "out", "segment", "expected"),
    [
        ("spark://host:7077", "/out", "file:/logs/a.jsonl", True),
        ("spark://host:7077", "s3a://bucket/out", "file:/logs/a.jsonl", False),
        ("spark://host:7077", "/out", "hdfs://host/logs/a.jsonl", False),
        ("local[2]", "/out", "file:/logs/a.jsonl", False),
    ],
)
def test_workers_read_mounted_directories_only(master: str, out: str, segment: str, expected: bool) -> None:
    """If logs or results are elsewhere, the driver reads copies: workers cannot open its scratch directory."""
    assert can_workers_read(master, [out, segment]) is expected
