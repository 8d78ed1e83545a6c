"""Resident memory of an idle WebSocket: the daemon, aiohttp and `websockets`, all held by the same raw client."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from mediatord.bench.crowd import gather, mediator_at
from mediatord.bench.figures import Figures, Rounds, Table, Target, take_turns
from mediatord.bench.plan import DAEMON_SETTINGS
from mediatord.bench.processes import allow_many_files, rss_bytes
from mediatord.bench.rawsocket import RawSocket
from mediatord.bench.sockets import go_live
from mediatord.wallet.throwaway import Daemon, throw_away_daemon
from tests.peers.comparing import OURS, Company, Terms
from tests.peers.programs import AbsentError, Program, running

AIOHTTP, WEBSOCKETS = "aiohttp", "websockets"
SERVERS = {
    AIOHTTP: (Program("serve_aiohttp.py", ".venv-peers"), "/ws"),
    WEBSOCKETS: (Program("serve_websockets.py", ".venv-peers"), "/"),
}
# Of a peer's memory for a socket, what ours may take.
GOAL = 0.75

_KIB = 1 << 10
_WARM_UP = 50
_SPARE_FILES = 100
# As often as this many sockets, what has come on others is read: pings want an answer.
_BETWEEN_LOOKS = 250
# A server is started anew each time, and memory hardly differs from time to time.
_MOST_ROUNDS = 3
_BASE = "server alone, MiB"


def measure(terms: Terms) -> Table:
    """One table; KiB a socket for each number of them, and what the servers have without any."""
    counts = [min(count, allow_many_files() - _SPARE_FILES) for count in sorted(terms.sockets)]
    company = Company()
    contenders: dict[str, Callable[[], Figures]] = {OURS: lambda: _ours(counts)}
    for name, (program, path) in SERVERS.items():
        if terms.wants(name):
            try:
                with running(program) as server:
                    server.hear()
                company.versions[name] = server.versions
                contenders[name] = lambda program=program, path=path: _theirs(program, path, counts)  # type: ignore[misc]
            except (AbsentError, RuntimeError) as error:
                company.skipped[name] = str(error)
    rounds = take_turns(contenders, min(terms.rounds, _MOST_ROUNDS))
    rows = {name: rounds.medians(name) for name in rounds.found}
    for count in counts:
        rows.setdefault(f"{OURS}, live", {}).update(_live(count))
    notes = (
        "KiB each; the handshake is done and nothing was sent. Memory of the kernel is not counted.",
        "Live: each a wallet of its own, enrolled, in live mode; shown beside, since the others know no wallets.",
        *company.notes(),
    )
    columns = (*map(_column, counts), _BASE)
    return Table("An idle WebSocket", columns, rows, tuple(_targets(rounds, counts)), notes)


def _targets(rounds: Rounds, counts: list[int]) -> Iterator[Target]:
    for count in counts:
        for name in rounds.found:
            if name != OURS:
                share = rounds.ratio(OURS, name, _column(count))
                yield Target(f"memory of each of {count:,} sockets, x {name}", GOAL, share, most=True)


def _column(count: int) -> str:
    return f"{count:,}"


@dataclass(frozen=True, slots=True)
class _Held:
    """
    Open sockets, and what comes on them.

    :param url: where more of them are opened.
    """

    url: str
    sockets: list[RawSocket]
    events: select.epoll

    def open(self) -> RawSocket:
        """One more."""
        socket = RawSocket(self.url)
        self.events.register(socket, select.EPOLLIN)
        self.sockets.append(socket)
        if len(self.sockets) % _BETWEEN_LOOKS == 0:
            self.look()
        return socket

    def look(self) -> None:
        """Read what has come; pings are answered. Raises ConnectionError when a socket was closed."""
        by_number = {socket.fileno(): socket for socket in self.sockets}
        while ready := self.events.poll(0):
            for number, _ in ready:
                by_number[number].take()


@contextmanager
def _holding(url: str) -> Iterator[_Held]:
    held = _Held(url, [], select.epoll())
    try:
        yield held
    finally:
        for socket in held.sockets:
            socket.close()
        held.events.close()


def _theirs(program: Program, path: str, counts: list[int]) -> Figures:
    with running(program) as server:
        url = f"ws://127.0.0.1:{server.hear()['port']}{path}"
        return weigh(server.pid, url, counts, _warmed_up(server.pid, url), lambda held, _: held.open())


def _ours(counts: list[int]) -> Figures:
    with throw_away_daemon(DAEMON_SETTINGS) as daemon:
        url = _socket_url(daemon)
        return weigh(daemon.pid, url, counts, _warmed_up(daemon.pid, url), lambda held, _: held.open())


def _live(count: int) -> Figures:
    """With a daemon of its own: what it keeps in memory of so many wallets that enrolled counts as well."""
    with throw_away_daemon(DAEMON_SETTINGS) as daemon:
        url = _socket_url(daemon)
        alone = _warmed_up(daemon.pid, url)
        crowd = gather(daemon.url, count, short=True)
        return weigh(
            daemon.pid, url, [count], alone, lambda held, number: go_live(held.open(), crowd.wallets[number], crowd)
        )


def _socket_url(daemon: Daemon) -> str:
    url = mediator_at(daemon.url).ws_uri
    assert url is not None
    return url


def _warmed_up(pid: int, url: str) -> int:
    """Memory of a server without sockets, in bytes, when code is loaded and allocators are primed by a few."""
    with _holding(url) as held:
        for _ in range(_WARM_UP):
            held.open()
    return rss_bytes(pid)


def weigh(pid: int, url: str, counts: list[int], alone: int, add: Callable[[_Held, int], object]) -> Figures:
    """
    What a server takes for each socket, with so many of them, one number after the other.

    :param alone: bytes that it has without them.
    :param add: opens one more, the one of this number.
    """
    figures = {_BASE: alone / _KIB**2}
    with _holding(url) as held:
        for count in counts:
            for number in range(len(held.sockets), count):
                add(held, number)
            held.look()
            figures[_column(count)] = (rss_bytes(pid) - alone) / count / _KIB
    return figures
