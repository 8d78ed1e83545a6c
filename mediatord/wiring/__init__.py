"""Puts the rooms together: the only place that knows the whole configuration (contract section 4)."""

from __future__ import annotations

from typing import Any

from twisted.application.service import Service

from mediatord.config import Config
from mediatord.service import Listener, OrderedService, refuse_unavailable
from mediatord.store import check_store
from mediatord.wiring.base import Base, build_base, load_identity
from mediatord.wiring.decentrl import build_decentrl
from mediatord.wiring.didcomm import DIDCommHalf, build_didcomm
from mediatord.wiring.life import Endings, Signs, StoreLife
from mediatord.wiring.site import build_site

__all__ = ["build", "build_site", "load_identity"]


def build(reactor: Any, config: Config) -> OrderedService:
    """
    The daemon as one service; nothing is opened or bound before it starts.

    :raise StartupError: keys, identity or log key cannot be used.
    """
    refuse_unavailable(config)
    base = build_base(reactor, config)
    didcomm = build_didcomm(base, config)
    site = build_site(base, didcomm, build_decentrl(base, config), config)
    root = OrderedService(reactor, patience=config.drain_timeout)
    signs = Signs(base)
    children: list[Service] = [
        base.events,
        StoreLife(base, lambda: check_store(config.storage.backend, config.storage.sqlite.path), signs.store_opened),
        didcomm.due,
        didcomm.housekeeping,
        Endings("outgoing requests", lambda: _stop_outgoing(base, didcomm)),
        base.connections,
        base.gate,
        *(Listener(endpoint, site, reactor) for endpoint in config.listen),
        signs,
    ]
    for child in children:
        child.setServiceParent(root)
    return root


async def _stop_outgoing(base: Base, half: DIDCommHalf) -> None:
    half.endpoints.stop()
    await base.outbound.close()
