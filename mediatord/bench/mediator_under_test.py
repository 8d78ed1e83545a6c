"""The mediator that is measured, wallets enrolled at it, and the check that it keeps every message it accepts."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mediatord.bench.didcomm_wallets import build_forwards, enrol_group, find_mediator
from mediatord.bench.load_generator import LoadResult, TargetServer, post_for_seconds, post_to_servers, write_bodies
from mediatord.bench.processes import (
    CoreAssignment,
    assign_cores,
    cpu_seconds,
    pin_to_cores,
    read_line,
    spawn_module,
    write_line,
)
from mediatord.bench.scenario import DAEMON_SETTINGS, DISTINCT_MESSAGES, RECIPIENTS, BenchmarkPlan, Figures
from mediatord.bench.wallet_process import WalletSetup
from mediatord.wallet.didcomm_client import DIDCommMediator
from mediatord.wallet.temporary_daemon import TemporaryDaemon, run_temporary_daemon

DATABASE_FILE = "mediator.sqlite3"
# Many mediators answer 202 as the specification says, some 200 or 204.
_SUCCESS_STATUSES = "202 200 204"


def open_temporary_directory(stack: ExitStack) -> Path:
    """A temporary directory that is removed with the stack."""
    return Path(stack.enter_context(TemporaryDirectory(prefix="mediatord-bench-")))


def query_database(database: Path, query: str) -> Any:
    """The single value of a query, read by a connection of this process."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        (value,) = connection.execute(query).fetchone()
        return value


def count_stored_rows(database: Path, table: str = "message") -> int:
    """Number of committed rows."""
    return int(query_database(database, f"SELECT count(*) FROM {table}"))


class StoredMessageCheck:
    """
    Compares what a server accepted in all runs with what it has stored.

    :param count: number of messages that are stored now.
    :ivar failures: a sentence for each run with missing or rejected messages.
    """

    def __init__(self, server: TargetServer, count: Callable[[], int]) -> None:
        self.server = server
        self.accepted = 0
        self.stored = 0
        self.failures: list[str] = []
        self._count = count

    def check(self, load: LoadResult, *, payloads: int = 1) -> Figures:
        """
        Check one run; its figures.

        :param payloads: messages in each request.
        """
        self.accepted += load.accepted * payloads
        self.stored = self._count()
        if not set(load.statuses) <= set(self.server.success.split()):
            self.failures.append(f"responses other than {self.server.success}: {load.statuses}")
        if self.stored != self.accepted:
            self.failures.append(f"{self.accepted} messages were accepted, {self.stored} are stored")
        return load.figures()

    @property
    def note(self) -> str:
        """A sentence about all runs."""
        return f"{self.accepted} forwards were accepted and {self.stored} messages were stored."


class ForwardLoad:
    """
    Forwards to wallets of a temporary daemon, and the check that they are stored.

    :param bodies: file for the forwards.
    :param recipients: number of wallets.
    :param count: number of stored messages; by default the rows in the daemon's database.
    """

    def __init__(
        self,
        daemon: TemporaryDaemon,
        bodies: Path,
        *,
        recipients: int = RECIPIENTS,
        short: bool = False,
        count: Callable[[], int] | None = None,
    ) -> None:
        self.database = daemon.directory / DATABASE_FILE
        self.bodies = bodies
        self.group = enrol_group(daemon.url, recipients, short=short)
        self.server = TargetServer.from_url(self.group.mediator.http_uri, daemon.pid)
        self.stored_check = StoredMessageCheck(self.server, count or (lambda: count_stored_rows(self.database)))

    def prepare(self, size: int, count: int = DISTINCT_MESSAGES, *, payloads: int = 1) -> None:
        """Write different forwards of one size."""
        write_bodies(self.bodies, build_forwards(self.group, size, count, payloads=payloads))

    def post(self, connections: int, seconds: float, servers: Sequence[TargetServer] = ()) -> Figures:
        """Post in a closed loop, to other nodes of the daemon's cluster if given, and check what is stored."""
        load = post_to_servers(servers or [self.server], self.bodies, connections, seconds)
        return self.stored_check.check(load)


