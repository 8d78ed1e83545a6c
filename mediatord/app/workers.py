"""Several processes in place of one."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable, Iterable
from typing import Any, cast

from twisted.application.service import Service
from twisted.internet.defer import Deferred, DeferredList
from twisted.logger import Logger
from twisted.python.failure import Failure

from mediatord.app.core_services import CoreServices, load_pseudonymizer
from mediatord.app.http_sites import SupervisorMonitor, list_listen_endpoints, load_admin_token
from mediatord.app.lifecycle import OrderedService
from mediatord.app.reload import ReloadOutcome, load_identity, parse_identity, plan_key_rollout, reload_config
from mediatord.config.settings import Config
from mediatord.control.server import ControlListener
from mediatord.errors import ShutdownInProgress, StoreUnavailable
from mediatord.identity.key_file import serialize_keys
from mediatord.identity.mediator_identity import MediatorIdentity
from mediatord.net.listeners import Listener
from mediatord.store.sqlite.database_file import check_store
from mediatord.workers.shared_listeners import InheritedSocketReactor, SharedListeners
from mediatord.workers.supervisor import Supervisor, WorkerPoolSpec
from mediatord.workers.supervisor_connection import SupervisorConnection
from mediatord.workers.worker_pool import WorkerTimeouts

_log = Logger()

# Seconds that a report may wait for the store.
_STORE_CHECK_TIMEOUT = 0.5
# Seconds of `drain_timeout` that the supervisor has for itself, and the part of it that workers have at least.
_SUPERVISOR_STOP_SECONDS, _MIN_WORKER_STOP_FRACTION = 1.0, 0.5
_MAX_NODE_NAME_LENGTH = 63


def build_supervisor(
    reactor: Any,
    config: Config,
    give_up: Callable[[str], None],
    ready: Callable[[], None],
    before: Iterable[Service],
) -> OrderedService:
    """
    The parent of the workers; nothing is bound or begun before it starts.

    :param ready: told once that all workers are up.
    :param before: services that it is to have as long as there are workers.
    :raise StartupError: what would keep every worker from starting: keys, identity, log key, an endpoint.
    """
    identity = load_identity(config)
    load_pseudonymizer(config, reactor.seconds())
    watches = [SupervisorMonitor(reactor, config.node_name)] if load_admin_token(config) else []
    workers = _derive_worker_configs(config)
    supervisor = Supervisor(
        reactor,
        SharedListeners(
            reactor,
            list_listen_endpoints(config),
            config.workers,
            None if config.control_socket is None else ControlListener(config.control_socket),
        ),
        WorkerPoolSpec(
            [(one.node_name, one.model_dump_json()) for one in workers],
            _derive_worker_secret(identity, config),
            identity.root_secret,
            serialize_keys(identity.keys),
        ),
        check=lambda: check_store(config.storage.backend, config.storage.sqlite.path, config.log.directory),
        give_up=give_up,
        ready=ready,
        timeouts=WorkerTimeouts(stop=config.drain_timeout),
    )
    supervisor.report_state = watches[0].told if watches else None
    reload = _SupervisorReload(config, identity, supervisor)
    root = OrderedService(reactor, config.drain_timeout + 1.0, supervisor.rotate, reload)
    for child in (*before, *watches, supervisor):
        child.setServiceParent(root)
    return root


class _SupervisorReload:
    """Reads the configuration for all workers, and has them apply what can be applied."""

    def __init__(self, config: Config, identity: MediatorIdentity, supervisor: Supervisor) -> None:
        self._config = config
        self._identity = identity
        self._supervisor = supervisor

    def __call__(self, read: Callable[[], Config]) -> None:
        before = self._identity
        self._config, outcome, self._identity = reload_config(self._config, before, read)
        settings = [one.model_dump_json() for one in _derive_worker_configs(self._config)]
        self._supervisor.reload(
            settings, outcome, [serialize_keys(one) for one in plan_key_rollout(before, self._identity)]
        )


def _derive_worker_configs(config: Config) -> list[Config]:
    return [derive_worker_config(config, number) for number in range(1, config.workers + 1)]


def derive_worker_config(config: Config, number: int) -> Config:
    """The configuration of a worker, counted from 1: a daemon of its own, with a log directory of its own."""
    suffix = f"-{number}"
    node = config.node_name[: _MAX_NODE_NAME_LENGTH - len(suffix)].rstrip("-._") + suffix
    drain = max(config.drain_timeout - _SUPERVISOR_STOP_SECONDS, config.drain_timeout * _MIN_WORKER_STOP_FRACTION)
    log = config.log.model_copy(update={"directory": config.log.directory / node})
    return config.model_copy(update={"node": node, "log": log, "workers": 1, "drain_timeout": drain})


def build_listeners(reactor: Any, config: Config, site: Any, worker: SupervisorConnection | None) -> list[Listener]:
    """One for each endpoint: bound by itself, or with a socket that the supervisor has bound."""
    if worker is None:
        return [Listener(endpoint, site, reactor) for endpoint in config.listen]
    # What comes behind is for the page of the operator.
    inherited = zip(config.listen, worker.place.sockets, strict=False)
    return [Listener(endpoint, site, InheritedSocketReactor(reactor, one)) for endpoint, one in inherited]


def bind_supervisor_callbacks(worker: SupervisorConnection, base: CoreServices) -> None:
    """Let the supervisor ask for what this process does only when it is asked."""
    worker.rotate = base.events.rotate

    def reload(settings: str, outcome: str, keys: str) -> None:
        config = Config.model_validate_json(settings)
        base.reloading.apply(config, cast(ReloadOutcome, outcome), parse_identity(config, keys))

    worker.reload = reload
    worker.use_keys = lambda keys: base.reloading.become(parse_identity(base.reloading.config, keys))
    worker.measure = _WorkerMetricsReport(base)


class _WorkerMetricsReport:
    """Renders the metrics of this process, after a short look at the store: `/health` may have asked another."""

    def __init__(self, base: CoreServices) -> None:
        self._base = base
        self._metrics = base.recorder.metrics
        self._store_check: Deferred[None] | None = None

    async def __call__(self) -> bytes:
        """The text; it does not wait for a store that is slow, but says what is known of it."""
        if self._store_check is None or self._store_check.called:
            self._store_check = Deferred.fromCoroutine(self._check_store())
            self._store_check.addErrback(_log_store_check_failure)
        timeouts: Deferred[None] = Deferred()
        timer = self._base.reactor.callLater(_STORE_CHECK_TIMEOUT, timeouts.callback, None)
        await DeferredList([self._store_check, timeouts], fireOnOneCallback=True)
        if timer.active():
            timer.cancel()
        return self._metrics.render()

    async def _check_store(self) -> None:
        try:
            await self._base.gate.run_request(lambda: self._base.store.queue_sizes(0))
        except StoreUnavailable:
            self._metrics.set_storage_up(False)
        except ShutdownInProgress:
            pass
        else:
            self._metrics.set_storage_up(True)


def _log_store_check_failure(failure: Failure) -> None:
    _log.failure("the store could not be looked at", failure)


def _derive_worker_secret(identity: MediatorIdentity, config: Config) -> bytes:
    """
    What the workers of this daemon know each other by, and none but them.

    The same at every start: what a killed one left in the store belongs to the next. Another on every host that could
    use the same store, as workers are out of reach from there.
    """
    host = "" if config.storage.backend == "sqlite" else socket.gethostname()
    return hmac.digest(identity.root_secret, f"mediatord workers of {config.node_name} at {host}".encode(), "sha256")
