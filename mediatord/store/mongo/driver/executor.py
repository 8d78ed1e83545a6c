"""Commands that are retried until a deadline, and serialisation of work on one key."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from twisted.internet.defer import Deferred, fail
from twisted.internet.interfaces import IReactorTime

from mediatord.errors import StoreUnavailable
from mediatord.store.mongo.driver.commands import Document, MongoCommand, read_cursor
from mediatord.store.mongo.driver.connection_pool import PrimaryConnectionPool
from mediatord.store.mongo.driver.errors import DuplicateKeyError, MongoCommandError, ServerUnreachable, check_reply
from mediatord.store.mongo.driver.transactions import TransactionRunner, get_milliseconds_left, wait_before_retry

P = ParamSpec("P")
T = TypeVar("T")

# Commands that may be slow and delay the replies behind them.
_READ_COMMANDS = frozenset({"find", "aggregate", "getMore", "count", "distinct", "listIndexes", "dbStats"})
_MAX_ATTEMPTS = 5


class OperationExecutor:
    """Runs commands and transactions on the primary; a deadline is a time of the clock."""

    def __init__(self, pool: PrimaryConnectionPool, clock: IReactorTime, transactions: TransactionRunner) -> None:
        self._pool = pool
        self._clock = clock
        self.transact = transactions.transact

    async def command(
        self, command: MongoCommand, deadline: float, *, has_time_limit: bool = True, low_latency: bool = False
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
            reply = await self._exchange(command, deadline, has_time_limit, low_latency)
            try:
                return check_reply(reply)
            except MongoCommandError as error:
                if not error.is_retryable or self._clock.seconds() >= deadline:
                    raise
            await wait_before_retry(self._clock, attempt)

    async def run_reads(
        self, commands: Sequence[MongoCommand], deadline: float
    ) -> list[Document | MongoCommandError]:
        """Send several reads at once and return their replies or errors."""
        while True:
            replies = await self._pool.exchange(commands, deadline, for_reads=True)
            if None not in replies:
                return [_parse_reply_or_error(reply or {}) for reply in replies]
            if self._clock.seconds() >= deadline:
                raise ServerUnreachable("no reply")
            await wait_before_retry(self._clock)

    async def query(self, query: MongoCommand, deadline: float, *, low_latency: bool = False) -> list[Document]:
        """Return all documents that a `find` or `aggregate` command finds; restart it when its cursor is lost."""
        attempt = 0
        while True:
            attempt += 1
            try:
                reply = await self.command(query, deadline, low_latency=low_latency)
                return await read_cursor(lambda more: self._get_more(more, deadline), query, reply)
            except MongoCommandError as error:
                if not error.is_retryable or self._clock.seconds() >= deadline:
                    raise
                await wait_before_retry(self._clock, attempt)

    async def write(self, commands: Sequence[MongoCommand], deadline: float) -> list[Document]:
        """Run idempotent writes one after another, each durable on a majority."""
        return [await self.command(self.with_majority(one, deadline), deadline) for one in commands]

    def with_majority(self, command: MongoCommand, deadline: float) -> MongoCommand:
        """Return the command with write concern `majority` and journaling."""
        concern = {"w": "majority", "j": True, "wtimeout": get_milliseconds_left(self._clock, deadline)}
        return command.with_fields({"writeConcern": concern})

    async def _exchange(
        self, command: MongoCommand, deadline: float, has_time_limit: bool, low_latency: bool = False
    ) -> Document:
        """:raise ServerUnreachable: there was no reply by the deadline."""
        for_reads = not low_latency and next(iter(command.body)) in _READ_COMMANDS
        while True:
            left = get_milliseconds_left(self._clock, deadline)
            sent = command.with_fields({"maxTimeMS": left}) if has_time_limit else command
            (reply,) = await self._pool.exchange([sent], deadline, for_reads=for_reads)
            if reply is not None:
                return reply
            if self._clock.seconds() >= deadline:
                raise ServerUnreachable("no reply")
            await wait_before_retry(self._clock)

    async def _get_more(self, command: MongoCommand, deadline: float) -> Document:
        return check_reply(await self._exchange(command, deadline, has_time_limit=False))


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


def start_operation(work: Coroutine[Any, Any, T]) -> Deferred[T]:
    """Run a coroutine; its Deferred fails with StoreUnavailable for a DuplicateKeyError."""
    return Deferred.fromCoroutine(_convert_duplicate_key(work))


def operation(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Deferred[T]]:
    """Decorate a coroutine function to return a Deferred; see :func:`start_operation`."""

    @wraps(function)
    def start(*args: P.args, **options: P.kwargs) -> Deferred[T]:
        return Deferred.fromCoroutine(_convert_duplicate_key(function(*args, **options)))

    return start


async def _convert_duplicate_key(work: Coroutine[Any, Any, T]) -> T:
    try:
        return await work
    except DuplicateKeyError:
        raise StoreUnavailable() from None


class KeyedMutex:
    """A mutex for each key, which avoids write conflicts within this process; waiters are served in order."""

    def __init__(self, clock: IReactorTime) -> None:
        self._clock = clock
        self._waiters: dict[Hashable, _MutexWaiters] = {}

    def __len__(self) -> int:
        """How many keys are locked."""
        return len(self._waiters)

    async def run_exclusive(self, key: Hashable, work: Callable[[], Awaitable[T]], deadline: float) -> T:
        """
        Run `work` while holding the mutex of the key.

        :raise StoreUnavailable: the mutex was not free by the deadline.
        """
        waiters = self._waiters.setdefault(key, _MutexWaiters(self._clock))
        await waiters.acquire(deadline)
        try:
            return await work()
        finally:
            if not waiters.waiting:
                del self._waiters[key]
            waiters.release()


@dataclass(eq=False, slots=True)
class _MutexWaiters:
    """Queue of one key; waiters resume one after another, not inside each other, however many fail at once."""

    _clock: IReactorTime
    waiting: deque[Deferred[None]] = field(default_factory=deque)
    _is_locked: bool = False
    _is_handing_over: bool = False

    async def acquire(self, deadline: float) -> None:
        if self._is_locked or self.waiting:
            turn: Deferred[None] = Deferred(self.waiting.remove)
            self.waiting.append(turn)
            left = max(deadline - self._clock.seconds(), 0.0)
            await turn.addTimeout(left, self._clock, lambda _, __: fail(StoreUnavailable()))
        self._is_locked = True

    def release(self) -> None:
        self._is_locked = False
        if self._is_handing_over:
            return
        self._is_handing_over = True
        while self.waiting and not self._is_locked:
            self.waiting.popleft().callback(None)
        self._is_handing_over = False
