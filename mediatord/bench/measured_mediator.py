"""The mediator that is measured, load of forwards on it, and the check that it keeps every message it accepts."""

from __future__ import annotations

import socket
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

from mediatord.bench.affinidi_mediator import (
    AffinidiLiveSocket,
    AffinidiMediator,
    enrol_affinidi_group,
    find_affinidi_mediator,
)
from mediatord.bench.load_generator import CycleResult, CycleRunner, Load, TargetServer
from mediatord.bench.plan import DAEMON_SETTINGS, DISTINCT_MESSAGES, RECIPIENTS, BenchmarkPlan
from mediatord.bench.processes import CoreAssignment, cpu_seconds, pin_to_cores
from mediatord.bench.raw_clients import WebSocketClient, loopback_address, open_socket
from mediatord.bench.results import Figures, LoadResult
from mediatord.bench.wallet_group import (
    BlockingWallet,
    LiveSocket,
    WalletGroup,
    enrol_group,
    find_mediator,
    require_socket_url,
)
from mediatord.wallet.didcomm_client import DIDCommMediator
from mediatord.wallet.temporary_daemon import TemporaryDaemon, run_temporary_daemon

DATABASE_FILE = "mediator.sqlite3"
# Many mediators answer 202 as the specification says, some 200 or 204.
SUCCESS_STATUSES = ("202", "200", "204")


