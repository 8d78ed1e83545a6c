"""Builds the HTTP sites: the public one of both protocols, and the status page for operators."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from twisted.application.service import Service
from twisted.internet.task import LoopingCall
from twisted.logger import Logger, globalLogPublisher

from mediatord import __version__
from mediatord.admin.site import AdminAuthenticator, AdminContext, AdminSite, AdminToken, read_admin_token
from mediatord.admin.status import StatusCollector, StatusSources
from mediatord.admin.status_sources import SLOT_SECONDS, RecentProblems, ReportDirectory, TrafficHistory
from mediatord.app.core_services import CoreServices
from mediatord.app.metrics_collection import StoreMetricsRefresher
from mediatord.app.protocol_services import DecentrlServices, DIDCommServices
from mediatord.cluster.membership import StoreHealthCheck
from mediatord.config.settings import Config
from mediatord.control.queue_and_account_operations import ControlOperations
from mediatord.control.server import ControlListener, ControlSocket
from mediatord.errors import MediatorError, StartupError, StoreUnavailable
from mediatord.http.client_address import AllowedOrigins, ClientAddressResolver
from mediatord.http.flow_control import MemoryReclaimer, RoundRobinScheduler
from mediatord.http.resources import HTTPContext, StaticDocuments, report_no_probe
from mediatord.http.site import MediatorSite
from mediatord.net.listeners import Listener
from mediatord.observability.event_recorder import EventRecorder, ProtocolName
from mediatord.observability.systemd import STATUS_SERVING, STATUS_WAITING_FOR_STORE
from mediatord.probe.readiness import ReadinessMonitor
from mediatord.secret_files import SecretFileError
from mediatord.store.interfaces.messages import QueueBacklog
from mediatord.workers.shared_listeners import InheritedSocketReactor
from mediatord.workers.supervisor_connection import SupervisorConnection


def build_site(
    core: CoreServices,
    didcomm: DIDCommServices,
    decentrl: DecentrlServices,
    config: Config,
    worker: SupervisorConnection | None = None,
    readiness: Callable[[], ReadinessMonitor] | None = None,
) -> MediatorSite:
    """
    Build the site of both protocols.

    :param readiness: gives what answers `/ready`, once the site is served.
    """
    recorder = core.recorder

    def record_early_rejection(protocol: ProtocolName, peer: str, error: MediatorError) -> None:
        recorder.record_early_rejection(protocol, peer, 0, error)

    async def render_metrics() -> bytes:
        return recorder.metrics.render()

    limits = config.limits
    addresses = ClientAddressResolver(config.trusted_proxies, core.probe_credentials.token, limits.trusted_peers)
    origins = AllowedOrigins(config.websocket_origins)
    documents = StaticDocuments(core.identity.now.did, core.identity.now.web_document, config.public_url)
    context = HTTPContext(
        clock=core.reactor,
        receive=didcomm.dispatcher.receive,
        command=decentrl.dispatcher.receive,
        public=decentrl.dispatcher.public,
        ping_store=_build_store_ping(core, config),
        find_store_problem=lambda: core.store.fault_description,
        find_node_problem=lambda: core.node_health.trouble,
        refresh_store_metrics=StoreMetricsRefresher(core),
        render_metrics=worker.fetch_metrics if worker else render_metrics,
        documents=documents,
        recorder=recorder,
        client_addresses=addresses,
        connections=core.connections,
        open_decentrl_socket=decentrl.open_socket,
        record_early_rejection=record_early_rejection,
        origins=origins,
        memory=MemoryReclaimer(core.reactor),
        scheduler=RoundRobinScheduler(core.reactor),
        admits=core.rate_limiter.charge_request,
        metrics_allow=lambda: core.reloader.config.metrics.allow,
        check_readiness=(lambda: readiness().ask()) if readiness else report_no_probe,
        forward_fast_path=didcomm.forward_fast_path.take,
    )
    site = MediatorSite(context, *_get_site_limits(config))
    site.unread.limit(limits.max_unread_bytes)

    def follow(new: Config) -> None:
        addresses.set_peer_networks(new.limits.trusted_peers)
        origins.allow(new.websocket_origins)
        site.limit(*_get_site_limits(new))
        site.unread.limit(new.limits.max_unread_bytes)
        documents.set_identity(core.identity.now.did, core.identity.now.web_document)

    core.reloader.follow(follow)
    recorder.metrics.register_buffer("socket_outboxes", site.socket_factory.unsent)
    recorder.metrics.register_buffer("socket_inboxes", site.socket_factory.unserved)
    recorder.metrics.register_buffer("http_requests", site.read_ahead)
    recorder.metrics.register_buffer("http_answers", lambda: site.unread.held)
    return site


def _get_site_limits(config: Config) -> tuple[int, int, int, int]:
    """Bytes of a message, HTTP connections of one address and of a trusted peer, bytes queued for a socket."""
    limits = config.limits
    connections = 4 * limits.max_connections_per_ip, 4 * limits.trusted_connections
    return limits.max_message_bytes, *connections, limits.max_outbox_bytes


def _build_store_ping(core: CoreServices, config: Config) -> Callable[[], Awaitable[None]]:
    """The check of the store for `/health`. A server is asked each time; SQLite may be slow as long as it works."""
    metrics = core.recorder.metrics

    async def ping() -> None:
        try:
            await core.gate.run_request(core.store.ping)
        except StoreUnavailable:
            metrics.set_storage_up(False)
            raise
        metrics.set_storage_up(True)

    if config.storage.backend != "sqlite":
        return ping
    return StoreHealthCheck(ping, core.monotonic, lambda: metrics.rejected.get("store_unavailable"))


_log = Logger()

_STATE_STOPPING = "stopping"


class SupervisorMonitor(Service):
    """Collects recent problems of the supervisor for the status page."""

    name = "process monitor"

    def __init__(self, reactor: Any, node: str) -> None:
        self._node = node
        self._problems = RecentProblems(reactor)

    def startService(self) -> None:
        """Start collecting."""
        super().startService()
        globalLogPublisher.addObserver(self._problems)

    def stopService(self) -> None:
        """Stop collecting."""
        super().stopService()
        globalLogPublisher.removeObserver(self._problems)

    def report(self) -> Mapping[str, Any]:
        """The name of the daemon and the problems of this process, as JSON values."""
        return {"node": self._node, "problems": self._problems.list_problems()}


class ProcessMonitor(SupervisorMonitor):
    """Collects traffic and recent problems of a process that serves clients, for the status page."""

    def __init__(self, core: CoreServices, node: str) -> None:
        super().__init__(core.reactor, node)
        self._core = core
        self._began = core.monotonic()
        self._traffic = TrafficHistory(core.reactor, core.recorder.metrics.collect_totals)
        self._samples = LoopingCall(self._traffic.sample)
        self._samples.clock = core.reactor

    def startService(self) -> None:
        """Start collecting."""
        super().startService()
        self._core.recorder.on_rejection = self._problems.refused
        self._samples.start(SLOT_SECONDS, now=False)

    def stopService(self) -> None:
        """Stop collecting."""
        super().stopService()
        if self._samples.running:
            self._samples.stop()

    def report(self) -> Mapping[str, Any]:
        """The state of this process as JSON values; see :class:`~mediatord.admin.status.ProcessStatus`."""
        core = self._core
        if not core.gate.is_open:
            state = _STATE_STOPPING
        elif not core.recorder.metrics.storage_is_up:
            state = STATUS_WAITING_FOR_STORE
        else:
            state = core.node_health.trouble or STATUS_SERVING
        return {
            **super().report(),
            "pid": os.getpid(),
            "state": state,
            "well": state == STATUS_SERVING,
            "uptime": core.monotonic() - self._began,
            "sockets": len(core.connections),
            "slots": self._traffic.slots(),
            "totals": self._traffic.totals(),
        }


def load_admin_token(config: Config) -> AdminToken | None:
    """
    The token of the status page; None if there is no page.

    :raise StartupError: the token cannot be used.
    """
    if config.admin.listen is None or config.admin.token_file is None:
        return None
    try:
        return read_admin_token(config.admin.token_file)
    except SecretFileError as error:
        raise StartupError(f"admin.token_file: {error}") from None


def list_listen_endpoints(config: Config) -> list[str]:
    """Endpoint strings of all listeners for clients, that of the status page last."""
    return [*config.listen, *([config.admin.listen] if config.admin.listen else [])]


def build_admin(
    core: CoreServices, config: Config, worker: SupervisorConnection | None = None
) -> tuple[list[Service], list[Listener]]:
    """
    Build the monitor and the listener of the status page; empty lists if there is no page.

    :raise StartupError: token or certificate cannot be used.
    """
    token = load_admin_token(config)
    if token is None or config.admin.listen is None:
        return [], []
    monitor = ProcessMonitor(core, config.node_name)
    reactor = core.reactor
    if worker is not None:
        worker.handlers["state"] = lambda _: monitor.report()
        reactor = InheritedSocketReactor(core.reactor, worker.spec.sockets[len(config.listen)])
    site = build_admin_site(core, config, token, monitor, worker)
    return [monitor], [Listener(config.admin.listen, site, reactor)]


def build_control_socket(
    core: CoreServices, config: Config, worker: SupervisorConnection | None = None
) -> list[Service]:
    """Build the control socket, if the configuration has one."""
    if config.control_socket is None:
        return []

    def open_recorder() -> EventRecorder | None:
        core.events.flush()
        return None if core.events.pending else core.recorder

    operations = ControlOperations(core.store, open_recorder)

    async def run(operation: str, arguments: Mapping[str, Any]) -> Any:
        return await core.gate.run_request(lambda: operations.run(operation, arguments))

    if worker is None:
        return [ControlSocket(core.reactor, run, ControlListener(config.control_socket))]
    # None if the supervisor could not bind it.
    inherited = worker.spec.sockets[len(list_listen_endpoints(config)) :]
    return [ControlSocket(core.reactor, run, inherited=one) for one in inherited]


def build_admin_site(
    core: CoreServices,
    config: Config,
    token: AdminToken,
    monitor: ProcessMonitor,
    worker: SupervisorConnection | None = None,
) -> AdminSite:
    """Build the site of the status page."""

    async def render_metrics() -> bytes:
        return core.recorder.metrics.render()

    async def report_process() -> tuple[int, Sequence[Mapping[str, Any]]]:
        return 1, [monitor.report()]

    async def backlog(bounds: Sequence[float], top: int) -> QueueBacklog:
        return await core.gate.run_request(lambda: core.store.read_backlog(bounds, top))

    reports = None if config.admin.reports is None else ReportDirectory(config.admin.reports)
    sources = StatusSources(
        version=__version__,
        node=config.node_name,
        backend=config.storage.backend,
        clustered=config.cluster.listen is not None,
        processes=worker.fetch_states if worker else report_process,
        here=monitor.report,
        figures=worker.fetch_metrics if worker else render_metrics,
        backlog=backlog,
        tag=core.recorder.pseudonymize,
        reports=reports,
        is_own=core.probe_credentials.identities.is_probe_did,
    )
    clock = core.reactor
    authenticator = AdminAuthenticator(clock, token)

    def reload_token() -> bool:
        """Read the token file again; False if the token in use stays because the file cannot be used."""
        try:
            new = load_admin_token(config)
        except StartupError as error:
            _log.warn("the token of the status page stays as it was: {why}", why=str(error))
            return False
        if new is not None:
            authenticator.use(new)
        return True

    core.reloader.add_renewal(reload_token)
    return AdminSite(
        AdminContext(
            clock,
            authenticator,
            ClientAddressResolver(config.trusted_proxies),
            StatusCollector(clock, sources),
            reports,
        )
    )
