"""Ground truth of generated logs: the specification, what was written, and where incidents appear in the tables."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from analytics.job import Span
from analytics.writing.warehouse import Warehouse
from mediatord.observability.event_schema import EVENTS

if TYPE_CHECKING:
    from analytics.database import Row

DAY_S = 86_400
HOUR_S = 3_600

# Incident to its day, from 0, and hour in UTC.
INCIDENT_SCHEDULE: Mapping[str, tuple[int, int]] = {
    "crash": (8, 14),
    "vanished_message": (11, 9),
    "expiry_wave": (12, 6),
    "eviction_storm": (17, 10),
    "abuse_burst": (18, 15),
    "replay_attack": (19, 11),
    "clock_skew": (20, 8),
    "slow_node": (21, 0),
    "new_error": (22, 13),
    "disk_full": (25, 16),
    "traffic_drop": (26, 12),
    "late_segment": (28, 9),
}


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """
    Specification of generated logs; equal specifications give equal bytes.

    :param nodes: names of the nodes, which share one store.
    :param workers: processes of each node; if there are several, each logs as a node of its own, as in the daemon.
    :param wallets: number of wallets, besides an eighth more on phones, which are woken by push notifications.
    :param messages_per_day: accepted on a weekday of the first week, summed over nodes; phones get an eighth more.
    :param growth: growth of traffic per day; 0.01 is 1 %.
    :param incidents: True for all of the schedule that fall into the days, or their names.
    :param schedule: day, from 0, and hour of each incident.
    :param queue_max_messages: as in the configuration of the daemon.
    :param ttl_s: lifetime of a DIDComm message in seconds; Decentrl events do not expire.
    :param gauge_s: seconds between gauges, and between counters.
    :param segment_hours: duration of a segment in hours.
    :param compress: whether closed segments are gzip.
    """

    first_day: date = date(2026, 10, 22)
    days: int = 30
    seed: int = 1
    nodes: tuple[str, ...] = ("mediator-a", "mediator-b", "mediator-c")
    workers: int = 1
    wallets: int = 400
    messages_per_day: int = 1500
    growth: float = 0.006
    incidents: bool | frozenset[str] = True
    schedule: Mapping[str, tuple[int, int]] = field(default_factory=lambda: INCIDENT_SCHEDULE)
    queue_max_messages: int = 1000
    ttl_s: int = 259_200
    gauge_s: int = 60
    segment_hours: int = 1
    compress: bool = True

    @property
    def begin(self) -> float:
        """Start, in seconds since the epoch."""
        return datetime(self.first_day.year, self.first_day.month, self.first_day.day, tzinfo=UTC).timestamp()

    @property
    def end(self) -> float:
        """End, in seconds since the epoch."""
        return self.begin + self.days * DAY_S

    @property
    def last_day(self) -> date:
        """Last day, included."""
        return self.first_day + timedelta(self.days - 1)

    @property
    def processes(self) -> tuple[str, ...]:
        """Names of logging processes, as the daemon names them."""
        if self.workers == 1:
            return self.nodes
        return tuple(f"{node}-{number}" for node in self.nodes for number in range(1, self.workers + 1))

    def list_incidents(self) -> dict[str, float]:
        """Incidents and their start times, seconds since the epoch, in order."""
        names = self.schedule if self.incidents is True else self.incidents or ()
        begins = {
            name: self.begin + self.schedule[name][0] * DAY_S + self.schedule[name][1] * HOUR_S for name in names
        }
        return dict(sorted(((name, at) for name, at in begins.items() if at < self.end), key=lambda one: one[1]))


CONNECTIONS_COUNTER = "connections"
# Entry of the store ledger (event `ledger`) by event.
STORE_ENTRIES = {
    "msg.accept": "accepted",
    "msg.ack": "acknowledged",
    "msg.expire": "expired",
    "msg.evict": "evicted",
    "msg.remove": "removed",
}
COUNTER_NAMES = EVENTS["counters"].fields
_STEPS_BY_EVENT: dict[str, tuple[tuple[str, int], ...]] = {
    "msg.ack": (("delivered", 1),),
    "msg.expire": (("expired", 1),),
    "msg.evict": (("evicted", 1),),
    "conn.open": ((CONNECTIONS_COUNTER, 1),),
    "conn.close": ((CONNECTIONS_COUNTER, -1),),
}
_FORWARDED_STEPS = (("forwarded", 1),)
_QUEUED_STEPS = (("forwarded", 1), ("stored", 1))
_FALLBACK_STEPS = (("stored", 1),)


def get_counter_steps(event: str, fields: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Counters and the increments by this line."""
    if event == "req.done":
        return ((_get_request_outcome(fields), 1),)
    if event == "msg.accept":
        return _QUEUED_STEPS if fields.get("method") == "queue" else _FORWARDED_STEPS
    if event == "msg.push" and fields.get("ok") is False:
        return _FALLBACK_STEPS
    return _STEPS_BY_EVENT.get(event, ())


