"""
What several worker processes of one daemon do more than one.

Nodes on MongoDB for the benchmark: databases of their own, and what is in them.

Durable forwards on MongoDB: one node beside the same on SQLite, and three nodes beside one.

How long a push takes to a wallet whose socket is at another node than the one that took the forward.

What it costs a node that others know of its live sessions, while nothing happens.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from mediatord.bench.delivery_scenarios import PushExchange, enable_live_delivery, make_push_senders, require_no_push
from mediatord.bench.didcomm_wallets import WalletGroup, build_forwards, enrol_group
from mediatord.bench.load_generator import (
    CLIENT_US,
    PER_CPU_SECOND,
    PER_SECOND,
    TargetServer,
    WebSocketClient,
    encode_request,
    post_for_seconds,
    post_to_servers,
    write_bodies,
)
from mediatord.bench.mediator_under_test import DATABASE_FILE, StoredMessageCheck, count_stored_rows
from mediatord.bench.processes import cpu_seconds, raise_file_limit
from mediatord.bench.scenario import (
    DAEMON_SETTINGS,
    DISTINCT_MESSAGES,
    RECIPIENTS,
    BenchmarkPlan,
    Contender,
    Figures,
    PerformanceTarget,
    ResultTable,
    compute_percentile,
    format_size,
    run_interleaved,
)
from mediatord.wallet.temporary_daemon import TemporaryDaemon, find_free_port, run_temporary_daemon

# At so many workers, by the clock.
WORKER_GOALS = {2: 1.6, 4: 3.0}

_WORKER_OF_ONE = "x one worker"
_WORKER_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", CLIENT_US, _WORKER_OF_ONE)
_WARM_UP_SHARE = 0.25


def measure_workers(plan: BenchmarkPlan) -> ResultTable:
    """One daemon for each number of workers that there are cores for, in turns."""
    cores = len(os.sched_getaffinity(0))
    numbers = [number for number in (1, 2, 4) if number <= cores]
    size = plan.sizes[0]
    name = format_size(size)
    failures: list[str] = []
    with ExitStack() as stack:
        place = stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-"))
        contenders = {
            _worker_row(number): _worker_contender(plan, number, Path(place) / f"{number}.bodies", stack, failures)
            for number in numbers
        }
        rounds = run_interleaved(contenders, plan.rounds)
    rows: dict[str, Figures] = {
        f"{name}  {one}": rounds.medians(one) | {_WORKER_OF_ONE: rounds.ratio(one, _worker_row(1), PER_SECOND)}
        for one in rounds.found
    }
    targets = tuple(
        PerformanceTarget(
            f"forwards {name} with {number} workers, x one",
            WORKER_GOALS[number],
            rows[f"{name}  {_worker_row(number)}"][_WORKER_OF_ONE],
        )
        for number in numbers
        if number in WORKER_GOALS
    )
    notes = (
        f"{plan.clients} connections for each worker. One worker has all {cores} cores as several have, and shares "
        "them with the clients.",
    )
    return ResultTable("Workers", _WORKER_COLUMNS, rows, targets, notes, tuple(failures))


def _worker_row(number: int) -> str:
    return f"{number} worker{'s' if number > 1 else ''}"


def _worker_contender(
    plan: BenchmarkPlan, number: int, bodies: Path, stack: ExitStack, failures: list[str]
) -> Contender:
    daemon = stack.enter_context(run_temporary_daemon({**DAEMON_SETTINGS, "MEDIATORD_WORKERS": str(number)}))
    group = enrol_group(daemon.url, RECIPIENTS, short=True)
    write_bodies(bodies, build_forwards(group, plan.sizes[0], DISTINCT_MESSAGES))
    server = TargetServer.at(group.mediator.http_uri, daemon.pid)
    stored_check = StoredMessageCheck(server, lambda: count_stored_rows(daemon.directory / DATABASE_FILE), failures)

    def run(seconds: float) -> Figures:
        return stored_check.check(post_for_seconds(server, bodies, plan.clients * number, seconds))

    run(plan.seconds * _WARM_UP_SHARE)
    return partial(run, plan.seconds)


_ROUND_TRIP_SAMPLES = 1000


@dataclass(frozen=True, slots=True)
class MongoDatabase:
    """
    One that is dropped afterwards.

    :param uri: with the name of the database as its path.
    :param handle: pymongo's.
    """

    uri: str
    handle: Any

    def messages(self) -> int:
        """How many wait in all queues."""
        return int(self.handle.messages.count_documents({}))

    def round_trips(self) -> list[float]:
        """Milliseconds that each of many small reads takes."""
        took = []
        for _ in range(_ROUND_TRIP_SAMPLES):
            begun = perf_counter()
            self.handle.schema.find_one({})
            took.append((perf_counter() - begun) * 1000)
        return took


@contextmanager
def create_mongo_database(uri: str) -> Iterator[MongoDatabase]:
    """
    A new database on the server that `uri` names.

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
def start_mongo_daemon(
    uri: str, settings: Mapping[str, str] | None = None
) -> Iterator[tuple[TemporaryDaemon, MongoDatabase]]:
    """A single node."""
    with create_mongo_database(uri) as place:
        with run_temporary_daemon({**_mongo_settings(place), **(settings or {})}) as daemon:
            yield daemon, place


