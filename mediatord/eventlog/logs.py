"""
The event log: one JSON object a line, in rotated segments (analytics contract 4.2).

Lines are collected and go to the file once per reactor turn with one write(2), so that a crash loses at most one
turn; nothing here waits for the disk to be done. A full disk costs lines, which are counted, never an exception.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from twisted.application.service import Service
from twisted.internet.interfaces import IDelayedCall, IReactorTime
from twisted.logger import Logger

from mediatord.eventlog.events import EVENTS, LEVELS, SCHEMA_VERSION, Level, checked
from mediatord.eventlog.lines import line_head, log_line
from mediatord.eventlog.segments import Segments
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
    :param keep: closed segments; older ones are deleted.
    :param buffer: bytes that may wait for a full disk.
    """

    size: int = 67_108_864
    keep: int = 120
    buffer: int = 4_194_304


class Told(Protocol):
    """Who counts what becomes of the log, and what the log is about."""

    def totals(self) -> Mapping[str, int]:
        """Fields of the event `counters`."""

    def lost(self) -> None:
        """A line was not written."""

    def deleted(self, segments: int) -> None:
        """So many closed segments were the oldest of too many."""


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
        self._unreported = 0
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

    def rotate(self) -> None:
        """
        Close the segment and begin the next (full hour, size, SIGUSR1). Not while the disk is full.

        A signal arrives between any two instructions: call this from the reactor.
        """
        if not self.running:
            return
        if not self._sink.flush():
            self._retry_later()
            return
        closed = self._close_segment()
        self._open_segment()
        if closed is not None:
            self._prune()
            self._seal(closed)

    def use_epoch(self, epoch: int) -> None:
        """Tags are made with another key from now on: begin a segment."""
        self._origin = replace(self._origin, epoch=epoch)
        self._heads = _heads(self._origin)
        self.rotate()

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
            self._prefix = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)).encode()
        stamp = b"%b.%06dZ" % (self._prefix, (now - second) * 1e6)
        line = log_line(self._heads[event] % (stamp, self._seq), fields)
        if self._sink.add(line):
            self._segment.lines += 1
        else:
            self._lost()
            self._segment.dropped += 1
            self._unreported += 1

    def _lost(self) -> None:
        self.dropped += 1
        if self.told is not None:
            self.told.lost()

    def _give_up(self, lines: int) -> None:
        """The disk took no more of a segment that is closed now."""
        for _ in range(lines):
            self._lost()
        self._unreported += lines
        if lines:
            self._log.warn("{lines} lines of the event log were lost: the disk did not take them", lines=lines)

    def _prune(self) -> None:
        deleted = self._segments.prune(self._limits.keep)
        if deleted and self.told is not None:
            self.told.deleted(deleted)

    def _turn_ended(self) -> None:
        self._flush_call = None
        self._flush()

    def _flush(self) -> None:
        if not self._sink.flush():
            self._retry_later()
            return
        if self._unreported:
            lost, self._unreported = self._unreported, 0
            self._append("log.drop", {"dropped": lost, "reason": "disk"})
            self._sink.flush()
        if self._sink.size >= self._limits.size:
            self.rotate()

    def _retry_later(self) -> None:
        if self._flush_call is None:
            self._flush_call = self._clock.callLater(_RETRY_SECONDS, self._turn_ended)

    def _open_segment(self) -> None:
        """The first line waits in the buffer until the file can be opened."""
        self._segment = _Segment(self._segments.next_name(self._clock.seconds()), self._seq + 1)
        about = {"version": self._origin.version, "schema": SCHEMA_VERSION, "segment": self._segment.name}
        self._append("log.open", about)
        if not self._sink.flush():
            self._retry_later()

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
        if self._segment.lines > 1:
            self.rotate()


@dataclass(slots=True)
class _Segment:
    """What the last line of the open segment will say."""

    name: str
    seq_first: int
    lines: int = 0
    dropped: int = 0


def _heads(origin: Origin) -> dict[str, bytes]:
    return {
        name: line_head(name, event.level, node=origin.node, boot=origin.boot, epoch=origin.epoch)
        for name, event in EVENTS.items()
    }


def _is_written(name: str, level: Level, threshold: Level) -> bool:
    return name.startswith("log.") or LEVELS.index(level) >= LEVELS.index(threshold)
