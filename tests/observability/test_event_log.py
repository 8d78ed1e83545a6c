"""The event log: lines, segments, and behaviour on a full disk (analytics contract 4.2)."""

from __future__ import annotations

import gzip
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from twisted.internet.error import ProcessDone, ProcessTerminated
from twisted.internet.interfaces import IReactorProcess
from twisted.internet.task import Clock
from twisted.logger import capturedLogs, formatEvent
from twisted.python.failure import Failure
from twisted.trial.unittest import SynchronousTestCase
from zope.interface import implementer

from mediatord.observability import segments as seal_program
from mediatord.observability.event_log import EventLogWriter, LogOrigin, SegmentSealer
from mediatord.observability.event_schema import ENVELOPE, EVENTS, MAX_LINE_BYTES, encode_line, encode_line_head
from mediatord.observability.metrics import Metrics
from mediatord.observability.segments import (
    MARKER_DIRECTORY,
    MARKER_SEEN_FILE,
    SegmentDirectory,
    SegmentLimits,
    make_read_marker_path,
    save_read_marker,
    seal_segment,
)

NOON = 1_800_014_400.0  # 2027-01-15T12:00:00Z
ORIGIN = LogOrigin(node="n1", version="0.1.0", epoch=2, boot="b00t")


def scratch_directory(test: SynchronousTestCase) -> Path:
    """A directory that is removed when the test ends."""
    directory = tempfile.TemporaryDirectory()
    test.addCleanup(directory.cleanup)
    return Path(directory.name)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a segment, which must end with a line feed."""
    text = path.read_bytes()
    assert text.endswith(b"\n")
    return [json.loads(line) for line in text.splitlines()]


def limits_of(**retention: Any) -> SegmentLimits:
    """Retention limits; by default only the newest segment is kept."""
    return SegmentLimits(**{"keep": 1, **retention})


def make_metrics() -> Metrics:
    """Metrics of a daemon."""
    return Metrics(CollectorRegistry(), version="0.1.0")


class EventFileTests(SynchronousTestCase):
    """An event log with a manual clock."""

    def setUp(self) -> None:
        self.directory = scratch_directory(self) / "log"
        self.active = self.directory / "events.jsonl"
        self.clock = Clock()
        self.clock.advance(NOON)
        self.sealed: list[Path] = []
        self.log = self.make()
        self.log.startService()
        self.addCleanup(self.stop)

    def make(self, **options: Any) -> EventLogWriter:
        return EventLogWriter(self.directory, self.clock, ORIGIN, seal=self.sealed.append, **options)

    def restart(self, **options: Any) -> None:
        """Replace the log by another one with these options."""
        self.log.stopService()
        self.log = self.make(**options)
        self.log.startService()

    def stop(self) -> None:
        if self.log.running:
            self.log.stopService()
        self.assertEqual(self.clock.getDelayedCalls(), [])

    def closed(self) -> list[Path]:
        return sorted(self.directory.glob("events-*"))

    def end_iteration(self) -> None:
        """End the reactor iteration."""
        self.clock.advance(0)

    def rotate(self) -> None:
        """Write an event and close the segment."""
        self.log.emit("proc.start")
        self.log.rotate()

    def test_envelope(self) -> None:
        """Every line has the fields of the envelope, then those of its event."""
        self.log.emit("msg.ack", msg="m1", rcpt="did:x:y", path="live", latency_ms=1.5)
        self.end_iteration()
        first, second = lines_of(self.active)
        self.assertEqual(
            second,
            {
                "v": 1,
                "ts": "2027-01-15T12:00:00.000000Z",
                "seq": 2,
                "node": "n1",
                "boot": "b00t",
                "event": "msg.ack",
                "level": "info",
                "epoch": 2,
                "msg": "m1",
                "rcpt": "did:x:y",
                "path": "live",
                "latency_ms": 1.5,
            },
        )
        self.assertLessEqual(set(ENVELOPE), set(first))

    def test_line_format(self) -> None:
        """No record separator, no blank lines, line feeds only between objects."""
        self.log.emit("msg.ack", msg="a\nb\u2028c\x85d")
        self.log.emit("proc.stop")
        self.end_iteration()
        raw = self.active.read_bytes()
        self.assertEqual(raw.count(b"\n"), 3)
        self.assertTrue(raw.isascii())
        self.assertEqual(lines_of(self.active)[1]["msg"], "a\nb\u2028c\x85d")

    def test_all_events_can_be_written(self) -> None:
        """Every declared event gives a line without nulls, at its level."""
        for event in EVENTS:
            self.log.emit(event, **dict.fromkeys(EVENTS[event].fields))
        self.end_iteration()
        written = lines_of(self.active)[1:]
        self.assertEqual([line["event"] for line in written], list(EVENTS))
        self.assertNotIn(None, [value for line in written for value in line.values()])
        self.assertEqual({line["level"] for line in written}, {"info", "warn"})

    def test_line_time(self) -> None:
        """A line has the time of its event, in microseconds, also within one iteration."""
        self.clock.rightNow = NOON + 0.25
        self.log.emit("proc.start")
        self.clock.rightNow = NOON + 61.999999
        self.log.emit("proc.start")
        self.end_iteration()
        times = [line["ts"] for line in lines_of(self.active)[1:]]
        self.assertEqual(times, ["2027-01-15T12:00:00.250000Z", "2027-01-15T12:01:01.999999Z"])

    def test_written_at_end_of_iteration(self) -> None:
        """Lines of one iteration are written together at its end."""
        for _ in range(3):
            self.log.emit("proc.start")
        self.assertEqual(len(lines_of(self.active)), 1)
        self.end_iteration()
        self.assertEqual(len(lines_of(self.active)), 4)

    def test_large_buffer_is_written_at_once(self) -> None:
        """64 KiB are written within an iteration."""
        for _ in range(1000):
            self.log.emit("msg.ack", msg="m" * 80)
        self.assertGreater(self.active.stat().st_size, 65_536)

    def test_undeclared_event(self) -> None:
        """Undeclared events and fields raise an error and write no line."""
        with self.assertRaises(TypeError):
            self.log.emit("msg.ack", payload="secret")
        self.end_iteration()
        self.assertEqual(len(lines_of(self.active)), 1)

    def test_level(self) -> None:
        """Events below the level are not written and use no number; those of the log itself are always written."""
        self.restart(level="warn")
        self.log.emit("msg.ack", msg="m1")
        self.log.emit("msg.evict", msg="m2")
        self.end_iteration()
        self.assertEqual(
            [(line["event"], line["seq"]) for line in lines_of(self.active)], [("log.open", 1), ("msg.evict", 2)]
        )

    def test_first_and_last_line(self) -> None:
        """A closed segment begins with log.open and its name, and ends with log.close and its counts."""
        self.log.emit("proc.start")
        self.log.rotate()
        (closed,) = self.closed()
        opened, _, last = lines_of(closed)
        self.assertEqual(closed.name, "events-20270115T120000Z-n1-b00t-000001.jsonl")
        self.assertEqual((opened["event"], opened["segment"] + ".jsonl"), ("log.open", closed.name))
        self.assertEqual((opened["version"], opened["schema"]), ("0.1.0", 1))
        self.assertEqual(last["event"], "log.close")
        self.assertEqual([last[name] for name in ("seq_first", "seq_last", "lines", "dropped")], [1, 3, 3, 0])
        self.assertEqual([line["seq"] for line in lines_of(self.active)], [4])

    def test_sequence_numbers(self) -> None:
        """Over all segments of a boot `seq` has no gap and no duplicate."""
        for _ in range(5):
            self.log.emit("proc.start")
            self.log.rotate()
        self.log.stopService()
        numbers = [line["seq"] for path in self.closed() for line in lines_of(path)]
        self.assertEqual(numbers, list(range(1, len(numbers) + 1)))
        self.assertFalse(self.active.exists())

    def test_rotation_by_size(self) -> None:
        """A segment that has reached its size is closed and passed to the sealer."""
        self.restart(limits=SegmentLimits(size=2000))
        self.sealed.clear()
        for _ in range(20):
            self.log.emit("msg.ack", msg="m" * 80)
            self.end_iteration()
        self.assertGreater(len(self.sealed), 1)
        self.assertTrue(all(path.stat().st_size >= 2000 for path in self.sealed))

    def test_rotation_by_hour(self) -> None:
        """At every full hour UTC a segment with events is closed."""
        self.clock.rightNow = NOON + 1
        self.restart()
        before = len(self.closed())
        self.clock.advance(3598.9)
        self.log.emit("proc.start")
        self.end_iteration()
        self.assertEqual(len(self.closed()), before)
        self.clock.advance(0.2)
        self.assertEqual(len(self.closed()), before + 1)
        self.clock.advance(3600)
        self.assertEqual(len(self.closed()), before + 1)
        self.log.emit("proc.start")
        self.clock.advance(3600)
        self.assertEqual(len(self.closed()), before + 2)

    def test_rotation_within_iteration(self) -> None:
        """Whatever waits to be written, each segment has one first and one last line."""
        for before in range(250, 260):
            self.restart(limits=SegmentLimits(size=30_000))
            self.sealed.clear()
            for _ in range(before):
                self.log.emit("msg.ack", msg="m" * 80)
            self.log.rotate()
            self.end_iteration()
            for path in self.sealed:
                lines = [line["event"] for line in lines_of(path)]
                self.assertEqual((lines[0], lines[-1]), ("log.open", "log.close"), before)
                self.assertEqual((lines.count("log.open"), lines.count("log.close")), (1, 1), before)
            self.assertEqual(lines_of(self.active)[0]["event"], "log.open")

    def test_empty_segment_is_not_rotated(self) -> None:
        """A segment without events continues, however often a signal arrives."""
        for _ in range(3):
            self.log.rotate()
        self.assertEqual(self.closed(), [])
        self.rotate()
        self.log.rotate()
        self.assertEqual(len(self.closed()), 1)

    def test_clock_set_back(self) -> None:
        """Names stay unique, and the oldest segment is deleted first, whatever its name."""
        for _ in range(3):
            self.clock.rightNow -= 7200
            self.rotate()
        size = sum(path.stat().st_size for path in self.closed()[:2])
        # Space for two, and for one more digit in each line of the next.
        self.log.limit(limits_of(bytes=size + 100), "info")
        self.clock.rightNow -= 7200
        self.rotate()
        kept = [lines_of(path) for path in self.closed()]
        newest = max(lines[-1]["seq"] for lines in kept)
        self.assertEqual(newest + 1, lines_of(self.active)[0]["seq"])
        self.assertEqual(len(kept), 2)
        numbers = sorted(line["seq"] for lines in kept for line in lines)
        self.assertEqual(numbers, list(range(numbers[0], newest + 1)))

    def test_counters_line(self) -> None:
        """The last but one line of a segment has the counters, unless the level is above theirs."""
        metrics = make_metrics()
        self.log.metrics = metrics
        self.log.emit("msg.ack", msg="m")
        metrics.delivered.inc()
        self.log.rotate()
        (closed,) = self.closed()
        lines = lines_of(closed)
        self.assertEqual([line["event"] for line in lines], ["log.open", "msg.ack", "counters", "log.close"])
        self.assertEqual((lines[2]["delivered"], lines[3]["lines"], lines[3]["seq_last"]), (1, 4, 4))
        for level in ("warn", "info"):
            self.log.limit(SegmentLimits(), level)
            self.log.emit("msg.evict")
            self.log.rotate()
            self.assertEqual(
                [line["event"] for line in lines_of(self.closed()[-1])], ["log.open", "msg.evict", "log.close"]
            )

    def test_closed_segments_do_not_change(self) -> None:
        """A closed segment keeps its name and content while it exists."""
        self.rotate()
        (first,) = self.closed()
        content = first.read_bytes()
        for _ in range(4):
            self.rotate()
        self.assertEqual(first.read_bytes(), content)
        self.assertEqual(len({path.name for path in self.closed()}), 5)

    def test_segment_of_crashed_daemon(self) -> None:
        """An events.jsonl found at start gets its closed name and is never appended to."""
        self.log.stopService()
        earlier = LogOrigin(node="n1", version="0.1.0", epoch=2, boot="crashed")
        name = SegmentDirectory(self.directory, "n1", "crashed").next_name(NOON)
        head = encode_line_head("log.open", "info", node="n1", boot=earlier.boot, epoch=2) % (b"t", 1)
        torn = encode_line(head, {"segment": name}) + b'{"v":1,"ts":"20'
        self.active.write_bytes(torn)
        self.log = self.make()
        self.log.startService()
        self.assertEqual((self.directory / f"{name}.jsonl").read_bytes(), torn)
        self.assertEqual(lines_of(self.active)[0]["boot"], "b00t")
        self.assertIn(self.directory / f"{name}.jsonl", self.sealed)

    def test_foreign_file(self) -> None:
        """A file without a log.open line is named by its age, and replaces no other file."""
        self.log.stopService()
        for content in (b"", b"\0\0\0", b'{"segment": "../../etc/passwd"}\n', b'{"segment": 3}\n', b"[]\n"):
            self.active.write_bytes(content)
            os.utime(self.active, (NOON - 60, NOON - 60))
            SegmentDirectory(self.directory, "n1", "x").prepare(NOON)
        found = [path.name for path in self.closed() if "unknown" in path.name]
        stem = "events-20270115T115900Z-n1-unknown-000000"
        self.assertEqual(found, [f"{stem}-{number}.jsonl" for number in (2, 3, 4, 5)] + [f"{stem}.jsonl"])

    def test_interrupted_compression(self) -> None:
        """Remains of a killed compression are removed, and the segment is passed to the sealer again."""
        self.rotate()
        self.log.stopService()
        draft = self.closed()[0].with_name(self.closed()[0].name + ".gz.tmp")
        draft.write_bytes(b"half")
        self.sealed.clear()
        self.log = self.make()
        self.log.startService()
        self.assertFalse(draft.exists())
        self.assertEqual(len(self.sealed), 2)

    def test_unwritable_directory(self) -> None:
        """An unwritable directory is an error at start."""
        blocked = scratch_directory(self) / "file"
        blocked.write_text("a file")
        log = EventLogWriter(blocked / "log", self.clock, ORIGIN)
        with self.assertRaises(OSError):
            log.startService()
        self.assertFalse(log.running)

    def test_event_after_stop(self) -> None:
        """Events after the stop count as lost and raise no error."""
        self.log.stopService()
        self.log.emit("proc.start")
        self.assertEqual(self.log.dropped, 1)
        self.assertFalse(self.active.exists())

    def test_stop_writes_buffer(self) -> None:
        """Events of the last iteration are in the last segment."""
        self.log.emit("proc.stop")
        self.log.stopService()
        *_, last = written = lines_of(self.closed()[-1])
        self.assertEqual([line["event"] for line in written], ["log.open", "proc.stop", "log.close"])
        self.assertEqual((last["seq_last"], last["lines"]), (last["seq"], 3))

    def test_lone_surrogate(self) -> None:
        """A lone surrogate loses the character, not the line."""
        self.log.write("proc.start", {"version": "a\ud800b"})
        self.end_iteration()
        self.assertEqual(lines_of(self.active)[-1]["version"], "a?b")
        self.assertEqual(self.log.dropped, 0)

    def test_unencodable_event(self) -> None:
        """It counts as lost; others of the iteration are written."""
        self.log.emit("proc.start")
        self.log.write("gauge", {"depth": object()})
        self.log.emit("proc.stop")
        self.end_iteration()
        self.assertEqual([line["event"] for line in lines_of(self.active)], ["log.open", "proc.start", "proc.stop"])
        self.assertEqual(self.log.dropped, 1)
        self.assertEqual(len(self.flushLoggedErrors()), 1)


@contextmanager
def full_disk(room: int = 0) -> Iterator[None]:
    """
    Limit the size of files of this process.

    Python ignores the signal of this limit, so that write(2) fails or writes less.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


