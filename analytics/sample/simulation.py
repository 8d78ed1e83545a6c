"""Simulated mediator and wallets: wallets with their habits, processes with their logs, the store, the clock."""

from __future__ import annotations

import gzip
import heapq
import io
import os
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from math import exp, log
from pathlib import Path
from random import Random
from typing import Any, Literal

from analytics.sample.ground_truth import (
    CONNECTIONS_COUNTER,
    COUNTER_NAMES,
    DAY_S,
    HOUR_S,
    STORE_ENTRIES,
    SampleSpec,
    SampleTruth,
    TruthRecorder,
    get_counter_steps,
)
from mediatord import __version__
from mediatord.observability.event_schema import (
    EVENTS,
    SCHEMA_VERSION,
    encode_line,
    encode_line_head,
    validate_fields,
)
from mediatord.observability.pseudonyms import Pseudonymizer, PseudonymKey
from mediatord.observability.segments import ACTIVE_SEGMENT_FILE, SegmentDirectory

Protocol = Literal["didcomm", "decentrl"]
RequestProtocol = Literal["didcomm", "didcomm_v1", "decentrl"]

# Share of the day's messages by hour, UTC, times 24: users between London and Helsinki.
_HOURLY_SHARES = (
    *(0.25, 0.18, 0.15, 0.15, 0.2, 0.4, 0.8, 1.2, 1.5, 1.6, 1.6, 1.55),
    *(1.5, 1.5, 1.5, 1.45, 1.4, 1.4, 1.4, 1.35, 1.25, 1.0, 0.7, 0.4),
)
_MEAN_SHARE = sum(_HOURLY_SHARES) / 24
_WEEKDAY_FACTORS = (1.0, 1.05, 1.05, 1.0, 0.95, 0.65, 0.55)
PEAK_ACTIVITY = max(_HOURLY_SHARES) / _MEAN_SHARE * max(_WEEKDAY_FACTORS)

_DORMANT_SHARE = 0.02
# Of the wallets of DIDComm, every so many speak v1.
_V1_WALLET_STEP = 4
_INITIAL_SHARE = 0.75


@dataclass(slots=True, eq=False)
class Message:
    """Queued message, possibly pushed. :ivar expires_at: expiry, seconds since the epoch."""

    message_id: str
    recipient: Wallet
    size: int
    accepted_at: float
    expires_at: float | None
    pushes: int = 0


@dataclass(slots=True, eq=False)
class Socket:
    """:ivar pending: messages pushed and not acknowledged, by id. :ivar traffic: as in `conn.close`."""

    name: str
    wallet: Wallet
    slot: int
    opened: float
    pending: dict[str, Message] = field(default_factory=dict)
    traffic: list[int] = field(default_factory=lambda: [0, 0, 0, 0])


@dataclass(slots=True, eq=False)
class Wallet:
    """
    :ivar proto: of its messages.
    :ivar request_proto: of its requests, connections and account.
    :ivar pace: mean seconds between visits in the busiest hour.
    :ivar waiting: messages by id, oldest first.
    :ivar away: seconds since the epoch until which it stays away.
    :ivar services: push services of its devices.
    :ivar woken: time of the last wake-up.
    """

    did: str
    proto: Protocol
    request_proto: RequestProtocol
    peer: str
    pace: float
    joined: float
    away: float
    waiting: dict[str, Message] = field(default_factory=dict)
    socket: Socket | None = None
    services: tuple[str, ...] = ()
    woken: float = 0.0


class ZipfSampler:
    """Picks members with Zipf-distributed frequency."""

    def __init__(self, members: Sequence[Wallet], rng: Random) -> None:
        self._members = members
        self._sums = list(accumulate(1 / rank for rank in range(1, len(members) + 1)))
        self._rng = rng

    def pick(self, now: float) -> Wallet:
        """Pick a member that has joined."""
        while True:
            found = self._members[bisect_left(self._sums, self._rng.random() * self._sums[-1])]
            if found.joined <= now:
                return found


def get_activity(at: float) -> float:
    """Activity at a time; 1 is the mean of a weekday."""
    moment = datetime.fromtimestamp(at, UTC)
    return _HOURLY_SHARES[moment.hour] / _MEAN_SHARE * _WEEKDAY_FACTORS[moment.weekday()]


