"""Puts the rooms together: the only place that knows the whole configuration (contract section 4)."""

from __future__ import annotations

from typing import Any

from autobahn.twisted.resource import WebSocketResource
from twisted.application.service import Service

from mediatord.config import Config
from mediatord.didcomm.exchange import Origin, Reply
from mediatord.errors import MediatorError, ShuttingDown
from mediatord.service import Listener, OrderedService, refuse_unavailable
from mediatord.store import check_store
from mediatord.web.pages import Pages
from mediatord.web.peers import Peers
from mediatord.web.resources import Front
from mediatord.web.site import MediatorSite
from mediatord.web.websocket import SocketFactory, Sockets
from mediatord.wiring.base import Base, build_base, load_identity
from mediatord.wiring.didcomm import DIDCommHalf, build_didcomm
from mediatord.wiring.life import Endings, Signs, StoreLife

__all__ = ["build", "build_site", "load_identity"]


def build(reactor: Any, config: Config) -> OrderedService:
    """
    The daemon as one service; nothing is opened or bound before it starts.

    :raise StartupError: keys, identity or log key cannot be used.
    """
    refuse_unavailable(config)
    base = build_base(reactor, config)
    half = build_didcomm(base, config)
    site = build_site(base, half, config)
    root = OrderedService(reactor, patience=config.drain_timeout)
    signs = Signs(base)
    children: list[Service] = [
        base.events,
        StoreLife(base, lambda: check_store(config.storage.backend, config.storage.sqlite.path), signs.store_opened),
        half.due,
        half.housekeeping,
        Endings("outgoing requests", lambda: _stop_outgoing(base, half)),
        base.connections,
        base.gate,
        *(Listener(endpoint, site, reactor) for endpoint in config.listen),
        signs,
    ]
    for child in children:
        child.setServiceParent(root)
    return root


def build_site(base: Base, half: DIDCommHalf, config: Config) -> MediatorSite:
    """What the listeners serve."""

    async def receive(raw: bytes, origin: Origin) -> Reply:
        try:
            return await base.gate.through(lambda: half.mediator.receive(raw, origin))
        except ShuttingDown as error:
            base.journal.turned_away("didcomm", origin.peer, len(raw), error)
            raise

    def turned_away(peer: str, error: MediatorError) -> None:
        base.journal.turned_away("didcomm", peer, 0, error)

    peers = Peers(config.trusted_proxies)
    largest = config.limits.max_message_bytes
    sockets = Sockets(receive, base.connections, base.journal, peers, base.reactor)
    front = Front(
        clock=base.reactor,
        receive=receive,
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


async def _stop_outgoing(base: Base, half: DIDCommHalf) -> None:
    half.endpoints.stop()
    await base.outbound.close()
