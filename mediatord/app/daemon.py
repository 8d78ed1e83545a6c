"""
The daemon as a wallet of its own: who it is, and which ways lead to its listeners.

Puts the rooms together: the only place that knows the whole configuration (contract section 4).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from twisted.application.service import Service
from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IStreamClientEndpoint

from mediatord.app.cluster_services import build_cluster_services, build_membership
from mediatord.app.core_services import CoreServices, build_core_services
from mediatord.app.decentrl import build_decentrl
from mediatord.app.didcomm import DIDCommServices, build_didcomm
from mediatord.app.http_sites import build_admin, build_control_socket, build_site
from mediatord.app.lifecycle import (
    AcceptDelay,
    OrderedService,
    ShutdownStep,
    StatusNotifier,
    StoreLockService,
    StoreOpener,
    check_setting_combinations,
)
from mediatord.app.metrics_collection import StartStopLedgerRecorder
from mediatord.app.workers import bind_supervisor_callbacks, build_listeners, build_supervisor
from mediatord.cluster.leases import ExclusiveStoreLease, open_shared_store
from mediatord.config.settings import Config
from mediatord.net.listeners import Listener
from mediatord.observability.systemd import notify_systemd
from mediatord.probe.cycle import ListenerAddress, ProbeContext, ProbeCycle, make_listener_endpoint
from mediatord.probe.readiness import ReadinessContext, ReadinessMonitor
from mediatord.store.interfaces.store import IStore
from mediatord.store.sqlite.database_file import check_store
from mediatord.workers.supervisor_connection import SupervisorConnection

# Seconds that the store keeps what it is asked to keep once in each cycle.
_PROBE_CLAIM_SECONDS = 60.0


def build_probe(base: CoreServices, config: Config, doors: Sequence[Listener]) -> ReadinessMonitor:
    """
    What finds out whether messages get through.

    :param doors: the listeners, each of which a message is to come in by.
    """
    reactor, store = base.reactor, base.store
    name = urlsplit(config.public_url).hostname or ""

    def endpoints() -> list[IStreamClientEndpoint | None]:
        return [_build_connector(reactor, door, name) for door in doors]

    context = ProbeContext(
        reactor=reactor,
        endpoints=endpoints,
        write=lambda: store.claim_nonce(secrets.token_bytes(32), reactor.seconds() + _PROBE_CLAIM_SECONDS),
        mediator=lambda: base.identity.did,
        identity=base.own.identities.identity(config.node_name),
        token=base.own.token,
    )
    around = ReadinessContext(
        is_open=lambda: base.gate.is_open,
        trouble=lambda: base.node_health.trouble,
        steady=base.steady,
        metrics=base.recorder.metrics,
    )
    return ReadinessMonitor(reactor, ProbeCycle(context), around, config.readiness.interval)


def _build_connector(reactor: Any, door: Listener, name: str) -> IStreamClientEndpoint | None:
    address = door.address
    return (
        None
        if address is None
        else make_listener_endpoint(reactor, ListenerAddress(address, door.speaks_tls, door.is_proxied), name)
    )


def build_daemon(
    reactor: Any,
    config: Config,
    *,
    give_up: Callable[[str], None],
    ready: Callable[[], None] = lambda: None,
    worker: SupervisorConnection | None = None,
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
        check_setting_combinations(config)
    if config.workers > 1:
        return build_supervisor(reactor, config, give_up, ready, _build_store_lock(config, shared=False))
    # The file of the store is made before the daemon comes up, if there is to be a new one.
    base = build_core_services(reactor, config, worker=worker.place if worker else None, store=store, create=False)
    didcomm, decentrl = build_didcomm(base, config), build_decentrl(base, config)
    site = build_site(base, didcomm, decentrl, config, worker, lambda: readiness)
    signs = StatusNotifier(base, worker.tell if worker else notify_systemd, ready)
    root = OrderedService(reactor, config.drain_timeout, base.events.rotate, signs.reload)
    listening = build_listeners(reactor, config, site, worker)
    watches, admin = build_admin(base, config, worker)
    for one in (*listening, *admin):
        base.reloading.watch(one)
    readiness = build_probe(base, config, listening)
    # The operator may look at once.
    ledger = StartStopLedgerRecorder(base, signs.store_opened)
    doors = AcceptDelay(reactor, listening, ledger.store_opened)
    if worker:
        bind_supervisor_callbacks(worker, base)
    opened: Callable[[], None] = doors.open
    membership: list[Service] = []
    node: list[Service] = []
    if base.cluster is not None:
        member = build_membership(base, base.cluster, give_up, doors.open)
        opened, membership = member.store_opened, [member]
        node = build_cluster_services(base, base.cluster, didcomm, decentrl, member)
    children: list[Service] = [
        *_build_store_lock(config, shared=worker is not None or store is not None),
        base.events,
        base.epochs,
        *watches,
        *_build_store_services(base, config, opened, give_up, checked=worker is not None),
        *membership,
        ledger,
        didcomm.due,
        didcomm.lag,
        didcomm.housekeeping,
        ShutdownStep("outgoing requests", lambda: _stop_outgoing_requests(base, didcomm)),
        *node,
        base.connections,
        base.gate,
        *listening,
        *admin,
        *build_control_socket(base, config, worker),
        doors,
        readiness,
        signs,
    ]
    for child in children:
        child.setServiceParent(root)
    return root


def _build_store_lock(config: Config, *, shared: bool) -> list[Service]:
    """What keeps the database to this process, if it is a file and nobody else was given it as well."""
    return [] if shared or config.storage.backend != "sqlite" else [StoreLockService(config.storage.sqlite.path)]


def _build_store_services(
    base: CoreServices, config: Config, opened: Callable[[], None], give_up: Callable[[str], None], *, checked: bool
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
        open_store = partial(open_shared_store, base.reactor, base.store, base.gate)
    elif backend == "mongodb":
        alone = ExclusiveStoreLease(base.reactor, base.store, base.node, base.gate, base.node_health, give_up)
        open_store, beside = alone.open, [alone]
    check: Callable[[], None] = partial(check_store, "" if checked else backend, path, config.log.directory)
    return [StoreOpener(base, open_store, check, opened, give_up), *beside]


async def _stop_outgoing_requests(base: CoreServices, half: DIDCommServices) -> None:
    await half.endpoints.stop()
    await base.outbound.close()
