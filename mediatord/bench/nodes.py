"""Durable forwards on MongoDB: one node beside the same on SQLite, and three nodes beside one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from mediatord.bench.accounting import Accounting
from mediatord.bench.cluster import Database, cluster_of, on_mongodb
from mediatord.bench.crowd import Crowd, forwards, gather
from mediatord.bench.database import DATABASE, stored_rows
from mediatord.bench.drive import PER_CPU_SECOND, PER_SECOND, Server, post_to_all
from mediatord.bench.figures import Contender, Figures, Table, Target, size_name, take_turns
from mediatord.bench.load import write_bodies
from mediatord.bench.plan import DAEMON_SETTINGS, DISTINCT_MESSAGES, RECIPIENTS, Plan
from mediatord.wallet.throwaway import Daemon, throw_away_daemon

SQLITE_GOAL = 0.4
NODES_GOAL = 2.2
NODES = 3

_ON_MONGODB, _ON_SQLITE = "on MongoDB", "on SQLite"
_THREE, _ONE = f"{NODES} nodes", "1 node"
_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms")
_OF_SQLITE, _OF_ONE = "x SQLite", "x one node"


class _Target:
    """Daemons that do one work, and the forwards that are posted to them."""

    def __init__(self, daemons: Sequence[Daemon], crowd: Crowd, accounting: Accounting, place: Path) -> None:
        path = Server.at(crowd.mediator.http_uri, 0).path
        self._servers = [Server.at(daemon.url + path, daemon.pid) for daemon in daemons]
        self._crowd = crowd
        self._accounting = accounting
        self._place = place

    @property
    def failures(self) -> Sequence[str]:
        """What went wrong."""
        return self._accounting.failures

    def prepare(self, size: int) -> None:
        """Make the forwards of one size."""
        write_bodies(self._place, forwards(self._crowd, size, DISTINCT_MESSAGES))

    def post(self, plan: Plan, seconds: float, nodes: int) -> Figures:
        """So many connections over so many of the nodes."""
        servers = self._servers[:nodes]
        post = post_to_all(servers, self._place, plan.clients * nodes, seconds)
        return self._accounting.check(post)


def measure_mongodb(plan: Plan) -> Table:
    """The same daemon with two backends, taking turns."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))
        daemon, database = stack.enter_context(on_mongodb(plan.mongodb))
        mongo = _target([daemon], database, place / "mongodb")
        plain = stack.enter_context(throw_away_daemon(DAEMON_SETTINGS))
        crowd = gather(plain.url, RECIPIENTS)
        server = Server.at(crowd.mediator.http_uri, plain.pid)
        accounting = Accounting(server, lambda: stored_rows(plain.directory / DATABASE))
        sqlite = _Target([plain], crowd, accounting, place / "sqlite")
        contenders: dict[str, tuple[_Target, int]] = {_ON_MONGODB: (mongo, 1), _ON_SQLITE: (sqlite, 1)}
        rows, targets = _compare(plan, contenders, _OF_SQLITE, SQLITE_GOAL)
        failures = (*mongo.failures, *sqlite.failures)
    note = f"{plan.clients} connections; 202 means on the disks of a majority of the replica set, or of SQLite's."
    return Table(
        "One node on MongoDB and on SQLite", (*_COLUMNS, _OF_SQLITE), rows, targets, (note,), tuple(failures)
    )


def measure_nodes(plan: Plan) -> Table:
    """All nodes of a cluster, and one of them alone, taking turns."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))
        daemons, database = stack.enter_context(cluster_of(NODES, plan.mongodb))
        target = _target(daemons, database, place / "bodies")
        rows, targets = _compare(plan, {_THREE: (target, NODES), _ONE: (target, 1)}, _OF_ONE, NODES_GOAL)
        failures = target.failures
    note = (
        f"{plan.clients} connections to each node that is posted to. {os.cpu_count()} cores for {NODES} nodes, "
        "MongoDB and two load generators for each node."
    )
    return Table("Nodes of one cluster", (*_COLUMNS, _OF_ONE), rows, targets, (note,), tuple(failures))


def _target(daemons: Sequence[Daemon], database: Database, place: Path) -> _Target:
    crowd = gather(daemons[0].url, RECIPIENTS)
    server = Server.at(crowd.mediator.http_uri, daemons[0].pid)
    return _Target(daemons, crowd, Accounting(server, database.messages), place)


def _compare(
    plan: Plan, contenders: dict[str, tuple[_Target, int]], column: str, goal: float
) -> tuple[dict[str, Figures], tuple[Target, ...]]:
    """The first contender beside the second, for all sizes."""
    rows: dict[str, Figures] = {}
    targets: list[Target] = []
    first, second = contenders
    for size in plan.sizes:
        for target, nodes in contenders.values():
            target.prepare(size)
            target.post(plan, plan.seconds / 4, nodes)
        rounds = take_turns({name: _contender(plan, *one) for name, one in contenders.items()}, plan.rounds)
        ratio = rounds.ratio(first, second, PER_SECOND)
        for name, compared in ((first, ratio), (second, 1.0)):
            rows[f"{size_name(size)}  {name}"] = rounds.medians(name) | {column: compared}
        targets.append(Target(f"durable forwards {size_name(size)} {first}, {column}", goal, ratio))
    return rows, tuple(targets)


def _contender(plan: Plan, target: _Target, nodes: int) -> Contender:
    return lambda: target.post(plan, plan.seconds, nodes)
