"""
A database with as many accounts and messages as an old mediator's, made in seconds.

What a stopped daemon has in its file is copied many times over. Rows are copies of rows that the daemon wrote itself,
with other names and numbers, so that they have whatever columns its schema has; its triggers and indexes do their
work.

That a mediator with a million accounts, or a million messages, is as fast as one with a few.

Whether the daemon's memory stays flat while messages go through it.

What accounts and messages cost in the long run: space in the database and in the event log, and CPU.

What the event log costs: the same daemon with it and without it, in turns.

A disk on which each sync takes long must hold up those only who wait for it.
"""

from __future__ import annotations

import gzip
import http.client
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
from tempfile import TemporaryDirectory
from typing import Literal
from urllib.parse import urlsplit

from mediatord.bench.didcomm_wallets import WalletGroup, build_forwards, enrol_group, pack_request, unpack_answer
from mediatord.bench.load_generator import (
    PER_CPU_SECOND,
    PER_SECOND,
    LoadResult,
    TargetServer,
    get_at_rate,
    post_at_rate,
    post_count,
    post_for_seconds,
    write_bodies,
)
from mediatord.bench.mediator_under_test import (
    DATABASE_FILE,
    StoredMessageCheck,
    WalletProcess,
    count_stored_rows,
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
    RECIPIENTS,
    BenchmarkPlan,
    Figures,
    InterleavedResults,
    PerformanceTarget,
    ResultTable,
    compute_percentile,
    format_size,
    run_interleaved,
    safe_ratio,
)
from mediatord.bench.wallet_process import WalletSetup
from mediatord.protocol.canonical_did import compute_did_digest
from mediatord.protocol.didcomm.message import ENCRYPTED_MEDIA_TYPE, Message
from mediatord.store.sqlite.bulk_sql import hash_did
from mediatord.wallet.didcomm_identity import WalletIdentity
from mediatord.wallet.didcomm_mediation import read_delivery
from mediatord.wallet.temporary_daemon import TemporaryDaemon, run_temporary_daemon

_INSERT_BATCH = 50_000
# Another DID of the same length: a part in the middle of the key is replaced.
_DID_EXPRESSION = "substr(one.did, 1, 24) || lower(hex(randomblob(12))) || substr(one.did, 49)"
# How much waits for whom is counted by the daemon's statements.
_QUEUE_COUNTS_QUERY = (
    "SELECT account_id, recipient_id, count(*), sum(size) FROM message GROUP BY account_id, recipient_id"
)
_NUMBERS_CTE = "WITH RECURSIVE number (i) AS (SELECT ? UNION ALL SELECT i + 1 FROM number WHERE i + 1 < ?) "


def add_accounts(database: Path, count: int) -> None:
    """Accounts with one registered DID each; the daemon is stopped, and has an account with a recipient."""
    with closing(_open_database(database)) as connection:
        first = _highest_id(connection, "account") + 1
        columns, values = _copied_columns(
            connection,
            "account",
            {"did": _DID_EXPRESSION, "did_key": f"account_key({_DID_EXPRESSION})", "recipients": "0"},
        )
        template = "(SELECT * FROM account ORDER BY id LIMIT 1) AS one"
        _insert_in_batches(
            connection, f"INSERT INTO account ({columns}) SELECT {values} FROM number, {template}", count
        )
        changed = {"account_id": "account.id", "did": "account.did", "did_digest": "did_digest(account.did)"}
        columns, values = _copied_columns(connection, "recipient", changed)
        template = "(SELECT * FROM recipient ORDER BY id LIMIT 1) AS one"
        source = f"account, {template} WHERE account.id >= {first}"
        with connection:
            connection.execute(f"INSERT INTO recipient ({columns}) SELECT {values} FROM {source}")


def add_messages(database: Path, count: int) -> None:
    """Messages for all accounts in turn; the daemon is stopped, and has one message."""
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
    """Let the time of the newest messages be over; the daemon is stopped."""
    newest = "SELECT rowid FROM message ORDER BY rowid DESC LIMIT ?"
    with closing(_open_database(database)) as connection, connection:
        connection.execute(f"UPDATE message SET expires_at = received_at WHERE rowid IN ({newest})", [count])


