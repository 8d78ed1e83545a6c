"""Availability of the server, and the check that it can be used at all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from mediatord.store.mongo.driver.commands import MongoCommand, build_heartbeat_read
from mediatord.store.mongo.driver.errors import UnsupportedServer
from mediatord.store.mongo.driver.executor import OperationExecutor

_log = Logger(namespace="mediatord.store")

# Seconds between probes of an unreachable server, and for each of them.
PROBE_INTERVAL = 0.5
PROBE_TIMEOUT = 1.0
OLDEST_TESTED_VERSION = NEWEST_TESTED_VERSION = (6, 0)


class ServerMonitor:
    """
    Tracks whether the server is reachable: until an operation and the probe right after it fail, and again as soon as
    a probe succeeds.

    :param probe: called with a deadline; fails if the server does not reply.
    :param on_up: called with every change.
    """

    def __init__(
        self, clock: IReactorTime, probe: Callable[[float], Awaitable[None]], on_up: Callable[[bool], None]
    ) -> None:
        self._clock = clock
        self._probe = probe
        self._on_up = on_up
        self._is_probing = False
        self._probing: Deferred[None] = succeed(None)
        self.is_up = False

    def set(self, is_up: bool) -> None:
        if is_up and not self.is_up:
            _log.info("MongoDB is reachable")
        elif self.is_up and not is_up:
            _log.warn("MongoDB is unreachable")
        self.is_up = is_up
        self._on_up(is_up)

    def report_failure(self, *, connected: bool) -> None:
        """
        Start to probe, since an operation got no reply.

        :param connected: whether there was a connection; without one the server is unreachable at once.
        """
        if not connected and self.is_up:
            self.set(False)
        if not self._is_probing:
            self._is_probing = True
            self._probing = Deferred.fromCoroutine(self._probe_until_up())
            self._probing.addErrback(lambda failure: failure.trap(CancelledError) and None)

    def stop(self) -> None:
        self.is_up = self._is_probing = False
        self._probing.cancel()

    async def _probe_until_up(self) -> None:
        while not await self._probe_once():
            if not self._is_probing:
                return
            if self.is_up:
                self.set(False)
            await deferLater(self._clock, PROBE_INTERVAL)
        self._is_probing = False
        if not self.is_up:
            self.set(True)

    async def _probe_once(self) -> bool:
        try:
            await self._probe(self._clock.seconds() + PROBE_TIMEOUT)
        except CancelledError:
            raise
        except Exception:
            return False
        return True


class ServerCompatibilityCheck:
    """Checks kind and version of the server, and the credentials; warns of an untested version once."""

    def __init__(self, hosts: str) -> None:
        self._hosts = hosts
        self._warned = False

    async def run(self, executor: OperationExecutor, deadline: float) -> None:
        """:raise UnsupportedServer: it has no transactions."""
        hello = await executor.command(MongoCommand({"hello": 1}, database="admin"), deadline)
        if "setName" not in hello:
            raise UnsupportedServer(f"the MongoDB server at {self._hosts} is not a member of a replica set")
        built = await executor.command(MongoCommand({"buildInfo": 1}, database="admin"), deadline)
        tested = OLDEST_TESTED_VERSION <= tuple(built["versionArray"][:2]) <= NEWEST_TESTED_VERSION
        if not tested and not self._warned:
            self._warned = True
            _log.warn("MongoDB {version} is not among the versions this was tested with", version=built["version"])
        # The first command that needs credentials.
        await executor.query(build_heartbeat_read(), deadline)
