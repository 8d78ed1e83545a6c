"""Builds the supervisor of several workers, and what each worker does for it."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

from twisted.application.service import Service
from twisted.internet.defer import Deferred, DeferredList
from twisted.internet.task import deferLater
from twisted.logger import Logger

from mediatord.app.admin_and_control import ProblemMonitor, list_listen_endpoints, load_admin_token
from mediatord.app.core_services import CoreServices, load_pseudonymizer
from mediatord.app.current_identity import load_identity, parse_identity, plan_key_rollout
from mediatord.app.lifecycle import OrderedService
from mediatord.app.push import load_push_credentials
from mediatord.app.reload import ReloadOutcome, reload_config
from mediatord.config.settings import Config
from mediatord.control.server import ControlListener
from mediatord.errors import ShutdownInProgress, StoreUnavailable
from mediatord.identity.key_file import serialize_keys
from mediatord.identity.mediator_identity import MediatorIdentity
from mediatord.net.listeners import Listener
from mediatord.store.sqlite.database_file import check_store
from mediatord.workers.shared_listeners import InheritedSocketReactor, SharedListeners
from mediatord.workers.supervisor import Supervisor
from mediatord.workers.supervisor_connection import SupervisorConnection

_log = Logger()

# Seconds that a metrics report may wait for the store.
_STORE_CHECK_TIMEOUT = 0.5
# Seconds of `drain_timeout` reserved for the supervisor, and the fraction that its workers have at least.
_SUPERVISOR_STOP_SECONDS, _MIN_WORKER_STOP_FRACTION = 1.0, 0.5
_MAX_NODE_NAME_LENGTH = 63


def build_supervisor(
    reactor: Any,
    config: Config,
    give_up: Callable[[str], None],
    ready: Callable[[], None],
    locks: Iterable[Service],
) -> OrderedService:
    """
    Build the parent process of the workers; nothing is bound or spawned before it starts.

    :param ready: called once, when all workers are ready.
    :param locks: services that start before the workers and stop after them.
    :raise StartupError: keys, identity, log key or an endpoint cannot be used.
    """
    identity = load_identity(config)
    load_pseudonymizer(config, reactor.seconds())
    load_push_credentials(config.push)
    monitors = [ProblemMonitor(reactor, config.node_name)] if load_admin_token(config) else []
    supervisor = Supervisor(
        reactor,
        SharedListeners(
            reactor,
            list_listen_endpoints(config),
            config.workers,
            None if config.control_socket is None else ControlListener(config.control_socket),
        ),
        [(one.node_name, one.model_dump_json()) for one in _derive_worker_configs(config)],
        secret=_derive_worker_secret(identity, config),
        seed=identity.root_secret,
        keys=serialize_keys(identity.keys),
        check=lambda: check_store(config.storage.backend, config.storage.sqlite.path, config.log.directory),
        give_up=give_up,
        ready=ready,
        report_state=monitors[0].report if monitors else None,
        stop_timeout=config.drain_timeout,
    )

    def reload(read: Callable[[], Config]) -> None:
        nonlocal config, identity
        before = identity
        config, outcome, identity = reload_config(config, before, read)
        supervisor.reload(
            [one.model_dump_json() for one in _derive_worker_configs(config)],
            outcome,
            [serialize_keys(keys) for keys in plan_key_rollout(before, identity)],
        )

    root = OrderedService(reactor, config.drain_timeout + 1.0, supervisor.rotate, reload)
    for child in (*locks, *monitors, supervisor):
        child.setServiceParent(root)
    return root


def _derive_worker_configs(config: Config) -> list[Config]:
    return [derive_worker_config(config, number) for number in range(1, config.workers + 1)]


def derive_worker_config(config: Config, number: int) -> Config:
    """The configuration of a worker, numbered from 1: a daemon with its own node name and log directory."""
    suffix = f"-{number}"
    node = config.node_name[: _MAX_NODE_NAME_LENGTH - len(suffix)].rstrip("-._") + suffix
    drain = max(config.drain_timeout - _SUPERVISOR_STOP_SECONDS, config.drain_timeout * _MIN_WORKER_STOP_FRACTION)
    log = config.log.model_copy(update={"directory": config.log.directory / node})
    return config.model_copy(update={"node": node, "log": log, "workers": 1, "drain_timeout": drain})


def build_listeners(reactor: Any, config: Config, site: Any, worker: SupervisorConnection | None) -> list[Listener]:
    """One listener per endpoint; a worker uses the sockets that the supervisor has bound."""
    if worker is None:
        return [Listener(endpoint, site, reactor) for endpoint in config.listen]
    # A further socket is for the status page.
    inherited = zip(config.listen, worker.spec.sockets, strict=False)
    return [Listener(endpoint, site, InheritedSocketReactor(reactor, one)) for endpoint, one in inherited]


def bind_supervisor_callbacks(worker: SupervisorConnection, core: CoreServices) -> None:
    """Let the supervisor rotate logs, reload settings, change keys and collect metrics of this process."""

    def reload(content: Sequence[str]) -> None:
        settings, outcome, keys = content
        config = Config.model_validate_json(settings)
        core.reloader.apply(config, cast(ReloadOutcome, outcome), parse_identity(config, keys))

    worker.handlers |= {
        "rotate": lambda _: core.events.rotate(),
        "reload": reload,
        "keys": lambda keys: core.reloader.use_identity(parse_identity(core.reloader.config, keys)),
        "metrics": _WorkerMetricsReport(core),
    }


class _WorkerMetricsReport:
    """Renders metrics after a brief check of the store, since `/health` may be served by another worker."""

    def __init__(self, core: CoreServices) -> None:
        self._core = core
        self._metrics = core.recorder.metrics
        self._store_check: Deferred[None] | None = None

    async def __call__(self, _: object = None) -> str:
        """The metrics in text format; does not wait long for a slow store."""
        if self._store_check is None or self._store_check.called:
            self._store_check = Deferred.fromCoroutine(self._check_store())
            self._store_check.addErrback(lambda failure: _log.failure("store check failed", failure))
        timeout: Deferred[None] = deferLater(self._core.reactor, _STORE_CHECK_TIMEOUT)
        await DeferredList([self._store_check, timeout], fireOnOneCallback=True, consumeErrors=True)
        timeout.cancel()
        return self._metrics.render().decode("utf-8")

    async def _check_store(self) -> None:
        try:
            await self._core.gate.run_request(lambda: self._core.store.queue_sizes(0))
        except StoreUnavailable:
            self._metrics.set_storage_up(False)
        except ShutdownInProgress:
            pass
        else:
            self._metrics.set_storage_up(True)


def _derive_worker_secret(identity: MediatorIdentity, config: Config) -> bytes:
    """
    The secret that the workers of this daemon share, and no other process has.

    It is the same at every start, so that the next worker takes over what a killed one left in the store. It differs
    between hosts that could use the same store, as their workers cannot reach each other.
    """
    host = "" if config.storage.backend == "sqlite" else socket.gethostname()
    return hmac.digest(identity.root_secret, f"mediatord workers of {config.node_name} at {host}".encode(), "sha256")