def query_database(database: Path, query: str) -> Any:
    """The single value of a query, read by a connection of this process."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        (value,) = connection.execute(query).fetchone()
        return value


def count_stored_rows(database: Path, table: str = "message") -> int:
    """Number of committed rows."""
    return int(query_database(database, f"SELECT count(*) FROM {table}"))


def find_target(plan: BenchmarkPlan) -> DIDCommMediator:
    """
    The mediator at the plan's target.

    :raise RuntimeError: there is none.
    """
    return find_affinidi_mediator(plan.target, plan.target_did) or find_mediator(plan.target, plan.target_did)


class StoredMessageCheck:
    """
    Compares what a server accepted in all runs with what it has stored.

    :param count: number of messages that are stored now.
    :param failures: gets a sentence for each run with missing or rejected messages.
    :param success: HTTP statuses of success.
    """

    def __init__(self, count: Callable[[], int], failures: list[str], success: Sequence[str] = ("202",)) -> None:
        self._failures = failures
        self._count = count
        self._success = success
        self.reset()

    def reset(self) -> None:
        """Begin again, with what is stored now."""
        self.accepted = self.stored = 0
        self._before = self._count()

    def check(self, load: LoadResult, *, payloads: int = 1) -> Figures:
        """
        Check one run; its figures.

        :param payloads: messages in each request.
        """
        self.accepted += load.accepted * payloads
        self.stored = self._count() - self._before
        if not set(load.statuses) <= set(self._success):
            self._failures.append(f"responses other than {' '.join(self._success)}: {dict(load.statuses)}")
        if self.stored != self.accepted:
            self._failures.append(f"{self.accepted} messages were accepted, {self.stored} are stored")
        return load.figures()

    @property
    def note(self) -> str:
        """A sentence about all runs."""
        return f"{self.accepted} forwards were accepted and {self.stored} messages were stored."


class MeasuredMediator:
    """
    A temporary daemon, or the plan's target.

    :param daemon: None for the target.
    :param cores: that the daemon and its clients are pinned to, if they are.
    :ivar mediator: as it publishes itself.
    :ivar live_sockets: open until the end of :meth:`close`.
    """

    def __init__(
        self, plan: BenchmarkPlan, daemon: TemporaryDaemon | None, cores: CoreAssignment | None = None
    ) -> None:
        self.daemon = daemon
        self._cores = cores
        self.url = daemon.url if daemon else plan.target
        self.mediator = find_target(plan) if daemon is None else find_mediator(self.url)
        self.groups: list[WalletGroup] = []
        self.live_sockets: list[LiveSocket] = []
        self._target_pid = plan.target_pid

    @property
    def note(self) -> str:
        """A sentence for the report on where it runs; empty if it is not pinned."""
        if self.daemon is None:
            return "The target runs where it was started."
        return self._cores.note if self._cores else ""

    @property
    def pid(self) -> int:
        """Its first process; 0 if it is remote."""
        return self.daemon.pid if self.daemon else self._target_pid

    @property
    def database(self) -> Path:
        """Database of a daemon."""
        return self.require_daemon().directory / DATABASE_FILE

    def require_daemon(self) -> TemporaryDaemon:
        """The daemon, which scenarios without a target have."""
        assert self.daemon is not None
        return self.daemon

    @property
    def cpu_seconds(self) -> float:
        """CPU time so far; 0 if it is remote."""
        return cpu_seconds(self.pid)

    def restart(self, *program: str, change: Callable[[Path], None] | None = None) -> float:
        """
        Stop the daemon and start it again; the seconds that the start took.

        :param program: module and arguments that replace `mediatord`.
        :param change: changes the database of the stopped daemon.
        """
        daemon = self.require_daemon()
        daemon.stop()
        if change is not None:
            change(self.database)
        with pin_to_cores(self._cores.server) if self._cores else ExitStack():
            return daemon.start(*program)

    def enrol(self, count: int, *, short: bool = True) -> WalletGroup:
        """Enrol wallets. Those of a target empty their queues and unregister in the end, if it knows registration."""
        if isinstance(self.mediator, AffinidiMediator):
            return enrol_affinidi_group(self.mediator, count, short=short)
        self.groups.append(enrol_group(self.mediator, count, short=short))
        return self.groups[-1]

    def connect(self, wallet: BlockingWallet, *socket: WebSocketClient) -> LiveSocket:
        """Open a WebSocket of a wallet, as of :class:`LiveSocket`."""
        kind = AffinidiLiveSocket if isinstance(self.mediator, AffinidiMediator) else LiveSocket
        self.live_sockets.append(kind(wallet, *socket))
        return self.live_sockets[-1]

    def close(self) -> None:
        """Close all sockets."""
        for live in self.live_sockets:
            live.close()


@contextmanager
def open_mediator(
    plan: BenchmarkPlan, cores: CoreAssignment | None = None, settings: Mapping[str, str] | None = None
) -> Iterator[MeasuredMediator]:
    """
    Start a temporary daemon, or take the plan's target.

    :param cores: pin the daemon and this process.
    :param settings: of the daemon, in addition to the usual ones.
    """
    with ExitStack() as stack:
        if plan.target:
            with closing(MeasuredMediator(plan, None)) as mediator:
                yield mediator
            for group in mediator.groups:
                group.drain()
                group.unregister()
            return
        with pin_to_cores(cores.server) if cores else ExitStack():
            daemon = stack.enter_context(run_temporary_daemon({**DAEMON_SETTINGS, **(settings or {})}))
        if cores:
            stack.enter_context(pin_to_cores(cores.clients))
        yield stack.enter_context(closing(MeasuredMediator(plan, daemon, cores)))


class ForwardLoad:
    """
    Forwards to wallets that are offline, and the check that they are stored.

    :param failures: as of :class:`StoredMessageCheck`.
    :param size: as of :meth:`prepare`, which has to be called later if it is 0.
    :param wallets: their number.
    :param count: number of stored messages; by default rows in the daemon's database, or what the wallets can fetch.
    """

    def __init__(
        self,
        mediator: MeasuredMediator,
        failures: list[str],
        size: int = 0,
        *,
        wallets: int = RECIPIENTS,
        short: bool = True,
        count: Callable[[], int] | None = None,
    ) -> None:
        self.mediator = mediator
        self.group = mediator.enrol(wallets, short=short)
        self.bodies: list[bytes] = []
        self._fetched = 0
        self.stored_check = StoredMessageCheck(count or self._count_stored, failures, self.server.success)
        if size:
            self.prepare(size)

    @property
    def server(self) -> TargetServer:
        """Where forwards are posted; the process is another one after a restart."""
        success = ("202",) if self.mediator.daemon else SUCCESS_STATUSES
        return TargetServer(self.group.mediator.http_uri, self.mediator.pid, success=success)

    def prepare(self, size: int, count: int = DISTINCT_MESSAGES, *, payloads: int = 1) -> None:
        """Pack different forwards of one size."""
        self.bodies = [body for body, _ in self.group.forwards(size, count, payloads=payloads)]

    def start(self, connections: int, *seconds: float, servers: Sequence[TargetServer] = (), **load: Any) -> Load:
        """Start to post, to other nodes of the daemon's cluster if given."""
        return Load(servers or [self.server], self.bodies, connections, *seconds, **load)

    def post(self, connections: int, *seconds: float, payloads: int = 1, **load: Any) -> Figures:
        """Post, and check what is stored."""
        return self.stored_check.check(self.start(connections, *seconds, **load).result(), payloads=payloads)

    def _count_stored(self) -> int:
        if self.mediator.daemon is not None:
            return count_stored_rows(self.mediator.database)
        if isinstance(self.mediator.mediator, AffinidiMediator):
            # To it, equal messages are one when they are fetched.
            return self.group.count_queued()
        self._fetched += self.group.drain().accepted
        return self._fetched


