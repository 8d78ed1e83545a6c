"""Scenarios of capacity: large databases, memory growth, storage and CPU of a message, the event log, a slow disk."""

from __future__ import annotations

import gzip
import os
import re
import signal
import sqlite3
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

from mediatord.bench.load_generator import (
    LoadResult,
    TargetServer,
    get_at_rate,
    post_at_rate,
    post_count,
    post_for_seconds,
)
from mediatord.bench.mediator_under_test import (
    DATABASE_FILE,
    ForwardLoad,
    StoredMessageCheck,
    count_stored_rows,
    open_temporary_directory,
    query_database,
    start_wallet_process,
)
from mediatord.bench.processes import (
    CoreAssignment,
    DaemonCommand,
    assign_cores,
    cpu_seconds,
    pin_to_cores,
    restart_daemon,
    rss_bytes,
    stop_daemon,
)
from mediatord.bench.scenario import (
    DAEMON_SETTINGS,
    DISTINCT_MESSAGES,
    PER_CPU_SECOND,
    PER_SECOND,
    RECIPIENTS,
    WARM_UP_SHARE,
    BenchmarkPlan,
    Figures,
    PerformanceTarget,
    ResultTable,
    compute_percentile,
    format_size,
    latency_figures,
    run_interleaved,
    safe_ratio,
)
from mediatord.bench.wallet_process import DrainRunner, WalletSetup
from mediatord.protocol.canonical_did import compute_did_digest
from mediatord.store.sqlite.connection import hash_did
from mediatord.wallet.temporary_daemon import TemporaryDaemon, run_temporary_daemon

_MIB = 1 << 20

_INSERT_BATCH = 50_000
# Another DID of the same length: a part of the key is replaced.
_DID_EXPRESSION = "substr(one.did, 1, 24) || lower(hex(randomblob(12))) || substr(one.did, 49)"
_QUEUE_COUNTS_QUERY = (
    "SELECT account_id, recipient_id, count(*), sum(size) FROM message GROUP BY account_id, recipient_id"
)
_NUMBERS_CTE = "WITH RECURSIVE number (i) AS (SELECT ? UNION ALL SELECT i + 1 FROM number WHERE i + 1 < ?) "


def add_accounts(database: Path, count: int) -> None:
    """
    Add accounts with one registered DID each to the database of a stopped daemon, as copies of its first ones.

    Rows are copied with other names and numbers, so they have all columns of the current schema.
    """
    with closing(_open_database(database)) as connection:
        (highest,) = connection.execute("SELECT max(id) FROM account").fetchone()
        changed = {"did": _DID_EXPRESSION, "did_key": f"account_key({_DID_EXPRESSION})", "recipients": "0"}
        columns, values = _copied_columns(connection, "account", changed)
        template = "(SELECT * FROM account ORDER BY id LIMIT 1) AS one"
        _insert_in_batches(
            connection, f"INSERT INTO account ({columns}) SELECT {values} FROM number, {template}", count
        )
        changed = {"account_id": "account.id", "did": "account.did", "did_digest": "did_digest(account.did)"}
        columns, values = _copied_columns(connection, "recipient", changed)
        template = "(SELECT * FROM recipient ORDER BY id LIMIT 1) AS one"
        source = f"account, {template} WHERE account.id > {highest}"
        with connection:
            connection.execute(f"INSERT INTO recipient ({columns}) SELECT {values} FROM {source}")


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
        columns, values = _copied_columns(connection, "message", changed)
        template = "(SELECT * FROM message ORDER BY rowid LIMIT 1) AS one"
        source = f"number, {template} JOIN addressee ON addressee.i = 1 + number.i % {recipients}"
        _insert_in_batches(connection, f"INSERT INTO message ({columns}) SELECT {values} FROM {source}", count)
        with connection:
            connection.execute("DELETE FROM queue")
            connection.execute(f"INSERT INTO queue {_QUEUE_COUNTS_QUERY}")
            connection.execute("UPDATE ledger SET accepted = accepted + ? WHERE half = 'didcomm'", [count])


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