def _open_database(database: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(database)
    for name, function in (("did_digest", compute_did_digest), ("account_key", hash_did)):
        connection.create_function(name, 1, function, deterministic=True)
    # The file is thrown away when the power fails, like everything here.
    connection.execute("PRAGMA synchronous=OFF")
    connection.execute("PRAGMA cache_size=-262144")
    return connection


def _highest_id(connection: sqlite3.Connection, table: str) -> int:
    (highest,) = connection.execute(f"SELECT max(id) FROM {table}").fetchone()
    return int(highest)


def _copied_columns(connection: sqlite3.Connection, table: str, changed: Mapping[str, str]) -> tuple[str, str]:
    """Columns to be written, and what with: the row `one`, except for what is changed and the number of the row."""
    described = connection.execute(f"SELECT name, type, pk FROM pragma_table_info('{table}')").fetchall()
    columns = [name for name, kind, key in described if not (key and kind == "INTEGER")]
    return ", ".join(columns), ", ".join(changed.get(name, f"one.{name}") for name in columns)


def _insert_in_batches(connection: sqlite3.Connection, statement: str, count: int) -> None:
    for start in range(0, count, _INSERT_BATCH):
        with connection:
            connection.execute(_NUMBERS_CTE + statement, [start, min(count, start + _INSERT_BATCH)])


KEPT_GOAL = 0.85
START_SECONDS = 2.0
HOLD_MS = 20.0

# The daemon removes what is over every quarter of a minute; long enough for one such round to come and to finish.
_WATCH_SECONDS = 48.0
_MOST_OVERDUE = 100_000
_LOOKS_PER_SECOND, _ACCOUNT_FORWARDS_PER_SECOND = 100.0, 20.0
_OF_FIRST, _START, _LONGEST = "x first", "start s", "longest ms"
_ACCOUNT_COLUMNS = (PER_SECOND, PER_CPU_SECOND, _OF_FIRST, _START, "p50 ms", "p99 ms", _LONGEST)
_ACCOUNT_WARM_UP_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class _LargeDatabase:
    """A daemon whose database is large."""

    name: str
    daemon: TemporaryDaemon
    daemon_command: DaemonCommand
    server: TargetServer
    bodies: Path
    stored_check: StoredMessageCheck
    start_seconds: float

    def post(self, plan: BenchmarkPlan, share: float = 1.0) -> Figures:
        """One turn."""
        return self.stored_check.check(post_for_seconds(self.server, self.bodies, plan.clients, plan.seconds * share))


def measure_accounts(plan: BenchmarkPlan) -> ResultTable:
    """Forwards to a hundred wallets of each database, in turns; then what the sweep of old messages holds up."""
    kinds = [(number, 0) for number in plan.accounts] + [(plan.accounts[0], plan.queued)]
    cores = assign_cores()
    with ExitStack() as stack, pin_to_cores(cores.clients):
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))
        databases = []
        for accounts, queued in kinds:
            # The last one is started again for the sweep, so that it is left first.
            with pin_to_cores(cores.server):
                daemon = stack.enter_context(run_temporary_daemon(DAEMON_SETTINGS))
            running = stack.enter_context(ExitStack())
            databases.append(
                _grow_database(plan, daemon, accounts, queued, place / f"{accounts}-{queued}.bodies", running)
            )
        for one in databases:
            one.post(plan, _ACCOUNT_WARM_UP_SHARE)
        rounds = run_interleaved({one.name: partial(one.post, plan) for one in databases}, plan.rounds)
        failures = [failure for one in databases for failure in one.stored_check.failures]
        running.close()
        swept = _measure_sweep(plan, databases[-1])
    rows: dict[str, Figures] = {}
    for one in databases:
        compared = {_OF_FIRST: rounds.ratio(one.name, databases[0].name, PER_CPU_SECOND), _START: one.start_seconds}
        rows[one.name] = rounds.medians(one.name) | compared
    notes = (
        f"{format_size(plan.sizes[0])}, {plan.clients} connections, {RECIPIENTS} recipients; a daemon for each row. "
        f"Until it says that it is well a start takes as many seconds. {cores.note}",
        f"Sweep: {swept.removed} of {swept.overdue} messages whose time was over were removed, while /health was "
        f"asked {_LOOKS_PER_SECOND:.0f} times a second and {_ACCOUNT_FORWARDS_PER_SECOND:.0f} forwards a second came, all at "
        "fixed times; `longest ms` is the longest that one of them took.",
    )
    return ResultTable(
        "Accounts and messages",
        _ACCOUNT_COLUMNS,
        rows | swept.rows,
        _account_targets(rows, swept.rows),
        notes,
        tuple(failures),
    )


