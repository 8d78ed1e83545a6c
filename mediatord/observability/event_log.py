"""
The event log: one JSON object a line, in rotated segments (analytics contract 4.2).

The lines of a reactor iteration are written with one write(2), so that a crash loses at most one iteration. Nothing
here waits for the disk. A full disk loses lines, which are counted, and raises nothing. Closed segments are sealed by
a child process, one at a time (see :mod:`mediatord.observability.segments`).
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import orjson
from twisted.application.service import Service
from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.interfaces import IDelayedCall, IReactorProcess, IReactorTime
from twisted.internet.utils import getProcessValue
from twisted.logger import Logger

from mediatord.observability import segments
from mediatord.observability.event_schema import (
    EVENTS,
    LOG_LEVELS,
    MAX_LINE_BYTES,
    SCHEMA_VERSION,
    LogLevel,
    encode_line,
    encode_line_head,
    validate_fields,
)
from mediatord.observability.metrics import Metrics
from mediatord.observability.segments import (
    ReadMarkerError,
    SegmentDirectory,
    SegmentLimits,
    load_expected_read_marker,
)
from mediatord.runtime.failure_logging import redact_failure

_LINE_FEED_BYTE = 10

LogFileState = Literal["closed", "in_place", "moved", "removed"]


class BufferedLineFile:
    """
    A file that lines are appended to; a failed write raises nothing and is retried with the next one.

    :ivar pending: bytes not written yet: whole lines, except perhaps the first.
    :ivar capacity: bytes that may be pending.
    :ivar size: bytes in the file.
    :ivar blocked: whether the last attempt failed.
    :ivar torn: whether the file has the beginning of the first pending line.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        self._path = path
        self.capacity = capacity
        self._descriptor: int | None = None
        self.pending = bytearray()
        self.size = 0
        self.blocked = False
        self.torn = False

    def open(self) -> None:
        """:raise OSError: the file cannot be opened."""
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o640)
            self.size = os.fstat(self._descriptor).st_size

    @property
    def is_open(self) -> bool:
        """Whether the file is open."""
        return self._descriptor is not None

    def find_file(self) -> LogFileState:
        """Whether the open file is still the one at its path."""
        if self._descriptor is None:
            return "closed"
        status = os.fstat(self._descriptor)
        try:
            there = os.stat(self._path)
        except (FileNotFoundError, NotADirectoryError):
            return "moved" if status.st_nlink else "removed"
        except OSError:  # unknown
            return "in_place"
        if (there.st_dev, there.st_ino) == (status.st_dev, status.st_ino):
            return "in_place"
        return "moved" if status.st_nlink else "removed"

    def take_whole_lines(self) -> tuple[bytes, int]:
        """
        Close the file, to continue in a new one.

        :return: the whole lines not yet written, and how many were lost because a part is in the file: 0 or 1.
        """
        torn = self.torn
        if torn:
            del self.pending[: self.pending.find(b"\n") + 1]
        lines = bytes(self.pending)
        self.close()
        return lines, int(torn)

    def flush(self) -> bool:
        """Write what is pending; whether all of it was written."""
        try:
            if self._descriptor is None:
                self.open()
            while self.pending:
                written = os.write(self._descriptor, self.pending)  # type: ignore[arg-type]  # open() has set it
                if written < len(self.pending):
                    self.torn = self.pending[written - 1] != _LINE_FEED_BYTE
                del self.pending[:written]
                self.size += written
            self.blocked = self.torn = False
        except OSError:
            self.blocked = True
        return not self.blocked

    def close(self) -> int:
        """Close the file; how many lines were lost because they could not be written, a torn one included."""
        given_up = self.pending.count(b"\n")
        self.pending.clear()
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        self.size = 0
        self.torn = False
        return given_up


class SegmentSealer:
    """
    Seals closed segments one after the other. After a failure, which is logged, a segment stays as it is until the
    next start.

    :ivar compress: whether segments are compressed, or only flushed to disk.
    """

    _log = Logger()

    def __init__(self, reactor: IReactorProcess, compress: bool = True) -> None:
        self._reactor = reactor
        self.compress = compress
        self._lock = DeferredLock()

    def __call__(self, path: Path) -> None:
        """Seal a closed segment once those before it are done."""
        self._lock.run(lambda: Deferred.fromCoroutine(self._seal(path)))

    async def _seal(self, path: Path) -> None:
        # -I: the program's directory, which is this package, must not shadow the standard library.
        arguments = ["-I", segments.__file__, str(path), *(["--gzip"] if self.compress else [])]
        reactor: Any = self._reactor
        try:
            code = await getProcessValue(sys.executable, arguments, env={}, reactor=reactor)
            reason: object = f"exit code {code}"
        except Exception as error:  # a signal, or no process
            code, reason = -1, error
        if code:
            self._log.warn("cannot seal log segment {name}: {reason}", name=path.name, reason=reason)


