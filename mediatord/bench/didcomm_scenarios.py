"""
Scenarios of forwards and Message Pickup: rates beside baselines, latency by load, several workers, live delivery,
sockets that all connect at once, fetching, and all of it together.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import count, cycle, islice
from tempfile import TemporaryDirectory
from time import perf_counter, process_time, sleep

from mediatord.bench.envelope_scenario import OF_G, KeyAgreementBaseline
from mediatord.bench.load_generator import TargetServer, post
from mediatord.bench.measured_mediator import CycleLoad, ForwardLoad, open_mediator
from mediatord.bench.plan import RECIPIENTS, BenchmarkPlan
from mediatord.bench.processes import (
    ForkedCall,
    assign_cores,
    limit_sockets,
    list_children,
    list_sockets,
    pin_to_cores,
    read_line,
    spawn_module,
)
from mediatord.bench.raw_clients import (
    TIMEOUT_SECONDS,
    build_handshake,
    encode_frame,
    open_socket,
    parse_frame,
    split_handshake,
    split_url,
)
from mediatord.bench.results import (
    ALL_PERCENTILES,
    CLIENT_US,
    PER_CPU_SECOND,
    PER_SECOND,
    Contender,
    Figures,
    ResultTable,
    format_size,
    latency_figures,
    progress_bar,
    run_interleaved,
    safe_ratio,
    scenario,
    time_bar,
)
from mediatord.bench.wallet_group import build_inner_envelope, require_socket_url
from mediatord.wallet.didcomm_client import PICKUP

_BARE_SCHEMA = """
PRAGMA journal_mode=WAL;
PRAGMA synchronous=FULL;
CREATE TABLE message (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, recipient TEXT NOT NULL, payload BLOB NOT NULL,
    received_at REAL NOT NULL, expires_at REAL NOT NULL
) STRICT;
CREATE INDEX waiting ON message (recipient, seq);
"""
_BARE_INSERT = "INSERT INTO message (id, recipient, payload, received_at, expires_at) VALUES (?, ?, ?, ?, ?)"


@contextmanager
def _open_bare_sqlite(payloads: list[tuple[str, bytes]], batch: int, seconds: float) -> Iterator[Contender]:
    """
    The baseline of durability: inserts rows like the daemon's into a database, one transaction a batch.

    :param payloads: recipient DIDs and envelopes, repeated.
    :param batch: rows in a transaction.
    """
    rows = ((f"{id_:032x}", *row, 1.8e9, 1.8e9 + 259_200) for id_, row in zip(count(), cycle(payloads), strict=False))
    with (
        TemporaryDirectory(prefix="mediatord-bench-") as place,
        closing(sqlite3.connect(f"{place}/bare.sqlite3", isolation_level=None)) as connection,
    ):
        connection.executescript(_BARE_SCHEMA)

        def run() -> Figures:
            start, start_cpu, latencies_us = perf_counter(), process_time(), list[float]()
            while (begun := perf_counter()) - start < seconds:
                connection.execute("BEGIN IMMEDIATE")
                connection.executemany(_BARE_INSERT, islice(rows, batch))
                connection.execute("COMMIT")
                latencies_us.append((perf_counter() - begun) * 1e6)
            done = batch * len(latencies_us)
            return {
                PER_SECOND: done / (perf_counter() - start),
                PER_CPU_SECOND: done / (process_time() - start_cpu),
                **latency_figures(latencies_us),
            }

        yield run


def _run_pinned(cores: frozenset[int], contender: Contender) -> Figures:
    with pin_to_cores(cores):
        return contender()


_OF_SITE_PER_CPU, _OF_SITE = "x stock Site per CPU-s", "x stock Site"
_SITE = "stock Site, empty 202"
# With few clients, few messages share a commit.
FEW_CONNECTIONS = 32


@scenario(
    "Forwards, durable before the answer",
    (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", CLIENT_US, OF_G, _OF_SITE_PER_CPU),
)
def measure_forwards(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Durable forwards to offline recipients beside three baselines: g, an empty Twisted site, and SQLite alone."""
    cores, agreement, lengths = assign_cores(), KeyAgreementBaseline(), list[str]()
    ours, of_site, site_figure = "mediatord, durable", _OF_SITE_PER_CPU, PER_CPU_SECOND
    if plan.target:
        ours, of_site, site_figure = "target", _OF_SITE, PER_SECOND
        table.title = f"Forwards to {plan.target}"
        table.columns = (*table.columns[:4], "p99.9 ms", *table.columns[4:-1], of_site)
    with open_mediator(plan, cores) as mediator, ExitStack() as stack:
        with pin_to_cores(cores.server):
            process = stack.enter_context(spawn_module("mediatord.bench.baseline_servers", "empty"))
        site = TargetServer(f"http://127.0.0.1:{read_line(process)}/didcomm", process.pid)
        load = ForwardLoad(mediator, table.failures)
        kinds = [(format_size(size), size, load) for size in plan.sizes]
        if not plan.target:
            # Most wallets have long DIDs, which name their mediator; one row shows what they cost.
            long = ForwardLoad(mediator, table.failures, short=False)
            long.stored_check = load.stored_check
            kinds.insert(1, (f"{kinds[0][0]}, long DIDs", plan.sizes[0], long))
        ratios = {OF_G: (agreement.name, PER_CPU_SECOND), of_site: (_SITE, site_figure)}
        for name, size, one in kinds:
            one.prepare(size)
            lengths.append(f"{name} {max(map(len, one.bodies))}")
            one.post(plan.clients, plan.warm_up_seconds)
            contenders: dict[str, Contender] = {ours: partial(one.post, plan.clients, plan.seconds)}
            with ExitStack() as bare:
                if not plan.target:
                    few = f"mediatord, {FEW_CONNECTIONS} connections"
                    contenders[few] = partial(one.post, FEW_CONNECTIONS, plan.seconds)
                contenders[agreement.name] = partial(_run_pinned, cores.server, agreement.run)
                contenders[_SITE] = partial(_post_to_site, site, one.bodies, plan)
                if not plan.target:
                    rows = [(wallet.did, build_inner_envelope(wallet.identity, size)) for wallet in one.group.wallets]
                    sqlite = bare.enter_context(_open_bare_sqlite(rows, plan.clients, plan.seconds / 2))
                    contenders["SQLite alone, grouped"] = partial(_run_pinned, cores.server, sqlite)
                table.compare(contenders, plan.rounds, f"{name}  ", ratios)
    check = load.stored_check
    if plan.target:
        unknown = "" if mediator.pid else " The target's CPU time is unknown; use --target-pid."
        table.notes = [f"{plan.clients} connections; g is {agreement.name} in the same round.{unknown}", check.note]
        for name, *_ in kinds if not mediator.pid else ():
            del table.rows[f"{name}  {ours}"][OF_G]
        return
    name = kinds[0][0]
    table.add_target(f"durable forwards {name}, of g", 0.22, table.rows[f"{name}  {ours}"][OF_G])
    table.notes = [
        f"{plan.clients} connections, one daemon process; SQLite alone commits {plan.clients} rows at a time, and "
        "its latencies are those of a commit.",
        f"g is {agreement.name} in the same round, by CPU time like the daemon's. {cores.note}",
        f"Bytes posted: {', '.join(lengths)}.",
        check.note,
    ]


