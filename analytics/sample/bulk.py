"""
One busy day, quickly: files of any size to measure with, of which everything is counted.

Lives of messages are complete and kinds of events as frequent as they are; seasons and incidents there are none.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from random import Random
from time import gmtime, strftime
from typing import Any

from analytics.sample.counting import NAMES, counted
from analytics.sample.life import Happening, Life
from analytics.sample.node import EPOCH
from mediatord import __version__
from mediatord.observability.event_schema import EVENTS, SCHEMA_VERSION, encode_line, encode_line_head
from mediatord.observability.segments import SegmentDirectory

LINES = 600_000
DAY = date(2026, 6, 15)
_NODES = 4
_SEGMENTS = 2
_SECONDS = 86_300.0
# Lines that are cut short: about 12 in 600 000.
_TRUNCATED = 2e-5
_LINES_OF_A_MESSAGE = 5.25
_ENDINGS = {"msg.ack": "acked", "msg.expire": "expired", "msg.evict": "evicted", "msg.remove": "removed"}
_KEPT = "truth.json"


@dataclass(slots=True)
class BulkTruth:
    """
    :ivar lines: all of them, the damaged too.
    :ivar events: event to lines that are whole.
    :ivar missing: seq between the first and the last line of a start that no whole line has.
    :ivar accepted: messages whose `msg.accept` is whole.
    :ivar ended: acked, expired, evicted or removed to messages, which were accepted.
    :ivar orphans: ended, but the line that says they were accepted is damaged.
    :ivar drift: counter to how much more was counted than whole lines say, all nodes together.
    """

    lines: int = 0
    size: int = 0
    damaged: int = 0
    missing: int = 0
    events: Counter[str] = field(default_factory=Counter)
    accepted: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    open: int = 0
    orphans: int = 0
    drift: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: BulkTruth) -> BulkTruth:
        return BulkTruth(**{name: value + getattr(other, name) for name, value in self.as_dict().items()})

    def as_dict(self) -> dict[str, Any]:
        """Its fields."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def generate_bulk(directory: Path, scale: int | float, *, seed: int = 1, processes: int = 4) -> BulkTruth:
    """
    Write 8 files of one day with 600 000 lines times `scale`, or take what was written before.

    :param directory: for these files and what is known of them; kept, so that they are made once.
    :raise ValueError: it holds files of another scale or seed.
    """
    kept = directory / _KEPT
    wanted = {"scale": scale, "seed": seed}
    if kept.exists():
        found: dict[str, Any] = json.loads(kept.read_text())
        if found.pop("of") != wanted:
            raise ValueError(f"{directory} holds other files already")
        values: dict[str, Any] = {name: Counter(n) if isinstance(n, dict) else n for name, n in found.items()}
        return BulkTruth(**values)
    lines = int(LINES * scale) // _NODES
    # A process that has threads, as one with a JVM does, is not to be forked.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        parts = list(pool.map(partial(_node, directory, lines, seed), range(_NODES)))
    truth = sum(parts, BulkTruth())
    kept.write_text(json.dumps({"of": wanted, **truth.as_dict()}))
    return truth


def _node(directory: Path, lines: int, seed: int, number: int) -> BulkTruth:
    return _Node(directory / f"node-{number + 1}", lines, Random(f"{seed} {number}")).write()


class _Node:
    """Writes the day of one node. Every message stays on its node."""

    def __init__(self, directory: Path, lines: int, rng: Random) -> None:
        self._directory, self._lines = directory, lines
        self._boot = f"{rng.getrandbits(48):012x}"
        name = directory.name
        self._heads = {
            event: encode_line_head(event, about.level, node=name, boot=self._boot, epoch=EPOCH)
            for event, about in EVENTS.items()
        }
        self._begin = datetime(DAY.year, DAY.month, DAY.day, tzinfo=UTC).timestamp()
        self._life = Life(rng, lines / _LINES_OF_A_MESSAGE / _SECONDS, self._begin)
        self._rng = rng
        self._seq = self._last_seen = 0
        self._second, self._prefix = -1, b""
        self._counters = dict.fromkeys(NAMES, 0)
        self._logged: Counter[str] = Counter()
        self._open: set[str] = set()
        self.truth = BulkTruth()

    def write(self) -> BulkTruth:
        """All segments; what they hold."""
        self._directory.mkdir(parents=True, exist_ok=True)
        segments = SegmentDirectory(self._directory, self._directory.name, self._boot)
        happenings, at = self._life.happenings(), self._begin
        for number in range(_SEGMENTS):
            at = self._segment(segments.next_name(at), at, happenings, first=not number)
        truth = self.truth
        truth.open = len(self._open)
        truth.missing = self._last_seen - sum(truth.events.values())
        return truth

    def _segment(self, stem: str, at: float, happenings: Iterator[Happening], *, first: bool) -> float:
        """One file; when it ended."""
        begun = self._seq
        with (self._directory / f"{stem}.jsonl").open("wb", 1 << 20) as file:
            file.write(
                self._whole(at, "log.open", {"version": __version__, "schema": SCHEMA_VERSION, "segment": stem})
            )
            if first:
                file.write(self._whole(at, "proc.start", {"version": __version__}))
            for at, event, fields in islice(happenings, self._lines // _SEGMENTS - (self._seq - begun) - 2):
                file.write(self._line(at, event, fields if fields else self._counters))
            file.write(self._whole(at, "counters", self._counters))
            about = {"seq_first": begun + 1, "seq_last": self._seq + 1, "lines": self._seq + 1 - begun, "dropped": 0}
            file.write(self._whole(at, "log.close", about))
            self.truth.size += file.tell()
        return at

    def _line(self, at: float, event: str, fields: Mapping[str, Any]) -> bytes:
        """A line as it is in the file, which is not always whole."""
        if self._rng.random() >= _TRUNCATED:
            return self._whole(at, event, fields)
        for counter, step in counted(event, fields):
            self._counters[counter] += step
        self._seq += 1
        self.truth.lines += 1
        self.truth.damaged += 1
        line = self._format(at, event, fields)
        return line[: self._rng.randrange(20, len(line) - 2)] + b"\n"

    def _whole(self, at: float, event: str, fields: Mapping[str, Any]) -> bytes:
        self._seq += 1
        self._last_seen = self._seq
        truth = self.truth
        truth.lines += 1
        truth.events[event] += 1
        for counter, step in counted(event, fields):
            self._counters[counter] += step
            self._logged[counter] += step
        if event == "counters":
            truth.drift = Counter({name: value - self._logged[name] for name, value in fields.items()})
        elif event == "msg.accept":
            truth.accepted += 1
            self._open.add(fields["msg"])
        elif event in _ENDINGS:
            self._end(event, fields["msg"])
        return self._format(at, event, fields)

    def _end(self, event: str, msg: str) -> None:
        if msg in self._open:
            self._open.remove(msg)
            self.truth.ended[_ENDINGS[event]] += 1
        else:
            self.truth.orphans += 1

    def _format(self, at: float, event: str, fields: Mapping[str, Any]) -> bytes:
        second = int(at)
        if second != self._second:
            self._second = second
            self._prefix = strftime("%Y-%m-%dT%H:%M:%S", gmtime(second)).encode()
        stamp = b"%b.%06dZ" % (self._prefix, (at - second) * 1e6)
        return encode_line(self._heads[event] % (stamp, self._seq), fields)
