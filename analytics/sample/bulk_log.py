"""
One busy day in files of any size for benchmarks, with all lines counted.

Message life cycles are complete and events as frequent as in production; there are no seasons and no incidents.
"""

from __future__ import annotations

import heapq
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime
from functools import partial
from itertools import accumulate, islice
from math import exp
from multiprocessing import get_context
from pathlib import Path
from random import Random
from time import gmtime, strftime
from typing import Any

from analytics.sample.ground_truth import COUNTER_NAMES, HOUR_S, get_counter_steps
from analytics.sample.simulation import (
    COMMON_FAULTS,
    FORWARD_TYPE,
    KEY_EPOCH,
    PICKUP_PREFIX,
    RATE_LIMITED_CODES,
    REPLAYED_CODE,
)
from mediatord import __version__
from mediatord.observability.event_schema import EVENTS, SCHEMA_VERSION, encode_line, encode_line_head
from mediatord.observability.segments import SegmentDirectory

USER_COUNT = 20_000
SimulatedEvent = tuple[float, str, Mapping[str, Any]]

_GAUGE_INTERVAL_S = 60.0
_TTL_S = 259_200
# Shares of all messages, independent of each other.
_LIVE_SHARE, _EXPIRED_SHARE, _EVICTED_SHARE, _REMOVED_SHARE = 0.6, 0.01, 0.005, 0.002
_FALLBACK_SHARE = 0.01
_SOCKET_SHARE = 0.1
_REFUSED_SHARE = sum(fault[4] for fault in COMMON_FAULTS)


def _name_account(number: int) -> str:
    return f"{Random(number).getrandbits(128):032x}"


# The account with most messages.
BUSIEST_ACCOUNT = _name_account(0)


