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

from mediatord.config import Config
from mediatord.errors import ShuttingDown, StoreUnavailable
from mediatord.identity import Identity
from mediatord.keyfile import write_keys
from mediatord.service import Listener, OrderedService
from mediatord.store import check_store
from mediatord.wiring.admin import SupervisorWatch, endpoints, load_token
from mediatord.wiring.base import Base, load_tags
from mediatord.wiring.identities import load_identity, stages, told_identity
from mediatord.wiring.reloading import Outcome, read_again
from mediatord.workers import Adopting, Orders, Patience, Sharing, Supervisor, Worker

_log = Logger()

# Seconds that a report may wait for the store.
_REPORT = 0.5
# Seconds of `drain_timeout` that the supervisor has for itself, and the part of it that workers have at least.
_OWN, _PART = 1.0, 0.5
_LONGEST_NAME = 63


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
    load_tags(config, reactor.seconds())
    watches = [SupervisorWatch(reactor, config.node_name)] if load_token(config) else []
    workers = _all_settings(config)
    supervisor = Supervisor(
        reactor,
        Sharing(reactor, endpoints(config), config.workers),
        Orders(
            [(one.node_name, one.model_dump_json()) for one in workers],
            _secret(identity, config),
            identity.secret,
            write_keys(identity.keys),
        ),
        check=lambda: check_store(config.storage.backend, config.storage.sqlite.path, config.log.directory),
        give_up=give_up,
        ready=ready,
        patience=Patience(stop=config.drain_timeout),
    )
    supervisor.tell_state = watches[0].told if watches else None
    reload = _Rereading(config, identity, supervisor)
    root = OrderedService(reactor, config.drain_timeout + 1.0, supervisor.rotate, reload)
    for child in (*before, *watches, supervisor):
        child.setServiceParent(root)
    return root


class _Rereading:
    """Reads the configuration for all workers, and has them apply what can be applied."""

    def __init__(self, config: Config, identity: Identity, supervisor: Supervisor) -> None:
        self._config = config
        self._identity = identity
        self._supervisor = supervisor

    def __call__(self, read: Callable[[], Config]) -> None:
        before = self._identity
        self._config, outcome, self._identity = read_again(self._config, before, read)
        settings = [one.model_dump_json() for one in _all_settings(self._config)]
        self._supervisor.reload(settings, outcome, [write_keys(one) for one in stages(before, self._identity)])


def _all_settings(config: Config) -> list[Config]:
    return [worker_settings(config, number) for number in range(1, config.workers + 1)]


def worker_settings(config: Config, number: int) -> Config:
    """The configuration of a worker, counted from 1: a daemon of its own, with a log directory of its own."""
    suffix = f"-{number}"
    node = config.node_name[: _LONGEST_NAME - len(suffix)].rstrip("-._") + suffix
    drain = max(config.drain_timeout - _OWN, config.drain_timeout * _PART)
    log = config.log.model_copy(update={"directory": config.log.directory / node})
    return config.model_copy(update={"node": node, "log": log, "workers": 1, "drain_timeout": drain})


def listeners(reactor: Any, config: Config, site: Any, worker: Worker | None) -> list[Listener]:
    """One for each endpoint: bound by itself, or with a socket that the supervisor has bound."""
    if worker is None:
        return [Listener(endpoint, site, reactor) for endpoint in config.listen]
    # What comes behind is for the page of the operator.
    inherited = zip(config.listen, worker.place.sockets, strict=False)
    return [Listener(endpoint, site, Adopting(reactor, one)) for endpoint, one in inherited]


def put_to_work(worker: Worker, base: Base) -> None:
    """Let the supervisor ask for what this process does only when it is asked."""
    worker.rotate = base.events.rotate

    def reload(settings: str, outcome: str, keys: str) -> None:
        config = Config.model_validate_json(settings)
        base.reloading.apply(config, cast(Outcome, outcome), told_identity(config, keys))

    worker.reload = reload
    worker.use_keys = lambda keys: base.reloading.become(told_identity(base.reloading.config, keys))
    worker.measure = _Measuring(base)


class _Measuring:
    """Renders the metrics of this process, after a short look at the store: `/health` may have asked another."""

    def __init__(self, base: Base) -> None:
        self._base = base
        self._metrics = base.journal.metrics
        self._looking: Deferred[None] | None = None

    async def __call__(self) -> bytes:
        """The text; it does not wait for a store that is slow, but says what is known of it."""
        if self._looking is None or self._looking.called:
            self._looking = Deferred.fromCoroutine(self._look())
            self._looking.addErrback(_not_looked)
        patience: Deferred[None] = Deferred()
        timer = self._base.reactor.callLater(_REPORT, patience.callback, None)
        await DeferredList([self._looking, patience], fireOnOneCallback=True)
        if timer.active():
            timer.cancel()
        return self._metrics.render()

    async def _look(self) -> None:
        try:
            await self._base.gate.through(lambda: self._base.store.queue_sizes(0))
        except StoreUnavailable:
            self._metrics.storage_up(False)
        except ShuttingDown:
            pass
        else:
            self._metrics.storage_up(True)


def _not_looked(failure: Failure) -> None:
    _log.failure("the store could not be looked at", failure)


def _secret(identity: Identity, config: Config) -> bytes:
    """
    What the workers of this daemon know each other by, and none but them.

    The same at every start: what a killed one left in the store belongs to the next. Another on every host that could
    use the same store, as workers are out of reach from there.
    """
    host = "" if config.storage.backend == "sqlite" else socket.gethostname()
    return hmac.digest(identity.secret, f"mediatord workers of {config.node_name} at {host}".encode(), "sha256")