@contextmanager
def start_cluster(count: int, uri: str) -> Iterator[tuple[list[TemporaryDaemon], MongoDatabase]]:
    """Nodes of one cluster; the public URL of all is that of the first."""
    with ExitStack() as stack:
        place = stack.enter_context(create_mongo_database(uri))
        secret = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mediatord-bench-"))) / "secret"
        with open(os.open(secret, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))
        daemons: list[TemporaryDaemon] = []
        for number in range(count):
            settings = {
                **_mongo_settings(place),
                "MEDIATORD_NODE": f"node-{number}",
                "MEDIATORD_CLUSTER__LISTEN": f"tcp:{find_free_port()}:interface=127.0.0.1",
                "MEDIATORD_CLUSTER__SECRET_FILE": str(secret),
            }
            beside = daemons[0] if daemons else None
            daemons.append(stack.enter_context(run_temporary_daemon(settings, beside=beside)))
        yield daemons, place


def _mongo_settings(place: MongoDatabase) -> dict[str, str]:
    return {
        **DAEMON_SETTINGS,
        "MEDIATORD_STORAGE__BACKEND": "mongodb",
        "MEDIATORD_STORAGE__MONGODB__URI": place.uri,
    }


SQLITE_GOAL = 0.4
NODES_GOAL = 2.2
CLUSTER_NODES = 3

_ON_MONGODB, _ON_SQLITE = "on MongoDB", "on SQLite"
_THREE_NODES, _ONE_NODE = f"{CLUSTER_NODES} nodes", "1 node"
_NODE_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms")
_OF_SQLITE, _NODE_OF_ONE = "x SQLite", "x one node"


class _ClusterTarget:
    """Daemons that do one work, and the forwards that are posted to them."""

    def __init__(
        self, daemons: Sequence[TemporaryDaemon], group: WalletGroup, stored_check: StoredMessageCheck, place: Path
    ) -> None:
        path = TargetServer.at(group.mediator.http_uri, 0).path
        self._servers = [TargetServer.at(daemon.url + path, daemon.pid) for daemon in daemons]
        self._group = group
        self._stored_check = stored_check
        self._place = place

    @property
    def failures(self) -> Sequence[str]:
        """What went wrong."""
        return self._stored_check.failures

    def prepare(self, size: int) -> None:
        """Make the forwards of one size."""
        write_bodies(self._place, build_forwards(self._group, size, DISTINCT_MESSAGES))

    def post(self, plan: BenchmarkPlan, seconds: float, nodes: int) -> Figures:
        """So many connections over so many of the nodes."""
        servers = self._servers[:nodes]
        post = post_to_servers(servers, self._place, plan.clients * nodes, seconds)
        return self._stored_check.check(post)