class EventStream:
    """
    Random events of one node.

    :param rate: messages per second.
    :param begin: seconds since the epoch.
    :param skew: share of all choices of an account that fall on :data:`BUSIEST_ACCOUNT`, besides its own.
    """

    def __init__(self, rng: Random, rate: float, begin: float, skew: float = 0.0) -> None:
        self._rng, self._rate, self._now, self._begin, self._skew = rng, rate, begin, begin, skew
        self._users = [_name_account(number) for number in range(USER_COUNT)]
        self._sums = list(accumulate(1 / rank for rank in range(1, USER_COUNT + 1)))
        self._calendar: list[tuple[float, int, str, Mapping[str, Any]]] = []
        self._entries = self._requests = self._sockets = 0

    def generate_events(self) -> Iterator[SimulatedEvent]:
        """Generate events in order of time; `counters` without fields."""
        calendar, rng = self._calendar, self._rng
        gauge = self._begin + _GAUGE_INTERVAL_S
        while True:
            self._now += rng.expovariate(self._rate)
            while self._now > gauge:
                self._at(gauge, "gauge", self._gauge())
                self._at(gauge, "counters", {})
                gauge += _GAUGE_INTERVAL_S
            self._message()
            while calendar[0][0] <= self._now:
                at, _, event, fields = heapq.heappop(calendar)
                yield at, event, fields

    def _at(self, at: float, event: str, fields: Mapping[str, Any]) -> None:
        self._entries += 1
        heapq.heappush(self._calendar, (at, self._entries, event, fields))

    def _user(self) -> str:
        if self._skew and self._rng.random() < self._skew:
            return BUSIEST_ACCOUNT
        return self._users[bisect_left(self._sums, self._rng.random() * self._sums[-1])]

    def _message(self) -> None:
        rng, now = self._rng, self._now
        if rng.random() < _REFUSED_SHARE:
            self._fault()
        if rng.random() < _SOCKET_SHARE:
            self._socket()
        chance = rng.random()
        protocol = "didcomm" if chance < 0.7 else "decentrl"
        rcpt, msg = self._user(), f"{rng.getrandbits(128):032x}"
        about = {"msg": msg, "rcpt": rcpt}
        size = int(1900 * exp(rng.gauss(0, 0.9)))
        live = rng.random() < _LIVE_SHARE
        sender = self._user()
        method = "live" if live else "queue"
        accepted = {**about, "sender": sender, "proto": protocol, "size": size, "method": method}
        if protocol == "didcomm":
            accepted["ttl_s"] = _TTL_S
        self._at(now, "msg.accept", accepted)
        kind = FORWARD_TYPE if protocol == "didcomm" else "TWO_WAY_PRIVATE"
        self._request(now, protocol, kind, 202 if protocol == "didcomm" else 200, size + 900, sender)
        if live:
            self._live(now, about, protocol)
        else:
            self._queued(now, about, protocol, size)

    def _live(self, now: float, about: Mapping[str, Any], protocol: str) -> None:
        rng = self._rng
        pushed = {**about, "conn": self._conn(), "proto": protocol, "path": "live", "attempt": 1}
        self._at(now, "msg.push", {**pushed, "latency_ms": int(4 * exp(rng.gauss(0, 0.8))), "ok": True})
        if rng.random() < _FALLBACK_SHARE:
            self._at(now + 60, "msg.push", {**pushed, "latency_ms": 60_000, "ok": False})
            self._fetched(now, now + HOUR_S * rng.random(), about, protocol, 2)
        else:
            self._acknowledged(now, now + 0.18 * exp(rng.gauss(0, 1.1)), about, protocol, "live")

    def _queued(self, now: float, about: Mapping[str, Any], protocol: str, size: int) -> None:
        rng = self._rng
        waited = HOUR_S * exp(rng.gauss(0.3, 0.8))
        chance = rng.random()
        for event, reason, share in (
            ("msg.expire", "ttl", _EXPIRED_SHARE),
            ("msg.evict", "fifo_count", _EVICTED_SHARE),
            ("msg.remove", "deregistered", _REMOVED_SHARE),
        ):
            chance -= share
            if chance < 0:
                lost = {"proto": protocol, "size": size, "age_ms": int(waited * 1000), "reason": reason, "pushes": 0}
                self._at(now + waited, event, {**about, **lost})
                return
        self._fetched(now, now + waited, about, protocol, 1)

    def _fetched(self, since: float, at: float, about: Mapping[str, Any], protocol: str, attempt: int) -> None:
        """Decentrl events are logged when acknowledged, not when fetched."""
        if protocol == "didcomm":
            latency = int((at - since) * 1000)
            pushed = {"conn": self._conn(), "proto": protocol, "path": "pickup", "attempt": attempt}
            self._at(at, "msg.push", {**about, **pushed, "latency_ms": latency, "ok": True})
            self._request(at, protocol, PICKUP_PREFIX + "delivery-request", 200, 780, about["rcpt"])
        self._acknowledged(
            since, at + self._rng.random(), about, protocol, "pickup" if protocol == "didcomm" else "poll"
        )

    def _acknowledged(self, since: float, at: float, about: Mapping[str, Any], protocol: str, path: str) -> None:
        self._at(at, "msg.ack", {**about, "proto": protocol, "path": path, "latency_ms": int((at - since) * 1000)})
        kind = PICKUP_PREFIX + "messages-received" if protocol == "didcomm" else "ACKNOWLEDGE_PENDING_EVENTS"
        self._request(at, protocol, kind, 200, 820, about["rcpt"])

    def _request(
        self,
        at: float,
        protocol: str,
        kind: str | None,
        status: int,
        size: int,
        sender: str | None,
        code: str | None = None,
    ) -> None:
        duration_ms = 5.5 * exp(self._rng.gauss(0, 0.6))
        self._requests += 1
        fields: dict[str, Any] = {"req": f"{self._requests:x}", "proto": protocol}
        if kind is not None:
            fields["mtype"] = kind
        fields["status"] = status
        if code is not None:
            fields["code"] = code
        fields |= {"size": size, "dur_ms": round(duration_ms, 3), "crypto_ms": round(duration_ms * 0.7, 3)}
        if sender is not None:
            fields["sender"] = sender
        fields["peer"] = self._users[self._requests % 4096]
        self._at(at, "req.done", fields)

    def _fault(self) -> None:
        """Add a refusal, sometimes with a rarer event."""
        rng, now = self._rng, self._now
        protocol, kind, status, code, _ = rng.choices(COMMON_FAULTS, weights=[fault[4] for fault in COMMON_FAULTS])[0]
        self._request(now, protocol, kind, status, 2000, None, code)
        rare = rng.randrange(40)
        user = self._user()
        if rare < 4:
            self._at(now, "limit.hit", {"who": user, "limit": "did_per_minute", "retry_after_s": 20, "peer": user})
            self._request(now, "didcomm", None, 429, 2000, None, RATE_LIMITED_CODES["didcomm"])
        elif rare < 8:
            self._at(now, "replay.drop", {"sender": user, "code": REPLAYED_CODE})
        elif rare < 12:
            self._at(now, "acct.grant", {"did": user, "proto": "didcomm"})
            self._at(now, "acct.update", {"did": user, "proto": "didcomm", "n_added": 1, "n_removed": 0})
        elif rare < 13:
            self._at(now, "acct.deny", {"did": user, "proto": "didcomm", "reason": "policy"})

    def _conn(self) -> str:
        return f"{self._rng.getrandbits(64):016x}"

    def _socket(self) -> None:
        rng, now = self._rng, self._now
        conn, user, protocol = self._conn(), self._user(), "didcomm" if rng.random() < 0.7 else "decentrl"
        lasted = 900 * exp(rng.gauss(0, 1.1))
        self._at(now, "conn.open", {"conn": conn, "transport": "ws", "peer": user})
        self._at(now, "conn.auth", {"conn": conn, "did": user, "proto": protocol})
        n_in, n_out = rng.randrange(1, 40), rng.randrange(1, 40)
        closed = {
            "conn": conn,
            "proto": protocol,
            "dur_ms": round(lasted * 1000, 3),
            "ws_code": rng.choice((1000, 1001, 1006)),
        }
        traffic = {"n_in": n_in, "n_out": n_out, "bytes_in": 800 * n_in, "bytes_out": 2600 * n_out}
        self._at(now + lasted, "conn.close", {**closed, "reason": "peer", **traffic})

    def _gauge(self) -> dict[str, Any]:
        waiting = len(self._calendar)
        return {
            "depth": waiting,
            "bytes": waiting * 1900,
            "rcpts": min(USER_COUNT, waiting),
            "oldest_ms": 7_200_000,
            "conns": 400,
            "rss": 120_000_000,
            "fds": 440,
            "lag_ms": round(self._rng.expovariate(1.0), 3),
        }


