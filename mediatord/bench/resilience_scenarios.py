"""
Scenarios of misbehaving clients: a soak with wallets that read slowly or never, and floods beside honest wallets.

Run as a child process (`python -m mediatord.bench.resilience_scenarios`), at a low priority, it reads a
:class:`FloodSetup` as a line of JSON and prints `ready`; each further line, such as
`{"do": "address", "seconds": 10, "rate": 600}`, is one flood, answered by a line of JSON. `address` posts forwards
from one address, `did` forwards of one DID from many, `fresh` forwards of a different DID each from a few; `loris`
sends requests byte by byte, `deaf` opens sockets, sends requests and does not read.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import socket
import sqlite3
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median
from time import perf_counter, sleep
from typing import Any, Literal
from urllib.parse import urlsplit

from mediatord.bench.delivery_scenarios import compute_cycle_figures, find_cycle_failures
from mediatord.bench.didcomm_wallets import (
    FastMessageCodec,
    WalletGroup,
    build_forwards,
    build_inner_envelope,
    enrol_group,
    read_delivery_ids,
)
from mediatord.bench.load_generator import (
    TEXT_OPCODE,
    ClientConnection,
    KeepAliveClient,
    ResponseCounter,
    WebSocketClient,
    encode_frame,
    encode_request,
    loopback_address,
    open_connection,
)
from mediatord.bench.mediator_under_test import DATABASE_FILE, WalletProcess, prepare_mediator
from mediatord.bench.processes import print_line, raise_file_limit, read_line, rss_bytes, spawn_module, write_line
from mediatord.bench.scenario import (
    DAEMON_SETTINGS,
    BenchmarkPlan,
    Figures,
    PerformanceTarget,
    ResultTable,
    format_size,
    run_interleaved,
    safe_ratio,
)
from mediatord.protocol import encoding
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_mediation import PICKUP
from mediatord.wallet.didcomm_messages import authcrypt, build_forward
from mediatord.wallet.temporary_daemon import run_temporary_daemon

ReaderKind = Literal["prompt", "slow", "never"]

SOAK_WALLETS = 200
_SLOW_EVERY, _NEVER_EVERY = 10, 100
_SLOW_READ_BYTES, _SLOW_READ_SECONDS = 2048, 1.0
# A small receive buffer of the kernel, so that the daemon has to queue what is not read.
_KERNEL_BYTES = 4096
_POLL_SECONDS = 0.02


class LiveReader:
    """
    A wallet in live mode that reads at once, slowly, or never, and reconnects when the daemon closes its socket.

    :ivar acknowledged: ids of acknowledged messages.
    :ivar closed: how often the daemon closed the socket.
    """

    def __init__(self, codec: FastMessageCodec, kind: ReaderKind) -> None:
        self.kind = kind
        self.acknowledged: set[str] = set()
        self.closed = 0
        self._codec = codec
        self._open()

    def fileno(self) -> int:
        """For a selector."""
        return self._socket.fileno()

    def read(self) -> bool:
        """
        Read what has arrived, or a little of it, and acknowledge complete messages; whether there was a status.

        :raise OSError: the socket is closed or blocked.
        """
        has_status = False
        for raw in self._socket.take(*([_SLOW_READ_BYTES] if self.kind == "slow" else [])):
            message = self._codec.open(raw)
            if message["type"] == f"{PICKUP}/delivery":
                ids = [id_ for id_, _ in read_delivery_ids(message)]
                self._socket.send(self._codec.acknowledgement(ids))
                self.acknowledged.update(ids)
            has_status = has_status or message["type"] == f"{PICKUP}/status"
        return has_status

    def reconnect(self) -> None:
        """Open a new socket after the daemon closed the old one."""
        self.closed += 1
        self._socket.close()
        self._open()

    def flush(self) -> None:
        """Wait until the daemon has read all acknowledgements."""
        self._socket.send(self._codec.request(f"{PICKUP}/status-request", {}))
        while not self.read():
            pass

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _open(self) -> None:
        kernel_bytes = 0 if self.kind == "prompt" else _KERNEL_BYTES
        self._socket = WebSocketClient(self._codec.mediator.ws_uri or "", kernel_bytes)
        self._socket.send(self._codec.request(f"{PICKUP}/live-delivery-change", {"live_delivery": True}))


class SoakRunner:
    """
    Posts forwards at a fixed rate to readers, one after the other.

    :param bodies: forwards, posted over and over.
    :param sample: called every second.
    :ivar statuses: number of responses by HTTP status.
    """

    def __init__(
        self, url: str, bodies: Sequence[bytes], readers: Sequence[LiveReader], sample: Callable[[], None]
    ) -> None:
        self.statuses: Counter[int] = Counter()
        self._http = KeepAliveClient(url)
        self._bodies = cycle(bodies)
        self._readers = readers
        self._sample = sample
        self._poll = select.epoll()
        self._by_number: dict[int, LiveReader] = {}

    def run(self, seconds: float, backlog: Sequence[bytes]) -> None:
        """
        Run for some time, then until all prompt readers have acknowledged everything.

        :param backlog: posted before, as fast as possible, to fill the sockets that are not read.
        """
        with self._http, self._poll:
            for reader in self._readers:
                self._register(reader)
            for body in backlog:
                self._post(body)
                self._serve(0)
            self._soak(perf_counter() + seconds)
            for reader in self._readers:
                if reader.kind == "prompt":
                    reader.flush()

    def _soak(self, end: float) -> None:
        next_post = next_slow_read = next_sample = perf_counter()
        while (now := perf_counter()) < end:
            self._serve(_POLL_SECONDS)
            if now >= next_slow_read:
                next_slow_read = now + _SLOW_READ_SECONDS
                slow = [reader for reader in self._readers if reader.kind == "slow"]
                for reader in select.select(slow, [], [], 0)[0]:
                    self._read(reader)
            if now >= next_sample:
                next_sample += _SAMPLE_SECONDS
                self._sample()
            while next_post <= now:
                next_post += 1 / _SOAK_RATE
                self._post(next(self._bodies))

    def _register(self, reader: LiveReader) -> None:
        # EPOLLHUP and EPOLLERR are always reported.
        self._by_number[reader.fileno()] = reader
        self._poll.register(reader.fileno(), select.EPOLLIN if reader.kind == "prompt" else 0)

    def _serve(self, timeout: float) -> None:
        for number, events in self._poll.poll(timeout):
            reader = self._by_number[number]
            if reader.kind == "prompt":
                self._read(reader)
            elif events & (select.EPOLLHUP | select.EPOLLERR):
                self._reconnect(reader)

    def _read(self, reader: LiveReader) -> None:
        try:
            reader.read()
        except OSError:
            self._reconnect(reader)

    def _reconnect(self, reader: LiveReader) -> None:
        self._poll.unregister(reader.fileno())
        del self._by_number[reader.fileno()]
        reader.reconnect()
        self._register(reader)

    def _post(self, body: bytes) -> None:
        self.statuses[self._http.post(body).status] += 1


_RESIDENT_GOAL_MIB = 256.0
_GROWTH_GOAL = 0.01
_SOAK_RATE = 150.0
_SAMPLE_SECONDS = 1.0
# About what the kernel buffers for a socket that is not read.
_BACKLOG_BYTES = 6_000_000
# Until every code path was taken, and sockets that are never read were closed.
_SOAK_WARM_UP = 1 / 3
# A socket that does not answer pings is closed within two ping intervals.
_CLOSE_SECONDS = 60.0
_MIB = 1 << 20
_SOAK_COLUMNS = ("warmed up", "most", "end", "accepted", "acknowledged", "waiting", "lost", "prompt", "slow", "never")


def measure_soak(plan: BenchmarkPlan) -> ResultTable:
    """Resident memory over a long time, the fate of every message, and of the sockets that are not read."""
    size, seconds = plan.sizes[0], plan.minutes * 60
    resident: list[int] = []
    with run_temporary_daemon(DAEMON_SETTINGS) as daemon, ExitStack() as stack:
        group = enrol_group(daemon.url, SOAK_WALLETS)
        bodies = build_forwards(group, size, 2 * SOAK_WALLETS)
        readers = [LiveReader(codec, choose_reader_kind(number)) for number, codec in enumerate(group.make_codecs())]
        for reader in readers:
            stack.callback(reader.close)
        runner = SoakRunner(group.mediator.http_uri, bodies, readers, lambda: resident.append(rss_bytes(daemon.pid)))
        backlog = [body for body, reader in zip(bodies, readers, strict=False) if reader.kind != "prompt"]
        runner.run(seconds, backlog * (_BACKLOG_BYTES // len(backlog[0])))
        stored = read_stored_ids(daemon.directory / DATABASE_FILE)
    accepted = runner.statuses[202]
    acknowledged = set().union(*(reader.acknowledged for reader in readers))
    lost = accepted - len(stored | acknowledged)
    closed = {kind: sum(one.closed for one in readers if one.kind == kind) for kind in ("prompt", "slow", "never")}
    rows: dict[str, Figures] = {
        "memory, MiB": {
            "warmed up": resident[int(len(resident) * _SOAK_WARM_UP)] / _MIB,
            "most": max(resident) / _MIB,
            "end": resident[-1] / _MIB,
        },
        "messages": {
            "accepted": float(accepted),
            "acknowledged": float(len(acknowledged)),
            "waiting": float(len(stored - acknowledged)),
            "lost": float(lost),
        },
        "sockets closed": {kind: float(count) for kind, count in closed.items()},
    }
    growth = compute_memory_growth(resident)
    targets = (
        PerformanceTarget("resident MiB", _RESIDENT_GOAL_MIB, max(resident) / _MIB, most=True),
        PerformanceTarget("growth after the first third", _GROWTH_GOAL, growth, most=True),
    )
    notes = (
        f"{plan.minutes:g} minutes, {SOAK_WALLETS} wallets in live mode; one in {_SLOW_EVERY} reads slowly, one in "
        f"{_NEVER_EVERY} never, both with full buffers from the start; {_SOAK_RATE:g} forwards of "
        f"{format_size(size)} per second.",
    )
    failures = find_soak_failures(runner.statuses, lost, closed, seconds)
    return ResultTable("Soak", _SOAK_COLUMNS, rows, targets, notes, failures)


def choose_reader_kind(number: int) -> ReaderKind:
    """How the wallet of this number reads."""
    if number % _NEVER_EVERY == 0:
        return "never"
    return "slow" if number % _SLOW_EVERY == 1 else "prompt"


def read_stored_ids(database: Path) -> set[str]:
    """Ids of all stored messages."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        return {str(id_) for (id_,) in connection.execute("SELECT id FROM message")}