# Lines that are kept within a reactor iteration before they are written.
_MAX_UNFLUSHED_LINES = 256
_RETRY_SECONDS = 1.0
_SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class LogOrigin:
    """
    Writer of the log: the same on every line.

    :param epoch: of the pseudonym key.
    :param boot: a random id of this start.
    """

    node: str
    version: str
    epoch: int
    boot: str = field(default_factory=lambda: secrets.token_hex(6))


class EventLogWriter(Service):
    """
    Writes events to `events.jsonl` while it runs; implements :class:`~mediatord.observability.event_schema.EventLog`.

    :param level: events below it are not written, `log.*` excepted; nor, once that was above info, is `counters`.
    :param seal: called with every closed segment, to flush it to disk or compress it.
    :ivar dropped: lines lost since the start.
    :ivar metrics: supply the event `counters` at the end of each segment, and count losses; or None.
    """

    name = "log"
    _log = Logger()

    def __init__(
        self,
        directory: Path,
        clock: IReactorTime,
        origin: LogOrigin,
        *,
        limits: SegmentLimits = SegmentLimits(),  # noqa: B008  frozen
        level: LogLevel = "info",
        seal: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self._clock = clock
        self._directory = directory
        self._origin = origin
        self._limits = limits
        self._seal = seal
        self._segments = SegmentDirectory(directory, origin.node, origin.boot)
        self._sink = BufferedLineFile(self._segments.active, limits.buffer)
        self._unflushed_lines = 0
        self._segment = _OpenSegment("", 0)
        self._heads = _encode_line_heads(origin)
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
        self.metrics: Metrics | None = None

    def startService(self) -> None:
        """
        Begin a segment.

        :raise OSError: the directory cannot be created or written to.
        """
        now = self._clock.seconds()
        left = self._segments.prepare(now)
        self._prune()
        self._sink.open()
        Service.startService(self)
        self._open_segment()
        self._schedule_rotation()
        for path in left:
            if path.exists():
                self._seal(path)

    def stopService(self) -> None:
        """Close the segment, which is sealed at the next start."""
        self._ensure_file()
        self._sink.flush()
        self._close_segment()
        for call in (self._flush_call, self._hour_call):
            if call is not None:
                call.cancel()
        self._flush_call = self._hour_call = None
        Service.stopService(self)

    def emit(self, event: str, **fields: object) -> None:
        """
        Write an event; fields that are None are left out.

        :raise TypeError: an undeclared event or field, or a value of another type: a mistake in the program.
        """
        self.write(event, validate_fields(event, fields))

    def write(self, event: str, fields: dict[str, object]) -> None:
        """Write an event with valid fields: :meth:`EventLog.write`."""
        if event not in self._written or not self.running:
            self._count_lost(int(event in self._written))
            return
        self._seq += 1
        now = self._clock.seconds()
        if int(now) != self._second:
            self._second = int(now)
            self._file_check_due = True
            self._prefix = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(self._second)).encode()
        stamp = b"%b.%06dZ" % (self._prefix, (now - self._second) * 1e6)
        head = self._heads[event] % (stamp, self._seq)
        try:
            # As encode_line does for nearly all lines; a call costs too much here.
            line = b"%b,%b" % (head, orjson.dumps(fields, option=orjson.OPT_APPEND_NEWLINE)[1:])
        except orjson.JSONEncodeError:
            line = b""
        if not (line and fields and len(line) <= MAX_LINE_BYTES and line.isascii()):
            line = self._encode_unusual(event, head, fields)
        if line and len(self._sink.pending) + len(line) <= self._sink.capacity:
            self._sink.pending += line
            self._segment.lines += 1
        else:
            self._count_lost(1, "disk" if line else "")
            self._segment.dropped += 1
        self._unflushed_lines += 1
        if self._unflushed_lines >= _MAX_UNFLUSHED_LINES:
            self.flush()
        if self._flush_call is None:
            self._flush_call = self._clock.callLater(0, self._end_iteration)

    def _encode_unusual(self, event: str, head: bytes, fields: dict[str, object]) -> bytes:
        """The line of an event; empty if it cannot be encoded."""
        try:
            return encode_line(head, fields)
        except Exception:
            self._log.failure("cannot encode {name} for the event log", redact_failure(), name=event)
            return b""

    def flush(self, is_retry: bool = False) -> None:
        """As :meth:`EventLog.flush`. :param is_retry: whether to try after a failure."""
        self._unflushed_lines = 0
        if self._sink.blocked and not is_retry:
            return
        if self._file_check_due:
            self._ensure_file()
        if not (self._sink.flush() or self._recover()):
            return
        if self._unreported:
            lost, self._unreported = self._unreported, Counter()
            for reason, lines in lost.items():
                self.write("log.drop", {"dropped": lines, "reason": reason})
            self._sink.flush()
        if self._sink.size >= self._limits.size:
            self.rotate()

    @property
    def pending(self) -> int:
        """Bytes of lines not yet written."""
        return len(self._sink.pending)

    @property
    def segment_lines(self) -> int:
        """Lines of the open segment."""
        return self._segment.lines

    def rotate(self, ignored_lines: int = 0) -> bool:
        """
        Close the segment and begin the next (full hour, size, SIGUSR1), unless it is empty or the disk is full.

        A signal arrives between any two instructions: call this from the reactor.

        :param ignored_lines: number of its last lines that do not count.
        :return: whether it was closed, and old segments were deleted.
        """
        self._segment.ignored_lines += ignored_lines
        has_lines = self._segment.lines - self._segment.ignored_lines > 1
        return bool(self.running) and has_lines and self._begin_next()

    def _begin_next(self) -> bool:
        """Whether the segment was closed."""
        self._ensure_file()
        if not (self._sink.flush() or self._recover()):
            return False
        closed = self._close_segment()
        self._open_segment()
        if closed is not None:
            self._prune()
            self._seal(closed)
        return closed is not None

    def set_key_epoch(self, epoch: int) -> None:
        """Begin a segment, as pseudonyms are made with another key from now on."""
        self._origin = replace(self._origin, epoch=epoch)
        self._heads = _encode_line_heads(self._origin)
        if self.running:
            self._begin_next()

    def limit(self, limits: SegmentLimits, level: LogLevel) -> None:
        """Change the limits, except the buffer, and the level."""
        self._limits = limits
        self._write_from(level)

    def _write_from(self, level: LogLevel) -> None:
        """Once lines were left out because of the level, counters no longer match the lines and are left out too."""
        lowest = LOG_LEVELS.index(level)
        self._written = {
            name
            for name, event in EVENTS.items()
            if name.startswith("log.") or LOG_LEVELS.index(event.level) >= lowest
        }
        self._comparable = self._comparable and "counters" in self._written
        if not self._comparable:
            self._written.discard("counters")

    def _count_lost(self, lines: int = 1, unreported_reason: str = "") -> None:
        """
        Count lost lines.

        :param unreported_reason: if given, the event `log.drop` reports them as soon as a line can be written.
        """
        self.dropped += lines
        if self.metrics is not None:
            self.metrics.log_dropped.inc(by=lines)
        if unreported_reason and lines:
            self._unreported[unreported_reason] += lines

    def _prune(self) -> None:
        try:
            deleted = self._segments.prune(self._limits, self._clock.seconds(), self._read_segments())
        except OSError as error:
            self._log.warn("cannot delete old log segments: {reason}", reason=error.strerror)
            return
        if deleted.unread:
            self._log.error(
                "deleted {segments} log segments that the analysis had not read: the unread ones exceeded "
                "log.retention.unread_bytes",
                segments=deleted.unread,
            )
        if self.metrics is not None:
            self.metrics.log_segments_deleted.inc(by=deleted.segments)
            self.metrics.log_segments_deleted_unread.inc(by=deleted.unread)

    def _read_segments(self) -> frozenset[str] | None:
        """Segments that the analysis has read, none if that is unknown; None if there is no analysis."""
        problem = ""
        read: frozenset[str] | None = frozenset()
        try:
            read = load_expected_read_marker(self._directory)
        except ReadMarkerError as error:
            problem = str(error)
        if problem != self._marker_problem:
            self._marker_problem = problem
            if problem:
                self._log.warn("treating all log segments as unread: {problem}", problem=problem)
        return read

    def _ensure_file(self) -> None:
        """Continue in a new file, if need be in a new directory, if the open one was moved or removed."""
        self._file_check_due = False
        state = self._sink.find_file()
        if state in ("closed", "in_place"):
            return
        self._log.warn("{path} was {state} while in use", path=str(self._segments.active), state=state)
        self._make_directory()
        try:
            self._segments.rename_stale_file(self._clock.seconds())
        except OSError as error:
            self._log.warn(
                "cannot move {path} aside: {reason}", path=str(self._segments.active), reason=error.strerror
            )
            return
        written = self._segment.lines - self._sink.pending.count(b"\n")
        lines, torn = self._sink.take_whole_lines()
        self._begin_segment()
        self._sink.pending += lines
        self._segment.lines = self._sink.pending.count(b"\n")
        self._segment.seq_first = min(json.loads(line)["seq"] for line in self._sink.pending.splitlines())
        self._count_lost(torn + (written if state == "removed" else 0), "removed")

    def _recover(self) -> bool:
        """After a failed write: write again if the directory was missing, else later; whether all was written."""
        if not self._sink.is_open and self._make_directory() and self._sink.flush():
            return True
        self._file_check_due = True
        if self._flush_call is None:
            self._flush_call = self._clock.callLater(_RETRY_SECONDS, self._end_iteration)
        return False

    def _make_directory(self) -> bool:
        """Create the directory; whether it was missing."""
        try:
            made = self._segments.ensure_directory()
        except OSError:
            return False
        if made:
            self._log.warn("recreated the log directory {path}, which had been removed", path=str(self._directory))
            if self.metrics is not None:
                self.metrics.log_directory_recreated.inc()
        return made

    def _end_iteration(self) -> None:
        self._flush_call = None
        if self._sink.pending or self._unreported or self._file_check_due:
            self.flush(is_retry=True)

    def _open_segment(self) -> None:
        """Begin a segment; its first line stays in the buffer until the file can be opened."""
        self._begin_segment()
        if not self._sink.flush():
            self._recover()

    def _begin_segment(self) -> None:
        self._segment = _OpenSegment(self._segments.next_name(self._clock.seconds()), self._seq + 1)
        # Its first and last lines must not lead to a flush, and perhaps to the next segment.
        self._unflushed_lines = 0
        fields = {"version": self._origin.version, "schema": SCHEMA_VERSION, "segment": self._segment.name}
        self.write("log.open", fields)

    def _close_segment(self) -> Path | None:
        """
        The closed file; None if it could not be renamed, and then it continues to grow.

        The last line is missing if the disk is full; readers treat that as a crash.
        """
        segment = self._segment
        self._unflushed_lines = 0
        if self.metrics is not None and "counters" in self._written:
            self.write("counters", dict[str, object](self.metrics.collect_totals()))
        last = {"seq_first": segment.seq_first, "seq_last": self._seq + 1, "lines": segment.lines + 1}
        self.write("log.close", {**last, "dropped": segment.dropped})
        self._sink.flush()
        if lost := self._sink.close():
            self._count_lost(lost, "disk")
            self._log.warn("lost {lines} lines of the event log: writing failed", lines=lost)
        try:
            return self._segments.close(segment.name)
        except OSError as error:
            self._log.warn("cannot close log segment {name}: {reason}", name=segment.name, reason=error.strerror)
            return None

    def _schedule_rotation(self) -> None:
        now = self._clock.seconds()
        self._hour_call = self._clock.callLater(_SECONDS_PER_HOUR - now % _SECONDS_PER_HOUR, self._rotate_hourly)

    def _rotate_hourly(self) -> None:
        self._schedule_rotation()
        if not self.rotate():
            self._prune()


@dataclass(slots=True)
class _OpenSegment:
    """Fields of the last line of the open segment."""

    name: str
    seq_first: int
    lines: int = 0
    dropped: int = 0
    ignored_lines: int = 0


def _encode_line_heads(origin: LogOrigin) -> dict[str, bytes]:
    return {
        name: encode_line_head(name, event.level, node=origin.node, boot=origin.boot, epoch=origin.epoch)
        for name, event in EVENTS.items()
    }
