"""What an idle WebSocket costs the daemon in memory."""

from __future__ import annotations

from contextlib import closing
from http.client import HTTPConnection
from urllib.parse import urlsplit

from mediatord.bench.courier import Courier
from mediatord.bench.crowd import Crowd, mediator_at, read_answer, request_of
from mediatord.bench.figures import Figures, Table, Target
from mediatord.bench.plan import DAEMON_SETTINGS, Plan
from mediatord.bench.processes import allow_many_files, rss_bytes
from mediatord.bench.rawsocket import RawSocket
from mediatord.protocol.didcomm.message import ENCRYPTED_TYPE
from mediatord.wallet.identity import Identity
from mediatord.wallet.mediator import Mediator
from mediatord.wallet.throwaway import throw_away_daemon

# Resident memory of the daemon for an idle socket of an account in live mode.
LIVE_KIB_GOAL = 12.0

_COORDINATION = "https://didcomm.org/coordinate-mediation/3.0"
_LIVE = "https://didcomm.org/messagepickup/3.0/live-delivery-change"
_STATUS = "https://didcomm.org/messagepickup/3.0/status"
_TIMEOUT_SECONDS = 30
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
    """RSS per socket, first merely connected, then in live mode, each for a wallet and an account of its own."""
    count = min(plan.sockets, allow_many_files() - _SPARE_FILES)
    with throw_away_daemon(DAEMON_SETTINGS) as daemon:
        mediator = mediator_at(daemon.url)
        couriers = enrolled(mediator, count)
        _warm_up(couriers)
        before = rss_bytes(daemon.pid)
        sockets: list[RawSocket] = []
        try:
            sockets += [RawSocket(mediator.ws_uri or "") for _ in couriers]
            connected = rss_bytes(daemon.pid)
            for socket, courier in zip(sockets, couriers, strict=True):
                switch_on(socket, courier)
            live = rss_bytes(daemon.pid)
        finally:
            for socket in sockets:
                socket.close()
    each = (live - before) / count / _KIB
    rows: dict[str, Figures] = {
        f"{count} connected": {"KiB each": (connected - before) / count / _KIB, "RSS MiB": connected / _KIB**2},
        f"{count} in live mode": {"KiB each": each, "RSS MiB": live / _KIB**2},
    }
    notes = (
        f"The daemon alone, {count} accounts enrolled, has {before / _KIB**2:.1f} MiB. Each socket is for a wallet "
        f"of its own, with a DID of {len(couriers[0].wallet.did)} characters.",
        "Memory of the kernel for sockets is not counted. The goal is for 10000 (--sockets 10000).",
    )
    targets = (Target(f"KiB of a live socket, {count} held", LIVE_KIB_GOAL, each, most=True),)
    return Table("Idle WebSockets", ("KiB each", "RSS MiB"), rows, targets, notes)


def enrolled(mediator: Mediator, count: int) -> list[Courier]:
    """
    Fresh wallets with accounts, made as quickly as can be.

    :raise RuntimeError: the daemon did not do as asked.
    """
    target = urlsplit(mediator.http_uri)
    couriers = [Courier(Identity.fresh(endpoint=mediator.did), mediator) for _ in range(count)]
    with closing(HTTPConnection(target.hostname or "", target.port, timeout=_TIMEOUT_SECONDS)) as connection:
        for courier in couriers:
            updates = [{"recipient_did": courier.wallet.did, "action": "add"}]
            for name, body in (("mediate-request", {}), ("recipient-update", {"updates": updates})):
                packed = courier.request(f"{_COORDINATION}/{name}", body)
                connection.request("POST", target.path, packed, {"Content-Type": ENCRYPTED_TYPE})
                response = connection.getresponse()
                response.read()
                if response.status != 200:
                    raise RuntimeError(f"the daemon answered {response.status} to {name}")
    return couriers


def switch_on(socket: RawSocket, courier: Courier) -> None:
    """
    Switch live delivery on.

    :raise RuntimeError: the daemon did not confirm it.
    """
    socket.send(courier.request(_LIVE, {"live_delivery": True}))
    answer = courier.open(socket.receive())
    if answer["type"] != _STATUS or not answer["body"].get("live_delivery"):
        raise RuntimeError("live delivery was not switched on")


def _warm_up(couriers: list[Courier]) -> None:
    """Code is loaded and allocators are primed by the first few."""
    for courier in couriers[:_WARM_UP]:
        socket = RawSocket(courier.mediator.ws_uri or "")
        switch_on(socket, courier)
        socket.close()
