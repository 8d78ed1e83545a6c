"""Resident memory of idle WebSockets: the daemon, aiohttp and `websockets`, with the same raw client."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mediatord.bench.plan import DAEMON_SETTINGS
from mediatord.bench.processes import raise_file_limit, rss_bytes
from mediatord.bench.raw_clients import WebSocketClient
from mediatord.bench.results import Figures, InterleavedResults, PerformanceTarget, ResultTable, run_interleaved
from mediatord.bench.wallet_group import LiveSocket, enrol_group, find_mediator
from mediatord.wallet.temporary_daemon import TemporaryDaemon, run_temporary_daemon
from tests.peers.comparison import OURS, ComparisonOptions, Participants
from tests.peers.driver_processes import DriverProgram, DriverUnavailable, run_driver

AIOHTTP, WEBSOCKETS = "aiohttp", "websockets"
SERVERS = {
    AIOHTTP: (DriverProgram("serve_aiohttp.py", ".venv-peers"), "/ws"),
    WEBSOCKETS: (DriverProgram("serve_websockets.py", ".venv-peers"), "/"),
}
# mediatord's target share of a peer's memory for a socket.
GOAL = 0.75

_KIB = 1 << 10
_WARM_UP = 50
_SPARE_FILES = 100
# After this many sockets the others are read, so that pings are answered.
_SOCKETS_BETWEEN_READS = 250
# Each round starts a new server, and memory hardly varies.
_MAX_ROUNDS = 3
_BASE = "server alone, MiB"


def measure_websockets(options: ComparisonOptions) -> ResultTable:
    """One table: KiB per socket for each number of sockets, and memory of the servers without any."""
    counts = [min(count, raise_file_limit() - _SPARE_FILES) for count in sorted(options.sockets)]
    participants = Participants()
    contenders: dict[str, Callable[[], Figures]] = {OURS: lambda: _mediatord(counts)}
    for name, (program, path) in SERVERS.items():
        if options.wants(name):
            try:
                with run_driver(program) as server:
                    server.receive()
                participants.versions[name] = server.versions
                contenders[name] = lambda program=program, path=path: _peer(program, path, counts)  # type: ignore[misc]
            except (DriverUnavailable, RuntimeError) as error:
                participants.skipped[name] = str(error)
    rounds = run_interleaved(contenders, min(options.rounds, _MAX_ROUNDS))
    rows = {name: rounds.medians(name) for name in rounds.found}
    for count in counts:
        rows.setdefault(f"{OURS}, live", {}).update(_live(count))
    notes = (
        "KiB each; the handshake is done and nothing was sent. Memory of the kernel is not counted.",
        "Live: each a wallet of its own, enrolled, in live mode; shown beside, since the others know no wallets.",
        *participants.notes(),
    )
    columns = (*map(_column, counts), _BASE)
    return ResultTable("An idle WebSocket", columns, rows, list(_targets(rounds, counts)), list(notes))


def _targets(rounds: InterleavedResults, counts: list[int]) -> Iterator[PerformanceTarget]:
    for count in counts:
        for name in rounds.found:
            if name != OURS:
                share = rounds.ratio(OURS, name, _column(count))
                yield PerformanceTarget(f"memory of each of {count:,} sockets, x {name}", GOAL, share, most=True)


def _column(count: int) -> str:
    return f"{count:,}"


@dataclass(frozen=True, slots=True)
class _HeldSockets:
    """
    Open sockets and their events.

    :param url: URL to open more.
    """

    url: str
    sockets: list[WebSocketClient]
    events: select.epoll

    def open(self) -> WebSocketClient:
        """Open another socket."""
        socket = WebSocketClient(self.url)
        self.events.register(socket, select.EPOLLIN)
        self.sockets.append(socket)
        if len(self.sockets) % _SOCKETS_BETWEEN_READS == 0:
            self.read_events()
        return socket

    def read_events(self) -> None:
        """
        Read what has arrived; pings are answered.

        :raise ConnectionError: a socket was closed.
        """
        by_number = {socket.fileno(): socket for socket in self.sockets}
        while ready := self.events.poll(0):
            for number, _ in ready:
                by_number[number].take()


@contextmanager
def _hold_sockets(url: str) -> Iterator[_HeldSockets]:
    held = _HeldSockets(url, [], select.epoll())
    try:
        yield held
    finally:
        for socket in held.sockets:
            socket.close()
        held.events.close()


def _peer(program: DriverProgram, path: str, counts: list[int]) -> Figures:
    with run_driver(program) as server:
        url = f"ws://127.0.0.1:{server.receive()['port']}{path}"
        return measure_bytes_per_socket(
            server.pid, url, counts, _warmed_up(server.pid, url), lambda held, _: held.open()
        )


def _mediatord(counts: list[int]) -> Figures:
    with run_temporary_daemon(DAEMON_SETTINGS) as daemon:
        url = _socket_url(daemon)
        return measure_bytes_per_socket(
            daemon.pid, url, counts, _warmed_up(daemon.pid, url), lambda held, _: held.open()
        )


def _live(count: int) -> Figures:
    """Sockets in live mode at a new daemon, including the memory of the enrolled wallets."""
    with run_temporary_daemon(DAEMON_SETTINGS) as daemon:
        url = _socket_url(daemon)
        baseline = _warmed_up(daemon.pid, url)
        group = enrol_group(daemon.url, count, short=True)
        return measure_bytes_per_socket(
            daemon.pid,
            url,
            [count],
            baseline,
            lambda held, number: LiveSocket(group.wallets[number], held.open()).enable_live_delivery(),
        )


def _socket_url(daemon: TemporaryDaemon) -> str:
    url = find_mediator(daemon.url).ws_uri
    assert url is not None
    return url


def _warmed_up(pid: int, url: str) -> int:
    """Memory in bytes of a server without sockets, once a few have loaded code and primed allocators."""
    with _hold_sockets(url) as held:
        for _ in range(_WARM_UP):
            held.open()
    return rss_bytes(pid)


def measure_bytes_per_socket(
    pid: int, url: str, counts: list[int], baseline: int, add: Callable[[_HeldSockets, int], object]
) -> Figures:
    """
    Bytes of a server per socket, with each number of sockets.

    :param baseline: bytes without sockets.
    :param add: opens another socket, of this number.
    """
    figures = {_BASE: baseline / _KIB**2}
    with _hold_sockets(url) as held:
        for count in counts:
            for number in range(len(held.sockets), count):
                add(held, number)
            held.read_events()
            figures[_column(count)] = (rss_bytes(pid) - baseline) / count / _KIB
    return figures
