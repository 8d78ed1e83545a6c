"""Scenarios of resident memory: over many messages, of idle sockets, and in a soak with wallets that do not read."""

from __future__ import annotations

import select
import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Literal

from mediatord.bench.load_generator import Load
from mediatord.bench.measured_mediator import ForwardLoad, MeasuredMediator, open_mediator
from mediatord.bench.plan import BenchmarkPlan
from mediatord.bench.processes import limit_sockets, rss_bytes
from mediatord.bench.raw_clients import KERNEL_BYTES, WebSocketClient
from mediatord.bench.results import ResultTable, format_size, progress_bar, scenario, time_bar
from mediatord.bench.wallet_group import BlockingWallet, require_socket_url

_KIB, _MIB = 1 << 10, 1 << 20
_RSS, _BYTES_PER_MESSAGE = "RSS MiB", "bytes per message"
# About the size of the smallest leak: an object with a string.
_FLAT_BYTES_PER_MESSAGE = 200.0
# Several messages in a forward (Routing 2.0): it is messages that must not leave anything behind.
_PAYLOADS = 5
_LEGS = 5


@scenario("Memory over many messages", (_RSS, _BYTES_PER_MESSAGE))
def measure_memory(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Resident memory after a warm-up, and after each fifth of the messages."""
    leg, resident = plan.messages // _LEGS, []
    with open_mediator(plan) as mediator:
        table.rows["started"] = {_RSS: rss_bytes(mediator.pid) / _MIB}
        load = ForwardLoad(mediator, table.failures, short=False)
        load.prepare(plan.sizes[0], payloads=_PAYLOADS)
        with progress_bar(range(_LEGS + 1), "messages") as legs:
            for number in legs:
                load.post(plan.clients, requests=max(1, leg // _PAYLOADS), payloads=_PAYLOADS)
                resident.append(rss_bytes(mediator.pid))
                table.rows[f"after {number * leg} more" if number else "warmed up"] = {_RSS: resident[-1] / _MIB}
    growth = growth_per_message(resident, leg)
    table.rows["growth"] = {_BYTES_PER_MESSAGE: growth}
    if growth > _FLAT_BYTES_PER_MESSAGE:
        table.failures.append(f"memory grew by {growth:.0f} bytes with every message")
    table.notes = [
        f"{format_size(plan.sizes[0])} each, {_PAYLOADS} in a forward; the limit of growth is "
        f"{_FLAT_BYTES_PER_MESSAGE:.0f} bytes.",
    ]


def growth_per_message(resident: list[int], leg: int) -> float:
    """
    Bytes of growth per message, between the medians of the earlier and the later half.

    Medians, because a single figure jumps by megabytes with the state of the allocator.

    :param resident: memory after each leg; an even number of figures.
    :param leg: messages between two figures.
    """
    half = len(resident) // 2
    return (median(resident[half:]) - median(resident[:half])) / (half * leg)


_WARM_UP_SOCKETS = 50


@scenario("Idle WebSockets", ("KiB each", _RSS))
def measure_sockets(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Resident memory of an idle socket, first connected, then in live mode, each of its own wallet and account."""
    count = limit_sockets(plan.sockets)
    with open_mediator(plan) as mediator:
        wallets = mediator.enrol(count, short=False).wallets
        for wallet in wallets[:_WARM_UP_SOCKETS]:  # loads code and primes allocators
            live = mediator.connect(wallet)
            live.enable_live_delivery()
            live.close()
        before = rss_bytes(mediator.pid)

        def add_row(state: str) -> float:
            resident = rss_bytes(mediator.pid)
            each = (resident - before) / count / _KIB
            table.rows[f"{count} {state}"] = {"KiB each": each, _RSS: resident / _MIB}
            return each

        with progress_bar(wallets, "sockets") as connecting:
            sockets = [mediator.connect(wallet) for wallet in connecting]
        add_row("connected")
        for live in sockets:
            live.enable_live_delivery()
        each = add_row("in live mode")
    table.add_target(f"KiB of a live socket, {count} held", 12.0, each, most=True)
    table.notes = [
        f"Without sockets the daemon has {before / _MIB:.1f} MiB with {count} accounts enrolled. Each socket "
        f"belongs to its own wallet, with a DID of {len(wallets[0].did)} characters.",
        "The kernel's memory for sockets is not counted. The goal is for 10000 (--sockets 10000).",
    ]


ReaderKind = Literal["prompt", "slow", "never"]

SOAK_WALLETS = 200
_SLOW_EVERY, _NEVER_EVERY = 10, 100
_SLOW_READ_BYTES, _SLOW_READ_SECONDS = 2048, 1.0
_POLL_SECONDS = 0.02


def choose_reader_kind(number: int) -> ReaderKind:
    """How the wallet of this number reads."""
    if number % _NEVER_EVERY == 0:
        return "never"
    return "slow" if number % _SLOW_EVERY == 1 else "prompt"


class LiveReader:
    """
    A wallet in live mode that reads at once, slowly, or never, and reconnects when the daemon closes its socket.

    :ivar acknowledged: ids of acknowledged messages.
    :ivar closed: how often the daemon closed the socket.
    """

    def __init__(self, mediator: MeasuredMediator, wallet: BlockingWallet, kind: ReaderKind) -> None:
        self.kind = kind
        self.acknowledged: set[str] = set()
        self.closed = 0
        self._mediator = mediator
        self._wallet = wallet
        self.open()

    def open(self) -> None:
        """Open a socket with live delivery."""
        # With a small receive buffer of the kernel the daemon has to queue what is not read.
        kernel_bytes = 0 if self.kind == "prompt" else KERNEL_BYTES
        socket = WebSocketClient(require_socket_url(self._wallet.mediator), kernel_bytes)
        self.live = self._mediator.connect(self._wallet, socket)
        self.live.send("live-delivery-change", live_delivery=True)

    def fileno(self) -> int:
        """For a selector."""
        return self.live.fileno()

    def read(self) -> bool:
        """
        Read what has arrived, or a little of it, and acknowledge complete messages; whether there was a status.

        :raise OSError: the socket is closed or blocked.
        """
        has_status = False
        for delivery in self.live.take_deliveries(*([_SLOW_READ_BYTES] if self.kind == "slow" else [])):
            ids = [id_ for id_, _ in delivery]
            if ids:
                self.live.acknowledge(ids)
                self.acknowledged.update(ids)
            has_status = has_status or not ids
        return has_status

    def flush(self) -> None:
        """Wait until the daemon has read all acknowledgements."""
        self.live.send("status-request")
        while not self.read():
            pass


class SoakRunner:
    """
    Serves readers while a load posts forwards to them.

    :param sample: called every second.
    """

    def __init__(self, readers: Sequence[LiveReader], sample: Callable[[], None]) -> None:
        self._readers = readers
        self._slow = [reader for reader in readers if reader.kind == "slow"]
        self._sample = sample
        self._poll = select.epoll()
        self._by_number: dict[int, LiveReader] = {}
        for reader in readers:
            self._register(reader)

    def run(self, load: Load) -> Counter[str]:
        """Run until the load has been posted; the number of its responses by HTTP status."""
        next_slow_read = next_sample = perf_counter()
        while not load.done:
            self._serve()
            now = perf_counter()
            if now >= next_slow_read:
                next_slow_read = now + _SLOW_READ_SECONDS
                for reader in select.select(self._slow, [], [], 0)[0]:
                    self._read(reader)
            if now >= next_sample:
                next_sample += _SAMPLE_SECONDS
                self._sample()
        return load.result().statuses

    def flush(self) -> None:
        """Wait until all prompt readers have acknowledged everything."""
        for reader in self._readers:
            if reader.kind == "prompt":
                reader.flush()

    def _register(self, reader: LiveReader) -> None:
        # EPOLLHUP and EPOLLERR are always reported.
        self._by_number[reader.fileno()] = reader
        self._poll.register(reader.fileno(), select.EPOLLIN if reader.kind == "prompt" else 0)

    def _serve(self) -> None:
        for number, events in self._poll.poll(_POLL_SECONDS):
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
        reader.closed += 1
        reader.live.close()
        reader.open()
        self._register(reader)


_SOAK_RATE, _SOAK_CONNECTIONS = 150.0, 4
_SAMPLE_SECONDS = 1.0
# About what the kernel buffers for a socket that is not read.
_BACKLOG_BYTES = 6_000_000
# Until every code path was taken, and sockets that are never read were closed.
_SOAK_WARM_UP = 1 / 3
# A socket that does not answer pings is closed within two ping intervals.
_CLOSE_SECONDS = 60.0


@scenario(
    "Soak", ("warmed up", "most", "end", "accepted", "acknowledged", "waiting", "lost", "prompt", "slow", "never")
)
def measure_soak(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Resident memory over a long time, the fate of every message, and of the sockets that are not read."""
    size, seconds, resident = plan.sizes[0], plan.minutes * 60, list[int]()
    with open_mediator(plan) as mediator:
        load = ForwardLoad(mediator, table.failures, wallets=SOAK_WALLETS, short=False)
        load.prepare(size, 2 * SOAK_WALLETS)
        kinds = [choose_reader_kind(number) for number in range(SOAK_WALLETS)]
        readers = [LiveReader(mediator, *one) for one in zip(load.group.wallets, kinds, strict=True)]

        def sample() -> None:
            resident.append(rss_bytes(mediator.pid))
            advance()

        runner = SoakRunner(readers, sample)
        # Fills the sockets that are not read.
        backlog = [body for body, kind in zip(load.bodies, kinds, strict=False) if kind != "prompt"]
        count = len(backlog) * (_BACKLOG_BYTES // len(backlog[0]))
        with time_bar(seconds) as advance:
            statuses = runner.run(Load([load.server], backlog, _SOAK_CONNECTIONS, requests=count))
            resident.clear()
            statuses += runner.run(load.start(_SOAK_CONNECTIONS, seconds, rate=_SOAK_RATE, even=True))
            runner.flush()
        stored = read_stored_ids(mediator.database)
    accepted, acknowledged = statuses["202"], set().union(*(reader.acknowledged for reader in readers))
    lost = accepted - len(stored | acknowledged)
    closed = {kind: sum(one.closed for one in readers if one.kind == kind) for kind in ("prompt", "slow", "never")}
    table.rows = {
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
        "sockets closed": {kind: float(number) for kind, number in closed.items()},
    }
    table.add_target("resident MiB", 256.0, max(resident) / _MIB, most=True)
    table.add_target("growth after the first third", 0.01, compute_memory_growth(resident), most=True)
    table.notes = [
        f"{plan.minutes:g} minutes, {SOAK_WALLETS} wallets in live mode; one in {_SLOW_EVERY} reads slowly, one in "
        f"{_NEVER_EVERY} never, both with full buffers at the start; {_SOAK_RATE:g} forwards of "
        f"{format_size(size)} per second.",
    ]
    table.failures += find_soak_failures(statuses, lost, closed, seconds)


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
    statuses: Mapping[str, int], lost: int, closed: dict[str, int], seconds: float
) -> tuple[str, ...]:
    """A sentence for everything that must not happen in a soak."""
    rejected = {status: count for status, count in statuses.items() if status != "202"}
    found = {
        f"forwards were rejected: {rejected}": rejected,
        f"{lost} messages were lost": lost,
        f"{closed['prompt']} sockets were closed although they were read": closed["prompt"],
        "sockets that are never read were not closed": seconds > 2 * _CLOSE_SECONDS and not closed["never"],
    }
    return tuple(sentence for sentence, wrong in found.items() if wrong)
