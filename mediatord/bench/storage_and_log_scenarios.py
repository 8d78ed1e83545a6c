"""
Scenarios of storage: large databases, a slow disk, what a message costs in database, event log and CPU, and the cost
of the event log.
"""

from __future__ import annotations

import gzip
import os
import re
import signal
import sqlite3
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median

from mediatord.bench.load_generator import Load, TargetServer, pace
from mediatord.bench.measured_mediator import (
    CycleLoad,
    ForwardLoad,
    MeasuredMediator,
    count_stored_rows,
    open_mediator,
    query_database,
)
from mediatord.bench.plan import RECIPIENTS, BenchmarkPlan
from mediatord.bench.processes import assign_cores
from mediatord.bench.raw_clients import PING_OPCODE
from mediatord.bench.results import (
    PER_CPU_SECOND,
    PER_SECOND,
    Contender,
    Figures,
    LoadResult,
    ResultTable,
    format_size,
    latency_figures,
    progress_bar,
    safe_ratio,
    scenario,
)
from mediatord.bench.wallet_group import LiveSocket
from mediatord.protocol.canonical_did import compute_did_digest
from mediatord.store.sqlite.connection import hash_did
from mediatord.wallet.temporary_daemon import TemporaryDaemon

_INSERT_BATCH = 50_000
# Another DID of the same length: a part of the key is replaced.
_DID_EXPRESSION = "substr(one.did, 1, 24) || lower(hex(randomblob(12))) || substr(one.did, 49)"
_QUEUE_COUNTS_QUERY = (
    "SELECT account_id, recipient_id, count(*), sum(size) FROM message GROUP BY account_id, recipient_id"
)
_NUMBERS_CTE = "WITH RECURSIVE number (i) AS (SELECT ? UNION ALL SELECT i + 1 FROM number WHERE i + 1 < ?)"


def add_accounts(database: Path, count: int) -> None:
    """
    Add accounts with one registered DID each to the database of a stopped daemon, as copies of its first ones.

    Rows are copied with other names and numbers, so they have all columns of the current schema.
    """
    with closing(_open_database(database)) as connection:
        (highest,) = connection.execute("SELECT max(id) FROM account").fetchone()
        changed = {"did": _DID_EXPRESSION, "did_key": "NULL", "recipients": "0"}
        _insert_copies(connection, "account", changed, "number", count)
        with connection:  # afterwards, as the expression is another DID wherever it stands
            connection.execute("UPDATE account SET did_key = account_key(did) WHERE did_key IS NULL")
        changed = {"account_id": "account.id", "did": "account.did", "did_digest": "did_digest(account.did)"}
        _insert_copies(connection, "recipient", changed, f"account WHERE account.id > {highest}")


def add_messages(database: Path, count: int) -> None:
    """Add messages for all accounts in turn to the database of a stopped daemon, as copies of its first one."""
    with closing(_open_database(database)) as connection:
        (recipients,) = connection.execute("SELECT count(*) FROM recipient").fetchone()
        connection.execute("CREATE TEMP TABLE addressee (i INTEGER PRIMARY KEY, id INTEGER, account_id INTEGER)")
        connection.execute("INSERT INTO addressee SELECT NULL, id, account_id FROM recipient ORDER BY id")
        changed = {
            "id": "substr(one.id, 1, 8) || printf('%08x', number.i) || lower(hex(randomblob(8)))",
            "recipient_id": "addressee.id",
            "account_id": "addressee.account_id",
        }
        source = f"number JOIN addressee ON addressee.i = 1 + number.i % {recipients}"
        _insert_copies(connection, "message", changed, source, count)
        with connection:
            connection.execute("DELETE FROM queue")
            connection.execute(f"INSERT INTO queue {_QUEUE_COUNTS_QUERY}")
            connection.execute("UPDATE ledger SET accepted = accepted + ? WHERE protocol = 'didcomm'", [count])


def expire_messages(database: Path, count: int) -> None:
    """Let the newest messages in the database of a stopped daemon expire."""
    newest = "SELECT rowid FROM message ORDER BY rowid DESC LIMIT ?"
    with closing(_open_database(database)) as connection, connection:
        connection.execute(f"UPDATE message SET expires_at = received_at WHERE rowid IN ({newest})", [count])


