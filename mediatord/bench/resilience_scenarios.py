"""
Wallets of three kinds for a soak: nearly all read and acknowledge at once, some read slowly, a few never.

Whoever is shed comes back. Forwards to all of them are posted in a beat; one that is not answered in time holds up
those behind it, since the soak is about what stays, not about speed.

Whether the daemon stays as it is, for half an hour, while some of those that it pushes to do not keep up.

Those who do not behave, as a process of its own that makes way for all others.

It speaks by lines. The first one it reads, a :class:`Setup` as JSON, has it make ready what it floods with; then it
says `ready`. Each further line, `{"do": "address", "seconds": 10, "rate": 600}`, is one flood, and is answered with
what was sent and what came back: `address` posts forwards from one address, `did` forwards of one DID from many,
`fresh` forwards of which each is of another DID, from a few; `loris` begins requests and drips them, `deaf` opens
sockets, asks and does not read.

What those who behave notice of those who do not.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sqlite3
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any, Literal
from urllib.parse import urlsplit

from mediatord.bench.delivery_scenarios import compute_cycle_figures, cycle_failures, enrol_codecs
from mediatord.bench.didcomm_wallets import (
    PICKUP,
    FastMessageCodec,
    WalletGroup,
    build_forwards,
    build_inner_envelope,
    enrol_group,
    fetch_mediator,
    read_delivery_ids,
)
from mediatord.bench.load_generator import (
    TEXT_OPCODE,
    ClientConnection,
    ResponseCounter,
    WebSocketClient,
    encode_frame,
    encode_request,
    is_complete_response,
    loopback_address,
    open_connection,
)
from mediatord.bench.mediator_under_test import DATABASE_FILE, WalletProcess, prepare_mediator
from mediatord.bench.processes import raise_file_limit, read_line, rss_bytes, spawn_module, write_line
from mediatord.bench.scenario import (
    DAEMON_SETTINGS,
    BenchmarkPlan,
    Figures,
    PerformanceTarget,
    ResultTable,
    compute_percentile,
    format_size,
    run_interleaved,
    safe_ratio,
)
from mediatord.protocol import encoding
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_messages import authcrypt, build_forward
from mediatord.wallet.temporary_daemon import run_temporary_daemon

ReaderKind = Literal["prompt", "slow", "never"]

# Of those that are slow: so much once in so many seconds.
_SLOW_READ_BYTES = 2048
_SLOW_READ_SECONDS = 1.0
# Of who reads slowly or never, the kernel keeps little, so that it is up to the daemon.
_READER_KERNEL_BYTES = 4096
_POLL_SECONDS = 0.02


class LiveReader:
    """
    A wallet and its socket in live mode, for as long as it has one.

    :ivar acknowledged: ids of messages that it has said to have received.
    :ivar shed: how often its socket was closed by the other side.
    """

    def __init__(self, codec: FastMessageCodec, kind: ReaderKind) -> None:
        self.kind = kind
        self.acknowledged: set[str] = set()
        self.shed = 0
        self._codec = codec
        self._socket = self._open()

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def read(self) -> None:
        """
        Read what there is, or a sip of it, and acknowledge what is whole.

        :raise OSError: the socket is closed, or stuck.
        """
        for raw in self._socket.take(*([_SLOW_READ_BYTES] if self.kind == "slow" else [])):
            message = self._codec.open(raw)
            if message["type"] == f"{PICKUP}/delivery":
                ids = [id_ for id_, _ in read_delivery_ids(message)]
                self._socket.send(self._codec.acknowledgement(ids))
                self.acknowledged.update(ids)

    def reconnect(self) -> None:
        """After it was shed."""
        self.shed += 1
        self._socket.close()
        self._socket = self._open()

    def settle(self) -> None:
        """Until the daemon has served all that was said; what is pushed meanwhile is acknowledged as well."""
        self._socket.send(self._codec.request(f"{PICKUP}/status-request", {}))
        while True:
            for raw in self._socket.take():
                message = self._codec.open(raw)
                if message["type"] == f"{PICKUP}/status":
                    return
                ids = [id_ for id_, _ in read_delivery_ids(message)]
                self._socket.send(self._codec.acknowledgement(ids))
                self.acknowledged.update(ids)
                self._socket.send(self._codec.request(f"{PICKUP}/status-request", {}))

    def close(self) -> None:
        """For good."""
        self._socket.close()

    def _open(self) -> WebSocketClient:
        kernel = 0 if self.kind == "prompt" else _READER_KERNEL_BYTES
        socket = WebSocketClient(self._codec.mediator.ws_uri or "", kernel)
        socket.send(self._codec.request(f"{PICKUP}/live-delivery-change", {"live_delivery": True}))
        return socket


class SoakRunner:
    """
    A soak.

    :param requests: forwards, to be posted again and again.
    :param rate: of them, per second.
    :param sample: called once in `every` seconds.
    :ivar statuses: how often each HTTP status came.
    """

    def __init__(
        self,
        address: tuple[str, int],
        requests: Sequence[bytes],
        readers: Sequence[LiveReader],
        rate: float,
        sample: Callable[[], None],
        every: float,
    ) -> None:
        self.statuses: Counter[str] = Counter()
        self._requests = cycle(requests)
        self._readers = readers
        self._interval = 1 / rate
        self._sample = sample
        self._every = every
        self._line = open_connection(*address)
        self._poll = select.epoll()
        self._by_number: dict[int, LiveReader] = {}

    def run(self, seconds: float, jam: Sequence[bytes] = ()) -> None:
        """
        For so long, and then until everything is settled that can be.

        :param jam: what is posted before that, as fast as may be, so that the sockets that are not read are full.
        """
        for reader in self._readers:
            self._watch(reader)
        for request in jam:
            self._post(request)
            self._serve(0)
        self._soak(perf_counter() + seconds)
        for reader in self._readers:
            if reader.kind == "prompt":
                reader.settle()
        self._poll.close()
        self._line.close()

    def _soak(self, end: float) -> None:
        next_post = next_slow_read = sampled = perf_counter()
        while (now := perf_counter()) < end:
            self._serve()
            if now >= next_slow_read:
                next_slow_read = now + _SLOW_READ_SECONDS
                self._read_slowly()
            if now >= sampled:
                sampled += self._every
                self._sample()
            while next_post <= now:
                next_post += self._interval
                self._post(next(self._requests))

    def _watch(self, reader: LiveReader) -> None:
        # That it was closed is told of in any case.
        events = select.EPOLLIN if reader.kind == "prompt" else 0
        self._by_number[reader.fileno()] = reader
        self._poll.register(reader.fileno(), events)

    def _serve(self, patience: float = _POLL_SECONDS) -> None:
        for number, events in self._poll.poll(patience):
            reader = self._by_number[number]
            if reader.kind == "prompt":
                self._read(reader)
            elif events & (select.EPOLLHUP | select.EPOLLERR):
                self._reconnect(reader)

    def _read_slowly(self) -> None:
        readable, _, _ = select.select([one for one in self._readers if one.kind == "slow"], [], [], 0)
        for reader in readable:
            self._read(reader)

    def _read(self, reader: LiveReader) -> None:
        try:
            reader.read()
        except OSError:
            self._reconnect(reader)

    def _reconnect(self, reader: LiveReader) -> None:
        self._poll.unregister(reader.fileno())
        del self._by_number[reader.fileno()]
        reader.reconnect()
        self._watch(reader)

    def _post(self, request: bytes) -> None:
        self._line.sendall(request)
        answer = b""
        while not is_complete_response(answer):
            data = self._line.recv(65_536)
            if not data:
                raise ConnectionError("the daemon closed a connection")
            answer += data
        self.statuses[answer[9:12].decode("ascii")] += 1


RESIDENT_MIB_GOAL = 256.0
GROWTH_GOAL = 0.01

SOAK_WALLETS = 200
# One in ten reads slowly, one in a hundred never.
_SLOW_EVERY, _NEVER_EVERY = 10, 100
_RATE = 150.0
_SAMPLE_SECONDS = 1.0
# What the kernel takes for a socket that is not read, about, before the daemon has to keep anything.
_JAM_BYTES = 6_000_000
# Until every path was taken, and whoever never reads was shed.
_WARM_UP = 1 / 3
# A socket that does not answer pings is given up within two of their intervals.
_SHED_SECONDS = 60.0
_MIB = 1 << 20


def measure_soak(plan: BenchmarkPlan) -> ResultTable:
    """Resident memory over the whole time; what became of every message, and of the sockets that are not read."""
    size, seconds = plan.sizes[0], plan.minutes * 60
    resident: list[int] = []
    with run_temporary_daemon(DAEMON_SETTINGS) as daemon:
        mediator = fetch_mediator(daemon.url)
        codecs = enrol_codecs(mediator, SOAK_WALLETS)
        group = WalletGroup(mediator, tuple(codec.wallet for codec in codecs))
        target = urlsplit(mediator.http_uri)
        address = (target.hostname or "", target.port or 80)
        requests = [
            encode_request(address[1], target.path, body) for body in build_forwards(group, size, 2 * SOAK_WALLETS)
        ]
        readers = [LiveReader(codec, choose_reader_kind(number)) for number, codec in enumerate(codecs)]
        runner = SoakRunner(
            address,
            requests,
            readers,
            _RATE,
            lambda: resident.append(rss_bytes(daemon.pid)),
            _SAMPLE_SECONDS,
        )
        try:
            jam = [
                one for number, one in enumerate(requests[:SOAK_WALLETS]) if choose_reader_kind(number) != "prompt"
            ]
            runner.run(seconds, jam * (_JAM_BYTES // len(jam[0])))
        finally:
            for reader in readers:
                reader.close()
        stored = read_stored_ids(daemon.directory / DATABASE_FILE)
    accepted = runner.statuses["202"]
    acknowledged = set().union(*(reader.acknowledged for reader in readers))
    lost = accepted - len(stored | acknowledged)
    shed = {kind: sum(one.shed for one in readers if one.kind == kind) for kind in ("prompt", "slow", "never")}
    grown = compute_memory_growth(resident)
    rows: dict[str, Figures] = {
        "memory, MiB": {
            "warmed up": resident[int(len(resident) * _WARM_UP)] / _MIB,
            "most": max(resident) / _MIB,
            "end": resident[-1] / _MIB,
        },
        "messages": {
            "accepted": float(accepted),
            "acknowledged": float(len(acknowledged)),
            "waiting": float(len(stored - acknowledged)),
            "lost": float(lost),
        },
        "sockets shed": {kind: float(count) for kind, count in shed.items()},
    }
    columns = ("warmed up", "most", "end", "accepted", "acknowledged", "waiting", "lost", "prompt", "slow", "never")
    targets = (
        PerformanceTarget("resident MiB", RESIDENT_MIB_GOAL, max(resident) / _MIB, most=True),
        PerformanceTarget("growth after the first third", GROWTH_GOAL, grown, most=True),
    )
    notes = (
        f"{plan.minutes:g} minutes, {SOAK_WALLETS} wallets in live mode, one in {_SLOW_EVERY} reads slowly, one in "
        f"{_NEVER_EVERY} never, and their lines are full from the beginning; {_RATE:g} forwards of {format_size(size)} "
        "a second.",
    )
    failures = soak_failures(dict(runner.statuses), lost, shed, seconds)
    return ResultTable("Soak", columns, rows, targets, notes, failures)


def choose_reader_kind(number: int) -> ReaderKind:
    """How the wallet of this number reads."""
    if number % _NEVER_EVERY == 0:
        return "never"
    return "slow" if number % _SLOW_EVERY == 1 else "prompt"


def read_stored_ids(database: Path) -> set[str]:
    """Of all messages that wait."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return {str(id_) for (id_,) in connection.execute("SELECT id FROM message")}