DAY = 86_400.0


class RetentionTests(SynchronousTestCase):
    """Deletion of closed segments."""

    def setUp(self) -> None:
        self.directory = scratch_directory(self) / "log"
        self.clock = Clock()
        self.clock.advance(NOON)
        self.metrics = make_metrics()

    def start(self, **retention: Any) -> None:
        """Start a log with these limits."""
        self.log = EventLogWriter(self.directory, self.clock, ORIGIN, limits=limits_of(**retention))
        self.log.metrics = self.metrics
        self.log.startService()
        self.addCleanup(self.log.stopService)

    def write(self, segments: int) -> None:
        """Close `segments` segments."""
        for _ in range(segments):
            self.log.emit("proc.start")
            self.log.rotate()

    def deleted(self) -> tuple[int, int]:
        """Numbers of deleted segments, and of unread ones among them."""
        return self.metrics.log_segments_deleted.get(), self.metrics.log_segments_deleted_unread.get()

    def closed(self) -> list[str]:
        """Names of closed segments, oldest first."""
        return sorted(path.name.partition(".")[0] for path in self.directory.glob("events-*"))

    def size(self, *names: str) -> int:
        """Bytes of these segments."""
        return sum(path.stat().st_size for name in names for path in self.directory.glob(f"{name}.jsonl*"))

    def test_many_rotations(self) -> None:
        """However many segments signals cause, none is deleted within the limits of age and bytes."""
        self.start()
        self.write(300)
        self.assertEqual((len(self.closed()), self.metrics.log_segments_deleted.get()), (300, 0))

    def test_by_age(self) -> None:
        """
        Without an analysis, old segments are deleted at the next full hour, compressed or not, except the newest.
        """
        self.start(age=2 * DAY, keep=2)
        self.write(4)
        for name in self.closed()[:2]:
            path = self.directory / f"{name}.jsonl"
            path.rename(path.with_name(path.name + ".gz"))
        names = self.closed()
        for path in self.directory.glob("events-*"):
            os.utime(path, (NOON, NOON))
        self.clock.advance(2 * DAY)
        self.assertEqual(self.closed(), names)
        self.clock.advance(3600)
        self.assertEqual(self.closed(), names[2:])
        self.assertEqual(self.deleted(), (2, 0))

    def test_age_counts_from_last_write(self) -> None:
        """The age of a segment counts from its last write."""
        self.start(age=2 * DAY)
        self.write(2)
        for path in self.directory.glob("events-*"):
            os.utime(path, (NOON + 10 * DAY, NOON + 10 * DAY))
        self.clock.advance(11 * DAY)
        self.assertEqual(len(self.closed()), 2)

    def test_by_bytes(self) -> None:
        """Without an analysis, the oldest segments are deleted until the rest fits."""
        self.start()
        self.write(5)
        names = self.closed()
        # Space for three, and for one more digit in each line of the next.
        self.log.limit(limits_of(bytes=self.size(*names[2:]) + 100), "info")
        self.write(1)
        self.assertEqual(self.closed()[:-1], names[3:])
        self.assertEqual(self.deleted(), (3, 0))

    def test_unread_segments_are_kept(self) -> None:
        """Unread segments stay whatever their age and size; read ones are deleted."""
        self.start(age=DAY, bytes=1, unread_bytes=1 << 30)
        save_read_marker(self.directory, [])
        self.write(4)
        names = self.closed()
        for path in self.directory.glob("events-*"):
            os.utime(path, (NOON, NOON))
        self.clock.advance(10 * DAY)
        self.assertEqual(self.closed(), names)
        save_read_marker(self.directory, [names[1], names[3], "events-20200101T000000Z-n1-gone-000001"])
        self.clock.advance(3600)
        self.assertEqual(self.closed(), [names[0], names[2]])
        self.assertEqual(self.deleted(), (2, 0))

    def test_too_many_unread_bytes(self) -> None:
        """
        Above the outer limit the oldest unread segments are deleted after all read ones; this is counted and logged.
        """
        self.start(bytes=1, unread_bytes=1 << 30)
        save_read_marker(self.directory, [])
        self.write(5)
        names = self.closed()
        save_read_marker(self.directory, names[3:4])
        self.log.limit(limits_of(bytes=1, unread_bytes=self.size(*names[1:3], names[4])), "info")
        with capturedLogs() as log_events:
            self.log._rotate_hourly()
        self.assertEqual(self.closed(), [names[1], names[2], names[4]])
        self.assertEqual(self.deleted(), (2, 1))
        self.assertEqual(
            [formatEvent(event) for event in log_events],
            [
                "deleted 1 log segments that the analysis had not read: the unread ones exceeded "
                "log.retention.unread_bytes"
            ],
        )

    def test_unreadable_marker(self) -> None:
        """With an invalid marker all segments count as unread, which is logged once."""
        self.start(bytes=1, unread_bytes=1 << 30)
        place = make_read_marker_path(self.directory)

        def pipe() -> None:
            os.mkfifo(place)

        def link() -> None:
            place.symlink_to("/etc/hostname")

        texts = ("", "[]", '{"version":1,"read":[1]}', '{"version":2,"read":[]}', "[" * 100_000, "\xe9")
        writes: list[Callable[[], object]] = [partial(place.write_text, text, encoding="latin-1") for text in texts]
        for number, put in enumerate((pipe, link, place.mkdir, *writes), 1):
            put()
            with capturedLogs() as log_events:
                self.write(2)
            self.assertEqual(len(self.closed()), 2 * number)
            self.assertLessEqual(len(log_events), 1)
            (place.rmdir if place.is_dir() and not place.is_symlink() else place.unlink)()

    def test_marker_removed(self) -> None:
        """After a marker has existed, its absence means that nothing was read, also after a restart."""
        self.start(bytes=1, unread_bytes=1 << 30)
        save_read_marker(self.directory, [])
        self.write(2)
        shutil.rmtree(make_read_marker_path(self.directory).parent)
        with capturedLogs() as log_events:
            self.write(2)
        self.assertEqual(len(log_events), 1)
        self.assertIn("missing, although", formatEvent(log_events[0]) or "")
        self.log.stopService()
        self.log.startService()
        self.write(1)
        self.assertEqual((len(self.closed()), self.metrics.log_segments_deleted.get()), (6, 0))
        save_read_marker(self.directory, self.closed())
        self.log._rotate_hourly()
        self.assertEqual((self.closed(), self.metrics.log_segments_deleted_unread.get()), ([], 0))

    def test_analysis_removed(self) -> None:
        """Without the marker and the file that remembers it, only age and bytes count."""
        self.start(bytes=1)
        save_read_marker(self.directory, [])
        self.write(2)
        make_read_marker_path(self.directory).unlink()
        (self.directory / MARKER_SEEN_FILE).unlink()
        self.log._rotate_hourly()
        self.assertEqual((self.closed(), self.metrics.log_segments_deleted.get()), ([], 2))

    def test_hour_without_events(self) -> None:
        """It closes no segment, and old ones are deleted nevertheless."""
        self.start()
        self.write(2)
        self.log.limit(limits_of(bytes=1), "info")
        self.log.emit("proc.reload")
        self.log.rotate(ignored_lines=1)
        self.clock.advance(3600)
        self.assertEqual((self.closed(), self.metrics.log_segments_deleted.get()), ([], 2))

    def test_marker_directory_permissions(self) -> None:
        """The daemon's group may write into the marker's directory, and nowhere else; it may read all."""
        self.start()
        folder = self.directory / MARKER_DIRECTORY
        self.assertEqual(folder.stat().st_mode & 0o777, 0o770)
        self.assertEqual(self.directory.stat().st_mode & 0o027, 0)
        before = os.umask(0o077)
        self.addCleanup(os.umask, before)
        save_read_marker(self.directory, [])
        self.assertEqual(make_read_marker_path(self.directory).stat().st_mode & 0o777, 0o644)
        self.assertEqual(len(list(folder.iterdir())), 1)