def _open_database(database: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(database)
    for name, function in (("did_digest", compute_did_digest), ("account_key", hash_did)):
        connection.create_function(name, 1, function, deterministic=True)
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute("PRAGMA cache_size=-262144")
    return connection


def _insert_copies(
    connection: sqlite3.Connection, table: str, changed: Mapping[str, str], source: str, count: int = 1
) -> None:
    """
    Insert copies of the first row of a table, which has the name `one`, in batches.

    :param changed: expressions of the columns that are not copied.
    :param source: gives a row for each copy; its table `number` has the numbers below `count`.
    """
    described = connection.execute(f"SELECT name, type, pk FROM pragma_table_info('{table}')").fetchall()
    columns = [name for name, kind, key in described if not (key and kind == "INTEGER")]
    values = ", ".join(changed.get(name, f"one.{name}") for name in columns)
    copies = f"SELECT {values} FROM (SELECT * FROM {table} ORDER BY rowid LIMIT 1) AS one, {source}"
    statement = f"{_NUMBERS_CTE} INSERT INTO {table} ({', '.join(columns)}) {copies}"
    with progress_bar(range(0, count, _INSERT_BATCH), f"{table} rows") as starts:
        for start in starts:
            with connection:
                connection.execute(statement, [start, min(count, start + _INSERT_BATCH)])


# The daemon removes expired messages every 15 s; this is long enough for one such sweep to begin and end.
_SWEEP_SECONDS = 48.0
_MAX_EXPIRED = 100_000
_HEALTH_CHECKS_PER_SECOND, _FORWARDS_PER_SECOND = 100.0, 20.0
# Connections of health checks, sent one after the other unless a response is late.
_HEALTH_CONNECTIONS = 8
_OF_FIRST, _START, _LONGEST = "x first", "start s", "longest ms"


@scenario("Accounts and messages", (PER_SECOND, PER_CPU_SECOND, _OF_FIRST, _START, "p50 ms", "p99 ms", _LONGEST))
def measure_accounts(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Forwards to a hundred wallets of databases of different size; then the latency while messages expire."""
    cores = assign_cores()
    contenders, start_seconds = dict[str, Contender](), dict[str, float]()
    with ExitStack() as stack:
        for accounts, queued in [*((number, 0) for number in plan.accounts), (plan.accounts[0], plan.queued)]:
            name = f"{accounts:,} accounts" + (f", {queued:,} messages" if queued else "")
            load = ForwardLoad(stack.enter_context(open_mediator(plan, cores)), table.failures, plan.sizes[0])
            load.start(1, requests=1).result()
            grow = partial(_grow_database, accounts=accounts, queued=queued)
            start_seconds[name] = load.mediator.restart(change=grow)
            load.stored_check.reset()
            load.post(plan.clients, plan.warm_up_seconds * 2)
            contenders[name] = partial(load.post, plan.clients, plan.seconds)
        first, *others = contenders
        table.compare(contenders, plan.rounds, "", {_OF_FIRST: (first, PER_CPU_SECOND)})
        for name in contenders:
            table.rows[name][_START] = start_seconds[name]
        for name in others:
            table.add_target(f"forwards with {name}, x {first}", 0.85, table.rows[name][_OF_FIRST])
        table.add_target(f"start with {name}, s", 2.0, start_seconds[name], most=True)
        table.notes = [
            f"{format_size(plan.sizes[0])}, {plan.clients} connections, {RECIPIENTS} recipients; a daemon for each "
            f"row. `{_START}` is the time until /health succeeds. {cores.note}",
            _measure_sweep(plan, table, load),
        ]


def _grow_database(database: Path, *, accounts: int, queued: int) -> None:
    add_accounts(database, max(0, accounts - RECIPIENTS))
    if queued:
        add_messages(database, queued)


def _measure_sweep(plan: BenchmarkPlan, table: ResultTable, load: ForwardLoad) -> str:
    """Restart a daemon with expired messages, and measure health checks and forwards; a note."""
    database, expired = load.mediator.database, min(_MAX_EXPIRED, plan.queued)
    load.mediator.restart(change=partial(expire_messages, count=expired))
    load.stored_check.reset()
    before = count_stored_rows(database)
    seconds = min(_SWEEP_SECONDS, 10 * plan.seconds * plan.rounds)

    def measure(name: str, seconds: float) -> int:
        checks = _start_health_checks(load.mediator, seconds, _HEALTH_CHECKS_PER_SECOND)
        posted = load.start(plan.clients, seconds, rate=_FORWARDS_PER_SECOND, even=True).result()
        table.rows[f"{name}: /health"] = _with_longest(checks.result())
        table.rows[f"{name}: forwards"] = _with_longest(posted)
        return posted.accepted

    removed = before + measure("sweep", seconds) - count_stored_rows(database)
    for name in ("sweep: /health", "sweep: forwards"):
        table.add_target(f"{name}, longest ms", 20.0, table.rows[name][_LONGEST], most=True)
    if removed == expired:
        measure("no sweep", seconds / 4)
    return (
        f"Sweep: {removed} of {expired} expired messages were removed, with {_HEALTH_CHECKS_PER_SECOND:.0f} requests "
        f"to /health and {_FORWARDS_PER_SECOND:.0f} forwards per second at fixed times; `{_LONGEST}` is the maximum."
    )


def _start_health_checks(mediator: MeasuredMediator, seconds: float, rate: float) -> Load:
    server = TargetServer(f"{mediator.url}/health", mediator.pid, success=("200",), method="GET")
    return Load([server], [b""], _HEALTH_CONNECTIONS, seconds, rate=rate, even=True)


def _with_longest(load: LoadResult) -> Figures:
    figures = load.figures()
    selected = {name: figures[name] for name in (PER_SECOND, "p50 ms", "p99 ms")}
    return selected | {_LONGEST: max(load.latencies_us, default=0) / 1000}


_COST_ACCOUNTS = 500
# Of the messages of the memory scenario: pages are filled evenly long before.
_COST_SHARE = 10
_FETCH_LIMIT = 10
_PAYLOAD, _DATABASE, _LOG, _PACKED, _CPU = "payload B", "database B", "log B", "gzipped log B", "us CPU"
_LOG_SETTINGS = {"MEDIATORD_LOG__ROTATE__COMPRESS": "false"}


@scenario("Cost of a message", (_PAYLOAD, _DATABASE, _LOG, _PACKED, _CPU))
def measure_cost(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Bytes in the database and in the event log, and CPU time: per account, per message accepted and fetched."""
    count = max(_COST_ACCOUNTS, plan.messages // _COST_SHARE)
    with open_mediator(plan, settings=_LOG_SETTINGS) as mediator:
        database, lines = mediator.database, _NewLogLines(mediator.database.parent / "log")
        before = _count_database_bytes(database)
        load = ForwardLoad(mediator, table.failures, wallets=_COST_ACCOUNTS, short=False)
        table.rows["an account"] = {_DATABASE: (_count_database_bytes(database) - before) / _COST_ACCOUNTS}
        for size in plan.sizes:
            load.prepare(size, _COST_ACCOUNTS)
            before = _count_database_bytes(database)
            lines.read()
            result = load.start(plan.clients, requests=count).result()
            load.stored_check.check(result)
            table.rows[f"{format_size(size)}  accepted"] = {
                _PAYLOAD: float(query_database(database, "SELECT avg(size) FROM message")),
                _DATABASE: (_count_database_bytes(database) - before) / count,
                **lines.figures(count),
                _CPU: 1e6 * result.cpu_seconds / count,
            }
            start_cpu = mediator.cpu_seconds
            fetched = load.group.drain(1, _FETCH_LIMIT).accepted
            spent = 1e6 * safe_ratio(mediator.cpu_seconds - start_cpu, fetched)
            table.rows[f"{format_size(size)}  fetched"] = {**lines.figures(fetched), _CPU: spent}
            load.stored_check.reset()
    length = sum(len(wallet.did) for wallet in load.group.wallets) // _COST_ACCOUNTS
    table.notes = [
        f"{count} messages of each size for {_COST_ACCOUNTS} accounts with a recipient DID each, "
        f"fetched {_FETCH_LIMIT} at a time.",
        f"The database is SQLite, with all indexes; DIDs are did:peer:2 of {length} characters.",
    ]


def _count_database_bytes(database: Path) -> int:
    """Pages in use, in the database or its write-ahead log."""
    names = ("page_count", "freelist_count", "page_size")
    pages, free, size = (int(query_database(database, f"PRAGMA {name}")) for name in names)
    return (pages - free) * size


class _NewLogLines:
    """Lines that a daemon adds to its event log."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._read = 0

    def read(self) -> bytes:
        """Lines since the last call."""
        segments = sorted(self._directory.glob("*.jsonl"), key=lambda path: (path.name == "events.jsonl", path.name))
        text = b"".join(path.read_bytes() for path in segments)
        lines, self._read = text[self._read :], len(text)
        return lines

    def figures(self, count: int) -> Figures:
        """Bytes of new lines for each of `count` messages."""
        lines = self.read()
        return {_LOG: safe_ratio(len(lines), count), _PACKED: safe_ratio(len(gzip.compress(lines)), count)}


# Share of the CPU time of a forward that the log may add.
_MAX_LOG_COST = 0.08
_LOG_ON, _LOG_OFF, _LINES = "event log on", "event log off", "lines"
_LEVELS = {_LOG_ON: "info", _LOG_OFF: "error"}
_RELOAD_SECONDS, _POLL_SECONDS = 15.0, 0.02


@scenario("The event log", (PER_SECOND, PER_CPU_SECOND, "us CPU/msg", _LINES, "us/line", "% of the CPU"))
def measure_event_log(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Forwards to the same daemon with the event log at level `info` and `error`, of which there are no events."""
    with open_mediator(plan, settings=_LOG_SETTINGS) as mediator:
        daemon, load = mediator.require_daemon(), ForwardLoad(mediator, table.failures, short=False)
        new_lines = _NewLogLines(daemon.directory / "log")

        def run(contender: str, seconds: float) -> Figures:
            _set_log_level(daemon, _LEVELS[contender])
            accepted = load.stored_check.accepted
            new_lines.read()
            figures = load.post(plan.clients, seconds)
            written = new_lines.read().count(b"\n")
            return figures | {_LINES: safe_ratio(written, load.stored_check.accepted - accepted)}

        for size in plan.sizes:
            name = format_size(size)
            load.prepare(size)
            run(_LOG_ON, plan.warm_up_seconds)
            contenders = {contender: partial(run, contender, plan.seconds) for contender in _LEVELS}
            rounds = table.compare(contenders, plan.rounds, f"{name}  ")
            ratio = rounds.ratio(_LOG_ON, _LOG_OFF, PER_CPU_SECOND)
            spent = median(
                safe_ratio(1e6, on[PER_CPU_SECOND]) - safe_ratio(1e6, off[PER_CPU_SECOND])
                for on, off in zip(rounds.found[_LOG_ON], rounds.found[_LOG_OFF], strict=True)
            )
            lines = rounds.medians(_LOG_ON)[_LINES]
            table.rows[f"{name}  cost"] = {
                "us CPU/msg": spent,
                _LINES: lines,
                "us/line": safe_ratio(spent, lines),
                "% of the CPU": 100 * (safe_ratio(1, ratio) - 1),
            }
            table.add_target(f"forwards {name} per CPU-s, x without the log", 1 / (1 + _MAX_LOG_COST), ratio)
    table.notes = [f"{plan.clients} connections, one daemon process; lines of the event log for each forward."]


def _set_log_level(daemon: TemporaryDaemon, level: str) -> None:
    """
    Change the level of the event log and reload the configuration.

    :raise RuntimeError: the daemon did not reload.
    """
    file, output = daemon.directory / "mediator.yaml", daemon.directory / "output.txt"
    text = file.read_text("utf-8")
    file.write_text(re.sub(r"(?m)^( +level:) \w+", rf"\1 {level}", text), encoding="utf-8")

    def count_reloads() -> int:
        return output.read_bytes().count(b"[mediatord.app.reload#info]")

    before, deadline = count_reloads(), time.monotonic() + _RELOAD_SECONDS
    os.kill(daemon.pid, signal.SIGHUP)
    while count_reloads() == before:
        if time.monotonic() > deadline:
            raise RuntimeError("the daemon did not reload its configuration")
        time.sleep(_POLL_SECONDS)


# Less than one sync of the slow disk.
_RESPONSE_GOAL_MS = 25.0
_SLOW_DISK = "50 ms a sync"
_PROGRAMS = {"this disk": (), _SLOW_DISK: ("mediatord.bench.baseline_servers", "slow-disk")}
_PROBES_PER_SECOND, _DISK_FORWARDS_PER_SECOND = 50.0, 200.0
_MAX_RATE = "at most/s"
_IDLE_SOCKETS = 4


@scenario(
    "A slow disk", (_MAX_RATE, PER_SECOND, "p50 ms", "p99 ms", "health p50", "health p99", "ping p50", "ping p99")
)
def measure_disk(plan: BenchmarkPlan, table: ResultTable) -> None:
    """Forwards in an open loop on this disk and on a slow one, with health checks and pings of idle sockets."""
    cores = assign_cores()
    with progress_bar(_PROGRAMS.items(), "disks") as programs:
        for name, program in programs:
            with open_mediator(plan, cores) as mediator:
                if program:
                    mediator.restart(*program)
                table.rows[name] = _measure_on_disk(plan, mediator, table.failures)
    for figure in ("health p99", "ping p99"):
        measured = table.rows[_SLOW_DISK][figure]
        table.add_target(f"{figure} with {_SLOW_DISK}, ms", _RESPONSE_GOAL_MS, measured, most=True)
    table.notes = [
        f"{format_size(plan.sizes[0])}, {plan.clients} connections. {_MAX_RATE}: closed loop. Then per second "
        f"{_DISK_FORWARDS_PER_SECOND:.0f} forwards, {_PROBES_PER_SECOND:.0f} requests to /health and "
        f"{_PROBES_PER_SECOND:.0f} pings, all at fixed times; milliseconds. {cores.note}",
    ]


def _measure_on_disk(plan: BenchmarkPlan, mediator: MeasuredMediator, failures: list[str]) -> Figures:
    seconds, size = plan.seconds * plan.rounds, plan.sizes[0]
    load = ForwardLoad(mediator, failures, size)
    idle = CycleLoad(mediator, failures, _IDLE_SOCKETS, size)
    most = load.start(plan.clients, seconds / 4).result()
    checks = _start_health_checks(mediator, seconds, _PROBES_PER_SECOND)
    posts = load.start(2 * plan.clients, seconds, rate=_DISK_FORWARDS_PER_SECOND, even=plan.even)
    pinged = _ping_sockets(idle.live_sockets, seconds, _PROBES_PER_SECOND)
    checked, posted = checks.result(), posts.result()
    stored = count_stored_rows(mediator.database)
    if stored != most.accepted + posted.accepted:
        failures.append(f"{most.accepted + posted.accepted} messages were accepted, {stored} are stored")
    if set(checked.statuses) != {"200"}:
        failures.append(f"/health answered {dict(checked.statuses)}")
    figures = posted.figures()
    return {
        _MAX_RATE: most.figures()[PER_SECOND],
        **{name: figures[name] for name in (PER_SECOND, "p50 ms", "p99 ms")},
        **latency_figures(checked.latencies_us, "health {}"),
        **latency_figures(pinged, "ping {}"),
    }


def _ping_sockets(live_sockets: list[LiveSocket], seconds: float, rate: float) -> list[int]:
    """Ping idle sockets in turn at fixed intervals; microseconds from when each ping was due to its pong."""
    latencies_us = []
    for due, live in zip(pace(rate, seconds), cycle(live_sockets), strict=False):
        live.socket.send(b"", PING_OPCODE)
        if live.socket.take():
            raise RuntimeError("a message on an idle socket")
        latencies_us.append(int((time.perf_counter() - due) * 1e6))
    return latencies_us