def _post_to_site(site: TargetServer, bodies: list[bytes], plan: BenchmarkPlan) -> Figures:
    return post(site, bodies, plan.clients, plan.seconds).figures()


_LOAD_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
_GOAL_SHARE = 0.7
_OFFERED = "offered/s"
# Connections of the open loop for each one of the closed loop.
_SPARE_CONNECTIONS = 4


@scenario(
    "Latency of a forward by load",
    (_OFFERED, PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", "p99.9 ms", "late %", CLIENT_US),
)
def measure_latency(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Latency of forwards in a closed loop, then in an open loop at shares of that rate."""
    name, connections = format_size(plan.sizes[0]), plan.clients * _SPARE_CONNECTIONS
    seconds = plan.seconds * plan.rounds / 2
    with open_mediator(plan, assign_cores()) as mediator:
        load = ForwardLoad(mediator, table.failures, plan.sizes[0])
        load.post(plan.clients, plan.warm_up_seconds)
        full = table.rows[f"{name}  closed loop"] = load.post(plan.clients, seconds)
        with progress_bar(_LOAD_SHARES, "loads") as shares:
            for share in shares:
                rate = share * full[PER_SECOND]
                posted = load.start(connections, seconds, rate=rate, even=plan.even).result()
                figures = load.stored_check.check(posted) | {_OFFERED: rate, "late %": posted.late_percent}
                table.rows[f"{name}  at {share:.0%}"] = figures
    p99 = table.rows[f"{name}  at {_GOAL_SHARE:.0%}"]["p99 ms"]
    table.add_target(f"forward p99 {name} at {_GOAL_SHARE:.0%}, ms", 50.0, p99, most=True)
    table.notes = [
        f"Closed loop: {plan.clients} connections. Open loop: "
        f"{'fixed intervals' if plan.even else 'a Poisson process'} on up to {connections} connections.",
        f"Milliseconds since a forward was due; late ones are included. {mediator.note}",
        load.stored_check.note,
    ]


# By number of workers.
_WORKER_GOALS = {2: 1.6, 4: 3.0}
_OF_ONE_WORKER = "x one worker"


@scenario("Workers", (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", CLIENT_US, _OF_ONE_WORKER))
def measure_workers(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Forwards to a daemon with one worker, and to daemons with as many workers as there are cores for."""
    cores, size_name = len(os.sched_getaffinity(0)), format_size(plan.sizes[0])
    names = {number: f"{number} worker{'s' if number > 1 else ''}" for number in (1, 2, 4) if number <= cores}
    contenders: dict[str, Contender] = {}
    with ExitStack() as stack:
        for number, name in names.items():
            mediator = stack.enter_context(open_mediator(plan, settings={"MEDIATORD_WORKERS": str(number)}))
            load = ForwardLoad(mediator, table.failures, plan.sizes[0])
            load.post(plan.clients * number, plan.warm_up_seconds)
            contenders[name] = partial(load.post, plan.clients * number, plan.seconds)
        results = table.compare(contenders, plan.rounds, f"{size_name}  ", {_OF_ONE_WORKER: (names[1], PER_SECOND)})
    for number, goal in _WORKER_GOALS.items():
        if number in names:
            ratio = results.ratio(names[number], names[1], PER_SECOND)
            table.add_target(f"forwards {size_name} with {number} workers, x one", goal, ratio)
    table.notes = [
        f"{plan.clients} connections for each worker. One worker may use all {cores} cores, as several may, and "
        "shares them with the clients.",
    ]


CYCLE_WALLETS = 64
_CYCLE, _FORWARD, _OF_FORWARD = "cycle", "forward only", "of forward"


@scenario(
    "Messages to wallets that are online",
    (PER_SECOND, PER_CPU_SECOND, _OF_FORWARD, "202 p50", "push p50", "push p99", "push p99.9", "late %", CLIENT_US),
)
def measure_cycle(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Forward, push and acknowledgement: closed loop beside forwards to offline wallets, then at fixed rates."""
    name = format_size(plan.sizes[0])
    with open_mediator(plan, assign_cores()) as mediator:
        cycles = CycleLoad(mediator, table.failures, CYCLE_WALLETS, plan.sizes[0])
        offline = ForwardLoad(mediator, table.failures, plan.sizes[0])
        cycles.run(plan.clients, plan.warm_up_seconds)
        contenders = {
            _CYCLE: lambda: cycles.run(plan.clients, plan.seconds).figures(),
            _FORWARD: lambda: offline.start(plan.clients, plan.seconds).result().figures(),
        }
        ratios = {_OF_FORWARD: (_FORWARD, PER_CPU_SECOND if mediator.pid else PER_SECOND)}
        table.compare(contenders, plan.rounds, f"{name}  ", ratios)
        closed = table.rows[f"{name}  {_CYCLE}"]
        with progress_bar(_LOAD_SHARES, "loads") as shares:
            for share in shares:
                rate, seconds = share * closed[PER_SECOND], plan.seconds * plan.rounds / 2
                result = cycles.run(2 * plan.clients, seconds, rate, even=plan.even)
                table.rows[f"{name}  at {share:.0%}"] = result.figures()
        cycles.check_queues()
    p99 = table.rows[f"{name}  at {_GOAL_SHARE:.0%}"]["push p99"]
    table.add_target(f"cycles {name}, of forwards", 0.4, closed[_OF_FORWARD])
    table.add_target(f"push p99 {name} at {_GOAL_SHARE:.0%}, ms", 25.0, p99, most=True)
    table.notes = [
        f"Forward, push to one of {CYCLE_WALLETS} wallets in live mode, messages-received without a response. "
        f"Closed loop: at most {plan.clients} messages in flight.",
        f"Milliseconds since a forward was sent, or was due. {mediator.note}",
        f"{cycles.pushed} messages were pushed exactly once and acknowledged.",
    ]


_SAME_WORKER, _OTHER_WORKER, _OF_LOCAL = "socket at the same worker", "socket at the other worker", "CPU, x cycle"
# Tries until the kernel has given a connection to a worker.
_MAX_CONNECTS = 64


@scenario(
    "Messages to wallets that are online, at two workers",
    (PER_SECOND, PER_CPU_SECOND, _OF_FORWARD, _OF_LOCAL, "push p50", "push p99", CLIENT_US),
)
def measure_siblings(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Cycles in one process, and at two workers: sockets at the worker that takes the forwards, and at the other."""
    name = format_size(plan.sizes[0])
    with ExitStack() as stack:
        one = stack.enter_context(open_mediator(plan))
        two = stack.enter_context(open_mediator(plan, settings={"MEDIATORD_WORKERS": "2"}))
        offline = ForwardLoad(one, table.failures, plan.sizes[0])
        workers = list_children(two.pid)
        first, second = [stack.enter_context(closing(_WorkerConnections(pid, workers))) for pid in workers]
        at_first = CycleLoad(two, table.failures, CYCLE_WALLETS, plan.sizes[0], connect=first.connect)
        local = CycleLoad(one, table.failures, CYCLE_WALLETS, plan.sizes[0])
        contenders: dict[str, Contender] = {
            _FORWARD: lambda: offline.start(plan.clients, plan.seconds).result().figures(),
            _CYCLE: lambda: local.run(plan.clients, plan.seconds).figures(),
            _SAME_WORKER: partial(first.run, at_first, plan.clients, plan.seconds),
            _OTHER_WORKER: partial(second.run, at_first, plan.clients, plan.seconds),
        }
        run_interleaved(contenders, 1)  # a warm-up
        results = table.compare(contenders, plan.rounds, f"{name}  ", {_OF_FORWARD: (_FORWARD, PER_CPU_SECOND)})
        for load in (local, at_first):
            load.check_queues()
    for contender in (_CYCLE, _SAME_WORKER, _OTHER_WORKER):
        table.rows[f"{name}  {contender}"][_OF_LOCAL] = results.ratio(_CYCLE, contender, PER_CPU_SECOND)
    other = table.rows[f"{name}  {_OTHER_WORKER}"]
    table.add_target(f"cycles {name} across workers, of forwards", 0.33, other[_OF_FORWARD])
    table.add_target(f"CPU of a cycle {name} across workers, x one process", 1.3, other[_OF_LOCAL], most=True)
    table.notes = [
        f"{CYCLE_WALLETS} wallets in live mode, at most {plan.clients} messages in flight. Nothing is pinned.",
    ]


class _WorkerConnections:
    """
    Connections to one of several workers: the kernel chooses, so others are closed again. They are opened once.

    :param pid: process of the worker.
    :param workers: processes of all workers.
    """

    def __init__(self, pid: int, workers: Sequence[int]) -> None:
        self._pid = pid
        self._workers = workers
        self._open: list[socket.socket] = []
        self._taken = 0

    def connect(self, url: str, source: str = "") -> socket.socket:
        """A new connection, which the worker has accepted."""
        for _ in range(_MAX_CONNECTS):
            before = {pid: list_sockets(pid) for pid in self._workers}
            connection = open_socket(url, source)
            accepted_by: list[int] = []
            while not accepted_by:
                accepted_by = [pid for pid in self._workers if list_sockets(pid) - before[pid]]
            if accepted_by == [self._pid]:
                return connection
            connection.close()
        raise RuntimeError("the kernel gave no connection to one of the workers")

    def run(self, load: CycleLoad, connections: int, seconds: float) -> Figures:
        """Run cycles whose forwards arrive over connections that stay open for the next run."""
        self._taken = 0
        return load.run(connections, seconds, connect=self._reuse).figures()

    def _reuse(self, url: str, source: str) -> socket.socket:
        if self._taken == len(self._open):
            self._open.append(self.connect(url, source))
        self._taken += 1
        return self._open[self._taken - 1].dup()

    def close(self) -> None:
        """Close them."""
        for connection in self._open:
            connection.close()


_LIMITS = (10, 100)
_MESSAGES_PER_SECOND = 2000
_DRAIN_CONNECTIONS = 8


@scenario("Messages fetched", (PER_SECOND, PER_CPU_SECOND, "requests", "p50 ms", "p99 ms", CLIENT_US))
def measure_drain(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Fill queues, which is not measured, and empty them."""
    each = max(1, int(_MESSAGES_PER_SECOND * plan.seconds) // RECIPIENTS)
    with open_mediator(plan, assign_cores()) as mediator:
        load = ForwardLoad(mediator, table.failures, plan.sizes[0])

        def run(limit: int) -> Figures:
            accepted = load.start(plan.clients, requests=each * RECIPIENTS).result().accepted
            before = mediator.cpu_seconds
            result = load.group.drain(_DRAIN_CONNECTIONS, limit)
            result.cpu_seconds = mediator.cpu_seconds - before
            if result.accepted != accepted:
                table.failures.append(f"{accepted} forwards were accepted, {result.accepted} messages were fetched")
            return {**result.rates(), "requests": len(result.latencies_us), **latency_figures(result.latencies_us)}

        contenders = {f"{limit} a delivery": partial(run, limit) for limit in _LIMITS}
        table.compare(contenders, plan.rounds, f"{format_size(plan.sizes[0])}  ")
    table.notes = [
        f"delivery-request and messages-received over HTTP, {_DRAIN_CONNECTIONS} connections, {RECIPIENTS} wallets "
        f"with {each} messages each; latencies are those of a request. {mediator.note}",
    ]


PUSH_WALLETS = 64
PUSH_CONCURRENCIES = (1, 8)
PUSH_COLUMNS = ("msg/s", "sent-202 p50", "sent-push p50", "sent-push p99", "202-push p50", "202-push p99")


@scenario("Live push", PUSH_COLUMNS)
def measure_push(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Time from a forward being sent, and from its 202, until the push has been received."""
    size, seconds = plan.sizes[0], plan.seconds * plan.rounds / len(PUSH_CONCURRENCIES)
    with open_mediator(plan) as mediator:
        load = CycleLoad(mediator, table.failures, PUSH_WALLETS, size, short=False)
        with progress_bar(PUSH_CONCURRENCIES, "concurrencies") as concurrencies:
            for at_once in concurrencies:
                table.rows[f"{format_size(size)}  {at_once} at once"] = measure_pushes(load, at_once, seconds)
    table.notes = [
        f"Milliseconds; forwards to {PUSH_WALLETS} wallets in live mode. A negative value means that the push "
        "arrived before the sender's 202.",
    ]


def measure_pushes(load: CycleLoad, at_once: int, seconds: float) -> Figures:
    """Rate and latencies of forwards, each sent after the one before was accepted and pushed."""
    result = load.run(at_once, seconds, acknowledge=False)
    return {
        PER_SECOND: safe_ratio(result.accepted, result.seconds),
        **latency_figures(result.latencies_us, "sent-202 {}", ("p50",)),
        **latency_figures(result.pushed_us, "sent-push {}"),
        **latency_figures(result.after_us, "202-push {}"),
    }


_MAX_STORM_ROUNDS = 5


@scenario("Connection storm", ("sockets/s", "sockets/CPU-s", "open p50", "open p99", "live p50", "live p99"))
def measure_connection_storm(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Rate of sockets until all are in live mode, and how long the last ones wait."""
    count = limit_sockets(plan.sockets)
    with open_mediator(plan, assign_cores()) as mediator:
        group = mediator.enrol(min(RECIPIENTS, count))

        def run() -> Figures:
            type_, body = f"{PICKUP}/live-delivery-change", {"live_delivery": True}
            requests = [wallet.pack(type_, body)[1] for wallet in islice(cycle(group.wallets), count)]
            before = mediator.cpu_seconds
            storm = _ConnectionStorm(require_socket_url(group.mediator))
            seconds = storm.run(requests)
            if storm.refused:
                table.failures.append(f"{storm.refused} of {count} sockets were refused")
            return {
                "sockets/s": safe_ratio(len(storm.live_us), seconds),
                "sockets/CPU-s": safe_ratio(len(storm.live_us), mediator.cpu_seconds - before),
                **latency_figures(storm.opened_us, "open {}"),
                **latency_figures(storm.live_us, "live {}"),
            }

        table.compare({f"{count} at once": run}, min(plan.rounds, _MAX_STORM_ROUNDS))
    table.notes = [f"Milliseconds since the first connect. Handshake, then live-delivery-change. {mediator.note}"]


@dataclass(slots=True)
class _ConnectionStorm:
    """
    Opens many sockets at once, as wallets do after a network outage.

    :ivar refused: sockets closed by the server.
    :ivar opened_us: from the start until each socket was open.
    :ivar live_us: likewise, until live delivery was confirmed.
    """

    url: str
    refused: int = 0
    opened_us: list[int] = field(default_factory=list)
    live_us: list[int] = field(default_factory=list)

    def run(self, requests: Sequence[bytes]) -> float:
        """
        Run until every socket is in live mode or was refused, and close them; the seconds until then.

        :param requests: for live delivery, one for each socket.
        :raise TimeoutError: the server stopped answering.
        """
        start = perf_counter()
        with ExitStack() as stack, select.epoll() as epoll:
            opening = {}
            for request in requests:
                connection = stack.enter_context(socket.socket())
                steps = opening[connection.fileno()] = self._open(connection, request, epoll, start)
                next(steps)
            while opening:
                events = epoll.poll(TIMEOUT_SECONDS)
                if not events:
                    raise TimeoutError("the server stopped answering")
                for number, _ in events:
                    try:
                        next(opening[number])
                    except (StopIteration, OSError) as end:
                        self.refused += isinstance(end, OSError)
                        epoll.unregister(number)
                        del opening[number]
            return perf_counter() - start

    def _open(self, connection: socket.socket, request: bytes, epoll: select.epoll, start: float) -> Iterator[None]:
        """Open a socket and turn live delivery on; yields where it waits for an event."""
        connection.setblocking(False)
        if connection.connect_ex(split_url(self.url)[:2]) not in (0, errno.EINPROGRESS):
            raise ConnectionError("no connection")
        epoll.register(connection, select.EPOLLOUT)
        yield
        connection.send(build_handshake(self.url))
        epoll.modify(connection, select.EPOLLIN)
        received = b""
        while (rest := split_handshake(received)) is None:
            yield
            received += _receive_some(connection)
        self.opened_us.append(int((perf_counter() - start) * 1e6))
        connection.send(encode_frame(request))
        while parse_frame(rest) is None:
            yield
            rest += _receive_some(connection)
        self.live_us.append(int((perf_counter() - start) * 1e6))


def _receive_some(connection: socket.socket) -> bytes:
    if data := connection.recv(65536):
        return data
    raise ConnectionError("the server closed a WebSocket")


# Of the rate of forwards in a closed loop.
_OFFLINE_SHARE, _ONLINE_SHARE = 0.25, 0.08
_FETCH_INTERVAL_SECONDS = 1.0


@scenario("Mixed load", (PER_SECOND, "p50 ms", "p99 ms", "p99.9 ms", "late %", "% of one core"))
def measure_mixed(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Forwards in an open loop to offline wallets, which fetch meanwhile, and to wallets in live mode."""
    size, connections, seconds = plan.sizes[0], 4 * plan.clients, plan.seconds * plan.rounds
    with open_mediator(plan, assign_cores()) as mediator:
        online = CycleLoad(mediator, table.failures, CYCLE_WALLETS, size)
        offline = ForwardLoad(mediator, table.failures, size)
        full = offline.start(plan.clients, plan.seconds).result()
        rate = full.figures()[PER_SECOND]
        left = full.accepted - offline.group.drain().accepted
        before, start = mediator.cpu_seconds, perf_counter()
        runner = online.prepare(connections, seconds, _ONLINE_SHARE * rate, even=plan.even)
        posting = offline.start(connections, seconds, rate=_OFFLINE_SHARE * rate, even=plan.even)
        pushing, fetched = ForkedCall(runner.run), []
        with time_bar(seconds) as advance:
            while not posting.done:
                sleep(_FETCH_INTERVAL_SECONDS)
                fetched.append(offline.group.drain())
                advance()
        load, cycles = posting.result(), pushing.result()
        runner.close()
        busy = safe_ratio(mediator.cpu_seconds - before, perf_counter() - start)
        fetched.append(offline.group.drain())
    messages = sum(result.accepted for result in fetched)
    table.failures += cycles.failures()
    if left or messages != load.accepted:
        table.failures.append(f"{load.accepted} forwards were accepted, {messages} messages were fetched")
    pushes, latencies = cycles.figures(), [latency for result in fetched for latency in result.latencies_us]
    table.rows = {
        "forwards, recipient away": load.figures() | {"late %": load.late_percent},
        "pushes, recipient online": {
            **{name: pushes[name] for name in (PER_SECOND, "late %")},
            **{f"{name} ms": pushes[f"push {name}"] for name in ALL_PERCENTILES},
        },
        "requests of fetching wallets": {
            PER_SECOND: safe_ratio(len(latencies), load.seconds),
            **latency_figures(latencies, names=ALL_PERCENTILES),
        },
        "all": {"% of one core": 100 * busy} if mediator.pid else {},
    }
    table.notes = [
        f"{format_size(size)}. {_OFFLINE_SHARE:.0%} and {_ONLINE_SHARE:.0%} of {rate:,.0f} forwards per second, "
        f"the rate of a closed loop, to {RECIPIENTS} and {CYCLE_WALLETS} wallets; {messages} messages were fetched. "
        f"{mediator.note}",
    ]