def _get_request_outcome(fields: Mapping[str, Any]) -> str:
    if fields["status"] >= 500:
        return "requests_failed"
    return "requests_rejected" if "code" in fields else "requests_accepted"


# A message still open an hour past its expiry counts as overdue.
_OVERDUE_AFTER_S = 3600
_ENDED_STATES = {"msg.ack": "acked", "msg.expire": "expired", "msg.evict": "evicted", "msg.remove": "removed"}


@dataclass(slots=True)
class LedgerTruth:
    """A day as in `ledger_daily`; `orphans` are all endings without a logged acceptance."""

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
class BootTruth:
    """Lines of one start of a node on one day."""

    seq_first: int
    seq_last: int
    lines: int
    missing: int = 0


@dataclass(slots=True)
class DayTruth:
    """
    Totals of the lines of one day, by their own time.

    :ivar events: (node, event) to lines.
    :ivar bytes: event to the sum of `size`.
    :ivar boots: (node, boot).
    :ivar damaged: node to lines that are not events, by the day of their segment.
    :ivar drift: (node, counter) to the excess of counted over logged events; no entry if it is 0.
    :ivar lost: reason to messages that were not delivered.
    :ivar sockets: node to opened, authenticated, closed.
    :ivar unclosed: node to sockets left open by processes that ended on this day.
    :ivar peaks: node to the maximum of concurrent sockets.
    :ivar limits: limit to hits.
    :ivar replays: code to refusals.
    :ivar errors: (proto, mtype, status, code) to requests.
    :ivar senders: sender to messages accepted.
    :ivar recipients: recipient to messages accepted.
    :ivar pushes: (event, service, outcome or reason) to lines about push notifications.
    :ivar wakeups: service, or `*` for all, to wake-ups that ended on this day.
    :ivar missed: the same, of those without a pickup.
    """

    events: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    boots: dict[tuple[str, str], BootTruth] = field(default_factory=dict)
    damaged: Counter[str] = field(default_factory=Counter)
    drift: Counter[tuple[str, str]] = field(default_factory=Counter)
    ledger: LedgerTruth = field(default_factory=LedgerTruth)
    lost: Counter[str] = field(default_factory=Counter)
    sockets: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    unclosed: Counter[str] = field(default_factory=Counter)
    peaks: Counter[str] = field(default_factory=Counter)
    limits: Counter[str] = field(default_factory=Counter)
    replays: Counter[str] = field(default_factory=Counter)
    errors: Counter[tuple[str, str, int, str]] = field(default_factory=Counter)
    senders: Counter[str] = field(default_factory=Counter)
    recipients: Counter[str] = field(default_factory=Counter)
    pushes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    wakeups: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)

    @property
    def lines(self) -> int:
        """Number of events of the day."""
        return sum(self.events.values())

    @property
    def missing(self) -> int:
        """Sequence numbers without a line."""
        return sum(boot.missing for boot in self.boots.values())


@dataclass(frozen=True, slots=True)
class Incident:
    """:param details: what to find, by kind of incident."""

    name: str
    day: date
    hour: int
    details: Mapping[str, Any]


@dataclass(slots=True)
class SampleTruth:
    """
    :ivar days: contents once all segments have arrived.
    :ivar days_before_late: contents before late segments arrive; the same object if none are late.
    :ivar late: paths of late segments, and their destinations.
    :ivar directory: with a directory for each process.
    """

    spec: SampleSpec
    directory: Path
    days: dict[date, DayTruth]
    days_before_late: dict[date, DayTruth]
    incidents: dict[str, Incident] = field(default_factory=dict)
    late: list[tuple[Path, Path]] = field(default_factory=list)

    def deliver_late_segments(self) -> None:
        """Move late segments to their destinations."""
        for source, target in self.late:
            source.rename(target)


_TOGETHER_S = 1.0
_PICKUP_WITHIN_S = 3600


@dataclass(slots=True)
class _WakeupTruth:
    """:ivar start: of its first request. :ivar logged: time of the first line."""

    start: float
    logged: float
    services: set[str] = field(default_factory=set)


