"""What an idle WebSocket costs the daemon in memory."""

from __future__ import annotations

from itertools import cycle

from mediatord.bench.crowd import Crowd, gather, read_answer, request_of
from mediatord.bench.figures import Figures, Table
from mediatord.bench.plan import DAEMON_SETTINGS, RECIPIENTS, Plan
from mediatord.bench.processes import allow_many_files, rss_bytes
from mediatord.bench.rawsocket import RawSocket
from mediatord.wallet.identity import Identity
from mediatord.wallet.throwaway import throw_away_daemon

_LIVE = "https://didcomm.org/messagepickup/3.0/live-delivery-change"
_STATUS = "https://didcomm.org/messagepickup/3.0/status"
_WARM_UP = 50
_SPARE_FILES = 100
_KIB = 1 << 10


def go_live(socket: RawSocket, wallet: Identity, crowd: Crowd) -> None:
    """
    Switch live delivery on.

    :raise RuntimeError: the daemon did not confirm it.
    """
    socket.send(request_of(wallet, crowd.mediator, _LIVE, {"live_delivery": True}))
    answer = read_answer(socket.receive(), wallet)
    if answer.type.uri != _STATUS or not (answer.body or {}).get("live_delivery"):
        raise RuntimeError("live delivery was not switched on")


def open_socket(crowd: Crowd) -> RawSocket:
    """A socket to the daemon, bound to nobody yet."""
    assert crowd.mediator.ws_uri is not None
    return RawSocket(crowd.mediator.ws_uri)


def measure_sockets(plan: Plan) -> Table:
    """RSS per socket, first merely connected, then bound to a wallet in live mode."""
    count = min(plan.sockets, allow_many_files() - _SPARE_FILES)
    with throw_away_daemon(DAEMON_SETTINGS) as daemon:
        crowd = gather(daemon.url, min(RECIPIENTS, count))
        _warm_up(crowd)
        before = rss_bytes(daemon.pid)
        sockets = [open_socket(crowd) for _ in range(count)]
        try:
            connected = rss_bytes(daemon.pid)
            for socket, wallet in zip(sockets, cycle(crowd.wallets), strict=False):
                go_live(socket, wallet, crowd)
            live = rss_bytes(daemon.pid)
        finally:
            for socket in sockets:
                socket.close()
    rows: dict[str, Figures] = {
        f"{count} connected": {"KiB each": (connected - before) / count / _KIB, "RSS MiB": connected / _KIB**2},
        f"{count} in live mode": {"KiB each": (live - before) / count / _KIB, "RSS MiB": live / _KIB**2},
    }
    note = f"The daemon alone has {before / _KIB**2:.1f} MiB. Memory of the kernel for sockets is not counted."
    return Table("Idle WebSockets", ("KiB each", "RSS MiB"), rows, notes=(note,))


def _warm_up(crowd: Crowd) -> None:
    """Code is loaded and allocators are primed by the first few."""
    for wallet, _ in zip(cycle(crowd.wallets), range(_WARM_UP), strict=False):
        socket = open_socket(crowd)
        go_live(socket, wallet, crowd)
        socket.close()
