"""
SQLite: what the daemon has stored, and how fast the bare library stores the same (the floor of durability).

That everything which was accepted is stored, and nothing was refused.

What is measured: a daemon of our own, started for it, or a mediator of any make that is running somewhere.

That everything the subject accepted is kept by it, found out in the way that is open to us.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time
from typing import Any

from mediatord.bench.didcomm_wallets import find_mediator
from mediatord.bench.load_generator import PER_CPU_SECOND, PER_SECOND, LoadResult, TargetServer
from mediatord.bench.processes import (
    CoreAssignment,
    assign_cores,
    cpu_seconds,
    pin_to_cores,
    read_line,
    spawn_module,
    write_line,
)
from mediatord.bench.scenario import DAEMON_SETTINGS, BenchmarkPlan, Figures, compute_percentile
from mediatord.bench.wallet_process import WalletSetup
from mediatord.wallet.didcomm_client import DIDCommMediator
from mediatord.wallet.temporary_daemon import run_temporary_daemon

DATABASE_FILE = "mediator.sqlite3"

_BARE_SCHEMA = """
CREATE TABLE message (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, recipient TEXT NOT NULL, payload BLOB NOT NULL,
    received_at REAL NOT NULL, expires_at REAL NOT NULL
) STRICT;
CREATE INDEX waiting ON message (recipient, seq);
"""
_BARE_INSERT = "INSERT INTO message (id, recipient, payload, received_at, expires_at) VALUES (?, ?, ?, ?, ?)"


def count_stored_rows(database: Path, table: str = "message") -> int:
    """How many there are, seen by another process than the one that stores them."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        (count,) = connection.execute(f"SELECT count(*) FROM {table}").fetchone()
        return int(count)


@contextmanager
def create_bare_database() -> Iterator[sqlite3.Connection]:
    """An empty database beside the daemon's: WAL, synchronous=FULL."""
    with TemporaryDirectory(prefix="mediatord-bench-") as directory:
        connection = sqlite3.connect(Path(directory) / "bare.sqlite3", isolation_level=None)
        with closing(connection):
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.executescript(_BARE_SCHEMA)
            yield connection


class BareSQLiteBaseline:
    """
    Inserts rows like the daemon's, one transaction per batch, on the calling thread.

    :param batch: rows in one commit: as many as there are clients waiting for one.
    """

    def __init__(self, connection: sqlite3.Connection, payloads: list[tuple[str, bytes]], batch: int) -> None:
        self._connection = connection
        self._payloads = cycle(payloads)
        self._batch = batch
        self._next_id = 0

    def run(self, seconds: float) -> Figures:
        """Rows per second and commits' latency."""
        start, start_cpu = perf_counter(), process_time()
        latencies, done = [], 0
        while perf_counter() - start < seconds:
            begun = perf_counter()
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany(_BARE_INSERT, self._rows())
            self._connection.execute("COMMIT")
            latencies.append((perf_counter() - begun) * 1000)
            done += self._batch
        spent, spent_cpu = perf_counter() - start, process_time() - start_cpu
        return {
            PER_SECOND: done / spent,
            PER_CPU_SECOND: done / spent_cpu,
            "p50 ms": compute_percentile(latencies, 0.50),
            "p99 ms": compute_percentile(latencies, 0.99),
        }

    def _rows(self) -> Iterator[tuple[str, str, bytes, float, float]]:
        for recipient, payload in islice(self._payloads, self._batch):
            self._next_id += 1
            yield f"{self._next_id:032x}", recipient, payload, 1.8e9, 1.8e9 + 259_200


class StoredMessageCheck:
    """
    Compares what a server accepted in all runs with the rows in its database.

    :param count: how many rows there are now.
    :param failures: the list that they are added to, if there is one already.
    :ivar accepted: in all runs together.
    :ivar stored: rows after the last run.
    :ivar failures: sentences, one for each run in which something was missing or refused.
    """

    def __init__(self, server: TargetServer, count: Callable[[], int], failures: list[str] | None = None) -> None:
        self.server = server
        self.accepted = 0
        self.stored = 0
        self.failures: list[str] = [] if failures is None else failures
        self._count = count

    def check(self, load: LoadResult, *, payloads: int = 1) -> Figures:
        """
        Take note of one run; its figures.

        :param payloads: rows that each request makes.
        """
        self.accepted += load.accepted * payloads
        self.stored = self._count()
        if not set(load.statuses) <= set(self.server.success.split()):
            self.failures.append(f"other answers than {self.server.success}: {load.statuses}")
        if self.stored != self.accepted:
            self.failures.append(f"{self.accepted} messages were accepted, {self.stored} are stored")
        return load.figures()


# Many mediators answer 202 as the specification says, some 200 or 204.
SUCCESS_STATUSES = "202 200 204"