def make_wallets(spec: SampleSpec, tags: Pseudonymizer, rng: Random, numbers: range) -> list[Wallet]:
    """Make wallets; some join later, a few never return."""
    return [_make_wallet(number, spec, tags, rng) for number in numbers]


def _make_wallet(number: int, spec: SampleSpec, tags: Pseudonymizer, rng: Random) -> Wallet:
    protocol: Protocol = "didcomm" if rng.random() < 0.7 else "decentrl"
    joined = 0.0 if rng.random() < _INITIAL_SHARE else spec.begin + rng.random() * spec.days * DAY_S
    dormant = protocol == "didcomm" and number > spec.wallets // 10 and rng.random() < _DORMANT_SHARE
    return Wallet(
        did=tags.did(f"did:{'peer:2' if protocol == 'didcomm' else 'decentrl'}:wallet-{number}"),
        proto=protocol,
        request_proto="didcomm_v1" if protocol == "didcomm" and number % _V1_WALLET_STEP == 0 else protocol,
        peer=tags.peer(f"10.{rng.randrange(64)}.{rng.randrange(256)}.1") or "",
        pace=HOUR_S * rng.uniform(1.0, 7.0),
        joined=joined,
        away=float("inf") if dormant else 0.0,
    )


KEY_EPOCH = 1
_TIME_STEP_S = 2e-6


