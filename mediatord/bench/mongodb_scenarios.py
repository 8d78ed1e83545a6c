"""Scenarios that need MongoDB: a node on it beside SQLite, several nodes, push between them, cost of presence."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from mediatord.bench.didcomm_scenarios import PUSH_COLUMNS, PUSH_CONCURRENCIES, PUSH_WALLETS, measure_pushes
from mediatord.bench.load_generator import TargetServer
from mediatord.bench.measured_mediator import CycleLoad, ForwardLoad, MeasuredMediator, open_mediator
from mediatord.bench.plan import DAEMON_SETTINGS, BenchmarkPlan
from mediatord.bench.processes import limit_sockets
from mediatord.bench.results import (
    PER_CPU_SECOND,
    PER_SECOND,
    Contender,
    ResultTable,
    compute_percentile,
    format_size,
    scenario,
)
from mediatord.wallet.temporary_daemon import TemporaryDaemon, find_free_port, run_temporary_daemon

_ROUND_TRIP_SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class MongoDatabase:
    """
    A temporary database.

    :param settings: of a daemon that uses it.
    :param handle: pymongo's `Database`.
    """

    settings: dict[str, str]
    handle: Any

    def count_messages(self) -> int:
        """Number of messages in all queues."""
        return int(self.handle.messages.count_documents({}))

    def measure_round_trip(self) -> float:
        """Milliseconds of a small read, at the 99th percentile of many."""
        durations = []
        for _ in range(_ROUND_TRIP_SAMPLES):
            start = time.perf_counter()
            self.handle.schema.find_one({})
            durations.append((time.perf_counter() - start) * 1000)
        return compute_percentile(durations, 0.99)


@contextmanager
def create_mongo_database(uri: str) -> Iterator[MongoDatabase]:
    """
    Create a database on a replica set, and drop it on exit.

    :raise RuntimeError: pymongo is missing.
    """
    try:
        from pymongo import MongoClient
    except ImportError:
        raise RuntimeError(
            'the MongoDB scenarios require PyMongo and txmongo; run: pip install "mediatord[mongodb]"'
        ) from None
    name = f"mediatord_bench_{secrets.token_hex(6)}"
    own_uri = urlunsplit(urlsplit(uri)._replace(path=f"/{name}"))
    settings = {"MEDIATORD_STORAGE__BACKEND": "mongodb", "MEDIATORD_STORAGE__MONGODB__URI": own_uri}
    client: Any = MongoClient(uri)
    try:
        yield MongoDatabase(settings, client[name])
    finally:
        client.drop_database(name)
        client.close()


@contextmanager
def start_cluster(count: int, uri: str) -> Iterator[tuple[list[TemporaryDaemon], MongoDatabase]]:
    """Start the nodes of a cluster; the public URL of all is that of the first."""
    with ExitStack() as stack:
        database = stack.enter_context(create_mongo_database(uri))
        secret = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-"))) / "secret"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32), "ascii")
        daemons: list[TemporaryDaemon] = []
        for number in range(count):
            settings = {
                **DAEMON_SETTINGS,
                **database.settings,
                "MEDIATORD_NODE": f"node-{number}",
                "MEDIATORD_CLUSTER__LISTEN": f"tcp:{find_free_port()}:interface=127.0.0.1",
                "MEDIATORD_CLUSTER__SECRET_FILE": str(secret),
            }
            beside = daemons[0] if daemons else None
            daemons.append(stack.enter_context(run_temporary_daemon(settings, beside=beside)))
        yield daemons, database


_NODES = 3
_NODE_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms")


@scenario("One node on MongoDB and on SQLite", (*_NODE_COLUMNS, "x SQLite"))
def measure_mongodb(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Forwards to a daemon on MongoDB beside one on SQLite."""
    with ExitStack() as stack:
        database = stack.enter_context(create_mongo_database(plan.mongodb))
        mediator = stack.enter_context(open_mediator(plan, settings=database.settings))
        mongo = ForwardLoad(mediator, table.failures, short=False, count=database.count_messages)
        sqlite = ForwardLoad(stack.enter_context(open_mediator(plan)), table.failures, short=False)
        contenders = {"on MongoDB": (mongo, [mongo.server]), "on SQLite": (sqlite, [sqlite.server])}
        _compare_loads(plan, table, contenders, 0.4)
    table.notes = [
        f"{plan.clients} connections; 202 means on the disks of a majority of the replica set, or of SQLite's."
    ]