def measure_mongodb(plan: BenchmarkPlan) -> ResultTable:
    """The same daemon with two backends, taking turns."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))
        daemon, database = stack.enter_context(start_mongo_daemon(plan.mongodb))
        mongo = _make_cluster_target([daemon], database, place / "mongodb")
        plain = stack.enter_context(run_temporary_daemon(DAEMON_SETTINGS))
        group = enrol_group(plain.url, RECIPIENTS)
        server = TargetServer.at(group.mediator.http_uri, plain.pid)
        stored_check = StoredMessageCheck(server, lambda: count_stored_rows(plain.directory / DATABASE_FILE))
        sqlite = _ClusterTarget([plain], group, stored_check, place / "sqlite")
        contenders: dict[str, tuple[_ClusterTarget, int]] = {_ON_MONGODB: (mongo, 1), _ON_SQLITE: (sqlite, 1)}
        rows, targets = _compare_targets(plan, contenders, _OF_SQLITE, SQLITE_GOAL)
        failures = (*mongo.failures, *sqlite.failures)
    note = f"{plan.clients} connections; 202 means on the disks of a majority of the replica set, or of SQLite's."
    return ResultTable(
        "One node on MongoDB and on SQLite", (*_NODE_COLUMNS, _OF_SQLITE), rows, targets, (note,), tuple(failures)
    )


def measure_nodes(plan: BenchmarkPlan) -> ResultTable:
    """All nodes of a cluster, and one of them alone, taking turns."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))
        daemons, database = stack.enter_context(start_cluster(CLUSTER_NODES, plan.mongodb))
        target = _make_cluster_target(daemons, database, place / "bodies")
        rows, targets = _compare_targets(
            plan, {_THREE_NODES: (target, CLUSTER_NODES), _ONE_NODE: (target, 1)}, _NODE_OF_ONE, NODES_GOAL
        )
        failures = target.failures
    note = (
        f"{plan.clients} connections to each node that is posted to. {os.cpu_count()} cores for {CLUSTER_NODES} nodes, "
        "MongoDB and two load generators for each node."
    )
    return ResultTable(
        "Nodes of one cluster", (*_NODE_COLUMNS, _NODE_OF_ONE), rows, targets, (note,), tuple(failures)
    )


def _make_cluster_target(daemons: Sequence[TemporaryDaemon], database: MongoDatabase, place: Path) -> _ClusterTarget:
    group = enrol_group(daemons[0].url, RECIPIENTS)
    server = TargetServer.at(group.mediator.http_uri, daemons[0].pid)
    return _ClusterTarget(daemons, group, StoredMessageCheck(server, database.messages), place)


def _compare_targets(
    plan: BenchmarkPlan, contenders: dict[str, tuple[_ClusterTarget, int]], column: str, goal: float
) -> tuple[dict[str, Figures], tuple[PerformanceTarget, ...]]:
    """The first contender beside the second, for all sizes."""
    rows: dict[str, Figures] = {}
    targets: list[PerformanceTarget] = []
    first, second = contenders
    for size in plan.sizes:
        for target, nodes in contenders.values():
            target.prepare(size)
            target.post(plan, plan.seconds / 4, nodes)
        rounds = run_interleaved(
            {name: _cluster_contender(plan, *one) for name, one in contenders.items()}, plan.rounds
        )
        ratio = rounds.ratio(first, second, PER_SECOND)
        for name, compared in ((first, ratio), (second, 1.0)):
            rows[f"{format_size(size)}  {name}"] = rounds.medians(name) | {column: compared}
        targets.append(PerformanceTarget(f"durable forwards {format_size(size)} {first}, {column}", goal, ratio))
    return rows, tuple(targets)


def _cluster_contender(plan: BenchmarkPlan, target: _ClusterTarget, nodes: int) -> Contender:
    return lambda: target.post(plan, plan.seconds, nodes)


_RECIPIENTS = 32
_AT_ONCE = (1, 8)
_MESSAGES_PER_RECIPIENT = 4
_SAME_NODE, _OTHER_NODE = "at the same node", "at another node"
_PUSH_P99 = "sent-push p99"


class _LiveWallets:
    """Wallets in live mode at one node."""

    def __init__(self, group: WalletGroup, at: TemporaryDaemon, size: int) -> None:
        target = urlsplit(group.mediator.http_uri)
        address = urlsplit(at.url).netloc
        self._port = target.port or 80
        self.sockets = [WebSocketClient(f"ws://{address}{target.path}") for _ in group.wallets]
        for one, wallet in zip(self.sockets, group.wallets, strict=True):
            enable_live_delivery(one, wallet, group)
        bodies = build_forwards(group, size, _RECIPIENTS * _MESSAGES_PER_RECIPIENT)
        self._requests = [encode_request(self._port, target.path, body) for body in bodies]

    def exchange(self, at_once: int, seconds: float) -> Figures:
        """Post to the first node, and wait for every push."""
        exchange = PushExchange(make_push_senders(self._port, self._requests, self.sockets, at_once), seconds)
        exchange.run()
        return exchange.figures()


