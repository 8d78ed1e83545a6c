"""
Whether the server answers, so that nobody waits for one that does not.

Whether a server is one to work with.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from mediatord.store.interfaces.store import StoreUnusable
from mediatord.store.mongo.driver.commands import MongoCommand, build_heartbeat_read
from mediatord.store.mongo.driver.executor import OperationExecutor

_log = Logger(namespace="mediatord.store")

# Seconds between two questions to a server that does not answer, and that each of them is given.
PROBE_INTERVAL = 0.5
PROBE_TIMEOUT = 1.0


class ServerMonitor:
    """
    Up until an operation found nobody and a question right after it neither; then down until a question is answered.

    :param probe: ask the server, until a time; fails if it does not answer.
    :param on_up: told of every change.
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
        """What somebody who asked found."""
        if is_up and not self.is_up:
            _log.info("MongoDB answers")
        elif self.is_up and not is_up:
            _log.warn("MongoDB does not answer")
        self.is_up = is_up
        self._on_up(is_up)

    def report_failure(self, *, connected: bool) -> None:
        """
        An operation got no answer: ask.

        :param connected: whether there was a connection; without one, nobody else need try.
        """
        if not connected and self.is_up:
            self.set(False)
        if not self._is_probing:
            self._is_probing = True
            self._probing = Deferred.fromCoroutine(self._probe_until_up())
            self._probing.addErrback(lambda failure: failure.trap(CancelledError) and None)

    def stop(self) -> None:
        """Ask no more."""
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


OLDEST_TESTED_VERSION = NEWEST_TESTED_VERSION = (6, 0)


class ServerCompatibilityCheck:
    """Looks at the server whenever the store is opened; what is only a warning is said once."""

    def __init__(self, hosts: str) -> None:
        self._hosts = hosts
        self._warned = False

    async def look(self, executor: OperationExecutor, deadline: float) -> None:
        """:raise StoreRefused: transactions are not to be had."""
        hello = await executor.command(MongoCommand({"hello": 1}, database="admin"), deadline)
        if "setName" not in hello:
            raise StoreUnusable(f"the MongoDB server at {self._hosts} is not a member of a replica set")
        built = await executor.command(MongoCommand({"buildInfo": 1}, database="admin"), deadline)
        if (
            not OLDEST_TESTED_VERSION <= tuple(built["versionArray"][:2]) <= NEWEST_TESTED_VERSION
            and not self._warned
        ):
            self._warned = True
            _log.warn("MongoDB {version} is not among the versions this was tested with", version=built["version"])
        # The first that needs credentials.
        await executor.query(build_heartbeat_read(), deadline)
