"""Scenarios that need MongoDB: a node on it beside SQLite, several nodes, push between them, cost of presence."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from mediatord.bench.didcomm_scenarios import (
    CYCLE_WALLETS,
    FEW_CONNECTIONS,
    PUSH_COLUMNS,
    PUSH_CONCURRENCIES,
    PUSH_WALLETS,
    measure_pushes,
)
from mediatord.bench.load_generator import TargetServer
from mediatord.bench.measured_mediator import CycleLoad, ForwardLoad, MeasuredMediator, open_mediator
from mediatord.bench.plan import DAEMON_SETTINGS, BenchmarkPlan
from mediatord.bench.processes import limit_sockets
from mediatord.bench.results import (
    PER_CPU_SECOND,
    PER_SECOND,
    Contender,
    Figures,
    ResultTable,
    compute_percentile,
    format_size,
    safe_ratio,
    scenario,
)
from mediatord.wallet.temporary_daemon import TemporaryDaemon, find_free_port, run_temporary_daemon

_ROUND_TRIP_SAMPLES = 1000
_COMMANDS = "commands"
_COUNTED_COMMANDS = (
    "find", "aggregate", "getMore", "count", "distinct", "insert", "update", "delete", "findAndModify",
    "commitTransaction", "abortTransaction",
)  # fmt: skip


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

    def count_commands(self) -> int:
        """Number of commands on data, and ends of transactions, that the server has run."""
        counts = self.handle.client.admin.command("serverStatus")["metrics"]["commands"]
        return sum(counts[name]["total"] for name in _COUNTED_COMMANDS)

    def add_command_count(self, run: Contender, count_messages: Callable[[], int]) -> Figures:
        """
        Figures of a run, with the number of commands for each message.

        :param count_messages: number of messages of all runs so far.
        """
        commands, messages = self.count_commands(), count_messages()
        figures = run()
        more = self.count_commands() - commands
        return figures | {_COMMANDS: safe_ratio(more, count_messages() - messages)}

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


_LOW_SHARE = 0.1
# Where few messages share a transaction, beside the plan's.
_FEW_CONNECTIONS = (1, 8, FEW_CONNECTIONS)
_ON_MONGODB, _ON_SQLITE, _OF_SQLITE = "on MongoDB", "on SQLite", "x SQLite per CPU-s"
_OF_FORWARDS = "x forwards per CPU-s"


@scenario(
    "One node on MongoDB and on SQLite",
    (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", "push p50", "push p99", _COMMANDS, _OF_SQLITE, _OF_FORWARDS),
)
def measure_mongodb(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Forwards, and messages to wallets that are online, at a daemon on MongoDB beside one on SQLite."""
    with ExitStack() as stack:
        database = stack.enter_context(create_mongo_database(plan.mongodb))
        mongo = stack.enter_context(open_mediator(plan, settings=database.settings))
        sqlite = stack.enter_context(open_mediator(plan))
        _compare_forwards(plan, table, mongo, sqlite, database)
        _compare_cycles(plan, table, mongo, sqlite, database)
    size = plan.sizes[0]
    for name in (_ON_MONGODB, _ON_SQLITE):
        forwards = table.rows[f"{_name_forwards(size, plan.clients)}{name}"]
        cycles = table.rows[f"{format_size(size)}, live cycle  {name}"]
        cycles[_OF_FORWARDS] = safe_ratio(cycles[PER_CPU_SECOND], forwards[PER_CPU_SECOND])
    for name, row in table.rows.items():
        if name.endswith(_ON_MONGODB):
            table.add_target(f"{name}, {_OF_SQLITE}", 0.5, row[_OF_SQLITE])
    table.notes = [
        "202 means on the disks of a majority of the replica set, or of SQLite's. Commands are those for a message, "
        "in a live cycle with its acknowledgement.",
        f"Live cycle: forward, push, messages-received; at most {plan.clients} messages in flight, and then "
        f"{_LOW_SHARE:.0%} of MongoDB's rate on both.",
    ]


def _compare_forwards(
    plan: BenchmarkPlan,
    table: ResultTable,
    mongo: MeasuredMediator,
    sqlite: MeasuredMediator,
    database: MongoDatabase,
) -> None:
    on_mongo = ForwardLoad(mongo, table.failures, count=database.count_messages)
    on_sqlite = ForwardLoad(sqlite, table.failures)
    loads = [(plan.sizes[0], few) for few in _FEW_CONNECTIONS if few != plan.clients]
    loads += [(size, plan.clients) for size in plan.sizes]
    for size, connections in loads:
        for load in (on_mongo, on_sqlite):
            load.prepare(size)
            load.post(connections, plan.warm_up_seconds)
        post = partial(on_mongo.post, connections, plan.seconds)
        runs: dict[str, Contender] = {
            _ON_MONGODB: partial(database.add_command_count, post, lambda: on_mongo.stored_check.accepted),
            _ON_SQLITE: partial(on_sqlite.post, connections, plan.seconds),
        }
        table.compare(
            runs, plan.rounds, _name_forwards(size, connections), {_OF_SQLITE: (_ON_SQLITE, PER_CPU_SECOND)}
        )