class WalletProcess:
    """
    The process that holds some wallets of the subject.

    :ivar bodies: the file with forwards to them.
    """

    def __init__(self, process: subprocess.Popen[str], bodies: Path) -> None:
        self._process = process
        self.bodies = bodies

    def do(self, what: str, **details: Any) -> dict[str, Any]:
        """
        Have something done and wait for it.

        :raise RuntimeError: the process ended; what it said is on stderr.
        """
        self.begin(what, **details)
        return self.result()

    def begin(self, what: str, **details: Any) -> None:
        """Have something done; :meth:`result` waits for it."""
        write_line(self._process, json.dumps({"do": what, **details}))

    def result(self) -> dict[str, Any]:
        """What came of it."""
        found: dict[str, Any] = json.loads(read_line(self._process))
        return found


@contextmanager
def start_wallet_process(setup: WalletSetup) -> Iterator[WalletProcess]:
    """Enrolled wallets in a process of their own, until it is ended."""
    with spawn_module("mediatord.bench.wallet_process") as process:
        write_line(process, json.dumps(asdict(setup)))
        read_line(process)
        yield WalletProcess(process, Path(setup.bodies))


@dataclass(frozen=True, slots=True)
class MediatorUnderTest:
    """
    :param url: where it was found.
    :param did: by which it was asked for, if it does not say so itself.
    :param pid: 0 when it runs elsewhere.
    :param database: its messages, if it is ours.
    """

    url: str
    did: str | None
    mediator: DIDCommMediator
    pid: int
    database: Path | None
    cores: CoreAssignment
    place: Path

    @property
    def server(self) -> TargetServer:
        """Where forwards go."""
        return TargetServer.at(self.mediator.http_uri, self.pid, success=SUCCESS_STATUSES)

    @property
    def note(self) -> str:
        """A sentence about who runs where."""
        return self.cores.note if self.database is not None else "The target runs where it was started."

    @property
    def stored(self) -> int | None:
        """How many messages are in its database; None when nobody can look."""
        return None if self.database is None else count_stored_rows(self.database)

    @property
    def cpu_seconds(self) -> float:
        """So far; 0 of one that runs elsewhere."""
        return cpu_seconds(self.pid) if self.pid else 0.0

    @contextmanager
    def wallet_process(self, wallets: int, size: int, letters: int) -> Iterator[WalletProcess]:
        """
        Enrolled wallets in a process of their own.

        Those of a mediator that is not ours fetch and acknowledge in the end what waits for them, and leave.

        :param letters: so many different forwards to them are prepared.
        """
        with TemporaryDirectory(dir=self.place) as place, ExitStack() as stack:
            setup = WalletSetup(self.url, self.did, wallets, size, letters, f"{place}/bodies")
            wallet_process = stack.enter_context(start_wallet_process(setup))
            yield wallet_process
            if self.database is None:
                wallet_process.do("close")
                wallet_process.do("drain", connections=1, limit=50)
                wallet_process.do("leave")


@contextmanager
def prepare_mediator(plan: BenchmarkPlan, settings: Mapping[str, str] | None = None) -> Iterator[MediatorUnderTest]:
    """
    A daemon of our own on a core of its own, or the plan's target. Within, we run on the cores of the clients.

    :param settings: of a daemon of our own, besides the usual ones.
    """
    cores = assign_cores()
    with ExitStack() as stack:
        place = Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))
        if plan.target:
            mediator = find_mediator(plan.target, plan.target_did)
            yield MediatorUnderTest(plan.target, plan.target_did, mediator, plan.target_pid, None, cores, place)
            return
        with pin_to_cores(cores.server):
            daemon = stack.enter_context(run_temporary_daemon({**DAEMON_SETTINGS, **(settings or {})}))
        stack.enter_context(pin_to_cores(cores.clients))
        mediator = find_mediator(daemon.url)
        yield MediatorUnderTest(
            daemon.url, None, mediator, daemon.pid, daemon.directory / DATABASE_FILE, cores, place
        )


_LIMIT = 50


class RetentionCheck:
    """
    Compares what the mediator accepted with what it has: with the rows in the database of a daemon of ours, and with
    what the wallets can fetch from any other, whose queues are emptied by that after each run.

    :ivar failures: sentences, one for each run in which something was missing or refused.
    """

    def __init__(self, subject: MediatorUnderTest, wallet_process: WalletProcess) -> None:
        self._subject = subject
        self._wallet_process = wallet_process
        self._before = subject.stored or 0
        self._accepted = self._kept = 0
        self.failures: list[str] = []

    @property
    def note(self) -> str:
        """A sentence about all runs."""
        return f"{self._accepted} forwards were accepted and {self._kept} messages were kept."

    def check(self, load: LoadResult) -> Figures:
        """Take note of one run; its figures."""
        self._accepted += load.accepted
        stored = self._subject.stored
        if stored is None:
            self._kept += self._wallet_process.do("drain", connections=2, limit=_LIMIT)["messages"]
        else:
            self._kept = stored - self._before
        if load.accepted != sum(load.statuses.values()):
            self.failures.append(f"forwards were refused: {load.statuses}")
        if self._kept != self._accepted:
            self.failures.append(f"{self._accepted} forwards were accepted, {self._kept} messages are kept")
        return load.figures()
