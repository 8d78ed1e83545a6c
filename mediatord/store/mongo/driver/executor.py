"""
Commands and transactions, tried again until they are done or time is up.

Transactions that insert what another one may have inserted meanwhile.

Who may change something, within one process.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IReactorTime

from mediatord.errors import StoreUnavailable
from mediatord.store.mongo.driver.commands import Document, MongoCommand, read_cursor
from mediatord.store.mongo.driver.connection_pool import PrimaryConnectionPool
from mediatord.store.mongo.driver.errors import (
    DuplicateKeyError,
    MongoCommandError,
    OperationErrorLog,
    ServerUnreachable,
    check_reply,
)
from mediatord.store.mongo.driver.transactions import TransactionRunner, wait_before_retry

# Commands that may take long, and are done after one another on a connection.
_READ_COMMANDS = frozenset({"find", "aggregate", "getMore", "count", "distinct", "listIndexes", "dbStats"})


class OperationExecutor:
    """
    What a server can be asked. A deadline is a time of the clock.

    :param database: where commands go that do not name another.
    """

    def __init__(
        self,
        pool: PrimaryConnectionPool,
        clock: IReactorTime,
        database: str,
        error_log: OperationErrorLog,
        on_uncertain: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._database = database
        self.transactions = TransactionRunner(pool, clock, database, error_log, on_uncertain)
        self.transact = self.transactions.transact

    async def command(
        self, request: MongoCommand, deadline: float, *, limited: bool = True, prompt: bool = False
    ) -> Document:
        """
        One command that does no harm when it is done twice.

        :param limited: whether the command knows `maxTimeMS`.
        :param prompt: whether it is not to wait for other reads.
        :raise Duplicate: a unique index has this value already.
        :raise Refused: the server said no.
        :raise Unreachable: time is up.
        """
        attempt = 0
        while True:
            attempt += 1
            reply = await self._once(request, deadline, limited, prompt)
            try:
                return check_reply(reply)
            except MongoCommandError as error:
                if not error.is_retryable or self._clock.seconds() >= deadline:
                    raise
            await wait_before_retry(self._clock, attempt)

    async def all(self, requests: Sequence[MongoCommand], deadline: float) -> list[Document | MongoCommandError]:
        """Reads that are sent at once: the reply to each, or what it was refused for."""
        while True:
            replies = await self._pool.reading.exchange(self._database, requests, deadline)
            if None not in replies:
                return [_parse_reply_or_error(reply or {}) for reply in replies]
            if self._clock.seconds() >= deadline:
                raise ServerUnreachable("no answer")
            await wait_before_retry(self._clock)

    async def query(self, question: MongoCommand, deadline: float, *, prompt: bool = False) -> list[Document]:
        """
        All that one of `finding` and `aggregating` finds; begun again when the server loses its place.

        :param prompt: it takes no time, and is not to wait for what does.
        """
        attempt = 0
        collection: str = next(iter(question.body.values()))
        while True:
            attempt += 1
            try:
                reply = await self.command(question, deadline, prompt=prompt)
                return await read_cursor(lambda more: self._more(more, deadline), collection, reply)
            except MongoCommandError as error:
                if not error.is_retryable or self._clock.seconds() >= deadline:
                    raise
                await wait_before_retry(self._clock, attempt)

    async def write(self, requests: Sequence[MongoCommand], deadline: float) -> list[Document]:
        """Writes that do no harm when they are done twice, durable on a majority."""
        return [await self.command(self.durably(request, deadline), deadline) for request in requests]

    async def finish(self, deadline: float) -> None:
        """Leave nothing behind, if that can be helped: what is begun and not ended is in the way for a minute."""
        await self.transactions.undo_uncertain(deadline)
        made = self.transactions.sessions.made
        if not made:
            return
        try:
            await self.command(MongoCommand({"killSessions": made}, database="admin"), deadline, limited=False)
        except (MongoCommandError, ServerUnreachable):
            pass  # others can end them when we are gone

    def durably(self, request: MongoCommand, deadline: float) -> MongoCommand:
        """The same, to be answered when a majority has it on disk."""
        return request.with_fields({"writeConcern": {"w": "majority", "j": True, "wtimeout": self._left(deadline)}})

    async def _once(self, request: MongoCommand, deadline: float, limited: bool, prompt: bool = False) -> Document:
        """:raise Unreachable: time is up."""
        reading = next(iter(request.body)) in _READ_COMMANDS and not prompt
        partition = self._pool.reading if reading else self._pool.writing
        while True:
            left = self._left(deadline)
            sent = request.with_fields({"maxTimeMS": left}) if limited else request
            (reply,) = await partition.exchange(self._database, [sent], deadline)
            if reply is not None:
                return reply
            if self._clock.seconds() >= deadline:
                raise ServerUnreachable("no answer")
            await wait_before_retry(self._clock)

    async def _more(self, request: MongoCommand, deadline: float) -> Document:
        return check_reply(await self._once(request, deadline, limited=False))

    def _left(self, deadline: float) -> int:
        """Milliseconds."""
        return max(int((deadline - self._clock.seconds()) * 1000), 1)


def _parse_reply_or_error(reply: Document) -> Document | MongoCommandError:
    try:
        return check_reply(reply)
    except MongoCommandError as error:
        return error


T = TypeVar("T")

_MAX_ATTEMPTS = 5


async def retry_on_duplicate_key(transact: Callable[[], Awaitable[T]]) -> T:
    """
    Again, since what was in the way will be seen then.

    :raise Duplicate: it was not.
    """
    for _ in range(_MAX_ATTEMPTS - 1):
        try:
            return await transact()
        except DuplicateKeyError:
            continue
    return await transact()


def start_operation(work: Coroutine[Any, Any, T]) -> Deferred[T]:
    """Do `work`, for which a duplicate that stays in the way is a failure of the store."""
    return Deferred.fromCoroutine(_convert_duplicate_key(work))


async def _convert_duplicate_key(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except DuplicateKeyError:
        raise StoreUnavailable() from None


class KeyedMutex:
    """
    Those who are about to change the same thing wait in line, in their order, instead of running into each other at
    the server.
    """

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._waiters: dict[Hashable, _MutexWaiters] = {}

    def __len__(self) -> int:
        """How many things are being changed."""
        return len(self._waiters)

    async def run_exclusive(self, key: Hashable, work: Callable[[], Awaitable[T]], deadline: float) -> T:
        """
        Do it when everybody who came before has done theirs.

        :raise StoreUnavailable: that was not so by the deadline.
        """
        waiters = self._waiters.setdefault(key, _MutexWaiters(self._clock))
        await waiters.enter(deadline)
        try:
            return await work()
        finally:
            if waiters.is_last:
                del self._waiters[key]
            waiters.leave()


@dataclass(eq=False, slots=True)
class _MutexWaiters:
    """Those who wait do not go on inside each other, however many fail at once."""

    _clock: IReactorTime
    _waiting: deque[Deferred[None]] = field(default_factory=deque)
    _busy: bool = False
    _is_handing_over: bool = False

    @property
    def is_last(self) -> bool:
        """Whether nobody comes after the one whose turn it is."""
        return not self._waiting

    async def enter(self, deadline: float) -> None:
        if self._busy or self._waiting:
            turn: Deferred[None] = Deferred(self._waiting.remove)
            self._waiting.append(turn)
            left = max(deadline - self._clock.seconds(), 0.0)
            await turn.addTimeout(left, self._clock, lambda _, __: fail(StoreUnavailable()))
        self._busy = True

    def leave(self) -> None:
        self._busy = False
        if self._is_handing_over:
            return
        self._is_handing_over = True
        while self._waiting and not self._busy:
            self._waiting.popleft().callback(None)
        self._is_handing_over = False