def _name_forwards(size: int, connections: int) -> str:
    return f"{format_size(size)}, {connections} connection{'s' if connections > 1 else ''}  "


def _compare_cycles(
    plan: BenchmarkPlan,
    table: ResultTable,
    mongo: MeasuredMediator,
    sqlite: MeasuredMediator,
    database: MongoDatabase,
) -> None:
    on_mongo, on_sqlite = [CycleLoad(one, table.failures, CYCLE_WALLETS, plan.sizes[0]) for one in (mongo, sqlite)]
    title, rate = f"{format_size(plan.sizes[0])}, live cycle", 0.0

    def run(load: CycleLoad) -> Figures:
        return load.run(2 * plan.clients if rate else plan.clients, plan.seconds, rate).figures()

    for suffix in ("  ", f" at {_LOW_SHARE:.0%}  "):
        for load in (on_mongo, on_sqlite):
            load.run(plan.clients, plan.warm_up_seconds, rate)
        runs: dict[str, Contender] = {
            _ON_MONGODB: partial(database.add_command_count, partial(run, on_mongo), lambda: on_mongo.pushed),
            _ON_SQLITE: partial(run, on_sqlite),
        }
        table.compare(runs, plan.rounds, f"{title}{suffix}", {_OF_SQLITE: (_ON_SQLITE, PER_CPU_SECOND)})
        rate = _LOW_SHARE * table.rows[f"{title}  {_ON_MONGODB}"][PER_SECOND]
    for load in (on_mongo, on_sqlite):
        load.check_queues()


_NODES = 3
_OF_ONE_NODE = "x one node"


@scenario("Nodes of one cluster", (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", _OF_ONE_NODE))
def measure_nodes(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Forwards to all nodes of a cluster beside those to one of them."""
    all_nodes, one_node = f"{_NODES} nodes", "1 node"
    with start_cluster(_NODES, plan.mongodb) as (daemons, database):
        mediator = MeasuredMediator(plan, daemons[0])
        load = ForwardLoad(mediator, table.failures, short=False, count=database.count_messages)
        path = urlsplit(load.server.url).path
        servers = [TargetServer(f"{daemon.url}{path}", daemon.pid) for daemon in daemons]
        for size in plan.sizes:
            load.prepare(size)
            runs: dict[str, Contender] = {}
            for name, used in ((all_nodes, servers), (one_node, servers[:1])):
                load.post(plan.clients * len(used), plan.warm_up_seconds, servers=used)
                runs[name] = partial(load.post, plan.clients * len(used), plan.seconds, servers=used)
            table.compare(runs, plan.rounds, f"{format_size(size)}  ", {_OF_ONE_NODE: (one_node, PER_SECOND)})
            ratio = table.rows[f"{format_size(size)}  {all_nodes}"][_OF_ONE_NODE]
            table.add_target(f"durable forwards {format_size(size)} {all_nodes}, {_OF_ONE_NODE}", 2.2, ratio)
    table.notes = [
        f"{plan.clients} connections to each node in use. {os.cpu_count()} cores for {_NODES} nodes, MongoDB and two "
        "load generators for each node.",
    ]


_SAME_NODE, _OTHER_NODE = "at the same node", "at another node"
_PUSH_P99 = "sent-push p99"


@scenario("Live push across nodes", (*PUSH_COLUMNS, _COMMANDS))
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
            contenders: dict[str, Contender] = {}
            for name, load in loads.items():
                pushes = partial(measure_pushes, load, at_once, plan.seconds)
                contenders[f"{name}, {at_once} at once"] = partial(
                    database.add_command_count, pushes, partial(_get_pushed, load)
                )
            table.compare(contenders, plan.rounds, f"{format_size(size)}  ")
            same, other = (table.rows[f"{format_size(size)}  {name}"][_PUSH_P99] for name in contenders)
            name = f"twice the same node's p99 and a round trip, {at_once} at once"
            table.add_target(name, 1.0, (2 * same + round_trip) / other)
    table.notes = [f"Milliseconds. A round trip to the store takes {round_trip:.2f} (p99)."]


def _get_pushed(load: CycleLoad) -> int:
    return load.pushed


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