@scenario("Nodes of one cluster", (*_NODE_COLUMNS, "x one node"))
def measure_nodes(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Forwards to all nodes of a cluster beside those to one of them."""
    with start_cluster(_NODES, plan.mongodb) as (daemons, database):
        mediator = MeasuredMediator(plan, daemons[0])
        load = ForwardLoad(mediator, table.failures, short=False, count=database.count_messages)
        path = urlsplit(load.server.url).path
        servers = [TargetServer(f"{daemon.url}{path}", daemon.pid) for daemon in daemons]
        _compare_loads(plan, table, {f"{_NODES} nodes": (load, servers), "1 node": (load, servers[:1])}, 2.2)
    table.notes = [
        f"{plan.clients} connections to each node in use. {os.cpu_count()} cores for {_NODES} nodes, MongoDB and two "
        "load generators for each node.",
    ]


def _compare_loads(
    plan: BenchmarkPlan,
    table: ResultTable,
    contenders: Mapping[str, tuple[ForwardLoad, Sequence[TargetServer]]],
    goal: float,
) -> None:
    """Compare the first contender with the second, for all sizes, in the last column."""
    (first, second), column = contenders, table.columns[-1]
    for size in plan.sizes:
        runs: dict[str, Contender] = {}
        for name, (load, servers) in contenders.items():
            load.prepare(size)
            load.post(plan.clients * len(servers), plan.warm_up_seconds, servers=servers)
            runs[name] = partial(load.post, plan.clients * len(servers), plan.seconds, servers=servers)
        table.compare(runs, plan.rounds, f"{format_size(size)}  ", {column: (second, PER_SECOND)})
        ratio = table.rows[f"{format_size(size)}  {first}"][column]
        table.add_target(f"durable forwards {format_size(size)} {first}, {column}", goal, ratio)


_SAME_NODE, _OTHER_NODE = "at the same node", "at another node"
_PUSH_P99 = "sent-push p99"


@scenario("Live push across nodes", PUSH_COLUMNS)
def measure_remote_push(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Live push in a cluster of two nodes: to sockets at the node that takes the forwards, and at the other one."""
    size = plan.sizes[0]
    with (
        start_cluster(2, plan.mongodb) as (daemons, database),
        closing(MeasuredMediator(plan, daemons[0])) as mediator,
    ):
        loads = {}
        for name, daemon in zip((_SAME_NODE, _OTHER_NODE), daemons, strict=True):
            url = f"ws://{urlsplit(daemon.url).netloc}/didcomm"
            loads[name] = CycleLoad(mediator, table.failures, PUSH_WALLETS // 2, size, short=False, url=url)
        round_trip = database.measure_round_trip()
        for at_once in PUSH_CONCURRENCIES:
            contenders: dict[str, Contender] = {
                f"{name}, {at_once} at once": partial(measure_pushes, load, at_once, plan.seconds)
                for name, load in loads.items()
            }
            table.compare(contenders, plan.rounds, f"{format_size(size)}  ")
            same, other = (table.rows[f"{format_size(size)}  {name}"][_PUSH_P99] for name in contenders)
            name = f"twice the same node's p99 and a round trip, {at_once} at once"
            table.add_target(name, 1.0, (2 * same + round_trip) / other)
    table.notes = [f"Milliseconds. A round trip to the store takes {round_trip:.2f} (p99)."]


_PRESENCE_GOAL = 0.02
_SETTLE_SECONDS = 5.0
# Long enough for several periodic tasks of 15 s.
_IDLE_SECONDS = 60.0
_SHARE = "% of one core"


@scenario("Presence", (_SHARE,))
def measure_presence(plan: BenchmarkPlan, table: ResultTable) -> None:
    """CPU time of idle live sessions, at a node of a cluster and at a single node."""
    count = limit_sockets(plan.sockets)
    with (
        start_cluster(1, plan.mongodb) as (daemons, _),
        closing(MeasuredMediator(plan, daemons[0])) as mediator,
    ):
        in_cluster = _measure_idle_cpu_share(mediator, count)
    with create_mongo_database(plan.mongodb) as database, open_mediator(plan, settings=database.settings) as mediator:
        alone = _measure_idle_cpu_share(mediator, count)
    cost = max(in_cluster - alone, 1e-4)
    table.rows = {
        f"{count} live sessions, in a cluster": {_SHARE: 100 * in_cluster},
        f"{count} live sessions, alone": {_SHARE: 100 * alone},
        "presence": {_SHARE: 100 * cost},
    }
    table.add_target(f"{100 * _PRESENCE_GOAL:.0f} % of one core, x presence", 1.0, _PRESENCE_GOAL / cost)
    table.notes = [f"Over {_IDLE_SECONDS:.0f} s without messages; each session belongs to its own wallet."]


def _measure_idle_cpu_share(mediator: MeasuredMediator, count: int) -> float:
    """Seconds of CPU for each second of time."""
    for wallet in mediator.enrol(count, short=False).wallets:
        mediator.connect(wallet).enable_live_delivery()
    time.sleep(_SETTLE_SECONDS)
    before = mediator.cpu_seconds
    time.sleep(_IDLE_SECONDS)
    return (mediator.cpu_seconds - before) / _IDLE_SECONDS
