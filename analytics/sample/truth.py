"""What is really in the logs that were made up, counted as they were written."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from math import inf
from pathlib import Path
from typing import Any

from analytics.sample.counting import CONNECTIONS, counted
from analytics.sample.spec import DAY, Spec

# An hour after the end of its time a message that is still open has vanished.
_GRACE_S = 3600
_ENDINGS = {"msg.ack": "acked", "msg.expire": "expired", "msg.evict": "evicted", "msg.remove": "removed"}


@dataclass(slots=True)
class Ledger:
    """A day as `ledger_daily` has it; `orphans` are all that ended without a line that accepted them."""

    opening: int = 0
    accepted: int = 0
    acked: int = 0
    expired: int = 0
    evicted: int = 0
    removed: int = 0
    open: int = 0
    orphans: int = 0
    again: int = 0
    overdue: int = 0


@dataclass(slots=True)
class Boot:
    """One start of a node on one day, by the lines that are there."""

    seq_first: int
    seq_last: int
    lines: int
    missing: int = 0


@dataclass(slots=True)
class DayTruth:
    """
    What the lines of one day add up to, by their own time.

    :ivar events: (node, event) to lines.
    :ivar bytes: event to the sum of `size`.
    :ivar boots: (node, boot).
    :ivar damaged: node to lines that are no events, by the day of their segment.
    :ivar drift: (node, counter) to how much more the daemon counted than it logged; no entry where that is 0.
    :ivar lost: reason to messages that were never delivered.
    :ivar sockets: node to opened, authenticated, closed.
    :ivar unclosed: node to sockets that starts which ended on this day left open: lines that say opened less closed.
    :ivar limits: limit to hits.
    :ivar replays: code to refusals.
    :ivar errors: (proto, mtype, status, code) to requests.
    :ivar senders: sender to messages accepted.
    :ivar recipients: recipient to messages accepted.
    """

    events: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    boots: dict[tuple[str, str], Boot] = field(default_factory=dict)
    damaged: Counter[str] = field(default_factory=Counter)
    drift: Counter[tuple[str, str]] = field(default_factory=Counter)
    ledger: Ledger = field(default_factory=Ledger)
    lost: Counter[str] = field(default_factory=Counter)
    sockets: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    unclosed: Counter[str] = field(default_factory=Counter)
    limits: Counter[str] = field(default_factory=Counter)
    replays: Counter[str] = field(default_factory=Counter)
    errors: Counter[tuple[str, str, int, str]] = field(default_factory=Counter)
    senders: Counter[str] = field(default_factory=Counter)
    recipients: Counter[str] = field(default_factory=Counter)

    @property
    def lines(self) -> int:
        """Events of the day."""
        return sum(self.events.values())

    @property
    def missing(self) -> int:
        """Numbers that were given to lines and that no line has."""
        return sum(boot.missing for boot in self.boots.values())


@dataclass(frozen=True, slots=True)
class Incident:
    """:param details: what an operator is to find, by the kind of incident."""

    name: str
    day: date
    hour: int
    details: Mapping[str, Any]


@dataclass(slots=True)
class Truth:
    """
    :ivar days: what there is when all segments have arrived.
    :ivar days_before_late: what there is as long as late ones have not; the same object where none are late.
    :ivar late: where segments that come later lie, and where they belong.
    :ivar directory: with a directory for each process.
    """

    spec: Spec
    directory: Path
    days: dict[date, DayTruth]
    days_before_late: dict[date, DayTruth]
    incidents: dict[str, Incident] = field(default_factory=dict)
    late: list[tuple[Path, Path]] = field(default_factory=list)

    def deliver_late(self) -> None:
        """Move late segments to where they belong."""
        for source, target in self.late:
            source.rename(target)


class Tally:
    """
    Counts lines as they are written; those of all nodes in order of time. A deep copy goes on by itself.

    :ivar days: the days so far.
    """

    def __init__(self, spec: Spec) -> None:
        self._first_day, self._begin = spec.first_day, spec.begin
        self._number = -1
        self._day = DayTruth()
        self.days: dict[date, DayTruth] = {}
        self._open: dict[str, float] = {}
        self._ended: set[str] = set()
        self._last_seq: dict[tuple[str, str], int] = {}
        self._logged: Counter[tuple[str, str, str]] = Counter()
        self._drift: dict[tuple[str, str, str], int] = {}

    def line(self, node: str, boot: str, seq: int, at: float, event: str, fields: Mapping[str, Any]) -> None:
        """A line was written that can be read."""
        self._turn_to(at)
        day = self._day
        day.events[node, event] += 1
        day.bytes[event] += fields.get("size", 0)
        known = day.boots.get((node, boot))
        if known is None:
            day.boots[node, boot] = Boot(seq, seq, 1)
        else:
            known.seq_last = seq
            known.lines += 1
        for counter, step in counted(event, fields):
            self._logged[node, boot, counter] += step
        use = _USES.get(event)
        if use is not None:
            use(self, node, boot, fields)
        if event == "msg.accept":
            self._open[fields["msg"]] = at + fields.get("ttl_s", inf)

    def damaged(self, node: str, segment_began: float, now: float) -> None:
        """A line was written that is no event."""
        self._turn_to(now)
        self.days[self._first_day + timedelta(self._day_of(segment_began))].damaged[node] += 1

    def boot_ended(self, node: str, boot: str, at: float) -> None:
        """A process is gone, in whichever way."""
        self._turn_to(at)
        left = self._logged[node, boot, CONNECTIONS]
        if left > 0:
            self._day.unclosed[node] += left

    def finish(self, end: float) -> dict[date, DayTruth]:
        """All days before this moment."""
        self._turn_to(end)
        return {
            day: truth for day, truth in self.days.items() if day < self._first_day + timedelta(self._day_of(end))
        }

    def _day_of(self, at: float) -> int:
        return int((at - self._begin) // DAY)

    def _turn_to(self, at: float) -> None:
        number = self._day_of(at)
        while self._number < number:
            self._close_day()
            self._number += 1
            self._day = self.days[self._first_day + timedelta(self._number)] = DayTruth()
            self._day.ledger.opening = len(self._open)

    def _close_day(self) -> None:
        day = self._day
        midnight = self._begin + (self._number + 1) * DAY
        day.ledger.open = len(self._open)
        day.ledger.overdue = sum(until + _GRACE_S < midnight for until in self._open.values())
        for name, boot in day.boots.items():
            boot.missing = boot.seq_last - self._last_seq.get(name, 0) - boot.lines
            self._last_seq[name] = boot.seq_last

    def _accept(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        self._day.ledger.accepted += 1
        self._day.recipients[fields["rcpt"]] += 1
        if "sender" in fields:
            self._day.senders[fields["sender"]] += 1

    def _ack(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        self._end("acked", fields)

    def _expire(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        self._end("expired", fields)

    def _evict(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        self._end("evicted", fields)

    def _remove(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        self._end("removed", fields)

    def _end(self, state: str, fields: Mapping[str, Any]) -> None:
        msg, ledger = fields["msg"], self._day.ledger
        if msg in self._ended:
            ledger.again += 1
            return
        self._ended.add(msg)
        if self._open.pop(msg, None) is None:
            ledger.orphans += 1
            return
        setattr(ledger, state, getattr(ledger, state) + 1)
        if state != "acked":
            self._day.lost[fields["reason"]] += 1

    def _opened(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        self._day.sockets[node]["opened"] += 1

    def _authenticated(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        if "code" not in fields:
            self._day.sockets[node]["authenticated"] += 1

    def _closed(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        self._day.sockets[node]["closed"] += 1

    def _request(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        if "code" in fields or fields["status"] >= 400:
            name = fields["proto"], fields.get("mtype", ""), fields["status"], fields.get("code", "")
            self._day.errors[name] += 1

    def _limit(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        self._day.limits[fields["limit"]] += 1

    def _replay(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        self._day.replays[fields["code"]] += 1

    def _counters(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        for counter, value in fields.items():
            name = node, boot, counter
            drift = value - self._logged[name]
            grown = drift - self._drift.get(name, 0)
            if grown:
                self._drift[name] = drift
                self._day.drift[node, counter] += grown


_USES: dict[str, Callable[[Tally, str, str, Mapping[str, Any]], None]] = {
    "msg.accept": Tally._accept,
    "msg.ack": Tally._ack,
    "msg.expire": Tally._expire,
    "msg.evict": Tally._evict,
    "msg.remove": Tally._remove,
    "conn.open": Tally._opened,
    "conn.auth": Tally._authenticated,
    "conn.close": Tally._closed,
    "req.done": Tally._request,
    "limit.hit": Tally._limit,
    "replay.drop": Tally._replay,
    "counters": Tally._counters,
}