BASE_LINES = 600_000
BULK_DAY = date(2026, 6, 15)
_NODE_COUNT = 4
_SEGMENTS_PER_NODE = 2
_DAY_SECONDS = 86_300.0
# Share of truncated lines: about 12 in 600 000.
_TRUNCATED_SHARE = 2e-5
_LINES_PER_MESSAGE = 5.25
_ENDED_STATES = {"msg.ack": "acked", "msg.expire": "expired", "msg.evict": "evicted", "msg.remove": "removed"}
_TRUTH_FILE = "truth.json"


@dataclass(slots=True)
class BulkTruth:
    """
    Ground truth of the generated files.

    :ivar lines: all lines, including damaged ones.
    :ivar size: bytes of all files.
    :ivar events: event to its valid lines.
    :ivar missing: sequence numbers without a valid line.
    :ivar accepted: messages whose `msg.accept` line is valid.
    :ivar ended: acked, expired, evicted or removed to the number of messages.
    :ivar open: messages that have not ended.
    :ivar orphans: messages that ended and whose `msg.accept` line is damaged.
    :ivar drift: counter to the excess of counted over logged events, summed over nodes.
    :ivar busiest: messages accepted for :data:`BUSIEST_ACCOUNT`.
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
    busiest: int = 0

    def __add__(self, other: BulkTruth) -> BulkTruth:
        return BulkTruth(**{name: value + getattr(other, name) for name, value in self.as_dict().items()})

    def as_dict(self) -> dict[str, Any]:
        """Fields as a dict."""
        return {one.name: getattr(self, one.name) for one in fields(self)}


def generate_bulk_logs(
    directory: Path, scale: int | float, *, seed: int = 1, skew: float = 0.0, processes: int = 4
) -> BulkTruth:
    """
    Write 8 files of one day with `scale` times 600 000 lines, unless they exist.

    :param directory: for the files and their ground truth, which are kept.
    :param skew: as in :class:`EventStream`; 0.5 gives one account half of all senders, recipients and sockets.
    :raise ValueError: it has files of another scale, seed or skew.
    """
    truth_file = directory / _TRUTH_FILE
    specification = {"scale": scale, "seed": seed, **({"skew": skew} if skew else {})}
    if truth_file.exists():
        found: dict[str, Any] = json.loads(truth_file.read_text())
        if found.pop("of") != specification:
            raise ValueError(f"{directory} holds other files already")
        values: dict[str, Any] = {name: Counter(n) if isinstance(n, dict) else n for name, n in found.items()}
        return BulkTruth(**values)
    lines = int(BASE_LINES * scale) // _NODE_COUNT
    # Processes with threads, such as one with a JVM, must not fork.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        parts = list(pool.map(partial(_write_node, directory, lines, seed, skew), range(_NODE_COUNT)))
    truth = sum(parts, BulkTruth())
    truth_file.write_text(json.dumps({"of": specification, **truth.as_dict()}))
    return truth


def _write_node(directory: Path, lines: int, seed: int, skew: float, number: int) -> BulkTruth:
    return _NodeWriter(directory / f"node-{number + 1}", lines, Random(f"{seed} {number}"), skew).write()


class _NodeWriter:
    """Writes the day of one node. Messages stay on their node."""

    def __init__(self, directory: Path, lines: int, rng: Random, skew: float) -> None:
        self._directory, self._lines = directory, lines
        self._boot = f"{rng.getrandbits(48):012x}"
        name = directory.name
        self._heads = {
            event: encode_line_head(event, about.level, node=name, boot=self._boot, epoch=KEY_EPOCH)
            for event, about in EVENTS.items()
        }
        self._begin = datetime(BULK_DAY.year, BULK_DAY.month, BULK_DAY.day, tzinfo=UTC).timestamp()
        self._life = EventStream(rng, lines / _LINES_PER_MESSAGE / _DAY_SECONDS, self._begin, skew)
        self._rng = rng
        self._seq = self._last_seen = 0
        self._second, self._prefix = -1, b""
        self._counters = dict.fromkeys(COUNTER_NAMES, 0)
        self._logged: Counter[str] = Counter()
        self._open: set[str] = set()
        self.truth = BulkTruth()

    def write(self) -> BulkTruth:
        """Write all segments; return their contents."""
        self._directory.mkdir(parents=True, exist_ok=True)
        segments = SegmentDirectory(self._directory, self._directory.name, self._boot)
        happenings, at = self._life.generate_events(), self._begin
        for number in range(_SEGMENTS_PER_NODE):
            at = self._segment(segments.next_name(at), at, happenings, first=not number)
        truth = self.truth
        truth.open = len(self._open)
        truth.missing = self._last_seen - sum(truth.events.values())
        return truth

    def _segment(self, stem: str, at: float, happenings: Iterator[SimulatedEvent], *, first: bool) -> float:
        """Write one file; return when it ended."""
        first_seq = self._seq
        with (self._directory / f"{stem}.jsonl").open("wb", 1 << 20) as file:
            file.write(
                self._whole(at, "log.open", {"version": __version__, "schema": SCHEMA_VERSION, "segment": stem})
            )
            if first:
                file.write(self._whole(at, "proc.start", {"version": __version__}))
            for at, event, fields in islice(
                happenings, self._lines // _SEGMENTS_PER_NODE - (self._seq - first_seq) - 2
            ):
                file.write(self._line(at, event, fields if fields else self._counters))
            file.write(self._whole(at, "counters", self._counters))
            about = {
                "seq_first": first_seq + 1,
                "seq_last": self._seq + 1,
                "lines": self._seq + 1 - first_seq,
                "dropped": 0,
            }
            file.write(self._whole(at, "log.close", about))
            self.truth.size += file.tell()
        return at

    def _line(self, at: float, event: str, fields: Mapping[str, Any]) -> bytes:
        """Format a line, sometimes truncated."""
        if self._rng.random() >= _TRUNCATED_SHARE:
            return self._whole(at, event, fields)
        for counter, step in get_counter_steps(event, fields):
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
        for counter, step in get_counter_steps(event, fields):
            self._counters[counter] += step
            self._logged[counter] += step
        if event == "counters":
            truth.drift = Counter({name: value - self._logged[name] for name, value in fields.items()})
        elif event == "msg.accept":
            truth.accepted += 1
            truth.busiest += fields["rcpt"] == BUSIEST_ACCOUNT
            self._open.add(fields["msg"])
        elif event in _ENDED_STATES:
            self._end(event, fields["msg"])
        return self._format(at, event, fields)

    def _end(self, event: str, msg: str) -> None:
        if msg in self._open:
            self._open.remove(msg)
            self.truth.ended[_ENDED_STATES[event]] += 1
        else:
            self.truth.orphans += 1

    def _format(self, at: float, event: str, fields: Mapping[str, Any]) -> bytes:
        second = int(at)
        if second != self._second:
            self._second = second
            self._prefix = strftime("%Y-%m-%dT%H:%M:%S", gmtime(second)).encode()
        stamp = b"%b.%06dZ" % (self._prefix, (at - second) * 1e6)
        return encode_line(self._heads[event] % (stamp, self._seq), fields)