class SimulatedNode:
    """
    Process of a mediator that writes its log; started on construction.

    :param directory: of its segments.
    :param clock: seconds since the epoch.
    :param rng: for its boot id.
    :param tallies: record every readable line.
    :param compress: whether segments are compressed.
    :ivar counters: the daemon's counters, including lost lines.
    :ivar ledger_counts: outcomes of messages, by protocol and entry.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        clock: Callable[[], float],
        rng: Random,
        tallies: Sequence[TruthRecorder],
        *,
        compress: bool = True,
    ) -> None:
        self.name = name
        self.boot = f"{rng.getrandbits(48):012x}"
        self.counters = dict.fromkeys(COUNTER_NAMES, 0)
        self.ledger_counts: Counter[tuple[object, str]] = Counter()
        self.requests = 0
        self._every, self._tallies = tallies, tallies
        self._late: Path | None = None
        self._directory = directory
        self._clock = clock
        self._compress = compress
        self._segments = SegmentDirectory(directory, name, self.boot)
        self._heads = {
            event: encode_line_head(event, about.level, node=name, boot=self.boot, epoch=KEY_EPOCH)
            for event, about in EVENTS.items()
        }
        self._second, self._prefix = -1, b""
        self._at = 0.0
        self._seq = 0
        self._lines: list[bytes] = []
        self._vanishing = self._refused = self._dropped = 0
        directory.mkdir(parents=True, exist_ok=True)
        self._open_segment()
        self.log_event("proc.start", version=__version__)

    @property
    def sockets(self) -> int:
        """Number of open sockets."""
        return self.counters[CONNECTIONS_COUNTER]

    def log_event(self, event: str, **fields: object) -> None:
        """
        Count an event, and write its line unless lines are being lost.

        :raise TypeError: as :meth:`mediatord.observability.event_schema.EventLog.log_event`.
        """
        present = validate_fields(event, fields)
        for counter, step in get_counter_steps(event, present):
            self.counters[counter] += step
        if event in STORE_ENTRIES:
            self.ledger_counts[present["proto"], STORE_ENTRIES[event]] += 1
        if self._refused:
            self._seq += 1
            self._refused -= 1
            self._dropped += 1
            if not self._refused:
                self._append("log.drop", {"dropped": self._dropped, "reason": "disk"})
        else:
            self._append(event, present)

    def lose_lines(self, lines: int) -> None:
        """Lose the next lines silently."""
        self._vanishing = lines

    def fill_disk(self, lines: int) -> None:
        """Drop the next lines with a count, as on a full disk."""
        self._refused = lines

    def rotate(self, late: Path | None = None) -> None:
        """
        Close the segment and open the next.

        :param late: directory for the next segment, hidden from all recorders but the first.
        """
        self._close_segment()
        self._late = late
        self._tallies = self._every if late is None else self._every[:1]
        self._open_segment()

    def stop(self) -> None:
        """Stop normally."""
        self.log_event("proc.stop", version=__version__, reason="signal")
        self._close_segment()
        self._ended()

    def crash(self) -> None:
        """Simulate a power failure: a block of zeros and a torn last line."""
        torn = self._line("counters", self.counters)
        self._lines += [bytes(512) + b"\n", torn[: len(torn) // 2]]
        for tally in self._tallies:
            for _ in range(2):
                tally.damaged(self.name, self._began, self._at)
        self._write(self._segment)
        self._ended()

    def leave_open(self) -> None:
        """Leave the segment open, as a running daemon does."""
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
        self.log_event("counters", **self.counters)
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
        # Times strictly increase.
        self._at = max(self._clock(), self._at + _TIME_STEP_S)
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
            path, content = path.with_name(path.name + ".gz"), compress_segment(content)
        path.write_bytes(content)
        os.utime(path, (self._at, self._at))


def compress_segment(content: bytes) -> bytes:
    """Compress like :mod:`mediatord.observability.segments`: without name and time."""
    target = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=target, compresslevel=6, mtime=0) as file:
        file.write(content)
    return target.getvalue()


_BASE_RSS = 92_000_000
_RSS_PER_SOCKET = 38_000
_BASE_DESCRIPTORS = 31
_STORE_ID = "0f1e2d3c4b5a"


@dataclass(slots=True, eq=False)
class NodeSlot:
    """
    A place for a process, running or not.

    :ivar slowness: factor on durations.
    :ivar late: directory for the next segment if it is to be late, or None.
    """

    number: int
    name: str
    directory: Path
    node: SimulatedNode | None = None
    sockets: dict[str, Socket] = field(default_factory=dict)
    slowness: float = 1.0
    late: Path | None = None


def make_late_directory(directory: Path) -> Path:
    """Directory of late segments."""
    return directory.with_name(directory.name + "-late")


class Simulation:
    """:ivar now: seconds since the epoch. :ivar depth: queued messages. :ivar bytes: their payloads."""

    def __init__(self, spec: SampleSpec, directory: Path) -> None:
        self.spec = spec
        self.rng = Random(spec.seed)
        self.now = spec.begin
        self.tallies = [TruthRecorder(spec)]
        self.slots = [NodeSlot(n, name, directory / name) for n, name in enumerate(spec.processes)]
        self.truth = SampleTruth(spec, directory, {}, {})
        self.depth = self.bytes = self._recipients = 0
        self._order: deque[Message] = deque()
        self._calendar: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._started: list[SimulatedNode] = []
        self._entries = 0

    def schedule(self, when: float, use: Callable[..., None], *args: object) -> None:
        """Schedule a call; calls at the same time run in order."""
        self._entries += 1
        heapq.heappush(self._calendar, (when, self._entries, use, args))

    def run(self, report_days: Callable[[int], None]) -> None:
        """Run all calls up to the end. :param report_days: receives the number of days so far."""
        calendar = self._calendar
        for day in range(1, self.spec.days + 1):
            end = self.spec.begin + day * DAY_S
            while calendar and calendar[0][0] <= end:
                self.now, _, use, args = heapq.heappop(calendar)
                use(*args)
            report_days(day)

    def begin(self) -> None:
        """Start all processes and their periodic events."""
        for slot in self.slots:
            self.start(slot)
            self.schedule(
                self.now + self.spec.gauge_s * (slot.number + 1) / (len(self.slots) + 1), self._minute, slot
            )
        self.schedule(self.now + self.spec.segment_hours * HOUR_S, self._rotate)

    def finish(self) -> SampleTruth:
        """Leave the last segments open, and return the ground truth."""
        for slot in self.get_running_slots():
            if slot.node is not None:
                slot.node.leave_open()
        self.truth.days = self.tallies[0].finish(self.spec.end)
        self.truth.days_before_late = self.tallies[-1].finish(self.spec.end)
        for slot in self.slots:
            late = make_late_directory(self.truth.directory) / slot.name
            self.truth.late += [(path, slot.directory / path.name) for path in sorted(late.glob("events-*"))]
        return self.truth

    def start(self, slot: NodeSlot) -> None:
        """Start a process."""
        compress = self.spec.compress
        slot.node = SimulatedNode(
            slot.name, slot.directory, lambda: self.now, self.rng, self.tallies, compress=compress
        )
        self._started.append(slot.node)

    def get_running_slots(self) -> list[NodeSlot]:
        """Slots with a running process; never empty."""
        return [slot for slot in self.slots if slot.node is not None]

    def enqueue(self, message: Message) -> None:
        """Queue a message."""
        self._recipients += not message.recipient.waiting
        message.recipient.waiting[message.message_id] = message
        self._order.append(message)
        self.depth += 1
        self.bytes += message.size

    def dequeue(self, message: Message) -> None:
        """Remove a message from its queue."""
        del message.recipient.waiting[message.message_id]
        self._recipients -= not message.recipient.waiting
        self.depth -= 1
        self.bytes -= message.size

    def add_recorder(self) -> None:
        """Add a recorder that does not see late segments."""
        self.tallies.append(deepcopy(self.tallies[0]))

    def _oldest_ms(self) -> int:
        while self._order and self._order[0].message_id not in self._order[0].recipient.waiting:
            self._order.popleft()
        return int((self.now - self._order[0].accepted_at) * 1000) if self._order else 0

    def _minute(self, slot: NodeSlot) -> None:
        self.schedule(self.now + self.spec.gauge_s, self._minute, slot)
        node = slot.node
        if node is None:
            return
        lag = self.rng.expovariate(1 / 1.5) + (60.0 * (slot.slowness - 1.0))
        node.log_event(
            "gauge",
            depth=self.depth,
            bytes=self.bytes,
            rcpts=self._recipients,
            oldest_ms=self._oldest_ms(),
            conns=node.sockets,
            rss=_BASE_RSS + _RSS_PER_SOCKET * node.sockets,
            fds=_BASE_DESCRIPTORS + node.sockets,
            lag_ms=lag,
        )
        node.log_event("counters", **node.counters)
        self._ledger(node)

    def _ledger(self, node: SimulatedNode) -> None:
        """Log the store ledger of each protocol."""
        for protocol in ("didcomm", "decentrl"):
            kept = {
                entry: sum(one.ledger_counts[protocol, entry] for one in self._started)
                for entry in STORE_ENTRIES.values()
            }
            waiting = 2 * kept["accepted"] - sum(kept.values())
            totals = {f"all_{entry}": number for entry, number in kept.items()}
            node.log_event(
                "ledger", proto=protocol, store=_STORE_ID, waiting=waiting, difference=0, all_withdrawn=0, **totals
            )

    def _rotate(self) -> None:
        self.schedule(self.now + self.spec.segment_hours * HOUR_S, self._rotate)
        for slot in self.slots:
            if slot.node is not None:
                if slot.late is not None:
                    self.add_recorder()
                slot.node.rotate(slot.late)
                slot.late = None


FORWARD_TYPE = "routing/2.0/forward"
PICKUP_PREFIX = "messagepickup/3.0/"
_V1_PICKUP_PREFIX = "messagepickup/2.0/"
# Message types of the requests of wallets and of those who write to them.
REQUEST_TYPES: Mapping[RequestProtocol, Mapping[str, str]] = {
    "didcomm": {
        "send": FORWARD_TYPE,
        "connect": PICKUP_PREFIX + "live-delivery-change",
        "poll": PICKUP_PREFIX + "status-request",
        "fetch": PICKUP_PREFIX + "delivery-request",
        "acknowledge": PICKUP_PREFIX + "messages-received",
        "enrol": "coordinate-mediation/3.0/mediate-request",
        "register": "coordinate-mediation/3.0/recipient-update",
    },
    "didcomm_v1": {
        "send": "routing/1.0/forward",
        "connect": _V1_PICKUP_PREFIX + "live-delivery-change",
        "poll": _V1_PICKUP_PREFIX + "status-request",
        "fetch": _V1_PICKUP_PREFIX + "delivery-request",
        "acknowledge": _V1_PICKUP_PREFIX + "messages-received",
        "enrol": "coordinate-mediation/1.0/mediate-request",
        "register": "coordinate-mediation/1.0/keylist-update",
    },
    "decentrl": {
        "send": "TWO_WAY_PRIVATE",
        "connect": "AUTHENTICATE",
        "poll": "QUERY_PENDING_EVENTS",
        "fetch": "QUERY_PENDING_EVENTS",
        "acknowledge": "ACKNOWLEDGE_PENDING_EVENTS",
        "enrol": "REQUEST_COMMUNICATION_CONTRACT",
    },
}
Fault = tuple[str, str | None, int, str, float]

# Refusals of an ordinary day: protocol, message type, HTTP status, code, share of messages.
COMMON_FAULTS: tuple[Fault, ...] = (
    ("didcomm", FORWARD_TYPE, 400, "e.p.me.res.not-found", 0.005),
    ("didcomm", None, 400, "e.p.trust.crypto", 0.002),
    ("didcomm", None, 400, "e.p.msg", 0.0015),
    ("didcomm", None, 413, "e.p.me.res.storage.message_too_big", 0.0005),
    ("didcomm", PICKUP_PREFIX + "delivery-request", 200, "e.p.req.not_enroll", 0.001),
    ("didcomm", FORWARD_TYPE, 503, "e.p.me.res.storage", 0.0003),
    ("decentrl", "TWO_WAY_PRIVATE", 404, "RECIPIENT_NOT_REGISTERED", 0.002),
    ("decentrl", None, 400, "INVALID_COMMAND", 0.001),
    ("decentrl", "QUERY_PENDING_EVENTS", 401, "INVALID_SIGNATURE", 0.0005),
    ("decentrl", "TWO_WAY_PRIVATE", 503, "UNAVAILABLE", 0.0002),
)
RATE_LIMITED_CODES = {"didcomm": "e.m.req.rate-limited", "decentrl": "RATE_LIMITED"}
REPLAYED_CODE = "e.p.crypto.message.dejavu"
UNTIMELY_CODE = "TIMESTAMP_OUT_OF_RANGE"


class RequestSimulator:
    """
    :param numbers: of the wallets.
    :ivar wallets: all wallets, including those that have yet to join.
    """

    def __init__(self, world: Simulation, rng: Random, numbers: range) -> None:
        spec = world.spec
        self.world, self.rng = world, rng
        self.tags = Pseudonymizer("keyed", PseudonymKey(1, spec.seed.to_bytes(32, "big")))
        self.wallets = make_wallets(spec, self.tags, self.rng, numbers)
        self._senders = ZipfSampler(self.wallets, self.rng)
        # Ids of messages differ from those of other simulators.
        self._ids = numbers.start << 40

    def log_request(
        self,
        slot: NodeSlot,
        protocol: str,
        kind: str | None,
        status: int,
        *,
        size: int,
        code: str | None = None,
        sender: Wallet | None = None,
        socket: Socket | None = None,
        peer: str | None = None,
    ) -> None:
        """Log a request or frame."""
        duration_ms = self.sample_lognormal(5.5 if kind else 0.9, 0.6) * slot.slowness
        node = self.get_process(slot)
        node.requests += 1
        if socket is not None:
            socket.traffic[0] += 1
            socket.traffic[2] += size
        node.log_event(
            "req.done",
            req=f"{node.requests:x}",
            conn=socket.name if socket else None,
            proto=protocol,
            mtype=kind,
            status=status,
            code=code,
            size=size,
            dur_ms=duration_ms,
            crypto_ms=duration_ms * 0.7 if kind else None,
            sender=sender.did if sender else None,
            peer=peer or (sender.peer if sender else self.pick_sender().peer),
        )

    def pick_sender(self) -> Wallet:
        """Pick a sender."""
        return self._senders.pick(self.world.now)

    def log_refusal(self, fault: Fault) -> None:
        """Log a refused request."""
        protocol, kind, status, code, _ = fault
        slot = self.world.slots[self.pick_running_process()]
        sender = self.pick_sender() if kind and kind != FORWARD_TYPE and status != 401 else None
        self.log_request(
            slot, protocol, kind, status, size=int(self.sample_lognormal(2000, 0.5)), code=code, sender=sender
        )

    def pick_running_process(self) -> int:
        """Pick the number of a running process."""
        return self.rng.choice(self.world.get_running_slots()).number

    def log_event(self, slot: NodeSlot, event: str, **fields: object) -> None:
        """Log an event of a running process."""
        self.get_process(slot).log_event(event, **fields)

    @staticmethod
    def get_process(slot: NodeSlot) -> SimulatedNode:
        """The running process of a slot."""
        assert slot.node is not None
        return slot.node

    def make_message_id(self) -> str:
        """Make the id of a message."""
        self._ids += 1
        return self.tags.message(f"{int(self.world.now * 1000):012x}{self._ids:020x}")

    def sample_lognormal(self, median: float, sigma: float) -> float:
        """Log-normal number with this median."""
        return exp(self.rng.gauss(log(median), sigma))