def measure_remote_push(plan: BenchmarkPlan) -> ResultTable:
    """Both ways in turn, in one cluster of two nodes."""
    size = plan.sizes[0]
    rows: dict[str, Figures] = {}
    targets: list[PerformanceTarget] = []
    with ExitStack() as stack:
        daemons, database = stack.enter_context(start_cluster(2, plan.mongodb))
        first, second = daemons
        wallets_by_node = {
            name: _LiveWallets(enrol_group(first.url, _RECIPIENTS), at, size)
            for name, at in ((_SAME_NODE, first), (_OTHER_NODE, second))
        }
        for live_wallets in wallets_by_node.values():
            for one in live_wallets.sockets:
                stack.callback(one.close)
        round_trip = compute_percentile(database.round_trips(), 0.99)
        for at_once in _AT_ONCE:
            contenders = {
                name: _remote_push_contender(live_wallets, at_once, plan.seconds)
                for name, live_wallets in wallets_by_node.items()
            }
            rounds = run_interleaved(contenders, plan.rounds)
            for name in contenders:
                rows[f"{format_size(size)}  {name}, {at_once} at once"] = rounds.medians(name)
            allowed = 2 * rounds.medians(_SAME_NODE)[_PUSH_P99] + round_trip
            measured = allowed / rounds.medians(_OTHER_NODE)[_PUSH_P99]
            targets.append(
                PerformanceTarget(f"twice the same node's p99 and a round trip, {at_once} at once", 1.0, measured)
            )
        require_no_push([one for live_wallets in wallets_by_node.values() for one in live_wallets.sockets])
    columns = ("msg/s", "sent-202 p50", "sent-push p50", _PUSH_P99, "202-push p50", "202-push p99")
    note = (
        f"Milliseconds. A round trip to the store takes {round_trip:.2f} (p99). Each forward was pushed exactly once."
    )
    return ResultTable("Live push across nodes", columns, rows, tuple(targets), (note,))


def _remote_push_contender(live_wallets: _LiveWallets, at_once: int, seconds: float) -> Contender:
    return lambda: live_wallets.exchange(at_once, seconds)


PRESENCE_CPU_GOAL = 0.02

_SPARE_FILES = 200
_SETTLE_SECONDS = 5.0
# Long enough for rounds that come every quarter of a minute to be in it several times.
_WATCH_SECONDS = 60.0
_SHARE = "% of one core"


def measure_presence(plan: BenchmarkPlan) -> ResultTable:
    """CPU of a node of a cluster, and of a single one, each with as many wallets in live mode, one at a time."""
    count = min(plan.sockets, raise_file_limit() - _SPARE_FILES)
    shares: dict[str, float] = {}
    with ExitStack() as stack:
        (daemon,), _ = stack.enter_context(start_cluster(1, plan.mongodb))
        shares["in a cluster"] = _measure_idle_cpu_share(daemon, count)
    with ExitStack() as stack:
        daemon, _ = stack.enter_context(start_mongo_daemon(plan.mongodb))
        shares["alone"] = _measure_idle_cpu_share(daemon, count)
    cost = max(shares["in a cluster"] - shares["alone"], 1e-4)
    rows: dict[str, Figures] = {
        f"{count} live sessions, {name}": {_SHARE: 100 * share} for name, share in shares.items()
    }
    rows["presence"] = {_SHARE: 100 * cost}
    note = f"Over {_WATCH_SECONDS:.0f} s in which no message comes; each session of a wallet of its own."
    target = PerformanceTarget(
        f"{100 * PRESENCE_CPU_GOAL:.0f} % of one core, x presence", 1.0, PRESENCE_CPU_GOAL / cost
    )
    return ResultTable("Presence", (_SHARE,), rows, (target,), (note,))


def _measure_idle_cpu_share(daemon: TemporaryDaemon, count: int) -> float:
    """Seconds of CPU for each second by the clock."""
    group = enrol_group(daemon.url, count)
    path = urlsplit(group.mediator.http_uri).path
    sockets = []
    try:
        for wallet in group.wallets:
            sockets.append(WebSocketClient(f"ws://{urlsplit(daemon.url).netloc}{path}"))
            enable_live_delivery(sockets[-1], wallet, group)
        time.sleep(_SETTLE_SECONDS)
        before = cpu_seconds(daemon.pid)
        time.sleep(_WATCH_SECONDS)
        return (cpu_seconds(daemon.pid) - before) / _WATCH_SECONDS
    finally:
        for one in sockets:
            one.close()