def _copied_columns(connection: sqlite3.Connection, table: str, changed: Mapping[str, str]) -> tuple[str, str]:
    """Columns and their values: those of the row `one`, except changed ones and the row number."""
    described = connection.execute(f"SELECT name, type, pk FROM pragma_table_info('{table}')").fetchall()
    columns = [name for name, kind, key in described if not (key and kind == "INTEGER")]
    return ", ".join(columns), ", ".join(changed.get(name, f"one.{name}") for name in columns)


def _insert_in_batches(connection: sqlite3.Connection, statement: str, count: int) -> None:
    for start in range(0, count, _INSERT_BATCH):
        with connection:
            connection.execute(_NUMBERS_CTE + statement, [start, min(count, start + _INSERT_BATCH)])


_KEPT_GOAL = 0.85
_START_GOAL_SECONDS = 2.0
_HOLD_GOAL_MS = 20.0
# The daemon removes expired messages every 15 s; this is long enough for one such sweep to begin and end.
_SWEEP_SECONDS = 48.0
_MAX_EXPIRED = 100_000
_HEALTH_CHECKS_PER_SECOND, _FORWARDS_PER_SECOND = 100.0, 20.0
_OF_FIRST, _START, _LONGEST = "x first", "start s", "longest ms"
_ACCOUNT_COLUMNS = (PER_SECOND, PER_CPU_SECOND, _OF_FIRST, _START, "p50 ms", "p99 ms", _LONGEST)


@dataclass(frozen=True, slots=True)
class _LargeDatabase:
    """A daemon with a large database. :param start_seconds: until it was healthy."""

    name: str
    daemon: TemporaryDaemon
    command: DaemonCommand
    load: ForwardLoad
    start_seconds: float


def measure_accounts(plan: BenchmarkPlan) -> ResultTable:
    """Forwards to a hundred wallets of databases of different size; then the latency while messages expire."""
    kinds = [(number, 0) for number in plan.accounts] + [(plan.accounts[0], plan.queued)]
    cores = assign_cores()
    databases: list[_LargeDatabase] = []
    with ExitStack() as stack, pin_to_cores(cores.clients):
        place = open_temporary_directory(stack)
        for accounts, queued in kinds:
            with pin_to_cores(cores.server):
                daemon = stack.enter_context(run_temporary_daemon(DAEMON_SETTINGS))
            running = stack.enter_context(ExitStack())
            bodies = place / f"{accounts}-{queued}.bodies"
            databases.append(_grow_database(plan, daemon, accounts, queued, bodies, running))
        for one in databases:
            one.load.post(plan.clients, plan.seconds * WARM_UP_SHARE * 2)
        contenders = {one.name: partial(one.load.post, plan.clients, plan.seconds) for one in databases}
        rounds = run_interleaved(contenders, plan.rounds)
        failures = [failure for one in databases for failure in one.load.stored_check.failures]
        running.close()  # the last daemon is restarted with expired messages
        sweep_rows, sweep_note = _measure_sweep(plan, databases[-1])
    first = databases[0].name
    rows: dict[str, Figures] = {
        one.name: rounds.medians(one.name)
        | {_OF_FIRST: rounds.ratio(one.name, first, PER_CPU_SECOND), _START: one.start_seconds}
        for one in databases
    }
    targets = [
        PerformanceTarget(f"forwards with {one.name}, x {first}", _KEPT_GOAL, rows[one.name][_OF_FIRST])
        for one in databases[1:]
    ]
    last = databases[-1]
    targets.append(
        PerformanceTarget(f"start with {last.name}, s", _START_GOAL_SECONDS, last.start_seconds, most=True)
    )
    targets += [
        PerformanceTarget(f"{name}, longest ms", _HOLD_GOAL_MS, sweep_rows[name][_LONGEST], most=True)
        for name in list(sweep_rows)[:2]
    ]
    notes = (
        f"{format_size(plan.sizes[0])}, {plan.clients} connections, {RECIPIENTS} recipients; a daemon for each row. "
        f"`{_START}` is the time until /health succeeds. {cores.note}",
        sweep_note,
    )
    rows |= sweep_rows
    return ResultTable("Accounts and messages", _ACCOUNT_COLUMNS, rows, tuple(targets), notes, tuple(failures))


