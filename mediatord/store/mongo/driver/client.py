"""Driver front end: named operations with a deadline on the primary of a replica set, which is monitored."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC
from typing import TYPE_CHECKING, TypeVar

from twisted.internet.defer import CancelledError, Deferred, succeed
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater
from twisted.logger import Logger

from mediatord.errors import StoreUnavailable
from mediatord.runtime.reactor_clock import NonDecreasingClock
from mediatord.runtime.request_time import REQUEST_TIME_LIMIT, get_request_start
from mediatord.store.mongo.driver.collection import (
    Collection,
    Document,
    MongoCommand,
    build_probe_read,
    build_probe_write,
)
from mediatord.store.mongo.driver.connection_pool import PrimaryConnectionPool
from mediatord.store.mongo.driver.errors import (
    ENCODING_ERRORS,
    MongoCommandError,
    OperationErrorLog,
    ServerUnreachable,
    UnsupportedServer,
)
from mediatord.store.mongo.driver.operation import Operation, operation, retry_on_duplicate_key
from mediatord.store.mongo.driver.transactions import TransactionRunner, TransactionWork, UndoWork, list_session_ids

if TYPE_CHECKING:
    from mediatord.store.mongo.driver.uri import MongoConnectionSettings

T = TypeVar("T")

# Seconds between probes of an unreachable server, and for each of them.
PROBE_INTERVAL = 0.5
PROBE_TIMEOUT = 1.0
OLDEST_TESTED_VERSION = NEWEST_TESTED_VERSION = (6, 0)
# An operation is not started with less than this share of the time limit left.
_MIN_REMAINING_SHARE = 0.1
# Seconds to clean up at close, and between attempts to undo uncertain commits.
_CLOSE_TIMEOUT = 1.0
_UNDO_RETRY_INTERVAL = 0.1
_POOL_SIZE = 10
# Seconds by which the host's clock may be stepped between two comparisons without being distrusted.
_CLOCK_STEP_TOLERANCE = 1.0

_log = Logger(namespace="mediatord.store")


class ReplicaSetClient:
    """
    Client of a replica set, whose operations end within :data:`REQUEST_TIME_LIMIT`, all operations of one request
    together, and fail at once while the server is known to be unreachable. They fail with StoreUnavailable.

    :param wall: a reactor; its time may be stepped.
    :param observe: called with the name and the duration in seconds of each operation.
    :param on_up: called with whether the server is reachable, at every change.
    :ivar clock: clock of deadlines, which never goes back.
    :ivar transactions: runs transactions, and undoes those whose outcome is unknown.
    """

    def __init__(
        self,
        address: MongoConnectionSettings,
        wall: IReactorTime,
        *,
        observe: Callable[[str, float], None],
        on_up: Callable[[bool], None],
        connections: int = _POOL_SIZE,
    ) -> None:
        self.wall = wall
        self.clock = clock = NonDecreasingClock(wall)
        self.observe = observe
        self._address = address
        self._pool = PrimaryConnectionPool(address, clock, size=connections)
        self._error_log = OperationErrorLog(clock)
        self.transactions = TransactionRunner(self._pool, clock, self._error_log, self._start_recovery)
        self._on_up = on_up
        self._is_up = self._accepting = False
        # Whether the server has to be probed, since an operation got no reply.
        self._is_suspected = self._is_recovering = self._was_unauthorized = False
        self._recovery: Deferred[None] = succeed(None)
        self._warned_of_version = False
        self._running = 0
        self._idle: Deferred[None] | None = None

    @operation
    async def open(self, prepare: Callable[[Operation], Awaitable[None]] | None = None) -> None:
        """
        Connect, and check that the server can be used.

        :param prepare: run before any operation.
        :raise StoreUnavailable: the server is unreachable or rejects the credentials; `open` may be called again.
        :raise UnsupportedServer: the server cannot be used.
        """
        with self._track():
            self._pool.start()
            run = self._start_operation(REQUEST_TIME_LIMIT)
            try:
                await self._check_server(run)
                if prepare is not None:
                    await prepare(run)
            except (ServerUnreachable, MongoCommandError) as error:
                self._set_up(False)
                self.report_failure(f"opening {self._address.hosts}", error)
                raise StoreUnavailable from None
            self._accepting = True
            self._set_up(True)
            self._start_recovery()

    @operation
    async def close(self) -> None:
        """Finish running operations, and disconnect."""
        was_up, self._is_up, self._accepting = self._is_up, False, False
        self._recovery.cancel()
        if not self._pool.is_connected:
            await self._pool.stop()
        await self._recovery
        if self._running:
            self._idle = Deferred()
            # All but the preparation of a large database, which may take longer, has ended by then.
            self._idle.addTimeout(REQUEST_TIME_LIMIT + _CLOSE_TIMEOUT, self.clock, onTimeoutCancel=lambda *_: None)
            await self._idle
        if was_up:
            await self._end_own_sessions(self._start_operation(_CLOSE_TIMEOUT))
        await self._pool.stop()

    @property
    def is_available(self) -> bool:
        """Whether operations are accepted."""
        return self._accepting and self._is_up

    @property
    def time_limit(self) -> float:
        """Seconds that an operation may take in all."""
        return REQUEST_TIME_LIMIT

    @property
    def request_started_at(self) -> float:
        """When the current request began; now if there is none."""
        now = self.wall.seconds()
        return self.clock.seconds() - (now - get_request_start(now))

    @contextmanager
    def operate(self, name: str, *, since: float | None = None, until: float | None = None) -> Iterator[Operation]:
        """
        Context manager: the body is one operation. With hardly any time left it is not run, since it might have to be
        undone.

        :param name: of the operation, for the metric.
        :param since: when it was requested, if before now.
        :param until: the deadline; that of the current request if None.
        :raise StoreUnavailable: it was not run, or has failed.
        """
        now = self.clock.seconds()
        since = now if since is None else since
        until = min(self.request_started_at, since) + REQUEST_TIME_LIMIT if until is None else until
        if not self.is_available or until - now < _MIN_REMAINING_SHARE * REQUEST_TIME_LIMIT:
            raise StoreUnavailable
        with self._track():
            try:
                yield Operation(self._pool, self.clock, self.transactions, until)
            except (ServerUnreachable, MongoCommandError) as error:
                self.report_failure(name, error)
                raise StoreUnavailable from None
            except ENCODING_ERRORS as error:
                self._error_log.report(name, TypeError(type(error).__name__))
                raise StoreUnavailable from None
            finally:
                self.observe(name, self.clock.seconds() - since)

    async def command(
        self, name: str, body: Document, *, database: str = "", has_time_limit: bool = True
    ) -> Document:
        """
        Run an idempotent command.

        :param has_time_limit: whether the command supports `maxTimeMS`.
        :raise DuplicateKeyError: a unique index already has the value.
        """
        with self.operate(name) as run:
            return await run.command(MongoCommand(body, database=database), has_time_limit=has_time_limit)

    async def query(self, name: str, query: MongoCommand) -> list[Document]:
        """Return what a `find` or `aggregate` command finds."""
        with self.operate(name) as run:
            return await run.query(query)

    async def write(self, name: str, commands: Sequence[MongoCommand]) -> list[Document]:
        """
        Run idempotent writes durably. Each document is written atomically, but not all of them together.

        :raise DuplicateKeyError: a unique index already has the value.
        """

        async def write() -> list[Document]:
            with self.operate(name) as run:
                return await run.write(commands)

        return await retry_on_duplicate_key(write)

    async def transact(
        self, name: str, work: TransactionWork[T], *, undo: UndoWork | None = None, reading: bool = False
    ) -> T:
        """
        Run `work` in a transaction, again after a transient error or a collision with a concurrent insert, so it must
        have no other side effects.

        A MediatorError that it raises aborts the transaction, unless inside a CommitWithError.

        :param undo: run later if the outcome of the commit is unknown, to undo what may have been written.
        :param reading: whether it only reads, and may be as slow as other reads.
        :raise DuplicateKeyError: a unique index already has the value.
        """

        async def transact() -> T:
            with self.operate(name) as run:
                return await run.transact(work, undo, reading=reading)

        return await retry_on_duplicate_key(transact)

    async def delete_in_batches(
        self, name: str, collection: Collection, filter: Document, *, batch: int, hint: str | None = None
    ) -> int:
        """Delete the documents that match, in batches that hold up others only briefly; return their number."""
        deleted = 0
        while True:
            found = await self.query(name, collection.find(filter, limit=batch, projection={"_id": 1}, hint=hint))
            if found:
                # Those that have changed since do not match any more, and stay.
                matching = {"_id": {"$in": [one["_id"] for one in found]}, **filter}
                deleted += sum([reply["n"] for reply in await self.write(name, collection.delete(matching))])
            if len(found) < batch:
                return deleted

    def set_session_owner(self, owner: str) -> None:
        """Derive the ids of further sessions from this, so that :meth:`end_sessions` can end them."""
        self.transactions.sessions.set_session_owner(owner)

    async def end_sessions(self, owner: str) -> None:
        """Abort what a dead process left open, which would hold its locks for a minute."""
        await self.command(
            "end_sessions", {"killSessions": list_session_ids(owner)}, database="admin", has_time_limit=False
        )

    def report_failure(self, name: str, error: ServerUnreachable | MongoCommandError) -> None:
        """Log that an operation failed, and probe the server if the error may concern all operations."""
        if isinstance(error, MongoCommandError) and error.is_unauthorized:
            self._error_log.report_unauthorized(self._address.hosts)
            if self._accepting:
                self._suspect(connected=not error.is_authentication_failure)
            else:
                self._pool.drop()  # connections authenticate only once
            return
        self._error_log.report(name, error)
        if isinstance(error, ServerUnreachable) and self._accepting:
            self._suspect(connected=error.connected)

    def _start_operation(self, seconds: float) -> Operation:
        return Operation(self._pool, self.clock, self.transactions, self.clock.seconds() + seconds)

    async def _check_server(self, run: Operation) -> None:
        """
        Check kind and version of the server, and the credentials.

        :raise UnsupportedServer: it has no transactions.
        """
        hello = await run.command(MongoCommand({"hello": 1}, database="admin"))
        if "setName" not in hello:
            raise UnsupportedServer(f"the MongoDB server at {self._address.hosts} is not a member of a replica set")
        built = await run.command(MongoCommand({"buildInfo": 1}, database="admin"))
        tested = OLDEST_TESTED_VERSION <= tuple(built["versionArray"][:2]) <= NEWEST_TESTED_VERSION
        if not tested and not self._warned_of_version:
            self._warned_of_version = True
            _log.warn("MongoDB {version} is untested with this release of mediatord", version=built["version"])
        # The first command that needs credentials.
        await run.query(build_probe_read())

    async def _end_own_sessions(self, run: Operation) -> None:
        """Abort what is still open, if possible; else it holds its locks for a minute."""
        await self.transactions.undo_uncertain(run.deadline)
        ids = self.transactions.sessions.session_ids
        if not ids:
            return
        try:
            await run.command(MongoCommand({"killSessions": ids}, database="admin"), has_time_limit=False)
        except (MongoCommandError, ServerUnreachable):
            pass  # another process can end them later

    def _set_up(self, is_up: bool) -> None:
        if is_up and not self._is_up:
            _log.info("MongoDB is reachable")
        elif self._is_up and not is_up:
            _log.warn("MongoDB is unreachable")
        self._is_up = is_up
        self._on_up(is_up)

    def _suspect(self, *, connected: bool) -> None:
        """
        Probe the server, since an operation got no reply.

        :param connected: whether there was a connection; without one the server is unreachable at once.
        """
        if not connected and self._is_up:
            self._set_up(False)
        self._is_suspected = True
        self._start_recovery()

    def _start_recovery(self) -> None:
        if self._accepting and not self._is_recovering:
            self._recovery = Deferred.fromCoroutine(self._recover())
            self._recovery.addErrback(lambda failure: failure.trap(CancelledError) and None)

    async def _recover(self) -> None:
        """Probe the server until it replies, and undo uncertain commits until none is left."""
        self._is_recovering = True
        try:
            while self._accepting and (self._is_suspected or self.transactions.has_uncertain_commits):
                await self._recover_once()
        finally:
            self._is_recovering = False

    async def _recover_once(self) -> None:
        self._is_suspected = False
        try:
            await self._probe(self._start_operation(PROBE_TIMEOUT))
        except CancelledError:
            raise
        except Exception:
            self._is_suspected = True
            if not self._accepting:
                return  # cancelling an attempt to connect looks like a server that is away
            if self._is_up:
                self._set_up(False)
            await deferLater(self.clock, PROBE_INTERVAL)
            return
        # Before an operation is repeated.
        seconds = REQUEST_TIME_LIMIT if self._is_up else PROBE_TIMEOUT
        await self.transactions.undo_uncertain(self.clock.seconds() + seconds)
        if self._accepting and not self._is_up and not self._is_suspected:
            self._set_up(True)
        if self.transactions.has_uncertain_commits:
            await deferLater(self.clock, _UNDO_RETRY_INTERVAL)

    async def _probe(self, run: Operation) -> None:
        try:
            await run.write(build_probe_write())
        except ServerUnreachable:
            self._pool.drop()  # the other connections are dead as well; another member may be the primary
            raise
        except MongoCommandError as error:
            if error.is_unauthorized:
                self._error_log.report_unauthorized(self._address.hosts)
                self._was_unauthorized = True
            raise
        if self._was_unauthorized:
            self._was_unauthorized = False
            self._pool.drop()  # connections authenticate only once, and some did before the credentials were valid

    @contextmanager
    def _track(self) -> Iterator[None]:
        """Count a running operation, for which :meth:`close` waits."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            if not self._running and self._idle is not None:
                idle, self._idle = self._idle, None
                idle.callback(None)