class WalletProcess:
    """
    Proxy of a process of :mod:`mediatord.bench.wallet_process`.

    :ivar bodies: file of forwards to its wallets.
    """

    def __init__(self, process: subprocess.Popen[str], bodies: Path) -> None:
        self._process = process
        self.bodies = bodies

    def do(self, command: str, **parameters: Any) -> dict[str, Any]:
        """
        Run a command; its result.

        :raise RuntimeError: the process ended; its stderr says why.
        """
        write_line(self._process, json.dumps({"do": command, **parameters}))
        result: dict[str, Any] = json.loads(read_line(self._process))
        return result


@contextmanager
def start_wallet_process(setup: WalletSetup) -> Iterator[WalletProcess]:
    """Enrol wallets in a child process, which is stopped on exit."""
    with spawn_module("mediatord.bench.wallet_process") as process:
        write_line(process, json.dumps(asdict(setup)))
        read_line(process)
        yield WalletProcess(process, Path(setup.bodies))


@dataclass(frozen=True, slots=True)
class MediatorUnderTest:
    """
    A temporary daemon, or the target of the plan.

    :param did: given by the user, if the mediator does not publish it.
    :param pid: 0 if it is remote.
    :param database: of a temporary daemon; None for a target.
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
        """Where forwards are posted."""
        return TargetServer.from_url(self.mediator.http_uri, self.pid, success=_SUCCESS_STATUSES)

    @property
    def note(self) -> str:
        """A sentence about the cores in use."""
        return self.cores.note if self.database is not None else "The target runs where it was started."

    @property
    def cpu_seconds(self) -> float:
        """CPU time so far; 0 if it is remote."""
        return cpu_seconds(self.pid) if self.pid else 0.0

    @contextmanager
    def wallet_process(self, wallets: int, size: int, forwards: int) -> Iterator[WalletProcess]:
        """
        Enrol wallets in a child process. Those of a target empty their queues and unregister in the end.

        :param forwards: number of different forwards to prepare.
        """
        with TemporaryDirectory(dir=self.place) as place:
            setup = WalletSetup(self.url, self.did, wallets, size, forwards, f"{place}/bodies")
            with start_wallet_process(setup) as wallet_process:
                yield wallet_process
                if self.database is None:
                    wallet_process.do("close")
                    _drain(wallet_process)
                    wallet_process.do("leave")

    def make_stored_check(self, wallet_process: WalletProcess) -> StoredMessageCheck:
        """A check by the rows in the database, or by what a target's wallets can fetch after each run."""
        if self.database is not None:
            database, before = self.database, count_stored_rows(self.database)
            return StoredMessageCheck(self.server, lambda: count_stored_rows(database) - before)
        fetched = 0

        def count() -> int:
            nonlocal fetched
            fetched += _drain(wallet_process)
            return fetched

        return StoredMessageCheck(self.server, count)

    def post(self, bodies: Path, connections: int, seconds: float) -> LoadResult:
        """Post in a closed loop."""
        return post_for_seconds(self.server, bodies, connections, seconds)


def _drain(wallet_process: WalletProcess) -> int:
    return int(wallet_process.do("drain", connections=2, limit=50)["messages"])


@contextmanager
def prepare_mediator(plan: BenchmarkPlan, settings: Mapping[str, str] | None = None) -> Iterator[MediatorUnderTest]:
    """
    Start a temporary daemon on a core of its own, or take the plan's target; this process runs on the other cores.

    :param settings: of the daemon, in addition to the usual ones.
    """
    cores = assign_cores()
    with ExitStack() as stack:
        place = open_temporary_directory(stack)
        if plan.target:
            mediator = find_mediator(plan.target, plan.target_did)
            yield MediatorUnderTest(plan.target, plan.target_did, mediator, plan.target_pid, None, cores, place)
            return
        with pin_to_cores(cores.server):
            daemon = stack.enter_context(run_temporary_daemon({**DAEMON_SETTINGS, **(settings or {})}))
        stack.enter_context(pin_to_cores(cores.clients))
        database = daemon.directory / DATABASE_FILE
        yield MediatorUnderTest(daemon.url, None, find_mediator(daemon.url), daemon.pid, database, cores, place)