def _grow_database(
    plan: BenchmarkPlan, daemon: TemporaryDaemon, accounts: int, queued: int, bodies: Path, running: ExitStack
) -> _LargeDatabase:
    """Enrol wallets, post a message, stop the daemon, fill its database, and start it again."""
    load = ForwardLoad(daemon, bodies, short=True)
    load.prepare(plan.sizes[0])
    post_count(load.server, bodies, 1, 1)
    command = stop_daemon(daemon.pid)
    add_accounts(load.database, max(0, accounts - RECIPIENTS))
    if queued:
        add_messages(load.database, queued)
    restarted, seconds = running.enter_context(restart_daemon(command, daemon))
    before = count_stored_rows(load.database)
    load.server = replace(load.server, pid=restarted.pid)
    load.stored_check = StoredMessageCheck(load.server, lambda: count_stored_rows(load.database) - before)
    name = f"{accounts:,} accounts" + (f", {queued:,} messages" if queued else "")
    return _LargeDatabase(name, restarted, command, load, seconds)


def _measure_sweep(plan: BenchmarkPlan, one: _LargeDatabase) -> tuple[dict[str, Figures], str]:
    """Restart a daemon with expired messages, and measure health checks and forwards; rows and a note."""
    database, bodies = one.load.database, one.load.bodies
    expired = min(_MAX_EXPIRED, plan.queued)
    expire_messages(database, expired)
    before = count_stored_rows(database)
    seconds = min(_SWEEP_SECONDS, 10 * plan.seconds * plan.rounds)
    rows: dict[str, Figures] = {}
    with restart_daemon(one.command, one.daemon) as (daemon, _), ThreadPoolExecutor(2) as pool:
        health = TargetServer.from_url(f"{daemon.url}/health", daemon.pid, success="200")
        server = replace(one.load.server, pid=daemon.pid)

        def measure(name: str, seconds: float) -> int:
            checks = pool.submit(get_at_rate, health, bodies.parent, seconds, _HEALTH_CHECKS_PER_SECOND)
            posts = pool.submit(post_at_rate, server, bodies, plan.clients, seconds, _FORWARDS_PER_SECOND, even=True)
            rows[f"{name}: /health"] = _with_longest(checks.result())
            rows[f"{name}: forwards"] = _with_longest(posts.result())
            return posts.result().accepted

        removed = before + measure("sweep", seconds) - count_stored_rows(database)
        if removed == expired:
            measure("no sweep", seconds / 4)
    return rows, (
        f"Sweep: {removed} of {expired} expired messages were removed, with {_HEALTH_CHECKS_PER_SECOND:.0f} requests "
        f"to /health and {_FORWARDS_PER_SECOND:.0f} forwards per second at fixed times; `{_LONGEST}` is the maximum."
    )


def _with_longest(load: LoadResult) -> Figures:
    figures = load.figures()
    selected = {name: figures[name] for name in (PER_SECOND, "p50 ms", "p99 ms")}
    return selected | {_LONGEST: compute_percentile(load.latencies_us, 1.0) / 1000}


# About the size of the smallest leak: an object with a string.
_FLAT_BYTES_PER_MESSAGE = 200.0
# Several messages in a forward (Routing 2.0): it is messages that must not leave anything behind.
_PAYLOADS = 5
_LEGS = 5


