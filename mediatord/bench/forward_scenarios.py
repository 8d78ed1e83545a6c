"""Scenarios of forwards to offline wallets: their rate beside baselines, their latency by load, several workers."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count, cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

from mediatord.bench.envelope_scenario import OF_G, KeyAgreementBaseline
from mediatord.bench.load_generator import TargetServer, post
from mediatord.bench.measured_mediator import ForwardLoad, open_mediator
from mediatord.bench.plan import BenchmarkPlan
from mediatord.bench.processes import assign_cores, pin_to_cores, read_line, spawn_module
from mediatord.bench.results import (
    CLIENT_US,
    PER_CPU_SECOND,
    PER_SECOND,
    Contender,
    Figures,
    ResultTable,
    format_size,
    latency_figures,
)
from mediatord.bench.wallet_group import build_inner_envelope

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
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))
        connection = stack.enter_context(closing(sqlite3.connect(place / "bare.sqlite3", isolation_level=None)))
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


_FORWARD_OF_G_GOAL = 0.22
_OF_SITE_PER_CPU, _OF_SITE = "x stock Site per CPU-s", "x stock Site"
_DURABLE_ROW, _SITE_ROW, _TARGET_ROW = "mediatord, durable", "stock Site, empty 202", "target"
# With few clients, few messages share a commit.
_FEW_CONNECTIONS = 32
_FORWARD_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", CLIENT_US, OF_G, _OF_SITE_PER_CPU)
_TARGET_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", "p99.9 ms", CLIENT_US, OF_G, _OF_SITE)


def measure_forwards(plan: BenchmarkPlan) -> ResultTable:  # noqa: C901  with and without a target
    """Durable forwards to offline recipients beside three baselines: g, an empty Twisted site, and SQLite alone."""
    title = f"Forwards to {plan.target}" if plan.target else "Forwards, durable before the answer"
    table = ResultTable(title, _TARGET_COLUMNS if plan.target else _FORWARD_COLUMNS)
    cores, agreement, lengths = assign_cores(), KeyAgreementBaseline(), list[str]()

    def pinned(contender: Contender) -> Contender:
        def run() -> Figures:
            with pin_to_cores(cores.server):
                return contender()

        return run

    with open_mediator(plan, cores) as mediator, ExitStack() as stack:
        with pin_to_cores(cores.server):
            site = stack.enter_context(spawn_module("mediatord.bench.baseline_servers", "empty"))
        stock = TargetServer(f"http://127.0.0.1:{read_line(site)}/didcomm", site.pid)
        load = ForwardLoad(mediator, table.failures)
        kinds = [(format_size(size), size, load) for size in plan.sizes]
        if not plan.target:
            # Most wallets have long DIDs, which name their mediator; one row shows what they cost.
            long = ForwardLoad(mediator, table.failures, short=False)
            long.stored_check = load.stored_check
            kinds.insert(1, (f"{kinds[0][0]}, long DIDs", plan.sizes[0], long))
        ratios = {OF_G: (agreement.name, PER_CPU_SECOND)}
        ratios |= (
            {_OF_SITE: (_SITE_ROW, PER_SECOND)} if plan.target else {_OF_SITE_PER_CPU: (_SITE_ROW, PER_CPU_SECOND)}
        )
        for name, size, one in kinds:
            one.prepare(size)
            lengths.append(f"{name} {max(map(len, one.bodies))}")
            one.post(plan.clients, plan.warm_up_seconds)
            load_row = _TARGET_ROW if plan.target else _DURABLE_ROW
            contenders: dict[str, Contender] = {load_row: partial(one.post, plan.clients, plan.seconds)}
            with ExitStack() as bare:
                if not plan.target:
                    few = f"mediatord, {_FEW_CONNECTIONS} connections"
                    contenders[few] = partial(one.post, _FEW_CONNECTIONS, plan.seconds)
                contenders[agreement.name] = pinned(agreement.run)
                contenders[_SITE_ROW] = partial(_post_to_site, stock, one.bodies, plan)
                if not plan.target:
                    rows = [(wallet.did, build_inner_envelope(wallet.identity, size)) for wallet in one.group.wallets]
                    sqlite = bare.enter_context(_open_bare_sqlite(rows, plan.clients, plan.seconds / 2))
                    contenders["SQLite alone, grouped"] = pinned(sqlite)
                table.compare(contenders, plan.rounds, f"{name}  ", ratios)
            if not mediator.pid:
                del table.rows[f"{name}  {_TARGET_ROW}"][OF_G]
        check = load.stored_check
    if plan.target:
        unknown = "" if mediator.pid else " The target's CPU time is unknown; use --target-pid."
        table.notes = [f"{plan.clients} connections; g is {agreement.name} in the same round.{unknown}", check.note]
    else:
        name = format_size(plan.sizes[0])
        measured = table.rows[f"{name}  {_DURABLE_ROW}"][OF_G]
        table.add_target(f"durable forwards {name}, of g", _FORWARD_OF_G_GOAL, measured)
        table.notes = [
            f"{plan.clients} connections, one daemon process; SQLite alone commits {plan.clients} rows at a time, "
            "and its latencies are those of a commit.",
            f"g is {agreement.name} in the same round, by CPU time like the daemon's. {cores.note}",
            f"Bytes posted: {', '.join(lengths)}.",
            check.note,
        ]
    return table


def _post_to_site(site: TargetServer, bodies: list[bytes], plan: BenchmarkPlan) -> Figures:
    return post(site, bodies, plan.clients, plan.seconds).figures()


_P99_GOAL_MS = 50.0
LOAD_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
GOAL_SHARE = 0.7
_OFFERED = "offered/s"
_LATENCY_COLUMNS = (_OFFERED, PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", "p99.9 ms", "late %", CLIENT_US)
# Connections of the open loop for each one of the closed loop.
_SPARE_CONNECTIONS = 4


def measure_latency(plan: BenchmarkPlan) -> ResultTable:
    """Latency of forwards in a closed loop, then in an open loop at shares of that rate."""
    table = ResultTable("Latency of a forward by load", _LATENCY_COLUMNS)
    name, seconds, connections = (
        format_size(plan.sizes[0]),
        plan.seconds * plan.rounds / 2,
        plan.clients * _SPARE_CONNECTIONS,
    )
    with open_mediator(plan, assign_cores()) as mediator:
        load = ForwardLoad(mediator, table.failures)
        load.prepare(plan.sizes[0])
        load.post(plan.clients, plan.warm_up_seconds)
        full = table.rows[f"{name}  closed loop"] = load.post(plan.clients, seconds)
        for share in LOAD_SHARES:
            rate = share * full[PER_SECOND]
            posted = load.start(connections, seconds, rate=rate, even=plan.even).result()
            figures = load.stored_check.check(posted) | {_OFFERED: rate, "late %": posted.late_percent}
            table.rows[f"{name}  at {share:.0%}"] = figures
    p99 = table.rows[f"{name}  at {GOAL_SHARE:.0%}"]["p99 ms"]
    table.add_target(f"forward p99 {name} at {GOAL_SHARE:.0%}, ms", _P99_GOAL_MS, p99, most=True)
    table.notes = [
        f"Closed loop: {plan.clients} connections. Open loop: "
        f"{'fixed intervals' if plan.even else 'a Poisson process'} on up to {connections} connections.",
        f"Milliseconds since a forward was due; late ones are included. {mediator.note}",
        load.stored_check.note,
    ]
    return table


# By number of workers.
_WORKER_GOALS = {2: 1.6, 4: 3.0}
_OF_ONE_WORKER = "x one worker"
_WORKER_COLUMNS = (PER_SECOND, PER_CPU_SECOND, "p50 ms", "p99 ms", CLIENT_US, _OF_ONE_WORKER)


def measure_workers(plan: BenchmarkPlan) -> ResultTable:
    """Forwards to a daemon with one worker, and to daemons with as many workers as there are cores for."""
    cores, size_name = len(os.sched_getaffinity(0)), format_size(plan.sizes[0])
    table = ResultTable("Workers", _WORKER_COLUMNS)
    names = {number: f"{number} worker{'s' if number > 1 else ''}" for number in (1, 2, 4) if number <= cores}
    contenders: dict[str, Contender] = {}
    with ExitStack() as stack:
        for number, name in names.items():
            mediator = stack.enter_context(open_mediator(plan, settings={"MEDIATORD_WORKERS": str(number)}))
            load = ForwardLoad(mediator, table.failures)
            load.prepare(plan.sizes[0])
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
    return table