def compute_memory_growth(resident: list[int]) -> float:
    """
    Relative growth of memory after the warm-up, between medians, because the allocator works in megabytes.

    :param resident: samples at equal intervals.
    """
    soaked = resident[int(len(resident) * _SOAK_WARM_UP) :]
    part = max(1, len(soaked) // 5)
    before = median(soaked[:part])
    return (median(soaked[-part:]) - before) / before


def find_soak_failures(
    statuses: dict[int, int], lost: int, closed: dict[str, int], seconds: float
) -> tuple[str, ...]:
    """A sentence for everything that must not happen in a soak."""
    failures = []
    if rejected := {status: count for status, count in statuses.items() if status != 202}:
        failures.append(f"forwards were rejected: {rejected}")
    if lost:
        failures.append(f"{lost} messages were lost")
    if closed["prompt"]:
        failures.append(f"{closed['prompt']} sockets were closed although they were read")
    if seconds > 2 * _CLOSE_SECONDS and not closed["never"]:
        failures.append("sockets that are never read were not closed")
    return tuple(failures)


# Far from the addresses of the honest wallets.
_FIRST_ADDRESS = 200_000
_MANY_ADDRESSES, _FEW_ADDRESSES = 300, 16
_SLOW_CONNECTIONS, _UNREAD_SOCKETS = 4096, 512
_TICK_SECONDS = 0.005
_MAILBOXES = 4
_PARTIAL_REQUEST = b"POST /didcomm HTTP/1.1\r\nHost: a\r\nContent-Length: 10000\r\n\r\n{"


@dataclass(frozen=True, slots=True)
class FloodSetup:
    """
    Parameters of a flood process.

    :param fresh: DIDs that send one forward each.
    :param of_one: forwards of one DID.
    :param size: of the innermost plaintext, in bytes.
    """

    url: str
    fresh: int
    of_one: int
    size: int


class FloodGenerator:
    """Floods a mediator in several ways."""

    def __init__(self, setup: FloodSetup) -> None:
        group = enrol_group(setup.url, _MAILBOXES, short=True)
        target = urlsplit(group.mediator.http_uri)
        self._address = (target.hostname or "", target.port or 80)
        self._path = target.path or "/"
        self._socket_url = group.mediator.ws_uri or ""
        sender = WalletIdentity.generate()
        self._of_one = self._encode_requests(group, [sender] * setup.of_one, setup.size)
        senders = (WalletIdentity.generate() for _ in range(setup.fresh))
        self._of_many = self._encode_requests(group, senders, setup.size)

    def run(self, do: str, seconds: float, rate: float) -> dict[str, Any]:
        """Run one flood; what was sent and what came back."""
        if do == "loris":
            return self._send_slowly(seconds, rate)
        if do == "deaf":
            return self._send_without_reading(seconds, rate)
        addresses = {"address": 1, "did": _MANY_ADDRESSES, "fresh": _FEW_ADDRESSES}[do]
        requests = self._of_many if do == "fresh" else self._of_one
        idle = deque(
            ClientConnection(self._connect(number % addresses))
            for number in range(max(addresses, 4 * _FEW_ADDRESSES))
        )
        connections, responses, sent = {one.fileno(): one for one in idle}, ResponseCounter(), 0
        try:
            with select.epoll() as epoll:
                for number in connections:
                    epoll.register(number, select.EPOLLIN)
                for due in _iterate_due(seconds, rate):
                    for _ in range(min(due, len(idle))):
                        idle.popleft().send(next(requests))
                        sent += 1
                    readable = (connections[number] for number, _ in epoll.poll(0))
                    idle.extend(one for one in readable if responses.take(one))
            return {"sent": sent, "statuses": responses.by_name()}
        finally:
            for connection in connections.values():
                connection.close()

    def _encode_requests(self, group: WalletGroup, senders: Iterable[WalletIdentity], size: int) -> Iterator[bytes]:
        """Forwards over and over, each of the next sender to the next mailbox."""
        hop, requests = group.hop, []
        inner = cycle([(wallet.did, build_inner_envelope(wallet, size)) for wallet in group.wallets])
        for sender in senders:
            recipient, envelope = next(inner)
            message = build_forward(recipient, [envelope], to=[hop.did]) | {"from": sender.did}
            packed = authcrypt(message, sender, hop.document)
            requests.append(encode_request(self._address[1], self._path, packed, host=self._address[0]))
        return cycle(requests)

    def _connect(self, number: int) -> socket.socket:
        return open_connection(*self._address, loopback_address(_FIRST_ADDRESS + number))

    def _send_slowly(self, seconds: float, rate: float) -> dict[str, Any]:
        """Begin thousands of requests, then continue each by one byte at a time."""
        connections: deque[socket.socket] = deque()
        cut_off = 0
        try:
            for due in _iterate_due(seconds, rate):
                for _ in range(due):
                    if len(connections) < _SLOW_CONNECTIONS:
                        connection = self._connect(len(connections) % _FEW_ADDRESSES)
                        connection.setblocking(False)
                        with suppress(OSError):
                            connection.send(_PARTIAL_REQUEST)
                        connections.append(connection)
                        continue
                    connection = connections.popleft()
                    try:
                        connection.send(b" ")
                        connections.append(connection)
                    except OSError:
                        cut_off += 1
                        connection.close()
            return {"sent": int(seconds * rate), "statuses": {}, "kept": len(connections), "cut_off": cut_off}
        finally:
            for connection in connections:
                connection.close()

    def _send_without_reading(self, seconds: float, rate: float) -> dict[str, Any]:
        """Send requests on sockets that were opened before, and read no response."""
        request = encode_frame(encoding.dumps({"id": "1", "type": "nothing"}), TEXT_OPCODE)
        sent = stuck = 0
        with ExitStack() as stack:
            sockets = deque[socket.socket]()
            for number in range(_UNREAD_SOCKETS):
                address = loopback_address(_FIRST_ADDRESS + number % _FEW_ADDRESSES)
                client = WebSocketClient(self._socket_url, _KERNEL_BYTES, address)
                connection = stack.enter_context(closing(socket.socket(fileno=os.dup(client.fileno()))))
                client.close()
                connection.setblocking(False)
                sockets.append(connection)
            for due in _iterate_due(seconds, rate):
                for _ in range(due):
                    sockets.rotate()
                    try:
                        sent += bool(sockets[0].send(request))
                    except OSError:  # full, or closed
                        stuck += 1
        return {"sent": sent, "statuses": {}, "stuck": stuck}


def _iterate_due(seconds: float, rate: float) -> Iterator[int]:
    """Every few milliseconds, the number of requests that are due."""
    start, done = perf_counter(), 0
    while (elapsed := perf_counter() - start) < seconds:
        due = int(elapsed * rate) - done
        done += due
        yield due
        sleep(_TICK_SECONDS)


def serve_floods() -> None:
    """Run the floods from standard input until its end."""
    floods = FloodGenerator(FloodSetup(**json.loads(sys.stdin.readline())))
    print_line("ready")
    for line in sys.stdin:
        print_line(json.dumps(floods.run(**json.loads(line))))


# Of the latency of honest wallets at the 99th percentile.
_FLOOD_GOAL = 2.0
_HONEST_WALLETS, _HONEST_RATE = 64, 60.0
_FLOOD_FACTOR = 10
_FRESH_DIDS = 10_000
# More than are remembered to detect replays, so that none counts as one.
_OF_ONE_DID = 12_000
# A run takes longer than elsewhere: a few messages have no 99th percentile.
_DURATION_FACTOR = 8
# Until the initial burst of the rate limits is used up.
_FLOOD_LEAD_SECONDS = 2.0
# The defaults.
_FLOOD_SETTINGS = {
    "MEDIATORD_LIMITS__DID_PER_MINUTE": "60",
    "MEDIATORD_LIMITS__IP_PER_MINUTE": "120",
    "MEDIATORD_LIMITS__ACCOUNT_PER_MINUTE": "600",
    "MEDIATORD_LIMITS__MAX_CONNECTIONS_PER_IP": "64",
}
_NO_FLOOD = "no flood"
_FLOODS = {
    _NO_FLOOD: "",
    "one address": "address",
    "one DID, 300 addresses": "did",
    "10 000 fresh DIDs, 16 addresses": "fresh",
    "slow-loris, 16 addresses": "loris",
    "sockets not read, 16 addresses": "deaf",
}
_RATIOS = {"202 p99": "x 202 p99", "push p99": "x push p99"}
_FLOOD_COLUMNS = (
    "202 p50", "202 p99", "push p50", "push p99", *_RATIOS.values(), "flood/s", "accepted/s", "CPU %"
)  # fmt: skip


def measure_abuse(plan: BenchmarkPlan) -> ResultTable:
    """Latency of honest wallets with and without a flood beside them."""
    raise_file_limit()
    size, failures = plan.sizes[0], list[str]()
    with (
        prepare_mediator(plan, _FLOOD_SETTINGS) as mediator,
        mediator.wallet_process(_HONEST_WALLETS, size, _HONEST_WALLETS * 8) as online,
        spawn_module("mediatord.bench.resilience_scenarios") as process,
    ):
        online.do("live", apart=True)
        write_line(process, json.dumps(asdict(FloodSetup(mediator.url, _FRESH_DIDS, _OF_ONE_DID, size))))
        read_line(process)
        run = partial(
            _run_beside_flood,
            online,
            process,
            plan.seconds * _DURATION_FACTOR,
            failures,
            lambda: mediator.cpu_seconds,
        )
        run("")
        rounds = run_interleaved({name: partial(run, do) for name, do in _FLOODS.items()}, plan.rounds)
        left = online.do("waiting")["messages"]
    if left:
        failures.append(f"{left} messages were acknowledged and are still queued")
    rows = {
        name: rounds.medians(name)
        | {ratio: rounds.ratio(name, _NO_FLOOD, figure) for figure, ratio in _RATIOS.items()}
        for name in rounds.found
    }
    targets = tuple(
        PerformanceTarget(f"{name}, {ratio}", _FLOOD_GOAL, rows[name][ratio], True)
        for name in rows
        if name != _NO_FLOOD
        for ratio in _RATIOS.values()
    )
    notes = (
        f"{_HONEST_WALLETS} wallets in live mode, each at its own address, receive {_HONEST_RATE:.0f} messages per "
        "second in total.",
        f"A flood has {_FLOOD_FACTOR} times that rate and starts {_FLOOD_LEAD_SECONDS:.0f} s earlier; limits are the "
        "defaults.",
        f"Milliseconds since a forward was due, and relative to runs without a flood. {mediator.note}",
    )
    return ResultTable("Latency during a flood", _FLOOD_COLUMNS, rows, targets, notes, tuple(failures))


def _run_beside_flood(
    online: WalletProcess,
    process: subprocess.Popen[str],
    seconds: float,
    failures: list[str],
    get_cpu_seconds: Callable[[], float],
    do: str,
) -> Figures:
    """:param do: the flood; empty for none."""
    flood: dict[str, Any] = {"sent": 0, "statuses": {}}
    flood_seconds = seconds + _FLOOD_LEAD_SECONDS
    if do:
        rate = _FLOOD_FACTOR * _HONEST_RATE
        write_line(process, json.dumps({"do": do, "seconds": flood_seconds, "rate": rate}))
    sleep(_FLOOD_LEAD_SECONDS)
    before = get_cpu_seconds()
    seed = secrets.randbits(32)
    result = online.do(
        "cycle", seconds=seconds, connections=_HONEST_WALLETS, rate=_HONEST_RATE, seed=seed, apart=True
    )
    spent = get_cpu_seconds() - before
    if do:
        flood = json.loads(read_line(process))
    failures += find_cycle_failures(result)
    return compute_cycle_figures(result, spent) | {
        "flood/s": safe_ratio(flood["sent"], flood_seconds),
        "accepted/s": safe_ratio(flood["statuses"].get("202", 0), flood_seconds),
        "CPU %": 100 * safe_ratio(spent, result["seconds"]),
    }


if __name__ == "__main__":
    os.nice(10)
    raise_file_limit()
    serve_floods()