def measure_memory(plan: BenchmarkPlan) -> ResultTable:
    """Resident memory after a warm-up, and after each fifth of the messages."""
    leg = plan.messages // _LEGS
    resident = []
    with ExitStack() as stack:
        daemon = stack.enter_context(run_temporary_daemon(DAEMON_SETTINGS))
        idle = rss_bytes(daemon.pid)
        load = ForwardLoad(daemon, open_temporary_directory(stack) / "bodies")
        load.prepare(plan.sizes[0], payloads=_PAYLOADS)
        for _ in range(_LEGS + 1):
            result = post_count(load.server, load.bodies, plan.clients, max(1, leg // _PAYLOADS))
            load.stored_check.check(result, payloads=_PAYLOADS)
            resident.append(rss_bytes(daemon.pid))
    growth = growth_per_message(resident, leg)
    failures = list(load.stored_check.failures)
    if growth > _FLAT_BYTES_PER_MESSAGE:
        failures.append(f"memory grew by {growth:.0f} bytes with every message")
    rows: dict[str, Figures] = {"started": {"RSS MiB": idle / _MIB}, "warmed up": {"RSS MiB": resident[0] / _MIB}}
    for number, size in enumerate(resident[1:], start=1):
        rows[f"after {number * leg} more"] = {"RSS MiB": size / _MIB}
    rows["growth"] = {"bytes per message": growth}
    notes = (
        f"{format_size(plan.sizes[0])} each, {_PAYLOADS} in a forward; the limit of growth is "
        f"{_FLAT_BYTES_PER_MESSAGE:.0f} bytes.",
    )
    columns = ("RSS MiB", "bytes per message")
    return ResultTable("Memory over many messages", columns, rows, (), notes, tuple(failures))


def growth_per_message(resident: list[int], leg: int) -> float:
    """
    Bytes of growth per message, between the medians of the earlier and the later half.

    Medians, because a single figure jumps by megabytes with the state of the allocator.

    :param resident: memory after each leg; an even number of figures.
    :param leg: messages between two figures.
    """
    half = len(resident) // 2
    return (median(resident[half:]) - median(resident[:half])) / (half * leg)


_COST_ACCOUNTS = 500
# Of the messages of the memory scenario: pages are filled evenly long before.
_COST_SHARE = 10
_FETCH_LIMIT = 10
_PAYLOAD, _DATABASE, _LOG, _PACKED, _CPU = "payload B", "database B", "log B", "gzipped log B", "us CPU"
_LOG_SETTINGS = {**DAEMON_SETTINGS, "MEDIATORD_LOG__ROTATE__COMPRESS": "false"}


def measure_cost(plan: BenchmarkPlan) -> ResultTable:
    """Bytes in the database and in the event log, and CPU time: per account, per message accepted and fetched."""
    count = max(_COST_ACCOUNTS, plan.messages // _COST_SHARE)
    rows: dict[str, Figures] = {}
    with ExitStack() as stack:
        daemon = stack.enter_context(run_temporary_daemon(_LOG_SETTINGS))
        place = open_temporary_directory(stack)
        usage = _StorageUsage(daemon.directory)
        before = usage.database_bytes()
        load = ForwardLoad(daemon, place / "bodies", recipients=_COST_ACCOUNTS)
        rows["an account"] = {_DATABASE: (usage.database_bytes() - before) / _COST_ACCOUNTS}
        for size in plan.sizes:
            name = format_size(size)
            load.prepare(size, _COST_ACCOUNTS)
            before = usage.database_bytes()
            usage.read_new_lines()
            result = post_count(load.server, load.bodies, plan.clients, count)
            load.stored_check.check(result)
            rows[f"{name}  accepted"] = {
                _PAYLOAD: float(query_database(load.database, "SELECT avg(size) FROM message")),
                _DATABASE: (usage.database_bytes() - before) / count,
                **usage.log_figures(count),
                _CPU: 1e6 * result.cpu_seconds / count,
            }
            start_cpu = cpu_seconds(daemon.pid)
            drain = DrainRunner(load.group.mediator.http_uri, load.group.make_codecs(), 1, _FETCH_LIMIT)
            fetched = drain.run().messages
            spent = cpu_seconds(daemon.pid) - start_cpu
            rows[f"{name}  fetched"] = {**usage.log_figures(fetched), _CPU: 1e6 * safe_ratio(spent, fetched)}
            load.stored_check.accepted = load.stored_check.stored = count_stored_rows(load.database)
    length = sum(len(wallet.did) for wallet in load.group.wallets) // _COST_ACCOUNTS
    notes = (
        f"{count} messages of each size for {_COST_ACCOUNTS} accounts with a recipient DID each, "
        f"fetched {_FETCH_LIMIT} at a time.",
        f"The database is SQLite, with all indexes; DIDs are did:peer:2 of {length} characters.",
    )
    columns, failures = (_PAYLOAD, _DATABASE, _LOG, _PACKED, _CPU), tuple(load.stored_check.failures)
    return ResultTable("Cost of a message", columns, rows, notes=notes, failures=failures)


class _StorageUsage:
    """Size of a daemon's database and event log. :param directory: of the daemon."""

    def __init__(self, directory: Path) -> None:
        self._database = directory / DATABASE_FILE
        self._log = directory / "log"
        self._read = 0

    def database_bytes(self) -> int:
        """Pages in use, in the database or its write-ahead log."""
        names = ("page_count", "freelist_count", "page_size")
        pages, free, size = (int(query_database(self._database, f"PRAGMA {name}")) for name in names)
        return (pages - free) * size

    def read_new_lines(self) -> bytes:
        """Lines of the event log since the last call."""
        segments = sorted(self._log.glob("*.jsonl"), key=lambda path: (path.name == "events.jsonl", path.name))
        text = b"".join(path.read_bytes() for path in segments)
        lines, self._read = text[self._read :], len(text)
        return lines

    def log_figures(self, count: int) -> Figures:
        """Bytes of new lines for each of `count` messages."""
        lines = self.read_new_lines()
        return {_LOG: safe_ratio(len(lines), count), _PACKED: safe_ratio(len(gzip.compress(lines)), count)}


# Share of the CPU time of a forward that the log may add.
_MAX_LOG_COST = 0.08
_LOG_ON, _LOG_OFF, _LINES = "event log on", "event log off", "lines"
_LEVELS = {_LOG_ON: "info", _LOG_OFF: "error"}
_RELOAD_SECONDS, _POLL_SECONDS = 15.0, 0.02


def measure_event_log(plan: BenchmarkPlan) -> ResultTable:
    """Forwards to the same daemon with the event log at level `info` and `error`, of which there are no events."""
    rows: dict[str, Figures] = {}
    targets: list[PerformanceTarget] = []
    with ExitStack() as stack:
        daemon = stack.enter_context(run_temporary_daemon(_LOG_SETTINGS))
        load = ForwardLoad(daemon, open_temporary_directory(stack) / "bodies")

        def run(contender: str, seconds: float) -> Figures:
            _set_log_level(daemon, _LEVELS[contender])
            lines, accepted = _count_log_lines(daemon), load.stored_check.accepted
            figures = load.post(plan.clients, seconds)
            written = _count_log_lines(daemon) - lines
            return figures | {_LINES: safe_ratio(written, load.stored_check.accepted - accepted)}

        for size in plan.sizes:
            name = format_size(size)
            load.prepare(size)
            run(_LOG_ON, plan.seconds * WARM_UP_SHARE)
            rounds = run_interleaved({name: partial(run, name, plan.seconds) for name in _LEVELS}, plan.rounds)
            rows |= {f"{name}  {contender}": rounds.medians(contender) for contender in rounds.found}
            ratio = rounds.ratio(_LOG_ON, _LOG_OFF, PER_CPU_SECOND)
            pairs = list(zip(rounds.found[_LOG_ON], rounds.found[_LOG_OFF], strict=True))
            spent = median(
                safe_ratio(1e6, on[PER_CPU_SECOND]) - safe_ratio(1e6, off[PER_CPU_SECOND]) for on, off in pairs
            )
            lines = median(on[_LINES] for on, _ in pairs)
            rows[f"{name}  cost"] = {
                "us CPU/msg": spent,
                _LINES: lines,
                "us/line": safe_ratio(spent, lines),
                "% of the CPU": 100 * (safe_ratio(1, ratio) - 1),
            }
            goal = 1 / (1 + _MAX_LOG_COST)
            targets.append(PerformanceTarget(f"forwards {name} per CPU-s, x without the log", goal, ratio))
    columns = (PER_SECOND, PER_CPU_SECOND, "us CPU/msg", _LINES, "us/line", "% of the CPU")
    notes = (f"{plan.clients} connections, one daemon process; lines of the event log for each forward.",)
    failures = tuple(load.stored_check.failures)
    return ResultTable("The event log", columns, rows, tuple(targets), notes, failures)


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


def _count_log_lines(daemon: TemporaryDaemon) -> int:
    return sum(path.read_bytes().count(b"\n") for path in daemon.directory.joinpath("log").glob("*.jsonl"))


# Less than one sync of the slow disk.
_RESPONSE_GOAL_MS = 25.0
_SLOW_DISK = "50 ms a sync"
_PROGRAMS = {"this disk": (), _SLOW_DISK: ("mediatord.bench.baseline_servers", "slow-disk")}
_PROBES_PER_SECOND, _DISK_FORWARDS_PER_SECOND = 50.0, 200.0
_MAX_RATE = "at most/s"
_IDLE_SOCKETS = 4
_DISK_COLUMNS = (_MAX_RATE, PER_SECOND, "p50 ms", "p99 ms", "health p50", "health p99", "ping p50", "ping p99")


def measure_disk(plan: BenchmarkPlan) -> ResultTable:
    """Forwards in an open loop on this disk and on a slow one, with health checks and pings of idle sockets."""
    cores = assign_cores()
    failures: list[str] = []
    rows = {name: _measure_on_disk(plan, program, cores, failures) for name, program in _PROGRAMS.items()}
    targets = tuple(
        PerformanceTarget(f"{name} with {_SLOW_DISK}, ms", _RESPONSE_GOAL_MS, rows[_SLOW_DISK][name], most=True)
        for name in ("health p99", "ping p99")
    )
    notes = (
        f"{format_size(plan.sizes[0])}, {plan.clients} connections. {_MAX_RATE}: closed loop. Then per second "
        f"{_DISK_FORWARDS_PER_SECOND:.0f} forwards, {_PROBES_PER_SECOND:.0f} requests to /health and "
        f"{_PROBES_PER_SECOND:.0f} pings, all at fixed times; milliseconds. {cores.note}",
    )
    return ResultTable("A slow disk", _DISK_COLUMNS, rows, targets, notes, tuple(failures))


def _measure_on_disk(
    plan: BenchmarkPlan, program: tuple[str, ...], cores: CoreAssignment, failures: list[str]
) -> Figures:
    """:param program: module and arguments that replace `mediatord`; empty for itself."""
    size, seconds = plan.sizes[0], plan.seconds * plan.rounds
    with ExitStack() as stack:
        place = open_temporary_directory(stack)
        with pin_to_cores(cores.server):
            daemon = stack.enter_context(run_temporary_daemon(DAEMON_SETTINGS))
        stack.enter_context(pin_to_cores(cores.clients))
        if program:
            command = stop_daemon(daemon.pid)
            module = command.words.index("-m") + 1
            words = (*command.words[:module], *program, *command.words[module + 1 :])
            daemon, _ = stack.enter_context(restart_daemon(replace(command, words=words), daemon))
        setup = WalletSetup(daemon.url, None, RECIPIENTS, size, DISTINCT_MESSAGES, f"{place}/forwards")
        bodies = stack.enter_context(start_wallet_process(setup)).bodies
        setup = replace(setup, wallets=_IDLE_SOCKETS, forwards=1, bodies=f"{place}/idle")
        idle = stack.enter_context(start_wallet_process(setup))
        idle.do("live")
        server = TargetServer.from_url(f"{daemon.url}/didcomm", daemon.pid)
        health = TargetServer.from_url(f"{daemon.url}/health", daemon.pid, success="200")
        most = post_for_seconds(server, bodies, plan.clients, seconds / 4)
        with ThreadPoolExecutor(2) as pool:
            checks = pool.submit(get_at_rate, health, place, seconds, _PROBES_PER_SECOND)
            pings = pool.submit(idle.do, "ping", seconds=seconds, rate=_PROBES_PER_SECOND)
            load = post_at_rate(server, bodies, 2 * plan.clients, seconds, _DISK_FORWARDS_PER_SECOND, even=plan.even)
            checked, pinged = checks.result(), pings.result()["latencies_us"]
        stored = count_stored_rows(daemon.directory / DATABASE_FILE)
    if stored != most.accepted + load.accepted:
        failures.append(f"{most.accepted + load.accepted} messages were accepted, {stored} are stored")
    if set(checked.statuses) != {"200"}:
        failures.append(f"/health answered {checked.statuses}")
    figures = load.figures()
    return {
        _MAX_RATE: most.figures()[PER_SECOND],
        **{name: figures[name] for name in (PER_SECOND, "p50 ms", "p99 ms")},
        **latency_figures(checked.latencies_us, "health {}"),
        **latency_figures(pinged, "ping {}"),
    }