def _is_contact(event: str, fields: Mapping[str, Any]) -> bool:
    """Whether a line shows that an account connected or fetched."""
    if "code" in fields or event not in ("conn.auth", "req.done"):
        return False
    kind = fields.get("mtype", "")
    return event == "conn.auth" or ("sender" in fields and kind.startswith(("messagepickup/", "QUERY_")))


class TruthRecorder:
    """
    Counts lines of all nodes as they are written, in order of time. A deep copy continues independently.

    :ivar days: days so far.
    """

    def __init__(self, spec: SampleSpec) -> None:
        self._first_day, self._begin = spec.first_day, spec.begin
        self._number = -1
        self._day = DayTruth()
        self.days: dict[date, DayTruth] = {}
        self._open: dict[str, float] = {}
        self._ended: set[str] = set()
        self._last_seq: dict[tuple[str, str], int] = {}
        self._logged: Counter[tuple[str, str, str]] = Counter()
        self._drift: dict[tuple[str, str, str], int] = {}
        self._wakeups: dict[str, list[_WakeupTruth]] = defaultdict(list)
        self._contacts: dict[str, list[float]] = defaultdict(list)

    def line(self, node: str, boot: str, seq: int, at: float, event: str, fields: Mapping[str, Any]) -> None:
        """Record a readable line."""
        self._turn_to(at)
        day = self._day
        day.events[node, event] += 1
        day.bytes[event] += fields.get("size", 0)
        known = day.boots.get((node, boot))
        if known is None:
            day.boots[node, boot] = BootTruth(seq, seq, 1)
        else:
            known.seq_last = seq
            known.lines += 1
        for counter, step in get_counter_steps(event, fields):
            self._logged[node, boot, counter] += step
        if event == "push.wake":
            self._wake(at, fields)
        elif _is_contact(event, fields):
            self._contacts[fields.get("did") or fields["sender"]].append(at)
        use = _RECORD_METHODS.get(event)
        if use is not None:
            use(self, node, boot, fields)
        if event == "msg.accept":
            self._open[fields["msg"]] = at + fields.get("ttl_s", inf)

    def damaged(self, node: str, segment_began: float, now: float) -> None:
        """Record a damaged line."""
        self._turn_to(now)
        self.days[self._first_day + timedelta(self._day_of(segment_began))].damaged[node] += 1

    def boot_ended(self, node: str, boot: str, at: float) -> None:
        """Record the end of a process."""
        self._turn_to(at)
        left = self._logged[node, boot, CONNECTIONS_COUNTER]
        if left > 0:
            self._day.unclosed[node] += left

    def finish(self, end: float) -> dict[date, DayTruth]:
        """Days before this moment."""
        self._turn_to(end)
        self._count_wakeups()
        return {
            day: truth for day, truth in self.days.items() if day < self._first_day + timedelta(self._day_of(end))
        }

    def _day_of(self, at: float) -> int:
        return int((at - self._begin) // DAY_S)

    def _turn_to(self, at: float) -> None:
        number = self._day_of(at)
        while self._number < number:
            self._close_day()
            self._number += 1
            self._day = self.days[self._first_day + timedelta(self._number)] = DayTruth()
            self._day.ledger.opening = len(self._open)

    def _close_day(self) -> None:
        day = self._day
        midnight = self._begin + (self._number + 1) * DAY_S
        day.ledger.open = len(self._open)
        day.ledger.overdue = sum(until + _OVERDUE_AFTER_S < midnight for until in self._open.values())
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
        self._count_sockets(node, boot, 1)

    def _authenticated(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        if "code" not in fields:
            self._day.sockets[node]["authenticated"] += 1

    def _closed(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        self._day.sockets[node]["closed"] += 1
        self._count_sockets(node, boot, -1)

    def _count_sockets(self, node: str, boot: str, step: int) -> None:
        level = self._logged[node, boot, CONNECTIONS_COUNTER]
        # The level before the first line of a day is that of the day before.
        self._day.peaks[node] = max(self._day.peaks[node], level, level - step)

    def _request(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        if "code" in fields or fields["status"] >= 400:
            name = fields["proto"], fields.get("mtype", ""), fields["status"], fields.get("code", "")
            self._day.errors[name] += 1

    def _limit(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        self._day.limits[fields["limit"]] += 1

    def _replay(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        self._day.replays[fields["code"]] += 1

    def _forget(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        self._day.pushes["push.forget", fields["service"], fields["reason"]] += 1

    def _wake(self, at: float, fields: Mapping[str, Any]) -> None:
        self._day.pushes["push.wake", fields["service"], fields["outcome"]] += 1
        if fields["outcome"] != "sent":
            return
        own, start = self._wakeups[fields["did"]], at - fields["dur_ms"] / 1000
        # The simulated requests of a wake-up start at the same time, and wake-ups are far apart.
        if not own or start - own[-1].start > _TOGETHER_S:
            own.append(_WakeupTruth(start, at))
        own[-1].services.add(fields["service"])

    def _count_wakeups(self) -> None:
        """Count each wake-up once, on the day on which it ended."""
        for did, own in self._wakeups.items():
            contacts = self._contacts[did]
            for wakeup in own:
                index = bisect_left(contacts, wakeup.start)
                until = wakeup.start + _PICKUP_WITHIN_S
                pickup = contacts[index] if index < len(contacts) and contacts[index] <= until else None
                ended = self._day_of(max(until if pickup is None else pickup, wakeup.logged))
                if day := self.days.get(self._first_day + timedelta(ended)):
                    day.wakeups.update({"*", *wakeup.services})
                    day.missed.update({"*", *wakeup.services} if pickup is None else ())
        self._wakeups.clear()

    def _counters(self, node: str, boot: str, fields: Mapping[str, Any]) -> None:
        for counter, value in fields.items():
            name = node, boot, counter
            drift = value - self._logged[name]
            grown = drift - self._drift.get(name, 0)
            if grown:
                self._drift[name] = drift
                self._day.drift[node, counter] += grown


_RECORD_METHODS: dict[str, Callable[[TruthRecorder, str, str, Mapping[str, Any]], None]] = {
    "msg.accept": TruthRecorder._accept,
    "msg.ack": TruthRecorder._ack,
    "msg.expire": TruthRecorder._expire,
    "msg.evict": TruthRecorder._evict,
    "msg.remove": TruthRecorder._remove,
    "conn.open": TruthRecorder._opened,
    "conn.auth": TruthRecorder._authenticated,
    "conn.close": TruthRecorder._closed,
    "req.done": TruthRecorder._request,
    "limit.hit": TruthRecorder._limit,
    "replay.drop": TruthRecorder._replay,
    "push.forget": TruthRecorder._forget,
    "counters": TruthRecorder._counters,
}


@dataclass(frozen=True, slots=True)
class Finding:
    """:param text: the finding; empty if the incident was not found."""

    incident: Incident
    text: str


def find_incidents(warehouse: Warehouse, truth: SampleTruth) -> list[Finding]:
    """Find each incident in the published tables, in order of time."""
    tables = _TableReader(warehouse, truth.spec.last_day)
    ordered = sorted(truth.incidents.values(), key=lambda one: one.day)
    return [Finding(incident, _FINDERS[incident.name](tables, incident)) for incident in ordered]


class _TableReader:
    def __init__(self, warehouse: Warehouse, last_day: date) -> None:
        self._warehouse = warehouse
        self._last_day = last_day

    def rows(self, table: str, incident: Incident, where: str, *, after: int = 0, days: int = 1) -> Sequence[Row]:
        """
        A few rows, in order.

        :param where: SQL condition.
        :param after: days from the incident to the first day of the search.
        """
        first = min(incident.day + timedelta(after), self._last_day)
        span = Span(first, min(first + timedelta(days - 1), self._last_day))
        return self._warehouse.rows(table, span, where=where)

    def anomalies(self, incident: Incident, metric: str, **days: int) -> Sequence[Row]:
        """Anomalies of a metric."""
        return self.rows("anomalies", incident, f"metric = '{metric}'", **days)


def _find_crash(tables: _TableReader, incident: Incident) -> str:
    node, boot = incident.details["node"], incident.details["boot"]
    boots = tables.rows("boots_daily", incident, f"boot = '{boot}' AND missing > 0")
    sockets = tables.rows("sockets_daily", incident, f"node = '{node}' AND unclosed > 0")
    crashed = tables.rows("inputs", incident, f"state = 'crashed' AND stem LIKE '%{boot}%'")
    if not (boots and sockets and crashed):
        return ""
    return (
        f"{node}: {boots[0]['missing']} lines missing, {crashed[0]['corrupt']} damaged,"
        f" {sockets[0]['unclosed']} sockets never closed"
    )


def _find_vanished_message(tables: _TableReader, incident: Incident) -> str:
    before, *after = tables.rows("ledger_daily", incident, "true", after=2, days=3)
    more = [row for row in after if row["overdue"] > before["overdue"]]
    return f"{more[0]['overdue'] - before['overdue']} more overdue message from {more[0]['dt']} on" if more else ""


def _find_expiry_wave(tables: _TableReader, incident: Incident) -> str:
    unusual = tables.anomalies(incident, "messages_lost", after=3, days=2)
    lost = tables.rows("lost_daily", incident, "reason = 'ttl'", after=3, days=2)
    return f"{_sum_column(lost, 'n')} messages expired, anomalies in {len(unusual)} hours" if unusual and lost else ""


def _find_eviction_storm(tables: _TableReader, incident: Incident) -> str:
    lost = tables.rows("lost_daily", incident, "reason = 'fifo_count'")
    full = tables.rows("queue_risk", incident, f"waiting >= {incident.details['waiting']} AND days_to_cap = 0")
    return f"{_sum_column(lost, 'n')} messages evicted, full queues: {len(full)}" if lost and full else ""


def _find_abuse_burst(tables: _TableReader, incident: Incident) -> str:
    rows = tables.rows("limits_daily", incident, f"\"limit\" = '{incident.details['limit']}' AND bursts > 0")
    return f"{rows[0]['hits']} refusals in {rows[0]['bursts']} bursts" if rows else ""


def _find_replay_attack(tables: _TableReader, incident: Incident) -> str:
    unusual = tables.anomalies(incident, "replays")
    rows = tables.rows("replay_daily", incident, f"code = '{incident.details['code']}'")
    return f"{_sum_column(rows, 'n')} replayed, anomalies in {len(unusual)} hours" if rows and unusual else ""


def _find_clock_skew(tables: _TableReader, incident: Incident) -> str:
    rows = tables.rows("replay_daily", incident, f"code = '{incident.details['code']}' AND age_class = 'skew'")
    return f"{_sum_column(rows, 'n')} requests 5 to 10 minutes off" if rows else ""


def _find_slow_node(tables: _TableReader, incident: Incident) -> str:
    node = incident.details["node"]
    rows = tables.rows("node_compare", incident, f"node = '{node}' AND flagged AND metric LIKE '%ms'")
    findings = [f"{row['metric']} {row['ratio']:.1f} times the median" for row in rows]
    return f"{node}: {', '.join(findings)}" if rows else ""


def _find_new_error(tables: _TableReader, incident: Incident) -> str:
    rows = tables.rows("errors_daily", incident, f"is_new AND code = '{incident.details['code']}'")
    return f"{rows[0]['code']} is new, {_sum_column(rows, 'n')} times" if rows else ""


def _find_disk_full(tables: _TableReader, incident: Incident) -> str:
    node = incident.details["node"]
    boots = tables.rows("boots_daily", incident, f"node = '{node}' AND missing > 0")
    counters = tables.rows("reconciliation_daily", incident, f"node = '{node}' AND difference <> 0")
    if not (boots and counters):
        return ""
    return f"{node}: {boots[0]['missing']} lines dropped, {len(counters)} counters differ"


def _find_traffic_drop(tables: _TableReader, incident: Incident) -> str:
    rows = [*tables.anomalies(incident, "messages_accepted"), *tables.anomalies(incident, "requests")]
    hours = sorted({row["hour"] for row in rows if row["value"] < row["expected"] / 2})
    return "traffic less than half of the usual in the hours " + ", ".join(map(str, hours)) if hours else ""


def _find_late_segment(tables: _TableReader, incident: Incident) -> str:
    node = incident.details["node"]
    gone = tables.rows("boots_daily", incident, f"node = '{node}' AND missing > 0")
    return (
        f"{node}: {gone[0]['missing']} lines missing until the segment arrives"
        if gone
        else f"{node}: the segment arrived, no lines missing"
    )


def _sum_column(rows: Sequence[Row], column: str) -> int:
    return sum(int(row[column]) for row in rows)


_FINDERS: dict[str, Callable[[Any, Incident], str]] = {
    "crash": _find_crash,
    "vanished_message": _find_vanished_message,
    "expiry_wave": _find_expiry_wave,
    "eviction_storm": _find_eviction_storm,
    "abuse_burst": _find_abuse_burst,
    "replay_attack": _find_replay_attack,
    "clock_skew": _find_clock_skew,
    "slow_node": _find_slow_node,
    "new_error": _find_new_error,
    "disk_full": _find_disk_full,
    "traffic_drop": _find_traffic_drop,
    "late_segment": _find_late_segment,
}