def _account_targets(rows: dict[str, Figures], swept: dict[str, Figures]) -> tuple[PerformanceTarget, ...]:
    first, *others = rows
    kept = [
        PerformanceTarget(f"forwards with {name}, x {first}", KEPT_GOAL, rows[name][_OF_FIRST]) for name in others
    ]
    start = PerformanceTarget(f"start with {others[-1]}, s", START_SECONDS, rows[others[-1]][_START], most=True)
    holds = [
        PerformanceTarget(f"{name}, longest ms", HOLD_MS, row[_LONGEST], most=True) for name, row in swept.items()
    ]
    return (*kept, start, *holds[:2])


def _grow_database(
    plan: BenchmarkPlan, daemon: TemporaryDaemon, accounts: int, queued: int, bodies: Path, running: ExitStack
) -> _LargeDatabase:
    """Give it wallets and a message, stop it, fill its database, and start it again."""
    group = enrol_group(daemon.url, RECIPIENTS, short=True)
    write_bodies(bodies, build_forwards(group, plan.sizes[0], DISTINCT_MESSAGES))
    server = TargetServer.at(group.mediator.http_uri, daemon.pid)
    post_count(server, bodies, 1, 1)
    daemon_command = stop_daemon(daemon.pid)
    database = daemon.directory / DATABASE_FILE
    add_accounts(database, max(0, accounts - RECIPIENTS))
    if queued:
        add_messages(database, queued)
    again, seconds = running.enter_context(restart_daemon(daemon_command, daemon))
    before = count_stored_rows(database)
    server = TargetServer.at(group.mediator.http_uri, again.pid)
    stored_check = StoredMessageCheck(server, lambda: count_stored_rows(database) - before)
    name = f"{accounts:,} accounts" + (f", {queued:,} messages" if queued else "")
    return _LargeDatabase(name, again, daemon_command, server, bodies, stored_check, seconds)


@dataclass(frozen=True, slots=True)
class _SweepResult:
    """
    :param removed: how many of the overdue messages were, while that was watched.
    """

    overdue: int
    removed: int
    rows: dict[str, Figures]


def _measure_sweep(plan: BenchmarkPlan, one: _LargeDatabase) -> _SweepResult:
    """Start it again with messages whose time is over, and watch how others fare."""
    database = one.daemon.directory / DATABASE_FILE
    overdue = min(_MOST_OVERDUE, plan.queued)
    expire_messages(database, overdue)
    before = count_stored_rows(database)
    seconds = min(_WATCH_SECONDS, 10 * plan.seconds * plan.rounds)
    rows: dict[str, Figures] = {}
    with restart_daemon(one.daemon_command, one.daemon) as (daemon, _), ThreadPoolExecutor(2) as pool:
        health = TargetServer.at(f"{daemon.url}/health", daemon.pid, success="200")
        server = TargetServer.at(f"{daemon.url}{one.server.path}", daemon.pid)

        def watch(when: str, seconds: float) -> int:
            looks = pool.submit(get_at_rate, health, one.bodies.parent, seconds, _LOOKS_PER_SECOND)
            posts = pool.submit(
                post_at_rate, server, one.bodies, plan.clients, seconds, _ACCOUNT_FORWARDS_PER_SECOND, even=True
            )
            rows[f"{when}: /health"] = _latency_figures(looks.result())
            rows[f"{when}: forwards"] = _latency_figures(posts.result())
            return posts.result().accepted

        removed = before + watch("sweep", seconds) - count_stored_rows(database)
        if removed == overdue:
            watch("no sweep", seconds / 4)
    return _SweepResult(overdue, removed, rows)


def _latency_figures(load: LoadResult) -> Figures:
    figures = load.figures()
    longest = {_LONGEST: compute_percentile(load.latencies_us, 1.0) / 1000}
    return {name: figures[name] for name in (PER_SECOND, "p50 ms", "p99 ms")} | longest


# The smallest thing worth the name of a leak, an object with a string, has about this size.
FLAT_BYTES_PER_MESSAGE = 200.0

_MIB = 1 << 20
# Several messages in one forward, as Routing 2.0 allows: it is the messages that must not leave anything behind.
_PAYLOADS = 5
_LEGS = 5


