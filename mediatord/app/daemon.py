"""Composition root: builds the daemon from its configuration. Only this package knows the whole configuration."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from twisted.application.service import Service
from twisted.internet.interfaces import IStreamClientEndpoint

from mediatord.app.admin_and_control import build_admin, build_control_socket
from mediatord.app.cluster import build_cluster_services
from mediatord.app.core_services import CoreServices
from mediatord.app.lifecycle import (
    AcceptDelay,
    LifecycleNotifier,
    OrderedService,
    ShutdownStep,
    StoreLockService,
    StoreOpener,
    check_setting_combinations,
)
from mediatord.app.metrics_collection import StartStopLedgerRecorder
from mediatord.app.protocol_services import DecentrlServices, DIDCommServices
from mediatord.app.public_site import build_site
from mediatord.app.push import list_push_services
from mediatord.app.supervision import bind_supervisor_callbacks, build_listeners, build_supervisor
from mediatord.cluster.leases import ExclusiveStoreLease, open_shared_store
from mediatord.cluster.membership import Membership
from mediatord.config.settings import Config
from mediatord.net.listeners import Listener
from mediatord.observability.systemd import notify_systemd
from mediatord.probe.cycle import ProbeCycle
from mediatord.probe.listener_endpoints import make_listener_endpoint
from mediatord.probe.readiness import ReadinessMonitor
from mediatord.store.interfaces.store import IStore
from mediatord.store.sqlite.database_file import check_store
from mediatord.workers.supervisor_connection import SupervisorConnection

# Seconds for which the store keeps what a probe cycle writes.
_PROBE_CLAIM_SECONDS = 60.0


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
    Build the daemon as one service; nothing is opened or bound before it starts.

    :param give_up: called with one line if the daemon cannot go on after the start.
    :param ready: called when the store is open and requests are served.
    :param worker: connection to the supervisor, in a worker.
    :param store: used instead of the configured one, to share it within one process.
    :raise StartupError: keys, identity or log key cannot be used.
    """
    if store is None:
        check_setting_combinations(config)
    locks = _build_store_lock(config, is_shared=worker is not None or store is not None)
    if config.workers > 1:
        return build_supervisor(reactor, config, give_up, ready, locks)

    core = CoreServices(reactor, config, worker=worker.spec if worker else None, store=store)
    didcomm, decentrl = DIDCommServices(core, config), DecentrlServices(core, config)
    status = LifecycleNotifier(core, worker.notify if worker else notify_systemd, ready)
    root = OrderedService(reactor, config.drain_timeout, core.events.rotate, status.reload)

    site = build_site(core, didcomm, decentrl, config, worker, lambda: readiness)
    listeners = build_listeners(reactor, config, site, worker)
    monitors, admin_listeners = build_admin(core, config, worker)
    for listener in (*listeners, *admin_listeners):
        core.reloader.add_listener(listener)
    readiness = build_readiness_monitor(core, config, listeners)
    accept_delay = AcceptDelay(reactor, listeners)
    ledger = StartStopLedgerRecorder(core)
    if worker:
        bind_supervisor_callbacks(worker, core)

    def serve() -> None:
        """The store is open, and this process may use it."""
        accept_delay.open()
        ledger.store_opened()
        status.store_opened()

    membership: Membership | None = None
    cluster_services: list[Service] = []
    if core.cluster is not None:
        membership = core.cluster.build_membership(give_up, serve)
        cluster_services = build_cluster_services(core, core.cluster, didcomm, decentrl, membership)

    children: list[Service] = [
        *locks,
        core.events,
        core.key_rotation,
        *monitors,
        *_build_store_services(core, config, membership, serve, give_up, is_worker=worker is not None),
        ledger,
        didcomm.due,
        didcomm.lag,
        didcomm.housekeeping,
        *([] if didcomm.v1 is None else [didcomm.v1.endpoints]),
        *list_push_services(core),
        ShutdownStep("outgoing requests", partial(_stop_outgoing_requests, core, didcomm)),
        *cluster_services,
        core.connections,
        core.gate,
        *listeners,
        *admin_listeners,
        *build_control_socket(core, config, worker),
        accept_delay,
        core.store_health,
        readiness,
        status,
    ]
    for child in children:
        child.setServiceParent(root)
    return root


def _build_store_lock(config: Config, *, is_shared: bool) -> list[Service]:
    """Build the lock on a SQLite database that no other worker or node uses."""
    if is_shared or config.storage.backend != "sqlite":
        return []
    return [StoreLockService(config.storage.sqlite.path)]


def _build_store_services(
    core: CoreServices,
    config: Config,
    membership: Membership | None,
    serve: Callable[[], None],
    give_up: Callable[[str], None],
    *,
    is_worker: bool,
) -> list[Service]:
    """
    Build what opens the store, and what keeps processes from it that must not share it.

    :param serve: called when the store is open and this process may use it.
    """
    # The supervisor has checked the store of its workers. A replacement worker starts even if the file has
    # disappeared, as the other workers may still have it open.
    backend = "" if is_worker else config.storage.backend
    check = partial(check_store, backend, config.storage.sqlite.path, config.log.directory)
    if membership is not None:
        open_shared = partial(open_shared_store, core.reactor, core.store, core.gate)
        return [StoreOpener(core, open_shared, check, membership.store_opened, give_up), membership]
    if config.storage.backend == "mongodb":
        lease = ExclusiveStoreLease(core.reactor, core.store, core.node, core.gate, core.node_health, give_up)
        return [StoreOpener(core, lease.open, check, serve, give_up), lease]
    return [StoreOpener(core, core.store.open, check, serve, give_up)]


async def _stop_outgoing_requests(core: CoreServices, didcomm: DIDCommServices) -> None:
    await didcomm.endpoints.stop()
    await core.outbound.close()


def build_readiness_monitor(core: CoreServices, config: Config, listeners: Sequence[Listener]) -> ReadinessMonitor:
    """
    Build the service that probes whether messages get through.

    :param listeners: each of them receives a probe message.
    """
    reactor, store = core.reactor, core.store
    host_name = urlsplit(config.public_url).hostname or ""

    def connect(listener: Listener) -> IStreamClientEndpoint | None:
        if listener.address is None:
            return None
        options = {"tls": listener.speaks_tls, "proxied": listener.is_proxied}
        return make_listener_endpoint(reactor, listener.address, host_name, **options)

    cycle = ProbeCycle(
        reactor,
        endpoints=lambda: [connect(listener) for listener in listeners],
        write=lambda: store.claim_nonce(secrets.token_bytes(32), reactor.seconds() + _PROBE_CLAIM_SECONDS),
        mediator=lambda: core.identity.now.did,
        identity=core.probe_credentials.identities.identity(config.node_name),
        token=core.probe_credentials.token,
    )
    return ReadinessMonitor(
        reactor,
        cycle,
        config.readiness.interval,
        core.recorder.metrics,
        is_open=lambda: core.gate.is_open,
        get_trouble=lambda: core.node_health.trouble,
        steady=core.monotonic,
    )
