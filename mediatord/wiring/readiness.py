"""The daemon as a wallet of its own: who it is, and which ways lead to its listeners."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from twisted.internet.interfaces import IStreamClientEndpoint

from mediatord.config import Config
from mediatord.readiness import Cycle, Place, Readiness, Rooms, Surroundings, way_to
from mediatord.service import Listener
from mediatord.wiring.base import Base

# Seconds that the store keeps what it is asked to keep once in each cycle.
_KEPT = 60.0


def build_readiness(base: Base, config: Config, doors: Sequence[Listener]) -> Readiness:
    """
    What finds out whether messages get through.

    :param doors: the listeners, each of which a message is to come in by.
    """
    reactor, store = base.reactor, base.store
    name = urlsplit(config.public_url).hostname or ""

    def ways() -> list[IStreamClientEndpoint | None]:
        return [_way(reactor, door, name) for door in doors]

    rooms = Rooms(
        reactor=reactor,
        ways=ways,
        write=lambda: store.claim(secrets.token_bytes(32), reactor.seconds() + _KEPT),
        mediator=lambda: base.identity.did,
        identity=base.own.kin.identity(config.node_name),
        token=base.own.token,
    )
    around = Surroundings(
        is_open=lambda: base.gate.is_open,
        trouble=lambda: base.standing.trouble,
        steady=base.steady,
        metrics=base.journal.metrics,
    )
    return Readiness(reactor, Cycle(rooms), around, config.readiness.interval)


def _way(reactor: Any, door: Listener, name: str) -> IStreamClientEndpoint | None:
    address = door.address
    return None if address is None else way_to(reactor, Place(address, door.speaks_tls, door.is_proxied), name)