class RemovedFileTests(SynchronousTestCase):
    """The open segment is removed or moved by others."""

    def setUp(self) -> None:
        self.directory = scratch_directory(self) / "var" / "log"
        self.active = self.directory / "events.jsonl"
        self.clock = Clock()
        self.clock.advance(NOON)
        self.metrics = make_metrics()
        self.log = EventLogWriter(self.directory, self.clock, ORIGIN)
        self.log.metrics = self.metrics
        self.log.startService()
        self.addCleanup(self.stop)

    def stop(self) -> None:
        if self.log.running:
            self.log.stopService()

    def emit(self, count: int = 1) -> None:
        """Emit events, one a second and iteration."""
        for _ in range(count):
            self.log.emit("proc.start")
            self.clock.advance(0)
            self.clock.rightNow += 1

    def test_removed_directory(self) -> None:
        """Directory and file are created again, and a line has the number of lost lines."""
        self.emit(3)
        shutil.rmtree(self.directory.parent)
        self.emit(2)
        lines = lines_of(self.active)
        self.assertEqual([line["event"] for line in lines], ["log.open", "proc.start", "log.drop", "proc.start"])
        self.assertEqual((lines[2]["dropped"], lines[2]["reason"]), (4, "removed"))
        self.assertEqual((self.metrics.log_directory_recreated.get(), self.metrics.log_dropped.get()), (1, 4))
        self.assertTrue((self.directory / MARKER_DIRECTORY).is_dir())
        self.log.stopService()
        (closed,) = self.directory.glob("events-*")
        self.assertEqual(lines_of(closed)[0]["segment"], closed.name.removesuffix(".jsonl"))
        numbers = sorted(line["seq"] for line in lines_of(closed))
        self.assertEqual(numbers, list(range(5, 5 + len(numbers))))
        self.assertEqual(lines_of(closed)[-1]["lines"], len(numbers))
        self.assertEqual(lines_of(closed)[-1]["seq_first"], 5)

    def test_removed_repeatedly(self) -> None:
        """Each time is counted, and events continue; rotation and stop work too."""
        for number in range(1, 4):
            shutil.rmtree(self.directory)
            self.emit()
            self.assertEqual(self.metrics.log_directory_recreated.get(), number)
            self.assertEqual(lines_of(self.active)[1]["event"], "proc.start")
        shutil.rmtree(self.directory)
        self.log.emit("proc.start")
        self.log.rotate()
        self.assertEqual(len(list(self.directory.glob("events-*"))), 1)
        shutil.rmtree(self.directory)
        self.log.stopService()
        (closed,) = self.directory.glob("events-*")
        self.assertEqual(lines_of(closed)[-1]["event"], "log.close")
        self.assertEqual(self.metrics.log_directory_recreated.get(), 5)

    def test_cannot_be_recreated(self) -> None:
        """Lines are buffered until it can, and none is lost."""
        shutil.rmtree(self.directory.parent)
        self.directory.parent.write_text("in the way")
        self.emit(3)
        self.directory.parent.unlink()
        self.clock.advance(1)
        self.assertEqual(
            [line["event"] for line in lines_of(self.active)], ["log.open", *["proc.start"] * 3, "log.drop"]
        )
        self.assertEqual((self.metrics.log_directory_recreated.get(), self.metrics.log_dropped.get()), (1, 1))

    def test_moved_file(self) -> None:
        """A moved file stays unchanged, and a file put in its place is not written to."""
        self.emit()
        aside = self.active.rename(self.directory.parent / "events.jsonl.1")
        self.active.write_text("not ours\n")
        self.emit()
        self.assertEqual([line["event"] for line in lines_of(aside)], ["log.open", "proc.start"])
        self.assertEqual([line["event"] for line in lines_of(self.active)], ["log.open", "proc.start"])
        self.assertEqual(self.metrics.log_dropped.get(), 0)
        (foreign,) = self.directory.glob("events-*")
        self.assertEqual(foreign.read_text(), "not ours\n")

    def test_removed_with_partial_line(self) -> None:
        """A partly written line is lost with the file; later lines are whole."""
        with full_disk(room=self.active.stat().st_size + 50):
            self.emit(3)
        shutil.rmtree(self.directory)
        self.clock.advance(1)
        self.assertEqual(
            [line["event"] for line in lines_of(self.active)], ["log.open", "proc.start", "proc.start", "log.drop"]
        )
        self.assertEqual(self.metrics.log_dropped.get(), 2)