class ClockSkewMonitor:
    """
    Compares the clock of this host with the server's.

    :param max_skew: seconds that they may be apart.
    :param steady: a monotonic clock, in seconds.
    """

    def __init__(
        self, client: ReplicaSetClient, max_skew: float, steady: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._max_skew = max_skew
        self._steady = steady
        self._is_skewed = False
        self._agreed_at: float | None = None

    @property
    def is_skewed(self) -> bool:
        """Whether the clocks are too far apart, or the host's was stepped since the last comparison."""
        was_stepped = self._agreed_at is not None and abs(self.wall_offset - self._agreed_at) > _CLOCK_STEP_TOLERANCE
        return self._is_skewed or was_stepped

    def check(self) -> None:
        """:raise StoreUnavailable: the clocks are too far apart, so messages would seem to have expired."""
        if self.is_skewed:
            raise StoreUnavailable()

    @property
    def wall_offset(self) -> float:
        """Seconds that the host's clock is ahead of the monotonic one."""
        return self._client.wall.seconds() - self._steady()

    def record_agreement(self, wall_offset: float) -> None:
        """Record that the clocks agreed at this offset."""
        self._is_skewed, self._agreed_at = False, wall_offset

    def build_check(self) -> Document:
        """
        Build an expression that is true if the server's clock agrees with the host's.

        Timestamps that the server fills in do not show a skew, because they never go back.
        """
        difference = {"$abs": {"$subtract": [{"$toLong": "$$NOW"}, round(self._client.wall.seconds() * 1000)]}}
        return {"$lte": [difference, round(self._max_skew * 1000)]}

    async def measure_skew(self) -> float:
        """Compare the clocks; return the seconds that the host's is ahead if that is too much, else 0."""
        asked, wall_offset = self._client.wall.seconds(), self.wall_offset
        hello = await self._client.command("clock", {"hello": 1}, database="admin")
        answered = self._client.wall.seconds()
        theirs = hello["localTime"].replace(tzinfo=UTC).timestamp()
        # The server read its clock between the two.
        ahead = asked - theirs if asked > theirs else min(answered - theirs, 0.0)
        if abs(ahead) > self._max_skew:
            self._is_skewed = True
            return float(ahead)
        self.record_agreement(wall_offset)
        return 0.0
