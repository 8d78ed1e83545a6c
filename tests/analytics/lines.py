"""Log lines and segments in the format of the daemon."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from mediatord.observability.event_schema import (
    EVENTS,
    SCHEMA_VERSION,
    encode_line,
    encode_line_head,
    validate_fields,
)

DAY = datetime(2026, 11, 20, tzinfo=UTC)


class SegmentWriter:
    """
    Writes the lines of one start of one node, one second apart.

    :ivar now: time of the next line.
    :ivar seq: sequence number of the last line.
    """

    def __init__(self, node: str = "one", boot: str = "b00710000001", now: datetime = DAY) -> None:
        self.node, self.boot, self.now, self.seq = node, boot, now, 0
        self._segments = 0

    def line(self, event: str, **fields: object) -> bytes:
        """The next line, including its line feed."""
        self.seq += 1
        head = encode_line_head(event, EVENTS[event].level, node=self.node, boot=self.boot, epoch=1)
        stamp = self.now.strftime("%Y-%m-%dT%H:%M:%S.%fZ").encode()
        self.now += timedelta(seconds=1)
        return encode_line(head % (stamp, self.seq), validate_fields(event, fields))

    def acks(self, n: int) -> list[bytes]:
        """Lines of `msg.ack`."""
        return [self.line("msg.ack", msg=f"m{self.seq}", rcpt="r", path="live", latency_ms=1.5) for _ in range(n)]

    def stem(self) -> str:
        """Name of the next segment."""
        self._segments += 1
        return f"events-{self.now.strftime('%Y%m%dT%H%M%SZ')}-{self.node}-{self.boot}-{self._segments:06d}"

    def segment(self, n: int) -> tuple[str, list[bytes]]:
        """Stem and lines of a closed segment with `n` acknowledgements between log.open and log.close."""
        stem, first = self.stem(), self.seq + 1
        lines = [self.line("log.open", version="1", schema=SCHEMA_VERSION, segment=stem), *self.acks(n)]
        lines.append(self.line("log.close", seq_first=first, seq_last=self.seq + 1, lines=n + 2, dropped=0))
        return stem, lines


def write_file(directory: Path, name: str, lines: Sequence[bytes] | bytes) -> Path:
    """A file with these lines or bytes."""
    path = directory / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lines if isinstance(lines, bytes) else b"".join(lines))
    return path