class FullDiskTests(SynchronousTestCase):
    """A log with a buffer of 10 kB that cannot always write."""

    def setUp(self) -> None:
        self.directory = scratch_directory(self)
        self.active = self.directory / "events.jsonl"
        self.clock = Clock()
        self.clock.advance(NOON)
        self.log = EventLogWriter(self.directory, self.clock, ORIGIN, limits=SegmentLimits(buffer=10_000))
        self.log.startService()
        self.addCleanup(lambda: self.assertEqual(self.clock.getDelayedCalls(), []))

    def emit(self, count: int) -> None:
        """Emit events, one per iteration."""
        for _ in range(count):
            self.log.emit("msg.ack", msg="m" * 80)
            self.clock.advance(0)

    def test_lost_lines_are_counted(self) -> None:
        """Lines beyond the buffer are lost, newest first, and log.drop reports them once there is room."""
        self.log.metrics = metrics = make_metrics()
        with full_disk():
            self.emit(200)
            self.clock.advance(5)
        lost = self.log.dropped
        self.assertGreater(lost, 100)
        self.assertEqual(metrics.log_dropped.get(), lost)
        self.clock.advance(1)
        written = lines_of(self.active)
        self.assertEqual((written[-1]["event"], written[-1]["dropped"]), ("log.drop", lost))
        self.assertEqual([line["seq"] for line in written[:-1]], list(range(1, 202 - lost)))
        self.assertEqual(written[-1]["seq"], 202)
        self.log.stopService()
        (closed,) = self.directory.glob("events*")
        self.assertEqual(lines_of(closed)[-1]["dropped"], lost)

    def test_short_outage_loses_nothing(self) -> None:
        """Buffered lines are written later, in order, without a report."""
        with full_disk():
            self.emit(20)
        self.clock.advance(1)
        self.assertEqual([line["seq"] for line in lines_of(self.active)], list(range(1, 22)))
        self.log.stopService()

    def test_partial_line(self) -> None:
        """A partly written line is continued."""
        with full_disk(room=self.active.stat().st_size + 50):
            self.emit(3)
            self.assertFalse(self.active.read_bytes().endswith(b"\n"))
        self.clock.advance(1)
        self.assertEqual([line["seq"] for line in lines_of(self.active)], [1, 2, 3, 4])
        self.log.stopService()

    def test_no_rotation_while_full(self) -> None:
        """No segment is closed while lines wait for it."""
        with full_disk():
            self.emit(1)
            self.log.rotate()
        self.assertEqual(list(self.directory.glob("events*")), [self.active])
        self.clock.advance(1)
        self.assertEqual([line["event"] for line in lines_of(self.active)], ["log.open", "msg.ack"])
        self.log.stopService()

    def test_full_at_rotation(self) -> None:
        """
        Without room for the first line of a segment it is written once there is; the last line of the segment before
        is lost, counted and reported.
        """
        self.log.metrics = metrics = make_metrics()
        self.emit(1)
        with full_disk(), capturedLogs() as log_events:
            self.log.rotate()
            self.emit(1)
        self.clock.advance(1)
        written = lines_of(self.active)
        self.assertEqual([line["event"] for line in written], ["log.open", "msg.ack", "log.drop"])
        self.assertEqual((written[-1]["dropped"], self.log.dropped, metrics.log_dropped.get()), (2, 2, 2))
        self.assertEqual(
            [formatEvent(event) for event in log_events], ["lost 2 lines of the event log: writing failed"]
        )
        self.log.stopService()

    def test_stop_while_full(self) -> None:
        """Stopping does not wait for the disk; whole lines stay, and lost ones are counted and reported."""
        with full_disk(), capturedLogs() as log_events:
            self.emit(1)
            self.log.stopService()
        (closed,) = self.directory.glob("events*")
        self.assertEqual([line["event"] for line in lines_of(closed)], ["log.open"])
        self.assertEqual(self.log.dropped, 2)
        self.assertEqual(
            [formatEvent(event) for event in log_events], ["lost 2 lines of the event log: writing failed"]
        )


