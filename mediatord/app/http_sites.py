"""
What the listeners serve.

The status page for operators.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from autobahn.twisted.resource import WebSocketResource
from twisted.application.service import Service
from twisted.internet.task import LoopingCall
from twisted.logger import Logger, globalLogPublisher

from mediatord import __version__
from mediatord.admin.site import AdminAuthenticator, AdminContext, AdminSite, AdminToken, read_admin_token
from mediatord.admin.status import StatusCollector, StatusSources
from mediatord.admin.status_sources import SLOT_SECONDS, RecentProblems, ReportDirectory, TrafficHistory
from mediatord.app.core_services import CoreServices
from mediatord.app.decentrl import DecentrlServices
from mediatord.app.didcomm import DIDCommServices
from mediatord.app.metrics_collection import StoreMetricsRefresher, register_http_buffers
from mediatord.clock import request_scope
from mediatord.cluster.node_health import StoreHealthCheck
from mediatord.config.settings import Config
from mediatord.control.operations import ControlOperations
from mediatord.control.server import ControlListener, ControlSocket
from mediatord.decentrl.context import DecentrlReply
from mediatord.didcomm.messages import DIDCommReply, MessageOrigin
from mediatord.errors import MediatorError, ShutdownInProgress, StartupError, StoreUnavailable
from mediatord.http.client_address import AllowedOrigins, ClientAddressResolver
from mediatord.http.flow_control import RoundRobinScheduler
from mediatord.http.memory_reclaimer import MemoryReclaimer
from mediatord.http.resources import HTTPContext, StaticDocuments, report_no_probe
from mediatord.http.site import MediatorSite
from mediatord.http.websocket import MediatorSocketFactory, SocketContext
from mediatord.net.listeners import Listener
from mediatord.observability.event_recorder import ProtocolName
from mediatord.observability.systemd import STATUS_SERVING, STATUS_WAITING_FOR_STORE
from mediatord.private_file import PrivateFileError
from mediatord.probe.readiness import ReadinessMonitor
from mediatord.store.interfaces.messages import QueueBacklog
from mediatord.workers.shared_listeners import InheritedSocketReactor
from mediatord.workers.supervisor_connection import SupervisorConnection


class _ProtocolGateway:
    """Both protocols behind the request gate: what comes while the daemon is stopping is recorded and refused."""

    def __init__(self, base: CoreServices, didcomm: DIDCommServices, decentrl: DecentrlServices) -> None:
        self._gate = base.gate
        self._clock = base.reactor
        self._recorder = base.recorder
        self._didcomm = didcomm.mediator
        self._decentrl = decentrl.mediator

    async def receive(self, raw: bytes, origin: MessageOrigin) -> DIDCommReply:
        """One DIDComm message."""
        if not self._gate.enter():
            await self._wait("didcomm", origin.peer, len(raw))
        try:
            with request_scope(self._clock):
                return await self._didcomm.receive(raw, origin)
        finally:
            self._gate.leave()

    async def command(self, raw: bytes, peer: str) -> DecentrlReply:
        """One Decentrl command."""
        if not self._gate.enter():
            await self._wait("decentrl", peer, len(raw))
        try:
            with request_scope(self._clock):
                return await self._decentrl.receive(raw, peer)
        finally:
            self._gate.leave()

    async def public(self, did: str, arguments: Mapping[bytes, Sequence[bytes]], peer: str) -> DecentrlReply:
        """A page of a public channel."""
        if not self._gate.enter():
            await self._wait("decentrl", peer, 0)
        try:
            with request_scope(self._clock):
                return await self._decentrl.public(did, arguments, peer)
        finally:
            self._gate.leave()

    def record_early_rejection(self, half: ProtocolName, peer: str, error: MediatorError) -> None:
        """A request was refused unread."""
        self._recorder.record_early_rejection(half, peer, 0, error)

    async def _wait(self, half: ProtocolName, peer: str, size: int) -> None:
        """
        Wait until the gate is open, and enter.

        :raise ShutdownInProgress: the daemon is stopping.
        """
        try:
            await self._gate.wait()
        except ShutdownInProgress as error:
            self._recorder.record_early_rejection(half, peer, size, error)
            raise


def build_site(
    base: CoreServices,
    didcomm: DIDCommServices,
    decentrl: DecentrlServices,
    config: Config,
    worker: SupervisorConnection | None = None,
    readiness: Callable[[], ReadinessMonitor] | None = None,
) -> MediatorSite:
    """
    One site for both halves.

    :param readiness: what answers `/ready`, once the site is served.
    """
    gateway = _ProtocolGateway(base, didcomm, decentrl)
    peers = ClientAddressResolver(config.trusted_proxies, base.own.token, config.limits.trusted_peers)
    largest = config.limits.max_message_bytes
    memory = MemoryReclaimer(base.reactor)
    scheduler = RoundRobinScheduler(base.reactor)
    sockets = SocketContext(
        receive=gateway.receive,
        converse=decentrl.converse,
        connections=base.connections,
        recorder=base.recorder,
        peers=peers,
        clock=base.reactor,
        memory=memory,
        scheduler=scheduler,
        admits=base.admission.charge_request,
    )
    origins = AllowedOrigins(config.websocket_origins)
    pages = StaticDocuments(base.identity.did, base.identity.web_document, config.public_url)
    factory = MediatorSocketFactory(base.reactor, sockets, largest)
    front = HTTPContext(
        clock=base.reactor,
        receive=gateway.receive,
        command=gateway.command,
        public=gateway.public,
        ping_store=_build_store_ping(base, config),
        store_trouble=lambda: base.store.trouble,
        trouble=lambda: base.node_health.trouble,
        statistics=StoreMetricsRefresher(base),
        figures=worker.page if worker else lambda: _render_metrics(base),
        pages=pages,
        metrics=base.recorder.metrics,
        peers=peers,
        connections=base.connections,
        sockets=WebSocketResource(factory),
        record_early_rejection=gateway.record_early_rejection,
        origins=origins,
        memory=memory,
        scheduler=scheduler,
        admits=base.admission.charge_request,
        metrics_allow=lambda: base.reloading.config.metrics.allow,
        ready=(lambda: readiness().ask()) if readiness else report_no_probe,
        forward_fast_path=didcomm.forward_fast_path.take,
    )
    factory.limit(largest, config.limits.max_outbox_bytes)
    site = MediatorSite(front, largest, *_get_connection_limits(config))
    site.unread.limit(config.limits.max_unread_bytes)

    def follow(new: Config) -> None:
        peers.set_peer_networks(new.limits.trusted_peers)
        origins.allow(new.websocket_origins)
        site.limit(new.limits.max_message_bytes, *_get_connection_limits(new))
        factory.limit(new.limits.max_message_bytes, new.limits.max_outbox_bytes)
        site.unread.limit(new.limits.max_unread_bytes)
        pages.show(base.identity.did, base.identity.web_document)

    base.reloading.follow(follow)
    register_http_buffers(base, factory, site)
    return site


def _get_connection_limits(config: Config) -> tuple[int, int]:
    """How many one address may have that are no sockets, and one of a trusted peer."""
    return 4 * config.limits.max_connections_per_ip, 4 * config.limits.trusted_connections


def _build_store_ping(base: CoreServices, config: Config) -> Callable[[], Awaitable[None]]:
    """What asks the store. A server is asked each time; of a disk it is known that it answers later than it could."""

    async def ask() -> None:
        await _ping_store(base)

    if config.storage.backend != "sqlite":
        return ask
    return StoreHealthCheck(ask, base.steady, lambda: base.recorder.metrics.get_rejection_count("store_unavailable"))


async def _ping_store(base: CoreServices) -> None:
    try:
        await base.gate.run_request(base.store.ping)
    except StoreUnavailable:
        base.recorder.metrics.set_storage_up(False)
        raise
    base.recorder.metrics.set_storage_up(True)


async def _render_metrics(base: CoreServices) -> bytes:
    return base.recorder.metrics.render()


_log = Logger()

_STATE_STOPPING = "stopping"


class ProcessMonitor(Service):
    """Notes what this process does and what goes wrong in it, from its start on."""

    name = "watch"

    def __init__(self, base: CoreServices, node: str) -> None:
        self._base = base
        self._node = node
        self._began = base.steady()
        self._troubles = RecentProblems(base.reactor)
        self._traffic = TrafficHistory(base.reactor, base.recorder.metrics.collect_totals)
        self._samples = LoopingCall(self._traffic.sample)
        self._samples.clock = base.reactor

    def startService(self) -> None:
        """Begin to look."""
        super().startService()
        self._base.recorder.on_rejection = self._troubles.refused
        globalLogPublisher.addObserver(self._troubles)
        self._samples.start(SLOT_SECONDS, now=False)

    def stopService(self) -> None:
        """Look no more."""
        super().stopService()
        if self._samples.running:
            self._samples.stop()
        globalLogPublisher.removeObserver(self._troubles)

    def told(self) -> Mapping[str, Any]:
        """What this process knows, as values of JSON; see :class:`~mediatord.admin.status.ProcessStatus`."""
        state = self._state()
        return {
            "node": self._node,
            "pid": os.getpid(),
            "state": state,
            "well": state == STATUS_SERVING,
            "uptime": self._base.steady() - self._began,
            "sockets": len(self._base.connections),
            "slots": self._traffic.slots(),
            "totals": self._traffic.totals(),
            "troubles": self._troubles.told(),
        }

    def _state(self) -> str:
        base = self._base
        if not base.gate.is_open:
            return _STATE_STOPPING
        if not base.recorder.metrics.storage_is_up:
            return STATUS_WAITING_FOR_STORE
        return base.node_health.trouble or STATUS_SERVING


class SupervisorMonitor(Service):
    """Notes what goes wrong in the process that keeps the workers."""

    name = "watch"

    def __init__(self, reactor: Any, node: str) -> None:
        self._node = node
        self._troubles = RecentProblems(reactor)

    def startService(self) -> None:
        """Begin to look."""
        super().startService()
        globalLogPublisher.addObserver(self._troubles)

    def stopService(self) -> None:
        """Look no more."""
        super().stopService()
        globalLogPublisher.removeObserver(self._troubles)

    def told(self) -> Mapping[str, Any]:
        """The name of the daemon and the troubles of this process, as values of JSON."""
        return {"node": self._node, "troubles": self._troubles.told()}


def load_admin_token(config: Config) -> AdminToken | None:
    """
    What the page wants to be shown; None where there is no page.

    :raise StartupError: the token cannot be used.
    """
    if config.admin.listen is None or config.admin.token_file is None:
        return None
    try:
        return read_admin_token(config.admin.token_file)
    except PrivateFileError as error:
        raise StartupError(f"admin.token_file: {error}") from None


def list_listen_endpoints(config: Config) -> list[str]:
    """All that the daemon listens on for clients, the page last."""
    return [*config.listen, *([config.admin.listen] if config.admin.listen else [])]


def build_admin(
    base: CoreServices, config: Config, worker: SupervisorConnection | None = None
) -> tuple[list[Service], list[Listener]]:
    """
    What watches, and the listener of the page; nothing of both unless the configuration has one.

    :raise StartupError: token or certificate cannot be used.
    """
    token = load_admin_token(config)
    if token is None or config.admin.listen is None:
        return [], []
    watch = ProcessMonitor(base, config.node_name)
    if worker is not None:
        worker.report_state = watch.told
    site = build_admin_site(base, config, token, watch, worker)
    reactor = (
        base.reactor
        if worker is None
        else InheritedSocketReactor(base.reactor, worker.place.sockets[len(config.listen)])
    )
    return [watch], [Listener(config.admin.listen, site, reactor)]


def build_control_socket(
    base: CoreServices, config: Config, worker: SupervisorConnection | None = None
) -> list[Service]:
    """The control socket, unless the configuration has none."""
    if config.control_socket is None:
        return []

    def is_log_writable() -> bool:
        base.events.flush()
        return base.events.pending == 0

    operations = ControlOperations(base.store, base.recorder, is_log_writable)

    async def run(operation: str, arguments: Mapping[str, Any]) -> Any:
        return await base.gate.run_request(lambda: operations.run(operation, arguments))

    if worker is None:
        return [ControlSocket(base.reactor, run, ControlListener(config.control_socket))]
    inherited = worker.place.sockets[len(list_listen_endpoints(config))]
    return [ControlSocket(base.reactor, run, inherited=inherited.descriptor)]


def build_admin_site(
    base: CoreServices,
    config: Config,
    token: AdminToken,
    watch: ProcessMonitor,
    worker: SupervisorConnection | None = None,
) -> AdminSite:
    """What the listener of the page serves."""

    async def figures() -> bytes:
        return base.recorder.metrics.render()

    async def alone() -> tuple[int, Sequence[Mapping[str, Any]]]:
        return 1, [watch.told()]

    async def backlog(bounds: Sequence[float], top: int) -> QueueBacklog:
        return await base.gate.run_request(lambda: base.store.read_backlog(bounds, top))

    reports = None if config.admin.reports is None else ReportDirectory(config.admin.reports)
    sources = StatusSources(
        version=__version__,
        node=config.node_name,
        backend=config.storage.backend,
        clustered=config.cluster.listen is not None,
        processes=worker.states if worker else alone,
        here=watch.told,
        figures=worker.page if worker else figures,
        backlog=backlog,
        tag=base.recorder.tag,
        reports=reports,
        is_own=base.own.identities.is_probe_did,
    )
    clock = base.reactor
    door = AdminAuthenticator(clock, token)
    base.reloading.add_renewal(lambda: _reload_token(door, config))
    return AdminSite(
        AdminContext(
            clock, door, ClientAddressResolver(config.trusted_proxies), StatusCollector(clock, sources), reports
        )
    )


def _reload_token(door: AdminAuthenticator, config: Config) -> bool:
    """Go by the token that the file has now; by the one before if it has none that can be used, which is False."""
    try:
        token = load_admin_token(config)
    except StartupError as error:
        _log.warn("the token of the status page stays as it was: {why}", why=str(error))
        return False
    if token is not None:
        door.use(token)
    return True
