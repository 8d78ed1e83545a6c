"""Builds what operators use: the status page with its process monitors, and the control socket."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from twisted.application.service import Service
from twisted.internet.task import LoopingCall
from twisted.logger import Logger, globalLogPublisher

from mediatord import __version__
from mediatord.admin.site import AdminAuthenticator, AdminResource, AdminSite, read_admin_token
from mediatord.admin.status import ProcessStates, StatusCollector
from mediatord.admin.status_sources import SLOT_SECONDS, RecentProblems, ReportDirectory, TrafficHistory
from mediatord.app.core_services import CoreServices
from mediatord.config.settings import Config
from mediatord.control.queue_and_account_operations import ControlOperations
from mediatord.control.server import ControlListener, ControlSocket
from mediatord.errors import StartupError
from mediatord.http.client_address import ClientAddressResolver
from mediatord.net.listeners import Listener
from mediatord.observability.event_recorder import EventRecorder
from mediatord.observability.systemd import STATUS_SERVING, STATUS_WAITING_FOR_STORE
from mediatord.push.manual_wakeup import send_manual_wakeup
from mediatord.runtime.secret_files import SecretFileError
from mediatord.store.interfaces.messages import QueueBacklog
from mediatord.workers.shared_listeners import InheritedSocketReactor
from mediatord.workers.supervisor_connection import SupervisorConnection

_log = Logger()

_STATE_STOPPING = "stopping"


class ProblemMonitor(Service):
    """Collects recent problems of a process, as of the supervisor, for the status page."""

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


class TrafficAndProblemMonitor(ProblemMonitor):
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


def load_admin_token(config: Config) -> bytes | None:
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
    monitor = TrafficAndProblemMonitor(core, config.node_name)
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

    async def has_subscriber(did: str) -> bool:
        siblings = core.cluster.siblings if core.cluster else None
        return bool(core.connections.subscribers(did)) or (
            siblings is not None and await siblings.remote_delivery.has_live_session(did)
        )

    wake_account = None
    if core.push is not None:
        wake_account = partial(
            send_manual_wakeup,
            store=core.store,
            sender=core.push.sender,
            monotonic=core.monotonic,
        )
    operations = ControlOperations(core.store, open_recorder, has_subscriber, wake_account)

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
    token: bytes,
    monitor: TrafficAndProblemMonitor,
    worker: SupervisorConnection | None = None,
) -> AdminSite:
    """Build the site of the status page."""

    async def report_process() -> ProcessStates:
        return 1, [monitor.report()]

    async def read_backlog(bounds: Sequence[float], top: int) -> QueueBacklog:
        return await core.gate.run_request(lambda: core.store.read_backlog(bounds, top))

    reports = None if config.admin.reports is None else ReportDirectory(config.admin.reports)
    collector = StatusCollector(
        clock=core.reactor,
        version=__version__,
        node=config.node_name,
        backend=config.storage.backend,
        clustered=config.cluster.listen is not None,
        query_processes=worker.fetch_states if worker else report_process,
        report_process=monitor.report,
        render_metrics=worker.fetch_metrics if worker else core.render_metrics,
        read_backlog=read_backlog,
        pseudonymize=core.recorder.pseudonymize,
        is_own=core.probe_credentials.identities.is_probe_did,
        reports=reports,
    )
    authenticator = AdminAuthenticator(core.reactor, token)

    def reload_token() -> bool:
        """Read the token file again; False if the token in use stays because the file cannot be used."""
        try:
            new = load_admin_token(config)
        except StartupError as error:
            _log.warn("keeping the current token of the status page: {why}", why=str(error))
            return False
        if new is not None:
            authenticator.use(new)
        return True

    core.reloader.add_renewal(reload_token)
    client_addresses = ClientAddressResolver(config.trusted_proxies)
    return AdminSite(core.reactor, AdminResource(collector, authenticator, client_addresses, reports))