@pytest.mark.parametrize("text", ["m" * 10_000, "é" * 3000, "\x01" * 3000, "𝄞" * 3000, "\ud800" * 3000])
def test_long_lines(text: str) -> None:
    """A line has at most 4096 bytes and is JSON, whatever texts peers send."""
    head = encode_line_head("req.done", "info", node="n" * 63, boot="b00tb00tb00t", epoch=1) % (
        b"2027-01-15T12:00:00.000000Z",
        10**12,
    )
    fields = {name: text for name in ("req", "conn", "proto", "mtype", "code", "sender", "peer")}
    line = encode_line(head, {**fields, "size": 10**15})
    assert len(line) <= MAX_LINE_BYTES
    assert line.isascii()
    read = json.loads(line)
    assert set(fields) < set(read)
    assert read["size"] == 10**15
    read["mtype"].encode()


def test_percent_in_node_name() -> None:
    """A node name with a percent sign, which only code can pass, does not break lines."""
    assert (
        json.loads(encode_line(encode_line_head("gauge", "info", node="100%d", boot="b", epoch=1) % (b"t", 1), {}))[
            "node"
        ]
        == "100%d"
    )


@pytest.mark.parametrize("compress", [True, False])
def test_seal(tmp_path: Path, compress: bool) -> None:
    """A sealed segment is replaced by its compressed form, with the same permissions, or stays."""
    path = tmp_path / "events-1.jsonl"
    path.write_bytes(b"line\n" * 1000)
    path.chmod(0o640)
    seal_segment(path, compress)
    if compress:
        assert [file.name for file in tmp_path.iterdir()] == ["events-1.jsonl.gz"]
        packed = tmp_path / "events-1.jsonl.gz"
        assert gzip.decompress(packed.read_bytes()) == b"line\n" * 1000
        assert packed.stat().st_mode & 0o777 == 0o640
    else:
        assert path.read_bytes() == b"line\n" * 1000
    seal_segment(tmp_path / "gone.jsonl", compress)


