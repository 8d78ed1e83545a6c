"""What the listeners serve."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from autobahn.twisted.resource import WebSocketResource

from mediatord.config import Config
from mediatord.decentrl.exchange import Reply as DecentrlReply
from mediatord.didcomm.exchange import Origin, Reply
from mediatord.errors import MediatorError, ShuttingDown, StoreUnavailable
from mediatord.journal import Half
from mediatord.memory import MemoryReclaimer
from mediatord.readiness import Readiness
from mediatord.web.origins import AllowedOrigins
from mediatord.web.pages import Pages
from mediatord.web.peers import Peers
from mediatord.web.resources import Front, nobody_looks
from mediatord.web.round_robin import RoundRobinScheduler
from mediatord.web.site import MediatorSite
from mediatord.web.socket_factory import SocketFactory
from mediatord.web.websocket import Sockets
from mediatord.wiring.asking import Asking
from mediatord.wiring.base import Base
from mediatord.wiring.buffers import watch_web
from mediatord.wiring.decentrl import DecentrlHalf
from mediatord.wiring.didcomm import DIDCommHalf
from mediatord.wiring.statistics import ScrapeRefresh
from mediatord.workers import Worker

T = TypeVar("T")


class _Gateway:
    """Both halves behind the gate: what comes once the daemon is stopping is counted and refused."""

    def __init__(self, base: Base, didcomm: DIDCommHalf, decentrl: DecentrlHalf) -> None:
        self._base = base
        self._didcomm = didcomm.mediator
        self._decentrl = decentrl.mediator

    async def receive(self, raw: bytes, origin: Origin) -> Reply:
        """One DIDComm message."""
        return await self._inside("didcomm", origin.peer, len(raw), lambda: self._didcomm.receive(raw, origin))

    async def command(self, raw: bytes, peer: str) -> DecentrlReply:
        """One Decentrl command."""
        return await self._inside("decentrl", peer, len(raw), lambda: self._decentrl.receive(raw, peer))

    async def public(self, did: str, arguments: Mapping[bytes, Sequence[bytes]], peer: str) -> DecentrlReply:
        """A page of a public channel."""
        return await self._inside("decentrl", peer, 0, lambda: self._decentrl.public(did, arguments, peer))

    def turned_away(self, half: Half, peer: str, error: MediatorError) -> None:
        """A request was refused before anybody looked at it."""
        self._base.journal.turned_away(half, peer, 0, error)

    async def _inside(self, half: Half, peer: str, size: int, work: Callable[[], Awaitable[T]]) -> T:
        try:
            return await self._base.gate.through(work)
        except ShuttingDown as error:
            self._base.journal.turned_away(half, peer, size, error)
            raise


def build_site(
    base: Base,
    didcomm: DIDCommHalf,
    decentrl: DecentrlHalf,
    config: Config,
    worker: Worker | None = None,
    readiness: Callable[[], Readiness] | None = None,
) -> MediatorSite:
    """
    One site for both halves.

    :param readiness: what answers `/ready`, once the site is served.
    """
    gateway = _Gateway(base, didcomm, decentrl)
    peers = Peers(config.trusted_proxies, base.own.token, config.limits.trusted_peers)
    largest = config.limits.max_message_bytes
    memory = MemoryReclaimer(base.reactor)
    scheduler = RoundRobinScheduler(base.reactor)
    sockets = Sockets(
        receive=gateway.receive,
        converse=decentrl.converse,
        connections=base.connections,
        journal=base.journal,
        peers=peers,
        clock=base.reactor,
        memory=memory,
        scheduler=scheduler,
        admits=base.admission.request,
    )
    origins = AllowedOrigins(config.websocket_origins)
    pages = Pages(base.identity.did, base.identity.web_document, config.public_url)
    factory = SocketFactory(base.reactor, sockets, largest)
    front = Front(
        clock=base.reactor,
        receive=gateway.receive,
        command=gateway.command,
        public=gateway.public,
        ping_store=_asking(base, config),
        store_trouble=lambda: base.store.trouble,
        trouble=lambda: base.standing.trouble,
        statistics=ScrapeRefresh(base),
        figures=worker.page if worker else lambda: _figures(base),
        pages=pages,
        metrics=base.journal.metrics,
        peers=peers,
        connections=base.connections,
        sockets=WebSocketResource(factory),
        turned_away=gateway.turned_away,
        origins=origins,
        memory=memory,
        scheduler=scheduler,
        admits=base.admission.request,
        metrics_allow=lambda: base.reloading.config.metrics.allow,
        ready=(lambda: readiness().ask()) if readiness else nobody_looks,
        short_way=didcomm.short_way.take,
    )
    factory.limit(largest, config.limits.max_outbox_bytes)
    site = MediatorSite(front, largest, *_connections(config))
    site.unread.limit(config.limits.max_unread_bytes)

    def follow(new: Config) -> None:
        peers.recognise(new.limits.trusted_peers)
        origins.allow(new.websocket_origins)
        site.limit(new.limits.max_message_bytes, *_connections(new))
        factory.limit(new.limits.max_message_bytes, new.limits.max_outbox_bytes)
        site.unread.limit(new.limits.max_unread_bytes)
        pages.show(base.identity.did, base.identity.web_document)

    base.reloading.follow(follow)
    watch_web(base, factory, site)
    return site


def _connections(config: Config) -> tuple[int, int]:
    """How many one address may have that are no sockets, and one of a trusted peer."""
    return 4 * config.limits.max_connections_per_ip, 4 * config.limits.trusted_connections


def _asking(base: Base, config: Config) -> Callable[[], Awaitable[None]]:
    """What asks the store. A server is asked each time; of a disk it is known that it answers later than it could."""

    async def ask() -> None:
        await _ping(base)

    if config.storage.backend != "sqlite":
        return ask
    return Asking(ask, base.steady, lambda: base.journal.metrics.rejections("store_unavailable"))


async def _ping(base: Base) -> None:
    try:
        await base.gate.through(base.store.ping)
    except StoreUnavailable:
        base.journal.metrics.storage_up(False)
        raise
    base.journal.metrics.storage_up(True)


async def _figures(base: Base) -> bytes:
    return base.journal.metrics.render()
