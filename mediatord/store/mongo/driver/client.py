"""
What a server can be asked, each as one operation.

A MongoDB server, or rather a replica set of them, as the rest of the store knows it.

Our clock and that of the server, which may be a minute apart.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import UTC
from typing import TYPE_CHECKING, Any, TypeVar

from twisted.internet.defer import Deferred
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from mediatord.clock import REQUEST_TIME_LIMIT, NonDecreasingClock, get_request_start
from mediatord.errors import StoreUnavailable
from mediatord.store.interfaces.cluster import MAX_CLOCK_SKEW, ClockSkewError
from mediatord.store.message_operations import OperationObserver
from mediatord.store.mongo.driver.commands import (
    Document,
    MongoCommand,
    build_aggregate,
    build_find,
    build_find_and_modify,
    build_heartbeat_write,
)
from mediatord.store.mongo.driver.connection_pool import PrimaryConnectionPool
from mediatord.store.mongo.driver.errors import (
    ENCODING_ERRORS,
    MongoCommandError,
    OperationErrorLog,
    ServerUnreachable,
)
from mediatord.store.mongo.driver.executor import OperationExecutor
from mediatord.store.mongo.driver.server_monitor import ServerCompatibilityCheck, ServerMonitor
from mediatord.store.mongo.driver.transactions import TransactionWork, UndoWork, list_session_ids

if TYPE_CHECKING:
    from mediatord.store.mongo.driver.uri import MongoConnectionSettings


T = TypeVar("T")


class BaseReplicaSetClient(ABC):
    """All of it fails with StoreUnavailable unless something else is said."""

    @abstractmethod
    async def operate(
        self,
        name: str,
        work: Callable[[OperationExecutor, float], Awaitable[T]],
        *,
        since: float | None = None,
        until: float | None = None,
    ) -> T:
        """
        Do something by a deadline, as one operation.

        :param name: of the operation, for the metric.
        :param since: when it was asked for, if that was before.
        :param until: the deadline, unless it is that of the request it is for; see :mod:`mediatord.clock`.
        """

    async def command(self, name: str, body: Document, *, database: str = "", limited: bool = True) -> Document:
        """
        One command that does no harm when it is done twice.

        :param name: of the operation, for the metric.
        :param limited: whether the command knows `maxTimeMS`.
        :raise Duplicate: a unique index has this value already.
        """
        request = MongoCommand(body, database=database)
        return await self.operate(name, lambda ops, deadline: ops.command(request, deadline, limited=limited))

    async def find(
        self,
        name: str,
        collection: str,
        filter: Document,
        *,
        sort: Document | None = None,
        limit: int = 0,
        skip: int = 0,
        projection: Document | None = None,
        hint: str | None = None,
    ) -> list[Document]:
        """:param limit: 0 for all."""
        question = build_find(collection, filter, sort=sort, limit=limit, skip=skip, projection=projection, hint=hint)
        return await self.ask(name, question)

    async def aggregate(self, name: str, collection: str, pipeline: Sequence[Document]) -> list[Document]:
        return await self.ask(name, build_aggregate(collection, pipeline))

    async def ask(
        self, name: str, question: MongoCommand, *, since: float | None = None, prompt: bool = False
    ) -> list[Document]:
        """
        What one of `finding` and `aggregating` finds; see :meth:`operate`.

        :param prompt: it takes no time, and is not to wait for what does.
        """
        return await self.operate(
            name, lambda ops, deadline: ops.query(question, deadline, prompt=prompt), since=since
        )

    async def write(self, name: str, requests: Sequence[MongoCommand]) -> list[Document]:
        """
        Write what does no harm when it is written twice, one document at a time and durably; see `inserting`,
        `updating` and `deleting`. Each document of them is written or not, whatever becomes of the others.

        :raise Duplicate: a unique index has this value already.
        """
        return await self.operate(name, lambda ops, deadline: ops.write(requests, deadline))

    async def find_and_modify(
        self,
        name: str,
        collection: str,
        filter: Document,
        change: Document | Sequence[Document] | None,
        *,
        upsert: bool = False,
        new: bool = False,
        sort: Document | None = None,
        projection: Document | None = None,
    ) -> Document | None:
        """
        Change one document, or remove it if `change` is None, durably; what it was, or is now if `new`. It must do no
        harm when that is done twice.
        """
        request = build_find_and_modify(
            collection, filter, change, upsert=upsert, new=new, sort=sort, projection=projection
        )
        (reply,) = await self.write(name, [request])
        found: Document | None = reply["value"]
        return found

    async def transact(
        self, name: str, work: TransactionWork[T], *, undo: UndoWork | None = None, reading: bool = False
    ) -> T:
        """
        Do all of `work` or nothing, durably; it is called again when something was in its way, so it must have no
        other effect. A MediatorError that it raises is the answer and undoes what it wrote, but not in a
        :class:`CommitWithError`.

        :param undo: when nobody knows whether it was done: called once the server answers again, to undo by our own
            ids what may have been. What it returns is called when that is durable.
        :param reading: it only reads, which must not hold up what writes.
        :raise Duplicate: a unique index has this value already.
        """
        return await self.operate(name, lambda ops, deadline: ops.transact(work, deadline, undo, reading=reading))

    async def write_heartbeat(self, name: str) -> None:
        """A write, since a server that has lost its majority can still be read."""
        await self.write(name, build_heartbeat_write())

    async def end_sessions(self, owner: str) -> None:
        """Undo what a process has begun and, having died, will not commit; else it is in the way for a minute."""
        await self.command("end_sessions", {"killSessions": list_session_ids(owner)}, database="admin", limited=False)


# Of the time that an operation may take, what has to be left of it.
_MIN_REMAINING_SHARE = 0.1
# Seconds for leaving nothing behind when it is closed, and between attempts to undo something.
_CLOSE_TIMEOUT = 1.0
_UNDO_RETRY_INTERVAL = 0.1
_POOL_SIZE = 10


class ReplicaSetClient(BaseReplicaSetClient):
    """
    Operations end within :data:`PATIENCE` and a moment, whatever the server does, and at once while it is known not
    to answer; those for one request do so all together.

    :param wall: a reactor: what it is told to call later must be called without anybody's help. Somebody may set its
        time.
    :param observe: told what each operation took, in seconds, by its name.
    :param on_up: told whether the server answers, at every change.
    :ivar clock: what deadlines are times of; it goes on when that of the host is set back.
    """

    def __init__(
        self,
        address: MongoConnectionSettings,
        wall: IReactorTime,
        *,
        observe: OperationObserver,
        on_up: Callable[[bool], None],
        connections: int = _POOL_SIZE,
    ) -> None:
        self.wall = wall
        self.clock = clock = NonDecreasingClock(wall)
        self.observe = observe
        self._address = address
        self._pool = PrimaryConnectionPool(address, clock, size=connections)
        self._error_log = OperationErrorLog(clock)
        self._executor = OperationExecutor(
            self._pool, clock, address.database, self._error_log, self._schedule_undo_run
        )
        self._monitor = ServerMonitor(clock, self._probe, on_up)
        self._accepting = False
        self._undo_running = False
        self._locked_out = False
        self._running = 0
        self._idle: Deferred[None] | None = None
        self._compatibility_check = ServerCompatibilityCheck(address.hosts)

    def open(self, prepare: Callable[[OperationExecutor], Awaitable[None]] | None = None) -> Deferred[None]:
        """
        Connect and look whether it can be used.

        :param prepare: to be done before anything else.
        :raise StoreUnavailable: it does not answer, or does not take our credentials. It may be opened again.
        :raise StoreRefused: it must not be used.
        """
        return Deferred.fromCoroutine(self._counted(self._open(prepare)))

    def close(self) -> Deferred[None]:
        """Finish what was begun, and let go."""
        return Deferred.fromCoroutine(self._close())

    @property
    def answers(self) -> bool:
        """Whether it makes sense to ask."""
        return self._accepting and self._monitor.is_up

    @property
    def patience(self) -> float:
        """Seconds that an operation may take in all."""
        return REQUEST_TIME_LIMIT

    @property
    def began(self) -> float:
        """When the request began that is being worked on; now if there is none."""
        now = self.wall.seconds()
        return self.clock.seconds() - (now - get_request_start(now))

    @property
    def has_uncertain_commits(self) -> bool:
        """Whether something may have been done that was said to have failed, and is yet to be undone."""
        return self._executor.transactions.has_uncertain_commits

    def schedule_undo(self, undo: UndoWork) -> None:
        """Have something undone, or done after all, once the server answers; see :meth:`~.Transactions.owe`."""
        self._executor.transactions.schedule_undo(undo)

    async def operate(
        self,
        name: str,
        work: Callable[[OperationExecutor, float], Awaitable[T]],
        *,
        since: float | None = None,
        until: float | None = None,
    ) -> T:
        """What would hardly be done in the time that is left is not begun, so that nobody has to undo it."""
        now = self.clock.seconds()
        since = now if since is None else since
        until = min(self.began, since) + REQUEST_TIME_LIMIT if until is None else until
        if not self.answers or until - now < _MIN_REMAINING_SHARE * REQUEST_TIME_LIMIT:
            raise StoreUnavailable
        return await self._counted(self._operate(name, work, since, until))

    def failed(self, name: str, error: ServerUnreachable | MongoCommandError) -> None:
        """Something could not be done: say so, and find out whether anything can."""
        if isinstance(error, ServerUnreachable):
            self._error_log.report(name, error)
            if self._accepting:
                self._monitor.report_failure(connected=error.connected)
        elif error.is_unauthorized:
            self._error_log.report_credentials(self._address.hosts)
            if self._accepting:
                self._monitor.report_failure(connected=not error.is_authentication_failure)
            else:
                self._pool.drop()  # credentials are shown when connecting only
        else:
            self._error_log.report(name, error)

    @property
    def owner(self) -> str:
        """Whose our sessions are."""
        return self._executor.transactions.sessions.owner

    def set_session_owner(self, owner: str) -> None:
        """Begin transactions from now on in sessions of this owner, which :meth:`end_sessions` can end."""
        self._executor.transactions.sessions.set_session_owner(owner)

    async def _operate(
        self, name: str, work: Callable[[OperationExecutor, float], Awaitable[T]], since: float, until: float
    ) -> T:
        try:
            return await work(self._executor, until)
        except (ServerUnreachable, MongoCommandError) as error:
            self.failed(name, error)
            raise StoreUnavailable from None
        except ENCODING_ERRORS as error:
            self._error_log.report(name, TypeError(type(error).__name__))
            raise StoreUnavailable from None
        finally:
            self.observe(name, self.clock.seconds() - since)

    async def _open(self, prepare: Callable[[OperationExecutor], Awaitable[None]] | None) -> None:
        self._pool.start()
        try:
            await self._compatibility_check.look(self._executor, self.clock.seconds() + REQUEST_TIME_LIMIT)
            if prepare is not None:
                await prepare(self._executor)
        except (ServerUnreachable, MongoCommandError) as error:
            self._monitor.set(False)
            self.failed(f"opening {self._address.hosts}", error)
            raise StoreUnavailable from None
        self._accepting = True
        self._monitor.set(True)
        if self.has_uncertain_commits:
            self._schedule_undo_run()

    async def _close(self) -> None:
        self._accepting, was_up = False, self._monitor.is_up
        self._monitor.stop()
        if not self._pool.connected:
            await self._pool.stop()
        if self._running:
            self._idle = Deferred()
            # But for preparing a large database, which may take longer, everything has ended by then.
            self._idle.addTimeout(REQUEST_TIME_LIMIT + _CLOSE_TIMEOUT, self.clock, onTimeoutCancel=lambda *_: None)
            await self._idle
        if was_up:
            await self._executor.finish(self.clock.seconds() + _CLOSE_TIMEOUT)
        await self._pool.stop()

    async def _probe(self, deadline: float) -> None:
        try:
            await self._executor.write(build_heartbeat_write(), deadline)
        except ServerUnreachable:
            self._pool.drop()  # nor will the other connections be answered: somebody else may be the primary
            raise
        except MongoCommandError as error:
            if error.is_unauthorized:
                self._error_log.report_credentials(self._address.hosts)
                self._locked_out = True
            raise
        if self._locked_out:
            self._locked_out = False
            self._pool.drop()  # credentials are shown when connecting only, and not all have done so since
        if not self._monitor.is_up:
            await self._executor.transactions.undo_uncertain(deadline)  # before anybody can come again with the same

    def _schedule_undo_run(self) -> None:
        """There is something to settle: the first thing to be done as soon as anything can."""
        if self._accepting and not self._undo_running:
            self._undo_running = True
            Deferred.fromCoroutine(self._counted(self._undo_uncertain()))

    async def _undo_uncertain(self) -> None:
        try:
            while self._accepting and self.has_uncertain_commits:
                if self._monitor.is_up:
                    await self._executor.transactions.undo_uncertain(self.clock.seconds() + REQUEST_TIME_LIMIT)
                if self.has_uncertain_commits:
                    await deferLater(self.clock, _UNDO_RETRY_INTERVAL)
        finally:
            self._undo_running = False

    async def _counted(self, work: Coroutine[Any, Any, T] | Awaitable[T]) -> T:
        self._running += 1
        try:
            return await work
        finally:
            self._running -= 1
            if not self._running and self._idle is not None:
                idle, self._idle = self._idle, None
                idle.callback(None)


# Seconds by which ours may be set, or be corrected between two looks, without being doubted.
_CLOCK_STEP_TOLERANCE = 1.0


def build_clock_check(now: float) -> Document:
    """
    An expression of the server: whether its clock agrees with ours.

    What the server fills in as an order of arrival is of no use for that: it never goes back, whatever a clock does.

    :param now: by the clock of this host, not one that a store was given.
    """
    apart = {"$abs": {"$subtract": [{"$toLong": "$$NOW"}, round(now * 1000)]}}
    return {"$lte": [apart, round(MAX_CLOCK_SKEW * 1000)]}


class ClockSkewMonitor:
    """
    What is known of the two.

    :param steady: seconds since any time, which nobody can set.
    """

    def __init__(self, client: ReplicaSetClient, steady: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._steady = steady
        self._is_skewed = False
        self._agreed_at: float | None = None

    @property
    def is_skewed(self) -> bool:
        """Whether they do, or may do since ours was set after it was last found to agree."""
        return self._is_skewed or self._was_stepped

    @property
    def wall_offset(self) -> float:
        """Where ours stands against one that nobody can set."""
        return self._client.wall.seconds() - self._steady()

    def record_agreement(self, wall_offset: float) -> None:
        """They were found to agree when ours stood like this."""
        self._is_skewed, self._agreed_at = False, wall_offset

    def agreeing(self) -> Document:
        """As of now; see :func:`agreeing`."""
        return build_clock_check(self._client.wall.seconds())

    async def compare(self) -> None:
        """:raise ClockDiffers: they are too far apart."""
        asked, wall_offset = self._client.wall.seconds(), self.wall_offset
        hello = await self._client.command("clock", {"hello": 1}, database="admin")
        answered = self._client.wall.seconds()
        theirs = hello["localTime"].replace(tzinfo=UTC).timestamp()
        # It looked at its clock between the two.
        ahead = asked - theirs if asked > theirs else min(answered - theirs, 0.0)
        if abs(ahead) > MAX_CLOCK_SKEW:
            self._is_skewed = True
            raise ClockSkewError(ahead)
        self.record_agreement(wall_offset)

    @property
    def _was_stepped(self) -> bool:
        return self._agreed_at is not None and abs(self.wall_offset - self._agreed_at) > _CLOCK_STEP_TOLERANCE