@pytest.mark.system
def test_seal_as_program(tmp_path: Path) -> None:
    """The program that the daemon starts runs without mediatord on its path."""
    path = tmp_path / "events-1.jsonl"
    path.write_bytes(b"line\n")
    subprocess.run([sys.executable, "-I", seal_program.__file__, str(path), "--gzip"], check=True, env={})
    assert gzip.decompress((tmp_path / "events-1.jsonl.gz").read_bytes()) == b"line\n"


@implementer(IReactorProcess)
class RecordingReactor:
    """Records process starts without starting any."""

    def __init__(self) -> None:
        self.started: list[tuple[Any, list[str]]] = []

    def spawnProcess(self, processProtocol: Any, executable: Any, args: Any = (), *rest: Any, **options: Any) -> Any:  # noqa: N802, N803  Twisted's names
        """Record the process."""
        self.started.append((processProtocol, list(args)))


class SealerTests(SynchronousTestCase):
    """The sealer, without child processes."""

    def test_seals_one_at_a_time(self) -> None:
        """The next segment is sealed when the process before has ended, successfully or not; a failure is logged."""
        reactor = RecordingReactor()
        sealer = SegmentSealer(reactor)
        for name in "abc":
            sealer(Path(name))
        self.assertEqual([args[3:] for _, args in reactor.started], [["a", "--gzip"]])
        reactor.started[0][0].processEnded(Failure(ProcessDone(0)))
        self.assertEqual([args[3] for _, args in reactor.started], ["a", "b"])
        reactor.started[1][0].processEnded(Failure(ProcessTerminated(1)))
        self.assertEqual([args[3] for _, args in reactor.started], ["a", "b", "c"])

    def test_without_compression(self) -> None:
        """Without compression a segment is only flushed to disk."""
        reactor = RecordingReactor()
        SegmentSealer(reactor, compress=False)(Path("a"))
        self.assertEqual(reactor.started[0][1][3:], ["a"])
