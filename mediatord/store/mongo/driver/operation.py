"""Operations: commands with a common deadline, until which they are retried; serialisation of work on one key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from twisted.internet.defer import Deferred, DeferredLock
from twisted.internet.interfaces import IReactorTime
from twisted.internet.task import deferLater

from mediatord.errors import StoreUnavailable
from mediatord.store.mongo.driver.collection import Document, MongoCommand, read_cursor
from mediatord.store.mongo.driver.connection_pool import PrimaryConnectionPool
from mediatord.store.mongo.driver.errors import DuplicateKeyError, MongoCommandError, ServerUnreachable, check_reply
from mediatord.store.mongo.driver.transactions import (
    TransactionRunner,
    TransactionWork,
    UndoWork,
    await_until,
    get_milliseconds_left,
    wait_before_retry,
)

P = ParamSpec("P")
T = TypeVar("T")

# Commands that may be slow and delay the replies behind them.
_READ_COMMANDS = frozenset({"find", "aggregate", "getMore", "count", "distinct", "listIndexes", "dbStats"})
_MAX_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class Operation:
    """
    Runs commands and transactions on the primary.

    :param deadline: of all of them together, a time of the clock.
    """

    pool: PrimaryConnectionPool
    clock: IReactorTime
    transactions: TransactionRunner
    deadline: float

    def until(self, deadline: float) -> Operation:
        """Return the operation with another deadline."""
        return Operation(self.pool, self.clock, self.transactions, deadline)

    @property
    def is_over(self) -> bool:
        """Whether the deadline has passed."""
        return self.clock.seconds() >= self.deadline

    async def command(
        self, command: MongoCommand, *, has_time_limit: bool = True, low_latency: bool = False
    ) -> Document:
        """
        Run an idempotent command.

        :param has_time_limit: whether the command supports `maxTimeMS`.
        :param low_latency: whether it is fast, and must not queue behind slow reads.
        :raise DuplicateKeyError: a unique index already has the value.
        :raise MongoCommandError: the server rejected the command.
        :raise ServerUnreachable: there was no reply by the deadline.
        """
        attempt = 0
        while True:
            attempt += 1
            reply = await self._exchange(command, has_time_limit, low_latency)
            try:
                return check_reply(reply)
            except MongoCommandError as error:
                if not error.is_retryable or self.is_over:
                    raise
            await wait_before_retry(self.clock, attempt)

    async def run_reads(self, commands: Sequence[MongoCommand]) -> list[Document | MongoCommandError]:
        """Send several reads at once and return their replies or errors."""
        while None in (replies := await self.pool.exchange(commands, self.deadline, for_reads=True)):
            await self._wait_after_silence()
        return [_parse_reply_or_error(reply or {}) for reply in replies]

    async def query(self, query: MongoCommand, *, low_latency: bool = False) -> list[Document]:
        """Return all documents that a `find` or `aggregate` command finds; restart it when its cursor is lost."""
        attempt = 0
        while True:
            attempt += 1
            try:
                reply = await self.command(query, low_latency=low_latency)
                return await read_cursor(self._get_more, query, reply)
            except MongoCommandError as error:
                if not error.is_retryable or self.is_over:
                    raise
                await wait_before_retry(self.clock, attempt)

    async def write(self, commands: Sequence[MongoCommand]) -> list[Document]:
        """Run idempotent writes one after another, each durable on a majority."""
        return [await self.command(self.with_majority(one)) for one in commands]

    def with_majority(self, command: MongoCommand) -> MongoCommand:
        """Return the command with write concern `majority` and journaling."""
        concern = {"w": "majority", "j": True, "wtimeout": get_milliseconds_left(self.clock, self.deadline)}
        return command.with_fields({"writeConcern": concern})

    async def transact(
        self,
        work: TransactionWork[T],
        undo: UndoWork | None = None,
        *,
        tries: int | None = None,
        reading: bool = False,
    ) -> T:
        """See :meth:`~mediatord.store.mongo.driver.transactions.TransactionRunner.transact`."""
        return await self.transactions.transact(work, self.deadline, undo, tries=tries, reading=reading)

    async def _exchange(self, command: MongoCommand, has_time_limit: bool, low_latency: bool = False) -> Document:
        """:raise ServerUnreachable: there was no reply by the deadline."""
        for_reads = not low_latency and next(iter(command.body)) in _READ_COMMANDS
        while True:
            left = get_milliseconds_left(self.clock, self.deadline)
            sent = command.with_fields({"maxTimeMS": left}) if has_time_limit else command
            (reply,) = await self.pool.exchange([sent], self.deadline, for_reads=for_reads)
            if reply is not None:
                return reply
            await self._wait_after_silence()

    async def _wait_after_silence(self) -> None:
        if self.is_over:
            raise ServerUnreachable("no reply")
        await wait_before_retry(self.clock)

    async def _get_more(self, command: MongoCommand) -> Document:
        return check_reply(await self._exchange(command, has_time_limit=False))


def _parse_reply_or_error(reply: Document) -> Document | MongoCommandError:
    try:
        return check_reply(reply)
    except MongoCommandError as error:
        return error


async def retry_on_duplicate_key(transact: Callable[[], Awaitable[T]]) -> T:
    """
    Repeat a transaction that collided with a concurrent insert, which it sees the next time.

    :raise DuplicateKeyError: in every attempt.
    """
    for _ in range(_MAX_ATTEMPTS - 1):
        try:
            return await transact()
        except DuplicateKeyError:
            continue
    return await transact()


def operation(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Deferred[T]]:
    """Decorate a coroutine function to return a Deferred, and to fail with StoreUnavailable for DuplicateKeyError."""

    async def convert_duplicate_key(work: Coroutine[Any, Any, T]) -> T:
        try:
            return await work
        except DuplicateKeyError:
            raise StoreUnavailable() from None

    @wraps(function)
    def start(*args: P.args, **options: P.kwargs) -> Deferred[T]:
        return Deferred.fromCoroutine(convert_duplicate_key(function(*args, **options)))

    return start


class KeyedMutex:
    """A mutex for each key, which avoids write conflicts within this process; waiters are served in order."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._locks: dict[Hashable, DeferredLock] = {}

    async def run_exclusive(self, key: Hashable, work: Callable[[], Awaitable[T]], deadline: float) -> T:
        """
        Run `work` while holding the mutex of the key.

        :raise StoreUnavailable: the mutex was not free by the deadline.
        """
        lock = self._locks.setdefault(key, DeferredLock())
        acquired = lock.acquire()
        is_contended = not acquired.called
        if is_contended:
            await await_until(deadline, self._clock, acquired, StoreUnavailable())
        try:
            if is_contended:
                await deferLater(self._clock, 0)  # not inside the work before, however many fail at once
            return await work()
        finally:
            lock.release()
            if not lock.locked:
                del self._locks[key]