def compute_memory_growth(resident: list[int]) -> float:
    """
    By how much more of itself memory was larger at the end than after the warm-up; medians, because the allocator
    takes and gives back by megabytes.

    :param resident: samples in even distances, from the beginning to the end.
    """
    soaked = resident[int(len(resident) * _WARM_UP) :]
    part = max(1, len(soaked) // 5)
    before = median(soaked[:part])
    return (median(soaked[-part:]) - before) / before


def soak_failures(statuses: dict[str, int], lost: int, shed: dict[str, int], seconds: float) -> tuple[str, ...]:
    """What must not happen, in words."""
    found = []
    refused = {status: count for status, count in statuses.items() if status != "202"}
    if refused:
        found.append(f"forwards were refused: {refused}")
    if lost:
        found.append(f"{lost} messages were lost")
    if shed["prompt"]:
        found.append(f"{shed['prompt']} sockets were shed that are read")
    if seconds > 2 * _SHED_SECONDS and not shed["never"]:
        found.append("sockets that are never read were not shed")
    return tuple(found)


# Far from the addresses of those who behave.
_FIRST_ADDRESS = 200_000
_MANY_ADDRESSES, _FEW_ADDRESSES = 300, 16
_SLOW_CONNECTIONS, _UNREAD_SOCKETS = 4096, 512
_TICK_SECONDS = 0.005
_MAILBOXES = 4
_PARTIAL_REQUEST = b"POST /didcomm HTTP/1.1\r\nHost: a\r\nContent-Length: 10000\r\n\r\n{"
_UNREAD_KERNEL_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FloodSetup:
    """
    :param fresh: DIDs that send one forward each.
    :param of_one: forwards of one DID.
    :param size: of the plaintext in an inner envelope, in bytes.
    """

    url: str
    fresh: int
    of_one: int
    size: int


class FloodGenerator:
    """All that one process can do."""

    def __init__(self, setup: FloodSetup) -> None:
        group = enrol_group(setup.url, _MAILBOXES, short=True)
        target = urlsplit(group.mediator.http_uri)
        self._address = (target.hostname or "", target.port or 80)
        self._path = target.path or "/"
        self._url = group.mediator.ws_uri or ""
        sender = WalletIdentity.fresh()
        self._of_one = self._requests(group, [sender] * setup.of_one, setup.size)
        self._of_many = self._requests(group, (WalletIdentity.fresh() for _ in range(setup.fresh)), setup.size)

    def run(self, do: str, seconds: float, rate: float) -> dict[str, Any]:
        """One flood."""
        if do == "loris":
            return self._drip(seconds, rate)
        if do == "deaf":
            return self._ask_and_not_read(seconds, rate)
        addresses = {"address": 1, "did": _MANY_ADDRESSES, "fresh": _FEW_ADDRESSES}[do]
        requests = self._of_many if do == "fresh" else self._of_one
        lines = deque(
            ClientConnection(open_connection(*self._address, loopback_address(_FIRST_ADDRESS + number % addresses)))
            for number in range(max(addresses, 4 * _FEW_ADDRESSES))
        )
        try:
            return _post_flood(lines, requests, seconds, rate)
        finally:
            for line in lines:
                line.close()

    def _requests(self, group: WalletGroup, senders: Any, size: int) -> Iterator[bytes]:
        """Forwards for ever, each of the next sender to the next mailbox."""
        mediator, made = group.hop, []
        letters = cycle([(wallet.did, build_inner_envelope(wallet, size)) for wallet in group.wallets])
        for sender in senders:
            next_, letter = next(letters)
            message = build_forward(next_, [letter], to=[mediator.did]) | {"from": sender.did}
            packed = authcrypt(message, sender, mediator.document)
            made.append(encode_request(self._address[1], self._path, packed, host=self._address[0]))
        return cycle(made)

    def _drip(self, seconds: float, rate: float) -> dict[str, Any]:
        """Begin requests until there are thousands, and go on with each of them by a byte."""
        open_ones: deque[socket.socket] = deque()
        cut_off = 0
        try:
            for due in _due_requests(seconds, rate):
                for _ in range(due):
                    if len(open_ones) < _SLOW_CONNECTIONS:
                        open_ones.append(self._begun(len(open_ones)))
                        continue
                    one = open_ones.popleft()
                    try:
                        one.send(b" ")
                        open_ones.append(one)
                    except OSError:
                        cut_off += 1
                        one.close()
            return {"sent": int(seconds * rate), "statuses": {}, "kept": len(open_ones), "cut_off": cut_off}
        finally:
            for one in open_ones:
                one.close()

    def _begun(self, number: int) -> socket.socket:
        connection = open_connection(*self._address, loopback_address(_FIRST_ADDRESS + number % _FEW_ADDRESSES))
        connection.setblocking(False)
        with suppress(OSError):
            connection.send(_PARTIAL_REQUEST)
        return connection

    def _ask_and_not_read(self, seconds: float, rate: float) -> dict[str, Any]:
        """On sockets that all are open before the time begins."""
        question = encode_frame(encoding.dumps({"id": "1", "type": "nothing"}), TEXT_OPCODE)
        sent = stuck = 0
        with ExitStack() as stack:
            sockets = deque(self._deaf(number, stack) for number in range(_UNREAD_SOCKETS))
            for due in _due_requests(seconds, rate):
                for _ in range(due):
                    sockets.rotate()
                    try:
                        sent += bool(sockets[0].send(question))
                    except OSError:  # full, or cut off
                        stuck += 1
        return {"sent": sent, "statuses": {}, "stuck": stuck}

    def _deaf(self, number: int, stack: ExitStack) -> socket.socket:
        raw = WebSocketClient(
            self._url, _UNREAD_KERNEL_BYTES, loopback_address(_FIRST_ADDRESS + number % _FEW_ADDRESSES)
        )
        connection = stack.enter_context(closing(socket.socket(fileno=os.dup(raw.fileno()))))
        raw.close()
        connection.setblocking(False)
        return connection


def _due_requests(seconds: float, rate: float) -> Iterator[int]:
    """Every few milliseconds, how much is due; what was missed is made up for."""
    start, done = perf_counter(), 0
    while (passed := perf_counter() - start) < seconds:
        due = int(passed * rate) - done
        done += due
        yield due
        sleep(_TICK_SECONDS)


def _post_flood(
    lines: deque[ClientConnection], requests: Iterator[bytes], seconds: float, rate: float
) -> dict[str, Any]:
    """As many as are due, on connections that take turns."""
    answers, by_number, idle, sent = ResponseCounter(), {line.fileno(): line for line in lines}, deque(lines), 0
    with select.epoll() as epoll:
        for number in by_number:
            epoll.register(number, select.EPOLLIN)
        for due in _due_requests(seconds, rate):
            for _ in range(min(due, len(idle))):
                idle.popleft().send(next(requests))
                sent += 1
            idle.extend(by_number[number] for number, _ in epoll.poll(0) if answers.take(by_number[number]))
    return {"sent": sent, "statuses": answers.by_name()}


def serve_floods() -> None:
    """Until there is nothing more to read."""
    floods = FloodGenerator(FloodSetup(**json.loads(sys.stdin.readline())))
    _write_output_line("ready")
    for line in sys.stdin:
        _write_output_line(json.dumps(floods.run(**json.loads(line))))


def _write_output_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


# Of the latency of others, at the 99th percentile.
FLOOD_LATENCY_GOAL = 2.0

# Wallets that behave, each at an address of its own, and messages a second between all of them.
HONEST_WALLETS = 64
HONEST_RATE = 60.0
# As many times as all of them together.
FLOOD_FACTOR = 10
FRESH_DIDS = 10_000
# More than of which repetitions are noticed, so that none counts as one.
_OF_ONE_DID = 12_000
# A turn takes so many times as long as elsewhere: of a few messages there is no 99th percentile.
_DURATION_FACTOR = 8
# What limits allow at first is used up.
_BEFORE_SECONDS = 2.0

# The limits as they are by default.
_SETTINGS = {
    "MEDIATORD_LIMITS__DID_PER_MINUTE": "60",
    "MEDIATORD_LIMITS__IP_PER_MINUTE": "120",
    "MEDIATORD_LIMITS__ACCOUNT_PER_MINUTE": "600",
    "MEDIATORD_LIMITS__MAX_CONNECTIONS_PER_IP": "64",
}
_NO_FLOOD = "nobody else"
_FLOODS = {
    "one address": "address",
    "one DID, 300 addresses": "did",
    "10 000 fresh DIDs, 16 addresses": "fresh",
    "slow-loris, 16 addresses": "loris",
    "sockets not read, 16 addresses": "deaf",
}
_LATENCIES = ("202 p50", "202 p99", "push p50", "push p99")
_TIMES = {"202 p99": "x 202 p99", "push p99": "x push p99"}
_COLUMNS = (*_LATENCIES, *_TIMES.values(), "flood/s", "accepted/s", "CPU %")


def measure_abuse(plan: BenchmarkPlan) -> ResultTable:
    """The same load with and without a flood beside it, in turns."""
    raise_file_limit()
    size, failures = plan.sizes[0], list[str]()
    with (
        prepare_mediator(plan, _SETTINGS) as one,
        one.wallet_process(HONEST_WALLETS, size, HONEST_WALLETS * 8) as online,
    ):
        online.do("live", apart=True)
        with _start_flood_process(FloodSetup(one.url, FRESH_DIDS, _OF_ONE_DID, size)) as flood:
            turns = _FloodComparison(
                online, flood, plan.seconds * _DURATION_FACTOR, failures, lambda: one.cpu_seconds
            )
            turns.run("")
            contenders = {_NO_FLOOD: ""} | _FLOODS
            rounds = run_interleaved({name: partial(turns.run, do) for name, do in contenders.items()}, plan.rounds)
        left = online.do("waiting")["messages"]
    if left:
        failures.append(f"{left} messages were acknowledged and are still there")
    rows: dict[str, Figures] = {}
    for name in rounds.found:
        times = {called: rounds.ratio(name, _NO_FLOOD, figure) for figure, called in _TIMES.items()}
        rows[name] = rounds.medians(name) | times
    targets = tuple(
        PerformanceTarget(f"{name}, {called}", FLOOD_LATENCY_GOAL, rows[name][called], True)
        for name in _FLOODS
        for called in _TIMES.values()
    )
    notes = (
        f"{HONEST_WALLETS} wallets in live mode, each at its own address, get {HONEST_RATE:.0f} messages a second between them.",
        f"Floods are {FLOOD_FACTOR} times as much, for {_BEFORE_SECONDS:.0f} s before as well; limits are those by default.",
        f"Milliseconds since a forward was to be sent, and times that of turns with nobody else. {one.note}",
    )
    return ResultTable("What a flood costs others", _COLUMNS, rows, targets, notes, tuple(failures))


@contextmanager
def _start_flood_process(setup: FloodSetup) -> Iterator[subprocess.Popen[str]]:
    with spawn_module("mediatord.bench.resilience_scenarios") as process:
        write_line(process, json.dumps(asdict(setup)))
        read_line(process)
        yield process


class _FloodComparison:
    """Of the same wallets, with or without a flood."""

    def __init__(
        self, online: WalletProcess, flood: subprocess.Popen[str], seconds: float, failures: list[str], spent: Any
    ) -> None:
        self._online = online
        self._flood = flood
        self._seconds = seconds
        self._failures = failures
        self._spent = spent
        self._turns = 0

    def run(self, do: str) -> Figures:
        """One turn, and what is wrong with it."""
        self._turns += 1
        flooded: dict[str, Any] = {"sent": 0, "statuses": {}}
        seconds = self._seconds + _BEFORE_SECONDS
        if do:
            write_line(self._flood, json.dumps({"do": do, "seconds": seconds, "rate": FLOOD_FACTOR * HONEST_RATE}))
        sleep(_BEFORE_SECONDS)
        before = self._spent()
        found = self._online.do(
            "cycle", seconds=self._seconds, connections=HONEST_WALLETS, rate=HONEST_RATE, seed=self._turns, apart=True
        )
        spent = self._spent() - before
        if do:
            flooded = json.loads(read_line(self._flood))
        self._failures += cycle_failures(found)
        return compute_cycle_figures(found, spent) | {
            "202 p99": compute_percentile(found["accepted_us"], 0.99) / 1000,
            "flood/s": safe_ratio(flooded["sent"], seconds),
            "accepted/s": safe_ratio(flooded["statuses"].get("202", 0), seconds),
            "CPU %": 100 * safe_ratio(spent, found["seconds"]),
        }


if __name__ == "__main__":
    os.nice(10)
    raise_file_limit()
    serve_floods()
