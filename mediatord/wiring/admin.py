"""The status page for operators."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from twisted.application.service import Service
from twisted.internet.task import LoopingCall
from twisted.logger import Logger, globalLogPublisher

from mediatord import __version__
from mediatord.admin.access import Door, Token, read_token
from mediatord.admin.overview import Overviews, Sources
from mediatord.admin.reports import Reports
from mediatord.admin.site import AdminSite, Office
from mediatord.admin.traffic import SLOT, Traffic
from mediatord.admin.troubles import Troubles
from mediatord.config import Config
from mediatord.interfaces import Backlog
from mediatord.notify import SERVING, WAITING
from mediatord.private_file import PrivateFileError
from mediatord.service import Listener, StartupError
from mediatord.web.peers import Peers
from mediatord.wiring.base import Base
from mediatord.workers import Adopting, Worker

_log = Logger()

_STOPPING = "stopping"


class Watch(Service):
    """Notes what this process does and what goes wrong in it, from its start on."""

    name = "watch"

    def __init__(self, base: Base, node: str) -> None:
        self._base = base
        self._node = node
        self._began = base.steady()
        self._troubles = Troubles(base.reactor)
        self._traffic = Traffic(base.reactor, base.journal.metrics.totals)
        self._samples = LoopingCall(self._traffic.sample)
        self._samples.clock = base.reactor

    def startService(self) -> None:
        """Begin to look."""
        super().startService()
        self._base.journal.on_refusal = self._troubles.refused
        globalLogPublisher.addObserver(self._troubles)
        self._samples.start(SLOT, now=False)

    def stopService(self) -> None:
        """Look no more."""
        super().stopService()
        if self._samples.running:
            self._samples.stop()
        globalLogPublisher.removeObserver(self._troubles)

    def told(self) -> Mapping[str, Any]:
        """What this process knows, as values of JSON; see :class:`~mediatord.admin.overview.Process`."""
        state = self._state()
        return {
            "node": self._node,
            "pid": os.getpid(),
            "state": state,
            "well": state == SERVING,
            "uptime": self._base.steady() - self._began,
            "sockets": len(self._base.connections),
            "slots": self._traffic.slots(),
            "totals": self._traffic.totals(),
            "troubles": self._troubles.told(),
        }

    def _state(self) -> str:
        base = self._base
        if not base.gate.is_open:
            return _STOPPING
        if not base.journal.metrics.storage_is_up:
            return WAITING
        return base.standing.trouble or SERVING


class SupervisorWatch(Service):
    """Notes what goes wrong in the process that keeps the workers."""

    name = "watch"

    def __init__(self, reactor: Any, node: str) -> None:
        self._node = node
        self._troubles = Troubles(reactor)

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


def load_token(config: Config) -> Token | None:
    """
    What the page wants to be shown; None where there is no page.

    :raise StartupError: the token cannot be used.
    """
    if config.admin.listen is None or config.admin.token_file is None:
        return None
    try:
        return read_token(config.admin.token_file)
    except PrivateFileError as error:
        raise StartupError(f"admin.token_file: {error}") from None


def endpoints(config: Config) -> list[str]:
    """All that the daemon listens on for clients, the page last."""
    return [*config.listen, *([config.admin.listen] if config.admin.listen else [])]


def build_admin(base: Base, config: Config, worker: Worker | None = None) -> tuple[list[Service], list[Listener]]:
    """
    What watches, and the listener of the page; nothing of both unless the configuration has one.

    :raise StartupError: token or certificate cannot be used.
    """
    token = load_token(config)
    if token is None or config.admin.listen is None:
        return [], []
    watch = Watch(base, config.node_name)
    if worker is not None:
        worker.tell_state = watch.told
    site = build_admin_site(base, config, token, watch, worker)
    reactor = base.reactor if worker is None else Adopting(base.reactor, worker.place.sockets[len(config.listen)])
    return [watch], [Listener(config.admin.listen, site, reactor)]


def build_admin_site(
    base: Base, config: Config, token: Token, watch: Watch, worker: Worker | None = None
) -> AdminSite:
    """What the listener of the page serves."""

    async def figures() -> bytes:
        return base.journal.metrics.render()

    async def alone() -> tuple[int, Sequence[Mapping[str, Any]]]:
        return 1, [watch.told()]

    async def backlog(bounds: Sequence[float], top: int) -> Backlog:
        return await base.gate.through(lambda: base.store.backlog(bounds, top))

    reports = None if config.admin.reports is None else Reports(config.admin.reports)
    sources = Sources(
        version=__version__,
        node=config.node_name,
        backend=config.storage.backend,
        clustered=config.cluster.listen is not None,
        processes=worker.states if worker else alone,
        here=watch.told,
        figures=worker.page if worker else figures,
        backlog=backlog,
        tag=base.journal.tag,
        reports=reports,
        is_own=base.own.kin.knows,
    )
    clock = base.reactor
    door = Door(clock, token)
    base.reloading.renew_with(lambda: _renew(door, config))
    return AdminSite(Office(clock, door, Peers(config.trusted_proxies), Overviews(clock, sources), reports))


def _renew(door: Door, config: Config) -> bool:
    """Go by the token that the file has now; by the one before if it has none that can be used, which is False."""
    try:
        token = load_token(config)
    except StartupError as error:
        _log.warn("the token of the status page stays as it was: {why}", why=str(error))
        return False
    if token is not None:
        door.use(token)
    return True
