"""Puts the rooms together: the only place that knows the whole configuration (contract section 4)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from twisted.application.service import Service
from twisted.internet.defer import Deferred

from mediatord.config import Config
from mediatord.interfaces import IStore
from mediatord.notify import notify
from mediatord.service import OrderedService, refuse_unavailable
from mediatord.store import check_store
from mediatord.wiring.admin import build_admin
from mediatord.wiring.alone import Alone, open_among
from mediatord.wiring.base import Base, build_base
from mediatord.wiring.decentrl import build_decentrl
from mediatord.wiring.didcomm import DIDCommHalf, build_didcomm
from mediatord.wiring.identities import load_identity
from mediatord.wiring.ledger import FirstAndLast
from mediatord.wiring.life import Doors, Endings, Signs, SoleUser, StoreLife
from mediatord.wiring.nodes import build_membership, build_node
from mediatord.wiring.readiness import build_readiness
from mediatord.wiring.site import build_site
from mediatord.wiring.workers import build_supervisor, listeners, put_to_work
from mediatord.workers import Worker

__all__ = ["build", "build_site", "load_identity"]


def build(
    reactor: Any,
    config: Config,
    *,
    give_up: Callable[[str], None],
    ready: Callable[[], None] = lambda: None,
    worker: Worker | None = None,
    store: IStore | None = None,
) -> OrderedService:
    """
    The daemon as one service; nothing is opened or bound before it starts.

    :param give_up: told in one line why there is no point in going on, should that turn out after the start.
    :param ready: told once the store is open and requests are served.
    :param worker: what makes it one of several processes.
    :param store: instead of the one that the configuration names, to share it within one process.
    :raise StartupError: keys, identity or log key cannot be used.
    """
    if store is None:
        refuse_unavailable(config)
    if config.workers > 1:
        return build_supervisor(reactor, config, give_up, ready, _sole_users(config, shared=False))
    # The file of the store is made before the daemon comes up, if there is to be a new one.
    base = build_base(reactor, config, worker=worker.place if worker else None, store=store, create=False)
    didcomm, decentrl = build_didcomm(base, config), build_decentrl(base, config)
    site = build_site(base, didcomm, decentrl, config, worker, lambda: readiness)
    signs = Signs(base, worker.tell if worker else notify, ready)
    root = OrderedService(reactor, config.drain_timeout, base.events.rotate, signs.reload)
    listening = listeners(reactor, config, site, worker)
    watches, admin = build_admin(base, config, worker)
    for one in (*listening, *admin):
        base.reloading.watch(one)
    readiness = build_readiness(base, config, listening)
    # The operator may look at once.
    ledger = FirstAndLast(base, signs.store_opened)
    doors = Doors(reactor, listening, ledger.store_opened)
    if worker:
        put_to_work(worker, base)
    opened: Callable[[], None] = doors.open
    membership: list[Service] = []
    node: list[Service] = []
    if base.cluster is not None:
        member = build_membership(base, base.cluster, give_up, doors.open)
        opened, membership = member.store_opened, [member]
        node = build_node(base, base.cluster, didcomm, decentrl, member)
    children: list[Service] = [
        *_sole_users(config, shared=worker is not None or store is not None),
        base.events,
        base.epochs,
        *watches,
        *_store_services(base, config, opened, give_up, checked=worker is not None),
        *membership,
        ledger,
        didcomm.due,
        didcomm.lag,
        didcomm.housekeeping,
        Endings("outgoing requests", lambda: _stop_outgoing(base, didcomm)),
        *node,
        base.connections,
        base.gate,
        *listening,
        *admin,
        doors,
        readiness,
        signs,
    ]
    for child in children:
        child.setServiceParent(root)
    return root


def _sole_users(config: Config, *, shared: bool) -> list[Service]:
    """What keeps the database to this process, if it is a file and nobody else was given it as well."""
    return [] if shared or config.storage.backend != "sqlite" else [SoleUser(config.storage.sqlite.path)]


def _store_services(
    base: Base, config: Config, opened: Callable[[], None], give_up: Callable[[str], None], *, checked: bool
) -> list[Service]:
    """
    What opens and closes the store, and keeps those away with whom it cannot be shared.

    :param checked: whether the supervisor has looked at it. What has become of it since then keeps no worker from
        coming up: the others may still have open what is gone.
    """
    backend, path = config.storage.backend, config.storage.sqlite.path
    open_store: Callable[[], Deferred[None]] = base.store.open
    beside: list[Service] = []
    if base.cluster is not None:
        open_store = partial(open_among, base.reactor, base.store, base.gate)
    elif backend == "mongodb":
        alone = Alone(base.reactor, base.store, base.node, base.gate, base.standing, give_up)
        open_store, beside = alone.open, [alone]
    check: Callable[[], None] = partial(check_store, "" if checked else backend, path, config.log.directory)
    return [StoreLife(base, open_store, check, opened, give_up), *beside]


async def _stop_outgoing(base: Base, half: DIDCommHalf) -> None:
    await half.endpoints.stop()
    await base.outbound.close()
