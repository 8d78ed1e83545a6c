"""
The event log: one JSON object a line, in rotated segments (analytics contract 4.2).

Lines are collected and go to the file once per reactor turn with one write(2), so that a crash loses at most one
turn; nothing here waits for the disk to be done. A full disk costs lines, which are counted, never an exception.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from twisted.application.service import Service
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.eventlog.events import EVENTS, LEVELS, SCHEMA_VERSION, Level, checked
from mediatord.eventlog.lines import line_head, log_line
from mediatord.eventlog.read_marker import MarkerError, read_expected_marker
from mediatord.eventlog.segments import RetentionLimits, Segments
from mediatord.eventlog.sink import LineSink

_FLUSH_AT = 65_536
_RETRY_SECONDS = 1.0
_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Origin:
    """
    Who writes: the same on every line.

    :param epoch: of the key that tags are made with.
    :param boot: a random id of this start.
    """

    node: str
    version: str
    epoch: int
    boot: str = field(default_factory=lambda: secrets.token_hex(6))


@dataclass(frozen=True, slots=True)
class SegmentLimits:
    """
    :param size: bytes at which a segment is closed.
    :param retention: which closed segments are deleted.
    :param buffer: bytes that may wait for a full disk.
    """

    size: int = 67_108_864
    retention: RetentionLimits = RetentionLimits()
    buffer: int = 4_194_304


class Told(Protocol):
    """Who counts what becomes of the log, and what the log is about."""

    def totals(self) -> Mapping[str, int]:
        """Fields of the event `counters`."""

    def lost(self) -> None:
        """A line was not written."""

    def deleted(self, segments: int, unread: int) -> None:
        """So many closed segments were deleted, `unread` of them before the analysis had read them."""

    def directory_recreated(self) -> None:
        """The directory had been removed, and was made again."""


class EventFile(Service):
    """
    Writes events to `events.jsonl` while it runs; implements :class:`~mediatord.eventlog.events.EventLog`.

    :param level: events below it are not written, `log.*` excepted; nor, once that was above info, is `counters`.
    :param seal: given every closed segment, to flush it to disk or compress it; nothing by default.
    :ivar dropped: lines lost since the start.
    :ivar told: asked for what the event `counters` says at the end of each segment, and told of losses; None for
        nobody.
    """

    name = "log"
    _log = Logger()

    def __init__(
        self,
        directory: Path,
        clock: IReactorTime,
        origin: Origin,
        *,
        limits: SegmentLimits = SegmentLimits(),  # noqa: B008  frozen
        level: Level = "info",
        seal: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self._clock = clock
        self._directory = directory
        self._origin = origin
        self._limits = limits
        self._seal = seal
        self._segments = Segments(directory, origin.node, origin.boot)
        self._sink = LineSink(self._segments.active, limits.buffer)
        self._segment = _Segment("", 0)
        self._heads = _heads(origin)
        self._comparable = True
        self._write_from(level)
        self._second, self._prefix = -1, b""
        self._seq = 0
        self._unreported: Counter[str] = Counter()
        self._file_check_due = False
        self._marker_problem = ""
        self._flush_call: IDelayedCall | None = None
        self._hour_call: IDelayedCall | None = None
        self.dropped = 0
        self.told: Told | None = None

    def startService(self) -> None:
        """
        Begin a segment.

        :raise OSError: the directory cannot be made or written to.
        """
        now = self._clock.seconds()
        left = self._segments.prepare(now)
        self._prune()
        self._sink.open()
        Service.startService(self)
        self._open_segment()
        self._wait_for_hour()
        for path in left:
            if path.exists():
                self._seal(path)

    def stopService(self) -> None:
        """Close the segment and let it reach the disk. It is sealed at the next start."""
        for call in (self._flush_call, self._hour_call):
            if call is not None:
                call.cancel()
        self._flush_call = self._hour_call = None
        self._ensure_file()
        self._sink.flush()
        self._close_segment()
        Service.stopService(self)

    def emit(self, event: str, **fields: object) -> None:
        """
        Write an event; fields that are None are left out.

        :raise TypeError: an undeclared event or field, or a value of another type: a mistake in the program.
        """
        self.write(event, checked(event, fields))

    def write(self, event: str, fields: dict[str, object]) -> None:
        """Write an event whose fields were made as they have to be: :meth:`EventLog.write`."""
        if event not in self._written:
            return
        if not self.running:
            self._lost()
            return
        self._append(event, fields)
        if len(self._sink.pending) >= _FLUSH_AT and not self._sink.blocked:
            self._flush()
        elif self._flush_call is None:
            self._flush_call = self._clock.callLater(0, self._turn_ended)

    def flush(self) -> None:
        """As :meth:`EventLog.flush`."""
        if self._flush_call is not None and not self._sink.blocked:
            self._flush()

    @property
    def pending(self) -> int:
        """Bytes of lines that are not in the file yet."""
        return len(self._sink.pending)

    @property
    def segment_lines(self) -> int:
        """Lines of the present segment."""
        return self._segment.lines

    def rotate(self, incidental: int = 0) -> bool:
        """
        Close the segment and begin the next (full hour, size, SIGUSR1), unless nothing is in it.

        Not while the disk is full. A signal arrives between any two instructions: call this from the reactor.

        :param incidental: so many of its last lines are no reason to close it.
        :return: whether it was closed, and old segments were deleted.
        """
        self._segment.incidental += incidental
        has_lines = self._segment.lines - self._segment.incidental > 1
        return bool(self.running) and has_lines and self._begin_next()

    def _begin_next(self) -> bool:
        """Whether the segment was closed."""
        self._ensure_file()
        if not (self._sink.flush() or self._flush_again()):
            self._retry_later()
            return False
        closed = self._close_segment()
        self._open_segment()
        if closed is not None:
            self._prune()
            self._seal(closed)
        return closed is not None

    def use_epoch(self, epoch: int) -> None:
        """Tags are made with another key from now on: begin a segment."""
        self._origin = replace(self._origin, epoch=epoch)
        self._heads = _heads(self._origin)
        if self.running:
            self._begin_next()

    def limit(self, limits: SegmentLimits, level: Level) -> None:
        """Go on with other limits, but for the buffer, and with another level."""
        self._limits = limits
        self._write_from(level)

    def _write_from(self, level: Level) -> None:
        """Once lines were left out because of the level, the counters say more than those that are there."""
        self._written = {name for name, event in EVENTS.items() if _is_written(name, event.level, level)}
        self._comparable = self._comparable and "counters" in self._written
        if not self._comparable:
            self._written.discard("counters")

    def _append(self, event: str, fields: Mapping[str, object]) -> None:
        self._seq += 1
        now = self._clock.seconds()
        second = int(now)
        if second != self._second:
            self._second = second
            self._file_check_due = True
            self._prefix = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)).encode()
        stamp = b"%b.%06dZ" % (self._prefix, (now - second) * 1e6)
        line = log_line(self._heads[event] % (stamp, self._seq), fields)
        if self._sink.add(line):
            self._segment.lines += 1
        else:
            self._lost()
            self._segment.dropped += 1
            self._unreported["disk"] += 1

    def _lost(self) -> None:
        self.dropped += 1
        if self.told is not None:
            self.told.lost()

    def _give_up(self, lines: int) -> None:
        """The disk took no more of a segment that is closed now."""
        self._report_later(lines, "disk")
        if lines:
            self._log.warn("{lines} lines of the event log were lost: the disk did not take them", lines=lines)

    def _report_later(self, lines: int, reason: str) -> None:
        """Count lines that are lost; a line of the log says so as soon as one can be written."""
        for _ in range(lines):
            self._lost()
        if lines:
            self._unreported[reason] += lines

    def _prune(self) -> None:
        try:
            deleted = self._segments.prune(self._limits.retention, self._clock.seconds(), self._read_segments())
        except OSError as error:
            self._log.warn("old log segments could not be deleted: {reason}", reason=error.strerror)
            return
        if deleted.unread:
            self._log.error(
                "{segments} log segments were deleted before the analysis had read them: all were larger than "
                "log.retention.unread_bytes",
                segments=deleted.unread,
            )
        if deleted.segments and self.told is not None:
            self.told.deleted(deleted.segments, deleted.unread)

    def _read_segments(self) -> frozenset[str] | None:
        """None if there is no analysis. What it cannot say, it has not read."""
        problem = ""
        read: frozenset[str] | None = frozenset()
        try:
            read = read_expected_marker(self._directory)
        except MarkerError as error:
            problem = str(error)
        if problem != self._marker_problem:
            self._marker_problem = problem
            if problem:
                self._log.warn("log segments are kept as if unread: {problem}", problem=problem)
        return read

    def _ensure_file(self) -> None:
        """Go on in a new file, in a new directory if need be, where the one that is written to is no longer there."""
        self._file_check_due = False
        state = self._sink.find_file()
        if state in ("closed", "in_place"):
            return
        self._log.warn("{path} was {state} while it was written to", path=str(self._segments.active), state=state)
        self._make_directory()
        try:
            self._segments.set_aside(self._clock.seconds())
        except OSError as error:
            self._log.warn("{path} is in the way: {reason}", path=str(self._segments.active), reason=error.strerror)
            return
        written = self._segment.lines - self._sink.pending.count(b"\n")
        self._segment = _Segment(self._segments.next_name(self._clock.seconds()), self._seq + 1)
        torn = self._sink.leave_file(self._first_line())
        self._segment.lines = self._sink.pending.count(b"\n")
        self._segment.seq_first = _lowest_seq(self._sink.pending)
        self._report_later(torn + (written if state == "removed" else 0), "removed")

    def _flush_again(self) -> bool:
        """After a failure: whether all went once there was a directory again."""
        return not self._sink.is_open and self._make_directory() and self._sink.flush()

    def _make_directory(self) -> bool:
        """Whether it was missing, and is there now."""
        try:
            made = self._segments.ensure_directory()
        except OSError:
            return False
        if made:
            self._log.warn("the log directory {path} had been removed and was made again", path=str(self._directory))
            if self.told is not None:
                self.told.directory_recreated()
        return made

    def _turn_ended(self) -> None:
        self._flush_call = None
        self._flush()

    def _flush(self) -> None:
        if self._file_check_due:
            self._ensure_file()
        if not (self._sink.flush() or self._flush_again()):
            self._retry_later()
            return
        if self._unreported:
            lost, self._unreported = self._unreported, Counter()
            for reason, lines in lost.items():
                self._append("log.drop", {"dropped": lines, "reason": reason})
            self._sink.flush()
        if self._sink.size >= self._limits.size:
            self.rotate()

    def _retry_later(self) -> None:
        self._file_check_due = True
        if self._flush_call is None:
            self._flush_call = self._clock.callLater(_RETRY_SECONDS, self._turn_ended)

    def _open_segment(self) -> None:
        """The first line waits in the buffer until the file can be opened."""
        self._segment = _Segment(self._segments.next_name(self._clock.seconds()), self._seq + 1)
        self._append("log.open", self._opening())
        if not (self._sink.flush() or self._flush_again()):
            self._retry_later()

    def _first_line(self) -> bytes:
        """The first line of the segment, which is to stand before lines that wait already."""
        self._seq += 1
        now = self._clock.seconds()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(int(now))).encode()
        head = self._heads["log.open"] % (b"%b.%06dZ" % (stamp, (now - int(now)) * 1e6), self._seq)
        return log_line(head, self._opening())

    def _opening(self) -> dict[str, object]:
        """Fields of the first line of the segment."""
        return {"version": self._origin.version, "schema": SCHEMA_VERSION, "segment": self._segment.name}

    def _close_segment(self) -> Path | None:
        """
        The closed file; None when it could not be given its name: then it grows on, if it is there at all.

        The last line is missing if the disk is full just now: readers take that for a crash.
        """
        segment = self._segment
        if self.told is not None and "counters" in self._written:
            self._append("counters", self.told.totals())
        last = {"seq_first": segment.seq_first, "seq_last": self._seq + 1, "lines": segment.lines + 1}
        self._append("log.close", {**last, "dropped": segment.dropped})
        self._sink.flush()
        self._give_up(self._sink.close())
        try:
            return self._segments.close(segment.name)
        except OSError as error:
            self._log.warn(
                "log segment {name} could not be closed: {reason}", name=segment.name, reason=error.strerror
            )
            return None

    def _wait_for_hour(self) -> None:
        now = self._clock.seconds()
        self._hour_call = self._clock.callLater(_HOUR - now % _HOUR, self._hour_struck)

    def _hour_struck(self) -> None:
        self._wait_for_hour()
        if not self.rotate():
            self._prune()


@dataclass(slots=True)
class _Segment:
    """What the last line of the open segment will say."""

    name: str
    seq_first: int
    lines: int = 0
    dropped: int = 0
    incidental: int = 0


def _heads(origin: Origin) -> dict[str, bytes]:
    return {
        name: line_head(name, event.level, node=origin.node, boot=origin.boot, epoch=origin.epoch)
        for name, event in EVENTS.items()
    }


def _lowest_seq(lines: bytearray) -> int:
    """The lowest number of these lines."""
    return min(int(json.loads(line)["seq"]) for line in lines.splitlines())


def _is_written(name: str, level: Level, threshold: Level) -> bool:
    return name.startswith("log.") or LEVELS.index(level) >= LEVELS.index(threshold)
