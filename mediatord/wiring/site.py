"""What the listeners serve."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from autobahn.twisted.resource import WebSocketResource

from mediatord.config import Config
from mediatord.decentrl.exchange import Reply as DecentrlReply
from mediatord.didcomm.exchange import Origin, Reply
from mediatord.errors import MediatorError, ShuttingDown
from mediatord.journal import Half
from mediatord.web.pages import Pages
from mediatord.web.peers import Peers
from mediatord.web.resources import Front
from mediatord.web.site import MediatorSite
from mediatord.web.websocket import SocketFactory, Sockets
from mediatord.wiring.base import Base
from mediatord.wiring.decentrl import DecentrlHalf
from mediatord.wiring.didcomm import DIDCommHalf

T = TypeVar("T")


def build_site(base: Base, didcomm: DIDCommHalf, decentrl: DecentrlHalf, config: Config) -> MediatorSite:
    """One site for both halves, whose work goes through the gate."""

    async def inside(half: Half, peer: str, size: int, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await base.gate.through(work)
        except ShuttingDown as error:
            base.journal.turned_away(half, peer, size, error)
            raise

    async def receive(raw: bytes, origin: Origin) -> Reply:
        return await inside("didcomm", origin.peer, len(raw), lambda: didcomm.mediator.receive(raw, origin))

    async def command(raw: bytes, peer: str) -> DecentrlReply:
        return await inside("decentrl", peer, len(raw), lambda: decentrl.mediator.receive(raw, peer))

    async def public(did: str, arguments: Mapping[bytes, Sequence[bytes]], peer: str) -> DecentrlReply:
        return await inside("decentrl", peer, 0, lambda: decentrl.mediator.public(did, arguments, peer))

    def turned_away(half: Half, peer: str, error: MediatorError) -> None:
        base.journal.turned_away(half, peer, 0, error)

    peers = Peers(config.trusted_proxies)
    largest = config.limits.max_message_bytes
    sockets = Sockets(
        receive=receive,
        converse=decentrl.converse,
        connections=base.connections,
        journal=base.journal,
        peers=peers,
        clock=base.reactor,
    )
    front = Front(
        clock=base.reactor,
        receive=receive,
        command=command,
        public=public,
        ping_store=lambda: _ping(base),
        queue_sizes=lambda: _queue_sizes(base, config.metrics.queue_size_top),
        pages=Pages(base.identity.did, base.identity.web_document, config.public_url),
        metrics=base.journal.metrics,
        peers=peers,
        connections=base.connections,
        sockets=WebSocketResource(SocketFactory(base.reactor, sockets, largest)),
        turned_away=turned_away,
        metrics_allow=config.metrics.allow,
    )
    return MediatorSite(front, largest, 4 * config.limits.max_connections_per_ip)


async def _ping(base: Base) -> None:
    await base.gate.through(base.store.ping)


async def _queue_sizes(base: Base, top: int) -> None:
    base.journal.metrics.queue_sizes(*await base.store.queue_sizes(top))