def measure_memory(plan: BenchmarkPlan) -> ResultTable:
    """Resident memory after a warm-up, and after each fifth of the messages."""
    size = plan.sizes[0]
    leg = plan.messages // _LEGS
    with run_temporary_daemon(DAEMON_SETTINGS) as daemon, TemporaryDirectory(prefix="mediatord-bench-") as place:
        idle = rss_bytes(daemon.pid)
        group = enrol_group(daemon.url, RECIPIENTS)
        server = TargetServer.at(group.mediator.http_uri, daemon.pid)
        stored_check = StoredMessageCheck(server, lambda: count_stored_rows(daemon.directory / DATABASE_FILE))
        bodies = Path(place) / "bodies"
        write_bodies(bodies, build_forwards(group, size, DISTINCT_MESSAGES, payloads=_PAYLOADS))
        resident = []
        for _ in range(_LEGS + 1):
            load = post_count(server, bodies, plan.clients, max(1, leg // _PAYLOADS))
            stored_check.check(load, payloads=_PAYLOADS)
            resident.append(rss_bytes(daemon.pid))
    growth = growth_per_message(resident, leg)
    failures = list(stored_check.failures)
    if growth > FLAT_BYTES_PER_MESSAGE:
        failures.append(f"memory grew by {growth:.0f} bytes with every message")
    rows: dict[str, Figures] = {"started": {"RSS MiB": idle / _MIB}, "warmed up": {"RSS MiB": resident[0] / _MIB}}
    for number, found in enumerate(resident[1:], start=1):
        rows[f"after {number * leg} more"] = {"RSS MiB": found / _MIB}
    rows["growth"] = {"bytes per message": growth}
    notes = (
        f"{format_size(size)} each, {_PAYLOADS} in a forward; flat means under {FLAT_BYTES_PER_MESSAGE:.0f} bytes.",
    )
    return ResultTable(
        "Memory over many messages", ("RSS MiB", "bytes per message"), rows, (), notes, tuple(failures)
    )


def growth_per_message(resident: list[int], leg: int) -> float:
    """
    Bytes that stay with every message: between the medians of the earlier and the later half, because a single figure
    jumps by megabytes with whatever the allocator happens to hold.

    :param resident: memory after each leg, an even number of them.
    :param leg: messages between two figures.
    """
    half = len(resident) // 2
    return (median(resident[half:]) - median(resident[:half])) / (half * leg)


_PICKUP = "https://didcomm.org/messagepickup/3.0"
_ACCOUNTS = 500
# Of what memory is watched over: pages are filled evenly long before that.
_SHARE = 10
_AT_ONCE = 10
_PAYLOAD, _DATABASE, _LOG, _PACKED, _CPU = "payload B", "database B", "log B", "gzipped log B", "us CPU"
_COST_SETTINGS = {**DAEMON_SETTINGS, "MEDIATORD_LOG__ROTATE__COMPRESS": "false"}


def measure_cost(plan: BenchmarkPlan) -> ResultTable:
    """For each account; for each message accepted, and for each fetched and acknowledged."""
    count = max(_ACCOUNTS, plan.messages // _SHARE)
    rows: dict[str, Figures] = {}
    with run_temporary_daemon(_COST_SETTINGS) as daemon, TemporaryDirectory(prefix="mediatord-bench-") as place:
        disk = _StorageUsage(daemon.directory)
        before = disk.database_bytes()
        group = enrol_group(daemon.url, _ACCOUNTS)
        rows["an account"] = {_DATABASE: (disk.database_bytes() - before) / _ACCOUNTS}
        server = TargetServer.at(group.mediator.http_uri, daemon.pid)
        stored_check = StoredMessageCheck(server, lambda: count_stored_rows(daemon.directory / DATABASE_FILE))
        for size in plan.sizes:
            bodies = Path(place) / "bodies"
            write_bodies(bodies, build_forwards(group, size, max(DISTINCT_MESSAGES, _ACCOUNTS)))
            before = disk.database_bytes()
            disk.new_lines()
            load = post_count(server, bodies, plan.clients, count)
            stored_check.check(load)
            rows[f"{format_size(size)}  accepted"] = {
                _PAYLOAD: disk.mean_payload(),
                _DATABASE: (disk.database_bytes() - before) / count,
                **disk.lines_of(count),
                _CPU: 1e6 * load.cpu_seconds / count,
            }
            begun = cpu_seconds(daemon.pid)
            fetched = _drain_queues(group)
            spent = cpu_seconds(daemon.pid) - begun
            rows[f"{format_size(size)}  fetched"] = {**disk.lines_of(fetched), _CPU: 1e6 * safe_ratio(spent, fetched)}
            # Pages that are free are used again, so the next size begins with none of this one's.
            stored_check.accepted = stored_check.stored = count_stored_rows(daemon.directory / DATABASE_FILE)
    length = sum(len(wallet.did) for wallet in group.wallets) // _ACCOUNTS
    notes = (
        f"{count} messages of each size for {_ACCOUNTS} accounts with a recipient DID each, "
        f"fetched {_AT_ONCE} at a time.",
        f"The database is SQLite's, all its indexes included; DIDs are did:peer:2 of {length} characters.",
    )
    columns = (_PAYLOAD, _DATABASE, _LOG, _PACKED, _CPU)
    return ResultTable("Cost of a message", columns, rows, notes=notes, failures=tuple(stored_check.failures))


class _StorageUsage:
    """What a daemon has written below its directory."""

    def __init__(self, directory: Path) -> None:
        self._database = directory / DATABASE_FILE
        self._log = directory / "log"
        self._read = 0

    def database_bytes(self) -> int:
        """Pages in use, whether they are in the database yet or in its write-ahead log."""
        pages, free, size = (self._ask(f"PRAGMA {name}") for name in ("page_count", "freelist_count", "page_size"))
        return int((pages - free) * size)

    def mean_payload(self) -> float:
        """Bytes of those that wait."""
        return self._ask("SELECT avg(size) FROM message")

    def new_lines(self) -> bytes:
        """Of the event log, since it was asked last."""
        text = b"".join(path.read_bytes() for path in sorted(self._log.glob("*.jsonl"), key=_segment_order))
        lines, self._read = text[self._read :], len(text)
        return lines

    def lines_of(self, count: int) -> Figures:
        """What so many messages have added."""
        lines = self.new_lines()
        return {_LOG: safe_ratio(len(lines), count), _PACKED: safe_ratio(len(gzip.compress(lines)), count)}

    def _ask(self, question: str) -> float:
        with closing(sqlite3.connect(f"file:{self._database}?mode=ro", uri=True)) as connection:
            (answer,) = connection.execute(question).fetchone()
            return float(answer)


def _segment_order(path: Path) -> tuple[bool, str]:
    """Closed segments by their names, the open one last."""
    return path.name == "events.jsonl", path.name


def _drain_queues(group: WalletGroup) -> int:
    """Fetch and acknowledge all that waits; how many that were."""
    target = urlsplit(group.mediator.http_uri)
    with closing(http.client.HTTPConnection(target.hostname or "", target.port, timeout=30)) as connection:

        def ask(wallet: WalletIdentity, name: str, body: dict[str, object]) -> Message:
            packed = pack_request(wallet, group.mediator, f"{_PICKUP}/{name}", body)
            connection.request("POST", target.path, packed, {"Content-Type": ENCRYPTED_MEDIA_TYPE})
            return unpack_answer(connection.getresponse().read(), wallet)

        fetched = 0
        for wallet in group.wallets:
            while True:
                answer = ask(wallet, "delivery-request", {"limit": _AT_ONCE})
                if not answer.type.uri.endswith("/delivery"):
                    break
                ids = [one.id for one in read_delivery(answer)]
                ask(wallet, "messages-received", {"message_id_list": ids})
                fetched += len(ids)
    return fetched


# Of the CPU time of a forward without the log, what the log may add.
MAX_LOG_COST = 0.08

_LOG_ON, _LOG_OFF = "event log on", "event log off"
_LEVELS: dict[str, Literal["info", "error"]] = {_LOG_ON: "info", _LOG_OFF: "error"}
_LINES = "lines"
_LOG_SETTINGS = {**DAEMON_SETTINGS, "MEDIATORD_LOG__ROTATE__COMPRESS": "false"}
_LOOK_SECONDS, _PATIENCE_SECONDS = 0.02, 15.0
_LOG_WARM_UP_SHARE = 0.25


def measure_event_log(plan: BenchmarkPlan) -> ResultTable:
    """One table for all sizes. While the log is off only errors are written, of which there are none."""
    rows: dict[str, Figures] = {}
    targets: list[PerformanceTarget] = []
    with run_temporary_daemon(_LOG_SETTINGS) as daemon, TemporaryDirectory(prefix="mediatord-bench-") as place:
        group = enrol_group(daemon.url, RECIPIENTS)
        log = _DaemonEventLog(daemon)
        server = TargetServer.at(group.mediator.http_uri, daemon.pid)
        stored_check = StoredMessageCheck(server, lambda: count_stored_rows(daemon.directory / DATABASE_FILE))
        for size in plan.sizes:
            bodies = Path(place) / f"{size}.bodies"
            write_bodies(bodies, build_forwards(group, size, DISTINCT_MESSAGES))

            def post(contender: str, seconds: float, bodies: Path = bodies) -> Figures:
                log.write(_LEVELS[contender])
                before, accepted = log.lines(), stored_check.accepted
                figures = stored_check.check(post_for_seconds(server, bodies, plan.clients, seconds))
                return figures | {_LINES: (log.lines() - before) / (stored_check.accepted - accepted)}

            post(_LOG_ON, plan.seconds * _LOG_WARM_UP_SHARE)
            rounds = run_interleaved(
                {name: lambda name=name: post(name, plan.seconds) for name in (_LOG_ON, _LOG_OFF)},  # type: ignore[misc]
                plan.rounds,
            )
            name = format_size(size)
            rows |= {f"{name}  {contender}": rounds.medians(contender) for contender in rounds.found}
            rows[f"{name}  cost"] = _log_cost(rounds)
            kept = rounds.ratio(_LOG_ON, _LOG_OFF, PER_CPU_SECOND)
            targets.append(
                PerformanceTarget(f"forwards {name} per CPU-s, x without the log", 1 / (1 + MAX_LOG_COST), kept)
            )
    columns = (PER_SECOND, PER_CPU_SECOND, "us CPU/msg", _LINES, "us/line", "% of the CPU")
    notes = (f"{plan.clients} connections, one daemon process; lines are those of a forward.",)
    return ResultTable("The event log", columns, rows, tuple(targets), notes, tuple(stored_check.failures))


def _log_cost(rounds: InterleavedResults) -> Figures:
    """The differences within rounds."""
    pairs = list(zip(rounds.found[_LOG_ON], rounds.found[_LOG_OFF], strict=True))
    spent = median(1e6 / on[PER_CPU_SECOND] - 1e6 / off[PER_CPU_SECOND] for on, off in pairs)
    lines = median(on[_LINES] for on, _ in pairs)
    more = 100 * (1 / rounds.ratio(_LOG_ON, _LOG_OFF, PER_CPU_SECOND) - 1)
    return {"us CPU/msg": spent, _LINES: lines, "us/line": spent / lines, "% of the CPU": more}


class _DaemonEventLog:
    """The event log of a daemon, as the operator sees it."""

    def __init__(self, daemon: TemporaryDaemon) -> None:
        self._pid = daemon.pid
        self._file = daemon.directory / "mediator.yaml"
        self._directory = daemon.directory / "log"

    def write(self, level: str) -> None:
        """
        Have the daemon write what has this level or a higher one from now on.

        :raise RuntimeError: it does not take the configuration.
        """
        text = self._file.read_text("utf-8")
        self._file.write_text(re.sub(r"(?m)^( +level:) \w+", rf"\1 {level}", text), encoding="utf-8")
        before = self._segments()
        os.kill(self._pid, signal.SIGHUP)
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while self._segments() == before:
            if time.monotonic() > deadline:
                raise RuntimeError("the daemon did not read its configuration again")
            time.sleep(_LOOK_SECONDS)

    def lines(self) -> int:
        """How many were written so far."""
        return sum(path.read_bytes().count(b"\n") for path in self._directory.glob("*.jsonl"))

    def _segments(self) -> int:
        return len(list(self._directory.glob("events-*")))


# What a health check or a ping may take on the slow disk: less than one sync.
HEALTH_P99_MS = 25.0

_MEDIATORD_PROGRAM = ("mediatord",)
_SLOW_DISK_PROGRAM = ("mediatord.bench.baseline_servers", "slow-disk")
_PROBES_PER_SECOND, _DISK_FORWARDS_PER_SECOND = 50.0, 200.0
_MAX_RATE = "at most/s"
_SOCKETS = 4
_PERCENTILES = {"p50": 0.5, "p99": 0.99}
_DISK_COLUMNS = (_MAX_RATE, PER_SECOND, "p50 ms", "p99 ms", "health p50", "health p99", "ping p50", "ping p99")


def measure_disk(plan: BenchmarkPlan) -> ResultTable:
    """Forwards at fixed times, while /health is asked and idle sockets are pinged in a beat."""
    cores = assign_cores()
    failures: list[str] = []
    rows = {
        "this disk": _measure_on_disk(plan, _MEDIATORD_PROGRAM, cores, failures),
        "50 ms a sync": _measure_on_disk(plan, _SLOW_DISK_PROGRAM, cores, failures),
    }
    slow = rows["50 ms a sync"]
    targets = tuple(
        PerformanceTarget(f"{name} with 50 ms a sync, ms", HEALTH_P99_MS, slow[name], most=True)
        for name in ("health p99", "ping p99")
    )
    notes = (
        f"{format_size(plan.sizes[0])}, {plan.clients} connections. {_MAX_RATE}: as many as come through. Then "
        f"{_DISK_FORWARDS_PER_SECOND:.0f} forwards a second, {_PROBES_PER_SECOND:.0f} looks at /health and {_PROBES_PER_SECOND:.0f} pings, all at "
        f"fixed times; milliseconds. {cores.note}",
    )
    return ResultTable("A slow disk", _DISK_COLUMNS, rows, targets, notes, tuple(failures))


def _measure_on_disk(
    plan: BenchmarkPlan, program: tuple[str, ...], cores: CoreAssignment, failures: list[str]
) -> Figures:
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))
        with pin_to_cores(cores.server):
            daemon = stack.enter_context(run_temporary_daemon(DAEMON_SETTINGS))
        stack.enter_context(pin_to_cores(cores.clients))
        if program != _MEDIATORD_PROGRAM:
            daemon, _ = stack.enter_context(
                restart_daemon(_replace_program(program, stop_daemon(daemon.pid)), daemon)
            )
        size = plan.sizes[0]
        away = stack.enter_context(
            start_wallet_process(WalletSetup(daemon.url, None, RECIPIENTS, size, DISTINCT_MESSAGES, f"{place}/1"))
        )
        idle = stack.enter_context(
            start_wallet_process(WalletSetup(daemon.url, None, _SOCKETS, size, 1, f"{place}/2"))
        )
        idle.do("live")
        return _measure_under_load(plan, daemon, away, idle, failures)


def _measure_under_load(
    plan: BenchmarkPlan, daemon: TemporaryDaemon, away: WalletProcess, idle: WalletProcess, failures: list[str]
) -> Figures:
    seconds = plan.seconds * plan.rounds
    server = TargetServer.at(f"{daemon.url}/didcomm", daemon.pid)
    health = TargetServer.at(f"{daemon.url}/health", daemon.pid, success="200")
    most = post_for_seconds(server, away.bodies, plan.clients, seconds / 4)
    with ThreadPoolExecutor(2) as pool:
        looks = pool.submit(get_at_rate, health, away.bodies.parent, seconds, _PROBES_PER_SECOND)
        pings = pool.submit(idle.do, "ping", seconds=seconds, rate=_PROBES_PER_SECOND)
        load = post_at_rate(server, away.bodies, 2 * plan.clients, seconds, _DISK_FORWARDS_PER_SECOND, even=plan.even)
        healthy, pinged = looks.result(), pings.result()["latencies_us"]
    accepted = most.accepted + load.accepted
    if (stored := count_stored_rows(daemon.directory / DATABASE_FILE)) != accepted:
        failures.append(f"{accepted} messages were accepted, {stored} are stored")
    if set(healthy.statuses) != {"200"}:
        failures.append(f"/health answered {healthy.statuses}")
    figures = load.figures()
    return {
        _MAX_RATE: most.figures()[PER_SECOND],
        **{name: figures[name] for name in (PER_SECOND, "p50 ms", "p99 ms")},
        **{
            f"health {name}": compute_percentile(healthy.latencies_us, share) / 1000
            for name, share in _PERCENTILES.items()
        },
        **{f"ping {name}": compute_percentile(pinged, share) / 1000 for name, share in _PERCENTILES.items()},
    }


def _replace_program(program: tuple[str, ...], daemon_command: DaemonCommand) -> DaemonCommand:
    """The same command line, by another module that takes it."""
    words = list(daemon_command.words)
    module = words.index("-m") + 1
    words[module : module + 1] = program
    return replace(daemon_command, words=tuple(words))
