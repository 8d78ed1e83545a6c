"""One process of a mediator as its log shows it, in the format of :mod:`mediatord.observability.event_log`."""

from __future__ import annotations

import gzip
import io
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from analytics.sample.counting import CONNECTIONS, ENTRIES, NAMES, counted
from analytics.sample.truth import Tally
from mediatord import __version__
from mediatord.observability.event_schema import (
    EVENTS,
    SCHEMA_VERSION,
    encode_line,
    encode_line_head,
    validate_fields,
)
from mediatord.observability.segments import ACTIVE_SEGMENT_FILE, SegmentDirectory

EPOCH = 1
_STEP = 2e-6


class Node:
    """
    Writes what happens to closed segments. It starts at once.

    :param directory: its own.
    :param clock: seconds since the epoch.
    :param rng: for the id of this start.
    :param tallies: told of every line that can be read.
    :param compress: whether segments are gzip.
    :ivar counters: what the daemon counts, also where no line says so.
    :ivar books: what became of messages by its doing, likewise; half and entry.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        clock: Callable[[], float],
        rng: Random,
        tallies: Sequence[Tally],
        *,
        compress: bool = True,
    ) -> None:
        self.name = name
        self.boot = f"{rng.getrandbits(48):012x}"
        self.counters = dict.fromkeys(NAMES, 0)
        self.books: Counter[tuple[object, str]] = Counter()
        self.requests = 0
        self._every, self._tallies = tallies, tallies
        self._late: Path | None = None
        self._directory = directory
        self._clock = clock
        self._compress = compress
        self._segments = SegmentDirectory(directory, name, self.boot)
        self._heads = {
            event: encode_line_head(event, about.level, node=name, boot=self.boot, epoch=EPOCH)
            for event, about in EVENTS.items()
        }
        self._second, self._prefix = -1, b""
        self._at = 0.0
        self._seq = 0
        self._lines: list[bytes] = []
        self._vanishing = self._refused = self._dropped = 0
        directory.mkdir(parents=True, exist_ok=True)
        self._open_segment()
        self.emit("proc.start", version=__version__)

    @property
    def sockets(self) -> int:
        """That are open."""
        return self.counters[CONNECTIONS]

    def emit(self, event: str, **fields: object) -> None:
        """
        It happened: count it, and write a line unless lines are being lost.

        :raise TypeError: as :meth:`mediatord.observability.event_schema.EventLog.emit`.
        """
        present = validate_fields(event, fields)
        for counter, step in counted(event, present):
            self.counters[counter] += step
        if event in ENTRIES:
            self.books[present["proto"], ENTRIES[event]] += 1
        if self._refused:
            self._seq += 1
            self._refused -= 1
            self._dropped += 1
            if not self._refused:
                self._append("log.drop", {"dropped": self._dropped, "reason": "disk"})
        else:
            self._append(event, present)

    def lose(self, lines: int) -> None:
        """So many lines to come never reach the disk, and nothing says so."""
        self._vanishing = lines

    def fill_disk(self, lines: int) -> None:
        """So many lines to come are dropped and counted, as for a full disk."""
        self._refused = lines

    def rotate(self, late: Path | None = None) -> None:
        """
        Close the segment and begin the next.

        :param late: a directory to put the next one into, of which all tallies but the first know nothing.
        """
        self._close_segment()
        self._late = late
        self._tallies = self._every if late is None else self._every[:1]
        self._open_segment()

    def stop(self) -> None:
        """An orderly end."""
        self.emit("proc.stop", version=__version__, reason="signal")
        self._close_segment()
        self._ended()

    def crash(self) -> None:
        """The power fails: the last line is torn, after a block that was never written."""
        torn = self._line("counters", self.counters)
        self._lines += [bytes(512) + b"\n", torn[: len(torn) // 2]]
        for tally in self._tallies:
            for _ in range(2):
                tally.damaged(self.name, self._began, self._at)
        self._write(self._segment)
        self._ended()

    def go_on(self) -> None:
        """Leave the segment open, as a daemon does that is still running."""
        (self._directory / ACTIVE_SEGMENT_FILE).write_bytes(b"".join(self._lines))

    def _ended(self) -> None:
        for tally in self._every:
            tally.boot_ended(self.name, self.boot, self._at)

    def _open_segment(self) -> None:
        self._began = self._clock()
        self._segment = self._segments.next_name(self._began)
        self._first_seq, self._dropped = self._seq + 1, 0
        self._append("log.open", {"version": __version__, "schema": SCHEMA_VERSION, "segment": self._segment})

    def _close_segment(self) -> None:
        self.emit("counters", **self.counters)
        about = {"seq_first": self._first_seq, "seq_last": self._seq + 1, "lines": len(self._lines) + 1}
        self._append("log.close", {**about, "dropped": self._dropped})
        self._write(self._segment)

    def _append(self, event: str, fields: Mapping[str, Any]) -> None:
        line = self._line(event, fields)
        if self._vanishing:
            self._vanishing -= 1
            return
        self._lines.append(line)
        for tally in self._tallies:
            tally.line(self.name, self.boot, self._seq, self._at, event, fields)

    def _line(self, event: str, fields: Mapping[str, Any]) -> bytes:
        self._seq += 1
        # Nothing takes no time at all.
        self._at = max(self._clock(), self._at + _STEP)
        return encode_line(self._heads[event] % (self._timestamp(), self._seq), fields)

    def _timestamp(self) -> bytes:
        second = int(self._at)
        if second != self._second:
            self._second = second
            self._prefix = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)).encode()
        return b"%b.%06dZ" % (self._prefix, (self._at - second) * 1e6)

    def _write(self, stem: str) -> None:
        content = b"".join(self._lines)
        self._lines.clear()
        path = (self._late or self._directory) / f"{stem}.jsonl"
        if self._compress:
            path, content = path.with_name(path.name + ".gz"), packed(content)
        path.write_bytes(content)
        os.utime(path, (self._at, self._at))


def packed(content: bytes) -> bytes:
    """As :mod:`mediatord.observability.segments` packs it: without name and time."""
    target = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=target, compresslevel=6, mtime=0) as file:
        file.write(content)
    return target.getvalue()