# So many that a forward has been acknowledged long before it is posted again.
_FORWARDS_PER_WALLET = 16


class CycleLoad:
    """
    Forwards to wallets in live mode, which receive and acknowledge them.

    :param failures: gets a sentence for everything that goes wrong.
    :param wallets: their number.
    :param url: of their sockets, if not as the mediator's document says.
    :param apart: each socket and each connection has a source address of its own.
    :param connect: opens the connections of the sockets.
    :ivar pushed: messages of all runs.
    """

    def __init__(
        self,
        mediator: MeasuredMediator,
        failures: list[str],
        wallets: int,
        size: int,
        *,
        short: bool = True,
        url: str | None = None,
        apart: bool = False,
        connect: Callable[[str, str], socket.socket] = open_socket,
    ) -> None:
        self.mediator = mediator
        self.pushed = 0
        self._failures = failures
        self._apart = apart
        self._runs = 0
        group = mediator.enrol(wallets, short=short)
        self._server = TargetServer(group.hop.http_uri, mediator.pid)
        bodies = group.forwards(size, _FORWARDS_PER_WALLET * wallets)
        self._forwards = [(self._server.encode(body), tag) for body, tag in bodies]
        url = url or require_socket_url(group.mediator)
        self.live_sockets = [
            mediator.connect(
                wallet,
                WebSocketClient(
                    url,
                    source=loopback_address(number) if apart else "",
                    headers=wallet.http_headers,
                    connect=connect,
                ),
            )
            for number, wallet in enumerate(group.wallets)
        ]
        for live in self.live_sockets:
            live.enable_live_delivery()

    def prepare(self, connections: int, seconds: float, rate: float = 0.0, **load: Any) -> CycleRunner:
        """
        A run of cycles.

        :param rate: forwards per second of an open loop; 0 for a closed loop.
        """
        self._runs += 1
        if self._apart:
            load["sources"] = [loopback_address(number) for number in range(connections)]
        load |= {"rate": rate, "seed": self._runs}
        return CycleRunner(self._server.url, self._forwards, self.live_sockets, connections, seconds, **load)

    def run(self, connections: int, seconds: float, rate: float = 0.0, **load: Any) -> CycleResult:
        """Run cycles, as of :meth:`prepare`, and check them."""
        runner = self.prepare(connections, seconds, rate, **load)
        before = self.mediator.cpu_seconds
        result = runner.run()
        runner.close()
        result.cpu_seconds = self.mediator.cpu_seconds - before
        self.pushed += result.accepted
        self._failures += result.failures()
        return result

    def count_queued(self) -> int:
        """Number of messages queued for the wallets."""
        return sum(live.count_queued() for live in self.live_sockets)

    def check_queues(self) -> None:
        """Check that nothing is queued."""
        if left := self.count_queued():
            self._failures.append(f"{left} messages were acknowledged and are still queued")
