"""Scenarios of scaling: workers, MongoDB beside SQLite, nodes of a cluster, push and presence across nodes."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from mediatord.bench.delivery_scenarios import PUSH_COLUMNS, PUSH_CONCURRENCIES, PUSH_WALLETS, push_messages
from mediatord.bench.didcomm_wallets import LiveSocket, enrol_group
from mediatord.bench.load_generator import TargetServer, WebSocketClient
from mediatord.bench.mediator_under_test import ForwardLoad, open_temporary_directory, start_wallet_process
from mediatord.bench.processes import cpu_seconds, raise_file_limit
from mediatord.bench.scenario import (
    CLIENT_US,
    DAEMON_SETTINGS,
    PER_CPU_SECOND,
    PER_SECOND,
    WARM_UP_SHARE,
    BenchmarkPlan,
    Contender,
    Figures,
    PerformanceTarget,
    ResultTable,
    compute_percentile,
    format_size,
    run_interleaved,
)
from mediatord.bench.wallet_process import WalletSetup
from mediatord.wallet.temporary_daemon import TemporaryDaemon, find_free_port, run_temporary_daemon

# By number of workers.
_WORKER_GOALS = {2: 1.6, 4: 3.0}
_OF_ONE_WORKER = "x one worker"
_WORKER_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", CLIENT_US, _OF_ONE_WORKER)


def measure_workers(plan: BenchmarkPlan) -> ResultTable:
    """Forwards to a daemon with one worker, and to daemons with as many workers as there are cores for."""
    cores = len(os.sched_getaffinity(0))
    numbers = [number for number in (1, 2, 4) if number <= cores]
    size_name = format_size(plan.sizes[0])
    names = {number: f"{number} worker{'s' if number > 1 else ''}" for number in numbers}
    with ExitStack() as stack:
        place = open_temporary_directory(stack)
        contenders: dict[str, Contender] = {}
        loads = []
        for number, name in names.items():
            settings = {**DAEMON_SETTINGS, "MEDIATORD_WORKERS": str(number)}
            daemon = stack.enter_context(run_temporary_daemon(settings))
            load = ForwardLoad(daemon, place / f"{number}.bodies", short=True)
            load.prepare(plan.sizes[0])
            load.post(plan.clients * number, plan.seconds * WARM_UP_SHARE)
            contenders[name] = partial(load.post, plan.clients * number, plan.seconds)
            loads.append(load)
        rounds = run_interleaved(contenders, plan.rounds)
    ratios = {name: rounds.ratio(name, names[1], PER_SECOND) for name in contenders}
    rows = {f"{size_name}  {name}": rounds.medians(name) | {_OF_ONE_WORKER: ratios[name]} for name in contenders}
    targets = tuple(
        PerformanceTarget(f"forwards {size_name} with {number} workers, x one", goal, ratios[names[number]])
        for number, goal in _WORKER_GOALS.items()
        if number in names
    )
    notes = (
        f"{plan.clients} connections for each worker. One worker may use all {cores} cores, as several may, and "
        "shares them with the clients.",
    )
    failures = tuple(failure for load in loads for failure in load.stored_check.failures)
    return ResultTable("Workers", _WORKER_COLUMNS, rows, targets, notes, failures)


_ROUND_TRIP_SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class MongoDatabase:
    """
    A temporary database.

    :param uri: with the database as its path.
    :param handle: pymongo's `Database`.
    """

    uri: str
    handle: Any

    @property
    def settings(self) -> dict[str, str]:
        """Settings of a daemon that uses it."""
        storage = {"MEDIATORD_STORAGE__BACKEND": "mongodb", "MEDIATORD_STORAGE__MONGODB__URI": self.uri}
        return {**DAEMON_SETTINGS, **storage}

    def count_messages(self) -> int:
        """Number of messages in all queues."""
        return int(self.handle.messages.count_documents({}))

    def measure_round_trips(self) -> list[float]:
        """Milliseconds of many small reads."""
        durations = []
        for _ in range(_ROUND_TRIP_SAMPLES):
            start = time.perf_counter()
            self.handle.schema.find_one({})
            durations.append((time.perf_counter() - start) * 1000)
        return durations


@contextmanager
def create_mongo_database(uri: str) -> Iterator[MongoDatabase]:
    """
    Create a database on a replica set, and drop it on exit.

    :raise RuntimeError: pymongo is missing.
    """
    try:
        from pymongo import MongoClient
    except ImportError:
        raise RuntimeError('MongoDB needs pip install "mediatord[mongodb]"') from None
    name = f"mediatord_bench_{secrets.token_hex(6)}"
    client: Any = MongoClient(uri)
    try:
        yield MongoDatabase(urlunsplit(urlsplit(uri)._replace(path=f"/{name}")), client[name])
    finally:
        client.drop_database(name)
        client.close()


@contextmanager
def start_cluster(count: int, uri: str) -> Iterator[tuple[list[TemporaryDaemon], MongoDatabase]]:
    """Start the nodes of a cluster; the public URL of all is that of the first."""
    with ExitStack() as stack:
        database = stack.enter_context(create_mongo_database(uri))
        secret = open_temporary_directory(stack) / "secret"
        with open(os.open(secret, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        daemons: list[TemporaryDaemon] = []
        for number in range(count):
            settings = {
                **database.settings,
                "MEDIATORD_NODE": f"node-{number}",
                "MEDIATORD_CLUSTER__LISTEN": f"tcp:{find_free_port()}:interface=127.0.0.1",
                "MEDIATORD_CLUSTER__SECRET_FILE": str(secret),
            }
            beside = daemons[0] if daemons else None
            daemons.append(stack.enter_context(run_temporary_daemon(settings, beside=beside)))
        yield daemons, database


_SQLITE_GOAL = 0.4
_NODES_GOAL = 2.2
_NODES = 3
_NODE_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms")


def measure_mongodb(plan: BenchmarkPlan) -> ResultTable:
    """Forwards to a daemon on MongoDB beside one on SQLite."""
    with ExitStack() as stack:
        place = open_temporary_directory(stack)
        database = stack.enter_context(create_mongo_database(plan.mongodb))
        daemon = stack.enter_context(run_temporary_daemon(database.settings))
        mongo = ForwardLoad(daemon, place / "mongodb", count=database.count_messages)
        sqlite = ForwardLoad(stack.enter_context(run_temporary_daemon(DAEMON_SETTINGS)), place / "sqlite")
        contenders = {"on MongoDB": (mongo, [mongo.server]), "on SQLite": (sqlite, [sqlite.server])}
        rows, targets = _compare_loads(plan, contenders, "x SQLite", _SQLITE_GOAL)
    notes = (f"{plan.clients} connections; 202 means on the disks of a majority of the replica set, or of SQLite's.",)
    failures = (*mongo.stored_check.failures, *sqlite.stored_check.failures)
    columns = (*_NODE_COLUMNS, "x SQLite")
    return ResultTable("One node on MongoDB and on SQLite", columns, rows, targets, notes, failures)


def measure_nodes(plan: BenchmarkPlan) -> ResultTable:
    """Forwards to all nodes of a cluster beside those to one of them."""
    with ExitStack() as stack:
        daemons, database = stack.enter_context(start_cluster(_NODES, plan.mongodb))
        bodies = open_temporary_directory(stack) / "bodies"
        load = ForwardLoad(daemons[0], bodies, count=database.count_messages)
        servers = [TargetServer.from_url(daemon.url + load.server.path, daemon.pid) for daemon in daemons]
        contenders = {f"{_NODES} nodes": (load, servers), "1 node": (load, servers[:1])}
        rows, targets = _compare_loads(plan, contenders, "x one node", _NODES_GOAL)
    notes = (
        f"{plan.clients} connections to each node in use. {os.cpu_count()} cores for {_NODES} nodes, MongoDB and two "
        "load generators for each node.",
    )
    columns, failures = (*_NODE_COLUMNS, "x one node"), tuple(load.stored_check.failures)
    return ResultTable("Nodes of one cluster", columns, rows, targets, notes, failures)


def _compare_loads(
    plan: BenchmarkPlan,
    contenders: Mapping[str, tuple[ForwardLoad, Sequence[TargetServer]]],
    column: str,
    goal: float,
) -> tuple[dict[str, Figures], tuple[PerformanceTarget, ...]]:
    """Compare the first contender with the second, for all sizes."""
    rows: dict[str, Figures] = {}
    targets: list[PerformanceTarget] = []
    first, second = contenders
    for size in plan.sizes:
        runs: dict[str, Contender] = {}
        for name, (load, servers) in contenders.items():
            load.prepare(size)
            post = partial(load.post, plan.clients * len(servers), servers=servers)
            post(seconds=plan.seconds * WARM_UP_SHARE)
            runs[name] = partial(post, seconds=plan.seconds)
        rounds = run_interleaved(runs, plan.rounds)
        ratio = rounds.ratio(first, second, PER_SECOND)
        for name, compared in ((first, ratio), (second, 1.0)):
            rows[f"{format_size(size)}  {name}"] = rounds.medians(name) | {column: compared}
        targets.append(PerformanceTarget(f"durable forwards {format_size(size)} {first}, {column}", goal, ratio))
    return rows, tuple(targets)


_SAME_NODE, _OTHER_NODE = "at the same node", "at another node"
_PUSH_P99 = "sent-push p99"


def measure_remote_push(plan: BenchmarkPlan) -> ResultTable:
    """Live push in a cluster of two nodes: to sockets at the node that takes the forwards, and at the other one."""
    size = plan.sizes[0]
    rows: dict[str, Figures] = {}
    targets: list[PerformanceTarget] = []
    failures: list[str] = []
    with ExitStack() as stack:
        daemons, database = stack.enter_context(start_cluster(2, plan.mongodb))
        place = open_temporary_directory(stack)
        wallets = {}
        for name, daemon in zip((_SAME_NODE, _OTHER_NODE), daemons, strict=True):
            url = f"ws://{urlsplit(daemon.url).netloc}/didcomm"
            setup = WalletSetup(
                daemons[0].url, None, PUSH_WALLETS // 2, size, PUSH_WALLETS * 2, f"{place}/{name}", False, url
            )
            wallets[name] = stack.enter_context(start_wallet_process(setup))
            wallets[name].do("live")
        round_trip = compute_percentile(database.measure_round_trips(), 0.99)
        for at_once in PUSH_CONCURRENCIES:
            contenders: dict[str, Contender] = {
                name: partial(push_messages, one, at_once, plan.seconds, failures) for name, one in wallets.items()
            }
            rounds = run_interleaved(contenders, plan.rounds)
            for name in contenders:
                rows[f"{format_size(size)}  {name}, {at_once} at once"] = rounds.medians(name)
            allowed = 2 * rounds.medians(_SAME_NODE)[_PUSH_P99] + round_trip
            measured = allowed / rounds.medians(_OTHER_NODE)[_PUSH_P99]
            targets.append(
                PerformanceTarget(f"twice the same node's p99 and a round trip, {at_once} at once", 1.0, measured)
            )
    notes = (f"Milliseconds. A round trip to the store takes {round_trip:.2f} (p99).",)
    return ResultTable("Live push across nodes", PUSH_COLUMNS, rows, tuple(targets), notes, tuple(failures))


_PRESENCE_GOAL = 0.02
_SPARE_FILES = 200
_SETTLE_SECONDS = 5.0
# Long enough for several periodic tasks of 15 s.
_IDLE_SECONDS = 60.0
_SHARE = "% of one core"


def measure_presence(plan: BenchmarkPlan) -> ResultTable:
    """CPU time of idle live sessions, at a node of a cluster and at a single node."""
    count = min(plan.sockets, raise_file_limit() - _SPARE_FILES)
    with start_cluster(1, plan.mongodb) as (daemons, _):
        in_cluster = _measure_idle_cpu_share(daemons[0], count)
    with create_mongo_database(plan.mongodb) as database, run_temporary_daemon(database.settings) as daemon:
        alone = _measure_idle_cpu_share(daemon, count)
    cost = max(in_cluster - alone, 1e-4)
    rows: dict[str, Figures] = {
        f"{count} live sessions, in a cluster": {_SHARE: 100 * in_cluster},
        f"{count} live sessions, alone": {_SHARE: 100 * alone},
        "presence": {_SHARE: 100 * cost},
    }
    notes = (f"Over {_IDLE_SECONDS:.0f} s without messages; each session belongs to its own wallet.",)
    goal_name = f"{100 * _PRESENCE_GOAL:.0f} % of one core, x presence"
    target = PerformanceTarget(goal_name, 1.0, _PRESENCE_GOAL / cost)
    return ResultTable("Presence", (_SHARE,), rows, (target,), notes)


def _measure_idle_cpu_share(daemon: TemporaryDaemon, count: int) -> float:
    """Seconds of CPU for each second of time."""
    group = enrol_group(daemon.url, count)
    url = f"ws://{urlsplit(daemon.url).netloc}{urlsplit(group.mediator.http_uri).path}"
    with ExitStack() as stack:
        for codec in group.make_codecs():
            socket = WebSocketClient(url)
            stack.callback(socket.close)
            LiveSocket(codec, socket).enable_live_delivery()
        time.sleep(_SETTLE_SECONDS)
        before = cpu_seconds(daemon.pid)
        time.sleep(_IDLE_SECONDS)
        return (cpu_seconds(daemon.pid) - before) / _IDLE_SECONDS
